"""Measures the host time of PyTorch's eager steps: of single calls, autograd nodes, modules, and layers of transformers models
with and without FSDP2. Tensors are so small that the host is the bottleneck, so wall-clock time between calls is host time.

    python3 host.py OUT.jsonl [WORD ...]

Runs on one GPU as rank 0 of two, with the no-op collectives of torch's fake process group, so the time to issue a real collective
(`collective_us`) is not included. Words select cases (`micro`, `compiled`, `llama`, `torchao`, `experts`). For a model, prints medians
over steps of forward, backward, clipping, optimizer and zero_grad for two numbers of layers. The difference gives the time per layer,
and the rest is that of embedding, head and loss."""
import gc, json, statistics, sys, time
sys.path.pop(0)  # otherwise, transformers would import `kernels.py` of this folder instead of a package
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SYNC = torch.cuda.synchronize if DEVICE == "cuda" else (lambda: None)
SMALL = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512, vocab_size=1024,
             tie_word_embeddings=True, max_position_embeddings=4096)
# Model type, changes to the configuration, options of the step.
CASES = [("llama", {}, {}), ("llama", {}, dict(reshard=False)), ("llama", {}, dict(shard=False)), ("llama", {}, dict(compiled=True)),
         ("llama", {}, dict(checkpoint=True)), ("llama", {}, dict(foreach=True)), ("llama", {}, dict(lora=16)),
         ("qwen3", {}, {}), ("mistral", dict(sliding_window=None, tie_word_embeddings=False), {}), ("gemma2", dict(query_pre_attn_scalar=64), {}),
         ("qwen3_moe", dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1), {})]
LAYERS, WARM, STEPS = (4, 12), 5, 25


def per_call(name, n, f, out):
    """Times `f`, which makes `n` calls, and writes the median time per call."""
    for _ in range(3): f()
    times = []
    for _ in range(15):
        SYNC(); t = time.perf_counter(); f(); times.append(time.perf_counter() - t); SYNC()
    row = dict(case="micro", name=name, us=round(statistics.median(times) / n * 1e6, 3), min_us=round(min(times) / n * 1e6, 3))
    print(row, flush=True); out.write(json.dumps(row) + "\n")


def subclass(out, n=200):
    """Measures the functions that FSDP2 calls for each weight that torchao gathers in 8 bits with a precomputed scale, and their three operators alone."""
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
    x, s, c = torch.ones(16, 16, device=DEVICE), torch.tensor(3.0, device=DEVICE), ScaledMMConfig(False, True, False, False)
    w = WeightWithDynamicFloat8CastTensor(x, LinearMMConfig(c, c, c), torch.float8_e4m3fn, s)
    with torch.no_grad():
        (data,), (scale,) = w.fsdp_pre_all_gather(None)
        full, _ = w.fsdp_post_all_gather((data,), (scale,), torch.bfloat16)
        for name, f in [("subclass before a gather", lambda: w.fsdp_pre_all_gather(None)),
                        ("subclass after a gather", lambda: w.fsdp_post_all_gather((data,), (scale,), torch.bfloat16, out=full)),
                        ("mul, clamp, to", lambda: (x * s).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn))]:
            per_call(name, n, lambda: [f() for _ in range(n)], out)


