"""Stages that check correctness: each prints one line per case."""
import json, os, re, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path
from keys import CAPTURED, CAST, COPY_IN, FASTEST, IN_BACKWARD
from tools import CPU, OUT, ROOT, SHARED, call, chosen, end, fit, gpus, last_line, on_device, reference, row, shardlab, together, train, worst
import tools

# Number of runs that share the GPUs at a time: each takes seconds to start and computes little, but their collectives take turns.
AT_ONCE = int(os.environ.get("AT_ONCE", "3"))
FIXED = "precision.deterministic=true"
# Makes pushed rows of experts go through NCCL, which sends all of them.
NCCL_PUSHES = [] if CPU else ["--no-peer-memory"]
# Rows that TMA can read, so that the gates of experts are fused into their matmuls (on Hopper only).
FUSED_GATES = ["compile.mode=blocks", "compile.gemm_epilogue_fusion=true", "model.expert_ffn=48"]
# An inner dimension that is large enough for the gradients of gates to be fused, too.
DEEP = ["model.hidden=4096", "model.head_dim=16"]


def golden_scenario(folder, theirs):
    """Returns the shipped scenario of a golden run, or writes one from its `config.json` and the settings of its reference."""
    if (ROOT / "scenarios" / f"{folder.name}.toml").exists():
        return folder.name
    lines = [
        f"model = {{ preset = {json.dumps(str(folder / 'config.json'))} }}",
        f"train = {{ seq_len = {theirs['T']}, micro_batch = {theirs['B']}, steps = {theirs['steps']}, lr = {theirs['lr']}, "
        f"weight_decay = {theirs['wd']}, clip_norm = {theirs['clip']:.1f}, grad_norm = true }}",
        'mesh = { hardware = "cpu", dp_shard = 1 }',
        'precision = { compute = "f32" }',
    ]
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        c = json.loads(adapter.read_text())
        keys = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
                "rank_pattern", "alpha_pattern", "modules_to_save")
        toml = lambda v: "{ " + ", ".join(f"{json.dumps(k)} = {n}" for k, n in v.items()) + " }" if isinstance(v, dict) else json.dumps(v)
        lines.append("lora = { " + ", ".join(f"{k} = {toml(c[k])}" for k in keys if c[k] is not None) + " }")
    job = OUT / "jobs" / f"{folder.name}.toml"
    job.parent.mkdir(parents=True, exist_ok=True)
    job.write_text("\n".join(lines) + "\n")
    return job


def goldens():
    """Compares runs with those of torch in float32 without TF32: within 1e-3."""
    def case(name, world):
        def job():
            folder = ROOT / "tests/goldens" / name
            theirs = json.loads((folder / "reference.json").read_text())
            # The batch of the reference, for any number of ranks.
            sets = [*fit(world), f"train.micro_batch={theirs['B'] // world}"]
            adapter = ["--adapter", folder] if (folder / "adapter_config.json").exists() else []
            scenario = golden_scenario(folder, theirs)
            code, run, err, s = train(scenario, "--init", folder, *adapter, "--data", folder / "tokens.bin", sets=sets, timeout=90)
            if code:
                return row("goldens", f"{name} on {world}", False, last_line(err))
            losses = worst(run["losses"], theirs["losses"])
            norms = worst(run["grad_norms"], theirs["grad_norms"])
            # In memory, transformers uses other names for stacks of experts and GPT-NeoX's head; tests on the CPU compare these.
            final = theirs.get("final_norms") or theirs["final_param_norms"]
            final = [(run["final_norms"][k], v) for k, v in final.items() if k in run["final_norms"]]
            weights = max(abs(a - b) / max(b, 1e-3) for a, b in final)
            ok = max(losses, norms, weights) < 1e-3
            row("goldens", f"{name} on {world}", ok, f"losses {losses:.1e}, norms {norms:.1e}, weights {weights:.1e}, {s:.1f} s")
        return job
    # The load-balancing loss depends on how tokens are distributed over ranks.
    alone = {"mixtral-tiny-aux"}
    names = chosen(sorted(f.parent.name for f in (ROOT / "tests/goldens").glob("*/reference.json")))
    worlds = sorted({1, min(2, gpus()), min(4, gpus())})
    together([case(n, w) for n in names for w in worlds if w == 1 or n not in alone], 1 if CPU else AT_ONCE)


SMALL = ["small-native", "small-fsdp2", "small-megatron", "small-regions", "small-blocks", "small-merged", "small-engines", "small-pointwise", "small-full", "small-next-step", "small-in-backward", "small-summed", "small-fused", "small-scopes", "small-iteration",
         "small-recompute", "small-accumulation", "small-no-sync", "small-double-buffer", "small-units", "small-frozen", "small-lora", "small-lora-fsdp2",
         "small-zero1", "small-zero2", "small-ddp", "small-gpt2", "small-qwen3", "small-moe", "small-encoder", "small-linear", "small-cnn", "small-offload"]
# These also run in bf16, and the policies on two ranks as well. A rehearsal runs only those of REHEARSED.
BF16 = ["small-native", "small-fsdp2", "small-megatron", "small-regions", "small-blocks", "small-merged", "small-engines", "small-pointwise", "small-full", "small-next-step", "small-in-backward", "small-summed", "small-fused", "small-no-sync", "small-qwen3", "small-moe", "small-cnn"]
POLICIES = ["small-native", "small-fsdp2", "small-megatron"]
REHEARSED = [*POLICIES, "small-regions", "small-cnn"]
# These need several GPUs.
SEVERAL = ["small-offload"]
# These set their own mesh of 4 ranks.
MESH = ["small-hsdp", "small-hfsdp", "small-selective"]


def against_cpu(stage, title, name, sets, limit):
    """Compares a run with the same run on the CPU device: losses within `limit`, gradient norms within three times that, equal memory."""
    code, ours, err, s = train(name, "--check-nan", sets=sets, timeout=60)
    if code:
        return row(stage, title, False, last_line(err))
    code, cpu, err, _ = reference(name, sets=sets, timeout=120)
    if code:
        return row(stage, f"{title}, CPU", False, last_line(err))
    losses, norms = worst(ours["losses"], cpu["losses"]), worst(ours["grad_norms"], cpu["grad_norms"])
    ok = losses < limit and norms < 3 * limit
    same = ours["memory"]["peak_allocated_bytes"] == cpu["memory"]["peak_allocated_bytes"]
    row(stage, title, ok and same, f"losses {losses:.1e}, norms {norms:.1e}, memory {'equal' if same else 'DIFFERS'}, {s:.1f} s")


def small():
    """Compares the small scenario of every option with the CPU device, in float32 and bf16."""
    names = os.environ["ONLY"].split(",") if os.environ.get("ONLY") else (REHEARSED if CPU else SMALL) + MESH
    every = gpus()
    names = [n for n in names if every > 1 or n not in SEVERAL]

    def case(name, world, dtype, limit):
        def job():
            mesh = [] if name in MESH else fit(world)
            # cuBLASLt has no matmul of float32 inputs with a bf16 output, which bf16 gradients would need.
            sets = [*mesh, f'precision.compute="{dtype}"', *(['precision.comm_grads="f32"'] if dtype == "f32" else [])]
            title = f"{name} {dtype} on {world}"
            against_cpu("small", title, name, sets, limit)
        return job
    jobs = []
    for name in names:
        if name in MESH and every < 4:
            continue
        jobs.append(case(name, 4 if name in MESH else every, "f32", 1e-3))
        if name in BF16:
            jobs.append(case(name, every, "bf16", 3e-2))
        if name in POLICIES and every > 2:
            jobs.append(case(name, 2, "f32", 1e-3))
    together(jobs, 1 if CPU else AT_ONCE)


