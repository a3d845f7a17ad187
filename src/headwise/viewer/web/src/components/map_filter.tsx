// Which heads and layers the Map shows: the strongest by a measure, and a range of layers. Layers without a shown head are folded.

import { computed } from "@preact/signals";
import type { JSX } from "preact";
import { measureName, t } from "../i18n";
import { cellMode, classesOf, firstHeads, headCount, layerRange, measureOf, measures, sites, sortHeads, topCount } from "../state";
import { Select, TableButton } from "./basics";

/** The measure that ranks heads: the one that the cells show, else the one that orders them; "" is the score of the class. */
const rankedBy = computed(() => {
  const names = measures.value?.names ?? [];
  return [cellMode.value, sortHeads.value].find((name) => names.includes(name)) ?? "";
});

const topHeads = computed<ReadonlySet<number> | null>(() => {
  if (!topCount.value || !measures.value) return null;
  const value = (index: number) => (rankedBy.value ? measureOf(index, rankedBy.value) : (classesOf(index)[0]?.score ?? NaN));
  const known = sites.value.flatMap((site, number) => (isInRange(number) ? Array.from({ length: site.heads }, (_, head) => firstHeads.value[number]! + head) : [])).filter((index) => Number.isFinite(value(index)));
  return new Set(known.sort((a, b) => value(b) - value(a)).slice(0, topCount.value));
});

/** Whether a head is among the strongest that are asked for. */
export function isOnTop(index: number): boolean {
  return topHeads.value?.has(index) ?? true;
}

function isInRange(number: number): boolean {
  const range = layerRange.value;
  const layer = sites.value[number]!.layer;
  return !range.length || (layer >= range[0]! && layer <= range[1]!);
}

/** Whether the Map shows a layer: it is in the chosen range, and has one of the strongest heads. */
export function isShownLayer(number: number): boolean {
  if (!isInRange(number)) return false;
  const first = firstHeads.value[number] ?? 0;
  return topHeads.value === null || Array.from({ length: sites.value[number]!.heads }, (_, head) => first + head).some(isOnTop);
}

export function MapFilter(): JSX.Element {
  const depth = Math.max(0, ...sites.value.map((site) => site.layer));
  const [first = 0, last = depth] = layerRange.value;
  const options = Array.from({ length: depth + 1 }, (_, layer): [string, string] => [String(layer), String(layer)]);
  const choose = (from: number, to: number) => (layerRange.value = from === 0 && to === depth ? [] : [Math.min(from, to), Math.max(from, to)]);
  const name = rankedBy.value ? measureName(rankedBy.value) : t("score");
  return (
    <div class="toolbar map-filter">
      {measures.value && (
        <label class="picker range" title={t("map.topBy", { name })}>
          <span>{topCount.value ? `${t("map.top", { count: topCount.value })} · ${t("map.topBy", { name })}` : t("map.topAll")}</span>
          <input type="range" min="0" max={headCount.value} value={topCount.value} aria-label={t("map.topBy", { name })} onInput={(event) => (topCount.value = Number(event.currentTarget.value) >= headCount.value ? 0 : Number(event.currentTarget.value))} />
        </label>
      )}
      {depth > 0 && (
        <>
          <Select label={t("map.layersFrom")} value={String(first)} options={options} onChange={(value) => choose(Number(value), last)} />
          <Select label={t("map.layersTo")} value={String(last)} options={options} onChange={(value) => choose(first, Number(value))} />
        </>
      )}
      <FoldedNote />
      {measures.value && (
        <>
          <span class="grow" />
          <TableButton />
        </>
      )}
    </div>
  );
}

/** How many layers are folded, and the way back. */
function FoldedNote(): JSX.Element | null {
  const folded = sites.value.filter((_, number) => !isShownLayer(number)).length;
  if (!folded) return null;
  return (
    <button class="btn quiet" type="button" data-testid="folded" onClick={() => ([topCount.value, layerRange.value] = [0, []])}>
      {t("map.collapsed", { count: folded })}
    </button>
  );
}
