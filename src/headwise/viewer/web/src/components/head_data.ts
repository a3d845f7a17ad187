// What the Head screen reads from the source: the tile that is shown, the marginals, the exact row, and the exact peak.

import { useSignal, useSignalEffect, type ReadonlySignal, type Signal } from "@preact/signals";
import { thumbnailImage } from "../canvas/heatmap";
import type { Message, PageError, Site } from "../source";
import { doc, headIndex, lens, matrixView, selectedHead, selectedSite, selectedToken, site, source, thumbnails, toPageError, type View } from "../state";

export const MAX_CELLS = 512; // cells on each side of the matrix; longer texts are pooled
const KEPT_TILES = 12; // tiles that are kept, so that going back costs nothing
const KEPT_ROWS = 64;

/** A picture of a part of the matrix. `isDraft`: a coarse one that is shown until the server has answered. */
export interface TileState {
  view: View;
  weights: Uint8Array;
  masked: Uint8Array | undefined;
  rows: number;
  columns: number;
  scale: number;
  isDraft: boolean;
}

/** A cell of the shown tile, and the pairs that it covers. */
export interface Pointed extends View {
  locked: boolean;
}

export interface ExactRow {
  query: number;
  weights: Float32Array;
  masked: Uint8Array;
}

export interface Marginals {
  received: Float32Array;
  entropy: Float32Array;
  maximum: Float32Array;
  byOffset: Float32Array;
  firstOffset: number;
}

export interface Peak {
  query: number;
  key: number;
  weight: number;
}

export interface HeadData {
  tile: Signal<TileState | null>;
  marginals: Signal<Marginals | null>;
  row: Signal<ExactRow | null>;
  peak: Signal<Peak | null>;
  error: Signal<PageError | null>;
  marginalsError: Signal<PageError | null>;
}

export function wholeView(item: Site): View {
  return { q0: 0, q1: item.numQueries, k0: 0, k1: item.numKeys };
}

/** The part of the matrix that is shown: the chosen one, as far as this head has it. */
export function shownView(item: Site): View {
  const whole = wholeView(item);
  const chosen = matrixView.value;
  if (!chosen || chosen.q0 >= whole.q1 || chosen.k0 >= whole.k1) return whole;
  return { q0: chosen.q0, q1: Math.min(chosen.q1, whole.q1), k0: chosen.k0, k1: Math.min(chosen.k1, whole.k1) };
}

export function isPooled(tile: TileState): boolean {
  return tile.rows < tile.view.q1 - tile.view.q0 || tile.columns < tile.view.k1 - tile.view.k0;
}

/** The pairs that a cell of a tile covers; the server cuts cells at the same edges. */
export function cellSpan(tile: TileState, row: number, column: number): View {
  const { q0, q1, k0, k1 } = tile.view;
  const edge = (first: number, count: number, cells: number, cell: number) => first + Math.floor((cell * count) / cells);
  return {
    q0: edge(q0, q1 - q0, tile.rows, row),
    q1: edge(q0, q1 - q0, tile.rows, row + 1),
    k0: edge(k0, k1 - k0, tile.columns, column),
    k1: edge(k0, k1 - k0, tile.columns, column + 1),
  };
}

export function useHeadData(pointed: ReadonlySignal<Pointed | null>): HeadData {
  const data: HeadData = { tile: useSignal(null), marginals: useSignal(null), row: useSignal(null), peak: useSignal(null), error: useSignal(null), marginalsError: useSignal(null) };
  const tiles = useSignal(new Map<string, TileState>());
  const rows = useSignal(new Map<string, ExactRow>());
  const shownHead = useSignal(""); // the head whose tile has arrived: its marginals are computed after it
  useTile(data, tiles.peek(), shownHead);
  useMarginals(data, shownHead);
  useSignalEffect(() => {
    const cell = pointed.value;
    data.peak.value = null;
    if (!cell || (cell.q1 - cell.q0 === 1 && cell.k1 - cell.k0 === 1)) return;
    return load(`peak?${headQuery()}&${viewQuery(cell)}`, (message) => {
      const [query = 0, key = 0] = message.arrays["place"]!.data;
      data.peak.value = { query, key, weight: message.arrays["weight"]!.data[0]! };
    });
  });
  useSignalEffect(() => {
    const cell = pointed.value;
    const isSingle = cell && cell.q1 - cell.q0 === 1;
    const query = isSingle ? cell.q0 : cell ? data.peak.value?.query : (selectedToken.value ?? (data.tile.value && strongestQuery(data.tile.value)));
    if (query === null || query === undefined || query >= (site.value?.numQueries ?? 0)) {
      if (!cell) data.row.value = null;
      return;
    }
    const path = `row?${headQuery()}&query=${query}`;
    const known = recall(rows.peek(), `${revision()} ${path}`);
    if (known) {
      data.row.value = known;
      return;
    }
    return load(path, (message) => {
      data.row.value = { query, weights: message.arrays["weights"]!.data as Float32Array, masked: message.arrays["masked"]!.data as Uint8Array };
      remember(rows.peek(), `${revision()} ${path}`, data.row.value, KEPT_ROWS);
    }, () => (data.row.value = null));
  });
  return data;
}

