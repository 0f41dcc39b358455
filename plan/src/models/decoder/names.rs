//! Names of a decoder's modules in files of transformers, by `model_type`.

use crate::config::{Model, Residual};

/// Names of one type. Those of modules that the type does not have do not matter.
#[derive(Clone, Copy)]
pub(super) struct Names {
    /// Table of tokens.
    pub(super) embedding: &'static str,
    /// Table of positions.
    pub(super) positions: &'static str,
    /// Table of token types.
    pub(super) token_types: &'static str,
    /// Norm of the embedded tokens.
    pub(super) embedding_norm: &'static str,
    /// List of blocks.
    pub(super) blocks: &'static str,
    /// Last norm.
    pub(super) norm: &'static str,
    /// Output layer.
    pub(super) head: &'static str,
    /// Within a block: projections of queries, keys and values.
    pub(super) q: &'static str,
    pub(super) k: &'static str,
    pub(super) v: &'static str,
    /// The three as one.
    pub(super) qkv: &'static str,
    /// Output projection of attention.
    pub(super) o: &'static str,
    /// Sinks of the softmax of attention.
    pub(super) sinks: &'static str,
    /// Norms of queries and keys. A `.*` at the end stands for a list with one norm per head.
    pub(super) q_norm: &'static str,
    pub(super) k_norm: &'static str,
    /// Projections of the feed-forward layer; `up` is the first one of those without a gate.
    pub(super) gate: &'static str,
    pub(super) up: &'static str,
    /// The two as one.
    pub(super) gate_up: &'static str,
    pub(super) down: &'static str,
    /// Router of experts.
    pub(super) router: &'static str,
    /// Module that has the bias of scores ([`ROUTER_BIAS`]); empty if `exec` does not read it.
    pub(super) router_bias: &'static str,
    /// List of experts.
    pub(super) experts: &'static str,
    /// Layers of an expert whose weights form the stack of gates and their other factors.
    pub(super) expert_gate_up: &'static [&'static str],
    pub(super) expert_down: &'static [&'static str],
    pub(super) expert_stacks: Stacks,
    pub(super) shared_expert: &'static str,
    pub(super) shared_expert_gate: &'static str,
    /// Input norm of attention.
    pub(super) attention_norm: &'static str,
    /// Output norm of attention.
    pub(super) attention_post_norm: &'static str,
    /// Input norm of the feed-forward layer.
    pub(super) mlp_norm: &'static str,
    /// Output norm of the feed-forward layer.
    pub(super) mlp_post_norm: &'static str,
    /// Layer before the logits of masked positions.
    pub(super) transform: &'static str,
    pub(super) transform_norm: &'static str,
    /// Layer that pools the first position to one vector.
    pub(super) pooler: &'static str,
}

