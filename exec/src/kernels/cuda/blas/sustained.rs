//! Candidates under load.
//!
//! In a training step the GPU is at its power limit and lowers its clock to stay there. Then the
//! candidate that takes the least energy is the fastest, which may not be the fastest in a burst on
//! an idle GPU.

use super::{Addresses, Blas, CANDIDATES, ErrorKind, Plan, WORKSPACE, ahead};
use crate::kernels::cuda::gemm::GemmProblem;
use crate::kernels::cuda::memory::{Scratch, Stopwatch};
use crate::kernels::cuda::numbers;
use cudarc::cublaslt::sys;
use cudarc::driver::result;
use shardlab_plan::ir::DType;

/// Number of candidates that are requested when some of them run under load.
pub(super) const MORE: usize = 2 * CANDIDATES;
/// Maximum number of candidates that run under load, the best of a burst,
const CONTENDERS: usize = 6;
/// if they took at most this multiple of the best one's time.
const CLOSE: f32 = 1.08;
/// Like [`super::BETTER`], for means over many launches, which are far less noisy than the best of
/// three.
const STEADIER: f32 = 0.995;
/// Microseconds of load before measuring: the limit applies to an average of the power over tens of
/// milliseconds.
const HEAT: f32 = 600e3;
/// Microseconds for which one candidate runs before its time counts, and for which it counts; twice
/// each.
const BEFORE: f32 = 100e3;
const COUNTED: f32 = 120e3;
/// Bytes that launches touch before they touch the same again: several times the second-level
/// cache, as in a step.
const COLD: u64 = 256 << 20;
const SETS: u64 = 8;

/// A candidate: its plan, its settings, its time in a burst in microseconds.
pub(super) type Contender<'a> = (&'a Plan, &'a sys::cublasLtMatmulAlgo_t, f32);

/// Operands of a GEMM with values as in training: the power of a GEMM depends on how many bits
/// change.
pub(super) struct Load {
    _memory: Vec<Scratch>,
    sets: Vec<Addresses>,
}

impl Load {
    /// Creates enough sets of operands to exceed the cache.
    pub(super) fn new(p: &GemmProblem) -> Result<Self, ErrorKind> {
        let bytes: u64 = super::sizes(p)[..3].iter().sum();
        Self::of_sets(p, COLD.div_ceil(bytes.max(1)).clamp(1, SETS))
    }

    /// Creates `count` sets of operands.
    pub(super) fn of_sets(p: &GemmProblem, count: u64) -> Result<Self, ErrorKind> {
        let sizes = super::sizes(p);
        let mut memory = vec![Scratch::new(WORKSPACE as u64, 0)?];
        let workspace = memory[0].at;
        let mut sets: Vec<Addresses> = Vec::new();
        for set in 0..count {
            // Codes use the range of their type.
            let factor = |n: usize, usual| {
                let dtype = p.factors[n];
                (
                    sizes[n],
                    dtype,
                    dtype.float8_max().map_or(usual, |most| most / 4.0),
                )
            };
            // Activations, weights, the accumulator, the bias, the reciprocals of scales.
            let kinds = [
                factor(0, 1.0),
                factor(1, 0.02),
                (sizes[2], p.result, 1.0),
                (sizes[3], p.bias.unwrap_or(DType::F32), 0.1),
                (sizes[4], DType::F32, 0.01),
                (sizes[5], DType::F32, 0.01),
            ];
            for (i, (bytes, dtype, scale)) in kinds.into_iter().enumerate() {
                let scratch = Scratch::new(bytes.next_multiple_of(256), 0)?;
                let turn = 7919 * (6 * set as usize + i + 1);
                numbers::fill(scratch.at, bytes, dtype, scale, turn)?;
                memory.push(scratch);
            }
            let [.., a, b, c, bias, of_a, of_b] = &memory[..] else {
                unreachable!("six were pushed");
            };
            sets.push(Addresses {
                a: a.at,
                b: b.at,
                inverses: p.scaling.map(|_| [of_a.at, of_b.at]),
                bias: if p.bias.is_some() { bias.at } else { 0 },
                before: c.at,
                c: c.at,
                workspace,
            });
        }
        // Copies within the device are not waited for.
        result::ctx::synchronize().map_err(ErrorKind::driver("cuCtxSynchronize"))?;
        Ok(Self {
            _memory: memory,
            sets,
        })
    }

