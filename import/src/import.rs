//! Imports files: reads each by its format and combines ranks.

use crate::attribute::{Attributed, attribute, in_graphs};
use crate::costs::{self, Costs, Times};
use crate::facts::{self, Facts};
use crate::flight::{self, FlightReport};
use crate::kineto::{self, Recorder, Trace};
use crate::measured::{Labels, Measured, StepTime, measured, pure_times, step_times, typical};
use crate::ranks::{self, Rank, RankSummary};
use crate::snapshot::{self, SnapshotOptions, SnapshotReport};
use crate::source::{Format, Source, expand};
use crate::{ImportError, execution, joined, nsys};
use shardlab_plan::{Program, scenario};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Result of importing some files.
#[derive(Debug, Default)]
pub struct Import {
    /// The run that the traces show.
    pub run: Option<RunImport>,
    /// Memory snapshots with their files.
    pub snapshots: Vec<(PathBuf, Vec<SnapshotReport>)>,
    /// Result of comparing the flight records.
    pub flight: Option<FlightReport>,
    /// Structure of each execution trace, with its file.
    pub structure: Vec<(PathBuf, Structure)>,
}

/// Structure that an execution trace shows.
#[derive(Debug)]
pub struct Structure {
    /// Number of operators.
    pub operators: u64,
    /// Determined facts.
    pub facts: Facts,
}

/// A run that profiler traces show.
#[derive(Debug)]
pub struct RunImport {
    /// The run of the first rank.
    pub measured: Measured,
    /// What the first rank's trace determines.
    pub facts: Facts,
    /// Costs of the machine, as the first rank's trace shows them.
    pub costs: Costs,
    /// Ranks.
    pub ranks: Vec<RankSummary>,
    /// Host times of the kernel launches of each rank.
    pub launches: Vec<Times>,
    /// Attributed share of the device time of all ranks, 0 to 1.
    pub attributed_share: f64,
    /// Work that could not be attributed, by name: count, and device time in nanoseconds.
    pub unmatched: BTreeMap<String, (u64, u64)>,
    /// Events without work, by category.
    pub context: BTreeMap<String, u64>,
    /// How the step boundaries were found.
    pub steps_by: &'static str,
    /// What the traces do not determine, with reasons.
    pub undetermined: Vec<String>,
    /// Notes for the reader.
    pub notes: Vec<String>,
    /// Bytes of text that were read.
    pub bytes: u64,
    /// Number of events that were read.
    pub events: u64,
}

/// What to determine in addition to the content of the files.
#[derive(Clone, Debug, Default)]
pub struct Options<'a> {
    /// Replays of memory snapshots.
    pub snapshot: SnapshotOptions,
    /// The program with which flight records are compared.
    pub program: Option<&'a Program>,
}

/// Imports files. Arguments may be globs.
///
/// # Errors
/// Fails if a file cannot be read or has an invalid format, or if files do not belong together.
pub fn import(arguments: &[PathBuf], name: &str) -> Result<Import, ImportError> {
    import_with(arguments, name, &Options::default())
}

/// Imports files as [`import`] does, with options.
///
/// # Errors
/// Fails as [`import`] does.
pub fn import_with(
    arguments: &[PathBuf],
    name: &str,
    options: &Options<'_>,
) -> Result<Import, ImportError> {
    let files = expand(arguments)?;
    let mut sorted: Vec<(PathBuf, Format)> = Vec::new();
    for path in files {
        let source = Source::open(&path)?;
        match source.format() {
            Some(format) => sorted.push((path, format)),
            None => return Err(unknown(&path, &source)),
        }
    }
    let of = |format| {
        sorted
            .iter()
            .filter(move |f| f.1 == format)
            .map(|f| f.0.as_path())
    };
    let mut all = Import::default();
    let traces: Vec<(&Path, Format)> = of(Format::Kineto)
        .map(|p| (p, Format::Kineto))
        .chain(of(Format::Sqlite).map(|p| (p, Format::Sqlite)))
        .collect();
    for path in of(Format::Snapshot) {
        let reports = snapshot::read(Source::open(path)?, path, &options.snapshot)?;
        all.snapshots.push((path.to_owned(), reports));
    }
    if !traces.is_empty() {
        let snapshots: Vec<&SnapshotReport> = all.snapshots.iter().flat_map(|s| &s.1).collect();
        all.run = Some(traces_to_run(&traces, &snapshots, name)?);
    }
    for path in of(Format::ExecutionTrace) {
        let trace = execution::read(Source::open(path)?, path)?;
        let a = attribute(&trace);
        let step = typical(&step_times(&trace, &a)).map(|t| t.step);
        all.structure.push((
            path.to_owned(),
            Structure {
                operators: trace.events,
                facts: facts::find(&trace, &a, step),
            },
        ));
    }
    let files: Vec<&Path> = of(Format::Flight).collect();
    if !files.is_empty() {
        let (records, notes) = flight::read_all(&files)?;
        let mut report = flight::compare(&records)?;
        report.notes.splice(..0, notes);
        if let Some(program) = options.program {
            report.program = flight::check(&records, program);
        }
        all.flight = Some(report);
    }
    Ok(all)
}

