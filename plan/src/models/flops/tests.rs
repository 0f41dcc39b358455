use super::*;
use crate::models::declare;
use crate::scenario;

/// Returns the model FLOPs of a sequence of 32 tokens.
fn flops_of(model: &str) -> u64 {
    let text = format!(
        "[model]\n{model}\n[train]\nseq_len = 32\nmicro_batch = 1\n\
         [mesh]\nhardware = \"h100-80\"\ndp_shard = 1\n"
    );
    let s = scenario::parse("test", &text, &[]).unwrap();
    let tree = declare(&s, s.model.layers).tree;
    model_flops(&s, &tree, &Backward::whole(&tree)).0.0
}

/// Returns the key of `[model]` for a file of `tests/data/configs`.
fn config(name: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/configs");
    format!("preset = \"{root}/{name}.json\"")
}

/// OPT projects narrow embeddings to the width of the model and back. Both projections count, as
/// does the head, and the table of tokens does not.
#[test]
fn model_flops_count_projections_of_embeddings() {
    let (d, narrow, ffn, layers, vocab, tokens) = (64, 24, 96, 3, 256, 32);
    let matmuls = layers * (4 * d * d + 2 * d * ffn) + 2 * d * narrow + vocab * narrow;
    let attention = 3 * layers * 2 * d * tokens * tokens;
    let opt = flops_of(&config("tiny--opt-keys"));
    assert_eq!(opt, 6 * tokens * matmuls + attention);
}

/// DeBERTa looks up all rows of its table of relative positions.
#[test]
fn model_flops_do_not_count_tables_of_relative_positions() {
    let (d, ffn, layers, vocab, tokens) = (64, 96, 3, 256, 32);
    // The last ones are the layer before the head, and the head.
    let matmuls = layers * (4 * d * d + 2 * d * ffn) + d * d + vocab * d;
    let attention = 3 * layers * 4 * d * tokens * tokens;
    let deberta = flops_of(&config("tiny--deberta-v2"));
    assert_eq!(deberta, 6 * tokens * matmuls + attention);
}

/// T5 looks up its biases, too.
#[test]
fn model_flops_do_not_count_tables_of_relative_biases() {
    let with = |buckets: u64| {
        flops_of(&format!(
            "{}\nrelative_buckets = {buckets}",
            config("tiny--t5")
        ))
    };
    assert_eq!(with(32), with(64));
}
