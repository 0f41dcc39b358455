//! Writes a new file of a framework for a scenario.

use super::edit::Document;
use super::{Unexpressed, rules};
use crate::error::ConfigError;
use crate::formats::{ACCELERATE, DEEPSPEED, MEGATRON, TORCHTITAN, TRAINER};
use crate::table::Format;
use shardlab_plan::Scenario;
use shardlab_plan::config::{PolicyKind, RecomputeLayers, Reshard, Strategy};
use std::fmt::Write;

/// The frameworks for which new files can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A YAML file of Accelerate.
    Accelerate,
    /// A YAML file with arguments of the Hugging Face Trainer.
    Trainer,
    /// A TOML file of torchtitan.
    Torchtitan,
    /// A shell script that starts Megatron-LM.
    Megatron,
    /// A JSON file of DeepSpeed.
    DeepSpeed,
}

impl Form {
    fn format(self) -> &'static Format {
        match self {
            Self::Accelerate => &ACCELERATE,
            Self::Trainer => &TRAINER,
            Self::Torchtitan => &TORCHTITAN,
            Self::Megatron => &MEGATRON,
            Self::DeepSpeed => &DEEPSPEED,
        }
    }

    /// Returns the name that jobs use for the framework.
    #[must_use]
    pub fn framework(self) -> &'static str {
        self.format().name
    }

    fn ending(self) -> &'static str {
        match self {
            Self::Accelerate | Self::Trainer => "yaml",
            Self::Torchtitan => "toml",
            Self::Megatron => "sh",
            Self::DeepSpeed => "json",
        }
    }

    /// Returns the fixed keys of the framework, which no scenario key decides.
    ///
    /// # Errors
    /// Fails if the framework has no option for the policy.
    fn frame(self, s: &Scenario) -> Result<String, ConfigError> {
        let world = s.mesh.world();
        let nodes = world.div_ceil(s.mesh.gpus_per_node.max(1));
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = match self {
            Self::Accelerate => writeln!(
                text,
                "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: {nodes}\nnum_processes: {world}\n\
                 fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
            ),
            Self::Trainer => writeln!(
                text,
                "output_dir: output\nmax_length: {}\nfsdp: true\nfsdp_config:\n  version: 2\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP",
                s.train.seq_len
            ),
            Self::Torchtitan => writeln!(text, "[training]\nseq_len = {}", s.train.seq_len),
            Self::DeepSpeed => writeln!(
                text,
                "{{\n  \"zero_optimization\": {{\n    \"stage\": 3\n  }},\n  \"bf16\": {{\n    \"enabled\": false\n  }}\n}}"
            ),
            Self::Megatron => megatron(&mut text, s, nodes, megatron_flags(s)?),
        };
        Ok(text)
    }
}

/// Returns Megatron-LM's options for the policy. Its own optimizer shards as ZeRO-1 or not at all.
///
/// # Errors
/// Fails if Megatron-LM has no such policy.
fn megatron_flags(s: &Scenario) -> Result<&'static str, ConfigError> {
    Ok(match (s.fsdp.policy, s.fsdp.strategy) {
        (PolicyKind::Megatron, _) => "--use-megatron-fsdp",
        (PolicyKind::MegatronV2, _) => "--use-megatron-fsdp --megatron-fsdp-version 2",
        (PolicyKind::Fsdp2, _) => "--use-torch-fsdp2",
        (PolicyKind::Native, Strategy::NoShard) => "",
        (PolicyKind::Native, Strategy::Optim) => "--use-distributed-optimizer",
        (PolicyKind::Native, strategy @ (Strategy::OptimGrads | Strategy::OptimGradsParams)) => {
            return Err(ConfigError::Missing(format!(
                "Megatron-LM has no counterpart of fsdp.policy = \"native\" with fsdp.strategy = \"{}\": \
                 choose fsdp.policy = \"megatron\" or \"fsdp2\"",
                strategy.name()
            )));
        }
    })
}

