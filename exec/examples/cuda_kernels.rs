//! Runs every kernel of some scenarios on a GPU: compares it with the CPU's (`check`), times it
//! (`time`), or times GEMMs under load (`sustained`).
//!
//! ```text
//! cuda_kernels check small-native small-cnn --set compile.mode=blocks
//! cuda_kernels time peers-1b --set fsdp.policy=native --set compile.mode=blocks
//! cuda_kernels sustained peers-8b --seconds 60
//! ```
//!
//! `check` launches each distinct kernel once with random operands on both, and prints the largest
//! difference relative to the size of the result; it fails if a difference exceeds the resolution
//! of the type. `time` replays a captured graph of launches that alternate between operands which
//! no cache holds, and prints the bandwidth relative to a copy of one gibibyte and to one of the
//! same size, and arithmetic rates. `--only` selects kernels by parts of their names; `--first`
//! uses the libraries' first candidates without autotuning. `sustained` times cuBLASLt's candidates
//! for each distinct GEMM in a short burst after a pause, and the best ones also back to back while
//! the GPU is at its power limit. It prints what the latter choice would save per step, and ends
//! after about `--seconds`, most expensive GEMMs first. Needs a GPU.

#[cfg(not(feature = "cuda"))]
fn main() {
    eprintln!("built without the feature `cuda`");
    std::process::exit(3);
}

#[cfg(feature = "cuda")]
fn main() {
    let code = match bench::run() {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(e) => {
            eprintln!("{e}");
            3
        }
    };
    std::process::exit(code);
}

#[cfg(feature = "cuda")]
mod bench {
    use cudarc::driver::sys::{CUdeviceptr, CUstream};
    use cudarc::driver::{CudaContext, result, sys};
    use float8::{F8E4M3, F8E5M2};
    use half::{bf16, f16};
    use shardlab_exec::device::cuda::Libraries;
    use shardlab_exec::kernels::cuda::{Choose, HyperBlock, Kernels, Options, Trial, hyper_block};
    use shardlab_exec::operand::{Hyper, LaunchContext, ONE_GROUP, RawRange};
    use shardlab_plan::config::GroupSettings;
    use shardlab_plan::ir::{
        Access, DType, Holds, InstrId, Kernel, KernelClass, OpKind, Place, Shape, ShardOp, Slot, op,
    };
    use shardlab_plan::program::{Op, Program, workspace};
    use shardlab_plan::scenario;
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    type Failure = Box<dyn std::error::Error>;

    pub(super) fn run() -> Result<bool, Failure> {
        let mut args = std::env::args().skip(1);
        let mode = args.next().unwrap_or_default();
        let (mut names, mut sets, mut only) = (Vec::new(), Vec::new(), String::new());
        let (mut tf32, mut cudnn, mut choose) = (false, true, None);
        let mut seconds = 60.0;
        while let Some(a) = args.next() {
            match a.as_str() {
                "--set" => sets.extend(args.next()),
                "--tf32" => tf32 = true,
                "--no-cudnn" => cudnn = false,
                "--first" => choose = Some(Choose::First),
                "--seconds" => seconds = args.next().unwrap_or_default().parse()?,
                "--only" => only = args.next().unwrap_or_default(),
                _ => names.push(a),
            }
        }
        if !["check", "time", "sustained"].contains(&mode.as_str()) || names.is_empty() {
            return Err("usage: cuda_kernels check|time|sustained SCENARIO.. [--set KEY=VALUE].. [--tf32] [--no-cudnn] [--first] [--only NAME,..] [--seconds S]".into());
        }
        let libraries = Libraries::load(&[])?;
        let defaults = Options::default();
        let options = Options {
            libraries: libraries.folders().iter().map(|f| f.path.clone()).collect(),
            tf32,
            cudnn,
            choose: choose.unwrap_or(defaults.choose),
            ..defaults
        };
        let context = CudaContext::new(0)?;
        // SAFETY: this program owns its streams and orders its work itself.
        unsafe { context.disable_event_tracking() };
        shardlab_exec::kernels::use_threads(std::thread::available_parallelism()?.get());
        let mut good = true;
        for name in names {
            let s = scenario::load(Path::new(&name), &sets)?;
            let program = Arc::new(shardlab_plan::plan(&s)?);
            let started = Instant::now();
            let mut kernels = Kernels::new(Arc::clone(&context), Arc::clone(&program), &options)?;
            if mode == "sustained" {
                println!("== {name} {sets:?}");
                sustained(&kernels.trials(Duration::try_from_secs_f64(seconds)?)?);
                continue;
            }
            kernels.prepare()?;
            println!(
                "== {name} {sets:?}: {} kernels, prepared in {:.2} s, workspace {:.1} MiB, {:.1} planned",
                program.kernels.len(),
                started.elapsed().as_secs_f64(),
                kernels.workspace_bytes() as f64 / 1048576.0,
                workspace::of(&program).0 as f64 / 1048576.0
            );
            for why in kernels.refused() {
                println!("passed over: {why}");
            }
            let scratch = Memory::new(kernels.workspace_bytes())?;
            // SAFETY: the memory has the requested size and is used by nothing else.
            unsafe { kernels.set_workspace(scratch.at)? };
            let mut bench = Bench {
                stream: result::stream::create(result::stream::StreamKind::NonBlocking)?,
                hyper: Memory::new(size_of::<HyperBlock>() as u64)?,
                kernels,
                program,
                copy: 0.0,
            };
            bench.set_hyper()?;
            good &= bench.all(mode == "check", &only)?;
        }
        Ok(good)
    }

