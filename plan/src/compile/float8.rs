//! 8-bit matmuls: casts in front of the matmuls of the linear layers that the recipe names.
//!
//! Tensor cores need 8-bit operands whose inner dimension is contiguous (`wgmma` transposes 16-bit
//! types only, and cuBLASLt accepts no other layout before compute capability 10). With
//! `y = x W^T`, for `x` of shape `[T, I]` and `W` of shape `[O, I]`:
//!
//! | matmul | factors |
//! |---|---|
//! | `y`, `[T, O]` | `x`, `W` |
//! | `d_x`, `[T, I]` | `d_y`, `W^T` |
//! | `d_w`, `[O, I]` | `d_y^T`, `x^T` |
//!
//! With one scale per tensor, a maximum over rows is fused into the kernel that computes the
//! tensor, a small kernel computes the scale, and another one writes the 8-bit values (*codes*) and
//! their transposes. Backward uses the scales of forward. Matmuls that read the same tensor share
//! its codes. With one scale per row, one kernel casts a tensor, and another its transposed copy,
//! whose rows have different scales. With one scale per block, blocks of the transpose have
//! different scales, too, and one kernel casts and transposes.
//!
//! The matmuls of experts (`precision.float8_experts`) read the tokens of all experts, with one
//! scale, and a stack of weights, with another. The transpose of a stack has the transpose of each
//! matrix. With expert parallelism, unused rows of the token buffer are uninitialized: the kernel
//! that computes the scale reads the offsets of experts, and ignores the maxima of these rows.
//! Their codes are not read.
//!
//! Weights that ranks gather in 8 bits (`precision.float8_all_gather`) arrive as codes, so nothing
//! casts them. The matmul of `d_x` reads a transposed copy. With a scale per block, it also reads a
//! transposed copy of the grid of scales: blocks of the transpose are the transposed square blocks.
//! Recipe mxfp8 has blocks of 32 elements of a row, so its transpose has other scales and codes.
//! Ranks gather these, too, as codes of the matrix with scales of parts of columns. Tensor cores of
//! compute capability 10 read them as they are.
//!
//! Nothing here decides what is saved: that follows from the uses in backward, as for every tensor.

use super::schedule::Orders;
use crate::graph::{Act, Buffer, Graph, Root, Value, ValueId};
use crate::ir::strides::{self, Strides};
use crate::ir::{DType, ModuleId, OpKind, Param, ParamId, ScaleBlock, Shape, op};
use crate::models::ModelGraph;
use crate::recipes::{Float8Linear, Recipe, Scaling};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// A matmul of a linear layer.
#[derive(Clone, Copy)]
struct Product {
    role: Role,
    linear: Float8Linear,
    bias: bool,
    /// One matmul per expert.
    grouped: Option<Grouped>,
}

/// A grouped matmul.
#[derive(Clone, Copy)]
struct Grouped {
    /// Rows that experts are expected to compute, if not all.
    routed: Option<u64>,
}

/// What a matmul of a linear layer computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Forward,
    InputGrad,
    WeightGrad,
}

/// How a matmul reads a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Reading {
    transposed: bool,
    to: DType,
}

/// A tensor that is cast: a value, or a window on a parameter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Tensor {
    Value(ValueId),
    Weight(ParamId, u64, u64),
}

/// Codes of a tensor, and the reciprocal of their scale.
#[derive(Clone, Copy)]
struct Codes {
    codes: ValueId,
    inverse: ValueId,
}

