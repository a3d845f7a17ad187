// Map: all heads of the model as a grid of layers and heads, with a scatter plot and the strongest head of each class.

import { useComputed, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { cssRamp, cssValue, themeVersion } from "../canvas/colors";
import { drawHeatmap, thumbnailImage } from "../canvas/heatmap";
import { Meter, Panel, Ramp, Segmented, Select, TableButton } from "../components/basics";
import { Badge, classLetter, className, LETTERS } from "../components/class_badge";
import { DataTable } from "../components/data_table";
import { MeasurePrompt } from "../components/shell";
import { format, t, type TextKey } from "../i18n";
import { cellMode, classesOf, doc, firstHeads, headCount, headIndex, headName, isAblated, measureOf, measures, scale, scatterX, scatterY, screen, selectHead, selectedHead, selectedSite, showsTable, sites, sortHeads, thumbnails } from "../state";

interface HeadItem {
  index: number;
  site: number;
  head: number;
}

function headsOfSite(site: number): HeadItem[] {
  const items = Array.from({ length: sites.value[site]!.heads }, (_, head) => ({ index: firstHeads.value[site]! + head, site, head }));
  const order = sortHeads.value;
  if (order === "index" || !measures.value?.names.includes(order)) return items;
  return items.sort((a, b) => measureOf(b.index, order) - measureOf(a.index, order));
}

export function MapScreen(): JSX.Element {
  const filter = useSignal<string>("");
  const table = measures.value;
  const modes: [string, string][] = [
    ["thumbnail", t("map.thumbnail")],
    ["class", t("map.class")],
    ...["entropy", "sink", "importance"].filter((name) => table?.names.includes(name)).map((name): [string, string] => [name, name]),
  ];
  const others = (table?.names ?? []).filter((name) => !modes.some(([mode]) => mode === name));
  const title = table ? t("map.measuredOn", { count: headCount.value, texts: table.texts }) : t("map.heads", { count: headCount.value });
  if (!sites.value.length) return <p class="t3">{t("open.none")}</p>;
  return (
    <>
      <div class="toolbar">
        <h1>{t("map.title")}</h1>
        <span class="sm t3 hide-s">{title}</span>
        <span class="grow" />
        <Segmented label={t("map.cells")} value={cellMode.value} options={modes} onChange={(mode) => (cellMode.value = mode)} />
        {others.length > 0 && (
          <Select
            label={t("measure")}
            value={others.includes(cellMode.value) ? cellMode.value : ""}
            options={[["", "…"], ...others.map((name): [string, string] => [name, name])]}
            onChange={(name) => name && (cellMode.value = name)}
          />
        )}
        {table && (
          <Select
            label={t("map.order")}
            value={sortHeads.value}
            options={[["index", t("map.index")], ...table.names.map((name): [string, string] => [name, name])]}
            onChange={(name) => (sortHeads.value = name)}
          />
        )}
        {table && <TableButton />}
      </div>
      {showsTable.value && table ? (
        <HeadTable />
      ) : (
        <div class="lay">
          <HeadGrid filter={filter.value} />
          <div class="stack">
            {table ? (
              <>
                <ClassLegend filter={filter.value} onFilter={(letter) => (filter.value = filter.value === letter ? "" : letter)} />
                <div class="two">
                  <StrongestHeads />
                  <Scatter />
                </div>
              </>
            ) : (
              <MeasurePrompt />
            )}
          </div>
        </div>
      )}
    </>
  );
}

function HeadGrid({ filter }: { filter: string }): JSX.Element {
  const stacks = [...new Set(sites.value.map((site) => `${site.stack} ${site.kind}`))];
  const mode = cellMode.value;
  const range = doc.value?.measures.find(({ name }) => name === mode);
  return (
    <Panel
      footer={
        <div class="row wrap between">
          {mode === "thumbnail" || mode === "class" ? (
            <Ramp text={t("map.ramp", { scale: t(`scale.${scale.value}` as TextKey) })} />
          ) : (
            <Ramp text={t("map.rampOf", { name: mode, low: format(range?.low ?? NaN), high: format(range?.high ?? NaN) })} />
          )}
          <span class="legend">
            <span>
              <i class="sw none" />
              {t("map.notComputed")}
            </span>
            <span>
              <i class="sw mask" />
              {t("map.masked")}
            </span>
            <span>
              <i class="sw off" />
              {t("map.ablated")}
            </span>
          </span>
        </div>
      }
    >
      {stacks.map((stack) => (
        <div key={stack} class="stack-block">
          {stacks.length > 1 && <h3>{stack.replace(/^(\S+) (self|attention)$/, "$1").replace(/ self$/, "")}</h3>}
          <div class="grid-scroll">
            <div class="grid" role="grid" aria-label={`${t("map.grid")}: ${stack}`}>
              {sites.value.map((site, number) =>
                `${site.stack} ${site.kind}` === stack ? <GridRow key={site.name} site={number} filter={filter} /> : null,
              )}
            </div>
          </div>
        </div>
      ))}
    </Panel>
  );
}

function GridRow({ site, filter }: { site: number; filter: string }): JSX.Element {
  const item = sites.value[site]!;
  const heads = headsOfSite(site);
  return (
    <div class="grid-row" role="row">
      <span class="ly" role="rowheader" title={item.name}>
        {headName(site, 0).split(" ")[0]}
      </span>
      {heads.map((head, column) => {
        const group = item.kvHeadOfQuery[head.head];
        const startsGroup = item.kvHeads < item.heads && (column === 0 || item.kvHeadOfQuery[heads[column - 1]!.head] !== group);
        return <HeadCell key={head.head} {...head} filter={filter} bracket={item.kvHeads < item.heads ? (startsGroup ? "first" : "next") : ""} />;
      })}
      <LayerMean site={site} />
    </div>
  );
}

/** The mean of the shown measure over the heads of a layer, as a bar at the right of its row. */
function LayerMean({ site }: { site: number }): JSX.Element | null {
  const table = measures.value;
  if (!table) return null;
  const name = table.names.includes(cellMode.value) ? cellMode.value : "entropy";
  const range = doc.value?.measures.find((measure) => measure.name === name);
  const values = headsOfSite(site).map(({ index }) => measureOf(index, name)).filter(Number.isFinite);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return (
    <span class="spark hide-s">
      <span>
        {name} {format(mean)}
      </span>
      <Meter value={range ? mean / (range.high || 1) : 0} />
    </span>
  );
}

function HeadCell({ index, site, head, filter, bracket }: HeadItem & { filter: string; bracket: string }): JSX.Element {
  // Computed signals, so that a new selection renders two cells and not all of them.
  const selected = useComputed(() => selectedSite.value === site && selectedHead.value === head).value;
  const off = useComputed(() => isAblated(site, head)).value;
  const mode = cellMode.value;
  const top = classesOf(index)[0];
  const measured = measures.value !== null;
  const name = headName(site, head);
  const value = mode === "thumbnail" || mode === "class" ? (top?.score ?? NaN) : measureOf(index, mode);
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (selected && document.activeElement?.closest(".grid")) button.current?.focus({ preventScroll: false });
  }, [selected]);
  const dim = filter !== "" && classLetter(top?.name) !== filter;
  return (
    <button
      ref={button}
      type="button"
      role="gridcell"
      class={`cell ${off ? "off" : ""} ${dim ? "dim" : ""} ${bracket ? `kv-${bracket}` : ""}`}
      aria-selected={selected}
      tabIndex={selected ? 0 : -1}
      aria-label={`${name}${measured ? `, ${top?.name ?? t("class.unclear")} ${format(value)}` : ""}${off ? `, ${t("map.ablated")}` : ""}`}
      onClick={() => selectHead(site, head)}
      onDblClick={() => (screen.value = "head")}
    >
      <CellPicture index={index} mode={mode} />
      {measured && (
        <span class="cap">
          <Badge name={top?.name} />
          <span>{Number.isFinite(value) ? format(value).replace(/^0\./, ".") : ""}</span>
        </span>
      )}
      {!measured && <span class="cap">{name.split(" ")[1]}</span>}
    </button>
  );
}

