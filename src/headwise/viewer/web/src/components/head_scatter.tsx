// The scatter plot of the Map: any measure against any other, coloured by class or by a third. A drag chooses heads.

import { useSignal, useSignalEffect, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { cssRamp, cssValue, themeVersion } from "../canvas/colors";
import { drawBadge } from "../canvas/head_cells";
import { format, measureName, t } from "../i18n";
import { classesOf, headIndex, headName, measureOf, measures, scatterColor, scatterX, scatterY, selectHead } from "../state";
import { Button, Panel, Select, useWidth } from "./basics";
import { brushedHeads, isDimmed, type HeadItem } from "./head_grid";

const HEIGHT = 260;
const MARGIN = { left: 44, right: 14, top: 22, bottom: 36 };
const POINT = 11; // CSS pixels of a mark
const REACH = 12; // CSS pixels from the pointer to the nearest mark

interface Point {
  item: HeadItem;
  x: number;
  y: number;
}

interface Axes {
  width: number;
  x: [number, number];
  y: [number, number];
}

interface Box {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

/** Ticks at round numbers that cover a range. */
export function roundTicks(low: number, high: number, count = 5): number[] {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw)!;
  const ticks: number[] = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

export function HeadScatter({ heads }: { heads: HeadItem[] }): JSX.Element {
  const names = measures.value!.names;
  const known = (name: string, other: number) => (names.includes(name) ? name : (names[other] ?? names[0]!));
  const x = known(scatterX.value, 0);
  const y = known(scatterY.value, 1);
  const color = names.includes(scatterColor.value) ? scatterColor.value : "class";
  const points = useMemo(
    () => heads.map((item) => ({ item, x: measureOf(item.index, x), y: measureOf(item.index, y) })).filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y)),
    [heads, x, y, measures.value],
  );
  const options = names.map((name): [string, string] => [name, measureName(name)]);
  const brushed = brushedHeads.value;
  return (
    <Panel
      class="scatter-panel"
      title={t("map.scatter")}
      side={
        <>
          <Select label="x" value={x} options={options} onChange={(name) => (scatterX.value = name)} />
          <Select label="y" value={y} options={options} onChange={(name) => (scatterY.value = name)} />
          <Select label={t("map.color")} value={color} options={[["class", t("class")], ...options]} onChange={(name) => (scatterColor.value = name)} />
        </>
      }
      footer={
        <div class="row between">
          <span>{brushed ? t("map.brushed", { count: brushed.size }) : t("map.brush")}</span>
          {brushed && <Button onClick={() => (brushedHeads.value = null)}>{t("map.unbrush")}</Button>}
        </div>
      }
    >
      <Plot points={points} color={color} names={[x, y]} />
    </Panel>
  );
}

