//! Loops of experts: the order of rows, copies of rows, one matmul per expert.

use super::error::OperandError;
use super::gemm::{Mat, multiply};
use super::operands::{Operands, dims, same};
use super::scratch::Scratch;
use super::strides;
use super::view::View;
use shardlab_plan::ir::{RowLimit, op};
use std::ops::Range;

/// Loads all integers of a view.
fn integers(view: &View) -> Result<Vec<i64>, OperandError> {
    let mut all = vec![0; view.numel];
    view.load_ids(0, &mut all)?;
    Ok(all)
}

/// Computes `ids -> local`.
pub(super) fn local(o: &Operands<'_>, experts: usize) -> Result<(), OperandError> {
    o.expect(1, 1)?;
    let (ids, out) = (o.input(0)?, o.output(0)?);
    let ids = integers(&ids)?;
    let ranks = out.numel / ids.len().max(1);
    same("the ids of each rank", ranks * ids.len(), out.numel)?;
    for rank in 0..ranks {
        let first = (rank * experts) as i64;
        let local: Vec<i64> = ids.iter().map(|id| id - first).collect();
        out.store_ids(rank * ids.len(), &local);
    }
    Ok(())
}

/// Returns whether a rank with this many experts gets a row, from the choices of the row.
pub(crate) fn is_pushed(choices: &[i64], experts: u64) -> bool {
    let local = |c: &i64| u64::try_from(*c).is_ok_and(|c| c < experts);
    choices.iter().any(local)
}

/// Computes `local -> position`.
pub(super) fn pushed(o: &Operands<'_>, of: &op::PushedRows) -> Result<(), OperandError> {
    o.expect(1, 1)?;
    let (local, out) = (o.input(0)?, o.output(0)?);
    let (rows, k) = strides::matrix(o.slot(false, 0)?);
    let ranks = of.ranks as usize;
    same("the rows of all ranks", rows, out.numel)?;
    let choices = integers(&local)?;
    let tokens = rows / ranks;
    let mut position = vec![-1; rows];
    for (row, choices) in choices.chunks(k).enumerate() {
        if is_pushed(choices, of.experts) {
            let (rank, token) = (row / tokens, row % tokens);
            position[token * ranks + rank] = row as i64;
        }
    }
    out.store_ids(0, &position);
    Ok(())
}

/// Returns the limit of the choices of a rank on each other one, of `choices` of its own.
pub(crate) const fn dispatch_limit(of: &op::DispatchExperts, choices: usize) -> RowLimit {
    RowLimit {
        rows: of.slots,
        balanced: choices as u64 / of.ranks,
        drop: of.drop,
    }
}

/// Checks that as many choices find rows, unless those without are left out.
fn find_rows(wanted: usize, limit: RowLimit) -> Result<(), OperandError> {
    let wanted = wanted as u64;
    match wanted > limit.rows && !limit.drop {
        true => Err(OperandError::Overflow { wanted, limit }),
        false => Ok(()),
    }
}

/// Computes `ids -> local, position, counts`.
pub(super) fn dispatch(o: &Operands<'_>, of: &op::DispatchExperts) -> Result<(), OperandError> {
    o.expect(1, 3)?;
    let (ids, local, position, counts) = (o.input(0)?, o.output(0)?, o.output(1)?, o.output(2)?);
    let [ranks, experts, slots] = [of.ranks, of.experts, of.slots].map(|n| n as usize);
    same("the places", ranks * slots, local.numel)?;
    same("the positions", ids.numel, position.numel)?;
    same("the counts", ranks * experts, counts.numel)?;
    let ids = integers(&ids)?;
    let mut count = vec![0i64; ranks * experts];
    let mut taken = vec![0; ranks];
    let mut expert_at = vec![-1i64; ranks * slots];
    let mut places = Vec::with_capacity(ids.len());
    for (row, &value) in ids.iter().enumerate() {
        let id = usize::try_from(value).ok().filter(|id| *id < count.len());
        let id = id.ok_or(OperandError::Label {
            row,
            value,
            limit: ranks * experts,
        })?;
        count[id] += 1;
        let rank = id / experts;
        taken[rank] += 1;
        let free = taken[rank] <= slots;
        let place = rank * slots + taken[rank] - 1;
        if free {
            expert_at[place] = (id % experts) as i64;
        }
        places.push(if free { place as i64 } else { -1 });
    }
    let most = taken.iter().copied().max().unwrap_or(0);
    find_rows(most, dispatch_limit(of, ids.len()))?;
    local.store_ids(0, &expert_at);
    position.store_ids(0, &places);
    counts.store_ids(0, &count);
    Ok(())
}

