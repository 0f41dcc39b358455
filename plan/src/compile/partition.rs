//! Decides what compiled code saves: values that a fused backward can recompute from other saved
//! values are dropped.
//!
//! A saved value is recomputed if elementwise ops compute it from values that are saved anyway (or
//! that together are smaller) and every use in backward is in a fusible op. GEMMs and attention
//! need their operands in memory, so their inputs stay saved, unless
//! `train.recompute = "pointwise"` asks to save memory. Then a fused kernel of backward that reads
//! the inputs of such an operand also writes the operand, and the GEMM comes after that kernel.
//!
//! AOTAutograd's partitioner recomputes norms, too, whose inputs the norm's own backward needs
//! anyway. In 16 bits a GEMM of backward reads the result, which is saved. With one scale per row
//! in 8 bits, backward only copies it into transposed order: compiled torchao 0.18 saves 64 MiB per
//! block of `peers-1b` less than if results of norms were saved.

use super::schedule::Orders;
use crate::autodiff::recompute::Recomputed;
use crate::config::Recompute;
use crate::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::ir::OpKind;
use crate::ops::Fusion;
use smallvec::SmallVec;
use std::collections::BTreeMap;

const NONE: u32 = u32::MAX;
/// Maximum number of ops that are recomputed for one value.
const MAX_OPS: usize = 16;

struct Partition<'g> {
    g: &'g mut Graph,
    o: &'g mut Orders,
    /// The only op that writes a buffer, if it is fusible and compiled; `NONE` otherwise.
    writer: Vec<u32>,
    /// Backward ops that use a buffer, in order.
    uses: Vec<SmallVec<[u32; 2]>>,
    /// Recomputing ops, by the backward op before which they are placed.
    before: BTreeMap<u32, Vec<u32>>,
    /// Set if operands of GEMMs are recomputed, too.
    operands: Option<&'g Recomputed>,
    /// Nearest unit of each module, whose backward alone has its parameters; `None` if these are
    /// gathered where kernels read them.
    units: Option<&'g [u32]>,
    /// Whether norms that backward only copies are recomputed.
    norms: bool,
}

/// Replaces backward uses of cheap saved values by recomputed ones; the recomputing ops come before
/// their first use. An op that reads a parameter is repeated only in the backward of its own unit:
/// elsewhere, the parameter has been freed or is not gathered yet. With `norms`, results of norms
/// that backward only copies are cheap.
pub(super) fn recompute_cheap(
    g: &mut Graph,
    o: &mut Orders,
    what: &Recomputed,
    units: Option<&[u32]>,
    norms: bool,
) {
    let buffers = g.buffers.len();
    let mut p = Partition {
        g,
        o,
        writer: vec![NONE; buffers],
        uses: vec![SmallVec::new(); buffers],
        before: BTreeMap::new(),
        operands: (what.mode == Recompute::Pointwise).then_some(what),
        units,
        norms,
    };
    let candidates = p.survey();
    for b in candidates {
        p.consider(b);
    }
    if !p.before.is_empty() {
        let Partition { o, mut before, .. } = p;
        let old = std::mem::take(&mut o.backward);
        for op in old {
            o.backward.extend(before.remove(&op).unwrap_or_default());
            o.backward.push(op);
        }
    }
}

/// Returns whether an op normalizes rows: the result comes first, statistics after it.
const fn is_norm(op: &Op) -> bool {
    matches!(
        op.act,
        Act::Compute(OpKind::RmsNorm(_) | OpKind::LayerNorm(_))
    )
}

