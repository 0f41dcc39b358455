//! The golden runs as scenarios.

#![allow(dead_code, reason = "each test binary uses its part")]

use shardlab_exec::engine::ExecOptions;
use shardlab_exec::train::{self, NoObserver, Outcome, RunOptions, TokenWidth, Tokens};
use shardlab_plan::{Program, Scenario, scenario};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A golden model, with the scenario that reproduces its run.
pub(crate) struct Golden {
    pub(crate) name: &'static str,
}

pub(crate) static LLAMA: Golden = Golden { name: "llama-tiny" };
pub(crate) static GPT2: Golden = Golden { name: "gpt2-tiny" };
pub(crate) static QWEN3: Golden = Golden { name: "qwen3-tiny" };
pub(crate) static GPT_NEOX: Golden = Golden {
    name: "gpt-neox-tiny",
};
pub(crate) static GRANITE: Golden = Golden {
    name: "granite-tiny",
};

pub(crate) static MIXTRAL: Golden = Golden {
    name: "mixtral-tiny",
};
pub(crate) static MIXTRAL_AUX: Golden = Golden {
    name: "mixtral-tiny-aux",
};
pub(crate) static QWEN3_MOE: Golden = Golden {
    name: "qwen3-moe-small",
};
pub(crate) static DEEPSEEK_V3: Golden = Golden {
    name: "deepseek-v3-tiny",
};
pub(crate) static GPT_OSS: Golden = Golden {
    name: "gpt-oss-tiny",
};
pub(crate) static LLAMA4: Golden = Golden {
    name: "llama4-tiny",
};
pub(crate) static QWEN2_MOE: Golden = Golden {
    name: "qwen2-moe-tiny",
};
/// LoRA adapters on all linear layers, and on queries and values only (with rank-stabilized
/// scaling).
pub(crate) static LORA: Golden = Golden { name: "lora-tiny" };
pub(crate) static DORA: Golden = Golden { name: "dora-tiny" };
/// LoRA adapters on queries and values; tables and norms are trained in full.
pub(crate) static LORA_SAVED: Golden = Golden {
    name: "lora-saved-tiny",
};
/// LoRA adapters on some layers of two of three blocks, with ranks and scalings of their own.
pub(crate) static LORA_PATTERNS: Golden = Golden {
    name: "lora-patterns-tiny",
};
pub(crate) static LORA_QV: Golden = Golden {
    name: "lora-qv-tiny",
};
pub(crate) static GEMMA2: Golden = Golden {
    name: "gemma2-tiny",
};
pub(crate) static GEMMA3: Golden = Golden {
    name: "gemma3-tiny",
};
pub(crate) static BIOGPT: Golden = Golden {
    name: "biogpt-tiny",
};
pub(crate) static BITNET: Golden = Golden {
    name: "bitnet-tiny",
};
pub(crate) static XGLM: Golden = Golden { name: "xglm-tiny" };
pub(crate) static LLAMA3_ROPE: Golden = Golden {
    name: "llama3-rope-tiny",
};
pub(crate) static LONGROPE: Golden = Golden {
    name: "longrope-tiny",
};
pub(crate) static OLMO3: Golden = Golden { name: "olmo3-tiny" };
pub(crate) static GRANITE_SWA: Golden = Golden {
    name: "granite-swa-tiny",
};
pub(crate) static FLINT: Golden = Golden { name: "flint-tiny" };
pub(crate) static OLMO2: Golden = Golden { name: "olmo2-tiny" };
pub(crate) static PHI3: Golden = Golden { name: "phi3-tiny" };
pub(crate) static MISTRAL: Golden = Golden {
    name: "mistral-sliding",
};

/// Maximum relative difference of losses and gradient norms.
pub(crate) const TOLERANCE: f64 = 1e-4;

impl Golden {
    pub(crate) fn dir(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/goldens")
            .join(self.name)
    }

    pub(crate) fn reference(&self) -> serde_json::Value {
        self.recorded("reference.json")
    }

