//! Writes a report as Markdown: tables and sentences, and drawings as links to files.

use super::{Block, Change, Report, Table};
use crate::plots::Plot;
use std::fmt::Write;

/// Returns the report as Markdown. `image` returns the address of a drawing if it has been written
/// to a file.
#[must_use]
pub fn markdown(report: &Report, image: impl Fn(&Plot) -> Option<String>) -> String {
    let mut out = format!("# {}\n", line(&report.title));
    for about in &report.about {
        let _ = write!(out, "\n{}\n", line(about));
    }
    for section in &report.sections {
        let _ = write!(out, "\n## {}\n", line(&section.title));
        for block in &section.blocks {
            put(&mut out, block, &image);
        }
    }
    out
}

fn put(out: &mut String, block: &Block, image: &impl Fn(&Plot) -> Option<String>) {
    match block {
        Block::Text(text) => {
            let _ = write!(out, "\n{}\n", line(text));
        }
        Block::Cards(cards) => {
            for card in cards {
                let _ = write!(
                    out,
                    "\n**{}** ({}): {}{}\n\n",
                    line(&card.title),
                    line(&card.about),
                    line(&card.head),
                    change(card.change.as_ref())
                );
                for fact in &card.facts {
                    let change = change(fact.change.as_ref());
                    let _ = writeln!(out, "- {}: {}{change}", line(&fact.name), line(&fact.value));
                }
            }
        }
        Block::Table(table) => put_table(out, table),
        Block::Plot(plot) => put_plot(out, plot, image),
        Block::Timeline(t) => put_plot(out, &t.plot, image),
        Block::Long(title, text) => {
            let fence = fence(text);
            let _ = write!(
                out,
                "\n<details><summary>{}</summary>\n\n{fence}text\n{}\n{fence}\n\n</details>\n",
                line(title),
                text.trim_end()
            );
        }
    }
}

/// Returns the change shown after a number.
fn change(change: Option<&Change>) -> String {
    change.map_or_else(String::new, |c| format!(" ({})", line(&c.text())))
}

fn put_plot(out: &mut String, plot: &Plot, image: &impl Fn(&Plot) -> Option<String>) {
    let _ = write!(
        out,
        "\n**{}.** {}\n",
        line(&plot.title),
        line(&plot.description)
    );
    if let Some(address) = image(plot) {
        let _ = write!(out, "\n![{}](<{address}>)\n", line(&plot.title));
    }
}

fn put_table(out: &mut String, table: &Table) {
    let _ = write!(out, "\n{}:\n\n|", line(&table.caption));
    for title in &table.head {
        let _ = write!(out, " {} |", line(title.trim_start_matches('>')));
    }
    out.push_str("\n|");
    for title in &table.head {
        out.push_str(if title.starts_with('>') {
            "---:|"
        } else {
            "---|"
        });
    }
    out.push('\n');
    for row in &table.rows {
        out.push('|');
        for cell in row {
            let _ = write!(out, " {} |", line(cell));
        }
        out.push('\n');
    }
}

/// Escapes text so that it stays on one line, also in tables, and contains no markup.
fn line(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' => out.push(' '),
            '|' | '*' | '`' | '[' | ']' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            '_' => out.push_str("\\_"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c => out.push(c),
        }
    }
    out
}

/// Returns a fence that does not occur in the text.
fn fence(text: &str) -> String {
    let mut fence = "```".to_owned();
    while text.contains(&fence) {
        fence.push('`');
    }
    fence
}
