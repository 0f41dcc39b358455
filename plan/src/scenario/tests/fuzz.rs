//! No input makes the parser panic, and what it accepts keeps its rules.

use super::super::{keys, load, parse, shipped};
use crate::config::{Reshard, Scenario};
use proptest::prelude::*;

/// What every accepted scenario keeps, said independently of `validate.rs`.
fn sound(s: &Scenario) {
    assert!(s.model.layers >= 1 && s.mesh.dp_shard >= 1 && s.fsdp.reduce_in_flight >= 1);
    assert_eq!(s.model.heads % s.model.kv_heads, 0);
    assert!(s.mesh.dp_shard.checked_mul(s.mesh.dp_outer).is_some());
    assert!(s.train.seq_len <= s.model.max_seq_len);
    let logits = [
        s.train.micro_batch,
        s.train.seq_len,
        s.model.vocab.max(1),
        4,
    ];
    assert!(
        logits
            .iter()
            .try_fold(1u64, |a, b| a.checked_mul(*b))
            .is_some()
    );
    if let Reshard::Group(n) = s.fsdp.reshard_after_forward {
        assert!(n > 1 && n < s.mesh.dp_shard && s.mesh.dp_shard.is_multiple_of(n));
    }
}

/// A path and a value, mostly of the right kind.
fn setting() -> impl Strategy<Value = String> {
    let key = (0..keys().len()).prop_map(|i| &keys()[i]);
    (
        key,
        any::<u64>(),
        0..64u32,
        any::<prop::sample::Index>(),
        0..9u8,
    )
        .prop_map(|(k, n, shift, pick, kind)| {
            let words: Vec<&str> = k.values().collect();
            let word = if words.is_empty() {
                "x"
            } else {
                words[pick.index(words.len())]
            };
            let n = n >> shift;
            let value = match kind {
                0..=2 => n.to_string(),
                3..=5 => word.to_owned(),
                6 => format!("[\"{word}\", \"{word}\"]"),
                7 => format!("[\"{word}\"]"),
                _ => format!("{}e-{}", n % 10, shift),
            };
            format!("{}.{}={value}", k.section, k.key)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_text(text in any::<String>(), set in any::<String>()) {
        let _ = parse(&text, &text, &[]).map_err(|e| e.to_string());
        let _ = super::minimal(&[&set]).map_err(|e| e.to_string());
        let _ = super::minimal(&[&format!("fsdp.units={set}")]).map_err(|e| e.to_string());
    }

    #[test]
    fn any_settings(sets in prop::collection::vec(setting(), 1..5), which in any::<prop::sample::Index>()) {
        let (name, _) = shipped()[which.index(shipped().len())];
        match load(name.as_ref(), &sets) {
            Ok(s) => sound(&s),
            Err(e) => prop_assert!(!e.to_string().is_empty() && !e.message().is_empty()),
        }
    }

    #[test]
    fn mutated_files(which in any::<prop::sample::Index>(), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..4u8), 1..6)) {
        let (name, text) = shipped()[which.index(shipped().len())];
        let mut chars: Vec<char> = text.chars().collect();
        let others: Vec<char> = "=[]{}\"'.,#\n\t\u{0}é0123456789abcdefxyz_-+ ".chars().collect();
        for (at, with, kind) in edits {
            if chars.is_empty() {
                break;
            }
            let i = at.index(chars.len());
            match kind {
                0 => { chars.remove(i); }
                1 => chars[i] = others[with.index(others.len())],
                2 => chars.insert(i, others[with.index(others.len())]),
                _ => { let j = with.index(chars.len()); chars.swap(i, j); }
            }
        }
        let text: String = chars.into_iter().collect();
        match parse(name, &text, &[]) {
            Ok(s) => sound(&s),
            Err(e) => prop_assert!(!e.to_string().is_empty()),
        }
    }
}
