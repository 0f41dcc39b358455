"""Tiny configurations of types of transformers, and the number of parameters of their classes on torch's meta device.

    python make.py            (with torch 2.11 and transformers 5.17)
    python make.py NAME ...   only these; state-space models and wrappers are from transformers 5.24
"""
import json, pathlib, re, sys, torch, transformers
from transformers import AutoConfig

HERE = pathlib.Path(__file__).parent
LLAMA = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
GPT = dict(vocab_size=256, n_embd=64, n_layer=3, n_head=4, n_positions=96)
BERT = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=66)
DEEPSEEK = dict(
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
)
EXPERTS = {
    "mixtral": dict(LLAMA, num_local_experts=4), "olmoe": dict(LLAMA, num_experts=6, num_experts_per_tok=2),
    "qwen2_moe": dict(LLAMA, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2, decoder_sparse_step=2),
    "qwen3_moe": dict(LLAMA, head_dim=24, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[0]),
    "deepseek_v2": dict(LLAMA, **DEEPSEEK, num_key_value_heads=4, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=12),
    "deepseek_v3": dict(LLAMA, **DEEPSEEK, num_key_value_heads=4, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=2, q_lora_rank=None),
    "glm4_moe": dict(LLAMA, head_dim=16, moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, use_qk_norm=True, attention_bias=True),
    "dots1": dict(LLAMA, head_dim=24, moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1),
    "phimoe": dict(LLAMA, num_local_experts=4, attention_bias=True, lm_head_bias=True), "granitemoe": dict(LLAMA, num_local_experts=4),
    "minimax_m2": dict(LLAMA, head_dim=16, num_local_experts=8, num_experts_per_tok=2, rotary_dim=8),
    "dbrx": dict(
        d_model=64, n_heads=4, n_layers=3, max_seq_len=96, vocab_size=256, ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, hidden_size=64),
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8),
    ),
}
NO_FFN = {k: v for k, v in LLAMA.items() if k != "intermediate_size"}
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
NEMOTRON = dict(LLAMA, head_dim=16, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=12, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2)
HYBRIDS = {
    "mamba": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, state_size=6), "falcon_mamba": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, state_size=6, use_bias=True),
    "mamba2": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_heads=8, head_dim=16, n_groups=2, state_size=10),
    "bamba": dict(LLAMA, num_hidden_layers=4, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=10),
    "jamba": dict(LLAMA, num_hidden_layers=4, num_experts=4, attn_layer_period=4, attn_layer_offset=2, mamba_dt_rank=5, mamba_d_state=6, use_mamba_kernels=False),
    "qwen3_next": dict(LLAMA, **DELTA, num_hidden_layers=5, head_dim=24, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2),
    "nemotron_h": dict(NEMOTRON, layers_block_type=["mamba", "moe", "attention", "mlp"], moe_shared_expert_intermediate_size=32),
    "nemotron_h-latent": dict(NEMOTRON, layers_block_type=["mamba", "moe", "attention"], moe_latent_size=20, moe_shared_expert_intermediate_size=32),
}
GRANITE = dict(LLAMA, num_hidden_layers=4, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"], mamba_n_heads=8, mamba_d_state=10, shared_intermediate_size=40)
HYBRIDS |= {
    "granitemoehybrid": dict(GRANITE, num_local_experts=6), "granitemoehybrid-keys": dict(GRANITE, num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=True),
    "lfm2": dict(LLAMA, num_hidden_layers=4, full_attn_idxs=[1, 3], block_multiple_of=16, conv_bias=True),
    "ernie4_5_moe": dict(LLAMA, num_hidden_layers=5, moe_intermediate_size=24, moe_num_experts=6, moe_k=2, moe_layer_interval=2, moe_layer_start_index=2),
}
HYBRIDS |= {
    "deepseek_v32": dict(LLAMA, **DEEPSEEK, num_key_value_heads=4, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=12, index_n_heads=2, index_head_dim=8, index_topk=16, n_group=1, topk_group=1),
    "gpt_oss": dict(LLAMA, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}
T5 = dict(vocab_size=256, d_model=64, d_ff=96, d_kv=12, num_layers=3, num_decoder_layers=2, num_heads=4)
BART = dict(vocab_size=256, d_model=64, encoder_layers=3, decoder_layers=2, encoder_ffn_dim=96, decoder_ffn_dim=96, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=96)
SEQ2SEQ = {"t5": dict(T5), "mt5": dict(T5), "umt5": dict(T5), "bart": dict(BART)}
SEQ2SEQ |= {name: dict(BART, pad_token_id=0, scale_embedding=True) for name in ("plbart", "mbart", "blenderbot", "blenderbot-small", "m2m_100", "pegasus", "marian")}
TOWER = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, patch_size=4, image_size=16)
QWEN_TOWER = dict(depth=3, hidden_size=48, intermediate_size=80, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64)
WRAPPERS = {
    "qwen2_vl": dict(text_config=dict(LLAMA), vision_config=dict(depth=2, embed_dim=48, hidden_size=64, mlp_ratio=2, num_heads=4, patch_size=4)),
    "qwen2_5_vl": dict(text_config=dict(LLAMA), vision_config=dict(QWEN_TOWER)),
    "qwen3_vl": dict(text_config=dict(LLAMA, head_dim=16), vision_config=dict(QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])),
    "qwen3_vl_moe": dict(text_config=dict(LLAMA, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2), vision_config=dict(QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[1])),
    "qwen3_5": dict(text_config=dict(LLAMA, **DELTA, num_hidden_layers=4, head_dim=24), vision_config=dict(QWEN_TOWER, num_position_embeddings=16)),
    "qwen3_5_moe": dict(text_config=dict(NO_FFN, **DELTA, num_hidden_layers=4, head_dim=24, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2), vision_config=dict(QWEN_TOWER, num_position_embeddings=16)),
    "gemma3": dict(text_config=dict(LLAMA, head_dim=16), vision_config=dict(TOWER), mm_tokens_per_image=4),
    "paligemma": dict(text_config=dict(LLAMA, head_dim=16, model_type="gemma"), vision_config=dict(TOWER, model_type="siglip_vision_model"), projection_dim=64),
    "llava": dict(text_config=dict(LLAMA, model_type="llama"), vision_config=dict(TOWER, model_type="clip_vision_model")),
    "llava-siglip": dict(text_config=dict(LLAMA, model_type="qwen2"), vision_config=dict(TOWER, model_type="siglip_vision_model", vision_use_head=False)),
    "mistral3": dict(text_config=dict(LLAMA, model_type="mistral", head_dim=16), vision_config=dict(TOWER, model_type="pixtral")),
    "llama4": dict(
        text_config=dict(LLAMA, num_hidden_layers=4, intermediate_size_mlp=112, head_dim=16, num_local_experts=4, interleave_moe_layer_step=2),
        vision_config=dict(TOWER, intermediate_size=192, vision_output_dim=40, projector_input_dim=40, projector_output_dim=40),
    ),
    "internvl": dict(text_config=dict(LLAMA, model_type="qwen2"), vision_config=dict(TOWER, patch_size=[4, 4], image_size=[16, 16], attention_bias=True)),
    "idefics3": dict(text_config=dict(LLAMA, model_type="llama", pad_token_id=0), vision_config=dict(TOWER), scale_factor=2),
    "smolvlm": dict(text_config=dict(LLAMA, model_type="llama", pad_token_id=0), vision_config=dict(TOWER), scale_factor=2),
}
MLA = dict(kv_lora_rank=10, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4)
ROUTED = dict(moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2)
INDEXER = dict(index_n_heads=2, index_head_dim=8, index_topk=16)
EXPERTS |= {
    "granitemoeshared": dict(LLAMA, num_local_experts=4, shared_intermediate_size=40), "hunyuan_v1_moe": dict(LLAMA, head_dim=16, num_experts=4, moe_topk=2),
    "flex_olmo": dict(LLAMA, num_experts=6, num_experts_per_tok=2, pad_token_id=0),
    "mellum": dict(LLAMA, head_dim=16, moe_intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=16),
    "exaone_moe": dict(LLAMA, **ROUTED, num_hidden_layers=5), "hy_v3": dict(LLAMA, **ROUTED, head_dim=24), "afmoe": dict(LLAMA, **ROUTED, num_hidden_layers=5, head_dim=24, mup_enabled=True),
    "solar_open": dict(NO_FFN, head_dim=24, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2),
    "glm4_moe_lite": dict(LLAMA, **DEEPSEEK | MLA, n_shared_experts=1), "glm_moe_dsa": dict(LLAMA | DEEPSEEK | MLA | INDEXER, num_hidden_layers=5, n_shared_experts=1),
    "mistral4": dict(LLAMA | DEEPSEEK | MLA, n_shared_experts=1), "sarvam_mla": dict(LLAMA | DEEPSEEK | MLA, n_shared_experts=1),
    "lfm2_moe": dict(LLAMA, **ROUTED, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"]),
}
DENSE = {
    "youtu": dict(LLAMA | MLA), "minicpm3": dict(LLAMA | MLA), "ministral": dict(LLAMA, head_dim=16, sliding_window=16), "ministral3": dict(LLAMA, head_dim=24),
    "cwm": dict(LLAMA, num_hidden_layers=5, head_dim=24, pad_token_id=0, bos_token_id=0, eos_token_id=0), "iquestcoder": dict(LLAMA, head_dim=24), "helium": dict(LLAMA, head_dim=16, pad_token_id=0),
    "hyperclovax": dict(LLAMA, head_dim=24), "hyperclovax-keys": dict(LLAMA, use_post_norm=False, mlp_bias=True), "jais2": dict(LLAMA, head_dim=24), "nanochat": dict(LLAMA), "vaultgemma": dict(LLAMA, head_dim=32),
    "codegen": dict(GPT, rotary_dim=8), "gpt-sw3": dict(GPT), "persimmon": dict({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}), "biogpt": dict(BERT),
    "gpt_neo": dict(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, max_position_embeddings=96, attention_types=[[["global", "local"], 2]], window_size=16),
    "xglm": dict(vocab_size=256, d_model=64, ffn_dim=96, num_layers=3, attention_heads=4, max_position_embeddings=96),
}
ENCODERS = {
    **{name: dict(BERT) for name in ("camembert", "data2vec-text", "xlm-roberta-xl", "ernie", "megatron-bert", "mpnet")},
    "distilbert": dict(vocab_size=256, dim=64, hidden_dim=96, n_layers=3, n_heads=4, max_position_embeddings=66),
}
CLIP = dict(TOWER, model_type="clip_vision_model")
WRAPPERS |= {
    "llava_next": dict(text_config=dict(LLAMA, model_type="llama"), vision_config=CLIP),
    "llava_onevision": dict(text_config=dict(LLAMA, model_type="qwen2"), vision_config=dict(TOWER, model_type="siglip_vision_model")),
    "glm4v": dict(text_config=dict(LLAMA, pad_token_id=0), vision_config=dict(QWEN_TOWER, image_size=16)), "glm46v": dict(text_config=dict(LLAMA, model_type="glm4v_text", pad_token_id=0), vision_config=dict(QWEN_TOWER, image_size=16)),
    "glm4v_moe": dict(text_config=dict(LLAMA, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, pad_token_id=0), vision_config=dict(QWEN_TOWER, image_size=16)),
    "lfm2_vl": dict(text_config=dict(LLAMA, num_hidden_layers=4, full_attn_idxs=[1, 3], model_type="lfm2"), vision_config=dict(TOWER, num_patches=16, model_type="siglip2_vision_model"), projector_hidden_size=40),
}
GEMMA4 = dict(LLAMA, num_hidden_layers=7, head_dim=24, global_head_dim=32, hidden_size_per_layer_input=0, sliding_window=16)
GEMMA4_TOWER = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=12, patch_size=4, position_embedding_size=32, standardize=True)
EXPERTS |= {
    "mimo_v2_flash": dict(LLAMA, num_hidden_layers=7, head_dim=24, v_head_dim=16, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, sliding_window=16),
    "sarvam_moe": dict(LLAMA, head_dim=24, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2),
    "glm_moe_dsa-keys": dict(LLAMA | DEEPSEEK | MLA | INDEXER, num_hidden_layers=5, n_shared_experts=1, indexer_types=["full", "shared", "full", "shared", "shared"]),
}
DENSE |= {
    "bitnet": dict(LLAMA), "apertus": dict(LLAMA), "granite_swa": dict(LLAMA, num_hidden_layers=5, mlp_bias=True), "gemma4_text": dict(GEMMA4),
}
HYBRIDS |= {
    "falcon_h1": dict(LLAMA, mamba_d_ssm=96, mamba_n_heads=8, mamba_d_state=10, mamba_n_groups=2),
    "falcon_h1-keys": dict(LLAMA, head_dim=24, mamba_d_ssm=None, mamba_n_heads=8, mamba_d_state=10, mamba_rms_norm=True, mamba_conv_bias=False),
}
DINO = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=28)
DENSE |= {"dinov2": dict(DINO), "dinov2-keys": dict(DINO, use_swiglu_ffn=True, mlp_ratio=3, patch_size=7)}
ENCODERS |= {"deberta-v2": dict(BERT, relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False), "electra": dict(BERT, embedding_size=24), "electra-keys": dict(BERT, embedding_size=64), "nomic_bert": dict(BERT), "jina_embeddings_v3": dict(BERT)}
WRAPPERS |= {
    "gemma4": dict(text_config=dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24), vision_config=GEMMA4_TOWER, audio_config=None),
    "gemma4-layers": dict(text_config=dict(GEMMA4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=240, num_kv_shared_layers=1, use_double_wide_mlp=True, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2), vision_config=GEMMA4_TOWER, audio_config=None),
    "gemma4-keys": dict(text_config=dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1), vision_config=GEMMA4_TOWER, audio_config=None),
    "llava_next_video": dict(text_config=dict(LLAMA, model_type="llama"), vision_config=CLIP),
    "shieldgemma2": dict(text_config=dict(LLAMA, head_dim=16), vision_config=dict(TOWER), mm_tokens_per_image=4),
}
HYBRIDS |= {
    "deepseek_v4": dict(
        vocab_size=256, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, head_dim=32, q_lora_rank=12, o_groups=2, o_lora_rank=10, hc_mult=2, sliding_window=16,
        index_n_heads=2, index_head_dim=16, index_topk=4, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2,
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=16),
    ),
}
M3_TEXT = dict(
    LLAMA, num_hidden_layers=4, head_dim=16, dense_intermediate_size=112, shared_intermediate_size=40, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2,
    rotary_dim=8, index_n_heads=2, index_head_dim=12, index_topk_blocks=2, index_block_size=8,
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"], mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
)
WRAPPERS |= {"minimax_m3_vl": dict(text_config=M3_TEXT, vision_config=dict(TOWER), projector_hidden_size=40)}
EURO = dict(LLAMA, pad_token_id=0)
ENCODERS |= {"eurobert": dict(EURO), "eurobert-keys": dict(EURO, head_dim=24, mlp_bias=True, attention_bias=True, tie_word_embeddings=True)}
VIT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=32, num_labels=3)
DENSE |= {"vit": dict(VIT, patch_size=8), "deit": dict(VIT), "deit-keys": dict(VIT, patch_size=8, num_channels=1, num_labels=7)}
ALBERT = dict(BERT, embedding_size=24, num_hidden_layers=4)
ENCODERS |= {"albert": dict(ALBERT), "albert-keys": dict(ALBERT, num_hidden_groups=2, inner_group_num=3, embedding_size=96, type_vocab_size=1, hidden_act="gelu"), "albert-groups": dict(ALBERT, num_hidden_groups=4)}
CLIP_TEXT = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=48)
DENSE |= {
    "clip_text_model": dict(CLIP_TEXT), "clip_text_model-keys": dict(CLIP_TEXT, projection_dim=24, max_position_embeddings=40, hidden_act="gelu"),
    "clip_vision_model": dict(TOWER), "clip_vision_model-keys": dict(TOWER, patch_size=8, num_channels=1, projection_dim=24),
}
WHISPER = dict(d_model=64, encoder_layers=3, decoder_layers=2, encoder_ffn_dim=112, decoder_ffn_dim=96, encoder_attention_heads=8, decoder_attention_heads=4, num_mel_bins=10, max_source_positions=24)
SEQ2SEQ |= {"whisper": dict(WHISPER, vocab_size=256, pad_token_id=0, max_target_positions=40), "whisper-keys": dict(WHISPER, vocab_size=256, pad_token_id=0, d_model=48, tie_word_embeddings=False)}
WRAPPERS |= {
    "qwen2_audio": dict(text_config=dict(LLAMA, model_type="qwen2", tie_word_embeddings=True), audio_config=dict(WHISPER, model_type="qwen2_audio_encoder")),
    "voxtral": dict(text_config=dict(LLAMA, model_type="llama", head_dim=24), audio_config=dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192, num_mel_bins=10, max_source_positions=24, model_type="voxtral_encoder")),
}
MLLAMA = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=4, attention_heads=4, patch_size=4, image_size=16, num_global_layers=2, intermediate_layers_indices=[0, 2], vision_output_dim=144)
WRAPPERS |= {
    "mllama": dict(text_config=dict(LLAMA, num_hidden_layers=5, cross_attention_layers=[1, 3], pad_token_id=0), vision_config=dict(MLLAMA)),
    "mllama-keys": dict(text_config=dict(LLAMA, num_hidden_layers=4, cross_attention_layers=[3], pad_token_id=0), vision_config=dict(MLLAMA, max_num_tiles=2, supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]], intermediate_layers_indices=[1], vision_output_dim=96, image_size=12)),
}
KIMI = dict(LLAMA, **DEEPSEEK, num_hidden_layers=5, linear_head_dim=12, linear_num_heads=4)
HYBRIDS |= {
    "kimi_linear": dict({k: v for k, v in KIMI.items() if k != "n_routed_experts"}, num_local_experts=8, num_key_value_heads=4, pad_token_id=0),
    "kimi_linear-keys": dict({k: v for k, v in KIMI.items() if k != "n_routed_experts"}, num_local_experts=6, num_key_value_heads=4, pad_token_id=0, q_lora_rank=12, n_shared_experts=2, linear_attn_config=dict(head_dim=8, num_heads=6, short_conv_kernel_size=3, full_attn_layers=[2, 5], kda_layers=[1, 3, 4]), first_k_dense_replace=2, attention_bias=True),
}
DINO3 = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=64)
DENSE |= {
    "dinov3_vit": dict(DINO3, num_register_tokens=4), "dinov3_vit-keys": dict(DINO3, use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False, patch_size=8),
    "siglip_vision_model": dict(TOWER), "siglip_vision_model-keys": dict(TOWER, patch_size=8, num_channels=1, vision_use_head=False),
}
DENSE |= {"siglip_text_model": dict(CLIP_TEXT), "siglip_text_model-keys": dict(CLIP_TEXT, projection_size=24, hidden_act="gelu"), "siglip2_text_model": dict(CLIP_TEXT)}
WRAPPERS |= {
    "clip": dict(text_config=dict(CLIP_TEXT, projection_dim=24), vision_config=dict(TOWER, projection_dim=24), projection_dim=24),
    "clip-keys": dict(text_config=dict(CLIP_TEXT), vision_config=dict(TOWER, patch_size=8)),
    "siglip": dict(text_config=dict(CLIP_TEXT, projection_size=48), vision_config=dict(TOWER)),
    "siglip-keys": dict(text_config=dict(CLIP_TEXT), vision_config=dict(TOWER, hidden_size=64, num_channels=1)),
    "siglip2": dict(text_config=dict(CLIP_TEXT, projection_size=48), vision_config=dict(TOWER, num_patches=16)),
}
HYBRIDS |= {
    "rwkv": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3), "rwkv-keys": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, attention_hidden_size=96, intermediate_size=112, tie_word_embeddings=True),
    "recurrent_gemma": dict(LLAMA, num_hidden_layers=4, num_key_value_heads=1), "recurrent_gemma-keys": dict(LLAMA, lru_width=96, conv1d_width=3, block_types=["attention", "recurrent"], attention_bias=True, tie_word_embeddings=False),
}
ENCODERS |= {"albert-equal-keys": dict(ALBERT, embedding_size=64)}
WRAPPERS |= {"internvl-keys": dict(text_config=dict(LLAMA, model_type="qwen2"), vision_config=dict(TOWER, patch_size=[4, 4], image_size=[16, 16], use_qk_norm=True, norm_type="rms_norm"))}
PERCEIVER = dict(hidden_size=64, resampler_n_latents=6, resampler_depth=2, resampler_n_heads=4, num_key_value_heads=2, resampler_head_dim=12)
WRAPPERS |= {"idefics2": dict(text_config=dict(LLAMA, model_type="mistral", pad_token_id=0), vision_config=dict(TOWER), perceiver_config=PERCEIVER)}
WRAPPERS |= {
    "audioflamingo3": dict(text_config=dict(LLAMA, model_type="qwen2"), audio_config=dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, num_mel_bins=10, max_source_positions=24, model_type="audioflamingo3_encoder")),
    "aya_vision": dict(text_config=dict(LLAMA, model_type="cohere2"), vision_config=dict(TOWER, model_type="siglip_vision_model", vision_use_head=False), alignment_intermediate_size=40),
    "cohere2_vision": dict(text_config=dict(LLAMA, model_type="cohere2"), vision_config=dict(TOWER, model_type="siglip_vision_model", vision_use_head=False), alignment_intermediate_size=56),
}
ZAMBA2 = dict(NO_FFN, intermediate_size=96, num_hidden_layers=6, layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"], n_mamba_heads=4, mamba_d_state=10, adapter_rank=6)
HYBRIDS |= {
    "zamba2": dict(ZAMBA2, num_key_value_heads=4), "zamba2-keys": dict(ZAMBA2, num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, mamba_ngroups=2, add_bias_linear=True, num_key_value_heads=4),
}
GEMMA3N = dict(LLAMA, head_dim=16, num_hidden_layers=6, num_kv_shared_layers=2, vocab_size_per_layer_input=240, hidden_size_per_layer_input=8, laurel_rank=12, layer_types=["sliding_attention", "full_attention"] * 3)
DENSE |= {
    "gemma3n_text": dict(GEMMA3N, intermediate_size=[96, 96, 96, 96, 112, 112], activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0, 0.0]),
    "gemma3n_text-keys": dict(GEMMA3N, num_hidden_layers=12, num_kv_shared_layers=0, layer_types=None, altup_num_inputs=3, altup_active_idx=1, altup_correct_scale=False, tie_word_embeddings=False, attention_bias=True),
    "gemma4_text-keys": dict(LLAMA, num_hidden_layers=6, head_dim=16, global_head_dim=24, vocab_size_per_layer_input=240, hidden_size_per_layer_input=8, num_kv_shared_layers=3, use_double_wide_mlp=True, layer_types=["sliding_attention", "full_attention"] * 3),
}
ENCODERS |= {
    "longformer": dict(BERT, attention_window=16), "longformer-keys": dict(BERT, attention_window=[8, 8, 8], type_vocab_size=1),
    "albert-pairs": dict(BERT, embedding_size=24), "bert-pairs": dict(BERT), "big_bird": dict(BERT), "big_bird-keys": dict(BERT, block_size=4, num_random_blocks=1, use_bias=False, rescale_embeddings=True), "ernie-keys": dict(BERT), "megatron-bert-keys": dict(BERT),
}
LAGUNA = dict(LLAMA, head_dim=16, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2)
EXPERTS |= {
    "aria_text": dict(LLAMA, moe_num_experts=6), "granitemoe_swa": dict(LLAMA, num_hidden_layers=5, num_local_experts=4, shared_intermediate_size=40),
    "cohere2_moe": dict(LLAMA, head_dim=16, num_hidden_layers=5, num_experts=4), "kolibri1": dict(NO_FFN, num_hidden_layers=5, head_dim=16, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2),
    "cohere2_moe-keys": dict(LLAMA, head_dim=16, num_hidden_layers=5, num_experts=4, num_shared_experts=2, first_k_dense_replace=2, prefix_dense_intermediate_size=80, rms_norm_eps=1e-6, expert_selection_fn="sigmoid", tie_word_embeddings=False),
    "laguna": dict(LAGUNA), "laguna-keys": dict(LAGUNA, gating="per-element", layer_types=["full_attention", "sliding_attention", "sliding_attention"], mlp_layer_types=["dense", "dense", "sparse"]),
}
DENSE |= {
    "modernbert-decoder": dict(BERT, num_hidden_layers=5, pad_token_id=0), "apertus1p5_text": dict(LLAMA), "openai-gpt": dict(GPT), "ctrl": dict(GPT, dff=96), "gemma4_unified_text": dict(LLAMA, num_hidden_layers=6, head_dim=16, global_head_dim=24),
    "olmo_hybrid": dict(LLAMA, num_hidden_layers=5, pad_token_id=0), "olmo_hybrid-keys": dict(LLAMA, **DELTA, num_hidden_layers=3, pad_token_id=0, attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
}
OPT = dict(vocab_size=256, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64, max_position_embeddings=96)
QFORMER = dict(vocab_size=64, hidden_size=32, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, encoder_hidden_size=48)
WRAPPERS |= {
    "blip-2": dict(vision_config=dict(TOWER), qformer_config=QFORMER, text_config=dict(OPT, model_type="opt"), num_query_tokens=5),
    "blip-2-keys": dict(vision_config=dict(TOWER, qkv_bias=False), qformer_config=dict(QFORMER, cross_attention_frequency=1), text_config=dict(LLAMA, model_type="llama"), num_query_tokens=6),
}
EXPERTS |= {
    "flint": dict(LLAMA, head_dim=16, num_hidden_layers=6, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2),
    "flint-keys": dict(LLAMA, head_dim=16, num_hidden_layers=4, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[2], attention_bias=True, layer_types=["full_attention", "sliding_attention"] * 2),
    "axk1": dict(LLAMA, **DEEPSEEK, num_key_value_heads=4, n_shared_experts=1, n_group=4, topk_group=2, q_lora_rank=12),
    "minimax": dict(LLAMA, num_hidden_layers=4, num_local_experts=4, block_size=16), "minimax-keys": dict(LLAMA, num_hidden_layers=3, head_dim=24, num_local_experts=4, layer_types=["linear_attention", "linear_attention", "full_attention"], tie_word_embeddings=True),
}
BAILING = dict(LLAMA, pad_token_id=0, num_hidden_layers=4, num_key_value_heads=4, head_dim=12, moe_intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
HYBRIDS |= {
    "bailing_hybrid": dict(BAILING, layer_group_size=2), "bailing_hybrid-keys": dict(BAILING, q_lora_rank=12, first_k_dense_replace=1, n_shared_experts=2, layer_types=["full_attention", "linear_attention"] * 2),
    "lara_mini": dict(NO_FFN, **DELTA, num_hidden_layers=6, head_dim=16, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2),
    "lfm3": dict(LLAMA, pad_token_id=0, num_hidden_layers=5, head_dim=16), "lfm3-keys": dict(LLAMA, pad_token_id=0, num_hidden_layers=4, head_dim=16, use_sandwich_norm=False, use_attention_gate=False, conv_bias=True, tie_word_embeddings=False, layer_types=["conv", "sliding_attention"] * 2),
}
DENSE |= {"diffllama": dict(LLAMA), "cohere_compass_text": dict(LLAMA, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e4), full_attention=None))}
VIT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, patch_size=4, image_size=16)
SWIN = dict(embed_dim=24, depths=[2, 2, 1], num_heads=[2, 4, 8], window_size=4, patch_size=4, image_size=64)
CONVNEXT = dict(depths=[2, 3, 1], hidden_sizes=[24, 40, 64], num_stages=3, patch_size=4, image_size=32)
ENCODERS |= {
    "dinov2-classes": dict(VIT, mlp_ratio=3), "dinov2_with_registers": dict(VIT, num_register_tokens=3, use_swiglu_ffn=True), "vit_msn": dict(VIT), "ijepa": dict(VIT),
    "beit": dict(VIT), "beit-keys": dict(VIT, use_relative_position_bias=True, use_mean_pooling=False, layer_scale_init_value=0.0), "data2vec-vision": dict(VIT, use_shared_relative_position_bias=True, use_absolute_position_embeddings=True),
    "swin": dict(SWIN), "swin-keys": dict(SWIN, qkv_bias=False, use_absolute_embeddings=True, mlp_ratio=2.0), "convnext": dict(CONVNEXT), "convnext-keys": dict(CONVNEXT, layer_scale_init_value=0.0, num_channels=1), "convnextv2": dict(CONVNEXT),
}
ENCODERS |= {
    "roberta-prelayernorm": dict(BERT), "layoutlm": dict(BERT, max_2d_position_embeddings=40), "esm": dict(BERT, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary"), "esm-keys": dict(BERT, pad_token_id=1, mask_token_id=32, emb_layer_norm_before=True),
}
WRAPPERS |= {
    "instructblip": dict(vision_config=dict(TOWER), qformer_config=QFORMER, text_config=dict(OPT, model_type="opt"), num_query_tokens=5), "instructblipvideo": dict(vision_config=dict(TOWER), qformer_config=dict(QFORMER, cross_attention_frequency=1), text_config=dict(LLAMA, model_type="llama"), num_query_tokens=6),
    "deepseek_vl": dict(text_config=dict(LLAMA, model_type="llama"), vision_config=dict(TOWER, model_type="siglip_vision_model", vision_use_head=False)), "lighton_ocr": dict(text_config=dict(LLAMA, model_type="qwen3", head_dim=16), vision_config=dict(TOWER, model_type="pixtral")),
    "glm_ocr": dict(text_config=dict(LLAMA, head_dim=16), vision_config=dict(depth=2, hidden_size=48, intermediate_size=80, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64)),
    "cohere_compass": dict(text_config=dict(LLAMA, rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e4))), vision_config=dict(QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])),
}
SEQ2SEQ |= {
    "t5gemma": dict(encoder=dict(LLAMA, head_dim=16, sliding_window=16), decoder=dict(LLAMA, head_dim=16, sliding_window=16), vocab_size=256),
    "t5gemma-keys": dict(encoder=dict(LLAMA, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_key_value_heads=4, head_dim=8, sliding_window=24, attention_bias=True), decoder=dict(LLAMA, head_dim=16, sliding_window=16, attention_bias=True, final_logit_softcapping=None), vocab_size=256, tie_word_embeddings=False),
    "longt5": dict(T5, local_radius=15), "longt5-keys": dict(T5, local_radius=15, encoder_attention_type="transient-global", global_block_size=8, feed_forward_proj="gated-gelu"),
    "mvp": dict(BART), "bart-keys": dict(BART, encoder_ffn_dim=80, encoder_attention_heads=8),
    "bigbird_pegasus": dict(BART, block_size=4), "bigbird_pegasus-keys": dict(BART, attention_type="original_full", use_bias=True, encoder_attention_heads=8),
}
LED = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
SEQ2SEQ |= {"led": dict(LED, max_encoder_position_embeddings=120, max_decoder_position_embeddings=96, attention_window=16), "led-keys": dict(LED, max_encoder_position_embeddings=120, max_decoder_position_embeddings=96, attention_window=[16, 16, 16], encoder_attention_heads=8, encoder_ffn_dim=80)}
WAV2VEC = dict(
    vocab_size=20, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, conv_dim=[16, 16, 24], conv_stride=[5, 2, 2], conv_kernel=[10, 3, 2],
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
)
SOUNDS = {
    **{name: dict(WAV2VEC) for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "data2vec-audio")},
    **{f"{name}-keys": dict(WAV2VEC, conv_bias=True, feat_extract_norm="layer", do_stable_layer_norm=True, mask_time_prob=0.0) for name in ("wav2vec2", "unispeech", "unispeech-sat", "wavlm")},
    "hubert-keys": dict(WAV2VEC, conv_bias=True, feat_proj_layer_norm=False), "data2vec-audio-keys": dict(WAV2VEC, num_conv_pos_embeddings=2, conv_pos_kernel_size=5),
}
MAE = dict(VIT, decoder_num_attention_heads=2, decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_intermediate_size=48)
ENCODERS |= {"vit_mae": dict(MAE), "vit_mae-keys": dict(MAE, patch_size=2, num_channels=1, mask_ratio=0.5)} | SOUNDS
LONGCAT = dict(
    vocab_size=256, hidden_size=64, num_layers=3, num_attention_heads=4, ffn_hidden_size=96, expert_ffn_hidden_size=24, n_routed_experts=8, zero_expert_num=4, moe_topk=3,
    q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
)
JETMOE = dict(vocab_size=256, hidden_size=64, intermediate_size=24, num_hidden_layers=3, num_key_value_heads=2, kv_channels=16, num_local_experts=4, num_experts_per_tok=2)
EXPERTS |= {
    "longcat_flash": dict(LONGCAT), "longcat_flash-keys": dict(LONGCAT, attention_bias=True, zero_expert_num=0, tie_word_embeddings=True),
    "jetmoe": dict(JETMOE), "jetmoe-keys": dict(JETMOE, num_local_experts=6, num_experts_per_tok=3, tie_word_embeddings=False, output_router_logits=True),
}
WHISPER_TOWER = dict(d_model=48, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=80, num_mel_bins=10, max_source_positions=24)
WRAPPERS |= {
    "exaone4_5": dict(text_config=dict(LLAMA, model_type="exaone4"), vision_config=dict(QWEN_TOWER, num_key_value_heads=2)), "exaone4_5-keys": dict(text_config=dict(LLAMA, model_type="exaone4", head_dim=24), vision_config=dict(QWEN_TOWER, depth=2, num_heads=2, num_key_value_heads=1)), "qianfan_ocr": dict(text_config=dict(LLAMA, model_type="qwen3", head_dim=16), vision_config=dict(TOWER, patch_size=[4, 4], image_size=[16, 16])),
    "video_llama_3": dict(text_config=dict(LLAMA, model_type="qwen2"), vision_config=dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, patch_size=4)),
    "paddleocr_vl": dict(text_config=dict(LLAMA, head_dim=16), vision_config=dict(TOWER)), "vipllava": dict(text_config=dict(LLAMA, model_type="llama"), vision_config=dict(TOWER, num_hidden_layers=6, model_type="clip_vision_model"), vision_feature_layer=[-2, -3, 2]),
    "vipllava-keys": dict(text_config=dict(LLAMA, model_type="llama"), vision_config=dict(TOWER, model_type="clip_vision_model"), vision_feature_layer=-2),
    "glmasr": dict(text_config=dict(LLAMA, model_type="llama"), audio_config=dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_mel_bins=10, max_position_embeddings=24)),
    "musicflamingo": dict(text_config=dict(LLAMA, model_type="qwen2"), audio_config=dict(WHISPER_TOWER, model_type="audioflamingo3_encoder")),
}
ENCODERS |= {"swinv2": dict(SWIN), "swinv2-keys": dict(SWIN, qkv_bias=False, mlp_ratio=2.0), "donut-swin": dict(SWIN), "donut-swin-keys": dict(SWIN, qkv_bias=False), "dinov3_convnext": {k: v for k, v in CONVNEXT.items() if k != "num_stages"}}

