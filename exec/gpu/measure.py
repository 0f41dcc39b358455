"""Stages that measure: the profile of the machine, predictions against measurements, the acceptance run."""
import csv, json, os, queue, threading
from keys import AS_THEY_COME, BEST, CAPTURED, CAST, CHUNKED, FASTEST, FUSED, IN_BACKWARD, NATIVE, POINTWISE, PROJECTIONS, REGIONS, SUMMED
from tools import CPU, HERE, OUT, call, chosen, fit, gpus, last_line, left, row, shardlab, train
import tools


def calibrate():
    """Measures the hardware profile of this machine."""
    file = OUT / "calibrated.toml"
    seconds = "10" if CPU else os.environ.get("CALIBRATE_SECONDS", "200")
    code, _, err, s = shardlab("calibrate", "--device", tools.DEVICE, "--ranks", gpus(), "--seconds", seconds, "--out", file, timeout=300)
    row("calibrate", str(file), code == 0 and s < 300, f"{s:.0f} s" if code == 0 else last_line(err))
    if code == 0 and not CPU and gpus() > 1:
        # Two GPUs suffice to measure every number of this section.
        text = file.read_text().split("\n[footprint]\n")[1].split("\n\n")[0]
        source, *numbers = text.splitlines()
        row("calibrate", "footprint", "not measured" not in source, ", ".join(numbers))
    if code == 0 and gpus() > 1:
        code, said, err, _ = call([tools.binary, "validate", file, "--json"], 30)
        if code:
            return row("calibrate", "collectives", False, last_line(err))
        for e in json.loads(said.splitlines()[-1])["errors"]:
            size = "1 MiB and more" if e["large"] else "smaller"
            row("calibrate", f"collectives of {size}, {e['predictor']}", None, f"off by {e['median_abs_percent']:.1f} % (median), {e['worst_percent']:+.1f} % ({e['worst_row']})")


def variants(world):
    """Yields scenarios that were not used for calibration: models, lengths, strategies, prefetch, compile, graphs."""
    base = ["train.steps=8"]
    native = [*base, *NATIVE]
    none = ["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"]
    tiny = [[], none, ["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"], [REGIONS], [REGIONS, CHUNKED], ['train.recompute="full"'],
            [REGIONS, CAPTURED], ['fsdp.strategy="optim"']]
    large = [[], none, [REGIONS, CHUNKED], [REGIONS, CHUNKED, CAPTURED], ["train.seq_len=2048", "model.max_seq_len=2048"]]
    for sets in tiny if world > 2 else tiny[:5]:
        yield "peers-tiny", [*native, *sets]
    for sets in large:
        yield "peers-1b", [*native, *sets]
    yield "peers-tiny", [*base, 'fsdp.policy="fsdp2"']
    yield "peers-1b", [*base, 'fsdp.policy="megatron"']
    if world > 2:
        yield "peers-1b", [*native, "model.layers=24", "model.hidden=1536", "model.heads=12", "model.kv_heads=4", "model.ffn=4096"]
        yield "peers-1b", [*native, "train.grad_accum=2"]


def scaled(scenario, sets):
    """Returns a variant as it is, or a small replacement for it in a rehearsal on the CPU."""
    if not CPU:
        return scenario, sets
    gone = ("train.seq_len", "model.", "train.steps", "train.grad_accum")
    return "small-native", ["train.steps=3", *[s for s in sets if not s.startswith(gone)]]


