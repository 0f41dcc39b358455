//! cuDNN finds its fused kernels for our graphs, on the saved properties of a GPU: no GPU is
//! needed, only the library.

use super::backend::{Desc, Machine, Wants, proposals, verdict};
use super::convolution;
use super::graph::{Direction, Graph, Kind, Node, Operand, Shape, Ty, backward, forward};
use crate::device::cuda::libraries::{Surroundings, folders};
use crate::kernels::cuda::codegen::{Arg, Request};
use crate::kernels::cuda::target::Target;
use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Descriptor,
};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
use shardlab_plan::ir::{AttentionShape, BodyOp, DType, OpKind, Place, Slot, op};
use smallvec::{SmallVec, smallvec};
use std::path::PathBuf;

/// Properties of an NVIDIA H200 as cuDNN 9.19 writes them.
const H200: &str = include_str!("h200.json");

/// Loads cuDNN and the files that it opens by name; returns whether all of it exists.
fn is_loaded() -> bool {
    let named = |name| std::env::var_os(name).map(PathBuf::from);
    let mut all: Vec<PathBuf> = ["SHARDLAB_CUDNN", "SHARDLAB_NVRTC"]
        .into_iter()
        .filter_map(named)
        .collect();
    all.extend(
        folders(&Surroundings::of_process(), &[])
            .into_iter()
            .map(|f| f.path),
    );
    let load = |name: &str| {
        let found = all.iter().map(|f| f.join(name)).find(|p| p.exists());
        // SAFETY: NVIDIA's libraries run no code at loading that depends on ours; they are never
        // unloaded.
        let handle =
            found.and_then(|p| unsafe { Library::open(Some(p), RTLD_LAZY | RTLD_GLOBAL) }.ok());
        handle.map(std::mem::forget).is_some()
    };
    for name in [
        "libnvrtc-builtins.so.13.0",
        "libnvrtc.so.13",
        "libcublasLt.so.13",
        "libcublas.so.13",
        "libcudnn_graph.so.9",
        "libcudnn_ops.so.9",
        "libcudnn_heuristic.so.9",
        "libcudnn_engines_runtime_compiled.so.9",
        "libcudnn_engines_precompiled.so.9",
        "libcudnn_adv.so.9",
        "libcudnn_cnn.so.9",
    ] {
        load(name);
    }
    load("libcudnn.so.9")
}

/// Loads cuDNN and describes an H200 to it.
fn saved() -> Desc {
    assert!(
        is_loaded() && super::library::api().is_ok(),
        "cuDNN cannot be loaded; `pip install nvidia-cudnn-cu13==9.19.0.56 nvidia-cublas==13.1.0.3 nvidia-cuda-nvrtc==13.0.88` and name its lib folder in SHARDLAB_CUDNN"
    );
    let d = Desc::new(Descriptor::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).unwrap();
    d.set(
        Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
        Type::CUDNN_TYPE_CHAR,
        H200.trim().as_bytes(),
    )
    .unwrap();
    d.finish().unwrap();
    d
}

fn shape(batch: u64, heads: u64, kv: u64, seq: u64, d: u64, causal: bool) -> Shape {
    let sizes = AttentionShape::of(&[batch, heads, seq, d], &[batch, kv, seq, d], causal);
    Shape {
        sizes: sizes.unwrap(),
        stat: seq as i64,
        scale: (d as f32).sqrt().recip(),
        dtype: DType::Bf16,
    }
}

/// Returns the strides of `[batch, seq, heads, d]` memory seen as `[batch, heads, seq, d]`, and of
/// `[batch, heads, seq, d]` itself.
fn strides(s: &Shape, o: Operand) -> [i64; 4] {
    let shape = match o {
        Operand::K | Operand::V | Operand::DK | Operand::DV => s.sizes.keys(),
        _ => s.sizes.queries(),
    };
    let [_, heads, seq, d] = shape.map(|n| n as i64);
    match o {
        Operand::V | Operand::DV | Operand::DO => [seq * heads * d, d, heads * d, 1],
        _ => [heads * seq * d, seq * d, d, 1],
    }
}

