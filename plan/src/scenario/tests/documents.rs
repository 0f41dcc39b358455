//! Packed sequences: lengths in a list and of a distribution.

use super::minimal;

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
