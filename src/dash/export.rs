//! Exports a configuration from the dashboard as a command or a scenario file.

use super::app::{App, Tone};
use super::confirm::Question;
use super::event::{Effect, Setup, Task};
use super::prompt::{Asks, Prompt};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use shardlab_plan::scenario;
use shardlab_reports::files::{self, Existing};
use shardlab_reports::shell;
use shardlab_reports::view::ScenarioView;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

/// A scenario file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The scenario with its changes.
    pub setup: Setup,
    /// The file.
    pub path: PathBuf,
    /// Whether to replace an existing file.
    pub overwrite: bool,
}

/// Why nothing was written.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unwritten {
    /// The file exists.
    Exists,
    /// Another reason, in words.
    Failed(String),
}

/// Shows the command that predicts a scenario, and copies it to the clipboard of the terminal.
pub(super) fn copy(app: &mut App, setup: Option<Setup>) -> Vec<Effect> {
    let Some(setup) = setup else {
        return Vec::new();
    };
    let source = app.scenarios.sources.iter().find(|s| s.path == setup.path);
    let command = match source.and_then(|s| s.job.as_ref()) {
        Some(job) => {
            let set = setup.overrides.iter().flat_map(|o| ["--set", o.as_str()]);
            let words = job.words.iter().map(String::as_str);
            shell::joined(["shardlab", "fit"].into_iter().chain(words).chain(set))
        }
        None => shell::command("sim", &setup.path.display().to_string(), &setup.overrides),
    };
    app.say(Tone::Good, format!("copied: {command}"));
    vec![Effect::Copy(command)]
}

/// Asks where to write a scenario.
pub(super) fn ask(app: &mut App, setup: Option<Setup>) {
    let Some(setup) = setup else { return };
    let sources = &app.scenarios.sources;
    if sources
        .iter()
        .any(|s| s.path == setup.path && s.job.is_some())
    {
        let text = "the job of a framework: y copies its command; with --emit job, that writes the changes";
        app.say(Tone::Plain, text);
        return;
    }
    let path = format!("{}-changed.toml", setup.name());
    app.prompt = Some(Prompt::new(Asks::Export, path.clone()));
    app.export = Some(Export {
        setup,
        path: path.into(),
        overwrite: false,
    });
}

/// Accepts the path in the prompt.
pub(super) fn accept(app: &mut App, text: &str) -> Vec<Effect> {
    let Some(export) = &mut app.export else {
        return Vec::new();
    };
    let text = text.trim();
    if text.is_empty() {
        return Vec::new();
    }
    // Scenario files are identified by their extension; other dots are part of the name.
    let ending = if text.ends_with(".toml") { "" } else { ".toml" };
    export.path = format!("{text}{ending}").into();
    let export = export.clone();
    app.start(Task::Export(export))
}

/// Asks whether to replace an existing file.
pub(super) fn exists(app: &mut App) {
    if let Some(export) = &mut app.export {
        export.overwrite = true;
        app.question = Some(Question::Overwrite);
    }
}

/// Returns the text of a scenario file that extends another one with changes.
fn text(extends: &str, overrides: &[String]) -> String {
    let quoted = |text: &str| format!("{text:?}");
    let mut sections: BTreeMap<&str, String> = BTreeMap::new();
    for change in overrides {
        let Some((path, value)) = change.split_once('=') else {
            continue;
        };
        let Some((section, key)) = path.trim().split_once('.') else {
            continue;
        };
        // Like `--set`: a value that is not TOML is a string.
        let value = value.trim();
        let value = match toml::from_str::<toml::Table>(&format!("x = {value}")) {
            Ok(table) if table.len() == 1 => value.to_owned(),
            _ => quoted(value),
        };
        let lines = sections.entry(section).or_default();
        let _ = writeln!(lines, "{key} = {value}");
    }
    let mut text = format!("extends = {}\n", quoted(extends));
    for (section, lines) in sections {
        let _ = write!(text, "\n[{section}]\n{lines}");
    }
    text
}

/// Writes an equivalent scenario file.
pub(super) fn write(export: &Export) -> Result<(), Unwritten> {
    let Setup { path, overrides } = &export.setup;
    let meant = scenario::load(path, overrides).map_err(|e| Unwritten::Failed(e.to_string()))?;
    // An absolute path is valid wherever the new file is. A shipped scenario is found by its name.
    let extends = match std::path::absolute(path) {
        Ok(whole) if path.is_file() => whole,
        _ => path.clone(),
    };
    let to = &export.path;
    let failed =
        |why: &dyn std::fmt::Display| Unwritten::Failed(format!("{}: {why}", to.display()));
    let text = text(&extends.to_string_lossy(), overrides);
    // The check comes before writing, because the scenario may extend this file.
    let written = scenario::load_to_be(to, &text).map_err(|e| failed(&e.message()))?;
    let digest = |s| ScenarioView::new(s).digest;
    if digest(&written) != digest(&meant) {
        return Err(failed(
            &"it would not be the same scenario; check what it extends",
        ));
    }
    let existing = if export.overwrite {
        Existing::Replace
    } else {
        Existing::Keep
    };
    let saved = files::write_as(to, existing, |file| file.write_all(text.as_bytes()));
    saved.map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists if !export.overwrite => Unwritten::Exists,
        _ => failed(&e),
    })
}

