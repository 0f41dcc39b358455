"""Measures the memory of PyTorch's FSDP2 and of Megatron-FSDP on meshes of any size with a single GPU.

    python3 exec/gpu/peers/memory.py tests/data/engine_memory.csv [--jobs 3] [--only WORD]

Runs every row of the table as rank 0 of its mesh, with the no-op collectives of torch's fake process group. The engine allocates and frees
in the same order and on the same streams as in a real run, but gathered weights are uninitialized. Prints the table with the new
measurements, and to stderr the rows that differ from the table."""
import argparse, contextlib, csv, fnmatch, gc, json, os, pathlib, subprocess, sys, tomllib
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[3]
TORCH = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# Modules of scenarios that have other names in peer.py, or do not exist there.
MODULES = {"tok_embeddings": "tok", "attention": ""}
STEPS = 4


def settings(row):
    """Returns the scenario of a row with its overrides applied, as a dict from `section.key` to value."""
    text = tomllib.loads((ROOT / "scenarios" / f"{row['scenario']}.toml").read_text())
    all = {f"{s}.{k}": v for s, keys in text.items() for k, v in keys.items()}
    for override in filter(None, row["overrides"].split(";")):
        key, value = override.split("=", 1)
        try: all[key] = json.loads(value)
        except json.JSONDecodeError: all[key] = value
    return all


def own_name(glob):
    """Translates a glob of `fsdp.frozen` to the names of modules in peer.py."""
    return ".".join(filter(None, (MODULES.get(part, part) for part in glob.split("."))))


def frozen(name, globs):
    parts = name.split(".")
    for glob in map(own_name, globs):
        pattern = glob.split(".")
        if len(pattern) <= len(parts) and all(p in ("*", n) for p, n in zip(pattern, parts)): return True
    return False


def measure(row):
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    import peer
    s = settings(row)
    get = lambda key, default=None: s.get(key, default)
    inner, outer, accum = get("mesh.dp_shard"), get("mesh.dp_outer", 1), get("train.grad_accum", 1)
    fsdp2 = get("fsdp.policy") == "fsdp2"
    size = dict(d=get("model.hidden"), L=get("model.layers"), h=get("model.heads"), kv=get("model.kv_heads"), ff=get("model.ffn"),
                V=get("model.vocab"), T=get("model.max_seq_len"))
    torch.cuda.set_device(0)
    dist.init_process_group("fake", rank=0, world_size=outer * inner, store=FakeStore())
    shape = {"inner": inner} if outer == 1 else {"outer": outer, "inner": inner}
    if not fsdp2: shape["tp"] = 1
    mesh = init_device_mesh("cuda", tuple(shape.values()), mesh_dim_names=tuple(shape))
    torch.manual_seed(0)
    with torch.device("meta" if fsdp2 else "cuda"): m = peer.Llama(**size)
    if not fsdp2: m = m.to(torch.bfloat16); m.init()
    for name, p in m.named_parameters(): p.requires_grad_(not frozen(name, get("fsdp.frozen", [])))
    around_blocks(m, get)
    if fsdp2: m, opt, begin, end = torch_fsdp2(m, get, mesh)
    else: m, opt, begin, end = megatron(m, get, mesh, outer, accum, peer)
    for i in range(STEPS):
        data = [torch.randint(0, size["V"], (get("train.micro_batch"), size["T"] + 1)).cuda() for _ in range(accum)]
        if i == STEPS - 2: torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
        for k, d in enumerate(data):
            with begin(k == accum - 1):
                l = peer.loss_fn(m, d[:, :-1], d[:, 1:], size["V"])
                l.backward()
                del l
        end()
    torch.cuda.synchronize()
    row["peak_allocated_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 2)
    row["peak_reserved_mib"] = round(torch.cuda.max_memory_reserved() / 2**20, 2)
    del m, opt, begin, end
    gc.collect(); torch.cuda.empty_cache(); torch._dynamo.reset(); dist.destroy_process_group()
    return row


def recomputed(which, layers):
    """Returns the indices of the blocks that `train.recompute_layers` selects: all, the first n, or those that match a glob."""
    if which == "all": return range(layers)
    if isinstance(which, int): return range(which)
    covers = lambda glob, path: len(glob) <= len(path) and all(fnmatch.fnmatchcase(p, g) for g, p in zip(glob, path))
    return [i for i in range(layers) if any(covers(glob.split("."), ["layers", str(i)]) for glob in which)]


def selective(nth):
    """Returns contexts of a checkpoint that saves the results of matmuls and attention, except those of every nth matmul (counted as in torchtitan)."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    aten = torch.ops.aten
    save = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default}
    matmuls = {False: 0, True: 0}
    def policy(ctx, func, *args, **kwargs):
        if func == aten.mm.default: matmuls[ctx.is_recompute] += 1
        again = func == aten.mm.default and nth and matmuls[ctx.is_recompute] % nth == 0
        return CheckpointPolicy.MUST_SAVE if func in save and not again else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)


def around_blocks(m, get):
    """Wraps and compiles the blocks of `m` as the scenario says: `train.recompute` and `compile.mode`."""
    if get("train.recompute") == "full":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        for i in recomputed(get("train.recompute_layers", "all"), len(m.layers)):
            m.layers[i] = checkpoint_wrapper(m.layers[i], preserve_rng_state=False)
    if get("train.recompute") == "selective":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        context = lambda: selective(get("train.recompute_nth_matmul", 0))
        for i in recomputed(get("train.recompute_layers", "all"), len(m.layers)):
            m.layers[i] = checkpoint_wrapper(m.layers[i], context_fn=context, preserve_rng_state=False)
    if get("compile.mode", "off") == "blocks":
        for l in m.layers: l.compile(fullgraph=True)


def torch_fsdp2(m, get, mesh):
    """Shards with the units of the peers-* scenarios: blocks, the embedding, and norm with head, which is not resharded after forward. With
    `fsdp.units = "block"`, only blocks are units, and the root has the other parameters; `fsdp.reshard_root` reshards it."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    dtype = lambda key, default: getattr(torch, TORCH[get(key, default)])
    mp = MixedPrecisionPolicy(param_dtype=dtype("precision.compute", "bf16"), reduce_dtype=dtype("precision.comm_grads", "f32"))
    kw = dict(mesh=mesh, mp_policy=mp, reshard_after_forward=get("fsdp.reshard_after_forward"))
    for l in m.layers: fully_shard(l, **kw)
    if get("fsdp.units") == "block":
        if not get("fsdp.reshard_root"): kw["reshard_after_forward"] = None
        units = list(m.layers)
    else:
        fully_shard([m.norm, m.out], mesh=mesh, mp_policy=mp, reshard_after_forward=False)
        fully_shard(m.tok, **kw)
        units = [m.tok, *m.layers, m.norm]
    fully_shard(m, **kw)
    for i, unit in enumerate(units):
        if n := get("fsdp.prefetch_forward"): unit.set_modules_to_forward_prefetch(units[i + 1:i + 1 + n])
        if n := get("fsdp.prefetch_backward"): unit.set_modules_to_backward_prefetch(units[max(0, i - n):i][::-1])
    m.to_empty(device="cuda"); m.init()
    opt = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-4, fused=True)
    sync, keep = get("fsdp.gradient_sync", "every"), get("fsdp.reshard_after_backward", True)
    def begin(last):
        m.set_requires_gradient_sync(last or sync != "last")
        m.set_requires_all_reduce(last or sync == "every")
        m.set_reshard_after_backward(last or keep)
        return contextlib.nullcontext()
    def end():
        if get("train.clip_norm", 0): torch.nn.utils.clip_grad_norm_(m.parameters(), get("train.clip_norm"), foreach=True)
        opt.step(); opt.zero_grad(set_to_none=True)
    return m, opt, begin, end


