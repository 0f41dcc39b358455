//! Host positions of all ranks, which explain a timeout.
//!
//! The rank that times out is rarely the cause: ranks that wait for a slow rank are further ahead
//! in the program. The message of a timeout therefore lists the ranks, slowest first.

use super::progress::Progress;
use shardlab_plan::Program;
use shardlab_plan::ir::InstrId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Number of positions that a message lists. Ranks at other positions are only counted.
const MAX_LISTED: usize = 3;

/// Position of a rank's host in the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankProgress {
    /// Rank.
    pub(crate) rank: u32,
    /// Number of passes that have started, which all ranks count in the same way.
    pub(crate) pass: u32,
    /// Step of the pass.
    pub(crate) step: u32,
    /// Instruction that the host is issuing or issued last.
    pub(crate) instr: InstrId,
    /// Text of the instruction.
    pub(crate) text: String,
}

/// Host positions of this process's ranks. Any thread can read them.
#[derive(Debug)]
pub(crate) struct LocalProgress {
    pub(crate) program: Arc<Program>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) local: Range<u32>,
}

impl LocalProgress {
    /// Returns the position of each rank that has issued an instruction.
    pub(crate) fn snapshot(&self) -> Vec<RankProgress> {
        let local = self.local.clone();
        local
            .filter_map(|rank| {
                let (pass, step, instr) = self.progress.position(rank)?;
                Some(RankProgress {
                    rank,
                    pass,
                    step,
                    instr,
                    text: self.program.op_text(instr),
                })
            })
            .collect()
    }
}

/// Formats the end of a timeout message: host positions, slowest first. Empty if all hosts are at
/// the same position.
pub(crate) fn describe_divergence<'a>(all: impl IntoIterator<Item = &'a RankProgress>) -> String {
    let mut positions: BTreeMap<(u32, InstrId), Vec<&RankProgress>> = BTreeMap::new();
    for s in all {
        positions.entry((s.pass, s.instr)).or_default().push(s);
    }
    let last_step = match positions.last_key_value() {
        Some((_, furthest)) if positions.len() > 1 => furthest[0].step,
        _ => return String::new(),
    };
    let mut words: Vec<String> = positions
        .values()
        .take(MAX_LISTED)
        .map(|same| {
            let ranks: Vec<u32> = same.iter().map(|s| s.rank).collect();
            let RankProgress {
                step, instr, text, ..
            } = same[0];
            let step = if *step == last_step {
                String::new()
            } else {
                format!(" of step {step}")
            };
            let n = instr.0;
            format!("{} at instruction {n} `{text}`{step}", list_ranks(&ranks))
        })
        .collect();
    let others: usize = positions.values().skip(MAX_LISTED).map(Vec::len).sum();
    if others > 0 {
        words.push(format!("{others} further on"));
    }
    format!("; host positions, slowest first: {}", words.join("; "))
}

/// Formats ranks as `rank 3` or `ranks 1, 2`.
pub(crate) fn list_ranks(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let s = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{s} {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rank: u32, pass: u32, instr: u32) -> RankProgress {
        RankProgress {
            rank,
            pass,
            step: pass + 4,
            instr: InstrId(instr),
            text: format!("op {instr}"),
        }
    }

    #[test]
    fn the_slowest_rank_comes_first() {
        let all = [at(0, 2, 90), at(1, 2, 12), at(2, 2, 90), at(3, 2, 90)];
        assert_eq!(
            describe_divergence(&all),
            "; host positions, slowest first: rank 1 at instruction 12 `op 12`; ranks 0, 2, 3 at instruction 90 `op 90`"
        );
        // An earlier pass at a later instruction: the first step and the validation have separate
        // instructions.
        let all = [at(0, 3, 12), at(1, 2, 90)];
        assert_eq!(
            describe_divergence(&all),
            "; host positions, slowest first: rank 1 at instruction 90 `op 90` of step 6; rank 0 at instruction 12 `op 12`"
        );
    }

    #[test]
    fn equal_positions_are_not_described() {
        assert_eq!(describe_divergence(&[]), "");
        assert_eq!(describe_divergence(&[at(0, 1, 5)]), "");
        assert_eq!(describe_divergence(&[at(0, 1, 5), at(1, 1, 5)]), "");
    }

    #[test]
    fn positions_beyond_the_limit_are_counted() {
        let all: Vec<RankProgress> = (0..9).map(|r| at(r, 1, 10 + r)).collect();
        let words = describe_divergence(&all);
        assert!(
            words.ends_with("rank 2 at instruction 12 `op 12`; 6 further on"),
            "{words}"
        );
    }
}
