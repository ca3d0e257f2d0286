// A figure lying on its side: names down the left, one row each, numbers to the right. Points at their values; a line series is a rule.

class RowChart extends Chart {
  draw(width = this.width) {
    if (!width) return;
    this.width = width;
    const { figure } = this;
    this.series = figure.series.filter((_, i) => !this.hidden.has(i));
    const names = [...new Set(figure.series.flatMap(s => s.x))];
    const letter = 6.9, room = Math.floor(Math.min(0.42 * width, letter * Math.max(...names.map(n => n.length)) + 10));
    const pitch = 22, top = 6, bottom = top + pitch * names.length, height = bottom + 40, left = room + 8, right = width - 14;
    this.y = nameScale(names, top, bottom);
    this.x = numberScale(figure.y, this.series.flatMap(visibleValues), left, right, width > 640 ? 8 : 5, 0.03);
    this.frame = { left, right, top, bottom, height };
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": figure.title });
    const axes = svg("g", { class: "axes" }, root);
    this.x.ticks.forEach(tick => {
      const at = this.x.at(tick).toFixed(1);
      svg("path", { d: `M${at},${top}V${bottom}`, stroke: "var(--grid)" }, axes);
      svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, axes).textContent = this.x.label(tick);
    });
    const fits = Math.floor((room - 6) / letter);
    names.forEach(name => {
      svg("path", { d: `M${left},${this.y.at(name)}H${right}`, stroke: "var(--grid)" }, axes);
      const label = svg("text", { x: room, y: this.y.at(name) + 4, "text-anchor": "end" }, axes);
      label.textContent = name.length > fits ? name.slice(0, fits - 1) + "…" : name;
    });
    if (figure.y.label) svg("text", { x: right, y: height - 4, "text-anchor": "end" }, axes).textContent = figure.y.label;
    const marks = svg("g", { class: "marks" }, root);
    for (const s of this.series) s.kind === "line" ? this.rules(s, marks) : this.dots(s, marks);
    this.rule = svg("rect", { x: 0, width: right, height: pitch, fill: "var(--ink)", "fill-opacity": 0.06, visibility: "hidden" }, root);
    this.listen(root, names, pitch);
    this.holder.replaceChildren(root);
  }

  dots(series, marks) {
    series.x.forEach((name, i) => {
      const at = this.x.at(series.y[i]);
      if (Number.isFinite(at)) svg("circle", { cx: at.toFixed(1), cy: this.y.at(name), r: 4.2, fill: ink(series.color), stroke: "var(--page)", "stroke-width": 1 }, marks);
    });
  }

  rules(series, marks) {
    const half = this.y.width / 2, steps = series.x.map((name, i) => [this.x.at(series.y[i]), this.y.at(name)]).filter(p => p.every(Number.isFinite));
    const d = steps.map(([at, middle]) => `M${at.toFixed(1)},${middle - half}V${middle + half}`).join("");
    if (d) svg("path", { d, stroke: ink(series.color), "stroke-width": 1.6, "stroke-dasharray": series.dashed ? "5 4" : "none" }, marks);
  }

  listen(root, names, pitch) {
    let at = -1;
    const point = index => { at = Math.max(0, Math.min(names.length - 1, index)); this.show(names[at], pitch); };
    root.addEventListener("pointermove", event => {
      const bounds = root.getBoundingClientRect(), py = ((event.clientY - bounds.top) / bounds.height) * this.frame.height;
      point(Math.floor((py - this.frame.top) / pitch));
    });
    this.keys(root, { ArrowDown: 1, ArrowUp: -1 }, step => point(at + step));
  }

  show(name, pitch) {
    const rows = this.series.map(s => [s, s.x.indexOf(name)]).filter(([, i]) => i >= 0).map(([s, i]) => this.line(s, this.reading(s, i)));
    this.rule.setAttribute("y", this.y.at(name) - pitch / 2);
    this.rule.setAttribute("visibility", "visible");
    const head = document.createElement("b");
    head.textContent = name;
    this.tip.replaceChildren(head, ...rows);
    this.tip.hidden = false;
    const ratio = this.holder.clientWidth / this.width;
    this.tip.style.left = `${Math.max(0, this.holder.clientWidth - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${this.holder.offsetTop + (this.y.at(name) + pitch / 2 + 2) * ratio}px`;
  }
}
