//! `extends` in a profile: keys that the file does not set come from another profile.

use super::source::{ProfileError, read};
use serde::Deserialize;
use shardlab_plan::hardware;
use shardlab_plan::scenario::Position;
use std::path::{Path, PathBuf};
use toml::{Spanned, Table, Value};

/// The key.
const KEY: &str = "extends";
/// The section that describes the machine of the measurements.
const MEASURED: &str = "measured";
/// Maximum number of profiles in a chain of `extends`.
const MAX_CHAIN: usize = 8;

/// Returns the profile in a text as one table, including the keys of the profiles that it extends.
pub(super) fn whole(path: &str, text: &str) -> Result<Table, ProfileError> {
    resolve(path, text, &mut vec![identity(path)])
}

/// Returns whether a text extends another profile.
pub(super) fn extends(path: &str, text: &str) -> Result<bool, ProfileError> {
    Ok(text.contains(KEY) && base(path, text)?.is_some())
}

/// Returns the profile that a text extends, with the position of the key.
fn base(path: &str, text: &str) -> Result<Option<Spanned<String>>, ProfileError> {
    #[derive(Deserialize)]
    struct Head {
        extends: Option<Spanned<String>>,
    }
    let head: Head = toml::from_str(text).map_err(|e| ProfileError::parse(path, &e))?;
    Ok(head.extends)
}

fn resolve(path: &str, text: &str, below: &mut Vec<PathBuf>) -> Result<Table, ProfileError> {
    hardware::check(text).map_err(|e| ProfileError::format(path, e))?;
    let mut own: Table = toml::from_str(text).map_err(|e| ProfileError::parse(path, &e))?;
    // Profiles are long and loaded by every command, so most of them are not parsed here.
    let extended = match text.contains(KEY) {
        true => base(path, text)?,
        false => None,
    };
    let Some(base) = extended else {
        return Ok(own);
    };
    own.remove(KEY);
    let fault = |message: String| {
        let Position { line, column } = Position::of(text, base.span().start);
        ProfileError::Invalid {
            path: format!("{path}:{line}:{column}"),
            message,
        }
    };
    let name = base.get_ref();
    let place = relative_to(path, name);
    let id = identity(&place);
    if below.contains(&id) {
        return Err(fault(format!(
            "{KEY} = \"{name}\": profiles extend each other in a cycle"
        )));
    }
    if below.len() == MAX_CHAIN {
        return Err(fault(format!(
            "{KEY} = \"{name}\": more than {MAX_CHAIN} profiles extend one another"
        )));
    }
    below.push(id);
    let under = match read(&place) {
        Err(ProfileError::NotFound { .. }) => {
            return Err(fault(format!(
                "{KEY} = \"{name}\": {}",
                ProfileError::NotFound { name: place }
            )));
        }
        under => under?,
    };
    let mut all = resolve(&place, &under, below)?;
    // A changed number was not measured, so the extending profile has to state its own
    // `[measured]`.
    all.remove(MEASURED);
    lay_over(&mut all, own);
    Ok(all)
}

/// Returns a shipped name unchanged, and other names as paths relative to the file that contains
/// them.
fn relative_to(path: &str, name: &str) -> String {
    if super::shipped().contains(&name) {
        return name.to_owned();
    }
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    folder.join(name).to_string_lossy().into_owned()
}

/// Returns a value that identifies a profile, however its path is written.
fn identity(place: &str) -> PathBuf {
    if super::shipped().contains(&place) {
        return place.into();
    }
    std::fs::canonicalize(place).unwrap_or_else(|_| place.into())
}