    /// Reads a recorded torch run.
    pub(crate) fn recorded(&self, file: &str) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.dir().join(file)).unwrap()).unwrap()
    }

    pub(crate) fn tokens(&self) -> Tokens {
        Tokens::read(&self.dir().join("tokens.bin"), TokenWidth::U16).unwrap()
    }

    /// Returns the shipped scenario with this name, or one built from the folder's `config.json`
    /// and the settings of its reference.
    pub(crate) fn scenario(&self, set: &[&str]) -> Scenario {
        if scenario::shipped()
            .iter()
            .any(|(name, _)| *name == self.name)
        {
            return load(self.name, set);
        }
        let r = self.reference();
        let text = format!(
            "model = {{ preset = {:?} }}\n\
             train = {{ seq_len = {}, micro_batch = {}, steps = {}, lr = {}, weight_decay = {}, clip_norm = {:?}, grad_norm = true }}\n\
             mesh = {{ hardware = \"cpu\", dp_shard = 1 }}\n\
             precision = {{ compute = \"f32\" }}\n",
            self.dir().join("config.json"),
            r["T"],
            r["B"],
            r["steps"],
            r["lr"],
            r["wd"],
            r["clip"].as_f64().unwrap(),
        );
        let text = text + &self.lora();
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        scenario::parse(self.name, &text, &set).unwrap_or_else(|e| panic!("{set:?}: {e}"))
    }

    fn adapter_config(&self) -> PathBuf {
        self.dir().join("adapter_config.json")
    }

    /// Returns the section for the adapters that PEFT's configuration describes, if there is one.
    fn lora(&self) -> String {
        let Ok(text) = std::fs::read(self.adapter_config()) else {
            return String::new();
        };
        let c: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let keys = [
            "r",
            "lora_alpha",
            "use_rslora",
            "use_dora",
            "target_modules",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "rank_pattern",
            "alpha_pattern",
            "modules_to_save",
        ];
        let given = keys.iter().filter(|key| !c[key].is_null());
        let lines = given.map(|key| format!("{key} = {}", in_toml(&c[key])));
        format!("lora = {{ {} }}\n", lines.collect::<Vec<_>>().join(", "))
    }

    /// Trains, starting with the golden weights.
    pub(crate) fn train(&self, set: &[&str], steps: Option<u64>, exec: ExecOptions) -> Outcome {
        let scenario = self.scenario(set);
        let options = RunOptions {
            steps,
            init: Some(self.dir()),
            adapter: self.adapter_config().exists().then(|| self.dir()),
            tokens: Some(self.tokens()),
            exec,
            ..RunOptions::default()
        };
        run(&scenario, options)
    }

    /// Trains and compares with torch's run: losses, gradient norms and, after all steps, parameter
    /// norms.
    ///
    /// # Panics
    /// Panics on a difference.
    pub(crate) fn matches(&self, set: &[&str], steps: Option<u64>) {
        self.matches_run(&self.reference(), set, steps);
    }

    /// Trains and compares with a torch run that starts with the same weights.
    ///
    /// # Panics
    /// Panics on a difference.
    pub(crate) fn matches_run(
        &self,
        reference: &serde_json::Value,
        set: &[&str],
        steps: Option<u64>,
    ) {
        let all = reference["steps"].as_u64().unwrap();
        let outcome = self.train(set, steps.or(Some(all)), ExecOptions::default());
        let list = |key: &str| -> Vec<f64> {
            reference[key]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_f64().unwrap())
                .collect()
        };
        let close = |what: &str, ours: f64, theirs: f64| {
            let off = (ours - theirs).abs() / theirs.abs().max(1e-12);
            assert!(
                off < TOLERANCE,
                "{} {set:?}: {what} is {ours}, not {theirs} (off {off:.1e})",
                self.name
            );
        };
        let n = steps.unwrap_or(all) as usize;
        assert_eq!(outcome.run.losses.len(), n);
        for (what, ours) in [
            ("losses", &outcome.run.losses),
            ("grad_norms", &outcome.run.grad_norms),
        ] {
            for (step, (ours, theirs)) in ours.iter().zip(list(what)).enumerate() {
                close(&format!("{what}[{step}]"), *ours, theirs);
            }
        }
        if steps.is_none() {
            let scenario = self.scenario(set);
            let program = shardlab_plan::plan(&scenario).unwrap();
            let names = train::hf::published_names(&program).unwrap();
            for (name, ours) in names.iter().zip(&outcome.weight_norms) {
                // In memory, transformers 5 uses another name for GPT-NeoX's head than in files.
                let loaded = in_memory(&name.replace("embed_out", "lm_head"));
                let norms = ["final_norms", "final_param_norms"];
                let theirs = norms
                    .iter()
                    .find_map(|key| reference[key][&loaded].as_f64());
                close(name, *ours, theirs.unwrap());
            }
        }
    }
}

/// Returns a value of JSON as one of TOML.
fn in_toml(value: &serde_json::Value) -> String {
    let Some(entries) = value.as_object() else {
        return value.to_string();
    };
    let entries = entries.iter().map(|(key, v)| format!("{key:?} = {v}"));
    format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
}

/// Returns the name that transformers 5 uses in memory for stacked experts. Files have a tensor per
/// expert, and other names for Mixtral's layers.
fn in_memory(name: &str) -> String {
    let name = name.replace("block_sparse_moe", "mlp");
    // The attention sinks of Flint.
    let name = name.replace("softmax_offset", "sinks");
    let stacks = [
        (".*.w1+w3.weight", ".gate_up_proj"),
        (".*.gate_proj+up_proj.weight", ".gate_up_proj"),
        (".*.w2.weight", ".down_proj"),
        (".*.down_proj.weight", ".down_proj"),
    ];
    let renamed = |(file, memory): &(&str, &str)| {
        let stack = name.strip_suffix(file)?;
        Some(format!("{stack}{memory}"))
    };
    stacks.iter().find_map(renamed).unwrap_or(name)
}

/// Returns options that detect reads of uninitialized memory.
pub(crate) fn poisoned() -> ExecOptions {
    ExecOptions {
        timeout: Duration::from_secs(120),
        poison: true,
        ..ExecOptions::default()
    }
}

pub(crate) fn load(name: &str, set: &[&str]) -> Scenario {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    scenario::load(Path::new(name), &set).unwrap_or_else(|e| panic!("{name} {set:?}: {e}"))
}

pub(crate) fn plan(scenario: &Scenario) -> Arc<Program> {
    Arc::new(shardlab_plan::plan(scenario).unwrap_or_else(|e| panic!("{}: {e}", scenario.name)))
}

pub(crate) fn run(scenario: &Scenario, options: RunOptions) -> Outcome {
    train::train(scenario, &plan(scenario), options, &mut NoObserver)
        .unwrap_or_else(|e| panic!("{}: {e}", scenario.name))
}