/// Divides traces into jobs: each list has the ranks of one job, in the same steps. The order of
/// the jobs is that of their first traces.
///
/// # Errors
/// Fails if a file cannot be read, or is not a profiler trace.
pub fn jobs(files: &[PathBuf]) -> Result<Vec<Vec<PathBuf>>, ImportError> {
    let mut jobs: Vec<(Vec<PathBuf>, Vec<Rank>)> = Vec::new();
    for (i, path) in files.iter().enumerate() {
        let source = Source::open(path)?;
        let format = match source.format() {
            Some(format @ (Format::Kineto | Format::Sqlite)) => format,
            Some(_) => {
                return Err(ImportError::invalid(
                    path,
                    "a trace of the PyTorch profiler is expected",
                ));
            }
            None => return Err(unknown(path, &source)),
        };
        let own: Vec<Rank> = read(path, format)?
            .iter()
            .map(|trace| {
                let rank = ranks::rank_of(trace.head.rank, path, i);
                Rank::new(rank, path, trace, &attribute(trace))
            })
            .collect();
        let joined = |all: &[Rank]| {
            let mut all: Vec<Rank> = all.iter().chain(&own).cloned().collect();
            all.sort_by_key(|r| r.rank);
            ranks::check(&all).is_ok()
        };
        match jobs.iter_mut().find(|(_, all)| joined(all)) {
            Some((files, all)) => {
                files.push(path.clone());
                all.extend(own);
            }
            None => jobs.push((vec![path.clone()], own)),
        }
    }
    Ok(jobs.into_iter().map(|(files, _)| files).collect())
}

/// Returns the settings that a profiler trace or an execution trace determines.
///
/// # Errors
/// Fails if the file cannot be read or is neither.
pub fn facts_of(path: &Path) -> Result<(Facts, Vec<String>), ImportError> {
    let source = Source::open(path)?;
    let trace = match source.format() {
        Some(format @ (Format::Kineto | Format::Sqlite)) => {
            // The first process stands for all of them.
            let first = read(path, format)?.into_iter().next();
            first.ok_or(ImportError::NoTrace)?
        }
        Some(Format::ExecutionTrace) => execution::read(source, path)?,
        Some(other) => {
            return Err(ImportError::invalid(
                path,
                format!(
                    "a {} does not show a scenario; give a profiler's trace or an execution trace",
                    other.name()
                ),
            ));
        }
        None => return Err(unknown(path, &source)),
    };
    let a = attribute(&trace);
    let step = typical(&step_times(&trace, &a)).map(|t| t.step);
    let facts = facts::find(&trace, &a, step);
    let mut notes = trace.notes.clone();
    notes.extend(undetermined(&trace, &a, &facts));
    notes.extend(engine_note(&facts));
    notes.extend(data_note(&facts));
    Ok((facts, notes))
}

