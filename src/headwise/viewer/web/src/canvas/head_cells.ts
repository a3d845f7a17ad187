// Draws the heads of some rows of the Map on one canvas: thumbnails, measures or classes, with captions and marks.

import type { Scale, ThumbnailAtlas } from "../state";
import { BADGE_PATHS, badgeBaseline, badgeSign, classLetter, type Letter } from "../components/class_badge";
import { cssRamp, cssValue, packedColor, rampColors, stepTable, themeVersion } from "./colors";
import { THUMBNAIL_SIDE, thumbnailImage } from "./heatmap";

/** Sizes of the grid in CSS pixels. */
export interface CellSizes {
  cell: number; // width of a cell, and height of its picture
  caption: number; // height of the caption; 0 if there is no room for one
  gap: number; // between cells of a row
  rowGap: number; // between rows; wider where key-value groups are bracketed
}

/** One head as a cell shows it. `head` is null where a head was pruned. */
export interface CellContent {
  row: number;
  column: number;
  head: number | null;
  className: string | undefined;
  shade: number; // position on the ramp from 0 to 1, or NaN if the measure is unknown
  caption: string;
  sink: number; // weight on sinks from 0 to 1, or NaN
  isAblated: boolean;
  isDimmed: boolean;
}

/** Neighbouring cells of a row whose query heads share a key-value head. */
export interface Bracket {
  row: number;
  first: number;
  last: number;
}

export interface BandContent {
  cells: CellContent[];
  brackets: Bracket[];
  columns: number;
  rows: number;
  mode: string; // "thumbnail", "class" or a measure
}

export function rowPitch({ cell, caption, rowGap }: CellSizes): number {
  return cell + caption + rowGap;
}

const HATCH_FROM = 44; // CSS pixels of a cell from which masked parts are hatched; smaller ones are plain
const CAPTION_FONT = "11px";
const NUMBER_FROM = 40; // CSS pixels of a cell from which the caption has room for a number beside the badge

/** Draw a band of rows on a canvas of its own size. */
export function drawBand(canvas: HTMLCanvasElement, band: BandContent, sizes: CellSizes, atlas: ThumbnailAtlas | null, scale: Scale): void {
  const ratio = devicePixelRatio || 1;
  const pitch = rowPitch(sizes);
  const width = Math.max(1, Math.round(band.columns * (sizes.cell + sizes.gap) * ratio));
  const height = Math.max(1, Math.round(band.rows * pitch * ratio));
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d")!;
  if (band.mode === "thumbnail" && atlas) drawPictures(context, band, sizes, atlas, scale);
  context.scale(ratio, ratio);
  const colors = readColors();
  for (const cell of band.cells) {
    const x = cell.column * (sizes.cell + sizes.gap);
    const y = cell.row * pitch + sizes.rowGap / 2;
    if (cell.head === null) drawGap(context, x, y, sizes, colors);
    else drawCell(context, cell, x, y, sizes, colors, band.mode);
  }
  context.strokeStyle = colors.bracket;
  for (const { row, first, last } of band.brackets) {
    const y = Math.round(row * pitch) + 2.5;
    const left = first * (sizes.cell + sizes.gap) + 0.5;
    const right = last * (sizes.cell + sizes.gap) + sizes.cell - 0.5;
    context.beginPath();
    context.moveTo(left, y + 3);
    context.lineTo(left, y);
    context.lineTo(right, y);
    context.lineTo(right, y + 3);
    context.stroke();
  }
}

type Colors = Record<"line" | "text" | "text2" | "surface" | "empty" | "sink" | "bracket" | "font", string>;

function readColors(): Colors {
  return {
    line: cssValue("--line"),
    text: cssValue("--text"),
    text2: cssValue("--text-2"),
    surface: cssValue("--surface"),
    empty: cssValue("--empty-line"),
    sink: cssValue("--c-k"),
    bracket: cssValue("--line-strong"),
    font: cssValue("--font-ui"),
  };
}

/** The thumbnails of all cells, written as pixels: the largest weight of each pixel, so that no thin line disappears. */
function drawPictures(context: CanvasRenderingContext2D, band: BandContent, sizes: CellSizes, atlas: ThumbnailAtlas, scale: Scale): void {
  const ratio = devicePixelRatio || 1;
  const { width, height } = context.canvas;
  const pixels = context.createImageData(width, height);
  const target = new Uint32Array(pixels.data.buffer);
  const side = Math.max(1, Math.round(sizes.cell * ratio));
  const edges = Array.from({ length: side + 1 }, (_, index) => Math.floor((index * THUMBNAIL_SIDE) / side));
  const colors = rampColors("seq");
  const steps = stepTable(scale);
  const hatch = sizes.cell >= HATCH_FROM ? packedColor("--hatch") : packedColor("--hatch-bg");
  const ground = packedColor("--hatch-bg");
  const spacing = Math.round(5 * ratio);
  for (const cell of band.cells) {
    if (cell.head === null) continue;
    const { data, masked } = thumbnailImage(atlas, cell.head);
    const left = Math.round(cell.column * (sizes.cell + sizes.gap) * ratio);
    const top = Math.round((cell.row * rowPitch(sizes) + sizes.rowGap / 2) * ratio);
    for (let y = 0; y < side; y++) {
      const y0 = edges[y]!;
      const y1 = Math.max(edges[y + 1]!, y0 + 1);
      let at = (top + y) * width + left;
      for (let x = 0; x < side; x++, at++) {
        const x0 = edges[x]!;
        const x1 = Math.max(edges[x + 1]!, x0 + 1);
        let most = 0;
        let hidden = 1;
        for (let row = y0; row < y1; row++) {
          for (let source = row * THUMBNAIL_SIDE + x0, end = row * THUMBNAIL_SIDE + x1; source < end; source++) {
            if (data[source]! > most) most = data[source]!;
            hidden &= masked![source]!;
          }
        }
        target[at] = hidden ? ((x + y) % spacing === 0 ? hatch : ground) : colors[steps[most]!]!;
      }
    }
  }
  context.putImageData(pixels, 0, 0);
}

