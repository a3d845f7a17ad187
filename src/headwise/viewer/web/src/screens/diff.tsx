// Diff: the open text beside another text, the same text without some heads, or the same text in another model.

import { computed, signal, useSignal, useSignalEffect, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { showMeasure } from "../actions";
import { cellUnder } from "../canvas/heatmap";
import { bind, choices, type Column, ErrorNote, Form, groupByReason, Heatmap, Panel, Ramp, Segmented, Select, TableButton, Toolbar } from "../components/basics";
import { DataTable } from "../components/data_table";
import { HeadGrid, stackNumbers } from "../components/head_grid";
import { streamName, streamWords, tokenName, visibleToken } from "../components/tokens";
import { format, say, t, type TextKey } from "../i18n";
import { textKey } from "../lab_state";
import type { Message } from "../source";
import { cellMode, diffKind, doc, firstHeads, headName, headPath, isCheap, runJob, scale, SCALES, selectedHead, selectedSite, selectHead, showsTable, site, sites, source, stacks, useAnswer, type DiffKind } from "../state";

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
  /** What was compared; another text, or other heads, make the comparison old. */
  request: string;
  heads: HeadChange[];
  pairs: Record<string, Pairs>;
  words: Record<string, string[]>;
  leftOut: Record<string, string>;
}

const MAX_CELLS = 256;
const WAIT_MS = 600; // after the last change of a text
const MAX_SHOWN_TOKENS = 512;
const MODES = ["divergence", "largest change", "thumbnail"] as const;
const comparison = signal<Comparison | null>(null);
const otherText = signal<Record<string, string>>({});

function readComparison({ fields, arrays }: Message, request: string): Comparison {
  const differences = arrays["differences"]!.data;
  return {
    kind: fields["kind"],
    name: fields["name"],
    request,
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

/** The arguments of the job for what is chosen now. */
function diffRequest(): Record<string, unknown> {
  const kind = diffKind.value;
  const heads = (doc.value?.ablated ?? []).map((item) => [item.site, item.head, item.mode, item.scale]);
  return { with: kind, ...(kind === "text" ? written() : {}), ...(kind === "ablated" ? { heads } : {}) };
}
const requestKey = computed(() => JSON.stringify([diffRequest(), textKey.value]));
let isAsked = false; // by the button, so that the Map shows the divergence too

async function compare(): Promise<void> {
  const request = requestKey.value;
  const isWanted = () => request === requestKey.value && comparison.value?.request !== request;
  const result = await runJob("compare", () => (isWanted() ? diffRequest() : null));
  const found = result ? readComparison(result, request) : comparison.value;
  if (!found || found.request !== request) return;
  comparison.value = found;
  const index = ({ site: number, head }: HeadChange) => (firstHeads.value[number] ?? 0) + head;
  showMeasure("divergence", new Map(found.heads.map((head) => [index(head), head.divergence])));
  showMeasure("largest change", new Map(found.heads.map((head) => [index(head), head.largest])));
  cellMode.value = "divergence";
  const most = found.heads.reduce<HeadChange | null>((best, head) => (head.divergence > (best?.divergence ?? 0) ? head : best), null);
  if (most && isAsked) selectHead(most.site, most.head);
}

/** The texts to compare with: another example until they are edited. A target that is not written is generated. */
function written(): Record<string, string> {
  const streams = doc.value?.streams ?? {};
  const open = Object.fromEntries(Object.entries(streams).map(([name, rows]) => [name, rows[0]?.text || rows[0]?.words.join("") || ""]));
  const example = doc.value?.texts.find((line) => line !== open["text"] && line.split("\t")[0] !== open["source"]);
  const [first = "", target = ""] = example?.split("\t") ?? [];
  const start = example === undefined ? open : "source" in streams ? { source: first, text: target } : { text: first };
  const isGenerated = "source" in streams && otherText.value["source"] !== undefined && otherText.value["text"] === undefined;
  return { ...start, ...otherText.value, ...(isGenerated ? { text: "" } : {}) };
}

/** Why nothing can be compared. */
function missingReason(): string {
  const { capabilities, other, ablated = [] } = doc.value ?? {};
  if (diffKind.value === "other") return other ? "" : t("diff.noOther");
  if (!capabilities?.text.possible) return say(capabilities?.text.reason ?? "");
  return diffKind.value === "ablated" && !ablated.length ? t("diff.noAblated") : "";
}

/** Compare without being asked where that takes little; the cells of the Map stay as they were. */
function useComparison(): void {
  useEffect(() => {
    const cells = cellMode.peek();
    return () => void (isAsked || (cellMode.value = cells));
  }, []);
  useSignalEffect(() => {
    if (comparison.value?.request === requestKey.value || !isCheap.value || diffKind.value === "other" || missingReason()) return;
    const timer = setTimeout(() => void compare(), comparison.peek() ? WAIT_MS : 0);
    return () => clearTimeout(timer);
  });
}

export function DiffScreen(): JSX.Element {
  useComparison();
  const found = comparison.value;
  const isCurrent = found?.request === requestKey.value;
  const reason = !source.isLive ? t("state.needsModel") : !doc.value?.sites.length ? t("open.none") : "";
  return (
    <>
      <Toolbar title={t("diff.title")} hint={t("diff.hint")}>
        {found && isCurrent && (
          <>
            <Select label={t("map.cells")} value={MODES.find((mode) => mode === cellMode.value) ?? "thumbnail"} options={choices("diff.mode.", MODES)} onChange={(mode) => (cellMode.value = mode)} />
            <Select label={t("scale.label")} {...bind(scale)} options={choices("scale.", SCALES)} />
            <TableButton />
          </>
        )}
      </Toolbar>
      {reason ? <p class="note">{reason}</p> : <Question />}
      {found && !isCurrent && <p class="note">{t(isCheap.value && !missingReason() ? "state.computing" : "diff.old")}</p>}
      {found && isCurrent && <Answer found={found} />}
    </>
  );
}

/** What to compare with, and the button that does it. */
function Question(): JSX.Element {
  const { other = "", ablated = [] } = doc.value ?? {};
  const kind = diffKind.value;
  const missing = missingReason();
  return (
    <Panel class="diff-question">
      <Form class="stack" onSend={() => { isAsked = true; if (!missing) void compare(); }}>
        <div class="row wrap">
          <span class="t3">{t("diff.with")}</span>
          <Segmented label={t("diff.with")} {...bind(diffKind)} options={[...choices("diff.kind.", ["text", "ablated"]), ["other", other || t("diff.kind.other")]]} />
          {kind === "ablated" && <span class="t2">{ablated.map((item) => headName(item.site, item.head)).join(", ")}</span>}
          <span class="grow" />
          <button class="btn primary" type="submit" aria-disabled={missing !== ""}>{t("diff.run")}</button>
        </div>
        {missing && <p class="t3">{missing}</p>}
        {kind === "text" && !missing && <OtherText />}
      </Form>
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
          <span>{name === "source" ? t("box.source") : names.length > 1 ? t("diff.target") : t("diff.text")}</span>
          <textarea rows={2} value={texts[name] ?? ""} onInput={(event) => (otherText.value = { ...otherText.value, [name]: event.currentTarget.value })} />
        </label>
      ))}
    </div>
  );
}

