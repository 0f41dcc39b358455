//! Tests programs against closed forms, counts and text.

mod find;
mod float8;
mod fsdp2;
mod full;
mod ignored;
mod joint_backward;
mod lora;
mod megatron_v2;
mod micro_batches;
mod moments;
mod packed;
mod param_groups;
mod pr4435;
mod recompute;
mod reductions;
mod skipped;
mod streams;
mod uses;
mod weight_gradients;

use crate::compile::tape::TapeOp;
use crate::config::{OuterStrategy, PolicyKind, Scenario, Strategy, UnitPattern, Units};
use crate::ir::{
    Access, BufferId, COMPUTE, CollectiveKind, DType, Holds, InstrId, KernelClass, ReduceOp, Role,
    UnitId,
};
use crate::plan;
use crate::program::{Instr, Op, Phase, Program, Rule, SectionKind, StreamKind};
use crate::scenario::parse;
use crate::shard::{Layout, persistent_bytes};
use crate::units::Bytes;
use std::collections::BTreeMap;

const LINEAR: &str = "[model]\nfamily = \"linear\"\nlayers = 4\nhidden = 64\n\
    [train]\nmicro_batch = 16\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

const LLAMA: &str = "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\n\
    ffn = 176\nvocab = 250\nmax_seq_len = 32\n[train]\nseq_len = 32\nmicro_batch = 2\n\
    [mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

fn scenario(text: &str, sets: &[&str]) -> Scenario {
    let sets: Vec<String> = sets.iter().map(|&s| s.to_owned()).collect();
    parse("test", text, &sets).unwrap_or_else(|e| panic!("{e}"))
}

fn program(text: &str, sets: &[&str]) -> Program {
    plan(&scenario(text, sets)).unwrap_or_else(|e| panic!("{sets:?}: {e}"))
}

/// Counts the matmuls in forward and backward of a tape.
fn matmuls(set: &[&str]) -> [usize; 2] {
    let tape = crate::tape_of(&scenario(LLAMA, set)).unwrap();
    let count = |ops: &[TapeOp]| {
        let gemm = |op: &&TapeOp| {
            matches!(op, TapeOp::Launch { kernel, .. }
                if matches!(tape.kernels[kernel.index()].class, KernelClass::Gemm { .. }))
        };
        ops.iter().filter(gemm).count()
    };
    [count(&tape.forward), count(&tape.backward)]
}

/// Returns the requested bytes of the buffers that are never freed, by role.
fn at_rest(p: &Program) -> BTreeMap<Role, Bytes> {
    let mut live = vec![false; p.buffers.len()];
    for section in &p.sections {
        for instr in p.section_instrs(section) {
            match instr.op {
                Op::Alloc(b) => live[b.index()] = true,
                Op::Free(b) => live[b.index()] = false,
                _ => {}
            }
        }
    }
    let mut by_role = BTreeMap::new();
    for (b, _) in p.buffers.iter().zip(live).filter(|(_, live)| *live) {
        *by_role.entry(b.role).or_insert(Bytes::ZERO) += b.bytes;
    }
    by_role
}

fn compare(text: &str, sets: &[&str]) {
    let s = scenario(text, sets);
    let p = plan(&s).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
    let mut want = BTreeMap::new();
    for group in &p.groups {
        let Layout::Flat(layout) = &group.layout else {
            panic!("flat policies lay groups out flat")
        };
        let mut precision = s.precision.clone();
        // The native engine uses the compute weights as main weights if their dtypes agree.
        if s.fsdp.policy == PolicyKind::Native && precision.main_params == Some(precision.compute) {
            precision.main_params = None;
        }
        let forms = persistent_bytes(
            layout.numel,
            layout.payload_numel(),
            &s.device_mesh(),
            // A sharding axis with one rank shards nothing.
            if s.mesh.dp_shard > 1 {
                s.fsdp.strategy
            } else {
                Strategy::NoShard
            },
            s.fsdp.outer_strategy,
            &precision,
            2,
        );
        // The native engine has sharded gradients only from their reduction to the optimizer.
        let sharded = matches!(
            s.fsdp.strategy,
            Strategy::OptimGrads | Strategy::OptimGradsParams
        );
        let at_rest = s.fsdp.policy != PolicyKind::Native || s.mesh.dp_shard == 1 || !sharded;
        let main_grad = if at_rest {
            forms.main_grad
        } else {
            Bytes::ZERO
        };
        // PyTorch's optimizers update unsharded weights in place, without padding.
        let apart = s.fsdp.policy != PolicyKind::Native
            && (s.mesh.dp_shard == 1 || s.fsdp.strategy == Strategy::NoShard)
            && forms.main_weight == Bytes::ZERO
            && forms.model_weight.0 == layout.payload_numel() * s.precision.compute.size();
        let optimizer = match apart {
            true => Bytes(forms.optimizer.0 / layout.numel * layout.payload_numel()),
            false => forms.optimizer,
        };
        for (role, bytes) in [
            (Role::ModelWeight, forms.model_weight),
            (Role::MainWeight, forms.main_weight),
            (Role::MainGrad, main_grad),
            (Role::OptimizerState, optimizer),
        ] {
            *want.entry(role).or_insert(Bytes::ZERO) += bytes;
        }
    }
    let got = at_rest(&p);
    for (role, bytes) in want {
        let have = got.get(&role).copied().unwrap_or_default();
        assert_eq!(have, bytes, "{role:?} with {sets:?}");
    }
}

/// Resident state matches Megatron-FSDP's closed forms exactly (section 2.5 of its DDP buffers).
#[test]
fn persistent_bytes_are_the_closed_forms() {
    for policy in ["native", "megatron"] {
        for strategy in ["no_shard", "optim", "optim_grads", "optim_grads_params"] {
            for precision in [
                ["bf16", "f32", "f32"],
                ["bf16", "f32", "bf16"],
                ["bf16", "none", "bf16"],
                ["f32", "f32", "f32"],
            ] {
                for (shard, outer) in [(4, 1), (3, 1), (4, 2), (1, 4)] {
                    let sets = [
                        format!("fsdp.policy={policy}"),
                        format!("fsdp.strategy={strategy}"),
                        format!("precision.compute={}", precision[0]),
                        format!("precision.main_params={}", precision[1]),
                        format!("precision.main_grads={}", precision[2]),
                        format!("mesh.dp_shard={shard}"),
                        format!("mesh.dp_outer={outer}"),
                    ];
                    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
                    compare(LLAMA, &sets);
                }
            }
        }
        for precision in ["f32", "bf16"] {
            let grads = format!("precision.main_grads={precision}");
            let policy = format!("fsdp.policy={policy}");
            compare(
                LLAMA,
                &[
                    &policy,
                    &grads,
                    "mesh.dp_outer=2",
                    "fsdp.outer_strategy=optim",
                ],
            );
        }
    }
}

/// FSDP2's resident state is each parameter's padded shard in the stored dtype, and two moments of
/// the unpadded shard.
#[test]
fn persistent_bytes_of_fsdp2() {
    for shard in [1u64, 3, 4] {
        let p = program(
            LLAMA,
            &["fsdp.policy=fsdp2", &format!("mesh.dp_shard={shard}")],
        );
        let mut padded = 0;
        let mut local = 0;
        for param in &p.params {
            let rows = param.shape[0].div_ceil(shard);
            padded += rows * param.row() * 4;
            local += rows.min(param.shape[0]) * param.row() * 8;
        }
        let got = at_rest(&p);
        assert_eq!(got[&Role::MainWeight], Bytes(padded), "{shard} ranks");
        assert_eq!(got[&Role::OptimizerState], Bytes(local), "{shard} ranks");
    }
}

fn count(p: &Program, kind: CollectiveKind) -> usize {
    let steady = p
        .section(SectionKind::Steady)
        .expect("every program has steady steps");
    p.section_instrs(steady)
        .iter()
        .filter(
            |i| matches!(i.op, Op::Collective { id, .. } if p.collectives[id.index()].kind == kind),
        )
        .count()
}

