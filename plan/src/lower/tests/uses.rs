//! Units that a pass uses several times.

use super::{collective, scenario, steady};
use crate::check::check;
use crate::ir::CollectiveKind;
use crate::plan;
use crate::program::{Op, Phase, Program, Rule};

/// Llama 3.2 Vision reads the tile tables before the tower's blocks, between their two stages, and
/// after them.
const TILES: &str = concat!(
    "[model]\npreset = \"",
    env!("CARGO_MANIFEST_DIR"),
    "/../tests/data/configs/tiny--mllama.json\"\n\
     [train]\nseq_len = 32\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n"
);
const POLICIES: [&str; 4] = ["native", "fsdp2", "megatron", "megatron_v2"];

fn tiles(policy: &str, sets: &[&str]) -> Program {
    let policy = format!("fsdp.policy={policy}");
    let units = "fsdp.units=[\"layers.*\", \"vision.layers.*\", \"vision.tiles\"]";
    let sets = [&[policy.as_str(), units], sets].concat();
    let p = plan(&scenario(TILES, &sets)).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
    let report = check(&p);
    assert!(report.is_ok(), "{sets:?}\n{report}");
    p
}

/// Counts instructions of the unit with the tile tables in the steady step.
fn count(p: &Program, is: impl Fn(&crate::program::Instr) -> bool) -> usize {
    let of = |i: &&crate::program::Instr| p.units[i.unit.index()].name == "vision.tiles";
    steady(p).iter().filter(of).filter(|i| is(i)).count()
}

/// Weights are gathered for every use in forward and backward; one reduction has all gradients.
#[test]
fn a_unit_is_gathered_for_each_use_and_reduced_once() {
    for policy in ["native", "fsdp2"] {
        let p = tiles(policy, &[]);
        let gathers = |phase| {
            let gather = Some(CollectiveKind::AllGather);
            count(&p, |i| i.phase == phase && collective(&p, i) == gather)
        };
        let frees = |phase| {
            count(&p, |i| {
                let free = matches!(i.op, Op::Free(_));
                free && i.phase == phase && i.rule == Rule::Reshard
            })
        };
        let (f, b) = (Phase::Forward, Phase::Backward);
        assert!(gathers(f) > 1 && gathers(b) > 1, "{policy}");
        assert!(frees(f) > 1 && frees(b) > 1, "{policy}");
        let reduce = Some(CollectiveKind::ReduceScatter);
        assert_eq!(count(&p, |i| collective(&p, i) == reduce), 1, "{policy}");
    }
}

/// The unit after the current use is prefetched, not the one after the first use.
#[test]
fn what_follows_a_use_is_gathered_ahead() {
    let p = tiles("native", &["fsdp.prefetch_forward=1"]);
    let ahead: Vec<&str> = steady(&p)
        .iter()
        .filter(|i| i.phase == Phase::Forward && i.rule == Rule::Prefetch)
        .filter(|i| collective(&p, i) == Some(CollectiveKind::AllGather))
        .map(|i| p.units[i.unit.index()].name.as_str())
        .collect();
    for block in ["vision.layers.0", "layers.0"] {
        let times = ahead.iter().filter(|u| **u == block).count();
        assert_eq!(times, 1, "{block} in {ahead:?}");
    }
}

#[test]
fn programs_that_use_a_unit_several_times_are_proven() {
    for policy in POLICIES {
        for set in ["train.recompute=full", "train.grad_accum=2"] {
            tiles(policy, &[set]);
        }
    }
    for policy in ["native", "fsdp2"] {
        for set in [
            "fsdp.reshard_after_forward=false",
            "fsdp.reshard_after_forward=2",
            "fsdp.prefetch_forward=2",
        ] {
            tiles(policy, &[set]);
        }
        for set in [
            "train.joint_backward=true",
            "fsdp.reshard_after_backward=false",
        ] {
            tiles(policy, &["train.grad_accum=2", set]);
        }
    }
}

/// The class token is a parameter of the tower's code, not a module with a forward.
#[test]
fn a_unit_that_no_forward_enters_is_refused() {
    for policy in POLICIES {
        let policy = format!("fsdp.policy={policy}");
        let sets = [
            policy.as_str(),
            "fsdp.units=[\"layers.*\", \"vision.tiles.class\"]",
        ];
        let e = plan(&scenario(TILES, &sets)).unwrap_err().to_string();
        assert_eq!(
            e,
            "unit `vision.tiles.class`: `vision.tiles.class` has no forward of its own in which it could be \
             gathered, since `vision.tiles` reads its parameters; leave it out of fsdp.units"
        );
    }
}
