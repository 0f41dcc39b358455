//! The walk: runs the tape, calls a policy's hooks, and emits the step.

use super::activation_offload::ActivationOffload;
use super::buffers::{TapeBuffers, unit_of_module};
use super::capture::Captures;
use super::emitter::Emitter;
use super::inputs::LoweringInputs;
use super::model_collective::{InFlight, ModelLanes};
use super::optimizer;
use super::uses::Uses;
use super::weight_gradients::{WeightGradients, elements};
use crate::compile::tape::TapeOp;
use crate::config::{CompileMode, CudaGraph, Implementation, Loss};
use crate::ir::{
    Access, BufferId, COMPUTE, DType, GroupId, HostWorkKind, KernelClass, KernelId,
    ModelCollective, ModuleId, ModuleKind, ParamId, Part, ScopeId, SentRows, Source, StorageId,
    StreamId, UnitId,
};
use crate::program::{Phase, Rule, workspace};
use std::collections::BTreeMap;
use std::ops::Range;

/// Where a parameter or gradient is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    pub(crate) buffer: BufferId,
    /// First byte of the parameter's data.
    pub(crate) offset: u64,
    /// Bytes of one element there.
    pub(crate) element: u64,
}

/// A policy: its actions at the hooks of a step.
pub(crate) trait Lifecycle {
    /// Emits persistent state (section `Init`).
    fn init(&mut self, out: &mut Emitter<'_>);
    /// Called before the H2D copies of inputs, to issue work that does not depend on inputs. Not
    /// called inside a captured iteration.
    fn before_inputs(&mut self, _out: &mut Emitter<'_>) {}
    /// Called when a forward pass starts (training micro-batch or validation).
    fn forward_start(&mut self, out: &mut Emitter<'_>);
    fn pre_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId);
    fn post_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId);
    /// Called when the model's outputs are ready. The loss, which is outside the model, follows.
    /// Not called for a chunked loss, which computes the logits itself.
    fn outputs(&mut self, _out: &mut Emitter<'_>) {}
    /// Called in backward when the gradients of the model's outputs are ready, after the loss. Not
    /// called for a chunked loss.
    fn output_gradients(&mut self, _out: &mut Emitter<'_>) {}
    /// Called when the forward pass has ended, after the loss.
    fn forward_end(&mut self, out: &mut Emitter<'_>);
    fn backward_start(&mut self, out: &mut Emitter<'_>);
    fn pre_recompute(&mut self, out: &mut Emitter<'_>, unit: UnitId);
    fn pre_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId);
    fn post_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId);
    /// Called instead of `post_backward` if this backward uses the unit again, because its
    /// gradients are not complete.
    fn between_backwards(&mut self, out: &mut Emitter<'_>, unit: UnitId);
    /// Called in the final callback of a backward pass.
    fn backward_end(&mut self, out: &mut Emitter<'_>);
    /// Returns the location of a parameter's full weight, which the hooks have made available.
    fn weight(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location;
    /// Returns where a GEMM can accumulate a group's gradients of these elements into those of
    /// earlier micro-batches, and records that it does so.
    fn add_gradient(
        &mut self,
        _out: &mut Emitter<'_>,
        _g: GroupId,
        _elements: Range<u64>,
    ) -> Option<Access> {
        None
    }
    /// Returns the location of a parameter's full gradient. Allocates it on first use.
    fn grad(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location;
    /// Returns the reciprocal of the scale of a parameter that ranks gather in 8 bits, or of the
    /// scale of its first block.
    fn scale(&mut self, _out: &mut Emitter<'_>, _p: ParamId) -> Location {
        unreachable!("the scenario refuses 8-bit gathers under other policies")
    }
    /// Returns the codes of a parameter with scales of parts of columns, and the reciprocal of the
    /// first scale.
    fn columns(&mut self, _out: &mut Emitter<'_>, _p: ParamId) -> [Location; 2] {
        unreachable!("the scenario refuses gathers of codes by columns under other policies")
    }
    /// Returns the states for the optimizer, after `backward_end` of the last micro-batch.
    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<optimizer::ShardState>;
    /// Returns the stream of the optimizer and of clipping.
    fn optimizer_stream(&self) -> StreamId {
        COMPUTE
    }
    /// Returns the order in which the states of `optimizer_state` are updated. A norm is summed in
    /// the order of the states themselves.
    fn update_order(&self, _inputs: &LoweringInputs<'_>, states: usize) -> Vec<usize> {
        (0..states).collect()
    }
    /// Returns whether backward has already updated state `index` of `optimizer_state`.
    fn is_updated(&self, _index: usize) -> bool {
        false
    }
    /// Returns whether a captured iteration contains the optimizer, in addition to forward and
    /// backward.
    fn captures_optimizer(&self) -> bool {
        false
    }
    /// Called before the launch for state `index` of `optimizer_state` (or, with `norm`, the launch
    /// for its norm), to make the state available.
    fn before_state(&mut self, _out: &mut Emitter<'_>, _index: usize, _norm: bool) {}
    /// Called after that launch.
    fn after_state(&mut self, _out: &mut Emitter<'_>, _index: usize, _norm: bool) {}
    /// Called after the optimizer, to refresh compute weights and free gradients.
    fn step_end(&mut self, out: &mut Emitter<'_>);
    /// Called after a model kernel has been issued; `position` is its index in the list of the
    /// pass.
    fn after_launch(&mut self, _out: &mut Emitter<'_>, _pass: Pass, _position: u32) {}
    /// Called when a parameter's gradient is complete. A captured scope reports all of its
    /// gradients at its end.
    fn grad_ready(&mut self, _out: &mut Emitter<'_>, _p: ParamId) {}
    /// Called before `forward_start` with the index of the micro-batch, and whether it is the last
    /// one.
    fn micro_batch(&mut self, index: u16, last: bool);
    /// Called before the part of a joint backward that covers one micro-batch, with the index of
    /// the part, and whether it is the last one. See Note [Joint backward].
    fn joint_backward(&mut self, index: u16, last: bool) {
        self.micro_batch(index, last);
    }
}

// Note [Joint backward]
//
// With `train.joint_backward`, all micro-batches of a step run their forwards before one backward
// covers them, from the last to the first. To autograd, this is one backward: the accumulation node
// of a parameter runs once, after all parts have sent it their gradients, which are summed in the
// dtype in which they arrive. So
//
// - hooks of modules run in every part: units are gathered and resharded as in a separate backward;
// - hooks of parameters run in the last part, which alone reduces;
// - the root's final callback runs once. Until then, units whose inputs need no gradients stay as
//   their backward has left them, because nothing runs their post-backward.
//
// Each micro-batch has separate activations.

/// The list of the tape to walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
    Eval,
}

/// What an open scope captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Captured {
    Module(ModuleId),
    /// A part of an MoE layer.
    Stage,
}

/// Walks a tape with the hooks of a policy.
pub(crate) struct Walk<'c, 'a> {
    pub(crate) out: &'c mut Emitter<'a>,
    pub(crate) life: &'c mut dyn Lifecycle,
    pub(crate) buffers: &'c TapeBuffers,
    lanes: &'c ModelLanes,
    in_flight: InFlight,
    offload: Option<ActivationOffload>,
    weight_gradients: WeightGradients,
    units: Vec<UnitId>,
    /// Whether there is host work of a framework (not in the native engine).
    framework: bool,
    /// Whether a compiler compiles any of the model's code.
    compiled: bool,
    captures: Captures<'a>,
    scope: Option<(Captured, ScopeId)>,
    /// Parameters whose gradients became complete in the open scope.
    ready: Vec<ParamId>,
    micro: usize,
    workspaces_made: [bool; 2],
    /// Storages that stay in memory once they are allocated, and whether they have been allocated.
    kept: BTreeMap<StorageId, bool>,
}

impl<'c, 'a> Walk<'c, 'a> {
    pub(crate) fn new(
        out: &'c mut Emitter<'a>,
        life: &'c mut dyn Lifecycle,
        buffers: &'c TapeBuffers,
        lanes: &'c ModelLanes,
    ) -> Self {
        let units = unit_of_module(out.inputs);
        let framework = out.inputs.engine.framework;
        let compiled = is_compiled(out.inputs);
        let weight_gradients = WeightGradients::new(out.inputs);
        let captures = Captures::new(out.inputs.scenario, out.inputs.tape);
        let in_flight = InFlight::new(out.inputs.scenario);
        let kept = out.inputs.kept_transposes().into_iter();
        let kept = kept.map(|storage| (storage, false)).collect();
        Self {
            kept,
            out,
            life,
            buffers,
            lanes,
            in_flight,
            offload: None,
            weight_gradients,
            units,
            framework,
            compiled,
            captures,
            scope: None,
            ready: Vec::new(),
            micro: 0,
            workspaces_made: [false; 2],
        }
    }

    /// Moves saved activations to host memory.
    pub(crate) fn offloading(self, offload: Option<ActivationOffload>) -> Self {
        Self { offload, ..self }
    }

    /// Emits one training step: all micro-batches, clipping, optimizer, refresh.
    pub(crate) fn step(&mut self) {
        let n = self.out.inputs.scenario.train.grad_accum as u16;
        let full_graph = self.out.inputs.scenario.compile.cuda_graph == CudaGraph::FullIteration;
        self.out.b.at(UnitId(0), Phase::Start);
        if self.framework {
            self.out.b.host(Rule::StepStart, HostWorkKind::Step, 1);
        }
        if !full_graph {
            self.life.before_inputs(self.out);
        }
        for m in 0..n {
            self.out.b.micro_batch(m);
            self.inputs(m, true);
        }
        let scope = full_graph.then(|| self.out.b.graph_begin("iteration".to_owned()));
        let joint = self.out.inputs.scenario.train.joint_backward;
        for m in 0..n {
            self.start(m);
            self.life.micro_batch(m, m + 1 == n && !joint);
            for _ in 0..self.out.inputs.scenario.train.no_grad_forwards {
                self.pass(Pass::Eval);
            }
            self.pass(Pass::Forward);
            if !joint {
                self.pass(Pass::Backward);
            }
        }
        if joint {
            // Autograd runs the most recently created nodes first.
            for (index, m) in (0..n).rev().enumerate() {
                self.start(m);
                self.life.joint_backward(index as u16, m == 0);
                self.pass(Pass::Backward);
            }
        }
        let whole = self.life.captures_optimizer();
        if let Some(scope) = scope.filter(|_| !whole) {
            self.out.b.at(UnitId(0), Phase::Final);
            self.out.b.graph_end(scope);
        }
        self.out.b.micro_batch(n - 1);
        optimizer::step(self.out, self.life);
        self.out.b.at(UnitId(0), Phase::Optimizer);
        self.life.step_end(self.out);
        if let Some(scope) = scope.filter(|_| whole) {
            self.out.b.at(UnitId(0), Phase::Final);
            self.out.b.graph_end(scope);
        }
        if self.out.inputs.scenario.train.sync {
            let done = self.out.b.record(Rule::StepEnd, COMPUTE);
            self.out.b.host_wait(Rule::StepEnd, done);
        }
        for m in 0..n {
            self.inputs(m, false);
        }
    }

    /// Starts a micro-batch.
    fn start(&mut self, m: u16) {
        self.out.b.micro_batch(m);
        self.micro = usize::from(m);
    }

    /// Emits a validation forward.
    pub(crate) fn validation(&mut self) {
        self.out.b.micro_batch(0);
        self.out.b.at(UnitId(0), Phase::Validation);
        self.inputs(0, true);
        self.micro = 0;
        self.life.micro_batch(0, true);
        self.pass(Pass::Eval);
        self.out.b.at(UnitId(0), Phase::Validation);
        self.inputs(0, false);
    }

    /// Allocates or frees the inputs of a micro-batch. The loader writes them when they are
    /// allocated, at the start of the step.
    fn inputs(&mut self, m: u16, alloc: bool) {
        for (c, ids) in self.out.inputs.tape.consts.iter().zip(&self.buffers.consts) {
            if c.per_micro_batch {
                let id = ids[usize::from(m)];
                if alloc {
                    self.out.b.alloc(Rule::StepStart, id);
                } else {
                    self.out.b.free(Rule::StepStart, id);
                }
            }
        }
    }

    fn pass(&mut self, pass: Pass) {
        let tape = self.out.inputs.tape;
        let (ops, phase) = match pass {
            Pass::Forward => (tape.forward_of(self.micro), Phase::Forward),
            Pass::Backward => (tape.backward_of(self.micro), Phase::Backward),
            Pass::Eval => (tape.eval.as_slice(), Phase::Validation),
        };
        let entries = self.out.inputs.entries(ops, |h| match pass {
            Pass::Backward => h.last_of,
            _ => h.first_of,
        });
        self.out.uses = Uses::new(self.out.inputs.units.len(), &entries);
        self.out.b.at(UnitId(0), phase);
        match pass {
            Pass::Backward => self.life.backward_start(self.out),
            _ => self.life.forward_start(self.out),
        }
        let mut recompute = 0u32;
        for (position, op) in (0..).zip(ops) {
            match *op {
                TapeOp::Enter(m) => self.enter(pass, m, phase),
                TapeOp::Exit(m) => self.exit(pass, m, phase),
                TapeOp::EnterStage { stage, layer } => {
                    if self.captures.stage(stage) {
                        let name = self.captures.stage_name(stage, layer);
                        self.open_scope(pass, Captured::Stage, &name, phase);
                    }
                }
                TapeOp::ExitStage => self.close_scope(Captured::Stage),
                TapeOp::EnterRecompute(m) => {
                    recompute += 1;
                    self.out.b.at(self.units[m.index()], Phase::Recompute);
                    if let Some(u) = self.out.inputs.hooks[m.index()].first_of {
                        self.life.pre_recompute(self.out, u);
                    }
                }
                TapeOp::ExitRecompute(m) => {
                    recompute -= 1;
                    if recompute == 0 {
                        self.out.b.at(self.units[m.index()], phase);
                    }
                }
                TapeOp::Launch {
                    kernel,
                    reads,
                    writes,
                    end,
                } => {
                    self.require(pass, reads..end);
                    self.launch(kernel, reads, writes, end);
                    self.after_launch(pass, reads..end);
                    self.life.after_launch(self.out, pass, position);
                    self.leave(pass, position);
                }
                TapeOp::Collective {
                    collective,
                    dtype,
                    operands,
                } => {
                    self.require(pass, operands..operands + collective.operands());
                    self.collective(collective, dtype, operands);
                    self.leave(pass, position);
                }
                TapeOp::Alloc(s) => self.alloc(s),
                TapeOp::Free(s) => self.free(s),
                TapeOp::Host { kind, count } => self.host(kind, count),
                TapeOp::HostRead => self.host_read(),
                TapeOp::HostSizes { operand } => self.host_sizes(operand),
                TapeOp::GradReady(p) => self.grad_ready(p),
            }
        }
        self.in_flight.arrive_all(self.out);
        if let Some(offload) = &mut self.offload {
            offload.release(self.out);
        }
        match pass {
            Pass::Backward => {
                self.out.b.at(UnitId(0), Phase::Final);
                self.life.backward_end(self.out);
                if let Some(offload) = &self.offload {
                    offload.exit(self.out);
                }
            }
            _ => {
                self.out.b.at(UnitId(0), phase);
                self.life.forward_end(self.out);
            }
        }
    }

    fn alloc(&mut self, s: StorageId) {
        let id = self.buffers.storage_of(self.micro, s);
        match self.kept.get_mut(&s) {
            None => self.out.b.alloc(Rule::Model, id),
            Some(allocated) => {
                if !std::mem::replace(allocated, true) {
                    self.out.b.first_only(|b| b.alloc(Rule::Model, id));
                }
            }
        }
    }

    fn free(&mut self, s: StorageId) {
        if self.kept.contains_key(&s) {
            return;
        }
        let id = self.buffer_of(s);
        if self.offload.is_none() && self.in_flight.frees_later(id) {
            return;
        }
        self.in_flight.arrive(self.out, |b| b == id);
        let moved = self.offload.as_mut();
        if !moved.is_some_and(|moved| moved.end(self.out, s)) {
            self.out.b.free(Rule::Model, id);
        }
    }

    /// Adds host work of the framework.
    fn host(&mut self, kind: HostWorkKind, count: u16) {
        if self.framework {
            let rule = match kind {
                HostWorkKind::Guard | HostWorkKind::GraphBreak | HostWorkKind::CompiledKernel => {
                    Rule::Compile
                }
                _ => Rule::Model,
            };
            self.out.b.host(rule, kind, count);
        }
    }

    /// Makes the host wait for a value that the framework's code reads.
    fn host_read(&mut self) {
        if self.framework {
            let done = self.out.b.record(Rule::Model, COMPUTE);
            self.out.host_sync(Rule::Model, done);
        }
    }

    /// Makes the host wait for the sizes of a collective.
    fn host_sizes(&mut self, operand: u32) {
        let sizes = self.out.inputs.tape.operands[operand as usize];
        let sizes = self.resolve(&sizes);
        self.in_flight.arrive_for(self.out, &[sizes], &[]);
        let known = self.out.b.record(Rule::Model, COMPUTE);
        self.out.b.host_wait(Rule::Model, known);
    }

    fn grad_ready(&mut self, p: ParamId) {
        // Autograd visits the accumulation node of each parameter, compiled or not.
        if self.framework && self.compiled {
            let (kind, calls) = (HostWorkKind::AutogradDispatch, 2);
            self.out.b.host(Rule::Compile, kind, calls);
        }
        if self.scope.is_some() {
            self.ready.push(p);
        } else {
            self.life.grad_ready(self.out, p);
        }
    }

    /// Returns the scratch memory that torch's caching allocator provides to attention (cuDNN or
    /// flash) during a backward.
    fn scratch(&mut self, kernel: KernelId) -> Option<BufferId> {
        let (scenario, engine) = (self.out.inputs.scenario, self.out.inputs.engine);
        if !engine.allocates_workspaces(&scenario.mesh.hardware) {
            return None;
        }
        let k = &self.out.b.program().kernels[kernel.index()];
        let deterministic = scenario.precision.deterministic;
        let bytes = match k.class {
            KernelClass::Attention { .. } => workspace::kernel_bytes(k, deterministic),
            _ => 0,
        };
        if bytes == 0 {
            return None;
        }
        Some(self.out.scratch("attention workspace", bytes))
    }

    /// Allocates the library workspace of a thread. It is allocated with the thread's first GEMM,
    /// after the result of that GEMM, and is never freed.
    fn workspace(&mut self, kernel: KernelId) {
        let gemm = matches!(
            self.out.b.program().kernels[kernel.index()].class,
            KernelClass::Gemm { .. }
        );
        // Validation comes after the first step, which has allocated the workspace.
        let thread = match self.out.b.phase() {
            Phase::Forward => 0,
            Phase::Validation => return,
            _ => 1,
        };
        if gemm
            && let Some(&id) = self.buffers.workspaces.get(thread)
            && !std::mem::replace(&mut self.workspaces_made[thread], true)
        {
            self.out.b.first_only(|b| b.alloc(Rule::State, id));
        }
    }

    fn enter(&mut self, pass: Pass, m: ModuleId, phase: Phase) {
        self.out.b.at(self.units[m.index()], phase);
        // transformers computes the loss before the model's forward returns.
        let returned = self.out.inputs.scenario.implementation() != Implementation::Transformers;
        if pass != Pass::Backward && returned && self.is_apart(m) {
            self.life.outputs(self.out);
        }
        let hooks = self.out.inputs.hooks[m.index()];
        let unit = if pass == Pass::Backward {
            hooks.last_of
        } else {
            hooks.first_of
        };
        if let Some(u) = unit.filter(|u| self.out.inputs.is_managed(*u)) {
            self.graph_break();
            self.out.uses.begin(u);
            if pass == Pass::Backward {
                self.life.pre_backward(self.out, u);
            } else {
                self.life.pre_forward(self.out, u);
            }
            self.out.b.at(self.units[m.index()], phase);
        }
        if self.captures.module(m) {
            let path = &self.out.inputs.tape.modules[m.index()].path;
            self.open_scope(pass, Captured::Module(m), path, phase);
        }
    }

    /// Starts a scope, unless an open one contains it.
    fn open_scope(&mut self, pass: Pass, of: Captured, name: &str, phase: Phase) {
        if pass == Pass::Eval || self.scope.is_some() {
            return;
        }
        self.in_flight.arrive_all(self.out);
        let name = format!("{name} {}", phase.name());
        self.scope = Some((of, self.out.b.graph_begin(name)));
    }

    /// Ends the open scope if it is this one.
    fn close_scope(&mut self, of: Captured) {
        let Some((_, scope)) = self.scope.take_if(|(open, _)| *open == of) else {
            return;
        };
        self.in_flight.arrive_all(self.out);
        self.out.b.graph_end(scope);
        for p in std::mem::take(&mut self.ready) {
            self.life.grad_ready(self.out, p);
        }
    }

    fn exit(&mut self, pass: Pass, m: ModuleId, phase: Phase) {
        self.close_scope(Captured::Module(m));
        let hooks = self.out.inputs.hooks[m.index()];
        let unit = if pass == Pass::Backward {
            hooks.first_of
        } else {
            hooks.last_of
        };
        if let Some(u) = unit.filter(|u| self.out.inputs.is_managed(*u)) {
            self.out.b.at(u, phase);
            self.graph_break();
            if pass == Pass::Backward && self.out.uses.come_again(u) {
                self.life.between_backwards(self.out, u);
            } else if pass == Pass::Backward {
                self.life.post_backward(self.out, u);
            } else {
                self.life.post_forward(self.out, u);
            }
        }
        if pass == Pass::Backward && self.is_apart(m) {
            self.life.output_gradients(self.out);
        }
        let parent = self.out.inputs.tape.modules[m.index()]
            .parent
            .unwrap_or(ModuleId(0));
        self.out.b.at(self.units[parent.index()], phase);
    }

    /// Returns whether a module is a loss on the outputs of the model.
    fn is_apart(&self, m: ModuleId) -> bool {
        self.out.inputs.module_kind(m) == ModuleKind::Loss
            && self.out.inputs.scenario.train.loss == Loss::Materialized
    }

    /// Emits a graph break. With `regions`, every hook is opaque to the compiler, so compiled code
    /// ends before it and starts again after it.
    fn graph_break(&mut self) {
        let regions = self.out.inputs.scenario.compile.mode == CompileMode::Regions;
        if self.framework && self.compiled && regions {
            self.out.b.host(Rule::Compile, HostWorkKind::GraphBreak, 1);
        }
    }

    fn launch(&mut self, kernel: crate::ir::KernelId, reads: u32, writes: u32, end: u32) {
        let operands = &self.out.inputs.tape.operands;
        let mut split = (writes - reads) as usize;
        let sum = self.sum_of(writes);
        // Gradients are allocated on first use, so they are resolved before the launch is emitted.
        let own = if sum.is_some() { writes } else { end };
        let mut resolved: smallvec::SmallVec<[Access; 12]> = operands[reads as usize..own as usize]
            .iter()
            .map(|o| self.resolve(o))
            .collect();
        let mut kernel = kernel;
        if let Some(sum) = sum {
            resolved.extend([sum, sum]);
            let of = self.out.b.program().kernels[kernel.index()].clone();
            let b = &mut self.out.b;
            let make = |adding| b.kernel(adding);
            kernel = self.weight_gradients.adding(kernel, &of, split, make);
            split += 1;
        }
        let (reads, writes) = resolved.split_at(split);
        self.in_flight.arrive_for(self.out, reads, writes);
        self.workspace(kernel);
        let scratch = self.scratch(kernel);
        if let Some(id) = scratch {
            self.out.b.alloc(Rule::Model, id);
        }
        self.out.b.launch(
            Rule::Model,
            kernel,
            COMPUTE,
            resolved[..split].iter().copied(),
            resolved[split..].iter().copied(),
        );
        if let Some(id) = scratch {
            self.out.b.free(Rule::Model, id);
        }
    }

    /// Returns the sum of earlier micro-batches into which a launch accumulates a weight gradient,
    /// if any.
    fn sum_of(&mut self, writes: u32) -> Option<Access> {
        if self.out.b.phase() == Phase::Validation || !self.weight_gradients.may_add(writes) {
            return None;
        }
        let operand = self.out.inputs.tape.operands[writes as usize];
        let (g, range) = elements(self.out.inputs, &operand)?;
        self.life.add_gradient(self.out, g, range)
    }

    /// Makes offloaded activations available to an op of backward.
    fn require(&mut self, pass: Pass, operands: std::ops::Range<u32>) {
        if let (Some(offload), Pass::Backward) = (&mut self.offload, pass) {
            let operands = operands.start as usize..operands.end as usize;
            offload.require(self.out, &self.out.inputs.tape.operands[operands]);
        }
    }

    /// Offloads the activations that forward has used for the last time.
    fn leave(&mut self, pass: Pass, position: u32) {
        let (Some(offload), Pass::Forward) = (&mut self.offload, pass) else {
            return;
        };
        offload.count(position);
        for p in offload.weights_after(position) {
            let weight = self.life.weight(self.out, p);
            offload.leave_weight(self.out, p, (weight.buffer, weight.offset));
        }
        for s in offload.leave_after(position) {
            let id = self.buffers.storage_of(self.micro, s);
            self.in_flight.arrive(self.out, |b| b == id);
            offload.leave(self.out, s);
        }
    }

    /// Frees what only an op of backward has needed from host memory.
    fn after_launch(&mut self, pass: Pass, operands: std::ops::Range<u32>) {
        if let (Some(offload), Pass::Backward) = (&mut self.offload, pass) {
            let operands = operands.start as usize..operands.end as usize;
            offload.after(self.out, &self.out.inputs.tape.operands[operands]);
        }
    }

    /// Returns the current buffer of a storage.
    fn buffer_of(&self, s: StorageId) -> BufferId {
        let moved = self.offload.as_ref().and_then(|o| o.buffer(s));
        moved.unwrap_or_else(|| self.buffers.storage_of(self.micro, s))
    }

    fn collective(&mut self, collective: ModelCollective, dtype: DType, operands: u32) {
        let tape = self.out.inputs.tape;
        let [input, output] = [operands, operands + 1].map(|o| tape.operands[o as usize]);
        let part = Part {
            input: self.resolve(&input),
            output: self.resolve(&output),
        };
        let end = operands + collective.operands() - 1;
        let sent = collective.rows.map(|of| SentRows {
            by: Part {
                input: self.resolve(&tape.operands[operands as usize + 2]),
                output: self.resolve(&tape.operands[end as usize]),
            },
            of,
        });
        let what = (collective, dtype);
        self.in_flight
            .issue(self.out, self.lanes, what, (part, sent));
    }

    fn resolve(&mut self, o: &crate::ir::Operand) -> Access {
        let at = |l: Location, size: u64| Access {
            buffer: l.buffer,
            offset: l.offset + o.offset / size * l.element,
            bytes: o.bytes / size * l.element,
            per_rank: None,
        };
        match o.source {
            Source::Storage(s) => Access {
                buffer: self.buffer_of(s),
                offset: o.offset,
                bytes: o.bytes,
                per_rank: None,
            },
            Source::Const(c) => {
                let ids = &self.buffers.consts[c.index()];
                let buffer = ids[self.micro.min(ids.len() - 1)];
                Access {
                    buffer,
                    offset: o.offset,
                    bytes: o.bytes,
                    per_rank: None,
                }
            }
            Source::Param(p) => {
                let size = self.out.inputs.gathered_type_of(p).size();
                let copy = self.offload.as_ref().and_then(|o| o.weight(p));
                let location = match copy {
                    Some(buffer) => Location {
                        buffer,
                        offset: 0,
                        element: size,
                    },
                    None => self.life.weight(self.out, p),
                };
                at(location, size)
            }
            Source::Scale(p) => {
                let location = self.life.scale(self.out, p);
                at(location, location.element)
            }
            Source::ColumnCodes(p) => at(self.life.columns(self.out, p)[0], 1),
            Source::ColumnScale(p) => at(self.life.columns(self.out, p)[1], 1),
            Source::Grad(p) => {
                let size = self.out.inputs.graph_type_of(p).size();
                at(self.life.grad(self.out, p), size)
            }
        }
    }
}

/// Returns whether a compiler compiles any of the model's code. It does not in mode `regions` if
/// Dynamo skips all frames; skipped code runs eagerly.
fn is_compiled(inputs: &LoweringInputs<'_>) -> bool {
    let guard = |op: &TapeOp| {
        let kind = HostWorkKind::Guard;
        matches!(op, TapeOp::Host { kind: k, .. } if *k == kind)
    };
    match inputs.scenario.compile.mode {
        CompileMode::Off => false,
        CompileMode::Regions => inputs.tape.forward.iter().any(guard),
        CompileMode::Blocks | CompileMode::Full => true,
    }
}