/// Lets the matmuls that the recipe names read 8-bit factors.
pub(super) fn quantize(m: &mut ModelGraph, o: &mut Orders, recipe: &dyn Recipe) {
    let linears = linears(m, recipe);
    if linears.iter().all(Option::is_none) {
        return;
    }
    let mut products: BTreeMap<u32, Product> = BTreeMap::new();
    for &i in o.forward.iter().chain(&o.backward) {
        if let Some(product) = product(&m.graph, i, &linears) {
            products.insert(i, product);
        }
    }
    let mut readings: BTreeSet<(Tensor, Reading, u32)> = BTreeSet::new();
    for (&i, product) in &products {
        for (n, reading) in product.readings().into_iter().enumerate() {
            let v = m.graph.ops[i as usize].inputs[n];
            readings.insert((tensor(&m.graph, v), reading, o.region[i as usize]));
        }
    }
    let scales_in_place = scales_in_place(&m.tree.params, &linears);
    let mut casts = Casts {
        scales_in_place,
        g: &mut m.graph,
        o: &mut *o,
        readings,
        scales: BTreeMap::new(),
        codes: BTreeMap::new(),
        before: BTreeMap::new(),
    };
    for i in casts.o.all() {
        if let Some(&product) = products.get(&i) {
            casts.replace(i, product);
        }
    }
    let mut before = casts.before;
    for order in [&mut o.forward, &mut o.backward] {
        for i in std::mem::take(order) {
            order.extend(before.remove(&i).unwrap_or_default());
            order.push(i);
        }
    }
}

/// Returns how each parameter's layer runs in 8 bits.
fn linears(m: &ModelGraph, recipe: &dyn Recipe) -> Vec<Option<Float8Linear>> {
    let of = |p: &Param| recipe.float8(p, m.tree.block_place(p));
    m.tree.params.iter().map(of).collect()
}

/// Returns the matmul of a linear layer in 8 bits that an op is.
fn product(g: &Graph, i: u32, linears: &[Option<Float8Linear>]) -> Option<Product> {
    let op = &g.ops[i as usize];
    let Act::Compute(kind) = op.act else {
        return None;
    };
    let of = |v: ValueId| match g.value(v).root {
        Root::Param(p) | Root::Grad(p) => linears[p.index()],
        _ => None,
    };
    let (role, bias, grouped) = match kind {
        OpKind::Gemm(gemm) => {
            let role = match (gemm.ta, gemm.tb) {
                (false, true) => Role::Forward,
                (false, false) => Role::InputGrad,
                (true, false) => Role::WeightGrad,
                (true, true) => return None,
            };
            (role, gemm.bias, None)
        }
        OpKind::GroupedGemm(gemm) => {
            let role = if gemm.tb {
                Role::Forward
            } else {
                Role::InputGrad
            };
            let routed = gemm.routed;
            (role, false, Some(Grouped { routed }))
        }
        OpKind::GroupedGemmWeightGrad(gemm) => {
            let routed = gemm.routed;
            (Role::WeightGrad, false, Some(Grouped { routed }))
        }
        _ => return None,
    };
    let weight = match role {
        Role::Forward | Role::InputGrad => op.inputs[1],
        Role::WeightGrad => op.outputs[0],
    };
    Some(Product {
        role,
        linear: of(weight)?,
        bias,
        grouped,
    })
}

/// Returns the tensor that a value shows.
fn tensor(g: &Graph, v: ValueId) -> Tensor {
    let value = g.value(v);
    match value.root {
        Root::Param(p) => Tensor::Weight(p, value.offset, value.numel()),
        _ => Tensor::Value(v),
    }
}

impl Product {
    /// Returns how it reads its two factors, in the order of the matmul that it replaces.
    fn readings(self) -> [Reading; 2] {
        let at = |transposed, to| Reading { transposed, to };
        let (e4m3, grad) = (DType::F8E4m3, self.linear.grad);
        match self.role {
            Role::Forward => [at(false, e4m3), at(false, e4m3)],
            Role::InputGrad => [at(false, grad), at(true, e4m3)],
            Role::WeightGrad => [at(true, grad), at(true, e4m3)],
        }
    }
}

