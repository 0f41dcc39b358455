//! From the merged document to typed values, with the derived defaults.

use super::documents;
use super::error::ScenarioError;
use super::keys::{HARDWARE, Key};
use super::merge::Document;
use super::moe::{forced, moe};
use super::placements::strategies;
use super::presets::{self, Filled};
use super::setting::Setting;
use super::validate;
use super::value::Value;
use crate::config::pattern::unit_pattern;
use crate::config::*;
use crate::ir::DType;
use crate::models::Inputs;
use crate::names::nearest;
use crate::policies::spec::PolicySpec;
use crate::units::Bytes;
use std::path::Path;

/// The scenario that a document says, checked.
pub(crate) fn scenario(mut document: Document) -> Result<Scenario, ScenarioError> {
    let preset = presets::fill(&mut document)?;
    let scenario = resolve(&document, preset.as_ref())?;
    let without = |key: Key| resolve(&document.without(key), preset.as_ref());
    validate::check(&scenario, &document, &|key| {
        without(key).is_ok_and(|other| other == scenario)
    })?;
    Ok(scenario)
}

/// The scenario that a document says, with every option resolved.
fn resolve(d: &Document, preset: Option<&Filled>) -> Result<Scenario, ScenarioError> {
    let (model, train) = model_and_train(d, preset)?;
    let mesh = mesh(d)?;
    let (fsdp, compile, precision) = (fsdp(d, &mesh, &model)?, compile(d), precision(d, &mesh));
    let forced_routing = forced(d, &model)?;
    let routed = (&model, forced_routing.as_ref());
    Ok(Scenario {
        name: d.name.clone(),
        about: d.about.clone(),
        moe: moe(d, routed, &fsdp, &mesh, &compile, &precision)?,
        forced_routing,
        model,
        model_file: preset.and_then(|p| p.file.clone()),
        lora: lora(d),
        train,
        fsdp,
        mesh,
        precision,
        compile,
        gate: gate(d),
    })
}

impl Document {
    fn required(&self, key: Key, family: Family) -> Result<u64, ScenarioError> {
        self.given(key).ok_or_else(|| {
            let what = format!(
                "`{}` is missing: family {} needs it",
                key.path(),
                family.name()
            );
            self.missing(key, what)
                .with_expected(key.info().expected())
                .with_help("or name a `preset`")
        })
    }
}

