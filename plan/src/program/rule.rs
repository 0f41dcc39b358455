//! Provenance: the rule behind each instruction that `lower` emits, with its source.

use serde::Serialize;

macro_rules! rules {
    ($($(#[$m:meta])* $name:ident = $text:literal, $why:literal;)*) => {
        /// A lowering rule.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Rule {
            $(
                #[doc = $why]
                $name,
            )*
        }
        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns the short name in program text.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Returns the meaning of the rule and its source.
            #[must_use]
            pub const fn why(self) -> &'static str {
                match self { $(Self::$name => $why,)* }
            }
        }
    };
}

rules! {
    Model = "model", "The model's own computation.";
    State = "state", "Persistent state of the strategy: weights, main weights, gradients, moments.";
    StepStart = "step-start", "Inputs of the step are produced; gather streams wait for the optimizer (FSDP2 root pre-forward).";
    Unshard = "unshard", "Gather a unit's parameters before its forward or backward.";
    Prefetch = "prefetch", "Gather a later unit early, within the prefetch depth or element budget.";
    GatherGate = "gather-gate", "A gather may not reuse a buffer before its last reader is done.";
    CopyIn = "copy-in", "Cast or pack shards into the gather's input (FSDP2 foreach copy-in).";
    CopyOut = "copy-out", "Split the gathered buffer into parameters (FSDP2 copy-out, on the compute stream).";
    GatherDone = "gather-done", "Computation on a unit waits for its gather.";
    Reshard = "reshard", "Free full parameters after their last use in this direction.";
    ReshardGroup = "reshard-group", "Integer reshard: keep a 1/s copy for a gather inside a smaller group.";
    Grad = "grad", "A full gradient is produced or released.";
    ReduceGate = "reduce-gate", "At most K gradient buffers are in flight: wait for the oldest reduction before packing.";
    ReduceCopyIn = "reduce-copy-in", "Pack and cast gradients into the reduction's input.";
    ReduceFork = "reduce-fork", "The reduction waits for the kernels that wrote its input.";
    Reduce = "reduce", "Reduce a unit's gradients.";
    ReduceAccumulate = "reduce-accumulate", "Add the reduced shard to the gradient at rest, or cast it there.";
    ReduceRelease = "reduce-release", "Free a gradient buffer whose reduction is done.";
    OuterReduce = "outer-reduce", "Reduce over the outer axis on the last micro-batch (HSDP, HFSDP).";
    OuterGather = "outer-gather", "Gather over the outer axis on the first micro-batch (HFSDP).";
    Accumulate = "accumulate", "Add a micro-batch's gradient to the unreduced one (no_shard, optim, gradient_sync = last).";
    Scale = "scale", "Gradient scaling by 1/dp where the collective does not do it.";
    NanCheck = "nan-check", "Check for NaN around a collective.";
    FinalFence = "final-fence", "The compute stream waits for reductions: at the end of backward, or (native) for a group's before its update.";
    Clip = "clip", "Global gradient norm and clipping.";
    Optimizer = "optimizer", "Optimizer step on shards.";
    Refresh = "refresh", "Compute weights are made from main weights.";
    StepEnd = "step-end", "The host waits for the device at the end of the step (train.sync_each_step).";
    ZeroGrad = "zero-grad", "Gradients are dropped or zeroed after the step.";
    Bucket = "bucket", "Functional collectives merged into a bucket (compile full).";
    Capture = "capture", "CUDA-graph capture scope.";
    Compile = "compile", "Guards, dispatch and graph breaks of compiled code.";
    Offload = "offload", "Data are copied between device and host.";
    Validate = "validate", "Validation forward.";
    ModelCollective = "model-collective", "Activations are exchanged along an axis of the mesh (tensor parallelism); computation waits where it first touches them.";
    RecomputePrefetch = "recompute-prefetch", "Forward hooks of a reentrant recompute prefetch units, which backward frees unused.";
    // Last, because digests of programs depend on the order.
    MuonGather = "muon-gather", "Gather a matrix of which ranks have rows, for Muon (DTensor.full_tensor()).";
}
