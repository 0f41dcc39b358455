//! Writes Python code that shards a model with PyTorch's `fully_shard` according to a scenario.

use super::Unexpressed;
use shardlab_plan::Scenario;
use shardlab_plan::config::{
    CompileMode, GradientSync, Loss, OuterStrategy, PolicyKind, Prefetch, Recompute,
    RecomputeLayers, Reshard, Strategy, UnitPattern, Units,
};
use shardlab_plan::ir::DType;
use std::fmt::{self, Write};

/// Writes a module with a function `shard(model, blocks)`, and another one for gradient
/// accumulation. Returns the module, and the settings that `fully_shard` cannot express.
#[must_use]
pub fn python(s: &Scenario) -> (String, Vec<Unexpressed>) {
    let mut text = String::new();
    let mut expressed = s.clone();
    if !s.train.recompute_modules.is_empty() {
        expressed.train.recompute = Recompute::None;
    }
    // Writing to a string cannot fail.
    let _ = module(&mut text, &expressed);
    (text, lost(s))
}

fn module(to: &mut String, s: &Scenario) -> fmt::Result {
    let train = &s.train;
    writeln!(
        to,
        "\"\"\"Shards a model as `{}` says, with PyTorch's fully_shard.\"\"\"\n",
        s.name
    )?;
    if s.fsdp.expandable_segments {
        to.push_str("import os\n\n# Before the first allocation on a GPU.\n");
        to.push_str(
            "os.environ.setdefault(\"PYTORCH_CUDA_ALLOC_CONF\", \"expandable_segments:True\")\n\n",
        );
    }
    to.push_str("import torch\nfrom torch.distributed.device_mesh import init_device_mesh\n");
    let offload = if s.fsdp.offload.any() {
        "CPUOffloadPolicy, "
    } else {
        ""
    };
    writeln!(
        to,
        "from torch.distributed.fsdp import {offload}MixedPrecisionPolicy, fully_shard"
    )?;
    if train.recompute != Recompute::None {
        to.push_str("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n");
    }
    if train.recompute == Recompute::Selective {
        to.push_str("from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts\n");
    }
    writeln!(
        to,
        "\nMICRO_BATCH = {}  # sequences per rank\nGRAD_ACCUM = {}  # micro-batches per step\nSEQ_LEN = {}\n",
        train.micro_batch, train.grad_accum, train.seq_len
    )?;
    if train.recompute == Recompute::Selective {
        selective(to, s)?;
    }
    shard(to, s)?;
    accumulate(to, s)
}

/// Writes the policy of selective activation checkpointing.
fn selective(to: &mut String, s: &Scenario) -> fmt::Result {
    let saved = s.train.recompute_save.as_deref().map_or_else(
        || vec!["mm", "addmm", "attention", "conv"],
        |names| names.iter().map(String::as_str).collect(),
    );
    to.push_str("\nSAVED = {\n");
    for name in saved {
        for op in operators(name) {
            writeln!(to, "    torch.ops.aten.{op}.default,")?;
        }
    }
    to.push_str("}\n\n\ndef policy():\n    count = {\"forward\": 0, \"recompute\": 0}\n\n");
    to.push_str("    def keep(ctx, op, *args, **kwargs):\n");
    if s.train.recompute_nth_matmul > 0 {
        to.push_str("        if op == torch.ops.aten.mm.default:\n");
        to.push_str("            phase = \"recompute\" if ctx.is_recompute else \"forward\"\n            count[phase] += 1\n");
        writeln!(
            to,
            "            if count[phase] % {} == 0:\n                return CheckpointPolicy.PREFER_RECOMPUTE",
            s.train.recompute_nth_matmul
        )?;
    }
    to.push_str("        saved = op in SAVED\n        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE\n\n");
    to.push_str("    return create_selective_checkpoint_contexts(keep)\n\n");
    Ok(())
}

/// Returns PyTorch's operators for a kernel name.
fn operators(name: &str) -> &[&str] {
    match name {
        "mm" => &["mm"],
        "addmm" => &["addmm"],
        "attention" => &[
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_cudnn_attention",
        ],
        "conv" => &["convolution"],
        _ => &[],
    }
}

