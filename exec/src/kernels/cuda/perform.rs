//! Launches.

use super::Kernels;
use super::blas::Addresses;
use super::codegen::shard::Extra;
use super::codegen::{Entry, Param};
use super::error::{Error, ErrorKind};
use super::muon;
use super::plans::{Plan, PlanId};
use super::prepare;
use super::ranges::{self, Batch, Fold, Work};
use super::start::{Function, start, words};
use super::tensor;
use super::variant::Variant;
use crate::kernels::error::{KernelError, OperandError};
use crate::kernels::experts;
use crate::operand::RawRange;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr, CUstream};
use shardlab_plan::ir::{BodyOp, DType, InstrId, KernelId, OpKind, Place, RowLimit, StreamId};
use shardlab_plan::program::{Op, Program};
use std::ffi::c_void;

fn address(r: &RawRange) -> CUdeviceptr {
    r.ptr as CUdeviceptr
}

/// Returns the plan of a launch. The plan for the program's alignment fits the addresses, unless
/// these are aligned worse than the program says.
fn plan_of(
    k: &mut Kernels,
    (instr, kernel, on): (InstrId, KernelId, StreamId),
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<PlanId, ErrorKind> {
    if let Some(id) = k.plans.of_launch(instr)
        && (matches!(k.plans.plan(id), Plan::Ranges(_)) || k.plans.variant(id).fits(reads, writes))
    {
        return Ok(id);
    }
    let variant = Variant::of(kernel, reads, writes);
    if let Some(id) = k.plans.find(&variant) {
        return Ok(id);
    }
    let program = std::sync::Arc::clone(&k.program);
    let id = prepare::one(k, variant, &program.kernels[kernel.index()])?;
    let plan = k.plans.plan(id);
    if plan.scratch() > k.scratch.get(on.index()).copied().unwrap_or(0) {
        return Err(ErrorKind::Launch(
            "its operands are not those that it was prepared for".to_owned(),
        ));
    }
    prepare::takes_turns(plan, on)?;
    Ok(id)
}

/// Enqueues a launch.
///
/// # Safety
/// As [`Kernels::launch`].
pub(super) unsafe fn launch(
    k: &mut Kernels,
    instr: InstrId,
    reads: &[RawRange],
    writes: &[RawRange],
    hyper: CUdeviceptr,
    stream: CUstream,
) -> Result<(), Error> {
    let program = std::sync::Arc::clone(&k.program);
    let op = program.instrs[instr.index()].op;
    let Op::Launch {
        kernel, stream: on, ..
    } = op
    else {
        return Err(Error::new(
            program.op_text(instr),
            ErrorKind::Launch("no kernel is launched here".to_owned()),
        ));
    };
    let named = |t: ErrorKind| Error::new(program.kernels[kernel.index()].name.clone(), t);
    let scratch = k.workspace.get(on.index()).copied().unwrap_or(0);
    let id = plan_of(k, (instr, kernel, on), reads, writes).map_err(named)?;
    if let Plan::Ranges(op) = *k.plans.plan(id) {
        let work = ranges::work(op, k.parameters(instr), reads, writes)
            .map_err(|f| named(ErrorKind::Launch(f.to_string())))?;
        // SAFETY: the caller's contract.
        return unsafe { lists(k, &work, hyper, scratch, stream) }.map_err(named);
    }
    match k.plans.plan(id) {
        Plan::Generated(entries, _) => {
            // SAFETY: the caller's contract.
            unsafe { each(k, entries, instr, (reads, writes), scratch, stream) }.map_err(named)
        }
        Plan::Gemm(plan, o) => {
            let at = |(place, first): (Place, u64)| {
                let r = match place {
                    Place::Read(i) => &reads[usize::from(i)],
                    Place::Write(i) => &writes[usize::from(i)],
                    Place::Register(_) => return 0,
                };
                address(r) + first * r.dtype.size()
            };
            let at = Addresses {
                a: at(o.a),
                b: at(o.b),
                inverses: o.inverses.map(|inverses| inverses.map(at)),
                bias: o.bias.map_or(0, at),
                before: at(o.before),
                c: at(o.c),
                workspace: scratch,
            };
            // SAFETY: the plan was made for operands of these shapes; the caller's contract covers
            // the memory.
            unsafe { k.blas.launch(plan, at, stream) }.map_err(named)
        }
        Plan::Library(a, then) => {
            let Some(dnn) = &k.dnn else {
                return Err(named(ErrorKind::Launch("cuDNN is closed".to_owned())));
            };
            let range = |place: Place| match place {
                Place::Read(i) => Some(&reads[usize::from(i)]),
                Place::Write(i) => Some(&writes[usize::from(i)]),
                Place::Register(_) => None,
            };
            let at = |place: Place| range(place).map_or((0, DType::F32), |r| (address(r), r.dtype));
            for &(place, first, bytes) in &a.zeros {
                // SAFETY: the scalar is inside its operand.
                unsafe { result::memset_d8_async(at(place).0 + first, 0, bytes as usize, stream) }
                    .map_err(|e| named(ErrorKind::driver("cuMemsetD8Async")(e)))?;
            }
            // SAFETY: the plan was made for operands of these shapes; the caller's contract covers
            // the memory.
            unsafe {
                dnn.launch(a, at, scratch, stream)
                    .and_then(|()| each(k, then, instr, (reads, writes), scratch, stream))
            }
            .map_err(named)
        }
        Plan::Ranges(_) | Plan::Nothing => Ok(()),
    }
}

/// Value of an entry's argument.
enum Argument {
    /// 8 bytes; the low half of a 32-bit one.
    Word(u64),
    Matrix(sys::CUtensorMap),
}

impl Argument {
    fn address(&mut self) -> *mut c_void {
        match self {
            Self::Word(word) => (&raw mut *word).cast(),
            Self::Matrix(matrix) => (&raw mut *matrix).cast(),
        }
    }
}

/// Launches generated entries one after another.
///
/// # Safety
/// As [`Kernels::launch`]; the scratch memory has as many bytes as the entries' plan takes.
unsafe fn each(
    k: &Kernels,
    entries: &[(Entry, Function)],
    instr: InstrId,
    (reads, writes): (&[RawRange], &[RawRange]),
    scratch: CUdeviceptr,
    stream: CUstream,
) -> Result<(), ErrorKind> {
    let at = |place: Place| match place {
        Place::Read(i) => reads[usize::from(i)],
        Place::Write(i) | Place::Register(i) => writes[usize::from(i)],
    };
    for (entry, f) in entries {
        let value = |p: &Param| -> Result<Argument, ErrorKind> {
            Ok(Argument::Word(match *p {
                Param::Read(i) => address(&reads[usize::from(i)]),
                Param::Write(i) => address(&writes[usize::from(i)]),
                Param::Scratch(at) => scratch + at,
                Param::Tickets => k.fault + 8,
                Param::Fault => k.fault,
                Param::Launch => u64::from(instr.0),
                Param::DataRank => u64::from(k.data_rank),
                Param::Map(map) => return Ok(Argument::Matrix(tensor::map(&map, &at(map.place))?)),
            }))
        };
        let values = entry.params.iter().map(value);
        let mut values = values.collect::<Result<Vec<_>, _>>()?;
        let mut params: Vec<*mut c_void> = values.iter_mut().map(Argument::address).collect();
        // SAFETY: the generator wrote the entry for these parameters; the caller's contract covers
        // the memory. The arguments outlive the call, which copies them.
        unsafe {
            start(
                *f,
                entry.grid,
                entry.block,
                entry.shared,
                &mut params,
                stream,
            )
        }?;
    }
    Ok(())
}

/// Runs lists of ranges.
///
/// # Safety
/// As [`Kernels::launch`].
unsafe fn lists(
    k: &mut Kernels,
    work: &Work,
    hyper: CUdeviceptr,
    scratch: CUdeviceptr,
    stream: CUstream,
) -> Result<(), ErrorKind> {
    // SAFETY: the caller's contract.
    let parts = unsafe { batches(k, work, &work.batches, hyper, scratch, stream) }?;
    // SAFETY: the caller's contract.
    unsafe {
        muon::launch(k, work, hyper, scratch, stream)?;
        batches(k, work, &work.copies, hyper, scratch, stream)?;
    }
    if let Some(Fold { any, out, before }) = work.fold {
        let f = prepare::fold_kernel(k, any)?;
        // SAFETY: as above; earlier launches on the same stream wrote the parts.
        unsafe { words(f, (1, 1024), &mut [scratch, parts, out, before], stream) }?;
    }
    Ok(())
}

/// Runs lists of ranges; returns the number of their blocks.
///
/// # Safety
/// As [`Kernels::launch`].
unsafe fn batches(
    k: &mut Kernels,
    work: &Work,
    all: &[Batch],
    hyper: CUdeviceptr,
    scratch: CUdeviceptr,
    stream: CUstream,
) -> Result<u64, ErrorKind> {
    let mut parts = 0u64;
    for batch in all {
        let functions = prepare::list(k, batch.kind)?;
        let [short, long] = batch.kind.capacities();
        for pieces in batch.pieces.chunks(long) {
            let wide = pieces.len() > short;
            let capacity = if wide { long } else { short };
            let (table, blocks) = table(batch, pieces, capacity)?;
            let mut values: Vec<u64> = Vec::new();
            for extra in batch.kind.extra() {
                values.push(match extra {
                    Extra::Factor => u64::from(work.factor.to_bits()),
                    Extra::Hyper => hyper,
                    Extra::Square => work.square,
                    Extra::Part => scratch + parts * 8,
                });
            }
            let mut params: Vec<*mut c_void> = vec![table.as_ptr().cast_mut().cast()];
            params.extend(values.iter_mut().map(|v| (v as *mut u64).cast::<c_void>()));
            // SAFETY: the table has the layout of the kernel's first parameter; the caller's
            // contract covers the memory it names.
            unsafe {
                let f = functions[usize::from(wide)];
                start(f, [blocks, 1, 1], 256, 0, &mut params, stream)
            }?;
            parts += u64::from(blocks);
        }
    }
    Ok(parts)
}

/// Encodes a list as the kernels read it: addresses, lengths, first blocks, their number. In words
/// of 8 bytes.
fn table(
    batch: &Batch,
    pieces: &[ranges::Piece],
    capacity: usize,
) -> Result<(Vec<u64>, u32), ErrorKind> {
    let width = batch.kind.width();
    let mut out = vec![0u64; capacity * (width + 1) + (capacity + 2) / 2];
    let mut blocks = 0u64;
    let mut first: Vec<u32> = Vec::with_capacity(capacity + 2);
    for (i, p) in pieces.iter().enumerate() {
        out[i * width..][..width].copy_from_slice(&p.at[..width]);
        out[capacity * width + i] = p.n;
        first.push(blocks as u32);
        blocks += p.n.div_ceil(batch.kind.chunk());
    }
    let total = u32::try_from(blocks)
        .ok()
        .filter(|b| *b < 1 << 31)
        .ok_or_else(|| ErrorKind::Launch("a list is too long for one launch".to_owned()))?;
    first.resize(capacity + 1, total);
    first.push(pieces.len() as u32);
    for (word, pair) in out[capacity * (width + 1)..]
        .iter_mut()
        .zip(first.chunks(2))
    {
        *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
    }
    Ok((out, total))
}

/// Returns the limit of the rows that an operation gives to choices, if it has one.
fn row_limit(op: &BodyOp) -> Option<RowLimit> {
    match &op.op {
        OpKind::SortExperts(of) => of.limit,
        OpKind::DispatchExperts(of) => Some(experts::dispatch_limit(
            of,
            op.inputs[0].shape.iter().product::<u64>() as usize,
        )),
        _ => None,
    }
}

/// Describes what a launch has found in its inputs.
fn described(program: &Program, instr: InstrId, what: i64) -> String {
    let Some(Op::Launch { kernel, .. }) = program.instrs.get(instr.index()).map(|i| i.op) else {
        return format!("id {what} is outside its table");
    };
    let kernel = &program.kernels[kernel.index()];
    let limits = kernel.body.iter().map(|op| (op, row_limit(op)));
    let limited = limits.filter_map(|(op, limit)| Some((op, limit?))).next();
    let Some((op, limit)) = limited else {
        let name = &kernel.name;
        return format!("kernel `{name}` met the id {what}, outside its table");
    };
    let wanted = what as u64;
    let error = KernelError {
        kernel: kernel.name.clone(),
        op: op.op.name(),
        fault: OperandError::Overflow { wanted, limit },
    };
    program.in_unit(instr, &error.to_string())
}

/// Returns the launch that has found an id outside its range, or choices without a row, and what
/// that is.
pub(super) fn fault(k: &mut Kernels) -> Result<Option<(InstrId, String)>, Error> {
    let named = |t: ErrorKind| Error::new("faults", t);
    if k.fault == 0 {
        return Ok(None);
    }
    let mut word = [0u64; 1];
    // SAFETY: the word is in the workspace.
    unsafe {
        result::memcpy_dtoh_sync(&mut word, k.fault)
            .map_err(|e| named(ErrorKind::driver("cuMemcpyDtoH")(e)))?;
        if word[0] == 0 {
            return Ok(None);
        }
        result::memset_d8_sync(k.fault, 0, 8)
            .map_err(|e| named(ErrorKind::driver("cuMemsetD8")(e)))?;
    }
    let instr = InstrId((word[0] >> 40) as u32 - 1);
    // The low 40 bits, with their sign.
    let what = ((word[0] << 24) as i64) >> 24;
    Ok(Some((instr, described(&k.program, instr, what))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::{plan, scenario};

    /// Descriptions of the first launch of an operation that notes `what`.
    fn noted(set: &[&str], op: &str, what: i64) -> String {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let s = scenario::load("small-moe-ep".as_ref(), &set).unwrap();
        let program = plan(&s).unwrap();
        let starts = |op: &str, i: &Op| match i {
            Op::Launch { kernel, .. } => {
                let first = program.kernels[kernel.index()].body.first();
                first.is_some_and(|b| b.op.name() == op)
            }
            _ => false,
        };
        let at = program.instrs.iter().position(|i| starts(op, &i.op));
        described(&program, InstrId(at.unwrap() as u32), what)
    }

    /// Two ranks with 96 choices each: those of both share 120 rows of a rank, or take 60 each.
    #[test]
    fn choices_without_a_row_are_described() {
        for (dispatcher, op, rows, factor) in [
            ("gather", "sort_experts", 120, "1.27"),
            ("peer", "sort_experts", 120, "1.27"),
            ("all_to_all", "dispatch_experts", 60, "2.53"),
        ] {
            let dispatcher = format!("moe.dispatcher={dispatcher}");
            let text = noted(&[&dispatcher, "moe.capacity_factor=1.25"], op, 121);
            let wanted = format!(
                "layers.1: kernel `{op}`, op `{op}`: 121 choices fall on the experts of one rank, which reserves \
                 {rows} rows for them: set moe.capacity_factor = {factor} or more, or moe.on_overflow = \"drop\""
            );
            assert_eq!(text, wanted);
        }
        let text = noted(&[], "embedding", -7);
        assert!(text.contains("met the id -7, outside its table"), "{text}");
    }
}
