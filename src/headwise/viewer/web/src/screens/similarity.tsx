// Similarity: distances between heads, clusters below a threshold, and a proposal which heads could go.

import { batch, signal } from "@preact/signals";
import type { JSX } from "preact";
import { givenTexts, openTexts, setAblated, textLines } from "../actions";
import { Button, choices, type Column, Form, Heatmap, Notes, Panel, Segmented, Select, Slider, TableButton, Toolbar } from "../components/basics";
import { thumbnailImage } from "../canvas/heatmap";
import { Badge } from "../components/class_badge";
import { DataTable } from "../components/data_table";
import { Dendrogram, joinHeads } from "../components/dendrogram";
import { streamName } from "../components/tokens";
import { format, t } from "../i18n";
import { classesOf, doc, firstHeads, headName, isAblated, job, runJob, scale, screen, selectedHead, selectedSite, selectHead, showsTable, source, thumbnails } from "../state";
import type { Message } from "../source";
import { between, oneOf, urlSignal } from "../url_state";

const BASES = ["attention", "outputs", "circuits"] as const;
type Basis = (typeof BASES)[number];

/** How many of all pairs of heads are similar, and how many by chance. */
interface PairTest {
  found: number;
  pairs: number;
  chance: number;
  p: number;
}

interface Group {
  by: Basis;
  streams: [string, string];
  heads: [number, number][];
  threshold: number;
  clustersByChance: number;
  pairTest?: PairTest; // of attention
  distances: Float32Array;
  points: Float32Array;
  merges: Float32Array;
}

function readGroups(message: Message): Group[] {
  return message.fields["groups"].map((group: Omit<Group, "distances" | "points" | "merges">, number: number) => ({
    ...group,
    distances: message.arrays[`${number}.distances`]!.data,
    points: message.arrays[`${number}.points`]!.data,
    merges: message.arrays[`${number}.merges`]!.data,
  }));
}

/** The head of a cluster that is nearest to all others of it. */
function representative(members: number[], group: Group): number {
  const count = group.heads.length;
  const total = (head: number) => members.reduce((sum, other) => sum + group.distances[head * count + other]!, 0);
  return members.reduce((best, head) => (total(head) < total(best) ? head : best));
}

/** The place of the selected head among the heads of a group; -1 if it is not one of them. */
function placeIn(group: Group): number {
  return group.heads.findIndex(([site, head]) => site === selectedSite.value && head === selectedHead.value);
}

/** The other heads of a group with their distances from one, the nearest first. */
export function neighbours({ heads, distances }: { heads: unknown[]; distances: Float32Array }, head: number): { head: number; distance: number }[] {
  const all = heads.map((_, other) => ({ head: other, distance: distances[head * heads.length + other]! }));
  return all.filter((other) => other.head !== head).sort((a, b) => a.distance - b.distance);
}

const LEAST_TEXTS = 2; // the intervals are over texts

/** The last comparison, which stays while other screens are open, and what was left out of it. */
const groups = signal<Group[]>([]);
const notes = signal<string[]>([]);
const basis = urlSignal<Basis>("by", "attention", oneOf(BASES));
const cut = urlSignal<number | null>("cut", null, (text) => (text === "" ? null : between(0, 1e9)(text)));

async function compare(): Promise<void> {
  const result = await runJob("similarity", { texts: textLines.value });
  if (!result) return;
  if (groups.value.length) cut.value = null; // the first comparison keeps the cut of the address
  groups.value = readGroups(result);
  notes.value = result.fields["notes"];
}

/** Compare heads by something else; the cut of one kind of distance means nothing for another. */
function chooseBasis(next: Basis): void {
  batch(() => {
    basis.value = next;
    cut.value = null;
  });
}

