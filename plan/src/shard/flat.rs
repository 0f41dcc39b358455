//! Flat layout: all parameters of a group in one buffer, which is split into equal shards at row
//! boundaries only.
//!
//! A shard boundary is a multiple of the chunk factor, which is the least common multiple of the
//! row sizes of all parameters. So a parameter that starts at a multiple of its row size is never
//! split within a row. Parameters smaller than the chunk factor ("fragments") fill the gaps between
//! the others. The remaining fragments are packed into grids of one chunk factor each, so that no
//! fragment crosses a boundary. (Megatron-FSDP `dbuffer.py`/`dp_buffer.py`. The production engine
//! appends remaining fragments without gaps instead, which can split a row.)

use super::LayoutError;
use crate::config::Atomic;
use crate::divisors::lcm;
use crate::ir::ParamId;
use serde::Serialize;
use std::ops::Range;

/// One parameter's interval of a flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FlatItem {
    /// Parameter.
    pub param: ParamId,
    /// First element.
    pub offset: u64,
    /// Number of elements.
    pub numel: u64,
}

/// Flat layout of a group over `shards` ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FlatLayout {
    /// Number of elements of the full buffer, including padding. A multiple of
    /// `chunk_factor * shards` if padded.
    pub numel: u64,
    /// Least common multiple of the units that shards do not split: rows of parameters, or blocks
    /// of rows. For whole parameters, the size of a shard.
    pub chunk_factor: u64,
    /// Number of shards.
    pub shards: u32,
    /// The unit that shards do not split.
    #[serde(skip_serializing_if = "Atomic::is_row")]
    pub atomic: Atomic,
    /// Parameters in the group's order.
    pub items: Vec<FlatItem>,
}

impl FlatLayout {
    /// Returns the number of elements of one rank's shard.
    #[must_use]
    pub fn shard_numel(&self) -> u64 {
        self.numel / u64::from(self.shards)
    }

    /// Returns the number of elements of the parameters, without padding.
    #[must_use]
    pub fn payload_numel(&self) -> u64 {
        self.items.iter().map(|i| i.numel).sum()
    }

    /// Returns the elements of the full buffer that `rank` holds.
    #[must_use]
    pub fn shard(&self, rank: u32) -> Range<u64> {
        assert!(rank < self.shards, "rank {rank} of {} shards", self.shards);
        let n = self.shard_numel();
        u64::from(rank) * n..(u64::from(rank) + 1) * n
    }

    /// Returns the part of the `index`-th parameter in `rank`'s shard, in elements from the start
    /// of the shard. The range is `0..0` if the shard has no part of it.
    ///
    /// # Panics
    /// Panics if `index` is not below the number of parameters or `rank` not below the number of
    /// shards.
    #[must_use]
    pub fn local(&self, index: usize, rank: u32) -> Range<u64> {
        let (item, shard) = (self.items[index], self.shard(rank));
        let start = item.offset.max(shard.start);
        let end = (item.offset + item.numel).min(shard.end);
        if start < end {
            start - shard.start..end - shard.start
        } else {
            0..0
        }
    }

    /// Splits a range of the full buffer where parameters start. Padding belongs to the parameter
    /// before it; padding at the start of the range belongs to the first parameter.
    #[must_use]
    pub fn cut(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let begins = self.items.iter().filter(|i| i.numel > 0).map(|i| i.offset);
        let mut cuts: Vec<u64> = begins
            .filter(|at| range.start < *at && *at < range.end)
            .collect();
        cuts.sort_unstable();
        let begun = |i: &FlatItem| i.offset <= range.start && range.start < i.offset + i.numel;
        if !self.items.iter().any(begun) && !cuts.is_empty() {
            cuts.remove(0);
        }
        let starts = std::iter::once(range.start).chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([range.end]);
        let parts = starts.zip(ends).map(|(start, end)| start..end);
        parts.filter(|part| !part.is_empty()).collect()
    }
}

/// Maximum number of elements of a layout, so that no sum below can overflow.
pub(super) const MAX_NUMEL: u64 = 1 << 59;
/// Padding in elements that is always accepted, in addition to as much padding as payload.
const PADDING_SLACK: u64 = 1 << 30;

