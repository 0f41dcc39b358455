//! Published configurations through the binary: every key has a row, and emitted files are read
//! back as the same job.

use crate::shardlab;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/frameworks");
const MODEL: &str = "trainer/mistralai/Mistral-7B-v0.1";

/// A model with two layers is planned quickly.
const SMALL: [&str; 2] = ["--set", "model.layers=2"];

/// Copies a folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// Returns the published configurations in a folder.
fn configurations(folder: &Path) -> Vec<PathBuf> {
    let frameworks = [
        "accelerate",
        "axolotl",
        "llama-factory",
        "megatron",
        "nemo",
        "torchtitan",
        "torchtune",
        "trainer",
    ];
    let mut all: Vec<PathBuf> = frameworks
        .iter()
        .flat_map(|name| std::fs::read_dir(folder.join(name)).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    all.sort();
    all
}

/// A call of `fit` on a configuration.
struct Job<'a> {
    path: &'a Path,
    /// Additional arguments that it needs.
    more: Vec<String>,
}

impl<'a> Job<'a> {
    /// Returns the job of a configuration; `None` if it cannot be predicted.
    fn of(path: &'a Path, folder: &Path) -> Option<Self> {
        let model = folder.join(MODEL).display().to_string();
        let gpus = ["--gpus".to_owned(), "8xb200".to_owned()];
        let named = ["--model".to_owned(), model];
        [gpus.to_vec(), [gpus, named].concat()]
            .into_iter()
            .map(|more| Self { path, more })
            .find(|job| job.run(&SMALL).is_ok())
    }

    fn command(&self, args: &[&str]) -> assert_cmd::Command {
        let mut command = shardlab(&["fit"]);
        command
            .arg(self.path)
            .args(&self.more)
            .args(args)
            .env("HF_HUB_CACHE", "/nonexistent");
        command
    }

    /// Returns the JSON output, or the message for bad input.
    fn run(&self, args: &[&str]) -> Result<Value, String> {
        let output = self
            .command(&[args, &["--json"]].concat())
            .output()
            .unwrap();
        match output.status.code() {
            Some(0 | 1) => Ok(serde_json::from_slice(&output.stdout).unwrap()),
            _ => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// Writes changes into the file. Returns the changes that cannot be expressed; `None` if
    /// several files change.
    fn emit(&self, args: &[&str]) -> Option<String> {
        let own = self.path.to_str().unwrap();
        let args = [args, &["--emit", "job", "-o", own]].concat();
        let output = self.command(&args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if said.contains("several files change") {
            return None;
        }
        let is_lost = said.contains("not expressed");
        assert!(output.status.success() || is_lost, "{own}: {said}");
        Some(said)
    }
}

/// Returns the numbers of a prediction.
fn numbers(answer: &Value) -> [&Value; 3] {
    let verdict = &answer["verdict"];
    [&answer["fits"], &verdict["step_ms"], &verdict["free_bytes"]]
}

/// Returns the key paths of a file: keys with their sections in TOML, keys that are not indented in
/// YAML, and the options of a shell script outside conditions.
fn keys(path: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|l| !l.trim_start().starts_with('#'));
    let ending = path.extension().unwrap().to_str().unwrap();
    match ending {
        "yaml" | "yml" => lines
            .filter(|l| l.starts_with(|c: char| c.is_ascii_alphabetic()))
            .filter_map(|l| Some(l.split_once(':')?.0.to_owned()))
            .collect(),
        "toml" => {
            let mut section = String::new();
            let mut all = BTreeSet::new();
            for line in lines {
                if let Some(name) = line.strip_prefix('[') {
                    name.trim_end_matches(']').clone_into(&mut section);
                } else if let Some((key, _)) = line.split_once('=') {
                    all.insert(format!("{section}.{}", key.trim()));
                }
            }
            all
        }
        "sh" => {
            let mut depth = 0;
            let mut all = BTreeSet::new();
            for line in lines {
                match line.split_whitespace().next() {
                    Some("if") => depth += 1,
                    Some("fi") => depth -= 1,
                    // Variables decide which branch is taken.
                    _ if depth > 0 => {}
                    _ => {
                        let apart = |c: char| c.is_whitespace() || "\"'()".contains(c);
                        let options = line.split(apart).filter(|w| w.starts_with("--"));
                        let names = options.map(|o| o.split('=').next().unwrap_or(o));
                        let names = names.filter(|o| o.len() > 2);
                        all.extend(names.map(|o| o.replace('_', "-")));
                    }
                }
            }
            all
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_is_emitted_predicts_the_same() {
    let folder = tempfile::tempdir().unwrap();
    copy(Path::new(DATA), folder.path());
    let (mut read, mut written) = (0, 0);
    for path in configurations(folder.path()) {
        let shown = path.strip_prefix(folder.path()).unwrap().display();
        let Some(job) = Job::of(&path, folder.path()) else {
            continue;
        };
        read += 1;
        let before = job.run(&SMALL).unwrap();
        let is_full = before["scenario"]
            .as_str()
            .unwrap()
            .contains("recompute = \"full\"");
        let mode = if is_full { "none" } else { "full" };
        let set = format!("train.recompute={mode}");
        let change = ["--set", &set];
        let expected = job.run(&[&SMALL[..], &change].concat()).unwrap();
        assert_ne!(numbers(&before), numbers(&expected), "{shown}");
        match job.emit(&change) {
            Some(said) if said.is_empty() || said.starts_with("wrote ") => {}
            // A format that cannot express the change reports it, and the file stays the same.
            Some(said) => {
                assert!(said.contains("not expressed"), "{shown}: {said}");
                continue;
            }
            None => continue,
        }
        let after = job.run(&SMALL).unwrap();
        assert_eq!(numbers(&after), numbers(&expected), "{shown}");
        // No other key has changed.
        let names = |answer: &Value| -> BTreeSet<String> {
            let rows = answer["keys"].as_array().unwrap().iter();
            let own = rows.filter(|r| !r["file"].is_null());
            own.map(|r| r["key"].as_str().unwrap().to_owned()).collect()
        };
        let gone: Vec<String> = names(&before).difference(&names(&after)).cloned().collect();
        assert!(gone.len() <= 3, "{shown}: {gone:?}");
        written += 1;
    }
    assert!(
        read >= 20 && written >= 20,
        "{read} read, {written} written"
    );
}

#[test]
fn every_key_of_published_configurations_has_a_row() {
    let mut seen = 0;
    for path in configurations(Path::new(DATA)) {
        let Some(job) = Job::of(&path, Path::new(DATA)) else {
            continue;
        };
        let answer = job.run(&SMALL).unwrap();
        let rows = answer["keys"].as_array().unwrap().iter();
        let rows: Vec<&str> = rows.map(|r| r["key"].as_str().unwrap()).collect();
        for key in keys(&path) {
            let below = format!("{key}.");
            let is_known = |row: &&str| {
                *row == key || row.starts_with(&below) || key.starts_with(&format!("{row}."))
            };
            assert!(rows.iter().any(is_known), "{}: {key}", path.display());
        }
        seen += 1;
    }
    assert!(seen >= 20, "{seen}");
}
