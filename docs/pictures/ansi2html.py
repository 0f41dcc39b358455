"""Terminal text with ANSI colors (`tmux capture-pane -e`) from standard input, as an HTML page."""
import html
import re
import sys

BASIC = ["#1d1f21", "#cc6666", "#b5bd68", "#f0c674", "#81a2be", "#b294bb", "#8abeb7", "#c5c8c6"]
BRIGHT = ["#666666", "#d54e53", "#b9ca4a", "#e7c547", "#7aa6da", "#c397d8", "#70c0b1", "#ffffff"]
FOREGROUND, BACKGROUND = "#d8dee9", "#14161b"


def indexed(n):
    """Color n of the 256-color palette."""
    if n < 16:
        return (BASIC + BRIGHT)[n]
    if n >= 232:
        return "#" + f"{8 + 10 * (n - 232):02x}" * 3
    levels = [0, 95, 135, 175, 215, 255]
    n -= 16
    return "#" + "".join(f"{levels[i]:02x}" for i in (n // 36, n // 6 % 6, n % 6))


class Style:
    def __init__(self):
        self.reset()

    def reset(self):
        self.fg = self.bg = None
        self.bold = self.dim = self.reverse = self.underline = False

    def apply(self, codes):
        codes = iter(codes)
        for c in codes:
            if c == 0:
                self.reset()
            elif c in (1, 2, 4, 7):
                setattr(self, {1: "bold", 2: "dim", 4: "underline", 7: "reverse"}[c], True)
            elif c == 22:
                self.bold = self.dim = False
            elif c in (24, 27):
                setattr(self, {24: "underline", 27: "reverse"}[c], False)
            elif c in (38, 48):
                mode = next(codes)
                if mode == 5:
                    color = indexed(next(codes))
                else:
                    color = "#" + "".join(f"{next(codes):02x}" for _ in range(3))
                setattr(self, "fg" if c == 38 else "bg", color)
            elif c in (39, 49):
                setattr(self, "fg" if c == 39 else "bg", None)
            elif 30 <= c <= 37 or 90 <= c <= 97:
                self.fg = (BASIC if c < 90 else BRIGHT)[c % 10]
            elif 40 <= c <= 47 or 100 <= c <= 107:
                self.bg = (BASIC if c < 100 else BRIGHT)[c % 10]

    def css(self):
        fg, bg = self.fg or FOREGROUND, self.bg
        if self.reverse:
            fg, bg = bg or BACKGROUND, fg
        rules = [f"color:{fg}"]
        if bg:
            rules.append(f"background:{bg}")
        if self.bold:
            rules.append("font-weight:bold")
        if self.dim:
            rules.append("opacity:.65")
        if self.underline:
            rules.append("text-decoration:underline")
        return ";".join(rules)


def line(text, style):
    # Every cell has its own box, so that a glyph of another width cannot shift the ones after it.
    out = []
    for part in re.split(r"(\x1b\[[0-9;]*m)", text):
        if part.startswith("\x1b["):
            style.apply([int(c or 0) for c in part[2:-1].split(";")])
        else:
            css = style.css()
            out += [f'<i style="{css}">{html.escape(c)}</i>' for c in part]
    return "<div>" + "".join(out) + "</div>"


def main():
    style = Style()
    rows = [line(row, style) for row in sys.stdin.read().rstrip("\n").split("\n")]
    print(
        "<!doctype html><meta charset=utf-8><style>"
        f"body{{margin:0;padding:14px;background:{BACKGROUND};font:15px/17px 'DejaVu Sans Mono',monospace}}"
        "div{height:17px;white-space:pre;display:flex}"
        "i{font-style:normal;display:inline-block;width:9px;height:17px;overflow:hidden}"
        "</style>" + "".join(rows)
    )


main()
