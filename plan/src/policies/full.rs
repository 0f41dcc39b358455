//! `compile.mode = "full"`: collectives are nodes of the compiled graph (SimpleFSDP and Inductor's
//! passes over it).
//!
//! There are no units and no hooks. A parameter is gathered by a functional collective before its
//! first use; a gradient is reduce-scattered after its last contribution. The passes, in the order
//! in which they run here:
//! - bucketing: parameters that are adjacent in order of use are merged up to `bucket_bytes`
//!   (`bucketing.py`);
//! - reordering: gathers start before their use while the bytes in flight stay below
//!   `max_inflight_bytes` and within the memory budget, at least one bucket ahead
//!   (`overlap_scheduling.py`);
//! - wait sinking: computation waits for a gather at its first use, and for a reduction when the
//!   next one has started;
//! - re-inplacing: the input of a gather is the rank's slice of its output, and the output of the
//!   first reduction is the gradient.
//!
//! Bucket copies run on the compute stream, as in the published implementation. All decisions
//! depend on the graph alone, so all ranks issue collectives in the same order.

mod buckets;
mod gather;
mod reduce;
mod spec;

pub(super) use spec::{LOWERING, RULES};

use crate::config::Reshard;
use crate::ir::{Access, BufferId, COMPUTE, EventId, Holds, ParamId, Role, UnitId};
use crate::lower::emitter::{Comms, Emitter};
use crate::lower::optimizer::{Moments, OptimizerItem, ShardState, moments, rule};
use crate::lower::streams::CommStreams;
use crate::lower::unmanaged::{Unmanaged, router_biases};
use crate::lower::walk::{Lifecycle, Location, Pass};
use crate::program::{Phase, Rule};
use crate::shard::Layout;
use buckets::{Bucket, Direction, direction, reductions, window};
use reduce::ReduceBuffers;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// A parameter's own buffers.
#[derive(Clone, Copy, Debug)]
struct ParamState {
    shard: BufferId,
    /// The shard itself if the graph does not gather the parameter.
    full: BufferId,
    grad: BufferId,
    reduced: BufferId,
    moments: Option<Moments>,
    /// Elements of the padded shard, and local elements.
    shard_numel: u64,
    local_numel: u64,
    unit: UnitId,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    buffer: BufferId,
    done: EventId,
    bytes: u64,
}

/// Reductions of a bucket, and the buffers that they need until they finish.
#[derive(Clone, Debug)]
struct Reducing {
    buffers: SmallVec<[BufferId; 3]>,
    /// `None` if they run on the compute stream.
    done: Option<EventId>,
}

pub(crate) struct Full {
    comms: Comms,
    streams: CommStreams,
    params: Vec<ParamState>,
    /// Counts of choices that move the biases of routers, which are buffers.
    choices: Unmanaged,
    /// Gathers of forward, backward and validation.
    directions: [Direction; 3],
    reductions: Vec<Bucket>,
    reduction_of: Vec<Option<u32>>,
    /// Buffers of gather buckets and reduction buckets, allocated on first use.
    gather_buffers: Vec<Vec<Option<BufferId>>>,
    reduce_buffers: Vec<Option<ReduceBuffers>>,
    pass: Pass,
    /// Next bucket to issue in this direction.
    next: usize,
    issued: Vec<Option<InFlight>>,
    full: Vec<bool>,
    grad_live: Vec<bool>,
    /// Number of gradients that each reduction bucket still lacks.
    missing: Vec<usize>,
    reducing: VecDeque<Reducing>,
    uses: usize,
    window: u64,
    in_flight: u64,
    first: bool,
    last: bool,
}

