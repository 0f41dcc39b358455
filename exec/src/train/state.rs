//! Reading and writing the state of all ranks, parameter by parameter.

use super::TrainError;
use super::data::{encode, floats};
use super::layout::{Kind, Span, StateLayout};
use shardlab_plan::program::{BufferId, ParamId};
use shardlab_plan::units::DType;
use std::ops::Range;

/// The persistent memory of all ranks, between two steps.
pub trait StateIo {
    /// Reads bytes of a rank's buffer.
    ///
    /// # Errors
    /// When the buffer is not allocated or the range is not inside it.
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

    /// Sets what a rank's buffer holds as soon as it is allocated (optimizer state, which the first step allocates).
    ///
    /// # Errors
    /// When the buffer does not exist or is of another size.
    fn preset(&mut self, rank: u32, buffer: BufferId, data: Vec<u8>) -> Result<(), TrainError>;
}

impl StateLayout {
    /// Element type of a parameter's optimizer weights.
    fn master_dtype(&self, param: ParamId) -> Option<DType> {
        self.ranks
            .iter()
            .flat_map(|r| &r.master)
            .find(|s| s.param == param)
            .map(|s| s.dtype)
    }

    /// Sets a parameter's weights, main and compute weights both, on every rank. `values` yields elements of the
    /// parameter; compute weights are those of the main weights, rounded as a refresh rounds them.
    ///
    /// # Errors
    /// What `values` and the memory report.
    pub fn set_weights(
        &self,
        io: &mut dyn StateIo,
        param: ParamId,
        values: &mut dyn FnMut(Range<u64>) -> Result<Vec<f32>, TrainError>,
    ) -> Result<(), TrainError> {
        let Some(master) = self.master_dtype(param) else {
            return Ok(());
        };
        for (rank, state) in (0u32..).zip(&self.ranks) {
            for span in state.weights.iter().filter(|s| s.param == param) {
                let mut data = encode(&values(span.elements.clone())?, master);
                if span.dtype != master {
                    data = encode(&floats(&data, master), span.dtype);
                }
                io.write(rank, span.buffer, span.offset, &data)?;
            }
        }
        Ok(())
    }

    /// A parameter's optimizer weights, whole.
    ///
    /// # Errors
    /// What the memory reports.
    pub fn weights(&self, io: &mut dyn StateIo, param: ParamId) -> Result<Vec<f32>, TrainError> {
        let mut out = Vec::new();
        for (rank, span) in self.primaries(Kind::Master) {
            if span.param == param {
                out.extend(read_span(io, rank, span)?);
            }
        }
        Ok(out)
    }

    /// Euclidean norm of every parameter's optimizer weights, reduced over ranks in float64.
    ///
    /// # Errors
    /// What the memory reports.
    pub fn weight_norms(
        &self,
        io: &mut dyn StateIo,
        params: usize,
    ) -> Result<Vec<f64>, TrainError> {
        norms(io, &self.primaries(Kind::Master), params)
    }

    /// Likewise for gradients at rest; `None` where they do not outlive the step.
    ///
    /// # Errors
    /// What the memory reports.
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

fn norms(
    io: &mut dyn StateIo,
    spans: &[(u32, &Span)],
    params: usize,
) -> Result<Vec<f64>, TrainError> {
    let mut squares = vec![0.0; params];
    for (rank, span) in spans {
        let values = read_span(io, *rank, span)?;
        squares[span.param.index()] += values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    }
    Ok(squares.into_iter().map(f64::sqrt).collect())
}

fn read_span(io: &mut dyn StateIo, rank: u32, span: &Span) -> Result<Vec<f32>, TrainError> {
    let bytes = io.read(rank, span.buffer, span.offset, span.bytes())?;
    Ok(floats(&bytes, span.dtype))
}
