"use strict";
// The page works without this; with it, the theme can be chosen, text can be copied, and timelines
// can be zoomed, searched and moved together.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  for (const copy of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) break;
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      const words = copy.textContent;
      await navigator.clipboard.writeText(copy.parentElement.querySelector("pre").textContent);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = words), 1500);
    });
  }

  const digits = (x) => (x >= 100 ? x.toFixed(1) : x >= 1 ? x.toFixed(2) : x.toFixed(4));
  const time = (ns) => (ns >= 1e6 ? digits(ns / 1e6) + " ms" : ns >= 1e3 ? digits(ns / 1e3) + " us" : ns.toFixed(0) + " ns");
  const place = (ns) => (ns / 1e6).toFixed(4) + " ms";
  const bytes = (kib) => (kib >= 1048576 ? (kib / 1048576).toFixed(2) + " GiB" : kib >= 1024 ? (kib / 1024).toFixed(1) + " MiB" : kib + " KiB");
  const text = (s) => s.replace(/[&<>"]/g, (c) => "&#" + c.charCodeAt(0) + ";");

  // Timelines of one scale move together: a window of one is a window of all.
  const timelines = [...document.querySelectorAll(".timeline")].map(start);
  const links = document.querySelectorAll(".linked");
  const linked = (t) => timelines.filter((other) => other.length === t.length).length > 1;
  timelines.forEach((t, i) => (links[i].hidden = !linked(t)));
  for (const link of links)
    link.addEventListener("change", (event) => {
      for (const other of links) other.querySelector("input").checked = event.target.checked;
    });

  function start(figure) {
    const data = JSON.parse(figure.querySelector(".spans").textContent);
    const svg = figure.querySelector("svg");
    const [bars, axis, cursor] = [".bars", ".axis", ".cursor"].map((c) => svg.querySelector(c));
    const [mem, peak] = [".mem", ".peak"].map((c) => svg.querySelector(c));
    const whole = [bars.innerHTML, axis.innerHTML];
    const hover = figure.querySelector(".hover");
    const tools = figure.querySelector(".tools");
    const plot = figure.querySelector(".plot");
    const link = figure.querySelector(".linked input");
    const search = figure.querySelector("input[type=search]");
    hover.hidden = tools.hidden = false;
    figure.classList.add("live");
    plot.setAttribute("aria-label", svg.querySelector("title").textContent + ": plus and minus zoom, arrows move, g goes to the next exposed gap, p to the peak of memory, 0 shows all");
    const lanes = data.lanes.map((lane) => {
      const spans = [];
      let at = 0;
      for (let i = 0; i < lane.spans.length; i += 7) {
        at += lane.spans[i];
        spans.push([at, ...lane.spans.slice(i + 1, i + 7)]);
      }
      return spans;
    });
    const memory = data.memory ? levels(data.memory) : null;
    if (!memory) tools.querySelector('[data-act="peak"]').remove();
    const gaps = data.lanes.findIndex((lane) => lane.name === "exposed");
    if (gaps < 0) tools.querySelector('[data-act="gap"]').remove();
    let from = 0;
    let to = data.length;
    let chosen = null;
    let query = "";

    const width = data.width - data.gutter;
    const x = (t) => data.gutter + ((t - from) / (to - from)) * width;
    const label = (s) => data.names[s[3]] + (data.units[s[4]] ? " of " + data.units[s[4]] : "");
    const matches = (s) => (data.names[s[3]] + " " + data.units[s[4]]).toLowerCase().includes(query);

    function draw() {
      drawMemory();
      if (from <= 0 && to >= data.length && !chosen && !query) {
        [bars.innerHTML, axis.innerHTML] = whole;
        return;
      }
      bars.innerHTML = lanes.map(drawLane).join("");
      drawAxis();
    }
    function drawLane(spans, i) {
      const y = data.top + i * (data.lane + data.gap);
      const paths = {};
      const open = {};
      let out = "";
      const put = (c) => {
        const [a, b] = open[c];
        const w = Math.max(b - a, 0.7);
        paths[c] = (paths[c] || "") + "M" + a.toFixed(1) + " " + y + "h" + w.toFixed(1) + "v" + data.lane + "h-" + w.toFixed(1) + "z";
      };
      const shown = [];
      for (const s of spans) {
        if (s[0] + s[1] < from) continue;
        if (s[0] > to) break;
        shown.push(s);
        const a = Math.max(x(s[0]), data.gutter);
        const b = Math.min(x(s[0] + s[1]), data.width);
        // What a search does not find is pale.
        const c = !query || matches(s) ? s[2] : s[2] + 100;
        if (open[c] && a - open[c][1] < 0.7) open[c][1] = Math.max(open[c][1], b);
        else {
          if (open[c]) put(c);
          open[c] = [a, b];
        }
      }
      for (const c in open) put(c);
      for (const c in paths) {
        const pale = c >= 100 ? ' opacity="0.2"' : "";
        out += '<path fill="var(--' + (c % 100 === 8 ? "bad" : "c" + (c % 100)) + ')"' + pale + ' d="' + paths[c] + '"/>';
      }
      // Names where there is room for them.
      for (const s of shown) {
        const a = Math.max(x(s[0]), data.gutter);
        const w = Math.min(x(s[0] + s[1]), data.width) - a;
        const name = data.names[s[3]];
        if (w > 13 * name.length + 10 && (!query || matches(s)))
          out += '<text x="' + (a + 5).toFixed(1) + '" y="' + (y + data.lane * 0.66) + '" font-size="22" fill="var(--ground)">' + text(name) + "</text>";
      }
      if (chosen && chosen[0] === i) {
        const s = chosen[1];
        const a = Math.max(x(s[0]), data.gutter);
        const w = Math.min(x(s[0] + s[1]), data.width) - a;
        out += '<rect x="' + a + '" y="' + (y - 3) + '" width="' + Math.max(w, 2) + '" height="' + (data.lane + 6) + '" fill="none" stroke="var(--ink)" stroke-width="3"/>';
      }
      return out;
    }
    function drawAxis() {
      // Round numbers, with as many decimals as they need.
      let ticks = "";
      const rough = (to - from) / 8;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
      const decimals = Math.max(0, 6 - Math.floor(Math.log10(step) + 1e-9));
      for (let k = Math.ceil(from / step - 1e-9); k * step <= to; k++) {
        const at = x(k * step);
        const anchor = at < data.gutter + 60 ? "start" : at > data.width - 60 ? "end" : "middle";
        ticks += '<path d="M' + at.toFixed(1) + " " + data.axis + 'v8" stroke="var(--faint)"/><text x="' + at.toFixed(1) + '" y="' + (data.axis + 34) + '" text-anchor="' + anchor + '" fill="var(--faint)">' + ((k * step) / 1e6).toFixed(decimals) + " ms</text>";
      }
      const end = x(data.own);
      if (data.own < data.length && end >= data.gutter && end <= data.width)
        ticks += '<path d="M' + end.toFixed(1) + " " + data.top + "V" + data.axis + '" stroke="var(--faint)" stroke-width="2" stroke-dasharray="8 8"/>';
      axis.innerHTML = ticks;
    }
    function drawMemory() {
      cursor.innerHTML = "";
      if (!memory) return;
      const per = width / data.length;
      mem.setAttribute("viewBox", from * per + " 0 " + (to - from) * per + " " + data.memory.height);
      const at = x(data.memory.peak);
      const moved = at - (data.gutter + data.memory.peak * per);
      peak.setAttribute("transform", "translate(" + moved.toFixed(1) + ")");
      peak.style.display = at >= data.gutter && at <= data.width ? "" : "none";
    }
    function levels(m) {
      const size = m.layers.length + 2;
      const now = new Array(size).fill(0);
      const all = [];
      for (let i = 0; i < m.points.length; i += size) {
        for (let k = 0; k < size; k++) now[k] += m.points[i + k];
        all.push([...now]);
      }
      return all;
    }
    function tellMemory(t) {
      let [low, high] = [0, memory.length];
      while (high - low > 1) {
        const mid = (low + high) >> 1;
        if (memory[mid][0] <= t) low = mid;
        else high = mid;
      }
      const [, reserved, ...layers] = memory[low];
      const parts = data.memory.layers.map((l, i) => [l[0], layers[i]]).filter((p) => p[1] > 0);
      parts.sort((a, b) => b[1] - a[1]);
      const sum = layers.reduce((a, b) => a + b, 0);
      hover.textContent = "memory at " + place(t) + ": " + bytes(sum) + " allocated, " + bytes(reserved) + " reserved; " + parts.map((p) => p[0] + " " + bytes(p[1])).join(", ");
      const at = x(t).toFixed(1);
      cursor.innerHTML = '<path d="M' + at + " " + data.memory.top + "v" + data.memory.height + '" stroke="var(--ink)" stroke-width="2" stroke-dasharray="4 4"/>';
    }

    // Moves this timeline, and the others with it.
    function show(a, b) {
      move(a, b);
      if (link.checked) for (const other of timelines) if (other.move !== move && other.length === data.length) other.move(a, b);
    }
    function move(a, b) {
      const length = Math.min(Math.max(b - a, 200), data.length);
      from = Math.min(Math.max(a, 0), data.length - length);
      to = from + length;
      draw();
    }
    function zoom(factor, centre) {
      const c = centre === undefined ? (from + to) / 2 : centre;
      show(c - (c - from) * factor, c + (to - c) * factor);
    }
    function tell(i, s) {
      chosen = [i, s];
      hover.textContent =
        gaps === i
          ? "exposed by " + data.causes[s[6]] + ": " + time(s[1]) + " from " + place(s[0]) + " on, waiting for " + data.names[s[3]]
          : label(s) + ", " + data.phases[s[5]] + ", on " + data.lanes[i].name + ": " + time(s[1]) + " from " + place(s[0]) + " on; its start waited for " + data.waits[s[6]];
    }
    function find(event) {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * data.width;
      const py = ((event.clientY - box.top) / box.width) * data.width;
      const t = from + ((px - data.gutter) / width) * (to - from);
      return { t, lane: Math.floor((py - data.top) / (data.lane + data.gap)), px, py };
    }
    function nearest(lane, t) {
      let best = null;
      let least = (3 * (to - from)) / width;
      for (const s of lanes[lane] || []) {
        const d = t < s[0] ? s[0] - t : t > s[0] + s[1] ? t - s[0] - s[1] : 0;
        if (d <= least) {
          least = d;
          best = s;
          if (d === 0) break;
        }
      }
      return best;
    }
    function around(i, s) {
      tell(i, s);
      const room = Math.max(s[1] * 4, data.length / 200);
      show(s[0] + s[1] / 2 - room, s[0] + s[1] / 2 + room);
    }

    let drag = null;
    svg.addEventListener("pointermove", (event) => {
      const at = find(event);
      if (drag) {
        const moved = ((event.clientX - drag.x) / svg.getBoundingClientRect().width) * data.width;
        const shift = (-moved / width) * (drag.to - drag.from);
        show(drag.from + shift, drag.to + shift);
        return;
      }
      if (at.px < data.gutter) return;
      if (memory && at.py >= data.memory.top && at.py <= data.memory.top + data.memory.height) {
        if (chosen) {
          chosen = null;
          draw();
        }
        tellMemory(at.t);
        return;
      }
      const s = nearest(at.lane, at.t);
      if (s && !(chosen && chosen[1] === s)) {
        tell(at.lane, s);
        draw();
      }
    });
    svg.addEventListener("pointerleave", () => {
      if (drag) return;
      cursor.innerHTML = "";
      if (chosen) {
        chosen = null;
        draw();
      }
    });
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, from, to };
      svg.setPointerCapture(event.pointerId);
    });
    const drop = () => (drag = null);
    svg.addEventListener("pointerup", drop);
    svg.addEventListener("pointercancel", drop);
    svg.addEventListener("dblclick", (event) => zoom(0.25, find(event).t));
    svg.addEventListener(
      "wheel",
      (event) => {
        // Without Ctrl the page scrolls, as elsewhere.
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        zoom(event.deltaY > 0 ? 1.25 : 0.8, find(event).t);
      },
      { passive: false },
    );

    const acts = {
      in: () => zoom(0.5),
      out: () => zoom(2),
      left: () => show(from - (to - from) / 4, to - (to - from) / 4),
      right: () => show(from + (to - from) / 4, to + (to - from) / 4),
      all: () => {
        chosen = null;
        show(0, data.length);
      },
      gap: () => {
        if (gaps < 0) return;
        const centre = (from + to) / 2;
        const shown = to - from < data.length;
        around(gaps, lanes[gaps].find((s) => !shown || s[0] + s[1] / 2 > centre + 1) || lanes[gaps][0]);
      },
      peak: () => {
        if (!memory) return;
        chosen = null;
        const room = Math.min((to - from) / 2, data.length / 20);
        show(data.memory.peak - room, data.memory.peak + room);
        tellMemory(data.memory.peak);
      },
    };
    tools.addEventListener("click", (event) => {
      const act = event.target.dataset.act;
      if (act) acts[act]();
    });
    plot.addEventListener("keydown", (event) => {
      const act = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", h: "left", l: "right", g: "gap", p: "peak", 0: "all" }[event.key];
      if (act && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        acts[act]();
      }
    });
    search.addEventListener("input", () => {
      query = search.value.trim().toLowerCase();
      const found = query ? lanes.reduce((n, spans) => n + spans.filter(matches).length, 0) : 0;
      if (query) hover.textContent = found + (found === 1 ? " match" : " matches") + (found ? "; Enter goes to the next" : "");
      draw();
    });
    search.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !query) return;
      event.preventDefault();
      const all = lanes.flatMap((spans, i) => spans.filter(matches).map((s) => [i, s]));
      all.sort((a, b) => a[1][0] - b[1][0]);
      const centre = chosen ? chosen[1][0] : to - from < data.length ? (from + to) / 2 : -1;
      const next = all.find((m) => m[1][0] > centre) || all[0];
      if (next) around(...next);
    });
    return { move, length: data.length };
  }
})();
