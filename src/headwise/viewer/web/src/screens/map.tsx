// Map: all heads of the model as a grid of layers and heads, with a scatter plot and the strongest head of each class.

import { computed, useComputed } from "@preact/signals";
import type { JSX } from "preact";
import { measureImportance } from "../actions";
import { bind, Button, Meter, Panel, PlainTable, Ramp, Segmented, Select, Toolbar } from "../components/basics";
import { Badge, classLetter, className, LetterBadge, LETTERS } from "../components/class_badge";
import { DataTable } from "../components/data_table";
import { EdgePanel } from "../components/edge_lines";
import { classFilter, HeadGrid, type HeadItem, isOnTop, isShownLayer, MapFilter, stackColumns, stackNumbers } from "../components/head_grid";
import { HeadScatter } from "../components/head_scatter";
import { MeasurePrompt } from "../components/shell";
import { classWord, format, measureName, t, textCount, type TextKey } from "../i18n";
import { cellMode, classesOf, doc, firstHeads, hasClasses, headCount, headIndex, headName, isMeasuring, measureOf, measures, scale, selectHead, showsTable, sinksFirst, sites, sortHeads, source, stacks } from "../state";

export function MapScreen(): JSX.Element {
  const heads = useComputed(listHeads);
  const table = measures.value;
  const canSweep = source.isLive && table !== null && doc.value?.capabilities.ablate.possible === true;
  const modes: [string, string][] = [
    ["thumbnail", t("map.thumbnail")],
    ["class", t("map.class")],
    ...["entropy", "sink"].filter((name) => table?.names.includes(name)).map((name): [string, string] => [name, capitalise(measureName(name))]),
  ];
  if (canSweep || table?.names.includes("importance")) modes.push(["importance", t("map.importance")]);
  const others = (table?.names ?? []).filter((name) => !modes.some(([mode]) => mode === name));
  const title = table ? t("map.measuredOn", { count: headCount.value, texts: textCount(table.texts) }) : t("map.heads", { count: headCount.value });
  const isNarrow = Math.max(...stacks.value.map((stack) => stackColumns(stackNumbers(stack)))) <= NARROW_COLUMNS;
  if (!sites.value.length) return <p class="t3">{t("open.none")}</p>;
  return (
    <>
      {table && !table.severalTexts && <p class="note sm">{t(isMeasuring.value ? "inspector.measuring" : "inspector.oneText")}</p>}
      <Toolbar title={t("screen.map")} hint={title}>
        <Segmented label={t("map.cells")} value={cellMode.value} options={modes} onChange={chooseMode} />
        {others.length > 0 && (
          <Select
            label={t("map.more")}
            hidesLabel
            value={others.includes(cellMode.value) ? cellMode.value : ""}
            options={[["", t("map.more")], ...others.map((name): [string, string] => [name, measureName(name)])]}
            onChange={(name) => name && (cellMode.value = name)}
          />
        )}
        {table && (
          <Select label={t("map.order")} {...bind(sortHeads)} options={[["index", t("map.index")], ...table.names.map((name): [string, string] => [name, measureName(name)])]} />
        )}
      </Toolbar>
      <MapFilter />
      {showsTable.value && table ? (
        <HeadTable heads={heads.value.filter((item) => isOnTop(item.index) && isShownLayer(item.site))} />
      ) : (
        <div class={`lay ${isNarrow ? "narrow" : ""}`}>
          <div class="stack">
            {hasClasses.value && <ClassLegend />}
            <GridPanel />
            <EdgePanel />
          </div>
          <div class="two">
            {hasClasses.value && <StrongestHeads heads={heads.value} />}
            {table ? <HeadScatter heads={heads.value} /> : <MeasurePrompt />}
          </div>
        </div>
      )}
    </>
  );
}

const NARROW_COLUMNS = 8; // heads of a layer, which leave room beside the grid

