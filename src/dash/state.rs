//! The state between sessions: a small file in the user's state folder.

use serde::{Deserialize, Serialize};
use shardlab_reports::files;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the file. A file of another version is neither read nor changed.
const FORMAT: u32 = 1;

/// Kept state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Saved {
    /// Name of the theme.
    pub theme: Option<String>,
    /// Whether the mouse is reported.
    pub mouse: bool,
    /// Selected scenario, by [`Source::key`](super::scenarios::Source).
    pub scenario: Option<String>,
    /// Changes by [`Source::key`](super::scenarios::Source), then by option. A name without a path
    /// belongs to a shipped scenario. In files from old versions, a name may not identify a file.
    pub overrides: BTreeMap<String, BTreeMap<String, String>>,
    /// Filter of the scenario list.
    pub filter: String,
    /// Whether scenarios for tests are listed.
    pub with_tests: bool,
    /// Index of the column by which the sweep is sorted.
    pub sweep_sort: usize,
    /// Whether the sweep's order is reversed.
    pub sweep_reversed: bool,
    /// Axes added to the sweep.
    pub axes: Vec<String>,
    /// Whether the critical path is shown.
    pub critical: bool,
}

impl Default for Saved {
    fn default() -> Self {
        Self {
            theme: None,
            mouse: true,
            scenario: None,
            overrides: BTreeMap::new(),
            filter: String::new(),
            with_tests: false,
            sweep_sort: 0,
            sweep_reversed: false,
            axes: Vec::new(),
            critical: false,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    format: u32,
    state: Saved,
}

/// Returns the path of the file: `$XDG_STATE_HOME/shardlab/dash.json`, or the same under
/// `~/.local/state`.
#[must_use]
pub fn path(var: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let set = |name| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    // The XDG specification declares relative paths invalid.
    let base = set("XDG_STATE_HOME")
        .filter(|p| p.is_absolute())
        .or_else(|| set("HOME").map(|home| home.join(".local/state")))?;
    Some(base.join("shardlab/dash.json"))
}

/// Reads the file. A missing or damaged file, or one of another version, counts as empty, because
/// it contains nothing important.
#[must_use]
pub fn read(path: &Path) -> Saved {
    std::fs::read_to_string(path)
        .ok()
        .and_then(|text| serde_json::from_str::<File>(&text).ok())
        .filter(|f| f.format == FORMAT)
        .map(|f| f.state)
        .unwrap_or_default()
}

/// Writes the file, completely or not at all.
///
/// # Errors
/// Fails if the folder or the file cannot be written.
pub fn write(path: &Path, state: &Saved) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let file = File {
        format: FORMAT,
        state: state.clone(),
    };
    let text = serde_json::to_string_pretty(&file)?;
    files::write(path, |to| to.write_all(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_damage_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b/dash.json");
        assert_eq!(read(&file), Saved::default());
        let mut saved = Saved {
            theme: Some("safe".into()),
            mouse: false,
            ..Saved::default()
        };
        let changes = BTreeMap::from([("fsdp.policy".to_owned(), "fsdp2".to_owned())]);
        saved.overrides.insert("llama-tiny".into(), changes);
        write(&file, &saved).unwrap();
        assert_eq!(read(&file), saved);
        assert_eq!(
            std::fs::read_dir(file.parent().unwrap()).unwrap().count(),
            1
        );
        for damage in ["", "{", r#"{"format": 2, "state": {}}"#] {
            std::fs::write(&file, damage).unwrap();
            assert_eq!(read(&file), Saved::default(), "{damage}");
        }
        std::fs::write(
            &file,
            r#"{"format": 1, "state": {"theme": "mono", "new": 1}}"#,
        )
        .unwrap();
        assert_eq!(read(&file).theme.as_deref(), Some("mono"));
    }

    #[test]
    fn the_place_follows_the_specification() {
        let at = |vars: &[(&str, &str)]| {
            path(|name| {
                vars.iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, v)| (*v).to_owned())
            })
        };
        assert_eq!(
            at(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]),
            Some("/s/shardlab/dash.json".into())
        );
        assert_eq!(
            at(&[("XDG_STATE_HOME", "relative"), ("HOME", "/h")]),
            Some("/h/.local/state/shardlab/dash.json".into())
        );
        assert_eq!(at(&[]), None);
    }
}
