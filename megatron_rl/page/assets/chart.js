// One figure: axes, marks, legend, and what the pointer or the arrow keys point at.

function visibleValues(series) {
  if (series.kind === "stack" || series.kind === "band") return [...series.low, ...series.high, ...(series.kind === "band" ? series.y : [])];
  return [...series.y, ...series.low, ...series.high];
}

class Chart {
  constructor(box, figure) {
    Object.assign(this, { box, figure, hidden: new Set(), width: 0 });
    if (figure.series.length > 1) this.addLegend();
    this.holder = box.appendChild(document.createElement("div"));
    this.tip = box.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
  }

  addLegend() {
    const legend = this.box.appendChild(document.createElement("div"));
    legend.className = "legend";
    this.figure.series.forEach((series, index) => {
      const key = legend.appendChild(document.createElement("button"));
      key.type = "button";
      key.ariaPressed = "true";
      key.title = "Show or hide";
      this.swatch(series, key);
      key.append(series.name);
      key.addEventListener("click", () => {
        this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
        key.ariaPressed = String(!this.hidden.has(index));
        this.draw();
      });
    });
  }

  swatch(series, parent) {
    const area = svg("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" }, parent);
    if (["bars", "stack", "steps"].includes(series.kind)) svg("rect", { x: 4, y: 0, width: 12, height: 10, fill: ink(series.color), "fill-opacity": series.dashed ? 0.45 : 1 }, area);
    else if (series.kind === "band") svg("rect", { x: 0, y: 1, width: 20, height: 8, fill: ink(series.color), "fill-opacity": 0.3 }, area);
    else if (series.kind === "points") svg("circle", { cx: 10, cy: 5, r: 4, fill: ink(series.color) }, area);
    else svg("path", { d: "M0,5H20", stroke: ink(series.color), "stroke-width": series.kind === "faint" ? 1.2 : 2, "stroke-dasharray": series.dashed ? "5 3" : "none" }, area);
  }

  draw(width = this.width) {
    if (!width) return;
    this.width = width;
    const { figure } = this, wide = width > 640, height = wide ? 300 : 252;
    this.series = stacked(figure.series.map((s, i) => ({ ...s, index: i })).filter(s => !this.hidden.has(s.index)));
    const named = figure.series.some(s => typeof s.x[0] === "string");
    const bars = figure.series.some(s => s.kind === "bars");
    const top = figure.y.label ? 24 : 8, bottom = height - (figure.x.label ? 40 : 24);
    const solid = bars || this.series.some(s => s.kind === "stack" || s.kind === "steps");
    const y = (this.y = numberScale(solid && !figure.y.log ? { ...figure.y, zero: true } : figure.y, this.series.flatMap(visibleValues), bottom, top, 5, 0.05));
    const labels = y.ticks.map(y.label), left = 8 + 6.8 * Math.max(2, ...labels.map(text => text.length)), right = width - 10;
    const xs = this.series.flatMap(s => s.x);
    this.x = named ? nameScale([...new Set(figure.series.flatMap(s => s.x))], left, right)
      : numberScale(figure.x, xs, left, right, wide ? 9 : 6, this.series.some(s => s.kind === "stack") ? 0 : 0.02);
    this.frame = { left, right, top, bottom, height };
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": figure.title });
    this.drawAxes(root, labels);
    const group = svg("g", { class: "marks" }, root), count = this.series.filter(s => s.kind === "bars").length;
    let index = 0;
    for (const s of this.series) DRAW[s.kind](s, this.x, y, group, { count, index: s.kind === "bars" ? index++ : 0 });
    this.rule = svg("path", { stroke: "var(--muted)", "stroke-width": 1, "stroke-dasharray": "2 3", visibility: "hidden" }, root);
    this.listen(root);
    this.holder.replaceChildren(root);
  }

  drawAxes(root, labels) {
    const { figure, x, y } = this, { left, right, top, bottom, height } = this.frame;
    const axes = svg("g", { class: "axes" }, root);
    y.ticks.forEach((tick, i) => {
      svg("path", { d: `M${left},${y.at(tick).toFixed(1)}H${right}`, stroke: "var(--grid)" }, axes);
      svg("text", { x: left - 7, y: y.at(tick) + 4, "text-anchor": "end" }, axes).textContent = labels[i];
    });
    const base = y.base >= top && y.base <= bottom ? y.base : bottom;
    svg("path", { d: `M${left},${base}H${right}`, stroke: "var(--muted)", "stroke-opacity": 0.7 }, axes);
    const texts = x.ticks.map(x.label), longest = Math.max(1, ...texts.map(t => t.length));
    const each = x.width || (right - left) / Math.max(1, texts.length), every = Math.max(1, Math.ceil(((x.width ? Math.min(longest, 14) : longest) * 6.6 + 8) / each));
    x.ticks.forEach((tick, i) => {
      if (i % every) return;
      const at = x.at(tick), text = texts[i], fits = Math.floor((each * every) / 6.6);
      if (!x.width) svg("path", { d: `M${at.toFixed(1)},${bottom}v4`, stroke: "var(--muted)", "stroke-opacity": 0.7 }, axes);
      const label = svg("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, axes);
      label.textContent = x.width && text.length > fits ? text.slice(0, Math.max(1, fits - 1)) + "…" : text;
    });
    if (figure.y.label) svg("text", { x: 0, y: 11, class: "axis" }, axes).textContent = figure.y.label;
    if (figure.x.label) svg("text", { x: right, y: height - 4, "text-anchor": "end", class: "axis" }, axes).textContent = figure.x.label;
  }

  listen(root) {
    const places = this.series.flatMap(s => s.x.map(v => [this.x.at(v), v])).filter(p => Number.isFinite(p[0])).sort((a, b) => a[0] - b[0]);
    const stops = places.filter((p, i) => !i || p[0] - places[i - 1][0] > 0.01);
    let at = -1;
    const point = index => { at = Math.max(0, Math.min(stops.length - 1, index)); if (stops.length) this.show(stops[at]); };
    root.addEventListener("pointermove", event => {
      const bounds = root.getBoundingClientRect(), px = ((event.clientX - bounds.left) / bounds.width) * this.width;
      let best = 0;
      stops.forEach((p, i) => { if (Math.abs(p[0] - px) < Math.abs(stops[best][0] - px)) best = i; });
      point(best);
    });
    this.keys(root, { ArrowRight: 1, ArrowLeft: -1 }, step => point(at + step));
  }

  // The keys that move, and what takes the reading away.
  keys(root, keys, move) {
    root.addEventListener("keydown", event => {
      if (keys[event.key]) { event.preventDefault(); move(keys[event.key]); }
    });
    for (const end of ["pointerleave", "blur"]) root.addEventListener(end, () => { this.tip.hidden = true; this.rule.setAttribute("visibility", "hidden"); });
  }

  show([px, value]) {
    const { figure, frame } = this, rows = [];
    for (const s of this.series) {
      let best = -1, gap = s.kind === "bars" ? 0.5 : 6;
      s.x.forEach((v, i) => { const d = Math.abs(this.x.at(v) - px); if (d < gap || (d === 0 && best < 0)) { best = i; gap = d; } });
      if (best >= 0) rows.push([s, this.reading(s, best)]);
    }
    this.rule.setAttribute("d", `M${px},${frame.top}V${frame.bottom}`);
    this.rule.setAttribute("visibility", "visible");
    const head = document.createElement("b");
    head.textContent = `${figure.x.label ? figure.x.label + " " : ""}${formatNumber(value, figure.x.format, 4)}`;
    this.tip.replaceChildren(head, ...rows.map(([s, text]) => this.line(s, text)));
    this.tip.hidden = false;
    const ratio = this.holder.clientWidth / this.width, left = px * ratio, room = this.tip.offsetWidth + 14;
    this.tip.style.left = `${left + room < this.holder.clientWidth ? left + 12 : Math.max(0, left - room)}px`;
    this.tip.style.top = `${this.holder.offsetTop + frame.top * ratio}px`;
  }

  reading(series, i) {
    const say = v => formatNumber(v, this.figure.y.format, 4), own = (series.values || series.y)[i];
    const banded = series.kind !== "stack" && series.low.length, range = banded ? `${say(series.low[i])} … ${say(series.high[i])}` : "";
    return own === null && banded ? range : say(own) + (range ? ` (${range})` : "");
  }

  line(series, text) {
    const row = document.createElement("div"), [mark, name, value] = ["i", "span", "span"].map(tag => row.appendChild(document.createElement(tag)));
    mark.style.background = ink(series.color);
    name.textContent = this.figure.series.length > 1 ? series.name : "";
    value.textContent = text;
    return row;
  }
}
