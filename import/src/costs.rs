//! Costs of the machine on which a trace was recorded: matmuls, attention, memory-bound kernels,
//! collectives and kernel launches, for hardware profiles.

use crate::attribute::Attributed;
use crate::facts::dtype;
use crate::kineto::{DeviceKind, Trace};
use crate::measured::{Instr, Measured, shapes};
use shardlab_plan::record::Work;
use shardlab_plan::units::Picos;
use std::collections::BTreeMap;

/// Measured times in nanoseconds, keyed by what they depend on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// Matmuls by type and `[m, n, k]`.
    pub gemm: BTreeMap<(&'static str, [u64; 3]), Times>,
    /// Attention.
    pub attention: BTreeMap<AttentionKey, Times>,
    /// Memory-bound kernels by class, type, and bytes read and written.
    pub memory: BTreeMap<(&'static str, &'static str, u64), Times>,
    /// Collectives by kind, ranks of their group and bytes of the full side. Times contain waits
    /// for ranks whose traces are not given.
    pub collectives: BTreeMap<(&'static str, u32, u64), Times>,
    /// Host time of kernel launches.
    pub launches: Times,
    /// Operators whose shapes were not recorded, or are not understood.
    pub without_shapes: u64,
    /// Collectives whose size or group is not in the trace.
    pub unsized_collectives: u64,
}

/// What the time of attention depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttentionKey {
    /// Element type.
    pub dtype: &'static str,
    /// Whether it is causal.
    pub causal: bool,
    /// Whether it is the backward pass.
    pub backward: bool,
    /// Batch, heads, key and value heads, sequence length, head dimension.
    pub shape: [u64; 5],
}

/// Measured times of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times(Vec<u64>);

impl Times {
    fn add(&mut self, ns: u64) {
        self.0.push(ns);
    }

    /// Returns the number of times.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the 10th percentile of the times, in microseconds; 0 without times.
    fn low_us(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted
            .get(sorted.len() / 10)
            .map_or(0.0, |ns| *ns as f64 / 1e3)
    }

    /// Returns the shortest time in microseconds; 0 without times.
    #[must_use]
    pub fn fastest_us(&self) -> f64 {
        self.0.iter().min().map_or(0.0, |ns| *ns as f64 / 1e3)
    }

    /// Returns the median time in microseconds; 0 without times.
    #[must_use]
    pub fn median_us(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        match sorted.len() {
            0 => 0.0,
            n => (sorted[(n - 1) / 2] + sorted[n / 2]) as f64 / 2e3,
        }
    }
}

/// Minimum number of launches that show the speed of a host.
const LAUNCHES: usize = 100;

/// Exponent of [`Costs::host_factor`]: a fit to eleven jobs on three machines that were also timed
/// without the profiler (`benchmarks/import.md`). Fits to two of the machines give 0.39 to 0.43.
const HOST_EXPONENT: f64 = 0.41;

impl Costs {
    /// Returns the factor by which this machine's host is slower than one whose kernel launches
    /// take `launch_us` without a profiler; `None` if the trace has too few launches to determine
    /// it.
    ///
    /// The profiler slows operators down by amounts that depend on what it records, but it hardly
    /// affects the quickest launches, which spend their time in the driver. A host with slower
    /// launches is slower in Python, too, but by less.
    #[must_use]
    pub fn host_factor(&self, launch_us: f64) -> Option<f64> {
        self.launches.host_factor(launch_us)
    }
}

impl Times {
    /// Returns the factor of [`Costs::host_factor`] for the times of a rank's launches.
    #[must_use]
    pub fn host_factor(&self, launch_us: f64) -> Option<f64> {
        let low = self.low_us();
        let known = self.count() >= LAUNCHES && low > 0.0 && launch_us > 0.0;
        known.then(|| (low / launch_us).powf(HOST_EXPONENT))
    }
}

/// Returns the host times of a rank's kernel launches.
pub(crate) fn launches(trace: &Trace, a: &Attributed) -> Times {
    let mut times = Times::default();
    for w in &a.work {
        if let Some(launch) = w.launch.map(|l| &trace.launches[l as usize])
            && trace.name(launch.name).contains("LaunchKernel")
        {
            times.add((launch.end - launch.start).max(0).cast_unsigned());
        }
    }
    times
}

/// Collects the costs of a rank's trace.
#[must_use]
pub fn find(trace: &Trace, a: &Attributed) -> Costs {
    let mut costs = Costs {
        launches: launches(trace, a),
        ..Costs::default()
    };
    // An operator may launch several kernels.
    let mut by_operator: BTreeMap<u32, (Work, u64)> = BTreeMap::new();
    for w in &a.work {
        let event = &trace.device[w.device as usize];
        if event.kind == DeviceKind::Graph {
            continue;
        }
        let time = (event.end - event.start).max(0).cast_unsigned();
        if let Some(o) = w.operator {
            let of = by_operator.entry(o).or_insert((w.work, 0));
            // Fills and reductions around a matmul belong to it.
            if matches!(w.work, Work::Gemm | Work::Attention) {
                of.0 = w.work;
            }
            of.1 += time;
        }
    }
    for (operator, (work, time)) in by_operator {
        let event = &trace.host[operator as usize];
        let name = trace.name(event.name);
        let plain = name.rsplit("::").next().unwrap_or(name);
        let Some(inputs) = event.inputs.map(|i| &trace.inputs[i as usize]) else {
            costs.without_shapes += u64::from(matches!(work, Work::Gemm | Work::Attention));
            continue;
        };
        let operator = Operator {
            name: plain,
            shapes: shapes(trace.name(inputs.dims)),
            dtype: first_type(trace.name(inputs.types)),
            causal: trace.name(inputs.concrete).contains("\"True\""),
        };
        let known = match work {
            Work::Gemm => costs.gemm(&operator, time),
            Work::Attention => costs.attention(&operator, time),
            Work::Memory => costs.memory(&operator, time).or(Some(())),
            _ => Some(()),
        };
        costs.without_shapes += u64::from(known.is_none());
    }
    costs
}

