//! Steps that a calibration runs: shapes of common models, so many layers of each that arithmetic takes nearly the share of a
//! step that it takes in whole models. A GPU at its power limit is the slower in arithmetic the less else it has to do: two
//! layers below a whole vocabulary would show rates that long steps do not reach.

use crate::calibrate::steps::Variant;

/// Layers, hidden size, heads, key heads, feed-forward, vocabulary, sequence length, micro-batch.
const SHAPES: [(&str, [u64; 8]); 6] = [
    ("1b", [8, 2048, 32, 8, 8192, 128_256, 4096, 2]),
    ("8b", [4, 4096, 32, 8, 14_336, 128_256, 8192, 1]),
    ("3b", [6, 3072, 24, 8, 8192, 128_256, 4096, 2]),
    ("tiny", [4, 1024, 16, 8, 2816, 32_000, 2048, 4]),
    ("1b short", [8, 2048, 32, 8, 8192, 128_256, 2048, 1]),
    ("8b short", [4, 4096, 32, 8, 14_336, 128_256, 4096, 1]),
];

/// The smallest of them.
const TINY: usize = 3;
const NATIVE: &str = "policy = \"native\"";
const FSDP2: &str = "policy = \"fsdp2\"";
const MEGATRON: &str = "policy = \"megatron\"";

/// Name, model, variant, policy, and whether it runs on all ranks; what matters most comes first.
pub(super) fn runs() -> Vec<(String, String, Variant, &'static str, bool)> {
    let mut all = Vec::new();
    let mut add_in = |dtype: &'static str,
                      shape: usize,
                      mode: &'static str,
                      policy: &'static str,
                      sharded: bool,
                      loss: &str| {
        let (name, [layers, hidden, heads, kv, ffn, vocab, seq, batch]) = SHAPES[shape];
        let model = format!(
            "[model]\nfamily = \"llama\"\nlayers = {layers}\nhidden = {hidden}\nheads = {heads}\nkv_heads = {kv}\n\
             ffn = {ffn}\nvocab = {vocab}\nmax_seq_len = {seq}\ntie_embeddings = false\n\
             [train]\nseq_len = {seq}\nmicro_batch = {batch}\nloss = \"{loss}\"\n"
        );
        let ranks = if sharded { "all ranks" } else { "one rank" };
        let kind = policy.split('"').nth(1).unwrap_or_default();
        all.push((
            format!("{name}, {dtype}, {mode}, {kind}, {loss} loss, {ranks}"),
            model,
            (dtype, mode),
            policy,
            sharded,
        ));
    };
    let [whole, chunked] = ["materialized", "chunked"];
    let mut add =
        |shape, mode, policy, sharded, loss| add_in("bf16", shape, mode, policy, sharded, loss);
    for shape in [TINY, 0] {
        add(shape, "off", NATIVE, false, whole);
        add(shape, "regions", NATIVE, false, chunked);
    }
    // Kernels of sharding, at two sizes.
    for shape in [TINY, 0] {
        add(shape, "off", NATIVE, true, whole);
        add(shape, "off", MEGATRON, true, whole);
        add(shape, "off", FSDP2, true, whole);
    }
    add(TINY, "regions", NATIVE, false, whole);
    add(0, "regions", NATIVE, false, whole);
    for shape in [4, 1, 2, 5] {
        add(shape, "off", NATIVE, false, whole);
        add(shape, "regions", NATIVE, false, whole);
    }
    for shape in [TINY, 4] {
        add_in("f32", shape, "off", NATIVE, false, whole);
    }
    add_in("f32", 4, "regions", NATIVE, false, chunked);
    let mut add =
        |shape, mode, policy, sharded, loss| add_in("bf16", shape, mode, policy, sharded, loss);
    add(1, "off", MEGATRON, true, whole);
    for shape in [0, 1, 2] {
        if shape > 0 {
            add(shape, "regions", NATIVE, false, chunked);
        }
        add(shape, "full", NATIVE, false, whole);
    }
    all
}

/// Policies whose steps show what memory a process takes beside the engine's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Footprints {
    /// One communicator, where there are several ranks.
    pub(super) one: &'static str,
    /// Two.
    pub(super) two: &'static str,
    /// Two as well, one of them on copy engines.
    pub(super) mixed: &'static str,
    /// Two on copy engines.
    pub(super) engines: &'static str,
}

/// The model of these steps: what it runs, and the policies.
pub(super) fn footprints() -> (String, Variant, Footprints) {
    let (_, text, variant, _, _) = runs().swap_remove(0);
    let policies = Footprints {
        one: FSDP2,
        two: NATIVE,
        mixed: "policy = \"native\"\ncopy_engine_gather = true",
        engines: "policy = \"native\"\ncopy_engine_gather = true\ncopy_engine_reduce = true",
    };
    (text, variant, policies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::steps::scenario_text;

    #[test]
    fn every_run_can_be_planned() {
        for (name, model, variant, policy, sharded) in runs() {
            let ranks = if sharded { 4 } else { 1 };
            let text = scenario_text("h200-nvlink", &model, variant, policy, ranks);
            let scenario = shardlab_plan::scenario::parse("calibration", &text, &[]).expect(&name);
            shardlab_plan::plan(&scenario).expect(&name);
        }
    }
}
