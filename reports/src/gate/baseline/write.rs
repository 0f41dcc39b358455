//! Writes a baseline as TOML: one fact per line, lists with as many entries per line as fit, and
//! the outline at the end.

use super::BASELINE_FORMAT;
use crate::gate::facts::{Curve, Facts, Measured, MemoryFacts};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Maximum width of a line of a list.
const WIDTH: usize = 120;

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
    options(w, &facts.options);
    memory(w, "memory", &facts.memory);
    title(w, "[time]");
    line(w, "step_ps", facts.time.step_ps);
    line(w, "host_ps", facts.time.host_ps);
    map(w, "exposed_ps", &facts.time.exposed_ps);
    title(w, "[check]");
    line(w, "errors", facts.check.errors);
    line(w, "warnings", facts.check.warnings);
    if let Some(m) = &facts.measured {
        measured(w, m);
    }
    title(w, "[program]");
    line(w, "digest", quoted(&facts.program.digest));
    for (section, counts) in &facts.program.instructions {
        map(w, &format!("instructions.{}", key(section)), counts);
    }
    let outline = &facts.program.outline;
    // A literal string may contain anything except three quotes in a row and control characters;
    // names contain neither.
    let plain = !outline.contains("'''") && !outline.chars().any(|c| c.is_control() && c != '\n');
    if plain {
        let _ = writeln!(w, "outline = '''\n{outline}'''");
    } else {
        line(w, "outline", quoted(outline));
    }
    out
}

fn measured(w: &mut String, m: &Measured) {
    title(w, "[measured]");
    line(w, "digest", quoted(&m.digest));
    let environment = m.environment.iter().map(|(k, v)| (k.clone(), quoted(v)));
    map(w, "environment", &environment.collect());
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
        list(w, name, numbers.iter().map(|x| float(*x)));
    }
}

/// Writes a list with as many entries per line as fit.
fn list(w: &mut String, name: &str, entries: impl Iterator<Item = String>) {
    let _ = write!(w, "{name} = [");
    let (mut width, mut separator) = (name.chars().count() + 4, "");
    for entry in entries {
        let length = entry.chars().count() + 2;
        w.push_str(separator);
        if width + length > WIDTH {
            w.push_str("\n  ");
            width = 2;
        } else if !separator.is_empty() {
            w.push(' ');
        }
        w.push_str(&entry);
        width += length;
        separator = ",";
    }
    w.push_str("]\n");
}

/// Writes options by section, each as `key = value`.
fn options(w: &mut String, options: &BTreeMap<String, String>) {
    if options.is_empty() {
        return;
    }
    title(w, "[options]");
    let mut sections: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, value) in options {
        match name.split_once('.') {
            Some((section, name)) if !name.contains(super::options::IS) => {
                let entry = format!("{name}{}{value}", super::options::IS);
                sections.entry(section).or_default().push(quoted(&entry));
            }
            _ => line(w, &quoted(name), quoted(value)),
        }
    }
    for (section, entries) in sections {
        list(w, &key(section), entries.into_iter());
    }
}

/// Returns the shortest text that reads back to the same bits.
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
    map(w, "by_role", &m.by_role);
    map(w, "by_unit", &m.by_unit);
}

fn title(w: &mut String, title: &str) {
    let _ = writeln!(w, "\n{title}");
}

fn line(w: &mut String, key: &str, value: impl std::fmt::Display) {
    let _ = writeln!(w, "{key} = {value}");
}

/// Writes a map on one line, unless it is empty.
fn map<T: std::fmt::Display>(w: &mut String, name: &str, entries: &BTreeMap<String, T>) {
    if !entries.is_empty() {
        let entries: Vec<String> = entries
            .iter()
            .map(|(k, v)| format!("{} = {v}", key(k)))
            .collect();
        line(w, name, format_args!("{{ {} }}", entries.join(", ")));
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

/// Formats a TOML basic string.
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
