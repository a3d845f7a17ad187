// What the page can do to the model and the selection; used by buttons, keys and commands alike.

import { batch, computed, signal, type Signal } from "@preact/signals";
import { doc, firstHeads, generation, headCount, headName, isAblated, lens, loadDocument, matrixView, measures, pinned, runJob, selectedHead, selectedSite, selectedToken, sites, type MeasureTable } from "./state";
import { announcement } from "./state";
import type { AblatedHead, Grouping } from "./source";
import { say, t } from "./i18n";

export async function measureHeads(): Promise<void> {
  if (await runJob("measure")) await loadDocument();
}

/** Ablate every head alone, and add how much that changes the output to the measures as "importance". */
export async function measureImportance(): Promise<void> {
  const result = (await runJob("sweep")) as { heads: [number, number, number][] } | null;
  if (result) showMeasure("importance", new Map(result.heads.map(([siteNumber, head, change]) => [firstHeads.value[siteNumber]! + head, change])));
}

/** Add a measure of heads, by their number in the model, to those that the page shows. */
export function showMeasure(name: string, values: Map<number, number>): void {
  const current = doc.value;
  if (!current) return;
  const high = [...values.values()].filter(Number.isFinite).reduce((most, value) => Math.max(most, value), 1e-12);
  batch(() => {
    measures.value = addMeasure(measures.value ?? { names: [], values: new Float32Array(0), classes: new Map(), texts: "", notes: [] }, name, values);
    doc.value = { ...current, measures: [...current.measures.filter((item) => item.name !== name), { name, low: 0, high }] };
  });
}

/** A table with one more measure, or with other values of it, without intervals and chance levels. */
function addMeasure(table: MeasureTable, name: string, values: Map<number, number>): MeasureTable {
  const column = table.names.indexOf(name);
  if (column >= 0) {
    const stacked = table.values.slice();
    for (let head = 0; head < headCount.value; head++) stacked[(head * table.names.length + column) * 4] = values.get(head) ?? NaN;
    return { ...table, values: stacked };
  }
  const before = table.names.length;
  const stacked = new Float32Array(headCount.value * (before + 1) * 4).fill(NaN);
  for (let head = 0; head < headCount.value; head++) {
    stacked.set(table.values.subarray(head * before * 4, (head + 1) * before * 4), head * (before + 1) * 4);
    stacked[(head * (before + 1) + before) * 4] = values.get(head) ?? NaN;
  }
  return { ...table, names: [...table.names, name], values: stacked };
}

export async function runText(text: string, source: string): Promise<boolean> {
  const result = await runJob("text", source ? { text, source } : { text });
  if (result) {
    await loadDocument();
    await measureHeads();
  }
  return result !== null;
}

/** Merge subwords into words, or leave special tokens or the first token out, in everything that is shown. */
export async function groupTokens(grouping: Grouping): Promise<void> {
  if (!(await runJob("group", { ...grouping }))) return;
  batch(() => {
    selectedToken.value = null;
    matrixView.value = null;
    lens.value = "weight";
  });
  await loadDocument();
}

/** Whether tokens are merged or left out. */
export const isGrouped = computed(() => Object.values(doc.value?.grouping ?? {}).some(Boolean));

/** Continue the open text by some tokens, and show the first new one. */
export async function generateText(count: number): Promise<void> {
  const found = (await runJob("generate", { count })) as { first: number; count: number; revision: number } | null;
  if (!found) return;
  await loadDocument();
  batch(() => {
    generation.value = found;
    selectedToken.value = found.count ? found.first - 1 : null;
  });
  await measureHeads();
}

/** Whether heads of the selected layer can be ablated, and why not. */
export function ablateReason(siteNumber = selectedSite.value): string {
  const capability = doc.value?.capabilities.ablate;
  if (capability && !capability.possible) return capability.reason;
  const ability = sites.value[siteNumber]?.abilities.ablate;
  return ability && !ability.possible ? ability.reason : "";
}

const undoStack = signal<AblatedHead[][]>([]);
const redoStack = signal<AblatedHead[][]>([]);
export const canUndo = computed(() => undoStack.value.length > 0);
export const canRedo = computed(() => redoStack.value.length > 0);

/** Switch a head off, or on again. The server computes effects when it is asked to. */
export function toggleAblated(siteNumber = selectedSite.value, head = selectedHead.value, mode = "zero", scale = 0): void {
  const current = doc.value;
  if (!current || ablateReason(siteNumber)) {
    announcement.value = say(ablateReason(siteNumber));
    return;
  }
  const off = isAblated(siteNumber, head);
  const ablated = off
    ? current.ablated.filter((item) => item.site !== siteNumber || item.head !== head)
    : [...current.ablated, { site: siteNumber, head, mode, scale }];
  setAblated(ablated);
  announcement.value = `${headName(siteNumber, head)}: ${off ? t("inspector.restore") : t("inspector.ablate")}`;
}

export function setAblated(ablated: AblatedHead[]): void {
  if (!doc.value) return;
  batch(() => {
    undoStack.value = [...undoStack.value, doc.value!.ablated];
    redoStack.value = [];
    doc.value = { ...doc.value!, ablated };
  });
}

/** Show the last set of ablated heads of one stack, and put the present one on the other. */
function moveBetween(from: Signal<AblatedHead[][]>, to: Signal<AblatedHead[][]>): void {
  const last = from.value.at(-1);
  if (!last || !doc.value) return;
  batch(() => {
    from.value = from.value.slice(0, -1);
    to.value = [...to.value, doc.value!.ablated];
    doc.value = { ...doc.value!, ablated: last };
  });
}

export const undoAblation = (): void => moveBetween(undoStack, redoStack);
export const redoAblation = (): void => moveBetween(redoStack, undoStack);

export function togglePin(siteNumber = selectedSite.value, head = selectedHead.value): void {
  const name = `${siteNumber}.${head}`;
  batch(() => {
    pinned.value = pinned.value.includes(name) ? pinned.value.filter((item) => item !== name) : [...pinned.value, name].slice(-8);
  });
}
