#!/usr/bin/env python3
"""Makes a golden run of a small model of a given type, or of one with scaled rotary frequencies: make_type.py NAME FOLDER TOKENS

Writes `config.json`, `model.safetensors` and `reference.json` to FOLDER, with torch and transformers in float32 on a CPU. TOKENS are
the tokens of another golden run (see README.md)."""
import sys
from pathlib import Path

import torch, transformers

from record import record

T, B, STEPS, LR, WD, BETAS, EPS, CLIP = 48, 4, 12, 1e-3, 0.1, (0.9, 0.95), 1e-8, 1.0
DROPOUT = dict(activation_dropout=0.0, layerdrop=0.0)
LLAMA = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
TYPES = {
    "biogpt": dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=66,
                   pad_token_id=None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **DROPOUT),
    "bitnet": dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                   max_position_embeddings=64, bos_token_id=None, eos_token_id=None),
    "flint": dict(vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
                  max_position_embeddings=64, sliding_window=20, moe_intermediate_size=24, shared_expert_intermediate_size=32, num_experts=6,
                  num_experts_per_tok=2, router_aux_loss_coef=0.0),
    "granite_swa": dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                        max_position_embeddings=64, sliding_window=20, embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.3,
                        attention_multiplier=0.1, bos_token_id=None, eos_token_id=None),
    # A chunk ends within the sequence, as do steps of the temperature of attention. Frequencies of one wavelength and more are divided.
    "llama4_text": dict(vocab_size=256, hidden_size=48, intermediate_size=32, intermediate_size_mlp=64, num_hidden_layers=4, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, num_local_experts=4, num_experts_per_tok=1,
                        interleave_moe_layer_step=2, no_rope_layers=[1, 0, 1, 1], attention_chunk_size=20, floor_scale=10, attn_scale=0.3,
                        initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None, rope_parameters=dict(
                            rope_type="llama3", rope_theta=500000.0, factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
                            original_max_position_embeddings=32)),
    "xglm": dict(vocab_size=256, d_model=64, ffn_dim=96, num_layers=3, attention_heads=4, max_position_embeddings=64, dropout=0.0,
                 attention_dropout=0.0, **DROPOUT),
    # Sequences of 48 are longer than the original context of these models.
    "llama3-rope": dict(model_type="llama", max_position_embeddings=256, rope_parameters=dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32), **LLAMA),
    "longrope": dict(model_type="phi3", max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32, short_factor=[1.0 + 0.1 * i for i in range(8)],
        long_factor=[1.5 + i for i in range(8)]), **LLAMA),
    # Layers with a window have another base and are not scaled.
    "olmo3": dict(max_position_embeddings=256, sliding_window=8, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
        full_attention=dict(rope_type="yarn", rope_theta=500000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, attention_factor=1.2,
                            original_max_position_embeddings=32),
        sliding_attention=dict(rope_type="default", rope_theta=20000.0)), **LLAMA),
}

kind, folder, tokens = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
settings = dict(TYPES[kind])
model_type = settings.pop("model_type", kind)
config = transformers.AutoConfig.for_model(model_type, attn_implementation="eager", **settings)
model = transformers.AutoModelForCausalLM.from_config(config).float().train()
with torch.no_grad():
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(0.1 * torch.randn_like(p))
folder.mkdir(parents=True, exist_ok=True)
(folder / "tokens.bin").write_bytes(tokens.read_bytes())
record(model, folder, tokens, T=T, B=B, steps=STEPS, lr=LR, wd=WD, betas=BETAS, eps=EPS, clip=CLIP)
