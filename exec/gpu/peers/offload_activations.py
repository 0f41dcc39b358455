"""Measures training steps under FSDP2 whose activations are kept in host memory.

    torchrun --nproc-per-node=2 exec/gpu/peers/offload_activations.py [--seconds S] [--out FILE] [CONFIGS.json]

Prints one JSON object per configuration: times of a step in ms, peaks of device and pinned memory of rank 0 in MiB. A
configuration names a size of `peer.py` (and keys that replace its numbers), "B" for the micro-batch, and "how":

- "none": everything that autograd saves stays on the device.
- "save_on_cpu": `torch.autograd.graph.save_on_cpu(pin_memory=True)` around each block, as in `offload_wrapper`.
- "offload_activations": `OffloadActivations` of TRL around forward and backward, as in its `training_step`, without the
  head. Skipped if TRL is not installed.
- "full", "full save_on_cpu", "full offload_activations": each block checkpointed as well, so that only its inputs are
  saved.

Other rows are the rates of copies (`"row": "copies"`) and the tensors that autograd saves (`"row": "saved"`).
No configuration starts later than S seconds after the first. With `--device cpu`, runs small models with gloo, to
test this program.
"""
import argparse, contextlib, gc, importlib.util, json, os, sys, time, traceback
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import peer

MIB = 2**20
LAYERS_8 = dict(size="1b", L=8)
CONFIGS = [
    dict(LAYERS_8, how="none", saved=True),
    dict(LAYERS_8, how="offload_activations", trace="offload_activations.json.gz"),
    dict(LAYERS_8, how="save_on_cpu", trace="save_on_cpu.json.gz"),
    dict(LAYERS_8, how="full"),
    dict(LAYERS_8, how="full save_on_cpu"),
    dict(LAYERS_8, how="full offload_activations"),
    dict(size="tiny", B=4, how="none"),
    dict(size="tiny", B=4, how="offload_activations"),
    dict(size="tiny", B=4, how="save_on_cpu"),
    dict(size="tiny", B=4, how="full save_on_cpu"),
    dict(LAYERS_8, T=16384, how="full"),
    dict(LAYERS_8, T=16384, how="full save_on_cpu"),
    dict(size="1b", B=2, how="none"),
    dict(size="1b", B=2, how="save_on_cpu"),
]


class Device:
    """What differs between a GPU and the CPU."""
    def __init__(s, kind): s.kind, s.gpu = kind, kind == "cuda"
    def synchronize(s): torch.cuda.synchronize() if s.gpu else None
    def mark(s):
        if not s.gpu: return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True); event.record()
        return event
    def between(s, a, b): return a.elapsed_time(b) if s.gpu else 1e3 * (b - a)
    def clear(s):
        gc.collect()
        if s.gpu:
            torch.cuda.empty_cache()
            with contextlib.suppress(Exception): torch._C._host_emptyCache()
    def reset(s):
        s.synchronize(); dist.barrier()
        if s.gpu:
            torch.cuda.reset_peak_memory_stats()
            with contextlib.suppress(Exception): torch.cuda.reset_peak_host_memory_stats()
    def memory(s):
        if not s.gpu: return {}
        free, total = torch.cuda.mem_get_info()
        found = dict(peak_alloc_mib=torch.cuda.max_memory_allocated() / MIB, peak_reserved_mib=torch.cuda.max_memory_reserved() / MIB, device_mib=(total - free) / MIB)
        with contextlib.suppress(Exception):
            host = torch.cuda.host_memory_stats()
            for key in ("allocated_bytes", "active_bytes"): found[f"host_{key[:-6]}_mib"] = host[f"{key}.peak"] / MIB
        return {key: round(value, 2) for key, value in found.items()}


def trl():
    """Returns TRL's module for offloaded activations, or None. Importing TRL itself would need more packages."""
    found = importlib.util.find_spec("trl")
    if found is None: return None
    spec = importlib.util.spec_from_file_location("trl_activation_offloading", os.path.join(found.submodule_search_locations[0], "models", "activation_offloading.py"))
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    return module


def build(c, mesh, device):
    sizes = dict(peer.SIZES[c["size"]]); sizes.update({k: c[k] for k in sizes if k in c})
    with torch.device("meta"): m = peer.Llama(**sizes)
    for i in range(len(m.layers)):
        if "full" in c["how"]: m.layers[i] = checkpoint_wrapper(m.layers[i], preserve_rng_state=False)
        if "save_on_cpu" in c["how"]: m.layers[i] = offload_wrapper(m.layers[i])
    kw = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for layer in m.layers: fully_shard(layer, **kw)
    fully_shard([m.norm, m.out], reshard_after_forward=False, **kw)
    fully_shard(m.tok, **kw)
    fully_shard(m, **kw)
    m.to_empty(device=device.kind)
    with torch.no_grad():
        for p in m.parameters(): p.to_local().normal_(0, 0.02) if p.dim() > 1 else p.to_local().fill_(1)
    inverse = 1.0 / (500000.0 ** (torch.arange(0, m.hd, 2).float() / m.hd))
    angles = torch.outer(torch.arange(m.T).float(), inverse)
    m.cos, m.sin = angles.cos().to(device.kind), angles.sin().to(device.kind)
    return m, sizes


