//! Recognizes low-rank adapters by the linear layers of forward and the parameters with gradients.

use super::Linear;
use std::collections::BTreeSet;

/// Low-rank adapters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adapters {
    /// Rank.
    pub rank: u64,
    /// Adapted layers by the names of Llama's modules; empty if the order of layers does not
    /// determine them.
    pub targets: Vec<&'static str>,
}

/// Linear layers of a Llama block, in the order in which forward calls them.
const LLAMA: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// Returns the adapters among the linear layers of `blocks` blocks, in the order of forward, and
/// the layers without them. `trained` are the shapes of parameters with gradients.
///
/// An adapter is two layers behind the one that it belongs to, `[out, in]`: `[r, in]` and
/// `[out, r]`. Only the adapter is trained.
pub(super) fn find(
    linears: &[Linear],
    trained: &[Vec<u64>],
    blocks: usize,
) -> Option<(Adapters, Vec<Linear>)> {
    let count = |shape: &[u64]| trained.iter().filter(|p| p[..] == *shape).count();
    let used = |shape: &[u64]| linears.iter().filter(|l| l.weight[..] == *shape).count();
    let rank_of = |at: usize| {
        let (base, a, b) = (linears.get(at)?, linears.get(at + 1)?, linears.get(at + 2)?);
        let ([out, input], [r, a_in], [b_out, b_in]) = (base.weight, a.weight, b.weight);
        let fits = a_in == input
            && b_out == out
            && b_in == r
            && a.input == base.input
            && r < out.min(input);
        let is_trained = count(&a.weight) > 0 && count(&b.weight) > 0;
        (fits && is_trained && count(&base.weight) < used(&base.weight)).then_some(r)
    };
    let (mut ranks, mut adapted, mut layers) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = 0;
    while let Some(linear) = linears.get(at) {
        if let Some(rank) = rank_of(at) {
            ranks.push(rank);
            adapted.push(layers.len());
            at += 2;
        }
        layers.push(*linear);
        at += 1;
    }
    let rank = *ranks.first()?;
    // The head may follow the last block.
    let of_blocks = LLAMA.len() * blocks;
    let is_llama = (layers.len() == of_blocks || layers.len() == of_blocks + 1)
        && adapted.iter().all(|i| *i < of_blocks)
        && ranks.iter().all(|r| *r == rank);
    let mut targets = Vec::new();
    if is_llama {
        let of_block: BTreeSet<usize> = adapted.iter().map(|i| i % LLAMA.len()).collect();
        if adapted.len() == of_block.len() * blocks {
            targets.extend(of_block.into_iter().map(|i| LLAMA[i]));
        }
    }
    Some((Adapters { rank, targets }, layers))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linears(list: &[([u64; 2], u64)]) -> Vec<Linear> {
        list.iter()
            .map(|&(weight, input)| Linear {
                weight,
                input,
                bias: false,
            })
            .collect()
    }

    /// A block of PEFT's Llama as recorded on two H200: rank 16 on q_proj and v_proj.
    #[test]
    fn adapters_follow_their_layers() {
        let block = linears(&[
            ([1024, 1024], 1024),
            ([16, 1024], 1024),
            ([1024, 16], 16),
            ([512, 1024], 1024),
            ([512, 1024], 1024),
            ([16, 1024], 1024),
            ([512, 16], 16),
            ([1024, 1024], 1024),
            ([2816, 1024], 1024),
            ([2816, 1024], 1024),
            ([1024, 2816], 2816),
        ]);
        let trained: Vec<Vec<u64>> = [[16, 1024], [1024, 16], [16, 1024], [512, 16]]
            .iter()
            .map(|p| p.to_vec())
            .collect();
        let (found, layers) = find(&block, &trained, 1).unwrap();
        assert_eq!((found.rank, found.targets), (16, vec!["q_proj", "v_proj"]));
        assert_eq!(layers.len(), 7);
        assert_eq!(layers[4].weight, [2816, 1024]);
    }

    /// A feed-forward layer that is narrower than the hidden size has the shapes of an adapter, but
    /// the layer before it is trained, too.
    #[test]
    fn narrow_layers_are_no_adapters() {
        let block = linears(&[([64, 64], 64), ([16, 64], 64), ([64, 16], 16)]);
        let trained: Vec<Vec<u64>> = block.iter().map(|l| l.weight.to_vec()).collect();
        assert_eq!(find(&block, &trained, 1), None);
        assert!(find(&block, &trained[1..], 1).is_some());
    }
}
