//! Rules for `[compile]`.

use super::{Checked, refuse};
use crate::config::{
    AllocatorKind, CompileMode, CudaGraph, Family, MergeProjections, MlpType, Scenario, Scope,
};
use crate::scenario::ScenarioErrorKind;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

/// Refuses the first impossible combination.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let (c, f) = (&s.compile, &s.fsdp);
    refuse(s, d, "compile.mode")?;
    eager_loss(s, d)?;
    merges(s, d)?;
    host_reads(s, d)?;
    match &c.cuda_graph {
        CudaGraph::Off => Ok(()),
        CudaGraph::FullIteration if f.nan_check => {
            let message = "`nan_check` reads results on the host, which is not possible within a full-iteration CUDA graph";
            Err(d
                .conflict(&[Key::NanCheck, Key::CudaGraph], message)
                .with_help("set fsdp.nan_check = false"))
        }
        CudaGraph::FullIteration if f.offload.any() => {
            let message = "with `offload`, the host waits for copies, which is not possible within a full-iteration CUDA graph";
            Err(d
                .conflict(&[Key::Offload, Key::CudaGraph], message)
                .with_help("set fsdp.offload = [], or capture scopes"))
        }
        CudaGraph::FullIteration => persistent_copies(s, d),
        CudaGraph::Scopes(scopes) => scopes_fit(s, d, scopes),
    }
}

/// Refuses an eager loss where the compiler sees it as a part of the step.
fn eager_loss(s: &Scenario, d: &Document) -> Checked {
    let whole = matches!(s.compile.mode, CompileMode::Regions | CompileMode::Full);
    if !whole || s.compile.loss {
        return Ok(());
    }
    let message = format!(
        "compile mode {} also compiles the loss",
        s.compile.mode.name()
    );
    let help = "leave compile.loss out, use mode blocks, or set compile.exclude = [\"loss\"]";
    let keys = [Key::CompileLoss, Key::Mode];
    Err(d.conflict(&keys, message).with_help(help))
}

/// Refuses to capture the exchange of a dispatcher that waits for the host, or to compile it as one
/// graph.
fn host_reads(s: &Scenario, d: &Document) -> Checked {
    let reads = s.moe.as_ref().map(|moe| moe.dispatcher);
    let Some(dispatcher) = reads.filter(|d| d.host_reads()) else {
        return Ok(());
    };
    let (key, what) = if s.compile.cuda_graph.exchanges_tokens() {
        (Key::CudaGraph, "a CUDA graph")
    } else if s.compile.mode == CompileMode::Full {
        (Key::Mode, "a step compiled as one graph")
    } else {
        return Ok(());
    };
    let message = format!(
        "dispatcher \"{}\" reads the numbers of rows on the host, which {what} cannot contain",
        dispatcher.name()
    );
    let dispatchers = "use dispatcher \"gather\", \"padded\" or \"peer\"";
    let help = match key {
        Key::CudaGraph => {
            format!("{dispatchers}, or capture [\"attn\", \"moe_router\", \"moe_preprocess\"]")
        }
        _ => dispatchers.to_owned(),
    };
    Err(d.conflict(&[Key::Dispatcher, key], message).with_help(help))
}

/// Refuses what only compiled code has where nothing is compiled, and merged projections where the
/// schedule keeps their weights apart.
fn merges(s: &Scenario, d: &Document) -> Checked {
    let c = &s.compile;
    let compiled = [
        (c.epilogues, Key::Epilogues, "epilogues", "gemm_accumulate"),
        (
            c.mix_order_reductions,
            Key::MixOrderReductions,
            "mixed-order reductions",
            "mix_order_reductions",
        ),
        (
            c.fused_products,
            Key::FusedProducts,
            "fused matmuls",
            "gemm_epilogue_fusion",
        ),
    ];
    for (on, key, what, name) in compiled {
        if on && c.mode == CompileMode::Off {
            let message = format!(
                "{what} are compiled code, but with compile mode off every op is a separate kernel"
            );
            return Err(d
                .conflict(&[key, Key::Mode], message)
                .with_help(format!("use mode regions, blocks or full, or {name} false")));
        }
    }
    if c.merge_projections == MergeProjections::None {
        return Ok(());
    }
    if c.mode == CompileMode::Off {
        let message = "merged projections are compiled code, but with compile mode off every op is a separate kernel";
        return Err(d
            .conflict(&[Key::MergeProjections, Key::Mode], message)
            .with_help("use mode regions or blocks, or fuse_projections none"));
    }
    refuse(s, d, "compile.fuse_projections")
}