/// Returns the strides with which a tensor is written transposed, so that its rows become columns,
/// and the shape of the transpose. A stack of experts' weights has a transpose of each matrix.
fn transposed(value: &Value) -> (Strides, Shape) {
    let (rows, cols) = (value.rows(), value.cols());
    if let (Root::Param(_), &[experts, n, k]) = (value.root, &value.shape[..]) {
        let written = strides::contiguous(&[experts, k, n]);
        let written = [0, 2, 1].map(|dim| written[dim]);
        return (
            written.into_iter().collect(),
            strides::shape(&[experts, k, n]),
        );
    }
    let mut all = strides::contiguous(&value.shape);
    if let Some((last, before)) = all.split_last_mut() {
        for stride in before {
            *stride /= cols;
        }
        *last = rows;
    }
    (all, strides::shape(&[cols, rows]))
}

/// Returns whether all gathered weights have scales per block that matmuls can read where a gather
/// writes them. cuBLASLt reads grids of square blocks whose rows have a multiple of four scales and
/// start at a multiple of 16 bytes. In a flat buffer, this holds for each grid if it does for all.
/// Scales of blocks of 32 elements are read in tiles of 128x4, to which they have to be copied.
fn scales_in_place(params: &[Param], linears: &[Option<Float8Linear>]) -> bool {
    params.iter().zip(linears).all(|(p, linear)| {
        let Some(linear) = linear.filter(|linear| linear.gathered) else {
            return true;
        };
        let cols = p.shape.last().copied().unwrap_or(0);
        match linear.scaling {
            Scaling::Block { weights, .. } => {
                weights == ScaleBlock::SQUARE && cols.is_multiple_of(4 * weights.cols)
            }
            _ => false,
        }
    })
}

/// Turns a view of a matrix into one of its transpose.
fn turn(matrix: &mut Value) {
    matrix.shape.reverse();
    matrix.strides.reverse();
}

/// Casts under construction.
struct Casts<'g> {
    /// Whether matmuls read the scales of gathered weights where a gather writes them.
    scales_in_place: bool,
    g: &'g mut Graph,
    o: &'g mut Orders,
    /// Tensors that matmuls read, by region.
    readings: BTreeSet<(Tensor, Reading, u32)>,
    /// Scales and their reciprocals.
    scales: BTreeMap<(Tensor, DType), [ValueId; 2]>,
    /// Codes, by the region that made them. Codes of weights do not outlive the pass of their unit.
    codes: BTreeMap<(Tensor, Reading, u32), Codes>,
    /// New ops, by the op that they precede.
    before: BTreeMap<u32, Vec<u32>>,
}

