//! Damaged files, files of another kind and extremely large files, for all commands that read
//! recordings. Each is rejected with its name, the reason, and exit status 2.

use crate::shardlab;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::io::{Read, Write};
use std::path::Path;

const TRACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces");

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn unpacked(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(format!("{TRACES}/{name}")).unwrap();
    GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Returns the standard error of a call that ends with status 2.
#[track_caller]
fn refused(args: &[&str]) -> String {
    let output = shardlab(args).assert().code(2);
    let text = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[track_caller]
fn import_refused(path: &Path, expected: &str) {
    let error = refused(&["import", path.to_str().unwrap()]);
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(error.contains(name), "{name}: {error}");
    assert!(error.contains(expected), "{name}: {error}");
}

#[test]
fn files_of_other_kinds_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes, expected) in [
        (
            "picture.png",
            &b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..],
            "of no known format",
        ),
        ("archive.zip", b"PK\x03\x04rest", "a zip archive"),
        ("trace.json.zst", b"\x28\xb5\x2f\xfdrest", "zstd"),
        (
            "list.pickle",
            b"\x80\x04]\x94.",
            "neither a memory snapshot nor a flight record",
        ),
        ("empty.gz", &packed(b""), "empty after decompression"),
        ("binary.gz", &packed(&[0; 1000]), "of no known format"),
        ("spaces.json", &[b' '; 1000], "of no known format"),
        (
            "config.json",
            b"{\"model_type\": \"llama\"}",
            "neither `traceEvents`",
        ),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        import_refused(&path, expected);
    }
    import_refused(dir.path(), "is a folder");
}

#[test]
fn files_that_were_cut_off_say_so() {
    let dir = tempfile::tempdir().unwrap();
    for (name, expected) in [
        ("oom.snapshot.pickle.gz", "cut off"),
        ("fsdp2-compiled-rank0.flight.pickle.gz", "cut off"),
        ("nsys.sqlite.gz", "cut off"),
    ] {
        let whole = unpacked(name);
        for share in [3, 2] {
            let path = dir.path().join(name.trim_end_matches(".gz"));
            std::fs::write(&path, &whole[..whole.len() / share]).unwrap();
            import_refused(&path, expected);
        }
    }
    // The file ends within the compressed data, before the first event.
    let trace = std::fs::read(format!("{TRACES}/graph.json.gz")).unwrap();
    let path = dir.path().join("cut.json.gz");
    std::fs::write(&path, &trace[..20]).unwrap();
    import_refused(&path, "cut off");
    let snapshot = std::fs::read(format!("{TRACES}/oom.snapshot.pickle.gz")).unwrap();
    let path = dir.path().join("cut.pickle.gz");
    std::fs::write(&path, &snapshot[..snapshot.len() / 2]).unwrap();
    import_refused(&path, "cut off");
}

#[test]
fn absurd_numbers_and_nesting_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    // An allocation of 2^60 bytes, and a snapshot without segments and history.
    let huge = b"\x80\x04\x95b\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x08segments\x94]\x94\x8c\rdevice_traces\x94]\x94]\x94}\x94(\x8c\x06action\x94\x8c\x05alloc\x94\x8c\x04addr\x94K\x00\x8c\x04size\x94\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x10\x8c\x06stream\x94K\x00uaau.";
    let nothing = b"\x80\x04\x95$\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x08segments\x94]\x94\x8c\rdevice_traces\x94]\x94u.";
    // A text of 2^60 bytes.
    let long = b"\x80\x04}\x8c\x08segments\x8d\0\0\0\0\0\0\0\x10";
    let deep = format!("{{\"traceEvents\": {}", "[".repeat(100_000));
    let nested = format!(
        "{{\"traceEvents\": [{{\"ph\": \"X\", \"args\": {}1",
        "{\"a\": ".repeat(100_000)
    );
    // A record of 2^62 bytes that continues on a page that refers to itself.
    let mut circle = unpacked("nsys.sqlite.gz");
    let size = usize::from(u16::from_be_bytes([circle[16], circle[17]]));
    let at = usize::from(u16::from_be_bytes([circle[108], circle[109]]));
    circle[at..at + 9].copy_from_slice(&[0xbf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    circle.truncate(circle.len() / size * size);
    for (name, bytes, expected) in [
        (
            "huge.pickle",
            &huge[..],
            "event 0 of device 0: 1152921504606846976 bytes",
        ),
        ("nothing.pickle", nothing, "neither segments nor a history"),
        ("long.pickle", long, "cut off"),
        ("deep.json", deep.as_bytes(), "deep.json"),
        ("nested.json", nested.as_bytes(), "nested.json"),
        ("circle.sqlite", &circle, "longer than the file"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        import_refused(&path, expected);
    }
}

/// Commands that read one kind of recording say which kind they expect.
#[test]
fn every_verb_refuses_what_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let empty = write("empty.json", b"");
    let cpu = write(
        "cpu.json",
        br#"{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}"#,
    );
    let cut = write("cut.json", &unpacked("graph.json.gz")[..3000]);
    let snapshot = format!("{TRACES}/oom.snapshot.pickle.gz");
    let trace = format!("{TRACES}/base.json.gz");
    let missing = dir.path().join("missing.json");
    for file in [&empty, &cpu, &cut, &snapshot, missing.to_str().unwrap()] {
        let file: &str = file;
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        for args in [
            &["infer", file][..],
            &["replay", file],
            &["calibrate", "--from-trace", file],
            &["gate", "--measured", file, "--baseline", &trace],
            &["gate", "--measured", &trace, "--baseline", file],
        ] {
            let error = refused(args);
            assert!(error.contains(name), "{args:?}: {error}");
        }
    }
    // Memory options are for snapshots, and a scenario is for flight recorder dumps.
    let error = refused(&["import", &trace, "--device-memory", "lots"]);
    assert!(error.contains("lots"), "{error}");
    let record = format!("{TRACES}/fsdp2-compiled-rank0.flight.pickle.gz");
    let error = refused(&["import", &record, "--scenario", "no-such-scenario"]);
    assert!(error.contains("no-such-scenario"), "{error}");
}

/// Commands for scenarios and jobs that get a recording say what it is, and which command reads it.
#[test]
fn recordings_are_sent_to_the_command_that_reads_them() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let page = page.to_str().unwrap();
    let database = dir.path().join("nsys.sqlite");
    std::fs::write(&database, unpacked("nsys.sqlite.gz")).unwrap();
    let trace = format!("{TRACES}/base.json.gz");
    let snapshot = format!("{TRACES}/oom.snapshot.pickle.gz");
    for (file, what) in [
        (trace.as_str(), "a trace of the PyTorch profiler"),
        (snapshot.as_str(), "a memory snapshot"),
        (database.to_str().unwrap(), "an SQLite database"),
    ] {
        for args in [
            &["sim", file][..],
            &["explain", file],
            &["check", file],
            &["compare", file, "llama-tiny"],
            &["report", file, "--out", page],
            &["fit", file],
        ] {
            let error = refused(args);
            assert!(error.contains(what), "{args:?}: {error}");
            assert!(error.contains("`shardlab import"), "{args:?}: {error}");
        }
    }
}
