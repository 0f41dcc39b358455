//! Adapters that PEFT adds to routers and experts.

use super::{Kind, Warning};
use shardlab_plan::Scenario;
use shardlab_plan::config::{Lora, LoraTargets, Model};
use shardlab_plan::units::count;

/// Leaf names by which PEFT finds routers and experts, as their layers were called before version 5
/// of transformers.
const ROUTERS: [&str; 1] = ["gate"];
const INPUTS: [&str; 4] = ["gate_proj", "up_proj", "w1", "w3"];
const OUTPUTS: [&str; 2] = ["down_proj", "w2"];

/// Warns if the targets of adapters include routers or experts. PEFT 0.21 gives them adapters
/// (`_convert_peft_config_moe`), which are not planned.
pub(super) fn of_experts(s: &Scenario) -> Option<Warning> {
    let lora = s.lora.as_ref()?;
    let layers = s.model.expert_layers();
    let targets = Targets::of(lora);
    if layers == 0 || !targets.any() {
        return None;
    }
    let more = targets.params(lora, &s.model) * layers;
    Some(Warning {
        kind: Kind::ExpertAdapters,
        message: format!(
            "PEFT 0.21 also adds adapters to {}, for types such as Qwen3 MoE and Mixtral: about {} trained parameters \
             that are not planned. For a job without them, name the attention projections in target_modules: \
             [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]",
            targets.words(),
            count(more)
        ),
        key: Some("lora.target_modules"),
        place: None,
        set: Vec::new(),
    })
}

/// Which parts of layers with experts are targets.
struct Targets {
    router: bool,
    inputs: bool,
    outputs: bool,
}

impl Targets {
    fn of(lora: &Lora) -> Self {
        // PEFT replaces targets by their last component, in all layers.
        let has = |names: &[&str]| match &lora.targets {
            LoraTargets::AllLinear => true,
            LoraTargets::Selected(selector) => names.iter().any(|name| {
                let path = format!("model.layers.0.mlp.{name}");
                let inside = format!("model.layers.0.mlp.experts.{name}");
                selector.has([name, &path]) || selector.has([name, &inside])
            }),
        };
        Self {
            router: has(&ROUTERS),
            inputs: has(&INPUTS),
            outputs: has(&OUTPUTS),
        }
    }

    fn any(&self) -> bool {
        self.router || self.inputs || self.outputs
    }

    /// Returns the number of parameters in a layer. PEFT doubles the rank of the stacked gate and
    /// up projections, which are one parameter.
    fn params(&self, lora: &Lora, model: &Model) -> u64 {
        let of = &model.options.experts;
        let (hidden, ffn) = (model.hidden, of.expert_ffn.unwrap_or(model.ffn));
        let part = |is: bool, size: u64| if is { size } else { 0 };
        let experts = part(self.inputs, 2 * (hidden + 2 * ffn)) + part(self.outputs, ffn + hidden);
        lora.r * (part(self.router, hidden + of.experts) + of.experts * experts)
    }

    fn words(&self) -> &'static str {
        match (self.router, self.inputs || self.outputs) {
            (true, true) => "routers and stacked expert weights",
            (true, false) => "routers",
            (false, _) => "stacked expert weights",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario;
    use std::path::Path;

    fn of(set: &[&str]) -> Option<String> {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = scenario::load(Path::new("small-moe"), &set).unwrap();
        of_experts(&scenario).map(|w| w.message)
    }

    /// PEFT 0.21 counts 996,507,648 trained parameters for Qwen3-30B-A3B with rank 16, of which
    /// attention has 13,369,344.
    #[test]
    fn parameters_are_those_of_peft() {
        let mut model = scenario::load(Path::new("small-moe"), &[]).unwrap().model;
        model.hidden = 2048;
        model.options.experts.experts = 128;
        model.options.experts.expert_ffn = Some(768);
        let lora = Lora::of_rank(16);
        let layer = Targets::of(&lora).params(&lora, &model);
        assert_eq!(48 * layer, 996_507_648 - 13_369_344);
    }

    #[test]
    fn targets_decide_what_is_left_out() {
        let message = of(&["lora.r=4"]).unwrap();
        let words = "PEFT 0.21 also adds adapters to routers and stacked expert weights, for types";
        assert!(message.starts_with(words), "{message}");
        assert_eq!(of(&["lora.r=4", "lora.target_modules=[\"q_proj\"]"]), None);
        assert_eq!(of(&[]), None);
    }
}