/// Returns the expert of each choice that falls on one of these and finds a row.
fn with_rows(
    ids: &[i64],
    experts: usize,
    limit: Option<RowLimit>,
) -> Result<Vec<Option<usize>>, OperandError> {
    let local = |&id: &i64| usize::try_from(id).ok().filter(|e| *e < experts);
    let mut all: Vec<Option<usize>> = ids.iter().map(local).collect();
    let Some(limit) = limit else {
        return Ok(all);
    };
    find_rows(all.iter().flatten().count(), limit)?;
    let here = all.iter_mut().filter(|e| e.is_some());
    here.skip(limit.rows as usize).for_each(|e| *e = None);
    Ok(all)
}

/// Computes `ids -> offsets, position`.
pub(super) fn sort(o: &Operands<'_>, of: &op::SortExperts) -> Result<(), OperandError> {
    let experts = of.experts as usize;
    o.expect(1, 2)?;
    let (ids, offsets, position) = (o.input(0)?, o.output(0)?, o.output(1)?);
    same("the offsets", experts + 1, offsets.numel)?;
    same("the positions", ids.numel, position.numel)?;
    let kept = with_rows(&integers(&ids)?, experts, of.limit)?;
    let mut ends = vec![0i64; experts + 1];
    for e in kept.iter().flatten() {
        ends[e + 1] += 1;
    }
    for e in 0..experts {
        ends[e + 1] += ends[e];
    }
    offsets.store_ids(0, &ends);
    let mut next = ends;
    let rows: Vec<i64> = kept
        .iter()
        .map(|e| {
            e.map_or(-1, |e| {
                next[e] += 1;
                next[e] - 1
            })
        })
        .collect();
    position.store_ids(0, &rows);
    Ok(())
}

/// Returns the rows that `position` names, checked against their number; `None` where it is
/// negative.
fn positions(view: &View, rows: usize) -> Result<Vec<Option<usize>>, OperandError> {
    let check = |(i, &p): (usize, &i64)| match usize::try_from(p) {
        Ok(p) if p < rows => Ok(Some(p)),
        Ok(_) => Err(OperandError::Label {
            row: i,
            value: p,
            limit: rows,
        }),
        Err(_) => Ok(None),
    };
    integers(view)?.iter().enumerate().map(check).collect()
}

/// Computes `x, position -> rows`.
pub(super) fn permute(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    let (tokens, d) = strides::matrix(o.slot(false, 0)?);
    let (rows, width) = strides::matrix(o.slot(true, 0)?);
    same("a row", d, width)?;
    let position = positions(&o.input(1)?, rows)?;
    let k = position.len() / tokens.max(1);
    same("the positions", tokens * k, position.len())?;
    let mut row = Scratch::take(d);
    for (t, to) in position.chunks(k.max(1)).enumerate() {
        x.load(t * d, &mut row);
        for &p in to.iter().flatten() {
            out.store(p * d, &row);
        }
    }
    Ok(())
}

/// Computes `rows, position -> y`.
pub(super) fn unpermute(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    let (rows, d) = strides::matrix(o.slot(false, 0)?);
    let (tokens, width) = strides::matrix(o.slot(true, 0)?);
    same("a row", d, width)?;
    let position = positions(&o.input(1)?, rows)?;
    let k = position.len() / tokens.max(1);
    same("the positions", tokens * k, position.len())?;
    let [mut row, mut sum] = [d, d].map(Scratch::take);
    for (t, from) in position.chunks(k.max(1)).enumerate() {
        sum.fill(0.0);
        for &p in from.iter().flatten() {
            x.load(p * d, &mut row);
            sum.iter_mut().zip(row.iter()).for_each(|(s, v)| *s += v);
        }
        out.store(t * d, &sum);
    }
    Ok(())
}

