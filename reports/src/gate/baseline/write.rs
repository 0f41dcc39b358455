//! A baseline's text: TOML with one fact a line, curves a few numbers a line, the outline at the end.

use super::BASELINE_FORMAT;
use crate::gate::facts::{Curve, Facts, Measured, MemoryFacts};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Numbers of a curve that stand on one line.
const NUMBERS_A_LINE: usize = 4;

pub(super) fn text(facts: &Facts) -> String {
    let mut out = String::from(
        "# What `shardlab gate` compares this scenario with. Written by `shardlab gate --bless`; say why in the commit.\n",
    );
    let w = &mut out;
    line(w, "format", BASELINE_FORMAT);
    line(w, "scenario", quoted(&facts.scenario));
    let set: Vec<String> = facts.set.iter().map(|s| quoted(s)).collect();
    line(w, "set", format_args!("[{}]", set.join(", ")));
    line(w, "policy", quoted(&facts.policy));
    line(w, "hardware", quoted(&facts.hardware));
    line(w, "world_size", facts.world_size);
    if !facts.options.is_empty() {
        title(w, "[options]");
        for (name, value) in &facts.options {
            line(w, &quoted(name), quoted(value));
        }
    }
    memory(w, "memory", &facts.memory);
    title(w, "[time]");
    line(w, "step_ps", facts.time.step_ps);
    line(w, "host_ps", facts.time.host_ps);
    map(w, "time.exposed_ps", &facts.time.exposed_ps);
    title(w, "[check]");
    line(w, "errors", facts.check.errors);
    line(w, "warnings", facts.check.warnings);
    if let Some(m) = &facts.measured {
        measured(w, m);
    }
    title(w, "[program]");
    line(w, "digest", quoted(&facts.program.digest));
    let outline = &facts.program.outline;
    // A literal string may hold anything but three quotes in a row and control characters; names hold neither.
    let plain = !outline.contains("'''") && !outline.chars().any(|c| c.is_control() && c != '\n');
    if plain {
        let _ = writeln!(w, "outline = '''\n{outline}'''");
    } else {
        line(w, "outline", quoted(outline));
    }
    for (section, counts) in &facts.program.instructions {
        title(w, &format!("[program.instructions.{section}]"));
        for (kind, count) in counts {
            line(w, kind, count);
        }
    }
    out
}

fn measured(w: &mut String, m: &Measured) {
    title(w, "[measured]");
    line(w, "digest", quoted(&m.digest));
    if !m.environment.is_empty() {
        title(w, "[measured.environment]");
        for (k, v) in &m.environment {
            line(w, &key(k), quoted(v));
        }
    }
    if let Some(of) = &m.memory {
        memory(w, "measured.memory", of);
    }
    for curve in &m.curves {
        title(w, "[[measured.curves]]");
        self::curve(w, curve);
    }
}

fn curve(w: &mut String, c: &Curve) {
    line(w, "seed", c.seed);
    if let Some(why) = &c.ended {
        line(w, "ended", quoted(why));
    }
    for (name, numbers) in [("losses", &c.losses), ("grad_norms", &c.grad_norms)] {
        let _ = writeln!(w, "{name} = [");
        for chunk in numbers.chunks(NUMBERS_A_LINE) {
            let numbers: Vec<String> = chunk.iter().map(|x| float(*x)).collect();
            let _ = writeln!(w, "  {},", numbers.join(", "));
        }
        w.push_str("]\n");
    }
}

/// The shortest text that reads back to the same bits.
fn float(x: f64) -> String {
    if x.is_nan() {
        "nan".to_owned()
    } else if x.is_infinite() {
        if x > 0.0 { "inf" } else { "-inf" }.to_owned()
    } else {
        format!("{x:?}")
    }
}

fn memory(w: &mut String, name: &str, m: &MemoryFacts) {
    title(w, &format!("[{name}]"));
    line(w, "allocated", m.allocated);
    line(w, "reserved", m.reserved);
    line(w, "device", m.device);
    line(w, "persistent", m.persistent);
    line(w, "at", quoted(&m.at));
    map(w, &format!("{name}.by_role"), &m.by_role);
    map(w, &format!("{name}.by_unit"), &m.by_unit);
}

fn title(w: &mut String, title: &str) {
    let _ = writeln!(w, "\n{title}");
}

fn line(w: &mut String, key: &str, value: impl std::fmt::Display) {
    let _ = writeln!(w, "{key} = {value}");
}

/// A map as a table of its own, a line an entry; nothing for an empty one.
fn map(w: &mut String, name: &str, entries: &BTreeMap<String, u64>) {
    if !entries.is_empty() {
        title(w, &format!("[{name}]"));
        for (k, v) in entries {
            line(w, &key(k), v);
        }
    }
}

fn key(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(bare) {
        name.to_owned()
    } else {
        quoted(name)
    }
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
