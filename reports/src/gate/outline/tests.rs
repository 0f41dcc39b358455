//! Outlines of real programs.

use super::*;
use proptest::prelude::*;
use std::path::Path;

fn program(name: &str, set: &[&str]) -> Program {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let scenario = shardlab_plan::scenario::load(Path::new(name), &set).unwrap();
    shardlab_plan::plan(&scenario).unwrap()
}

#[test]
fn an_outline_reads_well() {
    insta::assert_snapshot!(outline(&program("small-linear", &[])));
}

/// Whatever is folded, unfolding gives the lines that were there.
#[test]
fn expansion_undoes_folds_and_blocks() {
    for name in [
        "small-native",
        "small-fsdp2",
        "small-accumulation",
        "small-full",
    ] {
        let p = program(name, &[]);
        let expanded = expand(&outline(&p));
        for kind in [SectionKind::Init, SectionKind::Steady] {
            let whole = plain(&lines(&p, kind));
            assert!(
                expanded.contains(&whole),
                "{name} {kind:?}\n{}",
                diff(&whole, &expanded)
            );
        }
        assert!(outline(&p).len() < expanded.len(), "{name}");
    }
}

#[test]
fn depth_does_not_lengthen_an_outline() {
    let of = |layers: u32| {
        outline(&program(
            "small-native",
            &[&format!("model.layers={layers}")],
        ))
    };
    let lines = |text: &str| text.lines().count();
    assert!(
        lines(&of(40)) <= lines(&of(8)) + 5,
        "{} {}",
        lines(&of(8)),
        lines(&of(40))
    );
}

#[test]
fn a_diff_shows_the_change_and_no_more() {
    let old = outline(&program("small-native", &[]));
    assert_eq!(changes(&old, &old, 60), "");
    let new = outline(&program("small-native", &["fsdp.reduce_in_flight=1"]));
    let diff = changes(&old, &new, 60);
    let changed: Vec<&str> = diff.lines().filter(|l| l.starts_with(['+', '-'])).collect();
    assert!(!changed.is_empty() && changed.len() <= 12, "{diff}");
    assert!(
        changed
            .iter()
            .all(|l| l.contains("reduce-") || l.contains("final-fence")),
        "{diff}"
    );
}

#[test]
fn long_diffs_are_cut_and_equal_places_are_counted() {
    let lines = |n: usize, word: &str| {
        (0..n).fold(String::from("[steady step]\n"), |t, i| {
            t + &format!("a\nb\nc\n{word}\nd\ne\nf{}\n", i % 2)
        })
    };
    let diff = changes(&lines(40, "x"), &lines(40, "y"), 60);
    assert!(diff.contains("(the same in 39 more places)"), "{diff}");
    let other: String = (0..200).map(|i| format!("{i}\n")).collect();
    let diff = changes("[steady step]\n", &format!("[steady step]\n{other}"), 60);
    assert!(diff.lines().count() <= 61, "{diff}");
}

#[test]
fn texts_that_are_no_outline_do_no_harm() {
    for text in [
        "",
        "\n",
        "5 times:",
        "[block a]\nrun a\nrun a",
        "  4294967295 times:\n    x",
    ] {
        let _ = expand(text);
        let _ = changes(text, "[steady step]\nx\n", 10);
    }
    // Nested repetitions of a faulty file stop at a limit instead of filling the memory.
    let nested: String = (0..12)
        .map(|i| format!("{:1$}4000000000 times:\n", "", 2 * i))
        .collect();
    assert!(expand(&format!("[x]\n{nested}{:1$}y\n", "", 24)).len() <= 65 << 20);
}

proptest! {
    #[test]
    fn folds_keep_every_line_in_order(words in proptest::collection::vec(0u8..4, 0..60)) {
        let lines: Vec<String> = words.iter().map(|w| format!("w{w}")).collect();
        let mut text = String::from("[x]\n");
        print(&fold(lines.clone()), 0, &mut text);
        prop_assert_eq!(expand(&text), format!("[x]\n{}", lines.iter().map(|l| format!("{l}\n")).collect::<String>()));
    }
}
