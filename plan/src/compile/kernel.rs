//! Kernel descriptors: body, class, exact FLOPs and bytes.

use super::schedule::Step;
use super::used_rows::Used;
use crate::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::ir::{
    BodyOp, DType, Kernel, KernelClass, KernelId, OpKind, Place, Slot, UsedRows, strides,
};
use crate::ops::{Fusion, Operands};
use crate::units::{Bytes, Flops};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A range of a root that a launch touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Touch {
    pub(super) root: Root,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Touch {
    /// Returns whether the range is within another one.
    fn within(&self, of: &Self) -> bool {
        self.root == of.root
            && of.offset <= self.offset
            && self.offset + self.bytes <= of.offset + of.bytes
    }
}

/// A described launch.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) kernel: KernelId,
    pub(super) reads: SmallVec<[Touch; 8]>,
    pub(super) writes: SmallVec<[Touch; 4]>,
}

/// Kernels, each once.
#[derive(Default)]
pub(super) struct Table {
    pub(super) kernels: Vec<Kernel>,
    by_hash: HashMap<u64, SmallVec<[u32; 1]>, BuildHasherDefault<Fx>>,
}

/// Multiplicative hash (as rustc's): descriptors are short and trusted.
#[derive(Default)]
struct Fx(u64);

impl Hasher for Fx {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_u8(&mut self, x: u8) {
        self.write_u64(u64::from(x));
    }

    fn write_u32(&mut self, x: u32) {
        self.write_u64(u64::from(x));
    }

    fn write_usize(&mut self, x: usize) {
        self.write_u64(x as u64);
    }

