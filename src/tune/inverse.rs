//! The inverse questions, answered by bisection: the longest sequence, the largest micro-batch and
//! the smallest number of GPUs that fit.

use super::climb::Climb;
use super::evaluate::{Evaluator, Scored, Watch, predicted};
use super::score::{Order, Score};
use super::space::Space;
use super::{Goal, Request};
use crate::analysis::gpu_counts;
use crate::predict::{PredictError, predict_light};
use shardlab_plan::Scenario;

/// Sequence lengths are multiples of this number of tokens, if the current length is one.
const TOKENS: u64 = 128;
/// Largest multiple of the current size that is tried for sequences and micro-batches.
const LARGER: u64 = 1024;
/// Largest multiple of the current ranks that is tried for meshes.
pub(crate) const MORE_RANKS: u64 = 64;

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

/// The smallest number of GPUs that fits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fewest {
    /// Overrides for this number of GPUs.
    pub set: Vec<String>,
    /// Number of GPUs of the job and the smallest one.
    pub gpus: [u64; 2],
    /// Samples per step of the job and on this number of GPUs. They differ if the GPUs cannot share
    /// the samples of the job evenly.
    pub samples: [u64; 2],
    /// Score of the job as it is.
    pub today: Score,
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

/// Finds the smallest number of GPUs on which some settings fit: a part of a node, or whole nodes.
/// The samples per step stay the same if the GPUs can share them evenly, so with fewer GPUs, each
/// has more micro-batches. Otherwise a step has a few samples more. `None` if up to 64 times the
/// GPUs of the job are not enough.
///
/// # Errors
/// Fails if the job cannot be predicted.
pub(crate) fn fewest_gpus(
    request: &Request<'_>,
    watch: &dyn Watch,
) -> Result<Option<Fewest>, PredictError> {
    let today = predict_light(&(request.load)(&[])?, request.profiles)?;
    let (train, mesh) = (&today.scenario.train, &today.scenario.mesh);
    let ranks = u64::from(mesh.data_ranks());
    let each = u64::from(mesh.world()) / ranks;
    let samples = train.micro_batch * u64::from(train.grad_accum) * ranks;
    let is_kept = request.kept.iter().any(|key| key == "train.micro_batch");
    let most = ranks * MORE_RANKS;
    let batch = |n: u64, micro: u64| Batch::of(samples, n, micro, is_kept);
    let counts = gpu_counts::shards(each, u64::from(mesh.gpus_per_node), 0, most, |n| {
        (request.load)(&batch(n, train.micro_batch).set(n)).is_ok()
    });
    let mut lean = leanest(request, watch)?;
    lean.retain(|set| !is_size(set));
    let fits = |n: u64, batch: Batch| {
        let size = batch.set(n);
        [&[][..], &lean[..]].into_iter().any(|more| {
            let all = [&size[..], more].concat();
            score(request, &all).is_some_and(|s| s.fits())
        })
    };
    let answer = |n: u64| {
        let usual = batch(n, train.micro_batch);
        // One sample at a time needs the least memory. The search then finds the best size.
        let batches = [usual, batch(n, 1)].into_iter();
        let mut batches = batches.take(if is_kept { 1 } else { 2 });
        batches.any(|b| fits(n, b)).then_some((n, usual))
    };
    let found = gpu_counts::smallest(&counts, answer);
    Ok(found.map(|(n, batch)| Fewest {
        set: batch.set(n),
        gpus: [ranks * each, n * each],
        samples: [samples, batch.samples(n)],
        today: Score::of(&today, request.limits),
    }))
}

/// The samples of a rank per step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    micro: u64,
    accum: u64,
}

impl Batch {
    /// Divides samples among `n` ranks, in micro-batches of at most `micro` samples, or of exactly
    /// as many if `is_kept`. Ranks get a whole number of micro-batches, at least one.
    fn of(samples: u64, n: u64, micro: u64, is_kept: bool) -> Self {
        let each = samples.div_ceil(n);
        let micro = match samples.is_multiple_of(n) {
            _ if is_kept => micro,
            true => greatest_divisor(each, micro),
            false => micro.min(each),
        };
        let accum = each.div_ceil(micro);
        Self { micro, accum }
    }

    /// Returns the samples of `n` ranks per step.
    const fn samples(self, n: u64) -> u64 {
        self.micro * self.accum * n
    }

    /// Returns the overrides for this batch on `n` ranks.
    fn set(self, n: u64) -> Vec<String> {
        vec![
            format!("mesh.dp_shard={n}"),
            "mesh.dp_replicate=1".to_owned(),
            format!("train.micro_batch={}", self.micro),
            format!("train.grad_accum={}", self.accum),
        ]
    }
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
    fn batches_stay_the_same_if_ranks_can_share_them() {
        for n in 1..=48 {
            for micro in 1..=4 {
                let batch = Batch::of(24, n, micro, false);
                let all = batch.samples(n);
                assert_eq!(all == 24, 24 % n == 0, "{n} {micro} {batch:?}");
                assert!(batch.micro <= micro && all >= 24, "{n} {micro} {batch:?}");
                assert_eq!(Batch::of(24, n, micro, true).micro, micro);
            }
        }
        // With more ranks than samples, each has one.
        assert_eq!(Batch::of(8, 24, 1, false).samples(24), 24);
    }

    #[test]
    fn micro_batches_divide_the_batch() {
        assert_eq!(greatest_divisor(12, 8), 6);
        assert_eq!(greatest_divisor(7, 4), 1);
        assert_eq!(greatest_divisor(8, 4), 4);
    }
}
