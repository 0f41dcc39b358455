//! `shardlab explain`: the answer, what to change, and where time and memory go. Also explains
//! saved and imported runs.

mod experts;
mod float8;
mod json;
mod measured;
mod whatif;

use super::args::{One, profiles};
use super::keep::From;
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use super::table::Table;
use super::verdict::{self, command};
use crate::analysis::experts::{self as of_experts, About};
use crate::analysis::exposed::{self, Gap};
use crate::analysis::float8::Float8;
use crate::analysis::path::{self, CriticalPath};
use crate::analysis::slower::{self, Slower};
use crate::analysis::smallest_fit::{self, Search};
use crate::analysis::verdict::Verdict;
use crate::analysis::warnings::{self, Warning};
use crate::analysis::whatif::{Effect, WhatIf, try_all};
use crate::analysis::{compile, peak};
use crate::predict::{PredictError, Prediction, predict};
use shardlab_plan::config::CompileMode;
use shardlab_plan::record::Run;
use shardlab_plan::record::basis::{milliseconds, number};
use shardlab_plan::scenario;
use shardlab_plan::units::{ByteUnit, Picos};
use shardlab_sim::Options;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: One,
    #[command(flatten)]
    from: From,
    /// Do not predict the effect of other options
    #[arg(long)]
    no_what_if: bool,
    /// Print full tables: every option, including other engines, changes without effect and
    /// impossible ones; compile modes; slower hardware
    #[arg(long)]
    all: bool,
    /// Print one JSON object (with everything)
    #[arg(long)]
    json: bool,
}

/// Number of rows of a table with `--all`, and of entries of a list in JSON.
const MAX_LISTED_ALL: usize = 10;
/// Number of rows of a table without `--all`.
const MAX_LISTED: usize = 5;

/// All parts of an explanation.
struct Explanation {
    prediction: Prediction,
    verdict: Verdict,
    warnings: Vec<Warning>,
    next: String,
    /// Command that searches all options together.
    tune: String,
    path: CriticalPath,
    gaps: Vec<Gap>,
    base: Effect,
    tried: Tried,
}

/// Effects of other options and other hardware; empty with `--no-what-if`.
#[derive(Default)]
struct Tried {
    smallest_fit: Option<Search>,
    what_ifs: Vec<WhatIf>,
    experts: Vec<(About, WhatIf)>,
    float8: Option<Float8>,
    compile: Vec<(CompileMode, Result<compile::Mode, PredictError>)>,
    slower: Vec<Slower>,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let Some(view) = args.from.find(&args.scenario.scenario)? {
        return measured::run(&view, args, out);
    }
    let base = args.scenario.load()?;
    let profiles = profiles();
    let progress = Progress::new("predicting", 1, args.json);
    let prediction = predict(&base, &profiles, &Options::default())?;
    let load = |more: &[String]| {
        let mut set = args.scenario.overrides.set.clone();
        set.extend_from_slice(more);
        scenario::load(&args.scenario.scenario, &set)
    };
    let mut tried = Tried::default();
    if !args.no_what_if {
        tried.smallest_fit = smallest_fit::search(&prediction, &profiles, &load);
        // The short text shows single options only if no search was needed.
        if args.json || args.all || tried.smallest_fit.is_none() {
            tried.what_ifs = try_all(&prediction, &profiles, &load);
        }
        tried.experts = of_experts::try_all(&prediction, &profiles, &load);
        tried.float8 = Float8::of(&prediction, &profiles)?;
        if args.json || args.all {
            let with_mode = |mode: &str| load(&[mode.to_owned()]);
            tried.compile = compile::modes(&prediction, &profiles, &with_mode);
            tried.slower = slower::parts(&prediction);
        }
    }
    drop(progress);
    let base = Effect::of(&prediction);
    let verdict = Verdict::of(&prediction);
    let next = if args.no_what_if {
        let command = command(
            "explain",
            &args.scenario.scenario,
            &args.scenario.overrides.set,
        );
        format!("`{command}` tries other options")
    } else {
        whatif::next(&base, &verdict, &tried, &prediction.scenario.fsdp)
    };
    let explanation = Explanation {
        verdict,
        warnings: warnings::located(
            &prediction,
            &args.scenario.scenario,
            &args.scenario.overrides.set,
        ),
        next,
        tune: command(
            "tune",
            &args.scenario.scenario,
            &args.scenario.overrides.set,
        ),
        path: path::critical_path(&prediction.program, &prediction.run),
        gaps: exposed::gaps(&prediction.program, &prediction.run),
        base,
        tried,
        prediction,
    };
    if args.json {
        out.json(&json::object(&explanation))?;
    } else {
        print(&explanation, args.all, out)?;
    }
    Ok(Status::Done)
}

