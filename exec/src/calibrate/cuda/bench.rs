//! Devices with a program of single kernels and collectives, which are issued as a measurement wants.

use super::watch::{At, Doing, Watch};
use crate::device::cuda::{CudaDevice, CudaFactory};
use crate::device::{
    Abort, Command, Device, DeviceFactory, Failure, FailureKind, NO_HYPER, Pass, Region, Setup,
    Stop, TaskTimes,
};
use crate::engine::gate::Gate;
use crate::engine::{ExecOptions, World};
use crate::operand::RawRange;
use shardlab_plan::model::OpKind;
use shardlab_plan::program::{
    Access, Axis, BodyOp, Buffer, BufferId, COMPUTE, Collective, CollectiveId, CollectiveKind,
    CommId, Communicator, EventId, Holds, Instr, InstrId, Kernel, KernelClass, KernelId, Op,
    PerRank, Phase, Place, Pool, Program, ReduceOp, Role, Rule, Section, SectionKind, Shape, Slot,
    StreamId, UnitId,
};
use shardlab_plan::units::{Bytes, DType, Flops};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Allocator address of the bench's memory.
const BASE: u64 = 1 << 21;
/// Its bytes: two sides of the largest collective, and a large product's operands.
const MEMORY: u64 = 12 << 30;
/// The stream of collectives; [`COMPUTE`] is the first.
pub(super) const SIDE: StreamId = StreamId(1);
/// Another one of collectives, which have a communicator of their own.
pub(super) const OTHER: StreamId = StreamId(2);
/// That of kernels.
pub(super) const COMPUTE_STREAM: StreamId = COMPUTE;
/// The device's own watchdog. That of the calibration comes first, which knows all ranks.
const PATIENCE: Duration = Duration::from_secs(100);
/// Events that a program has.
const EVENTS: u32 = 1024;
/// Steps of a bench's largest pass.
const ALIGN: u64 = 512;

/// A single kernel of the program, with where its operands lie.
#[derive(Clone, Debug)]
pub(super) struct Single {
    instr: InstrId,
    kernel: KernelId,
    reads: u32,
    /// Offset, bytes and type of each operand.
    operands: Vec<(u64, usize, DType)>,
}

/// A program under construction.
pub(super) struct Recipe {
    program: Program,
}

/// Shape and element type of an operand.
pub(super) type Operand = (Vec<u64>, DType);

impl Recipe {
    fn new(ranks: u32) -> Result<Self, String> {
        let text = format!(
            "[model]\nfamily = \"llama\"\nlayers = 1\nhidden = 64\nheads = 4\nffn = 128\nvocab = 128\n\
             [train]\nseq_len = 16\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = {}\n",
            ranks.max(2)
        );
        let scenario =
            shardlab_plan::scenario::parse("bench", &text, &[]).map_err(|e| e.to_string())?;
        let mut program = shardlab_plan::plan(&scenario).map_err(|e| e.to_string())?;
        program.meta.world = ranks;
        program.meta.dp_shard = ranks;
        program.streams.truncate(3);
        // NCCL makes those that a collective uses.
        program.communicators = ["bench", "other"]
            .map(|name| Communicator {
                name: name.to_owned(),
                axis: Axis::World,
                size: ranks,
                stride: 1,
                ..program.communicators[0].clone()
            })
            .to_vec();
        program.kernels.clear();
        program.buffers.clear();
        program.accesses.clear();
        program.collectives.clear();
        program.copies.clear();
        program.scopes.clear();
        program.instrs.clear();
        program.groups.clear();
        program.params.clear();
        (program.loss, program.eval_loss) = (None, None);
        program.events = EVENTS;
        program.double_buffer_copies = 0;
        Ok(Self { program })
    }

