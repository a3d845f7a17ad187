// All state of the page as signals. What a link must restore is mirrored in the URL hash.

import { batch, computed, effect, signal, type Signal, useSignal, useSignalEffect } from "@preact/signals";
import { type AblatedHead, type JobEvent, makeSource, type Message, otherWindow, type PageError, RequestError, type Site, type ViewDocument } from "./source";
import { between, keepInUrl, keepUrl, oneOf, toFlag, toList, toNumber, toNumberOrNull, toText, urlSignal } from "./url_state";

export const source = makeSource();
const CHEAP = { tokens: 256, parameters: 5e7 };
export const SCREENS = ["open", "map", "head", "text", "classify", "similarity", "lab", "prune", "steps", "diff", "cost"] as const;
export type ScreenId = (typeof SCREENS)[number];
/** A range of queries and of keys. */
export interface View {
  q0: number;
  q1: number;
  k0: number;
  k1: number;
}
export const SCALES = ["sqrt", "lin", "log"] as const;
export type Scale = (typeof SCALES)[number];
export const LENSES = ["weight", "value", "effect"] as const;
export type Lens = (typeof LENSES)[number];

// --- what the URL holds --------------------------------------------------------------------------------

export const screen = signal<ScreenId>("map");
export const selectedSite = urlSignal("site", 0, toNumber);
export const selectedHead = urlSignal("head", 0, toNumber);
export const selectedToken = urlSignal<number | null>("position", null, toNumberOrNull);
export const cellMode = urlSignal("cells", "thumbnail", toText); // "thumbnail", "class" or a measure
export const headForm = urlSignal("form", "matrix", oneOf(["matrix", "lines", "arcs", "points", "channels"]));
export const lens = urlSignal<Lens>("lens", "weight", oneOf(LENSES));
export const scale = urlSignal<Scale>("scale", "sqrt", oneOf(SCALES));
export const sortHeads = urlSignal("sort", "index", toText);
/** The Map shows this many heads, the strongest by a measure; 0 is all. */
export const topCount = urlSignal("top", 0, toNumber);
/** The first and last layer that the Map shows; none is all. */
export const layerRange = urlSignal<number[]>("layers", [], (text) => (/^\d+,\d+$/.test(text) ? toList(text).map(toNumber) : []));
/** Whether a head that is mostly a sink is shown as one, whatever else it does. */
export const sinksFirst = urlSignal("sinks", false, toFlag);
export const scatterX = urlSignal("x", "entropy", toText);
export const scatterY = urlSignal("y", "sink", toText);
export const scatterColor = urlSignal("color", "class", toText); // "class" or a measure
export const matrixView = urlSignal<View | null>("part", null, readView); // what the Head screen shows; null is all
export const rowMarginal = urlSignal("rows", "entropy", oneOf(["entropy", "maximum"]));
/** The cell of the matrix that a click keeps. */
export const lockedCell = urlSignal<View | null>("cell", null, readView);
export const selectedStep = urlSignal("step", 0, toNumber); // of the Steps screen
export const selectedKey = urlSignal<number | null>("key", null, toNumberOrNull); // of which the Steps screen shows the numbers
/** How the Text screen shows heads: the selected one, the mean of it and the pinned ones, or two over each other. */
export const textMode = urlSignal("heads", "one", oneOf(["one", "set", "two", "all"]));
/** How weights of several heads become one number. */
export const COMBINATIONS = ["mean", "max"] as const;
export const combination = urlSignal("combine", "mean", oneOf(COMBINATIONS));
/** What the Text screen shows of all heads: of the layer, of all layers over the same tokens, or the rollout. */
export const AGGREGATES = ["mean.layer", "max.layer", "mean.all", "max.all", "rollout.layer"] as const;
export const aggregate = urlSignal("all", "mean.layer", oneOf(AGGREGATES));
/** Keys that the Text screen leaves out; the weights on the others are divided by their sum. */
export const excludedTokens = urlSignal<number[]>("leave", [], (text) => toList(text).map(toNumber));
export const secondHead = urlSignal("second", "", toText); // "site.head", the other of two heads
/** Lines, arcs and lists leave out pairs below this share of the largest weight. */
export const leastShare = urlSignal("least", 0.02, between(0, 1));
/** Tokens of the Text screen whose weights are added to those of the kept one. */
export const addedTokens = urlSignal<number[]>("add", [], (text) => toList(text).map(toNumber));
/** What the Diff screen compares the open text with. */
export const DIFF_KINDS = ["text", "ablated", "other"] as const;
export type DiffKind = (typeof DIFF_KINDS)[number];
export const diffKind = urlSignal<DiffKind>("with", "text", oneOf(DIFF_KINDS));
const tableScreens = signal<readonly ScreenId[]>([]);
/** Whether the screen shows tables in place of charts; each screen keeps its own choice. */
export const showsTable = {
  get value(): boolean {
    return tableScreens.value.includes(screen.value);
  },
  set value(isTable: boolean) {
    const others = tableScreens.value.filter((id) => id !== screen.value);
    tableScreens.value = isTable ? [...others, screen.value] : others;
  },
};
keepInUrl("table", showsTable, toFlag);
/** The text that the model reads, its source, and the model or trace; "" is what the server was started with. */
/** The entry of `headwise learn` that the address came from, such as 003-2.2. */
export const learnEntry = urlSignal("learn", "", (text) => (/^00\d-[\w.]+$/.test(text) ? text : ""));

