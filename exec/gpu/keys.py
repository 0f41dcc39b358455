"""Settings of runs that stages compare."""
NATIVE = ['fsdp.policy="native"']
REGIONS = 'compile.mode="regions"'
CHUNKED = 'train.loss="chunked"'
CAPTURED = 'compile.cuda_graph="full_iteration"'
GATHERS = "fsdp.copy_engine_all_gather=true"
REDUCTIONS = "fsdp.copy_engine_reduce_scatter=true"
# Sends gradients in bf16, the type in which backward computes them, and sums them in float32. FSDP2 with `reduce_dtype` float32
# casts before it sends.
AS_THEY_COME = 'precision.comm_grads="bf16"'
ONE_CHUNK = "train.loss_chunk_tokens=8192"
# The optimizer sums the pieces of a gradient as it reads them, so no reduced gradient is stored.
SUMMED = "fsdp.fuse_reduce_into_optimizer=true"
# Stores no 16-bit copy of the shards (CAST), and frees gradients after the update of their unit (IN_BACKWARD).
CAST = "fsdp.cast_before_all_gather=true"
IN_BACKWARD = "fsdp.optimizer_in_backward=true"
# Casts shards on a stream of their own.
COPY_IN = "fsdp.copy_in_stream=true"
# Gathers the first unit of the next step while the optimizer updates other units.
NEXT_STEP = "fsdp.prefetch_next_step=1"
FUSED = "compile.gemm_epilogue_fusion=true"
POINTWISE = 'train.recompute="pointwise"'
SELECTIVE = 'train.recompute="selective"'
# Compiled, with collectives on copy engines: the base of most comparisons.
FLOATS = [*NATIVE, REGIONS, CHUNKED, GATHERS, REDUCTIONS]
BEST = [*FLOATS, AS_THEY_COME]
FASTEST = [*BEST, FUSED, SUMMED]
# Gathers and reduces the two projections of a layer's experts as separate units.
PROJECTIONS = 'fsdp.units=["layers.*", "layers.*.mlp.experts.gate_up", "layers.*.mlp.experts.down", "tok_embeddings", "norm+output=keep"]'
# Gathers more than one unit ahead, because units of projections are small.
AHEAD = ["fsdp.prefetch_forward=3", "fsdp.prefetch_backward=2"]
