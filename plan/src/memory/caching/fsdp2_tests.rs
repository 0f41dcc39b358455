//! A replay of FSDP2's schedule through the allocator, compared with published figures of its
//! memory by stream.

use super::*;
use crate::ir::COMPUTE;

const SIDE: StreamId = StreamId(1);

/// FSDP2's allocations in CPU order (PyTorch 2.11 `_fsdp_param_group.py`) for one block of
/// Llama-3-8B: bf16 gathers and gradients, float32 reduction input. Activations and reduced
/// gradients are left out.
struct Fsdp {
    a: CachingAllocator,
    copy_in: StreamId,
    /// Number of elements of each parameter, per group.
    groups: Vec<Vec<u64>>,
    ranks: u64,
    peak: u64,
    gathered: Vec<Option<BlockId>>,
    full: Vec<Vec<BlockId>>,
}

/// Attention q, k, v, o; feed-forward; two norms.
const BLOCK_8B: [u64; 9] = [
    4096 * 4096,
    1024 * 4096,
    1024 * 4096,
    4096 * 4096,
    14_336 * 4096,
    14_336 * 4096,
    14_336 * 4096,
    4096,
    4096,
];

impl Fsdp {
    fn new(groups: Vec<Vec<u64>>, ranks: u64) -> Self {
        let n = groups.len();
        Self {
            a: CachingAllocator::new(false, None),
            copy_in: SIDE,
            groups,
            ranks,
            peak: 0,
            gathered: vec![None; n],
            full: vec![vec![]; n],
        }
    }

    fn take(&mut self, bytes: u64, stream: StreamId) -> BlockId {
        let b = self.a.take(Bytes(bytes), stream).unwrap();
        self.peak = self.peak.max(self.a.counters().allocated.0);
        b
    }

    fn elements(&self, g: usize) -> u64 {
        self.groups[g].iter().sum()
    }

    fn unshard(&mut self, g: usize) {
        if self.gathered[g].is_none() {
            let cast = self.take(2 * self.elements(g) / self.ranks, self.copy_in);
            self.gathered[g] = Some(self.take(2 * self.elements(g), self.copy_in));
            self.a.release(cast);
        }
    }

    fn drop_gathered(&mut self, g: usize) {
        let b = self.gathered[g].take().unwrap();
        self.a.release(b);
    }

    fn copy_out(&mut self, g: usize) {
        for p in self.groups[g].clone() {
            let b = self.take(2 * p, COMPUTE);
            self.full[g].push(b);
        }
    }

    fn reshard(&mut self, g: usize) {
        for b in std::mem::take(&mut self.full[g]) {
            self.a.release(b);
        }
    }

    /// Runs forward. `ahead` is the depth of explicit prefetch (0: implicit).
    fn forward(&mut self, ahead: usize) {
        let n = self.groups.len();
        for g in 0..n {
            self.unshard(g);
            if g > 0 {
                self.drop_gathered(g - 1);
            }
            self.copy_out(g);
            for next in g + 1..n.min(g + 1 + ahead) {
                self.unshard(next);
            }
            self.reshard(g);
        }
        self.drop_gathered(n - 1);
    }

    /// Runs backward with prefetch depth `ahead` and `inputs` retained reduction inputs.
    fn backward(&mut self, ahead: usize, inputs: usize) {
        let mut retained = std::collections::VecDeque::new();
        for g in (0..self.groups.len()).rev() {
            self.unshard(g);
            self.copy_out(g);
            self.drop_gathered(g);
            for next in (g.saturating_sub(ahead)..g).rev() {
                self.unshard(next);
            }
            let grads: Vec<_> = self.groups[g]
                .clone()
                .into_iter()
                .map(|p| self.take(2 * p, COMPUTE))
                .collect();
            self.reshard(g);
            while retained.len() >= inputs {
                self.a.release(retained.pop_front().unwrap());
            }
            retained.push_back(self.take(4 * self.elements(g), COMPUTE));
            for b in grads {
                self.a.release(b);
            }
        }
        for b in retained {
            self.a.release(b);
        }
    }
}

fn close(found: f64, expected: f64) {
    assert!(
        (found / expected - 1.0).abs() < 0.02,
        "{found} is not {expected}"
    );
}

/// Forward of 32 equal blocks: allocated bytes, and reserved bytes of the copy-in and compute
/// streams, in blocks of bf16 weights.
#[test]
fn fsdp2_forward_peaks() {
    for (ranks, ahead, allocated, copy_in) in [
        (128, 0, 2.01, 2.06),
        (8, 0, 2.12, 2.14),
        (8, 1, 3.12, 2.14),
        (8, 2, 4.12, 3.144),
    ] {
        let mut f = Fsdp::new(vec![BLOCK_8B.to_vec(); 32], ranks);
        let unit = 2.0 * f.elements(0) as f64;
        f.forward(ahead);
        close(f.peak as f64 / unit, allocated);
        close(f.a.reserved_of(SIDE).0 as f64 / unit, copy_in);
        close(f.a.reserved_of(COMPUTE).0 as f64 / unit, 1.01);
    }
}

/// Backward of 32 equal blocks over 128 ranks: allocated bytes and reserved bytes of the compute
/// stream, per parameter of a block.
#[test]
fn fsdp2_backward_peaks() {
    for (ahead, inputs, allocated, reserved) in [
        (1, 1, 10.0, 8.06),
        (1, 2, 14.0, 12.07),
        (1, 3, 18.0, 16.08),
        (2, 1, 12.0, 8.06),
    ] {
        let mut f = Fsdp::new(vec![BLOCK_8B.to_vec(); 32], 128);
        let params = f.elements(0) as f64;
        f.forward(0);
        f.peak = 0;
        f.backward(ahead, inputs);
        close(f.peak as f64 / params, allocated);
        close(f.a.reserved_of(COMPUTE).0 as f64 / params, reserved);
        // Forward left two gather buffers, so the second prefetched unit costs nothing extra.
        close(f.a.reserved_of(SIDE).0 as f64 / (2.0 * params), 2.06);
    }
}

/// The head's group is 8 KiB larger than the embedding's 1002 MiB, so its gather does not fit in
/// the embedding's segment: segments of 126, 1002, 418 and 1004 MiB for 1544 MiB of live memory.
#[test]
fn eight_kib_cliff() {
    let vocab = 128_256 * 4096;
    let gathered = |layers, head: &[u64], expandable| {
        let mut groups = vec![vec![vocab]];
        groups.extend(vec![BLOCK_8B.to_vec(); layers]);
        groups.push(head.to_vec());
        let mut f = Fsdp::new(groups, 8);
        f.a = CachingAllocator::new(expandable, None);
        f.forward(0);
        f.a.reserved_of(SIDE).0
    };
    assert_eq!(
        gathered(32, &[4096, vocab], false),
        (126 + 1002 + 418 + 1004) * MIB
    );
    // Layers alternate between the 418 MiB and the 1002 MiB segment. With an odd number, the last
    // layer leaves the latter free, and a head without its norm fits there.
    assert_eq!(
        gathered(31, &[4096, vocab], false),
        (126 + 1002 + 418 + 1004) * MIB
    );
    assert_eq!(gathered(31, &[vocab], false), (126 + 1002 + 418) * MIB);
    // With expandable segments, the range ends where the live spans end, for any groups.
    assert_eq!(
        gathered(31, &[4096, vocab], true),
        gathered(31, &[vocab], true)
    );
}
