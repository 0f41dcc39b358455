"""Writes muon.json: a few steps of torch.optim.Muon (PyTorch 2.15, CPU) on matrices that are wide, tall
and square.

Run: python3 muon.py > muon.json
"""

import json

import torch

SHAPES, STEPS = [(12, 20), (20, 12), (16, 16)], 3
LR, DECAY, MOMENTUM = 1e-2, 0.1, 0.9

torch.manual_seed(0)
out = {"shapes": SHAPES, "lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "runs": {}}
weights = [torch.randn(s) for s in SHAPES]
grads = [[torch.randn(s) * 0.1 for s in SHAPES] for _ in range(STEPS)]


def flat(tensors):
    return [float(f"{x:.8g}") for x in torch.cat([t.flatten() for t in tensors]).tolist()]


out["weights"] = flat(weights)
out["grads"] = [flat(g) for g in grads]
for adjust in ("original", "match_rms_adamw"):
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.Muon(
        params, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn=adjust
    )
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        optimizer.step()
    states = [optimizer.state[p]["momentum_buffer"] for p in params]
    out["runs"][adjust] = [flat([p.detach() for p in params]), flat(states)]
print(json.dumps(out))
