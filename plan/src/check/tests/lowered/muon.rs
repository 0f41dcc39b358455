//! Muon: programs with whole matrices pass, and matrices that a shard boundary divides are found.

use super::try_lower;
use crate::check::{RuleId, check};
use crate::ir::{AxisId, AxisSet, CommId, Holds, HostWorkKind, ParamId, Role, ShardOp};
use crate::program::{Op, Program, Rule, SectionKind};
use crate::shard::Layout;
use crate::units::Bytes;

const MUON: &str = "train.optimizer=muon";

fn program(set: &[&str]) -> Program {
    let base = [MUON, "mesh.dp_shard=4"];
    try_lower("llama-tiny", &[&base, set].concat()).unwrap_or_else(|| panic!("{set:?}"))
}

#[test]
fn programs_with_muon_pass() {
    for set in [
        &[][..],
        &["fsdp.strategy=optim"],
        &["fsdp.atomic=tensor"],
        &["fsdp.atomic=4"],
        &["fsdp.strategy=optim_grads", "train.grad_accum=2"],
        &["fsdp.strategy=no_shard"],
        &["fsdp.units=root", "train.clip_norm=1"],
        &["mesh.dp_replicate=2", "fsdp.outer_strategy=optim"],
        &["compile.mode=blocks", "compile.fuse_projections=all"],
        &["precision.param_dtype=bf16", "precision.moments=bf16"],
        &["fsdp.optimizer_in_backward=true", "train.grad_norm=false"],
        &["fsdp.offload=[\"params\", \"grads\", \"optimizer\"]"],
        &["fsdp.frozen=[\"layers.*.mlp\"]"],
    ] {
        let p = program(set);
        let r = check(&p);
        assert!(r.is_ok(), "{set:?}\n{r}");
        let row = r.rules.iter().find(|x| x.id == RuleId::MuonMatrix).unwrap();
        assert!(row.checked > 0, "{set:?}");
    }
}

/// Under fsdp2, ranks gather the update of each matrix.
#[test]
fn programs_that_gather_matrices_pass() {
    for set in [
        &[][..],
        &["mesh.dp_shard=1"],
        // Ranks without rows of the smallest matrices, and a rank with fewer rows.
        &["mesh.dp_shard=48"],
        &["mesh.dp_replicate=2"],
        &["train.clip_norm=1", "train.grad_accum=2"],
        &["fsdp.strategy=optim_grads"],
        &["compile.mode=blocks"],
        &["precision.param_dtype=bf16", "precision.moments=bf16"],
        &["fsdp.frozen=[\"layers.*.mlp\"]"],
        &["fsdp.nan_check=true"],
    ] {
        let p = program(&[&["fsdp.policy=fsdp2"], set].concat());
        let r = check(&p);
        assert!(r.is_ok(), "{set:?}\n{r}");
        let row = r.rules.iter().find(|x| x.id == RuleId::MuonMatrix).unwrap();
        assert!(row.checked > 0, "{set:?}");
    }
}

/// Returns the launches of an operation, in order.
fn launches(p: &Program, is: impl Fn(ShardOp) -> bool) -> Vec<usize> {
    let all = 0..p.instrs.len();
    all.filter(|i| p.shard_op(&p.instrs[*i].op).is_some_and(&is))
        .collect()
}

fn first_violation(p: &Program) -> String {
    let r = check(p);
    let v = r.of(RuleId::MuonMatrix).next().expect("found");
    v.message.clone()
}

/// Gathers that are missing, ranges of other rows, and updates that get lost.
#[test]
fn wrong_rows_of_gathered_matrices_are_found() {
    let good = program(&["fsdp.policy=fsdp2"]);
    let nothing = Op::HostWork {
        kind: HostWorkKind::Hook,
        count: 0,
    };
    let found = |i: usize, message: &str| {
        let mut p = good.clone();
        p.instrs[i].op = nothing;
        let first = first_violation(&p);
        assert!(first.contains(message), "{first}");
    };
    let gather = good
        .instrs
        .iter()
        .position(|i| i.rule == Rule::MuonGather && matches!(i.op, Op::Collective { .. }));
    found(gather.unwrap(), "which has no update of a matrix");
    let orthogonalize = launches(&good, |op| matches!(op, ShardOp::Orthogonalize { .. }));
    found(orthogonalize[0], "which is not its orthogonalized update");
    let apply = launches(&good, |op| matches!(op, ShardOp::MuonApply { .. }));
    found(apply[0], "nothing has subtracted the update");

    // Every rank subtracts the rows of the first one.
    let mut p = good.clone();
    let Op::Launch { reads, .. } = p.instrs[apply[0]].op else {
        panic!("a launch");
    };
    p.accesses[reads as usize + 1].per_rank = None;
    let first = first_violation(&p);
    assert!(
        first.contains("expected the rows that each rank has"),
        "{first}"
    );

    // A gather over the replicas, which have the same rows.
    let mut p = program(&["fsdp.policy=fsdp2", "mesh.dp_replicate=4"]);
    let outer = p
        .communicators
        .iter()
        .position(|c| c.axes == AxisSet::of(AxisId::DP_OUTER));
    let outer = CommId(outer.unwrap() as u8);
    let gathers: Vec<usize> = p
        .instrs
        .iter()
        .filter_map(|i| match i.op {
            Op::Collective { id, .. } if i.rule == Rule::MuonGather => Some(id.index()),
            _ => None,
        })
        .collect();
    p.collectives[gathers[0]].comm = outer;
    let first = first_violation(&p);
    assert!(first.contains("which has no update of a matrix"), "{first}");
}

