//! Runs the commands of a page in order and in one folder, as if the reader pasted them.
//!
//! A comment before a fenced block gives its kind:
//!
//! - `<!-- tested -->`: commands; `<!-- tested, exits 1 -->`: commands that end with this exit
//!   status
//! - `<!-- tested: FILE -->`: the content of a file
//! - `<!-- prints -->`: lines that the previous commands print, on either stream. A line `...`
//!   matches any number of lines, and `…` within a line matches any text.
//! - `<!-- not tested: REASON -->`: commands that need something that tests do not have
//!
//! In tutorials and how-to guides, each block of commands must have one of these comments.

use super::{ROOT, read};
use std::path::Path;
use std::process::Command;

enum Kind {
    File(String),
    Commands { status: i32 },
    Prints,
    Skipped,
}

struct Block {
    kind: Kind,
    text: String,
}

/// Returns the kind of block that a comment announces; `None` for other comments.
fn kind(comment: &str) -> Option<Kind> {
    if let Some(file) = comment.strip_prefix("tested: ") {
        return Some(Kind::File(file.to_owned()));
    }
    if let Some(status) = comment.strip_prefix("tested, exits ") {
        let status = status.parse().unwrap();
        return Some(Kind::Commands { status });
    }
    match comment {
        "tested" => Some(Kind::Commands { status: 0 }),
        "prints" => Some(Kind::Prints),
        _ => comment
            .strip_prefix("not tested: ")
            .map(|reason| assert!(reason.len() > 5, "{reason}"))
            .map(|()| Kind::Skipped),
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for part in page.split("<!-- ").skip(1) {
        let (comment, rest) = part.split_once(" -->").unwrap();
        let Some(kind) = kind(comment) else { continue };
        let rest = rest.trim_start();
        let fenced = rest.strip_prefix("```");
        let (_, body) = fenced
            .unwrap_or_else(|| panic!("no block after: {comment}"))
            .split_once('\n')
            .unwrap();
        let (text, _) = body.split_once("\n```").unwrap();
        let text = format!("{text}\n");
        blocks.push(Block { kind, text });
    }
    blocks
}

/// Returns whether a line matches a pattern in which `…` matches any text.
fn is_like(line: &str, pattern: &str) -> bool {
    let (line, pattern) = (line.trim_end(), pattern.trim_end());
    let mut parts = pattern.split('…');
    let Some(mut rest) = line.strip_prefix(parts.next().unwrap()) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else {
            return false;
        };
        rest = after;
    }
    rest.ends_with(last)
}

/// Returns the first expected line that is missing from its place in the output.
fn missing<'a>(expected: &'a str, output: &str) -> Option<&'a str> {
    let lines: Vec<&str> = output.lines().collect();
    let mut from = 0;
    let expected: Vec<&'a str> = expected.lines().collect();
    for chunk in expected.split(|l| *l == "...").filter(|c| !c.is_empty()) {
        let begins = |at: &usize| {
            let there = lines[*at..].iter();
            lines.len() - at >= chunk.len() && there.zip(chunk).all(|(l, p)| is_like(l, p))
        };
        let Some(at) = (from..lines.len()).find(begins) else {
            let absent = |p: &&&'a str| !lines[from..].iter().any(|l| is_like(l, p));
            return Some(*chunk.iter().find(absent).unwrap_or(&chunk[0]));
        };
        from = at + chunk.len();
    }
    None
}

/// Runs the blocks of a page. The page must have at least the given numbers of commands and
/// outputs.
#[track_caller]
fn paste(page: &str, least: usize, prints: usize) {
    paste_in(&tempfile::tempdir().unwrap(), page, least, prints);
}

