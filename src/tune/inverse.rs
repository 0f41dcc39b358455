//! The inverse questions, answered by bisection: the longest sequence, the largest micro-batch and
//! the smallest number of GPUs that fit.

use super::climb::Climb;
use super::evaluate::{Evaluator, Scored, Watch, predicted};
use super::score::{Order, Score};
use super::space::Space;
use super::{Goal, Request};
use crate::predict::{PredictError, predict_light};
use shardlab_plan::Scenario;

/// Sequence lengths are multiples of this number of tokens, if the current length is one.
const TOKENS: u64 = 128;
/// Largest multiple of the current size that is tried for sequences and micro-batches.
const LARGER: u64 = 1024;
/// Largest multiple of the current ranks that is tried for meshes.
const MORE_RANKS: u64 = 64;

/// A size of the job to maximize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Tokens of a sequence.
    Sequence,
    /// Samples per micro-batch. More samples make the batch per optimizer step larger.
    MicroBatch,
}

impl Size {
    /// Returns the key of the size.
    const fn key(self) -> &'static str {
        match self {
            Self::Sequence => "train.seq_len",
            Self::MicroBatch => "train.micro_batch",
        }
    }

    /// Returns the size of a job, and the number that it stays a multiple of.
    fn of(self, scenario: &Scenario) -> (u64, u64) {
        let train = &scenario.train;
        match self {
            Self::Sequence if train.seq_len.is_multiple_of(TOKENS) => (train.seq_len, TOKENS),
            Self::Sequence => (train.seq_len, 1),
            Self::MicroBatch => (train.micro_batch, 1),
        }
    }

    /// Returns whether an override of other settings would change the size itself.
    fn is_set_by(self, set: &str) -> bool {
        match self {
            Self::Sequence => false,
            Self::MicroBatch => is_size(set) && !set.starts_with("mesh."),
        }
    }
}

/// The largest sizes that fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Largest {
    /// Result with the current settings; `None` if no size fits.
    pub today: Option<u64>,
    /// Result with the most economical settings, these settings, and their score at that size.
    pub lean: Option<(u64, Vec<String>, Score)>,
}

/// The smallest number of ranks that fits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fewest {
    /// Data-parallel ranks.
    pub ranks: u64,
    /// Overrides for this number of ranks, with the current samples per step.
    pub set: Vec<String>,
}

/// Finds the longest sequence or the largest micro-batch that fits, with the current settings and
/// with those that need the least memory.
///
/// # Errors
/// Fails if the job cannot be predicted.
pub fn largest(
    request: &Request<'_>,
    size: Size,
    watch: &dyn Watch,
) -> Result<Largest, PredictError> {
    let (now, unit) = size.of(&(request.load)(&[])?);
    let mut lean = leanest(request, watch)?;
    lean.retain(|set| !size.is_set_by(set));
    let score = |units: u64, set: &[String]| {
        let own = [format!("{}={}", size.key(), units * unit)];
        score(request, &[set, &own[..]].concat())
    };
    let largest = |set: &[String]| {
        let fits = |units: u64| score(units, set).is_some_and(|s| s.fits());
        last(now / unit, LARGER.saturating_mul(now / unit), &fits)
    };
    let today = largest(&[]);
    let of_lean = largest(&lean).and_then(|units| Some((units, score(units, &lean)?)));
    Ok(Largest {
        today: today.map(|units| units * unit),
        lean: of_lean.map(|(units, score)| (units * unit, lean, score)),
    })
}

