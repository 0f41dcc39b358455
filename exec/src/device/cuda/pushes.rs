//! Tokens that ranks write into each other's memory over NVLink.
//!
//! [`Pushes`] runs the collectives that push rows (`peer_push`, `peer_return`) and the barriers
//! before them, and leaves all others to NCCL. When memory is registered, the ranks of the
//! communicator exchange descriptors of their memory and map it (`connect`). A window of a peer is
//! the place of its buffer (`windows`). A kernel then writes the selected rows, signals to all
//! ranks that they have arrived, and waits for the signals of the others (`kernels`).
//!
//! If any rank cannot map the memory of another one, all ranks leave pushes to NCCL, which sends
//! all rows. A push whose window is in memory that was added after the ranks connected also goes
//! through NCCL. All ranks add the same memory, so all of them make the same choice.

mod agreement;
mod connect;
mod descriptors;
mod kernels;
mod mapping;
mod windows;

pub(super) use kernels::PushKernels;

use super::collectives::Collectives;
use super::context::Context;
use super::driver::RawStream;
use super::memory::{Piece, Pinned};
use super::nccl::NcclCollectives;
use crate::base::operand::RawRange;
use crate::device::Setup;
use crate::process::ProcessGroup;
use agreement::{Agreement, Refusal};
use connect::{Connected, connect};
use kernels::{MAX_RANKS, Rows};
use shardlab_plan::ir::{Collective, CollectiveId, CollectiveKind, CommId, SelectedRows, StreamId};
use shardlab_plan::program::{Op, Program};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use windows::Windows;

/// Name of this feature in the facts of a run.
const PEER_MEMORY: &str = "peer_memory";

/// Returns the communicator whose collectives push rows, if there is one.
#[must_use]
pub(super) fn communicator(program: &Program) -> Option<CommId> {
    let all = &program.collectives;
    let pushing = all.iter().find(|c| c.kind.pushes())?;
    let size = program.communicators[pushing.comm.index()].ranks.size;
    (size > 1).then_some(pushing.comm)
}

/// How rows travel.
enum Way {
    /// Into mapped memory.
    Mapped(Box<Connected>),
    /// Through NCCL, for the given reason.
    Nccl(String),
}

/// A word in host memory that ends waits of kernels.
#[derive(Clone)]
struct StopWord(Arc<Pinned>);

impl StopWord {
    fn stop(&self) {
        // SAFETY: an aligned word of pinned memory, which kernels only read.
        let word = unsafe { AtomicU32::from_ptr(self.0.ptr().cast()) };
        word.store(1, Ordering::SeqCst);
    }
}

/// Collectives of one rank. See the module documentation. Fields are dropped in order.
pub(super) struct Pushes {
    nccl: NcclCollectives,
    way: Way,
    kernels: PushKernels,
    stop: StopWord,
    program: Arc<Program>,
    comm: CommId,
    rank: u32,
    session: u32,
    peers: Arc<ProcessGroup>,
    allowed: bool,
    context: Arc<Context>,
}

impl Pushes {
    /// Wraps the collectives of a rank. Pushes only if this is `allowed` on all ranks.
    ///
    /// # Errors
    /// Returns a message if there is no pinned memory, or if no collective of the program pushes
    /// rows.
    pub(super) fn new(
        nccl: NcclCollectives,
        setup: &Setup,
        rank: u32,
        context: &Arc<Context>,
        kernels: PushKernels,
        allowed: bool,
    ) -> Result<Self, String> {
        let comm = communicator(&setup.program);
        let stop = Pinned::new(context, size_of::<u32>()).map_err(|e| e.to_string())?;
        Ok(Self {
            nccl,
            way: Way::Nccl("memory has not been registered".to_owned()),
            kernels,
            stop: StopWord(Arc::new(stop)),
            program: Arc::clone(&setup.program),
            comm: comm.ok_or("no collective of the program pushes rows")?,
            rank,
            session: setup.session,
            peers: Arc::clone(setup.world.process_group()),
            allowed,
            context: Arc::clone(context),
        })
    }

    /// Returns the reason why this rank cannot push, without asking the others.
    fn obstacle(&self) -> Option<String> {
        if !self.allowed {
            return Some("--no-peer-memory".to_owned());
        }
        (streams(&self.program, self.comm).len() > 1)
            .then(|| "several streams push rows".to_owned())
    }

    fn connect(&self, memory: &[Piece]) -> Result<Connected, Refusal> {
        let comm = &self.program.communicators[self.comm.index()];
        let ranks: Vec<u32> = comm.ranks.members(self.rank).collect();
        let agreement = Agreement {
            peers: &self.peers,
            name: format!("memory {} {} {}", self.session, comm.name, ranks[0]),
            ranks: &ranks,
            position: comm.ranks.position(self.rank) as usize,
        };
        let stop = self.stop.0.ptr().addr() as u64;
        connect(&agreement, &self.context, memory, stop, self.obstacle())
    }
}

