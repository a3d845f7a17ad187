// Tokens as text: control, bidirectional and zero-width characters are shown as visible signs.

import type { JSX } from "preact";
import { groupTokens } from "../actions";
import { t, type TextKey } from "../i18n";
import { doc, selectedToken, site, source } from "../state";

const VISIBLE: Record<string, string> = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "Ġ": "␣", "▁": "␣", "Ċ": "⏎" };

/** A token with its invisible characters made visible; a leading space stays a thin mark. */
export function visibleToken(word: string): string {
  if (word === "") return "∅";
  return word.replace(
    /[\u0000-\u0020\u007f-\u00a0\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff0-\uffff\u0120\u010a\u2581]/g,
    (sign) => VISIBLE[sign] ?? `⟨${sign.codePointAt(0)!.toString(16)}⟩`,
  );
}

export function isSpecial(word: string): boolean {
  return /^(\[[A-Z]+\]|<[^<>\s]{1,24}>|<\|.*\|>)$/.test(word);
}

export function streamWords(stream: string, row = 0): string[] {
  return doc.value?.streams[stream]?.[row]?.words ?? [];
}

const SWITCHES = ["words", "special", "first"] as const;

/** Switches that merge tokens or leave some out; a file shows the tokens that were shown when it was written. */
function GroupingSwitches(): JSX.Element | null {
  const grouping = doc.value?.grouping;
  if (!source.isLive || !grouping || !doc.value?.sites.length) return null;
  return (
    <span class="row nw grouping" role="group" aria-label={t("tokens.grouping")}>
      {SWITCHES.map((name) => (
        <button
          key={name}
          type="button"
          class="btn quiet"
          aria-pressed={grouping[name]}
          title={t(`tokens.${name}Hint` as TextKey)}
          onClick={() => void groupTokens({ ...grouping, [name]: !grouping[name] })}
        >
          {t(`tokens.${name}` as TextKey)}
        </button>
      ))}
    </span>
  );
}

/** The docked strip: the tokens of the queries of the selected head. */
export function TokenStrip(): JSX.Element {
  const stream = site.value?.queryStream ?? "text";
  const words = streamWords(stream);
  const move = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.stopPropagation();
    event.preventDefault();
    const next = Math.min(Math.max((selectedToken.value ?? 0) + step, 0), words.length - 1);
    selectedToken.value = next;
    (event.currentTarget as HTMLElement).children[next]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  return (
    <footer class="strip">
      <span class="sm t3 nw">
        {Object.keys(doc.value?.streams ?? {}).length > 1 && <b class="t2">{stream} · </b>}
        {t("tokens.count", { count: words.length })}
      </span>
      <div class="toks" role="listbox" aria-label={t("tokens.label")} tabIndex={0} onKeyDown={move}>
        {words.slice(0, 1024).map((word, index) => (
          <span
            key={index}
            class={`tok ${isSpecial(word) ? "special" : ""}`}
            role="option"
            aria-selected={selectedToken.value === index}
            onClick={() => (selectedToken.value = selectedToken.value === index ? null : index)}
          >
            {visibleToken(word)}
          </span>
        ))}
      </div>
      <GroupingSwitches />
    </footer>
  );
}
