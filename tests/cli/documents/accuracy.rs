//! Checks that the numbers in README.md and BENCHMARKS.md are those of the measured tables.

use super::{ROOT, read};
use crate::json;
use serde_json::Value;

/// Returns the rows of measured tables, with their predictions.
fn measured(tables: &[&str], wanted: fn(&Value) -> bool) -> Vec<Value> {
    let mut rows = Vec::new();
    for table in tables {
        let path = format!("{ROOT}/tests/data/{table}.csv");
        let mut lines = json(&["validate", &path, "--json"]);
        // The last object summarizes all rows.
        lines.pop();
        rows.extend(lines.into_iter().filter(wanted));
    }
    rows
}

/// Returns the absolute errors in percent, in ascending order, for rows that have the metric.
fn errors(rows: &[Value], metric: &str) -> Vec<f64> {
    let of = |row: &Value| row[metric]["error_percent"].as_f64();
    let mut errors: Vec<f64> = rows.iter().filter_map(of).map(f64::abs).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2])
}

fn worst(rows: &[Value], metric: &str) -> f64 {
    *errors(rows, metric).last().unwrap()
}

/// Formats an error: with two decimals if it is below 1, otherwise with one.
fn percent(error: f64) -> String {
    if error < 0.995 {
        format!("{error:.2}")
    } else {
        format!("{error:.1}")
    }
}

fn tiny(row: &Value) -> bool {
    row["scenario"] == "peers-tiny"
}

const PEERS: &[&str] = &["h200x4", "h200x4_heldout"];

/// Measured tables, and the rows that a line of the table covers.
struct Line {
    label: &'static str,
    tables: &'static [&'static str],
    wanted: fn(&Value) -> bool,
}

const LINES: [Line; 6] = [
    Line {
        label: "FSDP2 and Megatron-FSDP on 4 H200, models of 1.5 to 8 B",
        tables: PEERS,
        wanted: |row| !tiny(row),
    },
    Line {
        label: "the same, a 0.1 B model",
        tables: PEERS,
        wanted: tiny,
    },
    Line {
        label: "memory of both on meshes of up to 1,024 ranks, run on one GPU",
        tables: &["engine_memory"],
        wanted: |_| true,
    },
    Line {
        label: "[published runs](benchmarks/public.md) of five projects on 2 to 128 A100, H100 and H200, to which nothing was fitted",
        tables: &["published_heldout"],
        wanted: |_| true,
    },
    Line {
        label: "`shardlab exec` on 1 to 4 H200",
        tables: &["exec_h200", "exec_h200_options"],
        wanted: |_| true,
    },
    Line {
        label: "`shardlab exec` on 1 and 2 H100",
        tables: &["exec_h100"],
        wanted: |_| true,
    },
];

#[test]
fn the_accuracy_table_is_that_of_the_measured_runs() {
    let readme = read("README.md");
    let (_, section) = readme.split_once("\n## Accuracy\n").unwrap();
    for Line {
        label,
        tables,
        wanted,
    } in LINES
    {
        let rows = measured(tables, wanted);
        let step = errors(&rows, "step_ms");
        let (middle, most) = match step.last() {
            Some(&most) => (format!(" {:.1} ", median(&step)), format!(" {most:.1} ")),
            None => (" ".to_owned(), " ".to_owned()),
        };
        let line = format!(
            "| {label} | {} |{middle}|{most}| {} | {} |",
            rows.len(),
            percent(worst(&rows, "peak_allocated_mib")),
            percent(worst(&rows, "peak_reserved_mib")),
        );
        assert!(
            section.lines().any(|l| l == line),
            "README.md lacks: {line}"
        );
    }
}

/// A name, arguments of `validate`, and a filter of rows.
type Case<'a> = (&'a str, &'a [&'a str], fn(&Value) -> bool);

/// Checks the numbers of the accuracy table in BENCHMARKS.md, line by line.
#[test]
fn the_benchmarks_have_the_errors_of_the_measured_runs() {
    let page = read("BENCHMARKS.md");
    let line_with = |text: &str| page.lines().find(|l| l.contains(text)).unwrap();
    let memory = |rows: &[Value], metric, what: &str| {
        format!("{what} within {} %", percent(worst(rows, metric)))
    };
    let cases: [Case; 6] = [
        ("1.5 to 8 B parameters", PEERS, |row| !tiny(row)),
        ("0.1 B parameters", PEERS, tiny),
        ("[memory on meshes]", &["engine_memory"], |_| true),
        ("[1 to 4 H200]", &["exec_h200"], |_| true),
        ("[51 single options]", &["exec_h200_options"], |_| true),
        ("[1 and 2 H100]", &["exec_h100"], |_| true),
    ];
    for (label, tables, wanted) in cases {
        let (line, rows) = (line_with(label), measured(tables, wanted));
        let mut facts = Vec::new();
        let step = errors(&rows, "step_ms");
        if let Some(most) = step.last() {
            facts.push(format!("{:.1} %, worst {most:.1} %", median(&step)));
        }
        if tables[0].starts_with("exec") {
            assert!(worst(&rows, "peak_allocated_mib") < 0.001, "{label}");
            facts.push("allocated and reserved exact".to_owned());
            facts.push(memory(&rows, "device_mib", "device"));
        } else {
            facts.push(memory(&rows, "peak_reserved_mib", "reserved"));
        }
        for fact in facts {
            assert!(
                line.contains(&fact),
                "BENCHMARKS.md: {fact} is not in: {line}"
            );
        }
    }
}