/// Returns the escape sequence (OSC 52) that makes a terminal copy a text to its clipboard.
#[must_use]
pub(super) fn clipboard(text: &str) -> String {
    format!("\x1b]52;c;{}\x07", STANDARD.encode(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    /// Test vector from RFC 4648.
    #[test]
    fn a_text_goes_to_the_clipboard_in_base64() {
        assert_eq!(clipboard("foob"), "\x1b]52;c;Zm9vYg==\x07");
    }

    #[test]
    fn a_written_scenario_means_the_same_and_nothing_is_overwritten_unasked() {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("first.toml");
        let set = [
            "fsdp.policy=fsdp2",
            "train.micro_batch=2",
            "fsdp.prefetch_forward=no",
        ];
        let mut export = Export {
            setup: Setup {
                path: "llama3-8b-4xh200".into(),
                overrides: set.map(str::to_owned).to_vec(),
            },
            path: first.clone(),
            overwrite: false,
        };
        // An invalid scenario is not written.
        assert!(matches!(write(&export), Err(Unwritten::Failed(_))));
        assert!(!first.exists());
        export.setup.overrides.pop();
        write(&export).unwrap();
        let text = std::fs::read_to_string(&first).unwrap();
        let expected = "extends = \"llama3-8b-4xh200\"\n\n[fsdp]\npolicy = \"fsdp2\"\n\n[train]\nmicro_batch = 2\n";
        assert_eq!(text, expected);
        assert_eq!(write(&export), Err(Unwritten::Exists));
        // This one extends a file in another folder.
        let second = folder.path().join("second.toml");
        let again = Export {
            setup: Setup {
                path: first.clone(),
                overrides: vec!["train.micro_batch=4".into()],
            },
            path: second.clone(),
            overwrite: false,
        };
        write(&again).unwrap();
        let loaded = scenario::load(&second, &[]).unwrap();
        assert_eq!(loaded.train.micro_batch, 4);
        // The file is replaced on request, but never otherwise.
        export.overwrite = true;
        write(&export).unwrap();
        let circle = Export {
            path: first.clone(),
            overwrite: true,
            ..again
        };
        assert!(matches!(write(&circle), Err(Unwritten::Failed(_))));
        assert_eq!(std::fs::read_to_string(&first).unwrap(), expected);
    }

    /// Returns the names of the files in a folder.
    fn listed(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Replacing the scenario itself, or any file that it extends, under any name is rejected
    /// before the user is asked.
    #[test]
    fn a_file_that_the_scenario_extends_is_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let base = "extends = \"small-native\"\n";
        std::fs::write(at("base.toml"), base).unwrap();
        std::fs::write(at("child.toml"), "extends = \"base.toml\"\n").unwrap();
        std::os::unix::fs::symlink("base.toml", at("link.toml")).unwrap();
        for name in ["base.toml", "child.toml", "link.toml"] {
            for overwrite in [false, true] {
                let export = Export {
                    setup: Setup {
                        path: at("child.toml"),
                        overrides: vec!["train.micro_batch=4".into()],
                    },
                    path: at(name),
                    overwrite,
                };
                let Err(Unwritten::Failed(reason)) = write(&export) else {
                    panic!("{name} is extended");
                };
                assert!(reason.contains("cycle"), "{reason}");
            }
        }
        assert_eq!(std::fs::read_to_string(at("base.toml")).unwrap(), base);
        assert_eq!(
            listed(folder.path()),
            ["base.toml", "child.toml", "link.toml"]
        );
    }

    /// A failed write leaves nothing behind. A replaced file keeps everything except its text.
    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut export = Export {
            setup: Setup {
                path: "small-native".into(),
                overrides: vec!["train.micro_batch=4".into()],
            },
            path: at("folder.toml"),
            overwrite: false,
        };
        std::fs::create_dir(at("folder.toml")).unwrap();
        assert_eq!(write(&export), Err(Unwritten::Exists));
        export.overwrite = true;
        assert!(matches!(write(&export), Err(Unwritten::Failed(_))));
        assert_eq!(listed(folder.path()), ["folder.toml"]);
        // A file that only its owner can read, behind a link.
        std::fs::write(at("real.toml"), "").unwrap();
        let own = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(at("real.toml"), own).unwrap();
        std::os::unix::fs::symlink("real.toml", at("link.toml")).unwrap();
        export.path = at("link.toml");
        write(&export).unwrap();
        assert!(at("link.toml").is_symlink());
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode("real.toml"), 0o600);
        let replaced = scenario::load(&at("real.toml"), &[]).unwrap();
        assert_eq!(replaced.train.micro_batch, 4);
        // A new file gets the usual permissions.
        std::fs::write(at("any"), "").unwrap();
        export.path = at("new.toml");
        export.overwrite = false;
        write(&export).unwrap();
        assert_eq!(mode("new.toml"), mode("any"));
        assert_eq!(
            listed(folder.path()),
            ["any", "folder.toml", "link.toml", "new.toml", "real.toml"]
        );
    }
}
