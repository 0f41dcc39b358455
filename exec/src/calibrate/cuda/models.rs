//! Models whose steps a calibration runs: shapes of common models, with enough layers that matmuls
//! and attention have nearly the same share of a step as in whole models. At its power limit, a GPU
//! slows arithmetic down as its share grows, so steps with two layers and a full vocabulary would
//! have rates that steps of whole models do not reach.

use crate::calibrate::steps::Variant;
use shardlab_plan::ir::ScaleMode;

/// Layers, hidden size, heads, key heads, feed-forward, vocabulary, sequence length, micro-batch.
const SHAPES: [(&str, [u64; 8]); 6] = [
    ("1b", [8, 2048, 32, 8, 8192, 128_256, 4096, 2]),
    ("8b", [4, 4096, 32, 8, 14_336, 128_256, 8192, 1]),
    ("3b", [6, 3072, 24, 8, 8192, 128_256, 4096, 2]),
    ("tiny", [4, 1024, 16, 8, 2816, 32_000, 2048, 4]),
    ("1b short", [8, 2048, 32, 8, 8192, 128_256, 2048, 1]),
    ("8b short", [4, 4096, 32, 8, 14_336, 128_256, 4096, 1]),
];

/// Element type, layers, channels, height and width of images, micro-batch.
const IMAGES: [(&str, &str, [u64; 4]); 2] = [
    ("images", "bf16", [8, 256, 64, 16]),
    ("small images", "f32", [8, 64, 32, 64]),
];

/// The smallest transformer.
const TINY: usize = 3;
const NATIVE: &str = "policy = \"native\"";
const FSDP2: &str = "policy = \"fsdp2\"";
const MEGATRON: &str = "policy = \"megatron\"";

/// Steps of a model.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) model: String,
    pub(super) variant: Variant,
    pub(super) policy: &'static str,
    /// Further keys.
    pub(super) sets: Vec<String>,
    /// Whether it runs on all ranks.
    pub(super) sharded: bool,
}

/// Returns the steps of a decoder.
fn tokens(
    (dtype, mode): Variant,
    shape: usize,
    policy: &'static str,
    sharded: bool,
    loss: &str,
) -> Run {
    let (name, [layers, hidden, heads, kv, ffn, vocab, seq, batch]) = SHAPES[shape];
    let model = format!(
        "[model]\nfamily = \"llama\"\nlayers = {layers}\nhidden = {hidden}\nheads = {heads}\nkv_heads = {kv}\n\
         ffn = {ffn}\nvocab = {vocab}\nmax_seq_len = {seq}\ntie_embeddings = false\n\
         [train]\nseq_len = {seq}\nmicro_batch = {batch}\nloss = \"{loss}\"\n"
    );
    let ranks = if sharded { "all ranks" } else { "one rank" };
    let kind = policy.split('"').nth(1).unwrap_or_default();
    Run {
        name: format!("{name}, {dtype}, {mode}, {kind}, {loss} loss, {ranks}"),
        model,
        variant: (dtype, mode),
        policy,
        sets: Vec::new(),
        sharded,
    }
}

/// Returns the steps of a decoder on one rank whose linear layers run in 8 bits.
fn float8(mode: &'static str, shape: usize, scaling: ScaleMode) -> Run {
    let run = tokens(("bf16", mode), shape, NATIVE, false, "chunked");
    Run {
        name: format!("{}, {} in 8 bits", run.name, scaling.name()),
        sets: vec![format!("precision.float8_recipe={}", scaling.name())],
        ..run
    }
}

