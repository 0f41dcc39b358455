//! Inputs of steps: token streams, random regression data, tables.
//!
//! The global batch of a step is a function of the step alone: with B samples over all ranks and
//! micro-batches, sample i of step s uses T + 1 tokens starting at `(s*B + i) * T mod (len - T -
//! 1)`. Data-parallel ranks and micro-batches only divide it, in the order micro-batch, rank,
//! sample; ranks that differ on other axes have the same samples.
//!
//! With `train.document_lengths` from a file, documents end with a separator token. Then every
//! sample has further inputs: the first position of each position's document, and tables of
//! positions in documents.
//!
//! Families without tokens get normal inputs that depend on the seed and the sample's index, and a
//! fixed function of the inputs as target.

mod rope;
mod source;
mod text;

pub use source::{DataError, TokenWidth, Tokens};
pub use text::tokenizer_next_to;

use crate::base::element::{Element, match_dtype, push};
use crate::base::random::Sequence;
use crate::engine::{RankInputs, StepInputs};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::{ParallelSlice, ParallelSliceMut};
use shardlab_plan::config::{DocumentLengths, Family, Model, Scenario};
use shardlab_plan::ir::{BufferId, Const, ConstId, DType, DeviceMesh, Documents, Holds, OpKind};
use shardlab_plan::models::{Inputs, approximation};
use shardlab_plan::program::Program;
use std::ops::Range;

/// Inputs of one rank: by micro-batch, the bytes of every constant that is new in each.
pub(crate) type RankFeed = Vec<Vec<(ConstId, Vec<u8>)>>;

/// Returns a step's inputs, given those of every rank.
pub(crate) fn step_inputs(ranks: Vec<RankFeed>) -> StepInputs {
    let of = |feed: RankFeed| RankInputs {
        micro_batches: feed
            .into_iter()
            .map(|m| m.into_iter().map(|(id, data)| (id, data.into())).collect())
            .collect(),
        ..RankInputs::default()
    };
    StepInputs {
        ranks: ranks.into_iter().map(of).collect(),
    }
}

/// Tables with a row for each position of a document.
const POSITIONAL: [&str; 7] = [
    "rope_cos",
    "rope_sin",
    "rope_local_cos",
    "rope_local_sin",
    "positions",
    "positions_with_offset",
    "sinusoids",
];

/// Source of samples.
#[derive(Clone, Debug)]
enum Samples {
    Tokens(Tokens),
    Random { seed: u64 },
}

/// Produces the inputs of a program's steps.
#[derive(Clone, Debug)]
pub(crate) struct Feed {
    family: Family,
    model: Model,
    mesh: DeviceMesh,
    micro_batches: u64,
    micro_batch: u64,
    seq_len: u64,
    documents: Documents,
    /// Last token of each document, if documents are those of the tokens.
    eos: Option<u32>,
    /// Constants that are new in every micro-batch.
    inputs: Vec<(ConstId, Const)>,
    /// Contents of the tables that are constant during the run.
    tables: Vec<(BufferId, Vec<u8>)>,
    samples: Samples,
    /// A step and the index of its first sample.
    base: (u64, u64),
    /// Ranks whose inputs are produced; those of other ranks stay empty.
    only: Range<u32>,
}

/// Refuses attention without the documents of each sequence, if these come from a file.
fn reads_documents(scenario: &Scenario, program: &Program) -> Result<(), DataError> {
    let DocumentLengths::OfData(_) = scenario.train.document_lengths else {
        return Ok(());
    };
    let mut ops = program.kernels.iter().flat_map(|k| &k.body);
    let without = |op: &OpKind| {
        matches!(
            op,
            OpKind::Attention(_) | OpKind::FlexAttention(_) | OpKind::SinkAttention(_)
        )
    };
    match ops.find(|body| without(&body.op)) {
        Some(body) => Err(DataError::DocumentsOfData(body.op.name())),
        None => Ok(()),
    }
}

fn model_type_is(model: &Model, name: &str) -> bool {
    model.options.model_type.as_deref() == Some(name)
}

