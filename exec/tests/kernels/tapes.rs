//! Complete forward and backward passes: float kernels on real memory, compared with a float64
//! interpreter.

use super::memory::{Buffer, HYPER, Rng, launch, positions};
use super::semantics;
use shardlab_exec::kernels;
use shardlab_plan::compile::tape::{Tape, TapeOp};
use shardlab_plan::config::{Implementation, Scenario};
use shardlab_plan::ir::{BodyOp, DType, Kernel, Operand, Place, Source};
use shardlab_plan::scenario;
use shardlab_plan::tape_of;

const LLAMA: &str = "family = \"llama\"\nlayers = 2\nhidden = 12\nheads = 6\nkv_heads = 2\nhead_dim = 4\nffn = 20\nvocab = 13\n";
const MODELS: [(&str, &str, &str); 5] = [
    ("llama", LLAMA, "seq_len = 7\nmicro_batch = 2\n"),
    (
        "gpt2",
        "family = \"gpt2\"\nlayers = 2\nhidden = 12\nheads = 3\nffn = 20\nvocab = 13\nmax_seq_len = 9\n",
        "seq_len = 7\nmicro_batch = 2\n",
    ),
    (
        "encoder",
        "family = \"encoder\"\nlayers = 2\nhidden = 8\nheads = 2\nffn = 20\nbias = true\n",
        "seq_len = 5\nmicro_batch = 3\n",
    ),
    (
        "linear",
        "family = \"linear\"\nlayers = 3\nhidden = 8\n",
        "seq_len = 5\nmicro_batch = 3\n",
    ),
    (
        "cnn",
        "family = \"cnn\"\nlayers = 2\nchannels = 3\nheight = 4\nwidth = 5\nkernel = 3\n",
        "micro_batch = 2\n",
    ),
];

fn scenario(model: &str, train: &str, overrides: &[&str]) -> Scenario {
    let text = format!(
        "[model]\n{model}[train]\n{train}[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 1\n[fsdp]\npolicy = \"fsdp2\"\n"
    );
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    scenario::parse("test", &text, &overrides).unwrap()
}

/// Parameters and inputs that are exactly representable in bfloat16.
#[derive(Clone)]
struct Inputs {
    params: Vec<Vec<f64>>,
    consts: Vec<Vec<f64>>,
}

fn bf16(x: f64) -> f64 {
    half::bf16::from_f64(x).to_f64()
}

impl Inputs {
    fn new(t: &Tape, vocab: u64) -> Self {
        let mut rng = Rng(7);
        let params = t
            .params
            .iter()
            .map(|p| (0..p.numel()).map(|_| bf16(0.7 * rng.next())).collect());
        let params = params.collect();
        let consts = t.consts.iter().map(|c| {
            let n = c.bytes.0 / c.dtype.size();
            let value = |i: u64, rng: &mut Rng| match c.name {
                "tokens" => rng.below(vocab) as f64,
                "positions" => i as f64,
                _ => bf16(rng.next()),
            };
            (0..n).map(|i| value(i, &mut rng)).collect()
        });
        Self {
            params,
            consts: consts.collect(),
        }
    }
}

/// How launches are executed.
trait Device {
    fn alloc(&mut self, storage: usize, dtype: DType, numel: usize);
    fn free(&mut self, storage: usize);
    fn launch(&mut self, k: &Kernel, reads: &[Operand], writes: &[Operand]);
}

fn walk(t: &Tape, ops: &[TapeOp], d: &mut impl Device) {
    for op in ops {
        match *op {
            TapeOp::Alloc(s) => {
                let st = &t.storages[s.index()];
                d.alloc(s.index(), st.dtype, (st.bytes.0 / st.dtype.size()) as usize);
            }
            TapeOp::Free(s) => d.free(s.index()),
            TapeOp::Launch {
                kernel,
                reads,
                writes,
                end,
            } => d.launch(
                &t.kernels[kernel.index()],
                &t.operands[reads as usize..writes as usize],
                &t.operands[writes as usize..end as usize],
            ),
            _ => {}
        }
    }
}

