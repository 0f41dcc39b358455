//! The plan as a short text for storing, reading and diffing.
//!
//! A program's full text has one line per instruction, with numbered buffers and events, so one
//! more buffer renumbers half of it. An outline gives the same order of work without numbers. It
//! names operands by role and layers relative to the previous layer, and writes loops instead of
//! repetitions. Parts that several places share are written once, so neither the depth nor the
//! number of micro-batches makes it longer. The digest distinguishes what an outline cannot, such
//! as which of two buffers with the same role is read.
//!
//! ```text
//! [block 1] alloc act 128Mi 2*32Ki; free act 2*tmp      a shared part: act is activation, tmp temporary
//! [steady step] = start root; step-start: record
//!  80x{= forward layers.+1; gather-done: wait; run 1;   a loop: the next layer's forward, with the shared part
//!    reshard: record, wait on all_gather, free full_weight}
//! ```
//!
//! `= PHASE UNIT` is a heading for the statements that follow. A statement after a comma has the
//! same label as the previous one (`reshard: wait on all_gather`). Lines may end anywhere between
//! words.

mod changes;
mod expand;
mod fold;
mod print;

pub use changes::changes;
pub use expand::expand;
use fold::{Id, Symbol, Symbols};
use shardlab_plan::Program;
use shardlab_plan::ir::{Access, BufferId, Part, Pool, Role, StreamId};
use shardlab_plan::program::{Instr, Op, Rule, SectionKind};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Prefix of a heading.
const HEADING: &str = "= ";

/// Returns the outline of a program, ending with a newline. Equal programs have equal outlines.
#[must_use]
pub fn outline(program: &Program) -> String {
    let sections = program.sections.iter();
    let sections = sections.map(|s| (s.kind.title().to_owned(), lines(program, s.kind)));
    folded(sections.collect())
}

/// Returns the outline of these sections, each with a title and statements.
fn folded(sections: Vec<(String, Vec<String>)>) -> String {
    let mut symbols = Symbols::default();
    let (mut titles, mut lists): (Vec<String>, Vec<Vec<Id>>) = (Vec::new(), Vec::new());
    for (title, lines) in sections {
        let list = lines.into_iter().map(|l| symbols.id(Symbol::Line(l)));
        let list = list.collect();
        lists.push(symbols.fold(list, |text| text.starts_with(HEADING)));
        titles.push(title);
    }
    symbols.share(&mut lists);
    let sections: Vec<(String, Vec<Id>)> = titles.into_iter().zip(lists).collect();
    print::print(&symbols, &sections)
}

/// Returns the statements of a section, with headings where the phase or the unit changes.
fn lines(program: &Program, kind: SectionKind) -> Vec<String> {
    let Some(section) = program.section(kind) else {
        return Vec::new();
    };
    let mut lines = Vec::new();
    let mut at = Place::default();
    let mut group: Option<Group> = None;
    for instr in program.section_instrs(section) {
        let heading = at.go(program, instr);
        let next = Group::new(program, instr);
        match (&mut group, next) {
            (Some(group), Some(next)) if heading.is_none() && group.takes(&next) => {
                group.items.extend(next.items);
            }
            (_, next) => {
                lines.extend(group.take().map(Group::text));
                lines.extend(heading);
                match next {
                    Some(next) => group = Some(next),
                    None => lines.push(line(program, instr)),
                }
            }
        }
    }
    lines.extend(group.map(Group::text));
    lines
}

/// Consecutive allocations or frees as one statement.
struct Group {
    head: String,
    /// Sizes with the same role and place, or roles.
    items: Vec<String>,
    tail: String,
}

impl Group {
    fn new(program: &Program, instr: &Instr) -> Option<Self> {
        let (word, item, tail) = match instr.op {
            Op::Alloc(id) => {
                let b = &program.buffers[id.index()];
                let pool = match b.pool {
                    Pool::Caching | Pool::Planned => "",
                    Pool::DoubleBuffer => " double_buffer",
                    Pool::Traced => " trace_pool",
                    Pool::Host => " host",
                };
                let tail = format!("{pool}{}", stream(program, b.stream));
                (format!("alloc {}", short(b.role)), size(b.bytes.0), tail)
            }
            Op::Free(id) => {
                let role = short(program.buffers[id.index()].role);
                ("free".to_owned(), role.to_owned(), String::new())
            }
            _ => return None,
        };
        Some(Self {
            head: labelled(instr, &word),
            items: vec![item],
            tail,
        })
    }