/// Finds the smallest number of data-parallel ranks on which some settings fit. The samples per
/// step stay the same, so with fewer ranks, each rank has more micro-batches. `None` if no number
/// of ranks fits.
///
/// # Errors
/// Fails if the job cannot be predicted.
pub(crate) fn fewest_gpus(
    request: &Request<'_>,
    watch: &dyn Watch,
) -> Result<Option<Fewest>, PredictError> {
    let base = (request.load)(&[])?;
    let train = &base.train;
    let ranks = u64::from(base.mesh.data_ranks());
    let samples = train.micro_batch * u64::from(train.grad_accum) * ranks;
    let lean = leanest(request, watch)?;
    let set = |n: u64| {
        let each = samples / n;
        let micro = greatest_divisor(each, train.micro_batch);
        vec![
            format!("mesh.dp_shard={n}"),
            "mesh.dp_replicate=1".to_owned(),
            format!("train.micro_batch={micro}"),
            format!("train.grad_accum={}", each / micro),
        ]
    };
    // Fewer samples than ranks would change the batch.
    let counts: Vec<u64> = (1..=samples.min(ranks * MORE_RANKS))
        .filter(|n| samples.is_multiple_of(*n))
        .collect();
    let fits = |at: u64| {
        let size = set(counts[at as usize]);
        let lean: Vec<String> = lean.iter().filter(|s| !is_size(s)).cloned().collect();
        [vec![], lean].into_iter().any(|more| {
            let mut all = size.clone();
            all.extend(more);
            score(request, &all).is_some_and(|s| s.fits())
        })
    };
    let count = counts.len() as u64;
    // The counts are in descending order, so the last one that fits is the smallest.
    let found = last(0, count - 1, &|i| fits(count - 1 - i));
    Ok(found.map(|i| {
        let ranks = counts[(count - 1 - i) as usize];
        Fewest {
            ranks,
            set: set(ranks),
        }
    }))
}

/// Returns whether an override sets a size of the mesh or the batch.
fn is_size(set: &str) -> bool {
    let sizes = ["mesh.", "train.micro_batch=", "train.grad_accum="];
    sizes.iter().any(|key| set.starts_with(key))
}

/// Returns the largest divisor of `n` up to `most`.
fn greatest_divisor(n: u64, most: u64) -> u64 {
    let mut all = (1..=most.min(n)).rev();
    all.find(|d| n.is_multiple_of(*d)).unwrap_or(1)
}

/// Returns the largest number up to `most` for which `fits` holds, if it holds for all smaller ones
/// or for none above it. Starts at `from`, which may be 0.
fn last(from: u64, most: u64, fits: &dyn Fn(u64) -> bool) -> Option<u64> {
    let (mut good, mut bad) = (None, None);
    let mut at = from;
    loop {
        if fits(at) {
            good = Some(at);
            if at == most {
                return good;
            }
            at = (at * 2).max(at + 1).min(most);
        } else {
            bad = Some(at);
            if good.is_some() || at == 0 {
                break;
            }
            at /= 2;
        }
        if good.is_some() && bad.is_some() {
            break;
        }
    }
    let (mut good, mut bad) = (good?, bad?);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    (good > 0 || from == 0).then_some(good)
}

fn score(request: &Request<'_>, set: &[String]) -> Option<Score> {
    predicted(&(request.load)(set).ok()?, request, true)
}

/// Returns the settings that need the least memory, determined for each axis.
fn leanest(request: &Request<'_>, watch: &dyn Watch) -> Result<Vec<String>, PredictError> {
    let today = predict_light(&(request.load)(&[])?, request.profiles)?;
    let space = Space::new(&today, request);
    let score = super::without_limit(&today, request);
    let predict = |scenario: &Scenario| predicted(scenario, request, true);
    let eval = Evaluator::new(&space, request, watch, &predict, score.clone());
    let order = Order {
        goal: Goal::Memory,
        today: None,
    };
    let mut climb = Climb::new(&eval, order);
    let today: Scored = (space.today(), score);
    let single = climb.neighbours(&today);
    let joint = eval.one(climb.composite(true));
    let best = joint.map_or(single.clone(), |joint| climb.better(single, joint));
    Ok(space.overrides(&best.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_that_fits_is_found_from_anywhere() {
        for limit in 1..40 {
            for from in 1..40 {
                let found = last(from, 1000, &|n| n <= limit);
                assert_eq!(found, Some(limit), "from {from}");
            }
        }
        assert_eq!(last(5, 1000, &|_| false), None);
        assert_eq!(last(5, 64, &|_| true), Some(64));
        assert_eq!(last(0, 8, &|n| n <= 3), Some(3));
        assert_eq!(last(0, 8, &|n| n == 0), Some(0));
    }

    #[test]
    fn micro_batches_divide_the_batch() {
        assert_eq!(greatest_divisor(12, 8), 6);
        assert_eq!(greatest_divisor(7, 4), 1);
        assert_eq!(greatest_divisor(8, 4), 4);
    }
}
