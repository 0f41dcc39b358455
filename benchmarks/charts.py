"""Draws the charts of BENCHMARKS.md: python3 benchmarks/charts.py [BINARY]

benchmarks/accuracy.svg: errors of predictions, from tests/data/*.csv through `shardlab validate --json`.
benchmarks/training.svg: step time and memory of compiled training, from benchmarks/training.csv.
docs/pictures/convergence.svg: loss curves of our engine and FSDP2, from benchmarks/convergence.csv.
"""
import csv
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
INK, SOFT, GRID = "#24292f", "#57606a", "#d8dee4"
COLORS = ["#8c959f", "#bc8cff", "#0969da"]


class Svg:
    def __init__(self, width, height):
        self.size = (width, height)
        self.parts = []

    def add(self, tag, text=None, **attributes):
        attributes = " ".join(f'{k.replace("_", "-")}="{v}"' for k, v in attributes.items())
        end = f">{text}</{tag}>" if text is not None else "/>"
        self.parts.append(f"<{tag} {attributes}{end}")

    def text(self, x, y, text, anchor="start", fill=INK, weight="normal", size=12):
        self.add("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, fill=fill,
                 font_weight=weight, font_size=size)

    def line(self, x1, y1, x2, y2, stroke=GRID, width=1):
        self.add("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}",
                 stroke=stroke, stroke_width=width)

    def write(self, path):
        width, height = self.size
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="system-ui, sans-serif">\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
            + "\n".join(self.parts) + "\n</svg>\n"
        )


