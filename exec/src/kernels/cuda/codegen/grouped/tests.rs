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

#[derive(Clone, Copy, Debug)]
struct Case {
    form: Form,
    /// Experts, rows of all of them, columns of the result, inner dimension.
    size: [u64; 4],
    dtype: DType,
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
    dtype: DType::Bf16,
    result: DType::Bf16,
    align: 16,
    offset: 0,
    same: None,
};

fn module(case: Case, target: Target) -> Module {
    let [experts, rows, n, k] = case.size;
    let (a, b, c, kind) = match case.form {
        Form::WeightGrad => (
            vec![rows, k],
            vec![rows, n],
            vec![experts, k, n],
            OpKind::GroupedGemmWeightGrad(op::GroupedGemmWeightGrad { routed: None }),
        ),
        form => {
            let tb = matches!(form, Form::Transposed);
            let b = if tb { [n, k] } else { [k, n] };
            (
                vec![rows, k],
                vec![experts, b[0], b[1]],
                vec![rows, n],
                OpKind::GroupedGemm(op::GroupedGemm { tb, routed: None }),
            )
        }
    };
    let of = |place, shape: &[u64], dtype| Slot {
        dtype,
        ..slot(place, shape, &[])
    };
    let a = Slot {
        offset: case.offset,
        ..of(Place::Read(0), &a, case.dtype)
    };
    let b = of(Place::Read(1), &b, case.dtype);
    let offsets = of(Place::Read(2), &[experts + 1], DType::I64);
    let c = of(Place::Write(0), &c, case.result);
    let arg = |dtype| Arg {
        dtype,
        align: case.align,
    };
    let body = [BodyOp {
        op: kind,
        inputs: [a, b, offsets].into_iter().collect(),
        outputs: [c].into_iter().collect(),
    }];
    let req = Request {
        target,
        body: &body,
        reads: &[arg(case.dtype), arg(case.dtype), arg(DType::I64)],
        writes: &[arg(case.result)],
        same: &[case.same, None, None],
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
                dtype: DType::F16,
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
                dtype: DType::F32,
                result: DType::F32,
                ..case
            },
            Case { align: 8, ..case },
            Case { offset: 4, ..case },
            // Rows of 12 elements are no multiple of 16 bytes.
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
    let of = |form| module(Case { form, ..CASE }, Target::HOPPER);
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
                            dtype,
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
