// What the Lab is about to compute: modes and tokens; and the jobs that compute it.

import { batch, computed, signal } from "@preact/signals";
import { ablateReason, setAblated, textLines } from "./actions";
import type { Quality } from "./screens/prune_result";
import { doc, runJob, selectedHead, selectedSite, sites } from "./state";
import { between, keepInUrl, oneOf, readRanges, toList, toText, urlSignal, writeRanges } from "./url_state";

export const MODES = ["zero", "mean", "resample", "noise"] as const;
export type Mode = (typeof MODES)[number];

export const mode = urlSignal<Mode>("mode", "zero", oneOf(MODES), "work");
export const factor = urlSignal("factor", 0, between(0, 1), "work"); // of the output, in the mode "zero"
export const chosenTokens = signal<Record<string, number[]>>({}); // positions by stream; none: all
keepInUrl(
  "tokens",
  {
    get value() {
      return Object.entries(chosenTokens.value).flatMap(([stream, positions]) => (positions.length ? [[stream, ...writeRanges(positions)].join(".")] : []));
    },
    set value(streams: string[]) {
      chosenTokens.value = Object.fromEntries(streams.map(readPositions));
    },
  },
  toList,
  "work",
);
export const resampleText = urlSignal("resample", "", toText, "work");
export const randomSets = urlSignal("random", 5, (text) => Math.round(between(0, 20)(text)), "work");

/** A stream and its positions from "stream.3-5.9". */
function readPositions(text: string): [string, number[]] {
  const [stream = "", ...ranges] = text.split(".");
  return [stream, readRanges(ranges)];
}

export interface NextToken {
  token: string;
  before: number;
  after: number;
}

/** The answer of the job ablate. Mirrors `compute_effect`. */
export interface Effect {
  request: string; // what was asked, to tell whether it is still what is chosen
  loss: { before: number | null; after: number | null };
  lossByPosition: { before: number[]; after: number[] };
  kl: number | null;
  klByPosition: (number | null)[];
  nextAt: NextToken[][];
  nextFrom: number;
  outputs: "lab.divergence" | "lab.cosine";
  random: { change: number; loss: number | null }[];
  command: string; // that removes these heads, or ""
  check: Check;
}

/** Whether a copy of the model without the weights of these heads gives the same outputs. Mirrors `check_by_removal`. */
export type Check = { possible: false; reason: string } | { possible: true; apart: number; allowed: number; largest: number; same: boolean; areLogits: boolean };

/** The answer of the job continue: the new tokens with all heads, and without the chosen ones. Mirrors `continue_both`. */
export type Continued = { request: string } & ({ possible: false; reason: string } | { possible: true; before: string[]; after: string[] });

/** The answer of the job evaluate: loss and accuracy over several texts. Mirrors `evaluate_texts`. */
export interface Evaluation extends Quality {
  request: string;
  objective: string;
  notes: string[];
}

export const continued = signal<Continued | null>(null);

export const effect = signal<Effect | null>(null);
/** The heads that are off; while none is, the selected one, to show what it would change. */
function labHeads(): [number, number, string, number][] {
  const off = doc.value?.ablated ?? [];
  if (off.length) return off.map((item) => [item.site, item.head, item.mode, item.scale]);
  return sites.value.length && !ablateReason() ? [[selectedSite.value, selectedHead.value, modeFields().mode, modeFields().scale]] : [];
}

/** The arguments of the job for what is chosen now. */
export function labRequest(): Record<string, unknown> {
  const heads = labHeads();
  return { heads, tokens: openTokens(), resampleText: resampleText.value, random: randomSets.value };
}

/** The open text, to tell results of another one from new ones. */
export const textKey = computed(() => Object.values(doc.value?.streams ?? {}).map(([row]) => row?.ids.join(" ")).join("|"));
/** Everything that the effect follows from. */
export const requestKey = computed(() => JSON.stringify([labRequest(), textKey.value]));

export const evaluation = signal<Evaluation | null>(null);
export const evaluationKey = computed(() => JSON.stringify([requestKey.value, textLines.value]));

/** Compute the loss over the evaluation set, with all heads and without the chosen ones. */
export async function evaluate(): Promise<void> {
  const request = evaluationKey.value;
  const result = await runJob("evaluate", { ...labRequest(), texts: textLines.value });
  if (result) evaluation.value = { ...result, request };
}

/** The chosen positions that the open text has. */
export function openTokens(): Record<string, number[]> {
  const entries = Object.entries(chosenTokens.value).map(([stream, positions]) => {
    const count = doc.value?.streams[stream]?.[0]?.ids.length ?? 0;
    return [stream, positions.filter((place) => place < count)] as const;
  });
  return Object.fromEntries(entries.filter(([, positions]) => positions.length));
}

/** Compute the effect, unless other heads were chosen before the job could start. */
export async function computeEffect(): Promise<void> {
  const request = requestKey.value;
  const result = await runJob("ablate", () => (request === requestKey.value ? labRequest() : null));
  if (result) effect.value = { ...result, request };
}

/** The position where the outputs change most, of those with next tokens if there are some. */
export function mostChanged({ klByPosition, nextFrom, nextAt }: Pick<Effect, "klByPosition" | "nextFrom" | "nextAt">): number {
  const change = (position: number) => klByPosition[position] ?? -1;
  let best = nextAt.length ? nextFrom : 0;
  klByPosition.forEach((_, position) => position >= best && change(position) > change(best) && (best = position));
  return best;
}

/** Continue the open text with all heads and without the chosen ones. */
export async function continueText(): Promise<void> {
  const request = requestKey.value;
  const result = await runJob("continue", labRequest());
  if (result) continued.value = { ...result, request };
}

/** Give all ablated heads another mode, and the heads that follow too. */
export function changeMode(next: Mode, scale = factor.value): void {
  batch(() => {
    mode.value = next;
    factor.value = scale;
    const ablated = doc.value?.ablated ?? [];
    if (ablated.length) setAblated(ablated.map((item) => ({ ...item, ...modeFields() })));
  });
}

export function modeFields(): { mode: Mode; scale: number } {
  return { mode: mode.value, scale: mode.value === "zero" ? factor.value : 0 };
}

export function toggleToken(stream: string, index: number): void {
  const before = chosenTokens.value[stream] ?? [];
  const after = before.includes(index) ? before.filter((place) => place !== index) : [...before, index].sort((a, b) => a - b);
  chosenTokens.value = { ...chosenTokens.value, [stream]: after };
}
