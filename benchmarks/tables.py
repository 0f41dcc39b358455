"""Writes today's predictions into the tables of benchmarks/*.md: python3 benchmarks/tables.py [BINARY]

A row of such a table is one of tests/data/*.csv, as `shardlab validate --markdown` prints it: its name, and for each
metric the measured and the predicted value and the error in percent. Rows are found by name and measured values. The
text around the tables does not change.
"""
import collections
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def groups(row):
    """Returns the metrics of a row: measured, predicted, error."""
    return [row[i : i + 3] for i in range(1, len(row), 3)]


def predictions(binary):
    """Returns the metrics of every row, by its name."""
    found = collections.defaultdict(list)
    for table in sorted((ROOT / "tests/data").glob("*.csv")):
        printed = subprocess.run([binary, "validate", "--markdown", table], capture_output=True, text=True, cwd=ROOT)
        rows = [cells(line) for line in printed.stdout.splitlines() if line.startswith("|")]
        for row in rows[2:]:
            if len(row) % 3 == 1:
                found[row[0]].append(groups(row))
    return found


def like(error, old):
    """Formats an error with the decimals, the sign of zero and the unit of the old one."""
    number = old.removesuffix(" %")
    decimals = len(number.partition(".")[2])
    text = f"{float(error):+.{decimals}f}"
    if float(text) == 0 and number[:1] not in "+-":
        text = text[1:]
    return text + old[len(number) :]


def updated(line, found):
    row = cells(line)
    if row[0] not in found or len(row) % 3 != 1:
        return line
    for candidate in found[row[0]]:
        new = []
        for old in groups(row):
            same = [now for now in candidate if now[0] == old[0]]
            if not same:
                break
            new += old if old[0] == "" else [same[0][0], same[0][1], like(same[0][2], old[2])]
        else:
            return f"| {' | '.join([row[0], *new])} |"
    return line


def main():
    found = predictions(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/shardlab")
    for page in sorted((ROOT / "benchmarks").glob("*.md")):
        old = page.read_text().split("\n")
        new = [updated(line, found) if line.startswith("| ") else line for line in old]
        if new != old:
            page.write_text("\n".join(new))
            changed = sum(a != b for a, b in zip(old, new))
            print(f"{page.relative_to(ROOT)}: {changed} rows")


main()
