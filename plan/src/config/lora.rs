//! `[lora]`: low-rank adapters (LoRA), with the keys of PEFT's `LoraConfig`.

use super::pattern::matches;
use serde::{Serialize, Serializer};

/// Low-rank adapters: a linear layer `W` of shape `[out, in]` also gets `A` of shape `[r, in]` and
/// `B` of shape `[out, r]`, and computes `W x + scaling * B A x`. Only `A` and `B` are trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lora {
    /// Rank.
    pub r: u64,
    /// Numerator of the scaling.
    #[serde(rename = "lora_alpha")]
    pub alpha: f64,
    /// Linear layers that have adapters.
    #[serde(rename = "target_modules")]
    pub targets: LoraTargets,
    /// Dropout probability of an adapter's input, in the code of transformers.
    #[serde(rename = "lora_dropout")]
    pub dropout: f64,
    /// The scaling divides by the square root of the rank (rank-stabilized LoRA).
    pub use_rslora: bool,
    /// The rows of `W + scaling * B A` have a learned magnitude (DoRA).
    pub use_dora: bool,
    /// Globs of modules that are trained in full, in addition to the adapters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub modules_to_save: Vec<String>,
}

impl Lora {
    /// Returns the scaling of an adapter's result.
    #[must_use]
    pub fn scaling(&self) -> f64 {
        let r = self.r as f64;
        self.alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// Returns whether the module with these paths (in this project and in Hugging Face's code) is
    /// trained in full.
    #[must_use]
    pub fn saves(&self, paths: [&str; 2]) -> bool {
        self.modules_to_save.iter().any(|glob| saves(glob, paths))
    }
}

/// `lora.target_modules`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoraTargets {
    /// All linear layers of the blocks, without the output projection.
    AllLinear,
    /// Layers that a glob matches.
    Patterns(Vec<String>),
}

/// Writes the value in the form of scenario files.
impl Serialize for LoraTargets {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::AllLinear => to.serialize_str("all-linear"),
            Self::Patterns(globs) => globs.serialize(to),
        }
    }
}

impl LoraTargets {
    /// Returns whether the layer with these paths (in this project and in Hugging Face's code) has
    /// adapters.
    #[must_use]
    pub fn has(&self, paths: [&str; 2]) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Patterns(globs) => globs.iter().any(|glob| targets(glob, paths)),
        }
    }
}

/// Returns whether a glob selects a layer: it matches the last components of either path, as PEFT
/// compares names (`key == target or key.endswith("." + target)`).
pub(crate) fn targets(glob: &str, paths: [&str; 2]) -> bool {
    paths.iter().any(|path| {
        let ends = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
        ends.chain([*path]).any(|end| matches(glob, end))
    })
}

/// Returns whether a glob selects a module for `modules_to_save`: either path ends with it, as PEFT
/// compares names (`key.endswith(name)`), so `norm` also matches `input_layernorm`.
pub(crate) fn saves(glob: &str, paths: [&str; 2]) -> bool {
    targets(&format!("*{glob}"), paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_the_end_of_either_path() {
        let q = ["layers.3.attention.q", "model.layers.3.self_attn.q_proj"];
        for glob in [
            "q",
            "q_proj",
            "*_proj",
            "attention.q",
            "self_attn.*",
            "layers.*.attention.q",
            "layers.3.attention.*",
            "model.layers.*.self_attn.q_proj",
        ] {
            assert!(targets(glob, q), "{glob}");
        }
        for glob in [
            "proj",
            "attention",
            "layers.4.attention.q",
            "k_proj",
            "layers.*",
        ] {
            assert!(!targets(glob, q), "{glob}");
        }
    }

    #[test]
    fn scaling_divides_by_the_rank_or_its_root() {
        let mut lora = Lora {
            r: 16,
            alpha: 32.0,
            targets: LoraTargets::AllLinear,
            dropout: 0.0,
            use_rslora: false,
            use_dora: false,
            modules_to_save: vec!["norm".to_owned()],
        };
        assert!(lora.saves(["layers.0.norm_1", "model.layers.0.input_layernorm"]));
        assert!(!lora.saves(["output", "lm_head"]));
        assert_eq!(lora.scaling(), 2.0);
        lora.use_rslora = true;
        assert_eq!(lora.scaling(), 8.0);
    }
}