/// Returns the steps of convolutions.
fn images((name, dtype, [layers, channels, side, batch]): (&str, &'static str, [u64; 4])) -> Run {
    let model = format!(
        "[model]\nfamily = \"cnn\"\nlayers = {layers}\nchannels = {channels}\nheight = {side}\nwidth = {side}\n\
         [train]\nmicro_batch = {batch}\n"
    );
    Run {
        name: format!("{name}, {dtype}, one rank"),
        model,
        variant: (dtype, "off"),
        policy: NATIVE,
        sets: Vec::new(),
        sharded: false,
    }
}

/// Returns all steps, most important first. `scalings` are the recipes of 8-bit matmuls that the
/// GPU supports.
pub(super) fn runs(scalings: &[ScaleMode]) -> Vec<Run> {
    let [whole, chunked] = ["materialized", "chunked"];
    let one = |mode, shape, loss| tokens(("bf16", mode), shape, NATIVE, false, loss);
    let all_ranks = |shape, policy| tokens(("bf16", "off"), shape, policy, true, whole);
    let in_float8 = |mode, shape, scalings: &[ScaleMode]| -> Vec<Run> {
        let of = |&scaling: &ScaleMode| float8(mode, shape, scaling);
        scalings.iter().map(of).collect()
    };
    let f32s = |mode, shape, loss| tokens(("f32", mode), shape, NATIVE, false, loss);
    let mut all = Vec::new();
    for shape in [TINY, 0] {
        all.push(one("off", shape, whole));
        all.push(one("regions", shape, chunked));
    }
    // Kernels of sharding, at two sizes.
    for shape in [TINY, 0] {
        all.extend([NATIVE, MEGATRON, FSDP2].map(|policy| all_ranks(shape, policy)));
    }
    all.extend([TINY, 0].map(|shape| one("regions", shape, whole)));
    // In two modes, because the share of arithmetic in a step is different in each.
    all.extend(in_float8("regions", 0, scalings));
    all.extend(in_float8("off", 0, &scalings[..scalings.len().min(1)]));
    all.extend(IMAGES.map(images));
    for shape in [4, 1, 2, 5] {
        all.extend(["off", "regions"].map(|mode| one(mode, shape, whole)));
        if [1, 2].contains(&shape) {
            all.extend(in_float8(
                "regions",
                shape,
                &scalings[..scalings.len().min(1)],
            ));
        }
    }
    all.extend([TINY, 4].map(|shape| f32s("off", shape, whole)));
    all.push(f32s("regions", 4, chunked));
    all.push(all_ranks(1, MEGATRON));
    for shape in [0, 1, 2] {
        if shape > 0 {
            all.push(one("regions", shape, chunked));
        }
        all.push(one("full", shape, whole));
    }
    all
}

/// Policies whose steps show the memory of a process that the engine does not allocate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Footprints {
    /// One communicator, if there are several ranks.
    pub(super) one: &'static str,
    /// Two communicators.
    pub(super) two: &'static str,
    /// Two communicators, one of them on copy engines.
    pub(super) mixed: &'static str,
    /// Two communicators on copy engines.
    pub(super) engines: &'static str,
}

/// Returns the model of these steps, its variant, and the policies.
pub(super) fn footprints() -> (String, Variant, Footprints) {
    let Run { model, variant, .. } = runs(&[]).swap_remove(0);
    let policies = Footprints {
        one: FSDP2,
        two: NATIVE,
        mixed: "policy = \"native\"\ncopy_engine_gather = true",
        engines: "policy = \"native\"\ncopy_engine_gather = true\ncopy_engine_reduce = true",
    };
    (model, variant, policies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::steps::scenario_text;
    use shardlab_plan::ir::Kernel;
    use std::collections::BTreeMap;

    const ALL_SCALINGS: [ScaleMode; 3] = [
        ScaleMode::Tensorwise,
        ScaleMode::Rowwise,
        ScaleMode::Blockwise,
    ];

    /// A GPU without 8-bit matmuls runs none of them. The slope of the power limit needs the same
    /// 8-bit matmuls in steps with different shares.
    #[test]
    fn matmuls_in_8_bits_are_run_in_several_modes() {
        let eight = |run: &&Run| !run.sets.is_empty();
        assert_eq!(runs(&[]).iter().filter(eight).count(), 0);
        let mut seen: BTreeMap<_, Vec<&str>> = BTreeMap::new();
        let all = runs(&ALL_SCALINGS);
        for run in all.iter().filter(eight) {
            let text = scenario_text("h200-nvlink", &run.model, run.variant, run.policy, 1);
            let scenario = shardlab_plan::scenario::parse("calibration", &text, &run.sets).unwrap();
            let program = shardlab_plan::plan(&scenario).unwrap();
            let mut kinds: Vec<_> = program
                .kernels
                .iter()
                .filter_map(Kernel::float8_gemm)
                .collect();
            kinds.sort_unstable();
            kinds.dedup();
            for kind in kinds {
                seen.entry(kind).or_default().push(run.variant.1);
            }
        }
        for scaling in ALL_SCALINGS {
            for fast_accum in [false, true] {
                let kind = shardlab_plan::ir::Float8Gemm {
                    scaling,
                    fast_accum,
                };
                let Some(modes) = seen.get(&kind) else {
                    assert!(fast_accum && scaling == ScaleMode::Blockwise, "{kind:?}");
                    continue;
                };
                assert!(modes.contains(&"regions"), "{kind:?}");
                let both = modes.contains(&"off");
                assert_eq!(both, scaling == ScaleMode::Tensorwise, "{kind:?}");
            }
        }
    }

    #[test]
    fn every_run_can_be_planned() {
        for run in runs(&ALL_SCALINGS) {
            let ranks = if run.sharded { 4 } else { 1 };
            let text = scenario_text("h200-nvlink", &run.model, run.variant, run.policy, ranks);
            let scenario = shardlab_plan::scenario::parse("calibration", &text, &run.sets);
            shardlab_plan::plan(&scenario.expect(&run.name)).expect(&run.name);
        }
    }
}
