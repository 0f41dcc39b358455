//! Tests which parameters are trained, kept, gathered and reduced with adapters.

use super::{LLAMA, TapeOp, at_rest, matmuls, program, steady};
use crate::check::check;
use crate::ir::{DType, Holds, OpKind, Param, Role, ShardOp};
use crate::program::{Op, Program};
use crate::scenario::parse;
use crate::units::Bytes;

/// Returns the number of all elements and the number of trained elements.
fn counts(params: &[Param]) -> (u64, u64) {
    let sum = |trained: bool| {
        let of = params.iter().filter(|p| p.requires_grad || !trained);
        of.map(Param::numel).sum()
    };
    (sum(false), sum(true))
}

/// Counts match `print_trainable_parameters` of PEFT for Llama 3 8B and rank 16: 6,815,744 of
/// 8,037,076,992 with queries and values, 41,943,040 of 8,072,204,288 with all linear layers.
#[test]
fn trained_parameters_are_as_many_as_pefts() {
    let of = |set: &[&str]| {
        let text = "[model]\npreset = \"llama3-8b\"\n[lora]\nr = 16\n[mesh]\nhardware = \"cpu\"\ndp_shard = 8\n";
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let s = parse("test", text, &set).unwrap();
        counts(&crate::models::testing::modules_and_params(&s).1)
    };
    assert_eq!(of(&[]), (8_072_204_288, 41_943_040));
    let qv = "lora.target_modules=[\"q_proj\", \"v_proj\"]";
    assert_eq!(of(&[qv]), (8_037_076_992, 6_815_744));
    // An expression may use either name of a layer.
    for expression in [r"'.*\.(q|v)_proj'", r"'layers\..*\.(q|v)'"] {
        let found = of(&[&format!("lora.target_modules={expression}")]);
        assert_eq!(found, of(&[qv]), "{expression}");
    }
    // DoRA adds a magnitude for each row: 43,008 per block.
    let dora = of(&["lora.use_dora=true"]);
    assert_eq!(dora, (8_073_580_544, 43_319_296));
}

/// Counts are those of PEFT 0.21 for Llama 3 8B, on torch's meta device.
#[test]
fn patterns_pick_as_many_parameters_as_in_peft() {
    let of = |set: &[&str]| {
        let text = "[model]\npreset = \"llama3-8b\"\n[lora]\nr = 16\n[mesh]\nhardware = \"cpu\"\ndp_shard = 8\n";
        let set: Vec<String> = set.iter().map(|s| format!("lora.{s}")).collect();
        let s = parse("test", text, &set).unwrap();
        counts(&crate::models::testing::modules_and_params(&s).1).1
    };
    let qv = "target_modules=['q_proj', 'v_proj']";
    let ends = r"'layers\.(0|31)\..*' = 2";
    for (set, trained) in [
        // The first pattern that matches counts.
        (
            &[&*format!("rank_pattern={{ down_proj = 64, {ends} }}")][..],
            68_476_928,
        ),
        (
            &[&*format!("rank_pattern={{ {ends}, down_proj = 64 }}")],
            66_191_360,
        ),
        (
            &[
                qv,
                "rank_pattern={ '^model.layers.0.self_attn.q_proj' = 32 }",
            ],
            6_946_816,
        ),
        (&[qv, "layers_to_transform=[0, 1, 30, 31]"], 851_968),
        (
            &[qv, "layers_to_transform=7", "layers_pattern='layers'"],
            212_992,
        ),
        (
            &[
                "target_modules=['q_proj', 'model.layers.0.mlp.up_proj']",
                "layers_to_transform=[1, 2]",
            ],
            557_056,
        ),
        (
            &["exclude_modules=['down_proj', 'layers.3.self_attn.q_proj']"],
            32_374_784,
        ),
        (
            &[r"exclude_modules='.*\.layers\.(1\d|2\d)\..*'"],
            15_728_640,
        ),
        // The scaling adds no parameters.
        (&["alpha_pattern={ q_proj = 32 }"], 41_943_040),
    ] {
        assert_eq!(of(set), trained, "{set:?}");
    }
}

/// The same for GPT-2, whose blocks are in a list with another name.
#[test]
fn lists_of_blocks_have_the_names_of_the_code() {
    let text = "[model]\npreset = \"gpt2\"\n[mesh]\nhardware = \"cpu\"\ndp_shard = 8\n[lora]\nr = 8\n\
        target_modules = [\"c_attn\", \"mlp.c_proj\"]\nlayers_to_transform = [0, 11]\nlayers_pattern = \"h\"\n\
        rank_pattern = { c_proj = 4 }\n";
    let s = parse("test", text, &[]).unwrap();
    let of = counts(&crate::models::testing::modules_and_params(&s).1);
    assert_eq!(of, (124_519_680, 79_872));
}

