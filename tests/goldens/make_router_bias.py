#!/usr/bin/env python3
"""Makes a golden run that moves the biases of routers: make_router_bias.py FOLDER

FOLDER is another golden run, of DeepSeek-V3's type. It gets `router_bias.json`: the same model and settings, with the update of torchtitan's
`load_balance_coeff` before each step of the optimizer, by torch and transformers in float32 on a CPU. It has the choices of each expert
and the biases after each step."""
import json, sys
from pathlib import Path

import torch, transformers

import record

SPEED = 0.01

folder = Path(sys.argv[1])
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
before = json.loads((folder / "reference.json").read_text())
model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().train()
gates = {name: m for name, m in model.named_modules() if hasattr(m, "e_score_correction_bias")}
counts = {}
for name, gate in gates.items():
    def count(gate, _, chosen, name=name):
        counts[name] = torch.bincount(chosen[2].flatten(), minlength=len(gate.e_score_correction_bias)).float()
    gate.register_forward_hook(count)

history = {name: {"counts": [], "biases": []} for name in gates}


def update(*_):
    for name, gate in gates.items():
        delta = SPEED * torch.sign(counts[name].mean() - counts[name])
        gate.e_score_correction_bias.add_(delta - delta.mean())
        history[name]["counts"].append(counts[name].int().tolist())
        history[name]["biases"].append(gate.e_score_correction_bias.tolist())


class AdamW(torch.optim.AdamW):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_step_pre_hook(update)


torch.optim.AdamW = AdamW
settings = {key: before[key] for key in ["T", "B", "steps", "lr", "wd", "clip"]}
betas, eps = before.get("betas", (0.9, 0.95)), before.get("eps", 1e-8)
run = record.train(model, folder / "tokens.bin", betas=betas, eps=eps, **settings)
state = [*model.named_parameters(), *((f"{name}.e_score_correction_bias", g.e_score_correction_bias) for name, g in gates.items())]
final = {name: p.detach().norm().item() for name, p in state}
run = {"name": folder.name, **run, "speed": SPEED, "final_norms": final, "routers": history,
       "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
(folder / "router_bias.json").write_text(json.dumps(run, indent=1))
