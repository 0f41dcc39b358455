//! Kernels of the sharding engine: copies, casts, accumulation, sums of squares, optimizers, over
//! lists of ranges.

mod float8;
pub(in crate::kernels::cuda) mod muon;

use super::{PREAMBLE, ctype};
use crate::base::blockwise;
use shardlab_plan::ir::{DType, ScaleBlock, UpdateRule};

const COMMON: &str = include_str!("shard.cuh");

/// Bytes of a launch's arguments since CUDA 12.1, without those that follow the list.
const ARGUMENTS: usize = 32_764 - 64;

/// What a kernel does with each range of its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Ranges {
    /// `to, from`: the same bytes, or zeros without a source. Its elements are bytes.
    Raw,
    /// `to, from`: converted.
    Cast {
        /// Source type.
        from: DType,
        /// Target type.
        to: DType,
    },
    /// `to, from`: added.
    Accumulate {
        /// Type of what is added.
        from: DType,
        /// Type of the sum.
        to: DType,
    },
    /// `to, from, distance`: pieces, the given number of bytes apart, multiplied by a factor and
    /// added in order.
    Sum {
        /// Type of the pieces.
        from: DType,
        /// Type of the sum.
        to: DType,
        /// Number of pieces.
        pieces: u32,
        /// Whether the sum is added to the existing value.
        accumulate: bool,
    },
    /// `to`: multiplied by a factor, or by the clip factor.
    Scale {
        /// Type.
        of: DType,
    },
    /// `from`: a float64 sum of squares per block.
    Squares {
        /// Type.
        of: DType,
    },
    /// `from`: 1 per block that has a NaN, or else 0.
    Nan {
        /// Type.
        of: DType,
    },
    /// `maximum, from`: the largest absolute value, rounded, where it is larger than the float32
    /// that is there.
    Amax {
        /// Type.
        of: DType,
        /// Type to which it is rounded.
        through: DType,
    },
    /// `scales, reciprocals, maxima` of tensors in 8 bits, in float32.
    Scales {
        /// Type of the codes.
        to: DType,
    },
    /// `codes, weights, scale`: rounded, times the scale (1 without one).
    Codes {
        /// Type of the weights.
        from: DType,
        /// Type to which they are rounded first.
        through: DType,
        /// Type of the codes.
        to: DType,
    },
    /// `codes, weights, reciprocals, columns` of a matrix: rounded, times the scale of each block
    /// of 128x128 elements. A block of threads works on one of them.
    BlockCodes {
        /// Type of the weights.
        from: DType,
        /// Type to which they are rounded first.
        through: DType,
        /// Type of the codes.
        to: DType,
    },
    /// `weight, gradient[, states[, scales]][, copy][, distance][, maximum][, group]`: if several
    /// pieces make up a gradient, `distance` is the number of bytes between them; `maximum` is as
    /// in `Amax`, or null; `group` is a parameter group.
    Update(RangeUpdate),
    /// `biases, counts` of a router, in float32, which one block moves by a factor.
    RouterBias,
}

/// How an optimizer updates a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RangeUpdate {
    /// Rule.
    pub(crate) rule: UpdateRule,
    /// Type of the weight.
    pub(crate) weight: DType,
    /// Type of the gradient.
    pub(crate) grad: DType,
    /// Type of states.
    pub(crate) states: DType,
    /// Type of a second copy of the new weight.
    pub(crate) copy: Option<DType>,
    /// Number of pieces of the gradient, multiplied by a factor and added in order.
    pub(crate) pieces: u32,
    /// Whether there are several parameter groups.
    pub(crate) grouped: bool,
    /// Whether the largest absolute values of the new weights are found.
    pub(crate) maxima: bool,
}

impl Ranges {
    /// Returns the number of operands per range.
    pub(crate) const fn width(self) -> usize {
        match self {
            Self::Raw
            | Self::Cast { .. }
            | Self::Accumulate { .. }
            | Self::Amax { .. }
            | Self::RouterBias => 2,
            Self::Sum { .. } | Self::Scales { .. } | Self::Codes { .. } => 3,
            Self::BlockCodes { .. } => 4,
            Self::Scale { .. } | Self::Squares { .. } | Self::Nan { .. } => 1,
            Self::Update(u) => {
                let more = [u.copy.is_some(), u.pieces > 1, u.maxima, u.grouped];
                let scales = if u.in_blocks() { u.rule.states() } else { 0 };
                let states = 2 + u.rule.states() + scales;
                states + more[0] as usize + more[1] as usize + more[2] as usize + more[3] as usize
            }
        }
    }

