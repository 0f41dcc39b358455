//! Options of embeddings.

use serde::{Deserialize, Serialize};

/// Keys of `[model]` for embeddings of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Embeddings {
    /// Dropout probability on token embeddings.
    pub embedding_dropout: f64,
    /// Rows of the token type table; 0: no such table.
    pub token_types: u64,
    /// Rows of the position table before the row of the first position.
    pub position_offset: u64,
    /// Token embeddings are normalized.
    pub embedding_norm: bool,
    /// Width of token embeddings, which a linear layer projects to the width of the model; `None`:
    /// the width of the model.
    pub embedding_width: Option<u64>,
    /// Rotary embeddings are stored as a frozen table of parameters (RoFormer).
    pub rotary_table: bool,
    /// Rows of the table of tokens beyond the vocabulary (Llama 3.2 Vision).
    pub extra_tokens: u64,
    /// Rows of each table of page coordinates (LayoutLM); 0: none.
    pub box_rows: u64,
    /// Factor of token embeddings.
    pub embedding_multiplier: f64,
}

/// The defaults of the key table; a test compares them.
impl Default for Embeddings {
    fn default() -> Self {
        Self {
            embedding_dropout: 0.0,
            token_types: 0,
            position_offset: 0,
            embedding_norm: false,
            embedding_width: None,
            rotary_table: false,
            extra_tokens: 0,
            box_rows: 0,
            embedding_multiplier: 1.0,
        }
    }
}
