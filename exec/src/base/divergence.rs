//! Where the hosts of a run stand: what is said beside a wait that has ended because nothing moved. The one who waited is
//! seldom the one to blame, and hosts that wait for somebody have gone further than that one's.

use super::live::Live;
use shardlab_plan::Program;
use shardlab_plan::program::InstrId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Groups of ranks at the same place that are told one by one.
const TOLD: usize = 3;

/// Where a rank's host stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Rank.
    pub(crate) rank: u32,
    /// Passes begun: all ranks count alike.
    pub(crate) pass: u32,
    /// Step of the pass.
    pub(crate) step: u32,
    /// The instruction that the host performs or has performed last.
    pub(crate) instr: InstrId,
    /// It in words.
    pub(crate) text: String,
}

/// The places of a process's ranks, for whoever asks from another thread.
#[derive(Debug)]
pub(crate) struct Standings {
    pub(crate) program: Arc<Program>,
    pub(crate) live: Arc<Live>,
    pub(crate) local: Range<u32>,
}

impl Standings {
    /// Ranks that have come to an instruction.
    pub(crate) fn now(&self) -> Vec<Standing> {
        let local = self.local.clone();
        local
            .filter_map(|rank| {
                let (pass, step, instr) = self.live.place(rank)?;
                Some(Standing {
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

/// The end of a cause: the places, those furthest behind first, where they differ; empty where all stand at the same one.
pub(crate) fn apart<'a>(all: impl IntoIterator<Item = &'a Standing>) -> String {
    let mut places: BTreeMap<(u32, InstrId), Vec<&Standing>> = BTreeMap::new();
    for s in all {
        places.entry((s.pass, s.instr)).or_default().push(s);
    }
    let last_step = match places.last_key_value() {
        Some((_, furthest)) if places.len() > 1 => furthest[0].step,
        _ => return String::new(),
    };
    let mut words: Vec<String> = places
        .values()
        .take(TOLD)
        .map(|there| {
            let ranks: Vec<u32> = there.iter().map(|s| s.rank).collect();
            let Standing {
                step, instr, text, ..
            } = there[0];
            let step = if *step == last_step {
                String::new()
            } else {
                format!(" of step {step}")
            };
            let n = instr.0;
            format!(
                "{} at instruction {n} `{text}`{step}",
                ranks_in_words(&ranks)
            )
        })
        .collect();
    let others: usize = places.values().skip(TOLD).map(Vec::len).sum();
    if others > 0 {
        words.push(format!("{others} further on"));
    }
    format!("; host positions, slowest first: {}", words.join("; "))
}

/// `rank 3`, `ranks 1, 2`.
pub(crate) fn ranks_in_words(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let s = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{s} {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rank: u32, pass: u32, instr: u32) -> Standing {
        Standing {
            rank,
            pass,
            step: pass + 4,
            instr: InstrId(instr),
            text: format!("op {instr}"),
        }
    }

    #[test]
    fn whoever_is_behind_comes_first() {
        let all = [at(0, 2, 90), at(1, 2, 12), at(2, 2, 90), at(3, 2, 90)];
        assert_eq!(
            apart(&all),
            "; host positions, slowest first: rank 1 at instruction 12 `op 12`; ranks 0, 2, 3 at instruction 90 `op 90`"
        );
        // A pass before, at a later instruction: the first step has instructions of its own, and so has validation.
        let all = [at(0, 3, 12), at(1, 2, 90)];
        assert_eq!(
            apart(&all),
            "; host positions, slowest first: rank 1 at instruction 90 `op 90` of step 6; rank 0 at instruction 12 `op 12`"
        );
    }

    #[test]
    fn those_who_stand_together_are_not_told() {
        assert_eq!(apart(&[]), "");
        assert_eq!(apart(&[at(0, 1, 5)]), "");
        assert_eq!(apart(&[at(0, 1, 5), at(1, 1, 5)]), "");
    }

    #[test]
    fn many_places_are_counted() {
        let all: Vec<Standing> = (0..9).map(|r| at(r, 1, 10 + r)).collect();
        let words = apart(&all);
        assert!(
            words.ends_with("rank 2 at instruction 12 `op 12`; 6 further on"),
            "{words}"
        );
    }
}
