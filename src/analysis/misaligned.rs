//! Collectives that are slower because their payload per rank is not aligned.

use crate::predict::Prediction;
use shardlab_plan::Program;
use shardlab_plan::config::Reshard;
use shardlab_plan::ir::{Collective, CollectiveKind};
use shardlab_plan::program::Op;
use shardlab_plan::units::Picos;
use shardlab_sim::misalignment;
use std::collections::BTreeMap;

/// Number of other meshes over the same ranks that are planned in search of an aligned one.
const TRIED: usize = 4;

/// Collectives of the recorded step whose payloads are misaligned.
pub(super) struct Misaligned {
    /// Time on the wire that misalignment adds.
    pub(super) lost: Picos,
    /// Misaligned launches and all launches, for each kind that has misaligned ones.
    counts: BTreeMap<CollectiveKind, (u32, u32)>,
    /// Factor by which the slowest misaligned collective is slower than an aligned one.
    factor: f64,
}

impl Misaligned {
    pub(super) fn of(p: &Prediction) -> Self {
        let losses = misalignment(&p.program, &p.profile);
        let mut found = Self {
            lost: Picos::ZERO,
            counts: BTreeMap::new(),
            factor: 1.0,
        };
        for span in &p.run.spans {
            let Op::Collective { id, .. } = p.program.instrs[span.instr.index()].op else {
                continue;
            };
            let collective = &p.program.collectives[id.index()];
            let (of, all) = found.counts.entry(collective.kind).or_default();
            *all += 1;
            if is_misaligned(&p.program, collective) {
                *of += 1;
                let lost = losses[id.index()];
                let aligned = span.alone.saturating_sub(lost);
                found.lost += lost;
                found.factor = (span.alone.0 as f64 / aligned.0.max(1) as f64).max(found.factor);
            }
        }
        found.counts.retain(|_, (of, _)| *of > 0);
        found
    }

    /// Returns the warning as a sentence. `mesh` is the mesh that aligns the payloads, if there is
    /// one.
    pub(super) fn sentence(&self, mesh: Option<AlignedMesh>) -> String {
        let counts: Vec<String> = self
            .counts
            .iter()
            .map(|(kind, (of, all))| format!("{of} of {all} {}s", kind.name()))
            .collect();
        let aligned = mesh.map(|mesh| {
            let which = if mesh.all { "them" } else { "most of them" };
            format!(
                " On the same ranks, dp_shard = {} with dp_replicate = {} aligns {which}.",
                mesh.shard, mesh.outer
            )
        });
        format!(
            "Misaligned collectives: the payload per rank of {} is not a multiple of {} bytes, which makes them up to {:.1} times slower and adds {} on the wire.{}",
            counts.join(" and "),
            Collective::ALIGNMENT,
            self.factor,
            self.lost,
            aligned.unwrap_or_default()
        )
    }
}

/// Returns the largest `dp_shard` below the scenario's that aligns nine tenths of the misaligned
/// payload on the same ranks. Only the first few candidates are tried.
pub(super) fn aligned_mesh(p: &Prediction) -> Option<AlignedMesh> {
    let scenario = &p.scenario;
    // Another mesh may not be divisible into groups of a fixed size.
    let groups = matches!(scenario.fsdp.reshard_after_forward, Reshard::Group(_));
    if groups || scenario.mesh.ep > 1 {
        return None;
    }
    let (world, now) = (scenario.mesh.data_ranks(), misaligned_bytes(&p.program));
    let smaller = (2..scenario.mesh.dp_shard).rev();
    smaller
        .filter(|shard| world.is_multiple_of(*shard))
        .take(TRIED)
        .find_map(|shard| {
            let mut tried = scenario.clone();
            (tried.mesh.dp_shard, tried.mesh.dp_outer) = (shard, world / shard);
            let left = misaligned_bytes(&shardlab_plan::plan(&tried).ok()?);
            (left <= now / 10).then_some(AlignedMesh {
                shard,
                outer: world / shard,
                all: left == 0,
            })
        })
}

/// A mesh over the same ranks with aligned payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AlignedMesh {
    shard: u32,
    outer: u32,
    /// Whether it aligns all payloads.
    all: bool,
}

