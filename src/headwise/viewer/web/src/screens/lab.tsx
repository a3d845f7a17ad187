// Lab: switch heads off or scale them, at all tokens or at some, and compare what the model does before and after.

import { useSignalEffect } from "@preact/signals";
import { useRef } from "preact/hooks";
import type { JSX } from "preact";
import { ablateReason, canRedo, canUndo, givenTexts, openTexts, redoAblation, setAblated, textLines, toggleAblated, undoAblation } from "../actions";
import { Button, choices, Notes, Panel, Segmented, Toolbar, WholeNumber } from "../components/basics";
import { SwitchGrid } from "../components/switch_grid";
import { streamWords, visibleToken } from "../components/tokens";
import { say, t, type TextKey } from "../i18n";
import { changeMode, chosenTokens, computeEffect, effect, evaluate, evaluation, evaluationKey, factor, mode, modeFields, MODES, openTokens, randomSets, requestKey, resampleText, toggleToken } from "../lab_state";
import { doc, headCount, isAblated, isCheap, job, selectHead, sites, source } from "../state";
import { EffectPanel } from "./lab_effect";
import { QualityTable } from "./prune_result";

const WAIT_MS = 300; // after the last switch
const LEAST_TEXTS = 2; // the intervals are over texts
const MOST_CHIPS = 512; // tokens to choose from; longer texts are ablated at all tokens

export function LabScreen(): JSX.Element {
  const ablated = doc.value?.ablated ?? [];
  const reason = say(ablateReason());
  const canRun = source.isLive && !job.value;
  const isStale = effect.value !== null && effect.value.request !== requestKey.value && !isCheap.value;
  useSignalEffect(() => {
    const isKnown = effect.value?.request === requestKey.value;
    if (isKnown || !isCheap.value || !doc.value?.sites.length || ablateReason()) return;
    const timer = setTimeout(() => void computeEffect(), WAIT_MS);
    return () => clearTimeout(timer);
  });
  return (
    <>
      <Toolbar title={t("lab.title")} hint={t("lab.off", { count: ablated.length, total: headCount.value })}>
        <Button aria-disabled={!canUndo.value} onClick={undoAblation}>{t("lab.undo")}</Button>
        <Button aria-disabled={!canRedo.value} onClick={redoAblation}>{t("lab.redo")}</Button>
        <Button aria-disabled={!ablated.length} onClick={() => ablated.length && setAblated([])}>{t("lab.clear")}</Button>
        {!isCheap.value && <Button kind="primary" aria-disabled={!canRun} onClick={() => canRun && void computeEffect()}>{t("lab.run")}</Button>}
      </Toolbar>
      {reason && <p class="note">{reason}</p>}
      <div class="lab-lay">
        <div class="stack"><HeadsPanel /></div>
        <div class="stack">
          <EffectPanel isStale={isStale} />
          <EvaluationPanel />
        </div>
      </div>
    </>
  );
}

function HeadsPanel(): JSX.Element {
  return (
    <Panel title={t("open.layers")}>
      <p class="t3 sm">{t("lab.hint")}</p>
      <SwitchGrid label={t("lab.hint")} isOff={isAblated} onToggle={switchHead} canSwitch={anyHead} />
      <div class="row wrap lab-how">
        <Segmented label={t("lab.mode")} value={mode.value} options={choices("lab.", MODES)} onChange={(value) => changeMode(value)} />
        {mode.value === "zero" && (
          <label class="picker range">
            <span>{t("lab.scale")} {factor.value.toFixed(2)}</span>
            <input type="range" min="0" max="1" step="0.05" value={factor.value} onChange={(event) => changeMode("zero", Number(event.currentTarget.value))} />
          </label>
        )}
      </div>
      <p class="t3 sm">{t(`lab.explain.${mode.value}` as TextKey)}</p>
      {mode.value === "resample" && Object.keys(doc.value?.streams ?? {}).length === 1 && (
        <input type="text" value={resampleText.value} placeholder={t("lab.resampleText")} aria-label={t("lab.resampleText")} onInput={(event) => (resampleText.value = event.currentTarget.value)} />
      )}
      <TokenChoice />
      <label class="picker lab-how">
        <span>{t("lab.random")}</span>
        <WholeNumber min={0} max={20} state={randomSets} />
      </label>
    </Panel>
  );
}

/** Switch a head off or on, in the chosen mode. */
function switchHead(number: number, head: number): void {
  selectHead(number, head);
  toggleAblated(number, head, modeFields().mode, modeFields().scale);
}

const anyHead = () => true; // what cannot be ablated says why

/** At which tokens heads are ablated, for each stream of queries. */
function TokenChoice(): JSX.Element {
  const streams = [...new Set(sites.value.map((item) => item.queryStream))];
  const count = Object.values(openTokens()).reduce((sum, positions) => sum + positions.length, 0);
  return (
    <details class="lab-how">
      <summary>{count ? t("lab.someTokens", { count }) : t("lab.allTokens")}</summary>
      {streams.map((stream) => (
        <div key={stream} role="group" aria-label={`${t("lab.tokens")} · ${say(stream)}`}>
          {streams.length > 1 && <h3>{say(stream)}</h3>}
          <div class="chips">
            {streamWords(stream)
              .slice(0, MOST_CHIPS)
              .map((word, index) => (
                <button key={index} type="button" class="chip" aria-pressed={chosenTokens.value[stream]?.includes(index) ?? false} onClick={() => toggleToken(stream, index)}>
                  {visibleToken(word)}
                </button>
              ))}
          </div>
        </div>
      ))}
      {count > 0 && <Button onClick={() => (chosenTokens.value = {})}>{t("lab.allTokens")}</Button>}
    </details>
  );
}

/** The loss over several texts, which says more than that of the open one. */
function EvaluationPanel(): JSX.Element | null {
  const file = useRef<HTMLInputElement>(null);
  const found = evaluation.value;
  const count = textLines.value.length;
  const canRun = source.isLive && count >= LEAST_TEXTS && !job.value;
  const load = async (input: HTMLInputElement) => {
    const text = await input.files?.[0]?.text();
    if (text !== undefined) givenTexts.value = text;
    input.value = "";
  };
  return (
    <Panel title={t("lab.evaluation")}>
      <div class="stack">
        <details>
          <summary>{t("lab.evaluationTexts", { count })}</summary>
          <textarea rows={6} aria-label={t("lab.evaluationTexts", { count })} value={openTexts.value} onInput={(event) => (givenTexts.value = event.currentTarget.value)} />
          <Button onClick={() => file.current?.click()}>{t("lab.evaluationFile")}</Button>
          <input ref={file} class="vh" type="file" accept=".txt,.tsv,text/plain" aria-label={t("lab.evaluationFile")} tabIndex={-1} onChange={(event) => void load(event.currentTarget)} />
        </details>
        <div class="row wrap">
          <Button aria-disabled={!canRun} onClick={() => canRun && void evaluate()}>{t("lab.evaluate")}</Button>
          {count < LEAST_TEXTS && <span class="t3 sm">{t("similar.more")}</span>}
        </div>
        {found && (
          <div class={found.request === evaluationKey.value ? "" : "stale"} data-testid="evaluation">
            {found.request !== evaluationKey.value && <p class="stalebar">{t("lab.stale")}</p>}
            <QualityTable quality={found} />
            <Notes notes={found.notes} />
          </div>
        )}
      </div>
    </Panel>
  );
}
