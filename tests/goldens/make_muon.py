#!/usr/bin/env python3
"""Makes golden runs with Muon: make_muon.py FOLDER

FOLDER is another golden run. Writes `muon.json` there: a run of the same model with torch.optim.Muon (matrices of blocks) and AdamW
(everything else), with torch and transformers in float32 on a CPU."""
import json, sys
from pathlib import Path

import numpy, torch, transformers

STEPS, LR, WD, BETAS, EPS, CLIP, MOMENTUM, ADJUST = 12, 1e-3, 0.1, (0.9, 0.95), 1e-8, 1.0, 0.9, "match_rms_adamw"

folder = Path(sys.argv[1])
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
before = json.loads((folder / "reference.json").read_text())
T, B = before["T"], before["B"]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().train()
text = torch.from_numpy(numpy.fromfile(folder / "tokens.bin", dtype="<u2").astype("int64"))
hidden = {name for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name}
params = [[p for name, p in model.named_parameters() if (name in hidden) == of] for of in (True, False)]
optimizers = [
    torch.optim.Muon(params[0], lr=LR, weight_decay=WD, momentum=MOMENTUM, adjust_lr_fn=ADJUST),
    torch.optim.AdamW(params[1], lr=LR, betas=BETAS, eps=EPS, weight_decay=WD),
]
losses, norms = [], []
for step in range(STEPS):
    starts = [(step * B + i) * T % (len(text) - T - 1) for i in range(B)]
    rows = torch.stack([text[s:s + T + 1] for s in starts])
    logits = model(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
    model.zero_grad()
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
final = {name: p.detach().norm().item() for name, p in model.named_parameters()}
run = {"name": folder.name, "betas": BETAS, "eps": EPS, "T": T, "B": B, "steps": STEPS, "lr": LR, "wd": WD, "clip": CLIP, "momentum": MOMENTUM,
       "adjust_lr_fn": ADJUST, "losses": losses, "grad_norms": norms, "final_norms": final,
       "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
(folder / "muon.json").write_text(json.dumps(run, indent=1))
