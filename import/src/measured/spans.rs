//! Device work of one step as spans, in issue order.

use super::{Instr, Pure, StepTime, bytes_of, names};
use crate::attribute::{Attributed, Placed, Work, launch_of};
use crate::kineto::{DeviceKind, Trace};
use crate::names::Names;
use shardlab_plan::ir::{InstrId, StreamId, UnitId};
use shardlab_plan::program::Phase;
use shardlab_plan::record::{Blocker, Span};
use shardlab_plan::units::Picos;
use std::collections::{BTreeMap, BTreeSet};

/// Start-up latency of ready work, nanoseconds. Shorter waits have no cause.
const LATENCY: i64 = 6_000;
/// Minimum delay of another rank that counts as a wait for it, nanoseconds.
const RANK_WAIT: i64 = 20_000;

pub(super) struct Parts<'a> {
    pub(super) trace: &'a Trace,
    pub(super) attributed: &'a Attributed,
    pub(super) origin: i64,
    pub(super) pure: &'a BTreeMap<u32, Pure>,
}

/// What a span waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waits {
    /// Before its start.
    pub(super) start: Blocker,
    /// When the last rank joined it, if it waited for one after its start. The blocker of the span
    /// is then that rank.
    pub(super) joined: Option<Picos>,
}

/// The spans of a step.
pub(super) struct Built {
    pub(super) spans: Vec<Span>,
    /// What each span waited for.
    pub(super) waits: Vec<Waits>,
    /// The instruction of each span.
    pub(super) instrs: Vec<Instr>,
    /// Names of streams.
    pub(super) streams: Vec<String>,
}

/// Returns the spans of a step.
pub(super) fn build(p: &Parts<'_>, shown: Option<StepTime>, table: &mut Names) -> Built {
    let (trace, a) = (p.trace, p.attributed);
    let Some(shown) = shown else {
        return Built {
            spans: Vec::new(),
            waits: Vec::new(),
            instrs: Vec::new(),
            streams: vec!["compute".into()],
        };
    };
    let issued =
        |w: &Placed| launch_of(trace, w).map_or(trace.device[w.device as usize].start, |l| l.start);
    let mut work: Vec<&Placed> = a
        .work
        .iter()
        .filter(|w| w.place.step == shown.step)
        .collect();
    work.sort_by_key(|w| (issued(w), trace.device[w.device as usize].start));
    let streams = streams(trace, &work);
    let main = main_kernels(trace, &work);
    let mut spans: Vec<Span> = Vec::with_capacity(work.len());
    let mut waits = Vec::with_capacity(work.len());
    let mut instrs = Vec::with_capacity(work.len());
    // The last span of each stream, by issue order.
    let mut last: BTreeMap<u8, u32> = BTreeMap::new();
    // Ends of spans with their indices, to find the span that a start followed.
    let mut ends: Vec<(i64, u32)> = work
        .iter()
        .enumerate()
        .map(|(i, w)| (trace.device[w.device as usize].end, i as u32))
        .collect();
    ends.sort_unstable();
    for (i, w) in work.iter().enumerate() {
        let event = &trace.device[w.device as usize];
        let stream = StreamId(streams.index(event.device, event.stream));
        let id = InstrId(i as u32);
        let at = issued(w);
        let before = last.insert(stream.0, i as u32);
        let pure = p.pure.get(&w.device);
        let ready = before
            .map_or(at, |b| {
                at.max(trace.device[work[b as usize].device as usize].end)
            })
            .min(event.start);
        let ps = |t: i64| Picos((t - p.origin).max(0).cast_unsigned() * 1000);
        let alone = pure.map_or(event.end - event.start, |p| p.alone);
        let waited = pure.map(|p| p.waited).filter(|&w| w > RANK_WAIT);
        let start = blocker(p, &work, &ends, before, at, i);
        waits.push(Waits {
            start,
            joined: waited.map(|w| ps((event.start + w).min(event.end))),
        });
        spans.push(Span {
            instr: id,
            stream,
            issued: ps(at.min(event.start)),
            ready: ps(ready),
            start: ps(event.start),
            end: ps(event.end),
            alone: Picos(alone.max(0).cast_unsigned() * 1000),
            blocker: waited.map_or(start, |_| Blocker::Rank),
        });
        let bytes = match w.collective {
            Some(c) => bytes_of(&trace.collectives[c as usize]),
            None if event.kind == DeviceKind::Kernel => 0,
            None => event.bytes,
        };
        instrs.push(Instr {
            id,
            name: table.number(&match main.contains(&w.device) {
                true => names::of(trace, a, w),
                false => names::kernel(trace, w).to_owned(),
            }),
            rule: names::rule(trace, a, w),
            work: Some(w.work),
            role: None,
            unit: UnitId(w.place.unit as _),
            phase: w.place.phase,
            micro_batch: w.place.micro_batch,
            stream,
            bytes,
            ranks: w
                .collective
                .map_or(0, |c| trace.collectives[c as usize].group_size),
            flops: names::flops(trace, w),
        });
    }
    Built {
        spans,
        waits,
        instrs,
        streams: streams.names,
    }
}