/// Returns the rows of each expert.
fn experts(offsets: &View, rows: usize) -> Result<Vec<Range<usize>>, OperandError> {
    let ends = integers(offsets)?;
    let in_order = ends.first() == Some(&0) && ends.is_sorted();
    if !in_order || ends.last().is_none_or(|&e| e as usize > rows) {
        return Err(OperandError::Shape(format!(
            "experts start at rows {ends:?} of {rows}"
        )));
    }
    Ok(ends
        .windows(2)
        .map(|w| w[0] as usize..w[1] as usize)
        .collect())
}

/// Returns how many rows experts have, from the offsets of these.
pub(super) fn used_rows(offsets: &View, rows: usize) -> Result<usize, OperandError> {
    Ok(experts(offsets, rows)?.last().map_or(0, |last| last.end))
}

/// Computes `table, offsets -> rows`.
pub(super) fn repeat(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (table, out) = (o.input(0)?, o.output(0)?);
    let (count, d) = strides::matrix(o.slot(false, 0)?);
    let (rows, width) = strides::matrix(o.slot(true, 0)?);
    same("a row", d, width)?;
    let experts = experts(&o.input(1)?, rows)?;
    same("the experts", count, experts.len())?;
    let mut row = Scratch::take(d);
    for (e, of) in experts.into_iter().enumerate() {
        table.load(e * d, &mut row[..d]);
        for r in of {
            out.store(r * d, &row[..d]);
        }
    }
    Ok(())
}

/// Computes `d_rows, offsets -> d_table`, in the order of rows; zeros for experts without rows.
pub(super) fn repeat_grad(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    let (rows, d) = strides::matrix(o.slot(false, 0)?);
    let (count, width) = strides::matrix(o.slot(true, 0)?);
    same("a row", d, width)?;
    let experts = experts(&o.input(1)?, rows)?;
    same("the experts", count, experts.len())?;
    let [mut row, mut sum] = [d, d].map(Scratch::take);
    for (e, of) in experts.into_iter().enumerate() {
        sum.fill(0.0);
        for r in of {
            x.load(r * d, &mut row[..d]);
            sum.iter_mut().zip(row.iter()).for_each(|(s, v)| *s += v);
        }
        out.store(e * d, &sum[..d]);
    }
    Ok(())
}

/// Computes `a, b, offsets -> c`.
pub(super) fn grouped(o: &Operands<'_>, tb: bool) -> Result<(), OperandError> {
    o.expect(3, 1)?;
    let (rows, k) = strides::matrix(o.slot(false, 0)?);
    let [count, one, two] = dims::<3>(o.slot(false, 1)?)?;
    let (inner, n) = if tb { (two, one) } else { (one, two) };
    let out = o.output(0)?;
    same("the inner dimension of the experts", k, inner)?;
    same("the rows of the experts", rows * n, out.numel)?;
    let experts = experts(&o.input(2)?, rows)?;
    same("the experts", count, experts.len())?;
    let (a, b) = (o.floats(0)?, o.floats(1)?);
    for (e, of) in experts.into_iter().enumerate() {
        if of.is_empty() {
            continue;
        }
        let weights = &b[e * k * n..][..k * n];
        let b = match tb {
            true => Mat::rows(weights, k).t(),
            false => Mat::rows(weights, n),
        };
        let a = Mat::rows(&a[of.start * k..of.end * k], k);
        let mut c = Scratch::take(of.len() * n);
        let to = Mat::target(&mut c, n);
        // SAFETY: all three are as long as their shapes say, and the result is scratch memory.
        unsafe { multiply(of.len(), n, k, a, b, to, false) };
        out.store(of.start * n, &c);
    }
    Ok(())
}

