//! The rules: what is proven, what fails without it, and the source of the rule.

use serde::{Serialize, Serializer};
use std::fmt;

/// How a rule is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Order of instructions in the happens-before graph.
    Order,
    /// Address intervals and lifetimes.
    Alias,
    /// State that a step carries: what has been gathered, reduced and updated.
    State,
    /// Layout of parameter groups.
    Layout,
    /// Agreement of ranks about a collective.
    Collective,
    /// Amount of memory that is live at the same time.
    Memory,
}

impl Kind {
    /// Returns the name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Alias => "alias",
            Self::State => "state",
            Self::Layout => "layout",
            Self::Collective => "collective",
            Self::Memory => "memory",
        }
    }
}

/// Severity of a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The program can compute something wrong, or fail.
    Error,
    /// The program is correct, but slow, wasteful or fragile.
    Warning,
}

/// Description of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// The rule.
    pub rule: RuleId,
    /// Stable identifier in tables and JSON.
    pub id: &'static str,
    /// What the rule says.
    pub title: &'static str,
    /// The bug behind the rule: invariants of the Megatron-FSDP study (`INV-n`), issues and pull
    /// requests.
    pub source: &'static str,
    /// How it is checked.
    pub kind: Kind,
    /// What a violation means.
    pub severity: Severity,
}

macro_rules! rules {
    ($($name:ident = $id:literal, $kind:ident, $severity:ident, $title:literal, $source:literal;)*) => {
        /// A rule that a program has to keep.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum RuleId {
            $(
                #[doc = $title]
                $name,
            )*
        }

        /// Every rule, in the order of reports.
        pub const RULES: &[RuleInfo] = &[$(
            RuleInfo {
                rule: RuleId::$name,
                id: $id,
                title: $title,
                source: $source,
                kind: Kind::$kind,
                severity: Severity::$severity,
            },
        )*];
    };
}

