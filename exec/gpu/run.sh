#!/bin/sh
# Runs everything that needs GPUs: checks first, then measurements, and prints a summary at the end. See README.md.
#
#   exec/gpu/run.sh BINARY [STAGE...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# NVLink multicast can make GPUs unusable for other users of a shared machine.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export OUT="${OUT:-gpu-out}"
mkdir -p "$OUT"
exec python3 "$here/stages.py" "$@"
