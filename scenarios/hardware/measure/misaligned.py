"""Measures what misaligned payloads cost NCCL's all-gather and reduce-scatter.

Prints one JSON object per line: the collective, the element type, the bytes of the full buffer, the excess of each
rank's payload over a multiple of 16 bytes, and the median time in microseconds.

    torchrun --nproc-per-node=4 scenarios/hardware/measure/misaligned.py > misaligned.jsonl

With `NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1`, ranks of one node communicate over the network, which is then the
bottleneck. The variable `SIZES` sets other sizes, in MiB.
"""

import json
import os
import statistics
from datetime import timedelta

import torch
import torch.distributed as dist

RANK = int(os.environ["LOCAL_RANK"])
SIZES = [float(s) for s in os.environ.get("SIZES", "0.25,1,4,16,64,256,1024").split(",")]


def measure(collective, bytes):
    """Returns the median time of one call in microseconds, over rounds of back-to-back calls."""
    for _ in range(3):
        collective()
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls = 10 if bytes <= 1 << 26 else 4
    times = []
    for _ in range(5):
        start.record()
        for _ in range(calls):
            collective()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def main():
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK), timeout=timedelta(seconds=60))
    ranks = dist.get_world_size()
    if RANK == 0:
        print(json.dumps({
            "device": torch.cuda.get_device_name(), "ranks": ranks, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            **{k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
        }))
    for mib in SIZES:
        for dtype, excesses in ((torch.bfloat16, (0, 2, 4, 8)), (torch.float32, (0, 4, 8))):
            size = dtype.itemsize
            aligned = int(mib * 2**20) // (ranks * 16) * 16
            for excess in excesses:
                count = (aligned + excess) // size
                full = torch.zeros(count * ranks, dtype=dtype, device="cuda")
                shard = torch.zeros(count, dtype=dtype, device="cuda")
                for name, collective in (
                    ("all_gather", lambda: dist.all_gather_into_tensor(full, shard)),
                    ("reduce_scatter", lambda: dist.reduce_scatter_tensor(shard, full)),
                ):
                    us = measure(collective, full.nbytes)
                    if RANK == 0:
                        print(json.dumps({
                            "collective": name, "dtype": str(dtype).removeprefix("torch."), "bytes": full.nbytes,
                            "excess": excess, "us": round(us, 2),
                        }), flush=True)
                del full, shard
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
