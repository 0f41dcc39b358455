#!/usr/bin/env bash
# Makes the pictures of the README and the book from real output: docs/pictures/make.sh BINARY [FOLDER]
# Needs tmux, python3 and Chromium; optipng makes the files smaller if it is installed.
set -euo pipefail
binary="$(realpath "${1:-target/release/shardlab}")"
here="$(cd "$(dirname "$0")" && pwd)"
folder="$(realpath "${2:-$here}")"
work="$(mktemp -d)"
session="shardlab-pictures-$$"
trap 'tmux kill-session -t "$session" 2>/dev/null || true; rm -rf "$work"' EXIT
export SHARDLAB_STORE=off LC_ALL=C.UTF-8 COLORTERM=truecolor
columns=120 rows=36
browser="$(command -v chromium chromium-browser google-chrome | head -n 1)"

screenshot() { # PAGE PNG WIDTH HEIGHT
  "$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1 \
    --virtual-time-budget=3000 --window-size="$3,$4" --screenshot="$2" "file://$1" 2>/dev/null
  if command -v optipng > /dev/null; then optipng -quiet -o5 "$2"; fi
}

# Waits until the screen shows TEXT.
shows() {
  for _ in $(seq 100); do
    if tmux capture-pane -p -t "$session" | grep -qF -- "$1"; then sleep 0.3; return; fi
    sleep 0.1
  done
  echo "the dashboard does not show: $1" >&2
  tmux capture-pane -p -t "$session" >&2
  exit 1
}
keys() { tmux send-keys -t "$session" "$@"; sleep 0.4; }

# Opens the timeline of a scenario at a unit and phase.
timeline() { # UNIT ARGUMENT...
  local unit="$1"; shift
  tmux -u new-session -d -s "$session" -x $columns -y $rows \
    "cd '$work' && '$binary' dash --no-state --no-mouse $*"
  shows "prefetch_forward"
  keys r; shows "exposed"
  keys u; keys -l "$unit"; keys Enter; shows "$unit"
}

# Writes what the dashboard shows, and closes it.
picture() { # PNG
  tmux capture-pane -e -p -t "$session" > "$work/screen.txt"
  tmux kill-session -t "$session"
  python3 "$here/ansi2html.py" < "$work/screen.txt" > "$work/screen.html"
  screenshot "$work/screen.html" "$folder/$1" $((columns * 9 + 28)) $((rows * 17 + 28))
}

# The dashboard: prefetch turned off, and the all-gather that the recompute of layers.3 waits for.
timeline "layers.3 recompute" llama3-8b-4xh200 --set fsdp.prefetch_forward=0 --set fsdp.prefetch_backward=0
keys b; keys o; keys o
picture dashboard.png

# The scenario of the tutorial: the gather of a layer waits for the reduction of another.
sed -n '/tested: slow.toml/,/^```$/p' "$here/../tutorials/exposed-collective.md" | sed '1,2d;$d' > "$work/slow.toml"
timeline "layers.3 backward" slow.toml
keys b; keys o; keys o
picture exposed.png

# A report: what turning prefetch off does.
"$binary" report llama3-8b-4xh200 --set-b fsdp.prefetch_forward=0 --out "$work/report.html" > /dev/null
# From the section of the streams on, which shows more than the cards at the top.
cat >> "$work/report.html" <<'EOT'
<script>
const section = document.getElementById("streams");
if (section) document.body.style.marginTop = `${20 - section.getBoundingClientRect().top}px`;
</script>
EOT
screenshot "$work/report.html" "$folder/report.png" 1100 1140
ls -l "$folder"/*.png
