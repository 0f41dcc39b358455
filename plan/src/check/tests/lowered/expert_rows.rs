//! Rows of experts: faults planted in their readers and in gradients of weights are found.

use super::experts::{POLICIES, experts, only};
use super::find;
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::program::*;

/// Returns the steady launches of kernels whose body starts with such an operation.
fn launches(p: &Program, is: impl Fn(&OpKind) -> bool) -> Vec<(InstrId, KernelId)> {
    let starts = |k: KernelId| p.kernels[k.index()].body.first().is_some_and(|b| is(&b.op));
    let kernel = |i: &Instr| match i.op {
        Op::Launch { kernel, .. } if starts(kernel) => Some(kernel),
        _ => None,
    };
    let found = find(p, |i| kernel(i).is_some());
    let with = |i: InstrId| (i, kernel(&p.instrs[i.index()]).expect("a launch"));
    found.into_iter().map(with).collect()
}

/// Returns the position of a launch's `n`th read in the table of accesses.
fn read(p: &Program, at: InstrId, n: usize) -> usize {
    match p.instrs[at.index()].op {
        Op::Launch { reads, .. } => reads as usize + n,
        _ => unreachable!("a launch"),
    }
}

/// Offsets of another layer: rows beyond the valid ones are multiplied, and valid ones are left
/// out.
#[test]
fn matmuls_with_the_offsets_of_another_layer() {
    for policy in POLICIES {
        let p = experts(policy, &[]);
        let sorts = launches(&p, |op| matches!(op, OpKind::SortExperts(_)));
        let written = |i: InstrId| p.writes(&p.instrs[i.index()].op)[0];
        let [first, second] = [0, 1].map(|n| written(sorts[n].0));
        let matmuls = launches(&p, |op| matches!(op, OpKind::GroupedGemm(_)));
        let of_second = |(i, _): &&(InstrId, KernelId)| p.accesses[read(&p, *i, 2)] == second;
        let (at, _) = matmuls.iter().find(of_second).expect("a matmul");
        let mut q = p.clone();
        q.accesses[read(&p, *at, 2)] = first;
        let r = check(&q);
        // Both sections have this range.
        let v = r.of(RuleId::ExpertTail).find(|v| v.instr == Some(*at));
        let v = v.unwrap_or_else(|| panic!("{policy}\n{r}"));
        assert!(v.message.contains("those of one sort of choices"), "{v:?}");
    }
}

/// The mistake of padded layouts: a dense GEMM sums over rows that nothing has written, and 0 times
/// NaN is NaN.
#[test]
fn sums_over_rows_that_no_choice_fills() {
    for dispatcher in ["gather", "padded", "peer", "deepep", "all_to_all"] {
        let mut q = experts("native", &[&format!("moe.dispatcher={dispatcher}")]);
        for kernel in &mut q.kernels {
            for op in &mut kernel.body {
                if matches!(op.op, OpKind::GroupedGemmWeightGrad(_)) {
                    op.op = OpKind::SumLeading;
                }
            }
        }
        let v = only(&q, RuleId::ExpertTail, dispatcher);
        assert!(v.message.contains("reads all rows of"), "{v:?}");
    }
}

/// Generated kernels stop at the last offset, which is that of another layer here.
#[test]
fn generated_kernels_with_the_offsets_of_another_layer() {
    let p = experts("native", &["compile.mode=regions"]);
    let sorts = launches(&p, |op| matches!(op, OpKind::SortExperts(_)));
    let written = |i: InstrId| p.writes(&p.instrs[i.index()].op)[0];
    let [first, second] = [0, 1].map(|n| written(sorts[n].0));
    let used = |k: &Kernel| k.used_rows.as_ref().map(|used| used.offsets.place);
    let stops = find(&p, |i| match i.op {
        Op::Launch { kernel, .. } => used(&p.kernels[kernel.index()]).is_some(),
        _ => false,
    });
    let mut planted = 0;
    for at in stops {
        let Op::Launch { kernel, .. } = p.instrs[at.index()].op else {
            unreachable!("a launch");
        };
        let Some(Place::Read(n)) = used(&p.kernels[kernel.index()]) else {
            continue;
        };
        let place = read(&p, at, usize::from(n));
        if p.accesses[place] != second {
            continue;
        }
        let mut q = p.clone();
        q.accesses[place] = first;
        let r = check(&q);
        let found = r.of(RuleId::ExpertTail).any(|v| v.instr == Some(at));
        assert!(found, "#{}\n{r}", at.0);
        planted += 1;
    }
    assert!(planted > 0);
}

/// No kernel writes the matrix of an expert, so its gradient contains what was in memory before.
#[test]
fn gradients_without_the_last_expert() {
    for policy in POLICIES {
        let mut q = experts(policy, &[]);
        for kernel in &mut q.kernels {
            for op in &mut kernel.body {
                if matches!(op.op, OpKind::GroupedGemmWeightGrad(_)) {
                    op.outputs[0].shape[0] -= 1;
                }
            }
        }
        let v = only(&q, RuleId::ExpertEmpty, policy);
        assert!(v.message.contains("3 matrices"), "{v:?}");
        assert!(v.message.contains("those of 4 experts"), "{v:?}");
    }
}

/// The offsets leave out an expert: no rows count for it, and its gradient has no end.
#[test]
fn offsets_without_the_last_expert() {
    let mut q = experts("native", &[]);
    for op in q.kernels.iter_mut().flat_map(|k| &mut k.body) {
        if let OpKind::SortExperts(sort) = &mut op.op {
            sort.experts = 3;
        }
    }
    let r = check(&q);
    let v = r.of(RuleId::ExpertEmpty).next().expect("found");
    assert!(v.message.contains("those of 3 experts"), "{v:?}");
}

/// Buffers with as many rows as a limit says, and choices that take more: of a larger limit, of
/// none, or of more places on a rank.
#[test]
fn rows_beyond_the_reserve() {
    type Plant = fn(&mut OpKind);
    let larger: Plant = |op| {
        if let OpKind::SortExperts(op::SortExperts {
            limit: Some(limit), ..
        }) = op
        {
            limit.rows += 1;
        }
    };
    let none: Plant = |op| {
        if let OpKind::SortExperts(sort) = op {
            sort.limit = None;
        }
    };
    let places: Plant = |op| {
        if let OpKind::DispatchExperts(of) = op {
            of.slots += 1;
        }
    };
    for (dispatcher, plants) in [
        ("gather", &[larger, none][..]),
        ("peer", &[larger, none]),
        ("deepep", &[larger, none]),
        ("padded", &[places]),
        ("all_to_all", &[places]),
    ] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let p = experts("native", &[&dispatcher, "moe.capacity_factor=1.25"]);
        for plant in plants {
            let mut q = p.clone();
            for op in q.kernels.iter_mut().flat_map(|k| &mut k.body) {
                plant(&mut op.op);
            }
            let v = only(&q, RuleId::ExpertRows, &dispatcher);
            assert!(v.message.contains("gives choices rows up to"), "{v:?}");
        }
    }
}
