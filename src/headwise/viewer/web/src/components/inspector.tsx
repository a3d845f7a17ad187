// The inspector: the selected head, what can be done with it, and its measures.

import type { JSX } from "preact";
import { ablateReason, toggleAblated, togglePin } from "../actions";
import { thumbnailImage } from "../canvas/heatmap";
import { classWord, format, formatInterval, measureMeaning, measureName, say, t, textCount } from "../i18n";
import { classesOf, firstHeads, headIndex, headName, isAblated, isMeasuring, measureOf, measures, moveHead, pinned, scale, screen, selectHead, selectedHead, selectedSite, site, thumbnails } from "../state";
import { Button, Heatmap, Icon, PlainTable } from "./basics";
import { Badge } from "./class_badge";
import { evidenceText } from "./class_evidence";

const SHOWN_MEASURES = ["entropy", "confidence", "distance", "sink", "previous", "self", "next", "duplicate", "induction", "rare", "importance"];

export function Inspector(): JSX.Element {
  const item = site.value;
  if (!item) return <aside class="side" aria-label={t("inspector.label")} />;
  const index = headIndex.value;
  const name = headName(selectedSite.value, selectedHead.value);
  const off = isAblated(selectedSite.value, selectedHead.value);
  const reason = say(ablateReason());
  const isPinned = pinned.value.includes(`${selectedSite.value}.${selectedHead.value}`);
  return (
    <aside class="side" aria-label={t("inspector.label")}>
      <section class="stack">
        <div class="row between">
          <h2 class="mono head-name">{name}</h2>
          <span class="row tight">
            <Button kind="quiet icon" aria-label={t("inspector.previous")} onClick={() => moveHead(0, -1)}><Icon path="M10 3L5 8l5 5" /></Button>
            <Button kind="quiet icon" aria-label={t("inspector.next")} onClick={() => moveHead(0, 1)}><Icon path="M6 3l5 5-5 5" /></Button>
          </span>
        </div>
        <p class="t3 sm">
          {item.name}
          {item.kvHeads < item.heads && ` · ${t("map.kvGroup", { kv: item.kvHeadOfQuery[selectedHead.value] ?? 0 })}`}
        </p>
        <HeadClass />
        {screen.value !== "head" && (
          <button class="pick" type="button" onClick={() => (screen.value = "head")}>
            <Heatmap
              class="bigthumb"
              image={thumbnails.value && thumbnailImage(thumbnails.value, index)}
              scale={scale.value}
              label={`${name}: ${t("inspector.size", { queries: item.numQueries, keys: item.numKeys })}`}
            />
            <span class="row between xs t3">
              <span>{t("inspector.axes")}</span>
              <span>{t("inspector.size", { queries: item.numQueries, keys: item.numKeys })}</span>
            </span>
          </button>
        )}
        <div class="row wrap">
          {screen.value !== "head" && <Button kind="primary grow" onClick={() => (screen.value = "head")}>{t("inspector.open")}</Button>}
          <Button kind="grow" aria-disabled={reason !== ""} title={reason} onClick={() => toggleAblated()}>{off ? t("inspector.restore") : t("inspector.ablate")} <kbd>K</kbd></Button>
          <Button aria-pressed={isPinned} onClick={() => togglePin()}>{isPinned ? t("inspector.unpin") : t("inspector.pin")}</Button>
        </div>
        {reason && <p class="t3 sm">{reason}</p>}
      </section>
      {measures.value && !measures.value.severalTexts && screen.value !== "map" && (
        <section><p class="t2 sm">{t(isMeasuring.value ? "inspector.measuring" : "inspector.oneText")}</p></section>
      )}
      {measures.value && <MeasureTable index={index} />}
      {pinned.value.length > 0 && (
        <section class="stack">
          <h3>{t("inspector.pinned")}</h3>
          <p class="row wrap tight">
            {pinned.value.map((pin) => {
              const [siteNumber = 0, head = 0] = pin.split(".").map(Number);
              return (
                <button key={pin} class="tag mono" type="button" onClick={() => selectHead(siteNumber, head)}>{headName(siteNumber, head)}</button>
              );
            })}
          </p>
        </section>
      )}
    </aside>
  );
}

/** The class of the selected head and what speaks for it. */
export function HeadClass(): JSX.Element | null {
  if (!measures.value?.severalTexts) return null;
  const index = headIndex.value;
  const best = classesOf(index)[0];
  return (
    <p class="row top evidence">
      <Badge name={best?.name} size={20} />
      <span>
        <b class="b">{classWord(best?.name)}</b>
        <br />
        <span class="t2 sm">{best?.isOwn ? t("classify.isOwn") : evidenceText(index, best)}</span>
      </span>
    </p>
  );
}

/** The measures of the open text with their chance levels, and over several texts with their intervals. */
function MeasureTable({ index }: { index: number }): JSX.Element {
  const { names, own, severalTexts, texts } = measures.value!;
  const hasOwn = severalTexts && own.names.length > 0;
  const table = hasOwn || !severalTexts ? own : undefined;
  const shown = [...SHOWN_MEASURES.filter((name) => names.includes(name)), ...names.filter((name) => !SHOWN_MEASURES.includes(name))];
  const known = shown.filter((name) => Number.isFinite(measureOf(index, name)));
  void firstHeads.value;
  return (
    <section class="scroll" tabIndex={0} role="region" aria-label={t("measure")}>
      <PlainTable
        kind="sm meas"
        titles={[t("measure"), ...(table ? [`#${t("measure.own")}`] : []), `#${t("chance")}`, ...(severalTexts ? [`#${textCount(texts)}, ${t("interval")}`] : [])]}
        rows={known.map((name) => [
          <span title={measureMeaning(name)}>{measureName(name)}</span>,
          ...(table ? [format(measureOf(index, name, 0, table))] : []),
          <span class="t3">{format(measureOf(index, name, 3, table ?? measures.value))}</span>,
          ...(severalTexts ? [<span>{format(measureOf(index, name))}<br /><span class="t3 xs">{formatInterval(measureOf(index, name, 1), measureOf(index, name, 2))}</span></span>] : []),
        ])}
      />
    </section>
  );
}
