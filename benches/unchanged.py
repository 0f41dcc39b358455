#!/usr/bin/env python3
"""Checks that a refactoring changes no prediction, program or loss.

    benches/unchanged.py record BINARY FACTS     write the predictions and results of this binary
    benches/unchanged.py compare FACTS BINARY    compare those of another binary with them

Covers every shipped scenario and CASES (default 400) random ones of `exec/gpu/varied.py`. Predicted times and memory,
the number of instructions of every section, and on small CPU scenarios the losses, gradient norms and memory of two steps
must be exactly equal. Program digests are not compared, because they change with texts in programs. Exits with status 1
if anything differs.
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
# CPU scenarios with fewer parameters are trained.
TRAINED = 2_000_000
STEPS = 2
TIMES = ["step_ms", "tokens_per_s_per_gpu", "mfu", "host_ms", "collectives", "exposed_ms", "measured_cost_share", "modelled_ms"]
MEMORY = ["memory", "memory_by_unit", "fits"]


def call(binary, *args):
    """Runs the binary. Returns its exit status, its JSON output, and standard error."""
    environment = {**os.environ, "SHARDLAB_STORE": "off", "NO_COLOR": "1"}
    run = subprocess.run([binary, *map(str, args)], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    found = json.loads(run.stdout) if run.returncode == 0 else None
    return run.returncode, found, run.stderr


def facts(binary, scenario, trained):
    """Returns the facts of a scenario that are compared."""
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
    """Yields scenarios: the name, the argument for `sim`, and whether it is small enough to train."""
    listed = subprocess.run([binary, "scenarios", "--json"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        one = json.loads(line)
        small = one["hardware"] == "cpu" and one.get("parameters", TRAINED) < TRAINED
        yield one["name"], one["name"], small
    for number in range(CASES):
        path = folder / f"random-{number}.toml"
        keys = dict(zip(("what", "how"), varied.case(number)))
        # Removes keys that this family or policy does not support, as in `varied`.
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
    """Yields the paths at which two facts differ, with both values."""
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
    # Ignores scenarios that were added since.
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
