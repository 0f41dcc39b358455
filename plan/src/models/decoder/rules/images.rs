//! Rules for encoders of images and sounds.

use crate::config::{Family, Head, ImagePooling, Model, PositionEmbedding, Sound};
use crate::models::spec::Conflict;
use crate::models::stages;

/// Refuses what encoders of images do not have.
pub(in crate::models::decoder) fn check_images(m: &Model) -> Result<(), Conflict> {
    super::check(m)?;
    check_reconstruction(m)?;
    check_sound(m)?;
    check_conformer(m)?;
    stages::check(m)
}

/// Refuses sizes of conformers that do not fit together, and what replaces their parts.
fn check_conformer(m: &Model) -> Result<(), Conflict> {
    let (o, Some(of)) = (&m.options, &m.options.conformer) else {
        return Ok(());
    };
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    if o.image.stages.is_some()
        || o.reconstruction.is_some()
        || o.positions.relative_buckets > 0
        || o.layer_scale
    {
        let message = "`conformer` has blocks of its own: it excludes `stages`, `reconstruction`, `relative_buckets` and `layer_scale`";
        let keys = &["conformer", "stages", "relative_buckets", "layer_scale"];
        return conflict(keys, message.to_owned());
    }
    match of.fault() {
        Some(fault) => conflict(&["conformer"], format!("`conformer`: {fault}")),
        None => Ok(()),
    }
}

/// Refuses decoders of images whose sizes do not fit.
fn check_reconstruction(m: &Model) -> Result<(), Conflict> {
    let (o, Some(of)) = (&m.options, &m.options.reconstruction) else {
        return Ok(());
    };
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    if !of.hidden.is_multiple_of(of.heads) {
        let message = format!(
            "`reconstruction`: hidden ({}) is not divisible by heads ({})",
            of.hidden, of.heads
        );
        return conflict(&["reconstruction"], message);
    }
    if m.max_seq_len < 2 || m.max_seq_len >= of.rows() {
        let message = format!(
            "`reconstruction`: the encoder must see some of the {} patches and the class, not {} rows (`max_seq_len`)",
            of.patches, m.max_seq_len
        );
        return conflict(&["reconstruction", "max_seq_len"], message);
    }
    let plain = o.image.class_token && !o.image.distillation_token && o.image.register_tokens == 0;
    let learned = o.positions.position_embedding == PositionEmbedding::Learned;
    let alone = o.sound.is_none() && o.image.stages.is_none() && !o.image.attention_pooling;
    if !plain || !learned || o.output.head != Head::None || o.output.pooler || !alone {
        let message = "`reconstruction` needs a row of the class alone (`class_token`), `position_embedding` = \"learned\", and no output layer (`head` = \"none\", `pooler` false)";
        let keys = &["reconstruction", "head", "pooler", "position_embedding"];
        return conflict(keys, message.to_owned());
    }
    Ok(())
}

/// Samples of the longest sound.
const MOST_SAMPLES: u64 = 1 << 32;

