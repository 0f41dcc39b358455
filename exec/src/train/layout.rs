//! Which bytes of which buffer hold which elements of which parameter, for every rank.
//!
//! All of it is derived from the program: a flat group's buffer is the inner slice of the group's layout, and within it
//! the outer slice, as its size says; a buffer of one parameter holds that parameter's dim-0 shard. What the optimizer
//! works on is read off its launches, because moments and gradients follow the weights of their launch element by element.

use shardlab_plan::Program;
use shardlab_plan::ir::{
    Access, BufferId, CopyKind, DType, Holds, OpKind, ParamId, PerRank, Role, ShardOp,
};
use shardlab_plan::program::{Op, SectionKind};
use shardlab_plan::shard::{Layout, mesh};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A run of elements of one parameter in a persistent buffer of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Buffer.
    pub buffer: BufferId,
    /// First byte within the buffer.
    pub offset: u64,
    /// Element type of the buffer.
    pub dtype: DType,
    /// Parameter.
    pub param: ParamId,
    /// Elements of the parameter, row-major.
    pub elements: Range<u64>,
}

impl Span {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    /// Number of bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.numel() * self.dtype.size()
    }
}

/// A kind of state that outlives a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The weights the optimizer updates; of a frozen parameter the weights at rest.
    Master,
    /// First moment.
    First,
    /// Second moment.
    Second,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Master, Self::First, Self::Second];

    /// Name in checkpoints (torch's names of AdamW's state).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "weight",
            Self::First => "exp_avg",
            Self::Second => "exp_avg_sq",
        }
    }
}

/// The state of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankState {
    /// What [`Kind::Master`] says. Slices of replicated weights appear here only on the rank whose optimizer owns them.
    pub master: Vec<Span>,
    /// All weights at rest, main and compute weights both; a superset of `master`.
    pub weights: Vec<Span>,
    /// First moments.
    pub first: Vec<Span>,
    /// Second moments.
    pub second: Vec<Span>,
    /// Gradients, where they rest between steps. They hold the step's gradients until the next step writes them.
    pub grads: Vec<Span>,
}

impl RankState {
    /// Spans of a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> &[Span] {
        match kind {
            Kind::Master => &self.master,
            Kind::First => &self.first,
            Kind::Second => &self.second,
        }
    }
}

/// Why a program's state cannot be mapped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A buffer's size is no slice of its group.
    #[error(
        "buffer `{buffer}` has {elements} elements, which is not a slice of its group's {full}"
    )]
    Size {
        /// Buffer.
        buffer: String,
        /// Elements.
        elements: u64,
        /// Elements of the group.
        full: u64,
    },
    /// A parameter has no weights at rest.
    #[error("no persistent buffer holds `{0}`")]
    Missing(String),
}

/// The state of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// By rank.
    pub ranks: Vec<RankState>,
}

impl StateLayout {
    /// Maps the persistent buffers of a program.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(program: &Program) -> Result<Self, LayoutError> {
        let map = Map::new(program);
        let ranks = (0..program.meta.world)
            .map(|rank| map.rank(rank))
            .collect::<Result<Vec<_>, _>>()?;
        let layout = Self { ranks };
        for (p, param) in program.params.iter().enumerate() {
            let covered: u64 = layout
                .primaries(Kind::Master)
                .iter()
                .filter(|(_, s)| s.param.index() == p)
                .map(|(_, s)| s.numel())
                .sum();
            if covered < param.numel() {
                return Err(LayoutError::Missing(param.name.clone()));
            }
        }
        Ok(layout)
    }

    /// Every element once: the spans of a kind with the lowest rank that holds them, by parameter and element.
    #[must_use]
    pub fn primaries(&self, kind: Kind) -> Vec<(u32, &Span)> {
        once(&self.ranks, |r| r.of(kind))
    }

    /// Likewise for gradients at rest. Empty where gradients do not outlive the step.
    #[must_use]
    pub fn primary_grads(&self) -> Vec<(u32, &Span)> {
        once(&self.ranks, |r| &r.grads)
    }
}

fn once<'a>(
    ranks: &'a [RankState],
    of: impl Fn(&'a RankState) -> &'a [Span],
) -> Vec<(u32, &'a Span)> {
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    for (rank, state) in (0u32..).zip(ranks) {
        for span in of(state) {
            if seen.insert((span.param, span.elements.start, span.elements.end)) {
                out.push((rank, span));
            }
        }
    }
    out.sort_by_key(|(_, s)| (s.param, s.elements.start));
    out
}

