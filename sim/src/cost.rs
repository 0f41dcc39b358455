//! Isolated duration of each kernel, collective and copy, and the resources that each takes from
//! others.

mod attention;
#[cfg(test)]
mod every;
mod gemm;
mod grouped;
mod memory;
mod table;

use grouped::Grouped;
pub(crate) use table::log_interpolate;

use crate::hardware::{MemoryClass, Profile};
use crate::network::Network;
use crate::part::Part;
use crate::price::{Cost, Load, Price, copy_gbps, fixed_share};
use shardlab_plan::ir::{
    BodyOp, BufferId, CopyKind, DType, InstrId, Kernel, KernelClass, NewtonSchulz,
};
use shardlab_plan::program::{Op, Program, StreamKind, Traffic};
use shardlab_plan::record::Clock;
use shardlab_plan::units::{Bytes, Flops, Picos};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Costs of a program on a profile: kernels, then collectives, then copies, by index; then inputs
/// from the host.
#[derive(Debug)]
pub(crate) struct Costs {
    /// All costs.
    pub(crate) all: Vec<Cost>,
    /// Index of the first collective.
    pub(crate) collectives: usize,
    /// Index of the first copy.
    pub(crate) copies: usize,
    /// Index of the first input.
    pub(crate) inputs: usize,
    /// For each buffer, the index of the input that is copied into it.
    uploads: BTreeMap<BufferId, usize>,
    /// Whether the program asks for a fixed order of sums in attention's backward at a cost that
    /// the profile does not contain. It is then priced as without a fixed order.
    any_order: bool,
}

impl Costs {
    pub(crate) fn new(program: &Program, profile: &Profile) -> Self {
        let network = Network::new(program, profile);
        let collectives = program.kernels.len();
        let copies = collectives + program.collectives.len();
        let mut all = Vec::with_capacity(copies + program.copies.len());
        let (on_cpu, grouped) = (on_cpu(program), Grouped::new(profile));
        for ((kernel, moved), on_cpu) in program.kernels.iter().zip(moved(program)).zip(on_cpu) {
            // A device that is a CPU has no separate CPU.
            let mut cost = match on_cpu && profile.device.shared_cores.is_none() {
                true => cpu_cost(moved, profile),
                false => kernel_cost(kernel, moved, profile, &grouped),
            };
            if cost.load == Load::Compute && program.meta.mesh.world() > 1 {
                cost.work = (cost.work as f64 / profile.device.loaded_rate) as u64;
            }
            if program.meta.deterministic && is_attention_backward(kernel) {
                match profile.efficiency.attention_backward_fixed_order {
                    Some(slower) => cost.work = (cost.work as f64 * slower) as u64,
                    None => cost.measured = false,
                }
            }
            all.push(cost);
        }
        for collective in &program.collectives {
            all.push(network.cost(collective));
        }
        for copy in &program.copies {
            let bytes = copy.to.bytes.max(copy.from.bytes);
            all.push(copy_cost(copy.kind, bytes, profile));
        }
        let inputs = all.len();
        let mut uploads = BTreeMap::new();
        for buffer in (0..program.instrs.len() as u32).filter_map(|i| program.upload(InstrId(i))) {
            uploads.entry(buffer).or_insert_with(|| {
                let bytes = program.buffers[buffer.index()].bytes.0;
                all.push(copy_cost(CopyKind::H2d, bytes, profile));
                all.len() - 1
            });
        }
        Self {
            all,
            collectives,
            copies,
            inputs,
            uploads,
            any_order: program.meta.deterministic
                && profile.efficiency.attention_backward_fixed_order.is_none(),
        }
    }

    /// Replaces the durations of the first kernels by measured ones.
    pub(crate) fn measured(&mut self, times: &[Picos]) {
        for (cost, time) in self.all[..self.collectives].iter_mut().zip(times) {
            cost.work = time.0;
            cost.measured = true;
        }
    }

    /// Returns the index of an instruction's cost on the device; `None` if it runs on no stream.
    pub(crate) fn index(&self, program: &Program, instr: InstrId) -> Option<usize> {
        match program.instrs[instr.index()].op {
            Op::Launch { kernel, .. } => Some(kernel.index()),
            Op::Collective { id, .. } => Some(self.collectives + id.index()),
            Op::Copy { id, .. } => Some(self.copies + id.index()),
            _ => {
                let buffer = program.upload(instr)?;
                self.uploads.get(&buffer).copied()
            }
        }
    }

