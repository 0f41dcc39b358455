//! `shardlab explain`: what time and memory are made of, why, and what each option would change.

mod json;
mod whatif;

use super::args::{One, profiles};
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use super::table::Table;
use crate::analysis::exposed::{self, Gap};
use crate::analysis::path::{self, CriticalPath};
use crate::analysis::slower::{self, Slower};
use crate::analysis::whatif::{Effect, WhatIf, candidates, try_all};
use crate::analysis::{compile, peak, why};
use crate::predict::{PredictError, Prediction, predict};
use shardlab_plan::scenario::{self, CompileMode};
use shardlab_plan::units::{ByteUnit, Picos};
use shardlab_sim::Options;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: One,
    /// Do not try other options
    #[arg(long)]
    no_what_if: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Compile modes other than that of the scenario.
const OTHER_MODES: usize = 3;

/// Gaps and pieces that are listed.
const LISTED: usize = 10;

/// Everything there is to say about a prediction.
struct Explanation {
    prediction: Prediction,
    sentences: Vec<String>,
    path: CriticalPath,
    gaps: Vec<Gap>,
    compile: Vec<(CompileMode, Result<compile::Mode, PredictError>)>,
    base: Effect,
    slower: Vec<Slower>,
    what_ifs: Vec<WhatIf>,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let base = args.scenario.load()?;
    let profiles = profiles();
    let tried = if args.no_what_if {
        0
    } else {
        OTHER_MODES + candidates(&base).len()
    };
    let progress = Progress::new("predicting", 1 + tried, args.json);
    let prediction = predict(&base, &profiles, &Options::default())?;
    progress.step();
    let load = |further: &[String]| {
        progress.step();
        let mut set = args.scenario.overrides.set.clone();
        set.extend_from_slice(further);
        scenario::load(&args.scenario.scenario, &set)
    };
    let mut explanation = Explanation {
        sentences: why::sentences(&prediction),
        path: path::critical_path(&prediction.program, &prediction.run),
        gaps: exposed::gaps(&prediction.program, &prediction.run),
        compile: Vec::new(),
        base: Effect::of(&prediction),
        slower: Vec::new(),
        what_ifs: Vec::new(),
        prediction,
    };
    if !args.no_what_if {
        let with_mode = |mode: &str| load(&[mode.to_owned()]);
        explanation.compile = compile::modes(&explanation.prediction, &profiles, &with_mode);
        explanation.slower = slower::parts(&explanation.prediction);
        explanation.what_ifs = try_all(&explanation.prediction, &profiles, &load);
    }
    drop(progress);
    if args.json {
        out.json(&json::object(&explanation))?;
    } else {
        print(&explanation, out)?;
    }
    Ok(Status::Done)
}

fn print(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let p = &e.prediction;
    out.heading(format_args!(
        "{}: {:.2} ms a step on {}, {} allocated",
        p.scenario.name,
        p.step_ms(),
        p.run.hardware,
        p.run.memory.peak_allocated
    ))?;
    for sentence in &e.sentences {
        out.paragraph(0, sentence)?;
    }
    critical_path(e, out)?;
    exposed_time(e, out)?;
    memory(p, out)?;
    compile_modes(e, out)?;
    slower_parts(e, out)?;
    if !e.what_ifs.is_empty() {
        whatif::print(&e.base, &e.what_ifs, out)?;
    }
    Ok(())
}

fn percent(part: Picos, whole: Picos) -> String {
    format!("{:.1} %", 100.0 * part.0 as f64 / whole.0.max(1) as f64)
}

fn critical_path(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let path = &e.path;
    out.blank()?;
    out.heading(format_args!(
        "Critical path: {} spans, {}",
        path.spans, path.length
    ))?;
    let mut parts: Vec<String> = path
        .by_work
        .iter()
        .map(|(w, t)| format!("{} {}", w.name(), percent(*t, path.length)))
        .collect();
    parts.push(format!(
        "between spans {}",
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
            &format!("Before it the host alone decides for {}.", path.host_first),
        )?;
    }
    let mut table = Table::new(["longest pieces", "unit", "phase", ">spans", ">at ms", ">ms"]);
    for piece in &path.pieces {
        table.row([
            piece.work.name().to_owned(),
            piece.unit.clone(),
            piece.phase.to_owned(),
            piece.spans.to_string(),
            format!("{:.2}", piece.start.ms()),
            format!("{:.3}", piece.length.ms()),
        ]);
    }
    out.text(table)?;
    Ok(())
}

