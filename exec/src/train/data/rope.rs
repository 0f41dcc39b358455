//! Tables of rotary embeddings.
//!
//! Frequencies and their scaling follow `modeling_rope_utils.py` of transformers 5, in float32
//! where that is.

use shardlab_plan::config::{Model, RopeScaling, RopeType};
use std::f64::consts::TAU;

/// The frequencies of a rotary embedding, and the factor of its cosines and sines.
pub(super) struct Frequencies {
    pub(super) each: Vec<f32>,
    pub(super) factor: f32,
}

impl Frequencies {
    /// Computes the frequencies of `pairs` pairs for sequences of `seq` positions. Those of layers
    /// with a window (`local`) have a base of their own and are not scaled.
    pub(super) fn new(m: &Model, pairs: u64, seq: u64, local: bool) -> Self {
        let base = match m.options.positions.rope_local_theta {
            Some(base) if local => base,
            _ => m.rope_theta,
        };
        let plain = Self {
            each: powers(base, pairs),
            factor: 1.0,
        };
        match &m.options.positions.rope_scaling {
            Some(scaling) if !local => scaled(plain, scaling, m, base, seq),
            _ => plain,
        }
    }
}

/// Returns `1 / base^(i / pairs)`, in float32 throughout, like the usual implementations.
fn powers(base: f64, pairs: u64) -> Vec<f32> {
    let one = |i: u64| 1.0 / (base as f32).powf(i as f32 / pairs as f32);
    (0..pairs).map(one).collect()
}

fn scaled(plain: Frequencies, by: &RopeScaling, m: &Model, base: f64, seq: u64) -> Frequencies {
    let each = plain.each;
    let pairs = each.len() as u64;
    let factor = by.factor.unwrap_or(1.0);
    let longest = m.max_seq_len as f64;
    let original = by.original_max_position_embeddings.unwrap_or(longest);
    let divided = |f: &f32| f / factor as f32;
    match by.rope_type {
        RopeType::Linear => Frequencies {
            each: each.iter().map(divided).collect(),
            factor: 1.0,
        },
        RopeType::Dynamic => {
            let dims = 2.0 * pairs as f64;
            let length = (seq as f64).max(longest);
            let grown = (factor * length / longest - (factor - 1.0)).powf(dims / (dims - 2.0));
            Frequencies {
                each: powers(base * grown, pairs),
                factor: 1.0,
            }
        }
        RopeType::Llama3 => {
            let low = by.low_freq_factor.unwrap_or(1.0);
            let high = by.high_freq_factor.unwrap_or(4.0);
            let one = |f: &f32| {
                let wavelength = TAU / f64::from(*f);
                if wavelength < original / high {
                    return *f;
                }
                if wavelength > original / low {
                    return divided(f);
                }
                let smooth = (original / wavelength - low) / (high - low);
                let mixed = (1.0 - smooth) / factor + smooth;
                (mixed * f64::from(*f)) as f32
            };
            Frequencies {
                each: each.iter().map(one).collect(),
                factor: 1.0,
            }
        }
        RopeType::Yarn => yarn(&each, by, base, factor, original),
        RopeType::Longrope => {
            let long = seq as f64 > original;
            let divisors = if long {
                &by.long_factor
            } else {
                &by.short_factor
            };
            let by_default = match factor <= 1.0 {
                true => 1.0,
                false => (1.0 + factor.ln() / original.ln()).sqrt(),
            };
            let one = |(f, d): (&f32, &f64)| f / *d as f32;
            Frequencies {
                each: each.iter().zip(divisors).map(one).collect(),
                factor: by.attention_factor.unwrap_or(by_default) as f32,
            }
        }
    }
}