#[track_caller]
fn paste_in(folder: &tempfile::TempDir, page: &str, least: usize, prints: usize) {
    let bin = Path::new(env!("CARGO_BIN_EXE_shardlab")).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{ROOT}/tests/cli/slurm:{path}", bin.display());
    let blocks = blocks(&read(page));
    let (mut commands, mut shown, mut output) = (0, 0, String::new());
    for Block { kind, text } in blocks {
        match kind {
            Kind::Skipped => {}
            Kind::File(file) => std::fs::write(folder.path().join(file), text).unwrap(),
            Kind::Commands { status } => {
                commands += text.matches("shardlab ").count();
                let run = Command::new("bash")
                    .args(["-euc", &format!("exec 2>&1\n{text}")])
                    .current_dir(folder.path())
                    .env("PATH", &path)
                    .env("COLUMNS", "100")
                    .env("NO_COLOR", "1")
                    .env("LC_ALL", "C.UTF-8")
                    // Commits in a page need an author on every machine.
                    .envs(["GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"].map(|n| (n, "you")))
                    .envs(["GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"].map(|n| (n, "you@localhost")))
                    .env_remove("SHARDLAB_STORE")
                    .output()
                    .unwrap();
                output = String::from_utf8(run.stdout).unwrap();
                assert_eq!(run.status.code(), Some(status), "{page}:\n{text}\n{output}");
            }
            Kind::Prints => {
                shown += 1;
                if let Some(line) = missing(&text, &output) {
                    panic!("{page}: nothing printed is like\n  {line}\nin\n{output}");
                }
            }
        }
    }
    assert!(commands >= least, "{page}: {commands} commands");
    assert!(shown >= prints, "{page}: {shown} outputs");
}

#[test]
fn the_readme() {
    paste("README.md", 10, 0);
}

#[test]
fn first_prediction() {
    paste("docs/tutorials/first-prediction.md", 4, 4);
}

#[test]
fn first_training() {
    paste("docs/tutorials/first-training.md", 4, 4);
}

#[test]
fn exposed_collective() {
    paste("docs/tutorials/exposed-collective.md", 4, 4);
}

#[test]
fn slower_than_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let traces = "tests/data/traces";
    std::fs::create_dir_all(folder.path().join(traces)).unwrap();
    for rank in [0, 1] {
        let file = format!("{traces}/fsdp2-compiled-rank{rank}.json.gz");
        std::fs::copy(format!("{ROOT}/{file}"), folder.path().join(&file)).unwrap();
    }
    paste_in(&folder, "docs/tutorials/slower-than-predicted.md", 6, 6);
}

#[test]
fn ci_gate() {
    paste("docs/tutorials/ci-gate.md", 5, 4);
}

#[test]
fn profile_my_machine() {
    paste("docs/how-to/profile-my-machine.md", 3, 2);
}

#[test]
fn will_it_fit() {
    paste("docs/how-to/will-it-fit.md", 5, 4);
}

#[test]
fn own_model() {
    paste("docs/how-to/own-model.md", 5, 5);
}

#[test]
fn more_memory_than_predicted() {
    let folder = tempfile::tempdir().unwrap();
    for (from, to) in [
        ("fsdp2-compiled-rank0.json.gz", "trace.json.gz"),
        ("fsdp2-compiled.snapshot.pickle.gz", "snapshot.pickle"),
        ("oom.snapshot.pickle.gz", "oom.pickle"),
    ] {
        let from = format!("{ROOT}/tests/data/traces/{from}");
        std::fs::copy(from, folder.path().join(to)).unwrap();
    }
    paste_in(&folder, "docs/how-to/more-memory-than-predicted.md", 6, 5);
}

#[test]
fn find_the_best_settings() {
    paste("docs/how-to/find-the-best-settings.md", 8, 6);
}

#[test]
fn train_on_longer_sequences() {
    paste("docs/tutorials/longer-sequences.md", 6, 6);
}

#[test]
fn memory_questions() {
    paste("docs/how-to/memory-questions.md", 15, 0);
}

#[test]
fn fit_in_memory() {
    paste("docs/how-to/fit-in-memory.md", 4, 3);
}

