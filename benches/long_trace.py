#!/usr/bin/env python3
"""Writes a long trace of the PyTorch profiler by repeating the steps of a short one.

    benches/long_trace.py SHORT.json.gz BYTES LONG.json[.gz]

Every copy has later times and new ids, like the steps of a real trace. The rest of the text stays as
the profiler wrote it.
"""
import gzip
import re
import sys

# Numbers that change in every copy: times, and ids that link events.
SHIFTED = re.compile(
    rb'"(ts|External id|correlation|id|Sequence number|Ev Idx|Record function id)": ([0-9.]+)'
)
EVENTS = b'"traceEvents": ['


def opened(path, mode):
    return gzip.open(path, mode) if path.endswith(".gz") else open(path, mode)


def main(source, size, target):
    text = opened(source, "rb").read()
    start = text.index(EVENTS) + len(EVENTS)
    end = text.rindex(b"]")
    body = text[start:end]
    times = [float(t) for t in re.findall(rb'"ts": ([0-9.]+)', body)]
    middle = sorted(times)[len(times) // 2]
    near = [t for t in times if abs(t - middle) < 60e6]
    period = int(max(near) - min(near)) + 1000
    # The text between shifted numbers, which is the same in every copy.
    pieces, at, most = [], 0, 0
    for match in SHIFTED.finditer(body):
        is_time = match[1] == b"ts"
        value = match[2]
        pieces.append((body[at : match.start(2)], is_time, value))
        if not is_time and b"." not in value:
            most = max(most, int(value))
        at = match.end(2)
    rest = body[at:]
    with opened(target, "wb") as out:
        out.write(text[:start])
        written, copy = start, 0
        while written < size:
            parts = [b",\n"] if copy else []
            for before, is_time, value in pieces:
                whole, dot, part = value.partition(b".")
                shift = period if is_time else most
                # 0 means that there is no id.
                same = not is_time and whole == b"0"
                number = whole if same else b"%d" % (int(whole) + copy * shift)
                parts += [before, number, dot, part]
            parts.append(rest)
            chunk = b"".join(parts)
            out.write(chunk)
            written += len(chunk)
            copy += 1
        out.write(text[end:])
    print(f"{target}: {copy} copies, {written / 1e9:.2f} GB of text")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], int(float(sys.argv[2])), sys.argv[3])
