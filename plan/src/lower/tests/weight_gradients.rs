//! Weight gradients that GEMMs accumulate into the sums of earlier micro-batches.

use super::find::checked;
use super::steady;
use crate::ir::{Access, BufferId, KernelClass, OpKind, Role};
use crate::program::{Instr, Op, Phase, Program, Rule};

const SUMS: [&[&str]; 5] = [
    &["fsdp.gradient_sync=last"],
    &["fsdp.no_sync_units=[\"*\", \"*.*\"]"],
    &["fsdp.strategy=no_shard"],
    &["fsdp.strategy=optim"],
    &["train.joint_backward=true"],
];

fn native(sets: &[&str]) -> Program {
    let base = [
        "fsdp.policy=native",
        "compile.mode=blocks",
        "train.grad_accum=2",
    ];
    checked(&[&base, sets].concat())
}

/// Returns whether a buffer holds full gradients, or gradients kept between uses.
fn is_gradient(p: &Program, id: BufferId) -> bool {
    let role = p.buffers[id.index()].role;
    matches!(role, Role::FullGrad | Role::MainGrad)
}

/// Returns the GEMMs that write gradients, with the gradient ranges that they read and write.
fn gemms(p: &Program) -> Vec<(Instr, Vec<Access>, Access)> {
    let of = |i: &Instr| {
        let Op::Launch { kernel, .. } = i.op else {
            return None;
        };
        let kernel = &p.kernels[kernel.index()];
        let written = *p.writes(&i.op).first()?;
        let gemm = matches!(kernel.class, KernelClass::Gemm { .. });
        let gradients = |a: &&Access| is_gradient(p, a.buffer);
        (gemm && is_gradient(p, written.buffer)).then(|| {
            let reads = p.reads(&i.op).iter().filter(gradients).copied();
            (*i, reads.collect(), written)
        })
    };
    steady(p).iter().filter_map(of).collect()
}

/// Returns the number of elements that separate kernels add.
fn added_apart(p: &Program) -> u64 {
    let launches = steady(p).iter().filter(|i| i.rule == Rule::Accumulate);
    launches
        .map(|i| p.writes(&i.op).iter().map(|a| a.bytes).sum::<u64>())
        .sum()
}

/// In the first micro-batch, GEMMs write sums; later ones accumulate into them in place. No other
/// kernel adds these elements.
#[test]
fn gemms_add_to_the_sums_of_earlier_micro_batches() {
    for sets in SUMS {
        let p = native(sets);
        let apart = native(&[sets, &["compile.gemm_accumulate=false"]].concat());
        let all = gemms(&p);
        let (adding, fresh): (Vec<_>, Vec<_>) =
            all.iter().partition(|(_, reads, _)| !reads.is_empty());
        assert!(!adding.is_empty(), "{sets:?}");
        assert_eq!(adding.len(), fresh.len(), "{sets:?}");
        for (i, reads, written) in &adding {
            assert_eq!(reads[..], [*written], "{sets:?}");
            assert_eq!(i.phase, Phase::Backward);
            let Op::Launch { kernel, .. } = i.op else {
                unreachable!()
            };
            let body = &p.kernels[kernel.index()].body;
            assert!(matches!(body[0].op, OpKind::Gemm(g) if g.accumulate));
        }
        assert!(gemms(&apart).iter().all(|g| g.1.is_empty()), "{sets:?}");
        let within: u64 = adding.iter().map(|g| g.2.bytes).sum();
        assert_eq!(added_apart(&p) + within, added_apart(&apart), "{sets:?}");
        // The embedding remains: no GEMM computes its gradient.
        assert!(within > added_apart(&p), "{sets:?}");
    }
}

/// Nothing is accumulated if every micro-batch is reduced. A gradient with two uses is added as a
/// whole.
#[test]
fn other_gradients_are_added_apart() {
    let reduced = native(&[]);
    assert!(gemms(&reduced).iter().all(|g| g.1.is_empty()));
    let sets = ["fsdp.gradient_sync=last", "model.tie_embeddings=true"];
    let (tied, apart) = (native(&sets), native(&sets[..1]));
    let count = |p: &Program| gemms(p).iter().filter(|g| !g.1.is_empty()).count();
    assert_eq!(count(&tied) + 1, count(&apart));
}
