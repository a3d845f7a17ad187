// All state of the page as signals. What a link must restore is mirrored in the URL hash.

import { batch, computed, effect, signal } from "@preact/signals";
import { makeSource, RequestError, type JobEvent, type Message, type PageError, type Site, type ViewDocument } from "./source";

export const source = makeSource();
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
export const selectedSite = signal(0);
export const selectedHead = signal(0);
export const selectedToken = signal<number | null>(null);
export const cellMode = signal("thumbnail"); // "thumbnail", "class" or a measure
export const headForm = signal<"matrix" | "lines" | "arcs" | "points" | "channels">("matrix");
export const lens = signal<Lens>("weight");
export const scale = signal<Scale>("sqrt");
export const sortHeads = signal("index");
/** The Map shows this many heads, the strongest by a measure; 0 is all. */
export const topCount = signal(0);
/** The first and last layer that the Map shows; none is all. */
export const layerRange = signal<number[]>([]);
export const scatterX = signal("entropy");
export const scatterY = signal("sink");
export const scatterColor = signal("class"); // "class" or a measure
export const rowMarginal = signal<"entropy" | "maximum">("entropy");
export const matrixView = signal<View | null>(null); // the part of the matrix that the Head screen shows; null is all
export const language = signal<"en" | "zh">(initialLanguage());
export const theme = signal<"" | "light" | "dark">("");
export const selectedStep = signal(0); // of the Steps screen
export const selectedKey = signal<number | null>(null); // position of the key whose numbers the Steps screen shows
/** How the Text screen shows heads: the selected one, the mean of it and the pinned ones, or two over each other. */
export const textMode = signal<"one" | "set" | "two" | "all">("one");
/** How weights of several heads become one number. */
export const COMBINATIONS = ["mean", "max"] as const;
export const combination = signal<(typeof COMBINATIONS)[number]>("mean");
/** What the Text screen shows of all heads: of the layer, of all layers over the same tokens, or the rollout. */
export const AGGREGATES = ["mean.layer", "max.layer", "mean.all", "max.all", "rollout.layer"] as const;
export const aggregate = signal<(typeof AGGREGATES)[number]>("mean.layer");
/** Keys that the Text screen leaves out; the weights on the others are divided by their sum. */
export const excludedTokens = signal<number[]>([]);
/** Whether the Head screen lists the tokens that the head writes. */
export const showsWritten = signal(false);
export const secondHead = signal(""); // "site.head", the other of two heads
/** Classes that the user gave to heads, as "site.head=name". */
export const ownClasses = signal<string[]>([]);
/** Lines, arcs and lists leave out pairs below this share of the largest weight. */
export const leastShare = signal(0.02);
/** Tokens of the Text screen whose weights are added to those of the kept one. */
export const addedTokens = signal<number[]>([]);
/** What the Diff screen compares the open text with. */
export const DIFF_KINDS = ["text", "ablated", "other"] as const;
export type DiffKind = (typeof DIFF_KINDS)[number];
export const diffKind = signal<DiffKind>("text");
export const pinned = signal<string[]>([]); // "site.head"

// --- what it does not ----------------------------------------------------------------------------------

export const doc = signal<ViewDocument | null>(null);
export const loadError = signal<PageError | null>(null);
export const thumbnails = signal<ThumbnailAtlas | null>(null);
export const measures = signal<MeasureTable | null>(null);
export const job = signal<{ kind: string; event: JobEvent; abort: AbortController } | null>(null);
export const jobError = signal<PageError | null>(null);
export const isLoaded = signal(false);
export const showsTable = signal(false);
export const overlay = signal<"" | "commands" | "keys" | "text" | "export">("");
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
}

export const sites = computed<Site[]>(() => doc.value?.sites ?? []);
/** Number of heads before each site, so that heads can be counted through the whole model. */
export const firstHeads = computed(() => {
  let count = 0;
  return sites.value.map((site) => (count += site.heads) - site.heads);
});
const ownClassNames = computed(() => {
  const entries = ownClasses.value.map((entry) => {
    const [, site = "", head = "", name = ""] = /^(\d+)\.(\d+)=(.+)$/.exec(entry) ?? [];
    return [(firstHeads.value[Number(site)] ?? NaN) + Number(head), name] as const;
  });
  return new Map(entries.filter(([index, name]) => Number.isFinite(index) && name));
});
/** The kinds of attention of the model, such as "encoder self" and "decoder cross". */
export const stacks = computed(() => [...new Set(sites.value.map((site) => `${site.stack} ${site.kind}`))]);
export const headCount = computed(() => sites.value.reduce((sum, site) => sum + site.heads, 0));
export const site = computed<Site | undefined>(() => sites.value[selectedSite.value]);
export const headIndex = computed(() => (firstHeads.value[selectedSite.value] ?? 0) + selectedHead.value);

