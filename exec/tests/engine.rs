//! The engine on real programs: each small scenario runs with poisoned memory, stays within the
//! planned memory, and gives the same bits regardless of timing and schedule.

mod common;

use common::{load, plan, poisoned, run};
use shardlab_exec::device::FailureKind;
use shardlab_exec::engine::{
    DelaySpec, ExecOptions, Fault, FaultKind, RankInputs, Session, StepInputs,
};
use shardlab_exec::train::{self, Outcome, RunOptions, StateLayout};
use shardlab_exec::{Hyper, ONE_GROUP};
use shardlab_plan::Program;
use shardlab_plan::ir::{Holds, InstrId};
use shardlab_plan::memory::{Memory, replay, replay_on};
use shardlab_plan::program::{Op, SectionKind};
use shardlab_plan::scenario::shipped;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Returns the shipped scenarios for small machines.
fn small() -> impl Iterator<Item = &'static str> {
    let names = shipped().iter().map(|s| s.0);
    names.filter(|n| n.starts_with("small-") || ["llama-tiny", "gpt2-tiny"].contains(n))
}

fn train_small(name: &str, set: &[&str], steps: u64, exec: ExecOptions) -> Outcome {
    let options = RunOptions {
        steps: Some(steps),
        exec,
        ..RunOptions::default()
    };
    run(&load(name, set), options)
}

/// Returns all results of training, as bits.
fn bits(o: &Outcome) -> Vec<u64> {
    let all = o.run.losses.iter().chain(&o.run.grad_norms);
    all.chain(&o.weight_norms).map(|x| x.to_bits()).collect()
}

#[test]
fn every_small_scenario_runs_without_nan_in_the_planned_memory() {
    for name in small() {
        let scenario = load(name, &[]);
        let options = ExecOptions {
            record: true,
            ..poisoned()
        };
        let program = plan(&scenario);
        let steps = 4;
        let o = train_small(name, &[], steps, options);
        assert_eq!(o.run.losses.len(), steps as usize, "{name}");
        assert!(
            o.run.losses.iter().all(|l| l.is_finite() && *l > 0.0),
            "{name}: {:?}",
            o.run.losses
        );
        // The gradient is not available if only the optimizer's kernel sums it.
        let tells = |l: &f64| match scenario.sums_in_optimizer() {
            false => l.is_finite() && *l > 0.0,
            true => l.is_nan(),
        };
        assert!(o.run.grad_norms.iter().all(tells), "{name}");
        assert_eq!(o.run.program_digest, program.digest(), "{name}");

        let trace = replay(&program, steps as u32).unwrap();
        let wanted: Vec<_> = trace
            .passes
            .iter()
            .filter(|p| matches!(p.section, SectionKind::First | SectionKind::Steady))
            .map(|p| (p.step, p.peak_allocated, p.peak_reserved))
            .collect();
        let got: Vec<_> = o
            .run
            .steps
            .iter()
            .filter(|s| s.section != SectionKind::Validation)
            .map(|s| (s.step, s.peak_allocated, s.peak_reserved))
            .collect();
        assert_eq!(got, wanted, "{name}");
        // The recorded step is the most typical one, and the first steps of a trace pool differ.
        let mut timelines: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        let mut memory = Memory::new(&program, None);
        replay_on(&program, steps as u32, &mut memory, |pass, instr, m| {
            if pass.section == SectionKind::Steady {
                let timeline = timelines.entry(pass.step).or_default();
                timeline.push((instr, m.counters().allocated, m.counters().reserved));
            }
        })
        .unwrap();
        // Without poison, which a gathered parameter may keep in its padding, nothing writes NaN.
        // The exception is rows of experts without a token, which hold stale memory.
        let checked = ExecOptions {
            nan_check: scenario.mesh.ep == 1,
            poison: false,
            ..poisoned()
        };
        assert_eq!(
            bits(&train_small(name, &[], steps, checked)),
            bits(&o),
            "{name}"
        );
        let m = &o.run.memory;
        let got: Vec<_> = m
            .timeline
            .iter()
            .map(|s| (s.instr, s.allocated, s.reserved))
            .collect();
        assert!(timelines.values().any(|t| *t == got), "{name}: {got:?}");
        assert_eq!(m.peak_allocated, trace.peak_allocated(), "{name}");
        assert_eq!(m.peak_reserved, trace.peak_reserved(), "{name}");

        // Each task of the recorded step has one span, in order on each stream.
        let section = program.section(SectionKind::Steady).unwrap();
        let runs = |i: &u32| match program.instrs[*i as usize].op {
            Op::Launch { .. } | Op::Collective { .. } | Op::Copy { .. } => true,
            _ => program.upload(InstrId(*i)).is_some(),
        };
        let tasks = section.instrs.clone().filter(runs).count();
        assert_eq!(o.run.spans.len(), tasks, "{name}");
        let mut ends = [0; 8];
        for s in &o.run.spans {
            let end = &mut ends[s.stream.index()];
            assert!(
                s.issued <= s.start && s.start <= s.end && s.start.0 >= *end,
                "{name}"
            );
            *end = s.end.0;
        }
    }
}