    /// Prints the times of GEMMs, and the effect of the choice among their candidates.
    fn sustained(trials: &[Trial]) {
        println!(
            "E: the engine's choice; B: the burst's winner by its rule; S: the fastest under load; microseconds a launch"
        );
        // Of a step's launches: the engine's choices, the winners of the bursts, the fastest under
        // load.
        let (mut sums, mut left) = ([0.0f64; 3], 0);
        for t in trials {
            let picks = [t.by_engine(), t.by_burst(), t.by_load()];
            println!(
                "{} x {}: {:.2} TFLOP a step",
                t.launches,
                t.gemm,
                t.flops * t.launches as f64 / 1e12
            );
            for (i, c) in t.candidates.iter().enumerate() {
                let mark = |pick: Option<usize>, c| if pick == Some(i) { c } else { ' ' };
                let steady = c.sustained.zip(c.steady()).map_or(String::new(), |(s, mean)| {
                    format!(
                        "{mean:9.2} sustained ({:9.2} {:9.2}) {:6.1} TFLOP/s, {:.3} of its burst",
                        s[0],
                        s[1],
                        t.flops / f64::from(mean) / 1e6,
                        mean / c.burst
                    )
                });
                println!(
                    "  {:2} {}{}{} {:9.2} burst {steady:81} {}{}",
                    c.place,
                    mark(picks[0], 'E'),
                    mark(picks[1], 'B'),
                    mark(picks[2], 'S'),
                    c.burst,
                    c.config,
                    c.sms
                        .map_or(String::new(), |n| format!(" for {n} multiprocessors")),
                );
            }
            let times = picks.map(|p| t.candidates.get(p?)?.steady());
            if let [Some(engine), Some(burst), Some(load)] = times {
                for (sum, time) in sums.iter_mut().zip([engine, burst, load]) {
                    *sum += f64::from(time) * t.launches as f64 / 1e3;
                }
            } else {
                left += 1;
            }
        }
        let [engine, burst, load] = sums;
        println!(
            "under load, ms a step: {engine:.2} as the engine chooses, {burst:.2} with the bursts' winners, {load:.2} with the fastest under load: {:.2} ms less than the engine ({:.2} %), {:.2} ms less than the bursts ({:.2} %)",
            engine - load,
            100.0 * (engine - load) / engine,
            burst - load,
            100.0 * (burst - load) / burst
        );
        println!(
            "{} GEMMs; {left} of them not run under load: more --seconds would",
            trials.len()
        );
    }

    const HYPER: Hyper = Hyper {
        lr: 1e-3,
        betas: [0.9, 0.95],
        eps: 1e-8,
        muon: shardlab_exec::NO_MUON,
        weight_decay: 0.1,
        clip_norm: 1.0,
        step: 3,
        groups: {
            let mut groups = ONE_GROUP;
            groups[0] = Some(GroupSettings {
                weight_decay: 0.0,
                lr_scale: 0.5,
            });
            groups
        },
    };

    struct Memory {
        at: CUdeviceptr,
    }

    impl Memory {
        fn new(bytes: u64) -> Result<Self, Failure> {
            // SAFETY: the context is current; uninitialized memory is not read.
            let at = unsafe { result::malloc_sync(bytes.max(256) as usize)? };
            Ok(Self { at })
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: allocated once, and freed once after the stream was synchronized.
            let _ = unsafe { result::free_sync(self.at) };
        }
    }

    struct Bench {
        kernels: Kernels,
        program: Arc<Program>,
        stream: CUstream,
        hyper: Memory,
        /// Returns the bandwidth of a copy: bytes read and written per second.
        copy: f64,
    }

