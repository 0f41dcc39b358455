//! Model families: modules, parameters and forward graph, with exact shapes, FLOPs and bytes.
//!
//! A family is one file, written like an `nn.Module`: `new` declares modules and parameters,
//! `forward` traces the pass as eager PyTorch would run it (every op, view and copy in issue order,
//! with the strides that decide whether a reshape copies). Its `SPEC` holds its keys and defaults.
//! Everything after that (backward, saved tensors, recompute, fusion, lifetimes) is derived from
//! the graph by `autodiff` and `compile`.

mod activation;
pub(crate) mod build;
mod chunked;
mod classes;
mod cnn;
mod cross_entropy;
pub(crate) mod declare;
mod decoder;
mod defaults;
mod encoder;
pub(crate) mod flops;
mod gpt2;
mod gpt_neox;
mod hf;
mod implementation;
mod linear;
mod llama;
mod loss;
mod moe;
mod rope;
mod scaling;
mod spec;
mod stages;
#[cfg(test)]
pub(crate) mod testing;
mod windows;

pub(crate) use decoder::text_defaults;
pub use decoder::{ClassDefaults, WRAPPERS, class_defaults};
pub use hf::{
    BiasPart, Computed, Field, Fields, Given, HfType, HfWrapper, Meaning, Ties, changes_training,
};
#[cfg(test)]
pub(crate) use loss::mean_square;
pub(crate) use scaling::PLAIN as ROPE_PLAIN;
pub use scaling::{
    FIELDS as ROPE_SCALING_FIELDS, PLACES as ROPE_SCALING_PLACES, SCALED_BY_CLASS, rope_scaling,
};
pub use spec::{Defaults, Dimension, FamilySpec, Inputs, Mask};

use crate::config::{Family, FrozenType, Implementation, Model, Scenario};
use crate::graph::{Graph, ValueId};
use crate::ir::{DeviceMesh, Module, Param, ParameterCount};
use crate::units::Flops;
use build::Builder;
use declare::{Declare, Tree};

/// Specs of all families.
const SPECS: [&FamilySpec; 10] = [
    &llama::SPEC,
    &decoder::spec::SPEC,
    &moe::SPEC,
    &decoder::spec::BERT,
    &decoder::spec::VIT,
    &gpt2::SPEC,
    &gpt_neox::SPEC,
    &encoder::SPEC,
    &linear::SPEC,
    &cnn::SPEC,
];

/// Names of all families in scenario files.
pub(crate) const FAMILY_NAMES: [&str; SPECS.len()] = {
    let mut names = [""; SPECS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = SPECS[i].name;
        i += 1;
    }
    names
};

/// Returns why the plan of this `model_type` may compute something other than the model, if it may:
/// `exec` refuses it.
#[must_use]
pub fn approximation(model_type: &str) -> Option<&'static str> {
    let mut all = decoder::APPROXIMATED.iter();
    all.find(|(of, _)| *of == model_type).map(|(_, what)| *what)
}

/// Returns what a type has that no family has, if it is known but not planned, and the type closest
/// to it, if there is one.
pub(crate) fn not_planned(model_type: &str) -> Option<(&'static str, Option<&'static str>)> {
    let mut all = decoder::NOT_PLANNED.iter();
    let found = all.find(|(of, ..)| *of == model_type);
    found.map(|(_, what, closest)| (*what, *closest))
}

/// Returns `model_type` of a type as files have it.
#[must_use]
pub fn name_in_files(hf: &HfType) -> &'static str {
    let mut all = decoder::VARIANTS.iter();
    let found = all.find(|(_, _, own)| *own == hf.model_type);
    found.map_or(hf.model_type, |(name, ..)| name)
}

/// Returns the type that a `model_type` stands for in a file with these fields.
pub(crate) fn variant(name: &str, has: impl Fn(&str) -> bool) -> &str {
    let mut all = decoder::VARIANTS.iter();
    let found = all.find(|(of, field, _)| *of == name && has(field));
    found.map_or(name, |(_, _, own)| own)
}

/// Returns the type that reads a language model that is a part of others: its own `model_type`
/// (`qwen2_5_vl_text`) may name no type.
pub(crate) fn type_of_part(name: &str) -> &str {
    if hf_types().any(|(_, hf)| hf.model_type == name) {
        return name;
    }
    let mut parts = WRAPPERS.iter().flat_map(|w| w.text);
    let found = parts.find(|(theirs, _)| *theirs == name);
    found.map_or(name, |(_, ours)| ours)
}