/// Refuses models and operations that only predictions know.
fn runs(model: &Model, program: &Program) -> Result<(), DataError> {
    if let Some(model_type) = &model.options.model_type
        && let Some(what) = approximation(model_type)
    {
        let model_type = model_type.clone();
        return Err(DataError::Approximated { model_type, what });
    }
    if model_type_is(model, "deepseek_v2") && model.options.experts.router_groups > 1 {
        return Err(DataError::Approximated {
            model_type: "deepseek_v2".to_owned(),
            what: "unlike its plan, it compares groups of experts by their largest score alone (`group_limited_greedy`)",
        });
    }
    if model.options.experts.zero_experts > 0 {
        return Err(DataError::Approximated {
            model_type: "zero_experts".to_owned(),
            what: "unlike its plan, experts without weights add what they read by their own scores",
        });
    }
    let mut ops = program.kernels.iter().flat_map(|k| &k.body);
    match ops.find(|body| body.op.def().is_priced_only()) {
        Some(body) => Err(DataError::PricedOnly(body.op.name())),
        None => Ok(()),
    }
}

impl Feed {
    /// Creates a feed for a program and its scenario. Without `tokens`, those of the file that
    /// `train.document_lengths` names are read, or a synthetic language is generated from the seed.
    ///
    /// # Errors
    /// [`DataError`] if the tokens do not fit the model, samples do not hold one of its inputs, or
    /// a constant of the model is unknown.
    pub(crate) fn new(
        scenario: &Scenario,
        program: &Program,
        consts: &[Const],
        tokens: Option<Tokens>,
        seed: u64,
    ) -> Result<Self, DataError> {
        let model = scenario.model.clone();
        runs(&model, program)?;
        reads_documents(scenario, program)?;
        let seq_len = scenario.train.seq_len;
        let of_data = match &scenario.train.document_lengths {
            DocumentLengths::OfData(of) => Some(of),
            DocumentLengths::Listed(_) | DocumentLengths::Distributed(_) => None,
        };
        let samples = if model.vocab > 0 {
            let tokens = match (tokens, of_data) {
                (Some(t), _) => t,
                (None, Some(of)) => Tokens::read(&of.path, of.dtype)?,
                (None, None) => Tokens::synthetic(model.vocab, seq_len, seed),
            };
            tokens.suits(model.vocab, seq_len)?;
            Samples::Tokens(tokens)
        } else if tokens.is_some() {
            return Err(DataError::NoTokens);
        } else {
            Samples::Random { seed }
        };
        let mut feed = Self {
            family: model.family,
            mesh: program.meta.mesh,
            micro_batches: u64::from(scenario.train.grad_accum),
            micro_batch: scenario.train.micro_batch,
            seq_len,
            documents: scenario.train.documents(),
            eos: of_data.map(|of| of.eos_token_id),
            inputs: Vec::new(),
            tables: Vec::new(),
            samples,
            base: (0, 0),
            only: 0..program.meta.mesh.world(),
            model,
        };
        for input in consts.iter().filter(|c| c.per_micro_batch) {
            feed.known(input.name)?;
        }
        for (c, known) in (0u32..).zip(consts) {
            let id = ConstId(c);
            if known.per_micro_batch {
                feed.inputs.push((id, known.clone()));
                continue;
            }
            let table = feed.table(known)?;
            let buffers = (0u32..).zip(&program.buffers);
            for (b, _) in buffers.filter(|(_, b)| b.holds == Holds::Const(id)) {
                feed.tables.push((BufferId(b), table.clone()));
            }
        }
        Ok(feed)
    }

    /// Refuses inputs that samples do not hold, such as the classes of a classifier.
    fn known(&self, name: &str) -> Result<(), DataError> {
        let held: &[&str] = match self.samples {
            Samples::Tokens(_) => &["tokens"],
            Samples::Random { .. } => &["input", "target"],
        };
        let of_documents = name == "document_starts" || POSITIONAL.contains(&name);
        if held.contains(&name) || self.eos.is_some() && of_documents {
            return Ok(());
        }
        Err(DataError::NoInput {
            input: name.to_owned(),
            family: self.family.name(),
            held,
        })
    }

