//! The index of a checkpoint.

use crate::train::layout::Kind;
use serde::{Deserialize, Serialize};
use shardlab_plan::ir::DType;
use std::collections::BTreeMap;

/// Version of the format.
pub(crate) const FORMAT: u32 = 1;

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of steps done, which is the optimizer's step count as well.
    pub step: u64,
    /// Number of samples consumed.
    pub samples: u64,
    /// Seed of weights and data.
    pub seed: u64,
    /// Fingerprint of the data.
    pub data: String,
    /// Losses of all steps; `null` if a loss is not a number.
    pub losses: Vec<Option<f64>>,
    /// Gradient norms of all steps; `null` if a norm is not a number.
    pub grad_norms: Vec<Option<f64>>,
    /// Norm of the weights of the model that adapters were trained on, which checkpoints do not
    /// hold; `None` without adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_norm: Option<f64>,
}

/// A parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexParam {
    /// Name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<u64>,
}

/// A contiguous range of elements of one state of one parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Index into [`Index::params`].
    pub param: usize,
    /// `weight`, `exp_avg` or `exp_avg_sq`.
    pub kind: String,
    /// Index of the first element in the whole parameter, row-major.
    pub start: u64,
    /// Number of elements.
    pub numel: u64,
    /// Name of the tensor within its file.
    pub tensor: String,
    /// Name of the file.
    pub file: String,
}

impl Piece {
    pub(crate) fn is(&self, kind: Kind) -> bool {
        self.kind == kind.name()
    }
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexFile {
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 digest of the content, hexadecimal.
    pub blake3: String,
}

/// Contents of `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// Version of the format.
    pub format: u32,
    /// Name of the scenario.
    pub scenario: String,
    /// Digest of the program that wrote it.
    pub program_digest: String,
    /// Number of ranks of that program.
    pub world_size: u32,
    /// Progress of the run.
    pub progress: Progress,
    /// Parameters.
    pub params: Vec<IndexParam>,
    /// Files with their checksums.
    pub files: BTreeMap<String, IndexFile>,
    /// Location of every state.
    pub pieces: Vec<Piece>,
}

/// Returns the name of a rank's file.
pub(crate) fn file_of(rank: u32, world: u32) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

/// Returns the name of a piece's tensor.
pub(crate) fn tensor_of(param: &str, kind: Kind, start: u64) -> String {
    format!("{param}/{}/{start}", kind.name())
}

/// Returns the element type of a piece, which is that in memory.
pub(crate) type PieceType = DType;
