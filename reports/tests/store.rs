//! Saved runs read back completely or not at all.

use shardlab_plan::record::Span;
use shardlab_reports::store::{Id, Store, StoreError, Term, is_run_dir, open_dir};
use shardlab_reports::{RunView, testing};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn text(view: &RunView) -> String {
    serde_json::to_string(view).unwrap()
}

fn store() -> (TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::at(dir.path().join("a/runs"));
    (dir, store)
}

#[test]
fn a_run_comes_out_as_it_went_in() {
    let (_dir, store) = store();
    let view = testing::view(1000);
    let id = store.save(&view).unwrap();
    let mut back = store.open(&id).unwrap();
    let added = &back.run.environment;
    assert!(
        added.contains_key("os") && added.contains_key("shardlab"),
        "{added:?}"
    );
    back.run.environment.clone_from(&view.run.environment);
    // NaN is unequal to itself, so compare texts.
    assert_eq!(text(&back), text(&view));
    assert!(is_run_dir(&store.path(&id)));
    let scenario = store.path(&id).join("scenario.toml");
    assert_eq!(fs::read_to_string(scenario).unwrap(), view.scenario.text);
}

/// Filters see the same fields before and after a run is saved, except those that saving adds.
#[test]
fn fields_of_a_run_are_those_of_its_entry() {
    let (_dir, store) = store();
    let view = testing::view(10);
    let id = store.save(&view).unwrap();
    let fields = store.entry(&id).unwrap().fields();
    assert_eq!(fields["id"], id.as_str());
    let own = [
        "kind",
        "scenario",
        "policy",
        "hardware",
        "world_size",
        "program_digest",
        "scenario_digest",
    ];
    let options = view.scenario.settings.keys().map(String::as_str);
    for key in options.chain(own) {
        assert!(view.field(key).is_some(), "{key}");
        assert_eq!(view.field(key).as_ref(), fields.get(key), "{key}");
    }
    assert_eq!(view.field("no.such"), None);
}

#[test]
fn odd_runs_come_out_too() {
    let (_dir, store) = store();
    // A run without spans (a sweep's point), a span and a gap without an instruction, and names
    // with commas and quotes.
    let mut empty = testing::view(0);
    empty.run.gaps.clear();
    let mut strange = testing::view(20);
    strange.names[0] = "fused \"a, b\"\nc".into();
    strange.instrs.remove(3);
    let last = *strange.run.spans.last().unwrap();
    strange.run.spans.push(Span { ..last });
    for view in [empty, strange] {
        let id = store.save(&view).unwrap();
        let mut back = store.open(&id).unwrap();
        back.run.environment.clone_from(&view.run.environment);
        assert_eq!(text(&back), text(&view));
    }
}

#[test]
fn a_list_needs_only_summaries_and_reports_what_is_not_whole() {
    let (_dir, store) = store();
    assert_eq!(store.list().unwrap().runs, []);
    let view = testing::view(10);
    let ids: Vec<Id> = (0..3).map(|_| store.save(&view).unwrap()).collect();
    fs::write(store.path(&ids[1]).join("summary.json"), "{\"kind\":").unwrap();
    fs::create_dir(store.dir().join(".unfinished-20260101-000000-000000")).unwrap();
    let killed = store.dir().join(".unfinished-20260101-000000-000001");
    fs::create_dir(&killed).unwrap();
    fs::write(killed.join("run.json"), "{").unwrap();
    fs::create_dir(store.dir().join("something else")).unwrap();
    let listing = store.list().unwrap();
    let mut whole = vec![ids[0].clone(), ids[2].clone()];
    whole.sort();
    let listed: Vec<Id> = listing.runs.iter().map(|e| e.id.clone()).collect();
    assert_eq!(listed, whole);
    let reasons: Vec<(&str, bool)> = listing
        .skipped
        .iter()
        .map(|s| (s.reason.as_str(), s.litter))
        .collect();
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    // The folder without any file may belong to a writer that has just started.
    assert!(
        reasons.contains(&("it is being written", false)),
        "{reasons:?}"
    );
    assert!(
        reasons.contains(&("its writer stopped before it was complete", true)),
        "{reasons:?}"
    );
    let damaged = reasons
        .iter()
        .find(|r| r.0.starts_with("summary.json"))
        .unwrap();
    assert!(!damaged.1);
    for skipped in &listing.skipped {
        assert_eq!(store.remove_litter(skipped).is_ok(), skipped.litter);
    }
    assert!(!killed.exists());
    let entry = &listing.runs[0];
    assert_eq!(
        entry.metric("memory.peak_reserved_bytes"),
        f64::from(4u32 << 20)
    );
    assert_eq!(entry.metric("loss.first"), 4.5);
    assert_eq!(entry.metric("spans"), 10.0);
    assert!(entry.metric("no such").is_nan());
}