    fn write_isize(&mut self, x: isize) {
        self.write_u64(x as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Table {
    /// Describes the launch of a step's ops as one kernel. Buffers for which `internal` holds never
    /// reach memory.
    pub(super) fn launch(
        &mut self,
        g: &Graph,
        step: &Step,
        internal: &dyn Fn(u32) -> bool,
    ) -> Launch {
        let mut d = Describe {
            used: step.used,
            ..Describe::new(g, internal)
        };
        for &i in &step.ops {
            let op = &g.ops[i as usize];
            if let Act::Compute(kind) = op.act {
                d.op(op, kind);
            }
        }
        let class = d.class();
        d.unite();
        let used_rows = d.used_rows();
        let (read, written) = d.traffic();
        let flops = Flops(d.flops);
        let Describe {
            body,
            reads,
            writes,
            dtype,
            ..
        } = d;
        let kernel = self.intern(Kernel {
            name: name(&body),
            class,
            flops,
            read,
            written,
            dtype,
            body,
            used_rows,
        });
        Launch {
            kernel,
            reads: reads.iter().map(|r| r.0).collect(),
            writes: writes.iter().map(|w| w.0).collect(),
        }
    }

    fn intern(&mut self, kernel: Kernel) -> KernelId {
        let mut h = Fx::default();
        let k = &kernel;
        (k.class, k.flops, k.read, k.written, k.dtype, &k.body).hash(&mut h);
        k.used_rows.hash(&mut h);
        let same = self.by_hash.entry(h.finish()).or_default();
        for &id in same.iter() {
            let k = &self.kernels[id as usize];
            if k.class == kernel.class
                && k.flops == kernel.flops
                && k.read == kernel.read
                && k.written == kernel.written
                && k.body == kernel.body
                && k.used_rows == kernel.used_rows
            {
                return KernelId(id);
            }
        }
        let id = self.kernels.len() as u32;
        same.push(id);
        self.kernels.push(kernel);
        KernelId(id)
    }
}

/// Returns the op's name, or `fused_` and the names of the first ops.
fn name(body: &[BodyOp]) -> String {
    const SHOWN: usize = 5;
    if let [only] = body {
        return only.op.name().to_owned();
    }
    let mut seen: SmallVec<[&str; 8]> = SmallVec::new();
    for op in body {
        if !seen.contains(&op.op.name()) {
            seen.push(op.op.name());
        }
    }
    let mut s = String::from("fused");
    for n in seen.iter().take(SHOWN) {
        let _ = write!(s, "_{n}");
    }
    if seen.len() > SHOWN {
        let _ = write!(s, "_and_{}", seen.len() - SHOWN);
    }
    s
}

struct Describe<'g> {
    g: &'g Graph,
    internal: &'g dyn Fn(u32) -> bool,
    body: Vec<BodyOp>,
    /// Range, and bytes that are really touched in it.
    reads: SmallVec<[(Touch, u64); 8]>,
    writes: SmallVec<[(Touch, u64); 4]>,
    registers: SmallVec<[u32; 8]>,
    flops: u64,
    dtype: DType,
    class: Option<KernelClass>,
    row: Option<KernelClass>,
    used: Option<Used>,
}

impl<'g> Describe<'g> {
    fn new(g: &'g Graph, internal: &'g dyn Fn(u32) -> bool) -> Self {
        Self {
            g,
            internal,
            body: Vec::with_capacity(1),
            reads: SmallVec::new(),
            writes: SmallVec::new(),
            registers: SmallVec::new(),
            flops: 0,
            dtype: DType::U8,
            class: None,
            row: None,
            used: None,
        }
    }

    fn op(&mut self, op: &Op, kind: OpKind) {
        let inputs = op
            .inputs
            .iter()
            .enumerate()
            .map(|(i, &v)| self.input(kind, i, op, v))
            .collect();
        let outputs = op
            .outputs
            .iter()
            .enumerate()
            .map(|(o, &v)| self.output(kind, o, op, v))
            .collect();
        if self.body.is_empty() {
            let first = op.inputs.first().or(op.outputs.first());
            self.dtype = first.map_or(DType::U8, |&v| self.g.value(v).dtype);
        }
        let at = Operands::new(self.g, op);
        let flops = kind.def().flops(&at);
        let class = kind.def().class(&at);
        // A matmul of experts counts its used rows itself.
        let used = self.used;
        let used = used.filter(|_| !matches!(class, KernelClass::GroupedGemm { .. }));
        self.flops += used.map_or(flops, |used| used.share(flops));
        match kind.fusion() {
            // A maximum adds nothing to the kernel of a norm.
            Fusion::Row if kind == OpKind::RowAmax => self.row = self.row.or(Some(class)),
            Fusion::Row if !matches!(self.row, Some(KernelClass::Softmax { .. })) => {
                self.row = Some(class);
            }
            Fusion::Column => self.row = self.row.or(Some(class)),
            _ => {}
        }
        self.class = match (self.class, class) {
            // A GEMM keeps its class with an epilogue; the results of two with a common factor are
            // adjacent.
            (Some(first @ KernelClass::Gemm { m, n, k, batch }), second) => match second {
                KernelClass::Gemm { n: more, .. } => Some(KernelClass::Gemm {
                    m,
                    n: n + more,
                    k,
                    batch,
                }),
                _ => Some(first),
            },
            (Some(first @ KernelClass::GroupedGemm { .. }), _) => Some(first),
            (_, class) => Some(class),
        };
        self.body.push(BodyOp {
            op: kind,
            inputs,
            outputs,
        });
    }

    fn class(&self) -> KernelClass {
        match (self.body.len(), self.class) {
            (0 | 1, Some(class))
            | (_, Some(class @ (KernelClass::Gemm { .. } | KernelClass::GroupedGemm { .. }))) => {
                class
            }
            _ => {
                let row = self.row.unwrap_or(KernelClass::Fused);
                let backward = self.body.iter().any(|op| op.op.def().is_backward());
                if backward { row.of_backward() } else { row }
            }
        }
    }

    fn traffic(&self) -> (Bytes, Bytes) {
        (
            Bytes(self.reads.iter().map(|r| r.1).sum()),
            Bytes(self.writes.iter().map(|w| w.1).sum()),
        )
    }

    /// Turns reads of parts of what is written into reads of all of it, so that operand and result
    /// are the same range: the kernel works in place.
    fn unite(&mut self) {
        for w in 0..self.writes.len() {
            let to = self.writes[w].0;
            let part = |r: &Touch| *r != to && r.within(&to);
            let old: SmallVec<[(Touch, u64); 8]> = std::mem::take(&mut self.reads);
            if !old.iter().any(|r| part(&r.0)) {
                self.reads = old;
                continue;
            }
            // New position of each read, and the offset of the old one in it.
            let mut places: SmallVec<[(u8, u64); 8]> = SmallVec::new();
            for (touch, bytes) in old {
                let (all, ahead) = if part(&touch) {
                    (to, touch.offset - to.offset)
                } else {
                    (touch, 0)
                };
                let at = self.reads.iter().position(|r| r.0 == all);
                let at = at.unwrap_or(self.reads.len());
                match self.reads.get_mut(at) {
                    Some(read) => read.1 += bytes,
                    None => self.reads.push((all, bytes)),
                }
                places.push((at as u8, ahead));
            }
            for slot in self.body.iter_mut().flat_map(|op| &mut op.inputs) {
                if let Place::Read(r) = slot.place {
                    let (at, ahead) = places[usize::from(r)];
                    slot.place = Place::Read(at);
                    slot.offset += ahead / slot.dtype.size();
                }
            }
        }
    }

    /// Returns how many of a value's bytes the kernel touches.
    fn bytes_used(&self, value: &Value, bytes: u64) -> u64 {
        let used = self.used.filter(|used| used.reserved == value.rows());
        used.map_or(bytes, |used| used.share(bytes))
    }

    /// Reads the offsets that say which rows are used, after all other operands.
    fn used_rows(&mut self) -> Option<UsedRows> {
        let used = self.used?;
        let value = self.g.value(used.offsets);
        let (touch, bytes) = touch(value);
        let at = self.reads.iter().position(|r| r.0 == touch);
        let at = at.unwrap_or_else(|| {
            self.reads.push((touch, bytes));
            self.reads.len() - 1
        });
        Some(UsedRows {
            offsets: slot(Place::Read(at as u8), 0, value),
            reserved: used.reserved,
            expected: used.expected,
        })
    }

    fn register(&mut self, value: &Value) -> Option<Place> {
        let Root::Buffer(b) = value.root else {
            return None;
        };
        if !(self.internal)(b) {
            return None;
        }
        let at = self
            .registers
            .iter()
            .position(|&r| r == b)
            .unwrap_or_else(|| {
                self.registers.push(b);
                self.registers.len() - 1
            });
        Some(Place::Register(at as u8))
    }

    fn input(&mut self, kind: OpKind, i: usize, op: &Op, v: ValueId) -> Slot {
        let value = self.g.value(v);
        if let Some(place) = self.register(value) {
            return slot(place, value.offset, value);
        }
        let (touch, mut bytes) = touch(value);
        // What this kernel has made, not other columns of the same buffer.
        if let Some(at) = self.writes.iter().position(|w| touch.within(&w.0)) {
            let ahead = touch.offset - self.writes[at].0.offset;
            return slot(Place::Write(at as u8), ahead / value.dtype.size(), value);
        }
        let operands = Operands::new(self.g, op);
        let part = kind.def().bytes_read(&operands, i);
        bytes = part.unwrap_or_else(|| self.bytes_used(value, bytes));
        let at = self
            .reads
            .iter()
            .position(|r| r.0 == touch)
            .unwrap_or_else(|| {
                self.reads.push((touch, 0));
                self.reads.len() - 1
            });
        self.reads[at].1 = self.reads[at].1.max(bytes);
        slot(Place::Read(at as u8), 0, value)
    }

    fn output(&mut self, kind: OpKind, o: usize, op: &Op, v: ValueId) -> Slot {
        let value = self.g.value(v);
        if let Some(place) = self.register(value) {
            return slot(place, value.offset, value);
        }
        let (touch, mut bytes) = touch(value);
        let operands = Operands::new(self.g, op);
        let part = kind.def().bytes_written(&operands, o);
        bytes = part.unwrap_or_else(|| self.bytes_used(value, bytes));
        let at = self
            .writes
            .iter()
            .position(|w| w.0 == touch)
            .unwrap_or_else(|| {
                self.writes.push((touch, 0));
                self.writes.len() - 1
            });
        self.writes[at].1 = self.writes[at].1.max(bytes);
        slot(Place::Write(at as u8), 0, value)
    }
}

/// Returns the range that contains a value, and how many bytes of it are the value's.
pub(super) fn touch(value: &Value) -> (Touch, u64) {
    let size = value.dtype.size();
    let bytes = strides::extent(&value.shape, &value.strides) * size;
    let distinct = strides::distinct(&value.shape, &value.strides) * size;
    (
        Touch {
            root: value.root,
            offset: value.offset * size,
            bytes,
        },
        distinct,
    )
}

fn slot(place: Place, offset: u64, value: &Value) -> Slot {
    let strides = if value.is_contiguous() {
        SmallVec::new()
    } else {
        value.strides.clone()
    };
    Slot {
        place,
        offset,
        shape: value.shape.clone(),
        strides,
        dtype: value.dtype,
    }
}