function extent(values: number[]): [number, number] {
  let low = 0;
  let high = 1e-9;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

function placePoint({ width, x, y }: Axes, point: { x: number; y: number }): [number, number] {
  const across = (point.x - x[0]) / (x[1] - x[0]);
  const up = (point.y - y[0]) / (y[1] - y[0]);
  return [MARGIN.left + across * (width - MARGIN.left - MARGIN.right), HEIGHT - MARGIN.bottom - up * (HEIGHT - MARGIN.top - MARGIN.bottom)];
}

/** Two canvases: the marks, and above them what follows the pointer and the selection. */
function Plot({ points, color, names }: { points: Point[]; color: string; names: [string, string] }): JSX.Element {
  const [frame, width] = useWidth<HTMLDivElement>();
  const marks = useRef<HTMLCanvasElement>(null);
  const cursor = useRef<HTMLCanvasElement>(null);
  const hovered = useSignal<Point | null>(null);
  const drag = useSignal<Box | null>(null);
  const axes = useMemo(() => ({ x: extent(points.map((point) => point.x)), y: extent(points.map((point) => point.y)) }), [points]);
  const shown = useSignal({ points, axes, color, names });
  shown.value = { points, axes, color, names };
  useSignalEffect(() => {
    void themeVersion.value;
    const { points, axes, color, names } = shown.value;
    if (marks.current && width.value) drawMarks(startCanvas(marks.current, width.value), { ...axes, width: width.value }, points, color, names);
  });
  useSignalEffect(() => {
    void themeVersion.value;
    const { points, axes } = shown.value;
    if (!cursor.current || !width.value) return;
    const context = startCanvas(cursor.current, width.value);
    const selected = points.find(({ item }) => item.index === headIndex.value);
    for (const point of [selected, hovered.value]) if (point) drawRing(context, { ...axes, width: width.value }, point);
    if (drag.value) drawBox(context, drag.value);
  });
  return (
    <div
      class={`scatter ${hovered.value ? "on-point" : ""}`}
      ref={frame}
      role="img"
      aria-label={t("map.scatterLabel", { x: measureName(names[0]), y: measureName(names[1]), count: points.length })}
      {...pointerHandlers(points, () => ({ ...axes, width: width.value }), hovered, drag)}
    >
      <canvas ref={marks} width={1} height={1} />
      <canvas ref={cursor} width={1} height={1} />
    </div>
  );
}

function pointerHandlers(points: Point[], axes: () => Axes, hovered: Signal<Point | null>, drag: Signal<Box | null>) {
  const place = (event: PointerEvent): [number, number] => {
    const area = (event.currentTarget as HTMLElement).getBoundingClientRect();
    return [event.clientX - area.left, event.clientY - area.top];
  };
  const onPointerMove = (event: PointerEvent) => {
    const [x, y] = place(event);
    if (drag.value) drag.value = { ...drag.value, right: x, bottom: y };
    else hovered.value = findNearest(points, axes(), x, y);
  };
  const onPointerDown = (event: PointerEvent) => {
    const [x, y] = place(event);
    (event.currentTarget as HTMLElement).setPointerCapture(event.pointerId);
    drag.value = { left: x, right: x, top: y, bottom: y };
  };
  const onPointerUp = () => {
    const box = drag.value;
    drag.value = null;
    if (!box) return;
    if (Math.abs(box.right - box.left) < 4 && Math.abs(box.bottom - box.top) < 4) {
      const point = findNearest(points, axes(), box.left, box.top);
      if (point) selectHead(point.item.site, point.item.head);
      else brushedHeads.value = null;
      return;
    }
    const inside = points.filter((point) => isInside(box, placePoint(axes(), point)));
    brushedHeads.value = inside.length ? new Set(inside.map(({ item }) => item.index)) : null;
  };
  const onPointerLeave = () => (hovered.value = null);
  const onPointerCancel = () => (drag.value = null);
  return { onPointerMove, onPointerDown, onPointerUp, onPointerLeave, onPointerCancel };
}

function isInside(box: Box, [x, y]: [number, number]): boolean {
  const between = (value: number, a: number, b: number) => value >= Math.min(a, b) && value <= Math.max(a, b);
  return between(x, box.left, box.right) && between(y, box.top, box.bottom);
}

function findNearest(points: Point[], axes: Axes, x: number, y: number): Point | null {
  let best: Point | null = null;
  let least = REACH * REACH;
  for (const point of points) {
    const [px, py] = placePoint(axes, point);
    const distance = (px - x) ** 2 + (py - y) ** 2;
    if (distance < least) [best, least] = [point, distance];
  }
  return best;
}

function startCanvas(canvas: HTMLCanvasElement, width: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  context.font = `10px ${cssValue("--font-ui")}`;
  return context;
}

function drawMarks(context: CanvasRenderingContext2D, axes: Axes, points: Point[], color: string, names: [string, string]): void {
  drawAxes(context, axes, names);
  const [low, high] = color === "class" ? [0, 1] : extent(points.map(({ item }) => measureOf(item.index, color)).filter(Number.isFinite));
  context.strokeStyle = cssValue("--class-line");
  for (const point of points) {
    const [x, y] = placePoint(axes, point);
    context.globalAlpha = isDimmed(point.item.index) ? 0.18 : 1;
    if (color === "class") {
      drawBadge(context, classesOf(point.item.index)[0]?.name, x, y, POINT);
      continue;
    }
    const value = measureOf(point.item.index, color);
    context.fillStyle = Number.isFinite(value) ? cssRamp((value - low) / (high - low)) : cssValue("--surface");
    context.beginPath();
    context.arc(x, y, POINT / 2 - 1, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
  }
  context.globalAlpha = 1;
}

function drawAxes(context: CanvasRenderingContext2D, axes: Axes, [x, y]: [string, string]): void {
  const right = axes.width - MARGIN.right;
  const bottom = HEIGHT - MARGIN.bottom;
  context.strokeStyle = cssValue("--line");
  context.fillStyle = cssValue("--text-3");
  const line = (x0: number, y0: number, x1: number, y1: number) => {
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  };
  context.textAlign = "center";
  for (const tick of roundTicks(...axes.x)) {
    const at = Math.round(placePoint(axes, { x: tick, y: 0 })[0]) + 0.5;
    line(at, MARGIN.top, at, bottom);
    context.fillText(format(tick), at, bottom + 14);
  }
  context.textAlign = "right";
  for (const tick of roundTicks(...axes.y, 4)) {
    const at = Math.round(placePoint(axes, { x: 0, y: tick })[1]) + 0.5;
    line(MARGIN.left, at, right, at);
    context.fillText(format(tick), MARGIN.left - 6, at + 3.5);
  }
  context.fillStyle = cssValue("--text-2");
  context.fillText(measureName(x), right, HEIGHT - 6);
  context.textAlign = "left";
  context.fillText(measureName(y), 4, 12);
}

/** A ring around a mark, with the name of its head on a ground of its own. */
function drawRing(context: CanvasRenderingContext2D, axes: Axes, point: Point): void {
  const [x, y] = placePoint(axes, point);
  context.strokeStyle = cssValue("--select");
  context.lineWidth = 2;
  context.beginPath();
  context.arc(x, y, POINT / 2 + 3, 0, 2 * Math.PI);
  context.stroke();
  const name = headName(point.item.site, point.item.head);
  context.font = `600 11px ${cssValue("--font-ui")}`;
  const size = context.measureText(name).width + 6;
  const left = x + POINT + size > axes.width ? x - POINT - size : x + POINT;
  context.fillStyle = cssValue("--surface");
  context.fillRect(left, y - 8, size, 16);
  context.fillStyle = cssValue("--text");
  context.textAlign = "left";
  context.fillText(name, left + 3, y + 4);
}

function drawBox(context: CanvasRenderingContext2D, { left, top, right, bottom }: Box): void {
  context.strokeStyle = cssValue("--accent");
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  context.strokeRect(left, top, right - left, bottom - top);
  context.setLineDash([]);
}
