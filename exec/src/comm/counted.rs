//! Numbers of rows that ranks exchange.

use shardlab_plan::ir::CountedRows;

/// Returns how many rows of each block move between this rank and each of `ranks` ranks. `numbers`
/// are the bytes of the 64-bit integers `[ranks, n]` that count them; rows without a place do not
/// move.
pub(crate) fn counted(numbers: &[u8], ranks: usize, of: CountedRows) -> Vec<u64> {
    let block = of.rows / ranks as u64;
    let of_rank = |bytes: &[u8]| {
        let (numbers, _) = bytes.as_chunks::<8>();
        let sum: i64 = numbers.iter().map(|n| i64::from_ne_bytes(*n)).sum();
        u64::try_from(sum).unwrap_or(0).min(block)
    };
    numbers.chunks(numbers.len() / ranks).map(of_rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_a_rank_add_up_to_at_most_its_block() {
        let numbers = [3i64, 0, 2, 5, 0, 0].map(i64::to_ne_bytes).concat();
        let of = CountedRows {
            rows: 12,
            expected: 9,
        };
        assert_eq!(counted(&numbers, 3, of), [3, 4, 0]);
    }
}
