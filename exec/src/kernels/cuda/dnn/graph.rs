//! Graphs of cuDNN's. The graph of attention consists of small operations that cuDNN 9.8 to 9.20
//! recognise as one fused kernel.
//!
//! Plain data: tensors, and nodes over them. The order of nodes and the shapes and strides of
//! values that never reach memory are those that NVIDIA's own front end emits for causal attention;
//! the library matches the pattern as a whole.

use crate::base::element;
use shardlab_plan::ir::{AttentionShape, DType};
use std::fmt;

/// Element type within a graph: of an operand, or of values that never reach memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ty {
    Of(DType),
    I32,
    Bool,
}

impl Ty {
    pub(crate) const F32: Self = Self::Of(DType::F32);

    /// Returns the type of an operand, if cuDNN supports it.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        element::cuda(dtype).dnn.map(|_| Self::Of(dtype))
    }
}

/// The names are part of the keys under which choices are kept on disk.
impl fmt::Debug for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Of(dtype) => dtype.fmt(f),
            Self::I32 => f.write_str("I32"),
            Self::Bool => f.write_str("Bool"),
        }
    }
}

/// Kind of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Never in memory.
    Virtual,
    /// An operand of the launch.
    Operand(Operand),
    /// This many bytes into the launch's scratch memory.
    Scratch(u64),
    /// A constant.
    Value(f32),
}

/// Operands of attention and of convolutions, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operand {
    Q,
    K,
    V,
    O,
    Stats,
    DO,
    DQ,
    DK,
    DV,
    /// A convolution's input, or its gradient.
    Image,
    /// Its weights, or their gradient.
    Filter,
    /// Its result, or its gradient.
    Result,
}

/// A tensor of four dimensions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dims: [i64; 4],
    pub(crate) strides: [i64; 4],
    pub(crate) ty: Ty,
    pub(crate) kind: Kind,
    /// Alignment of its address, in bytes.
    pub(crate) align: i64,
}

impl Tensor {
    /// Returns the bytes from its first element to the end of its last one.
    pub(super) fn bytes(&self) -> u64 {
        let size = match self.ty {
            Ty::Of(dtype) => dtype.size(),
            Ty::I32 => 4,
            Ty::Bool => 1,
        };
        let last: i64 = self
            .dims
            .iter()
            .zip(self.strides)
            .map(|(n, stride)| (n - 1) * stride)
            .sum();
        (last + 1).max(0) as u64 * size
    }
}

/// Which of a convolution's tensors is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Image,
    Filter,
}

/// Elementwise operations that attention needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Mul,
    Sub,
    Add,
    Div,
    Exp,
    Log,
    Identity,
    /// Position along an axis.
    Index(i64),
    GreaterEqual,
    Select,
}

/// Index of a tensor in its graph.
pub(crate) type T = usize;

/// An operation of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Matmul {
        a: T,
        b: T,
        c: T,
    },
    Pointwise {
        mode: Mode,
        x: T,
        b: Option<T>,
        t: Option<T>,
        y: T,
        compute: Ty,
    },
    /// Maximum, or sum.
    Reduce {
        max: bool,
        x: T,
        y: T,
    },
    Reshape {
        x: T,
        y: T,
    },
    /// Stride 1, with this much padding on every side.
    Convolution {
        direction: Direction,
        image: T,
        filter: T,
        result: T,
        pad: i64,
    },
}

/// One attention. Strides in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) sizes: AttentionShape,
    /// Distance of the log-sum-exp's rows.
    pub(crate) stat: i64,
    pub(crate) scale: f32,
    pub(crate) dtype: DType,
}

/// A graph in execution order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Graph {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) nodes: Vec<Node>,
    /// Bytes of scratch memory that tensors use.
    pub(crate) scratch: u64,
}

impl Graph {
    pub(super) fn tensor(&mut self, dims: [i64; 4], strides: [i64; 4], ty: Ty, kind: Kind) -> T {
        self.tensors.push(Tensor {
            dims,
            strides,
            ty,
            kind,
            align: 16,
        });
        self.tensors.len() - 1
    }

    fn value(&mut self, x: f32) -> T {
        self.tensor([1; 4], [1; 4], Ty::F32, Kind::Value(x))
    }

    /// Returns a value like another one that never reaches memory.
    fn like(&mut self, x: T, ty: Ty) -> T {
        let Tensor { dims, strides, .. } = self.tensors[x];
        self.tensor(dims, strides, ty, Kind::Virtual)
    }

