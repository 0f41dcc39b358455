//! From the merged document to typed values, with the derived defaults.

use super::error::ScenarioError;
use super::keys::{HARDWARE, Key};
use super::merge::Document;
use super::placements::strategies;
use super::presets::{self, Filled};
use super::validate;
use super::value::Value;
use crate::config::pattern::unit_pattern;
use crate::config::*;
use crate::ir::DType;
use crate::models::Inputs;
use crate::names::nearest;
use crate::policies;
use crate::units::Bytes;
use std::path::Path;

/// The scenario that a document says, checked.
pub(crate) fn scenario(mut document: Document) -> Result<Scenario, ScenarioError> {
    let preset = presets::fill(&mut document)?;
    let d = &document;
    let (model, train) = model_and_train(d, preset)?;
    let mesh = mesh(d)?;
    let scenario = Scenario {
        name: d.name.clone(),
        about: d.about.clone(),
        model,
        train,
        fsdp: fsdp(d, &mesh)?,
        mesh,
        precision: precision(d),
        compile: compile(d),
        gate: gate(d),
    };
    validate::check(&scenario, d)?;
    Ok(scenario)
}

/// The forms are checked when a document takes a value in; a getter returns `None` for an absent
/// key.
impl Document {
    fn integer(&self, key: Key) -> Option<u64> {
        self.value(key).and_then(Value::integer)
    }

    /// For keys whose table entry limits them to 32 bits.
    fn small(&self, key: Key) -> Option<u32> {
        self.integer(key).and_then(|n| u32::try_from(n).ok())
    }

    fn number(&self, key: Key) -> Option<f64> {
        self.value(key).and_then(Value::number)
    }

    fn flag(&self, key: Key) -> Option<bool> {
        match self.value(key)?.datum {
            super::value::Datum::Bool(b) => Some(b),
            _ => None,
        }
    }

    fn word(&self, key: Key) -> Option<&str> {
        self.value(key).and_then(Value::str)
    }

    pub(crate) fn pick<T: Copy>(&self, key: Key, names: &[(&str, T)]) -> Option<T> {
        let word = self.word(key)?;
        names.iter().find(|(n, _)| *n == word).map(|(_, t)| *t)
    }