fn shard(to: &mut String, s: &Scenario) -> fmt::Result {
    let ends = s.fsdp.units == Units::BlockAndEnds;
    let (more, about) = match ends {
        true => (
            ", embedding, last",
            ", `embedding` is the table of tokens, and `last` lists the last norm and the output layer",
        ),
        false => ("", ""),
    };
    writeln!(
        to,
        "\ndef shard(model, blocks{more}):\n    \"\"\"Shards a model; `blocks` are its transformer blocks in order{about}.\"\"\""
    )?;
    let mesh = &s.mesh;
    if mesh.dp_outer > 1 {
        writeln!(
            to,
            "    mesh = init_device_mesh(\"cuda\", ({}, {}), mesh_dim_names=(\"dp_replicate\", \"dp_shard\"))",
            mesh.dp_outer, mesh.dp_shard
        )?;
    } else {
        writeln!(
            to,
            "    mesh = init_device_mesh(\"cuda\", ({},), mesh_dim_names=(\"dp_shard\",))",
            mesh.dp_shard
        )?;
    }
    writeln!(
        to,
        "    precision = MixedPrecisionPolicy(param_dtype=torch.{}, reduce_dtype=torch.{})",
        dtype(s.precision.compute),
        dtype(s.precision.comm_grads)
    )?;
    let offload = if s.fsdp.offload.any() {
        ", \"offload_policy\": CPUOffloadPolicy()"
    } else {
        ""
    };
    writeln!(
        to,
        "    options = {{\"mesh\": mesh, \"mp_policy\": precision{offload}}}"
    )?;
    recompute(to, s)?;
    if s.compile.mode == CompileMode::Blocks {
        to.push_str("    for block in blocks:\n        block.compile()\n");
    }
    units(to, s)?;
    prefetch(to, "forward", &s.fsdp.prefetch_forward)?;
    prefetch(to, "backward", &s.fsdp.prefetch_backward)?;
    if s.fsdp.keep_unsharded_storage {
        to.push_str("    model.set_keep_unsharded_storage(True)\n");
    }
    if s.compile.mode == CompileMode::Regions {
        to.push_str("    model.compile()\n");
    }
    to.push_str("    return model\n\n");
    Ok(())
}

fn recompute(to: &mut String, s: &Scenario) -> fmt::Result {
    if s.train.recompute == Recompute::None {
        return Ok(());
    }
    let context = match s.train.recompute {
        Recompute::Selective => "context_fn=policy, ",
        _ => "",
    };
    let some = match s.train.recompute_layers {
        RecomputeLayers::First(n) => format!("[:{n}]"),
        RecomputeLayers::All | RecomputeLayers::Patterns(_) => String::new(),
    };
    writeln!(
        to,
        "    for i, block in enumerate(blocks{some}):\n        blocks[i] = checkpoint_wrapper(block, {context}preserve_rng_state=False)"
    )
}

fn units(to: &mut String, s: &Scenario) -> fmt::Result {
    let reshard = match s.fsdp.reshard_after_forward {
        Reshard::Always | Reshard::Auto => "True".to_owned(),
        Reshard::Never => "False".to_owned(),
        Reshard::Group(n) => n.to_string(),
    };
    let auto = s.fsdp.reshard_after_forward == Reshard::Auto;
    let joined = match &s.fsdp.units {
        Units::Block | Units::BlockAndEnds => Some(1),
        Units::Patterns(patterns) => Some(together(patterns)),
        Units::Root => None,
    };
    if let Some(n) = joined {
        let each = if n == 1 {
            "blocks[i]".to_owned()
        } else {
            format!("list(blocks[i : i + {n}])")
        };
        let last = format!("i + {n} < len(blocks)");
        let reshard = if auto { last } else { reshard.clone() };
        writeln!(
            to,
            "    for i in range(0, len(blocks), {n}):\n        fully_shard({each}, reshard_after_forward={reshard}, **options)"
        )?;
    }
    if s.fsdp.units == Units::BlockAndEnds {
        writeln!(
            to,
            "    fully_shard(embedding, reshard_after_forward={reshard}, **options)\n    fully_shard(last, reshard_after_forward=False, **options)"
        )?;
    }
    let root = if s.fsdp.reshard_root { "True" } else { "False" };
    writeln!(
        to,
        "    fully_shard(model, reshard_after_forward={root}, **options)"
    )
}

/// Returns the number of blocks in a unit.
fn together(patterns: &[UnitPattern]) -> usize {
    patterns.first().map_or(1, |p| p.modules.len()).max(1)
}

