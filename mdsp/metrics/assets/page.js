// Draws the report page from the JSON that it carries: line charts and stacked bars as SVG, the timeline on a canvas.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const root = document.documentElement;
const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const redraws = [];

function element(tag, attributes, parent, text) {
  const isSvg = ["svg", "g", "path", "line", "text", "rect", "circle"].includes(tag);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(4));
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8);
  tip.style.left = Math.max(0, left) + "px";
  tip.style.top = Math.max(0, top) + "px";
}
const hideTip = () => { tip.style.display = "none"; };

function legend(parent, items) {
  const box = element("div", { class: "legend" }, parent);
  for (const [label, color] of items) {
    const item = element("span", {}, box);
    element("i", { style: `background:var(--${color})` }, item);
    item.appendChild(document.createTextNode(label));
  }
}

const width = 560, height = 220, margin = { left: 52, right: 12, top: 8, bottom: 24 };

function frame(card, xs, ys, fromZero) {
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, card);
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (fromZero) y0 = Math.min(0, y0);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; if (!fromZero || y0 < 0) y0 -= pad; y1 += pad; }
  const x = (v) => margin.left + (v - x0) / (x1 - x0) * (width - margin.left - margin.right);
  const y = (v) => height - margin.bottom - (v - y0) / (y1 - y0) * (height - margin.top - margin.bottom);
  for (const value of ticks(y0, y1, 4)) {
    element("line", { x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value), stroke: "var(--grid)" }, svg);
    element("text", { x: margin.left - 6, y: y(value) + 4, "text-anchor": "end" }, svg, number(value));
  }
  for (const value of ticks(x0, x1, 6).filter(Number.isInteger)) {
    element("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, svg, number(value));
  }
  return { svg, x, y, x0, x1 };
}

function lineChart(parent, chart) {
  const series = chart.series.filter((s) => s.points.length);
  if (!series.length) return;
  const card = element("section", { class: "card chart", "data-chart": chart.id }, parent);
  element("h2", {}, card, chart.title);
  const xs = series.flatMap((s) => s.points.map((p) => p[0])), ys = series.flatMap((s) => s.points.map((p) => p[1]));
  const { svg, x, y, x0, x1 } = frame(card, xs, ys, chart.from_zero);
  series.forEach((s) => {
    const path = s.points.map((p, i) => (i ? "L" : "M") + x(p[0]).toFixed(1) + " " + y(p[1]).toFixed(1)).join("");
    const look = { d: path, fill: "none", stroke: `var(--${s.color})`, "stroke-width": 1.8, "stroke-linejoin": "round" };
    if (s.dashed) look["stroke-dasharray"] = "5 4";
    element("path", look, svg);
    if (s.points.length < 40) {
      for (const p of s.points) element("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.4, fill: `var(--${s.color})` }, svg);
    }
  });
  legend(card, series.map((s) => [s.name, s.color]));
  const cursor = element("line", { y1: margin.top, y2: height - margin.bottom, stroke: "var(--soft)", opacity: 0 }, svg);
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = x0 + ((event.clientX - box.left) / box.width * width - margin.left)
      / (width - margin.left - margin.right) * (x1 - x0);
    const nearest = (s) => s.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    const step = series.map(nearest).reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))[0];
    cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); cursor.setAttribute("opacity", 1);
    const lines = series.map((s) => [s, nearest(s)]).filter(([, p]) => p[0] === step)
      .map(([s, p]) => `${s.name}: ${number(p[1])} ${chart.unit}`);
    showTip(event, `step ${step}\n` + lines.join("\n"));
  });
  svg.addEventListener("mouseleave", () => { cursor.setAttribute("opacity", 0); hideTip(); });
}