    /// Returns the name for reporting a kernel whose cost is modeled.
    pub(crate) fn modelled_name(&self, kernel: &Kernel) -> String {
        if self.any_order && is_attention_backward(kernel) {
            format!("{} in any order", kernel.name)
        } else {
            kernel.name.clone()
        }
    }

    /// Slows arithmetic down to a clock.
    pub(crate) fn at(&mut self, clock: &Clock) {
        for cost in self.all.iter_mut().filter(|c| c.load == Load::Compute) {
            let factor = match clock.float8_factor {
                Some(factor) if cost.float8 => factor,
                _ => clock.arithmetic_factor,
            };
            if factor != 1.0 {
                cost.work = (cost.work as f64 * factor) as u64;
            }
        }
    }

    /// Multiplies the durations of a part of the machine by `factor`.
    pub(crate) fn slow(&mut self, part: Part, factor: f64) {
        // A factor of one must not change anything, but a multiplication in `f64` would round large
        // numbers of picoseconds.
        if factor == 1.0 {
            return;
        }
        for cost in &mut self.all {
            if Part::of(cost.load) == Some(part) {
                cost.work = (cost.work as f64 * factor) as u64;
            }
            // A rank copies its local chunk at the speed of its memory, no matter how slow the
            // other ranks are.
            let own = f64::from(cost.local_copy_share) / f64::from(crate::clock::ONE);
            match part {
                Part::Memory => cost.local_copy_share = fixed_share(own * factor),
                Part::Collectives => cost.local_copy_share = fixed_share(own / factor),
                _ => {}
            }
        }
    }
}

fn copy_cost(kind: CopyKind, bytes: u64, profile: &Profile) -> Cost {
    let d = &profile.device;
    let (load, gbps, bandwidth) = match kind {
        CopyKind::H2d => (Load::ToDevice, d.h2d_gbps, d.h2d_gbps / d.memory_gbps),
        CopyKind::D2h => (Load::ToHost, d.d2h_gbps, d.d2h_gbps / d.memory_gbps),
        CopyKind::D2d => (Load::Copy, d.memory_gbps * 0.4, 0.8),
    };
    let work = Picos::from_us(d.copy_latency_us + bytes as f64 / gbps / 1e3).0;
    Cost {
        bandwidth: fixed_share(bandwidth),
        ..Cost::of(work, load)
    }
}

/// Returns for each kernel whether it runs on the CPU, with operands in host memory.
fn on_cpu(program: &Program) -> Vec<bool> {
    let mut out = vec![false; program.kernels.len()];
    let mut elsewhere = out.clone();
    for instr in &program.instrs {
        if let Op::Launch { kernel, stream, .. } = instr.op {
            let cpu = program.streams[stream.index()].kind == StreamKind::Cpu;
            let found = if cpu { &mut out } else { &mut elsewhere };
            found[kernel.index()] = true;
        }
    }
    out.iter()
        .zip(elsewhere)
        .map(|(cpu, other)| *cpu && !other)
        .collect()
}

/// Prices an operator on the CPU by its bytes, because the optimizer computes little.
fn cpu_cost(traffic: Traffic, profile: &Profile) -> Cost {
    let gbps = profile.host.cpu_gbps.unwrap_or(profile.device.h2d_gbps);
    let work = Picos::from_us(traffic.moved().0 as f64 / gbps / 1e3).0;
    Cost {
        measured: profile.host.cpu_gbps.is_some(),
        ..Cost::of(work, Load::Cpu)
    }
}

fn is_attention_backward(kernel: &Kernel) -> bool {
    matches!(kernel.class, KernelClass::Attention { backward: true, .. })
}

/// Returns the traffic of each kernel at its launches. If launches differ, this is the largest
/// traffic.
fn moved(program: &Program) -> Vec<Traffic> {
    let descriptor = |k: &Kernel| Traffic {
        read: k.read,
        written: k.written,
    };
    let mut launched: Vec<Option<Traffic>> = vec![None; program.kernels.len()];
    for instr in &program.instrs {
        if let Op::Launch { kernel, .. } = instr.op {
            let (known, here) = (&mut launched[kernel.index()], program.traffic(&instr.op));
            if known.is_none_or(|k| here.moved() > k.moved()) {
                *known = Some(here);
            }
        }
    }
    let kernels = program.kernels.iter().zip(launched);
    kernels
        .map(|(k, t)| t.unwrap_or_else(|| descriptor(k)))
        .collect()
}

