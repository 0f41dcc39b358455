//! Tokens in the order of their experts: positions, copies and sums of rows.

use super::tables::{contiguous, entry, integers, lanes, slots};
use super::{CodegenError, Module, Param, Request, blocks, numel};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, RowLimit, Slot, op};

/// Choices of a block that sorts.
const CHUNK: usize = 256;
/// Most experts of a rank.
const EXPERTS: usize = 1024;

/// Generates `ids -> local`: a thread has a choice, for all ranks.
pub(in crate::kernels) fn local(
    req: &Request<'_>,
    op: &BodyOp,
    experts: usize,
) -> Result<Module, CodegenError> {
    let ([ids], [out]) = slots::<1, 1>(op)?;
    integers(req, "ids", &[ids, out])?;
    let n = numel(ids);
    let ranks = numel(out) / n.max(1);
    if ranks * n != numel(out) {
        return Err(CodegenError::new("the ids of each rank"));
    }
    let (params, declared) = req.operands();
    let source = format!(
        "KERNEL({CHUNK}) k0({args}) {{
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  if (i >= {n}u) return;
  const i64 id = {ids}[i];
  for (u32 r = 0; r < {ranks}u; r++) {to}[(u64)r * {n}u + i] = id - (i64)(r * {experts}u);
}}
",
        args = declared.join(", "),
        ids = contiguous(req, ids)?,
        to = contiguous(req, out)?,
    );
    let grid = [blocks(n, CHUNK)?, 1, 1];
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, CHUNK as u32, &params)],
        scratch: 0,
    })
}

/// Declares what a kernel notes choices without a row with, behind its other parameters.
fn notes(params: &mut Vec<Param>, declared: &mut Vec<String>) {
    params.extend([Param::Fault, Param::Launch]);
    declared.extend(["u64* fault", "u32 launch"].map(str::to_owned));
}

/// Generates `local -> position`: one thread per row of a rank.
pub(in crate::kernels) fn pushed(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::PushedRows,
) -> Result<Module, CodegenError> {
    let ([local], [position]) = slots::<1, 1>(op)?;
    integers(req, "positions", &[local, position])?;
    let ((rows, k), ranks) = (strides::matrix(local), of.ranks as usize);
    if numel(position) != rows || !rows.is_multiple_of(ranks) {
        return Err(CodegenError::new("the rows of all ranks"));
    }
    let (params, declared) = req.operands();
    let source = format!(
        "KERNEL({CHUNK}) k0({args}) {{
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  if (i >= {rows}u) return;
  bool sent = false;
  for (u32 j = 0; j < {k}u; j++) {{
    const i64 e = {local}[(u64)i * {k}u + j];
    sent |= e >= 0 && e < {experts}ll;
  }}
  {to}[(u64)(i % {tokens}u) * {ranks}u + i / {tokens}u] = sent ? (i64)i : -1ll;
}}
",
        args = declared.join(", "),
        local = contiguous(req, local)?,
        to = contiguous(req, position)?,
        experts = of.experts,
        tokens = rows / ranks,
    );
    let grid = [blocks(rows, CHUNK)?, 1, 1];
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, CHUNK as u32, &params)],
        scratch: 0,
    })
}

