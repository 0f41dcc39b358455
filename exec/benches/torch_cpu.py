"""Steps of the same model in torch on the processor, for comparison with `shardlab exec` on its CPU device.

    python3 torch_cpu.py HIDDEN LAYERS HEADS KV FFN VOCAB SEQ BATCH THREADS [STEPS]

One process, float32, AdamW (fused), gradients clipped to norm 1; prints the median step in milliseconds.
"""
import sys, time
import torch, torch.nn as nn, torch.nn.functional as F

D, L, H, KV, FF, V, T, B, N = map(int, sys.argv[1:10])
STEPS = int(sys.argv[10]) if len(sys.argv) > 10 else 30
torch.set_num_threads(N)
torch.manual_seed(0)
HD = D // H


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        lin = lambda i, o: nn.Linear(i, o, bias=False)
        s.n1, s.n2 = nn.RMSNorm(D, 1e-5), nn.RMSNorm(D, 1e-5)
        s.q, s.k, s.v, s.o = lin(D, D), lin(D, KV * HD), lin(D, KV * HD), lin(D, D)
        s.w1, s.w3, s.w2 = lin(D, FF), lin(D, FF), lin(FF, D)

    def forward(s, x, cos, sin):
        y = s.n1(x)
        split = lambda z, n: z.view(B, T, n, HD).transpose(1, 2)
        def rope(z):
            a, b = z.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        q, k, v = rope(split(s.q(y), H)), rope(split(s.k(y), KV)), split(s.v(y), KV)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != KV)
        x = x + s.o(a.transpose(1, 2).reshape(B, T, D))
        y = s.n2(x)
        return x + s.w2(F.silu(s.w1(y)) * s.w3(y))


class Model(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb, s.norm, s.head = nn.Embedding(V, D), nn.RMSNorm(D, 1e-5), nn.Linear(D, V, bias=False)
        s.blocks = nn.ModuleList([Block() for _ in range(L)])
        f = 1.0 / 10000.0 ** (torch.arange(0, HD, 2) / HD)
        t = torch.outer(torch.arange(T), f)
        s.register_buffer("cos", t.cos()), s.register_buffer("sin", t.sin())

    def forward(s, ids):
        x = s.emb(ids)
        for b in s.blocks:
            x = b(x, s.cos, s.sin)
        return s.head(s.norm(x))


m = Model()
opt = torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)
ids = torch.randint(0, V, (B, T + 1))
times = []
for _ in range(STEPS):
    t = time.perf_counter()
    loss = F.cross_entropy(m(ids[:, :-1]).view(-1, V), ids[:, 1:].reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step(); opt.zero_grad(set_to_none=True)
    times.append(1e3 * (time.perf_counter() - t))
times = sorted(times[5:])
print(f"{times[len(times) // 2]:.3f}")
