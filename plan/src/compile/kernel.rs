//! Kernel descriptors: body, class, exact FLOPs and bytes.

use crate::compile::tape::{BodyOp, Kernel, KernelClass, KernelId, Place, Slot};
use crate::model::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::model::layout;
use crate::model::ops::{Fusion, OpKind};
use crate::units::{Bytes, DType, Flops};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A range of a root that a launch touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Touch {
    pub(super) root: Root,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Touch {
    /// Whether all of the range lies in another one.
    fn within(&self, of: &Self) -> bool {
        self.root == of.root
            && of.offset <= self.offset
            && self.offset + self.bytes <= of.offset + of.bytes
    }
}

/// A described launch.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) kernel: KernelId,
    pub(super) reads: SmallVec<[Touch; 8]>,
    pub(super) writes: SmallVec<[Touch; 4]>,
}

/// Kernels, each once.
#[derive(Default)]
pub(super) struct Table {
    pub(super) kernels: Vec<Kernel>,
    by_hash: HashMap<u64, SmallVec<[u32; 1]>, BuildHasherDefault<Fx>>,
}

/// Multiplicative hash (as rustc's): descriptors are short and trusted.
#[derive(Default)]
struct Fx(u64);

impl Hasher for Fx {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_u8(&mut self, x: u8) {
        self.write_u64(u64::from(x));
    }

    fn write_u32(&mut self, x: u32) {
        self.write_u64(u64::from(x));
    }

    fn write_usize(&mut self, x: usize) {
        self.write_u64(x as u64);
    }

