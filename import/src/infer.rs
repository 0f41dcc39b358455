//! Writes the scenario that a trace shows, with a comment per line on how it was determined.

mod units;

pub use units::family_names;

use crate::facts::{Ahead, Compiled, Experts, Facts, Found, Model, Numbers, Recompute, Reshard};
use crate::kineto::Recorder;
use std::fmt::{Display, Write};

/// A scenario as text, and the keys that the trace does not determine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inferred {
    /// Text of the scenario file.
    pub text: String,
    /// Required keys that the trace does not determine, with reasons.
    pub missing: Vec<String>,
    /// Keys whose values are assumed.
    pub assumed: Vec<String>,
}

/// Column at which comments start.
const COMMENT: usize = 42;

/// Writes the scenario. `preset` is the path of a Hugging Face `config.json` that describes the
/// model.
#[must_use]
pub fn infer(facts: &Facts, name: &str, preset: Option<&str>) -> Inferred {
    let mut w = Writer {
        recorder: facts.recorder,
        ..Writer::default()
    };
    w.line(&format!(
        "# Inferred from {name} by `shardlab infer`. A comment says how a value was determined."
    ));
    model(&mut w, facts, preset);
    let m = &facts.model;
    w.section("train");
    w.needed("seq_len", m.seq_len.as_ref(), ToString::to_string);
    w.needed("micro_batch", m.micro_batch.as_ref(), ToString::to_string);
    rest(&mut w, facts, units::patterns(facts));
    w.finish()
}

/// Writes the options of a scenario without a model description: `layers` is the number of blocks.
/// The model is a placeholder whose modules are not those of the trace, so units are left out.
#[must_use]
pub fn options(facts: &Facts, name: &str, layers: usize) -> Inferred {
    let mut w = Writer::default();
    w.line(&format!("# Options of {name}."));
    let placeholder = "placeholder: the trace's own kernels are used";
    w.section("model");
    w.known("family", "\"llama\"", placeholder);
    w.known("layers", &layers.max(1).to_string(), placeholder);
    for (key, size) in [
        ("hidden", "64"),
        ("heads", "1"),
        ("ffn", "64"),
        ("vocab", "64"),
    ] {
        w.known(key, size, placeholder);
    }
    let m = &facts.model;
    let seq_len = m.seq_len.as_ref().map_or(1, |s| s.value);
    w.known("max_seq_len", &seq_len.to_string(), placeholder);
    w.section("train");
    w.known("seq_len", &seq_len.to_string(), "shapes of the trace, or 1");
    let micro_batch = m.micro_batch.as_ref().map_or(1, |b| b.value);
    w.known(
        "micro_batch",
        &micro_batch.to_string(),
        "shapes of the trace, or 1",
    );
    rest(&mut w, facts, None);
    w.finish()
}

/// Writes everything but the model and the batch.
fn rest(w: &mut Writer, facts: &Facts, units: Option<Found<String>>) {
    train(w, facts);
    mesh(w, facts);
    fsdp(w, facts, units);
    w.section("precision");
    w.found("param_dtype", facts.compute.as_ref(), |v| quote(v));
    w.found("main_params", facts.main_params.as_ref(), |v| quote(v));
    w.found("main_grads", facts.main_grads.as_ref(), |v| quote(v));
    w.found("reduce_dtype", facts.reduce.as_ref(), |v| quote(v));
    w.section("compile");
    w.found("mode", facts.compiled.as_ref(), |v| {
        quote(match v {
            Compiled::Off => "off",
            Compiled::Regions => "regions",
            Compiled::Blocks => "blocks",
            Compiled::Full => "full",
        })
    });
}

fn quote(text: impl Display) -> String {
    format!("\"{text}\"")
}

