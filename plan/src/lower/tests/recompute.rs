//! Operations that selective recompute reruns.

use super::{LLAMA, TapeOp, matmuls, scenario};
use crate::config::Scenario;
use crate::ir::{BufferId, CopyKind, Holds, ModuleKind, Pool, Role, StorageRole};
use crate::program::{Instr, Op, Program};
use crate::scenario::parse;
use std::path::Path;

const SELECTIVE: &str = "train.recompute=selective";

/// Two blocks of seven matmuls (queries, keys, values, output, gate, up, down) and the head. Each
/// has two matmuls in backward.
/// has two in backward.
const BACKWARD: usize = 30;

#[test]
fn matmuls_are_kept_by_default() {
    assert_eq!(matmuls(&[SELECTIVE]), [15, BACKWARD]);
}

/// torchtitan's per-op policy: the second, fourth and sixth matmul of a block are rerun: keys,
/// output and up projection.
#[test]
fn every_second_matmul_runs_again() {
    let nth = |n: u32| matmuls(&[SELECTIVE, &format!("train.recompute_nth_matmul={n}")])[1];
    assert_eq!(nth(2), BACKWARD + 2 * 3);
    assert_eq!(nth(3), BACKWARD + 2 * 2);
    // The seventh matmul is the down projection, whose result no gradient needs.
    assert_eq!(nth(7), BACKWARD);
    // Gradients need the results of all others.
    assert_eq!(nth(1), BACKWARD + 2 * 6);
    let layers = "train.recompute_layers=1";
    let first = matmuls(&[SELECTIVE, "train.recompute_nth_matmul=2", layers])[1];
    assert_eq!(first, BACKWARD + 3);
}

#[test]
fn listed_operations_are_kept() {
    let save = |list: &str| {
        let key = format!("train.recompute_save={list}");
        let set = [SELECTIVE, &key];
        let tape = crate::tape_of(&scenario(LLAMA, &set)).unwrap();
        let kernels = &tape.kernels;
        let attention = tape.backward.iter().filter(|op| {
            matches!(op, super::TapeOp::Launch { kernel, .. }
                if kernels[kernel.index()].name == "attention")
        });
        (matmuls(&set)[1], attention.count())
    };
    assert_eq!(save("[\"mm\", \"attention\"]"), (BACKWARD, 0));
    assert_eq!(save("[\"mm\"]"), (BACKWARD, 2));
    // Without saved matmuls, only the six that gradients need are rerun.
    assert_eq!(save("[\"attention\"]"), (BACKWARD + 2 * 6, 0));
}

/// Returns how often backward launches a kernel of forward.
fn again(s: &Scenario, name: &str) -> usize {
    let tape = crate::tape_of(s).unwrap();
    let is = |op: &&TapeOp| match op {
        TapeOp::Launch { kernel, .. } => tape.kernels[kernel.index()].name == name,
        _ => false,
    };
    tape.backward.iter().filter(is).count()
}

/// Both blocks have two norms, attention and a gated feed-forward layer, whose down projection no
/// gradient needs.
#[test]
fn named_modules_of_dense_blocks_run_again() {
    let of = |modules: &str| {
        let set = [SELECTIVE, &format!("train.recompute_modules={modules}")];
        let s = scenario(LLAMA, &set);
        let rerun = ["attention", "rms_norm", "silu"].map(|name| again(&s, name));
        (matmuls(&set)[1] - BACKWARD, rerun)
    };
    assert_eq!(of("[\"core_attn\"]"), (0, [2, 0, 0]));
    assert_eq!(of("[\"layernorm\"]"), (0, [0, 4, 0]));
    assert_eq!(of("[\"mlp\"]"), (2 * 2, [0, 0, 2]));
    assert_eq!(of("[\"mlp\", \"core_attn\"]"), (2 * 2, [2, 0, 2]));
}

/// Of the blocks of `small-moe`, the first is dense. The others have a shared expert here.
#[test]
fn named_modules_of_experts_run_again() {
    let of = |modules: &str| {
        let modules = format!("train.recompute_modules={modules}");
        let set = [SELECTIVE, &modules, "model.shared_expert_ffn=32"].map(str::to_owned);
        let s = crate::scenario::load(Path::new("small-moe"), &set).unwrap();
        let sparse = s.model.layers as usize - 1;
        let names = ["grouped_mm", "silu", "route", "rms_norm"];
        (sparse, names.map(|name| again(&s, name)))
    };
    // Grouped matmuls also compute gradients of inputs.
    let (n, before) = of("[\"core_attn\"]");
    assert_eq!(before, [2 * n, 0, 0, 0]);
    assert_eq!(of("[\"moe_act\"]").1, [2 * n, n, 0, 0]);
    assert_eq!(of("[\"shared_experts\"]").1, [2 * n, n, 0, 0]);
    assert_eq!(of("[\"mlp\"]").1, [2 * n, 1, 0, 0]);
    // Gradients need the inputs of both grouped matmuls, but not the result of the second one.
    assert_eq!(of("[\"moe\"]").1, [3 * n, 2 * n, n, 0]);
}

