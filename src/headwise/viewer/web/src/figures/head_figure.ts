// The figure of one head: its weights as a matrix, lines or arcs, with tokens, axes, scale and title.

import { cssRamp, cssValue, packedColor, rampColors, rampPosition, stepTable } from "../canvas/colors";
import { isPooled, type TileState } from "../components/head_data";
import { roundTicks } from "../components/head_scatter";
import { arcPath, ARCS, LINES, linePath, pairOpacity, tilePairs } from "../components/token_lines";
import { streamWords, visibleToken } from "../components/tokens";
import { format, t, type TextKey } from "../i18n";
import type { Site } from "../source";
import { leastShare, headForm, headName, lens, scale, selectedHead, selectedSite, doc } from "../state";
import { element, FONT, makeFigure, MONO, printable, shorten, textElement, textWidth, type Figure } from "./svg";

const SIDE = 600; // of a matrix without labels
const LABELLED_CELL = { least: 10, most: 22 };
const MAX_LABELS = 64; // tokens on each side that are written out
const MAX_LABEL = 16; // characters of a token
const VECTOR_CELLS = 128 * 128; // larger matrices are a picture inside the figure
const LABEL_SIZE = 10;
const MARGIN = 20;
const HEADER = 62;
const LEGEND = { width: 220, height: 10, total: 66 };
const SCALE_TICKS = [0, 0.01, 0.05, 0.2, 0.5, 1]; // as in the figures of the library

export function drawHead(item: Site, tile: TileState): Figure {
  const words = { queries: streamWords(item.queryStream), keys: streamWords(item.keyStream) };
  const tokens = Math.max(item.numQueries, item.numKeys);
  const isShort = tokens <= MAX_LABELS && words.queries.length > 0 && words.keys.length > 0;
  if (headForm.value === "matrix" || !isShort) return drawMatrix(item, tile, words);
  return drawPairs(item, tile, words, headForm.value === "arcs" && item.queryStream === item.keyStream);
}

interface Words {
  queries: string[];
  keys: string[];
}

export function figureTitle(): string {
  return `${printable(String(doc.value?.model["name"] ?? "headwise"))} · ${t("head.title", { name: headName(selectedSite.value, selectedHead.value) })}`;
}

function header(item: Site, note: string): string[] {
  const lines = [item.name, t(`lens.${lens.value}` as TextKey), note].filter(Boolean).join(" · ");
  return [
    textElement(figureTitle(), { x: MARGIN, y: 28, "font-size": 15, "font-weight": 600 }),
    textElement(lines, { x: MARGIN, y: 47, fill: cssValue("--text-2") }),
  ];
}

// --- Matrix --------------------------------------------------------------------------------------------

function drawMatrix(item: Site, tile: TileState, words: Words): Figure {
  const { view, rows, columns } = tile;
  const labels = {
    rows: words.queries.slice(view.q0, view.q1).map((word) => shorten(visibleToken(word), MAX_LABEL)),
    columns: words.keys.slice(view.k0, view.k1).map((word) => shorten(visibleToken(word), MAX_LABEL)),
  };
  const isLabelled = labels.rows.length === rows && labels.columns.length === columns && Math.max(rows, columns) <= MAX_LABELS;
  const most = Math.max(rows, columns);
  const cell = isLabelled ? Math.min(Math.max(SIDE / most, LABELLED_CELL.least), LABELLED_CELL.most) : SIDE / most;
  const widest = (texts: string[]) => texts.reduce((width, text) => Math.max(width, textWidth(text, LABEL_SIZE)), 24) + 8;
  const left = MARGIN + 18 + (isLabelled ? widest(labels.rows) : 40);
  const top = HEADER + 20 + (isLabelled ? widest(labels.columns) : 16);
  const [width, height] = [columns * cell, rows * cell];
  const pooled = isPooled(tile) ? t("head.pooled", { queries: Math.ceil((view.q1 - view.q0) / rows), keys: Math.ceil((view.k1 - view.k0) / columns) }) : "";
  const axes = isLabelled ? tokenAxes(labels, { left, top, cell }) : numberAxes(tile, { left, top, width, height });
  const parts = [
    ...header(item, pooled),
    ...matrixCells(tile, { left, top, cell }),
    element("rect", { x: left, y: top, width, height, fill: "none", stroke: cssValue("--line-strong"), "stroke-width": 0.75 }),
    ...axes,
    axisName(`${t("key")} (${item.keyStream})`, left + width / 2, HEADER + 8, 0),
    axisName(`${t("query")} (${item.queryStream})`, MARGIN + 8, top + height / 2, -90),
    ...legend(left, top + height + 24, tile.scale, tile.masked?.includes(1) === true),
  ];
  const titleWidth = Math.max(textWidth(figureTitle(), 15), textWidth(`${item.name}${t("lens.weight")}${pooled}`, 11)) + 2 * MARGIN;
  return makeFigure(figureTitle(), Math.max(left + Math.max(width, LEGEND.width + 110) + MARGIN, titleWidth), top + height + LEGEND.total, parts);
}