/// Runs hundreds of seeds, divided among the scenarios.
#[test]
fn delays_change_no_bit() {
    let delayed = |seed| ExecOptions {
        delay: Some(DelaySpec {
            seed,
            probability: 0.02,
            max: Duration::from_micros(250),
        }),
        ..poisoned()
    };
    for (i, name) in (0u64..).zip(small()) {
        let calm = bits(&train_small(name, &[], 3, poisoned()));
        for seed in 8 * i..8 * (i + 1) {
            assert_eq!(
                bits(&train_small(name, &[], 3, delayed(seed))),
                calm,
                "{name}, seed {seed}"
            );
        }
    }
}

/// The time of a group's update does not matter either, unless gradients are clipped.
#[test]
fn updates_during_backward_do_not_change_results() {
    let of = |set: &[&str]| bits(&train_small("small-in-backward", set, 4, poisoned()));
    let meshes: [&[&str]; 6] = [
        &[],
        &["fsdp.copy_engine_reduce=true", "compile.mode=regions"],
        &[
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
            "fsdp.prefetch_next_step=1",
        ],
        &["fsdp.async_reduce=false", "mesh.dp_outer=2"],
        &["fsdp.strategy=optim", "train.grad_accum=1"],
        &["mesh.dp_shard=1", "precision.main_params=none"],
    ];
    for set in meshes {
        let after = [set, &["fsdp.optimizer_in_backward=false"]].concat();
        assert_eq!(of(set), of(&after), "{set:?}");
    }
}

/// Options that only schedule or move data do not change losses, gradient norms and weights, bit
/// for bit.
#[test]
fn schedules_do_not_change_results() {
    let of = |set: &[&str]| bits(&train_small("small-native", set, 4, poisoned()));
    let wanted = of(&[]);
    for set in [
        &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"][..],
        &["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"],
        &["fsdp.prefetch_next_step=1"],
        &["fsdp.prefetch_next_step=3", "fsdp.allocator=caching"],
        &["fsdp.prefetch_next_step=2", "fsdp.prefetch_forward=2"],
        &["fsdp.reduce_in_flight=1"],
        &["fsdp.reduce_in_flight=3"],
        &["fsdp.allocator=caching"],
        &["fsdp.allocator=double_buffer"],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.reshard_after_forward=2"],
        &["fsdp.strategy=optim_grads"],
        &[
            "compile.mode=blocks",
            "compile.merge_projections=none",
            "compile.epilogues=false",
        ],
        &[
            "compile.mode=regions",
            "compile.merge_projections=none",
            "compile.epilogues=false",
        ],
        &[
            "compile.mode=regions",
            "compile.merge_projections=none",
            "compile.epilogues=false",
            "train.recompute=pointwise",
        ],
        &[
            "compile.mode=blocks",
            "compile.merge_projections=none",
            "compile.epilogues=false",
            "compile.exclude=[\"layers.*.mlp\", \"layers.0\"]",
        ],
        &[
            "compile.mode=regions",
            "compile.merge_projections=none",
            "compile.epilogues=false",
            "compile.exclude=[\"layers.*.attention\"]",
        ],
        &["compile.cuda_graph=full_iteration"],
        &["compile.cuda_graph=[\"attn\", \"mlp\"]"],
        &["train.recompute=full"],
        &["train.recompute=selective"],
        &["train.recompute=full", "train.recompute_layers=1"],
        &[
            "train.recompute=full",
            "train.recompute_layers=[\"layers.1\"]",
        ],
        &[
            "train.recompute=selective",
            "train.recompute_layers=[\"layers.1\"]",
        ],
        &[
            "compile.mode=regions",
            "compile.merge_projections=none",
            "compile.epilogues=false",
            "train.recompute=full",
            "train.recompute_layers=1",
        ],
        &["fsdp.offload=[\"params\"]"],
        &["fsdp.offload=[\"optimizer\"]"],
        &["fsdp.offload=[\"params\", \"grads\", \"optimizer\"]"],
    ] {
        assert_eq!(of(set), wanted, "{set:?}");
    }
}

