"""Measures elementwise kernels with strided or broadcast operands by element type, for `[[memory]]` tables of class "strided".

    python3 strided.py >> KERNELS.jsonl

Writes rows like those of kernels.py, which profile_tables.py turns into tables. Each call reads another copy of its operands, and all copies together are larger than the L2 cache. Times are microseconds of
device time (CUDA events around a batch of calls), medians of five batches. PyTorch computes several elements per thread and
load only if all operands are dense, so the time of these kernels depends on the number of elements more than on bytes.
"""
import json, statistics
import torch

dev, f32, bf16 = "cuda", torch.float32, torch.bfloat16
heads, dim = 32, 128
width = heads * dim
far = 4 * torch.cuda.get_device_properties(0).L2_cache_size


def timed(calls):
    for call in calls:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    batches = []
    for _ in range(5):
        torch.cuda._sleep(2_000_000)
        begin.record()
        for _ in range(max(1, 24 // len(calls))):
            for call in calls:
                call()
        end.record()
        torch.cuda.synchronize()
        batches.append(begin.elapsed_time(end) * 1e3 / (len(calls) * max(1, 24 // len(calls))))
    return round(statistics.median(batches), 2)


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def case(op, dtype, read, make):
    """Measures calls that `make` returns for one copy of the operands. `read` is the number of bytes that a call reads."""
    one = make()
    result = one()
    copies = max(1, min(64, -(-far // (read + size(result)))))
    us = timed([one] + [make() for _ in range(copies - 1)])
    row = dict(table="memory", cls="strided", name=f"{op} {'bf16' if dtype == bf16 else 'f32'}", read=read, written=size(result), us=us)
    print(json.dumps(row), flush=True)


for tokens in (256, 1024, 4096, 16384):
    n = tokens * width
    for dtype in (bf16, f32):
        item = dtype.itemsize
        x = lambda: torch.randn(tokens, width, device=dev, dtype=dtype)
        # Queries as attention sees them: `[heads, tokens, dim]` in the order of `[tokens, heads, dim]`.
        q = lambda: x().view(tokens, heads, dim).transpose(0, 1)
        row, weight, cos = (torch.randn(*s, device=dev, dtype=dtype) for s in ((tokens, 1), (width,), (tokens, dim)))
        case("mul rows", dtype, n * item + size(row), lambda: (lambda a: lambda: a * row)(x()))
        case("mul weight", dtype, n * item + size(weight), lambda: (lambda a: lambda: a * weight)(x()))
        case("mul rotary", dtype, n * item + size(cos), lambda: (lambda a: lambda: a * cos)(q()))
        case("add", dtype, 2 * n * item, lambda: (lambda a, b: lambda: a + b)(q(), q().contiguous()))
        case("neg", dtype, n * item // 2, lambda: (lambda a: lambda: -a[..., dim // 2 :])(q()))
        case("cat", dtype, n * item, lambda: (lambda a, b: lambda: torch.cat((b, a[..., : dim // 2]), -1))(q(), -q()[..., dim // 2 :]))
        case("copy", dtype, n * item, lambda: (lambda a: lambda: a.contiguous())(q()))
        case("scale", dtype, size(row), lambda: (lambda a: lambda: a.expand(tokens, width) / width)(row.clone()))
    weight, cos = weight.to(bf16), cos.to(bf16)
    case("promoted weight", f32, 4 * n + size(weight), lambda: (lambda a: lambda: a * weight)(x()))
    case("promoted rotary", f32, 4 * n + size(cos), lambda: (lambda a: lambda: a * cos)(q()))
