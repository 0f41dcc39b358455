//! Kernels over elements that write some results transposed: matrices, or stacks of matrices.
//!
//! A block takes a tile of rows and columns. A thread computes a few rows of a vector and writes
//! what is stored row by row. The elements of each column of other results stay in registers. The
//! block writes whole lines of these through a tile in shared memory, one result after another.

use super::expr::{Cached, Gen, Var};
use super::index::{self, Index};
use super::{CodegenError, Entry, Module, Request, blocks, ctype, numel};
use crate::kernels::strides::Dim;
use shardlab_plan::ir::{BodyOp, DType, Place, Slot};
use std::collections::BTreeMap;

/// Rows and columns of a tile.
const ROWS: usize = 128;
const COLS: usize = 64;
/// Rows and columns per thread.
const DEEP: usize = 4;
const LANES: usize = 8;
const THREADS: usize = ROWS / DEEP * (COLS / LANES);
/// Bytes that a thread writes at once.
const VECTOR: usize = 16;
/// Largest number of rows of tiles, and of matrices: the limits of a grid's second and third
/// dimensions.
const MAX_GRID: usize = 65_535;

/// An output in memory: output `o` of operation `i`.
struct Output<'a> {
    i: usize,
    o: usize,
    slot: &'a Slot,
    /// Bytes of an element, if it is written transposed.
    transposed: Option<usize>,
}

/// A body that writes at least one result transposed.
pub(super) struct Tiles<'a> {
    stack: usize,
    rows: usize,
    cols: usize,
    outputs: Vec<Output<'a>>,
}

/// Returns the number, rows and columns of matrices that are stored column by column, one after
/// another.
fn by_column(slot: &Slot) -> Option<[usize; 3]> {
    let dims = index::dims(slot);
    let (stack, matrix) = match dims[..] {
        [stack, a, b] => (stack, [a, b]),
        [a, b] => (
            Dim {
                n: 1,
                stride: a.n * b.n,
            },
            [a, b],
        ),
        _ => return None,
    };
    let [Dim { n: rows, stride: 1 }, Dim { n: cols, stride }] = matrix else {
        return None;
    };
    (stride == rows && stack.stride == rows * cols).then_some([stack.n, rows, cols])
}

/// Returns whether a later operation of the body writes the same place.
fn is_overwritten(body: &[BodyOp], i: usize, slot: &Slot) -> bool {
    let mut later = body[i + 1..].iter().flat_map(|op| &op.outputs);
    later.any(|s| s.place == slot.place)
}

impl<'a> Tiles<'a> {
    /// Returns the tiles of a body, if it has results that are written transposed, and tiles fit.
    pub(super) fn of(req: &Request<'a>) -> Option<Self> {
        let mut outputs = Vec::new();
        for (i, op) in req.body.iter().enumerate() {
            for (o, slot) in op.outputs.iter().enumerate() {
                if matches!(slot.place, Place::Write(_)) && !is_overwritten(req.body, i, slot) {
                    outputs.push((i, o, slot));
                }
            }
        }
        let [stack, rows, cols] = outputs.iter().find_map(|&(.., slot)| by_column(slot))?;
        let mut made = Vec::new();
        for (i, o, slot) in outputs {
            let arg = req.arg(slot.place).ok()?;
            let size = arg.dtype.size() as usize;
            let transposed = by_column(slot).is_some();
            let other = transposed && by_column(slot) != Some([stack, rows, cols]);
            if numel(slot) != stack * rows * cols || other {
                return None;
            }
            if transposed {
                let whole = |elements: usize| (elements * size).is_multiple_of(VECTOR);
                if size > 2
                    || usize::from(arg.align) < VECTOR
                    || !whole(rows)
                    || !whole(slot.offset as usize)
                {
                    return None;
                }
            }
            made.push(Output {
                i,
                o,
                slot,
                transposed: transposed.then_some(size),
            });
        }
        let whole = rows.is_multiple_of(DEEP) && cols.is_multiple_of(LANES);
        let fits = whole && rows.div_ceil(ROWS) <= MAX_GRID && stack <= MAX_GRID;
        fits.then_some(Self {
            stack,
            rows,
            cols,
            outputs: made,
        })
    }

