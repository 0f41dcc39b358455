#!/bin/sh
# Everything that needs GPUs: correctness first, then figures; a short table last. README.md says what to run where.
#
#   exec/gpu/run.sh BINARY [STAGE...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# NVLink multicast can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export OUT="${OUT:-gpu-out}"
mkdir -p "$OUT"
exec python3 "$here/stages.py" "$@"
