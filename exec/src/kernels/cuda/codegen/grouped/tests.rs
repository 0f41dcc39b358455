//! Which kernel does a grouped matmul, and what the one on tensor cores is launched with.

use super::super::tests::{compile, compiler, slot};
use super::super::{Arg, Module, Param, Request, generate};
use crate::kernels::cuda::nvrtc::Compiler;
use crate::kernels::cuda::target::Target;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, Slot, op};
use std::collections::BTreeMap;

/// A matmul of `[rows, k]` by matrices `[k, n]` of experts, their transposes, or the gradient of
/// these.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    Transposed,
    WeightGrad,
}

/// Types of the factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Factors {
    Of(DType),
    /// `a` and `b` in 8 bits, with a scale each; weight gradients have transposed ones.
    Scaled([DType; 2], Sums),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sums {
    Fast,
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    form: Form,
    /// Experts, rows of all of them, columns of the result, inner dimension.
    size: [u64; 4],
    factors: Factors,
    result: DType,
    align: u8,
    /// First element of `a` in its operand.
    offset: u64,
    /// The write that is the memory of `a`.
    same: Option<u8>,
}

const CASE: Case = Case {
    form: Form::Transposed,
    size: [8, 4096, 1536, 2048],
    factors: Factors::Of(DType::Bf16),
    result: DType::Bf16,
    align: 16,
    offset: 0,
    same: None,
};

const CODES: [DType; 2] = [DType::F8E5m2, DType::F8E4m3];

fn module(case: Case, target: Target) -> Module {
    let [experts, rows, n, k] = case.size;
    let ([a_type, b_type], scaled) = match case.factors {
        Factors::Of(ty) => ([ty; 2], None),
        Factors::Scaled(types, sums) => (types, Some(sums)),
    };
    let weight_grad = matches!(case.form, Form::WeightGrad);
    let tb = matches!(case.form, Form::Transposed);
    let (a, b, c) = match case.form {
        Form::WeightGrad if scaled.is_some() => (vec![k, rows], vec![n, rows], vec![experts, k, n]),
        Form::WeightGrad => (vec![rows, k], vec![rows, n], vec![experts, k, n]),
        Form::Transposed => (vec![rows, k], vec![experts, n, k], vec![rows, n]),
        Form::Plain => (vec![rows, k], vec![experts, k, n], vec![rows, n]),
    };
    let kind = match scaled {
        Some(_) if weight_grad => {
            OpKind::ScaledGroupedGemmWeightGrad(op::ScaledGroupedGemmWeightGrad { routed: None })
        }
        Some(sums) => OpKind::ScaledGroupedGemm(op::ScaledGroupedGemm {
            routed: None,
            fast: sums == Sums::Fast,
        }),
        None if weight_grad => {
            OpKind::GroupedGemmWeightGrad(op::GroupedGemmWeightGrad { routed: None })
        }
        None => OpKind::GroupedGemm(op::GroupedGemm { tb, routed: None }),
    };
    let of = |place, shape: &[u64], dtype| Slot {
        dtype,
        ..slot(place, shape, &[])
    };
    let mut inputs = vec![
        Slot {
            offset: case.offset,
            ..of(Place::Read(0), &a, a_type)
        },
        of(Place::Read(1), &b, b_type),
    ];
    if scaled.is_some() {
        inputs.extend([2, 3].map(|i| of(Place::Read(i), &[1, 1], DType::F32)));
    }
    let last = Place::Read(inputs.len() as u8);
    inputs.push(of(last, &[experts + 1], DType::I64));
    let c = of(Place::Write(0), &c, case.result);
    let arg = |dtype| Arg {
        dtype,
        align: case.align,
    };
    let reads: Vec<Arg> = inputs.iter().map(|slot| arg(slot.dtype)).collect();
    let mut same = vec![None; reads.len()];
    same[0] = case.same;
    let body = [BodyOp {
        op: kind,
        inputs: inputs.into_iter().collect(),
        outputs: [c].into_iter().collect(),
    }];
    let req = Request {
        target,
        body: &body,
        used_rows: None,
        reads: &reads,
        writes: &[arg(case.result)],
        same: &same,
    };
    generate(&req).unwrap_or_else(|e| panic!("{case:?}: {e}"))
}

