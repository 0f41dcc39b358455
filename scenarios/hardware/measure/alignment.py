"""Measures what misaligned shapes cost the matmuls of a linear layer under PyTorch.

Prints one JSON object per line: the layer (tokens, in_features, out_features), the element type, the matmul
(forward, dgrad, wgrad), its median time in microseconds and its rate in TFLOP/s. The shapes are those of published
models, with `d` added to one dimension, which is otherwise a multiple of 8.

    python3 scenarios/hardware/measure/alignment.py > alignment.jsonl
"""

import json
import statistics
import sys

import torch

TOKENS = 8192
# Layers as (in_features, out_features), and the dimension to which `d` is added.
LAYERS = [
    (4096, 14336, "out"),
    (4096, 14336, "in"),
    (4096, 128256, "out"),
    (4096, 4096, "out"),
    (4096, 4096, "in"),
    (2048, 50304, "out"),
    (2048, 8192, "out"),
    (2048, 8192, "in"),
]
MOVED = [0, 1, 2, 3, 4, 6, 8]


def measure(matmul, flops):
    """Returns the median time of one call in microseconds, over rounds of back-to-back calls."""
    for _ in range(3):
        matmul()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls = max(3, int(20e-3 / (flops / 600e12)))
    times = []
    for _ in range(5):
        start.record()
        for _ in range(calls):
            matmul()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def main():
    name = torch.cuda.get_device_name()
    print(json.dumps({"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}))
    for dtype in (torch.bfloat16, torch.float32):
        for inputs, outputs, moved in LAYERS:
            if dtype == torch.float32 and outputs > 20000:
                continue
            for d in MOVED:
                k = inputs + (d if moved == "in" else 0)
                n = outputs + (d if moved == "out" else 0)
                x = torch.randn(TOKENS, k, device="cuda", dtype=dtype)
                w = torch.randn(n, k, device="cuda", dtype=dtype) * 0.02
                dy = torch.randn(TOKENS, n, device="cuda", dtype=dtype)
                flops = 2.0 * TOKENS * k * n
                for which, matmul in (
                    ("forward", lambda: x @ w.t()),
                    ("dgrad", lambda: dy @ w),
                    ("wgrad", lambda: dy.t() @ x),
                ):
                    us = measure(matmul, flops)
                    row = {
                        "dtype": str(dtype).removeprefix("torch."),
                        "tokens": TOKENS,
                        "in": k,
                        "out": n,
                        "moved": moved,
                        "d": d,
                        "matmul": which,
                        "us": round(us, 2),
                        "tflops": round(flops / us / 1e6, 1),
                    }
                    print(json.dumps(row))
                    sys.stdout.flush()
                del x, w, dy


if __name__ == "__main__":
    main()
