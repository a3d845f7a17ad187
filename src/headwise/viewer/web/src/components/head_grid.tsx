// The grid of the Map: layers down, heads across. A few canvases show the heads; transparent cells above them take the
// pointer, the keyboard and screen readers, so that choosing a head draws nothing anew.

import { computed, type ReadonlySignal, signal, useComputed, useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { togglePin } from "../actions";
import { themeVersion } from "../canvas/colors";
import { type BandContent, type Bracket, type CellContent, type CellSizes, drawBand, rowPitch } from "../canvas/head_cells";
import { classWord, format, measureName, say, t } from "../i18n";
import { cellMode, classesOf, doc, firstHeads, hasClasses, headCount, headName, isAblated, layerRange, measureOf, measures, scale, screen, selectedHead, selectedSite, selectHead, sites, sortHeads, stacks, thumbnails, topCount } from "../state";
import { keepInUrl, readRanges, toList, toText, urlSignal, writeRanges } from "../url_state";
import { Button, Meter, Select, TableButton, useWidth } from "./basics";
import { Badge, classLetter } from "./class_badge";
import { EdgeLines, type GridPlaces } from "./edge_lines";

export interface HeadItem {
  index: number;
  site: number;
  head: number;
}

/** Only heads of this class are shown in full; "" is all. */
export const classFilter = urlSignal("only", "", toText);
/** Only these heads are shown in full, as chosen in the scatter plot; null is all. */
export const brushedHeads = signal<ReadonlySet<number> | null>(null);
keepInUrl(
  "chosen",
  {
    get value() {
      return brushedHeads.value === null ? [] : writeRanges([...brushedHeads.value]);
    },
    set value(ranges: string[]) {
      brushedHeads.value = ranges.length ? new Set(readRanges(ranges)) : null;
    },
  },
  toList,
);

const BAND_ROWS = 8; // rows of one canvas
const CELL_RANGE = { least: 22, most: 92, mostWide: 128 };
const LABEL_WIDTH = 32;
const MEAN_WIDTH = 120;
const CAPTION_FROM = 28; // CSS pixels of a cell from which it has a caption
const WIDE_PAGE = 1920;

/** The cells of one row: the heads of a layer in their order, and null where one was pruned. */
function rowHeads(site: number): (HeadItem | null)[] {
  const { heads, prunedHeads } = sites.value[site]!;
  const items: HeadItem[] = Array.from({ length: heads }, (_, head) => ({ index: firstHeads.value[site]! + head, site, head }));
  const order = sortHeads.value;
  if (order !== "index" && measures.value?.names.includes(order)) {
    return [...items.sort((a, b) => measureOf(b.index, order) - measureOf(a.index, order)), ...prunedHeads.map(() => null)];
  }
  const row: (HeadItem | null)[] = items;
  for (const gap of prunedHeads) row.splice(gap, 0, null);
  return row;
}

export function isDimmed(index: number): boolean {
  const letter = classFilter.value;
  if (letter !== "" && classLetter(classesOf(index)[0]?.name) !== letter) return true;
  return !isOnTop(index) || (brushedHeads.value !== null && !brushedHeads.value.has(index));
}

/** The shown sites of a kind of attention, such as "encoder self". */
export function stackNumbers(stack: string): number[] {
  return sites.value.flatMap((site, number) => (`${site.stack} ${site.kind}` === stack && isShownLayer(number) ? [number] : []));
}

/** The heads of the widest of some sites, those included that were pruned. */
export function stackColumns(numbers: number[]): number {
  return Math.max(1, ...numbers.map((number) => sites.value[number]!.heads + sites.value[number]!.prunedHeads.length));
}

export function HeadGrid({ stack }: { stack: string }): JSX.Element {
  const [box, width] = useWidth<HTMLDivElement>();
  const hovered = useSignal<Hovered | null>(null);
  const numbers = stackNumbers(stack);
  const columns = stackColumns(numbers);
  const sizes = useComputed(() => chooseSizes(width.value, columns, numbers));
  const shown = sizes.value;
  useLayoutEffect(() => {
    const { cell, caption, gap, rowGap } = shown;
    const style = box.current!.style;
    for (const [name, size] of Object.entries({ cell, caption, gap, pitch: rowPitch(shown), "row-gap": rowGap })) style.setProperty(`--${name}`, `${size}px`);
    style.setProperty("--columns", String(columns));
  }, [shown, columns]);
  const bands = Array.from({ length: Math.ceil(numbers.length / BAND_ROWS) }, (_, band) => numbers.slice(band * BAND_ROWS, (band + 1) * BAND_ROWS));
  const several = stacks.value.length > 1;
  return (
    <div class="stack-block">
      {several && <h2>{say(stack.replace(/^(\S+) (self|attention)$/, "$1").replace(/ self$/, ""))}</h2>}
      <div class="grid-box">
        <div class="grid-scroll" ref={box} onPointerOver={(event) => (hovered.value = headUnder(event))} onPointerLeave={() => (hovered.value = null)}>
          <div
            class="grid"
            role="grid"
            aria-label={`${t("map.grid")}: ${say(stack)}`}
            aria-rowcount={numbers.length}
            aria-colcount={columns}
            onClick={onClick}
            onDblClick={(event) => headUnder(event) && (screen.value = "head")}
            onKeyDown={(event) => onKey(event, numbers)}
          >
            {sortHeads.value === "index" && <HeadNumbers count={columns} sizes={sizes} />}
            <div class="bands">
              {width.value > 0 && bands.map((band) => <Band key={band[0]} band={band} columns={columns} sizes={sizes} />)}
              <EdgeLines places={findPlaces(numbers, columns, shown)} />
            </div>
          </div>
        </div>
        {hovered.value && <HeadTip box={box.current!} {...hovered.value} />}
      </div>
    </div>
  );
}

function chooseSizes(width: number, columns: number, numbers: number[]): CellSizes {
  const isWide = innerWidth >= WIDE_PAGE;
  const most = isWide ? CELL_RANGE.mostWide : CELL_RANGE.most;
  const margins = LABEL_WIDTH + (innerWidth >= 900 && screen.value === "map" ? MEAN_WIDTH : 0) + 8;
  const gap = (width - margins) / columns < 40 ? 2 : 4;
  const cell = Math.floor(Math.min(Math.max((width - margins) / columns - gap, CELL_RANGE.least), most));
  const caption = cell >= CAPTION_FROM && cellMode.value !== "class" ? 19 : 0;
  const isShared = numbers.some((number) => sites.value[number]!.kvHeads < sites.value[number]!.heads);
  return { cell, caption, gap, rowGap: isShared ? gap + 8 : gap + 2 };
}

/** Where the cells and labels of the rows lie. */
function findPlaces(numbers: number[], columns: number, sizes: CellSizes): GridPlaces {
  const { cell, gap, rowGap } = sizes;
  const pitch = rowPitch(sizes);
  return {
    width: LABEL_WIDTH + columns * (cell + gap),
    height: numbers.length * pitch,
    cell,
    head: (site, head) => {
      const row = numbers.indexOf(site);
      const column = row < 0 ? -1 : rowHeads(site).findIndex((item) => item?.head === head);
      return column < 0 ? null : { x: LABEL_WIDTH + column * (cell + gap) + cell / 2, y: row * pitch + rowGap / 2 };
    },
    layer: (layer) => {
      const row = numbers.findIndex((number) => sites.value[number]!.layer === layer);
      return row < 0 ? null : { x: LABEL_WIDTH / 2 - 4, y: (row + 1) * pitch - 8 };
    },
  };
}

function headUnder(event: Event): Hovered | null {
  const cell = (event.target as HTMLElement).closest<HTMLElement>("[data-head]");
  if (!cell) return null;
  const [site = 0, head = 0] = cell.dataset["head"]!.split(".").map(Number);
  return { site, head, cell };
}

/** A click selects a head; with shift it pins it as well. */
function onClick(event: MouseEvent): void {
  const found = headUnder(event);
  if (!found) return;
  selectHead(found.site, found.head);
  if (event.shiftKey) togglePin(found.site, found.head);
}

/** Arrow keys walk the cells as they are shown, so also through sorted rows and past pruned heads. */
function onKey(event: KeyboardEvent, numbers: number[]): void {
  const steps: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Infinity], End: [0, Infinity] };
  const step = steps[event.key];
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = numbers.indexOf(selectedSite.value) + step[0];
  if (at < 0 || at >= numbers.length) return; // the page moves on to the next stack
  event.preventDefault();
  event.stopPropagation();
  const heads = (number: number) => rowHeads(number).filter((item) => item !== null);
  const from = heads(selectedSite.value).findIndex((item) => item.head === selectedHead.value);
  const row = heads(numbers[at]!);
  const next = row[Math.min(Math.max(from + step[1], 0), row.length - 1)];
  if (next) selectHead(next.site, next.head);
}

