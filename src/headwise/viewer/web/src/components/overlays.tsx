// What lies over the screens: the command box, the sheet of keys, and the dialog for a new text.

import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { measureHeads, runText } from "../actions";
import { measureName, say, t, type TextKey } from "../i18n";
import { cellMode, doc, headName, language, measures, overlay, screen, selectHead, sites, theme, type ScreenId } from "../state";
import { className, LETTERS } from "./class_badge";

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
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{t(text)}</dd>
          </div>
        ))}
      </dl>
      <button class="btn" type="button" onClick={() => (overlay.value = "")}>
        {t("keys.close")}
      </button>
    </Dialog>
  );
}

interface Command {
  text: string;
  run: () => void;
}

function listCommands(screens: readonly ScreenId[]): Command[] {
  const commands: Command[] = screens.map((id) => ({ text: t(`screen.${id}` as TextKey), run: () => (screen.value = id) }));
  commands.push(
    { text: t("bar.change"), run: () => (overlay.value = "text") },
    { text: t("bar.export"), run: () => (overlay.value = "export") },
    { text: t("map.measure"), run: () => void measureHeads() },
    { text: t("bar.dark"), run: () => (theme.value = "dark") },
    { text: t("bar.light"), run: () => (theme.value = "light") },
    { text: "English", run: () => (language.value = "en") },
    { text: "中文", run: () => (language.value = "zh") },
  );
  for (const name of measures.value?.names ?? []) commands.push({ text: `${t("measure")}: ${measureName(name)}`, run: () => (cellMode.value = name) });
  for (const letter of LETTERS) commands.push({ text: `${t("class")}: ${className(letter)}`, run: () => (cellMode.value = "class") });
  sites.value.forEach((site, number) => {
    for (let head = 0; head < site.heads; head++) commands.push({ text: headName(number, head), run: () => selectHead(number, head) });
  });
  return commands;
}

export function CommandBox({ screens }: { screens: readonly ScreenId[] }): JSX.Element {
  const query = useSignal("");
  const chosen = useSignal(0);
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = listCommands(screens)
    .filter(({ text }) => words.every((word) => text.toLowerCase().includes(word)))
    .slice(0, 12);
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

export function TextDialog(): JSX.Element {
  const streams = doc.value?.streams ?? {};
  const text = useSignal(streams["text"]?.[0]?.text ?? "");
  const sourceText = useSignal(streams["source"]?.[0]?.text ?? "");
  const hasSource = "source" in streams;
  const capability = doc.value?.capabilities.text;
  const submit = (event: Event) => {
    event.preventDefault();
    overlay.value = "";
    void runText(text.value, hasSource ? sourceText.value : "");
  };
  return (
    <Dialog label={t("open.newText")}>
      <form class="stack" onSubmit={submit}>
        {hasSource && (
          <label class="stack">
            <span>{t("open.newSource")}</span>
            <textarea rows={3} value={sourceText.value} onInput={(event) => (sourceText.value = event.currentTarget.value)} />
          </label>
        )}
        <label class="stack">
          <span>{t("open.newText")}</span>
          <textarea rows={4} autofocus value={text.value} onInput={(event) => (text.value = event.currentTarget.value)} />
        </label>
        {capability?.possible ? (
          <button class="btn primary" type="submit">
            {t("open.run")}
          </button>
        ) : (
          <p class="t3">{capability ? say(capability.reason) : t("state.needsModel")}</p>
        )}
      </form>
    </Dialog>
  );
}