/// Lays out `items` (parameter, elements, elements of the unit that shards do not split) over
/// `shards` ranks. `atomic` is the kind of this unit; whole parameters are packed instead (see
/// `whole_tensors`).
///
/// With `pad`, the buffer is padded to a multiple of the chunk factor times shards. Without it
/// (`no_shard`), nothing is split: the layout ends with its last parameter and has one shard,
/// regardless of `shards`.
///
/// # Errors
/// Fails with [`LayoutError::Padding`] if rows without common factors need more than twice the
/// payload plus 2^30 elements (or more than 64 bits), and with [`LayoutError::EmptyRow`],
/// [`LayoutError::TooLarge`] or [`LayoutError::NoShards`].
pub fn flat_layout(
    items: &[(ParamId, u64, u64)],
    shards: u32,
    pad: bool,
    atomic: Atomic,
) -> Result<FlatLayout, LayoutError> {
    if shards == 0 {
        return Err(LayoutError::NoShards);
    }
    let shards = if pad { shards } else { 1 };
    let mut payload = 0u64;
    for &(_, numel, row) in items {
        if row == 0 {
            return Err(LayoutError::EmptyRow);
        }
        payload = payload
            .checked_add(numel)
            .filter(|&n| n <= MAX_NUMEL)
            .ok_or(LayoutError::TooLarge)?;
    }
    let refuse = |padded: Option<u128>| {
        let mut rows: Vec<u64> = items.iter().map(|i| i.2).collect();
        rows.sort_unstable();
        rows.dedup();
        let padded = padded.map_or("more than 2^64 elements".to_owned(), |n| {
            format!("{n} elements")
        });
        LayoutError::Padding {
            rows,
            payload,
            shards,
            padded,
        }
    };
    let limit = u128::from(payload) * 2 + u128::from(PADDING_SLACK);
    if pad && atomic == Atomic::Tensor {
        let layout = whole_tensors(items, shards);
        let padded = u128::from(layout.numel);
        return if padded > limit {
            Err(refuse(Some(padded)))
        } else {
            Ok(layout)
        };
    }
    let factor = items
        .iter()
        .try_fold(1, |f, i| lcm(f, i.2))
        .ok_or_else(|| refuse(None))?;
    let grid = u128::from(factor) * u128::from(shards);
    if (pad && payload > 0 && grid > limit) || factor > MAX_NUMEL {
        return Err(refuse(Some(grid)));
    }

    let (offsets, used) = Packer::new(items, factor).pack();
    // This is below 2^64: `used` is at most 2^62 (see `Packer`) and `grid` at most `limit`.
    let numel = if pad {
        u128::from(used).next_multiple_of(grid)
    } else {
        u128::from(used)
    };
    if numel > limit {
        return Err(refuse(Some(numel)));
    }
    let items = items
        .iter()
        .zip(offsets)
        .map(|(&(param, numel, _), offset)| FlatItem {
            param,
            offset,
            numel,
        })
        .collect();
    Ok(FlatLayout {
        numel: numel as u64,
        chunk_factor: factor,
        shards,
        atomic,
        items,
    })
}

/// Multiple to which shards of whole parameters are padded, in elements, so that collectives of any
/// dtype are aligned to 16 bytes.
const SHARD_STEP: u64 = 128;

/// Gives each parameter to the shard with the fewest elements, starting with the largest parameter.
/// Shards are padded to the size of the largest one. The parameters of a shard keep their order.
fn whole_tensors(items: &[(ParamId, u64, u64)], shards: u32) -> FlatLayout {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(items[i].1));
    let mut load = vec![0u64; shards as usize];
    let mut home = vec![0; items.len()];
    for i in order {
        let least = (0..load.len()).min_by_key(|&s| load[s]).unwrap_or(0);
        load[least] += items[i].1;
        home[i] = least;
    }
    let largest = load.iter().copied().max().unwrap_or(0);
    let shard = largest.next_multiple_of(SHARD_STEP);
    let mut used = vec![0u64; load.len()];
    let place = |(&(param, numel, _), home): (&(ParamId, u64, u64), &usize)| {
        let offset = *home as u64 * shard + used[*home];
        used[*home] += numel;
        FlatItem {
            param,
            offset,
            numel,
        }
    };
    FlatLayout {
        numel: shard * u64::from(shards),
        chunk_factor: shard.max(1),
        shards,
        atomic: Atomic::Tensor,
        items: items.iter().zip(&home).map(place).collect(),
    }
}

