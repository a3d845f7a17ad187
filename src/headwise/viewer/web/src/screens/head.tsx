// Head: the weights of one head as a matrix, lines or arcs, with exact numbers on demand.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { cssRamp, rampPosition, themeVersion } from "../canvas/colors";
import { ErrorNote, Heatmap, Panel, Ramp, Segmented, Select, TableButton } from "../components/basics";
import { DataTable } from "../components/data_table";
import { streamWords, visibleToken } from "../components/tokens";
import { format, t, type TextKey } from "../i18n";
import { headForm, headName, LENSES, lens, scale, SCALES, selectedHead, selectedSite, selectedToken, showsTable, site, source, toPageError, type Lens } from "../state";
import type { Message, PageError, Site } from "../source";
import { roundTicks } from "../components/head_scatter";

const MAX_LINE_TOKENS = 64;
const MAX_CELLS = 512; // cells on each side of the matrix; longer texts are pooled, and zoomed in with a click

interface View {
  q0: number;
  q1: number;
  k0: number;
  k1: number;
}

interface TileState {
  key: string;
  view: View;
  weights: Uint8Array;
  masked: Uint8Array;
  rows: number;
  columns: number;
  scale: number;
}

interface Pointed {
  query: number;
  key: number;
  locked: boolean;
}

export function HeadScreen(): JSX.Element {
  const item = site.value;
  const tile = useSignal<TileState | null>(null);
  const error = useSignal<PageError | null>(null);
  const zoom = useSignal<View | null>(null);
  const pointed = useSignal<Pointed | null>(null);
  const row = useSignal<{ query: number; weights: Float32Array; masked: Uint8Array } | null>(null);

  useSignalEffect(() => {
    const current = site.value;
    if (!current) return;
    const view = zoom.value ?? { q0: 0, q1: current.numQueries, k0: 0, k1: current.numKeys };
    const rows = Math.min(MAX_CELLS, view.q1 - view.q0);
    const columns = Math.min(MAX_CELLS, view.k1 - view.k0);
    const path = `tile?site=${selectedSite.value}&head=${selectedHead.value}&q0=${view.q0}&q1=${view.q1}&k0=${view.k0}&k1=${view.k1}&rows=${rows}&cols=${columns}&lens=${lens.value}`;
    const abort = new AbortController();
    source
      .fetchArrays(path, abort.signal)
      .then((message: Message) => {
        error.value = null;
        const [height = 0, width = 0] = message.arrays["weights"]!.shape;
        tile.value = {
          key: path,
          view,
          weights: message.arrays["weights"]!.data as Uint8Array,
          masked: message.arrays["masked"]!.data as Uint8Array,
          rows: height,
          columns: width,
          scale: message.fields["scale"],
        };
      })
      .catch((reason) => !abort.signal.aborted && (error.value = toPageError(reason)));
    return () => abort.abort();
  });

  useSignalEffect(() => {
    const query = pointed.value?.query ?? selectedToken.value;
    const current = site.value;
    if (query === null || query === undefined || !current || query >= current.numQueries) {
      row.value = null;
      return;
    }
    const abort = new AbortController();
    source
      .fetchArrays(`row?site=${selectedSite.value}&head=${selectedHead.value}&query=${query}&lens=${lens.value}`, abort.signal)
      .then((message) => {
        row.value = {
          query,
          weights: message.arrays["weights"]!.data as Float32Array,
          masked: message.arrays["masked"]!.data as Uint8Array,
        };
      })
      .catch(() => (row.value = null));
    return () => abort.abort();
  });

  if (!item) return <p class="t3">{t("open.none")}</p>;
  const tokens = Math.max(item.numQueries, item.numKeys);
  const form = headForm.value;
  const lensOptions = LENSES.map((name): [Lens, string] => [name, t(`lens.${name}` as TextKey)]);
  return (
    <>
      <div class="toolbar">
        <h1>{t("head.title", { name: headName(selectedSite.value, selectedHead.value) })}</h1>
        <span class="grow" />
        <Segmented
          label={t("head.form")}
          value={form}
          options={[
            ["matrix", t("head.matrix")],
            ["lines", t("head.lines")],
            ["arcs", t("head.arcs")],
          ]}
          onChange={(value) => (headForm.value = value)}
        />
        {item.hasValues && <Select label={t("head.lens")} value={lens.value} options={lensOptions} onChange={(value) => (lens.value = value)} />}
        <Select label={t("scale.label")} value={scale.value} options={SCALES.map((name) => [name, t(`scale.${name}` as TextKey)] as const)} onChange={(value) => (scale.value = value)} />
        <TableButton />
      </div>
      {error.value && <ErrorNote {...error.value} />}
      <div class="head-lay">
        <Panel footer={<MatrixFooter item={item} pointed={pointed.value} row={row.value} tile={tile.value} />}>
          {showsTable.value ? (
            <StrongestPairs item={item} tile={tile.value} />
          ) : form !== "matrix" && tokens <= MAX_LINE_TOKENS ? (
            <Lines item={item} tile={tile.value} arcs={form === "arcs" && item.queryStream === item.keyStream} />
          ) : (
            <>
              {form !== "matrix" && <p class="note">{t("head.tooLong", { count: MAX_LINE_TOKENS })}</p>}
              <Matrix item={item} tile={tile.value} zoom={zoom} pointed={pointed} />
            </>
          )}
        </Panel>
        <div class="stack">
          <RowPanel item={item} row={row.value} />
          <OffsetProfile item={item} />
        </div>
      </div>
    </>
  );
}