export const openText = urlSignal("text", "", toText, "work");
export const openSource = urlSignal("source", "", toText, "work");
export const openName = urlSignal("open", "", toText, "work");
/** The switches that merge tokens or leave some out. */
export const groupingNames = urlSignal<string[]>("group", [], toList, "work");
export const theme = urlSignal("theme", "", oneOf(["", "light", "dark"]), "work");
export const pinned = urlSignal<string[]>("pins", [], toList, "work"); // "site.head"
/** Classes that the user gave to heads, as "site.head=name". */
export const ownClasses = urlSignal<string[]>("classes", [], toList, "work");
export const language = signal<"en" | "zh">(initialLanguage()); // `?lang=`, before the fragment, or that of a file

// --- what it does not ----------------------------------------------------------------------------------

export const doc = signal<ViewDocument | null>(null);
export const loadError = signal<PageError | null>(null);
export const thumbnails = signal<ThumbnailAtlas | null>(null);
export const measures = signal<MeasureTable | null>(null);
/** The running job and the screen that started it. */
export const job = signal<{ kind: string; event: JobEvent; abort: AbortController; screen: ScreenId } | null>(null);
/** Whether the heads are being measured, which can be two jobs. */
export const isMeasuring = signal(false);
/** The error of the last job. One of a text stays on all screens, because the box of the text does. */
export const jobError = signal<(PageError & { isOfText?: boolean }) | null>(null);
export const isLoaded = signal(false);
export const overlay = signal<"" | "commands" | "keys" | "export">("");
export const announcement = signal("");
/** The new tokens of the last generation: position of the first, and their number. */
export const generation = signal<{ first: number; count: number; revision: number } | null>(null);

/** The 64 x 64 pictures of all heads, and the masks that they share. */
export interface ThumbnailAtlas {
  pictures: Uint8Array;
  masks: Uint8Array;
  maskOfHead: Int32Array;
}

export interface HeadClass {
  name: string;
  score: number;
  evidence: string;
  /** Whether the user gave the head this class. */
  isOwn?: boolean;
}

/** Measures of all heads: [head, measure] -> value, low, high, chance; and the classes of each head. */
export interface MeasureTable {
  names: string[];
  values: Float32Array;
  classes: Map<number, HeadClass[]>;
  texts: string;
  notes: string[];
  /** Whether they are over several texts; those of the open text alone are then in `own`. */
  severalTexts: boolean;
  own: { names: string[]; values: Float32Array };
}

export const sites = computed<Site[]>(() => doc.value?.sites ?? []);
/** Number of heads before each site, so that heads can be counted through the whole model. */
export const firstHeads = computed(() => {
  let count = 0;
  return sites.value.map((site) => (count += site.heads) - site.heads);
});
const ownClassNames = computed(() => new Map(readClasses(ownClasses.value).map(([site, head, name]) => [firstHeads.value[site]! + head, name] as const)));
/** The kinds of attention of the model, such as "encoder self" and "decoder cross". */
export const stacks = computed(() => [...new Set(sites.value.map((site) => `${site.stack} ${site.kind}`))]);
/** Whether a run of the open text takes little, so that screens compute without being asked. */
export const isCheap = computed(() => {
  const isSmall = Object.values(doc.value?.streams ?? {}).every(([row]) => (row?.ids.length ?? 0) <= CHEAP.tokens);
  return source.isLive && isSmall && (doc.value?.memory?.parameters ?? 0) <= CHEAP.parameters;
});
export const headCount = computed(() => sites.value.reduce((sum, site) => sum + site.heads, 0));
export const site = computed<Site | undefined>(() => sites.value[selectedSite.value]);
export const headIndex = computed(() => (firstHeads.value[selectedSite.value] ?? 0) + selectedHead.value);

