//! 8-bit matmuls in programs, and scenarios with unsupported options.

use super::find::{checked, stream as stream_of, waits};
use super::{LLAMA, program};
use crate::check::check;
use crate::ir::{Access, AxisId, Buffer, BufferId, COMPUTE, DType, Holds, OpKind, ReduceOp, Role};
use crate::program::{Instr, Op, Phase, Program, Rule, SectionKind, StreamKind};
use crate::scenario::parse;

const TENSORWISE: &str = "precision.float8_recipe=tensorwise";

#[test]
fn every_policy_and_mode_has_them() {
    for policy in ["native", "fsdp2", "megatron"] {
        for mode in ["off", "regions", "blocks", "full"] {
            if (policy, mode) == ("megatron", "full") {
                continue;
            }
            for recipe in ["tensorwise", "rowwise", "blockwise", "mxfp8"] {
                for saved in ["compute", "float8"] {
                    let set = [
                        format!("fsdp.policy={policy}"),
                        format!("compile.mode={mode}"),
                        format!("precision.float8_recipe={recipe}"),
                        format!("precision.float8_saved={saved}"),
                        match recipe {
                            "mxfp8" => "mesh.hardware=b200",
                            _ => "mesh.hardware=h200-nvlink",
                        }
                        .to_owned(),
                    ];
                    let p = program(LLAMA, &set.each_ref().map(String::as_str));
                    let mut bodies = p.kernels.iter().flat_map(|k| &k.body);
                    assert!(bodies.any(|op| matches!(op.op, OpKind::ScaledGemm(_))));
                    let verdict = check(&p);
                    assert!(verdict.is_ok(), "{set:?}: {verdict:?}");
                }
            }
        }
    }
}

/// 8-bit matmuls do not change weights, gradients and optimizer state.
#[test]
fn state_between_steps_stays_the_same() {
    let of = |set: &[&str]| super::at_rest(&program(LLAMA, set));
    let (base, cast) = (of(&[]), of(&[TENSORWISE]));
    for role in Role::ALL {
        assert_eq!(base.get(&role), cast.get(&role), "{role:?}");
    }
}

/// The root, whose embedding is in bf16, is gathered during updates of other units. Blocks are
/// gathered in 8 bits, after the scales of all weights.
#[test]
fn units_in_bf16_are_gathered_beside_updates() {
    let p = program(
        LLAMA,
        &[
            TENSORWISE,
            "precision.float8_all_gather=true",
            "fsdp.prefetch_next_step=2",
        ],
    );
    assert!(check(&p).is_ok());
    let steady = p.section_instrs(p.section(SectionKind::Steady).unwrap());
    let at = |wanted: &dyn Fn(&Instr) -> bool| -> Vec<usize> {
        (0..steady.len()).filter(|&i| wanted(&steady[i])).collect()
    };
    let scales = at(&|i| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name == "shard_scales",
        _ => false,
    });
    let updates = at(&|i| i.rule == Rule::Optimizer && matches!(i.op, Op::Launch { .. }));
    let gathers = at(&|i| i.rule == Rule::Prefetch && matches!(i.op, Op::Collective { .. }));
    let late: Vec<usize> = gathers.into_iter().filter(|&g| g > updates[0]).collect();
    let [root, codes @ ..] = &late[..] else {
        panic!("no gather for the next step");
    };
    let in_8_bits = |at: usize| match steady[at].op {
        Op::Collective { id, .. } => p.collectives[id.index()].dtype.is_float8(),
        _ => false,
    };
    assert!(!in_8_bits(*root) && codes.iter().any(|&g| in_8_bits(g)));
    assert!(updates.iter().any(|u| u > root));
    assert_eq!(scales.len(), 1);
    assert!(!codes.is_empty() && codes.iter().all(|&g| g > scales[0]));
}