/// Collectives of N linear children and two micro-batches (Megatron-LM `test_overlap.py`):
/// all-gathers N, N, 4N and reduce-scatters N, 2N, 2N for ZeRO-1, 2, 3. The native engine does not
/// gather the first child for backward, because its weight would only be used for a gradient of the
/// input.
#[test]
fn collectives_of_linear_children() {
    for policy in ["native", "megatron"] {
        for (strategy, gathers, reductions) in [
            ("optim", 4, 4),
            ("optim_grads", 4, 8),
            ("optim_grads_params", 16, 8),
        ] {
            let p = program(
                LINEAR,
                &[
                    &format!("fsdp.policy={policy}"),
                    &format!("fsdp.strategy={strategy}"),
                    "train.grad_accum=2",
                ],
            );
            let got = (
                count(&p, CollectiveKind::AllGather),
                count(&p, CollectiveKind::ReduceScatter),
            );
            let unread = if policy == "native" && strategy == "optim_grads_params" {
                2
            } else {
                0
            };
            assert_eq!(got, (gathers - unread, reductions), "{policy} {strategy}");
        }
    }
}

/// Under HFSDP, the outer axis refreshes each group's shard once per step, even if it is gathered
/// again in backward, in later micro-batches or for the next step. (Megatron-FSDP refreshes it
/// again in backward.)
#[test]
fn shards_are_refreshed_over_the_outer_axis_once_a_step() {
    for set in [
        &["train.grad_accum=2"][..],
        &["train.recompute=full", "train.validate_every=2"],
        &["fsdp.prefetch_next_step=2", "fsdp.prefetch_backward=2"],
        &["fsdp.reshard_after_forward=2"],
        // Frozen parameters are never updated.
        &["fsdp.frozen=[\"layers.0\"]", "fsdp.prefetch_next_step=2"],
        &["fsdp.frozen=[\"tok_embeddings\"]", "train.grad_accum=2"],
    ] {
        let hfsdp = ["mesh.dp_outer=2", "fsdp.outer_strategy=optim"];
        let p = program(LLAMA, &[&hfsdp, set].concat());
        let refreshes = |kind| {
            let section = p.section(kind).expect("a section");
            let outer = |i: &&Instr| i.rule == Rule::OuterGather && collective(&p, i).is_some();
            p.section_instrs(section).iter().filter(outer).count()
        };
        let trained = p.groups.iter().filter(|g| g.requires_grad).count();
        assert_eq!(refreshes(SectionKind::Steady), trained, "{set:?}");
        if p.section(SectionKind::Validation).is_some() {
            assert_eq!(refreshes(SectionKind::Validation), p.groups.len());
        }
        let report = crate::check::check(&p);
        assert!(report.is_ok(), "{set:?}\n{report}");
    }
}

fn steady(p: &Program) -> &[Instr] {
    let steady = p.section(SectionKind::Steady);
    p.section_instrs(steady.expect("every program has steady steps"))
}

/// Each micro-batch gets new tokens, one more than the sequence length for the labels. Rotary
/// tables are kept.
#[test]
fn inputs_are_sent_where_they_are_new() {
    let sent = |text, sets: &[&str]| {
        let p = program(text, sets);
        let of = |kind| {
            let range = p.section(kind).map_or(0..0, |s| s.instrs.clone());
            let sent = range.filter_map(|i| p.upload(InstrId(i)));
            sent.map(|b| p.buffers[b.index()].bytes.0)
                .collect::<Vec<_>>()
        };
        let [init, first, steady] =
            [SectionKind::Init, SectionKind::First, SectionKind::Steady].map(of);
        assert!(init.is_empty());
        assert_eq!(first, steady);
        steady
    };
    assert_eq!(sent(LLAMA, &["train.grad_accum=3"]), [2 * 33 * 8; 3]);
    // Rows of bf16 and their float32 values.
    assert_eq!(sent(LINEAR, &[]), [16 * 64 * 2, 16 * 64 * 4]);
}

/// Returns the units of the instructions that `f` selects, in order.
fn units_of(p: &Program, f: impl Fn(&Instr) -> bool) -> Vec<UnitId> {
    let picked = steady(p).iter().filter(|i| f(i));
    picked.map(|i| i.unit).collect()
}

fn is_launch(i: &Instr) -> bool {
    matches!(i.op, Op::Launch { .. })
}

fn collective(p: &Program, i: &Instr) -> Option<CollectiveKind> {
    match i.op {
        Op::Collective { id, .. } => Some(p.collectives[id.index()].kind),
        _ => None,
    }
}

const UNITS: &str = "fsdp.units=[\"layers.*\", \"tok_embeddings\", \"norm+output=keep\"]";

/// Lists that name the next two units of every unit result in the same program as depth 2.
#[test]
fn lists_of_the_next_units_are_a_depth() {
    let order = ["root", "layers.0", "layers.1", "layers.2", "layers.3"];
    let next = |order: &[&str], unit: &str| {
        let at = order.iter().position(|u| *u == unit).expect("a unit");
        let names: Vec<String> = order[at + 1..]
            .iter()
            .take(2)
            .map(|u| format!("\"{u}\""))
            .collect();
        names.join(", ")
    };
    let mut backward = order;
    backward[1..].reverse();
    let tables: Vec<String> = order
        .iter()
        .map(|unit| {
            let mut fields = vec![format!("unit = \"{unit}\"")];
            for (name, list) in [("forward", &order), ("backward", &backward)] {
                let next = next(list, unit);
                if !next.is_empty() {
                    fields.push(format!("{name} = [{next}]"));
                }
            }
            format!("{{ {} }}", fields.join(", "))
        })
        .collect();
    let lists = format!("fsdp.prefetch_lists=[{}]", tables.join(", "));
    for policy in ["native", "fsdp2"] {
        let policy = format!("fsdp.policy={policy}");
        let base = [&*policy, "model.layers=4", "train.validate_every=2"];
        let by_list = program(LLAMA, &[&base[..], &[&*lists]].concat());
        let depth = ["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"];
        let by_depth = program(LLAMA, &[&base[..], &depth].concat());
        assert_eq!(by_list.to_text(), by_depth.to_text(), "{policy}");
        let none = program(LLAMA, &base);
        assert_ne!(by_list.digest(), none.digest(), "{policy}");
    }
}

/// A list only changes the units that it names.
#[test]
fn a_list_changes_its_own_unit() {
    let far =
        "fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"layers.3\", \"layers.1\"] }]";
    for policy in ["native", "fsdp2"] {
        let policy = format!("fsdp.policy={policy}");
        let p = program(LLAMA, &[&policy, "model.layers=4", far]);
        let report = crate::check::check(&p);
        assert!(report.is_ok(), "{policy}\n{report}");
        let gathers = steady(&p)
            .iter()
            .filter(|i| i.phase == Phase::Forward && i.rule != Rule::OuterGather);
        let names: Vec<&str> = gathers
            .filter(|i| collective(&p, i) == Some(CollectiveKind::AllGather))
            .map(|i| p.units[i.unit.index()].name.as_str())
            .collect();
        let wanted = ["root", "layers.0", "layers.3", "layers.1", "layers.2"];
        assert_eq!(names, wanted, "{policy}");
    }
}

