"""Tiny configurations of types of transformers, and the number of parameters of their classes on torch's meta device.

    python make.py            (with torch 2.11 and transformers 5.17)
"""
import json, pathlib, re, torch, transformers
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
CASES = {
    **EXPERTS,
    "arcee": dict(LLAMA), "cohere": dict(LLAMA, use_qk_norm=True), "cohere2": dict(LLAMA, num_hidden_layers=5),
    "ernie4_5": dict(LLAMA, use_bias=True), "exaone4": dict(LLAMA, num_hidden_layers=5), "gemma": dict(LLAMA, head_dim=32),
    "gemma2": dict(LLAMA, head_dim=32), "gemma3_text": dict(LLAMA, head_dim=32, num_hidden_layers=7), "glm": dict(LLAMA, head_dim=16, attention_bias=True, pad_token_id=0),
    "glm4": dict(LLAMA, head_dim=16, pad_token_id=0), "hunyuan_v1_dense": dict(LLAMA, attention_bias=True, head_dim=16), "mistral": dict(LLAMA, head_dim=24, sliding_window=16),
    "nemotron": dict(LLAMA, attention_bias=True, mlp_bias=True), "olmo": dict(LLAMA), "olmo2": dict(LLAMA), "olmo3": dict(LLAMA, num_hidden_layers=5),
    "phi3": dict(LLAMA, pad_token_id=0), "qwen3": dict(LLAMA, attention_bias=True), "seed_oss": dict(LLAMA, head_dim=24), "smollm3": dict(LLAMA, num_hidden_layers=5, pad_token_id=0),
    "stablelm": dict(LLAMA, qk_layernorm=True, use_qkv_bias=True), "stablelm-parallel": dict(LLAMA, use_parallel_residual=True), "starcoder2": dict(LLAMA),
    "phi": dict(LLAMA, qk_layernorm=True), "gptj": dict(GPT, rotary_dim=8), "gpt_bigcode": dict(GPT), "gpt_bigcode-keys": dict(GPT, multi_query=False),
    "opt": dict(vocab_size=256, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=96, word_embed_proj_dim=64),
    "bloom": dict(vocab_size=256, hidden_size=64, n_layer=3, n_head=4), "mpt": dict(d_model=64, n_heads=4, n_layers=3, vocab_size=256),
    "falcon": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=False),
    "falcon-groups": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, bias=True),
    "falcon-keys": dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, multi_query=False, parallel_attn=False, bias=True),
    "bert": dict(BERT), "roberta": dict(BERT), "xlm-roberta": dict(BERT), "modernbert": dict(BERT, num_hidden_layers=5, pad_token_id=0),
    "llama": dict(LLAMA, attention_bias=True), "granite": dict(LLAMA, mlp_bias=True), "gpt_neox": dict(BERT),
}
HEADS = {"llama": "LlamaForSequenceClassification", "qwen3": "Qwen3Model", "gemma2": "Gemma2ForTokenClassification", "bert": "BertForSequenceClassification", "roberta": "RobertaForTokenClassification",
         "mistral": "MistralForSequenceClassification"}


def write(name, config, kind, rows):
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    config.architectures = [kind]
    values = json.loads(config.to_json_string(use_diff=False))
    keep = {k: v for k, v in values.items() if not k.startswith("_") or k == "_sliding_window_pattern"}
    (HERE / f"tiny--{name}.json").write_text(json.dumps(keep, indent=1, sort_keys=True) + "\n")
    rows[f"tiny--{name}.json"] = sum(p.numel() for p in model.parameters())


rows = {}
for name, values in CASES.items():
    model_type = re.sub(r"-(parallel|keys|groups)$", "", name)
    config = AutoConfig.for_model(model_type, **values)
    table = transformers.models.auto.modeling_auto
    causal = table.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if model_type not in ("bert", "roberta", "xlm-roberta", "modernbert") else table.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    write(name, config, causal[model_type], rows)
    if name in HEADS:
        config = AutoConfig.for_model(model_type, **values, num_labels=5)
        write(f"{name}-head", config, HEADS[name], rows)
path = HERE / "parameters.csv"
kept = [line for line in path.read_text().splitlines() if not line.startswith("tiny--")]
path.write_text("\n".join(kept + [f"{k},{v}" for k, v in sorted(rows.items())]) + "\n")
for k, v in rows.items():
    print(k, v)