/// The up-projections of queries, and of keys and values.
#[test]
fn up_projections_of_latent_attention_run_again() {
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/goldens/deepseek-v3-tiny/config.json"
    );
    let of = |modules: &str| {
        let modules = format!("train.recompute_modules={modules}");
        let set = [SELECTIVE, &modules].map(str::to_owned);
        let text = format!(
            "model.preset = {config:?}\ntrain.seq_len = 16\nmesh.dp_shard = 2\nmesh.hardware = \"cpu\"\n"
        );
        let s = parse("test", &text, &set).unwrap();
        (s.model.layers as usize, again(&s, "mm"))
    };
    let (_, before) = of("[\"core_attn\"]");
    let (layers, after) = of("[\"mla_up_proj\"]");
    assert_eq!(after - before, 2 * layers);
}

/// The activation of an expert layer has a row of `expert_ffn` elements per choice of a token, in
/// bfloat16. It is the only tensor that forward does not keep.
#[test]
fn recomputed_activations_of_experts_are_not_kept() {
    let kept = |modules: &str| {
        let modules = format!("train.recompute_modules={modules}");
        let set = [SELECTIVE, &modules].map(str::to_owned);
        let s = crate::scenario::load(Path::new("small-moe"), &set).unwrap();
        let tape = crate::tape_of(&s).unwrap();
        let bytes = tape.forward.iter().map(|op| match op {
            TapeOp::Alloc(b) => tape.storages[b.index()].bytes.0 as i64,
            TapeOp::Free(b) => -(tape.storages[b.index()].bytes.0 as i64),
            _ => 0,
        });
        let m = &s.model;
        let rows = s.train.seq_len * s.train.micro_batch * m.options.experts.top_k;
        let sparse = u64::from(m.layers) - 1;
        let act = rows * m.options.experts.expert_ffn.unwrap() * 2 * sparse;
        (bytes.sum::<i64>(), act as i64)
    };
    let (all, act) = kept("[\"layernorm\"]");
    let (less, _) = kept("[\"layernorm\", \"moe_act\"]");
    // The activation is multiplied by routing weights, so that it is kept with and without them;
    // and the product of the gate's activation with the other half is kept, too.
    assert_eq!(all - less, 3 * act);
}

#[test]
fn names_and_keys_that_choose_nothing_are_refused() {
    let fault = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        parse("test", LLAMA, &set).unwrap_err().to_string()
    };
    let near = fault(&[SELECTIVE, "train.recompute_save=[\"mm\", \"atention\"]"]);
    assert!(
        near.contains("`atention` is not an operation of the forward pass"),
        "{near}"
    );
    assert!(near.contains("did you mean `attention`?"), "{near}");
    let backward = fault(&[SELECTIVE, "train.recompute_save=[\"rms_norm_backward\"]"]);
    assert!(
        backward.contains("is not an operation of the forward pass"),
        "{backward}"
    );
    let full = fault(&["train.recompute=full", "train.recompute_nth_matmul=2"]);
    assert!(
        full.contains("only selective recompute chooses among operations"),
        "{full}"
    );
}

/// Parts that the model does not have, and two ways to choose, are refused at their positions.
#[test]
fn modules_that_are_not_there_are_refused() {
    let fault = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        parse("test", LLAMA, &set).unwrap_err().to_string()
    };
    let moe = fault(&[SELECTIVE, "train.recompute_modules=[\"mlp\", \"moe\"]"]);
    assert!(moe.contains("`moe`: the model has no experts"), "{moe}");
    let near = fault(&[SELECTIVE, "train.recompute_modules=[\"core_atn\"]"]);
    assert!(near.contains("core_attn"), "{near}");
    let both = [
        SELECTIVE,
        "train.recompute_modules=[\"mlp\"]",
        "train.recompute_nth_matmul=2",
    ];
    let both = fault(&both);
    assert!(both.contains("leave out one of them"), "{both}");
    let full = fault(&["train.recompute=full", "train.recompute_modules=[\"mlp\"]"]);
    assert!(full.contains("only selective recompute"), "{full}");
}