/// The native engine updates groups in the order of their reductions. The updates (or, with
/// clipping, the sums of squares) of all other groups come between the last reduction and the
/// update of its group.
#[test]
fn the_last_reduction_hides_behind_the_updates_of_the_others() {
    for strategy in ["optim", "optim_grads", "optim_grads_params"] {
        for clip in [false, true] {
            let p = program(
                LLAMA,
                &[
                    UNITS,
                    &format!("fsdp.strategy={strategy}"),
                    if clip {
                        "train.clip_norm=1.0"
                    } else {
                        "train.grad_norm=true"
                    },
                    "train.grad_accum=2",
                ],
            );
            let reduced = units_of(&p, |i| {
                i.rule == Rule::Reduce
                    && i.micro_batch == 1
                    && collective(&p, i) == Some(CollectiveKind::ReduceScatter)
            });
            assert_eq!(reduced.len(), 4, "two layers, embedding, head");
            assert_eq!(p.units[reduced[3].index()].name, "tok_embeddings");
            let updated = units_of(&p, |i| i.rule == Rule::Optimizer && is_launch(i));
            assert_eq!(updated, reduced, "{strategy}");
            // First reads of gradients: their sums if clipping needs them, otherwise the updates.
            let first = if clip { Rule::Clip } else { Rule::Optimizer };
            let step = steady(&p);
            let last = step
                .iter()
                .rposition(|i| i.rule == Rule::Reduce && matches!(i.op, Op::Record { .. }))
                .expect("the last reduction's event");
            let Op::Record { event, .. } = step[last].op else {
                panic!("an event");
            };
            let fence = step
                .iter()
                .position(|i| {
                    matches!(i.op, Op::Wait { event: e, stream } if e == event && stream == COMPUTE)
                })
                .expect("a wait for it");
            let between = step[last..fence].iter();
            let between = between.filter(|i| i.rule == first && is_launch(i)).count();
            assert_eq!(between, 3, "{strategy} clip {clip}");
        }
    }
}

/// Backward reads the weights of layers (and of the head, which stays full here), but not those of
/// an embedding.
#[test]
fn native_gathers_for_backward_what_backward_reads() {
    let backward = |sets: &[&str]| {
        let p = program(LLAMA, &[&[UNITS], sets].concat());
        let gathered = units_of(&p, |i| {
            matches!(i.phase, Phase::Backward | Phase::Recompute)
                && collective(&p, i) == Some(CollectiveKind::AllGather)
        });
        let name = |u: &UnitId| p.units[u.index()].name.clone();
        let mut names: Vec<String> = gathered.iter().map(name).collect();
        names.sort_unstable();
        names
    };
    for prefetch in [0, 1, 2] {
        let depth = format!("fsdp.prefetch_backward={prefetch}");
        assert_eq!(backward(&[&depth]), ["layers.0", "layers.1"]);
    }
    let recompute = ["train.recompute=full"];
    assert_eq!(backward(&recompute), ["layers.0", "layers.1"]);
    // Modules before the first trained one have no backward.
    let frozen = ["fsdp.frozen=[\"tok_embeddings\", \"layers.0\"]"];
    assert_eq!(backward(&frozen), ["layers.1"]);
    for peer in ["fsdp2", "megatron"] {
        let gathered = backward(&[&format!("fsdp.policy={peer}")]);
        assert!(gathered.contains(&"tok_embeddings".to_owned()), "{peer}");
    }
}

/// With main weights, the native update also writes the compute weights: in one range, or in one
/// range per parameter if parameters have separate buffers.
#[test]
fn native_updates_write_compute_weights() {
    for (sets, refreshes) in [
        (&["fsdp.strategy=optim_grads_params"][..], 0),
        (&["fsdp.strategy=optim"], 0),
        // All rows have the same length, so the layout has no gaps.
        (&["fsdp.strategy=no_shard", "model.ffn=64"], 0),
        (&["mesh.dp_outer=2", "fsdp.outer_strategy=optim"], 0),
        (&["fsdp.offload=[\"params\", \"optimizer\"]"], 0),
        (&["fsdp.policy=megatron"], 3),
    ] {
        let p = program(LLAMA, sets);
        let launches = |rule| {
            let list = steady(&p).iter();
            list.filter(move |i| i.rule == rule && is_launch(i))
        };
        assert_eq!(launches(Rule::Refresh).count(), refreshes, "{sets:?}");
        let role = |a: &Access| p.buffers[a.buffer.index()].role;
        for i in launches(Rule::Optimizer) {
            let elements = |wanted: Role| {
                let writes = p.writes(&i.op).iter().filter(|a| role(a) == wanted);
                let size = |a: &Access| p.buffers[a.buffer.index()].dtype.size();
                writes.map(|a| a.bytes / size(a)).sum::<u64>()
            };
            // Megatron casts gradients in the same phase.
            if elements(Role::OptimizerState) == 0 {
                continue;
            }
            let compute = elements(Role::ModelWeight);
            let main = elements(Role::MainWeight);
            assert!(main > 0, "{sets:?}");
            assert_eq!(compute, if refreshes == 0 { main } else { 0 }, "{sets:?}");
        }
    }
}

/// A captured iteration of the native engine ends after its updates. For torch and Megatron, it
/// contains only forward and backward.
#[test]
fn what_a_captured_iteration_contains() {
    for (policy, whole) in [
        ("native", true),
        ("fsdp2", false),
        ("megatron", false),
        ("megatron_v2", false),
    ] {
        let p = program(
            LLAMA,
            &[
                &format!("fsdp.policy={policy}"),
                "compile.cuda_graph=full_iteration",
                "train.clip_norm=1.0",
            ],
        );
        let at = |f: &dyn Fn(&Instr) -> bool| steady(&p).iter().rposition(f);
        let end = at(&|i| matches!(i.op, Op::GraphEnd(_)));
        let update = at(&|i| i.rule == Rule::Optimizer && is_launch(i));
        assert_eq!(end > update, whole, "{policy}");
    }
}

/// Every combination of options lowers to a program that the checker accepts.
#[test]
fn every_combination_checks() {
    let axes: [(&str, &[&str]); 7] = [
        (
            "fsdp.policy",
            &["native", "fsdp2", "megatron", "megatron_v2"],
        ),
        (
            "fsdp.strategy",
            &["no_shard", "optim", "optim_grads", "optim_grads_params"],
        ),
        ("fsdp.reshard_after_forward", &["true", "false", "auto"]),
        (
            "train.recompute",
            &["none", "full", "selective", "pointwise"],
        ),
        ("train.grad_accum", &["1", "2"]),
        ("mesh.dp_outer", &["1", "2"]),
        ("compile.mode", &["off", "regions", "blocks", "full"]),
    ];
    let mut checked = 0;
    let total: usize = axes.iter().map(|(_, v)| v.len()).product();
    for mut n in 0..total {
        let mut sets: Vec<String> = vec![
            "train.clip_norm=1.0".into(),
            "train.validate_every=3".into(),
        ];
        for (key, values) in axes {
            sets.push(format!("{key}={}", values[n % values.len()]));
            n /= values.len();
        }
        let Ok(s) = parse("test", LLAMA, &sets) else {
            continue;
        };
        let p = plan(&s).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
        let report = crate::check::check(&p);
        assert!(report.is_ok(), "{sets:?}\n{report}");
        checked += 1;
    }
    assert!(checked > 300, "only {checked} combinations are legal");
}

