"""Measures matmuls of experts with PyTorch on one GPU.

    python3 exec/gpu/peers/grouped.py [SECONDS]

Each variant runs back to back on random bf16 operands for SECONDS (default 0.3), long enough for the power limit. A line has the model,
the number of experts, the rows of each, the sizes n and k of a matrix, and TFLOP/s by variant. FLOPs are those of the rows that tokens
use. `dense` is one `torch.mm` of all rows, `grouped` is `torch._grouped_mm`, and `batched` is `torch.bmm` (strided batches of cuBLAS),
with equal rows per expert, and with a quarter more for padding. `gradient` is the same for weight gradients. In the second line of a
model, experts have unequal rows, up to 1.5 times the mean; `batched` then pads all experts to the largest.
"""
import json, sys
import torch
from scaled import rate

# Experts, rows of each, and [n, k] of gate and up projection and of down projection.
MODELS = {
    "Qwen3-30B-A3B": (128, 256, [(1536, 2048), (2048, 768)]),
    "a3b-12l-64e": (64, 512, [(1536, 2048), (2048, 768)]),
    "gpt-oss-20b": (32, 512, [(5760, 2880), (2880, 2880)]),
    "Mixtral 8x7B": (8, 1024, [(28_672, 4096), (4096, 14_336)]),
}


def counts(experts, each, skewed):
    """Returns the rows of each expert: equal, or linear from 0.5 to 1.5 times the mean."""
    if not skewed:
        return [each] * experts
    found = [round(each * (0.5 + i / (experts - 1))) for i in range(experts)]
    found[-1] += experts * each - sum(found)
    return found


def variants(rows, n, k):
    total, most, experts = sum(rows), max(rows), len(rows)
    of = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.1
    x, dy, w = of(total, k), of(total, n), of(experts, n, k)
    ends = torch.tensor(rows, device="cuda").cumsum(0).to(torch.int32)
    pad = lambda r: (of(experts, r, k), of(experts, r, n))
    equal, quarter = pad(most), pad(most * 5 // 4)
    yield "dense", lambda: torch.mm(x, w[0].t())
    yield "grouped", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    yield "batched", lambda: torch.bmm(equal[0], w.transpose(1, 2))
    yield "batched, a quarter more", lambda: torch.bmm(quarter[0], w.transpose(1, 2))
    yield "gradient, grouped", lambda: torch._grouped_mm(dy.t(), x, offs=ends)
    yield "gradient, batched", lambda: torch.bmm(equal[1].transpose(1, 2), equal[0])


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    for model, (experts, each, matrices) in MODELS.items():
        for n, k in matrices:
            for skewed in (False, True):
                rows = counts(experts, each, skewed)
                flops = 2 * sum(rows) * n * k
                found = {name: rate(f, flops, seconds) for name, f in variants(rows, n, k)}
                found = {name: r and round(r) for name, r in found.items()}
                print(json.dumps({"model": model, "experts": experts, "rows": each, "skewed": skewed, "n": n, "k": k, "tflops": found}), flush=True)


if __name__ == "__main__":
    main()
