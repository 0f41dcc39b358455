//! Rules for `[train]`.

use super::Checked;
use crate::config::{
    CompileMode, CudaGraph, DocumentLengths, Family, LayerType, LrSchedule, MlpType, Recompute,
    RecomputeLayers, RecomputeModule, Scenario,
};
use crate::ir::MAX_DOCUMENTS;
use crate::models::Inputs;
use crate::names::nearest;
use crate::ops::forward_names;
use crate::scenario::ScenarioErrorKind;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::Value;
use std::collections::BTreeSet;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let (m, t) = (&s.model, &s.train);
    let plain = m.family.spec().attention.is_none();
    if t.seq_len > m.max_seq_len {
        let message = format!(
            "`seq_len` ({}) is longer than `max_seq_len` ({})",
            t.seq_len, m.max_seq_len
        );
        let error = d.conflict(&[Key::SeqLen, Key::MaxSeqLen], message);
        return Err(error.with_help(format!(
            "set model.max_seq_len = {} to give the model more positions",
            t.seq_len
        )));
    }
    if m.family.spec().inputs == Inputs::Images && t.seq_len != 1 {
        return Err(d
            .conflict(
                &[Key::SeqLen],
                "images are not sequences: `seq_len` of a cnn must be 1",
            )
            .with_help("the number of images is `micro_batch`"));
    }
    if t.loss.is_chunked() && m.vocab == 0 {
        let message = format!(
            "a chunked loss needs logits over a vocabulary, which family {} does not have",
            m.family.name()
        );
        return Err(d.conflict(&[Key::Loss], message));
    }
    if t.recompute == Recompute::Selective && plain {
        let message = format!(
            "selective recompute keeps matmuls and recomputes the rest, but a block of family {} has nothing else worth recomputing",
            m.family.name()
        );
        return Err(d
            .conflict(&[Key::Recompute], message)
            .with_help("use \"none\" or \"full\""));
    }
    if t.recompute == Recompute::Pointwise && s.compile.mode == CompileMode::Off {
        let message = "pointwise recompute happens inside fused kernels, but `compile.mode = \"off\"` fuses nothing";
        return Err(d
            .conflict(&[Key::Recompute, Key::Mode], message)
            .with_help("set compile.mode = \"regions\", or train.recompute = \"selective\""));
    }
    saved_operations(d)?;
    recomputed_modules(s, d)?;
    documents(s, d)?;
    let captured = s.compile.cuda_graph != CudaGraph::Off;
    if t.use_reentrant && (s.compile.mode != CompileMode::Off || captured) {
        let message = "reentrant recompute is a function of eager autograd: compilers and CUDA graphs do not contain it";
        return Err(d
            .conflict(&[Key::UseReentrant, Key::Mode, Key::CudaGraph], message)
            .with_help(
                "set train.use_reentrant = false, or compile.mode = \"off\" without cuda_graph",
            ));
    }
    let captured = s.compile.cuda_graph != CudaGraph::Off;
    if t.activation_offload && (s.compile.mode == CompileMode::Full || captured) {
        let message = "activations are offloaded by autograd hooks, which do not run in a step compiled as one graph or in CUDA graphs";
        return Err(d
            .conflict(
                &[Key::ActivationOffload, Key::Mode, Key::CudaGraph],
                message,
            )
            .with_help(
                "set train.activation_offload = false, or another compile.mode without cuda_graph",
            ));
    }
    if let RecomputeLayers::First(n) = t.recompute_layers
        && n > m.layers
    {
        let message = format!(
            "`recompute_layers` is {n}, but the model has {} blocks",
            m.layers
        );
        return Err(d
            .conflict(&[Key::RecomputeLayers, Key::Layers], message)
            .with_help("\"all\" is every block"));
    }
    if t.lr_schedule == LrSchedule::Constant && d.says(Key::MinLr) {
        return Err(d
            .conflict(
                &[Key::MinLr, Key::LrSchedule],
                "`min_lr` is the end of a cosine schedule; a constant schedule never reaches it",
            )
            .with_help("set lr_schedule = \"cosine\""));
    }
    if t.min_lr > t.lr {
        let message = format!(
            "`min_lr` ({}) is above `lr` ({}): the schedule would rise",
            t.min_lr, t.lr
        );
        return Err(d.conflict(&[Key::MinLr, Key::Lr], message));
    }
    if t.betas.iter().any(|b| *b >= 1.0) {
        return Err(d.conflict(&[Key::Betas], "both betas must be below 1"));
    }
    Ok(())
}

/// Refuses a distribution of lengths without a mean, or with a deviation that the documents of a
/// sequence cannot have.
fn length_distribution(s: &Scenario, d: &Document) -> Checked {
    let DocumentLengths::Distributed(lengths) = &s.train.document_lengths else {
        return Ok(());
    };
    let refused = |message: String| d.conflict(&[Key::DocumentLengths], message);
    if lengths.mean == 0 {
        let error = refused("a distribution of lengths needs its mean, in tokens".to_owned());
        return Err(error.with_help("for example: { mean = 1200, std = 900 }"));
    }
    let seq = s.train.seq_len;
    let (count, largest) = (lengths.period(seq), lengths.largest_std(seq).floor());
    if count > 1 && lengths.std > largest {
        let mean = lengths.mean;
        let message = format!(
            "sequences of {seq} tokens hold {count} documents of {mean} on average, whose standard \
             deviation cannot be above {largest}"
        );
        return Err(refused(message).with_help(format!("set std = {largest} or less")));
    }
    Ok(())
}