/// Ranks wait for each other's maxima on the stream of reductions, while they update the weights
/// that are not in 8 bits. The compute stream waits for the scales at the end of the step.
#[test]
fn maxima_are_reduced_beside_other_updates() {
    let p = checked(&[TENSORWISE, "precision.float8_all_gather=true"]);
    let steady = p.section_instrs(p.section(SectionKind::Steady).unwrap());
    let reductions = stream_of(&p, StreamKind::ReduceScatter);
    let maxima = |i: &Instr| match i.op {
        Op::Collective { id, stream } => {
            let c = &p.collectives[id.index()];
            (c.reduce == ReduceOp::Max).then(|| (stream, c.parts[0].output.buffer))
        }
        _ => None,
    };
    let found = (0..)
        .zip(steady)
        .filter_map(|(at, i)| Some((at, maxima(i)?)));
    let &[(at, (stream, buffer))] = &found.collect::<Vec<_>>()[..] else {
        panic!("not one reduction of maxima");
    };
    assert_eq!(stream, reductions);
    let is_update = |i: &Instr| i.rule == Rule::Optimizer && matches!(i.op, Op::Launch { .. });
    let updates = (0usize..).zip(steady).filter(|(_, i)| is_update(i));
    let (before, after): (Vec<_>, Vec<_>) = updates.partition(|(u, _)| *u < at);
    let finds = |(_, i): &(usize, &Instr)| p.writes(&i.op).iter().any(|w| w.buffer == buffer);
    assert!(!before.is_empty() && before.iter().all(finds));
    assert!(!after.is_empty() && !after.iter().any(finds));
    let waits = waits(&p, COMPUTE);
    let last = waits.iter().rfind(|(_, _, from)| *from == reductions);
    assert!(last.is_some_and(|(wait, ..)| wait > &after[after.len() - 1].0));
}

/// Gathers of 8-bit codes have one byte per element, and so do the shards between steps. No kernel
/// casts a weight after its gather.
#[test]
fn gathers_of_codes_have_a_byte_per_element() {
    let gathered = [TENSORWISE, "precision.float8_all_gather=true"];
    let (base, codes) = (program(LLAMA, &[TENSORWISE]), program(LLAMA, &gathered));
    let bytes = |p: &Program, role: Role, codes: bool| {
        let of = |b: &&Buffer| b.role == role && b.dtype.is_float8() == codes;
        let group = |b: &&Buffer| matches!(b.holds, Holds::Group(_));
        p.buffers
            .iter()
            .filter(of)
            .filter(group)
            .map(|b| b.bytes.0)
            .sum::<u64>()
    };
    let float8 = codes.groups.iter().filter(|g| g.is_float8());
    let full: u64 = float8.map(|g| g.layout.full_numel()).sum();
    let ranks = u64::from(codes.meta.mesh.size(AxisId::DP_SHARD));
    assert!(full > 0);
    assert_eq!(bytes(&codes, Role::FullWeight, true), full);
    assert_eq!(bytes(&codes, Role::ModelWeight, true), full / ranks);
    let [before, rest] = [&base, &codes].map(|p| bytes(p, Role::FullWeight, false));
    // Apart from padding, the other weights are gathered as before.
    assert!(before - rest > 2 * full * 9 / 10, "{before} {rest}");
    let casts_of_weights = |p: &Program| {
        let reads = |i: &&Instr| {
            let launched = match i.op {
                Op::Launch { kernel, .. } => &p.kernels[kernel.index()].body[..],
                _ => &[],
            };
            let casts = launched.iter().any(|op| op.op == OpKind::Float8Cast);
            let of_weight = |a: &Access| p.buffers[a.buffer.index()].role == Role::FullWeight;
            casts && p.reads(&i.op).iter().any(of_weight)
        };
        p.instrs.iter().filter(reads).count()
    };
    assert!(casts_of_weights(&base) > 0);
    assert_eq!(casts_of_weights(&codes), 0);
    let before = [&gathered[..], &["fsdp.cast_before_all_gather=true"]].concat();
    assert_eq!(bytes(&program(LLAMA, &before), Role::ModelWeight, true), 0);
}

/// A Llama whose weights have 128x128 blocks, gathered with a scale for each.
fn blocks(set: &[&str]) -> Program {
    let all = [
        "model.hidden=256",
        "model.kv_heads=4",
        "model.ffn=512",
        "precision.float8_recipe=blockwise",
        "precision.float8_all_gather=true",
    ];
    program(LLAMA, &[&all[..], set].concat())
}