/// Refuses a double buffer that may move buffers between steps.
fn persistent_copies(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.allocator != AllocatorKind::DoubleBuffer || f.persist_on_alloc_fail {
        return Ok(());
    }
    let keys = [Key::CudaGraph, Key::Allocator, Key::PersistOnAllocFail];
    let message = "a replay needs memory at the addresses of the capture, but a double buffer gives units that do not fit a new address each time";
    Err(d
        .conflict(&keys, message)
        .with_help("set fsdp.persist_on_alloc_fail = true"))
}

/// Refuses captured scopes that the schedule, the allocator or the model does not have.
fn scopes_fit(s: &Scenario, d: &Document, scopes: &[Scope]) -> Checked {
    let f = &s.fsdp;
    let keys = [Key::CudaGraph, Key::Allocator, Key::Policy];
    refuse(s, d, "compile.cuda_graph")?;
    match f.allocator {
        AllocatorKind::Caching | AllocatorKind::Temporary | AllocatorKind::TracePool => {
            let name = f.allocator.name();
            let help = f.spec().fixed_addresses;
            let message = format!(
                "captured scopes replay fixed addresses, but the {name} allocator moves buffers between steps"
            );
            return Err(d
                .conflict(&keys, message)
                .with_help(format!("{help}, or capture the full iteration")));
        }
        AllocatorKind::DoubleBuffer | AllocatorKind::Pool => persistent_copies(s, d)?,
    }
    let mut sorted = scopes.to_vec();
    sorted.sort_unstable();
    if sorted.windows(2).any(|w| w[0] == w[1]) {
        return Err(d.conflict(&[Key::CudaGraph], "a scope is listed twice"));
    }
    nested(&sorted, d)?;
    layers_exist(s, d, &sorted)?;
    if sorted != [Scope::Block] && s.model.family.spec().attention.is_none() {
        let message = format!(
            "a block of family {} has no attention and no mlp",
            s.model.family.name()
        );
        return Err(d
            .conflict(&[Key::CudaGraph], message)
            .with_help("use scope block"));
    }
    Ok(())
}

/// Refuses a scope next to one that contains it.
fn nested(scopes: &[Scope], d: &Document) -> Checked {
    if scopes.len() > 1 && scopes.contains(&Scope::Block) {
        return Err(d
            .conflict(&[Key::CudaGraph], "scope block contains all others")
            .with_help("list block alone"));
    }
    let part = scopes
        .iter()
        .find(|s| matches!(s, Scope::MoeRouter | Scope::MoePreprocess));
    match part {
        Some(part) if scopes.contains(&Scope::Moe) => Err(d
            .conflict(
                &[Key::CudaGraph],
                format!("scope moe contains {}", part.name()),
            )
            .with_help(format!("list moe without {}", part.name()))),
        _ => Ok(()),
    }
}

/// Refuses a scope of layers that the model does not have.
fn layers_exist(s: &Scenario, d: &Document, scopes: &[Scope]) -> Checked {
    let m = &s.model;
    let options = &m.options.experts;
    let routed = m.family == Family::Moe;
    let beside = routed && (options.dense_and_experts || options.shortcut_experts);
    let is = |kind| (0..m.layers as usize).any(|layer| m.mlp_type(layer) == kind);
    let experts = m.has_experts() || beside;
    let no_dense = routed && !beside && !is(MlpType::Dense);
    let idle = |scope: &&Scope| match scope {
        Scope::Mlp => no_dense,
        scope => scope.needs_experts() && !experts,
    };
    let Some(scope) = scopes.iter().find(idle) else {
        return Ok(());
    };
    let (why, instead) = match scope {
        Scope::Mlp => ("every layer of the model has experts", "\"moe\""),
        _ => ("the model has no experts", "\"mlp\""),
    };
    let message = format!("scope {} has no effect here: {why}", scope.name());
    Err(d
        .conflict(&[Key::CudaGraph, Key::Family], message)
        .of(ScenarioErrorKind::NoEffect)
        .with_help(format!("leave it out, or use {instead}")))
}