function MatrixFooter(props: { item: Site; pointed: Pointed | null; row: { query: number; weights: Float32Array; masked: Uint8Array } | null; tile: TileState | null }): JSX.Element {
  const { pointed, row, tile } = props;
  const exact = pointed && row && row.query === pointed.query ? row.weights[pointed.key] : undefined;
  const hidden = pointed && row && row.query === pointed.query && row.masked[pointed.key] === 1;
  const words = { query: streamWords(props.item.queryStream), key: streamWords(props.item.keyStream) };
  return (
    <div class="row wrap between">
      <Ramp text={t("map.ramp", { scale: t(`scale.${scale.value}` as TextKey) }).replace("1", tile ? format(tile.scale) : "1")} />
      <span class="t2" aria-live="polite" data-testid="exact">
        {pointed ? (
          <>
            <span class="mono">
              {t("head.cell", { query: visibleToken(words.query[pointed.query] ?? String(pointed.query)), key: visibleToken(words.key[pointed.key] ?? String(pointed.key)) })}
            </span>{" "}
            <b class="b">{hidden ? t("head.forbidden") : exact === undefined ? "…" : exact.toPrecision(6)}</b>
          </>
        ) : (
          t("head.hint")
        )}
      </span>
    </div>
  );
}

function Matrix(props: { item: Site; tile: TileState | null; zoom: { value: View | null }; pointed: { value: Pointed | null } }): JSX.Element {
  const { item, tile, zoom, pointed } = props;
  const box = useRef<HTMLDivElement>(null);
  const isLabelled = tile && tile.view.q1 - tile.view.q0 <= 64 && tile.view.k1 - tile.view.k0 <= 64;
  const queryWords = streamWords(item.queryStream);
  const keyWords = streamWords(item.keyStream);

  const cellAt = (event: MouseEvent): { query: number; key: number } | null => {
    const canvas = box.current?.querySelector("canvas");
    if (!canvas || !tile) return null;
    const area = canvas.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width;
    const y = (event.clientY - area.top) / area.height;
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    const { q0, q1, k0, k1 } = tile.view;
    return { query: q0 + Math.floor(y * (q1 - q0)), key: k0 + Math.floor(x * (k1 - k0)) };
  };
  const onMove = (event: MouseEvent) => {
    if (pointed.value?.locked) return;
    const cell = cellAt(event);
    pointed.value = cell && { ...cell, locked: false };
  };
  const onClick = (event: MouseEvent) => {
    const cell = cellAt(event);
    if (!cell) return;
    const same = pointed.value?.locked && pointed.value.query === cell.query && pointed.value.key === cell.key;
    pointed.value = same ? null : { ...cell, locked: true };
    selectedToken.value = same ? null : cell.query;
  };
  const onDblClick = (event: MouseEvent) => {
    const cell = cellAt(event);
    if (!cell || !tile) return;
    if (zoom.value) {
      zoom.value = null;
      return;
    }
    const half = 64;
    const span = (at: number, count: number): [number, number] => {
      const start = Math.max(0, Math.min(at - half, count - 2 * half));
      return [start, Math.min(count, start + 2 * half)];
    };
    const [q0, q1] = span(cell.query, item.numQueries);
    const [k0, k1] = span(cell.key, item.numKeys);
    if (q1 - q0 < item.numQueries || k1 - k0 < item.numKeys) zoom.value = { q0, q1, k0, k1 };
  };
  const onKey = (event: KeyboardEvent) => {
    const steps: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (event.key === "Escape" && pointed.value) {
      event.stopPropagation();
      pointed.value = null;
    }
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const from = pointed.value ?? { query: tile?.view.q0 ?? 0, key: tile?.view.k0 ?? 0 };
    pointed.value = {
      query: Math.min(Math.max(from.query + step[0], 0), item.numQueries - 1),
      key: Math.min(Math.max(from.key + step[1], 0), item.numKeys - 1),
      locked: true,
    };
  };
  return (
    <div class={`matrix ${isLabelled ? "labelled" : ""}`} ref={box}>
      {tile && (item.numQueries > tile.view.q1 - tile.view.q0 || item.numKeys > tile.view.k1 - tile.view.k0) && (
        <p class="row sm t2">
          {t("head.window", tile.view as unknown as Record<string, number>)}
          <button class="btn" type="button" onClick={() => (zoom.value = null)}>
            {t("head.whole")}
          </button>
        </p>
      )}
      {isLabelled && <TokenLabels words={keyWords.slice(tile.view.k0, tile.view.k1)} kind="columns" />}
      {isLabelled && <TokenLabels words={queryWords.slice(tile.view.q0, tile.view.q1)} kind="rows" />}
      <div
        class="matrix-canvas"
        tabIndex={0}
        role="application"
        aria-label={t("head.hint")}
        onMouseMove={onMove}
        onMouseLeave={() => !pointed.value?.locked && (pointed.value = null)}
        onClick={onClick}
        onDblClick={onDblClick}
        onKeyDown={onKey}
      >
        <Heatmap
          image={tile && { data: tile.weights, rows: tile.rows, columns: tile.columns, masked: tile.masked }}
          scale={scale.value}
          label={`${headName(selectedSite.value, selectedHead.value)}: ${t("inspector.size", { queries: item.numQueries, keys: item.numKeys })}`}
        />
        {tile && pointed.value && <Crosshair view={tile.view} pointed={pointed.value} />}
      </div>
    </div>
  );
}