/// Places parameters. Offsets stay below 2^62: regular items take less than twice their size, and
/// of two adjacent bins of fragments, at least one is half full.
struct Packer<'a> {
    items: &'a [(ParamId, u64, u64)],
    factor: u64,
    offsets: Vec<u64>,
    /// Indices of fragments that have not been placed, largest first.
    fragments: Vec<usize>,
    end: u64,
}

impl<'a> Packer<'a> {
    fn new(items: &'a [(ParamId, u64, u64)], factor: u64) -> Self {
        let mut fragments: Vec<usize> = (0..items.len()).filter(|&i| items[i].1 < factor).collect();
        fragments.sort_by_key(|&i| std::cmp::Reverse(items[i].1));
        Self {
            items,
            factor,
            offsets: vec![0; items.len()],
            fragments,
            end: 0,
        }
    }

    fn pack(mut self) -> (Vec<u64>, u64) {
        let f = self.factor;
        let mut regular: Vec<usize> = (0..self.items.len())
            .filter(|&i| self.items[i].1 >= f)
            .collect();
        let mut at = 0;
        let mut next = 0;
        while next < regular.len() {
            let i = regular[next];
            next += 1;
            self.place(i, at);
            at += self.items[i].1;
            let rest = self.items[i].1 % f;
            if rest == 0 {
                continue;
            }
            // A later parameter whose remainder fits next to this one's shares the last grid: it
            // starts as much before the end of the grid as its remainder needs, and fills whole
            // grids from there. A parameter that ends with a partial block would be split within
            // its first block there.
            let gap = at;
            at = at.next_multiple_of(f);
            let conjugate = (next..regular.len()).find(|&k| {
                let (_, numel, row) = self.items[regular[k]];
                let r = numel % f;
                r > 0 && rest + r <= f && numel.is_multiple_of(row)
            });
            let mut gap_end = at;
            if let Some(k) = conjugate {
                let j = regular.remove(k);
                let numel = self.items[j].1;
                gap_end = at - numel % f;
                self.place(j, gap_end);
                at += numel - numel % f;
            }
            self.fill(gap, gap_end);
        }
        // First-fit decreasing bin packing into separate grids.
        let mut bins: Vec<u64> = Vec::new();
        for i in std::mem::take(&mut self.fragments) {
            let (_, numel, row) = self.items[i];
            let fits = |used: u64| used.next_multiple_of(row) + numel <= f;
            let bin = bins.iter().position(|&used| fits(used)).unwrap_or_else(|| {
                bins.push(0);
                bins.len() - 1
            });
            let within = bins[bin].next_multiple_of(row);
            bins[bin] = within + numel;
            self.place(i, at + bin as u64 * f + within);
        }
        (self.offsets, self.end)
    }

    fn place(&mut self, item: usize, offset: u64) {
        self.offsets[item] = offset;
        self.end = self.end.max(offset + self.items[item].1);
    }

