// For a model of images: the weights of a query over the patches of the image, or over an empty grid without an image.

import { effect, type ReadonlySignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { cssRamp, rampPosition, themeVersion } from "../canvas/colors";
import { cellUnder } from "../canvas/heatmap";
import { format, t } from "../i18n";
import type { Message, Site } from "../source";
import { doc, scale, selectedToken, showsTable, useAnswer } from "../state";
import { Panel } from "./basics";
import { DataTable } from "./data_table";
import type { ExactRow } from "./head_data";

interface Grid {
  rows: number;
  columns: number;
  extra: number; // tokens before the patches
}

const OTHER_TOKENS = [1, 0, 2, 5]; // class, distillation and register tokens
const PICTURE_SIDE = 480; // pixels of the longer side

/** Rows and columns of the patches, which have the proportions of the image (1 without one); null if none fit. */
export function patchGrid(numKeys: number, height: number, width: number): Grid | null {
  for (const extra of OTHER_TOKENS) {
    const rows = Math.round(Math.sqrt(((numKeys - extra) * height) / width));
    const columns = rows > 0 ? Math.round((rows * width) / height) : 0;
    if (rows > 1 && columns > 1 && rows * columns === numKeys - extra) return { rows, columns, extra };
  }
  return null;
}

export function PatchPanel({ item, row: exactRow }: { item: Site; row: ReadonlySignal<ExactRow | null> }): JSX.Element {
  const [height, width] = doc.value?.images[item.keyStream] ?? [1, 1];
  const hasImage = doc.value?.images[item.keyStream] !== undefined;
  const { found: image } = useAnswer(
    () => (doc.value?.images[item.keyStream] ? `image?stream=${encodeURIComponent(item.keyStream)}` : null),
    ({ arrays }) => arrays["image"]!,
  );
  const row = exactRow.value;
  const grid = patchGrid(item.numKeys, height, width);
  const canDraw = grid && row && row.weights.length === item.numKeys;
  const weights = canDraw ? row.weights.subarray(grid.extra) : null;
  const most = weights ? weights.reduce((a, b) => Math.max(a, b), 0) : 0;
  return (
    <Panel title={t("head.patches")}>
      {!grid && <p class="t3">{t("head.noPatches", { keys: item.numKeys })}</p>}
      {grid && !row && <p class="t3">{t("head.choosePatch")}</p>}
      {grid && weights && showsTable.value && <PatchTable grid={grid} weights={weights} />}
      {grid && (weights || image.value) && !(weights && showsTable.value) && <Picture grid={grid} image={image.value} weights={weights} most={most} size={[height, width]} query={row ? row.query - grid.extra : -1} isSelf={item.queryStream === item.keyStream} />}
      {grid && weights && <p class="t3 xs">{t("patches.scale", { rows: grid.rows, columns: grid.columns, most: format(most), extra: grid.extra })}</p>}
      <p class="t3 xs">{hasImage ? t("patches.image") : t("head.noImage")}</p>
    </Panel>
  );
}

/** The weight on every patch, by its row and column. */
function PatchTable({ grid, weights }: { grid: Grid; weights: Float32Array }): JSX.Element {
  const rows = Array.from(weights, (weight, patch) => ({ row: Math.floor(patch / grid.columns), column: patch % grid.columns, weight }));
  return (
    <DataTable
      caption={t("head.patches")}
      rows={rows}
      sort="weight"
      columns={[
        { key: "row", title: t("patches.row"), numeric: true, value: (one) => one.row },
        { key: "column", title: t("patches.column"), numeric: true, value: (one) => one.column },
        { key: "weight", title: t("weight"), numeric: true, value: (one) => one.weight, cell: (one) => one.weight.toPrecision(4) },
      ]}
    />
  );
}

interface PictureProps {
  grid: Grid;
  image: Message["arrays"][string] | null;
  weights: Float32Array | null;
  most: number;
  size: [number, number];
  query: number;
  isSelf: boolean;
}

/** The image with the weights over its patches; a click on a patch makes it the query. */
function Picture(props: PictureProps): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { grid, image, weights, most, size } = props;
  useEffect(
    () =>
      effect(() => {
        void themeVersion.value;
        const shown = scale.value;
        if (canvas.current) draw(canvas.current, props, (weight) => rampPosition(most > 0 ? weight / most : 0, shown));
      }),
    [image, weights, most, props.query],
  );
  const choose = (event: MouseEvent) => {
    const cell = cellUnder(event, grid.rows, grid.columns);
    if (cell && props.isSelf) selectedToken.value = cell[0] * grid.columns + cell[1] + grid.extra;
  };
  const zoom = PICTURE_SIDE / Math.max(...size);
  return (
    <div class="minimap patches" onClick={choose}>
      <canvas ref={canvas} role="img" aria-label={t("head.patches")} width={Math.round(size[1] * zoom)} height={Math.round(size[0] * zoom)} />
    </div>
  );
}

function draw(canvas: HTMLCanvasElement, { grid, image, weights, query }: PictureProps, strength: (weight: number) => number): void {
  const context = canvas.getContext("2d")!;
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  if (image) drawPixels(context, image, width, height);
  const [across, down] = [width / grid.columns, height / grid.rows];
  weights?.forEach((weight, patch) => {
    const share = strength(weight);
    context.globalAlpha = image ? 0.85 * share : 1;
    context.fillStyle = cssRamp(share);
    context.fillRect((patch % grid.columns) * across, Math.floor(patch / grid.columns) * down, across, down);
  });
  context.globalAlpha = 1;
  if (query < 0) return;
  context.lineWidth = 3;
  context.strokeStyle = getComputedStyle(canvas).getPropertyValue("--select");
  context.strokeRect((query % grid.columns) * across + 1.5, Math.floor(query / grid.columns) * down + 1.5, across - 3, down - 3);
}

function drawPixels(context: CanvasRenderingContext2D, { data, shape }: Message["arrays"][string], width: number, height: number): void {
  const [rows = 1, columns = 1, channels = 1] = shape;
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  const pixels = new ImageData(columns, rows);
  for (let pixel = 0; pixel < rows * columns; pixel++) {
    for (let channel = 0; channel < 3; channel++) pixels.data[pixel * 4 + channel] = data[pixel * channels + (channels === 1 ? 0 : channel)]!;
    pixels.data[pixel * 4 + 3] = 255;
  }
  small.getContext("2d")!.putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, height);
}