/// With a scale per block, each gather sends codes of one byte per weight and four bytes per
/// 128x128 weights. The scales of a shard are kept if its codes are; nothing reduces maxima.
#[test]
fn gathers_of_blocks_have_a_scale_per_16384_weights() {
    let named = Holds::Named("scales of weights");
    let bytes = |p: &Program, role: Role, of: fn(&Buffer) -> bool| -> u64 {
        let buffers = p.buffers.iter().filter(|b| b.role == role && of(b));
        buffers.map(|b| b.bytes.0).sum()
    };
    let codes: fn(&Buffer) -> bool = |b| b.dtype.is_float8();
    let scales: fn(&Buffer) -> bool = |b| b.holds == Holds::Named("scales of weights");
    for ranks in [2, 3, 4] {
        let ranks_set = format!("mesh.dp_shard={ranks}");
        let p = blocks(&[&ranks_set]);
        // Projections of attention have 256x256 weights, those of the feed-forward 512x256 and
        // 256x512. A grid of the layout is 128 rows of 512 elements per rank.
        let payload: u64 = 4 * 256 * 256 + 3 * 512 * 256;
        let full = payload.next_multiple_of(128 * 512 * ranks);
        let of_block: Vec<u64> = p
            .groups
            .iter()
            .filter(|g| g.is_float8())
            .map(|g| g.layout.full_numel())
            .collect();
        assert_eq!(of_block, [full; 2], "{ranks} ranks");
        assert_eq!(bytes(&p, Role::FullWeight, codes), 2 * full);
        assert_eq!(bytes(&p, Role::ModelWeight, codes), 2 * full / ranks);
        assert_eq!(bytes(&p, Role::FullWeight, scales), 2 * full / 16384 * 4);
        let shard = 2 * full / 16384 * 4 / ranks;
        assert_eq!(bytes(&p, Role::ModelWeight, scales), shard);
        let gathers = p.collectives.iter().filter(|c| {
            let out = |n: usize| p.buffers[c.parts[n].output.buffer.index()];
            c.parts.len() == 2 && codes(&out(0)) && out(1).holds == named
        });
        let sent: Vec<u64> = gathers.map(|c| c.bytes.0).collect();
        assert!(!sent.is_empty());
        assert!(sent.iter().all(|n| *n == full + full / 16384 * 4));
        let maxima = |c: &&crate::ir::Collective| c.reduce == crate::ir::ReduceOp::Max;
        assert_eq!(p.collectives.iter().filter(maxima).count(), 0);
        // A cast before each gather keeps neither.
        let cast = blocks(&[&ranks_set, "fsdp.cast_before_all_gather=true"]);
        for of in [codes, scales] {
            assert_eq!(bytes(&cast, Role::ModelWeight, of), 0);
        }
        assert_eq!(
            bytes(&cast, Role::FullWeight, scales),
            bytes(&p, Role::FullWeight, scales)
        );
    }
}

/// Forward reads the scales of weights with a multiple of 512 columns where they are; others are
/// copied to a grid that cuBLASLt can read. Backward always reads a transposed copy.
#[test]
fn scales_of_blocks_are_copied_where_matmuls_cannot_read_them() {
    let copies = |set: &[&str]| {
        let p = blocks(set);
        let steady = p.section(SectionKind::Steady).expect("steady");
        let mut count = [0, 0];
        for i in p.section_instrs(steady) {
            let Op::Launch { kernel, .. } = i.op else {
                continue;
            };
            let of_scales = |a: &Access| {
                let b = &p.buffers[a.buffer.index()];
                (b.role, b.holds) == (Role::FullWeight, Holds::Named("scales of weights"))
            };
            let copied = p.kernels[kernel.index()].body.iter();
            let copied = copied.filter(|op| op.op == OpKind::Copy).count();
            if copied > 0 && p.reads(&i.op).iter().any(of_scales) {
                count[usize::from(i.phase == Phase::Backward)] += copied;
            }
        }
        count
    };
    // Two blocks of seven matrices each.
    assert_eq!(copies(&["compile.mode=off"]), [14, 14]);
    let wide = ["model.hidden=512", "model.ffn=1024", "compile.mode=off"];
    assert_eq!(copies(&wide), [0, 14]);
}

