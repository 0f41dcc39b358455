//! Tests of baseline files.

use super::*;
use crate::gate::facts::{CheckFacts, Curve, Measured, MemoryFacts, ProgramFacts, TimeFacts};
use crate::gate::testing::facts;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[test]
fn a_baseline_reads_well() {
    insta::assert_snapshot!(Baseline::text(&facts()));
}

#[test]
fn lines_of_values_are_known() {
    let text = Baseline::text(&facts());
    let b = Baseline::parse(text.clone(), "b/x.toml").unwrap();
    for (section, key, value) in [
        ("", "scenario", "scenario = \"tiny\""),
        ("memory", "allocated", "allocated = 1000"),
        ("measured.memory", "allocated", "allocated = 1001"),
        ("measured.curves", "seed", "seed = 0"),
        ("program", "digest", "digest = \"0123456789abcdef\""),
    ] {
        let at = b.place(section, key).unwrap();
        assert_eq!(at.file, "b/x.toml");
        assert_eq!(text.lines().nth(at.line as usize - 1), Some(value));
    }
    assert_eq!(b.place("no", "such").unwrap().line, 1);
    assert_eq!(Baseline::of(facts()).place("memory", "allocated"), None);
}

#[test]
fn faulty_files_are_refused_in_words() {
    let good = Baseline::text(&facts());
    let cases = [
        ("", "missing field `format`"),
        ("format = 99\n", "has format 99"),
        ("format = 1\n", "missing field"),
        ("x = = 1", "is not a baseline"),
        (
            &*good.replace("reserved = 1200", "reserved = \"many\""),
            "invalid type: string \"many\", expected u64",
        ),
        (
            &*good.replace("[check]", "[check]\nunknown = 1"),
            "unknown field `unknown`",
        ),
    ];
    for (text, words) in cases {
        let e = Baseline::parse(text.to_owned(), "x").unwrap_err();
        if words.contains("many") {
            let at = e.at.unwrap();
            let line = text.lines().nth(at.line as usize - 1).unwrap();
            assert_eq!(&line[at.column as usize - 1..], "\"many\"");
        }
        let e = e.to_string();
        assert!(e.contains(words), "{words}: {e}");
    }
}

#[test]
fn blessing_writes_once_and_says_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_of(&dir.path().join("deep/er"), "tiny");
    assert!(path.ends_with("deep/er/tiny.toml"));
    let read = |p: &Path| Baseline::read(p, "tiny");
    assert!(matches!(read(&path), Err(BaselineError::Missing { .. })));
    let mut now = facts();
    assert_eq!(bless(&path, &now).unwrap(), Blessed::Created);
    assert_eq!(bless(&path, &now).unwrap(), Blessed::Unchanged);
    now.memory.allocated += 1;
    assert_eq!(bless(&path, &now).unwrap(), Blessed::Updated);
    assert_eq!(read(&path).unwrap().facts, now);
    // No other file remains.
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        1
    );
    assert_eq!(path_of(&path, "other"), path);
}

/// Writing fails as it does on a full disk.
#[test]
fn a_file_that_cannot_be_written_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.toml");
    let full = |file: &mut File| {
        file.write_all(b"format = 2\nscen")?;
        Err(std::io::ErrorKind::StorageFull.into())
    };
    let left = || std::fs::read_dir(dir.path()).unwrap().count();
    let e = replace(&path, full).unwrap_err();
    assert_eq!((e.kind(), left()), (std::io::ErrorKind::StorageFull, 0));
    bless(&path, &facts()).unwrap();
    replace(&path, full).unwrap_err();
    assert_eq!(left(), 1);
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        Baseline::text(&facts())
    );
}

#[test]
fn only_a_baseline_of_the_scenario_gives_way() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.toml");
    let other = Baseline::text(&facts()).replace("scenario = \"tiny\"", "scenario = \"big\"");
    for (text, words) in [
        (
            "extends = \"x.toml\"\n[gate]\nformat = 1\n",
            "is not a baseline; it",
        ),
        ("", "is not a baseline; it"),
        (&other, "is the baseline of `big`, not of `tiny`; it"),
    ] {
        std::fs::write(&path, text).unwrap();
        let e = bless(&path, &facts()).unwrap_err().to_string();
        assert!(e.contains(words), "{words}: {e}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
    // A file of another format, or with a broken edit, may be blessed again.
    for text in [
        "format = 99\nscenario = \"tiny\"\n",
        "format = 1\n<<<<<<<\n",
    ] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(bless(&path, &facts()).unwrap(), Blessed::Updated);
    }
}

fn name() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[ -~äß'\"\\\\\n\t]{0,12}").unwrap()
}

fn numbers() -> impl Strategy<Value = Vec<f64>> {
    let any = prop_oneof![any::<f64>(), Just(f64::INFINITY), 0.0..10.0f64];
    proptest::collection::vec(
        any.prop_filter("NaN is unequal to itself", |x| !x.is_nan()),
        0..9,
    )
}

fn map() -> impl Strategy<Value = BTreeMap<String, u64>> {
    proptest::collection::btree_map(name(), 0..i64::MAX as u64, 0..4)
}

prop_compose! {
    fn memory()(n in proptest::collection::vec(0..i64::MAX as u64, 4), at in name(), by_role in map(), by_unit in map()) -> MemoryFacts {
        MemoryFacts { allocated: n[0], reserved: n[1], device: n[2], capacity: None, persistent: n[3], at, by_role, by_unit }
    }
}

prop_compose! {
    fn curve()(seed in 0..i64::MAX as u64, losses in numbers(), grad_norms in numbers(), ended in proptest::option::of(name())) -> Curve {
        Curve { seed, losses, grad_norms, ended }
    }
}

proptest! {
    /// Every file can be read back to bitwise equal facts.
    #[test]
    fn files_read_back(
        words in proptest::collection::vec(name(), 6),
        set in proptest::collection::vec(name(), 0..3),
        memory in memory(),
        measured in proptest::option::of((memory(), proptest::collection::vec(curve(), 1..3), name())),
        exposed in map(),
        counts in proptest::collection::btree_map("[a-z_]{1,9}", proptest::collection::btree_map("[a-z_]{1,9}", any::<u32>(), 1..3), 0..3),
        options in proptest::collection::btree_map("[a-z_]{1,9}\\.[a-z_\"]{1,9}", name(), 0..4),
        outline in "([a-z:=+ '\\[]{0,20}\n){0,5}",
        rest in (0..i64::MAX as u64, any::<u32>()),
    ) {
        let facts = Facts {
            basis: None,
            scenario: words[0].clone(),
            set,
            options,
            policy: words[1].clone(),
            hardware: words[2].clone(),
            world_size: rest.1,
            program: ProgramFacts { digest: words[3].clone(), instructions: counts, outline },
            memory,
            time: TimeFacts { step_ps: rest.0, host_ps: 7, exposed_ps: exposed },
            check: CheckFacts { errors: 1, warnings: 2, violations: vec![] },
            measured: measured.map(|(memory, curves, digest)| Measured {
                environment: BTreeMap::from([(words[4].clone(), words[5].clone())]),
                digest,
                memory: Some(memory),
                curves,
            }),
        };
        let back = Baseline::parse(Baseline::text(&facts), "x").unwrap();
        prop_assert_eq!(back.facts, facts);
    }
}