def of_experts(out, n=100):
    """Measures operators of a mixture of experts (exec/gpu/peers/peer_moe.py), recorded by autograd, and their backward if they have one."""
    E, d, rows, k = 8, 64, 64, 2
    x = torch.ones(rows, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True); w = torch.ones(E, d, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(rows, E, device=DEVICE, requires_grad=True); ids = torch.randint(0, E, (rows * k,), device=DEVICE); order = torch.argsort(ids, stable=True); token = order // k
    counts = torch.full((E,), rows * k // E, device=DEVICE); offs = counts.cumsum(0).to(torch.int32); wide = torch.ones(rows * k, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    half = [rows * k // 2] * 2; once = torch.randperm(rows * k, device=DEVICE); p = torch.rand(rows * k, device=DEVICE, requires_grad=True)
    for name, f in [("argsort, stable", lambda: torch.argsort(ids, stable=True)), ("floor divide", lambda: order // k), ("histc", lambda: torch.histc(ids.float(), bins=E, min=0, max=E - 1)),
                    ("cumsum", lambda: counts.cumsum(0)), ("sum", lambda: counts.sum(0)), ("arange", lambda: torch.arange(E, device=DEVICE)), ("zeros", lambda: torch.zeros(rows, d, device=DEVICE)),
                    ("repeat_interleave", lambda: offs.repeat_interleave(counts, output_size=rows * k)), ("index of integers", lambda: offs[ids]), ("counts to the host", lambda: counts.tolist())]:
        per_call(name, n, lambda f=f: [f() for _ in range(n)], out)
    both = [("topk", lambda: scores.topk(k, -1)[0]), ("softmax", lambda: torch.softmax(scores, -1)), ("index of rows", lambda: x[token]), ("grouped_mm", lambda: torch._grouped_mm(wide, w.transpose(-2, -1), offs=offs)),
            ("index_copy", lambda: torch.zeros(rows * k, d, dtype=torch.bfloat16, device=DEVICE).index_copy(0, once, wide)), ("index_add", lambda: torch.zeros_like(x).index_add(0, token, wide)),
            ("weights of choices", lambda: p.reshape(-1)[order].unsqueeze(-1)), ("functional all_to_all", lambda: all_to_all_single_autograd(wide, half, half, dist.group.WORLD) + 0), ("silu", lambda: torch.nn.functional.silu(wide))]
    for name, f in both:
        per_call(f"{name}, recorded", n, lambda f=f: [f() for _ in range(n)], out)
        def graphs(f=f):
            made = [[f() for _ in range(n)] for _ in range(20)]; seeds = [torch.ones_like(y) for y in made[0]]
            return lambda: torch.autograd.backward(made.pop(), seeds) if made else None
        per_call(f"{name} backward", n, graphs(), out)


def experts(out, o, mesh):
    """Measures layers of peer_moe.py without expert parallelism."""
    import pathlib
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "exec/gpu/peers")); import peer_moe
    mp, row = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), dict(case="experts", **o)
    for layers in LAYERS:
        c = dict(d=256, L=layers, h=4, kv=2, hd=64, E=8, k=2, ff=128, V=1024, T=64)
        m = peer_moe.MoEModel(c).to(DEVICE)
        for t in [*m.parameters(), *m.buffers()]: nn.init.normal_(t, std=0.02)
        for l in m.layers:
            if o.get("compiled"): l.compile(fullgraph=False)
            if o.get("parts"): l.attn.compile(fullgraph=True); l.moe.experts.compile(fullgraph=True)
            if o.get("shard", True): fully_shard(l, mesh=mesh, mp_policy=mp)
        if o.get("shard", True): fully_shard([m.norm, m.out], mesh=mesh, mp_policy=mp, reshard_after_forward=False); fully_shard(m.tok, mesh=mesh, mp_policy=mp); fully_shard(m, mesh=mesh, mp_policy=mp)
        else: m.to(torch.bfloat16)
        opt = torch.optim.AdamW(m.parameters(), lr=1e-5, fused=DEVICE == "cuda"); x = torch.randint(0, c["V"], (1, c["T"]), device=DEVICE)
        row[f"{layers} layers"] = timed(lambda: torch.nn.functional.cross_entropy(m(x).view(-1, c["V"]).float(), x.view(-1)), opt)
        del m, opt; gc.collect(); torch._dynamo.reset()
    print(row, flush=True); out.write(json.dumps(row) + "\n"); out.flush()


def backward(make, n):
    """Returns a function that only runs backward, on graphs that `make` has built beforehand."""
    graphs = [make() for _ in range(20)]
    return lambda: graphs.pop().backward() if graphs else None


class Plain(nn.Module):
    def forward(self, x): return x