# Options without their own scenario: the scenario to set them on, and the settings.
LISTS = '[{unit="layers.0", forward=["layers.1", "layers.2"]}, {unit="layers.2", backward=["layers.1", "layers.0"]}]'
SKIPPED = '[{ blocks = ["layers.0"], micro_batches = [0] }, { blocks = ["layers.1"], micro_batches = [1] }]'
OFFLOADED = 'fsdp.offload=["params", "grads", "optimizer"]'
# Each sequence has documents of its own, which end with the letter n.
DOCUMENTS = ["model.vocab=256", f'train.document_lengths={{ data = "{ROOT}/tests/goldens/llama-tiny/tokens.bin", eos_token_id = 110 }}']
MOMENTS_8BIT = ["precision.moments=8bit"]
PARAM_GROUPS = ['train.param_groups=[{params=["*norm*"], weight_decay=0.0}, {params=["output"], lr_scale=0.5}]', "train.weight_decay=0.1"]
SHARDING = {
    "packed sequences": ("small-native", ["train.document_lengths=[7, 5, 12]"]),
    "packed sequences, regions": ("small-native", ["train.document_lengths=[7, 5, 12]", "compile.mode=regions"]),
    "packed sequences, fsdp2": ("small-native", ["train.document_lengths=[7, 5, 12]", "fsdp.policy=fsdp2"]),
    "documents of a file": ("small-native", DOCUMENTS),
    "documents of a file, regions": ("small-native", [*DOCUMENTS, "compile.mode=regions"]),
    "documents of a file, fsdp2": ("small-native", [*DOCUMENTS, "fsdp.policy=fsdp2", "train.grad_accum=2"]),
    "reentrant checkpointing": ("small-native", ["train.recompute=full", "train.use_reentrant=true"]),
    "reentrant checkpointing, fsdp2": ("small-native", ["train.recompute=full", "train.use_reentrant=true", "fsdp.policy=fsdp2"]),
    "activation offload": ("small-native", ["train.activation_offload=true"]),
    "activation offload, fsdp2": ("small-native", ["train.activation_offload=true", "fsdp.policy=fsdp2"]),
    "optimizer on the CPU, fsdp2": ("small-native", ["fsdp.policy=fsdp2", OFFLOADED, "train.clip_norm=0.5"]),
    "optimizer on the CPU, fsdp2, two micro-batches": ("small-native", ["fsdp.policy=fsdp2", OFFLOADED, "train.grad_accum=2"]),
    "optimizer on the CPU, fsdp2, regions": ("small-native", ["fsdp.policy=fsdp2", OFFLOADED, "compile.mode=regions"]),
    "megatron_v2": ("small-megatron-v2", []),
    "megatron_v2, pr4435": ("small-megatron-pr4435", ["train.grad_accum=2"]),
    "megatron_v2, pr4435 without prefetch": ("small-megatron-pr4435", ["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0", "fsdp.async_reduce=false"]),
    "prefetch lists": ("small-native", [f"fsdp.prefetch_lists={LISTS}"]),
    "prefetch lists, fsdp2": ("small-native", [f"fsdp.prefetch_lists={LISTS}", "fsdp.policy=fsdp2"]),
    "units without synchronization": ("small-native", ["train.grad_accum=2", 'fsdp.no_sync_units=["layers.1"]']),
    "storage kept, fsdp2": ("small-native", ["fsdp.policy=fsdp2", "fsdp.keep_unsharded_storage=true"]),
    "units without synchronization, fsdp2": ("small-native", ["train.grad_accum=2", 'fsdp.no_sync_units=["layers.1"]', "fsdp.policy=fsdp2"]),
    "sums within matmuls": ("small-native", ["train.grad_accum=3", "compile.mode=blocks", "fsdp.gradient_sync=last"]),
    "sums within matmuls, DDP": ("small-native", ["train.grad_accum=3", "compile.mode=blocks", "fsdp.strategy=no_shard"]),
    "one backward over two forwards": ("small-native", ["train.grad_accum=2", "train.joint_backward=true"]),
    "one backward over two forwards, fsdp2": ("small-native", ["train.grad_accum=2", "train.joint_backward=true", "fsdp.policy=fsdp2"]),
    "one backward over two forwards, megatron": ("small-megatron", ["train.grad_accum=2", "train.joint_backward=true"]),
    "skipped blocks": ("small-native", ["train.grad_accum=2", f"train.skipped_blocks={SKIPPED}"]),
    "skipped blocks, fsdp2": ("small-native", ["train.grad_accum=2", f"train.skipped_blocks={SKIPPED}", "fsdp.policy=fsdp2", "fsdp.prefetch_forward=2"]),
    "skipped blocks, zeros reduced": ("small-native", ["train.grad_accum=2", f"train.skipped_blocks={SKIPPED}", "fsdp.policy=fsdp2", "fsdp.reduce_unused=true"]),
    "skipped blocks, megatron": ("small-megatron", ["train.grad_accum=2", f"train.skipped_blocks={SKIPPED}"]),
    "forwards without gradients": ("small-native", ["train.no_grad_forwards=2"]),
    "forwards without gradients, fsdp2": ("small-native", ["train.no_grad_forwards=2", "fsdp.policy=fsdp2"]),
    "muon": ("small-native", ["train.optimizer=muon", "train.clip_norm=0.5"]),
    "muon that gathers matrices": ("small-fsdp2", ["train.optimizer=muon", "train.clip_norm=0.5"]),
    "muon, two micro-batches": ("small-native", ["train.optimizer=muon", "train.muon_adjust_lr=match_rms_adamw", "train.grad_accum=2"]),
    "frozen weights in NF4": ("small-qlora", []),
    "frozen weights in NF4, scales in float32": ("small-qlora", ["precision.frozen_params=nf4_f32", "compile.mode=regions"]),
    "frozen weights in int8": ("small-qlora", ["precision.frozen_params=int8"]),
    "whole tensors per rank": ("small-native", ["fsdp.atomic=tensor"]),
    "whole blocks of 4 x 4": ("small-native", ["fsdp.atomic=4"]),
    "gradient scaling factor": ("small-native", ["fsdp.gradient_scaling_factor=0.3"]),
    "gradient scaling factor, megatron": ("small-megatron", ["fsdp.gradient_scaling_factor=0.3"]),
    "decoupled gradients": ("small-megatron", ["fsdp.decoupled_gradients=true"]),
    "shards cast per gather": ("small-native", ["fsdp.cast_before_all_gather=true"]),
    "shards cast on a stream": ("small-native", ["fsdp.cast_before_all_gather=true", COPY_IN]),
    "losses of bf16 logits": ("small-native", ["precision.loss_fp32_upcast=false"]),
    "DoRA": ("small-lora", ["lora.use_dora=true"]),
    "DoRA, regions": ("small-lora", ["lora.use_dora=true", "compile.mode=regions"]),
    "DoRA, blocks, fsdp2": ("small-lora", ["lora.use_dora=true", "compile.mode=blocks", "fsdp.policy=fsdp2"]),
    "norms of parameters": ("small-native", ["train.param_norms_every=2"]),
    "Lion": ("small-native", ["train.optimizer=lion"]),
    "Lion, fsdp2": ("small-native", ["train.optimizer=lion", "fsdp.policy=fsdp2"]),
    "moments in 8 bits": ("small-native", MOMENTS_8BIT),
    "moments in 8 bits, fsdp2": ("small-native", [*MOMENTS_8BIT, "fsdp.policy=fsdp2"]),
    "parameter groups": ("small-native", PARAM_GROUPS),
    "parameter groups, fsdp2": ("small-native", [*PARAM_GROUPS, "fsdp.policy=fsdp2"]),
}
# These need parameters and main weights of different types.
BF16_ALONE = ["decoupled gradients", "shards cast per gather", "shards cast on a stream", "losses of bf16 logits"]