fn unknown(path: &Path, source: &Source) -> ImportError {
    let toml = path.extension().is_some_and(|e| e == "toml");
    let otherwise = if toml && scenario::load(path, &[]).is_ok() {
        let path = path.display();
        format!("a scenario, which `shardlab sim {path}` predicts, and no trace")
    } else if toml {
        "TOML, and no trace".to_owned()
    } else {
        source.otherwise().to_owned()
    };
    ImportError::invalid(
        path,
        format!(
            "the file is {otherwise}; a trace of the PyTorch profiler, an execution trace, a memory snapshot or a flight record is expected"
        ),
    )
}

fn has_device_work(trace: &Trace, path: &Path) -> Result<(), ImportError> {
    if !trace.device.is_empty() {
        return Ok(());
    }
    let mut reason = "the trace contains no GPU work".to_owned();
    if let Some(note) = trace.notes.first() {
        reason += &format!(": {note}");
    } else if trace.launches.is_empty() {
        reason += ": the job ran on a CPU, or without ProfilerActivity.CUDA";
    } else {
        reason += ", though it has calls of the CUDA runtime: CUPTI could not record it (another profiler may have been attached)";
    }
    for error in trace.head.errors.iter().take(2) {
        reason += &format!("; the profiler says: {error}");
    }
    Err(ImportError::invalid(path, reason))
}

struct First {
    trace: Trace,
    attributed: Attributed,
    times: Vec<StepTime>,
}

