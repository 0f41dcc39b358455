"""Turns the outputs of steps.py and kernels.py into the measured tables of a hardware profile.

    python3 profile_tables.py STEPS.jsonl KERNELS.jsonl "one H200, torch 2.11, driver 580" > tables.toml

The rows of steps.py come first, and the first row of a shape takes precedence. If KERNELS.jsonl is /dev/null, only the tables of
steps.py are printed.
"""
import collections, json, sys

load = lambda path: [json.loads(l) for l in open(path)]
steps, rows = load(sys.argv[1]), load(sys.argv[2])
where = sys.argv[3]
source = f"measured alone, between copies, on {where} (measure/kernels.py)"
of = lambda table: [r for r in rows if r["table"] == table]


def head(kind, **keys):
    print(f"\n[[{kind}]]")
    print(f'source = "{source}"')
    for k, v in keys.items():
        print(f"{k} = {json.dumps(v)}")


def emit(lines):
    print("rows = [\n" + "\n".join(f"    {json.dumps(l)}," for l in lines) + "\n]")


def mean(some, key): return round(sum(r[key] * r["count"] for r in some) / sum(r["count"] for r in some), 2)


grid, source = source, f"measured in FSDP2's steps of one rank on {where} (measure/steps.py)"
by = collections.defaultdict(list)
for r in steps:
    if r["table"] == "gemm":
        by[r["m"], r["n"], r["k"]].append(r)
head("gemm", dtype="bf16")
emit([[*k, mean(v, "us")] for k, v in sorted(by.items())])
for key in ("forward_us", "backward_us"):
    by = collections.defaultdict(list)
    for r in steps:
        if key in r:
            by[r["batch"], r["heads"], r["kv_heads"], r["seq"], r["head_dim"]].append(r)
    head("attention", dtype="bf16", causal=True, backward=key == "backward_us")
    emit([[*k, mean(v, key)] for k, v in sorted(by.items())])
if not rows: sys.exit()
source = grid
by = collections.defaultdict(list)
for r in of("gemm"):
    by[r["dtype"], r["m"], r["n"], r["k"]].append(r["us"])
for dtype in ("bf16", "f32"):
    head("gemm", dtype=dtype)
    emit([[m, n, k, round(sum(v) / len(v), 2)] for (d, m, n, k), v in sorted(by.items()) if d == dtype])

for dtype in ("bf16", "f32"):
    for causal in (True, False):
        some = [r for r in of("attention") if r["dtype"] == dtype and r["causal"] == causal]
        for backward in (False, True):
            if some:
                head("attention", dtype=dtype, causal=causal, backward=backward)
                key = "backward_us" if backward else "forward_us"
                emit(sorted([r["batch"], r["heads"], r["kv_heads"], r["seq"], r["head_dim"], r[key]] for r in some))

# Convolutions are implicit GEMMs of positions x output channels x (input channels times kernel area); the two gradients are
# GEMMs of the same size.
for dtype in ("f32", "bf16"):
    some = [r for r in of("conv") if r["dtype"] == dtype]
    if some:
        head("conv", dtype=dtype)
        lines = []
        for r in some:
            m, c, k = r["images"] * r["height"] * r["width"], r["channels"], r["channels"] * r["kernel"] ** 2
            lines += [[m, c, k, r["forward_us"]], [m, k, c, r["dgrad_us"]], [k, c, m, r["wgrad_us"]]]
        emit(sorted(lines))

mem = collections.defaultdict(dict)
for r in of("memory"):
    mem[r["name"]][r["read"] + r["written"]] = r["us"]
# Gradient of the norm's weight: the time of both gradients minus that of the input gradient.
mem["norm_weight"] = {
    r["read"] // 3 * 2: round(r["us"] - mem["rms_norm_backward_input"][r["read"]], 3) for r in of("memory") if r["name"] == "rms_norm_backward_both"
}
tables = [
    ("pointwise", "silu_backward", "silu_backward"), ("pointwise", "silu", "silu"), ("pointwise", "gelu", "gelu"), ("pointwise", None, "mul"),
    ("strided", "mul", "rope_mul"), ("strided", "cat", "cat"), ("strided", None, "transpose_copy"),
    ("norm", "layer_norm", "layer_norm"), ("norm", None, "rms_norm"), ("norm_backward", None, "rms_norm_backward_input"),
    ("column_reduce", "norm", "norm_weight"), ("column_reduce", None, "bias_grad"),
    ("copy", "cast_up", "cast_up"), ("copy", None, "cast_down"), ("fill", None, "fill"), ("full_reduce", None, "norm"),
    ("multi_copy", "chunk_cat", "chunk_cat"), ("multi_copy", "split_copy_out", "split_with_sizes_copy"), ("multi_copy", None, "foreach_cast_down"),
    ("optimizer", None, "fused_adamw"), ("softmax", None, "log_softmax"), ("softmax_backward", None, "log_softmax_backward"),
    ("embedding", None, "embedding"), ("embedding_grad", None, "embedding_backward"),
]
for cls, op, name in tables:
    keys = {"class": cls} | ({"op": op} if op else {})
    head("memory", **keys)
    emit([[b, us] for b, us in sorted(mem[name].items())])

# Kernels of strided.py. Their operands come from memory as in a step.
source = f"each call on operands in memory, not in the cache, on {where} (measure/strided.py)"
strided = [
    ("promoted", None, ("promoted weight f32", "promoted rotary f32")), ("mul", "f32", ("mul rows f32", "mul weight f32")),
    *((op, dtype, (f"{op} {dtype}",)) for op in ("add", "neg", "scale") for dtype in ("bf16", "f32")), ("cat", "f32", ("cat f32",)), (None, "f32", ("copy f32",)),
]
for op, dtype, names in strided:
    # Kernels of one size differ by a few bytes.
    rows = [list(zip(*sizes)) for sizes in zip(*(sorted(mem[name].items()) for name in names))]
    if rows:
        keys = {"class": "strided"} | ({"op": op} if op else {}) | ({"dtype": dtype} if dtype else {})
        head("memory", **keys, in_step=True, bytes="moved")
        emit([[round(sum(b) / len(b)), round(sum(us) / len(us), 2)] for b, us in rows])