fn model_and_train(d: &Document, preset: Option<&Filled>) -> Result<(Model, Train), ScenarioError> {
    let Some(family) = d.given::<Family>(Key::Family) else {
        let error = d.missing(Key::Preset, "[model] needs a `preset` or a `family`");
        return Err(error.with_help("for example preset = \"llama3-8b\""));
    };
    let spec = family.spec();
    let images = spec.inputs == Inputs::Images;

    let channels = if images {
        d.required(Key::Channels, family)?
    } else {
        0
    };
    let hidden = if images {
        channels
    } else {
        d.required(Key::Hidden, family)?
    };
    let heads = if spec.attention.is_some() {
        d.required(Key::Heads, family)?
    } else {
        1
    };
    let head_dim = match d.given(Key::HeadDim) {
        Some(n) => n,
        None if hidden % heads == 0 => hidden / heads,
        None => {
            let message = format!("`hidden` ({hidden}) is not divisible by `heads` ({heads})");
            let error = d.conflict(&[Key::Heads, Key::Hidden], message);
            return Err(if spec.has("head_dim") {
                error.with_help("or give `head_dim`")
            } else {
                error
            });
        }
    };
    let proportion = preset.and_then(|p| p.ffn_to_hidden);
    let ffn = match d.given::<u64>(Key::Ffn) {
        // Another width of the model: the preset's proportion, rounded as the default is.
        Some(_) if let Some((ffn, of)) = proportion.filter(|(_, of)| *of != hidden) => (ffn
            * hidden)
            .div_ceil(of)
            .next_multiple_of(spec.defaults.ffn_multiple),
        Some(n) => n,
        None => (spec.defaults.ffn)(hidden),
    };
    let asked = d.given(Key::SeqLen);
    let given = d.given(Key::MaxSeqLen);
    let max_seq_len = given.or_else(|| (spec.defaults.max_seq_len)(asked));
    let seq_len = asked.unwrap_or_else(|| (spec.defaults.seq_len)(max_seq_len));
    let image = |key, default| {
        if images {
            d.given(key).unwrap_or(default)
        } else {
            0
        }
    };

    let model = Model {
        preset: preset.map(|p| p.name.clone()),
        family,
        layers: d.required(Key::Layers, family)? as u32, // at most 4096
        hidden,
        heads,
        kv_heads: d.given(Key::KvHeads).unwrap_or(heads),
        head_dim,
        ffn,
        vocab: if spec.inputs == Inputs::Tokens {
            d.required(Key::Vocab, family)?
        } else {
            0
        },
        tie_embeddings: d
            .given(Key::TieEmbeddings)
            .unwrap_or(spec.defaults.tie_embeddings),
        norm_eps: d.setting(Key::NormEps),
        rope_theta: d.given(Key::RopeTheta).unwrap_or(10_000.0),
        max_seq_len: max_seq_len.unwrap_or(seq_len),
        channels,
        height: image(Key::Height, 64),
        width: image(Key::Width, 64),
        kernel: image(Key::Kernel, 3),
        bias: d.given(Key::Bias).unwrap_or(spec.defaults.bias),
        options: options(d),
    };
    let lengths = documents::lengths(d, seq_len, model.vocab)?;
    let train = train(d, seq_len, model.vocab, lengths);
    Ok((model, train))
}

/// Returns the other keys of the model, where `vision_patches` replaces the number of `vision`.
fn options(d: &Document) -> ModelOptions {
    let mut options: ModelOptions = d.options("model");
    if let (Some(vision), Some(patches)) =
        (&mut options.context.vision, options.context.vision_patches)
    {
        vision.input.patches = patches;
    }
    options
}

/// Returns the adapters, if there is a rank. Validation refuses texts that are no expressions.
fn lora(d: &Document) -> Option<Lora> {
    let lists: Vec<String> = d.items(Key::LayersPattern);
    let lists = lists
        .iter()
        .filter_map(|list| Expression::of_list(list).ok());
    Some(Lora {
        r: d.given(Key::LoraR)?,
        alpha: d.setting(Key::LoraAlpha),
        targets: d.setting(Key::LoraTargets),
        exclude: d.setting(Key::ExcludeModules),
        layers: d.items(Key::LayersToTransform),
        layers_pattern: lists.collect(),
        rank_pattern: d.setting(Key::RankPattern),
        alpha_pattern: d.setting(Key::AlphaPattern),
        dropout: d.setting(Key::LoraDropout),
        use_rslora: d.setting(Key::UseRslora),
        use_dora: d.setting(Key::UseDora),
        modules_to_save: d.setting(Key::ModulesToSave),
    })
}

/// Returns the tokens per chunk of a chunked loss: a number, or `auto`.
fn loss_chunk(d: &Document, seq_len: u64, vocab: u64) -> u64 {
    let word: Option<String> = d.given(Key::LossChunkRows);
    if word.is_none() {
        return d.setting(Key::LossChunkRows);
    }
    let rows = seq_len.saturating_mul(d.setting(Key::MicroBatch));
    let compute: DType = d.setting(Key::Compute);
    chunk_by_size(rows, vocab.saturating_mul(compute.size()))
}

