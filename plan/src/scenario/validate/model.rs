//! Rules for `[model]`.

use super::Checked;
use crate::config::{Conformer, Family, Head, LayerType, Loss, ProjectorNorm, Scenario, Vision};
use crate::names::nearest;
use crate::scenario::keys::{Key, families};
use crate::scenario::merge::Document;

/// Most convolutions that halve the frames of a sound one after the other.
const MAX_HALVINGS: usize = 8;

/// Refuses keys of `[model]` that do not apply to the family: silence would hide a mistake.
pub(super) fn unused_keys(s: &Scenario, d: &Document) -> Checked {
    let family = s.model.family;
    let unlisted = |key: &Key| d.says(*key) && !family.spec().has(key.info().key);
    for key in Key::of_section("model").filter(unlisted) {
        let of = families(key.info());
        if of.is_empty() {
            continue;
        }
        let message = format!(
            "`{}` does not apply to family {}",
            key.path(),
            family.name()
        );
        return Err(d
            .conflict(&[key], message)
            .with_help(format!("it belongs to {}", of.join(", "))));
    }
    Ok(())
}

/// Refuses shapes that do not fit together, and options that the family refuses.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let m = &s.model;
    if !m.heads.is_multiple_of(m.kv_heads) {
        let message = format!(
            "`heads` ({}) is not divisible by `kv_heads` ({})",
            m.heads, m.kv_heads
        );
        return Err(d.conflict(&[Key::KvHeads, Key::Heads], message));
    }
    model_type(s, d)?;
    output(s, d)?;
    if m.family == Family::Vit && s.train.seq_len != m.max_seq_len {
        let message = format!(
            "an image has {} rows (`max_seq_len`), not {} (`seq_len`)",
            m.max_seq_len, s.train.seq_len
        );
        return Err(d.conflict(&[Key::SeqLen, Key::MaxSeqLen], message));
    }
    towers(s, d)?;
    compressed_keys(s, d)?;
    summaries(s, d)?;
    if m.options.layers.layer_types.contains(&LayerType::Sliding)
        && m.options.layers.sliding_window.is_none()
    {
        let message = "`layer_types` has layers with a window, whose size `sliding_window` gives";
        return Err(d.conflict(&[Key::LayerTypes, Key::SlidingWindow], message));
    }
    (m.family.spec().check)(m).map_err(|c| {
        let keys: Vec<Key> = c
            .keys
            .iter()
            .filter_map(|k| Key::find("model", k))
            .collect();
        let error = d.conflict(&keys, c.message);
        match (c.help, c.nearest) {
            (Some(help), _) => error.with_help(help),
            (None, Some((key, value))) => {
                error.with_help(format!("the nearest legal value is {key} = {value}"))
            }
            (None, None) => error,
        }
    })
}

/// Refuses sequences that are shorter than what one compressed key stands for.
fn compressed_keys(s: &Scenario, d: &Document) -> Checked {
    let rates = &s.model.options.layers.compress_rates;
    let longest = rates.iter().copied().max().unwrap_or_default();
    if longest <= s.train.seq_len {
        return Ok(());
    }
    let message = format!(
        "a compressed key stands for {longest} positions (`compress_rates`), and `seq_len` is {}",
        s.train.seq_len
    );
    let error = d.conflict(&[Key::CompressRates, Key::SeqLen], message);
    Err(error.with_help(format!("set train.seq_len to {longest} or more")))
}

/// Refuses sequences that are shorter than the block of positions that one sum stands for.
fn summaries(s: &Scenario, d: &Document) -> Checked {
    let encoder = s.model.options.context.encoder.as_ref();
    let block = encoder.map_or(0, |of| of.summary_block);
    if block <= s.train.seq_len {
        return Ok(());
    }
    let message = format!(
        "a sum stands for {block} positions (`encoder`: summary_block), and `seq_len` is {}",
        s.train.seq_len
    );
    let error = d.conflict(&[Key::Encoder, Key::SeqLen], message);
    Err(error.with_help(format!("set train.seq_len to {block} or more")))
}

