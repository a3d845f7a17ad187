// Why a head has its class: what the class measures, its value and chance.

import type { JSX } from "preact";
import { classWord, format, formatInterval, measureMeaning, t } from "../i18n";
import { type HeadClass, headIndex, headName, language, measuredClasses, measureOf, measures, selectedHead, selectedSite } from "../state";
import { Panel } from "./basics";

/** The measure that decides a class, where its name differs. Mirrors `head_classes.CLASS_RULES`. */
const MEASURE_OF_CLASS: Record<string, string> = { "rare-token": "rare", broad: "breadth" };

/** The measure behind a class of a head; that of an alignment is the better of its conventions. */
export function classMeasure(index: number, name: string): string {
  if (name === "alignment") {
    const rows = ["alignment input", "alignment target"];
    return rows.sort((a, b) => (measureOf(index, b) || 0) - (measureOf(index, a) || 0))[0]!;
  }
  const names = measures.value?.names ?? [];
  const known = MEASURE_OF_CLASS[name] ?? name;
  return names.includes(known) ? known : "offset";
}

/** Why a head has a class: in English the sentence of the server, in Chinese its numbers. */
export function evidenceText(index: number, found: HeadClass | undefined): string {
  if (!found) return t("inspector.noClass");
  if (language.value === "en") return found.evidence;
  if (found.name === "unclear") return t("evidence.unclear");
  const measure = classMeasure(index, found.name);
  const value = (part: number) => measureOf(index, measure, part);
  return t("evidence.of", { measure: measureMeaning(measure) ?? measure, value: format(value(0)), chance: format(value(3)), interval: formatInterval(value(1), value(2)) });
}

/** The class whose evidence is shown: the likeliest of the selected head; "" if it has none. */
function shownClass(): string {
  return measuredClasses(headIndex.value).find(({ name }) => name !== "unclear")?.name ?? "";
}

export function ClassEvidence(): JSX.Element {
  const name = shownClass();
  const head = headName(selectedSite.value, selectedHead.value);
  if (!name) return <Panel title={t("why.title", { head })}>{<p class="t3">{evidenceText(headIndex.value, measuredClasses(headIndex.value)[0])}</p>}</Panel>;
  const behind = classMeasure(headIndex.value, name);
  const value = (part: number) => measureOf(headIndex.value, behind, part);
  return (
    <Panel title={t("why.of", { head, name: classWord(name) })}>
      <div class="stack" data-testid="why">
        <p>{measureMeaning(behind) || behind}</p>
        <p class="mono sm">
          {t("score")} = ({t("value")} − {t("chance")}) / (1 − {t("chance")}) = ({format(value(0))} − {format(value(3))}) / (1 − {format(value(3))})
        </p>
        {Number.isFinite(value(1)) && <p class="sm t2">{t("interval")}: {formatInterval(value(1), value(2))}</p>}
      </div>
    </Panel>
  );
}
