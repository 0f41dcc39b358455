//! Maps the memory of the ranks that push to each other, either on all of them or on none.

use super::super::context::Context;
use super::super::driver::{CudaError, check};
use super::super::memory::Piece;
use super::agreement::{Agreement, Refusal};
use super::descriptors::{Inbox, send};
use super::kernels::{MAX_RANKS, SIGNAL_BYTES, Team, probe_of};
use super::mapping::{Mapping, export};
use super::windows::{Window, Windows};
use cudarc::driver::sys;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Value that ranks write into each other's signals, plus the position of the writer, to test
/// whether it arrives.
const PROBE: u32 = 0x5eed_0000;

/// Memory of all ranks, mapped on this one.
pub(super) struct Connected {
    pub(super) windows: Windows,
    pub(super) team: Team,
    _signals: Mapping,
    _peers: Vec<Mapping>,
}

/// What a rank offers to its peers.
struct Offered {
    inbox: Inbox,
    signals: Mapping,
    /// Descriptors of all pieces of memory, and of the signals.
    descriptors: Vec<OwnedFd>,
}

/// Maps the memory of the other ranks. All ranks call it at the same time. `abort` is the device
/// address of a word that ends waits. `obstacle` is a reason not to map anything.
///
/// # Errors
/// Returns [`Refusal`] if any rank cannot map the memory of another one; it is equal on all ranks.
pub(super) fn connect(
    agreement: &Agreement<'_>,
    context: &Arc<Context>,
    memory: &[Piece],
    abort: u64,
    obstacle: Option<String>,
) -> Result<Connected, Refusal> {
    let offered = obstacle.map_or_else(|| offer(context, memory), Err);
    let (offered, offers) = agreement.step("offer", offered)?;
    let connected = exchange(agreement, context, memory, offered, &offers, abort);
    let (connected, _) = agreement.step("mapping", connected.map(|c| (c, Vec::new())))?;
    // All ranks have written their probes.
    let arrived = arrived(agreement, &connected);
    agreement.step("probe", arrived.map(|()| ((), Vec::new())))?;
    Ok(connected)
}

fn words(e: CudaError) -> String {
    e.to_string()
}

/// Makes this rank's memory available. Returns what peers must know, one item per line: the host,
/// the name of the socket, and the layout of the memory.
fn offer(context: &Arc<Context>, memory: &[Piece]) -> Result<(Offered, Vec<u8>), String> {
    let signals = Mapping::new(context, SIGNAL_BYTES).map_err(words)?;
    let own = memory.iter().map(|p| export(p.handle));
    let descriptors = own.chain([signals.export()]).collect::<Result<_, _>>();
    let inbox = Inbox::open()?;
    // Equal for all processes of a host, in any container; empty if it is hidden.
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let layout = layout(memory, signals.bytes());
    let text = format!("{}\n{}\n{layout}", host.trim(), inbox.name());
    let offered = Offered {
        inbox,
        signals,
        descriptors: descriptors.map_err(words)?,
    };
    Ok((offered, text.into_bytes()))
}

/// Describes memory by allocator addresses and lengths.
fn layout(memory: &[Piece], signals: usize) -> String {
    let pieces = memory
        .iter()
        .map(|p| format!("{:#x}+{:#x} ", p.address, p.bytes));
    pieces.chain([format!("{signals:#x}")]).collect()
}

/// Returns the names of the ranks' sockets, after checking that all are on this host and have the
/// same memory.
fn names<'o>(offers: &'o [Vec<u8>], agreement: &Agreement<'_>) -> Result<Vec<&'o str>, String> {
    let parse = |offer: &'o Vec<u8>| -> Option<[&'o str; 3]> {
        let lines: Vec<&str> = std::str::from_utf8(offer).ok()?.split('\n').collect();
        lines.try_into().ok()
    };
    let unreadable = || "an unreadable offer of memory".to_owned();
    let [host, _, layout] = offers
        .get(agreement.position)
        .and_then(parse)
        .ok_or_else(unreadable)?;
    let name = |(offer, rank): (&'o Vec<u8>, &u32)| {
        let [its_host, name, its_layout] = parse(offer).ok_or_else(unreadable)?;
        if its_host != host {
            return Err(format!("rank {rank} is on another host"));
        }
        if its_layout != layout {
            return Err(format!(
                "memory of rank {rank} is {its_layout}, not {layout}"
            ));
        }
        Ok(name)
    };
    offers.iter().zip(agreement.ranks).map(name).collect()
}