const ablatedNames = computed(() => new Set(doc.value?.ablated.map((item) => `${item.site}.${item.head}`)));

export function isAblated(siteNumber: number, head: number): boolean {
  return ablatedNames.value.has(`${siteNumber}.${head}`);
}

export function headName(siteNumber: number, head: number): string {
  const item = sites.value[siteNumber];
  if (!item) return "";
  const several = stacks.value.length > 1;
  const letter = item.kind === "cross" ? "X" : item.stack === "encoder" ? "E" : item.stack === "decoder" ? "D" : "L";
  return `${several ? letter : "L"}${item.layer} H${head}`;
}

export function measureOf(index: number, name: string, part = 0, table: { names: string[]; values: Float32Array } | null = measures.value): number {
  const column = table?.names.indexOf(name) ?? -1;
  return !table || column < 0 ? NaN : table.values[(index * table.names.length + column) * 4 + part]!;
}

/** Whether heads have classes, which one text alone does not give. */
export const hasClasses = computed(() => (measures.value?.classes.size ?? 0) > 0);

/** The classes of a head by its measures, the likeliest first; "sink" is the last of them unless sinks come first. */
export function measuredClasses(index: number): HeadClass[] {
  const found = measures.value?.classes.get(index) ?? [];
  return sinksFirst.value ? [...found].sort((a, b) => b.score - a.score) : found;
}

/** The class that the user gave a head, or undefined. */
export function ownClass(index: number): string | undefined {
  return ownClassNames.value.get(index);
}

/** The classes of a head: the one that the user gave it, then those by its measures. */
export function classesOf(index: number): HeadClass[] {
  const own = ownClass(index);
  const measured = measuredClasses(index);
  return own === undefined ? measured : [{ name: own, score: NaN, evidence: "", isOwn: true }, ...measured.filter(({ name }) => name !== own)];
}

/** Give a head a class of one's own; "" takes it back. */
export function setOwnClass(siteNumber: number, head: number, name: string): void {
  const place = `${siteNumber}.${head}=`;
  const others = ownClasses.value.filter((entry) => !entry.startsWith(place));
  ownClasses.value = name ? [...others, place + name] : others;
}

export function selectHead(siteNumber: number, head: number): void {
  const count = sites.value[siteNumber]?.heads ?? 0;
  if (head < 0 || head >= count) return;
  batch(() => {
    selectedSite.value = siteNumber;
    selectedHead.value = head;
  });
}

/** Move the selection by layers and heads; stays inside the model. */
export function moveHead(layers: number, heads: number): void {
  const siteNumber = Math.min(Math.max(selectedSite.value + layers, 0), sites.value.length - 1);
  const count = sites.value[siteNumber]?.heads ?? 1;
  selectHead(siteNumber, Math.min(Math.max(selectedHead.value + heads, 0), count - 1));
}

// --- loading -------------------------------------------------------------------------------------------

export async function loadDocument(): Promise<void> {
  try {
    const found = await source.document();
    if (source.isLive && found.revision !== source.revision) {
      otherWindow.value = true;
      return;
    }
    const table = found.sites.length ? await source.fetchArrays("measures") : null;
    const before = doc.value; // read only now: a head may have been switched off while the measures came
    const isSameModel = before?.sites.length === found.sites.length && before.sites.every((item, number) => item.name === found.sites[number]!.name);
    batch(() => {
      doc.value = { ...found, ablated: isSameModel ? before!.ablated : [] };
      if (waitingAblated && found.capabilities.ablate.possible) doc.value = { ...doc.value, ablated: parseAblated(waitingAblated) };
      waitingAblated = null;
      loadError.value = null;
      otherWindow.value = false;
      if (!found.sites[selectedSite.value]) selectedSite.value = 0;
      if (selectedHead.value >= (found.sites[selectedSite.value]?.heads ?? 0)) selectedHead.value = 0;
      measures.value = table && readMeasures(table); // with the document, so that the first screen does not move
    });
    if (!found.sites.length) return;
    const pictures = await source.fetchArrays("thumbnails");
    batch(() => {
      isLoaded.value = true;
      thumbnails.value = {
        pictures: pictures.arrays["thumbnails"]!.data as Uint8Array,
        masks: pictures.arrays["masks"]!.data as Uint8Array,
        maskOfHead: pictures.arrays["mask_of_head"]!.data as Int32Array,
      };
    });
  } catch (error) {
    const problem = toPageError(error);
    if (!otherWindow.value && problem.fact !== "error.outdated") loadError.value = problem;
  }
}

