//! The program being built: buffers, launches and communicators that policies add to it.

use super::builder::{Builder, CollectiveLaunch, NewBuffer};
use super::inputs::LoweringInputs;
use super::kernels::{KernelLaunch, Kernels};
use super::uses::Uses;
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CommId, DType, EventId, GroupId, Holds, ParamId,
    Pool, Role, ShardOp, StreamId, UnitId,
};
use crate::program::{Communicator, Phase, Rule, is_packed};
use std::collections::HashMap;

/// The program being built, into which the walk and the policies emit.
pub(crate) struct Emitter<'a> {
    pub(crate) inputs: &'a LoweringInputs<'a>,
    pub(crate) b: Builder,
    /// Uses of units in the current pass.
    pub(crate) uses: Uses,
    kernels: Kernels,
    /// Transient buffers of groups, by role and stream.
    pub(crate) made: HashMap<(Role, GroupId, StreamId), BufferId>,
    /// Scratch memory that kernels need while they run, by name and size.
    scratch: HashMap<(&'static str, u64), BufferId>,
    /// Result buffers of NaN checks, by stream.
    flags: HashMap<StreamId, BufferId>,
}

impl<'a> Emitter<'a> {
    pub(crate) fn new(inputs: &'a LoweringInputs<'a>) -> Self {
        Self {
            inputs,
            b: Builder::new(inputs.meta()),
            uses: Uses::default(),
            kernels: Kernels::default(),
            made: HashMap::new(),
            scratch: HashMap::new(),
            flags: HashMap::new(),
        }
    }

    /// Emits the instructions of `f` with this unit and phase, and restores both afterwards.
    pub(crate) fn within<T>(
        &mut self,
        unit: UnitId,
        phase: Phase,
        f: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let (unit_before, phase_before) = (self.b.unit(), self.b.phase());
        self.b.at(unit, phase);
        let result = f(self);
        self.b.at(unit_before, phase_before);
        result
    }

    /// Does the same as [`Emitter::within`], in the current phase.
    pub(crate) fn within_unit<T>(&mut self, unit: UnitId, f: impl FnOnce(&mut Self) -> T) -> T {
        self.within(unit, self.b.phase(), f)
    }

    /// Creates a full-size buffer of a group in the pool of such buffers.
    pub(crate) fn transient(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        stream: StreamId,
        g: GroupId,
    ) -> BufferId {
        self.transient_of(role, bytes, dtype, stream, (g, Holds::Group(g)))
    }

    /// Creates the same for something other than the parameters of the group.
    pub(crate) fn transient_of(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        stream: StreamId,
        (g, holds): (GroupId, Holds),
    ) -> BufferId {
        let (unit, pool) = (self.inputs.group(g).unit, self.inputs.transient_pool);
        self.made_in((pool, stream), role, bytes, dtype, unit, holds)
    }

    /// Creates a buffer of a group outside the double-buffer pattern, once per role and stream.
    pub(crate) fn transient_on(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        stream: StreamId,
        g: GroupId,
    ) -> BufferId {
        if let Some(id) = self.made.get(&(role, g, stream)) {
            return *id;
        }
        let id = self.of_group(role, bytes, dtype, stream, g);
        self.made.insert((role, g, stream), id);
        id
    }

    /// Creates a buffer of a group outside the pool of full-size buffers.
    pub(crate) fn of_group(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        stream: StreamId,
        g: GroupId,
    ) -> BufferId {
        let (unit, pool) = (self.inputs.group(g).unit, self.inputs.persistent_pool);
        self.made_in((pool, stream), role, bytes, dtype, unit, Holds::Group(g))
    }

    /// Creates a buffer of a parameter outside the pool of full-size buffers.
    pub(crate) fn of_param(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        stream: StreamId,
        p: ParamId,
    ) -> BufferId {
        let (g, _) = self.inputs.home[p.index()];
        let (unit, pool) = (self.inputs.group(g).unit, self.inputs.persistent_pool);
        self.made_in((pool, stream), role, bytes, dtype, unit, Holds::Param(p))
    }

    /// Creates a full-size buffer on the compute stream in the pool of such buffers.
    pub(crate) fn full_size(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        unit: UnitId,
        holds: Holds,
    ) -> BufferId {
        let pool = self.inputs.transient_pool;
        self.made_in((pool, COMPUTE), role, bytes, dtype, unit, holds)
    }