fn train(d: &Document, seq_len: u64, vocab: u64, document_lengths: DocumentLengths) -> Train {
    Train {
        seq_len,
        document_lengths,
        micro_batch: d.setting(Key::MicroBatch),
        grad_accum: d.setting(Key::GradAccum),
        recompute: d.setting(Key::Recompute),
        recompute_layers: d.setting(Key::RecomputeLayers),
        recompute_save: d.given(Key::RecomputeSave),
        recompute_modules: d.setting(Key::RecomputeModules),
        recompute_nth_matmul: d.setting(Key::RecomputeNthMatmul),
        // A later text that recomputes otherwise has no use for it.
        use_reentrant: d.setting(Key::UseReentrant)
            && (d.setting::<Recompute>(Key::Recompute) == Recompute::Full
                || d.layer(Key::Recompute) <= d.layer(Key::UseReentrant)),
        activation_offload: d.setting(Key::ActivationOffload),
        // Megatron-LM checkpoints parts of blocks as functions, which cache nothing.
        caches_unneeded: !spec(d).defaults.optimizes_code
            && d.setting::<Vec<RecomputeModule>>(Key::RecomputeModules)
                .is_empty(),
        loss: d.setting(Key::Loss),
        loss_chunk_rows: loss_chunk(d, seq_len, vocab),
        keep_logits: d.setting(Key::KeepLogits),
        attention_backend: d.given(Key::AttentionBackend),
        optimizer: d.setting(Key::Optimizer),
        lr: d.setting(Key::Lr),
        warmup_steps: d.setting(Key::WarmupSteps),
        lr_schedule: d.setting(Key::LrSchedule),
        min_lr: d.setting(Key::MinLr),
        betas: d.setting(Key::Betas),
        muon_momentum: d.setting(Key::MuonMomentum),
        muon_adjust_lr: d.setting(Key::MuonAdjustLr),
        eps: d.setting(Key::Eps),
        weight_decay: d.setting(Key::WeightDecay),
        decay_norms_and_biases: d.setting(Key::DecayNormsAndBiases),
        param_groups: d.setting(Key::ParamGroups),
        clip_norm: d.setting(Key::ClipNorm),
        sync: d.setting(Key::Sync),
        grad_norm: d.setting(Key::GradNorm),
        steps: d.setting(Key::Steps),
        validate_every: d.setting(Key::ValidateEvery),
        no_grad_forwards: d.setting(Key::NoGradForwards),
        // A later text with one micro-batch leaves nothing to join.
        joint_backward: d.setting(Key::JointBackward)
            && (d.setting::<u32>(Key::GradAccum) > 1
                || d.layer(Key::GradAccum) <= d.layer(Key::JointBackward)),
        skipped_blocks: d.setting(Key::SkippedBlocks),
        param_norms_every: d.setting(Key::ParamNormsEvery),
    }
}

/// A hardware profile by its name or its path.
pub(crate) fn profile(d: &Document, value: &Value) -> String {
    let name = value.str().unwrap_or_default();
    if HARDWARE.contains(&name) {
        return name.to_owned();
    }
    d.found(value).display().to_string()
}

/// Returns the hardware profile. A path in a file must exist; a path from the command line is
/// checked where the profile is loaded.
fn hardware(d: &Document) -> Result<Option<String>, ScenarioError> {
    let Some(value) = d.value(Key::Hardware) else {
        return Ok(None);
    };
    let (name, found) = (value.str().unwrap_or_default(), profile(d, value));
    if d.folder(value.origin).is_none() || HARDWARE.contains(&name) || Path::new(&found).is_file() {
        return Ok(Some(found));
    }
    let message =
        format!("there is no hardware profile {found}: paths in a file are relative to that file");
    let error = d.error(value.origin, message);
    let stem = Path::new(name).file_stem().unwrap_or_default();
    let near = nearest(&stem.to_string_lossy(), HARDWARE);
    Err(if Path::new(name).is_file() {
        error.with_help(format!(
            "the working directory has a {name}: write its path relative to the scenario's folder, or use --set mesh.hardware={name}"
        ))
    } else if let Some(near) = near {
        error.with_help(format!("a shipped profile has a similar name: {near}"))
    } else {
        error.with_help(format!("shipped profiles: {}", HARDWARE.join(", ")))
    })
}