impl Full {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let separate = out.inputs.scenario.fsdp.separate_communicators;
        let sharded = out.inputs.ranks() > 1;
        let streams = CommStreams::new(out, sharded, -1, 0);
        let comms = out.communicators(separate);
        let over_data = router_biases::communicator_of_mesh(out, &comms);
        let params = (0..out.inputs.tape.params.len() as u32)
            .map(|p| param_state(out, ParamId(p)))
            .collect();
        let cap = out.inputs.scenario.compile.bucket_bytes;
        let tape = out.inputs.tape;
        let directions =
            [&tape.forward, &tape.backward, &tape.eval].map(|ops| direction(out.inputs, ops, cap));
        let (reductions, reduction_of) = reductions(out.inputs, cap);
        let window = window(out.inputs);
        Self {
            comms,
            streams,
            params,
            choices: Unmanaged::new(out.inputs, over_data),
            gather_buffers: directions
                .iter()
                .map(|d| vec![None; d.buckets.len()])
                .collect(),
            directions,
            reduce_buffers: vec![None; reductions.len()],
            missing: vec![0; reductions.len()],
            reductions,
            reduction_of,
            pass: Pass::Forward,
            next: 0,
            issued: Vec::new(),
            full: vec![false; out.inputs.tape.params.len()],
            grad_live: vec![false; out.inputs.tape.params.len()],
            reducing: VecDeque::new(),
            uses: 0,
            window,
            in_flight: 0,
            first: true,
            last: true,
        }
    }

    fn direction(&self) -> &Direction {
        &self.directions[self.pass as usize]
    }
}

fn param_state(out: &mut Emitter<'_>, p: ParamId) -> ParamState {
    let (g, i) = out.inputs.home[p.index()];
    let group = out.inputs.group(g).clone();
    let holds = Holds::Param(p);
    let (stored, w) = (out.inputs.types.stored(), out.inputs.graph_type_of(p));
    let (shard_numel, local_numel) = match &group.layout {
        Layout::PerParam(l) => (
            l.items[i as usize].shard_numel,
            l.local_numel(i as usize, 0),
        ),
        Layout::Flat(_) => unreachable!("full mode lays parameters out one by one"),
    };
    let padded = shard_numel * u64::from(out.inputs.inner(g));
    let numel = out.inputs.tape.params[p.index()].numel();
    let kept = match group.ignored {
        true => w,
        false => out.inputs.types.shard(&out.inputs.tape.params[p.index()]),
    };
    let shard = out.persistent(
        Role::MainWeight,
        shard_numel * kept.size(),
        kept,
        group.unit,
        holds,
    );
    let moments = if group.requires_grad {
        moments(
            out,
            (group.unit, rule(out.inputs, g)),
            local_numel,
            holds,
            true,
        )
    } else {
        None
    };
    let mut transient = |role, bytes, dtype| out.full_size(role, bytes, dtype, group.unit, holds);
    ParamState {
        shard,
        full: match group.ignored {
            true => shard,
            false => transient(Role::FullWeight, padded * w.size(), w),
        },
        grad: transient(Role::FullGrad, numel * w.size(), w),
        reduced: transient(Role::MainGrad, shard_numel * stored.size(), stored),
        moments,
        shard_numel,
        local_numel,
        unit: group.unit,
    }
}

impl Lifecycle for Full {
    fn init(&mut self, out: &mut Emitter<'_>) {
        for p in &self.params {
            out.b.at(p.unit, Phase::Init);
            out.b.alloc(Rule::State, p.shard);
        }
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.first = index == 0;
        self.last = last;
    }

    fn forward_start(&mut self, out: &mut Emitter<'_>) {
        let validation = out.b.phase() == Phase::Validation;
        self.start(
            out,
            if validation {
                Pass::Eval
            } else {
                Pass::Forward
            },
        );
    }

