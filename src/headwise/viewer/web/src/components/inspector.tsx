// The inspector: the selected head, what can be done with it, and its measures.

import type { JSX } from "preact";
import { ablateReason, toggleAblated, togglePin } from "../actions";
import { thumbnailImage } from "../canvas/heatmap";
import { classWord, format, formatInterval, measureMeaning, measureName, say, t } from "../i18n";
import { classesOf, firstHeads, headIndex, headName, isAblated, measureOf, measures, moveHead, pinned, scale, screen, selectHead, selectedHead, selectedSite, site, thumbnails } from "../state";
import { Heatmap, Icon } from "./basics";
import { Badge } from "./class_badge";

const SHOWN_MEASURES = ["entropy", "confidence", "distance", "sink", "previous", "self", "next", "duplicate", "induction", "rare", "importance"];

export function Inspector(): JSX.Element {
  const item = site.value;
  if (!item) return <aside class="side" aria-label={t("inspector.label")} />;
  const index = headIndex.value;
  const name = headName(selectedSite.value, selectedHead.value);
  const classes = classesOf(index);
  const off = isAblated(selectedSite.value, selectedHead.value);
  const reason = say(ablateReason());
  const isPinned = pinned.value.includes(`${selectedSite.value}.${selectedHead.value}`);
  return (
    <aside class="side" aria-label={t("inspector.label")}>
      <section class="stack">
        <div class="row between">
          <h2 class="mono head-name">{name}</h2>
          <span class="row tight">
            <button class="btn quiet icon" type="button" aria-label={t("inspector.previous")} onClick={() => moveHead(0, -1)}>
              <Icon path="M10 3L5 8l5 5" />
            </button>
            <button class="btn quiet icon" type="button" aria-label={t("inspector.next")} onClick={() => moveHead(0, 1)}>
              <Icon path="M6 3l5 5-5 5" />
            </button>
          </span>
        </div>
        <p class="t3 sm">
          {item.name}
          {item.kvHeads < item.heads && ` · ${t("map.kvGroup", { kv: item.kvHeadOfQuery[selectedHead.value] ?? 0 })}`}
        </p>
        {measures.value && (
          <p class="row top">
            <Badge name={classes[0]?.name} size={20} />
            <span>
              <b class="b">{classWord(classes[0]?.name)}</b>
              <br />
              <span class="t2 sm">{classes[0]?.isOwn ? t("classify.isOwn") : (classes[0] ? say(classes[0].evidence) : t("inspector.noClass"))}</span>
            </span>
          </p>
        )}
        <Heatmap
          class="bigthumb"
          image={thumbnails.value && thumbnailImage(thumbnails.value, index)}
          scale={scale.value}
          label={`${name}: ${t("inspector.size", { queries: item.numQueries, keys: item.numKeys })}`}
        />
        <div class="row between xs t3">
          <span>{t("inspector.axes")}</span>
          <span>{t("inspector.size", { queries: item.numQueries, keys: item.numKeys })}</span>
        </div>
        <div class="row">
          <button class="btn primary grow" type="button" onClick={() => (screen.value = "head")}>
            {t("inspector.open")}
          </button>
          <button class="btn grow" type="button" aria-disabled={reason !== ""} title={reason} onClick={() => toggleAblated()}>
            {off ? t("inspector.restore") : t("inspector.ablate")} <kbd>K</kbd>
          </button>
          <button class="btn" type="button" aria-pressed={isPinned} onClick={() => togglePin()}>
            {isPinned ? t("inspector.unpin") : t("inspector.pin")}
          </button>
        </div>
        {reason && <p class="t3 sm">{reason}</p>}
      </section>
      {measures.value && <MeasureTable index={index} />}
      {pinned.value.length > 0 && (
        <section class="stack">
          <h3>{t("inspector.pinned")}</h3>
          <p class="row wrap tight">
            {pinned.value.map((pin) => {
              const [siteNumber = 0, head = 0] = pin.split(".").map(Number);
              return (
                <button key={pin} class="tag mono" type="button" onClick={() => selectHead(siteNumber, head)}>
                  {headName(siteNumber, head)}
                </button>
              );
            })}
          </p>
        </section>
      )}
    </aside>
  );
}

function MeasureTable({ index }: { index: number }): JSX.Element {
  const names = measures.value!.names;
  const shown = [...SHOWN_MEASURES.filter((name) => names.includes(name)), ...names.filter((name) => !SHOWN_MEASURES.includes(name))];
  const known = shown.filter((name) => Number.isFinite(measureOf(index, name)));
  void firstHeads.value;
  return (
    <section class="scroll" tabIndex={0} role="region" aria-label={t("measure")}>
      <table class="sm meas">
        <thead>
          <tr>
            <th scope="col">{t("measure")}</th>
            <th scope="col" class="num">{t("value")}</th>
            <th scope="col" class="num">{t("interval")}</th>
            <th scope="col" class="num">{t("chance")}</th>
          </tr>
        </thead>
        <tbody>
          {known.map((name) => {
            const low = measureOf(index, name, 1);
            const high = measureOf(index, name, 2);
            return (
              <tr key={name}>
                <td title={measureMeaning(name)}>{measureName(name)}</td>
                <td class="num">{format(measureOf(index, name))}</td>
                <td class="num t3">{formatInterval(low, high)}</td>
                <td class="num t3">{format(measureOf(index, name, 3))}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </section>
  );
}
