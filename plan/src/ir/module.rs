//! The module tree of a model and its parameters.

use super::{AxisId, DeviceMesh, ModuleId, Packed, Placement, Placements, Shape};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::Range;

/// Kind of a module, for units, compile modes and capture scopes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModuleKind {
    /// The whole model.
    Root,
    /// Token (and position) embedding.
    Embedding,
    /// A repeated block: transformer block, linear layer, convolution.
    Block,
    /// The attention half of a block, including its norm and residual.
    Attention,
    /// The feed-forward half of a block, including its norm and residual.
    Mlp,
    /// A norm.
    Norm,
    /// The output projection.
    Head,
    /// The loss.
    Loss,
    /// Any other leaf.
    Layer,
}

/// A part of an expert layer that may be captured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MoeStage {
    /// Its norm and its router.
    Router,
    /// The shared expert, if it does not overlap with an exchange of tokens.
    SharedExpert,
    /// The places of tokens, and their rows in the order of these places.
    Preprocess,
}

impl MoeStage {
    /// Returns its name in messages and in names of graphs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::SharedExpert => "shared expert",
            Self::Preprocess => "preprocess",
        }
    }
}

/// A node of the module tree, in pre-order. Index 0 is the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Module {
    /// Dotted path from the root, for example `layers.3.attention`. The path of the root is empty.
    pub path: String,
    /// Parent; `None` for the root.
    pub parent: Option<ModuleId>,
    /// Kind.
    pub kind: ModuleKind,
}

/// A unique parameter, in registration order. A tied parameter appears once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Param {
    /// Fully qualified name, for example `layers.3.attention.q.weight`.
    pub name: String,
    /// All modules that own it; more than one if it is tied. The first is the registering module.
    pub modules: SmallVec<[ModuleId; 2]>,
    /// Shape of one rank's part, dimension 0 first.
    pub shape: Shape,
    /// Placement on the axes that divide the model. (Data parallelism divides it according to the
    /// layout of its group.)
    #[serde(skip_serializing_if = "Placements::replicated")]
    pub placements: Placements,
    /// Whether it is trained.
    pub requires_grad: bool,
    /// Whether it is the bias of a router, which is trained by counts of choices
    /// ([`UpdateRule::RouterBias`](super::UpdateRule::RouterBias)), not by a gradient.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub router_bias: bool,
    /// The optimizer's parameter group: its index in
    /// [`Train::group_settings`](crate::config::Train::group_settings).
    #[serde(skip_serializing_if = "is_zero")]
    pub group: u8,
    /// The weight that its bytes store with fewer bits per element; `None` if its elements are
    /// those of the weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// Values before the first step. They are not part of the program, so digests do not depend on
    /// them.
    #[serde(skip)]
    pub init: Init,
    /// Name in Hugging Face's code; `None` for families without such code. It is not part of the
    /// program either.
    #[serde(skip)]
    pub hf: Option<HfName>,
}

/// The default group is left out, so that programs without groups keep their digests.
fn is_zero(group: &u8) -> bool {
    *group == 0
}

/// Values of a parameter before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Normally distributed around zero.
    Normal,
    /// Uniform between plus and minus `1 / sqrt(fan_in)`, like the initial values of `nn.Linear`.
    Uniform {
        /// Inputs of one output.
        fan_in: u64,
    },
}

/// A module's name in Hugging Face's code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HfName {
    /// Path of the module, for example `model.layers.3.self_attn.q_proj`.
    pub module: String,
    /// Form of the parameter in files.
    pub form: HfForm,
}

/// Form of a parameter in files for Hugging Face's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HfForm {
    /// As `<module>.weight` or `<module>.bias`.
    Layer,
    /// As `<module>.weight`, of shape `[in, out]` (GPT-2's `Conv1D`).
    Transposed,
    /// As `<module>.<tensor>`, for a tensor with this name.
    Tensor(&'static str),
    /// In entries (experts, norms of heads). The rows of each entry are those of these layers, one
    /// after another, and each layer is stored as `<module>.<entry>.<layer>`. An entry that is not
    /// divided into layers has a single layer with an empty name.
    Entries(&'static [&'static str]),
    /// As `<module>`, an `nn.Parameter`. A stack of experts is `[experts, in, out]`.
    Parameter {
        /// Whether columns alternate between those of the first half of the parameter's rows and
        /// those of the second half (gates and other factors of gpt-oss).
        interleaved: bool,
    },
}

