// The queries and keys of the selected head as points on a plane, with lines from the chosen query to its strongest keys.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { format, t } from "../i18n";
import type { Site } from "../source";
import { headPath, selectedToken, showsTable, useAnswer } from "../state";
import type { Column } from "./basics";
import { DataTable } from "./data_table";
import { streamWords, visibleToken } from "./tokens";
import { largest } from "./voice_lines";

const SIDE = 640;
const MARGIN = 48;
const LABELLED = 80; // points that are labelled; more would cover each other
const STRONGEST = 5;

interface Points {
  queries: Float32Array;
  keys: Float32Array;
  share: number;
}

export function QueryKeyPoints({ item }: { item: Site }): JSX.Element {
  const hovered = useSignal<number | null>(null);
  const chosen = hovered.value ?? (selectedToken.value !== null && selectedToken.value < item.numQueries ? selectedToken.value : null);
  const { found: points, error } = useAnswer(
    () => headPath("points"),
    ({ arrays, fields }): Points => ({ queries: arrays["queries"]!.data as Float32Array, keys: arrays["keys"]!.data as Float32Array, share: fields["share"] }),
  );
  const { found: weights } = useAnswer(
    () => {
      const query = hovered.value ?? selectedToken.value;
      return query === null || query >= item.numQueries ? null : headPath("row", { query, lens: "weight" });
    },
    ({ arrays }) => arrays["weights"]!.data as Float32Array,
  );
  const shown = points.value;
  if (error.value) return <p class="note">{t("points.none")}</p>;
  if (!shown) return <p class="t3">{t("state.loading")}</p>;
  if (showsTable.value) return <PointTable points={shown} item={item} />;
  const place = makePlace(shown);
  const [queryWords, keyWords] = [streamWords(item.queryStream), streamWords(item.keyStream)];
  const isLabelled = queryWords.length + keyWords.length <= LABELLED;
  const strongest = chosen !== null && weights.value ? largest(weights.value, STRONGEST).filter(({ weight }) => weight > 0.01) : [];
  const at = (values: Float32Array, index: number) => place(values[index * 2]!, values[index * 2 + 1]!);
  const label = (kind: "query" | "key", word: string, index: number) => `${t(kind)} ${index} ${visibleToken(word)}`;
  return (
    <div class="points">
      <p class="sm t3">{t("points.hint")} {t("points.share", { share: Math.round(shown.share * 100) })}</p>
      <svg viewBox={`0 0 ${SIDE} ${SIDE}`} role="img" aria-label={t("points.label")}>
        {strongest.map(({ index: key, weight }) => {
          const [from, to] = [at(shown.queries, chosen!), at(shown.keys, key)];
          return <line key={key} class="pull" x1={from[0]} y1={from[1]} x2={to[0]} y2={to[1]} stroke-opacity={0.25 + 0.75 * weight} />;
        })}
        {keyWords.map((word, key) => {
          const [x, y] = at(shown.keys, key);
          return (
            <g key={`k${key}`}>
              <title>{label("key", word, key)}</title>
              <rect class="key-point" x={x - 4} y={y - 4} width="8" height="8" />
              {(isLabelled || strongest.some(({ index }) => index === key)) && <text class="key-word" x={x + 7} y={y + 4}>{visibleToken(word)}</text>}
            </g>
          );
        })}
        {queryWords.map((word, query) => {
          const [x, y] = at(shown.queries, query);
          return (
            <g key={`q${query}`} onMouseEnter={() => (hovered.value = query)} onMouseLeave={() => (hovered.value = null)} onClick={() => (selectedToken.value = selectedToken.value === query ? null : query)}>
              <title>{label("query", word, query)}</title>
              <circle class={`query-point ${chosen === query ? "chosen" : ""}`} cx={x} cy={y} r={chosen === query ? 7 : 5} />
              {(isLabelled || chosen === query) && <text class="query-word" x={x - 8} y={y + 4} text-anchor="end">{visibleToken(word)}</text>}
            </g>
          );
        })}
      </svg>
      <p class="sm" aria-live="polite" data-testid="points-keys">
        {strongest.map(({ index: key, weight }) => `${visibleToken(keyWords[key] ?? "")} ${format(weight)}`).join(" · ")}
      </p>
    </div>
  );
}

/** The places of the points. */
function PointTable({ points, item }: { points: Points; item: Site }): JSX.Element {
  const list = (kind: "query" | "key", stream: string, values: Float32Array) =>
    streamWords(stream).map((word, index) => ({ kind: t(kind), word: `${index} ${visibleToken(word)}`, x: values[index * 2]!, y: values[index * 2 + 1]! }));
  const rows = [...list("query", item.queryStream, points.queries), ...list("key", item.keyStream, points.keys)];
  type Row = (typeof rows)[number];
  const column = (key: "x" | "y"): Column<Row> => ({ key, title: key, numeric: true, value: (row) => row[key], cell: (row) => format(row[key]) });
  return (
    <DataTable
      caption={t("points.label")}
      rows={rows}
      columns={[{ key: "kind", title: t("points.kind"), value: (row) => row.kind }, { key: "word", title: t("lab.token"), value: (row) => row.word }, column("x"), column("y")]}
    />
  );
}

/** Maps the plane to the drawing, with equal scales on both axes. */
function makePlace({ queries, keys }: Points): (x: number, y: number) => [number, number] {
  const values = [...queries, ...keys];
  const side = (start: number) => values.filter((_, index) => index % 2 === start);
  const [xs, ys] = [side(0), side(1)];
  const bounds = (axis: number[]) => [axis.reduce((a, b) => Math.min(a, b), Infinity), axis.reduce((a, b) => Math.max(a, b), -Infinity)] as const;
  const [[left, right], [low, high]] = [bounds(xs), bounds(ys)];
  const scale = (SIDE - 2 * MARGIN) / Math.max(right - left, high - low, 1e-9);
  return (x, y) => [SIDE / 2 + (x - (left + right) / 2) * scale, SIDE / 2 - (y - (low + high) / 2) * scale];
}
