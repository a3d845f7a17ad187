// The tree of clusters: heads that are merged at a small distance attend alike. The line of the cut can be dragged.

import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { format, t } from "../i18n";
import { selectedHead, selectedSite, selectHead } from "../state";

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [640, 240, 44, 8, 58];
const MOST_LABELS = 80; // heads whose names are written

interface Node {
  x: number;
  height: number;
}

export interface Branch {
  from: Node;
  to: Node;
  height: number;
}

/** The clusters of heads if all merges below a distance are made, by their lowest head, and these merges of clusters. */
export function joinHeads(count: number, merges: Float32Array, threshold = Infinity): { members: Map<number, number[]>; joined: [first: number, second: number, distance: number][] } {
  const members = new Map<number, number[]>(Array.from({ length: count }, (_, head) => [head, [head]]));
  const root = Array.from({ length: count }, (_, head) => head);
  const find = (head: number): number => (root[head] === head ? head : (root[head] = find(root[head]!)));
  const joined: [number, number, number][] = [];
  for (let row = 0; row * 3 < merges.length; row++) {
    const [one, other] = [find(merges[row * 3]!), find(merges[row * 3 + 1]!)];
    if (one === other || merges[row * 3 + 2]! > threshold) continue;
    const [first, second] = one < other ? [one, other] : [other, one];
    members.set(first, [...members.get(first)!, ...members.get(second)!]);
    members.delete(second);
    root[second] = first;
    joined.push([first, second, merges[row * 3 + 2]!]);
  }
  return { members, joined };
}

/** The order of the leaves in which no branches cross, and the branches; merges are [one, other, distance] by lowest head. */
export function makeTree(count: number, merges: Float32Array): { order: number[]; branches: Branch[] } {
  const { members, joined } = joinHeads(count, merges);
  const order = [...members.values()].flat();
  const nodes = new Map<number, Node>(order.map((head, place) => [head, { x: place + 0.5, height: 0 }]));
  const branches = joined.map(([first, second, height]) => {
    const from = nodes.get(first)!; // a cluster is named by its lowest head
    const to = nodes.get(second)!;
    nodes.set(first, { x: (from.x + to.x) / 2, height });
    return { from, to, height };
  });
  return { order, branches };
}

export function Dendrogram(props: { heads: [number, number][]; merges: Float32Array; threshold: number; unit: string; name: (head: number) => string; onCut: (threshold: number) => void }): JSX.Element {
  const { heads, merges, threshold, name } = props;
  const plot = useRef<SVGSVGElement>(null);
  const { order, branches } = useMemo(() => makeTree(heads.length, merges), [heads, merges]);
  const most = branches.reduce((high, branch) => Math.max(high, branch.height), 1e-9);
  const step = (WIDTH - LEFT) / Math.max(heads.length, 1);
  const x = (place: number) => LEFT + place * step;
  const y = (height: number) => TOP + (1 - Math.min(height / most, 1)) * (HEIGHT - TOP - BOTTOM);
  const cut = (event: PointerEvent) => {
    const area = plot.current!.getBoundingClientRect();
    const inside = ((event.clientY - area.top) / area.height) * HEIGHT;
    props.onCut(Math.min(Math.max((1 - (inside - TOP) / (HEIGHT - TOP - BOTTOM)) * most, 0), most));
  };
  return (
    <svg
      ref={plot}
      class="plot dendrogram"
      viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
      role="img"
      aria-label={t("tree.label", { heads: heads.length, most: format(most), unit: props.unit })}
      onPointerDown={(event) => {
        if ((event.target as Element).closest(".leaf")) return;
        plot.current?.setPointerCapture(event.pointerId);
        cut(event);
      }}
      onPointerMove={(event) => event.buttons === 1 && plot.current?.hasPointerCapture(event.pointerId) && cut(event)}
    >
      {[0, most / 2, most].map((height) => (
        <g key={height}>
          <line class="gridline" x1={LEFT} x2={WIDTH} y1={y(height)} y2={y(height)} />
          <text x={LEFT - 6} y={y(height) + 3} text-anchor="end">{format(height)}</text>
        </g>
      ))}
      {branches.map(({ from, to, height }, index) => (
        <path key={index} class={`branch ${height <= threshold ? "joined" : ""}`} d={`M${x(from.x)} ${y(from.height)}V${y(height)}H${x(to.x)}V${y(to.height)}`}>
          <title>{format(height)}</title>
        </path>
      ))}
      {heads.length <= MOST_LABELS &&
        order.map((head, place) => {
          const [site, number] = heads[head]!;
          const chosen = site === selectedSite.value && number === selectedHead.value;
          return (
            <text key={head} class={`leaf ${chosen ? "chosen" : ""}`} x={x(place + 0.5)} y={HEIGHT - BOTTOM + 6} transform={`rotate(-90 ${x(place + 0.5)} ${HEIGHT - BOTTOM + 6})`} text-anchor="end" dominant-baseline="central" onClick={() => selectHead(site, number)}>
              {name(head)}
            </text>
          );
        })}
      <line class="cut" data-threshold={threshold} x1={LEFT} x2={WIDTH} y1={y(threshold)} y2={y(threshold)} />
    </svg>
  );
}