    fn write_isize(&mut self, x: isize) {
        self.write_u64(x as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Table {
    /// Describes the launch of these ops as one kernel. Buffers for which `internal` holds never reach memory.
    pub(super) fn launch(
        &mut self,
        g: &Graph,
        ops: &[u32],
        internal: &dyn Fn(u32) -> bool,
    ) -> Launch {
        let mut d = Describe {
            g,
            internal,
            ..Describe::new(g, internal)
        };
        for &i in ops {
            let op = &g.ops[i as usize];
            if let Act::Compute(kind) = op.act {
                d.op(op, kind);
            }
        }
        let class = d.class();
        let (read, written) = d.traffic();
        d.unite();
        let flops = Flops(d.flops);
        let Describe {
            body,
            reads,
            writes,
            dtype,
            ..
        } = d;
        let kernel = self.intern(class, flops, read, written, dtype, body);
        Launch {
            kernel,
            reads: reads.iter().map(|r| r.0).collect(),
            writes: writes.iter().map(|w| w.0).collect(),
        }
    }

    fn intern(
        &mut self,
        class: KernelClass,
        flops: Flops,
        read: Bytes,
        written: Bytes,
        dtype: DType,
        body: Vec<BodyOp>,
    ) -> KernelId {
        let mut h = Fx::default();
        (class, flops, read, written, dtype, &body).hash(&mut h);
        let same = self.by_hash.entry(h.finish()).or_default();
        for &id in same.iter() {
            let k = &self.kernels[id as usize];
            if k.class == class
                && k.flops == flops
                && k.read == read
                && k.written == written
                && k.body == body
            {
                return KernelId(id);
            }
        }
        let id = self.kernels.len() as u32;
        same.push(id);
        self.kernels.push(Kernel {
            name: name(&body),
            class,
            flops,
            read,
            written,
            dtype,
            body,
        });
        KernelId(id)
    }
}

/// The op's name, or `fused_` and the names of the first ops.
fn name(body: &[BodyOp]) -> String {
    const SHOWN: usize = 5;
    if let [only] = body {
        return only.op.name().to_owned();
    }
    let mut seen: SmallVec<[&str; 8]> = SmallVec::new();
    for op in body {
        if !seen.contains(&op.op.name()) {
            seen.push(op.op.name());
        }
    }
    let mut s = String::from("fused");
    for n in seen.iter().take(SHOWN) {
        let _ = write!(s, "_{n}");
    }
    if seen.len() > SHOWN {
        let _ = write!(s, "_and_{}", seen.len() - SHOWN);
    }
    s
}

struct Describe<'g> {
    g: &'g Graph,
    internal: &'g dyn Fn(u32) -> bool,
    body: Vec<BodyOp>,
    /// Range and bytes really touched in it.
    reads: SmallVec<[(Touch, u64); 8]>,
    writes: SmallVec<[(Touch, u64); 4]>,
    registers: SmallVec<[u32; 8]>,
    flops: u64,
    dtype: DType,
    class: Option<KernelClass>,
    row: Option<KernelClass>,
}

impl<'g> Describe<'g> {
    fn new(g: &'g Graph, internal: &'g dyn Fn(u32) -> bool) -> Self {
        Self {
            g,
            internal,
            body: Vec::with_capacity(1),
            reads: SmallVec::new(),
            writes: SmallVec::new(),
            registers: SmallVec::new(),
            flops: 0,
            dtype: DType::U8,
            class: None,
            row: None,
        }
    }

    fn op(&mut self, op: &Op, kind: OpKind) {
        let inputs = op
            .inputs
            .iter()
            .enumerate()
            .map(|(i, &v)| self.input(kind, i, op, v))
            .collect();
        let outputs = op
            .outputs
            .iter()
            .map(|&v| self.output(kind, op, v))
            .collect();
        if self.body.is_empty() {
            let first = op.inputs.first().or(op.outputs.first());
            self.dtype = first.map_or(DType::U8, |&v| self.g.value(v).dtype);
        }
        self.flops += flops(self.g, op, kind);
        let class = class(self.g, op, kind);
        match kind.fusion() {
            Fusion::Row if self.row != Some(KernelClass::Softmax) => self.row = Some(class),
            Fusion::Column => self.row = self.row.or(Some(class)),
            _ => {}
        }
        self.class = match (self.class, class) {
            // A product stays one whatever follows; of two with a common factor the results lie side by side.
            (Some(first @ KernelClass::Gemm { m, n, k, batch }), second) => match second {
                KernelClass::Gemm { n: more, .. } => Some(KernelClass::Gemm {
                    m,
                    n: n + more,
                    k,
                    batch,
                }),
                _ => Some(first),
            },
            (_, class) => Some(class),
        };
        self.body.push(BodyOp {
            op: kind,
            inputs,
            outputs,
        });
    }

    fn class(&self) -> KernelClass {
        match (self.body.len(), self.class) {
            (0 | 1, Some(class)) | (_, Some(class @ KernelClass::Gemm { .. })) => class,
            _ => self.row.unwrap_or(KernelClass::Fused),
        }
    }

    fn traffic(&self) -> (Bytes, Bytes) {
        (
            Bytes(self.reads.iter().map(|r| r.1).sum()),
            Bytes(self.writes.iter().map(|w| w.1).sum()),
        )
    }

    /// Reads of parts of what is written become reads of all of it, so that operand and result are the same range: the kernel
    /// works in place.
    fn unite(&mut self) {
        for w in 0..self.writes.len() {
            let to = self.writes[w].0;
            let part = |r: &Touch| *r != to && r.within(&to);
            let old: SmallVec<[(Touch, u64); 8]> = std::mem::take(&mut self.reads);
            if !old.iter().any(|r| part(&r.0)) {
                self.reads = old;
                continue;
            }
            // New place of each read, and how far into it the old one starts.
            let mut places: SmallVec<[(u8, u64); 8]> = SmallVec::new();
            for (touch, bytes) in old {
                let (all, ahead) = if part(&touch) {
                    (to, touch.offset - to.offset)
                } else {
                    (touch, 0)
                };
                let at = self.reads.iter().position(|r| r.0 == all);
                let at = at.unwrap_or(self.reads.len());
                match self.reads.get_mut(at) {
                    Some(read) => read.1 += bytes,
                    None => self.reads.push((all, bytes)),
                }
                places.push((at as u8, ahead));
            }
            for slot in self.body.iter_mut().flat_map(|op| &mut op.inputs) {
                if let Place::Read(r) = slot.place {
                    let (at, ahead) = places[usize::from(r)];
                    slot.place = Place::Read(at);
                    slot.offset += ahead / slot.dtype.size();
                }
            }
        }
    }

    fn register(&mut self, value: &Value) -> Option<Place> {
        let Root::Buffer(b) = value.root else {
            return None;
        };
        if !(self.internal)(b) {
            return None;
        }
        let at = self
            .registers
            .iter()
            .position(|&r| r == b)
            .unwrap_or_else(|| {
                self.registers.push(b);
                self.registers.len() - 1
            });
        Some(Place::Register(at as u8))
    }

    fn input(&mut self, kind: OpKind, i: usize, op: &Op, v: ValueId) -> Slot {
        let value = self.g.value(v);
        if let Some(place) = self.register(value) {
            return slot(place, value.offset, value);
        }
        let (touch, mut bytes) = touch(value);
        // What this kernel has made, not other columns of the same buffer.
        if let Some(at) = self.writes.iter().position(|w| touch.within(&w.0)) {
            let ahead = touch.offset - self.writes[at].0.offset;
            return slot(Place::Write(at as u8), ahead / value.dtype.size(), value);
        }
        match (kind, i) {
            // Gathers touch one row or element of a table for each id.
            (OpKind::Embedding, 1) | (OpKind::EmbeddingGrad, 2) => {
                let rows = self.g.value(op.inputs[if i == 1 { 0 } else { 1 }]).numel();
                bytes = rows * value.cols() * value.dtype.size();
            }
            (OpKind::NllLoss, 0) => bytes = value.rows() * value.dtype.size(),
            // Overwritten, not read.
            (OpKind::NllLossGrad | OpKind::SquaredErrorGrad { .. }, 3) => bytes = 0,
            _ => {}
        }
        let at = self
            .reads
            .iter()
            .position(|r| r.0 == touch)
            .unwrap_or_else(|| {
                self.reads.push((touch, 0));
                self.reads.len() - 1
            });
        self.reads[at].1 = self.reads[at].1.max(bytes);
        slot(Place::Read(at as u8), 0, value)
    }

    fn output(&mut self, kind: OpKind, op: &Op, v: ValueId) -> Slot {
        let value = self.g.value(v);
        if let Some(place) = self.register(value) {
            return slot(place, value.offset, value);
        }
        let (touch, mut bytes) = touch(value);
        match kind {
            OpKind::EmbeddingGrad if op.inputs.len() > 2 => {
                bytes = self.g.value(op.inputs[1]).numel() * value.cols() * value.dtype.size();
            }
            OpKind::NllLossGrad => bytes = value.rows() * value.dtype.size(),
            _ => {}
        }
        let at = self
            .writes
            .iter()
            .position(|w| w.0 == touch)
            .unwrap_or_else(|| {
                self.writes.push((touch, 0));
                self.writes.len() - 1
            });
        self.writes[at].1 = self.writes[at].1.max(bytes);
        slot(Place::Write(at as u8), 0, value)
    }
}

fn touch(value: &Value) -> (Touch, u64) {
    let size = value.dtype.size();
    let bytes = layout::extent(&value.shape, &value.strides) * size;
    let distinct = layout::distinct(&value.shape, &value.strides) * size;
    (
        Touch {
            root: value.root,
            offset: value.offset * size,
            bytes,
        },
        distinct,
    )
}

fn slot(place: Place, offset: u64, value: &Value) -> Slot {
    let strides = if value.is_contiguous() {
        SmallVec::new()
    } else {
        value.strides.clone()
    };
    Slot {
        place,
        offset,
        shape: value.shape.clone(),
        strides,
        dtype: value.dtype,
    }
}

/// Rows, columns and inner dimension of a matrix product.
fn gemm(g: &Graph, op: &Op, ta: bool, tb: bool) -> (u64, u64, u64) {
    let (a, b) = (g.value(op.inputs[0]), g.value(op.inputs[1]));
    let (m, k) = if ta {
        (a.cols(), a.rows())
    } else {
        (a.rows(), a.cols())
    };
    let n = if tb { b.rows() } else { b.cols() };
    (m, n, k)
}

/// Output positions, output channels and inner size of a convolution, from its image operand and weight.
fn conv(g: &Graph, op: &Op, kind: OpKind) -> (u64, u64, u64) {
    let x = g.value(op.inputs[0]);
    let w = match kind {
        OpKind::ConvGradWeight { .. } => g.value(op.outputs[0]),
        _ => g.value(op.inputs[1]),
    };
    let positions = x.shape[0] * x.shape[2] * x.shape[3];
    (positions, w.shape[0], w.shape[1] * w.shape[2] * w.shape[3])
}

/// Arithmetic of one op; elementwise functions count a fixed number of operations an element.
fn flops(g: &Graph, op: &Op, kind: OpKind) -> u64 {
    let numel = op.outputs.first().map_or(0, |&v| g.value(v).numel());
    let in0 = op.inputs.first().map_or(0, |&v| g.value(v).numel());
    match kind {
        OpKind::Gemm { ta, tb, bias, .. } => {
            let (m, n, k) = gemm(g, op, ta, tb);
            2 * m * n * k + if bias { m * n } else { 0 }
        }
        OpKind::Attention { causal, .. } => attention_flops(g.value(op.inputs[0]), causal),
        OpKind::AttentionGrad { causal, .. } => {
            attention_flops(g.value(op.inputs[1]), causal) / 2 * 5
        }
        OpKind::Conv { .. } | OpKind::ConvGradInput { .. } | OpKind::ConvGradWeight { .. } => {
            let (m, n, k) = conv(g, op, kind);
            2 * m * n * k
        }
        OpKind::Embedding
        | OpKind::Copy
        | OpKind::Cat { .. }
        | OpKind::Fill { .. }
        | OpKind::Shard(_) => 0,
        OpKind::EmbeddingGrad => in0,
        OpKind::Add | OpKind::Sub | OpKind::Mul | OpKind::Neg | OpKind::Relu | OpKind::ReluGrad => {
            numel
        }
        OpKind::LogProbs => numel,
        OpKind::Silu => 4 * numel,
        OpKind::SiluGrad => 8 * numel,
        OpKind::Gelu => 10 * numel,
        OpKind::GeluGrad => 18 * numel,
        OpKind::RmsNorm { .. } => 4 * in0,
        OpKind::RmsNormGrad => 8 * in0,
        OpKind::RmsNormWeightGrad => 3 * in0,
        OpKind::LayerNorm { .. } => 7 * in0,
        OpKind::LayerNormGrad => 11 * in0,
        OpKind::LayerNormParamGrad => 5 * in0,
        OpKind::SumLeading | OpKind::SumChannels | OpKind::SumAll => in0,
        OpKind::LogSoftmax => 5 * in0,
        OpKind::LogSumExp => 3 * in0,
        OpKind::LogSoftmaxGrad => 4 * in0,
        OpKind::NllLoss => g.value(op.inputs[0]).rows(),
        OpKind::NllLossGrad => g.value(op.inputs[1]).numel(),
        OpKind::SquaredError { .. } | OpKind::SquaredErrorGrad { .. } => 3 * numel,
        OpKind::CrossEntropy { .. } => 9 * in0,
    }
}

/// Two products of `seq x seq x head_dim` a head; half of each under a causal mask.
fn attention_flops(q: &Value, causal: bool) -> u64 {
    let full = 4 * q.shape[0] * q.shape[1] * q.shape[2] * q.shape[2] * q.shape[3];
    if causal { full / 2 } else { full }
}

fn class(g: &Graph, op: &Op, kind: OpKind) -> KernelClass {
    match kind {
        OpKind::Gemm { ta, tb, .. } => {
            let (m, n, k) = gemm(g, op, ta, tb);
            KernelClass::Gemm { m, n, k, batch: 1 }
        }
        OpKind::Attention { causal, .. } => {
            attention_class(g, op.inputs[0], op.inputs[1], causal, false)
        }
        OpKind::AttentionGrad { causal, .. } => {
            attention_class(g, op.inputs[1], op.inputs[2], causal, true)
        }
        OpKind::Conv { .. } | OpKind::ConvGradInput { .. } | OpKind::ConvGradWeight { .. } => {
            let (m, n, k) = conv(g, op, kind);
            KernelClass::Conv { m, n, k }
        }
        OpKind::Embedding => KernelClass::Embedding,
        OpKind::EmbeddingGrad => KernelClass::EmbeddingGrad,
        OpKind::Fill { .. } => KernelClass::Fill,
        OpKind::Copy if dense(g, op) => KernelClass::Copy,
        OpKind::RmsNorm { .. }
        | OpKind::RmsNormGrad
        | OpKind::LayerNorm { .. }
        | OpKind::LayerNormGrad => KernelClass::Norm,
        OpKind::RmsNormWeightGrad
        | OpKind::LayerNormParamGrad
        | OpKind::SumLeading
        | OpKind::SumChannels => KernelClass::ColumnReduce,
        OpKind::SumAll => KernelClass::FullReduce,
        OpKind::LogSoftmax
        | OpKind::LogSoftmaxGrad
        | OpKind::LogSumExp
        | OpKind::CrossEntropy { .. } => KernelClass::Softmax,
        // One element a row is gathered or scattered.
        OpKind::NllLoss | OpKind::NllLossGrad | OpKind::Cat { .. } | OpKind::Copy => {
            KernelClass::Strided
        }
        _ if dense(g, op) => KernelClass::Pointwise,
        _ => KernelClass::Strided,
    }
}

fn attention_class(g: &Graph, q: ValueId, k: ValueId, causal: bool, backward: bool) -> KernelClass {
    let (q, k) = (g.value(q), g.value(k));
    KernelClass::Attention {
        batch: q.shape[0],
        heads: q.shape[1],
        kv_heads: k.shape[1],
        seq: q.shape[2],
        head_dim: q.shape[3],
        causal,
        backward,
    }
}

/// Whether all operands lie densely in the same order, so that the kernel can run over flat memory.
fn dense(g: &Graph, op: &Op) -> bool {
    let Some(&out) = op.outputs.first() else {
        return false;
    };
    let out = g.value(out);
    op.inputs.iter().map(|&v| g.value(v)).chain([out]).all(|v| {
        let whole = layout::extent(&v.shape, &v.strides) == v.numel()
            && layout::distinct(&v.shape, &v.strides) == v.numel();
        let same = v.shape == out.shape && v.strides == out.strides
            || v.is_contiguous() && out.is_contiguous();
        v.numel() == 1 || whole && same && v.numel() == out.numel()
    })
}
