// The figure of all heads: layers down, heads across, as the Map shows them.

import { drawBand, type CellContent } from "../canvas/head_cells";
import { cssRamp, cssValue } from "../canvas/colors";
import { BADGE_PATHS, badgeBaseline, classLetter, className, LETTERS, type Letter } from "../components/class_badge";
import { bandContent, stackColumns, stackNumbers } from "../components/head_grid";
import { format, measureName, say, t, type TextKey } from "../i18n";
import { cellMode, doc, headCount, headName, measures, scale, sites, stacks, thumbnails } from "../state";
import { element, makeFigure, printable, textElement, textWidth, type Figure } from "./svg";

const CELL = 64; // the thumbnails have 64 x 64 cells
const GAP = 6;
const CAPTION = 20;
const LEFT = 56;
const MARGIN = 20;
const HEADER = 62;
const LEGEND_WIDTH = 220;

export function drawMap(): Figure {
  const title = `${printable(String(doc.value?.model["name"] ?? "headwise"))} · ${t("export.allHeads", { count: headCount.value })}`;
  const measured = measures.value ? t("map.measuredOn", { count: headCount.value, texts: say(measures.value.texts) }) : "";
  const parts = [
    textElement(title, { x: MARGIN, y: 28, "font-size": 15, "font-weight": 600 }),
    textElement(measured, { x: MARGIN, y: 47, fill: cssValue("--text-2") }),
  ];
  let top = HEADER;
  let width = Math.max(textWidth(title, 15), textWidth(measured, 11), 460);
  for (const stack of stacks.value.filter((name) => stackNumbers(name).length)) {
    const block = drawStack(stack, top);
    parts.push(...block.parts);
    top += block.height;
    width = Math.max(width, block.width);
  }
  parts.push(...legend(top + 8));
  return makeFigure(title, width + 2 * MARGIN, top + (cellMode.value === "thumbnail" ? 84 : 60), parts);
}

function drawStack(stack: string, top: number): { parts: string[]; width: number; height: number } {
  const numbers = stackNumbers(stack);
  const columns = stackColumns(numbers);
  const content = bandContent(numbers, columns);
  const pitch = CELL + CAPTION + GAP;
  const from = { x: MARGIN + LEFT, y: top + 40 };
  const parts = [textElement(stack, { x: MARGIN, y: top + 14, "font-weight": 600, "font-size": 12 })];
  const muted = { "font-size": 10, fill: cssValue("--text-2"), "text-anchor": "middle" };
  for (let head = 0; head < columns; head++) parts.push(textElement(`H${head}`, { ...muted, x: from.x + head * (CELL + GAP) + CELL / 2, y: from.y - 6 }));
  numbers.forEach((number, row) => parts.push(textElement(headName(number, 0).split(" ")[0]!, { ...muted, "text-anchor": "end", x: from.x - 8, y: from.y + row * pitch + CELL / 2 + 3 })));
  for (const cell of content.cells) parts.push(drawCell(cell, from.x + cell.column * (CELL + GAP), from.y + cell.row * pitch, content.mode));
  return { parts, width: LEFT + columns * (CELL + GAP), height: 40 + numbers.length * pitch + 12 };
}

function drawCell(cell: CellContent, x: number, y: number, mode: string): string {
  const frame = { x, y, width: CELL, height: CELL + CAPTION, fill: "none", stroke: cssValue("--line-strong"), "stroke-width": 0.5 };
  if (cell.head === null) return element("rect", { ...frame, "stroke-dasharray": "1 3" });
  const parts: string[] = [];
  if (mode === "thumbnail") parts.push(element("image", { x, y, width: CELL, height: CELL, href: thumbnailPicture(cell), "image-rendering": "pixelated" }));
  else if (mode !== "class" && Number.isFinite(cell.shade)) parts.push(element("rect", { x, y, width: CELL, height: CELL, fill: cssRamp(cell.shade) }));
  if (mode === "class") parts.push(drawBadge(classLetter(cell.className), x + CELL / 2, y + CELL / 2, 28));
  else if (cell.className !== undefined) parts.push(drawBadge(classLetter(cell.className), x + 12, y + CELL + CAPTION / 2, 14));
  parts.push(textElement(cell.caption, { x: x + CELL - 5, y: y + CELL + 14, "font-size": 10, "text-anchor": "end", fill: cssValue("--text-2") }));
  parts.push(element("rect", frame));
  if (cell.isAblated) parts.push(element("line", { x1: x, y1: y + CELL + CAPTION, x2: x + CELL, y2: y, stroke: cssValue("--text"), "stroke-width": 1.5 }));
  return element("g", cell.isDimmed ? { opacity: 0.3 } : {}, ...parts);
}

/** The picture of a head as the Map draws it, as an address that contains it. */
function thumbnailPicture(cell: CellContent): string {
  const canvas = document.createElement("canvas");
  const plain = { ...cell, row: 0, column: 0, isAblated: false, isDimmed: false };
  drawBand(canvas, { cells: [plain], brackets: [], columns: 1, rows: 1, mode: "thumbnail" }, { cell: CELL, caption: 0, gap: 0, rowGap: 0 }, thumbnails.value, scale.value);
  return canvas.toDataURL("image/png");
}

function drawBadge(letter: Letter, x: number, y: number, size: number): string {
  const style = { fill: letter === "u" ? cssValue("--surface") : cssValue(`--c-${letter}`), stroke: cssValue("--class-line"), ...(letter === "u" ? { "stroke-dasharray": "2.5 2" } : {}) };
  const ink = { x: 8, y: badgeBaseline(letter), "font-size": 9.5, "font-weight": 600, "text-anchor": "middle", fill: cssValue(`--c-${letter}-ink`) };
  const place = { transform: `translate(${x - size / 2} ${y - size / 2}) scale(${size / 16})` };
  return element("g", place, element("path", { d: BADGE_PATHS[letter], ...style }), textElement(letter.toUpperCase(), ink));
}

/** What the colours of the cells mean, and the letters of the classes that occur. */
function legend(top: number): string[] {
  const mode = cellMode.value;
  const muted = { "font-size": 10, fill: cssValue("--text-2") };
  const range = doc.value?.measures.find(({ name }) => name === mode);
  const parts: string[] = [];
  if (mode !== "class") {
    const stops = Array.from({ length: 9 }, (_, index) => element("stop", { offset: index / 8, "stop-color": cssValue(`--seq-${index}`) }));
    const text = range
      ? t("map.rampOf", { name: measureName(mode), low: format(range.low), high: format(range.high) })
      : `${t("map.ramp", { scale: t(`scale.${scale.value}` as TextKey) })} · ${t("inspector.axes")}`;
    parts.push(
      element("linearGradient", { id: "ramp" }, ...stops),
      element("rect", { x: MARGIN, y: top, width: LEGEND_WIDTH, height: 10, fill: "url(#ramp)", stroke: cssValue("--line-strong"), "stroke-width": 0.5 }),
      textElement(text, { ...muted, x: MARGIN + LEGEND_WIDTH + 10, y: top + 9 }),
    );
  }
  if (!measures.value) return parts;
  const used = new Set(sites.value.flatMap((_, number) => bandContent([number], 1).cells.map((cell) => classLetter(cell.className))));
  let x = MARGIN;
  const y = mode === "class" ? top + 6 : top + 30;
  for (const letter of LETTERS.filter((item) => used.has(item))) {
    parts.push(drawBadge(letter, x + 8, y, 14), textElement(className(letter), { ...muted, x: x + 20, y: y + 3.5 }));
    x += 34 + textWidth(className(letter), 10);
  }
  return parts;
}
