// What the page can do to the model and the selection; used by buttons, keys and commands alike.

import { batch, computed, signal, type Signal } from "@preact/signals";
import { announcement, doc, firstHeads, generation, groupingNames, headCount, headName, isAblated, isLoaded, isMeasuring, lens, loadDocument, matrixView, measures, openName, openSource, openText, pinned, runJob, selectedHead, selectedSite, selectedToken, sites, source, type MeasureTable } from "./state";
import type { AblatedHead, Grouping, ViewDocument } from "./source";
import { say, t } from "./i18n";

/** Whether measures are missing that the model can have: of the open text, which may have been opened just now, or of several texts. */
export function lacksMeasures(isOpened = false): boolean {
  const table = measures.value;
  if (!source.isLive || !doc.value?.capabilities.measure.possible || !doc.value.sites.length) return false;
  return !table || (!table.severalTexts && doc.value.texts.length > 1) || (!table.own.names.length && (isOpened || !doc.value.isFirstText));
}

/** Measure the heads on the open text, and once for a model on its other texts, which can name classes. */
export async function measureHeads(): Promise<void> {
  isMeasuring.value = true;
  if (!measures.value?.own.names.length && (await runJob("measure"))) await loadDocument();
  const texts = doc.value?.texts ?? [];
  if (texts.length > 1 && !measures.value?.severalTexts && (await runJob("measure", { texts }))) await loadDocument();
  isMeasuring.value = false;
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
    measures.value = addMeasure(measures.value ?? { names: [], values: new Float32Array(0), classes: new Map(), texts: "", notes: [], severalTexts: false, own: { names: [], values: new Float32Array(0) } }, name, values);
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

/** The texts of the open run: of the source, if there is one, and of the text. */
export function shownTexts(): { source: string; text: string } {
  const read = (stream: string) => doc.value?.streams[stream]?.[0]?.text ?? "";
  return { source: read("source"), text: read("text") };
}

/** Texts that the screens work on, one a line: those that the model was opened with, else the open one, until they are edited. */
export const givenTexts = signal<string | null>(null);
export const openTexts = computed(() => {
  const rows = ["source", "text"].flatMap((stream) => doc.value?.streams[stream]?.[0] ?? []);
  return givenTexts.value ?? (doc.value?.texts.join("\n") || rows.map((row) => row.text || row.words.join(" ")).join("\t"));
});
export const textLines = computed(() => openTexts.value.split("\n").filter((line) => line.trim()));

/** Read a text; an encoder-decoder model writes the target of a source that has none. */
export async function runText(text: string, source = ""): Promise<void> {
  const before = [openText.value, openSource.value];
  if (!(await runJob("text", source ? { text, source } : { text }))) return;
  await loadDocument();
  batch(() => {
    [openText.value, openSource.value, groupingNames.value] = [text, source, []];
    if (before[0] !== text || before[1] !== source) selectedToken.value = null;
  });
  await measureHeads();
}

/** Open another model or trace of the list of the server; everything that belongs to this one is left behind. */
export function openOther(name: string): void {
  location.hash = `#/map${name ? `?${new URLSearchParams({ open: name })}` : ""}`;
  location.reload();
}

/** Whether the run that the server has open is that of the texts of an address; without texts, the one that it started with. */
export function isRunOf(found: ViewDocument, { text, source: from }: { text: string; source: string }): boolean {
  if (!text && !from) return found.isFirstText;
  const read = (stream: string) => found.streams[stream]?.[0]?.text ?? "";
  return (!text || read("text") === text) && read("source") === from;
}

/** Show what the address names, again if another window has opened something else, and measure its heads. */
export async function reopenAddress(): Promise<void> {
  const isOpened = await openAddress();
  await loadDocument();
  if (isLoaded.value && lacksMeasures(isOpened)) void measureHeads();
}

/** Let the server show what the address names; returns whether it had something else open, as another window or an earlier visit may have left it. */
export async function openAddress(): Promise<boolean> {
  source.revision = null;
  const found = source.isLive ? await source.document().catch(() => null) : null;
  if (!found) return false;
  const texts = { text: openText.value, source: openSource.value };
  const isModel = found.opened === openName.value;
  const isOpen = isModel && isRunOf(found, texts);
  if (!isModel || (!isOpen && !texts.text && !texts.source)) await runJob("open", { name: openName.value });
  if (!isOpen && (texts.text || texts.source)) await runJob("text", texts.source ? texts : { text: texts.text });
  const grouping = Object.fromEntries(GROUPINGS.map((name) => [name, groupingNames.value.includes(name)])) as unknown as Grouping;
  if (GROUPINGS.some((name) => grouping[name] !== (isOpen && found.grouping[name]))) await runJob("group", { ...grouping });
  return !isOpen;
}

/** Switches that merge tokens or leave some out. */
export const GROUPINGS = ["words", "special", "first"] as const;

/** Merge subwords into words, or leave special tokens or the first token out, in everything that is shown. */
export async function groupTokens(grouping: Grouping): Promise<void> {
  if (!(await runJob("group", { ...grouping }))) return;
  batch(() => {
    groupingNames.value = Object.entries(grouping).flatMap(([name, isOn]) => (isOn ? [name] : []));
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
