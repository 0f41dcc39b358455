//! Parameters that policy `fsdp2` does not manage (`fsdp.ignored_params`).

use super::find::kernels;
use super::{at_rest, steady};
use crate::check::check;
use crate::ir::{AxisId, BufferId, DType, Holds, HostWorkKind, Placement, Real, Role, ShardOp};
use crate::plan;
use crate::program::{Op, Phase, Program, Rule};
use crate::scenario::load;
use std::collections::BTreeMap;
use std::path::Path;

const EXPERTS: &str = "fsdp.ignored_params=experts";
/// Weights of the experts of one rank in the shipped mixture: in each of two layers, two of eight
/// experts with three matrices of 44 x 32.
const NUMEL: u64 = 2 * 2 * 3 * 44 * 32;
/// Its parameters: in each layer, gates with other factors, and results.
const PARAMS: usize = 2 * 2;

/// Returns the checked program of the shipped mixture with bf16 weights, whose four ranks divide
/// its eight experts.
fn experts(set: &[&str]) -> Program {
    let all: Vec<String> = [
        "mesh.ep=4",
        "fsdp.policy=fsdp2",
        "precision.main_params=none",
        "precision.main_grads=bf16",
        "moe.capacity_factor=4",
    ]
    .iter()
    .chain(set)
    .map(|s| (*s).to_owned())
    .collect();
    let scenario = load(Path::new("small-moe"), &all).unwrap_or_else(|e| panic!("{e}"));
    let p = plan(&scenario).unwrap_or_else(|e| panic!("{set:?}: {e}"));
    let report = check(&p);
    assert!(report.is_ok(), "{set:?}\n{report}");
    p
}

/// Returns whether a buffer holds a parameter of a group that the policy does not manage.
fn is_ignored(p: &Program, b: BufferId) -> bool {
    match p.buffers[b.index()].holds {
        Holds::Param(x) => {
            let mut groups = p.groups.iter();
            let group = groups.find(|g| g.params.contains(&x)).unwrap();
            group.ignored
        }
        _ => false,
    }
}

/// Returns the bytes of the buffers of ignored parameters, by role.
fn bytes_of_ignored(p: &Program) -> BTreeMap<Role, u64> {
    let mut by_role = BTreeMap::new();
    for i in (0..p.buffers.len() as u32).map(BufferId) {
        if is_ignored(p, i) {
            let b = &p.buffers[i.index()];
            *by_role.entry(b.role).or_insert(0) += b.bytes.0;
        }
    }
    by_role
}

#[test]
fn experts_are_in_groups_of_their_own() {
    let p = experts(&[EXPERTS]);
    let of = |x: &crate::ir::ParamId| &p.params[x.index()];
    for group in &p.groups {
        let divided = |x| of(x).placements.on(AxisId::EP) != Placement::Replicate;
        assert!(group.params.iter().all(|x| divided(x) == group.ignored));
    }
    let ignored: Vec<_> = p.groups.iter().filter(|g| g.ignored).collect();
    let numel: u64 = ignored.iter().map(|g| g.layout.full_numel()).sum();
    assert_eq!((ignored.len(), numel), (2, NUMEL));
    // Globs select the same parameters.
    let globs = experts(&["fsdp.ignored_params=[\"layers.*.mlp.experts\"]"]);
    assert_eq!(globs.digest(), p.digest());
}

/// A weight, a gradient, and the gradient of a later micro-batch before it is added, each in the
/// dtype of the parameter; two moments, and a step counter per parameter.
#[test]
fn every_byte_is_known() {
    let bf16 = NUMEL * DType::Bf16.size();
    for (accum, added) in [("1", None), ("3", Some((Role::FullGrad, bf16)))] {
        let accum = format!("train.grad_accum={accum}");
        let p = experts(&[EXPERTS, &accum, "precision.moments=bf16"]);
        let want = [
            (Role::MainWeight, bf16),
            (Role::MainGrad, bf16),
            (Role::OptimizerState, 2 * bf16),
        ];
        let want = want.into_iter().chain(added).collect();
        assert_eq!(bytes_of_ignored(&p), want, "{accum}");
        // At rest, a group of one rank keeps as much.
        let managed = experts(&[&accum, "precision.moments=bf16"]);
        assert_eq!(at_rest(&p), at_rest(&managed));
    }
}

/// Kernels read the parameters themselves, and no collective or copy moves them.
#[test]
fn nothing_gathers_or_reduces_them() {
    for set in [
        &[][..],
        &["train.grad_accum=2"],
        &["train.grad_accum=2", "fsdp.gradient_sync=last"],
        &["train.grad_accum=2", "train.joint_backward=true"],
        &["train.recompute=full"],
        &["fsdp.reshard_after_forward=false"],
        &["compile.mode=blocks"],
        &["compile.mode=regions", "train.recompute=selective"],
        &["train.validate_every=2"],
    ] {
        let p = experts(&[&[EXPERTS], set].concat());
        for instr in &p.instrs {
            let touched: Vec<BufferId> = match instr.op {
                Op::Collective { id, .. } => {
                    let parts = p.collectives[id.index()].parts.iter();
                    parts
                        .flat_map(|c| [c.input.buffer, c.output.buffer])
                        .collect()
                }
                Op::Copy { id, .. } => {
                    let copy = &p.copies[id.index()];
                    vec![copy.from.buffer, copy.to.buffer]
                }
                Op::Launch { .. } => {
                    let own = [
                        Rule::Model,
                        Rule::Accumulate,
                        Rule::Scale,
                        Rule::Clip,
                        Rule::Optimizer,
                    ];
                    if own.contains(&instr.rule) {
                        continue;
                    }
                    let accesses = [p.reads(&instr.op), p.writes(&instr.op)].concat();
                    accesses.iter().map(|a| a.buffer).collect()
                }
                _ => continue,
            };
            let wrong = touched.iter().find(|b| is_ignored(&p, **b));
            assert!(wrong.is_none(), "{set:?} {:?}", instr.rule);
        }
        let roles = bytes_of_ignored(&p);
        assert!(!roles.contains_key(&Role::FullWeight), "{set:?} {roles:?}");
    }
}