    /// Creates a buffer on the compute stream outside the pool of full-size buffers.
    pub(crate) fn persistent(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        unit: UnitId,
        holds: Holds,
    ) -> BufferId {
        let pool = self.inputs.persistent_pool;
        self.made_in((pool, COMPUTE), role, bytes, dtype, unit, holds)
    }

    fn made_in(
        &mut self,
        (pool, stream): (Pool, StreamId),
        role: Role,
        bytes: u64,
        dtype: DType,
        unit: UnitId,
        holds: Holds,
    ) -> BufferId {
        self.b.buffer(NewBuffer {
            role,
            bytes,
            dtype,
            pool,
            stream,
            unit,
            holds,
        })
    }

    /// Returns scratch memory on the compute stream for a kernel. The caller allocates and frees it
    /// around the launch.
    pub(crate) fn scratch(&mut self, name: &'static str, bytes: u64) -> BufferId {
        if let Some(id) = self.scratch.get(&(name, bytes)) {
            return *id;
        }
        let holds = Holds::Named(name);
        let id = self.persistent(Role::Temporary, bytes, DType::U8, UnitId(0), holds);
        self.scratch.insert((name, bytes), id);
        id
    }

    /// Copies a range to another one, in the dtype of the target buffer.
    pub(crate) fn copy(&mut self, rule: Rule, stream: StreamId, from: Access, to: Access) {
        let dtype = self.b.program().buffers[to.buffer.index()].dtype;
        self.run(KernelLaunch {
            rule,
            op: ShardOp::Copy,
            elements: to.bytes / dtype.size(),
            dtype,
            stream,
            reads: &[from],
            writes: &[to],
        });
    }

    /// Fills ranges with zeros in one kernel on the compute stream, in the dtype of their buffers.
    pub(crate) fn zero(&mut self, rule: Rule, ranges: &[Access]) {
        let dtype = self.b.program().buffers[ranges[0].buffer.index()].dtype;
        self.run(KernelLaunch {
            rule,
            op: ShardOp::Zero,
            elements: ranges.iter().map(|a| a.bytes).sum::<u64>() / dtype.size(),
            dtype,
            stream: COMPUTE,
            reads: &[],
            writes: ranges,
        });
    }

    /// Allocates a buffer for this rank's slice of a full buffer, and copies the slice: for gathers
    /// among the ranks of a smaller group (integer reshard).
    pub(crate) fn keep_slice(&mut self, full: BufferId, slice: BufferId) {
        self.b.alloc(Rule::ReshardGroup, slice);
        let to = self.b.whole(slice);
        let from = Access {
            bytes: to.bytes,
            per_rank: Some(AxisId::SUB_SHARD.into()),
            ..self.b.whole(full)
        };
        self.copy(Rule::ReshardGroup, COMPUTE, from, to);
    }

    /// Launches a sharding kernel.
    pub(crate) fn run(&mut self, launch: KernelLaunch<'_>) {
        let kernel = self.kernels.get(&mut self.b, &launch);
        self.b.launch(
            launch.rule,
            kernel,
            launch.stream,
            launch.reads.iter().copied(),
            launch.writes.iter().copied(),
        );
    }

    /// Makes the host wait for an event, unless the code emitted now is captured: a capture must
    /// not block, and a replay has nothing to wait for on the host.
    pub(crate) fn host_sync(&mut self, rule: Rule, event: EventId) {
        if !self.b.is_capturing() {
            self.b.host_wait(rule, event);
        }
    }

    /// Launches a collective. With `fsdp.nan_check`, checks the operands before it and the results
    /// after it.
    pub(crate) fn collective(&mut self, launch: CollectiveLaunch) {
        if !self.inputs.scenario.fsdp.nan_check {
            self.b.collective(launch);
            return;
        }
        let stream = launch.stream;
        let operands: Vec<Access> = launch.parts.iter().map(|p| p.input).collect();
        // Rows that were not pushed hold stale data.
        let pushes = launch.kind.pushes();
        let results = launch.parts.iter().map(|p| p.output);
        let results: Vec<Access> = results.filter(|_| !pushes).collect();
        operands.into_iter().for_each(|a| self.check_nan(stream, a));
        self.b.collective(launch);
        results.into_iter().for_each(|a| self.check_nan(stream, a));
    }

