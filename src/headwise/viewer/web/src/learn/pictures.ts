// Pictures of the sliders as SVG: curves over one input, bars, and matrices. Colours are variables of the page's style, so
// that light and dark need no script.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 2", "8 2 2 2"];
const HEIGHT = 168;
const LEFT = 50;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 36;

/** One line of a plot; a value that is not finite leaves a gap. */
export interface Series {
  name: string;
  ys: number[];
}

export interface Plot {
  series: Series[];
  xs: number[]; // of an axis of choices, the numbers of the choices
  ticks: { at: number; text: string }[];
  axis: string;
  current: number; // the place on the axis that the slider shows
  isLog: boolean;
}

export function element(name: string, attributes: Record<string, string | number>, ...children: (Node | string)[]): SVGElement {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** A number as the pages print it: whole numbers with separators, others with four digits. */
export function formatNumber(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const rounded = Math.round(value);
  const isWhole = Math.abs(value - rounded) < 1e-9 && (rounded !== 0 || value === 0);
  if (Math.abs(value) >= 1000 || isWhole) return separate(rounded);
  if (Math.abs(value) < 1e-4) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function separate(value: number): string {
  return value === 0 ? "0" : String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** A short number for an axis, as 20k or 1e9; whole numbers up to 99,999 without zeros at the end stay, as 4096. */
export function shortNumber(value: number): string {
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e5 && (size < 1e4 || size % 1000 !== 0)) return String(value);
  if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(0).replace("e+", "e");
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return String(Number(value.toPrecision(3)));
}

/** Three to six round numbers from low to high. */
export function roundTicks(low: number, high: number): number[] {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

/** Limits of a height: from 0, unless all values lie close together; whole powers of 10 on a logarithmic axis. */
export function heightLimits(values: number[], isLog: boolean): [number, number] {
  const finite = values.filter((value) => Number.isFinite(value) && (!isLog || value > 0));
  if (finite.length === 0) return isLog ? [1, 10] : [0, 1];
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  if (isLog) {
    const first = 10 ** Math.floor(Math.log10(low) + 1e-9);
    return [first, Math.max(10 ** Math.ceil(Math.log10(high) - 1e-9), first * 10)];
  }
  if (low >= 0 && high <= 1 && high > 0.25) return [0, 1];
  const isNarrow = (low > 0 || high < 0) && high - low < 0.5 * Math.max(Math.abs(low), Math.abs(high)) && high > low;
  const margin = isNarrow ? 0.08 * (high - low) : 0;
  return [isNarrow ? low - margin : Math.min(low, 0), isNarrow ? high + margin : Math.max(high, 0) || 1];
}

function heightTicks(low: number, high: number, isLog: boolean): number[] {
  if (!isLog) return roundTicks(low, high);
  const powers = Math.round(Math.log10(high / low));
  const step = Math.ceil(powers / 4);
  return Array.from({ length: Math.floor(powers / step) + 1 }, (_, n) => low * 10 ** (n * step));
}

function frame(width: number, height: number, label: string): SVGElement {
  return element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

function legend(names: string[]): HTMLElement {
  const list = document.createElement("div");
  list.className = "legend";
  names.forEach((name, n) => {
    const item = document.createElement("span");
    const swatch = element("svg", { width: 22, height: 8, "aria-hidden": "true" });
    swatch.append(element("line", { x1: 0, x2: 22, y1: 4, y2: 4, class: `line s${n}`, "stroke-dasharray": DASHES[n]! }));
    item.append(swatch, name);
    list.append(item);
  });
  return list;
}

export function drawPlot(plot: Plot, width: number): HTMLElement[] {
  const [low, high] = heightLimits(plot.series.flatMap((one) => one.ys), plot.isLog);
  const size = (value: number) => (plot.isLog ? Math.log(value) : value);
  const first = plot.xs[0]!;
  const span = plot.xs[plot.xs.length - 1]! - first || 1;
  const x = (at: number) => LEFT + ((at - first) / span) * (width - LEFT - RIGHT);
  const y = (value: number) => TOP + (1 - (size(value) - size(low)) / (size(high) - size(low))) * (HEIGHT - TOP - BOTTOM);
  const svg = frame(width, HEIGHT, `${plot.series.map((one) => one.name).join(", ")} / ${plot.axis}`);
  for (const tick of heightTicks(low, high, plot.isLog)) {
    svg.append(element("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }));
    svg.append(element("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, shortNumber(tick)));
  }
  for (const tick of plot.ticks) {
    svg.append(element("text", { x: x(tick.at), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, tick.text));
  }
  svg.append(element("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle", class: "axis" }, plot.axis));
  svg.append(element("line", { x1: x(plot.current), x2: x(plot.current), y1: TOP, y2: HEIGHT - BOTTOM, class: "now" }));
  plot.series.forEach((series, n) => {
    const isShown = (value: number | undefined) => value !== undefined && Number.isFinite(value) && (!plot.isLog || value > 0);
    let path = "";
    series.ys.forEach((value, index) => {
      if (!isShown(value)) return;
      const start = index === 0 || !isShown(series.ys[index - 1]);
      path += `${start ? "M" : "L"}${x(plot.xs[index]!).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    svg.append(element("path", { d: path, class: `line s${n}`, "stroke-dasharray": DASHES[n]! }));
    const value = series.ys[plot.xs.indexOf(plot.current)];
    if (isShown(value)) svg.append(element("circle", { cx: x(plot.current), cy: y(value!), r: 4, class: `dot s${n}` }));
  });
  return [...(plot.series.length > 1 ? [legend(plot.series.map((one) => one.name))] : []), svg as unknown as HTMLElement];
}

export function drawBars(series: Series[], labels: string[], width: number): HTMLElement[] {
  const count = Math.max(...series.map((one) => one.ys.length));
  const [, high] = heightLimits([0, ...series.flatMap((one) => one.ys)], false);
  const step = (width - LEFT - RIGHT) / count;
  const bar = Math.min((step * (count > 24 ? 0.9 : 0.7)) / series.length, 56);
  const y = (value: number) => TOP + 6 + (1 - value / high) * (HEIGHT - TOP - 6 - 24);
  const bottom = y(0);
  const svg = frame(width, HEIGHT, series.map((one) => `${one.name}: ${one.ys.map(formatNumber).join(", ")}`).join("; "));
  for (const tick of roundTicks(0, high)) {
    svg.append(element("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }));
    svg.append(element("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, shortNumber(tick)));
  }
  const each = Math.ceil(count / (width / 34));
  for (let n = 0; n < count; n++) {
    const middle = LEFT + (n + 0.5) * step;
    series.forEach((one, place) => {
      const value = one.ys[n]!;
      const left = middle + (place - series.length / 2) * bar;
      svg.append(element("rect", { x: left + 0.5, y: y(value), width: Math.max(bar - 1, 1), height: bottom - y(value), class: `column s${place}` }));
      if (bar > 30) svg.append(element("text", { x: left + bar / 2, y: y(value) - 3, "text-anchor": "middle" }, formatShare(value)));
    });
    if (n % each === 0) svg.append(element("text", { x: middle, y: bottom + 15, "text-anchor": "middle" }, cut(labels[n] ?? String(n + 1))));
  }
  return [...(series.length > 1 ? [legend(series.map((one) => one.name))] : []), svg as unknown as HTMLElement];
}

function formatShare(value: number): string {
  if (value > 0 && value < 0.001) return "<0.001"; // a weight that is small is not 0
  return value > 1 ? shortNumber(Math.round(value)) : String(Number(value.toFixed(3)));
}

function cut(text: string): string {
  return [...text].length > 10 ? `${[...text].slice(0, 9).join("")}…` : text;
}

export function drawMatrix(name: string, rows: number[][], labels: string[], width: number): HTMLElement[] {
  const margin = labels.length ? 12 + 7.2 * Math.max(...labels.map((label) => textWidth(cut(label)))) : 24;
  const columns = rows[0]!.length;
  const cell = Math.max(Math.min((width - margin - 4) / columns, 26), 6);
  const top = labels.length ? margin : 18;
  const svg = frame(width, top + cell * rows.length + 4, name);
  const text = (n: number) => cut(labels[n] ?? String(n + 1));
  const each = labels.length ? 1 : Math.ceil(16 / cell);
  rows.forEach((row, i) => {
    if (i % each === 0) svg.append(element("text", { x: margin - 6, y: top + (i + 0.5) * cell + 4, "text-anchor": "end" }, text(i)));
    row.forEach((value, j) => {
      const place = { x: margin + j * cell, y: top + i * cell, width: cell - 1, height: cell - 1 };
      const title = element("title", {}, `${text(i)} → ${text(j)}: ${formatNumber(value)}`);
      svg.append(element("rect", { ...place, class: "empty" }));
      svg.append(element("rect", { ...place, class: "cell", "fill-opacity": Math.sqrt(Math.max(value, 0)).toFixed(3) }, title));
    });
  });
  for (let j = 0; j < columns; j += each) {
    const x = margin + (j + 0.5) * cell;
    const turn: Record<string, string | number> = labels.length ? { transform: `rotate(-90 ${x + 4} ${top - 6})`, x: x + 4 } : { x, "text-anchor": "middle" };
    svg.append(element("text", { ...turn, y: top - 6 }, text(j)));
  }
  return [svg as unknown as HTMLElement];
}

/** Width of a text in letters; Chinese characters count double. */
function textWidth(text: string): number {
  return [...text].reduce((total, letter) => total + (letter > "\u2e80" ? 1.8 : 1), 0);
}