/// Refuses towers whose sizes do not fit, and samples without room for text.
fn towers(s: &Scenario, d: &Document) -> Checked {
    let options = &s.model.options;
    if let Some(of) = &options.context.audio {
        tower(s, d, Key::Audio, of)?;
        let memory = of.memory || options.context.tower_memory().is_some();
        if options.context.vision.is_none()
            || of.vector
            || options.output.head == Head::Contrastive
            || memory
        {
            let message = "`audio` is a second tower: it needs `vision`, and the rows of both replace tokens (no memory, no vector)";
            return Err(d.conflict(&[Key::Audio, Key::Vision], message));
        }
    }
    let Some(of) = &options.context.vision else {
        if options.context.vision_patches.is_none() {
            return Ok(());
        }
        let message = "`vision_patches` needs a tower: there is no `vision`";
        return Err(d.conflict(&[Key::VisionPatches, Key::Vision], message));
    };
    tower(s, d, Key::Vision, of)?;
    if options.context.encoder_layers > 0 {
        let message = "a model with an encoder has no tower";
        return Err(d.conflict(&[Key::Vision, Key::EncoderLayers], message));
    }
    let tokens: u64 = options.context.towers().map(Vision::tokens).sum();
    if of.vector || of.memory || tokens < s.train.seq_len {
        return Ok(());
    }
    let more = match &options.context.audio {
        Some(audio) => format!(" and the {} of a sound (`audio`)", audio.tokens()),
        None => String::new(),
    };
    let message = format!(
        "the {} tokens of an image (`vision`: patches {} / merge {}){more} leave no room for text in {} (`seq_len`)",
        of.tokens(),
        of.input.patches,
        of.projector.merge,
        s.train.seq_len
    );
    Err(d.conflict(&[Key::SeqLen, Key::Vision], message))
}

