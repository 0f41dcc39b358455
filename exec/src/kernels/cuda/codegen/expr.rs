//! Values of a body, generated on demand at an index.

use super::index::{self, Domain, Index};
use super::{Arg, CodegenError, Request, ctype, numel, pointer};
use crate::kernels::ops::{self, CudaCode};
use shardlab_plan::ir::{BodyOp, DType, Place, Slot};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A generated value: one for each lane, or the same for all.
#[derive(Clone, Debug)]
pub(in crate::kernels) enum Var {
    Each(String),
    Same(String),
}

impl Var {
    /// Returns the value of lane `v`, as C.
    pub(in crate::kernels) fn lane(&self) -> String {
        match self {
            Self::Each(name) => format!("{name}[v]"),
            Self::Same(name) => name.clone(),
        }
    }
}

/// A vector that is kept in registers: of the own row between passes, or read ahead of its use.
#[derive(Clone, Debug)]
pub(in crate::kernels) struct Cached {
    pub(in crate::kernels) name: String,
    pub(in crate::kernels) ctype: &'static str,
    /// Number of elements.
    pub(in crate::kernels) lanes: usize,
    /// Address of the vector at `i`.
    pub(in crate::kernels) address: String,
    /// Bytes of registers.
    pub(in crate::kernels) bytes: usize,
}

/// Returns the vector at an address, which is kept from its first use on.
fn keep(kept: &mut Vec<Cached>, address: String, arg: Arg, lanes: usize) -> String {
    if let Some(c) = kept.iter().find(|c| c.address == address) {
        return c.value();
    }
    let new = Cached {
        name: format!("kept{}", kept.len()),
        ctype: ctype(arg.dtype),
        lanes,
        address,
        bytes: (lanes * arg.dtype.size() as usize).max(4),
    };
    let value = new.value();
    kept.push(new);
    value
}

impl Cached {
    fn value(&self) -> String {
        format!("{}[k]", self.name)
    }

    /// Declares space for this many.
    pub(in crate::kernels) fn declared(&self, count: usize) -> String {
        let Self {
            name, ctype, lanes, ..
        } = self;
        format!("Pack<{ctype}, {lanes}> {name}[{count}];\n")
    }

    /// Reads the vector with number `k`.
    pub(in crate::kernels) fn taken(&self) -> String {
        let Self {
            ctype,
            lanes,
            address,
            ..
        } = self;
        format!(
            "{} = *reinterpret_cast<const Pack<{ctype}, {lanes}>*>({address});\n",
            self.value()
        )
    }
}

/// Returns whether an operation's results are rounded to 16 bits, so that the fast functions are
/// accurate enough.
fn is_fast(op: &BodyOp) -> bool {
    op.outputs.iter().all(|s| s.dtype.size() == 2)
}

/// Origin of a slot's value.
enum Origin {
    Memory,
    Op(usize, usize),
}

/// Generator of one entry's code.
pub(in crate::kernels) struct Gen<'a> {
    pub(in crate::kernels) req: &'a Request<'a>,
    pub(in crate::kernels) lanes: usize,
    pub(in crate::kernels) domain: Option<Domain>,
    pub(in crate::kernels) code: String,
    depth: usize,
    next: usize,
    memo: Vec<BTreeMap<String, Var>>,
    /// Statistics of row operations computed so far: variables by operation.
    pub(in crate::kernels) stats: BTreeMap<usize, Vec<String>>,
    /// Vectors to keep, if enabled.
    pub(in crate::kernels) cache: Option<Vec<Cached>>,
    /// Concatenations of the own row, by their operation: if rows stay in registers, later passes
    /// find them there.
    pub(in crate::kernels) held: Option<BTreeMap<String, String>>,
    /// Whether values shared by all lanes are kept as well.
    pub(in crate::kernels) keep_shared: bool,
    /// Whether values shared by all rows are kept as well.
    pub(in crate::kernels) keep_columns: bool,
    /// Rounded vectors, by the variables that hold their elements, if they are written as they are.
    pub(in crate::kernels) packs: Option<BTreeMap<String, (DType, String)>>,
    /// Columns of each half of the first operation's result, a GEMM, if the kernel runs over the
    /// elements of a half.
    pub(in crate::kernels) halves: Option<u64>,
}

