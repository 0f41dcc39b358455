//! Operations on buffers with random shapes, strides and dtypes, compared with float64.

use super::memory::{Buffer, HYPER, Rng, kernel, launch, positions};
use super::semantics;
use shardlab_exec::RawRange;
use shardlab_exec::kernels::KernelError;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, Slot};
use smallvec::SmallVec;

/// Layout of an operand in its buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lay {
    /// No gaps, starting with the first element.
    Dense,
    /// Permuted dimensions, with an offset and gaps between rows.
    Scattered,
    /// One element, broadcast to all positions.
    Repeated,
}

/// An operand of a case.
#[derive(Clone, Debug)]
pub(super) struct Arg {
    shape: Vec<u64>,
    dtype: DType,
    lay: Lay,
    /// If set, indices below this bound instead of floats.
    ids: Option<u64>,
    /// Values that replace random ones.
    values: Option<Vec<f64>>,
    /// Input that this output aliases.
    same_as: Option<usize>,
}

pub(super) fn arg(shape: &[u64], dtype: DType) -> Arg {
    Arg {
        shape: shape.to_vec(),
        dtype,
        lay: Lay::Dense,
        ids: None,
        values: None,
        same_as: None,
    }
}

impl Arg {
    pub(super) fn lay(mut self, lay: Lay) -> Self {
        self.lay = lay;
        self
    }

    pub(super) fn ids(mut self, below: u64) -> Self {
        (self.ids, self.dtype) = (Some(below), DType::I64);
        self
    }

    pub(super) fn same_as(mut self, input: usize) -> Self {
        self.same_as = Some(input);
        self
    }

    pub(super) fn values(mut self, v: &[f64]) -> Self {
        self.values = Some(v.to_vec());
        self
    }

    /// Returns the strides and the offset of an operand, and the number of elements of its buffer.
    fn place(&self, rng: &mut Rng) -> (SmallVec<[u64; 4]>, u64, usize) {
        let n: u64 = self.shape.iter().product();
        match self.lay {
            Lay::Dense => (SmallVec::new(), 0, n as usize),
            Lay::Repeated => (self.shape.iter().map(|_| 0).collect(), 0, 1),
            Lay::Scattered => {
                let mut order: Vec<usize> = (0..self.shape.len()).collect();
                for i in (1..order.len()).rev() {
                    order.swap(i, rng.below(i as u64 + 1) as usize);
                }
                let mut strides: SmallVec<[u64; 4]> = SmallVec::from_elem(1, order.len());
                let (mut step, offset) = (1 + rng.below(2), rng.below(3));
                let mut last = 0;
                for &d in &order {
                    strides[d] = step;
                    last += (self.shape[d] - 1) * step;
                    step = step * self.shape[d] + rng.below(3);
                }
                (strides, offset, (offset + last + 1) as usize)
            }
        }
    }
}

/// An operation on buffers.
pub(super) struct Case {
    pub(super) op: BodyOp,
    pub(super) ins: Vec<Buffer>,
    outs: Vec<Option<Buffer>>,
    same_as: Vec<Option<usize>>,
}

impl Case {
    pub(super) fn new(op: OpKind, ins: &[Arg], outs: &[Arg], rng: &mut Rng) -> Self {
        let mut body = BodyOp {
            op,
            inputs: SmallVec::new(),
            outputs: SmallVec::new(),
        };
        let mut case = Self {
            op: body.clone(),
            ins: vec![],
            outs: vec![],
            same_as: vec![],
        };
        for (i, a) in ins.iter().enumerate() {
            let (strides, offset, numel) = a.place(rng);
            let mut b = Buffer::new(a.dtype, numel);
            let values: Vec<f64> = (0..numel)
                .map(|i| match (&a.values, a.ids) {
                    (Some(v), _) => v[i],
                    (None, Some(n)) => rng.below(n) as f64,
                    _ => rng.next() * 2.0,
                })
                .collect();
            b.write(0, &values);
            body.inputs.push(Slot {
                place: Place::Read(i as u8),
                offset,
                shape: a.shape[..].into(),
                strides,
                dtype: a.dtype,
            });
            case.ins.push(b);
        }
        for (i, a) in outs.iter().enumerate() {
            let place = Place::Write(i as u8);
            body.outputs.push(match a.same_as {
                Some(j) => Slot {
                    place,
                    ..body.inputs[j].clone()
                },
                None => {
                    let (strides, offset, numel) = a.place(rng);
                    case.outs.resize(i + 1, None);
                    case.outs[i] = Some(Buffer::new(a.dtype, numel));
                    Slot {
                        place,
                        offset,
                        shape: a.shape[..].into(),
                        strides,
                        dtype: a.dtype,
                    }
                }
            });
            case.outs.resize(i + 1, None);
            case.same_as.push(a.same_as);
        }
        case.op = body;
        case
    }