/// Tests options that only one policy has.
#[test]
fn further_options_check() {
    for sets in [
        &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"][..],
        &["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=3"],
        &["fsdp.prefetch_forward={ elements = 60000 }"],
        &["fsdp.reduce_in_flight=1"],
        &["fsdp.reduce_in_flight=4", "train.grad_accum=3"],
        &["fsdp.async_reduce=false"],
        &["fsdp.unify_comm_stream=true"],
        &["fsdp.separate_communicators=false"],
        &["fsdp.reshard_after_forward=2"],
        &["fsdp.reshard_after_forward=2", "fsdp.policy=fsdp2"],
        &["fsdp.reshard_root=true", "fsdp.policy=fsdp2"],
        &[
            "fsdp.reshard_root=true",
            "fsdp.policy=fsdp2",
            "fsdp.reshard_after_forward=auto",
        ],
        &[
            "fsdp.reshard_root=true",
            "fsdp.policy=fsdp2",
            "fsdp.reshard_after_forward=2",
            "train.grad_accum=2",
            "train.validate_every=2",
        ],
        &[
            "fsdp.reshard_after_backward=false",
            "train.grad_accum=2",
            "fsdp.reshard_after_forward=2",
        ],
        &[
            "fsdp.reshard_after_backward=false",
            "train.grad_accum=3",
            "fsdp.prefetch_next_step=2",
            "train.validate_every=2",
        ],
        &["fsdp.nan_check=true"],
        &["fsdp.nan_check=true", "fsdp.strategy=optim_grads"],
        &[
            "fsdp.nan_check=true",
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
        ],
        &["fsdp.average_in_collective=true"],
        &["fsdp.per_token_loss=true"],
        &["fsdp.allocator=caching"],
        &["fsdp.allocator=double_buffer"],
        &["fsdp.allocator=double_buffer", "fsdp.policy=megatron"],
        &["fsdp.policy=fsdp2", "fsdp.prefetch_forward=2"],
        &["fsdp.policy=fsdp2", "fsdp.prefetch_backward=2"],
        &["fsdp.policy=fsdp2", "fsdp.reduce_in_flight=3"],
        &["fsdp.policy=fsdp2", "precision.comm_grads=bf16"],
        &["fsdp.policy=megatron", "precision.main_grads=f32"],
        &[
            "fsdp.policy=megatron",
            "mesh.dp_outer=2",
            "precision.comm_grads=f32",
            "fsdp.allocator=double_buffer",
        ],
        &[
            "fsdp.policy=megatron",
            "mesh.dp_outer=2",
            "precision.comm_grads=f32",
            "fsdp.async_reduce=false",
            "fsdp.strategy=optim",
        ],
        &["fsdp.units=root"],
        &["fsdp.units=[\"layers.*\", \"tok_embeddings\", \"norm+output=keep\"]"],
        &["fsdp.units=[\"layers.*.attention\", \"layers.*.mlp\"]"],
        &["fsdp.frozen=[\"tok_embeddings\", \"layers.0\"]"],
        &[
            "fsdp.frozen=[\"tok_embeddings\", \"layers.0\"]",
            "fsdp.reshard_after_forward=false",
        ],
        &["model.tie_embeddings=true"],
        &["fsdp.frozen=[\"tok_embeddings\"]", "fsdp.policy=megatron"],
        &["model.bias=true"],
        &["model.bias=qkv"],
        &["model.qk_norm=true"],
        &[
            "model.hidden=24",
            "model.head_dim=8",
            "fsdp.strategy=no_shard",
            "precision.compute=f32",
        ],
        &[
            "model.bias=true",
            "compile.mode=full",
            "train.recompute=full",
        ],
        &["train.optimizer=sgd"],
        &["train.loss=chunked"],
        &["train.loss=chunked", "model.tie_embeddings=true"],
        &[
            "train.loss=checkpointed_chunks",
            "model.tie_embeddings=true",
            "train.loss_chunk_tokens=7",
        ],
        &[
            "train.loss=checkpointed_chunks",
            "train.loss_chunk_tokens=7",
            "fsdp.policy=fsdp2",
            "train.recompute=full",
            "train.use_reentrant=true",
        ],
        &[
            "train.loss=checkpointed_chunks",
            "train.loss_chunk_tokens=7",
            "compile.mode=full",
            "train.recompute=selective",
        ],
        &[
            "train.loss=checkpointed_chunks",
            "fsdp.policy=megatron",
            "train.grad_accum=2",
        ],
        &[
            "train.loss=saved_chunks",
            "train.loss_chunk_tokens=7",
            "fsdp.policy=fsdp2",
        ],
        &[
            "train.loss=split_logits",
            "train.loss_chunk_tokens=7",
            "compile.mode=regions",
            "train.grad_accum=2",
        ],
        &[
            "train.loss=split_logits",
            "train.loss_chunk_tokens=7",
            "fsdp.policy=megatron",
            "model.tie_embeddings=true",
        ],
        &[
            "train.loss=chunked",
            "compile.mode=regions",
            "train.grad_accum=2",
        ],
        &["train.loss=chunked", "compile.mode=full"],
        &[
            "train.loss=chunked",
            "fsdp.policy=fsdp2",
            "train.grad_accum=2",
        ],
        &["train.loss=chunked", "fsdp.policy=megatron"],
        &["train.loss=chunked", "fsdp.policy=megatron_v2"],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.units=root",
            "train.grad_accum=2",
        ],
        &[
            "fsdp.policy=megatron_v2",
            "model.tie_embeddings=true",
            "mesh.dp_shard=1",
            "mesh.dp_outer=2",
        ],
        &["fsdp.policy=megatron_v2", "mesh.dp_shard=1"],
        &[
            "fsdp.policy=megatron_v2",
            "compile.cuda_graph=full_iteration",
        ],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.frozen=[\"layers.*.attention\"]",
            "precision.main_params=none",
        ],
        &[
            "train.loss=chunked",
            "fsdp.strategy=optim",
            "train.grad_accum=2",
        ],
        &["train.loss=chunked", "fsdp.frozen=[\"output\"]"],
        &["train.grad_norm=true"],
        &[
            "fsdp.copy_engine_reduce=true",
            "fsdp.copy_engine_gather=true",
            "train.grad_accum=2",
        ],
        &["fsdp.copy_engine_reduce=true", "mesh.dp_outer=2"],
        &[
            "fsdp.copy_engine_reduce=true",
            "fsdp.strategy=optim_grads",
            "precision.comm_grads=bf16",
        ],
        &["fsdp.copy_engine_reduce=true", "fsdp.offload=[\"grads\"]"],
        &[
            "fsdp.copy_engine_reduce=true",
            "compile.cuda_graph=full_iteration",
            "fsdp.per_token_loss=true",
        ],
        &["train.grad_norm=true", "fsdp.offload=[\"grads\"]"],
        &["compile.cuda_graph=[\"attn\", \"mlp\"]"],
        &["compile.cuda_graph=[\"block\"]", "train.grad_accum=2"],
        &["compile.cuda_graph=full_iteration"],
        &[
            "compile.cuda_graph=full_iteration",
            "train.clip_norm=1.0",
            "train.grad_accum=2",
            "fsdp.allocator=caching",
        ],
        &[
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
            "train.grad_accum=2",
        ],
        &["mesh.dp_outer=2", "fsdp.strategy=no_shard"],
        &[
            "mesh.dp_outer=2",
            "fsdp.strategy=optim",
            "train.grad_accum=2",
        ],
        &["mesh.dp_shard=1"],
        &["mesh.dp_shard=1", "fsdp.policy=fsdp2"],
        &["mesh.dp_shard=1", "fsdp.policy=megatron"],
        &["mesh.dp_shard=3"],
        &["precision.compute=f32"],
        &["fsdp.offload=[\"optimizer\"]"],
        &["fsdp.offload=[\"params\"]", "train.validate_every=2"],
        &["fsdp.offload=[\"grads\"]", "train.grad_accum=3"],
        &[
            "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]",
            "train.clip_norm=1.0",
            "train.grad_accum=2",
        ],
        &[
            "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]",
            "mesh.dp_outer=2",
            "fsdp.allocator=caching",
        ],
        &[
            "fsdp.offload=[\"params\", \"optimizer\"]",
            "precision.compute=f32",
            "fsdp.reshard_after_forward=2",
        ],
        &["precision.main_params=none", "precision.main_grads=bf16"],
    ] {
        let p = program(LLAMA, sets);
        let report = crate::check::check(&p);
        assert!(report.is_ok(), "{sets:?}\n{report}");
    }
}

