//! Per-parameter layout: each parameter is split along dimension 0 by ceiling division, as in
//! torch's `fully_shard`.

use super::LayoutError;
use super::flat::MAX_NUMEL;
use crate::ir::ParamId;
use serde::Serialize;
use std::ops::Range;

/// One parameter of a per-parameter layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PerParamItem {
    /// Parameter.
    pub param: ParamId,
    /// Number of elements of the whole parameter.
    pub numel: u64,
    /// Number of elements of one padded shard: `ceil(dim0 / shards) * row`.
    pub shard_numel: u64,
    /// Offset of this parameter's padded shard in a rank's packed shard, in elements.
    pub shard_offset: u64,
}

impl PerParamItem {
    /// Returns the elements of the whole parameter that `rank` holds; empty if earlier ranks hold
    /// all of them.
    #[must_use]
    pub fn local(&self, rank: u32) -> Range<u64> {
        let start = u64::from(rank)
            .saturating_mul(self.shard_numel)
            .min(self.numel);
        start..start.saturating_add(self.shard_numel).min(self.numel)
    }
}

/// Per-parameter layout of a group over `shards` ranks, split along dimension 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PerParamLayout {
    /// Number of shards.
    pub shards: u32,
    /// Parameters in the group's order.
    pub items: Vec<PerParamItem>,
}

impl PerParamLayout {
    /// Returns the layout of a subset of the parameters, for a collective that packs only these.
    #[must_use]
    pub fn only(&self, keep: impl Fn(ParamId) -> bool) -> Self {
        let mut shard_offset = 0;
        let kept = self.items.iter().filter(|i| keep(i.param));
        let items = kept
            .map(|item| {
                let at = shard_offset;
                shard_offset += item.shard_numel;
                PerParamItem {
                    shard_offset: at,
                    ..*item
                }
            })
            .collect();
        Self {
            shards: self.shards,
            items,
        }
    }

    /// Returns the number of elements of one rank's packed shard, including padding.
    #[must_use]
    pub fn shard_numel(&self) -> u64 {
        self.items.iter().map(|i| i.shard_numel).sum()
    }

    /// Returns the number of elements of the gathered buffer, including padding.
    #[must_use]
    pub fn full_numel(&self) -> u64 {
        self.shard_numel() * u64::from(self.shards)
    }

    /// Returns the number of elements of the parameters, without padding.
    #[must_use]
    pub fn payload_numel(&self) -> u64 {
        self.items.iter().map(|i| i.numel).sum()
    }

    /// Returns the number of elements of the `index`-th parameter that `rank` holds, without
    /// padding. It can differ between ranks and can be 0.
    ///
    /// # Panics
    /// Panics if `index` is not below the number of parameters or `rank` not below the number of
    /// shards.
    #[must_use]
    pub fn local_numel(&self, index: usize, rank: u32) -> u64 {
        assert!(rank < self.shards, "rank {rank} of {} shards", self.shards);
        let r = self.items[index].local(rank);
        r.end - r.start
    }
}

