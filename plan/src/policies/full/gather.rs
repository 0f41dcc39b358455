//! Gathers are issued before their use, within the window, and waited for at the first use.

use super::{Full, InFlight};
use crate::ir::{Access, COMPUTE, CollectiveKind, Holds, ParamId, Part, ReduceOp, Role, ShardOp};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::program::Rule;
use smallvec::smallvec;

impl Full {
    /// Issues the copy-in and the all-gather of a bucket.
    pub(super) fn issue(&mut self, out: &mut Emitter<'_>, index: usize, rule: Rule) {
        let bucket = self.direction().buckets[index].clone();
        let todo: Vec<ParamId> = bucket
            .params
            .iter()
            .copied()
            .filter(|p| !self.full[p.index()])
            .collect();
        let comm = self.comms.along(bucket.axis).gather;
        let Some(comm) = comm.filter(|_| !todo.is_empty()) else {
            return;
        };
        let w = out.inputs.types.compute;
        let unit = self.params[todo[0].index()].unit;
        let slot = &mut self.gather_buffers[self.pass as usize][index];
        let buffer = *slot.get_or_insert_with(|| {
            let holds = Holds::Named("gather bucket");
            out.full_size(Role::GatherBuffer, bucket.bytes, w, unit, holds)
        });
        out.b.alloc(rule, buffer);
        let output = out.b.whole(buffer);
        let slice = Access {
            bytes: output.bytes / u64::from(out.inputs.mesh.size(bucket.axis)),
            per_rank: Some(bucket.axis.into()),
            ..output
        };
        let shards: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| out.b.whole(self.params[p.index()].shard))
            .collect();
        out.run(KernelLaunch {
            rule: Rule::CopyIn,
            op: ShardOp::MultiCopy,
            elements: slice.bytes / w.size(),
            dtype: w,
            stream: COMPUTE,
            reads: &shards,
            writes: &[slice],
        });
        out.b.join(Rule::CopyIn, COMPUTE, self.streams.gather);
        let parts = smallvec![Part {
            input: slice,
            output
        }];
        out.collective(CollectiveLaunch {
            rule,
            stream: self.streams.gather,
            kind: CollectiveKind::AllGather,
            comm,
            reduce: ReduceOp::None,
            dtype: w,
            parts,
            sent: None,
        });
        let done = out.b.record(rule, self.streams.gather);
        self.in_flight += bucket.bytes;
        self.issued[index] = Some(InFlight {
            buffer,
            done,
            bytes: bucket.bytes,
        });
    }

    /// Issues buckets before their use: at least one, and more while the window has room.
    pub(super) fn run_ahead(&mut self, out: &mut Emitter<'_>, used: usize) {
        while self.next < self.direction().buckets.len() {
            let bytes = self.direction().buckets[self.next].bytes;
            let needed = self.next <= used + 1;
            if !needed && self.in_flight + bytes > self.window {
                break;
            }
            let rule = if self.next <= used {
                Rule::Unshard
            } else {
                Rule::Prefetch
            };
            let index = self.next;
            self.next += 1;
            self.issue(out, index, rule);
        }
    }

    /// Makes a parameter full: waits for its bucket and copies it out.
    pub(super) fn require(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if self.full[p.index()] {
            return;
        }
        let Some(index) = self.direction().of[p.index()].map(|b| b as usize) else {
            return;
        };
        self.run_ahead(out, index);
        let bucket = self.direction().buckets[index].clone();
        let w = out.inputs.types.compute;
        let todo: Vec<ParamId> = bucket
            .params
            .iter()
            .copied()
            .filter(|p| !self.full[p.index()])
            .collect();
        let gathered = self.issued[index].take();
        let from = match gathered {
            Some(g) => {
                self.in_flight -= g.bytes;
                out.b.wait(Rule::GatherDone, g.done, COMPUTE);
                vec![out.b.whole(g.buffer)]
            }
            None => todo
                .iter()
                .map(|p| out.b.whole(self.params[p.index()].shard))
                .collect(),
        };
        let mut to = Vec::new();
        for p in &todo {
            let full = self.params[p.index()].full;
            out.b.alloc(Rule::CopyOut, full);
            to.push(out.b.whole(full));
            self.full[p.index()] = true;
        }
        let n = to.iter().map(|a| a.bytes).sum::<u64>() / w.size();
        let kind = if gathered.is_some() {
            ShardOp::CopyOut {
                ranks: out.inputs.mesh.size(bucket.axis),
            }
        } else {
            ShardOp::MultiCopy
        };
        out.run(KernelLaunch {
            rule: Rule::CopyOut,
            op: kind,
            elements: n,
            dtype: w,
            stream: COMPUTE,
            reads: &from,
            writes: &to,
        });
        if let Some(g) = gathered {
            out.b.free(Rule::CopyOut, g.buffer);
        }
    }
}
