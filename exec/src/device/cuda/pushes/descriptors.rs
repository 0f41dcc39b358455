//! Sends file descriptors to other processes of the same user and host.
//!
//! Each rank listens at an abstract Unix socket, whose name it publishes. It connects to the
//! sockets of its peers, sends its position and descriptors, and then accepts their connections. No
//! rank waits for a peer before all have connected, so ranks may be threads as well as processes.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Time limit for peers, after all have published the names of their sockets.
const TIMEOUT: Duration = Duration::from_secs(10);
const POLL_PERIOD: Duration = Duration::from_millis(1);
/// Maximum number of descriptors in a message; Linux allows 253.
const MAX_DESCRIPTORS: usize = 128;

/// A socket at which this rank receives descriptors.
#[derive(Debug)]
pub(super) struct Inbox {
    listener: UnixListener,
    name: String,
}

impl Inbox {
    /// Opens a socket with a unique name.
    ///
    /// # Errors
    /// Returns a message if the socket cannot be created.
    pub(super) fn open() -> Result<Self, String> {
        let random = RandomState::new().hash_one(Instant::now());
        let name = format!("shardlab-{}-{random:016x}", std::process::id());
        let opened = SocketAddr::from_abstract_name(&name)
            .and_then(|at| UnixListener::bind_addr(&at))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        let listener = opened.map_err(|e| format!("cannot open the Unix socket {name}: {e}"))?;
        Ok(Self { listener, name })
    }

    /// Returns the name by which peers connect.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Receives `count` descriptors from each of `peers` peers. Returns them with the peers'
    /// positions, in order of arrival.
    ///
    /// # Errors
    /// Returns a message if not all peers have sent their descriptors in time.
    pub(super) fn receive(
        &self,
        peers: usize,
        count: usize,
    ) -> Result<Vec<(usize, Vec<OwnedFd>)>, String> {
        let begin = Instant::now();
        let mut received = Vec::new();
        while received.len() < peers {
            match self.listener.accept() {
                Ok((stream, _)) if is_ours(&stream) => received.push(take(&stream, count)?),
                // Another process connected.
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if begin.elapsed() >= TIMEOUT {
                        return Err(format!(
                            "{} of {peers} peers have sent descriptors of their memory within {TIMEOUT:.0?}",
                            received.len()
                        ));
                    }
                    std::thread::sleep(POLL_PERIOD);
                }
                Err(e) => return Err(format!("cannot accept peers: {e}")),
            }
        }
        Ok(received)
    }
}

/// Returns whether the other end is a process of the same user.
fn is_ours(stream: &UnixStream) -> bool {
    sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

fn take(stream: &UnixStream, count: usize) -> Result<(usize, Vec<OwnedFd>), String> {
    let words = |e: std::io::Error| format!("cannot receive descriptors of a peer's memory: {e}");
    stream.set_nonblocking(false).map_err(words)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(words)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut position = [0; 4];
    let into = &mut [IoSliceMut::new(&mut position)];
    let got = recvmsg(stream, into, &mut control, RecvFlags::CMSG_CLOEXEC);
    let bytes = got.map_err(|e| words(e.into()))?.bytes;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
        }
    }
    if bytes != position.len() || descriptors.len() != count {
        return Err(format!(
            "a peer has sent {bytes} bytes and {} descriptors, not 4 and {count}",
            descriptors.len()
        ));
    }
    Ok((u32::from_le_bytes(position) as usize, descriptors))
}

/// Sends this rank's position and descriptors to the peer that listens at `name`.
///
/// # Errors
/// Returns a message if there are more descriptors than a message can have, or if the peer cannot
/// be reached.
pub(super) fn send(name: &str, position: usize, descriptors: &[OwnedFd]) -> Result<(), String> {
    let words =
        |e: std::io::Error| format!("cannot send descriptors to the Unix socket {name}: {e}");
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(format!(
            "memory in {} pieces, at most {MAX_DESCRIPTORS} can be mapped",
            descriptors.len()
        ));
    }
    let at = SocketAddr::from_abstract_name(name).map_err(words)?;
    let stream = UnixStream::connect_addr(&at).map_err(words)?;
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err("descriptors do not fit into a message".to_owned());
    }
    let position = (position as u32).to_le_bytes();
    let from = &[IoSlice::new(&position)];
    sendmsg(&stream, from, &mut control, SendFlags::empty()).map_err(|e| words(e.into()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, SeekFrom, Write};

    /// Returns an unnamed file that contains a text.
    fn file(text: &str) -> OwnedFd {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.into()
    }

    fn text(descriptor: OwnedFd) -> String {
        let (mut file, mut text) = (File::from(descriptor), String::new());
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn each_rank_has_what_the_others_sent() {
        let inboxes: Vec<Inbox> = (0..3).map(|_| Inbox::open().unwrap()).collect();
        let names: Vec<&str> = inboxes.iter().map(Inbox::name).collect();
        std::thread::scope(|s| {
            for (me, inbox) in inboxes.iter().enumerate() {
                let names = &names;
                s.spawn(move || {
                    let others = || (0..3).filter(|&p| p != me);
                    for to in others() {
                        let mine = [0, 1].map(|n| file(&format!("{me} to {to}, {n}")));
                        send(names[to], me, &mine).unwrap();
                    }
                    let mut got = inbox.receive(2, 2).unwrap();
                    got.sort_by_key(|g| g.0);
                    let got = got.into_iter().flat_map(|(from, sent)| {
                        let sent = sent.into_iter().enumerate();
                        sent.map(move |(n, d)| (format!("{from} to {me}, {n}"), text(d)))
                    });
                    let got: Vec<_> = got.collect();
                    assert_eq!(got.len(), 4);
                    for (expected, found) in got {
                        assert_eq!(expected, found);
                    }
                });
            }
        });
    }

    #[test]
    fn wrong_numbers_of_descriptors_and_missing_peers_are_errors() {
        let inbox = Inbox::open().unwrap();
        send(inbox.name(), 1, &[file("")]).unwrap();
        let why = inbox.receive(1, 2).unwrap_err();
        assert!(why.contains("1 descriptors, not 4 and 2"), "{why}");
        let why = send("shardlab-nobody", 0, &[file("")]).unwrap_err();
        assert!(why.contains("shardlab-nobody"), "{why}");
    }
}
