//! `shardlab plan`: prints the program as text (all of it, or one section or unit), or the layout
//! of its parameters.

mod groups;

use super::args::{One, plan};
use super::output::{Failure, Out, Status, say};
use super::text;
use crate::analysis::warnings::{self, Warning};
use serde::Serialize;
use shardlab_plan::Program;
use shardlab_plan::ir::{InstrId, ParameterCount, UnitId};
use shardlab_plan::program;
use shardlab_plan::program::SectionKind;
use shardlab_plan::scenario::nearest;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: One,
    /// Print only instructions of this unit, for example layers.3 (repeatable); of the steady step,
    /// unless --first or --section is given
    #[arg(long, value_name = "NAME")]
    unit: Vec<String>,
    /// Print only this part of the program
    #[arg(long, value_enum)]
    section: Option<Section>,
    /// Print only the first step (as --section first)
    #[arg(long, conflicts_with = "section")]
    first: bool,
    /// Print the layout of the parameter groups instead: shapes, offsets, padding, bytes
    #[arg(long, conflicts_with_all = ["section", "first"])]
    groups: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Section {
    /// The allocation of persistent state
    Init,
    /// The first step
    First,
    /// Every further step
    Steady,
    /// A forward pass for validation
    Validation,
}

impl Section {
    fn kind(self) -> SectionKind {
        match self {
            Self::Init => SectionKind::Init,
            Self::First => SectionKind::First,
            Self::Steady => SectionKind::Steady,
            Self::Validation => SectionKind::Validation,
        }
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let scenario = args.scenario.load()?;
    let program = plan(&scenario)?;
    let units = units(&program, &args.unit)?;
    let warnings = warnings::of_scenario(
        &scenario,
        &args.scenario.scenario,
        &args.scenario.overrides.set,
    );
    if !args.json {
        for warning in &warnings {
            say(format_args!("warning: {warning}"));
        }
    }
    if args.groups {
        let report = groups::report(&scenario, &program, units.as_deref(), warnings);
        if args.json {
            out.json(&report)?;
        } else {
            groups::print(&report, out)?;
        }
        return Ok(Status::Done);
    }
    let mut kind = args.section.map(Section::kind);
    if args.first {
        kind = Some(SectionKind::First);
    }
    if let Some(kind) = kind
        && program.section(kind).is_none()
    {
        return Err(Failure::bad_input(format_args!(
            "{}: the program has no validation section, because train.validate_every is 0",
            scenario.name
        )));
    }
    if args.json {
        out.json(&Selection { kind, units }.listing(&program, warnings))?;
        return Ok(Status::Done);
    }
    // All steps of a unit are similar, so by default only one is shown.
    let one_of_many = kind.is_none() && units.is_some();
    if one_of_many {
        kind = Some(SectionKind::Steady);
    }
    Selection { kind, units }.print(&program, out)?;
    if one_of_many {
        out.blank()?;
        out.line(
            "(--first shows the first step, --section init the allocation of persistent state)",
        )?;
    }
    Ok(Status::Done)
}

/// Returns the units with these names; `None` for all.
fn units(program: &Program, names: &[String]) -> Result<Option<Vec<UnitId>>, Failure> {
    if names.is_empty() {
        return Ok(None);
    }
    let find = |name: &String| {
        let found = program.units.iter().position(|u| u.name == *name);
        found.map(|i| UnitId(i as u16)).ok_or_else(|| {
            let known: Vec<&str> = program.units.iter().map(|u| u.name.as_str()).collect();
            Failure::bad_input(format_args!(
                "there is no unit `{name}`{}; the program has {}",
                nearest(name, known.iter().copied())
                    .map_or_else(String::new, |near| format!(" (did you mean `{near}`?)")),
                abridged(&known)
            ))
        })
    };
    names.iter().map(find).collect::<Result<_, _>>().map(Some)
}

/// Joins names with commas. Omits the central part of a long list.
fn abridged(names: &[&str]) -> String {
    match names {
        [first, second, third, .., last] if names.len() > 8 => {
            format!("{first}, {second}, {third}, … {last}")
        }
        _ => names.join(", "),
    }
}

/// Selects the instructions to show.
struct Selection {
    kind: Option<SectionKind>,
    units: Option<Vec<UnitId>>,
}

impl Selection {
    fn takes(&self, program: &Program, id: InstrId) -> bool {
        let unit = program.instrs[id.index()].unit;
        self.units.as_ref().is_none_or(|u| u.contains(&unit))
            && self.kind.is_none_or(|kind| {
                program
                    .section(kind)
                    .is_some_and(|s| s.instrs.contains(&id.0))
            })
    }