/// Sharding does not change bits either: in float32, the losses (and therefore the weights) of all
/// policies and strategies agree. Norms are summed shard by shard, so with clipping, they may
/// differ in the last bit.
#[test]
fn policies_and_strategies_do_not_change_losses() {
    let base: &[&str] = &["precision.compute=f32", "train.clip_norm=0"];
    let of = |set: &[&str]| {
        let o = train_small("small-native", &[base, set].concat(), 6, poisoned());
        o.run.losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>()
    };
    let wanted = of(&[]);
    for set in [
        &["fsdp.strategy=no_shard"][..],
        &["fsdp.strategy=optim"],
        &["fsdp.strategy=optim_grads"],
        &["fsdp.policy=fsdp2"],
        &[
            "fsdp.policy=fsdp2",
            "fsdp.strategy=optim_grads",
            "fsdp.reshard_after_forward=false",
        ],
        &["fsdp.policy=megatron"],
        &["fsdp.policy=megatron", "fsdp.strategy=optim_grads"],
        &["fsdp.policy=megatron", "fsdp.strategy=optim"],
        &["fsdp.policy=megatron", "fsdp.strategy=no_shard"],
        &["compile.mode=full"],
        &["compile.mode=full", "compile.bucket_bytes=16KiB"],
    ] {
        assert_eq!(of(set), wanted, "{set:?}");
    }
}

/// A cross entropy of logits in bf16 rounds each term, so losses differ a little, in every mode.
#[test]
fn losses_of_bf16_logits_are_close() {
    let of = |mode: &str, upcast: bool| {
        let upcast = format!("precision.loss_fp32_upcast={upcast}");
        let set = ["precision.compute=bf16", mode, &upcast];
        train_small("small-native", &set, 4, poisoned()).run.losses
    };
    for mode in ["compile.mode=off", "compile.mode=full"] {
        let [float, half] = [true, false].map(|upcast| of(mode, upcast));
        assert_ne!(float, half, "{mode}");
        for (a, b) in float.iter().zip(&half) {
            assert!((a / b - 1.0).abs() < 2e-3, "{mode}: {float:?} {half:?}");
        }
    }
}

/// `check` detects if a wait is removed from a real program. Most removed waits also fail in the
/// stress test that the complete program passes, or in the watchdog and the engine's own checks.
#[test]
fn removed_waits_are_caught() {
    use shardlab_plan::program::{Phase, Rule};
    let scenario = load("small-native", &[]);
    let whole = plan(&scenario);
    let calm = bits(&train_small("small-native", &[], 3, poisoned()));
    let steady = whole.section(SectionKind::Steady).unwrap().instrs.clone();
    // Compute waits for a gather in forward, and for a reduction of gradients.
    let find = |rule, phase| {
        steady
            .clone()
            .find(|&i| {
                let instr = whole.instrs[i as usize];
                matches!(instr.op, Op::Wait { .. }) && (instr.rule, instr.phase) == (rule, phase)
            })
            .unwrap()
    };
    for wait in [
        find(Rule::GatherDone, Phase::Forward),
        find(Rule::ReduceFork, Phase::Backward),
    ] {
        let mut program = (*whole).clone();
        program.instrs[wait as usize].op = Op::HostWork {
            kind: shardlab_plan::ir::HostWorkKind::Hook,
            count: 0,
        };
        assert!(
            !shardlab_plan::check::check(&program).is_ok(),
            "check misses wait {wait}"
        );
        let program = Arc::new(program);
        let caught = (0..30).any(|seed| {
            let options = RunOptions {
                steps: Some(3),
                exec: ExecOptions {
                    delay: Some(DelaySpec {
                        seed,
                        probability: 0.1,
                        max: Duration::from_millis(2),
                    }),
                    ..poisoned()
                },
                ..RunOptions::default()
            };
            match train::train(&scenario, &program, options, &mut train::NoObserver) {
                Ok(o) => bits(&o) != calm,
                Err(_) => true,
            }
        });
        assert!(
            caught,
            "thirty disturbed runs miss {}",
            whole.op_text(InstrId(wait))
        );
    }
}

