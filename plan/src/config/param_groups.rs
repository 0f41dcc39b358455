//! Parameter groups of the optimizer, as `torch.optim` has them.

use super::Train;
use super::pattern::part_of;
use serde::{Deserialize, Serialize};

/// Maximum number of parameter groups with different settings in a scenario.
pub const MAX_PARAM_GROUPS: usize = 8;

/// An entry of `train.param_groups`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// Globs over names of parameters.
    #[serde(default)]
    pub params: Vec<String>,
    /// Weight decay; `None` for that of `train.weight_decay`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Factor of the learning rate.
    #[serde(default = "one")]
    pub lr_scale: f64,
}

fn one() -> f64 {
    1.0
}

impl ParamGroup {
    /// Returns whether a parameter with these names (in this project and, if any, in Hugging Face's
    /// code) is in the group.
    #[must_use]
    pub fn has<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> bool {
        let mut names = names.into_iter();
        names.any(|name| self.params.iter().any(|glob| part_of(glob, name)))
    }
}

/// Settings that the parameters of a group share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupSettings {
    /// Weight decay.
    pub weight_decay: f64,
    /// Factor of the learning rate.
    pub lr_scale: f64,
}

impl Train {
    /// Returns the distinct settings of parameter groups. The first are those of parameters that no
    /// glob matches.
    #[must_use]
    pub fn group_settings(&self) -> Vec<GroupSettings> {
        let groups = std::iter::once(None).chain(self.param_groups.iter().map(Some));
        let mut all: Vec<GroupSettings> = Vec::new();
        for settings in groups.flat_map(|g| [false, true].map(|vector| self.settings(g, vector))) {
            if !all.contains(&settings) {
                all.push(settings);
            }
        }
        all
    }

    /// Returns the index in [`Train::group_settings`] of a parameter with these names and number of
    /// dimensions. If several groups match it, the first one wins.
    #[must_use]
    pub(crate) fn group_of<'n>(
        &self,
        names: impl IntoIterator<Item = &'n str> + Clone,
        dimensions: usize,
    ) -> u8 {
        let group = self.param_groups.iter().find(|g| g.has(names.clone()));
        let settings = self.settings(group, dimensions < 2);
        let all = self.group_settings();
        all.iter().position(|s| *s == settings).unwrap_or(0) as u8
    }

    fn settings(&self, group: Option<&ParamGroup>, vector: bool) -> GroupSettings {
        let decays = self.decay_norms_and_biases || !vector;
        let default = if decays { self.weight_decay } else { 0.0 };
        GroupSettings {
            weight_decay: group.and_then(|g| g.weight_decay).unwrap_or(default),
            lr_scale: group.map_or(1.0, |g| g.lr_scale),
        }
    }
}
