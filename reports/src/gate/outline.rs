//! The plan as a short text that can be kept, read and diffed.
//!
//! A program's full text has a line an instruction, numbered buffers and numbered events: a buffer more renumbers half of
//! it. An outline says the same order of work without numbers: operands by role, layers relative to the layer at work,
//! and repetitions folded, so that a model's depth does not lengthen it. The first step is told as its difference from
//! the steady one. What an outline cannot tell apart (which of two buffers of one role is read), the digest can.

mod expand;
mod fold;

pub use expand::{changes, expand};
use fold::{Node, fold};
use shardlab_plan::Program;
use shardlab_plan::program::{
    Access, BufferId, Instr, KernelClass, Op, Part, Pool, Rule, SectionKind, StreamId,
};
use similar::{ChangeTag, TextDiff};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Lines of context around a change.
const CONTEXT: usize = 2;
/// Shortest run of model lines that gets a name when it comes again.
const SHORTEST_BLOCK: usize = 6;

/// The outline of a program, ended by a newline. Equal for equal programs.
///
/// `[block NAME]` are the model's own lines between two headings, where they come more than once; `run NAME` stands for
/// them. `N times:` repeats what is indented below it. Lines behind `|` are a diff against the steady step.
#[must_use]
pub fn outline(program: &Program) -> String {
    let sections: Vec<(SectionKind, Vec<Line>)> = program
        .sections
        .iter()
        .map(|s| (s.kind, lines(program, s.kind)))
        .collect();
    let of = |kind| sections.iter().find(|(k, _)| *k == kind);
    let blocks = Blocks::find(
        sections
            .iter()
            .filter(|(k, _)| *k != SectionKind::First)
            .map(|(_, lines)| lines),
    );
    let mut out = String::new();
    blocks.print(&mut out);
    for (kind, lines) in &sections {
        let name = match kind {
            SectionKind::Init => "init",
            SectionKind::First => "first step",
            SectionKind::Steady => "steady step",
            SectionKind::Validation => "validation",
        };
        let _ = write!(out, "[{name}]");
        match of(SectionKind::Steady) {
            Some((_, steady)) if *kind == SectionKind::First => {
                out.push_str(" against the steady step\n");
                let changes = diff(&plain(steady), &plain(lines));
                let marked = changes.lines().map(|l| format!("|{l}")).collect();
                print(&fold(marked), 0, &mut out);
            }
            _ => {
                out.push('\n');
                print(&fold(blocks.shorten(lines)), 0, &mut out);
            }
        }
    }
    out
}

/// What turns `old` into `new`: changed lines behind `-` and `+` with some context, `…` between places; empty for equal
/// texts.
#[must_use]
pub fn diff(old: &str, new: &str) -> String {
    let diff = TextDiff::from_lines(old, new);
    let mut out = String::new();
    for (i, group) in diff.grouped_ops(CONTEXT).iter().enumerate() {
        if i > 0 {
            out.push_str("…\n");
        }
        for change in group.iter().flat_map(|op| diff.iter_changes(op)) {
            let sign = match change.tag() {
                ChangeTag::Delete => '-',
                ChangeTag::Insert => '+',
                ChangeTag::Equal => ' ',
            };
            let _ = writeln!(out, "{sign}{}", change.value().trim_end_matches('\n'));
        }
    }
    out
}

/// A line before folding.
struct Line {
    text: String,
    /// The model's own work, as opposed to the strategy's.
    model: bool,
}

fn plain(lines: &[Line]) -> String {
    lines.iter().fold(String::new(), |mut out, line| {
        out.push_str(&line.text);
        out.push('\n');
        out
    })
}

fn lines(program: &Program, kind: SectionKind) -> Vec<Line> {
    let Some(section) = program.section(kind) else {
        return Vec::new();
    };
    let mut lines = Vec::new();
    let mut at = Place::default();
    for instr in program.section_instrs(section) {
        if let Some(text) = at.go(program, instr) {
            lines.push(Line { text, model: false });
        }
        lines.push(Line {
            text: line(program, instr, &at),
            model: instr.rule == Rule::Model,
        });
    }
    lines
}

/// Parts of the model's own work that come more than once, by their text.
struct Blocks(BTreeMap<String, String>, Vec<String>);

impl Blocks {
    fn find<'a>(sections: impl Iterator<Item = &'a Vec<Line>>) -> Self {
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        let mut order: Vec<(String, String)> = Vec::new();
        for lines in sections {
            let mut heading = "";
            for run in lines.chunk_by(|a, b| a.model == b.model) {
                if !run[0].model {
                    let headings = run.iter().rev().filter_map(|l| l.text.strip_prefix("= "));
                    heading = headings.map(bare).next().unwrap_or(heading);
                } else if run.len() >= SHORTEST_BLOCK {
                    let text = plain(run);
                    if *seen
                        .entry(text.clone())
                        .and_modify(|n| *n += 1)
                        .or_insert(1)
                        == 1
                    {
                        order.push((text, heading.to_owned()));
                    }
                }
            }
        }
        let mut named = BTreeMap::new();
        let mut of_heading: BTreeMap<String, u32> = BTreeMap::new();
        let mut texts = Vec::new();
        for (text, heading) in order {
            if seen.get(&text).is_some_and(|n| *n > 1) {
                let n = of_heading.entry(heading.clone()).or_default();
                *n += 1;
                named.insert(text.clone(), format!("{heading} {n}"));
                texts.push(text);
            }
        }
        Self(named, texts)
    }

    fn print(&self, out: &mut String) {
        for text in &self.1 {
            let _ = writeln!(out, "[block {}]", self.0[text]);
            print(&fold(text.lines().map(str::to_owned).collect()), 0, out);
        }
    }

    /// The lines with `run NAME` for those of a block.
    fn shorten(&self, lines: &[Line]) -> Vec<String> {
        let mut out = Vec::new();
        for run in lines.chunk_by(|a, b| a.model == b.model) {
            let name = (run[0].model && run.len() >= SHORTEST_BLOCK)
                .then(|| self.0.get(&plain(run)))
                .flatten();
            match name {
                Some(name) => out.push(format!("run {name}")),
                None => out.extend(run.iter().map(|l| l.text.clone())),
            }
        }
        out
    }
}

