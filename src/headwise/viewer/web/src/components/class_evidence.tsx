// Why a head has its class: what the class measures, chance, and the texts that show it best and worst.

import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { classWord, format, formatInterval, measureMeaning, say, t } from "../i18n";
import { doc, headIndex, headName, job, measuredClasses, measureOf, runJob, selectedHead, selectedSite, showsTable, source } from "../state";
import { Panel, type Column } from "./basics";
import { DataTable } from "./data_table";
import { visibleToken } from "./tokens";

interface Pair {
  query: string;
  key: string;
  weight: number;
}

interface TextScore {
  text: string;
  pairs: Pair[];
  score: number;
}

const found = signal<{ key: string; texts: TextScore[] } | null>(null);
const SHOWN = 3; // texts at each end

/** The class whose evidence is shown: the likeliest of the selected head; "" if it has none. */
function shownClass(): string {
  return measuredClasses(headIndex.value).find(({ name }) => name !== "unclear")?.name ?? "";
}

const evidenceKey = (name: string) => `${doc.value?.revision}.${selectedSite.value}.${selectedHead.value}.${name}`;

async function findTexts(name: string): Promise<void> {
  const key = evidenceKey(name);
  const result = await runJob("evidence", { site: selectedSite.value, head: selectedHead.value, class: name, texts: doc.value?.texts ?? [] });
  if (!result) return;
  const scores = result.arrays["scores"].data as Float32Array;
  found.value = { key, texts: result.fields["texts"].map((entry: Omit<TextScore, "score">, index: number) => ({ ...entry, score: scores[index]! })) };
}

export function ClassEvidence({ measure }: { measure: (index: number, name: string) => string }): JSX.Element {
  const name = shownClass();
  const head = headName(selectedSite.value, selectedHead.value);
  const unclear = measuredClasses(headIndex.value)[0]?.evidence;
  if (!name) return <Panel title={t("why.title", { head })}>{<p class="t3">{unclear ? say(unclear) : t("inspector.noClass")}</p>}</Panel>;
  const behind = measure(headIndex.value, name);
  const value = (part: number) => measureOf(headIndex.value, behind, part);
  const canRun = source.isLive && doc.value?.capabilities.measure.possible === true;
  const known = found.value?.key === evidenceKey(name) ? found.value.texts : null;
  return (
    <Panel title={t("why.of", { head, name: classWord(name) })}>
      <div class="stack" data-testid="why">
        <p>{measureMeaning(behind) || behind}</p>
        <p class="mono sm">
          {t("score")} = ({t("value")} − {t("chance")}) / (1 − {t("chance")}) = ({format(value(0))} − {format(value(3))}) / (1 − {format(value(3))})
        </p>
        {Number.isFinite(value(1)) && (
          <p class="sm t2">
            {t("interval")}: {formatInterval(value(1), value(2))}
          </p>
        )}
        {known ? (
          <TextScores texts={known} />
        ) : (
          <div>
            <button class="btn" type="button" aria-disabled={!canRun || job.value !== null} onClick={() => canRun && job.value === null && void findTexts(name)}>
              {t("why.find", { count: Math.max(doc.value?.texts.length ?? 0, 1) })}
            </button>
            {!canRun && <p class="t3 sm">{t("state.needsModel")}</p>}
          </div>
        )}
      </div>
    </Panel>
  );
}

/** The texts with the largest and smallest scores, and the scores of all of them as bars. */
function TextScores({ texts }: { texts: TextScore[] }): JSX.Element {
  const ordered = [...texts].sort((a, b) => b.score - a.score);
  const cell = (pairs: Pair[]) => pairs.map(({ query, key, weight }) => `${visibleToken(query)} → ${visibleToken(key)} ${weight.toFixed(2)}`).join("; ");
  const columns: Column<TextScore>[] = [
    { key: "score", title: t("why.score"), numeric: true, value: (row) => row.score, cell: (row) => format(row.score) },
    { key: "text", title: t("text.title"), value: (row) => row.text, cell: (row) => <span class="mono">{visibleText(row.text)}</span> },
    { key: "pairs", title: t("head.strongest"), value: (row) => cell(row.pairs) },
  ];
  if (showsTable.value || texts.length <= 2 * SHOWN) return <DataTable caption={t("why.all")} rows={texts} columns={columns} sort="score" />;
  return (
    <>
      <ScoreBars scores={ordered.map(({ score }) => score)} />
      <h3>{t("why.best")}</h3>
      <DataTable caption={t("why.best")} rows={ordered.slice(0, SHOWN)} columns={columns} />
      <h3>{t("why.worst")}</h3>
      <DataTable caption={t("why.worst")} rows={ordered.slice(-SHOWN)} columns={columns} />
    </>
  );
}

/** Invisible signs of a text are shown; its spaces stay spaces. */
function visibleText(text: string): string {
  return text.split(" ").map((part) => (part ? visibleToken(part) : part)).join(" ");
}

const [WIDTH, HEIGHT] = [640, 64];

/** One bar for each text, the largest score first: the distribution over the data set. */
function ScoreBars({ scores }: { scores: number[] }): JSX.Element {
  const most = Math.max(...scores, 1e-9);
  const step = WIDTH / scores.length;
  return (
    <svg class="plot score-bars" viewBox={`0 0 ${WIDTH} ${HEIGHT + 12}`} role="img" aria-label={t("why.bars", { count: scores.length, low: format(scores.at(-1)!), high: format(most) })}>
      {scores.map((score, index) => (
        <rect key={index} class="bar-mark" x={index * step} y={HEIGHT - (score / most) * HEIGHT} width={Math.max(step - 1, 0.6)} height={(score / most) * HEIGHT} />
      ))}
      <text x="0" y={HEIGHT + 11}>{`${format(most)} … ${format(scores.at(-1)!)}`}</text>
    </svg>
  );
}