const MXFP8: &str = "precision.float8_recipe=mxfp8";
const GATHERED: &str = "precision.float8_all_gather=true";
const B200: &str = "mesh.hardware=b200";

/// A Llama whose weights have blocks of 32 elements in both directions, gathered with a scale for
/// each.
fn mx(set: &[&str]) -> Program {
    program(
        LLAMA,
        &[&[MXFP8, GATHERED, B200, "model.ffn=160"], set].concat(),
    )
}

/// Returns the bytes of the steady gathers of 8-bit codes with scales, by phase: forward, recompute
/// and backward.
fn gathers_of_codes(p: &Program) -> [Vec<u64>; 3] {
    let steady = p.section(SectionKind::Steady).expect("steady");
    let phases = [Phase::Forward, Phase::Recompute, Phase::Backward];
    phases.map(|phase| {
        let of_phase = p.section_instrs(steady).iter().filter(|i| i.phase == phase);
        let gathers = of_phase.filter_map(|i| match i.op {
            Op::Collective { id, .. } => Some(&p.collectives[id.index()]),
            _ => None,
        });
        gathers
            .filter(|c| c.parts.len() == 2)
            .map(|c| c.bytes.0)
            .collect()
    })
}

/// Recipe mxfp8 has a byte for the scale of each 32 elements. Forward gathers codes with scales of
/// rows, backward codes with scales of columns: as many bytes. Ranks keep both in their shards.
#[test]
fn mxfp8_gathers_rows_in_forward_and_columns_in_backward() {
    let bytes = |p: &Program, role: Role, of: &dyn Fn(&Buffer) -> bool| -> u64 {
        let buffers = p.buffers.iter().filter(|b| b.role == role && of(b));
        buffers.map(|b| b.bytes.0).sum()
    };
    let codes = |b: &Buffer| b.dtype.is_float8();
    let scales = |b: &Buffer| {
        let names = ["scales of weights", "scales of columns of weights"];
        names.map(Holds::Named).contains(&b.holds)
    };
    for ranks in [2, 3, 4] {
        let shards = format!("mesh.dp_shard={ranks}");
        let mx = |set: &[&str]| mx(&[&[shards.as_str()], set].concat());
        let p = mx(&[]);
        // Two blocks with projections of 64x64 (q, o) and 32x64 (k, v), and a feed-forward of 160.
        // Shards have whole blocks of 32 rows of 64 and of 160 columns.
        let payload: u64 = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160;
        let full = payload.next_multiple_of(32 * 320 * ranks);
        let of_block = p.groups.iter().filter(|g| g.is_float8());
        let of_block: Vec<u64> = of_block.map(|g| g.layout.full_numel()).collect();
        assert_eq!(of_block, [full; 2], "{ranks} ranks");
        let all = 2 * full;
        assert_eq!(bytes(&p, Role::FullWeight, &codes), 2 * all);
        assert_eq!(bytes(&p, Role::FullWeight, &scales), 2 * all / 32);
        assert_eq!(bytes(&p, Role::ModelWeight, &codes), 2 * all / ranks);
        assert_eq!(bytes(&p, Role::ModelWeight, &scales), 2 * all / 32 / ranks);
        let sent = full + full / 32;
        let once = || vec![sent; 2];
        assert_eq!(gathers_of_codes(&p), [once(), vec![], once()]);
        let cast = mx(&["fsdp.cast_before_all_gather=true"]);
        assert_eq!(bytes(&cast, Role::ModelWeight, &codes), 0);
        assert_eq!(bytes(&cast, Role::ModelWeight, &scales), 0);
        // Forward gathers both if backward gathers nothing, as in Transformer Engine; recompute
        // reads rows again.
        let kept = mx(&["fsdp.reshard_after_forward=false"]);
        assert_eq!(gathers_of_codes(&kept), [vec![sent; 4], vec![], vec![]]);
        let [forward, recompute, backward] = gathers_of_codes(&mx(&["train.recompute=full"]));
        assert_eq!(forward, once());
        assert_eq!([recompute, backward].concat(), vec![sent; 4]);
    }
}