    /// A small random number generator; its quality does not matter.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            self.0 >> 33
        }
        fn float(&mut self) -> f32 {
            let mut sum = 0.0;
            for _ in 0..4 {
                sum += self.next() as f32 / (1u64 << 31) as f32 - 0.5;
            }
            sum
        }
    }

    /// Returns the elements of a kind of buffer: random floats, or indices below a limit.
    fn fill(dtype: DType, bytes: &mut [u8], limit: i64, positive: bool, random: &mut Random) {
        let mut float = || {
            let x = random.float();
            if positive { x.abs() + 0.1 } else { x }
        };
        match dtype {
            DType::F32 => bytes
                .chunks_exact_mut(4)
                .for_each(|b| b.copy_from_slice(&float().to_le_bytes())),
            DType::Bf16 => bytes
                .chunks_exact_mut(2)
                .for_each(|b| b.copy_from_slice(&bf16::from_f32(float()).to_le_bytes())),
            DType::F16 => bytes
                .chunks_exact_mut(2)
                .for_each(|b| b.copy_from_slice(&f16::from_f32(float()).to_le_bytes())),
            DType::I64 => bytes.chunks_exact_mut(8).for_each(|b| {
                let id = (random.next() % limit.max(1) as u64) as i64;
                b.copy_from_slice(&id.to_le_bytes());
            }),
            DType::U8 => bytes.iter_mut().for_each(|b| *b = random.next() as u8),
            // Finite codes: without the highest bit of the exponent.
            DType::F8E4m3 | DType::F8E5m2 => bytes
                .iter_mut()
                .for_each(|b| *b = random.next() as u8 & !0x40),
        }
    }

    /// Returns whether CPUs and GPUs must compute the same codes and scales: the kernel only finds
    /// maxima, computes scales, casts to 8 bits and copies.
    fn casts_only(kernel: &Kernel) -> bool {
        const EXACT: [&str; 8] = [
            "row_amax",
            "float8_scale",
            "float8_cast",
            "float8_cast_rows",
            "float8_cast_blocks",
            "shard_amax",
            "shard_scales",
            "shard_float8_cast",
        ];
        let mut names = kernel.body.iter().map(|op| op.op.name());
        let casts = names.clone().any(|name| EXACT.contains(&name));
        casts && names.all(|name| name == "copy" || EXACT.contains(&name))
    }

    /// Puts values where casts differ from what they do elsewhere: infinities, NaN, both zeros, the
    /// largest and the smallest numbers, and stretches of zeros and of numbers whose maximum is too
    /// small for a scale.
    fn add_special(dtype: DType, bytes: &mut [u8], random: &mut Random) {
        const SPECIAL: [f32; 8] = [
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            3.3e38,
            1e-38,
            -1e-45,
        ];
        let put = |bytes: &mut [u8], v: f32| match dtype {
            DType::F32 => bytes.copy_from_slice(&v.to_le_bytes()),
            DType::Bf16 => bytes.copy_from_slice(&bf16::from_f32(v).to_le_bytes()),
            _ => bytes.copy_from_slice(&f16::from_f32(v).to_le_bytes()),
        };
        let size = if dtype == DType::F32 { 4 } else { 2 };
        let n = bytes.len() / size;
        if !matches!(dtype, DType::F32 | DType::Bf16 | DType::F16) || n < 4096 {
            return;
        }
        for (i, element) in bytes.chunks_exact_mut(size).enumerate() {
            if (n / 4..n / 4 + n / 16).contains(&i) {
                put(element, 0.0);
            } else if (n / 2..n / 2 + n / 16).contains(&i) {
                put(element, if i % 2 == 0 { 1e-39 } else { -2e-39 });
            } else if i >= 3 * n / 4 && random.next().is_multiple_of(997) {
                put(element, SPECIAL[random.next() as usize % SPECIAL.len()]);
            }
        }
    }

    /// Returns one unit of a type's resolution.
    fn unit(dtype: DType) -> f64 {
        match dtype {
            DType::Bf16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            // Codes, of which a number near the middle of two may get either.
            DType::U8 => 1.0 / 256.0,
            DType::F8E4m3 => 1.0 / 8.0,
            DType::F8E5m2 => 1.0 / 4.0,
            _ => 2e-5,
        }
    }

    /// Returns the elements of each result in a kernel's `n`-th write of `len` elements: results of
    /// different sizes may share a buffer, column by column. Returns all elements if the kernel
    /// does not specify them.
    fn results(kernel: &Kernel, n: usize, len: usize) -> Vec<Vec<usize>> {
        let here = |s: &&Slot| s.place == Place::Write(n as u8);
        let slots = kernel.body.iter().flat_map(|op| &op.outputs).filter(here);
        let each: Vec<Vec<usize>> = slots.map(elements).collect();
        if each.is_empty() {
            vec![(0..len).collect()]
        } else {
            each
        }
    }

    /// Returns the positions of a slot's elements in its operand.
    fn elements(slot: &Slot) -> Vec<usize> {
        let mut out = vec![slot.offset as usize];
        let mut below: u64 = slot.shape.iter().product();
        for (d, &n) in slot.shape.iter().enumerate() {
            below /= n.max(1);
            let stride = slot.strides.get(d).copied().unwrap_or(below);
            out = out
                .iter()
                .flat_map(|&first| (0..n).map(move |i| first + (i * stride) as usize))
                .collect();
        }
        out
    }

    /// Returns the largest difference among some elements, relative to their own size and to that
    /// of all of these elements.
    fn distance(want: &[f64], got: &[f64], elements: &[usize]) -> f64 {
        let squares = elements.iter().map(|&i| want[i] * want[i]);
        let size = (squares.sum::<f64>() / elements.len().max(1) as f64).sqrt();
        let differences = elements.iter().map(|&i| {
            let (w, g) = (want[i], got[i]);
            match w == g || w.is_nan() && g.is_nan() {
                true => 0.0,
                false => (w - g).abs() / (w.abs() + size + 1e-30),
            }
        });
        // NaN on one side only is the largest possible difference.
        let far = |e: f64| if e.is_nan() { f64::INFINITY } else { e };
        differences.map(far).fold(0.0, f64::max)
    }

    fn floats(dtype: DType, bytes: &[u8]) -> Vec<f64> {
        match dtype {
            DType::F32 => bytes
                .chunks_exact(4)
                .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap_or_default())))
                .collect(),
            DType::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| f64::from(bf16::from_le_bytes(b.try_into().unwrap_or_default())))
                .collect(),
            DType::F16 => bytes
                .chunks_exact(2)
                .map(|b| f64::from(f16::from_le_bytes(b.try_into().unwrap_or_default())))
                .collect(),
            DType::I64 => bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default()) as f64)
                .collect(),
            DType::U8 => bytes.iter().map(|b| f64::from(*b)).collect(),
            DType::F8E4m3 => bytes
                .iter()
                .map(|b| f64::from(F8E4M3::from_bits(*b).to_f32()))
                .collect(),
            DType::F8E5m2 => bytes
                .iter()
                .map(|b| f64::from(F8E5M2::from_bits(*b).to_f32()))
                .collect(),
        }
    }

    /// Returns a bound of indices that is valid for all operations of a kernel.
    fn id_limit(kernel: &Kernel) -> i64 {
        let of = |op: &shardlab_plan::ir::BodyOp| match op.op {
            OpKind::Embedding => op.inputs[1].shape.first().copied(),
            OpKind::EmbeddingGrad => op.outputs[0].shape.first().copied(),
            OpKind::NllLoss | OpKind::CrossEntropy { .. } => op.inputs[0].shape.last().copied(),
            OpKind::NllLossGrad => op.outputs[0].shape.last().copied(),
            OpKind::RouteGrad(_) => op.inputs[1].shape.last().copied(),
            OpKind::SortExperts(of) => Some(of.experts),
            OpKind::CountExperts => Some(op.outputs[0].shape.iter().product()),
            _ => None,
        };
        kernel.body.iter().filter_map(of).min().unwrap_or(1 << 20) as i64
    }

    /// Returns the read of a kernel that says where the rows of each expert start, and the number
    /// of rows that experts compute.
    fn expert_starts(kernel: &Kernel) -> Option<(usize, u64)> {
        if let Some(of) = &kernel.used_rows
            && let Place::Read(n) = of.offsets.place
        {
            return Some((usize::from(n), of.expected));
        }
        let first = kernel.body.first()?;
        let routed = match first.op {
            OpKind::GroupedGemm(op) => op.routed,
            OpKind::GroupedGemmWeightGrad(op) => op.routed,
            _ => return None,
        };
        let Place::Read(n) = first.inputs[2].place else {
            return None;
        };
        let all = first.inputs[0].shape[0];
        Some((usize::from(n), routed.unwrap_or(all)))
    }

    /// Writes valid choices of experts into an operand that says where their rows are: `even`ly or
    /// randomly divided rows of experts, or a row for each choice.
    fn choose(
        kernel: &Kernel,
        (operand, a): (usize, &Access),
        bytes: &mut [u8],
        even: bool,
        random: &mut Random,
    ) {
        let of = |found: Option<(usize, u64)>| found.filter(|(n, _)| *n == operand);
        let range = a.offset as usize..(a.offset + a.bytes) as usize;
        if let Some((_, rows)) = of(expert_starts(kernel)) {
            starts(
                rows,
                &mut bytes[range.clone()],
                (!even).then_some(&mut *random),
            );
        }
        if let Some((_, rows)) = of(positions(kernel)) {
            shuffle(rows, &mut bytes[range], random);
        }
    }

    /// Returns the read of a kernel that has the row of each choice, and the number of rows.
    fn positions(kernel: &Kernel) -> Option<(usize, u64)> {
        let first = kernel.body.first()?;
        let sorted = match first.op {
            OpKind::Permute(_) => &first.outputs[0],
            OpKind::Unpermute(_) => &first.inputs[0],
            _ => return None,
        };
        match first.inputs[1].place {
            Place::Read(n) => Some((usize::from(n), sorted.shape[0])),
            _ => None,
        }
    }

    /// Gives choices different rows in random order. Choices without a row have -1.
    fn shuffle(rows: u64, bytes: &mut [u8], random: &mut Random) {
        let choices = bytes.len() as u64 / 8;
        let mut order: Vec<i64> = (0..rows.max(choices))
            .map(|row| if row < rows { row as i64 } else { -1 })
            .collect();
        for i in (1..order.len()).rev() {
            order.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        for (to, row) in bytes.chunks_exact_mut(8).zip(order) {
            to.copy_from_slice(&row.to_le_bytes());
        }
    }

    /// Divides rows among experts: as even as possible, or at random.
    fn starts(rows: u64, bytes: &mut [u8], random: Option<&mut Random>) {
        let experts = (bytes.len() / 8).saturating_sub(1).max(1) as u64;
        let mut starts: Vec<u64> = (0..=experts).map(|e| rows * e / experts).collect();
        if let (Some(random), [_, between @ .., _]) = (random, &mut starts[..]) {
            between.fill_with(|| random.next() % (rows + 1));
            between.sort_unstable();
        }
        for (to, start) in bytes.chunks_exact_mut(8).zip(starts) {
            to.copy_from_slice(&(start as i64).to_le_bytes());
        }
    }

    /// Bytes that launches access before they access the same memory again: several times the
    /// second-level cache.
    const COLD: f64 = 512e6;
    /// Maximum bytes of device memory for operands.
    const ROOM: u64 = 24 << 30;

    /// Returns the median seconds of one launch among many in a captured graph, as in a step; `f`
    /// receives its index.
    fn launches(
        stream: CUstream,
        mut f: impl FnMut(usize) -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let (a, b) = (event()?, event()?);
        let timed = |f: &mut dyn FnMut() -> Result<(), Failure>| -> Result<f64, Failure> {
            // SAFETY: events and stream are live.
            unsafe {
                result::event::record(a, stream)?;
                f()?;
                result::event::record(b, stream)?;
                result::stream::synchronize(stream)?;
                Ok(f64::from(result::event::elapsed(a, b)?) / 1e3)
            }
        };
        f(0)?;
        let one = timed(&mut || f(0))?;
        let count = (3e-3 / one.max(1e-6)).clamp(4.0, 128.0) as usize;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live, and only `f` uses it meanwhile; the graph is destroyed after
        // its last launch.
        unsafe {
            result::stream::begin_capture(stream, mode)?;
            let done = (0..count).try_for_each(&mut f);
            let graph = result::stream::end_capture(stream)?;
            done?;
            let mut exec = std::ptr::null_mut();
            sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0).result()?;
            let mut go = || Ok(sys::cuGraphLaunch(exec, stream).result()?);
            go()?;
            let mut times = Vec::new();
            for _ in 0..7 {
                times.push(timed(&mut go)? / count as f64);
            }
            sys::cuGraphExecDestroy(exec).result()?;
            sys::cuGraphDestroy(graph).result()?;
            result::event::destroy(a)?;
            result::event::destroy(b)?;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        }
    }

    impl Bench {
        fn set_hyper(&mut self) -> Result<(), Failure> {
            // SAFETY: the block is 40 bytes, the memory 64.
            unsafe { result::memcpy_htod_sync(self.hyper.at, &hyper_block(&HYPER))? };
            Ok(result::ctx::synchronize()?)
        }

        /// Returns the first launch of each kernel with each combination of element types.
        fn launches(&self) -> Vec<InstrId> {
            let mut seen = BTreeSet::new();
            let mut out = Vec::new();
            for (i, instr) in self.program.instrs.iter().enumerate() {
                let Op::Launch { kernel, .. } = instr.op else {
                    continue;
                };
                let all = self
                    .program
                    .reads(&instr.op)
                    .iter()
                    .chain(self.program.writes(&instr.op));
                let types: Vec<_> = all
                    .map(|a| (self.program.buffers[a.buffer.index()].dtype, a.offset % 16))
                    .collect();
                if seen.insert((kernel, types)) {
                    out.push(InstrId(i as u32));
                }
            }
            out
        }

        fn all(&mut self, check: bool, only: &str) -> Result<bool, Failure> {
            let mut good = true;
            if !check {
                self.copy = self.copy_rate()?;
                println!(
                    "copy of 1 GiB: {:.0} GB/s read and written",
                    self.copy / 1e9
                );
            }
            for id in self.launches() {
                let Op::Launch { kernel, .. } = self.program.instrs[id.index()].op else {
                    continue;
                };
                let name = &self.program.kernels[kernel.index()].name;
                if !only.split(',').any(|part| name.contains(part)) {
                    continue;
                }
                if check {
                    good &= self.check(id)?;
                } else {
                    self.time(id)?;
                }
            }
            if let Some((_, fault)) = self.kernels.fault()? {
                println!("FAULT {fault}");
                good = false;
            }
            Ok(good)
        }

        fn copy_rate(&self) -> Result<f64, Failure> {
            let bytes = 1u64 << 30;
            let (a, b) = (Memory::new(bytes)?, Memory::new(bytes)?);
            let stream = self.stream;
            // SAFETY: both have the same size.
            let t = self.seconds(10, || unsafe {
                sys::cuMemcpyDtoDAsync_v2(b.at, a.at, bytes as usize, stream).result()?;
                Ok(())
            })?;
            Ok(2.0 * bytes as f64 / t)
        }

        /// Returns the median seconds of a launch.
        fn seconds(
            &self,
            runs: usize,
            mut f: impl FnMut() -> Result<(), Failure>,
        ) -> Result<f64, Failure> {
            let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
            f()?;
            f()?;
            let mut times = Vec::new();
            for _ in 0..runs {
                let (a, b) = (event()?, event()?);
                // SAFETY: events and stream are live.
                unsafe {
                    result::event::record(a, self.stream)?;
                    f()?;
                    result::event::record(b, self.stream)?;
                    result::stream::synchronize(self.stream)?;
                    times.push(f64::from(result::event::elapsed(a, b)?) / 1e3);
                    result::event::destroy(a)?;
                    result::event::destroy(b)?;
                }
            }
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        }

        fn shapes(&self, id: InstrId) -> Vec<Shape> {
            let op = &self.program.instrs[id.index()].op;
            let Op::Launch { kernel, .. } = *op else {
                return Vec::new();
            };
            let operands = match self.program.kernels[kernel.index()].body[0].op {
                OpKind::Shard(ShardOp::CopyOut { .. }) => self.program.writes(op),
                OpKind::Shard(ShardOp::ChunkCat { .. }) => self.program.reads(op),
                _ => return Vec::new(),
            };
            let shape = |a: &Access| match self.program.buffers[a.buffer.index()].holds {
                Holds::Param(p) => self.program.params[p.index()].shape.clone(),
                _ => Shape::from_slice(&[
                    a.bytes / self.program.buffers[a.buffer.index()].dtype.size()
                ]),
            };
            operands.iter().map(shape).collect()
        }

        /// Returns the ranges of accesses in buffers at given addresses.
        fn ranges(&self, accesses: &[Access], at: &BTreeMap<u32, u64>) -> Vec<RawRange> {
            let range = |a: &Access| RawRange {
                ptr: (at[&a.buffer.0] + a.offset) as *mut u8,
                bytes: a.bytes as usize,
                dtype: self.program.buffers[a.buffer.index()].dtype,
            };
            accesses.iter().map(range).collect()
        }

        fn check(&mut self, id: InstrId) -> Result<bool, Failure> {
            let program = Arc::clone(&self.program);
            let op = program.instrs[id.index()].op;
            let Op::Launch { kernel, .. } = op else {
                return Ok(true);
            };
            let kernel = &program.kernels[kernel.index()];
            let (reads, writes) = (program.reads(&op), program.writes(&op));
            let mut random = Random(u64::from(id.0) + 1);
            let exact = casts_only(kernel);
            let limit = id_limit(kernel);
            let runs = match kernel.class {
                KernelClass::Optimizer => program.group_runs(0)?,
                _ => BTreeMap::new(),
            };
            let scales = program.scale_runs(0)?;
            let optimizer = matches!(
                kernel.body[0].op,
                OpKind::Shard(op) if op.update().is_some() || op == ShardOp::ClipScale
            );
            let mut host: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
            let mut device: BTreeMap<u32, Memory> = BTreeMap::new();
            for (i, a) in reads.iter().chain(writes).enumerate() {
                let buffer = &program.buffers[a.buffer.index()];
                if host.contains_key(&a.buffer.0) {
                    continue;
                }
                let mut words = vec![0u64; buffer.bytes.0.div_ceil(8) as usize];
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
                let scalar = a.bytes == 4;
                fill(
                    buffer.dtype,
                    bytes,
                    limit,
                    scalar || optimizer && i != 1,
                    &mut random,
                );
                if exact && i < reads.len() && !scalar {
                    add_special(buffer.dtype, bytes, &mut random);
                }
                let even = false;
                choose(kernel, (i, a), bytes, even, &mut random);
                host.insert(a.buffer.0, words);
                device.insert(a.buffer.0, Memory::new(buffer.bytes.0)?);
            }
            let on_host: BTreeMap<u32, u64> = host
                .iter_mut()
                .map(|(k, v)| (*k, v.as_mut_ptr() as u64))
                .collect();
            let on_device: BTreeMap<u32, u64> = device.iter().map(|(k, v)| (*k, v.at)).collect();
            let (hr, hw) = (self.ranges(reads, &on_host), self.ranges(writes, &on_host));
            let (dr, dw) = (
                self.ranges(reads, &on_device),
                self.ranges(writes, &on_device),
            );
            if let OpKind::AttentionGrad(op::AttentionGrad { causal, scale }) = kernel.body[0].op {
                self.forward_first(kernel, causal, scale, &hr)?;
            }
            for (k, v) in &host {
                // SAFETY: both have the buffer's size.
                unsafe {
                    result::memcpy_htod_sync(
                        on_device[k],
                        &bytemuck::cast_slice::<u64, u8>(v)
                            [..program.buffers[*k as usize].bytes.0 as usize],
                    )?
                };
            }
            // A copy may be in progress when the call returns, and the launch's stream does not
            // wait for it.
            result::ctx::synchronize()?;
            let shapes = self.shapes(id);
            let context = LaunchContext {
                kernel,
                hyper: HYPER,
                shapes: &shapes,
                groups: runs.get(&id).map_or(&[], Vec::as_slice),
                scales: scales.get(&id).map_or(&[], Vec::as_slice),
                data_rank: 0,
            };
            // SAFETY: the ranges are in separate buffers.
            unsafe { shardlab_exec::kernels::launch(&context, &hr, &hw)? };
            let mut bits: Vec<Vec<u8>> = Vec::new();
            for pass in 0..2 {
                // SAFETY: as above, on the device.
                unsafe {
                    if pass == 0 {
                        self.kernels
                            .launch(id, &dr, &dw, self.hyper.at, self.stream)?;
                    }
                    result::stream::synchronize(self.stream)?;
                }
                if pass == 0 {
                    for w in &dw {
                        let mut bytes = vec![0u8; w.bytes];
                        // SAFETY: the range is in device memory.
                        unsafe { result::memcpy_dtoh_sync(&mut bytes, w.ptr as u64)? };
                        bits.push(bytes);
                    }
                }
            }
            // A convolution's gradient of weights has the type of its factors, whatever type it is
            // converted to.
            let factors = match kernel.body[0].op {
                OpKind::ConvGradWeight { .. } => unit(hr[0].dtype),
                // Tensor cores keep 13 bits of sums of 8-bit factors.
                OpKind::ScaledGemm(_) => unit(DType::F16),
                // Dot products of rows that were rounded to 16 bits on the way.
                OpKind::GroupedGemm(_) if kernel.body.len() > 1 => unit(DType::F16),
                _ => 0.0,
            };
            let (mut worst, mut at) = (0.0f64, 0);
            for (i, (h, d)) in hw.iter().zip(&bits).enumerate() {
                // SAFETY: the range is in the host's buffer.
                let want = floats(h.dtype, unsafe {
                    std::slice::from_raw_parts(h.ptr, h.bytes)
                });
                let got = floats(h.dtype, d);
                let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                if exact && !want.iter().zip(&got).all(same) {
                    (worst, at) = (f64::INFINITY, i);
                }
                for elements in results(kernel, i, want.len()) {
                    let worse = distance(&want, &got, &elements) / unit(h.dtype).max(factors);
                    if worse > worst {
                        (worst, at) = (worse, i);
                    }
                }
            }
            // Attention rounds its probabilities to 16 bits: torch 2.11's kernels differ by up to
            // 14 units from float64 here.
            let attention = matches!(
                kernel.class,
                shardlab_plan::ir::KernelClass::Attention { .. }
            );
            let limit = if attention { 16.0 } else { 2.0 };
            let good = worst <= limit;
            println!(
                "{} {:44} {:.3} units (write {at}) {:?}",
                if good { "ok  " } else { "BAD " },
                kernel.name,
                worst,
                kernel.class
            );
            Ok(good)
        }

        /// Writes the results of the forward to where the backward reads them.
        fn forward_first(
            &self,
            kernel: &Kernel,
            causal: bool,
            scale: shardlab_plan::ir::Real,
            hr: &[RawRange],
        ) -> Result<(), Failure> {
            let body = &kernel.body[0];
            let mut forward = kernel.clone();
            forward.body[0].op = OpKind::Attention(op::Attention { causal, scale });
            let slot = |i: usize| body.inputs[i].clone();
            forward.body[0].inputs = [slot(1), slot(2), slot(3)].into_iter().collect();
            let mut outs = [slot(4), slot(5)];
            let place = |s: &Slot| match s.place {
                Place::Read(i) => usize::from(i),
                _ => 0,
            };
            let writes: Vec<RawRange> = outs.iter().map(|s| hr[place(s)]).collect();
            for (i, s) in outs.iter_mut().enumerate() {
                s.place = Place::Write(i as u8);
            }
            forward.body[0].outputs = outs.into_iter().collect();
            let context = LaunchContext {
                kernel: &forward,
                hyper: HYPER,
                shapes: &[],
                groups: &[],
                scales: &[],
                data_rank: 0,
            };
            // SAFETY: the ranges are in separate buffers.
            unsafe { shardlab_exec::kernels::launch(&context, hr, &writes)? };
            Ok(())
        }

        /// Returns the bytes that a kernel must move.
        fn bytes(&self, kernel: &Kernel, reads: &[Access], writes: &[Access]) -> f64 {
            use shardlab_plan::ir::KernelClass as C;
            let size = |a: &Access| self.program.buffers[a.buffer.index()].dtype.size();
            let known = (kernel.read.0 + kernel.written.0) as f64;
            // Operands may be wider than the kernel's slots: a gradient in a float32 buffer.
            match kernel.class {
                C::EmbeddingGrad if reads.len() > 2 => {
                    let n = kernel.body[0].inputs[0].shape.iter().product::<u64>();
                    let table = n * (size(&reads[2]) + size(&writes[0]));
                    (reads[0].bytes + reads[1].bytes + table) as f64
                }
                // An embedding's gradient that covers its table writes all of it.
                C::Pointwise | C::Fill | C::EmbeddingGrad => {
                    let widened = reads.iter().chain(writes).map(|a| a.bytes as f64);
                    known.max(widened.sum())
                }
                _ => known,
            }
        }

        fn time(&mut self, id: InstrId) -> Result<(), Failure> {
            let program = Arc::clone(&self.program);
            let op = program.instrs[id.index()].op;
            let Op::Launch { kernel: kid, .. } = op else {
                return Ok(());
            };
            let kernel = &program.kernels[kid.index()];
            let (reads, writes) = (program.reads(&op), program.writes(&op));
            let bytes = self.bytes(kernel, reads, writes);
            let mut random = Random(7);
            let mut first: BTreeMap<u32, Memory> = BTreeMap::new();
            let mut held = 0;
            for (i, a) in reads.iter().chain(writes).enumerate() {
                let buffer = &program.buffers[a.buffer.index()];
                if first.contains_key(&a.buffer.0) {
                    continue;
                }
                let memory = Memory::new(buffer.bytes.0)?;
                held += buffer.bytes.0;
                let few = buffer.bytes.0.min(32 << 20);
                let mut bytes = vec![0u8; few as usize];
                fill(
                    buffer.dtype,
                    &mut bytes,
                    id_limit(kernel),
                    false,
                    &mut random,
                );
                let even = true;
                choose(kernel, (i, a), &mut bytes, even, &mut random);
                // Random numbers consume as much power as real data; they repeat every 32 MiB.
                let mut done = 0;
                while done < buffer.bytes.0 {
                    let n = few.min(buffer.bytes.0 - done) as usize;
                    // SAFETY: the memory has the buffer's length.
                    unsafe { result::memcpy_htod_sync(memory.at + done, &bytes[..n])? };
                    done += n as u64;
                }
                first.insert(a.buffer.0, memory);
            }
            result::ctx::synchronize()?;
            // As many sets of operands as exceed the cache, within limits.
            let sets = (COLD / bytes.max(1.0)).ceil().clamp(1.0, 16.0) as usize;
            let sets = sets.min((ROOM / held.max(1)).max(1) as usize);
            let mut device = vec![first];
            while device.len() < sets {
                let mut more = BTreeMap::new();
                for (k, v) in &device[0] {
                    let bytes = program.buffers[*k as usize].bytes.0;
                    let memory = Memory::new(bytes)?;
                    // SAFETY: both have the buffer's length.
                    unsafe { sys::cuMemcpyDtoD_v2(memory.at, v.at, bytes as usize).result()? };
                    more.insert(*k, memory);
                }
                device.push(more);
            }
            let operands: Vec<_> = device
                .iter()
                .map(|set| {
                    let at: BTreeMap<u32, u64> = set.iter().map(|(k, v)| (*k, v.at)).collect();
                    (self.ranges(reads, &at), self.ranges(writes, &at))
                })
                .collect();
            let (hyper, stream) = (self.hyper.at, self.stream);
            let kernels = std::cell::RefCell::new(&mut self.kernels);
            let copy = self.copy;
            let t = launches(stream, |n| {
                let (reads, writes) = &operands[n % operands.len()];
                // SAFETY: the ranges are in separate buffers; the stream is live.
                unsafe {
                    kernels
                        .borrow_mut()
                        .launch(id, reads, writes, hyper, stream)?
                };
                Ok(())
            })?;
            let half = ((bytes / 2.0) as usize).max(256);
            let (from, to) = (
                Memory::new((half * sets) as u64)?,
                Memory::new((half * sets) as u64)?,
            );
            let equal = launches(stream, |n| {
                let at = (half * (n % sets)) as u64;
                // SAFETY: both have one part per set.
                unsafe {
                    sys::cuMemcpyDtoDAsync_v2(to.at + at, from.at + at, half, stream).result()?;
                }
                Ok(())
            })?;
            println!(
                "{:44} {:9.1} us {:7.1} MB {:6.0} GB/s {:5.1} % of copy, {:5.1} % of as short a one; {:6.1} TFLOP/s  {:?}\n      {}",
                kernel.name,
                t * 1e6,
                bytes / 1e6,
                bytes / t / 1e9,
                100.0 * bytes / t / copy,
                100.0 * equal / t,
                kernel.flops.0 as f64 / t / 1e12,
                kernel.class,
                kernels.borrow().describe(kid).replace('\n', "\n      "),
            );
            Ok(())
        }
    }
}
