//! `[lora]`: low-rank adapters (LoRA), with the keys of PEFT's `LoraConfig`.

use super::expression::{Expression, Patterns};
use super::module_selector::{ModuleSelector, saves};
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
    /// Layers among them that have none.
    #[serde(
        rename = "exclude_modules",
        skip_serializing_if = "ModuleSelector::is_empty"
    )]
    pub exclude: ModuleSelector,
    /// Numbers of the blocks that have adapters; all blocks if it is empty.
    #[serde(rename = "layers_to_transform", skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<u64>,
    /// Names of the lists of blocks that `layers` counts; the first numbered list of a path if it
    /// is empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers_pattern: Vec<Expression>,
    /// Ranks of layers that have another than `r`.
    #[serde(skip_serializing_if = "Patterns::is_empty")]
    pub rank_pattern: Patterns<u64>,
    /// Numerators of layers that have another than `alpha`.
    #[serde(skip_serializing_if = "Patterns::is_empty")]
    pub alpha_pattern: Patterns<f64>,
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

/// The adapter of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerAdapter {
    /// Rank.
    pub r: u64,
    /// Numerator of the scaling.
    pub alpha: f64,
    /// Factor of its result.
    pub scaling: f64,
}

impl Lora {
    /// Returns adapters of this rank on all linear layers, with PEFT's defaults.
    #[must_use]
    pub fn of_rank(r: u64) -> Self {
        Self {
            r,
            alpha: 8.0,
            targets: LoraTargets::AllLinear,
            exclude: ModuleSelector::default(),
            layers: Vec::new(),
            layers_pattern: Vec::new(),
            rank_pattern: Patterns::default(),
            alpha_pattern: Patterns::default(),
            dropout: 0.0,
            use_rslora: false,
            use_dora: false,
            modules_to_save: Vec::new(),
        }
    }

    /// Returns the adapter of the linear layer with these paths (in this project and in Hugging
    /// Face's code), if it has one.
    #[must_use]
    pub fn adapter(&self, paths: [&str; 2]) -> Option<LayerAdapter> {
        if !self.adapts(paths) {
            return None;
        }
        let r = self.rank_pattern.of(&paths).unwrap_or(self.r);
        let alpha = self.alpha_pattern.of(&paths).unwrap_or(self.alpha);
        let divisor = r as f64;
        let scaling = alpha
            / if self.use_rslora {
                divisor.sqrt()
            } else {
                divisor
            };
        Some(LayerAdapter { r, alpha, scaling })
    }

    /// Returns whether a layer has an adapter (`check_target_module_exists` of PEFT). A path that
    /// is listed in full has one in any block.
    fn adapts(&self, paths: [&str; 2]) -> bool {
        let listed = match &self.targets {
            LoraTargets::AllLinear => false,
            LoraTargets::Selected(selector) => selector.lists(paths),
        };
        !self.exclude.has(paths)
            && (listed || self.targets.has(paths) && self.is_in_layers(paths[1]))
    }

    /// Returns whether the layer with this path in Hugging Face's code is in one of the blocks that
    /// have adapters.
    #[must_use]
    pub fn is_in_layers(&self, path: &str) -> bool {
        self.layers.is_empty()
            || self
                .block_of(path)
                .is_some_and(|n| self.layers.contains(&n))
    }

    /// Returns the number that `layers` gives the block of a layer with this path in Hugging Face's
    /// code: the first number after a list that `layers_pattern` names, or without names after any
    /// list that is inside another module.
    #[must_use]
    pub fn block_of(&self, path: &str) -> Option<u64> {
        if self.layers_pattern.is_empty() {
            let parts: Vec<&str> = path.split('.').collect();
            let numbers = parts.get(2..parts.len() - 1)?;
            return numbers.iter().find_map(|part| part.parse().ok());
        }
        let named = self.layers_pattern.iter();
        named.into_iter().find_map(|list| list.number_in(path))
    }

    /// Returns whether the module with these paths (in this project and in Hugging Face's code) is
    /// trained in full.
    #[must_use]
    pub fn saves(&self, paths: [&str; 2]) -> bool {
        self.modules_to_save.iter().any(|glob| saves(glob, paths))
    }
}

/// `lora.target_modules`.
#[derive(Clone, Debug, PartialEq)]
pub enum LoraTargets {
    /// All linear layers of the blocks, without the output projection.
    AllLinear,
    /// Layers that are selected by their paths.
    Selected(ModuleSelector),
}

/// Writes the value in the form of scenario files.
impl Serialize for LoraTargets {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::AllLinear => to.serialize_str("all-linear"),
            Self::Selected(selector) => selector.serialize(to),
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
            Self::Selected(selector) => selector.has(paths),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: [&str; 2] = ["layers.3.attention.q", "model.layers.3.self_attn.q_proj"];

    #[test]
    fn scaling_divides_by_the_rank_or_its_root() {
        let mut lora = Lora {
            alpha: 32.0,
            modules_to_save: vec!["norm".to_owned()],
            ..Lora::of_rank(16)
        };
        assert!(lora.saves(["layers.0.norm_1", "model.layers.0.input_layernorm"]));
        assert!(!lora.saves(["output", "lm_head"]));
        let scaling = |lora: &Lora| lora.adapter(Q).unwrap().scaling;
        assert_eq!(scaling(&lora), 2.0);
        lora.use_rslora = true;
        assert_eq!(scaling(&lora), 8.0);
        lora.rank_pattern = Patterns::new([("q_proj", 64)]).unwrap();
        assert_eq!(scaling(&lora), 4.0);
        lora.alpha_pattern = Patterns::new([("layers.3.attention.*", 16.0)]).unwrap();
        assert_eq!(scaling(&lora), 2.0);
    }

    /// The answers are those of `check_target_module_exists` of PEFT 0.21.
    #[test]
    fn adapters_are_where_peft_puts_them() {
        let pattern = |name: &str| ModuleSelector::Patterns(vec![name.to_owned()]);
        let named = |name: &str| LoraTargets::Selected(pattern(name));
        let has = |lora: &Lora| lora.adapter(Q).is_some();
        let mut lora = Lora {
            targets: named("q_proj"),
            layers: vec![3],
            ..Lora::of_rank(8)
        };
        assert!(has(&lora));
        lora.layers = vec![2];
        assert!(!has(&lora));
        // A full path is a target in any block.
        lora.targets = named(Q[1]);
        assert!(has(&lora));
        lora.targets = named("q_proj");
        lora.layers = vec![3];
        lora.layers_pattern = vec![Expression::of_list("h").unwrap()];
        assert!(!has(&lora));
        lora.layers_pattern = vec![Expression::of_list("layers").unwrap()];
        assert!(has(&lora));
        lora.exclude = pattern("self_attn.q_proj");
        assert!(!has(&lora));
        // A containing module is not a layer.
        lora.exclude = pattern("self_attn");
        assert!(has(&lora));
        lora.exclude = ModuleSelector::Expression(Expression::of_path(".*self_attn.*").unwrap());
        assert!(!has(&lora));
    }

    /// The list has to be inside another module, and the first number counts.
    #[test]
    fn blocks_are_found_as_in_peft() {
        let lora = Lora::of_rank(8);
        assert_eq!(lora.block_of("h.3.attn.c_attn"), None);
        assert_eq!(lora.block_of("transformer.h.3.attn.c_attn"), Some(3));
        assert_eq!(lora.block_of("model.layers.1.mlp.experts.7.w1"), Some(1));
        assert_eq!(lora.block_of("lm_head"), None);
    }
}