/// Megatron-FSDP reduces the largest absolute values of all blocks in bf16, by rows and by columns:
/// four bytes per 32 weights of all ranks. All ranks compute and keep all scales, and gather codes
/// alone.
#[test]
fn megatron_reduces_maxima_of_mx_blocks() {
    let megatron = "fsdp.policy=megatron";
    for (ranks, accum) in [(2, 1), (4, 2)] {
        let sets = [
            format!("mesh.dp_shard={ranks}"),
            format!("train.grad_accum={accum}"),
        ];
        // This recompute reads norms, but no codes by rows.
        let p = mx(&[megatron, &sets[0], &sets[1], "train.recompute=selective"]);
        assert!(check(&p).is_ok(), "{}", check(&p));
        let full: u64 = (p.groups.iter().filter(|g| g.is_float8()))
            .map(|g| g.layout.full_numel())
            .sum();
        let steady = p.section_instrs(p.section(SectionKind::Steady).expect("steady"));
        let collectives: Vec<_> = (steady.iter())
            .filter_map(|i| match i.op {
                Op::Collective { id, .. } => Some((i.phase, &p.collectives[id.index()])),
                _ => None,
            })
            .collect();
        let maxima: Vec<u64> = (collectives.iter())
            .filter(|(_, c)| c.reduce == crate::ir::ReduceOp::Max)
            .map(|(_, c)| c.bytes.0)
            .collect();
        assert_eq!(maxima, [full / 32 * 2 * 2]);
        let codes = |phase: Phase| -> u64 {
            let gathers = collectives.iter().filter(|(at, c)| {
                let out = &p.buffers[c.parts[0].output.buffer.index()];
                *at == phase && out.dtype.is_float8()
            });
            gathers.map(|(_, c)| c.bytes.0).sum()
        };
        assert_eq!(codes(Phase::Forward), accum * full);
        assert_eq!(codes(Phase::Backward), accum * full);
        assert_eq!(codes(Phase::Recompute), 0);
        let kept = |of: &dyn Fn(&Buffer) -> bool| -> u64 {
            let buffers = p.buffers.iter();
            let kept = buffers.filter(|b| b.role == Role::ModelWeight && of(b));
            kept.map(|b| b.bytes.0).sum()
        };
        assert_eq!(kept(&|b| b.dtype.is_float8()), 2 * full / ranks);
        assert_eq!(kept(&|b| b.dtype == DType::U8), 2 * full / 32);
    }
}

/// Matmuls of backward read codes by columns where gathers write them: no kernel transposes codes.
/// Scales are copied once per matmul, in the order that tensor cores read.
#[test]
fn mxfp8_copies_scales_but_no_codes() {
    let p = mx(&["compile.mode=off"]);
    let steady = p.section(SectionKind::Steady).expect("steady");
    let (mut copied, mut columns) = ([0, 0], 0);
    for i in p.section_instrs(steady) {
        let Op::Launch { kernel, .. } = i.op else {
            continue;
        };
        for op in &p.kernels[kernel.index()].body {
            let backward = usize::from(i.phase == Phase::Backward);
            match op.op {
                OpKind::Copy if op.inputs[0].dtype.is_float8() => panic!("codes are copied"),
                OpKind::Copy if op.inputs[0].dtype == DType::U8 => copied[backward] += 1,
                OpKind::ScaledGemm(_) if !op.inputs[1].strides.is_empty() => {
                    assert_eq!(i.phase, Phase::Backward);
                    columns += 1;
                }
                _ => {}
            }
        }
    }
    // Two blocks of seven matrices each.
    assert_eq!((copied, columns), ([14, 14], 14));
}