/// In transformers 5, routers and experts are not linear layers. Only attention has adapters, with
/// shapes `[4096, 2048]`, twice `[512, 2048]`, and `[2048, 4096]` in six layers.
#[test]
fn routers_have_no_adapters() {
    let of = |set: &[&str]| {
        let text = "[model]\npreset = \"qwen3-30b-a3b\"\nlayers = 6\nexperts = 64\n[lora]\nr = 16\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n";
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let s = parse("test", text, &set).unwrap();
        counts(&crate::models::testing::modules_and_params(&s).1)
    };
    let (total, trained) = of(&[]);
    assert_eq!(trained, 6 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512)));
    assert_eq!(total - trained, 2_548_329_984);
}

/// The last op of an adapted layer multiplies by the magnitudes of rows. Compiled backward does not
/// recompute it in the next unit, which runs before the magnitudes are gathered.
#[test]
fn lengths_of_rows_are_read_where_they_are_gathered() {
    for mode in ["off", "blocks", "regions", "full"] {
        for policy in ["native", "fsdp2", "megatron"] {
            let set = [
                format!("compile.mode={mode}"),
                format!("fsdp.policy={policy}"),
            ];
            let dora = ["lora.r=4", "lora.use_dora=true", "mesh.dp_shard=2"];
            let set: Vec<&str> = dora
                .into_iter()
                .chain(set.iter().map(String::as_str))
                .collect();
            let set: Vec<String> = set.into_iter().map(ToOwned::to_owned).collect();
            // Some policies do not support this mode.
            let Ok(s) = parse("test", LLAMA, &set) else {
                continue;
            };
            let verdict = check(&crate::plan(&s).unwrap());
            assert!(verdict.is_ok(), "{set:?}\n{verdict}");
        }
    }
}

/// A frozen table that the chosen experts index, such as their biases in gpt-oss, has no gradient.
/// The choice depends on activations that have one, but is not differentiable itself.
#[test]
fn biases_of_experts_have_no_gradient_where_they_are_frozen() {
    const EXPERTS: &str = "[model]\nfamily = \"moe\"\nlayers = 2\nhidden = 64\nheads = 4\nvocab = 128\nffn = 96\n\
                           experts = 4\ntop_k = 2\nexpert_bias = true\n\
                           [train]\nseq_len = 16\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n[lora]\nr = 4\n";
    for set in [
        ["fsdp.policy=native", "fsdp.strategy=no_shard"],
        ["fsdp.policy=native", "fsdp.strategy=optim_grads_params"],
        ["fsdp.policy=fsdp2", "train.recompute=full"],
    ] {
        let p = program(EXPERTS, &set);
        let verdict = check(&p);
        assert!(verdict.is_ok(), "{set:?}\n{verdict}");
        let scatters = |op: &OpKind| matches!(op, OpKind::RepeatRowsGrad(_));
        let sums = p
            .kernels
            .iter()
            .filter(|k| k.body.iter().any(|b| scatters(&b.op)));
        assert_eq!(sums.count(), 0, "{set:?}");
    }
}

/// Under every policy, only adapters have gradients and moments.
#[test]
fn state_is_kept_for_adapters_alone() {
    for policy in ["native", "megatron", "fsdp2"] {
        let policy = format!("fsdp.policy={policy}");
        let set = ["mesh.dp_shard=1", "lora.r=4", &policy];
        let p = program(LLAMA, &set);
        let (_, trained) = counts(&p.params);
        assert_eq!(
            trained,
            2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 176))
        );
        let rest = at_rest(&p);
        // Flat buffers are padded.
        let groups = p.groups.iter().filter(|g| g.requires_grad);
        let kept = match p.meta.policy {
            "fsdp2" => trained,
            _ => groups.map(|g| g.layout.full_numel()).sum(),
        };
        assert!(kept < 2 * trained);
        assert_eq!(rest[&Role::OptimizerState], Bytes(2 * 4 * kept), "{policy}");
    }
}

/// Returns the shards of parameters, and the buffers that the copy-ins of a section's gathers read
/// and write.
fn copies(p: &Program) -> Vec<[Vec<(DType, u64)>; 2]> {
    let of = |accesses: &[crate::ir::Access]| {
        let dtype = |b: crate::ir::BufferId| p.buffers[b.index()].dtype;
        accesses
            .iter()
            .map(|a| (dtype(a.buffer), a.bytes))
            .collect()
    };
    let mut out = Vec::new();
    for instr in steady(p) {
        if let Op::Launch { kernel, .. } = instr.op
            && p.kernels[kernel.index()].body.first().map(|b| b.op)
                == Some(OpKind::Shard(ShardOp::MultiCopy))
        {
            out.push([of(p.reads(&instr.op)), of(p.writes(&instr.op))]);
        }
    }
    out
}