/** What a cell shows: the thumbnail of the weights, the badge of the class, or a measure as a shade. */
function CellPicture({ index, mode }: { index: number; mode: string }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const atlas = thumbnails.value;
  const range = doc.value?.measures.find(({ name }) => name === mode);
  const version = themeVersion.value;
  const ramp = scale.value;
  useEffect(() => {
    const element = canvas.current;
    if (!element) return;
    if (mode === "thumbnail") {
      if (atlas) drawHeatmap(element, thumbnailImage(atlas, index), ramp);
      return;
    }
    element.width = element.height = 1;
    const context = element.getContext("2d")!;
    const value = mode === "class" ? NaN : measureOf(index, mode);
    const span = range ? range.high - range.low || 1 : 1;
    context.fillStyle = Number.isFinite(value) && range ? cssRamp((value - range.low) / span) : cssValue("--surface");
    context.fillRect(0, 0, 1, 1);
  }, [index, mode, atlas, version, ramp, measures.value]);
  return (
    <span class="picture">
      <canvas ref={canvas} aria-hidden="true" width={1} height={1} />
      {mode === "class" && <Badge name={classesOf(index)[0]?.name} size={28} />}
    </span>
  );
}

function ClassLegend({ filter, onFilter }: { filter: string; onFilter: (letter: string) => void }): JSX.Element {
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
      {LETTERS.map((letter) => (
        <button key={letter} type="button" aria-pressed={filter === letter} onClick={() => onFilter(letter)}>
          <Badge name={letterExample(letter)} />
          {className(letter)} <span class="t3">{counts.value.get(letter) ?? 0}</span>
        </button>
      ))}
    </div>
  );
}

