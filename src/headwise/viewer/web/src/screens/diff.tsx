// Diff: the open text beside another text, the same text without some heads, or the same text in another model.

import { signal, useComputed, useSignal, useSignalEffect, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { showMeasure } from "../actions";
import { bind, choices, type Column, ErrorNote, Heatmap, Panel, Ramp, Segmented, Select, TableButton } from "../components/basics";
import { DataTable } from "../components/data_table";
import { HeadGrid, stackNumbers } from "../components/head_grid";
import { streamWords, visibleToken } from "../components/tokens";
import { format, say, t, type TextKey } from "../i18n";
import type { Message, PageError } from "../source";
import { cellMode, diffKind, doc, firstHeads, headName, runJob, scale, SCALES, selectedHead, selectedSite, selectHead, showsTable, site, sites, source, stacks, toPageError, type DiffKind } from "../state";

interface HeadChange {
  site: number;
  head: number;
  divergence: number;
  largest: number;
  entropyChange: number;
  /** The query and the key of the largest change. */
  place: [number, number];
}

/** Positions of aligned tokens: of the open text and of the other one, one pair after the other. */
type Pairs = Int32Array;

interface Comparison {
  kind: DiffKind;
  name: string;
  /** Of the document that was compared; another text makes the comparison old. */
  revision: number;
  heads: HeadChange[];
  pairs: Record<string, Pairs>;
  words: Record<string, string[]>;
  leftOut: Record<string, string>;
}

const MAX_CELLS = 256;
const MAX_SHOWN_TOKENS = 512;
const MODES = ["divergence", "largest change", "thumbnail"] as const;
const comparison = signal<Comparison | null>(null);
const otherText = signal<Record<string, string>>({});

function readComparison({ fields, arrays }: Message): Comparison {
  const differences = arrays["differences"]!.data;
  return {
    kind: fields["kind"],
    name: fields["name"],
    revision: doc.value!.revision,
    heads: fields["heads"].map(([siteNumber, head]: [number, number], row: number) => ({
      site: siteNumber,
      head,
      divergence: differences[row * 4]!,
      largest: differences[row * 4 + 1]!,
      entropyChange: differences[row * 4 + 3]!,
      place: fields["places"][row],
    })),
    pairs: Object.fromEntries(Object.entries(arrays).flatMap(([name, { data }]) => (name.endsWith(".pairs") ? [[name.slice(0, -6), data as Pairs]] : []))),
    words: fields["words"],
    leftOut: fields["leftOut"],
  };
}

async function compare(): Promise<void> {
  const kind = diffKind.value;
  const heads = (doc.value?.ablated ?? []).map((item) => [item.site, item.head, item.mode, item.scale]);
  const result = await runJob("compare", { with: kind, ...(kind === "text" ? written() : {}), ...(kind === "ablated" ? { heads } : {}) });
  if (!result) return;
  const found = readComparison(result);
  comparison.value = found;
  const index = ({ site: number, head }: HeadChange) => (firstHeads.value[number] ?? 0) + head;
  showMeasure("divergence", new Map(found.heads.map((head) => [index(head), head.divergence])));
  showMeasure("largest change", new Map(found.heads.map((head) => [index(head), head.largest])));
  cellMode.value = "divergence";
  const most = found.heads.reduce<HeadChange | null>((best, head) => (head.divergence > (best?.divergence ?? 0) ? head : best), null);
  if (most) selectHead(most.site, most.head);
}

/** The texts to compare with: those of the open text, until they are edited. A target that is not written is generated. */
function written(): Record<string, string> {
  const streams = doc.value?.streams ?? {};
  const open = Object.fromEntries(Object.entries(streams).map(([name, rows]) => [name, rows[0]?.text || rows[0]?.words.join("") || ""]));
  const texts = { ...open, ...otherText.value };
  const isGenerated = "source" in streams && otherText.value["text"] === undefined && texts["source"] !== open["source"];
  return isGenerated ? { ...texts, text: "" } : texts;
}

export function DiffScreen(): JSX.Element {
  const found = comparison.value;
  const isCurrent = found?.revision === doc.value?.revision;
  const reason = !source.isLive ? t("state.needsModel") : !doc.value?.sites.length ? t("open.none") : "";
  return (
    <>
      <div class="toolbar">
        <h1>{t("diff.title")}</h1>
        <span class="t3">{t("diff.hint")}</span>
        <span class="grow" />
        {found && isCurrent && (
          <>
            <Select label={t("map.cells")} value={MODES.find((mode) => mode === cellMode.value) ?? "thumbnail"} options={choices("diff.mode.", MODES)} onChange={(mode) => (cellMode.value = mode)} />
            <Select label={t("scale.label")} {...bind(scale)} options={choices("scale.", SCALES)} />
            <TableButton />
          </>
        )}
      </div>
      {reason ? <p class="note">{reason}</p> : <Question />}
      {found && !isCurrent && <p class="note">{t("diff.old")}</p>}
      {found && isCurrent && <Answer found={found} />}
    </>
  );
}

/** What to compare with, and the button that does it. */
function Question(): JSX.Element {
  const canRun = doc.value?.capabilities.text.possible ?? false;
  const other = doc.value?.other ?? "";
  const ablated = doc.value?.ablated ?? [];
  const kind = diffKind.value;
  const missing =
    kind === "other" ? (other ? "" : t("diff.noOther")) : !canRun ? say(doc.value?.capabilities.text.reason ?? "") : kind === "ablated" && !ablated.length ? t("diff.noAblated") : "";
  return (
    <Panel class="diff-question">
      <form
        class="stack"
        onSubmit={(event) => {
          event.preventDefault();
          if (!missing) void compare();
        }}
      >
        <div class="row wrap">
          <span class="t3">{t("diff.with")}</span>
          <Segmented label={t("diff.with")} {...bind(diffKind)} options={[...choices("diff.kind.", ["text", "ablated"]), ["other", other || t("diff.kind.other")]]} />
          {kind === "ablated" && <span class="t2">{ablated.map((item) => headName(item.site, item.head)).join(", ")}</span>}
          <span class="grow" />
          <button class="btn primary" type="submit" aria-disabled={missing !== ""}>
            {t("diff.run")}
          </button>
        </div>
        {missing && <p class="t3">{missing}</p>}
        {kind === "text" && !missing && <OtherText />}
      </form>
    </Panel>
  );
}

function OtherText(): JSX.Element {
  const texts = written();
  const names = Object.keys(texts).sort(); // source before text
  return (
    <div class={names.length > 1 ? "two" : "stack"}>
      {names.map((name) => (
        <label key={name} class="stack">
          <span>{name === "source" ? t("open.newSource") : names.length > 1 ? t("diff.target") : t("diff.text")}</span>
          <textarea rows={2} value={texts[name] ?? ""} onInput={(event) => (otherText.value = { ...otherText.value, [name]: event.currentTarget.value })} />
        </label>
      ))}
    </div>
  );
}

function Answer({ found }: { found: Comparison }): JSX.Element {
  const leftOut = Object.entries(found.leftOut);
  return (
    <div class="stack">
      <Panel title={t("diff.tokens")}>
        <div class="stack">
          {Object.keys(found.pairs).map((stream) => (
            <TokenPairs key={stream} stream={stream} found={found} />
          ))}
        </div>
        {leftOut.length > 0 && <p class="t3">{t("diff.leftOut", { sites: leftOut.map(([name, why]) => `${name} (${say(why)})`).join("; ") })}</p>}
      </Panel>
      <div class="diff-lay">
        <Panel title={t("diff.heads")} footer={<Ramp text={t(`diff.ramp.${cellMode.value === "largest change" ? "largest" : cellMode.value === "divergence" ? "divergence" : "thumbnail"}` as TextKey)} />}>
          {stacks.value.filter((stack) => stackNumbers(stack).length).map((stack) => (
            <HeadGrid key={stack} stack={stack} />
          ))}
        </Panel>
        <HeadPictures found={found} />
      </div>
      <Panel>
        <DataTable
          caption={t("diff.ranked")}
          rows={found.heads}
          sort="divergence"
          {...(showsTable.value ? {} : { limit: 20 })}
          onSelect={(head) => selectHead(head.site, head.head)}
          isSelected={(head) => head.site === selectedSite.value && head.head === selectedHead.value}
          columns={[
            { key: "head", title: t("head"), value: (head) => headName(head.site, head.head) },
            { key: "divergence", title: t("diff.column.divergence"), numeric: true, value: (head) => head.divergence, cell: (head) => format(head.divergence) },
            { key: "largest", title: t("diff.column.largest"), numeric: true, value: (head) => head.largest, cell: (head) => format(head.largest) },
            { key: "entropy", title: t("diff.column.entropy"), numeric: true, value: (head) => head.entropyChange, cell: (head) => signed(head.entropyChange) },
            { key: "place", title: t("diff.column.place"), value: (head) => placeName(head) },
          ]}
        />
      </Panel>
    </div>
  );
}

function signed(value: number): string {
  return `${value < 0 ? "−" : "+"}${format(Math.abs(value))}`;
}

function word(stream: string, position: number): string {
  return visibleToken(streamWords(stream)[position] ?? String(position));
}

function placeName({ site: number, place }: HeadChange): string {
  const item = sites.value[number]!;
  return t("head.cell", { query: word(item.queryStream, place[0]), key: word(item.keyStream, place[1]) });
}

/** Two rows of tokens, aligned; those without a partner are struck through above or underlined below. */
function TokenPairs({ stream, found }: { stream: string; found: Comparison }): JSX.Element {
  const first = streamWords(stream);
  const second = found.words[stream] ?? [];
  const columns: [number | null, number | null][] = [];
  let [one, other] = [0, 0];
  const pairs = found.pairs[stream]!;
  const advance = (toOne: number, toOther: number) => {
    while (one < toOne) columns.push([one++, null]);
    while (other < toOther) columns.push([null, other++]);
  };
  for (let row = 0; row * 2 < pairs.length; row++) {
    advance(pairs[row * 2]!, pairs[row * 2 + 1]!);
    columns.push([one++, other++]);
  }
  advance(first.length, second.length);
  const count = pairs.length / 2;
  return (
    <div class="stack">
      <p class="sm t3">
        {t("diff.aligned", { stream: Object.keys(found.pairs).length > 1 ? say(stream) : t("diff.stream"), count, first: first.length, second: second.length })}
      </p>
      <div class="scroll pair-scroll" tabIndex={0} role="region" aria-label={`${t("diff.tokens")}: ${say(stream)}`}>
        <div class="pair-row">
          {columns.slice(0, MAX_SHOWN_TOKENS).map(([left, right], index) => (
            <span key={index} class={left === null ? "added" : right === null ? "removed" : first[left] === second[right] ? "" : "replaced"}>
              <span>{left === null ? "" : visibleToken(first[left]!)}</span>
              <span>{right === null ? "" : visibleToken(second[right]!)}</span>
            </span>
          ))}
          {columns.length > MAX_SHOWN_TOKENS && <span class="t3">{t("diff.more", { count: columns.length - MAX_SHOWN_TOKENS })}</span>}
        </div>
      </div>
    </div>
  );
}

// --- The selected head -----------------------------------------------------------------------------------

interface Pictures {
  first: Uint8Array;
  second: Uint8Array;
  change: Uint8Array;
  rows: number;
  columns: number;
  /** The number of the first aligned pair of each cell. */
  queries: Int32Array;
  keys: Int32Array;
  pairs: PairChange[];
}

/** An aligned pair of a query and a key that differs, by their numbers among the aligned tokens, and its exact weights. */
interface PairChange {
  query: number;
  key: number;
  first: number;
  second: number;
}

function readPictures({ arrays }: Message): Pictures {
  const [rows = 0, columns = 0] = arrays["change"]!.shape;
  const bytes = (name: string) => arrays[name]!.data as Uint8Array;
  const numbers = (name: string) => arrays[name]!.data as Int32Array;
  const [places, weights] = [arrays["places"]!.data, arrays["weights"]!.data];
  const pairs = Array.from({ length: places.length / 2 }, (_, row) => ({ query: places[row * 2]!, key: places[row * 2 + 1]!, first: weights[row * 2]!, second: weights[row * 2 + 1]! }));
  return { first: bytes("first"), second: bytes("second"), change: bytes("change"), rows, columns, queries: numbers("queries"), keys: numbers("keys"), pairs };
}

/** The weights in both runs and their difference, over the aligned tokens, with the exact numbers of the pointed pair. */
function HeadPictures({ found }: { found: Comparison }): JSX.Element {
  const pictures = useSignal<Pictures | null>(null);
  const error = useSignal<PageError | null>(null);
  const cell = useSignal<[number, number] | null>(null);
  const isCompared = useComputed(() => found.heads.some((head) => head.site === selectedSite.value && head.head === selectedHead.value)).value;
  useSignalEffect(() => {
    const path = `difference?site=${selectedSite.value}&head=${selectedHead.value}&cells=${MAX_CELLS}`;
    if (comparison.value !== found || !isHeadOf(found)) return;
    cell.value = null;
    const abort = new AbortController();
    source
      .fetchArrays(path, abort.signal)
      .then((message) => {
        error.value = null;
        pictures.value = readPictures(message);
      })
      .catch((reason) => !abort.signal.aborted && (error.value = toPageError(reason)));
    return () => abort.abort();
  });
  const shown = pictures.value;
  const title = t("head.title", { name: headName(selectedSite.value, selectedHead.value) });
  if (!isCompared) return <Panel title={title}>{<p class="t3">{t("diff.notCompared")}</p>}</Panel>;
  if (shown && showsTable.value) return <Panel title={title}>{<PairTable pairs={shown.pairs} found={found} />}</Panel>;
  const images = shown && ([
    ["first", { data: shown.first, rows: shown.rows, columns: shown.columns }],
    ["second", { data: shown.second, rows: shown.rows, columns: shown.columns }],
    ["change", { data: shown.change, rows: shown.rows, columns: shown.columns, isSigned: true }],
  ] as const);
  return (
    <Panel title={title} footer={<ExactPair cell={cell} pictures={shown} found={found} />}>
      {error.value && <ErrorNote {...error.value} />}
      <div class="diff-tiles">
        {images?.map(([name, image]) => (
          <figure key={name}>
            <figcaption class="sm t2">
              {t(`diff.${name}` as TextKey)}
              {name === "first" && <span class="t3">{t("inspector.axes")}</span>}
            </figcaption>
            <div
              onPointerMove={(event) => (cell.value = shown && cellUnder(event, shown))}
              onPointerLeave={() => (cell.value = null)}
              data-testid={`diff-${name}`}
            >
              <Heatmap class="bigthumb" image={image} scale={scale.value} label={t(`diff.${name}` as TextKey)} />
            </div>
          </figure>
        ))}
      </div>
    </Panel>
  );
}

/** The numbers behind the pictures: the pairs of tokens whose weights differ most, with the exact weights. */
function PairTable({ pairs, found }: { pairs: PairChange[]; found: Comparison }): JSX.Element {
  const { queryStream = "", keyStream = "" } = site.value ?? {};
  const token = (stream: string, number: number) => `${found.pairs[stream]?.[number * 2] ?? 0} ${word(stream, found.pairs[stream]?.[number * 2] ?? 0)}`;
  const column = (key: string, title: string, value: (pair: PairChange) => number, text: (value: number) => string): Column<PairChange> => ({ key, title, numeric: true, value, cell: (pair) => text(value(pair)) });
  return (
    <DataTable
      caption={t("diff.pairs")}
      rows={pairs}
      columns={[
        { key: "query", title: t("query"), value: (pair) => token(queryStream, pair.query) },
        { key: "key", title: t("key"), value: (pair) => token(keyStream, pair.key) },
        column("first", t("diff.first"), (pair) => pair.first, format),
        column("second", t("diff.second"), (pair) => pair.second, format),
        column("change", t("diff.changeColumn"), (pair) => pair.second - pair.first, signed),
      ]}
    />
  );
}

function isHeadOf(found: Comparison): boolean {
  return found.heads.some((head) => head.site === selectedSite.value && head.head === selectedHead.value);
}

function cellUnder(event: PointerEvent, { rows, columns }: Pictures): [number, number] {
  const box = (event.currentTarget as HTMLElement).querySelector("canvas")!.getBoundingClientRect();
  const at = (offset: number, size: number, count: number) => Math.min(Math.max(Math.floor((offset / size) * count), 0), count - 1);
  return [at(event.clientY - box.top, box.height, rows), at(event.clientX - box.left, box.width, columns)];
}

/** The tokens and the exact weights of the pair under the pointer, or of the first pair of its cell. */
function ExactPair({ cell, pictures, found }: { cell: Signal<[number, number] | null>; pictures: Pictures | null; found: Comparison }): JSX.Element {
  const weights = useSignal<{ query: number; key: number; first: number; second: number } | null>(null);
  useSignalEffect(() => {
    const place = cell.value;
    weights.value = null;
    if (!place || !pictures) return;
    const [query, key] = [pictures.queries[place[0]]!, pictures.keys[place[1]]!];
    const abort = new AbortController();
    source
      .fetchArrays(`difference/pair?site=${selectedSite.peek()}&head=${selectedHead.peek()}&query=${query}&key=${key}`, abort.signal)
      .then(({ arrays }) => (weights.value = { query, key, first: arrays["weights"]!.data[0]!, second: arrays["weights"]!.data[1]! }))
      .catch(() => undefined); // the pointer has moved on, or the panel shows the error of the picture
    return () => abort.abort();
  });
  const pair = weights.value;
  const item = site.value;
  if (!pair || !item) return <span class="t3">{t("diff.point")}</span>;
  const position = (stream: string, number: number) => found.pairs[stream]?.[number * 2] ?? 0;
  return (
    <span class="t2" aria-live="polite" data-testid="diff-exact">
      <span class="mono">{t("head.cell", { query: word(item.queryStream, position(item.queryStream, pair.query)), key: word(item.keyStream, position(item.keyStream, pair.key)) })}</span>{" "}
      {format(pair.first)} → {format(pair.second)} <b class="b">{signed(pair.second - pair.first)}</b>
    </span>
  );
}