function useTile(data: HeadData, tiles: Map<string, TileState>, shownHead: Signal<string>): void {
  useSignalEffect(() => {
    const item = site.value;
    if (!item) return;
    const view = shownView(item);
    const path = tilePath(view);
    const head = `${revision()} ${headQuery()}`;
    const key = `${revision()} ${path}`;
    const known = recall(tiles, key);
    data.tile.value = known ?? draftTile(item, view, tiles.get(`${revision()} ${tilePath(wholeView(item))}`), data.tile.peek());
    if (known) {
      shownHead.value = head;
      return;
    }
    return load(
      path,
      (message) => {
        data.error.value = null;
        data.tile.value = readTile(message, view);
        remember(tiles, key, data.tile.value, KEPT_TILES);
        shownHead.value = head;
      },
      (reason) => (data.error.value = reason),
    );
  });
}

function useMarginals(data: HeadData, shownHead: Signal<string>): void {
  useSignalEffect(() => {
    if (shownHead.value !== `${revision()} ${headQuery()}`) {
      data.marginals.value = null;
      data.marginalsError.value = null;
      return;
    }
    return load(
      `marginals?${headQuery()}`,
      ({ arrays, fields }) => {
        const read = (name: string) => arrays[name]!.data as Float32Array;
        data.marginals.value = { received: read("received"), entropy: read("entropy"), maximum: read("maximum"), byOffset: read("by_offset"), firstOffset: fields["first"] };
      },
      (reason) => (data.marginalsError.value = reason),
    );
  });
}

/** Tells answers about this text from answers about another. */
function revision(): number {
  return doc.value?.revision ?? 0;
}

function headQuery(): string {
  return `site=${selectedSite.value}&head=${selectedHead.value}&lens=${lens.value}`;
}

export function viewQuery({ q0, q1, k0, k1 }: View): string {
  return `q0=${q0}&q1=${q1}&k0=${k0}&k1=${k1}`;
}

function tilePath(view: View): string {
  return `tile?${headQuery()}&${viewQuery(view)}&rows=${Math.min(MAX_CELLS, view.q1 - view.q0)}&cols=${Math.min(MAX_CELLS, view.k1 - view.k0)}`;
}

function readTile(message: Message, view: View): TileState {
  const [rows = 0, columns = 0] = message.arrays["weights"]!.shape;
  const bytes = (name: string) => message.arrays[name]!.data as Uint8Array;
  return { view, weights: bytes("weights"), masked: bytes("masked"), rows, columns, scale: message.fields["scale"], isDraft: false };
}

/** The cell with the largest weight that is not on the token itself or on the first one, if there is another. */
export function strongestQuery(tile: TileState): number | null {
  let best = -1;
  let query: number | null = null;
  for (let row = 0; row < tile.rows; row++) {
    for (let column = 1; column < tile.columns; column++) {
      const weight = tile.weights[row * tile.columns + column]!;
      if (row !== column && weight > best) [best, query] = [weight, Math.floor((row * tile.view.q1) / tile.rows)];
    }
  }
  return query;
}

/** Ask the source; returns how to take the question back. */
function load(path: string, onAnswer: (message: Message) => void, onError: (error: PageError) => void = () => undefined): () => void {
  const abort = new AbortController();
  source
    .fetchArrays(path, abort.signal)
    .then((message) => !abort.signal.aborted && onAnswer(message))
    .catch((reason) => !abort.signal.aborted && onError(toPageError(reason)));
  return () => abort.abort();
}

/** What a long text shows at once: the part of the whole tile if that is known, or of the thumbnail. */
function draftTile(item: Site, view: View, whole: TileState | undefined, last: TileState | null): TileState | null {
  if (Math.max(item.numQueries, item.numKeys) <= MAX_CELLS) return last;
  if (whole) return { ...cutTile(whole, view), isDraft: true };
  const atlas = thumbnails.value;
  if (!atlas || lens.value !== "weight") return last;
  const { data, masked, rows, columns } = thumbnailImage(atlas, headIndex.value);
  return { ...cutTile({ view: wholeView(item), weights: data as Uint8Array, masked, rows, columns, scale: 1, isDraft: true }, view), isDraft: true };
}

/** The cells of a tile that overlap a part of it. */
function cutTile(tile: TileState, view: View): TileState {
  const cell = (position: number, first: number, last: number, cells: number) => ((position - first) / (last - first)) * cells;
  const rows: [number, number] = [Math.floor(cell(view.q0, tile.view.q0, tile.view.q1, tile.rows)), Math.ceil(cell(view.q1, tile.view.q0, tile.view.q1, tile.rows))];
  const columns: [number, number] = [Math.floor(cell(view.k0, tile.view.k0, tile.view.k1, tile.columns)), Math.ceil(cell(view.k1, tile.view.k0, tile.view.k1, tile.columns))];
  const width = columns[1] - columns[0];
  const cut = (data: Uint8Array) => {
    const part = new Uint8Array((rows[1] - rows[0]) * width);
    for (let row = rows[0]; row < rows[1]; row++) part.set(data.subarray(row * tile.columns + columns[0], row * tile.columns + columns[1]), (row - rows[0]) * width);
    return part;
  };
  return { ...tile, view, weights: cut(tile.weights), masked: tile.masked && cut(tile.masked), rows: rows[1] - rows[0], columns: width };
}

/** An entry of a small cache, which becomes its newest. */
function recall<T>(cache: Map<string, T>, key: string): T | undefined {
  const value = cache.get(key);
  if (value !== undefined) {
    cache.delete(key);
    cache.set(key, value);
  }
  return value;
}

function remember<T>(cache: Map<string, T>, key: string, value: T, most: number): void {
  cache.set(key, value);
  for (const oldest of cache.keys()) {
    if (cache.size <= most) return;
    cache.delete(oldest);
  }
}
