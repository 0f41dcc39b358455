//! The documents: their commands run, their numbers match the tables, and their links are valid.

use crate::{json, stdout};
use serde_json::Value;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// A fenced block after `<!-- tested -->` or `<!-- tested: FILE -->`.
struct Block {
    /// The file that the block contains; `None` for commands.
    file: Option<String>,
    text: String,
}

fn tested_blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for part in page.split("<!-- tested").skip(1) {
        let (note, rest) = part.split_once("-->").unwrap();
        let (_, fenced) = rest.split_once("```").unwrap();
        let (_, body) = fenced.split_once('\n').unwrap();
        let (text, _) = body.split_once("```").unwrap();
        blocks.push(Block {
            file: note.strip_prefix(':').map(|f| f.trim().to_owned()),
            text: text.to_owned(),
        });
    }
    blocks
}

/// Runs the tested blocks of a page in order and in one folder, as if a person pasted them.
#[cfg(unix)]
#[track_caller]
fn paste(page: &str, least: usize) {
    let folder = tempfile::tempdir().unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_shardlab")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let blocks = tested_blocks(&read(page));
    let commands: usize = blocks
        .iter()
        .map(|b| b.text.matches("shardlab ").count())
        .sum();
    assert!(commands >= least, "{page}: {commands} commands");
    for Block { file, text } in blocks {
        if let Some(file) = file {
            std::fs::write(folder.path().join(file), text).unwrap();
            continue;
        }
        let output = std::process::Command::new("bash")
            .args(["-euc", &text])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env_remove("SHARDLAB_STORE")
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{page}: {}\n{text}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[cfg(unix)]
#[test]
fn commands_of_the_readme_run_in_order() {
    paste("README.md", 10);
}

#[cfg(unix)]
#[test]
fn commands_of_the_pages_run_in_order() {
    paste("docs/runs.md", 8);
    paste("docs/reports.md", 4);
}

/// Returns rows of measured tables with their predictions.
fn measured(tables: &[&str], wanted: fn(&Value) -> bool) -> Vec<Value> {
    let mut rows = Vec::new();
    for table in tables {
        let path = format!("{ROOT}/tests/data/{table}.csv");
        let mut lines = json(&["validate", &path, "--json"]);
        // The last object summarises all rows.
        lines.pop();
        rows.extend(lines.into_iter().filter(wanted));
    }
    rows
}

/// Returns the absolute errors in percent of the rows that have the metric, in ascending order.
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

/// Formats an error with two decimals below 1, otherwise with one.
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

const LINES: [Line; 5] = [
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
            facts.push("engine exact".to_owned());
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

#[test]
fn the_page_of_scenario_keys_is_current() {
    assert!(
        read("docs/scenario-keys.md") == stdout(&["schema", "--markdown"]),
        "run: shardlab schema --markdown > docs/scenario-keys.md"
    );
}

#[test]
fn the_front_pages_are_short() {
    for (page, most) in [("README.md", 150), ("BENCHMARKS.md", 120)] {
        let lines = read(page).lines().count();
        assert!(lines <= most, "{page} has {lines} lines");
    }
}

fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for folder in ["", "docs", "benchmarks"] {
        for entry in std::fs::read_dir(Path::new(ROOT).join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "md") {
                pages.push(path);
            }
        }
    }
    assert!(pages.len() > 15, "{pages:?}");
    pages
}

/// Returns the anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// Links within the repository name an existing file and one of its headings.
#[test]
fn links_of_the_documents_lead_somewhere() {
    let (mut links, mut broken) = (0, Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for part in text.split("](").skip(1) {
            let target = part.split(')').next().unwrap();
            if target.contains("://") {
                continue;
            }
            links += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => page.clone(),
                _ => page.parent().unwrap().join(file),
            };
            let there = match heading {
                "" => path.exists(),
                _ => std::fs::read_to_string(&path).is_ok_and(|text| {
                    let mut headings = text.lines().filter(|l| l.starts_with('#')).map(anchor);
                    headings.any(|a| a == heading)
                }),
            };
            if !there {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(links > 60, "{links}");
    assert!(broken.is_empty(), "{broken:#?}");
}
