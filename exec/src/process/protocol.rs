//! Messages between a process and the store, and their encoding as frames.

use super::codec::{Reader, Writer};
use crate::base::divergence::RankProgress;
use shardlab_plan::ir::InstrId;
use std::io::{self, Read, Write};

/// First bytes of every connection, because another program may be listening on the port.
pub(super) const MAGIC: &[u8; 8] = b"shardl07";
/// Maximum length of a frame, in bytes. The longest frames are parameters that are gathered for an
/// export.
const MAX_FRAME: u64 = 1 << 40;

/// Message from a process to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// First message: which process of how many, of which run, and where it runs.
    Hello {
        process: u32,
        processes: u32,
        run: String,
        location: String,
        attempt: Attempt,
    },
    /// Store data under a key.
    Put {
        key: String,
        /// Number of answers after which the data are dropped; 0 keeps them.
        uses: u32,
        data: Vec<u8>,
    },
    /// Answer with the data of a key once they are stored.
    Get {
        request: u64,
        key: String,
        /// Whether the producer may take several times the timeout, because it compiles or
        /// autotunes kernels.
        slow: bool,
    },
    /// Answer with the data of all processes once all have sent theirs.
    Gather {
        request: u64,
        key: String,
        mode: GatherMode,
        data: Vec<u8>,
    },
    /// Sign of life with the progress of the process: see [`Abort::pulse`] and [`RankProgress`].
    ///
    /// [`Abort::pulse`]: crate::base::abort::Abort::pulse
    Heartbeat {
        progress: u64,
        running: u32,
        ranks: Vec<RankProgress>,
    },
    /// The process has failed.
    Fail {
        cause: String,
        /// Whether a wait of the process has timed out, so that another process may be the cause.
        timed_out: bool,
    },
    /// The process closes the connection cleanly.
    Disconnect,
}

/// One of a process's attempts to connect. A process abandons an attempt if the store is slow to
/// answer, but the store may still read it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attempt {
    /// Random number of the process, because another process may claim to be the same rank.
    pub(super) instance: u64,
    /// Index of the attempt.
    pub(super) number: u32,
}

/// How a gather waits, and which processes receive its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GatherMode {
    /// Wait until a peer dies, not only until the watchdog sees no progress.
    pub(super) untimed: bool,
    /// Send the data to all processes, not only to process 0.
    pub(super) to_all: bool,
}

/// Message from the store to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// The process is part of the run. The store counts as lost after this time without a message.
    Welcome { silence_ms: u64 },
    /// The store belongs to another run.
    OtherRun { run: String },
    /// The process is not part of the run.
    Refused { why: String },
    /// The data that a request asked for.
    Answer { request: u64, parts: Vec<Vec<u8>> },
    /// A request has timed out.
    TimedOut { request: u64, why: String },
    /// A process has failed or died.
    Failed {
        process: u32,
        cause: String,
        /// Host positions of all ranks, as the end of the message. May be empty.
        divergence: String,
    },
    /// Answer to a heartbeat.
    Alive,
}

impl Request {
    /// Encodes the message as the bytes of a frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Hello {
                process,
                processes,
                run,
                location,
                attempt,
            } => {
                w.u8(0);
                w.u32(*process);
                w.u32(*processes);
                w.bytes(run.as_bytes());
                w.bytes(location.as_bytes());
                w.u64(attempt.instance);
                w.u32(attempt.number);
            }
            Self::Put { key, uses, data } => {
                w.u8(1);
                w.bytes(key.as_bytes());
                w.u32(*uses);
                w.bytes(data);
            }
            Self::Get { request, key, slow } => {
                w.u8(2);
                w.u64(*request);
                w.bytes(key.as_bytes());
                w.u8(u8::from(*slow));
            }
            Self::Gather {
                request,
                key,
                mode,
                data,
            } => {
                w.u8(3);
                w.u64(*request);
                w.bytes(key.as_bytes());
                w.u8(u8::from(mode.untimed) | u8::from(mode.to_all) << 1);
                w.bytes(data);
            }
            Self::Heartbeat {
                progress,
                running,
                ranks,
            } => {
                w.u8(4);
                w.u64(*progress);
                w.u32(*running);
                w.u32(ranks.len() as u32);
                for s in ranks {
                    w.u32(s.rank);
                    w.u32(s.pass);
                    w.u32(s.step);
                    w.u32(s.instr.0);
                    w.bytes(s.text.as_bytes());
                }
            }
            Self::Fail { cause, timed_out } => {
                w.u8(5);
                w.bytes(cause.as_bytes());
                w.u8(u8::from(*timed_out));
            }
            Self::Disconnect => w.u8(6),
        }
        w.0
    }

    /// Decodes the bytes of a frame; `None` if they are invalid.
    pub(super) fn decode(data: &[u8]) -> Option<Self> {
        let mut r = Reader(data);
        let it = match r.u8()? {
            0 => Self::Hello {
                process: r.u32()?,
                processes: r.u32()?,
                run: text(&mut r)?,
                location: text(&mut r)?,
                attempt: Attempt {
                    instance: r.u64()?,
                    number: r.u32()?,
                },
            },
            1 => Self::Put {
                key: text(&mut r)?,
                uses: r.u32()?,
                data: r.bytes()?.to_vec(),
            },
            2 => Self::Get {
                request: r.u64()?,
                key: text(&mut r)?,
                slow: r.u8()? != 0,
            },
            3 => Self::Gather {
                request: r.u64()?,
                key: text(&mut r)?,
                mode: {
                    let bits = r.u8()?;
                    GatherMode {
                        untimed: bits & 1 != 0,
                        to_all: bits & 2 != 0,
                    }
                },
                data: r.bytes()?.to_vec(),
            },
            4 => Self::Heartbeat {
                progress: r.u64()?,
                running: r.u32()?,
                ranks: r.list(|r| {
                    Some(RankProgress {
                        rank: r.u32()?,
                        pass: r.u32()?,
                        step: r.u32()?,
                        instr: InstrId(r.u32()?),
                        text: text(r)?,
                    })
                })?,
            },
            5 => Self::Fail {
                cause: text(&mut r)?,
                timed_out: r.u8()? != 0,
            },
            6 => Self::Disconnect,
            _ => return None,
        };
        r.done().then_some(it)
    }
}

