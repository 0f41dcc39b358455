//! Shared parts of the families' forward passes: modules, parameters, layers.

use super::ModelGraph;
use super::declare::{Adapter, Layer, Tree};
use super::flops::{self, Backward};
use super::spec::Inputs;
use crate::config::{CompileMode, DocumentLengths, Implementation, Scenario};
use crate::graph::{Graph, Root, ValueId};
use crate::ir::{
    AxisId, CollectiveKind, Const, DType, Indexing, ModelCollective, ModuleId, ModuleKind,
    MoeStage, OpKind, Packed, PackedFormat, PackedScales, ParamId, Real, ScoreMod, op,
};
use crate::recipes::{self, Recipe};
use crate::units::Bytes;
use smallvec::SmallVec;

/// A part of a model whose code sees a separate scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The tower `vision`, an encoder, or a decoder of images.
    First,
    /// The tower `audio`.
    Audio,
}

/// What the code of each [`Part`] sees in place of the scenario.
pub(crate) type Parts<S> = [Option<S>; 2];

/// A graph under construction.
pub(crate) struct Builder<'s> {
    pub(crate) s: &'s Scenario,
    parts: Parts<&'s Scenario>,
    pub(crate) tree: Tree,
    pub(crate) g: Graph,
    pub(crate) params: Vec<ValueId>,
    recipe: Box<dyn Recipe>,
    loss: Option<ValueId>,
    objective: Option<ValueId>,
    /// First position of the document of each position, if every sequence has different documents.
    starts: Option<ValueId>,
}

impl<'s> Builder<'s> {
    /// Starts a graph.
    pub(crate) fn new(s: &'s Scenario, parts: Parts<&'s Scenario>, tree: Tree) -> Self {
        let mut g = Graph::default();
        let recipe = recipes::of(&s.precision);
        let params = tree
            .params
            .iter()
            .enumerate()
            .map(|(i, p)| {
                g.leaf(
                    &p.shape,
                    recipe.param(p),
                    Root::Param(ParamId(i as u32)),
                    p.requires_grad,
                )
            })
            .collect();
        if s.model.family.spec().inputs == Inputs::Tokens {
            g.vocab = Some(s.model.vocab);
        }
        g.compiled = compiled(s, &tree);
        Self {
            s,
            parts,
            tree,
            g,
            params,
            recipe,
            loss: None,
            objective: None,
            starts: None,
        }
    }

    /// Returns the samples per micro-batch.
    pub(crate) fn batch(&self) -> u64 {
        self.s.train.micro_batch
    }

    /// Returns the tokens per sample.
    pub(crate) fn seq(&self) -> u64 {
        self.s.train.seq_len
    }

    /// Runs the code of a part of the model.
    pub(crate) fn inside<T>(&mut self, part: Part, f: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.s;
        self.s = self.parts[part as usize].unwrap_or(outer);
        let out = f(self);
        self.s = outer;
        out
    }

    /// Returns whether the forward skips a block.
    pub(crate) fn skips(&self, block: ModuleId) -> bool {
        self.tree.skips(block)
    }

    /// Runs `f` with new ops belonging to `m`.
    pub(crate) fn within<T>(&mut self, m: ModuleId, f: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.g.module.replace(m);
        let out = f(self);
        self.g.module = outer;
        out
    }

    /// Runs `f` with new ops belonging to a part of a layer of experts.
    pub(crate) fn in_stage<T>(&mut self, stage: MoeStage, f: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.g.stage.replace(stage);
        let out = f(self);
        self.g.stage = outer;
        out
    }

