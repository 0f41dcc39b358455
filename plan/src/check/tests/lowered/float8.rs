//! 8-bit matmuls: programs with them pass, and faults planted in their scales, formats and weights
//! are found.

use super::{POLICIES, try_lower};
use crate::check::{Report, RuleId, Violation, check};
use crate::ir::*;
use crate::program::*;

const RULES: [RuleId; 4] = [
    RuleId::Float8Scale,
    RuleId::Float8Weight,
    RuleId::Float8Format,
    RuleId::Float8Sum,
];

fn program(set: &[&str]) -> Program {
    try_lower("small-fp8", set).unwrap_or_else(|| panic!("{set:?}"))
}

#[test]
fn programs_with_8_bit_matmuls_pass() {
    for policy in POLICIES {
        for set in [
            &["compile.mode=off"][..],
            &["compile.mode=blocks"],
            &["train.recompute=full"],
            &["train.grad_accum=3"],
            &["precision.float8_recipe=rowwise"],
            &["precision.float8_recipe=blockwise"],
            &["precision.float8_recipe=mxfp8", "compile.mode=off"],
            &["precision.float8_saved=float8"],
            &["fsdp.reshard_after_forward=false"],
        ] {
            // These engines only run eagerly, and the scenario has compiled blocks.
            let eager = ["megatron_v2", "pr4435"].contains(&policy);
            if eager && set[0] != "compile.mode=off" {
                continue;
            }
            let policy = format!("fsdp.policy={policy}");
            let r = check(&program(&[&[policy.as_str()], set].concat()));
            assert!(r.is_ok(), "{policy} {set:?}\n{r}");
            for rule in RULES {
                let row = r.rules.iter().find(|x| x.id == rule).expect("listed");
                assert!(row.checked > 0, "{policy} {set:?}: {rule}");
            }
        }
    }
}

/// Returns the steady launches with an operation of this name: instruction and kernel.
fn launches(p: &Program, name: &str) -> Vec<(InstrId, KernelId)> {
    let steady = p
        .section(SectionKind::Steady)
        .expect("steady")
        .instrs
        .clone();
    let has = |k: KernelId| {
        p.kernels[k.index()]
            .body
            .iter()
            .any(|op| op.op.name() == name)
    };
    let launched = |i: u32| match p.instrs[i as usize].op {
        Op::Launch { kernel, .. } if has(kernel) => Some((InstrId(i), kernel)),
        _ => None,
    };
    steady.filter_map(launched).collect()
}

/// Returns the violation of a rule at an instruction.
fn found(r: &Report, rule: RuleId, at: InstrId) -> Violation {
    let v = r.of(rule).find(|v| v.instr == Some(at));
    v.unwrap_or_else(|| panic!("{rule} at #{}\n{r}", at.0))
        .clone()
}

/// Returns the position of the `n`th read of a launch in the table of accesses.
fn read(p: &Program, at: InstrId, n: usize) -> usize {
    match p.instrs[at.index()].op {
        Op::Launch { reads, .. } => reads as usize + n,
        _ => panic!("not a launch"),
    }
}

/// The matmul for the second micro-batch's weight gradient reads the scale of another tensor, as it
/// would with a scale that the next forward overwrites.
#[test]
fn a_scale_of_another_tensor_is_found() {
    let mut p = program(&["train.grad_accum=2"]);
    let gemms = launches(&p, "scaled_mm");
    let (first, last) = (gemms[0].0, gemms[gemms.len() - 1].0);
    // Reads are both factors and both reciprocals.
    let (from, to) = (read(&p, first, 2), read(&p, last, 2));
    p.accesses[to] = p.accesses[from];
    let v = found(&check(&p), RuleId::Float8Scale, last);
    assert!(
        v.message.contains("reciprocal of the scale"),
        "{}",
        v.message
    );
}

/// The scale is computed again after its codes: a cast is skipped, but its maximum is not.
#[test]
fn a_scale_without_new_codes_is_found() {
    let mut p = program(&["compile.mode=off"]);
    // Maximum, scale and cast of the input, the same for the weight, and the matmul.
    let (scale, _) = launches(&p, "float8_scale")[0];
    let (amax, _) = launches(&p, "row_amax")[1];
    let (gemm, _) = launches(&p, "scaled_mm")[0];
    assert!(scale < amax && amax < gemm);
    p.instrs[amax.index()].op = p.instrs[scale.index()].op;
    found(&check(&p), RuleId::Float8Scale, gemm);
}

/// A weight that is cast in forward for a matmul of backward is kept for the whole step.
#[test]
fn codes_of_a_weight_that_stay_for_backward_are_found() {
    let mut p = program(&["compile.mode=off"]);
    let of_weight = |p: &Program, i: InstrId, phase: Phase| {
        let from = p.reads(&p.instrs[i.index()].op)[0].buffer;
        p.buffers[from.index()].role == Role::FullWeight && p.instrs[i.index()].phase == phase
    };
    let casts = launches(&p, "float8_cast");
    let cast = casts.iter().find(|c| of_weight(&p, c.0, Phase::Backward));
    let (cast, _) = *cast.expect("a weight is cast in backward");
    let codes = p.writes(&p.instrs[cast.index()].op)[0].buffer;
    let gemms = launches(&p, "scaled_mm");
    let reads = |g: &&(InstrId, KernelId)| p.accesses[read(&p, g.0, 1)].buffer == codes;
    let gemm = gemms
        .iter()
        .find(reads)
        .expect("a matmul reads the codes")
        .0;
    p.instrs[cast.index()].phase = Phase::Forward;
    let v = found(&check(&p), RuleId::Float8Weight, gemm);
    assert_eq!(v.other, Some(cast));
}

