"""Measures fused attention by backend, and the rates that a GPU sustains at its power limit.

Prints one JSON object per line. `attention` has the backend, shape and direction, the median time in
microseconds of back-to-back calls, and the rate in TFLOP/s (causal attention counts half of the scores).
`sustained` has the rate over the last third of SECONDS of back-to-back GEMMs of one transformer block.

    python3 scenarios/hardware/measure/attention_backends.py [SECONDS] > attention.jsonl
"""

import json
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# (batch, heads, sequence, head size)
SHAPES = [
    (batch, 2048 // head, seq, head)
    for head in (64, 128)
    for batch, seq in ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768))
]


def timed(call, seconds=0.15):
    """Returns the median time of one call in microseconds, over five rounds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(3, int(seconds / 5 / (time.perf_counter() - begin)))
    times = []
    for _ in range(5):
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def attention():
    for batch, heads, seq, head in SHAPES:
        q, k, v = (
            torch.randn(batch, heads, seq, head, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        flops = 4 * batch * heads * seq * seq * head / 2
        for name, backend in BACKENDS.items():
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
                grad = torch.randn_like(out)
                forward = timed(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
                backward = timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
            for direction, us, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
                print(
                    json.dumps(
                        {
                            "kind": "attention",
                            "backend": name,
                            "shape": [batch, heads, seq, head],
                            "direction": direction,
                            "us": round(us, 2),
                            "tflops": round(work / us / 1e6, 1),
                        }
                    ),
                    flush=True,
                )


def sustained(seconds):
    tokens = 8192
    for hidden, ffn in ((4096, 14336), (2048, 8192)):
        pairs = [
            (
                torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16),
                torch.randn(inner, outer, device="cuda", dtype=torch.bfloat16),
            )
            for inner, outer in ((hidden, hidden), (hidden, ffn), (ffn, hidden))
        ]
        work = sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in pairs)
        rates = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(50):
                for a, b in pairs:
                    torch.mm(a, b)
            end.record()
            end.synchronize()
            rates.append(50 * work / start.elapsed_time(end) / 1e9)
        last = rates[-max(1, len(rates) // 3):]
        print(
            json.dumps(
                {
                    "kind": "sustained",
                    "hidden": hidden,
                    "ffn": ffn,
                    "first_tflops": round(rates[0], 1),
                    "tflops": round(statistics.median(last), 1),
                }
            ),
            flush=True,
        )


def main():
    device = torch.cuda.get_device_name()
    print(json.dumps({"kind": "machine", "device": device, "torch": torch.__version__}), flush=True)
    attention()
    sustained(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)


if __name__ == "__main__":
    main()
