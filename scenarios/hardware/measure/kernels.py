"""Measures kernels, host costs and copies of one GPU with torch, for the tables of a hardware profile.

    python3 kernels.py OUT.jsonl

Writes one JSON object per line: {"table": "gemm" | "attention" | "memory" | "conv" | "host" | "copy" | "device", ...}.
Times are microseconds of device time (CUDA events around a batch of launches on random data), except for `host`: wall-clock
time of the host thread while the GPU is far behind or idle.
"""
import json, sys, time
import torch, torch.nn.functional as F

dev = "cuda"
out = open(sys.argv[1], "w")
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


def emit(**k):
    out.write(json.dumps(k) + "\n")
    out.flush()


def timed(f, target_ms=25.0, least=5, most=200):
    f(); f()
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); f(); b.record(); torch.cuda.synchronize()
    n = int(min(most, max(least, target_ms / max(a.elapsed_time(b), 1e-3))))
    best = []
    for _ in range(2):
        torch.cuda._sleep(2_000_000)
        a.record()
        for _ in range(n):
            f()
        b.record(); torch.cuda.synchronize()
        best.append(a.elapsed_time(b) / n * 1e3)
    return round(sum(best) / len(best), 3)


def mixed(f, g, n):
    """Returns the time of f in microseconds when each call follows g, a memory-bound kernel. Back-to-back matmuls would
    reach the power limit, which they do not do in a training step."""
    def run(both):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)
        a.record()
        for _ in range(n):
            g()
            if both:
                f()
        b.record(); torch.cuda.synchronize()
        return a.elapsed_time(b) / n * 1e3
    run(True)
    return round(sum(run(True) - run(False) for _ in range(2)) / 2, 3)


noise = torch.randn(1 << 27, device=dev, dtype=torch.bfloat16)
sink = torch.empty_like(noise)


def in_step(f):
    """Like `mixed`, with a copy as long as f, between 20 us and 250 us, and enough repetitions to warm up."""
    us = timed(f, 8.0, 3, 40)
    size = int(min(1 << 27, max(1 << 23, us * 1e-6 * 4.2e12 / 4)))
    return mixed(f, lambda: sink[:size].copy_(noise[:size]), int(min(120, max(6, 12e3 / us))))


def gemm():
    bf = torch.bfloat16
    pairs = [(512, 2048), (1024, 1024), (2048, 2048), (3072, 3072), (1024, 3072), (4096, 4096), (2816, 1024), (1024, 2816), (8192, 2048), (2048, 8192),
             (8192, 3072), (3072, 8192), (1024, 4096), (4096, 1024), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672), (1024, 8192)]
    todo = [(m, n, k, bf) for m in (1024, 2048, 4096, 8192, 16384) for n, k in pairs]
    todo += [(m, n, k, bf) for m in (4096, 8192) for n, k in ((128256, 2048), (128256, 3072), (128256, 4096), (32000, 1024), (50304, 768))]
    todo += [(512, 2048, 2048, bf), (512, 8192, 2048, bf), (256, 4096, 4096, bf), (16384, 128256, 2048, bf)]
    todo += [(m, n, k, torch.float32) for m in (1024, 4096) for n, k in ((4096, 4096), (1024, 1024), (3072, 1024), (4096, 1024), (1024, 4096))]
    for m, n, k, dt in todo:
        x = torch.randn(m, k, device=dev, dtype=dt); w = torch.randn(n, k, device=dev, dtype=dt) * 0.02; g = torch.randn(m, n, device=dev, dtype=dt)
        name = "bf16" if dt == bf else "f32"
        emit(table="gemm", dtype=name, role="forward", m=m, n=n, k=k, us=in_step(lambda: torch.mm(x, w.t())))
        emit(table="gemm", dtype=name, role="dgrad", m=m, n=k, k=n, us=in_step(lambda: torch.mm(g, w)))
        emit(table="gemm", dtype=name, role="wgrad", m=n, n=k, k=m, us=in_step(lambda: torch.mm(g.t(), x)))
        del x, w, g


