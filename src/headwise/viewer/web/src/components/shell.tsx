// The frame of all screens: bar, rail, main panel, inspector, token strip.

import type { ComponentChildren, JSX } from "preact";
import { measureHeads } from "../actions";
import { isTextKey, say, t, type TextKey } from "../i18n";
import { doc, headCount, isDark, job, jobError, language, overlay, screen, sites, source, theme, type ScreenId } from "../state";
import { ErrorNote, Icon } from "./basics";
import { Inspector } from "./inspector";
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

export function Shell({ screens, children }: { screens: readonly ScreenId[]; children: ComponentChildren }): JSX.Element {
  return (
    <div class="shell">
      <Bar />
      <Rail screens={screens} />
      <main class="main" id="main" tabIndex={-1}>
        <JobNotes />
        {children}
      </main>
      <Inspector />
      <TokenStrip />
    </div>
  );
}

function Bar(): JSX.Element {
  const layers = new Set(sites.value.map((site) => `${site.stack}.${site.layer}`)).size;
  const text = Object.values(doc.value?.streams ?? {})
    .map((rows) => rows[0]?.text || rows[0]?.words.join("") || "")
    .join(" → ");
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
      <b class="b nw clip">{String(doc.value?.model["name"] ?? "headwise")}</b>
      <span class="sm t3 nw hide-s">{t("bar.summary", { layers, heads: headCount.value })}</span>
      {doc.value?.kind === "trace" && <span class="tag hide-s">{t("bar.trace")}</span>}
      <span class="sep hide-s" />
      <button class="btn quiet clip hide-s text-button" type="button" onClick={() => (overlay.value = "text")} title={t("bar.change")}>
        <span class="t3">{t("bar.text")}</span>
        <span class="clip">{text}</span>
      </button>
      <span class="grow" />
      <button class="btn quiet" type="button" aria-label={t("bar.commands")} onClick={() => (overlay.value = "commands")}>
        <Icon path="M2.5 7a4.5 4.5 0 109 0 4.5 4.5 0 10-9 0M10.5 10.5L14 14" />
        <kbd class="hide-s">/</kbd>
      </button>
      <button class="btn quiet" type="button" aria-disabled={sites.value.length === 0} onClick={() => sites.value.length > 0 && (overlay.value = "export")}>
        <Icon path="M8 2v8M4.5 7L8 10.5 11.5 7M2.5 13.5h11" />
        <span class="vh-s">{t("bar.export")}</span>
        <kbd class="hide-s">E</kbd>
      </button>
      <button class="btn quiet" type="button" lang={language.value === "en" ? "zh" : "en"} onClick={() => (language.value = language.value === "en" ? "zh" : "en")}>
        {t("bar.language")}
      </button>
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

function Rail({ screens }: { screens: readonly ScreenId[] }): JSX.Element {
  return (
    <nav class="rail" aria-label={t("nav.screens")}>
      <ul>
        {screens.map((id) => (
          <li key={id}>
            <a
              href={`#/${id}`}
              aria-current={screen.value === id ? "page" : undefined}
              onClick={(event) => openScreen(event, id)}
            >
              <svg viewBox="0 0 18 18" aria-hidden="true">
                <path d={ICONS[id]} />
              </svg>
              {t(`screen.${id}` as TextKey)}
            </a>
          </li>
        ))}
      </ul>
    </nav>
  );
}

/** Progress of the running job with its cancel button, and the error of the last one. */
function JobNotes(): JSX.Element {
  const running = job.value;
  const { done = 0, total = 0, note = "" } = running?.event ?? {};
  const key = `job.${running?.kind}`;
  const name = t(isTextKey(key) ? key : "job.other");
  return (
    <div class="jobs" aria-live="polite">
      {running && (
        <div class="note">
          <span class="b">{name}</span>
          <progress max={total || undefined} value={total ? done : undefined} aria-label={name} />
          <span class="t2 clip">{running.event.state === "queued" ? t("job.queued") : total ? `${done} / ${total} ${say(note)}` : say(note)}</span>
          <span class="grow" />
          <button class="btn" type="button" onClick={() => running.abort.abort()}>
            {t("job.cancel")}
          </button>
        </div>
      )}
      {jobError.value && <ErrorNote {...jobError.value} />}
    </div>
  );
}

/** Asks to measure the heads, where a screen needs measures that are not there. */
export function MeasurePrompt(): JSX.Element {
  const possible = source.isLive && doc.value?.capabilities.measure.possible;
  return (
    <div class="note">
      <p class="grow">{t("map.noMeasures")}</p>
      {possible ? (
        <button class="btn primary" type="button" onClick={() => void measureHeads()}>
          {t("map.measure")}
        </button>
      ) : (
        <span class="t3">{t("state.needsModel")}</span>
      )}
    </div>
  );
}
