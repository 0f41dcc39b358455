//! Audio encoders and audio towers, by their `config.json`.

use super::huggingface::parameters;
use super::read_config as read;
use crate::config::Scenario;
use crate::graph::Act;
use crate::ir::OpKind;
use crate::ops::Operands;

/// Returns the FLOPs of the matmuls, convolutions and attention of forward: what torch's
/// `FlopCounterMode` counts.
fn forward_flops(s: &Scenario) -> u64 {
    let of = crate::models::graph(s);
    let counted = |kind: &OpKind| {
        matches!(
            kind,
            OpKind::Gemm(_)
                | OpKind::BatchedGemm
                | OpKind::Conv1d(_)
                | OpKind::Conv2d(_)
                | OpKind::Attention(_)
                | OpKind::FlexAttention(_)
                | OpKind::BiasedAttention(_)
        )
    };
    let flops = of.graph.ops.iter().map(|op| match &op.act {
        Act::Compute(kind) if counted(kind) => {
            let at = Operands::new(&of.graph, op);
            // torch does not count the addition of a bias.
            let bias = matches!(kind, OpKind::Gemm(gemm) if gemm.bias);
            kind.def().flops(&at) - u64::from(bias) * at.output(0).numel()
        }
        _ => 0,
    });
    flops.sum()
}

/// Numbers that `FlopCounterMode` counts in the forward of transformers' classes (5.24), of two
/// sounds of as many rows.
#[test]
fn flops_of_encoders_of_sounds_are_those_of_transformers() {
    for (name, config, rows, counted) in [
        ("parakeet", config!("tiny--parakeet_ctc"), 125, 145_274_848),
        (
            "parakeet-keys",
            config!("tiny--parakeet_ctc-keys"),
            250,
            384_766_848,
        ),
        ("w2v-bert", config!("tiny--wav2vec2-bert"), 499, 900_084_224),
        (
            "w2v-bert-keys",
            config!("tiny--wav2vec2-bert-keys"),
            499,
            1_116_202_496,
        ),
        (
            "w2v-conformer",
            config!("tiny--wav2vec2-conformer"),
            499,
            1_121_312_896,
        ),
        (
            "w2v-conformer-keys",
            config!("tiny--wav2vec2-conformer-keys"),
            499,
            714_728_320,
        ),
    ] {
        let s = read(name, config, &["train.micro_batch=2"]).unwrap();
        assert_eq!(s.model.max_seq_len, rows, "{name}");
        assert_eq!(forward_flops(&s), counted, "{name}");
        // Backward takes twice as much.
        let model = crate::models::graph(&s).model_flops.0;
        assert_eq!(model, 3 * counted, "{name}");
    }
}

/// The same for towers with their projectors, of one sound of 3,000 frames: what a model has more
/// with the tower than without.
#[test]
fn flops_of_towers_of_sounds_are_those_of_transformers() {
    for (name, config, tokens, counted) in [
        (
            "gemma4-sound",
            config!("tiny--gemma4-sound"),
            750,
            270_093_120,
        ),
        (
            "gemma4-only-sound",
            config!("tiny--gemma4-only-sound"),
            750,
            265_637_184,
        ),
        (
            "omni",
            config!("tiny--qwen2_5_omni_thinker"),
            750,
            141_120_000,
        ),
        (
            "omni3",
            config!("tiny--qwen3_omni_moe_thinker"),
            390,
            55_719_648,
        ),
        ("granite", config!("tiny--granite_speech"), 300, 799_788_672),
        (
            "granite-keys",
            config!("tiny--granite_speech-keys"),
            375,
            394_735_872,
        ),
    ] {
        let s = read(name, config, &["train.micro_batch=1"]).unwrap();
        let mut without = s.clone();
        let options = &mut without.model.options;
        let tower = options
            .context
            .audio
            .take()
            .or_else(|| options.context.vision.take());
        let tower = tower.unwrap();
        assert_eq!(tower.tokens(), tokens, "{name}");
        // The class computes the first attention of learned rows, and the queries of the second,
        // once for all windows: of 3 rows of width 32. The plan does for each window.
        let again = match tower.latents.window {
            0 => 0,
            _ => (tower.windows() - 1) * (5 * 2 * 3 * 32 * 32 + 4 * 3 * 3 * 32),
        };
        let counted = counted + again;
        let more = forward_flops(&s) - forward_flops(&without);
        assert_eq!(more, counted, "{name}");
        // With rows that are not trained, gradients of frames do not count: those of the first
        // convolution, of 3 frames, 10 bands and 48 channels.
        let of_frames = match tower.unused_rows {
            0 => 0,
            _ => 2 * 3000 * 3 * 10 * 48,
        };
        let model = |s: &Scenario| crate::models::graph(s).model_flops.0;
        let more = model(&s) - model(&without);
        // Learned rows count as if they were weights.
        let learned = 6 * tower.latents.count * tower.latents.count * tower.latents.width;
        assert_eq!(more, 3 * counted - of_frames + learned, "{name}");
    }
}

