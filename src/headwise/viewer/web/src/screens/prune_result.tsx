// What the Prune & convert screen shows of sizes, of heads that stay and go, and of a verification report.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { type Column, CopyCode, Notes } from "../components/basics";
import { DataTable } from "../components/data_table";
import { format, formatInterval, isTextKey, say, t } from "../i18n";
import { formatCount } from "./cost";

export interface Size {
  name: string;
  unit: string;
  before: number;
  after: number;
  ratio: number | null;
}

interface AttentionSize {
  heads: number;
  kv: number;
  parameters: number;
  remembered: number;
}

interface Estimate {
  value: number | null;
  low: number | null;
  high: number | null;
}

export interface Sizes {
  length: number;
  dtype: string;
  numbers: Size[];
  sites: { site: string; before: AttentionSize; after: AttentionSize }[];
}

/** Metrics over several texts, before and after a change. Mirrors `QualityReport`. */
export interface Quality {
  texts: number;
  rows: { name: string; before: Estimate | null; after: Estimate; change: Estimate | null }[];
}

/** The answer of the jobs prune and convert. Mirrors `NewModel.write_and_verify`. */
export interface SurgeryResult {
  holds: boolean;
  command: string;
  folder: string;
  sentence: string;
  groups?: { site: string; groups: number[][] }[];
  verification: {
    what: string;
    equal: { what: string; apart: number; allowed: number; same: boolean }[];
    savings: Sizes;
    speeds: { phases: { phase: string; speedup: number; verdict: string }[] };
    quality: Quality;
    notes: string[];
  };
}

/** The name of a size in the language of the page; one that the page does not know stays as it is. */
function sizeName(name: string, length: number): string {
  const key = `size.${name}`;
  return isTextKey(key) ? t(key, { length }) : say(name);
}

export function formatSize(value: number, unit: string): string {
  const text = formatCount(value);
  if (unit === "bytes") return `${text}${/[a-z]$/i.test(text) ? "" : " "}B`;
  return unit ? `${text}${/[a-z]$/i.test(text) ? "" : " "}${unit}` : value.toLocaleString("en");
}

/** Sizes of one model, as a list. */
export function SizeList({ heads, kvHeads, sizes, dtype }: { heads: number; kvHeads: number; sizes: Size[]; dtype?: string }): JSX.Element {
  return (
    <dl class="kv" data-testid="sizes-now">
      <dt>{t("prune.heads")}</dt>
      <dd>{heads}</dd>
      <dt>{t("prune.kvHeads")}</dt>
      <dd>{kvHeads}</dd>
      {dtype && <dt>{t("prune.dtype")}</dt>}
      {dtype && <dd>{dtype}</dd>}
      {sizes.map((size) => [
        <dt key={`${size.name} name`}>{sizeName(size.name, 512)}</dt>,
        <dd key={size.name} class="nw">
          {formatSize(size.before, size.unit)}
        </dd>,
      ])}
    </dl>
  );
}

/** Sizes before and after a change. */
export function SizeTable({ sizes, after }: { sizes: Sizes; after: string }): JSX.Element {
  return (
    <DataTable
      caption={t("prune.sizes")}
      rows={sizes.numbers}
      columns={[
        { key: "name", title: t("prune.sizesIn", { dtype: sizes.dtype }), value: (row) => sizeName(row.name, sizes.length) },
        { key: "before", title: t("prune.before"), numeric: true, value: (row) => row.before, cell: (row) => formatSize(row.before, row.unit) },
        { key: "after", title: after, numeric: true, value: (row) => row.after, cell: (row) => <b class="b">{formatSize(row.after, row.unit)}</b> },
        { key: "ratio", title: t("prune.ratio"), numeric: true, value: (row) => row.ratio ?? NaN, cell: (row) => (row.ratio === null ? "–" : `${(row.ratio * 100).toFixed(1)} %`) },
      ]}
    />
  );
}

/** A verification report: its verdict, where the model is, the command that repeats it, and its tables. */
export function ResultView({ result }: { result: SurgeryResult }): JSX.Element {
  const { verification } = result;
  const verdict = useRef<HTMLParagraphElement>(null);
  useEffect(() => verdict.current?.scrollIntoView({ block: "center" }), [result]);
  const failed = verification.equal.filter((check) => !check.same).length;
  const count = verification.equal.length;
  return (
    <div class="stack" data-testid="verification">
      <p ref={verdict} class={`verdict ${result.holds ? "ok" : "bad"}`} role="status">
        <svg class="ic" viewBox="0 0 16 16" aria-hidden="true"><path d={result.holds ? "M3 8.5l3.5 3.5L13 4.5" : "M4 4l8 8M12 4l-8 8"} /></svg>
        <span>{result.holds ? t("prune.holds", { count }) : t("prune.fails", { count, failed })}</span>
      </p>
      <p class="t2">{say(verification.what)}</p>
      <p class="wrap-anywhere">
        <span class="t3">{t("prune.saved")}</span> <code data-testid="folder">{result.folder}</code>
        <br />
        <span class="t3 sm">{say(result.sentence)}</span>
      </p>
      <Command text={result.command} />
      <div class="verification-tables">
        <SizeTable sizes={verification.savings} after={t("prune.after")} />
        <QualityTable quality={verification.quality} />
        <CheckTable checks={verification.equal} />
        <LayerTable result={result} />
        <SpeedTable phases={verification.speeds.phases} />
      </div>
      {verification.notes.length > 0 && (
        <details>
          <summary>{t("prune.notes")}</summary>
          <Notes notes={verification.notes} />
        </details>
      )}
    </div>
  );
}

