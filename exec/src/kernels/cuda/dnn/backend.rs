//! cuDNN's backend descriptors.

use super::super::error::ErrorKind;
use super::graph::{Direction, Graph, Kind, Mode, Node, Tensor, Ty};
use super::library::{Api, Status, api, last_error};
use crate::base::element;
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t as Descriptor, cudnnPointwiseMode_t,
};
use std::ffi::c_void;
use std::sync::Arc;

/// A descriptor that is destroyed when it is dropped.
pub(super) struct Desc {
    raw: cudnnBackendDescriptor_t,
    api: &'static Api,
}

// SAFETY: a descriptor may be used from any thread, by one at a time.
unsafe impl Send for Desc {}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.api.drop)(self.raw) };
    }
}

fn check(api: &Api, call: &'static str, status: Status) -> Result<(), ErrorKind> {
    if status == 0 {
        return Ok(());
    }
    Err(ErrorKind::Driver {
        call,
        reason: format!("status {status}: {}", last_error(api, 600)),
    })
}

impl Desc {
    pub(super) fn new(kind: Descriptor) -> Result<Self, ErrorKind> {
        let api = api().map_err(|e| ErrorKind::Library(e.to_owned()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: written before it is read.
        let status = unsafe { (api.new)(kind, &raw mut raw) };
        check(api, "cudnnBackendCreateDescriptor", status)?;
        Ok(Self { raw, api })
    }

    pub(super) fn raw(&self) -> cudnnBackendDescriptor_t {
        self.raw
    }

    /// Sets an attribute of `T`s whose type the library calls `ty`.
    pub(super) fn set<T: Copy>(&self, name: Name, ty: Type, values: &[T]) -> Result<(), ErrorKind> {
        let count = values.len() as i64;
        // SAFETY: the values live through the call, which copies as many as the count says.
        let status = unsafe { (self.api.set)(self.raw, name, ty, count, values.as_ptr().cast()) };
        if status == 0 {
            return Ok(());
        }
        Err(ErrorKind::Driver {
            call: "cudnnBackendSetAttribute",
            reason: format!("{name:?}: status {status}"),
        })
    }

    pub(super) fn refer(&self, name: Name, to: &Self) -> Result<(), ErrorKind> {
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[to.raw])
    }

    pub(super) fn finish(&self) -> Result<(), ErrorKind> {
        // SAFETY: the descriptor is live.
        let status = unsafe { (self.api.finish)(self.raw) };
        check(self.api, "cudnnBackendFinalize", status)
    }

    /// Reads up to `out.len()` values of an attribute; returns how many there are.
    pub(super) fn get<T: Copy>(
        &self,
        name: Name,
        ty: Type,
        out: &mut [T],
    ) -> Result<i64, ErrorKind> {
        let mut count = 0;
        let asked = out.len() as i64;
        // Asked for none, the library only counts if there is no room at all.
        let room = match out {
            [] => std::ptr::null_mut(),
            _ => out.as_mut_ptr().cast::<c_void>(),
        };
        // SAFETY: there is room for as many as are asked for.
        let status = unsafe { (self.api.get)(self.raw, name, ty, asked, &raw mut count, room) };
        check(self.api, "cudnnBackendGetAttribute", status)?;
        Ok(count)
    }
}

fn data_type(ty: Ty) -> Result<sys::cudnnDataType_t, ErrorKind> {
    use sys::cudnnDataType_t as D;
    match ty {
        Ty::Of(dtype) => element::cuda(dtype)
            .dnn
            .ok_or_else(|| ErrorKind::Unsupported(format!("cuDNN has no tensors of type {dtype}"))),
        Ty::I32 => Ok(D::CUDNN_DATA_INT32),
        Ty::Bool => Ok(D::CUDNN_DATA_BOOLEAN),
    }
}

fn tensor(uid: i64, t: &Tensor) -> Result<Desc, ErrorKind> {
    let d = Desc::new(Descriptor::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    d.set(
        Name::CUDNN_ATTR_TENSOR_DATA_TYPE,
        Type::CUDNN_TYPE_DATA_TYPE,
        &[data_type(t.ty)?],
    )?;
    let int = Type::CUDNN_TYPE_INT64;
    d.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, int, &t.dims)?;
    d.set(Name::CUDNN_ATTR_TENSOR_STRIDES, int, &t.strides)?;
    d.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, int, &[uid])?;
    d.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, int, &[t.align])?;
    let flag = Type::CUDNN_TYPE_BOOLEAN;
    if t.kind == Kind::Virtual {
        d.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, flag, &[true])?;
    }
    if let Kind::Value(_) = t.kind {
        d.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, flag, &[true])?;
    }
    d.finish()?;
    Ok(d)
}

