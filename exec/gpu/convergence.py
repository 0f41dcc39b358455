"""The stage that compares loss curves of our engine and of FSDP2, from the same weights on the same samples, in bf16 and in 8 bits."""
import array, os, re, sysconfig, tempfile
from collections import Counter
from pathlib import Path
from keys import BEST, CHUNKED, FUSED, NATIVE, REGIONS
from speed import TENSORWISE, torchrun
from tools import CPU, OUT, fit, gpus, last_line, row, train, worst

# Curves are compared as means over this many steps.
WINDOW = 20
STEPS = 40 if CPU else 300
# Steps after which runs in 8 bits are compared.
FLOAT8_STEPS = STEPS if CPU else 200
SEEDS = (1, 2)
LR, WARMUP, CLIP, BETAS, DECAY = 3e-4, 20, 1.0, [0.9, 0.95], 0.1
SCENARIO, BATCH, LENGTH, VOCAB = ("llama-tiny", 4, 64, 256) if CPU else ("peers-1b", 2, 4096, 128_256)
# Clipping needs reduced gradients, so the reduction is not fused into the optimizer.
SETS = [*([*NATIVE, REGIONS, CHUNKED] if CPU else [*BEST, FUSED]), f"train.micro_batch={BATCH}",
        f"train.lr={LR}", f"train.warmup_steps={WARMUP}", f"train.clip_norm={CLIP}", f"train.betas={BETAS}", f"train.weight_decay={DECAY}"]

FLOAT8 = [TENSORWISE, *(['precision.param_dtype="bf16"'] if CPU else [])]


def corpus(need):
    """Writes a file of at most `need` tokens, the Python sources of this machine in the order of their paths, and returns it with the number
    of tokens. A token is a word, a run of spaces or a character. The most frequent tokens have the smallest numbers, and all that exceed the
    vocabulary share the last number."""
    words = re.compile(r"[A-Za-z_]+|\d+|[ \t]+|\s|.", re.DOTALL)
    found = []
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            if len(found) >= need:
                break
            found += words.findall(path.read_text(errors="replace"))
    numbers = {word: min(i, VOCAB - 1) for i, (word, _) in enumerate(Counter(found).most_common())}
    file = OUT / "corpus.bin"
    file.write_bytes(array.array("I", (numbers[w] for w in found[:need])).tobytes())
    return file, len(found[:need])


def smooth(losses):
    """Returns moving averages over `WINDOW` steps, starting with the first full window."""
    return [sum(losses[i - WINDOW:i]) / WINDOW for i in range(WINDOW, len(losses) + 1)]


def ours(world, data, seed, sets=(), steps=STEPS):
    """Returns the loss of every step of our engine, or an error message."""
    code, run, err, s = train(SCENARIO, "--steps", steps, "--seed", seed, "--data", data, "--data-dtype", "uint32", "--no-grad-norms",
                              sets=[*fit(world), *SETS, *sets], timeout=150)
    return run["losses"] if code == 0 else last_line(err)


def weights(world, seed, folder):
    """Writes the initial weights of our run with this seed (a step with a learning rate of 0 does not change them). Returns an error, or None."""
    code, _, err, _ = train(SCENARIO, "--steps", 1, "--seed", seed, "--export", folder, sets=[*fit(world), *SETS, "train.lr=0"], timeout=120)
    return last_line(err) if code else None


def peer(world, data, folder, steps=STEPS, **more):
    """Returns the loss of every step under FSDP2, or an error message."""
    config = {"init": folder, "data": str(data), "steps": steps, "B": BATCH, "T": LENGTH, "warmup": WARMUP, "lr": LR, "clip": CLIP, "betas": BETAS,
              "weight_decay": DECAY, "dtype": "float32" if CPU else "bfloat16", "compile": not CPU, **more}
    results, why = torchrun("converge.py", world, [config], 200)
    return results[0]["losses"] if results else why


def convergence():
    """Checks that loss curves of a 1b model over 300 steps differ less between engines than between seeds."""
    world = 2 if CPU else gpus()
    data, tokens = corpus((STEPS + 1) * world * BATCH * (LENGTH + 1))
    row("convergence", "corpus", None, f"{tokens:,} tokens of Python sources", tokens=tokens)
    liger = {"loss": "liger"} if os.environ.get("PEER_PYTHONPATH") and not CPU else {}
    curves = {}

    def keep(name, found):
        if isinstance(found, str):
            return row("convergence", name, False, found[:160])
        curves[name] = smooth(found)
        row("convergence", name, None, f"loss {found[0]:.4f} to {curves[name][-1]:.4f} over the last {WINDOW} of {len(found)} steps", name=name, losses=found)

    for seed in SEEDS:
        keep(f"ours, seed {seed}", ours(world, data, seed))
        with tempfile.TemporaryDirectory() as folder:
            error = weights(world, seed, folder)
            if error:
                row("convergence", f"weights of seed {seed}", False, error)
                continue
            keep(f"fsdp2, seed {seed}", peer(world, data, folder, **liger))
            if seed == SEEDS[0]:
                keep("ours tensorwise", ours(world, data, seed, FLOAT8, FLOAT8_STEPS))
                if liger:
                    keep("fsdp2 tensorwise", peer(world, data, folder, FLOAT8_STEPS, float8="tensorwise", **liger))
    if not CPU:
        judge(curves)


def judge(curves):
    """Compares engines with the same seed, seeds with the same engine, and 8 bits with bf16."""
    spread = [worst(curves[f"{engine}, seed {SEEDS[0]}"], curves[f"{engine}, seed {SEEDS[1]}"])
              for engine in ("ours", "fsdp2") if all(f"{engine}, seed {s}" in curves for s in SEEDS)]
    for seed in SEEDS:
        a, b = (curves.get(f"{engine}, seed {seed}") for engine in ("ours", "fsdp2"))
        if a and b and spread:
            difference = worst(a, b)
            row("convergence", f"ours and fsdp2, seed {seed}", difference <= max(spread),
                f"{difference:.2%} apart where they differ most; two seeds {max(spread):.2%}", difference=difference, spread=max(spread))
    a, bf16, theirs = (curves.get(name) for name in ("ours tensorwise", f"ours, seed {SEEDS[0]}", "fsdp2 tensorwise"))
    if not a or not spread:
        return
    # Losses in 8 bits are compared at the end of the 8-bit runs. `seeds` is how much two seeds differ at that step.
    last = len(a) - 1
    seeds = max(abs(curves[f"{e}, seed {SEEDS[0]}"][last] / curves[f"{e}, seed {SEEDS[1]}"][last] - 1) for e in ("ours", "fsdp2")
                if all(f"{e}, seed {s}" in curves for s in SEEDS))
    for name, b, limit in ((f"ours, seed {SEEDS[0]}", bf16, 0.015), ("fsdp2 tensorwise", theirs, seeds)):
        if b:
            difference = a[last] / b[last] - 1
            row("convergence", f"ours tensorwise and {name}", abs(difference) <= limit,
                f"{difference:+.2%} after {last + WINDOW} steps, limit {limit:.2%}", difference=difference, limit=limit)