export function isAblated(siteNumber: number, head: number): boolean {
  return doc.value?.ablated.some((item) => item.site === siteNumber && item.head === head) ?? false;
}

export function headName(siteNumber: number, head: number): string {
  const item = sites.value[siteNumber];
  if (!item) return "";
  const several = stacks.value.length > 1;
  const letter = item.kind === "cross" ? "X" : item.stack === "encoder" ? "E" : item.stack === "decoder" ? "D" : "L";
  return `${several ? letter : "L"}${item.layer} H${head}`;
}

export function measureOf(index: number, name: string, part = 0): number {
  const table = measures.value;
  const column = table?.names.indexOf(name) ?? -1;
  return !table || column < 0 ? NaN : table.values[(index * table.names.length + column) * 4 + part]!;
}

/** The classes of a head by its measures, the likeliest first. */
export function measuredClasses(index: number): HeadClass[] {
  return measures.value?.classes.get(index) ?? [];
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
    const before = doc.value;
    const isSameModel = before?.sites.length === found.sites.length && before.sites.every((item, number) => item.name === found.sites[number]!.name);
    batch(() => {
      doc.value = isSameModel ? { ...found, ablated: before!.ablated } : found; // heads are switched off on the page
      loadError.value = null;
      if (!found.sites[selectedSite.value]) selectedSite.value = 0;
      if (selectedHead.value >= (found.sites[selectedSite.value]?.heads ?? 0)) selectedHead.value = 0;
    });
    if (!found.sites.length) return;
    const [pictures, table] = await Promise.all([source.fetchArrays("thumbnails"), source.fetchArrays("measures")]);
    batch(() => {
      isLoaded.value = true;
      thumbnails.value = {
        pictures: pictures.arrays["thumbnails"]!.data as Uint8Array,
        masks: pictures.arrays["masks"]!.data as Uint8Array,
        maskOfHead: pictures.arrays["mask_of_head"]!.data as Int32Array,
      };
      measures.value = readMeasures(table);
    });
  } catch (error) {
    loadError.value = toPageError(error);
  }
}

function readMeasures(message: Message): MeasureTable | null {
  const names: string[] = message.fields["names"];
  if (!names.length) return null;
  const classes = new Map<number, HeadClass[]>();
  for (const item of message.fields["classes"]) {
    classes.set((firstHeads.value[item.site] ?? 0) + item.head, item.classes);
  }
  return {
    names,
    values: message.arrays["measures"]!.data as Float32Array,
    classes,
    texts: message.fields["texts"],
    notes: message.fields["notes"],
  };
}

export function toPageError(error: unknown): PageError {
  if (error instanceof RequestError) return error.detail;
  return { fact: error instanceof Error ? error.message : String(error), remedy: "" };
}

/** Run a job with its progress on the page; returns its result, or null if it failed or was cancelled. */
export async function runJob(kind: string, body: Record<string, unknown> = {}): Promise<any> {
  if (job.value) return null;
  const abort = new AbortController();
  batch(() => {
    jobError.value = null;
    job.value = { kind, event: { state: "queued" }, abort };
  });
  try {
    return await source.runJob({ kind, ...body }, (event) => (job.value = { kind, event, abort }), abort.signal);
  } catch (error) {
    if (!abort.signal.aborted) jobError.value = toPageError(error);
    return null;
  } finally {
    job.value = null;
  }
}

// --- the URL -------------------------------------------------------------------------------------------

