//! Maps bytes of buffers to elements of parameters, for every rank.
//!
//! Everything is derived from the program ([`Contents`]). The state of the optimizer is read off
//! its launches, because moments and gradients follow the weights of their launch element by
//! element.

use crate::engine::GradientPart;
use shardlab_plan::Program;
use shardlab_plan::ir::{Access, BufferId, CopyKind, DType, Holds, ParamId, Role};
use shardlab_plan::program::{Contents, NoSlice, Op, SectionKind};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A contiguous range of elements of one parameter in a persistent buffer of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Buffer.
    pub buffer: BufferId,
    /// First byte within the buffer.
    pub offset: u64,
    /// Element type of the buffer.
    pub dtype: DType,
    /// Buffer with the scales of an 8-bit state.
    pub scales: Option<BufferId>,
    /// Parameter.
    pub param: ParamId,
    /// Range of elements of the parameter, row-major.
    pub elements: Range<u64>,
}

impl Span {
    /// Returns the number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.numel() * self.dtype.size()
    }
}

/// A kind of state that persists between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Weights that the optimizer updates; for a frozen parameter, its resident weights.
    Master,
    /// First moment.
    First,
    /// Second moment.
    Second,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Master, Self::First, Self::Second];

    /// Returns the name in checkpoints (torch's names of AdamW's state).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "weight",
            Self::First => "exp_avg",
            Self::Second => "exp_avg_sq",
        }
    }
}

/// State of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankState {
    /// Spans of [`Kind::Master`]. Slices of replicated weights appear only on the rank whose
    /// optimizer owns them.
    pub master: Vec<Span>,
    /// All resident weights, including compute weights; a superset of `master`.
    pub weights: Vec<Span>,
    /// First moments.
    pub first: Vec<Span>,
    /// Second moments.
    pub second: Vec<Span>,
    /// Gradients, if they persist between steps. They are those of the last step until the next
    /// step writes them.
    pub grads: Vec<Span>,
}

impl RankState {
    /// Returns the spans of a kind.
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
    /// A buffer's size is not that of a slice of its group.
    #[error(transparent)]
    Size(#[from] NoSlice),
    /// A parameter has no resident weights.
    #[error("no persistent buffer holds `{0}`")]
    Missing(String),
}

/// State of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// By rank.
    pub ranks: Vec<RankState>,
}