    /// Prints the selected instructions, one per line. On a terminal, lines are broken to its
    /// width.
    fn print(&self, program: &Program, out: &mut Out) -> Result<(), Failure> {
        let width = text::asked();
        for line in program.header_text(self.units.as_deref()).lines() {
            for line in text::hanging(line, "#   ", width) {
                out.line(line)?;
            }
        }
        let chosen = |s: &&program::Section| self.kind.is_none_or(|kind| s.kind == kind);
        let sections = program.sections.iter().filter(chosen);
        let sections: Vec<(String, Vec<InstrId>)> = sections
            .map(|s| {
                let all = s.instrs.clone().map(InstrId);
                let shown = all.filter(|id| self.takes(program, *id)).collect();
                (program.section_text(s), shown)
            })
            .collect();
        let all = sections.iter().flat_map(|(_, shown)| shown.iter().copied());
        let columns = match width {
            Some(width) if width < FULL => Columns::narrow(program, all),
            _ => Columns::FULL,
        };
        for (title, shown) in &sections {
            out.blank()?;
            out.line(title)?;
            for &id in shown {
                let line = columns.line(program, id);
                let indent = " ".repeat(columns.id + 3);
                for line in text::hanging(&line, &indent, width) {
                    out.line(line)?;
                }
            }
        }
        Ok(())
    }

    fn listing<'a>(&self, program: &'a Program, warnings: Vec<Warning>) -> Listing<'a> {
        let m = &program.meta;
        let instr = |section: SectionKind, i: u32| {
            let instr = &program.instrs[i as usize];
            Line {
                id: i,
                section,
                micro_batch: instr.micro_batch,
                phase: instr.phase.name(),
                unit: &program.units[instr.unit.index()].name,
                rule: instr.rule.name(),
                text: program.op_text(InstrId(i)),
            }
        };
        Listing {
            scenario: &m.scenario,
            program_digest: program.digest(),
            policy: m.policy,
            world_size: m.mesh.world(),
            parameters: m.parameters,
            warnings,
            units: program.units.iter().map(|u| u.name.as_str()).collect(),
            instructions: program
                .sections
                .iter()
                .flat_map(|s| s.instrs.clone().map(move |i| (s.kind, i)))
                .filter(|&(_, i)| self.takes(program, InstrId(i)))
                .map(|(kind, i)| instr(kind, i))
                .collect(),
        }
    }
}

/// Minimum width for the columns of [`Program::to_text`].
const FULL: usize = 140;

/// Widths of the columns before the text of an instruction.
struct Columns {
    id: usize,
    micro_batch: bool,
    phase: usize,
    unit: usize,
    rule: usize,
}

impl Columns {
    /// The widths of [`Program::to_text`].
    const FULL: Self = Self {
        id: 6,
        micro_batch: true,
        phase: 10,
        unit: 12,
        rule: 17,
    };

    /// Returns the smallest widths that fit these instructions.
    fn narrow(program: &Program, shown: impl Iterator<Item = InstrId>) -> Self {
        let mut columns = Self {
            id: 1,
            micro_batch: program.meta.micro_batches > 1,
            phase: 0,
            unit: 0,
            rule: 0,
        };
        for id in shown {
            let instr = &program.instrs[id.index()];
            columns.id = columns.id.max(id.0.to_string().len());
            columns.phase = columns.phase.max(instr.phase.name().len());
            let unit = &program.units[instr.unit.index()].name;
            columns.unit = columns.unit.max(unit.len());
            columns.rule = columns.rule.max(instr.rule.name().len());
        }
        columns
    }

    fn line(&self, program: &Program, id: InstrId) -> String {
        let instr = &program.instrs[id.index()];
        let micro_batch = match self.micro_batch {
            true => format!("{:>2} ", instr.micro_batch),
            false => String::new(),
        };
        format!(
            "{:>i$} {micro_batch}{:<p$} {:<u$} {:<r$} {}",
            id.0,
            instr.phase.name(),
            program.units[instr.unit.index()].name,
            instr.rule.name(),
            program.op_text(id),
            i = self.id,
            p = self.phase,
            u = self.unit,
            r = self.rule,
        )
    }
}

#[derive(Serialize)]
struct Listing<'a> {
    scenario: &'a str,
    program_digest: String,
    policy: &'static str,
    world_size: u32,
    parameters: ParameterCount,
    /// What the model's file contains that no key expresses.
    warnings: Vec<Warning>,
    units: Vec<&'a str>,
    instructions: Vec<Line<'a>>,
}

#[derive(Serialize)]
struct Line<'a> {
    id: u32,
    section: SectionKind,
    micro_batch: u16,
    phase: &'static str,
    unit: &'a str,
    rule: &'static str,
    text: String,
}
