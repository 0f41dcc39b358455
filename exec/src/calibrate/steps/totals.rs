//! Results of steps, by kind of kernel.

use crate::calibrate::Trial;
use crate::calibrate::grid::{GroupedKind, GroupedSizes};
use shardlab_plan::ir::{AttentionShape, BodyOp, DType, GemmKind, Kernel, KernelClass};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Times of one kind of kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::calibrate) struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    pub(in crate::calibrate) fn add(&mut self, us: f64) {
        self.sum += us;
        self.count += 1.0;
    }

    /// Adds times of the same kind, multiplied by a factor.
    fn absorb(&mut self, other: Self, factor: f64) {
        self.sum += other.sum * factor;
        self.count += other.count;
    }

    /// Returns the mean time in microseconds.
    pub(in crate::calibrate) fn us(self) -> f64 {
        self.sum / self.count.max(1.0)
    }
}

/// Key of a table of memory-bound kernels: class, kernel, element type.
type MemoryKey = (&'static str, String, DType);

/// All results of steps.
#[derive(Debug, Default)]
pub(in crate::calibrate) struct Totals {
    /// Memory-bound kernels: bytes moved and time.
    pub(in crate::calibrate) memory: BTreeMap<MemoryKey, BTreeMap<u64, Mean>>,
    /// GEMMs.
    pub(in crate::calibrate) gemm: BTreeMap<(GemmKind, [u64; 3]), Mean>,
    /// Grouped GEMMs. The rows per expert are the rows of all experts divided by their number,
    /// rounded.
    pub(in crate::calibrate) grouped: BTreeMap<GroupedKind, BTreeMap<GroupedSizes, Mean>>,
    /// Convolutions.
    pub(in crate::calibrate) conv: BTreeMap<(DType, [u64; 3]), Mean>,
    /// Attention: element type, causal, backward; sizes.
    pub(in crate::calibrate) attention:
        BTreeMap<(DType, bool, bool), BTreeMap<AttentionShape, Mean>>,
    /// Time from the end of a kernel to the start of the next one on its stream.
    pub(in crate::calibrate) gap_us: f64,
    /// Time from the issue of a kernel to its start, if its stream is idle.
    pub(in crate::calibrate) latency_us: f64,
    /// Time from the end of a kernel to the start of a kernel on another stream that waited for it.
    pub(in crate::calibrate) event_us: f64,
    /// Time to issue a kernel; an event's record or wait; an allocation or a free.
    pub(in crate::calibrate) issue_us: [f64; 3],
    /// Time from the end of the last task to the end of the step.
    pub(in crate::calibrate) tail_us: f64,
    /// Slowdown factor of kernels when every core is busy.
    pub(in crate::calibrate) crowded: f64,
    /// Duration of the shortest kernel.
    pub(in crate::calibrate) shortest_us: f64,
    /// Whole steps of several ranks.
    pub(in crate::calibrate) trials: Vec<Trial>,
}

impl Totals {
    /// Adds the microseconds of a launch that moves a given number of bytes.
    pub(in crate::calibrate) fn add(&mut self, kernel: &Kernel, moved: Bytes, us: f64) {
        self.shortest_us = if self.shortest_us == 0.0 {
            us
        } else {
            self.shortest_us.min(us)
        };
        match Row::of(kernel, moved) {
            Some(Row::Gemm(kind, shape)) => self.gemm.entry((kind, shape)).or_default().add(us),
            Some(Row::Grouped(kind, sizes)) => {
                let rows = self.grouped.entry(kind).or_default();
                rows.entry(sizes).or_default().add(us);
            }
            Some(Row::Conv(dtype, shape)) => self.conv.entry((dtype, shape)).or_default().add(us),
            Some(Row::Attention(table, shape)) => {
                let rows = self.attention.entry(table).or_default();
                rows.entry(shape).or_default().add(us);
            }
            Some(Row::Memory(table, bytes)) => {
                let rows = self.memory.entry(table).or_default();
                rows.entry(bytes).or_default().add(us);
            }
            None => {}
        }
    }

    /// Adds the kernels of other results, with the times of arithmetic multiplied by a factor.
    pub(in crate::calibrate) fn absorb(&mut self, other: &Self, arithmetic: f64) {
        for (row, &mean) in &other.gemm {
            self.gemm.entry(*row).or_default().absorb(mean, arithmetic);
        }
        for (kind, rows) in &other.grouped {
            let own = self.grouped.entry(*kind).or_default();
            for (row, &mean) in rows {
                own.entry(*row).or_default().absorb(mean, arithmetic);
            }
        }
        for (row, &mean) in &other.conv {
            self.conv.entry(*row).or_default().absorb(mean, arithmetic);
        }
        for (table, rows) in &other.attention {
            let own = self.attention.entry(*table).or_default();
            for (row, &mean) in rows {
                own.entry(*row).or_default().absorb(mean, arithmetic);
            }
        }
        for (table, rows) in &other.memory {
            let own = self.memory.entry(table.clone()).or_default();
            for (row, &mean) in rows {
                own.entry(*row).or_default().absorb(mean, 1.0);
            }
        }
    }

    /// Adds kernels, with the bytes that a launch of each moves, and microseconds.
    pub(in crate::calibrate) fn add_all<'a>(
        &mut self,
        kernels: impl IntoIterator<Item = (&'a Kernel, Bytes, f64)>,
    ) {
        for (kernel, moved, us) in kernels {
            self.add(kernel, moved, us);
        }
    }

    /// Returns whether there are times of memory-bound kernels with its class and element type.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs"))]
    pub(in crate::calibrate) fn knows_like(&self, kernel: &Kernel) -> bool {
        let class = kernel.class.memory_name().unwrap_or_default();
        let like = (class, kernel.dtype.rated());
        self.memory.keys().any(|(c, _, d)| (*c, *d) == like)
    }

    /// Returns the time of a kernel that was measured in isolation and moved the same number of
    /// bytes.
    pub(in crate::calibrate) fn find(&self, kernel: &Kernel, moved: Bytes) -> Option<f64> {
        let mean = match Row::of(kernel, moved)? {
            Row::Gemm(kind, shape) => self.gemm.get(&(kind, shape)),
            Row::Grouped(kind, sizes) => self.grouped.get(&kind)?.get(&sizes),
            Row::Conv(dtype, shape) => self.conv.get(&(dtype, shape)),
            Row::Attention(table, shape) => self.attention.get(&table)?.get(&shape),
            Row::Memory(table, bytes) => self.memory.get(&table)?.get(&bytes),
        };
        mean.map(|m| m.us())
    }
}

/// Returns the table of a kernel.
enum Row {
    Gemm(GemmKind, [u64; 3]),
    Grouped(GroupedKind, GroupedSizes),
    Conv(DType, [u64; 3]),
    Attention((DType, bool, bool), AttentionShape),
    Memory(MemoryKey, u64),
}

impl Row {
    /// Returns the table of a kernel. Batched GEMMs and GEMMs with a fused epilogue have none.
    fn of(kernel: &Kernel, moved: Bytes) -> Option<Self> {
        let dtype = kernel.dtype.rated();
        Some(match kernel.class {
            // Tables of GEMMs do not apply to kernels with a fused epilogue.
            KernelClass::Gemm { .. } if BodyOp::split_gemm_epilogue(&kernel.body).is_some() => {
                return None;
            }
            KernelClass::Gemm { m, n, k, batch: 1 } => Self::Gemm(kernel.gemm_kind(), [m, n, k]),
            KernelClass::Gemm { .. } => return None,
            KernelClass::GroupedGemm { .. } if kernel.body.len() > 1 => return None,
            KernelClass::GroupedGemm {
                rows,
                n,
                k,
                experts,
                ..
            } => {
                let each = (rows + experts / 2) / experts.max(1);
                let written = Bytes(moved.0.saturating_sub(kernel.read.0));
                let gradient = kernel.weight_gradient_of_experts(written);
                let kind = (kernel.gemm_kind(), gradient);
                Self::Grouped(kind, [experts, each.max(1), n, k])
            }
            KernelClass::Conv { m, n, k } => Self::Conv(dtype, [m, n, k]),
            // The tables are for attention over whole sequences.
            KernelClass::Attention { shape, .. }
                if shape.window.is_some() || shape.memory.is_some() =>
            {
                return None;
            }
            KernelClass::Attention { shape, backward } => {
                Self::Attention((dtype, shape.causal, backward), shape)
            }
            class => {
                let class = class.memory_name()?;
                Self::Memory((class, kernel.name.clone(), dtype), moved.0)
            }
        })
    }
}
