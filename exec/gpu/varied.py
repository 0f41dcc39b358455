"""The stage with random scenarios, for combinations that no list of cases has. Every case is a function of its number."""
import os, random, tempfile
from tools import CPU, OUT, gpus, last_line, reference, row, shardlab, together, train, worst

# The cases have the numbers FROM to FROM + CASES - 1.
FROM, CASES = int(os.environ.get("FROM", "0")), int(os.environ.get("CASES", "60"))


def llama(r):
    head_dim, kv = r.choice([4, 6, 8, 16, 16, 32, 64, 128]), r.choice([1, 1, 2])
    heads = kv * r.choice([1, 2, 3])
    model = {"layers": r.choice([1, 2, 3]), "hidden": r.choice([8, 24, 32, 40, 64, 136]), "heads": heads, "kv_heads": kv,
             "head_dim": head_dim, "ffn": r.choice([8, 20, 64, 72, 88, 176]), "vocab": r.choice([17, 61, 97, 128, 264, 1000]),
             "tie_embeddings": r.random() < 0.4, "qk_norm": r.random() < 0.35, "bias": r.choice([False, False, True, "qkv"])}
    return model, r.choice([3, 8, 17, 24, 33, 64, 96])


def gpt2(r):
    heads = r.choice([1, 2, 3])
    model = {"layers": r.choice([1, 2, 3]), "heads": heads, "hidden": heads * r.choice([4, 8, 16, 32, 64]), "vocab": r.choice([17, 61, 101, 128, 257]),
             "tie_embeddings": r.random() < 0.5, "bias": r.random() < 0.8}
    return model, r.choice([3, 8, 17, 29, 64])


def encoder(r):
    heads = r.choice([1, 2, 4])
    model = {"layers": r.choice([1, 2, 3]), "heads": heads, "hidden": heads * r.choice([4, 6, 16, 64]), "ffn": r.choice([8, 40, 64])}
    return model, r.choice([2, 5, 16, 40])


def linear(r):
    return {"layers": r.choice([1, 2, 4]), "hidden": r.choice([5, 8, 24, 64])}, r.choice([1, 3, 16])


def cnn(r):
    return {"layers": r.choice([1, 2, 3]), "channels": r.choice([3, 8, 16]), "height": r.choice([4, 6, 9]), "width": r.choice([4, 5, 8]),
            "kernel": r.choice([1, 3, 3, 5])}, 1


FAMILIES = {"llama": llama, "gpt2": gpt2, "encoder": encoder, "linear": linear, "cnn": cnn}


def some(r, share, options):
    """Returns each key with this probability, with one of its values."""
    return {k: r.choice(v) for k, v in options.items() if r.random() < share}