function readMeasures(message: Message): MeasureTable | null {
  const names: string[] = message.fields["names"];
  if (!names.length) return null;
  const classes = new Map<number, HeadClass[]>();
  const isWaiting = !message.fields["severalTexts"] && (doc.value?.texts.length ?? 0) > 1; // one text names no class
  for (const item of isWaiting ? [] : message.fields["classes"]) {
    classes.set((firstHeads.value[item.site] ?? 0) + item.head, item.classes);
  }
  return {
    names,
    values: message.arrays["measures"]!.data as Float32Array,
    classes,
    texts: message.fields["texts"],
    notes: message.fields["notes"],
    severalTexts: message.fields["severalTexts"],
    own: { names: message.fields["ownNames"], values: message.arrays["own"]!.data as Float32Array },
  };
}

export function toPageError(error: unknown): PageError {
  if (error instanceof RequestError) return error.detail;
  return { fact: error instanceof Error ? error.message : String(error), remedy: "" };
}

let lastJob: Promise<unknown> = Promise.resolve();

/**
 * Run a job after those before it, with its progress on the page; returns its result, or null if it failed or was
 * cancelled. `makeBody` is called when the job starts; it returns null if the job is not wanted any more.
 */
export function runJob(kind: string, makeBody: Record<string, unknown> | (() => Record<string, unknown> | null) = {}): Promise<any> {
  const asked = screen.value;
  const next = lastJob.then(() => {
    const body = typeof makeBody === "function" ? makeBody() : makeBody;
    return body && startJob(kind, body, asked);
  });
  lastJob = next;
  return next;
}

async function startJob(kind: string, body: Record<string, unknown>, asked: ScreenId): Promise<any> {
  const abort = new AbortController();
  batch(() => {
    jobError.value = null;
    job.value = { kind, event: { state: "queued" }, abort, screen: asked };
  });
  try {
    return await source.runJob({ kind, ...body }, (event) => (job.value = { kind, event, abort, screen: asked }), abort.signal);
  } catch (error) {
    const isOfText = kind === "text";
    if (!abort.signal.aborted && (isOfText || screen.value === asked)) jobError.value = { ...toPageError(error), isOfText };
    return null;
  } finally {
    job.value = null;
  }
}

/** The answer of the source to a path, which follows the signals that make the path; null without one. */
export function useAnswer<T>(makePath: () => string | null, read: (message: Message) => T): { found: Signal<T | null>; error: Signal<PageError | null> } {
  const found = useSignal<T | null>(null);
  const error = useSignal<PageError | null>(null);
  useSignalEffect(() => {
    void doc.value?.revision;
    const path = makePath();
    const abort = new AbortController();
    const show = (value: T | null, problem: PageError | null) => !abort.signal.aborted && batch(() => ([found.value, error.value] = [value, problem]));
    if (path === null) show(null, null);
    else
      source.fetchArrays(path, abort.signal).then(
        (message) => (message.fields["reason"] ? show(null, { fact: message.fields["reason"], remedy: "" }) : show(read(message), null)),
        (reason) => show(null, toPageError(reason)),
      );
    return () => abort.abort();
  });
  return { found, error };
}

/** The path of an answer about the selected head. */
export function headPath(name: string, fields: Record<string, string | number> = {}): string {
  return [`${name}?site=${selectedSite.value}&head=${selectedHead.value}`, ...Object.entries(fields).map(([key, value]) => `${key}=${value}`)].join("&");
}

// --- the URL -------------------------------------------------------------------------------------------

