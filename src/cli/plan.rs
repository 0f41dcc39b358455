//! `shardlab plan`: the program as text, whole or cut down to a section or a unit, and the layout of its parameters.

mod groups;

use super::args::{One, plan};
use super::output::{Failure, Out, Status};
use serde::Serialize;
use shardlab_plan::Program;
use shardlab_plan::program::{InstrId, SectionKind, UnitId};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: One,
    /// Only instructions of this unit, for example layers.3 (repeatable)
    #[arg(long, value_name = "NAME")]
    unit: Vec<String>,
    /// Only this part of the program
    #[arg(long, value_enum)]
    section: Option<Section>,
    /// The layout of the parameter groups instead: shapes, offsets, padding, bytes
    #[arg(long, conflicts_with = "section")]
    groups: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Section {
    /// Persistent state
    Init,
    /// The first step
    First,
    /// Every later step
    Steady,
    /// A validation forward
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
    if args.groups {
        let report = groups::report(&scenario, &program, units.as_deref());
        if args.json {
            out.json(&report)?;
        } else {
            groups::print(&report, out)?;
        }
        return Ok(Status::Done);
    }
    let kind = args.section.map(Section::kind);
    if let Some(kind) = kind
        && program.section(kind).is_none()
    {
        return Err(Failure::bad_input(format_args!(
            "{}: the program has no validation section; train.validate_every is 0",
            scenario.name
        )));
    }
    let selection = Selection { kind, units };
    if args.json {
        out.json(&selection.listing(&program))?;
    } else {
        selection.print(&program, out)?;
    }
    Ok(Status::Done)
}

/// The units of these names; `None` for all.
fn units(program: &Program, names: &[String]) -> Result<Option<Vec<UnitId>>, Failure> {
    if names.is_empty() {
        return Ok(None);
    }
    let find = |name: &String| {
        let found = program.units.iter().position(|u| u.name == *name);
        found.map(|i| UnitId(i as u16)).ok_or_else(|| {
            let known: Vec<&str> = program.units.iter().map(|u| u.name.as_str()).collect();
            Failure::bad_input(format_args!(
                "there is no unit `{name}`; the program has {}",
                abridged(&known)
            ))
        })
    };
    names.iter().map(find).collect::<Result<_, _>>().map(Some)
}

/// Names joined by commas, the middle left out when there are many.
fn abridged(names: &[&str]) -> String {
    match names {
        [first, second, third, .., last] if names.len() > 8 => {
            format!("{first}, {second}, {third}, … {last}")
        }
        _ => names.join(", "),
    }
}

/// Which instructions to show.
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

    /// The lines of [`Program::to_text`] that belong to the selection.
    fn print(&self, program: &Program, out: &mut Out) -> Result<(), Failure> {
        let text = program.to_text();
        let sections = self.kind.map(|kind| {
            let chosen = program.sections.iter().position(|s| s.kind == kind);
            chosen.unwrap_or(0)
        });
        let mut section = None;
        for line in text.lines() {
            if line.starts_with('[') {
                section = Some(section.map_or(0, |s| s + 1));
            }
            let shown = match (section, instr_of(line)) {
                (_, Some(id)) => self.takes(program, id),
                (None, None) => !line.is_empty(),
                // A section's title; the blank line before it is written here as well.
                (Some(s), None) => {
                    let shown = line.starts_with('[') && sections.is_none_or(|only| only == s);
                    if shown {
                        out.blank()?;
                    }
                    shown
                }
            };
            if shown {
                out.line(line)?;
            }
        }
        Ok(())
    }

    fn listing<'a>(&self, program: &'a Program) -> Listing<'a> {
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
            world_size: m.world,
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

/// The instruction that a line of program text describes.
fn instr_of(line: &str) -> Option<InstrId> {
    line.split_ascii_whitespace()
        .next()
        .and_then(|id| id.parse().ok())
        .map(InstrId)
}

#[derive(Serialize)]
struct Listing<'a> {
    scenario: &'a str,
    program_digest: String,
    policy: &'static str,
    world_size: u32,
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