rules! {
    Form = "CHK-FORM", State, Error,
        "every index, range and operand of the program exists",
        "a malformed program proves nothing";
    Event = "CHK-EVENT", Order, Error,
        "an event is recorded once, before it is waited for",
        "CUDA: waiting for an event that was never recorded does not wait";
    Lifetime = "CHK-LIFETIME", Alias, Error,
        "memory is accessed only between its allocation and its free",
        "INV-21, INV-53: free of a key that is not allocated releases another key's slot";
    Alloc = "CHK-ALLOC", Memory, Error,
        "the allocator can serve every request",
        "INV-21, INV-34, INV-53: a slot truncated, a third unit in a double buffer, a key outside the plan";
    Uninit = "CHK-UNINIT", Alias, Error,
        "nothing is read before it is written",
        "pull requests of the prototype that read a bucket that nothing had filled";
    Race = "CHK-RACE", Order, Error,
        "conflicting accesses of a range are ordered",
        "INV-10, INV-18";
    Reuse = "CHK-REUSE", Alias, Error,
        "memory is reused only after its last use",
        "INV-01, INV-10, INV-36; Megatron-LM #6187, #6441";
    CommOrder = "CHK-COMM-ORDER", Order, Warning,
        "no order depends on collectives sharing one communicator",
        "NCCL keeps that order; a change to two communicators would lose it";
    Leak = "CHK-LEAK", Memory, Error,
        "a step frees what it allocates, and only that",
        "INV-20, INV-51; Megatron-LM #158 of ISEEKYAN's fork: reduction inputs kept once a layer";
    Collective = "CHK-COLLECTIVE", Collective, Error,
        "sizes, types and members of a collective match",
        "INV-28: unequal counts hang or corrupt; TransformerEngine #3348: one rank reduced another type";
    Align = "CHK-ALIGN", Layout, Warning,
        "collective payloads start and end on 16 bytes",
        "pytorch #195450: unaligned shards fall off NCCL's fast path";
    UnusedGather = "CHK-UNUSED-GATHER", State, Warning,
        "gathered weights are read before they are freed",
        "INV-13, INV-57; `set_unshard_in_backward(False)` of FSDP2";
    GatherInput = "INV-01", Order, Error,
        "a gather comes after all writes of its shard",
        "INV-01: gather stream did not wait for the optimizer, losses diverged";
    GatherDone = "INV-02", Order, Error,
        "computation reads full weights only after their gather",
        "INV-02";
    ReduceInput = "INV-03", Order, Error,
        "a reduction comes after the last write of its input",
        "INV-03: reduction stream must wait for compute per group";
    ReduceAlias = "INV-04", Alias, Error,
        "a reduce-scatter writes apart from its input, or its own part",
        "INV-04: output aliased a wrong slice of the input";
    ReduceRelease = "INV-05", Alias, Error,
        "a gradient buffer is freed only after its reduction",
        "INV-05: inverted early return released buffers in flight";
    ReduceSerial = "INV-06", Order, Warning,
        "a reduction is not waited for right after its launch",
        "INV-06: wait and release after recording removed the overlap";
    ReduceInFlight = "INV-07", Memory, Error,
        "at most K units' gradient buffers are in flight",
        "INV-07, INV-51: gradient buffers piled up once a layer";
    ReduceMissing = "INV-08", State, Error,
        "every gradient reaches the optimizer, reduced, in its step",
        "INV-08, INV-62: units skipped by the final callback, optimizer before the fence";
    ZeroLength = "INV-09", State, Error,
        "an empty shard is never accessed",
        "INV-09: fused kernels on empty tensors corrupted neighbours (TransformerEngine #3207, Megatron-LM #7216)";
    DoubleGather = "INV-11", State, Error,
        "a unit that is already full is not gathered again",
        "INV-11: unshard event must persist until reshard";
    RecomputePrefetch = "INV-13", State, Error,
        "recompute does not prefetch",
        "INV-13, Megatron-LM #6153: units gathered in recompute stayed full into the next step";
    StaleGrad = "INV-19", State, Error,
        "gradients of earlier steps do not leak into this one",
        "INV-19, INV-41: accumulation onto gradients that were not dropped";
    Layout = "INV-26", Layout, Error,
        "parameters are in bounds and apart, no shard splits a row",
        "INV-26: left-over fragments packed across a boundary";
    Group = "INV-27", State, Error,
        "the parameters of a group are of one kind",
        "INV-27";
    Symmetry = "INV-28", Collective, Error,
        "all ranks launch the same collectives in the same order",
        "INV-28, INV-29; Megatron-LM #2218: iteration over a set";
    GradReuse = "INV-30", Alias, Error,
        "gradients are not written where a reduction still reads them",
        "INV-30, Megatron-LM #5222: weight-gradient kernels raced with the previous reduction";
    PoolStream = "INV-36", Alias, Warning,
        "a memory block's stream waits for the block's last use",
        "INV-36: block freed to a stream that does not wait for its last user";
    Tied = "INV-38", State, Error,
        "a tied parameter has one owner, one storage and one reduction",
        "INV-38, Megatron-LM #6164";
    StaleWeight = "INV-39", State, Error,
        "weights in use carry the latest optimizer step",
        "INV-39, INV-47, INV-61; Megatron-LM #6336, #6357";
    DoubleReduce = "INV-43", State, Error,
        "a gradient is reduced exactly once over each axis",
        "INV-43, Megatron-LM #6660: accumulated gradients reduced again";
    CaptureJoin = "INV-48", Order, Error,
        "streams of a captured scope are forked and joined",
        "INV-48, Megatron-LM #2941";
    StateSharded = "INV-50", Layout, Error,
        "optimizer state and its scales are sharded like the weights",
        "INV-50, Megatron-LM #2772: fused optimizer kept full state";
    CaptureHost = "CHK-CAPTURE-HOST", Order, Error,
        "the host does not wait inside a captured scope",
        "a replay has no host code: Megatron-LM #5401, #6152, whose dispatchers read the numbers of tokens per expert on the host";
    CaptureAddress = "INV-54", Alias, Error,
        "a captured scope finds its buffers at the captured addresses",
        "INV-31, INV-54, Megatron-LM #4810: replay into memory that had moved";
    Unsharded = "INV-61", Memory, Error,
        "no full weights outlive the step, except those of the next step",
        "INV-61: units gathered again after their backward stayed full";
    Scale = "MOE-SCALE", State, Error,
        "all gradients are means over all data-parallel ranks, or sums",
        "Megatron-LM #5956, pytorch #160285, DeepSpeed #5259: experts averaged over the ranks of their reduction only";
    Norm = "MOE-NORM", State, Error,
        "the gradient norm has every part of every gradient once",
        "Megatron-LM #5916, DeepSpeed #8475, Automodel #3816: a norm without experts, or of one group of ranks";
    ExpertShard = "MOE-SHARD", Layout, Error,
        "experts are sharded over the ranks that have them",
        "Megatron-LM #2772, torchtitan #3205: experts sharded twice, or over the wrong ranks";
    RouterLoss = "MOE-AUX", State, Error,
        "router losses count once per micro-batch, with own coefficient",
        "Megatron-LM #2217, #3672, #5047: auxiliary losses whose gradients missed a factor, or had it twice";
    RouterBias = "MOE-BIAS", State, Error,
        "steps move biases of routers once, by all choices of the step",
        "Megatron-LM #4433, torchtitan #1593, #1324: choices counted in graph warm-up, or again in recompute";
    ExpertTail = "MOE-TAIL", State, Error,
        "sums over rows of experts leave out rows that no choice fills",
        "pytorch #154557, torchtitan #1237, transformers #48205: rows past the last offset are uninitialized, and 0 times NaN is NaN";
    ExpertEmpty = "MOE-EMPTY", State, Error,
        "gradients of weights are written for experts without rows, too",
        "TransformerEngine #2765, pytorch #172439: weight gradients of empty groups kept what was in memory";
    ExpertRows = "MOE-ROWS", Alias, Error,
        "every row that a choice can take is among the reserved ones",
        "Megatron-LM #5231: results were combined as if choices beyond the capacity had rows, too";
    Window = "MOE-WINDOW", Order, Error,
        "windows are written only behind a barrier after their last use",
        "DeepEP #621, mori #80 and #93: symmetric buffers written again before peers had read them";
    HostCounts = "MOE-COUNTS", Order, Error,
        "the host waits for the numbers of rows before it exchanges rows",
        "lmdeploy #3370: an asynchronous copy of split sizes to the host, read without a wait";
    Float8Scale = "FP8-SCALE", State, Error,
        "8-bit factors are read with the scale that they were cast with",
        "TransformerEngine #1047, #2119, #659, #1723: scales of another micro-batch, or overwritten before backward; #1648: transposed codes dropped before backward";
    Float8Weight = "FP8-WEIGHT", Memory, Error,
        "8-bit copies of weights live within one pass over their unit",
        "torchao #1629, lightning-thunder #1528, TransformerEngine #2805: 8 GiB of unsharded weights saved for backward";
    Float8Format = "FP8-FORMAT", State, Error,
        "tensor cores can read the factors of 8-bit matmuls",
        "cuBLASLt: e5m2 by e5m2, transposed or unaligned factors have no algorithm and fail in the first step";
    Float8Sum = "FP8-SUM", State, Error,
        "gradients of 8-bit matmuls accumulate in float32",
        "sums of one sign in the precision of tensor cores are 7 to 21 % too small";
    Float8Amax = "FP8-AMAX", State, Error,
        "scales of shards follow from all ranks' maxima or whole blocks",
        "Megatron-LM #442, torchtitan #3109: maxima over some of the ranks, diverged after 1,000 steps, NaN at step 3";
    Float8Rows = "FP8-ROWS", State, Error,
        "scales leave out rows that no expert reads",
        "TransformerEngine #2547, Primus-Turbo #397: NaN in rows and scales that padding leaves as they were in memory";
    MuonMatrix = "MUON-MATRIX", Layout, Error,
        "Muon updates whole matrices",
        "an orthogonalized shard is not a shard of the orthogonalized matrix; Megatron-LM's LayerWiseDistributedOptimizer gives ranks whole parameters";
    Skipped = "SKIP-UNIT", State, Error,
        "micro-batches compute with the units that they use, no others",
        "FSDP2: ranks that run different modules launch different collectives and hang; DDP's `find_unused_parameters`";
    NanCheck = "NAN-CHECK", State, Error,
        "checks for NaN cover all operands and results of collectives",
        "Megatron-LM's `check_for_nan_in_grad` looks at gradients before their reduction only";
}

impl RuleId {
    /// Returns its description.
    #[must_use]
    pub const fn info(self) -> &'static RuleInfo {
        &RULES[self as usize]
    }

    /// Returns the stable identifier.
    #[must_use]
    pub const fn id(self) -> &'static str {
        self.info().id
    }

    /// Returns what a violation means.
    #[must_use]
    pub const fn severity(self) -> Severity {
        self.info().severity
    }
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl Serialize for RuleId {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_the_order_of_the_enum_and_ids_are_unique() {
        for (i, r) in RULES.iter().enumerate() {
            assert_eq!(r.rule as usize, i);
            assert_eq!(RULES.iter().filter(|o| o.id == r.id).count(), 1, "{}", r.id);
        }
    }
}
