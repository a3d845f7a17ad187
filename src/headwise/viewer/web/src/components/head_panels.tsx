// The panels beside the matrix: the whole matrix in small, the exact row of a query, the mean weight by distance, patches.

import { type ReadonlySignal, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { thumbnailImage } from "../canvas/heatmap";
import { format, say, t } from "../i18n";
import type { Site } from "../source";
import { headIndex, lens, scale, showsTable, thumbnails } from "../state";
import { type Column, Heatmap, Panel, PlainTable } from "./basics";
import { DataTable } from "./data_table";
import { type ExactRow, type HeadData, type Marginals, shownView, wholeView } from "./head_data";
import { roundTicks } from "./head_scatter";
import { moveView, percentBox, zoomView } from "./matrix";
import { streamWords, visibleToken } from "./tokens";
import { largest } from "./voice_lines";

const LISTED_KEYS = 8;
const FIRST_ZOOM = 8; // how much closer the first press on the small matrix looks

/** The whole matrix in small, with a frame around the part that is shown; press or drag to move it. */
export function Minimap({ item }: { item: Site }): JSX.Element {
  const isPressed = useSignal(false);
  const view = shownView(item);
  const atlas = thumbnails.value;
  const move = (event: PointerEvent) => {
    const area = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const at = { query: ((event.clientY - area.top) / area.height) * item.numQueries, key: ((event.clientX - area.left) / area.width) * item.numKeys };
    const isWhole = view.q1 - view.q0 === item.numQueries && view.k1 - view.k0 === item.numKeys;
    if (isWhole) zoomView(item, FIRST_ZOOM, at);
    else moveView(item, { queries: view.q1 - view.q0, keys: view.k1 - view.k0 }, at);
  };
  return (
    <Panel title={t("head.minimap")}>
      <div
        class="minimap"
        onPointerDown={(event) => {
          isPressed.value = true;
          event.currentTarget.setPointerCapture(event.pointerId);
          move(event);
        }}
        onPointerMove={(event) => isPressed.value && move(event)}
        onPointerUp={() => (isPressed.value = false)}
        onPointerCancel={() => (isPressed.value = false)}
      >
        <Heatmap image={atlas && thumbnailImage(atlas, headIndex.value)} scale={scale.value} label={t("head.minimap")} />
        <svg class="crosshair locked" viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">
          <rect class="cell-mark" {...percentBox(wholeView(item), view)} />
        </svg>
      </div>
      <p class="t3 xs">{t("head.minimapHint")}</p>
    </Panel>
  );
}

/** The exact weights of the selected query, the largest first. */
export function RowPanel(props: { item: Site; row: ReadonlySignal<ExactRow | null>; marginals: ReadonlySignal<Marginals | null> }): JSX.Element {
  const { item } = props;
  const row = props.row.value;
  const marginals = props.marginals.value;
  const word = row ? streamWords(item.queryStream)[row.query] : undefined;
  const keyWords = streamWords(item.keyStream);
  const allowed = row?.weights.map((weight, key) => (row.masked[key] ? -Infinity : weight)) ?? new Float32Array();
  const top = largest(allowed, LISTED_KEYS).filter(({ weight }) => weight > -Infinity);
  return (
    <Panel class="row-panel" title={row ? [`${t("query")} ${row.query}`, ...(word === undefined ? [] : [visibleToken(word)])].join(" · ") : t("query")}>
      {row ? (
        <PlainTable
          titles={[t("key"), `#${t("weight")}`]}
          rows={[
            ...top.map(({ index: key, weight }) => [<span class="mono">{`${key} ${keyWords[key] === undefined ? "" : visibleToken(keyWords[key])}`}</span>, weight.toPrecision(4)]),
            ...(lens.value === "weight" && marginals ? [[<span class="t3">{t("head.entropyNats")}</span>, format(marginals.entropy[row.query] ?? NaN)]] : []),
          ]}
        />
      ) : (
        <p class="t3">{t("head.hint")}</p>
      )}
    </Panel>
  );
}

const PROFILE = { width: 320, height: 110, left: 36, base: 84, tall: 74, reach: 32 };

/** Mean weight at each distance between query and key. */
export function OffsetProfile({ item, data }: { item: Site; data: HeadData }): JSX.Element {
  const marginals = data.marginals.value;
  const reason = data.marginalsError.value;
  return (
    <Panel title={t("head.offsets")}>
      <div class="profile">{marginals ? showsTable.value ? <OffsetTable marginals={marginals} /> : <ProfileBars item={item} marginals={marginals} /> : <p class="t3">{reason ? `${say(reason.fact)} ${say(reason.remedy)}` : t("state.computing")}</p>}</div>
    </Panel>
  );
}

function ProfileBars({ item, marginals }: { item: Site; marginals: Marginals }): JSX.Element {
  const isSelf = item.queryStream === item.keyStream;
  const { width, height, left, base, tall } = PROFILE;
  const reach = Math.min(Math.max(item.numQueries, item.numKeys), PROFILE.reach);
  const first = marginals.firstOffset;
  const low = isSelf && !marginals.byOffset.subarray(0, -first).some((mean) => mean > 0) ? 0 : -reach;
  const shown: { offset: number; mean: number }[] = [];
  for (let offset = low; offset <= reach; offset++) shown.push({ offset, mean: marginals.byOffset[offset - first] ?? 0 });
  const most = Math.max(...shown.map(({ mean }) => mean), 1e-9);
  const bar = (width - left - 4) / Math.max(shown.length, 1);
  return (
    <svg class="plot" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={t("head.offsets")}>
      {roundTicks(0, most, 2).map((tick) => (
        <g key={tick}>
          <line class="gridline" x1={left - 2} x2={width} y1={base - (tick / most) * tall} y2={base - (tick / most) * tall} />
          <text class="tick" x={left - 6} y={base + 3 - (tick / most) * tall} text-anchor="end">{format(tick)}</text>
        </g>
      ))}
      {shown.map(({ offset, mean }, index) => (
        <rect key={offset} class="bar-mark" x={left + index * bar} y={base - (mean / most) * tall} width={Math.max(bar - 1, 0.6)} height={(mean / most) * tall}>
          <title>{`${offset}: ${format(mean)}`}</title>
        </rect>
      ))}
      {shown
        .filter(({ offset }) => offset % 8 === 0)
        .map(({ offset }) => (
          <text key={offset} class="tick" x={left + (shown.findIndex((item) => item.offset === offset) + 0.5) * bar} y="97" text-anchor="middle">
            {offset}
          </text>
        ))}
      <text class="axis" x={width} y="109" text-anchor="end">{t("head.offsetAxis")}</text>
    </svg>
  );
}

/** The mean weight at every distance that the head has. */
export function OffsetTable({ marginals }: { marginals: Marginals }): JSX.Element {
  const rows = Array.from(marginals.byOffset, (mean, place) => ({ offset: place + marginals.firstOffset, mean })).filter(({ mean }) => mean > 0);
  return (
    <DataTable
      caption={t("head.offsets")}
      rows={rows}
      columns={[
        { key: "offset", title: t("head.offsetAxis"), numeric: true, value: (row) => row.offset },
        { key: "mean", title: t("weight"), numeric: true, value: (row) => row.mean, cell: (row) => format(row.mean) },
      ]}
    />
  );
}

interface Row {
  position: number;
  values: [number, number];
}

/** Entropy and largest weight of every query, and what every key receives. */
export function MarginalTables({ item, marginals }: { item: Site; marginals: Marginals }): JSX.Element {
  const { entropy, maximum, received } = marginals;
  const word = (stream: string, position: number) => `${position} ${visibleToken(streamWords(stream)[position] ?? "")}`;
  const column = (place: 0 | 1, title: string): Column<Row> => ({ key: String(place), title, numeric: true, value: (row) => row.values[place], cell: (row) => format(row.values[place]) });
  const queries = Array.from(entropy, (value, position): Row => ({ position, values: [value, maximum[position]!] }));
  const keys = Array.from(received, (value, position): Row => ({ position, values: [value, NaN] }));
  return (
    <div class="two">
      <Panel title={t("head.byQuery")}>
        <DataTable
          caption={t("head.byQuery")}
          rows={queries}
          columns={[{ key: "query", title: t("query"), value: (row) => word(item.queryStream, row.position) }, column(0, t("head.entropyNats")), column(1, t("head.maximum"))]}
        />
      </Panel>
      <Panel title={t("head.byKey")}>
        <DataTable caption={t("head.byKey")} rows={keys} columns={[{ key: "key", title: t("key"), value: (row) => word(item.keyStream, row.position) }, column(0, t("head.mass"))]} />
      </Panel>
    </div>
  );
}
