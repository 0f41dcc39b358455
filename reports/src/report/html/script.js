"use strict";
// The page works without this; with it, the theme can be chosen and timelines can be zoomed into.
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

  const digits = (x) => (x >= 100 ? x.toFixed(1) : x >= 1 ? x.toFixed(2) : x.toFixed(4));
  const time = (ns) => (ns >= 1e6 ? digits(ns / 1e6) + " ms" : ns >= 1e3 ? digits(ns / 1e3) + " us" : ns.toFixed(0) + " ns");
  const text = (s) => s.replace(/[&<>"]/g, (c) => "&#" + c.charCodeAt(0) + ";");

  for (const figure of document.querySelectorAll(".timeline")) start(figure);

  function start(figure) {
    const data = JSON.parse(figure.querySelector(".spans").textContent);
    const svg = figure.querySelector("svg");
    const bars = svg.querySelector(".bars");
    const axis = svg.querySelector(".axis");
    const whole = [bars.innerHTML, axis.innerHTML];
    const hover = figure.querySelector(".hover");
    const tools = figure.querySelector(".tools");
    const plot = figure.querySelector(".plot");
    hover.hidden = tools.hidden = false;
    figure.classList.add("live");
    plot.setAttribute("aria-label", svg.querySelector("title").textContent + ": plus and minus zoom, arrows move, g goes to the next exposed gap, 0 shows all");
    const lanes = data.lanes.map((lane) => {
      const spans = [];
      let at = 0;
      for (let i = 0; i < lane.spans.length; i += 7) {
        at += lane.spans[i];
        spans.push([at, ...lane.spans.slice(i + 1, i + 7)]);
      }
      return spans;
    });
    const gaps = data.lanes.findIndex((lane) => lane.name === "exposed");
    let from = 0;
    let to = data.length;
    let chosen = null;

    const span = data.width - data.gutter;
    const x = (t) => data.gutter + ((t - from) / (to - from)) * span;
    const bottom = data.top + lanes.length * (data.lane + data.gap);

    function draw() {
      if (from <= 0 && to >= data.length && !chosen) {
        [bars.innerHTML, axis.innerHTML] = whole;
        return;
      }
      let out = "";
      lanes.forEach((spans, i) => {
        const y = data.top + i * (data.lane + data.gap);
        const paths = {};
        const open = {};
        const put = (c) => {
          const [a, b] = open[c];
          const w = Math.max(b - a, 0.7);
          paths[c] = (paths[c] || "") + "M" + a.toFixed(1) + " " + y + "h" + w.toFixed(1) + "v" + data.lane + "h-" + w.toFixed(1) + "z";
        };
        for (const s of spans) {
          if (s[0] + s[1] < from) continue;
          if (s[0] > to) break;
          const a = Math.max(x(s[0]), data.gutter);
          const b = Math.min(x(s[0] + s[1]), data.width);
          const c = s[2];
          if (open[c] && a - open[c][1] < 0.7) open[c][1] = Math.max(open[c][1], b);
          else {
            if (open[c]) put(c);
            open[c] = [a, b];
          }
        }
        for (const c in open) put(c);
        for (const c in paths) out += '<path fill="var(--' + (c === "8" ? "bad" : "c" + c) + ')" d="' + paths[c] + '"/>';
        // Names where there is room for them.
        for (const s of spans) {
          if (s[0] + s[1] < from) continue;
          if (s[0] > to) break;
          const a = Math.max(x(s[0]), data.gutter);
          const w = Math.min(x(s[0] + s[1]), data.width) - a;
          const name = data.names[s[3]];
          if (w > 13 * name.length + 10)
            out += '<text x="' + (a + 5).toFixed(1) + '" y="' + (y + data.lane * 0.66) + '" font-size="22" fill="var(--ground)">' + text(name) + "</text>";
        }
        if (chosen && chosen[0] === i) {
          const s = chosen[1];
          const a = Math.max(x(s[0]), data.gutter);
          const w = Math.min(x(s[0] + s[1]), data.width) - a;
          out += '<rect x="' + a + '" y="' + (y - 3) + '" width="' + Math.max(w, 2) + '" height="' + (data.lane + 6) + '" fill="none" stroke="var(--ink)" stroke-width="3"/>';
        }
      });
      bars.innerHTML = out;
      // Round numbers, with as many decimals as tell them apart.
      let ticks = "";
      const rough = (to - from) / 8;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
      const decimals = Math.max(0, 6 - Math.floor(Math.log10(step) + 1e-9));
      for (let k = Math.ceil(from / step - 1e-9); k * step <= to; k++) {
        const at = x(k * step);
        const anchor = at < data.gutter + 60 ? "start" : at > data.width - 60 ? "end" : "middle";
        ticks += '<path d="M' + at.toFixed(1) + " " + bottom + 'v8" stroke="var(--faint)"/><text x="' + at.toFixed(1) + '" y="' + (bottom + 34) + '" text-anchor="' + anchor + '" fill="var(--faint)">' + ((k * step) / 1e6).toFixed(decimals) + " ms</text>";
      }
      axis.innerHTML = ticks;
    }

    function show(a, b) {
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
      const unit = data.units[s[4]];
      hover.textContent =
        gaps === i
          ? "exposed by " + data.causes[s[6]] + ": " + time(s[1]) + " from " + (s[0] / 1e6).toFixed(4) + " ms on"
          : data.names[s[3]] + (unit ? " of " + unit : "") + ", " + data.phases[s[5]] + ", on " + data.lanes[i].name + ": " + time(s[1]) + " from " + (s[0] / 1e6).toFixed(4) + " ms on; its start waited for " + data.waits[s[6]];
    }
    function find(event) {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * data.width;
      const py = ((event.clientY - box.top) / box.width) * data.width - data.top;
      const t = from + ((px - data.gutter) / span) * (to - from);
      const lane = Math.floor(py / (data.lane + data.gap));
      return { t, lane, px };
    }
    function nearest(lane, t) {
      const near = (3 * (to - from)) / span;
      let best = null;
      let least = near;
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

    let drag = null;
    svg.addEventListener("pointermove", (event) => {
      const at = find(event);
      if (drag) {
        const moved = ((event.clientX - drag.x) / svg.getBoundingClientRect().width) * data.width;
        if (Math.abs(moved) > 3) drag.moved = true;
        const shift = (-moved / span) * (drag.to - drag.from);
        show(drag.from + shift, drag.to + shift);
        return;
      }
      const s = at.px >= data.gutter ? nearest(at.lane, at.t) : null;
      if (s && !(chosen && chosen[1] === s)) {
        tell(at.lane, s);
        draw();
      }
    });
    svg.addEventListener("pointerleave", () => {
      if (!drag && chosen) {
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
        const next = lanes[gaps].find((s) => !shown || s[0] + s[1] / 2 > centre + 1) || lanes[gaps][0];
        tell(gaps, next);
        const room = Math.max(next[1] * 4, data.length / 200);
        show(next[0] + next[1] / 2 - room, next[0] + next[1] / 2 + room);
      },
    };
    tools.addEventListener("click", (event) => {
      const act = event.target.dataset.act;
      if (act) acts[act]();
    });
    plot.addEventListener("keydown", (event) => {
      const act = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", h: "left", l: "right", g: "gap", 0: "all" }[event.key];
      if (act && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        acts[act]();
      }
    });
  }
})();
