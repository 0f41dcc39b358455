//! Sizes and variants of attention.

use super::Real;
use serde::Serialize;

/// Changes of attention scores before the softmax, in this order: the soft cap, the slopes, the
/// window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ScoreMod {
    /// Soft limit of the scaled scores: `cap * tanh(score / cap)`; 0: none.
    pub softcap: Real,
    /// Adds `slope * (key - query)` with the slopes of ALiBi.
    pub alibi: bool,
    /// Number of positions that a query sees, its own included; without a causal mask as many on
    /// both sides. 0: all.
    pub window: u64,
}

impl ScoreMod {
    /// No change.
    pub const NONE: Self = Self {
        softcap: Real(0.0),
        alibi: false,
        window: 0,
    };
}

/// Returns the slope of a head in ALiBi. If the number of heads is not a power of two, the heads
/// after the largest power have every second slope of twice as many.
#[must_use]
pub fn alibi_slope(head: u64, heads: u64) -> f64 {
    let power = 1 << heads.max(1).ilog2();
    let exponent = if head < power {
        (head + 1) as f64 / power as f64
    } else {
        (2 * (head - power) + 1) as f64 / (2 * power) as f64
    };
    (-8.0 * exponent).exp2()
}

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
    /// Window ([`ScoreMod::window`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
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
            window: None,
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

    /// Returns the attention with a window; 0 for none.
    #[must_use]
    pub fn windowed(self, window: u64) -> Self {
        Self {
            window: (1..self.seq).contains(&window).then_some(window),
            ..self
        }
    }

    /// Counts the FLOPs: two matmuls of `seq x seq x head_dim` per query head, half of each under a
    /// causal mask, those of the pairs in the window if there is one; backward five.
    #[must_use]
    pub fn flops(&self, backward: bool) -> u64 {
        let full = 4 * self.rows() * self.seq * self.head_dim;
        let forward = match self.window {
            Some(w) => 4 * self.batch * self.heads * self.head_dim * self.pairs(w),
            None if self.causal => full / 2,
            None => full,
        };
        if backward { forward / 2 * 5 } else { forward }
    }

    /// Counts the pairs of positions at most `window - 1` apart.
    fn pairs(&self, window: u64) -> u64 {
        let earlier = window * self.seq - window * (window - 1) / 2;
        if self.causal {
            earlier
        } else {
            2 * earlier - self.seq
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slopes that BLOOM's and MPT's code compute.
    #[test]
    fn slopes_are_powers_of_two() {
        let of = |heads| {
            (0..heads)
                .map(|h| alibi_slope(h, heads).log2())
                .collect::<Vec<_>>()
        };
        assert_eq!(of(4), [-2.0, -4.0, -6.0, -8.0]);
        assert_eq!(of(6), [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]);
    }

    #[test]
    fn sizes_follow_from_queries_and_keys() {
        let s = AttentionShape::of(&[2, 8, 16, 4], &[2, 2, 16, 4], true).unwrap();
        assert_eq!((s.heads, s.kv_heads, s.rows()), (8, 2, 256));
        // 8 matrices of 16 x 16 x 4 multiply-adds for each of 2 samples, twice, halved.
        assert_eq!(s.flops(false), 2 * 2 * 2 * 8 * 16 * 16 * 4 / 2);
        assert_eq!(s.flops(true) * 2, s.flops(false) * 5);
        let full = AttentionShape { causal: false, ..s };
        assert_eq!(full.flops(false), 2 * s.flops(false));
        // Five queries see 1, 2, 3, 3 and 3 keys; without a mask the keys behind them as well.
        let five = AttentionShape::of(&[1, 1, 5, 2], &[1, 1, 5, 2], true).unwrap();
        assert_eq!(five.windowed(3).flops(false), 4 * 2 * 12);
        let both = AttentionShape {
            causal: false,
            ..five
        };
        assert_eq!(both.windowed(3).flops(false), 4 * 2 * (12 + 7));
        assert_eq!(five.windowed(5), five);
        for k in [[2, 3, 16, 4], [2, 0, 16, 4], [2, 2, 8, 4], [1, 2, 16, 4]] {
            assert_eq!(AttentionShape::of(&s.queries(), &k, true), None, "{k:?}");
        }
        assert_eq!(AttentionShape::of(&[2, 8, 16], &[2, 2, 16], true), None);
    }
}