/// An operator, with the inputs that the trace records.
struct Operator<'a> {
    name: &'a str,
    shapes: Vec<Vec<u64>>,
    dtype: Option<&'static str>,
    causal: bool,
}

/// Returns the type of the first tensor.
fn first_type(types: &str) -> Option<&'static str> {
    let all: Vec<String> = serde_json::from_str(types).ok()?;
    all.iter().find_map(|name| dtype(name))
}

impl Costs {
    /// Adds the collectives of the shown step.
    pub(crate) fn add_collectives(&mut self, measured: &Measured) {
        let by_id: BTreeMap<_, &Instr> = measured.instrs.iter().map(|i| (i.id, i)).collect();
        for span in &measured.run.spans {
            let Some(instr) = by_id.get(&span.instr) else {
                continue;
            };
            let kind = match instr.work {
                Some(Work::AllGather) => "all_gather",
                Some(Work::ReduceScatter) => "reduce_scatter",
                Some(Work::AllReduce) => "all_reduce",
                _ => continue,
            };
            if instr.bytes == 0 || instr.ranks == 0 {
                self.unsized_collectives += 1;
                continue;
            }
            let Picos(alone) = span.alone;
            let key = (kind, instr.ranks, instr.bytes);
            self.collectives.entry(key).or_default().add(alone / 1000);
        }
    }

    fn gemm(&mut self, o: &Operator<'_>, time: u64) -> Option<()> {
        let (a, b) = match o.name {
            "mm" => (o.shapes.first()?, o.shapes.get(1)?),
            "addmm" => (o.shapes.get(1)?, o.shapes.get(2)?),
            _ => return None,
        };
        let ([m, k], [_, n]) = (a.as_slice(), b.as_slice()) else {
            return None;
        };
        self.gemm
            .entry((o.dtype?, [*m, *n, *k]))
            .or_default()
            .add(time);
        Some(())
    }

    fn attention(&mut self, o: &Operator<'_>, time: u64) -> Option<()> {
        let backward = o.name.contains("backward");
        // In backward, the gradient of the output is the first input.
        let skip = usize::from(backward);
        let (q, k) = (o.shapes.get(skip)?, o.shapes.get(skip + 1)?);
        let ([b, h, s, d], [_, kv, ..]) = (q.as_slice(), k.as_slice()) else {
            return None;
        };
        let key = AttentionKey {
            dtype: o.dtype?,
            causal: o.causal,
            backward,
            shape: [*b, *h, *kv, *s, *d],
        };
        self.attention.entry(key).or_default().add(time);
        Some(())
    }

    /// Adds a kernel whose traffic follows from its shapes, because it reads and writes whole
    /// tensors of one shape.
    fn memory(&mut self, o: &Operator<'_>, time: u64) -> Option<()> {
        // The class, and how many tensors of the first tensor's size are moved.
        let (class, tensors) = match o.name {
            "silu" | "gelu" => ("pointwise", 2),
            "silu_backward" | "gelu_backward" => ("pointwise", 3),
            "_fused_rms_norm" | "native_layer_norm" => ("norm", 2),
            "_log_softmax" | "_softmax" => ("softmax", 2),
            "_log_softmax_backward_data" | "_softmax_backward_data" => ("softmax_backward", 3),
            _ => return None,
        };
        let first: u64 = o.shapes.first()?.iter().product();
        let name = o.dtype?;
        let size = match name {
            "f32" => 4,
            _ => 2,
        };
        let key = (class, name, first * size * tensors);
        self.memory.entry(key).or_default().add(time);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_slower_launches_is_slower_by_less() {
        let mut costs = Costs::default();
        for i in 0..LAUNCHES as u64 {
            assert_eq!(costs.host_factor(3.2), None);
            // One launch in ten is quick, so the 10th percentile is below 6.4 us.
            costs.launches.add(if i < 11 { 6400 } else { 20_000 });
        }
        let factor = costs.host_factor(3.2).unwrap();
        assert!(
            (factor - 2_f64.powf(HOST_EXPONENT)).abs() < 1e-9,
            "{factor}"
        );
        assert!((costs.host_factor(6.4).unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(costs.host_factor(0.0), None);
    }

    #[test]
    fn operators_become_rows() {
        let mut costs = Costs::default();
        let operator = |name, shapes: &[&[u64]]| Operator {
            name,
            shapes: shapes.iter().map(|s| s.to_vec()).collect(),
            dtype: Some("bf16"),
            causal: true,
        };
        for time in [4000, 2000, 3000] {
            costs.gemm(&operator("mm", &[&[8, 4], &[4, 6]]), time);
        }
        let row = &costs.gemm[&("bf16", [8, 6, 4])];
        assert_eq!((row.count(), row.median_us()), (3, 3.0));
        assert_eq!(costs.gemm(&operator("bmm", &[]), 1), None);
        let (q, k) = (&[2, 16, 128, 64][..], &[2, 4, 128, 64][..]);
        costs.attention(&operator("_flash_attention_backward", &[q, q, k, k]), 9);
        let key = costs.attention.keys().next().unwrap();
        assert!(key.backward && key.shape == [2, 16, 4, 128, 64]);
        costs.memory(&operator("silu", &[&[10, 10]]), 5);
        assert!(costs.memory.contains_key(&("pointwise", "bf16", 400)));
    }
}