def case(number):
    """Returns `(what, how)`: the keys of a scenario that determine its results, and keys that must not change them."""
    r = random.Random(number)
    family = r.choice(["llama"] * 6 + ["gpt2"] * 3 + ["encoder", "linear", "cnn"])
    model, seq = FAMILIES[family](r)
    what = {f"model.{k}": v for k, v in model.items()}
    what |= {"model.family": family, "train.seq_len": seq, "train.micro_batch": r.choice([1, 1, 2, 3]), "train.steps": 4, "train.lr": 1e-3,
             "train.grad_accum": r.choice([1, 1, 1, 2, 3]), "train.optimizer": r.choice(["adamw", "adamw", "sgd"]),
             "train.clip_norm": r.choice([0.0, 0.0, 0.5]), "mesh.hardware": "cpu"}
    what |= some(r, 0.15, {"fsdp.per_token_loss": [True], "train.weight_decay": [0.0, 0.3], "train.warmup_steps": [2]})
    if "fsdp.per_token_loss" in what and what["train.optimizer"] == "sgd":
        # Losses summed over tokens give updates so large that training diverges, and rounding then determines the losses.
        what["train.clip_norm"] = 0.5
    world = min(gpus(), r.choice([1, 2, 2, 3, 4]))
    outer = 2 if world == 4 and r.random() < 0.4 else 1
    what |= {"mesh.dp_shard": world // outer, "mesh.dp_outer": outer}
    if family in ("llama", "gpt2"):
        what["model.max_seq_len"] = seq + r.choice([0, 0, 5])
    policy = r.choice(["native", "native", "native", "fsdp2", "megatron"])
    how = {"fsdp.policy": policy, "compile.mode": r.choice(["off", "regions", "regions", "blocks", "full"])}
    how |= some(r, 0.3, {
        "train.recompute": ["full", "selective", "pointwise"], "train.loss": ["chunked"], "fsdp.strategy": ["no_shard", "optim", "optim_grads"],
        "fsdp.reshard_after_forward": [False, "auto"], "fsdp.prefetch_forward": [0, 1, 3], "fsdp.prefetch_backward": [0, 1, 3],
    })
    how |= some(r, 0.15, {
        "train.loss_chunk_tokens": [1, 7, 16], "train.recompute_layers": [1], "train.grad_norm": [True], "train.sync_each_step": [True], "fsdp.units": ["root", "block"],
        "fsdp.reshard_root": [True], "fsdp.gradient_sync": ["every", "last", "outer_last"], "fsdp.reduce_in_flight": [1, 2],
        "fsdp.optimizer_in_backward": [True], "fsdp.prefetch_next_step": [1, 2], "fsdp.separate_communicators": [True, False],
        "fsdp.unify_comm_stream": [True], "fsdp.allocator": ["caching", "pool", "double_buffer", "temporary"], "fsdp.average_in_collective": [True],
        "fsdp.nan_check": [True], "fsdp.copy_engine_all_gather": [True], "fsdp.copy_engine_reduce_scatter": [True], "fsdp.fuse_reduce_into_optimizer": [True], "fsdp.cast_before_all_gather": [True], "fsdp.reshard_after_backward": [False],
        "precision.deterministic": [True], "compile.fuse_projections": ["none", "gradients", "qkv", "all"], "compile.gemm_accumulate": [True, False],
        "compile.mix_order_reductions": [True, False], "compile.gemm_epilogue_fusion": [True], "compile.cuda_graph": ["full_iteration", ["attn"], ["attn", "mlp"], ["block"]],
        "compile.memory_budget": [0.0, 0.5], "compile.bucket_bytes": [0, 4096], "fsdp.offload": [["optimizer"], ["grads", "optimizer"], ["params", "grads", "optimizer"]],
    })
    if outer > 1:
        how |= some(r, 0.5, {"fsdp.outer_strategy": ["optim"]})
    if how.get("train.recompute") == "selective" and family in ("llama", "gpt2"):
        how |= some(r, 0.5, {"train.recompute_modules": [["layernorm"], ["core_attn", "mlp"], ["mlp", "layernorm"]]})
    # Results in 16 bits depend on `how`, so they are only compared with the CPU device.
    how["precision.compute"] = r.choice(["f32", "f32", "bf16"])
    how["precision.comm_grads"] = "f32" if how["precision.compute"] == "f32" else r.choice(["f32", "bf16"])
    return what, how


def toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def write(path, keys):
    sections = {}
    for key, value in keys.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, []).append(f"{name} = {toml(value)}")
    path.write_text("\n".join(f"[{s}]\n" + "\n".join(lines) + "\n" for s, lines in sections.items()))