function partsChart(parent, rows) {
  if (!rows.length) return;
  const card = element("section", { class: "card chart", "data-chart": "parts" }, parent);
  element("h2", {}, card, "Where the step went, mean over stages");
  const totals = rows.map((row) => data.parts.reduce((sum, part) => sum + row.seconds[part.name], 0));
  const { svg, y } = frame(card, rows.map((r) => r.step), [0, ...totals], true);
  svg.querySelectorAll('text[text-anchor="middle"]').forEach((label) => label.remove());
  const slot = (width - margin.left - margin.right) / rows.length;
  rows.forEach((row, index) => {
    let sum = 0;
    const group = element("g", { "data-step": row.step }, svg);
    for (const part of data.parts) {
      const value = row.seconds[part.name];
      if (value <= 0) continue;
      const top = y(sum + value);
      element("rect", { x: margin.left + index * slot + slot * 0.1, width: slot * 0.8, y: top, height: y(sum) - top,
        fill: `var(--${part.color})` }, group);
      sum += value;
    }
    if (index % Math.ceil(rows.length / 8) === 0) {
      element("text", { x: margin.left + (index + 0.5) * slot, y: height - 6, "text-anchor": "middle" }, svg, row.step);
    }
    group.addEventListener("mousemove", (event) => showTip(event, `step ${row.step}, ${number(sum)} s\n` + partsText(row.seconds)));
    group.addEventListener("mouseleave", hideTip);
  });
  legend(card, data.parts.filter((p) => rows.some((r) => r.seconds[p.name] > 0)).map((p) => [p.title, p.color]));
}

const partsText = (seconds) => data.parts.filter((p) => seconds[p.name] > 0)
  .map((p) => `${p.title}: ${(1e3 * seconds[p.name]).toFixed(1)} ms`).join("\n");

function stageTable(step) {
  const table = document.getElementById("stages");
  table.replaceChildren();
  const head = element("tr", {}, element("thead", {}, table));
  const columns = ["stage", "blocks", "busy ms", "bubble %", "memory GB", "where its step went"];
  columns.forEach((title) => element("th", {}, head, title));
  const body = element("tbody", {}, table);
  for (const row of step.stages) {
    const tr = element("tr", { "data-stage": row.stage }, body);
    for (const text of [row.stage, row.blocks ?? "", (1e3 * row.busy_s).toFixed(1), (100 * row.bubble).toFixed(1),
      row.memory_bytes == null ? "" : (row.memory_bytes / 1e9).toFixed(2)]) element("td", {}, tr, text);
    const stack = element("div", { class: "stack" }, element("td", { class: "bar" }, tr));
    const total = data.parts.reduce((sum, part) => sum + row.seconds[part.name], 0);
    for (const part of data.parts) {
      const share = 100 * row.seconds[part.name] / total;
      if (share > 0) element("i", { style: `width:${share}%;background:var(--${part.color})` }, stack);
    }
    stack.addEventListener("mousemove", (event) => showTip(event, `stage ${row.stage}\n` + partsText(row.seconds)));
    stack.addEventListener("mouseleave", hideTip);
  }
}