/** A name whose badge has this letter. */
function letterExample(letter: string): string | undefined {
  const examples: Record<string, string> = { p: "previous", s: "syntactic", r: "rare", b: "broad", k: "sink", d: "duplicate", i: "induction", t: "punctuation", a: "alignment" };
  return examples[letter];
}

function allHeads(): HeadItem[] {
  return sites.value.flatMap((site, number) => Array.from({ length: site.heads }, (_, head) => ({ index: firstHeads.value[number]! + head, site: number, head })));
}

function StrongestHeads(): JSX.Element {
  const best = new Map<string, { item: HeadItem; name: string; score: number }>();
  for (const item of allHeads()) {
    for (const { name, score } of classesOf(item.index)) {
      if (score > (best.get(name)?.score ?? -1)) best.set(name, { item, name, score });
    }
  }
  const rows = [...best.values()].sort((a, b) => b.score - a.score).slice(0, 8);
  return (
    <Panel title={t("map.strongest")}>
      <table class="finder">
        <thead>
          <tr>
            <th scope="col">{t("head")}</th>
            <th scope="col">{t("class")}</th>
            <th scope="col" class="num" colSpan={2}>
              {t("score")}
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map(({ item, name, score }) => (
            <tr key={name}>
              <td>
                <button class="link mono" type="button" onClick={() => selectHead(item.site, item.head)}>
                  {headName(item.site, item.head)}
                </button>
              </td>
              <td>
                <Badge name={name} /> {name}
              </td>
              <td class="bar-cell">
                <Meter value={score} />
              </td>
              <td class="num">{format(score)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Panel>
  );
}

function HeadTable(): JSX.Element {
  const names = measures.value!.names;
  return (
    <Panel>
      <DataTable
        caption={t("map.heads", { count: headCount.value })}
        rows={allHeads()}
        isSelected={(row) => row.index === headIndex.value}
        onSelect={(row) => selectHead(row.site, row.head)}
        columns={[
          { key: "head", title: t("head"), value: (row) => headName(row.site, row.head) },
          { key: "class", title: t("class"), value: (row) => classesOf(row.index)[0]?.name ?? t("class.unclear"), cell: (row) => (
            <span class="row tight nw"><Badge name={classesOf(row.index)[0]?.name} />{classesOf(row.index)[0]?.name ?? t("class.unclear")}</span>
          ) },
          { key: "score", title: t("score"), numeric: true, value: (row) => classesOf(row.index)[0]?.score ?? NaN, cell: (row) => format(classesOf(row.index)[0]?.score ?? NaN) },
          ...names.map((name) => ({
            key: name,
            title: name,
            numeric: true,
            value: (row: HeadItem) => measureOf(row.index, name),
            cell: (row: HeadItem) => format(measureOf(row.index, name)),
          })),
        ]}
      />
    </Panel>
  );
}

const PLOT = { width: 420, height: 240, left: 44, right: 12, top: 12, bottom: 34 };

/** Ticks at round numbers that cover a range. */
export function roundTicks(low: number, high: number, count = 5): number[] {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw)!;
  const ticks: number[] = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

function Scatter(): JSX.Element {
  const names = measures.value!.names;
  const x = names.includes(scatterX.value) ? scatterX.value : names[0]!;
  const y = names.includes(scatterY.value) ? scatterY.value : (names[1] ?? names[0]!);
  const points = allHeads()
    .map((item) => ({ item, x: measureOf(item.index, x), y: measureOf(item.index, y) }))
    .filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y));
  const extent = (values: number[]): [number, number] => [Math.min(0, ...values), Math.max(...values, 1e-9)];
  const [x0, x1] = extent(points.map((point) => point.x));
  const [y0, y1] = extent(points.map((point) => point.y));
  const { width, height, left, right, top, bottom } = PLOT;
  const px = (value: number) => left + ((value - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (value: number) => height - bottom - ((value - y0) / (y1 - y0 || 1)) * (height - top - bottom);
  const options = names.map((name): [string, string] => [name, name]);
  return (
    <Panel
      title={t("map.scatter")}
      side={
        <>
          <Select label="x" value={x} options={options} onChange={(name) => (scatterX.value = name)} />
          <Select label="y" value={y} options={options} onChange={(name) => (scatterY.value = name)} />
        </>
      }
    >
      <svg class="plot" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={`${t("map.scatter")}: ${x}, ${y}`}>
        {roundTicks(x0, x1).map((tick) => (
          <g key={`x${tick}`}>
            <line class="gridline" x1={px(tick)} x2={px(tick)} y1={top} y2={height - bottom} />
            <text class="tick" x={px(tick)} y={height - bottom + 14} text-anchor="middle">{format(tick)}</text>
          </g>
        ))}
        {roundTicks(y0, y1, 4).map((tick) => (
          <g key={`y${tick}`}>
            <line class="gridline" x1={left} x2={width - right} y1={py(tick)} y2={py(tick)} />
            <text class="tick" x={left - 6} y={py(tick) + 3.5} text-anchor="end">{format(tick)}</text>
          </g>
        ))}
        <text class="axis" x={width - right} y={height - 4} text-anchor="end">{x}</text>
        <text class="axis" x={4} y={top - 2}>{y}</text>
        {points.map(({ item, x: vx, y: vy }) => {
          const selected = item.index === headIndex.value;
          return (
            <g key={item.index} transform={`translate(${px(vx)} ${py(vy)})`} class={`point ${selected ? "selected" : ""}`} onClick={() => selectHead(item.site, item.head)}>
              <title>{`${headName(item.site, item.head)}: ${format(vx)}, ${format(vy)}`}</title>
              <PointShape name={classesOf(item.index)[0]?.name} />
              {selected && <text class="label" x="9" y="4">{headName(item.site, item.head)}</text>}
            </g>
          );
        })}
      </svg>
    </Panel>
  );
}

function PointShape({ name }: { name: string | undefined }): JSX.Element {
  const letter = classLetter(name);
  const size = 10;
  return (
    <svg x={-size / 2} y={-size / 2} width={size} height={size} viewBox="-1 -1 18 18" class={`badge badge-${letter}`} aria-hidden="true" overflow="visible">
      <g>{letter === "k" ? <path d="M-.5 1.5h17L8 16z" /> : letter === "i" ? <path d="M-.5 14.5h17L8 0z" /> : letter === "s" ? <rect x=".75" y=".75" width="14.5" height="14.5" /> : letter === "r" ? <path d="M8 0l8 8-8 8-8-8z" /> : <circle cx="8" cy="8" r="7" />}</g>
    </svg>
  );
}
