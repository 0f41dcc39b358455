//! Sizes of attention.

use serde::Serialize;

/// Sizes of one softmax attention, on which its cost, kernels and workspace depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct AttentionShape {
    /// Samples.
    pub batch: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Sequence length, of queries and of keys.
    pub seq: u64,
    /// Head size.
    pub head_dim: u64,
    /// Causal mask (half the FLOPs): position `i` sees positions up to `i`.
    pub causal: bool,
}

impl AttentionShape {
    /// Returns the sizes of attention over queries and keys of these shapes, `[batch, heads, seq,
    /// head_dim]` each; `None` if they do not belong together.
    #[must_use]
    pub fn of(q: &[u64], k: &[u64], causal: bool) -> Option<Self> {
        let (&[batch, heads, seq, head_dim], &[_, kv_heads, ..]) = (q, k) else {
            return None;
        };
        let shape = Self {
            batch,
            heads,
            kv_heads,
            seq,
            head_dim,
            causal,
        };
        (shape.keys() == *k && kv_heads > 0 && heads.is_multiple_of(kv_heads)).then_some(shape)
    }

    /// Returns the shape of queries, and of the result.
    #[must_use]
    pub fn queries(&self) -> [u64; 4] {
        [self.batch, self.heads, self.seq, self.head_dim]
    }

    /// Returns the shape of keys, and of values.
    #[must_use]
    pub fn keys(&self) -> [u64; 4] {
        [self.batch, self.kv_heads, self.seq, self.head_dim]
    }

    /// Returns the number of rows of scores, each with a log-sum-exp.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.batch * self.heads * self.seq
    }

    /// Counts the FLOPs: two matmuls of `seq x seq x head_dim` per query head, half of each under a
    /// causal mask; backward five.
    #[must_use]
    pub fn flops(&self, backward: bool) -> u64 {
        let full = 4 * self.rows() * self.seq * self.head_dim;
        let forward = if self.causal { full / 2 } else { full };
        if backward { forward / 2 * 5 } else { forward }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_queries_and_keys() {
        let s = AttentionShape::of(&[2, 8, 16, 4], &[2, 2, 16, 4], true).unwrap();
        assert_eq!((s.heads, s.kv_heads, s.rows()), (8, 2, 256));
        // 8 matrices of 16 x 16 x 4 multiply-adds for each of 2 samples, twice, halved.
        assert_eq!(s.flops(false), 2 * 2 * 2 * 8 * 16 * 16 * 4 / 2);
        assert_eq!(s.flops(true) * 2, s.flops(false) * 5);
        let full = AttentionShape { causal: false, ..s };
        assert_eq!(full.flops(false), 2 * s.flops(false));
        for k in [[2, 3, 16, 4], [2, 0, 16, 4], [2, 2, 8, 4], [1, 2, 16, 4]] {
            assert_eq!(AttentionShape::of(&s.queries(), &k, true), None, "{k:?}");
        }
        assert_eq!(AttentionShape::of(&[2, 8, 16], &[2, 2, 16], true), None);
    }
}