function HeadNumbers({ count, sizes }: { count: number; sizes: ReadonlySignal<CellSizes> }): JSX.Element {
  const every = sizes.value.cell >= 26 ? 1 : 4;
  return (
    <div class="grid-heads" aria-hidden="true">
      {Array.from({ length: count }, (_, head) => (
        <span key={head}>{head % every === 0 ? `H${head}` : ""}</span>
      ))}
      {measures.value && <span class="mean-head hide-s">{t("map.rowMean", { name: measureName(meanName(measures.value.names)) })}</span>}
    </div>
  );
}

/** Some neighbouring rows: one canvas, drawn while it is near the window, and the cells above it. */
function Band({ band, columns, sizes }: { band: number[]; columns: number; sizes: ReadonlySignal<CellSizes> }): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const isNear = useSignal(false);
  useLayoutEffect(() => {
    const watch = new IntersectionObserver(([entry]) => (isNear.value = entry!.isIntersecting), { rootMargin: "600px 1000000px" });
    watch.observe(box.current!);
    box.current!.style.setProperty("--rows", String(band.length));
    return () => watch.disconnect();
  }, [band.length]);
  useSignalEffect(() => {
    void themeVersion.value;
    const element = canvas.current;
    if (!element) return;
    if (isNear.value) drawBand(element, bandContent(band, columns), sizes.value, thumbnails.value, scale.value);
    else element.width = element.height = 1; // gives its memory back
  });
  return (
    <div class="band" role="rowgroup" ref={box}>
      <canvas ref={canvas} aria-hidden="true" width={1} height={1} />
      {band.map((site) => (
        <GridRow key={site} site={site} />
      ))}
    </div>
  );
}

