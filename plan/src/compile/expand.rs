//! Repeats a middle block: derives the tape of a deep model from that of a shallow one.
//!
//! In a run of equal blocks, all blocks but the first two and the last two have the same code. So a
//! tape with five blocks is sufficient: the third is repeated for every block in between, with
//! renumbered modules, parameters and storages. A model has one run, or two if only its first
//! blocks are recomputed. A repeated block may refer only to its own storages and to those of its
//! neighbors. If that does not hold, or if blocks differ, the caller builds the whole tape op by
//! op.

use super::tape::{Tape, TapeOp};
use crate::ir::{ModuleId, Operand, ParamId, Source, Storage, StorageId};
use crate::models::declare::Blocks;
use std::cmp::Ordering;
use std::ops::Range;

/// Most blocks of a run that the shallow model has.
const RUN: u32 = 5;
/// The block of such a run that is repeated.
const MIDDLE: u32 = 2;
/// Owner of what belongs to no block.
const NOBODY: u32 = u32::MAX;

/// Which block of a shallow model stands for each block of a deep one.
#[derive(Clone, Debug)]
pub(super) struct StandIns {
    /// Block of the shallow model, by block of the deep one.
    of: Vec<u32>,
    /// Block of the deep model, by block of the shallow one; `None` for those that are repeated.
    only: Vec<Option<u32>>,
}

impl StandIns {
    /// Shortens runs of alike blocks, in the order of the model.
    pub(super) fn new(runs: &[u32]) -> Self {
        let (mut of, mut only) = (Vec::new(), Vec::new());
        for &run in runs {
            let (start, first) = (of.len() as u32, only.len() as u32);
            let more = run.saturating_sub(RUN);
            let stand_in = |i: u32| match more {
                0 => i,
                _ => i.min(MIDDLE).max((i + RUN).saturating_sub(run)),
            };
            of.extend((0..run).map(|i| first + stand_in(i)));
            only.extend((0..run - more).map(|i| match i.cmp(&MIDDLE) {
                _ if more == 0 => Some(start + i),
                Ordering::Less => Some(start + i),
                Ordering::Equal => None,
                Ordering::Greater => Some(start + i + more),
            }));
        }
        Self { of, only }
    }

    /// Returns the number of blocks of the shallow model.
    pub(super) fn shallow(&self) -> u32 {
        self.only.len() as u32
    }

    /// Returns the number of blocks of the deep model.
    pub(super) fn deep(&self) -> u32 {
        self.of.len() as u32
    }

    /// Returns the number of blocks of the shallow model that stand for the first `blocks` of the
    /// deep one, which end a run.
    pub(super) fn shortened(&self, blocks: u32) -> u32 {
        let last = blocks.checked_sub(1).map(|last| self.of[last as usize]);
        last.map_or(0, |last| last + 1)
    }

    fn is_repeated(&self, block: u32) -> bool {
        self.only[block as usize].is_none()
    }
}

/// Expands the tape of the shallow model, which has these blocks, to the deep one; `None` if it
/// does not repeat.
pub(super) fn expand(t: &Tape, blocks: Blocks, stand_ins: &StandIns) -> Option<Tape> {
    let mut e = Expander::new(t, blocks, stand_ins)?;
    let forward = e.phase(&t.forward, false)?;
    let backward = e.phase(&t.backward, true)?;
    let find = |e: &Expander<'_>, of: Option<StorageId>| match of {
        Some(s) => Some(Some(e.storage(s, None)?)),
        None => Some(None),
    };
    let loss = find(&e, t.loss)?;
    let eval = e.phase(&t.eval, false)?;
    let eval_loss = find(&e, t.eval_loss)?;
    Some(Tape {
        consts: t.consts.clone(),
        kernels: t.kernels.clone(),
        forward,
        backward,
        eval,
        loss,
        eval_loss,
        ..e.out
    })
}

struct Expander<'t> {
    t: &'t Tape,
    out: Tape,
    blocks: Blocks,
    stand_ins: &'t StandIns,
    /// Block that owns a storage, and the storage's number within the block.
    local: Vec<(u32, u32)>,
    /// First entry of each block of the deep model in `ids`; the last one is for storages outside
    /// blocks.
    base: Vec<u32>,
    /// Storage of the deep model by block and number.
    ids: Vec<StorageId>,
}

/// Block for which a part of the tape is written: `(block of the shallow model, of the deep one)`.
type At = Option<(u32, u32)>;