def sharding():
    """Compares options of the sharding engine, packed sequences and checkpointing with the CPU device, in float32 and bf16."""
    every = gpus()

    def case(title, name, sets, dtype, limit):
        def job():
            types = [f'precision.compute="{dtype}"', *(['precision.comm_grads="f32"'] if dtype == "f32" else [])]
            against_cpu("sharding", f"{title}, {dtype}", name, [*fit(every), *types, *sets], limit)
        return job
    titles = chosen(SHARDING)
    together([case(t, *SHARDING[t], dtype, limit) for dtype, limit in (("f32", 1e-3), ("bf16", 3e-2)) for t in titles
              if dtype == "bf16" or t not in BF16_ALONE], 1 if CPU else AT_ONCE)


# Policies with an allocator whose addresses repeat in every step, as captured scopes need.
ADDRESSES = {"native": ["fsdp.policy=native"],
             "megatron": ["fsdp.policy=megatron", "fsdp.allocator=double_buffer", "fsdp.persist_on_alloc_fail=true"]}
# Steps move the biases of routers by the load of experts.
MOVED = ["model.router=sigmoid", "model.router_bias=true", "model.router_bias_update_speed=0.01"]
# Scopes of layers with experts, without and with the exchange of tokens, for which `all_to_all` blocks the host.
BEFORE_EXCHANGE = [["attn"], ["moe_router"], ["moe_preprocess"], ["attn", "moe_router"], ["attn", "moe_router", "moe_preprocess"]]
WITH_EXCHANGE = [["moe"], ["attn", "moe"], ["block"]]