    /// Restricts the feed to the inputs of some ranks; those of other ranks stay empty.
    pub(crate) fn only(&mut self, ranks: Range<u32>) {
        self.only = ranks;
    }

    /// Returns the number of samples per step over all ranks and micro-batches.
    #[must_use]
    pub(crate) fn global_batch(&self) -> u64 {
        self.data_ranks() * self.micro_batches * self.micro_batch
    }

    /// Returns the number of ranks that take samples of their own.
    fn data_ranks(&self) -> u64 {
        u64::from(self.mesh.data_ranks())
    }

    /// Returns buffers and contents of the constant tables, which are equal on all ranks.
    #[must_use]
    pub(crate) fn tables(&self) -> &[(BufferId, Vec<u8>)] {
        &self.tables
    }

    /// Counts samples from `samples` at step `step`: the run may have had another batch size
    /// before.
    pub(crate) fn resume(&mut self, step: u64, samples: u64) {
        self.base = (step, samples);
    }

    /// Returns the index of the first sample of a step.
    #[must_use]
    pub(crate) fn position(&self, step: u64) -> u64 {
        let (base, samples) = self.base;
        samples + step.saturating_sub(base) * self.global_batch()
    }

    /// Returns the inputs of step `step` (from 0), by rank.
    #[must_use]
    pub(crate) fn step(&self, step: u64) -> Vec<RankFeed> {
        let first = self.position(step);
        self.ranks(self.micro_batches, |micro, rank, j| {
            let n = first + (micro * self.data_ranks() + rank) * self.micro_batch + j;
            match &self.samples {
                Samples::Tokens(t) => t.start(n, self.seq_len),
                Samples::Random { .. } => n,
            }
        })
    }

    /// Returns the inputs of the `index`-th validation, by rank, with one micro-batch each. Token
    /// streams use windows counted from the end of the stream, which training reaches last; other
    /// data use the samples that training reaches last.
    #[must_use]
    pub(crate) fn validation(&self, index: u64) -> Vec<RankFeed> {
        self.ranks(1, |_, rank, j| {
            let n = (index * self.data_ranks() + rank) * self.micro_batch + j;
            match &self.samples {
                Samples::Tokens(t) => t.start_from_end(n, self.seq_len),
                Samples::Random { .. } => u64::MAX - n,
            }
        })
    }

    /// Returns the inputs of all ranks; `sample` is given the micro-batch, the number of the rank
    /// among those that take samples of their own, and the index within the micro-batch.
    fn ranks(&self, micros: u64, sample: impl Fn(u64, u64, u64) -> u64 + Sync) -> Vec<RankFeed> {
        let one = |micro, rank| {
            // Normal values of large samples take longer to generate than a step.
            let bytes = |known: &Const| {
                let made = (0..self.micro_batch).into_par_iter().map(|j| {
                    let mut bytes = Vec::new();
                    self.write(known, sample(micro, rank, j), &mut bytes);
                    bytes
                });
                made.collect::<Vec<_>>().concat()
            };
            self.inputs
                .iter()
                .map(|(id, known)| (*id, bytes(known)))
                .collect()
        };
        let of = |rank: u32| {
            let micros = if self.only.contains(&rank) { micros } else { 0 };
            let data_rank = u64::from(self.mesh.data_rank(rank));
            (0..micros).map(|micro| one(micro, data_rank)).collect()
        };
        (0..self.mesh.world()).map(of).collect()
    }

