//! Folders that may contain NVIDIA's libraries.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who named a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The command line.
    Flag,
    /// An environment variable.
    Environment,
    /// A Python installation with `nvidia` packages.
    Pip,
    /// Usual installation paths.
    System,
}

impl Origin {
    /// All sources, in search order.
    pub const ALL: [Self; 4] = [Self::Flag, Self::Environment, Self::Pip, Self::System];

    /// Returns the name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Flag => "--library-path",
            Self::Environment => "SHARDLAB_NVIDIA_LIBS, LD_LIBRARY_PATH, CUDA_HOME, CUDA_PATH",
            Self::Pip => "pip",
            Self::System => "system",
        }
    }

    /// Returns the text for messages if the source has no folder.
    pub(super) const fn nothing(self) -> &'static str {
        match self {
            Self::Flag => "not given",
            Self::Environment => "not set, or its folders do not exist",
            Self::Pip => {
                "no nvidia packages next to shardlab, in VIRTUAL_ENV, CONDA_PREFIX or the python3 on the PATH"
            }
            Self::System => "no CUDA folder",
        }
    }
}

/// A folder and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    /// Path.
    pub path: PathBuf,
    /// Source of the folder.
    pub origin: Origin,
}

/// Inputs of the search for libraries from the process's environment.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Environment variables.
    pub variables: Vec<(String, OsString)>,
    /// Whether `python3` may be started to ask for its packages, if no folder contains them.
    pub ask_python: bool,
    /// Path of the running program. The packages of a virtual environment are located relative to
    /// the programs in its `bin`.
    pub program: Option<PathBuf>,
    /// Usual installation paths.
    pub system: Vec<PathBuf>,
}

/// Names of the variables that are read.
const VARIABLES: [&str; 7] = [
    "SHARDLAB_NVIDIA_LIBS",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PATH",
];

impl Surroundings {
    /// Reads the surroundings of this process.
    #[must_use]
    pub(crate) fn of_process() -> Self {
        Self {
            variables: VARIABLES
                .iter()
                .filter_map(|&n| Some((n.to_owned(), std::env::var_os(n)?)))
                .collect(),
            ask_python: true,
            // Resolves the links that pipx and similar tools put in a folder of PATH.
            program: std::env::current_exe().and_then(|p| p.canonicalize()).ok(),
            system: [
                "/usr/local/cuda/lib64",
                "/usr/local/cuda-13/lib64",
                "/usr/local/cuda/extras/CUPTI/lib64",
                "/opt/cuda/lib64",
                "/usr/local/nvidia/lib64",
                "/usr/lib/x86_64-linux-gnu",
                "/usr/lib64",
                "/usr/lib/wsl/lib",
            ]
            .map(PathBuf::from)
            .into(),
        }
    }

    fn get(&self, name: &str) -> Option<&OsString> {
        let found = self.variables.iter().find(|v| v.0 == name)?;
        Some(&found.1).filter(|v| !v.is_empty())
    }

    fn paths(&self, name: &str) -> Vec<PathBuf> {
        self.get(name)
            .map(|v| std::env::split_paths(v).collect())
            .unwrap_or_default()
    }
}

/// Returns existing folders in search order, without duplicates. `extra` may contain folders with
/// libraries, roots of CUDA toolkits, and folders with pip's `nvidia` packages.
#[must_use]
pub fn folders(around: &Surroundings, extra: &[PathBuf]) -> Vec<Folder> {
    let mut all: Vec<Folder> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut add = |origin, paths: Vec<PathBuf>| {
        for path in paths {
            if path.is_dir() && seen.insert(path.clone()) {
                all.push(Folder { path, origin });
            }
        }
    };
    add(Origin::Flag, extra.iter().flat_map(|p| within(p)).collect());
    let environment = [
        "SHARDLAB_NVIDIA_LIBS",
        "LD_LIBRARY_PATH",
        "CUDA_HOME",
        "CUDA_PATH",
    ];
    let named = environment.iter().flat_map(|v| around.paths(v));
    add(
        Origin::Environment,
        named.flat_map(|p| within(&p)).collect(),
    );
    add(Origin::Pip, pip(around));
    add(Origin::System, around.system.clone());
    all
}

/// Returns a folder, its library folders if it is the root of a toolkit, and those of the packages
/// in it.
fn within(path: &Path) -> Vec<PathBuf> {
    let mut all = vec![path.to_owned()];
    all.extend(["lib64", "lib", "extras/CUPTI/lib64"].map(|d| path.join(d)));
    all.extend(packages(path));
    all.extend(packages(&path.join("nvidia")));
    all
}

/// Returns `*/lib` in a folder of packages, sorted by name.
fn packages(nvidia: &Path) -> Vec<PathBuf> {
    let is_packages = nvidia.file_name().is_some_and(|n| n == "nvidia");
    let Ok(entries) = std::fs::read_dir(nvidia) else {
        return Vec::new();
    };
    if !is_packages {
        return Vec::new();
    }
    let mut all: Vec<PathBuf> = entries
        .flatten()
        .map(|e| e.path().join("lib"))
        .filter(|p| p.is_dir())
        .collect();
    all.sort();
    all
}

