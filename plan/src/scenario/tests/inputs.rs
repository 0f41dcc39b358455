//! Types with encoders of tokens, images or sounds: their windows and FLOPs, and what is refused.

use super::read_config as read;
use crate::config::Sound;

/// Values of files that would make another model than the one that is planned, with the reason.
#[test]
fn what_encoders_cannot_express_is_refused() {
    let t5gemma = config!("tiny--t5gemma");
    let led = config!("tiny--led");
    let wav2vec2 = config!("tiny--wav2vec2");
    let roformer = config!("tiny--roformer");
    for (n, (config, from, to, why)) in [
        (
            t5gemma,
            "\"vocab_size\": 256\n },\n \"dropout_rate\"",
            "\"vocab_size\": 300\n },\n \"dropout_rate\"",
            "`encoder.vocab_size` and `decoder.vocab_size` must be equal",
        ),
        (
            led,
            "  16,\n  16,\n  16\n",
            "  16,\n  32,\n  16\n",
            "`attention_window` must be one number",
        ),
        (
            config!("tiny--longt5"),
            "\"encoder_attention_type\": \"local\"",
            "\"encoder_attention_type\": \"global\"",
            "`encoder_attention_type` must be local or transient-global",
        ),
        (
            config!("tiny--mvp"),
            "\"use_prompt\": false",
            "\"use_prompt\": true",
            "`use_prompt` must be false",
        ),
        (
            wav2vec2,
            "Wav2Vec2ForCTC",
            "Wav2Vec2ForSequenceClassification",
            "the output layer of Wav2Vec2ForSequenceClassification is not planned",
        ),
        (
            wav2vec2,
            "Wav2Vec2ForCTC",
            "Wav2Vec2ForPreTraining",
            "the output layer of Wav2Vec2ForPreTraining is not known",
        ),
        (
            wav2vec2,
            "\"feat_extract_norm\": \"group\"",
            "\"feat_extract_norm\": \"batch\"",
            "`feat_extract_norm` must be group or layer",
        ),
        (
            config!("tiny--vit_mae"),
            "\"mask_ratio\": 0.75",
            "\"mask_ratio\": 1.0",
            "`mask_ratio` must be below 1",
        ),
        (
            roformer,
            "\"rotary_value\": false",
            "\"rotary_value\": true",
            "`rotary_value` must be false",
        ),
        (
            config!("tiny--longcat_flash"),
            "\"num_layers\": 3",
            "\"blocks\": 3",
            "`num_layers` is missing",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let changed = config.replace(from, to);
        assert_ne!(changed, config, "{why}");
        let error = read(&format!("inputs-{n}"), &changed, &[]).unwrap_err();
        assert!(error.to_string().contains(why), "{why}: {error}");
    }
}

/// LongT5's encoder sees 15 positions to each side, and a sum of every eight positions.
#[test]
fn sums_of_positions_widen_the_window_of_an_encoder() {
    let s = read(
        "longt5",
        config!("tiny--longt5-keys"),
        &["train.seq_len=128"],
    )
    .unwrap();
    let encoder = s.model.text_encoder().unwrap();
    // 16 sums, half of them on each side.
    assert_eq!(encoder.window(0, 128), Some(16 + 8));
    assert_eq!(s.model.window(0, 128), None);
    let short = read(
        "longt5-short",
        config!("tiny--longt5-keys"),
        &["train.seq_len=4"],
    );
    let error = short.unwrap_err().to_string();
    assert!(error.contains("a sum stands for 8 positions"), "{error}");
}

/// The samples of ten seconds make as many rows as `_get_feat_extract_output_lengths` of
/// transformers says.
#[test]
fn convolutions_over_samples_make_the_rows_of_a_sound() {
    let of = Sound::default();
    let positions = of.positions(499);
    let mut rows = positions[0];
    for (kernel, stride) in of.kernels.iter().zip(&of.strides) {
        rows = (rows - kernel) / stride + 1;
    }
    assert_eq!(rows, 499);
    assert!((159_600..=160_000).contains(&positions[0]), "{positions:?}");
}

/// Each convolution counts for the positions that it makes, that of positions with its groups.
#[test]
fn model_flops_of_sounds_count_the_positions_of_each_convolution() {
    let sets = ["train.micro_batch=1", "model.max_seq_len=40"];
    let s = read("wav2vec2-flops", config!("tiny--wav2vec2"), &sets).unwrap();
    // Kernels of 10, 3 and 2 with strides of 5, 2 and 2, backward from 40 rows.
    let made = [161, 80, 40];
    let convolutions = 16 * 10 * made[0] + 16 * 16 * 3 * made[1] + 24 * 16 * 2 * made[2];
    let rows = 40;
    let projection = 64 * 24 * rows;
    let places = 64 * (64 / 4) * 8 * rows;
    let blocks = 3 * (4 * 64 * 64 + 2 * 64 * 96) * rows;
    let head = 20 * 64 * rows;
    let attention = 3 * 4 * rows * rows * 64;
    let flops = 6 * (convolutions + projection + places + blocks + head) + 3 * attention;
    assert_eq!(crate::models::graph(&s).model_flops.0, flops);
}

/// The class of a language model takes the file of the whole, and has no tower.
#[test]
fn the_class_of_a_language_model_has_no_tower() {
    let whole = config!("tiny--llava");
    let text = whole.replace("LlavaForConditionalGeneration", "LlamaForCausalLM");
    assert_ne!(text, whole);
    let s = read("llava-text", &text, &[]).unwrap();
    assert!(s.model.options.context.vision.is_none());
    let (_, params) = crate::models::testing::modules_and_params(&s);
    let found: u64 = params.iter().map(|p| p.numel()).sum();
    // Embedding and head of 256 tokens, and three blocks of width 64 with two heads of keys.
    let block = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96 + 2 * 64;
    assert_eq!(found, 2 * 256 * 64 + 3 * block + 64);
}
