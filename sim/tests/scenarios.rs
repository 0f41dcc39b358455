//! Shipped scenarios through planner and simulator.

use shardlab_plan::ir::{COMPUTE, CollectiveKind};
use shardlab_plan::program::{Op, Program, Rule, SectionKind};
use shardlab_plan::record::{Run, Span};
use shardlab_plan::scenario;
use shardlab_plan::units::Picos;
use shardlab_sim::{Options, Profile, hardware, simulate};
use std::path::Path;

fn planned(name: &str, overrides: &[&str]) -> Program {
    let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
    let scenario =
        scenario::load(Path::new(name), &overrides).unwrap_or_else(|e| panic!("{name}: {e}"));
    shardlab_plan::plan(&scenario).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn run(program: &Program, options: &Options) -> Run {
    let profile = hardware::load(&program.meta.hardware).unwrap();
    simulate(program, &profile, options)
        .unwrap_or_else(|e| panic!("{}: {e}", program.meta.scenario))
}

#[test]
fn every_shipped_scenario_runs_and_adds_up() {
    for (name, _) in scenario::shipped() {
        let program = planned(name, &[]);
        let r = run(&program, &Options::default());
        let step = r.step_samples[0];
        // Models with a few thousand parameters do not keep a device busy.
        let least = if program.meta.hardware == "cpu" {
            0.0
        } else {
            0.01
        };
        assert!(r.mfu > least && r.mfu < 0.9, "{name}: mfu {}", r.mfu);
        assert_eq!(r.recorded_to - r.recorded_from, step, "{name}");
        // Compute and exposed time fill the step, except for launch gaps. Offloaded state is copied
        // to the host while the next step already computes, so only the part within the step
        // counts.
        let within = |t: Picos| t.clamp(r.recorded_from, r.recorded_to);
        let compute: u64 = r
            .spans
            .iter()
            .filter(|s| s.stream.0 == 0)
            .map(|s| within(s.end).0 - within(s.start).0)
            .sum();
        let exposed: u64 = r.exposed.values().map(|t| t.0).sum();
        let share = (compute + exposed) as f64 / step.0 as f64;
        assert!((0.9..1.02).contains(&share), "{name}: {share}");
        let path = r.critical_path();
        assert!(
            path.windows(2)
                .all(|w| r.spans[w[0]].end <= r.spans[w[1]].start),
            "{name}"
        );
        let light = run(
            &program,
            &Options {
                record: false,
                ..Options::default()
            },
        );
        assert_eq!(light.step_samples, r.step_samples, "{name}");
        assert_eq!(light.exposed, r.exposed, "{name}");
        assert_eq!(light.memory.peak_reserved, r.memory.peak_reserved, "{name}");
    }
}

#[test]
fn symmetric_ranks_of_a_real_step() {
    let program = planned("peers-tiny", &[]);
    let one = run(&program, &Options::default());
    let all = run(
        &program,
        &Options {
            full_ranks: true,
            ..Options::default()
        },
    );
    assert_eq!(one.step_samples, all.step_samples);
    // The recorded step is not the same one: a single rank becomes periodic earlier or later.
    let within = |run: &Run| -> Vec<Span> {
        let since = |t: Picos| t.saturating_sub(run.recorded_from);
        let shifted = |s: &Span| Span {
            issued: since(s.issued),
            ready: since(s.ready),
            start: since(s.start),
            end: since(s.end),
            ..*s
        };
        run.spans.iter().map(shifted).collect()
    };
    assert!(within(&one) == within(&all) && one.exposed == all.exposed);
}

/// The 1.5 B model of the measured peers under FSDP2, eager, with micro-batch 2: 178.0 ms on one
/// machine, 172.6 ms on another; peak allocated 28,990.89 MiB, reserved 33,376 MiB, device 34,990.9
/// MiB. In the profile of its step, all-gathers take 19.9 ms, reduce-scatters 19.3 ms, and GEMMs
/// 89.4 ms.
#[test]
fn a_measured_step_is_predicted() {
    let program = planned("peers-1b", &[]);
    let r = run(&program, &Options::default());
    let near = |x: f64, y: f64, tolerance: f64, what: &str| {
        assert!((x / y - 1.0).abs() < tolerance, "{what}: {x}, measured {y}");
    };
    near(r.step_samples[0].ms(), 175.3, 0.10, "step ms");
    near(
        r.memory.peak_allocated.mib(),
        28_990.89,
        0.001,
        "allocated MiB",
    );
    near(r.memory.peak_reserved.mib(), 33_376.0, 0.02, "reserved MiB");
    near(r.memory.peak_device.mib(), 34_990.9, 0.02, "device MiB");
    near(
        r.collectives[&CollectiveKind::AllGather].busy.ms(),
        19.9,
        0.10,
        "all-gather ms",
    );
    near(
        r.collectives[&CollectiveKind::ReduceScatter].busy.ms(),
        19.3,
        0.10,
        "reduce-scatter ms",
    );
    let gemms: f64 = r
        .spans
        .iter()
        .filter(|s| matches!(program.instrs[s.instr.index()].op,
            shardlab_plan::program::Op::Launch { kernel, .. } if program.kernels[kernel.index()].name == "mm"))
        .map(|s| (s.end - s.start).ms())
        .sum();
    near(gemms, 89.4, 0.10, "GEMMs ms");
}

/// An activation of 2,048 tokens with 256 bf16 elements has 1 MiB. Between two H200s, NCCL's
/// all-reduce of that size takes 19.62 us (`all_reduce` of two ranks in `h200-nvlink-exec`).
#[test]
fn tensor_parallel_all_reduces_cost_what_was_measured() {
    let program = planned(
        "small-tensor-parallel",
        &[
            "mesh.hardware=h200-nvlink-exec",
            "precision.param_dtype=bf16",
            "model.hidden=256",
            "train.seq_len=1024",
            "train.micro_batch=2",
        ],
    );
    let r = run(&program, &Options::default());
    let of_the_model: Vec<_> = r
        .spans
        .iter()
        .filter(|s| program.instrs[s.instr.index()].rule == Rule::ModelCollective)
        .filter(|s| {
            let op = &program.instrs[s.instr.index()].op;
            matches!(op, Op::Collective { .. })
        })
        .map(|s| s.alone.us())
        .collect();
    // There are two pairs of layers. In forward, each pair all-reduces its outputs. In backward,
    // the second pair all-reduces the gradients of its inputs; those of the first pair are not
    // needed.
    assert_eq!(of_the_model.len(), 3);
    for us in of_the_model {
        assert!((us - 19.62).abs() < 0.01, "{us} us");
    }
}

/// 8,192 rows of 1,024 bf16 numbers, and their targets in float32, at 55 GB/s after 5 us, the rate
/// of copies from pinned memory.
#[test]
fn inputs_take_the_time_of_copies_from_the_host() {
    let text = "[model]\nfamily = \"linear\"\nlayers = 4\nhidden = 1024\n\
        [train]\nmicro_batch = 8192\ngrad_accum = 2\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";
    let scenario = scenario::parse("t", text, &[]).unwrap();
    let program = shardlab_plan::plan(&scenario).unwrap();
    let mut profile = hardware::load("h200-nvlink").unwrap();
    let d = &profile.device;
    assert_eq!((d.h2d_gbps, d.copy_latency_us), (55.0, 5.0));
    let step = |profile: &Profile| {
        let r = simulate(&program, profile, &Options::default()).unwrap();
        let sent = r.spans.iter();
        let sent: Vec<_> = sent.filter(|s| program.upload(s.instr).is_some()).collect();
        // All copies come before the first kernel, one after another.
        let first = r.spans.iter().find(|s| {
            let op = program.instrs[s.instr.index()].op;
            matches!(op, Op::Launch { stream, .. } if stream == COMPUTE)
        });
        assert!(sent.iter().all(|s| s.stream == COMPUTE));
        assert!(sent.is_sorted_by(|a, b| a.end < b.start));
        assert!(sent.last().unwrap().end < first.unwrap().start);
        let alone: Vec<f64> = sent.iter().map(|s| s.alone.us()).collect();
        (alone, r.step_samples[0].us())
    };
    let (alone, before) = step(&profile);
    let us = |bytes: f64| 5.0 + 8192.0 * 1024.0 * bytes / 55e3;
    for (got, wanted) in alone.iter().zip([us(2.0), us(4.0), us(2.0), us(4.0)]) {
        assert!((got - wanted).abs() < 1e-3, "{alone:?}");
    }
    assert_eq!(alone.len(), 4);
    // Twice the rate saves half of the copy time, because nothing else runs on the compute stream
    // then.
    profile.device.h2d_gbps = 110.0;
    let saved = before - step(&profile).1;
    let half = alone.iter().map(|us| us - 5.0).sum::<f64>() / 2.0;
    assert!((saved / half - 1.0).abs() < 0.05, "{saved} of {half}");
}

#[test]
fn prefetch_pays_where_gathers_would_be_exposed() {
    let without = run(&planned("prefetch-0", &[]), &Options::default());
    let with = run(&planned("prefetch-1", &[]), &Options::default());
    assert!(without.step_samples[0].0 > with.step_samples[0].0 * 11 / 10);
}

/// If the workspaces of kernels are outside the allocator, they count for the whole device. A fixed
/// order of sums makes the workspace of attention larger, and attention slower.
#[test]
fn the_device_holds_what_kernels_take_beside_the_program_s_buffers() {
    let measured = hardware::load("h200-nvlink").unwrap();
    let mut ours = measured.clone();
    ours.footprint.kernel_workspaces = true;
    ours.efficiency.attention_backward_fixed_order = Some(1.2);
    let device = |program: &Program, profile| {
        let r = simulate(program, profile, &Options::default()).unwrap();
        (r.memory.peak_device.0, r.step_samples[0])
    };
    let any = planned("peers-1b", &["fsdp.policy=\"native\""]);
    let fixed = planned(
        "peers-1b",
        &["fsdp.policy=\"native\"", "precision.deterministic=true"],
    );
    assert_ne!(any.digest(), fixed.digest());
    // By hand: 129 MiB for 2 x 32 heads with 4,096 tokens of 64 numbers, and a word; 2,113 MiB with
    // a fixed order of sums.
    let more = device(&any, &ours).0 - device(&any, &measured).0;
    assert_eq!(more >> 20, 129);
    let more = device(&fixed, &ours).0 - device(&fixed, &measured).0;
    assert_eq!(more >> 20, 2113);
    assert!(device(&fixed, &ours).1 > device(&any, &ours).1);
}

/// If a profile has no rows for a fixed order of sums, it is priced like any order, and the costs
/// report that no measurement covers it.
#[test]
fn a_fixed_order_that_nothing_says_the_price_of_is_told() {
    let profile = hardware::load("h200-nvlink").unwrap();
    assert_eq!(profile.efficiency.attention_backward_fixed_order, None);
    let told = |set: &[&str], profile: &hardware::Profile| {
        let program = planned("peers-1b", &[&["fsdp.policy=\"native\""], set].concat());
        let r = simulate(&program, profile, &Options::default()).unwrap();
        let named = r.costs.modelled_by_name.iter();
        let time = named
            .filter(|(name, _)| name.starts_with("attention_backward"))
            .map(|(name, time)| (name.clone(), time.ms().round()));
        (r.step_samples[0], time.collect::<Vec<_>>())
    };
    let (any, fixed) = (&[][..], &["precision.deterministic=true"][..]);
    // By hand: 16 layers, each with the time of its row, at the rate of GPUs that train side by
    // side.
    let rows = profile.attention.iter().filter(|t| t.backward && t.causal);
    let row = rows
        .flat_map(|t| &t.rows)
        .find(|r| (r.0, r.1, r.2, r.3, r.4) == (2, 32, 8, 4096, 64))
        .unwrap();
    let name = "attention_backward in any order".to_owned();
    assert_eq!(told(any, &profile).1, []);
    let (step, named) = told(fixed, &profile);
    let all = 16.0 * row.5 / 1e3 / profile.device.loaded_rate;
    assert_eq!(named, [(name, all.round())]);
    assert_eq!(step, told(any, &profile).0);
    let mut knows = profile.clone();
    knows.efficiency.attention_backward_fixed_order = Some(1.0);
    assert_eq!(told(fixed, &knows), told(any, &profile));
}

/// Frameworks create all communicators; `exec` only those that a collective uses. Policy `megatron`
/// needs one of its two only for clipping, which this scenario does not do.
#[test]
fn communicators_that_nothing_uses_take_memory_in_frameworks_alone() {
    let mut profile = hardware::load("h200-nvlink").unwrap();
    let megatron = planned("peers-1b", &["fsdp.policy=\"megatron\""]);
    let each = profile.footprint.communicator_mib << 20;
    let made = |profile: &hardware::Profile| profile.outside_allocator(&megatron).communicators.0;
    assert_eq!(megatron.communicators.len(), 2);
    assert_eq!(made(&profile), each * 2);
    profile.footprint.used_communicators = true;
    assert_eq!(made(&profile), each);
}

/// A communicator that gathers on copy engines has a different size if the profile gives one.
#[test]
fn communicators_on_copy_engines_have_a_size_of_their_own() {
    let mut profile = hardware::load("h200-nvlink").unwrap();
    let set = ["fsdp.policy=\"native\"", "fsdp.copy_engine_all_gather=true"];
    let program = planned("peers-1b", &set);
    let each = profile.footprint.communicator_mib;
    let made = |p: &hardware::Profile| p.outside_allocator(&program).communicators.0 >> 20;
    assert_eq!(made(&profile), 2 * each);
    profile.footprint.copy_engine_communicator_mib = Some(100);
    assert_eq!(made(&profile), each + 100);
    // Kernels of collectives take their memory once, and none if there are no collectives.
    profile.footprint.collective_kernels_mib = 7;
    assert_eq!(made(&profile), each + 107);
    let set = [
        "fsdp.policy=\"native\"",
        "fsdp.copy_engine_all_gather=true",
        "fsdp.copy_engine_reduce_scatter=true",
    ];
    let program = planned("peers-1b", &set);
    assert_eq!(
        profile.outside_allocator(&program).communicators.0 >> 20,
        200
    );
    // The sum for the norm does not run on copy engines, but a single number takes no memory.
    // Gradients take the same as others.
    let program = planned("peers-1b", &[&set[..], &["train.grad_norm=true"]].concat());
    assert_eq!(
        profile.outside_allocator(&program).communicators.0 >> 20,
        200
    );
    let mut program = planned("peers-1b", &set);
    let exchange = CollectiveKind::AllToAll;
    let all = program.collectives.iter_mut();
    all.filter(|c| c.kind == exchange)
        .for_each(|c| c.kind = CollectiveKind::ReduceScatter);
    assert_eq!(
        profile.outside_allocator(&program).communicators.0 >> 20,
        each + 107
    );
}

/// Step times of PyTorch's FSDP2 as rank 0 of four on one H200, with collectives that take no time
/// (`scenarios/hardware/measure/steps.py`, torch 2.11, 2026-11-23; medians of 16): scenario,
/// overrides, compile mode, milliseconds. The smallest steps, which are host-bound, are left out.
const ALONE: &[(&str, &[&str], &str, f64)] = &[
    ("peers-1b", &[], "off", 157.29),
    ("peers-1b", &[], "blocks", 144.72),
    ("peers-1b", &["train.micro_batch=4"], "off", 298.63),
    ("peers-3b", &[], "off", 368.36),
    ("peers-3b", &[], "blocks", 339.93),
    ("peers-3b", &["train.micro_batch=1"], "off", 200.04),
    ("peers-8b", SHORT, "off", 417.93),
    ("peers-8b", SHORT, "blocks", 397.67),
    ("peers-8b", &[], "off", 1008.39),
    ("peers-8b", &[], "blocks", 939.92),
    ("peers-1b", CUSTOM, "off", 185.23),
];
const SHORT: &[&str] = &[
    "train.seq_len=4096",
    "model.max_seq_len=4096",
    "train.recompute=\"none\"",
];
const CUSTOM: &[&str] = &[
    "model.hidden=2560",
    "model.layers=20",
    "model.heads=20",
    "model.kv_heads=4",
    "model.ffn=6912",
    "model.vocab=50304",
];

/// Compute and copies without communication: each step is within 2.5 %, and the mean error is
/// within 1 %. GEMMs and attention have rows from these steps; memory-bound kernels, gaps and host
/// work are priced by tables and costs that were measured elsewhere.
#[test]
fn steps_without_a_wire_take_what_one_rank_took() {
    let mut profile = hardware::load("h200-nvlink").unwrap();
    profile.collective.clear();
    profile.network.nvlink_gbps = 1e6;
    profile.network.sms_per_collective = 0;
    profile.contention.collective_loss_compute = 0.0;
    profile.contention.collective_loss_bandwidth = 0.0;
    profile.contention.collective_bandwidth = 0.0;
    profile.device.loaded_rate = 1.0;
    let mut off = Vec::new();
    for &(name, set, mode, measured) in ALONE {
        let mode = format!("compile.mode=\"{mode}\"");
        let program = planned(name, &[set, &[&mode]].concat());
        let r = simulate(&program, &profile, &Options::default()).unwrap();
        let error = r.step_samples[0].ms() / measured - 1.0;
        assert!(error.abs() < 0.025, "{name} {set:?} {mode}: {error:.4}");
        off.push(error.abs());
    }
    let mean = off.iter().sum::<f64>() / off.len() as f64;
    assert!(mean < 0.01, "{mean:.4}");
}

/// 8-bit matmuls have separate rates. Those of backward, which accumulate in float32, take longer.
/// A GPU whose profile has no rate is rejected.
#[test]
fn matmuls_in_8_bits_have_rates_of_their_own() {
    let cast = ["precision.float8_recipe=\"tensorwise\""];
    let [bf16, fp8] = [&[][..], &cast].map(|set| planned("llama3-8b-8xh100", set));
    let profile = hardware::load("h100-80").unwrap();
    let step = |program, profile: &hardware::Profile| {
        simulate(program, profile, &Options::default()).map(|r| r.step_samples[0].ms())
    };
    let (slow, fast) = (
        step(&bf16, &profile).unwrap(),
        step(&fp8, &profile).unwrap(),
    );
    assert!(fast < 0.95 * slow, "{fast} of {slow}");
    let mut even = profile.clone();
    even.efficiency.float8_full_accumulation = None;
    assert!(step(&fp8, &even).unwrap() < fast);
    let mut unknown = profile.clone();
    unknown
        .device
        .tflops
        .remove(&shardlab_plan::ir::DType::F8E4m3);
    let why = step(&fp8, &unknown).unwrap_err().to_string();
    assert!(
        why.contains("`h100-80` has no rate of 8-bit matmuls"),
        "{why}"
    );
    assert!(step(&bf16, &unknown).is_ok());
}

/// Block scaling is estimated from the rate of 8-bit matmuls that accumulate in float32, with casts
/// of transposed copies. It therefore costs more than tensorwise scaling, and less than bfloat16.
#[test]
fn matmuls_with_scales_of_blocks_are_estimated() {
    let step = |hardware: &str, recipe: &str| {
        let set = [
            format!("mesh.hardware={hardware}"),
            format!("precision.float8_recipe={recipe}"),
        ];
        let program = planned("llama3-8b-8xh100", &set.each_ref().map(String::as_str));
        let profile = hardware::load(hardware).unwrap();
        let run = simulate(&program, &profile, &Options::default()).unwrap();
        run.step_samples[0].ms()
    };
    for (hardware, recipe) in [("h100-80", "blockwise"), ("b200", "mxfp8")] {
        let [bf16, tensor, block] = ["none", "tensorwise", recipe].map(|r| step(hardware, r));
        println!("{hardware}: {bf16} {tensor} {block}");
        assert!(
            tensor < block && block < bf16,
            "{hardware}: {bf16} {tensor} {block}"
        );
    }
}

/// Gathers of codes by rows and by columns save the casts of gathered weights, and half of the
/// bytes. Megatron-FSDP also reduces the maxima of blocks, four bytes per 32 weights.
#[test]
fn gathers_of_mx_blocks_are_priced_by_their_bytes() {
    let run = |policy: &str, gathers: bool| {
        let set = [
            "mesh.hardware=b200".to_owned(),
            "precision.float8_recipe=mxfp8".to_owned(),
            format!("fsdp.policy={policy}"),
            format!("precision.float8_all_gather={gathers}"),
        ];
        let program = planned("llama3-8b-8xh100", &set.each_ref().map(String::as_str));
        let profile = hardware::load("b200").unwrap();
        let run = simulate(&program, &profile, &Options::default()).unwrap();
        let steady = program.section(SectionKind::Steady).expect("later steps");
        let sent = |kind: CollectiveKind| -> u64 {
            let ids = program.section_instrs(steady).iter();
            let ids = ids.filter_map(|i| match i.op {
                Op::Collective { id, .. } => Some(&program.collectives[id.index()]),
                _ => None,
            });
            let bytes = ids.filter(|c| c.kind == kind).map(|c| c.bytes.0);
            bytes.sum()
        };
        let sent = [CollectiveKind::AllGather, CollectiveKind::AllReduce].map(sent);
        (run.step_samples[0].ms(), sent)
    };
    for policy in ["native", "megatron"] {
        let ((bf16, [whole, norm]), (codes, [sent, maxima])) =
            (run(policy, false), run(policy, true));
        println!("{policy}: {bf16} {codes} ms, {whole} {sent} {maxima} bytes");
        assert!(codes < bf16, "{policy}: {bf16} {codes}");
        // Embedding and head stay in bf16: 1.05 of 8.03 billion weights.
        let ratio = sent as f64 / whole as f64;
        assert!((0.53..0.63).contains(&ratio), "{policy}: {ratio}");
        let blocks = (maxima - norm) as f64 * 8.0 / 6.98e9;
        let expected = if policy == "megatron" { 1.0 } else { 0.0 };
        assert!((blocks - expected).abs() < 0.03, "{policy}: {blocks}");
    }
}

/// Under FSDP2, the optimizer of offloaded state takes the time in which the CPU moves its bytes,
/// and does not overlap with anything.
#[test]
fn an_optimizer_on_the_cpu_has_the_rate_of_the_cpu() {
    let offload = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
    let no_norm = ["train.clip_norm=0.0", "train.grad_norm=false"];
    let program = planned("llama3-8b-8xh100", &[&[offload][..], &no_norm].concat());
    let step = |gbps: f64| {
        let mut profile = hardware::load(&program.meta.hardware).unwrap();
        profile.host.cpu_gbps = Some(gbps);
        let r = simulate(&program, &profile, &Options::default()).unwrap();
        r.step_samples[0].0 as f64 / 1e12
    };
    let parameters: u64 = program.params.iter().map(|p| p.numel()).sum();
    // Weight, gradient and two moments are read; all but the gradient are written.
    let bytes = 28.0 * parameters as f64 / 8.0;
    let longer = step(20.0) - step(50.0);
    let expected = bytes / 1e9 * (1.0 / 20.0 - 1.0 / 50.0);
    assert!(
        (longer / expected - 1.0).abs() < 0.01,
        "{longer} {expected}"
    );
}

/// Activations that leave the device after forward do not count at the peak.
#[test]
fn offloaded_activations_lower_the_peak() {
    let peak = |set: &[&str]| {
        let program = planned("llama3-8b-8xh100", set);
        run(&program, &Options::default()).memory.peak_allocated.0
    };
    let recompute = "train.recompute=none";
    let [kept, moved] = [
        peak(&[recompute]),
        peak(&[recompute, "train.activation_offload=true"]),
    ];
    assert!(moved < kept / 2, "{moved} of {kept}");
}

/// If a shared expert overlaps with the token exchange, less of the step has no running kernel, in
/// forward and backward, and the step is shorter.
#[test]
fn shared_experts_hide_the_dispatch() {
    for dispatcher in ["gather", "padded", "peer", "deepep"] {
        let of = |overlap: bool| {
            let set = [
                "model.layers=4",
                "model.shared_expert_ffn=4096",
                "moe.capacity_factor=1.25",
                &format!("moe.dispatcher={dispatcher}"),
                &format!("moe.shared_expert_overlap={overlap}"),
            ];
            let program = planned("qwen3-30b-a3b-8xh100-ep8", &set);
            let r = run(&program, &Options::default());
            let exposed = exposed_exchanges(&program, &r);
            (exposed, r.step_samples[0])
        };
        let ((hidden, short), (waited, long)) = (of(true), of(false));
        assert!(
            hidden.0 < waited.0 * 9 / 10,
            "{dispatcher}: {hidden:?} {waited:?}"
        );
        assert!(short < long, "{dispatcher}: {short:?} {long:?}");
    }
}

/// Returns the time in which tokens are exchanged while no kernel computes.
fn exposed_exchanges(program: &Program, r: &Run) -> Picos {
    let compute: Vec<(u64, u64)> = (r.spans.iter())
        .filter(|s| s.stream == COMPUTE)
        .map(|s| (s.start.0, s.end.0))
        .collect();
    let exchanges = r.spans.iter().filter(|s| {
        let instr = &program.instrs[s.instr.index()];
        instr.rule == Rule::ModelCollective && matches!(instr.op, Op::Collective { .. })
    });
    let exposed = exchanges.map(|s| {
        let covered = compute.iter().map(|&(from, to)| {
            let (from, to) = (from.max(s.start.0), to.min(s.end.0));
            to.saturating_sub(from)
        });
        (s.end.0 - s.start.0).saturating_sub(covered.sum())
    });
    Picos(exposed.sum())
}
