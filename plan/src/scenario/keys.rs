//! Every key of a scenario file, once: the check, the suggestions, the JSON Schema and shell completion read this table.

use super::huggingface;
use super::presets::PRESETS;

/// Sections of a scenario file that hold keys (`[sweep]` holds paths of keys instead).
pub const SECTIONS: [&str; 7] = [
    "model",
    "train",
    "mesh",
    "fsdp",
    "precision",
    "compile",
    "gate",
];

/// Names of the shipped hardware profiles.
pub const HARDWARE: [&str; 9] = [
    "h200-nvlink",
    "h200-nvlink-exec",
    "h100-80",
    "h100-80-exec",
    "h100-96-500w",
    "a100-80",
    "a100-40",
    "b200",
    "cpu",
];

/// One form that a key's value may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Accept {
    /// `true` or `false`.
    Bool,
    /// An integer, both ends included.
    Integer(u64, u64),
    /// A finite number (an integer too), both ends included. `f64::MIN_POSITIVE` as the lower end means "above 0".
    Number(f64, f64),
    /// Bytes, both ends included: an integer, or a string with a unit such as `"25MiB"`.
    Bytes(u64, u64),
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A path whose name ends so, for example in `.toml`.
    Path(&'static str),
    /// A string that is not empty.
    Text,
    /// A list that is not empty.
    List(&'static Accept),
    /// A list of exactly so many.
    Tuple(&'static Accept, usize),
    /// The empty list.
    Empty,
    /// An inline table with any of these keys, at least one.
    Table(&'static [(&'static str, Accept)]),
}

/// What a scenario file may say under one key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyInfo {
    /// Section, without brackets.
    pub section: &'static str,
    /// Key.
    pub key: &'static str,
    /// The forms its value may take.
    pub accepts: &'static [Accept],
    /// The default as a JSON (and TOML) literal, or, in parentheses, how it is derived.
    pub default: &'static str,
    /// One line.
    pub doc: &'static str,
}

impl KeyInfo {
    /// The strings that are valid values; for shell completion and suggestions.
    pub fn values(&self) -> impl Iterator<Item = &'static str> {
        self.accepts
            .iter()
            .flat_map(|a| match a {
                Accept::Bool => &["true", "false"][..],
                Accept::Choice(c) => c,
                Accept::List(Accept::Choice(c)) => c,
                _ => &[],
            })
            .copied()
    }

    /// All accepted forms in words, for example `an integer from 1 to 64 or "implicit"`.
    #[must_use]
    pub fn expected(&self) -> String {
        expected(self.accepts)
    }
}

/// Forms in words, joined by "or".
pub(crate) fn expected(accepts: &[Accept]) -> String {
    accepts
        .iter()
        .map(Accept::describe)
        .collect::<Vec<_>>()
        .join(" or ")
}

impl Accept {
    pub(crate) fn describe(&self) -> String {
        match *self {
            Self::Bool => "true or false".into(),
            Self::Integer(a, b) => format!("an integer from {a} to {b}"),
            Self::Number(a, b) if a == f64::MIN_POSITIVE => {
                format!("a number above 0 and up to {b}")
            }
            Self::Number(a, b) => format!("a number from {a} to {b}"),
            Self::Bytes(_, b) => {
                format!("bytes up to {b}, as an integer or as a string such as \"25MiB\"")
            }
            Self::Choice(c) => c
                .iter()
                .map(|s| format!("{s:?}"))
                .collect::<Vec<_>>()
                .join(" | "),
            Self::Path(ending) => format!("a path that ends in {ending}"),
            Self::Text => "a string".into(),
            Self::List(of) => format!("a list of {}", of.describe_many()),
            Self::Tuple(of, n) => format!("a list of {n} {}", of.describe_many()),
            Self::Empty => "an empty list".into(),
            Self::Table(fields) => {
                let f: Vec<String> = fields
                    .iter()
                    .map(|(k, a)| format!("{k} = {}", a.describe()))
                    .collect();
                format!("a table {{ {} }}", f.join(", "))
            }
        }
    }

