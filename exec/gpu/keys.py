"""Settings of runs that stages compare."""
NATIVE = ['fsdp.policy="native"']
REGIONS = 'compile.mode="regions"'
CHUNKED = 'train.loss="chunked"'
CAPTURED = 'compile.cuda_graph="full_iteration"'
GATHERS = "fsdp.copy_engine_all_gather=true"
REDUCTIONS = "fsdp.copy_engine_reduce_scatter=true"
# What FSDP2 does with `reduce_dtype` float32: gradients come in bf16 and are summed in float32.
# Copy engines carry them as they come.
AS_THEY_COME = 'precision.comm_grads="bf16"'
ONE_CHUNK = "train.loss_chunk_tokens=8192"
# A gradient's pieces go from the exchange to the optimizer without a sum between them.
SUMMED = "fsdp.fuse_reduce_into_optimizer=true"
# No shard in 16 bits persists, and gradients end with their unit's update.
CAST = "fsdp.cast_before_all_gather=true"
IN_BACKWARD = "fsdp.optimizer_in_backward=true"
FUSED = "compile.gemm_epilogue_fusion=true"
POINTWISE = 'train.recompute="pointwise"'
SELECTIVE = 'train.recompute="selective"'
# Compiled, with collectives on copy engines: the base of most comparisons.
FLOATS = [*NATIVE, REGIONS, CHUNKED, GATHERS, REDUCTIONS]
BEST = [*FLOATS, AS_THEY_COME]
FASTEST = [*BEST, FUSED, SUMMED]
# The two projections of a layer's experts are gathered and reduced one after the other.
PROJECTIONS = 'fsdp.units=["layers.*", "layers.*.mlp.experts.gate_up", "layers.*.mlp.experts.down", "tok_embeddings", "norm+output=keep"]'
