// The classes that the user gives to heads: those of the trace are shown, and new ones are kept with it.

import { effect } from "@preact/signals";
import { doc, ownClasses, source } from "./state";

const SAVE_MS = 300; // after the last change

function write(classes: readonly (readonly [number, number, string])[]): string[] {
  return classes.map(([site, head, name]) => `${site}.${head}=${name}`);
}

function read(entries: readonly string[]): [number, number, string][] {
  return entries.flatMap((entry) => {
    const [, site = "", head = "", name = ""] = /^(\d+)\.(\d+)=(.+)$/.exec(entry) ?? [];
    const item = doc.value?.sites[Number(site)];
    return name && item && Number(head) < item.heads ? [[Number(site), Number(head), name] as [number, number, string]] : [];
  });
}

/** Show the classes of the trace unless the address names others, and keep changes with the trace. */
export function startClassNames(): void {
  const stored = doc.value?.classes ?? [];
  if (!ownClasses.value.length && stored.length) ownClasses.value = write(stored);
  if (!source.isLive) return;
  let saved = JSON.stringify(write(stored));
  let timer = 0;
  effect(() => {
    const entries = ownClasses.value;
    clearTimeout(timer);
    if (JSON.stringify(entries) === saved) return;
    timer = window.setTimeout(() => {
      saved = JSON.stringify(entries);
      source.runJob({ kind: "classes", classes: read(entries) }, () => undefined).catch(() => (saved = ""));
    }, SAVE_MS);
  });
}