function capitalise(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Show a measure in the cells. The importance of the heads is computed when it is asked for first. */
function chooseMode(mode: string): void {
  cellMode.value = mode;
  if (mode === "importance" && !measures.value?.names.includes(mode)) void measureImportance();
}

function GridPanel(): JSX.Element {
  const mode = cellMode.value;
  const range = doc.value?.measures.find(({ name }) => name === mode);
  const isPruned = sites.value.some((item) => item.prunedHeads.length > 0);
  const isShared = sites.value.some((item) => item.kvHeads < item.heads);
  return (
    <Panel
      footer={
        <div class="row wrap between">
          {mode === "thumbnail" && <Ramp text={t("map.ramp", { scale: t(`scale.${scale.value}` as TextKey) })} />}
          {mode !== "thumbnail" && mode !== "class" && <Ramp text={t("map.rampOf", { name: mode, low: format(range?.low ?? NaN), high: format(range?.high ?? NaN) })} />}
          <span class="legend">
            {mode === "thumbnail" ? <Swatch kind="mask" text={t("map.masked")} /> : <Swatch kind="none" text={t("map.notComputed")} />}
            <Swatch kind="off" text={t("map.ablated")} />
            {isPruned && <Swatch kind="gap" text={t("map.prunedGap")} />}
            {isShared && <Swatch kind="bracket" text={t("map.bracket")} />}
            {mode === "thumbnail" && measures.value?.names.includes("sink") && <Swatch kind="sink" text={t("map.sinkBar")} />}
          </span>
        </div>
      }
    >
      {stacks.value.filter((stack) => stackNumbers(stack).length).map((stack) => (
        <HeadGrid key={stack} stack={stack} />
      ))}
    </Panel>
  );
}

function Swatch({ kind, text }: { kind: string; text: string }): JSX.Element {
  return (
    <span>
      <i class={`sw ${kind}`} />
      {text}
    </span>
  );
}

/** Whether a head is a sink and something else. */
const hasMixedSinks = computed(() => [...(measures.value?.classes.values() ?? [])].some((classes) => classes.length > 1 && classes.some(({ name }) => name === "sink")));

function ClassLegend(): JSX.Element {
  const counts = useComputed(() => {
    const found = new Map<string, number>();
    for (let index = 0; index < headCount.value; index++) {
      const letter = classLetter(classesOf(index)[0]?.name);
      found.set(letter, (found.get(letter) ?? 0) + 1);
    }
    return found;
  });
  return (
    <div class="legend" role="group" aria-label={t("map.classes")}>
      {LETTERS.filter((letter) => counts.value.has(letter)).map((letter) => (
        <button key={letter} type="button" aria-pressed={classFilter.value === letter} onClick={() => (classFilter.value = classFilter.value === letter ? "" : letter)}>
          <LetterBadge letter={letter} />
          {className(letter)} <span class="t3">{counts.value.get(letter) ?? 0}</span>
        </button>
      ))}
      {hasMixedSinks.value && <Button kind="quiet" title={t("sinks.hint")} aria-pressed={sinksFirst.value} onClick={() => (sinksFirst.value = !sinksFirst.value)}>{t("sinks.first")} <kbd class="hide-s">S</kbd></Button>}
    </div>
  );
}

function listHeads(): HeadItem[] {
  return sites.value.flatMap((site, number) => Array.from({ length: site.heads }, (_, head) => ({ index: firstHeads.value[number]! + head, site: number, head })));
}

function StrongestHeads({ heads }: { heads: HeadItem[] }): JSX.Element {
  const best = new Map<string, { item: HeadItem; name: string; score: number }>();
  for (const item of heads) {
    for (const { name, score } of classesOf(item.index)) {
      if (score > (best.get(name)?.score ?? -1)) best.set(name, { item, name, score });
    }
  }
  const rows = [...best.values()].sort((a, b) => b.score - a.score).slice(0, 8);
  return (
    <Panel title={t("map.strongest")}>
      <PlainTable
        titles={[t("head"), t("class"), `#${t("score")}`]}
        rows={rows.map(({ item, name, score }) => [
          <button class="link mono" type="button" onClick={() => selectHead(item.site, item.head)}>{headName(item.site, item.head)}</button>,
          <span class="nw"><Badge name={name} /> {classWord(name)}</span>,
          <span>{format(score)} <Meter value={score} /></span>,
        ])}
      />
    </Panel>
  );
}

function HeadTable({ heads }: { heads: HeadItem[] }): JSX.Element {
  const names = measures.value!.names;
  return (
    <Panel>
      <DataTable
        caption={t("map.heads", { count: headCount.value })}
        rows={heads}
        isSelected={(row) => row.index === headIndex.value}
        onSelect={(row) => selectHead(row.site, row.head)}
        columns={[
          { key: "head", title: t("head"), value: (row) => headName(row.site, row.head) },
          { key: "class", title: t("class"), value: (row) => classWord(classesOf(row.index)[0]?.name), cell: (row) => (
            <span class="row tight nw"><Badge name={classesOf(row.index)[0]?.name} />{classWord(classesOf(row.index)[0]?.name)}</span>
          ) },
          { key: "score", title: t("score"), numeric: true, value: (row) => classesOf(row.index)[0]?.score ?? NaN, cell: (row) => format(classesOf(row.index)[0]?.score ?? NaN) },
          ...names.map((name) => ({
            key: name,
            title: measureName(name),
            numeric: true,
            value: (row: HeadItem) => measureOf(row.index, name),
            cell: (row: HeadItem) => format(measureOf(row.index, name)),
          })),
        ]}
      />
    </Panel>
  );
}