fn mesh(d: &Document) -> Result<Mesh, ScenarioError> {
    let absent = |key: Key, help: &str| {
        d.missing(key, format!("`{}` is missing", key.path()))
            .with_expected(key.info().expected())
            .with_help(help)
    };
    let Some(hardware) = hardware(d)? else {
        return Err(absent(
            Key::Hardware,
            "for example hardware = \"h200-nvlink\"",
        ));
    };
    let Some(dp_shard) = d.given::<u32>(Key::DpShard) else {
        return Err(absent(
            Key::DpShard,
            "set the number of ranks that share one copy of the parameters, for example dp_shard = 4",
        ));
    };
    let dp_outer: u32 = d.setting(Key::DpOuter);
    let tp: u32 = d.setting(Key::Tp);
    let world = u64::from(dp_shard)
        .saturating_mul(u64::from(dp_outer))
        .saturating_mul(u64::from(tp));
    if world > validate::MAX_RANKS {
        let factors = validate::rank_factors(tp);
        let message = format!(
            "{world} ranks ({factors}) are more than {}",
            validate::MAX_RANKS
        );
        return Err(d.conflict(&[Key::DpOuter, Key::DpShard, Key::Tp], message));
    }
    let gpus_per_node = d.given(Key::GpusPerNode).unwrap_or(world.min(8) as u32);
    Ok(Mesh {
        hardware,
        dp_shard,
        dp_outer,
        tp,
        ep: d.setting(Key::Ep),
        gpus_per_node,
    })
}

/// cuBLAS's workspace, which torch takes from its caching allocator, one per thread: 32 MiB on
/// Hopper and later, 4096 KiB x 2 + 16 KiB x 8 before (`CUBLAS_WORKSPACE_CONFIG` default, torch
/// `CUDABlas.cpp`). What a profile in a file is of is not known here.
fn cublas_workspace_default(hardware: &str) -> u64 {
    match hardware {
        "a100-40" | "a100-80" => 8_519_680,
        _ => 33_554_432,
    }
}

/// Returns the spec of a document's policy.
fn spec(d: &Document) -> &'static PolicySpec {
    PolicySpec::of(d.setting(Key::Policy), d.setting(Key::Variant))
}