/// Tensors that have the matrices of all experts in files: one with gates and other factors, and
/// one with results.
#[derive(Clone, Copy)]
pub(super) enum Stacks {
    /// None: experts are modules of their own.
    None,
    /// Layers, whose weights lie as those of the model.
    Layers([&'static str; 2]),
    /// Parameters, `[experts, in, out]`. Biases have these names with `_bias`.
    Parameters {
        names: [&'static str; 2],
        /// Columns of gates and of other factors alternate; otherwise, those of gates come first.
        interleaved: bool,
    },
}

/// Name of the tensor that a router adds to its scores before it chooses experts.
pub(super) const ROUTER_BIAS: &str = "e_score_correction_bias";

const LLAMA: Names = Names {
    embedding: "model.embed_tokens",
    positions: "model.embed_positions",
    token_types: "model.embed_token_types",
    embedding_norm: "model.embed_norm",
    blocks: "model.layers",
    norm: "model.norm",
    head: "lm_head",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    qkv: "self_attn.qkv_proj",
    o: "self_attn.o_proj",
    sinks: "self_attn.sinks",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    gate_up: "mlp.gate_up_proj",
    down: "mlp.down_proj",
    router: "mlp.gate",
    router_bias: "",
    experts: "mlp.experts",
    expert_gate_up: &["gate_proj", "up_proj"],
    expert_down: &["down_proj"],
    expert_stacks: Stacks::None,
    shared_expert: "mlp.shared_expert",
    shared_expert_gate: "mlp.shared_expert_gate",
    attention_norm: "input_layernorm",
    attention_post_norm: "post_attention_layernorm",
    mlp_norm: "post_attention_layernorm",
    mlp_post_norm: "post_feedforward_layernorm",
    transform: "head.dense",
    transform_norm: "head.norm",
    pooler: "pooler.dense",
};

const BERT: Names = Names {
    embedding: "bert.embeddings.word_embeddings",
    positions: "bert.embeddings.position_embeddings",
    token_types: "bert.embeddings.token_type_embeddings",
    embedding_norm: "bert.embeddings.LayerNorm",
    blocks: "bert.encoder.layer",
    head: "cls.predictions.decoder",
    q: "attention.self.query",
    k: "attention.self.key",
    v: "attention.self.value",
    o: "attention.output.dense",
    up: "intermediate.dense",
    down: "output.dense",
    attention_norm: "attention.output.LayerNorm",
    mlp_norm: "output.LayerNorm",
    transform: "cls.predictions.transform.dense",
    transform_norm: "cls.predictions.transform.LayerNorm",
    pooler: "bert.pooler.dense",
    ..LLAMA
};

/// Names of a type whose modules lie in `transformer.h`.
const GPT: Names = Names {
    embedding: "transformer.wte",
    positions: "transformer.wpe",
    blocks: "transformer.h",
    norm: "transformer.ln_f",
    qkv: "attn.c_attn",
    o: "attn.c_proj",
    up: "mlp.c_fc",
    down: "mlp.c_proj",
    attention_norm: "ln_1",
    mlp_norm: "ln_2",
    ..LLAMA
};

/// Names of a type whose blocks are those of OPT.
const OPT_LAYERS: Names = Names {
    o: "self_attn.out_proj",
    up: "fc1",
    down: "fc2",
    attention_norm: "self_attn_layer_norm",
    mlp_norm: "final_layer_norm",
    ..LLAMA
};

/// Returns the names of a model's type; without one, and for types that are not listed, those of
/// Llama.
pub(super) fn of(m: &Model) -> Names {
    let model_type = m.options.model_type.as_deref().unwrap_or_default();
    let names = [llama_like, experts, gpt, merged, opt, encoders, others]
        .into_iter()
        .find_map(|names| names(model_type))
        .unwrap_or(LLAMA);
    if model_type == "falcon" && m.options.residual == Residual::Parallel {
        return Names {
            attention_norm: "ln_attn",
            mlp_norm: "ln_mlp",
            ..names
        };
    }
    names
}

/// Returns the names of decoders with Llama's modules, of which some have other names.
fn llama_like(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "gemma2" | "gemma3_text" | "vaultgemma" => Names {
            mlp_norm: "pre_feedforward_layernorm",
            ..LLAMA
        },
        "hyperclovax" => Names {
            attention_post_norm: "post_norm1",
            mlp_post_norm: "post_norm2",
            ..LLAMA
        },
        "apertus" => Names {
            attention_norm: "attention_layernorm",
            mlp_norm: "feedforward_layernorm",
            ..LLAMA
        },
        "nanochat" => Names {
            up: "mlp.fc1",
            down: "mlp.fc2",
            ..LLAMA
        },
        "glm4" | "glm4v_text" | "glm_ocr_text" => Names {
            attention_post_norm: "post_self_attn_layernorm",
            mlp_post_norm: "post_mlp_layernorm",
            ..LLAMA
        },
        "phi" => Names {
            norm: "model.final_layernorm",
            o: "self_attn.dense",
            q_norm: "self_attn.q_layernorm",
            k_norm: "self_attn.k_layernorm",
            up: "mlp.fc1",
            down: "mlp.fc2",
            ..LLAMA
        },
        "stablelm" => Names {
            q_norm: "self_attn.q_layernorm.norms.*",
            k_norm: "self_attn.k_layernorm.norms.*",
            ..LLAMA
        },
        "starcoder2" => Names {
            up: "mlp.c_fc",
            down: "mlp.c_proj",
            ..LLAMA
        },
        "internlm2" => Names {
            embedding: "model.tok_embeddings",
            head: "output",
            qkv: "attention.wqkv",
            o: "attention.wo",
            gate: "feed_forward.w1",
            up: "feed_forward.w3",
            down: "feed_forward.w2",
            attention_norm: "attention_norm",
            mlp_norm: "ffn_norm",
            ..LLAMA
        },
        "hunyuan_v1_dense" => Names {
            q_norm: "self_attn.query_layernorm",
            k_norm: "self_attn.key_layernorm",
            ..LLAMA
        },
        _ => return None,
    })
}

/// Returns the names of decoders with experts.
fn experts(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "mixtral" | "phimoe" => Names {
            router: "block_sparse_moe.gate",
            experts: "block_sparse_moe.experts",
            expert_gate_up: &["w1", "w3"],
            expert_down: &["w2"],
            ..LLAMA
        },
        "deepseek" | "deepseek_v2" | "sarvam_mla" => Names {
            shared_expert: "mlp.shared_experts",
            ..LLAMA
        },
        "deepseek_v3" | "kimi_k2" | "glm4_moe" | "dots1" | "glm4v_moe_text" | "glm4_moe_lite"
        | "glm_moe_dsa" | "solar_open" => Names {
            router_bias: "mlp.gate",
            shared_expert: "mlp.shared_experts",
            ..LLAMA
        },
        "exaone_moe" => Names {
            router_bias: "mlp",
            shared_expert: "mlp.shared_experts",
            ..LLAMA
        },
        "minimax_m2" => Names {
            router: "block_sparse_moe.gate",
            router_bias: "block_sparse_moe",
            experts: "block_sparse_moe.experts",
            expert_gate_up: &["w1", "w3"],
            expert_down: &["w2"],
            ..LLAMA
        },
        "flint" => Names {
            sinks: "self_attn.softmax_offset",
            ..LLAMA
        },
        "gpt_oss" => Names {
            router: "mlp.router",
            expert_stacks: Stacks::Parameters {
                names: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                interleaved: true,
            },
            ..LLAMA
        },
        "llama4_text" => Names {
            gate: "feed_forward.gate_proj",
            up: "feed_forward.up_proj",
            down: "feed_forward.down_proj",
            router: "feed_forward.router",
            expert_stacks: Stacks::Parameters {
                names: [
                    "feed_forward.experts.gate_up_proj",
                    "feed_forward.experts.down_proj",
                ],
                interleaved: false,
            },
            shared_expert: "feed_forward.shared_expert",
            ..LLAMA
        },
        "granitemoe" | "granitemoeshared" => Names {
            router: "block_sparse_moe.router.layer",
            expert_stacks: Stacks::Layers([
                "block_sparse_moe.input_linear",
                "block_sparse_moe.output_linear",
            ]),
            ..LLAMA
        },
        "hy_v3" => Names {
            router: "mlp.router.gate",
            shared_expert: "mlp.shared_mlp",
            ..LLAMA
        },
        "dbrx" => Names {
            embedding: "transformer.wte",
            blocks: "transformer.blocks",
            norm: "transformer.norm_f",
            qkv: "norm_attn_norm.attn.Wqkv",
            o: "norm_attn_norm.attn.out_proj",
            attention_norm: "norm_attn_norm.norm_1",
            mlp_norm: "norm_attn_norm.norm_2",
            router: "ffn.router.layer",
            experts: "ffn.experts.mlp",
            ..LLAMA
        },
        "aria_text" => Names {
            router: "mlp.router",
            shared_expert: "mlp.shared_experts",
            ..LLAMA
        },
        "kolibri1" => Names {
            attention_post_norm: "post_attn_norm",
            mlp_post_norm: "post_ffn_norm",
            shared_expert: "mlp.shared_experts",
            ..LLAMA
        },
        "hunyuan_v1_moe" => Names {
            q_norm: "self_attn.query_layernorm",
            k_norm: "self_attn.key_layernorm",
            router: "mlp.gate.wg",
            shared_expert: "mlp.shared_mlp",
            ..LLAMA
        },
        _ => return None,
    })
}