/// After a fault within a real step, every rank stops within seconds and reports the cause.
#[test]
fn a_fault_in_a_real_step_ends_every_rank() {
    let scenario = load("small-native", &[]);
    let program = plan(&scenario);
    let steady = program.section(SectionKind::Steady).unwrap().instrs.clone();
    let collective = steady
        .clone()
        .find(|&i| matches!(program.instrs[i as usize].op, Op::Collective { .. }))
        .unwrap();
    for (kind, words) in [
        (FaultKind::Panic, "injected panic on the host"),
        (
            FaultKind::DevicePanic,
            "injected panic in the middle of a collective",
        ),
        (FaultKind::Error, "injected fault"),
        (FaultKind::Stall, "rank 3 missing"),
    ] {
        let options = RunOptions {
            steps: Some(3),
            exec: ExecOptions {
                timeout: Duration::from_secs(2),
                fault: Some(Fault {
                    rank: 3,
                    instr: InstrId(collective),
                    kind,
                }),
                ..poisoned()
            },
            ..RunOptions::default()
        };
        let e = train::train(&scenario, &program, options, &mut train::NoObserver).unwrap_err();
        let text = e.to_string();
        assert!(text.contains(words), "{text}");
        for rank in 0..4 {
            assert!(text.contains(&format!("\n  rank {rank}: ")), "{text}");
        }
    }
}

/// With `fsdp.nan_check`, a NaN in one rank's shard is found before its gather, and the error names
/// the parameter.
#[test]
fn a_nan_in_a_shard_is_found_with_the_parameters_name() {
    let set = ["fsdp.nan_check=true", "precision.compute=f32"];
    let program = plan(&load("small-native", &set));
    let layout = StateLayout::new(&program).unwrap();
    let zeros = zero_inputs(&program);
    let mut named = BTreeSet::new();
    for rank in [0, 2] {
        let spans = layout.ranks[rank as usize].weights.iter();
        for span in spans.filter(|s| s.numel() > 1).step_by(5) {
            let mut s = Session::new(Arc::clone(&program), poisoned()).unwrap();
            s.step(&zeros, hyper(1)).unwrap();
            let at = span.offset + (span.numel() - 1) * 4;
            s.write_buffer(rank, span.buffer, at, &f32::NAN.to_le_bytes())
                .unwrap();
            let e = s.step(&zeros, hyper(2)).unwrap_err();
            let first = e.first().unwrap();
            assert_eq!(
                (first.kind.clone(), first.rank),
                (FailureKind::Nan, rank),
                "{e}"
            );
            let name = &program.params[span.param.index()].name;
            assert!(
                first.message.ends_with(&format!("parameter {name}")),
                "{name}: {e}"
            );
            named.insert(name.clone());
        }
    }
    assert!(named.len() > 3, "{named:?}");
}

