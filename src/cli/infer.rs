//! `shardlab infer`: writes the scenario that a trace shows.

use super::import::{failure, shown};
use super::output::{Failure, Out, Status, say, writable, write_file};
use serde::Serialize;
use serde_json::Value;
use shardlab_import::facts::{Experts, Facts, Found};
use shardlab_import::{facts_of, infer::infer};
use shardlab_plan::{Scenario, plan, scenario};
use std::path::{Path, PathBuf};

const NOTES: &str = "\
Writes a scenario with a comment per line that says how its value was determined. What the trace does not determine
is listed at the end, and on standard error.

Shapes come from record_shapes=True. Without them the sizes of the model are not in the trace: --config names a
Hugging Face config.json that has them. A config that contradicts the trace is refused.

Examples:
  shardlab infer trace.json.gz > scenario.toml
  shardlab infer trace.json.gz --config config.json --out scenario.toml
  shardlab compare base scenario.toml";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Trace of the PyTorch profiler, or an execution trace; compressed by gzip or not
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Hugging Face config.json of the model
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Write the scenario to a file instead of standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, conflicts_with = "out")]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    format: u32,
    scenario: &'a str,
    missing: &'a [String],
    assumed: &'a [String],
    notes: &'a [String],
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let Some(path) = &args.out {
        writable("--out", path)?;
    }
    if args.trace.extension().is_some_and(|e| e == "toml") {
        let file = args.trace.display();
        return Err(Failure::bad_input(format_args!(
            "{file}: a trace of the PyTorch profiler or an execution trace is expected, and TOML files are scenarios; `shardlab sim {file}` predicts one"
        )));
    }
    let (facts, notes) = facts_of(&args.trace).map_err(failure)?;
    let preset = match &args.config {
        None => None,
        Some(path) => {
            contradictions(path, &facts)?;
            Some(preset(path)?)
        }
    };
    let inferred = infer(&facts, &name(&args.trace), preset.as_deref());
    // A complete text must be a valid scenario. A file without all keys lists the missing ones.
    match scenario::parse("inferred", &inferred.text, &[]) {
        Err(e) if inferred.missing.is_empty() => say(format_args!(
            "warning: the inferred scenario cannot be predicted as it is: {e}"
        )),
        Err(_) => {}
        Ok(scenario) => {
            if let Some(text) = other_size(&scenario, &facts) {
                say(format_args!("warning: {text}"));
            }
        }
    }
    if args.json {
        out.json(&Report {
            format: 1,
            scenario: &inferred.text,
            missing: &inferred.missing,
            assumed: &inferred.assumed,
            notes: &notes,
        })?;
    } else if let Some(path) = &args.out {
        write_file("--out", path, |file| {
            file.write_all(inferred.text.as_bytes())
        })?;
    } else {
        out.text(&inferred.text)?;
    }
    out.flush()?;
    for missing in &inferred.missing {
        say(format_args!("not determined: {missing}"));
    }
    for note in &notes {
        say(format_args!("note: {note}"));
    }
    Ok(Status::Done)
}

/// Relative difference up to which two numbers of parameters count as equal: engines pad parameters
/// to multiples of the number of ranks.
const PADDING: f64 = 0.01;

/// Compares the number of a scenario's parameters with that of the trace, and says so if they
/// differ.
fn other_size(scenario: &Scenario, facts: &Facts) -> Option<String> {
    let (seen, what) = match facts.model.parameters {
        Some(n) => (n, "parameters of the trace's units"),
        None if !facts.units.is_empty() && facts.units.iter().all(|u| u.gathered > 0) => {
            let gathered = facts.units.iter().map(|u| u.gathered);
            (gathered.sum(), "elements that the trace's units gather")
        }
        None => return None,
    };
    let planned = plan(scenario).ok()?.meta.parameters.total;
    let differs = planned.abs_diff(seen) as f64 > PADDING * seen as f64;
    differs.then(|| {
        format!(
            "the inferred model has {planned} parameters, but there are {seen} {what}: layers of the job are not in the scenario, or their sizes are others"
        )
    })
}

/// Returns the trace's name for the first line of the scenario.
fn name(path: &Path) -> String {
    path.file_name()
        .map_or_else(|| shown(path), |n| n.to_string_lossy().into_owned())
}

/// Returns a path to a preset that is valid wherever the scenario is written.
fn preset(path: &Path) -> Result<String, Failure> {
    let full = path
        .canonicalize()
        .map_err(|e| Failure::bad_input(format_args!("{}: {e}", path.display())))?;
    Ok(full.display().to_string().replace('\\', "\\\\"))
}

/// Rejects a config whose sizes differ from those of the trace.
fn contradictions(path: &Path, facts: &Facts) -> Result<(), Failure> {
    let bad = |text: String| Failure::bad_input(format_args!("{}: {text}", path.display()));
    let text = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
    let config: Value = serde_json::from_slice(&text)
        .map_err(|e| bad(format!("line {}, column {}: {e}", e.line(), e.column())))?;
    let m = &facts.model;
    let of_experts = |size: fn(&Experts) -> Option<u64>| {
        let found = m.experts.as_ref()?;
        Some(Found {
            value: size(&found.value)?,
            because: found.because.clone(),
        })
    };
    let checks: [(&[&str], Option<Found<u64>>); 9] = [
        (&["num_hidden_layers", "n_layer"], m.layers.clone()),
        (&["hidden_size", "n_embd"], m.hidden.clone()),
        (&["num_attention_heads", "n_head"], m.heads.clone()),
        (&["num_key_value_heads"], m.kv_heads.clone()),
        (&["intermediate_size"], m.ffn.clone()),
        (&["vocab_size"], m.vocab.clone()),
        (
            &["num_experts", "num_local_experts", "n_routed_experts"],
            of_experts(|e| Some(e.count)),
        ),
        (&["num_experts_per_tok"], of_experts(|e| e.top_k)),
        (&["moe_intermediate_size"], of_experts(|e| e.width)),
    ];
    for (keys, found) in checks {
        let of = keys
            .iter()
            .find_map(|k| Some((k, config.get(k)?.as_u64()?)));
        if let (Some((key, configured)), Some(found)) = (of, found)
            && configured != found.value
        {
            return Err(bad(format!(
                "{key} is {configured}, but the trace shows {} ({}): it is the config of another model",
                found.value, found.because
            )));
        }
    }
    Ok(())
}
