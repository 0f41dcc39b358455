//! What the launches of the optimizer update.

use super::contents::{Contents, NoSlice};
use super::{Op, Program};
use crate::ir::{Access, InstrId, KernelClass, OpKind, Role};
use std::collections::BTreeMap;

/// A tensor of an optimizer launch.
#[derive(Clone, Copy, Debug)]
pub struct Updated<'a> {
    /// Position of the weight among the launch's reads; the gradient follows it.
    pub read: usize,
    /// Weights.
    pub weight: Access,
    /// Gradients.
    pub grad: Access,
    /// State. A tensor without state continues that of the tensor before it.
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

impl Program {
    /// Returns the tensors that an instruction updates, or none unless it launches an optimizer.
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
        // The last read may be a scalar: it clips all gradients and has no partner.
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

    /// Returns whether an instruction launches an optimizer that adds up pieces of gradients, which
    /// exist nowhere else as sums.
    #[must_use]
    pub fn sums_pieces(&self, op: &Op) -> bool {
        let Op::Launch { kernel, .. } = *op else {
            return false;
        };
        let op = self.kernels[kernel.index()].body.first().map(|b| b.op);
        let update = match op {
            Some(OpKind::Shard(op)) => op.update(),
            _ => None,
        };
        update.is_some_and(|u| u.pieces.is_some())
    }

    /// Returns, by launch of an optimizer, the parameter groups of its weights on a rank, tensor by
    /// tensor. Padding is in group 0. Empty if there is one group only.
    ///
    /// # Errors
    /// [`NoSlice`].
    pub fn group_runs(&self, rank: u32) -> Result<BTreeMap<InstrId, Vec<GroupRun>>, NoSlice> {
        let mut all = BTreeMap::new();
        if self.params.iter().all(|p| p.group == 0) {
            return Ok(all);
        }
        let contents = Contents::new(self);
        for (i, instr) in self.instrs.iter().enumerate() {
            let mut runs = Vec::new();
            for tensor in self.updates(&instr.op) {
                self.runs_of(&contents, rank, &tensor.weight, &mut runs)?;
            }
            if !runs.is_empty() {
                all.insert(InstrId(i as u32), runs);
            }
        }
        Ok(all)
    }

    fn runs_of(
        &self,
        contents: &Contents<'_>,
        rank: u32,
        weight: &Access,
        runs: &mut Vec<GroupRun>,
    ) -> Result<(), NoSlice> {
        let mut push = |group: u8, numel: u64| match runs.last_mut() {
            Some(last) if last.group == group => last.numel += numel,
            _ if numel > 0 => runs.push(GroupRun { group, numel }),
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
                push(0, first - at);
                push(self.params[held.param.index()].group, last - first);
                at = last;
            }
        }
        push(0, end - at);
        Ok(())
    }
}