    /// Puts each fragment that fits into `from..to`, largest first and row-aligned.
    fn fill(&mut self, mut from: u64, to: u64) {
        let mut k = 0;
        while k < self.fragments.len() && from < to {
            let (_, numel, row) = self.items[self.fragments[k]];
            let start = from.next_multiple_of(row);
            if start + numel <= to {
                let i = self.fragments.remove(k);
                self.place(i, start);
                from = start + numel;
            } else {
                k += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn items(shapes: &[(u64, u64)]) -> Vec<(ParamId, u64, u64)> {
        shapes
            .iter()
            .zip(0..)
            .map(|(&(rows, row), i)| (ParamId(i), rows * row, row))
            .collect()
    }

    fn offsets(l: &FlatLayout) -> Vec<u64> {
        l.items.iter().map(|i| i.offset).collect()
    }

    /// Blocks of 8 rows of 32: the second matrix, with 97 rows, ends within a block, so it starts
    /// at the start of a grid.
    #[test]
    fn a_matrix_that_ends_within_a_block_starts_at_a_grid() {
        let item = |n, numel, row| (ParamId(n), numel, row);
        let all = [item(0, 3104, 256), item(1, 32, 32), item(2, 3104, 256)];
        let l = flat_layout(&all, 6, true, Atomic::Block(8)).unwrap();
        assert!(l.items[2].offset.is_multiple_of(256), "{:?}", offsets(&l));
    }

    /// Two parameters of 32 rows in blocks of 5: neither may start with the rows of its last block.
    #[test]
    fn blocks_that_do_not_divide_a_parameter_stay_whole() {
        let block = 5 * 16;
        let given = [0, 1].map(|p| (ParamId(p), 32 * 16, block));
        let l = flat_layout(&given, 2, true, Atomic::Block(5)).unwrap();
        for item in &l.items {
            let inside = |b: &u64| item.offset < *b && *b < item.offset + item.numel;
            for boundary in (1..2).map(|r| r * l.shard_numel()).filter(inside) {
                assert!((boundary - item.offset).is_multiple_of(block), "{l:?}");
            }
        }
    }

    /// The example in Megatron-FSDP's layout documentation: shapes (2,6) (4,4) (4,4) (1,2) (1,6) on
    /// 5 ranks.
    #[test]
    fn megatron_worked_example() {
        let l = flat_layout(
            &items(&[(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]),
            5,
            true,
            Atomic::Row,
        )
        .unwrap();
        assert_eq!((l.chunk_factor, l.numel, l.shard_numel()), (12, 60, 12));
        assert_eq!(offsets(&l), [0, 12, 32, 28, 48]);
        // The third tensor is at elements 32..48 of the buffer. Rank 2 holds 24..36, rank 3 holds
        // 36..48.
        assert_eq!(l.local(2, 2), 8..12);
        assert_eq!(l.local(2, 3), 0..12);
        assert_eq!(l.local(2, 4), 0..0);
        assert_eq!(l.local(4, 4), 0..6);
    }

    /// A case in which appending remaining fragments without gaps would split a row: (1,3) and
    /// (2,2) on 2 ranks.
    #[test]
    fn left_over_fragments_stay_within_a_grid() {
        let l = flat_layout(&items(&[(1, 3), (2, 2)]), 2, true, Atomic::Row).unwrap();
        assert_eq!(l.chunk_factor, 6);
        assert_eq!(offsets(&l), [6, 0]);
        assert_eq!((l.numel, l.shard_numel()), (12, 6));
    }

    /// Sizes that megatron-fsdp 0.6.1 allocates for Llama-3.2-1B on 4 ranks (measured, see
    /// BENCHMARKS.md).
    #[test]
    fn measured_sizes() {
        let l = flat_layout(&items(&[(2048, 1), (128_256, 2048)]), 4, true, Atomic::Row).unwrap();
        assert_eq!(l.numel, 262_676_480);

        let block = [
            (2048, 2048),
            (512, 2048),
            (512, 2048),
            (2048, 2048),
            (8192, 2048),
            (8192, 2048),
            (2048, 8192),
            (2048, 1),
            (2048, 1),
        ];
        let l = flat_layout(&items(&block), 4, true, Atomic::Row).unwrap();
        assert_eq!(l.chunk_factor, 8192);
        assert_eq!(l.shard_numel() * 2, 30_425_088);
    }

    /// Splits are where parameters start, in the order of their offsets. Padding never stands
    /// alone.
    #[test]
    fn ranges_are_cut_where_parameters_begin() {
        let l = flat_layout(
            &items(&[(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]),
            5,
            true,
            Atomic::Row,
        )
        .unwrap();
        // Offsets 0, 12, 32, 28, 48; 12, 16, 16, 2 and 6 elements; 60 in all.
        assert_eq!(l.cut(0..60), [0..12, 12..28, 28..32, 32..48, 48..60]);
        assert_eq!(l.cut(0..12), vec![0..12]);
        assert_eq!(l.cut(24..36), [24..28, 28..32, 32..36]);
        // The range starts with padding.
        assert_eq!(l.cut(30..40), vec![30..40]);
        assert_eq!(l.cut(30..60), [30..48, 48..60]);
        assert_eq!(l.cut(6..6), []);
    }

    /// Whole parameters are assigned to the emptiest shard, largest first. None is split, and the
    /// size of the largest shard is that of longest-processing-time-first scheduling.
    #[test]
    fn whole_parameters_stay_on_one_rank() {
        let shapes = [(64, 8), (64, 7), (64, 6), (64, 5), (64, 5)];
        let l = flat_layout(&items(&shapes), 2, true, Atomic::Tensor).unwrap();
        // 8 + 5 + 5 and 7 + 6, times 64, rounded up to 128.
        assert_eq!((l.shard_numel(), l.numel), (1152, 2304));
        assert_eq!(offsets(&l), [0, 1152, 1152 + 448, 512, 832]);
        for i in 0..shapes.len() {
            let parts = (0..2).filter(|rank| !l.local(i, *rank).is_empty());
            assert_eq!(parts.count(), 1);
        }
        // A shard may be empty.
        let l = flat_layout(&items(&[(3, 5)]), 2, true, Atomic::Tensor).unwrap();
        assert_eq!((l.numel, l.local(0, 0), l.local(0, 1)), (256, 0..15, 0..0));
        let e = flat_layout(&items(&[(1 << 20, 1 << 11)]), 4, true, Atomic::Tensor);
        assert!(matches!(e, Err(LayoutError::Padding { .. })), "{e:?}");
        let l = flat_layout(&items(&shapes), 2, false, Atomic::Tensor).unwrap();
        assert_eq!(l.shards, 1);
    }

    #[test]
    fn unpadded_ends_with_its_last_parameter() {
        let l = flat_layout(&items(&[(2, 6), (4, 4), (1, 2)]), 4, false, Atomic::Row).unwrap();
        assert_eq!((l.numel, l.shards), (30, 1));
        assert_eq!(l.local(1, 0), 12..28);
    }

    #[test]
    fn incompatible_rows_are_refused_by_name() {
        let e = flat_layout(
            &items(&[(8, 18_432), (8, 16_384), (8, 7_169)]),
            512,
            true,
            Atomic::Row,
        )
        .unwrap_err();
        let LayoutError::Padding { rows, shards, .. } = &e else {
            panic!("{e}")
        };
        assert_eq!(
            (rows.as_slice(), *shards),
            ([7_169, 16_384, 18_432].as_slice(), 512)
        );
        assert!(e.to_string().contains("7169, 16384, 18432"), "{e}");
        // Three coprime row sizes near 2^22, whose least common multiple exceeds 64 bits.
        let e = flat_layout(
            &items(&[(1, 4_194_301), (1, 4_194_303), (1, 4_194_305)]),
            2,
            true,
            Atomic::Row,
        )
        .unwrap_err();
        assert!(e.to_string().contains("2^64"), "{e}");
        assert_eq!(
            flat_layout(&items(&[(3, 0)]), 2, true, Atomic::Row),
            Err(LayoutError::EmptyRow)
        );
        assert_eq!(
            flat_layout(&[(ParamId(0), u64::MAX, 1)], 2, true, Atomic::Row),
            Err(LayoutError::TooLarge)
        );
        assert_eq!(
            flat_layout(&[], 0, true, Atomic::Row),
            Err(LayoutError::NoShards)
        );
    }

    #[test]
    fn empty_group() {
        let l = flat_layout(&[], 4, true, Atomic::Row).unwrap();
        assert_eq!((l.numel, l.payload_numel()), (0, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn rows_are_whole_and_elements_are_covered_once(
            shapes in prop::collection::vec(
                (1u64..20, prop::sample::select(vec![1u64, 2, 3, 4, 5, 6, 8, 9, 12, 16])),
                1..10,
            ),
            shards in prop::sample::select(vec![1u32, 2, 3, 4, 5, 8]),
        ) {
            let given = items(&shapes);
            let l = flat_layout(&given, shards, true, Atomic::Row).unwrap();
            prop_assert_eq!(l.numel % (l.chunk_factor * u64::from(shards)), 0);
            let mut seen = vec![false; l.numel as usize];
            for (i, &(_, numel, row)) in given.iter().enumerate() {
                let item = l.items[i];
                prop_assert_eq!(item.numel, numel);
                prop_assert_eq!(item.offset % row, 0);
                for e in item.offset..item.offset + numel {
                    prop_assert!(!std::mem::replace(&mut seen[e as usize], true), "element {} twice", e);
                }
                let mut total = 0;
                for rank in 0..shards {
                    let local = l.local(i, rank);
                    prop_assert!(local.end <= l.shard_numel());
                    prop_assert_eq!((local.end - local.start) % row, 0, "row cut at rank {}", rank);
                    total += local.end - local.start;
                }
                prop_assert_eq!(total, numel);
            }
        }
    }
}
