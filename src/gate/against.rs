//! Comparison of old and new: the baseline comes from another binary or revision, in the same call.
//! For a revision of shardlab itself, its binary is built. For a revision of any other repository,
//! the current binary reads the scenarios of that revision.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Reason why the old side is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgainstError {
    /// A program could not be started.
    #[error("cannot start {program}: {error}")]
    Start {
        /// Program.
        program: String,
        /// Reason.
        error: std::io::Error,
    },
    /// A program failed.
    #[error("{command} failed ({status}){}", said(stderr))]
    Failed {
        /// Command line.
        command: String,
        /// Exit status.
        status: std::process::ExitStatus,
        /// Its stderr.
        stderr: String,
    },
    /// The folder is not in a git repository.
    #[error("{} is not in a git repository: a revision to compare with needs one", path.display())]
    Repository {
        /// Working folder.
        path: PathBuf,
    },
    /// A scenario is not a file of the repository.
    #[error(
        "{} is not a file in {}: only scenario files of this repository can be compared with a revision", path.display(), root.display()
    )]
    Outside {
        /// Path as given.
        path: PathBuf,
        /// Root folder of the repository.
        root: PathBuf,
    },
    /// The revision does not exist.
    #[error(
        "git knows no revision `{revision}`{}",
        if *.shallow { "; this clone is shallow: fetch more of it (actions/checkout: fetch-depth: 0)" } else { "" }
    )]
    Revision {
        /// Revision as requested.
        revision: String,
        /// Whether the clone is shallow.
        shallow: bool,
    },
    /// A folder could not be created, or a file could not be copied.
    #[error("{}: {error}", path.display())]
    Folder {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// A program printed output that could not be understood.
    #[error("{command}: {message}")]
    Output {
        /// Command line.
        command: String,
        /// Reason.
        message: String,
    },
}

impl AgainstError {
    /// Returns whether the user's input is the cause, rather than the old side.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(
            self,
            Self::Revision { .. } | Self::Repository { .. } | Self::Outside { .. }
        )
    }
}

/// Returns the last lines of standard error output.
fn said(stderr: &str) -> String {
    const LINES: usize = 12;
    let lines: Vec<&str> = stderr.trim_end().lines().collect();
    let from = lines.len().saturating_sub(LINES);
    lines[from..].iter().fold(String::new(), |mut out, line| {
        out.push_str("\n  ");
        out.push_str(line);
        out
    })
}

/// Runs a command to completion and returns its standard output.
fn output(command: &mut Command) -> Result<String, AgainstError> {
    output_of(command, &[])
}

