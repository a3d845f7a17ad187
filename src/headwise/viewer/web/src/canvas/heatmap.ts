// Heat maps: one canvas, one pixel of the image for each cell, enlarged without smoothing.

import type { Scale, ThumbnailAtlas } from "../state";
import { packedColor, rampColors, signedStepTable, stepTable } from "./colors";

export interface HeatmapImage {
  data: Uint8Array | Uint8ClampedArray;
  rows: number;
  columns: number;
  masked?: Uint8Array | undefined;
  /** Whether the data are differences: 128 is none, 1 and 255 are -1 and 1. */
  isSigned?: boolean;
}

/** Draw 8-bit weights, so that each cell is one pixel; cells without an allowed pair are hatched. */
export function drawHeatmap(canvas: HTMLCanvasElement, image: HeatmapImage, scale: Scale): void {
  const { rows, columns, data, masked } = image;
  // Masked cells are hatched with thin lines, so small images are drawn at about the resolution of the screen.
  const wanted = (canvas.clientWidth || 256) * (devicePixelRatio || 1);
  const zoom = masked ? Math.min(Math.max(Math.round(wanted / Math.max(rows, columns)), 1), 32) : 1;
  const spacing = zoom >= 4 ? 6 : 4;
  canvas.width = columns * zoom;
  canvas.height = rows * zoom;
  const context = canvas.getContext("2d")!;
  const pixels = context.createImageData(canvas.width, canvas.height);
  const target = new Uint32Array(pixels.data.buffer);
  const colors = rampColors(image.isSigned ? "div" : "seq");
  const steps = image.isSigned ? signedStepTable(scale) : stepTable(scale);
  const hatch = packedColor("--hatch");
  const ground = packedColor("--hatch-bg");
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const cell = row * columns + column;
      const hidden = masked?.[cell] === 1;
      const color = colors[steps[data[cell]!]!]!;
      for (let y = row * zoom; y < (row + 1) * zoom; y++) {
        for (let x = column * zoom; x < (column + 1) * zoom; x++) {
          target[y * canvas.width + x] = hidden ? ((x + y) % spacing === 0 ? hatch : ground) : color;
        }
      }
    }
  }
  context.putImageData(pixels, 0, 0);
}

/** The row and the column of a picture under the pointer, by the canvas of an element; null beside it. */
export function cellUnder(event: MouseEvent, rows: number, columns: number): [row: number, column: number] | null {
  const area = (event.currentTarget as HTMLElement).querySelector("canvas")!.getBoundingClientRect();
  const x = (event.clientX - area.left) / area.width;
  const y = (event.clientY - area.top) / area.height;
  return x < 0 || y < 0 || x >= 1 || y >= 1 ? null : [Math.floor(y * rows), Math.floor(x * columns)];
}

export const THUMBNAIL_SIDE = 64;
const THUMBNAIL_CELLS = THUMBNAIL_SIDE * THUMBNAIL_SIDE;

/** One picture of 64 x 64 cells from the atlas of thumbnails. */
export function thumbnailImage(atlas: ThumbnailAtlas, index: number): HeatmapImage {
  const part = (all: Uint8Array, number: number) => all.subarray(number * THUMBNAIL_CELLS, (number + 1) * THUMBNAIL_CELLS);
  const masked = part(atlas.masks, atlas.maskOfHead[index]!);
  return { data: part(atlas.pictures, index), rows: THUMBNAIL_SIDE, columns: THUMBNAIL_SIDE, masked };
}

const LENGTH = 96; // pixels of the longest bar
const SPACED_BELOW = 129; // bars with gaps between them, if there is room

/** The largest value of each of some nearly equal parts of a range. */
export function poolValues(values: Float32Array, first: number, last: number, parts: number): Float32Array {
  const pooled = new Float32Array(parts);
  for (let part = 0; part < parts; part++) {
    const end = first + Math.floor(((part + 1) * (last - first)) / parts);
    for (let at = first + Math.floor((part * (last - first)) / parts); at < end; at++) pooled[part] = Math.max(pooled[part]!, values[at] ?? 0);
  }
  return pooled;
}

/** Draw bars that grow to the right ("rows") or down ("columns"); `most` is the value of a full bar. */
export function drawBars(canvas: HTMLCanvasElement, values: Float32Array, most: number, side: "rows" | "columns"): void {
  const thick = values.length < SPACED_BELOW ? 5 : 1;
  const solid = thick === 1 ? 1 : 4;
  const [width, height] = side === "rows" ? [LENGTH, values.length * thick] : [values.length * thick, LENGTH];
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d")!;
  const pixels = context.createImageData(width, height);
  const target = new Uint32Array(pixels.data.buffer);
  const color = packedColor("--line-strong");
  values.forEach((value, index) => {
    const long = Math.min(LENGTH, Math.round((value / (most || 1)) * LENGTH));
    for (let across = index * thick; across < index * thick + solid; across++) {
      for (let along = 0; along < long; along++) target[side === "rows" ? across * width + along : along * width + across] = color;
    }
  });
  context.putImageData(pixels, 0, 0);
}
