// The frame of all screens: bar, rail, main panel, inspector, token strip.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { measureHeads, reopenAddress, setAblated, shownTexts } from "../actions";
import { isTextKey, say, t, type TextKey } from "../i18n";
import { doc, headCount, headName, isDark, isMeasuring, job, jobError, language, learnEntry, measures, overlay, screen, SCREENS, sites, source, theme, type ScreenId } from "../state";
import { otherWindow } from "../source";
import { Button, ErrorNote, Icon } from "./basics";
import { Inspector } from "./inspector";
import { TextBox } from "./text_box";
import { TokenStrip } from "./tokens";

const ICONS: Record<ScreenId, string> = {
  open: "M2.5 5h5l2 2h6v8h-13z",
  map: "M3 3h5v5H3zM10 3h5v5h-5zM3 10h5v5H3zM10 10h5v5h-5z",
  head: "M3 3h12v12H3zM3 7h12M7 3v12",
  text: "M3 4h12M3 9h8M3 14h10",
  classify: "M9 2l6 6-7 7-6-6V2z",
  similarity: "M2 9a4.5 4.5 0 109 0 4.5 4.5 0 10-9 0M7 9a4.5 4.5 0 109 0 4.5 4.5 0 10-9 0",
  lab: "M7 2v5l-4 7a1.5 1.5 0 001.3 2h9.4a1.5 1.5 0 001.3-2l-4-7V2M5.5 2h7M5 11h8",
  prune: "M3 5a2 2 0 104 0 2 2 0 10-4 0M3 13a2 2 0 104 0 2 2 0 10-4 0M6.6 6.3L15 13M6.6 11.7L15 5",
  steps: "M2 14h4v-4h4V6h4V3",
  diff: "M6 3v12M12 3v12M3 6l3-3 3 3M9 12l3 3 3-3",
  cost: "M3 15V9M7.5 15V3M12 15V6M16 15H2",
};

export function Shell({ children }: { children: ComponentChildren }): JSX.Element {
  return (
    <div class="shell">
      <Bar />
      <Rail />
      <main class="main" id="main" tabIndex={-1}>
        <JobNotes />
        <LearnNote />
        <AblatedNote />
        <OtherWindowNote />
        {children}
      </main>
      <Inspector />
      <TokenStrip />
    </div>
  );
}

function Bar(): JSX.Element {
  const layers = new Set(sites.value.map((site) => `${site.stack}.${site.layer}`)).size;
  const dark = isDark();
  return (
    <header class="bar">
      <a class="mark" href="#/map" aria-label="headwise" onClick={(event) => openScreen(event, "map")}>
        <svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true" fill="currentColor">
          {[2, 8.5, 15].flatMap((y, row) =>
            [2, 8.5, 15].map((x, column) => (
              <rect key={`${x}${y}`} x={x} y={y} width="5" height="5" opacity={row === column ? 1 : column > row ? 0.28 : 0.5} />
            )),
          )}
        </svg>
      </a>
      <a class="b nw clip name" href="#/open" title={t("open.title")} onClick={(event) => openScreen(event, "open")}>
        {String(doc.value?.model["name"] ?? "headwise")}
      </a>
      <span class="sm t3 nw hide-s">{t("bar.summary", { layers, heads: headCount.value })}</span>
      {doc.value?.kind === "trace" && <span class="tag hide-s">{t("bar.trace")}</span>}
      <TextBox />
      <JobElsewhere />
      <button class="btn quiet" type="button" aria-label={t("bar.commands")} onClick={() => (overlay.value = "commands")}>
        <Icon path="M2.5 7a4.5 4.5 0 109 0 4.5 4.5 0 10-9 0M10.5 10.5L14 14" />
        <kbd class="hide-s">/</kbd>
      </button>
      <button class="btn quiet" type="button" aria-disabled={sites.value.length === 0} onClick={() => sites.value.length > 0 && (overlay.value = "export")}>
        <Icon path="M8 2v8M4.5 7L8 10.5 11.5 7M2.5 13.5h11" />
        <span class="vh-s">{t("bar.export")}</span>
        <kbd class="hide-s">E</kbd>
      </button>
      <Button kind="quiet" lang={language.value === "en" ? "zh" : "en"} onClick={() => (language.value = language.value === "en" ? "zh" : "en")}>{t("bar.language")}</Button>
      <button class="btn quiet icon" type="button" aria-label={dark ? t("bar.light") : t("bar.dark")} onClick={() => (theme.value = dark ? "light" : "dark")}>
        <svg class="ic" viewBox="0 0 16 16" aria-hidden="true">
          <circle cx="8" cy="8" r="5.5" />
          <path d="M8 2.5a5.5 5.5 0 000 11z" fill="currentColor" />
        </svg>
      </button>
    </header>
  );
}

/** Show a screen and keep the rest of the state, which the address of the link does not hold. */
function openScreen(event: Event, id: ScreenId): void {
  event.preventDefault();
  screen.value = id;
}

