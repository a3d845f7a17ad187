// Short texts as tokens joined by lines or arcs, and the strongest pairs as a table.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { cssRamp, rampPosition, themeVersion } from "../canvas/colors";
import { format, t } from "../i18n";
import type { Site } from "../source";
import { language, leastShare, scale, selectedToken } from "../state";
import { useWidth } from "./basics";
import { DataTable } from "./data_table";
import { cellSpan, type TileState } from "./head_data";
import { streamWords, visibleToken } from "./tokens";

const LISTED_PAIRS = 200;

const LINES = { left: 180, right: 380, width: 560, line: 22 };
const ARCS = { least: 13, most: 64, height: 240, letter: 8, turned: 88 }; // CSS pixels

export interface Pair {
  query: number;
  key: number;
  weight: number;
}

/** The cells of a tile with their weights; a cell that covers several pairs stands for its first. */
export function tilePairs(tile: TileState, least: number): Pair[] {
  const pairs: Pair[] = [];
  for (let row = 0; row < tile.rows; row++) {
    for (let column = 0; column < tile.columns; column++) {
      const weight = (tile.weights[row * tile.columns + column]! / 255) * tile.scale;
      if (weight < least) continue;
      const { q0, k0 } = cellSpan(tile, row, column);
      pairs.push({ query: q0, key: k0, weight });
    }
  }
  return pairs;
}

/** The smallest 8-bit weight that at most `count` cells exceed, at least 1 % of the largest. */
function weightOfRank({ weights }: TileState, count: number): number {
  const cells = new Uint32Array(256);
  for (const weight of weights) cells[weight]!++;
  let step = 255;
  for (let found = cells[step]!; step > 3 && found < count; found += cells[step]!) step--;
  return step;
}

/** The cells with the largest weights. A tile has many, and the pointer moves often: the table is made once for a tile. */
export function StrongestPairs({ item, tile }: { item: Site; tile: TileState | null }): JSX.Element {
  return useMemo(() => {
    const word = (stream: string, place: number) => `${place} ${visibleToken(streamWords(stream)[place] ?? "")}`;
    const pairs = tile ? tilePairs(tile, (weightOfRank(tile, LISTED_PAIRS) / 255) * tile.scale).sort((a, b) => b.weight - a.weight) : [];
    return (
      <DataTable
        caption={t("head.strongest")}
        rows={pairs.slice(0, LISTED_PAIRS)}
        columns={[
          { key: "query", title: t("query"), value: (pair) => word(item.queryStream, pair.query) },
          { key: "key", title: t("key"), value: (pair) => word(item.keyStream, pair.key) },
          { key: "weight", title: t("weight"), numeric: true, value: (pair) => pair.weight, cell: (pair) => format(pair.weight) },
        ]}
      />
    );
  }, [item, tile, language.value]);
}

function linePath({ query, key }: Pair): string {
  const [from, to] = [query * LINES.line + 14, key * LINES.line + 14];
  return `M${LINES.left} ${from}C${LINES.left + 80} ${from} ${LINES.right - 80} ${to} ${LINES.right} ${to}`;
}

/** An arc whose height grows with its distance, so that the longest alone reaches the top. */
export function arcPath({ query, key }: Pair, step: number, longest: number): string {
  const [from, to] = [(query + 0.5) * step, (key + 0.5) * step];
  const top = ARCS.height - (ARCS.height * 1.3 * (Math.abs(query - key) + 0.3)) / (longest + 0.3);
  return `M${from} ${ARCS.height}C${from} ${top} ${to} ${top} ${to} ${ARCS.height}`;
}

/** Strong pairs are opaque; those of other queries than the selected one are faint. */
function pairOpacity(pair: Pair, tile: TileState): number {
  const focus = selectedToken.value;
  return rampPosition(pair.weight / tile.scale, scale.value) * (focus === null || pair.query === focus ? 0.9 : 0.08);
}

/** Tokens in two columns joined by lines, or in one row joined by arcs. */
export function TokenLines({ item, tile, arcs }: { item: Site; tile: TileState | null; arcs: boolean }): JSX.Element {
  const queryWords = streamWords(item.queryStream);
  const keyWords = streamWords(item.keyStream);
  void themeVersion.value;
  const pairs = tile ? tilePairs(tile, Math.max(leastShare.value, 1 / 255) * tile.scale) : [];
  const focus = selectedToken.value;
  if (arcs) return <TokenArcs words={queryWords.map(visibleToken)} pairs={pairs} tile={tile} />;
  const height = Math.max(queryWords.length, keyWords.length) * LINES.line + 8;
  return (
    <svg class="lines" viewBox={`0 0 ${LINES.width} ${height}`} role="img" aria-label={t("head.lines")}>
      {pairs.map((pair, index) => (
        <path key={index} d={linePath(pair)} stroke={cssRamp(0.85)} stroke-opacity={pairOpacity(pair, tile!)} />
      ))}
      {queryWords.map((word, index) => (
        <text key={`q${index}`} class={`token-text ${focus === index ? "chosen" : ""}`} x={LINES.left - 8} y={index * LINES.line + 18} text-anchor="end" onClick={() => (selectedToken.value = focus === index ? null : index)}>
          {visibleToken(word)}
        </text>
      ))}
      {keyWords.map((word, index) => (
        <text key={`k${index}`} class="token-text" x={LINES.right + 8} y={index * LINES.line + 18}>{visibleToken(word)}</text>
      ))}
    </svg>
  );
}

/** Tokens in one row, as wide as there is room, joined by arcs. */
function TokenArcs({ words, pairs, tile }: { words: string[]; pairs: Pair[]; tile: TileState | null }): JSX.Element {
  const [box, width] = useWidth<HTMLDivElement>();
  const focus = selectedToken.value;
  const step = Math.min(Math.max(width.value / Math.max(words.length, 1), ARCS.least), ARCS.most);
  const isTurned = (word: string) => word.length * ARCS.letter > step;
  const longest = pairs.reduce((most, { query, key }) => Math.max(most, Math.abs(query - key)), 1);
  const place = (word: string, index: number) => (isTurned(word) ? `translate(${(index + 0.5) * step + 4} ${ARCS.height + 10}) rotate(-90)` : `translate(${(index + 0.5) * step} ${ARCS.height + 18})`);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={t("head.arcs")} ref={box}>
      <svg class="lines" width={words.length * step} height={ARCS.height + (words.some(isTurned) ? ARCS.turned : 28)} role="img" aria-label={t("head.arcs")}>
        {pairs.map((pair, index) => (
          <path key={index} d={arcPath(pair, step, longest)} stroke={cssRamp(0.85)} stroke-opacity={pairOpacity(pair, tile!)} />
        ))}
        {words.map((word, index) => (
          <text key={index} class={`token-text ${focus === index ? "chosen" : ""}`} transform={place(word, index)} text-anchor={isTurned(word) ? "end" : "middle"} onClick={() => (selectedToken.value = focus === index ? null : index)}>
            {word}
          </text>
        ))}
      </svg>
    </div>
  );
}