/// Refuses convolutions over sounds that do not fit together.
fn check_sound(m: &Model) -> Result<(), Conflict> {
    let (o, Some(of)) = (&m.options, &m.options.sound) else {
        return Ok(());
    };
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    let lengths = [of.widths.len(), of.kernels.len(), of.strides.len()];
    if of.bands > 0 {
        check_frames(m, of)?;
    } else if lengths[0] == 0 || lengths != [lengths[0]; 3] {
        let message = format!(
            "`sound`: widths, kernels and strides must have a number for each convolution, not {}, {} and {}",
            lengths[0], lengths[1], lengths[2]
        );
        return conflict(&["sound"], message);
    }
    let samples = of.positions(m.max_seq_len)[0];
    if samples > MOST_SAMPLES {
        let message = format!(
            "`sound`: {} rows need {samples} samples, more than the {MOST_SAMPLES} that are planned",
            m.max_seq_len
        );
        return conflict(&["sound", "max_seq_len"], message);
    }
    if !m.hidden.is_multiple_of(of.position_groups) {
        let message = format!(
            "`sound`: position_groups ({}) must divide `hidden` ({})",
            of.position_groups, m.hidden
        );
        return conflict(&["sound", "hidden"], message);
    }
    let alone = !o.image.class_token
        && !o.image.mask_token
        && o.image.register_tokens == 0
        && o.image.stages.is_none();
    // Conformers may rotate queries and keys.
    let ordered = match o.positions.position_embedding {
        PositionEmbedding::Rotary => o.conformer.is_some(),
        other => other == PositionEmbedding::None,
    };
    if !alone || !ordered {
        let message = "`sound` has rows of a sound alone: `class_token` and `mask_token` must be false, `position_embedding` \"none\", without `register_tokens` and `stages`";
        let keys = &[
            "sound",
            "class_token",
            "mask_token",
            "position_embedding",
            "register_tokens",
            "stages",
        ];
        return conflict(keys, message.to_owned());
    }
    if !matches!(o.output.head, Head::TokenClassification | Head::None) || o.output.pooler {
        let message = "`sound` has scores of every row (`head` = \"token_classification\") or none, and no pooler";
        return conflict(&["sound", "head", "pooler"], message.to_owned());
    }
    if of.gated_biases && o.positions.relative_buckets == 0 {
        let message = "`sound`: gated_biases need biases: `relative_buckets` is 0";
        return conflict(&["sound", "relative_buckets"], message.to_owned());
    }
    Ok(())
}

/// Refuses convolutions over frames that do not fit together.
fn check_frames(m: &Model, of: &Sound) -> Result<(), Conflict> {
    let left = of.subsampling.as_ref().map_or(1, |by| by.left(by.chunk));
    if !m.max_seq_len.is_multiple_of(left.max(1)) {
        let message = format!(
            "`sound`: rows (`max_seq_len` {}) are not divisible by the {left} of a chunk (subsampling)",
            m.max_seq_len
        );
        return Err(Conflict::new(&["sound", "max_seq_len"], message));
    }
    Ok(())
}

/// Refuses positions, rows and output layers that encoders of images do not have.
pub(super) fn check_rows(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let images = m.family == Family::Vit;
    let known = matches!(
        o.positions.position_embedding,
        PositionEmbedding::Learned | PositionEmbedding::Rotary | PositionEmbedding::None
    );
    if images
        && (!known
            || matches!(o.output.head, Head::Vector | Head::Contrastive)
            || o.output.head == Head::LanguageModel)
    {
        let message =
            "family vit has learned or rotary positions or none, and a classification head or none"
                .to_owned();
        return Err(Conflict::new(
            &["head", "position_embedding", "family"],
            message,
        ));
    }
    let classless = o.output.head != Head::None && o.image.image_pooling != ImagePooling::Mean;
    let classless = classless && o.sound.is_none();
    if images
        && !o.image.class_token
        && (o.image.distillation_token || classless || o.output.pooler)
    {
        let message = "without a row of the class (`class_token`), family vit has no distillation token or pooler, and classifies the mean of the patches (`image_pooling`)";
        let keys = &[
            "class_token",
            "distillation_token",
            "head",
            "pooler",
            "image_pooling",
        ];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let classifies_images = images && o.output.head == Head::SequenceClassification;
    if o.image.second_classifier && !(classifies_images && o.image.distillation_token) {
        let message = "`second_classifier` classifies the row of `distillation_token`: `head` must be \"sequence_classification\"";
        let keys = &["second_classifier", "distillation_token", "head"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if images && o.image.attention_pooling && (o.output.head != Head::None || o.output.pooler) {
        let message =
            "`attention_pooling` is the last layer: `head` must be \"none\" and `pooler` false";
        let keys = &["attention_pooling", "head", "pooler"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}
