// State that the URL holds. A new screen is a new entry of the history; every other change replaces the entry.

import { batch, effect, signal, type Signal } from "@preact/signals";

/**
 * What a step back restores: a "view" is what was shown, such as a head; "work" is what the user made, such as a class
 * of one's own, which a step back must not undo.
 */
type Kind = "view" | "work";

interface Field {
  key: string;
  signal: { value: unknown };
  parse: (text: string) => unknown;
  initial: string;
  kind: Kind;
}

const WRITE_MS = 150; // between two changes of the address; browsers ignore more than about 200 in 10 s
const fields: Field[] = [];
const fieldCount = signal(0); // of fields, because screens that are loaded later bring their own
const unread = new Map<string, string>(); // fields of the address whose screen is not loaded yet

/** A signal whose value the URL holds under a key. `parse` must accept any text. */
export function urlSignal<T>(key: string, initial: T, parse: (text: string) => T, kind: Kind = "view"): Signal<T> {
  const made = signal(initial);
  keepInUrl(key, made, parse, kind);
  return made;
}

/** Keep a value that is held elsewhere in the URL. */
export function keepInUrl<T>(key: string, held: { value: T }, parse: (text: string) => T, kind: Kind = "view"): void {
  fields.push({ key, signal: held, parse, initial: hashText(held.value), kind });
  const text = unread.get(key);
  if (text !== undefined) held.value = parse(text);
  unread.delete(key);
  fieldCount.value = fields.length;
}

function hashText(value: unknown): string {
  if (value === true) return "1";
  if (value === false) return "";
  if (value && typeof value === "object" && !Array.isArray(value)) return Object.values(value).join(".");
  return String(value ?? "");
}

export function toNumber(text: string): number {
  const value = Number.parseInt(text, 10);
  return Number.isFinite(value) && value >= 0 ? value : 0;
}

export const toNumberOrNull = (text: string): number | null => (text === "" ? null : toNumber(text));
export const toText = (text: string): string => text;
export const toList = (text: string): string[] => text.split(",").filter(Boolean);
export const toFlag = (text: string): boolean => text === "1" || text === "true";

export function oneOf<const Choices extends readonly string[]>(choices: Choices): (text: string) => Choices[number] {
  return (text) => (choices.includes(text) ? text : choices[0]!);
}

/** A number between two others. */
export function between(low: number, high: number): (text: string) => number {
  return (text) => Math.min(Math.max(Number.parseFloat(text) || 0, low), high);
}

/** Numbers as ranges, such as 3-5 and 9 for 3, 4, 5, 9. */
export function writeRanges(numbers: readonly number[]): string[] {
  const ranges: [number, number][] = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = ranges.at(-1);
    if (last && number <= last[1] + 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
}

const MOST_IN_RANGES = 100_000;

export function readRanges(ranges: readonly string[]): number[] {
  const numbers = ranges.flatMap((range) => {
    const [first = 0, last = first] = range.split("-").map(toNumber);
    return Array.from({ length: Math.min(Math.max(last - first + 1, 0), MOST_IN_RANGES) }, (_, place) => first + place);
  });
  return numbers.slice(0, MOST_IN_RANGES);
}

function readHash(screen: Signal<string>, screens: readonly string[], kinds: readonly Kind[]): void {
  const [name = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query);
  const known = new Set(fields.map(({ key }) => key));
  batch(() => {
    if (screens.includes(name)) screen.value = name;
    for (const { key, signal: held, parse, initial, kind } of fields) {
      const text = parameters.get(key) ?? (kind === "view" ? initial : hashText(held.value)); // a link undoes no work
      if (kinds.includes(kind) && text !== hashText(held.value)) held.value = parse(text);
    }
    for (const [key, text] of parameters) if (!known.has(key)) unread.set(key, text);
  });
}

function makeHash(screen: string): string {
  void fieldCount.value;
  const parameters = new URLSearchParams();
  for (const { key, signal: held, initial } of fields) {
    const text = hashText(held.value);
    if (text !== initial) parameters.set(key, text);
  }
  for (const [key, text] of unread) parameters.set(key, text);
  const query = parameters.toString();
  return `#/${screen}${query ? `?${query}` : ""}`;
}

const SCROLL_TRIES = 40; // 2 s, in which a screen gets what it shows

/** Scroll to where a screen was left, as soon as it is long enough; stops when the user scrolls. */
function scrollWhenLong(top: number, tries = SCROLL_TRIES, last = scrollY): void {
  if (scrollY !== last && tries < SCROLL_TRIES) return;
  scrollTo(0, top);
  if (scrollY < top - 1 && tries > 0) setTimeout(scrollWhenLong, 50, top, tries - 1, scrollY);
}

let readAddress = (): string => location.href;

/** The address of what is shown now, also where the browser's own waits for its next change. */
export function currentAddress(): string {
  return readAddress();
}

/** Keep the URL and the state equal. */
export function keepUrl<Name extends string>(screen: Signal<Name>, screens: readonly Name[]): void {
  const read = (kinds: readonly Kind[]) => readHash(screen as unknown as Signal<string>, screens, kinds);
  read(["view", "work"]);
  let shown = screen.value;
  let known = location.hash; // the last address that this code has read or written
  let next = ""; // the address that waits to be written
  let timer = 0;
  let written = -Infinity;

  const write = () => {
    timer = 0;
    if (next === location.hash || location.hash !== known) return; // another address arrived, and its event follows
    // the whole address, because in a frame without one of its own `#...` is relative to the document around it
    const address = location.href.replace(/#.*$/, "") + next;
    const isNew = screen.peek() !== shown;
    try {
      if (isNew) history.replaceState({ isOwn: true, top: scrollY }, ""); // what a step back restores
      if (isNew) history.pushState({ isOwn: true }, "", address);
      else history.replaceState({ isOwn: true }, "", address);
      known = location.hash;
    } catch {
      // a sandboxed frame may not change its address; the state is kept in memory
    }
    if (isNew) scrollTo(0, 0);
    shown = screen.peek();
    written = performance.now();
  };
  effect(() => {
    next = makeHash(screen.value);
    clearTimeout(timer);
    timer = 0;
    const wait = written + WRITE_MS - performance.now();
    if (wait <= 0 || screen.value !== shown) write();
    else timer = setTimeout(write, wait);
  });
  const onMove = () => {
    clearTimeout(timer);
    const { isOwn = false, top = 0 } = (history.state ?? {}) as { isOwn?: boolean; top?: number };
    const before = shown;
    known = location.hash;
    shown = (/^#\/([a-z]+)/.exec(known)?.[1] ?? shown) as Name;
    read(isOwn ? ["view"] : ["view", "work"]);
    shown = screen.peek();
    next = makeHash(shown);
    write();
    if (shown !== before) scrollWhenLong(top);
  };
  readAddress = () => location.href.replace(/#.*$/, "") + next;
  addEventListener("beforeunload", write);
  addEventListener("popstate", onMove);
  addEventListener("hashchange", onMove);
}