    pub(super) fn run(&mut self) -> Result<(), KernelError> {
        let reads: Vec<RawRange> = self.ins.iter_mut().map(Buffer::range).collect();
        let writes: Vec<RawRange> = self
            .outs
            .iter_mut()
            .zip(&self.same_as)
            .map(|(b, same)| {
                b.as_mut()
                    .map_or_else(|| reads[same.unwrap()], Buffer::range)
            })
            .collect();
        launch(&kernel(vec![self.op.clone()]), HYPER, &[], &reads, &writes)
    }

    /// Runs the operation and compares all elements of each output's buffer, including gaps.
    pub(super) fn check(mut self) {
        let label = format!("{:?}", self.op);
        let ins: Vec<Vec<f64>> = self
            .op
            .inputs
            .iter()
            .zip(&self.ins)
            .map(|(s, b)| positions(s).into_iter().map(|i| b.get(i)).collect())
            .collect();
        let before: Vec<Vec<f64>> = self.buffers().iter().map(|b| b.values()).collect();
        let want = semantics::apply(&self.op, &ins);
        self.run().unwrap_or_else(|e| panic!("{e}: {label}"));
        for (o, slot) in self.op.outputs.iter().enumerate() {
            let (got, mut expected) = (self.buffers()[o], before[o].clone());
            for (i, v) in positions(slot).into_iter().zip(&want[o]) {
                expected[i] = *v;
            }
            let scale = want[o].iter().fold(0.0f64, |m, v| m.max(v.abs()));
            for (i, &e) in expected.iter().enumerate() {
                let g = got.get(i);
                let rounding = match got.dtype {
                    DType::Bf16 => e.abs() / 250.0,
                    DType::F16 => e.abs() / 1000.0,
                    _ => 0.0,
                };
                let ok =
                    g.is_nan() && e.is_nan() || (g - e).abs() <= rounding + 2e-5 * scale.max(1e-3);
                assert!(ok, "output {o} element {i}: {g} instead of {e}: {label}");
            }
        }
    }

    pub(super) fn buffers(&self) -> Vec<&Buffer> {
        let own = self.outs.iter().zip(&self.same_as);
        own.map(|(b, same)| b.as_ref().unwrap_or_else(|| &self.ins[same.unwrap()]))
            .collect()
    }
}

const TYPES: [DType; 2] = [DType::F32, DType::Bf16];
const LAYS: [Lay; 2] = [Lay::Dense, Lay::Scattered];

/// Runs all combinations of dtypes and layouts of inputs and outputs, with a few random shapes
/// each.
pub(super) fn each(mut f: impl FnMut(DType, Lay, Lay, &mut Rng)) {
    let mut rng = Rng(11);
    for t in TYPES {
        for a in LAYS {
            for b in LAYS {
                for _ in 0..6 {
                    f(t, a, b, &mut rng);
                }
            }
        }
    }
}

pub(super) fn shape(rng: &mut Rng) -> Vec<u64> {
    let rank = 1 + rng.below(4);
    (0..rank)
        .map(|_| 1 + rng.below([600, 60, 12, 9][rank as usize - 1]))
        .collect()
}
