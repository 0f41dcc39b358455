//! Attention without a library: any head size, float32 arithmetic, no tensor cores. For small models, float32, and machines
//! without cuDNN.

use super::{Entry, Module, Param, Refusal, Request, blocks, ctype, float};
use crate::kernels::view;
use shardlab_plan::program::{BodyOp, Slot};

const COMMON: &str = include_str!("attention.cuh");

/// Shapes of one attention.
struct Geometry {
    batch: u64,
    heads: u64,
    kv: u64,
    seq: u64,
    d: u64,
    stat: u64,
}

fn slots(slots: &[Slot], n: usize) -> Result<&[Slot], Refusal> {
    slots
        .get(..n)
        .ok_or_else(|| Refusal::new("attention lacks operands"))
}

impl Geometry {
    fn new(q: &Slot, k: &Slot, lse: &Slot) -> Result<Self, Refusal> {
        let misfit = || Refusal::new(format!("queries {:?} with keys {:?}", q.shape, k.shape));
        let (&[batch, heads, seq, d], &[b2, kv, s2, d2], &[b3, h3, stat]) =
            (&q.shape[..], &k.shape[..], &lse.shape[..])
        else {
            return Err(misfit());
        };
        if (batch, seq, d) != (b2, s2, d2)
            || (b3, h3) != (batch, heads)
            || stat < seq
            || kv == 0
            || heads % kv != 0
            || d > 256
        {
            return Err(misfit());
        }
        Ok(Self {
            batch,
            heads,
            kv,
            seq,
            d,
            stat,
        })
    }

    fn defines(&self, causal: bool, scale: f64) -> String {
        format!(
            "#define BATCH {}u\n#define HEADS {}u\n#define KV {}u\n#define SEQ {}\n#define D {}\n#define STAT {}u\n#define CAUSAL {}\n#define SCALE {}\n{COMMON}",
            self.batch,
            self.heads,
            self.kv,
            self.seq,
            self.d,
            self.stat,
            u8::from(causal),
            float(scale as f32)
        )
    }
}

/// Function `name(b, h, s)` that gives the address of a row, and `NAME_STEP`, the distance of its components.
fn rows(req: &Request<'_>, slot: &Slot, name: &str, constant: bool) -> Result<String, Refusal> {
    let st = view::strides(slot);
    let [b, h, s, d] = st[..] else {
        return Err(Refusal::new("attention works on four dimensions"));
    };
    let ty = ctype(req.arg(slot.place)?.dtype);
    let c = if constant { "const " } else { "" };
    Ok(format!(
        "#define {name}_STEP {d}u\ntypedef {ty} {name}_t;\nDEV {c}{ty}* {name}_at({c}{ty}* p, u32 b, u32 h, u32 s) {{ return p + {}ull + (u64)b * {b}ull + (u64)h * {h}ull + (u64)s * {s}ull; }}\n",
        slot.offset
    ))
}

fn name(slot: &Slot) -> String {
    super::pointer(slot.place)
}

fn lse_type(req: &Request<'_>, lse: &Slot) -> Result<(), Refusal> {
    if req.memory(lse)? == "float" && super::index::is_contiguous(&super::index::dims(lse)) {
        return Ok(());
    }
    Err(Refusal::new("the log-sum-exp is contiguous float32"))
}

