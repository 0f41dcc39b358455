//! Why a step takes as long and as much memory as it does, in a few plain sentences.

use super::exposed::{self, Group};
use super::misaligned::Misaligned;
use super::peak;
use super::spans::Work;
use crate::predict::{Fit, Prediction};
use shardlab_plan::program::COMPUTE;
use shardlab_plan::record::Cause;
use shardlab_plan::units::{Bytes, Picos};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Share of the step below which exposed time is not worth a sentence.
const WORTH_SAYING: f64 = 0.005;
/// Share of the step up to which it is called bound by computation.
const COMPUTE_BOUND: f64 = 0.10;

/// The bound of the step's time, what is exposed and why, what misaligned collectives cost, the peak of memory, and whether it fits.
#[must_use]
pub fn sentences(p: &Prediction) -> Vec<String> {
    let groups = exposed::groups(&exposed::gaps(&p.program, &p.run));
    let mut all = vec![time(p, &groups)];
    all.extend(exposed_time(p, &groups));
    all.extend(misaligned(p));
    all.push(memory(p));
    all.extend(fit(p));
    all
}

/// Time of the compute stream by kind of work, largest first.
#[must_use]
pub fn busy_by_work(p: &Prediction) -> Vec<(Work, Picos)> {
    let mut sums: BTreeMap<Work, Picos> = BTreeMap::new();
    for span in p.run.spans.iter().filter(|s| s.stream == COMPUTE) {
        if let Some(work) = Work::of(&p.program, span.instr) {
            *sums.entry(work).or_default() += span.end - span.start;
        }
    }
    let mut sums: Vec<(Work, Picos)> = sums.into_iter().collect();
    sums.sort_by_key(|&(_, time)| Reverse(time));
    sums
}

fn percent(part: Picos, whole: Picos) -> String {
    format!("{:.0} %", 100.0 * share(part, whole))
}

fn share(part: Picos, whole: Picos) -> f64 {
    if whole == Picos::ZERO {
        0.0
    } else {
        part.0 as f64 / whole.0 as f64
    }
}

fn time(p: &Prediction, groups: &[Group]) -> String {
    let run = &p.run;
    let step = run.recorded_to.saturating_sub(run.recorded_from);
    let exposed = run.exposed_total();
    let of = |cause| run.exposed.get(&cause).copied().unwrap_or_default();
    let parts: Vec<String> = busy_by_work(p)
        .iter()
        .take(3)
        .map(|&(work, t)| format!("{} {}", work.name(), percent(t, step)))
        .collect();
    let made_of = parts.join(", ");
    let busy = percent(step.saturating_sub(exposed), step);
    let host = of(Cause::Host);
    if share(exposed, step) <= COMPUTE_BOUND {
        format!("Bound by computation: the compute stream is busy {busy} of the step ({made_of}).")
    } else if host.0 * 2 >= exposed.0 {
        format!(
            "Bound by the host: the compute stream waits {} of the step for the next launch ({} of host work a step); \
             of the rest, {made_of}.",
            percent(host, step),
            run.host
        )
    } else {
        format!(
            "Bound by {}: the compute stream is idle {} of the step, busy {busy} ({made_of}).",
            awaited(groups),
            percent(exposed, step)
        )
    }
}

/// What the compute stream waits for most, where it is not the host.
fn awaited(groups: &[Group]) -> &str {
    let mut sums: BTreeMap<&str, Picos> = BTreeMap::new();
    for g in groups.iter().filter(|g| g.cause != Cause::Host) {
        let of = match g.cause {
            Cause::Straggler => "a late rank",
            _ if g.awaited.collective => "communication",
            _ if g.awaited.name == "copy" => "copies",
            _ => &g.awaited.name,
        };
        *sums.entry(of).or_default() += g.total;
    }
    let most = sums.into_iter().max_by_key(|&(_, time)| time);
    most.map_or("communication", |(name, _)| name)
}

