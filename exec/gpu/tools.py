"""Functions that stages share: processes with time limits, rows of results, and the devices of this call."""
import json, os, signal, subprocess, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = Path(os.environ.get("OUT", "gpu-out")).resolve()
DEVICE = os.environ.get("DEVICE", "cuda")
END = time.time() + float(os.environ.get("BUDGET", "570"))
CPU = DEVICE == "cpu"
# Whether ranks share GPUs, to run several ranks on fewer GPUs.
SHARED = os.environ.get("SHARED") == "1" and not CPU
# The message of a case that the end of the call interrupts. Such a case counts as neither right nor wrong.
NO_TIME = "no time is left in this call"
binary = None
rows = []
lock = threading.Lock()


def gpus():
    if "GPUS" in os.environ:
        return int(os.environ["GPUS"])
    if CPU:
        return 4
    if SHARED:
        return 2
    r = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return max(1, r.stdout.count("GPU "))


def left():
    return END - time.time()


def descendants(pid):
    """Returns the ids of all direct and indirect children of a process."""
    children = {}
    for d in os.listdir("/proc"):
        if d.isdigit():
            try:
                text = Path("/proc", d, "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(text.rsplit(")", 1)[1].split()[1]), []).append(int(d))
    found, todo = [], [pid]
    while todo:
        for c in children.get(todo.pop(), []):
            found.append(c)
            todo.append(c)
    return found


def end(process):
    """Ends a process and all its descendants."""
    doomed = [process.pid, *descendants(process.pid)]
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        pass
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def call(command, timeout, env=None, name="call"):
    """Runs a command. Returns its exit status (124: it exceeded `timeout`; 125: no time was left in this call), stdout, stderr and seconds."""
    begin = time.time()
    limit = min(timeout, left())
    if limit < 2:
        return 125, "", NO_TIME, 0.0
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               env={**os.environ, **(env or {})}, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        out, err = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        code, err = 124, f"error: no end after {limit:.0f} s\n{err}"
    with lock, open(OUT / "log.txt", "a") as log:
        log.write(f"$ {' '.join(map(str, command))}\n{err[-6000:]}\n-- {name}: {code}, {time.time() - begin:.1f} s\n")
    if code == 124 and limit < timeout:
        # The time of the whole call ended it, not its own limit.
        code, err = 125, NO_TIME
    return code, out, err, time.time() - begin


def shardlab(*args, timeout=120, env=None, prefix=()):
    """Runs the binary. Returns its exit status, its JSON output or None, its messages, and seconds."""
    code, out, err, s = call([*prefix, binary, *args], timeout, env)
    try:
        value = json.loads(out)
    except ValueError:
        value = None
    return code, value, err if value else err + out, s


def on_device():
    """Returns the arguments that run several ranks on the GPUs of this call."""
    return ["--device", "cuda", *(["--share-gpu"] if SHARED else [])]


def train(scenario, *args, device=None, sets=(), visible=None, **more):
    """Runs `shardlab exec` on the device of this call, or on `device`; `visible` selects GPUs."""
    device = device or DEVICE
    flags = [x for s in sets for x in ("--set", s)]
    where = on_device() if device == "cuda" else []
    if CPU and device == "cpu" and more.pop("spread", True):
        # A rehearsal runs one process per rank, as on GPUs.
        where = [] if "--one-process" in args else ["--processes"]
    args = [a for a in args if not (CPU and a in ("--one-process", "--processes"))]
    more.pop("spread", None)
    env = dict(more.pop("env", None) or {})
    if visible and not CPU:
        env["CUDA_VISIBLE_DEVICES"] = visible
    return shardlab("exec", scenario, "--json", "--no-store", *where, *flags, *args, env=env, **more)


def reference(scenario, *args, **more):
    """Runs `shardlab exec` on the CPU device, with ranks as threads."""
    return train(scenario, *args, device="cpu", spread=False, **more)


def row(stage, case, ok, text, **facts):
    """Prints a line and appends an object to `rows.jsonl`. `ok` is None for rows that only measure."""
    if text.startswith(NO_TIME):
        ok = None
    word = {True: "ok", False: "FAIL", None: ""}[ok]
    with lock:
        print(f"{stage:<10} {case:<52.52} {word:<4} {text}", flush=True)
        rows.append((stage, case, ok, text))
        with open(OUT / "rows.jsonl", "a") as f:
            f.write(json.dumps({"stage": stage, "case": case, "ok": ok, "text": text, "gpus": gpus(), "device": DEVICE, **facts}) + "\n")


def last_line(err):
    lines = [l for l in err.strip().splitlines() if l.strip()]
    errors = [l for l in lines if "error" in l.lower()]
    return (errors or lines or ["?"])[0][:300]


def together(jobs, at_once):
    """Runs independent cases, `at_once` at a time. An exception in one prints a row and does not stop the others."""
    def safely(job):
        try:
            job()
        except Exception as e:  # noqa: BLE001
            row("script", getattr(job, "__name__", "case"), False, repr(e)[:200])
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(safely, jobs))


def fit(world):
    """Returns overrides that fit the mesh of a scenario to `world` GPUs."""
    return [f"mesh.dp_shard={world}", "mesh.dp_outer=1"]


def worst(a, b):
    """Returns the largest relative difference between two lists of numbers. Entries that are None in both count as equal."""
    if [x is None for x in a] != [x is None for x in b]:
        return float("inf")
    a, b = ([x for x in l if x is not None] for l in (a, b))
    return max((abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a, b)), default=0.0)


def chosen(names):
    """Returns the names that the variable RUNS lists, or all if it is not set."""
    wanted = os.environ.get("RUNS")
    return [n for n in names if not wanted or n in wanted.split(";")]