fn is_on_tensor_cores_of_hopper(module: &Module) -> bool {
    module.source.contains("wgmma.mma_async")
}

#[test]
fn hopper_s_tensor_cores_take_16_bit_matrices_that_tensor_copies_can_read() {
    let forms = [Form::Plain, Form::Transposed, Form::WeightGrad];
    for form in forms {
        let case = Case { form, ..CASE };
        let with = |case: Case| is_on_tensor_cores_of_hopper(&module(case, Target::HOPPER));
        let taken = [
            case,
            Case {
                factors: Factors::Of(DType::F16),
                result: DType::F16,
                ..case
            },
            // Tiles that nothing fills.
            Case {
                size: [3, 1, 8, 8],
                ..case
            },
            Case {
                size: [512, 4096, 264, 72],
                ..case
            },
            Case { offset: 8, ..case },
        ];
        for case in taken {
            assert!(with(case), "{case:?}");
        }
        let left = [
            Case {
                factors: Factors::Of(DType::F32),
                result: DType::F32,
                ..case
            },
            Case { align: 8, ..case },
            Case { offset: 4, ..case },
            // Rows of 12 elements are not multiples of 16 bytes.
            Case {
                size: [8, 4096, 12, 2048],
                ..case
            },
            Case {
                size: [8, 4096, 1536, 12],
                ..case
            },
            // No room for the first tile of each expert.
            Case {
                size: [1024, 4096, 16, 16],
                ..case
            },
            Case {
                same: Some(0),
                ..case
            },
        ];
        for case in left {
            assert!(!with(case), "{case:?}");
        }
        // Gradients that nothing reduces are summed in float32.
        let float_result = Case {
            result: DType::F32,
            ..case
        };
        assert_eq!(
            with(float_result),
            matches!(form, Form::WeightGrad),
            "{float_result:?}"
        );
        for other in [(8, 0), (8, 9), (10, 0), (12, 0)] {
            let target = Target::of(other).unwrap();
            let made = module(case, target);
            assert!(!is_on_tensor_cores_of_hopper(&made), "{target}: {case:?}");
        }
    }
}

#[test]
fn hopper_s_tensor_cores_take_8_bit_matrices_whose_rows_are_of_the_inner_dimension() {
    for form in [Form::Transposed, Form::WeightGrad] {
        let case = Case {
            form,
            factors: Factors::Scaled(CODES, Sums::Full),
            ..CASE
        };
        let with = |case: Case| is_on_tensor_cores_of_hopper(&module(case, Target::HOPPER));
        let taken = [
            case,
            Case {
                factors: Factors::Scaled([DType::F8E4m3; 2], Sums::Fast),
                ..case
            },
            Case {
                size: [3, 16, 16, 16],
                ..case
            },
            Case { offset: 16, ..case },
            // Only results have these columns, in vectors of eight.
            Case {
                size: [8, 4096, 24, 2048],
                ..case
            },
        ];
        for case in taken {
            assert!(with(case), "{case:?}");
        }
        let inner = match form {
            Form::WeightGrad => [8, 4104, 1536, 2048],
            _ => [8, 4096, 1536, 2056],
        };
        let left = [
            Case {
                size: inner,
                ..case
            },
            Case { align: 8, ..case },
            Case { offset: 8, ..case },
            Case {
                size: [8, 4096, 1540, 2048],
                ..case
            },
            Case {
                same: Some(0),
                ..case
            },
        ];
        for case in left {
            assert!(!with(case), "{case:?}");
        }
        for other in [(8, 9), (10, 0)] {
            let made = module(case, Target::of(other).unwrap());
            assert!(!is_on_tensor_cores_of_hopper(&made), "{other:?} {case:?}");
        }
    }
}

/// Sums of a step of tensor cores are added up in float32, half of the columns at a time, unless
/// fast sums are allowed; a weight gradient never has these.
#[test]
fn sums_of_8_bit_factors_have_the_precision_that_is_asked_for() {
    for (form, sums, promoted) in [
        (Form::Transposed, Sums::Fast, false),
        (Form::Transposed, Sums::Full, true),
        (Form::WeightGrad, Sums::Full, true),
    ] {
        let case = Case {
            form,
            factors: Factors::Scaled(CODES, sums),
            ..CASE
        };
        let source = module(case, Target::HOPPER).source;
        let instruction = match promoted {
            true => "m64n128k32.f32.e5m2.e4m3",
            false => "m64n256k32.f32.e5m2.e4m3",
        };
        assert!(source.contains(instruction), "{case:?}");
        let promote = format!("#define PROMOTE {}u", u8::from(promoted));
        assert!(source.contains(&promote), "{case:?}");
    }
}

