//! Recognizes layers of experts by the shapes of a block's parameters.

use std::collections::BTreeMap;

/// A layer of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Experts {
    /// Number of routed experts.
    pub count: u64,
    /// Experts per token; `None` if the trace does not show the choice.
    pub top_k: Option<u64>,
    /// Width of an expert; `None` if shapes do not determine it.
    pub width: Option<u64>,
    /// Width of the shared expert.
    pub shared: Option<u64>,
    /// Whether a projection to one number weights the shared expert.
    pub shared_gate: bool,
    /// Whether experts have biases.
    pub bias: bool,
}

/// Says whether a parameter belongs to experts.
type IsExpert = Box<dyn Fn(&Vec<u64>) -> bool>;

/// Returns the experts in the parameters of `blocks` blocks of this hidden size, and the parameters
/// outside of them. `choice` are the arguments of a top-k: k and the number it chooses from.
///
/// A layer of experts has a router, `[experts, hidden]`, and its experts are either tensors of
/// three dimensions, `[experts, in, out]` in one of both orders, or a linear layer for each expert
/// and projection.
pub(super) fn find(
    parameters: &[Vec<u64>],
    hidden: u64,
    choice: Option<(u64, u64)>,
    blocks: usize,
) -> Option<(Experts, Vec<Vec<u64>>)> {
    let routers = |n: u64| parameters.iter().filter(|p| p[..] == [n, hidden]).count();
    let stacked = parameters.iter().filter_map(|p| match p[..] {
        [n, a, b] if a == hidden && b != hidden => Some((n, b)),
        [n, a, b] if b == hidden => Some((n, a)),
        _ => None,
    });
    let mut widths: BTreeMap<u64, BTreeMap<u64, usize>> = BTreeMap::new();
    for (n, width) in stacked {
        *widths.entry(n).or_default().entry(width).or_default() += 1;
    }
    // Expert parallelism leaves a part of the experts on each rank.
    let count_of = |local: u64| match choice {
        Some((_, of)) if routers(of) > 0 && of % local == 0 => Some(of),
        _ => (routers(local) > 0).then_some(local),
    };
    let found = widths
        .iter()
        .find_map(|(local, of)| Some((*local, count_of(*local)?, of)));
    let mut experts = Experts::default();
    let is_expert: IsExpert = if let Some((local, count, of)) = found {
        experts.count = count;
        experts.width = width(of);
        let merged: Vec<u64> = of.keys().flat_map(|w| [*w, 2 * w]).collect();
        let is_bias = move |p: &Vec<u64>| p.len() == 2 && p[0] == local && merged.contains(&p[1]);
        experts.bias = parameters.iter().any(&is_bias);
        let biased = experts.bias;
        Box::new(move |p| {
            p.len() == 3 && p[0] == local
                || is_bias(p)
                || biased && (p[..] == [local, hidden] || p[..] == [count])
        })
    } else {
        let (count, width) = apart(parameters, hidden, choice, blocks)?;
        experts.count = count;
        experts.width = Some(width);
        Box::new(move |p| p[..] == [width, hidden] || p[..] == [hidden, width])
    };
    experts.top_k = choice.filter(|c| c.1 == experts.count).map(|c| c.0);
    let count = experts.count;
    let others: Vec<Vec<u64>> = parameters
        .iter()
        .filter(|p| !is_expert(p) && p[..] != [count, hidden])
        .cloned()
        .collect();
    experts.shared_gate = others.iter().any(|p| p[..] == [1, hidden]);
    Some((experts, others))
}

/// Returns the width of experts from the widths of their tensors: a merged gate and up projection
/// is twice as wide.
fn width(of: &BTreeMap<u64, usize>) -> Option<u64> {
    let all: Vec<u64> = of.keys().copied().collect();
    match all[..] {
        [w] => Some(w),
        [w, both] if both == 2 * w => Some(w),
        _ => None,
    }
}