impl AlignedMesh {
    /// Returns the mesh as overrides for `--set`.
    pub(super) fn overrides(self) -> Vec<String> {
        vec![
            format!("mesh.dp_shard={}", self.shard),
            format!("mesh.dp_replicate={}", self.outer),
        ]
    }
}

fn is_misaligned(program: &Program, collective: &Collective) -> bool {
    let ranks = program.communicators[collective.comm.index()].ranks.size;
    ranks > 1 && collective.misaligned(ranks)
}

/// Returns the payload of misaligned collectives, bytes.
fn misaligned_bytes(program: &Program) -> u64 {
    let all = program.collectives.iter();
    all.filter(|c| is_misaligned(program, c))
        .map(|c| c.bytes.0)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{Profiles, predict};
    use shardlab_plan::record::Span;
    use shardlab_sim::Options;

    /// Returns two blocks of a 13 B model. With 512 ranks, each rank holds 10 of the 5,120 elements
    /// of a norm and 619,540 of a block. That is 1,239,080 bytes in bf16, 8 more than a multiple of
    /// 16. Gradients are reduced in float32: 2,478,160 bytes, a multiple of 16. The root's 645,130
    /// elements are misaligned in both types.
    fn block(ranks: u32) -> Prediction {
        let text = format!(
            "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 5120\nheads = 40\nffn = 13824\nvocab = 32000\n\
             [train]\nseq_len = 4096\n[mesh]\nhardware = \"h100-80\"\ndp_shard = {ranks}\n[fsdp]\npolicy = \"fsdp2\"\n"
        );
        let scenario = shardlab_plan::scenario::parse("t", &text, &[]).unwrap();
        predict(&scenario, &Profiles::default(), &Options::default()).unwrap()
    }

    #[test]
    fn misaligned_collectives_are_named_with_their_cost() {
        let p = block(512);
        let found = Misaligned::of(&p);
        let gathers = p.run.collectives[&CollectiveKind::AllGather].count;
        assert_eq!(
            found.counts,
            BTreeMap::from([
                (CollectiveKind::AllGather, (gathers, gathers)),
                (CollectiveKind::ReduceScatter, (1, 3)),
            ])
        );
        // The cards of a node carry 340 GB/s. NVLink's 369 GB/s are divided by 1.6 for the gathers,
        // and by 1.15 for one reduction, which is the largest.
        let bytes = |s: &Span, kind| match p.program.instrs[s.instr.index()].op {
            Op::Collective { id, .. } => {
                let c = &p.program.collectives[id.index()];
                (c.kind == kind).then_some(c.bytes.0 as f64)
            }
            _ => None,
        };
        let of = |kind| p.run.spans.iter().filter_map(move |s| bytes(s, kind));
        let gathers_bytes: f64 = of(CollectiveKind::AllGather).sum();
        let root_bytes = of(CollectiveKind::ReduceScatter).fold(0.0, f64::max);
        let ms = |bytes: f64, gbps: f64| 511.0 / 512.0 * bytes / gbps / 1e6;
        let slower = |bytes, factor: f64| ms(bytes, 369.0 / factor) - ms(bytes, 340.0);
        let expected = slower(gathers_bytes, 1.6) + slower(root_bytes, 1.15);
        let lost = found.lost.ms();
        assert!((lost / expected - 1.0).abs() < 1e-3, "{lost} {expected}");
        // With 256 ranks, each rank holds 20 elements (40 bytes) of the root's norm, which is not
        // aligned. With 128 ranks it holds 80 bytes, and all other payloads are whole rows.
        let sentence = found.sentence(aligned_mesh(&p));
        assert!(
            sentence.contains(&format!(
                "{gathers} of {gathers} all_gathers and 1 of 3 reduce_scatters"
            )),
            "{sentence}"
        );
        assert!(
            sentence.ends_with("dp_shard = 128 with dp_replicate = 4 aligns them."),
            "{sentence}"
        );
    }

    #[test]
    fn aligned_collectives_lose_nothing() {
        assert_eq!(Misaligned::of(&block(128)).lost, Picos::ZERO);
    }
}
