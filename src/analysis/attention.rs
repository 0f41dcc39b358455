//! The other implementations of attention that a model of transformers can use.

use shardlab_plan::Scenario;
use shardlab_plan::config::{
    AttentionSinks, AttnImplementation, Implementation, Model, PositionEmbedding,
};
use shardlab_plan::ir::DType;

/// Key of the implementation. All of them compute the same attention.
pub(crate) const ATTENTION: &str = "model.attn_implementation";

/// Largest head that the kernels of flash-attn support.
const MAX_HEAD_DIM: u64 = 256;

/// Returns the names of the other implementations that compute the same attention; none for code
/// that is not that of transformers.
pub(crate) fn implementations(base: &Scenario) -> Vec<&'static str> {
    use AttnImplementation::{Eager, FlashAttention2, Sdpa};
    if base.implementation() != Implementation::Transformers {
        return Vec::new();
    }
    let own = base.model.options.attn_implementation;
    let others = [Sdpa, Eager, FlashAttention2].into_iter();
    let others = others.filter(|other| *other != own && supports(base, *other));
    others.map(AttnImplementation::name).collect()
}

/// Returns whether an implementation supports the attention of a model, as transformers declares it
/// (`_supports_sdpa`, `_supports_flash_attn`) or flash-attn documents it.
fn supports(base: &Scenario, implementation: AttnImplementation) -> bool {
    let of = &base.model.options;
    match implementation {
        AttnImplementation::Eager => true,
        // `scaled_dot_product_attention` has arguments for neither.
        AttnImplementation::Sdpa => {
            of.attention.attention_softcap.is_none()
                && of.attention.attention_sinks == AttentionSinks::None
        }
        AttnImplementation::FlashAttention2 => {
            let is_half = matches!(base.precision.compute, DType::Bf16 | DType::F16);
            let is_gpu = !base.mesh.hardware.starts_with("cpu");
            is_half && is_gpu && is_plain(&base.model)
        }
    }
}

/// Returns whether flash-attn supports the scores and heads of a model: no summand that differs
/// from pair to pair, no sink, and no choice of positions other than a window.
fn is_plain(model: &Model) -> bool {
    let of = &model.options;
    let summand = of.positions.position_embedding == PositionEmbedding::Alibi
        || of.positions.relative_buckets > 0
        || of.positions.disentangled_rows > 0;
    let chosen = of.layers.attention_chunk.is_some()
        || of.latent.index_n_heads > 0
        || of.attention.output_groups > 0
        // Their attention needs masks: patches of an image see each other.
        || of.context.vision.is_some()
        || of.context.audio.is_some();
    let widest = [Some(model.head_dim), of.attention.full_head_dim];
    let widest = widest.into_iter().flatten().max().unwrap_or(0);
    !summand
        && !chosen
        && of.attention.attention_sinks == AttentionSinks::None
        && widest <= MAX_HEAD_DIM
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario;

    fn of(model: &str, set: &[&str]) -> Vec<&'static str> {
        let text = format!(
            "model = {{ preset = \"{model}\", implementation = \"transformers\" }}\n\
             train = {{ seq_len = 2048 }}\n\
             mesh = {{ dp_shard = 8, hardware = \"h100-80\" }}\n\
             fsdp = {{ policy = \"fsdp2\" }}\n"
        );
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let base = scenario::parse("job", &text, &set).unwrap();
        let all = implementations(&base);
        for name in &all {
            let other = [format!("{ATTENTION}={name}")];
            scenario::parse("job", &text, &[&set[..], &other].concat()).unwrap();
        }
        all
    }

    /// The expectations are those of transformers 5: `_supports_sdpa` and `_supports_flash_attn` of
    /// each type, and the types that flash-attn accepts.
    #[test]
    fn implementations_are_tried_where_they_compute_the_same() {
        assert_eq!(of("llama2-7b", &[]), ["eager", "flash_attention_2"]);
        let eager = "model.attn_implementation=eager";
        assert_eq!(of("llama2-7b", &[eager]), ["sdpa", "flash_attention_2"]);
        let flash = "model.attn_implementation=flash_attention_2";
        assert_eq!(of("llama2-7b", &[flash]), ["sdpa", "eager"]);
        // Parameters in float32 are not cast.
        let full = [eager, "precision.param_dtype=f32"];
        assert_eq!(of("llama2-7b", &full), ["sdpa"]);
        assert_eq!(of("llama2-7b", &[eager, "mesh.hardware=cpu"]), ["sdpa"]);
        // gpt-oss has sinks, for which neither has an argument.
        assert_eq!(of("gpt-oss-20b", &[eager]), [""; 0]);
    }

    #[test]
    fn other_code_has_one_implementation() {
        let base = scenario::load("small-fsdp2".as_ref(), &[]).unwrap();
        assert!(implementations(&base).is_empty());
    }
}
