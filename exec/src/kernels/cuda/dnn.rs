//! Attention and convolutions by cuDNN's kernels.

mod backend;
mod choice;
mod convolution;
mod graph;
mod library;
#[cfg(test)]
mod tests;

use super::cache::Cache;
use super::codegen::Request;
use super::error::ErrorKind;
use super::{Agree, Choose};
use crate::kernels::strides;
use backend::{Machine, Plan, Wants};
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
pub(in crate::kernels) use graph::Direction;
use graph::{Graph, Kind, Operand, Shape};
use shardlab_plan::ir::{AttentionShape, BodyOp, DType, Place, Slot};

/// Attention that is requested from the library.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Attention {
    /// Position `i` sees positions up to `i`.
    pub(in crate::kernels) causal: bool,
    /// Factor of the scores.
    pub(in crate::kernels) scale: f32,
    /// Whether to compute the gradients of queries, keys and values instead of the result.
    pub(in crate::kernels) backward: bool,
}

/// Where operands are: place and first element.
type Places = Vec<(Operand, Place, u64)>;

/// The library, open on a context.
pub(super) struct Dnn {
    api: &'static library::Api,
    handle: sys::cudnnHandle_t,
    version: usize,
    /// GPU and library version, for which choices are kept.
    machine: String,
    ordered: bool,
    tf32: bool,
    choose: Choose,
}

// SAFETY: the handle may move between threads; one uses it at a time.
unsafe impl Send for Dnn {}

/// A graph that is ready to be launched.
pub(super) struct Ready {
    graph: Graph,
    plan: Plan,
    places: Places,
    /// Constants, by tensor: the library reads them from host memory.
    values: Vec<f32>,
    /// Scalars (the random state of dropout) that are written as zeros.
    pub(super) zeros: Vec<(Place, u64, u64)>,
    pub(super) describe: String,
}

impl Dnn {
    /// Opens the library for the current context.
    ///
    /// # Errors
    /// A message, if it cannot be used.
    pub(super) fn open(
        gpu: &str,
        ordered: bool,
        tf32: bool,
        choose: Choose,
    ) -> Result<Self, String> {
        let api = library::api()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is there; the handle is written before it is read.
        let (status, version) = unsafe { ((api.create)(&raw mut handle), (api.version)()) };
        if status != 0 {
            return Err(format!("cudnnCreate: status {status}"));
        }
        Ok(Self {
            api,
            handle,
            version,
            machine: format!("{gpu} cudnn {version}"),
            ordered,
            tf32,
            choose,
        })
    }

    /// Prepares a body's attention, if the library has a kernel for it.
    pub(super) fn attention(
        &self,
        req: &Request<'_>,
        op: &BodyOp,
        attention: Attention,
    ) -> Result<Ready, ErrorKind> {
        let (graph, places) = graph_of(req, op, attention, self.ordered)?;
        let wants = Wants {
            ordered: self.ordered,
            exact: false,
            workspace: u64::MAX,
        };
        let mut zeros = Vec::new();
        if !attention.backward {
            for s in op.outputs.iter().skip(2) {
                let size = req.arg(s.place)?.dtype.size();
                zeros.push((s.place, s.offset * size, strides::numel(s) as u64 * size));
            }
        }
        let on = Machine::Handle(self.handle);
        let plan = backend::offers(&graph, on, wants, 1)?.remove(0);
        Ok(self.ready("attention", graph, plan, places, zeros))
    }

    /// Prepares a body's convolution, if the library has a kernel for it that adds up in a fixed
    /// order, multiplies float32 as such unless TF32 is allowed, and needs at most `workspace`
    /// bytes: the fastest of those.
    pub(super) fn convolution(
        &self,
        req: &Request<'_>,
        op: &BodyOp,
        direction: Direction,
        workspace: u64,
        cache: &Cache,
        agree: Option<&dyn Agree>,
    ) -> Result<Ready, ErrorKind> {
        let (graph, places, dtype) = convolution::graph_of(req, op, direction)?;
        let wants = Wants {
            ordered: true,
            exact: dtype == DType::F32 && !self.tf32,
            workspace: workspace.saturating_sub(graph.scratch),
        };
        let (plan, choice) = self.fastest(&graph, wants, cache, agree)?;
        let what = format!("convolution, {choice}");
        Ok(self.ready(&what, graph, plan, places, Vec::new()))
    }

    fn ready(
        &self,
        what: &str,
        graph: Graph,
        plan: Plan,
        places: Places,
        zeros: Vec<(Place, u64, u64)>,
    ) -> Ready {
        let values = graph.tensors.iter().map(|t| match t.kind {
            Kind::Value(x) => x,
            _ => 0.0,
        });
        Ready {
            values: values.collect(),
            places,
            zeros,
            describe: format!(
                "cuDNN {} {what}, {:.1} MiB of workspace",
                self.version,
                (graph.scratch + plan.workspace) as f64 / 1_048_576.0
            ),
            graph,
            plan,
        }
    }

