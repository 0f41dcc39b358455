"""Stages of run.sh. Each checks or measures one thing, prints a line a case and leaves the rest in $OUT."""
import json, math, os, shutil, subprocess, sys, tempfile, time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = Path(os.environ.get("OUT", "gpu-out")).resolve()
BINARY = None
FAILED = []


def gpus():
    if "GPUS" in os.environ:
        return int(os.environ["GPUS"])
    r = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return max(1, r.stdout.count("GPU "))


def shardlab(*args, timeout=300, env=None, prefix=()):
    """A call: exit status, its JSON where it printed any, what it said, seconds."""
    begin = time.time()
    try:
        r = subprocess.run([*prefix, BINARY, *map(str, args)], capture_output=True, text=True, timeout=timeout,
                           cwd=ROOT, env={**os.environ, **(env or {})})
        code, out, err = r.returncode, r.stdout, r.stderr
    except subprocess.TimeoutExpired as e:
        code, out, err = 124, "", f"no end after {timeout} s\n{(e.stderr or b'').decode()[-2000:]}"
    try:
        value = json.loads(out)
    except ValueError:
        value = None
    with open(OUT / "log.txt", "a") as log:
        log.write(f"$ {' '.join(map(str, args))}\n{err}\n")
    return code, value, err if value else err + out, time.time() - begin


def train(scenario, *args, device="cuda", sets=(), **more):
    flags = [x for s in sets for x in ("--set", s)]
    where = ["--device", device] if device == "cuda" else []
    return shardlab("exec", scenario, "--json", *where, *flags, *args, **more)


def say(stage, case, ok, text):
    print(f"{stage:<10} {case:<44} {'ok  ' if ok else 'FAIL'} {text}", flush=True)
    if not ok:
        FAILED.append((stage, case))


def last_line(err):
    lines = [l for l in err.strip().splitlines() if l.strip()]
    errors = [l for l in lines if "error" in l]
    return (errors or lines or ["?"])[0][:300]


def worst(a, b):
    """Largest relative difference of two lists of numbers."""
    if len(a) != len(b):
        return math.inf
    return max((abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a, b)), default=0.0)


def fit(world):
    """Overrides that make a scenario's mesh fit the GPUs that are here."""
    return [f"mesh.dp_shard={world}", "mesh.dp_outer=1"]


def goldens():
    """torch's float32 runs, TF32 off: within 1e-3."""
    for name in ("llama-tiny", "gpt2-tiny"):
        folder = ROOT / "tests/goldens" / name
        theirs = json.loads((folder / "reference.json").read_text())
        for world in sorted({1, min(2, gpus())}):
            # The reference's batch, whatever the number of ranks.
            sets = [*fit(world), f"train.micro_batch={8 // world}"]
            code, run, err, s = train(name, "--init", folder, "--data", folder / "tokens.bin", sets=sets)
            case = f"{name} on {world}"
            if code:
                say("goldens", case, False, last_line(err))
                continue
            losses = worst(run["losses"], theirs["losses"])
            norms = worst(run["grad_norms"], theirs["grad_norms"])
            final = [(run["final_norms"][k], v) for k, v in theirs["final_norms"].items()]
            weights = max(abs(a - b) / max(b, 1e-3) for a, b in final)
            ok = max(losses, norms, weights) < 1e-3
            say("goldens", case, ok, f"losses {losses:.1e}, gradient norms {norms:.1e}, weights {weights:.1e}, {s:.1f} s")


SMALL = ["small-native", "small-fsdp2", "small-megatron", "small-regions", "small-blocks", "small-full", "small-scopes", "small-iteration",
         "small-recompute", "small-selective", "small-accumulation", "small-double-buffer", "small-units", "small-frozen",
         "small-zero1", "small-zero2", "small-ddp", "small-gpt2", "small-encoder", "small-linear", "small-cnn", "small-offload"]


def small():
    """Every option's small scenario against the CPU device, float32 and the scenario's own types."""
    only = os.environ.get("ONLY", "").split(",") if os.environ.get("ONLY") else SMALL
    world = gpus()
    for name in only:
        for dtype, limit in (("f32", 1e-3), ("bf16", 3e-2)):
            sets = [*fit(world), f'precision.compute="{dtype}"']
            code, gpu, err, s = train(name, "--check-nan", sets=sets, timeout=120)
            if code:
                say("small", f"{name} {dtype}", False, last_line(err))
                continue
            code, cpu, err, _ = train(name, device="cpu", sets=sets)
            if code:
                say("small", f"{name} {dtype} on the CPU", False, last_line(err))
                continue
            losses, norms = worst(gpu["losses"], cpu["losses"]), worst(gpu["grad_norms"], cpu["grad_norms"])
            ok = losses < limit and norms < 3 * limit
            ok &= gpu["memory"]["peak_allocated_bytes"] == cpu["memory"]["peak_allocated_bytes"]
            say("small", f"{name} {dtype}", ok, f"losses {losses:.1e}, gradient norms {norms:.1e}, {s:.1f} s")


