//! Output layers of decoders and encoders.

use super::contrast::Contrast;
use super::embedding;
use super::names::Names;
use super::norm::Norm;
use super::pooling::Pooling;
use crate::config::{Activation, Family, Head, ImagePooling, Model, Norm as Kind};
use crate::graph::ValueId;
use crate::ir::{DType, OpKind, Real, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::classes;
use crate::models::declare::{Declare, Layer, Order, ROOT};
use crate::models::defaults;
use crate::models::loss::{self, Logits};

/// The layers after the last norm.
pub(super) struct Output {
    kind: Head,
    /// Layer and norm before the logits of masked positions. Without a norm, the layer classifies
    /// sequences, by the mean of the scores of their positions.
    transform: Option<(Layer, Option<Norm>)>,
    /// Projects hidden states to the width of embedded tokens.
    project: Option<Layer>,
    /// Attention that makes one vector of all positions.
    pooling: Option<Pooling>,
    /// Layer that makes one vector of the first position.
    pooler: Option<Layer>,
    /// `None` for hidden states.
    layer: Option<Layer>,
    contrast: Option<Contrast>,
    /// Classifies the second row.
    second: Option<Layer>,
    /// Scores two sentences.
    relation: Option<Layer>,
    /// The first position is classified, not the last one.
    first: bool,
}

impl Output {
    pub(super) fn new(d: &mut Declare, tokens: Option<Layer>, names: &Names, m: &Model) -> Self {
        let kind = m.options.output.head;
        let h = m.hidden;
        let images = m.family == Family::Vit;
        let encoder = m.family == Family::Bert || images;
        // The head of T5 and BART has a layer of its own before the scores, T5Gemma's has none.
        let pair = m.options.context.encoder_layers > 0;
        let encoder_of_pair = m.options.context.encoder.as_ref();
        let alone = encoder_of_pair.is_some_and(|encoder| encoder.own_tokens);
        let transforms = match kind {
            Head::LanguageModel | Head::SequenceClassification
                if m.options.output.output_transform =>
            {
                true
            }
            Head::LanguageModel | Head::Pretraining => encoder && m.options.output.head_transform,
            Head::SequenceClassification => encoder && !images && !m.options.output.pooler,
            Head::TokenClassification => {
                encoder && !images && !m.options.output.pooler && m.options.output.head_transform
            }
            Head::Vector | Head::Contrastive | Head::None => false,
        };
        let transform = transforms.then(|| {
            let dense = ("transform", names.transform);
            let norm = ("transform_norm", names.transform_norm);
            let width = if matches!(kind, Head::LanguageModel | Head::Pretraining) {
                embedding::width(m)
            } else {
                h
            };
            let layer = d.linear(ROOT, dense, [width, h], transform_bias(m));
            let norms = m.options.output.head_transform;
            let norm = norms.then(|| Norm::new(d, ROOT, norm, width, m, Order::Declared));
            (layer, norm)
        });
        let narrow = (!encoder).then(|| embedding::width(m)).filter(|w| *w != h);
        let project = narrow.map(|w| {
            d.linear(
                ROOT,
                ("project_out", "model.decoder.project_out"),
                [w, h],
                false,
            )
        });
        let pools = match kind {
            Head::None => encoder && m.options.output.pooler,
            Head::SequenceClassification => {
                pair && !alone || (encoder && !images && m.options.output.pooler)
            }
            Head::Pretraining => true,
            Head::LanguageModel | Head::TokenClassification | Head::Vector | Head::Contrastive => {
                false
            }
        };
        let pooling =
            (images && m.options.image.attention_pooling).then(|| Pooling::new(d, ROOT, m));
        let pooler_bias = pair || m.bias.mlp() || (encoder && m.options.output.head_bias);
        let pooler = pools.then(|| d.linear(ROOT, ("pooler", names.pooler), [h, h], pooler_bias));
        let pooled = match m.options.image.image_pooling {
            ImagePooling::ClassAndMean if images => 2 * h,
            _ => narrow.unwrap_or(h),
        };
        let scores = [m.options.output.num_labels, pooled];
        let layer = match kind {
            Head::LanguageModel | Head::Pretraining => {
                tokens.map(|tokens| d.lm_head(tokens, names.head, m))
            }
            Head::SequenceClassification => {
                Some(d.head(("output", "score"), scores, encoder || pair))
            }
            Head::TokenClassification => Some(d.head(("output", "score"), scores, true)),
            Head::Vector | Head::Contrastive => {
                let outer = d.rows(Some(1));
                let shape = [m.options.output.vector_width, narrow.unwrap_or(h)];
                let layer = d.head(
                    ("output", "text_projection"),
                    shape,
                    m.options.output.head_bias,
                );
                d.rows(outer);
                Some(layer)
            }
            Head::None => None,
        };
        let second = m.options.image.second_classifier;
        let second = second.then(|| {
            d.head(
                ("distillation_output", "distillation_classifier"),
                scores,
                true,
            )
        });
        let relation = (kind == Head::Pretraining).then(|| {
            d.head(
                ("relation", "cls.seq_relationship"),
                [m.options.output.num_labels, h],
                true,
            )
        });
        if m.options.output.unused_pooler && (kind != Head::None) {
            let unused = d.linear(ROOT, ("unused_pooler", ""), [h, h], true);
            d.untrained(unused);
        }
        if m.options.output.contact_head {
            let heads = u64::from(m.layers) * m.heads;
            let unused = d.linear(ROOT, ("contact_head", ""), [1, heads], true);
            d.untrained(unused);
        }
        let contrast = (kind == Head::Contrastive).then(|| Contrast::new(d, m));
        Self {
            kind,
            transform,
            project,
            pooling,
            pooler,
            layer,
            contrast,
            second,
            relation,
            first: encoder,
        }
    }

    /// Adds the output layer and the loss of hidden states `[batch, seq, hidden]`; `image` is the
    /// vector of each sample's image.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        mut hidden: ValueId,
        labels: Option<ValueId>,
        image: Option<ValueId>,
    ) {
        let (batch, seq) = (b.batch(), b.seq());
        if let Some(project) = self.project {
            hidden = b.linear(project, hidden);
        }
        if let Some(pooling) = &self.pooling {
            hidden = pooling.forward(b, hidden);
        }
        let mut related = None;
        if let Some(pooler) = self.pooler {
            let pooled = pool(b, pooler, hidden);
            match self.relation {
                Some(relation) => related = Some(b.linear(relation, pooled)),
                None => hidden = pooled,
            }
        }
        let Some(layer) = self.layer else {
            return loss::mean_square_of(b, hidden, "hidden_states");
        };
        if let Some((dense, norm)) = self.transform {
            let activation = match norm {
                Some(_) => defaults::activation(&b.s.model),
                None => Activation::Gelu,
            };
            let y = b.linear(dense, hidden);
            let y = b.within(ROOT, |b| activate(b, activation, y));
            hidden = norm.map_or(y, |norm| norm.apply(b, y));
        }
        let averages = matches!(self.transform, Some((_, None)));
        let options = &b.s.model.options;
        match self.kind {
            Head::Pretraining => {
                let logits = b.linear(layer, hidden);
                let masked = b.constant("masked_tokens", &[batch, seq], DType::I64, true);
                let next = b.constant("sentence_classes", &[batch], DType::I64, true);
                if let Some(scores) = related {
                    loss::sum_of_cross_entropies(b, [logits, scores], [masked, next]);
                }
            }
            Head::LanguageModel if self.first => {
                let logits = b.linear(layer, hidden);
                let masked = b.constant("masked_tokens", &[batch, seq], DType::I64, true);
                loss::cross_entropy(b, logits, masked);
            }
            Head::LanguageModel | Head::None => {
                let divisor = options.output.logits_scaling;
                let logits = Logits {
                    scale: (divisor != 1.0).then(|| 1.0 / divisor),
                    softcap: options.output.logits_softcap,
                };
                if let Some(labels) = labels {
                    loss::head_and_loss(b, layer, hidden, labels, logits);
                }
            }
            Head::Vector | Head::Contrastive => {
                let width = b.g.value(hidden).cols();
                let last = b.within(ROOT, |b| {
                    let last = b.g.slice(hidden, 1, seq - 1, 1);
                    b.g.reshape(last, &[batch, width])
                });
                let vector = b.linear(layer, last);
                match (&self.contrast, image) {
                    (Some(contrast), Some(image)) => contrast.forward(b, vector, image),
                    _ => loss::mean_square_of(b, vector, "vectors"),
                }
            }
            Head::TokenClassification => {
                let scores = b.linear(layer, hidden);
                classes::of_positions(b, scores);
            }
            Head::SequenceClassification => {
                let labels = options.output.num_labels;
                let means = options.image.image_pooling != ImagePooling::Class;
                if means {
                    hidden = pool_image(b, hidden);
                }
                let mut scores = b.linear(layer, hidden);
                if averages {
                    scores = b.within(ROOT, |b| mean_of_rows(b, scores));
                } else if self.pooler.is_none() && !means {
                    let position = if self.first { 0 } else { seq - 1 };
                    scores = classes::at(b, scores, position);
                }
                if let Some(second) = self.second {
                    let more = b.linear(second, hidden);
                    scores = b.within(ROOT, |b| {
                        let row = b.g.slice(more, 1, 1, 1);
                        let row = b.g.reshape(row, &[batch, labels]);
                        let sum = b.g.binary(OpKind::Add, scores, row);
                        b.scale(sum, 0.5)
                    });
                }
                classes::of_sequences(b, scores);
            }
        }
    }
}