fn prefetch(to: &mut String, pass: &str, depth: &Prefetch) -> fmt::Result {
    let Prefetch::Depth(n) = depth else {
        return Ok(());
    };
    if *n == 0 {
        return Ok(());
    }
    let next = if pass == "forward" {
        format!("blocks[i + 1 : i + {}]", n + 1)
    } else {
        format!("list(reversed(blocks[max(i - {n}, 0) : i]))")
    };
    writeln!(
        to,
        "    for i, block in enumerate(blocks):\n        block.set_modules_to_{pass}_prefetch({next})"
    )
}

/// Writes the settings that change between the micro-batches of a step.
fn accumulate(to: &mut String, s: &Scenario) -> fmt::Result {
    let sync = s.fsdp.gradient_sync;
    if s.train.grad_accum == 1 || (sync == GradientSync::Every && s.fsdp.reshard_after_backward) {
        return Ok(());
    }
    to.push_str("\ndef before_backward(model, micro_batch):\n    \"\"\"Call this before the backward of each micro-batch, numbered from 0.\"\"\"\n");
    to.push_str("    last = micro_batch == GRAD_ACCUM - 1\n");
    match sync {
        GradientSync::Every => {}
        GradientSync::OuterLast => to.push_str("    model.set_requires_all_reduce(last)\n"),
        GradientSync::Last => to.push_str("    model.set_requires_gradient_sync(last)\n"),
    }
    if !s.fsdp.reshard_after_backward {
        to.push_str("    model.set_reshard_after_backward(last)\n");
    }
    Ok(())
}

fn dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
        _ => "float32",
    }
}

/// Returns the settings that `fully_shard` cannot express.
fn lost(s: &Scenario) -> Vec<Unexpressed> {
    let mut all = Vec::new();
    let mut unless = |fine: bool, set: String, why: &str| {
        if !fine {
            all.push(Unexpressed {
                set,
                why: why.to_owned(),
            });
        }
    };
    let fsdp = &s.fsdp;
    unless(
        fsdp.policy == PolicyKind::Fsdp2,
        format!("fsdp.policy={}", fsdp.policy.name()),
        "the code shards with fully_shard; `shardlab tune --free fsdp.policy` compares engines",
    );
    unless(
        matches!(
            fsdp.strategy,
            Strategy::OptimGradsParams | Strategy::OptimGrads
        ),
        format!("fsdp.strategy={}", fsdp.strategy.name()),
        "fully_shard shards parameters, gradients and optimizer state",
    );
    unless(
        fsdp.outer_strategy == OuterStrategy::NoShard,
        format!("fsdp.outer_strategy={}", fsdp.outer_strategy.name()),
        "fully_shard replicates over the outer dimension",
    );
    unless(
        fsdp.ignored_params.is_none(),
        "fsdp.ignored_params".to_owned(),
        "pass these parameters of a unit to its fully_shard as `ignored_params`",
    );
    unless(
        s.train.recompute_modules.is_empty(),
        "train.recompute_modules".to_owned(),
        "Megatron-LM has this option: wrap these modules of a block in `checkpoint_wrapper`",
    );
    unless(
        s.train.loss == Loss::Materialized,
        format!("train.loss={}", s.train.loss.name()),
        "the loss is part of the training loop: use a fused linear cross entropy",
    );
    unless(
        s.train.recompute != Recompute::Pointwise,
        "train.recompute=pointwise".to_owned(),
        "set torch._functorch.config.activation_memory_budget instead",
    );
    unless(
        !s.train.activation_offload,
        "train.activation_offload=true".to_owned(),
        "run forward under OffloadActivations of torchtune or TRL",
    );
    unless(
        !s.train.use_reentrant,
        "train.use_reentrant=true".to_owned(),
        "the code's wrappers are not reentrant, as PyTorch recommends",
    );
    unless(
        s.compile.mode != CompileMode::Full,
        "compile.mode=full".to_owned(),
        "the hooks of fully_shard cannot be part of one graph",
    );
    unless(
        s.compile.exclude.is_empty(),
        format!("compile.exclude={:?}", s.compile.exclude),
        "put torch.compiler.disable around forward of these modules",
    );
    unless(
        s.compile.cuda_graph == shardlab_plan::config::CudaGraph::Off,
        "compile.cuda_graph".to_owned(),
        "capture is not part of the code",
    );
    unless(
        s.lora.is_none(),
        "lora.r".to_owned(),
        "adapters are added by PEFT before the model is sharded",
    );
    unless(
        fsdp.prefetch_forward != Prefetch::Depth(0) && fsdp.prefetch_backward != Prefetch::Depth(0),
        "fsdp.prefetch=0".to_owned(),
        "fully_shard has no setting that removes its implicit prefetch",
    );
    all
}
