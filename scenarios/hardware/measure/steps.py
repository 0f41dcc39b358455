"""Measures the library kernels of training steps of PyTorch's FSDP2: rank 0 of four, on one GPU. Matmuls and attention take other
times there than alone in a loop, or in a few layers without a sharding engine, because the clock of a GPU at its power limit
depends on the other kernels of a step. So these rows come first in a profile.

    python3 steps.py OUT.jsonl [WORD ...]

All-gathers fill the buffer of each unit once and then keep it; other collectives are the no-op collectives of torch's fake process
group. So only the engine's own copies overlap with the kernels, and weights do not change. Words select cases (`3b`, `compiled`).
Prints step times, and writes them to OUT.jsonl with the rows of the tables and the times of all kernels by name."""
import collections, gc, json, pathlib, statistics, sys, time
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "exec/gpu/peers"))
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
import memory, peer

# Size of peer.py, samples, tokens, compiled blocks, recompute of blocks.
CASES = [("1b", 2, 4096, False, False), ("1b", 2, 4096, True, False), ("3b", 2, 4096, False, False), ("3b", 2, 4096, True, False),
         ("8b", 1, 4096, False, False), ("8b", 1, 4096, True, False), ("8b", 1, 8192, False, True), ("8b", 1, 8192, True, True),
         ("custom", 2, 4096, False, False), ("3b", 1, 4096, False, False), ("1b", 4, 4096, False, False), ("1b", 1, 2048, False, False),
         ("tiny", 4, 2048, False, False)]
RANKS, STEPS, RECORDED = 4, 16, 3
MM, FORWARD, BACKWARD = "aten::mm", "aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward"


class KeptGather:
    """The all-gather of one unit: the first call fills the buffer with copies of the rank's shard, later calls reuse it."""
    def __init__(self): self.buffer = None
    def allocate(self, size, *, dtype, device):
        if self.buffer is None: self.buffer = torch.empty(*size, dtype=dtype, device=device); self.filled = False
        return self.buffer
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if not self.filled:
            shard = input_tensor.clone()
            output_tensor.view(RANKS, -1).copy_(shard.expand(RANKS, -1)); self.filled = True


def build(size, seq, compiled, recompute, mesh):
    keys = {"fsdp.reshard_after_forward": True, "train.recompute": "full" if recompute else "none", "compile.mode": "blocks" if compiled else "off"}
    get = lambda key, default=None: keys.get(key, default)
    shape = peer.SIZES[size] | {"T": seq}
    with torch.device("meta"): m = peer.Llama(**shape)
    memory.around_blocks(m, get)
    m, _, _, end = memory.torch_fsdp2(m, get, mesh)
    for module in m.modules():
        if isinstance(module, FSDPModule): module.set_custom_all_gather(KeptGather())
    return m, shape, end


def launches(prof):
    """Returns matmul and attention operators in launch order, each with its name, the shapes of its inputs, and the names of the
    kernels that it launched."""
    ops = [e for e in prof.events() if e.name in (MM, FORWARD, BACKWARD) and e.kernels]
    return [(e.name, e.input_shapes, [k.name for k in e.kernels]) for e in sorted(ops, key=lambda e: e.time_range.start)]


def durations(prof, names):
    found = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.name in names]
    return [(e.name, e.time_range.elapsed_us()) for e in sorted(found, key=lambda e: e.time_range.start)]


def measure(case, mesh, emit):
    size, batch, seq, compiled, recompute = case
    torch.manual_seed(0)
    m, shape, end = build(size, seq, compiled, recompute, mesh)
    def step():
        d = torch.randint(0, shape["V"], (batch, seq + 1)).cuda(non_blocking=True)
        loss = peer.loss_fn(m, d[:, :-1], d[:, 1:], shape["V"])
        loss.backward(); end()
        return loss.detach()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    for _ in range(6): step()
    host = []
    for e in events[:-1]: e.record(); t = time.perf_counter(); loss = step(); host.append(time.perf_counter() - t)
    events[-1].record(); torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    named = dict(size=size, batch=batch, seq=seq, compiled=compiled, recompute=recompute)
    emit(table="step", **named, ms=round(statistics.median(times), 2), least=round(min(times), 2), most=round(max(times), 2),
         host_ms=round(1e3 * min(host), 2), loss=round(float(loss), 3))
    # Recording on the host leaves gaps between kernels, which change the GPU's clock. So shapes come from one step and times from others.
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], record_shapes=True, acc_events=True) as shapes: step(); torch.cuda.synchronize()
    for _ in range(3): step()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        for _ in range(RECORDED): step()
        torch.cuda.synchronize()
    kernels = collections.defaultdict(list)
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA: kernels[e.name].append(e.time_range.elapsed_us())
    for name, ts in sorted(kernels.items(), key=lambda x: -sum(x[1])):
        emit(table="kernel", name=name[:160], count=len(ts) / RECORDED, us=round(sum(ts) / len(ts), 2), **named)
    launched = launches(shapes)
    flat = [(i, name) for i, (_, _, names) in enumerate(launched) for name in names if not name.startswith("Mem")]
    found = durations(prof, {name for _, name in flat})
    if [n for n, _ in found] != [n for _, n in flat] * RECORDED: sys.exit(f"{case}: {len(found)} kernels found, {len(flat)} launched per step")
    keys = [(op, json.dumps(inputs)) for op, inputs, _ in launched]
    us, count = collections.Counter(), collections.Counter(keys)
    for k, (_, t) in enumerate(found): us[keys[flat[k % len(flat)][0]]] += t / RECORDED
    for (op, inputs), n in count.items():
        mean, inputs = round(us[op, inputs] / n, 2), json.loads(inputs)
        if op == MM: emit(table="gemm", dtype="bf16", m=inputs[0][0], n=inputs[1][1], k=inputs[0][1], us=mean, count=n, **named)
        else:
            key = "forward_us" if op == FORWARD else "backward_us"
            emit(table="attention", dtype="bf16", heads=shape["h"], kv_heads=shape["kv"], head_dim=shape["d"] // shape["h"], causal=True,
                 count=n, **{key: mean}, **named)


def main():
    out = open(sys.argv[1], "w")
    def emit(**row):
        out.write(json.dumps(row) + "\n"); out.flush()
        if row["table"] == "step": print(json.dumps(row), flush=True)
    torch.cuda.set_device(0)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("inner",))
    for case in CASES:
        words = {case[0], "compiled" if case[3] else "eager"}
        if set(sys.argv[2:]) <= words: measure(case, mesh, emit); gc.collect(); torch.cuda.empty_cache(); torch._dynamo.reset()


if __name__ == "__main__": main()
