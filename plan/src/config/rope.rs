//! Scaling of rotary frequencies.

use serde::{Deserialize, Serialize};

/// How rotary frequencies are changed for long sequences. The names and fields are those of
/// `rope_scaling` in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeType {
    /// Positions are divided by the factor.
    Linear,
    /// The base grows with the length of the sequence.
    Dynamic,
    /// Low frequencies are divided by the factor (Llama 3.1).
    Llama3,
    /// Low frequencies are divided by the factor, with a smooth transition and a temperature.
    Yarn,
    /// Each frequency has its own divisor (Phi-3).
    Longrope,
}

words!(RopeType {
    Linear = "linear",
    Dynamic = "dynamic",
    Llama3 = "llama3",
    Yarn = "yarn",
    Longrope = "longrope",
});

/// Parameters of a [`RopeType`]. `None` is the default of transformers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeScaling {
    /// Kind; linear if it is not given.
    #[serde(default = "linear")]
    pub rope_type: RopeType,
    /// Factor by which the context length grows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// Length before scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original_max_position_embeddings: Option<f64>,
    /// Divisor of the original length: longer wavelengths are scaled fully (`llama3`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low_freq_factor: Option<f64>,
    /// Divisor of the original length: shorter wavelengths are kept (`llama3`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high_freq_factor: Option<f64>,
    /// Rotations above which frequencies are kept (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta_fast: Option<f64>,
    /// Rotations below which frequencies are scaled fully (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta_slow: Option<f64>,
    /// The dimensions between which scaling starts and ends are rounded (`yarn`); `None`: yes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncate: Option<bool>,
    /// Factor of the cosines and sines (`yarn`, `longrope`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
    /// Temperature (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale: Option<f64>,
    /// Temperature of all dimensions (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale_all_dim: Option<f64>,
    /// Divisors up to the original length (`longrope`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub short_factor: Vec<f64>,
    /// Divisors beyond the original length (`longrope`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_factor: Vec<f64>,
}

fn linear() -> RopeType {
    RopeType::Linear
}

impl RopeScaling {
    /// Returns a description of the value that is missing for a rotary embedding with this many
    /// pairs of dimensions, if any.
    pub(crate) fn missing(&self, pairs: u64) -> Option<String> {
        let fields = [
            ("factor", self.factor),
            (
                "original_max_position_embeddings",
                self.original_max_position_embeddings,
            ),
            ("low_freq_factor", self.low_freq_factor),
            ("high_freq_factor", self.high_freq_factor),
        ];
        let needed = match self.rope_type {
            RopeType::Linear | RopeType::Dynamic => &fields[..1],
            RopeType::Yarn => &fields[..1],
            RopeType::Llama3 => &fields[..],
            RopeType::Longrope => &[],
        };
        if let Some((name, _)) = needed.iter().find(|(_, value)| value.is_none()) {
            return Some(format!("`{}` needs `{name}`", self.rope_type.name()));
        }
        let lists = [
            ("short_factor", &self.short_factor),
            ("long_factor", &self.long_factor),
        ];
        let wrong = lists.iter().find(|(_, list)| list.len() as u64 != pairs);
        let (name, list) = wrong.filter(|_| self.rope_type == RopeType::Longrope)?;
        let n = list.len();
        Some(format!(
            "`{name}` has {n} numbers, not one for each of {pairs} pairs"
        ))
    }
}
