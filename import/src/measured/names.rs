//! Names of instructions, and floating-point operations from shapes.

use crate::attribute::{Attributed, Placed, Work, short};
use crate::kineto::{DeviceKind, Trace};
use crate::limits;

/// Returns the name of a kernel without its arguments.
pub(super) fn kernel<'a>(trace: &'a Trace, work: &Placed) -> &'a str {
    short(trace.name(trace.device[work.device as usize].name))
}

/// Returns the name of a piece of device work. It matches the names of programs where possible: the
/// name of a collective, of an operator without its namespace, or of a compiled kernel.
pub(super) fn of(trace: &Trace, a: &Attributed, work: &Placed) -> String {
    let event = &trace.device[work.device as usize];
    let kernel = kernel(trace, work);
    match work.work {
        Work::AllGather => return "all_gather".into(),
        Work::ReduceScatter => return "reduce_scatter".into(),
        Work::AllReduce => return "all_reduce".into(),
        Work::OtherCollective => {
            let named = work
                .collective
                .map(|c| trace.collectives[c as usize].name.clone());
            return named.unwrap_or_else(|| kernel.to_owned());
        }
        _ => {}
    }
    if kernel.starts_with("triton_") {
        return kernel.to_owned();
    }
    if event.kind == DeviceKind::Copy {
        let input = trace.name(event.name).contains("HtoD");
        return if input { "input" } else { "copy" }.into();
    }
    let operator = work.operator.and_then(|o| {
        a.tree
            .around(o as usize)
            .map(|o| trace.name(trace.host[o].name))
            .find(|n| n.contains("::") && !n.starts_with("autograd") && !n.starts_with("FSDP"))
    });
    match operator {
        Some(name) => {
            let plain = name
                .rsplit("::")
                .next()
                .unwrap_or(name)
                .trim_end_matches('_');
            alias(plain, trace.name(event.name), work.work).to_owned()
        }
        None => kernel.to_owned(),
    }
}

/// Returns the name that programs use for the kernels of an operator, if it differs.
fn alias<'a>(operator: &'a str, kernel: &str, work: Work) -> &'a str {
    let backward = operator.contains("backward");
    match operator {
        _ if work == Work::Attention && backward => "attention_backward",
        _ if work == Work::Attention => "attention",
        "_chunk_cat" => "chunk_cat",
        "split_with_sizes_copy" => "split_copy_out",
        "_foreach_copy" => "multi_copy",
        "_fused_rms_norm" => "rms_norm",
        "_fused_rms_norm_backward" if kernel.contains("GammaBeta") => "rms_norm_weight_backward",
        "_fused_rms_norm_backward" => "rms_norm_backward",
        "native_layer_norm" => "layer_norm",
        "_log_softmax" => "log_softmax",
        "_log_softmax_backward_data" => "log_softmax_backward",
        "nll_loss_forward" => "nll_loss",
        "embedding_dense_backward" => "embedding_backward",
        "index_select" | "gather" if work == Work::Memory => "embedding",
        "_fused_adamw" => "adamw",
        other => other,
    }
}

/// Returns the rule that issues a piece of work in programs. For a gather it is a prefetch or on
/// demand; for copies it is the FSDP2 hook that makes them.
pub(super) fn rule(trace: &Trace, a: &Attributed, work: &Placed) -> &'static str {
    let around = || {
        let operators = work
            .operator
            .into_iter()
            .flat_map(|o| a.tree.around(o as usize));
        operators.map(|o| trace.name(trace.host[o].name))
    };
    let prefetched = || around().any(|n| n.contains("_prefetch for "));
    match work.work {
        Work::AllGather if prefetched() => "prefetch",
        Work::AllGather => "unshard",
        Work::ReduceScatter | Work::AllReduce => "reduce",
        _ => around().find_map(hook).unwrap_or(IMPORTED),
    }
}

/// Returns the rule of a hook of FSDP2 that launches kernels.
fn hook(annotation: &str) -> Option<&'static str> {
    let rest = annotation.strip_prefix("FSDP::")?;
    match rest {
        r if r.starts_with("post_backward") => Some("reduce"),
        r if r.starts_with("all_gather") || r.contains("_prefetch") => Some("unshard"),
        r if r.starts_with("pre_") || r.starts_with("root_pre") => Some("unshard"),
        _ => None,
    }
}

/// The rule of all other instructions.
pub(crate) const IMPORTED: &str = "imported";

/// Returns the floating-point operations of a matmul, from the shapes of its operator.
pub(super) fn flops(trace: &Trace, work: &Placed) -> u64 {
    if work.work != Work::Gemm {
        return 0;
    }
    let Some(event) = work.operator.map(|o| &trace.host[o as usize]) else {
        return 0;
    };
    let Some(inputs) = event.inputs.map(|i| &trace.inputs[i as usize]) else {
        return 0;
    };
    let shapes = shapes(trace.name(inputs.dims));
    let name = trace.name(event.name);
    let (a, b) = match name.rsplit("::").next().unwrap_or(name) {
        "mm" | "bmm" | "_scaled_mm" => (shapes.first(), shapes.get(1)),
        "addmm" | "baddbmm" => (shapes.get(1), shapes.get(2)),
        _ => return 0,
    };
    match (a, b) {
        (Some(a), Some(b)) if a.len() >= 2 && b.len() == a.len() => {
            let elements: u64 = a.iter().product();
            let n = b.last().copied().unwrap_or(0);
            // A result that implies more than a device computes in a second is not one matmul.
            let flops = elements.checked_mul(2 * n);
            flops.filter(|f| *f < 1 << 52).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Parses the shapes in `Input Dims`. The shapes of a list of tensors are inserted in order, and
/// scalars have an empty shape.
pub(crate) fn shapes(dims: &str) -> Vec<Vec<u64>> {
    let Ok(values) = serde_json::from_str::<Vec<serde_json::Value>>(dims) else {
        return Vec::new();
    };
    let shape = |v: &serde_json::Value| -> Option<Vec<u64>> {
        let dims = v.as_array()?.iter().map(serde_json::Value::as_u64);
        let dims: Vec<u64> = dims.collect::<Option<_>>()?;
        limits::elements(&dims).is_some().then_some(dims)
    };
    let mut all = Vec::new();
    for value in &values {
        match shape(value) {
            Some(own) => all.push(own),
            None => all.extend(value.as_array().into_iter().flatten().filter_map(shape)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_from_dimensions() {
        assert_eq!(shapes("[[2, 3], [], [4]]"), [vec![2, 3], vec![], vec![4]]);
        assert_eq!(
            shapes("[[[1024], [32000, 1024]], [], [2, 5]]"),
            [vec![1024], vec![32000, 1024], vec![], vec![2, 5]]
        );
        assert!(shapes("nonsense").is_empty());
        assert!(shapes("").is_empty());
    }
}