fn exposed_time(p: &Prediction, groups: &[Group]) -> Option<String> {
    let run = &p.run;
    let step = run.recorded_to.saturating_sub(run.recorded_from);
    let parts: Vec<String> = groups
        .iter()
        .filter(|g| share(g.total, step) >= WORTH_SAYING)
        .take(3)
        .map(phrase)
        .collect();
    (!parts.is_empty()).then(|| format!("Exposed: {}.", parts.join("; ")))
}

fn phrase(g: &Group) -> String {
    let what = &g.awaited.name;
    let phase = g.awaited.phase;
    let because = match g.cause {
        Cause::Host if what == "host" => {
            return format!(
                "{} in {phase} because the host issues kernels late",
                g.total
            );
        }
        Cause::Host => "the host issues it late",
        Cause::Gate => "a gate lets it start late",
        Cause::Queue => match g.behind {
            Some(other) => &format!("it waits for its turn behind {other}"),
            None => "it waits for its turn behind another collective",
        },
        Cause::Wire if !g.awaited.collective => "it has to be done first",
        Cause::Wire => "it takes longer than the computation beside it",
        Cause::Contention => "work beside it slows it or holds the SMs",
        Cause::Tail => "nothing is left to compute",
        Cause::Straggler => "another rank is late",
    };
    let times = if g.count > 1 {
        format!(" in {} places", g.count)
    } else {
        String::new()
    };
    if what == "host" {
        return format!("{} in {phase}{times} because {because}", g.total);
    }
    format!("{} of {what} in {phase}{times} because {because}", g.total)
}

fn misaligned(p: &Prediction) -> Option<String> {
    let found = Misaligned::of(p);
    let step = p.run.recorded_to.saturating_sub(p.run.recorded_from);
    (share(found.lost, step) >= WORTH_SAYING).then(|| found.sentence(p))
}

fn memory(p: &Prediction) -> String {
    let m = &p.run.memory;
    let at = &m.at;
    let unit = &p.program.units[at.unit.index()].name;
    let roles: Vec<String> = m
        .by_role
        .iter()
        .take(3)
        .map(|(role, bytes)| format!("{} {bytes}", role.name()))
        .collect();
    let largest = peak::largest(&p.program, at.instr, 1)
        .first()
        .map(|a| match a.count {
            1 => format!(
                "; the largest buffer is {} {} of {}",
                a.dtype, a.name, a.bytes
            ),
            n => format!(
                "; the largest buffers are {n} {} {} of {}",
                a.dtype,
                a.role.name(),
                a.bytes
            ),
        })
        .unwrap_or_default();
    let kernel = peak::launched_after(&p.program, at.instr)
        .map(|name| format!(" (at {name})"))
        .unwrap_or_default();
    format!(
        "Memory peaks at {} in {} of {unit}{kernel}: {}{largest}.",
        m.peak_allocated,
        at.phase.name(),
        roles.join(", ")
    )
}

fn fit(p: &Prediction) -> Option<String> {
    match &p.fit {
        Fit::Fits | Fit::Unknown => None,
        Fit::Tight { retries } => Some(format!(
            "It fits only because the allocator gives cached memory back {retries} times, each time stopping the device."
        )),
        Fit::Exceeds {
            over,
            out_of_memory,
        } => {
            let capacity = p.run.memory.capacity.unwrap_or(Bytes::ZERO);
            let where_ = match out_of_memory {
                Some((phase, by_role)) => {
                    let largest = by_role
                        .first()
                        .map(|(role, bytes)| format!(" with {} {bytes} in use", role.name()))
                        .unwrap_or_default();
                    format!("; it runs out in {}{largest}", phase.name())
                }
                None => String::new(),
            };
            Some(format!(
                "It does not fit: {over} more than the device's {capacity} are needed{where_}. The times above are those of a \
                 device with enough memory."
            ))
        }
    }
}
