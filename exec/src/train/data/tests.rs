use super::*;
use crate::train::testing::{BASE, scenario_of};
use shardlab_plan::tape_of;
use std::collections::BTreeMap;

fn feed(text: &str, set: &[&str], tokens: Option<Tokens>) -> Feed {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let scenario = scenario_of(text, &set);
    let program = shardlab_plan::plan(&scenario).unwrap();
    let tape = tape_of(&scenario).unwrap();
    Feed::new(&scenario, &program, &tape.consts, tokens, 3).unwrap()
}

fn ids(bytes: &[u8]) -> Vec<i64> {
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|b| i64::from_le_bytes(*b))
        .collect()
}

/// Returns all samples of a step, ordered by index.
fn global(feed: &Feed, step: u64) -> Vec<Vec<i64>> {
    let ranks = feed.step(step);
    let mut out = Vec::new();
    let micros = feed.micro_batches;
    for m in 0..micros {
        for inputs in &ranks {
            let (_, bytes) = &inputs[m as usize][0];
            out.extend(
                ids(bytes)
                    .chunks(feed.seq_len as usize + 1)
                    .map(<[i64]>::to_vec),
            );
        }
    }
    out
}

/// Factors that the code of Llama 4 in transformers 5.24 computes for queries at some positions.
#[test]
fn factors_of_queries_are_those_of_llama4() {
    let published = [
        (0, 1.0),
        (8190, 1.0),
        (8191, 1.069_314_7),
        (16383, 1.109_861_3),
        (24575, 1.138_629_4),
    ];
    let golden = [
        (8, 1.0),
        (9, 1.207_944_2),
        (18, 1.207_944_2),
        (19, 1.329_583_6),
        (47, 1.482_831_4),
    ];
    let mut model = scenario_of(BASE[0], &[]).model;
    for (scale, floor, factors) in [(0.1, 8192, published), (0.3, 10, golden)] {
        model.options.positions.attention_temperature = scale;
        model.options.positions.attention_temperature_floor = floor;
        for (position, expected) in factors {
            let found = temperature(&model, position);
            assert!((found - expected).abs() < 1e-6, "{floor}: {position}");
        }
    }
}

#[test]
fn the_global_batch_does_not_depend_on_its_split() {
    let splits: [&[&str]; 5] = [
        &["mesh.dp_shard=1", "train.micro_batch=8"],
        &["mesh.dp_shard=2", "train.micro_batch=4"],
        &[
            "mesh.dp_shard=2",
            "train.micro_batch=1",
            "train.grad_accum=4",
        ],
        &["mesh.dp_shard=4", "mesh.dp_outer=2"],
        &["mesh.dp_shard=4", "train.grad_accum=2"],
    ];
    let reference = feed(BASE[0], splits[0], None);
    for split in splits {
        let f = feed(BASE[0], split, None);
        assert_eq!(f.global_batch(), 8);
        for step in [0, 1, 77] {
            assert_eq!(global(&f, step), global(&reference, step), "{split:?}");
        }
    }
}

/// The rule `tokens[(s*B + i)*T mod (len - T - 1)] .. +T+1`, computed by hand for 20 tokens, T = 7,
/// B = 2: starts 0, 7, 2 (14 mod 12), 9, 4.
#[test]
fn windows_follow_the_sampling_rule() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.bin");
    let bytes: Vec<u8> = (10..30u16).flat_map(u16::to_le_bytes).collect();
    std::fs::write(&path, bytes).unwrap();
    let tokens = Tokens::read(&path, TokenWidth::of_file(&path)).unwrap();
    let f = feed(BASE[0], &["mesh.dp_shard=2"], Some(tokens));
    let starts: Vec<i64> = (0..3).flat_map(|s| global(&f, s)).map(|w| w[0]).collect();
    assert_eq!(starts, [10, 17, 12, 19, 14, 21]);
    assert_eq!(global(&f, 0)[1], [17, 18, 19, 20, 21, 22, 23, 24]);
}