ENCODERS |= {"roformer": dict(BERT), "roformer-keys": dict(BERT, embedding_size=24, type_vocab_size=3), "esmc": dict(LLAMA, num_key_value_heads=4, head_dim=16), "esmc-keys": dict(LLAMA, num_key_value_heads=4, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)}
MORE_HEADS = {"roformer": "RoFormerForTokenClassification", "esmc": "EsmcModel", "swinv2": "Swinv2Model", "donut-swin": "DonutSwinModel", "xlm": "XLMForTokenClassification"}
XLSTM = dict(vocab_size=256, hidden_size=64, num_heads=4, num_hidden_layers=3, chunk_size=16)
HYBRIDS |= {"xlstm": dict(XLSTM), "xlstm-keys": dict(XLSTM, qk_dim_factor=1.0, v_dim_factor=2.0, ffn_proj_factor=2.0, ffn_round_up_to_multiple_of=24, tie_word_embeddings=True)}
XLM = dict(vocab_size=256, emb_dim=64, n_layers=3, n_heads=4, max_position_embeddings=66)
ENCODERS |= {name: dict(XLM) for name in ("xlm", "flaubert")} | {"xlm-keys": dict(XLM, n_langs=5, sinusoidal_embeddings=True, gelu_activation=False), "flaubert-keys": dict(XLM, n_langs=3, use_lang_emb=False)}
HYBRIDS |= {"nemotron_h-keys": dict(NEMOTRON, layers_block_type=["mamba", "moe", "attention"], moe_shared_expert_intermediate_size=32, n_shared_experts=2, use_bias=True)}
# Audio towers next to vision towers.
OMNI_TOWER = dict(depth=3, hidden_size=48, intermediate_size=80, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64)
OMNI_SOUND = dict(d_model=48, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=80, num_mel_bins=10, max_source_positions=24, output_dim=64)
OMNI = dict(text_config=dict(LLAMA), vision_config=dict(OMNI_TOWER), audio_config=dict(OMNI_SOUND, n_window=10))
QWEN3_SOUND = dict(OMNI_SOUND, downsample_hidden_size=12)
OMNI3 = dict(text_config=dict(LLAMA, head_dim=24, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2), vision_config=dict(OMNI_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]), audio_config=QWEN3_SOUND)
WRAPPERS |= {
    "qwen2_5_omni_thinker": OMNI, "qwen2_5_omni_thinker-keys": dict(OMNI, text_config=dict(LLAMA, tie_word_embeddings=True), tie_word_embeddings=True),
    "qwen3_omni_moe_thinker": OMNI3, "qwen3_omni_moe_thinker-keys": dict(OMNI3, audio_config=dict(QWEN3_SOUND, num_mel_bins=17, n_window=25), text_config=dict(OMNI3["text_config"], attention_bias=True, mlp_only_layers=[0])),
    "qwen3_asr": dict(text_config=dict(LLAMA, model_type="qwen3", head_dim=24), audio_config=QWEN3_SOUND), "qwen3_asr-keys": dict(text_config=dict(LLAMA, model_type="qwen3", tie_word_embeddings=False), audio_config=dict(QWEN3_SOUND, num_mel_bins=16), tie_word_embeddings=False),
}
GEMMA4_SOUND = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, subsampling_conv_channels=[16, 6], output_proj_dims=40)
WRAPPERS |= {
    "gemma4-sound": dict(text_config=dict(GEMMA4), vision_config=GEMMA4_TOWER, audio_config=GEMMA4_SOUND),
    "gemma4-only-sound": dict(text_config=dict(GEMMA4), vision_config=None, audio_config=dict(GEMMA4_SOUND, conv_kernel_size=3, attention_chunk_size=8, attention_context_left=7, attention_context_right=3)),
}
CONFORMER = dict(WAV2VEC, conv_depthwise_kernel_size=5)
W2V_BERT = dict(vocab_size=20, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, feature_projection_input_dim=24, conv_depthwise_kernel_size=5)
PARAKEET = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_mel_bins=16, subsampling_conv_channels=12)
ENCODERS |= {
    "wav2vec2-conformer": dict(CONFORMER), "wav2vec2-conformer-keys": dict(CONFORMER, conv_bias=True, feat_extract_norm="layer", mask_time_prob=0.0, position_embeddings_type="rotary", hidden_act="swish"),
    "wav2vec2-bert": dict(W2V_BERT), "wav2vec2-bert-keys": dict(W2V_BERT, position_embeddings_type="relative", mask_time_prob=0.0, conv_depthwise_kernel_size=7),
    "parakeet_ctc": dict(vocab_size=20, encoder_config=dict(PARAKEET)), "parakeet_ctc-keys": dict(vocab_size=30, encoder_config=dict(PARAKEET, attention_bias=False, convolution_bias=False, conv_kernel_size=5, subsampling_factor=4, scale_input=False)),
}
GRANITE_ENCODER = dict(input_dim=24, num_layers=4, hidden_dim=48, num_heads=4, output_dim=10, context_size=20, max_pos_emb=32, conv_kernel_size=5)
QFORMER = dict(model_type="blip_2_qformer", vocab_size=256, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=56, encoder_hidden_size=48)
WRAPPERS |= {
    "granite_speech": dict(text_config=dict(LLAMA, model_type="granite"), encoder_config=GRANITE_ENCODER, projector_config=QFORMER, has_lora_adapter=False),
    "granite_speech-keys": dict(text_config=dict(LLAMA, model_type="granite", attention_bias=True), encoder_config=dict(GRANITE_ENCODER, num_layers=3, feedforward_mult=2, conv_expansion_factor=1), projector_config=dict(QFORMER, cross_attention_frequency=1), window_size=12, downsample_rate=4, tie_word_embeddings=False, has_lora_adapter=False),
}
ENCODERS |= {
    "deberta": dict(BERT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False),
    "deberta-keys": dict(BERT, relative_attention=True, pos_att_type="c2p|p2c", max_relative_positions=24, type_vocab_size=2), "deberta-layers": dict(BERT),
}
# Language models that are parts of others.
DENSE |= {"qwen2_5_vl_text": dict(LLAMA), "qwen3_vl_text": dict(LLAMA, head_dim=16)}
# Types whose class has the sizes of a published model by default: these, too.
DEFAULTS = ["t5gemma", "longt5", "led", "mvp", "bigbird_pegasus", "vit_mae", "wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "data2vec-audio", "longcat_flash", "jetmoe", "qianfan_ocr", "video_llama_3", "paddleocr_vl", "vipllava", "glmasr", "musicflamingo", "swinv2", "donut-swin", "dinov3_convnext", "roformer", "esmc", "xlstm", "xlm", "flaubert"]
# Sizes of published models.
PUBLISHED = {
    "Qwen2.5-Omni-7B": ("qwen2_5_omni_thinker", dict(
        text_config=dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064), audio_config=dict(output_dim=3584),
        vision_config=dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=3584), tie_word_embeddings=False,
    )),
    "Qwen2.5-Omni-3B": ("qwen2_5_omni_thinker", dict(
        text_config=dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2, vocab_size=151936), audio_config=dict(output_dim=2048),
        vision_config=dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=2048), tie_word_embeddings=False,
    )),
    "Qwen3-Omni-30B-A3B": ("qwen3_omni_moe_thinker", dict(
        text_config=dict(hidden_size=2048, intermediate_size=768, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=152064),
        audio_config=dict(output_dim=2048), vision_config=dict(out_hidden_size=2048),
    )),
    "gemma-4-E2B": ("gemma4", dict(
        text_config=dict(hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7),
        vision_config=dict(), audio_config=dict(),
    )),
    "granite-speech-3.3-2b": ("granite_speech", dict(
        text_config=dict(model_type="granite", hidden_size=2048, intermediate_size=8192, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, vocab_size=49160, tie_word_embeddings=True),
        encoder_config=dict(num_layers=16, output_dim=256), projector_config=dict(model_type="blip_2_qformer", hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096, encoder_hidden_size=1024, cross_attention_frequency=1),
    )),
    "deberta-base": ("deberta", dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)),
    "deberta-xlarge": ("deberta", dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=48, num_attention_heads=16, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)),
    "wav2vec2-conformer-rel-pos-large": ("wav2vec2-conformer", dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, feat_extract_norm="layer", conv_bias=True, hidden_act="swish", vocab_size=32)),
    "w2v-bert-2.0": ("wav2vec2-bert", dict(vocab_size=32)),
    "parakeet-ctc-0.6b": ("parakeet_ctc", dict(vocab_size=1025, encoder_config=dict())), "parakeet-ctc-1.1b": ("parakeet_ctc", dict(vocab_size=1025, encoder_config=dict(num_hidden_layers=42))),
    "Qwen3-ASR-1.7B": ("qwen3_asr", dict(audio_config=dict(output_dim=2048), text_config=dict(model_type="qwen3", hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936))),
}
CASES = {
    **EXPERTS, **DENSE, **ENCODERS, **HYBRIDS, **WRAPPERS, **SEQ2SEQ,
    "arcee": dict(LLAMA), "cohere": dict(LLAMA, use_qk_norm=True), "cohere2": dict(LLAMA, num_hidden_layers=5),
    "ernie4_5": dict(LLAMA, use_bias=True), "exaone4": dict(LLAMA, num_hidden_layers=5), "gemma": dict(LLAMA, head_dim=32),
    "gemma2": dict(LLAMA, head_dim=32), "gemma3_text": dict(LLAMA, head_dim=32, num_hidden_layers=7), "glm": dict(LLAMA, head_dim=16, attention_bias=True, pad_token_id=0),
    "glm4": dict(LLAMA, head_dim=16, pad_token_id=0), "hunyuan_v1_dense": dict(LLAMA, attention_bias=True, head_dim=16), "mistral": dict(LLAMA, head_dim=24, sliding_window=16),
    "nemotron": dict(LLAMA, attention_bias=True, mlp_bias=True), "olmo": dict(LLAMA), "olmo2": dict(LLAMA), "olmo3": dict(LLAMA, num_hidden_layers=5),
    "phi3": dict(LLAMA, pad_token_id=0), "qwen3": dict(LLAMA, attention_bias=True), "seed_oss": dict(LLAMA, head_dim=24), "smollm3": dict(LLAMA, num_hidden_layers=5, pad_token_id=0),
    "stablelm": dict(LLAMA, qk_layernorm=True, use_qkv_bias=True), "stablelm-parallel": dict(LLAMA, use_parallel_residual=True), "starcoder2": dict(LLAMA),
    "phi": dict(LLAMA, qk_layernorm=True), "gptj": dict(GPT, rotary_dim=8), "gpt_bigcode": dict(GPT), "gpt_bigcode-keys": dict(GPT, multi_query=False),
    "opt": dict(vocab_size=256, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=96, word_embed_proj_dim=64),
    "opt-keys": dict(vocab_size=256, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=96, word_embed_proj_dim=24, do_layer_norm_before=False),
    "bloom": dict(vocab_size=256, hidden_size=64, n_layer=3, n_head=4), "mpt": dict(d_model=64, n_heads=4, n_layers=3, vocab_size=256),
    "falcon": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=False),
    "falcon-groups": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, bias=True),
    "falcon-keys": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, multi_query=False, parallel_attn=False, bias=True),
    "bert": dict(BERT), "roberta": dict(BERT), "xlm-roberta": dict(BERT), "modernbert": dict(BERT, num_hidden_layers=5, pad_token_id=0),
    "llama": dict(LLAMA, attention_bias=True), "granite": dict(LLAMA, mlp_bias=True), "gpt_neox": dict(BERT),
}
HEADS = {"layoutlm": "LayoutLMForSequenceClassification", "dinov2-classes": "Dinov2ForImageClassification", "swin": "SwinModel", "convnextv2": "ConvNextV2Model", "beit": "BeitModel", "modernbert-decoder": "ModernBertDecoderForSequenceClassification", "longformer": "LongformerForTokenClassification", "big_bird": "BigBirdForPreTraining", "big_bird-keys": "BigBirdForSequenceClassification", "ernie-keys": "ErnieForPreTraining", "megatron-bert-keys": "MegatronBertForPreTraining", "albert-pairs": "AlbertForPreTraining", "bert-pairs": "BertForPreTraining", "deit-keys": "DeiTForImageClassificationWithTeacher", "albert-equal-keys": "AlbertModel", "vit": "ViTModel", "deit": "DeiTModel", "whisper": "WhisperModel", "camembert": "CamembertForSequenceClassification", "distilbert": "DistilBertForSequenceClassification", "mpnet": "MPNetModel", "llama": "LlamaForSequenceClassification", "qwen3": "Qwen3Model", "gemma2": "Gemma2ForTokenClassification", "bert": "BertForSequenceClassification", "roberta": "RobertaForTokenClassification",
         "mistral": "MistralForSequenceClassification", "modernbert": "ModernBertForSequenceClassification",
         "nomic_bert": "NomicBertForSequenceClassification", "deberta-v2": "DebertaV2ForSequenceClassification", "electra": "ElectraForQuestionAnswering", "opt-keys": "OPTForSequenceClassification", "jina_embeddings_v3": "JinaEmbeddingsV3Model",
         "albert": "AlbertForSequenceClassification", "albert-keys": "AlbertForTokenClassification", "albert-groups": "AlbertModel", "eurobert": "EuroBertForSequenceClassification", "eurobert-keys": "EuroBertForTokenClassification"}