/// Returns the strides of queries, keys and values as columns of one merged GEMM's rows, and of the
/// values' gradient as columns of its gradient.
fn merged(s: &Shape, o: Operand) -> [i64; 4] {
    let [_, heads, seq, d] = s.sizes.queries().map(|n| n as i64);
    let row = (heads + 2 * s.sizes.kv_heads as i64) * d;
    match o {
        Operand::Q | Operand::K | Operand::V | Operand::DV => [seq * row, d, row, 1],
        _ => strides(s, o),
    }
}

#[test]
#[ignore = "needs cuDNN"]
fn there_is_an_engine_for_every_attention_of_the_models() {
    let properties = saved();
    let on = Machine::Saved(&properties);
    for s in [
        shape(2, 32, 8, 4096, 64, true),
        shape(2, 24, 8, 4096, 128, true),
        shape(1, 32, 8, 8192, 128, true),
        shape(4, 4, 4, 256, 64, true),
        shape(1, 12, 12, 512, 64, false),
    ] {
        let engines = |graph: Graph| fits(&verdict(&graph, on).unwrap());
        for lie in [strides, merged] {
            let graph = forward(&s, &|o| lie(&s, o)).unwrap();
            let said = verdict(&graph, on).unwrap();
            assert!(fits(&said), "{s:?} forward: {said:?}");
            for ordered in [false, true] {
                let graph = backward(&s, &|o| lie(&s, o), ordered).unwrap();
                assert!(engines(graph), "{s:?} backward, ordered: {ordered}");
            }
        }
    }
    // The pattern counts, not its parts: with a sum instead of the maximum there is none.
    let s = shape(2, 8, 2, 128, 64, true);
    let mut graph = forward(&s, &|o| strides(&s, o)).unwrap();
    for node in &mut graph.nodes {
        if let Node::Reduce { max, .. } = node {
            *max = false;
        }
    }
    let wrong = verdict(&graph, on).unwrap();
    assert!(!fits(&wrong), "{wrong:?}");
}

/// Returns whether a configuration is ready, or would be on a machine with a driver: missing parts
/// are requested last.
fn fits(verdict: &str) -> bool {
    verdict == "ready" || verdict.contains("RUNTIME_PREREQUISITE_MISSING")
}

#[test]
fn graphs_touch_each_operand_and_make_each_value_once() {
    let s = shape(2, 8, 2, 128, 64, true);
    let operands = |g: &Graph| {
        let mut all: Vec<Operand> = g
            .tensors
            .iter()
            .filter_map(|t| match t.kind {
                Kind::Operand(o) => Some(o),
                _ => None,
            })
            .collect();
        all.sort_unstable();
        all
    };
    use Operand as O;
    let g = forward(&s, &|o| strides(&s, o)).unwrap();
    assert_eq!(operands(&g), [O::Q, O::K, O::V, O::O, O::Stats]);
    for ordered in [false, true] {
        let g = backward(&s, &|o| strides(&s, o), ordered).unwrap();
        assert_eq!(
            operands(&g),
            [O::Q, O::K, O::V, O::O, O::Stats, O::DO, O::DQ, O::DK, O::DV]
        );
        assert_eq!(
            g.scratch,
            2 * 8 * 128 * 4 + if ordered { 0 } else { 2 * 8 * 128 * 64 * 4 }
        );
    }
}

/// Returns a dense tensor.
fn dense(dims: [i64; 4], align: i64) -> convolution::Lies {
    let [_, c, h, w] = dims;
    (dims, [c * h * w, h * w, w, 1], align)
}

