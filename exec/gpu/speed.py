"""Stages that compare our steps with those of the peers, and with the floor of the hardware."""
import array, json, os, random, sys
from collections import namedtuple
from keys import AHEAD, AS_THEY_COME, BEST, CAPTURED, CAST, CHUNKED, COPY_IN, FASTEST, FLOATS, FUSED, GATHERS, IN_BACKWARD, NATIVE, NEXT_STEP, ONE_CHUNK, POINTWISE, PROJECTIONS, REGIONS, SELECTIVE, SUMMED
from tools import CPU, HERE, OUT, call, chosen, fit, gpus, last_line, left, row, train

# Number of warm-up steps, as in peer.py: steps are slower until the GPUs have settled at their power limit.
WARM = 4
# Rows of the comparison: micro-batch and sequence length of the model of that name in peer.py, our scenario and the settings that make
# it the same work, the number of steps, and the vocabulary. All runs train on uniformly random tokens, because the power draw of
# a step depends on its data.
Row = namedtuple("Row", "batch length scenario sets steps vocab")
ROWS = {
    "1b": Row(2, 4096, "peers-1b", [], 24, 128_256),
    "3b": Row(2, 4096, "peers-3b", ["train.micro_batch=2"], 24, 128_256),
    "8b": Row(1, 8192, "peers-8b", ['train.recompute="none"'], 16, 128_256),
}
# Rows of the stages `experts` and `float8_speed`: models of peer_moe.py.
EXPERTS = {
    "a3b-12l-64e": Row(1, 4096, "peers-a3b-12l-64e", [], 14, 151_936),
    "mixtral-4l": Row(1, 4096, "peers-mixtral-4l", [], 14, 32_000),
}
# The floor in ms, measured by the loop of the floor stage on four H200 at their power limit of 700 W.
FLOOR_MS = {"1b": 113.0, "3b": 284.2, "8b": 674.5}
# Halves the loss chunks: with selective recompute, the logits would otherwise determine the memory peak.
LEANEST = [*FASTEST, SELECTIVE, "train.loss_chunk_tokens=2048"]
OURS = {
    "ours compiled": BEST,
    "ours compiled, one chunk": [*BEST, ONE_CHUNK],
    "ours compiled, pointwise": [*BEST, POINTWISE],
    "ours compiled, summed in the optimizer": [*BEST, SUMMED],
    "ours compiled, summed in the optimizer, pointwise": [*BEST, SUMMED, POINTWISE],
    "ours compiled, summed in the optimizer, all merged": [*BEST, SUMMED, 'compile.fuse_projections="all"'],
    "ours compiled, fused epilogues": [*BEST, FUSED],
    "ours compiled, fused epilogues, pointwise": [*BEST, FUSED, POINTWISE],
    "ours compiled, fused epilogues, summed in the optimizer": FASTEST,
    "ours compiled, fused epilogues, summed in the optimizer, pointwise": [*FASTEST, POINTWISE],
    "ours compiled, fused epilogues, summed in the optimizer, selective, small chunks": LEANEST,
    "ours compiled, next step": [*BEST, "fsdp.prefetch_next_step=2"],
    "ours compiled, fused epilogues, summed in the optimizer, next step": [*FASTEST, NEXT_STEP],
    "ours compiled, float32 sent": FLOATS,
    "ours compiled, no epilogues": [*BEST, "compile.gemm_accumulate=false"],
    "ours compiled, norms apart": [*BEST, "compile.mix_order_reductions=false"],
    "ours captured": [*BEST, CAPTURED],
    "ours captured, fused epilogues, summed in the optimizer": [*FASTEST, CAPTURED],
    "ours compiled, reductions on SMs": [*NATIVE, REGIONS, CHUNKED, GATHERS],
    "ours compiled, collectives on SMs": [*NATIVE, REGIONS, CHUNKED],
    "ours compiled, all merged": [*BEST, 'compile.fuse_projections="all"'],
    "ours compiled, selective": [*BEST, SELECTIVE],
    "ours eager": NATIVE,
    "ours compiled, all logits": [*NATIVE, REGIONS],
}
# A tuned peer has a loss that never stores all logits, and reduces gradients in bf16, as our engine and Megatron-FSDP do.
PEERS = {
    "fsdp2 compiled": {"engine": "fsdp2", "compile": "layer"},
    "fsdp2 compiled, liger, bf16 sent": {"engine": "fsdp2", "compile": "layer", "loss": "liger", "reduce": "bfloat16"},
    "fsdp2 compiled, chunked, bf16 sent": {"engine": "fsdp2", "compile": "layer", "loss": 2048, "reduce": "bfloat16"},
    "fsdp2 eager": {"engine": "fsdp2"},
    "megatron-fsdp compiled": {"engine": "mfsdp", "compile": "layer"},
    "megatron-fsdp eager": {"engine": "mfsdp"},
    # The per-module rewrite; its blocks cannot be compiled.
    "megatron-fsdp experimental eager": {"engine": "mfsdp2"},
}
# "Compiled in parts" compiles attention and experts separately, without the code between them. "Divided experts" is expert parallelism.
EXPERT_PEERS = {
    "fsdp2 compiled": {"compile": True},
    "fsdp2 compiled, divided experts": {"compile": True, "ep": None},
    "fsdp2 compiled in parts": {"compile": "parts"},
    "fsdp2 compiled in parts, divided experts": {"compile": "parts", "ep": None},
    "fsdp2 eager": {},
}
DIVIDED = "mesh.ep={world}"
EXPERT_OURS = {
    "ours compiled": BEST,
    "ours compiled, fused epilogues": [*BEST, FUSED],
    "ours compiled, fused epilogues, summed in the optimizer": FASTEST,
    "ours compiled, fused epilogues, summed in the optimizer, pointwise": [*FASTEST, POINTWISE],
    "ours compiled, fused epilogues, summed in the optimizer, divided experts": [*FASTEST, DIVIDED],
    "ours compiled, fused epilogues, summed in the optimizer, divided experts, peer": [*FASTEST, DIVIDED, "moe.dispatcher=peer"],
    "ours captured, fused epilogues, summed in the optimizer, divided experts, peer": [*FASTEST, DIVIDED, "moe.dispatcher=peer", CAPTURED],
    "ours compiled, fused epilogues, in backward, cast, selective": [*BEST, FUSED, SELECTIVE, IN_BACKWARD, CAST],
    "ours compiled, fused epilogues, in backward, cast, selective, projections apart": [*BEST, FUSED, SELECTIVE, IN_BACKWARD, CAST, PROJECTIONS],
    "ours compiled, fused epilogues, summed in the optimizer, in backward, cast, projections apart": [*FASTEST, IN_BACKWARD, CAST, PROJECTIONS],
    "ours compiled, fused epilogues, summed in the optimizer, in backward, cast, projections apart, ahead": [*FASTEST, IN_BACKWARD, CAST, PROJECTIONS, *AHEAD],
    "ours compiled, fused epilogues, summed in the optimizer, in backward, cast, projections apart, ahead, copy-in stream": [*FASTEST, IN_BACKWARD, CAST, PROJECTIONS, *AHEAD, COPY_IN],
    "ours compiled, fused epilogues, summed in the optimizer, in backward, cast, selective, projections apart, ahead, copy-in stream": [*FASTEST, IN_BACKWARD, CAST, SELECTIVE, PROJECTIONS, *AHEAD, COPY_IN],
    "ours compiled, fused epilogues, summed in the optimizer, in backward, cast, projections apart, ahead in forward": [*FASTEST, IN_BACKWARD, CAST, PROJECTIONS, AHEAD[0]],
    "ours compiled, fused epilogues, summed in the optimizer, in backward, cast, selective, projections apart, ahead": [*FASTEST, IN_BACKWARD, CAST, SELECTIVE, PROJECTIONS, *AHEAD],
    "ours compiled, fused epilogues, summed in the optimizer, cast": [*FASTEST, CAST],
    "ours compiled, fused epilogues, summed in the optimizer, in backward": [*FASTEST, IN_BACKWARD],
    "ours compiled, fused epilogues, summed in the optimizer, projections apart": [*FASTEST, PROJECTIONS],
    "ours captured, fused epilogues, summed in the optimizer": [*FASTEST, CAPTURED],
    "ours compiled, reductions on SMs": [*NATIVE, REGIONS, CHUNKED, GATHERS],
    "ours eager": NATIVE,
}
# 8-bit matmuls compared with bf16. The peer with `tensorwise` gathers in 8 bits with precomputed scales.
TENSORWISE = "precision.float8_recipe=tensorwise"
ROWWISE = "precision.float8_recipe=rowwise"
BLOCKWISE = "precision.float8_recipe=blockwise"
CODES_SAVED = "precision.float8_saved=float8"
CODES_GATHERED = "precision.float8_all_gather=true"
FLOAT8_OURS = {
    "ours bf16": FASTEST,
    "ours bf16, pointwise": [*FASTEST, POINTWISE],
    "ours tensorwise": [*FASTEST, TENSORWISE],
    "ours tensorwise, pointwise": [*FASTEST, POINTWISE, TENSORWISE],
    "ours tensorwise, codes saved": [*FASTEST, TENSORWISE, CODES_SAVED],
    "ours tensorwise, 8-bit gathers": [*FASTEST, TENSORWISE, CODES_GATHERED],
    "ours tensorwise, codes saved, 8-bit gathers": [*FASTEST, TENSORWISE, CODES_SAVED, CODES_GATHERED],
    "ours tensorwise, codes saved, 8-bit gathers, cast": [*FASTEST, TENSORWISE, CODES_SAVED, CODES_GATHERED, CAST],
    "ours tensorwise, codes saved, 8-bit gathers, cast, next step": [*FASTEST, TENSORWISE, CODES_SAVED, CODES_GATHERED, CAST, NEXT_STEP],
    "ours tensorwise, codes saved, 8-bit gathers, cast, next step, copy-in stream": [*FASTEST, TENSORWISE, CODES_SAVED, CODES_GATHERED, CAST, NEXT_STEP, COPY_IN],
    "ours tensorwise, codes saved, 8-bit gathers, cast, captured": [*FASTEST, TENSORWISE, CODES_SAVED, CODES_GATHERED, CAST, CAPTURED],
    "ours tensorwise, codes saved, 8-bit gathers, cast, pointwise": [*FASTEST, POINTWISE, TENSORWISE, CODES_SAVED, CODES_GATHERED, CAST],
    "ours tensorwise, codes saved, 8-bit gathers, cast, all merged": [*FASTEST, TENSORWISE, CODES_SAVED, CODES_GATHERED, CAST, 'compile.fuse_projections="all"'],
    "ours tensorwise, codes saved, all merged": [*FASTEST, TENSORWISE, CODES_SAVED, 'compile.fuse_projections="all"'],
    "ours tensorwise, codes saved, all merged, 8-bit gathers": [*FASTEST, TENSORWISE, CODES_SAVED, 'compile.fuse_projections="all"', CODES_GATHERED],
    "ours tensorwise, captured": [*FASTEST, TENSORWISE, CAPTURED],
    "ours rowwise": [*FASTEST, ROWWISE],
    "ours blockwise": [*FASTEST, BLOCKWISE],
    "ours blockwise, codes saved": [*FASTEST, BLOCKWISE, CODES_SAVED],
}
# Mixtures of experts, with linear layers in 8 bits, and with experts in 8 bits, too.
CODES_OF_EXPERTS = "precision.float8_experts=true"
FLOAT8_EXPERTS = {
    "ours bf16": FASTEST,
    "ours tensorwise": [*FASTEST, TENSORWISE],
    "ours tensorwise, experts": [*FASTEST, TENSORWISE, CODES_OF_EXPERTS],
    "ours tensorwise, experts, codes saved": [*FASTEST, TENSORWISE, CODES_OF_EXPERTS, CODES_SAVED],
    "ours tensorwise, experts, codes saved, 8-bit gathers, cast": [*FASTEST, TENSORWISE, CODES_OF_EXPERTS, CODES_SAVED, CODES_GATHERED, CAST],
    "ours bf16, divided experts": [*FASTEST, DIVIDED],
    "ours tensorwise, divided experts": [*FASTEST, DIVIDED, TENSORWISE],
    "ours tensorwise, experts, divided experts": [*FASTEST, DIVIDED, TENSORWISE, CODES_OF_EXPERTS],
    "ours bf16, divided experts, peer": [*FASTEST, DIVIDED, "moe.dispatcher=peer"],
    "ours tensorwise, experts, divided experts, peer": [*FASTEST, DIVIDED, "moe.dispatcher=peer", TENSORWISE, CODES_OF_EXPERTS],
}
FLOAT8_PEERS = {
    "fsdp2 compiled, liger, bf16 sent": {"compile": True, "loss": "liger", "reduce": "bfloat16"},
    "fsdp2 tensorwise compiled, liger, bf16 sent": {"compile": True, "loss": "liger", "reduce": "bfloat16", "float8": "tensorwise", "fp8_gather": True},
    "fsdp2 rowwise compiled, liger, bf16 sent": {"compile": True, "loss": "liger", "reduce": "bfloat16", "float8": "rowwise"},
}
# The most important runs of every size come first, then the others while time is left. Each list of peers runs in separate processes,
# because Megatron-FSDP does not free its memory.
PASSES = [
    ([["fsdp2 compiled", "fsdp2 compiled, liger, bf16 sent"], ["megatron-fsdp compiled"]],
     ["ours compiled, fused epilogues, summed in the optimizer", "ours compiled, fused epilogues, summed in the optimizer, next step",
      "ours compiled, fused epilogues, summed in the optimizer, pointwise",
      "ours compiled, fused epilogues, summed in the optimizer, selective, small chunks"]),
    ([["fsdp2 compiled, chunked, bf16 sent"]],
     ["ours compiled", "ours compiled, fused epilogues", "ours captured, fused epilogues, summed in the optimizer",
      "ours compiled, fused epilogues, pointwise", "ours compiled, summed in the optimizer", "ours compiled, pointwise",
      "ours compiled, summed in the optimizer, pointwise", "ours compiled, one chunk", "ours captured"]),
    ([["fsdp2 eager"]],
     ["ours eager", "ours compiled, summed in the optimizer, all merged", "ours compiled, next step", "ours compiled, float32 sent",
      "ours compiled, no epilogues", "ours compiled, norms apart", "ours compiled, reductions on SMs", "ours compiled, collectives on SMs",
      "ours compiled, all merged", "ours compiled, selective"]),
    ([["megatron-fsdp eager"], ["megatron-fsdp experimental eager"]], ["ours compiled, all logits"]),
]
# A rehearsal runs this instead of the programs that need torch and GPUs.
STAND_IN = """
import json, sys
for c in json.load(open(sys.argv[1])):
    print("RESULT " + json.dumps(dict(c, step_ms=10.0, min_ms=9.0, max_ms=11.0, peak_alloc_mib=1.0, device_used_mib=2.0,
                                      alone_ms=5.0, first_ms=6.0, loop_ms=7.0, attention="cuDNN", mhz=[1500], watts=[700], losses=[5.0] * c.get("steps", 0))))
"""