def moe():
    """Compares experts, with and without expert parallelism, with the CPU device; captured with eager runs, whose losses are bitwise equal although
    tokens change experts between steps; and fused with separate gates."""
    name, every = "small-moe", gpus()
    f32, bf16 = ['precision.compute="f32"', 'precision.comm_grads="f32"'], ['precision.compute="bf16"']
    captured = ['compile.cuda_graph=["block"]']
    ways = {
        # Matmuls on Hopper's tensor cores need rows that are multiples of 16 bytes: rows of 48 elements are, those of 44 are not.
        "f32": (f32, 1e-3), "bf16": (bf16, 3e-2), "bf16, rows of 96 bytes": ([*bf16, "model.expert_ffn=48"], 3e-2),
        "fused gates": ([*bf16, *FUSED_GATES], 3e-2), "fused gates, recompute": ([*bf16, *FUSED_GATES, "train.recompute=full"], 3e-2),
        "regions": ([*f32, "compile.mode=regions"], 1e-3), "blocks, bf16": ([*bf16, "compile.mode=blocks"], 3e-2), "full": ([*f32, "compile.mode=full"], 1e-3),
        "recompute": ([*f32, "train.recompute=full"], 1e-3), "selective": ([*f32, "train.recompute=selective"], 1e-3),
        "fsdp2": ([*f32, "fsdp.policy=fsdp2"], 1e-3), "megatron": ([*f32, "fsdp.policy=megatron"], 1e-3),
        "captured blocks": ([*f32, *captured], 1e-3),
        "captured iteration": ([*f32, 'compile.cuda_graph="full_iteration"'], 1e-3),
        "sigmoid in groups": ([*f32, "model.router=sigmoid", "model.router_groups=4", "model.router_group_top_k=2"], 1e-3),
        "router biases": ([*f32, *MOVED], 1e-3), "router biases, two micro-batches": ([*f32, *MOVED, "train.grad_accum=2"], 1e-3),
        "router biases, recompute": ([*f32, *MOVED, "train.recompute=full"], 1e-3),
        "router biases, captured iteration": ([*f32, *MOVED, 'compile.cuda_graph="full_iteration"'], 1e-3),
    }
    # With forced routing, all devices choose the same experts, however they round sums.
    round_robin = ["moe.force_routing=true", "moe.routing=round_robin"]
    force, seeded = "moe.force_routing=true", ["moe.force_routing=true", "moe.routing=seeded", "moe.imbalance=2"]
    ways |= {
        "forced, balanced": ([*f32, force], 1e-3), "forced, round robin": ([*f32, *round_robin], 1e-3), "forced, seeded": ([*f32, *seeded], 1e-3),
        "forced, seeded, captured blocks": ([*f32, *seeded, *captured], 1e-3),
        "forced, 128 experts, top 8": ([*f32, *seeded, "model.experts=128", "model.top_k=8"], 1e-3),
    }
    alike = ("forced, seeded", "forced, 128 experts, top 8", "f32", "bf16", "bf16, rows of 96 bytes", "fused gates", "regions", "blocks, bf16", "full", "recompute", "selective", "fsdp2", "megatron", "captured blocks", "captured iteration")
    sizes = [ep for ep in (2, 4) if ep <= every]
    if every > 1:
        # No two ranks have the same expert, and FSDP does not manage any.
        own = [f"mesh.ep={every}", "fsdp.policy=fsdp2", "fsdp.ignored_params=experts", "moe.capacity_factor=4"]
        half = ["precision.main_params=none", "precision.main_grads=bf16"]
        ways |= {"ignored experts": ([*f32, *own], 1e-3), "ignored experts, bf16": ([*bf16, *half, *own], 3e-2)}
    # These policies reserve rows for equally popular experts.
    room = {way: ["moe.capacity_factor=4"] for way in ("fsdp2", "megatron")}
    ways |= {f"{way}, ep {ep}": ([*ways[way][0], *room.get(way, []), f"mesh.ep={ep}"], ways[way][1]) for ep in sizes for way in alike if ep == 2 or way in ("f32", "bf16")}
    sent = {
        "all_to_all": ["moe.dispatcher=all_to_all"], "padded": ["moe.dispatcher=padded"],
        "padded, captured iteration": ["moe.dispatcher=padded", 'compile.cuda_graph="full_iteration"'],
        "peer": ["moe.dispatcher=peer"], "peer, recompute": ["moe.dispatcher=peer", "train.recompute=full"],
        "peer, captured iteration": ["moe.dispatcher=peer", 'compile.cuda_graph="full_iteration"'],
        "deepep": ["moe.dispatcher=deepep"], "deepep, recompute": ["moe.dispatcher=deepep", "train.recompute=full"],
        "deepep, forced, seeded": ["moe.dispatcher=deepep", *seeded],
        "peer, forced, round robin": ["moe.dispatcher=peer", *round_robin], "deepep, forced, round robin": ["moe.dispatcher=deepep", *round_robin],
        "peer, forced, seeded": ["moe.dispatcher=peer", *seeded], "all_to_all, forced, balanced": ["moe.dispatcher=all_to_all", force],
        "padded, dropped": ["moe.dispatcher=padded", "moe.capacity_factor=0.75"], "router biases": MOVED,
        "gather, forced, no spare row": ["moe.dispatcher=gather", force, "moe.capacity_factor=1"],
    }
    # A shared expert computes while tokens travel, eager and captured.
    shared = "model.shared_expert_ffn=32"
    sent |= {
        "shared expert, all_to_all": [shared, "moe.dispatcher=all_to_all"], "shared expert, padded": [shared, "moe.dispatcher=padded"],
        "shared expert, peer": [shared, "moe.dispatcher=peer"], "shared expert, deepep": [shared, "moe.dispatcher=deepep"], "shared expert, gather, regions": [shared, "compile.mode=regions"],
        "shared expert, captured parts of blocks": [shared, 'compile.cuda_graph=["attn", "moe_router", "moe_preprocess"]'],
        "shared expert, peer, captured iteration": [shared, "moe.dispatcher=peer", 'compile.cuda_graph="full_iteration"'],
    }
    few = ["moe.on_overflow=drop", "moe.capacity_factor=0.75"]
    sent |= {f"{dispatcher}, dropped": [f"moe.dispatcher={dispatcher}", *few] for dispatcher in ("gather", "peer", "all_to_all")}
    sent |= {f"{dispatcher}, dropped, captured iteration": [*sent[f"{dispatcher}, dropped"], 'compile.cuda_graph="full_iteration"'] for dispatcher in ("gather", "peer")}
    ways |= {f"{way}, ep {ep}": ([*f32, *sets, f"mesh.ep={ep}"], 1e-3) for ep in sizes for way, sets in sent.items()}

    def case(title, sets, limit):
        def job():
            against_cpu("moe", title, name, [*fit(every), *sets], limit)
        return job

    def beyond(ep, dispatcher, more):
        title = ", ".join(["too few rows", dispatcher, f"ep {ep}", *more])

        def job():
            sets = [*fit(every), *f32, f"mesh.ep={ep}", f"moe.dispatcher={dispatcher}", "moe.capacity_factor=0.5", "moe.on_overflow=error", *more]
            # Of choices that do not depend on rounding, both devices find the same ones without a row.
            words = [" ".join(run(name, sets=[*sets, force], timeout=60)[2].split()) for run in (train, reference)]
            said = [re.search(r"layers\.\d+: kernel .*?(\d+) choices .*? reserves (\d+) rows .*?factor = [\d.]+", text) for text in words]
            same = all(said) and said[0][0] == said[1][0]
            row("moe", title, same, said[0][0] if same else f"{words[0][:300]} / {words[1][:300]}")
        return job

    def recorded(ep):
        title = "counts of forced choices" + (f", ep {ep}" if ep > 1 else "")

        def job():
            sets = [*fit(every), *f32, *seeded, f"mesh.ep={ep}", "model.experts=60", "model.top_k=4"]
            counts = []
            for run, device in ((train, "device"), (reference, "cpu")):
                file = OUT / f"routing-{device}-{ep}.json"
                code, _, err, _ = run(name, "--record-routing", file, sets=sets, timeout=90)
                if code:
                    return row("moe", title, False, last_line(err))
                counts.append(json.loads(file.read_text())["layers"])
            same = counts[0] == counts[1]
            most = max(max(of) * len(of) / sum(of) for of in counts[0].values())
            row("moe", title, same, f"counts are {'equal' if same else 'NOT equal'} to those of the CPU device, the largest is {most:.2f} times the mean")
        return job

    def moved(ep, more):
        title = ", ".join(["moved biases", *([f"ep {ep}"] if ep > 1 else []), *more])

        def job():
            # Choices that depend on no score are the same on every device, and so are the steps of biases.
            sets = [*fit(every), *seeded, f"mesh.ep={ep}", "model.router_bias=true", "model.router_bias_update_speed=0.01", "train.steps=5", *more]
            runs = [run(name, sets=sets, timeout=90) for run in (train, reference)]
            if any(run[0] for run in runs):
                return row("moe", title, False, last_line(next(run[2] for run in runs if run[0])))
            one, other = ([norm for of, norm in run[1]["final_norms"].items() if "router_bias" in of] for run in runs)
            same = one == other and len(one) == 2 and min(one) > 0.01
            row("moe", title, same, f"norms of biases are {'equal' if same else 'NOT equal'} to those of the CPU device to the last bit: {one}")
        return job

    def replayed(ep, policy, dispatcher, scopes):
        title = ", ".join(["captured and eager", policy, *([f"ep {ep}", dispatcher] if ep > 1 else [])])

        def job():
            sets = [*fit(every), *bf16, "train.steps=20", f"mesh.ep={ep}", *ADDRESSES[policy]]
            # Enough rows for every case: by default, these scenarios may reserve rows for balanced experts only.
            sets += [f"moe.dispatcher={dispatcher}", *(["moe.capacity_factor=4"] if dispatcher != "gather" else [])] if ep > 1 else []
            eager, *others = [train(name, sets=[*sets, *more], timeout=60) for more in ([], *([f"compile.cuda_graph={json.dumps(s)}"] for s in scopes))]
            failed = next((run for run in (eager, *others) if run[0]), None)
            if failed:
                return row("moe", title, False, last_line(failed[2]))
            far = [json.dumps(s) for s, run in zip(scopes, others) if run[1]["losses"] != eager[1]["losses"]]
            row("moe", title, not far, f"losses of 20 steps with {len(scopes)} choices of scopes are " + (f"NOT equal: {', '.join(far)}" if far else "equal to the last bit"))
        return job

    def fused(ep, more):
        title = ", ".join(["fused and separate gates", *([f"ep {ep}"] if ep > 1 else []), *more])

        def job():
            # Fuses only matmuls of experts: with fusion off, cuBLAS would compute the others, with other roundings.
            sets = [*fit(every), *bf16, *FUSED_GATES, *DEEP, "train.steps=20", f"mesh.ep={ep}", "model.dense_layers=0", "model.shared_expert_ffn=0", *more]
            runs = [train(name, sets=[*sets, *apart], timeout=60) for apart in ([], ["compile.gemm_epilogue_fusion=false"])]
            if any(run[0] for run in runs):
                return row("moe", title, False, last_line(next(run[2] for run in runs if run[0])))
            # In backward, the tiles add up the gradients of the router's weights in another order.
            one, other = (run[1]["losses"] for run in runs)
            same, far = one[0] == other[0], worst(one, other)
            row("moe", title, same and far < 5e-3, f"first losses are {'equal' if same else 'NOT equal'} to the last bit, those of 20 steps {far:.1e}")
        return job

    def pushed(ep, title, sets, flags):
        # Rows of 72 bytes are not a multiple of the vector width.
        narrow = ["model.hidden=36", "model.heads=2", "model.kv_heads=1"] if "72 bytes" in title else []
        title = f"pushed rows, {title}, ep {ep}"

        def job():
            base = [*fit(every), *bf16, "train.steps=20", f"mesh.ep={ep}", "moe.dispatcher=peer", *narrow]
            code, first, err, _ = train(name, *NCCL_PUSHES, sets=base, timeout=60)
            if code:
                return row("moe", title, False, last_line(err))
            code, run, err, s = train(name, *flags, sets=[*base, *sets], timeout=60)
            if code:
                return row("moe", title, False, last_line(err))
            same = all(run[k] == first[k] for k in ("losses", "final_norms"))
            mapped = CPU or run["environment"].get("peer_memory") == "mapped"
            why = "" if mapped else f"; NOT mapped: {run['environment'].get('peer_memory.refused')}"
            row("moe", title, same and mapped, f"losses of 20 steps are {'equal' if same else 'NOT equal'} to those by NCCL to the last bit{why}, {s:.1f} s")
        return job
    pushes = {
        "eager": ([], []), "captured blocks": (captured, []), "captured iteration": (['compile.cuda_graph="full_iteration"'], []),
        "rows of 72 bytes": ([], []), "delays": ([], ["--delays", 3]), "delays, captured iteration": (['compile.cuda_graph="full_iteration"'], ["--delays", 4]),
        **({} if SHARED else {"threads": ([], ["--one-process"])}),
    }
    all_scopes = [*BEFORE_EXCHANGE, *WITH_EXCHANGE]
    captures = [(ep, policy, dispatcher, scopes) for policy in ADDRESSES for ep in (1, *sizes) for dispatcher, scopes in (
        [("all_to_all", BEFORE_EXCHANGE), *((d, all_scopes) for d in ("gather", "padded", "peer"))] if ep > 1 else [("", all_scopes)])]
    lacking = [("all_to_all", []), *((d, more) for d in ("gather", "padded", "peer") for more in ([], ['compile.cuda_graph="full_iteration"']))]
    cases = [case(t, *ways[t]) for t in chosen(ways)]
    others = [*(recorded(ep) for ep in (1, *sizes)), *(beyond(ep, *way) for ep in sizes for way in lacking), *(replayed(*way) for way in captures),
              *(moved(ep, more) for ep in (1, *sizes) for more in ([], ['compile.cuda_graph="full_iteration"'], ["train.micro_batch=1", "train.grad_accum=2"])),
              *(fused(ep, more) for ep in (1, *sizes) for more in ([], ["train.recompute=full"])),
              *(pushed(ep, t, *w) for ep in sizes for t, w in pushes.items())]
    together([*cases, *(others if chosen(["others"]) else [])], 1 if CPU else AT_ONCE)