CTC = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert", "unispeech": "UniSpeech", "unispeech-sat": "UniSpeechSat", "wavlm": "WavLM", "data2vec-audio": "Data2VecAudio"}
MORE_HEADS |= {"gemma3_text": "Gemma3TextModel", "t5gemma": "T5GemmaForSequenceClassification", "llava": "LlavaModel", "qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl_moe": "Qwen3VLMoeModel", "marian": "MarianModel", "flaubert": "FlaubertModel", "gpt_oss": "GptOssForSequenceClassification"}
HEADS |= MORE_HEADS | {"wav2vec2": "Wav2Vec2Model", "wavlm-keys": "WavLMModel", "wav2vec2-conformer": "Wav2Vec2ConformerModel", "wav2vec2-bert": "Wav2Vec2BertModel", "deberta": "DebertaForSequenceClassification"}
KINDS = {"granite_speech": "GraniteSpeechForConditionalGeneration", "deberta": "DebertaForMaskedLM", "wav2vec2-conformer": "Wav2Vec2ConformerForCTC", "wav2vec2-bert": "Wav2Vec2BertForCTC", "parakeet_ctc": "ParakeetForCTC", "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration", "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_asr": "Qwen3ASRForConditionalGeneration", "qwen2_5_vl_text": "Qwen2_5_VLTextModel", "qwen3_vl_text": "Qwen3VLTextModel", "swinv2": "Swinv2ForImageClassification", "donut-swin": "DonutSwinForImageClassification", "dinov3_convnext": "DINOv3ConvNextModel", "glmasr": "GlmAsrForConditionalGeneration", "musicflamingo": "MusicFlamingoForConditionalGeneration", "vit_mae": "ViTMAEForPreTraining", **{name: f"{stem}ForCTC" for name, stem in CTC.items()}, **{name: f"{stem}ForImageClassification" for name, stem in {"dinov2_with_registers": "Dinov2WithRegisters", "vit_msn": "ViTMSN", "ijepa": "IJepa", "beit": "Beit", "data2vec-vision": "Data2VecVision", "swin": "Swin", "convnext": "ConvNext", "convnextv2": "ConvNextV2"}.items()},
         "instructblip": "InstructBlipForConditionalGeneration", "instructblipvideo": "InstructBlipVideoForConditionalGeneration", "blip-2": "Blip2ForConditionalGeneration", "audioflamingo3": "AudioFlamingo3ForConditionalGeneration", "siglip_text_model": "SiglipTextModel", "siglip2_text_model": "Siglip2TextModel", "clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model", "dinov3_vit": "DINOv3ViTModel", "siglip_vision_model": "SiglipVisionModel", "whisper": "WhisperForConditionalGeneration", "qwen2_audio": "Qwen2AudioForConditionalGeneration", "voxtral": "VoxtralForConditionalGeneration", "clip_text_model": "CLIPTextModel", "clip_vision_model": "CLIPVisionModel", "dinov2": "Dinov2Model", "vit": "ViTForImageClassification", "deit": "DeiTForImageClassification", "shieldgemma2": "ShieldGemma2ForImageClassification"}


