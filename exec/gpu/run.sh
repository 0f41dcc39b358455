#!/bin/sh
# Everything that needs GPUs: correctness first, then figures; a short table last.
#
#   exec/gpu/run.sh BINARY [STAGE...]
#
# BINARY is a release build of shardlab. Stages: goldens small bits delays sanitize checkpoint band calibrate speed fidelity;
# without any, all of them. Each takes minutes at most. OUT (default: gpu-out) takes logs and tables. Exit status 1 if anything
# is wrong. GPUS (default: all that nvidia-smi lists) says how many are used, ROWS (1b,3b,8b) and PEERS=0 narrow the speed stage, PROFILE is
# the hardware profile of the fidelity stage, PEER_PYTHONPATH says where megatron_fsdp lies.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# NVLink multicast can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export OUT="${OUT:-gpu-out}"
mkdir -p "$OUT"
exec python3 "$here/stages.py" "$@"
