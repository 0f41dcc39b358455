//! Routers and experts.

use super::{BodyOp, DrawnColumns, ForcedChoice, contiguous, dims, dot, lse, op, sigmoid};

/// Returns the columns in descending order of `by`; the lower one of equal ones first.
fn descending(by: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..by.len()).collect();
    order.sort_by(|&a, &b| by[b].total_cmp(&by[a]));
    order
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let z = lse(row);
    row.iter().map(|v| (v - z).exp()).collect()
}

fn scores(row: &[f64], sigmoids: bool) -> Vec<f64> {
    if sigmoids {
        row.iter().map(|&v| sigmoid(v)).collect()
    } else {
        softmax(row)
    }
}

pub(super) fn route(of: &op::Route, x: &[Vec<f64>], columns: usize) -> Vec<Vec<f64>> {
    let (mut weights, mut ids) = (vec![], vec![]);
    for (r, row) in x[0].chunks(columns).enumerate() {
        let scores = scores(row, of.sigmoid);
        let mut by = scores.clone();
        if of.bias {
            by.iter_mut().zip(&x[1]).for_each(|(s, b)| *s += b);
        }
        let group = columns / of.groups as usize;
        let best: Vec<f64> = by
            .chunks(group)
            .map(|g| descending(g).into_iter().take(2).map(|i| g[i]).sum())
            .collect();
        for lost in descending(&best).into_iter().skip(of.kept as usize) {
            by[lost * group..][..group].fill(f64::NEG_INFINITY);
        }
        let chosen = match of.forced {
            Some(ForcedChoice::Drawn(drawn)) => drawn_columns(&drawn, r as u32),
            Some(ForcedChoice::RoundRobin) => (0..of.k as usize)
                .map(|n| (r * of.k as usize + n) % scores.len())
                .collect(),
            None => descending(&by)[..of.k as usize].to_vec(),
        };
        let sum: f64 = chosen.iter().map(|&c| scores[c]).sum();
        let by = of.scale.0 / if of.normalize { sum } else { 1.0 };
        weights.extend(chosen.iter().map(|&c| by * scores[c]));
        ids.extend(chosen.iter().map(|&c| c as f64));
    }
    vec![weights, ids]
}

/// Returns the columns that are drawn for a row of the first rank.
fn drawn_columns(of: &DrawnColumns, row: u32) -> Vec<usize> {
    let group = of.columns(0, u64::from(row / of.group));
    group.of_row(row % of.group).collect()
}

pub(super) fn route_grad(of: &op::RouteGrad, x: &[Vec<f64>], columns: usize) -> Vec<f64> {
    let rows = x[1].len() / columns;
    let k = x[0].len() / rows;
    let mut out = vec![];
    for (r, row) in x[1].chunks(columns).enumerate() {
        let scores = scores(row, of.sigmoid);
        let chosen: Vec<usize> = x[2][r * k..][..k].iter().map(|&c| c as usize).collect();
        let dy = &x[0][r * k..][..k];
        let sum: f64 = chosen.iter().map(|&c| scores[c]).sum();
        // Gradient of the scores.
        let mut ds = vec![0.0; columns];
        let weighted: f64 = chosen.iter().zip(dy).map(|(&c, g)| g * scores[c]).sum();
        for (&c, g) in chosen.iter().zip(dy) {
            ds[c] += of.scale.0
                * if of.normalize {
                    (g - weighted / sum) / sum
                } else {
                    *g
                };
        }
        let mean = dot(&ds, &scores);
        out.extend(ds.iter().zip(&scores).map(|(g, s)| match of.sigmoid {
            true => g * s * (1.0 - s),
            false => s * (g - mean),
        }));
    }
    out
}

pub(super) fn local(of: &op::LocalExperts, ids: &[f64]) -> Vec<f64> {
    let first = (0..of.ranks).map(|r| (r * of.experts) as f64);
    first
        .flat_map(|f| ids.iter().map(move |id| id - f))
        .collect()
}