/// Executes launches in float64, op by op, on whole operands.
struct Exact {
    inputs: Inputs,
    storages: Vec<Vec<f64>>,
    grads: Vec<Vec<f64>>,
}

impl Exact {
    fn new(t: &Tape, inputs: &Inputs) -> Self {
        Self {
            inputs: inputs.clone(),
            storages: vec![vec![]; t.storages.len()],
            grads: t
                .params
                .iter()
                .map(|p| vec![f64::NAN; p.numel() as usize])
                .collect(),
        }
    }

    /// Returns the memory from the start of a source. Parameters are consecutive, and so are
    /// gradients, so an operand may extend into the next ones.
    fn memory(&mut self, s: Source) -> &mut [Vec<f64>] {
        match s {
            Source::Storage(id) => &mut self.storages[id.index()..=id.index()],
            Source::Grad(p) => &mut self.grads[p.index()..],
            Source::Param(p) => &mut self.inputs.params[p.index()..],
            Source::Const(c) => &mut self.inputs.consts[c.index()..=c.index()],
            Source::Scale(p) | Source::ColumnCodes(p) | Source::ColumnScale(p) => {
                panic!("no tape here gathers parameter {} in 8 bits", p.0)
            }
        }
    }

    fn read(&mut self, s: Source, window: std::ops::Range<usize>) -> Vec<f64> {
        let all = self.memory(s).iter().flatten().copied();
        all.skip(window.start).take(window.len()).collect()
    }
}

impl Device for Exact {
    fn alloc(&mut self, storage: usize, _: DType, numel: usize) {
        self.storages[storage] = vec![f64::NAN; numel];
    }

    fn free(&mut self, storage: usize) {
        self.storages[storage] = vec![];
    }

    fn launch(&mut self, k: &Kernel, reads: &[Operand], writes: &[Operand]) {
        let slots = || {
            k.body
                .iter()
                .flat_map(|b| b.inputs.iter().chain(&b.outputs))
        };
        let window = |place: Place, o: &Operand| {
            let size = slots().find(|s| s.place == place).unwrap().dtype.size();
            (o.offset / size) as usize..((o.offset + o.bytes) / size) as usize
        };
        let read: Vec<Vec<f64>> = (0u8..)
            .zip(reads)
            .map(|(i, o)| self.read(o.source, window(Place::Read(i), o)))
            .collect();
        let mut written: Vec<Vec<f64>> = (0u8..)
            .zip(writes)
            .map(|(i, o)| self.read(o.source, window(Place::Write(i), o)))
            .collect();
        // Operands may interleave: a launch only writes its own output.
        let mut made: Vec<Vec<bool>> = written.iter().map(|w| vec![false; w.len()]).collect();
        let mut registers: Vec<Vec<f64>> = vec![];
        for op in &k.body {
            let ins: Vec<Vec<f64>> = op
                .inputs
                .iter()
                .map(|s| {
                    let from = match s.place {
                        Place::Read(i) => &read[i as usize],
                        Place::Write(i) => &written[i as usize],
                        Place::Register(i) => &registers[i as usize],
                    };
                    positions(s).into_iter().map(|i| from[i]).collect()
                })
                .collect();
            for (s, values) in op.outputs.iter().zip(semantics::apply(op, &ins)) {
                let at = positions(s);
                assert_eq!(at.len(), values.len(), "{:?}", op.op);
                let to = match s.place {
                    Place::Write(i) => {
                        at.iter().for_each(|&k| made[i as usize][k] = true);
                        &mut written[i as usize]
                    }
                    Place::Register(i) => {
                        registers.resize(registers.len().max(i as usize + 1), vec![]);
                        let reg = &mut registers[i as usize];
                        reg.resize(
                            reg.len().max(at.iter().max().map_or(0, |m| m + 1)),
                            f64::NAN,
                        );
                        reg
                    }
                    Place::Read(_) => unreachable!("reads are not written"),
                };
                for (i, v) in at.into_iter().zip(values) {
                    to[i] = v;
                }
            }
        }
        for (i, (o, values)) in (0u8..).zip(writes.iter().zip(written)) {
            let start = window(Place::Write(i), o).start;
            let places = self.memory(o.source).iter_mut().flatten().skip(start);
            for ((to, v), made) in places.zip(values).zip(&made[usize::from(i)]) {
                if *made {
                    *to = v;
                }
            }
        }
    }
}

