// Curves of the Lab: every head ablated alone, and one more head at a time beside random orders. Says first how long it takes.

import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { setAblated } from "../actions";
import { Meter, Panel, Segmented, Select, type Column } from "../components/basics";
import { DataTable } from "../components/data_table";
import { format, isTextKey, say, t, type TextKey } from "../i18n";
import { factor, mode, modeFields, openTokens, resampleText, sweep, sweepKey, textKey, type Sweep } from "../lab_state";
import { headIndex, firstHeads, headName, job, runJob, selectHead, selectedSite, showsTable, sites, source } from "../state";
import { oneOf, toNumber, urlSignal } from "../url_state";

const KINDS = ["sweep", "once", "every"] as const;
type Kind = (typeof KINDS)[number];

interface Plan {
  heads: number;
  limit: number;
  plans: Record<Kind, { heads: number; seconds: number }>;
}

interface Curve {
  text: string;
  ranking: Kind;
  objective: string;
  baseline: number;
  order: [number, number, number][];
  random: { heads: number; mean: number; low: number; high: number }[];
}

const kind = urlSignal<Kind>("curve", "sweep", oneOf(KINDS));
const layers = urlSignal("range", "all", oneOf(["all", "one"]));
const plan = signal<{ key: string; found: Plan } | null>(null);
const curve = signal<Curve | null>(null);
const count = urlSignal("first", 0, toNumber);

/** A time as people say it. */
function duration(seconds: number): string {
  return seconds < 1 ? t("lab.underSecond") : seconds < 90 ? t("lab.seconds", { count: Math.round(seconds) }) : t("lab.minutes", { count: Math.round(seconds / 60) });
}

/** What a curve measures: the loss of the model's own head, or how far its outputs have drifted. */
function objectiveName(name: string): string {
  const key = `objective.${name}`;
  return isTextKey(key) ? t(key) : name;
}

export function CurvesPanel(): JSX.Element {
  const chosenSites = layers.value === "one" ? [selectedSite.value] : [];
  const key = JSON.stringify([chosenSites, textKey.value]);
  const known = plan.value?.key === key ? plan.value.found : null;
  const canRun = source.isLive && !job.value;
  const estimate = async () => {
    const found = (await runJob("lab-plan", { sites: chosenSites })) as Plan | null;
    if (found) plan.value = { key, found };
  };
  const run = async () => {
    const body = { sites: chosenSites, limit: known!.plans[kind.value].heads };
    if (kind.value === "sweep") {
      const found = await runJob("sweep", { ...body, ...modeFields(), tokens: openTokens(), resampleText: resampleText.value });
      if (found) sweep.value = { ...found, text: textKey.value, mode: sweepKey() };
    } else {
      const found = (await runJob("greedy", { ...body, ranking: kind.value })) as Curve | null;
      if (!found) return;
      curve.value = { ...found, ranking: kind.value, text: textKey.value };
      count.value = Math.min(count.value || 1, found.order.length);
    }
  };
  return (
    <Panel title={t("lab.curves")} class="lab-curves">
      <div class="row wrap">
        <Segmented label={t("lab.curves")} value={kind.value} options={KINDS.map((name) => [name, t(`lab.curve.${name}` as TextKey)] as const)} onChange={(value) => (kind.value = value)} />
        <Select label={t("lab.layers")} value={layers.value} options={[["all", t("lab.allLayers")], ["one", sites.value[selectedSite.value]?.name ?? ""]]} onChange={(value) => (layers.value = value)} />
        {known ? (
          <button class="btn primary" type="button" aria-disabled={!canRun} onClick={() => canRun && void run()}>
            {t("lab.start")}
          </button>
        ) : (
          <button class="btn" type="button" aria-disabled={!canRun} onClick={() => canRun && void estimate()}>
            {t("lab.estimate")}
          </button>
        )}
      </div>
      <p class="t3 sm" data-testid="plan">
        {t(`lab.curveHint.${kind.value}` as TextKey)} {known && <PlanText found={known} />}
      </p>
      {curve.value?.text === textKey.value && <CurveView found={curve.value} />}
      {sweep.value?.text === textKey.value && <SweepTable found={sweep.value} />}
    </Panel>
  );
}

function PlanText({ found }: { found: Plan }): JSX.Element {
  const { heads, seconds } = found.plans[kind.value];
  return (
    <b class="b">
      {t("lab.plan", { heads, time: duration(seconds) })} {heads < found.heads && t("lab.planCap", { heads, total: found.heads, limit: duration(found.limit) })}
    </b>
  );
}