/// Generates `ids -> local, position, counts`: empty places and counts of zero, the choices of each
/// block by rank, their prefix sums over blocks, and the place of each choice.
pub(in crate::kernels) fn dispatch(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::DispatchExperts,
) -> Result<Module, CodegenError> {
    let ([ids], [local, position, counts]) = slots::<1, 3>(op)?;
    integers(req, "positions", &[ids, local, position, counts])?;
    let n = numel(ids);
    let [ranks, experts, places] = [of.ranks, of.experts, of.slots].map(|n| n as usize);
    let fits = numel(local) == ranks * places && numel(counts) == ranks * experts;
    if ranks > EXPERTS || !fits || numel(position) != n {
        return Err(CodegenError::new(format!(
            "{ranks} expert-parallel ranks; at most {EXPERTS}"
        )));
    }
    let chunks = blocks(n, CHUNK)?;
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("u32* here".to_owned());
    let mut noted = "";
    if !of.drop {
        notes(&mut params, &mut declared);
        noted = "  __shared__ u32 most;
  if (r == 0) most = 0;
  __syncthreads();
  atomicMax(&most, next);
  __syncthreads();
  if (r == 0 && most > PLACES) note(most, fault, launch);
";
    }
    let args = declared.join(", ");
    let source = format!(
        "#define R {ranks}u
#define PLACES {places}u
DEV int rank_of(i64 id) {{ return id >= 0 && id < {all}ll ? (int)(id / {experts}ll) : -1; }}
KERNEL({CHUNK}) k0({args}) {{
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  if (i < {empty}u) {to}[i] = -1ll;
  if (i < {all}u) {counts}[i] = 0ll;
}}
KERNEL({CHUNK}) k1({args}) {{
  __shared__ u32 mine[R];
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  for (u32 r = threadIdx.x; r < R; r += {CHUNK}) mine[r] = 0;
  __syncthreads();
  const int r = i < {n}u ? rank_of({ids}[i]) : -1;
  if (r >= 0) {{
    atomicAdd(mine + r, 1u);
    atomicAdd((unsigned long long*)({counts}) + {ids}[i], 1ull);
  }}
  __syncthreads();
  for (u32 r = threadIdx.x; r < R; r += {CHUNK}) here[blockIdx.x * R + r] = mine[r];
}}
KERNEL(1024) k2({args}) {{
  const u32 r = threadIdx.x;
  u32 next = 0;
  for (u32 b = 0; r < R && b < {chunks}u; b++) {{
    const u32 count = here[b * R + r];
    here[b * R + r] = next;
    next += count;
  }}
{noted}}}
KERNEL({CHUNK}) k3({args}) {{
  __shared__ int all[{CHUNK}];
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  const int r = i < {n}u ? rank_of({ids}[i]) : -1;
  all[threadIdx.x] = r;
  __syncthreads();
  if (i >= {n}u) return;
  u32 before = 0;
  for (u32 j = 0; j < threadIdx.x; j++) before += all[j] == r;
  const u32 place = r < 0 ? PLACES : here[blockIdx.x * R + r] + before;
  const bool free = place < PLACES;
  if (free) {to}[(u64)r * PLACES + place] = {ids}[i] - (i64)r * {experts}ll;
  {position}[i] = free ? (i64)r * PLACES + place : -1ll;
}}
",
        all = ranks * experts,
        empty = numel(local),
        ids = contiguous(req, ids)?,
        to = contiguous(req, local)?,
        position = contiguous(req, position)?,
        counts = contiguous(req, counts)?,
    );
    let cleared = blocks(numel(local).max(numel(counts)), CHUNK)?;
    let block = CHUNK as u32;
    Ok(Module {
        source,
        entries: vec![
            entry("k0", [cleared, 1, 1], block, &params),
            entry("k1", [chunks, 1, 1], block, &params),
            entry("k2", [1, 1, 1], 1024, &params),
            entry("k3", [chunks, 1, 1], block, &params),
        ],
        scratch: u64::from(chunks) * ranks as u64 * 4,
    })
}

/// Returns the function that finds the expert of a block's choice, or -1 if there is none on this
/// rank, or no row. Choices take rows in their order: with a limit, kernel `choices` writes those
/// of each block to `totals`.
fn own_expert(n: usize, limit: Option<RowLimit>, (args, ids): (&str, &str)) -> String {
    let found = format!(
        "DEV int local(const i64* ids, u32 i) {{
  return i < {n}u && ids[i] >= 0 && ids[i] < E ? (int)ids[i] : -1;
}}
"
    );
    let Some(limit) = limit else {
        return found
            + "DEV int own(const i64* ids, const u32*, u32 i) { return local(ids, i); }\n";
    };
    let rows = limit.rows;
    found
        + &format!(
            "DEV int own(const i64* ids, const u32* totals, u32 i) {{
  __shared__ bool here[{CHUNK}];
  __shared__ u32 before;
  const int e = local(ids, i);
  here[threadIdx.x] = e >= 0;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  u32 row = 0;
  for (u32 b = threadIdx.x; b < blockIdx.x; b += {CHUNK}) row += totals[b];
  if (row > 0) atomicAdd(&before, row);
  __syncthreads();
  row = before;
  for (u32 j = 0; j < threadIdx.x; j++) row += here[j];
  return row < {rows}u ? e : -1;
}}
KERNEL({CHUNK}) choices({args}) {{
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  const u32 all = __syncthreads_count(local({ids}, i) >= 0);
  if (threadIdx.x == 0) totals[blockIdx.x] = all;
}}
"
        )
}