/// Consecutive parameters, or their gradients.
struct Flat {
    buffer: Buffer,
    /// Offset of each parameter.
    starts: Vec<usize>,
}

impl Flat {
    fn new(t: &Tape, dtype: DType) -> Self {
        let mut end = 0;
        let starts = t.params.iter().map(|p| {
            let start = end;
            end += p.numel() as usize;
            start
        });
        Self {
            starts: starts.collect(),
            buffer: Buffer::new(dtype, end),
        }
    }

    /// Returns the elements of one parameter.
    fn of(&self, t: &Tape, p: usize) -> Buffer {
        let (start, n) = (self.starts[p], t.params[p].numel() as usize);
        let values: Vec<f64> = (start..start + n).map(|i| self.buffer.get(i)).collect();
        Buffer::of(self.buffer.dtype, &values)
    }
}

/// The kernels under test.
struct Real {
    storages: Vec<Option<Buffer>>,
    params: Flat,
    grads: Flat,
    consts: Vec<Buffer>,
}

impl Real {
    fn new(t: &Tape, inputs: &Inputs, compute: DType, grads: DType) -> Self {
        let mut params = Flat::new(t, compute);
        for (&start, values) in params.starts.iter().zip(&inputs.params) {
            params.buffer.write(start, values);
        }
        Self {
            storages: vec![None; t.storages.len()],
            params,
            grads: Flat::new(t, grads),
            consts: t
                .consts
                .iter()
                .zip(&inputs.consts)
                .map(|(c, v)| Buffer::of(c.dtype, v))
                .collect(),
        }
    }
}

impl Device for Real {
    fn alloc(&mut self, storage: usize, dtype: DType, numel: usize) {
        self.storages[storage] = Some(Buffer::new(dtype, numel));
    }

    fn free(&mut self, storage: usize) {
        self.storages[storage] = None;
    }

    fn launch(&mut self, k: &Kernel, reads: &[Operand], writes: &[Operand]) {
        let slots = || {
            k.body
                .iter()
                .flat_map(|b| b.inputs.iter().chain(&b.outputs))
        };
        let mut range = |place: Place, o: &Operand| {
            // Operands are in elements of their slot's type, whatever the type of the buffer.
            let size = slots().find(|s| s.place == place).unwrap().dtype.size();
            let (buffer, start) = match o.source {
                Source::Storage(id) => (self.storages[id.index()].as_mut().expect("live"), 0),
                Source::Grad(p) => (&mut self.grads.buffer, self.grads.starts[p.index()]),
                Source::Param(p) => (&mut self.params.buffer, self.params.starts[p.index()]),
                Source::Const(c) => (&mut self.consts[c.index()], 0),
                Source::Scale(p) | Source::ColumnCodes(p) | Source::ColumnScale(p) => {
                    panic!("no tape here gathers parameter {} in 8 bits", p.0)
                }
            };
            buffer.part(
                start + (o.offset / size) as usize,
                (o.bytes / size) as usize,
            )
        };
        let read: Vec<_> = (0u8..)
            .zip(reads)
            .map(|(i, o)| range(Place::Read(i), o))
            .collect();
        let write: Vec<_> = (0u8..)
            .zip(writes)
            .map(|(i, o)| range(Place::Write(i), o))
            .collect();
        launch(k, HYPER, &[], &read, &write).unwrap();
    }
}

