//! Convolutions over positions.

use crate::graph::ValueId;
use crate::ir::{ModuleId, OpKind, op};
use crate::models::build::Builder;

/// Applies `nn.Conv1d` to `[batch, channels, positions]`: the convolution, which outputs
/// `positions` positions, then the bias in place.
pub(super) fn convolve(
    b: &mut Builder<'_>,
    at: ModuleId,
    [x, w]: [ValueId; 2],
    bias: Option<ValueId>,
    [stride, positions]: [u64; 2],
) -> ValueId {
    b.within(at, |b| {
        let (of_x, of_w) = (&b.g.value(x).shape, &b.g.value(w).shape);
        let shape = [of_x[0], of_w[0], positions];
        let kernel = of_w[2];
        let kind = OpKind::Conv1d(op::Conv1d { kernel, stride });
        let y = b.compute(kind, &[x, w], &[&shape])[0];
        let Some(bias) = bias else {
            return y;
        };
        let [samples, channels, positions] = shape;
        let y = b.g.reshape(y, &[samples, channels, positions, 1]);
        let bias = b.g.reshape(bias, &[1, channels, 1, 1]);
        let y = b.g.add_into(y, bias);
        b.g.reshape(y, &shape)
    })
}