def rows(binary, table):
    """Returns the rows of a measured table with their predictions; the last object summarizes them."""
    command = [binary, "validate", str(ROOT / "tests/data" / f"{table}.csv"), "--json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()][:-1]


def accuracy(binary):
    peers = rows(binary, "h200x4") + rows(binary, "h200x4_heldout")
    tiny = [r for r in peers if r["scenario"] == "peers-tiny"]
    sets = [
        ("FSDP2, Megatron-FSDP: 1.5 to 8 B, 4 H200", [r for r in peers if r not in tiny]),
        ("the same: 0.1 B", tiny),
        ("memory on meshes of 4 to 1,024 ranks", rows(binary, "engine_memory")),
        ("shardlab exec: 1 to 4 H200", rows(binary, "exec_h200") + rows(binary, "exec_h200_options")),
        ("shardlab exec: 1 and 2 H100", rows(binary, "exec_h100")),
    ]
    left, panel, gap, top, row = 300, 300, 40, 56, 44
    svg = Svg(left + 2 * panel + gap + 20, top + row * len(sets) + 44)
    for column, (metric, title, low, high, step) in enumerate([
        ("step_ms", "step time: error, %", -30, 10, 10),
        ("peak_reserved_mib", "peak reserved memory: error, %", -20, 20, 10),
    ]):
        x0 = left + column * (panel + gap)
        at = lambda error: x0 + panel * (error - low) / (high - low)
        svg.text(x0 + panel / 2, 24, title, "middle", weight="bold", size=13)
        for tick in range(low, high + 1, step):
            zero = tick == 0
            svg.line(at(tick), top - 14, at(tick), top + row * len(sets), SOFT if zero else GRID)
            svg.text(at(tick), top + row * len(sets) + 18, f"{tick:+d}" if tick else "0", "middle", SOFT)
        for i, (_, members) in enumerate(sets):
            errors = [r[metric]["error_percent"] for r in members if r.get(metric)]
            y = top + row * i + 14
            if not errors:
                svg.text(at(0), y + 4, "not measured", "middle", SOFT)
                continue
            for k, error in enumerate(errors):
                svg.add("circle", cx=f"{at(error):.1f}", cy=f"{y + (k * 7 % 13) - 6:.1f}", r="3",
                        fill=COLORS[2], fill_opacity="0.45")
            middle = statistics.median(map(abs, errors))
            worst = max(map(abs, errors))
            svg.text(x0 + panel, y + 22, f"median {middle:.1f}, worst {worst:.1f}", "end", SOFT, size=11)
    for i, (label, members) in enumerate(sets):
        y = top + row * i + 14
        svg.text(left - 14, y + 2, label, "end")
        svg.text(left - 14, y + 17, f"{len(members)} rows", "end", SOFT, size=11)
    svg.write(HERE / "accuracy.svg")


def training():
    with open(HERE / "training.csv", newline="") as file:
        table = list(csv.DictReader(file))
    models = list(dict.fromkeys(r["model"] for r in table))
    engines = list(dict.fromkeys(r["engine"] for r in table))
    panel, gap, top, height, base = 330, 40, 70, 190, 260
    svg = Svg(2 * panel + gap + 40, 300)
    for i, engine in enumerate(engines):
        svg.add("rect", x=20 + 170 * i, y=12, width=12, height=12, fill=COLORS[i])
        svg.text(38 + 170 * i, 22, engine)
    for column, (key, title, unit, scale) in enumerate([
        ("step_ms", "step time, relative to the slowest", "ms", 1),
        ("allocated_mib", "allocated memory, relative to the largest", "GiB", 1024),
    ]):
        x0 = 20 + column * (panel + gap)
        svg.text(x0, 52, title, weight="bold", size=13)
        svg.line(x0, base, x0 + panel, base, SOFT)
        for m, model in enumerate(models):
            here = [r for r in table if r["model"] == model]
            most = max(float(r[key]) for r in here)
            for i, r in enumerate(here):
                value = float(r[key])
                tall = height * value / most * 0.92
                x = x0 + m * panel / len(models) + 4 + i * 33
                svg.add("rect", x=f"{x:.1f}", y=f"{base - tall:.1f}", width=30, height=f"{tall:.1f}", fill=COLORS[i])
                number = value / scale
                svg.text(x + 15, base - tall - 5, f"{number:.0f}", "middle", SOFT, size=10)
            svg.text(x0 + m * panel / len(models) + 53, base + 18, f"{model}, {unit}", "middle")
    svg.write(HERE / "training.svg")


def convergence():
    """Draws means over 20 steps of every curve: all runs in bf16, and runs in 8 bits next to those with the same seed."""
    window, first = 20, 40
    with open(HERE / "convergence.csv", newline="") as file:
        table = list(csv.DictReader(file))
    panel, gap, top, height, left = 400, 70, 40, 260, 50
    svg = Svg(left + 2 * panel + gap + 20, top + height + 90)
    for column, (title, steps, names) in enumerate([
        ("1b in bf16, two seeds", 300, ["fsdp2, seed 1", "ours, seed 1", "fsdp2, seed 2", "ours, seed 2"]),
        ("1b in 8 bits, and bf16 with the same seed", 200, ["fsdp2, seed 1", "ours, seed 1", "fsdp2 tensorwise", "ours tensorwise"]),
    ]):
        x0 = left + column * (panel + gap)
        at = lambda step: x0 + panel * (step - first) / (steps - first)
        down = lambda loss: top + height * (5.0 - loss) / 2.75
        svg.text(x0, 20, title, weight="bold", size=13)
        for loss in (2.5, 3.0, 3.5, 4.0, 4.5, 5.0):
            svg.line(x0, down(loss), x0 + panel, down(loss))
            svg.text(x0 - 8, down(loss) + 4, f"{loss:.1f}", "end", SOFT)
        for step in range(first, steps + 1, 40):
            svg.text(at(step), top + height + 18, step, "middle", SOFT)
        for i, name in enumerate(names):
            losses = [float(row[name]) for row in table[:steps] if row[name]]
            points = " ".join(f"{at(n):.1f},{down(statistics.mean(losses[n - window:n])):.1f}" for n in range(first, len(losses) + 1, 2))
            style = {"stroke": COLORS[2 if "ours" in name else 1], "stroke_dasharray": "none" if i < 2 else "5 3"}
            svg.add("polyline", points=points, fill="none", stroke_width="1.6", **style)
            x, y = x0 + (i % 2) * 170, top + height + 42 + 18 * (i // 2)
            svg.add("line", x1=x, y1=y - 4, x2=x + 26, y2=y - 4, stroke_width=2, **style)
            svg.text(x + 32, y, name)
    svg.write(ROOT / "docs/pictures/convergence.svg")


if __name__ == "__main__":
    accuracy(sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "target/release/shardlab"))
    training()
    convergence()