def float8():
    """Compares 8-bit matmuls with the CPU device, which accumulates in float32; and options that must not change a bit of the losses on the GPU."""
    name, every = "small-fp8", gpus()
    slow, rowwise = "precision.float8_fast_accum=false", "precision.float8_recipe=rowwise"
    eager, saved = "compile.mode=off", "precision.float8_saved=float8"
    # Sizes with a partial last block along rows, columns and tokens.
    blockwise, several = "precision.float8_recipe=blockwise", ["model.hidden=320", "model.ffn=432", "train.micro_batch=12"]
    # Gathers need whole blocks.
    blocks = [blockwise, "model.hidden=256", "model.kv_heads=4", "model.ffn=640"]
    # Sums in another order differ in the last bit, their 8-bit codes by up to 1/16, and the router then chooses other experts: after more
    # steps, gradient norms differ by as much as the limit allows, while losses are within 0.2 %.
    few = "train.steps=4"
    ways = {
        "compiled": [], "compiled, float32 sums": [slow], "eager": [eager], "full": ["compile.mode=full"], "codes saved": [saved],
        "recompute": ["train.recompute=full"], "fsdp2": ["fsdp.policy=fsdp2"], "megatron": ["fsdp.policy=megatron"],
        "captured iteration": ['compile.cuda_graph="full_iteration"'], "biases": ["model.bias=true"],
        "rowwise": [rowwise], "rowwise, eager": [rowwise, eager], "rowwise, float32 sums": [rowwise, slow],
        "blockwise": [blockwise], "blockwise, eager": [blockwise, eager], "blockwise, codes saved": [blockwise, saved],
        "blockwise, several blocks": [blockwise, *several, few], "blockwise, several blocks, captured": [blockwise, *several, CAPTURED, few],
    }
    # Sizes too small to fill a tile.
    moe = ["precision.float8_recipe=tensorwise", "precision.float8_experts=true", "model.hidden=32", "model.ffn=96", "model.expert_ffn=48",
           "model.shared_expert_ffn=48", "train.seq_len=24"]
    # Several tiles and several steps of 128 per expert, the last ones partial.
    larger = ["model.hidden=320", "model.expert_ffn=400", "train.micro_batch=32"]
    experts = {
        "experts": [], "experts, float32 sums": [slow], "experts, eager": [eager], "experts, compiled": ["compile.mode=blocks"],
        "experts, codes saved": [saved], "experts, recompute": ["train.recompute=full"], "experts, captured": [CAPTURED],
        "experts, larger": [*larger, few], "experts, larger, float32 sums": [*larger, slow, few],
    }
    # A single rank has no shards to gather.
    gathered, unclipped = "precision.float8_all_gather=true", "train.clip_norm=0"
    if every > 1:
        ways |= {
            "8-bit gathers": [gathered], "8-bit gathers, eager": [gathered, eager], "8-bit gathers, codes saved": [gathered, saved],
            "8-bit gathers, cast before each": [gathered, CAST], "8-bit gathers, cast on a stream": [gathered, CAST, COPY_IN], "8-bit gathers, captured": [gathered, CAPTURED],
            "8-bit gathers, fsdp2": [gathered, "fsdp.policy=fsdp2"], "8-bit gathers, megatron": [gathered, "fsdp.policy=megatron"],
            "8-bit gathers, blockwise": [*blocks, gathered, few], "8-bit gathers, blockwise, eager": [*blocks, gathered, eager, few],
            "8-bit gathers, blockwise, captured": [*blocks, gathered, CAPTURED, few],
        }
        experts |= {"experts, 8-bit gathers": [gathered]}
        divided = f"mesh.ep={every}"
        for dispatcher in ("gather", "all_to_all", "padded", "peer"):
            ep = [divided, f"moe.dispatcher={dispatcher}"]
            experts |= {
                f"experts, {dispatcher}": ep, f"experts, {dispatcher}, compiled": [*ep, "compile.mode=blocks"],
                f"experts, {dispatcher}, compiled, codes saved, larger": [*ep, "compile.mode=blocks", saved, *larger, few],
            }
        experts |= {"experts, divided, 8-bit gathers": [divided, gathered]}

    def case(title, sets, name=name):
        def job():
            against_cpu("float8", title, name, [*fit(every), *sets], 3e-2)
        return job

    def experts_alike(title, sets, more):
        def job():
            # Only losses are compared: this model has no Hugging Face format to export weights to.
            runs = [train("small-moe", sets=[*fit(every), FIXED, "train.steps=20", *moe, *sets, *extra], timeout=60) for extra in ([], more)]
            if any(run[0] for run in runs):
                return row("float8", title, False, last_line(next(run[2] for run in runs if run[0])))
            same = runs[0][1]["losses"] == runs[1][1]["losses"]
            row("float8", title, same, f"losses of 20 steps are {'equal' if same else 'NOT equal'} to the last bit")
        return job

    def alike(title, sets, more):
        def job():
            # Compares whole weights: norms are sums over the ranks' shards, whose boundaries depend on the parameter groups.
            with tempfile.TemporaryDirectory() as folder:
                files = [os.path.join(folder, which) for which in ("one", "other")]
                runs = [train(name, "--export", file, sets=[*fit(every), FIXED, "train.steps=20", *sets, *extra], timeout=60)
                        for file, extra in zip(files, ([], more))]
                if any(run[0] for run in runs):
                    return row("float8", title, False, last_line(next(run[2] for run in runs if run[0])))
                weights = [Path(file, "model.safetensors").read_bytes() for file in files]
            same = runs[0][1]["losses"] == runs[1][1]["losses"] and weights[0] == weights[1]
            row("float8", title, same, f"losses and weights after 20 steps are {'equal' if same else 'NOT equal'} to the last bit")
        return job
    # Codes have the scale of forward, whether they are saved or cast again; graphs replay the same kernels.
    pairs = {"codes saved or made again": ([], [saved]), "blockwise, eager, recompute": ([blockwise, *several, eager], ["train.recompute=full"]), "captured and not": ([], ['compile.cuda_graph="full_iteration"']),
             "prefetch 0 and 1": ([], ["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"])}
    if every > 1:
        # The codes are those of the gathered bf16 weight. Runs are not clipped: the norm is a sum over parameter groups, which differ.
        more = {"": [], ", eager": [eager], ", all merged": ['compile.fuse_projections="all"'], ", cast before each": [CAST],
                ", captured": [CAPTURED], ", fastest": FASTEST, ", in backward": [IN_BACKWARD], ", recompute": ["train.recompute=full"],
                ", no reshard": ["fsdp.reshard_after_forward=false"], ", accumulated": ["train.grad_accum=2"],
                ", megatron": ["fsdp.policy=megatron"]}
        pairs |= {f"gathers of codes and of bf16{t}": ([unclipped, *sets], [gathered]) for t, sets in more.items()}
        ways_of_blocks = {"": [], ", eager": [eager], ", cast before each": [CAST], ", captured": [CAPTURED]}
        pairs |= {f"gathers of blocks and of bf16{t}": ([unclipped, *blocks, *sets], [gathered]) for t, sets in ways_of_blocks.items()}
    pairs_of_experts = {"experts, eager, codes saved or made again": ([eager], [saved]), "experts, eager, recompute": ([eager, *larger], ["train.recompute=full"]),
                        "experts, captured and not": ([], [CAPTURED])}
    together([*(case(t, w) for t, w in ways.items()), *(case(t, [*moe, *w], "small-moe") for t, w in experts.items()),
              *(alike(t, *w) for t, w in pairs.items()), *(experts_alike(t, *w) for t, w in pairs_of_experts.items())], 1 if CPU else AT_ONCE)


