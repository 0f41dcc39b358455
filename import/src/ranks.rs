//! Traces of several ranks: checks that they belong together, and compares them.

use crate::ImportError;
use crate::attribute::{Attributed, Steps};
use crate::costs::{Times, launches};
use crate::kineto::{Head, Trace};
use crate::measured::{CollectiveSpan, StepTime, clocks, of_rank, origin, samples, step_times};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The part of a rank's trace that is kept.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) rank: u32,
    pub(crate) path: PathBuf,
    pub(crate) head: Head,
    pub(crate) collectives: Vec<CollectiveSpan>,
    pub(crate) times: Vec<StepTime>,
    /// Numbers of `ProfilerStep` marks.
    pub(crate) marks: Vec<u64>,
    /// First and last time, nanoseconds since 1970.
    pub(crate) span: (i64, i64),
    pub(crate) time: (u64, u64),
    pub(crate) notes: Vec<String>,
    pub(crate) is_cut_off: bool,
    /// Host times of kernel launches.
    pub(crate) launches: Times,
}

/// Summary of a rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankSummary {
    /// Rank.
    pub rank: u32,
    /// File.
    pub file: String,
    /// Time of the shown step, milliseconds: the same step on each rank, or the rank's median step
    /// if its trace lacks that one.
    pub step_ms: Option<f64>,
    /// Time that the other ranks waited for this one in collectives, milliseconds over the whole
    /// trace.
    pub late_ms: f64,
    /// Attributed share of device time.
    pub attributed_share: f64,
}

impl Rank {
    pub(crate) fn new(rank: u32, path: &Path, trace: &Trace, a: &Attributed) -> Self {
        let first = origin(trace);
        let last = trace.device.iter().map(|d| d.end).max().unwrap_or(first);
        let marks = trace.host.iter().filter_map(|e| {
            trace
                .name(e.name)
                .strip_prefix("ProfilerStep#")?
                .parse()
                .ok()
        });
        Self {
            rank,
            path: path.to_owned(),
            head: trace.head.clone(),
            collectives: of_rank(trace, a),
            times: step_times(trace, a),
            marks: marks.collect(),
            span: (first + trace.head.base, last + trace.head.base),
            time: a.time,
            notes: trace.notes.clone(),
            is_cut_off: trace.is_cut_off,
            launches: launches(trace, a),
        }
    }

    /// Summarizes the rank: the nanoseconds that others waited for it, and the shown step.
    pub(crate) fn summary(&self, late: i64, step: Option<u32>) -> RankSummary {
        let shown = self.times.iter().find(|t| Some(t.step) == step);
        let shown = shown.map(|t| (t.to - t.from) as f64 / 1e6);
        let mut ms: Vec<f64> = samples(&self.times).iter().map(|t| t.ms()).collect();
        ms.sort_by(f64::total_cmp);
        RankSummary {
            rank: self.rank,
            file: self.path.display().to_string(),
            step_ms: shown.or_else(|| ms.get(ms.len().saturating_sub(1) / 2).copied()),
            late_ms: late as f64 / 1e6,
            attributed_share: share(self.time),
        }
    }
}

pub(crate) fn share(time: (u64, u64)) -> f64 {
    if time.1 == 0 {
        0.0
    } else {
        time.0 as f64 / time.1 as f64
    }
}

/// Returns the rank of a file: the rank in the trace, or else the last number after `rank` in the
/// file's name, or else its position.
pub(crate) fn rank_of(said: Option<u32>, path: &Path, place: usize) -> u32 {
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default();
    said.or_else(|| after_rank(&name))
        .unwrap_or_else(|| u32::try_from(place).unwrap_or(u32::MAX))
}

