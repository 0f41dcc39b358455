//! `shardlab sim`: predicts scenarios.

pub(super) mod report;

use super::args::{Overrides, load, profiles};
use super::budget::Check;
use super::communicators::{self, Communicator};
use super::keep::{SaveOnRequest, Saved, view_of};
use super::output::{Failure, Out, Status, writable, write_file};
use super::progress::Progress;
use super::table::Table;
use crate::analysis::basis::number;
use crate::analysis::warnings::Warning;
use crate::predict::{Fit, Prediction, TIGHT, predict};
use crate::trace;
use serde::Serialize;
use shardlab_import::snapshot::export;
use shardlab_plan::Scenario;
use shardlab_plan::ir::ParameterCount;
use shardlab_plan::record::Summary;
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::{ByteUnit, Bytes};
use shardlab_reports::store::Id;
use shardlab_reports::view::ExpertsView;
use shardlab_sim::{Options, Part};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Scenario files, names of shipped scenarios, or - for standard input
    #[arg(value_name = "SCENARIO", required = true)]
    scenarios: Vec<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// Print one JSON object per scenario
    #[arg(long)]
    json: bool,
    /// Write a Perfetto trace of the last step; t = 0 is the start of the step, as in `explain`
    /// (one scenario only)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the allocations of the first three steps as a memory snapshot, which PyTorch's
    /// memory_viz opens (one scenario only)
    #[arg(long, value_name = "FILE")]
    memory_snapshot: Option<PathBuf>,
    /// Steps to simulate after the first [default: until time and memory repeat]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: Option<u32>,
    /// Random seed for --jitter
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Vary kernel times randomly, with this relative standard deviation, for example 0.02
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    jitter: f64,
    /// Slow down the kernels of one rank by FACTOR (repeatable)
    #[arg(long, value_name = "RANK=FACTOR", value_parser = straggler)]
    straggler: Vec<(u32, f64)>,
    /// Scale the times of one component on every rank by FACTOR (below 1: speed up): host,
    /// arithmetic, memory, collectives or host_copies (repeatable)
    #[arg(long, alias = "slower", value_name = "PART=FACTOR", value_parser = slower)]
    scale: Vec<(Part, f64)>,
    /// Simulate every rank, even if all are identical
    #[arg(long)]
    full_ranks: bool,
    #[command(flatten)]
    check: Check,
    #[command(flatten)]
    save: SaveOnRequest,
}

fn straggler(text: &str) -> Result<(u32, f64), String> {
    let (rank, factor) = text
        .split_once('=')
        .ok_or("expected RANK=FACTOR, for example 3=1.5")?;
    let rank = rank
        .trim()
        .parse()
        .map_err(|e| format!("rank `{rank}`: {e}"))?;
    Ok((rank, times(factor)?))
}

fn slower(text: &str) -> Result<(Part, f64), String> {
    let (part, factor) = text
        .split_once('=')
        .ok_or("expected PART=FACTOR, for example host=2")?;
    let part = part.trim();
    let found = Part::ALL.into_iter().find(|p| p.name() == part);
    let found = found.ok_or_else(|| {
        let names = Part::ALL.map(Part::name);
        format!("part `{part}`: expected one of {}", names.join(", "))
    })?;
    Ok((found, times(factor)?))
}

fn times(factor: &str) -> Result<f64, String> {
    factor
        .trim()
        .parse()
        .map_err(|e| format!("factor `{factor}`: {e}"))
}