/// Refuses sizes of a tower that do not fit together or to the language model.
fn tower(s: &Scenario, d: &Document, key: Key, of: &Vision) -> Checked {
    let options = &s.model.options;
    let name = key.info().key;
    let conflict = |keys: &[Key], message: String| Err(d.conflict(keys, message));
    if !of.hidden.is_multiple_of(of.heads) || !(of.hidden / of.heads).is_multiple_of(2) {
        let message = format!(
            "`{name}`: hidden ({}) divided by heads ({}) is not an even number",
            of.hidden, of.heads
        );
        return conflict(&[key], message);
    }
    let whole = !of.projector.pool
        && of.projector.patch_layers.is_empty()
        && matches!(
            of.projector.norm,
            ProjectorNorm::None | ProjectorNorm::Merged | ProjectorNorm::LayerMerged
        );
    if !of.picked.is_empty() && of.input.tile_rows == 0 && of.projector.present && !whole {
        let message = format!(
            "`{name}`: what a projector reads of several blocks (picked) is normalized as a whole (projector_norm merged or layer_merged), and not averaged (pool) or projected before it is merged (patch_layers)"
        );
        return conflict(&[key], message);
    }
    let kv_heads = of.kv_heads.unwrap_or(of.heads);
    if !of.heads.is_multiple_of(kv_heads) {
        let message = format!(
            "`{name}`: heads ({}) is not divisible by kv_heads ({kv_heads})",
            of.heads
        );
        return conflict(&[key], message);
    }
    if !of.input.patches.is_multiple_of(of.projector.merge) {
        let message = format!(
            "`{name}`: patches ({}) is not divisible by merge ({})",
            of.input.patches, of.projector.merge
        );
        return conflict(&[key], message);
    }
    if let Some(by) = &of.input.subsampling {
        let left = by.left(by.chunk).max(1);
        if of.input.mel_bins == 0
            || by.channels.len() > MAX_HALVINGS
            || !of.input.patches.is_multiple_of(left)
        {
            let message = format!(
                "`{name}`: subsampling needs bands (mel_bins), at most {MAX_HALVINGS} convolutions, and patches ({}) that are divisible by the {left} rows of a chunk",
                of.input.patches
            );
            return conflict(&[key], message);
        }
    }
    if let Some(fault) = of.conformer.as_ref().and_then(Conformer::fault) {
        let message = format!("`{name}`: conformer: {fault}");
        return conflict(&[key], message);
    }
    let joins = !of.vector;
    if joins && !of.projector.present && of.latents.count == 0 && of.hidden != s.model.hidden {
        let message = format!(
            "`{name}`: without a projector, hidden ({}) must be that of the language model ({})",
            of.hidden, s.model.hidden
        );
        return conflict(&[key, Key::Hidden], message);
    }
    if of.vector && !of.projector.present && of.hidden != options.output.vector_width {
        let message = format!(
            "`{name}`: without a projector, hidden ({}) must be `vector_width` ({})",
            of.hidden, options.output.vector_width
        );
        return conflict(&[key, Key::VectorWidth], message);
    }
    if of.vector && !of.input.class_token && !of.pooling_head {
        let message = format!("`{name}`: a vector needs a class or attention that pools");
        return conflict(&[key], message);
    }
    let heads = &of.latents.heads;
    let fits = matches!(heads[..], [q, kv, _] if kv > 0 && q.is_multiple_of(kv));
    if of.latents.count > 0 && !fits {
        let message = format!(
            "`{name}`: latent_heads must be heads of queries, heads of keys that divide them, and the dimension of one, not {heads:?}"
        );
        return conflict(&[key], message);
    }
    if of.latents.window > 0 && (of.latents.width == 0 || of.latents.vocab > 0) {
        let message = format!(
            "`{name}`: windows (latent_window) are those of a Q-Former (latent_width) without a text (latent_vocab)"
        );
        return conflict(&[key], message);
    }
    if of.latents.width > 0 && (of.latents.count == 0 || heads[0] != heads[1]) {
        let message = format!(
            "`{name}`: a Q-Former (latent_width) has learned rows (latents) and a key for each query (latent_heads)"
        );
        return conflict(&[key], message);
    }
    Ok(())
}

/// Refuses a `model_type` that the family does not cover.
fn model_type(s: &Scenario, d: &Document) -> Checked {
    let Some(given) = &s.model.options.model_type else {
        return Ok(());
    };
    let family = s.model.family;
    let known: Vec<&str> = family.spec().hf.iter().map(|hf| hf.model_type).collect();
    if known.contains(&given.as_str()) {
        return Ok(());
    }
    let message = format!("family {} has no `model_type` {given:?}", family.name());
    let error = d.conflict(&[Key::ModelType], message);
    let near = nearest(given, known.iter().copied());
    Err(error.with_expected(known.join(" | ")).with_near(near))
}

/// Refuses a chunked loss of logits that it cannot compute.
fn output(s: &Scenario, d: &Document) -> Checked {
    if !s.train.loss.is_chunked() {
        return Ok(());
    }
    let o = &s.model.options;
    let fused = s.train.loss == Loss::Chunked;
    let reason = if o.output.head != Head::LanguageModel {
        Some((
            Key::Head,
            "only a language model has logits to divide into chunks",
        ))
    } else if !fused {
        None
    } else if o.output.logits_softcap.is_some() {
        Some((
            Key::LogitsSoftcap,
            "the chunked loss has no soft limit of logits",
        ))
    } else if o.output.head_bias {
        Some((Key::HeadBias, "the chunked loss has no bias"))
    } else {
        None
    };
    let Some((key, reason)) = reason else {
        return Ok(());
    };
    let loss = s.train.loss.name();
    let message = format!("{reason}: `{}` with loss {loss}", key.info().key);
    let error = d.conflict(&[Key::Loss, key], message);
    Err(error.with_help(match fused && key != Key::Head {
        true => "use train.loss = \"checkpointed_chunks\" or \"materialized\"",
        false => "use train.loss = \"materialized\"",
    }))
}