impl Response {
    /// Encodes the message as the bytes of a frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Welcome { silence_ms } => {
                w.u8(0);
                w.u64(*silence_ms);
            }
            Self::Refused { why } => {
                w.u8(1);
                w.bytes(why.as_bytes());
            }
            Self::Answer { request, parts } => {
                w.u8(2);
                w.u64(*request);
                w.u32(parts.len() as u32);
                parts.iter().for_each(|p| w.bytes(p));
            }
            Self::TimedOut { request, why } => {
                w.u8(3);
                w.u64(*request);
                w.bytes(why.as_bytes());
            }
            Self::Failed {
                process,
                cause,
                divergence,
            } => {
                w.u8(4);
                w.u32(*process);
                w.bytes(cause.as_bytes());
                w.bytes(divergence.as_bytes());
            }
            Self::Alive => w.u8(5),
            Self::OtherRun { run } => {
                w.u8(6);
                w.bytes(run.as_bytes());
            }
        }
        w.0
    }

    /// Decodes the bytes of a frame; `None` if they are invalid.
    pub(super) fn decode(data: &[u8]) -> Option<Self> {
        let mut r = Reader(data);
        let it = match r.u8()? {
            0 => Self::Welcome {
                silence_ms: r.u64()?,
            },
            1 => Self::Refused { why: text(&mut r)? },
            2 => Self::Answer {
                request: r.u64()?,
                parts: r.list(|r| r.bytes().map(<[u8]>::to_vec))?,
            },
            3 => Self::TimedOut {
                request: r.u64()?,
                why: text(&mut r)?,
            },
            4 => Self::Failed {
                process: r.u32()?,
                cause: text(&mut r)?,
                divergence: text(&mut r)?,
            },
            5 => Self::Alive,
            6 => Self::OtherRun { run: text(&mut r)? },
            _ => return None,
        };
        r.done().then_some(it)
    }
}

fn text(r: &mut Reader<'_>) -> Option<String> {
    String::from_utf8(r.bytes()?.to_vec()).ok()
}

/// Writes a frame: its length, then its bytes.
pub(super) fn write(out: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    out.write_all(&(frame.len() as u64).to_le_bytes())?;
    out.write_all(frame)?;
    out.flush()
}

/// Reads a frame. The buffer grows as bytes arrive, because the length is not trusted.
pub(super) fn read(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_FRAME {
        return Err(io::Error::other("a frame has an impossible length"));
    }
    let mut frame = Vec::new();
    from.take(length).read_to_end(&mut frame)?;
    if (frame.len() as u64) < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_round_trip() {
        let mode = GatherMode {
            untimed: false,
            to_all: true,
        };
        for message in [
            Request::Hello {
                process: 3,
                processes: 4,
                run: "r".into(),
                location: "host, process 7".into(),
                attempt: Attempt {
                    instance: u64::MAX - 1,
                    number: 2,
                },
            },
            Request::Put {
                key: "k".into(),
                uses: 3,
                data: vec![1, 2],
            },
            Request::Get {
                request: 9,
                key: "k".into(),
                slow: true,
            },
            Request::Gather {
                request: 1,
                key: String::new(),
                mode,
                data: vec![0; 300],
            },
            Request::Heartbeat {
                progress: 1,
                running: 2,
                ranks: vec![RankProgress {
                    rank: 3,
                    pass: 4,
                    step: 5,
                    instr: InstrId(6),
                    text: "wait".into(),
                }],
            },
            Request::Fail {
                cause: "ü".into(),
                timed_out: true,
            },
            Request::Disconnect,
        ] {
            assert_eq!(Request::decode(&message.encode()), Some(message));
        }
        for response in [
            Response::Welcome { silence_ms: 5 },
            Response::Alive,
            Response::Refused { why: "no".into() },
            Response::OtherRun { run: "r".into() },
            Response::Answer {
                request: 2,
                parts: vec![vec![], vec![1]],
            },
            Response::TimedOut {
                request: 2,
                why: "rank 1".into(),
            },
            Response::Failed {
                process: 1,
                cause: "dead".into(),
                divergence: "; positions".into(),
            },
        ] {
            assert_eq!(Response::decode(&response.encode()), Some(response));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Request::decode(&bytes);
            let _ = Response::decode(&bytes);
            let _ = read(&mut bytes.as_slice());
        }
    }
}
