// Tokens as text: control, bidirectional and zero-width characters are shown as visible signs.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { GROUPINGS, groupTokens } from "../actions";
import { t, type TextKey } from "../i18n";
import { doc, selectedToken, site, source } from "../state";

const VISIBLE: Record<string, string> = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "Ġ": "␣", "▁": "␣", "Ċ": "⏎" };

const BYTES = /^(<0x[0-9A-F]{2}>)+$/;

/** A token with its invisible characters made visible; a leading space stays a thin mark. */
export function visibleToken(word: string): string {
  if (word === "") return "∅";
  if (BYTES.test(word)) return word.toLowerCase().replace(/<0x(..)>/g, "⟨$1⟩"); // a part of a character
  return word.replace(
    /[\u0000-\u0020\u007f-\u00a0\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff0-\uffff\u0120\u010a\u2581]/g,
    (sign) => VISIBLE[sign] ?? `⟨${sign.codePointAt(0)!.toString(16)}⟩`,
  );
}

export function isSpecial(word: string): boolean {
  return /^(\[[A-Z]+\]|<[^<>\s]{1,24}>|<\|.*\|>)$/.test(word) && !BYTES.test(word);
}

/** The name of a stream of tokens for readers: the source, or the text itself. */
export function streamName(stream: string): string {
  return stream === "source" || stream === "text" ? t(stream) : stream;
}

export function streamWords(stream: string, row = 0): string[] {
  return doc.value?.streams[stream]?.[row]?.words ?? [];
}

/** A token of a stream by its position, which stands for it where there are no words. */
export function tokenName(stream: string, position: number): string {
  return visibleToken(streamWords(stream)[position] ?? String(position));
}

/** Switches that merge tokens or leave some out; a file shows the tokens that were shown when it was written. */
function GroupingSwitches(): JSX.Element | null {
  const grouping = doc.value?.grouping;
  if (!source.isLive || !grouping || !doc.value?.sites.length) return null;
  return (
    <span class="row nw grouping" role="group" aria-label={t("tokens.grouping")}>
      {GROUPINGS.map((name) => (
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

const STRIP_TOKENS = 1024; // tokens of a long text that the strip holds at once, around the selected one

/** The docked strip: the tokens of the queries of the selected head. */
export function TokenStrip(): JSX.Element {
  const stream = site.value?.queryStream ?? "text";
  const words = streamWords(stream);
  const first = Math.max(Math.floor(((selectedToken.value ?? 0) - STRIP_TOKENS / 4) / (STRIP_TOKENS / 2)), 0) * (STRIP_TOKENS / 2);
  const last = Math.min(first + STRIP_TOKENS, words.length);
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const chosen = list.current?.querySelector<HTMLElement>("[aria-selected=true]");
    if (chosen) list.current!.scrollLeft = Math.min(Math.max(list.current!.scrollLeft, chosen.offsetLeft + chosen.offsetWidth - list.current!.offsetLeft - list.current!.clientWidth), chosen.offsetLeft - list.current!.offsetLeft);
  }, [selectedToken.value]);
  const move = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.stopPropagation();
    event.preventDefault();
    const next = Math.min(Math.max((selectedToken.value ?? 0) + step, 0), words.length - 1);
    selectedToken.value = next;
  };
  return (
    <footer class="strip">
      <span class="sm t3 nw token-count">
        {Object.keys(doc.value?.streams ?? {}).length > 1 && <b class="t2">{streamName(stream)} · </b>}
        {last - first < words.length ? t("tokens.part", { first, last: last - 1, count: words.length }) : t("tokens.count", { count: words.length })}
      </span>
      <div class="toks" role="listbox" aria-label={t("tokens.label")} tabIndex={0} onKeyDown={move} ref={list}>
        {words.slice(first, last).map((word, place) => {
          const index = first + place;
          return (
            <span
              key={index}
              class={`tok ${isSpecial(word) ? "special" : ""}`}
              role="option"
              aria-selected={selectedToken.value === index}
              aria-posinset={index + 1}
              aria-setsize={words.length}
              onClick={() => (selectedToken.value = selectedToken.value === index ? null : index)}
            >
              {visibleToken(word)}
            </span>
          );
        })}
      </div>
      <GroupingSwitches />
    </footer>
  );
}
