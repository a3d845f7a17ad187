// Heat maps: one canvas, one pixel of the image for each cell, enlarged without smoothing.

import type { Scale } from "../state";
import { packedColor, rampColors, stepTable } from "./colors";

export interface HeatmapImage {
  data: Uint8Array | Uint8ClampedArray;
  rows: number;
  columns: number;
  masked?: Uint8Array | undefined;
}

/** Draw 8-bit weights, so that each cell is one pixel; cells without an allowed pair are hatched. */
export function drawHeatmap(canvas: HTMLCanvasElement, image: HeatmapImage, scale: Scale): void {
  const { rows, columns, data, masked } = image;
  // A masked cell is a 2 x 2 checker, so small images are drawn with two pixels a cell.
  const zoom = masked && rows * columns <= 512 * 512 ? 2 : 1;
  canvas.width = columns * zoom;
  canvas.height = rows * zoom;
  const context = canvas.getContext("2d")!;
  const pixels = context.createImageData(canvas.width, canvas.height);
  const target = new Uint32Array(pixels.data.buffer);
  const colors = rampColors("seq");
  const steps = stepTable(scale);
  const hatch = packedColor("--hatch");
  const ground = packedColor("--hatch-bg");
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const cell = row * columns + column;
      const hidden = masked?.[cell] === 1;
      const color = colors[steps[data[cell]!]!]!;
      for (let y = 0; y < zoom; y++) {
        for (let x = 0; x < zoom; x++) {
          const on = zoom === 2 ? x === 1 - y : (row + column) % 2 === 1;
          target[(row * zoom + y) * canvas.width + column * zoom + x] = hidden ? (on ? hatch : ground) : color;
        }
      }
    }
  }
  context.putImageData(pixels, 0, 0);
}

/** One picture of 64 x 64 cells from the atlas of thumbnails. */
export function thumbnailImage(atlas: Uint8Array, index: number): HeatmapImage {
  return { data: atlas.subarray(index * 4096, (index + 1) * 4096), rows: 64, columns: 64 };
}
