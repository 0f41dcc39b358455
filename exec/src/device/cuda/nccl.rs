//! Collectives of one rank through NCCL.
//!
//! Each communicator that some collective of the program uses becomes an NCCL communicator. They
//! are created in the program's order on every rank, and several streams may use the same one.
//! Everything that NCCL would initialize at its first use is initialized when ranks join, so that
//! only launches happen during graph capture.

mod check;
mod init_timeout;

pub(super) use init_timeout::InitTimeout;

use super::collectives::Collectives;
use super::driver::{RawStream, read};
use super::memory::Piece;
use crate::base::abort::{Abort, lock};
use crate::base::element;
use crate::base::operand::RawRange;
use crate::base::options::Registration as Mode;
use crate::comm;
use crate::process::ProcessGroup;
use nccl_rs::{
    Communicator, Config, CtaPolicy, Nccl, PreMulSum, RedOp, Registration, Search, Splits, Stream,
    UniqueId, Watch, Window, WindowKind,
};
use shardlab_plan::Program;
use shardlab_plan::ir::{Collective, CollectiveId, CollectiveKind, CommId, ReduceOp, SelectedRows};
use shardlab_plan::program::Communicator as PlanComm;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Time for a thread inside a call to return after an abort.
const GRACE: Duration = Duration::from_secs(2);
/// Time to wait for aborts, including `GRACE`. During an abort, NCCL waits without a timeout for
/// streams and for graphs that have captured collectives.
const ABORT_TIMEOUT: Duration = Duration::from_secs(4);
/// Period of the check whether aborts have returned.
const POLL_PERIOD: Duration = Duration::from_millis(1);

/// Finds and loads NCCL, once per process. `folders` may contain the library itself.
///
/// # Errors
/// Returns a message with everything that was tried if no usable library is found.
pub(super) fn library(folders: &[PathBuf]) -> Result<Nccl, String> {
    static LOADED: OnceLock<Nccl> = OnceLock::new();
    static LOADING: Mutex<()> = Mutex::new(());
    let _one = lock(&LOADING);
    if let Some(nccl) = LOADED.get() {
        return Ok(nccl.clone());
    }
    let search = Search {
        folders: folders.to_vec(),
        ..Search::default()
    };
    let nccl = Nccl::load(&search).map_err(|e| e.to_string())?;
    Ok(LOADED.get_or_init(|| nccl).clone())
}

/// Result of an NCCL call.
type Called = Result<(), nccl_rs::Error>;

/// Inputs for joining the communicators.
#[derive(Clone)]
pub(super) struct Join<'a> {
    /// The program.
    pub(super) program: &'a Arc<Program>,
    /// This rank.
    pub(super) rank: u32,
    /// Index of the session in the run.
    pub(super) session: u32,
    /// Process group of the run.
    pub(super) peers: &'a ProcessGroup,
    /// Session state, which ends waits.
    pub(super) abort: &'a Arc<Abort>,
    /// Limit for calls in which NCCL waits for the other ranks.
    pub(super) init_timeout: InitTimeout,
    /// How memory is registered with NCCL.
    pub(super) registration: Mode,
    /// Whether copy engines can reach the other ranks. If not, kernels do their work.
    pub(super) copy_engines: bool,
}

/// A communicator that this rank is a member of.
struct Member {
    comm: Communicator,
    /// Position of the rank in the communicator.
    position: usize,
    size: usize,
    /// Whether its collectives run on copy engines.
    copy_engine: bool,
    /// Reductions with a premultiplied factor, by element type and bits of the factor.
    sums: BTreeMap<(i32, u64), PreMulSum>,
    registrations: Vec<Registration>,
    windows: Vec<Window>,
}

/// Collectives of one rank. See the module documentation.
pub(super) struct NcclCollectives {
    nccl: Nccl,
    program: Arc<Program>,
    rank: u32,
    /// By [`CommId`]; `None` if no collective uses the communicator.
    members: Vec<Option<Member>>,
    /// By collective: whether its first launch has been checked.
    checked: Vec<bool>,
    abort: Arc<Abort>,
    /// Number of aborts that have not returned.
    aborting: Arc<AtomicUsize>,
    registration: Mode,
    init_timeout: InitTimeout,
}

