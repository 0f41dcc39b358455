//! Constructs values and ops: shapes, layouts and aliasing of results.

use super::{Act, Buffer, Graph, Op, Root, Value, ValueId, View};
use crate::ir::strides::Strides;
use crate::ir::{
    AxisId, CollectiveKind, Const, ConstId, DType, Indexing, ModelCollective, ModuleId, OpKind,
    PushedRows, Real, SelectedRows, Shape, op, strides,
};
use smallvec::SmallVec;

/// Framework calls of a collective with a gradient (`_functional_collectives.*_autograd`), and of
/// its backward: custom operators, async tensors, and an autograd function. In
/// `scenarios/hardware/measure/host.py`, an all-to-all on one rank takes 366 to 449 us of host
/// time, and 163 to 263 us in backward; an addition takes 7 us.
const FUNCTIONAL_CALLS: u8 = 60;
const FUNCTIONAL_BACKWARD_CALLS: u8 = 25;

/// How ranks push rows to the ranks of their experts, and push the results back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peers {
    pub(crate) axis: AxisId,
    pub(crate) pushed: PushedRows,
    /// Choices of this rank's rows, as indices into each rank's experts, `[ranks * tokens, k]`.
    pub(crate) sent: ValueId,
    /// Choices of the rows of all ranks, as indices into this rank's experts.
    pub(crate) got: ValueId,
    /// Position of each token's results, see [`op::PushedRows`].
    pub(crate) position: ValueId,
}

impl Peers {
    fn collective(self, kind: CollectiveKind) -> ModelCollective {
        ModelCollective {
            kind,
            axis: self.axis,
            rows: Some(SelectedRows::Pushed(self.pushed)),
        }
    }
}

impl Graph {
    pub(crate) fn leaf(
        &mut self,
        shape: &[u64],
        dtype: DType,
        root: Root,
        requires_grad: bool,
    ) -> ValueId {
        let value = Value {
            shape: strides::shape(shape),
            strides: strides::contiguous(shape),
            offset: 0,
            dtype,
            root,
            requires_grad,
        };
        self.push_value(value, u32::MAX)
    }

    pub(crate) fn constant(&mut self, c: Const, shape: &[u64]) -> ValueId {
        let id = ConstId(self.consts.len() as u32);
        let dtype = c.dtype;
        self.consts.push(c);
        self.leaf(shape, dtype, Root::Const(id), false)
    }