fn print(nodes: &[Node], depth: usize, out: &mut String) {
    for node in nodes {
        match node {
            Node::Line(text) => {
                let _ = writeln!(out, "{:1$}{text}", "", 2 * depth);
            }
            Node::Repeat(times, body) => {
                let _ = writeln!(out, "{:1$}{times} times:", "", 2 * depth);
                print(body, depth + 1, out);
            }
        }
    }
}

/// A heading without the distance from the layer before.
fn bare(heading: &str) -> &str {
    heading.split(" (").next().unwrap_or_default()
}

/// Where in the model the host is.
#[derive(Default)]
struct Place {
    /// Phase and unit, without the layer's number.
    heading: String,
    layer: Option<i64>,
}

impl Place {
    /// A heading, when the phase or the unit at work changes. Gathers ahead and reductions behind belong to the unit at
    /// work.
    fn go(&mut self, program: &Program, instr: &Instr) -> Option<String> {
        let own = matches!(
            instr.rule,
            Rule::Model | Rule::State | Rule::Optimizer | Rule::Refresh | Rule::Unshard
        );
        let phase = instr.phase.name();
        if !own && self.heading.split(' ').next() == Some(phase) {
            return None;
        }
        let (name, layer) = split(&program.units[instr.unit.index()].name);
        let heading = format!("{phase} {name}");
        if heading == self.heading && layer == self.layer {
            return None;
        }
        let line = match (layer, self.layer) {
            (Some(now), Some(before)) if now != before && heading == self.heading => {
                format!("= {heading} ({:+})", now - before)
            }
            (Some(now), _) if heading != self.heading => format!("= {heading} (at {now})"),
            _ => format!("= {heading}"),
        };
        self.heading = heading;
        self.layer = layer;
        Some(line)
    }
}

/// A unit's name with its first number replaced, and the number.
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

/// The unit of an instruction relative to the one at work; empty for that one.
fn unit(program: &Program, instr: &Instr, at: &Place) -> String {
    let (name, layer) = split(&program.units[instr.unit.index()].name);
    match (layer, at.layer) {
        (Some(n), Some(m)) if at.heading.contains(&name) => match n - m {
            0 => String::new(),
            d => format!(" of {name}{d:+}"),
        },
        _ if at.heading.ends_with(&format!(" {name}")) => String::new(),
        (Some(n), None) => format!(" of {}", name.replacen('*', &n.to_string(), 1)),
        _ => format!(" of {name}"),
    }
}

fn line(program: &Program, instr: &Instr, at: &Place) -> String {
    let role = |id: BufferId| program.buffers[id.index()].role.name();
    let stream = |s: StreamId| match program.streams[s.index()].kind.name() {
        "compute" => String::new(),
        name => format!(" on {name}"),
    };
    let roles = |list: &[Access]| {
        let names: Vec<&str> = list.iter().map(|a| role(a.buffer)).collect();
        runs(&names)
    };
    let text = match instr.op {
        Op::Alloc(id) => {
            let b = &program.buffers[id.index()];
            let pool = match b.pool {
                Pool::Caching | Pool::Planned => "",
                Pool::DoubleBuffer => " double_buffer",
                Pool::Host => " host",
            };
            format!("alloc {} {}{pool}{}", role(id), b.bytes.0, stream(b.stream))
        }
        Op::Free(id) => format!("free {}", role(id)),
        Op::Launch {
            kernel, stream: s, ..
        } => {
            let k = &program.kernels[kernel.index()];
            let shape = match k.class {
                KernelClass::Gemm { m, n, k, batch: 1 } => format!(" {m}x{n}x{k}"),
                KernelClass::Gemm { m, n, k, batch } => format!(" {batch}x{m}x{n}x{k}"),
                KernelClass::Conv { m, n, k } => format!(" {m}x{n}x{k}"),
                _ => String::new(),
            };
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
                c.bytes.0,
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
                c.from.bytes,
                role(c.from.buffer),
                role(c.to.buffer)
            )
        }
        Op::Record { stream: s, .. } => format!("record{}", stream(s)),
        Op::Wait { stream: s, .. } => format!("wait{}", stream(s)),
        Op::HostWait(_) => "host waits".to_owned(),
        Op::HostWork { kind, count } => format!("host {kind:?} x{count}").to_lowercase(),
        Op::GraphBegin(_) => "graph begin".to_owned(),
        Op::GraphEnd(s) => format!("graph end, {} launches", program.scopes[s.index()].launches),
    };
    let rule = match instr.rule {
        Rule::Model | Rule::State | Rule::Optimizer | Rule::Refresh => String::new(),
        rule => format!("{}: ", rule.name()),
    };
    format!("{rule}{text}{}", unit(program, instr, at))
}

/// Words with their repetitions counted: `a 3 b`.
fn runs(words: &[&str]) -> String {
    let mut out = String::new();
    for chunk in words.chunk_by(|a, b| a == b) {
        if !out.is_empty() {
            out.push(' ');
        }
        if chunk.len() > 1 {
            let _ = write!(out, "{} ", chunk.len());
        }
        out.push_str(chunk[0]);
    }
    out
}

#[cfg(test)]
mod tests;