impl NcclCollectives {
    /// Joins the communicators of the program. The rank's CUDA context must be current. All ranks
    /// call it at the same time, each on its own thread.
    ///
    /// # Errors
    /// Returns a message if a communicator cannot be initialized in time on all of its ranks, or if
    /// NCCL cannot create the scaled sums of its collectives.
    pub(super) fn join(nccl: &Nccl, join: &Join<'_>) -> Result<Self, String> {
        let program = join.program;
        let used: BTreeSet<usize> = program.collectives.iter().map(|c| c.comm.index()).collect();
        let mut all = Vec::new();
        for (i, comm) in program.communicators.iter().enumerate() {
            if !used.contains(&i) {
                all.push(None);
                continue;
            }
            let member = Member::join(nccl, join, comm)
                .map_err(|e| format!("communicator {}: {e}", comm.name))?;
            all.push(Some(member));
        }
        let mut it = Self {
            nccl: nccl.clone(),
            checked: vec![false; program.collectives.len()],
            program: Arc::clone(program),
            rank: join.rank,
            members: all,
            abort: Arc::clone(join.abort),
            aborting: Arc::default(),
            registration: join.registration,
            init_timeout: join.init_timeout.clone(),
        };
        it.make_sums()?;
        Ok(it)
    }

    /// Calls NCCL for the parts of a collective. `calls` receives the call for one part.
    fn call<T>(
        &mut self,
        id: CollectiveId,
        all: &[(RawRange, RawRange)],
        stream: RawStream,
        calls: impl FnOnce(&Nccl, &dyn Fn(&(RawRange, RawRange)) -> Called) -> Result<T, nccl_rs::Error>,
    ) -> Result<T, String> {
        let c = &self.program.collectives[id.index()];
        let parts = moved(c, all);
        let Some(member) = &self.members[c.comm.index()] else {
            return Err(format!(
                "communicator {} has not been initialized",
                c.comm.index()
            ));
        };
        if !self.checked[id.index()] {
            check::parts(c.kind, c.dtype, member.position, member.size, parts)?;
            self.checked[id.index()] = true;
        }
        let splits = splits(c, all, member.size)?;
        let stream = Stream(stream.0.cast());
        let one = |part: &(RawRange, RawRange)| {
            // SAFETY: the interpreter's contract for ranges that it submits; the stream is the
            // device's; lengths have been checked against the kind.
            unsafe { member.part(c, part, splits.as_ref(), stream) }
        };
        calls(&self.nccl, &one).map_err(|e| {
            format!(
                "rank {}, communicator {}: {e}",
                self.rank,
                self.program.communicators[c.comm.index()].name
            )
        })
    }

    fn make_sums(&mut self) -> Result<(), String> {
        for c in &self.program.collectives {
            let (ReduceOp::PremulSum(factor), Some(member)) =
                (c.reduce, &mut self.members[c.comm.index()])
            else {
                continue;
            };
            let dtype = element::cuda(c.dtype).nccl;
            let key = (dtype.0, factor.to_bits());
            if member.sums.contains_key(&key) {
                continue;
            }
            // The factor in the CPU's reductions is also a float32.
            let factor = factor as f32;
            let scalar = element::cuda(c.dtype).nccl_factor;
            let scalar = scalar.ok_or_else(|| format!("a sum of {} with a factor", c.dtype))?;
            let sum = member.comm.pre_mul_sum(scalar(factor));
            let sum = sum.map_err(|e| e.to_string())?;
            member.sums.insert(key, sum);
        }
        Ok(())
    }