/// Runs a command with `input` on its standard input and returns its standard output.
fn output_of(command: &mut Command, input: &[u8]) -> Result<String, AgainstError> {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|w| w.to_string_lossy().into_owned())
        .collect();
    let out = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Measurements of the old side are not the user's runs and must not be saved.
        .env("SHARDLAB_STORE", "off")
        .spawn()
        .and_then(|mut child| {
            let stdin = child.stdin.take();
            // If the command exits without reading its input, its own error explains why.
            let _ = stdin.map(|mut stdin| stdin.write_all(input));
            child.wait_with_output()
        })
        .map_err(|error| AgainstError::Start {
            program: words[0].clone(),
            error,
        })?;
    if !out.status.success() {
        return Err(AgainstError::Failed {
            command: words.join(" "),
            status: out.status,
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// A folder that is removed on drop.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a folder in the system's temporary folder.
    ///
    /// # Errors
    /// Fails if the folder cannot be created.
    pub fn new(name: &str) -> Result<Self, AgainstError> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        loop {
            let n = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("shardlab-{name}-{}-{n}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                // The folder was left by an earlier process with this number, or planted by someone
                // else, so it is never used.
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(AgainstError::Folder { path, error }),
            }
        }
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A `shardlab` binary.
#[derive(Clone, Debug)]
pub struct Binary(pub PathBuf);

impl Binary {
    /// Checks that the program is a shardlab binary with a `gate` command.
    ///
    /// # Errors
    /// Fails if the program cannot be started or has no such command.
    pub fn knows_gates(&self) -> Result<(), AgainstError> {
        output(Command::new(&self.0).args(["gate", "--help"])).map(|_| ())
    }

    /// Writes the binary's baseline of a scenario into a folder. Returns the reason if there is
    /// none because the binary does not support the scenario or one of its options yet.
    ///
    /// # Errors
    /// Fails if the binary cannot be started, or the run fails.
    pub fn bless(
        &self,
        scenario: &Path,
        set: &[String],
        exec: bool,
        folder: &Path,
    ) -> Result<Result<(), String>, AgainstError> {
        let mut command = Command::new(&self.0);
        command.args(["gate", "--bless", "--baseline"]).arg(folder);
        if !exec {
            command.arg("--no-exec");
        }
        command.args(set.iter().flat_map(|s| ["--set", s.as_str()]));
        command.arg("--").arg(scenario);
        match output(&mut command) {
            Ok(_) => Ok(Ok(())),
            Err(AgainstError::Failed { status, stderr, .. }) if status.code() == Some(2) => {
                let first = stderr.lines().find(|l| !l.trim().is_empty());
                let reason = first.unwrap_or("it says nothing").trim();
                let reason = reason.strip_prefix("error: ").unwrap_or(reason);
                Ok(Err(reason.to_owned()))
            }
            Err(e) => Err(e),
        }
    }

    /// Returns the median step time of one training run, milliseconds.
    ///
    /// # Errors
    /// Fails if the binary cannot be started, the run fails, or it reports no time.
    pub fn step_ms<S: AsRef<OsStr>>(
        &self,
        scenario: &Path,
        set: &[String],
        more: &[S],
    ) -> Result<f64, AgainstError> {
        let mut command = Command::new(&self.0);
        command.args(["exec", "--json"]);
        command.args(set.iter().flat_map(|s| ["--set", s.as_str()]));
        command.args(more).arg("--").arg(scenario);
        let text = output(&mut command)?;
        let bad = |message: &str| AgainstError::Output {
            command: format!("{} exec {}", self.0.display(), scenario.display()),
            message: message.to_owned(),
        };
        let run: serde_json::Value =
            serde_json::from_str(text.trim()).map_err(|e| bad(&e.to_string()))?;
        run["step_ms"]["median"]
            .as_f64()
            .filter(|ms| ms.is_finite() && *ms > 0.0)
            .ok_or_else(|| bad("it reports no step time; at least two steps are needed"))
    }
}

/// A revision of a git repository.
#[derive(Debug)]
pub struct Commit {
    /// Revision as requested.
    pub revision: String,
    root: PathBuf,
    id: String,
}

impl Commit {
    /// Finds a revision in the repository that contains `folder`.
    ///
    /// # Errors
    /// Fails if git cannot be started, if there is no repository, or if the revision does not
    /// exist.
    pub fn find(folder: &Path, revision: &str) -> Result<Self, AgainstError> {
        let root = git(folder, &["rev-parse", "--show-toplevel"]).map_err(|e| match e {
            AgainstError::Failed { .. } => AgainstError::Repository {
                path: folder.canonicalize().unwrap_or_else(|_| folder.to_owned()),
            },
            other => other,
        })?;
        let root = PathBuf::from(root.trim_end());
        // The revision is resolved first, so that a name that starts with a dash is not mistaken
        // for an option later.
        let commit = format!("{revision}^{{commit}}");
        let verify = [
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &commit,
        ];
        let id = git(&root, &verify).map_err(|e| match e {
            AgainstError::Failed { .. } => {
                let shallow = git(&root, &["rev-parse", "--is-shallow-repository"]);
                AgainstError::Revision {
                    revision: revision.to_owned(),
                    shallow: shallow.is_ok_and(|s| s.trim() == "true"),
                }
            }
            other => other,
        })?;
        Ok(Self {
            revision: revision.to_owned(),
            root,
            id: id.trim().to_owned(),
        })
    }

    /// Returns whether it is a revision of shardlab's own repository.
    #[must_use]
    pub fn is_shardlab(&self) -> bool {
        let manifest = git(
            &self.root,
            &["cat-file", "blob", &format!("{}:Cargo.toml", self.id)],
        );
        manifest.is_ok_and(|text| text.lines().any(|l| l.trim() == "name = \"shardlab\""))
    }

    /// Writes the files of the revision into a folder that is removed when the tree is dropped.
    /// Omits files that are too large to be a scenario, a model configuration or a hardware
    /// profile.
    ///
    /// # Errors
    /// Fails if git fails.
    pub fn files(self) -> Result<Tree, AgainstError> {
        const LARGEST: u64 = 4 << 20;
        let scratch = Scratch::new("gate-revision")?;
        let listed = git(
            &self.root,
            &["ls-tree", "-r", "-l", "-z", "--full-tree", &self.id],
        )?;
        let small = |entry: &&str| {
            // MODE blob ID SIZE, a tab, and the path.
            let (about, _) = entry.split_once('\t')?;
            let size = about.split_whitespace().nth(3)?;
            (size.parse::<u64>().ok()? <= LARGEST).then_some(())
        };
        let paths = listed.split('\0').filter(|e| small(e).is_some());
        let paths = paths.filter_map(|e| Some(e.split_once('\t')?.1));
        let paths: String = paths.map(|p| format!("{p}\0")).collect();
        let tree = scratch.path().join("tree");
        std::fs::create_dir(&tree).map_err(|error| AgainstError::Folder {
            path: tree.clone(),
            error,
        })?;
        // A separate index keeps the repository's index and work tree unchanged.
        let index = scratch.path().join("index");
        let with_index = |args: &[&str], input: &[u8]| {
            let mut command = Command::new("git");
            command.arg("-C").arg(&self.root).args(args);
            command.env("GIT_INDEX_FILE", &index);
            output_of(&mut command, input)
        };
        with_index(&["read-tree", &self.id], &[])?;
        let prefix = format!("--prefix={}/", tree.display());
        let checkout = [
            "checkout-index",
            "--force",
            "--quiet",
            "-z",
            "--stdin",
            &prefix,
        ];
        with_index(&checkout, paths.as_bytes())?;
        Ok(Tree {
            commit: self,
            tree,
            _scratch: scratch,
        })
    }
}

/// The files of a revision.
#[derive(Debug)]
pub struct Tree {
    commit: Commit,
    tree: PathBuf,
    _scratch: Scratch,
}

impl Tree {
    /// Returns the name of the revision.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.commit.revision
    }

    /// Returns the path of the revision's version of a file; `None` if it has none.
    ///
    /// # Errors
    /// Fails if the path is not a file in the repository.
    pub fn version_of(&self, path: &Path) -> Result<Option<PathBuf>, AgainstError> {
        let root = &self.commit.root;
        let outside = || AgainstError::Outside {
            path: path.to_owned(),
            root: root.clone(),
        };
        let (file, root) = (path.canonicalize(), root.canonicalize());
        let (Ok(file), Ok(root)) = (file, root) else {
            return Err(outside());
        };
        let inside = file.strip_prefix(&root).map_err(|_| outside())?;
        Ok(Some(self.tree.join(inside)).filter(|p| p.exists()))
    }
}

/// Runs git in a folder and returns its standard output.
fn git<S: AsRef<OsStr>>(folder: &Path, args: &[S]) -> Result<String, AgainstError> {
    output(Command::new("git").arg("-C").arg(folder).args(args))
}

/// A revision of shardlab's repository, checked out and built separately.
#[derive(Debug)]
pub struct Revision {
    binary: PathBuf,
    tree: PathBuf,
    repository: PathBuf,
    _scratch: Scratch,
}

impl Revision {
    /// Builds a revision with `cargo build --release` (or the program in `CARGO`) in a separate
    /// work tree, which is removed when the revision is dropped. The build output stays in
    /// `target/gate-old`, so that the next call is fast.
    ///
    /// # Errors
    /// Fails if the revision cannot be checked out or does not build.
    pub fn build(commit: Commit) -> Result<Self, AgainstError> {
        let Commit { root, id, .. } = commit;
        let scratch = Scratch::new("gate-revision")?;
        let tree = scratch.path().join("tree");
        let add = ["worktree", "add", "--detach", "--force"].map(OsStr::new);
        git(
            &root,
            &[&add[..], &[tree.as_os_str(), OsStr::new(&id)]].concat(),
        )?;
        let target = root.join("target").join("gate-old");
        let name = format!("shardlab{}", std::env::consts::EXE_SUFFIX);
        let made = Self {
            binary: scratch.path().join(&name),
            tree,
            repository: root,
            _scratch: scratch,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .current_dir(&made.tree)
            .args(["build", "--release", "--quiet", "--target-dir"])
            .arg(&target);
        output(&mut command)?;
        // Another revision would be built in the same place.
        let built = target.join("release").join(&name);
        std::fs::copy(&built, &made.binary)
            .map_err(|error| AgainstError::Folder { path: built, error })?;
        Ok(made)
    }

    /// Returns the built binary.
    #[must_use]
    pub fn binary(&self) -> Binary {
        Binary(self.binary.clone())
    }
}

impl Drop for Revision {
    fn drop(&mut self) {
        let _ = Command::new("git")
            .arg("-C")
            .arg(&self.repository)
            .args(["worktree", "remove", "--force"])
            .arg(&self.tree)
            .output();
    }
}