#[test]
fn search_for_a_better_setting() {
    paste("docs/how-to/sweep.md", 3, 2);
}

#[test]
fn choose_expert_parallelism() {
    paste("docs/how-to/expert-parallelism.md", 3, 3);
}

#[test]
fn train_adapters() {
    paste("docs/how-to/adapters.md", 3, 2);
}

#[test]
fn train() {
    paste("docs/how-to/train.md", 5, 3);
}

#[test]
fn checkpoints_go_to_pytorch_and_back() {
    paste("docs/how-to/pytorch-checkpoints.md", 2, 2);
}

#[test]
fn train_on_gpus() {
    paste("docs/how-to/train-on-gpus.md", 1, 1);
}

#[test]
fn multi_node_slurm() {
    paste("docs/how-to/multi-node-slurm.md", 1, 2);
}

#[test]
fn compare_revisions() {
    paste("docs/how-to/compare-revisions.md", 3, 2);
}

#[test]
fn saved_runs() {
    paste("docs/how-to/saved-runs.md", 12, 2);
}

#[test]
fn import_traces() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("iteration_10")).unwrap();
    for (from, to) in [
        (
            "fsdp2-compiled-rank0.json.gz",
            "iteration_10/rank0_trace.json.gz",
        ),
        (
            "fsdp2-compiled-rank1.json.gz",
            "iteration_10/rank1_trace.json.gz",
        ),
        ("base.json.gz", "trace.json.gz"),
        ("start-default.snapshot.pickle.gz", "snapshot.pickle"),
        ("oom.snapshot.pickle.gz", "oom.pickle"),
    ] {
        let from = format!("{ROOT}/tests/data/traces/{from}");
        std::fs::copy(from, folder.path().join(to)).unwrap();
    }
    paste_in(&folder, "docs/how-to/import-traces.md", 9, 1);
}

#[test]
fn reports() {
    paste("docs/how-to/reports.md", 4, 1);
}

#[test]
fn install() {
    paste("docs/how-to/install.md", 1, 1);
}

#[test]
fn exit_status() {
    paste("docs/reference/exit-status.md", 4, 1);
}

/// A block of commands that no test runs gives the reason.
#[test]
fn every_command_of_a_guide_is_tested() {
    let (mut seen, mut unmarked) = (0, Vec::new());
    for folder in ["tutorials", "how-to"] {
        for entry in std::fs::read_dir(format!("{ROOT}/docs/{folder}")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|e| e != "md") {
                continue;
            }
            let page = std::fs::read_to_string(&path).unwrap();
            let fences = ["```sh\n", "```bash\n", "```console\n"];
            let commands = fences.into_iter().flat_map(|f| page.match_indices(f));
            for (before, _) in commands.map(|(at, _)| page.split_at(at)) {
                seen += 1;
                let above = before.trim_end().lines().last().unwrap_or_default();
                let comment = above
                    .strip_prefix("<!-- ")
                    .and_then(|c| c.strip_suffix(" -->"));
                if comment.and_then(kind).is_none() {
                    let line = before.lines().count();
                    unmarked.push(format!("{}:{}", path.display(), line + 1));
                }
            }
        }
    }
    assert!(seen > 30, "{seen}");
    assert!(
        unmarked.is_empty(),
        "not tested, without a reason: {unmarked:#?}"
    );
}

#[test]
fn missing_lines_are_noticed() {
    let output = "a 1\nb 2\nc 3\n";
    assert_eq!(missing("a …\n...\nc 3\n", output), None);
    assert_eq!(missing("b 2\nc 3\n", output), None);
    assert_eq!(missing("a 1\nc 3\n", output), Some("a 1"));
    assert_eq!(missing("c 3\n...\na 1\n", output), Some("a 1"));
    assert_eq!(missing("a 2\n", output), Some("a 2"));
    assert_eq!(missing("… 2\n", output), None);
    assert!(!is_like("ab", "a"));
}
