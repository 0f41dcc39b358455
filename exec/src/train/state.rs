//! Reading and writing the state of all ranks, parameter by parameter.

use super::TrainError;
use super::data::{encode, floats};
use super::layout::{Kind, Span, StateLayout};
use crate::base::packed;
use crate::process::{Reader, Writer};
use rayon::iter::ParallelIterator;
use rayon::slice::ParallelSlice;
use shardlab_plan::ir::{BufferId, DType, Param, ParamId};
use std::ops::Range;

/// Persistent memory of ranks, between two steps. If a run has several processes, each has a share
/// of the ranks, and all call the same functions in the same order.
pub trait StateIo {
    /// Returns the ranks whose memory this is.
    fn local(&self) -> Range<u32>;

    /// Gathers the data of all processes, in process order: on all processes, or only on process 0
    /// (the others get nothing).
    ///
    /// # Errors
    /// If a process is missing or has failed.
    fn share(&mut self, mine: Vec<u8>, _with: With) -> Result<Vec<Vec<u8>>, TrainError> {
        Ok(vec![mine])
    }

    /// Reads bytes of a rank's buffer.
    ///
    /// # Errors
    /// If the buffer is not allocated or the range is not within it.
    fn read(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, TrainError>;

    /// Writes bytes of a rank's buffer.
    ///
    /// # Errors
    /// As [`StateIo::read`].
    fn write(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        data: &[u8],
    ) -> Result<(), TrainError>;

    /// Sets the contents of a rank's buffer at its next allocation (optimizer state, which the
    /// first step allocates).
    ///
    /// # Errors
    /// If the buffer does not exist or has another size.
    fn preset(&mut self, rank: u32, buffer: BufferId, data: Vec<u8>) -> Result<(), TrainError>;
}

/// Receivers of gathered data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// All processes.
    All,
    /// Process 0 only.
    Leader,
}

impl StateLayout {
    /// Returns the element type of a parameter's optimizer weights.
    fn master_dtype(&self, param: ParamId) -> Option<DType> {
        self.ranks
            .iter()
            .flat_map(|r| &r.master)
            .find(|s| s.param == param)
            .map(|s| s.dtype)
    }

