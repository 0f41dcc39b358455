//! Direct convolutions, stride 1, padded to the same size: one thread per output element, one block
//! per weight.

use super::index::{self, Index};
use super::{CodegenError, Entry, Module, Param, Request, blocks, ctype, numel};
use shardlab_plan::ir::{BodyOp, Slot};

/// Sizes of a convolution.
struct Geometry {
    images: u64,
    cin: u64,
    cout: u64,
    h: u64,
    w: u64,
    k: u64,
}

impl Geometry {
    fn new(x: &Slot, y: &Slot, w: &Slot) -> Result<Self, CodegenError> {
        let misfit = || {
            CodegenError::new(format!(
                "convolution of {:?} by {:?} to {:?}",
                x.shape, w.shape, y.shape
            ))
        };
        let (&[n, cin, h, wd], &[n2, cout, h2, w2], &[co, ci, k, k2]) =
            (&x.shape[..], &y.shape[..], &w.shape[..])
        else {
            return Err(misfit());
        };
        if (n, h, wd) != (n2, h2, w2) || (co, ci) != (cout, cin) || k != k2 || k % 2 == 0 {
            return Err(misfit());
        }
        Ok(Self {
            images: n,
            cin,
            cout,
            h,
            w: wd,
            k,
        })
    }

    fn defines(&self, index: &str) -> String {
        format!(
            "typedef {index} IDX;\n#define CIN {}\n#define COUT {}\n#define H {}\n#define W {}\n#define K {}\n#define PAD {}\n",
            self.cin,
            self.cout,
            self.h,
            self.w,
            self.k,
            self.k / 2
        )
    }
}

/// Returns a function that reads a slot's element by its logical position.
fn reader(req: &Request<'_>, slot: &Slot, name: &str) -> Result<String, CodegenError> {
    let at = Index {
        own: None,
        ..Index::elem(1)
    };
    let at = index::offset(&at, &index::dims(slot), 1, None)?;
    let ty = ctype(req.arg(slot.place)?.dtype);
    Ok(format!(
        "DEV float {name}(const {ty}* p, IDX i) {{ return up(p[{}]); }}\n",
        at.code
    ))
}

fn target(req: &Request<'_>, slot: &Slot, value: &str) -> Result<String, CodegenError> {
    let at = Index {
        own: None,
        ..Index::elem(1)
    };
    let at = index::offset(&at, &index::dims(slot), 1, None)?;
    Ok(format!(
        "down({value}, {}[{}]);",
        req.address(slot)?,
        at.code
    ))
}

fn three(op: &BodyOp) -> Result<[&Slot; 3], CodegenError> {
    match (&op.inputs[..], &op.outputs[..]) {
        ([a, b, ..], [c, ..]) => Ok([a, b, c]),
        _ => Err(CodegenError::new("a convolution lacks operands")),
    }
}

fn module(req: &Request<'_>, source: String, grid: u32, block: u32) -> Module {
    let (params, _) = req.operands();
    Module {
        source,
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid: [grid, 1, 1],
            block,
            shared: 0,
            params,
        }],
        scratch: 0,
    }
}

/// Generates the conversion of a result that is dense in the scratch memory's first bytes, in the
/// type of the factors.
pub(super) fn widen(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let [from, _, y] = three(op)?;
    let n = numel(y);
    let (operands, declared) = req.operands();
    let source = format!(
        "typedef {} IDX;
KERNEL(256) k0(const {}* narrow, {}) {{
  const IDX i = (IDX)blockIdx.x * 256 + threadIdx.x;
  if (i >= {n}u) return;
  {}
}}
",
        req.index(),
        ctype(req.arg(from.place)?.dtype),
        declared.join(", "),
        target(req, y, "up(narrow[i])")?,
    );
    let mut module = module(req, source, blocks(n, 256)?, 256);
    for entry in &mut module.entries {
        entry.params = [&[Param::Scratch(0)], &operands[..]].concat();
    }
    Ok(module)
}