/// Generates `ids -> offsets, position`: the counts of each block's experts, their prefix sums over
/// blocks and experts, and the rank of each choice within its block. With a limit, the choices of
/// each block are counted before.
pub(in crate::kernels) fn sort(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::SortExperts,
) -> Result<Module, CodegenError> {
    let experts = of.experts as usize;
    let ([ids], [offsets, position]) = slots::<1, 2>(op)?;
    integers(req, "positions", &[ids, offsets, position])?;
    let n = numel(ids);
    if experts > EXPERTS || numel(offsets) != experts + 1 || numel(position) != n {
        return Err(CodegenError::new(format!(
            "{experts} experts; at most {EXPERTS}"
        )));
    }
    let chunks = blocks(n, CHUNK)?;
    let (mut params, mut declared) = req.operands();
    let counted = u64::from(chunks) * experts as u64 * 4;
    params.extend([Param::Scratch(0), Param::Scratch(counted)]);
    declared.extend(["u32* counts", "u32* totals"].map(str::to_owned));
    let mut noted = String::new();
    if let Some(RowLimit {
        rows, drop: false, ..
    }) = of.limit
    {
        notes(&mut params, &mut declared);
        noted = format!(
            "  if (e == 0) {{
    u64 wanted = 0;
    for (u32 b = 0; b < {chunks}u; b++) wanted += totals[b];
    if (wanted > {rows}u) note((i64)wanted, fault, launch);
  }}
"
        );
    }
    let args = declared.join(", ");
    let (ids, to) = (contiguous(req, ids)?, contiguous(req, position)?);
    let source = format!(
        "#define E {experts}u
{own}KERNEL({CHUNK}) k0({args}) {{
  __shared__ u32 here[E];
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  for (u32 e = threadIdx.x; e < E; e += {CHUNK}) here[e] = 0;
  __syncthreads();
  const int e = own({ids}, totals, i);
  if (e >= 0) atomicAdd(here + e, 1u);
  __syncthreads();
  for (u32 e = threadIdx.x; e < E; e += {CHUNK}) counts[blockIdx.x * E + e] = here[e];
}}
KERNEL(1024) k1({args}) {{
  __shared__ u32 start[E + 1];
  const u32 e = threadIdx.x;
  u32 count = 0;
{noted}  if (e < E)
    for (u32 b = 0; b < {chunks}u; b++) count += counts[b * E + e];
  if (e < E) start[e + 1] = count;
  if (e == 0) start[0] = 0;
  __syncthreads();
  if (e == 0)
    for (u32 i = 0; i < E; i++) start[i + 1] += start[i];
  __syncthreads();
  for (u32 i = e; i <= E; i += 1024) {offsets}[i] = start[i];
  if (e >= E) return;
  u32 next = start[e];
  for (u32 b = 0; b < {chunks}u; b++) {{
    const u32 here = counts[b * E + e];
    counts[b * E + e] = next;
    next += here;
  }}
}}
KERNEL({CHUNK}) k2({args}) {{
  __shared__ int all[{CHUNK}];
  const u32 i = blockIdx.x * {CHUNK}u + threadIdx.x;
  const int e = own({ids}, totals, i);
  all[threadIdx.x] = e;
  __syncthreads();
  if (i >= {n}u) return;
  u32 rank = 0;
  for (u32 j = 0; j < threadIdx.x; j++) rank += all[j] == e;
  {to}[i] = e < 0 ? -1ll : (i64)(counts[blockIdx.x * E + e] + rank);
}}
",
        own = own_expert(n, of.limit, (&args, &ids)),
        offsets = contiguous(req, offsets)?,
    );
    let over_blocks = |name| entry(name, [chunks, 1, 1], CHUNK as u32, &params);
    let first = of.limit.map(|_| over_blocks("choices"));
    let all = [
        over_blocks("k0"),
        entry("k1", [1, 1, 1], 1024, &params),
        over_blocks("k2"),
    ];
    Ok(Module {
        source,
        entries: first.into_iter().chain(all).collect(),
        scratch: counted + u64::from(chunks) * 4,
    })
}