pub(super) fn pushed(of: &op::PushedRows, local: &[f64], k: usize) -> Vec<f64> {
    let (ranks, experts) = (of.ranks as usize, of.experts as f64);
    let rows: Vec<bool> = (local.chunks(k))
        .map(|choices| choices.iter().any(|c| (0.0..experts).contains(c)))
        .collect();
    let tokens = rows.len() / ranks;
    let places = (0..tokens).flat_map(|t| (0..ranks).map(move |r| r * tokens + t));
    places
        .map(|row| if rows[row] { row as f64 } else { -1.0 })
        .collect()
}

pub(super) fn dispatch(of: &op::DispatchExperts, ids: &[f64]) -> Vec<Vec<f64>> {
    let slots = of.slots as usize;
    let mut local = vec![-1.0; of.ranks as usize * slots];
    let mut counts = vec![0.0; (of.ranks * of.experts) as usize];
    let mut taken = vec![0; of.ranks as usize];
    let mut positions = vec![];
    for id in ids.iter().map(|id| *id as usize) {
        counts[id] += 1.0;
        let rank = id / of.experts as usize;
        let place = rank * slots + taken[rank];
        if taken[rank] < slots {
            taken[rank] += 1;
            local[place] = (id % of.experts as usize) as f64;
            positions.push(place as f64);
        } else {
            positions.push(-1.0);
        }
    }
    vec![local, positions, counts]
}

pub(super) fn sort(of: &op::SortExperts, ids: &[f64]) -> Vec<Vec<f64>> {
    let (mut offsets, mut positions) = (vec![0.0], vec![-1.0; ids.len()]);
    let rows = of.limit.map_or(ids.len(), |limit| limit.rows as usize);
    let here = |id: &f64| (0.0..of.experts as f64).contains(id);
    let choices = ids.iter().enumerate().filter(|(_, id)| here(id));
    let kept: Vec<(usize, f64)> = choices.map(|(i, id)| (i, *id)).take(rows).collect();
    let mut row = 0.0;
    for e in 0..of.experts {
        for &(i, _) in kept.iter().filter(|(_, id)| *id == e as f64) {
            positions[i] = row;
            row += 1.0;
        }
        offsets.push(row);
    }
    vec![offsets, positions]
}

pub(super) fn permute(op: &BodyOp, x: &[Vec<f64>]) -> Vec<f64> {
    let (rows, d) = dims(&op.outputs[0]);
    let k = dims(&op.inputs[1]).1;
    let mut out = vec![f64::NAN; rows * d];
    for (i, &p) in x[1].iter().enumerate().filter(|(_, p)| **p >= 0.0) {
        out[p as usize * d..][..d].copy_from_slice(&x[0][i / k * d..][..d]);
    }
    out
}

pub(super) fn unpermute(op: &BodyOp, x: &[Vec<f64>]) -> Vec<f64> {
    let (tokens, d) = dims(&op.outputs[0]);
    let k = dims(&op.inputs[1]).1;
    let mut out = vec![0.0; tokens * d];
    for (i, &p) in x[1].iter().enumerate().filter(|(_, p)| **p >= 0.0) {
        for c in 0..d {
            out[i / k * d + c] += x[0][p as usize * d + c];
        }
    }
    out
}

/// Returns the expert of each row that has one.
fn expert_of(offsets: &[f64]) -> impl Iterator<Item = (usize, usize)> {
    let ends = offsets.windows(2).enumerate();
    ends.flat_map(|(e, w)| (w[0] as usize..w[1] as usize).map(move |r| (r, e)))
}

pub(super) fn grouped(op: &BodyOp, x: &[Vec<f64>], tb: bool) -> Vec<f64> {
    let ((_, k), (rows, n)) = (dims(&op.inputs[0]), dims(&op.outputs[0]));
    let strides = contiguous(&op.inputs[1].shape);
    let mut out = vec![f64::NAN; rows * n];
    for (r, e) in expert_of(&x[2]) {
        for j in 0..n {
            let b = |i: usize| {
                let at = if tb { j * k + i } else { i * n + j };
                x[1][e * strides[0] as usize + at]
            };
            out[r * n + j] = (0..k).map(|i| x[0][r * k + i] * b(i)).sum();
        }
    }
    out
}