/// Returns folders of `nvidia` packages: those of the environment in which the program is
/// installed, those of active environments, and then those of the `python3` in PATH.
fn pip(around: &Surroundings) -> Vec<PathBuf> {
    let bin = around.program.as_deref().and_then(Path::parent);
    let bin = bin.filter(|d| d.file_name().is_some_and(|n| n == "bin"));
    let own = bin.and_then(Path::parent).map(Path::to_owned);
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"];
    let active = active.iter().filter_map(|v| around.get(v));
    let mut prefixes: Vec<PathBuf> = own.into_iter().chain(active.map(PathBuf::from)).collect();
    let python = around
        .paths("PATH")
        .into_iter()
        .map(|d| d.join("python3"))
        .find(|p| p.is_file());
    if let Some(python) = &python {
        // An environment's python3 is a link. Its packages are next to the link, and the system's
        // are next to the target.
        let real = python.canonicalize().ok();
        let bins = [python.parent(), real.as_deref().and_then(Path::parent)];
        prefixes.extend(
            bins.into_iter()
                .flatten()
                .filter_map(Path::parent)
                .map(Path::to_owned),
        );
    }
    let found: Vec<PathBuf> = prefixes
        .iter()
        .flat_map(|p| sites(p))
        .flat_map(|s| packages(&s.join("nvidia")))
        .collect();
    match python {
        Some(python) if found.is_empty() && around.ask_python => asked(&python),
        _ => found,
    }
}

/// Returns the package folders of a Python installation.
fn sites(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else {
        return Vec::new();
    };
    let mut versions: Vec<PathBuf> = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("python3"))
        .map(|e| e.path())
        .collect();
    versions.sort();
    versions
        .iter()
        .flat_map(|v| ["site-packages", "dist-packages"].map(|d| v.join(d)))
        .collect()
}

/// Asks Python itself, because a launcher script hides its location.
fn asked(python: &Path) -> Vec<PathBuf> {
    const CODE: &str = "import sys; print(*[p for p in sys.path if p], sep='\\n')";
    let Ok(output) = Command::new(python).args(["-c", CODE]).output() else {
        return Vec::new();
    };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .flat_map(|p| packages(&Path::new(p).join("nvidia")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::create_dir_all;

    fn around(variables: &[(&str, &Path)], system: &[PathBuf]) -> Surroundings {
        Surroundings {
            variables: variables
                .iter()
                .map(|(n, v)| ((*n).to_owned(), v.as_os_str().to_owned()))
                .collect(),
            ask_python: false,
            program: None,
            system: system.to_vec(),
        }
    }

    #[test]
    fn flag_environment_packages_system_in_this_order() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let env = root.join("env");
        let site = env.join("lib/python3.12/site-packages/nvidia");
        let (cu, dnn) = (site.join("cu13/lib"), site.join("cudnn/lib"));
        let toolkit = root.join("toolkit/lib64");
        let (mine, usual) = (root.join("mine"), root.join("usual"));
        for d in [&cu, &dnn, &toolkit, &mine, &usual] {
            create_dir_all(d).unwrap();
        }
        // A package without libraries is skipped.
        create_dir_all(site.join("empty")).unwrap();
        let variables = [
            ("VIRTUAL_ENV", env.as_path()),
            ("CUDA_HOME", toolkit.parent().unwrap()),
            ("LD_LIBRARY_PATH", &root.join("gone")),
        ];
        let around = around(&variables, std::slice::from_ref(&usual));
        let found: Vec<(Origin, PathBuf)> = folders(&around, std::slice::from_ref(&mine))
            .into_iter()
            .map(|f| (f.origin, f.path))
            .collect();
        assert_eq!(
            found,
            [
                (Origin::Flag, mine),
                (Origin::Environment, root.join("toolkit")),
                (Origin::Environment, toolkit),
                (Origin::Pip, cu.clone()),
                (Origin::Pip, dnn.clone()),
                (Origin::System, usual),
            ]
        );
        // The folder of the packages can also be named directly.
        let named = folders(&Surroundings::default(), std::slice::from_ref(&site));
        let named: Vec<PathBuf> = named.into_iter().map(|f| f.path).collect();
        assert_eq!(named, [site, cu, dnn]);
    }

    #[cfg(unix)]
    #[test]
    fn packages_are_next_to_the_link_to_python_or_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let lib = |prefix: &str| {
            let p = root
                .join(prefix)
                .join("lib/python3.12/site-packages/nvidia/x/lib");
            create_dir_all(&p).unwrap();
            p
        };
        let (own, base) = (lib("venv"), lib("base"));
        for d in ["venv/bin", "base/bin"] {
            create_dir_all(root.join(d)).unwrap();
        }
        let real = root.join("base/bin/python3");
        std::fs::write(&real, b"").unwrap();
        std::os::unix::fs::symlink(&real, root.join("venv/bin/python3")).unwrap();
        let path = root.join("venv/bin");
        let found = folders(&around(&[("PATH", &path)], &[]), &[]);
        let found: Vec<PathBuf> = found.into_iter().map(|f| f.path).collect();
        assert_eq!(found, [own, base.canonicalize().unwrap()]);
    }

    #[test]
    fn the_environment_that_the_program_is_installed_in_comes_before_the_active_one() {
        let dir = tempfile::tempdir().unwrap();
        let [own, active] = ["own", "active"].map(|prefix| dir.path().join(prefix));
        let lib = |prefix: &Path| prefix.join("lib/python3.12/site-packages/nvidia/x/lib");
        for prefix in [&own, &active] {
            create_dir_all(lib(prefix)).unwrap();
        }
        let found = |program: &str| -> Vec<PathBuf> {
            let around = Surroundings {
                program: Some(own.join(program)),
                ..around(&[("VIRTUAL_ENV", &active)], &[])
            };
            folders(&around, &[]).into_iter().map(|f| f.path).collect()
        };
        assert_eq!(found("bin/shardlab"), [lib(&own), lib(&active)]);
        // A build folder is not an environment.
        assert_eq!(found("release/shardlab"), [lib(&active)]);
    }
}