/// The loss, and the gradients of all parameters.
struct Outcome {
    loss: f64,
    grads: Vec<Vec<f64>>,
    bits: Vec<Vec<u8>>,
}

fn exact(t: &Tape, inputs: &Inputs) -> Outcome {
    let mut d = Exact::new(t, inputs);
    walk(t, &t.forward, &mut d);
    let loss = d.storages[t.loss.unwrap().index()][0];
    walk(t, &t.backward, &mut d);
    Outcome {
        loss,
        grads: d.grads,
        bits: vec![],
    }
}

fn real(t: &Tape, inputs: &Inputs, compute: DType, grads: DType) -> Outcome {
    let mut d = Real::new(t, inputs, compute, grads);
    walk(t, &t.forward, &mut d);
    let loss = d.storages[t.loss.unwrap().index()]
        .as_ref()
        .unwrap()
        .clone();
    walk(t, &t.backward, &mut d);
    let grads: Vec<Buffer> = (0..t.params.len()).map(|p| d.grads.of(t, p)).collect();
    let mut bits: Vec<Vec<u8>> = grads.iter().map(Buffer::bits).collect();
    bits.push(loss.bits());
    Outcome {
        loss: loss.get(0),
        grads: grads.iter().map(Buffer::values).collect(),
        bits,
    }
}

/// Returns the largest difference, relative to the largest value.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let scale = a
        .iter()
        .chain(b)
        .fold(0.0f64, |m, v| m.max(v.abs()))
        .max(1e-6);
    let worst = a
        .iter()
        .zip(b)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m });
    worst / scale
}

fn assert_close(name: &str, t: &Tape, got: &Outcome, want: &Outcome, tolerance: f64) {
    assert!(
        (got.loss - want.loss).abs() < tolerance * want.loss.abs(),
        "{name}: loss {} {}",
        got.loss,
        want.loss
    );
    for (p, (g, w)) in t.params.iter().zip(got.grads.iter().zip(&want.grads)) {
        let d = distance(g, w);
        assert!(d < tolerance, "{name}: {} is off by {d}", p.name);
    }
}

const VARIANTS: [&[&str]; 14] = [
    &[],
    &["compile.mode=\"blocks\""],
    &["compile.mode=\"regions\""],
    &["compile.mode=\"full\""],
    &[
        "compile.mode=\"regions\"",
        "compile.mix_order_reductions=true",
    ],
    &["compile.mode=\"full\"", "compile.mix_order_reductions=true"],
    &["compile.mode=\"regions\"", "compile.fused_products=true"],
    &["train.recompute=\"full\""],
    &["train.recompute=\"selective\"", "compile.mode=\"blocks\""],
    &["train.recompute=\"full\"", "compile.mode=\"full\""],
    &["train.loss=\"chunked\""],
    &["train.loss=\"chunked\"", "compile.mode=\"regions\""],
    &["train.loss=\"checkpointed_chunks\""],
    &[
        "train.loss=\"checkpointed_chunks\"",
        "compile.mode=\"full\"",
    ],
];

/// Returns whether a variant computes the loss in chunks.
fn has_chunks(variant: &[&str]) -> bool {
    variant.iter().any(|set| set.starts_with("train.loss="))
}

fn variants() -> impl Iterator<Item = (String, Scenario)> {
    MODELS.into_iter().flat_map(|(name, model, train)| {
        VARIANTS.into_iter().filter_map(move |v| {
            let tokens = matches!(name, "llama" | "gpt2");
            // Chunked losses need logits, and selective recompute needs attention.
            let blocks = tokens || name == "encoder";
            let has = |o| v.contains(&o);
            if !tokens && has_chunks(v) || !blocks && has("train.recompute=\"selective\"") {
                return None;
            }
            let overrides: Vec<&str> = v
                .iter()
                .copied()
                .chain(["precision.compute=\"f32\""])
                .collect();
            Some((format!("{name} {v:?}"), scenario(model, train, &overrides)))
        })
    })
}