    /// Generates the kernel.
    pub(super) fn generate(&self, req: &Request<'a>) -> Result<Module, CodegenError> {
        let (stack, rows, cols) = (self.stack, self.rows, self.cols);
        // Up to three rows more may be computed, which no one uses.
        let (used, end) = match req.used()? {
            None => (String::new(), format!("{rows}u")),
            Some((used, reserved)) if reserved == rows && stack == 1 => (
                format!(
                    "  const IDX used = {used};\n  if ((IDX)blockIdx.y * {ROWS}u >= used) return;\n"
                ),
                "used".to_owned(),
            ),
            Some(_) => return Err(CodegenError::new("other rows than those of experts")),
        };
        let mut g = Gen::new(req, LANES, None);
        (g.cache, g.keep_shared) = (Some(Vec::new()), true);
        g.packs = Some(BTreeMap::new());
        let matrix = match stack {
            1 => String::new(),
            _ => format!("(IDX)blockIdx.z * {rows}u + "),
        };
        let place = format!("const IDX i = ({matrix}top + k) * {cols}u + left;");
        let each = format!("#pragma unroll\nfor (int k = 0; k < {DEEP}; k++)");
        g.open(&each);
        g.line(&place);
        let at = Index::elem(LANES);
        let mut values = Vec::new();
        for output in &self.outputs {
            values.push((output, g.output(output.i, output.o, &at)?));
        }
        let mut written = String::new();
        for (n, (output, var)) in values.into_iter().enumerate() {
            let Some(size) = output.transposed else {
                g.store(output.slot, &at, &var)?;
                continue;
            };
            let dtype = req.arg(output.slot.place)?.dtype;
            let pack = packed(&mut g, &var, dtype);
            g.line(format!(
                "#pragma unroll\nfor (int v = 0; v < {LANES}; v++) held{n}[v][k * {size} / 4] |= (u32){pack}.e[v].x << (k * {bits} % 32);",
                bits = 8 * size
            ));
            written += &self.written(n, size, &end, &req.address(output.slot)?);
        }
        g.close();
        let transposed = (self.outputs.iter().enumerate())
            .filter_map(|(n, output)| Some((n, output.transposed?)));
        let held: String = (transposed.clone())
            .map(|(n, size)| format!("  u32 held{n}[{LANES}][{size}] = {{}};\n"))
            .collect();
        let words = transposed.map(|(_, size)| COLS * pitch(size)).max();
        let kept = g.cache.take().unwrap_or_default();
        let mut ahead: String = kept
            .iter()
            .map(|c| format!("    {}", c.declared(DEEP)))
            .collect();
        if !kept.is_empty() {
            ahead += &format!("{each} {{\n{place}\n");
            ahead.extend(kept.iter().map(Cached::taken));
            ahead += "}\n";
        }
        let (params, operands) = req.operands();
        // Neighbouring threads of a warp take other banks of a tile: four vectors, and eight rows
        // of threads.
        let source = format!(
            "typedef {index} IDX;
KERNEL({THREADS}) k0({operands}) {{
{used}  __shared__ u32 tile[{words}];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 column = (warp % 2 * 4 + lane % 4) * {LANES}u, deep = warp / 2 * 8 + lane / 4;
  const IDX top = (IDX)blockIdx.y * {ROWS}u + deep * {DEEP}u, left = (IDX)blockIdx.x * {COLS}u + column;
  const bool inside = top < {end} && left < {cols}u;
{held}  if (inside) {{
{ahead}{body}  }}
{written}}}
",
            words = words.unwrap_or(1),
            index = req.index(),
            operands = operands.join(", "),
            body = g.code,
        );
        Ok(Module {
            source,
            entries: vec![Entry {
                name: "k0".to_owned(),
                grid: [blocks(cols, COLS)?, blocks(rows, ROWS)?, stack as u32],
                block: THREADS as u32,
                shared: 0,
                params,
            }],
            scratch: 0,
        })
    }
}

impl Tiles<'_> {
    /// Writes the rows before `end` of result `n`, of elements of `size` bytes, through the tile to
    /// an address.
    fn written(&self, n: usize, size: usize, end: &str, address: &str) -> String {
        let (rows, cols) = (self.rows, self.cols);
        let matrix = match self.stack {
            1 => String::new(),
            _ => format!(" + (IDX)blockIdx.z * {}u", rows * cols),
        };
        let vectors = ROWS * size / VECTOR;
        format!(
            "  if (inside)
#pragma unroll
    for (int v = 0; v < {LANES}; v++)
#pragma unroll
      for (int w = 0; w < {size}; w++) tile[(column + v) * {pitch}u + deep * {size} + w] = held{n}[v][w];
  __syncthreads();
  for (u32 x = threadIdx.x; x < {}u; x += {THREADS}u) {{
    const u32 c = x / {vectors}u, h = x % {vectors}u;
    const IDX column = (IDX)blockIdx.x * {COLS}u + c, row = (IDX)blockIdx.y * {ROWS}u + h * {per}u;
    if (column >= {cols}u || row >= {end}) continue;
    const u32* from = tile + c * {pitch}u + h * 4;
    *reinterpret_cast<uint4*>({address}{matrix} + column * {rows}u + row) = make_uint4(from[0], from[1], from[2], from[3]);
  }}
  __syncthreads();
",
            COLS * vectors,
            pitch = pitch(size),
            per = VECTOR / size,
        )
    }
}

/// Returns the words of a column of a tile: one more than it has, so that columns start in
/// different banks.
const fn pitch(size: usize) -> usize {
    ROWS * size / 4 + 1
}

/// Returns the variable that holds a value's elements in their own type.
fn packed(g: &mut Gen<'_>, var: &Var, dtype: DType) -> String {
    let array = match var {
        Var::Each(t) => t.clone(),
        Var::Same(_) => match g.define(&var.lane(), true) {
            Var::Each(t) | Var::Same(t) => t,
        },
    };
    let known = g.packs.as_ref().and_then(|packs| packs.get(&array));
    if let Some((held, pack)) = known
        && *held == dtype
    {
        return pack.clone();
    }
    let pack = g.fresh();
    g.line(format!(
        "Pack<{}, {LANES}> {pack};\npack({array}, {pack});",
        ctype(dtype)
    ));
    pack
}