/// Returns the names of decoders with GPT-2's modules.
fn gpt(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "phi-msft" => Names {
            embedding: "transformer.embd.wte",
            norm: "lm_head.ln",
            head: "lm_head.linear",
            qkv: "mixer.Wqkv",
            o: "mixer.out_proj",
            up: "mlp.fc1",
            down: "mlp.fc2",
            attention_norm: "ln",
            ..GPT
        },
        "gptj" => Names {
            q: "attn.q_proj",
            k: "attn.k_proj",
            v: "attn.v_proj",
            o: "attn.out_proj",
            up: "mlp.fc_in",
            down: "mlp.fc_out",
            ..GPT
        },
        "gpt_bigcode" => GPT,
        "gpt_neo" => Names {
            q: "attn.attention.q_proj",
            k: "attn.attention.k_proj",
            v: "attn.attention.v_proj",
            o: "attn.attention.out_proj",
            ..GPT
        },
        "codegen" => Names {
            qkv: "attn.qkv_proj",
            o: "attn.out_proj",
            up: "mlp.fc_in",
            down: "mlp.fc_out",
            ..GPT
        },
        "qwen" => Names {
            gate: "mlp.w2",
            up: "mlp.w1",
            down: "mlp.c_proj",
            ..GPT
        },
        "exaone" => Names {
            q: "attn.attention.q_proj",
            k: "attn.attention.k_proj",
            v: "attn.attention.v_proj",
            o: "attn.attention.out_proj",
            gate: "mlp.c_fc_0",
            up: "mlp.c_fc_1",
            down: "mlp.c_proj",
            ..GPT
        },
        "openai-gpt" => Names {
            embedding: "transformer.tokens_embed",
            positions: "transformer.positions_embed",
            ..GPT
        },
        _ => return None,
    })
}

