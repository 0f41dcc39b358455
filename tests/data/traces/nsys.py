"""Writes a profiler's trace as an export of Nsight Systems, with the tables and columns of its documented schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html (exporter, SQLite schema reference). `python3 nsys.py TRACE TARGET`"""
import gzip, json, os, sqlite3, sys, tempfile
source, target = sys.argv[1:3]
trace = json.load(gzip.open(source))
path = tempfile.mktemp()
db = sqlite3.connect(path)
db.executescript("""
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL PRIMARY KEY, name TEXT, totalMemory INTEGER, smCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
""")
strings = {}
def string(text): return strings.setdefault(text, len(strings))
first = min(e["ts"] for e in trace["traceEvents"] if "ts" in e)
def span(e): return round((e["ts"] - first) * 1000), round((e["ts"] - first + e.get("dur", 0)) * 1000)
PID = 4711 << 24
tids = {}
def tid(e): return PID | tids.setdefault(e["tid"], 4711 + len(tids))
for e in trace["traceEvents"]:
    a, cat = e.get("args", {}), e.get("cat")
    if cat in ("kernel", "gpu_memcpy", "gpu_memset"):
        row = (*span(e), a["device"], 1, a["stream"], a["correlation"], PID)
        if cat == "kernel": db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,NULL)", (*row, string(e["name"]), string(e["name"].split("(")[0].split("<")[0])))
        elif cat == "gpu_memcpy": db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?,?)", (*row, a.get("bytes", 0), 1 if "HtoD" in e["name"] else 2 if "DtoH" in e["name"] else 8))
        else: db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?,?,?,?,?,?,?,0,?)", (*row, a.get("bytes", 0)))
    elif cat in ("cuda_runtime", "cuda_driver"):
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,1,?,?,?,0)", (*span(e), tid(e), a["correlation"], string(e["name"] + "_v7000")))
    elif cat in ("cpu_op", "user_annotation"):
        seq = a.get("Sequence number")
        text = e["name"] + (f", seq = {seq}, op_id = {a['External id']}" if seq is not None and cat == "cpu_op" else "")
        # Some versions store texts in StringIds.
        own = len(strings) % 2 == 0
        db.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,59,NULL,NULL,NULL,?,?,NULL,?,0)", (*span(e), text if own else None, tid(e), None if own else string(text)))
db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3', 85520809984, 132)")
db.executemany("INSERT INTO StringIds VALUES (?,?)", [(i, s) for s, i in strings.items()])
db.commit(); db.execute("VACUUM"); db.close()
with open(path, "rb") as f, open(target, "wb") as t, gzip.GzipFile("", "wb", 9, t, mtime=0) as z: z.write(f.read())
os.remove(path)