# Single options on eight layers of the 1b model: names and settings. `BEST` comes first where it is included.
SHORT = ["train.seq_len=1024", "model.max_seq_len=1024"]
FLOAT32 = ['precision.compute="f32"', *SHORT]
ON_SMS = ["fsdp.copy_engine_all_gather=false", "fsdp.copy_engine_reduce_scatter=false"]
OPTIONS = {
    "as it is": [],
    "best": BEST,
    "best, updates in backward": [*BEST, "train.clip_norm=0", "fsdp.optimizer_in_backward=true"],
    "best, optimizer's state offloaded": [*BEST, 'fsdp.offload=["optimizer"]'],
    "all state offloaded": ['fsdp.offload=["params","grads","optimizer"]'],
    "best, summed in the optimizer": [*BEST, SUMMED, "train.clip_norm=0"],
    "best, fused epilogues": [*BEST, FUSED],
    "best, fused epilogues, pointwise": [*BEST, FUSED, POINTWISE],
    "best, clipped": [*BEST, "train.clip_norm=1"],
    "best, SGD": [*BEST, 'train.optimizer="sgd"'],
    "deterministic": ["precision.deterministic=true"],
    "best, deterministic": [*BEST, "precision.deterministic=true"],
    "float32": FLOAT32,
    "float32, regions": [*FLOAT32, REGIONS],
    "float16": ['precision.compute="f16"'],
    "ZeRO-1": ['fsdp.strategy="optim"'],
    "ZeRO-2": ['fsdp.strategy="optim_grads"'],
    "best, ZeRO-2": [*BEST, *ON_SMS, 'fsdp.strategy="optim_grads"'],
    "DDP": ['fsdp.strategy="no_shard"'],
    "FSDP2": ['fsdp.policy="fsdp2"'],
    "FSDP2, blocks": ['fsdp.policy="fsdp2"', 'compile.mode="blocks"'],
    "Megatron-FSDP": ['fsdp.policy="megatron"'],
    "Megatron-FSDP, blocks": ['fsdp.policy="megatron"', 'compile.mode="blocks"'],
    "full": ['compile.mode="full"'],
    "full, FSDP2": ['compile.mode="full"', 'fsdp.policy="fsdp2"'],
    "best, full recompute": [*BEST, 'train.recompute="full"'],
    "selective recompute": ['train.recompute="selective"'],
    "best, selective recompute": [*BEST, 'train.recompute="selective"'],
    "best, four micro-batches": [*BEST, "train.grad_accum=4", "train.micro_batch=1"],
    "one reduction in flight": ["fsdp.reduce_in_flight=1"],
    "reductions not overlapped": ["fsdp.async_reduce=false"],
    "one stream": ["fsdp.unify_comm_stream=true"],
    "one communicator": ["fsdp.separate_communicators=false"],
    "one unit": ['fsdp.units="root"'],
    "best, not resharded": [*BEST, "fsdp.reshard_after_forward=false"],
    "best, no prefetch": [*BEST, "fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
    "best, collectives on SMs": [*BEST, *ON_SMS],
    "NaN checks": ["fsdp.nan_check=true"],
    "caching allocator": ['fsdp.allocator="caching"'],
    "double buffer": ['fsdp.allocator="double_buffer"'],
    "moments in bf16": ['precision.moments="bf16"'],
    "all in bf16": ['precision.main_params="none"', 'precision.main_grads="bf16"', 'precision.moments="bf16"'],
    "best, gradients in bf16": [*BEST, 'precision.main_grads="bf16"'],
    "best, all merged": [*BEST, 'compile.fuse_projections="all"'],
    "best, captured scopes": [*BEST, 'compile.cuda_graph=["attn","mlp"]'],
    "best, captured": [*BEST, CAPTURED],
    "best, blocks": [*BEST, 'compile.mode="blocks"'],
    "replicas": ["mesh.dp_shard=1", "mesh.dp_outer=2"],
    "1 x 512": ["train.seq_len=512", "model.max_seq_len=512", "train.micro_batch=1"],
    "best, 1 x 16,384": [*BEST, "train.seq_len=16384", "model.max_seq_len=16384", "train.micro_batch=1"],
    "best, small vocabulary": [*BEST, "model.vocab=32000"],
}
GPT2 = ["train.steps=12", "model.layers=12", "model.hidden=1536", "model.heads=24", "model.vocab=50304", *SHORT, "train.micro_batch=8", "train.grad_norm=false", 'precision.compute="bf16"']
CNN = ["train.steps=12", "model.layers=8", "model.channels=256", "model.height=64", "model.width=64", "train.micro_batch=16", 'precision.compute="bf16"']
ENCODER = ["train.steps=12", "model.layers=12", "model.hidden=1536", "model.heads=24", "model.ffn=6144", "train.seq_len=512", "train.micro_batch=16", 'precision.compute="bf16"']


# Variants of mixtures of experts: names and settings. Routing is forced to what predictions assume, so that errors
# come from predicted times and not from an assumption about the router.
FORCED = "moe.force_routing=true"
SKEWED = [FORCED, "moe.routing=seeded", "moe.imbalance=1.5"]
ROUND_ROBIN = [FORCED, "moe.routing=round_robin"]
TWO = [FORCED, "mesh.ep=2"]
PEER, EXCHANGE, PADDED = "moe.dispatcher=peer", "moe.dispatcher=all_to_all", "moe.dispatcher=padded"
MOE_VARIANTS = {
    "compiled": BEST,
    "eager": NATIVE,
    "fastest": FASTEST,
    "fastest, cast": [*FASTEST, CAST],
    "fastest, in backward, cast, apart": [*FASTEST, IN_BACKWARD, CAST, PROJECTIONS],
    "fastest, captured": [*FASTEST, CAPTURED],
    "ep 2": [*FASTEST, *TWO],
    "ep 2, skewed": [*FASTEST, *SKEWED, *TWO],
    "ep 2, eager": [*NATIVE, *TWO],
    "ep 2, peer": [*FASTEST, *TWO, PEER],
    "ep 2, peer, skewed": [*FASTEST, *SKEWED, *TWO, PEER],
    "ep 2, peer, round robin": [*FASTEST, *ROUND_ROBIN, *TWO, PEER],
    "ep 2, peer, captured": [*FASTEST, *TWO, PEER, CAPTURED],
    "ep 2, all_to_all": [*FASTEST, *TWO, EXCHANGE],
    "ep 2, all_to_all, skewed": [*FASTEST, *SKEWED, *TWO, EXCHANGE],
    "ep 2, all_to_all, round robin": [*FASTEST, *ROUND_ROBIN, *TWO, EXCHANGE],
    "ep 2, padded": [*FASTEST, *TWO, PADDED],
}
# The same on one GPU, without collectives.
MOE_ALONE = {
    "eager": NATIVE,
    "compiled": [*NATIVE, REGIONS],
    "chunked": [*NATIVE, REGIONS, CHUNKED],
    "fused": [*NATIVE, REGIONS, CHUNKED, FUSED],
    "fused, skewed": [*NATIVE, REGIONS, CHUNKED, FUSED, *SKEWED],
    "fused, captured": [*NATIVE, REGIONS, CHUNKED, FUSED, CAPTURED],
    "fused, recompute": [*NATIVE, REGIONS, CHUNKED, FUSED, "train.recompute=full"],
    "fused, half as long": [*NATIVE, REGIONS, CHUNKED, FUSED, "train.seq_len=2048"],
}
MOE_MODELS = {
    "a3b-6l-64e": ("peers-a3b-12l-64e", ["model.layers=6"]),
    "mixtral-2l": ("peers-mixtral-4l", ["model.layers=2"]),
    # Shapes without measured kernels: wide shared experts and 32 small ones.
    "shared": ("peers-a3b-12l-64e", ["model.layers=8", "model.heads=16", "model.experts=32", "model.top_k=4", "model.expert_ffn=1408", "model.shared_expert_ffn=2816"]),
}


def settings(sets):
    """Returns settings without duplicate keys: the last value of each key wins."""
    return [f"{k}={v}" for k, v in dict(s.split("=", 1) for s in sets).items()]


def judged(stage, case, profile, world, visible, scenario, sets, limit=60):
    """Compares a prediction with a measurement of the same program. Returns scenario, world, predicted and measured ms, the errors of exposed
    time and of device memory, and whether the engine's memory is equal; None if either run failed."""
    sets = settings([*fit(world), f'mesh.hardware="{profile}"', *sets])
    code, sim, err, _ = shardlab("sim", scenario, "--json", "--no-store", *[x for s in sets for x in ("--set", s)], timeout=60)
    if code == 0:
        code, run, err, s = train(scenario, "--no-grad-norms", sets=sets, timeout=limit, visible=visible)
    if code:
        return row(stage, case, False, last_line(err)[:140])
    a, b = sim["step_ms"]["median"], run["step_ms"]["median"]
    ms, mr = sim["memory"], run["memory"]
    exposed = abs(sim["exposed_ms"]["total"] - run["exposed_ms"]["total"]) / b
    same = ms["peak_allocated_bytes"] == mr["peak_allocated_bytes"]
    device = ms["peak_device_bytes"] / mr["peak_device_bytes"] - 1
    row(stage, case, same, f"{b:8.2f} ms, predicted {a:8.2f} ({a / b - 1:+.1%}), exposed off by {exposed:.1%}, engine memory {'equal' if same else 'DIFFERS'}, device {device:+.1%}",
        scenario=scenario, sets=sets, world=world, measured_ms=b, predicted_ms=a, measured_exposed=run["exposed_ms"], predicted_exposed=sim["exposed_ms"],
        measured_memory=mr, predicted_memory=ms, seconds=s)
    return scenario, world, a, b, exposed, device, same


def summed_up(stage, results):
    """Prints a row with the errors of all predictions."""
    mid = lambda l: sorted(l)[len(l) // 2]
    time = [abs(a / b - 1) for _, _, a, b, *_ in results]
    exposed, device = [r[4] for r in results], [abs(r[5]) for r in results]
    right, wrong = order(results)
    row(stage, f"{len(results)} variants", None, f"step time off by {mid(time):.1%} (median), {max(time):.1%} (worst); exposed {mid(exposed):.1%}, {max(exposed):.1%}; "
        f"device memory {mid(device):.1%}, {max(device):.1%}; order right in {right} of {right + wrong} pairs that differ by more than 2 %")


def hardware():
    """Returns the profile for predictions."""
    made = OUT / "calibrated.toml"
    return os.environ.get("PROFILE", str(made) if made.exists() else "h200-nvlink-exec")


def options():
    """Predicts and measures single options on 2 GPUs; RUNS selects some of them."""
    runs = {name: ("peers-1b", ["model.layers=8", "train.steps=12", *NATIVE, *sets]) for name, sets in OPTIONS.items()}
    runs |= {"GPT-2": ("gpt2-tiny", GPT2), "GPT-2, regions": ("gpt2-tiny", [*GPT2, REGIONS])}
    runs |= {"CNN": ("small-cnn", CNN), "encoder": ("small-encoder", ENCODER), "toy CNN": ("toy-cnn", NATIVE), "toy linear": ("toy-linear", NATIVE)}
    one_by_one("options", 2, ((name, *scaled(*runs[name])) for name in chosen(list(runs))), limit=60)


def one_by_one(stage, world, cases, limit):
    """Predicts and measures cases (a name, a scenario and its settings) while time is left, and prints a summary."""
    profile, results = hardware(), []
    for name, scenario, sets in cases:
        if left() < 25:
            row(stage, name, None, tools.NO_TIME)
            break
        results.append(judged(stage, name, profile, world, None, scenario, sets, limit))
    results = [r for r in results if r]
    if results:
        summed_up(stage, results)


def moe_fidelity():
    """Compares predictions of mixtures of experts with measurements, with and without expert parallelism; ROWS and RUNS select some of them."""
    world = min(2, gpus())
    variants = MOE_VARIANTS if world > 1 else MOE_ALONE
    wanted = os.environ.get("ROWS", ",".join(MOE_MODELS)).split(",")

    def cases():
        for model in filter(MOE_MODELS.__contains__, wanted):
            scenario, same = MOE_MODELS[model]
            for name in chosen(list(variants)):
                sets = ["train.steps=12", *same, *variants[name]]
                if CPU:
                    kept = [s for s in sets if not s.startswith(("train.steps", "train.seq_len", "model."))]
                    scenario, sets = "small-moe", ["train.steps=3", "train.clip_norm=0", *kept]
                yield f"{model} {name}", scenario, sets
    # The limit is high because billions of weights are initialized on the CPU.
    one_by_one("moe_fidelity", world, cases(), limit=100)


def overrides(text):
    """Returns the settings of a row of a table: they are separated by semicolons, except within lists."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == ";" and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def table():
    """Measures rows of a table of `shardlab exec` again (TABLE, a CSV file in tests/data); RUNS selects some of them by name."""
    wanted = {r["name"]: r for r in csv.DictReader(open(HERE.parent.parent / "tests/data" / os.environ.get("TABLE", "exec_experts_h200.csv")))}

    def cases(world):
        for name in chosen(list(wanted)):
            sets = overrides(wanted[name]["overrides"])
            if f"mesh.dp_shard={world}" in sets:
                kept = [s for s in sets if not s.startswith(("mesh.dp_", "mesh.hardware"))]
                scenario = "small-moe" if CPU else wanted[name]["scenario"]
                yield f"{name}, was {wanted[name]['step_ms']}", scenario, ["train.steps=12", *([] if CPU else kept)]
    for world in (n for n in (1, 2, 4) if n <= gpus()):
        one_by_one("table", world, cases(world), limit=120)


def fidelity():
    """Compares predictions with measurements of the same programs, on 2 GPUs (two runs at a time) and on all."""
    profile = hardware()
    results = []

    def one(world, visible, scenario, sets):
        scenario, sets = scaled(scenario, sets)
        case = f"{scenario} {world}: " + (", ".join(x.split(".", 1)[-1] for x in sets if "steps" not in x) or "as it is")
        found = judged("fidelity", case, profile, world, visible, scenario, sets)
        if found:
            results.append(found)

    every = gpus()
    for scenario, sets in variants(every):
        one(every, None, scenario, sets)
    if every > 2:
        todo = queue.Queue()
        for v in variants(2):
            todo.put(v)

        def work(visible):
            while True:
                try:
                    v = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    one(2, visible, *v)
                except Exception as e:  # noqa: BLE001
                    row("fidelity", str(v)[:50], False, repr(e)[:160])
        threads = [threading.Thread(target=work, args=(f"{2 * i},{2 * i + 1}",)) for i in range(1 if CPU else every // 2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if results:
        summed_up("fidelity", results)


def order(results):
    """Counts pairs of variants of one model and world whose measured times differ by more than 2 %: those predicted in the right order, and the others."""
    right = wrong = 0
    for i, x in enumerate(results):
        for y in results[:i]:
            if x[:2] == y[:2] and abs(x[3] / y[3] - 1) > 0.02:
                good = (x[3] < y[3]) == (x[2] < y[2])
                right, wrong = right + good, wrong + (not good)
    return right, wrong


def acceptance():
    """Runs a scenario on four GPUs with the command of a user, and checks its trace and its prediction."""
    scenario = "small-native" if CPU else "llama3.2-1b-4xh200"
    trace = OUT / "trace-acceptance.json"
    code, run, err, s = train(scenario, "--trace", trace, sets=fit(gpus()), timeout=90)
    if code:
        return row("acceptance", scenario, False, last_line(err))
    (OUT / "run-acceptance.json").write_text(json.dumps(run))
    slices = sum(e["ph"] == "X" for e in json.loads(trace.read_text())["traceEvents"])
    m, losses = run["memory"], run["losses"]
    row("acceptance", scenario, losses[-1] < losses[0] and slices > 100,
        f"{run['step_ms']['median']:.2f} ms, loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps, {m['peak_allocated_bytes'] / 2**20:,.0f} MiB allocated, "
        f"{m['peak_device_bytes'] / 2**20:,.0f} on the device, {run['exposed_ms']['total']:.1f} ms exposed {run['exposed_ms']['by_cause']}, {slices} slices, {s:.0f} s")
    sets = [*fit(gpus()), *([] if CPU else [f'mesh.hardware="{hardware()}"'])]
    code, found, err, s = shardlab("compare", scenario, scenario, "--exec-b", "--device", tools.DEVICE, "--steps", 8, "--json", *[x for v in sets for x in ("--set", v)], timeout=90)
    # Status 1 reports a regression, which `compare` also finds if the prediction is too fast.
    if code not in (0, 1) or not found:
        return row("acceptance", "compare", False, last_line(err))
    (OUT / "compare-acceptance.json").write_text(json.dumps(found))
    (a, b), memory = found["step"]["medians"], [m["values"] for m in found["metrics"] if m["name"] == "allocated_gib"]
    row("acceptance", "compare", all(x == y for x, y in memory),
        f"{a:.2f} ms predicted, {b:.2f} measured ({a / b - 1:+.1%}), allocated GiB {memory}, {s:.0f} s")