function axisName(text: string, x: number, y: number, turn: number): string {
  return textElement(text, { x, y, "text-anchor": "middle", fill: cssValue("--text-2"), ...(turn ? { transform: `rotate(${turn} ${x} ${y})` } : {}) });
}

/** The cells as one path for each colour, so that they stay sharp at every size; a picture if there are too many. */
function matrixCells(tile: TileState, at: { left: number; top: number; cell: number }): string[] {
  const hatch = element(
    "pattern",
    { id: "not-allowed", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    element("rect", { width: 6, height: 6, fill: cssValue("--hatch-bg") }),
    element("rect", { width: 1.2, height: 6, fill: cssValue("--hatch") }),
  );
  const place = { transform: `translate(${at.left} ${at.top})` };
  const { rows, columns } = tile;
  const size = { width: columns * at.cell, height: rows * at.cell };
  if (rows * columns > VECTOR_CELLS) {
    return [element("defs", {}, hatch), element("image", { ...size, x: at.left, y: at.top, href: matrixPicture(tile), "image-rendering": "pixelated", preserveAspectRatio: "none" })];
  }
  const paths = new Map<string, string>();
  const colors = colorNames();
  for (let row = 0; row < rows; row++) {
    for (let column = 0, end = 0; column < columns; column = end) {
      const color = cellColor(tile, row * columns + column, colors);
      for (end = column + 1; end < columns && cellColor(tile, row * columns + end, colors) === color; end++);
      paths.set(color, `${paths.get(color) ?? ""}M${column} ${row}h${end - column}v1h${column - end}z`);
    }
  }
  const drawn = [...paths].map(([fill, d]) => (fill.startsWith("url") ? "" : element("path", { d, fill })));
  const hidden = paths.get(HATCHED);
  return [
    element("defs", {}, hatch),
    // the hatching is in units of the figure and not of cells, so that it is as fine as in the legend
    ...(hidden ? [element("g", place, element("path", { d: scalePath(hidden, at.cell), fill: HATCHED }))] : []),
    element("g", { transform: `${place.transform} scale(${at.cell})`, "shape-rendering": "crispEdges" }, ...drawn),
  ];
}

const HATCHED = "url(#not-allowed)";

function scalePath(path: string, factor: number): string {
  return path.replace(/-?\d+/g, (number) => String(Math.round(Number(number) * factor * 100) / 100));
}

function colorNames(): string[] {
  return Array.from(rampColors("seq"), (color) => `#${[color & 255, (color >> 8) & 255, (color >> 16) & 255].map((part) => part.toString(16).padStart(2, "0")).join("")}`);
}

function cellColor(tile: TileState, cell: number, colors: string[]): string {
  if (tile.masked?.[cell] === 1) return HATCHED;
  return colors[Math.round(rampPosition(tile.weights[cell]! / 255, scale.value) * 255)]!;
}

/** A PNG with one pixel for each cell, as an address that contains it. */
function matrixPicture({ weights, masked, rows, columns }: TileState): string {
  const canvas = document.createElement("canvas");
  const zoom = Math.max(1, Math.ceil((2 * SIDE) / Math.max(rows, columns))); // few programs enlarge pictures without smoothing
  canvas.width = columns * zoom;
  canvas.height = rows * zoom;
  const context = canvas.getContext("2d")!;
  const pixels = context.createImageData(canvas.width, canvas.height);
  const target = new Uint32Array(pixels.data.buffer);
  const colors = rampColors("seq");
  const steps = stepTable(scale.value);
  const [hatch, ground] = [packedColor("--hatch"), packedColor("--hatch-bg")];
  for (let y = 0; y < canvas.height; y++) {
    for (let x = 0; x < canvas.width; x++) {
      const cell = Math.floor(y / zoom) * columns + Math.floor(x / zoom);
      target[y * canvas.width + x] = masked?.[cell] === 1 ? ((x + y) % 8 < 2 ? hatch : ground) : colors[steps[weights[cell]!]!]!;
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas.toDataURL("image/png");
}

function tokenAxes(labels: { rows: string[]; columns: string[] }, at: { left: number; top: number; cell: number }): string[] {
  const style = { "font-family": MONO, "font-size": Math.min(LABEL_SIZE, at.cell) };
  return [
    ...labels.rows.map((word, row) => textElement(word, { ...style, x: at.left - 6, y: at.top + (row + 0.5) * at.cell + 3.5, "text-anchor": "end" })),
    ...labels.columns.map((word, column) => {
      const [x, y] = [at.left + (column + 0.5) * at.cell + 3.5, at.top - 6];
      return textElement(word, { ...style, x, y, transform: `rotate(-90 ${x} ${y})` });
    }),
  ];
}

/** Positions at round numbers on both sides. */
function numberAxes({ view }: TileState, at: { left: number; top: number; width: number; height: number }): string[] {
  const style = { "font-size": LABEL_SIZE, fill: cssValue("--text-2") };
  const ticks = (first: number, end: number) => roundTicks(first, end - 1).filter(Number.isInteger);
  const place = (tick: number, first: number, end: number, size: number) => ((tick - first + 0.5) / (end - first)) * size;
  return [
    ...ticks(view.q0, view.q1).map((tick) => textElement(String(tick), { ...style, x: at.left - 6, y: at.top + place(tick, view.q0, view.q1, at.height) + 3.5, "text-anchor": "end" })),
    ...ticks(view.k0, view.k1).map((tick) => textElement(String(tick), { ...style, x: at.left + place(tick, view.k0, view.k1, at.width), y: at.top - 6, "text-anchor": "middle" })),
  ];
}

/** The ramp with the weights that stand at some of its places, and the hatching. */
function legend(left: number, top: number, most: number, hasHatching: boolean): string[] {
  const stops = Array.from({ length: 9 }, (_, index) => element("stop", { offset: index / 8, "stop-color": cssValue(`--seq-${index}`) }));
  const muted = { "font-size": LABEL_SIZE, fill: cssValue("--text-2") };
  const ticks = SCALE_TICKS.map((tick) => ({ tick, x: left + rampPosition(tick, scale.value) * LEGEND.width }));
  const shown = ticks.filter(({ x }, index) => index === ticks.length - 1 || (LEGEND.width + left - x > 14 && ticks.slice(0, index).every((other) => x - other.x > 18)));
  return [
    element("linearGradient", { id: "ramp" }, ...stops),
    element("rect", { x: left, y: top, width: LEGEND.width, height: LEGEND.height, fill: "url(#ramp)", stroke: cssValue("--line-strong"), "stroke-width": 0.5 }),
    ...shown.map(({ tick, x }) => textElement(format(tick * most).replace(/\.?0+$/, "") || "0", { ...muted, x, y: top + 22, "text-anchor": "middle" })),
    textElement(`${t(`lens.${lens.value}` as TextKey)} (${t(`scale.${scale.value}` as TextKey)})`, { ...muted, x: left, y: top + 35 }),
    ...(hasHatching ? hatchingKey(left + LEGEND.width + 16, top) : []),
  ];
}

function hatchingKey(x: number, y: number): string[] {
  return [
    element("rect", { x, y, width: 16, height: LEGEND.height, fill: HATCHED, stroke: cssValue("--line-strong"), "stroke-width": 0.5 }),
    textElement(t("head.forbidden"), { "font-size": LABEL_SIZE, fill: cssValue("--text-2"), x: x + 22, y: y + 9 }),
  ];
}

// --- Lines and arcs ------------------------------------------------------------------------------------

function drawPairs(item: Site, tile: TileState, words: Words, arcs: boolean): Figure {
  const height = arcs ? ARCS.height(words.queries.length) + 28 : Math.max(words.queries.length, words.keys.length) * LINES.line + 8;
  const width = arcs ? words.queries.length * ARCS.step : LINES.width;
  const style = { "font-family": MONO, "font-size": 13 };
  const paths = tilePairs(tile, Math.max(leastShare.value, 1 / 255) * tile.scale).map((pair) =>
    element("path", { d: arcs ? arcPath(pair, words.queries.length) : linePath(pair), fill: "none", "stroke-width": 2, stroke: cssRamp(0.85), "stroke-opacity": pairOpacity(pair, tile) }),
  );
  const texts = arcs
    ? words.queries.map((word, index) => textElement(shorten(visibleToken(word), MAX_LABEL), { ...style, x: (index + 0.5) * ARCS.step, y: height - 10, "text-anchor": "middle" }))
    : [
        ...words.queries.map((word, index) => textElement(shorten(visibleToken(word), MAX_LABEL), { ...style, x: LINES.left - 8, y: index * LINES.line + 18, "text-anchor": "end" })),
        ...words.keys.map((word, index) => textElement(shorten(visibleToken(word), MAX_LABEL), { ...style, x: LINES.right + 8, y: index * LINES.line + 18 })),
      ];
  const axes = arcs
    ? []
    : [axisName(`${t("query")} (${item.queryStream})`, MARGIN + LINES.left - 40, HEADER + 8, 0), axisName(`${t("key")} (${item.keyStream})`, MARGIN + LINES.right + 40, HEADER + 8, 0)];
  const note = t("export.strokes", { scale: t(`scale.${scale.value}` as TextKey) });
  const parts = [...header(item, ""), ...axes, element("g", { transform: `translate(${MARGIN} ${HEADER + 18})` }, ...paths, ...texts), textElement(note, { x: MARGIN, y: HEADER + height + 40, fill: cssValue("--text-2"), "font-family": FONT })];
  return makeFigure(figureTitle(), Math.max(width, 420) + 2 * MARGIN, HEADER + height + 60, parts);
}