    fn takes(&self, next: &Self) -> bool {
        self.head == next.head && self.tail == next.tail
    }

    fn text(self) -> String {
        let items: Vec<String> = self
            .items
            .chunk_by(|a, b| a == b)
            .map(|same| match same.len() {
                1 => same[0].clone(),
                n => format!("{n}*{}", same[0]),
            })
            .collect();
        format!("{} {}{}", self.head, items.join(" "), self.tail)
    }
}

/// Returns the buffers that a statement of an expanded outline allocates: their role, and the count
/// of each size.
pub(crate) fn allocations(statement: &str) -> Option<(&str, Vec<(u64, u32)>)> {
    let words = match statement.split_once(": ") {
        Some((label, rest)) if !label.contains(' ') => rest,
        _ => statement,
    };
    let mut words = words.strip_prefix("alloc ")?.split(' ');
    let role = role_of(words.next()?);
    let sizes = words.map_while(|word| {
        let (n, size) = word.split_once('*').unwrap_or(("1", word));
        Some((bytes_of(size)?, n.parse().ok()?))
    });
    Some((role, sizes.collect()))
}

/// The current place in the model.
#[derive(Default)]
struct Place {
    /// Phase and unit.
    at: Option<(&'static str, usize)>,
    /// Numbers of the last layers, by the rest of their names.
    layers: BTreeMap<String, i64>,
}

impl Place {
    /// Returns a heading if the phase or the unit changes. Layer numbers are relative to the
    /// previous layer.
    fn go(&mut self, program: &Program, instr: &Instr) -> Option<String> {
        let (phase, unit) = (instr.phase.name(), instr.unit.index());
        if self.at.replace((phase, unit)) == Some((phase, unit)) {
            return None;
        }
        let (name, layer) = split(&program.units[unit].name);
        let Some(layer) = layer else {
            return Some(format!("{HEADING}{phase} {name}"));
        };
        let before = self.layers.insert(name.clone(), layer).unwrap_or(-1);
        let step = format!("{:+}", layer - before);
        Some(format!("{HEADING}{phase} {}", name.replacen('*', &step, 1)))
    }
}

/// Splits a unit's name into the name with its first number replaced, and the number.
fn split(name: &str) -> (String, Option<i64>) {
    let Some(start) = name.find(|c: char| c.is_ascii_digit()) else {
        return (name.to_owned(), None);
    };
    let digits = name[start..].bytes().take_while(u8::is_ascii_digit).count();
    let number = name[start..start + digits].parse().ok();
    (
        format!("{}*{}", &name[..start], &name[start + digits..]),
        number,
    )
}

fn line(program: &Program, instr: &Instr) -> String {
    let role = |id: BufferId| short(program.buffers[id.index()].role);
    let stream = |s: StreamId| stream(program, s);
    let roles = |list: &[Access]| {
        let names: Vec<&str> = list.iter().map(|a| role(a.buffer)).collect();
        runs(&names)
    };
    let text = match instr.op {
        // Allocations and frees are part of groups.
        Op::Alloc(_) | Op::Free(_) => String::new(),
        Op::Launch {
            kernel, stream: s, ..
        } => {
            let k = &program.kernels[kernel.index()];
            let shape = k.class.sizes();
            format!(
                "{}{shape}{}: {} -> {}",
                k.name,
                stream(s),
                roles(program.reads(&instr.op)),
                roles(program.writes(&instr.op))
            )
        }
        Op::Collective { id, stream: s } => {
            let c = &program.collectives[id.index()];
            let comm = &program.communicators[c.comm.index()].name;
            let reduce = format!("{:?}", c.reduce).to_lowercase();
            let reduce = if reduce == "none" {
                String::new()
            } else {
                format!(" {reduce}")
            };
            let ends = |f: fn(&Part) -> Access| roles(&c.parts.iter().map(f).collect::<Vec<_>>());
            format!(
                "{}{reduce} {} {} {comm}{}: {} -> {}",
                c.kind.name(),
                c.dtype,
                size(c.bytes.0),
                stream(s),
                ends(|p| p.input),
                ends(|p| p.output)
            )
        }
        Op::Copy { id, stream: s } => {
            let c = &program.copies[id.index()];
            let kind = format!("{:?}", c.kind).to_lowercase();
            format!(
                "copy {kind}{} {}: {} -> {}",
                stream(s),
                size(c.from.bytes),
                role(c.from.buffer),
                role(c.to.buffer)
            )
        }
        Op::Record { stream: s, .. } => format!("record{}", stream(s)),
        Op::Wait { stream: s, .. } => format!("wait{}", stream(s)),
        Op::HostWait(_) => "host waits".to_owned(),
        Op::HostWork { kind, count } => {
            let kind = format!("{kind:?}").to_lowercase();
            // `dispatch` is omitted, because it is the most common kind: the operations of autograd
            // in backward.
            let kind = kind
                .strip_suffix("dispatch")
                .filter(|k| !k.is_empty())
                .unwrap_or(&kind);
            match count {
                1 => format!("host {kind}"),
                n => format!("host {kind} x{n}"),
            }
        }
        Op::GraphBegin(_) => "graph begin".to_owned(),
        Op::GraphEnd(s) => format!(
            "graph end of {} launches",
            program.scopes[s.index()].launches
        ),
    };
    labelled(instr, &text)
}

/// Returns a statement with a label for its purpose.
fn labelled(instr: &Instr, text: &str) -> String {
    let rule = match instr.rule {
        Rule::Model | Rule::State | Rule::Optimizer | Rule::Refresh => String::new(),
        rule => format!("{}: ", rule.name()),
    };
    // These characters have a meaning in the outline's syntax.
    let text = format!("{rule}{text}").replace(['{', '}', ';', ','], "_");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn stream(program: &Program, stream: StreamId) -> String {
    match program.streams[stream.index()].kind.name() {
        "compute" => String::new(),
        name => format!(" on {name}"),
    }
}

/// Returns the name of a role. The two most frequent roles have short names.
const fn short(role: Role) -> &'static str {
    match role {
        Role::Temporary => "tmp",
        Role::Activation => "act",
        role => role.name(),
    }
}

/// Returns the full name of a role from its short name.
fn role_of(word: &str) -> &str {
    match word {
        "tmp" => Role::Temporary.name(),
        "act" => Role::Activation.name(),
        name => name,
    }
}

/// Formats a size in bytes, exactly: `128Mi`, `16Ki`, `25344`.
fn size(bytes: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let unit = units
        .iter()
        .find(|(bits, _)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    unit.map_or_else(
        || bytes.to_string(),
        |(bits, unit)| format!("{}{unit}", bytes >> bits),
    )
}

/// Parses a size formatted by [`size`].
fn bytes_of(size: &str) -> Option<u64> {
    let digits = size.trim_end_matches(|c: char| !c.is_ascii_digit());
    let bits = match &size[digits.len()..] {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << bits)
}

/// Counts repeated words: `a 3 b`, `9 (a b)`.
fn runs(words: &[&str]) -> String {
    let mut symbols = Symbols::default();
    let list = words
        .iter()
        .map(|w| symbols.id(Symbol::Line((*w).to_owned())));
    let list = list.collect();
    let list = symbols.fold(list, |_| false);
    counted(&symbols, &list)
}

fn counted(symbols: &Symbols, list: &[Id]) -> String {
    let mut out = String::new();
    for id in list {
        if !out.is_empty() {
            out.push(' ');
        }
        let _ = match symbols.get(*id) {
            Symbol::Line(text) => write!(out, "{text}"),
            Symbol::Repeat(n, body) if body.len() == 1 => {
                write!(out, "{n} {}", counted(symbols, body))
            }
            Symbol::Repeat(n, body) => write!(out, "{n} ({})", counted(symbols, body)),
            Symbol::Block(body) => write!(out, "{}", counted(symbols, body)),
        };
    }
    out
}

#[cfg(test)]
mod tests;