/// torch has one gather per unit, whose buffer is counted in bytes: one byte per 8-bit weight, two
/// per bfloat16 weight. torchao casts float32 shards before each gather, and keeps no codes.
#[test]
fn torch_gathers_codes_and_other_weights_at_once() {
    let p = program(
        LLAMA,
        &[
            TENSORWISE,
            "precision.float8_all_gather=true",
            "fsdp.policy=fsdp2",
        ],
    );
    let ranks = u64::from(p.meta.mesh.size(AxisId::DP_SHARD));
    let mixed = p.groups.iter().find(|g| g.has_float8()).expect("a group");
    assert!(!mixed.is_float8(), "norms are in it");
    let of = |i: usize| p.params[mixed.params[i].index()].numel();
    let (mut codes, mut rest) = (0, 0);
    for i in 0..mixed.params.len() {
        match mixed.scale(i) {
            Some(_) => codes += of(i),
            None => rest += of(i),
        }
    }
    let gathers = p
        .buffers
        .iter()
        .filter(|b| b.role == Role::GatherBuffer && b.dtype == DType::U8);
    let bytes: Vec<u64> = gathers.map(|b| b.bytes.0).collect();
    assert_eq!(bytes, [codes + 2 * rest; 2]);
    assert!(
        p.buffers
            .iter()
            .all(|b| b.role != Role::ModelWeight || b.dtype == DType::F32)
    );
    let named = |name: &str| {
        let steady = p.section(SectionKind::Steady).expect("steady");
        let launched = |i: &&Instr| match i.op {
            Op::Launch { kernel, .. } => p.kernels[kernel.index()].name == name,
            _ => false,
        };
        let all = &p.instrs[steady.instrs.start as usize..steady.instrs.end as usize];
        all.iter().filter(launched).collect::<Vec<_>>()
    };
    let scales: usize = p
        .groups
        .iter()
        .map(|g| g.scales.iter().flatten().count())
        .sum();
    // In forward and in backward.
    let casts = named("shard_float8_cast");
    assert_eq!(casts.len(), 2 * scales);
    // Multiplication, clamp and cast are separate kernels: 21 bytes per weight.
    let Op::Launch { kernel, .. } = casts[0].op else {
        panic!("not a launch")
    };
    let kernel = &p.kernels[kernel.index()];
    let [main, scale] = p.reads(&casts[0].op) else {
        panic!("a shard and its scale")
    };
    assert_eq!(scale.bytes, 4);
    let numel = main.bytes / 4;
    assert!(numel * ranks > 0);
    assert_eq!(kernel.read.0 - 4, 12 * numel);
    assert_eq!(kernel.written.0, 9 * numel);
    assert_eq!(
        (named("shard_amax").len(), named("shard_scales").len()),
        (1, 1)
    );
}

/// Megatron-FSDP casts once, after the optimizer, and gathers the cast weights.
#[test]
fn megatron_casts_once_per_step() {
    let p = program(
        LLAMA,
        &[
            TENSORWISE,
            "precision.float8_all_gather=true",
            "fsdp.policy=megatron",
            "train.grad_accum=2",
        ],
    );
    let steady = p.section(SectionKind::Steady).expect("steady");
    let all = &p.instrs[steady.instrs.start as usize..steady.instrs.end as usize];
    let casts = all.iter().filter(|i| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name == "shard_float8_cast",
        _ => false,
    });
    let phases: Vec<Phase> = casts.map(|i| i.phase).collect();
    let groups = p.groups.iter().filter(|g| g.is_float8()).count();
    assert_eq!(phases, vec![Phase::Refresh; groups]);
}

