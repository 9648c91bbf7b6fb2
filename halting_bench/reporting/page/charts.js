// Draws the page's pictures from the JSON inside it. No library, no network.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const AXES = {
  mean_depth: "mean depth (core steps a token)",
  flops_per_token: "FLOPs a token",
  latency_ms_per_token: "latency (ms a token)",
};
const MARKERS = {
  o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  "^": (r) => `M0,${-r * 1.2}L${r * 1.15},${r * 0.9}H${-r * 1.15}z`,
  D: (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0z`,
  v: (r) => `M0,${r * 1.2}L${r * 1.15},${-r * 0.9}H${-r * 1.15}z`,
  P: (r) => `M${-r * 0.4},${-r * 1.2}h${r * 0.8}v${r * 0.8}h${r * 0.8}v${r * 0.8}h${-r * 0.8}v${r * 0.8}h${-r * 0.8}v${-r * 0.8}h${-r * 0.8}v${-r * 0.8}h${r * 0.8}z`,
  X: (r) => `M${-r},${-r * 0.5}L${-r * 0.5},${-r}L0,${-r * 0.5}L${r * 0.5},${-r}L${r},${-r * 0.5}L${r * 0.5},0L${r},${r * 0.5}L${r * 0.5},${r}L0,${r * 0.5}L${-r * 0.5},${r}L${-r},${r * 0.5}L${-r * 0.5},0z`,
};

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

// A scale from data to pixels, with the values of its ticks.
function scaleOf(values, low, high, log) {
  const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  if (!known.length) return null;
  let [first, last] = [Math.min(...known), Math.max(...known)];
  if (first === last) [first, last] = log ? [first / 2, last * 2] : [first - 1, last + 1];
  const bend = log ? Math.log10 : (value) => value;
  const pad = (bend(last) - bend(first)) * 0.04;
  const [a, b] = [bend(first) - pad, bend(last) + pad];
  const at = (value) => low + ((bend(value) - a) / (b - a)) * (high - low);
  const ticks = [];
  if (log) {
    const wide = b - a > 2.5;
    for (let power = Math.floor(a); power <= Math.ceil(b); power++)
      for (const digit of wide ? [1] : [1, 2, 5]) {
        const value = digit * 10 ** power;
        if (Math.log10(value) >= a && Math.log10(value) <= b) ticks.push(value);
      }
  }
  if (!log || ticks.length < 2) {
    ticks.length = 0;
    const [from, to] = log ? [10 ** a, 10 ** b] : [a, b];
    const raw = (to - from) / Math.max(2, Math.abs(high - low) / 80);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= raw);
    for (let value = Math.ceil(from / step) * step; value <= to + step * 1e-9; value += step) ticks.push(value);
  }
  return { at, ticks };
}

// Axes, grid and labels of a chart; null scales when there is nothing to draw.
function frame(svg, xs, ys, labels, log) {
  const width = Math.max(280, svg.parentNode.clientWidth), height = Math.min(520, Math.max(300, width * 0.5));
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const x = scaleOf(xs, 58, width - 14, log.x), y = scaleOf(ys, height - 44, 30, log.y);
  if (!x || !y) {
    element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg).textContent = "Nothing to draw: choose another axis or policy.";
    return null;
  }
  for (const tick of x.ticks) {
    element("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: 30, y2: height - 44 }, svg);
    element("text", { x: x.at(tick), y: height - 28, "text-anchor": "middle" }, svg).textContent = short(tick);
  }
  for (const tick of y.ticks) {
    element("line", { class: "grid", x1: 58, x2: width - 14, y1: y.at(tick), y2: y.at(tick) }, svg);
    element("text", { x: 52, y: y.at(tick) + 4, "text-anchor": "end" }, svg).textContent = short(tick);
  }
  element("text", { x: (width + 44) / 2, y: height - 8, "text-anchor": "middle" }, svg).textContent = labels.x;
  element("text", { x: 12, y: 18 }, svg).textContent = labels.y;
  return { x, y, width, height };
}

function line(svg, scales, xs, ys, look) {
  let path = "", pen = "M";
  xs.forEach((value, i) => {
    const [px, py] = [scales.x.at(value), scales.y.at(ys[i])];
    if (!Number.isFinite(px) || !Number.isFinite(py)) { pen = "M"; return; }
    path += `${pen}${px.toFixed(1)},${py.toFixed(1)}`;
    pen = "L";
  });
  if (path) element("path", { d: path, fill: "none", stroke: look.colour, "stroke-width": look.width || 2, "stroke-dasharray": look.dash || "" }, svg);
}

function choose(select, names, labels) {
  select.replaceChildren(...names.map((name, i) => new Option(labels ? labels[i] : name, name)));
}


const pareto = { svg: $("pareto"), tip: $("pareto-tip"), marks: [], at: -1, shown: new Set() };

function pair() { return data.pairs[Number($("pair").value)]; }

function rowsOf(one, policy) {
  const index = one.policies.indexOf(policy), rows = [];
  one.points.policy.forEach((value, row) => { if (value === index) rows.push(row); });
  return rows;
}

function listPolicies() {
  const one = pair(), box = $("policies");
  pareto.shown = new Set(one.shown);
  box.replaceChildren(...one.policies.map((policy) => {
    const label = document.createElement("label"), tick = document.createElement("input");
    tick.type = "checkbox"; tick.value = policy; tick.checked = pareto.shown.has(policy);
    tick.addEventListener("change", () => { pareto.shown[tick.checked ? "add" : "delete"](policy); drawPareto(); });
    const look = one.looks[policy], sample = element("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" });
    element("path", { d: MARKERS[look.marker](5), fill: look.colour }, sample);
    label.append(tick, sample, policy);
    return label;
  }));
  const costs = Object.keys(AXES).filter((axis) => one.points[axis].some((value) => value !== null));
  const before = $("axis").value;
  choose($("axis"), costs, costs.map((axis) => AXES[axis]));
  if (costs.includes(before)) $("axis").value = before;
}

function drawPareto() {
  const one = pair(), axis = $("axis").value, p = one.points, xs = [], ys = [], series = [];
  const both = p.evidence.includes("replayed") && p.evidence.includes("executed");
  for (const policy of one.policies) {
    if (!pareto.shown.has(policy)) continue;
    const rows = rowsOf(one, policy).filter((row) => p[axis][row] !== null && p.quality[row] !== null);
    rows.sort((a, b) => p[axis][a] - p[axis][b]);
    const curve = axis === "mean_depth" && one.curves[policy];
    const replayed = rows.filter((row) => p.evidence[row] === "replayed");  // what was acted out lies beside the line, not on it
    const through = replayed.length ? replayed : rows;
    const drawn = curve ? [curve.mean_depth, curve.quality] : [through.map((row) => p[axis][row]), through.map((row) => p.quality[row])];
    series.push({ policy, rows, drawn });
    xs.push(...drawn[0], ...rows.map((row) => p[axis][row]));
    ys.push(...drawn[1], ...rows.map((row) => p.quality[row]));
  }
  const log = { x: $("log-x").checked, y: $("log-y").checked };
  const scales = frame(pareto.svg, xs, ys, { x: AXES[axis], y: one.label }, log);
  pareto.marks = []; pareto.at = -1; pareto.tip.hidden = true;
  if (!scales) return;
  for (const { policy, rows, drawn } of series) {
    const look = one.looks[policy];
    if (axis !== "latency_ms_per_token") line(pareto.svg, scales, drawn[0], drawn[1], look);
    for (const row of rows) {
      const [x, y] = [scales.x.at(p[axis][row]), scales.y.at(p.quality[row])];
      if (!Number.isFinite(x) || !Number.isFinite(y)) continue;
      const star = one.iso[policy] !== undefined && one.iso[policy] === p.threshold[row];
      const acted = both && p.evidence[row] === "executed";
      element("path", {
        class: "mark", d: MARKERS[look.marker](star ? 7 : acted ? 5 : 3.5), transform: `translate(${x},${y})`,
        fill: acted ? "var(--panel)" : look.colour, stroke: acted ? look.colour : star ? "var(--ink)" : "var(--panel)",
        "stroke-width": acted ? 2.5 : star ? 1.5 : 0.7, "data-row": row,
      }, pareto.svg);
      pareto.marks.push({ x, y, row, policy });
    }
  }
  if (axis === "mean_depth" && one.full_depth !== null) {
    const x = scales.x.at(one.full_depth);
    element("line", { x1: x, x2: x, y1: 30, y2: scales.height - 44, stroke: "var(--soft)", "stroke-dasharray": "2 4" }, pareto.svg);
    const edge = x > scales.width - 80;
    element("text", { x, y: 25, "text-anchor": edge ? "end" : "start" }, pareto.svg).textContent = "full depth";
  }
  pareto.svg.setAttribute("aria-label", `${one.label} of ${one.name} against ${AXES[axis]}: ${series.length} policies, ${pareto.marks.length} points. Arrow keys read them.`);
}

function describe(mark) {
  const p = pair().points, row = mark.row, lines = [];
  lines.push(mark.policy + (p.threshold[row] === null ? "" : `, threshold ${short(p.threshold[row])}`));
  lines.push(`${pair().label}: ${short(p.quality[row])} [${short(p.quality_lo[row])}, ${short(p.quality_hi[row])}]`);
  lines.push(`mean depth ${short(p.mean_depth[row])}, FLOPs ${short(p.flops_per_token[row])}`);
  if (p.latency_ms_per_token[row] !== null) lines.push(`${short(p.latency_ms_per_token[row])} ms a token (p10 ${short(p.p10[row])}, p90 ${short(p.p90[row])})${p.noisy[row] ? ", noisy" : ""}`);
  if (p.never_fired_fraction[row] > 0) lines.push(`never fired: ${short(100 * p.never_fired_fraction[row])} % of tokens`);
  lines.push(p.evidence[row]);
  return lines;
}

function tell(index, aloud) {
  pareto.at = index;
  const mark = pareto.marks[index], lines = describe(mark), tip = pareto.tip;
  tip.replaceChildren(...lines.flatMap((text, i) => (i ? [document.createElement("br"), text] : [text])));
  tip.hidden = false;
  const ratio = pareto.svg.clientWidth / pareto.svg.viewBox.baseVal.width;
  const left = Math.min(mark.x * ratio + 12, pareto.svg.clientWidth - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, mark.y * ratio - tip.offsetHeight - 10)}px`;
  if (aloud) $("said").textContent = lines.join("; ");
}

function nearest(event) {
  const box = pareto.svg.getBoundingClientRect(), ratio = pareto.svg.viewBox.baseVal.width / box.width;
  const [x, y] = [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
  let best = -1, least = 26 ** 2;
  pareto.marks.forEach((mark, i) => {
    const distance = (mark.x - x) ** 2 + (mark.y - y) ** 2;
    if (distance < least) [best, least] = [i, distance];
  });
  if (best < 0) pareto.tip.hidden = true; else tell(best, false);
}

function readByKey(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") { pareto.tip.hidden = true; return; }
  if (!step || !pareto.marks.length) return;
  event.preventDefault();
  const count = pareto.marks.length;
  let next = pareto.at < 0 ? (step > 0 ? 0 : count - 1) : (pareto.at + step + count) % count;
  if (pareto.at >= 0 && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    const policy = pareto.marks[pareto.at].policy;
    while (pareto.marks[next].policy === policy && next !== pareto.at) next = (next + step + count) % count;
  }
  tell(next, true);
}


function listSignals() {
  const names = Object.keys(pair().convergence);
  choose($("signal"), names);
}

function drawConvergence() {
  const one = pair().convergence[$("signal").value], svg = $("convergence");
  if (!one) { svg.replaceChildren(); return; }
  const scales = frame(svg, one.step, [...one.median, ...one.p10, ...one.p90], { x: "recurrence step k", y: `${$("signal").value}: median, 10th and 90th percentile` }, { x: false, y: $("log-signal").checked });
  if (!scales) return;
  line(svg, scales, one.step, one.p10, { colour: "var(--soft)", width: 1, dash: "4 3" });
  line(svg, scales, one.step, one.p90, { colour: "var(--soft)", width: 1, dash: "4 3" });
  line(svg, scales, one.step, one.median, { colour: "var(--accent)" });
  svg.setAttribute("aria-label", `${$("signal").value} by step: the median goes from ${short(one.median[0])} to ${short(one.median[one.median.length - 1])}.`);
}


function colourOf(depth, last) {
  const share = last > 1 ? (depth - 1) / (last - 1) : 0;  // a blue of growing strength, readable on either background
  return `rgb(0 114 178 / ${(0.05 + 0.85 * share).toFixed(3)})`;
}

function inkOf(depth, last) { return last > 1 && (depth - 1) / (last - 1) > 0.62 ? "#ffffff" : "inherit"; }

function listTexts() {
  const one = pair().text;
  $("text-section").hidden = !one;
  if (one) choose($("text-policy"), Object.keys(one.exits));
}

function drawText() {
  const one = pair().text;
  if (!one) return;
  const exits = one.exits[$("text-policy").value], last = Math.max(...Object.values(one.exits).flat());
  $("text").replaceChildren(...one.tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token;
    if (exits[i] !== null) {
      span.style.background = colourOf(exits[i], last);
      span.style.color = inkOf(exits[i], last);
      span.title = `${exits[i]} loops`;
    }
    return span;
  }));
  const depths = [...new Set(exits.filter((value) => value !== null))].sort((a, b) => a - b);
  $("text-scale").replaceChildren("loops: ", ...depths.map((depth) => {
    const key = document.createElement("span");
    key.textContent = depth; key.style.background = colourOf(depth, last); key.style.color = inkOf(depth, last);
    return key;
  }));
  const known = exits.filter((value) => value !== null), mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  $("text-mean").textContent = `${known.length} scored tokens, mean depth ${short(mean)}.`;
}