    /// Adds a kernel of one operation.
    pub(super) fn kernel(
        &mut self,
        op: OpKind,
        class: KernelClass,
        dtype: DType,
        ins: &[Operand],
        outs: &[Operand],
    ) -> Single {
        let p = &mut self.program;
        let slot = |place: Place, (shape, dtype): &Operand| Slot {
            place,
            offset: 0,
            shape: Shape::from_slice(shape),
            strides: SmallVec::new(),
            dtype: *dtype,
        };
        let kernel = KernelId(p.kernels.len() as u32);
        p.kernels.push(Kernel {
            name: op.name().to_owned(),
            class,
            flops: Flops(0),
            read: Bytes(0),
            written: Bytes(0),
            dtype,
            body: vec![BodyOp {
                op,
                inputs: (0u8..)
                    .zip(ins)
                    .map(|(i, o)| slot(Place::Read(i), o))
                    .collect(),
                outputs: (0u8..)
                    .zip(outs)
                    .map(|(i, o)| slot(Place::Write(i), o))
                    .collect(),
            }],
        });
        let instr = InstrId(p.instrs.len() as u32);
        let reads = p.accesses.len() as u32;
        let mut at = 0;
        let mut operands = Vec::new();
        for (shape, dtype) in ins.iter().chain(outs) {
            let bytes = shape.iter().product::<u64>() * dtype.size();
            let buffer = BufferId(p.buffers.len() as u32);
            p.buffers.push(Buffer {
                role: Role::Temporary,
                bytes: Bytes(bytes),
                dtype: *dtype,
                align: ALIGN as u32,
                pool: Pool::Caching,
                stream: COMPUTE,
                unit: UnitId(0),
                holds: Holds::Named("operand"),
                key: buffer.0,
            });
            p.accesses.push(Access {
                buffer,
                offset: 0,
                bytes,
                per_rank: PerRank::Same,
            });
            operands.push((at, bytes as usize, *dtype));
            at += bytes.next_multiple_of(ALIGN);
        }
        p.instrs.push(Instr {
            op: Op::Launch {
                kernel,
                stream: COMPUTE,
                reads,
                writes: reads + ins.len() as u32,
                end: p.accesses.len() as u32,
            },
            unit: UnitId(0),
            micro_batch: 0,
            phase: Phase::Forward,
            rule: Rule::Model,
        });
        Single {
            instr,
            kernel,
            reads: ins.len() as u32,
            operands,
        }
    }

