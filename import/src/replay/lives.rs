//! Activations between the kernels of a tape.

use super::modules::Units;
use crate::measured::Activation;
use shardlab_plan::compile::tape::TapeOp;
use shardlab_plan::ir::{DType, ModuleId, Storage, StorageId, StorageRole};
use shardlab_plan::memory::caching::GRANULE;
use shardlab_plan::units::{Bytes, Picos};
use std::cmp::Reverse;

/// Allocations and frees in the order of a tape's kernels.
pub(super) struct Lives {
    /// Operations with the number of the kernel that they precede, in reverse order.
    left: Vec<(usize, TapeOp)>,
    /// Number of kernels that were launched.
    launched: usize,
}

impl Lives {
    /// Places activations between kernels. `issued` are the host times of the kernels, in the order
    /// of the tape.
    ///
    /// Each allocation and each free comes before the kernel that the host launched next. Later
    /// kernels of a unit join the unit's first run, so in the order of the tape a free can come
    /// before its allocation; such a tensor lives during one kernel. Tensors whose allocation and
    /// free no kernel separates are left out. Also returns the storages of the activations.
    pub(super) fn new(
        activations: &[Activation],
        units: &Units,
        element: u64,
        issued: impl Iterator<Item = Picos>,
    ) -> (Self, Vec<Storage>) {
        let gradients = gradients(activations, units, element);
        let kept = activations.iter().zip(gradients).filter(|a| !a.1);
        Self::between(kept.map(|(a, _)| (*a, units.module(a.unit))), issued)
    }

    /// Places activations, with their modules, between kernels that were issued at these times.
    fn between(
        activations: impl Iterator<Item = (Activation, ModuleId)>,
        issued: impl Iterator<Item = Picos>,
    ) -> (Self, Vec<Storage>) {
        let mut issued: Vec<(Picos, usize)> = issued.zip(0..).collect();
        let count = issued.len();
        issued.sort_unstable();
        let next = |at: Picos| {
            let after = issued.partition_point(|k| k.0 < at);
            (after, issued.get(after).map_or(count, |k| k.1))
        };
        let mut storages = Vec::new();
        // Position, host time, and the operation.
        let mut ops: Vec<(usize, Picos, TapeOp)> = Vec::new();
        for (a, module) in activations {
            let ((first, from), (last, to)) = (next(a.from), next(a.to));
            if first == last || from == count {
                continue;
            }
            let to = to.max(from + 1);
            let id = StorageId(storages.len() as u32);
            storages.push(Storage {
                bytes: Bytes(a.bytes),
                dtype: DType::Bf16,
                role: match a.in_forward {
                    true => StorageRole::Saved,
                    false => StorageRole::ActivationGrad,
                },
                module,
            });
            ops.push((from, a.from, TapeOp::Alloc(id)));
            ops.push((to, a.to, TapeOp::Free(id)));
        }
        ops.sort_by_key(|&(position, at, _)| (position, at));
        let lives = Self {
            left: ops.into_iter().rev().map(|(p, _, op)| (p, op)).collect(),
            launched: 0,
        };
        (lives, storages)
    }

    /// Returns the operations before the next kernel of the tape.
    pub(super) fn before_next(&mut self) -> Vec<TapeOp> {
        let at = self.launched;
        self.launched += 1;
        std::iter::from_fn(|| Some(self.left.pop_if(|op| op.0 <= at)?.1)).collect()
    }

    /// Returns the operations after the last kernel.
    pub(super) fn rest(&mut self) -> Vec<TapeOp> {
        let ops = std::mem::take(&mut self.left);
        ops.into_iter().rev().map(|op| op.1).collect()
    }
}

/// Returns which activations are gradients of parameters, which the policy allocates. If the trace
/// does not show that an engine takes them over, the activations of a parameter's size that live
/// longest count as gradients.
fn gradients(activations: &[Activation], units: &Units, element: u64) -> Vec<bool> {
    let mut found: Vec<bool> = activations.iter().map(|a| a.is_gradient).collect();
    if found.contains(&true) {
        return found;
    }
    let mut longest: Vec<usize> = (0..activations.len())
        .filter(|&i| !activations[i].in_forward)
        .collect();
    longest.sort_by_key(|&i| Reverse(activations[i].to - activations[i].from));
    for (m, params) in units.owned.iter().enumerate() {
        for p in params {
            let bytes = units.params[p.index()].numel() * element;
            let bytes = bytes.next_multiple_of(GRANULE);
            let gradient = longest.iter().copied().find(|&i| {
                let a = &activations[i];
                !found[i] && units.module(a.unit).index() == m && a.bytes == bytes
            });
            if let Some(i) = gradient {
                found[i] = true;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three kernels. The host issued the last kernel of the tape second.
    #[test]
    fn tensors_live_between_the_kernels_around_them() {
        let life = |from: u64, to: u64| {
            let activation = Activation {
                bytes: 512,
                unit: 0,
                in_forward: true,
                is_gradient: false,
                from: Picos(from),
                to: Picos(to),
            };
            (activation, ModuleId(0))
        };
        let lives = [
            life(5, 15),
            life(12, 25),
            life(22, 40),
            life(21, 22),
            life(5, 17),
        ];
        let issued = [10, 30, 20].map(Picos);
        let (mut lives, storages) = Lives::between(lives.into_iter(), issued.into_iter());
        let ops = |found: Vec<TapeOp>| -> Vec<(bool, u32)> {
            let id = |op: &TapeOp| match *op {
                TapeOp::Alloc(s) => (true, s.0),
                TapeOp::Free(s) => (false, s.0),
                _ => panic!("{op:?}"),
            };
            found.iter().map(id).collect()
        };
        // No kernel separates the ends of the fourth activation. Frees before the kernel that was
        // issued second come before the third kernel of the tape.
        assert_eq!(storages.len(), 4);
        assert_eq!(ops(lives.before_next()), [(true, 0), (true, 3)]);
        assert_eq!(ops(lives.before_next()), [(true, 2)]);
        assert_eq!(
            ops(lives.before_next()),
            [(true, 1), (false, 0), (false, 3)]
        );
        assert_eq!(ops(lives.rest()), [(false, 1), (false, 2)]);
    }
}
