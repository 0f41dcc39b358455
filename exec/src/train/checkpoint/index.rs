//! What a checkpoint says about itself.

use crate::train::layout::Kind;
use serde::{Deserialize, Serialize};
use shardlab_plan::ir::DType;
use std::collections::BTreeMap;

/// Version of the format.
pub(crate) const FORMAT: u32 = 1;

/// Where a run stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps done, which is the optimizer's step count as well.
    pub step: u64,
    /// Samples consumed.
    pub samples: u64,
    /// Seed of weights and data.
    pub seed: u64,
    /// Fingerprint of the data.
    pub data: String,
    /// Losses of all steps; `null` where a loss is no number.
    pub losses: Vec<Option<f64>>,
    /// Gradient norms of all steps, likewise.
    pub grad_norms: Vec<Option<f64>>,
}

/// A parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexParam {
    /// Name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<u64>,
}

/// A run of elements of one state of one parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Index into [`Index::params`].
    pub param: usize,
    /// `weight`, `exp_avg` or `exp_avg_sq`.
    pub kind: String,
    /// First element in the whole parameter, row-major.
    pub start: u64,
    /// Elements.
    pub numel: u64,
    /// Tensor's name within its file.
    pub tensor: String,
    /// File.
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
    /// Size.
    pub bytes: u64,
    /// BLAKE3 of the content, hexadecimal.
    pub blake3: String,
}

/// `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// Version of the format.
    pub format: u32,
    /// Scenario's name.
    pub scenario: String,
    /// Digest of the program that made it.
    pub program_digest: String,
    /// Ranks of that program.
    pub world_size: u32,
    /// Where the run stands.
    pub progress: Progress,
    /// Parameters.
    pub params: Vec<IndexParam>,
    /// Files with their checksums.
    pub files: BTreeMap<String, IndexFile>,
    /// What lies where.
    pub pieces: Vec<Piece>,
}

/// Name of a rank's file.
pub(crate) fn file_of(rank: u32, world: u32) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

/// Name of a piece's tensor.
pub(crate) fn tensor_of(param: &str, kind: Kind, start: u64) -> String {
    format!("{param}/{}/{start}", kind.name())
}

/// Element type of a piece, as it was in memory.
pub(crate) type PieceType = DType;