/// Mixes scaled and unscaled frequencies by a ramp over the dimensions, between those that make
/// `beta_fast` and `beta_slow` rotations over the original length.
fn yarn(each: &[f32], by: &RopeScaling, base: f64, factor: f64, original: f64) -> Frequencies {
    let dims = 2.0 * each.len() as f64;
    let temperature = |scale: f64| match factor <= 1.0 {
        true => 1.0,
        false => 0.1 * scale * factor.ln() + 1.0,
    };
    let by_default = match (by.mscale, by.mscale_all_dim) {
        (Some(some), Some(all)) if some != 0.0 && all != 0.0 => {
            temperature(some) / temperature(all)
        }
        _ => temperature(1.0),
    };
    let dimension = |rotations: f64| dims * (original / (rotations * TAU)).ln() / (2.0 * base.ln());
    let (first, last) = (
        dimension(by.beta_fast.unwrap_or(32.0)),
        dimension(by.beta_slow.unwrap_or(1.0)),
    );
    let (first, last) = match by.truncate.unwrap_or(true) {
        true => (first.floor(), last.ceil()),
        false => (first, last),
    };
    let (low, high) = (first.max(0.0), last.min(dims - 1.0));
    let span = if low == high { 0.001 } else { high - low };
    let one = |(i, f): (usize, &f32)| {
        let scaled = ((i as f64 - low) / span).clamp(0.0, 1.0) as f32;
        f / factor as f32 * scaled + f * (1.0 - scaled)
    };
    Frequencies {
        each: each.iter().enumerate().map(one).collect(),
        factor: by.attention_factor.unwrap_or(by_default) as f32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario;

    /// Frequencies of `ROPE_INIT_FUNCTIONS` of transformers 5.17: heads of 16 elements, at most 256
    /// positions, sequences of 64 positions unless another length is given.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
        let short = "short_factor = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]";
        let long = "long_factor = [2, 3, 4, 5, 6, 7, 8, 9]";
        let longrope = format!(
            "rope_type = \"longrope\", factor = 4, original_max_position_embeddings = 64, {short}, {long}"
        );
        let cases = [
            (
                "rope_type = \"linear\", factor = 4.0",
                64,
                [0.25, 0.025, 7.905_694_656e-5],
                1.0,
            ),
            (
                "rope_type = \"dynamic\", factor = 2.0",
                512,
                [1.0, 0.073_059_998_45, 1.054_092_572e-4],
                1.0,
            ),
            (
                "rope_type = \"llama3\", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 64",
                64,
                [1.0, 0.013_042_256_24, 3.952_847_328e-5],
                1.0,
            ),
            (
                "rope_type = \"yarn\", factor = 4.0, original_max_position_embeddings = 64",
                64,
                [1.0, 0.049_999_997_02, 7.905_694_656e-5],
                1.138_629_436,
            ),
            (
                "rope_type = \"yarn\", factor = 40.0, mscale = 0.707, mscale_all_dim = 1.0, beta_fast = 16, beta_slow = 2, original_max_position_embeddings = 64",
                64,
                [1.0, 0.0025, 7.905_694_474e-6],
                0.921_042_355_3,
            ),
            (
                "rope_type = \"yarn\", factor = 4.0, original_max_position_embeddings = 64, truncate = false",
                64,
                [1.0, 0.025_595_249_608, 7.905_694_656e-5],
                1.138_629_436,
            ),
            (
                &longrope,
                32,
                [1.0, 0.083_333_335_82, 1.860_163_320e-4],
                1.154_700_538,
            ),
            (
                &longrope,
                128,
                [0.5, 0.025, 3.513_641_786e-5],
                1.154_700_538,
            ),
        ];
        for (scaling, seq, [first, third, last], factor) in cases {
            let text = format!(
                "model = {{ family = \"llama\", hidden = 32, heads = 2, layers = 1, vocab = 16, max_seq_len = 256, rope_scaling = {{ {scaling} }} }}\n\
                 train = {{ seq_len = 64 }}\n\
                 mesh = {{ hardware = \"cpu\", dp_shard = 1 }}\n"
            );
            let s = scenario::parse("rope", &text, &[]).unwrap();
            let f = Frequencies::new(&s.model, 8, seq, false);
            let found = [f.each[0], f.each[2], f.each[7]].map(f64::from);
            let same = found
                .iter()
                .zip([first, third, last])
                .all(|(a, b)| near(*a, b));
            assert!(same, "{scaling}: {found:?}");
            assert!(near(f64::from(f.factor), factor), "{scaling}: {}", f.factor);
        }
    }
}