/// fully_shard keeps frozen shards in their own dtype and only casts the others
/// (`use_foreach_copy`). Both are copied into one gather, in the order of parameters.
#[test]
fn fsdp2_casts_the_shards_of_adapters_only() {
    let set = [
        "fsdp.policy=fsdp2",
        "lora.r=4",
        "lora.target_modules=[\"attention.q\"]",
    ];
    let p = program(LLAMA, &set);
    for (b, kept) in p
        .buffers
        .iter()
        .filter(|b| b.role == Role::MainWeight)
        .map(|b| (b, b.dtype))
    {
        let Holds::Param(id) = b.holds else { panic!() };
        let trained = p.params[id.index()].requires_grad;
        assert_eq!(kept, if trained { DType::F32 } else { DType::Bf16 });
    }
    // A (4 x 64) and B (64 x 4) over four ranks.
    let cast = copies(&p)
        .into_iter()
        .find(|[reads, _]| reads.iter().all(|r| r.0 == DType::F32))
        .unwrap();
    assert_eq!(cast[0], [(DType::F32, 64 * 4); 2]);
    assert_eq!(cast[1], [(DType::Bf16, 2 * 64 * 2)]);
    // The norm of the block, queries (64 x 64), their adapter, then the rest.
    let packed = copies(&p)
        .into_iter()
        .find(|[reads, _]| reads.len() > 4)
        .unwrap();
    let bytes: Vec<u64> = packed[0].iter().map(|r| r.1).collect();
    assert_eq!(bytes[..5], [32, 32, 2048, 128, 128]);
    assert!(packed[0].iter().all(|r| r.0 == DType::Bf16));
    // With a float32 model, all shards are cast to one buffer.
    let wide = program(
        LLAMA,
        &[&set[..], &["precision.frozen_params=f32"]].concat(),
    );
    let all = copies(&wide);
    assert!(
        all.iter()
            .any(|[reads, writes]| reads.len() == 11 && writes.len() == 1)
    );
}

/// fully_shard only reduces the gradients of adapters: a rank's shard of `B` (176 x 4 for `w1`) and
/// `A` (4 x 64).
#[test]
fn fsdp2_reduces_adapters_only() {
    let p = program(
        LLAMA,
        &[
            "fsdp.policy=fsdp2",
            "lora.r=4",
            "lora.target_modules=[\"w1\"]",
        ],
    );
    let inputs: Vec<u64> = p
        .buffers
        .iter()
        .filter(|b| b.role == Role::ReduceInput)
        .map(|b| b.bytes.0)
        .collect();
    // The root has no trained parameters, so it reduces nothing.
    assert_eq!(inputs, [4 * (176 * 4 + 4 * 64); 2]);
}

/// Frozen weights have no gradient, and backward ends at the first adapter: the inputs of the first
/// block's queries, keys and values need none (`requires_grad` of the token embeddings is false).
#[test]
fn backward_computes_what_adapters_need() {
    // Two blocks with seven linear layers each, and the head.
    assert_eq!(matmuls(&[]), [15, 30]);
    // Each adapter adds two matmuls in forward. In backward, there are five: the gradients of B, of
    // A's result and of A, and two gradients of the input. The first three adapters lack the two
    // gradients of the input.
    assert_eq!(matmuls(&["lora.r=4"]), [15 + 28, 1 + 14 * 5 - 3 * 2]);
    // Only the down projection of the second block: the head, then B, the result of A, and A.
    let last = "lora.target_modules=[\"layers.1.mlp.w2\"]";
    assert_eq!(matmuls(&["lora.r=4", last]), [15 + 2, 1 + 3]);
}

/// With dropout, DoRA in PEFT's code has no result of the layer for the adapter's input, and
/// multiplies by the frozen weight again. Under `TorchDispatchMode`, PEFT 0.21 runs 14 more matmuls
/// in forward (one per layer), and 11 more in backward: the first block's queries, keys and values
/// need no gradient of their input. Without dropout, backward has 65 in both.
#[test]
fn dropout_of_decomposed_adapters_repeats_the_layer() {
    let peft = [
        "model.implementation=transformers",
        "fsdp.policy=fsdp2",
        "lora.r=4",
    ];
    let of = |more: &[&'static str]| [&peft[..], more].concat();
    let dora = "lora.use_dora=true";
    let dropout = "lora.lora_dropout=0.1";
    assert_eq!(matmuls(&of(&[dropout])), [15 + 28, 65]);
    // `B A`, one matmul per layer.
    assert_eq!(matmuls(&of(&[dora])), [15 + 28 + 14, 65]);
    assert_eq!(matmuls(&of(&[dora, dropout])), [15 + 28 + 14 + 14, 65 + 11]);
    let one = "lora.target_modules=[\"q_proj\"]";
    assert_eq!(matmuls(&of(&[dora, one]))[1], 19);
    assert_eq!(matmuls(&of(&[dora, one, dropout]))[1], 20);
    let tape = crate::tape_of(&super::scenario(LLAMA, &of(&[dora, dropout]))).unwrap();
    let dropouts = |ops: &[TapeOp]| {
        let named = |op: &&TapeOp| {
            matches!(op, TapeOp::Launch { kernel, .. }
                if tape.kernels[kernel.index()].name.starts_with("dropout"))
        };
        ops.iter().filter(named).count()
    };
    assert_eq!(
        [dropouts(&tape.forward), dropouts(&tape.backward)],
        [14, 11]
    );
}