    /// Adds a collective whose full side has so many bytes.
    pub(super) fn collective(
        &mut self,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> CollectiveId {
        self.collective_on(CommId(0), kind, dtype, bytes)
    }

    /// Likewise, for stream [`OTHER`].
    pub(super) fn other_collective(
        &mut self,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> CollectiveId {
        self.collective_on(CommId(1), kind, dtype, bytes)
    }

    fn collective_on(
        &mut self,
        comm: CommId,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> CollectiveId {
        let id = CollectiveId(self.program.collectives.len() as u32);
        self.program.collectives.push(Collective {
            kind,
            comm,
            reduce: match kind {
                CollectiveKind::ReduceScatter | CollectiveKind::AllReduce => ReduceOp::Avg,
                _ => ReduceOp::None,
            },
            dtype,
            bytes: Bytes(bytes),
            parts: SmallVec::new(),
        });
        id
    }

    fn finish(mut self) -> Program {
        let end = self.program.instrs.len() as u32;
        self.program.sections = vec![
            Section {
                kind: SectionKind::Init,
                instrs: 0..0,
            },
            Section {
                kind: SectionKind::Steady,
                instrs: 0..end,
            },
        ];
        self.program
    }
}

/// A rank of a bench.
pub(super) struct Rank {
    pub(super) id: u32,
    device: CudaDevice,
    program: Arc<Program>,
    gate: Arc<Gate>,
    abort: Arc<Abort>,
    watch: Watch,
    /// What all ranks do.
    at: Arc<Vec<At>>,
    /// Commands of the pass.
    enqueued: u32,
    /// The first rank's answer to a question of all.
    answer: Arc<AtomicU64>,
    ranks: u32,
}

impl Rank {
    fn doing(&self, doing: Doing) {
        self.at[self.id as usize].set(doing, self.enqueued);
    }

    /// Waits for the other ranks.
    fn meet(&mut self) -> Result<(), Stop> {
        self.doing(Doing::Meeting);
        self.gate.pass(self.id, &self.abort, "come")
    }

    /// The first rank says which part begins.
    pub(super) fn say(&self, part: &str) {
        if self.id == 0 {
            let s = if self.ranks == 1 { "" } else { "s" };
            self.watch.say(&format!("{} rank{s}, {part}", self.ranks));
        }
    }

    /// Whether a share of the time to measure is over, and the rest of something is to be left out: the first rank's answer,
    /// since all have to do the same.
    pub(super) fn late(&mut self, share: f64, rest: &str) -> Result<bool, Stop> {
        let late = self.id == 0 && self.watch.late(share);
        if late {
            self.say(&format!("no time for {rest}"));
        }
        Ok(self.agree(f64::from(u8::from(late)))? != 0.0)
    }

    /// The first rank's number: it alone keeps times, and where a time decides what is issued, all have to issue the same.
    pub(super) fn agree(&mut self, mine: f64) -> Result<f64, Stop> {
        if self.id == 0 {
            self.answer.store(mine.to_bits(), Ordering::SeqCst);
        }
        self.meet()?;
        let agreed = f64::from_bits(self.answer.load(Ordering::SeqCst));
        // The next question comes after all have heard this answer.
        self.meet()?;
        Ok(agreed)
    }

    /// Performs each command once, one after another on all ranks, before anything is measured: the libraries load, allocate
    /// and connect at first uses, for which the driver may wait for a GPU; one whose collective waits for a rank that waits
    /// for the driver would never end it.
    pub(super) fn prime(&mut self, commands: &[(StreamId, Command)]) -> Result<(), Stop> {
        for (stream, command) in commands {
            self.begin(false)?;
            self.issue(*stream, command.clone(), 0)?;
            self.end()?;
        }
        Ok(())
    }

    /// Begins a pass when all ranks are idle; `record` keeps times on the first of them.
    pub(super) fn begin(&mut self, record: bool) -> Result<(), Stop> {
        self.enqueued = 0;
        self.doing(Doing::Beginning);
        self.device.begin(Pass {
            hyper: NO_HYPER,
            slots: 0,
            record: record && self.id == 0,
        })?;
        self.meet()?;
        self.doing(Doing::Enqueued);
        Ok(())
    }

    /// Waits for everything.
    pub(super) fn end(&mut self) -> Result<Vec<TaskTimes>, Stop> {
        self.doing(Doing::Waiting);
        self.device.idle()?;
        self.doing(Doing::Reading);
        let times = if self.id == 0 {
            self.device.times()
        } else {
            Vec::new()
        };
        self.meet()?;
        Ok(times)
    }

    pub(super) fn now(&self) -> u64 {
        self.device.now()
    }

    /// How many there are.
    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    fn range(&self, offset: u64, bytes: usize, dtype: DType) -> RawRange {
        RawRange {
            ptr: self
                .device
                .pointer(BASE + offset, bytes as u64)
                .ok()
                .flatten()
                .unwrap_or(std::ptr::null_mut()),
            bytes,
            dtype,
        }
    }

    pub(super) fn command(&self, s: &Single) -> Command {
        Command::Launch {
            instr: s.instr,
            kernel: s.kernel,
            reads: s.reads,
            ranges: s
                .operands
                .iter()
                .map(|&(at, bytes, dtype)| self.range(at, bytes, dtype))
                .collect(),
        }
    }

    /// Collectives lie behind what kernels use.
    pub(super) fn gather(&self, id: CollectiveId) -> Command {
        let c = &self.program.collectives[id.index()];
        let full = c.bytes.0;
        let shard = full / u64::from(self.ranks);
        let (input, output) = match c.kind {
            CollectiveKind::AllGather => (shard, full),
            CollectiveKind::ReduceScatter => (full, shard),
            _ => (full, full),
        };
        let from = MEMORY / 2;
        let to = from + (2 << 30);
        let parts = (
            self.range(from, input as usize, c.dtype),
            self.range(to, output as usize, c.dtype),
        );
        Command::Collective {
            instr: InstrId(0),
            id,
            parts: smallvec::smallvec![parts],
        }
    }

    pub(super) fn issue(
        &mut self,
        stream: StreamId,
        command: Command,
        task: u32,
    ) -> Result<(), Stop> {
        self.enqueued += 1;
        self.doing(match command {
            Command::Collective { .. } => Doing::Collective,
            Command::Copy { .. } => Doing::Copy,
            Command::Record { .. } | Command::Wait { .. } => Doing::Event,
            _ => Doing::Kernel,
        });
        let done = self.device.submit(stream, command, task);
        self.doing(Doing::Enqueued);
        done
    }

    pub(super) fn event(&mut self, stream: StreamId, event: u32, wait: bool) -> Result<(), Stop> {
        let (instr, event) = (InstrId(0), EventId(event % EVENTS));
        let command = if wait {
            Command::Wait { instr, event }
        } else {
            Command::Record { instr, event }
        };
        self.issue(stream, command, 0)
    }

    pub(super) fn copy(&mut self, from: RawRange, to: RawRange, task: u32) -> Result<(), Stop> {
        let instr = InstrId(0);
        self.issue(SIDE, Command::Copy { instr, from, to }, task)
    }

    /// Device memory for copies.
    pub(super) fn scratch(&self, bytes: usize) -> RawRange {
        self.range(MEMORY / 2, bytes, DType::U8)
    }

    pub(super) fn host_wait(&mut self, event: u32) -> Result<(), Stop> {
        self.device.host_wait(InstrId(0), EventId(event % EVENTS))
    }

    pub(super) fn device(&mut self) -> &mut CudaDevice {
        &mut self.device
    }

    /// Fills memory with numbers between 2^-7 and 2, in every float type.
    fn fill(&mut self) -> Result<(), Stop> {
        const PIECE: usize = 64 << 20;
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_add(u64::from(self.id));
        let words: Vec<u8> = (0..PIECE / 8)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let word = (state & 0x83ff_83ff_83ff_83ff) | 0x3c00_3c00_3c00_3c00;
                word.to_le_bytes()
            })
            .collect();
        let first = self.range(0, PIECE, DType::U8);
        self.device.write(first, &words);
        let mut at = PIECE as u64;
        while at + PIECE as u64 <= MEMORY {
            let to = self.range(at, PIECE, DType::U8);
            self.copy(first, to, 0)?;
            at += PIECE as u64;
        }
        self.doing(Doing::Filling);
        self.device.idle()
    }
}

/// A bench: adds what it wants to the recipe, then runs on every rank.
pub(super) struct Bench<'a> {
    factory: &'a CudaFactory,
    ranks: u32,
    watch: &'a Watch,
}

