//! Preparation before the first launch.

use super::Kernels;
use super::codegen::shard::{Ranges, fold};
use super::codegen::{self, TICKETS};
use super::dnn;
use super::error::{Error, ErrorKind};
use super::gemm;
use super::muon;
use super::plans::{Entries, Plan, PlanId};
use super::ranges;
use super::start::Function;
use super::target::Target;
use super::variant::{self, Variant};
use crate::kernels::ops::{self, CudaCode, Library};
use crate::operand::RawRange;
use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use shardlab_plan::ir::{
    Access, BodyOp, COMPUTE, Holds, InstrId, Kernel, OpKind, Shape, ShardOp, StreamId,
};
use shardlab_plan::program::{NoSlice, Op, Program, SectionKind, StreamKind, workspace};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kernels that threads of this process have prepared: a watchdog's sign of progress while devices
/// are created, which takes minutes where a program has hundreds of shapes and nothing is cached.
static PREPARED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of kernels prepared by this process so far.
pub(crate) fn prepared() -> u64 {
    PREPARED.load(Ordering::Relaxed)
}

/// Functions over lists of ranges: for short lists and for long ones.
#[derive(Default)]
pub(super) struct RangeKernels {
    pub(super) lists: BTreeMap<Ranges, [Function; 2]>,
    /// For sums, and for whether any is not 0.
    pub(super) folds: [Option<Function>; 2],
}

// SAFETY: functions belong to the context, not to a thread.
unsafe impl Send for RangeKernels {}

/// Bytes of the word for faults and the tickets after it.
pub(super) const FOUND: u64 = 8 + 4 * TICKETS as u64;
// A plan leaves this much for them.
const _: () = assert!(FOUND <= workspace::ALIGN);

/// Returns the space of a part of the workspace.
pub(super) const fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(workspace::ALIGN)
}

/// Returns, by launch, the shapes of the parameters that a `CopyOut` writes or a `ChunkCat` reads,
/// where other buffers count as vectors, and of the matrices that Muon updates on a rank.
pub(super) fn shapes(
    program: &Program,
    rank: u32,
) -> Result<BTreeMap<InstrId, Vec<Shape>>, NoSlice> {
    let shape = |access: &Access| {
        let buffer = &program.buffers[access.buffer.index()];
        match buffer.holds {
            Holds::Param(p) => program.params[p.index()].shape.clone(),
            _ => Shape::from_slice(&[access.bytes / buffer.dtype.size()]),
        }
    };
    let mut out = program.matrix_shapes(rank)?;
    for (i, instr) in program.instrs.iter().enumerate() {
        let Op::Launch { kernel, .. } = instr.op else {
            continue;
        };
        let operands = match program.kernels[kernel.index()].body.first().map(|b| b.op) {
            Some(OpKind::Shard(ShardOp::CopyOut { .. })) => program.writes(&instr.op),
            Some(OpKind::Shard(ShardOp::ChunkCat { .. })) => program.reads(&instr.op),
            _ => continue,
        };
        out.insert(InstrId(i as u32), operands.iter().map(shape).collect());
    }
    Ok(out)
}

/// Makes ranges with placeholder addresses, with the length and alignment of a launch's.
pub(super) fn stand_ins(program: &Program, accesses: &[Access]) -> Vec<RawRange> {
    let make = |a: &Access| RawRange {
        ptr: std::ptr::without_provenance_mut(((a.buffer.index() + 1) << 40) + a.offset as usize),
        bytes: a.bytes as usize,
        dtype: program.buffers[a.buffer.index()].dtype,
    };
    accesses.iter().map(make).collect()
}

/// Prepares every variant of the program.
pub(super) fn everything(k: &mut Kernels) -> Result<(), Error> {
    let program = std::sync::Arc::clone(&k.program);
    // The plan reserves as much for sums in every program.
    need(k, COMPUTE.index(), 1 << 20);
    muon::prepare_matmuls(k, &program).map_err(|t| Error::new("muon", t))?;
    for (i, instr) in program.instrs.iter().enumerate() {
        let Some((variant, stream)) = variant::of_launch(&program, &instr.op) else {
            continue;
        };
        if program.streams[stream.index()].kind == StreamKind::Cpu {
            continue;
        }
        let kernel = &program.kernels[variant.kernel.index()];
        let named = |t: ErrorKind| Error::new(kernel.name.clone(), t);
        let id = InstrId(i as u32);
        let plan = one(k, variant, kernel).map_err(named)?;
        k.plans.assign(id, plan);
        let bytes = match *k.plans.plan(plan) {
            Plan::Ranges(op) => list_launch(k, &program, id, op).map_err(named)?,
            ref plan => {
                takes_turns(plan, stream).map_err(named)?;
                plan.scratch()
            }
        };
        need(k, stream.index(), bytes);
    }
    Ok(())
}