/// Exchanges descriptors, maps the memory that they refer to, and writes a probe into each peer's
/// signals.
fn exchange(
    agreement: &Agreement<'_>,
    context: &Arc<Context>,
    memory: &[Piece],
    offered: Offered,
    offers: &[Vec<u8>],
    abort: u64,
) -> Result<Connected, String> {
    let (me, n) = (agreement.position, agreement.ranks.len());
    if n > MAX_RANKS {
        return Err(format!(
            "{n} ranks, at most {MAX_RANKS} can push to one another"
        ));
    }
    let names = names(offers, agreement)?;
    for name in (0..n).filter(|&p| p != me).map(|p| names[p]) {
        send(name, me, &offered.descriptors)?;
    }
    let signals = offered.signals;
    let lengths = memory.iter().map(|p| p.bytes).chain([signals.bytes()]);
    let lengths: Vec<usize> = lengths.collect();
    // By piece, then by position.
    let own = memory.iter().map(|p| p.start).chain([signals.start()]);
    let mut starts: Vec<Vec<u64>> = own.map(|start| vec![start; n]).collect();
    let mut peers = Vec::new();
    for (position, descriptors) in offered.inbox.receive(n - 1, lengths.len())? {
        if position >= n || position == me {
            return Err(format!("a peer has sent position {position} of {n}"));
        }
        for ((descriptor, &bytes), starts) in descriptors.iter().zip(&lengths).zip(&mut starts) {
            let mapping = Mapping::import(context, descriptor.as_fd(), bytes);
            let mapping = mapping
                .map_err(|e| format!("memory of rank {}: {e}", agreement.ranks[position]))?;
            starts[position] = mapping.start();
            peers.push(mapping);
        }
    }
    let mut team = Team {
        signals: [0; MAX_RANKS],
        abort,
        ranks: n as u32,
        me: me as u32,
    };
    let at = starts.pop().unwrap_or_default();
    team.signals[..n].copy_from_slice(&at);
    for (_, at) in at.iter().enumerate().filter(|&(p, _)| p != me) {
        // SAFETY: a word of a peer's signals, which is mapped here, and which only this rank
        // writes.
        check("cuMemsetD32", unsafe {
            sys::cuMemsetD32_v2(at + probe_of(me), PROBE + me as u32, 1)
        })
        .map_err(words)?;
    }
    // SAFETY: no conditions.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() }).map_err(words)?;
    let window = |(starts, &bytes): (Vec<u64>, &usize)| Window {
        bytes: bytes as u64,
        me,
        starts,
    };
    Ok(Connected {
        windows: Windows::new(starts.into_iter().zip(&lengths).map(window).collect()),
        team,
        _signals: signals,
        _peers: peers,
    })
}

/// Checks that the peers' probes have arrived in this rank's signals.
fn arrived(agreement: &Agreement<'_>, connected: &Connected) -> Result<(), String> {
    let me = agreement.position;
    let own = connected.team.signals[me];
    for (position, rank) in agreement.ranks.iter().enumerate() {
        if position == me {
            continue;
        }
        let mut found = 0u32;
        // SAFETY: a word of this rank's signals, which no one writes any more.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2((&raw mut found).cast(), own + probe_of(position), 4)
        })
        .map_err(words)?;
        if found != PROBE + position as u32 {
            return Err(format!(
                "what rank {rank} has written into this rank's memory has not arrived"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessGroup;

    fn piece(address: u64, bytes: usize) -> Piece {
        Piece {
            address,
            start: 0,
            bytes,
            handle: 0,
        }
    }

    #[test]
    fn ranks_of_one_host_with_equal_memory_connect() {
        let peers = ProcessGroup::single();
        let agreement = Agreement {
            peers: &peers,
            name: String::new(),
            ranks: &[2, 3],
            position: 1,
        };
        let names = |one: [&str; 3], other: [&str; 3]| {
            let offers = [one, other].map(|o| o.join("\n").into_bytes());
            let names = names(&offers, &agreement)?;
            Ok::<_, String>(names.join(" "))
        };
        let same = layout(&[piece(0x40_0000, 0x20_0000)], 0x4000);
        assert_eq!(same, "0x400000+0x200000 0x4000");
        let more = layout(&[piece(0x40_0000, 0x40_0000)], 0x4000);
        assert_eq!(
            names(["h", "a", &same], ["h", "b", &same]),
            Ok("a b".to_owned())
        );
        assert_eq!(
            names(["g", "a", &same], ["h", "b", &same]),
            Err("rank 2 is on another host".to_owned())
        );
        let why = names(["h", "a", &more], ["h", "b", &same]).unwrap_err();
        assert!(
            why.starts_with("memory of rank 2 is 0x400000+0x400000"),
            "{why}"
        );
        assert!(names(["h", "a", "x\ny"], ["h", "b", &same]).is_err());
    }
}
