//! Model families: forward op graph and module tree, with exact shapes, FLOPs and bytes.

/// Operation of a kernel's body.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// Placeholder variant list; grows with the model families.
    Copy,
}