/** A part of the matrix as "q0.q1.k0.k1"; null for anything else. */
function readView(text: string): View | null {
  const [q0 = 0, q1 = 0, k0 = 0, k1 = 0] = text.split(".").map(toNumber);
  return q1 > q0 && k1 > k0 ? { q0, q1, k0, k1 } : null;
}

/** Ablated heads as "site.head", or "site.head.mode.scale" where they are not set to zero. */
function writeAblated(heads: readonly AblatedHead[]): string[] {
  return heads.map(({ site: number, head, mode, scale: factor }) => (mode === "zero" && factor === 0 ? `${number}.${head}` : `${number}.${head}.${mode}.${factor}`));
}

function parseAblated(names: readonly string[]): AblatedHead[] {
  return names.flatMap((name) => {
    const [number = "", head = "", mode = "zero", ...factor] = name.split(".");
    const found = { site: toNumber(number), head: toNumber(head), mode, scale: Number(factor.join(".")) || 0 };
    return found.head < (sites.value[found.site]?.heads ?? 0) ? [found] : [];
  });
}

let waitingAblated: string[] | null = null; // heads of the address, until the document is there
keepInUrl(
  "off",
  {
    get value() {
      return doc.value ? writeAblated(doc.value.ablated) : (waitingAblated ?? []);
    },
    set value(names: string[]) {
      if (doc.value) doc.value = { ...doc.value, ablated: parseAblated(names) };
      else waitingAblated = names;
    },
  },
  toList,
  "work",
);

export function isDark(): boolean {
  return theme.value ? theme.value === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Keep the URL, the theme and the language of the document equal to the state. */
export function startHash(): void {
  keepUrl(screen, SCREENS);
  effect(() => {
    void screen.value;
    if (!jobError.peek()?.isOfText) jobError.value = null; // an error belongs to the screen where it was shown
  });
  effect(() => {
    if (theme.value) document.documentElement.dataset["theme"] = theme.value;
    else delete document.documentElement.dataset["theme"];
  });
  effect(() => {
    document.documentElement.lang = language.value;
    const address = new URL(location.href);
    try {
      if ((address.searchParams.get("lang") ?? language.value) !== language.value) {
        address.searchParams.set("lang", language.value); // a reload keeps what was chosen on the page
        history.replaceState(history.state, "", address);
      }
      localStorage.setItem("headwise-language", language.value);
    } catch {
      // a sandboxed frame has no storage
    }
  });
}

function initialLanguage(): "en" | "zh" {
  for (const asked of [new URLSearchParams(location.search).get("lang"), document.documentElement.dataset["language"]])
    if (asked === "en" || asked === "zh") return asked;
  try {
    const kept = localStorage.getItem("headwise-language");
    if (kept === "en" || kept === "zh") return kept;
  } catch {
    // a sandboxed frame has no storage
  }
  return navigator.language?.startsWith("zh") ? "zh" : "en";
}

const SAVE_MS = 300; // after the last change

function writeClasses(classes: readonly (readonly [number, number, string])[]): string[] {
  return classes.map(([site, head, name]) => `${site}.${head}=${name}`);
}

/** The heads of the open model in entries such as "0.1=sink". */
function readClasses(entries: readonly string[]): [number, number, string][] {
  return entries.flatMap((entry) => {
    const [, site = "", head = "", name = ""] = /^(\d+)\.(\d+)=(.+)$/.exec(entry) ?? [];
    const item = doc.value?.sites[Number(site)];
    return name && item && Number(head) < item.heads ? [[Number(site), Number(head), name] as [number, number, string]] : [];
  });
}

/** Show the classes of the trace unless the address names others, and keep changes with the trace. */
export function startClassNames(): void {
  const stored = doc.value?.classes ?? [];
  if (!ownClasses.value.length && stored.length) ownClasses.value = writeClasses(stored);
  if (!source.isLive) return;
  let saved = JSON.stringify(writeClasses(stored));
  let timer = 0;
  effect(() => {
    const entries = ownClasses.value;
    clearTimeout(timer);
    if (JSON.stringify(entries) === saved) return;
    timer = window.setTimeout(() => {
      saved = JSON.stringify(entries);
      source.runJob({ kind: "classes", classes: readClasses(entries) }, () => undefined).catch(() => (saved = ""));
    }, SAVE_MS);
  });
}