export function bandContent(band: number[], columns: number): BandContent {
  const mode = cellMode.value;
  const range = doc.value?.measures.find(({ name }) => name === mode);
  const cells: CellContent[] = [];
  const brackets: Bracket[] = [];
  band.forEach((site, row) => {
    const heads = rowHeads(site);
    heads.forEach((item, column) => cells.push(cellContent(item, row, column, mode, range)));
    brackets.push(...findBrackets(site, heads, row));
  });
  return { cells, brackets, columns, rows: band.length, mode };
}

function cellContent(item: HeadItem | null, row: number, column: number, mode: string, range: { low: number; high: number } | undefined): CellContent {
  if (!item) return { row, column, head: null, className: undefined, shade: NaN, caption: "", sink: NaN, isAblated: false, isDimmed: false };
  const top = classesOf(item.index)[0];
  const isMeasured = measures.value?.names.includes(mode) || hasClasses.value;
  const value = shownValue(item.index);
  return {
    row,
    column,
    head: item.index,
    className: hasClasses.value ? (top?.name ?? "unclear") : undefined,
    shade: range ? (measureOf(item.index, mode) - range.low) / (range.high - range.low || 1) : NaN,
    caption: isMeasured && value !== 0 ? shortNumber(value) : `H${item.head}`,
    sink: measureOf(item.index, "sink"),
    isAblated: isAblated(item.site, item.head),
    isDimmed: isDimmed(item.index),
  };
}

/** A number of at most four signs, because a cell has no room for more; the tip beside the pointer has the others. */
function shortNumber(value: number): string {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  const text = size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 || size < 0.0005 ? value.toFixed(2) : value.toFixed(3);
  return text.replace(/^(-?)0\./, "$1.");
}

/** The number of a cell: the score of its class, or the measure that the cells show. */
function shownValue(index: number): number {
  const mode = cellMode.value;
  return mode === "thumbnail" || mode === "class" ? (classesOf(index)[0]?.score ?? NaN) : measureOf(index, mode);
}

function findBrackets(site: number, heads: (HeadItem | null)[], row: number): Bracket[] {
  const { kvHeads, kvHeadOfQuery, heads: count } = sites.value[site]!;
  if (kvHeads >= count) return [];
  const found: Bracket[] = [];
  let group: number | undefined;
  heads.forEach((item, column) => {
    const next = item ? kvHeadOfQuery[item.head] : undefined;
    if (next !== undefined && next === group) found.at(-1)!.last = column;
    else if (next !== undefined) found.push({ row, first: column, last: column });
    group = next;
  });
  return found.filter(({ first, last }) => last > first); // in sorted rows the heads of a group lie apart
}

