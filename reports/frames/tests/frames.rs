//! Queries over runs whose answers are known.

use shardlab_frames::{Aggregate, Cell, Frame, FrameError, runs, spans};
use shardlab_plan::record::RunKind;
use shardlab_plan::units::{Bytes, Picos};
use shardlab_reports::store::{Entry, Store};
use shardlab_reports::testing;
use tempfile::TempDir;

/// Saves six runs, alternately predicted and measured, of 10, 20, 30, 40, 50 and 60 ms. The first
/// four run program `one`.
fn kept() -> (TempDir, Store, Vec<Entry>) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::at(dir.path());
    for i in 0..6u64 {
        let mut view = testing::view(20);
        view.run.kind = if i % 2 == 0 {
            RunKind::Sim
        } else {
            RunKind::Exec
        };
        view.run.program_digest = if i < 4 { "one" } else { "two" }.into();
        view.run.step_samples = vec![Picos((i + 1) * 10_000_000_000)];
        view.run.memory.peak_reserved = Bytes((i + 1) << 30);
        let depth = (i % 3).to_string();
        view.scenario
            .settings
            .insert("fsdp.prefetch_forward".into(), depth);
        store.save(&view).unwrap();
        // Ids contain milliseconds: the runs must be in order.
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let entries = store.list().unwrap().runs;
    assert_eq!(entries.len(), 6);
    (dir, store, entries)
}

fn column(frame: &Frame, name: &str) -> Vec<Cell> {
    let at = frame.columns().iter().position(|c| c == name);
    let at = at.unwrap_or_else(|| panic!("{name} is not among {:?}", frame.columns()));
    (0..frame.rows())
        .map(|row| frame.cell(at, row).unwrap())
        .collect()
}

fn numbers(frame: &Frame, name: &str) -> Vec<f64> {
    let number = |cell: Cell| match cell {
        Cell::Number(x) => x,
        other => panic!("{other:?} in {name}"),
    };
    column(frame, name).into_iter().map(number).collect()
}

fn names(all: &[&str]) -> Vec<String> {
    all.iter().map(|n| (*n).to_owned()).collect()
}

#[test]
fn groups_have_their_quantiles() {
    let (_dir, _store, entries) = kept();
    let all = runs(&entries).unwrap();
    let aggregates: Vec<Aggregate> = ["count", "mean", "min", "max", "median", "p25", "std", "sum"]
        .iter()
        .map(|a| a.parse().unwrap())
        .collect();
    let by_kind = all
        .group(&names(&["kind"]), &names(&["step_ms.median"]), &aggregates)
        .unwrap();
    assert_eq!(
        column(&by_kind, "kind"),
        [Cell::Text("sim".into()), Cell::Text("exec".into())]
    );
    for (aggregate, expected) in [
        ("count", [3.0, 3.0]),
        ("mean", [30.0, 40.0]),
        ("min", [10.0, 20.0]),
        ("max", [50.0, 60.0]),
        ("median", [30.0, 40.0]),
        // Interpolated linearly: halfway from the first to the second of three.
        ("p25", [20.0, 30.0]),
        ("std", [20.0, 20.0]),
        ("sum", [90.0, 120.0]),
    ] {
        let got = numbers(&by_kind, &format!("step_ms.median {aggregate}"));
        assert_eq!(got, expected, "{aggregate}");
    }
    // Options are columns too, numeric if their values are numbers. Without a key, all rows form
    // one group.
    let by_depth = all
        .group(
            &names(&["fsdp.prefetch_forward"]),
            &names(&["step_ms.median"]),
            &aggregates[1..2],
        )
        .unwrap();
    assert_eq!(numbers(&by_depth, "fsdp.prefetch_forward"), [0.0, 1.0, 2.0]);
    assert_eq!(
        numbers(&by_depth, "step_ms.median mean"),
        [25.0, 35.0, 45.0]
    );
    let one = all
        .group(&[], &names(&["step_ms.median"]), &aggregates[1..2])
        .unwrap();
    assert_eq!(numbers(&one, "step_ms.median mean"), [35.0]);
}