    /// Returns the maximum numbers of ranges of a launch: few, so that its arguments are short, or
    /// many.
    pub(crate) const fn capacities(self) -> [usize; 2] {
        // Addresses and the length of a range, and its first block.
        let most = (ARGUMENTS - 8) / ((self.width() + 1) * 8 + 4);
        [24, if most < 540 { most / 2 * 2 } else { 540 }]
    }

    /// Returns the elements of a range that one block works on.
    pub(crate) const fn chunk(self) -> u64 {
        match self {
            Self::Raw => 65536,
            Self::BlockCodes { .. } => ScaleBlock::SQUARE.numel(),
            _ => 8192,
        }
    }

    /// Returns the arguments of a launch in addition to its table, in order.
    pub(crate) const fn extra(self) -> &'static [Extra] {
        match self {
            Self::Raw
            | Self::Cast { .. }
            | Self::Accumulate { .. }
            | Self::Amax { .. }
            | Self::Scales { .. }
            | Self::Codes { .. }
            | Self::BlockCodes { .. } => &[],
            Self::Sum { .. } | Self::RouterBias => &[Extra::Factor],
            Self::Scale { .. } => &[Extra::Factor, Extra::Hyper, Extra::Square],
            Self::Squares { .. } | Self::Nan { .. } => &[Extra::Part],
            Self::Update(u) if u.pieces > 1 => &[Extra::Factor, Extra::Hyper, Extra::Square],
            Self::Update(_) => &[Extra::Hyper, Extra::Square],
        }
    }

    /// Returns the CUDA C++ of the kernel `k0` for lists of at most `capacity` ranges.
    pub(crate) fn source(self, capacity: usize) -> String {
        let (declared, body) = self.body();
        let declared = declared.join(", ");
        let comma = if declared.is_empty() { "" } else { ", " };
        let tables = match self {
            Self::Update(u) if u.in_blocks() => tables(),
            _ => String::new(),
        };
        format!(
            "#define CAP {capacity}\n#define WIDTH {}\n#define CHUNK {}u\n{PREAMBLE}\n{COMMON}\n{tables}KERNEL(256) k0(const __grid_constant__ Table t{comma}{declared}) {{\n  const Part p = part_of(t);\n{body}}}\n",
            self.width(),
            self.chunk()
        )
    }

    fn body(self) -> (Vec<&'static str>, String) {
        let hyper = "const Hyper* h";
        let square = "const float* square";
        let apply = |s: DType, t: DType, f: &str| {
            format!(
                "  each<{s}, {t}, true>(operand<const {s}>(t, p, 1), operand<{t}>(t, p, 0), p.n, {f});\n",
                s = ctype(s),
                t = ctype(t)
            )
        };
        match self {
            Self::Raw => {
                let body = "  raw(t.at[p.e][1] ? operand<const u8>(t, p, 1) : nullptr, operand<u8>(t, p, 0), p.n);\n";
                (vec![], body.to_owned())
            }
            Self::Cast { from, to } => (vec![], apply(from, to, "Take()")),
            Self::Accumulate { from, to } => (vec![], apply(from, to, "Plus()")),
            Self::Sum {
                from,
                to,
                pieces,
                accumulate,
            } => (
                vec!["float factor"],
                format!(
                    "  sum_pieces<{s}, {t}, {pieces}, {accumulate}>(operand<const {s}>(t, p, 1), t.at[p.e][2], operand<{t}>(t, p, 0), p.n, factor);\n",
                    s = ctype(from),
                    t = ctype(to)
                ),
            ),
            Self::Scale { of } => (
                vec!["float factor", hyper, square],
                format!(
                    "  Times f;\n  f.factor = square ? clip_factor(h, square) : factor;\n  if (f.factor != 1.0f) each<{t}, {t}, false>(nullptr, operand<{t}>(t, p, 0), p.n, f);\n",
                    t = ctype(of)
                ),
            ),
            Self::Squares { of } => (
                vec!["double* part"],
                reduce(of, "sum += (double)a[v] * (double)a[v];", "sum"),
            ),
            Self::Nan { of } => (
                vec!["double* part"],
                reduce(of, "if (a[v] != a[v]) sum = 1.0;", "sum > 0.0 ? 1.0 : 0.0"),
            ),
            Self::Amax { of, through } => (vec![], float8::amax(of, through)),
            Self::Scales { to } => (vec![], float8::scales(to)),
            Self::Codes { from, through, to } => (vec![], float8::codes(from, through, to)),
            Self::BlockCodes { from, through, to } => {
                (vec![], float8::block_codes(from, through, to))
            }
            Self::Update(u) => (self.settings(), u.body()),
            Self::RouterBias => (self.settings(), ROUTER_BIAS.to_owned()),
        }
    }

    /// Returns the parameters of an update, in the order of [`Self::extra`].
    fn settings(self) -> Vec<&'static str> {
        let names = |e: &Extra| match e {
            Extra::Factor => "float factor",
            Extra::Hyper => "const Hyper* h",
            Extra::Square => "const float* square",
            Extra::Part => "double* part",
        };
        self.extra().iter().map(names).collect()
    }
}