    /// Makes the library run later calls on a stream.
    fn on(&self, stream: CUstream) -> Result<(), ErrorKind> {
        // SAFETY: handle and stream are live.
        match unsafe { (self.api.set_stream)(self.handle, stream.cast()) } {
            0 => Ok(()),
            status => Err(ErrorKind::Driver {
                call: "cudnnSetStream",
                reason: format!("status {status}"),
            }),
        }
    }

    /// Launches a graph.
    ///
    /// # Safety
    /// `address` gives the live device memory of the operands, `scratch` has
    /// [`Ready::scratch`] bytes.
    pub(super) unsafe fn launch(
        &self,
        a: &Ready,
        address: impl Fn(Place) -> (u64, DType),
        scratch: u64,
        stream: CUstream,
    ) -> Result<(), ErrorKind> {
        self.on(stream)?;
        let at = |i: usize, kind: Kind| match kind {
            Kind::Virtual => 0,
            Kind::Scratch(n) => scratch + n,
            Kind::Value(_) => (&raw const a.values[i]) as u64,
            Kind::Operand(o) => {
                let found = a.places.iter().find(|p| p.0 == o);
                found.map_or(0, |&(_, place, first)| {
                    let (at, dtype) = address(place);
                    at + first * dtype.size()
                })
            }
        };
        let workspace = scratch + a.graph.scratch;
        // SAFETY: the caller's contract.
        unsafe { a.plan.execute(self.handle, &a.graph, at, workspace) }
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.api.destroy)(self.handle) };
    }
}

impl Ready {
    /// Returns whether the result is in the scratch memory's first bytes, in the factors' type, and
    /// has yet to be converted.
    pub(super) fn is_narrow(&self) -> bool {
        convolution::is_narrow(&self.graph)
    }

    /// Returns the bytes of scratch memory.
    pub(super) fn scratch(&self) -> u64 {
        self.graph.scratch + self.plan.workspace
    }
}

/// Returns the graph of a body's attention, and where its operands are.
fn graph_of(
    req: &Request<'_>,
    op: &BodyOp,
    attention: Attention,
    ordered: bool,
) -> Result<(Graph, Places), ErrorKind> {
    use Operand as O;
    let no = |why: &str| ErrorKind::Unsupported(why.to_owned());
    let (ins, outs): (&[O], &[O]) = if attention.backward {
        (
            &[O::DO, O::Q, O::K, O::V, O::O, O::Stats],
            &[O::DQ, O::DK, O::DV],
        )
    } else {
        (&[O::Q, O::K, O::V], &[O::O, O::Stats])
    };
    if op.inputs.len() < ins.len() || op.outputs.len() < outs.len() {
        return Err(no("attention lacks operands"));
    }
    let all: Vec<(O, &Slot)> = ins
        .iter()
        .zip(&op.inputs)
        .chain(outs.iter().zip(&op.outputs))
        .map(|(&o, s)| (o, s))
        .collect();
    let slot = |o: O| all.iter().find(|a| a.0 == o).map(|a| a.1);
    let (Some(q), Some(k), Some(lse)) = (slot(O::Q), slot(O::K), slot(O::Stats)) else {
        return Err(no("attention lacks operands"));
    };
    let sizes = AttentionShape::of(&q.shape, &k.shape, attention.causal);
    let (Some(sizes), &[.., stat]) = (sizes, &lse.shape[..]) else {
        return Err(no("attention works on four dimensions"));
    };
    let dtype = req.arg(q.place)?.dtype;
    for (o, s) in &all {
        let arg = req.arg(s.place)?;
        let want = if *o == O::Stats { DType::F32 } else { dtype };
        if arg.dtype != want {
            return Err(no("attention's operands have different types"));
        }
        let aligned = arg.align >= 16 && (s.offset * arg.dtype.size()).is_multiple_of(16);
        if *o != O::Stats && (!aligned || strides::of(s).last() != Some(&1)) {
            return Err(no("attention's operands are not aligned to 16 bytes"));
        }
    }
    if dtype.size() != 2 || !sizes.head_dim.is_multiple_of(8) || sizes.head_dim > 128 {
        return Err(no(
            "cuDNN's attention takes 16-bit types and heads of up to 128",
        ));
    }
    let shape = Shape {
        sizes,
        stat: stat as i64,
        scale: attention.scale,
        dtype,
    };
    let strides = |o: O| {
        let st = slot(o).map(strides::of).unwrap_or_default();
        let mut out = [0; 4];
        for (o, s) in out.iter_mut().zip(st) {
            *o = s as i64;
        }
        out
    };
    let graph = if attention.backward {
        graph::backward(&shape, &strides, ordered)
    } else {
        graph::forward(&shape, &strides)
    };
    let graph = graph.ok_or_else(|| no("cuDNN does not take this type"))?;
    let places = all.iter().map(|(o, s)| (*o, s.place, s.offset)).collect();
    Ok((graph, places))
}
