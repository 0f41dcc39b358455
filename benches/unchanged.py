#!/usr/bin/env python3
"""Shows that a change of the code's structure changes no prediction, no program and no loss.

    benches/unchanged.py record BINARY FACTS     write what this binary predicts and computes
    benches/unchanged.py compare FACTS BINARY    compare another binary with it

Covers every shipped scenario and CASES (default 400) random ones of `exec/gpu/varied.py`: predicted times and memory
exactly, the number of instructions of every section, and on small CPU scenarios the losses, gradient norms and memory of
two steps, to the bit. Program digests are not compared: they change with the words in programs. Exits with status 1 if
anything differs.
"""
import gzip, json, os, subprocess, sys, tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "exec" / "gpu"))
os.environ.setdefault("DEVICE", "cpu")
import varied

CASES = int(os.environ.get("CASES", "400"))
# Parameters up to which a CPU scenario is trained.
TRAINED = 2_000_000
STEPS = 2
TIMES = ["step_ms", "tokens_per_s_per_gpu", "mfu", "host_ms", "collectives", "exposed_ms", "measured_cost_share", "modelled_ms"]
MEMORY = ["memory", "memory_by_unit", "fits"]


def call(binary, *args):
    """Exit status, the JSON of standard output, and standard error."""
    environment = {**os.environ, "SHARDLAB_STORE": "off", "NO_COLOR": "1"}
    run = subprocess.run([binary, *map(str, args)], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    found = json.loads(run.stdout) if run.returncode == 0 else None
    return run.returncode, found, run.stderr


def facts(binary, scenario, trained):
    """What is compared of a scenario."""
    code, sim, error = call(binary, "sim", scenario, "--json")
    if code:
        return {"refused": code}
    _, plan, _ = call(binary, "plan", scenario, "--json")
    found = {key: sim.get(key) for key in TIMES + MEMORY}
    found["instructions"] = dict(Counter(i["section"] for i in plan["instructions"]))
    found["units"] = plan["units"]
    if trained:
        code, run, error = call(binary, "exec", scenario, "--steps", STEPS, "--json", "--progress", "none", "--no-store")
        if code:
            found["exec"] = error
        else:
            found["exec"] = {key: run[key] for key in ("losses", "grad_norms")}
            memory = run["memory"]
            found["exec"]["memory"] = {key: memory[key] for key in ("peak_allocated_bytes", "peak_reserved_bytes", "by_role")}
    return found


def scenarios(binary, folder):
    """Names, what `sim` takes, and whether it is small enough to train."""
    listed = subprocess.run([binary, "scenarios", "--json"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        one = json.loads(line)
        small = one["hardware"] == "cpu" and one.get("parameters", TRAINED) < TRAINED
        yield one["name"], one["name"], small
    for number in range(CASES):
        path = folder / f"random-{number}.toml"
        keys = dict(zip(("what", "how"), varied.case(number)))
        # Keys that this family or policy does not have go, as in `varied`.
        while True:
            varied.write(path, {**keys["what"], **keys["how"]})
            code, _, error = call(binary, "plan", path, "--json")
            guilty = varied.culprit(error, path, keys["how"]) if code == 2 else None
            if guilty is None:
                break
            del keys["how"][guilty]
        yield path.name, path, code == 0


def collect(binary):
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(name, pool.submit(facts, binary, scenario, trained)) for name, scenario, trained in scenarios(binary, Path(folder))]
        return {name: job.result() for name, job in jobs}


def differences(before, after, at=""):
    """Paths at which two facts differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{at}.{key}")
    elif before != after:
        yield f"{at[1:]}: {before} -> {after}"


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ("record", "compare"):
        sys.exit(__doc__)
    verb, first, second = sys.argv[1:]
    if verb == "record":
        found = collect(str(Path(first).resolve()))
        with gzip.open(second, "wt") as to:
            json.dump(found, to)
        print(f"{len(found)} scenarios recorded in {second}")
        return
    with gzip.open(first, "rt") as file:
        before = json.load(file)
    after = collect(str(Path(second).resolve()))
    # Scenarios that were added since prove nothing.
    changed = {name: list(differences(before[name], after.get(name, {}))) for name in before}
    changed = {name: found for name, found in changed.items() if found}
    for name, found in changed.items():
        print(f"{name}: {len(found)} differences")
        for line in found[:5]:
            print(f"  {line[:200]}")
    trained = sum("exec" in facts for facts in before.values())
    print(f"{len(before)} scenarios, {trained} of them trained: {len(changed)} differ")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