pub(super) fn grouped_weight_grad(op: &BodyOp, x: &[Vec<f64>]) -> Vec<f64> {
    let (m, n) = (dims(&op.inputs[0]).1, dims(&op.inputs[1]).1);
    let mut out = vec![0.0; op.outputs[0].shape.iter().product::<u64>() as usize];
    for (r, e) in expert_of(&x[2]) {
        for i in 0..m {
            for j in 0..n {
                out[(e * m + i) * n + j] += x[0][r * m + i] * x[1][r * n + j];
            }
        }
    }
    out
}

/// Returns the probabilities of a row.
fn probabilities(row: &[f64], sigmoids: bool) -> Vec<f64> {
    let mut p = scores(row, sigmoids);
    let sum: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    p
}

/// Returns how often each column is chosen.
pub(super) fn counts(ids: &[f64], columns: usize) -> Vec<f64> {
    let of = |c: usize| ids.iter().filter(|id| **id == c as f64).count() as f64;
    (0..columns).map(of).collect()
}

pub(super) fn load_balance(of: &op::LoadBalance, x: &[f64], columns: usize) -> Vec<Vec<f64>> {
    let n = x.len() / columns / of.sequences as usize;
    let (mut loss, mut counts) = (0.0, vec![]);
    for rows in x.chunks(n * columns) {
        let (mut c, mut sums) = (vec![0.0; columns], vec![0.0; columns]);
        for row in rows.chunks(columns) {
            for &i in &descending(row)[..of.k as usize] {
                c[i] += 1.0;
            }
            let p = probabilities(row, of.sigmoid);
            sums.iter_mut().zip(p).for_each(|(s, p)| *s += p);
        }
        let by = of.scale.0 / of.sequences as f64 * columns as f64 / (n * n) as f64;
        loss += by * dot(&c, &sums);
        counts.extend(c);
    }
    vec![vec![loss], counts]
}

pub(super) fn load_balance_grad(
    of: &op::LoadBalanceGrad,
    x: &[Vec<f64>],
    columns: usize,
) -> Vec<f64> {
    let sequences = x[2].len() / columns;
    let n = x[1].len() / columns / sequences;
    let by = x[0][0] * of.scale.0 / sequences as f64 * columns as f64 / (n * n) as f64;
    let mut out = vec![];
    for (r, row) in x[1].chunks(columns).enumerate() {
        let dp: Vec<f64> = x[2][r / n * columns..][..columns]
            .iter()
            .map(|c| by * c)
            .collect();
        let p = probabilities(row, of.sigmoid);
        let mean = dot(&dp, &p);
        out.extend((0..columns).map(|i| {
            // The derivative of a score's logarithm.
            let own = if of.sigmoid {
                1.0 - sigmoid(row[i])
            } else {
                1.0
            };
            p[i] * (dp[i] - mean) * own
        }));
    }
    out
}

pub(super) fn repeat(op: &BodyOp, x: &[Vec<f64>]) -> Vec<f64> {
    let (rows, d) = dims(&op.outputs[0]);
    let mut out = vec![f64::NAN; rows * d];
    for (r, e) in expert_of(&x[1]) {
        out[r * d..][..d].copy_from_slice(&x[0][e * d..][..d]);
    }
    out
}

pub(super) fn repeat_grad(op: &BodyOp, x: &[Vec<f64>]) -> Vec<f64> {
    let (experts, d) = dims(&op.outputs[0]);
    let mut out = vec![0.0; experts * d];
    for (r, e) in expert_of(&x[1]) {
        for c in 0..d {
            out[e * d + c] += x[0][r * d + c];
        }
    }
    out
}
