//! The book: its table of contents lists every page, and links have a target.

use super::{ROOT, read};
use crate::stdout;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[test]
fn generated_pages_are_current() {
    for (option, page) in [
        ("--markdown", "scenario-keys"),
        ("--hardware", "hardware-keys"),
        ("--rules", "check-rules"),
        #[cfg(feature = "dash")]
        ("--commands", "commands"),
    ] {
        let path = format!("docs/reference/{page}.md");
        assert!(
            read(&path) == stdout(&["schema", option]),
            "run: shardlab schema {option} > {path}"
        );
    }
}

/// The page on exit statuses has the same ones as `--help`.
#[test]
fn the_page_of_exit_statuses_is_that_of_the_help() {
    let page = read("docs/reference/exit-status.md");
    let help = crate::shardlab(&["--help"])
        .env("COLUMNS", "400")
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, lines) = help.split_once("Exit status:\n").unwrap();
    let lines: Vec<&str> = lines.lines().take_while(|l| l.starts_with("  ")).collect();
    assert_eq!(lines.len(), 4);
    for line in lines {
        let (status, meaning) = line.trim().split_once("  ").unwrap();
        let row = format!("| {status} | {meaning} |");
        assert!(page.contains(&row), "docs/reference/exit-status.md: {row}");
    }
}

fn markdown_in(folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            markdown_in(&path, pages);
        } else if path.extension().is_some_and(|e| e == "md") {
            pages.push(path);
        }
    }
}

/// Returns the targets of links on a page, except those to other sites. Code has no links.
fn links(text: &str) -> Vec<&str> {
    let outside = text.split("```").step_by(2);
    let targets = outside.flat_map(|part| part.split("](").skip(1));
    targets
        .map(|rest| rest.split(')').next().unwrap())
        .filter(|target| !target.contains("://"))
        .collect()
}

/// mdBook leaves out pages that the table of contents does not list, and creates empty pages for
/// those that do not exist.
#[test]
fn the_contents_list_every_page_once() {
    let docs = Path::new(ROOT).join("docs");
    let contents = read("docs/SUMMARY.md");
    let listed = links(&contents);
    let unique: BTreeSet<PathBuf> = listed.iter().map(|l| docs.join(l)).collect();
    assert_eq!(listed.len(), unique.len(), "a page is listed twice");
    let mut pages = Vec::new();
    markdown_in(&docs, &mut pages);
    let pages: BTreeSet<PathBuf> = pages
        .into_iter()
        .filter(|p| !p.ends_with("SUMMARY.md"))
        .collect();
    assert_eq!(unique, pages);
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let title = text.lines().next().unwrap();
        assert!(title.starts_with("# "), "{}: {title}", page.display());
    }
}

/// Returns the anchor that GitHub creates for a heading.
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

/// Links within the repository point to an existing file and one of its headings.
#[test]
fn links_of_the_documents_lead_somewhere() {
    let mut pages = Vec::new();
    markdown_in(&Path::new(ROOT).join("docs"), &mut pages);
    markdown_in(&Path::new(ROOT).join("benchmarks"), &mut pages);
    for page in [
        "README",
        "ARCHITECTURE",
        "BENCHMARKS",
        "CHANGELOG",
        "CONTRIBUTING",
        "SECURITY",
    ] {
        pages.push(Path::new(ROOT).join(format!("{page}.md")));
    }
    assert!(pages.len() > 40, "{pages:?}");
    let (mut count, mut broken) = (0, Vec::new());
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for target in links(&text) {
            count += 1;
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
    assert!(count > 150, "{count}");
    assert!(broken.is_empty(), "{broken:#?}");
}