    /// Runs `f`, whose ops backward runs again: `torch.utils.checkpoint`.
    pub(super) fn checkpoint<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        let start = self.g.ops.len();
        let out = f(self);
        let ops = start..self.g.ops.len();
        self.g.checkpoints.push(ops);
        out
    }

    /// Adds an input or table with contiguous elements.
    pub(crate) fn constant(
        &mut self,
        name: &'static str,
        shape: &[u64],
        dtype: DType,
        per_micro_batch: bool,
    ) -> ValueId {
        let bytes = Bytes(shape.iter().product::<u64>() * dtype.size());
        self.g.constant(
            Const {
                name,
                bytes,
                dtype,
                per_micro_batch,
            },
            shape,
        )
    }

    /// Adds input activations that change from micro-batch to micro-batch.
    pub(crate) fn input(&mut self, shape: &[u64]) -> ValueId {
        let dtype = self.recipe.activation();
        self.constant("input", shape, dtype, true)
    }

    /// Returns the type of activations.
    pub(crate) fn activation_type(&self) -> DType {
        self.recipe.activation()
    }

    /// Casts a table to the type of the activations that it is multiplied by.
    pub(crate) fn as_activation(&mut self, table: ValueId) -> ValueId {
        let dtype = self.recipe.activation();
        self.g.cast(table, dtype)
    }

    /// Casts a value to the type in which an operation reads input `n`, as model code does
    /// explicitly with `.float()`.
    pub(crate) fn as_operand(&mut self, op: OpKind, n: usize, v: ValueId) -> ValueId {
        match self.recipe.operand(&op, n) {
            Some(dtype) => self.g.cast(v, dtype),
            None => v,
        }
    }

    /// Copies rows to their positions; the result has `rows` of them.
    pub(crate) fn permute(
        &mut self,
        by: Indexing,
        [x, position]: [ValueId; 2],
        rows: u64,
    ) -> ValueId {
        let kind = OpKind::Permute(op::Permute { by, routed: None });
        self.moved(kind, [x, position], rows)
    }

    /// Adds up the rows at the positions of each of `rows`.
    pub(crate) fn unpermute(
        &mut self,
        by: Indexing,
        [x, position]: [ValueId; 2],
        rows: u64,
    ) -> ValueId {
        let kind = OpKind::Unpermute(op::Unpermute { by, routed: None });
        self.moved(kind, [x, position], rows)
    }

    /// Copies rows to their positions, or adds up those there; the result has `rows` of them.
    pub(crate) fn moved(
        &mut self,
        kind: OpKind,
        [x, position]: [ValueId; 2],
        rows: u64,
    ) -> ValueId {
        let cols = self.g.value(x).cols();
        self.compute(kind, &[x, position], &[&[rows, cols]])[0]
    }

    /// Adds an op with contiguous results of these shapes, whose types follow from its operands.
    pub(crate) fn compute(
        &mut self,
        op: OpKind,
        inputs: &[ValueId],
        shapes: &[&[u64]],
    ) -> SmallVec<[ValueId; 2]> {
        let dtypes: SmallVec<[DType; 4]> = inputs.iter().map(|&v| self.g.value(v).dtype).collect();
        let results: SmallVec<[(&[u64], DType); 3]> = shapes
            .iter()
            .enumerate()
            .map(|(n, &shape)| (shape, op.def().result(n, &dtypes)))
            .collect();
        self.g.compute(op, inputs, &results)
    }

    pub(crate) fn weight(&self, layer: Layer) -> ValueId {
        self.params[self.tree.weight(layer).index()]
    }

    pub(crate) fn bias(&self, layer: Layer) -> Option<ValueId> {
        self.tree.bias(layer).map(|p| self.params[p.index()])
    }

    /// Applies `nn.Linear` of a module to a contiguous input of any rank, and its adapter if it has
    /// one.
    pub(crate) fn linear(&mut self, layer: Layer, x: ValueId) -> ValueId {
        let bias = self.bias(layer);
        let adapter = self.tree.adapter(layer);
        let magnitude = adapter.and_then(|a| Some((a, a.magnitude?)));
        if let Some((adapter, magnitude)) = magnitude {
            if self.is_transformers() {
                return self.decomposed_in_parts(layer, adapter, magnitude, x);
            }
            let y = self.product(layer, x, None);
            let y = self.adapted(layer, adapter, x, y);
            let y = self.decomposed(layer, adapter, magnitude, y);
            return self.within(layer.module(), |s| match bias {
                Some(bias) => s.g.binary(OpKind::Add, y, bias),
                None => y,
            });
        }
        let y = self.product(layer, x, bias);
        match adapter {
            Some(adapter) => self.adapted(layer, adapter, x, y),
            None => y,
        }
    }

    /// Adds an adapter's result, `result + lora_B(lora_A(x)) * scaling` (`LoraLayer.forward` of
    /// PEFT).
    fn adapted(&mut self, layer: Layer, adapter: Adapter, x: ValueId, y: ValueId) -> ValueId {
        let x = self.adapter_input(layer, x);
        let delta = self.low_rank(adapter, x);
        let scaling = adapter.scaling;
        self.within(layer.module(), |s| {
            let delta = s.scale(delta, scaling);
            s.g.binary(OpKind::Add, y, delta)
        })
    }

    /// Returns an adapter's input: that of its layer, with dropout.
    fn adapter_input(&mut self, layer: Layer, x: ValueId) -> ValueId {
        let p = self.adapter_dropout();
        self.within(layer.module(), |s| s.dropout(x, p))
    }

    fn adapter_dropout(&self) -> f64 {
        self.s.lora.as_ref().map_or(0.0, |l| l.dropout)
    }

    /// Returns an adapter's result before its scaling, `lora_B(lora_A(x))`.
    fn low_rank(&mut self, adapter: Adapter, x: ValueId) -> ValueId {
        let low = self.product(adapter.a, x, None);
        self.product(adapter.b, low, None)
    }

    /// Gives the rows of `W + scaling * B A`, which made `y`, their learned lengths: multiplies `y`
    /// by length over norm (`DoraLinearLayer` of PEFT).
    fn decomposed(
        &mut self,
        layer: Layer,
        adapter: Adapter,
        lengths: Layer,
        y: ValueId,
    ) -> ValueId {
        let inverse = self.inverse_norms(layer, adapter);
        let lengths = self.weight(lengths);
        self.within(layer.module(), |s| {
            let y = s.g.binary(OpKind::Mul, y, inverse);
            s.g.binary(OpKind::Mul, y, lengths)
        })
    }

    /// Applies a linear layer and its adapter in the operations of PEFT: `y + (m - 1) * y + m *
    /// lora_B(lora_A(x)) * scaling`, where `m` is length over norm. So backward reads the results
    /// of both matmuls. With dropout, the second `y` is the layer's result for the dropped input,
    /// by a matmul of its own (`DoraLinearVariant.forward`).
    fn decomposed_in_parts(
        &mut self,
        layer: Layer,
        adapter: Adapter,
        lengths: Layer,
        x: ValueId,
    ) -> ValueId {
        let scaling = adapter.scaling;
        let bias = self.bias(layer);
        let y = self.product(layer, x, bias);
        let dropped = self.adapter_input(layer, x);
        let delta = self.low_rank(adapter, dropped);
        let inverse = self.inverse_norms(layer, adapter);
        let again = (self.adapter_dropout() > 0.0).then(|| self.product(layer, dropped, None));
        let lengths = self.weight(lengths);
        self.within(layer.module(), |s| {
            let rows = s.g.value(lengths).shape[0];
            let ones = s.constant("ones", &[rows], DType::F32, false);
            let ones = s.as_activation(ones);
            let m = s.g.binary(OpKind::Mul, inverse, lengths);
            let less = s.g.binary(OpKind::Sub, m, ones);
            let own = match (again, bias) {
                (Some(again), _) => again,
                (None, Some(bias)) => s.g.binary(OpKind::Sub, y, bias),
                (None, None) => y,
            };
            let own = s.g.binary(OpKind::Mul, own, less);
            let delta = s.g.binary(OpKind::Mul, delta, m);
            let delta = s.scale(delta, scaling);
            let added = s.g.binary(OpKind::Add, own, delta);
            s.g.binary(OpKind::Add, y, added)
        })
    }

    /// Returns the reciprocal norms of the rows of `W + scaling * B A`, `[out]`, which have no
    /// gradient.
    fn inverse_norms(&mut self, layer: Layer, adapter: Adapter) -> ValueId {
        let scaling = adapter.scaling;
        let w = self.matrix(layer);
        let [a, b] = [adapter.a, adapter.b].map(|part| self.weight(part));
        self.within(layer.module(), |s| {
            let [w, a, b] = [w, a, b].map(|v| s.g.detach(v));
            let shape = s.g.value(w).shape.clone();
            let (rows, cols) = (shape[0], shape[1]);
            let kind = OpKind::Gemm(op::Gemm {
                ta: false,
                tb: false,
                bias: false,
                accumulate: false,
            });
            let delta = s.compute(kind, &[b, a], &[&shape])[0];
            let delta = s.scale(delta, scaling);
            let sum = s.g.binary(OpKind::Add, w, delta);
            // The second result is the root of the inverse mean of squares.
            let kind = OpKind::RmsNorm(op::RmsNorm { eps: Real(1e-30) });
            let ones = s.constant("ones", &[cols], DType::F32, false);
            let ones = s.as_activation(ones);
            let inverse = s.compute(kind, &[sum, ones], &[&shape, &[rows, 1]])[1];
            let inverse = s.g.reshape(inverse, &[rows]);
            let inverse = s.as_activation(inverse);
            s.scale(inverse, (cols as f64).powf(-0.5))
        })
    }

    /// Applies `nn.Linear` with outputs divided along an axis: every rank has all of `x`, and
    /// computes its own outputs.
    pub(crate) fn column_parallel(&mut self, layer: Layer, axis: AxisId, x: ValueId) -> ValueId {
        let x = self.within(layer.module(), |s| s.g.sum_gradient(axis, x));
        self.linear(layer, x)
    }

    /// Applies `nn.Linear` with inputs divided along an axis: every rank has its part of `x`, and
    /// all ranks get the sum of the partial results.
    pub(crate) fn row_parallel(&mut self, layer: Layer, axis: AxisId, x: ValueId) -> ValueId {
        let part = self.product(layer, x, None);
        let bias = self.bias(layer);
        self.within(layer.module(), |s| {
            let shape = s.g.value(part).shape.clone();
            let kind = CollectiveKind::AllReduce;
            let sum =
                s.g.collective(ModelCollective::new(kind, axis), part, &shape);
            match bias {
                Some(bias) => s.g.add_into(sum, bias),
                None => sum,
            }
        })
    }

    /// Returns the matrix of a linear layer: its weight, dequantized if it is packed.
    fn matrix(&mut self, layer: Layer) -> ValueId {
        let id = self.tree.weight(layer);
        let stored = self.params[id.index()];
        let Some(packed) = self.tree.params[id.index()].packed.clone() else {
            return stored;
        };
        let Packed {
            shape,
            format,
            scales,
        } = packed;
        self.within(layer.module(), |s| {
            let kind = OpKind::Dequantize(op::Dequantize { scales, format });
            let w = s.compute(kind, &[stored], &[&shape])[0];
            // bitsandbytes dequantizes scales of eight bits, and adds their mean, in operations of
            // their own. Codes of eight bits are cast and multiplied by scales over 127.
            let apart = scales == PackedScales::Replicated && format != PackedFormat::Nf4F32;
            s.g.dispatches(if apart { 3 } else { 1 });
            w
        })
    }

    fn product(&mut self, layer: Layer, x: ValueId, b: Option<ValueId>) -> ValueId {
        let w = self.matrix(layer);
        self.within(layer.module(), |s| {
            let out = s.g.value(w).shape[0];
            let mut shape = s.g.value(x).shape.clone();
            if let Some(last) = shape.last_mut() {
                *last = out;
            }
            let kind = OpKind::Gemm(op::Gemm {
                ta: false,
                tb: true,
                bias: b.is_some(),
                accumulate: false,
            });
            let inputs: SmallVec<[ValueId; 3]> = [x, w].into_iter().chain(b).collect();
            let y = s.compute(kind, &inputs, &[&shape])[0];
            // Transpose of the weight and, beyond two dimensions, views to and from a matrix.
            s.g.dispatches(if shape.len() > 2 { 4 } else { 2 });
            y
        })
    }

    /// Applies `nn.Linear` where PyTorch cannot fuse the bias (input that does not have two
    /// dimensions and is not contiguous): copies the input to a matrix, multiplies, adds the bias
    /// in place.
    pub(crate) fn linear_unfused(&mut self, layer: Layer, x: ValueId) -> ValueId {
        let (w, b) = (self.matrix(layer), self.bias(layer));
        self.within(layer.module(), |s| {
            let mut shape = s.g.value(x).shape.clone();
            let rows = s.g.value(x).rows();
            let cols = s.g.value(x).cols();
            let flat = s.g.reshape(x, &[rows, cols]);
            let out = s.g.value(w).shape[0];
            let kind = OpKind::Gemm(op::Gemm {
                ta: false,
                tb: true,
                bias: false,
                accumulate: false,
            });
            let y = s.compute(kind, &[flat, w], &[&[rows, out]])[0];
            s.g.dispatches(2);
            if let Some(last) = shape.last_mut() {
                *last = out;
            }
            let y = s.g.reshape(y, &shape);
            match b {
                Some(b) => s.g.add_into(y, b),
                None => y,
            }
        })
    }

    pub(crate) fn rms_norm(&mut self, layer: Layer, x: ValueId) -> ValueId {
        let w = self.weight(layer);
        self.rms_norm_by(layer.module(), x, w)
    }

    /// Normalizes the rows of `x` and multiplies them by `w`.
    pub(crate) fn rms_norm_by(&mut self, module: ModuleId, x: ValueId, w: ValueId) -> ValueId {
        let eps = Real(self.s.model.norm_eps);
        self.within(module, |s| {
            let shape = s.g.value(x).shape.clone();
            let rows = s.g.value(x).rows();
            let kind = OpKind::RmsNorm(op::RmsNorm { eps });
            s.compute(kind, &[x, w], &[&shape, &[rows, 1]])[0]
        })
    }

    pub(crate) fn layer_norm(&mut self, layer: Layer, x: ValueId) -> ValueId {
        let (w, b) = (self.weight(layer), self.bias(layer));
        self.layer_norm_by(layer.module(), x, w, b)
    }

    /// Normalizes the rows of `x`, multiplies them by `w` and adds `b`.
    pub(crate) fn layer_norm_by(
        &mut self,
        module: ModuleId,
        x: ValueId,
        w: ValueId,
        b: Option<ValueId>,
    ) -> ValueId {
        let eps = Real(self.s.model.norm_eps);
        self.within(module, |s| {
            let shape = s.g.value(x).shape.clone();
            let rows = [s.g.value(x).rows(), 1];
            let inputs: SmallVec<[ValueId; 3]> = [x, w].into_iter().chain(b).collect();
            let kind = OpKind::LayerNorm(op::LayerNorm { eps });
            s.compute(kind, &inputs, &[&shape, &rows, &rows])[0]
        })
    }

    /// Applies `nn.Embedding`: the ids are flattened first, which copies them unless they are
    /// contiguous.
    pub(crate) fn embedding(&mut self, layer: Layer, ids: ValueId) -> ValueId {
        let w = self.weight(layer);
        self.within(layer.module(), |s| {
            let mut shape = s.g.value(ids).shape.clone();
            let rows = s.g.value(ids).numel();
            let d = s.g.value(w).cols();
            let flat = s.g.reshape(ids, &[rows]);
            let y = s.compute(OpKind::Embedding, &[flat, w], &[&[rows, d]])[0];
            shape.push(d);
            s.g.reshape(y, &shape)
        })
    }

    /// Applies scaled dot-product attention to `[batch, heads, seq, head_dim]` views.
    pub(crate) fn attention(
        &mut self,
        q: ValueId,
        k: ValueId,
        v: ValueId,
        causal: bool,
    ) -> ValueId {
        let head_dim = self.g.value(q).shape[3];
        self.scaled_attention([q, k, v], causal, 1.0 / (head_dim as f64).sqrt())
    }

    /// Applies [`Builder::attention`] with a factor for the scores.
    pub(crate) fn scaled_attention(
        &mut self,
        qkv: [ValueId; 3],
        causal: bool,
        scale: f64,
    ) -> ValueId {
        self.flex_attention(qkv, causal, scale, ScoreMod::NONE)
    }

    /// Applies [`Builder::attention`] with a factor for the scores, and changed scores.
    pub(crate) fn flex_attention(
        &mut self,
        qkv: [ValueId; 3],
        causal: bool,
        scale: f64,
        score_mod: ScoreMod,
    ) -> ValueId {
        let scale = Real(scale);
        let starts = self.document_starts(qkv, score_mod);
        let score_mod = self.within_documents(score_mod);
        let kind = if starts.is_some() {
            OpKind::DocumentAttention(op::DocumentAttention {
                causal,
                scale,
                score_mod,
            })
        } else if score_mod == ScoreMod::NONE {
            OpKind::Attention(op::Attention { causal, scale })
        } else {
            OpKind::FlexAttention(op::FlexAttention {
                causal,
                scale,
                score_mod,
            })
        };
        // The native engine's compiled code lets the kernel write the layout that the next GEMM
        // reads.
        let native = self.s.implementation() == Implementation::Native;
        let by_rows = native && self.g.functional();
        let inputs: SmallVec<[ValueId; 4]> = qkv.into_iter().chain(starts).collect();
        self.g.attention(kind, &inputs, by_rows)
    }

    /// Returns whether every sequence has different documents, which the model reads.
    fn reads_documents(&self) -> bool {
        let of_data = matches!(self.s.train.document_lengths, DocumentLengths::OfData(_));
        of_data && !self.is_transformers()
    }

    /// Returns the first position of the document of each position, `[batch, seq]`, if attention
    /// over the positions of sequences reads it: not within parts of documents.
    fn document_starts(&mut self, [q, k, _]: [ValueId; 3], score_mod: ScoreMod) -> Option<ValueId> {
        let (batch, seq) = (self.batch(), self.seq());
        let whole = |v: ValueId| {
            let shape = &self.g.value(v).shape;
            (shape[0], shape[2]) == (batch, seq)
        };
        if !self.reads_documents() || !score_mod.documents.is_none() || !whole(q) || !whole(k) {
            return None;
        }
        if self.starts.is_none() {
            let shape = [batch, seq];
            self.starts = Some(self.constant("document_starts", &shape, DType::I64, true));
        }
        self.starts
    }

    /// Declares a table with a row for each position of a document: `[seq, ..]`, and
    /// `[batch, .., seq, ..]` if every sequence has documents of its own. Before its positions, it
    /// has as many dimensions of size 1 as `heads` says.
    pub(crate) fn positional(
        &mut self,
        name: &'static str,
        heads: usize,
        row: &[u64],
        dtype: DType,
    ) -> ValueId {
        let mut shape: SmallVec<[u64; 4]> = SmallVec::new();
        let of_data = self.reads_documents();
        if of_data {
            shape.push(self.batch());
            shape.extend(std::iter::repeat_n(1, heads));
        }
        shape.push(self.seq());
        shape.extend_from_slice(row);
        self.constant(name, &shape, dtype, of_data)
    }

    /// Adds the documents of sequences to scores that say nothing of them.
    fn within_documents(&self, score_mod: ScoreMod) -> ScoreMod {
        match score_mod.documents.is_none() {
            true => ScoreMod {
                documents: self.s.train.documents(),
                ..score_mod
            },
            false => score_mod,
        }
    }

    /// Applies [`Builder::flex_attention`] with one more, learned score for each head, `[heads]`.
    pub(crate) fn sink_attention(
        &mut self,
        [q, k, v]: [ValueId; 3],
        sinks: ValueId,
        kind: op::SinkAttention,
    ) -> ValueId {
        let shape = self.g.value(q).shape.clone();
        let score_mod = self.within_documents(kind.score_mod);
        let kind = OpKind::SinkAttention(op::SinkAttention { score_mod, ..kind });
        self.compute(kind, &[q, k, v, sinks], &[&shape, &shape[..3]])[0]
    }

    /// Applies [`Builder::scaled_attention`] with a learned bias of the scores, through a window if
    /// that is not 0.
    pub(crate) fn biased_attention(
        &mut self,
        [q, k, v]: [ValueId; 3],
        bias: ValueId,
        kind: op::BiasedAttention,
    ) -> ValueId {
        let shape = self.g.value(q).shape.clone();
        let kind = OpKind::BiasedAttention(kind);
        self.compute(kind, &[q, k, v, bias], &[&shape, &shape[..3]])[0]
    }

    /// Returns whether the model is the code of transformers.
    pub(crate) fn is_transformers(&self) -> bool {
        self.s.implementation() == Implementation::Transformers
    }

    /// Applies dropout with a probability that may be 0. Only the code of transformers has it.
    pub(crate) fn dropout(&mut self, x: ValueId, p: f64) -> ValueId {
        if p == 0.0 || !self.is_transformers() {
            return x;
        }
        let shape = self.g.value(x).shape.clone();
        let kind = OpKind::Dropout(op::Dropout { p: Real(p) });
        self.compute(kind, &[x], &[&shape, &shape])[0]
    }

    /// Computes `by * x`.
    pub(crate) fn scale(&mut self, x: ValueId, by: f64) -> ValueId {
        self.g.unary(OpKind::Scale(op::Scale { by: Real(by) }), x)
    }

    pub(crate) fn set_loss(&mut self, loss: ValueId) {
        self.loss = Some(loss);
    }

    /// Adds a scalar to what backward differentiates. The loss, which is logged, stays as it is.
    ///
    /// # Panics
    /// Before the loss is set.
    pub(crate) fn add_to_objective(&mut self, term: ValueId) {
        let loss = self.loss.expect("the loss comes first");
        let objective = self.objective.unwrap_or(loss);
        let module = self.tree.loss();
        let sum = self.within(module, |s| s.g.binary(OpKind::Add, objective, term));
        self.objective = Some(sum);
    }

    /// Returns the finished graph.
    ///
    /// # Panics
    /// If the family's forward has not set a loss.
    pub(crate) fn finish(self) -> ModelGraph {
        let loss = self.loss.expect("every family's forward ends with a loss");
        let backward = Backward::of(&self.g, &self.tree);
        let (model_flops, tokens) = flops::model_flops(self.s, &self.tree, &backward);
        ModelGraph {
            tree: self.tree,
            graph: self.g,
            loss,
            objective: self.objective.unwrap_or(loss),
            params: self.params,
            model_flops,
            tokens,
        }
    }
}

/// Returns whether each module's code is compiled.
fn compiled(s: &Scenario, tree: &Tree) -> Vec<bool> {
    let mut out: Vec<bool> = Vec::with_capacity(tree.modules.len());
    for m in &tree.modules {
        let reached = match s.compile.mode {
            _ if m.kind == ModuleKind::Loss => s.compile.compiles_loss(),
            CompileMode::Off => false,
            CompileMode::Regions | CompileMode::Full => true,
            CompileMode::Blocks => {
                m.kind == ModuleKind::Block || m.parent.is_some_and(|p| out[p.index()])
            }
        };
        out.push(reached && !s.compile.excludes(&m.path));
    }
    out
}

/// Returns the gradient that backward starts from: that of a step is the gradient of its mean loss,
/// or of the sum over its tokens.
pub(crate) fn seed(s: &Scenario, tokens: u64) -> f64 {
    if s.fsdp.per_token_loss {
        tokens as f64
    } else {
        1.0 / f64::from(s.train.grad_accum)
    }
}