impl Casts<'_> {
    /// Makes a matmul read 8-bit factors.
    fn replace(&mut self, i: u32, product: Product) {
        let Product {
            role,
            linear,
            bias,
            grouped,
        } = product;
        let readings = product.readings();
        let factors: SmallVec<[ValueId; 4]> = self.g.ops[i as usize].inputs.clone();
        let [a, b] = [0, 1].map(|n| {
            let reading = readings[n];
            match linear.scaling {
                Scaling::Tensor => self.whole(i, factors[n], reading, product),
                _ => self.parts(i, factors[n], reading, linear),
            }
        });
        let fast = linear.fast_accum && role == Role::Forward;
        let kind = match (grouped, role) {
            (None, _) => OpKind::ScaledGemm(op::ScaledGemm {
                fast,
                bias,
                accumulate: false,
            }),
            (Some(Grouped { routed }), Role::WeightGrad) => {
                OpKind::ScaledGroupedGemmWeightGrad(op::ScaledGroupedGemmWeightGrad { routed })
            }
            (Some(Grouped { routed }), _) => {
                OpKind::ScaledGroupedGemm(op::ScaledGroupedGemm { fast, routed })
            }
        };
        let op = &mut self.g.ops[i as usize];
        op.act = Act::Compute(kind);
        op.inputs = SmallVec::from_slice(&[a.codes, b.codes, a.inverse, b.inverse]);
        op.inputs.extend(factors[2..].iter().copied());
    }

    /// Returns the codes of a tensor with one scale.
    fn whole(&mut self, i: u32, v: ValueId, reading: Reading, by: Product) -> Codes {
        let linear = by.linear;
        let (tensor, region) = (tensor(self.g, v), self.o.region[i as usize]);
        if let Some(codes) = self.made(i, &tensor, reading) {
            return codes;
        }
        if let (Tensor::Weight(p, ..), true) = (&tensor, linear.gathered) {
            let codes = self.gathered(i, v, *p, reading);
            self.codes.insert((tensor, reading, region), codes);
            return codes;
        }
        let scale = match self.scales.get(&(tensor.clone(), reading.to)) {
            Some(&scale) => scale,
            None => self.scale(i, v, reading.to, self.used_rows(i, &tensor, by)),
        };
        self.scales.insert((tensor.clone(), reading.to), scale);
        let mut found = None;
        for transposed in [false, true] {
            let here = Reading {
                transposed,
                ..reading
            };
            let read = |r: u32| self.readings.contains(&(tensor.clone(), here, r));
            let saved = transposed && linear.saves_codes && matches!(tensor, Tensor::Value(_));
            let later = || {
                let all = (tensor.clone(), here, 0)..=(tensor.clone(), here, u32::MAX);
                self.readings.range(all).next().is_some()
            };
            // Eager code casts in front of each matmul.
            let with_it = region != 0 && read(region);
            if transposed != reading.transposed && !with_it && !(saved && later()) {
                continue;
            }
            if self.made(i, &tensor, here).is_some() {
                continue;
            }
            let codes = Codes {
                codes: self.cast(i, v, scale[0], here),
                inverse: scale[1],
            };
            self.codes.insert((tensor.clone(), here, region), codes);
            if here == reading {
                found = Some(codes);
            }
        }
        found.unwrap_or_else(|| unreachable!("the reading itself is always made"))
    }

    /// Returns the codes of a weight that ranks gather in 8 bits: as they are, or a transposed copy
    /// of them.
    fn gathered(&mut self, i: u32, v: ValueId, p: ParamId, reading: Reading) -> Codes {
        let as_gathered = Value {
            dtype: reading.to,
            ..self.g.value(v).clone()
        };
        let codes = self.g.push_value(as_gathered, u32::MAX);
        let inverse = Value {
            shape: strides::shape(&[]),
            strides: strides::contiguous(&[]),
            offset: 0,
            dtype: DType::F32,
            root: Root::Scale(p),
            requires_grad: false,
        };
        Codes {
            codes: match reading.transposed {
                true => self.transpose(i, codes),
                false => codes,
            },
            inverse: self.g.push_value(inverse, u32::MAX),
        }
    }

    /// Returns the codes of a weight that ranks gather in 8 bits with a scale per block, or of its
    /// transpose, and the scales in the layout that matmuls read.
    fn gathered_blocks(
        &mut self,
        i: u32,
        v: ValueId,
        p: ParamId,
        reading: Reading,
        block: ScaleBlock,
    ) -> Codes {
        let value = self.g.value(v).clone();
        let matrix = [value.rows(), value.cols()];
        // Parts of columns of the matrix are parts of rows of its transpose.
        let apart = reading.transposed && block != block.of_transpose();
        let (stored, roots) = match apart {
            true => (
                block.of_transpose(),
                [Root::ColumnCodes(p), Root::ColumnScale(p)],
            ),
            false => (block, [Root::Param(p), Root::Scale(p)]),
        };
        let grid = stored.grid(matrix);
        let mut scales = Value {
            shape: strides::shape(&grid),
            strides: strides::contiguous(&grid),
            offset: value.offset / block.numel(),
            dtype: block.inverse_type(),
            root: roots[1],
            requires_grad: false,
        };
        let mut codes = Value {
            dtype: reading.to,
            root: roots[0],
            ..value
        };
        if apart {
            turn(&mut codes);
        }
        if reading.transposed {
            turn(&mut scales);
        }
        let mut codes = self.g.push_value(codes, u32::MAX);
        if reading.transposed && !apart {
            codes = self.transpose(i, codes);
        }
        let grid = [scales.shape[0], scales.shape[1]];
        let scales = self.g.push_value(scales, u32::MAX);
        if self.scales_in_place && !reading.transposed {
            return Codes {
                codes,
                inverse: scales,
            };
        }
        let read = match reading.transposed {
            true => [matrix[1], matrix[0]],
            false => matrix,
        };
        let inverse = self.fresh(i, v, &grid, Some(block.strides(read)), block.inverse_type());
        self.push(i, OpKind::Copy, &[scales], &[inverse]);
        Codes { codes, inverse }
    }

    /// Returns codes that have been made and may still be read.
    fn made(&self, i: u32, tensor: &Tensor, reading: Reading) -> Option<Codes> {
        let region = self.o.region[i as usize];
        let here = self.codes.get(&(tensor.clone(), reading, region)).copied();
        let saved = || {
            let all = (tensor.clone(), reading, 0)..=(tensor.clone(), reading, u32::MAX);
            let mut found = self.codes.range(all).map(|(_, &codes)| codes);
            found.next()
        };
        match tensor {
            Tensor::Value(_) => here.or_else(saved),
            // Eager layers know nothing of one another, and the weight may be gone.
            Tensor::Weight(..) if region == 0 => None,
            Tensor::Weight(..) => here,
        }
    }

    /// Returns the offsets of experts if a tensor may have rows that none of them reads, which hold
    /// what was in memory before.
    fn used_rows(&self, i: u32, tensor: &Tensor, by: Product) -> Option<ValueId> {
        by.grouped.and_then(|of| of.routed)?;
        let offsets = self.g.ops[i as usize].inputs[2];
        matches!(tensor, Tensor::Value(_)).then_some(offsets)
    }

    /// Adds the maximum and the scale of a tensor, of which the rows before the last of some
    /// offsets count; returns the scale and its reciprocal.
    fn scale(&mut self, i: u32, v: ValueId, to: DType, offsets: Option<ValueId>) -> [ValueId; 2] {
        let mut rows = self.g.value(v).shape.clone();
        if let Some(last) = rows.last_mut() {
            *last = 1;
        }
        let amax = self.fresh(i, v, &rows, None, DType::F32);
        self.push(i, OpKind::RowAmax, &[v], &[amax]);
        let out = [0, 1].map(|_| self.fresh(i, v, &[], None, DType::F32));
        let routed = offsets.is_some();
        let kind = OpKind::Float8Scale(op::Float8Scale { to, routed });
        let inputs: SmallVec<[ValueId; 2]> = [amax].into_iter().chain(offsets).collect();
        self.push(i, kind, &inputs, &out);
        out
    }

    /// Adds a cast with a scale.
    fn cast(&mut self, i: u32, v: ValueId, scale: ValueId, reading: Reading) -> ValueId {
        let value = self.g.value(v);
        let shape = value.shape.clone();
        if !reading.transposed {
            let codes = self.fresh(i, v, &shape, None, reading.to);
            self.push(i, OpKind::Float8Cast, &[v, scale], &[codes]);
            return codes;
        }
        let (layout, turned) = transposed(value);
        let written = self.fresh(i, v, &shape, Some(layout), reading.to);
        self.push(i, OpKind::Float8Cast, &[v, scale], &[written]);
        self.view(written, &turned)
    }

    /// Returns the codes of a tensor, or of its transpose, with one scale per row or block.
    fn parts(&mut self, i: u32, v: ValueId, reading: Reading, linear: Float8Linear) -> Codes {
        let Float8Linear {
            scaling, gathered, ..
        } = linear;
        let (tensor, region) = (tensor(self.g, v), self.o.region[i as usize]);
        if let Some(codes) = self.made(i, &tensor, reading) {
            return codes;
        }
        let made = match (scaling, &tensor) {
            (Scaling::Block { weights, .. }, Tensor::Weight(p, ..)) => match gathered {
                true => self.gathered_blocks(i, v, *p, reading, weights),
                false => self.blocks(i, v, reading, weights),
            },
            (Scaling::Block { others, .. }, Tensor::Value(_)) => self.blocks(i, v, reading, others),
            _ => self.rows(i, v, reading),
        };
        self.codes.insert((tensor, reading, region), made);
        made
    }

    /// Adds a cast with a scale per block. It writes codes of the transpose itself.
    fn blocks(&mut self, i: u32, v: ValueId, reading: Reading, block: ScaleBlock) -> Codes {
        let value = self.g.value(v);
        let (mut shape, mut matrix) = (value.shape.clone(), [value.rows(), value.cols()]);
        if reading.transposed {
            matrix.reverse();
            shape = strides::shape(&matrix);
        }
        let codes = self.fresh(i, v, &shape, None, reading.to);
        let layout = Some(block.strides(matrix));
        let inverse = self.fresh(i, v, &block.grid(matrix), layout, block.inverse_type());
        let kind = op::Float8CastBlocks {
            to: reading.to,
            block,
            transposed: reading.transposed,
        };
        self.push(i, OpKind::Float8CastBlocks(kind), &[v], &[codes, inverse]);
        Codes { codes, inverse }
    }

    /// Adds a cast with a scale per row, of a transposed copy if the transpose is read.
    fn rows(&mut self, i: u32, v: ValueId, reading: Reading) -> Codes {
        let source = if reading.transposed {
            self.transpose(i, v)
        } else {
            v
        };
        let mut shape = self.g.value(source).shape.clone();
        let codes = self.fresh(i, v, &shape, None, reading.to);
        if let Some(last) = shape.last_mut() {
            *last = 1;
        }
        let inverse = self.fresh(i, v, &shape, None, DType::F32);
        let kind = OpKind::Float8CastRows(op::Float8CastRows { to: reading.to });
        self.push(i, kind, &[source], &[codes, inverse]);
        Codes { codes, inverse }
    }

    /// Adds a transposed copy.
    fn transpose(&mut self, i: u32, v: ValueId) -> ValueId {
        let value = self.g.value(v);
        let (shape, dtype) = (value.shape.clone(), value.dtype);
        let (layout, turned) = transposed(value);
        let written = self.fresh(i, v, &shape, Some(layout), dtype);
        self.push(i, OpKind::Copy, &[v], &[written]);
        self.view(written, &turned)
    }

    /// Adds a buffer for the op before `i`, of the kind of `like`, and the value that covers it.
    fn fresh(
        &mut self,
        i: u32,
        like: ValueId,
        shape: &[u64],
        layout: Option<Strides>,
        dtype: DType,
    ) -> ValueId {
        let of = self.g.buffer_of(like);
        let grad = of.is_some_and(|b| self.g.buffers[b as usize].grad);
        let module: ModuleId = self.g.ops[i as usize].module;
        let buffer = self.g.buffers.len() as u32;
        let layout = layout.unwrap_or_else(|| strides::contiguous(shape));
        let rooms = shape.iter().zip(&layout).map(|(&n, &stride)| n * stride);
        self.g.buffers.push(Buffer {
            bytes: rooms.max().unwrap_or(1) * dtype.size(),
            dtype,
            module,
            logits: false,
            grad,
            first: ValueId(self.g.values.len() as u32),
        });
        let value = Value {
            shape: strides::shape(shape),
            strides: layout,
            offset: 0,
            dtype,
            root: Root::Buffer(buffer),
            requires_grad: false,
        };
        self.g.push_value(value, u32::MAX)
    }

    /// Adds a contiguous value of this shape over the buffer of another one.
    fn view(&mut self, of: ValueId, shape: &[u64]) -> ValueId {
        let value = Value {
            shape: strides::shape(shape),
            strides: strides::contiguous(shape),
            ..self.g.value(of).clone()
        };
        self.g.push_value(value, u32::MAX)
    }

    /// Adds an op in front of op `i`.
    fn push(&mut self, i: u32, kind: OpKind, inputs: &[ValueId], outputs: &[ValueId]) {
        let act = Act::Compute(kind);
        let id = self.o.add(self.g, i, act, inputs, outputs);
        self.before.entry(i).or_default().push(id);
    }
}