#[test]
fn float32_tapes_agree_with_float64() {
    for (name, s) in variants() {
        let t = tape_of(&s).unwrap();
        let inputs = Inputs::new(&t, s.model.vocab.max(1));
        let want = exact(&t, &inputs);
        let got = real(&t, &inputs, DType::F32, DType::F32);
        assert_close(&name, &t, &got, &want, 2e-5);
        // The validation forward computes the same loss, bitwise.
        let mut d = Real::new(&t, &inputs, DType::F32, DType::F32);
        let at = t.eval_loss.unwrap();
        let freed = t.eval.iter().position(|op| *op == TapeOp::Free(at));
        walk(&t, &t.eval[..freed.unwrap_or(t.eval.len())], &mut d);
        let loss = d.storages[at.index()].as_ref().unwrap();
        assert_eq!(Some(&loss.bits()), got.bits.last(), "{name}: validation");
    }
}

/// Returns the number of launches of all phases, and the number of fused ones.
fn launches(t: &Tape) -> (usize, usize) {
    let all = || {
        t.forward
            .iter()
            .chain(&t.backward)
            .filter_map(|op| match op {
                TapeOp::Launch { kernel, .. } => Some(t.kernels[kernel.index()].body.len()),
                _ => None,
            })
    };
    (all().count(), all().filter(|&n| n > 1).count())
}

/// A model whose GEMMs are split into several blocks, with sizes that do not divide evenly.
const LARGER: (&str, &str, &str) = (
    "llama",
    "family = \"llama\"\nlayers = 1\nhidden = 84\nheads = 6\nkv_heads = 3\nhead_dim = 14\nffn = 611\nvocab = 701\n",
    "seq_len = 133\nmicro_batch = 3\n",
);

#[test]
fn compiling_and_recomputing_change_no_bit() {
    for (name, model, train) in MODELS.into_iter().chain([LARGER]) {
        for compute in [DType::F32, DType::Bf16] {
            // Gradients may be stored in a wider dtype than the one they are computed in.
            for grads in [compute, DType::F32] {
                let build = |o: &[&str]| {
                    let c = format!("precision.compute=\"{}\"", compute.name());
                    let o: Vec<&str> = o.iter().copied().chain([&c[..]]).collect();
                    let mut s = scenario(model, train, &o);
                    // PyTorch's engine adds the gradients of tied weights before they are stored.
                    if s.model.tie_embeddings && grads != compute {
                        s.model.options.implementation = Some(Implementation::Native);
                    }
                    s
                };
                let base = build(&[]);
                let t = tape_of(&base).unwrap();
                let inputs = Inputs::new(&t, base.model.vocab.max(1));
                let want = real(&t, &inputs, compute, grads);
                let again = real(&t, &inputs, compute, grads);
                assert_eq!(want.bits, again.bits, "{name} {compute}: twice the same");
                for v in VARIANTS {
                    let selective = v.contains(&"train.recompute=\"selective\"");
                    let skipped = selective && matches!(name, "linear" | "cnn");
                    // A chunked loss is a different sum.
                    if skipped || has_chunks(v) {
                        continue;
                    }
                    let tv = tape_of(&build(v)).unwrap();
                    let library = matches!(name, "linear" | "cnn" | "encoder");
                    if v.iter().any(|o| o.contains("compile")) && name != "linear" {
                        let ((before, _), (after, fused)) = (launches(&t), launches(&tv));
                        if library && v.iter().any(|o| o.contains("regions")) {
                            assert_eq!((after, fused), launches(&t), "{name}: nothing to compile");
                            continue;
                        }
                        assert!(fused > 0 && (after < before || v.len() > 1), "{name} {v:?}");
                    }
                    let got = real(&tv, &inputs, compute, grads);
                    for (i, (g, w)) in got.bits.iter().zip(&want.bits).enumerate() {
                        let what = t.params.get(i).map_or("loss", |p| &p.name);
                        assert!(g == w, "{name} {compute} {v:?}: {what}");
                    }
                }
            }
        }
    }
}

