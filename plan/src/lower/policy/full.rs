//! `compile.mode = "full"`: collectives are nodes of the compiled graph (SimpleFSDP and Inductor's passes over it).
//!
//! There are no units and no hooks: every parameter's gather is a functional collective before its first use, every
//! gradient's reduce-scatter one after its last contribution. The passes, in the order they run here:
//! - bucketing: neighbours in use order are merged up to `bucket_bytes` (`bucketing.py`);
//! - reordering: gathers start ahead of their use while the bytes in flight stay under `max_inflight_bytes` and under the
//!   memory that the budget allows, at least one bucket ahead (`overlap_scheduling.py`);
//! - wait sinking: computation waits for a gather at its first use, for a reduction when the next one has started;
//! - re-inplacing: a gather's input is the rank's slice of its output, the first reduction's output is the gradient.
//!
//! Bucket copies run on the compute stream, as in the published implementation. All decisions depend on the graph alone,
//! so every rank issues the same order.

use crate::compile::tape::{ParamId, Source, TapeOp};
use crate::lower::builder::NewBuffer;
use crate::lower::context::{Comms, Cx};
use crate::lower::optimizer::{Moments, OptimizerItem, ShardState, moments};
use crate::lower::walk::{Lifecycle, Location, Pass};
use crate::program::{
    Access, BufferId, COMPUTE, CollectiveKind, EventId, Holds, Part, PerRank, Phase, ReduceOp,
    Role, Rule, ShardOp, StreamId, StreamKind, UnitId,
};
use crate::scenario::Reshard;
use crate::shard::Layout;
use crate::units::DType;
use smallvec::smallvec;
use std::collections::VecDeque;

/// Parameters gathered, or gradients reduced, by one collective.
#[derive(Clone, Debug, Default)]
struct Bucket {
    params: Vec<ParamId>,
    /// Full bytes in the compute dtype.
    bytes: u64,
}

/// Gathers of one direction: buckets in order of first use, and what each position of the tape ends.
#[derive(Clone, Debug, Default)]
struct Direction {
    buckets: Vec<Bucket>,
    /// Bucket of each parameter.
    of: Vec<Option<u32>>,
    /// Parameters whose last use is the launch at this position of the tape, ascending by position.
    last_uses: Vec<(u32, ParamId)>,
}

/// A parameter's own buffers.
#[derive(Clone, Copy, Debug)]
struct ParamState {
    shard: BufferId,
    full: BufferId,
    grad: BufferId,
    reduced: BufferId,
    moments: Option<Moments>,
    /// Padded shard and local elements.
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

pub(crate) struct Full {
    comms: Comms,
    gather: StreamId,
    reduce: StreamId,
    params: Vec<ParamState>,
    forward: Direction,
    backward: Direction,
    reductions: Vec<Bucket>,
    reduction_of: Vec<Option<u32>>,
    /// Buffers of gather buckets and reduction buckets, made on first use.
    gather_buffers: Vec<Vec<Option<BufferId>>>,
    reduce_buffers: Vec<Option<(BufferId, BufferId)>>,
    in_backward: bool,
    /// Next bucket to issue in this direction.
    next: usize,
    issued: Vec<Option<InFlight>>,
    full: Vec<bool>,
    grad_live: Vec<bool>,
    /// Gradients still missing in each reduction bucket.
    missing: Vec<usize>,
    reducing: VecDeque<(InFlight, Option<BufferId>)>,
    uses: usize,
    window: u64,
    in_flight: u64,
    first: bool,
    last: bool,
}

impl Full {
    pub(crate) fn new(cx: &mut Cx<'_>) -> Self {
        let separate = cx.scenario.fsdp.separate_communicators;
        let sharded = cx.inner > 1;
        let gather = if sharded {
            cx.b.add_stream(StreamKind::AllGather, -1)
        } else {
            COMPUTE
        };
        let reduce = if sharded {
            cx.b.add_stream(StreamKind::ReduceScatter, -1)
        } else {
            COMPUTE
        };
        let comms = cx.communicators(separate);
        let params = (0..cx.tape.params.len() as u32)
            .map(|p| param_state(cx, ParamId(p)))
            .collect();
        let cap = cx.scenario.compile.bucket_bytes;
        let forward = direction(cx, &cx.tape.forward, cap);
        let backward = direction(cx, &cx.tape.backward, cap);
        let (reductions, reduction_of) = reductions(cx, cap);
        let window = window(cx);
        Self {
            comms,
            gather,
            reduce,
            params,
            gather_buffers: vec![
                vec![None; forward.buckets.len()],
                vec![None; backward.buckets.len()],
            ],
            forward,
            backward,
            reduce_buffers: vec![None; reductions.len()],
            missing: vec![0; reductions.len()],
            reductions,
            reduction_of,
            in_backward: false,
            next: 0,
            issued: Vec::new(),
            full: vec![false; cx.tape.params.len()],
            grad_live: vec![false; cx.tape.params.len()],
            reducing: VecDeque::new(),
            uses: 0,
            window,
            in_flight: 0,
            first: true,
            last: true,
        }
    }