/// Validation of a fully compiled step frees a parameter after its last use, as forward does, so it
/// never holds the whole model at once.
#[test]
fn full_mode_validates_within_the_memory_of_a_step() {
    let p = program(
        LLAMA,
        &[
            "compile.mode=full",
            "compile.bucket_bytes=0",
            "model.layers=4",
            "train.validate_every=2",
        ],
    );
    let most = |kind| {
        let section = p.section(kind).expect("a section");
        let (mut live, mut most) = (0, 0);
        for instr in p.section_instrs(section) {
            let full = |b: BufferId| {
                let b = p.buffers[b.index()];
                u64::from(b.role == Role::FullWeight) * b.bytes.0
            };
            match instr.op {
                Op::Alloc(b) => live += full(b),
                Op::Free(b) => live -= full(b),
                _ => {}
            }
            most = most.max(live);
        }
        most
    };
    let validation = most(SectionKind::Validation);
    assert!(0 < validation && validation <= most(SectionKind::Steady));
}

/// Recompute never prefetches. Validation frees exactly the buffers that it allocates.
#[test]
fn recompute_gathers_on_demand() {
    for (policy, depth) in [
        ("native", 2),
        ("fsdp2", 2),
        ("megatron", 2),
        ("megatron_v2", 1),
    ] {
        let p = program(
            LLAMA,
            &[
                &format!("fsdp.policy={policy}"),
                "train.recompute=full",
                &format!("fsdp.prefetch_forward={depth}"),
                "train.validate_every=2",
            ],
        );
        assert!(
            p.instrs
                .iter()
                .filter(|i| i.phase == Phase::Recompute)
                .all(|i| i.rule != crate::program::Rule::Prefetch)
        );
        let validation = p.section(SectionKind::Validation).expect("asked for");
        let (mut allocated, mut freed) = (Vec::new(), Vec::new());
        for instr in p.section_instrs(validation) {
            match instr.op {
                Op::Alloc(b) => allocated.push(b),
                Op::Free(b) => freed.push(b),
                _ => {}
            }
        }
        allocated.sort_unstable();
        freed.sort_unstable();
        assert!(!allocated.is_empty());
        assert_eq!(allocated, freed, "{policy}");
    }
}

/// Prints one unit in a steady step of each policy, in the format of `shardlab plan`.
#[test]
fn program_text() {
    for policy in ["native", "fsdp2", "megatron", "megatron_v2"] {
        let p = program(
            LINEAR,
            &[&format!("fsdp.policy={policy}"), "model.layers=2"],
        );
        insta::assert_snapshot!(format!("program_{policy}"), p.to_text());
    }
}

/// Equal scenarios have equal digests, changed schedules have different ones, and names do not
/// matter.
#[test]
fn digests_identify_programs() {
    let a = program(LLAMA, &[]);
    assert_eq!(a.digest(), program(LLAMA, &[]).digest());
    assert_eq!(
        a.digest(),
        program(LLAMA, &["mesh.hardware=h100-80"]).digest()
    );
    assert_ne!(
        a.digest(),
        program(LLAMA, &["fsdp.prefetch_forward=0"]).digest()
    );
    assert_ne!(a.digest(), program(LLAMA, &["train.seq_len=16"]).digest());
}

/// With one rank on the inner axis, nothing is reduced there, so gradients are not cast to the
/// communication dtype.
#[test]
fn gradients_are_cast_for_a_reduction_only() {
    let cast = |policy: &str, sets: &[&str]| {
        let sets = [
            sets,
            &[
                policy,
                "precision.comm_grads=bf16",
                "precision.main_grads=f32",
            ],
        ];
        let p = program(
            LLAMA,
            &[&sets.concat()[..], &["fsdp.strategy=no_shard"]].concat(),
        );
        let report = crate::check::check(&p);
        assert!(report.is_ok(), "{report}");
        p.buffers.iter().any(|b| b.role == Role::ReduceInput)
    };
    for policy in ["fsdp.policy=native", "fsdp.policy=megatron"] {
        assert!(cast(policy, &["mesh.dp_outer=2"]));
        for outer in ["mesh.dp_outer=1", "mesh.dp_outer=2"] {
            assert!(!cast(policy, &["mesh.dp_shard=1", outer]), "{outer}");
        }
    }
}

/// Globs of frozen modules have the syntax of units, including a star within a component. Modules
/// below a match are frozen, too.
#[test]
fn globs_freeze_what_they_match_and_all_below() {
    let trained = |glob: &str| {
        let p = program(LLAMA, &[&format!("fsdp.frozen=[{glob:?}]")]);
        let trained = p.params.iter().filter(|p| p.requires_grad);
        trained.map(|p| p.name.clone()).collect::<Vec<_>>()
    };
    let inside = |names: &[String], path: &str| names.iter().any(|n| n.starts_with(path));
    assert!(!inside(&trained("layers"), "layers."));
    for glob in ["layers.1", "layers.1*", "*.1"] {
        let left = trained(glob);
        assert!(!inside(&left, "layers.1."), "{glob}");
        assert!(inside(&left, "layers.0."), "{glob}");
    }
    let left = trained("layers.*.mlp");
    assert!(!inside(&left, "layers.0.mlp") && inside(&left, "layers.0.attention"));
}

/// Tests errors that only lowering can find, and errors of scenarios that no file can express.
#[test]
fn refusals() {
    let nested = scenario(
        LLAMA,
        &[
            "fsdp.units=[\"layers.*.mlp\"]",
            "compile.cuda_graph=[\"block\"]",
        ],
    );
    let error = plan(&nested).expect_err("hooks inside a scope").to_string();
    assert!(
        error.contains("layers.0.mlp") && error.contains("captured scope"),
        "{error}"
    );
    let mut missing = scenario(LLAMA, &[]);
    missing.fsdp.units = Units::Patterns(vec![UnitPattern {
        modules: vec!["layer.*".into()],
        keep: false,
    }]);
    assert_eq!(
        plan(&missing).expect_err("no such module").to_string(),
        "unit pattern `layer.*` matches no module; did you mean `layers.*`?"
    );
    let mut missing = scenario(LLAMA, &[]);
    missing.fsdp.frozen = vec!["layers.0".into(), "layer.1*".into()];
    assert_eq!(
        plan(&missing).expect_err("no such module").to_string(),
        "frozen pattern `layer.1*` matches no module; did you mean `layers.1*`?"
    );
    let frozen = scenario(LLAMA, &["fsdp.frozen=[\"*\"]"]);
    let error = plan(&frozen).expect_err("nothing to train").to_string();
    assert!(error.contains("no parameter is trained"), "{error}");
    let resident = &[
        "fsdp.allocator=double_buffer",
        "fsdp.reshard_after_forward=false",
        "model.layers=4",
    ];
    let error = plan(&scenario(LLAMA, resident))
        .expect_err("four blocks stay full")
        .to_string();
    assert!(
        error.contains("2 copies") && error.contains("layers.2"),
        "{error}"
    );
    let mut hfsdp = scenario(LLAMA, &["fsdp.policy=fsdp2", "mesh.dp_outer=2"]);
    hfsdp.fsdp.outer_strategy = OuterStrategy::Optim;
    let error = plan(&hfsdp).expect_err("replicas only").to_string();
    assert!(
        error.contains("HSDP") && error.contains("native"),
        "{error}"
    );
}

/// Returns the number of GEMMs in a step, and the number of launches that write the gradients of
/// several parameters at once.
fn gemms(sets: &[&str]) -> (usize, usize) {
    const ALIGNED: &str = "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\n\
        ffn = 256\nvocab = 250\nmax_seq_len = 32\n[train]\nseq_len = 32\nmicro_batch = 2\n\
        [mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n[compile]\nmode = \"blocks\"\n";
    let p = program(ALIGNED, sets);
    let step = p.sections.iter().find(|s| s.kind == SectionKind::Steady);
    let launches = p.section_instrs(step.expect("a program has steps")).iter();
    let mut count = (0, 0);
    for instr in launches {
        let Op::Launch { kernel, .. } = instr.op else {
            continue;
        };
        if p.kernels[kernel.index()].name != "mm" {
            continue;
        }
        count.0 += 1;
        for w in p.writes(&instr.op) {
            let buffer = &p.buffers[w.buffer.index()];
            let gradient = matches!(buffer.role, Role::FullGrad | Role::MainGrad);
            // Only queries, keys and values together have this size.
            let numel = w.bytes / buffer.dtype.size();
            count.1 += usize::from(gradient && numel == 64 * (64 + 32 + 32));
        }
    }
    count
}

