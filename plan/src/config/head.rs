//! Options of a model's output.

use super::Head;
use serde::{Deserialize, Serialize};

/// Keys of `[model]` for the output of a model: its head, and the layers before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutputHead {
    /// Soft cap on the logits.
    pub logits_softcap: Option<f64>,
    /// A decoder has a linear layer and a norm before its logits (ModernBERT decoder).
    pub output_transform: bool,
    /// The output layer has a bias.
    pub head_bias: bool,
    /// Output layer.
    pub head: Head,
    /// An encoder pools the first position to one vector.
    pub pooler: bool,
    /// An encoder has an unused pooler (BigBird).
    pub unused_pooler: bool,
    /// An encoder has an unused contact head over the attention weights of all heads (ESM).
    pub contact_head: bool,
    /// An encoder has a linear layer and a norm before its logits. If false, it has only the linear
    /// layer, and only for sequence classification.
    pub head_transform: bool,
    /// Classes of a classification head.
    pub num_labels: u64,
    /// Width of the output of the heads `vector` and `contrastive`.
    pub vector_width: u64,
    /// The contrastive loss uses sigmoids with a learned bias (SigLIP), not the cross entropies of
    /// rows and columns.
    pub sigmoid_loss: bool,
    /// Divisor of the logits.
    pub logits_scaling: f64,
}

/// The defaults of the key table; a test compares them.
impl Default for OutputHead {
    fn default() -> Self {
        Self {
            logits_softcap: None,
            output_transform: false,
            head_bias: false,
            head: Head::LanguageModel,
            pooler: true,
            unused_pooler: false,
            contact_head: false,
            head_transform: true,
            num_labels: 2,
            vector_width: 512,
            sigmoid_loss: false,
            logits_scaling: 1.0,
        }
    }
}