/// Refuses packed sequences in models whose layers have no form for them.
fn documents(s: &Scenario, d: &Document) -> Checked {
    length_distribution(s, d)?;
    let m = &s.model;
    let of_layers = || (0..m.layers as usize).map(|layer| m.layer_type(layer));
    let recurrent = |kind: &LayerType| match kind {
        LayerType::None => false,
        _ => kind.attends_with_state() || !kind.is_attention(),
    };
    let of_data = matches!(s.train.document_lengths, DocumentLengths::OfData(_));
    if of_data && matches!(s.compile.cuda_graph, CudaGraph::Scopes(_)) {
        let message = "captured scopes replay the addresses of one micro-batch, but each micro-batch has documents of its own";
        let error = d.conflict(&[Key::DocumentLengths, Key::CudaGraph], message);
        return Err(error.with_help(
            "set compile.cuda_graph = \"off\", or the `mean` and `std` of the lengths instead of `data`",
        ));
    }
    let why = if s.train.documents().is_none() && !of_data {
        return Ok(());
    } else if let Some(kind) = of_layers().find(recurrent) {
        format!(
            "layers of type {} keep their state from document to document",
            kind.name()
        )
    } else if m.options.context.vision.is_some() || m.family == Family::Vit {
        "the patches of an image are one sequence".to_owned()
    } else if m.options.positions.relative_buckets > 0
        || m.options.positions.disentangled_rows > 0
        || m.options.context.encoder_layers > 0
    {
        "relative biases and cross attention are not planned with documents".to_owned()
    } else if m.options.attention.output_groups > 0 {
        "compressed keys are not planned with documents".to_owned()
    } else if let Some(chunk) = uneven_chunk(s) {
        format!(
            "chunks of {chunk} positions (`attention_chunk`) cut documents into more than {MAX_DOCUMENTS} lengths that do not repeat"
        )
    } else {
        return Ok(());
    };
    let message = format!("sequences of this model cannot be packed: {why}");
    let error = d.conflict(&[Key::DocumentLengths], message);
    Err(error.with_help("leave out `document_lengths`: a sequence is one document"))
}

/// Returns the positions of a chunk, if no pattern describes how chunks cut documents.
fn uneven_chunk(s: &Scenario) -> Option<u64> {
    let seq = s.train.seq_len;
    let mut chunks = (0..s.model.layers as usize).filter_map(|layer| s.model.chunk(layer, seq));
    chunks.find(|&chunk| s.train.documents().cut(chunk).is_none())
}

/// Refuses parts of blocks that the model does not have, and two keys that both choose the kept
/// results.
fn recomputed_modules(s: &Scenario, d: &Document) -> Checked {
    let listed = d.value(Key::RecomputeModules).and_then(Value::array);
    let listed = listed.unwrap_or_default();
    if listed.is_empty() {
        return Ok(());
    }
    for key in [Key::RecomputeSave, Key::RecomputeNthMatmul] {
        if d.says(key) {
            let message = format!(
                "`recompute_modules` keeps everything but these modules, so `{}` has nothing to choose",
                key.info().key
            );
            return Err(d
                .conflict(&[Key::RecomputeModules, key], message)
                .with_help("leave out one of them"));
        }
    }
    let all = s.model.layers as usize;
    let has_experts = s.model.has_experts();
    let is_dense = !has_experts || (0..all).any(|layer| s.model.mlp_type(layer) != MlpType::Sparse);
    for (value, module) in listed.iter().zip(&s.train.recompute_modules) {
        let (is_there, what) = match module {
            RecomputeModule::CoreAttn | RecomputeModule::LayerNorm => continue,
            RecomputeModule::MlaUpProj => (s.model.options.latent.is_used(), "latent attention"),
            RecomputeModule::Mlp => (is_dense, "dense feed-forward layer"),
            RecomputeModule::Moe | RecomputeModule::MoeAct => (has_experts, "experts"),
            RecomputeModule::SharedExperts => {
                let width = s.model.options.experts.shared_expert_ffn;
                (has_experts && width > 0, "shared expert")
            }
        };
        if !is_there {
            let message = format!("`{}`: the model has no {what}", module.name());
            let error = d.error(value.origin, message);
            return Err(error
                .of(ScenarioErrorKind::NoMatch)
                .with_help("leave it out of recompute_modules"));
        }
    }
    Ok(())
}

/// Refuses names in `recompute_save` that no operation has whose results can be kept.
fn saved_operations(d: &Document) -> Checked {
    let listed = d.value(Key::RecomputeSave).and_then(Value::array);
    for value in listed.unwrap_or_default() {
        let name = value.str().unwrap_or_default();
        let known: BTreeSet<&str> = forward_names().collect();
        if !known.contains(name) {
            let message = format!("`{name}` is not an operation of the forward pass");
            let error = d.error(value.origin, message);
            let known: Vec<&str> = known.into_iter().collect();
            return Err(match nearest(name, known.iter().copied()) {
                Some(near) => error.with_help(format!("did you mean `{near}`?")),
                None => error.with_help(format!("operations: {}", known.join(", "))),
            });
        }
    }
    Ok(())
}
