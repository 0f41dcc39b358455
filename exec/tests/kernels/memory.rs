//! Memory for launches, and numbers to fill it.

use half::{bf16, f16};
use shardlab_exec::kernels::{self, KernelError};
use shardlab_exec::{Hyper, LaunchContext, ONE_GROUP, RawRange};
use shardlab_plan::ir::{BodyOp, DType, Kernel, KernelClass, Shape, Slot};
use shardlab_plan::units::{Bytes, Flops};

/// Generates deterministic numbers.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    /// Returns a number in (-1, 1).
    pub(super) fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Returns an integer below `n`.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        ((self.next() + 1.0) / 2.0 * n as f64) as u64
    }
}

/// A buffer. New buffers hold NaN (all bits set), so that reads before writes are detected.
#[derive(Clone)]
pub(super) struct Buffer {
    words: Vec<u64>,
    pub(super) dtype: DType,
    pub(super) numel: usize,
}

impl Buffer {
    pub(super) fn new(dtype: DType, numel: usize) -> Self {
        let bytes = numel * dtype.size() as usize;
        Self {
            words: vec![u64::MAX; bytes.div_ceil(8) + 1],
            dtype,
            numel,
        }
    }

    pub(super) fn of(dtype: DType, values: &[f64]) -> Self {
        let mut b = Self::new(dtype, values.len());
        b.write(0, values);
        b
    }

    pub(super) fn range(&mut self) -> RawRange {
        let bytes = self.numel * self.dtype.size() as usize;
        RawRange {
            ptr: self.words.as_mut_ptr().cast(),
            bytes,
            dtype: self.dtype,
        }
    }

    /// Returns the elements `from..from + n`.
    pub(super) fn part(&mut self, from: usize, n: usize) -> RawRange {
        assert!(from + n <= self.numel);
        let size = self.dtype.size() as usize;
        let all = self.range();
        RawRange {
            ptr: all.ptr.wrapping_add(from * size),
            bytes: n * size,
            dtype: self.dtype,
        }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.numel * self.dtype.size() as usize]
    }

    /// Returns the bytes, for bitwise comparisons.
    pub(super) fn bits(&self) -> Vec<u8> {
        self.bytes().to_vec()
    }

    pub(super) fn get(&self, i: usize) -> f64 {
        let s = self.dtype.size() as usize;
        let b = &self.bytes()[i * s..][..s];
        match self.dtype {
            DType::F32 => f64::from(f32::from_le_bytes(b.try_into().unwrap())),
            DType::Bf16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f64(),
            DType::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f64(),
            DType::I64 => i64::from_le_bytes(b.try_into().unwrap()) as f64,
            DType::U8 => f64::from(b[0]),
            DType::F8E4m3 => float8::F8E4M3::from_bits(b[0]).to_f64(),
            DType::F8E5m2 => float8::F8E5M2::from_bits(b[0]).to_f64(),
        }
    }

    pub(super) fn values(&self) -> Vec<f64> {
        (0..self.numel).map(|i| self.get(i)).collect()
    }

    pub(super) fn write(&mut self, at: usize, values: &[f64]) {
        let (s, dtype) = (self.dtype.size() as usize, self.dtype);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (i, &v) in values.iter().enumerate() {
            let b = &mut bytes[(at + i) * s..][..s];
            match dtype {
                DType::F32 => b.copy_from_slice(&(v as f32).to_le_bytes()),
                DType::Bf16 => b.copy_from_slice(&bf16::from_f32(v as f32).to_le_bytes()),
                DType::F16 => b.copy_from_slice(&f16::from_f32(v as f32).to_le_bytes()),
                DType::I64 => b.copy_from_slice(&(v as i64).to_le_bytes()),
                DType::U8 => b[0] = v as u8,
                DType::F8E4m3 => b[0] = float8::F8E4M3::from_f64(v).to_bits(),
                DType::F8E5m2 => b[0] = float8::F8E5M2::from_f64(v).to_bits(),
            }
        }
    }
}

/// Returns the element positions of a slot in logical order.
pub(super) fn positions(s: &Slot) -> Vec<usize> {
    let strides = if s.strides.is_empty() {
        super::semantics::contiguous(&s.shape)
    } else {
        s.strides.to_vec()
    };
    let mut out = vec![s.offset as usize];
    for (&n, &st) in s.shape.iter().zip(&strides) {
        out = out
            .iter()
            .flat_map(|&b| (0..n).map(move |i| b + (i * st) as usize))
            .collect();
    }
    out
}

pub(super) const HYPER: Hyper = Hyper {
    lr: 1e-2,
    betas: [0.9, 0.95],
    eps: 1e-8,
    muon: shardlab_exec::NO_MUON,
    weight_decay: 0.1,
    clip_norm: 0.0,
    step: 1,
    groups: ONE_GROUP,
};

/// Creates a kernel with a body.
pub(super) fn kernel(body: Vec<BodyOp>) -> Kernel {
    Kernel {
        name: "test".to_owned(),
        class: KernelClass::Fused,
        flops: Flops(0),
        read: Bytes(0),
        written: Bytes(0),
        dtype: DType::F32,
        body,
        used_rows: None,
    }
}

/// Launches a kernel on buffers that outlive the call.
pub(super) fn launch(
    kernel: &Kernel,
    hyper: Hyper,
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), KernelError> {
    let ctx = LaunchContext {
        kernel,
        data_rank: 0,
        hyper,
        shapes,
        groups: &[],
        scales: &[],
    };
    launch_in(&ctx, reads, writes)
}

/// Launches an optimizer whose weights are in several parameter groups.
pub(super) fn launch_in(
    ctx: &LaunchContext<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), KernelError> {
    // SAFETY: the tests' buffers outlive the call, and only this thread accesses them.
    unsafe { kernels::launch(ctx, reads, writes) }
}