fn print(e: &Explanation, all: bool, out: &mut Out) -> Result<(), Failure> {
    let p = &e.prediction;
    out.heading(super::sim::report::predicted_heading(p))?;
    verdict::print(&e.verdict, &e.next, &e.warnings, out)?;
    if let Some(search) = &e.tried.smallest_fit {
        whatif::solutions(e, search, all, out)?;
    }
    if all {
        whatif::full(&e.base, &e.tried.what_ifs, out)?;
    } else if e.tried.smallest_fit.is_none() && !e.tried.what_ifs.is_empty() {
        whatif::worthwhile(e, out)?;
    }
    experts::print(e, out)?;
    float8::print(e, out)?;
    let listed = if all { MAX_LISTED_ALL } else { MAX_LISTED };
    exposed_time(&p.run, &e.gaps, listed, out)?;
    memory(p, listed, out)?;
    critical_path(&e.path, listed, out)?;
    if all {
        compile_modes(e, out)?;
        slower_parts(e, out)?;
    } else {
        out.blank()?;
        out.paragraph(
            0,
            &format!(
                "Tables show the first {MAX_LISTED} rows. --all shows more, every option, compile modes and slower hardware."
            ),
        )?;
    }
    out.paragraph(
        0,
        &format!(
            "`{}` searches all options together; `shardlab fit` reads the configurations of frameworks.",
            e.tune
        ),
    )?;
    Ok(())
}

fn percent(part: Picos, whole: Picos) -> String {
    format!("{:.1} %", 100.0 * part.0 as f64 / whole.0.max(1) as f64)
}

fn critical_path(path: &CriticalPath, listed: usize, out: &mut Out) -> Result<(), Failure> {
    out.blank()?;
    out.heading(format_args!(
        "Critical path: {} kernels and collectives, {}",
        path.spans, path.length
    ))?;
    let mut parts: Vec<String> = path
        .by_work
        .iter()
        .map(|(w, t)| format!("{} {}", w.name(), percent(*t, path.length)))
        .collect();
    parts.push(format!(
        "idle between them {}",
        percent(path.between, path.length)
    ));
    out.paragraph(2, &format!("By kind: {}.", parts.join(", ")))?;
    let units: Vec<String> = path
        .by_unit
        .iter()
        .take(4)
        .map(|(u, t)| format!("{u} {}", percent(*t, path.length)))
        .collect();
    out.paragraph(2, &format!("By unit: {}.", units.join(", ")))?;
    if path.host_first.0 > path.length.0 / 1000 {
        out.paragraph(
            2,
            &format!(
                "Before it, the path runs through the host for {}: the device has nothing to do until the host launches the first kernel of the path.",
                path.host_first
            ),
        )?;
    }
    let mut table = Table::new(path::Piece::HEADS);
    for piece in path.pieces.iter().take(listed) {
        table.row(piece.cells());
    }
    out.text(table)?;
    Ok(())
}

fn exposed_time(run: &Run, gaps: &[Gap], listed: usize, out: &mut Out) -> Result<(), Failure> {
    let total = run.exposed_total();
    let step = run.recorded_to.saturating_sub(run.recorded_from);
    let basis = run.basis.as_ref();
    out.blank()?;
    out.heading(format_args!(
        "Exposed time: {} ({}) with the compute stream idle",
        milliseconds(total.ms(), basis),
        percent(total, step)
    ))?;
    if gaps.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(exposed::Group::HEADS);
    for g in exposed::groups(gaps).iter().take(listed) {
        table.row(g.cells(basis));
    }
    out.text(table)?;
    out.blank()?;
    let mut table = Table::new([
        "longest gaps",
        "unit",
        "phase",
        "cause",
        ">at ms",
        ">ms",
        "why",
    ]);
    for g in exposed::longest(gaps.to_vec(), listed) {
        table.row(g.cells(basis));
    }
    out.text(table)?;
    Ok(())
}

