//! Divides collectives by the purpose of their process groups: data parallelism, which a scenario
//! describes, and all others.

use super::count::One;
use super::{Facts, Found};
use crate::attribute::Work;
use crate::kineto::Collective;
use shardlab_plan::program::Phase;
use std::collections::{BTreeMap, BTreeSet};

/// Words in the descriptions of groups that shard or replicate parameters. They take precedence:
/// torchtitan's `mesh_dp_shard_cp` shards parameters.
const DATA: [&str; 8] = [
    "dp",
    "data",
    "fsdp",
    "hsdp",
    "ddp",
    "shard",
    "replicate",
    "edp",
];
/// Words in the descriptions of other groups, with the purpose of these groups.
const OTHERS: [(&[&str], &str); 5] = [
    (&["tp", "tensor"], "tensor parallelism"),
    (&["cp", "context"], "context parallelism"),
    (&["sp", "sequence", "ulysses"], "sequence parallelism"),
    (&["pp", "pipe", "pipeline"], "pipeline parallelism"),
    (&["ep", "etp", "expert"], "expert parallelism"),
];

/// Returns the purpose of a group if its description, such as `mesh_tp` or
/// `TENSOR_MODEL_PARALLEL_GROUP`, names something other than data parallelism.
fn purpose(about: &str) -> Option<&'static str> {
    let lower = about.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let has = |list: &[&str]| words.iter().any(|w| list.contains(w));
    if has(&DATA) {
        return None;
    }
    OTHERS
        .into_iter()
        .find_map(|(list, name)| has(list).then_some(name))
}

/// Returns what distinguishes a group from others.
fn key(c: &Collective) -> (&str, &str) {
    (&c.group, &c.ranks)
}

/// Divides collectives into those of data parallelism and all others.
pub(super) fn divide(all: Vec<One<'_>>) -> (Vec<One<'_>>, Vec<One<'_>>) {
    let (data, mut others): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|c| c.described.is_none_or(|d| purpose(&d.about).is_none()));
    let scattered = Scattered::new(&data);
    let is_kept = |c: &One<'_>| c.work != Work::AllReduce || scattered.allows(c);
    let (kept, rest): (Vec<_>, Vec<_>) = data.into_iter().partition(is_kept);
    others.extend(rest);
    (kept, others)
}

/// The outputs of the step's reduce-scatters. HSDP all-reduces them over the replicas.
struct Scattered<'a> {
    any: bool,
    sizes: BTreeSet<u64>,
    groups: BTreeSet<(&'a str, &'a str)>,
}