/// Returns an e5m2 kernel as the e4m3 one, and a float16 kernel as the bfloat16 one if nothing was
/// measured in float16: in both cases, devices move the same bytes and compute at the same rate.
fn as_measured<'a>(kernel: &'a Kernel, profile: &Profile) -> Cow<'a, Kernel> {
    let dtype = kernel.dtype.rated();
    if dtype != kernel.dtype {
        return Cow::Owned(Kernel {
            dtype,
            ..kernel.clone()
        });
    }
    let [f16, bf16] = [DType::F16, DType::Bf16];
    let (gemms, attention) = (profile.gemm.iter(), profile.attention_tables());
    let mut measured = gemms
        .map(|t| Some(t.dtype))
        .chain(attention.map(|t| Some(t.dtype)))
        .chain(profile.memory.iter().map(|t| t.dtype));
    let same_peak = profile.peak_flops(f16) == profile.peak_flops(bf16);
    if kernel.dtype != f16 || !same_peak || measured.any(|d| d == Some(f16)) {
        return Cow::Borrowed(kernel);
    }
    Cow::Owned(Kernel {
        dtype: bf16,
        ..kernel.clone()
    })
}

/// Prices a kernel that runs alone.
fn price(kernel: &Kernel, traffic: Traffic, profile: &Profile, grouped: &Grouped<'_>) -> Price {
    let asked = kernel;
    let kernel = &*as_measured(asked, profile);
    let price = match kernel.class {
        KernelClass::Gemm { m, n, k, batch } => match BodyOp::split_gemm_epilogue(&kernel.body) {
            Some((gemms, _)) => {
                let (shape, count) = ([m, n, k], gemms.len() as u64);
                gemm::with_epilogue(profile, kernel.dtype, shape, count, traffic.moved())
            }
            None => {
                let result = traffic.written.0 as f64 / (m * n * batch) as f64;
                let (tables, shape) = (&profile.gemm, [m, n, k]);
                let kind = kernel.gemm_kind();
                let price = gemm::price(tables, profile, kind, result, shape, batch, 1.0);
                match gemm::misaligned(&kernel.body, profile) {
                    factor if gemm::is_measured(tables, kind, shape) || factor == 1.0 => price,
                    factor => Price {
                        us: price.us * factor,
                        ..price
                    },
                }
            }
        },
        KernelClass::Conv { m, n, k } => gemm::price(
            &profile.conv,
            profile,
            kernel.dtype,
            kernel.dtype.size() as f64,
            [m, n, k],
            1,
            profile.efficiency.conv,
        ),
        KernelClass::Attention { .. } => attention::price(kernel, traffic.moved(), profile),
        KernelClass::GroupedGemm {
            rows,
            n,
            k,
            experts,
            ..
        } => {
            let shape = grouped::Shape {
                rows,
                n,
                k,
                experts,
                gradient: kernel.weight_gradient_of_experts(traffic.written),
            };
            let (kind, moved) = (kernel.gemm_kind(), traffic.moved());
            match BodyOp::split_gemm_epilogue(&kernel.body) {
                Some(_) => grouped.with_epilogue(kind, shape, moved),
                None => grouped.price(kind, shape, moved),
            }
        }
        KernelClass::Optimizer => match kernel.newton_schulz() {
            Some(of) => muon(kernel, traffic.moved(), profile, of),
            None => memory::price(kernel, traffic.moved(), profile),
        },
        _ => memory::price(kernel, traffic.moved(), profile),
    };
    Price {
        us: price.us.max(profile.device.min_kernel_us),
        measured: price.measured && kernel.dtype == asked.dtype.rated(),
    }
}

