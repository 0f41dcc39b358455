//! Phrases that are used in several sentences of the analysis.

use crate::predict::Prediction;

/// Returns how often the allocator freed cached memory, for example `13 times in 4 steps`.
pub(super) fn frees(p: &Prediction, retries: u32) -> String {
    let times = match retries {
        1 => "once".to_owned(),
        n => format!("{n} times"),
    };
    match p.run.steps.len() {
        0 | 1 => format!("{times} per step"),
        n => format!("{times} in {n} steps"),
    }
}