fn mode(m: Mode) -> cudnnPointwiseMode_t {
    use cudnnPointwiseMode_t as P;
    match m {
        Mode::Mul => P::CUDNN_POINTWISE_MUL,
        Mode::Sub => P::CUDNN_POINTWISE_SUB,
        Mode::Add => P::CUDNN_POINTWISE_ADD,
        Mode::Div => P::CUDNN_POINTWISE_DIV,
        Mode::Exp => P::CUDNN_POINTWISE_EXP,
        Mode::Log => P::CUDNN_POINTWISE_LOG,
        Mode::Identity => P::CUDNN_POINTWISE_IDENTITY,
        Mode::Index(_) => P::CUDNN_POINTWISE_GEN_INDEX,
        Mode::GreaterEqual => P::CUDNN_POINTWISE_CMP_GE,
        Mode::Select => P::CUDNN_POINTWISE_BINARY_SELECT,
    }
}

/// Returns the description of a convolution of two dimensions and stride 1.
fn convolution(pad: i64) -> Result<Desc, ErrorKind> {
    let how = Desc::new(Descriptor::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
    let int = Type::CUDNN_TYPE_INT64;
    let float = sys::cudnnDataType_t::CUDNN_DATA_FLOAT;
    how.set(
        Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE,
        Type::CUDNN_TYPE_DATA_TYPE,
        &[float],
    )?;
    how.set(
        Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE,
        Type::CUDNN_TYPE_CONVOLUTION_MODE,
        &[sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION],
    )?;
    how.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, int, &[2i64])?;
    how.set(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, int, &[pad; 2])?;
    how.set(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, int, &[pad; 2])?;
    how.set(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, int, &[1i64; 2])?;
    how.set(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, int, &[1i64; 2])?;
    how.finish()?;
    Ok(how)
}

/// Returns a direction's operation and its attributes: factors of the result and of the
/// accumulator, description, weights, input, result.
fn names(direction: Direction) -> (Descriptor, [Name; 6]) {
    match direction {
        Direction::Forward => (
            Descriptor::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
            ],
        ),
        Direction::Image => (
            Descriptor::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
            ],
        ),
        Direction::Filter => (
            Descriptor::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
            ],
        ),
    }
}

