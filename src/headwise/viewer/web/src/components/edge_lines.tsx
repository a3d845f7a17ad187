// The edges of a circuit over the grid of the Map: which heads, MLPs and embeddings make the open text go on otherwise than another.

import { signal, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { isGrouped } from "../actions";
import { format, t } from "../i18n";
import { textKey } from "../lab_state";
import { doc, job, language, runJob, selectedHead, selectedSite, sites, source } from "../state";
import { Button, Notes, Panel, PlainTable } from "./basics";
import { NodeName, readNode, signed } from "./why_panel";

/** The answer of the job edges. Mirrors `score_text_edges`. */
interface Edges {
  text: string; // the open text that they belong to
  words: [string, string];
  clean: number;
  corrupt: number;
  count: number;
  edges: [sender: string, receiver: string, score: number, patched: number | null][];
  agreement: [count: number, correlation: number | null] | null;
  notes: string[];
}

const found = signal<Edges | null>(null);
const shownEdges = () => (found.value?.text === textKey.value ? found.value : null);

/** Asks for another text, and lists the edges. */
export function EdgePanel(): JSX.Element | null {
  const other = useSignal("");
  const tokens = useSignal("");
  const isDecoder = sites.value.length > 0 && sites.value.every((site) => site.stack === "decoder");
  if (!source.isLive || !isDecoder || !doc.value?.capabilities.ablate.possible || isGrouped.value) return null;
  const canRun = other.value.trim() !== "" && !job.value;
  const compute = async () => {
    const text = textKey.value;
    const result = await runJob("edges", { other: other.value, tokens: tokens.value });
    if (result) found.value = { ...result, text };
  };
  const edges = shownEdges();
  return (
    <Panel title={t("edges.title")} class="edge-panel">
      <div class="stack">
        <p class="t3 sm">{t("edges.hint")}</p>
        <input type="text" value={other.value} placeholder={t("edges.other")} aria-label={t("edges.other")} onInput={(event) => (other.value = event.currentTarget.value)} />
        <div class="row wrap">
          <input type="text" value={tokens.value} placeholder={t("edges.tokens")} aria-label={t("edges.tokens")} onInput={(event) => (tokens.value = event.currentTarget.value)} />
          <Button aria-disabled={!canRun} onClick={() => canRun && void compute()}>{t("edges.show")}</Button>
          {edges && <Button kind="quiet" onClick={() => (found.value = null)}>{t("edges.hide")}</Button>}
        </div>
        {edges && <EdgeTable {...edges} />}
      </div>
    </Panel>
  );
}

function EdgeTable({ words, clean, corrupt, count, edges, agreement, notes }: Edges): JSX.Element {
  const [first, second] = words.map((word) => JSON.stringify(word)) as [string, string];
  return (
    <div class="stack" data-testid="edges">
      <p class="sm t2">{t("edges.metric", { first, second, clean: format(clean), other: format(corrupt) })}</p>
      <p class="t3 xs">{t("edges.explain", { shown: edges.length, count: count.toLocaleString(language.value) })} {agreement && agreement[1] !== null && t("edges.agreement", { count: agreement[0], correlation: format(agreement[1]) })}</p>
      <Notes notes={notes} />
      <div class="pairs">
        <PlainTable
          titles={[t("edges.from"), t("edges.to"), `#${t("whyKey.part")}`, `#${t("edges.patched")}`]}
          rows={edges.map(([sender, receiver, score, patched]) => [<NodeName name={sender} />, <NodeName name={receiver} />, signed(score), patched === null ? "" : signed(patched)])}
        />
      </div>
    </div>
  );
}

interface Point {
  x: number;
  y: number;
}

/** Where the parts of a model lie on the grid, in its pixels: heads in their cells, MLPs below the label of their layer. */
export interface GridPlaces {
  width: number;
  height: number;
  cell: number;
  /** The middle of the upper edge of a cell; null if the head is not shown. */
  head: (site: number, head: number) => Point | null;
  /** The lower end of the label of a layer. */
  layer: (layer: number) => Point | null;
}

const INPUT_PLACES: Record<string, number> = { q: -0.3, k: 0, v: 0.3 }; // of a cell, from its middle
const THINNEST = 1;
const THICKEST = 5;

/** One line for each edge between parts that the grid shows; those of the selected head stand out. */
export function EdgeLines({ places }: { places: GridPlaces }): JSX.Element | null {
  const edges = shownEdges()?.edges ?? [];
  if (!edges.length) return null;
  const most = Math.max(...edges.map(([, , score]) => Math.abs(score)), 1e-12);
  const isChosen = (name: string) => ((node) => node.site === selectedSite.value && node.head === selectedHead.value)(readNode(name));
  const anyChosen = edges.some((edge) => isChosen(edge[0]) || isChosen(edge[1]));
  const lines = edges.flatMap(([sender, receiver, score]) => {
    const [from, to] = [findPoint(places, sender, true), findPoint(places, receiver, false)];
    if (!from || !to) return [];
    const isStrong = !anyChosen || isChosen(sender) || isChosen(receiver);
    return [{ sender, receiver, score, from, to, isStrong }];
  });
  const names = new Map(lines.flatMap(({ sender, receiver, from, to }) => [[sender, from], [receiver, to]] as const).filter(([name]) => readNode(name).site < 0));
  return (
    <svg class="edge-lines" aria-hidden="true" width={places.width} height={places.height}>
      {lines.map(({ sender, receiver, score, from, to, isStrong }) => (
        <path key={`${sender} ${receiver}`} class={`${score < 0 ? "less" : "more"} ${isStrong ? "" : "dim"}`} stroke-width={THINNEST + (THICKEST - THINNEST) * (Math.abs(score) / most)} d={curve(from, to)} />
      ))}
      {[...names].map(([name, { x, y }]) => (
        <g key={name} transform={`translate(${x} ${y})`}>
          <circle r="8" />
          <text dy="3.5">{name === "embedding" ? "E" : name === "logits" ? "Z" : "M"}</text>
        </g>
      ))}
    </svg>
  );
}

/** Where an edge begins or ends; null if the part is not shown. */
function findPoint(places: GridPlaces, name: string, isSender: boolean): Point | null {
  const { site, head, input, mlp } = readNode(name);
  if (mlp >= 0) return places.layer(mlp);
  if (name === "embedding") return { x: places.width / 2, y: -10 };
  if (name === "logits") return { x: places.width / 2, y: places.height + 10 };
  const top = site < 0 ? null : places.head(site, head);
  return top && { x: top.x + places.cell * (INPUT_PLACES[input] ?? 0), y: top.y + (isSender ? places.cell : 0) };
}

function curve(from: Point, to: Point): string {
  const bend = Math.max(12, Math.abs(to.y - from.y) / 2);
  return `M${from.x} ${from.y}C${from.x} ${from.y + bend} ${to.x} ${to.y - bend} ${to.x} ${to.y}`;
}