    fn direction(&self) -> &Direction {
        if self.in_backward {
            &self.backward
        } else {
            &self.forward
        }
    }

    /// Copy-in and all-gather of a bucket.
    fn issue(&mut self, cx: &mut Cx<'_>, index: usize, rule: Rule) {
        let bucket = self.direction().buckets[index].clone();
        let todo: Vec<ParamId> = bucket
            .params
            .iter()
            .copied()
            .filter(|p| !self.full[p.index()])
            .collect();
        let Some(comm) = self.comms.shard.filter(|_| !todo.is_empty()) else {
            return;
        };
        let w = cx.compute_dtype();
        let unit = self.params[todo[0].index()].unit;
        let slot = &mut self.gather_buffers[usize::from(self.in_backward)][index];
        let buffer = *slot.get_or_insert_with(|| {
            let pool = cx.transient_pool;
            cx.b.buffer(NewBuffer {
                role: Role::GatherBuffer,
                bytes: bucket.bytes,
                dtype: w,
                pool,
                stream: COMPUTE,
                unit,
                holds: Holds::Named("gather bucket"),
            })
        });
        cx.b.alloc(rule, buffer);
        let output = cx.b.whole(buffer);
        let slice = Access {
            bytes: output.bytes / u64::from(cx.inner),
            per_rank: PerRank::Inner,
            ..output
        };
        let shards: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| cx.b.whole(self.params[p.index()].shard))
            .collect();
        cx.run(
            Rule::CopyIn,
            ShardOp::MultiCopy,
            slice.bytes / w.size(),
            w,
            COMPUTE,
            &shards,
            &[slice],
        );
        cx.b.join(Rule::CopyIn, COMPUTE, self.gather);
        let parts = smallvec![Part {
            input: slice,
            output
        }];
        cx.b.collective(
            rule,
            self.gather,
            CollectiveKind::AllGather,
            comm,
            ReduceOp::None,
            w,
            parts,
        );
        let done = cx.b.record(rule, self.gather);
        self.in_flight += bucket.bytes;
        self.issued[index] = Some(InFlight {
            buffer,
            done,
            bytes: bucket.bytes,
        });
    }

    /// Starts buckets ahead of their use: at least one, more while the window has room.
    fn run_ahead(&mut self, cx: &mut Cx<'_>, used: usize) {
        while self.next < self.direction().buckets.len() {
            let bytes = self.direction().buckets[self.next].bytes;
            let needed = self.next <= used + 1;
            if !needed && self.in_flight + bytes > self.window {
                break;
            }
            let rule = if self.next <= used {
                Rule::Unshard
            } else {
                Rule::Prefetch
            };
            let index = self.next;
            self.next += 1;
            self.issue(cx, index, rule);
        }
    }