    fn required(&self, key: Key, family: Family) -> Result<u64, ScenarioError> {
        self.integer(key).ok_or_else(|| {
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

/// Rows of a chunk of the loss by default.
pub(crate) const LOSS_CHUNK_ROWS: u64 = 4096;
/// Defaults of compile mode full.
pub(crate) const BUCKET_BYTES: u64 = 100 << 20;
pub(crate) const MAX_INFLIGHT_BYTES: u64 = 5_000_000_000;
pub(crate) const MEMORY_BUDGET: f64 = 0.05;

fn model_and_train(d: &Document, preset: Option<Filled>) -> Result<(Model, Train), ScenarioError> {
    let families: Vec<_> = Family::named_all().collect();
    let Some(family) = d.pick(Key::Family, &families) else {
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
    let head_dim = match d.integer(Key::HeadDim) {
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
    let proportion = preset.as_ref().and_then(|p| p.ffn_to_hidden);
    let ffn = match d.integer(Key::Ffn) {
        // Another width of the model: the preset's proportion, rounded as the default is.
        Some(_) if let Some((ffn, of)) = proportion.filter(|(_, of)| *of != hidden) => (ffn
            * hidden)
            .div_ceil(of)
            .next_multiple_of(spec.defaults.ffn_multiple),
        Some(n) => n,
        None => (spec.defaults.ffn)(hidden),
    };
    let asked = d.integer(Key::SeqLen);
    let given = d.integer(Key::MaxSeqLen);
    let max_seq_len = given.or_else(|| (spec.defaults.max_seq_len)(asked));
    let seq_len = asked.unwrap_or_else(|| (spec.defaults.seq_len)(max_seq_len));
    let image = |key, default| {
        if images {
            d.integer(key).unwrap_or(default)
        } else {
            0
        }
    };

    let model = Model {
        preset: preset.map(|p| p.name),
        family,
        layers: d.required(Key::Layers, family)? as u32, // at most 4096
        hidden,
        heads,
        kv_heads: d.integer(Key::KvHeads).unwrap_or(heads),
        head_dim,
        ffn,
        vocab: if spec.inputs == Inputs::Tokens {
            d.required(Key::Vocab, family)?
        } else {
            0
        },
        tie_embeddings: d
            .flag(Key::TieEmbeddings)
            .unwrap_or(spec.defaults.tie_embeddings),
        norm_eps: d.number(Key::NormEps).unwrap_or(1e-5),
        rope_theta: d.number(Key::RopeTheta).unwrap_or(10_000.0),
        max_seq_len: max_seq_len.unwrap_or(seq_len),
        channels,
        height: image(Key::Height, 64),
        width: image(Key::Width, 64),
        kernel: image(Key::Kernel, 3),
        bias: match (d.flag(Key::Bias), d.word(Key::Bias)) {
            (Some(all), _) => Bias::from(all),
            (None, Some(_)) => Bias::Qkv,
            (None, None) => spec.defaults.bias,
        },
        qk_norm: d.flag(Key::QkNorm).unwrap_or(false),
    };
    Ok((model, train(d, seq_len)))
}

fn train(d: &Document, seq_len: u64) -> Train {
    let betas = d.value(Key::Betas).and_then(Value::array);
    let beta = |i: usize| betas.and_then(|b| b.get(i)).and_then(Value::number);
    Train {
        seq_len,
        micro_batch: d.integer(Key::MicroBatch).unwrap_or(1),
        grad_accum: d.small(Key::GradAccum).unwrap_or(1),
        recompute: d
            .pick(
                Key::Recompute,
                &[
                    ("full", Recompute::Full),
                    ("selective", Recompute::Selective),
                    ("pointwise", Recompute::Pointwise),
                ],
            )
            .unwrap_or(Recompute::None),
        recompute_layers: match (
            d.small(Key::RecomputeLayers),
            strings(d.value(Key::RecomputeLayers)),
        ) {
            (Some(n), _) => RecomputeLayers::First(n),
            (None, globs) if !globs.is_empty() => RecomputeLayers::Patterns(globs),
            _ => RecomputeLayers::All,
        },
        loss: d
            .pick(Key::Loss, &[("chunked", Loss::Chunked)])
            .unwrap_or(Loss::Materialized),
        loss_chunk_rows: d.integer(Key::LossChunkRows).unwrap_or(LOSS_CHUNK_ROWS),
        optimizer: d
            .pick(Key::Optimizer, &[("sgd", Optimizer::Sgd)])
            .unwrap_or(Optimizer::Adamw),
        lr: d.number(Key::Lr).unwrap_or(3e-4),
        warmup_steps: d.small(Key::WarmupSteps).unwrap_or(0),
        lr_schedule: d
            .pick(Key::LrSchedule, &[("cosine", LrSchedule::Cosine)])
            .unwrap_or(LrSchedule::Constant),
        min_lr: d.number(Key::MinLr).unwrap_or(0.0),
        betas: [beta(0).unwrap_or(0.9), beta(1).unwrap_or(0.95)],
        eps: d.number(Key::Eps).unwrap_or(1e-8),
        weight_decay: d.number(Key::WeightDecay).unwrap_or(0.1),
        clip_norm: d.number(Key::ClipNorm).unwrap_or(0.0),
        sync: d.flag(Key::Sync).unwrap_or(false),
        grad_norm: d.flag(Key::GradNorm).unwrap_or(false),
        steps: d.small(Key::Steps).unwrap_or(20),
        validate_every: d.small(Key::ValidateEvery).unwrap_or(0),
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
    let Some(dp_shard) = d.small(Key::DpShard) else {
        return Err(absent(
            Key::DpShard,
            "set the number of ranks that share one copy of the parameters, for example dp_shard = 4",
        ));
    };
    let dp_outer = d.small(Key::DpOuter).unwrap_or(1);
    let tp = d.small(Key::Tp).unwrap_or(1);
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
    let gpus_per_node = d.small(Key::GpusPerNode).unwrap_or(world.min(8) as u32);
    Ok(Mesh {
        hardware,
        dp_shard,
        dp_outer,
        tp,
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

fn fsdp(d: &Document, mesh: &Mesh) -> Result<Fsdp, ScenarioError> {
    let spec = policies::named(d.word(Key::Policy));
    let (policy, defaults) = (spec.kind, &spec.defaults);
    let (strategy, outer_strategy) = strategies(d, mesh)?;
    let ahead = |key| match d.value(key) {
        None => defaults.prefetch,
        Some(value) => match (value.integer(), value.table()) {
            (Some(n), _) => Prefetch::Depth(u32::try_from(n).unwrap_or(u32::MAX)),
            (_, Some(t)) => {
                Prefetch::Elements(t.first().and_then(|e| e.value.integer()).unwrap_or(1))
            }
            _ => Prefetch::Implicit,
        },
    };
    Ok(Fsdp {
        policy,
        strategy,
        outer_strategy,
        units: units(d)?,
        reshard_after_forward: match (
            d.flag(Key::Reshard),
            d.small(Key::Reshard),
            d.word(Key::Reshard),
        ) {
            (Some(true), ..) => Reshard::Always,
            (Some(false), ..) => Reshard::Never,
            (_, Some(n), _) => Reshard::Group(n),
            (_, _, Some(_)) => Reshard::Auto,
            _ => (defaults.reshard)(strategy),
        },
        reshard_root: d.flag(Key::ReshardRoot).unwrap_or(false),
        reshard_after_backward: d.flag(Key::ReshardAfterBackward).unwrap_or(true),
        gradient_sync: d
            .pick(
                Key::GradientSync,
                &[
                    ("every", GradientSync::Every),
                    ("outer_last", GradientSync::OuterLast),
                    ("last", GradientSync::Last),
                ],
            )
            .unwrap_or(defaults.gradient_sync),
        prefetch_forward: ahead(Key::PrefetchForward),
        prefetch_backward: ahead(Key::PrefetchBackward),
        prefetch_next_step: d.small(Key::PrefetchNextStep).unwrap_or(0),
        optimizer_in_backward: d.flag(Key::OptimizerInBackward).unwrap_or(false),
        reduce_in_flight: d
            .small(Key::ReduceInFlight)
            .unwrap_or(defaults.reduce_in_flight),
        async_reduce: d.flag(Key::AsyncReduce).unwrap_or(true),
        separate_communicators: d
            .flag(Key::SeparateCommunicators)
            .unwrap_or(defaults.separate_communicators),
        copy_engine_gather: d.flag(Key::CopyEngineGather).unwrap_or(false),
        copy_engine_reduce: d.flag(Key::CopyEngineReduce).unwrap_or(false),
        sum_in_optimizer: d.flag(Key::SumInOptimizer).unwrap_or(false),
        unify_comm_stream: d.flag(Key::UnifyCommStream).unwrap_or(false),
        allocator: d
            .pick(
                Key::Allocator,
                &[
                    ("caching", AllocatorKind::Caching),
                    ("pool", AllocatorKind::Pool),
                    ("double_buffer", AllocatorKind::DoubleBuffer),
                    ("temporary", AllocatorKind::Temporary),
                ],
            )
            .unwrap_or(defaults.allocator),
        expandable_segments: d.flag(Key::ExpandableSegments).unwrap_or(true),
        cublas_workspace_bytes: if spec.engine.allocates_workspaces(&mesh.hardware) {
            let said = d.value(Key::CublasWorkspaceBytes).and_then(Value::bytes);
            said.unwrap_or_else(|| cublas_workspace_default(&mesh.hardware))
        } else {
            0
        },
        persist_on_alloc_fail: d.flag(Key::PersistOnAllocFail).unwrap_or(false),
        average_in_collective: d.flag(Key::AverageInCollective).unwrap_or(false),
        per_token_loss: d.flag(Key::PerTokenLoss).unwrap_or(false),
        nan_check: d.flag(Key::NanCheck).unwrap_or(false),
        offload: {
            let names = strings(d.value(Key::Offload));
            let has = |name: &str| names.iter().any(|n| n == name);
            Offload {
                params: has("params"),
                grads: has("grads"),
                optimizer: has("optimizer"),
            }
        },
        frozen: strings(d.value(Key::Frozen)),
    })
}

fn strings(value: Option<&Value>) -> Vec<String> {
    let values = value.and_then(Value::array).unwrap_or_default();
    values
        .iter()
        .filter_map(Value::str)
        .map(str::to_owned)
        .collect()
}

fn units(d: &Document) -> Result<Units, ScenarioError> {
    match d.value(Key::Units) {
        Some(value) => match value.array() {
            Some(list) => Ok(Units::Patterns(
                list.iter()
                    .map(|v| {
                        unit_pattern(v.str().unwrap_or_default()).map_err(|m| d.error(v.origin, m))
                    })
                    .collect::<Result<_, _>>()?,
            )),
            None if value.str() == Some("root") => Ok(Units::Root),
            None => Ok(Units::Block),
        },
        None => Ok(Units::Block),
    }
}

fn dtype(name: &str) -> Option<DType> {
    match name {
        "f32" => Some(DType::F32),
        "bf16" => Some(DType::Bf16),
        "f16" => Some(DType::F16),
        _ => None,
    }
}

fn precision(d: &Document) -> Precision {
    let of = |key| d.word(key).and_then(dtype);
    let defaults = &policies::named(d.word(Key::Policy)).defaults;
    let compute = of(Key::Compute).unwrap_or(DType::Bf16);
    let main_grads = of(Key::MainGrads).unwrap_or_else(|| (defaults.main_grads)(compute));
    Precision {
        compute,
        main_params: match d.word(Key::MainParams) {
            Some(name) => dtype(name),
            None => Some(DType::F32),
        },
        main_grads,
        comm_grads: of(Key::CommGrads).unwrap_or_else(|| (defaults.comm_grads)(main_grads)),
        moments: of(Key::Moments).unwrap_or(DType::F32),
        deterministic: d.flag(Key::Deterministic).unwrap_or(false),
    }
}

fn compile(d: &Document) -> Compile {
    let scope = |name: &str| match name {
        "attn" => Scope::Attn,
        "mlp" => Scope::Mlp,
        _ => Scope::Block,
    };
    let bytes = |key| d.value(key).and_then(Value::bytes);
    let mode = d
        .pick(
            Key::Mode,
            &[
                ("regions", CompileMode::Regions),
                ("blocks", CompileMode::Blocks),
                ("full", CompileMode::Full),
            ],
        )
        .unwrap_or(CompileMode::Off);
    let policy = policies::named(d.word(Key::Policy));
    let optimizes = policy.defaults.optimizes_code;
    // Compile mode full gathers each parameter into a separate buffer.
    let merges = optimizes && matches!(mode, CompileMode::Regions | CompileMode::Blocks);
    let generates = optimizes && mode != CompileMode::Off;
    Compile {
        mode,
        merge_projections: match d.word(Key::MergeProjections) {
            Some("gradients") => MergeProjections::Gradients,
            Some("qkv") => MergeProjections::Qkv,
            Some("all") => MergeProjections::All,
            None if merges => MergeProjections::Qkv,
            _ => MergeProjections::None,
        },
        epilogues: d.flag(Key::Epilogues).unwrap_or(generates),
        mix_order_reductions: d.flag(Key::MixOrderReductions).unwrap_or(generates),
        fused_products: d.flag(Key::FusedProducts).unwrap_or(false),
        bucket_bytes: bytes(Key::BucketBytes).unwrap_or(BUCKET_BYTES),
        max_inflight_bytes: bytes(Key::MaxInflightBytes).unwrap_or(MAX_INFLIGHT_BYTES),
        memory_budget: d.number(Key::MemoryBudget).unwrap_or(MEMORY_BUDGET),
        cuda_graph: match d.value(Key::CudaGraph) {
            Some(value) => match value.array() {
                Some(list) => {
                    CudaGraph::Scopes(list.iter().filter_map(Value::str).map(scope).collect())
                }
                None if value.str() == Some("full_iteration") => CudaGraph::FullIteration,
                None => CudaGraph::Off,
            },
            None => CudaGraph::Off,
        },
    }
}

fn gate(d: &Document) -> Gate {
    let preset = match d.word(Key::GatePreset) {
        Some("strict") => GatePreset::Strict,
        Some("budget") => GatePreset::Budget,
        _ => GatePreset::default(),
    };
    let default = Gate::of(preset);
    Gate {
        preset,
        step_time: d.number(Key::GateStepTime).unwrap_or(default.step_time),
        measured_step_time: d
            .number(Key::GateMeasuredStepTime)
            .unwrap_or(default.measured_step_time),
        allocated: d.number(Key::GateAllocated).unwrap_or(default.allocated),
        reserved: d.number(Key::GateReserved).unwrap_or(default.reserved),
        device: d.number(Key::GateDevice).unwrap_or(default.device),
        max_memory: d
            .value(Key::GateMaxMemory)
            .and_then(Value::bytes)
            .map(Bytes),
        max_step_ms: d.number(Key::GateMaxStepMs),
        loss: d.number(Key::GateLoss).unwrap_or(default.loss),
        loss_absolute: d
            .number(Key::GateLossAbsolute)
            .unwrap_or(default.loss_absolute),
        loss_area: d.number(Key::GateLossArea).unwrap_or(default.loss_area),
        final_loss: d.number(Key::GateFinalLoss).unwrap_or(default.final_loss),
        grad_norm: d.number(Key::GateGradNorm).unwrap_or(default.grad_norm),
        seeds: d.small(Key::GateSeeds).unwrap_or(default.seeds),
        program: match d.word(Key::GateProgram) {
            Some("exact") => GateProgram::Exact,
            Some("counts") => GateProgram::Counts,
            Some("off") => GateProgram::Off,
            _ => default.program,
        },
    }
}
