#!/usr/bin/env python3
"""Repeats a golden run with packed sequences: make_packed.py FOLDER LENGTHS

Writes FOLDER/packed.json. LENGTHS (such as 10,23,5) repeat until a sequence is full. Runs the model of FOLDER on each document
separately, which is equivalent to a document mask with positions that restart, but needs no code for masks. Compares the logits with
those of transformers for whole sequences with `position_ids`, from which it derives the mask (GPT-2 is given the mask). Llama 4 counts the
positions that scale queries from the start of the sequence, so its sequences go through the model as a whole, without a cache:
transformers makes no such mask with one."""
import json, sys
from pathlib import Path

import numpy, torch, transformers

STEPS = 12

folder, lengths = Path(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")]
run = json.loads((folder / "reference.json").read_text())
T, B, betas, eps = run["T"], run["B"], run.get("betas", [0.9, 0.95]), run.get("eps", 1e-8)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).train()
text = torch.from_numpy(numpy.fromfile(folder / "tokens.bin", dtype="<u2").astype("int64"))
optimizer = torch.optim.AdamW(model.parameters(), lr=run["lr"], betas=betas, eps=eps, weight_decay=run["wd"])
spans, start = [], 0
while start < T:
    end = min(start + lengths[len(spans) % len(lengths)], T)
    spans.append((start, end))
    start = end
positions = torch.cat([torch.arange(b - a) for a, b in spans])
ids = torch.cat([torch.full((b - a,), n) for n, (a, b) in enumerate(spans)])
allowed = (ids[:, None] == ids[None]) & torch.ones(T, T, dtype=torch.bool).tril()
mask = torch.zeros(T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None] if model.config.model_type == "gpt2" else None
whole = model.config.model_type == "llama4_text"
packed_logits = lambda rows: torch.cat([model(input_ids=row[None, :-1], position_ids=positions[None], attention_mask=mask, use_cache=False).logits for row in rows])
losses, norms = [], []
for step in range(STEPS):
    starts = [(step * B + i) * T % (len(text) - T - 1) for i in range(B)]
    rows = torch.stack([text[s:s + T + 1] for s in starts])
    logits = packed_logits(rows) if whole else torch.cat([model(input_ids=rows[:, a:b]).logits for a, b in spans], 1)
    if step == 0 and not whole:
        with torch.no_grad():
            off = (packed_logits(rows) - logits).abs().max().item()
        print("largest difference from packed sequences of transformers:", off)
        assert off < 1e-4
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), run["clip"] or float("inf")).item())
    optimizer.step()
    losses.append(loss.item())
final = {name: p.detach().norm().item() for name, p in model.named_parameters()}
out = {"lengths": lengths, "T": T, "B": B, "steps": STEPS, "lr": run["lr"], "wd": run["wd"], "clip": run["clip"], "losses": losses,
       "grad_norms": norms, "final_norms": final, "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
(folder / "packed.json").write_text(json.dumps(out, indent=1))
