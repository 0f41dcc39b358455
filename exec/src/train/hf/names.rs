//! Published names of parameters.

use shardlab_plan::Program;
use shardlab_plan::ir::Param;

/// How a parameter is stored in published files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) name: String,
    /// Stored as `[in, out]` (gpt2's `Conv1D`).
    pub(crate) transposed: bool,
}

impl Name {
    /// Returns the shape in the file.
    pub(crate) fn stored_shape(&self, shape: &[u64]) -> Vec<u64> {
        let mut shape = shape.to_vec();
        if self.transposed {
            shape.reverse();
        }
        shape
    }
}

/// Returns the names of all parameters of a program; `None` for families without a Hugging Face
/// form.
pub(crate) fn of(program: &Program) -> Option<Vec<Name>> {
    let name = |p: &Param| {
        let hf = p.hf.as_ref()?;
        let (_, leaf) = p.name.rsplit_once('.')?;
        Some(Name {
            name: format!("{}.{leaf}", hf.module),
            transposed: hf.transposed && p.shape.len() == 2,
        })
    };
    program.params.iter().map(name).collect()
}

/// Returns whether a tensor of published files is not a weight.
pub(crate) fn ignorable(name: &str, tied: bool) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn.bias")
        || name.ends_with(".attn.masked_bias")
        || tied && name == "lm_head.weight"
}