/// Each matrix of the model is orthogonalized on every rank once per step, from rows in bfloat16;
/// everything else has the states of AdamW.
#[test]
fn every_matrix_of_a_block_is_gathered_in_bfloat16() {
    let p = program(&["fsdp.policy=fsdp2"]);
    let hidden = |name: &str, shape: &[u64]| name.starts_with("layers.") && shape.len() == 2;
    let wanted: Vec<u64> = p
        .params
        .iter()
        .filter(|x| hidden(&x.name, &x.shape))
        .map(|x| 2 * x.numel())
        .collect();
    let mut gathered: Vec<u64> = p
        .section_instrs(p.section(SectionKind::Steady).unwrap())
        .iter()
        .filter_map(|i| match i.op {
            Op::Collective { id, .. } if i.rule == Rule::MuonGather => {
                Some(p.collectives[id.index()].bytes.0)
            }
            _ => None,
        })
        .collect();
    let mut wanted_sorted = wanted;
    wanted_sorted.sort_unstable();
    gathered.sort_unstable();
    assert_eq!(gathered, wanted_sorted);
    let states = |x: usize| {
        let of = p.buffers.iter();
        of.filter(|b| b.role == Role::OptimizerState && b.holds == Holds::Param(ParamId(x as u32)))
            .count()
    };
    for (i, x) in p.params.iter().enumerate() {
        let rows = hidden(&x.name, &x.shape);
        assert_eq!(states(i), if rows { 1 } else { 2 }, "{}", x.name);
    }
}

/// One momentum for each shard of matrices, two moments for everything else.
#[test]
fn matrices_of_blocks_have_one_state() {
    let p = program(&[]);
    let mut bytes = 0;
    for g in &p.groups {
        for x in &g.params {
            let param = &p.params[x.index()];
            let hidden = param.name.starts_with("layers.") && param.shape.len() == 2;
            assert_eq!(g.muon, hidden, "{}", param.name);
        }
        bytes += g.layout.shard_numel() * 4 * if g.muon { 1 } else { 2 };
    }
    let states = p
        .buffers
        .iter()
        .filter(|b| b.role == Role::OptimizerState && b.bytes.0 > 4);
    let kept = states.map(|b| b.bytes).sum::<Bytes>();
    assert_eq!(kept, Bytes(bytes));
}

/// Three matmuls of `short x short` and `short x long` in each of five iterations, for the rank
/// with the most of them.
#[test]
fn newton_schulz_has_the_flops_of_its_matmuls() {
    let p = program(&["mesh.dp_shard=1"]);
    let block: u64 = p
        .groups
        .iter()
        .filter(|g| g.muon)
        .map(|g| {
            let shapes = g.params.iter().map(|x| &p.params[x.index()].shape);
            shapes
                .map(|s| {
                    let (m, n) = (s[0].min(s[1]), s[0].max(s[1]));
                    5 * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)
                })
                .sum::<u64>()
        })
        .next()
        .unwrap();
    let kernels = p
        .kernels
        .iter()
        .filter_map(|k| Some((k, k.newton_schulz()?)));
    let (mut seen, elements) = (
        0,
        p.groups
            .iter()
            .find(|g| g.muon)
            .unwrap()
            .layout
            .payload_numel(),
    );
    for (kernel, of) in kernels {
        seen += 1;
        assert_eq!(of.flops, block);
        // llama-tiny: w1, w2 and w3 are 176 x 64.
        assert_eq!(of.largest, [64, 176]);
        assert_eq!(kernel.flops.0, block + 12 * elements);
        let workspace = crate::program::workspace::kernel_bytes(kernel, false);
        // Two whole matrices and two square matrices with two bytes per element, all multiples of
        // 256; sums of two blocks, and their total.
        let matrices = 2 * (2 * 64 * 176 + 2 * 64 * 64);
        assert_eq!(workspace, (32 << 20) + matrices + 256 + 256);
    }
    assert_eq!(seen, 1);
}

/// A parameter that crosses the boundary between the shards of two ranks.
#[test]
fn a_matrix_on_two_ranks_is_found() {
    let mut p = program(&[]);
    let g = p.groups.iter_mut().find(|g| g.muon).unwrap();
    let Layout::Flat(layout) = &mut g.layout else {
        panic!("flat");
    };
    let shard = layout.shard_numel();
    layout.items[0].offset = shard - layout.items[0].numel / 2;
    let r = check(&p);
    let v = r.of(RuleId::MuonMatrix).next().expect("found");
    assert!(
        v.message.contains("expected a whole matrix"),
        "{}",
        v.message
    );
    assert!(
        v.message
            .contains("of the 4096 elements of `layers.0.attention.q.weight`"),
        "{}",
        v.message
    );
}

/// A one-dimensional parameter cannot be orthogonalized.
#[test]
fn a_vector_is_found() {
    let mut p = program(&[]);
    let muon =
        |p: &Program, i: usize| matches!(p.shard_op(&p.instrs[i].op), Some(ShardOp::Muon { .. }));
    assert!((0..p.instrs.len()).any(|i| muon(&p, i)));
    let group = p.groups.iter().find(|g| g.muon).unwrap().params[0];
    let numel = p.params[group.index()].numel();
    p.params[group.index()].shape = crate::ir::strides::shape(&[numel]);
    let r = check(&p);
    let v = r.of(RuleId::MuonMatrix).next().expect("found");
    assert!(v.message.contains("[4096]"), "{}", v.message);
}
