"""Reduces a trace to one step and to the events that name units, layers, collectives and copies."""
import gzip, json, sys

KEEP = ["aten::linear", "aten::embedding", "aten::topk", "aten::scaled_dot_product_attention", "aten::cross_entropy_loss", "aten::layer_norm",
        "fsdp::chunk_cat", "record_param_comms", "torch::autograd::AccumulateGrad", "aten::_fused_adamw_"]
ARGS = ["External id", "correlation", "Input Dims", "Concrete Inputs", "Input type", "Collective name", "In msg nelems",
        "Out msg nelems", "Group size", "dtype", "Process Group Name", "Process Group Description", "Process Group Ranks",
        "stream", "device", "bytes"]
source, target, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
t = json.load(gzip.open(source) if source.endswith("gz") else open(source))
events = [e for e in t["traceEvents"] if "ts" in e and e.get("ph") == "X"]
updates = sorted((e for e in events if e["name"].startswith("Optimizer.step") and e["cat"] == "user_annotation"), key=lambda e: e["ts"])
start = updates[step - 1]["ts"] + updates[step - 1]["dur"] if step else 0
end = updates[step]["ts"] + updates[step]["dur"]
inside = lambda e: start <= e["ts"] < end
launches = {e["args"]["correlation"]: e for e in events if e.get("cat", "").startswith("cuda_") and "correlation" in e.get("args", {}) and inside(e)}
kept = []
for e in events:
    cat, name = e.get("cat"), e["name"]
    if cat == "user_annotation" and inside(e) and name.startswith(("FSDP::", "Optimizer")):
        kept.append(e)
    elif cat == "cpu_op" and inside(e) and (name in KEEP or name.startswith("aten::_foreach_")):
        kept.append(e)
    elif cat in ("kernel", "gpu_memcpy") and e["args"].get("correlation") in launches:
        launch = launches[e["args"]["correlation"]]
        updates_weights = updates[step]["ts"] <= launch["ts"]
        if cat == "gpu_memcpy" and ("DtoD" in name or e["args"]["bytes"] < 4096) or cat == "kernel" and "nccl" not in name and not updates_weights:
            continue
        kept += [launch, e]
kept.sort(key=lambda e: e["ts"])
first = min(e["ts"] for e in kept)
threads = {}
out = []
for e in kept:
    args = {k: v for k, v in e.get("args", {}).items() if k in ARGS and v not in ("", [])}
    if e["name"].startswith(("aten::embedding", "aten::linear", "aten::scaled", "aten::cross")):
        args.pop("Concrete Inputs", None), args.pop("Input type", None)
    if e["name"].startswith("record_param"):
        for k in ("Input Dims", "Concrete Inputs", "Input type"):
            args.pop(k, None)
    name = e["name"] if e["cat"] != "kernel" or len(e["name"]) < 90 else e["name"][:90]
    out.append(dict(ph="X", cat=e["cat"], name=name, pid=e["pid"], tid=e["tid"], ts=round(e["ts"] - first, 1), dur=round(e["dur"], 1), args=args))
rest = {k: t[k] for k in ("schemaVersion", "distributedInfo", "record_shapes") if k in t}
rest["deviceProperties"] = [{"name": t["deviceProperties"][0]["name"]}]
with open(target, "wb") as f:
    with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
        z.write(json.dumps({**rest, "traceEvents": out}, separators=(",", ":")).encode())
print(target, len(out))