/// `q, k, v -> out, lse[, seed, offset]`.
pub(super) fn forward(
    req: &Request<'_>,
    op: &BodyOp,
    causal: bool,
    scale: f64,
) -> Result<Module, Refusal> {
    let [q, k, v] = slots(&op.inputs, 3)? else {
        return Err(Refusal::new("attention lacks operands"));
    };
    let [out, lse] = slots(&op.outputs, 2)? else {
        return Err(Refusal::new("attention lacks operands"));
    };
    let g = Geometry::new(q, k, lse)?;
    lse_type(req, lse)?;
    let mut zero = String::new();
    for s in op.outputs.iter().skip(2) {
        zero += &format!("down(0.0f, {}[0]); ", req.address(s)?);
    }
    let (params, declared) = req.operands();
    let source = format!(
        "{defs}{rq}{rk}{rv}{ro}KERNEL(128) k0({args}) {{
  __shared__ float rows[4][D];
  const u32 w = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u64 t = blockIdx.x * 4ull + w;
  if (t == 0 && lane == 0) {{ {zero} }}
  if (t >= (u64)BATCH * HEADS * SEQ) return;
  const u32 i = t % SEQ, h = t / SEQ % HEADS, b = t / ((u64)SEQ * HEADS), g = h / GROUP;
  float* row = rows[w];
  for (u32 d = lane; d < D; d += 32) row[d] = up(q_at({q}, b, h, i)[(u64)d * q_STEP]);
  __syncwarp();
  float m = -INF, l = 0.0f, acc[R] = {{}};
  const int seen = CAUSAL ? i + 1 : SEQ;
  for (int from = 0; from < seen; from += 32) {{
    const int j = from + lane;
    const float s = j < seen ? SCALE * dot<k_t>(row, k_at({k}, b, g, j), k_STEP) : -INF;
    const float n = max_(m, warp_max(s));
    const float p = j < seen ? expf(s - n) : 0.0f;
    const float f = m == -INF ? 0.0f : expf(m - n);
    l = l * f + warp_all<Sum>(p);
    for (int r = 0; r < R; r++) acc[r] *= f;
    add_rows<v_t>(acc, p, min(32, seen - from), v_STEP, [&](int x) {{ return v_at({v}, b, g, from + x); }});
    m = n;
  }}
  o_t* y = o_at({o}, b, h, i);
  for (int r = 0; r < R; r++)
    if (r * 32 + lane < D) down(acc[r] / l, y[(u64)(r * 32 + lane) * o_STEP]);
  float* z = {lse} + ((u64)b * HEADS + h) * STAT;
  if (lane == 0) z[i] = m + logf(l);
  if (i == SEQ - 1) for (u32 x = SEQ + lane; x < STAT; x += 32) z[x] = 0.0f;
}}
",
        defs = g.defines(causal, scale),
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
    let warps = (g.batch * g.heads * g.seq) as usize;
    Ok(Module {
        source,
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid: [blocks(warps, 4)?, 1, 1],
            block: 128,
            shared: 0,
            params,
        }],
        scratch: 0,
    })
}