/// Ends the waits of other ranks if its own rank ends before its time, even by a panic.
struct Leaving {
    abort: Arc<Abort>,
    at: Arc<Vec<At>>,
    rank: u32,
    well: bool,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.at[self.rank as usize].set(Doing::Leaving, 0);
        if !self.well {
            self.abort.stop();
        }
    }
}

/// A rank's part in a bench; nothing if it failed, or others did.
fn perform<R, T>(
    mut rank: Rank,
    what: &R,
    on: &impl Fn(&mut Rank, &R) -> Result<T, Stop>,
) -> Option<T> {
    // Dropped before the rank, whose device takes leave of the others only where all is well.
    let mut leaving = Leaving {
        abort: Arc::clone(&rank.abort),
        at: Arc::clone(&rank.at),
        rank: rank.id,
        well: false,
    };
    let region = Region {
        addresses: BASE..BASE + MEMORY,
        used: MEMORY,
        touched: BASE + MEMORY,
    };
    rank.doing(Doing::Mapping);
    if let Err(message) = rank.device.map(&[region]) {
        rank.abort.fail(Failure {
            kind: FailureKind::Alloc,
            rank: rank.id,
            stream: None,
            instr: None,
            text: String::new(),
            message,
        });
        return None;
    }
    rank.doing(Doing::Filling);
    let done = rank.fill().and_then(|()| on(&mut rank, what));
    leaving.well = done.is_ok();
    done.ok()
}