    /// Makes a parameter full: waits for its bucket and copies the bucket out.
    fn require(&mut self, cx: &mut Cx<'_>, p: ParamId) {
        if self.full[p.index()] {
            return;
        }
        let Some(index) = self.direction().of[p.index()].map(|b| b as usize) else {
            return;
        };
        self.run_ahead(cx, index);
        let bucket = self.direction().buckets[index].clone();
        let w = cx.compute_dtype();
        let todo: Vec<ParamId> = bucket
            .params
            .iter()
            .copied()
            .filter(|p| !self.full[p.index()])
            .collect();
        let gathered = self.issued[index].take();
        let from = match gathered {
            Some(g) => {
                self.in_flight -= g.bytes;
                cx.b.wait(Rule::GatherDone, g.done, COMPUTE);
                vec![cx.b.whole(g.buffer)]
            }
            None => todo
                .iter()
                .map(|p| cx.b.whole(self.params[p.index()].shard))
                .collect(),
        };
        let mut to = Vec::new();
        for p in &todo {
            let full = self.params[p.index()].full;
            cx.b.alloc(Rule::CopyOut, full);
            to.push(cx.b.whole(full));
            self.full[p.index()] = true;
        }
        let n = to.iter().map(|a| a.bytes).sum::<u64>() / w.size();
        let kind = if gathered.is_some() {
            ShardOp::CopyOut { ranks: cx.inner }
        } else {
            ShardOp::MultiCopy
        };
        cx.run(Rule::CopyOut, kind, n, w, COMPUTE, &from, &to);
        if let Some(g) = gathered {
            cx.b.free(Rule::CopyOut, g.buffer);
        }
    }

    fn release_reductions(&mut self, cx: &mut Cx<'_>, limit: usize, rule: Rule) {
        while self.reducing.len() > limit {
            let Some((r, temp)) = self.reducing.pop_front() else {
                break;
            };
            if self.reduce != COMPUTE {
                cx.b.wait(rule, r.done, COMPUTE);
            }
            cx.b.free(Rule::ReduceRelease, r.buffer);
            if let Some(temp) = temp {
                cx.b.free(Rule::ReduceRelease, temp);
            }
        }
    }

