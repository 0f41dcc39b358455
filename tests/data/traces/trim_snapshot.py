"""Trims a memory snapshot: keeps Python frames only, or none with `noframes`, and writes it compressed without a date."""
import gzip, pickle, sys
source, target = sys.argv[1:3]
snapshot = pickle.load((gzip.open if source.endswith(".gz") else open)(source, "rb"))
def trim(x):
    frames = [] if "noframes" in sys.argv else [f for f in x.get("frames", []) if f["filename"].endswith(".py")]
    x["frames"] = [{"name": f["name"], "filename": f["filename"], "line": f["line"]} for f in frames]
    for key in ("compile_context", "user_metadata"): x.pop(key, None)
for trace in snapshot["device_traces"]:
    for event in trace: trim(event)
for segment in snapshot["segments"]:
    trim(segment)
    for block in segment["blocks"]: trim(block)
data = pickle.dumps(snapshot, 4)
with open(target, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=0) as z: z.write(data)