def micro(out, n=200):
    x, y = torch.ones(8, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
    g, w = torch.ones(8, 64, device=DEVICE, requires_grad=True), torch.ones(64, 64, device=DEVICE, requires_grad=True)
    h = x.to(torch.bfloat16)
    def loop(f, grad=False):
        def run():
            with torch.set_grad_enabled(grad):
                for _ in range(n): f()
        return run
    for name, f in [("add", lambda: x + y), ("add in place", lambda: x.add_(y)), ("to", lambda: h.to(torch.float32)), ("view", lambda: x.view(64, 8)),
                    ("transpose", lambda: x.transpose(0, 1)), ("mm", lambda: x @ w), ("cat", lambda: torch.cat((x, y), -1)), ("empty", lambda: torch.empty(8, 64, device=DEVICE)),
                    ("slice", lambda: x[..., :32]), ("mean", lambda: x.mean(-1, keepdim=True)), ("pow", lambda: x.pow(2))]:
        per_call(name, n, loop(f), out)
    for name, f in [("add, recorded", lambda: g + y), ("mul, recorded", lambda: g * g), ("view, recorded", lambda: g.view(64, 8)), ("mm, recorded", lambda: g @ w), ("to, recorded", lambda: g.to(torch.bfloat16)),
                    ("slice, recorded", lambda: g[..., :32])]:
        per_call(name, n, loop(f, True), out)
    plain, hooked, linear = Plain(), Plain(), nn.Linear(64, 64, bias=False, device=DEVICE)
    hooked.register_forward_pre_hook(lambda m, a: None); hooked.register_forward_hook(lambda m, a, o: None)
    per_call("module", n, loop(lambda: plain(x)), out); per_call("module with two hooks", n, loop(lambda: hooked(x)), out)
    per_call("linear, recorded", n, loop(lambda: linear(x), True), out)
    def chain(step):
        def make():
            z = g
            for _ in range(n): z = step(z)
            return z.sum()
        return make
    for name, step in [("add backward", lambda z: z + y), ("mul backward", lambda z: z * y), ("mul two backward", lambda z: z * g), ("view backward", lambda z: z.view(8, 64)), ("to backward", lambda z: z.to(torch.bfloat16).to(torch.float32)),
                       ("mm backward", lambda z: z @ w), ("neg backward", lambda z: -z), ("slice backward", lambda z: z[..., :64])]:
        per_call(name, n * (2 if name == "to backward" else 1), backward(chain(step), n), out)
    params = [torch.ones(64, 64, device=DEVICE, requires_grad=True) for _ in range(100)]
    for p in params: p.grad = torch.ones_like(p)
    for count in (10, 100):
        opt = torch.optim.AdamW(params[:count], lr=1e-5, fused=DEVICE == "cuda")
        per_call(f"adamw fused, {count} tensors", 1, opt.step, out)
        per_call(f"clip, {count} tensors", 1, lambda: nn.utils.clip_grad_norm_(params[:count], 1.0), out)


def compiled(out):
    """Measures calls of compiled code with 8 and 64 kernels in forward (half of them matmuls) and 12 and 96 in backward. The difference
    gives the host time per kernel, and the rest is that of guards and of entering the code."""
    x, w = (torch.ones(64, 64, device=DEVICE, requires_grad=g) for g in (True, True))
    for pairs in (4, 32):
        @torch.compile(fullgraph=True)
        def f(x, w):
            for _ in range(pairs): x = torch.sin(x @ w)
            return x
        y = f(x, w); y.backward(torch.ones_like(y)); seed = torch.ones_like(y)
        per_call(f"compiled, {2 * pairs} kernels", 1, lambda: f(x, w), out)
        graphs = [f(x, w) for _ in range(20)]
        per_call(f"compiled, {2 * pairs} kernels, backward", 1, lambda: graphs.pop().backward(seed) if graphs else None, out)
        torch._dynamo.reset()


def build(kind, over, layers, o, mesh):
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(kind, **(SMALL | over | dict(num_hidden_layers=layers)))
    m = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).to(DEVICE); m.config.use_cache = False
    if o.get("lora"):
        from peft import LoraConfig, get_peft_model
        m = get_peft_model(m, LoraConfig(r=o["lora"], lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    base = m.get_base_model() if o.get("lora") else m
    if o.get("checkpoint"):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
        ls = base.model.layers
        for i in range(len(ls)): ls[i] = checkpoint_wrapper(ls[i], checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)
    if o.get("shard", True):
        mp = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        for l in base.model.layers: fully_shard(l, mesh=mesh, mp_policy=mp, reshard_after_forward=o.get("reshard", True))
        fully_shard(m, mesh=mesh, mp_policy=mp)
    else: m.to(torch.bfloat16)
    if o.get("compiled"):
        for l in base.model.layers: l.compile()
    trained = [p for p in m.parameters() if p.requires_grad]
    fused = DEVICE == "cuda" and not o.get("foreach")
    return m, trained, torch.optim.AdamW(trained, lr=1e-5, fused=fused, foreach=not fused), config.vocab_size


def timed(loss, opt, clipped=()):
    """Returns the median host times of the parts of a step in ms."""
    parts = []
    for i in range(WARM + STEPS):
        SYNC(); t = [time.perf_counter()]; tick = lambda: t.append(time.perf_counter())
        value = loss(); tick(); value.backward(); tick()
        if clipped: nn.utils.clip_grad_norm_(clipped, 1.0)
        tick(); opt.step(); tick(); opt.zero_grad(); tick()
        if i >= WARM: parts.append([b - a for a, b in zip(t, t[1:])])
    SYNC()
    return dict(zip(("forward", "backward", "clip", "optimizer", "zero_grad"), [round(statistics.median(p) * 1e3, 3) for p in zip(*parts)]))


def steps(kind, over, layers, o, mesh, clip):
    m, trained, opt, vocab = build(kind, over, layers, o, mesh)
    x = torch.randint(0, vocab, (1, 64), device=DEVICE)
    parts = timed(lambda: m(input_ids=x, labels=x).loss, opt, trained if clip else [])
    n = len(trained); del m, trained, opt; gc.collect()
    return parts, n


def model(kind, over, o, mesh, out):
    row = dict(case=kind, **o)
    for clip in ((False, True) if o == {} and kind == "llama" else (False,)):
        for layers in LAYERS:
            parts, n = steps(kind, over, layers, o, mesh, clip)
            row[f"{layers} layers{', clip' if clip else ''}"] = dict(parts, tensors=n)
    print(row, flush=True); out.write(json.dumps(row) + "\n"); out.flush()


def launch_times(mesh, out):
    """Measures CUDA runtime calls in a short profile without shapes or stacks."""
    from torch.profiler import ProfilerActivity, profile
    m, trained, opt, vocab = build("llama", {}, 4, {}, mesh); x = torch.randint(0, vocab, (1, 64), device=DEVICE)
    for _ in range(5): m(input_ids=x, labels=x).loss.backward(); opt.zero_grad()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p: m(input_ids=x, labels=x).loss.backward(); SYNC()
    found = {}
    for e in p.events():
        if e.name.startswith("cu"): found.setdefault(e.name, []).append(e.time_range.elapsed_us())
    row = dict(case="runtime", calls={k: [len(v), round(statistics.median(v), 2)] for k, v in found.items()})
    print(row, flush=True); out.write(json.dumps(row) + "\n")


def main():
    words = sys.argv[2:]; picked = lambda text: not words or any(w in text for w in words)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2); mesh = init_device_mesh(DEVICE, (2,))
    with open(sys.argv[1], "w") as out:
        out.write(json.dumps(dict(case="machine", gpu=torch.cuda.get_device_name() if DEVICE == "cuda" else "none", torch=torch.__version__)) + "\n")
        if picked("micro"): micro(out); out.flush()
        if picked("compiled"): compiled(out); out.flush()
        if words and picked("torchao"): subclass(out); out.flush()
        if picked("experts"):
            of_experts(out)
            for o in ({}, dict(shard=False), dict(parts=True), dict(compiled=True)): experts(out, o, mesh)
        for kind, over, o in CASES:
            if not picked(f"{kind} {o}"): continue
            try: model(kind, over, o, mesh, out)
            except Exception as e: print("FAILED", kind, o, repr(e)[:500], flush=True); out.write(json.dumps(dict(case=kind, **o, failed=repr(e)[:300])) + "\n")
            gc.collect(); torch._dynamo.reset()
        if DEVICE == "cuda" and picked("runtime"): launch_times(mesh, out)


if __name__ == "__main__": main()
