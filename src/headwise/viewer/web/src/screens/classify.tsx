// Class: the classes of every head with score, interval and evidence; thresholds with a live recount; classes of one's own.

import { computed, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { Button, type Column, Meter, Panel, saveBlob, Toolbar } from "../components/basics";
import { Badge, classLetter, className, LetterBadge, LETTERS, type Letter } from "../components/class_badge";
import { ClassEvidence, classMeasure, evidenceText } from "../components/class_evidence";
import { DataTable } from "../components/data_table";
import { MeasurePrompt } from "../components/shell";
import { classWord, format, formatInterval, t, textCount } from "../i18n";
import { firstHeads, hasClasses, headIndex, headName, measuredClasses, measureOf, measures, ownClass, ownClasses, selectHead, setOwnClass, sites, type HeadClass } from "../state";
import { between, toFlag, toList, urlSignal } from "../url_state";

const CLASS_NAMES = ["sink", "separator", "previous", "self", "next", "duplicate", "induction", "punctuation", "rare-token", "broad", "alignment", "unclear"];

interface Row {
  index: number;
  site: number;
  head: number;
  own: string | undefined;
  top: HeadClass | undefined; // by the measures, at the thresholds
  others: HeadClass[];
  low: number;
  high: number;
}

/** Thresholds as "letter.score"; the address holds them as such. */
const limits = urlSignal<string[]>("limits", [], toList, "work");
const thresholds = computed(() => Object.fromEntries(limits.value.map((entry) => [entry[0], between(0, 1)(entry.slice(2))])) as Partial<Record<Letter, number>>);
const onlyCertain = urlSignal("certain", false, toFlag, "work");
const shownLetter = urlSignal<Letter | null>("letter", null, (text) => LETTERS.find((letter) => letter === text) ?? null);
const allRows = computed(readRows);
const shownRows = computed(() => allRows.value.filter((row) => shownLetter.value === null || classLetter(nameOf(row)) === shownLetter.value));
const tableColumns = computed(makeColumns);

function setThreshold(letter: Letter, score: number): void {
  limits.value = [...limits.value.filter((entry) => entry[0] !== letter), ...(score > 0 ? [`${letter}.${score}`] : [])];
}

/** The class of a row: the user's, else that by the measures. */
const nameOf = (row: Row) => row.own ?? row.top?.name;

/** An end of the interval of a class's measure on the scale of its score, which is linear in the measure. */
function scoreOf(index: number, { name, score }: HeadClass, part: 1 | 2): number {
  const measure = classMeasure(index, name);
  const chance = score < 1 ? (measureOf(index, measure) - score) / (1 - score) : measureOf(index, measure, 3);
  return Math.min(Math.max((measureOf(index, measure, part) - chance) / (1 - chance), 0), 1);
}

function readRows(): Row[] {
  return sites.value.flatMap((site, number) =>
    Array.from({ length: site.heads }, (_, head) => {
      const index = firstHeads.value[number]! + head;
      const counted = measuredClasses(index).filter((one) => {
        const isEnough = one.score >= (thresholds.value[classLetter(one.name)] ?? 0);
        return one.name !== "unclear" && isEnough && (!onlyCertain.value || scoreOf(index, one, 1) > 0);
      });
      const top = counted[0];
      const [low, high] = top ? [scoreOf(index, top, 1), scoreOf(index, top, 2)] : [NaN, NaN];
      return { index, site: number, head, own: ownClass(index), top, others: counted.slice(1), low, high };
    }),
  );
}

/** Why a head has its class: the user's word, the evidence, or that of the strongest candidate. */
function evidence(row: Row): string {
  const measured = evidenceText(row.index, row.top ?? measuredClasses(row.index)[0]);
  return row.own ? `${t("classify.isOwn")}; ${t("classify.byMeasures")}: ${row.top?.name ?? "unclear"}. ${measured}` : measured;
}

export function ClassifyScreen(): JSX.Element {
  if (!measures.value || !hasClasses.value) return <MeasurePrompt />;
  const rows = allRows.value;
  return (
    <>
      <Toolbar title={t("screen.classify")} hint={t("classify.from", { texts: textCount(measures.value.texts) })}>
        {ownClasses.value.length > 0 && <span class="tag acc">{t("classify.ownCount", { count: ownClasses.value.length })}</span>}
        {ownClasses.value.length > 0 && <Button onClick={() => (ownClasses.value = [])}>{t("classify.forget")}</Button>}
        <Button onClick={() => saveBlob("classes.csv", new Blob([csvOf(rows)], { type: "text/csv" }))}>{t("classify.csv")}</Button>
      </Toolbar>
      <div class="classify">
        <ThresholdPanel rows={rows} />
        <ClassEvidence />
        <Panel class="class-table">
          <DataTable caption={t("screen.classify")} rows={shownRows.value} sort="score" isSelected={(row) => row.index === headIndex.value} onSelect={(row) => selectHead(row.site, row.head)} columns={tableColumns.value} />
        </Panel>
      </div>
    </>
  );
}

/** For every class its count, a threshold, and a button that shows only its heads. */
function ThresholdPanel({ rows }: { rows: Row[] }): JSX.Element {
  const counts = new Map<Letter, number>();
  for (const row of rows) counts.set(classLetter(nameOf(row)), (counts.get(classLetter(nameOf(row))) ?? 0) + 1);
  const known = LETTERS.filter((letter) => letter === "u" || counts.has(letter) || rows.some((row) => measuredClasses(row.index).some(({ name }) => classLetter(name) === letter)));
  return (
    <Panel title={t("classify.thresholds")} side={<button class="btn quiet" type="button" onClick={() => ([limits.value, onlyCertain.value, shownLetter.value] = [[], false, null])}>{t("classify.reset")}</button>}>
      <p class="t3 sm">{t("classify.thresholdsHint")}</p>
      <label class="check sm">
        <input type="checkbox" checked={onlyCertain.value} onChange={(event) => (onlyCertain.value = event.currentTarget.checked)} />
        {t("classify.certain")}
      </label>
      <div class="thresholds" role="status">
        {known.map((letter) => (
          <div class="threshold" key={letter}>
            <LetterBadge letter={letter} />
            <button type="button" aria-pressed={shownLetter.value === letter} onClick={() => (shownLetter.value = shownLetter.value === letter ? null : letter)}>
              {className(letter)}
            </button>
            <span class="num" data-testid={`count-${letter}`}>{counts.get(letter) ?? 0}</span>
            {letter !== "u" && (
              <label class="xs t3">
                ≥ {(thresholds.value[letter] ?? 0).toFixed(2)}
                <input type="range" min="0" max="1" step="0.05" aria-label={`${t("score")} ≥, ${className(letter)}`} value={thresholds.value[letter] ?? 0} onInput={(event) => setThreshold(letter, Number(event.currentTarget.value))} />
              </label>
            )}
          </div>
        ))}
      </div>
    </Panel>
  );
}

function makeColumns(): Column<Row>[] {
  const names = [...new Set([...CLASS_NAMES, ...[...(measures.value?.classes.values() ?? [])].flat().map(({ name }) => name)])].filter((name) => !name.includes(","));
  return [
    { key: "head", title: t("head"), value: (row) => headName(row.site, row.head) },
    {
      key: "class",
      title: t("class"),
      value: (row) => nameOf(row) ?? "unclear",
      cell: (row) => (
        <span class="row tight nw">
          <Badge name={nameOf(row)} /> {classWord(nameOf(row))}
          {row.own && <span class="tag acc">{t("classify.own")}</span>}
          {row.others.length > 0 && (
            <span class="t3 xs" title={row.others.map(({ name, score }) => `${name} ${format(score)}`).join(", ")}>
              {t("classify.also")} {row.others.map(({ name }) => classWord(name)).join(", ")}
            </span>
          )}
        </span>
      ),
    },
    { key: "score", title: t("score"), numeric: true, value: (row) => row.top?.score ?? NaN, cell: (row) => format(row.top?.score ?? NaN) },
    { key: "bar", title: "", value: (row) => row.top?.score ?? NaN, cell: (row) => <span class="bar-cell"><Meter value={row.top?.score ?? 0} /></span> },
    { key: "interval", title: t("classify.interval"), numeric: true, value: (row) => row.low, cell: (row) => formatInterval(row.low, row.high) },
    {
      key: "own",
      title: t("classify.own"),
      value: (row) => row.own ?? "",
      cell: (row) => <OwnClass row={row} names={names} />,
    },
    { key: "evidence", title: t("inspector.evidence"), value: (row) => evidence(row) },
  ];
}

/** The choice of a class of one's own. Its options are made when it is used first, because a table has many rows. */
function OwnClass({ row, names }: { row: Row; names: string[] }): JSX.Element {
  const isUsed = useSignal(false);
  const use = () => (isUsed.value = true);
  const offered = isUsed.value ? names : names.filter((name) => name === row.own);
  return (
    <select
      value={row.own ?? ""}
      aria-label={`${t("classify.own")}: ${headName(row.site, row.head)}`}
      onFocus={use}
      onPointerEnter={use}
      onPointerDown={use}
      onClick={(event) => event.stopPropagation()}
      onChange={(event) => setOwnClass(row.site, row.head, event.currentTarget.value)}
    >
      <option value="">{t("classify.byMeasures")}</option>
      {offered.map((name) => (
        <option key={name} value={name}>{classWord(name)}</option>
      ))}
    </select>
  );
}

/** The table as CSV, with the class by the measures beside the user's. */
function csvOf(rows: Row[]): string {
  const quote = (value: string | number) => (typeof value === "number" ? (Number.isFinite(value) ? String(value) : "") : `"${value.replace(/"/g, '""')}"`);
  const lines = rows.map((row) => [sites.value[row.site]!.name, row.head, nameOf(row) ?? "unclear", row.own ? "user" : "measures", row.top?.name ?? "unclear", row.top?.score ?? NaN, row.low, row.high, evidence(row)]);
  return [["site", "head", "class", "source", "measured_class", "score", "score_low", "score_high", "evidence"], ...lines].map((line) => line.map(quote).join(",")).join("\n") + "\n";
}
