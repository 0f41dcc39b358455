//! Attention without a library: any head size, float32 arithmetic, no tensor cores. It is used for
//! float32, which cuDNN's attention does not support, and on machines without cuDNN.

use super::{CodegenError, Entry, Module, Param, Request, blocks, ctype, float};
use crate::kernels::attention::Kind;
use crate::kernels::cuda::target::Target;
use crate::kernels::strides;
use shardlab_plan::ir::{AttentionShape, BodyOp, Slot, alibi_slope};

const COMMON: &str = include_str!("attention.cuh");
/// The maximum of a row's scores and the sum of exponentials, before the first tile.
const EMPTY: [&str; 2] = ["-INF", "0.0f"];
/// Threads of a block.
const THREADS: u32 = 256;

/// Tiling of one attention.
struct Geometry {
    shape: AttentionShape,
    /// Distance of the log-sum-exp's rows.
    stat: u64,
    /// Number of rows and columns of the scores that a block works on at a time.
    tile: u64,
    kind: Kind,
    /// C expression of the first positions of the documents of sample `b`, if these are data.
    starts: Option<String>,
}

fn slots(slots: &[Slot], n: usize) -> Result<&[Slot], CodegenError> {
    slots
        .get(..n)
        .ok_or_else(|| CodegenError::new("attention lacks operands"))
}

impl Geometry {
    fn new(
        req: &Request<'_>,
        [q, k, lse]: [&Slot; 3],
        kind: Kind,
        starts: Option<&Slot>,
    ) -> Result<Self, CodegenError> {
        let misfit = || CodegenError::new(format!("queries {:?} with keys {:?}", q.shape, k.shape));
        let shape = AttentionShape::of(&q.shape, &k.shape, kind.causal).ok_or_else(misfit)?;
        let &[batch, heads, stat] = &lse.shape[..] else {
            return Err(misfit());
        };
        if (batch, heads) != (shape.batch, shape.heads) || stat < shape.seq || shape.head_dim > 256
        {
            return Err(misfit());
        }
        let starts = starts
            .map(|slot| starts_of(req, slot, &shape))
            .transpose()?;
        Ok(Self {
            shape,
            stat,
            tile: tile(req.target, shape.head_dim),
            kind,
            starts,
        })
    }

    fn defines(&self) -> String {
        let Kind {
            scale, score_mod, ..
        } = self.kind;
        let heads = self.shape.heads;
        let slopes: Vec<String> = (0..heads)
            .map(|h| float(alibi_slope(h, heads) as f32))
            .collect();
        let alibi = match score_mod.alibi {
            true => format!(
                "#define ALIBI 1\n__constant__ float SLOPES[] = {{{}}};\n",
                slopes.join(", ")
            ),
            false => "#define ALIBI 0\n".to_owned(),
        };
        let lengths: Vec<String> = score_mod
            .documents
            .lengths()
            .map(|n| format!("{n}u"))
            .collect();
        let period: u64 = score_mod.documents.lengths().sum();
        let documents = match lengths.len() {
            0 => "#define DOCUMENTS 0\n".to_owned(),
            n => format!(
                "#define DOCUMENTS {n}\n#define PERIOD {period}u\n__constant__ u32 LENGTHS[] = {{{}}};\n",
                lengths.join(", ")
            ),
        };
        format!(
            "{alibi}{documents}#define DOCUMENTS_OF_DATA {}\n#define WINDOW {}u\n#define CAPPED {}\n#define CAP {}\n#define BATCH {}u\n#define HEADS {}u\n#define KV {}u\n#define SEQ {}u\n#define D {}u\n#define STAT {}u\n#define CAUSAL {}\n#define SCALE {}\n#define TILE {}u\n{COMMON}",
            u8::from(self.starts.is_some()),
            score_mod.window,
            u8::from(score_mod.softcap.0 != 0.0),
            float(score_mod.softcap.0 as f32),
            self.shape.batch,
            self.shape.heads,
            self.shape.kv_heads,
            self.shape.seq,
            self.shape.head_dim,
            self.stat,
            u8::from(self.shape.causal),
            float(scale),
            self.tile
        )
    }