/** Marks the row and column of the pointed cell. */
function Crosshair({ view, pointed }: { view: View; pointed: Pointed }): JSX.Element | null {
  const { q0, q1, k0, k1 } = view;
  if (pointed.query < q0 || pointed.query >= q1 || pointed.key < k0 || pointed.key >= k1) return null;
  const x = ((pointed.key - k0) / (k1 - k0)) * 100;
  const y = ((pointed.query - q0) / (q1 - q0)) * 100;
  const width = 100 / (k1 - k0);
  const height = 100 / (q1 - q0);
  return (
    <svg class={`crosshair ${pointed.locked ? "locked" : ""}`} viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">
      <rect x="0" y={y} width="100" height={height} />
      <rect x={x} y="0" width={width} height="100" />
      <rect class="cell-mark" x={x} y={y} width={width} height={height} />
    </svg>
  );
}

function TokenLabels({ words, kind }: { words: string[]; kind: "rows" | "columns" }): JSX.Element {
  return (
    <div class={`token-labels ${kind}`} aria-hidden="true">
      {words.map((word, index) => (
        <span key={index}>
          <span>{visibleToken(word)}</span>
        </span>
      ))}
    </div>
  );
}

interface Pair {
  query: number;
  key: number;
  weight: number;
}

/** The cells of a tile that is not pooled, with their weights. */
function tilePairs(tile: TileState, least: number): Pair[] {
  const pairs: Pair[] = [];
  for (let row = 0; row < tile.rows; row++) {
    for (let column = 0; column < tile.columns; column++) {
      const weight = (tile.weights[row * tile.columns + column]! / 255) * tile.scale;
      if (weight < least) continue;
      pairs.push({
        query: tile.view.q0 + Math.floor((row * (tile.view.q1 - tile.view.q0)) / tile.rows),
        key: tile.view.k0 + Math.floor((column * (tile.view.k1 - tile.view.k0)) / tile.columns),
        weight,
      });
    }
  }
  return pairs;
}