/// Bytes of an access on a rank.
#[must_use]
pub fn resolve(program: &Program, rank: u32, access: &Access) -> Range<u64> {
    let meta = &program.meta;
    let (inner, outer) = (rank % meta.dp_shard, rank / meta.dp_shard);
    let index = match access.per_rank {
        PerRank::Same => 0,
        PerRank::Inner => inner,
        PerRank::Outer => outer,
        PerRank::SubShard => program
            .communicators
            .iter()
            .find(|c| c.axis == shardlab_plan::program::Axis::SubShard)
            .map_or(0, |c| mesh::position(c, rank)),
    };
    let start = access.offset + u64::from(index) * access.bytes;
    start..start + access.bytes
}

/// One tensor of an optimizer launch.
struct Tensor {
    weight: Access,
    grad: Access,
    /// Moment buffers and the first element there.
    moments: Option<([BufferId; 2], u64)>,
}

struct Map<'a> {
    program: &'a Program,
    persistent: BTreeSet<BufferId>,
    /// Group of every parameter, with its index there.
    home: BTreeMap<ParamId, (usize, usize)>,
    tensors: Vec<Tensor>,
}

impl<'a> Map<'a> {
    fn new(program: &'a Program) -> Self {
        let persistent: BTreeSet<BufferId> = program
            .section(SectionKind::Init)
            .map(|s| program.section_instrs(s))
            .unwrap_or_default()
            .iter()
            .filter_map(|i| match i.op {
                Op::Alloc(b) => Some(b),
                _ => None,
            })
            .collect();
        let home = program
            .groups
            .iter()
            .enumerate()
            .flat_map(|(g, group)| {
                group
                    .params
                    .iter()
                    .enumerate()
                    .map(move |(i, p)| (*p, (g, i)))
            })
            .collect();
        let mut tensors = tensors(program);
        let twins = host_twins(program);
        let rest = |id: &mut BufferId| {
            if let Some(host) = twins.get(id).filter(|h| persistent.contains(h)) {
                *id = *host;
            }
        };
        for t in &mut tensors {
            rest(&mut t.weight.buffer);
            rest(&mut t.grad.buffer);
            t.moments.iter_mut().flat_map(|(m, _)| m).for_each(rest);
        }
        Self {
            tensors,
            program,
            persistent,
            home,
        }
    }

    fn rank(&self, rank: u32) -> Result<RankState, LayoutError> {
        let mut state = RankState::default();
        let mut trained = BTreeSet::new();
        for t in &self.tensors {
            let size = |b: BufferId| self.program.buffers[b.index()].dtype.size();
            let weight = self.within(rank, &t.weight)?;
            let grad = resolve(self.program, rank, &t.grad);
            for (at, span) in weight {
                trained.insert(span.param);
                let beside = |buffer: BufferId, base: u64| Span {
                    buffer,
                    offset: base + at * size(buffer),
                    dtype: self.program.buffers[buffer.index()].dtype,
                    ..span.clone()
                };
                if let Some(([first, second], base)) = t.moments {
                    state.first.push(beside(first, base * size(first)));
                    state.second.push(beside(second, base * size(second)));
                }
                if self.persistent.contains(&t.grad.buffer) {
                    state.grads.push(beside(t.grad.buffer, grad.start));
                }
                state.master.push(span);
            }
        }
        for &id in &self.persistent {
            let role = self.program.buffers[id.index()].role;
            if !matches!(role, Role::ModelWeight | Role::MainWeight) {
                continue;
            }
            for span in self.buffer(rank, id)? {
                if !self.program.params[span.param.index()].requires_grad
                    && !trained.contains(&span.param)
                {
                    state.master.push(span.clone());
                }
                state.weights.push(span);
            }
        }
        Ok(state)
    }

    /// Spans inside an access, with their distance in elements from its start.
    fn within(&self, rank: u32, access: &Access) -> Result<Vec<(u64, Span)>, LayoutError> {
        let bytes = resolve(self.program, rank, access);
        let spans = self.buffer(rank, access.buffer)?;
        Ok(spans
            .into_iter()
            .filter_map(|s| {
                let size = s.dtype.size();
                let start = s.offset.max(bytes.start);
                let end = (s.offset + s.bytes()).min(bytes.end);
                (start < end).then(|| {
                    let first = s.elements.start + (start - s.offset) / size;
                    let span = Span {
                        offset: start,
                        elements: first..first + (end - start) / size,
                        ..s
                    };
                    ((start - bytes.start) / size, span)
                })
            })
            .collect())
    }