export function SimilarityScreen(): JSX.Element {
  const canCompare = source.isLive && doc.value?.capabilities.measure.possible;
  const alike = groups.value.filter(({ by }) => by === basis.value);
  const group = alike.find((item) => placeIn(item) >= 0) ?? alike[0];
  return (
    <>
      <Toolbar title={t("similar.title")} hint={group ? "" : t("similar.hint")}>
        <Segmented label={t("similar.by")} value={basis.value} options={choices("similar.by.", BASES)} onChange={chooseBasis} />
        {alike.length > 1 && basis.value !== "circuits" && (
          <Select
            label={t("tokens.label")}
            value={String(alike.indexOf(group!))}
            options={alike.map((item, number) => [String(number), item.streams.map(streamName).join(" → ")] as const)}
            onChange={(number) => selectHead(...alike[Number(number)]!.heads[0]!)}
          />
        )}
        {group && <TableButton />}
      </Toolbar>
      {group && <GroupView group={group} threshold={cut.value ?? group.threshold} onCut={(value) => (cut.value = value)} />}
      {groups.value.length > 0 && !group && <p class="note">{t("similar.none")}</p>}
      <Notes notes={notes.value} />
      {canCompare ? <TextsPanel isOpen={!groups.value.length} /> : <p class="t3">{t("state.needsModel")}</p>}
    </>
  );
}

function TextsPanel({ isOpen }: { isOpen: boolean }): JSX.Element {
  const count = textLines.value.length;
  return (
    <Panel>
      <details open={isOpen}>
        <summary>{t("similar.texts", { count })}</summary>
        <Form class="stack" onSend={() => count >= LEAST_TEXTS && void compare()}>
          <textarea rows={6} aria-label={t("similar.textsLabel")} value={openTexts.value} onInput={(event) => (givenTexts.value = event.currentTarget.value)} />
          {count < LEAST_TEXTS && <p class="t3">{t("similar.more")}</p>}
          <div>
            <button class="btn primary" type="submit" aria-disabled={count < LEAST_TEXTS || job.value?.kind === "similarity"}>
              {t("similar.run")}
            </button>
          </div>
        </Form>
      </details>
    </Panel>
  );
}

/** Whether heads are alike by more pairs than chance gives. */
function pairsText({ found, pairs, chance, p }: PairTest): string {
  const counts = t("similar.pairTest", { found, pairs, chance: format(chance), p: format(p) });
  return p < 0.05 ? counts : `${t("similar.notShown")} ${counts}`;
}