/// Argument of a launch in addition to its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extra {
    /// A factor by value.
    Factor,
    /// Address of the step's settings.
    Hyper,
    /// Address of the squared norm, or null.
    Square,
    /// Scratch: a float64 per block.
    Part,
}

/// Returns the kernel that adds up the blocks' parts: `k0(part, count, out, before)`; with `any` it
/// determines whether one is not 0.
pub(crate) fn fold(any: bool) -> String {
    let result = if any {
        "sum > 0.0 ? 1.0f : 0.0f"
    } else {
        "(float)(sum + (before ? (double)*before : 0.0))"
    };
    format!(
        "{PREAMBLE}\nKERNEL(1024) k0(const double* part, u64 count, float* out, const float* before) {{\n  double sum = 0.0;\n  for (u64 k = threadIdx.x; k < count; k += 1024) sum += part[k];\n  sum = block_sum<1024>(sum);\n  if (threadIdx.x == 0) *out = {result};\n}}\n"
    )
}

fn reduce(of: DType, step: &str, result: &str) -> String {
    let ty = ctype(of);
    format!(
        "  const {ty}* s = operand<const {ty}>(t, p, 0);
  double sum = 0.0;
  u64 done = 0;
  if (aligned(s)) {{
    done = p.n / 8 * 8;
#pragma unroll 4
    for (u64 k = threadIdx.x * 8; k < done; k += 2048) {{
      float a[8];
      load<{ty}, 8>(s + k, a);
#pragma unroll
      for (int v = 0; v < 8; v++) {{ {step} }}
    }}
  }}
  for (u64 k = done + threadIdx.x; k < p.n; k += 256) {{
    const int v = 0;
    float a[1] = {{up(s[k])}};
    {step}
  }}
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0) part[blockIdx.x] = {result};
"
    )
}

/// The statements of a router's update. Whole numbers are added and multiplied in float64, without
/// rounding.
const ROUTER_BIAS: &str = "  float* w = operand<float>(t, p, 0);
  const float* c = operand<const float>(t, p, 1);
  __shared__ double all[2];
  const double n = (double)p.n;
  double total = 0.0, directions = 0.0;
  for (u64 k = threadIdx.x; k < p.n; k += 256) total += (double)c[k];
  total = block_sum<256>(total);
  if (threadIdx.x == 0) all[0] = total;
  __syncthreads();
  const auto direction = [&](u64 k) {
    const double missing = all[0] - n * (double)c[k];
    return (float)(missing > 0.0) - (float)(missing < 0.0);
  };
  for (u64 k = threadIdx.x; k < p.n; k += 256) directions += (double)direction(k);
  directions = block_sum<256>(directions);
  if (threadIdx.x == 0) all[1] = directions;
  __syncthreads();
  const float mean = factor * (float)all[1] / (float)p.n;
  for (u64 k = threadIdx.x; k < p.n; k += 256) w[k] += factor * direction(k) - mean;
";

/// How an update uses an operand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Reads it, piece by piece if there are several.
    Pieces,
    Both,
    Written,
}

impl Use {
    fn writes(self) -> bool {
        self != Self::Pieces
    }
}

