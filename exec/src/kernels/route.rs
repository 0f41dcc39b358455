//! Loops of routers: scores, choice, losses. Sums over a row and over rows are in order.

use super::error::OperandError;
use super::math::{exp, max, sigmoid};
use super::operands::{Operands, same};
use super::scratch::Scratch;
use super::strides;
use shardlab_plan::ir::{DrawnColumns, ForcedChoice, ForcedColumns, op, round_robin};

/// Replaces logits by their softmax, or by sigmoids. Returns the log-sum-exp (0 for sigmoids).
fn scores(row: &mut [f32], sigmoids: bool) -> f32 {
    if sigmoids {
        row.iter_mut().for_each(|v| *v = sigmoid(*v));
        return 0.0;
    }
    let m = max(row);
    let mut sum = 0.0;
    for v in row.iter_mut() {
        *v = exp(*v - m);
        sum += *v;
    }
    row.iter_mut().for_each(|v| *v /= sum);
    m + sum.ln()
}

/// Divides sigmoids by their sum.
fn normalize(row: &mut [f32]) {
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= sum);
}

/// Returns the column of the largest value that is not taken; the lowest of equal ones. A NaN is
/// never larger.
fn largest(row: &[f32], taken: impl Fn(usize) -> bool) -> usize {
    let mut best = None;
    for (i, &v) in row.iter().enumerate() {
        if !taken(i) && best.is_none_or(|b: usize| v > row[b]) {
            best = Some(i);
        }
    }
    best.unwrap_or(0)
}

/// Hides the columns of all but the best groups: those whose two largest values add up to most.
fn keep_groups(row: &mut [f32], groups: usize, kept: usize) {
    let size = row.len() / groups.max(1);
    if kept >= groups || size == 0 {
        return;
    }
    let best: Vec<f32> = row
        .chunks_exact(size)
        .map(|g| {
            let first = largest(g, |_| false);
            let second = largest(g, |i| i == first);
            if size > 1 {
                g[first] + g[second]
            } else {
                g[first]
            }
        })
        .collect();
    let mut keep = vec![false; groups];
    for _ in 0..kept {
        let next = largest(&best, |g| keep[g]);
        keep[next] = true;
    }
    for (g, columns) in row.chunks_exact_mut(size).enumerate() {
        if !keep[g] {
            columns.fill(f32::NEG_INFINITY);
        }
    }
}

/// Drawn columns.
struct Drawn {
    of: DrawnColumns,
    data_rank: u32,
    /// Those of a group of rows, by its number.
    columns: Option<(usize, ForcedColumns)>,
}

impl Drawn {
    /// Writes the columns of a row.
    fn choose(&mut self, row: usize, columns: &mut [i64]) {
        let rows = self.of.group as usize;
        let (group, row) = (row / rows, (row % rows) as u32);
        if self
            .columns
            .as_ref()
            .is_none_or(|(known, _)| *known != group)
        {
            let own = self.of.columns(self.data_rank, group as u64);
            self.columns = Some((group, own));
        }
        let known = self.columns.iter().flat_map(|(_, of)| of.of_row(row));
        columns
            .iter_mut()
            .zip(known)
            .for_each(|(c, n)| *c = n as i64);
    }
}

/// Chooses columns that depend on no score.
enum Forced {
    Drawn(Drawn),
    RoundRobin,
}

impl Forced {
    /// Writes the columns of a row of `d` columns.
    fn choose(&mut self, row: usize, d: usize, columns: &mut [i64]) {
        match self {
            Self::Drawn(drawn) => drawn.choose(row, columns),
            Self::RoundRobin => {
                let chosen = round_robin(row as u64, columns.len() as u64, d as u64);
                columns
                    .iter_mut()
                    .zip(chosen)
                    .for_each(|(c, n)| *c = n as i64);
            }
        }
    }
}