    /// Declares the first positions of the documents of sample `b` in a kernel.
    fn declare_starts(&self) -> String {
        let starts = self.starts.as_deref().unwrap_or("{}");
        format!("const Starts starts = {starts};")
    }

    /// Returns how many blocks cover all tiles of rows of `heads` heads.
    fn blocks(&self, heads: u64) -> Result<u32, CodegenError> {
        blocks(
            (self.shape.batch * heads * self.shape.seq.div_ceil(self.tile)) as usize,
            1,
        )
    }

    fn entry(
        &self,
        name: &str,
        heads: u64,
        rows: u64,
        params: Vec<Param>,
    ) -> Result<Entry, CodegenError> {
        Ok(Entry {
            name: name.to_owned(),
            grid: [self.blocks(heads)?, 1, 1],
            block: THREADS,
            shared: shared(self.tile, self.shape.head_dim, rows) as u32,
            params,
        })
    }
}

/// Returns the bytes of shared memory of `rows` tiles of rows of `d` numbers, and a tile of scores
/// (`PITCH` and `SPITCH` of the source).
fn shared(tile: u64, d: u64, rows: u64) -> u64 {
    let vectors = d.div_ceil(4);
    let pitch = 4 * (vectors + 1 + vectors % 2);
    tile * (rows * pitch + tile + 4) * 4
}

/// Number of tiles of rows that the backward keeps, which is the maximum.
const MAX_ROWS: u64 = 4;

/// Returns the largest tile that fits: fewer rows for long heads, and on smaller GPUs.
fn tile(target: Target, d: u64) -> u64 {
    let fits = |tile: &u64| shared(*tile, d, MAX_ROWS) <= u64::from(target.shared());
    // A thread keeps sums of its rows for the whole head: of long heads, at most half as many rows.
    let largest = if d <= 128 { 64 } else { 32 };
    [largest, 32].into_iter().find(fits).unwrap_or(16)
}

/// Generates the function `name(b, h, s)` that gives the address of a row, and `NAME_STEP`, the
/// distance of its components.
fn rows(
    req: &Request<'_>,
    slot: &Slot,
    name: &str,
    constant: bool,
) -> Result<String, CodegenError> {
    let st = strides::of(slot);
    let [b, h, s, d] = st[..] else {
        return Err(CodegenError::new("attention works on four dimensions"));
    };
    let ty = ctype(req.arg(slot.place)?.dtype);
    let c = if constant { "const " } else { "" };
    Ok(format!(
        "#define {name}_STEP {d}u\ntypedef {ty} {name}_t;\nDEV {c}{ty}* {name}_at({c}{ty}* p, u32 b, u32 h, u32 s) {{ return p + {}ull + (u64)b * {b}ull + (u64)h * {h}ull + (u64)s * {s}ull; }}\n",
        slot.offset
    ))
}

/// Returns the C expression of the first positions of the documents of sample `b`.
fn starts_of(
    req: &Request<'_>,
    slot: &Slot,
    shape: &AttentionShape,
) -> Result<String, CodegenError> {
    let contiguous = super::index::is_contiguous(&super::index::dims(slot));
    if !contiguous || slot.shape[..] != [shape.batch, shape.seq] {
        return Err(CodegenError::new("every position has a document"));
    }
    Ok(format!("{} + (u64)b * SEQ", req.address(slot)?))
}

fn name(slot: &Slot) -> String {
    super::pointer(slot.place)
}

fn lse_type(req: &Request<'_>, lse: &Slot) -> Result<(), CodegenError> {
    if req.memory(lse)? == "float" && super::index::is_contiguous(&super::index::dims(lse)) {
        return Ok(());
    }
    Err(CodegenError::new("the log-sum-exp is contiguous float32"))
}