SAME = {
    "prefetch 0": ["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
    "prefetch 3": ["fsdp.prefetch_forward=3", "fsdp.prefetch_backward=3"],
    "one reduction in flight": ["fsdp.reduce_in_flight=1"],
    "caching allocator": ['fsdp.allocator="caching"'],
    "captured scopes": ['compile.cuda_graph=["attn", "mlp"]'],
    "captured iteration": ['compile.cuda_graph="full_iteration"'],
}


def bits():
    """Losses and weights are the same to the bit whatever the schedule is, and from run to run."""
    base = [*fit(gpus())]
    same_as(base, "bits", {"again": ([], []), **{k: (v, []) for k, v in SAME.items()}, "without graphs": (SAME["captured iteration"], ["--no-graphs"])})


def same_as(base, stage, cases):
    code, first, err, _ = train("small-native", "--steps", 10, sets=base)
    if code:
        return say(stage, "small-native", False, last_line(err))
    for case, (sets, flags) in cases.items():
        code, run, err, s = train("small-native", "--steps", 10, *flags, sets=[*base, *sets])
        if code:
            say(stage, case, False, last_line(err))
            continue
        ok = all(run[k] == first[k] for k in ("losses", "final_norms"))
        say(stage, case, ok, f"loss {run['losses'][-1]!r} and {first['losses'][-1]!r}, {s:.1f} s")


def delays():
    """Random instructions held up: the same bits."""
    cases = {f"seed {s}": ([], ["--delays", s]) for s in (1, 2, 3)}
    cases["seed 4, captured scopes"] = (SAME["captured scopes"], ["--delays", 4])
    same_as([*fit(gpus())], "delays", cases)


def sanitize():
    """compute-sanitizer finds nothing in two steps."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for kind in ("memcheck", "racecheck"):
        code, run, err, s = train("small-native", "--steps", 2, sets=fit(1), timeout=400,
                                  prefix=(tool, "--tool", kind, "--error-exitcode", "9"))
        (OUT / f"sanitize-{kind}.txt").write_text(err)
        summary = [l for l in err.splitlines() if "SUMMARY" in l]
        say("sanitize", kind, code == 0, f"{(summary or [last_line(err)])[-1][:160]}, {s:.0f} s")


def checkpoint():
    """A run that changes the device half way goes on as if it had not, within float32."""
    sets = [*fit(gpus()), 'precision.compute="f32"']
    code, whole, err, _ = train("small-native", "--steps", 8, device="cpu", sets=sets)
    if code:
        return say("checkpoint", "whole run", False, last_line(err))
    for first, second in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        with tempfile.TemporaryDirectory() as d:
            for device, steps in ((first, 4), (second, 8)):
                code, run, err, _ = train("small-native", "--steps", steps, "--checkpoint-dir", d, device=device, sets=sets)
                if code:
                    break
            if code:
                say("checkpoint", f"{first} to {second}", False, last_line(err))
                continue
            difference = worst(run["losses"], whole["losses"])
            say("checkpoint", f"{first} to {second}", difference < 1e-3, f"losses {difference:.1e}")


def band():
    """bf16 on the GPU against float32 on the CPU over 200 steps: within 2 %, smoothed."""
    sets = [*fit(gpus()), "train.steps=200"]
    code, cpu, err, _ = train("llama-tiny", device="cpu", sets=[*sets, 'precision.compute="f32"'], timeout=500)
    if code:
        return say("band", "cpu", False, last_line(err))
    code, gpu, err, s = train("llama-tiny", sets=[*sets, 'precision.compute="bf16"'])
    if code:
        return say("band", "gpu", False, last_line(err))
    smooth = lambda l: [sum(l[max(0, i - 9):i + 1]) / len(l[max(0, i - 9):i + 1]) for i in range(len(l))]
    difference = worst(smooth(gpu["losses"]), smooth(cpu["losses"]))
    say("band", "llama-tiny bf16", difference < 0.02, f"{difference:.2%}, last {gpu['losses'][-1]:.4f} and {cpu['losses'][-1]:.4f}, {s:.1f} s")


# Rows of the comparison: size of peer.py, micro-batch, sequence length; our scenario and what makes it the same work.
ROWS = {
    "1b": (2, 4096, "peers-1b", []),
    "3b": (2, 4096, "peers-3b", ["train.micro_batch=2"]),
    "8b": (1, 8192, "peers-8b", ['train.recompute="none"']),
}
NATIVE = ['fsdp.policy="native"']
OURS = {
    "ours eager": NATIVE,
    "ours compiled": [*NATIVE, 'compile.mode="regions"'],
    "ours compiled, chunked loss": [*NATIVE, 'compile.mode="regions"', 'train.loss="chunked"'],
    "ours captured": [*NATIVE, 'compile.mode="regions"', 'train.loss="chunked"', 'compile.cuda_graph="full_iteration"'],
}
PEERS = {
    "fsdp2 eager": {"engine": "fsdp2"},
    "fsdp2 compiled": {"engine": "fsdp2", "compile": "layer"},
    "megatron-fsdp eager": {"engine": "mfsdp"},
    "megatron-fsdp compiled": {"engine": "mfsdp", "compile": "layer"},
}


def peer(world, size, batch, length, config):
    """One configuration of peer.py in processes of its own."""
    file = OUT / "peer.json"
    file.write_text(json.dumps([{"size": size, "B": batch, "T": length, **config}]))
    command = ["torchrun", f"--nproc-per-node={world}", "--master-port", str(20000 + os.getpid() % 20000),
               str(HERE / "peers/peer.py"), str(file)]
    env = dict(os.environ)
    if os.environ.get("PEER_PYTHONPATH"):
        env["PYTHONPATH"] = os.environ["PEER_PYTHONPATH"]
    try:
        r = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return None, "no end after 240 s"
    with open(OUT / "log.txt", "a") as log:
        log.write(f"$ {' '.join(command)}\n{r.stdout}\n{r.stderr[-4000:]}\n")
    found = [l.split("RESULT ", 1)[1] for l in r.stdout.splitlines() if "RESULT " in l]
    return (json.loads(found[0]), "") if found else (None, last_line(r.stderr))


def speed():
    """Ours beside the peers: step time and memory of the same work on the same machine."""
    world = gpus()
    rows = os.environ.get("ROWS", ",".join(ROWS)).split(",")
    out = open(OUT / "speed.jsonl", "a")
    for size in rows:
        batch, length, scenario, extra = ROWS[size]
        best = math.inf
        table = {}
        if os.environ.get("PEERS", "1") != "0":
            for name, config in PEERS.items():
                r, why = peer(world, size, batch, length, config)
                if r is None:
                    print(f"speed      {size} {name:<32} {why[:120]}", flush=True)
                    continue
                table[name] = (r["step_ms"], r["peak_alloc_mib"], r["device_used_mib"])
                best = min(best, r["step_ms"])
        for name, sets in OURS.items():
            trace = OUT / f"trace-{size}-{name.split()[-1]}.json"
            code, run, err, s = train(scenario, "--steps", 12, "--no-grad-norms", "--trace", trace,
                                      sets=[*fit(world), *extra, *sets], timeout=240)
            if code:
                print(f"speed      {size} {name:<32} {last_line(err)[:160]}", flush=True)
                continue
            m = run["memory"]
            table[name] = (run["step_ms"]["median"], m["peak_allocated_bytes"] / 2**20, m["peak_device_bytes"] / 2**20)
            (OUT / f"run-{size}-{name.replace(' ', '-').replace(',', '')}.json").write_text(json.dumps(run))
        for name, (ms, allocated, device) in table.items():
            ratio = f"{ms / best:.3f}" if best < math.inf else ""
            print(f"speed      {size} {name:<32} {ms:9.2f} ms  {allocated:10.1f} MiB allocated {device:10.1f} MiB device  {ratio}", flush=True)
            out.write(json.dumps({"size": size, "gpus": world, "name": name, "step_ms": ms, "allocated_mib": allocated, "device_mib": device}) + "\n")


def variants():
    """Scenarios that nothing was calibrated on: models, lengths, strategies, prefetch, compile, graphs."""
    small = ["train.steps=8"]
    tiny = [*small, *NATIVE]
    for base in ("peers-tiny", "peers-1b"):
        for sets in ([], ["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"], ["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"],
                     ["fsdp.reshard_after_forward=false"], ['compile.mode="regions"'], ['compile.mode="regions"', 'train.loss="chunked"'],
                     ['train.recompute="full"'], ['compile.mode="regions"', 'compile.cuda_graph="full_iteration"']):
            yield base, [*tiny, *sets]
    for length in (1024, 3072):
        yield "peers-1b", [*tiny, f"train.seq_len={length}", f"model.max_seq_len={length}"]
    for strategy in ("optim", "optim_grads"):
        yield "peers-tiny", [*tiny, f'fsdp.strategy="{strategy}"']
    yield "peers-1b", [*tiny, "model.layers=24", "model.hidden=1536", "model.heads=12", "model.kv_heads=4", "model.ffn=4096"]
    yield "peers-1b", [*tiny, "train.grad_accum=2"]
    for policy in ("fsdp2", "megatron"):
        yield "peers-tiny", [*small, f'fsdp.policy="{policy}"']
        yield "peers-1b", [*small, f'fsdp.policy="{policy}"']


def fidelity():
    """Predictions against measurements of the same programs, on 2 GPUs and on all."""
    profile = os.environ.get("PROFILE", "h200-nvlink")
    errors, memory, exposed = [], [], []
    rows = open(OUT / "fidelity.jsonl", "a")
    worlds = [w for w in (2, 4, 8) if w <= gpus()] or [1]
    for world in worlds:
        for scenario, sets in variants():
            sets = [*fit(world), f'mesh.hardware="{profile}"', *sets]
            flags = [x for s in sets for x in ("--set", s)]
            code, sim, err, _ = shardlab("sim", scenario, "--json", *flags)
            code2, run, err2, s = train(scenario, "--no-grad-norms", sets=sets, timeout=120) if code == 0 else (code, None, err, 0)
            case = f"{scenario} {world}: " + ", ".join(x.split(".", 1)[-1] for x in sets[3:] if "steps" not in x)
            if code or code2:
                print(f"fidelity   {case[:70]:<70} {last_line(err if code else err2)[:120]}", flush=True)
                continue
            a, b = sim["step_ms"]["median"], run["step_ms"]["median"]
            ea = abs(sim["exposed_ms"]["total"] - run["exposed_ms"]["total"]) / b
            ma = sim["memory"]["peak_allocated_bytes"] == run["memory"]["peak_allocated_bytes"]
            md = sim["memory"]["peak_device_bytes"] / run["memory"]["peak_device_bytes"] - 1
            errors.append(abs(a / b - 1)); memory.append(abs(md)); exposed.append(ea)
            print(f"fidelity   {case[:70]:<70} {b:8.2f} ms, predicted {a:8.2f} ({a / b - 1:+.1%}), exposed off by {ea:.1%} of the step, engine memory {'equal' if ma else 'DIFFERS'}, device {md:+.1%}", flush=True)
            rows.write(json.dumps({"scenario": scenario, "sets": sets, "world": world, "measured_ms": b, "predicted_ms": a, "exposed": ea, "engine_equal": ma, "device": md}) + "\n")
    if errors:
        mid = lambda l: sorted(l)[len(l) // 2]
        print(f"fidelity   {len(errors)} variants: step time off by {mid(errors):.1%} (median), {max(errors):.1%} (worst); exposed {mid(exposed):.1%}, {max(exposed):.1%}; device memory {mid(memory):.1%}, {max(memory):.1%}")


def calibrate():
    """The hardware profile of this machine."""
    file = OUT / "calibrated.toml"
    code, _, err, s = shardlab("calibrate", "--device", "cuda", "--ranks", gpus(), "--seconds", os.environ.get("SECONDS_", "240"), "--out", file, timeout=560)
    say("calibrate", str(file), code == 0, f"{s:.0f} s" if code == 0 else last_line(err))


STAGES = {f.__name__: f for f in (goldens, small, bits, delays, sanitize, checkpoint, band, calibrate, speed, fidelity)}


def main():
    global BINARY
    if len(sys.argv) < 2:
        sys.exit("usage: run.sh BINARY [STAGE...]")
    BINARY = str(Path(sys.argv[1]).resolve())
    for name in sys.argv[2:] or STAGES:
        if name not in STAGES:
            sys.exit(f"no stage {name}; there are {', '.join(STAGES)}")
        begin = time.time()
        STAGES[name]()
        print(f"{name}: {time.time() - begin:.0f} s", flush=True)
    if FAILED:
        print("wrong: " + "; ".join(f"{s} {c}" for s, c in FAILED))
        sys.exit(1)


main()