/// Returns a loop over the chunk's elements, four at a time if all operands are aligned.
fn update(types: &[(&str, &str, Use)], pieces: u32, step: &str) -> String {
    let mut out = String::new();
    let mut aligned = Vec::new();
    for (i, (name, ty, _)) in types.iter().enumerate() {
        out += &format!("  {ty}* p{name} = operand<{ty}>(t, p, {i});\n");
        aligned.push(format!("aligned(p{name})"));
    }
    if pieces > 1 {
        out += &format!("  const u64 apart = t.at[p.e][{}];\n", types.len());
        aligned.push("apart % 16 == 0".to_owned());
    }
    let from = |of: Use| of == Use::Pieces && pieces > 1;
    out += &format!(
        "  u64 done = 0;\n  if ({}) {{\n    done = p.n / 4 * 4;\n#pragma unroll 2\n    for (u64 k = threadIdx.x * 4; k < done; k += 1024) {{\n",
        aligned.join(" && ")
    );
    for (name, ty, of) in types {
        out += &format!("      float {name}[4];\n");
        if from(*of) {
            out +=
                &format!("      sum_of<{ty}, {pieces}, 4>(p{name} + k, apart, factor, {name});\n");
        } else if *of != Use::Written {
            out += &format!("      load<{ty}, 4>(p{name} + k, {name});\n");
        }
    }
    out += &format!("#pragma unroll\n      for (int v = 0; v < 4; v++) {{ {step} }}\n");
    for (name, ty, of) in types {
        if of.writes() {
            out += &format!("      store<{ty}, 4>(p{name} + k, {name});\n");
        }
    }
    out += "    }\n  }\n  for (u64 k = done + threadIdx.x; k < p.n; k += 256) {\n    const int v = 0;\n";
    for (name, ty, of) in types {
        out += &read_one(name, ty, *of, pieces);
    }
    out += &format!("    {step}\n");
    for (name, _, of) in types {
        if of.writes() {
            out += &format!("    down({name}[0], p{name}[k]);\n");
        }
    }
    out += "  }\n";
    out
}

/// Returns the declaration of element `k` of an operand, read unless it is only written.
fn read_one(name: &str, ty: &str, of: Use, pieces: u32) -> String {
    match of {
        Use::Written => format!("    float {name}[1];\n"),
        Use::Pieces if pieces > 1 => format!(
            "    float {name}[1];\n    sum_of<{ty}, {pieces}, 1>(p{name} + k, apart, factor, {name});\n"
        ),
        _ => format!("    float {name}[1] = {{up(p{name}[k])}};\n"),
    }
}

/// Returns the copy of a new weight, equal to a cast of the stored one.
fn copied(weight: DType) -> String {
    format!(" c[v] = rounded<{}>(w[v]);", ctype(weight))
}

impl RangeUpdate {
    /// Returns whether states are in 8 bits.
    const fn in_blocks(self) -> bool {
        self.rule.states() > 0 && matches!(self.states, DType::U8)
    }

    /// Returns the statements of the kernel.
    fn body(self) -> String {
        let names: &[&str] = match self.rule {
            UpdateRule::AdamW => &["m", "s"],
            UpdateRule::Lion | UpdateRule::Muon(_) | UpdateRule::MuonMomentum => &["m"],
            UpdateRule::Sgd | UpdateRule::RouterBias(_) => &[],
        };
        let mut types = vec![
            ("w", ctype(self.weight), Use::Both),
            ("g", ctype(self.grad), Use::Pieces),
        ];
        types.extend(names.iter().map(|n| (*n, ctype(self.states), Use::Both)));
        let mut step = match self.rule {
            UpdateRule::AdamW => {
                "const float g_ = g[v] * clip; const float decayed = w[v] * f.decay; const float first = m[v] + f.blend * (g_ - m[v]); const float second = s[v] * f.beta2 + f.rest2 * (g_ * g_); const float denominator = sqrtf(second) / f.root + f.eps; m[v] = first; s[v] = second; w[v] = decayed - f.step * (first / denominator);"
            }
            UpdateRule::Lion => {
                "const float g_ = g[v] * clip; const float blend = m[v] + f.blend * (g_ - m[v]); const float sign = (float)(blend > 0.0f) - (float)(blend < 0.0f); m[v] = m[v] * f.beta2 + f.rest2 * g_; w[v] = w[v] * f.decay - f.lr * sign;"
            }
            // The update goes to the copy.
            UpdateRule::MuonMomentum => {
                "const float g_ = g[v] * clip; const float mean = m[v] + f.muon_rest * (g_ - m[v]); m[v] = mean; w[v] = w[v] * f.decay; c[v] = mean - (mean - g_) * f.muon_rest;"
            }
            UpdateRule::Sgd => "w[v] -= f.lr * (g[v] * clip + f.weight_decay * w[v]);",
            // Not kernels over elements: see `muon` and `Ranges::RouterBias`.
            UpdateRule::Muon(_) | UpdateRule::RouterBias(_) => "",
        }
        .to_owned();
        if let Some(copy) = self.copy {
            types.push(("c", ctype(copy), Use::Written));
            if self.rule != UpdateRule::MuonMomentum {
                step += &copied(self.weight);
            }
        }
        let (mut before, mut after) = (String::new(), String::new());
        if self.maxima {
            let slot = format!("WIDTH - {}", 1 + usize::from(self.grouped));
            (before, after) = float8::maximum(&slot, DType::Bf16);
            step += &float8::seen(&format!("rounded<{}>(w[v])", ctype(self.weight)));
        }
        let group = if self.grouped {
            "h[t.at[p.e][WIDTH - 1]]"
        } else {
            "*h"
        };
        let body = if self.in_blocks() {
            update_blocks(&types, self.pieces, &step)
        } else {
            update(&types, self.pieces, &step)
        };
        format!(
            "  const Hyper f = {group};\n  const float clip = clip_factor(h, square);\n{before}{body}{after}"
        )
    }
}