impl Args {
    /// Returns the options that name a file to write.
    fn files(&self) -> [(&'static str, Option<&Path>); 2] {
        [
            ("--trace", self.trace.as_deref()),
            ("--memory-snapshot", self.memory_snapshot.as_deref()),
        ]
    }

    fn options(&self) -> Options {
        Options {
            steps: self.steps.unwrap_or(0),
            seed: self.seed,
            jitter: self.jitter,
            stragglers: self.straggler.clone(),
            slower: self.scale.clone(),
            full_ranks: self.full_ranks,
            ..Options::default()
        }
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    for (option, file) in args.files() {
        if file.is_some() && args.scenarios.len() > 1 {
            return Err(Failure::bad_input(format_args!(
                "{option} takes one scenario"
            )));
        }
    }
    // All files are read before the first simulation, so that an error in the last one is reported
    // immediately.
    let scenarios: Vec<Scenario> = args
        .scenarios
        .iter()
        .map(|path| load(path, &args.overrides.set))
        .collect::<Result<_, _>>()?;
    let place = args.save.place(args.scenarios.len())?;
    if let Some(place) = &place {
        place.probe()?;
    }
    for (option, file) in args.files() {
        if let Some(path) = file {
            writable(option, path)?;
        }
    }
    let profiles = profiles();
    let options = args.options();
    let mut lines = Vec::new();
    let mut status = Status::Done;
    let mut unwritten = None;
    let progress = Progress::new("predicting", scenarios.len(), args.json);
    for (i, scenario) in scenarios.iter().enumerate() {
        let (path, set) = (&args.scenarios[i], &args.overrides.set);
        let prediction = predict(scenario, &profiles, &options)?;
        progress.step();
        let answer = report::Answer::of(&prediction, path, set);
        let traced = args.trace.as_deref().map_or(Ok(()), |path| {
            let fill = |to: &mut dyn Write| trace::write(&prediction.program, &prediction.run, to);
            write_file("--trace", path, fill)
        });
        let exported = args.memory_snapshot.as_deref().map_or(Ok(()), |path| {
            let bytes = export(&prediction.program).map_err(Failure::run)?;
            write_file("--memory-snapshot", path, |to| to.write_all(&bytes))
        });
        let saved = place.as_ref().map_or(Ok(Saved::Unasked), |place| {
            place.save(&view_of(&prediction, path, set))
        });
        progress.pause(|| -> Result<(), Failure> {
            if args.json {
                let id = saved.as_ref().ok().and_then(Saved::id);
                out.json(&Object::new(&prediction, answer, id))?;
            } else {
                if i > 0 {
                    out.blank()?;
                }
                report::print(&prediction, &answer, out)?;
                lines.push(Line::of(&prediction));
            }
            out.flush()?;
            if args.check.judge(&prediction) != Status::Done {
                status = Status::CheckFailed;
            }
            // The prediction is printed first, so that it is not lost if a file cannot be written.
            for failure in [traced.err(), exported.err(), saved.map(|s| s.say()).err()] {
                unwritten = unwritten
                    .take()
                    .or(failure.map(Failure::reported_on_stderr));
            }
            Ok(())
        })?;
    }
    drop(progress);
    if lines.len() > 1 {
        out.blank()?;
        out.text(comparison(&lines))?;
        if lines.iter().any(|l| l.tight) {
            out.paragraph(0, TIGHT)?;
        }
    }
    match unwritten {
        Some(failure) => Err(failure),
        None => Ok(status),
    }
}

/// A row of the comparison.
struct Line {
    name: String,
    step_ms: String,
    tokens_per_s: String,
    counted_in: BatchUnit,
    mfu: f64,
    exposed_ms: f64,
    allocated: Bytes,
    reserved: Bytes,
    fits: &'static str,
    tight: bool,
}

impl Line {
    fn of(p: &Prediction) -> Self {
        let basis = p.run.basis.as_ref();
        Self {
            name: p.scenario.name.clone(),
            step_ms: number(p.step_ms(), 2, basis),
            tokens_per_s: number(p.tokens_per_s(), 0, basis),
            counted_in: p.scenario.model.family.counted_in(),
            mfu: p.run.mfu,
            exposed_ms: p.run.exposed_total().ms(),
            allocated: p.run.memory.peak_allocated,
            reserved: p.run.memory.peak_reserved,
            fits: p.fit.word(),
            tight: matches!(p.fit, Fit::Tight { .. }),
        }
    }
}

fn comparison(lines: &[Line]) -> Table {
    let unit = ByteUnit::common(lines.iter().flat_map(|l| [l.allocated, l.reserved]));
    let [allocated, reserved] = [">alloc", ">resv"].map(|t| format!("{t} {}", unit.name()));
    let counted_in = BatchUnit::common(lines.iter().map(|l| l.counted_in));
    let throughput = format!(">{}", counted_in.column());
    let mut table = Table::new([
        "scenario",
        ">step ms",
        &throughput,
        ">MFU",
        ">exposed ms",
        allocated.as_str(),
        reserved.as_str(),
        "fits",
    ]);
    for line in lines {
        table.row([
            line.name.clone(),
            line.step_ms.clone(),
            line.tokens_per_s.clone(),
            format!("{:.1} %", 100.0 * line.mfu),
            format!("{:.2}", line.exposed_ms),
            unit.show(line.allocated),
            unit.show(line.reserved),
            line.fits.to_owned(),
        ]);
    }
    table
}

/// Host memory of offloaded state, bytes.
#[derive(Serialize)]
struct HostMemory {
    bytes_per_rank: u64,
    bytes_per_node: u64,
}

impl HostMemory {
    fn of(p: &Prediction) -> Option<Self> {
        let bytes = p.host_state().0;
        (bytes > 0).then(|| Self {
            bytes_per_rank: bytes,
            bytes_per_node: bytes * p.ranks_per_node(),
        })
    }
}

/// The run's summary, plus fields that the summary does not contain.
#[derive(Serialize)]
struct Object {
    #[serde(flatten)]
    summary: Summary,
    /// Numbers of parameters.
    parameters: ParameterCount,
    /// Communicators of a rank.
    communicators: Vec<Communicator>,
    /// `yes`, `tight`, `no` or `?`.
    fits: &'static str,
    /// Host memory of offloaded state, if there is any.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_memory: Option<HostMemory>,
    /// Bytes by unit at the peak.
    memory_by_unit: BTreeMap<String, u64>,
    /// Time in milliseconds of kernels and collectives whose costs are modelled rather than
    /// measured.
    modelled_ms: BTreeMap<String, f64>,
    /// Experts, dispatch and imbalance, if the model has experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertsView>,
    /// The verdict, with what to try next.
    verdict: serde_json::Value,
    /// What the prediction does not cover, and what makes the job slow.
    warnings: Vec<Warning>,
    /// Explanation, one sentence each.
    why: Vec<String>,
    /// Id of the saved run.
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<String>,
}

impl Object {
    fn new(p: &Prediction, answer: report::Answer, id: Option<&Id>) -> Self {
        let mut summary = p.run.summary();
        let unit = &p.program.units[p.run.memory.at.unit.index()].name;
        summary.memory.at.insert("unit_name", unit.as_str().into());
        Self {
            summary,
            parameters: p.program.meta.parameters,
            communicators: communicators::of(&p.program),
            fits: p.fit.word(),
            host_memory: HostMemory::of(p),
            memory_by_unit: p
                .run
                .memory
                .by_unit
                .iter()
                .map(|(u, b)| (u.clone(), b.0))
                .collect(),
            modelled_ms: p
                .run
                .costs
                .modelled_by_name
                .iter()
                .map(|(n, t)| (n.clone(), t.ms()))
                .collect(),
            experts: ExpertsView::new(&p.run, &p.program, &p.scenario),
            verdict: answer.verdict.json(&answer.next),
            warnings: answer.warnings,
            why: crate::analysis::why::sentences(p),
            run_id: id.map(Id::to_string),
        }
    }
}
