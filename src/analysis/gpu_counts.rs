//! Finds the smallest number of GPUs that is enough for a job.
//!
//! `tune --fewest-gpus`, `explain` and the overview without a command ask here, so that they agree.

/// Usual number of GPUs per node, if a scenario does not set another one.
const NODE: u64 = 8;

/// Returns the sizes of `mesh.dp_shard` above `above`, up to `most`, with which the ranks may fill
/// whole nodes or a part of one, in ascending order. Each of them stands for `ranks_each` ranks
/// (replicas and tensor parallelism). `gpus_per_node` is that of the job, and `is_valid` says
/// whether a scenario accepts a size.
pub(crate) fn shards(
    ranks_each: u64,
    gpus_per_node: u64,
    above: u64,
    most: u64,
    is_valid: impl Fn(u64) -> bool,
) -> Vec<u64> {
    let part = NODE.max(gpus_per_node);
    let fills = |ranks: u64| {
        let mut nodes = [NODE, gpus_per_node.max(1)].into_iter();
        ranks <= part || nodes.any(|node| ranks.is_multiple_of(node))
    };
    (above + 1..=most)
        .filter(|n| fills(n * ranks_each) && is_valid(*n))
        .collect()
}

/// Returns the answer for the smallest of some ascending counts that has one. Assumes that larger
/// counts have one, too: doubles the count until it has an answer, then bisects.
pub(crate) fn smallest<T>(counts: &[u64], answer: impl Fn(u64) -> Option<T>) -> Option<T> {
    let mut low = 0;
    let mut at = 0;
    let mut found = loop {
        let count = *counts.get(at)?;
        if let Some(found) = answer(count) {
            break found;
        }
        low = at + 1;
        if low == counts.len() {
            return None;
        }
        // The largest number is tried before giving up.
        at = counts
            .partition_point(|n| *n < count.saturating_mul(2))
            .clamp(low, counts.len() - 1);
    };
    while low < at {
        let middle = low + (at - low) / 2;
        match answer(counts[middle]) {
            Some(smaller) => (found, at) = (smaller, middle),
            None => low = middle + 1,
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_parts_of_a_node_or_whole_nodes() {
        let all = shards(1, 8, 5, 40, |_| true);
        assert_eq!(all, [6, 7, 8, 16, 24, 32, 40]);
        // Two replicas each, so half as many shards fill a node.
        assert_eq!(shards(2, 8, 0, 12, |_| true), [1, 2, 3, 4, 8, 12]);
        // A mesh on 4 GPUs may be a part of a node, or nodes of 4.
        let all = shards(1, 4, 8, 24, |n| n.is_multiple_of(4));
        assert_eq!(all, [12, 16, 20, 24]);
    }

    #[test]
    fn the_smallest_count_is_found() {
        let counts: Vec<u64> = (1..=9).chain([16, 24, 32, 40, 48, 56, 64]).collect();
        for least in 1..=64 {
            let found = smallest(&counts, |n| (n >= least).then_some(n));
            assert_eq!(found, counts.iter().copied().find(|n| *n >= least));
        }
        assert_eq!(smallest(&counts, |_| None::<u64>), None);
        assert_eq!(smallest(&[], Some), None);
    }
}