/// Returns columns and rows, and the number of matrices, of each tensor map.
fn maps(module: &Module) -> Vec<(Place, [u64; 2], Option<u64>)> {
    let maps = module.entries[0].params.iter().filter_map(|p| match p {
        Param::Map(m) => Some((m.place, m.size, m.stack)),
        _ => None,
    });
    maps.collect()
}

#[test]
fn copies_end_at_the_edges_of_an_expert_s_matrix() {
    let [a, b, c] = [Place::Read(0), Place::Read(1), Place::Write(0)];
    let with = |form, factors| {
        let case = Case {
            form,
            factors,
            ..CASE
        };
        module(case, Target::HOPPER)
    };
    let scaled = with(Form::WeightGrad, Factors::Scaled(CODES, Sums::Full));
    let expected = [
        (a, [4096, 2048], None),
        (b, [4096, 1536], None),
        (c, [1536, 2048], Some(8)),
    ];
    assert_eq!(maps(&scaled), expected);
    let of = |form| with(form, CASE.factors);
    let expected = [
        (
            Form::Plain,
            vec![(a, [2048, 4096], None), (b, [1536, 2048], Some(8))],
        ),
        (
            Form::Transposed,
            vec![(a, [2048, 4096], None), (b, [2048, 1536], Some(8))],
        ),
        (
            Form::WeightGrad,
            vec![
                (a, [2048, 4096], None),
                (b, [1536, 4096], None),
                (c, [1536, 2048], Some(8)),
            ],
        ),
    ];
    for (form, expected) in expected {
        let module = of(form);
        assert_eq!(maps(&module), expected, "{form:?}");
        let entry = &module.entries[0];
        assert!(entry.shared <= Target::HOPPER.shared(), "{form:?}");
        assert!(entry.params.contains(&Param::Tickets), "{form:?}");
    }
}

#[test]
#[ignore = "needs NVRTC"]
fn grouped_matmuls_compile() {
    let nvrtc: Compiler = compiler();
    for (target, dtypes) in [
        (Target::HOPPER, &[DType::Bf16, DType::F16, DType::F32][..]),
        (Target::of((8, 0)).unwrap(), &[DType::Bf16]),
        (Target::of((10, 0)).unwrap(), &[DType::F16]),
    ] {
        let mut all = BTreeMap::new();
        for form in [Form::Plain, Form::Transposed, Form::WeightGrad] {
            for &dtype in dtypes {
                for size in [
                    [8, 4096, 1536, 2048],
                    [3, 1, 8, 8],
                    [512, 40, 264, 72],
                    [2, 9, 6, 5],
                ] {
                    for result in [dtype, DType::F32] {
                        let case = Case {
                            form,
                            size,
                            factors: Factors::Of(dtype),
                            result,
                            ..CASE
                        };
                        all.insert(module(case, target).source, format!("{case:?}"));
                    }
                }
            }
        }
        compile(all, target, Some(&nvrtc));
    }
    for target in [Target::HOPPER, Target::of((8, 9)).unwrap()] {
        let mut all = BTreeMap::new();
        for (form, sums) in [
            (Form::Transposed, Sums::Fast),
            (Form::Transposed, Sums::Full),
            (Form::WeightGrad, Sums::Full),
        ] {
            for types in [CODES, [DType::F8E4m3; 2]] {
                for size in [[8, 4096, 1536, 2048], [3, 16, 16, 16], [2, 9, 6, 5]] {
                    for result in [DType::Bf16, DType::F32] {
                        let case = Case {
                            form,
                            size,
                            factors: Factors::Scaled(types, sums),
                            result,
                            ..CASE
                        };
                        all.insert(module(case, target).source, format!("{case:?}"));
                    }
                }
            }
        }
        compile(all, target, Some(&nvrtc));
    }
}
