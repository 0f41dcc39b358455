//! Compares saved tensors and operators with those of transformers' layers, as recorded in
//! `tests/data/transformers/saved.jsonl` by `saved.py`.

use crate::compile::tape::{Tape, TapeOp};
use crate::config::{Scenario, Units};
use crate::ir::{DType, StorageRole};
use crate::policies::tape_of;
use crate::scenario;
use serde::Deserialize;
use std::collections::BTreeMap;

/// What saves other tensors than are planned, with the reason.
const SAVES_OTHERS: &[(&str, &str)] = &[
    (
        "codegen eager",
        "rotates in float32, a table for each of queries and keys",
    ),
    (
        "deberta-v2 eager",
        "biases of the scores per sample, from matmuls of queries and keys",
    ),
    (
        "falcon-new sdpa",
        "repeats keys and values before it rotates",
    ),
    (
        "gpt_neo eager",
        "selects scores by a mask of bytes, without a scale",
    ),
    ("gptj eager", "a table for each of queries and keys"),
    ("gptj-2 eager", "a table for each of queries and keys"),
    ("t5 eager", "keeps the last matmul of layers in float32"),
    ("t5 sdpa", "keeps the last matmul of layers in float32"),
    ("t5-2 eager", "keeps the last matmul of layers in float32"),
    ("t5-2 sdpa", "keeps the last matmul of layers in float32"),
    (
        "xglm eager",
        "keeps scores for their maximum with the lowest number, scales queries",
    ),
];

/// What launches other kernels than are planned, with the reason.
const LAUNCHES_OTHERS: &[(&str, &str)] = &[
    ("falcon eager", "takes keys and values by index"),
    ("falcon sdpa", "takes keys and values by index"),
    ("falcon-2 eager", "takes keys and values by index"),
    ("falcon-2 sdpa", "takes keys and values by index"),
    (
        "falcon-new eager",
        "repeats keys and values before it rotates",
    ),
    ("bloom eager", "GELU in nine operations, scores by baddbmm"),
    (
        "gpt_bigcode eager",
        "one split for queries, keys and values",
    ),
    ("gpt_bigcode sdpa", "one split for queries, keys and values"),
    (
        "modernbert eager",
        "rotates in float32, one split for queries, keys and values",
    ),
    (
        "modernbert sdpa",
        "rotates in float32, one split for queries, keys and values",
    ),
    ("mpnet eager", "adds position biases in place"),
    ("mpt eager", "one split for queries, keys and values"),
    ("opt eager", "scales queries"),
    ("opt sdpa", "scales queries"),
    ("opt-2 eager", "scales queries"),
    ("opt-2 sdpa", "scales queries"),
    ("persimmon eager", "selects queries, keys and values"),
    ("persimmon sdpa", "selects queries, keys and values"),
    (
        "phi3 eager",
        "empty slices of queries and keys have gradients",
    ),
    (
        "phi3 sdpa",
        "empty slices of queries and keys have gradients",
    ),
];

/// Types that are not planned.
const REFUSED: &[&str] = &[];

/// One line of `saved.jsonl`.
#[derive(Deserialize)]
struct Row {
    config: String,
    attention: String,
    bfloat16: i64,
    float32: i64,
    bool: i64,
    forward: BTreeMap<String, i64>,
    backward: BTreeMap<String, i64>,
}

/// Returns the lines of `saved.jsonl`.
fn rows() -> Vec<Row> {
    let text = include_str!("../../../../tests/data/transformers/saved.jsonl");
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.collect()
}

/// Returns the scenario of a model of `configs`, or why it is refused. The whole model is one unit,
/// so that nothing casts the inputs of layers, as in `saved.py`.
fn scenario_of(config: &str, layers: u32, more: &str) -> Result<Scenario, String> {
    let root = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/transformers/configs"
    );
    let text = format!(
        "[model]\npreset = \"{root}/{config}.json\"\nimplementation = \"transformers\"\nlayers = {layers}\n\
         {more}[train]\nseq_len = 64\nmicro_batch = 2\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 2\n\
         [fsdp]\npolicy = \"fsdp2\"\nunits = \"root\"\n"
    );
    scenario::parse("test", &text, &[]).map_err(|error| error.to_string())
}