/// Returns the device events that are named after their operator. Matmuls and attention may launch
/// helper kernels that clear or convert their results; the operator's name goes to its longest
/// kernel.
fn main_kernels(trace: &Trace, work: &[&Placed]) -> BTreeSet<u32> {
    let time = |device: u32| {
        let event = &trace.device[device as usize];
        event.end - event.start
    };
    let products = work
        .iter()
        .filter(|w| matches!(w.work, Work::Gemm | Work::Attention));
    let mut longest: BTreeMap<u32, u32> = products
        .filter_map(|w| Some((w.operator?, w.device)))
        .collect();
    let mut main = BTreeSet::new();
    for w in work {
        match w.operator.and_then(|o| longest.get_mut(&o)) {
            Some(known) if time(w.device) > time(*known) => *known = w.device,
            Some(_) => {}
            None => drop(main.insert(w.device)),
        }
    }
    main.extend(longest.into_values());
    main
}

/// Returns what the start of work `me`, which was issued at `issued`, waited for. `before` is the
/// work before it on its stream.
fn blocker(
    p: &Parts<'_>,
    work: &[&Placed],
    ends: &[(i64, u32)],
    before: Option<u32>,
    issued: i64,
    me: usize,
) -> Blocker {
    let event = &p.trace.device[work[me].device as usize];
    let stream = before.map(|b| {
        (
            p.trace.device[work[b as usize].device as usize].end,
            Blocker::Stream(b),
        )
    });
    // Traces contain no CUDA events. Work that was issued before its stream was free to run it must
    // have waited for work on another stream: the one that ended last before it started.
    let free = stream.map_or(i64::MIN, |s| s.0);
    if event.start > issued.max(free) + LATENCY {
        let upto = ends.partition_point(|e| e.0 <= event.start);
        let found = ends[..upto].iter().rev().take(8).find(|(end, i)| {
            let other = &p.trace.device[work[*i as usize].device as usize];
            *i as usize != me
                && (*i as usize) < me
                && other.stream != event.stream
                && *end > issued.max(free)
        });
        if let Some((_, i)) = found {
            return Blocker::Event(*i);
        }
    }
    match stream {
        Some((end, blocker)) if end > issued => blocker,
        _ => Blocker::Host,
    }
}

/// Maps streams of a trace to streams of a run.
struct Streams {
    known: BTreeMap<(u32, u32), u8>,
    names: Vec<String>,
}

impl Streams {
    fn index(&self, device: u32, stream: u32) -> u8 {
        self.known.get(&(device, stream)).copied().unwrap_or(0)
    }
}

/// Names the streams. The compute stream is the one with the most work other than communication;
/// others are named after the work that takes most of their time.
fn streams(trace: &Trace, work: &[&Placed]) -> Streams {
    let mut time: BTreeMap<(u32, u32), BTreeMap<&'static str, i64>> = BTreeMap::new();
    for w in work {
        let event = &trace.device[w.device as usize];
        let lane = match w.work {
            Work::AllGather => "all_gather",
            Work::ReduceScatter => "reduce_scatter",
            Work::AllReduce | Work::OtherCollective => "outer",
            Work::Copy
                if event.kind == DeviceKind::Copy && trace.name(event.name).contains("HtoD") =>
            {
                "h2d"
            }
            Work::Copy
                if event.kind == DeviceKind::Copy && trace.name(event.name).contains("DtoH") =>
            {
                "d2h"
            }
            Work::Copy => "copy_in",
            _ => "compute",
        };
        let of = time.entry((event.device, event.stream)).or_default();
        // Kernels of zero duration still count.
        *of.entry(lane).or_default() += (event.end - event.start).max(1);
    }
    let model = |key: &(u32, u32)| {
        let of = |w: &&&Placed| {
            let event = &trace.device[w.device as usize];
            (event.device, event.stream) == *key
                && matches!(
                    w.place.phase,
                    Phase::Forward | Phase::Backward | Phase::Recompute
                )
        };
        work.iter().filter(of).count()
    };
    let compute = time
        .iter()
        .max_by_key(|(key, of)| (of.get("compute").copied().unwrap_or(0), model(key)))
        .map(|(key, _)| *key);
    let mut names = vec!["compute".to_owned()];
    let mut known = BTreeMap::new();
    known.extend(compute.map(|key| (key, 0)));
    for (key, of) in &time {
        if Some(*key) == compute {
            continue;
        }
        let lane = of
            .iter()
            .max_by_key(|(_, t)| **t)
            .map_or("compute", |(lane, _)| *lane);
        let same = names
            .iter()
            .filter(|n| n.split(' ').next() == Some(lane))
            .count();
        known.insert(*key, u8::try_from(names.len()).unwrap_or(u8::MAX));
        names.push(if same == 0 {
            lane.to_owned()
        } else {
            format!("{lane} {}", same + 1)
        });
    }
    Streams { known, names }
}