fn fsdp(d: &Document, mesh: &Mesh, model: &Model) -> Result<Fsdp, ScenarioError> {
    let policy: PolicyKind = d.setting(Key::Policy);
    let variant: Variant = d.setting(Key::Variant);
    let PolicySpec {
        engine, defaults, ..
    } = spec(d);
    let (strategy, outer_strategy) = strategies(d, mesh)?;
    Ok(Fsdp {
        policy,
        variant,
        strategy,
        outer_strategy,
        units: units(d, model)?,
        reshard_after_forward: d
            .given(Key::Reshard)
            .unwrap_or_else(|| (defaults.reshard)(strategy)),
        reshard_root: d.setting(Key::ReshardRoot),
        reshard_after_backward: d.setting(Key::ReshardAfterBackward),
        keep_unsharded_storage: d.setting(Key::KeepUnshardedStorage),
        gradient_sync: d.given(Key::GradientSync).unwrap_or(defaults.gradient_sync),
        atomic: d.setting(Key::Atomic),
        ignored_params: d.setting(Key::IgnoredParams),
        no_sync_units: d.setting(Key::NoSyncUnits),
        reduce_unused: d.setting(Key::ReduceUnused),
        prefetch_forward: d.given(Key::PrefetchForward).unwrap_or(defaults.prefetch),
        prefetch_backward: d.given(Key::PrefetchBackward).unwrap_or(defaults.prefetch),
        prefetch_lists: d.setting(Key::PrefetchLists),
        prefetch_next_step: d.setting(Key::PrefetchNextStep),
        optimizer_in_backward: d.setting(Key::OptimizerInBackward),
        // A later text that picks an engine with a limit of its own has no use for it.
        reduce_in_flight: d
            .given(Key::ReduceInFlight)
            .filter(|_| {
                variant.is_released() || d.layer(Key::Variant) <= d.layer(Key::ReduceInFlight)
            })
            .unwrap_or(defaults.reduce_in_flight),
        async_reduce: d.setting(Key::AsyncReduce),
        separate_communicators: d
            .given(Key::SeparateCommunicators)
            .unwrap_or(defaults.separate_communicators),
        copy_engine_gather: d.setting(Key::CopyEngineGather),
        copy_engine_reduce: d.setting(Key::CopyEngineReduce),
        sum_in_optimizer: d.setting(Key::SumInOptimizer),
        cast_before_all_gather: d.setting(Key::CastBeforeAllGather),
        copy_in_stream: d.setting(Key::CopyInStream),
        unify_comm_stream: d.setting(Key::UnifyCommStream),
        allocator: d.given(Key::Allocator).unwrap_or(defaults.allocator),
        // torchtitan's launcher sets it, Accelerate and the Trainer do not.
        expandable_segments: d
            .given(Key::ExpandableSegments)
            .unwrap_or_else(|| d.given(Key::Implementation) != Some(Implementation::Transformers)),
        cublas_workspace_bytes: if engine.allocates_workspaces(&mesh.hardware) {
            d.given(Key::CublasWorkspaceBytes)
                .map_or_else(|| cublas_workspace_default(&mesh.hardware), |b: Bytes| b.0)
        } else {
            0
        },
        persist_on_alloc_fail: d.setting(Key::PersistOnAllocFail),
        average_in_collective: d.setting(Key::AverageInCollective),
        per_token_loss: d.setting(Key::PerTokenLoss),
        gradient_scaling_factor: d.given(Key::GradientScalingFactor),
        decoupled_gradients: d.setting(Key::DecoupledGradients),
        keep_fp8_transpose_cache: d.setting(Key::KeepFp8TransposeCache),
        nan_check: d.setting(Key::NanCheck),
        offload: d.setting(Key::Offload),
        frozen: d.setting(Key::Frozen),
    })
}

fn units(d: &Document, model: &Model) -> Result<Units, ScenarioError> {
    match d.value(Key::Units) {
        Some(value) => match value.array() {
            Some(list) => Ok(Units::Patterns(
                list.iter()
                    .map(|v| {
                        unit_pattern(v.str().unwrap_or_default()).map_err(|m| d.error(v.origin, m))
                    })
                    .collect::<Result<_, _>>()?,
            )),
            None => Ok(match value.str() {
                Some("root") => Units::Root,
                // The last unit would contain the embedding, as the root does.
                Some("block_and_ends") if !model.tie_embeddings => Units::BlockAndEnds,
                _ => Units::Block,
            }),
        },
        None => Ok(Units::Block),
    }
}

impl Setting for DType {
    fn of(value: &Value) -> Option<Self> {
        Self::float_named(value.str()?)
    }
}

/// `none` is no dtype.
impl Setting for Option<DType> {
    fn of(value: &Value) -> Option<Self> {
        value.str().map(DType::float_named)
    }
}

fn precision(d: &Document, mesh: &Mesh) -> Precision {
    let defaults = &spec(d).defaults;
    let compute: DType = d.setting(Key::Compute);
    let main_params: Option<DType> = d.setting(Key::MainParams);
    let with_adapters = || FrozenType::of_word(compute.name()).filter(|_| d.says(Key::LoraR));
    let frozen: Option<FrozenType> = d.given(Key::FrozenParams).or_else(with_adapters);
    let as_trained = main_params.unwrap_or(compute);
    let main_grads = d
        .given(Key::MainGrads)
        .unwrap_or_else(|| (defaults.main_grads)(compute));
    Precision {
        compute,
        main_params,
        frozen_params: frozen.filter(|f| f.dtype() != Some(as_trained)),
        main_grads,
        comm_grads: d
            .given(Key::CommGrads)
            .unwrap_or_else(|| (defaults.comm_grads)(compute, main_grads)),
        moments: d.setting(Key::Moments),
        loss_fp32_upcast: d.setting(Key::LossFp32Upcast),
        deterministic: d.setting(Key::Deterministic),
        float8: float8(d, mesh),
    }
}