/// Two blocks with 7 GEMMs in forward and 14 in backward, and three GEMMs of the head. Which
/// weights are contiguous depends on the policy and on whether anything is sharded.
#[test]
fn projections_merge_where_the_layout_has_them_side_by_side() {
    assert_eq!(gemms(&["compile.merge_projections=none"]), (45, 0));
    assert_eq!(gemms(&[]), (45 - 2 * 6, 2));
    for strategy in ["optim", "optim_grads"] {
        let strategy = format!("fsdp.strategy={strategy}");
        assert_eq!(gemms(&[&strategy]), (45 - 2 * 6, 2), "{strategy}");
    }
    assert_eq!(gemms(&["train.recompute=full"]), (45 + 2 * 6 - 2 * 8, 2));
    // Autograd's gradients are in separate buffers.
    let megatron = ["fsdp.policy=megatron", "compile.merge_projections=qkv"];
    assert_eq!(gemms(&megatron), (45 - 2 * 4, 0));
    assert_eq!(gemms(&["fsdp.policy=megatron"]), (45, 0));
    assert_eq!(gemms(&["fsdp.policy=fsdp2"]), (45, 0));
    // Each parameter has a separate buffer if nothing is sharded.
    assert_eq!(gemms(&["fsdp.strategy=no_shard"]), (45, 0));
    assert_eq!(gemms(&["mesh.dp_shard=1"]), (45, 0));
    // Separate units are gathered separately.
    let units = "fsdp.units=[\"layers.*\", \"layers.*.attention.k\"]";
    assert_eq!(gemms(&[units]), (45, 0));
}

/// Rows with the width of the feed-forward layer have a factor that the others lack. They would
/// leave gaps between queries, keys and values in the grid: 64 rows of 64 are not a multiple of
/// 448.
#[test]
fn merging_keeps_gaps_out_of_the_layout() {
    let model = LLAMA.replace("ffn = 176", "ffn = 448");
    let apart = |sets: &[&str]| -> Vec<bool> {
        let p = program(&model, sets);
        let flat = p.groups.iter().filter_map(|g| match &g.layout {
            Layout::Flat(layout) => Some(layout),
            Layout::PerParam(_) => None,
        });
        let items: Vec<_> = flat.flat_map(|l| &l.items).copied().collect();
        let of = |name: &str| {
            let id = p.params.iter().position(|p| p.name == name).unwrap();
            *items.iter().find(|i| i.param.index() == id).unwrap()
        };
        [
            "attention.q",
            "attention.k",
            "attention.v",
            "mlp.w1",
            "mlp.w3",
        ]
        .windows(2)
        .filter(|w| w[1] != "mlp.w1")
        .map(|w| {
            let [a, b] = [0, 1].map(|i| of(&format!("layers.1.{}.weight", w[i])));
            a.offset + a.numel != b.offset
        })
        .collect()
    };
    let blocks = "compile.mode=blocks";
    assert_eq!(
        apart(&[blocks, "compile.merge_projections=none"]),
        [true, false, false]
    );
    assert_eq!(apart(&[blocks]), [false, false, false]);
    // Other engines keep their layouts.
    let megatron = [
        "fsdp.policy=megatron",
        "compile.merge_projections=qkv",
        blocks,
    ];
    assert_eq!(apart(&megatron), [true, false, false]);
}

/// Gathers of the first units move from the start of a step to the end of the previous one: they
/// follow the unit's update and overlap with the updates of other units. Only the first step starts
/// with them.
#[test]
fn the_next_steps_first_units_are_gathered_beside_updates() {
    let program = |n: u32| {
        let sets = [format!("fsdp.prefetch_next_step={n}")];
        plan(&parse("test", LLAMA, &sets).unwrap()).unwrap()
    };
    let gathers = |instrs: &[Instr], p: &Program, phase: Phase| {
        let gather = |i: &&Instr| match i.op {
            Op::Collective { id, .. } => {
                i.phase == phase && p.collectives[id.index()].kind == CollectiveKind::AllGather
            }
            _ => false,
        };
        instrs.iter().filter(gather).count()
    };
    let (without, with) = (program(0), program(2));
    let (a, b) = (steady(&without), steady(&with));
    let forward = gathers(a, &without, Phase::Forward);
    assert_eq!(gathers(a, &without, Phase::Optimizer), 0);
    assert_eq!(gathers(b, &with, Phase::Forward), forward - 2);
    assert_eq!(gathers(b, &with, Phase::Optimizer), 2);
    let first = with.section_instrs(with.section(SectionKind::First).unwrap());
    assert_eq!(gathers(first, &with, Phase::Forward), forward);
    let update = |i: &Instr| i.rule == Rule::Optimizer && is_launch(i);
    let gathered = |i: &Instr| i.phase == Phase::Optimizer && matches!(i.op, Op::Collective { .. });
    let at: Vec<usize> = (0..b.len()).filter(|&i| gathered(&b[i])).collect();
    let updates: Vec<usize> = (0..b.len()).filter(|&i| update(&b[i])).collect();
    let units: Vec<UnitId> = at.iter().map(|&i| b[i].unit).collect();
    for (&i, unit) in at.iter().zip(&units) {
        let own = updates.iter().find(|&&u| b[u].unit == *unit).unwrap();
        assert!(*own < i, "a gather before its unit's update");
    }
    let others = updates.iter().filter(|&&u| !units.contains(&b[u].unit));
    let (before, after) = others.fold(
        (0, 0),
        |(x, y), &u| if u < at[0] { (x + 1, y) } else { (x, y + 1) },
    );
    assert!(before >= after && after + 1 >= before, "{before} {after}");
}

/// If a group is updated in backward, its gradient shard is freed together with the full gradient.
/// At most `reduce_in_flight` of them are live, and none after backward. The updates and their
/// order stay the same.
#[test]
fn gradients_live_for_moments_where_backward_updates() {
    let of = |in_backward: bool, depth: u32| {
        let sets = [
            "model.layers=6".to_owned(),
            "train.clip_norm=0".to_owned(),
            format!("fsdp.optimizer_in_backward={in_backward}"),
            format!("fsdp.reduce_in_flight={depth}"),
        ];
        plan(&parse("test", LLAMA, &sets).unwrap()).unwrap()
    };
    let updated = |p: &Program| -> Vec<UnitId> {
        let updates = steady(p).iter();
        updates
            .filter(|i| i.rule == Rule::Optimizer && is_launch(i))
            .map(|i| i.unit)
            .collect()
    };
    let most = |p: &Program| {
        let grad = |id: BufferId| p.buffers[id.index()].role == Role::MainGrad;
        let (mut live, mut most) = (0i32, 0);
        for i in steady(p) {
            match i.op {
                Op::Alloc(id) if grad(id) => live += 1,
                Op::Free(id) if grad(id) => live -= 1,
                _ => {}
            }
            most = most.max(live);
        }
        assert_eq!(live, 0, "every gradient is freed within the step");
        most
    };
    for depth in [1, 2, 3] {
        let (after, within) = (of(false, depth), of(true, depth));
        assert_eq!(updated(&after), updated(&within));
        let groups = updated(&after).len() as i32;
        assert!(groups > 3, "{groups} groups");
        assert_eq!(most(&after), groups);
        assert_eq!(most(&within), depth as i32, "{depth} in flight");
    }
}

