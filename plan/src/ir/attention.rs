//! Sizes and variants of attention.

use super::{Documents, Real};
use serde::Serialize;
use std::ops::Range;

/// Modifications of attention scores before the softmax, in this order: the soft cap, the slopes,
/// the window, the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ScoreMod {
    /// Soft limit of the scaled scores, `cap * tanh(score / cap)`; 0 means none.
    pub softcap: Real,
    /// Adds `slope * (key - query)` with the slopes of ALiBi.
    pub alibi: bool,
    /// Number of positions that a query attends to, including its own. Without a causal mask, it
    /// attends to this many on both sides. 0 means all.
    pub window: u64,
    /// Documents of a sequence. A query attends only to keys of its own document.
    pub documents: Documents,
}

impl ScoreMod {
    /// No change.
    pub const NONE: Self = Self {
        softcap: Real(0.0),
        alibi: false,
        window: 0,
        documents: Documents::NONE,
    };
}

/// Returns the ALiBi slope of a head. If the number of heads is not a power of two, the heads after
/// the largest power of two have every second slope of twice as many heads.
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

/// Sizes of a softmax attention. Its cost, kernels and workspace depend on them.
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
    /// Number of keys, if it differs from that of queries (cross attention).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Head size.
    pub head_dim: u64,
    /// Causal mask (half the FLOPs): position `i` attends to positions up to `i`.
    pub causal: bool,
    /// Window ([`ScoreMod::window`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// Documents ([`ScoreMod::documents`]).
    #[serde(skip_serializing_if = "Documents::is_none")]
    pub documents: Documents,
}

impl AttentionShape {
    /// Returns the sizes `[batch, heads, kv_heads, seq, head_dim]` with equally many keys and
    /// queries, without window and documents.
    #[must_use]
    pub const fn new([batch, heads, kv_heads, seq, head_dim]: [u64; 5], causal: bool) -> Self {
        Self {
            batch,
            heads,
            kv_heads,
            seq,
            memory: None,
            head_dim,
            causal,
            window: None,
            documents: Documents::NONE,
        }
    }

    /// Returns the sizes of attention for queries and keys of these shapes,
    /// `[batch, heads, seq, head_dim]` each; `None` if the shapes do not match.
    #[must_use]
    pub fn of(q: &[u64], k: &[u64], causal: bool) -> Option<Self> {
        let (&[batch, heads, seq, head_dim], &[_, kv_heads, ..]) = (q, k) else {
            return None;
        };
        let shape = Self::new([batch, heads, kv_heads, seq, head_dim], causal);
        (shape.keys() == *k && kv_heads > 0 && heads.is_multiple_of(kv_heads)).then_some(shape)
    }

    /// Returns the sizes of attention like [`AttentionShape::of`], but also for queries that attend
    /// to a different number of keys. No mask excludes any of these keys.
    #[must_use]
    pub fn between(q: &[u64], k: &[u64], causal: bool) -> Option<Self> {
        let (&[batch, _, seq, width], &[_, kv_heads, keys, _]) = (q, k) else {
            return None;
        };
        if keys == seq {
            return Self::of(q, k, causal);
        }
        let like = Self::of(q, &[batch, kv_heads, seq, width], false)?;
        let shape = Self {
            memory: Some(keys),
            ..like
        };
        (!causal && shape.keys() == *k).then_some(shape)
    }

    /// Returns the shape of queries, and of the result.
    #[must_use]
    pub fn queries(&self) -> [u64; 4] {
        [self.batch, self.heads, self.seq, self.head_dim]
    }

    /// Returns the shape of keys, and of values.
    #[must_use]
    pub fn keys(&self) -> [u64; 4] {
        [self.batch, self.kv_heads, self.seen(), self.head_dim]
    }