fn float8(d: &Document, mesh: &Mesh) -> Float8 {
    let recipe = d.setting(Key::Float8Recipe);
    let by_recipe = match recipe {
        Float8Recipe::Rowwise | Float8Recipe::Blockwise | Float8Recipe::Mxfp8 => Float8Format::E4m3,
        Float8Recipe::Tensorwise | Float8Recipe::None => Float8Format::E5m2,
    };
    Float8 {
        recipe,
        grad: d.given(Key::Float8Grad).unwrap_or(by_recipe),
        saved: d.setting(Key::Float8Saved),
        exclude: d.setting(Key::Float8Exclude),
        first_bf16: d.setting(Key::Float8FirstBf16),
        last_bf16: d.setting(Key::Float8LastBf16),
        fast_accum: d.setting(Key::Float8FastAccum),
        all_gather: d.setting(Key::Float8AllGather),
        experts: d.setting(Key::Float8Experts),
        gathers_experts: mesh.dp_shard > mesh.ep,
    }
}

fn compile(d: &Document) -> Compile {
    let mode = d.setting(Key::Mode);
    let optimizes = spec(d).defaults.optimizes_code;
    // Compile mode full gathers each parameter into a separate buffer.
    let merges = optimizes && matches!(mode, CompileMode::Regions | CompileMode::Blocks);
    let generates = optimizes && mode != CompileMode::Off;
    let merged = if merges {
        MergeProjections::Qkv
    } else {
        MergeProjections::None
    };
    let whole = matches!(mode, CompileMode::Regions | CompileMode::Full);
    Compile {
        mode,
        loss: d.given(Key::CompileLoss).unwrap_or(whole),
        exclude: d.setting(Key::CompileExclude),
        merge_projections: d.given(Key::MergeProjections).unwrap_or(merged),
        epilogues: d.given(Key::Epilogues).unwrap_or(generates),
        mix_order_reductions: d.given(Key::MixOrderReductions).unwrap_or(generates),
        fused_products: d.setting(Key::FusedProducts),
        bucket_bytes: d.setting::<Bytes>(Key::BucketBytes).0,
        max_inflight_bytes: d.setting::<Bytes>(Key::MaxInflightBytes).0,
        memory_budget: d.setting(Key::MemoryBudget),
        cuda_graph: d.setting(Key::CudaGraph),
    }
}

fn gate(d: &Document) -> Gate {
    let preset = d.setting(Key::GatePreset);
    let default = Gate::of(preset);
    Gate {
        preset,
        step_time: d.setting(Key::GateStepTime),
        measured_step_time: d.setting(Key::GateMeasuredStepTime),
        allocated: d.given(Key::GateAllocated).unwrap_or(default.allocated),
        reserved: d.given(Key::GateReserved).unwrap_or(default.reserved),
        device: d.given(Key::GateDevice).unwrap_or(default.device),
        max_memory: d.given(Key::GateMaxMemory),
        max_step_ms: d.given(Key::GateMaxStepMs),
        loss: d.setting(Key::GateLoss),
        loss_absolute: d.setting(Key::GateLossAbsolute),
        loss_area: d.setting(Key::GateLossArea),
        final_loss: d.setting(Key::GateFinalLoss),
        grad_norm: d.setting(Key::GateGradNorm),
        seeds: d.setting(Key::GateSeeds),
        program: d.given(Key::GateProgram).unwrap_or(default.program),
    }
}