    /// What a persistent buffer holds on a rank.
    fn buffer(&self, rank: u32, id: BufferId) -> Result<Vec<Span>, LayoutError> {
        let buffer = &self.program.buffers[id.index()];
        let inner = rank % self.program.meta.dp_shard;
        let span = |offset: u64, param: ParamId, elements: Range<u64>| Span {
            buffer: id,
            offset: offset * buffer.dtype.size(),
            dtype: buffer.dtype,
            param,
            elements,
        };
        match buffer.holds {
            Holds::Param(p) => {
                let Some(&(g, i)) = self.home.get(&p) else {
                    return Ok(Vec::new());
                };
                let elements = match &self.program.groups[g].layout {
                    Layout::Flat(_) => 0..self.program.params[p.index()].numel(),
                    Layout::PerParam(l) => l.items[i].local(inner),
                };
                Ok(Some(span(0, p, elements))
                    .into_iter()
                    .filter(|s| s.numel() > 0)
                    .collect())
            }
            Holds::Group(g) => match &self.program.groups[g.index()].layout {
                Layout::Flat(layout) => {
                    let numel = buffer.bytes.0 / buffer.dtype.size();
                    let held = self.interval(rank, id, numel, layout.numel)?;
                    Ok(layout
                        .items
                        .iter()
                        .filter_map(|item| {
                            let start = item.offset.max(held.start);
                            let end = (item.offset + item.numel).min(held.end);
                            (start < end).then(|| {
                                let elements = start - item.offset..end - item.offset;
                                span(start - held.start, item.param, elements)
                            })
                        })
                        .collect())
                }
                Layout::PerParam(layout) => Ok(layout
                    .items
                    .iter()
                    .map(|item| span(item.shard_offset, item.param, item.local(inner)))
                    .filter(|s| s.numel() > 0)
                    .collect()),
            },
            _ => Ok(Vec::new()),
        }
    }

    /// The slice of `full` elements that a buffer of `numel` elements holds: the inner axis cuts first, then the outer.
    fn interval(
        &self,
        rank: u32,
        id: BufferId,
        numel: u64,
        full: u64,
    ) -> Result<Range<u64>, LayoutError> {
        let meta = &self.program.meta;
        let (inner, outer) = (u64::from(meta.dp_shard), u64::from(meta.dp_outer));
        let at = (u64::from(rank) % inner, u64::from(rank) / inner);
        let start = if numel == full {
            0
        } else if numel * inner == full {
            at.0 * numel
        } else if numel * inner * outer == full {
            (at.0 * outer + at.1) * numel
        } else {
            return Err(LayoutError::Size {
                buffer: self.program.buffer_name(id),
                elements: numel,
                full,
            });
        };
        Ok(start..start + numel)
    }
}

/// Where buffers that only visit the device rest: the host buffers that they are copied to.
fn host_twins(program: &Program) -> BTreeMap<BufferId, BufferId> {
    let copies = program.copies.iter();
    copies
        .filter(|c| c.kind == CopyKind::D2h)
        .map(|c| (c.from.buffer, c.to.buffer))
        .collect()
}

/// The tensors of the first step's optimizer launches.
fn tensors(program: &Program) -> Vec<Tensor> {
    let Some(section) = program.section(SectionKind::First) else {
        return Vec::new();
    };
    let role = |a: &Access| program.buffers[a.buffer.index()].role;
    let mut out = Vec::new();
    for instr in program.section_instrs(section) {
        let Op::Launch { kernel, .. } = instr.op else {
            continue;
        };
        let body = &program.kernels[kernel.index()].body;
        if !matches!(
            body.first().map(|b| b.op),
            Some(OpKind::Shard(ShardOp::AdamW { .. } | ShardOp::Sgd { .. }))
        ) {
            continue;
        }
        let reads = program.reads(&instr.op);
        let mut i = 0;
        // Moments of a tensor that names none go on after those of the tensor before.
        let mut moments: Option<([BufferId; 2], u64)> = None;
        while i + 1 < reads.len() {
            let (weight, grad) = (reads[i], reads[i + 1]);
            i += 2;
            if i + 1 < reads.len() && role(&reads[i]) == Role::OptimizerState {
                moments = Some(([reads[i].buffer, reads[i + 1].buffer], 0));
                i += 2;
            }
            out.push(Tensor {
                weight,
                grad,
                moments,
            });
            let size = program.buffers[weight.buffer.index()].dtype.size();
            if let Some((_, base)) = &mut moments {
                *base += weight.bytes / size;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
