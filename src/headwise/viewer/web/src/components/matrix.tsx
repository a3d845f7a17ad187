// The matrix of one head: a heat map with token labels, marginal bars, and a mark on the pointed cell.

import { useSignal, type ReadonlySignal, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { cellUnder, drawBars, poolValues } from "../canvas/heatmap";
import { themeVersion } from "../canvas/colors";
import { format, t } from "../i18n";
import type { Site } from "../source";
import { headName, matrixView, rowMarginal, scale, selectedHead, selectedSite, selectedToken, type View } from "../state";
import { Button, Heatmap } from "./basics";
import { cellSpan, isPooled, MAX_CELLS, shownView, wholeView, type Marginals, type Pointed, type TileState } from "./head_data";
import { streamWords, visibleToken } from "./tokens";

const MAX_LABELS = 64; // tokens on each side that are written out
const LABEL_LINE = 14; // CSS pixels that a label needs
const SIGN_WIDTH = 9; // of a label of one character
const UPRIGHT_SIGNS = 1; // characters of a label that needs no turning
const LEAST_SPAN = 8; // queries or keys that a view shows at least
const DRAG_CELLS = 2; // cells that a drag crosses at least to choose a part
const ZOOM = 4;

export function Matrix(props: { item: Site; tile: TileState | null; marginals: Marginals | null; pointed: Signal<Pointed | null> }): JSX.Element {
  const { item, tile, marginals, pointed } = props;
  const drag = useSignal<Drag>(null);
  const hasWords = streamWords(item.queryStream).length > 0 || streamWords(item.keyStream).length > 0;
  const view = tile?.view ?? shownView(item); // known before the tile arrives, so that nothing moves then
  const isLabelled = hasWords && view.q1 - view.q0 <= MAX_LABELS && view.k1 - view.k0 <= MAX_LABELS;
  const frame = useRef<HTMLDivElement>(null);
  const sides = [Math.min(view.k1 - view.k0, MAX_CELLS), Math.min(view.q1 - view.q0, MAX_CELLS)];
  useLayoutEffect(() => {
    const canvas = frame.current!.querySelector("canvas")!;
    canvas.style.aspectRatio = tile ? "" : sides.join(" / ");
  }, [tile === null, ...sides]);
  const words = { queries: streamWords(item.queryStream), keys: streamWords(item.keyStream) };
  const ignoresClick = useRef(false); // the click at the end of a drag
  // the same object until the tile changes, so that hovering draws nothing anew
  const image = useMemo(() => tile && { data: tile.weights, rows: tile.rows, columns: tile.columns, masked: tile.masked }, [tile]);
  const handlers = pointerHandlers(item, tile, pointed, drag, ignoresClick);
  return (
    <div class={`matrix ${isLabelled ? "labelled" : ""}`}>
      <ViewBar item={item} tile={tile} />
      {isLabelled && <TokenLabels words={words.keys.slice(view.k0, view.k1)} kind="columns" />}
      {isLabelled && <TokenLabels words={words.queries.slice(view.q0, view.q1)} kind="rows" />}
      <div ref={frame} class={`matrix-canvas ${tile?.isDraft ? "draft" : ""}`} tabIndex={0} role="application" aria-label={t("head.hint")} aria-busy={tile?.isDraft ?? true} {...handlers}>
        <Heatmap
          image={image}
          scale={scale.value}
          label={`${headName(selectedSite.value, selectedHead.value)}: ${t("inspector.size", { queries: item.numQueries, keys: item.numKeys })}`}
        />
        {tile && <Crosshair view={tile.view} cell={pointed} />}
        {tile && <DraggedPart view={tile.view} drag={drag} />}
      </div>
      <div class="marginal rows">{tile && marginals && <MarginalBars side="rows" tile={tile} values={marginals[rowMarginal.value]} label={t(`head.${rowMarginal.value}`)} />}</div>
      <div class="marginal columns">{tile && marginals && <MarginalBars side="columns" tile={tile} values={marginals.received} label={t("head.mass")} />}</div>
    </div>
  );
}

/** Which part is shown, and how to see more or less of it. */
function ViewBar({ item, tile }: { item: Site; tile: TileState | null }): JSX.Element | null {
  const whole = wholeView(item);
  const view = shownView(item);
  const isWhole = view.q1 - view.q0 === whole.q1 && view.k1 - view.k0 === whole.k1;
  if (Math.max(whole.q1, whole.k1) <= MAX_LABELS && isWhole) return null;
  const pooled = tile && isPooled(tile) && !tile.isDraft;
  return (
    <p class="view-bar row sm t2">
      <span class="grow">
        {isWhole ? t("head.all", { queries: whole.q1, keys: whole.k1 }) : t("head.window", view as unknown as Record<string, number>)}
        {pooled && <span class="t3"> · {t("head.pooled", { queries: Math.ceil((view.q1 - view.q0) / tile.rows), keys: Math.ceil((view.k1 - view.k0) / tile.columns) })}</span>}
      </span>
      <Button kind="icon" aria-label={t("head.zoomOut")} aria-disabled={isWhole} onClick={() => zoomView(item, 1 / ZOOM)}>−</Button>
      <Button kind="icon" aria-label={t("head.zoomIn")} onClick={() => zoomView(item, ZOOM)}>+</Button>
      <Button aria-disabled={isWhole} onClick={() => (matrixView.value = null)}>{t("head.whole")}</Button>
    </p>
  );
}

/** Show more (below 1) or less (above 1) of the matrix, around a pair or the middle of what is shown. */
export function zoomView(item: Site, factor: number, at?: { query: number; key: number }): void {
  const view = shownView(item);
  const query = at?.query ?? (view.q0 + view.q1) / 2;
  const key = at?.key ?? (view.k0 + view.k1) / 2;
  moveView(item, { queries: (view.q1 - view.q0) / factor, keys: (view.k1 - view.k0) / factor }, { query, key });
}

/** Show a part of this size around a pair, inside the matrix; the whole matrix if the part is as large. */
export function moveView(item: Site, size: { queries: number; keys: number }, at: { query: number; key: number }): void {
  const fit = (span: number, middle: number, count: number): [number, number] => {
    const length = Math.min(Math.max(Math.round(span), LEAST_SPAN), count);
    const start = Math.min(Math.max(Math.round(middle - length / 2), 0), count - length);
    return [start, start + length];
  };
  const [q0, q1] = fit(size.queries, at.query, item.numQueries);
  const [k0, k1] = fit(size.keys, at.key, item.numKeys);
  matrixView.value = q1 - q0 === item.numQueries && k1 - k0 === item.numKeys ? null : { q0, q1, k0, k1 };
}

function spanned({ from, to }: { from: View; to: View }): View {
  return { q0: Math.min(from.q0, to.q0), q1: Math.max(from.q1, to.q1), k0: Math.min(from.k0, to.k0), k1: Math.max(from.k1, to.k1) };
}

export function isSameView(a: View | null, b: View | null): boolean {
  return a?.q0 === b?.q0 && a?.k0 === b?.k0 && a?.q1 === b?.q1 && a?.k1 === b?.k1;
}

/** Hover previews, click keeps, drag shows a part, double click looks closer, arrow keys walk. */
function pointerHandlers(item: Site, tile: TileState | null, pointed: Signal<Pointed | null>, drag: Signal<Drag>, ignoresClick: { current: boolean }) {
  const cellAt = (event: MouseEvent): View | null => {
    const cell = tile && cellUnder(event, tile.rows, tile.columns);
    return tile && cell && cellSpan(tile, ...cell);
  };
  const onPointerMove = (event: PointerEvent) => {
    const cell = cellAt(event);
    if (drag.value && cell) drag.value = { ...drag.value, to: cell };
    else if (!pointed.value?.locked && !isSameView(cell, pointed.value)) pointed.value = cell && { ...cell, locked: false };
  };
  const onPointerDown = (event: PointerEvent) => {
    const cell = event.button === 0 && event.pointerType !== "touch" ? cellAt(event) : null;
    if (cell) drag.value = { from: cell, to: cell };
  };
  const onPointerUp = () => {
    const part = drag.value && spanned(drag.value);
    const isLong = drag.value && tile && dragLength(drag.value, tile) > DRAG_CELLS;
    drag.value = null;
    ignoresClick.current = Boolean(isLong);
    if (!part || !isLong) return;
    moveView(item, { queries: part.q1 - part.q0, keys: part.k1 - part.k0 }, { query: (part.q0 + part.q1) / 2, key: (part.k0 + part.k1) / 2 });
    pointed.value = null;
  };
  const onClick = (event: MouseEvent) => {
    const cell = cellAt(event);
    if (!cell || event.detail > 1 || ignoresClick.current) return;
    const same = pointed.value?.locked && isSameView(pointed.value, cell);
    pointed.value = same ? null : { ...cell, locked: true };
    selectedToken.value = same ? null : cell.q0;
  };
  const onDblClick = (event: MouseEvent) => {
    const cell = cellAt(event);
    if (cell) zoomView(item, ZOOM, { query: (cell.q0 + cell.q1) / 2, key: (cell.k0 + cell.k1) / 2 });
  };
  const onPointerLeave = () => {
    drag.value = null;
    if (!pointed.value?.locked) pointed.value = null;
  };
  return { onPointerMove, onPointerDown, onPointerUp, onPointerLeave, onClick, onDblClick, onKeyDown: (event: KeyboardEvent) => onKey(event, item, tile, pointed) };
}

/** Cells that a drag has crossed, in the direction in which it is longer. */
function dragLength({ from, to }: { from: View; to: View }, { view, rows, columns }: TileState): number {
  const down = (Math.abs(to.q0 - from.q0) * rows) / (view.q1 - view.q0);
  const across = (Math.abs(to.k0 - from.k0) * columns) / (view.k1 - view.k0);
  return Math.max(down, across);
}

function onKey(event: KeyboardEvent, item: Site, tile: TileState | null, pointed: Signal<Pointed | null>): void {
  const steps: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = steps[event.key];
  const zoom = { "+": ZOOM, "=": ZOOM, "-": 1 / ZOOM }[event.key];
  const at = pointed.value ? { query: pointed.value.q0, key: pointed.value.k0 } : undefined;
  if (event.key === "Escape" && pointed.value) {
    event.stopPropagation();
    pointed.value = null;
  }
  if (zoom) zoomView(item, zoom, at);
  if (event.key === "0") matrixView.value = null;
  if (!(step || zoom || event.key === "0") || !tile) return;
  event.preventDefault();
  event.stopPropagation();
  if (step) pointed.value = { ...nextCell(item, shownCells(item, tile), pointed.value, step), locked: true };
}

/** The cells of the part that is shown; its tile may still be on the way. */
function shownCells(item: Site, tile: TileState): TileState {
  const view = shownView(item);
  if (isSameView(view, tile.view)) return tile;
  return { ...tile, view, rows: Math.min(view.q1 - view.q0, MAX_CELLS), columns: Math.min(view.k1 - view.k0, MAX_CELLS) };
}

/** The next cell in a direction. A view that it leaves follows it. */
function nextCell(item: Site, tile: TileState, last: Pointed | null, [down, right]: [number, number]): View {
  const { view } = tile;
  const from = last ?? cellSpan(tile, 0, 0);
  const inside = (value: number, count: number) => Math.min(Math.max(value, 0), count - 1);
  const query = inside(down < 0 ? from.q0 - 1 : down > 0 ? from.q1 : from.q0, item.numQueries);
  const key = inside(right < 0 ? from.k0 - 1 : right > 0 ? from.k1 : from.k0, item.numKeys);
  if (query < view.q0 || query >= view.q1 || key < view.k0 || key >= view.k1) {
    moveView(item, { queries: view.q1 - view.q0, keys: view.k1 - view.k0 }, { query, key });
    return { q0: query, q1: query + 1, k0: key, k1: key + 1 };
  }
  const cell = (position: number, first: number, last: number, cells: number) => Math.ceil(((position - first + 1) * cells) / (last - first)) - 1;
  return cellSpan(tile, cell(query, view.q0, view.q1, tile.rows), cell(key, view.k0, view.k1, tile.columns));
}

/** Marks the row and column of the pointed cell. */
function Crosshair({ view, cell }: { view: View; cell: ReadonlySignal<Pointed | null> }): JSX.Element | null {
  const pointed = cell.value;
  if (!pointed || pointed.q0 < view.q0 || pointed.q0 >= view.q1 || pointed.k0 < view.k0 || pointed.k0 >= view.k1) return null;
  const { x, y, width, height } = percentBox(view, pointed);
  return (
    <svg class={`crosshair ${pointed.locked ? "locked" : ""}`} viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">
      <rect x="0" y={y} width="100" height={height} />
      <rect x={x} y="0" width={width} height="100" />
      <rect class="cell-mark" x={x} y={y} width={width} height={height} />
    </svg>
  );
}

type Drag = { from: View; to: View } | null;

function DraggedPart({ view, drag }: { view: View; drag: ReadonlySignal<Drag> }): JSX.Element | null {
  if (!drag.value) return null;
  return (
    <svg class="crosshair locked" viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">
      <rect class="cell-mark" {...percentBox(view, spanned(drag.value))} />
    </svg>
  );
}

export function percentBox(view: View, part: View) {
  const across = 100 / (view.k1 - view.k0);
  const down = 100 / (view.q1 - view.q0);
  return { x: (part.k0 - view.k0) * across, y: (part.q0 - view.q0) * down, width: (part.k1 - part.k0) * across, height: (part.q1 - part.q0) * down };
}

/** The tokens of a side; where they stand too close, only some of them. Short ones stay upright above their column. */
function TokenLabels({ words, kind }: { words: string[]; kind: "rows" | "columns" }): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const every = useSignal(1);
  useEffect(() => {
    const isShort = kind === "columns" && words.every((word) => [...visibleToken(word)].length <= UPRIGHT_SIGNS);
    const measure = () => (every.value = Math.ceil((words.length * (isShort ? SIGN_WIDTH : LABEL_LINE)) / Math.max((kind === "rows" ? box.current?.clientHeight : box.current?.clientWidth) ?? 0, 1)));
    const watch = new ResizeObserver(measure);
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, [words.length, kind]);
  return (
    <div class={`token-labels ${kind}`} aria-hidden="true" ref={box}>
      {words.map((word, index) => {
        const text = visibleToken(word);
        const isShown = index % every.value === 0; // a dot stands for the others
        return <span key={index}>{<span class={!isShown || [...text].length <= UPRIGHT_SIGNS ? "upright" : ""}>{isShown ? text : "·"}</span>}</span>;
      })}
    </div>
  );
}

/** A value of each query at the right of the matrix, or of each key below it. */
function MarginalBars({ side, tile, values, label }: { side: "rows" | "columns"; tile: TileState; values: Float32Array; label: string }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [first, last, cells] = side === "rows" ? [tile.view.q0, tile.view.q1, tile.rows] : [tile.view.k0, tile.view.k1, tile.columns];
  const shown = useMemo(() => poolValues(values, first, last, cells), [values, tile]);
  const most = shown.reduce((a, b) => Math.max(a, b), 0);
  const version = themeVersion.value;
  useEffect(() => {
    if (canvas.current) drawBars(canvas.current, shown, most, side);
  }, [values, tile, version]);
  const text = t("head.marginal", { name: label, most: format(most) });
  return (
    <>
      <canvas ref={canvas} role="img" aria-label={text} title={text} width={1} height={1} />
      <span class="xs t3">{text}</span>
    </>
  );
}