/// PEFT's name of the learned magnitudes of rows (DoRA).
pub(crate) const MAGNITUDE: &str = "lora_magnitude_vector";

/// PEFT's name of the module that keeps the parameters of another one, which is trained in full.
pub(crate) const ORIGINAL: &str = "original_module";

impl Param {
    /// Returns whether it is a copy that PEFT keeps of a parameter that is trained in full; nothing
    /// reads it.
    #[must_use]
    pub(crate) fn is_original(&self) -> bool {
        self.name.rsplit('.').nth(1) == Some(ORIGINAL)
    }

    /// Returns whether it belongs to an adapter (`[lora]`), according to the names that PEFT gives
    /// to the modules of adapters.
    #[must_use]
    pub fn is_adapter(&self) -> bool {
        let mut components = self.name.rsplit('.');
        components
            .nth(1)
            .is_some_and(|m| matches!(m, "lora_A" | "lora_B" | MAGNITUDE))
    }

    /// Returns whether files of adapters have it: it belongs to an adapter, or to a module that is
    /// trained in full next to adapters.
    #[must_use]
    pub fn is_saved_with_adapters(&self) -> bool {
        self.is_adapter() || self.requires_grad
    }

    /// Returns the name of the weight whose rows have these learned magnitudes (DoRA), if it
    /// contains them.
    #[must_use]
    pub fn magnitude_of(&self) -> Option<String> {
        let layer = self.name.strip_suffix(".weight")?;
        let layer = layer.strip_suffix(MAGNITUDE)?;
        Some(format!("{layer}weight"))
    }

    /// Returns the name in Hugging Face's code, if there is one. For a stack of experts that are
    /// modules there, returns the name of the list of experts.
    #[must_use]
    pub fn hf_name(&self) -> Option<String> {
        let hf = self.hf.as_ref()?;
        if matches!(hf.form, HfForm::Parameter { .. }) {
            return Some(hf.module.clone());
        }
        Some([&hf.module, ".", self.hf_tensor()?].concat())
    }

    /// Returns the name of the tensor within its module in Hugging Face's code, if the module has
    /// a name there.
    #[must_use]
    pub fn hf_tensor(&self) -> Option<&str> {
        match self.hf.as_ref()?.form {
            HfForm::Tensor(name) => Some(name),
            _ => self.name.rsplit('.').next(),
        }
    }

    /// Returns the dimensions that are divided among ranks, with the axes that divide them.
    fn slices(&self) -> impl Iterator<Item = (AxisId, usize)> {
        let placements = self.placements;
        AxisId::ALL
            .into_iter()
            .filter_map(move |axis| match placements.on(axis) {
                Placement::Shard(dim) => Some((axis, usize::from(dim))),
                _ => None,
            })
    }

    /// Returns the shape of the whole parameter.
    #[must_use]
    pub fn full_shape(&self, mesh: &DeviceMesh) -> Shape {
        let mut shape = self.shape.clone();
        for (axis, dim) in self.slices() {
            shape[dim] *= u64::from(mesh.size(axis));
        }
        shape
    }

    /// Returns the number of elements of the whole parameter.
    #[must_use]
    pub fn full_numel(&self, mesh: &DeviceMesh) -> u64 {
        self.full_shape(mesh).iter().product()
    }

    /// Returns the shape of the whole weight. For a packed weight, this is the shape before
    /// packing.
    #[must_use]
    pub fn weight_shape(&self, mesh: &DeviceMesh) -> Shape {
        match &self.packed {
            Some(nf4) => nf4.shape.clone(),
            None => self.full_shape(mesh),
        }
    }

    /// Returns the number of elements of the whole weight. For a packed weight, this is the number
    /// before packing.
    #[must_use]
    pub fn weight_numel(&self, mesh: &DeviceMesh) -> u64 {
        self.weight_shape(mesh).iter().product()
    }