/// Returns the names of decoders that project queries, keys and values by one layer.
fn merged(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "persimmon" => Names {
            norm: "model.final_layernorm",
            qkv: "self_attn.query_key_value",
            o: "self_attn.dense",
            q_norm: "self_attn.q_layernorm",
            k_norm: "self_attn.k_layernorm",
            up: "mlp.dense_h_to_4h",
            down: "mlp.dense_4h_to_h",
            ..LLAMA
        },
        "bloom" => Names {
            embedding: "transformer.word_embeddings",
            embedding_norm: "transformer.word_embeddings_layernorm",
            qkv: "self_attention.query_key_value",
            o: "self_attention.dense",
            up: "mlp.dense_h_to_4h",
            down: "mlp.dense_4h_to_h",
            attention_norm: "input_layernorm",
            mlp_norm: "post_attention_layernorm",
            ..GPT
        },
        "falcon" | "falcon_alibi" => Names {
            embedding: "transformer.word_embeddings",
            qkv: "self_attention.query_key_value",
            o: "self_attention.dense",
            up: "mlp.dense_h_to_4h",
            down: "mlp.dense_4h_to_h",
            attention_norm: "input_layernorm",
            mlp_norm: "post_attention_layernorm",
            ..GPT
        },
        "mpt" => Names {
            blocks: "transformer.blocks",
            norm: "transformer.norm_f",
            qkv: "attn.Wqkv",
            o: "attn.out_proj",
            up: "ffn.up_proj",
            down: "ffn.down_proj",
            attention_norm: "norm_1",
            mlp_norm: "norm_2",
            ..GPT
        },
        "baichuan" => Names {
            qkv: "self_attn.W_pack",
            ..LLAMA
        },
        "chatglm" => Names {
            embedding: "transformer.embedding.word_embeddings",
            blocks: "transformer.encoder.layers",
            norm: "transformer.encoder.final_layernorm",
            head: "transformer.output_layer",
            qkv: "self_attention.query_key_value",
            o: "self_attention.dense",
            gate_up: "mlp.dense_h_to_4h",
            down: "mlp.dense_4h_to_h",
            ..LLAMA
        },
        _ => return None,
    })
}

/// Returns the names of decoders with OPT's blocks.
fn opt(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "biogpt" => Names {
            embedding: "biogpt.embed_tokens",
            positions: "biogpt.embed_positions",
            blocks: "biogpt.layers",
            norm: "biogpt.layer_norm",
            head: "output_projection",
            ..OPT_LAYERS
        },
        "xglm" => Names {
            norm: "model.layer_norm",
            ..OPT_LAYERS
        },
        "whisper" => Names {
            embedding: "model.decoder.embed_tokens",
            positions: "model.decoder.embed_positions",
            blocks: "model.decoder.layers",
            norm: "model.decoder.layer_norm",
            head: "proj_out",
            ..OPT_LAYERS
        },
        "opt" => Names {
            embedding: "model.decoder.embed_tokens",
            positions: "model.decoder.embed_positions",
            blocks: "model.decoder.layers",
            norm: "model.decoder.final_layer_norm",
            ..OPT_LAYERS
        },
        _ => return None,
    })
}

