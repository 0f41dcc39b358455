//! `shardlab replay`: shards the model of a trace again, with other options.

use super::args::{Overrides, profiles};
use super::import::{failure, name};
use super::output::{Failure, Out, Status, say};
use super::table::Table;
use crate::predict::{PredictError, Prediction, predict_program};
use serde_json::{Value, json};
use shardlab_import::costs::Costs;
use shardlab_import::replay::{Traced, tape};
use shardlab_plan::record::{Cause, Run};
use shardlab_plan::units::{Bytes, Picos, signed, thousands};
use shardlab_plan::{Scenario, plan_tape, scenario};
use shardlab_sim::{Options, Part, Profile};
use std::path::PathBuf;
use std::sync::Arc;

const NOTES: &str = "\
Builds a program from a trace, without a model: each unit's kernels with their measured times, its
parameters and the bytes that it saves. The program is sharded again with the options of --set and
predicted. Collectives, copies around them and the optimizer are priced by the hardware profile. Host
times are those of the profile that --set names, else those of h100-80, scaled by the kernel launches of
the trace.

Units are called layers.0, layers.1, … (blocks) and by the names in the trace. The first row is the
recorded run itself: its error shows how far the other rows can be trusted.

Examples:
  shardlab replay trace.json.gz --set fsdp.prefetch_forward=2
  shardlab replay 'rank*_trace.json.gz' --set mesh.dp_shard=64
  shardlab replay trace.json.gz --set fsdp.units=block --set mesh.hardware=my-machine.toml";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Trace of the PyTorch profiler, or the traces of several ranks; a memory snapshot of the same
    /// steps adds allocations that the trace lacks
    #[arg(value_name = "TRACE", required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// Print the options that the trace shows as a scenario, and stop
    #[arg(long, conflicts_with = "json")]
    options: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let files = shardlab_import::source::expand(&args.files).map_err(failure)?;
    let run_name = name(&files);
    let import = shardlab_import::import(&files, &run_name).map_err(failure)?;
    let bad = |text: &str| Failure::bad_input(format_args!("{}: {text}", files[0].display()));
    let Some(imported) = &import.run else {
        return Err(bad("a trace of the PyTorch profiler is expected"));
    };
    let traced = tape(imported, &run_name).map_err(|e| bad(&e))?;
    if args.options {
        out.text(&traced.scenario.text)?;
        return Ok(Status::Done);
    }
    let costs = &imported.costs;
    let recorded = one(
        &traced,
        costs,
        &run_name,
        &of_the_recording(&traced, &args.overrides.set),
    )?;
    let changed = match args.overrides.set.is_empty() {
        true => None,
        false => Some(one(&traced, costs, &run_name, &args.overrides.set)?.prediction),
    };
    let measured = &imported.measured.run;
    if args.json {
        out.json(&json!({
            "format": 1,
            "trace": run_name,
            "measured": {
                "step_ms": measured.step_ms(),
                "exposed_ms": measured.exposed_total().ms(),
                "host_wait_ms": host_wait(measured).ms(),
                "peak_allocated_bytes": measured.memory.allocated(),
                "peak_reserved_bytes": measured.memory.reserved(),
            },
            "recorded": object(&recorded.prediction),
            "replayed": changed.as_ref().map(object),
            "set": args.overrides.set,
            "host_factor": recorded.host,
            "notes": notes(&traced, measured, &recorded),
        }))?;
        return Ok(Status::Done);
    }
    print(args, measured, &recorded.prediction, changed.as_ref(), out)?;
    out.flush()?;
    for note in notes(&traced, measured, &recorded) {
        say(format_args!("note: {note}"));
    }
    Ok(Status::Done)
}

/// Returns the time during which the recorded device waited for its host, or for that of another
/// rank.
fn host_wait(measured: &Run) -> Picos {
    let causes = [Cause::Host, Cause::Straggler];
    let waits = causes.iter().filter_map(|c| measured.exposed.get(c));
    waits.copied().sum()
}

/// Returns the assumptions of the replay. The host is priced by the profile and by the launches in
/// the trace, which the profiler hardly slows down.
fn notes(traced: &Traced, measured: &Run, recorded: &Recorded) -> Vec<String> {
    let mut notes = traced.notes.clone();
    if let Some(factor) = recorded.host {
        notes.push(format!(
            "the host of the trace takes {factor:.2} times as long as that of {HOST}, by its kernel launches; a replay on another machine has the host of its profile"
        ));
    }
    let wait = host_wait(measured);
    // Waits for data are not the profiler's.
    let data = Picos(traced.data_wait * 1000);
    let wait = Picos(wait.0.saturating_sub(data.0));
    if wait.ms() > 0.05 * measured.step_ms() {
        let besides = match traced.data_wait {
            0 => "",
            _ => ", apart from the DataLoader",
        };
        notes.push(format!(
            "in the trace, the device waits {} ms per step for the host, its own or that of another rank{besides}. The profiler makes the host slower; without it, the host needs about {} ms per step",
            thousands(wait.ms(), 2),
            thousands(recorded.prediction.run.host.ms(), 2),
        ));
    }
    notes
}

const DP_SHARD: &str = "mesh.dp_shard";

/// Returns why the trace does not determine a key; `None` if it does.
fn lacks<'a>(traced: &'a Traced, key: &str) -> Option<&'a String> {
    let missing = &traced.scenario.missing;
    missing.iter().find(|m| {
        m.strip_prefix(key)
            .is_some_and(|rest| rest.starts_with(':'))
    })
}