def context(c, m, device):
    """Returns the context of a training step."""
    if "offload_activations" not in c["how"]: return contextlib.nullcontext()
    module = trl()
    offload = module.OffloadActivations(use_streams=device.gpu, use_pin_memory=device.gpu)
    offload.update_model_params(m)
    none = module.NoOpManager()
    m.out.register_forward_pre_hook(lambda *_: none.__enter__())
    m.out.register_forward_hook(lambda *_: none.__exit__(), always_call=True)
    return offload


def saved(m, data, V):
    """Returns the tensors that autograd saves in forward: shape, strides, type, number of the storage, and whether it is a parameter."""
    found, storages = [], {}
    def pack(t):
        local = t.to_local() if hasattr(t, "to_local") else t
        key = local.untyped_storage().data_ptr()
        found.append([list(t.shape), list(t.stride()), str(t.dtype)[6:], storages.setdefault(key, len(storages)), isinstance(t, torch.nn.Parameter)])
        return t
    with saved_tensors_hooks(pack, lambda t: t): loss = peer.loss_fn(m, data[:, :-1], data[:, 1:], V)
    loss.backward()
    return found


def measure(c, mesh, device, out):
    torch.manual_seed(0); device.clear()
    m, sizes = build(c, mesh, device)
    opt, step_context = torch.optim.AdamW(m.parameters(), lr=3e-4, fused=True), context(c, m, device)
    B, T, V = c.get("B", 1), sizes["T"], sizes["V"]
    g = torch.Generator().manual_seed(1234 + dist.get_rank())
    def batch(): return torch.randint(0, V, (B, T + 1), generator=g).to(device.kind)
    def step(data):
        with step_context:
            loss = peer.loss_fn(m, data[:, :-1], data[:, 1:], V); loss.backward()
        opt.step(); opt.zero_grad(set_to_none=True)
        return loss.detach()
    marks, losses, host = [], [], []
    for i in range(c.get("steps", 12)):
        data = batch()
        if i == 3: device.reset()
        start, clock = device.mark(), time.perf_counter()
        losses.append(step(data))
        host.append(1e3 * (time.perf_counter() - clock)); marks.append((start, device.mark()))
    device.synchronize()
    times, host = sorted(device.between(*pair) for pair in marks[4:]), sorted(host[4:])
    middle = len(times) // 2
    out(dict({k: v for k, v in c.items() if k not in ("trace", "saved")}, row="step", step_ms=round(times[middle], 3), min_ms=round(times[0], 3), max_ms=round(times[-1], 3), cpu_ms=round(host[middle], 2), **device.memory(), losses=[round(float(x), 4) for x in losses], world=dist.get_world_size(), torch=torch.__version__))
    if c.get("saved"): out(dict(row="saved", size=c["size"], L=sizes["L"], tensors=saved(m, batch(), V))); opt.zero_grad(set_to_none=True)
    if c.get("trace") and device.gpu: trace(c["trace"], lambda: step(batch()), device)


def trace(name, step, device):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p: step(); device.synchronize()
    if dist.get_rank() == 0 and os.environ.get("OUT"): p.export_chrome_trace(os.path.join(os.environ["OUT"], name))


def copies(device, mib=64, n=8):
    """Returns rates of copies between pinned and device memory in GB/s, with all ranks at once."""
    near = [torch.empty(mib * MIB, dtype=torch.uint8, device=device.kind) for _ in range(2)]
    far = [torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=device.gpu) for _ in range(2)]
    other = torch.cuda.Stream() if device.gpu else None
    def both():
        with torch.cuda.stream(other): near[1].copy_(far[1], non_blocking=True)
        far[0].copy_(near[0], non_blocking=True)
    ways = dict(d2h=lambda: far[0].copy_(near[0], non_blocking=True), h2d=lambda: near[1].copy_(far[1], non_blocking=True))
    if device.gpu: ways["both"] = both
    rates = {}
    for key, copy in ways.items():
        copy(); device.synchronize(); dist.barrier(); start = time.perf_counter()
        for _ in range(n): copy()
        device.synchronize(); rates[key] = round(1e-9 * n * mib * MIB / (time.perf_counter() - start), 2)
    return rates


def late(begin, seconds, device):
    """Decides on rank 0 whether time is up, so that all ranks run the same configurations."""
    flag = torch.tensor([float(time.perf_counter() - begin > seconds)], device=device.kind)
    dist.broadcast(flag, 0)
    return bool(flag.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="?"); parser.add_argument("--seconds", type=float, default=65)
    parser.add_argument("--out"); parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    begin, device, local = time.perf_counter(), Device(args.device), int(os.environ["LOCAL_RANK"])
    if device.gpu: torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.gpu else "gloo", **(dict(device_id=torch.device("cuda", local)) if device.gpu else {}))
    def out(row):
        if dist.get_rank(): return
        print(json.dumps(row), flush=True)
        if args.out:
            with open(args.out, "a") as file: print(json.dumps(row), file=file)
    mesh = init_device_mesh(device.kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
    out(dict(row="copies", gbps=copies(device), gpu=torch.cuda.get_device_name() if device.gpu else "cpu"))
    for c in json.load(open(args.configs)) if args.configs else CONFIGS:
        if late(begin, args.seconds, device): out(dict(c, row="skipped", why="time")); continue
        if "offload_activations" in c["how"] and trl() is None: out(dict(c, row="skipped", why="no TRL")); continue
        try: measure(c, mesh, device, out)
        except Exception as e:
            traceback.print_exc(); out(dict(c, row="failed", why=repr(e)[:1000]))
    dist.destroy_process_group()


if __name__ == "__main__": main()