impl Partition<'_> {
    /// Collects writers, uses, and the saved buffers in the order in which they are made.
    fn survey(&mut self) -> Vec<u32> {
        let mut seen = vec![false; self.g.buffers.len()];
        let mut made = Vec::new();
        let recomputed = self
            .o
            .backward
            .iter()
            .filter(|&&op| self.o.section[op as usize].is_some());
        for &i in self.o.forward.iter().chain(recomputed) {
            let op = &self.g.ops[i as usize];
            let kind = match op.act {
                Act::Compute(kind) => Some(kind),
                Act::Collective(_) => None,
                Act::View(_) => continue,
            };
            for (n, &v) in op.outputs.iter().enumerate() {
                let Some(b) = self.g.buffer_of(v) else {
                    continue;
                };
                let first = !std::mem::replace(&mut seen[b as usize], true);
                let norm = self.norms && n == 0 && is_norm(op);
                let cheap = norm || kind.is_some_and(|k| k.fusion() == Fusion::Pointwise);
                let plain = first && self.o.region[i as usize] != 0 && cheap;
                let in_place = op.inputs.iter().any(|&x| self.g.buffer_of(x) == Some(b));
                self.writer[b as usize] = if plain && !in_place { i } else { NONE };
                if first {
                    made.push(b);
                }
            }
        }
        for &i in &self.o.backward {
            if self.o.section[i as usize].is_some() {
                continue;
            }
            let op = &self.g.ops[i as usize];
            if !op.is_view() {
                for &v in &op.inputs {
                    if let Some(b) = self.g.buffer_of(v)
                        && seen[b as usize]
                        && self.uses[b as usize].last() != Some(&i)
                    {
                        self.uses[b as usize].push(i);
                    }
                }
            }
        }
        made.retain(|&b| self.writer[b as usize] != NONE && !self.uses[b as usize].is_empty());
        made
    }

    fn consider(&mut self, b: u32) {
        let fused = self.uses[b as usize].iter().all(|&i| self.fusible(i));
        let writer = &self.g.ops[self.writer[b as usize] as usize];
        let made = writer.module;
        if is_norm(writer) && !self.uses[b as usize].iter().all(|&i| self.is_copy(i)) {
            return;
        }
        if !fused && !self.operands.is_some_and(|what| what.applies(made)) {
            return;
        }
        let mut cone = Vec::new();
        let mut leaves = Vec::new();
        let uses = &self.uses[b as usize];
        if !self.may_run(self.writer[b as usize], uses)
            || !self.grow(b, uses, &mut cone, &mut leaves)
        {
            return;
        }
        // Tables and labels are made from inputs alone; recomputing them gains nothing.
        if leaves.is_empty() {
            return;
        }
        if !fused && !leaves.iter().all(|&l| self.is_read_beside(l, b)) {
            return;
        }
        let new: u64 = leaves
            .iter()
            .filter(|&&l| self.uses[l as usize].is_empty())
            .map(|&l| self.g.buffers[l as usize].bytes)
            .sum();
        if new < self.g.buffers[b as usize].bytes {
            self.rewrite(b, &cone, &leaves);
        }
    }

    fn is_copy(&self, op: u32) -> bool {
        self.g.ops[op as usize].act == Act::Compute(OpKind::Copy)
    }

    /// Returns whether an op may be part of a fused kernel.
    fn fusible(&self, op: u32) -> bool {
        let Act::Compute(kind) = self.g.ops[op as usize].act else {
            return false;
        };
        self.o.region[op as usize] != 0 && matches!(kind.fusion(), Fusion::Pointwise | Fusion::Row)
    }

    /// Returns whether a fused kernel in the region where `b` is used first reads `leaf` anyway, so
    /// that making `b` from it reads nothing more.
    fn is_read_beside(&self, leaf: u32, b: u32) -> bool {
        let region = |op: u32| self.o.region[op as usize];
        let here = region(self.uses[b as usize][0]);
        self.uses[leaf as usize]
            .iter()
            .any(|&i| region(i) == here && self.fusible(i))
    }

    /// Returns whether an op may be repeated where these ops run.
    fn may_run(&self, op: u32, at: &[u32]) -> bool {
        let Some(units) = self.units else {
            return true;
        };
        let unit = |op: u32| units[self.g.ops[op as usize].module.index()];
        let is_param = |v: &ValueId| matches!(self.g.value(*v).root, Root::Param(_));
        let reads = self.g.ops[op as usize].inputs.iter().any(is_param);
        !reads || at.iter().all(|&user| unit(user) == unit(op))
    }

    /// Collects the ops that make `b` for its `uses` (in execution order) and the buffers they
    /// start from. Returns false if it takes too many.
    fn grow(&self, b: u32, uses: &[u32], cone: &mut Vec<u32>, leaves: &mut Vec<u32>) -> bool {
        let w = self.writer[b as usize];
        if cone.contains(&w) {
            return true;
        }
        let region = self.o.region[w as usize];
        for &v in &self.g.ops[w as usize].inputs {
            let Some(x) = self.g.buffer_of(v) else {
                continue;
            };
            let xw = self.writer[x as usize];
            let inside = xw != NONE
                && self.o.region[xw as usize] == region
                && !is_norm(&self.g.ops[xw as usize]);
            if inside && self.uses[x as usize].is_empty() && self.may_run(xw, uses) {
                if !self.grow(x, uses, cone, leaves) {
                    return false;
                }
            } else if !leaves.contains(&x) {
                leaves.push(x);
            }
        }
        cone.push(w);
        cone.len() <= MAX_OPS
    }

    fn rewrite(&mut self, b: u32, cone: &[u32], leaves: &[u32]) {
        let users = std::mem::take(&mut self.uses[b as usize]);
        let first = users[0];
        let mut renamed: SmallVec<[(u32, u32); 8]> = SmallVec::new();
        let mut clones = Vec::with_capacity(cone.len());
        for &i in cone {
            let op = self.g.ops[i as usize].clone();
            let id = self.g.ops.len() as u32;
            for &v in &op.outputs {
                if let Some(x) = self.g.buffer_of(v) {
                    let buffer = self.g.buffers[x as usize];
                    renamed.push((x, self.g.buffers.len() as u32));
                    self.g.buffers.push(buffer);
                    self.writer.push(NONE);
                    self.uses.push(SmallVec::new());
                }
            }
            let inputs = op
                .inputs
                .iter()
                .map(|&v| self.rename(v, &renamed))
                .collect();
            let outputs = op
                .outputs
                .iter()
                .map(|&v| self.rename(v, &renamed))
                .collect();
            self.g.nodes += 1;
            let (node, place) = (self.g.nodes, &self.g.ops[first as usize]);
            let (module, stage) = (place.module, place.stage);
            self.g.ops.push(Op {
                inputs,
                outputs,
                module,
                stage,
                node,
                ..op
            });
            self.o.region.push(self.o.region[first as usize]);
            self.o.section.push(None);
            clones.push(id);
        }
        for &i in &users {
            let inputs = self.g.ops[i as usize].inputs.clone();
            self.g.ops[i as usize].inputs =
                inputs.iter().map(|&v| self.rename(v, &renamed)).collect();
        }
        for &l in leaves {
            // The inputs of the clones are used by the same backward op from now on.
            if !self.uses[l as usize].contains(&first) {
                self.uses[l as usize].push(first);
            }
        }
        self.before.entry(first).or_default().extend(clones);
    }

    /// Returns the same window on the renamed buffer.
    fn rename(&mut self, v: ValueId, renamed: &[(u32, u32)]) -> ValueId {
        let Some(b) = self.g.buffer_of(v) else {
            return v;
        };
        let Some(&(_, to)) = renamed.iter().find(|r| r.0 == b) else {
            return v;
        };
        let value = Value {
            root: Root::Buffer(to),
            requires_grad: false,
            ..self.g.value(v).clone()
        };
        self.g.push_value(value, NONE)
    }
}