/// Returns the number after the last `rank` in a name in lower case.
pub(crate) fn after_rank(name: &str) -> Option<u32> {
    let (_, rest) = name.rsplit_once("rank")?;
    let rest = rest.trim_start_matches(['-', '_', '.']);
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Rejects traces that do not belong together.
pub(crate) fn check(ranks: &[Rank]) -> Result<(), ImportError> {
    let Some((first, others)) = ranks.split_first() else {
        return Ok(());
    };
    let refuse = |text: String| Err(ImportError::Apart(text));
    let file = |r: &Rank| r.path.display().to_string();
    for (i, other) in others.iter().enumerate() {
        let pair = format!("{} and {}", file(first), file(other));
        if let Some(same) = ranks[..=i].iter().find(|r| r.rank == other.rank) {
            return refuse(format!(
                "{} and {}: both are of rank {}; give one trace per rank of one job",
                file(same),
                file(other),
                other.rank
            ));
        }
        if let (Some(a), Some(b)) = (first.head.world_size, other.head.world_size)
            && a != b
        {
            return refuse(format!(
                "{pair}: traces of different jobs: one has {a} ranks, the other {b}"
            ));
        }
        if first.marks != other.marks && !first.marks.is_empty() && !other.marks.is_empty() {
            return refuse(format!(
                "{pair}: the ranks show different steps: ProfilerStep {} and {}",
                list(&first.marks),
                list(&other.marks)
            ));
        }
        if first.span.1 < other.span.0 || other.span.1 < first.span.0 {
            let apart = (other.span.0 - first.span.1).max(first.span.0 - other.span.1) as f64 / 1e9;
            return refuse(format!(
                "{pair}: the traces do not overlap in time ({apart:.1} s apart): they show different steps or jobs"
            ));
        }
        if first.times.len() != other.times.len() {
            let cut = [first, other].into_iter().find(|r| r.is_cut_off);
            let cut = cut.map(|r| format!("; {} was cut off", file(r)));
            return refuse(format!(
                "{pair}: the ranks show different steps: {} and {} whole ones{}",
                first.times.len(),
                other.times.len(),
                cut.unwrap_or_default()
            ));
        }
        if differ(first, other) {
            return refuse(format!(
                "{pair}: the ranks issue different collectives in the same step: traces of different jobs, or of pipeline stages, which are not supported"
            ));
        }
    }
    Ok(())
}

/// Moves the times of all ranks' collectives to the clock of the first rank, as far as the ranks
/// have collectives in common. Returns notes on the offsets.
pub(crate) fn align_clocks(ranks: &mut [Rank]) -> Vec<String> {
    let lists: Vec<&[_]> = ranks.iter().map(|r| r.collectives.as_slice()).collect();
    let clocks = clocks(&lists);
    let Some((first, others)) = ranks.split_first_mut() else {
        return Vec::new();
    };
    let mut notes = Vec::new();
    for (rank, clock) in others.iter_mut().zip(clocks) {
        for c in &mut rank.collectives {
            c.span = (c.span.0 - clock.offset(), c.span.1 - clock.offset());
        }
        notes.extend(clock.note(rank.rank, first.rank));
    }
    notes
}

fn list(marks: &[u64]) -> String {
    marks
        .iter()
        .map(|m| format!("#{m}"))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns whether the kinds and sizes of a step's collectives have little in common.
fn differ(a: &Rank, b: &Rank) -> bool {
    let of = |r: &Rank| {
        let step = r.times.last().map(|t| t.step);
        let mut keys: Vec<_> = r
            .collectives
            .iter()
            .filter(|c| Some(c.step) == step)
            .map(|c| (c.key.0, c.key.2))
            .collect();
        keys.sort_unstable();
        keys
    };
    let (a, b) = (of(a), of(b));
    if a.is_empty() || b.is_empty() {
        return a.len() != b.len();
    }
    let mut rest = b.clone();
    let common = a
        .iter()
        .filter(|k| {
            rest.iter()
                .position(|r| r == *k)
                .map(|i| rest.swap_remove(i))
                .is_some()
        })
        .count();
    common * 2 < a.len().max(b.len())
}

/// Returns how steps were found, if at all, as a phrase for the user.
pub(crate) fn found_by(steps: &Steps) -> &'static str {
    steps.found_by
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_by_name() {
        for (name, expected) in [
            ("rank3_trace.json.gz", 3),
            ("megatron-rank-12.json", 12),
            ("job_rank_0.pickle", 0),
            ("trace.json", 7),
            ("ranking.json", 7),
        ] {
            assert_eq!(rank_of(None, Path::new(name), 7), expected, "{name}");
        }
        assert_eq!(rank_of(Some(5), Path::new("rank3.json"), 7), 5);
    }
}