/// Every convolution of the toy, of the small scenario (whose buffers are aligned to single
/// elements), and one in bf16.
#[test]
#[ignore = "needs cuDNN"]
fn there_is_an_engine_for_every_convolution_of_the_models() {
    let properties = saved();
    let on = Machine::Saved(&properties);
    for (images, cin, cout, side, k, ty, align) in [
        (32, 3, 16, 32, 3, Ty::F32, 16),
        (32, 16, 16, 32, 3, Ty::F32, 16),
        (2, 3, 8, 6, 3, Ty::F32, 4),
        (32, 16, 16, 32, 3, Ty::Of(DType::Bf16), 16),
    ] {
        for direction in [Direction::Forward, Direction::Image, Direction::Filter] {
            let tensors = [
                dense([images, cin, side, side], align),
                dense([cout, cin, k, k], align),
                dense([images, cout, side, side], align),
            ];
            let good = verdict(&convolution::graph(direction, ty, tensors), on).unwrap();
            assert!(fits(&good), "{direction:?} {tensors:?}: {good}");
            let graph = convolution::graph(direction, ty, tensors);
            let wants = Wants {
                ordered: true,
                exact: ty == Ty::F32,
                workspace: 0,
            };
            let (all, wanted) = proposals(&graph, on, wants).unwrap();
            assert!(wanted > 0, "{direction:?} {tensors:?}: 0 of {all}");
            // One more channel than there are weights for.
            let mut wrong = tensors;
            wrong[0] = dense([images, cin + 1, side, side], align);
            let refused = verdict(&convolution::graph(direction, ty, wrong), on);
            assert!(!refused.is_ok_and(|v| fits(&v)), "{direction:?}");
        }
    }
}

/// Returns the graph of a convolution's weight gradient from bf16 factors.
fn weight_gradient(result: DType) -> Graph {
    let slot = |place, shape: &[u64]| Slot {
        place,
        offset: 0,
        shape: shape.iter().copied().collect(),
        strides: SmallVec::new(),
        dtype: DType::Bf16,
    };
    let op = BodyOp {
        op: OpKind::ConvGradWeight(op::ConvGradWeight { kernel: 3 }),
        inputs: smallvec![
            slot(Place::Read(0), &[2, 16, 6, 5]),
            slot(Place::Read(1), &[2, 8, 6, 5])
        ],
        outputs: smallvec![slot(Place::Write(0), &[16, 8, 3, 3])],
    };
    let arg = |dtype| Arg { dtype, align: 16 };
    let reads = [arg(DType::Bf16); 2];
    let req = Request {
        target: Target::HOPPER,
        body: std::slice::from_ref(&op),
        used_rows: None,
        reads: &reads,
        writes: &[arg(result)],
        same: &[None, None],
    };
    convolution::graph_of(&req, &op, Direction::Filter)
        .unwrap()
        .0
}

#[test]
fn gradients_of_weights_that_are_wider_than_their_factors_come_narrow() {
    let wide = weight_gradient(DType::F32);
    assert!(convolution::is_narrow(&wide));
    assert_eq!(wide.tensors[1].ty, Ty::Of(DType::Bf16));
    // 16 x 8 x 9 elements of two bytes.
    assert_eq!((wide.tensors[1].bytes(), wide.scratch), (2304, 2304));
    let equal = weight_gradient(DType::Bf16);
    assert!(!convolution::is_narrow(&equal));
    assert_eq!(equal.scratch, 0);
}

/// cuDNN refuses gradients of weights in float32 from 16-bit factors. It makes them in the factors'
/// type, and they are converted.
#[test]
#[ignore = "needs cuDNN"]
fn there_is_an_engine_for_narrow_gradients_of_weights() {
    let (wide, equal) = (weight_gradient(DType::F32), weight_gradient(DType::Bf16));
    let properties = saved();
    let on = Machine::Saved(&properties);
    let wants = Wants {
        ordered: true,
        exact: false,
        workspace: 0,
    };
    let offers = |g: &Graph| proposals(g, on, wants).unwrap().1;
    assert_eq!(offers(&wide), offers(&equal));
    assert!(offers(&wide) > 0);
    let mut refused = equal;
    refused.tensors[1].ty = Ty::F32;
    assert_eq!(offers(&refused), 0);
}
