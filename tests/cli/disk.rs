//! Files that cannot be written. With a full disk, a call ends with status 3, leaves no partial
//! files and loses no results. A wrong path is bad input, reported before anything is computed.

use crate::shardlab;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file system of 64 KiB with one free page, unmounted when dropped.
struct Small(tempfile::TempDir);

/// The file that fills it.
const FULL: &str = "full";

impl Small {
    fn mounted() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
            .arg(dir.path())
            .output();
        let mount = mount.expect("mount");
        assert!(
            mount.status.success(),
            "{}",
            String::from_utf8_lossy(&mount.stderr)
        );
        let small = Self(dir);
        fs::write(small.at(FULL), [b'x'; 60 << 10]).unwrap();
        small
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the names of the files in it.
    fn listed(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        entries.map(|e| e.unwrap().path()).collect()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

/// Returns the exit status, standard output and standard error.
fn call(args: &[&str]) -> (Option<i32>, String, String) {
    let output = shardlab(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
#[ignore = "needs root: mounts a small tmpfs"]
fn a_full_disk_leaves_no_file_and_takes_no_result_with_it() {
    let small = Small::mounted();
    let file = |name: &str| small.at(name).display().to_string();
    let (trace, store, csv, page) = (file("t.json"), file("runs"), file("s.csv"), file("r.html"));
    let points: Vec<String> = (1..=60).map(|n| n.to_string()).collect();
    let axis = format!("train.steps=[{}]", points.join(","));
    let cases: [(&[&str], &str); 7] = [
        (&["sim", "small-native", "--trace", &trace], "step "),
        (&["sim", "small-native", "--store", &store], "step "),
        (
            &[
                "sim",
                "small-native",
                "--json",
                "--trace",
                &trace,
                "--store",
                &store,
            ],
            "{\"format\"",
        ),
        (
            &["sweep", "toy-linear", "--axis", &axis, "--csv", &csv],
            "Best",
        ),
        (&["report", "small-native", "--out", &page], ""),
        (&["report", "small-native", "--out", &page, "--png"], ""),
        (
            &["exec", "llama-tiny", "--steps", "1", "--trace", &trace],
            "loss",
        ),
    ];
    for (args, result) in cases {
        let shown = &args[..2];
        let (code, out, err) = call(args);
        assert_eq!(code, Some(3), "{shown:?}: {err}");
        assert!(err.contains("No space left on device"), "{shown:?}: {err}");
        assert!(out.contains(result), "{shown:?}: {out}");
        assert_eq!(small.listed(), [small.at(FULL)], "{shown:?}");
    }
    // Existing files are unchanged.
    let full = file(FULL);
    let (code, ..) = call(&["sim", "small-native", "--trace", &full]);
    assert_eq!(code, Some(3));
    assert_eq!(fs::read(&full).unwrap(), [b'x'; 60 << 10]);
    assert_eq!(small.listed(), [small.at(FULL)]);
}

#[cfg(target_os = "linux")]
#[test]
fn standard_output_that_is_full_is_a_failure() {
    for args in [
        &["schema"][..],
        &["plan", "llama-tiny"],
        &["sim", "llama-tiny"],
        &["scenarios"],
        &["completions", "bash"],
        &["--help"],
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .args(args)
            .stdout(Stdio::from(full))
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {err}");
        assert!(err.contains("cannot write"), "{args:?}: {err}");
    }
    // Devices are written directly, for every option.
    let (code, out, err) = call(&["sim", "llama-tiny", "--trace", "/dev/full"]);
    assert_eq!(code, Some(3), "{err}");
    assert!(out.contains("step "), "{out}");
    assert!(Path::new("/dev/full").exists());
}

#[test]
fn a_wrong_path_is_found_before_anything_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let inside = file.join("x").display().to_string();
    let missing = dir.path().join("no/such").display().to_string();
    let axis = "fsdp.prefetch_forward=[0, 1]";
    for args in [
        &["sim", "small-native", "--trace", &missing][..],
        &["sim", "small-native", "--trace", &inside],
        &["sim", "small-native", "--store", &inside],
        &["sweep", "small-native", "--axis", axis, "--csv", &missing],
        &["sweep", "small-native", "--axis", axis, "--store", &inside],
        &["exec", "llama-tiny", "--trace", &missing],
    ] {
        let (code, out, err) = call(args);
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(out.is_empty(), "{args:?}: {out}");
        assert!(!err.contains(".part"), "{args:?}: {err}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