/// Generates `x, w -> y`.
pub(in crate::kernels) fn forward(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let [x, w, y] = three(op)?;
    let g = Geometry::new(x, y, w)?;
    let n = g.images * g.cout * g.h * g.w;
    let source = format!(
        "{}{}{}KERNEL(256) k0({}) {{
  const IDX i = (IDX)blockIdx.x * 256 + threadIdx.x;
  if (i >= {n}u) return;
  const int px = i % W, py = i / W % H, co = i / (W * H) % COUT;
  const IDX image = i / (W * H * COUT);
  float sum = 0.0f;
  for (int ci = 0; ci < CIN; ci++)
    for (int dy = 0; dy < K; dy++) {{
      const int sy = py + dy - PAD;
      if (sy < 0 || sy >= H) continue;
#pragma unroll
      for (int dx = 0; dx < K; dx++) {{
        const int sx = px + dx - PAD;
        if (sx < 0 || sx >= W) continue;
        sum = fmaf(read_x({x}, ((image * CIN + ci) * H + sy) * W + sx), read_w({w}, ((co * CIN + ci) * K + dy) * K + dx), sum);
      }}
    }}
  {}
}}
",
        g.defines(req.index()),
        reader(req, x, "read_x")?,
        reader(req, w, "read_w")?,
        req.operands().1.join(", "),
        target(req, y, "sum")?,
        x = req.address(x)?,
        w = req.address(w)?,
    );
    Ok(module(req, source, blocks(n as usize, 256)?, 256))
}

/// Generates `d_y, w -> d_x`.
pub(in crate::kernels) fn grad_input(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let [dy, w, dx] = three(op)?;
    let g = Geometry::new(dx, dy, w)?;
    let n = g.images * g.cin * g.h * g.w;
    let source = format!(
        "{}{}{}KERNEL(256) k0({}) {{
  const IDX i = (IDX)blockIdx.x * 256 + threadIdx.x;
  if (i >= {n}u) return;
  const int px = i % W, py = i / W % H, ci = i / (W * H) % CIN;
  const IDX image = i / (W * H * CIN);
  float sum = 0.0f;
  for (int co = 0; co < COUT; co++)
    for (int dy = 0; dy < K; dy++) {{
      const int sy = py - dy + PAD;
      if (sy < 0 || sy >= H) continue;
#pragma unroll
      for (int dx = 0; dx < K; dx++) {{
        const int sx = px - dx + PAD;
        if (sx < 0 || sx >= W) continue;
        sum = fmaf(read_y({dy}, ((image * COUT + co) * H + sy) * W + sx), read_w({w}, ((co * CIN + ci) * K + dy) * K + dx), sum);
      }}
    }}
  {}
}}
",
        g.defines(req.index()),
        reader(req, dy, "read_y")?,
        reader(req, w, "read_w")?,
        req.operands().1.join(", "),
        target(req, dx, "sum")?,
        dy = req.address(dy)?,
        w = req.address(w)?,
    );
    Ok(module(req, source, blocks(n as usize, 256)?, 256))
}

/// Generates `d_y, x -> d_w`.
pub(in crate::kernels) fn grad_weight(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let [dy, x, dw] = three(op)?;
    let g = Geometry::new(x, dy, dw)?;
    let n = g.cout * g.cin * g.k * g.k;
    let source = format!(
        "{}{}{}KERNEL(256) k0({}) {{
  const u32 i = blockIdx.x;
  const int dx = i % K, dy = i / K % K, ci = i / (K * K) % CIN, co = i / (K * K * CIN);
  float sum = 0.0f;
  for (IDX j = threadIdx.x; j < (IDX){images}u * H * W; j += 256) {{
    const int px = j % W, py = j / W % H, sx = px + dx - PAD, sy = py + dy - PAD;
    const IDX image = j / (W * H);
    if (sx < 0 || sx >= W || sy < 0 || sy >= H) continue;
    sum = fmaf(read_y({dy}, ((image * COUT + co) * H + py) * W + px), read_x({x}, ((image * CIN + ci) * H + sy) * W + sx), sum);
  }}
  const float total = (float)block_sum<256>((double)sum);
  if (threadIdx.x) return;
  {}
}}
",
        g.defines(req.index()),
        reader(req, dy, "read_y")?,
        reader(req, x, "read_x")?,
        req.operands().1.join(", "),
        target(req, dw, "total")?,
        images = g.images,
        dy = req.address(dy)?,
        x = req.address(x)?,
    );
    Ok(module(req, source, blocks(n as usize, 1)?, 256))
}