/// Sizes of a permutation.
struct Sizes {
    tokens: usize,
    rows: usize,
    k: usize,
    d: usize,
    lanes: usize,
}

impl Sizes {
    fn new(
        req: &Request<'_>,
        tokens: &Slot,
        rows: &Slot,
        position: &Slot,
    ) -> Result<Self, CodegenError> {
        integers(req, "positions", &[position])?;
        let ((t, d), (r, width)) = (strides::matrix(tokens), strides::matrix(rows));
        let k = numel(position) / t.max(1);
        if d != width || k * t != numel(position) {
            return Err(CodegenError::new("as many positions for each token"));
        }
        Ok(Self {
            tokens: t,
            rows: r,
            k,
            d,
            lanes: lanes(req, d, &[tokens, rows])?,
        })
    }

    /// Generates a kernel in which a thread has a vector of a token.
    fn module(&self, req: &Request<'_>, body: &str) -> Result<Module, CodegenError> {
        let (params, declared) = req.operands();
        let per = self.d / self.lanes;
        let source = format!(
            "KERNEL(256) k0({}) {{
  const u64 t = blockIdx.x * 256ull + threadIdx.x;
  const u64 token = t / {per}u;
  const u32 c = (u32)(t % {per}u) * {}u;
  if (token >= {}u) return;
  float x[{}];
{body}}}
",
            declared.join(", "),
            self.lanes,
            self.tokens,
            self.lanes,
        );
        let grid = [blocks(self.tokens * per, 256)?, 1, 1];
        Ok(Module {
            source,
            entries: vec![entry("k0", grid, 256, &params)],
            scratch: 0,
        })
    }
}

/// Generates `x, position -> rows`.
pub(in crate::kernels) fn permute(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let ([x, position], [out]) = slots::<2, 1>(op)?;
    let sizes = Sizes::new(req, x, out, position)?;
    let Sizes {
        rows, k, d, lanes, ..
    } = sizes;
    let body = format!(
        "  load<{xt}, {lanes}>({x} + token * {d}u + c, x);
  for (u32 j = 0; j < {k}u; j++) {{
    const i64 to = {position}[token * {k}u + j];
    if (to >= 0 && to < {rows}ll) store<{ot}, {lanes}>({out} + (u64)to * {d}u + c, x);
  }}
",
        xt = req.memory(x)?,
        ot = req.memory(out)?,
        x = contiguous(req, x)?,
        position = contiguous(req, position)?,
        out = contiguous(req, out)?,
    );
    sizes.module(req, &body)
}

/// Generates `rows, position -> y`.
pub(in crate::kernels) fn unpermute(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let ([x, position], [out]) = slots::<2, 1>(op)?;
    let sizes = Sizes::new(req, out, x, position)?;
    let Sizes {
        rows, k, d, lanes, ..
    } = sizes;
    let body = format!(
        "  float sum[{lanes}] = {{}};
  for (u32 j = 0; j < {k}u; j++) {{
    const i64 from = {position}[token * {k}u + j];
    if (from < 0 || from >= {rows}ll) continue;
    load<{xt}, {lanes}>({x} + (u64)from * {d}u + c, x);
#pragma unroll
    for (u32 v = 0; v < {lanes}; v++) sum[v] += x[v];
  }}
  store<{ot}, {lanes}>({out} + token * {d}u + c, sum);
",
        xt = req.memory(x)?,
        ot = req.memory(out)?,
        x = contiguous(req, x)?,
        position = contiguous(req, position)?,
        out = contiguous(req, out)?,
    );
    sizes.module(req, &body)
}