/// Generates `q, k, v -> out, lse[, seed, offset]`.
pub(in crate::kernels) fn forward(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
) -> Result<Module, CodegenError> {
    generate_forward(req, op, kind, EMPTY, None)
}

/// Generates `q, k, v, starts -> out, lse[, seed, offset]`.
pub(in crate::kernels) fn forward_within_documents(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
) -> Result<Module, CodegenError> {
    let [.., starts] = slots(&op.inputs, 4)? else {
        return Err(CodegenError::new("attention lacks its documents"));
    };
    generate_forward(req, op, kind, EMPTY, Some(starts))
}

/// Generates `q, k, v, sinks -> out, lse`.
pub(in crate::kernels) fn forward_with_sinks(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
) -> Result<Module, CodegenError> {
    let [.., sinks] = slots(&op.inputs, 4)? else {
        return Err(CodegenError::new("attention lacks its sinks"));
    };
    // A row starts as if it had seen a score, the sink.
    let sink = sink(req, sinks)?;
    generate_forward(req, op, kind, [&sink, "1.0f"], None)
}

/// Returns the C expression of the sink of head `h`.
fn sink(req: &Request<'_>, sinks: &Slot) -> Result<String, CodegenError> {
    let [step] = strides::of(sinks)[..] else {
        return Err(CodegenError::new("there is one sink for each head"));
    };
    Ok(format!("up({}[h * {step}u])", req.address(sinks)?))
}

fn generate_forward(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
    [score, sum]: [&str; 2],
    starts: Option<&Slot>,
) -> Result<Module, CodegenError> {
    let [q, k, v] = slots(&op.inputs, 3)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    let [out, lse] = slots(&op.outputs, 2)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    let g = Geometry::new(req, [q, k, lse], kind, starts)?;
    lse_type(req, lse)?;
    let mut zero = String::new();
    for s in op.outputs.iter().skip(2) {
        zero += &format!("down(0.0f, {}[0]); ", req.address(s)?);
    }
    let (params, declared) = req.operands();
    let source = format!(
        "{defs}{rq}{rk}{rv}{ro}KERNEL({THREADS}) k0({args}) {{
  extern __shared__ float4 memory[];
  float *query = (float*)memory, *other = query + ROWS, *part = other + ROWS;
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  if (blockIdx.x == 0 && threadIdx.x == 0) {{ {zero} }}
  // Those with the most keys first.
  const u32 tile = TILES - 1 - blockIdx.x % TILES, h = blockIdx.x / TILES % HEADS, b = blockIdx.x / TILES / HEADS, g = h / GROUP;
  const u32 first = tile * TILE;
  {starts}
  fill(query, first, q_STEP, [&](u32 i) {{ return q_at({q}, b, h, i); }});
  float m[N], l[N];
  Sums acc = {{}};
#pragma unroll
  for (int r = 0; r < N; r++) m[r] = {score}, l[r] = {sum};
  for (u32 k = first_tile(starts, tile); k <= last_tile(starts, tile); k++) {{
    __syncthreads();
    fill(other, k * TILE, k_STEP, [&](u32 j) {{ return k_at({k}, b, g, j); }});
    __syncthreads();
    Scores s;
    scores(s, query, other);
#pragma unroll
    for (int r = 0; r < N; r++) {{
      float n = -INF, sum = 0.0f;
#pragma unroll
      for (int c = 0; c < N; c++) {{
        const u32 i = first + ty + 16 * r, j = k * TILE + tx + 16 * c;
        s[r][c] = sees(starts, i, j) ? score(s[r][c], h, i, j) : -INF;
        n = max_(n, s[r][c]);
      }}
      n = max_(m[r], row16<Max>(n));
      const float f = m[r] == -INF ? 0.0f : expf(m[r] - n);
#pragma unroll
      for (int c = 0; c < N; c++) {{
        s[r][c] = s[r][c] == -INF ? 0.0f : expf(s[r][c] - n);
        sum += s[r][c];
      }}
      l[r] = l[r] * f + row16<Sum>(sum);
      m[r] = n;
#pragma unroll
      for (int w = 0; w < W; w++)
#pragma unroll
        for (int v = 0; v < 4; v++) acc[r][w][v] *= f;
    }}
    leave(part, s);
    __syncthreads();
    fill(other, k * TILE, v_STEP, [&](u32 j) {{ return v_at({v}, b, g, j); }});
    __syncthreads();
    add(acc, part, other);
  }}
  float* z = {lse} + ((u64)b * HEADS + h) * STAT;
#pragma unroll
  for (int r = 0; r < N; r++) {{
    const u32 i = first + ty + 16 * r;
    if (i >= SEQ) break;
    put(acc[r], 1.0f / l[r], o_at({o}, b, h, i), o_STEP);
    if (tx == 0) z[i] = m[r] + logf(l[r]);
  }}
  if (tile == TILES - 1) for (u32 x = SEQ + threadIdx.x; x < STAT; x += {THREADS}) z[x] = 0.0f;
}}
",
        defs = g.defines(),
        starts = g.declare_starts(),
        rq = rows(req, q, "q", true)?,
        rk = rows(req, k, "k", true)?,
        rv = rows(req, v, "v", true)?,
        ro = rows(req, out, "o", false)?,
        args = declared.join(", "),
        q = name(q),
        k = name(k),
        v = name(v),
        o = name(out),
        lse = req.address(lse)?,
    );
    Ok(Module {
        source,
        entries: vec![g.entry("k0", g.shape.heads, 2, params)?],
        scratch: 0,
    })
}

