//! Writes a report as one HTML file that contains its style, scripts and drawings and loads
//! nothing.

use super::{Block, Card, Change, Report, Table};
use crate::plots::{Key, Palette, Plot, SERIES, Timeline, escape};
use std::fmt::Write;

const STYLE: &str = include_str!("html/style.css");
const SCRIPT: &str = include_str!("html/script.js");

/// Returns the report as a page. Equal reports give equal bytes.
#[must_use]
pub fn html(report: &Report) -> String {
    let title = escape(&report.title);
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{}\n{STYLE}</style>\n</head>\n<body>\n",
        themes()
    );
    let _ = write!(
        out,
        "<header>\n<p class=\"brand\">shardlab report</p>\n<h1>{title}</h1>\n\
         <button type=\"button\" id=\"theme\" hidden>Toggle theme</button>\n"
    );
    for line in &report.about {
        let _ = writeln!(out, "<p class=\"about\">{}</p>", escape(line));
    }
    out.push_str("</header>\n<nav aria-label=\"Sections\">\n<ul>\n");
    for s in &report.sections {
        let _ = writeln!(
            out,
            "<li><a href=\"#{}\">{}</a></li>",
            s.id,
            escape(&s.title)
        );
    }
    out.push_str("</ul>\n</nav>\n<main>\n");
    for s in &report.sections {
        let _ = writeln!(
            out,
            "<section aria-labelledby=\"{0}\">\n<h2 id=\"{0}\">{1}</h2>",
            s.id,
            escape(&s.title)
        );
        for block in &s.blocks {
            put(&mut out, block);
        }
        out.push_str("</section>\n");
    }
    let _ = write!(
        out,
        "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    );
    out
}

/// Returns the palettes as CSS variables: light by default, dark if the reader's system or choice
/// asks for it, and light for printing.
fn themes() -> String {
    let variables = |p: &Palette| {
        p.variables()
            .fold(String::new(), |mut out, (name, colour)| {
                let _ = write!(out, "--{name}:{colour};");
                out
            })
    };
    let (light, dark) = (variables(&Palette::LIGHT), variables(&Palette::DARK));
    let mut out = format!(
        ":root{{{light}}}\n\
         @media (prefers-color-scheme: dark){{:root:not([data-theme=\"light\"]){{{dark}}}}}\n\
         :root[data-theme=\"dark\"]{{{dark}}}\n\
         @media print{{:root,:root[data-theme=\"dark\"],:root:not([data-theme=\"light\"]){{{light}}}}}\n"
    );
    for i in 0..SERIES {
        let _ = write!(
            out,
            ".k{i}{{background:var(--c{i})}}.m{i}{{background:var(--m{i})}}"
        );
    }
    out.push_str(".k8{background:var(--bad)}");
    out
}

fn put(out: &mut String, block: &Block) {
    match block {
        Block::Text(text) => {
            let _ = writeln!(out, "<p>{}</p>", escape(text));
        }
        Block::Cards(cards) => {
            out.push_str("<div class=\"cards\">\n");
            for card in cards {
                put_card(out, card);
            }
            out.push_str("</div>\n");
        }
        Block::Table(table) => put_table(out, table),
        Block::Plot(plot) => {
            out.push_str("<figure>\n");
            put_plot(out, plot);
            out.push_str("</figure>\n");
        }
        Block::Timeline(timeline) => put_timeline(out, timeline),
        Block::Long(title, text) => {
            let _ = writeln!(
                out,
                "<details>\n<summary>{}</summary>\n<button type=\"button\" class=\"copy\" hidden>Copy</button>\n<pre tabindex=\"0\">{}</pre>\n</details>",
                escape(title),
                escape(text)
            );
        }
    }
}

fn put_card(out: &mut String, card: &Card) {
    let _ = write!(
        out,
        "<article class=\"card\">\n<h3>{}</h3>\n<p class=\"about\">{}</p>\n<p class=\"head\">{}{}</p>\n<dl>\n",
        escape(&card.title),
        escape(&card.about),
        escape(&card.head),
        change(card.change.as_ref())
    );
    for fact in &card.facts {
        let _ = writeln!(
            out,
            "<div><dt>{}</dt><dd>{}{}</dd></div>",
            escape(&fact.name),
            escape(&fact.value),
            change(fact.change.as_ref())
        );
    }
    out.push_str("</dl>\n</article>\n");
}

/// Returns the change shown after a number, with its meaning as a class and as a mark.
fn change(change: Option<&Change>) -> String {
    change.map_or_else(String::new, |c| {
        let class = match c.is_better {
            Some(true) => "good",
            Some(false) => "bad",
            None => "same",
        };
        format!(
            " <span class=\"change {class}\">{}</span>",
            escape(&c.text())
        )
    })
}