/// Returns the product of the reciprocals of two scales, in inputs 2 and 3.
fn inverse(o: &Operands<'_>) -> Result<f32, OperandError> {
    let one = |n: usize| {
        let of = o.floats(n)?;
        same("the scale of a factor", 1, of.len())?;
        Ok::<_, OperandError>(of[0])
    };
    Ok(one(2)? * one(3)?)
}

/// Multiplies sums and stores them.
fn scale_and_store(mut c: Scratch, by: f32, at: usize, out: &View) {
    c.iter_mut().for_each(|sum| *sum *= by);
    out.store(at, &c);
}

/// Computes `a, b, inverse_a, inverse_b, offsets -> c`.
pub(super) fn scaled(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(5, 1)?;
    let (rows, k) = strides::matrix(o.slot(false, 0)?);
    let [count, n, inner] = dims::<3>(o.slot(false, 1)?)?;
    let out = o.output(0)?;
    same("the inner dimension of the experts", k, inner)?;
    same("the rows of the experts", rows * n, out.numel)?;
    let experts = experts(&o.input(4)?, rows)?;
    same("the experts", count, experts.len())?;
    let (a, b, inverse) = (o.floats(0)?, o.floats(1)?, inverse(o)?);
    for (e, of) in experts
        .into_iter()
        .enumerate()
        .filter(|(_, of)| !of.is_empty())
    {
        let b = Mat::rows(&b[e * k * n..][..k * n], k).t();
        let a = Mat::rows(&a[of.start * k..of.end * k], k);
        let mut c = Scratch::take(of.len() * n);
        let to = Mat::target(&mut c, n);
        // SAFETY: all three are as long as their shapes say, and the result is scratch memory.
        unsafe { multiply(of.len(), n, k, a, b, to, false) };
        scale_and_store(c, inverse, of.start * n, &out);
    }
    Ok(())
}

/// Computes `a, b, inverse_a, inverse_b, offsets -> d_w`.
pub(super) fn scaled_weight_grad(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(5, 1)?;
    let (m, rows) = strides::matrix(o.slot(false, 0)?);
    let (n, other) = strides::matrix(o.slot(false, 1)?);
    let out = o.output(0)?;
    same("the rows of the experts", rows, other)?;
    let experts = experts(&o.input(4)?, rows)?;
    same("the weights", experts.len() * m * n, out.numel)?;
    let (a, b, inverse) = (o.floats(0)?, o.floats(1)?, inverse(o)?);
    for (e, of) in experts.into_iter().enumerate() {
        let mut c = Scratch::zeroed(m * n);
        if !of.is_empty() {
            let a = Mat::rows(&a[of.start..], rows);
            let b = Mat::rows(&b[of.start..], rows).t();
            let to = Mat::target(&mut c, n);
            // SAFETY: each row of a factor has `rows` columns, of which the expert's are read; the
            // result is scratch memory.
            unsafe { multiply(m, n, of.len(), a, b, to, false) };
        }
        scale_and_store(c, inverse, e * m * n, &out);
    }
    Ok(())
}

/// Computes `a, b, offsets -> d_w`.
pub(super) fn grouped_weight_grad(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(3, 1)?;
    let (rows, m) = strides::matrix(o.slot(false, 0)?);
    let (other, n) = strides::matrix(o.slot(false, 1)?);
    let out = o.output(0)?;
    same("the rows of the experts", rows, other)?;
    let experts = experts(&o.input(2)?, rows)?;
    same("the weights", experts.len() * m * n, out.numel)?;
    let (a, b) = (o.floats(0)?, o.floats(1)?);
    let mut c = Scratch::take(m * n);
    for (e, of) in experts.into_iter().enumerate() {
        if of.is_empty() {
            c.fill(0.0);
        } else {
            let a = Mat::rows(&a[of.start * m..of.end * m], m).t();
            let b = Mat::rows(&b[of.start * n..of.end * n], n);
            let to = Mat::target(&mut c, n);
            // SAFETY: all three are as long as their shapes say, and the result is scratch memory.
            unsafe { multiply(m, n, of.len(), a, b, to, false) };
        }
        out.store(e * m * n, &c);
    }
    Ok(())
}
