#!/usr/bin/env python3
"""Repeats a golden run with the documents of its tokens: make_documents.py FOLDER EOS

Writes FOLDER/documents.json. Each document ends with token EOS, so every sequence has documents of its own. The mask is the block-causal
one of torchtitan (`get_document_mask_mod`: a document starts after a separator, and with the sequence), given to eager attention as a sum
of scores; `position_ids` start again with each document. The first step repeats the loss with documents that go through the model one by
one."""
import json, sys
from pathlib import Path

import numpy, torch, transformers

STEPS = 12

folder, eos = Path(sys.argv[1]), int(sys.argv[2])
run = json.loads((folder / "reference.json").read_text())
T, B, betas, eps = run["T"], run["B"], run.get("betas", [0.9, 0.95]), run.get("eps", 1e-8)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).train()
text = torch.from_numpy(numpy.fromfile(folder / "tokens.bin", dtype="<u2").astype("int64"))
optimizer = torch.optim.AdamW(model.parameters(), lr=run["lr"], betas=betas, eps=eps, weight_decay=run["wd"])
causal = torch.ones(T, T, dtype=torch.bool).tril()


def documents(tokens):
    """Numbers of the documents and positions in them, for tokens [B, T]."""
    ends = (tokens == eos).long().cumsum(1)
    ids = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    positions = torch.stack([torch.tensor([(row[:i] == row[i]).sum() for i in range(T)]) for row in ids])
    return ids, positions


def one_by_one(tokens, ids):
    """Logits of [B, T] tokens, from a pass for each document."""
    rows = []
    for row, of in zip(tokens, ids):
        parts = [row[of == n][None] for n in of.unique()]
        rows.append(torch.cat([model(input_ids=part).logits[0] for part in parts]))
    return torch.stack(rows)


losses, norms, counts = [], [], []
for step in range(STEPS):
    starts = [(step * B + i) * T % (len(text) - T - 1) for i in range(B)]
    rows = torch.stack([text[s:s + T + 1] for s in starts])
    tokens, labels = rows[:, :-1], rows[:, 1:]
    ids, positions = documents(tokens)
    allowed = (ids[:, :, None] == ids[:, None]) & causal
    mask = torch.zeros(B, T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    if step == 0:
        with torch.no_grad():
            off = (one_by_one(tokens, ids) - logits).abs().max().item()
        print("largest difference from documents one by one:", off)
        assert off < 1e-4
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), run["clip"] or float("inf")).item())
    optimizer.step()
    losses.append(loss.item())
    counts.append((ids[:, -1] + 1).tolist())
final = {name: p.detach().norm().item() for name, p in model.named_parameters()}
out = {"eos": eos, "documents": counts[0], "T": T, "B": B, "steps": STEPS, "lr": run["lr"], "wd": run["wd"], "clip": run["clip"], "losses": losses,
       "grad_norms": norms, "final_norms": final, "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
(folder / "documents.json").write_text(json.dumps(out, indent=1))
print("documents of the first step:", counts[0])
