//! Optimizer settings of each step.

use crate::base::operand::{Hyper, MuonSettings};
use shardlab_plan::config::{LrSchedule, Train};

/// Returns the learning rate of step `step` (from 0). The horizon of a cosine schedule is the
/// scenario's number of steps, whatever part of it a run does; after it, the rate stays at its
/// final value.
#[must_use]
pub fn learning_rate(train: &Train, step: u64) -> f64 {
    let warmup = u64::from(train.warmup_steps);
    if step < warmup {
        return train.lr * (step + 1) as f64 / warmup as f64;
    }
    match train.lr_schedule {
        LrSchedule::Constant => train.lr,
        LrSchedule::Cosine => {
            let span = u64::from(train.steps).saturating_sub(warmup + 1).max(1);
            let part = ((step - warmup) as f64 / span as f64).min(1.0);
            train.min_lr
                + 0.5 * (train.lr - train.min_lr) * (1.0 + (std::f64::consts::PI * part).cos())
        }
    }
}

/// Returns the settings of step `step` (from 0).
#[must_use]
pub fn hyper(train: &Train, step: u64) -> Hyper {
    let groups = train.group_settings();
    Hyper {
        lr: learning_rate(train, step),
        betas: train.betas,
        eps: train.eps,
        muon: MuonSettings {
            momentum: train.muon_momentum,
            adjust_lr: train.muon_adjust_lr,
        },
        weight_decay: train.weight_decay,
        clip_norm: train.clip_norm,
        step: step + 1,
        groups: std::array::from_fn(|group| groups.get(group + 1).copied()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::testing::{BASE, scenario_of};

    #[test]
    fn warm_up_then_half_a_cosine() {
        let set = [
            "train.lr=0.8",
            "train.min_lr=0.2",
            "train.lr_schedule=cosine",
            "train.warmup_steps=4",
            "train.steps=9",
        ];
        let train = scenario_of(BASE[0], &set.map(String::from)).train;
        let rates: Vec<f64> = (0..11).map(|s| learning_rate(&train, s)).collect();
        let expected = [
            0.2,
            0.4,
            0.6,
            0.8, // rising
            0.8,
            0.712_132_034_355_964_3,
            0.5,
            0.287_867_965_644_035_7,
            0.2, // falling
            0.2,
            0.2,
        ];
        for (got, want) in rates.iter().zip(expected) {
            assert!((got - want).abs() < 1e-12, "{rates:?}");
        }
    }

    #[test]
    fn constant_by_default() {
        let train = scenario_of(BASE[0], &[]).train;
        assert_eq!(learning_rate(&train, 0), 3e-4);
        assert_eq!(learning_rate(&train, 10_000), 3e-4);
        assert_eq!(hyper(&train, 4).step, 5);
    }
}
