//! Muon: programs with whole matrices pass, and matrices that a shard boundary divides are found.

use super::try_lower;
use crate::check::{RuleId, check};
use crate::ir::{Role, ShardOp};
use crate::program::Program;
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