/// Sizes whose weights are adjacent in a flat buffer over two ranks under any policy.
const ALIGNED: &str = "family = \"llama\"\nlayers = 2\nhidden = 16\nheads = 4\nkv_heads = 2\nhead_dim = 4\nffn = 32\nvocab = 13\n";

/// GEMMs with a fused epilogue give the same bits as separate GEMMs and elementwise code. In
/// forward, one kernel contains both GEMMs of the gate and the epilogue; in backward, it is fused
/// if the result is used nowhere else.
#[test]
fn fused_products_change_no_bit() {
    let train = "seq_len = 7\nmicro_batch = 2\n";
    let gemms = |t: &Tape, ops: &[TapeOp]| -> Vec<(usize, usize)> {
        let counts = ops.iter().filter_map(|op| match op {
            TapeOp::Launch { kernel, .. } => {
                BodyOp::split_gemm_epilogue(&t.kernels[kernel.index()].body)
            }
            _ => None,
        });
        counts.map(|(p, rest)| (p.len(), rest.len())).collect()
    };
    for mode in ["regions", "blocks", "full"] {
        for recompute in ["none", "pointwise", "full"] {
            let build = |fused: bool| {
                let o = [
                    "precision.compute=\"bf16\"".to_owned(),
                    format!("compile.mode=\"{mode}\""),
                    format!("train.recompute=\"{recompute}\""),
                    format!("compile.fused_products={fused}"),
                    // GEMMs that accumulate stay separate.
                    "compile.epilogues=true".to_owned(),
                ];
                let o: Vec<&str> = o.iter().map(String::as_str).collect();
                scenario(ALIGNED, train, &o)
            };
            let (apart, fused) = (build(false), build(true));
            let t = tape_of(&apart).unwrap();
            let inputs = Inputs::new(&t, apart.model.vocab);
            let want = real(&t, &inputs, DType::Bf16, DType::F32);
            assert!(gemms(&t, &t.forward).is_empty());
            let t = tape_of(&fused).unwrap();
            let again = usize::from(recompute == "full");
            // Forward has `silu` and `mul` after two GEMMs, backward has theirs after one.
            let forward = gemms(&t, &t.forward);
            assert_eq!(forward, [(2, 2); 2], "{mode} {recompute}");
            assert_eq!(gemms(&t, &t.eval), forward);
            let backward = gemms(&t, &t.backward);
            assert_eq!(backward.len(), 2 + 2 * again, "{mode} {recompute}");
            assert_eq!(backward.iter().filter(|b| b.0 == 1).count(), 2);
            let got = real(&t, &inputs, DType::Bf16, DType::F32);
            assert_eq!(got.bits, want.bits, "{mode} {recompute}");
        }
    }
}