/// Every policy checks all operands and results of its collectives. It finds a NaN on the rank that
/// has it, before other ranks receive it.
#[test]
fn every_policy_checks_its_collectives_for_nan() {
    let sets: [&[&str]; 12] = [
        &["fsdp.policy=native"],
        &[
            "fsdp.policy=native",
            "mesh.dp_replicate=2",
            "fsdp.outer_strategy=optim",
        ],
        &["fsdp.policy=native", "fsdp.copy_engine_reduce=true"],
        &["fsdp.policy=fsdp2"],
        &[
            "fsdp.policy=fsdp2",
            "mesh.dp_replicate=2",
            "train.grad_accum=2",
        ],
        &["fsdp.policy=fsdp2", "compile.mode=full"],
        &["fsdp.policy=megatron"],
        &["fsdp.policy=megatron", "fsdp.strategy=optim"],
        &["fsdp.policy=megatron", "mesh.dp_replicate=2"],
        &["fsdp.policy=megatron_v2"],
        &["fsdp.policy=megatron_v2", "mesh.dp_replicate=2"],
        &["fsdp.policy=native", "fsdp.strategy=no_shard"],
    ];
    for set in sets {
        let set: Vec<&str> = set
            .iter()
            .copied()
            .chain(["fsdp.nan_check=true", "mesh.dp_shard=2"])
            .collect();
        let scenario = load("llama-tiny", &set);
        let program = plan(&scenario);
        let checks = |p: &Program| {
            let of = p
                .instrs
                .iter()
                .filter(|i| i.rule == shardlab_plan::program::Rule::NanCheck);
            of.filter(|i| matches!(i.op, Op::Launch { .. })).count()
        };
        assert!(checks(&program) > 10, "{set:?}");
        let layout = StateLayout::new(&program).unwrap();
        let zeros = zero_inputs(&program);
        let quiet = ExecOptions {
            poison: false,
            ..poisoned()
        };
        let mut s = Session::new(Arc::clone(&program), quiet).unwrap();
        for step in 1..=2 {
            s.step(&zeros, hyper(step))
                .unwrap_or_else(|e| panic!("{set:?}: {e}"));
        }
        let rank = program.meta.mesh.world() - 1;
        let span = layout.ranks[rank as usize]
            .master
            .iter()
            .find(|s| s.numel() > 8);
        let span = span.unwrap();
        let nan = match span.dtype.size() {
            2 => vec![0xff; 2],
            _ => f32::NAN.to_le_bytes().to_vec(),
        };
        s.write_buffer(rank, span.buffer, span.offset, &nan)
            .unwrap();
        let e = s
            .step(&zeros, hyper(3))
            .and_then(|_| s.step(&zeros, hyper(4)));
        let e = e.expect_err(&format!("{set:?}"));
        assert_eq!(e.first().unwrap().kind, FailureKind::Nan, "{set:?}: {e}");
    }
}

fn hyper(step: u64) -> Hyper {
    Hyper {
        lr: 1e-3,
        betas: [0.9, 0.95],
        eps: 1e-8,
        muon: shardlab_exec::NO_MUON,
        weight_decay: 0.0,
        clip_norm: 1.0,
        step,
        groups: ONE_GROUP,
    }
}

/// Norms of single parameters are measured before clipping. Their squares sum to that of the global
/// norm, under every policy and strategy, and each is that of the gradient without sharding.
#[test]
fn norms_of_single_parameters_are_those_without_sharding() {
    let run_with = |set: &[&str]| {
        let base = [
            "precision.compute=f32",
            "train.clip_norm=0.5",
            "train.param_norms_every=2",
        ];
        let set: Vec<&str> = base.iter().chain(set).copied().collect();
        train_small("llama-tiny", &set, 5, poisoned())
    };
    let whole = run_with(&["mesh.dp_shard=1", "train.micro_batch=4"]);
    let steps: Vec<u64> = whole.param_norms.iter().map(|n| n.0).collect();
    assert_eq!(steps, [2, 4]);
    let sets: [&[&str]; 11] = [
        &["fsdp.policy=native", "mesh.dp_shard=4"],
        &[
            "fsdp.policy=native",
            "mesh.dp_shard=2",
            "mesh.dp_replicate=2",
        ],
        &[
            "fsdp.policy=native",
            "mesh.dp_shard=4",
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "train.grad_norm=false",
        ],
        &["fsdp.policy=fsdp2", "mesh.dp_shard=4"],
        &["fsdp.policy=fsdp2", "mesh.dp_shard=4", "compile.mode=full"],
        // The graph ends before the optimizer.
        &[
            "fsdp.policy=fsdp2",
            "mesh.dp_shard=4",
            "compile.cuda_graph=full_iteration",
        ],
        &["fsdp.policy=megatron", "mesh.dp_shard=4"],
        &[
            "fsdp.policy=megatron",
            "mesh.dp_shard=4",
            "fsdp.strategy=optim",
        ],
        &[
            "fsdp.policy=megatron",
            "mesh.dp_shard=2",
            "mesh.dp_replicate=2",
            "fsdp.outer_strategy=optim",
        ],
        &[
            "fsdp.policy=megatron",
            "mesh.dp_shard=4",
            "fsdp.strategy=no_shard",
        ],
        &["fsdp.policy=megatron_v2", "mesh.dp_shard=4"],
    ];
    for set in sets {
        let o = run_with(&[&["train.micro_batch=1"], set].concat());
        for (at, ((_, ours), (_, theirs))) in
            o.param_norms.iter().zip(&whole.param_norms).enumerate()
        {
            let squares: f64 = ours.iter().map(|n| n.gradient.unwrap().powi(2)).sum();
            let global = o.run.grad_norms[2 * at + 1];
            assert!(
                (squares.sqrt() - global).abs() < 1e-4 * global,
                "{set:?}: {squares} {global}"
            );
            // Without clipping, later steps differ.
            let same = !set.contains(&"train.clip_norm=0") || at == 0;
            for (a, b) in ours.iter().zip(theirs).filter(|_| same && at == 0) {
                assert_eq!(a.name, b.name);
                let (x, y) = (a.gradient.unwrap(), b.gradient.unwrap());
                assert!(
                    (x - y).abs() < 2e-3 * y.max(1e-4),
                    "{set:?} {}: {x} {y}",
                    a.name
                );
            }
        }
        let last = &o.param_norms[1].1;
        assert!(last.iter().all(|n| n.weight > 0.0), "{set:?}");
    }
}

