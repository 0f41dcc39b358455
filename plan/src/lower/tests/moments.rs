//! Bytes of optimizer states by optimizer and type.

use super::{LLAMA, at_rest, program};
use crate::check::{RuleId, check};
use crate::ir::{Holds, Role};
use crate::program::Program;
use crate::units::Bytes;

/// Returns the bytes of tables of 8-bit codes.
fn tables(p: &Program) -> u64 {
    let tables = p
        .buffers
        .iter()
        .filter(|b| b.holds == Holds::Named("table of 8-bit codes"));
    tables.map(|b| b.bytes.0).sum()
}

/// `OptimState8bit` of torchao: a byte per element, a float32 per 256 elements and a table of
/// 1 KiB, for tensors of 4096 elements or more in whole blocks. The others stay float32.
#[test]
fn fsdp2_keeps_what_torchao_keeps() {
    for (optimizer, states) in [("adamw", 2), ("lion", 1)] {
        for ranks in [1u64, 3, 4] {
            let optimizer = format!("train.optimizer={optimizer}");
            let mesh = format!("mesh.dp_shard={ranks}");
            let set = [
                "fsdp.policy=fsdp2",
                "model.hidden=256",
                "precision.moments=8bit",
                &optimizer,
                &mesh,
            ];
            let p = program(LLAMA, &set);
            let (mut bytes, mut quantized) = (0, 0);
            for param in &p.params {
                let rows = param.shape[0].div_ceil(ranks);
                let numel = rows * param.shape.iter().skip(1).product::<u64>();
                if numel >= 4096 && numel % 256 == 0 {
                    bytes += states * (numel + numel / 256 * 4);
                    quantized += states;
                } else {
                    bytes += states * numel * 4;
                }
            }
            assert!(quantized > 0);
            assert_eq!(at_rest(&p)[&Role::OptimizerState], Bytes(bytes), "{set:?}");
            assert_eq!(tables(&p), quantized * 1024, "{set:?}");
            assert!(check(&p).is_ok());
        }
    }
}

/// Shards of flat buffers may end inside a block.
#[test]
fn shards_of_flat_buffers_have_blocks_of_their_own() {
    for policy in ["native", "megatron"] {
        for (optimizer, states) in [("adamw", 2), ("lion", 1)] {
            for strategy in ["no_shard", "optim", "optim_grads_params"] {
                let set = [
                    format!("fsdp.policy={policy}"),
                    format!("fsdp.strategy={strategy}"),
                    format!("train.optimizer={optimizer}"),
                    "mesh.dp_shard=3".to_owned(),
                    "precision.moments=8bit".to_owned(),
                ];
                let set: Vec<&str> = set.iter().map(String::as_str).collect();
                let p = program(LLAMA, &set);
                let ranks = if strategy == "no_shard" { 1 } else { 3 };
                let shards = p.groups.iter().map(|g| g.layout.full_numel() / ranks);
                let bytes: u64 = shards
                    .map(|n| match n {
                        0..4096 => n * 4,
                        _ => n + n.div_ceil(256) * 4,
                    })
                    .sum();
                let kept = at_rest(&p)[&Role::OptimizerState];
                assert_eq!(kept, Bytes(states * bytes), "{set:?}");
                assert!(check(&p).is_ok(), "{set:?}");
            }
        }
    }
}

/// Lion keeps half of AdamW's states, and the types of states scale them.
#[test]
fn plain_states_scale_with_their_type() {
    let bytes = |set: &[&str]| at_rest(&program(LLAMA, set))[&Role::OptimizerState].0;
    for policy in ["native", "megatron", "fsdp2"] {
        let policy = format!("fsdp.policy={policy}");
        let (lion, half) = ("train.optimizer=lion", "precision.moments=bf16");
        let adamw = bytes(&[&policy]);
        assert_eq!(bytes(&[&policy, lion]) * 2, adamw, "{policy}");
        assert_eq!(bytes(&[&policy, half]) * 2, adamw, "{policy}");
        assert_eq!(bytes(&[&policy, lion, half]) * 4, adamw, "{policy}");
    }
}

/// A scale that is missing is found.
#[test]
fn states_without_a_scale_per_block_are_reported() {
    let mut p = program(LLAMA, &["fsdp.policy=megatron", "precision.moments=8bit"]);
    assert!(check(&p).is_ok());
    let launch = p.instrs.iter().find_map(|i| {
        let state = p.updates(&i.op).into_iter().flat_map(|u| u.state).last();
        state.map(|a| a.buffer)
    });
    let scales = launch.unwrap();
    for a in &mut p.accesses {
        if a.buffer == scales {
            a.bytes -= 4;
        }
    }
    let report = check(&p);
    let message = &report.of(RuleId::StateSharded).next().unwrap().message;
    assert!(message.contains("a scale per 256"), "{message}");
}