/// `d_out, q, k, v, out, lse, .. -> d_q, d_k, d_v`.
pub(super) fn backward(
    req: &Request<'_>,
    op: &BodyOp,
    causal: bool,
    scale: f64,
) -> Result<Module, Refusal> {
    let [dy, q, k, v, y, lse] = slots(&op.inputs, 6)? else {
        return Err(Refusal::new("attention lacks operands"));
    };
    let [dq, dk, dv] = slots(&op.outputs, 3)? else {
        return Err(Refusal::new("attention lacks operands"));
    };
    let g = Geometry::new(q, k, lse)?;
    lse_type(req, lse)?;
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("float* delta".to_owned());
    let mut helpers = g.defines(causal, scale);
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
KERNEL(128) k0({args}) {{
  __shared__ float rows[2][4][D];
  const u32 w = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u64 t = blockIdx.x * 4ull + w;
  if (t >= (u64)BATCH * HEADS * SEQ) return;
  const u32 i = t % SEQ, h = t / SEQ % HEADS, b = t / ((u64)SEQ * HEADS), g = h / GROUP;
  float *row = rows[0][w], *out = rows[1][w];
  float e = 0.0f;
  for (u32 d = lane; d < D; d += 32) {{
    row[d] = up(q_at({q}, b, h, i)[(u64)d * q_STEP]);
    out[d] = up(g_at({dy}, b, h, i)[(u64)d * g_STEP]);
    e = fmaf(out[d], up(y_at({y}, b, h, i)[(u64)d * y_STEP]), e);
  }}
  __syncwarp();
  e = warp_all<Sum>(e);
  if (lane == 0) delta[t] = e;
  const float z = {lse}[((u64)b * HEADS + h) * STAT + i];
  float acc[R] = {{}};
  const int seen = CAUSAL ? i + 1 : SEQ;
  for (int from = 0; from < seen; from += 32) {{
    const int j = from + lane;
    float s = 0.0f;
    if (j < seen) {{
      const float p = expf(SCALE * dot<k_t>(row, k_at({k}, b, g, j), k_STEP) - z);
      s = p * (dot<v_t>(out, v_at({v}, b, g, j), v_STEP) - e) * SCALE;
    }}
    add_rows<k_t>(acc, s, min(32, seen - from), k_STEP, [&](int x) {{ return k_at({k}, b, g, from + x); }});
  }}
  dq_t* to = dq_at({dq}, b, h, i);
  for (int r = 0; r < R; r++)
    if (r * 32 + lane < D) down(acc[r], to[(u64)(r * 32 + lane) * dq_STEP]);
}}
// Keys and values, over all queries of all heads that see them.
KERNEL(128) k1({args}) {{
  __shared__ float rows[2][4][D];
  const u32 w = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u64 t = blockIdx.x * 4ull + w;
  if (t >= (u64)BATCH * KV * SEQ) return;
  const u32 j = t % SEQ, g = t / SEQ % KV, b = t / ((u64)SEQ * KV);
  float *key = rows[0][w], *value = rows[1][w];
  for (u32 d = lane; d < D; d += 32) {{
    key[d] = up(k_at({k}, b, g, j)[(u64)d * k_STEP]);
    value[d] = up(v_at({v}, b, g, j)[(u64)d * v_STEP]);
  }}
  __syncwarp();
  float ak[R] = {{}}, av[R] = {{}};
  for (u32 h = g * GROUP; h < (g + 1) * GROUP; h++)
    for (int from = CAUSAL ? j : 0; from < SEQ; from += 32) {{
      const int i = from + lane;
      float p = 0.0f, s = 0.0f;
      if (i < SEQ) {{
        p = expf(SCALE * dot<q_t>(key, q_at({q}, b, h, i), q_STEP) - {lse}[((u64)b * HEADS + h) * STAT + i]);
        s = p * (dot<g_t>(value, g_at({dy}, b, h, i), g_STEP) - delta[((u64)b * HEADS + h) * SEQ + i]) * SCALE;
      }}
      const int n = min(32, SEQ - from);
      add_rows<g_t>(av, p, n, g_STEP, [&](int x) {{ return g_at({dy}, b, h, from + x); }});
      add_rows<q_t>(ak, s, n, q_STEP, [&](int x) {{ return q_at({q}, b, h, from + x); }});
    }}
  dk_t* tk = dk_at({dk}, b, g, j);
  dv_t* tv = dv_at({dv}, b, g, j);
  for (int r = 0; r < R; r++)
    if (r * 32 + lane < D) {{
      down(ak[r], tk[(u64)(r * 32 + lane) * dk_STEP]);
      down(av[r], tv[(u64)(r * 32 + lane) * dv_STEP]);
    }}
}}
",
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
    let entry = |name: &str, warps: u64| -> Result<Entry, Refusal> {
        Ok(Entry {
            name: name.to_owned(),
            grid: [blocks(warps as usize, 4)?, 1, 1],
            block: 128,
            shared: 0,
            params: params.clone(),
        })
    };
    Ok(Module {
        source,
        entries: vec![
            entry("k0", g.batch * g.heads * g.seq)?,
            entry("k1", g.batch * g.kv * g.seq)?,
        ],
        scratch: g.batch * g.heads * g.seq * 4,
    })
}