fn model(w: &mut Writer, facts: &Facts, preset: Option<&str>) {
    let m = &facts.model;
    w.section("model");
    w.missing.extend(m.gaps.iter().cloned());
    if let Some(path) = preset {
        w.known("preset", &quote(path), "--config");
        lora(w, m);
        return;
    }
    w.needed("family", m.family.as_ref(), |v| quote(v));
    w.needed("layers", m.layers.as_ref(), ToString::to_string);
    w.needed("hidden", m.hidden.as_ref(), ToString::to_string);
    w.needed("heads", m.heads.as_ref(), ToString::to_string);
    let llama = m.family.as_ref().is_none_or(|f| f.value != "gpt2");
    if llama {
        w.found("kv_heads", m.kv_heads.as_ref(), ToString::to_string);
        w.found("head_dim", m.head_dim.as_ref(), ToString::to_string);
    }
    match &m.experts {
        None => w.needed("ffn", m.ffn.as_ref(), ToString::to_string),
        Some(found) => {
            w.found("ffn", m.ffn.as_ref(), ToString::to_string);
            experts(w, found);
            w.found("dense_layers", m.dense_layers.as_ref(), ToString::to_string);
        }
    }
    w.needed("vocab", m.vocab.as_ref(), ToString::to_string);
    w.found("tie_embeddings", m.tied.as_ref(), ToString::to_string);
    if llama {
        w.found("bias", m.bias.as_ref(), |v| (*v).to_owned());
        w.found("qk_norm", m.qk_norm.as_ref(), ToString::to_string);
    }
    lora(w, m);
}

/// Writes the keys of layers of experts.
fn experts(w: &mut Writer, found: &Found<Experts>) {
    let (e, because) = (&found.value, &found.because);
    w.known("experts", &e.count.to_string(), because);
    let top_k = e
        .top_k
        .map(|k| Found::new(k, "argument of the top-k over the router's scores"));
    w.needed("top_k", top_k.as_ref(), ToString::to_string);
    let width = e.width.map(|f| Found::new(f, because.as_str()));
    w.needed("expert_ffn", width.as_ref(), ToString::to_string);
    if let Some(shared) = e.shared {
        w.known("shared_expert_ffn", &shared.to_string(), because);
    }
    if e.shared_gate {
        w.known("shared_expert_gate", "true", "a projection to one number");
    }
    if e.bias {
        w.known(
            "expert_bias",
            "true",
            "experts have vectors of their widths",
        );
    }
}

/// Writes the section of adapters, if there are any.
fn lora(w: &mut Writer, m: &Model) {
    let Some(found) = &m.adapters else { return };
    w.section("lora");
    w.known("r", &found.value.rank.to_string(), &found.because);
    if found.value.targets.is_empty() {
        w.missing.push(
            "lora.target_modules: the order of linear layers is not that of Llama; all-linear is the default"
                .into(),
        );
        return;
    }
    let targets: Vec<String> = found.value.targets.iter().map(quote).collect();
    let because = "order of the linear layers in a block";
    w.known(
        "target_modules",
        &format!("[{}]", targets.join(", ")),
        because,
    );
}

