//! A kernel of one operation, for calibrations.

use shardlab_plan::ir::{BodyOp, DType, Kernel, KernelClass, OpKind, Place, Shape, Slot};
use shardlab_plan::units::{Bytes, Flops};
use smallvec::SmallVec;

/// Creates a kernel with one operation on dense operands of given shapes and element types. Its
/// costs are not used, so they are zero.
pub(super) fn kernel<S: AsRef<[u64]>>(
    op: OpKind,
    class: KernelClass,
    dtype: DType,
    ins: &[(S, DType)],
    outs: &[(S, DType)],
) -> Kernel {
    Kernel {
        name: op.name().to_owned(),
        class,
        flops: Flops(0),
        read: Bytes(0),
        written: Bytes(0),
        dtype,
        body: vec![BodyOp {
            op,
            inputs: slots(ins, Place::Read),
            outputs: slots(outs, Place::Write),
        }],
        used_rows: None,
    }
}

fn slots<S: AsRef<[u64]>, C: FromIterator<Slot>>(
    operands: &[(S, DType)],
    place: fn(u8) -> Place,
) -> C {
    let slot = |(i, (shape, dtype)): (u8, &(S, DType))| Slot {
        place: place(i),
        offset: 0,
        shape: Shape::from_slice(shape.as_ref()),
        strides: SmallVec::new(),
        dtype: *dtype,
    };
    (0u8..).zip(operands).map(slot).collect()
}