    /// Copy-in and reduce-scatter of a bucket whose gradients are complete.
    fn reduce(&mut self, cx: &mut Cx<'_>, index: usize) {
        let bucket = self.reductions[index].clone();
        let precision = cx.scenario.precision;
        let (c, stored) = (precision.comm_grads, stored(cx));
        let inner = u64::from(cx.inner);
        let shard_numel: u64 = bucket
            .params
            .iter()
            .map(|p| self.params[p.index()].shard_numel)
            .sum();
        let unit = self.params[bucket.params[0].index()].unit;
        let (input, output) = match self.reduce_buffers[index] {
            Some(ids) => ids,
            None => {
                let pool = cx.transient_pool;
                let mut make = |role, numel, dtype: DType, name| {
                    cx.b.buffer(NewBuffer {
                        role,
                        bytes: numel * dtype.size(),
                        dtype,
                        pool,
                        stream: COMPUTE,
                        unit,
                        holds: Holds::Named(name),
                    })
                };
                let ids = (
                    make(Role::ReduceInput, shard_numel * inner, c, "reduce bucket"),
                    make(Role::ReduceOutput, shard_numel, c, "reduced bucket"),
                );
                self.reduce_buffers[index] = Some(ids);
                ids
            }
        };
        cx.b.alloc(Rule::ReduceCopyIn, input);
        let grads: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| cx.b.whole(self.params[p.index()].grad))
            .collect();
        let whole = cx.b.whole(input);
        cx.run(
            Rule::ReduceCopyIn,
            ShardOp::ChunkCat { ranks: cx.inner },
            shard_numel * inner,
            c,
            COMPUTE,
            &grads,
            &[whole],
        );
        for p in &bucket.params {
            cx.b.free(Rule::Grad, self.params[p.index()].grad);
            self.grad_live[p.index()] = false;
        }
        cx.b.alloc(Rule::Reduce, output);
        let out = cx.b.whole(output);
        if self.first {
            for p in &bucket.params {
                cx.b.alloc(Rule::Reduce, self.params[p.index()].reduced);
            }
        }
        cx.b.join(Rule::ReduceFork, COMPUTE, self.reduce);
        let op = if cx.scenario.fsdp.per_token_loss {
            ReduceOp::Sum
        } else {
            ReduceOp::Avg
        };
        match self.comms.reduce {
            Some(comm) => {
                let parts = smallvec![Part {
                    input: whole,
                    output: out
                }];
                cx.b.collective(
                    Rule::Reduce,
                    self.reduce,
                    CollectiveKind::ReduceScatter,
                    comm,
                    op,
                    c,
                    parts,
                );
            }
            None => cx.run(
                Rule::Reduce,
                ShardOp::Copy,
                shard_numel,
                c,
                self.reduce,
                &[whole],
                &[out],
            ),
        }
        let to: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| cx.b.whole(self.params[p.index()].reduced))
            .collect();
        let (kind, reads) = if self.first {
            (ShardOp::MultiCopy, vec![out])
        } else {
            (
                ShardOp::Accumulate,
                std::iter::once(out).chain(to.iter().copied()).collect(),
            )
        };
        cx.run(
            Rule::ReduceAccumulate,
            kind,
            shard_numel,
            stored,
            self.reduce,
            &reads,
            &to,
        );
        if let Some(comm) = self.comms.outer.filter(|_| self.last) {
            // Parameter order, so that the parts of a launch follow one rule on every rank.
            let mut to = to;
            to.sort_unstable_by_key(|a| a.buffer);
            let parts = to
                .iter()
                .map(|a| Part {
                    input: *a,
                    output: *a,
                })
                .collect();
            cx.b.collective(
                Rule::OuterReduce,
                self.reduce,
                CollectiveKind::AllReduce,
                comm,
                op,
                stored,
                parts,
            );
        }
        let done = cx.b.record(Rule::Reduce, self.reduce);
        self.reducing.push_back((
            InFlight {
                buffer: input,
                done,
                bytes: whole.bytes,
            },
            Some(output),
        ));
        self.release_reductions(
            cx,
            if self.reduce == COMPUTE { 0 } else { 1 },
            Rule::ReduceGate,
        );
    }
}

fn stored(cx: &Cx<'_>) -> DType {
    cx.scenario
        .precision
        .main_params
        .unwrap_or(cx.scenario.precision.compute)
}

fn param_state(cx: &mut Cx<'_>, p: ParamId) -> ParamState {
    let (g, i) = cx.home[p.index()];
    let group = cx.group(g).clone();
    let holds = Holds::Param(p);
    let (stored, w) = (stored(cx), cx.compute_dtype());
    let (shard_numel, local_numel) = match &group.layout {
        Layout::PerParam(l) => (
            l.items[i as usize].shard_numel,
            l.local_numel(i as usize, 0),
        ),
        Layout::Flat(_) => unreachable!("full mode lays parameters out one by one"),
    };
    let padded = shard_numel * u64::from(cx.inner);
    let numel = cx.tape.params[p.index()].numel();
    let shard = cx.resting(
        Role::MainWeight,
        shard_numel * stored.size(),
        stored,
        group.unit,
        holds,
    );
    let moments = if group.requires_grad {
        moments(cx, group.unit, local_numel, holds, true)
    } else {
        None
    };
    let pool = cx.transient_pool;
    let mut transient = |role, bytes, dtype| {
        cx.b.buffer(NewBuffer {
            role,
            bytes,
            dtype,
            pool,
            stream: COMPUTE,
            unit: group.unit,
            holds,
        })
    };
    ParamState {
        shard,
        full: transient(Role::FullWeight, padded * w.size(), w),
        grad: transient(Role::FullGrad, numel * w.size(), w),
        reduced: transient(Role::MainGrad, shard_numel * stored.size(), stored),
        moments,
        shard_numel,
        local_numel,
        unit: group.unit,
    }
}