def write(name, config, kind, rows):
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    config.architectures = [kind]
    values = json.loads(config.to_json_string(use_diff=False))
    keep = {k: v for k, v in values.items() if not k.startswith("_") or k == "_sliding_window_pattern"}
    file = f"{name}.json" if name.startswith(("default--", "published--")) else f"tiny--{name}.json"
    (HERE / file).write_text(json.dumps(keep, indent=1, sort_keys=True) + "\n")
    rows[file] = sum(p.numel() for p in model.parameters())


def class_of(model_type, name=""):
    if model_type in KINDS:
        return KINDS[model_type]
    table = transformers.models.auto.modeling_auto
    causal = table.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if model_type not in ("bert", "roberta", "xlm-roberta", "modernbert", *ENCODERS) else table.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if name in SEQ2SEQ:
        causal = table.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if name in WRAPPERS:
        causal = table.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return causal.get(model_type) or table.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]


rows = {}
asked = sys.argv[1:]
for name, values in CASES.items():
    if asked and name not in asked:
        continue
    model_type = re.sub(r"-(parallel|classes|pairs|layers|equal-keys|keys|groups|latent|siglip|only-sound|sound)$", "", name)
    config = AutoConfig.for_model(model_type, **values)
    kind = class_of(model_type, name)
    write(name, config, kind, rows)
    if name in HEADS:
        config = AutoConfig.for_model(model_type, **(values | dict(num_labels=5)))
        write(f"{name}-head", config, HEADS[name], rows)
    if name in DEFAULTS:
        write(f"default--{name}", AutoConfig.for_model(model_type), kind, rows)
for name, (model_type, values) in PUBLISHED.items():
    if not asked or name in asked:
        write(f"published--{name}", AutoConfig.for_model(model_type, **values), class_of(model_type), rows)
path = HERE / "parameters.csv"
lines = path.read_text().splitlines()
made = ("default--", "published--", "tiny--")
kept = [line for line in lines if not line.startswith(made) or (asked and line.split(",")[0] not in rows)]
if asked:
    first = next(i for i, line in enumerate(kept) if line.startswith(made))
    rows.update((line.split(",")[0], int(line.split(",")[1])) for line in kept[first:])
    kept = kept[:first]
path.write_text("\n".join(kept + [f"{k},{v}" for k, v in sorted(rows.items())]) + "\n")
for k, v in rows.items():
    print(k, v)