/// Refuses a kernel that would use the tickets at the same time as another: there is one set, for
/// the compute stream.
pub(super) fn takes_turns(plan: &Plan, on: StreamId) -> Result<(), ErrorKind> {
    if on == COMPUTE || !plan.takes_tickets() {
        return Ok(());
    }
    let why = "it takes tickets, and does not run on the compute stream";
    Err(ErrorKind::Unsupported(why.to_owned()))
}

/// Returns the distinct GEMMs of a program, with how often a steady step launches each.
pub(super) fn gemms(
    program: &Program,
    target: Target,
) -> Result<BTreeMap<gemm::GemmProblem, usize>, Error> {
    let mut out = BTreeMap::new();
    let steady = program.section(SectionKind::Steady);
    for instr in steady.map_or(&[][..], |s| program.section_instrs(s)) {
        let Some((variant, _)) = variant::of_launch(program, &instr.op) else {
            continue;
        };
        let kernel = &program.kernels[variant.kernel.index()];
        if let Some((Library::CublasLt, only)) = library(&kernel.body) {
            let (problem, _) = gemm::problem(&variant.request(&kernel.body, target), only)
                .map_err(|r| Error::new(kernel.name.clone(), r.into()))?;
            if problem.m * problem.n * problem.k > 0 {
                *out.entry(problem).or_default() += 1;
            }
        }
    }
    Ok(out)
}

fn need(k: &mut Kernels, stream: usize, bytes: u64) {
    if let Some(most) = k.scratch.get_mut(stream) {
        *most = bytes.max(*most);
    }
}

/// Prepares a variant if it is not prepared yet; for lists of ranges, without what depends on their
/// lengths.
pub(super) fn one(k: &mut Kernels, variant: Variant, kernel: &Kernel) -> Result<PlanId, ErrorKind> {
    if let Some(plan) = k.plans.find(&variant) {
        return Ok(plan);
    }
    if let [only] = &kernel.body[..]
        && let CudaCode::Ranges(op) = ops::cuda(&only.op)
    {
        let types = variant.request(&kernel.body, k.target).writes.iter();
        codegen::float8_of(k.target, only, types.map(|arg| arg.dtype))?;
        return Ok(k.plans.add(variant, Plan::Ranges(op)));
    }
    let req = variant.request_of(kernel, k.target);
    let plan = match library(&kernel.body) {
        Some((Library::CublasLt, only)) => {
            let (problem, operands) = gemm::problem(&req, only)?;
            if problem.m * problem.n * problem.k == 0 {
                Plan::Nothing
            } else {
                let plan = k.blas.plan(&problem, &k.cache, k.agree.as_deref())?;
                Plan::Gemm(Box::new(plan), operands)
            }
        }
        library => {
            let ready = library.and_then(|(l, only)| by_library(k, &req, l, only, kernel));
            match ready {
                Some(Ok((ready, then))) => {
                    let then = then.map_or(Ok(Vec::new()), |module| loaded(k, module))?;
                    Plan::Library(Box::new(ready), then)
                }
                Some(Err(drift @ ErrorKind::Ranks(_))) => return Err(drift),
                refused => {
                    if let Some(Err(why)) = refused {
                        k.refused.push(format!("{}: {why}", kernel.name));
                    }
                    let module = codegen::generate(&req)?;
                    let scratch = module.scratch;
                    match loaded(k, module)? {
                        entries if entries.is_empty() => Plan::Nothing,
                        entries => Plan::Generated(entries, scratch),
                    }
                }
            }
        }
    };
    PREPARED.fetch_add(1, Ordering::Relaxed);
    Ok(k.plans.add(variant, plan))
}

