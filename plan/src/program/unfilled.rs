//! Outputs with other contents than newly computed numbers: outputs whose elements a kernel leaves
//! partly unchanged, and packed weights.

use super::{InstrId, Op, Program};
use crate::ir::{Access, BodyOp, BufferId, Holds, Kernel, Param, ParamId, Place};
use crate::shard::Group;
use std::collections::BTreeSet;

/// Outputs of launches and collectives that may keep elements of the previous contents of memory,
/// or that contain packed weights, whose bytes are not numbers. A NaN check skips them. A NaN among
/// the written elements appears in the results that use them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfilledWrites {
    all: BTreeSet<(InstrId, u8)>,
    /// Outputs of which whole rows are left unchanged.
    rows: BTreeSet<(InstrId, u8)>,
}

impl UnfilledWrites {
    /// Returns whether the `n`th range that a launch or collective writes is one of them.
    #[must_use]
    pub fn contains(&self, instr: InstrId, n: usize) -> bool {
        u8::try_from(n).is_ok_and(|n| self.all.contains(&(instr, n)))
    }

    /// Returns whether the `n`th range that a launch or collective writes keeps whole rows of what
    /// was in memory before: those that no token has reached.
    #[must_use]
    pub(crate) fn leaves_rows(&self, instr: InstrId, n: usize) -> bool {
        u8::try_from(n).is_ok_and(|n| self.rows.contains(&(instr, n)))
    }

