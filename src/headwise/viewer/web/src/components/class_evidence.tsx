// Why a head has its class: what the class measures, its value and chance.

import type { JSX } from "preact";
import { classWord, format, formatInterval, measureMeaning, say, t } from "../i18n";
import { headIndex, headName, measuredClasses, measureOf, selectedHead, selectedSite } from "../state";
import { Panel } from "./basics";

/** The class whose evidence is shown: the likeliest of the selected head; "" if it has none. */
function shownClass(): string {
  return measuredClasses(headIndex.value).find(({ name }) => name !== "unclear")?.name ?? "";
}

export function ClassEvidence({ measure }: { measure: (index: number, name: string) => string }): JSX.Element {
  const name = shownClass();
  const head = headName(selectedSite.value, selectedHead.value);
  const unclear = measuredClasses(headIndex.value)[0]?.evidence;
  if (!name) return <Panel title={t("why.title", { head })}>{<p class="t3">{unclear ? say(unclear) : t("inspector.noClass")}</p>}</Panel>;
  const behind = measure(headIndex.value, name);
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