function StrongestPairs({ item, tile }: { item: Site; tile: TileState | null }): JSX.Element {
  const words = { query: streamWords(item.queryStream), key: streamWords(item.keyStream) };
  const pairs = tile ? tilePairs(tile, 0.01 * tile.scale).sort((a, b) => b.weight - a.weight).slice(0, 200) : [];
  return (
    <DataTable
      caption={t("head.strongest")}
      rows={pairs}
      columns={[
        { key: "query", title: t("query"), value: (pair) => `${pair.query} ${visibleToken(words.query[pair.query] ?? "")}` },
        { key: "key", title: t("key"), value: (pair) => `${pair.key} ${visibleToken(words.key[pair.key] ?? "")}` },
        { key: "weight", title: t("weight"), numeric: true, value: (pair) => pair.weight, cell: (pair) => format(pair.weight) },
      ]}
    />
  );
}

/** Tokens in two columns joined by lines, or in one row joined by arcs. */
function Lines({ item, tile, arcs }: { item: Site; tile: TileState | null; arcs: boolean }): JSX.Element {
  const queryWords = streamWords(item.queryStream);
  const keyWords = streamWords(item.keyStream);
  void themeVersion.value;
  const pairs = tile ? tilePairs(tile, 0.02 * tile.scale) : [];
  const focus = selectedToken.value;
  const opacity = (pair: Pair) => rampPosition(pair.weight / (tile?.scale ?? 1), scale.value) * (focus === null || pair.query === focus ? 0.9 : 0.08);
  if (arcs) {
    const step = 64;
    const width = queryWords.length * step;
    const height = Math.min(40 + queryWords.length * 7, 320);
    return (
      <div class="scroll" tabIndex={0} role="region" aria-label={t("head.arcs")}>
        <svg class="lines" width={width} height={height + 28} role="img" aria-label={t("head.arcs")}>
          {pairs.map((pair, index) => {
            const from = (pair.query + 0.5) * step;
            const to = (pair.key + 0.5) * step;
            const reach = Math.min(Math.abs(from - to) * 0.55 + 8, height);
            return <path key={index} d={`M${from} ${height}C${from} ${height - reach} ${to} ${height - reach} ${to} ${height}`} stroke={cssRamp(0.85)} stroke-opacity={opacity(pair)} />;
          })}
          {queryWords.map((word, index) => (
            <text key={index} class={`token-text ${focus === index ? "chosen" : ""}`} x={(index + 0.5) * step} y={height + 18} text-anchor="middle" onClick={() => (selectedToken.value = focus === index ? null : index)}>
              {visibleToken(word)}
            </text>
          ))}
        </svg>
      </div>
    );
  }
  const line = 22;
  const height = Math.max(queryWords.length, keyWords.length) * line + 8;
  return (
    <svg class="lines" viewBox={`0 0 560 ${height}`} role="img" aria-label={t("head.lines")}>
      {pairs.map((pair, index) => (
        <path key={index} d={`M180 ${pair.query * line + 14}C260 ${pair.query * line + 14} 300 ${pair.key * line + 14} 380 ${pair.key * line + 14}`} stroke={cssRamp(0.85)} stroke-opacity={opacity(pair)} />
      ))}
      {queryWords.map((word, index) => (
        <text key={`q${index}`} class={`token-text ${focus === index ? "chosen" : ""}`} x="172" y={index * line + 18} text-anchor="end" onClick={() => (selectedToken.value = focus === index ? null : index)}>
          {visibleToken(word)}
        </text>
      ))}
      {keyWords.map((word, index) => (
        <text key={`k${index}`} class="token-text" x="388" y={index * line + 18}>
          {visibleToken(word)}
        </text>
      ))}
    </svg>
  );
}

