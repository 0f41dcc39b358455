//! What 8-bit matmuls bring, layer by layer, and where they do not pay.
//!
//! The step is predicted again without 8 bits, and the kernels of both steps are compared: matmuls
//! by their sizes, casts by the sizes of what they read. Maxima that are fused into other kernels
//! cost nothing here.

use super::exposed;
use crate::predict::{PredictError, Prediction, Profiles, predict};
use shardlab_plan::config::{Float8Recipe, Float8Saved};
use shardlab_plan::ir::{BodyOp, CollectiveKind, Kernel, KernelClass, OpKind, Param, ParamId};
use shardlab_plan::program::Op;
use shardlab_plan::record::Cause;
use shardlab_plan::units::Picos;
use shardlab_plan::{Program, Scenario};
use shardlab_sim::Options;
use std::collections::{BTreeMap, BTreeSet};

/// Share of a step by which a time has to differ to be mentioned.
const WORTH_SAYING: f64 = 0.005;

/// Sides of a weight: the smaller one first.
type Sides = [u64; 2];

/// Linear layers whose weights have the same sides, up to transposition.
#[derive(Clone, Debug, PartialEq)]
pub struct Layers {
    /// Names within a block; `+` joins weights that one matmul reads.
    pub names: Vec<String>,
    /// Sides of the weights.
    pub sides: Sides,
    /// Time of their matmuls in a step, milliseconds.
    pub matmuls_ms: f64,
    /// The same without 8 bits.
    pub without_ms: f64,
    /// Time of the casts of their operands. A cast of a tensor that several layers could read is
    /// divided equally among them.
    pub casts_ms: f64,
}

impl Layers {
    /// Returns the time that 8-bit matmuls save in a step, milliseconds; negative if they do not
    /// pay.
    #[must_use]
    pub fn saved_ms(&self) -> f64 {
        self.without_ms - self.matmuls_ms - self.casts_ms
    }

    /// Returns the globs of `precision.float8_exclude` that leave these layers in 16 bits.
    fn globs(&self) -> impl Iterator<Item = &str> {
        self.names.iter().flat_map(|name| name.split('+'))
    }
}

/// A step with 8-bit matmuls, next to one without.
#[derive(Clone, Debug, PartialEq)]
pub struct Float8 {
    /// Layers, those that save the most time first.
    pub layers: Vec<Layers>,
    /// Time of the step, milliseconds.
    pub step_ms: f64,
    /// Time of the step without 8 bits.
    pub without_ms: f64,
    /// Time in which the compute stream waits for the host, with and without 8 bits.
    pub host_ms: [f64; 2],
    /// Kernels of a step, with and without 8 bits.
    pub kernels: [usize; 2],
    /// Time of casts of gathered weights, which 8-bit gathers do not need.
    pub weight_casts_ms: f64,
    /// Time in which the compute stream waits for all-gathers of blocks.
    pub exposed_gathers_ms: f64,
    /// Whether ranks gather weights, and not their codes.
    pub gathers_weights: bool,
}

impl Float8 {
    /// Compares a prediction with one without 8 bits; `None` if no matmul runs in 8 bits.
    ///
    /// # Errors
    /// See [`predict`].
    pub fn of(p: &Prediction, profiles: &Profiles) -> Result<Option<Self>, PredictError> {
        if !p.scenario.precision.float8.is_on() {
            return Ok(None);
        }
        let other = predict(&without(&p.scenario), profiles, &Options::default())?;
        let tokens = p.scenario.train.micro_batch * p.scenario.train.seq_len;
        let mut layers = layers(p, &other, tokens);
        let weight_casts = casts(p, tokens, &mut layers);
        layers.sort_by(|a, b| b.saved_ms().total_cmp(&a.saved_ms()));
        let both = [p, &other];
        let host = |p: &Prediction| p.run.exposed.get(&Cause::Host).map_or(0.0, |t| t.ms());
        Ok(Some(Self {
            layers,
            step_ms: p.step_ms(),
            without_ms: other.step_ms(),
            host_ms: both.map(host),
            kernels: both.map(|p| launches(p).count()),
            weight_casts_ms: weight_casts.ms(),
            exposed_gathers_ms: exposed_gathers(p).ms(),
            gathers_weights: !p.scenario.precision.float8.all_gather
                && p.scenario.mesh.dp_shard > 1,
        }))
    }

    /// Returns the layers whose casts take longer than their matmuls save.
    pub(crate) fn unprofitable(&self) -> impl Iterator<Item = &Layers> {
        self.layers.iter().filter(|l| l.saved_ms() < 0.0)
    }