/// Updates in backward also free gradients that no rank shards, so that on one rank, the gradients
/// of one unit are live at a time. Sums over micro-batches stay.
#[test]
fn whole_gradients_live_for_moments_where_backward_updates() {
    let most = |sets: &[&str]| {
        let mut all = vec!["model.layers=6", "train.clip_norm=0"];
        all.extend(sets);
        let all: Vec<String> = all.into_iter().map(str::to_owned).collect();
        let p = plan(&parse("test", LLAMA, &all).unwrap()).unwrap();
        let grad = |id: BufferId| p.buffers[id.index()].role == Role::MainGrad;
        let bytes = |id: BufferId| p.buffers[id.index()].bytes.0;
        let (mut live, mut most) = (0, 0);
        for i in &p.instrs {
            match i.op {
                Op::Alloc(id) if grad(id) => live += bytes(id),
                Op::Free(id) if grad(id) => live -= bytes(id),
                _ => {}
            }
            most = most.max(live);
        }
        let all: u64 = p.groups.iter().map(|g| 4 * g.layout.full_numel()).sum();
        let largest = p
            .groups
            .iter()
            .map(|g| 4 * g.layout.full_numel())
            .max()
            .unwrap();
        (most, largest, all)
    };
    const IN_BACKWARD: &str = "fsdp.optimizer_in_backward=true";
    for alone in [&["mesh.dp_shard=1"][..], &["fsdp.strategy=no_shard"]] {
        let (after, _, all) = most(alone);
        assert_eq!(after, all, "{alone:?}");
        let (within, largest, _) = most(&[alone, &[IN_BACKWARD]].concat());
        let in_flight = if alone[0].starts_with("mesh") { 1 } else { 3 };
        // The gradients of the root share a group and live longer.
        assert!(
            within <= (in_flight + 1) * largest,
            "{within} of {all}, {alone:?}"
        );
        let (sums, _, _) = most(&[alone, &[IN_BACKWARD, "train.grad_accum=2"]].concat());
        assert_eq!(sums, all);
    }
}

/// HSDP reduces shards over the outer axis, when the full gradient buffer is no longer in use. The
/// native engine releases the buffer after the inner reduction, and only the optimizer waits for
/// the outer one. Megatron-FSDP records one event after both (`_bucket_group_gradient_reduce`), so
/// its computation also waits for outer reductions in backward.
#[test]
fn an_outer_reduction_holds_no_full_gradient_of_the_native_engine() {
    for (policy, early) in [("native", true), ("megatron", false)] {
        let p = program(
            LLAMA,
            &[
                &format!("fsdp.policy={policy}"),
                "model.layers=4",
                "mesh.dp_outer=2",
                "train.grad_accum=2",
                "fsdp.allocator=double_buffer",
            ],
        );
        let report = crate::check::check(&p);
        assert!(report.is_ok(), "{policy}\n{report}");
        let step = steady(&p);
        let kind = |event| {
            let recorded = step.iter().find_map(|i| match i.op {
                Op::Record { event: e, stream } if e == event => Some(stream),
                _ => None,
            });
            recorded.map(|s| p.streams[s.index()].kind)
        };
        let waits_for_outer = |i: &&Instr| matches!(i.op, Op::Wait { event, stream: COMPUTE } if kind(event) == Some(StreamKind::Outer));
        let backward = step.iter().filter(|i| i.phase == Phase::Backward);
        let waits = backward.filter(waits_for_outer).count();
        assert_eq!(waits == 0, early, "{policy}: {waits} waits in backward");
        // Each update comes after the outer reduction of its group.
        let mut outer = Vec::new();
        let mut seen = Vec::new();
        let mut updates = 0;
        for i in step {
            match i.op {
                Op::Collective { .. } if i.rule == Rule::OuterReduce => {
                    assert_eq!(i.micro_batch, 1, "once per step");
                    outer.push((i.unit, None));
                }
                Op::Record { event, .. } if i.rule == Rule::OuterReduce => {
                    outer.last_mut().expect("a reduction").1 = Some(event);
                }
                Op::Wait {
                    event,
                    stream: COMPUTE,
                } => seen.push(event),
                Op::Launch { .. } if policy == "native" && i.rule == Rule::Optimizer => {
                    let reduced = outer.iter().find(|(unit, _)| *unit == i.unit);
                    let event = reduced.and_then(|r| r.1).expect("an event of its own");
                    assert!(seen.contains(&event), "{:?} is updated too early", i.unit);
                    updates += 1;
                }
                _ => {}
            }
        }
        assert_eq!(outer.len(), p.groups.len(), "{policy}");
        assert_eq!(updates, if early { p.groups.len() } else { 0 });
    }
}

/// Megatron-FSDP multiplies gradients before a reduction only in bf16. For other dtypes, NCCL's
/// premultiplied sum does so (`gradient_reduce_preprocessing`).
#[test]
fn megatron_scales_bf16_gradients_before_their_reduction_and_no_others() {
    for (dtype, scaled) in [("bf16", true), ("f16", false), ("f32", false)] {
        let p = program(
            LINEAR,
            &[
                "fsdp.policy=megatron",
                &format!("precision.comm_grads={dtype}"),
            ],
        );
        let scales = steady(&p).iter().filter(|i| i.rule == Rule::Scale);
        assert_eq!(scales.count(), if scaled { 4 } else { 0 }, "{dtype}");
        let reductions = steady(&p).iter().filter_map(|i| match i.op {
            Op::Collective { id, .. } => Some(&p.collectives[id.index()]),
            _ => None,
        });
        let mut ops: Vec<ReduceOp> = reductions
            .filter(|c| c.kind == CollectiveKind::ReduceScatter)
            .map(|c| c.reduce)
            .collect();
        ops.dedup();
        let want = if scaled {
            ReduceOp::Sum
        } else {
            ReduceOp::PremulSum(0.25)
        };
        assert_eq!(ops, [want], "{dtype}");
    }
}

/// Megatron-FSDP limits the reduce queue to twice its mean unit under ZeRO-3, and to 1e9 elements
/// otherwise. A unit of 32,768² elements and a bias has 1.07e9 elements, so either one unit waits
/// while another one is reduced, or none does. (Two units are counted with padding, which would
/// exceed twice the mean without padding.)
#[test]
fn megatrons_reduce_queue_holds_twice_a_unit_under_zero_3_only() {
    for (strategy, want) in [("optim_grads_params", 2), ("optim_grads", 1)] {
        let p = program(
            LINEAR,
            &[
                "fsdp.policy=megatron",
                &format!("fsdp.strategy={strategy}"),
                "model.layers=6",
                "model.hidden=32768",
            ],
        );
        let bucket = |id: BufferId| {
            let b = &p.buffers[id.index()];
            b.role == Role::FullGrad && matches!(b.holds, Holds::Group(_))
        };
        let (mut live, mut most) = (0, 0);
        for i in steady(&p) {
            match i.op {
                Op::Alloc(id) if bucket(id) => live += 1,
                Op::Free(id) if bucket(id) => live -= 1,
                Op::Collective { .. } if i.rule == Rule::Reduce => most = most.max(live),
                _ => {}
            }
        }
        assert_eq!((most, live), (want, 0), "{strategy}");
    }
}