    fn op(&mut self, mode: Mode, x: T, b: Option<T>, y: T) -> T {
        self.nodes.push(Node::Pointwise {
            mode,
            x,
            b,
            t: None,
            y,
            compute: Ty::F32,
        });
        y
    }

    fn unary(&mut self, mode: Mode, x: T) -> T {
        let y = self.like(x, Ty::F32);
        self.op(mode, x, None, y)
    }

    fn binary(&mut self, mode: Mode, x: T, b: T) -> T {
        let y = self.like(x, Ty::F32);
        self.op(mode, x, Some(b), y)
    }

    fn matmul(&mut self, a: T, b: T, c: T) -> T {
        self.nodes.push(Node::Matmul { a, b, c });
        c
    }

    fn reshape(&mut self, x: T, dims: [i64; 4], strides: [i64; 4], ty: Ty) -> T {
        let y = self.tensor(dims, strides, ty, Kind::Virtual);
        self.nodes.push(Node::Reshape { x, y });
        y
    }

    /// Adds minus infinity above the diagonal.
    fn mask(&mut self, x: T) -> T {
        let row = self.like(x, Ty::I32);
        self.op(Mode::Index(2), x, None, row);
        let col = self.like(x, Ty::I32);
        self.op(Mode::Index(3), x, None, col);
        let keep = self.like(x, Ty::Bool);
        self.nodes.push(Node::Pointwise {
            mode: Mode::GreaterEqual,
            x: row,
            b: Some(col),
            t: None,
            y: keep,
            compute: Ty::Bool,
        });
        let low = self.value(f32::NEG_INFINITY);
        let y = self.like(x, Ty::F32);
        self.nodes.push(Node::Pointwise {
            mode: Mode::Select,
            x,
            b: Some(low),
            t: Some(keep),
            y,
            compute: Ty::F32,
        });
        y
    }
}

/// Dimensions and strides of the operands, by the caller.
pub(crate) type Strides<'a> = &'a dyn Fn(Operand) -> [i64; 4];

impl Shape {
    fn q(&self) -> [i64; 4] {
        self.sizes.queries().map(|n| n as i64)
    }

    fn k(&self) -> [i64; 4] {
        self.sizes.keys().map(|n| n as i64)
    }

    fn scores(&self) -> ([i64; 4], [i64; 4]) {
        let [batch, heads, s, _] = self.q();
        ([batch, heads, s, s], [heads * s * s, s * s, s, 1])
    }

    fn row(&self) -> ([i64; 4], [i64; 4]) {
        let [batch, heads, s, _] = self.q();
        ([batch, heads, s, 1], [heads * s, s, 1, 1])
    }

    fn stats(&self) -> ([i64; 4], [i64; 4]) {
        let (dims, _) = self.row();
        (dims, [dims[1] * self.stat, self.stat, 1, 1])
    }

    fn io(&self) -> Option<Ty> {
        Ty::of(self.dtype)
    }
}

fn swapped(x: [i64; 4]) -> [i64; 4] {
    [x[0], x[1], x[3], x[2]]
}

/// Builds `softmax(scale q k^T) v` with its log-sum-exp.
pub(crate) fn forward(s: &Shape, strides: Strides<'_>) -> Option<Graph> {
    let io = s.io()?;
    let mut g = Graph::default();
    let operand = |g: &mut Graph, o, dims| g.tensor(dims, strides(o), io, Kind::Operand(o));
    let q = operand(&mut g, Operand::Q, s.q());
    let kt = g.tensor(
        swapped(s.k()),
        swapped(strides(Operand::K)),
        io,
        Kind::Operand(Operand::K),
    );
    let (dims, order) = s.scores();
    let scores = g.tensor(dims, order, Ty::F32, Kind::Virtual);
    g.matmul(q, kt, scores);
    let scale = g.value(s.scale);
    let mut x = g.binary(Mode::Mul, scores, scale);
    if s.sizes.causal {
        x = g.mask(x);
    }
    let (dims, order) = s.row();
    let max = g.tensor(dims, order, Ty::F32, Kind::Virtual);
    g.nodes.push(Node::Reduce {
        max: true,
        x,
        y: max,
    });
    let shifted = g.binary(Mode::Sub, x, max);
    let e = g.unary(Mode::Exp, shifted);
    let sum = g.tensor(dims, order, Ty::F32, Kind::Virtual);
    g.nodes.push(Node::Reduce {
        max: false,
        x: e,
        y: sum,
    });
    let log = g.unary(Mode::Log, sum);
    let (dims, order) = s.stats();
    let stats = g.tensor(dims, order, Ty::F32, Kind::Operand(Operand::Stats));
    g.op(Mode::Add, max, Some(log), stats);
    let p = g.like(e, io);
    g.op(Mode::Div, e, Some(sum), p);
    let v = operand(&mut g, Operand::V, s.k());
    let o = operand(&mut g, Operand::O, s.q());
    g.matmul(p, v, o);
    Some(g)
}

