//! The tables of keys: the meaning of a framework's keys in a scenario.

use crate::adapters::Targets;
use crate::tree::Node;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// A key of a framework.
pub(crate) struct Key {
    /// Path relative to the table: `zero_optimization.stage`.
    pub(crate) name: &'static str,
    /// Meaning.
    pub(crate) to: To,
}

/// What a key means. A null or empty value means that the key is not given.
#[derive(Clone, Copy)]
pub(crate) enum To {
    /// An integer scenario key.
    Integer(&'static str),
    /// A numeric scenario key.
    Number(&'static str),
    /// A quantity that decides scenario keys together with others.
    Fact(Fact),
    /// The model: a folder, a file or the id of a repository.
    Model,
    /// The same, under a name that some programs use for something else. Has no effect if another
    /// key names the model.
    MaybeModel,
    /// Another configuration file, or its content inline. Its keys are those of this format.
    File(&'static Format),
    /// A configuration file whose content says its format.
    AnyFile,
    /// A name that the framework knows, or another configuration file.
    Preset(fn(&Node) -> Option<Effect>, &'static Format),
    /// A custom conversion.
    With(fn(&Node) -> Result<Effect, String>),
    /// A custom conversion of a choice for which the word `none` has a meaning.
    Choice(fn(&Node) -> Result<Effect, String>),
    /// Not part of a training step, with the reason.
    Aside(&'static str),
    /// Changes time or memory but has no counterpart. Has no effect if the value is false, 0 or 1.
    Lost(&'static str),
    /// Makes a prediction impossible because it has no counterpart. Has no effect if the value is
    /// false, 0 or 1.
    Decisive(&'static str),
}

/// The effect of a value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Effect {
    /// Sets a scenario key to a TOML value.
    Set(&'static str, String),
    /// Sets a scenario key to a TOML value as an approximation, with a note.
    Assume(&'static str, String, &'static str),
    /// Gives a quantity.
    Fact(Fact, u64),
    /// Adds layers that get adapters.
    Targets(Targets),
    /// Names the program that shards.
    Engine(Engine),
    /// Sets the compute dtype of mixed precision.
    Mixed(Dtype),
    /// Sets the dtype in which the model is loaded.
    Weights(Dtype),
    /// Names the model.
    Model(String),
    /// Names the model unless another key does.
    MaybeModel(String),
    /// Names the model's config.json, which decides its sizes.
    Config(String),
    /// Names the model's family in the framework.
    Family(String),
    /// Names the model's size in its family.
    Flavor(String),
    /// Several effects.
    All(Vec<Self>),
    /// As [`To::Aside`].
    Aside(&'static str),
    /// As [`To::Lost`].
    Lost(&'static str),
    /// As [`To::Decisive`].
    Decisive(&'static str),
}

/// The granularity of scales if matmuls run in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float8Scaling {
    Tensor,
    Row,
    Block,
    Mx,
}

impl Float8Scaling {
    const ALL: [Self; 4] = [Self::Tensor, Self::Row, Self::Block, Self::Mx];

    /// Returns the scaling of a [`Fact::Float8Scaling`], or the framework's default without one.
    pub(crate) fn of(value: Option<u64>) -> Self {
        let found = Self::ALL.into_iter().find(|s| Some(*s as u64) == value);
        found.unwrap_or(Self::Tensor)
    }

    /// Converts the scaling to a fact.
    pub(crate) fn effect(self) -> Effect {
        Effect::Fact(Fact::Float8Scaling, self as u64)
    }

    /// Returns the scenario's recipe.
    pub(crate) const fn recipe(self) -> &'static str {
        match self {
            Self::Tensor => "tensorwise",
            Self::Row => "rowwise",
            Self::Block => "blockwise",
            Self::Mx => "mxfp8",
        }
    }
}

/// Bit of `Fact::CompiledParts`: each block is compiled.
pub(crate) const COMPILED_BLOCKS: u64 = 1;
/// Bit of `Fact::CompiledParts`: the loss is compiled.
pub(crate) const COMPILED_LOSS: u64 = 2;

/// A quantity that decides scenario keys together with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fact {
    /// Ranks in total.
    Processes,
    Nodes,
    GpusPerNode,
    DpShard,
    DpReplicate,
    Tensor,
    Pipeline,
    Context,
    /// Ranks that divide sequences, and heads in attention (DeepSpeed-Ulysses).
    Ulysses,
    Expert,
    /// Activation of Megatron-LM's feed-forward layer, as an `Activation`.
    Activation,
    /// Position embedding of Megatron-LM, as a `Positions`.
    Positions,
    /// 1: Megatron-LM's linear layers have no biases.
    NoBias,
    /// 1: RMSNorm, 0: LayerNorm.
    RmsNorm,
    /// 1: norms store their weights minus 1.
    UnitOffset,
    /// 1: multi-head latent attention (MLA).
    Latent,
    /// Head dimension that latent attention does not rotate.
    QkHead,
    /// 1: grouped-query attention.
    GroupedQueries,
    /// Size of the vocabulary before it is padded.
    Vocab,
    /// Divisor of the padded vocabulary size, on one tensor-parallel rank.
    VocabMultiple,
    /// 1: arguments describe layers of several kinds.
    OtherLayers,
    /// 1: routers apply softmax before top-k.
    PreSoftmax,
    /// 1: the first layers of each stage are recomputed; 0: groups of layers are recomputed.
    RecomputeBlock,
    /// 1: backward runs parts of blocks again.
    RecomputeSelective,
    /// These parts, as bits of `RecomputeModule::WORDS`.
    RecomputeModules,
    /// 1: whole layers of experts are one of them.
    RecomputeMoe,
    /// 1: torchtitan's mode `selective`.
    SelectiveMode,
    /// What it recomputes: 0 operations, N every Nth block as a whole.
    RecomputeEvery,
    /// Number of chunks of the loss.
    LossChunks,
    /// What is compiled, as the sum of `COMPILED_BLOCKS` and `COMPILED_LOSS`.
    CompiledParts,
    /// Number of layers that are recomputed, or number of layers in a recomputed group.
    RecomputeLayers,
    /// Number of experts per layer.
    Experts,
    /// 0: routers have no load-balancing loss.
    Balancing,
    /// Dispatcher, in Megatron-LM's words: 0 allgather, 1 alltoall, 2 flex. DeepEP and HybridEP of
    /// other frameworks are 2; 3 writes tokens to the memory of other ranks.
    TokenDispatcher,
    /// Backend of `flex`, as its place in `derive::FLEX_BACKENDS`.
    FlexBackend,
    /// Experts are chosen at random, without a router.
    RandomChoices,
    /// 1: full parameters are freed after forward in a job with expert parallelism (NeMo
    /// AutoModel's `distributed.moe`); 0: they are kept.
    ExpertReshard,
    /// 1: NeMo AutoModel or VeOmni sets explicit prefetching; the depths count units.
    ExplicitPrefetch,
    ForwardPrefetchDepth,
    BackwardPrefetchDepth,
    /// 1: kernels between matmuls are those of Transformer Engine or QuACK.
    FusedKernels,
    /// 1: Liger's kernels leave the loss as it is.
    UnfusedLoss,
    /// 1: the optimizer is Transformer Engine's `FusedAdam`.
    FusedAdam,
    /// 1: the tokens of experts are padded to their capacity.
    PadToCapacity,
    /// Sequences per step over all ranks.
    GlobalBatch,
    /// Largest micro-batch; smaller if a rank has fewer sequences per step (LLM Foundry).
    RankMicroBatch,
    /// 1: sequences of a micro-batch are packed up to [`Fact::MostTokens`] tokens per rank (verl).
    DynamicBatch,
    MostTokens,
    /// 1: the sizes in the file are of LLM Foundry's MPT.
    Mpt,
    /// Library of MPT's attention kernels, as its place in `derive/llm_foundry.rs`.
    AttentionLibrary,
    /// Width of the feed-forward layer relative to that of the model, as the bits of a float.
    FfnRatio,
    /// 1: gradients are reduced in the type of computation; 0: in float32.
    ComputeReduction,
    /// What a configuration of LitGPT is for, as a `Command`.
    LitGpt,
    /// Sequences per step and rank; accumulation follows from it.
    RankBatch,
    /// 1: every sample is a pair of sequences, a preferred answer and a rejected one.
    Pairs,
    /// 1: the loss needs a reference model that runs in the step; 0: one that does not run in the
    /// step.
    Reference,
    /// 1: log probabilities of the reference model are computed before training.
    ReferenceInAdvance,
    /// 1: the loss over pairs needs no reference model.
    WithoutReference,
    /// Longest sample; the length of sequences if no other key gives one.
    SampleLength,
    /// Tokens per packed sequence; replaces the length of the data's sequences.
    PackedLength,
    /// 1: one process runs, whatever the given number of processes.
    OneProcess,
    /// Tokens per rank and micro-batch.
    MicroBatchTokens,
    /// Tokens per step over all ranks.
    StepTokens,
    FsdpVersion,
    /// 1: Megatron-LM's distributed optimizer is on.
    DistributedOptimizer,
    /// 1: Megatron-LM's optimizer reads gradients in the dtype they are stored in.
    PrecisionAwareOptimizer,
    /// 1: Megatron-LM accumulates and reduces gradients in float32.
    Float32Gradients,
    /// 1: Megatron-LM's optimizer is on the CPU (`HybridDeviceOptimizer`).
    OptimizerOffload,
    /// CUDA graphs of Megatron-LM: 0 none, 1 parts of each layer, 2 the whole iteration.
    CudaGraph,
    /// The captured parts of a layer, as bits of `derive::CAPTURED`.
    CudaGraphModules,
    /// 1: Megatron-LM registers communication buffers with NCCL.
    NcclUb,
    /// ZeRO stage of DeepSpeed.
    ZeroStage,
    /// PyTorch's `ShardingStrategy` by its number: 1 `FULL_SHARD`, 2 `SHARD_GRAD_OP`, 3 `NO_SHARD`,
    /// 4 `HYBRID_SHARD`, 5 `HYBRID_SHARD_ZERO2`.
    Strategy,
    /// 1: full parameters are freed after forward; 0: they are kept.
    Reshard,
    /// 1: torchtitan's version decides which full parameters are freed after forward.
    ReshardByDefault,
    /// 1: adapters are trained; 0: the model itself is trained.
    Adapter,
    /// The frozen model has 4 bits per element. 1: with float32 scales, 2: with 8-bit scales,
    /// unless [`Fact::DoubleQuantization`] is given.
    FourBits,
    /// The frozen model has 4 bits per element, with 8-bit scales unless [`Fact::FourBits`] says
    /// otherwise.
    FourBitsToo,
    /// The frozen model is kept in int8.
    EightBits,
    /// 1: a part of a vision-language model is frozen; 0: it is trained.
    FrozenVision,
    FrozenProjector,
    FrozenLanguage,
    /// 1: the scales of 4-bit weights have 8 bits; 0: they are float32.
    DoubleQuantization,
    /// 1: whole blocks are recomputed, unless another key says which operations; 0: no key of the
    /// model's code asks for recomputation.
    Recompute,
    /// 1: the model's code calls `torch.utils.checkpoint` with `use_reentrant=True`.
    Reentrant,
    /// 1: matmuls of linear layers run in 8 bits.
    Float8,
    /// Granularity of scales, as a [`Float8Scaling`].
    Float8Scaling,
    /// 1: ranks gather their weights in 8 bits.
    Float8Gather,
    /// 1: scales for these gathers are computed after the optimizer step, all at once.
    Float8Ahead,
    /// 1: transposed 8-bit copies of gathered weights stay in memory.
    Float8Transposes,
    /// 1: the first and last blocks stay in 16 bits.
    Float8InnerBlocks,
    /// 1: VeOmni computes in 16 bits with float32 weights; 0: all state has 16 bits.
    MixedPrecision,
    /// 1: FSDP1 shards parameters; 0: it shards nothing (VeOmni).
    FullShard,
    /// 1: the operation runs in a fused kernel; 0: in the kernels of transformers (VeOmni).
    FusedNorms,
    FusedRotary,
    FusedGates,
    /// 1: each block is compiled (VeOmni).
    CompiledBlocks,
    /// 1: the model is compiled.
    Compiled,
    /// 1: blocks are compiled separately.
    RegionalCompilation,
    /// 1: parameters, gradients and optimizer state are in host memory.
    OffloadAll,
    /// 1: parameters are in host memory.
    OffloadParams,
    /// 1: optimizer state is in host memory.
    OffloadOptimizer,
}

/// The engine that shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// FSDP of the version that [`Fact::FsdpVersion`] gives.
    Fsdp,
    DeepSpeed,
    Megatron,
    /// Megatron-LM's distributed optimizer.
    MegatronOptimizer,
    Ddp,
}

/// A dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Reads a dtype name of PyTorch or of a framework.
    ///
    /// # Errors
    /// Returns a message that says what was expected.
    pub(crate) fn of(node: &Node) -> Result<Self, String> {
        let text = node.full();
        let name = text.strip_prefix("torch.").unwrap_or(&text);
        Ok(match name {
            "float32" | "fp32" | "f32" | "float" => Self::F32,
            "float16" | "fp16" | "f16" | "half" => Self::F16,
            "bfloat16" | "bf16" => Self::Bf16,
            _ => return Err(node.expected("float32, float16 or bfloat16")),
        })
    }

    /// Returns the name in scenarios.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// The keys at one place of a configuration.
pub(crate) struct Table {
    /// Path of the table; empty for the top level. Names start with a path that ends in `_`.
    pub(crate) under: &'static str,
    /// Optional prefix of names.
    pub(crate) prefix: &'static str,
    pub(crate) keys: &'static [Key],
    /// Keys that are not part of a training step, grouped by the reason.
    pub(crate) asides: &'static [(&'static str, &'static [&'static str])],
}

/// A framework's format.
pub(crate) struct Format {
    /// Name of the framework.
    pub(crate) name: &'static str,
    pub(crate) tables: &'static [Table],
    /// The engine if no key names one.
    pub(crate) engine: Option<Engine>,
    /// Whether the framework runs on Accelerate: FSDP1 unless a key says otherwise, float32 without
    /// mixed precision, gradients reduced in the compute dtype, accumulation under `no_sync`.
    pub(crate) accelerated: bool,
    /// Whether FSDP2 reduces gradients in float32 by default, even if weights have 16 bits.
    pub(crate) reduces_in_f32: bool,
    /// Whether names are unique at every level, and `_` is equivalent to `-`. Tables may write
    /// either; paths have `-`.
    pub(crate) flat: bool,
    /// Whether programs add their own keys. An unknown key may then be one of these, so it is not
    /// reported as misspelled.
    pub(crate) open: bool,
    /// Fallbacks for keys that are not given.
    pub(crate) defaults: &'static [Fallback],
}

/// The value that a framework uses if no key is given.
pub(crate) struct Fallback {
    /// Scenario key.
    pub(crate) key: &'static str,
    /// TOML value.
    pub(crate) value: &'static str,
    pub(crate) why: &'static str,
}

impl Format {
    /// Returns the meaning of the key at a path.
    pub(crate) fn key(&self, path: &str) -> Option<To> {
        self.tables
            .iter()
            .find_map(|table| table.key(path, |name| self.spelled(name)))
    }

    /// Returns whether two paths name the same key, for example with and without a prefix.
    pub(crate) fn is_same_key(&self, a: &str, b: &str) -> bool {
        self.tables.iter().any(|table| {
            let (a, b) = (table.name_of(a), table.name_of(b));
            a == b && a.is_some_and(|name| table.keys.iter().any(|k| k.name == name))
        })
    }

    /// Returns a table's name as paths have it.
    pub(crate) fn spelled(&self, name: &'static str) -> Cow<'static, str> {
        if self.flat {
            name.replace('_', "-").into()
        } else {
            name.into()
        }
    }

    /// Returns the known sibling names of a path, without prefixes.
    pub(crate) fn siblings(&self, path: &str) -> Vec<Cow<'static, str>> {
        let mut names = Vec::new();
        for table in self.tables {
            let Some(inner) = table.name_of(path) else {
                continue;
            };
            let folder = split(inner).0;
            let known = table.names().map(split);
            let of_folder = known.filter(|(f, _)| *f == folder);
            names.extend(of_folder.map(|(_, name)| self.spelled(name)));
        }
        names
    }

    /// Returns the names of the maps with known keys that a map at a path can have.
    pub(crate) fn sections(&self, path: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for table in self.tables.iter().filter(|t| !t.under.ends_with('_')) {
            for name in table.names() {
                let whole = match table.under {
                    "" => name.to_owned(),
                    under => format!("{under}.{name}"),
                };
                let rest = match path {
                    "" => Some(whole.as_str()),
                    path => whole.strip_prefix(path).and_then(|r| r.strip_prefix('.')),
                };
                if let Some((section, _)) = rest.and_then(|r| r.split_once('.')) {
                    found.insert(section.to_owned());
                }
            }
        }
        found
    }

    /// Returns the name of a path in the form that the tables use.
    pub(crate) fn name_of<'p>(&self, path: &'p str) -> &'p str {
        let mut names = self.tables.iter().filter(|t| !t.under.is_empty());
        split(names.find_map(|t| t.name_of(path)).unwrap_or(path)).1
    }
}

/// Splits a path into its parent and its last name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

impl Table {
    fn key(&self, path: &str, spelled: impl Fn(&'static str) -> Cow<'static, str>) -> Option<To> {
        let name = self.name_of(path)?;
        let is = |known: &'static str| spelled(known) == name;
        let known = self.keys.iter().find(|k| is(k.name)).map(|k| k.to);
        known.or_else(|| {
            let has = |(_, names): &&(&str, &[&'static str])| names.iter().any(|n| is(n));
            let (why, _) = self.asides.iter().find(has)?;
            Some(To::Aside(why))
        })
    }

    /// Returns the names of all keys.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        let asides = self
            .asides
            .iter()
            .flat_map(|(_, names)| names.iter().copied());
        self.keys.iter().map(|k| k.name).chain(asides)
    }

    /// Returns a path relative to this table, without the prefix.
    fn name_of<'p>(&self, path: &'p str) -> Option<&'p str> {
        let name = if self.under.is_empty() {
            path
        } else {
            let rest = path.strip_prefix(self.under)?;
            if self.under.ends_with('_') {
                rest
            } else {
                rest.strip_prefix('.')?
            }
        };
        Some(name.strip_prefix(self.prefix).unwrap_or(name))
    }
}

/// Returns a key that changes time or memory but is not modeled.
pub(crate) const fn lost(name: &'static str, why: &'static str) -> Key {
    key(name, To::Lost(why))
}

/// Returns a key that makes a prediction impossible if it is set.
pub(crate) const fn decisive(name: &'static str, why: &'static str) -> Key {
    key(name, To::Decisive(why))
}

/// Returns a key with a custom conversion.
pub(crate) const fn with(name: &'static str, f: fn(&Node) -> Result<Effect, String>) -> Key {
    key(name, To::With(f))
}

/// Returns a choice for which the word `none` has a meaning.
pub(crate) const fn choice(name: &'static str, f: fn(&Node) -> Result<Effect, String>) -> Key {
    key(name, To::Choice(f))
}

/// Returns an integer scenario key.
pub(crate) const fn integer(name: &'static str, scenario: &'static str) -> Key {
    key(name, To::Integer(scenario))
}

/// Returns a numeric scenario key.
pub(crate) const fn number(name: &'static str, scenario: &'static str) -> Key {
    key(name, To::Number(scenario))
}

/// Scenario key of the expert capacity factor.
pub(crate) const CAPACITY: &str = "moe.capacity_factor";
/// Scenario key that overlaps shared experts with the token exchange.
pub(crate) const SHARED_OVERLAP: &str = "moe.shared_expert_overlap";
pub(crate) const FORCED: &str = "moe.force_routing";
pub(crate) const ROUTING: &str = "moe.routing";

/// Returns a key that gives a quantity.
pub(crate) const fn fact(name: &'static str, fact: Fact) -> Key {
    key(name, To::Fact(fact))
}

/// Returns a key.
pub(crate) const fn key(name: &'static str, to: To) -> Key {
    Key { name, to }
}

/// Writes a list of strings as TOML.
pub(crate) fn list(items: &[String]) -> String {
    let items: Vec<String> = items.iter().map(|i| quoted(i)).collect();
    format!("[{}]", items.join(", "))
}

/// Returns the words of a list whose bits are set.
pub(crate) fn words_of(
    bits: u64,
    known: &'static [&'static str],
) -> impl Iterator<Item = &'static str> {
    let words = known.iter().enumerate();
    let set = words.filter(move |(at, _)| bits >> at & 1 == 1);
    set.map(|(_, word)| *word)
}