fn train(w: &mut Writer, facts: &Facts) {
    w.found(
        "grad_accum",
        facts.accumulation.as_ref(),
        ToString::to_string,
    );
    w.found("recompute", facts.recompute.as_ref(), |v| {
        quote(match v {
            Recompute::None => "none",
            Recompute::Full => "full",
            Recompute::Selective => "selective",
        })
    });
    w.found("loss", facts.chunked_loss.as_ref(), |chunked| {
        quote(if *chunked { "chunked" } else { "materialized" })
    });
    if let Some(found) = &facts.optimizer {
        let name = match found.value.name.as_str() {
            "adam" => "adamw",
            other => other,
        };
        let n = &found.value.numbers;
        match (name, &n.momentum) {
            ("sgd", Some(momentum)) => {
                let because = format!("SGD with momentum {momentum}: lion has the same state");
                w.known("optimizer", "\"lion\"", &because);
                w.missing.push(format!(
                    "train.optimizer: SGD with momentum {momentum} is not among the optimizers of scenarios; lion, with as much state and traffic, stands for it"
                ));
            }
            ("adamw" | "sgd", _) => w.known("optimizer", &quote(name), &found.because),
            _ => w.missing.push(format!(
                "train.optimizer: `{name}` has no counterpart; adamw is the default"
            )),
        }
        if matches!(name, "adamw" | "sgd") && n.momentum.is_none() {
            hyperparameters(w, name, n);
        }
    }
    match &facts.clip {
        Some(found) if found.value => {
            w.known(
                "clip_norm",
                "1.0",
                &format!(
                    "{}; the limit is not recorded: 1.0 is assumed",
                    found.because
                ),
            );
            w.assumed.push("train.clip_norm = 1.0".into());
        }
        Some(found) => {
            w.known("clip_norm", "0.0", &found.because);
            if facts.grad_norm {
                w.known("grad_norm", "true", "gradients' norm is computed");
            }
        }
        None => {}
    }
}

/// Writes the numbers of an optimizer, and lists those that the trace lacks.
fn hyperparameters(w: &mut Writer, optimizer: &str, n: &Numbers) {
    let because = "argument of the optimizer's operator";
    let betas = n.betas.as_ref().map(|[a, b]| format!("[{a}, {b}]"));
    let all = [
        ("lr", n.lr.as_ref()),
        ("betas", betas.as_ref()),
        ("eps", n.eps.as_ref()),
        ("weight_decay", n.weight_decay.as_ref()),
    ];
    let has = |key: &str| optimizer == "adamw" || !matches!(key, "betas" | "eps");
    let mut absent = Vec::new();
    for (key, value) in all.into_iter().filter(|(key, _)| has(key)) {
        match value {
            Some(value) => w.known(key, value, because),
            None => absent.push(format!("train.{key}")),
        }
    }
    if !absent.is_empty() {
        let product = n
            .decay_per_step
            .as_ref()
            .map_or_else(String::new, |p| format!(" (lr × weight_decay is {p})"));
        let what = absent.join(", ");
        w.missing.push(format!(
            "{what}: no operator of the optimizer has them as arguments{product}; the defaults apply, and no time or memory depends on them"
        ));
    }
}

fn mesh(w: &mut Writer, facts: &Facts) {
    w.section("mesh");
    match facts.device.as_deref() {
        Some(device) => match hardware(device) {
            Some(profile) => w.known(
                "hardware",
                &quote(profile),
                &format!("the device is {device}"),
            ),
            None => w.missing.push(format!(
                "mesh.hardware: no profile of {device} is shipped; {}",
                own_profile(device)
            )),
        },
        None => w
            .missing
            .push("mesh.hardware: the trace does not name the device".into()),
    }
    match (&facts.dp_shard, &facts.world_size) {
        (Some(shard), _) => w.known("dp_shard", &shard.value.to_string(), &shard.because),
        (None, Some(world)) if facts.unsized_collectives > 0 => {
            let because = format!("{}; the sizes of groups are not recorded", world.because);
            w.known("dp_shard", &world.value.to_string(), &because);
            w.assumed
                .push(format!("mesh.dp_shard = {} (all ranks)", world.value));
        }
        (None, None) if facts.unsized_collectives > 0 => w.missing.push(unsized_groups(facts)),
        (None, Some(world)) => w.known("dp_shard", &world.value.to_string(), &world.because),
        (None, None) => w.known(
            "dp_shard",
            "1",
            "no collective and no world size is in the trace",
        ),
    }
    if let Some(outer) = facts.dp_outer.as_ref().filter(|o| o.value > 1) {
        w.known("dp_replicate", &outer.value.to_string(), &outer.because);
    }
    w.missing.extend(facts.mesh_gaps.iter().cloned());
}

