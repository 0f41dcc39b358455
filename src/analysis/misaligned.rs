//! Collectives that take several times as long because ranks' payloads are not aligned.

use crate::predict::Prediction;
use shardlab_plan::Program;
use shardlab_plan::program::{Collective, CollectiveKind, Op};
use shardlab_plan::scenario::Reshard;
use shardlab_plan::units::Picos;
use std::collections::BTreeMap;

/// Meshes of the same ranks that are planned in search of one that aligns.
const TRIED: usize = 4;

/// Collectives of the recorded step whose payloads are misaligned.
pub(super) struct Misaligned {
    /// Time that they take longer for it on the wire.
    pub(super) lost: Picos,
    /// By kind with misaligned ones: those, and all launches.
    counts: BTreeMap<CollectiveKind, (u32, u32)>,
    factor: f64,
}

impl Misaligned {
    pub(super) fn of(p: &Prediction) -> Self {
        let factor = p.profile.network.misaligned_factor;
        let mut found = Self {
            lost: Picos::ZERO,
            counts: BTreeMap::new(),
            factor,
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
                found.lost += span
                    .alone
                    .saturating_sub(Picos((span.alone.0 as f64 / factor) as u64));
            }
        }
        found.counts.retain(|_, (of, _)| *of > 0);
        found
    }

    /// What there is to say about them.
    pub(super) fn sentence(&self, p: &Prediction) -> String {
        let counts: Vec<String> = self
            .counts
            .iter()
            .map(|(kind, (of, all))| format!("{of} of {all} {}s", kind.name()))
            .collect();
        let aligned = aligned_mesh(p)
            .map(|(shard, outer, whole)| {
                let which = if whole { "them" } else { "most of them" };
                format!(
                    " On as many ranks dp_shard = {shard} with dp_outer = {outer} would align {which}."
                )
            })
            .unwrap_or_default();
        format!(
            "Misaligned: {} have a payload a rank that is no multiple of {} bytes, and take {} times as long for it, {} more on the wire.{aligned}",
            counts.join(" and "),
            Collective::ALIGNMENT,
            self.factor,
            self.lost,
        )
    }
}

fn is_misaligned(program: &Program, collective: &Collective) -> bool {
    let ranks = program.communicators[collective.comm.index()].size;
    ranks > 1 && collective.misaligned(ranks)
}

/// Payload of misaligned collectives, bytes.
fn misaligned_bytes(program: &Program) -> u64 {
    let all = program.collectives.iter();
    all.filter(|c| is_misaligned(program, c))
        .map(|c| c.bytes.0)
        .sum()
}

/// The largest `dp_shard` below the scenario's, and its `dp_outer`, with which the same ranks align nine tenths of what they do not now, and
/// whether they align all; if one of the first few does.
fn aligned_mesh(p: &Prediction) -> Option<(u32, u32, bool)> {
    let scenario = &p.scenario;
    // Groups of a fixed size may not divide another mesh.
    if matches!(scenario.fsdp.reshard_after_forward, Reshard::Group(_)) {
        return None;
    }
    let (world, now) = (scenario.mesh.world(), misaligned_bytes(&p.program));
    let smaller = (2..scenario.mesh.dp_shard).rev();
    smaller
        .filter(|shard| world.is_multiple_of(*shard))
        .take(TRIED)
        .find_map(|shard| {
            let mut tried = scenario.clone();
            (tried.mesh.dp_shard, tried.mesh.dp_outer) = (shard, world / shard);
            let left = misaligned_bytes(&shardlab_plan::plan(&tried).ok()?);
            (left <= now / 10).then_some((shard, world / shard, left == 0))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{Profiles, predict};
    use shardlab_plan::record::Span;
    use shardlab_sim::Options;

    /// Two blocks of a 13 B model. Among 512 ranks 10 elements each of the norms' 5,120 are a rank's, and 619,540 of a block: 1,239,080 bytes in
    /// bf16, 8 too many; in float32, as gradients are reduced, 2,478,160, a multiple of 16. The root's 645,130 elements are misaligned in both.
    fn block(ranks: u32) -> Prediction {
        let text = format!(
            "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 5120\nheads = 40\nffn = 13824\nvocab = 32000\n\
             [train]\nseq_len = 4096\n[mesh]\nhardware = \"h100-80\"\ndp_shard = {ranks}\n[fsdp]\npolicy = \"fsdp2\"\n"
        );
        let scenario = shardlab_plan::scenario::parse("t", &text, &[]).unwrap();
        predict(&scenario, &Profiles::default(), &Options::default()).unwrap()
    }

    #[test]
    fn misaligned_collectives_are_told_with_what_they_cost() {
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
        // What three times as long adds is two thirds of the gathers' time and of one reduction's.
        let of = |s: &Span, kind| matches!(p.program.instrs[s.instr.index()].op, Op::Collective { id, .. } if p.program.collectives[id.index()].kind == kind);
        let alone = |kind| -> Vec<f64> {
            let spans = p.run.spans.iter().filter(|s| of(s, kind));
            spans.map(|s| s.alone.ms()).collect()
        };
        let all: f64 = alone(CollectiveKind::AllGather).iter().sum();
        let root = alone(CollectiveKind::ReduceScatter)
            .into_iter()
            .fold(0.0, f64::max);
        let lost = found.lost.ms();
        assert!(
            (lost - 2.0 / 3.0 * (all + root)).abs() < 1e-6,
            "{lost} of {all} and {root}"
        );
        // Among 256 ranks the root's one norm leaves 20 elements, 40 bytes, too many; among 128 it is 80 bytes, and all others are whole rows.
        let sentence = found.sentence(&p);
        assert!(
            sentence.contains(&format!(
                "{gathers} of {gathers} all_gathers and 1 of 3 reduce_scatters"
            )),
            "{sentence}"
        );
        assert!(
            sentence.ends_with("dp_shard = 128 with dp_outer = 4 would align them."),
            "{sentence}"
        );
    }

    #[test]
    fn aligned_collectives_lose_nothing() {
        assert_eq!(Misaligned::of(&block(128)).lost, Picos::ZERO);
    }
}
