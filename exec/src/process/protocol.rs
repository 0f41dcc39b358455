//! Frames between a process and the store.

use super::codec::{Reader, Writer};
use crate::engine::standing::Standing;
use shardlab_plan::program::InstrId;
use std::io::{self, Read, Write};

/// First bytes of every connection: whoever listens on a port may be somebody else's server.
pub(super) const MAGIC: &[u8; 8] = b"shardl06";
/// Longest frame. The largest are parameters that are gathered for an export.
const LONGEST: u64 = 1 << 40;

/// What a process says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// The first word: which process of how many, of which run, and where it runs.
    Hello {
        process: u32,
        processes: u32,
        run: String,
        place: String,
        attempt: Attempt,
    },
    /// Keep data under a key.
    Put {
        key: String,
        /// After so many answers it is forgotten; for 0 it stays.
        uses: u32,
        data: Vec<u8>,
    },
    /// Answer with a key's data, once it is there.
    Get {
        request: u64,
        key: String,
        /// It may be long until it is there: whoever leaves it does something else before.
        patient: bool,
    },
    /// Answer with everybody's data, once all have brought theirs.
    Gather {
        request: u64,
        key: String,
        mode: Mode,
        data: Vec<u8>,
    },
    /// Still alive, and how far it has come: numbers that change as long as something moves, and where its hosts stand.
    Beat {
        progress: u64,
        running: u32,
        standing: Vec<Standing>,
    },
    /// It cannot go on.
    Fail {
        cause: String,
        /// It has waited for something in vain: another one may be the reason.
        waited: bool,
    },
    /// It is done with the store.
    Bye,
}

/// One of a process's attempts to come to the store. It gives one up where the store is slow to answer, which may read it
/// later all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attempt {
    /// A random number of the process: another one may say that it is the same rank.
    pub(super) instance: u64,
    /// Counts the process's attempts.
    pub(super) number: u32,
}

/// How a gathering is waited for, and who gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mode {
    /// As long as the others live, instead of as long as they move.
    pub(super) patient: bool,
    /// Everybody gets it, not only process 0.
    pub(super) all: bool,
}

/// What the store says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tell {
    /// The process is part of the run. The store is lost once it has been silent for so many milliseconds.
    Welcome { silence_ms: u64 },
    /// It is not.
    Refused { why: String },
    /// An answer.
    Answer { request: u64, parts: Vec<Vec<u8>> },
    /// A wait was given up.
    Late { request: u64, why: String },
    /// A process failed, or is gone.
    Failed {
        process: u32,
        cause: String,
        /// The cause's end, which says where the hosts of all ranks stand; may be empty.
        apart: String,
    },
    /// The answer to a beat.
    Alive,
}

impl Ask {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Hello {
                process,
                processes,
                run,
                place,
                attempt,
            } => {
                w.u8(0);
                w.u32(*process);
                w.u32(*processes);
                w.bytes(run.as_bytes());
                w.bytes(place.as_bytes());
                w.u64(attempt.instance);
                w.u32(attempt.number);
            }
            Self::Put { key, uses, data } => {
                w.u8(1);
                w.bytes(key.as_bytes());
                w.u32(*uses);
                w.bytes(data);
            }
            Self::Get {
                request,
                key,
                patient,
            } => {
                w.u8(2);
                w.u64(*request);
                w.bytes(key.as_bytes());
                w.u8(u8::from(*patient));
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
                w.u8(u8::from(mode.patient) | u8::from(mode.all) << 1);
                w.bytes(data);
            }
            Self::Beat {
                progress,
                running,
                standing,
            } => {
                w.u8(4);
                w.u64(*progress);
                w.u32(*running);
                w.u32(standing.len() as u32);
                for s in standing {
                    w.u32(s.rank);
                    w.u32(s.pass);
                    w.u32(s.step);
                    w.u32(s.instr.0);
                    w.bytes(s.text.as_bytes());
                }
            }
            Self::Fail { cause, waited } => {
                w.u8(5);
                w.bytes(cause.as_bytes());
                w.u8(u8::from(*waited));
            }
            Self::Bye => w.u8(6),
        }
        w.0
    }

    pub(super) fn decode(data: &[u8]) -> Option<Self> {
        let mut r = Reader(data);
        let it = match r.u8()? {
            0 => Self::Hello {
                process: r.u32()?,
                processes: r.u32()?,
                run: text(&mut r)?,
                place: text(&mut r)?,
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
                patient: r.u8()? != 0,
            },
            3 => Self::Gather {
                request: r.u64()?,
                key: text(&mut r)?,
                mode: {
                    let bits = r.u8()?;
                    Mode {
                        patient: bits & 1 != 0,
                        all: bits & 2 != 0,
                    }
                },
                data: r.bytes()?.to_vec(),
            },
            4 => Self::Beat {
                progress: r.u64()?,
                running: r.u32()?,
                standing: r.list(|r| {
                    Some(Standing {
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
                waited: r.u8()? != 0,
            },
            6 => Self::Bye,
            _ => return None,
        };
        r.done().then_some(it)
    }
}

impl Tell {
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
            Self::Late { request, why } => {
                w.u8(3);
                w.u64(*request);
                w.bytes(why.as_bytes());
            }
            Self::Failed {
                process,
                cause,
                apart,
            } => {
                w.u8(4);
                w.u32(*process);
                w.bytes(cause.as_bytes());
                w.bytes(apart.as_bytes());
            }
            Self::Alive => w.u8(5),
        }
        w.0
    }

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
            3 => Self::Late {
                request: r.u64()?,
                why: text(&mut r)?,
            },
            4 => Self::Failed {
                process: r.u32()?,
                cause: text(&mut r)?,
                apart: text(&mut r)?,
            },
            5 => Self::Alive,
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

/// Reads a frame. Room grows as bytes arrive: a length is only a claim.
pub(super) fn read(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST {
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
    fn words_come_back() {
        let mode = Mode {
            patient: false,
            all: true,
        };
        for ask in [
            Ask::Hello {
                process: 3,
                processes: 4,
                run: "r".into(),
                place: "host, process 7".into(),
                attempt: Attempt {
                    instance: u64::MAX - 1,
                    number: 2,
                },
            },
            Ask::Put {
                key: "k".into(),
                uses: 3,
                data: vec![1, 2],
            },
            Ask::Get {
                request: 9,
                key: "k".into(),
                patient: true,
            },
            Ask::Gather {
                request: 1,
                key: String::new(),
                mode,
                data: vec![0; 300],
            },
            Ask::Beat {
                progress: 1,
                running: 2,
                standing: vec![Standing {
                    rank: 3,
                    pass: 4,
                    step: 5,
                    instr: InstrId(6),
                    text: "wait".into(),
                }],
            },
            Ask::Fail {
                cause: "ü".into(),
                waited: true,
            },
            Ask::Bye,
        ] {
            assert_eq!(Ask::decode(&ask.encode()), Some(ask));
        }
        for tell in [
            Tell::Welcome { silence_ms: 5 },
            Tell::Alive,
            Tell::Refused { why: "no".into() },
            Tell::Answer {
                request: 2,
                parts: vec![vec![], vec![1]],
            },
            Tell::Late {
                request: 2,
                why: "rank 1".into(),
            },
            Tell::Failed {
                process: 1,
                cause: "dead".into(),
                apart: "; apart".into(),
            },
        ] {
            assert_eq!(Tell::decode(&tell.encode()), Some(tell));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_trusted(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Ask::decode(&bytes);
            let _ = Tell::decode(&bytes);
            let _ = read(&mut bytes.as_slice());
        }
    }
}
