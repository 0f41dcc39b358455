//! The tables of keys: what a key of a framework means for a scenario.

use crate::adapters::Targets;
use crate::tree::Node;

/// A key of a framework.
pub(crate) struct Key {
    /// Path below the table's place: `zero_optimization.stage`.
    pub(crate) name: &'static str,
    /// Meaning.
    pub(crate) to: To,
}

/// What a key means. A null or empty value means that the key is not given.
#[derive(Clone, Copy)]
pub(crate) enum To {
    /// An integer of a scenario, by key.
    Integer(&'static str),
    /// A number of a scenario, by key.
    Number(&'static str),
    /// A quantity that decides scenario keys together with others.
    Fact(Fact),
    /// The model: a folder, a file or the id of a repository.
    Model,
    /// Another configuration file, or its content: keys of this format.
    File(&'static Format),
    /// A conversion of its own.
    With(fn(&Node) -> Result<Effect, String>),
    /// A conversion of a choice, in which the word `none` has a meaning.
    Choice(fn(&Node) -> Result<Effect, String>),
    /// No part of a training step, and why.
    Aside(&'static str),
    /// Changes time or memory, but has no counterpart; nothing if the value is false, 0 or 1.
    Lost(&'static str),
    /// No prediction is possible without a counterpart; nothing if the value is false, 0 or 1.
    Decisive(&'static str),
}

/// What a value does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Effect {
    /// Sets a scenario key to a TOML value.
    Set(&'static str, String),
    /// Sets it, as an approximation.
    Assume(&'static str, String, &'static str),
    /// Gives a quantity.
    Fact(Fact, u64),
    /// Adds layers that get adapters.
    Targets(Targets),
    /// Names the program that shards.
    Engine(Engine),
    /// Type of computation under mixed precision.
    Mixed(Dtype),
    /// Type in which the model is loaded.
    Weights(Dtype),
    /// Names the model.
    Model(String),
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

/// What shares a scale where matmuls run in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float8Scaling {
    Tensor,
    Row,
    Block,
    Mx,
}

impl Float8Scaling {
    const ALL: [Self; 4] = [Self::Tensor, Self::Row, Self::Block, Self::Mx];

    /// Returns what a [`Fact::Float8Scaling`] says; that of the framework without one.
    pub(crate) fn of(value: Option<u64>) -> Self {
        let found = Self::ALL.into_iter().find(|s| Some(*s as u64) == value);
        found.unwrap_or(Self::Tensor)
    }

    /// Makes the fact.
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
    Expert,
    /// Activation of Megatron-LM's feed-forward layer, as an `Activation`.
    Activation,
    /// Position embedding of Megatron-LM, as a `Positions`.
    Positions,
    /// 1: Megatron-LM's linear layers have no biases.
    NoBias,
    /// 1: RMSNorm, 0: LayerNorm.
    RmsNorm,
    /// 1: weights of norms are kept as their distance from 1.
    UnitOffset,
    /// 1: latent attention.
    Latent,
    /// Dimensions of a head that latent attention does not rotate.
    QkHead,
    /// 1: queries share keys and values in groups.
    GroupedQueries,
    /// Size of the vocabulary before it is padded.
    Vocab,
    /// What the size of the vocabulary is a multiple of, on one tensor-parallel rank.
    VocabMultiple,
    /// 1: arguments name layers of several kinds.
    OtherLayers,
    /// 1: routers apply their softmax before they choose.
    PreSoftmax,
    /// 1: the first layers of each stage are recomputed, 0: groups of layers.
    RecomputeBlock,
    /// Layers that are recomputed, or that a recomputed group has.
    RecomputeLayers,
    /// Experts of a layer.
    Experts,
    /// 0: routers have no load-balancing loss.
    Balancing,
    /// 1: routers choose experts by scores with biases.
    RouterBias,
    /// 1: steps move the biases of routers, 0: the biases stay.
    RouterBiasUpdate,
    /// Megatron-LM's dispatcher: 0 allgather, 1 alltoall, 2 flex.
    TokenDispatcher,
    /// What `flex` is: 0 DeepEP, 1 HybridEP.
    FlexBackend,
    /// 1: the rows of experts are padded to their capacity.
    PadToCapacity,
    /// Sequences per step over all ranks.
    GlobalBatch,
    /// Sequences per step and rank, from which accumulation follows.
    RankBatch,
    /// Every sample is a pair of sequences: an answer that is preferred, and one that is not.
    Pairs,
    /// Answers are compared with those of a reference: 1: in the step, 0: not in the step.
    Reference,
    /// 1: what the reference says is computed before training.
    ReferenceInAdvance,
    /// 1: the loss over pairs needs no reference.
    WithoutReference,
    /// Tokens of a packed sequence, which replace the length of the data's sequences.
    PackedLength,
    /// 1: one process runs, whatever the number of processes says.
    OneProcess,
    /// Tokens per rank and micro-batch.
    MicroBatchTokens,
    /// Tokens per step over all ranks.
    StepTokens,
    FsdpVersion,
    /// 1: Megatron-LM's distributed optimizer is on.
    DistributedOptimizer,
    /// 1: Megatron-LM's optimizer reads gradients in their own type.
    PrecisionAwareOptimizer,
    /// 1: Megatron-LM's optimizer is on the CPU (`HybridDeviceOptimizer`).
    OptimizerOffload,
    /// CUDA graphs of Megatron-LM: 0 none, 1 parts of each layer, 2 the whole iteration.
    CudaGraph,
    /// The parts, as bits of `derive::CAPTURED`.
    CudaGraphModules,
    /// 1: Megatron-LM registers communication buffers with NCCL.
    NcclUb,
    /// ZeRO stage of DeepSpeed.
    ZeroStage,
    /// PyTorch's `ShardingStrategy`, by its number: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD,
    /// 4 HYBRID_SHARD, 5 HYBRID_SHARD_ZERO2.
    Strategy,
    /// 1: full parameters are freed after forward; 0: not.
    Reshard,
    /// 1: adapters are trained; 0: the model.
    Adapter,
    /// The frozen model has four bits per element. 1: with float32 scales, 2: with scales of eight
    /// bits, unless [`Fact::DoubleQuantization`] says which.
    FourBits,
    /// The frozen model is kept in int8.
    EightBits,
    /// 1: the scales of weights in four bits have eight bits; 0: they are float32.
    DoubleQuantization,
    /// 1: whole blocks are recomputed, unless another key says which operations.
    Recompute,
    /// 1: `torch.utils.checkpoint` with `use_reentrant=True`, where the model's code recomputes.
    Reentrant,
    /// 1: matmuls of linear layers run in 8 bits.
    Float8,
    /// What shares a scale, as a [`Float8Scaling`].
    Float8Scaling,
    /// 1: ranks gather their weights in 8 bits.
    Float8Gather,
    /// 1: scales for these gathers are computed after the optimizer, all at once.
    Float8Ahead,
    /// 1: transposed codes of gathered weights stay in memory.
    Float8Transposes,
    /// 1: the first and last blocks stay in 16 bits.
    Float8InnerBlocks,
    /// 1: the model is compiled.
    Compiled,
    /// 1: its blocks are compiled one by one.
    RegionalCompilation,
    /// 1: parameters, gradients and optimizer state are in host memory.
    OffloadAll,
    /// 1: parameters are in host memory.
    OffloadParams,
    /// 1: optimizer state is in host memory.
    OffloadOptimizer,
}

/// The program that shards.
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

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Reads a name of PyTorch or a framework.
    ///
    /// # Errors
    /// What was expected.
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

/// Keys at a place of a configuration.
pub(crate) struct Table {
    /// Path that the keys are below; empty: the top.
    pub(crate) under: &'static str,
    /// Prefix that names may have.
    pub(crate) prefix: &'static str,
    pub(crate) keys: &'static [Key],
    /// Keys that are no part of a training step, by the reason.
    pub(crate) asides: &'static [(&'static str, &'static [&'static str])],
}

/// A framework's format.
pub(crate) struct Format {
    /// Name of the framework.
    pub(crate) name: &'static str,
    pub(crate) tables: &'static [Table],
    /// The program that shards if no key says so.
    pub(crate) engine: Option<Engine>,
    /// Whether it runs on Accelerate: FSDP1 unless a key says otherwise, float32 without mixed
    /// precision, gradients reduced in the type of computation, accumulation under `no_sync`.
    pub(crate) accelerated: bool,
    /// Whether names are unique wherever they are, and `_` is the same as `-`.
    pub(crate) flat: bool,
    /// Whether programs add their own keys: an unknown one may then be one of these, and is not
    /// reported as misspelled.
    pub(crate) open: bool,
    /// What the framework does if no key says otherwise.
    pub(crate) defaults: &'static [Fallback],
}

/// What a framework does if no key says otherwise.
pub(crate) struct Fallback {
    /// Scenario key.
    pub(crate) key: &'static str,
    /// Value as TOML.
    pub(crate) value: &'static str,
    pub(crate) why: &'static str,
}

impl Format {
    /// Returns what the key at a path means.
    pub(crate) fn key(&self, path: &str) -> Option<To> {
        self.tables.iter().find_map(|table| table.key(path))
    }

    /// Returns whether two paths are names of the same key, such as one with and one without a
    /// prefix.
    pub(crate) fn is_same_key(&self, a: &str, b: &str) -> bool {
        self.tables.iter().any(|table| {
            let (a, b) = (table.name_of(a), table.name_of(b));
            a == b && a.is_some_and(|name| table.keys.iter().any(|k| k.name == name))
        })
    }

    /// Returns the known names next to a path, without prefixes.
    pub(crate) fn siblings(&self, path: &str) -> Vec<&'static str> {
        let mut names = Vec::new();
        for table in self.tables {
            let Some(inner) = table.name_of(path) else {
                continue;
            };
            let folder = split(inner).0;
            let known = table.names().map(split);
            names.extend(known.filter(|(f, _)| *f == folder).map(|(_, name)| name));
        }
        names
    }

    /// Returns the name of a path as the tables write it.
    pub(crate) fn name_of<'p>(&self, path: &'p str) -> &'p str {
        let mut names = self.tables.iter().filter(|t| !t.under.is_empty());
        split(names.find_map(|t| t.name_of(path)).unwrap_or(path)).1
    }
}