    /// Sets a parameter's weights, main and compute weights, on every rank whose memory this is.
    /// `values` returns elements of the parameter; compute weights are the main weights, rounded as
    /// by a refresh.
    ///
    /// # Errors
    /// If `values` fails, or a buffer cannot be written.
    pub(crate) fn set_weights(
        &self,
        io: &mut dyn StateIo,
        param: ParamId,
        values: &mut dyn FnMut(Range<u64>) -> Result<Vec<f32>, TrainError>,
    ) -> Result<(), TrainError> {
        let Some(master) = self.master_dtype(param) else {
            return Ok(());
        };
        let local = io.local();
        let ranks = (0u32..).zip(&self.ranks);
        for (rank, state) in ranks.filter(|(r, _)| local.contains(r)) {
            // Main and compute weights of the same elements are written together: generating values
            // takes longer than writing them.
            let mut spans: Vec<&Span> = state.weights.iter().filter(|s| s.param == param).collect();
            spans.sort_by_key(|s| (s.elements.start, s.elements.end));
            for same in spans.chunk_by(|a, b| a.elements == b.elements) {
                for elements in pieces(&same[0].elements) {
                    let data = encode(&values(elements.clone())?, master);
                    for span in same {
                        let offset = (elements.start - span.elements.start) * span.dtype.size();
                        let rounded = (span.dtype != master)
                            .then(|| encode(&floats(&data, master), span.dtype));
                        let data = rounded.as_deref().unwrap_or(&data);
                        io.write(rank, span.buffer, span.offset + offset, data)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Like [`StateLayout::set_weights`]; a packed weight is quantized first, as a whole.
    ///
    /// # Errors
    /// If `values` fails, or a buffer cannot be written.
    pub(crate) fn set_param(
        &self,
        io: &mut dyn StateIo,
        (id, param): (ParamId, &Param),
        values: &mut dyn FnMut(Range<u64>) -> Result<Vec<f32>, TrainError>,
    ) -> Result<(), TrainError> {
        let Some(of) = &param.packed else {
            return self.set_weights(io, id, values);
        };
        let bytes = packed::quantize(of, &values(0..of.numel())?);
        let byte = |at: u64| f32::from(bytes.get(at as usize).copied().unwrap_or(0));
        self.set_weights(io, id, &mut |range| Ok(range.map(byte).collect()))
    }

    /// Returns a parameter's whole optimizer weights on process 0, and nothing on the others. Those
    /// of a packed weight are its bytes.
    ///
    /// # Errors
    /// If a buffer cannot be read, or a process is missing or has failed.
    pub fn weights(&self, io: &mut dyn StateIo, param: ParamId) -> Result<Vec<f32>, TrainError> {
        self.weights_with(io, param, With::Leader)
    }

    /// Returns a parameter's whole optimizer weights on all processes, or on process 0.
    ///
    /// # Errors
    /// If a buffer cannot be read, or a process is missing or has failed.
    pub(super) fn weights_with(
        &self,
        io: &mut dyn StateIo,
        param: ParamId,
        with: With,
    ) -> Result<Vec<f32>, TrainError> {
        let mut spans = self.primaries(Kind::Master);
        spans.retain(|(_, s)| s.param == param);
        let parts = from_owners(io, &spans, with, |values| encode(values, DType::F32))?;
        Ok(parts.iter().flat_map(|p| floats(p, DType::F32)).collect())
    }

    /// Returns the Euclidean norm of every parameter's optimizer weights, reduced over ranks in
    /// float64.
    ///
    /// # Errors
    /// If a buffer cannot be read, or a process is missing or has failed.
    pub fn weight_norms(
        &self,
        io: &mut dyn StateIo,
        params: usize,
    ) -> Result<Vec<f64>, TrainError> {
        norms(io, &self.primaries(Kind::Master), params)
    }

    /// Returns the norms of persistent gradients; `None` if gradients do not persist.
    ///
    /// # Errors
    /// If a buffer cannot be read, or a process is missing or has failed.
    pub fn grad_norms(
        &self,
        io: &mut dyn StateIo,
        params: usize,
    ) -> Result<Option<Vec<f64>>, TrainError> {
        let spans = self.primary_grads();
        if spans.is_empty() {
            return Ok(None);
        }
        norms(io, &spans, params).map(Some)
    }
}

/// Number of elements that one thread sums.
const SUMMED: usize = 1 << 16;

/// Number of elements that are generated, converted and written at a time: a shard of a large model
/// may not fit into host memory.
const PIECE: u64 = 1 << 23;

fn pieces(elements: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let Range { start, end } = *elements;
    (start..end)
        .step_by(PIECE as usize)
        .map(move |from| from..(from + PIECE).min(end))
}

fn norms(
    io: &mut dyn StateIo,
    spans: &[(u32, &Span)],
    params: usize,
) -> Result<Vec<f64>, TrainError> {
    // Summed in the order of the spans, whichever process has them, so that the bits do not depend
    // on the number of processes.
    let parts = from_owners(io, spans, With::All, |values| {
        // By pieces of equal length, so that the bits do not depend on the number of threads.
        let square = |p: &[f32]| p.iter().map(|v| f64::from(*v).powi(2)).sum();
        let sums: Vec<f64> = values.par_chunks(SUMMED).map(square).collect();
        let sum: f64 = sums.iter().sum();
        sum.to_le_bytes().to_vec()
    })?;
    let mut squares = vec![0.0; params];
    for ((_, span), part) in spans.iter().zip(parts) {
        squares[span.param.index()] += Reader(&part).f64().unwrap_or(f64::NAN);
    }
    Ok(squares.into_iter().map(f64::sqrt).collect())
}

/// Computes `make` of the elements of every span on the process that has them. Returns the results
/// in the order of the spans, or nothing on processes that do not receive them.
fn from_owners(
    io: &mut dyn StateIo,
    spans: &[(u32, &Span)],
    with: With,
    make: impl Fn(&[f32]) -> Vec<u8>,
) -> Result<Vec<Vec<u8>>, TrainError> {
    let local = io.local();
    let mut mine = Writer::default();
    for (rank, span) in spans.iter().filter(|(r, _)| local.contains(r)) {
        mine.bytes(&make(&read_span(io, *rank, span)?));
    }
    let all = io.share(mine.0, with)?;
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let share = (local.len() as u32).max(1);
    let mut parts: Vec<Reader<'_>> = all.iter().map(|d| Reader(d)).collect();
    let one = |(rank, _): &(u32, &Span)| {
        let part = parts.get_mut((rank / share) as usize)?.bytes()?;
        Some(part.to_vec())
    };
    let found: Option<Vec<_>> = spans.iter().map(one).collect();
    found.ok_or(TrainError::OtherLayout)
}

fn read_span(io: &mut dyn StateIo, rank: u32, span: &Span) -> Result<Vec<f32>, TrainError> {
    let bytes = io.read(rank, span.buffer, span.offset, span.bytes())?;
    Ok(floats(&bytes, span.dtype))
}
