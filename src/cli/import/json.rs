//! Prints the result of `import --json`.

use serde::Serialize;
use serde_json::{Value, json};
use shardlab_import::facts::{Ahead, Compiled, Facts, Found, Recompute, Reshard};
use shardlab_import::flight::FlightReport;
use shardlab_import::snapshot::SnapshotReport;
use shardlab_import::{Import, RankSummary, RunImport, Structure};
use shardlab_plan::record::Summary;
use shardlab_reports::store::Id;
use std::collections::BTreeMap;

/// Version of the JSON. It increases when the meaning of a field changes. Fields are added, but
/// never renamed.
const FORMAT: u32 = 1;

#[derive(Serialize)]
pub(super) struct Report {
    format: u32,
    #[serde(flatten)]
    run: Option<Run>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    snapshots: Vec<Snapshot>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flight: Option<FlightReport>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    execution_traces: Vec<Structured>,
}

#[derive(Serialize)]
struct Snapshot {
    file: String,
    devices: Vec<SnapshotReport>,
}

#[derive(Serialize)]
struct Structured {
    file: String,
    operators: u64,
    #[serde(flatten)]
    options: Options,
}

#[derive(Serialize)]
struct Run {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<String>,
    attributed_share: f64,
    unmatched: Unmatched,
    #[serde(flatten)]
    options: Options,
    step_ms: Option<f64>,
    step_samples_ms: Vec<f64>,
    steps_by: &'static str,
    ranks: Vec<RankSummary>,
    undetermined: Vec<String>,
    notes: Vec<String>,
    context_events: BTreeMap<String, u64>,
    events: u64,
    bytes: u64,
    summary: Summary,
}

#[derive(Serialize)]
struct Unmatched {
    events: u64,
    time_ms: f64,
    by_name: BTreeMap<String, u64>,
}

/// Options that a trace determines; `null` for the others.
#[derive(Serialize)]
struct Options {
    world_size: Option<u32>,
    dp_shard: Option<u32>,
    dp_outer: Option<u32>,
    policy: Option<&'static str>,
    strategy: Option<&'static str>,
    units: Vec<String>,
    unit_details: Vec<Value>,
    dtypes: BTreeMap<&'static str, Option<&'static str>>,
    reshard: Value,
    reshard_root: Option<bool>,
    prefetch: Value,
    prefetch_forward: Value,
    prefetch_backward: Value,
    recompute: Option<&'static str>,
    accumulation: Option<u32>,
    gradient_sync: Option<&'static str>,
    clip: Option<bool>,
    compile: Option<&'static str>,
    optimizer: Value,
    loss: Option<&'static str>,
    model: Value,
}

fn value<T: Copy>(found: Option<&Found<T>>) -> Option<T> {
    found.map(|f| f.value)
}

fn ahead(found: Option<&Found<Ahead>>) -> Value {
    match value(found) {
        Some(Ahead::Implicit) => json!("implicit"),
        Some(Ahead::Depth(n)) => json!(n),
        None => Value::Null,
    }
}