/// Values that would make another model than the one that is planned, with the reason.
#[test]
fn what_encoders_of_sounds_cannot_express_is_refused() {
    for (n, (config, from, to, why)) in [
        (
            config!("tiny--parakeet_ctc"),
            "\"subsampling_conv_kernel_size\": 3",
            "\"subsampling_conv_kernel_size\": 5",
            "`encoder_config.subsampling_conv_kernel_size` must be 3, not 5",
        ),
        (
            config!("tiny--parakeet_ctc"),
            "\"subsampling_factor\": 8",
            "\"subsampling_factor\": 6",
            "`encoder_config.subsampling_factor` must be a power of 2, not 6",
        ),
        (
            config!("tiny--wav2vec2-bert"),
            "\"add_adapter\": false",
            "\"add_adapter\": true",
            "`add_adapter` must be false",
        ),
        (
            config!("tiny--wav2vec2-bert"),
            "\"position_embeddings_type\": \"relative_key\"",
            "\"position_embeddings_type\": \"alibi\"",
            "`position_embeddings_type` \"alibi\" is not known",
        ),
        (
            config!("tiny--qwen2_5_omni_thinker"),
            "\"output_dim\": 64",
            "\"output_dim\": 60",
            "`audio_config.output_dim` (60) must be `text_config.hidden_size` (64)",
        ),
        (
            config!("tiny--granite_speech"),
            "\"dim_head\": 12",
            "\"dim_head\": 16",
            "`encoder_config.dim_head` (16) must be 12",
        ),
        (
            config!("tiny--granite_speech"),
            "\"encoder_hidden_size\": 48",
            "\"encoder_hidden_size\": 40",
            "`projector_config.encoder_hidden_size` (40) must be `encoder_config.hidden_dim` (48)",
        ),
        (
            config!("tiny--deberta"),
            "\"p2c\"",
            "\"c2p\"",
            "`pos_att_type` must be c2p and p2c",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        read(&format!("sounds-whole-{n}"), config, &[]).unwrap();
        let changed = config.replace(from, to);
        assert_ne!(changed, config, "{from}");
        let message = read(&format!("sounds-changed-{n}"), &changed, &[]);
        let message = message.unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
    }
}

/// Of a model that also speaks, the part that listens and writes is planned.
#[test]
fn the_part_that_listens_is_planned_alone() {
    let thinker = config!("tiny--qwen2_5_omni_thinker");
    let known = parameters(&read("thinker", thinker, &[]).unwrap());
    let whole = format!(
        "{{\"model_type\": \"qwen2_5_omni\", \"thinker_config\": {thinker}, \"talker_config\": {{}}}}"
    );
    let message = read("speaks", &whole, &[]).unwrap_err().to_string();
    assert!(message.contains("a model that speaks"), "{message}");
    let asked = "qwen2_5_omni_thinker";
    assert!(
        message.contains(&format!("--as {asked} plans it")),
        "{message}"
    );
    let s = read("listens", &whole, &[&format!("model.model_type={asked}")]).unwrap();
    assert_eq!(parameters(&s), known);
    assert!(s.model.options.context.vision.is_some() && s.model.options.context.audio.is_some());
}

/// Rows of both towers precede a text.
#[test]
fn the_second_tower_needs_room_and_the_first_one() {
    let omni = config!("tiny--qwen2_5_omni_thinker");
    let s = read("both", omni, &[]).unwrap();
    let towers = s.model.options.context.towers();
    let tokens: Vec<u64> = towers.map(crate::config::Vision::tokens).collect();
    assert_eq!(tokens, [256, 750]);
    let short = read("short", omni, &["train.seq_len=1006"]).unwrap_err();
    let message = short.to_string();
    assert!(message.contains("and the 750 of a sound"), "{message}");
    read("long", omni, &["train.seq_len=1007"]).unwrap();
    let llama = config!("tiny--llama");
    let alone = read("alone", llama, &["model.audio={ layers = 2 }"]);
    let message = alone.unwrap_err().to_string();
    assert!(message.contains("it needs `vision`"), "{message}");
}
