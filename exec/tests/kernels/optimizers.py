"""Writes optimizers.json: a few steps of optimizers in PyTorch (2.15, CPU).

AdamW with parameter groups is `torch.optim.AdamW`. Optimizers with 8-bit states follow torchao's
formulas (`torchao/optim/{adam,quant_utils}.py`, 0.15), and Lion those of Chen et al. 2023 as
bitsandbytes computes them. Blocks have 256 elements; the last one is shorter.

Run: python3 optimizers.py > optimizers.json
"""

import json

import torch

N, BLOCK, STEPS = 300, 256, 3
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def dynamic_map(signed):
    data = [0.0, 1.0]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
        means = (edges[:-1] + edges[1:]) / 2.0
        data += (10 ** (i - 6) * means).tolist()
        if signed:
            data += (-(10 ** (i - 6)) * means).tolist()
    return torch.tensor(sorted(data))


def rounded(x, table):
    """Rounds the blocks of x to codes, and returns what they stand for."""
    out = []
    for block in x.split(BLOCK):
        scale = block.abs().max().clip(1e-12)
        at = torch.bucketize(block / scale, table, right=True).sub(1).clip(0, 255)
        up = (at + 1).clip(max=255)
        low, high = table[at], table[up]
        code = torch.where(block / scale - low >= (high - low) * 0.5, up, at)
        out.append(table[code] * scale)
    return torch.cat(out)


def adamw(w, g, m, v, step):
    b1, b2 = BETAS
    w = w - LR * DECAY * w
    m, v = m.lerp(g, 1 - b1), v.lerp(g.square(), 1 - b2)
    root = v.sqrt() / (1 - b2**step) ** 0.5 + EPS
    return w - LR * (m / (1 - b1**step)) / root, m, v


def lion(w, g, m, v, step):
    b1, b2 = BETAS
    w = w * (1 - LR * DECAY) - LR * torch.sign(m * b1 + (1 - b1) * g)
    return w, m * b2 + (1 - b2) * g, v


def in_8_bits(rule, w, grads):
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    m = v = torch.zeros(N)
    for step, g in enumerate(grads, 1):
        w, m, v = rule(w, g, m, v, step)
        m, v = rounded(m, signed), rounded(v, unsigned)
    return [x.tolist() for x in ((w, m, v) if rule is adamw else (w, m))]


def groups(w, grads):
    """AdamW on the first 200 weights as they are, and on the others with settings of their own."""
    parts = [torch.nn.Parameter(x.clone()) for x in (w[:200], w[200:])]
    other = {"params": [parts[1]], "weight_decay": 0.0, "lr": LR * 0.1}
    optimizer = torch.optim.AdamW([{"params": [parts[0]]}, other], LR, BETAS, EPS, DECAY)
    for g in grads:
        for p, part in zip(parts, (g[:200], g[200:])):
            p.grad = part.clone()
        optimizer.step()
    return torch.cat(parts).tolist()


torch.manual_seed(0)
weights = torch.randn(N)
grads = [torch.randn(N) * 0.1 for _ in range(STEPS)]
# One block of momenta has its largest magnitude below zero.
for g in grads:
    g[3] = -1.0
result = {
    "weights": weights.tolist(),
    "grads": [g.tolist() for g in grads],
    "groups": groups(weights, grads),
    "adamw_8bit": in_8_bits(adamw, weights, grads),
    "lion_8bit": in_8_bits(lion, weights, grads),
    "signed": dynamic_map(True).tolist(),
    "unsigned": dynamic_map(False).tolist(),
}
print(json.dumps(result))
