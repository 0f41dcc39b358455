//! Messages for bad input, as a user sees them.

use super::super::*;
use super::{MINIMAL, minimal};
use std::fmt::Write;

/// A file whose `[fsdp]` and later parts are wrong in one way.
fn message(text: &str) -> String {
    match parse("x.toml", text, &[]) {
        Ok(s) => panic!("accepted: {s:?}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn faults_of_form() {
    let after = |rest: &str| format!("{MINIMAL}{rest}");
    let texts = [
        after("[fsdp]\nprefetch_foward = 1\n"),
        after("[fsdb]\npolicy = \"native\"\n"),
        after("[fsdp]\npolicy = \"fsdp\"\n"),
        after("[fsdp]\nhidden = 4096\n"),
        after("[fsdp]\nreduce_in_flight = \"two\"\n"),
        after("[fsdp]\nreduce_in_flight = 0\n"),
        after("[fsdp]\ngradient_scaling_factor = 0\n"),
        after("[fsdp]\ngradient_scaling_factor = \"half\"\n"),
        after("[fsdp]\nasync_reduce = \"false\"\n"),
        after("[fsdp]\nprefetch_forward = { element = 10 }\n"),
        after("[fsdp]\nunits = [\"layers.*\", \"norm=drop\"]\n"),
        after("[compile]\ncuda_graph = [\"attn\", \"ffn\"]\n"),
        after("[compile]\nbucket_bytes = \"25 parsecs\"\n"),
        after("[compile]\nbucket_bytes = \"25\"\n"),
        after("[gate]\nmax_memory = 60\n"),
        after("[gate]\nmax_memory = \"60\"\n"),
        after("[gate]\nmax_memory = \"60 parsecs\"\n"),
        after("[train]\nbetas = [0.9]\n"),
        after("[train]\nlr = nan\n"),
        after("[train]\nlr = 1e-3\nlr = 2e-3\n"),
        after("fsdp = [\n"),
        after("[sweep]\nfsdp.policy = \"native\"\n"),
        after("[sweep]\n\"fsdp.polcy\" = [\"native\"]\n"),
        after("[sweep]\npolicy = [\"native\"]\n"),
        after("[sweep]\n\"mesh.dp_shard, mesh.dp_outr\" = [[4, 1]]\n"),
        after("[sweep]\n\"mesh.dp_shard,mesh.dp_replicate\" = [[4, 1], [2]]\n"),
        after("[sweep]\n\"mesh.dp_shard,mesh.dp_replicate\" = [4, 2]\n"),
        after("[sweep]\n\"mesh.dp_shard,mesh.dp_replicate\" = [[4, 1], [2, true]]\n"),
        after("[sweep]\n\"mesh.dp_shard,mesh.dp_shard\" = [[4, 1]]\n"),
        after("[sweep]\n\"mesh.dp_shard,mesh.dp_replicate\" = [[4, 1]]\nmesh.dp_replicate = [2]\n"),
        after("[fsdp]\nunits = [\"layers.*\", \"blocks.*\"]\n"),
        after("[fsdp]\nunits = [\"norm+outputs\"]\n"),
        after("[fsdp]\nfrozen = [\"nothing\"]\n"),
        "fsdp = 3\n".into(),
        "policy = \"native\"\n".into(),
        "extends = \"llama3-8b-4xh200.toml\"\n".into(),
        "[model]\npreset = \"llama-8b\"\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n".into(),
        "[model]\npreset = \"gpt2\"\n[mesh]\nhardware = \"h200\"\ndp_shard = 1\n".into(),
        "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 64\nheads = 4\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n".into(),
        "[model]\npreset = \"gpt2\"\n[mesh]\nhardware = \"cpu\"\n".into(),
        "".into(),
    ];
    let mut shown = String::new();
    for text in texts {
        writeln!(shown, "{}\n", message(&text)).unwrap();
    }
    insta::assert_snapshot!(shown);
}

const JOINT: &str = "train.joint_backward=true";
const SKIPPED: &str = "train.skipped_blocks=[{ blocks = [\"layers.0\"] }]";
const PROTOTYPE: &str = "fsdp.policy=megatron_v2";
const VARIANT: &str = "fsdp.variant=pr4435";

#[test]
fn impossible_combinations() {
    let sets: &[&[&str]] = &[
        &["model.kv_heads=5"],
        &["model.heads=48"],
        &["model.head_dim=127"],
        &["model.channels=3"],
        &["model.family=gpt2"],
        &["train.seq_len=16384"],
        &["train.betas=[0.9, 1.0]"],
        &["train.min_lr=1e-5"],
        &["train.lr_schedule=cosine", "train.min_lr=1.0"],
        &["model.preset=toy-cnn", "train.loss=chunked"],
        &["model.preset=toy-cnn", "model.kernel=4"],
        &["model.preset=toy-cnn", "train.seq_len=8"],
        &["model.preset=toy-linear", "train.recompute=selective"],
        &["model.preset=gpt2", "model.bias=qkv"],
        &["model.bias=q"],
        &["model.preset=gpt2", "model.hidden=1000"],
        &["fsdp.policy=fsdp2", "fsdp.offload=[\"optimizer\"]"],
        &["fsdp.policy=megatron", "fsdp.offload=[\"params\"]"],
        &["compile.mode=full", "fsdp.offload=[\"optimizer\"]"],
        &["train.recompute=pointwise"],
        &["train.recompute_layers=4"],
        &["train.recompute=full", "train.recompute_layers=33"],
        &["train.recompute=full", "train.recompute_layers=0"],
        &["train.recompute=full", "train.recompute_layers=first"],
        &[
            "train.recompute=full",
            "train.recompute_layers=[\"layers.1*\", \"layer.2\"]",
        ],
        &[
            "train.recompute=full",
            "train.recompute_layers=[\"layers.0.mlp\"]",
        ],
        &["train.recompute=full", "train.recompute_layers=[\"norm\"]"],
        &["compile.exclude=[\"layers.*\"]"],
        &[
            "compile.mode=blocks",
            "compile.exclude=[\"layers.*.mlp\", \"layer.2\"]",
        ],
        &["mesh.dp_shard=12"],
        &["mesh.dp_shard=1048576", "mesh.dp_replicate=1048576"],
        &["fsdp.policy=fsdp2", "fsdp.strategy=optim"],
        &[
            "fsdp.policy=fsdp2",
            "fsdp.strategy=optim_grads",
            "fsdp.reshard_after_forward=auto",
        ],
        &["compile.mode=full", "fsdp.reshard_after_forward=2"],
        &["compile.mode=full", "fsdp.reshard_after_forward=auto"],
        &["compile.mode=full", "fsdp.prefetch_forward=2"],
        &["compile.mode=full", "fsdp.prefetch_backward=implicit"],
        &["compile.mode=full", "fsdp.reduce_in_flight=3"],
        &["compile.mode=full", "fsdp.async_reduce=false"],
        &["compile.mode=full", "fsdp.unify_comm_stream=true"],
        &["fsdp.policy=megatron", "fsdp.reduce_in_flight=1"],
        &["fsdp.frozen=[\"loss\"]"],
        &["fsdp.units=[\"layers.*\", \"loss\"]"],
        &["fsdp.gradient_sync=last"],
        &["fsdp.reshard_after_backward=false"],
        &["fsdp.reshard_root=true"],
        &[
            "fsdp.policy=fsdp2",
            "fsdp.reshard_root=true",
            "fsdp.reshard_after_forward=false",
        ],
        &["train.grad_accum=2", "fsdp.gradient_sync=first"],
        &[
            "train.grad_accum=2",
            "fsdp.gradient_sync=last",
            "fsdp.policy=megatron",
        ],
        &[
            "train.grad_accum=2",
            "fsdp.gradient_sync=last",
            "compile.mode=full",
        ],
        &[
            "train.grad_accum=2",
            "fsdp.gradient_sync=every",
            "mesh.dp_replicate=2",
        ],
        &[
            "train.grad_accum=2",
            "fsdp.reshard_after_backward=false",
            "fsdp.policy=megatron",
        ],
        &[
            "train.grad_accum=2",
            "fsdp.reshard_after_backward=false",
            "compile.mode=full",
        ],
        &[
            "train.grad_accum=2",
            "fsdp.reshard_after_backward=false",
            "fsdp.strategy=optim",
        ],
        &["mesh.dp_shard=1", "fsdp.prefetch_next_step=1"],
        &["mesh.dp_shard=1", "fsdp.copy_engine_all_gather=true"],
        &["mesh.dp_shard=1", "fsdp.copy_engine_reduce_scatter=true"],
        &["train.loss_chunk_tokens=8"],
        &["compile.bucket_bytes=1MiB"],
        &["fsdp.cublas_workspace_bytes=8MiB"],
        &[
            "mesh.hardware=cpu",
            "fsdp.policy=fsdp2",
            "fsdp.cublas_workspace_bytes=8MiB",
        ],
        &["compile.max_inflight_bytes=1MiB"],
        &["compile.memory_budget=0.5"],
        &["compile.mode=full", "fsdp.strategy=no_shard"],
        &[
            "compile.mode=full",
            "mesh.dp_replicate=2",
            "fsdp.outer_strategy=optim",
        ],
        &["fsdp.outer_strategy=optim"],
        &[
            "fsdp.outer_strategy=optim",
            "mesh.dp_replicate=2",
            "fsdp.strategy=optim_grads",
        ],
        &[
            "fsdp.outer_strategy=optim",
            "mesh.dp_replicate=2",
            "fsdp.policy=fsdp2",
        ],
        &[
            "fsdp.outer_strategy=optim",
            "mesh.dp_replicate=2",
            "mesh.dp_shard=1",
        ],
        &[
            "fsdp.offload=[\"params\"]",
            "compile.cuda_graph=full_iteration",
        ],
        &["compile.mode=full", "compile.cuda_graph=[\"attn\"]"],
        &["fsdp.reshard_after_forward=3"],
        &["fsdp.reshard_after_forward=1"],
        &["fsdp.reshard_after_forward=4"],
        &["fsdp.reshard_after_forward=2", "fsdp.policy=megatron"],
        &["fsdp.reshard_after_forward=2", "fsdp.strategy=optim_grads"],
        &["fsdp.policy=fsdp2", "fsdp.allocator=pool"],
        &["fsdp.policy=fsdp2", "fsdp.allocator=double_buffer"],
        &["fsdp.persist_on_alloc_fail=true"],
        &[
            "fsdp.average_in_collective=true",
            "fsdp.per_token_loss=true",
        ],
        &[
            "fsdp.copy_engine_all_gather=true",
            "fsdp.separate_communicators=false",
        ],
        &[
            "fsdp.copy_engine_all_gather=true",
            "mesh.dp_shard=16",
            "mesh.gpus_per_node=8",
        ],
        &[
            "fsdp.copy_engine_all_gather=true",
            "mesh.dp_shard=6",
            "mesh.dp_replicate=4",
            "mesh.gpus_per_node=8",
        ],
        &["fsdp.prefetch_next_step=1", "fsdp.policy=fsdp2"],
        &["fsdp.prefetch_next_step=1", "fsdp.strategy=optim_grads"],
        &["fsdp.prefetch_next_step=1", "fsdp.offload=[\"params\"]"],
        &[
            "fsdp.prefetch_next_step=1",
            "compile.cuda_graph=full_iteration",
        ],
        &["fsdp.optimizer_in_backward=true", "fsdp.policy=fsdp2"],
        &["fsdp.optimizer_in_backward=true", "train.clip_norm=1"],
        &["fsdp.optimizer_in_backward=true", "train.grad_norm=true"],
        &[
            "fsdp.optimizer_in_backward=true",
            "fsdp.offload=[\"optimizer\"]",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "fsdp.strategy=optim_grads",
        ],
        &["fsdp.cast_before_all_gather=true", "fsdp.policy=megatron"],
        &["fsdp.cast_before_all_gather=true", "compile.mode=full"],
        &[
            "fsdp.cast_before_all_gather=true",
            "precision.param_dtype=f32",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "mesh.dp_replicate=2",
            "fsdp.outer_strategy=optim",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "fsdp.offload=[\"optimizer\"]",
        ],
        &["fsdp.fuse_reduce_into_optimizer=true"],
        &[
            "fsdp.fuse_reduce_into_optimizer=true",
            "fsdp.copy_engine_reduce_scatter=true",
            "train.grad_accum=2",
        ],
        &[
            "fsdp.fuse_reduce_into_optimizer=true",
            "fsdp.copy_engine_reduce_scatter=true",
            "mesh.dp_replicate=2",
        ],
        &[
            "fsdp.fuse_reduce_into_optimizer=true",
            "fsdp.copy_engine_reduce_scatter=true",
            "train.clip_norm=1",
        ],
        &[
            "fsdp.fuse_reduce_into_optimizer=true",
            "fsdp.copy_engine_reduce_scatter=true",
            "train.grad_norm=true",
        ],
        &[
            "fsdp.fuse_reduce_into_optimizer=true",
            "fsdp.copy_engine_reduce_scatter=true",
            "fsdp.offload=[\"grads\"]",
        ],
        &["fsdp.copy_engine_reduce_scatter=true", "fsdp.policy=fsdp2"],
        &["fsdp.copy_engine_reduce_scatter=true", "compile.mode=full"],
        &[
            "fsdp.copy_engine_reduce_scatter=true",
            "fsdp.strategy=optim",
        ],
        &[
            "fsdp.copy_engine_reduce_scatter=true",
            "fsdp.separate_communicators=false",
        ],
        &[
            "fsdp.copy_engine_reduce_scatter=true",
            "mesh.dp_shard=16",
            "mesh.gpus_per_node=8",
        ],
        &["fsdp.placements.dp_shard=[\"flat\", \"replicate\", \"flat\"]"],
        &["fsdp.placements={ dp_replicate = [\"flat\", \"flat\", \"flat\"] }"],
        &["fsdp.sharding_strategy=HYBRID_SHARD"],
        &["fsdp.sharding_strategy=_HYBRID_SHARD_ZERO2"],
        &["fsdp.frozen=[\"layers 1\"]"],
        &["compile.mode=full", "fsdp.policy=megatron"],
        &["compile.fuse_projections=qkv"],
        &["compile.gemm_accumulate=true"],
        &["compile.mix_order_reductions=true"],
        &["compile.gemm_epilogue_fusion=true"],
        &["compile.fuse_projections=qkv", "compile.mode=full"],
        &[
            "compile.fuse_projections=gradients",
            "compile.mode=blocks",
            "fsdp.policy=fsdp2",
        ],
        &["compile.cuda_graph=[\"attn\"]", "fsdp.allocator=caching"],
        &["compile.cuda_graph=[\"attn\"]", "fsdp.policy=megatron"],
        &[
            "compile.cuda_graph=[\"attn\"]",
            "fsdp.allocator=double_buffer",
        ],
        &["compile.cuda_graph=[\"attn\", \"attn\"]"],
        &["compile.cuda_graph=[\"mlp\", \"block\"]"],
        &["compile.cuda_graph=[\"attn\", \"moe_router\"]"],
        &["compile.cuda_graph=[\"attn\"]", "model.preset=toy-linear"],
        &["compile.cuda_graph=full_iteration", "fsdp.nan_check=true"],
        &[
            "train.loss=chunked",
            "train.loss_chunk_tokens=1",
            "train.micro_batch=16",
            "train.seq_len=8192",
        ],
        &["model.layers=4096", "train.grad_accum=4096"],
        &["train.micro_batch=1048576", "model.hidden=1048576"],
        &[
            "model.layers=128",
            "model.hidden=65536",
            "train.seq_len=1",
            "mesh.dp_shard=1048576",
        ],
        &[
            "train.micro_batch=1048576",
            "train.grad_accum=512",
            "model.layers=1",
            "model.hidden=64",
            "model.ffn=1",
        ],
        &["fsdp.policy=megatron_v2", "compile.mode=blocks"],
        &["fsdp.policy=megatron_v2", "fsdp.strategy=optim"],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.outer_strategy=optim",
            "mesh.dp_replicate=2",
        ],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.reshard_after_forward=false",
        ],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.units=[\"layers.*\", \"output=keep\"]",
        ],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.units=[\"layers.*\", \"norm+output\"]",
        ],
        &["fsdp.policy=megatron_v2", "fsdp.prefetch_forward=2"],
        &["fsdp.policy=megatron_v2", "fsdp.prefetch_backward=0"],
        &["fsdp.policy=megatron_v2", "fsdp.async_reduce=false"],
        &["fsdp.policy=megatron_v2", "fsdp.unify_comm_stream=true"],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.separate_communicators=true",
        ],
        &["fsdp.policy=megatron_v2", "fsdp.allocator=pool"],
        &["fsdp.policy=megatron_v2", "fsdp.offload=[\"params\"]"],
        &["fsdp.policy=megatron_v2", "fsdp.per_token_loss=true"],
        &["fsdp.policy=megatron_v2", "fsdp.average_in_collective=true"],
        &["fsdp.policy=megatron_v2", "fsdp.reduce_in_flight=2"],
        &[
            "fsdp.policy=megatron_v2",
            "train.grad_accum=2",
            "fsdp.gradient_sync=last",
        ],
        &[
            "fsdp.policy=megatron_v2",
            "train.grad_accum=2",
            "fsdp.reshard_after_backward=false",
        ],
        &["fsdp.policy=megatron_v2", "precision.reduce_dtype=f32"],
        &[
            "fsdp.gradient_scaling_factor=0.5",
            "fsdp.per_token_loss=true",
        ],
        &[
            "fsdp.gradient_scaling_factor=0.5",
            "fsdp.average_in_collective=true",
        ],
        &["mesh.dp_shard=1", "fsdp.gradient_scaling_factor=0.5"],
        &[
            "fsdp.gradient_scaling_factor=0.5",
            "fsdp.policy=megatron_v2",
        ],
        &["train.joint_backward=true"],
        &[JOINT, "train.grad_accum=2", "compile.mode=full"],
        &[JOINT, "train.grad_accum=2", PROTOTYPE],
        &[JOINT, "train.grad_accum=2", PROTOTYPE, VARIANT],
        &[JOINT, "train.grad_accum=2", "train.activation_offload=true"],
        &[JOINT, "train.grad_accum=2", "fsdp.gradient_sync=last"],
        &[JOINT, "train.grad_accum=2", "train.loss=chunked"],
        &[
            "train.recompute=full",
            "train.use_reentrant=true",
            "fsdp.units=[\"layers.0+layers.1\"]",
        ],
        &["train.skipped_blocks=[{ blocks = [\"layers.999\"] }]"],
        &["train.skipped_blocks=[{ blocks = [\"layer s\"] }]"],
        &["train.skipped_blocks=[{ micro_batches = [0] }]"],
        &["train.skipped_blocks=[{ blocks = [\"layers.0\"], micro_batches = [1] }]"],
        &["train.skipped_blocks=[{ blocks = [\"layers.0\"], micro_batches = [-1] }]"],
        &["train.skipped_blocks=[{ block = [\"layers.0\"] }]"],
        &["train.skipped_blocks=\"layers.0\""],
        &[SKIPPED, "compile.mode=full"],
        &[SKIPPED, "compile.cuda_graph=[\"block\"]"],
        &[SKIPPED, PROTOTYPE],
        &[SKIPPED, "train.joint_backward=true", "train.grad_accum=2"],
        &[SKIPPED, "train.no_grad_forwards=1"],
        &[SKIPPED, "train.activation_offload=true"],
        &[SKIPPED, "fsdp.prefetch_next_step=1"],
        &["fsdp.reduce_unused=true", "fsdp.policy=fsdp2"],
        &[SKIPPED, "fsdp.reduce_unused=true"],
        &["train.no_grad_forwards=-1"],
        &["train.no_grad_forwards=1", "fsdp.strategy=optim"],
        &["train.no_grad_forwards=1", "fsdp.prefetch_next_step=1"],
        &["fsdp.atomic=rows"],
        &["fsdp.atomic=1"],
        &["fsdp.atomic=tensor", "fsdp.policy=fsdp2"],
        &["fsdp.atomic=tensor", "fsdp.policy=megatron"],
        &["fsdp.variant=pr4435"],
        &["fsdp.variant=pr4436", "fsdp.policy=megatron_v2"],
        &["fsdp.allocator=trace_pool"],
        &["fsdp.allocator=trace_pool", "fsdp.policy=megatron_v2"],
        &[PROTOTYPE, VARIANT, "mesh.dp_replicate=2"],
        &[PROTOTYPE, VARIANT, "fsdp.strategy=optim"],
        &[PROTOTYPE, VARIANT, "compile.mode=blocks"],
        &[PROTOTYPE, VARIANT, "fsdp.prefetch_forward=2"],
        &[PROTOTYPE, VARIANT, "fsdp.prefetch_backward=0"],
        &[
            PROTOTYPE,
            VARIANT,
            "train.recompute=full",
            "fsdp.prefetch_forward=0",
            "fsdp.prefetch_backward=0",
        ],
        &[
            PROTOTYPE,
            VARIANT,
            "fsdp.allocator=trace_pool",
            "train.validate_every=5",
        ],
        &[
            PROTOTYPE,
            VARIANT,
            "fsdp.allocator=trace_pool",
            "train.no_grad_forwards=1",
        ],
        &[PROTOTYPE, VARIANT, "fsdp.allocator=double_buffer"],
        &[PROTOTYPE, VARIANT, "fsdp.average_in_collective=true"],
        &[PROTOTYPE, VARIANT, "fsdp.reduce_in_flight=1"],
        &["fsdp.keep_unsharded_storage=true"],
        &[
            "fsdp.keep_unsharded_storage=\"always\"",
            "fsdp.policy=fsdp2",
        ],
        &["fsdp.no_sync_units=[\"layers.0\"]"],
        &["train.grad_accum=2", "fsdp.no_sync_units=[\"layer.0\"]"],
        &["train.grad_accum=2", "fsdp.no_sync_units=\"layers.0\""],
        &[
            "train.grad_accum=2",
            "fsdp.no_sync_units=[\"layers.0\"]",
            "fsdp.policy=megatron",
        ],
        &[
            "train.grad_accum=2",
            "fsdp.no_sync_units=[\"layers.0\"]",
            "compile.mode=full",
        ],
        &["fsdp.decoupled_gradients=true"],
        &["fsdp.decoupled_gradients=1", "fsdp.policy=megatron"],
        &[
            "fsdp.decoupled_gradients=true",
            "fsdp.policy=megatron",
            "train.optimizer=lion",
        ],
        &[
            "fsdp.decoupled_gradients=true",
            "fsdp.policy=megatron_v2",
            "precision.moments=8bit",
        ],
        &["fsdp.prefetch_lists=[{ forward = [\"layers.1\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.0\" }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layer.0\", forward = [\"layers.1\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"layers.99\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.1\", forward = [\"layers.0\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.1\", backward = [\"layers.2\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"root\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.0\", forwards = [\"layers.1\"] }]"],
        &["fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = \"layers.1\" }]"],
        &[
            "fsdp.policy=megatron",
            "fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"layers.1\"] }]",
        ],
    ];
    let mut shown = String::new();
    for set in sets {
        match minimal(set) {
            Ok(_) => panic!("accepted: {set:?}"),
            Err(e) => writeln!(shown, "{e}\n").unwrap(),
        }
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn faulty_overrides() {
    let mut shown = String::new();
    for set in [
        "fsdp.prefetch_foward=1",
        "prefetch_forward=1",
        "fsdp.prefetch_forward",
        "extends=other.toml",
        "fdsp.policy=native",
        "policy.x=native",
        ".=1",
        "fsdp.units=[\"layers.*\"",
        "fsdp.units=layers.*",
        " train.lr = fast ",
        "model.norm_eps=0",
        "fsdp.a.b.c.d.e.f.g.h.i.j=1",
    ] {
        writeln!(shown, "{}\n", minimal(&[set]).unwrap_err()).unwrap();
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn a_conflict_points_at_what_was_said_last() {
    let text =
        format!("{MINIMAL}[fsdp]\nallocator = \"caching\"\n[compile]\ncuda_graph = [\"attn\"]\n");
    let e = parse("x.toml", &text, &[]).unwrap_err();
    assert_eq!(
        (e.file(), e.position()),
        (
            "x.toml",
            Some(Position {
                line: 9,
                column: 14
            })
        )
    );
    let text = format!("{MINIMAL}[compile]\ncuda_graph = [\"attn\"]\n");
    let e = parse("x.toml", &text, &["fsdp.allocator=caching".into()]).unwrap_err();
    assert_eq!(
        (e.file(), e.position()),
        (
            "--set fsdp.allocator=caching",
            Some(Position {
                line: 1,
                column: 16
            })
        )
    );
    assert!(e.help().unwrap().contains("pool"));
}

/// Callers tell faults apart without reading messages.
#[test]
fn faults_have_a_kind() {
    use crate::scenario::ScenarioErrorKind as Kind;
    for (set, kind) in [
        ("train.colour=1", Kind::Unknown),
        ("colour.lr=1", Kind::Syntax),
        ("train.grad_accum=0", Kind::Value),
        ("train.seq_len=16384", Kind::Conflict),
        ("compile.bucket_bytes=1", Kind::NoEffect),
    ] {
        assert_eq!(minimal(&[set]).unwrap_err().kind(), kind, "{set}");
    }
    let kind = |text| parse("x", text, &[]).unwrap_err().kind();
    assert_eq!(kind("[model]\npreset = \"llama3-8b\"\n"), Kind::Missing);
    assert_eq!(kind("[model"), Kind::Syntax);
    assert_eq!(kind("[colour]\n"), Kind::Unknown);
    let missing = super::super::load(std::path::Path::new("no/such/file.toml"), &[]);
    assert_eq!(missing.unwrap_err().kind(), Kind::File);
}