/// Layers that are merged into one GEMM give, up to rounding, the same loss and gradients as
/// separate layers. The kernels agree with the float64 interpreter as closely as for other models.
#[test]
fn merged_projections_change_no_value() {
    let train = "seq_len = 7\nmicro_batch = 2\n";
    for policy in ["native", "megatron"] {
        let fixed = [
            format!("fsdp.policy=\"{policy}\""),
            "mesh.dp_shard=2".to_owned(),
            "precision.compute=\"f32\"".to_owned(),
        ];
        let build = |o: &[&str]| {
            let all: Vec<&str> = fixed
                .iter()
                .map(String::as_str)
                .chain(o.iter().copied())
                .collect();
            scenario(ALIGNED, train, &all)
        };
        for mode in ["blocks", "regions"] {
            for recompute in ["none", "full", "selective"] {
                let mode = format!("compile.mode=\"{mode}\"");
                let recompute = format!("train.recompute=\"{recompute}\"");
                let with = |merge: &str| {
                    let merge = format!("compile.merge_projections=\"{merge}\"");
                    build(&[&mode, &recompute, &merge])
                };
                let apart = tape_of(&with("none")).unwrap();
                let inputs = Inputs::new(&apart, 13);
                let want = real(&apart, &inputs, DType::F32, DType::F32);
                for merge in ["gradients", "qkv", "all"] {
                    let t = tape_of(&with(merge)).unwrap();
                    let name = format!("{policy} {mode} {recompute} {merge}");
                    assert!(
                        launches(&t).0 < launches(&apart).0,
                        "{name}: nothing is merged"
                    );
                    let got = real(&t, &inputs, DType::F32, DType::F32);
                    assert_close(&name, &t, &got, &want, 2e-5);
                    assert_close(&name, &t, &got, &exact(&t, &inputs), 2e-5);
                }
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    // Large enough for GEMMs, attention and elementwise kernels to be split.
    let model = "family = \"llama\"\nlayers = 1\nhidden = 192\nheads = 6\nkv_heads = 3\nhead_dim = 32\nffn = 611\nvocab = 701\n";
    for compute in ["precision.compute=\"f32\"", "precision.compute=\"bf16\""] {
        for mode in ["compile.mode=\"off\"", "compile.mode=\"blocks\""] {
            let s = scenario(model, "seq_len = 133\nmicro_batch = 3\n", &[compute, mode]);
            let t = tape_of(&s).unwrap();
            let inputs = Inputs::new(&t, s.model.vocab);
            let run = || real(&t, &inputs, s.precision.compute, DType::F32).bits;
            let want = run();
            for threads in [2, 3, 8] {
                kernels::use_threads(threads);
                let got = run();
                kernels::use_threads(1);
                assert!(got == want, "{compute} {mode}: {threads} threads");
            }
        }
    }
}

#[test]
fn bfloat16_tapes_stay_near_float64() {
    for (name, model, train) in MODELS {
        let s = scenario(model, train, &["compile.mode=\"blocks\""]);
        let t = tape_of(&s).unwrap();
        let inputs = Inputs::new(&t, s.model.vocab.max(1));
        let (want, got) = (
            exact(&t, &inputs),
            real(&t, &inputs, DType::Bf16, DType::Bf16),
        );
        // The error of eight mantissa bits through two blocks and back.
        assert_close(name, &t, &got, &want, 5e-2);
    }
}

#[test]
fn gradients_equal_finite_differences() {
    for (name, model, train) in MODELS {
        let s = scenario(model, train, &["precision.compute=\"f32\""]);
        let t = tape_of(&s).unwrap();
        let inputs = Inputs::new(&t, s.model.vocab.max(1));
        let out = real(&t, &inputs, DType::F32, DType::F32);
        for (p, param) in t.params.iter().enumerate() {
            // In float32, along the gradient itself, the loss changes by the square of its norm.
            let norm = out.grads[p].iter().map(|g| g * g).sum::<f64>().sqrt();
            if norm < 1e-4 {
                continue;
            }
            let h = 1e-2;
            let at = |sign: f64| {
                let mut moved = inputs.clone();
                for (w, g) in moved.params[p].iter_mut().zip(&out.grads[p]) {
                    *w += sign * h * g / norm;
                }
                let mut d = Real::new(&t, &moved, DType::F32, DType::F32);
                walk(&t, &t.forward, &mut d);
                d.storages[t.loss.unwrap().index()].as_ref().unwrap().get(0)
            };
            let slope = (at(1.0) - at(-1.0)) / (2.0 * h);
            // Float32 losses near 1 resolve the slope to about 1e-5; curvature and the kinks of
            // ReLU add the rest. The comparison with float64 is more precise, but this one needs no
            // second implementation.
            assert!(
                (slope - norm).abs() < 3e-4 + 1e-2 * norm,
                "{name} {}: {slope} {norm}",
                param.name
            );
        }
    }
}
