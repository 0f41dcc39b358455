//! Explains the time and memory of a step in a few plain sentences.

use super::exposed::{self, Group};
use super::phrases::frees;
use super::spans::Work;
use super::{peak, warnings};
use crate::predict::{Fit, Prediction};
use shardlab_plan::config::DocumentLengths;
use shardlab_plan::ir::{COMPUTE, Role};
use shardlab_plan::program::Phase;
use shardlab_plan::record::basis::milliseconds;
use shardlab_plan::record::{Basis, Cause};
use shardlab_plan::units::{Bytes, Picos, count};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Share of the step below which exposed time is not mentioned.
const WORTH_SAYING: f64 = 0.005;
/// Share of the step up to which exposed time still counts as compute-bound.
const COMPUTE_BOUND: f64 = 0.10;

/// Returns sentences on what limits the step, what is exposed and why, the warnings, where memory
/// peaks, and why the job does not fit if it does not.
#[must_use]
pub fn sentences(p: &Prediction) -> Vec<String> {
    let groups = exposed::groups(&exposed::gaps(&p.program, &p.run));
    let mut all = vec![time(p, &groups)];
    all.extend(exposed_time(p, &groups));
    all.extend(warnings::of(p).into_iter().map(|w| w.message));
    all.push(memory(p));
    all.extend(fit(p));
    all.extend(documents(p));
    all
}

/// Returns the sentences that [`super::verdict::Verdict`] and [`warnings::of`] do not already
/// contain.
#[must_use]
pub fn details(p: &Prediction) -> Vec<String> {
    let groups = exposed::groups(&exposed::gaps(&p.program, &p.run));
    let fits = !matches!(p.fit, Fit::Exceeds { .. });
    let mut all = Vec::new();
    all.extend((!fits).then(|| time(p, &groups)));
    all.extend(exposed_time(p, &groups));
    all.push(memory(p));
    all.extend(fit(p).filter(|_| fits));
    all.extend(documents(p));
    all
}

/// Describes the documents that were measured in a file of tokens.
fn documents(p: &Prediction) -> Option<String> {
    let DocumentLengths::OfData(of) = &p.scenario.train.document_lengths else {
        return None;
    };
    let sequences = match of.lengths.sequences {
        1 => "1 sequence".to_owned(),
        n => format!("{} sequences", count(n)),
    };
    Some(format!(
        "Documents in {sequences} of {}: {:.1} tokens on average; the average token is in one of {:.1}.",
        of.data, of.lengths.mean, of.lengths.token_mean
    ))
}

/// Returns what limits the step time.
#[must_use]
pub fn bound(p: &Prediction) -> String {
    time(p, &exposed::groups(&exposed::gaps(&p.program, &p.run)))
}