/// Returns a loop over blocks of states in 8 bits: a warp has a block, and a lane every 32nd of its
/// elements.
fn update_blocks(types: &[(&str, &str, Use)], pieces: u32, step: &str) -> String {
    let is_state = |name: &str| matches!(name, "m" | "s");
    let states: Vec<&str> = types.iter().map(|t| t.0).filter(|n| is_state(n)).collect();
    let mut out = format!("  __shared__ float map[{}][256];\n", states.len());
    for (n, name) in states.iter().enumerate() {
        let table = ["SIGNED", "UNSIGNED"][n];
        out += &format!("  map[{n}][threadIdx.x] = {table}[threadIdx.x];\n");
        out += &format!(
            "  float* scale_{name} = reinterpret_cast<float*>(t.at[p.e][{}]) + p.from / 256;\n",
            2 + states.len() + n
        );
    }
    out += "  __syncthreads();\n";
    for (i, (name, ty, _)) in types.iter().enumerate() {
        // Scales come between the states and a copy.
        let i = if i < 2 + states.len() {
            i
        } else {
            i + states.len()
        };
        out += &format!("  {ty}* p{name} = operand<{ty}>(t, p, {i});\n");
    }
    if pieces > 1 {
        let at = types.len() + states.len();
        out += &format!("  const u64 apart = t.at[p.e][{at}];\n");
    }
    out += "  const u32 lane = threadIdx.x & 31;\n  for (u64 b = threadIdx.x >> 5; b * 256 < p.n; b += 8) {\n    const u64 end = b * 256 + 256 < p.n ? b * 256 + 256 : p.n;\n";
    for name in &states {
        out += &format!(
            "    const float old_{name} = scale_{name}[b];\n    float new_{name}[8], most_{name} = 1e-12f;\n"
        );
    }
    out += "#pragma unroll\n    for (int j = 0; j < 8; j++) {\n      const u64 k = b * 256 + j * 32 + lane;\n      if (k >= end) continue;\n      const int v = 0;\n";
    for (name, ty, of) in types {
        if let Some(n) = states.iter().position(|s| s == name) {
            out += &format!("      float {name}[1] = {{map[{n}][p{name}[k]] * old_{name}}};\n");
        } else {
            out += &read_one(name, ty, *of, pieces);
        }
    }
    out += &format!("      {step}\n");
    for (name, _, of) in types {
        if is_state(name) {
            out += &format!(
                "      new_{name}[j] = {name}[0];\n      most_{name} = larger(most_{name}, fabsf({name}[0]));\n"
            );
        } else if of.writes() {
            out += &format!("      down({name}[0], p{name}[k]);\n");
        }
    }
    out += "    }\n";
    for (n, name) in states.iter().enumerate() {
        out += &format!(
            "#pragma unroll
    for (int d = 16; d; d >>= 1) most_{name} = larger(most_{name}, __shfl_xor_sync(0xffffffffu, most_{name}, d));
    if (lane == 0) scale_{name}[b] = most_{name};
#pragma unroll
    for (int j = 0; j < 8; j++) {{
      const u64 k = b * 256 + j * 32 + lane;
      if (k < end) p{name}[k] = nearest_code(map[{n}], new_{name}[j] / most_{name});
    }}
"
        );
    }
    out + "  }\n"
}

/// Returns the tables of the factors of 8-bit codes.
fn tables() -> String {
    codebook("SIGNED", true) + &codebook("UNSIGNED", false)
}

/// Returns the table of the factors of 8-bit codes with or without a sign.
pub(super) fn codebook(name: &str, signed: bool) -> String {
    // Rust prints as many digits as a float32 needs.
    let values: Vec<String> = blockwise::codebook(signed)
        .iter()
        .map(|x| format!("{x:e}f"))
        .collect();
    format!(
        "__device__ const float {name}[256] = {{{}}};\n",
        values.join(", ")
    )
}
