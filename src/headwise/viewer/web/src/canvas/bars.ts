// Marginal bars beside a matrix: one bar for each of its rows or columns, on a canvas that is stretched to its side.

import { packedColor } from "./colors";

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
