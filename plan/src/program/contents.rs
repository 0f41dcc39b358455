//! Which elements of parameters the persistent buffers of a rank contain.
//!
//! The buffer of a flat group is the inner slice of the group's layout, and within it the outer
//! slice, according to its size. The buffer of a single parameter is that parameter's dim-0 shard.

use super::Program;
use crate::ir::{AxisId, BufferId, Holds, ParamId};
use crate::shard::placements::shard_axis;
use crate::shard::{Layout, PerParamItem, PerParamLayout};
use std::collections::BTreeMap;
use std::ops::Range;

/// Adjacent elements of one parameter in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// First element within the buffer.
    pub at: u64,
    /// Parameter.
    pub param: ParamId,
    /// Range of elements within the rank's part of the parameter, row-major.
    pub elements: Range<u64>,
}

/// The size of a buffer is not that of a slice of its group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("buffer `{buffer}` has {elements} elements, which is not a slice of its group's {full}")]
pub struct NoSlice {
    /// Buffer.
    pub buffer: String,
    /// Elements of the buffer.
    pub elements: u64,
    /// Elements of the group.
    pub full: u64,
}

/// Finds the contents of buffers.
#[derive(Debug)]
pub struct Contents<'a> {
    program: &'a Program,
    /// By parameter: its group, and its index in the group.
    home: BTreeMap<ParamId, (usize, usize)>,
}

impl<'a> Contents<'a> {
    /// Indexes the parameters of a program.
    #[must_use]
    pub fn new(program: &'a Program) -> Self {
        let groups = program.groups.iter().enumerate();
        let home = groups.flat_map(|(g, group)| {
            let params = group.params.iter().enumerate();
            params.map(move |(i, p)| (*p, (g, i)))
        });
        Self {
            program,
            home: home.collect(),
        }
    }

    /// Returns the contents of a buffer on a rank, in ascending order. Empty if it contains no
    /// parameters.
    ///
    /// # Errors
    /// Returns [`NoSlice`] if the buffer's size is not that of a slice of its group.
    pub fn of(&self, rank: u32, id: BufferId) -> Result<Vec<Content>, NoSlice> {
        let buffer = &self.program.buffers[id.index()];
        let mesh = &self.program.meta.mesh;
        // If ranks have whole parameters, all have the only shard.
        let local = |layout: &PerParamLayout, item: &PerParamItem| match layout.shards {
            1 => item.local(0),
            _ => item.local(mesh.coordinate(self.shard_axis(item.param), rank)),
        };
        let content = |at: u64, param: ParamId, elements: Range<u64>| Content {
            at,
            param,
            elements,
        };
        let mut found: Vec<Content> = match buffer.holds {
            Holds::Param(p) => {
                let home = self.home.get(&p).into_iter();
                let whole = home.map(|&(g, i)| match &self.program.groups[g].layout {
                    Layout::Flat(_) => 0..self.program.params[p.index()].numel(),
                    Layout::PerParam(l) => local(l, &l.items[i]),
                });
                whole.map(|elements| content(0, p, elements)).collect()
            }
            Holds::Group(g) => match &self.program.groups[g.index()].layout {
                Layout::Flat(layout) => {
                    let numel = buffer.bytes.0 / buffer.dtype.size();
                    let first = self.program.groups[g.index()].params[0];
                    let axis = self.shard_axis(first);
                    let held = self.interval((rank, axis), id, numel, layout.numel)?;
                    let items = layout.items.iter().map(|item| {
                        let start = item.offset.max(held.start);
                        let end = (item.offset + item.numel).min(held.end).max(start);
                        let elements = start - item.offset..end - item.offset;
                        content(start - held.start, item.param, elements)
                    });
                    items.collect()
                }
                Layout::PerParam(layout) => {
                    let items = layout.items.iter();
                    let held = items.map(|i| content(i.shard_offset, i.param, local(layout, i)));
                    held.collect()
                }
            },
            _ => Vec::new(),
        };
        found.retain(|c| !c.elements.is_empty());
        found.sort_by_key(|c| c.at);
        Ok(found)
    }

    /// Returns the inner axis over which a parameter is sharded.
    fn shard_axis(&self, p: ParamId) -> AxisId {
        shard_axis(self.program.params[p.index()].placements)
    }

    /// Returns the slice of `full` elements that is in a buffer of `numel` elements. The inner axis
    /// divides first, then the outer axis.
    fn interval(
        &self,
        (rank, inner): (u32, AxisId),
        id: BufferId,
        numel: u64,
        full: u64,
    ) -> Result<Range<u64>, NoSlice> {
        let mesh = &self.program.meta.mesh;
        let on = |axis| {
            let (size, at) = (mesh.size(axis), mesh.coordinate(axis, rank));
            (u64::from(size), u64::from(at))
        };
        let (inner, inner_at) = on(inner);
        let (outer, outer_at) = on(AxisId::DP_OUTER);
        let start = if numel == full {
            0
        } else if numel * inner == full {
            inner_at * numel
        } else if numel * inner * outer == full {
            (inner_at * outer + outer_at) * numel
        } else {
            return Err(NoSlice {
                buffer: self.program.buffer_name(id),
                elements: numel,
                full,
            });
        };
        Ok(start..start + numel)
    }
}