def tensor_parallel():
    """Compares tensor parallelism with whole layers on one rank of the CPU device: checks the collectives of the model graph."""
    if gpus() < 2:
        return
    name = "small-tensor-parallel"
    # cuBLASLt has no matmul of float32 inputs with a bf16 output, which bf16 gradients would need.
    f32, bf16 = ['precision.compute="f32"', 'precision.comm_grads="f32"'], ['precision.compute="bf16"']
    ways = {
        # Matmuls on Hopper's tensor cores need rows that are multiples of 16 bytes: rows of 48 elements are, those of 44 are not.
        "f32": (f32, 1e-3), "bf16": (bf16, 3e-2), "bf16, rows of 96 bytes": ([*bf16, "model.expert_ffn=48"], 3e-2),
        "regions": ([*f32, "compile.mode=regions"], 1e-3), "blocks, bf16": ([*bf16, "compile.mode=blocks"], 3e-2), "full": ([*f32, "compile.mode=full"], 1e-3),
        "recompute": ([*f32, "train.recompute=full"], 1e-3),
        "captured blocks": ([*f32, 'compile.cuda_graph=["block"]'], 1e-3),
        "captured iteration": ([*f32, 'compile.cuda_graph="full_iteration"'], 1e-3),
    }

    def case(title, shards, sets, limit):
        def job():
            mesh = [f"mesh.dp_shard={shards}", "mesh.dp_outer=1"]
            code, ours, err, s = train(name, "--check-nan", sets=[*mesh, "mesh.tp=2", *sets], timeout=60)
            if code:
                return row("tensor_parallel", title, False, last_line(err))
            code, whole, err, _ = reference(name, sets=[*mesh, "mesh.tp=1", *sets], timeout=120)
            if code:
                return row("tensor_parallel", f"{title}, CPU", False, last_line(err))
            losses, norms = worst(ours["losses"], whole["losses"]), worst(ours["grad_norms"], whole["grad_norms"])
            row("tensor_parallel", title, losses < limit and norms < 3 * limit, f"losses {losses:.1e}, norms {norms:.1e}, {s:.1f} s")
        return job
    jobs = [case(f"{way} on 1 x 2", 1, *how) for way, how in ways.items()]
    if gpus() >= 4:
        jobs.append(case("f32 on 2 x 2", 2, *ways["f32"]))
    together(jobs, 1 if CPU else AT_ONCE)


SAME = {
    "prefetch 0": ["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
    "prefetch 3": ["fsdp.prefetch_forward=3", "fsdp.prefetch_backward=3"],
    "one reduction in flight": ["fsdp.reduce_in_flight=1"],
    "gathers for the next step": ["fsdp.prefetch_next_step=2"],
    "caching allocator": ['fsdp.allocator="caching"'],
    "captured scopes": ['compile.cuda_graph=["attn", "mlp"]'],
    "captured iteration": ['compile.cuda_graph="full_iteration"'],
}


# The options of the fastest steps: compiled regions, copy engines, gradients sent in 16 bits, a chunked loss.
ENGINES = ("small-engines", ["compile.mode=regions", 'precision.compute="bf16"', 'precision.comm_grads="bf16"'])
# The same where the optimizer can also sum gradients: one micro-batch, no clipping.
SUMMABLE = (ENGINES[0], [*ENGINES[1], "train.grad_accum=1", "train.clip_norm=0"])
SUMMED = "fsdp.fuse_reduce_into_optimizer=true"
# The same with our own matmul kernels, which have fused epilogues.
FUSED = (ENGINES[0], [*ENGINES[1], "compile.gemm_epilogue_fusion=true"])
PLAIN = ("small-native", [])


def same_as(stage, cases, of=PLAIN):
    """Checks that every case has bitwise the same losses and weights as the run without its settings."""
    name, sets = of
    if SHARED:
        # Ranks of one process cannot share a GPU.
        cases = {k: v for k, v in cases.items() if "--one-process" not in v[1]}
    base = [*fit(gpus()), FIXED, *sets]
    suffix = ", engines" if of is ENGINES else ", fused epilogues" if of is FUSED else ""
    code, first, err, _ = train(name, "--steps", 10, sets=base, timeout=60)
    if code:
        return row(stage, name, False, last_line(err))

    def case(title, sets, flags):
        def job():
            code, run, err, s = train(name, "--steps", 10, *flags, sets=[*base, *sets], timeout=90)
            if code:
                return row(stage, title + suffix, False, last_line(err))
            ok = all(run[k] == first[k] for k in ("losses", "final_norms"))
            row(stage, title + suffix, ok, f"loss {run['losses'][-1]!r} and {first['losses'][-1]!r}, {s:.1f} s")
        return job
    together([case(t, *c) for t, c in cases.items()], 1 if CPU else AT_ONCE)


def bits():
    """Checks that losses and weights are bitwise equal from run to run and for every schedule, with the plainest and the fastest options."""
    more = {"without graphs": (SAME["captured iteration"], ["--no-graphs"])}
    same = {k: (v, []) for k, v in SAME.items() if gpus() > 1 or k != "gathers for the next step"}
    same_as("bits", {"again": ([], []), **same, **more}, PLAIN)
    if gpus() > 1:
        same["cast before all-gathers"] = ([CAST], [])
        same["cast on a stream"] = ([CAST, COPY_IN], [])
    same_as("bits", {"again": ([], []), **same, **more}, ENGINES)
    same_as("bits", {"again": ([], []), **{k: same[k] for k in ("prefetch 0", "captured scopes", "captured iteration")}}, FUSED)
    if gpus() > 1:
        captured = SAME["captured iteration"]
        summed = {"summed in the optimizer": [], "summed in backward": ["fsdp.optimizer_in_backward=true"], "summed in the optimizer, captured": captured}
        same_as("bits", {k: ([SUMMED, *v], []) for k, v in summed.items()}, SUMMABLE)


def delays():
    """Checks that delays of random instructions change no bit."""
    cases = {f"seed {s}": ([], ["--delays", s]) for s in (1, 2, 3)}
    cases["seed 4, captured scopes"] = (SAME["captured scopes"], ["--delays", 4])
    for of in (PLAIN, ENGINES, FUSED):
        same_as("delays", cases, of)


def on_gpus():
    """Returns the number of processes that hold GPU memory."""
    if CPU:
        return 0
    r = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True)
    return len(r.stdout.split())