    /// Returns the override that leaves these layers in 16 bits; `None` if there are none, or if no
    /// layer would remain.
    #[must_use]
    pub(crate) fn exclusion(&self) -> Option<String> {
        let globs: Vec<String> = self
            .unprofitable()
            .flat_map(Layers::globs)
            .map(|glob| format!("{glob:?}"))
            .collect();
        let some = !globs.is_empty() && self.unprofitable().count() < self.layers.len();
        some.then(|| format!("precision.float8_exclude=[{}]", globs.join(", ")))
    }

    /// Returns what limits the gain, as sentences.
    #[must_use]
    pub fn sentences(&self) -> Vec<String> {
        let mut all = Vec::new();
        let worth = WORTH_SAYING * self.step_ms;
        let saved = self.without_ms - self.step_ms;
        let names: Vec<String> = self.unprofitable().map(|l| l.names.join(", ")).collect();
        if !names.is_empty() {
            all.push(format!(
                "8-bit matmuls of {} do not pay: their casts take longer than the matmuls save.{}",
                names.join(", "),
                self.exclusion().map_or(String::new(), |set| format!(
                    " `--set '{set}'` leaves them in 16 bits."
                ))
            ));
        }
        if saved < worth {
            let [with, before] = self.host_ms;
            let [kernels, fewer] = self.kernels;
            all.push(match with > worth {
                true => format!(
                    "The step is not shorter than in 16 bits because it is host-bound: the GPU waits {with:.2} ms \
                     for the host, which launches {kernels} kernels instead of {fewer} (without 8 bits, it waits \
                     {before:.2} ms)."
                ),
                false => "The step is not shorter than in 16 bits: casts and transposes take longer than the matmuls \
                          save."
                    .to_owned(),
            });
        }
        let waits_ms = self.host_ms[0] + self.exposed_gathers_ms;
        if self.gathers_weights && waits_ms < worth {
            all.push(format!(
                "Computation hides the all-gathers of blocks, so 8-bit gathers (`precision.float8_all_gather`) would save \
                 little more than the casts of gathered weights, {:.2} ms.",
                self.weight_casts_ms
            ));
        }
        all
    }
}

/// Returns the time in which the compute stream waits for all-gathers of units with weights of
/// blocks, the only ones with 8-bit layers.
fn exposed_gathers(p: &Prediction) -> Picos {
    let of_block = |id: &ParamId| within_block(&p.program.params[id.index()].name).is_some();
    let groups = p.program.groups.iter();
    let groups = groups.filter(|group| group.params.iter().any(of_block));
    let blocks = groups.map(|group| p.program.units[group.unit.index()].name.as_str());
    let blocks: BTreeSet<&str> = blocks.collect();
    let gather = CollectiveKind::AllGather.name();
    let gaps = exposed::gaps(&p.program, &p.run).into_iter();
    let of_blocks = gaps.filter(|gap| {
        gap.awaited.name.contains(gather) && blocks.iter().any(|name| gap.unit.contains(name))
    });
    of_blocks.map(|gap| gap.length).sum()
}

/// Returns the scenario without 8-bit matmuls.
fn without(s: &Scenario) -> Scenario {
    let mut other = s.clone();
    let float8 = &mut other.precision.float8;
    float8.recipe = Float8Recipe::None;
    float8.saved = Float8Saved::Compute;
    (float8.all_gather, float8.experts) = (false, false);
    other.fsdp.keep_fp8_transpose_cache = false;
    other
}

/// Returns the kernels of the recorded step, with the time that each takes alone.
fn launches(p: &Prediction) -> impl Iterator<Item = (&Kernel, Picos)> {
    p.run
        .spans
        .iter()
        .filter_map(|span| match p.program.instrs[span.instr.index()].op {
            Op::Launch { kernel, .. } => Some((&p.program.kernels[kernel.index()], span.alone)),
            _ => None,
        })
}

/// Returns the sides of the weight of a layer's matmul, one of whose dimensions is the number of
/// tokens.
fn sides(class: &KernelClass, tokens: u64) -> Option<Sides> {
    let KernelClass::Gemm { m, n, k, .. } = *class else {
        return None;
    };
    let mut dims = vec![m, n, k];
    dims.remove(dims.iter().position(|d| *d == tokens)?);
    dims.sort_unstable();
    Some([dims[0], dims[1]])
}