    /// Returns the positions of a rank's elements in the whole parameter, as contiguous runs, each
    /// with its first element in the rank's part.
    #[must_use]
    pub fn full_ranges(
        &self,
        mesh: &DeviceMesh,
        rank: u32,
        local: Range<u64>,
    ) -> Vec<(u64, Range<u64>)> {
        let Some(dim) = self.slices().map(|(_, dim)| dim).max() else {
            return vec![(local.start, local)];
        };
        let full = self.full_shape(mesh);
        // First index of the rank's slice of each dimension.
        let mut first: SmallVec<[u64; 4]> = self.shape.iter().map(|_| 0).collect();
        for (axis, dim) in self.slices() {
            first[dim] += u64::from(mesh.coordinate(axis, rank)) * self.shape[dim];
        }
        // Runs end with the last divided dimension.
        let run: u64 = self.shape[dim..].iter().product();
        let full_index = |element: u64| {
            let (mut rest, mut stride, mut index) = (element, 1, 0);
            for d in (0..self.shape.len()).rev() {
                index += (first[d] + rest % self.shape[d]) * stride;
                rest /= self.shape[d];
                stride *= full[d];
            }
            index
        };
        let mut out = Vec::new();
        let mut at = local.start;
        while at < local.end {
            let end = local.end.min((at / run + 1) * run);
            let start = full_index(at);
            out.push((at, start..start + end - at));
            at = end;
        }
        out
    }

    /// Returns the number of elements that one rank has.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns whether it is a stack of the matrices of experts, `[experts, rows, columns]`.
    #[must_use]
    pub(crate) fn is_stack(&self) -> bool {
        self.shape.len() == 3
    }

    /// Returns the number of elements of one row: the size of all dimensions except the first (1
    /// for a vector).
    #[must_use]
    pub fn row(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    /// Returns the number of elements that a flat layout does not divide: a row or, for a stack, a
    /// row of one of its matrices, so that more ranks than experts can share it.
    #[must_use]
    pub(crate) fn flat_row(&self) -> u64 {
        let outer = 1 + usize::from(self.is_stack());
        self.shape.iter().skip(outer).product()
    }
}

/// Numbers of parameters of a model, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterCount {
    /// All.
    pub total: u64,
    /// Number of parameters that one token uses. For a stack of experts or of their biases, these
    /// are the parameters of the experts that process the token.
    pub active: u64,
    /// Those that are trained.
    pub trainable: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    fn param(shape: &[u64], placements: Placements) -> Param {
        Param {
            name: "weight".to_owned(),
            modules: smallvec![ModuleId(0)],
            shape: shape.iter().copied().collect(),
            placements,
            requires_grad: true,
            router_bias: false,
            group: 0,
            packed: None,
            init: Init::Zeros,
            hf: None,
        }
    }

    #[test]
    fn slices_of_rows_and_columns_lie_in_the_whole_parameter() {
        let mesh = DeviceMesh::new(&[(AxisId::TP, 2), (AxisId::DP_SHARD, 2)]);
        let on = |dim| Placements::REPLICATED.with(AxisId::TP, Placement::Shard(dim));
        let rows = param(&[2, 3], on(0));
        assert_eq!(rows.full_shape(&mesh).as_slice(), [4, 3]);
        // Ranks 1 and 3 differ only on the data-parallel axis.
        for rank in [1, 3] {
            assert_eq!(rows.full_ranges(&mesh, rank, 1..6), [(1, 7..12)]);
        }
        let columns = param(&[2, 3], on(1));
        assert_eq!(columns.full_shape(&mesh).as_slice(), [2, 6]);
        assert_eq!(columns.full_ranges(&mesh, 1, 1..6), [(1, 4..6), (3, 9..12)]);
        assert_eq!(columns.full_ranges(&mesh, 2, 0..2), [(0, 0..2)]);
        let whole = param(&[2, 3], Placements::REPLICATED);
        assert_eq!(whole.full_ranges(&mesh, 1, 2..6), [(2, 2..6)]);
    }
}