/// Megatron-FSDP sends gradients over the outer axis in the communication dtype: it copies them to
/// a buffer in that dtype, reduces it there, copies it back, and frees it when the queue pops it
/// (`hsdp_comm_gbuf`).
#[test]
fn megatron_reduces_over_the_outer_axis_in_the_communication_dtype() {
    for (strategy, outer_strategy) in [
        ("optim_grads_params", "no_shard"),
        ("optim_grads_params", "optim"),
        ("optim", "no_shard"),
        ("no_shard", "no_shard"),
    ] {
        for comm in [DType::Bf16, DType::F32] {
            let p = program(
                LLAMA,
                &[
                    "fsdp.policy=megatron",
                    &format!("fsdp.strategy={strategy}"),
                    &format!("fsdp.outer_strategy={outer_strategy}"),
                    "mesh.dp_outer=2",
                    "precision.main_grads=f32",
                    &format!("precision.comm_grads={}", comm.name()),
                    "train.grad_accum=2",
                ],
            );
            let what = format!("{strategy} {outer_strategy} {comm:?}");
            let report = crate::check::check(&p);
            assert!(report.is_ok(), "{what}\n{report}");
            let outer: Vec<&Instr> = steady(&p)
                .iter()
                .filter(|i| i.rule == Rule::OuterReduce)
                .collect();
            let reductions: Vec<_> = outer
                .iter()
                .filter_map(|i| match i.op {
                    Op::Collective { id, .. } => Some(&p.collectives[id.index()]),
                    _ => None,
                })
                .collect();
            assert_eq!(reductions.len(), p.groups.len(), "{what}");
            for (c, group) in reductions.iter().zip(p.groups.iter().rev()) {
                let kind = match outer_strategy {
                    "optim" => CollectiveKind::ReduceScatter,
                    _ => CollectiveKind::AllReduce,
                };
                assert_eq!((c.kind, c.dtype), (kind, comm), "{what}");
                let ranks = if strategy == "no_shard" { 1 } else { 4 };
                let bytes = group.layout.full_numel() / ranks * comm.size();
                assert_eq!(c.parts[0].input.bytes, bytes, "{what}");
            }
            let launches = outer.iter().filter(|i| is_launch(i)).count();
            let allocated = outer.iter().filter(|i| matches!(i.op, Op::Alloc(_)));
            let casts = if comm == DType::F32 {
                0
            } else {
                p.groups.len()
            };
            assert_eq!((allocated.count(), launches), (casts, 2 * casts), "{what}");
            // Each copy lives until computation has waited for its reduction.
            for (at, i) in steady(&p).iter().enumerate() {
                let Op::Free(id) = i.op else { continue };
                if p.buffers[id.index()].role != Role::ReduceOutput || i.rule == Rule::ZeroGrad {
                    continue;
                }
                assert_eq!(i.rule, Rule::ReduceRelease, "{what}");
                let before = &steady(&p)[..at];
                let own = before.iter().rposition(|j| {
                    j.unit == p.buffers[id.index()].unit
                        && j.rule == Rule::OuterReduce
                        && matches!(j.op, Op::Record { .. })
                });
                let Op::Record { event, .. } = before[own.expect("an event")].op else {
                    unreachable!()
                };
                let waited = |j: &Instr| matches!(j.op, Op::Wait { event: e, stream: COMPUTE } if e == event);
                assert!(before.iter().any(waited), "{what}");
            }
        }
    }
}

/// Megatron-FSDP copies each gradient into the bucket in its parameter's post-accumulate hook, and
/// deletes it (`_grad_acc`). A bucket is allocated for its first gradient, and reduced after its
/// last one. The root's bucket, which contains the head, lives through all of backward. Gradients
/// that are kept in full are accumulated at the same place.
#[test]
fn megatron_gathers_gradients_as_they_become_ready() {
    for strategy in ["optim_grads_params", "optim_grads", "optim", "no_shard"] {
        let sharded = strategy.starts_with("optim_grads");
        let p = program(
            LLAMA,
            &[
                "fsdp.policy=megatron",
                &format!("fsdp.strategy={strategy}"),
                "train.grad_accum=2",
            ],
        );
        let holds = |id: BufferId| p.buffers[id.index()].holds;
        let is_full = |id: BufferId| p.buffers[id.index()].role == Role::FullGrad;
        let name = |u: UnitId| p.units[u.index()].name.as_str();
        let (mut live, mut events) = (Vec::new(), Vec::new());
        let mut copied = BTreeMap::new();
        let backward = steady(&p).iter().filter(|i| i.phase == Phase::Backward);
        for i in backward.filter(|i| i.micro_batch == 1) {
            match i.op {
                Op::Alloc(id) if is_full(id) => match holds(id) {
                    Holds::Param(param) => live.push(param),
                    _ => events.push(("bucket", name(i.unit))),
                },
                Op::Free(id) if is_full(id) => {
                    if let Holds::Param(param) = holds(id) {
                        assert_eq!(live.pop(), Some(param), "{strategy}");
                    }
                }
                Op::Launch { .. } if matches!(i.rule, Rule::ReduceCopyIn | Rule::Accumulate) => {
                    *copied.entry(i.unit).or_insert(0usize) += 1;
                    assert!(!live.is_empty(), "{strategy}: copies what is live");
                }
                Op::Launch { .. } if i.rule == Rule::Model && name(i.unit) == "layers.1" => {
                    events.push(("backward", "layers.1"));
                }
                Op::Collective { .. } if i.rule == Rule::Reduce => {
                    let group = p.groups.iter().find(|g| g.unit == i.unit);
                    let params = group.expect("a group").params.len();
                    assert_eq!(copied[&i.unit], params, "{strategy} {}", name(i.unit));
                    events.push(("reduce", name(i.unit)));
                }
                _ => {}
            }
            // Autograd holds one gradient at a time, in addition to the one that is being
            // accumulated.
            assert!(live.len() <= 1, "{strategy}: {live:?}");
        }
        events.dedup();
        let mut want = vec![
            ("bucket", "root"),
            ("backward", "layers.1"),
            ("bucket", "layers.1"),
            ("backward", "layers.1"),
            ("reduce", "layers.1"),
            ("bucket", "layers.0"),
            ("reduce", "layers.0"),
            ("reduce", "root"),
        ];
        want.retain(|e| sharded || e.0 != "bucket");
        want.dedup();
        assert_eq!(events, want, "{strategy}");
    }
}

/// `_enforce_double_buffer_limit` counts units of the double buffer, without the root. While the
/// root's gradients are reduced, two of these units may be in reduction.
#[test]
fn the_double_buffer_bounds_its_own_units() {
    let p = program(
        LLAMA,
        &[
            "fsdp.policy=megatron",
            "fsdp.allocator=double_buffer",
            "model.layers=4",
        ],
    );
    let report = crate::check::check(&p);
    assert!(report.is_ok(), "{report}");
    let (mut in_flight, mut most, mut at_root) = (0_i32, 0, 0);
    for i in steady(&p) {
        let unit = &p.units[i.unit.index()].name;
        match i.op {
            Op::Collective { .. } if i.rule == Rule::Reduce && unit == "root" => {
                at_root = in_flight
            }
            Op::Collective { .. } if i.rule == Rule::Reduce => in_flight += 1,
            Op::Free(b) if i.rule == Rule::ReduceRelease => {
                in_flight -= i32::from(p.buffers[b.index()].unit != i.unit || unit != "root");
            }
            _ => {}
        }
        most = most.max(in_flight);
    }
    assert_eq!((most, at_root), (2, 2));
}

/// A captured scope reports its gradients at its end, because hooks do not run in a replay.
#[test]
fn a_captured_scope_contains_no_gradient_hook_of_megatron() {
    let p = program(
        LLAMA,
        &[
            "fsdp.policy=megatron",
            "compile.cuda_graph=[\"attn\", \"mlp\"]",
            "fsdp.allocator=double_buffer",
            "fsdp.persist_on_alloc_fail=true",
        ],
    );
    let report = crate::check::check(&p);
    assert!(report.is_ok(), "{report}");
    let (mut inside, mut copies) = (false, 0);
    for i in steady(&p) {
        match i.op {
            Op::GraphBegin(_) => inside = true,
            Op::GraphEnd(_) => inside = false,
            _ if matches!(i.rule, Rule::Reduce | Rule::ReduceCopyIn) => {
                assert!(!inside, "{i:?}");
                copies += usize::from(is_launch(i));
            }
            _ => {}
        }
    }
    assert_eq!(copies, p.params.len(), "one copy a gradient");
}