const HASH_FIELDS: [string, { value: unknown }, (text: string) => unknown][] = [
  ["site", selectedSite, toNumber],
  ["head", selectedHead, toNumber],
  ["position", selectedToken, (text) => (text === "" ? null : toNumber(text))],
  ["cells", cellMode, (text) => text],
  ["form", headForm, oneOf(["matrix", "lines", "arcs", "points", "channels"])],
  ["lens", lens, oneOf([...LENSES])],
  ["scale", scale, oneOf([...SCALES])],
  ["sort", sortHeads, (text) => text],
  ["top", topCount, toNumber],
  ["layers", layerRange, (text) => (/^\d+,\d+$/.test(text) ? text.split(",").map(toNumber) : [])],
  ["x", scatterX, (text) => text],
  ["y", scatterY, (text) => text],
  ["color", scatterColor, (text) => text],
  ["part", matrixView, readView],
  ["rows", rowMarginal, oneOf(["entropy", "maximum"])],
  ["step", selectedStep, toNumber],
  ["key", selectedKey, (text) => (text === "" ? null : toNumber(text))],
  ["pins", pinned, (text) => text.split(",").filter(Boolean)],
  ["heads", textMode, oneOf(["one", "set", "two", "all"])],
  ["combine", combination, oneOf([...COMBINATIONS])],
  ["all", aggregate, oneOf([...AGGREGATES])],
  ["leave", excludedTokens, (text) => text.split(",").filter(Boolean).map(toNumber)],
  ["written", showsWritten, (text) => text === "true"],
  ["second", secondHead, (text) => text],
  ["classes", ownClasses, (text) => text.split(",").filter(Boolean)],
  ["least", leastShare, (text) => Math.min(Math.max(Number.parseFloat(text) || 0, 0), 1)],
  ["add", addedTokens, (text) => text.split(",").filter(Boolean).map(toNumber)],
  ["with", diffKind, oneOf([...DIFF_KINDS])],
  ["theme", theme, oneOf(["", "light", "dark"])],
];
const DEFAULTS = HASH_FIELDS.map(([, field]) => hashText(field.value));

function hashText(value: unknown): string {
  if (value && typeof value === "object" && !Array.isArray(value)) return Object.values(value).join(".");
  return String(value ?? "");
}

/** A part of the matrix as "q0.q1.k0.k1"; null for anything else. */
function readView(text: string): View | null {
  const [q0 = 0, q1 = 0, k0 = 0, k1 = 0] = text.split(".").map(toNumber);
  return q1 > q0 && k1 > k0 ? { q0, q1, k0, k1 } : null;
}

function toNumber(text: string): number {
  const value = Number.parseInt(text, 10);
  return Number.isFinite(value) && value >= 0 ? value : 0;
}

function oneOf(choices: string[]): (text: string) => string {
  return (text) => (choices.includes(text) ? text : choices[0]!);
}

export function readHash(): void {
  const [name = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const fields = new URLSearchParams(query);
  batch(() => {
    if ((SCREENS as readonly string[]).includes(name)) screen.value = name as ScreenId;
    HASH_FIELDS.forEach(([key, field, parse], index) => {
      field.value = parse(fields.get(key) ?? DEFAULTS[index]!);
    });
  });
}

function makeHash(): string {
  const fields = new URLSearchParams();
  HASH_FIELDS.forEach(([key, field], index) => {
    const text = hashText(field.value);
    if (text !== DEFAULTS[index]) fields.set(key, text);
  });
  const query = fields.toString();
  return `#/${screen.value}${query ? `?${query}` : ""}`;
}

/** Keep the URL and the state equal: a new screen is a new entry of the history, other changes replace it. */
export function startHash(): void {
  readHash();
  let shown = screen.value;
  addEventListener("hashchange", () => {
    readHash();
    shown = screen.value;
  });
  effect(() => {
    const hash = makeHash();
    if (hash === location.hash) return;
    // the whole address, because in a frame without one of its own `#...` is relative to the document around it
    const address = location.href.replace(/#.*$/, "") + hash;
    try {
      if (screen.value === shown) history.replaceState(null, "", address);
      else history.pushState(null, "", address);
    } catch {
      // a sandboxed frame may not change its address; the state is kept in memory
    }
    shown = screen.value;
  });
  addEventListener("popstate", () => {
    readHash();
    shown = screen.value;
  });
  effect(() => {
    if (theme.value) document.documentElement.dataset["theme"] = theme.value;
    else delete document.documentElement.dataset["theme"];
  });
  effect(() => {
    document.documentElement.lang = language.value;
    try {
      localStorage.setItem("headwise-language", language.value);
    } catch {
      // a sandboxed frame has no storage
    }
  });
}

function initialLanguage(): "en" | "zh" {
  const asked = new URLSearchParams(location.search).get("lang");
  if (asked === "en" || asked === "zh") return asked;
  try {
    const kept = localStorage.getItem("headwise-language");
    if (kept === "en" || kept === "zh") return kept;
  } catch {
    // a sandboxed frame has no storage
  }
  return navigator.language?.startsWith("zh") ? "zh" : "en";
}
