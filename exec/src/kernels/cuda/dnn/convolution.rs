//! Convolutions, stride 1 and padded to the same size, as graphs of one node.

use super::Places;
use super::graph::{Direction, Graph, Kind, Node, Operand, Tensor, Ty};
use crate::kernels::cuda::codegen::Request;
use crate::kernels::cuda::error::ErrorKind;
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DType, Slot};
use shardlab_plan::program::workspace;

/// An operand of a convolution: dimensions, strides, alignment in bytes.
pub(super) type Lies = ([i64; 4], [i64; 4], i64);

/// Returns the graph of a direction over its input, weights and result.
pub(super) fn graph(direction: Direction, ty: Ty, tensors: [Lies; 3]) -> Graph {
    let mut g = Graph::default();
    let pad = tensors[1].0[3] / 2;
    let operands = [Operand::Image, Operand::Filter, Operand::Result];
    let mut ids = [0; 3];
    for ((id, operand), (dims, strides, align)) in ids.iter_mut().zip(operands).zip(tensors) {
        *id = g.tensor(dims, strides, ty, Kind::Operand(operand));
        g.tensors[*id].align = align;
    }
    let [image, filter, result] = ids;
    g.nodes.push(Node::Convolution {
        direction,
        image,
        filter,
        result,
        pad,
    });
    g
}

/// Changes the graph to write the result to scratch memory in the type of the factors, dense: the
/// library has no gradients of weights in a wider type than their factors. The caller that launches
/// the graph converts them.
fn narrow(g: &mut Graph, ty: Ty) {
    let [Node::Convolution { filter, .. }] = g.nodes[..] else {
        return;
    };
    let t = &mut g.tensors[filter];
    let [_, b, c, d] = t.dims;
    *t = Tensor {
        dims: t.dims,
        strides: [b * c * d, c * d, d, 1],
        ty,
        kind: Kind::Scratch(0),
        align: 16,
    };
    g.scratch = t.bytes().next_multiple_of(workspace::ALIGN);
}

/// Returns whether [`narrow`] has changed the graph.
pub(super) fn is_narrow(g: &Graph) -> bool {
    matches!(g.nodes[..], [Node::Convolution { direction: Direction::Filter, filter, .. }]
        if g.tensors[filter].kind == Kind::Scratch(0))
}

/// Returns the graph of a body's convolution, the location of its operands, and the type of its
/// factors.
pub(super) fn graph_of(
    req: &Request<'_>,
    op: &BodyOp,
    direction: Direction,
) -> Result<(Graph, Places, DType), ErrorKind> {
    let no = |why: &str| ErrorKind::Unsupported(why.to_owned());
    let ([a, b, ..], [c, ..]) = (&op.inputs[..], &op.outputs[..]) else {
        return Err(no("a convolution lacks operands"));
    };
    let [image, filter, result] = match direction {
        Direction::Forward => [a, b, c],
        Direction::Image => [c, b, a],
        Direction::Filter => [b, c, a],
    };
    if req.same.iter().any(Option::is_some) {
        return Err(no("a convolution does not work in place"));
    }
    let dtype = req.arg(image.place)?.dtype;
    let widens = direction == Direction::Filter
        && dtype.size() == 2
        && req.arg(filter.place)?.dtype == DType::F32;
    let ty = Ty::of(dtype).ok_or_else(|| no("cuDNN does not take this type"))?;
    let tensor = |s: &Slot| -> Result<Lies, ErrorKind> {
        let arg = req.arg(s.place)?;
        if arg.dtype != dtype && !(widens && std::ptr::eq(s, filter)) {
            return Err(no("a convolution's operands have different types"));
        }
        let (mut dims, mut strides) = ([0; 4], [0; 4]);
        if s.shape.len() != 4 {
            return Err(no("a convolution works on four dimensions"));
        }
        for (to, from) in dims.iter_mut().zip(&s.shape) {
            *to = *from as i64;
        }
        for (to, from) in strides.iter_mut().zip(strides::of(s)) {
            *to = from as i64;
        }
        let offset = s.offset * arg.dtype.size();
        let align = u64::from(arg.align).min(1 << offset.trailing_zeros().min(4));
        Ok((dims, strides, align as i64))
    };
    let tensors = [tensor(image)?, tensor(filter)?, tensor(result)?];
    let [(x, ..), (w, ..), (y, ..)] = tensors;
    let fits = x[1] == w[1] && y[1] == w[0] && x[0] == y[0] && x[2..] == y[2..] && w[2] == w[3];
    if !fits || w[2] % 2 == 0 || x.iter().chain(&w).any(|&n| n == 0) {
        return Err(no("no convolution that is padded to the same size"));
    }
    let places = [
        (Operand::Image, image),
        (Operand::Filter, filter),
        (Operand::Result, result),
    ];
    let places = places.map(|(o, s)| (o, s.place, s.offset)).to_vec();
    let mut graph = graph(direction, ty, tensors);
    if widens {
        narrow(&mut graph, ty);
    }
    Ok((graph, places, dtype))
}
