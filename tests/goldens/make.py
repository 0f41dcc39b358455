#!/usr/bin/env python3
"""Makes a golden run of a Hugging Face model: make.py FOLDER TOKENS

Writes `config.json`, `model.safetensors` and `reference.json` to FOLDER, with torch and transformers in float32 on a CPU. TOKENS are
the tokens of another golden run. It made qwen3-tiny (see README.md)."""
import sys
from pathlib import Path

import torch, transformers

from record import record

T, B, STEPS, LR, WD, BETAS, EPS = 64, 8, 40, 1e-3, 0.1, (0.9, 0.95), 1e-8

folder, tokens = Path(sys.argv[1]), Path(sys.argv[2])
config = transformers.Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=10000.0, attn_implementation="eager")
torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(config).float().train()
with torch.no_grad():
    # With weights of 1, a norm that is not applied, or applied to the wrong head, would not be noticed.
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.add_(0.2 * torch.randn_like(p))
record(model, folder, tokens, T=T, B=B, steps=STEPS, lr=LR, wd=WD, betas=BETAS, eps=EPS, clip=0.0)