/// Lays out `params` (parameter, dimension 0, elements per row) over `shards` ranks.
///
/// Rank `r` holds rows `r*c .. (r+1)*c` with `c = ceil(dim0 / shards)`, or fewer at the end of the
/// parameter. Every rank allocates `c` rows.
///
/// # Errors
/// Returns [`LayoutError::EmptyRow`] if a parameter's rows have no elements,
/// [`LayoutError::TooLarge`] if a buffer cannot address the elements, and [`LayoutError::NoShards`]
/// if there are no ranks.
pub fn per_param_layout(
    params: &[(ParamId, u64, u64)],
    shards: u32,
) -> Result<PerParamLayout, LayoutError> {
    if shards == 0 {
        return Err(LayoutError::NoShards);
    }
    let mut shard_offset = 0u64;
    let mut items = Vec::with_capacity(params.len());
    for &(param, dim0, row) in params {
        if row == 0 {
            return Err(LayoutError::EmptyRow);
        }
        let shard_numel = dim0
            .div_ceil(u64::from(shards))
            .checked_mul(row)
            .ok_or(LayoutError::TooLarge)?;
        let numel = dim0.checked_mul(row).ok_or(LayoutError::TooLarge)?;
        items.push(PerParamItem {
            param,
            numel,
            shard_numel,
            shard_offset,
        });
        shard_offset = shard_offset
            .checked_add(shard_numel)
            .filter(|n| {
                n.checked_mul(u64::from(shards))
                    .is_some_and(|full| full <= MAX_NUMEL)
            })
            .ok_or(LayoutError::TooLarge)?;
    }
    Ok(PerParamLayout { shards, items })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn some_parameters_are_packed_as_if_they_were_all() {
        let [a, b, c] = [(ParamId(4), 5, 3), (ParamId(6), 2, 1), (ParamId(7), 9, 2)];
        let all = per_param_layout(&[a, b, c], 4).unwrap();
        let without = all.only(|p| p != ParamId(6));
        assert_eq!(without, per_param_layout(&[a, c], 4).unwrap());
        assert_eq!(all.only(|_| true), all);
    }

    /// Same as `torch.chunk` of 5 rows over 4 ranks: 2, 2, 1, 0.
    #[test]
    fn uneven_and_empty_shards() {
        let l = per_param_layout(&[(ParamId(0), 5, 3), (ParamId(1), 2, 1)], 4).unwrap();
        let rows = |i, row| {
            (0..4)
                .map(|r| l.local_numel(i, r) / row)
                .collect::<Vec<_>>()
        };
        assert_eq!(rows(0, 3), [2, 2, 1, 0]);
        assert_eq!(rows(1, 1), [1, 1, 0, 0]);
        assert_eq!(l.items[1].shard_offset, 6);
        assert_eq!(
            (l.shard_numel(), l.full_numel(), l.payload_numel()),
            (7, 28, 17)
        );
        let held = |r| l.local_numel(0, r) + l.local_numel(1, r);
        assert_eq!((held(0), held(3)), (7, 0));
    }

    /// A block of Llama-3.2-1B divides evenly over 4 ranks, without padding.
    #[test]
    fn divisible_block_has_no_padding() {
        let block = [
            (2048, 2048),
            (512, 2048),
            (512, 2048),
            (2048, 2048),
            (8192, 2048),
            (2048, 8192),
            (2048, 1),
        ];
        let params: Vec<_> = block
            .iter()
            .zip(0..)
            .map(|(&(d, r), i)| (ParamId(i), d, r))
            .collect();
        let l = per_param_layout(&params, 4).unwrap();
        assert_eq!(l.full_numel(), l.payload_numel());
    }

    #[test]
    fn refusals() {
        assert_eq!(
            per_param_layout(&[(ParamId(0), 2, 0)], 2),
            Err(LayoutError::EmptyRow)
        );
        assert_eq!(
            per_param_layout(&[(ParamId(0), u64::MAX, 2)], 2),
            Err(LayoutError::TooLarge)
        );
        assert_eq!(per_param_layout(&[], 0), Err(LayoutError::NoShards));
    }

    proptest! {
        #[test]
        fn ranks_cover_each_parameter_once(
            shapes in prop::collection::vec((0u64..40, 1u64..20), 1..8),
            shards in 1u32..12,
        ) {
            let given: Vec<_> = shapes.iter().zip(0..).map(|(&(d, r), i)| (ParamId(i), d, r)).collect();
            let l = per_param_layout(&given, shards).unwrap();
            let mut end_of_shard = 0;
            for (i, &(_, dim0, row)) in given.iter().enumerate() {
                prop_assert_eq!(l.items[i].shard_offset, end_of_shard);
                end_of_shard += l.items[i].shard_numel;
                let mut next = 0;
                for rank in 0..shards {
                    let r = l.items[i].local(rank);
                    prop_assert_eq!(r.start, next);
                    prop_assert_eq!((r.end - r.start) % row, 0);
                    prop_assert!(r.end - r.start <= l.items[i].shard_numel);
                    next = r.end;
                }
                prop_assert_eq!(next, dim0 * row);
            }
            prop_assert_eq!(end_of_shard, l.shard_numel());
        }
    }
}
