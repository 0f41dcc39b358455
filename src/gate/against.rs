//! Old against new: the baseline comes from another binary or revision, in the same call.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Why the old side cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgainstError {
    /// A program cannot be started.
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
        /// What it wrote to stderr.
        stderr: String,
    },
    /// Git has no such revision.
    #[error(
        "git knows no revision `{revision}`{}",
        if *.shallow { "; this clone is shallow: fetch more of it (actions/checkout: fetch-depth: 0)" } else { "" }
    )]
    Revision {
        /// As asked for.
        revision: String,
        /// Whether the clone lacks history.
        shallow: bool,
    },
    /// A folder for it cannot be made, or a file not copied.
    #[error("{}: {error}", path.display())]
    Folder {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// It wrote what cannot be understood.
    #[error("{command}: {message}")]
    Output {
        /// Command line.
        command: String,
        /// Reason.
        message: String,
    },
}

impl AgainstError {
    /// Whether the user's input is at fault, rather than the old side.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(self, Self::Revision { .. })
    }
}

/// The last lines of an error output.
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

/// Runs a command to its end and gives its standard output.
fn output(command: &mut Command) -> Result<String, AgainstError> {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|w| w.to_string_lossy().into_owned())
        .collect();
    let out = command
        .stdin(Stdio::null())
        // What the old side measures is no run of the user's.
        .env("SHARDLAB_STORE", "off")
        .output()
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

/// A folder that goes when it is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new folder of the system's temporary ones.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(name: &str) -> Result<Self, AgainstError> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        loop {
            let n = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("shardlab-{name}-{}-{n}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                // Left behind by a process of this number, or somebody's trap: never used.
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(AgainstError::Folder { path, error }),
            }
        }
    }

    /// Its path.
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
    /// Makes sure that it is a shardlab that knows gates.
    ///
    /// # Errors
    /// When it cannot be started, or does not.
    pub fn knows_gates(&self) -> Result<(), AgainstError> {
        output(Command::new(&self.0).args(["gate", "--help"])).map(|_| ())
    }

    /// Writes its baseline of a scenario into a folder; or why it has none, when it does not know the scenario or an option
    /// of it yet.
    ///
    /// # Errors
    /// When it cannot be started, or the run fails.
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

    /// Median step time of one training run, milliseconds.
    ///
    /// # Errors
    /// When it cannot be started, fails, or reports no time.
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
            .ok_or_else(|| bad("it reports no step time; two steps are needed at least"))
    }
}

/// A revision of this repository, checked out and built beside it.
#[derive(Debug)]
pub struct Revision {
    binary: PathBuf,
    tree: PathBuf,
    repository: PathBuf,
    _scratch: Scratch,
}

impl Revision {
    /// Builds a revision with `cargo build --release` (or what `CARGO` names) in a work tree of its own, which goes when
    /// the revision is dropped. Build output is kept in `target/gate-old`, so that the next call is quick.
    ///
    /// # Errors
    /// When git knows no such revision, or it does not build.
    pub fn build(repository: &Path, revision: &str) -> Result<Self, AgainstError> {
        let git = |args: &[&OsStr]| {
            let mut command = Command::new("git");
            command.arg("-C").arg(repository).args(args);
            output(&mut command)
        };
        // Asked first, so that a name that begins with a dash is no option below.
        let commit = git(&[
            "rev-parse".as_ref(),
            "--verify".as_ref(),
            "--quiet".as_ref(),
            "--end-of-options".as_ref(),
            format!("{revision}^{{commit}}").as_ref(),
        ])
        .map_err(|e| match e {
            AgainstError::Failed { status, .. } if status.code() == Some(1) => {
                let shallow = git(&["rev-parse".as_ref(), "--is-shallow-repository".as_ref()]);
                AgainstError::Revision {
                    revision: revision.to_owned(),
                    shallow: shallow.is_ok_and(|s| s.trim() == "true"),
                }
            }
            other => other,
        })?;
        let root = git(&["rev-parse".as_ref(), "--show-toplevel".as_ref()])?;
        let root = PathBuf::from(root.trim_end());
        let scratch = Scratch::new("gate-revision")?;
        let tree = scratch.path().join("tree");
        git(&[
            "worktree".as_ref(),
            "add".as_ref(),
            "--detach".as_ref(),
            "--force".as_ref(),
            tree.as_ref(),
            commit.trim().as_ref(),
        ])?;
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
        // Another revision would be built into the same place.
        let built = target.join("release").join(&name);
        std::fs::copy(&built, &made.binary)
            .map_err(|error| AgainstError::Folder { path: built, error })?;
        Ok(made)
    }

    /// The binary.
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
