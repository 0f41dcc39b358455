"""Measures 8-bit matmuls of cuBLASLt with PyTorch on one GPU, for the linear layers of 3b and 8b.

    python3 exec/gpu/peers/scaled.py [SECONDS]

Each shape runs back to back on random operands for SECONDS (default 0.3) per variant, long enough for the power limit. A line has
the shape `[m, n, k]` of `[m, k] x [n, k]ᵀ`, the matmul's role in a step, and TFLOP/s by variant: bf16, and 8-bit operands with one scale
per tensor (`tensor`), per row (`row`), or per block of 1x128 and 128x128 (`block`), with the accumulation of tensor cores (`fast`)
or in float32 (`full`). `e5m2` has an e5m2 first operand, as gradients have. `null` marks what PyTorch does not support.
"""
import json, sys, time
import torch

M = 8192
LAYERS = {"3b": (3072, 1024, 8192), "8b": (4096, 1024, 14336)}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def shapes():
    for size, (hidden, kv, ffn) in LAYERS.items():
        for name, n, k in (("q, o", hidden, hidden), ("k, v", kv, hidden), ("gate, up", ffn, hidden), ("down", hidden, ffn)):
            yield size, name, "forward", (M, n, k)
            yield size, name, "input gradient", (M, k, n)
            yield size, name, "weight gradient", (n, k, M)


def rate(f, flops, seconds):
    """Returns the TFLOP/s of back-to-back calls in the second half of `seconds`, or None if the call is not supported."""
    try:
        f()
        torch.cuda.synchronize()
    except Exception:
        return None
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds / 2:
        for _ in range(8): f()
        torch.cuda.synchronize()
        calls += 8
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(calls): f()
    b.record()
    torch.cuda.synchronize()
    return flops * calls / a.elapsed_time(b) / 1e9


def variants(m, n, k):
    x, w = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    scale = torch.ones((), device="cuda")
    x8, w8, x5 = x.to(E4M3), (w * 50).to(E4M3), x.to(E5M2)
    rows, columns = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    scaled = lambda a, sa, sb, fast: torch._scaled_mm(a, w8.t(), scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=fast)
    by_row = torch.ones(k // 128, m, device="cuda").t()
    by_block = torch.ones(k // 128, n // 128, device="cuda")
    yield "bf16", lambda: torch.mm(x, w.t())
    yield "tensor, fast", lambda: scaled(x8, scale, scale, True)
    yield "tensor, full", lambda: scaled(x8, scale, scale, False)
    yield "tensor, full, e5m2", lambda: scaled(x5, scale, scale, False)
    yield "row, fast", lambda: scaled(x8, rows, columns, True)
    yield "row, full", lambda: scaled(x8, rows, columns, False)
    yield "block, full", lambda: scaled(x8, by_row, by_block, False)


def main(seconds):
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda, flush=True)
    for size, name, role, (m, n, k) in shapes():
        found = {v: rate(f, 2 * m * n * k, seconds) for v, f in variants(m, n, k)}
        print(json.dumps({"size": size, "layer": name, "role": role, "shape": [m, n, k], **{v: r and round(r, 1) for v, r in found.items()}}), flush=True)


if __name__ == "__main__": main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.3)
