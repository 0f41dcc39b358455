//! Output layers of decoders without other options: of language models, of classifiers, or none.

use super::build::Builder;
use super::declare::{Declare, Layer, ROOT};
use super::loss::{self, Logits};
use super::spec::Conflict;
use crate::config::{Head, Model};
use crate::graph::ValueId;
use crate::ir::DType;

/// What follows the last norm.
pub(super) struct Scores {
    kind: Head,
    /// `None` for hidden states.
    layer: Option<Layer>,
}

/// Refuses heads that such decoders do not have.
pub(super) fn check(m: &Model) -> Result<(), Conflict> {
    if !matches!(
        m.options.output.head,
        Head::Pretraining | Head::Vector | Head::Contrastive
    ) {
        return Ok(());
    }
    let message = format!("family {} has no such `head`", m.family.name());
    Err(Conflict {
        help: Some(
            "use \"language_model\", \"sequence_classification\", \"token_classification\" or \"none\"",
        ),
        ..Conflict::new(&["head", "family"], message)
    })
}

impl Scores {
    /// Declares the layer. `table` is the embedding of tokens, `name` what files call the output
    /// layer of the language model.
    pub(super) fn new(d: &mut Declare, table: Layer, name: &str, m: &Model) -> Self {
        let shape = [m.options.output.num_labels, m.hidden];
        let layer = match m.options.output.head {
            Head::SequenceClassification => Some(d.head(("output", "score"), shape, false)),
            Head::TokenClassification => Some(d.head(("output", "classifier"), shape, true)),
            Head::None => None,
            _ => Some(d.lm_head(table, name, m)),
        };
        Self {
            kind: m.options.output.head,
            layer,
        }
    }

    /// Adds the layer and the loss of hidden states `[batch, seq, hidden]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, hidden: ValueId, labels: ValueId) {
        let Some(layer) = self.layer else {
            return loss::mean_square_of(b, hidden, "hidden_states");
        };
        match self.kind {
            Head::SequenceClassification => {
                let scores = b.linear(layer, hidden);
                let last = at(b, scores, b.seq() - 1);
                of_sequences(b, last);
            }
            Head::TokenClassification => {
                let scores = b.linear(layer, hidden);
                of_positions(b, scores);
            }
            _ => loss::head_and_loss(b, layer, hidden, labels, Logits::default()),
        }
    }
}

/// Returns the scores of one position: `[batch, classes]` of `[batch, seq, classes]`.
pub(super) fn at(b: &mut Builder<'_>, scores: ValueId, position: u64) -> ValueId {
    let shape = [b.batch(), b.g.value(scores).cols()];
    b.within(ROOT, |b| {
        let one = b.g.slice(scores, 1, position, 1);
        b.g.reshape(one, &shape)
    })
}

/// Adds the loss of scores `[batch, classes]`; a single one is the score of a reward model.
pub(super) fn of_sequences(b: &mut Builder<'_>, scores: ValueId) {
    if b.s.model.options.output.num_labels == 1 {
        return loss::mean_square_of(b, scores, "sequence_scores");
    }
    let classes = b.constant("sequence_classes", &[b.batch()], DType::I64, true);
    loss::cross_entropy(b, scores, classes);
}

/// Adds the loss of scores `[batch, seq, classes]`.
pub(super) fn of_positions(b: &mut Builder<'_>, scores: ValueId) {
    let shape = [b.batch(), b.seq()];
    let classes = b.constant("token_classes", &shape, DType::I64, true);
    loss::cross_entropy(b, scores, classes);
}