impl<'a> Scattered<'a> {
    fn new(data: &[One<'a>]) -> Self {
        let of = |c: &&One<'a>| c.work == Work::ReduceScatter;
        let described = data.iter().filter(of).filter_map(|c| c.described);
        Self {
            any: data.iter().any(|c| of(&c)),
            sizes: described.clone().map(|d| d.elements_out).collect(),
            groups: described.map(key).collect(),
        }
    }

    /// Returns whether an all-reduce in forward or backward reduces gradients. Losses, metrics and
    /// the layers of tensor parallelism are all-reduced, too. All-reduces outside of the passes,
    /// such as those of the gradient norm, have a phase of their own.
    fn allows(&self, c: &One<'_>) -> bool {
        match c.phase {
            Phase::Forward | Phase::Start => return false,
            Phase::Backward | Phase::Recompute => {}
            _ => return true,
        }
        let Some(d) = c.described else {
            return true;
        };
        if self.any && d.elements_in > 0 {
            return self.sizes.contains(&d.elements_in) && !self.groups.contains(&key(d));
        }
        d.elements_in != 1
    }
}

/// Adds facts about the groups of a trace that the mesh of a scenario does not express.
pub(super) fn gaps(others: &[One<'_>], facts: &mut Facts) {
    let mut by_group: BTreeMap<(&str, u32), BTreeMap<Work, u32>> = BTreeMap::new();
    // Single numbers are losses and metrics.
    let large = |d: &&Collective| d.elements_in.max(d.elements_out) > 1;
    for c in others {
        if let Some(d) = c.described.filter(large) {
            let name = match d.about.as_str() {
                "" => d.group.as_str(),
                about => about,
            };
            let of = by_group.entry((name, d.group_size)).or_default();
            *of.entry(c.work).or_default() += 1;
        }
    }
    for ((name, size), counts) in &by_group {
        let counts: Vec<String> = counts
            .iter()
            .map(|(work, n)| match work {
                Work::AllGather => format!("{n} all-gathers"),
                Work::ReduceScatter => format!("{n} reduce-scatters"),
                Work::AllReduce => format!("{n} all-reduces"),
                _ => format!("{n} other collectives"),
            })
            .collect();
        let counts = counts.join(", ");
        facts.mesh_gaps.push(match purpose(name) {
            Some(what) => format!(
                "mesh: {what} over {size} ranks (group {name}: {counts} per step): the scenario lacks it, and sizes of the model are those of one rank"
            ),
            None => format!(
                "mesh: the purpose of group {name} ({size} ranks, {counts} per step): its collectives are not those of parameters or gradients"
            ),
        });
    }
    let size = |f: &Option<Found<u32>>| f.as_ref().map_or(1, |f| f.value);
    let (Some(shard), Some(world)) = (&facts.dp_shard, &facts.world_size) else {
        return;
    };
    let (inner, outer) = (shard.value, size(&facts.dp_outer));
    if inner.checked_mul(outer) != Some(world.value) {
        facts.mesh_gaps.push(format!(
            "mesh: dp_shard {inner} x dp_replicate {outer} are {} of the job's {} ranks ({})",
            u64::from(inner) * u64::from(outer),
            world.value,
            world.because
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of torchtitan, of Megatron-LM, and of PyTorch for meshes without names.
    #[test]
    fn descriptions_name_the_purpose() {
        for (about, expected) in [
            ("mesh_tp", Some("tensor parallelism")),
            ("TENSOR_MODEL_PARALLEL_GROUP", Some("tensor parallelism")),
            ("mesh_cp", Some("context parallelism")),
            ("mesh_pp", Some("pipeline parallelism")),
            ("mesh_ep", Some("expert parallelism")),
            ("mesh_dp_shard", None),
            ("mesh_dp_shard_cp", None),
            ("DATA_PARALLEL_GROUP_WITH_CP", None),
            ("EXPERT_DATA_PARALLEL_GROUP", None),
            ("default_pg", None),
            ("mesh_dim_1", None),
            ("", None),
        ] {
            assert_eq!(purpose(about), expected, "{about}");
        }
    }

    fn described(about: &str, ranks: &str, elements: [u64; 2]) -> Collective {
        Collective {
            name: String::new(),
            elements_in: elements[0],
            elements_out: elements[1],
            group_size: 2,
            dtype: "Float".into(),
            group: about.into(),
            about: about.into(),
            ranks: ranks.into(),
        }
    }

    fn one(work: Work, phase: Phase, described: &Collective) -> One<'_> {
        One {
            work,
            unit: 1,
            phase,
            micro_batch: 0,
            described: Some(described),
        }
    }

    #[test]
    fn only_reductions_of_scattered_gradients_count() {
        let scatter = described("default_pg", "[0, 1]", [128, 64]);
        let replicas = described("mesh_dim_0", "[0, 2]", [64, 64]);
        let loss = described("default_pg", "[0, 1]", [1, 1]);
        let other = described("mesh_dim_2", "[0, 4]", [100, 100]);
        let tensor = described("mesh_tp", "[0, 4]", [64, 64]);
        let all = vec![
            one(Work::ReduceScatter, Phase::Backward, &scatter),
            one(Work::AllReduce, Phase::Backward, &replicas),
            one(Work::AllReduce, Phase::Backward, &loss),
            one(Work::AllReduce, Phase::Forward, &replicas),
            one(Work::AllReduce, Phase::Backward, &other),
            one(Work::AllReduce, Phase::Backward, &tensor),
            one(Work::AllGather, Phase::Forward, &tensor),
        ];
        let (data, others) = divide(all);
        let kinds: Vec<Work> = data.iter().map(|c| c.work).collect();
        assert_eq!(kinds, [Work::ReduceScatter, Work::AllReduce]);
        assert_eq!(data[1].described, Some(&replicas));
        assert_eq!(others.len(), 5);
        let mut facts = Facts {
            dp_shard: Some(Found::new(2, "")),
            dp_outer: Some(Found::new(2, "")),
            world_size: Some(Found::new(8, "said so")),
            ..Facts::default()
        };
        gaps(&others, &mut facts);
        let text = facts.mesh_gaps.join("\n");
        assert!(text.contains("tensor parallelism over 2 ranks"), "{text}");
        assert!(text.contains("purpose of group mesh_dim_2"), "{text}");
        assert!(text.contains("are 4 of the job's 8 ranks"), "{text}");
        // The loss is one number, and of no interest.
        assert!(!text.contains("default_pg"), "{text}");
    }

    /// Without reduce-scatters, gradients are all-reduced (DDP).
    #[test]
    fn all_reduces_in_backward_are_those_of_ddp() {
        let bucket = described("default_pg", "[0, 1]", [1000, 1000]);
        let loss = described("default_pg", "[0, 1]", [1, 1]);
        let all = vec![
            one(Work::AllReduce, Phase::Forward, &bucket),
            one(Work::AllReduce, Phase::Backward, &bucket),
            one(Work::AllReduce, Phase::Backward, &loss),
            one(Work::AllReduce, Phase::Clip, &loss),
        ];
        let (data, others) = divide(all);
        assert_eq!((data.len(), others.len()), (2, 2));
    }
}