    pub(super) fn set(&self, launch: usize) -> Addresses {
        self.sets[launch % self.sets.len()]
    }
}

/// Returns which candidates run under load, by their times in a burst, best first.
pub(super) fn contenders(bursts: &[f32]) -> Vec<usize> {
    let best = bursts.iter().copied().fold(f32::INFINITY, f32::min);
    let mut close: Vec<usize> = (0..bursts.len())
        .filter(|&i| bursts[i].is_finite() && bursts[i] <= best * CLOSE)
        .collect();
    close.sort_by(|&a, &b| bursts[a].total_cmp(&bursts[b]));
    close.truncate(CONTENDERS);
    close
}

/// Returns the best of the contenders by their times under load.
pub(super) fn winner(times: &[[f32; 2]]) -> usize {
    ahead(times.iter().map(|[a, b]| a + b), STEADIER).unwrap_or(0)
}

impl Blas {
    /// Returns the mean microseconds of each contender under load, once in this order and once in
    /// reverse, so that a drift shows and favours none.
    pub(super) fn under_load(
        &self,
        load: &Load,
        watch: &Stopwatch,
        these: &[Contender<'_>],
        heat: f32,
    ) -> Result<Vec<[f32; 2]>, ErrorKind> {
        let launches = |micros: f32, each: f32| (micros / each.max(1.0)) as usize + 1;
        let mean = |&(plan, algo, each): &Contender<'_>, before, counted| {
            watch.mean(launches(before, each), launches(counted, each), |n| {
                // SAFETY: the operands have the lengths of the GEMM's shapes, and nothing else uses
                // them.
                unsafe { self.run(plan, algo, load.set(n), watch.stream()) }
            })
        };
        if let Some(first) = these.first() {
            mean(first, heat, 1.0)?;
        }
        let mut times = vec![[0.0; 2]; these.len()];
        for (one, time) in these.iter().zip(&mut times) {
            time[0] = mean(one, BEFORE, COUNTED)?;
        }
        for (one, time) in these.iter().zip(&mut times).rev() {
            time[1] = mean(one, BEFORE, COUNTED)?;
        }
        Ok(times)
    }

    /// Returns the fastest candidate under load, among those that are nearly the fastest in a
    /// burst, and its time.
    pub(super) fn steadiest(
        &self,
        plan: &Plan,
        p: &GemmProblem,
        found: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<(usize, Option<f32>), ErrorKind> {
        let bursts = self.bursts(plan, p, found)?;
        let close = contenders(&bursts);
        let [first, _, ..] = close[..] else {
            let only = close.first().copied().unwrap_or(0);
            return Ok((only, bursts.get(only).copied()));
        };
        let load = Load::new(p)?;
        let these: Vec<Contender<'_>> = close
            .iter()
            .map(|&i| (plan, &found[i], bursts[i]))
            .collect();
        let times = self.under_load(&load, &Stopwatch::new()?, &these, HEAT)?;
        let best = winner(&times);
        let chosen = close.get(best).copied().unwrap_or(first);
        Ok((chosen, times.get(best).map(|[a, b]| (a + b) / 2.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_close_ones_run_under_load_best_first() {
        let never = f32::INFINITY;
        assert_eq!(contenders(&[107.0, never, 100.0, 109.0, 101.0]), [2, 4, 0]);
        assert_eq!(contenders(&[5.0; 9]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(contenders(&[never]), [0usize; 0]);
        assert_eq!(winner(&[[10.0, 10.2], [10.0, 10.1], [9.0, 9.1]]), 2);
        assert_eq!(winner(&[[10.0, 10.0], [9.99, 9.99]]), 0);
    }
}