/// The last matmul of a block and the sum after it are rerun, too, although backward needs neither.
#[test]
fn reentrant_recompute_runs_whole_blocks() {
    let full = "train.recompute=full";
    let reentrant = "train.use_reentrant=true";
    assert_eq!(matmuls(&[full])[1], BACKWARD + 2 * 6);
    assert_eq!(matmuls(&[full, reentrant])[1], BACKWARD + 2 * 7);
}

/// The results of a rerun block, and their gradient, live until the end of its backward, like the
/// local variables of `CheckpointFunction.backward`.
#[test]
fn reentrant_backward_keeps_results_and_gradients() {
    let most = |set: &[&str]| {
        let tape = crate::tape_of(&scenario(LLAMA, set)).unwrap();
        // Live bytes whenever a gradient of queries is computed in the last block.
        let (mut alive, mut found) = (0i64, Vec::new());
        for op in tape.forward.iter().chain(&tape.backward) {
            match op {
                TapeOp::Alloc(s) => alive += tape.storages[s.index()].bytes.0 as i64,
                TapeOp::Free(s) => alive -= tape.storages[s.index()].bytes.0 as i64,
                TapeOp::Launch { kernel, .. }
                    if tape.kernels[kernel.index()].name == "rms_norm_backward" =>
                {
                    found.push(alive);
                }
                _ => {}
            }
        }
        found
    };
    let full = most(&["train.recompute=full"]);
    let reentrant = most(&["train.recompute=full", "train.use_reentrant=true"]);
    // The first norm in backward is the one before the head, outside the blocks.
    assert_eq!(full[0], reentrant[0]);
    // 2 samples of 32 tokens with 64 channels in bfloat16. The sum before the second norm also
    // needs the gradient of the result; the first norm does not.
    let row = 2 * 32 * 64 * 2;
    assert_eq!(reentrant[1] - full[1], row, "{full:?} {reentrant:?}");
    assert_eq!(reentrant[2] - full[2], 2 * row, "{full:?} {reentrant:?}");
}

/// Activations of at least 1 KiB leave the device after forward, except the last few.
#[test]
fn offloaded_activations_are_copied_to_the_host_and_back() {
    let offload = "train.activation_offload=true";
    for policy in ["native", "fsdp2", "megatron"] {
        let policy = format!("fsdp.policy={policy}");
        let p = super::find::checked(&[&policy, offload]);
        let [mut there, mut back] = [Vec::new(), Vec::new()];
        for instr in super::steady(&p) {
            if let Op::Copy { id, .. } = instr.op {
                let copy = &p.copies[id.index()];
                match copy.kind {
                    CopyKind::D2h => there.push(copy.from.bytes),
                    CopyKind::H2d => back.push(copy.from.bytes),
                    CopyKind::D2d => {}
                }
            }
        }
        assert!(there.len() > 20, "{policy}: {there:?}");
        // Activations whose copy is in flight when backward starts are still on the device. With
        // hooks of autograd, the first operation of backward ends all copies but its own.
        let stay = if policy.ends_with("fsdp2") { 1 } else { 5 };
        assert_eq!(back.len(), there.len() - stay, "{policy}");
        assert!(there.iter().all(|bytes| *bytes >= 1024), "{policy}");
        let on_host = p.buffers.iter().filter(|b| b.pool == Pool::Host).count();
        assert_eq!(on_host, there.len(), "{policy}");
    }
}

/// The head of each chunk is rerun in backward, and no logits are kept until then, whether or not
/// blocks are recomputed.
#[test]
fn checkpointed_chunks_of_the_loss_run_again() {
    let loss = [
        "train.loss=checkpointed_chunks",
        "train.loss_chunk_tokens=20",
    ];
    // 64 tokens are four chunks, each with a matmul that occurs three times in backward.
    let [forward, backward] = [14 + 4, BACKWARD - 2 + 4 * 3];
    assert_eq!(matmuls(&loss), [forward, backward]);
    let with = |more: &'static str| [&loss[..], &[more]].concat();
    assert_eq!(matmuls(&with(SELECTIVE)), [forward, backward]);
    let full = matmuls(&with("train.recompute=full"));
    assert_eq!(full, [forward, backward + 2 * 6]);
    let logits = |set: &[&str]| {
        let tape = crate::tape_of(&scenario(LLAMA, set)).unwrap();
        let all = tape.storages.into_iter();
        let sizes = all.filter(|s| s.role == StorageRole::Logits);
        sizes.map(|s| s.bytes.0).max().unwrap()
    };
    assert_eq!(logits(&[]), 64 * 250 * 4);
    assert_eq!(logits(&loss), 20 * 250 * 4);
}