    /// Appends one sample of an input: tokens from a position, or the sample of an index.
    fn write(&self, known: &Const, sample: u64, out: &mut Vec<u8>) {
        let per_sample = known.bytes.0 / known.dtype.size() / self.micro_batch;
        match &self.samples {
            Samples::Tokens(tokens) if known.name == "tokens" => {
                for t in tokens.window(sample, self.seq_len) {
                    out.extend_from_slice(&i64::from(t).to_le_bytes());
                }
            }
            Samples::Tokens(tokens) => {
                let starts = self.document_starts(tokens, sample);
                if known.name == "document_starts" {
                    let bytes = starts.iter().flat_map(|start| start.to_le_bytes());
                    out.extend(bytes);
                } else {
                    let positions: Vec<u64> =
                        (0u64..).zip(starts).map(|(i, start)| i - start).collect();
                    self.positional(known, per_sample / self.seq_len, &positions, out);
                }
            }
            Samples::Random { seed } => {
                let mut x = self.random_input(*seed, sample);
                if known.name == "target" {
                    x = self.target(&x, per_sample);
                }
                for v in x {
                    push(out, known.dtype, v);
                }
            }
        }
    }

    fn random_input(&self, seed: u64, sample: u64) -> Vec<f32> {
        let m = &self.model;
        let n = match self.family.spec().inputs {
            Inputs::Images => m.channels * m.height * m.width,
            Inputs::Tokens | Inputs::Features => self.seq_len * m.hidden,
        };
        let mut s = Sequence::new(seed, &format!("sample {sample}"));
        (0..n).map(|_| s.normal() as f32).collect()
    }

    /// Computes the target: half of the positive part of the input; for images, of its mean over
    /// channels.
    fn target(&self, x: &[f32], len: u64) -> Vec<f32> {
        let half = |v: f32| 0.5 * v.max(0.0);
        if x.len() as u64 == len {
            return x.iter().map(|v| half(*v)).collect();
        }
        let len = len as usize;
        let channels = (x.len() / len).max(1);
        (0..len)
            .map(|p| {
                let sum: f32 = (0..channels).map(|c| half(x[c * len + p])).sum();
                sum / channels as f32
            })
            .collect()
    }

    /// Returns the first position of the document of each input token of the sample that starts
    /// with token `sample`. The separator belongs to the document that it ends, and the sample
    /// starts with a document.
    fn document_starts(&self, tokens: &Tokens, sample: u64) -> Vec<u64> {
        let inputs = tokens.window(sample, self.seq_len);
        let mut start = 0;
        let of = |(i, token): (u64, u32)| {
            let of = start;
            if Some(token) == self.eos {
                start = i + 1;
            }
            of
        };
        (0..self.seq_len).zip(inputs).map(of).collect()
    }

    /// Appends the rows of a table for these positions in documents, `width` numbers each.
    fn positional(&self, known: &Const, width: u64, positions: &[u64], out: &mut Vec<u8>) {
        let m = &self.model;
        match known.name {
            "positions" | "positions_with_offset" => {
                let first = match known.name {
                    "positions" => 0,
                    _ => m.options.embedding.position_offset,
                };
                for position in positions {
                    out.extend_from_slice(&(first + position).to_le_bytes());
                }
            }
            "sinusoids" => {
                for position in positions {
                    let position = (position + m.options.embedding.position_offset) as f32;
                    for v in sinusoid(position, width as usize) {
                        push(out, known.dtype, v);
                    }
                }
            }
            _ => {
                let longest = positions.iter().max().map_or(0, |last| last + 1);
                let local = known.name.starts_with("rope_local");
                let rope = rope::Frequencies::new(m, width, longest, local);
                let of = if known.name.ends_with("cos") {
                    f32::cos
                } else {
                    f32::sin
                };
                for position in positions {
                    for frequency in &rope.each {
                        let v = of(*position as f32 * frequency) * rope.factor;
                        push(out, known.dtype, v);
                    }
                }
            }
        }
    }