function GridRow({ site }: { site: number }): JSX.Element {
  const item = sites.value[site]!;
  // A computed signal, so that a new selection renders two rows and not all of them.
  const chosen = useComputed(() => (selectedSite.value === site ? selectedHead.value : -1)).value;
  const row = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (chosen >= 0 && document.activeElement?.closest(".grid")) row.current?.querySelector<HTMLElement>("[aria-selected=true]")?.focus();
  }, [chosen]);
  const heads = rowHeads(site);
  return (
    <div class="grid-row" role="row" ref={row}>
      <span class="ly" role="rowheader" title={item.name}>{headName(site, 0).split(" ")[0]}</span>
      {heads.map((cell, column) =>
        cell ? (
          <div
            key={cell.head}
            class="cell"
            role="gridcell"
            data-head={`${site}.${cell.head}`}
            aria-selected={chosen === cell.head}
            tabIndex={chosen === cell.head ? 0 : -1}
            aria-label={describeHead(cell)}
          />
        ) : (
          <span key={`gap${column}`} class="cell-gap" title={t("map.pruned", { head: item.prunedHeads.find((head) => head === column) ?? "" })} />
        ),
      )}
      <LayerMean site={site} />
    </div>
  );
}

/** The number that a head had before other heads of its layer were pruned. */
function numberBefore(site: number, head: number): number {
  return sites.value[site]!.prunedHeads.reduce((number, gap) => (gap <= number ? number + 1 : number), head);
}

function describeHead({ site, head, index }: HeadItem): string {
  const top = classesOf(index)[0];
  const parts = [headName(site, head)];
  if (hasClasses.value) parts.push(`${classWord(top?.name)} ${format(shownValue(index))}`);
  if (isAblated(site, head)) parts.push(t("map.ablated"));
  if (sites.value[site]!.prunedHeads.length) parts.push(t("map.before", { head: numberBefore(site, head) }));
  const { kvHeads, heads, kvHeadOfQuery } = sites.value[site]!;
  if (kvHeads < heads) parts.push(t("map.kvGroup", { kv: kvHeadOfQuery[head] ?? 0 }));
  return parts.join(", ");
}

/** The mean of the shown measure over the heads of a layer, as a bar at the right of its row. */
function LayerMean({ site }: { site: number }): JSX.Element | null {
  const table = measures.value;
  if (!table) return null;
  const name = meanName(table.names);
  const range = doc.value?.measures.find((measure) => measure.name === name);
  const first = firstHeads.value[site]!;
  const values = Array.from({ length: sites.value[site]!.heads }, (_, head) => measureOf(first + head, name)).filter(Number.isFinite);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return (
    <span class="layer-mean hide-s" title={`${name} ${format(mean)}`}>
      <span>{format(mean)}</span>
      <Meter value={range ? mean / (range.high || 1) : 0} />
    </span>
  );
}

/** The measure whose mean stands beside every layer. */
export function meanName(names: string[]): string {
  if (names.includes(cellMode.value)) return cellMode.value;
  return names.includes("entropy") ? "entropy" : (names[0] ?? "");
}

interface Hovered {
  site: number;
  head: number;
  cell: HTMLElement;
}

/** What a head is, beside the pointer. */
function HeadTip({ site, head, cell, box }: Hovered & { box: HTMLElement }): JSX.Element {
  const tip = useRef<HTMLDivElement>(null);
  const index = firstHeads.value[site]! + head;
  const top = classesOf(index)[0];
  const mode = cellMode.value;
  const { kvHeads, heads, kvHeadOfQuery, prunedHeads } = sites.value[site]!;
  useLayoutEffect(() => {
    if (tip.current) placeTip(tip.current, cell, box);
  });
  return (
    <div class="tip" ref={tip} aria-hidden="true">
      <b class="b mono">{headName(site, head)}</b>
      {isAblated(site, head) && <span class="t3"> · {t("map.ablated")}</span>}
      {hasClasses.value && <p class="row tight"><Badge name={top?.name} /> {classWord(top?.name)} {top && <span class="num">{format(top.score)}</span>}</p>}
      {measures.value?.names.includes(mode) && <p>{measureName(mode)} <span class="num">{format(measureOf(index, mode))}</span></p>}
      {prunedHeads.length > 0 && <p class="t3">{t("map.before", { head: numberBefore(site, head) })}</p>}
      {kvHeads < heads && <p class="t3">{t("map.kvGroup", { kv: kvHeadOfQuery[head] ?? 0 })}</p>}
    </div>
  );
}