/// Merges sections key by key. Everything else, including arrays of tables, is replaced as a whole.
fn lay_over(under: &mut Table, over: Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Table(under)), Value::Table(over)) => lay_over(under, over),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::hardware::{load, text};
    use std::path::PathBuf;

    /// Writes files into a new folder, and returns the profile of the first one or the error.
    fn of(test: &str, files: &[(&str, &str)]) -> Result<crate::Profile, String> {
        let folder: PathBuf = std::env::temp_dir().join(format!("{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let first = folder.join(files[0].0);
        let first = first.to_str().unwrap();
        let loaded = load(first).map_err(|e| e.to_string());
        // The text of the file is not the complete profile.
        let said = text(first).unwrap_err().to_string();
        assert!(
            loaded.is_err() || said.contains("it extends another profile"),
            "{said}"
        );
        let prefix = format!("{}{}", folder.display(), std::path::MAIN_SEPARATOR);
        std::fs::remove_dir_all(&folder).unwrap();
        loaded.map_err(|e| e.replace(&prefix, ""))
    }

    #[test]
    fn whether_it_was_measured_is_not_inherited() {
        let base = ("base.toml", "extends = \"h200-nvlink\"\nname = \"base\"\n");
        let plain = of("unmeasured", &[base]).unwrap();
        assert_eq!(plain.measured, None);
        let restated = "extends = \"h200-nvlink\"\n[measured]\non = \"8 x H200\"\ngpus = 8\n";
        let own = of("restated", &[("own.toml", restated)]).unwrap();
        assert_eq!(own.measured.unwrap().gpus, 8);
        let bad = restated.replace("gpus = 8", "gpus = 0");
        assert!(
            of("none", &[("own.toml", &bad)])
                .unwrap_err()
                .contains("measured.gpus = 0")
        );
    }

    #[test]
    fn what_a_profile_does_not_say_is_as_below() {
        let base = load("h200-nvlink").unwrap();
        let table = "[[collective]]\nsource = \"s\"\nkind = \"all_gather\"\nranks = 4\nrows = [[1024, 5.0]]\n";
        let top = format!("extends = \"middle.toml\"\nname = \"top\"\n{table}");
        let middle = "extends = \"h200-nvlink\"\nabout = \"ours\"\nconv = []\n[network]\nnics_per_node = 4\n[host.work]\nhook_us = 7\n";
        let p = of("extends", &[("top.toml", &top), ("middle.toml", middle)]).unwrap();
        assert_eq!((p.name.as_str(), p.about.as_str()), ("top", "ours"));
        assert_eq!((p.network.nics_per_node, p.host.work.hook_us), (4, 7.0));
        assert_eq!(p.network.nic_gbps, base.network.nic_gbps);
        assert_eq!(p.host.work.step_us, base.host.work.step_us);
        // Each array of tables is replaced as a whole.
        assert_eq!((p.collective.len(), p.conv.len()), (1, 0));
        assert_eq!(p.gemm, base.gemm);
    }

    #[test]
    fn what_cannot_be_extended_is_said_with_its_place() {
        let says = |files: &[(&str, &str)], wanted: &str| {
            let said = of("not-extended", files).unwrap_err();
            assert!(said.contains(wanted), "{said}");
        };
        says(
            &[("a.toml", "# own\nextends = \"a.toml\"\n")],
            "a.toml:2:11: extends = \"a.toml\": profiles extend each other in a cycle",
        );
        let [a, b] = ["b", "a"].map(|other| format!("extends = \"{other}.toml\"\n"));
        says(
            &[("a.toml", &a), ("b.toml", &b)],
            "b.toml:1:11: extends = \"a.toml\": profiles extend each other",
        );
        says(
            &[("a.toml", "extends = \"h300\"\n")],
            "the shipped profiles are a100-40",
        );
        says(
            &[("a.toml", "extends = 3\n")],
            "a.toml:1:11: extends = 3: must be a string",
        );
        says(
            &[("a.toml", "extends = \"h100-80\"\n[network]\nnics = 2\n")],
            "a.toml:3:1: unknown key `nics` in [network]",
        );
        says(
            &[("a.toml", "extends = \"h100-80\"\n[network]\nnic_gbps = 0\n")],
            "a.toml:3:12: network.nic_gbps = 0",
        );
        let chain: Vec<(String, String)> = (0..10)
            .map(|i| {
                (
                    format!("{i}.toml"),
                    format!("extends = \"{}.toml\"\n", i + 1),
                )
            })
            .collect();
        let chain: Vec<(&str, &str)> = chain
            .iter()
            .map(|(n, t)| (n.as_str(), t.as_str()))
            .collect();
        says(&chain, "more than 8 profiles extend one another");
    }
}