/// Returns the layers whose matmuls run in 8 bits, without their casts.
fn layers(p: &Prediction, other: &Prediction, tokens: u64) -> Vec<Layers> {
    let mut found: BTreeMap<Sides, [Picos; 2]> = BTreeMap::new();
    for (kernel, time) in launches(p) {
        let is_8_bit = |op: &BodyOp| op.op.float8_fast_accum().is_some();
        if let Some(sides) =
            sides(&kernel.class, tokens).filter(|_| kernel.body.iter().any(is_8_bit))
        {
            found.entry(sides).or_default()[0] += time;
        }
    }
    for (kernel, time) in launches(other) {
        let of = sides(&kernel.class, tokens).and_then(|sides| found.get_mut(&sides));
        if let Some(times) = of {
            times[1] += time;
        }
    }
    // Layers in 16 bits with the same sides, such as excluded ones, are in both steps.
    for (kernel, time) in launches(p) {
        let is_8_bit = |op: &BodyOp| op.op.float8_fast_accum().is_some();
        let of = sides(&kernel.class, tokens).filter(|_| !kernel.body.iter().any(is_8_bit));
        if let Some(times) = of.and_then(|sides| found.get_mut(&sides)) {
            times[1] = times[1].saturating_sub(time);
        }
    }
    found
        .into_iter()
        .map(|(sides, [matmuls, without])| Layers {
            names: names(&p.program, sides),
            sides,
            matmuls_ms: matmuls.ms(),
            without_ms: without.ms(),
            casts_ms: 0.0,
        })
        .collect()
}

/// Returns the names, within blocks, of the weights of matmuls with these sides: of single weights,
/// or of the first two or three adjacent ones that together have these sides.
fn names(program: &Program, sides: Sides) -> Vec<String> {
    let matrices: Vec<&Param> = program
        .params
        .iter()
        .filter(|p| p.shape.len() == 2)
        .collect();
    let mut all = Vec::new();
    for merged in 1..=3 {
        for window in matrices.windows(merged) {
            let cols = window[0].shape[1];
            let adjacent = window.iter().all(|p| p.shape[1] == cols);
            let mut of = [window.iter().map(|p| p.shape[0]).sum::<u64>(), cols];
            of.sort_unstable();
            let within: Option<Vec<&str>> = window.iter().map(|p| within_block(&p.name)).collect();
            if let Some(within) = within.filter(|_| adjacent && of == sides) {
                let name = within.join("+");
                if !all.contains(&name) && (merged == 1 || all.is_empty()) {
                    all.push(name);
                }
            }
        }
        if !all.is_empty() {
            break;
        }
    }
    all
}

/// Returns the name of a layer after the number of its block.
fn within_block(weight: &str) -> Option<&str> {
    let module = weight.strip_suffix(".weight")?;
    let number = module
        .split('.')
        .position(|part| part.parse::<u32>().is_ok())?;
    let at: usize = module
        .split('.')
        .take(number + 1)
        .map(|part| part.len() + 1)
        .sum();
    module.get(at..)
}

/// Adds the times of casts to their layers. Returns the time of casts of gathered weights.
fn casts(p: &Prediction, tokens: u64, layers: &mut [Layers]) -> Picos {
    let mut weights = Picos::ZERO;
    for (kernel, time) in launches(p) {
        let Some(numel) = cast(&kernel.body) else {
            continue;
        };
        let of_weight = |l: &Layers| l.sides[0] * l.sides[1] == numel;
        let of_tokens = |l: &Layers| l.sides.iter().any(|side| side * tokens == numel);
        let is_weight = layers.iter().any(of_weight);
        if is_weight {
            weights += time;
        }
        let reads = |l: &&mut Layers| {
            if is_weight {
                of_weight(l)
            } else {
                of_tokens(l)
            }
        };
        let count = layers.iter_mut().filter(reads).count();
        for l in layers.iter_mut().filter(reads) {
            l.casts_ms += time.ms() / count as f64;
        }
    }
    weights
}

/// Returns the number of elements that a kernel casts to 8 bits, transposes or finds the maximum
/// of; `None` if it does anything else.
fn cast(body: &[BodyOp]) -> Option<u64> {
    let is_cast = |op: &BodyOp| match op.op {
        OpKind::RowAmax
        | OpKind::Float8Scale(_)
        | OpKind::Float8Cast
        | OpKind::Float8CastRows(_)
        | OpKind::Float8CastBlocks(_) => true,
        // Of codes, or transposed before a cast of rows.
        OpKind::Copy => op.outputs[0].dtype.is_float8() || !op.outputs[0].strides.is_empty(),
        _ => false,
    };
    let numel = body.first()?.inputs.first()?.shape.iter().product();
    body.iter().all(is_cast).then_some(numel)
}