/// Returns the tape of a model of `configs`.
fn tape(config: &str, layers: u32, more: &str) -> Tape {
    tape_of(&scenario_of(config, layers, more).unwrap()).unwrap()
}

/// Sums the saved bytes of a type.
fn saved(t: &Tape, dtype: DType) -> u64 {
    let of = |s: &&crate::ir::Storage| s.role == StorageRole::Saved && s.dtype == dtype;
    t.storages.iter().filter(of).map(|s| s.bytes.0).sum()
}

/// Counts launches by the operator of PyTorch that they belong to.
fn launches(t: &Tape, ops: &[TapeOp]) -> BTreeMap<&'static str, i64> {
    let mut out = BTreeMap::new();
    for op in ops {
        if let TapeOp::Launch { kernel, .. } = op
            && let Some(name) = operator(&t.kernels[kernel.index()].name)
        {
            *out.entry(name).or_insert(0) += 1;
        }
    }
    out
}

/// Names operators of both sides alike; `None` for what has no kernel of its own or is drawn on the
/// host.
fn operator(name: &str) -> Option<&'static str> {
    Some(match name {
        "add" | "shift" => "add",
        "sub" => "sub",
        "mul" | "scale" | "div" => "mul",
        "row_sum" | "sum_leading" | "sum" | "mean" => "sum",
        "copy" | "cast" | "_to_copy" | "clone" | "where" => "copy",
        "silu" | "gelu" | "gelu_erf" | "relu" => "activation",
        "silu_backward" | "gelu_backward" | "gelu_erf_backward" | "relu_backward"
        | "threshold_backward" => "activation_backward",
        "tanh" | "softcap" => "tanh",
        "tanh_backward" | "softcap_backward" => "tanh_backward",
        "mm" | "addmm" => "mm",
        "bmm" => "bmm",
        "cat" | "stack" => "cat",
        "neg" => "neg",
        "pow" => "pow",
        "rsqrt" => "rsqrt",
        "fill" => "fill",
        "softmax" | "_softmax" => "softmax",
        "softmax_backward" | "_softmax_backward_data" => "softmax_backward",
        "dropout" | "native_dropout" => "dropout",
        "dropout_backward" | "native_dropout_backward" => "dropout_backward",
        "layer_norm" | "native_layer_norm" => "layer_norm",
        "layer_norm_backward" | "native_layer_norm_backward" => "layer_norm_backward",
        // One operator of PyTorch launches both kernels.
        "layer_norm_param_backward" => return None,
        // Whether a layer is skipped (LayerDrop).
        "rand" | "lt" => return None,
        n if n.contains("attention") && n.contains("backward") => "attention_backward",
        n if n.contains("attention") => "attention",
        // What the ends of a model have, which cancels.
        _ => "other",
    })
}

/// Counts the operators of PyTorch by the names of [`operator`].
fn listed(counts: &BTreeMap<String, i64>) -> BTreeMap<&'static str, i64> {
    let mut out = BTreeMap::new();
    for (name, n) in counts {
        // The backward of a slice fills and copies.
        let names: &[&str] = match name.as_str() {
            "slice_backward" => &["fill", "copy"],
            name => &[name],
        };
        for name in names.iter().filter_map(|name| operator(name)) {
            *out.entry(name).or_insert(0) += n;
        }
    }
    out
}

/// Returns what the third layer adds to a count.
fn more<T: Ord>(mut three: BTreeMap<T, i64>, two: BTreeMap<T, i64>) -> BTreeMap<T, i64> {
    for (key, n) in two {
        *three.entry(key).or_insert(0) -= n;
    }
    three.retain(|_, n| *n != 0);
    three
}

/// Returns what the ops that a CPU ran launch on GPUs: there, the backward of a softmax multiplies
/// in a kernel of its own.
fn on_gpus(mut ops: BTreeMap<&str, i64>) -> BTreeMap<&str, i64> {
    if let Some(n) = ops.get("softmax_backward").copied() {
        *ops.entry("mul").or_insert(0) += n;
    }
    ops
}

