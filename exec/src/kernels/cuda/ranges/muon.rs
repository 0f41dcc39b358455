//! Matrices that Muon updates, tensor by tensor.

use super::{count, in_groups, numel, size, updates};
use crate::kernels::cuda::codegen::shard::muon::Types;
use crate::kernels::error::OperandError;
use crate::operand::RawRange;
use shardlab_plan::ir::{DType, MatrixShape, Shape};
use shardlab_plan::program::GroupRun;

/// A matrix that is updated, by addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::kernels::cuda) struct Matrix {
    /// Rows and columns.
    pub(in crate::kernels::cuda) sides: [u64; 2],
    pub(in crate::kernels::cuda) types: Types,
    /// Parameter group.
    pub(in crate::kernels::cuda) group: u8,
    pub(in crate::kernels::cuda) weight: u64,
    pub(in crate::kernels::cuda) grad: u64,
    /// Bytes between the pieces of a gradient.
    pub(in crate::kernels::cuda) distance: u64,
    pub(in crate::kernels::cuda) momentum: u64,
}

impl Matrix {
    pub(in crate::kernels::cuda) const fn numel(&self) -> u64 {
        self.sides[0] * self.sides[1]
    }

    pub(in crate::kernels::cuda) fn short_and_long(&self) -> [u64; 2] {
        let [rows, cols] = self.sides;
        [rows.min(cols), rows.max(cols)]
    }
}

/// A tensor of matrices and padding, as an optimizer's launch has it.
pub(super) struct Tensor<'a> {
    pub(super) weight: &'a RawRange,
    /// Gradient, and the number of its pieces.
    pub(super) grad: (&'a RawRange, u32),
    /// Momentum, and the first of its elements that belongs to the tensor.
    pub(super) momentum: Option<(&'a RawRange, u64)>,
    /// Weights of the launch before this tensor.
    pub(super) before: u64,
}

/// Appends the matrices of a tensor. `shapes` are those of the launch's matrices from here on, and
/// `[n]` for `n` elements of padding.
pub(super) fn matrices<'s>(
    all: &mut Vec<Matrix>,
    tensor: Tensor<'_>,
    shapes: &mut impl Iterator<Item = &'s Shape>,
    groups: &[GroupRun],
) -> Result<(), OperandError> {
    let Tensor {
        weight,
        grad: (grad, pieces),
        momentum,
        before,
    } = tensor;
    let n = weight.bytes as u64 / weight.dtype.size();
    let place = |r: &RawRange, element: u64| r.ptr as u64 + element * r.dtype.size();
    let mut start = 0;
    while start < n {
        let shape = shapes.next().map_or(&[0][..], |s| s.as_slice());
        let numel = shape.iter().product::<u64>();
        if numel == 0 || start + numel > n {
            return Err(OperandError::Size {
                what: "the matrices",
                needed: n as usize,
                found: (start + numel) as usize,
            });
        }
        if let [rows, cols] = *shape {
            let (state, used) = momentum.ok_or(OperandError::Unsupported)?;
            if !matches!(state.dtype, DType::F32 | DType::Bf16) {
                return Err(OperandError::Type(state.dtype));
            }
            let mut group = None;
            let mut several = false;
            in_groups(groups, before + start, numel, |g, _, _| {
                several |= group.replace(g).is_some();
            });
            if several {
                let message = "a matrix is in several parameter groups";
                return Err(OperandError::Shape(message.to_owned()));
            }
            all.push(Matrix {
                sides: [rows, cols],
                types: Types {
                    weight: weight.dtype,
                    grad: grad.dtype,
                    momentum: state.dtype,
                    pieces,
                },
                group: group.unwrap_or(0),
                weight: place(weight, start),
                grad: place(grad, start),
                distance: n * grad.dtype.size(),
                momentum: place(state, used + start),
            });
        }
        start += numel;
    }
    Ok(())
}

/// Rows of a matrix that are updated, by addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::kernels::cuda) struct Rows {
    /// The whole matrix.
    pub(in crate::kernels::cuda) matrix: MatrixShape,
    /// Type of the weight.
    pub(in crate::kernels::cuda) dtype: DType,
    /// Parameter group.
    pub(in crate::kernels::cuda) group: u8,
    pub(in crate::kernels::cuda) weight: u64,
    /// Orthogonalized update, in bfloat16.
    pub(in crate::kernels::cuda) update: u64,
    /// Elements.
    pub(in crate::kernels::cuda) numel: u64,
}

fn bf16(r: &RawRange) -> Result<(), OperandError> {
    match r.dtype {
        DType::Bf16 => Ok(()),
        other => Err(OperandError::Type(other)),
    }
}