/// Builds the gradients from the saved log-sum-exp. `ordered` asks for the kernel whose sums have a
/// fixed order.
pub(crate) fn backward(s: &Shape, strides: Strides<'_>, ordered: bool) -> Option<Graph> {
    let io = s.io()?;
    let mut g = Graph::default();
    let [batch, heads, seq, d] = s.q();
    let operand = |g: &mut Graph, o, dims| g.tensor(dims, strides(o), io, Kind::Operand(o));
    let turned =
        |g: &mut Graph, o| g.tensor(swapped(s.k()), swapped(strides(o)), io, Kind::Operand(o));
    let d_o = operand(&mut g, Operand::DO, s.q());
    let o = operand(&mut g, Operand::O, s.q());
    let product = g.tensor(
        s.q(),
        [heads * seq * d, seq * d, heads * d, 1],
        Ty::F32,
        Kind::Virtual,
    );
    g.op(Mode::Mul, d_o, Some(o), product);
    let (dims, order) = s.row();
    let sum = g.tensor(dims, order, Ty::F32, Kind::Virtual);
    g.nodes.push(Node::Reduce {
        max: false,
        x: product,
        y: sum,
    });
    let one = g.value(1.0);
    let delta = g.tensor(dims, order, Ty::F32, Kind::Scratch(g.scratch));
    g.scratch += ((batch * heads * seq * 4) as u64).next_multiple_of(256);
    g.op(Mode::Mul, sum, Some(one), delta);
    let q = operand(&mut g, Operand::Q, s.q());
    let kt = turned(&mut g, Operand::K);
    let (dims, order) = s.scores();
    let scores = g.tensor(dims, order, Ty::F32, Kind::Virtual);
    g.matmul(q, kt, scores);
    let scale = g.value(s.scale);
    let x = g.binary(Mode::Mul, scores, scale);
    let (rdims, rorder) = s.stats();
    let stats = g.tensor(rdims, rorder, Ty::F32, Kind::Operand(Operand::Stats));
    let mut x = g.binary(Mode::Sub, x, stats);
    if s.sizes.causal {
        x = g.mask(x);
    }
    let p = g.unary(Mode::Exp, x);
    let across = [heads * seq * seq, seq * seq, 1, seq];
    let pt = g.reshape(p, dims, across, io);
    let grouped = |g: &mut Graph, left: T, right: T, out: Operand| {
        if s.sizes.heads == s.sizes.kv_heads {
            let out = operand(g, out, s.k());
            g.matmul(left, right, out);
        } else {
            let full = g.tensor(s.q(), [heads * seq * d, seq * d, d, 1], io, Kind::Virtual);
            g.matmul(left, right, full);
            let out = operand(g, out, s.k());
            g.nodes.push(Node::Reduce {
                max: false,
                x: full,
                y: out,
            });
        }
    };
    grouped(&mut g, pt, d_o, Operand::DV);
    let vt = turned(&mut g, Operand::V);
    let dp = g.tensor(dims, order, Ty::F32, Kind::Virtual);
    g.matmul(d_o, vt, dp);
    let x = g.binary(Mode::Sub, dp, delta);
    let x = g.binary(Mode::Mul, x, p);
    let ds = g.binary(Mode::Mul, x, scale);
    let dst = g.reshape(ds, dims, across, io);
    grouped(&mut g, dst, q, Operand::DK);
    let k = g.reshape(kt, s.k(), strides(Operand::K), io);
    let dq = operand(&mut g, Operand::DQ, s.q());
    if ordered {
        g.matmul(ds, k, dq);
    } else {
        let sum = g.tensor(
            s.q(),
            [heads * seq * d, seq * d, d, 1],
            Ty::F32,
            Kind::Scratch(g.scratch),
        );
        g.scratch += ((batch * heads * seq * d * 4) as u64).next_multiple_of(256);
        g.matmul(ds, k, sum);
        g.op(Mode::Identity, sum, None, dq);
    }
    Some(g)
}
