//! Repeats a middle block: the tape of a deep model from that of a shallow one.
//!
//! Blocks other than the first and last two are alike, so a tape of five blocks contains
//! everything: block 2 is written again for every block in between, with modules, parameters and
//! storages renumbered. A block refers only to its own storages and its neighbours'. Where that
//! does not hold (or blocks differ), the caller builds the whole tape op by op.

use super::tape::{Tape, TapeOp};
use crate::ir::{ModuleId, Operand, ParamId, Source, Storage, StorageId};
use crate::models::declare::Blocks;
use std::ops::Range;

/// Number of blocks of the shallow model.
pub(super) const SHALLOW: u32 = 5;
/// The block that is repeated.
const MIDDLE: u32 = 2;
/// Owner of what belongs to no block.
const NOBODY: u32 = u32::MAX;

/// Returns the block of the shallow model that represents block `layer` of `layers`.
pub(super) fn stand_in(layer: u32, layers: u32) -> u32 {
    match layers - layer {
        1 => SHALLOW - 1,
        2 => SHALLOW - 2,
        _ => layer.min(MIDDLE),
    }
}

/// Expands the tape to a model of `layers` blocks (more than [`SHALLOW`]); `None` if the shallow
/// tape does not repeat.
pub(super) fn expand(t: &Tape, blocks: Blocks, layers: u32) -> Option<Tape> {
    let mut e = Expander::new(t, blocks, layers)?;
    let forward = e.phase(&t.forward, false)?;
    let backward = e.phase(&t.backward, true)?;
    let loss = t.loss.map(|s| e.storage(s, None));
    let eval = e.phase(&t.eval, false)?;
    let eval_loss = t.eval_loss.map(|s| e.storage(s, None));
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
    layers: u32,
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
    fn new(t: &'t Tape, blocks: Blocks, layers: u32) -> Option<Self> {
        let mut counts = [0u32; SHALLOW as usize + 1];
        let local: Vec<(u32, u32)> = t
            .storages
            .iter()
            .map(|s| {
                let owner = blocks.block_of(s.module).unwrap_or(NOBODY);
                let count = &mut counts[owner.min(SHALLOW) as usize];
                *count += 1;
                (owner, *count - 1)
            })
            .collect();
        let middle = counts[MIDDLE as usize];
        if counts[MIDDLE as usize - 1] != middle || counts[MIDDLE as usize + 1] != middle {
            return None;
        }
        let mut base = Vec::with_capacity(layers as usize + 1);
        let mut total = 0;
        for layer in 0..layers {
            base.push(total);
            total += counts[stand_in(layer, layers) as usize];
        }
        base.push(total);
        total += counts[SHALLOW as usize];
        let ids = vec![StorageId(u32::MAX); total as usize];
        let factor = layers as usize / SHALLOW as usize + 1;
        let out = Tape {
            storages: Vec::with_capacity(t.storages.len() * factor),
            operands: Vec::with_capacity(t.operands.len() * factor),
            ..Tape::default()
        };
        Some(Self {
            t,
            out,
            blocks,
            layers,
            local,
            base,
            ids,
        })
    }

    /// Writes a phase: what comes before the blocks, each block, what comes after.
    fn phase(&mut self, ops: &[TapeOp], reversed: bool) -> Option<Vec<TapeOp>> {
        let module = |b: u32| ModuleId(self.blocks.module + b * self.blocks.modules);
        let order: Vec<u32> = if reversed {
            (0..SHALLOW).rev().collect()
        } else {
            (0..SHALLOW).collect()
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
            let i = if reversed { SHALLOW - 1 - b } else { b } as usize;
            starts[i]..starts[i + 1]
        };
        let factor = self.layers as usize / SHALLOW as usize + 1;
        let mut out = Vec::with_capacity(ops.len() * factor);
        self.copy(&ops[..starts[0]], None, &mut out)?;
        for i in 0..self.layers {
            let layer = if reversed { self.layers - 1 - i } else { i };
            let b = stand_in(layer, self.layers);
            self.copy(&ops[piece(b)], Some((b, layer)), &mut out)?;
        }
        self.copy(&ops[starts[SHALLOW as usize]..], None, &mut out)?;
        Some(out)
    }

    fn copy(&mut self, ops: &[TapeOp], at: At, out: &mut Vec<TapeOp>) -> Option<()> {
        for op in ops {
            out.push(match *op {
                TapeOp::Enter(m) => TapeOp::Enter(self.module(m, at)),
                TapeOp::Exit(m) => TapeOp::Exit(self.module(m, at)),
                TapeOp::EnterRecompute(m) => TapeOp::EnterRecompute(self.module(m, at)),
                TapeOp::ExitRecompute(m) => TapeOp::ExitRecompute(self.module(m, at)),
                TapeOp::Alloc(s) => TapeOp::Alloc(self.alloc(s, at)?),
                TapeOp::Free(s) => {
                    self.repeats(s, at)?;
                    TapeOp::Free(self.storage(s, at))
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
                TapeOp::Host { .. } | TapeOp::HostRead => *op,
                TapeOp::GradReady(p) => TapeOp::GradReady(self.param(p, at)),
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
                Source::Param(p) => Source::Param(self.param(p, at)),
                Source::Scale(p) => Source::Scale(self.param(p, at)),
                Source::Grad(p) => Source::Grad(self.param(p, at)),
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
            Some((MIDDLE, _)) if owner == NOBODY || owner.abs_diff(MIDDLE) > 1 => None,
            _ => Some(()),
        }
    }

    fn neighbour(&self, s: StorageId, at: At) -> Option<StorageId> {
        let owner = self.local[s.index()].0;
        match at {
            Some((MIDDLE, _)) if owner != NOBODY && owner.abs_diff(MIDDLE) > 1 => None,
            _ => Some(self.storage(s, at)),
        }
    }

    fn alloc(&mut self, s: StorageId, at: At) -> Option<StorageId> {
        self.repeats(s, at)?;
        let id = StorageId(self.out.storages.len() as u32);
        let storage = &self.t.storages[s.index()];
        let module = self.module(storage.module, at);
        self.out.storages.push(Storage {
            module,
            ..storage.clone()
        });
        let entry = self.entry(s, at);
        self.ids[entry] = id;
        Some(id)
    }

    fn storage(&self, s: StorageId, at: At) -> StorageId {
        self.ids[self.entry(s, at)]
    }

    fn entry(&self, s: StorageId, at: At) -> usize {
        let (owner, local) = self.local[s.index()];
        let base = if owner == NOBODY {
            self.layers
        } else {
            self.layer(owner, at)
        };
        (self.base[base as usize] + local) as usize
    }

    /// Returns the deep model's block that `block` of the shallow one stands for here.
    fn layer(&self, block: u32, at: At) -> u32 {
        match at {
            Some((here, layer)) => layer + block - here,
            None if block < MIDDLE => block,
            None => block + self.layers - SHALLOW,
        }
    }

    fn module(&self, m: ModuleId, at: At) -> ModuleId {
        let b = self.blocks;
        ModuleId(self.renumber(m.0, b.module, b.modules, at))
    }

    fn param(&self, p: ParamId, at: At) -> ParamId {
        let b = self.blocks;
        ParamId(self.renumber(p.0, b.param, b.params, at))
    }

    /// Renumbers an entry of a table in which blocks take `size` entries each from `first` on.
    fn renumber(&self, id: u32, first: u32, size: u32, at: At) -> u32 {
        if id < first || size == 0 {
            return id;
        }
        let (block, local) = ((id - first) / size, (id - first) % size);
        if block >= SHALLOW {
            return id + (self.layers - SHALLOW) * size;
        }
        first + self.layer(block, at) * size + local
    }
}