/// Returns a node's operation; descriptors that it refers to go to `keep`.
fn operation(node: &Node, tensors: &[Desc], keep: &mut Vec<Desc>) -> Result<Desc, ErrorKind> {
    let op = match *node {
        Node::Matmul { a, b, c } => matmul([a, b, c].map(|i| &tensors[i]), keep)?,
        Node::Pointwise { .. } => pointwise(node, tensors, keep)?,
        Node::Reduce { max, x, y } => reduction(max, [x, y].map(|i| &tensors[i]), keep)?,
        Node::Reshape { x, y } => {
            let op = Desc::new(Descriptor::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
            op.refer(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &tensors[x])?;
            op.refer(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &tensors[y])?;
            op
        }
        Node::Convolution {
            direction,
            image,
            filter,
            result,
            pad,
        } => {
            let how = convolution(pad)?;
            let (kind, [alpha, beta, desc, w, x, y]) = names(direction);
            let op = Desc::new(kind)?;
            op.set(alpha, Type::CUDNN_TYPE_FLOAT, &[1.0f32])?;
            op.set(beta, Type::CUDNN_TYPE_FLOAT, &[0.0f32])?;
            op.refer(desc, &how)?;
            op.refer(w, &tensors[filter])?;
            op.refer(x, &tensors[image])?;
            op.refer(y, &tensors[result])?;
            keep.push(how);
            op
        }
    };
    op.finish()?;
    Ok(op)
}

fn matmul([a, b, c]: [&Desc; 3], keep: &mut Vec<Desc>) -> Result<Desc, ErrorKind> {
    let how = Desc::new(Descriptor::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
    how.set(
        Name::CUDNN_ATTR_MATMUL_COMP_TYPE,
        Type::CUDNN_TYPE_DATA_TYPE,
        &[sys::cudnnDataType_t::CUDNN_DATA_FLOAT],
    )?;
    how.finish()?;
    let op = Desc::new(Descriptor::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &how)?;
    keep.push(how);
    Ok(op)
}

fn pointwise(node: &Node, tensors: &[Desc], keep: &mut Vec<Desc>) -> Result<Desc, ErrorKind> {
    let Node::Pointwise {
        mode: m,
        x,
        b,
        t,
        y,
        compute,
    } = *node
    else {
        unreachable!("only called with pointwise nodes")
    };
    let how = Desc::new(Descriptor::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
    how.set(
        Name::CUDNN_ATTR_POINTWISE_MODE,
        Type::CUDNN_TYPE_POINTWISE_MODE,
        &[mode(m)],
    )?;
    how.set(
        Name::CUDNN_ATTR_POINTWISE_MATH_PREC,
        Type::CUDNN_TYPE_DATA_TYPE,
        &[data_type(compute)?],
    )?;
    if let Mode::Index(axis) = m {
        how.set(
            Name::CUDNN_ATTR_POINTWISE_AXIS,
            Type::CUDNN_TYPE_INT64,
            &[axis],
        )?;
    }
    how.finish()?;
    let op = Desc::new(Descriptor::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &how)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &tensors[x])?;
    op.refer(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &tensors[y])?;
    if let Some(b) = b {
        op.refer(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &tensors[b])?;
    }
    if let Some(t) = t {
        op.refer(Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &tensors[t])?;
    }
    for name in [
        Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1,
        Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2,
    ] {
        op.set(name, Type::CUDNN_TYPE_FLOAT, &[1.0f32])?;
    }
    keep.push(how);
    Ok(op)
}

fn reduction(max: bool, [x, y]: [&Desc; 2], keep: &mut Vec<Desc>) -> Result<Desc, ErrorKind> {
    let how = Desc::new(Descriptor::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
    how.set(
        Name::CUDNN_ATTR_REDUCTION_COMP_TYPE,
        Type::CUDNN_TYPE_DATA_TYPE,
        &[sys::cudnnDataType_t::CUDNN_DATA_FLOAT],
    )?;
    let by = if max {
        sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_MAX
    } else {
        sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_ADD
    };
    how.set(
        Name::CUDNN_ATTR_REDUCTION_OPERATOR,
        Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
        &[by],
    )?;
    how.finish()?;
    let op = Desc::new(Descriptor::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &how)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x)?;
    op.refer(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y)?;
    keep.push(how);
    Ok(op)
}

/// Target of plans: a GPU, or the saved properties of one.
#[derive(Clone, Copy)]
pub(super) enum Machine<'a> {
    Handle(sys::cudnnHandle_t),
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "plans without a GPU are a test's business")
    )]
    Saved(&'a Desc),
}

/// A plan that runs a graph.
pub(super) struct Plan {
    plan: Desc,
    /// Bytes that the plan itself needs.
    pub(super) workspace: u64,
    _config: Desc,
    _built: Arc<Built>,
}

/// A graph as the library holds it.
struct Built {
    graph: Desc,
    /// What the graph refers to.
    _keep: Vec<Desc>,
}

// SAFETY: what is shared of a graph is that it lives: nothing is read or changed once it is built.
unsafe impl Sync for Built {}