/// Computes `logits[, bias] -> weights, ids`.
pub(super) fn route(o: &Operands<'_>, of: &op::Route) -> Result<(), OperandError> {
    o.expect(1 + usize::from(of.bias), 2)?;
    let (rows, d) = strides::matrix(o.slot(false, 0)?);
    let (logits, weights, ids) = (o.input(0)?, o.output(0)?, o.output(1)?);
    let k = of.k as usize;
    same("the weights", rows * k, weights.numel)?;
    same("the ids", rows * k, ids.numel)?;
    if k == 0 || k > d || of.groups == 0 || !(d as u64).is_multiple_of(of.groups) {
        let what = format!("{k} of {d} columns in {} groups", of.groups);
        return Err(OperandError::Shape(what));
    }
    let bias = if of.bias { Some(o.floats(1)?) } else { None };
    if let Some(bias) = &bias {
        same("the bias", d, bias.len())?;
    }
    let mut forced = match of.forced {
        Some(ForcedChoice::Drawn(of)) => {
            same("the shares of columns", d, of.shares.len())?;
            Some(Forced::Drawn(Drawn {
                of,
                data_rank: o.ctx.data_rank,
                columns: None,
            }))
        }
        Some(ForcedChoice::RoundRobin) => Some(Forced::RoundRobin),
        None => None,
    };
    let [mut row, mut by, mut chosen] = [d, d, k].map(Scratch::take);
    let mut columns = vec![0i64; k];
    for r in 0..rows {
        logits.load(r * d, &mut row);
        by.copy_from_slice(&row);
        scores(&mut row, of.sigmoid);
        // A softmax keeps the order of the logits, of which fewer are equal.
        if of.sigmoid || bias.is_some() || of.groups > 1 {
            by.copy_from_slice(&row);
        }
        if let Some(bias) = &bias {
            by.iter_mut().zip(bias.iter()).for_each(|(s, b)| *s += b);
        }
        match &mut forced {
            Some(forced) => forced.choose(r, d, &mut columns),
            None => {
                keep_groups(&mut by, of.groups as usize, of.kept as usize);
                for n in 0..k {
                    columns[n] = largest(&by, |i| columns[..n].contains(&(i as i64))) as i64;
                }
            }
        }
        let mut sum = 0.0;
        for (w, c) in chosen.iter_mut().zip(&columns) {
            *w = row[*c as usize];
            sum += *w;
        }
        let scale = of.scale.0 as f32;
        for w in chosen.iter_mut() {
            *w = scale * if of.normalize { *w / (sum + TINY) } else { *w };
        }
        weights.store(r * k, &chosen);
        ids.store_ids(r * k, &columns);
    }
    Ok(())
}

/// Keeps a sum of scores from being zero.
const TINY: f32 = 1e-20;

/// Computes `d_weights, logits, ids -> d_logits`.
pub(super) fn route_grad(o: &Operands<'_>, of: &op::RouteGrad) -> Result<(), OperandError> {
    o.expect(3, 1)?;
    let (rows, d) = strides::matrix(o.slot(false, 1)?);
    let (dy, logits, ids, out) = (o.input(0)?, o.input(1)?, o.input(2)?, o.output(0)?);
    let k = dy.numel / rows.max(1);
    same("the ids", rows * k, ids.numel)?;
    same("the gradient of the logits", rows * d, out.numel)?;
    let [mut row, mut ds, mut g] = [d, d, k].map(Scratch::take);
    let mut columns = vec![0i64; k];
    for r in 0..rows {
        logits.load(r * d, &mut row);
        dy.load(r * k, &mut g);
        ids.load_ids(r * k, &mut columns)?;
        if let Some(&value) = columns.iter().find(|c| **c < 0 || **c as usize >= d) {
            return Err(OperandError::Label {
                row: r,
                value,
                limit: d,
            });
        }
        scores(&mut row, of.sigmoid);
        ds.fill(0.0);
        let chosen = || columns.iter().map(|&c| c as usize).zip(g.iter());
        let sum = chosen().map(|(c, _)| row[c]).sum::<f32>() + TINY;
        let mean = chosen().map(|(c, g)| g * row[c]).sum::<f32>() / sum;
        let scale = of.scale.0 as f32;
        for (c, &g) in chosen() {
            ds[c] = scale * if of.normalize { (g - mean) / sum } else { g };
        }
        if of.sigmoid {
            for (ds, s) in ds.iter_mut().zip(row.iter()) {
                *ds *= s * (1.0 - s);
            }
        } else {
            let mean: f32 = ds.iter().zip(row.iter()).map(|(g, p)| g * p).sum();
            for (ds, p) in ds.iter_mut().zip(row.iter()) {
                *ds = p * (*ds - mean);
            }
        }
        out.store(r * d, &ds);
    }
    Ok(())
}

/// Computes `ids -> counts`.
pub(super) fn count_experts(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(1, 1)?;
    let (rows, k) = strides::matrix(o.slot(false, 0)?);
    let (ids, out) = (o.input(0)?, o.output(0)?);
    let mut counts = vec![0u32; out.numel];
    let mut columns = vec![0i64; k];
    for row in 0..rows {
        ids.load_ids(row * k, &mut columns)?;
        for &value in &columns {
            let count = usize::try_from(value).ok().and_then(|c| counts.get_mut(c));
            *count.ok_or(OperandError::Label {
                row,
                value,
                limit: out.numel,
            })? += 1;
        }
    }
    let counts: Vec<f32> = counts.into_iter().map(|n| n as f32).collect();
    out.store(0, &counts);
    Ok(())
}

