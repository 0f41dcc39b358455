//! Arrows from each collective to the first work that waited for it.

use shardlab_plan::Program;
use shardlab_plan::ir::{EventId, InstrId, StreamId};
use shardlab_plan::program::Op;
use shardlab_plan::record::Span;
use std::collections::{BTreeMap, BTreeSet};

/// An arrow between two spans, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) from: usize,
    pub(super) to: usize,
}

/// Returns the arrows of the recorded section, in the order of their consumers.
///
/// Dependencies are followed through event records and waits in issue order. If a wait passes
/// through a stream that has no work, its arrow ends at the work that it delayed.
pub(super) fn flows(program: &Program, spans: &[Span]) -> Vec<Flow> {
    let by_instr: BTreeMap<InstrId, usize> = spans
        .iter()
        .enumerate()
        .map(|(i, s)| (s.instr, i))
        .collect();
    let (Some((first, _)), Some((last, _))) =
        (by_instr.first_key_value(), by_instr.last_key_value())
    else {
        return Vec::new();
    };
    let mut fronts: BTreeMap<StreamId, BTreeSet<usize>> = BTreeMap::new();
    let mut events: BTreeMap<EventId, BTreeSet<usize>> = BTreeMap::new();
    let mut host: BTreeSet<usize> = BTreeSet::new();
    let mut drawn = vec![false; spans.len()];
    let mut flows = Vec::new();
    let section = program
        .sections
        .iter()
        .find(|s| s.instrs.contains(&first.0))
        .map_or(first.0..last.0 + 1, |s| s.instrs.clone());
    for i in section {
        match program.instrs[i as usize].op {
            Op::Record { event, stream } => {
                events.insert(event, fronts.get(&stream).cloned().unwrap_or_default());
            }
            Op::Wait { event, stream } => {
                let awaited = events.get(&event).cloned().unwrap_or_default();
                fronts.entry(stream).or_default().extend(awaited);
            }
            Op::HostWait(event) => host.extend(events.get(&event).cloned().unwrap_or_default()),
            Op::Launch { stream, .. } | Op::Collective { stream, .. } | Op::Copy { stream, .. } => {
                let Some(&to) = by_instr.get(&InstrId(i)) else {
                    continue;
                };
                let front = fronts.entry(stream).or_default();
                for from in std::mem::take(front)
                    .into_iter()
                    .chain(std::mem::take(&mut host))
                {
                    let producer = &spans[from];
                    let is_collective = matches!(
                        program.instrs[producer.instr.index()].op,
                        Op::Collective { .. }
                    );
                    if is_collective && producer.stream != stream && !drawn[from] {
                        drawn[from] = true;
                        flows.push(Flow { from, to });
                    }
                }
                front.insert(to);
            }
            _ => {}
        }
    }
    flows
}