/** Put a tip under its cell, or above it where the window ends; both in the coordinates of the box around the grid. */
function placeTip(tip: HTMLElement, cell: HTMLElement, box: HTMLElement): void {
  const around = box.getBoundingClientRect();
  const at = cell.getBoundingClientRect();
  const left = Math.min(Math.max(at.left - around.left, 0), around.width - tip.offsetWidth);
  const fits = at.bottom + tip.offsetHeight + 60 < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${fits ? at.bottom - around.top + 6 : at.top - around.top - tip.offsetHeight - 6}px`;
}

/** The measure that ranks heads: the one that the cells show, else the one that orders them; "" is the score of the class. */
const rankedBy = computed(() => {
  const names = measures.value?.names ?? [];
  return [cellMode.value, sortHeads.value].find((name) => names.includes(name)) ?? "";
});

const topHeads = computed<ReadonlySet<number> | null>(() => {
  if (!topCount.value || !measures.value) return null;
  const value = (index: number) => (rankedBy.value ? measureOf(index, rankedBy.value) : (classesOf(index)[0]?.score ?? NaN));
  const known = sites.value.flatMap((site, number) => (isInRange(number) ? Array.from({ length: site.heads }, (_, head) => firstHeads.value[number]! + head) : [])).filter((index) => Number.isFinite(value(index)));
  return new Set(known.sort((a, b) => value(b) - value(a)).slice(0, topCount.value));
});

/** Whether a head is among the strongest that are asked for. */
export function isOnTop(index: number): boolean {
  return topHeads.value?.has(index) ?? true;
}

function isInRange(number: number): boolean {
  const range = layerRange.value;
  const layer = sites.value[number]!.layer;
  return !range.length || (layer >= range[0]! && layer <= range[1]!);
}

/** Whether the Map shows a layer: it is in the chosen range, and has one of the strongest heads. */
export function isShownLayer(number: number): boolean {
  if (!isInRange(number)) return false;
  const first = firstHeads.value[number] ?? 0;
  return topHeads.value === null || Array.from({ length: sites.value[number]!.heads }, (_, head) => first + head).some(isOnTop);
}

export function MapFilter(): JSX.Element {
  const depth = Math.max(0, ...sites.value.map((site) => site.layer));
  const [first = 0, last = depth] = layerRange.value;
  const options = Array.from({ length: depth + 1 }, (_, layer): [string, string] => [String(layer), String(layer)]);
  const choose = (from: number, to: number) => (layerRange.value = from === 0 && to === depth ? [] : [Math.min(from, to), Math.max(from, to)]);
  const name = rankedBy.value ? measureName(rankedBy.value) : t("score");
  return (
    <div class="toolbar map-filter">
      {measures.value && (
        <label class="picker range" title={t("map.topBy", { name })}>
          <span>{topCount.value ? `${t("map.top", { count: topCount.value })} · ${t("map.topBy", { name })}` : t("text.mode.all")}</span>
          <input type="range" min="0" max={headCount.value} value={topCount.value} aria-label={t("map.topBy", { name })} onInput={(event) => (topCount.value = Number(event.currentTarget.value) >= headCount.value ? 0 : Number(event.currentTarget.value))} />
        </label>
      )}
      {depth > 0 && (
        <>
          <Select label={t("map.layersFrom")} value={String(first)} options={options} onChange={(value) => choose(Number(value), last)} />
          <Select label={t("map.layersTo")} value={String(last)} options={options} onChange={(value) => choose(first, Number(value))} />
        </>
      )}
      <FoldedNote />
      {measures.value && (
        <>
          <span class="grow" />
          <TableButton />
        </>
      )}
    </div>
  );
}

/** How many layers are folded, and the way back. */
function FoldedNote(): JSX.Element | null {
  const folded = sites.value.filter((_, number) => !isShownLayer(number)).length;
  if (!folded) return null;
  return (
    <Button kind="quiet" data-testid="folded" onClick={() => ([topCount.value, layerRange.value] = [0, []])}>{t("map.collapsed", { count: folded })}</Button>
  );
}