/// Returns the bytes of logits in 16 and in 32 bits, and of their gradients, at the point of
/// forward and backward where they are most.
fn logits(set: &[&str]) -> [u64; 2] {
    let eager = ["fsdp.policy=fsdp2", "precision.compute=bf16"];
    let all = [&eager[..], set].concat();
    let tape = crate::tape_of(&scenario(LLAMA, &all)).unwrap();
    let (mut now, mut most) = (0_u64, [0, 0]);
    for (pass, ops) in [&tape.forward, &tape.backward].into_iter().enumerate() {
        for op in ops {
            let bytes = |s: &crate::ir::StorageId| {
                let storage = &tape.storages[s.index()];
                let is_logits = storage.role == StorageRole::Logits;
                if is_logits { storage.bytes.0 } else { 0 }
            };
            match op {
                TapeOp::Alloc(s) => now += bytes(s),
                TapeOp::Free(s) => now -= bytes(s),
                _ => {}
            }
            most[pass] = most[pass].max(now);
        }
    }
    most
}

/// Logits of all 64 tokens and a vocabulary of 250, in 16 and in 32 bits.
const HALF: u64 = 64 * 250 * 2;
const FLOAT: u64 = 64 * 250 * 4;

/// Chunks of 16 tokens. Eager autograd saves the float32 log-probabilities of all chunks. What
/// differs is whether all logits are there before the first loss, and which gradients are there at
/// once.
#[test]
fn losses_in_chunks_save_what_backward_needs() {
    let chunks = |loss: &str| logits(&[loss, "train.loss_chunk_tokens=16"]);
    // Logits, their float32 copy and log-probabilities of all tokens. Then the gradients of both.
    assert_eq!(logits(&[]), [HALF + 2 * FLOAT, 3 * FLOAT]);
    // The last chunk has its logits, their copy and log-probabilities, next to three others.
    let saved = chunks("train.loss=saved_chunks");
    assert_eq!(saved[0], FLOAT + (HALF + FLOAT) / 4);
    assert_eq!(saved[1], FLOAT + 2 * FLOAT / 4);
    // All logits until the end of the loss, then gradients in 16 bits instead of them.
    let split = chunks("train.loss=split_logits");
    assert_eq!(split[0], FLOAT + HALF + FLOAT / 4);
    assert_eq!(split[1], FLOAT + 2 * FLOAT / 4);
}

/// A variable of the training loop keeps the logits in 16 bits.
#[test]
fn kept_logits_live_until_the_end_of_backward() {
    let [forward, backward] = logits(&["train.keep_logits=true"]);
    assert_eq!([forward, backward], [HALF + 2 * FLOAT, HALF + 3 * FLOAT]);
    let ends = |set: &[&str]| {
        let all = [&["fsdp.policy=fsdp2"], set].concat();
        let tape = crate::tape_of(&scenario(LLAMA, &all)).unwrap();
        let is_logits = |s: &crate::ir::StorageId| {
            let storage = &tape.storages[s.index()];
            storage.role == StorageRole::Logits && storage.bytes.0 == HALF
        };
        let last = |op: &TapeOp| matches!(op, TapeOp::Launch { .. });
        let end = tape.backward.iter().rposition(last).unwrap();
        let mut after = tape.backward[end..].iter();
        after.any(|op| matches!(op, TapeOp::Free(s) if is_logits(s)))
    };
    for mode in ["off", "regions", "blocks"] {
        let mode = format!("compile.mode={mode}");
        assert!(ends(&[&mode, "train.keep_logits=true"]), "{mode}");
        assert!(!ends(&[&mode]), "{mode}");
    }
}