impl StateLayout {
    /// Maps the persistent buffers of a program.
    ///
    /// # Errors
    /// Returns [`LayoutError`] if a buffer's size is not that of a slice of its group, or if no
    /// persistent buffer has a parameter's weights.
    pub fn new(program: &Program) -> Result<Self, LayoutError> {
        let map = Map::new(program);
        let ranks = (0..program.meta.mesh.world())
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
            if covered < param.full_numel(&program.meta.mesh) {
                return Err(LayoutError::Missing(param.name.clone()));
            }
        }
        Ok(layout)
    }

    /// Returns every element once: the spans of a kind on the lowest rank that has them, by
    /// parameter and element.
    #[must_use]
    pub(crate) fn primaries(&self, kind: Kind) -> Vec<(u32, &Span)> {
        once(&self.ranks, |r| r.of(kind))
    }

    /// Returns of each rank whether the parameters that its optimizer updates by gradients are no
    /// copies of another rank's; `None` if some are and others are not.
    #[must_use]
    pub(crate) fn distinct_ranks(&self, program: &Program) -> Option<Vec<bool>> {
        let trained = |s: &&Span| {
            let param = &program.params[s.param.index()];
            // All ranks have biases of routers, which have no gradients.
            param.requires_grad && !param.router_bias
        };
        let mut own = vec![0; self.ranks.len()];
        for (rank, span) in self.primaries(Kind::Master) {
            own[rank as usize] += u64::from(trained(&span)) * span.numel();
        }
        let all = self.ranks.iter().map(|r| {
            let spans = r.master.iter().filter(trained);
            spans.map(Span::numel).sum::<u64>()
        });
        let of = |(own, all): (u64, u64)| (own == 0 || own == all).then_some(own > 0);
        own.into_iter().zip(all).map(of).collect()
    }

    /// Returns, by rank, the parts of gradients that its optimizer reads, each with its parameter.
    /// Every element is in one part of one rank. `None` if a launch adds up a gradient itself,
    /// which then exists nowhere else.
    ///
    /// # Errors
    /// Returns [`LayoutError`] if a buffer's size is not that of a slice of its group.
    pub(crate) fn gradient_parts(
        program: &Program,
    ) -> Result<Option<Vec<GradientParts>>, LayoutError> {
        let map = Map::new(program);
        if map.tensors.iter().any(|t| t.sums) {
            return Ok(None);
        }
        let mut seen = BTreeSet::new();
        let ranks = 0..program.meta.mesh.world();
        let parts = ranks.map(|rank| map.gradient_parts(rank, &mut seen));
        parts.collect::<Result<_, _>>().map(Some)
    }

    /// Like [`StateLayout::primaries`], for persistent gradients. Empty if gradients do not
    /// persist.
    #[must_use]
    pub(crate) fn primary_grads(&self) -> Vec<(u32, &Span)> {
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

/// Returns the bytes of an access on a rank.
#[must_use]
pub fn resolve(program: &Program, rank: u32, access: &Access) -> Range<u64> {
    let start = access.offset_on(&program.meta.mesh, rank);
    start..start + access.bytes
}

/// Parts of gradients with their parameters.
pub(crate) type GradientParts = Vec<(ParamId, GradientPart)>;

/// A tensor of an optimizer launch.
struct Tensor {
    weight: Access,
    grad: Access,
    /// State: a buffer and maybe that of its scales, for each moment; and the first element there.
    moments: Vec<(BufferId, Option<BufferId>)>,
    base: u64,
    /// Whether the launch adds up pieces of the gradient.
    sums: bool,
}

struct Map<'a> {
    program: &'a Program,
    persistent: BTreeSet<BufferId>,
    contents: Contents<'a>,
    tensors: Vec<Tensor>,
    /// Trained parameters that no step updates, by parameter: those of units that all micro-batches
    /// skip.
    idle: Vec<bool>,
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
            for (state, scales) in &mut t.moments {
                std::iter::once(state).chain(scales).for_each(rest);
            }
        }
        Self {
            idle: idle(program, &tensors),
            tensors,
            program,
            persistent,
            contents: Contents::new(program),
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
                let with_buffer = |buffer: BufferId, base: u64| Span {
                    buffer,
                    offset: base + at * size(buffer),
                    dtype: self.program.buffers[buffer.index()].dtype,
                    ..span.clone()
                };
                let spans = [&mut state.first, &mut state.second];
                for (spans, &(moment, scales)) in spans.into_iter().zip(&t.moments) {
                    spans.push(Span {
                        scales,
                        ..with_buffer(moment, t.base * size(moment))
                    });
                }
                if self.persistent.contains(&t.grad.buffer) && !self.is_counted(span.param) {
                    state.grads.push(with_buffer(t.grad.buffer, grad.start));
                }
                state.master.push(span);
            }
        }
        for &id in &self.persistent {
            let buffer = &self.program.buffers[id.index()];
            let weights = matches!(buffer.role, Role::ModelWeight | Role::MainWeight);
            // Codes follow from the main weights.
            if !weights || buffer.dtype.is_float8() {
                continue;
            }
            for span in self.buffer(rank, id)? {
                let param = span.param.index();
                let fixed = !self.program.params[param].requires_grad || self.idle[param];
                if fixed && !trained.contains(&span.param) {
                    state.master.push(span.clone());
                }
                state.weights.push(span);
            }
        }
        self.keep_main(&mut state.master);
        Ok(state)
    }

    /// Removes the compute weights of idle parameters that have main weights.
    fn keep_main(&self, master: &mut Vec<Span>) {
        let is_main = |s: &Span| {
            let role = self.program.buffers[s.buffer.index()].role;
            role == Role::MainWeight
        };
        let main: BTreeSet<ParamId> = master
            .iter()
            .filter(|s| is_main(s))
            .map(|s| s.param)
            .collect();
        master.retain(|s| !self.idle[s.param.index()] || is_main(s) || !main.contains(&s.param));
    }

    /// Returns the parts of the gradients of a rank's optimizer that hold elements which are not in
    /// `seen`: a parameter, and the first of the elements.
    fn gradient_parts(
        &self,
        rank: u32,
        seen: &mut BTreeSet<(ParamId, u64)>,
    ) -> Result<GradientParts, LayoutError> {
        let mesh = &self.program.meta.mesh;
        let size = |a: &Access| self.program.buffers[a.buffer.index()].dtype.size();
        let mut parts = GradientParts::new();
        for t in &self.tensors {
            let (each, grad) = (size(&t.weight), size(&t.grad));
            let start = t.weight.offset_on(mesh, rank) / each;
            let end = start + t.weight.bytes / each;
            for held in self.contents.of(rank, t.weight.buffer)? {
                let numel = held.elements.end - held.elements.start;
                let first = held.at.max(start);
                let last = (held.at + numel).min(end);
                if first >= last {
                    continue;
                }
                let local = held.elements.start + first - held.at;
                if self.is_counted(held.param) {
                    continue;
                }
                let param = &self.program.params[held.param.index()];
                let runs = param.full_ranges(mesh, rank, local..local + last - first);
                let place = runs.first().map_or(0, |(_, elements)| elements.start);
                if seen.insert((held.param, place)) {
                    let bytes = (first - start) * grad..(last - start) * grad;
                    let part = GradientPart {
                        grad: t.grad,
                        bytes,
                    };
                    parts.push((held.param, part));
                }
            }
        }
        Ok(parts)
    }

    /// Returns whether a parameter has counts in place of a gradient.
    fn is_counted(&self, param: ParamId) -> bool {
        self.program.params[param.index()].router_bias
    }

    /// Returns the spans inside an access, with their distance in elements from its start.
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

    /// Returns the contents of a persistent buffer on a rank, as elements of whole parameters.
    fn buffer(&self, rank: u32, id: BufferId) -> Result<Vec<Span>, LayoutError> {
        let mesh = &self.program.meta.mesh;
        let dtype = self.program.buffers[id.index()].dtype;
        let held = self.contents.of(rank, id)?;
        let spans = held.into_iter().flat_map(|content| {
            let param = &self.program.params[content.param.index()];
            let first = content.elements.start;
            let runs = param.full_ranges(mesh, rank, content.elements.clone());
            // Elements of a packed weight are its bytes, whatever type holds them.
            let (bytes, each) = match param.packed {
                Some(_) => (DType::U8, dtype.size()),
                None => (dtype, 1),
            };
            runs.into_iter().map(move |(at, elements)| Span {
                buffer: id,
                offset: (content.at + at - first) * dtype.size(),
                dtype: bytes,
                scales: None,
                param: content.param,
                elements: elements.start * each..elements.end * each,
            })
        });
        Ok(spans.collect())
    }
}