    /// Checks a range for NaN on a stream. The host waits for the result.
    fn check_nan(&mut self, stream: StreamId, what: Access) {
        let buffer = self.b.program().buffers[what.buffer.index()];
        let (params, groups) = (&self.inputs.tape.params, &self.inputs.groups);
        if !buffer.dtype.is_float() || is_packed(buffer.holds, params, groups) {
            return;
        }
        let (elements, unit) = (what.bytes / buffer.dtype.size(), self.b.unit());
        let pool = self.inputs.persistent_pool;
        let new = NewBuffer {
            role: Role::Temporary,
            bytes: 4,
            dtype: DType::F32,
            pool,
            stream,
            unit,
            holds: Holds::Named("NaN flag"),
        };
        let b = &mut self.b;
        let flag = *self.flags.entry(stream).or_insert_with(|| b.buffer(new));
        let rule = Rule::NanCheck;
        self.b.alloc(rule, flag);
        let result = self.b.whole(flag);
        self.run(KernelLaunch {
            rule,
            op: ShardOp::NanCheck,
            elements,
            dtype: DType::F32,
            stream,
            reads: &[what],
            writes: &[result],
        });
        let checked = self.b.record(rule, stream);
        self.host_sync(rule, checked);
        self.b.free(rule, flag);
    }

    /// Adds the communicators that the mesh needs: for each axis over which groups are sharded,
    /// with a second one over the same ranks for reductions, and for the outer axis.
    pub(crate) fn communicators(&mut self, separate: bool) -> Comms {
        let fsdp = &self.inputs.scenario.fsdp;
        let (gathers, reduces) = (fsdp.copy_engine_gather, fsdp.copy_engine_reduce);
        let groups = self.inputs.group_ids();
        let axes = groups.fold(AxisSet::of(AxisId::DP_SHARD), |axes, g| {
            axes.with(self.inputs.shard_axis(g))
        });
        let sharded = axes.iter().map(|axis| {
            let gather = self.communicator(axis.label(), AxisSet::of(axis), gathers);
            let reduce = if separate {
                let name = format!("{}_reduce", axis.label());
                self.communicator(&name, AxisSet::of(axis), reduces)
            } else {
                gather
            };
            (axis, ShardComms { gather, reduce })
        });
        Comms {
            sharded: sharded.collect(),
            outer: self.communicator("outer", AxisSet::of(AxisId::DP_OUTER), false),
        }
    }

    /// Adds a communicator for gathers within a part of the shard axis; returns `None` without
    /// integer reshard.
    pub(crate) fn sub_communicator(&mut self, name: &str) -> Option<CommId> {
        let copy_engine = self.inputs.scenario.fsdp.copy_engine_gather;
        self.communicator(name, AxisSet::of(AxisId::SUB_SHARD), copy_engine)
    }

    /// Adds a communicator along axes; returns `None` if they have one rank.
    pub(crate) fn communicator(
        &mut self,
        name: &str,
        axes: AxisSet,
        copy_engine: bool,
    ) -> Option<CommId> {
        let ranks = self.inputs.mesh.group(axes);
        let ranks = ranks.expect("policies communicate over axes that are next to each other");
        (ranks.size > 1).then(|| {
            self.b.add_communicator(Communicator {
                name: name.to_owned(),
                axes,
                ranks,
                copy_engine,
            })
        })
    }
}

/// Communicators of an axis over which groups are sharded; `None` if it has one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardComms {
    pub(crate) gather: Option<CommId>,
    pub(crate) reduce: Option<CommId>,
}

/// Communicators of a program; `None` if an axis has one rank.
#[derive(Clone, Debug)]
pub(crate) struct Comms {
    sharded: Vec<(AxisId, ShardComms)>,
    pub(crate) outer: Option<CommId>,
}

impl Comms {
    /// Returns the communicators of an axis over which groups are sharded.
    ///
    /// # Panics
    /// Panics if no group is sharded over the axis.
    pub(crate) fn along(&self, axis: AxisId) -> ShardComms {
        let found = self.sharded.iter().find(|(a, _)| *a == axis);
        found.expect("groups are sharded over the axis").1
    }
}