/// Under FSDP2, the hook before a block's backward prefetches the next unit. With reentrant
/// recompute, this hook runs after recompute.
#[test]
fn reentrant_recompute_comes_before_the_backward_hook() {
    let order = |set: &[&str]| {
        let tape = crate::tape_of(&scenario(LLAMA, set)).unwrap();
        let block = |m: &crate::ir::ModuleId| tape.modules[m.index()].kind == ModuleKind::Block;
        let marks = tape.backward.iter().filter_map(|op| match op {
            TapeOp::Enter(m) if block(m) => Some("backward"),
            TapeOp::EnterRecompute(m) if block(m) => Some("recompute"),
            TapeOp::Exit(m) if block(m) => Some("end"),
            _ => None,
        });
        marks.collect::<Vec<_>>()
    };
    let full = "train.recompute=full";
    let usual = ["backward", "recompute", "end"];
    let reentrant = ["recompute", "backward", "end"];
    assert_eq!(order(&[full]), [usual, usual].concat());
    let set = [full, "train.use_reentrant=true"];
    assert_eq!(order(&set), [reentrant, reentrant].concat());
    // Deep models are expanded from shallow ones.
    let deep = order(&[full, "train.use_reentrant=true", "model.layers=9"]);
    assert_eq!(deep, [reentrant; 9].concat());
}

#[test]
fn reentrant_recompute_is_for_eager_code_alone() {
    let fault = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        parse("test", LLAMA, &set).unwrap_err().to_string()
    };
    let reentrant = "train.use_reentrant=true";
    let none = fault(&[reentrant]);
    assert!(
        none.contains("only full recompute can be reentrant"),
        "{none}"
    );
    let compiled = fault(&[reentrant, "train.recompute=full", "compile.mode=blocks"]);
    assert!(
        compiled.contains("a function of eager autograd"),
        "{compiled}"
    );
}

/// Copies of the steady step by direction, with the buffer on the device and the position.
fn copies(p: &Program, kind: CopyKind) -> Vec<(usize, BufferId)> {
    let list = super::steady(p).iter().enumerate();
    list.filter_map(|(at, instr)| match instr.op {
        Op::Copy { id, .. } if p.copies[id.index()].kind == kind => {
            let copy = &p.copies[id.index()];
            let device = match kind {
                CopyKind::H2d => copy.to.buffer,
                _ => copy.from.buffer,
            };
            Some((at, device))
        }
        _ => None,
    })
    .collect()
}

/// Linear layers save transposed views of their weights, which the hooks copy unless blocks are
/// compiled or recomputed; the head has no hooks.
#[test]
fn hooks_copy_views_of_weights() {
    let weights = |set: &str| {
        let p = super::find::checked(&["fsdp.policy=fsdp2", "train.activation_offload=true", set]);
        let held = |(_, b): &(usize, BufferId)| p.buffers[b.index()].holds;
        let of = |kind| {
            let all = copies(&p, kind);
            let of_params = all
                .iter()
                .map(held)
                .filter(|h| matches!(h, Holds::Param(_)));
            of_params.count()
        };
        [of(CopyKind::D2h), of(CopyKind::H2d)]
    };
    // Two blocks of seven layers.
    assert_eq!(weights("train.recompute=none"), [14, 14]);
    assert_eq!(weights("compile.mode=blocks"), [0, 0]);
    assert_eq!(weights("train.recompute=full"), [0, 0]);
    // Queries and values have two low-rank factors each. The embedding is frozen, so the input of
    // the first block's queries, keys and values needs no gradient: neither these three nor the
    // first factors of two of them save a weight.
    assert_eq!(weights("lora.r=4"), [2 * (7 + 2 * 2) - 5; 2]);
}

/// The inputs of queries, keys and values, and of gate and up projection, are saved several times
/// and stay on the device until backward has read the copy. The loss saves its logarithms.
#[test]
fn tensors_that_are_saved_twice_stay_on_the_device() {
    let counts = |set: &str| {
        let p = super::find::checked(&["fsdp.policy=fsdp2", "train.activation_offload=true", set]);
        let freed = |id: BufferId| {
            let frees = |i: &Instr| matches!(i.op, Op::Free(b) if b == id);
            super::steady(&p).iter().position(frees)
        };
        let there = copies(&p, CopyKind::D2h);
        let holds = |id: BufferId| p.buffers[id.index()].holds;
        let stays = |(at, back): &&(usize, BufferId)| {
            let own = there.iter().find(|(_, id)| holds(*id) == holds(*back));
            freed(own.unwrap().1).unwrap() > *at
        };
        let kept = copies(&p, CopyKind::H2d).iter().filter(stays).count();
        let logits = |(_, id): &&(usize, BufferId)| p.buffers[id.index()].role == Role::Logits;
        [kept, there.iter().filter(logits).count()]
    };
    assert_eq!(counts("train.recompute=none"), [2 * 2, 1]);
    assert_eq!(counts("compile.mode=blocks"), [0, 1]);
}