    fn describe_many(&self) -> String {
        match self {
            Self::Text => "strings".into(),
            Self::Number(a, b) => format!("numbers from {a} to {b}"),
            other => other.describe(),
        }
    }
}

macro_rules! keys {
    ($($id:ident: $section:literal $key:literal [$($accept:expr),+] $default:literal $doc:literal;)*) => {
        /// A key, as index into [`KEYS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Key {
            $($id),*
        }

        /// The table, grouped by section.
        pub(crate) static KEYS: &[KeyInfo] = &[
            $(KeyInfo { section: $section, key: $key, accepts: &[$($accept),+], default: $default, doc: $doc }),*
        ];

        const IDS: &[Key] = &[$(Key::$id),*];
    };
}

impl Key {
    pub(crate) fn info(self) -> &'static KeyInfo {
        &KEYS[self as usize]
    }

    /// `fsdp.policy`
    pub(crate) fn path(self) -> String {
        let k = self.info();
        format!("{}.{}", k.section, k.key)
    }

    pub(crate) fn find(section: &str, key: &str) -> Option<Self> {
        IDS.iter()
            .copied()
            .find(|id| id.info().section == section && id.info().key == key)
    }

    /// Keys of this name in any section.
    pub(crate) fn named(key: &str) -> Option<Self> {
        IDS.iter().copied().find(|id| id.info().key == key)
    }

    pub(crate) fn of_section(section: &str) -> impl Iterator<Item = Self> {
        IDS.iter()
            .copied()
            .filter(move |id| id.info().section == section)
    }
}

/// All keys, section by section.
#[must_use]
pub fn keys() -> &'static [KeyInfo] {
    KEYS
}

use Accept::{Bool, Bytes, Choice, Empty, Integer, List, Number, Path, Table, Text, Tuple};

const ABOVE_0: f64 = f64::MIN_POSITIVE;
const MIB: u64 = 1 << 20;
const DTYPES: &[&str] = &["f32", "bf16", "f16", "float32", "bfloat16", "float16"];
const DTYPES_OR_NONE: &[&str] = &[
    "f32", "bf16", "f16", "float32", "bfloat16", "float16", "none",
];
const PLACEMENT: Accept = Tuple(&Choice(&["flat", "replicate"]), 3);
const LOOKAHEAD: &[(&str, Accept)] = &[("elements", Integer(1, 1 << 50))];
const PLACEMENTS: &[(&str, Accept)] = &[("dp_shard", PLACEMENT), ("dp_outer", PLACEMENT)];