/// Returns number and width of experts that are linear layers of their own: two or three
/// projections of the same shape for each.
fn apart(
    parameters: &[Vec<u64>],
    hidden: u64,
    choice: Option<(u64, u64)>,
    blocks: usize,
) -> Option<(u64, u64)> {
    let mut widths: BTreeMap<u64, u64> = BTreeMap::new();
    for p in parameters {
        match p[..] {
            [w, h] | [h, w] if h == hidden && w != hidden => *widths.entry(w).or_default() += 1,
            _ => {}
        }
    }
    let blocks = blocks.max(1) as u64;
    let counts: Vec<u64> = match choice {
        Some((_, of)) => vec![of],
        None => widths.keys().copied().collect(),
    };
    counts.into_iter().find_map(|count| {
        let routed = widths.get(&count)?.div_ceil(blocks) * count;
        let is_expert = |n: u64| count > 1 && (n == 3 * routed || n == 2 * routed) && n > 3;
        let found = widths
            .iter()
            .find(|(w, n)| **w != count && is_expert(n.div_ceil(blocks)));
        found.map(|(w, _)| (count, *w))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes(list: &[&[u64]]) -> Vec<Vec<u64>> {
        list.iter().map(|p| p.to_vec()).collect()
    }

    /// A block of Qwen3-MoE in transformers 5, as its gradients are packed on two H200: hidden size
    /// 1024, 16 experts of width 768, of which a token has 4.
    #[test]
    fn stacked_experts() {
        let block = shapes(&[
            &[1024, 1024],
            &[256, 1024],
            &[256, 1024],
            &[1024, 1024],
            &[64],
            &[64],
            &[16, 1536, 1024],
            &[16, 1024, 768],
            &[16, 1024],
            &[1024],
            &[1024],
        ]);
        let (found, others) = find(&block, 1024, Some((4, 16)), 1).unwrap();
        let expected = Experts {
            count: 16,
            top_k: Some(4),
            width: Some(768),
            ..Experts::default()
        };
        assert_eq!(found, expected);
        assert_eq!(others.len(), 8);
        // A choice of something else does not say how many experts a token has.
        let (found, _) = find(&block, 1024, Some((50, 32000)), 1).unwrap();
        assert_eq!((found.count, found.top_k), (16, None));
    }

    /// gpt-oss has biases, and its projections have the input first.
    #[test]
    fn experts_with_biases() {
        let block = shapes(&[
            &[32, 2880],
            &[32],
            &[32, 2880, 5760],
            &[32, 5760],
            &[32, 2880, 2880],
            &[32, 2880],
            &[2880],
        ]);
        // Width and hidden size are equal, so the down projection says nothing.
        let (found, _) = find(&block, 2880, Some((4, 32)), 1).unwrap();
        assert!(found.bias);
        assert_eq!(found.count, 32);
    }

    #[test]
    fn experts_that_are_modules() {
        // Two blocks of Mixtral's form: 4 experts of three projections of width 48.
        let mut two = Vec::new();
        for _ in 0..2 {
            two.extend(shapes(&[&[4, 32], &[32, 32], &[32]]));
            for _ in 0..4 {
                two.extend(shapes(&[&[48, 32], &[32, 48], &[48, 32]]));
            }
        }
        let (found, others) = find(&two, 32, None, 2).unwrap();
        assert_eq!((found.count, found.width), (4, Some(48)));
        assert_eq!(others.len(), 4);
        let (found, _) = find(&two[..15], 32, Some((2, 4)), 1).unwrap();
        assert_eq!((found.count, found.top_k), (4, Some(2)));
    }

    #[test]
    fn part_of_the_experts_is_on_each_rank() {
        let block = shapes(&[&[8, 64], &[4, 64, 96], &[4, 48, 64]]);
        let (found, others) = find(&block, 64, Some((2, 8)), 1).unwrap();
        assert_eq!((found.count, found.width), (8, Some(48)));
        assert_eq!(others, Vec::<Vec<u64>>::new());
    }

    #[test]
    fn dense_blocks_have_none() {
        let gated = shapes(&[&[64, 64], &[16, 64], &[128, 64], &[128, 64], &[64, 128]]);
        assert_eq!(find(&gated, 64, None, 1), None);
        // A convolution over time has three dimensions, and no router.
        assert_eq!(find(&shapes(&[&[80, 64, 3], &[64, 64]]), 64, None, 1), None);
    }
}