/// Parameters that one matmul reads share a scale; all others have separate scales.
#[test]
fn merged_projections_share_a_scale() {
    let set = [
        TENSORWISE,
        "precision.float8_all_gather=true",
        "compile.mode=blocks",
    ];
    let of = |merge: &str| {
        let merge = format!("compile.merge_projections={merge}");
        let p = program(LLAMA, &[&set[..], &[merge.as_str()]].concat());
        let group = p.groups.iter().find(|g| g.is_float8()).expect("a group");
        let first = group.scale_range().start;
        let scales = group.scales.iter().flatten();
        scales.map(|s| s - first).collect::<Vec<_>>()
    };
    assert_eq!(of("none"), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(of("all"), [0, 0, 0, 1, 2, 2, 3]);
}

#[test]
fn what_they_cannot_be_is_refused_with_its_reason() {
    let fault = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        parse("test", LLAMA, &set).unwrap_err().to_string()
    };
    for (set, words) in [
        (
            &[TENSORWISE, "precision.param_dtype=f32"][..],
            "`float8_recipe` casts bf16 to 8 bits, but `param_dtype` is f32",
        ),
        (
            &[TENSORWISE, "mesh.hardware=a100-80"],
            "needs tensor cores for 8-bit floats (compute capability 8.9 or later), which `a100-80` does not have",
        ),
        (
            &[TENSORWISE, "mesh.tp=2"],
            "`float8_recipe` does not support tensor parallelism",
        ),
        (
            &[TENSORWISE, "model.ffn=168"],
            "the weight of `layers.0.mlp.w1` has a dimension of 168",
        ),
        (
            &[TENSORWISE, "train.seq_len=28", "train.micro_batch=1"],
            "a micro-batch has 28 tokens",
        ),
        (
            &[
                "precision.float8_recipe=rowwise",
                "precision.float8_grad=e5m2",
            ],
            "rowwise gradients in e5m2",
        ),
        (
            &[
                "precision.float8_recipe=blockwise",
                "precision.float8_grad=e5m2",
            ],
            "blockwise gradients in e5m2",
        ),
        (
            &["precision.float8_recipe=blockwise", "mesh.hardware=b200"],
            "which `b200`'s tensor cores do not",
        ),
        (
            &["precision.float8_recipe=mxfp8", "mesh.hardware=h100-80"],
            "needs tensor cores that multiply scales of 32 elements (compute capability 10.0), which `h100-80` does not have",
        ),
        (
            &[
                "precision.float8_recipe=blockwise",
                "precision.float8_all_gather=true",
            ],
            "gathers of blocks need dimensions that are multiples of 128, but the weight of \
             `layers.0.attention.q` has one of 64",
        ),
        (
            &[
                "precision.float8_recipe=blockwise",
                "precision.float8_all_gather=true",
                "fsdp.policy=megatron",
            ],
            "gathers blocks with policy native only",
        ),
        (
            &[
                "precision.float8_recipe=blockwise",
                "precision.float8_all_gather=true",
                "fsdp.policy=fsdp2",
            ],
            "gathers blocks with policy native only",
        ),
        (
            &[
                "precision.float8_recipe=blockwise",
                "precision.float8_all_gather=true",
                "fsdp.reshard_after_forward=2",
            ],
            "gathers scales of blocks from shards only",
        ),
        (
            &[
                "precision.float8_recipe=blockwise",
                "precision.float8_all_gather=true",
                "fsdp.atomic=64",
            ],
            "gathers blocks of 128 rows, but `fsdp.atomic` lets shards split them",
        ),
        (
            &[MXFP8, GATHERED, B200, "fsdp.policy=fsdp2"],
            "torchao's MX linear layers have no 8-bit gather",
        ),
        (
            &[
                MXFP8,
                GATHERED,
                B200,
                "model.ffn=160",
                "fsdp.policy=megatron",
                "fsdp.keep_fp8_transpose_cache=true",
            ],
            "with recipe mxfp8 backward gathers codes by columns",
        ),
        (
            &[MXFP8, GATHERED, B200, "fsdp.reshard_after_forward=2"],
            "gathers scales of blocks from shards only",
        ),
        (
            &[MXFP8, GATHERED, B200, "fsdp.atomic=48"],
            "gathers blocks of 32 rows, but `fsdp.atomic` lets shards split them",
        ),
        (
            &[MXFP8, GATHERED, B200],
            "gathers of blocks need dimensions that are multiples of 32, but the weight of `layers.0.mlp.w1` has one \
             of 176",
        ),
        (
            &[TENSORWISE, "precision.float8_exclude=[\"layer.*\"]"],
            "float8_exclude pattern `layer.*` matches no linear layer",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_exclude=[\"*.w2\", \"attention.wp\"]",
            ],
            "float8_exclude pattern `attention.wp` matches no linear layer",
        ),
        (
            &[TENSORWISE, "precision.float8_exclude=[\"attention..o\"]"],
            "`attention..o` has an empty path component",
        ),
        (
            &[TENSORWISE, "precision.float8_exclude=[\"layers.*\"]"],
            "no matmul runs in 8 bits",
        ),
        (
            &[TENSORWISE, "precision.float8_first_bf16=2"],
            "no matmul runs in 8 bits",
        ),
        (
            &["precision.float8_saved=float8"],
            "`float8_saved` has no effect here: no matmul runs in 8 bits",
        ),
        (
            &[
                "precision.float8_recipe=rowwise",
                "precision.float8_all_gather=true",
            ],
            "a column of a weight, which is a row of its transpose, belongs to all ranks",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "mesh.dp_shard=1",
            ],
            "`float8_all_gather` gathers shards of weights, but `mesh.dp_shard` is 1",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "compile.mode=full",
            ],
            "`float8_all_gather` is built for policies native, fsdp2 and megatron",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "fsdp.policy=fsdp2",
                "mesh.dp_shard=4",
                "fsdp.reshard_after_forward=2",
            ],
            "`float8_all_gather` gathers from shards only",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "fsdp.policy=fsdp2",
                "mesh.dp_shard=3",
            ],
            "policy fsdp2 gathers even shards of tensor subclasses only",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "fsdp.strategy=optim_grads",
            ],
            "`float8_all_gather` casts sharded weights",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "precision.main_params=none",
            ],
            "`float8_all_gather` casts main weights",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "mesh.dp_replicate=2",
                "fsdp.outer_strategy=optim",
            ],
            "`float8_all_gather` casts whole shards",
        ),
        (
            &[
                TENSORWISE,
                "precision.float8_all_gather=true",
                "fsdp.offload=[\"optimizer\"]",
            ],
            "`float8_all_gather` reads main weights on the device",
        ),
        (
            &["precision.float8_recipe=tensor"],
            "`precision.float8_recipe` must be",
        ),
    ] {
        let found = fault(set);
        assert!(found.contains(words), "{set:?}: {found}");
    }
}