fn build(g: &Graph, on: Machine<'_>) -> Result<Built, ErrorKind> {
    let mut tensors = Vec::new();
    for (i, t) in g.tensors.iter().enumerate() {
        tensors.push(tensor(i as i64 + 1, t)?);
    }
    let mut keep = Vec::new();
    let mut ops = Vec::new();
    for (i, node) in g.nodes.iter().enumerate() {
        let made = operation(node, &tensors, &mut keep);
        ops.push(made.map_err(|e| match e {
            ErrorKind::Driver { call, reason } => ErrorKind::Driver {
                call,
                reason: format!("node {i} {node:?}: {reason}"),
            },
            other => other,
        })?);
    }
    let graph = Desc::new(Descriptor::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    let raw: Vec<_> = ops.iter().map(Desc::raw).collect();
    graph.set(
        Name::CUDNN_ATTR_OPERATIONGRAPH_OPS,
        Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
        &raw,
    )?;
    if let Machine::Handle(handle) = on {
        graph.set(
            Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
            Type::CUDNN_TYPE_HANDLE,
            &[handle],
        )?;
    }
    graph.finish()?;
    keep.extend(ops);
    keep.extend(tensors);
    Ok(Built { graph, _keep: keep })
}

/// Returns the library's verdict on the configurations that it proposes for a graph, in its own
/// words.
#[cfg(test)]
pub(super) fn verdict(g: &Graph, on: Machine<'_>) -> Result<String, ErrorKind> {
    let built = build(g, on)?;
    let mode = sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
    if !configurations(&built.graph, on, mode)?.is_empty() {
        return Ok("ready".to_owned());
    }
    let text = api().ok().map(|a| last_error(a, 1 << 16));
    Ok(text.unwrap_or_default())
}

/// Returns how many configurations the library proposes for a graph, and how many of them meet all
/// requirements except the workspace.
#[cfg(test)]
pub(super) fn proposals(
    g: &Graph,
    on: Machine<'_>,
    wants: Wants,
) -> Result<(usize, usize), ErrorKind> {
    let built = build(g, on)?;
    let (mut all, mut good) = (0, 0);
    for mode in [
        sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A,
        sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_FALLBACK,
    ] {
        for config in configurations(&built.graph, on, mode)? {
            all += 1;
            good += usize::from(wants.allow(notes(&config).as_deref()));
        }
    }
    Ok((all, good))
}

/// Requirements on a kernel in addition to the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wants {
    /// Its sums have a fixed order.
    pub(super) ordered: bool,
    /// Whether float32 is multiplied as such.
    pub(super) exact: bool,
    /// Maximum bytes of workspace.
    pub(super) workspace: u64,
}

/// Returns the first `most` of the library's engine configurations that work and meet the
/// requirements, its favourite first; at least one.
pub(super) fn offers(
    g: &Graph,
    on: Machine<'_>,
    wants: Wants,
    most: usize,
) -> Result<Vec<Plan>, ErrorKind> {
    let built = Arc::new(build(g, on)?);
    let mut found = Vec::new();
    let mut trouble = ErrorKind::Unsupported("cuDNN has no engine for this".to_owned());
    for mode in [
        sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A,
        sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_FALLBACK,
    ] {
        let configs = match configurations(&built.graph, on, mode) {
            Ok(c) => c,
            Err(e) => {
                trouble = e;
                continue;
            }
        };
        for config in configs {
            if found.len() == most {
                return Ok(found);
            }
            if !wants.allow(notes(&config).as_deref()) {
                trouble = ErrorKind::Unsupported(
                    "cuDNN has only nondeterministic kernels, or kernels that round their inputs"
                        .to_owned(),
                );
                continue;
            }
            match executable(&config, on) {
                Ok((_, workspace)) if workspace > wants.workspace => {
                    trouble = ErrorKind::Unsupported(format!(
                        "cuDNN's kernel takes {workspace} bytes of workspace, more than {}",
                        wants.workspace
                    ));
                }
                Ok((plan, workspace)) => found.push(Plan {
                    plan,
                    workspace,
                    _config: config,
                    _built: Arc::clone(&built),
                }),
                Err(e) => trouble = e,
            }
        }
    }
    if found.is_empty() {
        return Err(trouble);
    }
    Ok(found)
}