    /// Computes the contents of a table.
    fn table(&self, known: &Const) -> Result<Vec<u8>, DataError> {
        let m = &self.model;
        let mut out = Vec::with_capacity(known.bytes.0 as usize);
        match known.name {
            name if POSITIONAL.contains(&name) => {
                let width = known.bytes.0 / known.dtype.size() / self.seq_len;
                let documents = self.documents.spans(self.seq_len);
                let positions: Vec<u64> = documents.flat_map(|d| 0..d.end - d.start).collect();
                self.positional(known, width, &positions, &mut out);
            }
            "ones" => {
                let n = known.bytes.0 / known.dtype.size();
                (0..n).for_each(|_| push(&mut out, known.dtype, 1.0));
            }
            // The numbers of the rows of a tensor, in order.
            "rows" => {
                let n = known.bytes.0 / known.dtype.size();
                (0..n).for_each(|row| out.extend_from_slice(&row.to_le_bytes()));
            }
            "attention_temperature" => {
                // Also in packed sequences, these are the positions in the whole.
                for position in 0..self.seq_len {
                    push(&mut out, known.dtype, temperature(m, position));
                }
            }
            other => return Err(DataError::UnknownConst(other.to_owned())),
        }
        debug_assert_eq!(out.len() as u64, known.bytes.0);
        Ok(out)
    }

    /// Describes the data for the run's environment.
    #[must_use]
    pub(crate) fn name(&self) -> String {
        match &self.samples {
            Samples::Tokens(t) => t.name().to_owned(),
            Samples::Random { .. } => "random".to_owned(),
        }
    }

    /// Returns a fingerprint, which is equal for equal data.
    #[must_use]
    pub(crate) fn fingerprint(&self) -> String {
        match &self.samples {
            Samples::Tokens(t) => t.fingerprint(),
            Samples::Random { seed } => format!("random {seed}"),
        }
    }
}

/// Returns the factor of the query at a position, in float32 as in the code of Llama 4.
fn temperature(m: &Model, position: u64) -> f32 {
    let floor = m.options.positions.attention_temperature_floor as f32;
    let whole = ((position as f32 + 1.0) / floor).floor();
    whole.ln_1p() * m.options.positions.attention_temperature as f32 + 1.0
}

/// Returns the sines and then the cosines of a position, whose frequencies fall from 1 to 1/10,000
/// (as in tensor2tensor, fairseq and XGLM), and a zero if the width is odd.
fn sinusoid(position: f32, width: usize) -> impl Iterator<Item = f32> {
    let half = width / 2;
    let step = 10_000f64.ln() as f32 / half.saturating_sub(1).max(1) as f32;
    let angle = move |n: usize| position * (n as f32 * -step).exp();
    let sines = (0..half).map(move |n| angle(n).sin());
    let cosines = (0..half).map(move |n| angle(n).cos());
    sines.chain(cosines).chain((width % 2 == 1).then_some(0.0))
}

/// Number of elements that one thread converts at a time.
const PIECE: usize = 1 << 16;

/// Decodes floats of an element type, or the bytes of weights in four bits.
///
/// # Panics
/// For other types: weights, moments and gradients are floats.
pub(crate) fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    assert!(
        dtype.is_float() || dtype == DType::U8,
        "weights, moments and gradients are floats, or bytes of weights in four bits"
    );
    match_dtype!(dtype, T => decoded::<T>(bytes))
}

fn decoded<T: Element>(bytes: &[u8]) -> Vec<f32> {
    let size = size_of::<T>();
    let mut out = vec![0.0; bytes.len() / size];
    out.par_chunks_mut(PIECE)
        .zip(bytes.par_chunks(PIECE * size))
        .for_each(|(out, bytes)| {
            for (x, b) in out.iter_mut().zip(bytes.chunks_exact(size)) {
                *x = bytemuck::pod_read_unaligned::<T>(b).widen();
            }
        });
    out
}

/// Encodes floats as an element type.
pub(crate) fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match_dtype!(dtype, T => encoded::<T>(values))
}

fn encoded<T: Element>(values: &[f32]) -> Vec<u8> {
    let size = size_of::<T>();
    let mut out = vec![0; values.len() * size];
    out.par_chunks_mut(PIECE * size)
        .zip(values.par_chunks(PIECE))
        .for_each(|(out, values)| {
            for (b, v) in out.chunks_exact_mut(size).zip(values) {
                b.copy_from_slice(bytemuck::bytes_of(&T::round(*v)));
            }
        });
    out
}

#[cfg(test)]
mod tests;