function SweepTable({ found }: { found: Sweep }): JSX.Element {
  const most = Math.max(...found.heads.map(([, , change]) => change), 1e-12);
  const columns: Column<Sweep["heads"][number]>[] = [
    { key: "head", title: t("head"), value: ([site, head]) => headName(site, head) },
    { key: "change", title: say(found.quantity), numeric: true, value: (row) => row[2], cell: (row) => format(row[2]) },
    { key: "bar", title: t("lab.barShare"), value: (row) => row[2], cell: (row) => <span class="bar-cell"><Meter value={row[2] / most} /></span> },
  ];
  if (found.heads.some((row) => row[3] !== null)) columns.splice(2, 0, { key: "loss", title: t("lab.lossChange"), numeric: true, value: (row) => row[3] ?? NaN, cell: (row) => format(row[3] ?? NaN) });
  return (
    <div class="stack" data-testid="sweep">
      <h3>{t("lab.sweep")}</h3>
      <div class="lab-table">
        <DataTable
          caption={t("lab.sweep")}
          rows={found.heads}
          sort="change"
          columns={columns}
          isSelected={([site, head]) => firstHeads.value[site]! + head === headIndex.value}
          onSelect={([site, head]) => selectHead(site, head)}
        />
      </div>
    </div>
  );
}

function CurveView({ found }: { found: Curve }): JSX.Element {
  const shown = found.order[count.value - 1];
  const take = () => setAblated(found.order.slice(0, count.value).map(([site, head]) => ({ site, head, mode: mode.value === "zero" ? "zero" : mode.value, scale: mode.value === "zero" ? factor.value : 0 })));
  return (
    <div class="stack" data-testid="curve">
      {showsTable.value ? <CurveTable found={found} /> : <CurvePlot found={found} />}
      <div class="row wrap">
        <label class="picker range">
          <span>{t("lab.first", { count: count.value, total: found.order.length })}</span>
          <input type="range" min="1" max={found.order.length} value={count.value} onInput={(event) => (count.value = Number(event.currentTarget.value))} />
        </label>
        <button class="btn" type="button" onClick={take}>
          {t("lab.take")}
        </button>
        {shown && (
          <span class="t2 sm">
            {headName(shown[0], shown[1])}: {objectiveName(found.objective)} {format(shown[2])}
          </span>
        )}
      </div>
    </div>
  );
}

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [640, 260, 52, 10, 34];

function CurvePlot({ found }: { found: Curve }): JSX.Element {
  const values = [found.baseline, ...found.order.map(([, , value]) => value), ...found.random.flatMap(({ low, high }) => [low, high])];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (heads: number) => LEFT + (heads / found.order.length) * (WIDTH - LEFT - 10);
  const y = (value: number) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const line = (points: [number, number][]) => points.map(([heads, value]) => `${x(heads).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const own: [number, number][] = [[0, found.baseline], ...found.order.map(([, , value], place): [number, number] => [place + 1, value])];
  const chance: [number, number][] = [[0, found.baseline], ...found.random.map(({ heads, mean }): [number, number] => [heads, mean])];
  const start: [number, number] = [0, found.baseline];
  const band = [start, ...found.random.map((point): [number, number] => [point.heads, point.high]), ...[...found.random].reverse().map((point): [number, number] => [point.heads, point.low])];
  const marked = found.order[count.value - 1];
  return (
    <figure>
      <svg class="plot curve" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={t("lab.curveLabel", { objective: objectiveName(found.objective) })}>
        {[low, (low + high) / 2, high].map((value) => (
          <g key={value}>
            <line class="gridline" x1={LEFT} x2={WIDTH - 10} y1={y(value)} y2={y(value)} />
            <text x={LEFT - 6} y={y(value) + 3} text-anchor="end">
              {format(value)}
            </text>
          </g>
        ))}
        {[0, Math.round(found.order.length / 2), found.order.length].map((heads, place) => (
          <text key={place} x={x(heads)} y={HEIGHT - BOTTOM + 14} text-anchor={["start", "middle", "end"][place]}>
            {heads}
          </text>
        ))}
        <text class="axis" x={(LEFT + WIDTH) / 2} y={HEIGHT - 4} text-anchor="middle">
          {t("lab.curveAxis")}
        </text>
        <polygon class="chance-band" points={line(band)} />
        <polyline class="chance-line" points={line(chance)} />
        <polyline class="own-line" points={line(own)} />
        {marked && <circle class="own-point" cx={x(count.value)} cy={y(marked[2])} r="4" />}
      </svg>
      <figcaption class="legend">
        <span>
          <i class="sw own" /> {t(`lab.curve.${found.ranking}` as TextKey)}: {objectiveName(found.objective)}
        </span>
        <span>
          <i class="sw chance" /> {t("lab.chance")}
        </span>
      </figcaption>
    </figure>
  );
}

function CurveTable({ found }: { found: Curve }): JSX.Element {
  const chance = new Map(found.random.map((point) => [point.heads, point.mean]));
  const rows = found.order.map(([site, head, value], place) => ({ place: place + 1, name: headName(site, head), value, chance: chance.get(place + 1) ?? NaN }));
  return (
    <div class="lab-table">
      <DataTable
        caption={t("lab.curveLabel", { objective: objectiveName(found.objective) })}
        rows={rows}
        columns={[
          { key: "place", title: t("lab.curveAxis"), numeric: true, value: (row) => row.place },
          { key: "name", title: t("head"), value: (row) => row.name },
          { key: "value", title: objectiveName(found.objective), numeric: true, value: (row) => row.value, cell: (row) => format(row.value) },
          { key: "chance", title: t("lab.chance"), numeric: true, value: (row) => row.chance, cell: (row) => format(row.chance) },
        ]}
      />
    </div>
  );
}