impl<'a> Bench<'a> {
    /// With so many ranks, each on a GPU of its own.
    pub(super) fn new(factory: &'a CudaFactory, ranks: u32, watch: &'a Watch) -> Self {
        Self {
            factory,
            ranks,
            watch,
        }
    }

    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Makes devices for what `recipe` adds and calls `on` for every rank at the same time; the first rank's result.
    pub(super) fn run<R: Send + Sync, T: Send>(
        &self,
        recipe: impl FnOnce(&mut Recipe) -> R,
        on: impl Fn(&mut Rank, &R) -> Result<T, Stop> + Sync,
    ) -> Result<T, String> {
        let mut r = Recipe::new(self.ranks)?;
        let what = recipe(&mut r);
        let program = Arc::new(r.finish());
        let world = World::alone(&program);
        let setup = Setup {
            program: Arc::clone(&program),
            options: Arc::new(ExecOptions::default()),
            abort: Arc::new(Abort::new(PATIENCE)),
            session: world.peers().next_session(),
            world,
        };
        let abort = Arc::clone(&setup.abort);
        let at = self.watch.ranks(self.ranks, &abort);
        let result = self.on_ranks(&setup, &at, &what, &on);
        self.watch.alone();
        // Whoever gave up knows more than whoever stopped for it.
        self.watch.verdict().map_or(result, Err)
    }

    fn on_ranks<R: Send + Sync, T: Send>(
        &self,
        setup: &Setup,
        at: &Arc<Vec<At>>,
        what: &R,
        on: &(impl Fn(&mut Rank, &R) -> Result<T, Stop> + Sync),
    ) -> Result<T, String> {
        let abort = &setup.abort;
        let devices = self.factory.devices(setup)?;
        let gate = Gate::new(self.ranks as usize, setup.world.peers(), abort);
        let answer = Arc::new(AtomicU64::new(0));
        let failed = || {
            abort
                .failures()
                .first()
                .map_or_else(|| "a bench stopped".to_owned(), ToString::to_string)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(devices)
                .map(|(id, device)| {
                    let rank = Rank {
                        id,
                        device,
                        program: Arc::clone(&setup.program),
                        gate: Arc::clone(&gate),
                        abort: Arc::clone(abort),
                        watch: self.watch.clone(),
                        at: Arc::clone(at),
                        enqueued: 0,
                        answer: Arc::clone(&answer),
                        ranks: self.ranks,
                    };
                    scope.spawn(move || {
                        let done = perform(rank, what, on);
                        at[id as usize].set(Doing::Done, 0);
                        done
                    })
                })
                .collect();
            let mut results: Vec<_> = threads
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect();
            if let Some(Err(panic)) = results.iter().find(|r| r.is_err()) {
                return Err(crate::device::cpu::panic_text(&**panic));
            }
            if results.iter().any(|r| matches!(r, Ok(None))) {
                return Err(failed());
            }
            match results.swap_remove(0) {
                Ok(Some(t)) => Ok(t),
                _ => Err(failed()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bench_has_a_stream_and_a_communicator_for_each_of_two_collectives() {
        for ranks in [1, 2, 4] {
            let mut recipe = Recipe::new(ranks).unwrap();
            let one = recipe.collective(CollectiveKind::AllGather, DType::Bf16, 1 << 20);
            let other =
                recipe.other_collective(CollectiveKind::ReduceScatter, DType::Bf16, 1 << 20);
            let program = recipe.finish();
            assert_eq!(program.streams.len(), OTHER.index() + 1);
            let comm = |c: CollectiveId| program.collectives[c.index()].comm;
            assert_ne!(comm(one), comm(other));
            assert!(
                [one, other]
                    .iter()
                    .all(|c| program.communicators[comm(*c).index()].size == ranks)
            );
        }
    }
}