/// Merges parameters in order of first use into buckets of at most `cap` bytes, and finds last uses.
fn direction(cx: &Cx<'_>, ops: &[TapeOp], cap: u64) -> Direction {
    let mut out = Direction {
        of: vec![None; cx.tape.params.len()],
        ..Direction::default()
    };
    let mut last = vec![None; cx.tape.params.len()];
    for (at, op) in ops.iter().enumerate() {
        let TapeOp::Launch { reads, end, .. } = *op else {
            continue;
        };
        for o in &cx.tape.operands[reads as usize..end as usize] {
            let Source::Param(p) = o.source else { continue };
            last[p.index()] = Some(at as u32);
            if out.of[p.index()].is_none() {
                let bytes = padded_bytes(cx, p);
                match out.buckets.last_mut().filter(|b| b.bytes + bytes <= cap) {
                    Some(b) => {
                        b.params.push(p);
                        b.bytes += bytes;
                    }
                    None => out.buckets.push(Bucket {
                        params: vec![p],
                        bytes,
                    }),
                }
                out.of[p.index()] = Some(out.buckets.len() as u32 - 1);
            }
        }
    }
    out.last_uses = last
        .iter()
        .enumerate()
        .filter_map(|(p, at)| Some(((*at)?, ParamId(p as u32))))
        .collect();
    out.last_uses.sort_unstable();
    out
}

fn padded_bytes(cx: &Cx<'_>, p: ParamId) -> u64 {
    let (g, i) = cx.home[p.index()];
    let numel = match &cx.group(g).layout {
        Layout::PerParam(l) => l.items[i as usize].shard_numel * u64::from(l.shards),
        Layout::Flat(_) => cx.tape.params[p.index()].numel(),
    };
    numel * cx.compute_dtype().size()
}

/// Merges gradients in the order in which they complete.
fn reductions(cx: &Cx<'_>, cap: u64) -> (Vec<Bucket>, Vec<Option<u32>>) {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut of = vec![None; cx.tape.params.len()];
    for op in &cx.tape.backward {
        let TapeOp::GradReady(p) = *op else { continue };
        let bytes = padded_bytes(cx, p);
        match buckets.last_mut().filter(|b| b.bytes + bytes <= cap) {
            Some(b) => {
                b.params.push(p);
                b.bytes += bytes;
            }
            None => buckets.push(Bucket {
                params: vec![p],
                bytes,
            }),
        }
        of[p.index()] = Some(buckets.len() as u32 - 1);
    }
    (buckets, of)
}

/// Bytes that may be gathered ahead: the in-flight limit, and at most `max(1 GB, budget x peak of the tape)` of extra
/// memory (defaults of `overlap_scheduling.py`).
fn window(cx: &Cx<'_>) -> u64 {
    let (mut live, mut peak) = (0u64, 0u64);
    for op in cx.tape.forward.iter().chain(&cx.tape.backward) {
        match *op {
            TapeOp::Alloc(s) => live += cx.tape.storages[s.index()].bytes.0,
            TapeOp::Free(s) => live -= cx.tape.storages[s.index()].bytes.0,
            _ => {}
        }
        peak = peak.max(live);
    }
    let budget = (cx.scenario.compile.memory_budget * peak as f64) as u64;
    cx.scenario
        .compile
        .max_inflight_bytes
        .min(budget.max(1_000_000_000))
}

impl Lifecycle for Full {
    fn init(&mut self, cx: &mut Cx<'_>) {
        for p in &self.params {
            cx.b.at(p.unit, Phase::Init);
            cx.b.alloc(Rule::State, p.shard);
        }
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.first = index == 0;
        self.last = last;
    }

    fn forward_start(&mut self, cx: &mut Cx<'_>) {
        self.start(cx, false);
    }

