// The weights that the Text screen shows: of one head, or the mean of several that attend over the same tokens.

import type { JSX } from "preact";
import { rampPosition } from "../canvas/colors";
import { t } from "../i18n";
import type { Message, Site } from "../source";
import { aggregate, combination, doc, pinned, scale, secondHead, selectedHead, selectedSite, selectedToken, sites, source, textMode } from "../state";
import { MAX_CELLS, type TileState } from "./head_data";
import { streamWords, visibleToken } from "./tokens";

export type HeadPair = [site: number, head: number];

/** Weights of a query on all keys, of all queries on a key, and a picture of all of them; null where nothing is chosen. */
export interface Weights {
  to: Float32Array | null;
  from: Float32Array | null;
}

export const NO_WEIGHTS: Weights = { to: null, from: null };

function parse(name: string): HeadPair | null {
  const [site = NaN, head = NaN] = name.split(".").map(Number);
  return sites.value[site] && head >= 0 && head < sites.value[site]!.heads ? [site, head] : null;
}

function isAlike(first: Site, second: Site): boolean {
  return first.queryStream === second.queryStream && first.keyStream === second.keyStream;
}

/** The pinned heads that attend over the same tokens as the selected one, without it. */
export function otherHeads(): HeadPair[] {
  const item = sites.value[selectedSite.value];
  return pinned.value.flatMap((name) => {
    const pair = parse(name);
    const isOther = pair && (pair[0] !== selectedSite.value || pair[1] !== selectedHead.value);
    return isOther && item && isAlike(sites.value[pair[0]]!, item) ? [pair] : [];
  });
}

/** The groups of heads that are shown: one, or two over each other. */
export function shownGroups(): HeadPair[][] {
  const selected: HeadPair = [selectedSite.value, selectedHead.value];
  const others = otherHeads();
  if (textMode.value === "set") return [[selected, ...others]];
  if (textMode.value === "one") return [[selected]];
  const named = parse(secondHead.value);
  const item = sites.value[selectedSite.value];
  const isOther = named && item && isAlike(sites.value[named[0]]!, item) && (named[0] !== selected[0] || named[1] !== selected[1]);
  const second = isOther ? named : (others[0] ?? neighbour(selected));
  return second ? [[selected], [second]] : [[selected]];
}

/** The next head of the layer, to start with where no other head was chosen. */
function neighbour([site, head]: HeadPair): HeadPair | null {
  const count = sites.value[site]?.heads ?? 0;
  return count > 1 ? [site, (head + 1) % count] : null;
}

function mean(arrays: Float32Array[]): Float32Array {
  const total = new Float32Array(arrays[0]!.length);
  for (const array of arrays) for (let place = 0; place < total.length; place++) total[place]! += array[place]! / arrays.length;
  return total;
}

function sum(arrays: Float32Array[]): Float32Array {
  return mean(arrays).map((value) => value * arrays.length);
}

/** The mean or the maximum of the weights of several heads, as chosen. */
function combine(arrays: Float32Array[]): Float32Array {
  if (combination.value === "mean" || arrays.length === 1) return mean(arrays);
  return arrays[0]!.map((_, place) => arrays.reduce((most, array) => Math.max(most, array[place]!), -Infinity));
}

async function fetchCombined(heads: HeadPair[], path: (where: string) => string, signal: AbortSignal): Promise<Float32Array> {
  const answers = await Promise.all(heads.map(([site, head]) => source.fetchArrays(path(`site=${site}&head=${head}`), signal)));
  return combine(answers.map((answer) => answer.arrays["weights"]!.data as Float32Array));
}

/** The weights of some queries, added, on all keys; and those of all queries on a key. */
export async function fetchWeights(heads: HeadPair[], queries: number[], key: number | null, signal: AbortSignal): Promise<Weights> {
  const [to, from] = await Promise.all([
    queries.length ? Promise.all(queries.map((query) => fetchCombined(heads, (where) => `row?${where}&query=${query}&lens=weight`, signal))).then(sum) : null,
    key === null ? null : fetchCombined(heads, (where) => `column?${where}&key=${key}`, signal),
  ]);
  return { to, from };
}

/** A tile of the combined weights of some heads, of all queries and keys. */
export async function fetchCombinedTile(heads: HeadPair[], signal: AbortSignal): Promise<TileState> {
  const answers = await Promise.all(heads.map(([site, head]) => source.fetchArrays(`tile?site=${site}&head=${head}&rows=${MAX_CELLS}&cols=${MAX_CELLS}`, signal)));
  const [rows = 0, columns = 0] = answers[0]!.arrays["weights"]!.shape;
  const scaled = (answer: Message) => Float32Array.from(answer.arrays["weights"]!.data, (step) => (step / 255) * answer.fields["scale"]);
  const weights = Uint8Array.from(combine(answers.map(scaled)), (weight) => Math.round(weight * 255));
  const item = sites.value[heads[0]![0]]!;
  const view = { q0: 0, q1: item.numQueries, k0: 0, k1: item.numKeys };
  return { view, weights, masked: undefined, rows, columns, scale: 1, isDraft: false };
}

/** The largest weights and their positions, the largest first. */
export function largest(values: Float32Array, count: number): { index: number; weight: number }[] {
  const top: { index: number; weight: number }[] = [];
  for (let index = 0; index < values.length; index++) {
    const weight = values[index]!;
    if (top.length === count && weight <= top[count - 1]!.weight) continue;
    const place = top.findIndex((other) => other.weight < weight);
    top.splice(place < 0 ? top.length : place, 0, { index, weight });
    top.length = Math.min(top.length, count);
  }
  return top;
}