/// Returns the address of a whole matrix that is orthogonalized in place.
pub(super) fn whole(
    matrix: MatrixShape,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<u64, OperandError> {
    let ([from], [to]) = (reads, writes) else {
        return Err(count("matrices", 1, reads.len()));
    };
    bf16(from)?;
    size("the matrix", matrix.numel(), numel(from))?;
    if (from.ptr, from.bytes) != (to.ptr, to.bytes) {
        let message = "a matrix is not orthogonalized in place";
        return Err(OperandError::Shape(message.to_owned()));
    }
    Ok(from.ptr as u64)
}

/// Returns the rows of a matrix that a launch updates, by parameter group: padding may be in
/// another one.
pub(super) fn rows(
    matrix: MatrixShape,
    groups: &[GroupRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<Vec<Rows>, OperandError> {
    let [weight, update] = reads else {
        return Err(count("reads", 2, reads.len()));
    };
    bf16(update)?;
    updates(weight, (update, 1), writes.first())?;
    let mut all = Vec::new();
    in_groups(groups, 0, numel(weight), |group, start, numel| {
        let place = |r: &RawRange| r.ptr as u64 + start * r.dtype.size();
        all.push(Rows {
            matrix,
            dtype: weight.dtype,
            group,
            weight: place(weight),
            update: place(update),
            numel,
        });
    });
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(at: usize, elements: usize, dtype: DType) -> RawRange {
        RawRange {
            ptr: std::ptr::without_provenance_mut(at),
            bytes: elements * dtype.size() as usize,
            dtype,
        }
    }

    /// Rows of a rank with padding after them, which belongs to the first group.
    #[test]
    fn rows_are_updated_group_by_group() {
        let matrix = MatrixShape { rows: 5, cols: 4 };
        let weight = range(1 << 20, 12, DType::F32);
        let update = range((2 << 20) + 24, 12, DType::Bf16);
        let groups = [(2, 8), (0, 4)].map(|(group, numel)| GroupRun { group, numel });
        let all = rows(matrix, &groups, &[weight, update], &[weight]).unwrap();
        let found = all.iter().map(|r| (r.group, r.weight, r.update, r.numel));
        assert!(found.eq([
            (2, 1 << 20, (2 << 20) + 24, 8),
            (0, (1 << 20) + 32, (2 << 20) + 40, 4)
        ]));
        let bad = rows(matrix, &groups, &[weight, weight], &[weight]);
        assert!(
            matches!(bad, Err(OperandError::Type(DType::F32))),
            "{bad:?}"
        );
        let bad = whole(matrix, &[update], &[update]);
        assert!(matches!(bad, Err(OperandError::Size { .. })), "{bad:?}");
        let matrix = MatrixShape { rows: 3, cols: 4 };
        assert_eq!(whole(matrix, &[update], &[update]).unwrap(), (2 << 20) + 24);
    }

    /// A wide and a tall matrix with padding between them, whose momentum follows that of another
    /// tensor.
    #[test]
    fn matrices_of_a_tensor_have_places_and_groups() {
        let weight = range(1 << 20, 30, DType::F32);
        let grad = range(2 << 20, 60, DType::Bf16);
        let momentum = range(3 << 20, 100, DType::F32);
        let shapes: [Shape; 3] = [vec![2, 6], vec![8], vec![5, 2]].map(Shape::from_vec);
        let groups = [(0, 50), (1, 12), (2, 18)].map(|(group, numel)| GroupRun { group, numel });
        let tensor = || Tensor {
            weight: &weight,
            grad: (&grad, 2),
            momentum: Some((&momentum, 40)),
            before: 50,
        };
        let mut all = Vec::new();
        matrices(&mut all, tensor(), &mut shapes.iter(), &groups).unwrap();
        let [wide, tall] = all[..] else {
            panic!("{all:?}");
        };
        assert_eq!((wide.sides, wide.group, wide.weight), ([2, 6], 1, 1 << 20));
        assert_eq!((wide.grad, wide.distance), (2 << 20, 60));
        assert_eq!((tall.sides, tall.group), ([5, 2], 2));
        assert_eq!(tall.weight, (1 << 20) + 4 * 20);
        assert_eq!(tall.grad, (2 << 20) + 2 * 20);
        assert_eq!(tall.momentum, (3 << 20) + 4 * (40 + 20));
        let bad = matrices(&mut Vec::new(), tensor(), &mut shapes[..2].iter(), &groups);
        assert!(matches!(bad, Err(OperandError::Size { .. })), "{bad:?}");
        let groups = [(1, 51), (2, 29)].map(|(group, numel)| GroupRun { group, numel });
        let bad = matrices(&mut Vec::new(), tensor(), &mut shapes.iter(), &groups);
        assert!(
            bad.unwrap_err()
                .to_string()
                .contains("several parameter groups")
        );
    }
}