fn put_table(out: &mut String, table: &Table) {
    let caption = escape(&table.caption);
    // Wide tables scroll separately and are reachable by keyboard.
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\">\n<table>\n<caption><span>{caption}</span></caption>\n<thead>\n<tr>"
    );
    let numeric: Vec<bool> = table.head.iter().map(|h| h.starts_with('>')).collect();
    for title in &table.head {
        let class = if title.starts_with('>') {
            " class=\"n\""
        } else {
            ""
        };
        let _ = write!(
            out,
            "<th scope=\"col\"{class}>{}</th>",
            escape(title.trim_start_matches('>'))
        );
    }
    out.push_str("</tr>\n</thead>\n<tbody>\n");
    for row in &table.rows {
        out.push_str("<tr>");
        for (i, cell) in row.iter().enumerate() {
            let text = escape(cell);
            if i == 0 {
                let _ = write!(out, "<th scope=\"row\">{text}</th>");
            } else if numeric.get(i).copied().unwrap_or(false) {
                let _ = write!(out, "<td class=\"n\">{text}</td>");
            } else {
                let _ = write!(out, "<td>{text}</td>");
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table>\n</div>\n");
}

fn put_plot(out: &mut String, plot: &Plot) {
    let _ = writeln!(
        out,
        "<figcaption><strong>{}</strong> <span>{}</span></figcaption>",
        escape(&plot.title),
        escape(&plot.description)
    );
    // Work and memory of a drawing have separate legends.
    let is_work = |key: &Key| matches!(key, Key::Series(_) | Key::Exposed);
    let first = plot.legend.iter().take_while(|(key, _)| is_work(key));
    let (work, memory) = plot.legend.split_at(first.count());
    let has_both = memory.iter().any(|(key, _)| matches!(key, Key::Memory(_)));
    if has_both {
        put_legend(out, "work", work);
        put_legend(out, "memory", memory);
    } else {
        put_legend(out, "", &plot.legend);
    }
    // On a narrow page it scrolls separately and is reachable by keyboard.
    let _ = writeln!(
        out,
        "<div class=\"plot\" tabindex=\"0\" role=\"group\" aria-label=\"{}\">{}</div>",
        escape(&plot.title),
        plot.svg.trim()
    );
}

fn put_legend(out: &mut String, title: &str, legend: &[(Key, String)]) {
    if legend.is_empty() {
        return;
    }
    out.push_str("<ul class=\"legend\">");
    if !title.is_empty() {
        let _ = write!(out, "<li class=\"of\">{title}</li>");
    }
    for (key, words) in legend {
        let _ = write!(
            out,
            "<li><span class=\"key {}\" aria-hidden=\"true\"></span>{}</li>",
            key.class(),
            escape(words)
        );
    }
    out.push_str("</ul>\n");
}

fn put_timeline(out: &mut String, t: &Timeline) {
    let _ = writeln!(out, "<figure class=\"timeline\">");
    let name = &t.plot.name;
    put_plot(out, &t.plot);
    let buttons = [
        ("in", "Zoom in"),
        ("out", "Zoom out"),
        ("left", "Earlier"),
        ("right", "Later"),
        ("gap", "Next exposed gap"),
        ("peak", "Memory peak"),
        ("all", "Whole step"),
    ];
    let _ = write!(
        out,
        "<div class=\"tools\" hidden role=\"group\" aria-label=\"{}: view\">",
        escape(&t.plot.title)
    );
    for (act, words) in buttons {
        let _ = write!(
            out,
            "<button type=\"button\" data-act=\"{act}\">{words}</button>"
        );
    }
    let _ = writeln!(
        out,
        "<label class=\"linked\" hidden><input type=\"checkbox\" checked/> Move all timelines</label>\
         <input type=\"search\" placeholder=\"Find a kernel or unit\" aria-label=\"Find a kernel or unit; Enter goes to the next\"/>\
         </div>\n<p class=\"hover\" id=\"{name}-h\" role=\"status\" hidden>Point at a bar or at the memory; zoom with Ctrl and the wheel or + and -, move by dragging or with arrows.</p>"
    );
    if t.left_out > 0 {
        let _ = writeln!(
            out,
            "<p class=\"note\">{} spans, shorter than all others, appear in the whole step only.</p>",
            t.left_out
        );
    }
    let _ = writeln!(
        out,
        "<script type=\"application/json\" class=\"spans\">{}</script>\n</figure>",
        t.data
    );
}