/// Returns the names of encoders with BERT's modules.
fn encoders(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "bert" => BERT,
        "albert" => Names {
            embedding: "albert.embeddings.word_embeddings",
            positions: "albert.embeddings.position_embeddings",
            token_types: "albert.embeddings.token_type_embeddings",
            embedding_norm: "albert.embeddings.LayerNorm",
            blocks: "albert.encoder.albert_layer_groups.0.albert_layers",
            head: "predictions.decoder",
            q: "attention.query",
            k: "attention.key",
            v: "attention.value",
            o: "attention.dense",
            up: "ffn",
            down: "ffn_output",
            attention_norm: "attention.LayerNorm",
            mlp_norm: "full_layer_layer_norm",
            transform: "predictions.dense",
            transform_norm: "predictions.LayerNorm",
            pooler: "albert.pooler",
            ..BERT
        },
        "longformer" => Names {
            embedding: "longformer.embeddings.word_embeddings",
            positions: "longformer.embeddings.position_embeddings",
            token_types: "longformer.embeddings.token_type_embeddings",
            embedding_norm: "longformer.embeddings.LayerNorm",
            blocks: "longformer.encoder.layer",
            head: "lm_head.decoder",
            transform: "lm_head.dense",
            transform_norm: "lm_head.layer_norm",
            pooler: "longformer.pooler.dense",
            ..BERT
        },
        "roberta" | "xlm-roberta" | "camembert" => Names {
            embedding: "roberta.embeddings.word_embeddings",
            positions: "roberta.embeddings.position_embeddings",
            token_types: "roberta.embeddings.token_type_embeddings",
            embedding_norm: "roberta.embeddings.LayerNorm",
            blocks: "roberta.encoder.layer",
            head: "lm_head.decoder",
            transform: "lm_head.dense",
            transform_norm: "lm_head.layer_norm",
            pooler: "roberta.pooler.dense",
            ..BERT
        },
        _ => return None,
    })
}

/// Returns the names of encoder-decoder and recurrent models, and of ModernBERT.
fn others(model_type: &str) -> Option<Names> {
    Some(match model_type {
        "rwkv" => Names {
            embedding: "rwkv.embeddings",
            embedding_norm: "rwkv.blocks.0.pre_ln",
            blocks: "rwkv.blocks",
            norm: "rwkv.ln_out",
            head: "head",
            ..LLAMA
        },
        "rwkv7" => Names {
            embedding: "model.embeddings",
            embedding_norm: "model.layers.0.pre_norm",
            ..LLAMA
        },
        "t5" | "mt5" => Names {
            embedding: "shared",
            blocks: "decoder.block",
            norm: "decoder.final_layer_norm",
            q: "layer.0.SelfAttention.q",
            k: "layer.0.SelfAttention.k",
            v: "layer.0.SelfAttention.v",
            o: "layer.0.SelfAttention.o",
            attention_norm: "layer.0.layer_norm",
            ..LLAMA
        },
        "modernbert-decoder" => Names {
            embedding: "model.embeddings.tok_embeddings",
            embedding_norm: "model.embeddings.norm",
            norm: "model.final_norm",
            head: "decoder",
            q: "attn.q_proj",
            k: "attn.k_proj",
            v: "attn.v_proj",
            o: "attn.Wo",
            gate_up: "mlp.Wi",
            down: "mlp.Wo",
            attention_norm: "attn_norm",
            mlp_norm: "mlp_norm",
            transform: "lm_head.dense",
            transform_norm: "lm_head.norm",
            ..LLAMA
        },
        "modernbert" => Names {
            embedding: "model.embeddings.tok_embeddings",
            embedding_norm: "model.embeddings.norm",
            norm: "model.final_norm",
            head: "decoder",
            qkv: "attn.Wqkv",
            o: "attn.Wo",
            gate_up: "mlp.Wi",
            down: "mlp.Wo",
            attention_norm: "attn_norm",
            mlp_norm: "mlp_norm",
            transform: "head.dense",
            transform_norm: "head.norm",
            ..LLAMA
        },
        _ => return None,
    })
}
