//! Kinds of device work.

use crate::kineto::DeviceKind;
use shardlab_plan::program::Phase;
use shardlab_plan::record::Work;

/// Returns the kind of collective that a name stands for: the name of an NCCL kernel, a PyTorch
/// call or a c10d operator.
pub(crate) fn collective(name: &str) -> Option<Work> {
    let plain: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric())
        .map(|c| c.to_ascii_lowercase())
        .collect();
    [
        ("reducescatter", Work::ReduceScatter),
        ("allgather", Work::AllGather),
        ("allreduce", Work::AllReduce),
        ("alltoall", Work::OtherCollective),
        ("broadcast", Work::OtherCollective),
        ("sendrecv", Work::OtherCollective),
        ("barrier", Work::OtherCollective),
        ("gather", Work::OtherCollective),
        ("scatter", Work::OtherCollective),
        ("reduce", Work::OtherCollective),
        ("send", Work::OtherCollective),
        ("recv", Work::OtherCollective),
    ]
    .into_iter()
    .find(|(word, _)| plain.contains(word))
    .map(|(_, work)| work)
}

/// Returns whether a kernel belongs to NCCL, to RCCL or to its MSCCL.
pub(crate) fn is_nccl(kernel: &str) -> bool {
    ["nccl", "rccl", "msccl"].iter().any(|name| {
        let start = kernel.get(..name.len()).unwrap_or_default();
        start.eq_ignore_ascii_case(name)
    })
}