def varied():
    """Compares random scenarios with the CPU device. On the CPU device, compares float32 runs with the simplest program for the same training,
    checks that delays, processes and interruptions change no bit, and compares memory with the prediction."""
    folder = OUT / "varied"
    folder.mkdir(parents=True, exist_ok=True)
    kept = []

    def job(number):
        what, how = case(number)
        # Removes keys that this family or policy does not support, one at a time as errors name them, and keeps the others.
        while True:
            path = folder / f"{number}.toml"
            write(path, {**what, **how})
            code, _, err, _ = shardlab("plan", path, "--json", timeout=60)
            if code != 2:
                break
            guilty = culprit(err, path, how)
            if guilty is None:
                return row("varied", f"{number}", None, f"refused: {err.strip().splitlines()[0][:140]}")
            del how[guilty]
        world = what["mesh.dp_shard"] * what["mesh.dp_outer"]
        title = f"{number} {what['model.family']} on {world}, {how['fsdp.policy']}" if "fsdp.policy" in how else f"{number} {what['model.family']} on {world}"
        bf16 = how.get("precision.compute") == "bf16"
        code, cpu, err, _ = reference(path, "--check-nan", timeout=120)
        if code:
            return row("varied", title, False, f"CPU: {last_line(err)}")
        code, sim, err, _ = shardlab("sim", path, "--json", timeout=60)
        if code:
            return row("varied", title, False, f"sim: {last_line(err)}")
        facts, ok = [], True

        def hold(name, difference, limit):
            nonlocal ok
            ok = ok and difference <= limit
            facts.append(f"{name} {difference:.1e}{'' if difference <= limit else ' WRONG'}")

        predicted, had = sim["memory"]["peak_allocated_bytes"], cpu["memory"]["peak_allocated_bytes"]
        hold("memory", abs(predicted - had), 0)
        if not bf16:
            plain = folder / f"{number}-plain.toml"
            write(plain, {**what, "precision.compute": "f32", "mesh.dp_shard": world, "mesh.dp_outer": 1})
            code, base, err, _ = reference(plain, timeout=120)
            if code:
                return row("varied", title, False, f"plain: {last_line(err)}")
            hold("plain", worst(cpu["losses"], base["losses"]), 1e-4)
            if not how.get("fsdp.fuse_reduce_into_optimizer"):  # otherwise there are no norms
                hold("norms", worst(cpu["grad_norms"], base["grad_norms"]), 1e-3)
        if CPU:
            for way, other in others(path, number, world):
                if isinstance(other, str):
                    return row("varied", title, False, f"{way}: {other}")
                hold(way, sum(other[k] != cpu[k] for k in ("losses", "grad_norms", "final_norms")), 0)
        else:
            code, gpu, err, _ = train(path, "--check-nan", timeout=120)
            if code:
                return row("varied", title, False, f"GPU: {last_line(err)}")
            limit = 3e-2 if bf16 else 1e-3
            hold("GPU", worst(gpu["losses"], cpu["losses"]), limit)
            hold("norms", worst(gpu["grad_norms"], cpu["grad_norms"]), 3 * limit)
            hold("memory", abs(gpu["memory"]["peak_allocated_bytes"] - had), 0)
        kept.append(number)
        row("varied", title, ok, ", ".join(facts))

    together([lambda n=n: job(n) for n in range(FROM, FROM + CASES)], 2 if CPU else int(os.environ.get("AT_ONCE", "3")))
    row("varied", "cases that ran", len(kept) * 2 > CASES, f"{len(kept)} of {CASES}")


def others(path, number, world):
    """Runs what must not change a bit: random delays, one process per rank, an interruption halfway. Yields names with runs, or with an error."""
    with tempfile.TemporaryDirectory() as kept:
        saved = ["--checkpoint-dir", kept, "--checkpoint-every", 2]
        ways = {"delays": [reference, "--delays", number], "processes": [train], "half": [reference, *saved, "--steps", 2], "resumed": [reference, *saved]}
        if world == 1:
            del ways["processes"]
        for way, (run, *flags) in ways.items():
            code, found, err, _ = run(path, *flags, timeout=120)
            if code:
                yield way, last_line(err)
                return
            if way != "half":
                yield way, found


def culprit(err, path, how):
    """Returns the key of `how` in the line that an error points at, or one that its text contains, or None."""
    first = err.strip().splitlines()[0]
    at = first.find(f"{path.name}:")
    if at >= 0:
        line = path.read_text().splitlines()[int(first[at:].split(":")[1]) - 1]
        name = line.split(" = ")[0]
        for key in how:
            if key.split(".", 1)[1] == name:
                return key
    named = [key for key in how if key in first]
    return max(named, key=len) if named else None