function drawCell(context: CanvasRenderingContext2D, cell: CellContent, x: number, y: number, sizes: CellSizes, colors: Colors, mode: string): void {
  const size = sizes.cell;
  if (mode !== "thumbnail") {
    context.fillStyle = mode !== "class" && Number.isFinite(cell.shade) ? cssRamp(cell.shade) : colors.surface;
    context.fillRect(x, y, size, size);
  }
  if (mode === "class") drawBadge(context, cell.className, x + size / 2, y + size / 2, Math.min(28, size - 4));
  if (mode === "thumbnail" && sizes.caption && cell.sink > 0) {
    context.fillStyle = colors.sink;
    context.fillRect(x, y + size * (1 - Math.min(cell.sink, 1)), 3, size * Math.min(cell.sink, 1));
  }
  if (cell.isAblated) {
    context.globalAlpha = 0.72;
    context.fillStyle = colors.surface;
    context.fillRect(x, y, size, size);
    context.globalAlpha = 1;
  }
  if (sizes.caption) drawCaption(context, cell, x, y, sizes, colors);
  const isUnknown = mode !== "thumbnail" && mode !== "class" && !Number.isFinite(cell.shade);
  context.strokeStyle = isUnknown ? colors.empty : colors.line;
  context.setLineDash(isUnknown ? [3, 2] : []);
  context.strokeRect(x + 0.5, y + 0.5, size - 1, size + sizes.caption - 1);
  context.setLineDash([]);
  if (cell.isAblated) strike(context, x, y, size, size + sizes.caption, colors.text);
  if (cell.isDimmed) {
    context.globalAlpha = 0.7;
    context.fillStyle = colors.surface;
    context.fillRect(x, y, size, size + sizes.caption);
    context.globalAlpha = 1;
  }
}

function drawCaption(context: CanvasRenderingContext2D, cell: CellContent, x: number, y: number, sizes: CellSizes, colors: Colors): void {
  const top = y + sizes.cell;
  const middle = top + sizes.caption / 2;
  context.fillStyle = colors.surface;
  context.fillRect(x, top, sizes.cell, sizes.caption);
  const isWide = sizes.cell >= NUMBER_FROM;
  if (cell.className !== undefined) drawBadge(context, cell.className, isWide ? x + 11 : x + sizes.cell / 2, middle, 14);
  if (cell.className !== undefined && !isWide) return;
  context.font = `${CAPTION_FONT} ${colors.font}`;
  context.textBaseline = "middle";
  context.textAlign = cell.className === undefined ? "center" : "right";
  context.fillStyle = colors.text2;
  context.fillText(cell.caption, cell.className === undefined ? x + sizes.cell / 2 : x + sizes.cell - 4, middle + 0.5);
}

function drawGap(context: CanvasRenderingContext2D, x: number, y: number, sizes: CellSizes, colors: Colors): void {
  context.strokeStyle = colors.empty;
  context.setLineDash([1, 3]);
  context.strokeRect(x + 0.5, y + 0.5, sizes.cell - 1, sizes.cell + sizes.caption - 1);
  context.setLineDash([]);
}

function strike(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, color: string): void {
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x, y + height);
  context.lineTo(x + width, y);
  context.stroke();
  context.lineWidth = 1;
}

const sprites = new Map<string, HTMLCanvasElement>();
let spriteTheme = -1;

/** Draw the badge of a class, centred at a point. Each badge is drawn once for its size and theme, and then copied. */
export function drawBadge(context: CanvasRenderingContext2D, name: string | undefined, x: number, y: number, size: number): void {
  if (spriteTheme !== themeVersion.peek()) sprites.clear();
  spriteTheme = themeVersion.peek();
  const letter = classLetter(name);
  const key = `${letter} ${size} ${devicePixelRatio}`;
  let sprite = sprites.get(key);
  if (!sprite) sprites.set(key, (sprite = makeSprite(letter, size)));
  context.drawImage(sprite, x - size / 2, y - size / 2, size, size);
}

function makeSprite(letter: Letter, size: number): HTMLCanvasElement {
  const sprite = document.createElement("canvas");
  sprite.width = sprite.height = Math.ceil(size * (devicePixelRatio || 1));
  const context = sprite.getContext("2d")!;
  context.scale(sprite.width / 18, sprite.width / 18);
  context.translate(1, 1);
  const outline = new Path2D(BADGE_PATHS[letter]);
  context.fillStyle = letter === "u" ? cssValue("--surface") : cssValue(`--c-${letter}`);
  context.fill(outline);
  context.strokeStyle = cssValue("--class-line");
  context.setLineDash(letter === "u" ? [2.5, 2] : []);
  context.stroke(outline);
  if (size >= 12) {
    context.font = `600 9.5px ${cssValue("--font-ui")}`;
    context.textAlign = "center";
    context.fillStyle = cssValue(`--c-${letter}-ink`);
    context.fillText(badgeSign(letter), 8, badgeBaseline(letter));
  }
  return sprite;
}