/// Says how to get the profile of a device.
fn own_profile(device: &str) -> &'static str {
    let is_amd = ["AMD", "Instinct", "Radeon"]
        .iter()
        .any(|name| device.contains(name));
    match is_amd {
        true => {
            "`shardlab calibrate` does not measure AMD GPUs: name the closest profile, or write one with `extends`"
        }
        false => "`shardlab calibrate` measures one",
    }
}

/// Says why the number of ranks that shard is not known, and what to do.
fn unsized_groups(facts: &Facts) -> String {
    let why = match facts.recorder {
        Recorder::Nsight => "Nsight Systems does not record them",
        _ => "newer versions of PyTorch describe each collective",
    };
    format!(
        "mesh.dp_shard: {} NCCL kernels per step are in the trace, but the sizes of their groups are not ({why}); set it to the number of ranks that shard parameters",
        facts.unsized_collectives
    )
}

/// Says how to get the sizes of the model.
fn without_shapes(recorder: Recorder) -> &'static str {
    match recorder {
        Recorder::Nsight => {
            "Nsight Systems does not record shapes; give the model by --config config.json, and the batch in the file"
        }
        _ => "shapes are recorded with record_shapes=True",
    }
}

fn fsdp(w: &mut Writer, facts: &Facts, units: Option<Found<String>>) {
    w.section("fsdp");
    w.found("policy", facts.policy.as_ref(), |v| quote(v));
    w.found("strategy", facts.strategy.as_ref(), |v| quote(v));
    if let Some(because) = &facts.offload {
        // FSDP2 moves all of them or none.
        w.known("offload", "[\"params\", \"grads\", \"optimizer\"]", because);
    }
    let sharded = facts
        .strategy
        .as_ref()
        .is_some_and(|s| s.value == "optim_grads_params");
    if !sharded {
        return;
    }
    let has_units = units.is_some();
    if let Some(found) = units {
        w.known("units", &found.value, &found.because);
    }
    w.found(
        "reshard_after_forward",
        facts.reshard.as_ref(),
        |v| match v {
            Reshard::Always => "true".into(),
            Reshard::Never => "false".into(),
            Reshard::ButLast => quote("auto"),
            Reshard::Group(n) => n.to_string(),
        },
    );
    w.found(
        "reshard_root",
        facts.reshard_root.as_ref().filter(|f| f.value),
        ToString::to_string,
    );
    // A replay has other units, so it keeps the depth.
    let has_lists = has_units && !facts.prefetch_lists.is_empty();
    if has_lists {
        let lists = prefetch_lists(facts);
        w.known(
            "prefetch_lists",
            &lists,
            "annotations of explicit prefetches",
        );
    }
    let ahead = |v: &Ahead| match v {
        Ahead::Implicit => quote("implicit"),
        Ahead::Depth(n) => n.to_string(),
    };
    if !has_lists {
        w.found("prefetch_forward", facts.prefetch_forward.as_ref(), ahead);
        w.found("prefetch_backward", facts.prefetch_backward.as_ref(), ahead);
    }
    w.found("gradient_sync", facts.sync_last.as_ref(), |last| {
        quote(if *last { "last" } else { "every" })
    });
}

/// Returns the value of `fsdp.prefetch_lists`, with the names of units in scenarios.
fn prefetch_lists(facts: &Facts) -> String {
    let names = units::family_names(facts);
    let name = |unit: &String| quote(names.get(unit).unwrap_or(unit));
    let tables = facts.prefetch_lists.iter().map(|list| {
        let mut table = format!("{{ unit = {}", name(&list.unit));
        for (key, units) in [("forward", &list.forward), ("backward", &list.backward)] {
            if !units.is_empty() {
                let units: Vec<String> = units.iter().map(name).collect();
                // Writing to a string cannot fail.
                let _ = write!(table, ", {key} = [{}]", units.join(", "));
            }
        }
        table + " }"
    });
    format!("[{}]", tables.collect::<Vec<_>>().join(", "))
}