// --- all heads together --------------------------------------------------------------------------------

let kept: { key: string; matrix: Promise<AggregateMatrix> } | null = null;

interface AggregateMatrix {
  weights: Float32Array;
  rows: number;
  columns: number;
}

/** The matrix of all heads that is chosen; the last one is kept. */
function fetchAggregate(): Promise<AggregateMatrix> {
  const [how, scope] = aggregate.value.split(".");
  const path = `aggregate?site=${selectedSite.value}&how=${how}&scope=${scope}`;
  const key = `${doc.value?.revision} ${path}`;
  if (kept?.key !== key) {
    const matrix = source.fetchArrays(path).then(({ arrays }) => {
      const { data, shape } = arrays["weights"]!;
      return { weights: data as Float32Array, rows: shape[0] ?? 0, columns: shape[1] ?? 0 };
    });
    kept = { key, matrix };
    matrix.catch(() => (kept = null));
  }
  return kept.matrix;
}

export async function fetchAggregateWeights(queries: number[], key: number | null): Promise<Weights> {
  const { weights, rows, columns } = await fetchAggregate();
  const row = (query: number) => weights.slice(query * columns, (query + 1) * columns);
  const from = key === null ? null : Float32Array.from({ length: rows }, (_, query) => weights[query * columns + key]!);
  return { to: queries.length ? sum(queries.map(row)) : null, from };
}

export async function fetchAggregateTile(): Promise<TileState> {
  const { weights, rows, columns } = await fetchAggregate();
  const [height, width] = [Math.min(rows, MAX_CELLS), Math.min(columns, MAX_CELLS)];
  const cells = new Uint8Array(height * width);
  for (let query = 0; query < rows; query++) {
    const first = Math.floor((query * height) / rows) * width;
    for (let key = 0; key < columns; key++) {
      const cell = first + Math.floor((key * width) / columns);
      cells[cell] = Math.max(cells[cell]!, Math.round(weights[query * columns + key]! * 255));
    }
  }
  return { view: { q0: 0, q1: rows, k0: 0, k1: columns }, weights: cells, masked: undefined, rows: height, columns: width, scale: 1, isDraft: false };
}

/** Weights without some keys; the others are divided by their sum. Columns are kept as they are, but not for these keys. */
export function leaveOut({ to, from }: Weights, excluded: readonly number[]): Weights {
  if (!excluded.length || !to) return { to, from };
  const hidden = new Set(excluded);
  const total = to.reduce((all, weight) => all + weight, 0);
  const left = to.reduce((all, weight, key) => (hidden.has(key) ? all : all + weight), 0);
  return { to: to.map((weight, key) => (hidden.has(key) ? 0 : left > 0 ? (weight * total) / left : 0)), from };
}

export const MOST_LINES = 64; // tokens; longer texts are shown as chips only
const STEP = 22;
const [LEFT, RIGHT, WIDTH, SQUARE] = [130, 300, 460, 12];

export function VoiceLines(props: { item: Site; groups: Weights[]; query: number | null; onHover: (index: number | null) => void }): JSX.Element {
  const { item, groups, query } = props;
  const words = { query: streamWords(item.queryStream).slice(0, item.numQueries), key: streamWords(item.keyStream).slice(0, item.numKeys) };
  const y = (index: number) => index * STEP + STEP / 2 + 2;
  const strength = (weight: number) => rampPosition(weight, scale.value);
  const hue = (number: number) => (groups.length > 1 ? `hue-${number === 0 ? "a" : "b"}` : "hue-own");
  return (
    <svg class="lines voice-lines" viewBox={`0 0 ${WIDTH} ${Math.max(words.query.length, words.key.length) * STEP + 6}`} role="img" aria-label={t("text.lines")}>
      {query !== null &&
        groups.flatMap(({ to }, number) =>
          Array.from(to ?? [], (weight, key) => {
            if (weight < 0.01) return null;
            const shift = (number - (groups.length - 1) / 2) * 4;
            const [from, end] = [y(query) + shift, y(key) + shift];
            return <path key={`${number} ${key}`} class={hue(number)} d={`M${LEFT} ${from}C${LEFT + 80} ${from} ${RIGHT - 80} ${end} ${RIGHT} ${end}`} stroke-opacity={strength(weight)} stroke-width={1 + 3 * weight} />;
          }),
        )}
      {words.query.map((word, index) => (
        <text
          key={`q${index}`}
          class={`token-text ${query === index ? "chosen" : ""}`}
          x={LEFT - 8}
          y={y(index) + 4}
          text-anchor="end"
          onMouseEnter={() => props.onHover(index)}
          onMouseLeave={() => props.onHover(null)}
          onClick={() => (selectedToken.value = selectedToken.value === index ? null : index)}
        >
          {visibleToken(word)}
        </text>
      ))}
      {words.key.map((word, index) => (
        <g key={`k${index}`}>
          {groups.map(({ to }, number) => (
            <rect key={number} class={hue(number)} x={RIGHT + 4 + number * (SQUARE + 2)} y={y(index) - SQUARE / 2} width={SQUARE} height={SQUARE} fill-opacity={strength(to?.[index] ?? 0)} />
          ))}
          <text class="token-text key" x={RIGHT + 12 + groups.length * (SQUARE + 2)} y={y(index) + 4}>{visibleToken(word)}</text>
        </g>
      ))}
    </svg>
  );
}