def attention():
    for b, h, kv, t, d, causal, dt in [(4, 16, 8, 2048, 64, True, "bf16"), (2, 32, 8, 4096, 64, True, "bf16"), (4, 32, 8, 4096, 64, True, "bf16"), (1, 32, 8, 4096, 64, True, "bf16"),
                                       (1, 24, 8, 4096, 128, True, "bf16"), (2, 24, 8, 4096, 128, True, "bf16"), (1, 32, 8, 8192, 128, True, "bf16"), (2, 32, 8, 8192, 128, True, "bf16"),
                                       (1, 64, 8, 8192, 128, True, "bf16"), (4, 32, 32, 2048, 128, True, "bf16"), (8, 12, 12, 1024, 64, True, "bf16"), (2, 32, 8, 2048, 128, True, "bf16"),
                                       (1, 32, 8, 16384, 128, True, "bf16"), (8, 16, 16, 512, 64, False, "bf16"), (8, 16, 16, 512, 64, False, "f32"), (8, 32, 8, 1024, 64, True, "bf16")]:
        dtype = torch.bfloat16 if dt == "bf16" else torch.float32
        q = torch.randn(b, t, h, d, device=dev, dtype=dtype).transpose(1, 2).contiguous().requires_grad_()
        k = torch.randn(b, t, kv, d, device=dev, dtype=dtype).transpose(1, 2).contiguous().requires_grad_()
        v = torch.randn(b, t, kv, d, device=dev, dtype=dtype).transpose(1, 2).requires_grad_()
        f = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=h != kv)
        us = in_step(f)
        o = f(); g = torch.randn_like(o)
        def bw():
            torch.autograd.grad(o, (q, k, v), g, retain_graph=True)
        emit(table="attention", dtype=dt, batch=b, heads=h, kv_heads=kv, seq=t, head_dim=d, causal=causal, forward_us=us, backward_us=in_step(bw))