fn heuristic(
    graph: &Desc,
    on: Machine<'_>,
    mode: sys::cudnnBackendHeurMode_t,
) -> Result<Desc, ErrorKind> {
    let h = Desc::new(Descriptor::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    h.refer(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?;
    h.set(
        Name::CUDNN_ATTR_ENGINEHEUR_MODE,
        Type::CUDNN_TYPE_HEUR_MODE,
        &[mode],
    )?;
    if let Machine::Saved(properties) = on {
        h.refer(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, properties)?;
    }
    h.finish()?;
    Ok(h)
}

fn proposed(h: &Desc) -> Result<i64, ErrorKind> {
    let mut none: [cudnnBackendDescriptor_t; 0] = [];
    h.get(
        Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
        Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
        &mut none,
    )
}

fn configurations(
    graph: &Desc,
    on: Machine<'_>,
    mode: sys::cudnnBackendHeurMode_t,
) -> Result<Vec<Desc>, ErrorKind> {
    let h = heuristic(graph, on, mode)?;
    let count = proposed(&h)?;
    let mut found = Vec::new();
    for _ in 0..count {
        found.push(Desc::new(Descriptor::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?);
    }
    let mut raw: Vec<_> = found.iter().map(Desc::raw).collect();
    let count = h.get(
        Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
        Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
        &mut raw,
    )?;
    found.truncate(count as usize);
    Ok(found)
}

impl Wants {
    /// Returns whether a kernel with these notes meets the requirements; one without notes does not
    /// if there are any.
    fn allow(self, notes: Option<&[u32]>) -> bool {
        use sys::cudnnBackendNumericalNote_t as Note;
        let mut refused = Vec::new();
        if self.ordered {
            refused.push(Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
        }
        if self.exact {
            refused.extend([
                Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
                Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
                Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
            ]);
        }
        match notes {
            Some(notes) => !refused.iter().any(|r| notes.contains(&(*r as u32))),
            None => refused.is_empty(),
        }
    }
}

/// Returns the library's notes on a configuration's numerics.
fn notes(config: &Desc) -> Option<Vec<u32>> {
    let read = || -> Result<Vec<u32>, ErrorKind> {
        let engine = Desc::new(Descriptor::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
        let mut raw = [engine.raw()];
        config.get(
            Name::CUDNN_ATTR_ENGINECFG_ENGINE,
            Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
            &mut raw,
        )?;
        // Notes are numbers; a closed list of ours could lack one.
        let mut notes = [u32::MAX; 32];
        let count = engine.get(
            Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
            Type::CUDNN_TYPE_NUMERICAL_NOTE,
            &mut notes,
        )?;
        Ok(notes[..(count.max(0) as usize).min(32)].to_vec())
    };
    read().ok()
}

fn executable(config: &Desc, on: Machine<'_>) -> Result<(Desc, u64), ErrorKind> {
    let plan = Desc::new(Descriptor::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    plan.refer(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config)?;
    match on {
        Machine::Handle(handle) => plan.set(
            Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
            Type::CUDNN_TYPE_HANDLE,
            &[handle],
        )?,
        Machine::Saved(properties) => {
            plan.refer(Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, properties)?;
        }
    }
    plan.finish()?;
    let mut bytes = [0i64];
    plan.get(
        Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
        Type::CUDNN_TYPE_INT64,
        &mut bytes,
    )?;
    Ok((plan, bytes[0].max(0) as u64))
}

impl Plan {
    /// Launches the plan on the handle's stream.
    ///
    /// # Safety
    /// `addresses` gives for each tensor of the graph that is in memory, by its index and
    /// kind, an address of that much live device memory (for constants, a host address), and
    /// `workspace` as many bytes as the plan needs.
    pub(super) unsafe fn execute(
        &self,
        handle: sys::cudnnHandle_t,
        g: &Graph,
        addresses: impl Fn(usize, Kind) -> u64,
        workspace: u64,
    ) -> Result<(), ErrorKind> {
        let (mut ids, mut at) = (Vec::new(), Vec::new());
        for (i, t) in g.tensors.iter().enumerate() {
            if t.kind != Kind::Virtual {
                ids.push(i as i64 + 1);
                at.push(addresses(i, t.kind));
            }
        }
        // A pack that is final cannot be changed, so each launch has its own.
        let pack = Desc::new(Descriptor::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        let pointer = Type::CUDNN_TYPE_VOID_PTR;
        pack.set(
            Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
            Type::CUDNN_TYPE_INT64,
            &ids,
        )?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, pointer, &at)?;
        pack.set(
            Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
            pointer,
            &[workspace],
        )?;
        pack.finish()?;
        // SAFETY: the caller's contract; plan and pack are final.
        let status = unsafe { (self.plan.api.execute)(handle, self.plan.raw(), pack.raw()) };
        check(self.plan.api, "cudnnBackendExecute", status)
    }
}