#[test]
fn layers_save_and_launch_what_those_of_transformers_do() {
    let forward = |t: &Tape| launches(t, &t.forward);
    let backward = |t: &Tape| launches(t, &t.backward);
    let (mut wrong, mut refused) = (Vec::new(), Vec::new());
    for row in rows() {
        let name = format!("{} {}", row.config, row.attention);
        let attention = format!("attn_implementation = \"{}\"\n", row.attention);
        let [a, b] = [2, 3].map(|layers| {
            let more = match row.config.starts_with("t5") {
                true => format!("{attention}encoder_layers = {layers}\n"),
                false => attention.clone(),
            };
            let scenario = scenario_of(&row.config, layers, &more);
            scenario.map(|scenario| tape_of(&scenario).unwrap())
        });
        let (Ok(a), Ok(b)) = (&a, &b) else {
            refused.push(name);
            continue;
        };
        let mut bytes = String::new();
        let types = [
            (DType::Bf16, row.bfloat16),
            (DType::F32, row.float32),
            (DType::U8, row.bool),
        ];
        for (dtype, theirs) in types {
            let ours = saved(b, dtype) as i64 - saved(a, dtype) as i64;
            if ours != theirs {
                bytes += &format!(" {dtype:?} {ours}, not {theirs};");
            }
        }
        let mut kernels = String::new();
        for (of, theirs) in [
            (forward as fn(&Tape) -> _, &row.forward),
            (backward, &row.backward),
        ] {
            let (ours, theirs) = (more(of(b), of(a)), on_gpus(listed(theirs)));
            if ours != theirs {
                kernels += &format!("\n   ours   {ours:?}\n   theirs {theirs:?}");
            }
        }
        let known = |list: &[(&str, &str)]| list.iter().any(|(other, _)| *other == name);
        if bytes.is_empty() == known(SAVES_OTHERS) {
            wrong.push(format!("{name}:{bytes}"));
        }
        let others = known(SAVES_OTHERS) || known(LAUNCHES_OTHERS);
        if kernels.is_empty() == others {
            wrong.push(format!("{name}:{kernels}"));
        }
    }
    refused.sort();
    assert_eq!(refused, REFUSED);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Transformers 5.17 has no code for `sdpa` in these types, and loads them with `eager`.
#[test]
fn types_without_sdpa_are_eager() {
    let kernels = |config, attention| {
        let tape = tape(config, 2, attention);
        let forward = launches(&tape, &tape.forward);
        (forward, launches(&tape, &tape.backward))
    };
    let (default, eager) = ("", "attn_implementation = \"eager\"\n");
    for config in ["bloom", "codegen", "gpt_neo", "gptj", "mpt", "xglm"] {
        assert_eq!(kernels(config, default), kernels(config, eager), "{config}");
    }
    assert_ne!(kernels("gpt_neox", default), kernels("gpt_neox", eager));
}

/// `fully_shard` casts the inputs of its units, and the tables of a rotary embedding are inputs of
/// layers. A profile of OLMo 2 with layers as units has no float32 rotation: per layer, it adds
/// `[1, 32, 4096, 128]` in bfloat16 only, and casts two tables `[1, 4096, 128]`.
#[test]
fn rotations_are_in_the_type_of_tables_that_fully_shard_casts() {
    let float_adds = |units: Units, layers| {
        let mut scenario = scenario_of("olmo2", layers, "").unwrap();
        scenario.fsdp.units = units;
        let tape = tape_of(&scenario).unwrap();
        let of = |op: &&TapeOp| match op {
            TapeOp::Launch { kernel, .. } => {
                let kernel = &tape.kernels[kernel.index()];
                kernel.name == "add" && kernel.dtype == DType::F32 && kernel.flops.0 > 64
            }
            _ => false,
        };
        tape.forward.iter().filter(of).count()
    };
    let per_layer = |units: Units| float_adds(units.clone(), 3) - float_adds(units, 2);
    assert_eq!(per_layer(Units::Root), 2);
    assert_eq!(per_layer(Units::Block), 0);
}

#[test]
fn the_host_reads_the_mask_once_a_forward_pass_unless_it_is_compiled() {
    let reads = |t: &Tape| {
        let all = t.forward.iter().chain(&t.backward);
        all.filter(|op| **op == TapeOp::HostRead).count()
    };
    assert_eq!(reads(&tape("llama", 8, "")), 1);
    assert_eq!(
        reads(&tape("llama", 8, "[compile]\nmode = \"blocks\"\n")),
        1
    );
    assert_eq!(reads(&tape("llama", 8, "[compile]\nmode = \"full\"\n")), 0);
}
