// Lab: switch heads off or scale them, at all tokens or at some, and compare what the model does before and after.

import { useComputed } from "@preact/signals";
import { useRef } from "preact/hooks";
import type { JSX } from "preact";
import { ablateReason, canRedo, canUndo, redoAblation, setAblated, toggleAblated, undoAblation } from "../actions";
import { choices, Panel, Segmented } from "../components/basics";
import { streamWords, visibleToken } from "../components/tokens";
import { say, t, type TextKey } from "../i18n";
import { changeMode, chosenTokens, computeEffect, effect, evaluate, evaluation, evaluationKey, evaluationLines, evaluationText, factor, mode, modeFields, MODES, openTokens, randomSets, requestKey, resampleText, toggleToken } from "../lab_state";
import type { Site } from "../source";
import { doc, headCount, headName, isAblated, job, selectHead, selectedHead, selectedSite, sites, source } from "../state";
import { EffectPanel } from "./lab_effect";
import { QualityTable } from "./prune_result";

const LEAST_TEXTS = 2; // the intervals are over texts
const MOST_CHIPS = 512; // tokens to choose from; longer texts are ablated at all tokens

export function LabScreen(): JSX.Element {
  const ablated = doc.value?.ablated ?? [];
  const reason = say(ablateReason());
  const canRun = ablated.length > 0 && source.isLive && !job.value;
  const isStale = effect.value !== null && effect.value.request !== requestKey.value;
  return (
    <>
      <div class="toolbar">
        <h1>{t("lab.title")}</h1>
        <span class="sm t3">{t("lab.off", { count: ablated.length, total: headCount.value })}</span>
        <span class="grow" />
        <button class="btn" type="button" aria-disabled={!canUndo.value} onClick={undoAblation}>
          {t("lab.undo")}
        </button>
        <button class="btn" type="button" aria-disabled={!canRedo.value} onClick={redoAblation}>
          {t("lab.redo")}
        </button>
        <button class="btn" type="button" aria-disabled={!ablated.length} onClick={() => ablated.length && setAblated([])}>
          {t("lab.clear")}
        </button>
        <button class="btn primary" type="button" aria-disabled={!canRun} onClick={() => canRun && void computeEffect()}>
          {t("lab.run")}
        </button>
      </div>
      {reason && <p class="note">{reason}</p>}
      <div class="lab-lay">
        <div class="stack">
          <HeadsPanel />
        </div>
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
      <div class="switches" role="group" aria-label={t("lab.hint")}>
        {sites.value.map((item, number) => (
          <SwitchRow key={item.name} item={item} number={number} />
        ))}
      </div>
      <div class="row wrap lab-how">
        <Segmented label={t("lab.mode")} value={mode.value} options={choices("lab.", MODES)} onChange={(value) => changeMode(value)} />
        {mode.value === "zero" && (
          <label class="picker range">
            <span>
              {t("lab.scale")} {factor.value.toFixed(2)}
            </span>
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
        <input type="number" min="0" max="20" value={randomSets.value} onChange={(event) => (randomSets.value = Math.min(Math.max(Math.round(Number(event.currentTarget.value)) || 0, 0), 20))} />
      </label>
    </Panel>
  );
}

/** The switches of one layer. Its signals are computed, so that a click renders the layers that it changes. */
function SwitchRow({ item, number }: { item: Site; number: number }): JSX.Element {
  const chosen = useComputed(() => (selectedSite.value === number ? selectedHead.value : -1)).value;
  const off = useComputed(() => Array.from({ length: item.heads }, (_, head) => (isAblated(number, head) ? "-" : "+")).join("")).value;
  return (
    <div class="switch-row">
      <span class="xs t3" title={item.name}>
        {headName(number, 0).split(" ")[0]}
      </span>
      {Array.from({ length: item.heads }, (_, head) => (
        <button
          key={head}
          type="button"
          role="switch"
          class={`switch ${chosen === head ? "current" : ""}`}
          aria-checked={off[head] === "+"}
          aria-label={headName(number, head)}
          onClick={() => {
            selectHead(number, head);
            toggleAblated(number, head, modeFields().mode, modeFields().scale);
          }}
        >
          {head}
        </button>
      ))}
    </div>
  );
}

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
      {count > 0 && (
        <button class="btn" type="button" onClick={() => (chosenTokens.value = {})}>
          {t("lab.allTokens")}
        </button>
      )}
    </details>
  );
}

/** The loss over several texts, which says more than that of the open one. */
function EvaluationPanel(): JSX.Element | null {
  const file = useRef<HTMLInputElement>(null);
  const found = evaluation.value;
  const count = evaluationLines.value.length;
  const canRun = source.isLive && count >= LEAST_TEXTS && !job.value && (doc.value?.ablated.length ?? 0) > 0;
  const load = async (input: HTMLInputElement) => {
    const text = await input.files?.[0]?.text();
    if (text !== undefined) evaluationText.value = text;
    input.value = "";
  };
  return (
    <Panel title={t("lab.evaluation")}>
      <div class="stack">
        <details>
          <summary>{t("lab.evaluationTexts", { count })}</summary>
          <textarea rows={6} aria-label={t("lab.evaluationTexts", { count })} value={evaluationText.value ?? evaluationLines.value.join("\n")} onInput={(event) => (evaluationText.value = event.currentTarget.value)} />
          <button class="btn" type="button" onClick={() => file.current?.click()}>
            {t("lab.evaluationFile")}
          </button>
          <input ref={file} class="vh" type="file" accept=".txt,.tsv,text/plain" aria-label={t("lab.evaluationFile")} tabIndex={-1} onChange={(event) => void load(event.currentTarget)} />
        </details>
        <div class="row wrap">
          <button class="btn" type="button" aria-disabled={!canRun} onClick={() => canRun && void evaluate()}>
            {t("lab.evaluate")}
          </button>
          {count < LEAST_TEXTS && <span class="t3 sm">{t("similar.more")}</span>}
        </div>
        {found && (
          <div class={found.request === evaluationKey.value ? "" : "stale"} data-testid="evaluation">
            {found.request !== evaluationKey.value && <p class="stalebar">{t("lab.stale")}</p>}
            <QualityTable quality={found} />
            {found.notes.map((note) => (
              <p key={note} class="t3 sm">
                {say(note)}
              </p>
            ))}
          </div>
        )}
      </div>
    </Panel>
  );
}