const GATHERED: &str = "precision.float8_all_gather=true";

/// Checks a program that gathers codes. The rules of 8-bit matmuls and of maxima find something to
/// check.
fn prove(p: &Program, set: &[&str]) {
    prove_gathers(p, set);
    let r = check(p);
    let row = r.rules.iter().find(|x| x.id == RuleId::Float8Weight);
    assert!(row.is_some_and(|row| row.checked > 0), "{set:?}");
}

/// Checks such a program, which need not copy codes for backward.
fn prove_gathers(p: &Program, set: &[&str]) {
    let r = check(p);
    assert!(r.is_ok(), "{set:?}\n{r}");
    let rules = [
        RuleId::Float8Scale,
        RuleId::Float8Format,
        RuleId::Float8Sum,
        RuleId::Float8Amax,
    ];
    for rule in rules {
        let row = r.rules.iter().find(|x| x.id == rule).expect("listed");
        assert!(row.checked > 0, "{set:?}: {rule}");
    }
}

#[test]
fn programs_that_gather_codes_pass() {
    for set in [
        &["compile.mode=off"][..],
        &["compile.mode=blocks"],
        &["train.recompute=full"],
        &["train.grad_accum=3"],
        &["train.validate_every=2"],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.reshard_after_forward=2"],
        &["fsdp.cast_before_all_gather=true"],
        &["fsdp.copy_in_stream=true"],
        &["fsdp.copy_in_stream=true", "fsdp.prefetch_next_step=2"],
        &[
            "fsdp.copy_in_stream=true",
            "fsdp.cast_before_all_gather=true",
            "train.grad_accum=2",
        ],
        &["fsdp.prefetch_next_step=2"],
        &["fsdp.optimizer_in_backward=true", "train.clip_norm=0"],
        &["fsdp.nan_check=true"],
        &["fsdp.units=root"],
        &["mesh.dp_replicate=2"],
        &["compile.cuda_graph=full_iteration"],
    ] {
        prove(&program(&[&[GATHERED], set].concat()), set);
    }
}

#[test]
fn programs_of_torchao_and_megatron_that_gather_codes_pass() {
    for set in [
        &["fsdp.policy=fsdp2", "compile.mode=off"][..],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=fsdp2", "train.recompute=full"],
        &["fsdp.policy=fsdp2", "train.grad_accum=3"],
        &["fsdp.policy=fsdp2", "train.validate_every=2"],
        &["fsdp.policy=fsdp2", "mesh.dp_replicate=2"],
        &["fsdp.policy=fsdp2", "fsdp.units=root"],
        &["fsdp.policy=megatron"],
        &["fsdp.policy=megatron", "train.grad_accum=3"],
        &["fsdp.policy=megatron", "train.validate_every=2"],
        &["fsdp.policy=megatron", "fsdp.allocator=double_buffer"],
        &["fsdp.policy=megatron", "mesh.dp_replicate=2"],
    ] {
        prove(&program(&[&[GATHERED], set].concat()), set);
    }
}