/// Returns the shipped profile of a device.
#[must_use]
pub fn hardware(device: &str) -> Option<&'static str> {
    let has = |part: &str| device.contains(part);
    Some(if has("H200") {
        "h200-nvlink"
    } else if has("H100") {
        "h100-80"
    } else if has("A100") && has("40GB") {
        "a100-40"
    } else if has("A100") {
        "a100-80"
    } else if has("B200") {
        "b200"
    } else {
        return None;
    })
}

#[derive(Default)]
struct Writer {
    text: String,
    section: &'static str,
    begun: bool,
    missing: Vec<String>,
    assumed: Vec<String>,
    recorder: Recorder,
}

impl Writer {
    fn line(&mut self, text: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{text}");
    }

    /// Starts a section. Its heading is written with its first key.
    fn section(&mut self, name: &'static str) {
        self.section = name;
        self.begun = false;
    }

    fn known(&mut self, key: &str, value: &str, because: &str) {
        if !self.begun {
            let section = self.section;
            self.line(&format!("\n[{section}]"));
            self.begun = true;
        }
        let pair = format!("{key} = {value}");
        self.line(&format!("{pair:<COMMENT$} # {because}"));
    }

    fn found<T>(&mut self, key: &str, found: Option<&Found<T>>, show: impl Fn(&T) -> String) {
        if let Some(found) = found {
            self.known(key, &show(&found.value), &found.because);
        }
    }

    /// Writes a required key.
    fn needed<T>(&mut self, key: &str, found: Option<&Found<T>>, show: impl Fn(&T) -> String) {
        if found.is_none() {
            self.missing.push(format!(
                "{}.{key}: not determined; {}",
                self.section,
                without_shapes(self.recorder)
            ));
        }
        self.found(key, found, show);
    }

    fn finish(mut self) -> Inferred {
        if !self.missing.is_empty() {
            self.line("\n# Not determined:");
            for missing in self.missing.clone() {
                self.line(&format!("#   {missing}"));
            }
        }
        Inferred {
            text: self.text,
            missing: self.missing,
            assumed: self.assumed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(facts: &Facts) -> String {
        infer(facts, "t.json", None).missing.join("\n")
    }

    #[test]
    fn groups_without_sizes_leave_the_mesh_open() {
        let mut facts = Facts {
            unsized_collectives: 24,
            ..Facts::default()
        };
        let inferred = infer(&facts, "t.json", None);
        assert!(!inferred.text.contains("\ndp_shard ="), "{}", inferred.text);
        let missing = inferred.missing.join("\n");
        assert!(
            missing.contains("mesh.dp_shard: 24 NCCL kernels"),
            "{missing}"
        );
        assert!(missing.contains("record_shapes=True"), "{missing}");
        facts.recorder = Recorder::Nsight;
        let missing = self::missing(&facts);
        assert!(
            missing.contains("Nsight Systems does not record them"),
            "{missing}"
        );
        assert!(!missing.contains("record_shapes"), "{missing}");
        // Without sizes of groups, all ranks are assumed to shard.
        facts.world_size = Some(Found::new(8, "said so"));
        let all = infer(&facts, "t.json", None);
        assert!(all.text.contains("\ndp_shard = 8"), "{}", all.text);
        assert_eq!(all.assumed, ["mesh.dp_shard = 8 (all ranks)"]);
        // A job without collectives runs on one GPU.
        let alone = infer(&Facts::default(), "t.json", None).text;
        assert!(alone.contains("\ndp_shard = 1"), "{alone}");
    }

    #[test]
    fn advice_about_profiles_fits_the_device() {
        let of = |device: &str| {
            missing(&Facts {
                device: Some(device.to_owned()),
                ..Facts::default()
            })
        };
        assert!(of("NVIDIA L40S").contains("`shardlab calibrate` measures one"));
        assert!(of("AMD Instinct MI300X").contains("does not measure AMD GPUs"));
    }
}