/// Separators are tokens 2, 3 and 9: the first sample has tokens 0 to 6, the second 7 to 13.
/// A separator belongs to the document that it ends, and every sample starts with a document.
#[test]
fn documents_start_after_separators() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.bin");
    let separators = [2, 3, 9];
    let token = |i: u16| if separators.contains(&i) { 5 } else { 10 + i };
    let bytes: Vec<u8> = (0..20).map(token).flat_map(u16::to_le_bytes).collect();
    std::fs::write(&path, bytes).unwrap();
    let lengths = format!("train.document_lengths={{ data = {path:?}, eos_token_id = 5 }}");
    let f = feed(BASE[0], &["mesh.dp_shard=2", &lengths], None);
    let input = |name: &str| {
        let n = f.inputs.iter().position(|(_, c)| c.name == name).unwrap();
        let ranks = f.step(0);
        ranks.into_iter().map(move |rank| rank[0][n].1.clone())
    };
    let starts: Vec<Vec<i64>> = input("document_starts").map(|bytes| ids(&bytes)).collect();
    assert_eq!(starts, [[0, 0, 0, 3, 4, 4, 4], [0, 0, 0, 3, 3, 3, 3]]);
    // The rows of positions in documents: 0, 1, 2, 0, 0, 1, 2 and 0, 1, 2, 0, 1, 2, 3.
    for (table, positions) in input("rope_sin").zip([[0, 1, 2, 0, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]])
    {
        let rows: Vec<&[u8]> = table.chunks(table.len() / 7).collect();
        for (i, a) in positions.iter().enumerate() {
            for (j, b) in positions.iter().enumerate() {
                assert_eq!(rows[i] == rows[j], a == b, "{i} {j}");
            }
        }
    }
}

/// Also for a stream that ends with a window, where training's last start would be its first one
/// again.
#[test]
fn validation_begins_with_the_last_window() {
    for (len, last) in [(7 * 3, 7), (7 * 3 + 1, 14), (7 * 3 + 2, 14)] {
        let stream: Vec<u32> = (0..len).collect();
        let tokens = Tokens::of_ids("tokens".to_owned(), &stream);
        let f = feed(BASE[0], &["mesh.dp_shard=2"], Some(tokens));
        let starts: Vec<i64> = f.validation(0).iter().map(|r| ids(&r[0][0].1)[0]).collect();
        assert_eq!(starts[..2], [last, last - 7], "{len}");
        assert_eq!(global(&f, 0)[0][0], 0);
    }
}

#[test]
fn faulty_data_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.bin");
    std::fs::write(&path, [0u8; 5]).unwrap();
    let torn = Tokens::read(&path, TokenWidth::U16)
        .unwrap_err()
        .to_string();
    assert!(
        torn.ends_with("5 bytes are not a whole number of 2-byte tokens"),
        "{torn}"
    );
    let text = Tokens::read(&path, TokenWidth::U8).unwrap();
    assert!(text.suits(256, 3).is_ok());
    assert!(matches!(
        text.suits(256, 4),
        Err(DataError::Short { len: 5, .. })
    ));
    std::fs::write(&path, "aaZaa").unwrap();
    let text = Tokens::read(&path, TokenWidth::U8).unwrap();
    let e = text.suits(97, 3).unwrap_err();
    assert!(
        matches!(
            e,
            DataError::Vocabulary {
                token: 97,
                position: 0,
                ..
            }
        ),
        "{e}"
    );
    assert!(Tokens::read(&dir.path().join("absent"), TokenWidth::U8).is_err());
}

/// Groups of DeepSeek-V2 compete by their largest score, those of the plan by the sum of two.
#[test]
fn groups_of_deepseek_v2_are_refused() {
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/configs/tiny--deepseek_v2.json"
    );
    let text = format!(
        "[model]\npreset = {config:?}\n[train]\nseq_len = 48\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n"
    );
    let open = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = scenario_of(&text, &set);
        let program = shardlab_plan::plan(&scenario).unwrap();
        let tape = tape_of(&scenario).unwrap();
        Feed::new(&scenario, &program, &tape.consts, None, 3).map(|_| ())
    };
    open(&[]).unwrap();
    let e = open(&["model.router_groups=2"]).unwrap_err().to_string();
    assert!(e.contains("by their largest score alone"), "{e}");
}