    /// Adds a value that `producer` computes (`u32::MAX` for none).
    pub(crate) fn push_value(&mut self, value: Value, producer: u32) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(value);
        self.producer.push(producer);
        id
    }

    fn module(&self) -> ModuleId {
        self.module.unwrap_or(ModuleId(0))
    }

    fn push_op(&mut self, act: Act, inputs: &[ValueId], outputs: SmallVec<[ValueId; 2]>) {
        let node = self.node.unwrap_or_else(|| {
            self.nodes += 1;
            self.nodes
        });
        self.ops.push(Op {
            act,
            inputs: SmallVec::from_slice(inputs),
            outputs,
            module: self.module(),
            stage: self.stage,
            node,
            dispatches: 1,
        });
    }

    /// Adds a new buffer and the value that covers it.
    fn fresh(
        &mut self,
        shape: &[u64],
        strides: Strides,
        dtype: DType,
        requires_grad: bool,
    ) -> ValueId {
        let numel: u64 = shape.iter().product();
        let logits = shape.len() > 1 && self.vocab == shape.last().copied();
        let buffer = self.buffers.len() as u32;
        let (module, grad) = (self.module(), self.in_backward);
        self.buffers.push(Buffer {
            bytes: numel * dtype.size(),
            dtype,
            module,
            logits,
            grad,
            first: ValueId(self.values.len() as u32),
        });
        let value = Value {
            shape: strides::shape(shape),
            strides,
            offset: 0,
            dtype,
            root: Root::Buffer(buffer),
            // Counts and choices have no gradient, even if they depend on values that do.
            requires_grad: requires_grad && (dtype.is_float() || dtype.is_float8()),
        };
        let producer = self.ops.len() as u32;
        self.push_value(value, producer)
    }

    fn any_requires_grad(&self, inputs: &[ValueId]) -> bool {
        !self.in_backward && inputs.iter().any(|&v| self.value(v).requires_grad)
    }

    /// Adds an op with contiguous results of these shapes and dtypes.
    pub(crate) fn compute(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        results: &[(&[u64], DType)],
    ) -> SmallVec<[ValueId; 2]> {
        let rg = self.any_requires_grad(inputs);
        let outputs: SmallVec<[ValueId; 2]> = results
            .iter()
            .map(|&(sh, dt)| self.fresh(sh, strides::contiguous(sh), dt, rg))
            .collect();
        self.push_op(Act::Compute(kind), inputs, outputs.clone());
        outputs
    }

    /// Adds an op with one result whose layout follows that of `like` (PyTorch's "preserve
    /// format").
    pub(crate) fn compute_like(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        like: &[ValueId],
    ) -> SmallVec<[ValueId; 2]> {
        let rg = self.any_requires_grad(inputs);
        let outputs: SmallVec<[ValueId; 2]> = like
            .iter()
            .map(|&l| {
                let v = self.value(l);
                let (shape, dtype) = (v.shape.clone(), v.dtype);
                let strides = strides::dense_like(&shape, &v.strides);
                self.fresh(&shape, strides, dtype, rg)
            })
            .collect();
        self.push_op(Act::Compute(kind), inputs, outputs.clone());
        outputs
    }

    /// Adds fused attention over the query, keys, values and an optional mask. The result has the
    /// layout of the query (cuDNN's kernel, 16-bit types) or `[batch, seq, heads, head_dim]` order
    /// (the memory-efficient kernel, float32; and with `by_rows`).
    pub(crate) fn attention(&mut self, kind: OpKind, inputs: &[ValueId], by_rows: bool) -> ValueId {
        let rg = self.any_requires_grad(inputs);
        let x = self.value(inputs[0]);
        let (shape, dtype) = (x.shape.clone(), x.dtype);
        let row_order = [
            shape[1] * shape[2] * shape[3],
            shape[3],
            shape[1] * shape[3],
            1,
        ];
        let like: &[u64] = if by_rows || dtype == DType::F32 {
            &row_order
        } else {
            &x.strides
        };
        let strides = strides::dense_like(&shape, like);
        let rows = if dtype == DType::F32 {
            shape[2].next_multiple_of(32)
        } else {
            shape[2]
        };
        let lse = [shape[0], shape[1], rows];
        let outputs: SmallVec<[ValueId; 2]> = SmallVec::from_slice(&[
            self.fresh(&shape, strides, dtype, rg),
            self.fresh(&lse, strides::contiguous(&lse), DType::F32, rg),
            self.fresh(&[], Strides::new(), DType::I64, false),
            self.fresh(&[], Strides::new(), DType::I64, false),
        ]);
        let out = outputs[0];
        self.push_op(Act::Compute(kind), inputs, outputs);
        out
    }

    /// Returns whether new ops belong to compiled code.
    pub(crate) fn functional(&self) -> bool {
        self.compiled
            .get(self.module().index())
            .copied()
            .unwrap_or(false)
    }

    /// Adds `other` to `target`: in place or, in compiled code, into a new tensor.
    pub(crate) fn add_into(&mut self, target: ValueId, other: ValueId) -> ValueId {
        if self.functional() {
            self.compute_like(OpKind::Add, &[target, other], &[target])[0]
        } else {
            self.compute_into(OpKind::Add, &[target, other], target)
        }
    }

    /// Adds an op that writes its result to `target`'s memory.
    pub(crate) fn compute_into(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        target: ValueId,
    ) -> ValueId {
        let rg = self.any_requires_grad(inputs);
        let mut value = self.value(target).clone();
        value.requires_grad = rg;
        let producer = self.ops.len() as u32;
        let out = self.push_value(value, producer);
        self.push_op(Act::Compute(kind), inputs, SmallVec::from_slice(&[out]));
        out
    }

    /// Adds an op with two results, each written to an operand's memory.
    pub(crate) fn compute_into_both(
        &mut self,
        kind: OpKind,
        inputs: &[ValueId],
        first: ValueId,
        second: ValueId,
    ) -> [ValueId; 2] {
        let out = self.compute_into(kind, inputs, first);
        let value = self.value(second).clone();
        let second = self.push_value(value, self.ops.len() as u32 - 1);
        if let Some(op) = self.ops.last_mut() {
            op.outputs.push(second);
        }
        [out, second]
    }

    /// Adds uninitialized memory that later ops fill.
    pub(crate) fn empty(&mut self, shape: &[u64], dtype: DType) -> ValueId {
        let v = self.fresh(shape, strides::contiguous(shape), dtype, false);
        self.producer[v.index()] = u32::MAX;
        v
    }

    /// Ties gradients of `x` and `w` that are already computed to the loss.
    pub(crate) fn precomputed(
        &mut self,
        loss: ValueId,
        of: [ValueId; 2],
        grads: [ValueId; 2],
    ) -> ValueId {
        let inputs = [loss, of[0], of[1], grads[0], grads[1]];
        let value = Value {
            requires_grad: self.any_requires_grad(&of),
            ..self.value(loss).clone()
        };
        let out = self.push_value(value, self.ops.len() as u32);
        self.push_op(
            Act::View(View::Precomputed),
            &inputs,
            SmallVec::from_slice(&[out]),
        );
        out
    }

    /// Returns the same value, detached from differentiation.
    pub(crate) fn detach(&mut self, v: ValueId) -> ValueId {
        let x = self.value(v);
        let (shape, strides, offset) = (x.shape.clone(), x.strides.clone(), x.offset);
        let out = self.view_op(View::Reshape, v, shape, strides, offset);
        self.values[out.index()].requires_grad = false;
        out
    }

    fn view_op(
        &mut self,
        view: View,
        of: ValueId,
        shape: Shape,
        strides: Strides,
        offset: u64,
    ) -> ValueId {
        let v = self.value(of);
        let value = Value {
            shape,
            strides,
            offset,
            dtype: v.dtype,
            root: v.root,
            requires_grad: v.requires_grad && !self.in_backward,
        };
        let producer = self.ops.len() as u32;
        let out = self.push_value(value, producer);
        self.push_op(Act::View(view), &[of], SmallVec::from_slice(&[out]));
        out
    }

    /// Sets the number of framework calls of the last op.
    pub(crate) fn dispatches(&mut self, n: u8) {
        if let Some(op) = self.ops.last_mut() {
            op.dispatches = n;
        }
    }

    /// Adds an autograd node without ops (for example, the backward of an addition).
    pub(crate) fn pass(&mut self) {
        self.push_op(Act::View(View::Pass), &[], SmallVec::new());
    }

    /// Makes the host wait for all work so far, after `calls` framework calls. Compiled code has no
    /// such reads.
    pub(crate) fn host_read(&mut self, calls: u8) {
        if !self.functional() {
            self.push_op(Act::View(View::HostRead), &[], SmallVec::new());
            self.dispatches(calls);
        }
    }

    /// Makes the host read `sizes` before `v` is used. Compiled code has a graph break there.
    pub(crate) fn host_sizes(&mut self, v: ValueId, sizes: ValueId) -> ValueId {
        let x = self.value(v);
        let (shape, strides, offset) = (x.shape.clone(), x.strides.clone(), x.offset);
        let out = self.view_op(View::HostSizes, v, shape, strides, offset);
        if let Some(op) = self.ops.last_mut() {
            op.inputs.push(sizes);
            // `sum`, `to` and `tolist`.
            op.dispatches = 3;
        }
        out
    }

    /// Communicates a value along an axis; the result has this shape.
    pub(crate) fn collective(
        &mut self,
        collective: ModelCollective,
        v: ValueId,
        shape: &[u64],
    ) -> ValueId {
        let v = self.make_contiguous(v);
        let (dtype, rg) = (self.value(v).dtype, self.any_requires_grad(&[v]));
        let out = self.fresh(shape, strides::contiguous(shape), dtype, rg);
        self.push_op(
            Act::Collective(collective),
            &[v],
            SmallVec::from_slice(&[out]),
        );
        if self.in_backward {
            self.dispatches(FUNCTIONAL_BACKWARD_CALLS);
        } else if rg {
            self.dispatches(FUNCTIONAL_CALLS);
        }
        out
    }

    /// Exchanges the rows that `sent` and `received`, `[ranks, n]`, count, see
    /// [`SentRows::by`](crate::ir::SentRows::by). Rows that were not sent to this rank stay
    /// uninitialized.
    pub(crate) fn exchange_counted(
        &mut self,
        collective: ModelCollective,
        v: ValueId,
        [sent, received]: [ValueId; 2],
    ) -> ValueId {
        let shape = self.value(v).shape.clone();
        let out = self.collective(collective, v, &shape);
        if let Some(op) = self.ops.last_mut() {
            op.inputs.extend([sent, received]);
        }
        out
    }

    /// Pushes the rows of a value to the ranks of their experts. The result has the rows of all
    /// ranks; rows that were not sent to this rank stay uninitialized.
    pub(crate) fn peer_push(&mut self, by: Peers, x: ValueId) -> ValueId {
        let shape = [by.pushed.rows, self.value(x).cols()];
        self.push_rows(CollectiveKind::PeerPush, by, x, by.sent, &shape)
    }

    /// Pushes rows back to the ranks from which [`Graph::peer_push`] has brought them, and sums
    /// those of each token in rank order.
    pub(crate) fn peer_sum(&mut self, by: Peers, rows: ValueId) -> ValueId {
        let (shape, dtype) = (self.value(rows).shape.clone(), self.value(rows).dtype);
        let back = self.push_rows(CollectiveKind::PeerReturn, by, rows, by.got, &shape);
        // Gradients flow through `PeerSum` instead.
        self.values[back.index()].requires_grad = false;
        let tokens = self.value(by.position).shape[0];
        let sum = self.compute(
            OpKind::Unpermute(op::Unpermute {
                by: Indexing::Own,
                routed: Some(by.pushed.expected),
            }),
            &[back, by.position],
            &[(&[tokens, shape[1]], dtype)],
        )[0];
        let value = Value {
            requires_grad: self.any_requires_grad(&[rows]),
            ..self.value(sum).clone()
        };
        let out = self.push_value(value, self.ops.len() as u32);
        let inputs = [sum, rows, by.sent, by.got, by.position];
        let act = Act::View(View::PeerSum(by.collective(CollectiveKind::PeerReturn)));
        self.push_op(act, &inputs, SmallVec::from_slice(&[out]));
        out
    }

    fn push_rows(
        &mut self,
        kind: CollectiveKind,
        by: Peers,
        v: ValueId,
        choices: ValueId,
        shape: &[u64],
    ) -> ValueId {
        let out = self.collective(by.collective(kind), v, shape);
        if let Some(op) = self.ops.last_mut() {
            let other = if choices == by.sent { by.got } else { by.sent };
            op.inputs.extend([choices, other, by.position]);
        }
        out
    }

    /// Returns the same value, whose gradient is summed along an axis.
    pub(crate) fn sum_gradient(&mut self, axis: AxisId, v: ValueId) -> ValueId {
        let x = self.value(v);
        let (shape, strides, offset) = (x.shape.clone(), x.strides.clone(), x.offset);
        self.view_op(View::SumGradient(axis), v, shape, strides, offset)
    }

    /// Reshapes a value: as a view if its strides allow it, otherwise as a copy.
    pub(crate) fn reshape(&mut self, v: ValueId, to: &[u64]) -> ValueId {
        let x = self.value(v);
        if x.shape.as_slice() == to {
            return v;
        }
        match strides::view(&x.shape, &x.strides, to) {
            Some(strides) => {
                let offset = x.offset;
                self.view_op(View::Reshape, v, strides::shape(to), strides, offset)
            }
            None => {
                let dtype = x.dtype;
                self.compute(OpKind::Copy, &[v], &[(to, dtype)])[0]
            }
        }
    }

    /// Swaps two dimensions.
    pub(crate) fn transpose(&mut self, v: ValueId, a: usize, b: usize) -> ValueId {
        let x = self.value(v);
        let (mut shape, mut strides, offset) = (x.shape.clone(), x.strides.clone(), x.offset);
        shape.swap(a, b);
        strides.swap(a, b);
        self.view_op(View::Transpose(a as u8, b as u8), v, shape, strides, offset)
    }

    /// Takes `len` entries of a dimension.
    pub(crate) fn slice(&mut self, v: ValueId, axis: usize, start: u64, len: u64) -> ValueId {
        let x = self.value(v);
        let (mut shape, strides) = (x.shape.clone(), x.strides.clone());
        let offset = x.offset + start * strides[axis];
        shape[axis] = len;
        self.view_op(
            View::Slice {
                axis: axis as u8,
                start,
            },
            v,
            shape,
            strides,
            offset,
        )
    }

    /// Splits a dimension into `n` equal parts.
    pub(crate) fn split(&mut self, v: ValueId, axis: usize, n: u64) -> SmallVec<[ValueId; 4]> {
        let x = self.value(v).clone();
        let len = x.shape[axis] / n;
        let producer = self.ops.len() as u32;
        let parts: SmallVec<[ValueId; 4]> = (0..n)
            .map(|i| {
                let mut part = x.clone();
                part.shape[axis] = len;
                part.offset += i * len * x.strides[axis];
                self.push_value(part, producer)
            })
            .collect();
        self.push_op(
            Act::View(View::Split { axis: axis as u8 }),
            &[v],
            SmallVec::from_slice(&parts),
        );
        parts
    }

    /// Broadcasts a value along new leading dimensions and dimensions of size 1.
    pub(crate) fn expand(&mut self, v: ValueId, to: &[u64]) -> ValueId {
        let x = self.value(v);
        let strides = strides::broadcast(&x.shape, &x.strides, to);
        let offset = x.offset;
        self.view_op(View::Expand, v, strides::shape(to), strides, offset)
    }

    /// Casts a value to another dtype. Returns the value itself if it has that dtype. Eager code
    /// preserves the layout, as `Tensor.to` does.
    pub(crate) fn cast(&mut self, v: ValueId, dtype: DType) -> ValueId {
        let x = self.value(v);
        if x.dtype == dtype {
            return v;
        }
        let shape = x.shape.clone();
        let strides = if self.functional() {
            strides::contiguous(&shape)
        } else {
            strides::dense_like(&shape, &x.strides)
        };
        let rg = self.any_requires_grad(&[v]);
        let out = self.fresh(&shape, strides, dtype, rg);
        self.push_op(
            Act::Compute(OpKind::Copy),
            &[v],
            SmallVec::from_slice(&[out]),
        );
        out
    }

    /// Returns `a` itself if it is contiguous, otherwise a contiguous copy.
    pub(crate) fn make_contiguous(&mut self, v: ValueId) -> ValueId {
        let x = self.value(v);
        if x.is_contiguous() {
            return v;
        }
        let (shape, dtype) = (x.shape.clone(), x.dtype);
        self.compute(OpKind::Copy, &[v], &[(&shape, dtype)])[0]
    }

    /// Adds an elementwise op of two operands; the smaller one is broadcast.
    pub(crate) fn binary(&mut self, kind: OpKind, a: ValueId, b: ValueId) -> ValueId {
        let like = if self.value(b).numel() > self.value(a).numel() {
            b
        } else {
            a
        };
        self.compute_like(kind, &[a, b], &[like])[0]
    }

    /// Adds an elementwise op of two operands. The result has the wider of their dtypes, as in
    /// PyTorch's type promotion.
    pub(crate) fn promoted(&mut self, kind: OpKind, a: ValueId, b: ValueId) -> ValueId {
        let out = self.binary(kind, a, b);
        let wider = |v: ValueId| self.value(v).dtype;
        let dtype = match wider(a).size() < wider(b).size() {
            true => wider(b),
            false => wider(a),
        };
        self.set_dtype(out, dtype);
        out
    }

    /// Sets the dtype of a new result.
    fn set_dtype(&mut self, v: ValueId, dtype: DType) {
        let Root::Buffer(buffer) = self.value(v).root else {
            unreachable!("results of ops have buffers");
        };
        let buffer = &mut self.buffers[buffer as usize];
        buffer.bytes = buffer.bytes / buffer.dtype.size() * dtype.size();
        buffer.dtype = dtype;
        self.values[v.index()].dtype = dtype;
    }

    /// Adds an elementwise op of one operand.
    pub(crate) fn unary(&mut self, kind: OpKind, a: ValueId) -> ValueId {
        self.compute_like(kind, &[a], &[a])[0]
    }

    /// Adds a filled tensor with the layout of `like`.
    pub(crate) fn fill_like(&mut self, like: ValueId, value: f64) -> ValueId {
        self.compute_like(OpKind::Fill(op::Fill { value: Real(value) }), &[], &[like])[0]
    }

    /// Concatenates values.
    pub(crate) fn cat(&mut self, parts: &[ValueId], axis: usize) -> ValueId {
        let first = self.value(parts[0]);
        let (mut shape, dtype) = (first.shape.clone(), first.dtype);
        shape[axis] = parts.iter().map(|&p| self.value(p).shape[axis]).sum();
        self.compute(
            OpKind::Cat(op::Cat { axis: axis as u8 }),
            parts,
            &[(&shape, dtype)],
        )[0]
    }

    /// Lets a value live until the end of backward, because the training loop has a variable for
    /// it.
    pub(crate) fn keep(&mut self, v: ValueId) {
        self.kept.extend(self.buffer_of(v));
    }

    /// Ends the lifetime of the code's local variable for this value, which goes out of scope or is
    /// reassigned here, or of a value that autograd has saved. Compiled code keeps no such values.
    pub(crate) fn release(&mut self, v: ValueId) {
        if let (Some(b), Some(op)) = (self.buffer_of(v), self.ops.len().checked_sub(1)) {
            self.holds.push((op as u32, b));
        }
    }
}
