#!/usr/bin/env python3
"""Compares the criterion benches of this tree with those of a revision.

    benches/ratio.py [REVISION] [--rounds N] [--seconds S] [--bench CRATE:NAME]...

Builds both (the revision in a temporary work tree), then runs them in turns, and prints the time of each
bench in its fastest round and the ratio of these times. Only a bench that does not build or run is an
error; slower benches are not. Two runs of one binary differ by several percent on a busy machine, so only
trust ratios that repeat. The default revision is HEAD if the tree has changes, else its parent.
"""
import argparse, json, os, re, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ["shardlab-plan:plan", "shardlab-sim:engine"]
UNITS = {"ps": 1e-9, "ns": 1e-6, "µs": 1e-3, "us": 1e-3, "ms": 1.0, "s": 1e3}
# criterion prints a long name on a separate line.
RESULT = re.compile(r"^(\S.*?)\s+time:\s+\[\S+ \S+ (\S+) (\S+) \S+ \S+\]", re.MULTILINE)


def git(*args):
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)


def build(tree, benches):
    """Builds the benches of a tree and returns their executables and folders by name. Both trees share a target folder, so dependencies are built once."""
    wanted = [x for b in benches for x in ("-p", b.split(":")[0], "--bench", b.split(":")[1])]
    command = ["cargo", "bench", "--no-run", "--quiet", "--message-format=json", *wanted]
    run = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, env={**os.environ, "CARGO_TARGET_DIR": str(target())})
    if run.returncode:
        sys.exit(f"error: the benches of {tree} do not build")
    found = {}
    for line in run.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and "bench" in message["target"]["kind"]:
            found[message["target"]["name"]] = (message["executable"], Path(message["manifest_path"]).parent)
    return found


def target():
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def measure(executables, seconds):
    """Runs the benches and returns the milliseconds of each."""
    times = {}
    for executable, folder in executables.values():
        run = subprocess.run([executable, "--bench", "--noplot", "--warm-up-time", str(seconds / 3), "--measurement-time", str(seconds)],
                             cwd=folder, capture_output=True, text=True, env={**os.environ, "CRITERION_HOME": str(target() / "ratio")})
        if run.returncode:
            sys.exit(f"error: {executable} failed:\n{run.stderr[-2000:]}")
        text = re.sub(r"\n\s+time:", " time:", run.stdout)
        for name, value, unit in RESULT.findall(text):
            times[name] = float(value) * UNITS[unit]
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each bench in each round")
    parser.add_argument("--bench", action="append", metavar="CRATE:NAME", help=f"default: {', '.join(BENCHES)}")
    args = parser.parse_args()
    benches = args.bench or BENCHES
    revision = args.revision or ("HEAD" if git("status", "--porcelain").stdout.strip() else "HEAD^")
    found = git("rev-parse", "--short", "--verify", "--quiet", f"{revision}^{{commit}}").stdout.strip()
    if not found:
        if args.revision:
            sys.exit(f"error: no revision {revision}")
        print("no previous revision is here (a shallow clone?): no ratios")
        return
    with tempfile.TemporaryDirectory(prefix="shardlab-bench-") as folder:
        tree = Path(folder) / "tree"
        made = git("worktree", "add", "--detach", "--quiet", str(tree), found)
        if made.returncode:
            sys.exit(f"error: {made.stderr.strip()}")
        try:
            old, new = build(tree, benches), build(ROOT, benches)
            rounds = {"old": [], "new": []}
            for _ in range(args.rounds):
                rounds["old"].append(measure(old, args.seconds))
                rounds["new"].append(measure(new, args.seconds))
        finally:
            git("worktree", "remove", "--force", str(tree))
    report(found, rounds)


def report(revision, rounds):
    names = list(dict.fromkeys(name for side in rounds.values() for times in side for name in times))
    width = max(map(len, names), default=5)
    print(f"{'bench':<{width}}  {revision:>12}     this tree  ratio")
    for name in names:
        old, new = ([t[name] for t in side if name in t] for side in rounds.values())
        if not old or not new:
            print(f"{name:<{width}}  only in {'this tree' if new else revision}")
            continue
        a, b = min(old), min(new)
        print(f"{name:<{width}}  {a:>9.4f} ms  {b:>9.4f} ms  {b / a:5.2f}{'  slower' if b > 1.05 * a else ''}")


main()