function Answer({ found }: { found: Comparison }): JSX.Element {
  const leftOut = groupByReason(Object.entries(found.leftOut)).map(([why, names]) => `${names} (${say(why)})`);
  return (
    <div class="stack">
      <Panel title={t("diff.tokens")}>
        <div class="stack">
          {Object.keys(found.pairs).map((stream) => (
            <TokenPairs key={stream} stream={stream} found={found} />
          ))}
        </div>
        {leftOut.length > 0 && <p class="t3">{t("diff.leftOut", { sites: leftOut.join("; ") })}</p>}
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

function placeName({ site: number, place }: HeadChange): string {
  const item = sites.value[number]!;
  return t("head.cell", { query: tokenName(item.queryStream, place[0]), key: tokenName(item.keyStream, place[1]) });
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
        {t("diff.aligned", { stream: streamName(stream), count, first: first.length, second: second.length })}
      </p>
      <div class="scroll pair-scroll" tabIndex={0} role="region" aria-label={`${t("diff.tokens")}: ${streamName(stream)}`}>
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
  const cell = useSignal<[number, number] | null>(null);
  const isCompared = isHeadOf(found);
  const { found: pictures, error } = useAnswer(
    () => (comparison.value && isHeadOf(comparison.value) ? headPath("difference", { cells: MAX_CELLS }) : null),
    (message): Pictures => {
      cell.value = null;
      return readPictures(message);
    },
  );
  const shown = pictures.value;
  const title = t("head.title", { name: headName(selectedSite.value, selectedHead.value) });
  if (!isCompared) return <Panel title={title}>{<p class="t3">{t("diff.notCompared")}</p>}</Panel>;
  if (shown && showsTable.value) return <Panel title={title}>{<PairTable pairs={shown.pairs} found={found} />}</Panel>;
  return (
    <Panel title={title} footer={<ExactPair cell={cell} pictures={shown} found={found} />}>
      {error.value && <ErrorNote {...error.value} />}
      <div class="diff-tiles">
        {shown && (["first", "second", "change"] as const).map((name) => (
          <figure key={name}>
            <figcaption class="sm t2">
              {t(`diff.${name}` as TextKey)}
              {name === "first" && <span class="t3">{t("inspector.axes")}</span>}
            </figcaption>
            <div
              onPointerMove={(event) => (cell.value = shown && cellUnder(event, shown.rows, shown.columns))}
              onPointerLeave={() => (cell.value = null)}
              data-testid={`diff-${name}`}
            >
              <Heatmap class="bigthumb" image={{ data: shown[name], rows: shown.rows, columns: shown.columns, isSigned: name === "change" }} scale={scale.value} label={t(`diff.${name}` as TextKey)} />
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
  const token = (stream: string, number: number) => `${found.pairs[stream]?.[number * 2] ?? 0} ${tokenName(stream, found.pairs[stream]?.[number * 2] ?? 0)}`;
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

/** The tokens and the exact weights of the pair under the pointer, or of the first pair of its cell. */
function ExactPair({ cell, pictures, found }: { cell: Signal<[number, number] | null>; pictures: Pictures | null; found: Comparison }): JSX.Element {
  const pointed = () => cell.value && pictures && { query: pictures.queries[cell.value[0]]!, key: pictures.keys[cell.value[1]]! };
  const { found: weights } = useAnswer(
    () => {
      const place = pointed();
      return place && headPath("difference/pair", place);
    },
    ({ arrays }) => ({ ...pointed()!, first: arrays["weights"]!.data[0]!, second: arrays["weights"]!.data[1]! }),
  );
  const pair = weights.value;
  const item = site.value;
  if (!pair || !item) return <span class="t3">{t("diff.point")}</span>;
  const position = (stream: string, number: number) => found.pairs[stream]?.[number * 2] ?? 0;
  return (
    <span class="t2" aria-live="polite" data-testid="diff-exact">
      <span class="mono">{t("head.cell", { query: tokenName(item.queryStream, position(item.queryStream, pair.query)), key: tokenName(item.keyStream, position(item.keyStream, pair.key)) })}</span>{" "}
      {format(pair.first)} → {format(pair.second)} <b class="b">{signed(pair.second - pair.first)}</b>
    </span>
  );
}