impl Options {
    fn of(f: &Facts) -> Self {
        let (forward, backward) = (
            ahead(f.prefetch_forward.as_ref()),
            ahead(f.prefetch_backward.as_ref()),
        );
        let m = &f.model;
        Self {
            world_size: value(f.world_size.as_ref()),
            dp_shard: value(f.dp_shard.as_ref()),
            dp_outer: value(f.dp_outer.as_ref()),
            policy: value(f.policy.as_ref()),
            strategy: value(f.strategy.as_ref()),
            units: f.units.iter().map(|u| u.name.clone()).collect(),
            unit_details: f
                .units
                .iter()
                .map(|u| {
                    json!({
                        "name": u.name,
                        "parameters": u.parameters,
                        "gathered_elements": u.gathered,
                        "gathered_again": u.regathered,
                    })
                })
                .collect(),
            dtypes: BTreeMap::from([
                ("compute", value(f.compute.as_ref())),
                ("reduce", value(f.reduce.as_ref())),
                ("main_params", value(f.main_params.as_ref())),
                ("main_grads", value(f.main_grads.as_ref())),
            ]),
            reshard: match value(f.reshard.as_ref()) {
                Some(Reshard::Always) => json!(true),
                Some(Reshard::Never) => json!(false),
                Some(Reshard::ButLast) => json!("auto"),
                Some(Reshard::Group(n)) => json!(n),
                None => Value::Null,
            },
            reshard_root: value(f.reshard_root.as_ref()),
            // One value if both directions agree.
            prefetch: if forward == backward {
                forward.clone()
            } else {
                json!({"forward": forward, "backward": backward})
            },
            prefetch_forward: forward,
            prefetch_backward: backward,
            recompute: value(f.recompute.as_ref()).map(|r| match r {
                Recompute::None => "none",
                Recompute::Full => "full",
                Recompute::Selective => "selective",
            }),
            accumulation: value(f.accumulation.as_ref()),
            gradient_sync: value(f.sync_last.as_ref())
                .map(|last| if last { "last" } else { "every" }),
            clip: value(f.clip.as_ref()),
            compile: value(f.compiled.as_ref()).map(|c| match c {
                Compiled::Off => "off",
                Compiled::Regions => "regions",
                Compiled::Blocks => "blocks",
                Compiled::Full => "full",
            }),
            optimizer: f.optimizer.as_ref().map_or(
                Value::Null,
                |o| json!({"name": o.value.name, "form": o.value.form}),
            ),
            loss: value(f.chunked_loss.as_ref())
                .map(|chunked| if chunked { "chunked" } else { "materialized" }),
            model: json!({
                "family": value(m.family.as_ref()),
                "layers": value(m.layers.as_ref()),
                "hidden": value(m.hidden.as_ref()),
                "heads": value(m.heads.as_ref()),
                "kv_heads": value(m.kv_heads.as_ref()),
                "head_dim": value(m.head_dim.as_ref()),
                "ffn": value(m.ffn.as_ref()),
                "vocab": value(m.vocab.as_ref()),
                "tie_embeddings": value(m.tied.as_ref()),
                "seq_len": value(m.seq_len.as_ref()),
                "micro_batch": value(m.micro_batch.as_ref()),
                "parameters": m.parameters,
            }),
        }
    }
}

impl Run {
    fn of(run: &RunImport, id: Option<&Id>) -> Self {
        let m = &run.measured.run;
        let ms: Vec<f64> = m.step_samples.iter().map(|t| t.ms()).collect();
        Self {
            name: m.scenario.clone(),
            run: id.map(ToString::to_string),
            attributed_share: run.attributed_share,
            unmatched: Unmatched {
                events: run.unmatched.values().map(|u| u.0).sum(),
                time_ms: run.unmatched.values().map(|u| u.1).sum::<u64>() as f64 / 1e6,
                by_name: run
                    .unmatched
                    .iter()
                    .map(|(name, u)| (name.clone(), u.0))
                    .collect(),
            },
            options: Options::of(&run.facts),
            step_ms: Some(m.step_ms()).filter(|ms| ms.is_finite()),
            step_samples_ms: ms,
            steps_by: run.steps_by,
            ranks: run.ranks.clone(),
            undetermined: run.undetermined.clone(),
            notes: run.notes.clone(),
            context_events: run.context.clone(),
            events: run.events,
            bytes: run.bytes,
            summary: m.summary(),
        }
    }
}

fn structured(file: String, s: &Structure) -> Structured {
    Structured {
        file,
        operators: s.operators,
        options: Options::of(&s.facts),
    }
}

/// Returns the report of everything that was imported.
pub(super) fn of(import: &Import, id: Option<&Id>) -> Report {
    let file = |path: &std::path::Path| path.display().to_string();
    Report {
        format: FORMAT,
        run: import.run.as_ref().map(|r| Run::of(r, id)),
        snapshots: import
            .snapshots
            .iter()
            .map(|(path, devices)| Snapshot {
                file: file(path),
                devices: devices.clone(),
            })
            .collect(),
        flight: import.flight.clone(),
        execution_traces: import
            .structure
            .iter()
            .map(|(path, s)| structured(file(path), s))
            .collect(),
    }
}
