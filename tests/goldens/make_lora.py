#!/usr/bin/env python3
"""Makes golden runs of LoRA with PEFT: make_lora.py FOLDER TOKENS [--targets NAME,...] [--rslora] [--dora] [--save NAME,...] [--more JSON] [--lr LR]

Writes the model (`config.json`, `model.safetensors`), its initial adapters (`adapter_config.json`, `adapter_model.safetensors`) and
`reference.json` to FOLDER, with torch, transformers and peft in float32 on a CPU. TOKENS are the tokens of another golden run (see
README.md)."""
import argparse, json
from pathlib import Path

import peft, torch, transformers
from record import train

T, B, STEPS, LR, WD, BETAS, EPS, CLIP = 48, 4, 12, 3e-3, 0.1, (0.9, 0.95), 1e-8, 1.0

arguments = argparse.ArgumentParser()
arguments.add_argument("folder", type=Path)
arguments.add_argument("tokens", type=Path)
arguments.add_argument("--targets", default="all-linear")
arguments.add_argument("--rslora", action="store_true")
arguments.add_argument("--dora", action="store_true")
arguments.add_argument("--save", help="modules that are trained in full next to the adapters")
arguments.add_argument("--more", type=json.loads, default={}, help="more arguments of LoraConfig, as JSON")
arguments.add_argument("--lr", type=float, default=LR)
given = arguments.parse_args()
folder = given.folder
targets = given.targets if given.targets == "all-linear" else given.targets.split(",")

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, attn_implementation="eager")
model = transformers.LlamaForCausalLM(config).float()
with torch.no_grad():
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(0.1 * torch.randn_like(p))
        else:
            # Weights of a trained model are larger than initial ones. With a small base, errors in the scale of adapters would be hidden.
            p.mul_(2.0)
folder.mkdir(parents=True, exist_ok=True)
model.save_pretrained(folder)
(folder / "generation_config.json").unlink(missing_ok=True)
# `init_lora_weights=False` makes B random: with zeros, A would have no gradient in the first step.
lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, use_rslora=given.rslora, use_dora=given.dora, modules_to_save=given.save and given.save.split(","), init_lora_weights=False, task_type="CAUSAL_LM", **given.more)
model = peft.get_peft_model(model, lora).train()
with torch.no_grad():
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.mul_(0.1)
model.save_pretrained(folder)
(folder / "README.md").unlink(missing_ok=True)
run = train(model, given.tokens, T=T, B=B, steps=STEPS, lr=given.lr, wd=WD, betas=BETAS, eps=EPS, clip=CLIP)
plain = lambda name: name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save", "").replace(".default", "")
final = {plain(name): p.detach().norm().item() for name, p in model.named_parameters() if ".original_module" not in name}
count = {"total": sum(p.numel() for p in model.parameters()), "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad)}
run = {"name": folder.name, **run, "final_norms": final, "parameters": count,
       "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}}
(folder / "reference.json").write_text(json.dumps(run, indent=1))