def sizes():
    return os.environ.get("ROWS", ",".join(ROWS)).split(",")


def torchrun(program, world, configs, timeout):
    """Runs configurations with a program of `peers/`. Returns the results that it printed, in order, and an error message for the missing ones."""
    file = OUT / "configs.json"
    file.write_text(json.dumps(configs))
    command = ["torchrun", f"--nproc-per-node={world}", "--master-port", str(20000 + (os.getpid() + int(left())) % 20000),
               HERE / "peers" / program, file]
    if CPU:
        command = [sys.executable, "-c", STAND_IN, file]
    env = {}
    if os.environ.get("PEER_PYTHONPATH"):
        env["PYTHONPATH"] = os.environ["PEER_PYTHONPATH"]
    code, out, err, _ = call(command, timeout, env)
    with open(OUT / "log.txt", "a") as log:
        log.write(out[-4000:])
    found = [json.loads(l.split("RESULT ", 1)[1]) for l in out.splitlines() if "RESULT " in l]
    failed = [l for l in out.splitlines() if "FAILED" in l]
    return found, (failed or [last_line(err)])[0]


def peer(world, size, names):
    """Runs the named peers, all in one process per rank. Returns their results and an error message, as `torchrun` does."""
    r = ROWS[size]
    configs = [{"size": size, "B": r.batch, "T": r.length, "steps": r.steps, **PEERS[n]} for n in names]
    return torchrun("peer.py", world, configs, 40 + 55 * len(configs))