/// Returns the library that performs a body of one operation, and the operation.
fn library(body: &[BodyOp]) -> Option<(Library, &BodyOp)> {
    let [only] = body else { return None };
    match ops::cuda(&only.op) {
        CudaCode::Library(library, _) => Some((library, only)),
        _ => None,
    }
}

/// Prepares cuDNN's kernel for an operation, and the conversion of its result; `None` if cuDNN is
/// not to be used.
fn by_library(
    k: &Kernels,
    req: &codegen::Request<'_>,
    library: Library,
    op: &BodyOp,
    kernel: &Kernel,
) -> Option<Result<(dnn::Ready, Option<codegen::Module>), ErrorKind>> {
    let dnn = k.dnn.as_ref()?;
    match library {
        Library::CublasLt => None,
        Library::Attention(attention) => {
            let ready = dnn.attention(req, op, attention);
            Some(ready.map(|ready| (ready, None)))
        }
        Library::Convolution(direction) => {
            let room = workspace::kernel_bytes(kernel, k.program.meta.deterministic);
            let agree = k.agree.as_deref();
            let ready = dnn.convolution(req, op, direction, room, &k.cache, agree);
            Some(ready.and_then(|ready| {
                let then = ready.is_narrow().then(|| codegen::widen(req, op));
                Ok((ready, then.transpose()?))
            }))
        }
    }
}

/// Compiles a module's entries.
fn loaded(k: &mut Kernels, module: codegen::Module) -> Result<Entries, ErrorKind> {
    let mut entries = Vec::new();
    for e in module.entries {
        let f = Function::load(k, &module.source, &e.name, e.shared)?;
        entries.push((e, f));
    }
    Ok(entries)
}

/// Returns the functions of a kind of list.
pub(super) fn list(k: &mut Kernels, kind: Ranges) -> Result<[Function; 2], ErrorKind> {
    if let Some(f) = k.ranges.lists.get(&kind) {
        return Ok(*f);
    }
    let [short, long] = kind.capacities();
    let f = [
        Function::load(k, &kind.source(short), "k0", 0)?,
        Function::load(k, &kind.source(long), "k0", 0)?,
    ];
    k.ranges.lists.insert(kind, f);
    Ok(f)
}

pub(super) fn fold_kernel(k: &mut Kernels, any: bool) -> Result<Function, ErrorKind> {
    if let Some(f) = k.ranges.folds[usize::from(any)] {
        return Ok(f);
    }
    let f = Function::load(k, &fold(any), "k0", 0)?;
    k.ranges.folds[usize::from(any)] = Some(f);
    Ok(f)
}

/// Prepares the lists of a sharding launch; returns its scratch bytes.
fn list_launch(
    k: &mut Kernels,
    program: &Program,
    id: InstrId,
    op: ShardOp,
) -> Result<u64, ErrorKind> {
    let instr = &program.instrs[id.index()];
    let reads = stand_ins(program, program.reads(&instr.op));
    let writes = stand_ins(program, program.writes(&instr.op));
    let work = ranges::work(op, k.parameters(id), &reads, &writes)
        .map_err(|f| ErrorKind::Unsupported(f.to_string()))?;
    for batch in work.batches.iter().chain(&work.copies) {
        list(k, batch.kind)?;
    }
    if let Some(f) = work.fold {
        fold_kernel(k, f.any)?;
    }
    let muon = muon::prepare(k, &work)?;
    Ok(muon.max(work.parts() * 8))
}

/// Divides the workspace among streams and clears the word for faults and the tickets.
///
/// # Safety
/// As [`Kernels::set_workspace`].
pub(super) unsafe fn set_workspace(k: &mut Kernels, at: CUdeviceptr) -> Result<(), Error> {
    let mut next = at;
    k.workspace.clear();
    for bytes in &k.scratch {
        k.workspace.push(next);
        next += rounded(*bytes);
    }
    k.fault = next;
    let named = |t: ErrorKind| Error::new("workspace", t);
    // SAFETY: the caller's contract covers memory up to here and this much more.
    unsafe { result::memset_d8_sync(k.fault, 0, FOUND as usize) }
        .map_err(|e| named(ErrorKind::driver("cuMemsetD8")(e)))?;
    // The host does not wait for memory to be set, and our own streams do not wait for the stream
    // that sets it.
    result::ctx::synchronize().map_err(|e| named(ErrorKind::driver("cuCtxSynchronize")(e)))
}
