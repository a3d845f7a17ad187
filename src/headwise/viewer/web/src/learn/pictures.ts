// Pictures of the sliders as SVG: curves over one input, bars, and matrices. Colours are variables
// of the page's style, so that light and dark need no script.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 2", "8 2 2 2"];
const HEIGHT = 168;
const LEFT = 50;
const RIGHT = 18;
const LETTER = 6.4; // width of a letter of a label
const TOP = 10;
const UNITS = ["", "k", "M", "G", "T"]; // of a short number, by powers of 1000
const BOTTOM = 36;

/** One line of a plot; a value that is not finite leaves a gap. */
export interface Series {
  name: string;
  ys: number[];
}

export interface Plot {
  series: Series[];
  xs: number[];
  ticks: number[];
  axis: string;
  current: number; // the value on the axis that the slider shows
  isLog: boolean;
  isLogAxis: boolean;
}

type Attributes = Record<string, string | number>;

export function element(
  name: string,
  attributes: Attributes,
  ...children: (Node | string)[]
): SVGElement {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
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

/**
 * A short number for an axis, as 20k, 5M or 2G; whole numbers up to 99,999 without zeros at the end
 * stay, as 4096.
 */
export function shortNumber(value: number): string {
  const size = Math.abs(value);
  const isShort = size < 1e4 || (size < 1e5 && size % 1000 !== 0);
  if (Number.isInteger(value) && isShort) return String(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(0).replace("e+", "e");
  const power = size < 1e4 ? 0 : Math.floor(Math.log10(size) / 3);
  return `${Number((value / 1000 ** power).toPrecision(3))}${UNITS[power]}`;
}

/** Three to six round numbers from low to high. */
export function roundTicks(low: number, high: number): number[] {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  const numbers = Array.from({ length: last - first + 1 }, (_, n) => (first + n) * step);
  return numbers.map((number) => Number(number.toPrecision(12)));
}

/**
 * Limits of a height: from 0, unless all values lie close together; whole powers of 10 on a
 * logarithmic axis.
 */
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
  const largest = Math.max(Math.abs(low), Math.abs(high));
  const isNarrow = low * high > 0 && high > low && high - low < 0.5 * largest;
  if (!isNarrow) return [Math.min(low, 0), Math.max(high, 0) || 1];
  const margin = 0.08 * (high - low);
  return [low - margin, high + margin];
}

function heightTicks(low: number, high: number, isLog: boolean): number[] {
  if (!isLog) return roundTicks(low, high);
  const powers = Math.round(Math.log10(high / low));
  const step = Math.ceil(powers / 4);
  return Array.from({ length: Math.floor(powers / step) + 1 }, (_, n) => low * 10 ** (n * step));
}

function frame(width: number, height: number, label: string): SVGElement {
  const viewBox = `0 0 ${width} ${height}`;
  return element("svg", { viewBox, width, height, role: "img", "aria-label": label });
}

function legend(names: string[]): HTMLElement {
  const list = document.createElement("div");
  list.className = "legend";
  names.forEach((name, n) => {
    const item = document.createElement("span");
    const swatch = element("svg", { width: 22, height: 8, "aria-hidden": "true" });
    const ends = { x1: 0, x2: 22, y1: 4, y2: 4 };
    const dashes = { "stroke-dasharray": DASHES[n]! };
    swatch.append(element("line", { ...ends, ...dashes, class: `line s${n}` }));
    item.append(swatch, name);
    list.append(item);
  });
  return list;
}

function withLegend(series: Series[], svg: SVGElement): HTMLElement[] {
  const names = series.map(({ name }) => name);
  return [...(names.length > 1 ? [legend(names)] : []), svg as unknown as HTMLElement];
}

function drawHeights(
  svg: SVGElement,
  ticks: number[],
  width: number,
  y: (value: number) => number,
): void {
  for (const tick of ticks) {
    const ends = { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) };
    svg.append(element("line", { ...ends, class: "grid" }));
    const at = { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" };
    svg.append(element("text", at, shortNumber(tick)));
  }
}

/** Labels below an axis; one that would touch the label before it is left out. */
function drawTicks(svg: SVGElement, ticks: { x: number; text: string }[], y: number): void {
  let end = -Infinity;
  for (const { x, text } of ticks) {
    const half = (LETTER * textWidth(text)) / 2;
    if (x - half < end + 4) continue;
    svg.append(element("text", { x, y, "text-anchor": "middle" }, text));
    end = x + half;
  }
}

export function drawPlot(plot: Plot, width: number): HTMLElement[] {
  const [low, high] = heightLimits(plot.series.flatMap(({ ys }) => ys), plot.isLog);
  const scale = (isLog: boolean) => (value: number) => (isLog ? Math.log(value) : value);
  const scaleX = scale(plot.isLogAxis);
  const scaleY = scale(plot.isLog);
  const first = scaleX(plot.xs[0]!);
  const span = scaleX(plot.xs[plot.xs.length - 1]!) - first || 1;
  const rise = scaleY(high) - scaleY(low);
  const bottom = HEIGHT - BOTTOM;
  const x = (value: number) => LEFT + ((scaleX(value) - first) / span) * (width - LEFT - RIGHT);
  const y = (value: number) => bottom - ((scaleY(value) - scaleY(low)) / rise) * (bottom - TOP);
  const index = plot.xs.indexOf(plot.current);
  const values = plot.series.map(({ name, ys }) => `${name} ${formatNumber(ys[index]!)}`);
  const shown = `${values.join(", ")} / ${plot.axis}: ${formatNumber(plot.current)}`;
  const svg = frame(width, HEIGHT, shown);
  drawHeights(svg, heightTicks(low, high, plot.isLog), width, y);
  const ticks = plot.ticks.map((tick) => ({ x: x(tick), text: shortNumber(tick) }));
  drawTicks(svg, ticks, bottom + 15);
  const middle = { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" };
  svg.append(element("text", { ...middle, class: "axis" }, plot.axis));
  const now = x(plot.current);
  svg.append(element("line", { x1: now, x2: now, y1: TOP, y2: bottom, class: "now" }));
  const isDrawn = (value: number | undefined): value is number =>
    value !== undefined && Number.isFinite(value) && (!plot.isLog || value > 0);
  plot.series.forEach(({ ys }, n) => {
    let path = "";
    ys.forEach((value, i) => {
      if (!isDrawn(value)) return;
      const command = isDrawn(ys[i - 1]) ? "L" : "M";
      path += `${command}${x(plot.xs[i]!).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    const dashes = { "stroke-dasharray": DASHES[n]! };
    svg.append(element("path", { d: path, class: `line s${n}`, ...dashes }));
    const value = ys[index];
    if (!isDrawn(value)) return;
    svg.append(element("circle", { cx: now, cy: y(value), r: 4, class: `dot s${n}` }));
  });
  return withLegend(plot.series, svg);
}

export function drawBars(series: Series[], labels: string[], width: number): HTMLElement[] {
  const count = Math.max(...series.map(({ ys }) => ys.length));
  const [, high] = heightLimits([0, ...series.flatMap(({ ys }) => ys)], false);
  const step = (width - LEFT - RIGHT) / count;
  const bar = Math.min((step * (count > 24 ? 0.9 : 0.7)) / series.length, 56);
  const bottom = HEIGHT - 24;
  const y = (value: number) => bottom - (value / high) * (bottom - TOP - 6);
  const texts = series.map(({ name, ys }) => `${name}: ${ys.map(formatNumber).join(", ")}`);
  const svg = frame(width, HEIGHT, texts.join("; "));
  drawHeights(svg, roundTicks(0, high), width, y);
  const middles = Array.from({ length: count }, (_, n) => LEFT + (n + 0.5) * step);
  series.forEach(({ ys }, n) => {
    ys.forEach((value, i) => {
      const left = middles[i]! + (n - series.length / 2) * bar;
      const size = { width: Math.max(bar - 1, 1), height: bottom - y(value) };
      svg.append(element("rect", { x: left + 0.5, y: y(value), ...size, class: `column s${n}` }));
      if (bar <= 30) return;
      const above = { x: left + bar / 2, y: y(value) - 3, "text-anchor": "middle" };
      svg.append(element("text", above, formatShare(value)));
    });
  });
  const ticks = middles.map((x, n) => ({ x, text: cut(labels[n] ?? String(n + 1)) }));
  drawTicks(svg, ticks, bottom + 15);
  return withLegend(series, svg);
}

function formatShare(value: number): string {
  if (value > 0 && value < 0.001) return "<0.001"; // a weight that is small is not 0
  return value > 1 ? shortNumber(Math.round(value)) : String(Number(value.toFixed(3)));
}

function cut(text: string): string {
  return [...text].length > 10 ? `${[...text].slice(0, 9).join("")}…` : text;
}

export function drawMatrix(
  name: string,
  rows: number[][],
  labels: string[],
  width: number,
): HTMLElement[] {
  const hasLabels = labels.length > 0;
  const longest = Math.max(...labels.map((label) => textWidth(cut(label))));
  const margin = hasLabels ? 12 + 7.2 * longest : 24;
  const columns = rows[0]!.length;
  const cell = Math.max(Math.min((width - margin - 4) / columns, 26), 6);
  const top = hasLabels ? margin : 18;
  const svg = frame(width, top + cell * rows.length + 4, name);
  const text = (n: number) => cut(labels[n] ?? String(n + 1));
  const tickStride = hasLabels ? 1 : Math.ceil(16 / cell);
  rows.forEach((row, i) => {
    if (i % tickStride === 0) {
      const left = { x: margin - 6, y: top + (i + 0.5) * cell + 4, "text-anchor": "end" };
      svg.append(element("text", left, text(i)));
    }
    row.forEach((value, j) => {
      const size = { width: cell - 1, height: cell - 1 };
      const box = { x: margin + j * cell, y: top + i * cell, ...size };
      const title = element("title", {}, `${text(i)} → ${text(j)}: ${formatNumber(value)}`);
      const opacity = Math.sqrt(Math.max(value, 0)).toFixed(3);
      svg.append(element("rect", { ...box, class: "empty" }));
      svg.append(element("rect", { ...box, class: "cell", "fill-opacity": opacity }, title));
    });
  });
  for (let j = 0; j < columns; j += tickStride) {
    const x = margin + (j + 0.5) * cell;
    const y = top - 6;
    const upright: Attributes = { x, y, "text-anchor": "middle" };
    const sideways: Attributes = { x: x + 4, y, transform: `rotate(-90 ${x + 4} ${y})` };
    svg.append(element("text", hasLabels ? sideways : upright, text(j)));
  }
  return [svg as unknown as HTMLElement];
}

/** Width of a text in letters; Chinese characters count double. */
function textWidth(text: string): number {
  return [...text].reduce((total, letter) => total + (letter > "\u2e80" ? 1.8 : 1), 0);
}