#[test]
fn a_history_has_changes_within_its_group() {
    let (_dir, _store, entries) = kept();
    let all = runs(&entries).unwrap();
    let history = all.history("step_ms.median", &names(&["kind"])).unwrap();
    assert_eq!(
        numbers(&history, "step_ms.median"),
        [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    );
    let changes = column(&history, "change %");
    assert_eq!(changes[..2], [Cell::Missing, Cell::Missing]);
    for (cell, expected) in changes[2..].iter().zip([200.0, 100.0, 66.666, 50.0]) {
        let Cell::Number(x) = cell else {
            panic!("{cell:?}")
        };
        assert!((x - expected).abs() < 1e-2, "{x} {expected}");
    }
}

#[test]
fn predicted_joins_measured() {
    let (_dir, _store, entries) = kept();
    let all = runs(&entries).unwrap();
    let on = names(&["program_digest"]);
    let joined = all
        .versus("kind", ["sim", "exec"], &on, "step_ms.median")
        .unwrap()
        .sorted("program_digest", false)
        .unwrap();
    // Program one: 10 and 30 predicted, 20 and 40 measured; program two: 50 and 60.
    assert_eq!(numbers(&joined, "step_ms.median sim"), [20.0, 50.0]);
    assert_eq!(numbers(&joined, "step_ms.median exec"), [30.0, 60.0]);
    assert_eq!(numbers(&joined, "exec / sim"), [1.5, 1.2]);
    let none = all.versus("kind", ["sim", "train"], &on, "step_ms.median");
    assert!(matches!(none, Err(FrameError::Empty(_))));
    let depths = all
        .versus(
            "fsdp.prefetch_forward",
            ["0", "2"],
            &names(&["policy"]),
            "step_ms.median",
        )
        .unwrap();
    assert_eq!(numbers(&depths, "2 / 0"), [45.0 / 25.0]);
}

#[test]
fn spans_join_their_runs() {
    let (_dir, store, entries) = kept();
    let all = spans(&store, &entries).unwrap();
    assert_eq!(all.rows(), 6 * 20);
    let sum: Aggregate = "sum".parse().unwrap();
    let by = names(&["kind", "name"]);
    let grouped = all
        .group(&by, &names(&["duration_us"]), &[sum])
        .unwrap()
        .sorted("name", false)
        .unwrap();
    assert_eq!(grouped.rows(), 6);
    let total: f64 = numbers(&grouped, "duration_us sum").iter().sum();
    let one: f64 = testing::view(20)
        .run
        .spans
        .iter()
        .map(|s| (s.end - s.start).us())
        .sum();
    assert!((total - 6.0 * one).abs() < 1e-6, "{total} {one}");
}

#[test]
fn wrong_names_get_the_nearest() {
    let (_dir, _store, entries) = kept();
    let all = runs(&entries).unwrap();
    let message = |name: &str| all.name(name).unwrap_err().to_string();
    assert!(message("step_ms.medain").contains("nearest is `step_ms.median`"));
    assert_eq!(message("zzzz"), "there is no column `zzzz`");
    // The end of a name is enough if it is unambiguous.
    assert_eq!(
        all.name("peak_reserved_bytes").unwrap(),
        "memory.peak_reserved_bytes"
    );
    let text = all.group(&[], &names(&["policy"]), &[Aggregate::Mean]);
    assert!(matches!(text, Err(FrameError::NoNumbers(_))));
    let twice = all.select(&names(&["kind", "kind"]));
    assert!(matches!(twice, Err(FrameError::Twice(_))));
    assert!(matches!(runs(&[]), Err(FrameError::Empty(_))));
    assert!("p101".parse::<Aggregate>().is_err() && "most".parse::<Aggregate>().is_err());
}

#[test]
fn tables_are_written_as_csv_and_parquet() {
    let (dir, _store, entries) = kept();
    let table = runs(&entries)
        .unwrap()
        .select(&names(&["kind", "step_ms.median"]))
        .unwrap();
    let csv = dir.path().join("t.csv");
    table.csv(&csv).unwrap();
    let text = std::fs::read_to_string(csv).unwrap();
    assert_eq!(text.lines().next(), Some("kind,step_ms.median"));
    assert_eq!(text.lines().nth(2), Some("exec,20.0"));
    let parquet = dir.path().join("t.parquet");
    table.parquet(&parquet).unwrap();
    let bytes = std::fs::read(parquet).unwrap();
    assert!(bytes.starts_with(b"PAR1") && bytes.ends_with(b"PAR1"));
    assert!(table.csv(&dir.path().join("no/such/folder.csv")).is_err());
}