/// The entropy of the next token given the last one and the class of the one before is far below
/// that of the tokens themselves.
#[test]
fn the_synthetic_language_can_be_learned() {
    let t = Tokens::synthetic(256, 64, 0);
    assert!(t.suits(256, 64).is_ok());
    let stream: Vec<u32> = (0..t.len() as usize).map(|i| t.token(i)).collect();
    let entropy = |counts: &BTreeMap<(u32, u32, u32), f64>| {
        let mut of: BTreeMap<(u32, u32), f64> = BTreeMap::new();
        for ((a, b, _), n) in counts {
            *of.entry((*a, *b)).or_default() += n;
        }
        let total: f64 = counts.values().sum();
        counts
            .iter()
            .map(|((a, b, _), n)| -n / total * (n / of[&(*a, *b)]).ln())
            .sum::<f64>()
    };
    let mut alone = BTreeMap::new();
    let mut after = BTreeMap::new();
    for w in stream.windows(3) {
        *alone.entry((0, 0, w[2])).or_insert(0.0) += 1.0;
        *after.entry((w[0] % 2, w[1], w[2])).or_insert(0.0) += 1.0;
    }
    let (alone, after) = (entropy(&alone), entropy(&after));
    // For the probabilities 0.6, 0.2, 0.12, 0.08: 1.085 nats.
    assert!(after < 1.1, "{after}");
    assert!(alone > 2.5, "{alone}");
    let again = Tokens::synthetic(256, 64, 0);
    let other = Tokens::synthetic(256, 64, 1);
    assert_eq!(t.bytes, again.bytes);
    assert_ne!(t.bytes, other.bytes);
}

#[test]
fn tables() {
    let f = feed(BASE[0], &[], None);
    let head = f.model.head_dim as usize;
    let cos = floats(&f.tables()[0].1, DType::F32);
    let sin = floats(&f.tables()[1].1, DType::F32);
    assert_eq!(cos.len(), 7 * head / 2);
    // Position 3, pair 1: 3 * 10000^(-2/6).
    let angle = 3.0 * 10000f64.powf(-2.0 / head as f64);
    let at = 3 * head / 2 + 1;
    assert!((f64::from(cos[at]) - angle.cos()).abs() < 1e-6);
    assert!((f64::from(sin[at]) - angle.sin()).abs() < 1e-6);
    let f = feed(BASE[1], &[], None);
    assert_eq!(ids(&f.tables()[0].1), (0..7).collect::<Vec<_>>());
}

#[test]
fn regression_data_splits_alike() {
    let text = "[model]\nfamily = \"linear\"\nlayers = 2\nhidden = 6\n[train]\nseq_len = 3\n\
                [mesh]\nhardware = \"cpu\"\ndp_shard = 1\n[precision]\ncompute = \"f32\"\n";
    let one = feed(text, &["train.micro_batch=4"], None);
    let two = feed(text, &["train.micro_batch=2", "mesh.dp_shard=2"], None);
    let flat = |f: &Feed, nth: usize| -> Vec<u8> {
        f.step(5).iter().flat_map(|r| r[0][nth].1.clone()).collect()
    };
    let (x, y) = (flat(&one, 0), flat(&one, 1));
    assert_eq!((x.len(), y.len()), (4 * 18 * 4, 4 * 18 * 4));
    assert_eq!((flat(&two, 0), flat(&two, 1)), (x.clone(), y.clone()));
    for (x, y) in floats(&x, DType::F32).iter().zip(floats(&y, DType::F32)) {
        assert_eq!(y, 0.5 * x.max(0.0));
    }
    assert_ne!(one.validation(0), one.step(0));
}

#[test]
fn a_resumed_feed_continues_after_another_batch_size() {
    let mut small = feed(BASE[0], &["mesh.dp_shard=2"], None);
    let large = feed(BASE[0], &["mesh.dp_shard=4"], None);
    // Six steps of two samples are three steps of four.
    small.resume(3, large.position(3));
    assert_eq!(small.position(3), 12);
    assert_eq!(global(&small, 3), global(&large, 3)[..2]);
    assert_eq!(global(&small, 4), global(&large, 3)[2..]);
}
