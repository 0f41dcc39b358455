//! Streams of collectives.

use super::*;

fn priority(p: &Program, kind: StreamKind) -> i8 {
    let mut streams = p.streams.iter().filter(|s| s.kind == kind);
    streams
        .next()
        .unwrap_or_else(|| panic!("{kind:?}"))
        .priority
}

/// Gradients on copy engines have the priority of computation, unless matmuls of experts would hold
/// the SMs that their local part needs.
#[test]
fn exchanges_on_copy_engines_wait_for_computation_without_experts() {
    let load = |name: &str, more: &[&str]| {
        let sets = ["fsdp.policy=native", "mesh.dp_shard=2", "mesh.dp_outer=1"];
        let sets: Vec<String> = sets.iter().chain(more).map(|s| (*s).to_owned()).collect();
        plan(&crate::scenario::load(name.as_ref(), &sets).unwrap()).unwrap()
    };
    let engines = "fsdp.copy_engine_reduce_scatter=true";
    for (name, more, wanted) in [
        ("small-native", &[][..], -1),
        ("small-native", &[engines], 0),
        ("small-moe", &[], -1),
        ("small-moe", &[engines], -1),
        ("peers-mixtral-4l", &[engines], -1),
    ] {
        let p = load(name, more);
        assert_eq!(
            priority(&p, StreamKind::ReduceScatter),
            wanted,
            "{name} {more:?}"
        );
        assert_eq!(priority(&p, StreamKind::AllGather), -1, "{name} {more:?}");
    }
}