/// Generates `d_out, q, k, v, out, lse, .. -> d_q, d_k, d_v`.
pub(in crate::kernels) fn backward(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
) -> Result<Module, CodegenError> {
    let [dy, q, k, v, y, lse] = slots(&op.inputs, 6)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    generate_backward(req, op, kind, [dy, q, k, v, y, lse], None)
}

/// Generates `d_out, q, k, v, starts, out, lse, .. -> d_q, d_k, d_v`.
pub(in crate::kernels) fn backward_within_documents(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
) -> Result<Module, CodegenError> {
    let [dy, q, k, v, starts, y, lse] = slots(&op.inputs, 7)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    generate_backward(req, op, kind, [dy, q, k, v, y, lse], Some(starts))
}

/// Generates `d_out, q, k, v, sinks, out, lse -> d_q, d_k, d_v, d_sinks`.
pub(in crate::kernels) fn backward_with_sinks(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
) -> Result<Module, CodegenError> {
    let [dy, q, k, v, sinks, y, lse] = slots(&op.inputs, 7)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    let [.., to] = slots(&op.outputs, 4)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    let mut module = generate_backward(req, op, kind, [dy, q, k, v, y, lse], None)?;
    let heads = module.entries.len();
    let params = module.entries[0].params.clone();
    let (_, mut declared) = req.operands();
    declared.push("float* delta".to_owned());
    let [step] = strides::of(to)[..] else {
        return Err(CodegenError::new("there is one sink for each head"));
    };
    module.source += &format!(
        "// Sinks: a block per head adds up its rows, thread by thread, then the threads.
KERNEL({THREADS}) k{heads}({args}) {{
  __shared__ float part[{THREADS}];
  const u32 h = blockIdx.x, t = threadIdx.x;
  const float sink = {sink};
  float sum = 0.0f;
  for (u32 x = t; x < BATCH * SEQ; x += {THREADS}) {{
    const u64 head = (u64)(x / SEQ) * HEADS + h;
    const u32 i = x % SEQ;
    sum -= expf(sink - {lse}[head * STAT + i]) * delta[head * SEQ + i];
  }}
  part[t] = sum;
  for (u32 n = {THREADS} / 2; n > 0; n /= 2) {{
    __syncthreads();
    if (t < n) part[t] += part[t + n];
  }}
  if (t == 0) down(part[0], {to}[h * {step}u]);
}}
",
        args = declared.join(", "),
        sink = sink(req, sinks)?,
        lse = req.address(lse)?,
        to = req.address(to)?,
    );
    module.entries.push(Entry {
        name: format!("k{heads}"),
        grid: [q.shape[1] as u32, 1, 1],
        block: THREADS,
        shared: 0,
        params,
    });
    Ok(module)
}