    fn register_all(&mut self, memory: &[Piece]) -> Result<(), String> {
        for member in self.members.iter_mut().flatten() {
            let mode = if member.copy_engine {
                Mode::Window
            } else {
                self.registration
            };
            for &Piece {
                start: address,
                bytes,
                ..
            } in memory
            {
                let ptr = std::ptr::without_provenance_mut::<c_void>(address as usize);
                let words = |e: nccl_rs::Error| format!("{bytes} bytes at {address:#x}: {e}");
                // SAFETY: the device drops its collectives before its arena, which owns this
                // memory.
                unsafe {
                    match mode {
                        Mode::Off => {}
                        Mode::Buffer => {
                            let one = member.comm.register(ptr, bytes).map_err(words)?;
                            member.registrations.push(one);
                        }
                        Mode::Window => {
                            let one = member.comm.window(ptr, bytes, WindowKind::Symmetric);
                            match one.map_err(words)? {
                                Some(window) => member.windows.push(window),
                                None if member.copy_engine => {
                                    return Err(format!(
                                        "NCCL cannot create a symmetric window of {bytes} bytes at {address:#x}, which copy-engine collectives need (they require CUDA virtual memory and peer access)"
                                    ));
                                }
                                None => {}
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns a handle for another thread.
    #[must_use]
    pub(super) fn watch(&self) -> NcclWatch {
        let named = self.members.iter().zip(&self.program.communicators);
        NcclWatch {
            comms: named
                .filter_map(|(m, c)| Some((c.name.clone(), m.as_ref()?.comm.watch())))
                .collect(),
            aborting: Arc::clone(&self.aborting),
        }
    }
}

/// Returns the numbers of elements that a collective with counted rows moves, from the counts on
/// the device. The host has waited for these.
fn splits(
    c: &Collective,
    parts: &[(RawRange, RawRange)],
    ranks: usize,
) -> Result<Option<Splits>, String> {
    let (Some(SelectedRows::Counted(of)), &[(data, _), (sent, received)]) =
        (c.sent.map(|s| s.of), parts)
    else {
        return Ok(None);
    };
    let width = data.bytes / of.rows as usize / c.dtype.size() as usize;
    let elements = |counts: &RawRange| -> Result<Vec<usize>, String> {
        // SAFETY: by the interpreter's contract, the range is live device memory.
        let numbers = unsafe { read(counts) }.map_err(|e| e.to_string())?;
        let counted = comm::counted(&numbers, ranks, of);
        Ok(counted.iter().map(|rows| *rows as usize * width).collect())
    };
    Ok(Some(Splits {
        block: of.rows as usize / ranks * width,
        sent: elements(&sent)?,
        received: elements(&received)?,
    }))
}

/// Returns the parts whose data moves: all except what selects rows, which comes last.
fn moved<'a>(c: &Collective, parts: &'a [(RawRange, RawRange)]) -> &'a [(RawRange, RawRange)] {
    &parts[..parts.len() - usize::from(c.sent.is_some())]
}

impl Collectives for NcclCollectives {
    fn register(&mut self, memory: &[Piece]) -> Result<(), String> {
        // All ranks create windows together.
        let init_timeout = self.init_timeout.clone();
        init_timeout.with("registered memory on all ranks", || {
            self.register_all(memory)
        })
    }

    fn launch(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<(), String> {
        let moved = moved(&self.program.collectives[id.index()], parts);
        self.call(id, parts, stream, |nccl, one| match moved {
            [] => Ok(()),
            [part] => one(part),
            many => nccl.group(|| many.iter().try_for_each(one)),
        })
    }

    fn estimate(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<Option<Duration>, String> {
        let c = &self.program.collectives[id.index()];
        let engines = |m: &Member| m.copy_engine;
        // NCCL's cost model covers ring and tree kernels, but neither copy engines nor the sends
        // and receives of an all-to-all.
        let rows = c.kind.pushes() || c.kind == CollectiveKind::Barrier;
        let unknown = rows
            || c.kind == CollectiveKind::AllToAll
            || self.members[c.comm.index()].as_ref().is_some_and(engines)
            || !self.nccl.has("ncclGroupSimulateEnd");
        if unknown {
            return Ok(None);
        }
        let moved = moved(c, parts);
        self.call(id, parts, stream, |nccl, one| {
            nccl.simulate(|| moved.iter().try_for_each(one))
        })
    }

    fn poll(&mut self) -> Result<(), String> {
        self.watch().poll()
    }

    fn abort(&mut self) -> bool {
        self.watch().abort()
    }

    fn aborter(&self) -> Box<dyn Fn() + Send> {
        let watch = self.watch();
        Box::new(move || {
            // The host checks again once its call returns.
            let _ = watch.abort();
        })
    }

    fn facts(&self) -> BTreeMap<String, String> {
        let mut facts = BTreeMap::from([
            ("nccl".to_owned(), self.nccl.version().to_string()),
            (
                "nccl.library".to_owned(),
                self.nccl.path().display().to_string(),
            ),
            (
                "nccl.communicators".to_owned(),
                self.members.iter().flatten().count().to_string(),
            ),
            (
                "nccl.registration".to_owned(),
                self.registration.name().to_owned(),
            ),
        ]);
        // Variables that change NCCL's choices also change times and, between algorithms, the order
        // of sums.
        for (name, value) in std::env::vars().filter(|(n, _)| n.starts_with("NCCL_")) {
            facts.insert(format!("env.{name}"), value);
        }
        facts
    }
}

impl Drop for NcclCollectives {
    fn drop(&mut self) {
        if self.abort.aborted() {
            // The other ranks will not finalize their communicators, and there is no rank left to
            // notify.
            let _ = self.watch().abort();
        }
        // Registrations are dropped before their communicators.
        for member in self.members.iter_mut().flatten() {
            member.registrations.clear();
            member.windows.clear();
            member.sums.clear();
        }
    }
}

/// Communicators of a rank, for use by another thread.
#[derive(Clone, Debug)]
pub(super) struct NcclWatch {
    comms: Vec<(String, Watch)>,
    /// Number of aborts that have not returned, over all handles of the rank.
    aborting: Arc<AtomicUsize>,
}

impl NcclWatch {
    /// Checks whether NCCL has reported an asynchronous error.
    ///
    /// # Errors
    /// Returns a message with the communicator's name if it has.
    pub(super) fn poll(&self) -> Result<(), String> {
        for (name, watch) in &self.comms {
            watch
                .poll()
                .map_err(|e| format!("communicator {name}: {e}"))?;
        }
        Ok(())
    }

    /// Aborts everything in flight. Returns whether all aborts have returned within a limited time.
    /// If a thread is stuck in a communicator, the communicator is closed, and freed with the
    /// process.
    ///
    /// Each abort has its own thread. An abort first ends the communicator's kernels, and then may
    /// wait for the whole GPU. There, a kernel of another communicator that has not been aborted
    /// yet would never end.
    pub(super) fn abort(&self) -> bool {
        for (_, watch) in &self.comms {
            let (watch, aborting) = (watch.clone(), Arc::clone(&self.aborting));
            self.aborting.fetch_add(1, Ordering::SeqCst);
            let abort = move || {
                // There is no rank left to notify.
                let _ = watch.abort(GRACE);
                aborting.fetch_sub(1, Ordering::SeqCst);
            };
            // Without a thread, the communicator is not aborted and counts as not returned.
            let _ = std::thread::Builder::new()
                .name("abort".to_owned())
                .spawn(abort);
        }
        let begin = Instant::now();
        while self.aborting.load(Ordering::SeqCst) > 0 {
            if begin.elapsed() >= ABORT_TIMEOUT {
                return false;
            }
            std::thread::sleep(POLL_PERIOD);
        }
        true
    }
}

/// Returns a communicator's unique id, which its first rank creates and publishes.
fn identity(
    nccl: &Nccl,
    peers: &ProcessGroup,
    key: &str,
    first: u32,
    mine: bool,
) -> Result<UniqueId, String> {
    if mine {
        let id = nccl.unique_id().map_err(|e| e.to_string())?;
        let put = peers.put(key, id.as_bytes().to_vec());
        put.map_err(|e| e.to_string())?;
        return Ok(id);
    }
    let left = peers.get_slow(key);
    let bytes = left.map_err(|e| format!("rank {first} published no NCCL id: {e}"))?;
    let bytes = bytes
        .try_into()
        .map_err(|b: Vec<u8>| format!("rank {first} published an NCCL id of {} bytes", b.len()))?;
    Ok(UniqueId::from_bytes(bytes))
}

impl Member {
    fn join(nccl: &Nccl, join: &Join<'_>, comm: &PlanComm) -> Result<Self, String> {
        let ranks: Vec<u32> = comm.ranks.members(join.rank).collect();
        let position = comm.ranks.position(join.rank);
        let key = format!("nccl {} {} {}", join.session, comm.name, ranks[0]);
        let copy_engine = comm.copy_engine && join.copy_engines;
        let config = Config {
            comm_name: CString::new(comm.name.as_str()).ok(),
            cta_policy: copy_engine.then_some(CtaPolicy::Zero),
            ..Config::default()
        };
        let has_not = format!("joined the {} ranks of {}", ranks.len(), comm.name);
        let joined = join.init_timeout.with(&has_not, || {
            let id = identity(nccl, join.peers, &key, ranks[0], position == 0)?;
            Communicator::init(nccl, &id, ranks.len() as u32, position, config)
                .map_err(|e| e.to_string())
        });
        Ok(Self {
            comm: joined?,
            position: position as usize,
            size: ranks.len(),
            copy_engine,
            sums: BTreeMap::new(),
            registrations: Vec::new(),
            windows: Vec::new(),
        })
    }

    fn op(&self, c: &Collective) -> Result<RedOp, nccl_rs::Error> {
        Ok(match c.reduce {
            ReduceOp::None | ReduceOp::Sum => RedOp::SUM,
            ReduceOp::Avg => RedOp::AVG,
            ReduceOp::Max => RedOp::MAX,
            ReduceOp::PremulSum(factor) => {
                let key = (element::cuda(c.dtype).nccl.0, factor.to_bits());
                let sum = self.sums.get(&key).ok_or(nccl_rs::Error::Argument {
                    call: "ncclRedOpCreatePreMulSum",
                    what: format!("no sum with the factor {factor} was made"),
                })?;
                sum.op()
            }
        })
    }

    /// # Safety
    /// Ranges are live memory of the rank's device that nothing else uses until the work has
    /// completed; the stream (a `CUstream`) is the device's; the part has been checked.
    unsafe fn part(
        &self,
        c: &Collective,
        (input, output): &(RawRange, RawRange),
        splits: Option<&Splits>,
        stream: Stream,
    ) -> Result<(), nccl_rs::Error> {
        let (dtype, element) = (element::cuda(c.dtype).nccl, c.dtype.size() as usize);
        let (from, to) = (input.ptr.cast::<c_void>().cast_const(), output.ptr.cast());
        if input.bytes == 0 && output.bytes == 0 {
            return Ok(());
        }
        let comm = &self.comm;
        // SAFETY: the caller's contract; counts follow from the checked lengths.
        unsafe {
            match c.kind {
                // NCCL also sends rows that no rank asked for, so each row has a separate place.
                CollectiveKind::AllGather | CollectiveKind::PeerPush => {
                    comm.all_gather(from, to, input.bytes / element, dtype, stream)
                }
                CollectiveKind::ReduceScatter => {
                    let count = output.bytes / element;
                    comm.reduce_scatter(from, to, count, dtype, self.op(c)?, stream)
                }
                CollectiveKind::AllReduce => {
                    let count = input.bytes / element;
                    comm.all_reduce(from, to, count, dtype, self.op(c)?, stream)
                }
                CollectiveKind::AllToAll | CollectiveKind::PeerReturn => match splits {
                    None => {
                        let count = input.bytes / element / self.size;
                        comm.all_to_all(from, to, count, dtype, stream)
                    }
                    Some(splits) => comm.all_to_all_v(from, to, splits, dtype, stream),
                },
                // Its collectives wait for all ranks anyway.
                CollectiveKind::Barrier => Ok(()),
            }
        }
    }
}

/// Returns whether a program has communicators with several ranks, which NCCL must create.
#[must_use]
pub(super) fn needed(program: &Program) -> bool {
    let size = |c: CommId| program.communicators[c.index()].ranks.size;
    program.collectives.iter().any(|c| size(c.comm) > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::DType;
    use shardlab_plan::units::Bytes;

    #[test]
    fn ranges_move_even_if_the_program_lists_no_parts() {
        let range = RawRange {
            ptr: std::ptr::null_mut(),
            bytes: 0,
            dtype: DType::Bf16,
        };
        let c = Collective {
            kind: CollectiveKind::AllGather,
            comm: CommId(0),
            reduce: ReduceOp::None,
            dtype: DType::Bf16,
            bytes: Bytes(0),
            parts: smallvec::SmallVec::new(),
            sent: None,
        };
        assert_eq!(moved(&c, &[(range, range)]).len(), 1);
    }
}