impl<'a> Gen<'a> {
    pub(in crate::kernels) fn new(
        req: &'a Request<'a>,
        lanes: usize,
        domain: Option<Domain>,
    ) -> Self {
        Self {
            req,
            lanes,
            domain,
            code: String::new(),
            depth: 1,
            next: 0,
            memo: vec![BTreeMap::new()],
            stats: BTreeMap::new(),
            cache: None,
            held: None,
            keep_shared: false,
            keep_columns: false,
            packs: None,
            halves: None,
        }
    }

    pub(in crate::kernels) fn line(&mut self, text: impl AsRef<str>) {
        for part in text.as_ref().lines() {
            let _ = writeln!(self.code, "{}{part}", "  ".repeat(self.depth));
        }
    }

    /// Opens a block; values made inside are forgotten at its end.
    pub(in crate::kernels) fn open(&mut self, head: impl AsRef<str>) {
        self.line(format!("{} {{", head.as_ref()).trim_start());
        self.depth += 1;
        self.memo.push(BTreeMap::new());
    }

    pub(in crate::kernels) fn close(&mut self) {
        self.memo.pop();
        self.depth -= 1;
        self.line("}");
    }

    pub(in crate::kernels) fn fresh(&mut self) -> String {
        self.next += 1;
        format!("t{}", self.next)
    }

    fn known(&self, key: &str) -> Option<Var> {
        self.memo.iter().rev().find_map(|m| m.get(key)).cloned()
    }

    fn remember(&mut self, key: String, var: Var) -> Var {
        if let Some(m) = self.memo.last_mut() {
            m.insert(key, var.clone());
        }
        var
    }