/// Keeps the overrides that describe the recorded run: the machine, and the number of ranks if the
/// trace does not show it.
fn of_the_recording(traced: &Traced, set: &[String]) -> Vec<String> {
    let ranks = lacks(traced, DP_SHARD).is_some();
    let kept = set.iter().filter(|s| {
        s.starts_with("mesh.hardware=") || ranks && s.starts_with(&format!("{DP_SHARD}="))
    });
    kept.cloned().collect()
}

/// A replay, and its assumption about the host.
struct Recorded {
    prediction: Prediction,
    /// Time of the trace's host relative to that of [`HOST`]; `None` if the trace does not show it,
    /// or if the machine is another one.
    host: Option<f64>,
}

/// Profile that prices the host of a trace, multiplied by [`Recorded::host`]. The trace shows how
/// fast launches are, but not what Python costs without the profiler. That was measured on this
/// profile's host, and does not depend on the GPU.
const HOST: &str = "h100-80";

fn named(profile: &str) -> Result<Arc<Profile>, Failure> {
    let found = profiles().get(profile);
    found.map_err(|e| Failure::from(PredictError::from(e)))
}

/// Shards the tape with the options of the trace and some overrides, and predicts the result.
fn one(traced: &Traced, costs: &Costs, name: &str, set: &[String]) -> Result<Recorded, Failure> {
    let scenario = options(traced, name, set)?;
    let program = plan_tape(&scenario, &traced.tape)
        .map_err(|e| Failure::bad_input(format_args!("{name}: {e}")))?;
    let (mut profile, reference) = (named(&scenario.mesh.hardware)?, named(HOST)?);
    let same_machine = !asks_hardware(set);
    let host = costs
        .host_factor(reference.host.launch_us)
        .filter(|_| same_machine);
    if host.is_some() {
        profile = Arc::new(profile.with_host_of(&reference));
    }
    let options = Options {
        kernel_times: traced.times.clone(),
        // Measured times contain it.
        contention: false,
        slower: host
            .map(|factor| (Part::Host, factor))
            .into_iter()
            .collect(),
        ..Options::default()
    };
    Ok(Recorded {
        prediction: predict_program(&scenario, program, profile, &options)?,
        host,
    })
}

fn asks_hardware(set: &[String]) -> bool {
    set.iter().any(|s| s.starts_with("mesh.hardware="))
}

fn options(traced: &Traced, name: &str, set: &[String]) -> Result<Scenario, Failure> {
    let has = |key: &str| set.iter().any(|s| s.starts_with(key));
    for (key, words) in [
        (
            "mesh.hardware",
            "give a profile with --set mesh.hardware=PROFILE",
        ),
        (DP_SHARD, "give it with --set mesh.dp_shard=RANKS"),
    ] {
        if let Some(missing) = lacks(traced, key)
            && !has(&format!("{key}="))
        {
            return Err(Failure::bad_input(format_args!("{missing}; {words}")));
        }
    }
    let mut set = set.to_vec();
    if has("fsdp.reshard_after_forward=false") && !has("fsdp.reshard_root=") {
        // In this case, the recorded setting of the root has no effect.
        set.push("fsdp.reshard_root=false".to_owned());
    }
    let mut scenario =
        scenario::parse(name, &traced.scenario.text, &set).map_err(Failure::bad_input)?;
    if !has("fsdp.units=") {
        scenario.fsdp.units = traced.units.clone();
    }
    Ok(scenario)
}

fn object(p: &Prediction) -> Value {
    let m = &p.run.memory;
    json!({
        "step_ms": p.step_ms(),
        "exposed_ms": p.run.exposed_total().ms(),
        "host_ms": p.run.host.ms(),
        "peak_allocated_bytes": m.peak_allocated,
        "peak_reserved_bytes": m.peak_reserved,
        "fits": p.fit.word(),
        "world_size": p.run.world_size,
        "policy": p.run.policy,
    })
}

fn print(
    args: &Args,
    measured: &Run,
    recorded: &Prediction,
    changed: Option<&Prediction>,
    out: &mut Out,
) -> Result<(), Failure> {
    let mut table = Table::new([
        "run",
        ">ranks",
        ">step ms",
        ">%",
        ">exposed ms",
        ">allocated",
        ">reserved",
        "fits",
    ]);
    let bytes = |b: Option<Bytes>| b.map_or_else(|| "-".to_owned(), |b| b.to_string());
    table.row([
        "measured".to_owned(),
        measured.world_size.to_string(),
        thousands(measured.step_ms(), 2),
        String::new(),
        thousands(measured.exposed_total().ms(), 2),
        bytes(measured.memory.allocated()),
        bytes(measured.memory.reserved()),
        String::new(),
    ]);
    let base = recorded.step_ms();
    let mut row = |name: &str, p: &Prediction, percent: f64| {
        table.row([
            name.to_owned(),
            p.run.world_size.to_string(),
            thousands(p.step_ms(), 2),
            signed(percent, 1),
            thousands(p.run.exposed_total().ms(), 2),
            bytes(p.run.memory.allocated()),
            bytes(p.run.memory.reserved()),
            p.fit.word().to_owned(),
        ]);
    };
    row(
        "replayed as recorded",
        recorded,
        100.0 * (base / measured.step_ms() - 1.0),
    );
    if let Some(p) = changed {
        row(
            &args.overrides.set.join(" "),
            p,
            100.0 * (p.step_ms() / base - 1.0),
        );
    }
    out.text(table)?;
    out.blank()?;
    out.paragraph(
        0,
        "%: of the first row relative to the measurement, of the last relative to the row before it.",
    )?;
    Ok(())
}
