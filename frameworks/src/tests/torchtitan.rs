//! What torchtitan decides without a key, by version. Each test names the code that it follows.

use super::{DATA, eight, has, row, setting, try_text};
use crate::{Job, Lack, Options, Status};

const NEW: &str = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n";
/// Keys of versions before June 2025.
const OLD: &str =
    "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nbatch_size = 2\nseq_len = 8192\n";

fn read(text: &str, more: &str) -> Job {
    try_text("job.toml", &format!("{text}{more}"), &eight())
        .unwrap_or_else(|e| panic!("{e}\n{more}"))
}

fn checkpointing(options: &str) -> Job {
    read(NEW, &format!("[activation_checkpoint]\n{options}"))
}

/// `_apply_op_sac` counts the matmuls of a block and recomputes those with an even number.
#[test]
fn mode_selective_recomputes_every_second_matmul() {
    let job = checkpointing("mode = \"selective\"\nselective_ac_option = \"op\"\n");
    has(
        &job,
        &[
            ("train.recompute", "\"selective\""),
            ("train.recompute_nth_matmul", "2"),
            // `_grouped_mm` is in no list of torchtitan (`_get_default_save_ops`).
            (
                "train.recompute_save",
                r#"["mm", "addmm", "attention", "conv"]"#,
            ),
        ],
    );
    assert_eq!(row(&job, "activation_checkpoint.mode").0, Status::Used);
    let log = "[titan] Running with args: {'model': {'name': 'llama3', 'flavor': '8B'}, 'training': \
               {'local_batch_size': 1, 'seq_len': 8192}, 'activation_checkpoint': ";
    // Without the option since March 2026 (#2357), as classes since June 2026 (#3674).
    for options in [
        "{'mode': 'selective', 'early_stop': False}",
        "{'force_recompute_mm_shapes_by_fqns': ['moe.router.gate'], 'debug': False}",
    ] {
        let job = try_text("job.log", &format!("{log}{options}}}\n"), &eight()).unwrap();
        has(&job, &[("train.recompute_nth_matmul", "2")]);
    }
    // `ac_config` may be `None`.
    let job = try_text("job.log", &format!("{log}None}}\n"), &eight()).unwrap();
    has(&job, &[("train.recompute", "\"none\"")]);
}

