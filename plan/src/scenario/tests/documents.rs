//! Packed sequences: lengths in a list, of a distribution, and of a file.

use super::{Folder, MINIMAL, minimal};
use crate::config::{DocumentLengths, Scenario};
use crate::scenario::{self, ScenarioError};

fn fault(lengths: &str) -> String {
    let set = format!("train.document_lengths={lengths}");
    minimal(&[&set, "train.seq_len=8192"])
        .unwrap_err()
        .to_string()
}

#[test]
fn a_distribution_is_refused_where_it_is_wrong() {
    let message = fault("{ std = 100.0 }");
    assert!(message.contains("needs its mean, in tokens"), "{message}");
    let message = fault("{ mean = 2048, std = 4000 }");
    assert!(message.contains("cannot be above 3547"), "{message}");
    assert!(message.contains("set std = 3547 or less"), "{message}");
    let message = fault("{ mean = 2048, sdt = 100 }");
    assert!(message.contains("std"), "{message}");
    assert!(fault("{ mean = 0, std = 1 }").contains("1 to"));
}

/// Attention of a query sees half of its document on average, so its FLOPs are in proportion to
/// the sum of the squares of lengths: over a token's share, mean + variance / mean.
#[test]
fn attention_within_documents_of_a_distribution() {
    let model_flops = |lengths: &str| {
        let set = format!("train.document_lengths={lengths}");
        let few = ["model.layers=2", "train.seq_len=8192", &set];
        crate::plan(&minimal(&few).unwrap())
            .unwrap()
            .meta
            .model_flops
            .0 as f64
    };
    let (mean, std) = (512.0f64, 512.0f64);
    let [long, short, spread] = ["8192", "512", "{ mean = 512, std = 512 }"].map(model_flops);
    let per_token = (long - short) / (8192.0 - 512.0);
    let found = 512.0 + (spread - short) / per_token;
    let expected = mean + std * std / mean;
    assert!((found / expected - 1.0).abs() < 0.01, "{found} {expected}");
}

/// Writes tokens in 16 bits.
fn write(folder: &Folder, name: &str, tokens: impl IntoIterator<Item = u16>) {
    let bytes: Vec<u8> = tokens.into_iter().flat_map(u16::to_le_bytes).collect();
    std::fs::write(folder.file(name), bytes).unwrap();
}

/// Loads the smallest scenario with these document lengths, next to its data.
fn beside(folder: &Folder, lengths: &str, sets: &[&str]) -> Result<Scenario, ScenarioError> {
    let text = format!("{MINIMAL}[train]\nseq_len = 1024\ndocument_lengths = {lengths}\n");
    let path = folder.file("mine.toml");
    std::fs::write(&path, text).unwrap();
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    scenario::load(&path, &sets)
}

/// Documents of 300, 1 and 723 tokens, then of a sequence and a half, whose parts are 1024 and 512.
/// The separator belongs to the document that it ends.
#[test]
fn lengths_of_a_file_are_those_between_separators() {
    let folder = Folder::new("documents-of-data", &[]);
    let documents = [300, 1, 723, 1536, 512];
    let tokens = documents.into_iter().flat_map(|n| {
        let words = std::iter::repeat_n(5u16, n - 1);
        words.chain([2])
    });
    write(&folder, "tokens.bin", tokens.chain([5, 5]));
    let s = beside(&folder, "{ data = \"tokens.bin\", eos_token_id = 2 }", &[]).unwrap();
    let DocumentLengths::OfData(of) = &s.train.document_lengths else {
        panic!("{:?}", s.train.document_lengths);
    };
    let parts = [300u64, 1, 723, 1024, 512, 512];
    let squares: u64 = parts.iter().map(|n| n * n).sum();
    assert_eq!(of.lengths.sequences, 3);
    assert_eq!(of.lengths.mean, 3072.0 / 6.0);
    assert_eq!(of.lengths.token_mean, squares as f64 / 3072.0);
    assert_eq!((of.dtype.name(), of.eos_token_id), ("uint16", 2));
}