/// Splits a path into its folder and its last name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

impl Table {
    fn key(&self, path: &str) -> Option<To> {
        let name = self.name_of(path)?;
        let known = self.keys.iter().find(|k| k.name == name).map(|k| k.to);
        known.or_else(|| {
            let has = |(_, names): &&(&str, &[&str])| names.contains(&name);
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

    /// Returns a path below this table's place, without the prefix.
    fn name_of<'p>(&self, path: &'p str) -> Option<&'p str> {
        let name = if self.under.is_empty() {
            path
        } else {
            path.strip_prefix(self.under)?.strip_prefix('.')?
        };
        Some(name.strip_prefix(self.prefix).unwrap_or(name))
    }
}

/// Returns a key that changes time or memory, but is not modeled.
pub(crate) const fn lost(name: &'static str, why: &'static str) -> Key {
    key(name, To::Lost(why))
}

/// Returns a key without which no prediction is possible.
pub(crate) const fn decisive(name: &'static str, why: &'static str) -> Key {
    key(name, To::Decisive(why))
}

/// Returns a key with a conversion of its own.
pub(crate) const fn with(name: &'static str, f: fn(&Node) -> Result<Effect, String>) -> Key {
    key(name, To::With(f))
}

/// Returns a choice in which the word `none` has a meaning.
pub(crate) const fn choice(name: &'static str, f: fn(&Node) -> Result<Effect, String>) -> Key {
    key(name, To::Choice(f))
}

/// Returns an integer of a scenario.
pub(crate) const fn integer(name: &'static str, scenario: &'static str) -> Key {
    key(name, To::Integer(scenario))
}

/// Returns a number of a scenario.
pub(crate) const fn number(name: &'static str, scenario: &'static str) -> Key {
    key(name, To::Number(scenario))
}

/// The key of the capacity of experts.
pub(crate) const CAPACITY: &str = "moe.capacity_factor";
/// The key of shared experts that compute while tokens travel.
pub(crate) const SHARED_OVERLAP: &str = "moe.shared_expert_overlap";
pub(crate) const FORCED: &str = "moe.force_routing";

/// Returns a quantity.
pub(crate) const fn fact(name: &'static str, fact: Fact) -> Key {
    key(name, To::Fact(fact))
}

/// Returns a key.
pub(crate) const fn key(name: &'static str, to: To) -> Key {
    Key { name, to }
}

/// Writes a list of texts as TOML.
pub(crate) fn list(items: &[String]) -> String {
    let items: Vec<String> = items.iter().map(|i| quoted(i)).collect();
    format!("[{}]", items.join(", "))
}

/// Returns the TOML text of a string.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Returns whether two names differ by one typing error: a letter too many, missing, wrong, or
/// swapped with its neighbour. Different digits are different names.
pub(crate) fn is_typo(a: &str, b: &str) -> bool {
    const SHORTEST: usize = 6;
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len() < SHORTEST || a == b {
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
