"""Trims a profiler's trace to what importing reads, and writes it compressed without a date."""
import gzip, json, sys
KEEP = {"External id", "correlation", "stream", "device", "bytes", "Sequence number", "Fwd thread id", "Input Dims",
        "Input type", "Concrete Inputs", "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype",
        "Process Group Name", "Process Group Description", "Process Group Ranks", "Total Allocated", "Total Reserved",
        "Bytes", "Addr", "Device Type", "Device Id"}
SHAPED = ("embedding", "linear", "mm", "attention", "cross_entropy", "AccumulateGrad", "chunk_cat", "all_gather_copy_in", "copy_", "_fused_", "rms_norm")
DROP = {"ac2g", "gpu_user_annotation", "overhead", "Trace"}
source, target = sys.argv[1:3]
trace = json.load(gzip.open(source))
events = []
for e in trace["traceEvents"]:
    if e.get("cat") in DROP or e.get("ph") == "M" or e.get("ph") == "i" and e.get("name") != "[memory]": continue
    a = {k: v for k, v in e.get("args", {}).items() if k in KEEP}
    if e.get("cat") == "cpu_op":
        if e["name"] in ("aten::as_strided", "aten::slice", "aten::view", "aten::empty", "aten::detach", "detach", "aten::t", "aten::transpose", "aten::_has_compatible_shallow_copy_type", "aten::empty_strided", "aten::narrow", "aten::reshape", "aten::to", "aten::unsqueeze", "aten::empty_like", "aten::_unsafe_view"): continue
        if not any(s in e["name"] for s in SHAPED):
            for k in ("Input Dims", "Input type", "Concrete Inputs"): a.pop(k, None)
    if e.get("cat") in ("cuda_runtime", "cuda_driver"):
        a = {k: a[k] for k in ("correlation",) if k in a}
    if e.get("cat") == "kernel" and len(e["name"]) > 300: e["name"] = e["name"][:300]
    e["args"] = a
    if not a: del e["args"]
    e.pop("s", None)
    events.append(e)
referred = {d["args"].get("External id") for d in events if d.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
starts = {(e["tid"], e["ts"]) for e in events if e.get("cat") == "fwdbwd"}
def needed(e):
    return (e.get("cat") != "cpu_op" or e["args"].get("External id") in referred or (e["tid"], e["ts"]) in starts or "Input Dims" in e["args"]
            or e["name"].startswith(("autograd::", "c10d::", "record_param")) )
events = [e for e in events if "args" not in e or needed(e)]
linked = {d["args"]["correlation"] for d in events if d.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
events = [e for e in events if e.get("cat") not in ("cuda_runtime", "cuda_driver") or e.get("args", {}).get("correlation") in linked]
if "crop" in sys.argv:
    first = min(e["ts"] + e["dur"] for e in events if e["name"].startswith("Optimizer.step"))
    late = {e["args"]["correlation"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["ts"] >= first}
    events = [e for e in events if (e["args"]["correlation"] in late if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") else e["ts"] >= first)]
if "nomem" in sys.argv:
    events = [e for e in events if e["name"] != "[memory]"]
trace["traceEvents"] = events
trace["traceName"] = "trace.json"
for d in trace["deviceProperties"]:
    for k in list(d):
        if k not in ("id", "name", "totalGlobalMem"): del d[k]
text = json.dumps(trace, separators=(",", ":")).encode()
with open(target, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=0) as z: z.write(text)
