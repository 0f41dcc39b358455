//! Published names of parameters, and the tensors that hold them.

use shardlab_plan::Program;
use shardlab_plan::ir::{HfForm, HfName, Param};
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
    /// Order of the elements in the file, if it is not that of the parameter.
    pub order: Option<Transposed>,
}

/// Transposed matrices, one after another: those of the parameter are `[rows, columns]`, those of
/// the file `[columns, rows]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transposed {
    /// Rows of a matrix of the parameter.
    pub rows: usize,
    /// Columns of a matrix of the parameter.
    pub columns: usize,
    /// In the file, rows of the first half and of the second half alternate.
    pub interleaved: bool,
}

impl Transposed {
    /// Returns the place of a row in the file.
    fn place(self, row: usize) -> usize {
        let half = self.rows / 2;
        match (self.interleaved, row < half) {
            (false, _) => row,
            (true, true) => 2 * row,
            (true, false) => 2 * (row - half) + 1,
        }
    }

    /// Calls `f` with the positions of each element in the parameter and in the file.
    fn pairs(self, numel: usize, mut f: impl FnMut(usize, usize)) {
        let (rows, columns) = (self.rows, self.columns);
        for first in (0..numel).step_by((rows * columns).max(1)) {
            for row in 0..rows {
                let place = self.place(row);
                for column in 0..columns {
                    f(
                        first + row * columns + column,
                        first + column * rows + place,
                    );
                }
            }
        }
    }
}

impl Tensor {
    /// Returns a tensor that holds a whole parameter as it is.
    pub(crate) fn whole(name: String, shape: &[u64]) -> Self {
        Self {
            name,
            shape: shape.to_vec(),
            elements: 0..shape.iter().product(),
            order: None,
        }
    }

    /// Returns the tensor in the order of files, from all elements of the parameter.
    #[must_use]
    pub fn published<'a>(&self, parameter: &'a [f32]) -> Cow<'a, [f32]> {
        let own = &parameter[self.elements.start as usize..self.elements.end as usize];
        let Some(order) = self.order else {
            return Cow::Borrowed(own);
        };
        let mut out = vec![0.0; own.len()];
        order.pairs(own.len(), |ours, theirs| out[theirs] = own[ours]);
        Cow::Owned(out)
    }

    /// Returns elements in the order of the parameter, from the whole tensor of a file.
    #[must_use]
    pub fn restored(&self, stored: Vec<f32>) -> Vec<f32> {
        let Some(order) = self.order else {
            return stored;
        };
        let mut out = vec![0.0; stored.len()];
        order.pairs(stored.len(), |ours, theirs| out[ours] = stored[theirs]);
        out
    }
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
        let leaf = p.hf_tensor()?;
        Some(match (hf.form, shape) {
            (HfForm::Parameter { interleaved }, _) => {
                Self::one(parameter(hf.module.clone(), shape, interleaved))
            }
            (HfForm::Entries(layers), &[entries, ref entry @ ..]) => {
                let mut layer = entry.to_vec();
                if let [rows, _] = &mut layer[..] {
                    *rows /= layers.len() as u64;
                }
                Self::entries(&hf.module, layers, leaf, (entries, layer))
            }
            (HfForm::Transposed, &[rows, columns]) => {
                let whole = Tensor::whole(format!("{}.{leaf}", hf.module), &[columns, rows]);
                Self::one(transposed(whole, [rows, columns], false))
            }
            _ => Self::one(Tensor::whole(format!("{}.{leaf}", hf.module), shape)),
        })
    }

    /// Returns a parameter that is one tensor.
    fn one(tensor: Tensor) -> Self {
        Self {
            name: tensor.name.clone(),
            tensors: vec![tensor],
        }
    }

    /// Returns a stack of `entries`, each with a tensor of this shape for each of its layers.
    fn entries(
        module: &str,
        layers: &[&str],
        leaf: &str,
        (entries, shape): (u64, Vec<u64>),
    ) -> Self {
        let numel: u64 = shape.iter().product();
        let path = |entry: &str, layer: &str| match layer {
            "" => format!("{module}.{entry}.{leaf}"),
            layer => format!("{module}.{entry}.{layer}.{leaf}"),
        };
        let each = (0..entries).flat_map(|e| layers.iter().map(move |layer| (e, layer)));
        let tensor = |(n, (e, layer)): (u64, (u64, &&str))| Tensor {
            elements: n * numel..(n + 1) * numel,
            ..Tensor::whole(path(&e.to_string(), layer), &shape)
        };
        Self {
            name: path("*", &layers.join("+")),
            tensors: (0..).zip(each).map(tensor).collect(),
        }
    }
}

/// Returns the tensor of an `nn.Parameter`: matrices of a stack are transposed; those of the biases
/// of experts are single columns.
fn parameter(name: String, shape: &[u64], interleaved: bool) -> Tensor {
    match *shape {
        [experts, rows, columns] => {
            let whole = Tensor::whole(name, &[experts, columns, rows]);
            transposed(whole, [rows, columns], interleaved)
        }
        [_, rows] if interleaved => transposed(Tensor::whole(name, shape), [rows, 1], true),
        _ => Tensor::whole(name, shape),
    }
}

/// Returns a tensor whose matrices are transposed.
fn transposed(whole: Tensor, [rows, columns]: [u64; 2], interleaved: bool) -> Tensor {
    let order = Transposed {
        rows: rows as usize,
        columns: columns as usize,
        interleaved,
    };
    Tensor {
        order: Some(order),
        ..whole
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
