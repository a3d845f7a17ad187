// The weights of one head as CSV and JSON, in the format of `Trace.export_weights`, for a file without a server.

import type { ViewDocument } from "./source";

const COLUMNS = ["site", "head", "row", "query", "key", "query_token", "key_token", "weight"] as const;
type Pair = (string | number)[];

/** The pairs of a head whose weight is large enough, in the order of COLUMNS. */
export function listPairs(document: ViewDocument, at: { site: number; head: number }, exact: { weights: Float32Array; queries: number; keys: number }, least: number): Pair[] {
  const site = document.sites[at.site]!;
  const words = (stream: string) => document.streams[stream]?.[0]?.words ?? [];
  const [queryWords, keyWords] = [words(site.queryStream), words(site.keyStream)];
  const pairs: Pair[] = [];
  exact.weights.forEach((weight, cell) => {
    if (weight < least || weight <= 0) return;
    const [query, key] = [Math.floor(cell / exact.keys), cell % exact.keys];
    pairs.push([site.name, at.head, 0, query, key, queryWords[query] ?? String(query), keyWords[key] ?? String(key), weight]);
  });
  return pairs;
}

export function encodeCsv(pairs: Pair[]): string {
  const field = (value: string | number) => (typeof value === "string" && /[",\r\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : String(value));
  return [COLUMNS as readonly (string | number)[], ...pairs].map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

export function encodeJson(document: ViewDocument, pairs: Pair[]): string {
  const weights = pairs.map((pair) => Object.fromEntries(COLUMNS.map((name, index) => [name, pair[index]])));
  return JSON.stringify({ model: document.model, weights });
}