/// Returns the kind of a device event, from its name, from the collective that PyTorch recorded
/// with it, and from the operators around its launch, innermost first.
pub(super) fn of(
    kind: DeviceKind,
    kernel: &str,
    phase: Phase,
    recorded: Option<&str>,
    operators: &[&str],
) -> Work {
    // Other libraries have kernels of other names, but PyTorch records the same arguments.
    if is_nccl(kernel) || kind == DeviceKind::Kernel && recorded.is_some() {
        // Kernels that run several collectives at once have no specific name, and those of MSCCL
        // are named after their algorithms.
        let called = || operators.iter().take(4).find_map(|op| collective(op));
        let named = || is_nccl(kernel).then(|| collective(kernel)).flatten();
        return named()
            .or_else(|| recorded.and_then(collective))
            .or_else(called)
            .unwrap_or(Work::OtherCollective);
    }
    if kind == DeviceKind::Copy {
        // Copy engines move data between devices within a collective's call. Operators that a
        // functional collective calls first, such as a clone of its input, only copy.
        let between = kernel.contains("PtoP") || kernel.contains("DtoD");
        let called = operators
            .iter()
            .take(4)
            .take_while(|op| !op.starts_with("aten::"))
            .filter(|op| {
                op.starts_with("c10d::")
                    || op.starts_with("nccl:")
                    || op.contains("_c10d_functional")
            })
            .find_map(|op| collective(op));
        return called.filter(|_| between).unwrap_or(Work::Copy);
    }
    if matches!(phase, Phase::Optimizer | Phase::Clip) {
        return Work::Optimizer;
    }
    if kind == DeviceKind::Fill {
        return Work::Copy;
    }
    let lower = kernel.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|w| lower.contains(w));
    // Inductor names its pointwise kernels and reductions after all operators fused into them.
    if ["triton_poi_", "triton_red_", "triton_per_"]
        .iter()
        .any(|p| lower.starts_with(p))
    {
        return Work::Memory;
    }
    if has(&[
        "flash",
        "fmha",
        "sdpa",
        "attention",
        "compute_dot_do_o",
        "convert_dq",
    ]) {
        return Work::Attention;
    }
    if has(&[
        "gemm",
        "nvjet",
        "xmma",
        "cutlass",
        "matmul",
        "splitk",
        "implicit_convolve",
        "cudnn_convolve",
        "conv2d",
        "_mm_",
        "fprop",
        "wgrad",
        "dgrad",
    ]) {
        return Work::Gemm;
    }
    if has(&[
        "copy",
        "memcpy",
        "memset",
        "fillfunctor",
        "chunk_cat",
        "split_with_sizes",
    ]) && !has(&["catarray"])
    {
        return Work::Copy;
    }
    let product = |op: &str| {
        matches!(
            op.rsplit("::").next().unwrap_or(op),
            "mm" | "addmm"
                | "bmm"
                | "baddbmm"
                | "_scaled_mm"
                | "_grouped_mm"
                | "convolution"
                | "cudnn_convolution"
                | "convolution_backward"
        )
    };
    if operators.iter().take(2).any(|op| product(op)) {
        return Work::Gemm;
    }
    // Kernels of AOTriton, for ROCm, have names such as `attn_fwd` and `bwd_kernel_fuse`.
    let attends = |op: &&str| {
        let name = op.rsplit("::").next().unwrap_or(op);
        ["_flash_attention", "_efficient_attention", "_flash_attn"]
            .iter()
            .any(|start| name.starts_with(start))
            || name.starts_with("_scaled_dot_product_") && !name.ends_with("_math")
    };
    if operators.first().is_some_and(attends) && !lower.contains("at::native") {
        return Work::Attention;
    }
    Work::Memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_from_kernel_and_operator() {
        let kernel =
            |name, ops: &[&'static str]| of(DeviceKind::Kernel, name, Phase::Forward, None, ops);
        assert_eq!(
            kernel("ncclDevKernel_AllGather_RING_LL(x)", &[]),
            Work::AllGather
        );
        assert_eq!(
            kernel("ncclKernel_AllReduce_RING_LL_Sum_float", &[]),
            Work::AllReduce
        );
        assert_eq!(
            kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", &[]),
            Work::ReduceScatter
        );
        assert_eq!(kernel("ncclDevKernel_SendRecv", &[]), Work::OtherCollective);
        assert_eq!(kernel("nvjet_sm90_tst_256x128", &["aten::mm"]), Work::Gemm);
        assert_eq!(kernel("void some_splitk_thing", &["aten::mm"]), Work::Gemm);
        assert_eq!(kernel("void other", &["aten::addmm"]), Work::Gemm);
        assert_eq!(
            kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", &[]),
            Work::Attention
        );
        assert_eq!(
            kernel("void at::native::direct_copy_kernel", &["aten::copy_"]),
            Work::Copy
        );
        assert_eq!(
            kernel("triton_poi_fused_copy_flash_attention_add", &[]),
            Work::Memory
        );
        assert_eq!(kernel("triton_tem_fused_mm_3", &[]), Work::Gemm);
        assert_eq!(
            kernel("ncclDevKernel_Generic_2", &["nccl:_all_gather_base"]),
            Work::AllGather
        );
        assert_eq!(kernel("void silu_kernel", &["aten::silu"]), Work::Memory);
        let copy =
            |name, ops: &[&'static str]| of(DeviceKind::Copy, name, Phase::Forward, None, ops);
        assert_eq!(
            copy(
                "Memcpy PtoP (Device -> Device)",
                &["record_param_comms", "c10d::_allgather_base_"]
            ),
            Work::AllGather
        );
        // `clip_grad_norm_` on DTensors: the functional all-reduce clones its input.
        assert_eq!(
            copy(
                "Memcpy DtoD (Device -> Device)",
                &["aten::copy_", "aten::clone", "_c10d_functional::all_reduce"]
            ),
            Work::Copy
        );
        assert_eq!(
            copy("Memcpy HtoD (Pinned -> Device)", &["aten::copy_"]),
            Work::Copy
        );
        let update = of(
            DeviceKind::Kernel,
            "void multi_tensor",
            Phase::Optimizer,
            None,
            &[],
        );
        assert_eq!(update, Work::Optimizer);
    }

    /// Names of kernels in traces of AMD GPUs.
    #[test]
    fn kernels_of_rocm_have_kinds() {
        let of = |name, recorded, ops: &[&str]| {
            of(DeviceKind::Kernel, name, Phase::Backward, recorded, ops)
        };
        let msccl =
            "mscclKernel_Sum___hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)";
        assert_eq!(of(msccl, Some("_allgather_base"), &[]), Work::AllGather);
        assert_eq!(of(msccl, None, &["nccl:_all_gather_base"]), Work::AllGather);
        assert_eq!(
            of("custom_ring(x)", Some("allreduce"), &[]),
            Work::AllReduce
        );
        let one = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL";
        assert_eq!(of(one, Some("coalesced"), &[]), Work::ReduceScatter);
        let ops = ["aten::_flash_attention_backward", "aten::mm"];
        assert_eq!(of("bwd_kernel_fuse", None, &ops[..1]), Work::Attention);
        let ops = ["aten::_efficient_attention_forward"];
        assert_eq!(of("attn_fwd", None, &ops), Work::Attention);
        let fill = "void at::native::vectorized_elementwise_kernel<4, FillFunctor>";
        assert_eq!(of(fill, None, &ops), Work::Copy);
        let fill = "void at::native::elementwise_kernel<4, Lambda>";
        assert_eq!(of(fill, None, &ops), Work::Memory);
    }
}