function sortable(table) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending", body = table.tBodies[0];
      table.querySelectorAll("thead th").forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = [...body.rows].map((row) => [row.cells[column].dataset.value ?? row.cells[column].textContent, row]);
      const numeric = head.dataset.numeric === "true";
      keyed.sort(([a], [b]) => {
        if (!numeric) return a.localeCompare(b) * (down ? -1 : 1);
        if (a === "" || b === "") return (a === "") - (b === "");  // what is missing stays last
        return (Number(a) - Number(b)) * (down ? -1 : 1);
      });
      body.append(...keyed.map(([, row]) => row));
    });
  });
}

function choosePair() { listPolicies(); listSignals(); listTexts(); redraw(); }
function redraw() { drawPareto(); drawConvergence(); drawText(); }

document.querySelectorAll("table.sortable").forEach(sortable);
if (data.pairs.length) {
  choose($("pair"), data.pairs.map((_, i) => i), data.pairs.map((one) => one.name));
  $("pair").addEventListener("change", choosePair);
  for (const id of ["axis", "log-x", "log-y"]) $(id).addEventListener("change", drawPareto);
  for (const id of ["signal", "log-signal"]) $(id).addEventListener("change", drawConvergence);
  $("text-policy").addEventListener("change", drawText);
  $("all").addEventListener("click", () => { pareto.shown = new Set(pair().policies); tickAll(true); });
  $("none").addEventListener("click", () => { pareto.shown = new Set(); tickAll(false); });
  pareto.svg.addEventListener("pointermove", nearest);
  pareto.svg.addEventListener("pointerdown", nearest);
  pareto.svg.addEventListener("pointerleave", () => { pareto.tip.hidden = true; });
  pareto.svg.addEventListener("keydown", readByKey);
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); }
  }).observe(document.body);
  choosePair();
}
function tickAll(on) { $("policies").querySelectorAll("input").forEach((tick) => { tick.checked = on; }); drawPareto(); }
document.documentElement.dataset.ready = Math.round(performance.now());
