// What lies over the screens: the command box, the sheet of keys, and the dialog for a new text.

import { Button } from "./basics";
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { GROUPINGS, groupTokens, measureHeads, openOther, setAblated, toggleAblated, togglePin } from "../actions";
import { measureName, t, type TextKey } from "../i18n";
import { computeEffect, evaluate } from "../lab_state";
import { cellMode, doc, headName, isAblated, language, measures, overlay, screen, SCREENS, selectedHead, selectedSite, selectHead, showsTable, sinksFirst, sites, source, theme, type ScreenId } from "../state";
import { className, LETTERS } from "./class_badge";
import { classFilter } from "./head_grid";

export function Dialog({ label, kind, children }: { label: string; kind?: string; children: ComponentChildren }): JSX.Element {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  return (
    <dialog
      ref={dialog}
      class={kind}
      aria-label={label}
      onClose={() => (overlay.value = "")}
      onClick={(event) => event.target === dialog.current && (overlay.value = "")}
    >
      {children}
    </dialog>
  );
}

const KEY_ROWS: [string, TextKey][] = [
  ["← → ↑ ↓", "keys.arrows"],
  ["Enter", "keys.enter"],
  ["K", "keys.k"],
  ["P", "keys.p"],
  ["T", "keys.t"],
  ["S", "keys.s"],
  ["E", "keys.e"],
  ["1 … 9 0 -", "keys.digits"],
  ["[  ]", "keys.brackets"],
  ["/", "keys.slash"],
  ["?", "keys.question"],
  ["Esc", "keys.escape"],
];

export function KeySheet(): JSX.Element {
  return (
    <Dialog label={t("keys.title")}>
      <h2>{t("keys.title")}</h2>
      <dl class="keys">
        {KEY_ROWS.map(([key, text]) => (
          <div key={key}>
            <dt><kbd>{key}</kbd></dt>
            <dd>{t(text)}</dd>
          </div>
        ))}
      </dl>
      <Button onClick={() => (overlay.value = "")}>{t("keys.close")}</Button>
    </Dialog>
  );
}

interface Command {
  text: string;
  run: () => void;
  /** Other names by which it is found. */
  words?: string;
}