/// Returns whether the layer before the logits of masked positions has a bias: if the norm after it
/// has one, or if there is none.
fn transform_bias(m: &Model) -> bool {
    if !m.options.output.head_transform {
        return true;
    }
    match m.options.norm {
        Kind::Layer => m.options.output.head_bias || m.bias.mlp(),
        Kind::LayerNoBias => false,
        _ => m.bias.mlp(),
    }
}

/// Returns the mean of the rows of `[batch, rows, width]`: `[batch, width]`.
fn mean_of_rows(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    let (rows, width) = (b.g.value(x).shape[1], b.g.value(x).cols());
    let by_row = b.g.transpose(x, 0, 1);
    let shape = [b.batch(), width];
    let sum = b.compute(OpKind::SumLeading, &[by_row], &[&shape])[0];
    b.scale(sum, 1.0 / rows as f64)
}

/// Returns the input of an image's classifier from its rows `hidden`.
fn pool_image(b: &mut Builder<'_>, hidden: ValueId) -> ValueId {
    let options = &b.s.model.options;
    let first = u64::from(options.image.class_token) + options.image.register_tokens;
    let with_class = options.image.image_pooling == ImagePooling::ClassAndMean;
    b.within(ROOT, |b| {
        let (rows, width) = (b.g.value(hidden).shape[1], b.g.value(hidden).cols());
        let patches = b.g.slice(hidden, 1, first, rows - first);
        let mean = mean_of_rows(b, patches);
        if !with_class {
            return mean;
        }
        let class = b.g.slice(hidden, 1, 0, 1);
        let class = b.g.reshape(class, &[b.batch(), width]);
        b.g.cat(&[class, mean], 1)
    })
}

/// Computes `tanh(dense(hidden[:, 0]))`.
fn pool(b: &mut Builder<'_>, pooler: Layer, hidden: ValueId) -> ValueId {
    let (batch, width) = (b.batch(), b.g.value(hidden).cols());
    let first = b.within(ROOT, |b| {
        let first = b.g.slice(hidden, 1, 0, 1);
        b.g.reshape(first, &[batch, width])
    });
    let y = b.linear(pooler, first);
    let tanh = OpKind::Softcap(op::Softcap { cap: Real(1.0) });
    b.within(ROOT, |b| b.g.unary(tanh, y))
}