/// Gradients that only the optimizer's kernel sums, or that a captured step computes, have no
/// individual norms.
#[test]
fn gradients_that_cannot_be_read_have_no_norms() {
    for set in [
        &["fsdp.copy_engine_reduce=true", "fsdp.sum_in_optimizer=true"][..],
        &["compile.cuda_graph=full_iteration", "fsdp.allocator=pool"],
    ] {
        let base = [
            "train.param_norms_every=1",
            "train.clip_norm=0",
            "train.grad_norm=false",
        ];
        let set = [&base[..], set].concat();
        let o = train_small("small-native", &set, 2, poisoned());
        let has = |n: &train::ParamNorm| n.gradient.is_some();
        let read = o.param_norms.iter().flat_map(|n| &n.1).any(has);
        assert!(!read, "{set:?}");
        assert!(
            o.param_norms
                .iter()
                .flat_map(|n| &n.1)
                .all(|n| n.weight > 0.0)
        );
    }
}

/// Returns zeros for all inputs.
fn zero_inputs(program: &Program) -> StepInputs {
    let mut rank = RankInputs::default();
    let first = program.section(SectionKind::First).unwrap();
    for instr in program.section_instrs(first) {
        let Op::Alloc(id) = instr.op else { continue };
        let b = &program.buffers[id.index()];
        if let Holds::Const(c) = b.holds {
            let m = usize::from(instr.micro_batch);
            rank.micro_batches.resize(m + 1, Vec::new());
            rank.micro_batches[m].push((c, vec![0; b.bytes.0 as usize].into()));
        }
    }
    StepInputs {
        ranks: vec![rank; program.meta.mesh.world() as usize],
    }
}

/// A block of an 8-bit state has one scale, so it belongs to one tensor in one parameter group.
#[test]
fn states_in_8_bits_of_several_groups_are_refused() {
    let fault = |set: &[&str]| {
        let set = [&["precision.moments=8bit", "mesh.dp_shard=1"], set].concat();
        let program = plan(&load("small-native", &set));
        match Session::new(program, poisoned()) {
            Ok(_) => String::new(),
            Err(e) => e.to_string(),
        }
    };
    let groups = "train.decay_norms_and_biases=false";
    let several = fault(&[groups]);
    assert!(several.contains("several parameter groups"), "{several}");
    assert!(several.contains("fsdp2"), "{several}");
    assert_eq!(fault(&[groups, "fsdp.policy=fsdp2"]), "");
    assert_eq!(fault(&[]), "");
    let apart = ["precision.compute=f32"];
    assert!(
        fault(&apart).contains("several tensors"),
        "{}",
        fault(&apart)
    );
}