#[test]
fn damaged_tables_are_named() {
    let (_dir, store) = store();
    let id = store.save(&testing::view(10)).unwrap();
    let spans = store.path(&id).join("spans.csv");
    let whole = fs::read_to_string(&spans).unwrap();
    let reason = |content: &str| {
        fs::write(&spans, content).unwrap();
        store.open(&id).unwrap_err().reason()
    };
    let short = reason(&whole[..whole.len() - 1]);
    assert!(short.starts_with("spans.csv: it has"), "{short}");
    let wrong = reason(&whole.replacen("gemm", "gems", 1));
    assert_eq!(
        wrong,
        "spans.csv: row 2: `gems` is not a valid value for `work`"
    );
    let wrong = reason(&whole.replacen("instr,name", "name,instr", 1));
    assert!(wrong.contains("columns instr,name"), "{wrong}");
    // References beyond the spans would be out of range wherever they are used.
    let id = store.save(&testing::view(5)).unwrap();
    let [spans, gaps] = ["spans.csv", "gaps.csv"].map(|n| store.path(&id).join(n));
    for (path, from, to) in [(gaps, ",wire,0", ",wire,9"), (spans, "event,0", "event,9")] {
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, whole.replacen(from, to, 1)).unwrap();
        let reason = store.open(&id).unwrap_err().reason();
        assert!(reason.contains("span 9"), "{reason}");
        fs::write(&path, whole).unwrap();
    }
    assert!(store.open(&id).is_ok());
    assert!(open_dir(Path::new("no/such")).is_err());
}

#[test]
fn runs_are_meant_by_abbreviations_names_and_age() {
    let (_dir, store) = store();
    assert!(matches!(
        store.resolve("last"),
        Err(StoreError::Unknown { .. })
    ));
    let view = testing::view(0);
    let mut ids: Vec<Id> = (0..3).map(|_| store.save(&view).unwrap()).collect();
    ids.sort();
    for id in &ids {
        assert_eq!(&store.resolve(id.as_str()).unwrap(), id);
        assert_eq!(&store.resolve(id.tail()).unwrap(), id);
        assert_eq!(&store.resolve(&id.tail()[..5]).unwrap(), id);
    }
    assert_eq!(store.resolve("last").unwrap(), ids[2]);
    assert_eq!(store.resolve("last~2").unwrap(), ids[0]);
    let message = |text: &str| store.resolve(text).unwrap_err().to_string();
    assert!(message("last~3").contains("the store has 3 runs"));
    assert!(
        message("20").contains("3 runs start with it"),
        "{}",
        message("20")
    );
    store.name("main", &ids[0]).unwrap();
    store.name("main", &ids[1]).unwrap();
    assert_eq!(store.resolve("main").unwrap(), ids[1]);
    assert_eq!(
        store.names().unwrap(),
        [("main".to_owned(), ids[1].clone())]
    );
    assert!(
        message("mian").contains("nearest is `main`"),
        "{}",
        message("mian")
    );
    for bad in ["", "last", "last~1", "abc", "2026", "a/b", ".hidden", "a b"] {
        assert!(store.name(bad, &ids[0]).is_err(), "{bad}");
    }
    store.remove(&ids[0]).unwrap();
    assert_eq!(store.ids().unwrap(), ids[1..]);
    assert!(store.remove(&ids[0]).is_err());
}

/// Names change atomically: a run never has both names or neither.
#[test]
fn names_are_replaced_and_taken_away() {
    let (_dir, store) = store();
    let view = testing::view(50);
    let ids = [(); 2].map(|()| store.save(&view).unwrap());
    let names = || -> Vec<(String, Id)> { store.names().unwrap() };
    store.name("old", &ids[0]).unwrap();
    store.rename("old", "new").unwrap();
    assert_eq!(names(), [("new".to_owned(), ids[0].clone())]);
    // The name of another run moves, as when naming a run.
    store.name("main", &ids[1]).unwrap();
    store.rename("new", "main").unwrap();
    assert_eq!(names(), [("main".to_owned(), ids[0].clone())]);
    store.rename("main", "main").unwrap();
    assert_eq!(names().len(), 1);
    assert!(matches!(
        store.rename("main", "a/b"),
        Err(StoreError::Name(_))
    ));
    for gone in ["mian", "../main", ".main", ""] {
        let error = store.unname(gone).unwrap_err();
        assert!(matches!(error, StoreError::NoName { .. }), "{gone}");
        assert!(store.rename(gone, "other").is_err(), "{gone}");
    }
    let error = store.unname("mian").unwrap_err().to_string();
    assert!(error.ends_with("`mian`; the nearest is `main`"), "{error}");
    store.unname("main").unwrap();
    assert_eq!(names(), []);
    assert_eq!(store.ids().unwrap().len(), 2);
}

#[test]
fn writers_do_not_meet() {
    let (_dir, store) = store();
    let view = testing::view(50);
    let ids: Vec<Id> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..5)
                        .map(|_| store.save(&view).unwrap())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    let listing = store.list().unwrap();
    assert_eq!((listing.runs.len(), listing.skipped.len()), (20, 0));
    for id in ids {
        assert_eq!(store.open(&id).unwrap().run.spans, view.run.spans);
    }
}

#[test]
fn terms_select() {
    let (_dir, store) = store();
    store.save(&testing::view(0)).unwrap();
    let entry = &store.list().unwrap().runs[0];
    let matches = |text: &str| Term::parse(text).unwrap().matches(entry);
    for yes in [
        "kind=sim",
        "fsdp.policy=native",
        "fsdp.policy!=megatron",
        "digest=0123",
        "program_digest=0123456789abcdef",
        "seed=0",
        "no.such!=1",
    ] {
        assert!(matches(yes), "{yes}");
    }
    for no in [
        "kind=exec",
        "digest=1",
        "policy=nat",
        "no.such=1",
        "digest=",
    ] {
        assert!(!matches(no), "{no}");
    }
    assert!(Term::parse("kind").is_err());
}
