//! Same-padded convolutions with ReLU, then a dense layer over channels.

use super::build::Builder;
use super::loss;
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, op};

/// Forward of one micro-batch of images.
pub(super) fn forward(b: &mut Builder<'_>) {
    let m = &b.s.model;
    let mut x = b.constant(
        "input",
        &[b.batch(), m.channels, m.height, m.width],
        b.dtype,
        true,
    );
    for layer in 0..b.tree.blocks.count {
        let [block] = b.tree.block(layer);
        let y = conv(b, block, x);
        let y = b.within(block, |b| b.g.unary(OpKind::Relu, y));
        b.g.release(x);
        x = y;
    }
    // Channels last: two transposes stand for the permutation.
    let dense = b.tree.outer(ModuleKind::Head);
    let root = b.tree.outer(ModuleKind::Root);
    let last = b.within(root, |b| {
        let t = b.g.transpose(x, 1, 2);
        b.g.transpose(t, 2, 3)
    });
    let out = b.linear_unfused(dense, last);
    b.g.release(x);
    loss::mean_square(b, out);
}

/// `nn.Conv2d`: the convolution, then the bias in place.
fn conv(b: &mut Builder<'_>, m: ModuleId, x: ValueId) -> ValueId {
    let (w, bias) = (b.weight(m), b.bias(m));
    let kernel = b.s.model.kernel;
    b.within(m, |b| {
        let mut shape = b.g.value(x).shape.clone();
        shape[1] = b.g.value(w).shape[0];
        let y = b.g.compute(
            OpKind::Conv(op::Conv { kernel }),
            &[x, w],
            &[(&shape, b.dtype)],
        )[0];
        match bias {
            Some(bias) => {
                let channels = shape[1];
                let bias = b.g.reshape(bias, &[1, channels, 1, 1]);
                b.g.add_into(y, bias)
            }
            None => y,
        }
    })
}