/** What the palette can do: actions on the selected head, the numbers of a screen, screens, measures, classes, and heads. */
export function listCommands(): Command[] {
  const head = headName(selectedSite.value, selectedHead.value);
  const go = (id: ScreenId, run: () => unknown = () => null) => () => {
    screen.value = id;
    void run();
  };
  const off = isAblated(selectedSite.value, selectedHead.value);
  const commands: Command[] = SCREENS.map((id) => ({ text: t(`screen.${id}` as TextKey), run: go(id), words: id }));
  commands.push(
    { text: `${t(off ? "inspector.restore" : "inspector.ablate")}: ${head}`, run: () => toggleAblated(), words: "ablate restore switch off on k" },
    { text: `${t("inspector.pin")}: ${head}`, run: () => togglePin(), words: "pin p" },
    { text: `${t("commands.prune")}: ${head}`, run: go("prune", () => !off && toggleAblated()), words: "prune remove this head" },
    { text: t("lab.run"), run: go("lab", computeEffect), words: "ablate loss effect" },
    { text: t("lab.evaluate"), run: go("lab", evaluate), words: "loss perplexity accuracy texts" },
    { text: t("lab.clear"), run: () => setAblated([]), words: "restore all heads" },
    { text: t("similar.run"), run: go("similarity"), words: "similar clusters" },
    { text: t("bar.change"), run: () => document.querySelector<HTMLElement>(".text-box textarea")?.focus(), words: "text" },
    { text: t("bar.export"), run: () => (overlay.value = "export"), words: "save svg csv trace" },
    { text: t("edges.title"), run: go("map", () => setTimeout(() => document.querySelector<HTMLElement>(".edge-panel input")?.focus())), words: "edges circuit path patching attribution" },
    { text: t("map.measure"), run: () => void measureHeads(), words: "measure" },
    { text: t(showsTable.value ? "table.hide" : "table.show"), run: () => (showsTable.value = !showsTable.value), words: "table chart t" },
    { text: t(sinksFirst.value ? "sinks.aside" : "sinks.first"), run: () => (sinksFirst.value = !sinksFirst.value), words: "sinks classes s" },
    { text: t("bar.dark"), run: () => (theme.value = "dark") },
    { text: t("bar.light"), run: () => (theme.value = "light") },
    { text: "English", run: () => (language.value = "en") },
    { text: "中文", run: () => (language.value = "zh") },
  );
  const grouping = doc.value?.grouping;
  if (source.isLive && grouping) for (const name of GROUPINGS) commands.push({ text: `${t(`tokens.${name}` as TextKey)}${grouping[name] ? " ✓" : ""}`, run: () => void groupTokens({ ...grouping, [name]: !grouping[name] }), words: "tokens" });
  for (const name of doc.value?.openable ?? []) commands.push({ text: `${t("open.other")}: ${name}`, run: () => openOther(name), words: "open model trace" });
  for (const name of measures.value?.names ?? []) commands.push({ text: `${t("measure")}: ${measureName(name)}`, run: go("map", () => (cellMode.value = name)), words: name });
  for (const letter of LETTERS) commands.push({ text: `${t("class")}: ${className(letter)}`, run: go("map", () => ([cellMode.value, classFilter.value] = ["class", letter])) });
  sites.value.forEach((site, number) => {
    for (let place = 0; place < site.heads; place++) {
      commands.push({ text: headName(number, place), run: () => selectHead(number, place), words: `L${site.layer}H${place} ${site.layer}.${place} L${site.layer} H${place} ${site.name}:${place}` });
    }
  });
  return commands;
}

/** The commands that have every word of a query in their texts or other names; texts that begin with it come first. */
export function findCommands(query: string, commands: Command[]): Command[] {
  const wanted = query.toLowerCase().trim();
  const words = wanted.split(/\s+/).filter(Boolean);
  const found = commands.filter(({ text, words: others = "" }) => words.every((word) => `${text} ${others}`.toLowerCase().includes(word)));
  const rank = ({ text }: Command) => (text.toLowerCase().startsWith(wanted) ? 0 : text.toLowerCase().includes(wanted) ? 1 : 2);
  return found.sort((a, b) => rank(a) - rank(b)).slice(0, 12);
}

export function CommandBox(): JSX.Element {
  const query = useSignal("");
  const chosen = useSignal(0);
  const matches = findCommands(query.value, listCommands());
  const run = (command: Command | undefined) => {
    if (!command) return;
    overlay.value = "";
    command.run();
  };
  const onKey = (event: KeyboardEvent) => {
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (step) {
      event.preventDefault();
      chosen.value = Math.min(Math.max(chosen.value + step, 0), matches.length - 1);
    } else if (event.key === "Enter") {
      event.preventDefault();
      run(matches[chosen.value]);
    }
  };
  return (
    <Dialog label={t("bar.commands")}>
      <input
        type="text"
        role="combobox"
        aria-expanded="true"
        aria-controls="commands"
        aria-activedescendant={matches.length ? `command-${chosen.value}` : undefined}
        aria-label={t("bar.commands")}
        placeholder={t("commands.placeholder")}
        autofocus
        value={query.value}
        onInput={(event) => {
          query.value = event.currentTarget.value;
          chosen.value = 0;
        }}
        onKeyDown={onKey}
      />
      <ul id="commands" role="listbox" aria-label={t("bar.commands")}>
        {matches.map((command, index) => (
          <li key={command.text} id={`command-${index}`} role="option" aria-selected={index === chosen.value} onClick={() => run(command)}>
            {command.text}
          </li>
        ))}
      </ul>
      {!matches.length && <p class="t3">{t("commands.none")}</p>}
    </Dialog>
  );
}