    fn insert(&mut self, instr: usize, n: usize, rows: bool) {
        let at = (InstrId(instr as u32), n as u8);
        self.all.insert(at);
        if rows {
            self.rows.insert(at);
        }
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

/// Ranges that have unwritten rows, by their start.
type Ragged = BTreeSet<(BufferId, u64)>;

const fn start(access: &Access) -> (BufferId, u64) {
    (access.buffer, access.offset)
}

fn set(ragged: &mut Ragged, access: &Access, is: bool) {
    if is {
        ragged.insert(start(access));
    } else {
        ragged.remove(&start(access));
    }
}

impl Program {
    /// Returns the outputs that launches do not fill: columns of a wider buffer, and rows that no
    /// token has reached, with everything computed from them (see
    /// [`OpDef::leaves_rows`](crate::ops::OpDef::leaves_rows)).
    #[must_use]
    pub fn unfilled_writes(&self) -> UnfilledWrites {
        let mut found = UnfilledWrites::default();
        let mut ragged = Ragged::new();
        for (i, instr) in self.instrs.iter().enumerate() {
            match &instr.op {
                op @ Op::Launch { kernel, .. } => {
                    let kernel = &self.kernels[kernel.index()];
                    let reads = self.reads(op).iter();
                    let read: Vec<bool> = reads.map(|a| ragged.contains(&start(a))).collect();
                    let rows = ragged_writes(kernel, &read, self.writes(op).len());
                    for (n, (access, rows)) in self.writes(op).iter().zip(rows).enumerate() {
                        let rows = rows || kernel.used_rows.is_some();
                        set(&mut ragged, access, rows);
                        let packed = self.is_packed(access.buffer);
                        if rows || packed || !kernel.fills(n) {
                            found.insert(i, n, rows);
                        }
                    }
                }
                Op::Collective { id, .. } => {
                    let c = &self.collectives[id.index()];
                    for (n, part) in c.parts.iter().enumerate() {
                        let is = c.sent.is_some() || ragged.contains(&start(&part.input));
                        set(&mut ragged, &part.output, is);
                        if is || self.is_packed(part.output.buffer) {
                            found.insert(i, n, is);
                        }
                    }
                }
                Op::Copy { id, .. } => {
                    let copy = &self.copies[id.index()];
                    let is = ragged.contains(&start(&copy.from));
                    set(&mut ragged, &copy.to, is);
                }
                _ => {}
            }
        }
        found
    }

    /// Returns whether a buffer contains numbers of at least 16 bits, which a NaN check can read.
    pub(crate) fn has_numbers(&self, buffer: BufferId) -> bool {
        self.buffers[buffer.index()].dtype.is_float() && !self.is_packed(buffer)
    }

    /// Returns whether a buffer contains packed weights.
    fn is_packed(&self, buffer: BufferId) -> bool {
        is_packed(
            self.buffers[buffer.index()].holds,
            &self.params,
            &self.groups,
        )
    }
}

/// Returns whether a buffer with these contents contains packed weights.
pub(crate) fn is_packed(holds: Holds, params: &[Param], groups: &[Group]) -> bool {
    let packed = |p: &ParamId| params[p.index()].packed.is_some();
    match holds {
        Holds::Param(p) => packed(&p),
        Holds::Group(g) => groups[g.index()].params.iter().any(packed),
        Holds::Storage(_) | Holds::Const(_) | Holds::Named(_) => false,
    }
}

/// Returns for each output of a kernel whether some of its rows stay unwritten, given the same for
/// its inputs.
fn ragged_writes(kernel: &Kernel, read: &[bool], writes: usize) -> Vec<bool> {
    let mut write = vec![false; writes];
    let mut registers = BTreeSet::new();
    for BodyOp {
        op,
        inputs,
        outputs,
    } in &kernel.body
    {
        let of = |place| match place {
            Place::Read(n) => read.get(usize::from(n)).copied().unwrap_or(false),
            Place::Write(n) => write.get(usize::from(n)).copied().unwrap_or(false),
            Place::Register(n) => registers.contains(&n),
        };
        let ragged = inputs.iter().any(|slot| of(slot.place));
        let leaves = op.def().leaves_rows(ragged);
        for slot in outputs {
            match slot.place {
                Place::Write(n) => {
                    if let Some(at) = write.get_mut(usize::from(n)) {
                        *at |= leaves;
                    }
                }
                Place::Register(n) if leaves => {
                    registers.insert(n);
                }
                Place::Register(n) => {
                    registers.remove(&n);
                }
                Place::Read(_) => {}
            }
        }
    }
    write
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unfilled(overrides: &[&str]) -> Vec<String> {
        let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
        let scenario = crate::scenario::load(std::path::Path::new("small-moe-ep"), &overrides);
        let program = crate::plan(&scenario.unwrap()).unwrap();
        let mut names: Vec<String> = program
            .unfilled_writes()
            .all
            .iter()
            .map(|(instr, _)| match program.instrs[instr.index()].op {
                Op::Launch { kernel, .. } => program.kernels[kernel.index()].name.clone(),
                Op::Collective { id, .. } => {
                    let kind = program.collectives[id.index()].kind;
                    kind.name().to_owned()
                }
                _ => unreachable!("copies of activations stay whole here"),
            })
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    #[test]
    fn what_experts_compute_of_other_ranks_choices_is_unfilled() {
        let names = unfilled(&[]);
        for name in ["local_experts", "permute", "grouped_mm", "scale_rows"] {
            assert!(names.iter().any(|n| n == name), "{name} of {names:?}");
        }
        // The results of tokens and the gradients of weights are complete.
        for name in ["unpermute", "grouped_mm_weight_backward", "mm"] {
            assert!(!names.iter().any(|n| n == name), "{name} of {names:?}");
        }
    }

    #[test]
    fn places_without_a_choice_travel_unfilled() {
        let names = unfilled(&["moe.dispatcher=padded"]);
        for name in ["dispatch_experts", "all_to_all", "permute", "grouped_mm"] {
            assert!(names.iter().any(|n| n == name), "{name} of {names:?}");
        }
        for name in ["unpermute", "grouped_mm_weight_backward", "reduce_scatter"] {
            assert!(!names.iter().any(|n| n == name), "{name} of {names:?}");
        }
    }

    #[test]
    fn rows_that_are_not_pushed_are_unfilled() {
        let names = unfilled(&["moe.dispatcher=peer", "train.recompute=full"]);
        for name in ["peer_push", "peer_return", "permute", "grouped_mm"] {
            assert!(names.iter().any(|n| n == name), "{name} of {names:?}");
        }
        for name in ["unpermute", "pushed_rows", "grouped_mm_weight_backward"] {
            assert!(!names.iter().any(|n| n == name), "{name} of {names:?}");
        }
    }

    #[test]
    fn experts_of_one_rank_fill_all_rows() {
        let names = unfilled(&["mesh.ep=1"]);
        assert!(!names.iter().any(|n| n == "grouped_mm"), "{names:?}");
    }
}
