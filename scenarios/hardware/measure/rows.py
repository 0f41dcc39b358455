"""Measures kernels whose time depends on the length of rows: softmax, and concatenations whose rows do not begin at multiples of 16 bytes.

    python3 rows.py >> ROWS.jsonl

Each line has the operation, its element type, the length of the rows, the bytes that a call reads and writes, and microseconds of device time (CUDA
events around a batch of calls, the median of five batches). The operands of a call are larger than the L2 cache. `index_put`
adds rows of gradients to the biases of experts, as the backward of `bias[experts]` does.
"""
import json, statistics
import torch

dev, f32, bf16 = "cuda", torch.float32, torch.bfloat16
aten = torch.ops.aten


def timed(call):
    call(), call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    batches = []
    for _ in range(5):
        torch.cuda._sleep(1_000_000)
        begin.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        batches.append(begin.elapsed_time(end) * 1e3 / 4)
    return round(statistics.median(batches), 2)


def line(op, dtype, cols, moved, us):
    print(json.dumps(dict(op=op, dtype="bf16" if dtype == bf16 else "f32", cols=cols, bytes=moved, us=us)), flush=True)


for dtype in (f32, bf16):
    size = dtype.itemsize
    for cols in (512, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 8193, 32064, 32001, 49152, 49155, 50257, 128256, 128167, 151936):
        rows = max(1, (1 << 28) // cols)
        n = rows * cols
        x = torch.randn(rows, cols, device=dev, dtype=dtype)
        g = torch.randn_like(x)
        product = timed(lambda: torch.mul(x, g))
        for op, forward, backward in (("softmax", aten._softmax, aten._softmax_backward_data), ("log_softmax", aten._log_softmax, aten._log_softmax_backward_data)):
            if op == "log_softmax" and dtype == bf16:
                continue
            y = forward(x, -1, False)
            line(op, dtype, cols, 2 * n * size, timed(lambda: forward(x, -1, False)))
            us = timed(lambda: backward(g, y, -1, dtype))
            # The backward of a softmax multiplies in a kernel of its own.
            line(op + "_backward", dtype, cols, 3 * n * size, round(us - product, 2) if op == "softmax" else us)
        line("max", dtype, cols, n * size, timed(lambda: x.max(-1, keepdim=True)))
        line("row_sum", dtype, cols, n * size, timed(lambda: x.sum(-1, keepdim=True)))
        if cols < 10000:
            one = torch.randn(rows, 1, device=dev, dtype=dtype)
            narrow = x[:, : cols - 1].contiguous() if cols % 8 else x
            line("cat", dtype, narrow.shape[1] + 1, 2 * n * size, timed(lambda: torch.cat((narrow, one), -1)))
            line("cat aligned", dtype, 2 * cols, 4 * n * size, timed(lambda: torch.cat((x, g), -1)))
            line("sub rows", dtype, cols, 2 * n * size, timed(lambda: x - one))
            line("scale slice", dtype, cols, 2 * n * size, timed(lambda: x[:, : cols - 1] * 0.5))
            line("copy slice", dtype, cols, 2 * n * size, timed(lambda: x[:, : cols - 1].contiguous()))
            half = torch.randn(rows // 64, cols, device=dev, dtype=dtype)
            line("add mask", dtype, cols, 2 * n * size, timed(lambda: x[: rows // 64 * 64].view(64, rows // 64, cols) + half))
        del x, g
for experts, width, routed in ((32, 5760, 16384), (32, 2880, 16384), (32, 5760, 65536), (128, 2880, 16384)):
    for order in ("sorted", "random"):
        index = torch.randint(0, experts, (routed,), device=dev)
        index = index.sort().values if order == "sorted" else index
        values, bias = torch.randn(routed, width, device=dev, dtype=bf16), torch.zeros(experts, width, device=dev, dtype=bf16)
        line(f"index_put {order}", bf16, experts, 2 * routed * width, timed(lambda: aten._index_put_impl_(bias, [index], values, True, True)))
