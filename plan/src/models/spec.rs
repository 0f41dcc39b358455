//! Facts about a family that are known without tracing its forward pass.

use super::Forward;
use super::declare::{Declare, Weights};
use super::hf::HfType;
use crate::config::{Bias, Family, Model, QkNorm};

/// Default for the maximum sequence length of a language model.
pub(crate) const DEFAULT_SEQ_LEN: u64 = 8192;

/// One sample of a family's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inputs {
    /// `seq_len` token ids, and as many labels.
    Tokens,
    /// `seq_len` rows of `hidden` features.
    Features,
    /// An image of `channels x height x width`.
    Images,
}

/// Positions that attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Earlier positions, and the query's own.
    Causal,
    /// All positions.
    Full,
}

/// A dimension of a model, with the name of its key.
pub type Dimension = fn(&Model) -> (&'static str, u64);

/// A family of models.
pub struct FamilySpec {
    /// The family.
    pub family: Family,
    /// Name in scenario files.
    pub name: &'static str,
    /// Keys of `[model]` that apply to it, in addition to `family`, `layers` and `bias`.
    pub keys: &'static [&'static str],
    /// Defaults of keys.
    pub defaults: Defaults,
    /// Kind of its inputs.
    pub inputs: Inputs,
    /// Its attention, if it has any.
    pub attention: Option<Mask>,
    /// Sizes that tensor parallelism divides evenly, with their keys; `None` for families without
    /// it.
    pub tensor_parallel: Option<Dimension>,
    /// What expert parallelism divides evenly, with its key; `None` for families without experts.
    pub expert_parallel: Option<Dimension>,
    /// Whether its code consists of `torch.nn` modules. Dynamo skips frames of such modules that
    /// have hooks.
    pub torch_modules: bool,
    /// Whether its models keep their `model_type`, which determines the names of weights and, for
    /// some types, computations.
    pub keeps_type: bool,
    /// Initialization of its weights.
    pub(crate) weights: Weights,
    /// Types of transformers that it covers.
    pub hf: &'static [HfType],
    /// Inner dimensions of its weights, by name.
    pub dimensions: fn(&Model) -> Vec<(&'static str, u64)>,
    /// Refuses values that exclude each other.
    pub(crate) check: fn(&Model) -> Result<(), Conflict>,
    /// Declares its modules; returns the code that traces its forward pass.
    pub(crate) declare: fn(&mut Declare, &Model) -> Box<dyn Forward>,
}

impl FamilySpec {
    /// Returns whether a key of `[model]` applies to the family.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.keys.contains(&key)
    }
}

/// Defaults of a family's keys.
pub struct Defaults {
    /// Which linear layers have a bias.
    pub bias: Bias,
    /// Whether embedding and head share one parameter.
    pub tie_embeddings: bool,
    /// Width of the feed-forward layer, from `hidden`.
    pub ffn: fn(u64) -> u64,
    /// Multiple to which a width scaled from a preset's is rounded up.
    pub ffn_multiple: u64,
    /// Number of positions, from the requested sequence length; `None`: as many as the sequence
    /// has.
    pub max_seq_len: fn(Option<u64>) -> Option<u64>,
    /// Sequence length, from the number of positions.
    pub seq_len: fn(Option<u64>) -> u64,
}

/// Values of keys of `[model]` that exclude each other.
#[derive(Debug)]
pub(crate) struct Conflict {
    /// The keys, starting with the one to blame.
    pub(crate) keys: &'static [&'static str],
    pub(crate) message: String,
    pub(crate) help: Option<&'static str>,
    /// Nearest legal value of a key, shown as the help if `help` is `None`.
    pub(crate) nearest: Option<(&'static str, u64)>,
}

impl Conflict {
    pub(super) fn new(keys: &'static [&'static str], message: String) -> Self {
        Self {
            keys,
            message,
            help: None,
            nearest: None,
        }
    }

    /// Refuses options that need separate layers for queries, keys and values.
    pub(super) fn packed_projections(m: &Model) -> Result<(), Self> {
        let family = m.family.name();
        if !matches!(m.bias, Bias::None | Bias::All) {
            let message = format!(
                "`bias` = {} needs separate query, key and value layers, which family {family} does not have",
                serde_json::to_value(m.bias).unwrap_or_default()
            );
            return Err(Self {
                help: Some("use true or false"),
                ..Self::new(&["bias", "family"], message)
            });
        }
        if m.options.attention.qk_norm != QkNorm::None {
            let message = format!(
                "`qk_norm` needs separate queries and keys, which family {family} does not have"
            );
            return Err(Self::new(&["qk_norm", "family"], message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::models::SPECS;
    use crate::scenario::keys;
    use std::collections::BTreeSet;

    #[test]
    fn every_family_has_one_spec_whose_keys_exist() {
        let mut seen = BTreeSet::new();
        for spec in SPECS {
            assert!(seen.insert(spec.name), "{} is there twice", spec.name);
            assert_eq!(spec.family.spec().name, spec.name);
            for key in spec.keys {
                let known = |k: &&crate::scenario::KeyInfo| k.section == "model" && k.key == *key;
                assert!(keys().iter().any(|k| known(&k)), "{}: {key}", spec.name);
            }
        }
        // The serialized name is that of scenario files.
        for spec in SPECS {
            let json = serde_json::to_value(spec.family).unwrap();
            assert_eq!(json, spec.name);
        }
    }
}
