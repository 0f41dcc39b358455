//! Bytes of optimizer state, by optimizer and dtype.

use super::{LLAMA, at_rest, program};
use crate::check::{RuleId, check};
use crate::ir::{Access, DType, Holds, Role};
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

/// `OptimState8bit` of torchao: a byte per element, a float32 per 256 elements and a table of 1
/// KiB, for tensors with at least 4096 elements in whole blocks. Other tensors stay in float32.
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

/// Shards of flat buffers may end within a block.
#[test]
fn shards_of_flat_buffers_have_blocks_of_their_own() {
    for (optimizer, states) in [("adamw", 2), ("lion", 1)] {
        for strategy in ["no_shard", "optim", "optim_grads_params"] {
            let set = [
                "fsdp.policy=native".to_owned(),
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

/// torch's optimizers keep state per parameter, for the rank's part of it. On rank 0, this is the
/// part of the parameter in the first shard, and the padding after it.
#[test]
fn engines_of_frameworks_keep_a_state_per_parameter() {
    for policy in ["megatron", "megatron_v2"] {
        for ranks in [2u32, 3] {
            let set = [
                format!("fsdp.policy={policy}"),
                format!("mesh.dp_shard={ranks}"),
                // Each gradient is cast separately for the optimizer.
                "precision.main_grads=bf16".to_owned(),
                "precision.compute=bf16".to_owned(),
            ];
            let set: Vec<&str> = set.iter().map(String::as_str).collect();
            let p = program(LLAMA, &set);
            assert!(check(&p).is_ok(), "{set:?}\n{}", check(&p));
            let mut expected = Vec::new();
            for group in &p.groups {
                let crate::shard::Layout::Flat(layout) = &group.layout else {
                    panic!()
                };
                let shard = layout.numel / u64::from(ranks);
                // For each element: the parameter that covers it, or the last one before it.
                let mut owners: Vec<(u64, u64)> = Vec::new();
                for item in &layout.items {
                    if item.offset < shard {
                        owners.push((item.offset, (item.offset + item.numel).min(shard)));
                    }
                }
                owners.sort_unstable();
                let ends = owners.iter().skip(1).map(|o| o.0).chain([shard]);
                expected.extend(owners.iter().zip(ends).map(|(o, end)| (end - o.0) * 4));
            }
            let sizes = |role, named: bool| {
                let of = p.buffers.iter().filter(move |b| b.role == role);
                let of = of.filter(move |b| named == matches!(b.holds, Holds::Group(_)));
                let mut sizes: Vec<u64> = of.map(|b| b.bytes.0).collect();
                sizes.sort_unstable();
                sizes
            };
            let mut states: Vec<u64> = expected.iter().flat_map(|n| [*n, *n]).collect();
            states.sort_unstable();
            assert_eq!(sizes(Role::OptimizerState, true), states, "{set:?}");
            expected.sort_unstable();
            let casts = sizes(Role::ReduceOutput, true);
            let missing = expected.iter().filter(|n| !casts.contains(n));
            assert_eq!(missing.count(), 0, "{set:?}: {casts:?}");
            let counters = p
                .buffers
                .iter()
                .filter(|b| b.holds == Holds::Named("adam step counter"));
            assert_eq!(counters.count(), expected.len(), "{set:?}");
        }
    }
}

/// Lion keeps half of AdamW's state, and the dtype of the state scales its size.
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

/// The checker reports a missing scale.
#[test]
fn states_without_a_scale_per_block_are_reported() {
    let mut p = program(LLAMA, &["fsdp.policy=megatron", "precision.moments=8bit"]);
    assert!(check(&p).is_ok());
    let launch = p.instrs.iter().find_map(|i| {
        let codes = |a: &&Access| p.buffers[a.buffer.index()].dtype == DType::U8;
        let mut updates = p.updates(&i.op).into_iter();
        let quantized = updates.find(|u| u.state.first().is_some_and(|a| codes(&a)));
        quantized.and_then(|u| u.state.last()).map(|a| a.buffer)
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

/// With decoupled gradients, the optimizer reads the gradients that are kept: there are no casts,
/// and FusedAdam counts steps on the host.
#[test]
fn decoupled_gradients_are_not_cast() {
    for policy in ["megatron", "megatron_v2"] {
        let policy = format!("fsdp.policy={policy}");
        let base = [&policy, "precision.compute=bf16", "train.clip_norm=1"];
        let decoupled = [&base[..], &["fsdp.decoupled_gradients=true"]].concat();
        let (cast, plain) = (program(LLAMA, &base), program(LLAMA, &decoupled));
        assert!(check(&plain).is_ok(), "{}", check(&plain));
        let read = |p: &Program| -> Vec<(Role, DType)> {
            let updates = p.instrs.iter().flat_map(|i| p.updates(&i.op));
            let grads = updates.map(|u| &p.buffers[u.grad.buffer.index()]);
            grads.map(|b| (b.role, b.dtype)).collect()
        };
        assert!(
            read(&cast)
                .iter()
                .all(|g| *g == (Role::ReduceOutput, DType::F32))
        );
        assert!(
            read(&plain)
                .iter()
                .all(|g| *g == (Role::MainGrad, DType::Bf16))
        );
        let counters = |p: &Program| {
            let named = Holds::Named("adam step counter");
            p.buffers.iter().filter(|b| b.holds == named).count()
        };
        assert!(counters(&cast) > 0 && counters(&plain) == 0, "{policy}");
    }
}

/// FusedAdam skips a parameter without a gradient; the checker rejects a program that lacks one.
#[test]
fn a_missing_decoupled_gradient_is_reported() {
    let set = ["fsdp.policy=megatron_v2", "fsdp.decoupled_gradients=true"];
    let p = program(LLAMA, &set);
    let updates = (0..p.instrs.len()).filter(|i| !p.updates(&p.instrs[*i].op).is_empty());
    let last = updates.last().unwrap();
    let mut q = p.clone();
    q.instrs[last].op = crate::program::Op::HostWork {
        kind: crate::ir::HostWorkKind::Hook,
        count: 0,
    };
    assert!(check(&q).of(RuleId::ReduceMissing).next().is_some());
}

/// Scenarios in which Muon is not possible, with the change that each error suggests.
#[test]
fn muon_is_refused_where_it_has_no_form() {
    let refused = |set: &[&str], message: &str, help: &str| {
        let all = [&["train.optimizer=muon"][..], set].concat();
        let all: Vec<String> = all.iter().map(|s| (*s).to_owned()).collect();
        let error = crate::scenario::parse("t", LLAMA, &all).unwrap_err();
        assert!(error.to_string().contains(message), "{set:?}: {error}");
        assert!(
            error.help().unwrap_or_default().contains(help),
            "{set:?}: {error}"
        );
    };
    refused(
        &[
            "fsdp.policy=fsdp2",
            "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]",
        ],
        "muon gathers the rows of matrices on the GPU under fsdp2",
        "set fsdp.offload = [], or fsdp.policy = \"native\"",
    );
    refused(
        &["fsdp.policy=megatron"],
        "muon is built for policies native and fsdp2 outside compile mode full",
        "set fsdp.policy = \"native\"",
    );
    refused(
        &["compile.mode=full"],
        "outside compile mode full",
        "native",
    );
    refused(
        &["mesh.dp_shard=2", "mesh.tp=2"],
        "does not support tensor parallelism",
        "adamw",
    );
    refused(
        &["mesh.dp_shard=2", "precision.moments=8bit"],
        "no 8-bit momentum",
        "adamw",
    );
    refused(
        &["mesh.dp_shard=1", "train.muon_momentum=1.0"],
        "muon_momentum must be below 1",
        "",
    );
    refused(
        &["mesh.dp_shard=1", "fsdp.frozen=[\"layers\"]"],
        "the model trains none",
        "adamw",
    );
}