function Command({ text }: { text: string }): JSX.Element {
  return (
    <div>
      <h3>{t("prune.command")}</h3>
      <CopyCode text={text} testId="command" />
      <p class="t3 sm">{text.split(" ")[2] === "MODEL" ? t("prune.commandModel") : t("prune.commandHint")}</p>
    </div>
  );
}

function CheckTable({ checks }: { checks: SurgeryResult["verification"]["equal"] }): JSX.Element {
  return (
    <DataTable
      caption={t("prune.checks")}
      rows={checks}
      columns={[
        { key: "what", title: t("prune.check"), value: (row) => say(row.what), cell: (row) => <span class="wrap-anywhere">{say(row.what)}</span> },
        { key: "apart", title: t("prune.difference"), numeric: true, value: (row) => row.apart, cell: (row) => formatSmall(row.apart) },
        { key: "allowed", title: t("prune.tolerance"), numeric: true, value: (row) => row.allowed, cell: (row) => formatSmall(row.allowed) },
        { key: "same", title: t("prune.equal"), value: (row) => Number(row.same), cell: (row) => <span class={`tag ${row.same ? "ok" : "bad"}`}>{row.same ? t("prune.yes") : t("prune.no")}</span> },
      ]}
    />
  );
}

function formatSmall(value: number): string {
  return value === 0 ? "0" : value.toExponential(1);
}

export function QualityTable({ quality }: { quality: Quality }): JSX.Element {
  const estimate = (key: "before" | "after", title: string): Column<(typeof quality.rows)[number]> => ({
    key,
    title,
    numeric: true,
    value: (row) => row[key]?.value ?? NaN,
    cell: (row) => format(row[key]?.value ?? NaN),
  });
  return (
    <DataTable
      caption={t("prune.quality", { texts: quality.texts })}
      rows={quality.rows}
      columns={[
        { key: "name", title: t("prune.quality", { texts: quality.texts }), value: (row) => say(row.name) },
        estimate("before", t("prune.before")),
        estimate("after", t("prune.after")),
        { key: "change", title: `${t("prune.change")}, ${t("interval")}`, numeric: true, value: (row) => row.change?.value ?? NaN, cell: (row) => (row.change ? <span>{format(row.change.value ?? NaN)} <span class="t3 xs">{formatInterval(row.change.low ?? NaN, row.change.high ?? NaN)}</span></span> : "–") },
      ]}
    />
  );
}

function LayerTable({ result }: { result: SurgeryResult }): JSX.Element {
  const groups = new Map(result.groups?.map((entry) => [entry.site, entry.groups.map((group) => group.join(" ")).join(" | ")]));
  const change = (before: number, after: number) => (before === after ? String(before) : `${before} → ${after}`);
  const columns: Column<Sizes["sites"][number]>[] = [
    { key: "site", title: t("prune.layers"), value: (row) => row.site },
    { key: "heads", title: t("prune.heads"), numeric: true, value: (row) => row.after.heads, cell: (row) => change(row.before.heads, row.after.heads) },
    { key: "kv", title: t("prune.kvHeads"), numeric: true, value: (row) => row.after.kv, cell: (row) => change(row.before.kv, row.after.kv) },
  ];
  if (groups.size) columns.push({ key: "groups", title: t("prune.groups"), value: (row) => groups.get(row.site) ?? "" });
  return <DataTable caption={t("prune.layers")} rows={result.verification.savings.sites} columns={columns} />;
}

function SpeedTable({ phases }: { phases: SurgeryResult["verification"]["speeds"]["phases"] }): JSX.Element {
  return (
    <DataTable
      caption={t("prune.speed")}
      rows={phases}
      columns={[
        { key: "phase", title: t("prune.speed"), value: (row) => say(row.phase) },
        { key: "speedup", title: t("prune.speedup"), numeric: true, value: (row) => row.speedup, cell: (row) => (/^(too few|no verdict)/.test(row.verdict) ? "–" : format(row.speedup)) },
        { key: "verdict", title: t("prune.verdict"), value: (row) => say(row.verdict) },
      ]}
    />
  );
}