    pub(in crate::kernels) fn op(&self, i: usize) -> &'a BodyOp {
        &self.req.body[i]
    }

    /// Returns the last operation before `before` that writes the slot's place.
    fn origin(&self, slot: &Slot, before: usize) -> Result<Origin, CodegenError> {
        for i in (0..before).rev() {
            for (o, out) in self.op(i).outputs.iter().enumerate() {
                if out.place == slot.place {
                    return Ok(Origin::Op(i, o));
                }
            }
        }
        match slot.place {
            Place::Register(_) => Err(CodegenError::new(format!(
                "{:?} is read before it is written",
                slot.place
            ))),
            _ => Ok(Origin::Memory),
        }
    }

    /// Returns the type that a value is rounded to: its memory's, or its slot's.
    pub(in crate::kernels) fn rounding(&self, slot: &Slot) -> Result<DType, CodegenError> {
        match slot.place {
            Place::Register(_) => Ok(slot.dtype),
            place => Ok(self.req.arg(place)?.dtype),
        }
    }

    /// Returns input `n` of operation `i` at a position of its output (or of a larger shape over
    /// which it is repeated).
    pub(in crate::kernels) fn input(
        &mut self,
        i: usize,
        n: usize,
        to: &[u64],
        at: &Index,
    ) -> Result<Var, CodegenError> {
        let op = self.op(i);
        let slot = op
            .inputs
            .get(n)
            .ok_or_else(|| CodegenError::new(format!("`{}` lacks input {n}", op.op.name())))?;
        let dims = if numel(slot) as u64 == to.iter().product::<u64>() {
            index::dims(slot)
        } else {
            index::broadcast(slot, to)?
        };
        self.read(slot, i, &dims, at)
    }

    /// Returns a slot's value at a position of a view of it.
    pub(in crate::kernels) fn read(
        &mut self,
        slot: &Slot,
        before: usize,
        dims: &crate::kernels::strides::Dims,
        at: &Index,
    ) -> Result<Var, CodegenError> {
        match self.origin(slot, before)? {
            Origin::Memory => {
                let at = index::offset(at, dims, self.lanes, self.domain)?;
                self.memory(slot, &at)
            }
            Origin::Op(w, o) => {
                let written = &self.op(w).outputs[o];
                if w == 0
                    && let Some(columns) = self.halves
                {
                    return self.half(slot, slot.offset - written.offset, columns, at);
                }
                let theirs = index::dims(written);
                if written.offset == slot.offset && theirs == *dims {
                    return self.output(w, o, at);
                }
                if slot.offset < written.offset {
                    return Err(CodegenError::new(
                        "a value is read before its first element",
                    ));
                }
                let at = index::offset(at, dims, self.lanes, self.domain)?
                    .plus((slot.offset - written.offset) as usize);
                let at = index::position(&at, &theirs, self.lanes)?;
                self.output(w, o, &at)
            }
        }
    }

    fn is_aligned(&self, arg: Arg, at: &Index, offset: u64) -> bool {
        let size = arg.dtype.size() as usize;
        let wide = (self.lanes * size).min(16);
        usize::from(arg.align) >= wide
            && (at.multiple * size).is_multiple_of(wide)
            && (offset as usize * size).is_multiple_of(wide)
    }

    /// Returns the elements of memory at an offset from the slot's first.
    fn memory(&mut self, slot: &Slot, at: &Index) -> Result<Var, CodegenError> {
        let key = format!(
            "{}+{}@{}/{}",
            pointer(slot.place),
            slot.offset,
            at.code,
            at.step
        );
        if let Some(var) = self.known(&key) {
            return Ok(var);
        }
        let arg = self.req.arg(slot.place)?;
        let base = self.req.address(slot)?;
        let t = self.fresh();
        let (ty, lanes) = (ctype(arg.dtype), self.lanes);
        let address = format!("{base} + {}", at.code);
        if at.step == 0 {
            let value = match &mut self.cache {
                Some(kept) if self.keep_shared => {
                    format!("{}.e[0]", keep(kept, address, arg, 1))
                }
                _ => format!("{base}[{}]", at.code),
            };
            self.line(format!("const float {t} = up({value});"));
            return Ok(self.remember(key, Var::Same(t)));
        }
        self.line(format!("float {t}[{lanes}];"));
        if at.step == 1 && self.is_aligned(arg, at, slot.offset) {
            match &mut self.cache {
                Some(kept) if self.keep_columns || at.code != "c" => {
                    let name = keep(kept, address, arg, lanes);
                    self.line(format!("unpack<{ty}, {lanes}>({name}, {t});"));
                }
                _ => self.line(format!("load<{ty}, {lanes}>({address}, {t});")),
            }
        } else {
            self.line(format!(
                "load_each<{ty}, {lanes}>({base} + {}, {}u, {t});",
                at.code, at.step
            ));
        }
        Ok(self.remember(key, Var::Each(t)))
    }

    /// Returns output `o` of operation `i` at a logical position.
    pub(in crate::kernels) fn output(
        &mut self,
        i: usize,
        o: usize,
        at: &Index,
    ) -> Result<Var, CodegenError> {
        let key = format!("op{i}.{o}@{}/{}", at.code, at.step);
        if let Some(var) = self.known(&key) {
            return Ok(var);
        }
        if let Some(name) = self.held.as_ref().and_then(|h| h.get(&key)) {
            return Ok(Var::Each(format!("{name}[k]")));
        }
        let op = self.op(i);
        let slot = &op.outputs[o];
        let var = match ops::cuda(&op.op) {
            CudaCode::Cat(axis) => return self.cat(i, axis, at, key),
            _ if op.op.takes_epilogue() => return self.made(i, i, at, key),
            CudaCode::Copy => {
                let from = self.input(i, 0, &slot.shape, at)?;
                self.define(&from.lane(), matches!(from, Var::Each(_)))
            }
            CudaCode::Elementwise(code) => {
                let mut inputs = Vec::new();
                for n in 0..op.op.def().signature().used_inputs() {
                    inputs.push(self.input(i, n, &slot.shape, at)?);
                }
                let lanes: Vec<String> = inputs.iter().map(Var::lane).collect();
                let each = inputs.iter().any(|v| matches!(v, Var::Each(_)));
                self.define(&code.lane(&lanes, is_fast(op)), each)
            }
            CudaCode::Label(code) => code.value(self, i, at)?,
            CudaCode::Row(code) => self.row_value(i, o, at, code)?,
            _ => {
                let name = op.op.name();
                return Err(CodegenError::new(format!("`{name}` has no value to fuse")));
            }
        };
        let ty = self.rounding(slot)?;
        match (&var, &mut self.packs) {
            (Var::Each(t), Some(packs)) if ty != DType::F32 => {
                packs.insert(t.clone(), (ty, format!("{t}p")));
                let (ty, lanes) = (ctype(ty), self.lanes);
                self.line(format!(
                    "Pack<{ty}, {lanes}> {t}p;\npack({t}, {t}p);\nunpack<{ty}, {lanes}>({t}p, {t});"
                ));
            }
            _ => self.round(&var, ty),
        }
        Ok(self.remember(key, var))
    }

    /// Returns a vector of a half of the first operation's result, from its first column on.
    fn half(
        &mut self,
        slot: &Slot,
        first: u64,
        columns: u64,
        at: &Index,
    ) -> Result<Var, CodegenError> {
        let part = first / columns;
        let is_half = slot.shape.last() == Some(&columns) && first == part * columns && part < 2;
        if !is_half {
            return Err(CodegenError::new("no half of the GEMM's columns"));
        }
        let key = format!("half{part}@{}/{}", at.code, at.step);
        match self.known(&key) {
            Some(var) => Ok(var),
            None => self.made(0, part as usize, at, key),
        }
    }

    /// Returns a vector of GEMM `i`, which the kernel has rounded and stored in `made`, by number.
    fn made(
        &mut self,
        i: usize,
        number: usize,
        at: &Index,
        key: String,
    ) -> Result<Var, CodegenError> {
        let slot = &self.op(i).outputs[0];
        let ty = self.rounding(slot)?;
        if at.code != "i" || at.step != 1 || ty != slot.dtype {
            return Err(CodegenError::new(
                "a GEMM's result is read in another order",
            ));
        }
        let (t, lanes) = (self.fresh(), self.lanes);
        self.line(format!(
            "float {t}[{lanes}];\nunpack<{}, {lanes}>(made{number}, {t});",
            ctype(ty)
        ));
        if let Some(packs) = &mut self.packs {
            packs.insert(t.clone(), (ty, format!("made{number}")));
        }
        Ok(self.remember(key, Var::Each(t)))
    }

    /// Returns where copy `i` writes the element at a position of its source, and the value, if it
    /// copies a value of the body into another order: rows are complete where they are made, not
    /// where they go.
    pub(in crate::kernels) fn pushed(
        &mut self,
        i: usize,
        at: &Index,
    ) -> Result<Option<(Index, Var)>, CodegenError> {
        let op = self.op(i);
        let (CudaCode::Copy, [from], [to]) = (ops::cuda(&op.op), &op.inputs[..], &op.outputs[..])
        else {
            return Ok(None);
        };
        let Origin::Op(w, o) = self.origin(from, i)? else {
            return Ok(None);
        };
        let written = &self.op(w).outputs[o];
        let (theirs, dims) = (index::dims(written), index::dims(from));
        if theirs == dims || written.offset != from.offset || numel(written) != numel(to) {
            return Ok(None);
        }
        let value = self.output(w, o, at)?;
        let place = index::offset(at, &theirs, self.lanes, self.domain)?;
        let place = index::position(&place, &dims, self.lanes)?;
        let var = self.define(&value.lane(), true);
        let ty = self.rounding(to)?;
        if let (Var::Each(t), true) = (&var, ty != DType::F32) {
            self.line(format!("round_all<{}, {}>({t});", ctype(ty), self.lanes));
        }
        Ok(Some((Index { own: None, ..place }, var)))
    }

    /// Rounds a value to the precision of a type.
    pub(in crate::kernels) fn round(&mut self, var: &Var, ty: DType) {
        if ty == DType::F32 {
            return;
        }
        match var {
            Var::Each(t) => self.line(format!("round_all<{}, {}>({t});", ctype(ty), self.lanes)),
            Var::Same(t) => self.line(format!("{t} = rounded<{}>({t});", ctype(ty))),
        }
    }

    /// Returns a new value from a lane's expression.
    pub(in crate::kernels) fn define(&mut self, lane: &str, each: bool) -> Var {
        let t = self.fresh();
        if !each {
            self.line(format!("float {t} = {lane};"));
            return Var::Same(t);
        }
        let lanes = self.lanes;
        self.line(format!(
            "float {t}[{lanes}];\n#pragma unroll\nfor (int v = 0; v < {lanes}; v++) {t}[v] = {lane};"
        ));
        Var::Each(t)
    }

    /// Generates a concatenation: the part that contains the position.
    fn cat(&mut self, i: usize, axis: usize, at: &Index, key: String) -> Result<Var, CodegenError> {
        let op = self.op(i);
        let tail = |shape: &[u64]| shape[axis..].iter().product::<u64>() as usize;
        let out = &op.outputs[0];
        if axis >= out.shape.len() || op.inputs.iter().any(|s| s.shape.len() != out.shape.len()) {
            return Err(CodegenError::new(format!(
                "no axis {axis} in {:?}",
                out.shape
            )));
        }
        let whole = tail(&out.shape);
        let lanes = self.lanes;
        let (t, w) = (self.fresh(), self.fresh());
        let each = at.step != 0;
        let together = at.step == 0
            || at.step == 1
                && at.multiple.is_multiple_of(lanes)
                && op
                    .inputs
                    .iter()
                    .all(|s| tail(&s.shape).is_multiple_of(lanes));
        if lanes > 1 && !together {
            return Err(CodegenError::lanes());
        }
        self.line(if each {
            format!("float {t}[{lanes}];")
        } else {
            format!("float {t};")
        });
        self.line(format!("const IDX {w} = ({}) % {whole}u;", at.code));
        // A part is read only where the position is within it, and not ahead: kept values are read
        // for every position.
        let kept = self.cache.take();
        let mut from = 0;
        for (n, slot) in op.inputs.iter().enumerate() {
            let part = tail(&slot.shape);
            let head = match n {
                0 => format!("if ({w} < {part}u)"),
                _ if from + part == whole => "else".to_owned(),
                _ => format!("else if ({w} < {}u)", from + part),
            };
            self.open(head);
            let inner = Index {
                code: format!("(({}) / {whole}u * {part}u + ({w} - {from}u))", at.code),
                step: at.step,
                multiple: if lanes > 1 { lanes } else { 1 },
                own: None,
            };
            let value = self.input(i, n, &slot.shape, &inner)?;
            let value = value.lane();
            self.line(if each {
                format!("#pragma unroll\nfor (int v = 0; v < {lanes}; v++) {t}[v] = {value};")
            } else {
                format!("{t} = {value};")
            });
            self.close();
            from += part;
        }
        self.cache = kept;
        if from != whole {
            return Err(CodegenError::new(
                "the parts do not make up the concatenation",
            ));
        }
        let var = if each { Var::Each(t) } else { Var::Same(t) };
        // Parts were rounded to their slots' types; the concatenation may be coarser.
        let ty = self.rounding(out)?;
        self.round(&var, ty);
        if let (Var::Each(t), Some(held)) = (&var, &mut self.held) {
            let name = format!("held{}", held.len());
            let line =
                format!("#pragma unroll\nfor (int v = 0; v < {lanes}; v++) {name}[k][v] = {t}[v];");
            held.insert(key.clone(), name);
            self.line(line);
        }
        Ok(self.remember(key, var))
    }

    /// Returns the label of the own row, as an integer variable.
    pub(in crate::kernels) fn label(&mut self, i: usize, n: usize) -> Result<String, CodegenError> {
        let key = format!("label{i}.{n}");
        if let Some(Var::Same(name)) = self.known(&key) {
            return Ok(name);
        }
        let slot = &self.op(i).inputs[n];
        let rows = self.domain.map_or(0, |d| d.rows);
        if numel(slot) != rows || self.req.arg(slot.place)?.dtype != DType::I64 {
            return Err(CodegenError::new("labels are one integer a row"));
        }
        let at = index::offset(&Index::row(), &index::dims(slot), 1, None)?;
        let t = self.fresh();
        let base = self.req.address(slot)?;
        self.line(format!("const i64 {t} = {base}[{}];", at.code));
        self.remember(key, Var::Same(t.clone()));
        Ok(t)
    }

    /// Writes a value to memory.
    pub(in crate::kernels) fn store(
        &mut self,
        slot: &Slot,
        at: &Index,
        var: &Var,
    ) -> Result<(), CodegenError> {
        let arg = self.req.arg(slot.place)?;
        let (ty, lanes) = (ctype(arg.dtype), self.lanes);
        let at = index::offset(at, &index::dims(slot), lanes, self.domain)?;
        let base = self.req.address(slot)?;
        if at.step == 0 {
            self.line(format!("down({}, {base}[{}]);", var.lane(), at.code));
            return Ok(());
        }
        let array = match var {
            Var::Each(t) => t.clone(),
            Var::Same(_) => match self.define(&var.lane(), true) {
                Var::Each(t) | Var::Same(t) => t,
            },
        };
        if at.step == 1 && self.is_aligned(arg, &at, slot.offset) {
            let packed = self.packs.as_ref().and_then(|p| p.get(&array));
            self.line(match packed {
                Some((held, pack)) if *held == arg.dtype => format!(
                    "*reinterpret_cast<Pack<{ty}, {lanes}>*>({base} + {}) = {pack};",
                    at.code
                ),
                _ => format!("store<{ty}, {lanes}>({base} + {}, {array});", at.code),
            });
        } else {
            self.line(format!(
                "store_each<{ty}, {lanes}>({base} + {}, {}u, {array});",
                at.code, at.step
            ));
        }
        Ok(())
    }
}
