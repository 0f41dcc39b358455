"""Trains a Hugging Face model for a golden run, and writes its initial weights and its results."""
import json

import numpy, torch, transformers


def train(model, tokens, *, T, B, steps, lr, wd, betas, eps, clip):
    """Trains the parameters that require gradients on B sequences of T tokens per step, and returns the settings, losses and gradient norms.
    Clips gradients to a norm of `clip`; 0 does not clip."""
    text = torch.from_numpy(numpy.fromfile(tokens, dtype="<u2").astype("int64"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=betas, eps=eps, weight_decay=wd)
    losses, norms = [], []
    for step in range(steps):
        starts = [(step * B + i) * T % (len(text) - T - 1) for i in range(B)]
        rows = torch.stack([text[s:s + T + 1] for s in starts])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip or float("inf")).item())
        optimizer.step()
        losses.append(loss.item())
    return {"betas": betas, "eps": eps, "T": T, "B": B, "steps": steps, "lr": lr, "wd": wd, "clip": clip, "losses": losses, "grad_norms": norms}


def record(model, folder, tokens, **settings):
    """Writes `config.json` and `model.safetensors`, calls `train` with the settings, and writes `reference.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    run = train(model, tokens, **settings)
    final = {name: p.detach().norm().item() for name, p in model.named_parameters()}
    run = {"name": folder.name, **run, "final_norms": final, "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    (folder / "reference.json").write_text(json.dumps(run, indent=1))