/// Prices an update by Muon by its memory traffic and its matmuls, which all run at the rate of the
/// largest matrix.
fn muon(kernel: &Kernel, moved: Bytes, profile: &Profile, of: NewtonSchulz) -> Price {
    let elementwise = Kernel {
        flops: Flops(kernel.flops.0.saturating_sub(of.flops)),
        ..kernel.clone()
    };
    let mut price = memory::price(&elementwise, moved, profile);
    let of_largest = NewtonSchulz::matrix_flops(of.largest);
    if of_largest > 0 {
        let matmul =
            |shape| gemm::price(&profile.gemm, profile, DType::Bf16, 2.0, shape, 1, 1.0).us;
        let iteration: f64 = NewtonSchulz::matmuls(of.largest).map(matmul).iter().sum();
        let matrices = of.flops as f64 / of_largest as f64;
        price.us += NewtonSchulz::STEPS as f64 * iteration * matrices;
    }
    Price {
        measured: false,
        ..price
    }
}

#[cfg(test)]
fn price_alone(kernel: &Kernel, traffic: Traffic, profile: &Profile) -> Price {
    price(kernel, traffic, profile, &Grouped::new(profile))
}

fn kernel_cost(
    kernel: &Kernel,
    traffic: Traffic,
    profile: &Profile,
    grouped: &Grouped<'_>,
) -> Cost {
    let price = price(kernel, traffic, profile, grouped);
    let bytes = traffic.moved().0 as f64;
    let bound_by_memory = MemoryClass::of(&kernel.class).is_some();
    // Bandwidth relative to what a plain copy reaches: a kernel that reads its operands several
    // times (softmax) or with strides keeps the memory system as busy as a streaming kernel.
    let reach = copy_gbps(profile);
    let bandwidth = if bound_by_memory {
        1.0
    } else {
        bytes / price.us / 1e3 / reach
    };
    let fills = match kernel.class {
        KernelClass::Gemm { m, n, batch, .. } => {
            gemm::tiles(m, n) * batch >= u64::from(profile.device.sms)
        }
        KernelClass::Conv { m, n, .. } => gemm::tiles(m, n) >= u64::from(profile.device.sms),
        KernelClass::GroupedGemm { rows, n, .. } => {
            gemm::tiles(rows, n) >= u64::from(profile.device.sms)
        }
        _ => price.us >= profile.contention.start_wait_min_us,
    };
    let load = if bound_by_memory {
        Load::Memory
    } else {
        Load::Compute
    };
    Cost {
        bandwidth: fixed_share(bandwidth),
        fills: fills && price.us >= profile.contention.start_wait_min_us,
        measured: price.measured,
        float8: kernel.float8_gemm().is_some(),
        ..Cost::of(Picos::from_us(price.us).0, load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware;
    use shardlab_plan::ir::{AttentionShape, BodyOp, OpKind, Place, Real, Slot, op};
    use shardlab_plan::units::{Bytes, Flops};
    use smallvec::SmallVec;

    fn kernel(name: &str, class: KernelClass, flops: u64, read: u64, written: u64) -> Kernel {
        Kernel {
            name: name.into(),
            class,
            flops: Flops(flops),
            read: Bytes(read),
            written: Bytes(written),
            dtype: DType::Bf16,
            body: Vec::new(),
            used_rows: None,
        }
    }

    fn alone(kernel: &Kernel, profile: &Profile) -> Price {
        let (read, written) = (kernel.read, kernel.written);
        price_alone(kernel, Traffic { read, written }, profile)
    }

    fn gemm(m: u64, n: u64, k: u64) -> Kernel {
        let bytes = 2 * (m * k + k * n);
        kernel(
            "mm",
            KernelClass::Gemm { m, n, k, batch: 1 },
            2 * m * n * k,
            bytes,
            2 * m * n,
        )
    }

    /// The profile measured with `exec` has 2,048 rows of the 1b model's feed-forward layer in its
    /// table, but only in bfloat16.
    #[test]
    fn float16_takes_what_bf16_does_where_it_was_not_measured() {
        let mut profile = hardware::load("h200-nvlink-exec").unwrap();
        let class = KernelClass::Gemm {
            m: 2048,
            n: 8192,
            k: 2048,
            batch: 1,
        };
        let of = |dtype, profile: &Profile| {
            let kernel = Kernel {
                dtype,
                ..kernel("mm", class, 0, 0, 0)
            };
            price_alone(
                &kernel,
                Traffic {
                    read: Bytes(0),
                    written: Bytes(0),
                },
                profile,
            )
        };
        let bf16 = of(DType::Bf16, &profile);
        assert!(bf16.measured);
        let f16 = of(DType::F16, &profile);
        assert_eq!((f16.us, f16.measured), (bf16.us, false));
        // A float16 table takes precedence.
        let mut table = profile.gemm[0].clone();
        table.dtype = DType::F16;
        table.rows.retain(|r| (r.0, r.1, r.2) == (2048, 8192, 2048));
        table.rows[0].3 = 500.0;
        profile.gemm.push(table);
        assert_eq!(of(DType::F16, &profile).us, 500.0);
    }

    /// If memory operations take half as long again, so does the local chunk. If collectives run at
    /// half of their rate, the share of the local chunk is halved.
    #[test]
    fn a_rank_s_own_part_is_as_slow_as_memory() {
        let mut program = crate::synthetic::fsdp(&crate::synthetic::Shape::tiny());
        program.communicators[0].copy_engine = true;
        let profile = hardware::load("h200-nvlink").unwrap();
        let of = |part, factor| {
            let mut costs = Costs::new(&program, &profile);
            costs.slow(part, factor);
            let cost = costs.all[costs.collectives];
            (f64::from(cost.local_copy_share), cost.work)
        };
        let (own, work) = of(Part::Host, 2.0);
        assert!(own > 100.0, "{own}");
        let (memory, same) = of(Part::Memory, 1.5);
        assert!((memory - 1.5 * own).abs() < 2.0 && same == work);
        let (collectives, longer) = of(Part::Collectives, 2.0);
        assert!((collectives - own / 2.0).abs() < 2.0 && longer == 2 * work);
    }

    /// Attention of Mistral with a window and of Gemma 2, recorded in steps of transformers on two
    /// H200. A profile without such rows prices it like attention without a mask.
    #[test]
    fn attention_that_reads_a_mask_has_its_own_rows() {
        let mut profile = hardware::load("h200-nvlink").unwrap();
        let us = |sizes, masked: bool, profile: &Profile| {
            let shape = AttentionShape::new(sizes, false);
            let class = KernelClass::Attention {
                shape,
                backward: false,
            };
            let op = OpKind::MaskedAttention(op::MaskedAttention { scale: Real(1.0) });
            let reads = BodyOp {
                op,
                inputs: Default::default(),
                outputs: Default::default(),
            };
            let kernel = Kernel {
                body: masked.then_some(reads).into_iter().collect(),
                ..kernel("attention", class, shape.flops(false), 0, 0)
            };
            alone(&kernel, &profile.clone()).us
        };
        let [mistral, gemma] = [[1, 32, 32, 8192, 128], [1, 16, 16, 4096, 256]];
        assert_eq!(us(mistral, true, &profile), 3273.2);
        assert_eq!(us(gemma, true, &profile), 1046.2);
        assert!(us(mistral, true, &profile) > 1.3 * us(mistral, false, &profile));
        profile.attention.retain(|t| !t.mask);
        assert_eq!(us(gemma, true, &profile), us(gemma, false, &profile));
    }

    /// Gradients of OLMo 2's blocks, in the same steps: 202 M elements in bf16, not cast.
    #[test]
    fn gradients_that_are_not_cast_are_copied_faster() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let us = |read, written| {
            let kernel = kernel("chunk_cat", KernelClass::MultiCopy, 0, read, written);
            alone(&kernel, &profile).us
        };
        let bf16 = 404_783_104;
        let copied = us(bf16, bf16);
        assert!((copied / 229.6 - 1.0).abs() < 0.01, "{copied}");
        let cast = us(bf16, 2 * bf16);
        assert!(cast > 2.0 * copied, "{cast}");
    }

    /// Multiplications of norms, and sums of rotations, in profiled steps of OLMo 2, Mistral and
    /// Cohere on two H200: `[4096, 4096]` and `[8192, 4096]` by rows or weights.
    #[test]
    fn strided_kernels_take_the_times_of_their_types() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let us = |name, dtypes: &[DType], read, written| {
            let inputs = dtypes.iter().enumerate().map(|(n, &dtype)| Slot {
                place: Place::Read(n as u8),
                offset: 0,
                shape: SmallVec::new(),
                strides: SmallVec::new(),
                dtype,
            });
            let body = BodyOp {
                op: OpKind::Mul,
                inputs: inputs.collect(),
                outputs: SmallVec::new(),
            };
            let kernel = Kernel {
                dtype: dtypes[0],
                body: vec![body],
                ..kernel(name, KernelClass::Strided, 0, read, written)
            };
            alone(&kernel, &profile).us
        };
        let (f32, bf16) = (DType::F32, DType::Bf16);
        let (mib64, mib128) = (64 << 20, 128 << 20);
        for (predicted, measured) in [
            (us("mul", &[f32, f32], mib64, mib64), 53.5),
            (us("mul", &[f32, f32], mib128, mib128), 108.4),
            (us("mul", &[f32, bf16], mib64, mib64), 73.6),
            (us("mul", &[bf16, bf16], mib64, mib64), 90.5),
            (us("add", &[f32, f32], mib128, mib64), 65.7),
        ] {
            let error: f64 = predicted / measured - 1.0;
            assert!(error.abs() < 0.09, "{predicted} of {measured}");
        }
    }

    /// Kernels of eager attention in steps of MPT, Bloom and GPT-OSS on one H200, and `rows.py`.
    #[test]
    fn the_time_of_softmax_depends_on_its_rows_and_that_of_sums_on_elements() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let us = |name: &str, op, class, dtype: DType, shapes: [&[u64]; 3]| {
            let slot = |shape: &[u64]| Slot {
                place: Place::Read(0),
                offset: 0,
                shape: SmallVec::from_slice(shape),
                strides: SmallVec::new(),
                dtype,
            };
            let bytes = |shape: &[u64]| shape.iter().product::<u64>() * dtype.size();
            let [a, b, out] = shapes;
            let operands = [a, b].into_iter().filter(|shape| !shape.is_empty());
            let read = operands.clone().map(bytes).sum();
            let body = BodyOp {
                op,
                inputs: operands.map(slot).collect(),
                outputs: SmallVec::from_elem(slot(out), 1),
            };
            let kernel = Kernel {
                dtype,
                body: vec![body],
                ..kernel(name, class, 0, read, bytes(out))
            };
            alone(&kernel, &profile).us
        };
        let softmax = |dtype, shape| {
            let class = KernelClass::Softmax { backward: false };
            us(
                "softmax",
                OpKind::Softmax,
                class,
                dtype,
                [shape, &[], shape],
            )
        };
        let backward = |dtype, shape| {
            let class = KernelClass::Softmax { backward: true };
            let name = "softmax_backward";
            us(
                name,
                OpKind::SoftmaxGrad,
                class,
                dtype,
                [shape, shape, shape],
            )
        };
        let masked = |shape, mask| {
            let class = KernelClass::Strided;
            us("add", OpKind::Add, class, DType::Bf16, [shape, mask, shape])
        };
        let (f32, bf16) = (DType::F32, DType::Bf16);
        for (predicted, measured) in [
            (softmax(f32, &[4, 32, 2048, 2048]), 1507.5),
            (softmax(f32, &[1 << 18, 1024]), 521.8),
            (softmax(f32, &[65_536, 4096]), 824.1),
            (softmax(bf16, &[1, 64, 4096, 4097]), 4576.5),
            (backward(f32, &[4, 32, 2048, 2048]), 1476.5),
            (backward(bf16, &[1, 64, 4096, 4097]), 3149.5),
            (backward(bf16, &[65_536, 4096]), 369.9),
            (masked(&[2, 32, 2048, 2048], &[2, 1, 2048, 2048]), 739.5),
            (masked(&[1, 64, 4096, 4096], &[1, 1, 4096, 4096]), 2884.0),
        ] {
            let error: f64 = predicted / measured - 1.0;
            assert!(error.abs() < 0.09, "{predicted} of {measured}");
        }
    }

    /// Matmuls of Falcon's attention in steps on two H200.
    #[test]
    fn float32_matmuls_of_many_heads_reach_half_of_the_peak() {
        let profile = hardware::load("h200-nvlink").unwrap();
        for ([m, n, k], measured) in [([2048, 64, 2048], 959.8), ([2048, 2048, 64], 1109.4)] {
            let batch = 71;
            let class = KernelClass::Gemm { m, n, k, batch };
            let kernel = Kernel {
                dtype: DType::F32,
                ..kernel("bmm", class, 2 * batch * m * n * k, 0, 0)
            };
            let us = alone(&kernel, &profile).us;
            assert!((us / measured - 1.0).abs() < 0.1, "{us} of {measured}");
        }
    }

    #[test]
    fn measured_rows_are_returned_exactly() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for table in profile.gemm.iter().filter(|t| t.dtype == DType::Bf16) {
            // If several rows have the same shape, the first one counts.
            for row in table.rows.iter().filter(|r| seen.insert((r.0, r.1, r.2))) {
                let price = alone(&gemm(row.0, row.1, row.2), &profile);
                assert!(price.measured);
                assert!((price.us - row.3).abs() < 1e-9 * row.3, "{row:?} {price:?}");
            }
        }
    }

    /// Kernels of a step of a 1.5 B model (8,192 tokens per rank), averaged over two eager steps
    /// under the profiler, compared with the profile's tables of isolated kernels.
    #[test]
    fn memory_bound_kernels_of_a_profiled_step() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let mb = 1_000_000;
        for (name, class, read, written, us) in [
            ("mul", KernelClass::Pointwise, 268 * mb, 134 * mb, 98.4),
            ("silu", KernelClass::Pointwise, 134 * mb, 134 * mb, 70.5),
            (
                "silu_backward",
                KernelClass::Pointwise,
                268 * mb,
                134 * mb,
                106.4,
            ),
            (
                "rms_norm",
                KernelClass::Norm { backward: false },
                33_600_000,
                33_600_000,
                33.4,
            ),
            (
                "rms_norm_backward",
                KernelClass::Norm { backward: true },
                67_100_000,
                33_600_000,
                34.2,
            ),
            (
                "log_softmax",
                KernelClass::Softmax { backward: false },
                4_203 * mb,
                4_203 * mb,
                3990.0,
            ),
            (
                "log_softmax_backward",
                KernelClass::Softmax { backward: true },
                8_405 * mb,
                4_203 * mb,
                4242.0,
            ),
            ("cast", KernelClass::Copy, 4_203 * mb, 2_101 * mb, 1448.0),
            (
                "adamw",
                KernelClass::Optimizer,
                5_994 * mb,
                4_496 * mb,
                3043.0,
            ),
        ] {
            let price = alone(&kernel(name, class, 0, read, written), &profile);
            let error = price.us / us - 1.0;
            assert!(
                error.abs() < 0.25,
                "{name}: {:.1} us, measured {us}",
                price.us
            );
        }
    }

    /// Newton-Schulz runs at a third of the tensor cores' peak or more. The rest takes as long as
    /// Lion, which moves the same bytes.
    #[test]
    fn muon_takes_the_time_of_its_matmuls() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let of = |optimizer: &str| {
            let text = "[model]\npreset = \"llama3-8b\"\nlayers = 2\n\
                [fsdp]\npolicy = \"native\"\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 1\n";
            let set = [format!("train.optimizer={optimizer}")];
            let scenario = shardlab_plan::scenario::parse("t", text, &set).unwrap();
            let program = shardlab_plan::plan(&scenario).unwrap();
            let kernels = program.kernels.iter();
            let largest = kernels.filter(|k| k.class == KernelClass::Optimizer);
            let kernel = largest
                .max_by_key(|k| (k.newton_schulz().is_some(), k.read))
                .unwrap();
            (
                kernel.newton_schulz().map_or(0, |of| of.flops),
                alone(kernel, &profile),
            )
        };
        let (flops, muon) = of("muon");
        // The matrices of a block: w1, w2 and w3; q and o; k and v.
        let matrix = |m: u64, n: u64| 5 * (4 * m * m * n + 2 * m * m * m);
        let block = 3 * matrix(4096, 14336) + 2 * matrix(4096, 4096) + 2 * matrix(1024, 4096);
        assert_eq!(flops, block);
        let fastest = flops as f64 / profile.peak_flops(DType::Bf16) * 1e6;
        let matmuls = muon.us - of("lion").1.us;
        assert!(
            fastest < matmuls && matmuls < 3.0 * fastest,
            "{matmuls} us, {fastest}"
        );
        assert!(!muon.measured);
    }

    /// Float32 weight gradients take as long as the tables say, but they use more of the memory
    /// bandwidth while collectives run.
    #[test]
    fn gradients_weigh_on_neighbours_by_the_bytes_that_are_written() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let of = |grads: &str| {
            let text = "[model]\nfamily = \"linear\"\nlayers = 2\nhidden = 4096\n\
                [train]\nmicro_batch = 8192\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";
            let set = [
                "fsdp.policy=native".to_owned(),
                format!("precision.main_grads={grads}"),
            ];
            let scenario = shardlab_plan::scenario::parse("t", text, &set).unwrap();
            let program = shardlab_plan::plan(&scenario).unwrap();
            let gradient = program.kernels.iter().position(|k| {
                matches!(
                    k.class,
                    KernelClass::Gemm {
                        m: 4096,
                        n: 4096,
                        k: 8192,
                        ..
                    }
                )
            });
            Costs::new(&program, &profile).all[gradient.unwrap()]
        };
        let (wide, narrow) = (of("f32"), of("bf16"));
        assert_eq!(wide.work, narrow.work);
        // Two bfloat16 factors of 8192 x 4096, and gradients of 4096 x 4096.
        let bytes = |size: f64| 2.0 * 2.0 * 8192.0 * 4096.0 + size * 4096.0 * 4096.0;
        let ratio = f64::from(wide.bandwidth) / f64::from(narrow.bandwidth);
        assert!(
            // Shares are integers of about 500.
            (ratio - bytes(4.0) / bytes(2.0)).abs() < 4e-3,
            "{} against {}",
            wide.bandwidth,
            narrow.bandwidth
        );
    }

    /// The descriptor says that a fill has 100 MB, which are 200 MB if the gradient is stored in
    /// float32.
    #[test]
    fn a_table_is_looked_up_by_the_bytes_that_it_was_filed_by() {
        let mb = 1_000_000;
        let fill = kernel("fill", KernelClass::Fill, 0, 0, 100 * mb);
        let wide = Traffic {
            read: Bytes(0),
            written: Bytes(200 * mb),
        };
        let us = |in_step: bool, bytes: Option<hardware::Counted>| {
            let mut profile = hardware::load("h200-nvlink-exec").unwrap();
            profile.memory = vec![hardware::MemoryTable {
                source: "test".to_owned(),
                class: MemoryClass::Fill,
                op: None,
                dtype: None,
                columns: None,
                in_step,
                bytes,
                rows: vec![(100 * mb, 25.0), (200 * mb, 48.0)],
            }];
            price_alone(&fill, wide, &profile).us
        };
        assert_eq!(us(true, Some(hardware::Counted::Moved)), 48.0);
        assert_eq!(us(true, Some(hardware::Counted::Described)), 25.0);
        // Profiles that are older than this key keep their meaning.
        assert_eq!(us(true, None), 25.0);
        assert_eq!(us(false, None), 48.0);
    }

    #[test]
    fn no_kernel_beats_the_data_sheet() {
        for name in hardware::shipped() {
            let profile = hardware::load(name).unwrap();
            for (m, n, k) in [
                (64, 64, 64),
                (8192, 4096, 4096),
                (1000, 3000, 500),
                (128_256, 4096, 8192),
            ] {
                let g = gemm(m, n, k);
                let us = alone(&g, &profile).us;
                assert!(
                    us * 1e-6 * profile.peak_flops(DType::Bf16) >= g.flops.0 as f64,
                    "{name} {m}x{n}x{k}: {us}"
                );
            }
            let k = kernel("add", KernelClass::Pointwise, 0, 1 << 30, 1 << 29);
            assert!(
                alone(&k, &profile).us * 1e3 * profile.device.memory_gbps
                    >= 1.5 * f64::from(1 << 30),
                "{name}"
            );
        }
    }

    #[test]
    fn more_work_never_costs_less() {
        let profile = hardware::load("h200-nvlink").unwrap();
        let mut last = 0.0;
        for bytes in (10..34).map(|i| 1u64 << i) {
            let us = alone(
                &kernel("add", KernelClass::Pointwise, 0, bytes, bytes),
                &profile,
            )
            .us;
            assert!(us >= last);
            last = us;
        }
    }
}