def tokens(world, r):
    """Writes and returns a file with enough random tokens for a run."""
    file = OUT / "tokens.bin"
    draw = random.Random(1).randrange
    file.write_bytes(array.array("I", (draw(r.vocab) for _ in range((r.steps + 1) * world * r.batch * (r.length + 1)))).tobytes())
    return file


def ours(world, size, name, sets, stage="speed"):
    r = ROWS.get(size) or EXPERTS[size]
    scenario, extra = r.scenario, r.sets
    data = [] if CPU else ["--data", tokens(world, r), "--data-dtype", "uint32"]
    if CPU:
        scenario, extra = "small-native", ["train.clip_norm=0"]
    trace = OUT / f"trace-{size}-{name.replace(' ', '-').replace(',', '')}.json"
    code, run, err, s = train(scenario, "--steps", r.steps, "--no-grad-norms", "--trace", trace, *data, sets=[*fit(world), *extra, *sets], timeout=110)
    if code:
        return row(stage, f"{size} {name}", False, last_line(err)[:160])
    (OUT / f"run-{trace.stem[6:]}.json").write_text(json.dumps(run))
    m = run["memory"]
    samples = sorted(run["step_ms"]["samples"][WARM - r.steps:])
    return samples[len(samples) // 2], m["peak_allocated_bytes"] / 2**20, m["peak_device_bytes"] / 2**20, samples, s


def speed():
    """Compares step time and memory of our engine and the peers: the same work on the same machine, in the same call."""
    world = gpus()
    found = {size: {} for size in sizes()}

    def say(size, name, ms, allocated, device, **facts):
        found[size][name] = (ms, allocated, device)
        row("speed", f"{size} {name}", None, f"{ms:9.2f} ms {allocated:10.1f} MiB allocated {device:10.1f} device  {ms / FLOOR_MS[size]:.2f} of the floor",
            size=size, name=name, step_ms=ms, allocated_mib=allocated, device_mib=device, **facts)

    for groups, own in PASSES:
        for size in sizes():
            for names in filter(None, map(chosen, groups)):
                if any("megatron" in n or "liger" in n for n in names) and not CPU and not os.environ.get("PEER_PYTHONPATH"):
                    continue
                results, why = peer(world, size, names)
                # A configuration that fails prints no result, but those after it do, so results are matched by their settings.
                of = {json.dumps({k: r.get(k) for k in ("engine", "compile", "loss", "reduce")}): r for r in results}
                for name in names:
                    r = of.get(json.dumps({k: PEERS[name].get(k) for k in ("engine", "compile", "loss", "reduce")}))
                    if r:
                        say(size, name, r["step_ms"], r["peak_alloc_mib"], r["device_used_mib"], least_ms=r["min_ms"], most_ms=r["max_ms"], losses=r.get("losses"))
                    else:
                        row("speed", f"{size} {name}", None, why[:160])
            for name in chosen(own):
                one = ours(world, size, name, OURS[name])
                if one:
                    ms, allocated, device, samples, s = one
                    say(size, name, ms, allocated, device, least_ms=samples[0], most_ms=samples[-1], seconds=s)
    for size in sizes():
        ratios(size, found[size])


def experts():
    """Compares step time and memory of mixtures of experts in our engine and under FSDP2, with and without expert parallelism."""
    world = gpus()
    peers = {n: {**c, "kind": "moe", **({"ep": world} if "ep" in c else {})} for n, c in EXPERT_PEERS.items()}
    compare("experts", EXPERTS, EXPERT_OURS, peers)


def float8_speed():
    """Compares step time and memory of 8-bit matmuls, in our engine and under FSDP2 with torchao, with those of bf16."""
    compare("float8_speed", ROWS, FLOAT8_OURS, {n: {**c, "kind": "dense"} for n, c in FLOAT8_PEERS.items()})
    compare("float8_speed", EXPERTS, FLOAT8_EXPERTS, {})


def compare(stage, sizes, own, peers):
    """Measures runs of our engine, then those of peer_moe.py, for each of these sizes that ROWS names."""
    world = gpus()
    wanted = os.environ.get("ROWS", ",".join(sizes)).split(",")
    for size in filter(sizes.__contains__, wanted):
        r, found = sizes[size], {}

        def say(name, ms, allocated, device, **facts):
            found[name] = (ms, allocated, device)
            row(stage, f"{size} {name}", None, f"{ms:9.2f} ms {allocated:10.1f} MiB allocated {device:10.1f} device", size=size, name=name,
                step_ms=ms, allocated_mib=allocated, device_mib=device, **facts)
        for name in chosen(own):
            one = ours(world, size, name, [s.replace("{world}", str(world)) for s in own[name]], stage)
            if one:
                ms, allocated, device, samples, s = one
                say(name, ms, allocated, device, least_ms=samples[0], most_ms=samples[-1], seconds=s)
        for name in chosen(peers):
            # Each configuration runs in a separate process: memory that one leaves reserved would be missing for the next.
            config = {"size": size, "B": r.batch, "T": r.length, "steps": r.steps, **peers[name]}
            results, why = torchrun("peer_moe.py", world, [config], 100)
            for p in results:
                say(name, p["step_ms"], p["peak_alloc_mib"], p.get("device_mib", p.get("device_used_mib")), least_ms=p["min_ms"], most_ms=p["max_ms"], losses=p.get("losses"))
            if not results:
                row(stage, f"{size} {name}", None, why[:160])
        ratios(size, found, stage)


def ratios(size, found, stage="speed"):
    """Prints each of our runs relative to the least time, allocated memory and device memory of the peers."""
    theirs = {n: r for n, r in found.items() if not n.startswith("ours")}
    if not theirs:
        return
    fast, lean, device = (min(theirs, key=lambda n: theirs[n][i]) for i in range(3))
    row(stage, f"{size} peers", None, f"fastest: {fast}; leanest: {lean}; on the device: {device}", size=size)
    for name, (ms, allocated, used) in found.items():
        if name not in theirs:
            time, memory, total = ms / theirs[fast][0], allocated / theirs[lean][1], used / theirs[device][2]
            row(stage, f"{size} ratio, {name}", None, f"{time:.3f} of the time, {memory:.3f} of the memory, {total:.3f} on the device",
                size=size, time_ratio=time, memory_ratio=memory, device_ratio=total)


def floor():
    """Runs all matmul and attention kernels of a step back to back, on all GPUs at once, until power and clocks settle."""
    seconds = float(os.environ.get("FLOOR_SECONDS", "30"))
    configs = [{"size": s, "B": ROWS[s].batch, "T": ROWS[s].length, "seconds": seconds} for s in sizes()]
    results, why = torchrun("floor.py", gpus(), configs, 40 + (seconds + 20) * len(configs))
    best = {}
    for line in (OUT / "rows.jsonl").read_text().splitlines() if (OUT / "rows.jsonl").exists() else ():
        r = json.loads(line)
        if r["stage"] == "speed" and r.get("name", "").startswith("ours"):
            best[r["size"]] = min(r["step_ms"], best.get(r["size"], r["step_ms"]))
    for size, r in zip(sizes(), results):
        loop = r["loop_ms"]
        ours = f", the best of ours at {best[size] / loop:.3f} of it" if size in best else ""
        row("floor", size, None, f"{loop:.1f} ms in the loop, {r['first_ms']:.1f} in its first steps, {r['alone_ms']:.1f} alone; {r['mhz']} MHz, {r['watts']} W, {r['attention']}{ours}", **r)
    if len(results) < len(configs):
        row("floor", "floor.py", False, why[:160])