def modes():
    """Checks the ways to run ranks: bitwise equal results, both ways to measure times, a killed rank ends the run on all ranks, and a stopped run resumes."""
    same_as("modes", {
        "a process a rank, again": ([], []),
        "ranks as threads": ([], ["--one-process"]),
        "times by events": ([], ["--times", "events"]),
        # Captured collectives: rank 0 measures times in the last step, which it runs without replaying graphs.
        "threads, captured iteration": (SAME["captured iteration"], ["--one-process"]),
        "threads, times by records": ([], ["--one-process", "--times", "cupti", "--timeout", "15"] if not CPU else ["--one-process"]),
    })
    if gpus() > 1:
        same_as("modes", {
            "ranks as threads": ([], ["--one-process"]),
            "threads, captured iteration": (SAME["captured iteration"], ["--one-process"]),
        }, ENGINES)
    trace = OUT / "trace-modes.json"
    code, run, err, s = train("small-native", "--trace", trace, sets=fit(gpus()), timeout=60)
    if code == 0:
        spans = sum(e["ph"] == "X" for e in json.loads(trace.read_text())["traceEvents"])
        row("modes", "trace of rank 0", spans > 100, f"{spans} spans, exposed {run['exposed_ms']['total']:.3f} ms, {s:.1f} s")
    else:
        row("modes", "trace of rank 0", False, last_line(err))
    if shutil.which("torchrun") and not CPU:
        command = ["torchrun", "--no-python", f"--nproc-per-node={gpus()}", "--master-port", str(20000 + os.getpid() % 20000),
                   tools.binary, "exec", "small-native", "--json", "--no-store", *on_device(), "--steps", "3"]
        command += [x for v in fit(gpus()) for x in ("--set", v)]
        code, out, err, s = call(command, 90)
        row("modes", "started by torchrun", code == 0 and '"losses"' in out, f"{s:.1f} s" if code == 0 else last_line(err))
    killed()
    stopped()


def hangs():
    """Checks that a rank that hangs, never joins or runs out of memory ends the run on all ranks and leaves no process on the GPUs."""
    if gpus() > 1:
        before = on_gpus()
        together(hung() + absent(), 1 if CPU else AT_ONCE)
        # Run alone: these fill the GPUs.
        no_room()
        time.sleep(1)
        after = on_gpus()
        row("hangs", "nothing stays on the GPUs", after <= before, f"{before} processes on the GPUs before, {after} after")


# Runs whose communicator is aborted: collectives as kernels, on copy engines, as rows pushed into peer memory, and each of them in CUDA graphs.
HANGS = {"small-native": [], "small-engines": [], "small-engines, captured": ['compile.cuda_graph="full_iteration"'], "small-iteration": [],
         "small-moe, peer": ["moe.dispatcher=peer", "mesh.ep=2"],
         "small-moe, peer, captured": ["moe.dispatcher=peer", "mesh.ep=2", 'compile.cuda_graph="full_iteration"']}


# Ways to run ranks. Ranks of one process cannot share a GPU.
MODES = (("processes", "--processes"), ("threads", "--one-process"))[:1 if SHARED else 2]


def hung():
    """Returns cases in which rank 1 hangs, on its host or in a collective. The other ranks notice this within the timeout, as processes and
    as threads, and the run ends by itself with every kind of collective."""
    patience = 5

    def case(title, mode, name, sets, what):
        def job():
            code, _, err, s = train(name.split(",")[0], "--steps", 50, "--timeout", patience, "--fault", f"1:{what}", mode, sets=[*fit(gpus()), *sets], timeout=60)
            if code == 125:
                return row("hangs", f"{what} of rank 1, {name}, {title}", None, err)
            # A run that ends earlier did not hang; one that cannot shut down cleanly takes longer, because another process ends it.
            ok = code == 3 and (patience if what == "stall" else 0) <= s < 40
            # The waiting ranks report the timeout; the message must name the rank that they wait for.
            if what == "stall" and "slowest first: rank 1 at instruction" not in err:
                ok, err = False, err + "\nthe message does not name rank 1 as the slowest"
            how = ", by the last resort" if "cannot shut down cleanly" in err else ""
            row("hangs", f"{what} of rank 1, {name}, {title}", ok, f"status {code} after {s:.1f} s{how}: {last_line(err)[:110]}")
        return job
    # On the CPU the collective panics, which all ranks notice at once.
    faults = ("stall",) if CPU else ("stall", "collective")
    return [case(title, mode, name, sets, what) for title, mode in MODES for name, sets in HANGS.items() for what in faults]


def absent():
    """Returns cases in which a rank never joins the communicator: NCCL would wait for it indefinitely. The other ranks end the run after ten
    times the timeout, also if the absent rank is rank 0, which creates the communicator's id."""
    def case(title, mode, who):
        def job():
            code, _, err, s = train("small-native", "--steps", 2, "--timeout", 1, "--fault", f"{who}:absent", mode, sets=fit(gpus()), timeout=60)
            if code == 125:
                return row("hangs", f"rank {who} never comes, {title}", None, err)
            ok = code == 3 and (1 if CPU else 10) <= s < 40
            if not CPU and who and "NCCL has not joined" not in err:
                ok, err = False, err + "\nthe message does not say that NCCL waits"
            row("hangs", f"rank {who} never comes, {title}", ok, f"status {code} after {s:.1f} s: {last_line(err)[:110]}")
        return job
    return [case(title, mode, who) for title, mode in MODES for who in (1, 0)]