/** The exact weights of the selected query, the largest first. */
function RowPanel({ item, row }: { item: Site; row: { query: number; weights: Float32Array; masked: Uint8Array } | null }): JSX.Element {
  const queryWords = streamWords(item.queryStream);
  const keyWords = streamWords(item.keyStream);
  const top = row
    ? Array.from(row.weights, (weight, key) => ({ weight, key }))
        .filter(({ key }) => !row.masked[key])
        .sort((a, b) => b.weight - a.weight)
        .slice(0, 8)
    : [];
  const entropy = row ? -Array.from(row.weights).reduce((sum, weight) => sum + (weight > 0 ? weight * Math.log(weight) : 0), 0) : NaN;
  return (
    <Panel title={row ? `${t("query")} ${row.query} · ${visibleToken(queryWords[row.query] ?? "")}` : t("query")}>
      {row ? (
        <table class="finder">
          <thead>
            <tr>
              <th scope="col">{t("key")}</th>
              <th scope="col" class="num">
                {t("weight")}
              </th>
            </tr>
          </thead>
          <tbody>
            {top.map(({ weight, key }) => (
              <tr key={key}>
                <td class="mono">
                  {key} {visibleToken(keyWords[key] ?? "")}
                </td>
                <td class="num">{weight.toPrecision(4)}</td>
              </tr>
            ))}
            {lens.value === "weight" && (
              <tr>
                <td class="t3">{t("head.entropy")}</td>
                <td class="num t3">{format(entropy)}</td>
              </tr>
            )}
          </tbody>
        </table>
      ) : (
        <p class="t3">{t("head.hint")}</p>
      )}
    </Panel>
  );
}

/** Mean weight at each distance between query and key. */
function OffsetProfile({ item }: { item: Site }): JSX.Element {
  const profile = useSignal<{ first: number; means: Float32Array } | null>(null);
  useSignalEffect(() => {
    const abort = new AbortController();
    source
      .fetchArrays(`offsets?site=${selectedSite.value}&head=${selectedHead.value}`, abort.signal)
      .then((message) => (profile.value = { first: message.fields["first"], means: message.arrays["means"]!.data as Float32Array }))
      .catch(() => (profile.value = null));
    return () => abort.abort();
  });
  const data = profile.value;
  const isSelf = item.queryStream === item.keyStream;
  const width = 320;
  const height = 110;
  const reach = Math.min(Math.max(item.numQueries, item.numKeys), 32);
  const low = isSelf && data && !data.means.slice(0, -data.first).some((mean) => mean > 0) ? 0 : -reach;
  const shown = data ? Array.from(data.means, (mean, index) => ({ offset: index + data.first, mean })).filter(({ offset }) => offset >= low && offset <= reach) : [];
  const most = Math.max(...shown.map(({ mean }) => mean), 1e-9);
  const bar = (width - 40) / Math.max(shown.length, 1);
  return (
    <Panel title={t("head.offsets")}>
      <svg class="plot" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={t("head.offsets")}>
        {roundTicks(0, most, 2).map((tick) => (
          <g key={tick}>
            <line class="gridline" x1="34" x2={width} y1={84 - (tick / most) * 74} y2={84 - (tick / most) * 74} />
            <text class="tick" x="30" y={87 - (tick / most) * 74} text-anchor="end">
              {format(tick)}
            </text>
          </g>
        ))}
        {shown.map(({ offset, mean }, index) => (
          <rect key={offset} class="bar-mark" x={36 + index * bar} y={84 - (mean / most) * 74} width={Math.max(bar - 1, 0.6)} height={(mean / most) * 74}>
            <title>{`${offset}: ${format(mean)}`}</title>
          </rect>
        ))}
        {shown
          .filter(({ offset }) => offset % 8 === 0)
          .map(({ offset }) => (
            <text key={offset} class="tick" x={36 + (shown.findIndex((item) => item.offset === offset) + 0.5) * bar} y="97" text-anchor="middle">
              {offset}
            </text>
          ))}
        <text class="axis" x={width} y="109" text-anchor="end">
          {t("head.offsetAxis")}
        </text>
      </svg>
    </Panel>
  );
}