/// torchao's scales do not follow from the weights after the optimizer step, or follow from only
/// one rank's weights.
#[test]
fn stale_scales_of_torchao_are_found() {
    let set = [GATHERED, "fsdp.policy=fsdp2", "mesh.dp_shard=2"];
    let p = program(&set);
    let (scales, _) = launches(&p, "shard_scales")[0];
    let at = p
        .collectives
        .iter()
        .rposition(|c| c.reduce == ReduceOp::Max);
    let mut sum = p.clone();
    sum.collectives[at.expect("an all-reduce")].reduce = ReduceOp::Sum;
    found(&check(&sum), RuleId::Float8Amax, scales);
    // The maxima are not computed again after the update.
    let (amax, _) = launches(&p, "shard_amax")[0];
    let mut stale = p.clone();
    stale.instrs[amax.index()].op = p.instrs[scales.index()].op;
    let r = check(&stale);
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// Scales from the maxima of only some shards: the all-reduce sums instead, or runs over another
/// axis.
#[test]
fn maxima_of_some_of_the_ranks_are_found() {
    let p = program(&[GATHERED, "mesh.dp_replicate=2"]);
    let (scales, _) = launches(&p, "shard_scales")[0];
    let of_max = |c: &Collective| c.reduce == ReduceOp::Max;
    let at = p
        .collectives
        .iter()
        .rposition(of_max)
        .expect("an all-reduce");
    let outer = p.communicators.iter().position(|c| c.name == "outer");
    let outer = CommId(outer.expect("an outer axis") as u8);
    let sum: fn(&mut Collective, CommId) = |c, _| c.reduce = ReduceOp::Sum;
    let replicas: fn(&mut Collective, CommId) = |c, outer| c.comm = outer;
    for fault in [sum, replicas] {
        let mut p = p.clone();
        fault(&mut p.collectives[at], outer);
        let v = found(&check(&p), RuleId::Float8Amax, scales);
        assert!(
            v.message.contains("all ranks of the dp_shard"),
            "{}",
            v.message
        );
    }
}

/// Lowers a model whose codes are gathered with a scale per block.
fn blocks(set: &[&str]) -> Program {
    try_lower("small-fp8-blocks", set).unwrap_or_else(|| panic!("{set:?}"))
}

#[test]
fn programs_that_gather_blocks_pass() {
    for set in [
        &["compile.mode=off"][..],
        &["compile.mode=blocks"],
        &["compile.fuse_projections=all"],
        &["compile.fuse_projections=none"],
        &["train.recompute=full"],
        &["train.grad_accum=3"],
        &["train.validate_every=2"],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.cast_before_all_gather=true"],
        &["fsdp.copy_in_stream=true"],
        &["fsdp.copy_in_stream=true", "fsdp.prefetch_next_step=2"],
        &[
            "fsdp.copy_in_stream=true",
            "fsdp.cast_before_all_gather=true",
            "train.grad_accum=2",
        ],
        &["fsdp.prefetch_next_step=2"],
        &["fsdp.optimizer_in_backward=true", "train.clip_norm=0"],
        &["fsdp.atomic=256"],
        &["fsdp.atomic=tensor"],
        &["fsdp.units=root"],
        &["fsdp.copy_engine_all_gather=true"],
        &["model.hidden=512"],
        &["mesh.dp_shard=3"],
        &["mesh.dp_replicate=2"],
        &["compile.cuda_graph=full_iteration"],
    ] {
        // Gathered codes are not cast after the gather. Backward copies them transposed.
        prove(&blocks(set), set);
    }
}

const MXFP8: &str = "precision.float8_recipe=mxfp8";

/// Lowers a model whose codes are gathered with a scale per 32 elements.
fn mx(set: &[&str]) -> Program {
    program(&[&[MXFP8, GATHERED, "model.kv_heads=4"], set].concat())
}

#[test]
fn programs_that_gather_mx_blocks_pass() {
    for set in [
        &["compile.mode=off"][..],
        &["compile.mode=blocks"],
        &["compile.fuse_projections=all"],
        &["compile.fuse_projections=none"],
        &["train.recompute=full"],
        &["train.recompute=selective"],
        &["train.grad_accum=3"],
        &["train.grad_accum=2", "fsdp.reshard_after_backward=false"],
        &["train.validate_every=2"],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.reshard_after_forward=false", "train.validate_every=2"],
        &["fsdp.reshard_after_forward=auto", "train.grad_accum=2"],
        &["fsdp.cast_before_all_gather=true"],
        &["fsdp.copy_in_stream=true"],
        &[
            "fsdp.copy_in_stream=true",
            "fsdp.cast_before_all_gather=true",
            "train.recompute=full",
        ],
        &["fsdp.prefetch_next_step=2"],
        &["fsdp.prefetch_next_step=2", "train.validate_every=2"],
        &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
        &["fsdp.optimizer_in_backward=true", "train.clip_norm=0"],
        &["fsdp.atomic=64"],
        &["fsdp.atomic=tensor"],
        &["fsdp.units=root"],
        &["fsdp.allocator=double_buffer"],
        &["precision.float8_saved=float8"],
        &["mesh.dp_shard=3"],
        &["mesh.dp_replicate=2"],
        &["compile.cuda_graph=full_iteration"],
    ] {
        prove_gathers(&mx(set), set);
    }
}

#[test]
fn programs_of_megatron_that_gather_mx_blocks_pass() {
    for set in [
        &["compile.mode=off"][..],
        &["compile.mode=blocks"],
        &["train.recompute=full"],
        &["train.recompute=selective"],
        &["train.grad_accum=3"],
        &["train.validate_every=2"],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.units=root"],
        &["fsdp.units=root", "train.grad_accum=2"],
        &["mesh.dp_shard=3"],
        &["mesh.dp_replicate=2"],
        &["precision.float8_saved=float8"],
    ] {
        let set = [&["fsdp.policy=megatron"], set].concat();
        prove_gathers(&mx(&set), &set);
    }
}

/// Megatron-FSDP's scales of blocks follow from maxima that are not reduced, or not computed again.
#[test]
fn maxima_of_blocks_of_one_rank_are_found() {
    let p = mx(&["fsdp.policy=megatron"]);
    let (scales, _) = launches(&p, "shard_block_scales")[0];
    let of_max = |c: &Collective| c.reduce == ReduceOp::Max;
    let at = p.collectives.iter().rposition(of_max);
    let mut sum = p.clone();
    sum.collectives[at.expect("an all-reduce")].reduce = ReduceOp::Sum;
    found(&check(&sum), RuleId::Float8Amax, scales);
    let r = check(&repeated("shard_block_amax", p));
    let v = found(&r, RuleId::Float8Amax, scales);
    assert!(
        v.message.contains("expected the maxima of all blocks"),
        "{}",
        v.message
    );
    // The codes of a shard are those of the previous step.
    let p = mx(&["fsdp.policy=megatron"]);
    let r = check(&repeated("shard_float8_cast_blocks", p));
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// Backward reads the codes by rows, with their scales, although their blocks do not lie along its
/// inner dimension.
#[test]
fn codes_by_rows_in_backward_are_found() {
    let mut p = mx(&["compile.mode=off", "fsdp.reshard_after_forward=false"]);
    let (gemm, _) = *launches(&p, "scaled_mm")
        .iter()
        .find(|(at, k)| {
            let strided = |op: &BodyOp| !op.inputs[1].strides.is_empty();
            p.instrs[at.index()].phase == Phase::Backward
                && p.kernels[k.index()].body.iter().any(strided)
        })
        .expect("a matmul with codes by columns");
    let codes = read(&p, gemm, 1);
    let columns = p.accesses[codes].buffer;
    // The gather of codes by columns comes after the one of codes by rows.
    let part = |c: &&Collective| c.parts.iter().any(|part| part.output.buffer == columns);
    let at = p
        .collectives
        .iter()
        .position(|c| part(&c))
        .expect("a gather");
    let by_columns: Vec<BufferId> = outputs(&p.collectives[at]);
    let by_rows: Vec<BufferId> = outputs(&p.collectives[at - 1]);
    for access in &mut p.accesses {
        if let Some(n) = by_columns.iter().position(|b| *b == access.buffer) {
            access.buffer = by_rows[n];
        }
    }
    let v = found(&check(&p), RuleId::Float8Scale, gemm);
    assert!(
        v.message
            .contains("codes by rows; expected codes by columns"),
        "{}",
        v.message
    );
}

/// Returns what a gather writes.
fn outputs(c: &Collective) -> Vec<BufferId> {
    c.parts.iter().map(|part| part.output.buffer).collect()
}

/// A shard ends within 32 rows: the scales of rows are those of whole blocks, those of columns are
/// not.
#[test]
fn columns_that_belong_to_several_ranks_are_found() {
    let p = mx(&[]);
    let casts = launches(&p, "shard_float8_cast_blocks");
    let of_columns = |(at, _): &&(InstrId, KernelId)| {
        let scales = p.writes(&p.instrs[at.index()].op)[1].buffer;
        p.buffers[scales.index()].holds == Holds::Named("scales of columns of weights")
    };
    let (cast, _) = *casts.iter().find(of_columns).expect("a cast by columns");
    let codes = p.writes(&p.instrs[cast.index()].op)[0].buffer;
    let Holds::Group(g) = p.buffers[codes.index()].holds else {
        panic!("not of a group")
    };
    let mut split = p.clone();
    let crate::shard::Layout::Flat(layout) = &mut split.groups[g.index()].layout else {
        panic!("not flat")
    };
    let item = layout.items.iter_mut().max_by_key(|item| item.numel);
    let item = item.expect("a weight");
    // 16 rows later.
    item.offset += 16 * p.params[item.param.index()].shape[1];
    let r = check(&split);
    let v = found(&r, RuleId::Float8Amax, cast);
    assert!(
        v.message.contains("whole blocks of 32 rows"),
        "{}",
        v.message
    );
    let columns = |v: &Violation| casts.iter().any(|c| Some(c.0) == v.instr && of_columns(&c));
    let steady = |v: &&Violation| casts.iter().any(|c| Some(c.0) == v.instr);
    assert!(r.of(RuleId::Float8Amax).filter(steady).all(columns), "{r}");
}

/// The codes by columns of a shard are those of the previous step: only those by rows are cast
/// again.
#[test]
fn columns_of_older_weights_are_found() {
    let mut p = mx(&["fsdp.cast_before_all_gather=false"]);
    let casts = launches(&p, "shard_float8_cast_blocks");
    let backward = |(at, _): &&(InstrId, KernelId)| p.instrs[at.index()].phase == Phase::Backward;
    let [.., first, last] = casts.iter().filter(backward).collect::<Vec<_>>()[..] else {
        panic!("{casts:?}")
    };
    p.instrs[last.0.index()].op = p.instrs[first.0.index()].op;
    let r = check(&p);
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// A cast of columns writes fewer scales than it has blocks.
#[test]
fn casts_without_a_scale_per_mx_block_are_found() {
    one_scale_less(mx(&[]), 1, "a scale for each 32 of them");
}

/// A shard ends within a row of blocks, so the scales of these blocks are those of a part.
#[test]
fn blocks_that_belong_to_several_ranks_are_found() {
    let mut p = blocks(&[]);
    let (cast, _) = launches(&p, "shard_float8_cast_blocks")[0];
    let codes = p.writes(&p.instrs[cast.index()].op)[0].buffer;
    let Holds::Group(g) = p.buffers[codes.index()].holds else {
        panic!("not of a group")
    };
    let crate::shard::Layout::Flat(layout) = &mut p.groups[g.index()].layout else {
        panic!("not flat")
    };
    // Half a row of blocks later.
    let item = layout.items.iter_mut().max_by_key(|item| item.numel);
    item.expect("a weight").offset += 64 * 128;
    let v = found(&check(&p), RuleId::Float8Amax, cast);
    assert!(
        v.message.contains("whole blocks of 128 rows"),
        "{}",
        v.message
    );
}

/// A cast of a shard writes fewer scales than it has blocks.
#[test]
fn casts_without_a_scale_per_block_are_found() {
    one_scale_less(blocks(&[]), 4, "a scale for each 16384 of them");
}

/// Makes the first cast of a shard write one scale of this size less, and finds the message.
#[track_caller]
fn one_scale_less(mut p: Program, bytes: u64, message: &str) {
    let (cast, _) = launches(&p, "shard_float8_cast_blocks")[0];
    let Op::Launch { writes, .. } = p.instrs[cast.index()].op else {
        panic!("not a launch")
    };
    p.accesses[writes as usize + 1].bytes -= bytes;
    let v = found(&check(&p), RuleId::Float8Format, cast);
    assert!(v.message.contains(message), "{}", v.message);
}

/// A matmul reads the scales of the next row of blocks, as with another layout.
#[test]
fn scales_of_other_blocks_are_found() {
    let p = blocks(&["compile.mode=off"]);
    let of_scales = |a: &Access| {
        let b = &p.buffers[a.buffer.index()];
        (b.role, b.holds) == (Role::FullWeight, Holds::Named("scales of weights"))
    };
    // The copy of the scales in front of a matmul of forward, and the one for its backward.
    let copies = launches(&p, "copy").into_iter().map(|c| c.0);
    let copies: Vec<InstrId> = copies
        .filter(|at| of_scales(&p.reads(&p.instrs[at.index()].op)[0]))
        .collect();
    for copy in [copies[0], copies[copies.len() - 1]] {
        let written = p.writes(&p.instrs[copy.index()].op)[0].buffer;
        let reader = |at: &InstrId| {
            let reads = p.reads(&p.instrs[at.index()].op);
            reads.iter().any(|a| a.buffer == written)
        };
        let mut gemms = launches(&p, "scaled_mm").into_iter().map(|g| g.0);
        let gemm = gemms.find(|at| *at > copy && reader(at)).expect("a matmul");
        let mut other = p.clone();
        let at = read(&p, copy, 0);
        other.accesses[at].offset = match p.accesses[at].offset {
            0 => 4,
            first => first - 4,
        };
        let v = found(&check(&other), RuleId::Float8Scale, gemm);
        assert!(
            v.message.contains("scales of the same blocks"),
            "{}",
            v.message
        );
    }
}

/// A gather sends the codes, but not the scales: those in memory are of another gather.
#[test]
fn scales_that_are_not_gathered_with_their_codes_are_found() {
    let mut p = blocks(&["compile.mode=off"]);
    let gather = p.collectives.iter().rposition(|c| c.parts.len() == 2);
    let gather = gather.expect("a gather of codes and scales");
    let scales = p.collectives[gather].parts.pop().expect("two parts");
    p.collectives[gather].bytes.0 -= scales.output.bytes;
    let r = check(&p);
    assert!(r.of(RuleId::Float8Scale).next().is_some(), "{r}");
    assert!(r.of(RuleId::Uninit).next().is_some(), "{r}");
}

/// The codes and scales of a shard are those of the previous step.
#[test]
fn blocks_of_older_weights_are_found() {
    let p = repeated("shard_float8_cast_blocks", blocks(&[]));
    let r = check(&p);
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// In later steps, replaces the last launch of an operation with this name by the previous one,
/// which belongs to another unit.
fn skipped(name: &str, set: &[&str]) -> Program {
    repeated(name, program(&[&[GATHERED], set].concat()))
}

/// Does the same in a given program.
fn repeated(name: &str, mut p: Program) -> Program {
    let steps = p.section(SectionKind::Steady).expect("later steps").clone();
    let named = |i: &u32| match p.instrs[*i as usize].op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name == name,
        _ => false,
    };
    let found: Vec<u32> = steps.instrs.filter(named).collect();
    let [.., before, last] = found[..] else {
        panic!("{name}: {found:?}")
    };
    p.instrs[last as usize].op = p.instrs[before as usize].op;
    p
}

/// The scales are computed again, but the codes of a shard are those of the previous step.
#[test]
fn codes_of_older_scales_are_found() {
    let r = check(&skipped("shard_float8_cast", &[]));
    assert!(r.of(RuleId::Float8Scale).next().is_some(), "{r}");
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// The maxima are those of the weights before the update. (Optimizers with 8-bit moments do not
/// compute them.)
#[test]
fn maxima_of_older_weights_are_found() {
    let moments = ["precision.moments=8bit", "mesh.dp_shard=2"];
    let r = check(&skipped("shard_amax", &moments));
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// An optimizer's launch writes the maxima of another unit.
#[test]
fn maxima_that_an_update_leaves_as_they_were_are_found() {
    let mut p = program(&[GATHERED]);
    let updates = launches(&p, "adamw");
    let finds = |(at, _): &(InstrId, KernelId)| {
        let writes = p.writes(&p.instrs[at.index()].op);
        let last = p.buffers[writes[writes.len() - 1].buffer.index()].holds;
        last == Holds::Named("maxima of weights")
    };
    let finds: Vec<_> = updates.into_iter().filter(finds).collect();
    let [.., (before, _), (last, _)] = finds[..] else {
        panic!("{finds:?}")
    };
    let slots = |p: &Program, at: InstrId| match p.instrs[at.index()].op {
        Op::Launch { writes, .. } => writes as usize + p.writes(&p.instrs[at.index()].op).len() - 1,
        _ => panic!("not a launch"),
    };
    let (from, to) = (slots(&p, before), slots(&p, last));
    p.accesses[to] = p.accesses[from];
    let r = check(&p);
    assert!(r.of(RuleId::StaleWeight).next().is_some(), "{r}");
}

/// The cast of a unit writes more codes than its shard has weights.
#[test]
fn casts_beyond_their_shard_are_found() {
    let mut p = program(&[GATHERED]);
    let (cast, _) = launches(&p, "shard_float8_cast")[0];
    let main = read(&p, cast, 0);
    p.accesses[main].bytes /= 2;
    let v = found(&check(&p), RuleId::Float8Format, cast);
    assert!(
        v.message.contains("as many codes as weights"),
        "{}",
        v.message
    );
}

/// The transposed copy for backward is created in forward, from a gather that reshard frees.
#[test]
fn transposed_codes_that_stay_for_backward_are_found() {
    let mut p = program(&[GATHERED, "compile.mode=off"]);
    let of_weight = |p: &Program, i: InstrId| {
        let from = p.reads(&p.instrs[i.index()].op)[0].buffer;
        p.buffers[from.index()].role == Role::FullWeight
            && p.buffers[from.index()].dtype.is_float8()
    };
    let copies = launches(&p, "copy");
    let copy = copies.iter().find(|c| of_weight(&p, c.0));
    let (copy, _) = *copy.expect("a transposed copy");
    assert_eq!(p.instrs[copy.index()].phase, Phase::Backward);
    p.instrs[copy.index()].phase = Phase::Forward;
    let r = check(&p);
    let v = r.of(RuleId::Float8Weight).next().expect("a violation");
    assert_eq!(v.other, Some(copy));
}

/// Changes the kernel of the last matmul, which belongs to backward.
fn change(f: impl FnOnce(&mut BodyOp)) -> (Report, InstrId) {
    let mut p = program(&[]);
    let (at, kernel) = *launches(&p, "scaled_mm").last().expect("a matmul");
    let mut changed = p.kernels[kernel.index()].clone();
    f(&mut changed.body[0]);
    p.kernels.push(changed);
    if let Op::Launch { kernel, .. } = &mut p.instrs[at.index()].op {
        *kernel = KernelId(p.kernels.len() as u32 - 1);
    }
    (check(&p), at)
}

#[test]
fn factors_that_tensor_cores_cannot_read_are_found() {
    let (r, at) = change(|op| op.inputs[1].dtype = DType::F8E5m2);
    let v = found(&r, RuleId::Float8Format, at);
    assert!(v.message.contains("at most one of e5m2"), "{}", v.message);
}

/// A factor has one scale per row, or more scales than blocks. Other library versions read the
/// scales of blocks in a layout that they did not have.
#[test]
fn scales_that_are_none_of_their_factors_blocks_are_found() {
    let planted = |recipe: &str, f: fn(&mut Slot)| {
        let recipe = format!("precision.float8_recipe={recipe}");
        let mut p = program(&[&recipe, "model.ffn=320"]);
        let gemms = launches(&p, "scaled_mm");
        let (at, kernel) = gemms[0];
        let mut changed = p.kernels[kernel.index()].clone();
        f(&mut changed.body[0].inputs[2]);
        p.kernels.push(changed);
        if let Op::Launch { kernel, .. } = &mut p.instrs[at.index()].op {
            *kernel = KernelId(p.kernels.len() as u32 - 1);
        }
        let v = found(&check(&p), RuleId::Float8Format, at);
        assert!(
            v.message.contains("or of each block of 128 or 32 elements"),
            "{}",
            v.message
        );
    };
    planted("blockwise", |inverse| inverse.shape[0] -= 1);
    planted("mxfp8", |inverse| inverse.shape[0] -= 1);
    // A byte in place of a number.
    planted("blockwise", |inverse| inverse.dtype = DType::U8);
}

/// cuBLASLt rejects such a scale when the matmul runs.
#[test]
fn reciprocals_between_multiples_of_16_bytes_are_found() {
    let mut p = program(&[GATHERED]);
    let of_weight = |p: &Program, at: InstrId| {
        let reads = p.reads(&p.instrs[at.index()].op);
        let holds = |n: usize| p.buffers[reads[n].buffer.index()].holds;
        (0..reads.len()).find(|n| holds(*n) == Holds::Named("reciprocals of scales"))
    };
    let gemms = launches(&p, "scaled_mm");
    let found_at = gemms.iter().find_map(|g| Some((g.0, of_weight(&p, g.0)?)));
    let (gemm, n) = found_at.expect("a matmul with a gathered weight");
    let scale = read(&p, gemm, n);
    p.accesses[scale].offset += 4;
    let v = found(&check(&p), RuleId::Float8Format, gemm);
    assert!(
        v.message.contains("a multiple of 16 bytes"),
        "{}",
        v.message
    );
}

#[test]
fn gradients_that_add_up_fast_are_found() {
    let (r, at) = change(|op| {
        if let OpKind::ScaledGemm(gemm) = &mut op.op {
            gemm.fast = true;
        }
    });
    found(&r, RuleId::Float8Sum, at);
}

/// Lowers a mixture of experts whose matmuls run in 8 bits.
fn experts(set: &[&str]) -> Option<Program> {
    let sizes = [
        "model.hidden=32",
        "model.ffn=96",
        "model.expert_ffn=48",
        "model.shared_expert_ffn=48",
        "train.seq_len=24",
        "precision.float8_recipe=tensorwise",
        "precision.float8_experts=true",
    ];
    try_lower("small-moe", &[&sizes[..], set].concat())
}

/// With every dispatcher, inputs of experts have rows that no choice fills. Their scales must
/// exclude these rows; a scale over all rows is found.
#[test]
fn scales_of_rows_that_no_expert_reads_are_found() {
    let mesh = ["mesh.dp_shard=4", "mesh.ep=2"];
    for dispatcher in ["gather", "all_to_all", "padded", "peer", "deepep"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        for set in [
            &["fsdp.policy=native", "compile.mode=off"][..],
            &["fsdp.policy=native"],
            &["fsdp.policy=native", "train.recompute=full"],
            &["fsdp.policy=native", "precision.float8_saved=float8"],
            &["fsdp.policy=native", GATHERED],
            &["fsdp.policy=native", GATHERED, "mesh.ep=4"],
            &["fsdp.policy=fsdp2"],
            &["fsdp.policy=fsdp2", "moe.capacity_factor=1.1"],
            &["fsdp.policy=megatron"],
            &["fsdp.policy=megatron", GATHERED],
        ] {
            let set = [&mesh[..], &[&dispatcher], set].concat();
            let p = experts(&set).unwrap_or_else(|| panic!("{set:?}"));
            let r = check(&p);
            assert!(r.is_ok(), "{set:?}\n{r}");
            // Both inputs of a layer's matmuls, and the gradients of both results.
            let of_experts = |(_, k): &&(InstrId, KernelId)| {
                let op = p.kernels[k.index()].body[0].op;
                matches!(
                    op,
                    OpKind::Float8Scale(op::Float8Scale { routed: true, .. })
                )
            };
            let scales = launches(&p, "float8_scale");
            let count = scales.iter().filter(of_experts).count();
            let matmuls = launches(&p, "scaled_grouped_mm").len();
            assert!(count >= matmuls && count < scales.len(), "{set:?}: {count}");
        }
    }
    let mut p = experts(&[&mesh[..], &["fsdp.policy=native"]].concat()).expect("a program");
    let routed = |p: &Program, k: KernelId| match p.kernels[k.index()].body[0].op {
        OpKind::Float8Scale(scale) => scale.routed,
        _ => false,
    };
    let scales = launches(&p, "float8_scale");
    let (at, kernel) = *scales.iter().find(|s| routed(&p, s.1)).expect("experts");
    let mut all = p.kernels[kernel.index()].clone();
    all.body[0].inputs.truncate(1);
    if let OpKind::Float8Scale(scale) = &mut all.body[0].op {
        scale.routed = false;
    }
    p.kernels.push(all);
    if let Op::Launch { kernel, .. } = &mut p.instrs[at.index()].op {
        *kernel = KernelId(p.kernels.len() as u32 - 1);
    }
    let v = found(&check(&p), RuleId::Float8Rows, at);
    assert!(v.message.contains("no choice fills"), "{}", v.message);
}

/// Matmuls of experts pass with every policy, and faults in them are found as in other layers.
#[test]
fn experts_are_checked_like_other_layers() {
    let lower = experts;
    for policy in POLICIES {
        let policy = format!("fsdp.policy={policy}");
        for mode in ["compile.mode=off", "compile.mode=blocks"] {
            let Some(p) = lower(&[&policy, mode]) else {
                assert_ne!(mode, "compile.mode=off", "{policy}");
                continue;
            };
            let r = check(&p);
            assert!(r.is_ok(), "{policy} {mode}\n{r}");
        }
    }
    let gathered = lower(&["fsdp.policy=native", GATHERED]).unwrap();
    assert!(check(&gathered).is_ok());
    let p = lower(&["fsdp.policy=native"]).unwrap();
    for name in ["scaled_grouped_mm", "scaled_grouped_mm_weight_backward"] {
        let (at, _) = *launches(&p, name).last().expect("experts");
        let mut other = p.clone();
        let [a, b] = [2, 3].map(|n| read(&p, at, n));
        other.accesses.swap(a, b);
        found(&check(&other), RuleId::Float8Scale, at);
    }
    let (at, kernel) = *launches(&p, "scaled_grouped_mm").last().expect("experts");
    assert_eq!(p.instrs[at.index()].phase, Phase::Backward);
    let mut fast = p.clone();
    let mut changed = p.kernels[kernel.index()].clone();
    changed.body[0].op = OpKind::ScaledGroupedGemm(op::ScaledGroupedGemm {
        fast: true,
        routed: None,
    });
    fast.kernels.push(changed);
    if let Op::Launch { kernel, .. } = &mut fast.instrs[at.index()].op {
        *kernel = KernelId(fast.kernels.len() as u32 - 1);
    }
    found(&check(&fast), RuleId::Float8Sum, at);
}

/// Returns a launch that casts in one phase with a scale from another phase, and the read of the
/// scale.
fn cast_by(p: &Program, phase: Phase, made_in: Phase) -> Option<(InstrId, usize)> {
    let makes = launches(p, "float8_scale").into_iter();
    let scales = makes.filter(|s| p.instrs[s.0.index()].phase == made_in);
    let made: Vec<Access> = scales
        .map(|s| p.writes(&p.instrs[s.0.index()].op)[0])
        .collect();
    launches(p, "float8_cast").into_iter().find_map(|(at, k)| {
        let of = |op: &BodyOp| match (op.op, &op.inputs[..]) {
            (OpKind::Float8Cast, [_, scale]) => match scale.place {
                Place::Read(n) => Some(read(p, at, n.into())),
                Place::Write(_) | Place::Register(_) => None,
            },
            _ => None,
        };
        let scale = p.kernels[k.index()].body.iter().find_map(of)?;
        let here = p.instrs[at.index()].phase == phase && made.contains(&p.accesses[scale]);
        here.then_some((at, scale))
    })
}

/// Backward casts what it recomputes with a scale that was computed after that of forward: the
/// numbers are those of forward, but the codes are not.
#[test]
fn recomputed_tensors_with_another_scale_are_found() {
    for set in ["train.recompute=none", "train.recompute=selective"] {
        let mut p = program(&[set, "compile.mode=blocks"]);
        let (cast, scale) = cast_by(&p, Phase::Backward, Phase::Forward).expect("an input");
        let mut later = launches(&p, "float8_scale").into_iter().map(|s| s.0).rev();
        let later = later
            .find(|s| *s < cast && p.instrs[s.index()].phase == Phase::Backward)
            .expect("a gradient's scale");
        let later = p.writes(&p.instrs[later.index()].op)[0];
        p.accesses[scale] = later;
        let r = check(&p);
        // The first step's launch has the same operands.
        let v = r.of(RuleId::Float8Scale).find(|v| v.instr > Some(cast));
        let v = v.unwrap_or_else(|| panic!("{set}: #{}\n{r}", cast.0));
        assert!(v.message.contains("cast with the scale"), "{}", v.message);
    }
}

/// Returns the steady launches that copy codes of gathered weights transposed.
fn transposes(p: &Program) -> Vec<InstrId> {
    let copies = launches(p, "copy").into_iter().map(|c| c.0);
    copies
        .filter(|at| {
            let from = p.reads(&p.instrs[at.index()].op)[0].buffer;
            let from = &p.buffers[from.index()];
            from.role == Role::FullWeight && from.dtype.is_float8()
        })
        .collect()
}

/// Backward reads a transposed copy that was dropped with the weights of forward, or that is
/// created before its gather is done.
#[test]
fn transposed_codes_that_are_not_those_of_their_gather_are_found() {
    let p = program(&[GATHERED, "compile.mode=off"]);
    let all = transposes(&p);
    let [.., before, last] = all[..] else {
        panic!("{all:?}")
    };
    let mut dropped = p.clone();
    dropped.instrs[last.index()].op = p.instrs[before.index()].op;
    let r = check(&dropped);
    let reader = |at: &InstrId| {
        let codes = p.writes(&p.instrs[last.index()].op)[0].buffer;
        let reads = p.reads(&p.instrs[at.index()].op);
        reads.iter().any(|a| a.buffer == codes)
    };
    let mut gemms = launches(&p, "scaled_mm").into_iter().map(|g| g.0);
    let gemm = gemms.find(reader).expect("a matmul");
    found(&r, RuleId::Uninit, gemm);
    found(&r, RuleId::Float8Scale, gemm);
    // Before the event that marks the end of the gather.
    let waits = super::find(&p, |i| {
        i.rule == Rule::GatherDone && i.phase == Phase::Backward
    });
    let wait = *waits.iter().rfind(|w| **w < last).expect("a wait");
    let mut early = p.clone();
    let copy = early.instrs.remove(last.index());
    early.instrs.insert(wait.index(), copy);
    let r = check(&early);
    found(&r, RuleId::GatherDone, wait);
}

/// A rank whose shard is empty reduces numbers of another type. In a program, every rank does this
/// if a collective does not have the type of its buffers.
#[test]
fn maxima_that_are_reduced_as_another_type_are_found() {
    let mut p = program(&[GATHERED]);
    let at = p
        .collectives
        .iter()
        .rposition(|c| c.reduce == ReduceOp::Max);
    p.collectives[at.expect("an all-reduce")].dtype = DType::Bf16;
    let r = check(&p);
    let v = r.of(RuleId::Collective).next().expect("a violation");
    assert!(v.message.contains("f32 elements, as bf16"), "{}", v.message);
}

/// Weights are gathered into the memory of a gradient, as with a buffer that both share. (They are
/// in bfloat16, because gradients have no 8-bit type.)
#[test]
fn weights_in_the_memory_of_gradients_are_found() {
    let bf16 = ["precision.main_grads=bf16", "precision.comm_grads=bf16"];
    let p = program(&[&bf16[..], &["compile.mode=off"]].concat());
    let gathers = super::find(&p, |i| match i.op {
        Op::Collective { id, .. } => {
            let kind = p.collectives[id.index()].kind;
            i.phase == Phase::Backward && kind == CollectiveKind::AllGather
        }
        _ => false,
    });
    let gather = *gathers.last().expect("a gather in backward");
    let Op::Collective { id, .. } = p.instrs[gather.index()].op else {
        unreachable!("found as one")
    };
    let weights = p.collectives[id.index()].parts[0].output;
    let grad = p.buffers.iter().position(|b| {
        b.role == Role::FullGrad
            && b.bytes.0 >= weights.bytes
            && b.unit == p.instrs[gather.index()].unit
    });
    let grad = BufferId(grad.expect("a gradient") as u32);
    let mut q = p.clone();
    let moved = |a: &mut Access| {
        if a.buffer == weights.buffer {
            a.buffer = grad;
        }
    };
    let steady = p
        .section(SectionKind::Steady)
        .expect("steady")
        .instrs
        .clone();
    for i in gather.0..steady.end {
        if let Op::Launch { reads, .. } = p.instrs[i as usize].op {
            let n = p.reads(&p.instrs[i as usize].op).len();
            q.accesses[reads as usize..reads as usize + n]
                .iter_mut()
                .for_each(moved);
        }
    }
    q.collectives[id.index()]
        .parts
        .iter_mut()
        .for_each(|part| moved(&mut part.output));
    let r = check(&q);
    found(&r, RuleId::Lifetime, gather);
}
