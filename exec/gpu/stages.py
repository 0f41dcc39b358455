"""Runs the stages of run.sh, which README.md in this folder describes."""
import sys, time
from pathlib import Path
import tools
from tools import left, row, rows
import convergence, correct, measure, speed, varied

STAGES = {f.__name__: f for f in (correct.modes, correct.hangs, correct.goldens, correct.small, correct.sharding, correct.moe, correct.float8, correct.tensor_parallel, speed.speed, speed.experts, speed.float8_speed, speed.floor, measure.calibrate, measure.fidelity, measure.moe_fidelity,
                                  measure.acceptance, measure.options, measure.table, correct.bits, correct.delays, correct.checkpoint, correct.band, correct.sanitize,
                                  convergence.convergence, varied.varied)}
SETS = {"first": ["modes", "goldens", "small", "speed"], "second": ["calibrate", "fidelity", "bits", "delays", "tensor_parallel"],
        "third": ["hangs", "checkpoint", "band", "sanitize"], "fp8": ["float8", "float8_speed"]}


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: run.sh BINARY [STAGE...]")
    tools.binary = str(Path(sys.argv[1]).resolve())
    wanted = [s for name in sys.argv[2:] or STAGES for s in SETS.get(name, [name])]
    for name in wanted:
        if name not in STAGES:
            sys.exit(f"no stage {name}; there are {', '.join([*STAGES, *SETS])}")
    if not Path(tools.binary).is_file():
        sys.exit(f"no binary {tools.binary}")
    seconds = {}
    for name in wanted:
        begin = time.time()
        if left() < 5:
            row(name, "not begun", False, tools.NO_TIME)
            continue
        try:
            STAGES[name]()
        except Exception as e:  # noqa: BLE001
            row(name, "script", False, repr(e)[:200])
        seconds[name] = time.time() - begin
    print("\n== " + ", ".join(f"{n} {s:.0f} s" for n, s in seconds.items()) + f"; {left():.0f} s left")
    for name in wanted:
        mine = [r for r in rows if r[0] == name]
        judged = [r for r in mine if r[2] is not None]
        if judged:
            print(f"== {name:<10} {sum(r[2] for r in judged)} of {len(judged)} ok")
        for r in mine:
            if name in ("speed", "experts", "float8_speed", "floor") and r[2] is None or r[1].endswith("variants"):
                print(f"   {r[1]:<44} {r[3]}")
    wrong = [f"{s} {c}" for s, c, ok, _ in rows if ok is False]
    if wrong:
        print("wrong: " + "; ".join(wrong))
        sys.exit(1)


main()