    /// Returns the number of keys per head.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.memory.unwrap_or(self.seq)
    }

    /// Returns the number of rows of scores, each of which has a log-sum-exp.
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

    /// Returns the attention within documents.
    #[must_use]
    pub fn within(self, documents: Documents) -> Self {
        Self { documents, ..self }
    }

    /// Returns the sizes of an attention without documents that costs about the same: it has the
    /// same number of positions, in sequences whose length is the average document length of a
    /// position.
    #[must_use]
    pub fn unpacked(&self) -> Self {
        if self.documents.is_none() {
            return *self;
        }
        let lengths = || self.documents.spans(self.seq).map(|d| d.end - d.start);
        let seq = (lengths().map(|n| n * n).sum::<u64>() / self.seq.max(1)).max(1);
        Self {
            batch: (self.batch * self.seq).div_ceil(seq),
            seq,
            documents: Documents::NONE,
            ..*self
        }
    }

    /// Returns the number of FLOPs. Forward has two matmuls of `seq x seq x head_dim` per query
    /// head and document, and backward has five. A causal mask halves them, and a window limits
    /// them to its pairs. The matrices of cross attention are `seq x memory`.
    #[must_use]
    pub fn flops(&self, backward: bool) -> u64 {
        let each = 4 * self.batch * self.heads * self.head_dim;
        if let Some(keys) = self.memory {
            let forward = each * self.seq * keys;
            return if backward { forward / 2 * 5 } else { forward };
        }
        let of = |document: Range<u64>| {
            let seq = document.end - document.start;
            match self.window {
                Some(w) => each * self.pairs(w.min(seq), seq),
                None if self.causal => each * seq * seq / 2,
                None => each * seq * seq,
            }
        };
        let forward: u64 = self.documents.spans(self.seq).map(of).sum();
        if backward { forward / 2 * 5 } else { forward }
    }

    /// Counts the pairs of `seq` positions that are at most `window - 1` apart.
    fn pairs(&self, window: u64, seq: u64) -> u64 {
        let earlier = window * seq - window * (window - 1) / 2;
        if self.causal {
            earlier
        } else {
            2 * earlier - seq
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slopes that the code of BLOOM and MPT computes.
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
        // Five queries attend to 1, 2, 3, 3 and 3 keys. Without a mask, they also attend to the
        // keys after them.
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

    #[test]
    fn queries_may_see_another_number_of_keys() {
        let (q, k) = ([2, 8, 16, 4], [2, 2, 50, 4]);
        assert_eq!(AttentionShape::of(&q, &k, false), None);
        assert_eq!(AttentionShape::between(&q, &k, true), None);
        assert_eq!(AttentionShape::between(&q, &[2, 2, 50, 3], false), None);
        let s = AttentionShape::between(&q, &k, false).unwrap();
        assert_eq!((s.queries(), s.keys(), s.rows()), (q, k, 256));
        // 8 matrices of 16 x 50 x 4 multiply-adds for each of 2 samples, twice.
        assert_eq!(s.flops(false), 2 * 2 * 2 * 8 * 16 * 50 * 4);
        assert_eq!(s.flops(true) * 2, s.flops(false) * 5);
        let same = AttentionShape::of(&q, &[2, 2, 16, 4], true);
        assert_eq!(AttentionShape::between(&q, &[2, 2, 16, 4], true), same);
    }

    /// Positions attend only to those of their document, as in a separate attention over each
    /// document.
    #[test]
    fn documents_are_sequences_of_their_own() {
        let shape = |seq, causal| {
            let q = [3, 4, seq, 8];
            AttentionShape::of(&q, &q, causal).unwrap()
        };
        let documents = Documents::new(&[4, 2]).unwrap();
        for causal in [false, true] {
            // 4, 2, 4, and 1 position of the last document.
            let alone = [4, 2, 4, 1].map(|n| shape(n, causal).flops(false));
            let packed = shape(11, causal).within(documents);
            assert_eq!(packed.flops(false), alone.iter().sum::<u64>(), "{causal}");
            let seen = |(i, j): &(u64, u64)| {
                let same = documents.span(*i, 11) == documents.span(*j, 11);
                same && i.abs_diff(*j) < 3 && (!causal || j <= i)
            };
            let pairs = (0..11).flat_map(|i| (0..11).map(move |j| (i, j)));
            let windowed = packed.windowed(3).flops(false);
            assert_eq!(windowed, 4 * 3 * 4 * 8 * pairs.filter(seen).count() as u64);
        }
        let eight = shape(64, true)
            .within(Documents::new(&[8]).unwrap())
            .unpacked();
        assert_eq!(
            eight,
            AttentionShape {
                batch: 24,
                ..shape(8, true)
            }
        );
        // (4 * 4 + 2 * 2) / 6 positions on average.
        assert_eq!(shape(6, true).within(documents).unpacked().seq, 3);
    }
}
