//! What row operations need to know of whole rows, and their values once they know it.

use super::{Shape, is_statistic, reduced};
use crate::kernels::cuda::codegen::expr::{Gen, Var};
use crate::kernels::cuda::codegen::index::{Domain, Index, Own};
use crate::kernels::cuda::codegen::{Refusal, float, numel};
use shardlab_plan::ir::{BodyOp, OpKind, op};

/// Sums `terms` (C expressions over lane `v`) of the row; returns the variables.
fn sums(
    g: &mut Gen<'_>,
    shape: Shape,
    mut terms: impl FnMut(&mut Gen<'_>) -> Result<Vec<String>, Refusal>,
    count: usize,
) -> Result<Vec<String>, Refusal> {
    let names: Vec<String> = (0..count).map(|_| g.fresh()).collect();
    for n in &names {
        g.line(format!("float {n} = 0.0f;"));
    }
    g.open(shape.walk());
    g.line(shape.place());
    let terms = terms(g)?;
    g.line(format!(
        "#pragma unroll\nfor (int v = 0; v < {}; v++) {{",
        shape.lanes
    ));
    for (n, t) in names.iter().zip(&terms) {
        g.line(format!("  {n} += {t};"));
    }
    g.line("}");
    g.close();
    for n in &names {
        g.line(format!("{n} = {};", shape.all("Sum", n)));
    }
    Ok(names)
}

/// Computes what an operation needs to know of its whole row.
pub(super) fn statistics(
    g: &mut Gen<'_>,
    shape: Shape,
    i: usize,
    op: &BodyOp,
) -> Result<(), Refusal> {
    let at = Index::elem(shape.lanes);
    let cols = float(shape.domain.cols as f32);
    let full = reduced(op).map(|s| s.shape.clone()).unwrap_or_default();
    let stats = match op.op {
        OpKind::RmsNorm(op::RmsNorm { eps }) => {
            let sum = sums(
                g,
                shape,
                |g| {
                    let x = g.input(i, 0, &full, &at)?.lane();
                    Ok(vec![format!("{x} * {x}")])
                },
                1,
            )?;
            let s = g.fresh();
            g.line(format!(
                "const float {s} = 1.0f / sqrtf({} / {cols} + {});",
                sum[0],
                float(eps.0 as f32)
            ));
            vec![s]
        }
        OpKind::LayerNorm(op::LayerNorm { eps }) => {
            let sum = sums(g, shape, |g| Ok(vec![g.input(i, 0, &full, &at)?.lane()]), 1)?;
            let m = g.fresh();
            g.line(format!("const float {m} = {} / {cols};", sum[0]));
            let var = sums(
                g,
                shape,
                |g| {
                    let x = g.input(i, 0, &full, &at)?.lane();
                    Ok(vec![format!("({x} - {m}) * ({x} - {m})")])
                },
                1,
            )?;
            let s = g.fresh();
            g.line(format!(
                "const float {s} = 1.0f / sqrtf({} / {cols} + {});",
                var[0],
                float(eps.0 as f32)
            ));
            vec![m, s]
        }
        OpKind::RmsNormGrad => {
            let [s] = row_inputs(g, i, [3])?;
            let dot = sums(
                g,
                shape,
                |g| {
                    let [dy, x, w] = norm_inputs(g, i, &full, &at)?;
                    Ok(vec![format!("{dy} * {w} * {x}")])
                },
                1,
            )?;
            let c = g.fresh();
            g.line(format!(
                "const float {c} = {s} * {s} * {s} * ({} / {cols});",
                dot[0]
            ));
            vec![s, c]
        }
        OpKind::LayerNormGrad => {
            let [m, s] = row_inputs(g, i, [3, 4])?;
            let both = sums(
                g,
                shape,
                |g| {
                    let [dy, x, w] = norm_inputs(g, i, &full, &at)?;
                    Ok(vec![
                        format!("{dy} * {w}"),
                        format!("{dy} * {w} * (({x} - {m}) * {s})"),
                    ])
                },
                2,
            )?;
            for t in &both {
                g.line(format!("{t} = {t} / {cols};"));
            }
            vec![m, s, both[0].clone(), both[1].clone()]
        }
        OpKind::LogSoftmax | OpKind::LogSumExp => vec![log_sum_exp(g, shape, i, &full)?],
        OpKind::LogSoftmaxGrad => {
            sums(g, shape, |g| Ok(vec![g.input(i, 0, &full, &at)?.lane()]), 1)?
        }
        _ => return Ok(()),
    };
    g.stats.insert(i, stats);
    Ok(())
}

/// One value a row of each of these inputs.
fn row_inputs<const N: usize>(
    g: &mut Gen<'_>,
    i: usize,
    which: [usize; N],
) -> Result<[String; N], Refusal> {
    let mut out = [const { String::new() }; N];
    for (o, n) in out.iter_mut().zip(which) {
        let slot = g.req.body[i]
            .inputs
            .get(n)
            .ok_or_else(|| Refusal::new("a statistic is missing"))?;
        *o = g.input(i, n, &slot.shape, &Index::row())?.lane();
    }
    Ok(out)
}

/// Output's gradient, input and weight of a norm's backward.
fn norm_inputs(
    g: &mut Gen<'_>,
    i: usize,
    full: &[u64],
    at: &Index,
) -> Result<[String; 3], Refusal> {
    Ok([
        g.input(i, 0, full, at)?.lane(),
        g.input(i, 1, full, at)?.lane(),
        weight(g, i, 2, at)?,
    ])
}

/// A norm's parameter: one value a column.
fn weight(g: &mut Gen<'_>, i: usize, n: usize, at: &Index) -> Result<String, Refusal> {
    let d = g.domain.unwrap_or(Domain { rows: 1, cols: 1 });
    let slot = g.req.body[i]
        .inputs
        .get(n)
        .ok_or_else(|| Refusal::new("a norm's parameter is missing"))?;
    if numel(slot) != d.cols {
        return Err(Refusal::new("a norm's parameter is as long as a row"));
    }
    Ok(g.input(i, n, &[d.rows as u64, d.cols as u64], at)?.lane())
}

fn log_sum_exp(g: &mut Gen<'_>, shape: Shape, i: usize, full: &[u64]) -> Result<String, Refusal> {
    let at = Index::elem(shape.lanes);
    let (m, s, z) = (g.fresh(), g.fresh(), g.fresh());
    g.line(format!("float {m} = -INF, {s} = 0.0f;"));
    if shape.kept {
        g.open(shape.walk());
        g.line(shape.place());
        let x = g.input(i, 0, full, &at)?.lane();
        g.line(format!(
            "#pragma unroll\nfor (int v = 0; v < {}; v++) {m} = max_({m}, {x});",
            shape.lanes
        ));
        g.close();
        g.line(format!("{m} = {};", shape.all("Max", &m)));
        let sum = sums(
            g,
            shape,
            |g| {
                let x = g.input(i, 0, full, &at)?.lane();
                Ok(vec![format!("expf({x} - {m})")])
            },
            1,
        )?;
        g.line(format!("{s} = {};", sum[0]));
    } else {
        // One pass: a running maximum, and the sum relative to it.
        g.open(shape.walk());
        g.line(shape.place());
        let x = g.input(i, 0, full, &at)?;
        let x = match g.define(&x.lane(), true) {
            Var::Each(x) | Var::Same(x) => x,
        };
        g.line(format!("running<{}>({m}, {s}, {x});", shape.lanes));
        g.close();
        g.line(format!(
            "const float {s}m = {};\n{s} = {m} == -INF ? 0.0f : {s} * expf({m} - {s}m);\n{s} = {};\n{m} = {s}m;",
            shape.all("Max", &m),
            shape.all("Sum", &s),
        ));
    }
    g.line(format!("const float {z} = {m} + logf({s});"));
    Ok(z)
}

impl Gen<'_> {
    /// An output of a row operation, whose statistics are known.
    pub(in crate::kernels::cuda::codegen) fn row_value(
        &mut self,
        i: usize,
        o: usize,
        at: &Index,
    ) -> Result<Var, Refusal> {
        let op = &self.req.body[i];
        let rows = self.domain.map_or(0, |d| d.rows);
        let stats = self.stats.get(&i).cloned();
        let stats = stats.ok_or_else(|| {
            Refusal::new(format!(
                "`{}` is used before its row is complete",
                op.op.name()
            ))
        })?;
        if is_statistic(op, o) {
            if at.own != Some(Own::Row) && rows > 1 {
                return Err(Refusal::new("a row's statistic is used in another row"));
            }
            let which = if op.op == OpKind::LogSumExp { 0 } else { o - 1 };
            return Ok(self.define(&stats[which], false));
        }
        if !matches!(at.own, Some(Own::Elem | Own::Pick)) {
            return Err(Refusal::new("a row's values are used in another row"));
        }
        let full = op.outputs[0].shape.clone();
        let s = |n: usize| stats[n].clone();
        let lane = match op.op {
            OpKind::RmsNorm { .. } => {
                let (x, w) = (self.input(i, 0, &full, at)?.lane(), weight(self, i, 1, at)?);
                format!("{x} * {} * {w}", s(0))
            }
            OpKind::LayerNorm { .. } => {
                let (x, w) = (self.input(i, 0, &full, at)?.lane(), weight(self, i, 1, at)?);
                let bias = match op.inputs.len() {
                    0..=2 => String::new(),
                    _ => format!(" + {}", weight(self, i, 2, at)?),
                };
                format!("({x} - {}) * {} * {w}{bias}", s(0), s(1))
            }
            OpKind::RmsNormGrad => {
                let [dy, x, w] = norm_inputs(self, i, &full, at)?;
                format!("{} * ({dy} * {w}) - {} * {x}", s(0), s(1))
            }
            OpKind::LayerNormGrad => {
                let [dy, x, w] = norm_inputs(self, i, &full, at)?;
                format!(
                    "{rstd} * ({dy} * {w} - {} - ({x} - {mean}) * {rstd} * {})",
                    s(2),
                    s(3),
                    mean = s(0),
                    rstd = s(1)
                )
            }
            OpKind::LogSoftmax => {
                format!("{} - {}", self.input(i, 0, &full, at)?.lane(), s(0))
            }
            OpKind::LogSoftmaxGrad => {
                let g = self.input(i, 0, &full, at)?.lane();
                let y = self.input(i, 1, &full, at)?.lane();
                format!("{g} - expf({y}) * {}", s(0))
            }
            _ => return Err(Refusal::new(format!("no generator for `{}`", op.op.name()))),
        };
        Ok(self.define(&lane, at.step != 0))
    }
}
