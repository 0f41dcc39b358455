//! Published names of parameters, and the tensors that hold them.

use shardlab_plan::Program;
use shardlab_plan::ir::{HfName, Param};
use std::borrow::Cow;
use std::ops::Range;

/// A tensor of published files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<u64>,
    /// Elements of the whole parameter that it holds.
    pub elements: Range<u64>,
    /// Stored as `[in, out]` (gpt2's `Conv1D`).
    pub transposed: bool,
}

impl Tensor {
    /// Returns a tensor that holds a whole parameter as it is.
    pub(crate) fn whole(name: String, shape: &[u64]) -> Self {
        Self {
            name,
            shape: shape.to_vec(),
            elements: 0..shape.iter().product(),
            transposed: false,
        }
    }

    /// Returns the tensor in the order of files, from all elements of the parameter.
    #[must_use]
    pub fn published<'a>(&self, parameter: &'a [f32]) -> Cow<'a, [f32]> {
        let own = &parameter[self.elements.start as usize..self.elements.end as usize];
        if !self.transposed {
            return Cow::Borrowed(own);
        }
        let [columns, rows] = [0, 1].map(|d| self.shape[d] as usize);
        Cow::Owned(transpose(own, rows, columns))
    }

    /// Returns elements in the order of the parameter, from the whole tensor of a file.
    #[must_use]
    pub fn restored(&self, stored: Vec<f32>) -> Vec<f32> {
        if !self.transposed {
            return stored;
        }
        let [rows, columns] = [0, 1].map(|d| self.shape[d] as usize);
        transpose(&stored, rows, columns)
    }
}

/// Transposes a row-major `rows x cols` matrix.
fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for r in 0..rows {
        for c in 0..cols {
            out[c * rows + r] = x[r * cols + c];
        }
    }
    out
}

/// How a parameter is stored in published files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Name of the parameter; of one whose entries are stored one by one, with `*` for their
    /// numbers.
    pub(crate) name: String,
    /// Its tensors, in the order of its elements.
    pub(crate) tensors: Vec<Tensor>,
}

impl Stored {
    fn new(p: &Param, shape: &[u64], hf: &HfName) -> Option<Self> {
        let (_, leaf) = p.name.rsplit_once('.')?;
        let module = &hf.module;
        let [entries, rows, columns] = match (shape, hf.layers) {
            (&[entries, rows, columns], [_, ..]) => [entries, rows, columns],
            (&[entries, columns], [_, ..]) => [entries, 1, columns],
            _ => {
                let name = format!("{module}.{leaf}");
                let transposed = hf.transposed && shape.len() == 2;
                let mut stored = shape.to_vec();
                if transposed {
                    stored.reverse();
                }
                let tensor = Tensor {
                    name: name.clone(),
                    shape: stored,
                    elements: 0..shape.iter().product(),
                    transposed,
                };
                return Some(Self {
                    name,
                    tensors: vec![tensor],
                });
            }
        };
        let rows = rows / hf.layers.len() as u64;
        let numel = rows * columns;
        let path = |entry: &str, layer: &str| match layer {
            "" => format!("{module}.{entry}.{leaf}"),
            layer => format!("{module}.{entry}.{layer}.{leaf}"),
        };
        let layers = (0..entries).flat_map(|e| hf.layers.iter().map(move |layer| (e, layer)));
        let tensor = |(n, (e, layer)): (u64, (u64, &&str))| Tensor {
            name: path(&e.to_string(), layer),
            shape: match shape.len() {
                2 => vec![columns],
                _ => vec![rows, columns],
            },
            elements: n * numel..(n + 1) * numel,
            transposed: false,
        };
        Some(Self {
            name: path("*", &hf.layers.join("+")),
            tensors: (0..).zip(layers).map(tensor).collect(),
        })
    }
}

/// Returns how all parameters of a program are stored; `None` for families without a Hugging Face
/// form.
pub(crate) fn of(program: &Program) -> Option<Vec<Stored>> {
    let mesh = &program.meta.mesh;
    let stored = |p: &Param| Stored::new(p, &p.weight_shape(mesh), p.hf.as_ref()?);
    program.params.iter().map(stored).collect()
}

/// Returns whether a tensor of published files is not a weight.
pub(crate) fn ignorable(name: &str, tied: bool) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn.bias")
        || name.ends_with(".attn.masked_bias")
        || tied && name == "lm_head.weight"
}
