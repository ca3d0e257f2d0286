// Numbers as text, and axes: from values to pixels, and where the ticks stand.

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const minus = text => text.replace(/-/g, "−");
const power = exponent => "10" + String(exponent).replace(/[-\d]/g, c => RAISED[c]);

function formatNumber(value, format, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (format === "percent") return formatNumber(100 * value, "number", digits) + "\u202f%";
  if (format === "seconds") return formatNumber(value, "number", digits) + " s";
  if (format === "integer" && Number.isInteger(value)) return minus(value.toLocaleString("en-US"));
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) {
    const rounded = Number(value.toPrecision(digits));
    return minus(size >= 1000 ? Math.round(rounded).toLocaleString("en-US") : String(rounded));
  }
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  return `${minus(String(Number(mantissa)))}×${power(Number(exponent))}`;
}

function linearTicks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 2.5, 5, 10].find(m => m * unit >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, wanted) {
  const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9), ticks = [];
  if (last - first < 1) {
    for (let e = Math.floor(low); e <= high; e++) for (const m of [1, 2, 5]) if (Math.log10(m) + e >= low - 1e-9 && Math.log10(m) + e <= high + 1e-9) ticks.push(Number(`${m}e${e}`));
    return ticks.length > 2 ? ticks : linearTicks(10 ** low, 10 ** high, wanted - 1);
  }
  const every = Math.max(1, Math.ceil((last - first) / wanted));
  for (let e = first; e <= last; e += every) ticks.push(Number(`1e${e}`));
  return ticks;
}

// A scale has at(value) -> pixel or NaN where it cannot be shown, ticks and label(tick).
function numberScale(axis, values, start, end, wanted, pad) {
  const shown = values.filter(v => typeof v === "number" && (!axis.log || v > 0));
  if (axis.zero && !axis.log) shown.push(0);
  const on = axis.log ? Math.log10 : v => v;
  let low = Infinity, high = -Infinity;
  for (const v of shown) { low = Math.min(low, on(v)); high = Math.max(high, on(v)); }
  if (low > high) [low, high] = axis.log ? [-1, 0] : [0, 1];
  if (low === 0 && high === 0 && axis.zero) high = 1;
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const half = axis.log ? 0.5 : Math.abs(high) / 2 || 0.5; low -= half; high += half; }
  const room = pad * (high - low);
  if (!(axis.zero && !axis.log && low === 0)) low -= room;
  if (!(axis.zero && !axis.log && high === 0)) high += room;
  const at = v => (v === null || v === undefined || (axis.log && v <= 0) ? NaN : start + ((on(v) - low) / (high - low)) * (end - start));
  const ticks = axis.log ? logTicks(low, high, wanted) : linearTicks(low, high, wanted);
  const whole = ticks.every(t => t === Number(`1e${Math.round(Math.log10(t))}`));
  const label = t => (axis.log && whole && axis.format === "number" && (t < 1e-2 || t > 1e3) ? power(Math.round(Math.log10(t))) : formatNumber(t, axis.format, 4));
  return { at, ticks, label, base: at(axis.log ? 10 ** low : Math.min(Math.max(0, low), high)) };
}

function nameScale(names, start, end) {
  const width = (end - start) / names.length;
  const index = new Map(names.map((name, i) => [name, i]));
  return { at: name => start + (index.get(name) + 0.5) * width, ticks: names, label: name => String(name), width };
}