/// Reads the trace files one by one, because all of them together may not fit into memory.
fn all_traces<'a>(
    paths: &'a [(&'a Path, Format)],
) -> impl Iterator<Item = (usize, (&'a Path, Result<Trace, ImportError>))> {
    let of_file = |(path, format): &(&'a Path, Format)| {
        let path = *path;
        let (traces, failed) = match read(path, *format) {
            Ok(traces) => (traces, None),
            Err(e) => (Vec::new(), Some(e)),
        };
        let traces = traces.into_iter().map(Ok).chain(failed.map(Err));
        traces.map(move |t| (path, t)).collect::<Vec<_>>()
    };
    paths.iter().flat_map(of_file).enumerate()
}

/// Reads the traces of a file: one, or one per process.
fn read(path: &Path, format: Format) -> Result<Vec<Trace>, ImportError> {
    let traces = match format {
        Format::Sqlite => nsys::read(path)?,
        _ => vec![kineto::read(Source::open(path)?, path)?],
    };
    for trace in &traces {
        has_device_work(trace, path)?;
    }
    Ok(traces)
}

fn traces_to_run(
    paths: &[(&Path, Format)],
    snapshots: &[&SnapshotReport],
    name: &str,
) -> Result<RunImport, ImportError> {
    let mut ranks: Vec<Rank> = Vec::new();
    let mut first: Option<(u32, First)> = None;
    let mut unmatched: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut context: BTreeMap<String, u64> = BTreeMap::new();
    let (mut bytes, mut events) = (0, 0);
    for (i, (path, trace)) in all_traces(paths) {
        let trace = trace?;
        let attributed = attribute(&trace);
        let rank = ranks::rank_of(trace.head.rank, path, i);
        bytes += trace.bytes;
        events += trace.events;
        collect(&trace, &attributed, &mut unmatched, &mut context);
        let kept = Rank::new(rank, path, &trace, &attributed);
        let times = kept.times.clone();
        ranks.push(kept);
        // The lowest rank is shown. Others are only needed for their collectives.
        if first.as_ref().is_none_or(|f| rank < f.0) {
            first = Some((
                rank,
                First {
                    trace,
                    attributed,
                    times,
                },
            ));
        }
    }
    ranks.sort_by_key(|r| r.rank);
    ranks::check(&ranks)?;
    let Some((_, mut first)) = first else {
        return Err(ImportError::NoTrace);
    };
    if first.trace.memory.is_empty() {
        let snapshots = snapshots.iter().copied();
        first.trace.memory = joined::memory(&first.trace, &first.attributed, snapshots);
    }
    let clock_notes = ranks::align_clocks(&mut ranks);
    let lists: Vec<&[_]> = ranks.iter().map(|r| r.collectives.as_slice()).collect();
    let joint = pure_times(&lists);
    let (pure, late) = (joint.pure, joint.late);
    let step = typical(&first.times).map(|t| t.step);
    let facts = facts::find(&first.trace, &first.attributed, step);
    let undetermined = all_undetermined(&first, &facts, &ranks);
    let mut notes: Vec<String> = Vec::new();
    for rank in &ranks {
        let of_rank = rank.notes.iter();
        notes.extend(of_rank.map(|n| format!("rank {}: {n}", rank.rank)));
    }
    notes.extend(clock_notes);
    notes.extend(engine_note(&facts));
    for (rank, lost) in ranks.iter().zip(&joint.lost).filter(|(_, n)| **n > 0) {
        notes.push(format!(
            "rank {}: its trace lacks {} that another rank of the group has; waits there do not count",
            rank.rank,
            match lost {
                1 => "a collective".to_owned(),
                n => format!("{n} collectives"),
            }
        ));
    }
    if joint.alone > 0 {
        notes.push(format!(
            "{} collectives of rank {} have no counterpart: traces of the other ranks of their groups are not given",
            joint.alone, ranks[0].rank
        ));
    }
    let labels = labels(&first, &facts, &ranks, &late, name);
    let measured = measured(&first.trace, &first.attributed, &first.times, &pure, labels);
    let mut costs = costs::find(&first.trace, &first.attributed);
    costs.add_collectives(&measured);
    let time = ranks
        .iter()
        .fold((0, 0), |t, r| (t.0 + r.time.0, t.1 + r.time.1));
    Ok(RunImport {
        measured,
        costs,
        launches: ranks.iter().map(|r| r.launches.clone()).collect(),
        ranks: ranks
            .iter()
            .zip(&late)
            .map(|(r, l)| r.summary(*l, step))
            .collect(),
        attributed_share: ranks::share(time),
        unmatched,
        context,
        steps_by: ranks::found_by(&first.attributed.steps),
        undetermined,
        notes,
        bytes,
        events,
        facts,
    })
}

/// Returns what the traces do not determine.
fn all_undetermined(first: &First, facts: &Facts, ranks: &[Rank]) -> Vec<String> {
    let mut all = undetermined(&first.trace, &first.attributed, facts);
    all.extend(facts.mesh_gaps.iter().cloned());
    all.extend(facts.model.gaps.iter().cloned());
    all.extend(facts.merged_devices.iter().cloned());
    if facts.unsized_collectives > 0 {
        all.push(format!(
            "mesh: {} NCCL kernels per step are in the trace, but the sizes of their groups are not",
            facts.unsized_collectives
        ));
    }
    if ranks.len() == 1 && facts.world_size.as_ref().is_some_and(|w| w.value > 1) {
        all.push(
            "time of collectives without waits for other ranks: only one rank's trace is given"
                .into(),
        );
    }
    all
}

fn collect(
    trace: &Trace,
    a: &Attributed,
    unmatched: &mut BTreeMap<String, (u64, u64)>,
    context: &mut BTreeMap<String, u64>,
) {
    for (name, (count, time)) in &a.unmatched {
        let of = unmatched.entry(name.clone()).or_default();
        of.0 += count;
        of.1 += time;
    }
    for (category, count) in &trace.unknown {
        unmatched
            .entry(format!("events of category {category}"))
            .or_default()
            .0 += count;
    }
    if trace.malformed > 0 {
        unmatched.entry("malformed events".into()).or_default().0 += trace.malformed;
    }
    for (category, count) in &trace.context {
        *context.entry(category.clone()).or_default() += count;
    }
}

fn labels(first: &First, facts: &Facts, ranks: &[Rank], late: &[i64], name: &str) -> Labels {
    let model = &facts.model;
    let batches = facts
        .accumulation
        .as_ref()
        .map_or(1, |a| u64::from(a.value));
    let tokens = model.micro_batch.as_ref().zip(model.seq_len.as_ref());
    let tokens = tokens.map_or(0, |(b, s)| b.value * s.value * batches);
    let head = &first.trace.head;
    let mut environment = BTreeMap::new();
    let mut fact = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            environment.insert(key.to_owned(), value);
        }
    };
    fact("engine", Some("imported trace".into()));
    fact(
        "source",
        Some(
            ranks
                .iter()
                .map(|r| r.path.display().to_string())
                .collect::<Vec<_>>()
                .join(" "),
        ),
    );
    fact("device", head.devices.first().cloned());
    fact("nccl", head.nccl.clone());
    fact("steps_by", Some(first.attributed.steps.found_by.to_owned()));
    for (rank, late) in ranks.iter().zip(late).filter(|_| ranks.len() > 1) {
        fact(
            &format!("late_ms.rank{}", rank.rank),
            Some(format!("{:.3}", *late as f64 / 1e6)),
        );
    }
    let world = facts.world_size.as_ref().map_or(1, |w| w.value);
    Labels {
        name: name.to_owned(),
        policy: facts
            .policy
            .as_ref()
            .map_or("unknown", |p| p.value)
            .to_owned(),
        world_size: world.max(u32::try_from(ranks.len()).unwrap_or(u32::MAX)),
        tokens,
        environment,
    }
}

