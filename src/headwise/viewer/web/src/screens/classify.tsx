// Classify: the classes of every head with their scores and evidence, and thresholds with a live recount.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { Meter, Panel } from "../components/basics";
import { Badge, classLetter, className, LETTERS } from "../components/class_badge";
import { DataTable } from "../components/data_table";
import { MeasurePrompt } from "../components/shell";
import { format, t } from "../i18n";
import { classesOf, firstHeads, headIndex, headName, measures, selectHead, sites, type HeadClass } from "../state";

interface Row {
  index: number;
  site: number;
  head: number;
  top: HeadClass | undefined;
  all: HeadClass[];
}

export function ClassifyScreen(): JSX.Element {
  const threshold = useSignal(0);
  if (!measures.value) return <MeasurePrompt />;
  const rows: Row[] = sites.value.flatMap((site, number) =>
    Array.from({ length: site.heads }, (_, head) => {
      const index = firstHeads.value[number]! + head;
      const all = classesOf(index).filter(({ score }) => score >= threshold.value);
      return { index, site: number, head, top: all[0], all };
    }),
  );
  const counts = LETTERS.map((letter) => rows.filter((row) => classLetter(row.top?.name) === letter).length);
  return (
    <>
      <div class="toolbar">
        <h1>{t("screen.classify")}</h1>
        <span class="sm t3 hide-s">{measures.value.texts}</span>
        <span class="grow" />
        <label class="picker range">
          <span>
            {t("score")} ≥ {threshold.value.toFixed(2)}
          </span>
          <input type="range" min="0" max="1" step="0.05" value={threshold.value} onInput={(event) => (threshold.value = Number(event.currentTarget.value))} />
        </label>
      </div>
      <div class="legend" role="status">
        {LETTERS.map((letter, index) => (
          <span key={letter}>
            <Badge name={letter === "u" ? undefined : rows.find((row) => classLetter(row.top?.name) === letter)?.top?.name ?? className(letter)} />
            {className(letter)} <span class="t3">{counts[index]}</span>
          </span>
        ))}
      </div>
      <Panel>
        <DataTable
          caption={t("screen.classify")}
          rows={rows}
          sort="score"
          isSelected={(row) => row.index === headIndex.value}
          onSelect={(row) => selectHead(row.site, row.head)}
          columns={[
            { key: "head", title: t("head"), value: (row) => headName(row.site, row.head) },
            {
              key: "class",
              title: t("class"),
              value: (row) => row.top?.name ?? t("class.unclear"),
              cell: (row) => (
                <span class="row tight nw">
                  <Badge name={row.top?.name} /> {row.top?.name ?? t("class.unclear")}
                </span>
              ),
            },
            { key: "bar", title: "", value: (row) => row.top?.score ?? NaN, cell: (row) => <span class="bar-cell"><Meter value={row.top?.score ?? 0} /></span> },
            { key: "score", title: t("score"), numeric: true, value: (row) => row.top?.score ?? NaN, cell: (row) => format(row.top?.score ?? NaN) },
            { key: "evidence", title: t("inspector.evidence"), value: (row) => row.top?.evidence ?? t("inspector.noClass") },
          ]}
        />
      </Panel>
    </>
  );
}