/// The sum over the ranks that send tokens becomes a mean over all ranks, once per step.
#[test]
fn gradients_are_divided_once_per_step() {
    let scales = |set: &[&str]| -> Vec<f64> {
        let p = experts(&[&[EXPERTS, "train.grad_accum=2"], set].concat());
        let found = kernels(&p, |op| matches!(op, ShardOp::Scale { .. }));
        let factor = |(at, op, _, to): &(usize, ShardOp, _, BufferId)| {
            assert!(is_ignored(&p, *to));
            // A joint backward ends with the first micro-batch.
            let joint = set.contains(&"train.joint_backward=true");
            assert_eq!(steady(&p)[*at].micro_batch, u16::from(!joint));
            match op {
                ShardOp::Scale {
                    factor: Real(factor),
                } => *factor,
                _ => unreachable!("found by its kind"),
            }
        };
        found.iter().map(factor).collect()
    };
    assert_eq!(scales(&[]), [0.25; PARAMS]);
    assert_eq!(scales(&["fsdp.gradient_sync=last"]), [0.25; PARAMS]);
    assert_eq!(scales(&["train.joint_backward=true"]), [0.25; PARAMS]);
    assert_eq!(scales(&["fsdp.per_token_loss=true"]), [0.0; 0]);
    let given = ["fsdp.gradient_scaling_factor=0.5"];
    assert_eq!(scales(&given), [0.5; PARAMS]);
}

/// Autograd adds later gradients to the first one, which lives until `zero_grad`.
#[test]
fn the_first_gradient_is_added_to() {
    let p = experts(&[EXPERTS, "train.grad_accum=3"]);
    let sums = kernels(&p, |op| op == ShardOp::Accumulate);
    let of_ignored = sums.iter().filter(|(.., to)| is_ignored(&p, *to));
    let first = |b: BufferId| p.buffers[b.index()].role == Role::MainGrad;
    assert_eq!(of_ignored.clone().count(), 2 * PARAMS);
    assert!(of_ignored.clone().all(|(.., to)| first(*to)));
    let freed: Vec<_> = steady(&p)
        .iter()
        .filter(|i| matches!(i.op, Op::Free(b) if is_ignored(&p, b) && first(b)))
        .map(|i| (i.phase, i.rule))
        .collect();
    assert_eq!(freed, [(Phase::Optimizer, Rule::ZeroGrad); PARAMS]);
}

/// Frozen parameters have no gradients that copies on other ranks could lack.
#[test]
fn frozen_parameters_may_be_on_all_ranks() {
    let frozen = "fsdp.frozen=[\"tok_embeddings\"]";
    let p = experts(&[frozen, "fsdp.ignored_params=[\"tok_embeddings\"]"]);
    let whole = 97 * 32 * DType::Bf16.size();
    assert_eq!(
        bytes_of_ignored(&p),
        [(Role::MainWeight, whole)].into_iter().collect()
    );
    let sharded = experts(&[frozen]);
    let weights = |p: &Program| at_rest(p)[&Role::MainWeight].0;
    // 97 rows over four ranks are 25 rows of the first one.
    let shard = 25 * 32 * DType::Bf16.size();
    assert_eq!(weights(&p) - weights(&sharded), whole - shard);
}

/// A unit whose parameters are all ignored has nothing to gather: `fully_shard` makes no parameter
/// group for it.
#[test]
fn units_without_managed_parameters_have_no_hooks() {
    let units = "fsdp.units=[\"layers.*\", \"layers.*.mlp.experts\"]";
    let p = experts(&[EXPERTS, units]);
    let empty: Vec<usize> = (0..p.units.len())
        .filter(|u| {
            let groups = &p.units[*u].groups;
            !groups.is_empty() && groups.iter().all(|g| p.groups[g.index()].ignored)
        })
        .collect();
    assert_eq!(empty.len(), 2);
    let hooks = p
        .instrs
        .iter()
        .filter(|i| {
            matches!(
                i.op,
                Op::HostWork {
                    kind: HostWorkKind::Hook,
                    ..
                }
            )
        })
        .map(|i| i.unit.index());
    assert!(hooks.clone().count() > 0);
    assert_eq!(hooks.filter(|u| empty.contains(u)).count(), 0);
    let merged = experts(&[EXPERTS]);
    assert_eq!(bytes_of_ignored(&p), bytes_of_ignored(&merged));
}
