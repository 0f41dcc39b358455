//! Interleaves host and device, for one rank and for many.

use super::{Blocked, Peers, Rank, Symmetric};
use crate::SimError;
use crate::clock::NEVER;
use crate::streams::State;
use shardlab_plan::program::Communicator;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Number of entries that the host issues before the device catches up. It is small enough for the
/// entries to stay in the cache.
const BATCH: u32 = 128;

/// Runs one rank whose peers are identical.
pub(crate) fn run_one(rank: &mut Rank<'_>) -> Result<(), SimError> {
    let mut peers = Symmetric;
    loop {
        rank.unblock();
        rank.run_host(BATCH)?;
        rank.settle();
        // Settling alone may complete the event that the host waits for.
        rank.unblock();
        let limit = if rank.blocked == Blocked::No {
            rank.host
        } else {
            NEVER
        };
        let mut next = rank.next_event();
        while next != NEVER && next <= limit {
            rank.process(next, &mut peers);
            if rank.blocked != Blocked::No && rank.blocked != Blocked::Finished {
                rank.unblock();
                if rank.blocked == Blocked::No {
                    break;
                }
            }
            next = rank.next_event();
        }
        if next == NEVER && rank.blocked != Blocked::No {
            return rank.finished();
        }
    }
}

/// Runs all ranks of a world, joined by their collectives.
pub(crate) fn run_all(
    ranks: &mut [Rank<'_>],
    communicators: &[Communicator],
) -> Result<(), SimError> {
    let mut world = World::new(communicators, ranks.len());
    let mut next: Vec<u64> = Vec::with_capacity(ranks.len());
    let mut queue = BinaryHeap::with_capacity(4 * ranks.len());
    for (r, rank) in ranks.iter_mut().enumerate() {
        let t = rank.prepare()?;
        next.push(t);
        queue.push(Reverse((t, r)));
    }
    while let Some(Reverse((t, r))) = queue.pop() {
        if next[r] != t || t == NEVER {
            continue;
        }
        ranks[r].process(t, &mut world);
        next[r] = ranks[r].prepare()?;
        queue.push(Reverse((next[r], r)));
        // A rank that starts or ends a collective may unblock its peers, which may do the same.
        while let Some((comm, by, starts)) = world.pending.pop() {
            let members = world.members(comm, by);
            for m in members {
                if m == by as usize {
                    continue;
                }
                if starts {
                    ranks[m].start_collective(comm, t);
                } else {
                    ranks[m].end_collective(comm, t, &mut world);
                }
                next[m] = ranks[m].prepare()?;
                queue.push(Reverse((next[m], m)));
            }
        }
    }
    ranks.iter().try_for_each(Rank::finished)
}

impl Rank<'_> {
    /// Lets the host issue until the next device event is certain, and returns the time of that
    /// event.
    fn prepare(&mut self) -> Result<u64, SimError> {
        loop {
            self.unblock();
            self.run_host(BATCH)?;
            self.settle();
            self.unblock();
            let next = self.next_event();
            if self.blocked != Blocked::No || next <= self.host {
                return Ok(next);
            }
        }
    }

    /// Checks that everything that was issued has run.
    fn finished(&self) -> Result<(), SimError> {
        let idle = self
            .streams
            .iter()
            .all(|s| s.state == State::Idle && s.ring.is_empty());
        if idle && self.blocked == Blocked::Finished {
            return Ok(());
        }
        let stuck: Vec<String> = self
            .streams
            .iter()
            .enumerate()
            .filter(|(_, s)| s.state != State::Idle)
            .map(|(i, s)| {
                format!(
                    "stream {i} is {:?} at {:?} {}",
                    s.state,
                    s.ring.front().kind,
                    s.ring.front().arg
                )
            })
            .collect();
        Err(SimError::Deadlock(format!(
            "rank {}: host {:?}; {}",
            self.id,
            self.blocked,
            stuck.join("; ")
        )))
    }
}

/// For each communicator, the ranks that have arrived at and left its current collective.
struct World {
    shapes: Vec<(usize, usize)>,
    arrived: Vec<Vec<u32>>,
    left: Vec<Vec<u32>>,
    /// Collectives that start (true) or end now on all members except the given rank.
    pending: Vec<(u8, u32, bool)>,
}

impl World {
    fn new(communicators: &[Communicator], ranks: usize) -> Self {
        let shapes = communicators
            .iter()
            .map(|c| (c.ranks.size.max(1) as usize, c.ranks.stride.max(1) as usize))
            .collect();
        let counts = vec![vec![0; ranks]; communicators.len()];
        Self {
            shapes,
            arrived: counts.clone(),
            left: counts,
            pending: Vec::new(),
        }
    }

    /// Returns the first member of a rank's group.
    fn base(&self, comm: u8, rank: u32) -> usize {
        let (size, stride) = self.shapes[usize::from(comm)];
        let span = size * stride;
        rank as usize / span * span + rank as usize % stride
    }

    fn members(&self, comm: u8, rank: u32) -> impl Iterator<Item = usize> + use<> {
        let (size, stride) = self.shapes[usize::from(comm)];
        let base = self.base(comm, rank);
        (0..size).map(move |i| base + i * stride)
    }

    fn count(&mut self, rank: u32, comm: u8, starts: bool) -> bool {
        let base = self.base(comm, rank);
        let size = self.shapes[usize::from(comm)].0 as u32;
        let counts = if starts {
            &mut self.arrived
        } else {
            &mut self.left
        };
        let count = &mut counts[usize::from(comm)][base];
        *count += 1;
        if *count < size {
            return false;
        }
        *count = 0;
        if size > 1 {
            self.pending.push((comm, rank, starts));
        }
        true
    }
}

impl Peers for World {
    fn arrive(&mut self, rank: u32, comm: u8) -> bool {
        self.count(rank, comm, true)
    }

    fn leave(&mut self, rank: u32, comm: u8) -> bool {
        self.count(rank, comm, false)
    }
}
