//! Tests of outlines of real programs.

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

/// Returns statements in the form of an expanded outline.
fn plain(sections: &[(String, Vec<String>)]) -> String {
    sections.iter().fold(String::new(), |out, (title, lines)| {
        out + &format!("[{title}]\n") + &lines.iter().map(|l| format!("{l}\n")).collect::<String>()
    })
}

/// Expanding a folded outline restores its statements.
#[test]
fn expansion_undoes_loops_and_blocks() {
    for name in [
        "small-native",
        "small-fsdp2",
        "small-accumulation",
        "small-full",
        "small-cnn",
        "small-in-backward",
    ] {
        let p = program(name, &[]);
        let sections: Vec<(String, Vec<String>)> = p
            .sections
            .iter()
            .map(|s| (s.kind.title().to_owned(), lines(&p, s.kind)))
            .collect();
        let outline = outline(&p);
        assert_eq!(expand(&outline), plain(&sections), "{name}");
        assert!(outline.len() < expand(&outline).len(), "{name}");
    }
}

#[test]
fn depth_does_not_lengthen_an_outline() {
    for name in [
        "small-native",
        "small-fsdp2",
        "small-megatron",
        "small-full",
    ] {
        let of = |layers: u32| outline(&program(name, &[&format!("model.layers={layers}")]));
        let lines = |text: &str| text.lines().count();
        let (few, many) = (of(8), of(40));
        assert!(
            lines(&many) <= lines(&few) + 2,
            "{name}: {} {}",
            lines(&few),
            lines(&many)
        );
    }
}

#[test]
fn allocations_are_read_back() {
    let two = vec![(128 << 20, 2), (25_344, 1)];
    assert_eq!(
        allocations("alloc tmp 2*128Mi 25344"),
        Some(("temporary", two.clone()))
    );
    let labelled = "copy-out: alloc full_weight 2*128Mi 25344 double_buffer on all_gather";
    assert_eq!(allocations(labelled), Some(("full_weight", two)));
    for other in [
        "free tmp",
        "mm 8x8x8: act -> tmp",
        "alloc",
        "x alloc: alloc tmp 1",
    ] {
        assert_eq!(allocations(other), None, "{other}");
    }
}

#[test]
fn sizes_are_short_and_exact() {
    for (bytes, text) in [
        (0, "0"),
        (25_344, "25344"),
        (16 << 10, "16Ki"),
        (1_500 << 20, "1500Mi"),
        (3 << 30, "3Gi"),
    ] {
        assert_eq!((size(bytes).as_str(), bytes_of(text)), (text, Some(bytes)));
    }
    assert_eq!(
        (bytes_of("many"), bytes_of("1Ti"), bytes_of("")),
        (None, None, None)
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
            t + &format!(" = forward layers.+{i}; a; b; {word}; d;\n = other;\n")
        })
    };
    let diff = changes(&lines(40, "x"), &lines(40, "y"), 60);
    assert!(
        diff.starts_with(" = forward layers.+0\n a\n b\n-x\n+y\n d\n"),
        "{diff}"
    );
    let same = |word: &str| lines(40, word).replace(|c: char| c == '+' || c.is_ascii_digit(), "");
    let diff = changes(&same("x"), &same("y"), 60);
    assert_eq!(
        diff,
        " = forward layers.\n a\n b\n-x\n+y\n d\n(39 more occurrences)\n"
    );
    let other: String = (0..200).map(|i| format!("{i};\n")).collect();
    let diff = changes("[steady step]\n", &format!("[steady step]\n{other}"), 60);
    assert!(diff.lines().count() <= 61, "{diff}");
    // Equal consecutive lines are shown once with their number.
    let diff = changes(
        "[steady step] a\n",
        "[steady step] a; 30x{alloc tmp 128Mi}\n",
        60,
    );
    assert_eq!(diff, " [steady step]\n a\n+alloc tmp 128Mi (30 times)\n");
}

#[test]
fn texts_that_are_not_an_outline_do_no_harm() {
    for text in [
        "",
        "\n",
        "5x{",
        "}}}; ; }",
        "[block a]\nrun a\nrun a",
        "[x]\n4294967295x{99999999999x{y}}; 3x",
    ] {
        let _ = expand(text);
        let _ = changes(text, "[steady step]\nx\n", 10);
    }
    // Nested loops in an invalid file stop at a size limit and at a maximum depth, instead of
    // filling the memory.
    let nested = format!("[x]\n{}y", "4000000000x{".repeat(12));
    assert!(expand(&nested).len() <= 65 << 20);
    let _ = expand(&format!("[x]\n{}y", "1x{".repeat(100_000)));
    let blocks: String = (1..40)
        .map(|i| format!("[block {i}]\n9x{{run {}; z}}\n", i - 1))
        .collect();
    assert!(expand(&format!("{blocks}[x]\nrun 39\n")).len() <= 65 << 20);
}

proptest! {
    #[test]
    fn outlines_keep_every_statement_in_order(
        words in proptest::collection::vec(proptest::collection::vec(0u8..6, 0..60), 1..4),
        long in any::<bool>(),
    ) {
        let word = |w: &u8| match (w, long) {
            (0, _) => "= forward layers.+1".to_owned(),
            (w, true) => format!("statement {w} that is long enough to be worth a name of its own"),
            (w, false) => format!("w{w}"),
        };
        let sections: Vec<(String, Vec<String>)> = words
            .iter()
            .enumerate()
            .map(|(i, words)| (format!("section {i}"), words.iter().map(word).collect()))
            .collect();
        prop_assert_eq!(expand(&folded(sections.clone())), plain(&sections));
    }

    #[test]
    fn any_text_expands_within_limits(text in "([0-9]{1,3}x\\{|[a-c]; |\\}|\n|\\[x\\]\n|run [a-c]|\\[block [a-c]\\]\n){0,40}") {
        prop_assert!(expand(&text).len() <= 65 << 20);
    }
}