keys! {
    Preset: "model" "preset" [Choice(PRESETS), Path(huggingface::ENDING)] "(none)" "Shapes of a known model, or those that a Hugging Face config.json gives (llama, mistral, qwen2, qwen3, gpt2; a path, relative to the file that it is written in); keys beside it override it";
    Family: "model" "family" [Choice(&["llama", "gpt2", "encoder", "linear", "cnn"])] "(the preset's)" "Model family, when no preset is given";
    Layers: "model" "layers" [Integer(1, 4096)] "(required without preset)" "Blocks, linear layers or convolutions";
    Hidden: "model" "hidden" [Integer(1, MIB)] "(required without preset)" "Model width in elements";
    Heads: "model" "heads" [Integer(1, 65536)] "(required without preset)" "Query heads";
    KvHeads: "model" "kv_heads" [Integer(1, 65536)] "(heads)" "Key and value heads of llama; divides heads";
    HeadDim: "model" "head_dim" [Integer(1, 65536)] "(hidden / heads)" "Elements of one head of llama; even";
    Ffn: "model" "ffn" [Integer(1, 4 * MIB)] "(4 hidden; llama: 8/3 hidden, rounded up to 256)" "Width of the feed-forward layer; a preset's follows an overridden hidden in proportion";
    Vocab: "model" "vocab" [Integer(1, 16 * MIB)] "(required without preset)" "Vocabulary size of llama and gpt2";
    TieEmbeddings: "model" "tie_embeddings" [Bool] "(gpt2: true, llama: false)" "Embedding and head share one parameter";
    NormEps: "model" "norm_eps" [Number(ABOVE_0, 1.0)] "1e-5" "Epsilon of the norms";
    RopeTheta: "model" "rope_theta" [Number(1.0, 1e12)] "(llama: 10000)" "Base of the rotary embedding of llama";
    MaxSeqLen: "model" "max_seq_len" [Integer(1, 4 * MIB)] "(llama: seq_len, gpt2: at least 1024)" "Rows of the position table of llama and gpt2";
    Channels: "model" "channels" [Integer(1, 65536)] "(required without preset)" "Channels of the cnn";
    Height: "model" "height" [Integer(1, 16384)] "(cnn: 64)" "Image height of the cnn";
    Width: "model" "width" [Integer(1, 16384)] "(cnn: 64)" "Image width of the cnn";
    Kernel: "model" "kernel" [Integer(1, 255)] "(cnn: 3)" "Edge of the cnn's convolutions; odd";
    Bias: "model" "bias" [Bool, Choice(&["qkv"])] "(llama: false, others: true)" "Linear layers and convolutions carry a bias; qkv: those of queries, keys and values alone (llama; as Qwen2 has it)";
    QkNorm: "model" "qk_norm" [Bool] "false" "Queries and keys are normalised head by head before they are rotated (llama; as Qwen3 has it)";

    SeqLen: "train" "seq_len" [Integer(1, 4 * MIB)] "(max_seq_len up to 8192; encoder: 512; linear, cnn: 1)" "Tokens a sample";
    MicroBatch: "train" "micro_batch" [Integer(1, MIB)] "1" "Samples a rank and micro-batch";
    GradAccum: "train" "grad_accum" [Integer(1, 4096)] "1" "Micro-batches a step";
    Recompute: "train" "recompute" [Choice(&["none", "full", "selective", "pointwise"])] "\"none\"" "Activations that backward computes again: whole blocks, all but matrix products and attention, or, in compiled code, results of elementwise ops inside kernels that read their operands anyway";
    RecomputeLayers: "train" "recompute_layers" [Choice(&["all"]), Integer(1, 4096), List(&Text)] "\"all\"" "Blocks that `recompute` applies to: all, the first so many (as Megatron's recompute_num_layers with method block), or those in the modules that a list of globs names ([\"layers.*0\"]); the others keep their activations";
    Loss: "train" "loss" [Choice(&["materialized", "chunked"])] "\"materialized\"" "All logits at once, or chunk by chunk";
    LossChunkRows: "train" "loss_chunk_rows" [Integer(1, 4 * MIB)] "4096" "Rows (tokens) of a chunk of the chunked loss: fewer hold less memory, more are faster";
    Optimizer: "train" "optimizer" [Choice(&["adamw", "sgd"])] "\"adamw\"" "Optimizer";
    Lr: "train" "lr" [Number(0.0, 1e6)] "3e-4" "Peak learning rate";
    WarmupSteps: "train" "warmup_steps" [Integer(0, 1_000_000)] "0" "Steps over which the learning rate rises linearly to `lr`; 0 is none";
    LrSchedule: "train" "lr_schedule" [Choice(&["constant", "cosine"])] "\"constant\"" "Learning rate after the warm-up: `lr` to the end, or a half cosine down to `min_lr`";
    MinLr: "train" "min_lr" [Number(0.0, 1e6)] "0.0" "Learning rate of the last step of a cosine schedule";
    Betas: "train" "betas" [Tuple(&Number(0.0, 1.0), 2)] "[0.9, 0.95]" "Decay of AdamW's moments; below 1";
    Eps: "train" "eps" [Number(ABOVE_0, 1.0)] "1e-8" "AdamW epsilon";
    WeightDecay: "train" "weight_decay" [Number(0.0, 1e3)] "0.1" "Decoupled weight decay";
    ClipNorm: "train" "clip_norm" [Number(0.0, 1e9)] "0.0" "Global gradient norm limit; 0 is off";
    Sync: "train" "sync" [Bool] "false" "The host waits for the device at the end of every step, as a loop that reads its loss does";
    GradNorm: "train" "grad_norm" [Bool] "false" "Compute the global gradient norm every step, clipping or not";
    Steps: "train" "steps" [Integer(1, 1_000_000)] "20" "Steps of a run";
    ValidateEvery: "train" "validate_every" [Integer(0, 1_000_000)] "0" "A validation forward every so many steps; 0 is never";

    Hardware: "mesh" "hardware" [Choice(&HARDWARE), Path(".toml")] "(required)" "Hardware profile: a shipped one, or a path (relative to the file that it is written in; given from outside, to the working directory)";
    DpShard: "mesh" "dp_shard" [Integer(1, MIB)] "(required)" "Ranks that shard: the inner data-parallel axis";
    DpOuter: "mesh" "dp_outer" [Integer(1, MIB)] "1" "Outer data-parallel axis: replicas, or outer shards";
    GpusPerNode: "mesh" "gpus_per_node" [Integer(1, 1024)] "(8, or fewer when there are fewer ranks)" "GPUs of one NVLink node";

    Policy: "fsdp" "policy" [Choice(&["native", "fsdp2", "megatron"])] "\"native\"" "Whose schedule: this engine's, torch fully_shard's, Megatron-FSDP's";
    Strategy: "fsdp" "strategy" [Choice(&["no_shard", "optim", "optim_grads", "optim_grads_params"])] "\"optim_grads_params\"" "What is sharded over dp_shard (DDP, ZeRO-1, 2, 3)";
    OuterStrategy: "fsdp" "outer_strategy" [Choice(&["no_shard", "optim"])] "\"no_shard\"" "What is sharded over dp_outer (HSDP, HFSDP)";
    Placements: "fsdp" "placements" [Table(PLACEMENTS)] "(from the strategies)" "Placement of parameters, gradients and optimizer state for each axis, instead of the strategies";
    Units: "fsdp" "units" [Choice(&["block", "root"]), List(&Text)] "\"block\"" "Modules gathered together: globs, joined by +, with =keep exempt from resharding";
    Reshard: "fsdp" "reshard_after_forward" [Bool, Choice(&["auto"]), Integer(1, MIB)] "true" "Free full parameters after forward; auto: every unit but the last block; integer: to groups of so many ranks";
    ReshardRoot: "fsdp" "reshard_root" [Bool] "false" "The root, too, reshards after forward, for gathers at the begin of backward (`fully_shard(root, reshard_after_forward=True)`, as Accelerate calls it); false: it keeps its parameters (None, torch's default)";
    ReshardAfterBackward: "fsdp" "reshard_after_backward" [Bool] "true" "Free full parameters after the backward of every micro-batch; false: after the last one only (`set_reshard_after_backward`), and the next micro-batch finds them";
    PrefetchForward: "fsdp" "prefetch_forward" [Integer(0, 64), Choice(&["implicit"]), Table(LOOKAHEAD)] "(native: 1, others: \"implicit\")" "Units gathered ahead in forward: a depth, or an element budget";
    PrefetchBackward: "fsdp" "prefetch_backward" [Integer(0, 64), Choice(&["implicit"]), Table(LOOKAHEAD)] "(native: 1, others: \"implicit\")" "Units gathered ahead in backward: a depth, or an element budget";
    GradientSync: "fsdp" "gradient_sync" [Choice(&["every", "outer_last", "last"])] "(fsdp2: \"every\", others: \"outer_last\")" "Micro-batches whose gradients are reduced: every one; every one over dp_shard, the last over dp_outer (`set_requires_all_reduce`); the last alone (`set_requires_gradient_sync`, no_sync), gradients being added up in full until then";
    ReduceInFlight: "fsdp" "reduce_in_flight" [Integer(1, 64)] "(fsdp2: 1, native: 2)" "Gradient buffers that may be in flight; megatron bounds them in elements instead";
    OptimizerInBackward: "fsdp" "optimizer_in_backward" [Bool] "false" "The optimizer updates a unit as soon as its gradient is reduced, on the reduction's stream, instead of after backward: reduced gradients live for moments";
    PrefetchNextStep: "fsdp" "prefetch_next_step" [Integer(0, 64)] "0" "Units gathered for the next step's forward as soon as the optimizer has updated them, beside the updates of others";
    AsyncReduce: "fsdp" "async_reduce" [Bool] "true" "Reduce on a side stream";
    SeparateCommunicators: "fsdp" "separate_communicators" [Bool] "(native: true, others: false)" "All-gather and reduce-scatter use communicators of their own";
    CopyEngineGather: "fsdp" "copy_engine_gather" [Bool] "false" "All-gathers run on copy engines and hold no SMs (NCCL 2.28: zero-CTA policy over symmetric windows)";
    CopyEngineReduce: "fsdp" "copy_engine_reduce" [Bool] "false" "Gradients are exchanged on copy engines (an all-to-all that holds no SMs) and summed by a kernel in float32, instead of a reduce-scatter";
    SumInOptimizer: "fsdp" "sum_in_optimizer" [Bool] "false" "The optimizer's kernel sums what `copy_engine_reduce` has exchanged, instead of a kernel behind each exchange: a gradient is read once less and written once less, and all ranks' pieces of it live until then";
    UnifyCommStream: "fsdp" "unify_comm_stream" [Bool] "false" "One side stream for all-gather and reduce-scatter";
    Allocator: "fsdp" "allocator" [Choice(&["caching", "pool", "double_buffer", "temporary"])] "(native: \"pool\", others: \"caching\")" "Where full-size buffers come from";
    ExpandableSegments: "fsdp" "expandable_segments" [Bool] "true" "PyTorch allocator option of that name (PYTORCH_CUDA_ALLOC_CONF), on unless said otherwise; torch itself has it off by default";
    CublasWorkspaceBytes: "fsdp" "cublas_workspace_bytes" [Bytes(0, 1 << 40)] "(native, cpu: 0; a100-40, a100-80: 8519680; others: 33554432)" "cuBLAS's workspace of one thread, of which PyTorch has two (CUBLAS_WORKSPACE_CONFIG): policies fsdp2 and megatron hold both";
    PersistOnAllocFail: "fsdp" "persist_on_alloc_fail" [Bool] "false" "double_buffer: a unit that does not fit gets a persistent buffer";
    AverageInCollective: "fsdp" "average_in_collective" [Bool] "false" "The collective averages, instead of scaling by 1/dp";
    PerTokenLoss: "fsdp" "per_token_loss" [Bool] "false" "The loss is a sum over tokens: gradients are not scaled";
    NanCheck: "fsdp" "nan_check" [Bool] "false" "Check shards and gradients for NaN around every collective (native and megatron, outside mode full)";
    Offload: "fsdp" "offload" [List(&Choice(&["params", "grads", "optimizer"])), Empty] "[]" "State that rests in host memory and visits the device when it is used";
    Frozen: "fsdp" "frozen" [List(&Text), Empty] "[]" "Globs of modules whose parameters, and those of the modules in them, are not trained";

    Compute: "precision" "compute" [Choice(DTYPES)] "\"bf16\"" "Gathered parameters, activations, matrix products";
    MainParams: "precision" "main_params" [Choice(DTYPES_OR_NONE)] "\"f32\"" "Optimizer's weights; none: the compute weights are the optimizer's";
    MainGrads: "precision" "main_grads" [Choice(DTYPES)] "(megatron: \"bf16\", others: \"f32\"; f32 with f32 compute)" "Gradients between micro-batches";
    CommGrads: "precision" "comm_grads" [Choice(DTYPES)] "(fsdp2: \"f32\", others: main_grads)" "Gradients in the reduction over dp_shard; native: over dp_outer they are main_grads";
    Moments: "precision" "moments" [Choice(DTYPES)] "\"f32\"" "Optimizer moments";
    Deterministic: "precision" "deterministic" [Bool] "false" "Every sum has a fixed order, so that a run repeats to the bit: on GPUs attention's backward is slower then and takes a workspace as large as the scores (the CPU device always does)";

    Mode: "compile" "mode" [Choice(&["off", "regions", "blocks", "full"])] "\"off\"" "What is compiled";
    BucketBytes: "compile" "bucket_bytes" [Bytes(0, 1 << 40)] "104857600" "full: bucket collectives up to this size; 0: one for each parameter";
    MaxInflightBytes: "compile" "max_inflight_bytes" [Bytes(1, 1 << 50)] "5000000000" "full: bytes of collectives that may be in flight";
    MemoryBudget: "compile" "memory_budget" [Number(0.0, 100.0)] "0.05" "full: extra memory that reordering may cost, as a fraction of the peak";
    MergeProjections: "compile" "merge_projections" [Choice(&["none", "gradients", "qkv", "all"])] "(native with mode regions or blocks: \"qkv\", else \"none\")" "Linear layers of a block that read the same input and whose weights lie side by side run as one product: queries, keys and values; gate and up too (all); or the gradients of all of these alone";
    Epilogues: "compile" "epilogues" [Bool] "(true with policy native and a compile mode)" "What is added to a matrix product's result (a residual, another gradient) is added by the product itself, and the sum is rounded once; an embedding's gradient writes the zeros of its table itself";
    MixOrderReductions: "compile" "mix_order_reductions" [Bool] "(true with policy native and a compile mode)" "The gradient of a norm's weight, a sum over rows, is part of the kernel that goes back through the norm row by row: what both read is read once";
    FusedProducts: "compile" "fused_products" [Bool] "false" "Elementwise code that reads a matrix product's result in 16 bits (the feed-forward network's gate, and its gradient) is part of the product's kernel, which does it while it multiplies; on GPUs such kernels are our own, for compute capability 9.0";
    CudaGraph: "compile" "cuda_graph" [Choice(&["off", "full_iteration"]), List(&Choice(&["attn", "mlp", "block"]))] "\"off\"" "CUDA-graph capture: the whole iteration, or scopes of every block";

    GatePreset: "gate" "preset" [Choice(&["budget", "strict"])] "\"budget\"" "Defaults of the keys below. budget: the step has to fit and stay within its budgets, and growth beyond a tolerance fails; strict: every change fails, for better or worse";
    GateStepTime: "gate" "step_time" [Number(0.0, 1e6)] "0.005" "Relative tolerance of the predicted step time";
    GateMeasuredStepTime: "gate" "measured_step_time" [Number(0.0, 1e6)] "0.05" "Relative tolerance of the measured step time, old against new in one call";
    GateAllocated: "gate" "allocated" [Number(0.0, 1e6)] "(budget: 0.02, strict: 0.0)" "Relative tolerance of peak allocated memory; 0: equal to the byte";
    GateReserved: "gate" "reserved" [Number(0.0, 1e6)] "(budget: 0.02, strict: 0.01)" "Relative tolerance of peak reserved memory";
    GateDevice: "gate" "device" [Number(0.0, 1e6)] "(budget: 0.02, strict: 0.01)" "Relative tolerance of the memory that the device has in use";
    GateMaxMemory: "gate" "max_memory" [Bytes(1, 1 << 50)] "(none)" "Budget: reserved memory per GPU at most, with or without a baseline";
    GateMaxStepMs: "gate" "max_step_ms" [Number(1e-9, 1e12)] "(none)" "Budget: predicted step time at most, in milliseconds, with or without a baseline";
    GateLoss: "gate" "loss" [Number(0.0, 1e6)] "1e-3" "Relative tolerance of each loss; 0 with loss_absolute 0: bitwise equal";
    GateLossAbsolute: "gate" "loss_absolute" [Number(0.0, 1e6)] "0.0" "Absolute tolerance of each loss, added to the relative one";
    GateLossArea: "gate" "loss_area" [Number(0.0, 1e6)] "5e-4" "Area between the loss curves, relative to the area under the baseline's";
    GateFinalLoss: "gate" "final_loss" [Number(0.0, 1e6)] "1e-3" "How much worse the final loss may be, relative";
    GateGradNorm: "gate" "grad_norm" [Number(0.0, 1e6)] "0.01" "Relative tolerance of each gradient norm; 0: bitwise equal";
    GateSeeds: "gate" "seeds" [Integer(1, 64)] "1" "Runs with seeds 0, 1, …; with 3 or more their final losses are tested instead of a single curve";
    GateProgram: "gate" "program" [Choice(&["exact", "counts", "off"])] "(budget: \"off\", strict: \"exact\")" "What of the program may not change: anything, instruction counts, nothing";
}
