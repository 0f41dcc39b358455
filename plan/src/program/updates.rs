//! The elements that the optimizer's launches update.

use super::contents::{Contents, NoSlice};
use super::{Op, Program};
use crate::ir::{Access, DType, InstrId, KernelClass, OpKind, ParamId, Role, Shape, ShardOp};
use std::collections::BTreeMap;

/// A tensor of an optimizer launch.
#[derive(Clone, Copy, Debug)]
pub struct Updated<'a> {
    /// Position of the weight among the launch's reads. The gradient follows it.
    pub read: usize,
    /// Weights.
    pub weight: Access,
    /// Gradients.
    pub grad: Access,
    /// State. A tensor without state continues that of the previous tensor.
    pub state: &'a [Access],
}

/// Adjacent weights of a launch in the same parameter group of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRun {
    /// Group.
    pub group: u8,
    /// Elements.
    pub numel: u64,
}

/// Adjacent weights of a rank's shard that are cast with the same scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleRun {
    /// Index of the scale among those that the launch reads, or of the maximum among those that it
    /// writes; `None` for padding.
    pub scale: Option<u32>,
    /// Elements.
    pub numel: u64,
}

/// Adjacent weights of a launch that belong to one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixRun {
    /// The matrix; `None` for padding.
    pub param: Option<ParamId>,
    /// Elements.
    pub numel: u64,
}

