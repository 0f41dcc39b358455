//! Parameter groups of the optimizer in the shards of ranks.

use super::{LLAMA, program};
use crate::program::Program;

/// Returns the elements that all ranks update in each parameter group, with padding in group 0.
fn updated(p: &Program) -> Vec<u64> {
    let mut numel = vec![0; 3];
    for rank in 0..p.meta.mesh.world() {
        let steady = p.section(crate::program::SectionKind::Steady).unwrap();
        let runs = p.group_runs(rank).unwrap();
        let steady = runs.iter().filter(|(i, _)| steady.instrs.contains(&i.0));
        for run in steady.flat_map(|(_, runs)| runs) {
            numel[usize::from(run.group)] += run.numel;
        }
    }
    numel
}

/// Each element of a group is updated once, with the settings of its group, wherever shards end.
#[test]
fn shards_know_the_groups_of_their_parameters() {
    let groups = "train.param_groups=[{ params = [\"*norm*\"], weight_decay = 0.0 }, \
                  { params = [\"layers.1.*.w2\"], lr_scale = 0.5 }]";
    for policy in [
        &["fsdp.policy=native"][..],
        &["fsdp.policy=native", "fsdp.strategy=optim"],
        &["fsdp.policy=megatron"],
        &["fsdp.policy=fsdp2"],
        &["compile.mode=full"],
    ] {
        for ranks in ["mesh.dp_shard=1", "mesh.dp_shard=3", "mesh.dp_shard=4"] {
            let set = [policy, &[ranks, groups]].concat();
            let p = program(LLAMA, &set);
            let sum = |group: u8| -> u64 {
                let of = p.params.iter().filter(|x| x.group == group);
                of.map(crate::ir::Param::numel).sum()
            };
            let got = updated(&p);
            assert!(sum(1) > 0 && sum(2) > 0);
            assert_eq!(got[1..], [sum(1), sum(2)], "{set:?}");
            assert!(got[0] >= sum(0), "{set:?}");
        }
    }
    // Without parameter groups, the table is empty.
    assert!(program(LLAMA, &[]).group_runs(0).unwrap().is_empty());
}