impl<'t> Expander<'t> {
    fn new(t: &'t Tape, blocks: Blocks, stand_ins: &'t StandIns) -> Option<Self> {
        let (layers, shallow) = (stand_ins.deep(), stand_ins.shallow());
        // The last entry counts the storages outside of blocks.
        let mut counts = vec![0u32; shallow as usize + 1];
        let local: Vec<(u32, u32)> = t
            .storages
            .iter()
            .map(|s| {
                let owner = blocks.block_of(s.module).unwrap_or(NOBODY);
                let count = &mut counts[owner.min(shallow) as usize];
                *count += 1;
                (owner, *count - 1)
            })
            .collect();
        let same = |of: u32| {
            let near = &counts[of as usize - 1..=of as usize + 1];
            near.iter().all(|c| *c == near[0])
        };
        if !(0..shallow).all(|b| !stand_ins.is_repeated(b) || same(b)) {
            return None;
        }
        let mut base = Vec::with_capacity(layers as usize + 1);
        let mut total = 0;
        for &block in &stand_ins.of {
            base.push(total);
            total += counts[block as usize];
        }
        base.push(total);
        total += counts[shallow as usize];
        let ids = vec![StorageId(u32::MAX); total as usize];
        let factor = (layers / shallow) as usize + 1;
        let out = Tape {
            storages: Vec::with_capacity(t.storages.len() * factor),
            operands: Vec::with_capacity(t.operands.len() * factor),
            ..Tape::default()
        };
        Some(Self {
            t,
            out,
            blocks,
            stand_ins,
            local,
            base,
            ids,
        })
    }

    /// Writes a phase: what comes before the blocks, each block, what comes after.
    fn phase(&mut self, ops: &[TapeOp], reversed: bool) -> Option<Vec<TapeOp>> {
        let (layers, shallow) = (self.stand_ins.deep(), self.stand_ins.shallow());
        let module = |b: u32| ModuleId(self.blocks.module + b * self.blocks.modules);
        let order: Vec<u32> = if reversed {
            (0..shallow).rev().collect()
        } else {
            (0..shallow).collect()
        };
        let mut starts = Vec::with_capacity(order.len() + 1);
        for &b in &order {
            // Reentrant recompute comes before the block is entered.
            let first = [TapeOp::Enter(module(b)), TapeOp::EnterRecompute(module(b))];
            starts.push(ops.iter().position(|op| first.contains(op))?);
        }
        let last = module(order[order.len() - 1]);
        starts.push(ops.iter().position(|op| *op == TapeOp::Exit(last))? + 1);
        if !starts.is_sorted() {
            return None;
        }
        let piece = |b: u32| -> Range<usize> {
            let i = if reversed { shallow - 1 - b } else { b } as usize;
            starts[i]..starts[i + 1]
        };
        let factor = (layers / shallow) as usize + 1;
        let mut out = Vec::with_capacity(ops.len() * factor);
        self.copy(&ops[..starts[0]], None, &mut out)?;
        for i in 0..layers {
            let layer = if reversed { layers - 1 - i } else { i };
            let b = self.stand_ins.of[layer as usize];
            self.copy(&ops[piece(b)], Some((b, layer)), &mut out)?;
        }
        self.copy(&ops[starts[shallow as usize]..], None, &mut out)?;
        Some(out)
    }

    fn copy(&mut self, ops: &[TapeOp], at: At, out: &mut Vec<TapeOp>) -> Option<()> {
        for op in ops {
            out.push(match *op {
                TapeOp::Enter(m) => TapeOp::Enter(self.module(m, at)?),
                TapeOp::Exit(m) => TapeOp::Exit(self.module(m, at)?),
                TapeOp::EnterStage { stage, layer } => TapeOp::EnterStage {
                    stage,
                    layer: self.module(layer, at)?,
                },
                TapeOp::EnterRecompute(m) => TapeOp::EnterRecompute(self.module(m, at)?),
                TapeOp::ExitRecompute(m) => TapeOp::ExitRecompute(self.module(m, at)?),
                TapeOp::Alloc(s) => TapeOp::Alloc(self.alloc(s, at)?),
                TapeOp::Free(s) => {
                    self.repeats(s, at)?;
                    TapeOp::Free(self.storage(s, at)?)
                }
                TapeOp::Launch {
                    kernel,
                    reads,
                    writes,
                    end,
                } => {
                    let shift = self.operands(reads..end, at)?;
                    let (writes, end) = (shift + writes - reads, shift + end - reads);
                    TapeOp::Launch {
                        kernel,
                        reads: shift,
                        writes,
                        end,
                    }
                }
                TapeOp::Collective {
                    collective,
                    dtype,
                    operands,
                } => TapeOp::Collective {
                    collective,
                    dtype,
                    operands: self.operands(operands..operands + collective.operands(), at)?,
                },
                TapeOp::HostSizes { operand } => TapeOp::HostSizes {
                    operand: self.operands(operand..operand + 1, at)?,
                },
                TapeOp::Host { .. } | TapeOp::HostRead | TapeOp::ExitStage => *op,
                TapeOp::GradReady(p) => TapeOp::GradReady(self.param(p, at)?),
            });
        }
        Some(())
    }