fn slower_parts(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    if e.tried.slower.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading("If one component were slower (`sim --scale PART=FACTOR`)")?;
    let [little, twice] = slower::FACTORS.map(|f| format!(">{f}x"));
    let mut table = Table::new(["component", little.as_str(), "", twice.as_str(), ""]);
    let base = e.prediction.step_ms();
    let basis = e.prediction.run.basis.as_ref();
    for s in &e.tried.slower {
        table.row(s.cells(base, basis));
    }
    out.text(table)?;
    Ok(())
}

fn memory(p: &Prediction, listed: usize, out: &mut Out) -> Result<(), Failure> {
    let m = &p.run.memory;
    let at = &m.at;
    out.blank()?;
    out.heading(format_args!(
        "Memory at the peak: {} allocated in {} of {} (step {}, instruction {})",
        m.peak_allocated,
        at.phase.name(),
        p.program.units[at.unit.index()].name,
        at.step,
        at.instr.0
    ))?;
    let all = m.peak_allocated.0.max(1) as f64;
    let share = |bytes: u64| format!("{:.1} %", 100.0 * bytes as f64 / all);
    let mut table = Table::new(["role", ">bytes", ">share", "unit", ">bytes", ">share"]);
    let rows = m.by_role.len().max(m.by_unit.len()).min(listed);
    for i in 0..rows {
        let role = m.by_role.get(i).map(|(r, b)| (r.name().to_owned(), *b));
        let unit = m.by_unit.get(i).map(|(u, b)| (u.clone(), *b));
        let cells = |part: Option<(String, shardlab_plan::units::Bytes)>| match part {
            Some((name, b)) => [name, b.to_string(), share(b.0)],
            None => [String::new(), String::new(), String::new()],
        };
        table.row(cells(role).into_iter().chain(cells(unit)));
    }
    out.text(table)?;
    out.blank()?;
    let mut table = Table::new(peak::Alive::HEADS);
    for a in peak::largest(&p.program, at.instr, listed) {
        table.row(a.cells());
    }
    out.text(table)?;
    Ok(())
}

fn compile_modes(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let off = e
        .tried
        .compile
        .iter()
        .find_map(|(mode, made)| (*mode == CompileMode::Off).then_some(made.as_ref().ok())?);
    let Some(off) = off else {
        return Ok(());
    };
    out.blank()?;
    out.heading("Compile modes")?;
    let made = e
        .tried
        .compile
        .iter()
        .filter_map(|(_, made)| made.as_ref().ok());
    let unit = ByteUnit::common(made.map(|m| m.peak_allocated));
    let allocated = format!(">alloc {}", unit.name());
    let mut table = Table::new([
        "mode",
        ">step ms",
        ">launches",
        ">kernels ms",
        ">host ms",
        ">guards ms",
        ">breaks ms",
        ">wait ms",
        allocated.as_str(),
    ]);
    let basis = e.prediction.run.basis.as_ref();
    let shown = |time: Picos| number(time.ms(), 2, basis);
    for (_, made) in &e.tried.compile {
        let Ok(m) = made else { continue };
        table.row([
            compile::name(m.mode).to_owned(),
            number(m.step_ms, 2, basis),
            m.kernels.to_string(),
            shown(m.kernel_time),
            shown(m.host),
            shown(m.guards),
            shown(m.graph_breaks),
            shown(m.host_exposed),
            unit.show(m.peak_allocated),
        ]);
    }
    out.text(table)?;
    for (mode, made) in &e.tried.compile {
        match made {
            Ok(m) if *mode != CompileMode::Off => out.paragraph(2, &m.against(off))?,
            Ok(_) => {}
            Err(error) => out.paragraph(
                2,
                &format!(
                    "{} is not possible: {}",
                    compile::name(*mode),
                    error.reason()
                ),
            )?,
        }
    }
    Ok(())
}