def megatron(m, get, mesh, outer, accum, peer):
    import torch
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
    kw = dict(device_mesh=mesh, dp_shard_dim="inner", tp_dim="tp", fsdp_double_buffer=get("fsdp.allocator") == "double_buffer")
    if get("precision.main_grads"):
        dtype = lambda key: getattr(torch, TORCH[get(key)])
        kw["mixed_precision_policy"] = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=dtype("precision.main_grads"),
                                                            grad_comm_dtype=dtype("precision.comm_grads"))
    if outer > 1:
        kw.update(dp_outer_dim="outer", hybrid_fsdp_group=mesh["outer", "inner"]._flatten("all").get_group(),
                  outer_dp_sharding_strategy=1 if get("fsdp.outer_strategy") == "optim" else 0)
    m = fully_shard_model(module=m, fsdp_unit_modules=[peer.Block, torch.nn.Embedding],
                          zero_dp_strategy=ZERO[get("fsdp.strategy", "optim_grads_params")], sync_model_each_microbatch=accum == 1, **kw)
    opt = fully_shard_optimizer(optimizer=torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-4, fused=True))
    begin = lambda last: contextlib.nullcontext() if accum == 1 else m.sync() if last else m.no_sync()
    return m, opt, begin, lambda: (opt.step(), opt.zero_grad())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("table"); p.add_argument("--jobs", type=int, default=3); p.add_argument("--only", default=""); p.add_argument("--rows")
    a = p.parse_args()
    with open(a.table) as f: table = list(csv.DictReader(f))
    if a.rows:
        for i in map(int, a.rows.split(",")):
            try: print("ROW", i, json.dumps(measure(table[i])), flush=True)
            except Exception as e: sys.exit(f"{table[i]['name']}: {e!r}")
        return
    picked = [i for i, row in enumerate(table) if a.only in row["name"]]
    # Megatron-FSDP does not free all its memory, so each of its rows runs in a separate process.
    ours = [i for i in picked if settings(table[i])["fsdp.policy"] == "fsdp2"]
    chunks = [ours[k::a.jobs] for k in range(a.jobs)] + [[i] for i in picked if i not in ours]
    def run(chunk):
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
        command = [sys.executable, __file__, a.table, "--rows", ",".join(map(str, chunk))]
        r = subprocess.run(command, env=env, capture_output=True, text=True)
        if r.returncode: print(r.stderr[-600:], file=sys.stderr)
        return [l.split(" ", 2)[1:] for l in r.stdout.splitlines() if l.startswith("ROW ")]
    with ThreadPoolExecutor(a.jobs) as pool: done = {int(i): json.loads(row) for out in pool.map(run, filter(None, chunks)) for i, row in out}
    out = csv.DictWriter(sys.stdout, table[0], lineterminator="\n")
    out.writeheader()
    for i in picked:
        row = done.get(i, table[i])
        out.writerow(row)
        was = [table[i][k] for k in ("peak_allocated_mib", "peak_reserved_mib")]
        now = [str(row[k]) for k in ("peak_allocated_mib", "peak_reserved_mib")]
        if i not in done or was != now: print(f"{row['name']}: {now if i in done else 'failed'}, the table says {was}", file=sys.stderr)


if __name__ == "__main__": main()