function gantt() {
  const canvas = document.getElementById("gantt"), choice = document.getElementById("step");
  let step, view, drag = null;
  const left = 64, axis = 22;
  const rowHeight = () => Math.max(9, Math.min(28, 640 / step.stages.length));

  function draw() {
    const wide = canvas.clientWidth, high = step.stages.length * rowHeight() + axis, ratio = window.devicePixelRatio || 1;
    canvas.style.height = high + "px";
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    const paint = canvas.getContext("2d");
    paint.scale(ratio, ratio);
    paint.clearRect(0, 0, wide, high);
    paint.font = "11px system-ui, sans-serif";
    const x = (t) => left + (t - view[0]) / (view[1] - view[0]) * (wide - left);
    const tall = rowHeight(), gap = tall > 14 ? 2 : 1;
    const every = Math.ceil(13 / tall);
    let drawn = 0;
    step.stages.forEach((stage, row) => {
      paint.fillStyle = css("grid");
      paint.fillRect(left, row * tall, wide - left, tall - gap);
      if (row % every === 0) {
        paint.fillStyle = css("soft");
        paint.fillText("stage " + stage.stage, 2, row * tall + Math.min(tall, 16) - 3);
      }
    });
    const colors = {};
    for (const kind of data.kinds) colors[kind.name] = css(kind.color);
    const rowOf = new Map(step.stages.map((s, row) => [s.stage, row]));
    for (const [stage, , kind, micro, start, end] of step.instructions) {
      if (end < view[0] || start > view[1] || end <= start) continue;
      const nested = data.kinds[kind].name === "tensor_parallel";
      const from = Math.max(left, x(start)), to = Math.min(wide, x(end));
      const top = rowOf.get(stage) * tall + (nested ? tall * 0.6 : 0), deep = nested ? tall * 0.4 - gap : tall - gap;
      paint.fillStyle = colors[data.kinds[kind].name];
      paint.fillRect(from, top, Math.max(0.4, to - from - (to - from > 3 ? 0.6 : 0)), deep);
      if (data.kinds[kind].compute && micro >= 0 && to - from > 18 && tall > 14) {
        paint.fillStyle = css("page");
        paint.fillText(micro, from + 3, top + tall / 2 + 3);
      }
      drawn += 1;
    }
    paint.fillStyle = css("soft");
    for (const t of ticks(view[0], view[1], 8)) {
      paint.fillText(number(1e3 * t) + " ms", Math.min(x(t), wide - 48), high - 6);
    }
    canvas.dataset.drawn = drawn;
  }

  function choose(index) {
    step = data.timelines[index];
    view = [0, step.length_s];
    document.getElementById("gantt-title").textContent =
      `Step ${step.step}: ${(1e3 * step.length_s).toFixed(1)} ms, bubble ${(100 * step.bubble).toFixed(1)} % ` +
      `(theory ${(100 * step.theory).toFixed(1)} %)`;
    draw();
    stageTable(step);
  }

  const timeAt = (event) => {
    const box = canvas.getBoundingClientRect();
    return view[0] + (event.clientX - box.left - left) / (box.width - left) * (view[1] - view[0]);
  };
  canvas.addEventListener("mousemove", (event) => {
    if (drag) {
      const moved = drag.time - timeAt(event), span = view[1] - view[0];
      const start = Math.max(0, Math.min(step.length_s - span, view[0] + moved));
      view = [start, start + span];
      draw();
      return;
    }
    const stage = step.stages[Math.floor((event.clientY - canvas.getBoundingClientRect().top) / rowHeight())];
    const time = timeAt(event);
    if (!stage || time < view[0]) return hideTip();
    let hit = null;
    for (const row of step.instructions) {
      if (row[0] === stage.stage && row[4] <= time && time <= row[5] && (!hit || row[4] >= hit[4])) hit = row;
    }
    if (!hit) return showTip(event, `stage ${stage.stage}: idle at ${(1e3 * time).toFixed(1)} ms`);
    const micro = hit[3] >= 0 ? `, micro-batch ${hit[3]}` : "";
    showTip(event, `${data.kinds[hit[2]].title}${micro}\n${(1e3 * (hit[5] - hit[4])).toFixed(2)} ms from `
      + `${(1e3 * hit[4]).toFixed(2)} ms\nstage ${hit[0]}, rank ${hit[1]}`);
  });
  canvas.addEventListener("mouseleave", () => { drag = null; hideTip(); });
  canvas.addEventListener("mousedown", (event) => { drag = { time: timeAt(event) }; });
  window.addEventListener("mouseup", () => { drag = null; });
  canvas.addEventListener("dblclick", () => { view = [0, step.length_s]; draw(); });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    zoom(Math.exp((event.deltaY || event.deltaX) / 400), timeAt(event));
  }, { passive: false });
  function zoom(factor, at) {
    const span = Math.max(1e-6, Math.min(step.length_s, (view[1] - view[0]) * factor));
    const start = Math.max(0, Math.min(step.length_s - span, at - (at - view[0]) / (view[1] - view[0]) * span));
    view = [start, start + span];
    draw();
  }
  document.getElementById("in").addEventListener("click", () => zoom(0.5, (view[0] + view[1]) / 2));
  document.getElementById("out").addEventListener("click", () => zoom(2, (view[0] + view[1]) / 2));
  data.timelines.forEach((t, index) => element("option", { value: index }, choice, `step ${t.step}`));
  choice.value = data.timelines.length - 1;
  choice.addEventListener("change", () => choose(+choice.value));
  const used = new Set(data.timelines.flatMap((t) => t.instructions.map((row) => row[2])));
  const colors = new Map(data.kinds.filter((_, i) => used.has(i)).map((kind) => [kind.color, kind.legend]));
  legend(document.getElementById("gantt-card"), [...colors].map(([color, title]) => [title, color]));
  choose(data.timelines.length - 1);
  redraws.push(draw);
  window.addEventListener("resize", draw);
}

function theme(name) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "light" : "dark";
  redraws.forEach((draw) => draw());
}
document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

const charts = document.getElementById("charts");
data.charts.forEach((chart) => lineChart(charts, chart));
if (data.part_rows) partsChart(charts, data.part_rows);
if (data.timelines && data.timelines.length) gantt();
root.dataset.ready = "yes";