function GroupView({ group, threshold, onCut }: { group: Group; threshold: number; onCut: (value: number) => void }): JSX.Element {
  const count = group.heads.length;
  const { members } = joinHeads(count, group.merges, threshold);
  const order = [...members.values()].sort((a, b) => b.length - a.length).flat();
  const most = Math.max(...group.distances, 1e-9);
  const shared = [...members.values()].filter((heads) => heads.length > 1).sort((a, b) => b.length - a.length);
  const name = (head: number) => headName(...group.heads[head]!);
  const unit = t(`similar.unit.${group.by}`);
  const propose = (next: "lab" | "prune") => {
    const removed = shared.flatMap((heads) => heads.filter((head) => head !== representative(heads, group)));
    const added = removed.map((head) => group.heads[head]!).filter(([site, head]) => !isAblated(site, head));
    setAblated([...(doc.value?.ablated ?? []), ...added.map(([site, head]) => ({ site, head, mode: "zero", scale: 0 }))]);
    screen.value = next;
  };
  return (
    <div class="stack similar">
      <p>{group.pairTest ? pairsText(group.pairTest) : t(`similar.about.${group.by as "outputs" | "circuits"}`, { count })}</p>
      <NearestHeads group={group} name={name} />
      <div class="toolbar">
        <Slider label={t("similar.cut", { value: format(threshold), unit })} min={0} max={most} step={most / 200} value={threshold} onInput={onCut} />
        <span class="t2">{t(group.by === "attention" ? "similar.clusters" : "similar.clustersOnly", { count: members.size, chance: group.clustersByChance })}</span>
        <span class="grow" />
        <Button aria-disabled={!shared.length} onClick={() => shared.length && propose("lab")}>{t("similar.propose")}</Button>
        <Button aria-disabled={!shared.length} onClick={() => shared.length && propose("prune")}>{t("similar.prune")}</Button>
      </div>
      {!showsTable.value && (
        <Panel title={t("tree.title")} footer={<span class="t3 sm">{t("tree.hint")}</span>}>
          <Dendrogram heads={group.heads} merges={group.merges} threshold={threshold} unit={unit} name={name} onCut={onCut} />
        </Panel>
      )}
      {showsTable.value ? (
        <>
          <Panel><NeighbourTable group={group} members={members} name={name} /></Panel>
          <div class="two">
            <Panel title={t("tree.title")}><DistanceTable caption={t("tree.title")} pairs={mergePairs(group.merges)} name={name} /></Panel>
            <Panel title={t("similar.pairs")}><DistanceTable caption={t("similar.pairs")} pairs={headPairs(group)} name={name} /></Panel>
          </div>
        </>
      ) : (
        <div class="two">
          <Panel title={t("similar.matrix", { most: format(most), unit })}><DistanceMatrix group={group} order={order} most={most} name={name} /></Panel>
          <Panel title={t("similar.map")}><Points group={group} name={name} /></Panel>
        </div>
      )}
      <Panel>
        <DataTable
          caption={t("similar.members")}
          rows={shared}
          columns={[
            { key: "size", title: t("similar.cluster"), numeric: true, value: (heads) => heads.length },
            { key: "keep", title: t("similar.keep"), value: (heads) => name(representative(heads, group)) },
            { key: "members", title: t("similar.members"), value: (heads) => heads.map(name).join(", ") },
          ]}
        />
      </Panel>
    </div>
  );
}

const SHOWN_NEIGHBOURS = 5;

/** The selected head and the heads that are nearest to it, as pictures; a press selects one. */
function NearestHeads({ group, name }: { group: Group; name: (head: number) => string }): JSX.Element | null {
  const chosen = placeIn(group);
  if (chosen < 0 || showsTable.value) return null; // the table of heads names the nearest of each
  const shown = [{ head: chosen, distance: 0 }, ...neighbours(group, chosen).slice(0, SHOWN_NEIGHBOURS)];
  return (
    <Panel title={t("similar.nearestTo", { head: name(chosen) })}>
      <div class="nearest">
        {shown.map(({ head, distance }) => {
          const [site, number] = group.heads[head]!;
          const picture = thumbnails.value && thumbnailImage(thumbnails.value, firstHeads.value[site]! + number);
          return (
            <button key={head} class="pick" type="button" aria-pressed={head === chosen} onClick={() => selectHead(site, number)}>
              <Heatmap class="bigthumb" image={picture} scale={scale.value} label={name(head)} />
              <span class="row between sm"><b class="mono b">{name(head)}</b>{head !== chosen && <span class="t2">{format(distance)}</span>}</span>
            </button>
          );
        })}
      </div>
    </Panel>
  );
}

const NAMED_HEADS = 36; // of a matrix, whose names are written

/** The distances of all pairs, cluster by cluster; darker is nearer. */
function DistanceMatrix({ group, order, most, name }: { group: Group; order: number[]; most: number; name: (head: number) => string }): JSX.Element {
  const count = order.length;
  const pixels = Uint8Array.from({ length: count * count }, (_, cell) => {
    const distance = group.distances[order[Math.floor(cell / count)]! * count + order[cell % count]!]!;
    return Math.round((1 - distance / most) * 255);
  });
  const names = count <= NAMED_HEADS ? order : [];
  const labels = (side: "rows" | "columns") => (
    <div class={`token-labels ${side}`} aria-hidden="true">{names.map((head) => <span key={head}><span>{name(head)}</span></span>)}</div>
  );
  return (
    <div class="matrix labelled distances">
      {labels("columns")}
      {labels("rows")}
      <div class="matrix-canvas"><Heatmap image={{ data: pixels, rows: count, columns: count }} scale="lin" label={t("similar.matrix", { most: format(most), unit: t(`similar.unit.${group.by}`) })} /></div>
    </div>
  );
}