/// Returns the Hugging Face types of all families, each with its family.
pub(crate) fn hf_types() -> impl Iterator<Item = (&'static FamilySpec, &'static HfType)> {
    SPECS.iter().flat_map(|s| s.hf.iter().map(|t| (*s, t)))
}

/// Counts a model's parameters.
#[must_use]
pub(crate) fn parameter_count(
    model: &Model,
    params: &[Param],
    mesh: &DeviceMesh,
) -> ParameterCount {
    let mut count = ParameterCount::default();
    for p in params {
        let numel = p.weight_numel(mesh);
        count.total += numel;
        count.active += flops::active(numel, p, model);
        if p.requires_grad {
            count.trainable += numel;
        }
    }
    count
}

impl Family {
    /// Returns all families, with their names in scenario files.
    pub(crate) fn named_all() -> impl Iterator<Item = (&'static str, Self)> {
        SPECS.iter().map(|spec| (spec.name, spec.family))
    }

    /// Returns the spec of the family.
    ///
    /// # Panics
    /// Never: a test finds every family among the specs.
    #[must_use]
    pub fn spec(self) -> &'static FamilySpec {
        let spec = SPECS.iter().find(|spec| spec.family == self);
        spec.expect("every family has a spec")
    }

    /// Returns the family of this name in scenario files.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let spec = SPECS.iter().find(|spec| spec.name == name);
        spec.map(|spec| spec.family)
    }

    /// Returns the name of the family in scenario files.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.spec().name
    }
}

/// The forward pass of a declared model.
pub(crate) trait Forward {
    /// Traces one micro-batch, which ends with a loss.
    fn forward(&self, b: &mut Builder<'_>);
}

/// A declared model.
pub(crate) struct Declared {
    pub(crate) tree: Tree,
    code: Box<dyn Forward>,
}

#[cfg(test)]
impl Declared {
    /// Makes a model that belongs to no family.
    pub(crate) fn of(tree: Tree, code: Box<dyn Forward>) -> Self {
        Self { tree, code }
    }
}

/// Declares a scenario's model with this many blocks.
pub(crate) fn declare(s: &Scenario, layers: u32) -> Declared {
    let spec = s.model.family.spec();
    let mut model = s.model.clone();
    model.layers = layers;
    let mut d = Declare::new(spec.weights, s.lora.clone(), s.device_mesh());
    if s.implementation() == Implementation::Transformers {
        d.keep_originals();
    }
    let code = (spec.declare)(&mut d, &model);
    let mut tree = d.finish();
    if let Some(lora) = &s.lora {
        tree.freeze_base(lora);
    }
    tree.freeze(&s.fsdp.frozen);
    tree.group(&s.train);
    if let Some(format) = s.precision.frozen_params.and_then(FrozenType::packed) {
        tree.quantize(s.precision.compute, s.packed_scales(), format);
    }
    Declared { tree, code }
}

/// The forward graph of one micro-batch.
#[derive(Clone, Debug)]
pub struct ModelGraph {
    /// Modules and parameters.
    pub(crate) tree: Tree,
    /// Forward ops.
    pub graph: Graph,
    /// The loss, a float32 scalar.
    pub loss: ValueId,
    /// What backward differentiates: the loss and what routers add to it.
    pub objective: ValueId,
    /// Value of each parameter.
    pub params: Vec<ValueId>,
    /// Model FLOPs of forward and backward.
    pub model_flops: Flops,
    /// Tokens or samples.
    pub tokens: u64,
}

impl ModelGraph {
    /// Returns the module tree in pre-order.
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        &self.tree.modules
    }

    /// Returns the unique parameters in registration order.
    #[must_use]
    pub fn parameters(&self) -> &[Param] {
        &self.tree.params
    }
}

/// Traces the forward graph of a scenario's model.
#[must_use]
pub fn graph(scenario: &Scenario) -> ModelGraph {
    graph_of(scenario, declare(scenario, scenario.model.layers))
}

/// Traces the forward graph of a declared model.
pub(crate) fn graph_of(scenario: &Scenario, model: Declared) -> ModelGraph {
    let parts = decoder::vision::scenarios(scenario);
    let mut b = Builder::new(scenario, parts.each_ref().map(Option::as_ref), model.tree);
    model.code.forward(&mut b);
    b.finish()
}
