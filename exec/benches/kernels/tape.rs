//! Forward and backward of a small llama, kernel after kernel on one thread.

use criterion::{Criterion, Throughput};
use shardlab_exec::kernels;
use shardlab_exec::{LaunchContext, RawRange};
use shardlab_plan::compile::tape::{Tape, TapeOp};
use shardlab_plan::ir::{DType, Kernel, Operand, Place, Source};
use shardlab_plan::scenario;
use shardlab_plan::tape_of;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Memory of one source.
struct Buffer(Vec<u64>, DType, usize);

impl Buffer {
    fn new(dtype: DType, bytes: u64) -> Self {
        Self(
            vec![0; (bytes as usize).div_ceil(8) + 1],
            dtype,
            bytes as usize,
        )
    }

    /// Small numbers that are all different.
    fn filled(dtype: DType, bytes: u64, name: &str) -> Self {
        let mut b = Self::new(dtype, bytes);
        let n = bytes / dtype.size();
        for i in 0..n as usize {
            let v = ((i * 7919 + 13) % 1009) as f32 / 5045.0 - 0.1;
            let at = b.0.as_mut_ptr();
            // SAFETY: the buffer holds `n` elements of its type.
            unsafe {
                match dtype {
                    DType::I64 => *at.cast::<i64>().add(i) = (i * 31 % 251) as i64,
                    DType::Bf16 => *at.cast::<u16>().add(i) = (v.to_bits() >> 16) as u16,
                    _ => *at.cast::<f32>().add(i) = if name.contains("norm") { 1.0 } else { v },
                }
            }
        }
        b
    }
}

struct Machine {
    tape: Tape,
    storages: Vec<Buffer>,
    params: Vec<Buffer>,
    grads: Vec<Buffer>,
    consts: Vec<Buffer>,
    times: BTreeMap<String, (Duration, u32)>,
}

impl Machine {
    fn new(overrides: &[&str]) -> Self {
        let text = "[model]\nfamily = \"llama\"\nlayers = 4\nhidden = 256\nheads = 8\nkv_heads = 4\nffn = 704\nvocab = 1024\n\
                    [train]\nseq_len = 128\nmicro_batch = 8\n\
                    [mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 1\n[fsdp]\npolicy = \"fsdp2\"\n";
        let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
        let s = scenario::parse("bench", text, &overrides).expect("a valid scenario");
        let tape = tape_of(&s).expect("a tape");
        let t = s.precision.compute;
        let size = |i: usize| tape.params[i].numel() * t.size();
        Self {
            storages: tape
                .storages
                .iter()
                .map(|s| Buffer::new(s.dtype, s.bytes.0))
                .collect(),
            params: tape
                .params
                .iter()
                .enumerate()
                .map(|(i, p)| Buffer::filled(t, size(i), &p.name))
                .collect(),
            grads: (0..tape.params.len())
                .map(|i| Buffer::new(t, size(i)))
                .collect(),
            consts: tape
                .consts
                .iter()
                .map(|c| Buffer::filled(c.dtype, c.bytes.0, c.name))
                .collect(),
            tape,
            times: BTreeMap::new(),
        }
    }

    fn range(&mut self, k: &Kernel, place: Place, o: &Operand) -> RawRange {
        let _ = (k, place);
        let b = match o.source {
            Source::Storage(i) => &mut self.storages[i.index()],
            Source::Param(i) => &mut self.params[i.index()],
            Source::Grad(i) => &mut self.grads[i.index()],
            Source::Const(i) => &mut self.consts[i.index()],
            Source::Scale(_) | Source::ColumnCodes(_) | Source::ColumnScale(_) => {
                unreachable!("no weight of these models is gathered in 8 bits")
            }
        };
        assert!(
            (o.offset + o.bytes) as usize <= b.2,
            "an operand outside its buffer"
        );
        let ptr =
            b.0.as_mut_ptr()
                .cast::<u8>()
                .wrapping_add(o.offset as usize);
        RawRange {
            ptr,
            bytes: o.bytes as usize,
            dtype: b.1,
        }
    }

    fn step(&mut self, timed: bool) {
        let ops: Vec<TapeOp> = self
            .tape
            .forward
            .iter()
            .chain(&self.tape.backward)
            .copied()
            .collect();
        let (mut r, mut w): (Vec<RawRange>, Vec<RawRange>) = (vec![], vec![]);
        for op in ops {
            let TapeOp::Launch {
                kernel,
                reads,
                writes,
                end,
            } = op
            else {
                continue;
            };
            let k = self.tape.kernels[kernel.index()].clone();
            let operands: Vec<Operand> = self.tape.operands[reads as usize..end as usize].to_vec();
            let split = (writes - reads) as usize;
            r.clear();
            w.clear();
            for (i, o) in operands.iter().enumerate() {
                if i < split {
                    r.push(self.range(&k, Place::Read(i as u8), o));
                } else {
                    w.push(self.range(&k, Place::Write((i - split) as u8), o));
                }
            }
            let ctx = LaunchContext {
                kernel: &k,
                data_rank: 0,
                hyper: super::HYPER,
                shapes: &[],
                groups: &[],
                scales: &[],
            };
            let start = Instant::now();
            // SAFETY: the machine's buffers outlive the call, on this thread alone.
            unsafe { kernels::launch(&ctx, &r, &w) }.expect("a well-formed launch");
            if timed {
                let t = self
                    .times
                    .entry(format!("{} {:?}", k.name, k.class))
                    .or_default();
                *t = (t.0 + start.elapsed(), t.1 + 1);
            }
        }
    }
}

/// Steps of the tape; with `SHARDLAB_PROFILE` set, also the time by kernel of one of them.
pub(super) fn bench(c: &mut Criterion) {
    let mut g = c.benchmark_group("tape");
    for overrides in [
        &["precision.compute=\"f32\""][..],
        &["precision.compute=\"f32\"", "compile.mode=\"blocks\""],
        &["compile.mode=\"blocks\""],
    ] {
        let mut m = Machine::new(overrides);
        g.throughput(Throughput::Elements(m.tape.model_flops.0));
        g.bench_function(format!("llama 4x256 {}", overrides.join(" ")), |b| {
            b.iter(|| m.step(false))
        });
        if std::env::var_os("SHARDLAB_PROFILE").is_some() {
            m.step(true);
            let mut times: Vec<_> = m.times.iter().collect();
            times.sort_by_key(|t| std::cmp::Reverse(t.1.0));
            let total: Duration = times.iter().map(|t| t.1.0).sum();
            println!("total {total:?}");
            for (name, (time, n)) in times.into_iter().take(22) {
                println!(
                    "{:>6.2} % {time:>10.1?} {n:>4} x {}",
                    100.0 * time.as_secs_f64() / total.as_secs_f64(),
                    &name[..name.len().min(110)]
                );
            }
        }
    }
}