    /// Copies operands; returns where the copies start.
    fn operands(&mut self, of: Range<u32>, at: At) -> Option<u32> {
        let first = self.out.operands.len() as u32;
        for o in &self.t.operands[of.start as usize..of.end as usize] {
            let source = match o.source {
                Source::Storage(s) => Source::Storage(self.neighbour(s, at)?),
                Source::Param(p) => Source::Param(self.param(p, at)?),
                Source::Scale(p) => Source::Scale(self.param(p, at)?),
                Source::ColumnCodes(p) => Source::ColumnCodes(self.param(p, at)?),
                Source::ColumnScale(p) => Source::ColumnScale(self.param(p, at)?),
                Source::Grad(p) => Source::Grad(self.param(p, at)?),
                Source::Const(c) => Source::Const(c),
            };
            self.out.operands.push(Operand { source, ..*o });
        }
        Some(first)
    }

    /// Checks that a repeated part allocates and frees only storages of its own and adjacent
    /// blocks.
    fn repeats(&self, s: StorageId, at: At) -> Option<()> {
        let owner = self.local[s.index()].0;
        match at {
            Some((here, _)) if self.stand_ins.is_repeated(here) => {
                (owner != NOBODY && owner.abs_diff(here) <= 1).then_some(())
            }
            _ => Some(()),
        }
    }

    /// Returns a storage that a part of the tape reads or writes. A repeated part refers to its own
    /// and adjacent blocks, and to what belongs to none.
    fn neighbour(&self, s: StorageId, at: At) -> Option<StorageId> {
        let owner = self.local[s.index()].0;
        match at {
            Some((here, _)) if self.stand_ins.is_repeated(here) => {
                (owner == NOBODY || owner.abs_diff(here) <= 1).then_some(())?;
            }
            _ => {}
        }
        self.storage(s, at)
    }

    fn alloc(&mut self, s: StorageId, at: At) -> Option<StorageId> {
        self.repeats(s, at)?;
        let id = StorageId(self.out.storages.len() as u32);
        let storage = &self.t.storages[s.index()];
        let module = self.module(storage.module, at)?;
        self.out.storages.push(Storage {
            module,
            ..storage.clone()
        });
        let entry = self.entry(s, at)?;
        self.ids[entry] = id;
        Some(id)
    }

    fn storage(&self, s: StorageId, at: At) -> Option<StorageId> {
        Some(self.ids[self.entry(s, at)?])
    }

    fn entry(&self, s: StorageId, at: At) -> Option<usize> {
        let (owner, local) = self.local[s.index()];
        let base = if owner == NOBODY {
            self.stand_ins.deep()
        } else {
            self.layer(owner, at)?
        };
        Some((self.base[base as usize] + local) as usize)
    }

    /// Returns the deep model's block that `block` of the shallow one stands for here; `None` if it
    /// stands for several, none of which is near.
    fn layer(&self, block: u32, at: At) -> Option<u32> {
        match at {
            Some((here, layer)) if block.abs_diff(here) <= 1 => Some(layer + block - here),
            _ => self.stand_ins.only[block as usize],
        }
    }

    fn module(&self, m: ModuleId, at: At) -> Option<ModuleId> {
        let b = self.blocks;
        Some(ModuleId(self.renumber(m.0, b.module, b.modules, at)?))
    }

    fn param(&self, p: ParamId, at: At) -> Option<ParamId> {
        let b = self.blocks;
        Some(ParamId(self.renumber(p.0, b.param, b.params, at)?))
    }

    /// Renumbers an entry of a table in which blocks take `size` entries each from `first` on.
    fn renumber(&self, id: u32, first: u32, size: u32, at: At) -> Option<u32> {
        if id < first || size == 0 {
            return Some(id);
        }
        let (block, local) = ((id - first) / size, (id - first) % size);
        let (deep, shallow) = (self.stand_ins.deep(), self.stand_ins.shallow());
        if block >= shallow {
            return Some(id + (deep - shallow) * size);
        }
        Some(first + self.layer(block, at)? * size + local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_shortened_to_five_blocks() {
        let two = StandIns::new(&[7, 6]);
        assert_eq!(two.of, [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 7, 8, 9]);
        let only = [
            Some(0),
            Some(1),
            None,
            Some(5),
            Some(6),
            Some(7),
            Some(8),
            None,
            Some(11),
            Some(12),
        ];
        assert_eq!(two.only, only);
        let short = StandIns::new(&[1, 5, 6]);
        assert_eq!(short.of, [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]);
        assert_eq!((short.shallow(), short.deep()), (11, 12));
    }
}