def no_room():
    """Checks that ranks that all run out of memory end with that error, and that none waits for another while it registers memory with NCCL."""
    if CPU:
        return
    # Weights and optimizer state of some hundred GB per GPU.
    sets = [*fit(gpus()), "model.hidden=16384", "model.heads=128", "model.kv_heads=8", "model.ffn=53248", "model.layers=40"]
    for title, mode in MODES:
        code, _, err, s = train("small-engines", "--steps", 2, mode, sets=sets, timeout=60)
        row("hangs", f"no memory, {title}", None if code == 125 else code in (2, 3), f"status {code} after {s:.1f} s: {last_line(err)[:110]}")


def stopped():
    """Checks that a run that Ctrl-Z stops for longer than the store's timeout resumes on `fg`, and that Ctrl-C then ends it."""
    if gpus() < 2:
        return
    where = ["--processes"] if CPU else on_device()
    command = [tools.binary, "exec", "small-native", "--no-store", "--timeout", "5", "--steps", "1000000", *where, *[x for v in fit(gpus()) for x in ("--set", v)]]
    errors = open(OUT / "stopped.txt", "w+")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT, start_new_session=True, stdin=subprocess.DEVNULL)
    begin = time.time()
    while time.time() - begin < 60 and process.poll() is None and "step" not in (OUT / "stopped.txt").read_text():
        time.sleep(0.2)
    ranks = tools.descendants(process.pid)
    process.send_signal(signal.SIGTSTP)
    time.sleep(1)
    state = lambda pid: open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
    all_stopped = len(ranks) >= gpus() and all(state(r) == "T" for r in ranks)
    time.sleep(14)
    process.send_signal(signal.SIGCONT)
    time.sleep(3)
    goes_on = process.poll() is None
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(30)
    except subprocess.TimeoutExpired:
        end(process)
        code = 124
    words = (OUT / "stopped.txt").read_text()
    ok = all_stopped and goes_on and code == 3 and "interrupted" in words
    row("modes", "stopped and resumed", ok, f"{len(ranks)} ranks {'' if all_stopped else 'NOT '}stopped, status {code}: {words.strip().splitlines()[-1][:90] if words else '?'}")


def killed():
    """Checks that killing one rank during a long run ends all ranks."""
    if gpus() < 2:
        return
    before = on_gpus()
    where = ["--processes"] if CPU else on_device()
    command = [tools.binary, "exec", "small-native", "--no-store", "--steps", "1000000", *where, *[x for v in fit(gpus()) for x in ("--set", v)]]
    errors = open(OUT / "killed.txt", "w+")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT, start_new_session=True, stdin=subprocess.DEVNULL)
    begin = time.time()
    ranks = []
    while time.time() - begin < 60 and process.poll() is None:
        ranks = tools.descendants(process.pid)
        if len(ranks) >= gpus() and "step" in (OUT / "killed.txt").read_text():
            break
        time.sleep(0.2)
    if len(ranks) < 2:
        end(process)
        return row("modes", "a killed rank", False, "the run did not start: " + last_line((OUT / "killed.txt").read_text()))
    os.kill(ranks[-1], 9)
    begin = time.time()
    try:
        code = process.wait(45)
    except subprocess.TimeoutExpired:
        end(process)
        code = 124
    took = time.time() - begin
    time.sleep(2)
    rest = sum(os.path.exists(f"/proc/{r}") for r in ranks)
    words = (OUT / "killed.txt").read_text()
    ok = code == 3 and "signal 9" in words and rest == 0 and on_gpus() <= before
    row("modes", "a killed rank ends the run", ok, f"status {code} after {took:.1f} s, {rest} ranks left, {on_gpus()} processes on the GPUs")


# Prefixes of the names of kernels of cuDNN, cuBLAS and NCCL.
LIBRARIES = ("cudnn", "nvjet", "cutlass", "sm90_", "cublas", "gemm", "gemv", "nccl", "void")


def sanitize():
    """Checks that compute-sanitizer finds no error in two steps: eager, compiled (with a vocabulary that fits into the shared memory of a
    cluster), and in float32 (our own attention kernel, with more than one tile)."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    cases = [("small-native", "small-native", []), ("small-pointwise", "small-pointwise", ["model.vocab=8192"]),
             ("small-fused", "small-fused", []),
             ("small-native-f32", "small-native", ['precision.compute="f32"', "train.seq_len=96", "model.max_seq_len=96"])]

    def case(title, scenario, sets, kind):
        def job():
            prefix = () if CPU else (tool, "--tool", kind, "--error-exitcode", "9")
            code, run, err, s = train(scenario, "--steps", 2, sets=[*fit(1), *sets], timeout=200, prefix=prefix)
            (OUT / f"sanitize-{title}-{kind}.txt").write_text(err)
            summary = [l.strip("= ") for l in err.splitlines() if "SUMMARY" in l]
            text = (summary or [last_line(err)])[-1][:120]
            if kind == "racecheck" and code == 9:
                # racecheck does not track the barriers of asynchronous copies (TMA), which kernels of the libraries use.
                named = re.findall(r"access at (\w+)", err)
                own = sorted({n for n in named if not n.startswith(LIBRARIES)})
                text += f"; in kernels of ours: {', '.join(own) or 'none'}, of libraries: {len({*named} - {*own})}"
                code = 9 if own or not named else 0
            row("sanitize", f"{title} {kind}", code == 0, f"{text}, {s:.0f} s")
        return job
    together([case(*c, k) for c in cases for k in ("memcheck", "racecheck")], 1 if CPU else 4)


def checkpoint():
    """Checks that a run that changes the device halfway continues as if it had not, within float32 accuracy."""
    sets = [*fit(gpus()), 'precision.compute="f32"']
    code, whole, err, _ = reference("small-native", "--steps", 8, sets=sets)
    if code:
        return row("checkpoint", "whole run", False, last_line(err))
    for first, second in ((train, reference), (reference, train), (train, train)):
        title = " then ".join("CPU" if f is reference else "GPU" for f in (first, second))
        with tempfile.TemporaryDirectory() as d:
            for on, steps in ((first, 4), (second, 8)):
                code, run, err, _ = on("small-native", "--steps", steps, "--checkpoint-dir", d, sets=sets)
                if code:
                    break
            if code:
                row("checkpoint", title, False, last_line(err))
                continue
            difference = worst(run["losses"], whole["losses"])
            row("checkpoint", title, difference < 1e-3, f"losses {difference:.1e}")


def band():
    """Compares smoothed losses in bf16 on the GPU with float32 on the CPU over 200 steps: within 2 %."""
    sets = [*fit(gpus()), f"train.steps={20 if CPU else 200}"]
    code, cpu, err, _ = reference("llama-tiny", sets=[*sets, 'precision.compute="f32"'], timeout=500)
    if code:
        return row("band", "cpu", False, last_line(err))
    code, gpu, err, s = train("llama-tiny", sets=[*sets, 'precision.compute="bf16"'])
    if code:
        return row("band", "gpu", False, last_line(err))
    smooth = lambda l: [sum(l[max(0, i - 9):i + 1]) / len(l[max(0, i - 9):i + 1]) for i in range(len(l))]
    difference = worst(smooth(gpu["losses"]), smooth(cpu["losses"]))
    row("band", "llama-tiny bf16", difference < 0.02, f"{difference:.2%}, last {gpu['losses'][-1]:.4f} and {cpu['losses'][-1]:.4f}, {s:.1f} s")