/// Writes a string as TOML.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Returns whether two names differ by one typo: an extra, missing or wrong letter, or two swapped
/// neighbors. Names with different digits are different names.
pub(crate) fn is_typo(a: &str, b: &str) -> bool {
    const MIN_LENGTH: usize = 6;
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len() < MIN_LENGTH || a == b {
        return false;
    }
    let start = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let end = |skip_a: usize, skip_b: usize| a[start + skip_a..] == b[start + skip_b..];
    let has = |v: &[char], n: usize| v.len() >= start + n;
    let digit = |v: &[char]| v.get(start).is_some_and(char::is_ascii_digit);
    if digit(&a) || digit(&b) {
        return false;
    }
    has(&a, 1) && end(1, 0)
        || has(&b, 1) && end(0, 1)
        || has(&a, 1) && has(&b, 1) && end(1, 1)
        || has(&a, 2)
            && has(&b, 2)
            && a[start] == b[start + 1]
            && a[start + 1] == b[start]
            && end(2, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_typing_error_is_a_typo() {
        for (a, b) in [
            ("micro_batch_sze", "micro_batch_size"),
            ("sequence_lenn", "sequence_len"),
            ("mixed_percision", "mixed_precision"),
            ("fsdp_versoin", "fsdp_version"),
            ("num_machine", "num_machines"),
        ] {
            assert!(is_typo(a, b), "{a} {b}");
        }
        for (a, b) in [
            ("eval_steps", "save_steps"),
            ("adam_beta3", "adam_beta2"),
            ("bf16", "fp16"),
            ("sequence_len", "sequence_len"),
        ] {
            assert!(!is_typo(a, b), "{a} {b}");
        }
    }
}