    fn pre_forward(&mut self, _out: &mut Emitter<'_>, _unit: UnitId) {}
    fn post_forward(&mut self, _out: &mut Emitter<'_>, _unit: UnitId) {}
    fn pre_recompute(&mut self, _out: &mut Emitter<'_>, _unit: UnitId) {}
    fn pre_backward(&mut self, _out: &mut Emitter<'_>, _unit: UnitId) {}
    fn post_backward(&mut self, _out: &mut Emitter<'_>, _unit: UnitId) {}
    fn between_backwards(&mut self, _out: &mut Emitter<'_>, _unit: UnitId) {}

    fn forward_end(&mut self, _out: &mut Emitter<'_>) {}

    fn backward_start(&mut self, out: &mut Emitter<'_>) {
        for (m, b) in self.missing.iter_mut().zip(&self.reductions) {
            *m = b.params.len();
        }
        self.start(out, Pass::Backward);
    }

    fn after_launch(&mut self, out: &mut Emitter<'_>, pass: Pass, position: u32) {
        let keeps = pass == Pass::Forward
            && out.inputs.scenario.fsdp.reshard_after_forward == Reshard::Never;
        while let Some(&(at, p)) = self.direction().last_uses.get(self.uses) {
            if at > position {
                break;
            }
            self.uses += 1;
            if !keeps && std::mem::replace(&mut self.full[p.index()], false) {
                out.b.free(Rule::Reshard, self.params[p.index()].full);
            }
        }
    }

    fn grad_ready(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if Unmanaged::has(out.inputs, p) {
            return self.choices.accumulate(out, p);
        }
        let Some(b) = self.reduction_of[p.index()] else {
            return;
        };
        self.missing[b as usize] -= 1;
        if self.missing[b as usize] == 0 {
            self.reduce(out, b as usize);
        }
    }

    fn backward_end(&mut self, out: &mut Emitter<'_>) {
        self.release_reductions(out, 0, Rule::FinalFence);
        self.free_all(out);
        if self.last {
            self.choices.add_up_choices(out);
        }
    }

    fn weight(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        self.require(out, p);
        Location {
            buffer: self.params[p.index()].full,
            offset: 0,
            element: out.inputs.graph_type_of(p).size(),
        }
    }

    fn grad(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        if Unmanaged::has(out.inputs, p) {
            return self.choices.location(out, p);
        }
        let buffer = self.params[p.index()].grad;
        if !std::mem::replace(&mut self.grad_live[p.index()], true) {
            out.b.alloc(Rule::Grad, buffer);
        }
        Location {
            buffer,
            offset: 0,
            element: out.inputs.types.compute.size(),
        }
    }

    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<ShardState> {
        let element = out.inputs.types.stored().size();
        let mut states: Vec<ShardState> = Vec::new();
        for (i, p) in self.params.iter().enumerate() {
            let managed = !Unmanaged::has(out.inputs, ParamId(i as u32));
            if !out.inputs.tape.params[i].requires_grad || p.local_numel == 0 || !managed {
                continue;
            }
            let bytes = p.local_numel * element;
            let item = OptimizerItem {
                weight: Access {
                    buffer: p.shard,
                    offset: 0,
                    bytes,
                    per_rank: None,
                },
                grad: Access {
                    buffer: p.reduced,
                    offset: 0,
                    bytes,
                    per_rank: None,
                },
                numel: p.local_numel,
                state: p.moments,
            };
            let divided = out.inputs.tape.params[i].placements.divided();
            let last = states.last_mut();
            match last.filter(|s| (s.unit, s.divided) == (p.unit, divided)) {
                Some(s) => s.items.push(item),
                None => states.push(ShardState {
                    unit: p.unit,
                    rule: out.inputs.scenario.train.optimizer.rule(),
                    divided,
                    items: vec![item],
                    compute: Vec::new(),
                    pieces: None,
                    maxima: None,
                    rows: None,
                }),
            }
        }
        self.choices
            .states_with(out, states, |p| out.b.whole(self.params[p.index()].shard))
    }

    fn step_end(&mut self, out: &mut Emitter<'_>) {
        for (i, p) in self.params.iter().enumerate() {
            let managed = !Unmanaged::has(out.inputs, ParamId(i as u32));
            if out.inputs.tape.params[i].requires_grad && managed {
                out.b.at(p.unit, Phase::Optimizer);
                out.b.free(Rule::ZeroGrad, p.reduced);
            }
        }
        self.choices.free_choices(out);
    }
}

impl Full {
    fn start(&mut self, out: &mut Emitter<'_>, pass: Pass) {
        self.pass = pass;
        self.next = 0;
        self.uses = 0;
        self.in_flight = 0;
        self.issued = vec![None; self.direction().buckets.len()];
        if self.streams.gather != COMPUTE && pass != Pass::Backward {
            out.b.join(Rule::StepStart, COMPUTE, self.streams.gather);
        }
    }

    fn free_all(&mut self, out: &mut Emitter<'_>) {
        for (full, p) in self.full.iter_mut().zip(&self.params) {
            if std::mem::replace(full, false) {
                out.b.free(Rule::Reshard, p.full);
            }
        }
    }
}