function Rail(): JSX.Element {
  const list = useRef<HTMLUListElement>(null);
  useEffect(() => {
    const box = list.current!;
    const link = box.querySelector<HTMLElement>("[aria-current]"); // on narrow pages the list scrolls
    if (link) box.scrollLeft = link.offsetLeft - (box.clientWidth - link.offsetWidth) / 2;
  }, [screen.value]);
  return (
    <nav class="rail" aria-label={t("nav.screens")}>
      <ul ref={list}>
        {SCREENS.map((id) => (
          <li key={id}>
            <a
              href={`#/${id}`}
              aria-current={screen.value === id ? "page" : undefined}
              onClick={(event) => openScreen(event, id)}
            >
              <svg viewBox="0 0 18 18" aria-hidden="true"><path d={ICONS[id]} /></svg>
              {t(`screen.${id}` as TextKey)}
            </a>
          </li>
        ))}
      </ul>
    </nav>
  );
}

function jobName(): string {
  const key = `job.${job.value?.kind.split("-")[0]}`; // plan-pruning and plan-conversion are both planning
  return t(isTextKey(key) ? key : "job.other");
}

/** Jobs that need no attention: measuring, and what another screen asked for. */
const isElsewhere = () => job.value?.kind === "measure" || job.value?.screen !== screen.value;

/** The running job of another screen, with the way there. */
function JobElsewhere(): JSX.Element | null {
  if (!job.value || !isElsewhere()) return null;
  const { event, abort } = job.value;
  return (
    <span class="tag job-tag" role="status">
      <a class="link" href={`#/${job.value.screen}`} onClick={(click) => openScreen(click, job.value!.screen)}>
        {jobName()} {event.total ? `${event.done} / ${event.total}` : "…"}
      </a>
      <button class="link" type="button" aria-label={t("job.cancel")} onClick={() => abort.abort()}>
        ×
      </button>
    </span>
  );
}

/** The heads that are off, on every screen but the one that shows what that changes. */
function AblatedNote(): JSX.Element | null {
  const off = doc.value?.ablated ?? [];
  if (!off.length || screen.value === "lab") return null;
  const names = off.slice(0, 6).map((item) => headName(item.site, item.head)).join(", ");
  return (
    <p class="note off-note" role="status">
      <b class="b">{t(off.length === 1 ? "off.one" : "off.many", { count: off.length })}</b>
      <span class="mono sm clip grow">{off.length > 6 ? `${names}, …` : names}</span>
      <span class="t3 sm hide-s">{t("off.hint")}</span>
      <a class="btn" href="#/lab" onClick={(event) => openScreen(event, "lab")}>{t("off.lab")}</a>
      <Button onClick={() => setAblated([])}>{t("off.restore")}</Button>
    </p>
  );
}

/** The way back to the entry of `headwise learn` whose link opened the page. */
function LearnNote(): JSX.Element | null {
  const entry = learnEntry.value;
  if (!entry) return null;
  return (
    <p class="note" data-testid="learn-entry">
      <span class="b">{t("learn.shows", { entry })}</span>
      <code class="command">headwise learn {entry}{language.value === "zh" ? " --lang zh" : ""}</code>
      <span class="grow" />
      <Button onClick={() => (learnEntry.value = "")}>{t("keys.close")}</Button>
    </p>
  );
}

/** Says that what this window shows is not what the server has open, because another window changed it. */
function OtherWindowNote(): JSX.Element | null {
  if (!otherWindow.value) return null;
  return (
    <p class="note off-note" role="alert">
      <b class="b">{t("error.otherWindow")}</b>
      <span class="t2 sm grow">{t("error.stillShown", { text: shownPair() })}</span>
      <Button onClick={() => void reopenAddress()}>{t("window.reopen")}</Button>
    </p>
  );
}

/** The texts of the open run as one line. */
function shownPair(): string {
  return Object.values(shownTexts()).filter(Boolean).join(" → ");
}

/** Progress of the running job with its cancel button, and the error of the last one. */
function JobNotes(): JSX.Element {
  const running = isElsewhere() ? null : job.value;
  const { done = 0, total = 0, note = "" } = running?.event ?? {};
  const name = jobName();
  return (
    <div class="jobs" aria-live="polite">
      {running && (
        <div class="note">
          <span class="b">{name}</span>
          <progress max={total || undefined} value={total ? done : undefined} aria-label={name} />
          <span class="t2 clip">{running.event.state === "queued" ? t("job.queued") : total ? `${done} / ${total} ${say(note)}` : say(note)}</span>
          <span class="grow" />
          {(!total || done < total) && <Button onClick={() => running.abort.abort()}>{t("job.cancel")}</Button>}
        </div>
      )}
      {jobError.value && (
        <ErrorNote {...jobError.value}>
          {jobError.value.isOfText && <p class="t2 shown-text">{t("error.stillShown", { text: shownPair() })}</p>}
        </ErrorNote>
      )}
    </div>
  );
}

/** Asks to measure the heads, where a screen needs measures that are not there. */
export function MeasurePrompt(): JSX.Element {
  const possible = source.isLive && doc.value?.capabilities.measure.possible;
  return (
    <div class="note">
      <p class="grow">{t(isMeasuring.value ? "inspector.measuring" : measures.value ? "inspector.oneText" : "map.noMeasures")}</p>
      {isMeasuring.value ? null : possible ? (
        <Button kind="primary" onClick={() => void measureHeads()}>{t("map.measure")}</Button>
      ) : (
        <span class="t3">{t("state.needsModel")}</span>
      )}
    </div>
  );
}