fn exposed_time(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let run = &e.prediction.run;
    let total = run.exposed_total();
    out.blank()?;
    out.heading(format_args!("Exposed time: {total}"))?;
    if e.gaps.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(["cause", "waited for", "phase", ">gaps", ">ms"]);
    for g in exposed::groups(&e.gaps).iter().take(LISTED) {
        table.row([
            g.cause.name().to_owned(),
            g.awaited.name.clone(),
            g.awaited.phase.to_owned(),
            g.count.to_string(),
            format!("{:.3}", g.total.ms()),
        ]);
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
    for g in exposed::longest(e.gaps.clone(), LISTED) {
        table.row([
            g.awaited.name,
            g.unit,
            g.awaited.phase.to_owned(),
            g.cause.name().to_owned(),
            format!("{:.2}", g.start.ms()),
            format!("{:.3}", g.length.ms()),
            g.why,
        ]);
    }
    out.text(table)?;
    Ok(())
}

fn slower_parts(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    if e.slower.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading("If a part of the machine took longer (`sim --slower PART=FACTOR`)")?;
    let [little, twice] = slower::FACTORS.map(|f| format!(">{f} times"));
    let mut table = Table::new(["part", little.as_str(), "", twice.as_str(), ""]);
    let base = e.prediction.step_ms();
    for s in &e.slower {
        let [a, b] = s
            .step_ms
            .map(|ms| ms.map_or("-".to_owned(), |ms| format!("{ms:.2} ms")));
        let [more, much] = s.step_ms.map(|ms| {
            ms.map_or_else(String::new, |ms| {
                format!("{:+.1} %", 100.0 * (ms / base - 1.0))
            })
        });
        table.row([s.part.name().to_owned(), a, more, b, much]);
    }
    out.text(table)?;
    Ok(())
}

fn memory(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let m = &p.run.memory;
    let at = &m.at;
    out.blank()?;
    out.heading(format_args!(
        "Memory: {} allocated in {} of {} (step {}, instruction {})",
        m.peak_allocated,
        at.phase.name(),
        p.program.units[at.unit.index()].name,
        at.step,
        at.instr.0
    ))?;
    let all = m.peak_allocated.0.max(1) as f64;
    let share = |bytes: u64| format!("{:.1} %", 100.0 * bytes as f64 / all);
    let mut table = Table::new(["role", ">bytes", ">share", "unit", ">bytes", ">share"]);
    let rows = m.by_role.len().max(m.by_unit.len()).min(LISTED);
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
    let mut table = Table::new(["largest buffers alive", "type", ">each", ">count", ">total"]);
    for a in peak::largest(&p.program, at.instr, LISTED) {
        table.row([
            a.name.clone(),
            a.dtype.to_string(),
            a.bytes.to_string(),
            a.count.to_string(),
            a.total().to_string(),
        ]);
    }
    out.text(table)?;
    Ok(())
}

fn compile_modes(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let off = e
        .compile
        .iter()
        .find_map(|(mode, made)| (*mode == CompileMode::Off).then_some(made.as_ref().ok())?);
    let Some(off) = off else {
        return Ok(());
    };
    out.blank()?;
    out.heading("Compile modes")?;
    let made = e.compile.iter().filter_map(|(_, made)| made.as_ref().ok());
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
        ">late ms",
        allocated.as_str(),
    ]);
    for (_, made) in &e.compile {
        let Ok(m) = made else { continue };
        table.row([
            compile::name(m.mode).to_owned(),
            format!("{:.2}", m.step_ms),
            m.kernels.to_string(),
            format!("{:.2}", m.kernel_time.ms()),
            format!("{:.2}", m.host.ms()),
            format!("{:.2}", m.guards.ms()),
            format!("{:.2}", m.graph_breaks.ms()),
            format!("{:.2}", m.host_exposed.ms()),
            unit.show(m.peak_allocated),
        ]);
    }
    out.text(table)?;
    for (mode, made) in &e.compile {
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