impl Program {
    /// Returns the tensors that an instruction updates. Empty unless it launches an optimizer.
    #[must_use]
    pub fn updates(&self, op: &Op) -> Vec<Updated<'_>> {
        let Op::Launch { kernel, .. } = *op else {
            return Vec::new();
        };
        if self.kernels[kernel.index()].class != KernelClass::Optimizer {
            return Vec::new();
        }
        let reads = self.reads(op);
        let is_state = |a: &&Access| self.buffers[a.buffer.index()].role == Role::OptimizerState;
        let mut found = Vec::new();
        let mut at = 0;
        // The last read may be a scalar, which clips all gradients and has no partner.
        while let [weight, grad, rest @ ..] = &reads[at..] {
            let state = &rest[..rest.iter().take_while(is_state).count()];
            found.push(Updated {
                read: at,
                weight: *weight,
                grad: *grad,
                state,
            });
            at += 2 + state.len();
        }
        found
    }

    /// Returns whether an instruction launches an optimizer that sums pieces of gradients, whose
    /// sums do not exist elsewhere.
    #[must_use]
    pub fn sums_pieces(&self, op: &Op) -> bool {
        let update = self.shard_op(op).and_then(ShardOp::update);
        update.is_some_and(|u| u.fused.pieces.is_some())
    }

    /// Returns whether an instruction moves biases of routers, and so reads counts in place of
    /// gradients.
    #[must_use]
    pub fn moves_router_biases(&self, op: &Op) -> bool {
        let update = self.shard_op(op).and_then(ShardOp::update);
        update.is_some_and(|u| !u.rule.has_gradients())
    }

    /// Returns, by launch of an optimizer or of [`ShardOp::MuonApply`], the parameter groups of its
    /// weights on a rank, tensor by tensor. Padding is in group 0. Empty if there is one group.
    ///
    /// # Errors
    /// Returns [`NoSlice`] if the size of a buffer is not that of a slice of its group.
    pub fn group_runs(&self, rank: u32) -> Result<BTreeMap<InstrId, Vec<GroupRun>>, NoSlice> {
        let mut all = BTreeMap::new();
        if self.params.iter().all(|p| p.group == 0) {
            return Ok(all);
        }
        let contents = Contents::new(self);
        let group_of = |p: Option<ParamId>| p.map_or(0, |p| self.params[p.index()].group);
        for (i, instr) in self.instrs.iter().enumerate() {
            let mut runs = Vec::new();
            let weights: Vec<Access> = match self.shard_op(&instr.op) {
                Some(ShardOp::MuonApply { .. }) => self.reads(&instr.op)[..1].to_vec(),
                _ => {
                    let updates = self.updates(&instr.op);
                    updates.iter().map(|u| u.weight).collect()
                }
            };
            for weight in &weights {
                self.runs_of(&contents, rank, weight, group_of, &mut runs)?;
            }
            let runs = runs.into_iter();
            let runs: Vec<_> = runs
                .map(|(group, numel)| GroupRun { group, numel })
                .collect();
            if !runs.is_empty() {
                all.insert(InstrId(i as u32), runs);
            }
        }
        Ok(all)
    }

    /// Returns, by launch that computes maxima ([`ShardOp::ShardAmax`], or an optimizer) or casts a
    /// shard ([`ShardOp::ShardCast`]), the scales of its weights on a rank.
    ///
    /// # Errors
    /// Returns [`NoSlice`] if the size of a buffer is not that of a slice of its group.
    pub fn scale_runs(&self, rank: u32) -> Result<BTreeMap<InstrId, Vec<ScaleRun>>, NoSlice> {
        let mut all = BTreeMap::new();
        let params = self
            .groups
            .iter()
            .flat_map(|g| g.params.iter().zip(&g.scales));
        let scales: BTreeMap<ParamId, u32> = params
            .filter_map(|(p, scale)| Some((*p, (*scale)?)))
            .collect();
        if scales.is_empty() {
            return Ok(all);
        }
        let contents = Contents::new(self);
        for (i, instr) in self.instrs.iter().enumerate() {
            let (reads, writes) = (self.reads(&instr.op), self.writes(&instr.op));
            let (weights, slots): (Vec<Access>, _) = match self.shard_op(&instr.op) {
                Some(ShardOp::ShardAmax { .. }) => (reads.to_vec(), writes.last()),
                Some(ShardOp::ShardCast { .. }) => (reads[..1].to_vec(), reads.get(1)),
                Some(op) if op.update().is_some_and(|u| u.fused.maxima) => {
                    let updates = self.updates(&instr.op);
                    (updates.iter().map(|u| u.weight).collect(), writes.last())
                }
                _ => continue,
            };
            let first = slots.map_or(0, |at| at.offset / DType::F32.size()) as u32;
            let number = |p: ParamId| scales.get(&p)?.checked_sub(first);
            let scale_of = |p: Option<ParamId>| p.and_then(number);
            let mut runs = Vec::new();
            for weight in &weights {
                self.runs_of(&contents, rank, weight, scale_of, &mut runs)?;
            }
            let runs = runs.into_iter();
            let runs = runs.map(|(scale, numel)| ScaleRun { scale, numel });
            all.insert(InstrId(i as u32), runs.collect());
        }
        Ok(all)
    }

    /// Returns, by launch of [`ShardOp::Muon`] or of an operation on blocks
    /// ([`ShardOp::ShardCastBlocks`], [`ShardOp::ShardBlockAmax`]), the matrices of its weights on
    /// a rank, tensor by tensor. Muon has whole matrices, the others may have some of their rows.
    ///
    /// # Errors
    /// Returns [`NoSlice`] if the size of a buffer is not that of a slice of its group.
    pub fn matrix_runs(&self, rank: u32) -> Result<BTreeMap<InstrId, Vec<MatrixRun>>, NoSlice> {
        let mut all = BTreeMap::new();
        let contents = Contents::new(self);
        for (i, instr) in self.instrs.iter().enumerate() {
            let weights: Vec<Access> = match self.shard_op(&instr.op) {
                Some(ShardOp::Muon { .. }) => {
                    let updates = self.updates(&instr.op);
                    updates.iter().map(|u| u.weight).collect()
                }
                Some(ShardOp::ShardCastBlocks { .. } | ShardOp::ShardBlockAmax { .. }) => {
                    self.reads(&instr.op)[..1].to_vec()
                }
                _ => continue,
            };
            let mut runs = Vec::new();
            for weight in &weights {
                self.runs_of(&contents, rank, weight, |p| p, &mut runs)?;
            }
            let runs = runs.into_iter();
            let runs = runs.map(|(param, numel)| MatrixRun { param, numel });
            all.insert(InstrId(i as u32), runs.collect());
        }
        Ok(all)
    }

    /// Returns, by the launches of [`Program::matrix_runs`], the shapes of the matrices, or of
    /// their rows, on a rank in the order of its weights. Padding counts as a vector.
    ///
    /// # Errors
    /// Returns [`NoSlice`] if the size of a buffer is not that of a slice of its group.
    pub fn matrix_shapes(&self, rank: u32) -> Result<BTreeMap<InstrId, Vec<Shape>>, NoSlice> {
        let shape = |run: &MatrixRun| match run.param.map(|p| &self.params[p.index()]) {
            Some(param) if param.numel() == run.numel => param.shape.clone(),
            Some(param) => {
                let cols = param.shape.last().copied().unwrap_or(1).max(1);
                Shape::from_slice(&[run.numel / cols, cols])
            }
            None => Shape::from_slice(&[run.numel]),
        };
        let all = self.matrix_runs(rank)?.into_iter();
        Ok(all
            .map(|(id, runs)| (id, runs.iter().map(shape).collect()))
            .collect())
    }

    /// Returns the sharding operation that an instruction launches, if it launches one.
    pub(crate) fn shard_op(&self, op: &Op) -> Option<ShardOp> {
        let Op::Launch { kernel, .. } = *op else {
            return None;
        };
        match self.kernels[kernel.index()].body.first()?.op {
            OpKind::Shard(op) => Some(op),
            _ => None,
        }
    }

    /// Appends what `of` returns for the parameters in a range of weights, with the number of
    /// elements; `None` is padding.
    fn runs_of<K: Copy + PartialEq>(
        &self,
        contents: &Contents<'_>,
        rank: u32,
        weight: &Access,
        of: impl Fn(Option<ParamId>) -> K,
        runs: &mut Vec<(K, u64)>,
    ) -> Result<(), NoSlice> {
        let mut push = |key: K, numel: u64| match runs.last_mut() {
            Some(last) if last.0 == key => last.1 += numel,
            _ if numel > 0 => runs.push((key, numel)),
            _ => {}
        };
        let size = self.buffers[weight.buffer.index()].dtype.size();
        let start = weight.offset_on(&self.meta.mesh, rank) / size;
        let end = start + weight.bytes / size;
        let mut at = start;
        for held in contents.of(rank, weight.buffer)? {
            let numel = held.elements.end - held.elements.start;
            let (first, last) = (held.at.max(at), (held.at + numel).min(end));
            if first < last {
                push(of(None), first - at);
                push(of(Some(held.param)), last - first);
                at = last;
            }
        }
        push(of(None), end - at);
        Ok(())
    }
}