type Pair = readonly [one: number, other: number, distance: number];

/** The merges of the tree: the first head of each of two clusters, and the distance at which they are joined. */
function mergePairs(merges: Float32Array): Pair[] {
  return Array.from({ length: merges.length / 3 }, (_, row) => [merges[row * 3]!, merges[row * 3 + 1]!, merges[row * 3 + 2]!]);
}

/** All pairs of heads, the nearest first. */
function headPairs({ heads, distances }: Group): Pair[] {
  const pairs = heads.flatMap((_, one) => heads.slice(one + 1).map((_, place): Pair => [one, one + 1 + place, distances[one * heads.length + one + 1 + place]!]));
  return pairs.sort((a, b) => a[2] - b[2]);
}

function DistanceTable({ caption, pairs, name }: { caption: string; pairs: Pair[]; name: (head: number) => string }): JSX.Element {
  return (
    <DataTable
      caption={caption}
      rows={pairs}
      columns={[
        { key: "one", title: t("head"), value: ([one]) => name(one) },
        { key: "other", title: t("similar.other"), value: ([, other]) => name(other) },
        { key: "distance", title: t("similar.distance"), numeric: true, value: (pair) => pair[2], cell: (pair) => format(pair[2]) },
      ]}
    />
  );
}

/** The numbers behind the matrix and the map: for every head its place, its cluster and the head nearest to it. */
function NeighbourTable({ group, members, name }: { group: Group; members: Map<number, number[]>; name: (head: number) => string }): JSX.Element {
  const rows = group.heads.map((_, head) => {
    const { head: nearest, distance } = neighbours(group, head)[0]!;
    return { head, nearest, distance, cluster: [...members].find(([, heads]) => heads.includes(head))![0], x: group.points[head * 2]!, y: group.points[head * 2 + 1]! };
  });
  type Row = (typeof rows)[number];
  const column = (key: "distance" | "x" | "y", title: string): Column<Row> => ({ key, title, numeric: true, value: (row) => row[key], cell: (row) => format(row[key]) });
  return (
    <DataTable
      caption={t("similar.table")}
      rows={rows}
      onSelect={({ head }) => selectHead(...group.heads[head]!)}
      isSelected={({ head }) => head === placeIn(group)}
      columns={[
        { key: "head", title: t("head"), value: ({ head }) => name(head) },
        { key: "nearest", title: t("similar.nearest"), value: ({ nearest }) => name(nearest) },
        column("distance", t("similar.distance")),
        { key: "cluster", title: t("similar.clusterOf"), value: ({ cluster }) => name(cluster) },
        column("x", "x"),
        column("y", "y"),
      ]}
    />
  );
}

function Points({ group, name }: { group: Group; name: (head: number) => string }): JSX.Element {
  const xs = group.heads.map((_, head) => group.points[head * 2]!);
  const ys = group.heads.map((_, head) => group.points[head * 2 + 1]!);
  const span = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys), 1e-9);
  const place = (value: number, low: number) => 12 + ((value - low) / span) * 336;
  return (
    <svg class="plot" viewBox="0 0 360 360" role="img" aria-label={t("similar.map")}>
      {group.heads.map(([site, head], index) => {
        const top = classesOf((firstHeads.value[site] ?? 0) + head)[0]?.name;
        return (
          <g key={index} class={index === placeIn(group) ? "point chosen" : "point"} transform={`translate(${place(xs[index]!, Math.min(...xs)) - 7} ${place(ys[index]!, Math.min(...ys)) - 7})`} onClick={() => selectHead(site, head)}>
            <title>{name(index)}</title>
            <Badge name={top} size={14} />
          </g>
        );
      })}
    </svg>
  );
}