fn megatron(text: &mut String, s: &Scenario, nodes: u32, fsdp: &str) -> std::fmt::Result {
    let m = &s.model;
    writeln!(
        text,
        "#!/bin/bash\ntorchrun --nnodes {nodes} --nproc-per-node {} pretrain_gpt.py \\\n  \
         --num-layers {} --hidden-size {} --ffn-hidden-size {} --num-attention-heads {} \\\n  \
         --group-query-attention --num-query-groups {} --seq-length {} --max-position-embeddings {} \\\n  \
         {fsdp} --bf16",
        s.mesh.gpus_per_node.min(s.mesh.world()),
        m.layers,
        m.hidden,
        m.ffn,
        m.heads,
        m.kv_heads,
        s.train.seq_len,
        s.train.seq_len,
    )
}

/// Returns the scenario keys that frameworks have options for, with their values in TOML.
fn options(s: &Scenario) -> Vec<(&'static str, String)> {
    let layers = match &s.train.recompute_layers {
        RecomputeLayers::All => "all".to_owned(),
        RecomputeLayers::First(n) => n.to_string(),
        RecomputeLayers::Patterns(globs) => format!("{globs:?}"),
    };
    let reshard = match s.fsdp.reshard_after_forward {
        Reshard::Always => "true".to_owned(),
        Reshard::Never => "false".to_owned(),
        Reshard::Auto => "auto".to_owned(),
        Reshard::Group(n) => n.to_string(),
    };
    let word = |text: &str| text.to_owned();
    vec![
        ("train.micro_batch", s.train.micro_batch.to_string()),
        ("train.grad_accum", s.train.grad_accum.to_string()),
        ("train.recompute", word(s.train.recompute.name())),
        ("train.recompute_layers", layers),
        ("train.loss", word(s.train.loss.name())),
        ("train.clip_norm", format!("{:?}", s.train.clip_norm)),
        ("mesh.dp_shard", s.mesh.dp_shard.to_string()),
        ("mesh.dp_replicate", s.mesh.dp_outer.to_string()),
        ("fsdp.strategy", word(s.fsdp.strategy.name())),
        ("fsdp.outer_strategy", word(s.fsdp.outer_strategy.name())),
        ("fsdp.reshard_after_forward", reshard),
        ("compile.mode", word(s.compile.mode.name())),
        ("precision.param_dtype", word(s.precision.compute.name())),
        (
            "precision.reduce_dtype",
            word(s.precision.comm_grads.name()),
        ),
    ]
}

/// Writes a scenario as a new file of a framework. `changes` are overrides in the syntax of `--set`
/// that the file should express. Returns the text, and the changes that it does not express.
///
/// # Errors
/// Fails if the written text cannot be read again.
pub fn fresh(
    form: Form,
    scenario: &Scenario,
    changes: &[String],
) -> Result<(String, Vec<Unexpressed>), ConfigError> {
    let path = format!("job.{}", form.ending());
    let mut document = Document::new(path.into(), form.frame(scenario)?, form.format())?;
    let mut lost = Vec::new();
    let options = options(scenario);
    for (key, value) in &options {
        let has = |path: &str| document.has(path);
        let pairs = rules::pairs(document.format, key, value, scenario, &has);
        let changed = changes
            .iter()
            .any(|set| set.split_once('=').is_some_and(|(k, _)| k == *key));
        let why = match pairs {
            Some(pairs) => pairs
                .iter()
                .try_for_each(|(path, value)| document.set(path, value))
                .err(),
            None => changed.then(|| "no counterpart".to_owned()),
        };
        lost.extend(why.map(|why| Unexpressed {
            set: format!("{key}={value}"),
            why,
        }));
    }
    let is_option = |set: &str| {
        options
            .iter()
            .any(|(k, _)| set.starts_with(&format!("{k}=")))
    };
    lost.extend(
        changes
            .iter()
            .filter(|set| !is_option(set))
            .map(|set| Unexpressed {
                set: set.clone(),
                why: "no counterpart".to_owned(),
            }),
    );
    Ok((document.text, lost))
}
