//! Devices with a program of single kernels and collectives, which are issued as a measurement wants.

use crate::device::cuda::{CudaDevice, CudaFactory};
use crate::device::{
    Abort, Command, Device, DeviceFactory, NO_HYPER, Pass, Region, Setup, Stop, TaskTimes,
};
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
use std::sync::{Arc, Barrier};
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
    barrier: Arc<Barrier>,
    ranks: u32,
}

impl Rank {
    /// Begins a pass when all ranks are idle; `record` keeps times on the first of them.
    pub(super) fn begin(&mut self, record: bool) -> Result<(), Stop> {
        self.device.begin(Pass {
            hyper: NO_HYPER,
            slots: 0,
            record: record && self.id == 0,
        })?;
        self.barrier.wait();
        Ok(())
    }

    /// Waits for everything.
    pub(super) fn end(&mut self) -> Result<Vec<TaskTimes>, Stop> {
        self.device.idle()?;
        let times = if self.id == 0 {
            self.device.times()
        } else {
            Vec::new()
        };
        self.barrier.wait();
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
        self.device.submit(stream, command, task)
    }

    pub(super) fn event(&mut self, stream: StreamId, event: u32, wait: bool) -> Result<(), Stop> {
        let (instr, event) = (InstrId(0), EventId(event % EVENTS));
        let command = if wait {
            Command::Wait { instr, event }
        } else {
            Command::Record { instr, event }
        };
        self.device.submit(stream, command, 0)
    }

    pub(super) fn copy(&mut self, from: RawRange, to: RawRange, task: u32) -> Result<(), Stop> {
        self.device.submit(
            SIDE,
            Command::Copy {
                instr: InstrId(0),
                from,
                to,
            },
            task,
        )
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
    fn fill(&mut self) {
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
        let mut at = 0;
        while at + PIECE as u64 <= MEMORY {
            let to = self.range(at, PIECE, DType::U8);
            self.device.write(to, &words);
            at += PIECE as u64;
        }
    }
}

/// A bench: adds what it wants to the recipe, then runs on every rank.
pub(super) struct Bench<'a> {
    factory: &'a CudaFactory,
    ranks: u32,
}

impl<'a> Bench<'a> {
    /// With so many ranks, each on a GPU of its own.
    pub(super) fn new(factory: &'a CudaFactory, ranks: u32) -> Self {
        Self { factory, ranks }
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
            abort: Arc::new(Abort::new(Duration::from_secs(60))),
            session: world.peers().next_session(),
            world,
        };
        let devices = self.factory.devices(&setup)?;
        let barrier = Arc::new(Barrier::new(self.ranks as usize));
        let abort = Arc::clone(&setup.abort);
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
                    let (program, barrier, what, on) =
                        (Arc::clone(&program), Arc::clone(&barrier), &what, &on);
                    let ranks = self.ranks;
                    scope.spawn(move || {
                        let mut rank = Rank {
                            id,
                            device,
                            program,
                            barrier,
                            ranks,
                        };
                        let region = Region {
                            addresses: BASE..BASE + MEMORY,
                            used: MEMORY,
                            touched: BASE + MEMORY,
                        };
                        rank.device.map(&[region]).map_err(Some)?;
                        rank.fill();
                        on(&mut rank, what).map_err(|_| None)
                    })
                })
                .collect();
            let mut results: Vec<_> = threads
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect();
            match results.swap_remove(0) {
                Ok(Ok(t)) => Ok(t),
                Ok(Err(Some(e))) => Err(e),
                Ok(Err(None)) => Err(failed()),
                Err(panic) => Err(crate::device::cpu::panic_text(&*panic)),
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