/// Returns the time of the compute stream by kind of work, largest first.
#[must_use]
pub(crate) fn busy_by_work(p: &Prediction) -> Vec<(Work, Picos)> {
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
        format!("Compute-bound: the compute stream is busy {busy} of the step ({made_of}).")
    } else if host.0 * 2 >= exposed.0 {
        format!(
            "Host-bound: the compute stream waits {} of the step for kernel launches ({} of CPU \
             launch work per step); busy {busy} ({made_of}).",
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

/// Returns what the compute stream waits for most, other than the host.
fn awaited(groups: &[Group]) -> &str {
    let mut sums: BTreeMap<&str, Picos> = BTreeMap::new();
    for g in groups.iter().filter(|g| g.cause != Cause::Host) {
        let of = match g.cause {
            Cause::Straggler => "a straggler",
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
        .map(|g| phrase(g, run.basis.as_ref()))
        .collect();
    (!parts.is_empty()).then(|| format!("Exposed: {}.", parts.join("; ")))
}

/// Formats a time as all numbers with this basis are.
fn shown(time: Picos, basis: Option<&Basis>) -> String {
    match basis.is_some_and(Basis::is_estimate) {
        true => milliseconds(time.ms(), basis),
        false => time.to_string(),
    }
}

fn phrase(g: &Group, basis: Option<&Basis>) -> String {
    let total = shown(g.total, basis);
    let what = &g.awaited.name;
    let phase = g.awaited.phase;
    let times = match g.count {
        1 => String::new(),
        n => format!(" in {n} places"),
    };
    let because = match g.cause {
        Cause::Host => "the host launches too late",
        Cause::Gate => "a gate delays its start",
        Cause::Queue => match g.behind {
            Some(other) => &format!("it waits in line behind {other}"),
            None => "it waits in line behind another collective",
        },
        Cause::Wire if !g.awaited.collective => "the next kernel needs its result",
        Cause::Wire => "it takes longer than the compute it overlaps with",
        Cause::Contention => "concurrent work slows it down or occupies the SMs",
        Cause::Tail => return tail(g, &total, &times),
        Cause::Straggler => "another rank is late",
    };
    if what == "host" {
        return format!("{total} in {phase}{times} because {because}");
    }
    format!("{total} of {what} in {phase}{times} because {because}")
}

fn tail(g: &Group, total: &str, times: &str) -> String {
    let of = match g.awaited.name.as_str() {
        "host" => String::new(),
        name => format!(" of {name}"),
    };
    format!(
        "{total}{of} in {}{times} at the end of the step, with no compute left to hide it",
        g.awaited.phase
    )
}

fn memory(p: &Prediction) -> String {
    let m = &p.run.memory;
    let at = &m.at;
    let largest = peak::largest(&p.program, at.instr, 1)
        .first()
        .map(|a| match a.count {
            1 => format!("; largest buffer: {} {} of {}", a.dtype, a.name, a.bytes),
            n => format!(
                "; largest buffers: {n} x {} of {} {}",
                a.bytes,
                a.dtype,
                a.role.name()
            ),
        })
        .unwrap_or_default();
    let kernel = peak::launched_after(&p.program, at.instr)
        .map(|name| format!(" (during `{name}`)"))
        .unwrap_or_default();
    format!(
        "Memory peaks at {} in {}{kernel}: {}{largest}.",
        m.peak_allocated,
        place(p),
        roles(&m.by_role, 3)
    )
}

/// Returns where memory peaks: `backward of layers.1`.
fn place(p: &Prediction) -> String {
    let at = &p.run.memory.at;
    let unit = &p.program.units[at.unit.index()].name;
    format!("{} of {unit}", at.phase.name())
}

/// Returns the largest roles: `activation 225.81 GiB, logits 23.48 GiB`.
fn roles(by_role: &[(Role, Bytes)], shown: usize) -> String {
    let largest = by_role.iter().take(shown);
    let words: Vec<String> = largest
        .map(|(role, bytes)| format!("{} {bytes}", role.name()))
        .collect();
    words.join(", ")
}

/// Returns what takes up the memory of a job that does not fit, and where it runs out.
#[must_use]
pub fn shortage(p: &Prediction) -> String {
    let m = &p.run.memory;
    let mut text = format!("At the peak ({}): {}.", place(p), roles(&m.by_role, 3));
    if let Fit::Exceeds {
        out_of_memory: Some((phase, by_role)),
        ..
    } = &p.fit
    {
        text += &format!(" {}", runs_out(*phase, by_role));
    }
    text
}

/// Returns a sentence: `Runs out in forward, with 63.90 GiB of activation allocated.`
fn runs_out(phase: Phase, by_role: &[(Role, Bytes)]) -> String {
    let largest = by_role
        .first()
        .map(|(role, bytes)| format!(", with {bytes} of {} allocated", role.name()));
    format!(
        "Runs out in {}{}.",
        phase.name(),
        largest.unwrap_or_default()
    )
}

fn fit(p: &Prediction) -> Option<String> {
    match &p.fit {
        Fit::Fits | Fit::Unknown => None,
        Fit::Tight { retries, .. } => Some(format!(
            "Fits, but the allocator must free cached blocks {}; each free synchronizes the device.",
            frees(p, *retries)
        )),
        Fit::Exceeds { out_of_memory, .. } => {
            let m = &p.run.memory;
            let capacity = m.capacity.unwrap_or(Bytes::ZERO);
            let place = out_of_memory
                .as_ref()
                .map(|(phase, by_role)| format!(" {}", runs_out(*phase, by_role)))
                .unwrap_or_default();
            Some(format!(
                "Out of memory: needs {}, the device has {capacity}.{place} Times assume that it fits.",
                m.peak_device
            ))
        }
    }
}