def memory():
    bf = torch.bfloat16
    for mib in (1, 4, 16, 64, 128, 512):
        n = mib * 2**20 // 2
        cols = 2048 if mib < 64 else 8192
        x = torch.randn(n // cols, cols, device=dev, dtype=bf); y = torch.randn_like(x); z = torch.empty_like(x); f32 = torch.empty(n // cols, cols, device=dev)
        B = n * 2
        e = lambda cls, name, r, w, us: emit(table="memory", cls=cls, name=name, read=r, written=w, us=us)
        e("pointwise", "mul", 2 * B, B, timed(lambda: torch.mul(x, y, out=z)))
        e("pointwise", "add", 2 * B, B, timed(lambda: torch.add(x, y, out=z)))
        e("pointwise", "silu", B, B, timed(lambda: F.silu(x)))
        e("pointwise", "gelu", B, B, timed(lambda: F.gelu(x)))
        e("pointwise", "silu_backward", 2 * B, B, timed(lambda: torch.ops.aten.silu_backward(x, y)))
        e("copy", "copy", B, B, timed(lambda: z.copy_(x)))
        e("copy", "cast_up", B, 2 * B, timed(lambda: f32.copy_(x)))
        e("copy", "cast_down", 2 * B, B, timed(lambda: z.copy_(f32)))
        e("fill", "fill", 0, B, timed(lambda: z.zero_()))
        h = x.view(-1, cols // 64, 64)
        a, c = h[..., :32], torch.randn(32, device=dev, dtype=bf)
        e("strided", "rope_mul", B // 2, B // 2, timed(lambda: a * c))
        e("strided", "cat", B, B, timed(lambda: torch.cat((h[..., 32:], h[..., :32]), -1)))
        e("strided", "transpose_copy", B, B, timed(lambda: h.transpose(0, 1).contiguous()))
        w = torch.ones(cols, device=dev, dtype=bf)
        e("norm", "rms_norm", B, B, timed(lambda: F.rms_norm(x, (cols,), w, 1e-5)))
        bias = torch.zeros(cols, device=dev, dtype=bf)
        e("norm", "layer_norm", B, B, timed(lambda: F.layer_norm(x, (cols,), w, bias, 1e-5)))
        r, rs = torch.ops.aten._fused_rms_norm(x, [cols], w, 1e-5)
        e("norm", "rms_norm_backward_input", 2 * B, B, timed(lambda: torch.ops.aten._fused_rms_norm_backward(y, x, [cols], rs, w, [True, False])))
        e("norm", "rms_norm_backward_both", 3 * B, B, timed(lambda: torch.ops.aten._fused_rms_norm_backward(y, x, [cols], rs, w, [True, True])))
        e("column_reduce", "bias_grad", B, cols * 2, timed(lambda: y.sum(0)))
        e("full_reduce", "norm", B, 4, timed(lambda: torch.linalg.vector_norm(x)))
        ps = [torch.empty(n // 8, device=dev, dtype=bf) for _ in range(8)]
        e("multi_copy", "foreach_copy", B, B, timed(lambda: torch._foreach_copy_(ps, list(x.view(-1).split(n // 8)))))
        src32 = [p.float() for p in ps]
        e("multi_copy", "foreach_cast_down", 2 * B, B, timed(lambda: torch._foreach_copy_(ps, src32)))
        gg = [p.view(-1, 1024) for p in ps]; oo = torch.empty(4, n // 4, device=dev)
        if gg[0].shape[0] % 4 == 0:
            e("multi_copy", "chunk_cat", B, 2 * B, timed(lambda: torch._chunk_cat(gg, dim=0, num_chunks=4, out=oo)))
        flat = x.view(4, -1); outs = [torch.empty(4, n // 32, device=dev, dtype=bf) for _ in range(8)]
        e("multi_copy", "split_with_sizes_copy", B, B, timed(lambda: torch.split_with_sizes_copy(flat, [n // 32] * 8, dim=1, out=outs)))
        m = n // 4
        p4 = [torch.zeros(m, device=dev) for _ in range(4)]
        st = [torch.tensor(1.0, device=dev) for _ in p4]
        pp, gr, e1, e2 = p4, [torch.randn(m, device=dev) for _ in p4], [torch.zeros(m, device=dev) for _ in p4], [torch.zeros(m, device=dev) for _ in p4]
        e("optimizer", "fused_adamw", 16 * n, 12 * n, timed(lambda: torch._fused_adamw_(pp, gr, e1, e2, [], st, lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)))
        del p4, pp, gr, e1, e2, x, y, z, f32
    for rows, V in ((2048, 32000), (8192, 32000), (4096, 128256), (8192, 128256)):
        l = torch.randn(rows, V, device=dev); B = rows * V * 4
        emit(table="memory", cls="softmax", name="log_softmax", read=B, written=B, us=timed(lambda: F.log_softmax(l, -1)))
        o = F.log_softmax(l, -1); g = torch.randn_like(l)
        emit(table="memory", cls="softmax", name="log_softmax_backward", read=2 * B, written=B, us=timed(lambda: torch.ops.aten._log_softmax_backward_data(g, o, -1, torch.float32)))
        y = torch.randint(0, V, (rows,), device=dev)
        emit(table="memory", cls="fill", name="nll_loss_backward", read=0, written=B, us=timed(lambda: torch.ops.aten.nll_loss_backward(torch.ones((), device=dev), o, y, None, 1, -100, torch.tensor(float(rows), device=dev))))
        del l, o, g
    for V, d, rows in ((32000, 1024, 8192), (128256, 2048, 8192), (128256, 4096, 8192)):
        W = torch.randn(V, d, device=dev, dtype=bf); i = torch.randint(0, V, (rows,), device=dev); g = torch.randn(rows, d, device=dev, dtype=bf)
        emit(table="memory", cls="embedding", name="embedding", read=rows * d * 2, written=rows * d * 2, us=timed(lambda: F.embedding(i, W)))
        emit(table="memory", cls="embedding_grad", name="embedding_backward", read=rows * d * 2, written=V * d * 2, us=timed(lambda: torch.ops.aten.embedding_dense_backward(g, i, V, -1, False)))
        del W


def conv():
    for n, c, hw, dt in ((16, 64, 64, torch.float32), (16, 64, 64, torch.bfloat16), (32, 128, 56, torch.bfloat16)):
        x = torch.randn(n, c, hw, hw, device=dev, dtype=dt, requires_grad=True); w = torch.randn(c, c, 3, 3, device=dev, dtype=dt, requires_grad=True)
        us = timed(lambda: F.conv2d(x, w, padding=1))
        y = F.conv2d(x, w, padding=1); g = torch.randn_like(y)
        emit(table="conv", dtype="f32" if dt == torch.float32 else "bf16", images=n, channels=c, height=hw, width=hw, kernel=3, forward_us=us,
             dgrad_us=timed(lambda: torch.ops.aten.convolution_backward(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])),
             wgrad_us=timed(lambda: torch.ops.aten.convolution_backward(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])))


def wall(f, n=2000):
    for _ in range(50):
        f()
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(n // 5):
            f()
        best = min(best, (time.perf_counter() - t) / (n // 5))
        torch.cuda.synchronize()
    return round(best * 1e6, 3)


def host():
    a = torch.randn(64, 64, device=dev, dtype=torch.bfloat16); b = torch.randn(64, 64, device=dev, dtype=torch.bfloat16)
    g = lambda **k: emit(table="host", **k)
    g(name="mul_no_grad", us=wall(lambda: torch.mul(a, b)))
    g(name="mm_no_grad", us=wall(lambda: torch.mm(a, b)))
    ar = a.clone().requires_grad_()
    g(name="mul_grad", us=wall(lambda: torch.mul(ar, b)))
    g(name="linear_grad", us=wall(lambda: F.linear(ar, ar)))
    g(name="view", us=wall(lambda: ar.view(32, 128)))
    lin = torch.nn.Linear(64, 64, device=dev, dtype=torch.bfloat16)
    g(name="module_linear_grad", us=wall(lambda: lin(a)))
    g(name="empty_4k", us=wall(lambda: torch.empty(4096, device=dev)))
    g(name="empty_64m", us=wall(lambda: torch.empty(64 << 20, device=dev, dtype=torch.uint8)))
    ev = torch.cuda.Event(); s = torch.cuda.Stream()
    g(name="event_record", us=wall(lambda: ev.record()))
    g(name="stream_wait", us=wall(lambda: s.wait_event(ev)))
    depth = 100
    def chain(x):
        for _ in range(depth):
            x = x * b
        return x
    def fwd_bwd():
        y = chain(ar)
        t = time.perf_counter()
        y.backward(a)
        return time.perf_counter() - t
    for _ in range(5):
        fwd_bwd(); torch.cuda.synchronize()
    ts = []
    for _ in range(20):
        torch.cuda.synchronize(); ts.append(fwd_bwd())
    g(name="autograd_mul_backward", us=round(sorted(ts)[10] / depth * 1e6, 3))
    def lchain(x):
        for _ in range(depth):
            x = lin(x)
        return x
    def lb():
        y = lchain(ar); t = time.perf_counter(); y.backward(a); return time.perf_counter() - t
    for _ in range(5):
        lb(); torch.cuda.synchronize()
    ts = []
    for _ in range(20):
        torch.cuda.synchronize(); ts.append(lb())
    g(name="autograd_linear_backward_3_kernels", us=round(sorted(ts)[10] / depth * 1e6, 3))
    try:
        def f2(x, y):
            return torch.nn.functional.silu(x * y) + x
        c = torch.compile(f2)
        c(a, b)
        g(name="compiled_call_1_kernel_no_grad", us=wall(lambda: c(a, b)))
        c(ar, b)
        g(name="compiled_call_1_kernel_grad", us=wall(lambda: c(ar, b)))
        def f8(x, y):
            for _ in range(8):
                x = torch.mm(x, y)
            return x
        c8 = torch.compile(f8); c8(a, b)
        g(name="compiled_call_8_mm_no_grad", us=wall(lambda: c8(a, b)))
        def br(x, y):
            x = torch.nn.functional.silu(x * y)
            torch._dynamo.graph_break()
            return x + y
        cb = torch.compile(br); cb(a, b)
        g(name="compiled_call_one_break_no_grad", us=wall(lambda: cb(a, b)))
    except Exception as e:  # torch.compile may not work on this machine
        print("compile failed:", repr(e)[:300])
    gr = torch.cuda.CUDAGraph()
    sx = torch.randn(64, 64, device=dev)
    with torch.cuda.graph(gr):
        yy = sx
        for _ in range(100):
            yy = yy * 1.0001
    g(name="graph_replay_100_nodes_host", us=wall(lambda: gr.replay(), 200))
    g(name="graph_node_device", us=round(timed(lambda: gr.replay()) / 100, 3))
    z = torch.randn(64, 64, device=dev)
    def many():
        for _ in range(100):
            torch.mul(z, 1.0001, out=z)
    torch.cuda.synchronize()
    a0, b0 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000); a0.record(); many(); b0.record(); torch.cuda.synchronize()
    g(name="small_kernel_device_queued", us=round(a0.elapsed_time(b0) * 10, 3))


def copies():
    for mib in (1, 16, 256):
        d = torch.empty(mib << 20, device=dev, dtype=torch.uint8); h = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
        emit(table="copy", kind="h2d", bytes=mib << 20, us=timed(lambda: d.copy_(h, non_blocking=True)))
        emit(table="copy", kind="d2h", bytes=mib << 20, us=timed(lambda: h.copy_(d, non_blocking=True)))


p = torch.cuda.get_device_properties(0)
free, total = torch.cuda.mem_get_info()
emit(table="device", name=p.name, sms=p.multi_processor_count, total=total, used_by_context=total - free, torch=torch.__version__, cudnn=torch.backends.cudnn.version())
for part in (gemm, attention, memory, conv, host, copies):
    t = time.time()
    try:
        part()
    except Exception as e:
        import traceback; traceback.print_exc()
    print(part.__name__, "done in", round(time.time() - t, 1), "s", flush=True)