/// Says how the prediction of an engine differs from it.
fn engine_note(facts: &Facts) -> Option<String> {
    facts.is_fsdp1.then(|| {
        "the job runs FSDP1 (FullyShardedDataParallel): its schedule is predicted as that of FSDP2, without its flat parameters and its rate limiter"
            .to_owned()
    })
}

/// Waits for data that are shorter than this per step are not worth a note, nanoseconds.
const SHORT_WAIT: u64 = 1_000_000;

fn data_note(facts: &Facts) -> Option<String> {
    (facts.data_wait >= SHORT_WAIT).then(|| {
        format!(
            "the host waits {:.1} ms per step for its DataLoader: more workers or prefetched batches shorten this, and predictions do not contain it",
            facts.data_wait as f64 / 1e6
        )
    })
}

/// Returns the settings that the trace does not determine, with reasons.
fn undetermined(trace: &Trace, a: &Attributed, facts: &Facts) -> Vec<String> {
    let mut all = Vec::new();
    let mut say = |text: &str| all.push(text.to_owned());
    if !a.work.is_empty() && a.work.iter().all(|w| w.launch.is_none()) {
        say(
            "causes of exposed time: nothing in the trace connects kernels with their launches (it has no correlation ids), so all of it counts as host, contention or wire",
        );
    }
    let in_graphs = in_graphs(trace, a);
    if in_graphs * 2 > a.work.len() {
        say(&format!(
            "units and phases of {in_graphs} kernels: they run in CUDA graphs, which launch them as a whole"
        ));
        say("gradient clipping: its operators are not in the trace of a CUDA graph");
    }
    if trace.host.iter().all(|e| e.is_annotation) {
        say(
            "names of units, and options: the trace has no host operators (it was recorded without ProfilerActivity.CPU); steps and phases come from kernels",
        );
        return all;
    }
    let nsight = trace.head.recorder == Recorder::Nsight;
    if !trace.head.shapes && !trace.host.iter().any(|e| e.inputs.is_some()) {
        say(match nsight {
            true => "shapes of parameters and activations: Nsight Systems does not record them",
            false => {
                "shapes of parameters and activations: the trace was recorded without record_shapes=True"
            }
        });
    }
    if trace.memory.is_empty() {
        say(match nsight {
            true => {
                "memory over time: an export of Nsight Systems has no events of PyTorch's allocator"
            }
            false => {
                "memory over time: the trace was recorded without profile_memory=True (give a snapshot of the same steps and device, too)"
            }
        });
    }
    if a.steps.all.iter().all(|s| !s.is_whole()) {
        say(match trace.is_cut_off {
            true => "step time: the file was cut off before the end of the first complete step",
            false => "step time: the trace contains no complete step",
        });
    } else if a.steps.all.iter().all(|s| s.optimizer.is_none()) {
        say("gradient accumulation: no optimizer is in the trace");
    }
    if trace.head.world_size.is_none() {
        say(match nsight {
            true => "the number of ranks of the job: Nsight Systems does not record it",
            false => {
                "the number of ranks, except from process groups: the trace has no distributedInfo"
            }
        });
    }
    if facts.units.is_empty() {
        say("units: nothing is gathered in the trace");
    }
    if facts.clip.as_ref().is_some_and(|c| c.value) {
        say("the limit of gradient clipping: PyTorch does not record it");
    }
    all
}