fn generate_backward(
    req: &Request<'_>,
    op: &BodyOp,
    kind: Kind,
    [dy, q, k, v, y, lse]: [&Slot; 6],
    starts: Option<&Slot>,
) -> Result<Module, CodegenError> {
    let [dq, dk, dv] = slots(&op.outputs, 3)? else {
        return Err(CodegenError::new("attention lacks operands"));
    };
    let g = Geometry::new(req, [q, k, lse], kind, starts)?;
    lse_type(req, lse)?;
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("float* delta".to_owned());
    let mut helpers = g.defines();
    for (slot, name, constant) in [
        (dy, "g", true),
        (q, "q", true),
        (k, "k", true),
        (v, "v", true),
        (y, "y", true),
        (dq, "dq", false),
        (dk, "dk", false),
        (dv, "dv", false),
    ] {
        helpers += &rows(req, slot, name, constant)?;
    }
    let source = format!(
        "{helpers}// Queries: delta, then the gradient.
KERNEL({THREADS}) k0({args}) {{
  extern __shared__ float4 memory[];
  float *query = (float*)memory, *out = query + ROWS, *key = out + ROWS, *value = key + ROWS, *part = value + ROWS;
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const u32 tile = TILES - 1 - blockIdx.x % TILES, h = blockIdx.x / TILES % HEADS, b = blockIdx.x / TILES / HEADS, g = h / GROUP;
  const u32 first = tile * TILE;
  {starts}
  fill(query, first, q_STEP, [&](u32 i) {{ return q_at({q}, b, h, i); }});
  fill(out, first, g_STEP, [&](u32 i) {{ return g_at({dy}, b, h, i); }});
  __syncthreads();
  float z[N], e[N];
#pragma unroll
  for (int r = 0; r < N; r++) {{
    const u32 row = ty + 16 * r, i = first + row;
    z[r] = i < SEQ ? {lse}[((u64)b * HEADS + h) * STAT + i] : 0.0f;
    e[r] = 0.0f;
    if (i < SEQ)
      for (u32 d = tx; d < D; d += 16) e[r] = fmaf(out[row * PITCH + d], up(y_at({y}, b, h, i)[(u64)d * y_STEP]), e[r]);
    e[r] = row16<Sum>(e[r]);
    if (i < SEQ && tx == 0) delta[((u64)b * HEADS + h) * SEQ + i] = e[r];
  }}
  Sums acc = {{}};
  for (u32 k = first_tile(starts, tile); k <= last_tile(starts, tile); k++) {{
    __syncthreads();
    fill(key, k * TILE, k_STEP, [&](u32 j) {{ return k_at({k}, b, g, j); }});
    fill(value, k * TILE, v_STEP, [&](u32 j) {{ return v_at({v}, b, g, j); }});
    __syncthreads();
    Scores s, d;
    scores(s, query, key);
    scores(d, out, value);
#pragma unroll
    for (int r = 0; r < N; r++)
#pragma unroll
      for (int c = 0; c < N; c++) {{
        const u32 i = first + ty + 16 * r, j = k * TILE + tx + 16 * c;
        s[r][c] = sees(starts, i, j) ? expf(score(s[r][c], h, i, j) - z[r]) * (d[r][c] - e[r]) * slope(s[r][c]) : 0.0f;
      }}
    leave(part, s);
    __syncthreads();
    add(acc, part, key);
  }}
#pragma unroll
  for (int r = 0; r < N; r++) {{
    const u32 i = first + ty + 16 * r;
    if (i < SEQ) put(acc[r], 1.0f, dq_at({dq}, b, h, i), dq_STEP);
  }}
}}
// Keys and values, over all queries of all heads that see them; keys are the rows of scores here.
KERNEL({THREADS}) k1({args}) {{
  extern __shared__ float4 memory[];
  float *query = (float*)memory, *out = query + ROWS, *key = out + ROWS, *value = key + ROWS, *part = value + ROWS;
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const u32 tile = blockIdx.x % TILES, g = blockIdx.x / TILES % KV, b = blockIdx.x / TILES / KV;
  const u32 first = tile * TILE;
  {starts}
  fill(key, first, k_STEP, [&](u32 j) {{ return k_at({k}, b, g, j); }});
  fill(value, first, v_STEP, [&](u32 j) {{ return v_at({v}, b, g, j); }});
  Sums ak = {{}}, av = {{}};
  for (u32 h = g * GROUP; h < (g + 1) * GROUP; h++)
    for (u32 q = CAUSAL ? tile : first_tile(starts, tile); q <= last_query(starts, tile); q++) {{
      __syncthreads();
      fill(query, q * TILE, q_STEP, [&](u32 i) {{ return q_at({q}, b, h, i); }});
      fill(out, q * TILE, g_STEP, [&](u32 i) {{ return g_at({dy}, b, h, i); }});
      __syncthreads();
      Scores s, d;
      scores(s, key, query);
      scores(d, value, out);
#pragma unroll
      for (int c = 0; c < N; c++) {{
        const u32 i = q * TILE + tx + 16 * c;
        const u64 head = (u64)b * HEADS + h;
        const float z = i < SEQ ? {lse}[head * STAT + i] : 0.0f, e = i < SEQ ? delta[head * SEQ + i] : 0.0f;
#pragma unroll
        for (int r = 0; r < N; r++) {{
          const u32 j = first + ty + 16 * r;
          const float by = slope(s[r][c]);
          s[r][c] = sees(starts, i, j) ? expf(score(s[r][c], h, i, j) - z) : 0.0f;
          d[r][c] = s[r][c] * (d[r][c] - e) * by;
        }}
      }}
      leave(part, s);
      __syncthreads();
      add(av, part, out);
      __syncthreads();
      leave(part, d);
      __syncthreads();
      add(ak, part, query);
    }}
#pragma unroll
  for (int r = 0; r < N; r++) {{
    const u32 j = first + ty + 16 * r;
    if (j >= SEQ) break;
    put(ak[r], 1.0f, dk_at({dk}, b, g, j), dk_STEP);
    put(av[r], 1.0f, dv_at({dv}, b, g, j), dv_STEP);
  }}
}}
",
        starts = g.declare_starts(),
        args = declared.join(", "),
        q = name(q),
        k = name(k),
        v = name(v),
        y = name(y),
        dy = name(dy),
        lse = req.address(lse)?,
        dq = name(dq),
        dk = name(dk),
        dv = name(dv),
    );
    Ok(Module {
        source,
        entries: vec![
            g.entry("k0", g.shape.heads, MAX_ROWS, params.clone())?,
            g.entry("k1", g.shape.kv_heads, MAX_ROWS, params)?,
        ],
        scratch: g.shape.rows() * 4,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_as_large_as_the_gpu_has_room_for() {
        // 64 rows of 128 numbers, 132 apart, four times, and 64 x 68 scores.
        assert_eq!(shared(64, 128, 4), 64 * (4 * 132 + 68) * 4);
        let tiles = |capability| {
            let target = Target::of(capability).unwrap();
            [64, 128, 192, 256].map(|d| tile(target, d))
        };
        assert_eq!(tiles((9, 0)), [64, 64, 32, 32]);
        assert_eq!(tiles((8, 0)), [64, 64, 32, 32]);
        assert_eq!(tiles((8, 9)), [64, 32, 16, 16]);
    }
}
