"""Measures the library kernels of running transformer layers with torch's profiler: forward and backward of a few blocks and
the head, one GPU, no communication. Matrix products and attention are slower or faster there than alone in a loop (power,
caches), so these rows come first in a profile.

    python3 layer.py OUT.jsonl
"""
import json, sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile


class RMSNorm(nn.Module):
    def __init__(s, d): super().__init__(); s.weight = nn.Parameter(torch.ones(d))
    def forward(s, x): return F.rms_norm(x, (x.shape[-1],), s.weight, 1e-5)


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(s, d, h, kv, ff):
        super().__init__()
        s.h, s.kv, s.hd = h, kv, d // h
        lin = lambda i, o: nn.Linear(i, o, bias=False)
        s.n1, s.n2 = RMSNorm(d), RMSNorm(d)
        s.q, s.k, s.v, s.o = lin(d, d), lin(d, kv * s.hd), lin(d, kv * s.hd), lin(d, d)
        s.w1, s.w3, s.w2 = lin(d, ff), lin(d, ff), lin(ff, d)
    def forward(s, x, cos, sin):
        b, t, _ = x.shape
        y = s.n1(x)
        split = lambda z, n: z.view(b, t, n, s.hd).transpose(1, 2)
        q, k, v = rope(split(s.q(y), s.h), cos, sin), rope(split(s.k(y), s.kv), cos, sin), split(s.v(y), s.kv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.h != s.kv)
        x = x + s.o(a.transpose(1, 2).reshape(b, t, -1))
        y = s.n2(x)
        return x + s.w2(F.silu(s.w1(y)) * s.w3(y))


class Model(nn.Module):
    def __init__(s, d, layers, h, kv, ff, vocab):
        super().__init__()
        s.tok = nn.Embedding(vocab, d); s.layers = nn.ModuleList(Block(d, h, kv, ff) for _ in range(layers))
        s.norm, s.out, s.hd = RMSNorm(d), nn.Linear(d, vocab, bias=False), d // h
    def forward(s, ids):
        t = ids.shape[1]
        angle = torch.outer(torch.arange(t, device=ids.device).float(), 1 / 5e5 ** (torch.arange(0, s.hd, 2, device=ids.device).float() / s.hd))
        x = s.tok(ids); cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for l in s.layers: x = l(x, cos, sin)
        return s.out(s.norm(x))


# width, blocks measured, heads, kv heads, ffn, vocabulary; samples x tokens
CASES = [((2048, 4, 32, 8, 8192, 128256), [(2, 4096), (1, 2048), (4, 4096)]), ((3072, 4, 24, 8, 8192, 128256), [(1, 4096), (2, 4096)]),
         ((4096, 3, 32, 8, 14336, 128256), [(1, 8192), (1, 4096)]), ((1024, 4, 16, 8, 2816, 32000), [(4, 2048)]), ((2560, 4, 20, 4, 6912, 50304), [(2, 4096)])]
out = open(sys.argv[1], "w")
for shape, batches in CASES:
    for b, t in batches:
        vocab = shape[5]
        with torch.device("cuda"):
            m = Model(*shape).to(torch.bfloat16)
        for p in m.parameters():
            if p.dim() > 1: nn.init.normal_(p, 0, 0.02)
        def step():
            d = torch.randint(0, vocab, (b, t + 1), device="cuda")
            F.cross_entropy(m(d[:, :-1]).view(-1, vocab).float(), d[:, 1:].reshape(-1)).backward(); m.zero_grad(set_to_none=True)
        for _ in range(8): step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], record_shapes=True) as prof:
            for _ in range(4): step()
            torch.cuda.synchronize()
        for e in prof.key_averages(group_by_input_shape=True):
            us = e.self_device_time_total / e.count
            if e.key == "aten::mm" and us > 0:
                (rows, k), (_, n) = e.input_shapes[:2]
                out.write(json.dumps(dict(table="gemm", dtype="bf16", m=rows, n=n, k=k, us=round(us, 2), count=e.count)) + "\n")
            for op, key in (("aten::_cudnn_attention_forward", "forward_us"), ("aten::_cudnn_attention_backward", "backward_us")):
                if e.key == op and us > 0:
                    out.write(json.dumps(dict(table="attention", dtype="bf16", batch=b, heads=shape[2], kv_heads=shape[3], seq=t, head_dim=shape[0] // shape[2], causal=True, **{key: round(us, 2)})) + "\n")
        out.flush(); del m; torch.cuda.empty_cache()
