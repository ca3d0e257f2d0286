// How each kind of series becomes SVG.

const SVG = "http://www.w3.org/2000/svg";
const ink = color => (color < 0 ? "var(--neutral)" : `var(--c${color % 8})`);

function svg(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

// Runs of consecutive points that can be shown: a gap in the data is a gap in the line.
function runs(points) {
  const found = [[]];
  for (const point of points) point.every(Number.isFinite) ? found.at(-1).push(point) : found.push([]);
  return found.filter(run => run.length);
}

const path = points => "M" + points.map(p => `${p[0].toFixed(1)},${p[1].toFixed(1)}`).join("L");

function drawLine(series, x, y, group) {
  const look = { fill: "none", stroke: ink(series.color), "stroke-width": series.kind === "faint" ? 1 : 1.8, "stroke-linejoin": "round" };
  if (series.kind === "faint") look.opacity = 0.45;
  if (series.dashed) look["stroke-dasharray"] = "5 4";
  for (const run of runs(series.x.map((v, i) => [x.at(v), y.at(series.y[i])]))) {
    if (run.length > 1) svg("path", { ...look, d: path(run) }, group);
    else svg("circle", { cx: run[0][0], cy: run[0][1], r: 2.5, fill: ink(series.color) }, group);
  }
}

function drawPoints(series, x, y, group) {
  const many = series.x.length > 60;
  const look = many ? { r: 1.7, "fill-opacity": 0.45 } : { r: 4, stroke: "var(--page)", "stroke-width": 1.2 };
  const points = series.x.map((v, i) => [x.at(v), y.at(series.y[i])]).filter(p => p.every(Number.isFinite));
  if (!many && !x.width && points.length > 1) svg("path", { d: path(points), fill: "none", stroke: ink(series.color), "stroke-dasharray": "2 4" }, group);
  for (const [cx, cy] of points) svg("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), fill: ink(series.color), ...look }, group);
}

function drawBand(series, x, y, group) {
  const edge = series.x.map((v, i) => [x.at(v), y.at(series.low[i]), y.at(series.high[i])]);
  for (const run of runs(edge)) {
    const there = run.map(p => [p[0], p[1]]), back = run.map(p => [p[0], p[2]]).reverse();
    svg("path", { d: path([...there, ...back]) + "Z", fill: ink(series.color), "fill-opacity": 0.18, stroke: "none" }, group);
  }
  if (series.y.some(v => v !== null)) drawLine({ ...series, kind: "line" }, x, y, group);
}

// A histogram's outline: level over each bin, edges half way between the middles.
function drawSteps(series, x, y, group) {
  const at = series.x.map(v => x.at(v)), n = at.length;
  const edges = at.map((p, i) => (i ? (p + at[i - 1]) / 2 : n > 1 ? p - (at[1] - p) / 2 : p - 4));
  edges.push(n > 1 ? at[n - 1] + (at[n - 1] - at[n - 2]) / 2 : at[0] + 4);
  const tops = series.y.map(v => { const top = y.at(v); return Number.isFinite(top) ? top : y.base; });
  const outline = [[edges[0], y.base]];
  tops.forEach((top, i) => outline.push([edges[i], top], [edges[i + 1], top]));
  outline.push([edges[n], y.base]);
  const look = { d: path(outline), fill: ink(series.color), "fill-opacity": series.dashed ? 0 : 0.12, stroke: ink(series.color), "stroke-width": 1.4 };
  if (series.dashed) look["stroke-dasharray"] = "4 3";
  svg("path", look, group);
}

function drawBars(series, x, y, group, place) {
  const room = Math.min(x.width * 0.76, 60 * place.count), width = room / place.count;
  series.x.forEach((name, i) => {
    const top = y.at(series.y[i]);
    if (!Number.isFinite(top)) return;
    const left = x.at(name) - room / 2 + place.index * width;
    const [up, down] = [Math.min(top, y.base), Math.max(top, y.base)];
    svg("rect", { x: left + 0.5, y: up, width: Math.max(1, width - 1), height: Math.max(0.8, down - up), fill: ink(series.color),
      "fill-opacity": series.dashed ? 0.45 : 1 }, group);
    if (series.low.length) {
      const middle = left + width / 2, [a, b] = [y.at(series.low[i]), y.at(series.high[i])];
      if (Number.isFinite(a) && Number.isFinite(b)) svg("path", { d: `M${middle},${a}V${b}`, stroke: "var(--ink)", "stroke-width": 1.2 }, group);
    }
  });
}

// Areas on each other, the first at the bottom; each as a band between the sums below and above it.
function stacked(all) {
  let sum = [];
  return all.map(series => {
    if (series.kind !== "stack") return series;
    const low = series.x.map((_, i) => sum[i] || 0);
    sum = series.x.map((_, i) => (sum[i] || 0) + (series.y[i] || 0));
    return { ...series, low, high: sum, values: series.y };
  });
}

function drawStack(series, x, y, group) {
  const there = series.x.map((v, i) => [x.at(v), y.at(series.low[i])]), back = series.x.map((v, i) => [x.at(v), y.at(series.high[i])]).reverse();
  svg("path", { d: path([...there, ...back]) + "Z", fill: ink(series.color), "fill-opacity": 0.85, stroke: "var(--page)", "stroke-width": 0.6 }, group);
}

const DRAW = { line: drawLine, faint: drawLine, points: drawPoints, band: drawBand, steps: drawSteps, bars: drawBars, stack: drawStack };