/// Transposed copies of all 8-bit weights are allocated once and never freed: one byte per
/// parameter. Everything else stays the same, and `check` verifies both programs.
#[test]
fn kept_transposes_take_a_byte_per_parameter() {
    let lower = |keep: bool| {
        let sets = [
            "fsdp.policy=megatron".to_owned(),
            "mesh.dp_shard=2".to_owned(),
            "train.grad_accum=2".to_owned(),
            "precision.float8_all_gather=true".to_owned(),
            format!("fsdp.keep_fp8_transpose_cache={keep}"),
        ];
        let s = crate::scenario::load("small-fp8".as_ref(), &sets).unwrap();
        let params: u64 = crate::plan(&s)
            .unwrap()
            .params
            .iter()
            .filter(|p| p.name.starts_with("layers.") && p.shape.len() == 2)
            .map(|p| p.shape.iter().product::<u64>())
            .sum();
        (crate::plan(&s).unwrap(), params)
    };
    let ((kept, params), (made, _)) = (lower(true), lower(false));
    for p in [&kept, &made] {
        let r = check(p);
        assert!(r.is_ok(), "{r}");
    }
    let count = |p: &Program, kind: SectionKind, f: fn(&Op) -> Option<BufferId>| {
        let of = p.section(kind).map(|s| p.section_instrs(s));
        let all = of.unwrap_or_default().iter().filter_map(|i| f(&i.op));
        all.map(|b| p.buffers[b.index()].bytes.0).sum::<u64>()
    };
    let alloc = |op: &Op| match *op {
        Op::Alloc(b) => Some(b),
        _ => None,
    };
    let free = |op: &Op| match *op {
        Op::Free(b) => Some(b),
        _ => None,
    };
    let first = |p| count(p, SectionKind::First, alloc) - count(p, SectionKind::First, free);
    assert_eq!(first(&kept), first(&made) + params);
    let steady = |p, f| count(p, SectionKind::Steady, f);
    // Otherwise, each of the two micro-batches allocates and frees them.
    assert_eq!(steady(&made, alloc), steady(&kept, alloc) + 2 * params);
    assert_eq!(steady(&made, free), steady(&kept, free) + 2 * params);
    let launches = |p: &Program| {
        let all = p.section(SectionKind::Steady).map(|s| p.section_instrs(s));
        let all = all.unwrap_or_default().iter();
        all.filter(|i| matches!(i.op, Op::Launch { .. })).count()
    };
    assert_eq!(launches(&kept), launches(&made));
}
