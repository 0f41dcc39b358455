//! Facts about the machine and the checkout that a run comes from, collected without starting other
//! programs.

use std::fs;
use std::path::{Path, PathBuf};

/// Facts about where a run was made. A prediction is the same on every machine.
pub(crate) const MACHINE: [&str; 8] = [
    "os",
    "kernel",
    "host",
    "cpu",
    "cpus",
    "memory_bytes",
    "nvidia_driver",
    "git_revision",
];

/// Returns facts by name: `shardlab`, `os`, `kernel`, `host`, `cpu`, `cpus`, `memory_bytes`,
/// `nvidia_driver`, `git_revision`. Unknown facts are left out.
#[must_use]
pub fn facts() -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut fact = |name: &str, value: Option<String>| {
        if let Some(value) = value.filter(|v| !v.is_empty()) {
            all.push((name.to_owned(), value));
        }
    };
    fact("shardlab", Some(env!("CARGO_PKG_VERSION").to_owned()));
    let os = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    fact("os", Some(os));
    fact("kernel", line("/proc/sys/kernel/osrelease"));
    fact("host", line("/proc/sys/kernel/hostname"));
    fact("cpu", value("/proc/cpuinfo", "model name"));
    let cpus = std::thread::available_parallelism().ok();
    fact("cpus", cpus.map(|n| n.to_string()));
    fact("memory_bytes", memory());
    fact("nvidia_driver", driver());
    let here = std::env::current_dir().ok();
    fact("git_revision", here.and_then(|dir| git_revision(&dir)));
    all
}

/// Returns the first line of a file.
fn line(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

/// Returns the value of the first line `NAME : VALUE` in a file.
fn value(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

fn memory() -> Option<String> {
    let text = value("/proc/meminfo", "MemTotal")?;
    let kib: u64 = text.strip_suffix("kB")?.trim().parse().ok()?;
    Some((kib * 1024).to_string())
}

/// Returns the version in `NVRM version: NVIDIA UNIX … Kernel Module  580.95.05  …`.
fn driver() -> Option<String> {
    let text = line("/proc/driver/nvidia/version")?;
    text.split_whitespace()
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()))
        .map(str::to_owned)
}

/// Returns the checked-out commit of the repository that contains a folder. Uncommitted changes are
/// not detected.
fn git_revision(dir: &Path) -> Option<String> {
    let dot_git = dir
        .ancestors()
        .map(|d| d.join(".git"))
        .find(|g| g.exists())?;
    let git = if dot_git.is_file() {
        let text = line(&dot_git)?;
        dot_git.parent()?.join(text.strip_prefix("gitdir:")?.trim())
    } else {
        dot_git
    };
    let head = line(git.join("HEAD"))?;
    let Some(name) = head.strip_prefix("ref:").map(str::trim) else {
        return Some(head);
    };
    // A worktree has its own HEAD. Its branches are in the common folder.
    let common: PathBuf = match line(git.join("commondir")) {
        Some(path) => git.join(path),
        None => git.clone(),
    };
    line(git.join(name))
        .or_else(|| line(common.join(name)))
        .or_else(|| packed(&common, name))
}

fn packed(git: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(git.join("packed-refs")).ok()?;
    text.lines().find_map(|line| {
        let (revision, of) = line.split_once(' ')?;
        (of == name).then(|| revision.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_are_found_in_every_kind_of_checkout() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        at("plain/.git/HEAD", "ref: refs/heads/main\n");
        at("plain/.git/refs/heads/main", "1111\n");
        at("plain/deep/down/file", "");
        assert_eq!(
            git_revision(&dir.path().join("plain/deep/down")).as_deref(),
            Some("1111")
        );
        at("detached/.git/HEAD", "2222\n");
        assert_eq!(
            git_revision(&dir.path().join("detached")).as_deref(),
            Some("2222")
        );
        at("packed/.git/HEAD", "ref: refs/heads/main\n");
        at(
            "packed/.git/packed-refs",
            "# pack-refs\n3333 refs/heads/main\n",
        );
        assert_eq!(
            git_revision(&dir.path().join("packed")).as_deref(),
            Some("3333")
        );
        at("tree/.git", "gitdir: ../plain/.git/worktrees/tree\n");
        at("plain/.git/worktrees/tree/HEAD", "ref: refs/heads/other\n");
        at("plain/.git/worktrees/tree/commondir", "../..\n");
        at("plain/.git/refs/heads/other", "4444\n");
        assert_eq!(
            git_revision(&dir.path().join("tree")).as_deref(),
            Some("4444")
        );
    }
}