/// The FLOPs of attention are the mean over the sequences of the file, which attention in each of
/// them computes.
#[test]
fn attention_costs_the_mean_of_a_files_sequences() {
    let folder = Folder::new("documents-cost", &[]);
    let mut random = crate::random::SplitMix64(3);
    let tokens: Vec<u16> = (0..200 * 1024 + 2)
        .map(|i| {
            // Half of the file has documents of about 600 tokens, half of about 60.
            let often = if i < 100 * 1024 { 600 } else { 60 };
            if random.draw().is_multiple_of(often) {
                2
            } else {
                5
            }
        })
        .collect();
    write(&folder, "tokens.bin", tokens.iter().copied());
    let flops = |lengths: &str| {
        let s = beside(&folder, lengths, &["model.layers=2"]).unwrap();
        crate::plan(&s).unwrap().meta.model_flops.0 as f64
    };
    let found = flops("{ data = \"tokens.bin\", eos_token_id = 2 }");
    let [whole, small] = [flops("[]"), flops("[4]")];
    let sequences = tokens.as_chunks::<1024>().0;
    let squares = sequences
        .iter()
        .flat_map(|s| s.split_inclusive(|t| *t == 2));
    let squares: u64 = squares.map(|d| (d.len() * d.len()) as u64).sum();
    let token_mean = squares as f64 / (sequences.len() * 1024) as f64;
    let expected = (whole - small) / (1024.0 - 4.0) * (token_mean - 4.0);
    let error = (found - small) / expected - 1.0;
    assert!(error.abs() < 0.01, "{error}");
}

#[test]
fn faults_of_a_file_are_named_where_they_are() {
    let folder = Folder::new("documents-faults", &[]);
    write(&folder, "tokens.bin", (0..3000u32).map(|i| (i % 50) as u16));
    write(&folder, "short.bin", [2; 600]);
    write(&folder, "far.bin", [60_000; 3000]);
    std::fs::write(folder.file("torn.u32"), [0; 4097]).unwrap();
    std::fs::write(folder.file("text.txt"), "words").unwrap();
    let fault = |lengths: &str| {
        let small = ["model.vocab=1000"];
        beside(&folder, lengths, &small).unwrap_err().to_string()
    };
    for (lengths, wrong, what) in [
        (
            "{ data = \"tokens.bin\", eos_token_id = 77 }",
            "77",
            "token 77 does not occur in 2048 tokens of",
        ),
        (
            "{ data = \"tokens.bin\", eos_token_id = 1000 }",
            "1000",
            "outside the vocabulary of 1000 tokens",
        ),
        (
            "{ data = \"short.bin\", eos_token_id = 2 }",
            "\"short",
            "set train.seq_len = 598 or less",
        ),
        (
            "{ data = \"far.bin\", eos_token_id = 2 }",
            "\"far",
            "token 60000 at position 0 is outside",
        ),
        (
            "{ data = \"torn.u32\", eos_token_id = 2 }",
            "\"torn",
            "4097 bytes are not a whole number of 4-byte",
        ),
        (
            "{ data = \"text.txt\", eos_token_id = 2 }",
            "\"text",
            "does not say how it stores tokens",
        ),
        (
            "{ data = \"none.bin\", eos_token_id = 2 }",
            "\"none",
            "cannot read it",
        ),
        ("{ data = \"tokens.bin\" }", "{", "need `eos_token_id`"),
        ("{ eos_token_id = 2 }", "{", "need `data`"),
        (
            "{ data = \"tokens.bin\", eos_token_id = 2, mean = 9 }",
            "9 }",
            "determines `mean`",
        ),
    ] {
        let message = fault(lengths);
        assert!(message.contains(what), "{message}");
        let column = "document_lengths = ".len() + lengths.find(wrong).unwrap() + 1;
        let place = format!("mine.toml:8:{column}:");
        assert!(message.contains(&place), "{place} {message}");
    }
}

/// Every sequence has documents of its own: their first positions and the tables of positions are
/// inputs of each micro-batch. Captured blocks, which replay fixed addresses, do not read them.
#[test]
fn documents_of_a_file_are_inputs() {
    let folder = Folder::new("documents-inputs", &[]);
    write(&folder, "tokens.bin", (0..3000u32).map(|i| (i % 50) as u16));
    let lengths = "{ data = \"tokens.bin\", eos_token_id = 7 }";
    let inputs = |lengths: &str| {
        let s = beside(&folder, lengths, &["model.layers=2", "train.micro_batch=3"]).unwrap();
        let consts = crate::tape_of(&s).unwrap().consts;
        let of = consts.into_iter().filter(|c| c.per_micro_batch);
        of.map(|c| (c.name, c.bytes.0)).collect::<Vec<_>>()
    };
    let tokens = ("tokens", 3 * 1025 * 8);
    assert_eq!(inputs("[50]"), [tokens]);
    // Three sequences of 1024 positions, and 64 pairs of dimensions of a head in float32.
    let table = 3 * 1024 * 64 * 4;
    let expected = [
        tokens,
        ("rope_cos", table),
        ("rope_sin", table),
        ("document_starts", 3 * 1024 * 8),
    ];
    assert_eq!(inputs(lengths), expected);
    let captured = beside(&folder, lengths, &["compile.cuda_graph=[\"block\"]"]);
    let message = captured.unwrap_err().to_string();
    assert!(
        message.contains("each micro-batch has documents of its own"),
        "{message}"
    );
}
