//! Rules for embeddings and output layers.

use crate::config::{Family, Head, Model, NormPosition, PackedQkv, Residual};
use crate::models::spec::Conflict;

/// Refuses what only decoders of certain blocks have at their ends.
pub(super) fn check_ends(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let decodes = matches!(m.family, Family::Decoder | Family::Moe);
    let plain = decodes && o.residual == Residual::Sequential && o.streams == 0;
    let blocks = plain || m.family == Family::Bert && o.residual == Residual::Sequential;
    let first = blocks && m.layer_type(0).is_attention();
    if o.plain_first_block && !(first && o.norm_position == NormPosition::Before) {
        let message = "`plain_first_block` needs blocks of which the first one has attention, with `residual` = \"sequential\" and `norm_position` = \"before\"";
        let keys = &[
            "plain_first_block",
            "residual",
            "norm_position",
            "layer_types",
        ];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.stream_scale && (!plain || o.per_layer.altup.is_some()) {
        let message = "`stream_scale` needs a decoder with `residual` = \"sequential\" and one residual stream";
        let keys = &["stream_scale", "residual", "streams", "altup"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let known = matches!(
        o.output.head,
        Head::LanguageModel | Head::SequenceClassification | Head::None
    );
    if o.embedding.rotary_table && (!o.positions.position_embedding.rotates() || o.latent.is_used())
    {
        let message = "`rotary_table` needs a rotary embedding of whole heads";
        let keys = &["rotary_table", "position_embedding", "kv_lora_rank"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.output.output_transform && (!decodes || !known || o.embedding.embedding_width.is_some()) {
        let message = "`output_transform` needs a decoder with a language-model or \
                       sequence-classification head and no `embedding_width`";
        let keys = &["output_transform", "head", "family", "embedding_width"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses output layers that the family, its attention or its tower does not have.
pub(super) fn check_heads(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.output.head == Head::Pretraining && (m.family != Family::Bert || !o.output.head_transform)
    {
        let message =
            "`head` = \"pretraining\" is one of encoders of family bert, with `head_transform`";
        let keys = &["head", "family", "head_transform"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let separate = o.attention.packed_qkv == PackedQkv::None && !o.latent.is_used();
    if o.attention.global_projections && (m.family != Family::Bert || !separate) {
        let message =
            "`global_projections` are those of encoders of family bert, with separate projections";
        let keys = &["global_projections", "family", "packed_qkv"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.output.head == Head::Contrastive && o.context.vision.as_ref().is_none_or(|of| of.memory) {
        let message = "`head` = \"contrastive\" compares texts with images of a tower: `vision`, without `memory`";
        return Err(Conflict::new(&["head", "vision"], message.to_owned()));
    }
    let vector = o.context.vision.as_ref().is_some_and(|of| of.vector);
    if vector != (o.output.head == Head::Contrastive) {
        let message = "`vision` with `vector` and `head` = \"contrastive\" need each other";
        return Err(Conflict::new(&["head", "vision"], message.to_owned()));
    }
    Ok(())
}