/// Returns the host buffers that hold buffers which are only temporarily on the device.
fn host_twins(program: &Program) -> BTreeMap<BufferId, BufferId> {
    let copies = program.copies.iter();
    copies
        .filter(|c| c.kind == CopyKind::D2h)
        .map(|c| (c.from.buffer, c.to.buffer))
        .collect()
}

/// Returns which trained parameters no optimizer launch updates, of those that every micro-batch
/// skips.
fn idle(program: &Program, tensors: &[Tensor]) -> Vec<bool> {
    let mut idle = vec![false; program.params.len()];
    for (g, group) in program.groups.iter().enumerate() {
        let unit = &program.units[group.unit.index()];
        let updated =
            tensors
                .iter()
                .any(|t| match program.buffers[t.weight.buffer.index()].holds {
                    Holds::Group(of) => of.index() == g,
                    Holds::Param(p) => group.params.contains(&p),
                    _ => false,
                });
        if unit.skipped_in.len() == usize::from(program.meta.micro_batches) && !updated {
            for p in &group.params {
                idle[p.index()] = true;
            }
        }
    }
    idle
}

/// Returns the tensors of the first step's optimizer launches.
fn tensors(program: &Program) -> Vec<Tensor> {
    let Some(section) = program.section(SectionKind::First) else {
        return Vec::new();
    };
    let mut out = Vec::new();
    for instr in program.section_instrs(section) {
        // A tensor without moments reuses the previous tensor's (a parameter split over several
        // ranges).
        let (mut moments, mut base) = (Vec::new(), 0);
        for tensor in program.updates(&instr.op) {
            let bytes = |a: &Access| program.buffers[a.buffer.index()].dtype == DType::U8;
            if let Some(first) = tensor.state.first() {
                // Scales of 8-bit states follow them.
                let states = if bytes(first) {
                    tensor.state.len() / 2
                } else {
                    tensor.state.len()
                };
                let (states, scales) = tensor.state.split_at(states);
                let scale = |n: usize| scales.get(n).map(|a| a.buffer);
                let pairs = states.iter().enumerate().map(|(n, a)| (a.buffer, scale(n)));
                (moments, base) = (pairs.collect(), 0);
            }
            out.push(Tensor {
                weight: tensor.weight,
                grad: tensor.grad,
                moments: moments.clone(),
                base,
                sums: program.sums_pieces(&instr.op),
            });
            let size = program.buffers[tensor.weight.buffer.index()].dtype.size();
            base += tensor.weight.bytes / size;
        }
    }
    out
}

#[cfg(test)]
mod tests;