    fn pre_forward(&mut self, _cx: &mut Cx<'_>, _unit: UnitId) {}
    fn post_forward(&mut self, _cx: &mut Cx<'_>, _unit: UnitId) {}
    fn pre_recompute(&mut self, _cx: &mut Cx<'_>, _unit: UnitId) {}
    fn pre_backward(&mut self, _cx: &mut Cx<'_>, _unit: UnitId) {}
    fn post_backward(&mut self, _cx: &mut Cx<'_>, _unit: UnitId) {}

    fn forward_end(&mut self, cx: &mut Cx<'_>) {
        if cx.b.phase() == Phase::Validation {
            self.free_all(cx);
        }
    }

    fn backward_start(&mut self, cx: &mut Cx<'_>) {
        for (m, b) in self.missing.iter_mut().zip(&self.reductions) {
            *m = b.params.len();
        }
        self.start(cx, true);
    }

    fn after_launch(&mut self, cx: &mut Cx<'_>, pass: Pass, position: u32) {
        // Validation has another list of launches: its parameters stay full until it ends.
        if pass == Pass::Eval {
            return;
        }
        let keeps =
            pass == Pass::Forward && cx.scenario.fsdp.reshard_after_forward == Reshard::Never;
        while let Some(&(at, p)) = self.direction().last_uses.get(self.uses) {
            if at > position {
                break;
            }
            self.uses += 1;
            if !keeps && std::mem::replace(&mut self.full[p.index()], false) {
                cx.b.free(Rule::Reshard, self.params[p.index()].full);
            }
        }
    }

    fn grad_ready(&mut self, cx: &mut Cx<'_>, p: ParamId) {
        let Some(b) = self.reduction_of[p.index()] else {
            return;
        };
        self.missing[b as usize] -= 1;
        if self.missing[b as usize] == 0 {
            self.reduce(cx, b as usize);
        }
    }

    fn backward_end(&mut self, cx: &mut Cx<'_>) {
        self.release_reductions(cx, 0, Rule::FinalFence);
        self.free_all(cx);
    }

    fn weight(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        self.require(cx, p);
        Location {
            buffer: self.params[p.index()].full,
            offset: 0,
            element: cx.compute_dtype().size(),
        }
    }

    fn grad(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        let buffer = self.params[p.index()].grad;
        if !std::mem::replace(&mut self.grad_live[p.index()], true) {
            cx.b.alloc(Rule::Grad, buffer);
        }
        Location {
            buffer,
            offset: 0,
            element: cx.compute_dtype().size(),
        }
    }

    fn optimizer_state(&mut self, cx: &mut Cx<'_>) -> Vec<ShardState> {
        let element = stored(cx).size();
        let mut out: Vec<ShardState> = Vec::new();
        for (i, p) in self.params.iter().enumerate() {
            if !cx.tape.params[i].requires_grad || p.local_numel == 0 {
                continue;
            }
            let bytes = p.local_numel * element;
            let item = OptimizerItem {
                weight: Access {
                    buffer: p.shard,
                    offset: 0,
                    bytes,
                    per_rank: PerRank::Same,
                },
                grad: Access {
                    buffer: p.reduced,
                    offset: 0,
                    bytes,
                    per_rank: PerRank::Same,
                },
                numel: p.local_numel,
                state: p.moments,
            };
            match out.last_mut().filter(|s| s.unit == p.unit) {
                Some(s) => s.items.push(item),
                None => out.push(ShardState {
                    unit: p.unit,
                    items: vec![item],
                }),
            }
        }
        out
    }

    fn step_end(&mut self, cx: &mut Cx<'_>) {
        for (i, p) in self.params.iter().enumerate() {
            if cx.tape.params[i].requires_grad {
                cx.b.at(p.unit, Phase::Optimizer);
                cx.b.free(Rule::ZeroGrad, p.reduced);
            }
        }
    }
}

impl Full {
    fn start(&mut self, cx: &mut Cx<'_>, backward: bool) {
        self.in_backward = backward;
        self.next = 0;
        self.uses = 0;
        self.in_flight = 0;
        self.issued = vec![None; self.direction().buckets.len()];
        if self.gather != COMPUTE && !backward {
            cx.b.join(Rule::StepStart, COMPUTE, self.gather);
        }
    }

    fn free_all(&mut self, cx: &mut Cx<'_>) {
        for (full, p) in self.full.iter_mut().zip(&self.params) {
            if std::mem::replace(full, false) {
                cx.b.free(Rule::Reshard, p.full);
            }
        }
    }
}