/// Returns the streams on which a communicator pushes rows or waits for pushes.
fn streams(program: &Program, comm: CommId) -> BTreeSet<StreamId> {
    let of = program.instrs.iter().filter_map(|i| match i.op {
        Op::Collective { id, stream } => {
            let c = &program.collectives[id.index()];
            let signals = c.kind.pushes() || c.kind == CollectiveKind::Barrier;
            (c.comm == comm && signals).then_some(stream)
        }
        _ => None,
    });
    of.collect()
}

/// Returns the rows that a push moves; `None` if its window is not mapped on all ranks.
fn rows(
    c: &Collective,
    ranks: u32,
    parts: &[(RawRange, RawRange)],
    windows: &Windows,
) -> Result<Option<Rows>, String> {
    let of = c.sent.map(|sent| sent.of);
    let (Some(SelectedRows::Pushed(sent)), &[(from, window), (choices, _)]) = (of, parts) else {
        return Err(format!(
            "{} has {} parts, not 2",
            c.kind.name(),
            parts.len()
        ));
    };
    let (all, ranks) = (sent.rows.max(1), u64::from(ranks));
    let (tokens, width) = (all / ranks, window.bytes as u64 / all);
    let k = choices.bytes as u64 / 8 / all;
    let back = c.kind == CollectiveKind::PeerReturn;
    let sources = if back { all } else { tokens };
    let whole = tokens * ranks == sent.rows
        && window.bytes as u64 == all * width
        && from.bytes as u64 == sources * width
        && choices.bytes as u64 == all * k * 8;
    let small = |n: u64| u32::try_from(n).ok();
    let (true, Some(tokens), Some(k), Some(width)) = (whole, small(tokens), small(k), small(width))
    else {
        return Err(format!(
            "{}: {} bytes from {} for {} rows of {ranks} ranks, {} bytes of choices",
            c.kind.name(),
            window.bytes,
            from.bytes,
            sent.rows,
            choices.bytes
        ));
    };
    let address = |r: &RawRange| r.ptr.addr() as u64;
    let Some(places) = windows.of(address(&window), window.bytes as u64) else {
        return Ok(None);
    };
    let mut to = [0; MAX_RANKS];
    to.iter_mut()
        .zip(places)
        .for_each(|(to, place)| *to = place);
    Ok(Some(Rows {
        to,
        from: address(&from),
        choices: address(&choices),
        experts: sent.experts,
        tokens,
        k,
        width,
        back: u32::from(back),
    }))
}

impl Collectives for Pushes {
    fn register(&mut self, memory: &[Piece]) -> Result<(), String> {
        self.nccl.register(memory)?;
        self.way = match self.connect(memory) {
            Ok(connected) => Way::Mapped(Box::new(connected)),
            Err(Refusal::Together(why)) => Way::Nccl(why),
            Err(Refusal::Run(why)) => return Err(why),
        };
        Ok(())
    }

    fn launch(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<(), String> {
        let c = &self.program.collectives[id.index()];
        if let (Way::Mapped(with), true) = (&self.way, c.comm == self.comm) {
            if c.kind == CollectiveKind::Barrier {
                let met = self.kernels.meet(&with.team, stream);
                return met.map_err(|e| e.to_string());
            }
            if c.kind.pushes()
                && let Some(rows) = rows(c, with.team.ranks, parts, &with.windows)?
            {
                let pushed = self.kernels.push(&with.team, &rows, stream);
                return pushed.map_err(|e| e.to_string());
            }
        }
        self.nccl.launch(id, parts, stream)
    }

    fn estimate(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<Option<Duration>, String> {
        self.nccl.estimate(id, parts, stream)
    }

    fn poll(&mut self) -> Result<(), String> {
        self.nccl.poll()
    }

    fn abort(&mut self) -> bool {
        // NCCL waits for the GPU, on which a kernel may wait for a peer.
        self.stop.stop();
        self.nccl.abort()
    }

    fn aborter(&self) -> Box<dyn Fn() + Send> {
        let (stop, nccl) = (self.stop.clone(), self.nccl.aborter());
        Box::new(move || {
            stop.stop();
            nccl();
        })
    }

    fn facts(&self) -> BTreeMap<String, String> {
        let mut facts = self.nccl.facts();
        if let Way::Mapped(_) = self.way {
            facts.insert(PEER_MEMORY.to_owned(), "mapped".to_owned());
        }
        facts
    }

    fn unused(&self) -> Option<(&'static str, String)> {
        match &self.way {
            Way::Mapped(_) => None,
            Way::Nccl(why) => Some((PEER_MEMORY, why.clone())),
        }
    }
}

#[cfg(test)]
mod tests;