/// Computes `logits -> loss, counts`.
pub(super) fn load_balance(o: &Operands<'_>, of: &op::LoadBalance) -> Result<(), OperandError> {
    o.expect(1, 2)?;
    let (rows, d) = strides::matrix(o.slot(false, 0)?);
    let (logits, loss, counts) = (o.input(0)?, o.output(0)?, o.output(1)?);
    let (sequences, k) = (of.sequences as usize, of.k as usize);
    same("the counts", sequences * d, counts.numel)?;
    if sequences == 0 || rows % sequences != 0 || k > d {
        let what = format!("{k} of {d} columns, {rows} rows of {sequences} sequences");
        return Err(OperandError::Shape(what));
    }
    let n = rows / sequences;
    let [mut row, mut count] = [d, d].map(Scratch::take);
    let mut sums = vec![0.0f64; d];
    let mut total = 0.0;
    let mut columns = Vec::with_capacity(k);
    for s in 0..sequences {
        count.fill(0.0);
        sums.fill(0.0);
        for r in s * n..(s + 1) * n {
            logits.load(r * d, &mut row);
            columns.clear();
            for _ in 0..k {
                let next = largest(&row, |i| columns.contains(&i));
                columns.push(next);
                count[next] += 1.0;
            }
            scores(&mut row, of.sigmoid);
            if of.sigmoid {
                normalize(&mut row);
            }
            for (sum, p) in sums.iter_mut().zip(row.iter()) {
                *sum += f64::from(*p);
            }
        }
        let pairs = count.iter().zip(&sums);
        total += pairs.map(|(c, s)| f64::from(*c) * s).sum::<f64>();
        counts.store(s * d, &count);
    }
    let by = of.scale.0 * d as f64 / (sequences * n * n) as f64;
    loss.store(0, &[(by * total) as f32]);
    Ok(())
}

/// Computes `d_loss, logits, counts -> d_logits`.
pub(super) fn load_balance_grad(
    o: &Operands<'_>,
    of: &op::LoadBalanceGrad,
) -> Result<(), OperandError> {
    o.expect(3, 1)?;
    let (rows, d) = strides::matrix(o.slot(false, 1)?);
    let (dy, logits, counts, out) = (o.input(0)?, o.input(1)?, o.input(2)?, o.output(0)?);
    same("the gradient of the loss", 1, dy.numel)?;
    same("the gradient of the logits", rows * d, out.numel)?;
    let sequences = counts.numel / d.max(1);
    if sequences == 0 || rows % sequences != 0 {
        let what = format!("{rows} rows of {sequences} sequences");
        return Err(OperandError::Shape(what));
    }
    let n = rows / sequences;
    let by = f64::from(dy.get(0)) * of.scale.0 * d as f64 / (sequences * n * n) as f64;
    let by = by as f32;
    let [mut row, mut count, mut own] = [d, d, d].map(Scratch::take);
    for r in 0..rows {
        if r % n == 0 {
            counts.load(r / n * d, &mut count);
        }
        logits.load(r * d, &mut row);
        scores(&mut row, of.sigmoid);
        // The derivative of a score's logarithm by its logit.
        own.fill(1.0);
        if of.sigmoid {
            own.iter_mut().zip(row.iter()).for_each(|(o, s)| *o -= s);
            normalize(&mut row);
        }
        let pairs = count.iter().zip(row.iter());
        let mean: f32 = pairs.map(|(c, p)| by * c * p).sum();
        for ((p, c), own) in row.iter_mut().zip(count.iter()).zip(own.iter()) {
            *p *= (by * c - mean) * own;
        }
        out.store(r * d, &row);
    }
    Ok(())
}

/// Computes `logits -> loss`, the mean square of the log-sum-exp.
pub(super) fn z_loss(o: &Operands<'_>, scale: f64) -> Result<(), OperandError> {
    o.expect(1, 1)?;
    let (rows, d) = strides::matrix(o.slot(false, 0)?);
    let (logits, loss) = (o.input(0)?, o.output(0)?);
    let mut row = Scratch::take(d);
    let mut total = 0.0;
    for r in 0..rows {
        logits.load(r * d, &mut row);
        total += f64::from(scores(&mut row, false)).powi(2);
    }
    loss.store(0, &[(scale * total / rows as f64) as f32]);
    Ok(())
}

/// Computes `d_loss, logits -> d_logits`.
pub(super) fn z_loss_grad(o: &Operands<'_>, scale: f64) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (rows, d) = strides::matrix(o.slot(false, 1)?);
    let (dy, logits, out) = (o.input(0)?, o.input(1)?, o.output(0)?);
    same("the gradient of the loss", 1, dy.numel)?;
    same("the gradient of the logits", rows * d, out.numel)?;
    let by = (f64::from(dy.get(0)) * scale * 2.0 / rows as f64) as f32;
    let mut row = Scratch::take(d);
    for r in 0..rows {
        logits.load(r * d, &mut row);
        let z = scores(&mut row, false);
        row.iter_mut().for_each(|p| *p *= by * z);
        out.store(r * d, &row);
    }
    Ok(())
}