/// `_apply_layer_sac` counts blocks and wraps each whose number is a multiple of the option. 2 is
/// the default in every version with TOML files (`selective_ac_option: str = "2"`).
#[test]
fn a_number_recomputes_every_nth_block() {
    let odd = r#"["layers.*1", "layers.*3", "layers.*5", "layers.*7", "layers.*9"]"#;
    let second = "mode = \"selective\"\nselective_ac_option = \"2\"\n";
    let of_two = [
        checkpointing(second),
        checkpointing("mode = \"selective\"\n"),
        read(NEW, ""),
    ];
    for mut job in of_two {
        has(
            &job,
            &[
                ("train.recompute", "\"full\""),
                ("train.recompute_layers", odd),
            ],
        );
        assert_eq!(setting(&job, "train.recompute_nth_matmul"), None);
        job.scenario(&[]).unwrap();
    }
    let every = |n: u32| {
        let text = format!("mode = \"selective\"\nselective_ac_option = \"{n}\"\n");
        setting(&checkpointing(&text), "train.recompute_layers")
    };
    assert_eq!(every(1), None);
    assert_eq!(every(5).as_deref(), Some(r#"["layers.*4", "layers.*9"]"#));
    assert_eq!(every(10).as_deref(), Some(r#"["layers.*9"]"#));
    // A model of six blocks has no seventh, and no tenth.
    let folder = tempfile::tempdir().unwrap();
    let mistral = format!("{DATA}/trainer/mistralai/Mistral-7B-v0.1/config.json");
    let config = std::fs::read_to_string(mistral).unwrap();
    let config = config.replace("\"num_hidden_layers\": 32", "\"num_hidden_layers\": 6");
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let small = Options {
        model: Some(folder.path().into()),
        ..eight()
    };
    let of_small = |n: u32| {
        let text = format!(
            "{NEW}[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"{n}\"\n"
        );
        try_text("job.toml", &text, &small).unwrap()
    };
    let three = r#"["layers.*1", "layers.*3", "layers.*5"]"#;
    has(&of_small(2), &[("train.recompute_layers", three)]);
    assert_eq!(setting(&of_small(10), "train.recompute"), None);
    let third = checkpointing("mode = \"selective\"\nselective_ac_option = \"3\"\n");
    let (status, why) = row(&third, "activation_checkpoint.selective_ac_option");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy), "{why}");
    // The option belongs to one mode.
    let full = checkpointing("mode = \"full\"\nselective_ac_option = \"op\"\n");
    has(&full, &[("train.recompute", "\"full\"")]);
    assert_eq!(setting(&full, "train.recompute_nth_matmul"), None);
    let error = try_text(
        "job.toml",
        &format!("{NEW}[activation_checkpoint]\nselective_ac_option = \"ops\"\n"),
        &eight(),
    )
    .unwrap_err();
    let expected =
        "activation_checkpoint.selective_ac_option: expected op or a number of blocks, got `ops`";
    assert_eq!(error, format!("job.toml:8:23: {expected}"));
}

/// `apply_fsdp` since 2025-07-28 (#1094): the embedding, and the last norm with the output layer,
/// which is only resharded if the policy is `always`.
#[test]
fn the_first_and_the_last_modules_are_units() {
    let units = |more: &str| {
        let job = read(NEW, more);
        (
            setting(&job, "fsdp.units"),
            setting(&job, "fsdp.reshard_after_forward"),
        )
    };
    let policy = |name: &str| {
        units(&format!(
            "[parallelism]\nfsdp_reshard_after_forward = \"{name}\"\n"
        ))
    };
    let ends = Some("\"block_and_ends\"".to_owned());
    assert_eq!(units(""), (ends.clone(), None));
    assert_eq!(policy("default"), (ends.clone(), Some("true".into())));
    assert_eq!(policy("never"), (ends, Some("false".into())));
    let each = r#"["layers.*", "tok_embeddings", "norm+output"]"#;
    assert_eq!(policy("always"), (Some(each.into()), Some("true".into())));
    let bad = format!("{NEW}[parallelism]\nfsdp_reshard_after_forward = \"sometimes\"\n");
    let error = try_text("job.toml", &bad, &eight()).unwrap_err();
    assert!(error.contains("default, always or never"), "{error}");
}

/// `apply_fsdp` before: the root owns them, and `default` keeps the last block gathered.
#[test]
fn old_versions_leave_them_to_the_root() {
    let units = |text: &str, more: &str| {
        let job = read(text, more);
        (
            setting(&job, "fsdp.units"),
            setting(&job, "fsdp.reshard_after_forward"),
        )
    };
    let auto = (None, Some("\"auto\"".to_owned()));
    assert_eq!(units(OLD, ""), auto);
    let policy = |name: &str| format!("[parallelism]\nfsdp_reshard_after_forward = \"{name}\"\n");
    assert_eq!(units(OLD, &policy("default")), auto);
    assert_eq!(units(OLD, &policy("always")), (None, Some("true".into())));
    assert_eq!(units(NEW, "compile = true\n"), auto);
    let pipeline = "[experimental]\npipeline_parallel_degree = 1\n";
    assert_eq!(units(NEW, pipeline), auto);
}

/// `apply_compile` runs if `"model" in compile.components`, and `build_cross_entropy_loss` compiles
/// the loss if `"loss"` is. Both are by default.
#[test]
fn components_decide_what_is_compiled() {
    let parts = |components: &str| {
        let job = read(NEW, &format!("[compile]\nenable = true\n{components}"));
        let [mode, loss] = ["compile.mode", "compile.loss"].map(|key| setting(&job, key));
        (mode, loss, job)
    };
    let (blocks, on) = (Some("\"blocks\"".to_owned()), Some("true".to_owned()));
    for both in ["", "components = [\"model\", \"loss\"]\n"] {
        let (mode, loss, _) = parts(both);
        assert_eq!((mode, loss), (blocks.clone(), on.clone()), "{both}");
    }
    let (mode, loss, job) = parts("components = [\"model\"]\n");
    assert_eq!((mode, loss), (blocks, None));
    assert_eq!(row(&job, "compile.components").1, "the loss is eager");
    let (mode, loss, job) = parts("components = [\"loss\"]\n");
    assert_eq!((mode, loss), (None, on));
    assert_eq!(row(&job, "compile.enable").1, "no block is compiled");
    // A loss in chunks is one kernel per chunk anyway.
    let chunks = "components = [\"model\", \"loss\"]\n[loss]\nnum_chunks = 8\n";
    assert_eq!(parts(chunks).1, None);
}

/// Versions with `training.batch_size` ran the loss eagerly, as those of the published rows of
/// December 2024 and March 2025 did.
#[test]
fn old_versions_do_not_compile_the_loss() {
    let job = read(OLD, "compile = true\n");
    assert_eq!(setting(&job, "compile.mode").as_deref(), Some("\"blocks\""));
    assert_eq!(setting(&job, "compile.loss"), None);
}

/// `ChunkedLossWrapper` splits each sequence into `num_chunks` parts and runs backward on each.
#[test]
fn a_number_of_chunks_divides_the_micro_batch() {
    let log = "[titan] Running with args: {'model': {'name': 'llama3', 'flavor': '8B'}, 'training': \
               {'local_batch_size': 2, 'seq_len': 8192}, 'loss': {'num_chunks': 8}}\n";
    let job = try_text("job.log", log, &eight()).unwrap();
    has(
        &job,
        &[
            ("train.loss", "\"chunked\""),
            ("train.loss_chunk_tokens", "2048"),
        ],
    );
}

#[test]
fn deterministic_training_is_read_in_both_sections() {
    for text in ["deterministic = true\n", "[debug]\ndeterministic = true\n"] {
        has(&read(NEW, text), &[("precision.deterministic", "true")]);
    }
}

/// `CheckpointWrapper` passes `early_stop=False` since August 2025, so recompute runs to the end of
/// a block.
#[test]
fn recompute_without_early_stop_is_named() {
    let job = checkpointing("mode = \"full\"\nearly_stop = false\n");
    let (status, why) = row(&job, "activation_checkpoint.early_stop");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy), "{why}");
    let job = checkpointing("mode = \"full\"\nearly_stop = true\n");
    let (status, _) = row(&job, "activation_checkpoint.early_stop");
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing));
}
