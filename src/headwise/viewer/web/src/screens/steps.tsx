// Steps: one token and one head, from the residual stream to the residual stream. Every number says how it is computed.

import { useSignal } from "@preact/signals";
import { Fragment, type JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ErrorNote, groupByReason, Panel, TableButton, Toolbar } from "../components/basics";
import { DataTable } from "../components/data_table";
import type { Pointing } from "../components/number_cells";
import { streamWords, visibleToken } from "../components/tokens";
import { say, t, type TextKey } from "../i18n";
import { doc, headName, headPath, selectedHead, selectedKey, selectedSite, selectedStep, selectedToken, showsTable, site, source, useAnswer } from "../state";
import { exact, explain, isByKey, lastWeights, readSteps, shortTitle, stepTitle, vector, type Place, type Step, type Steps } from "./step_data";
import { StepNumbers } from "./step_numbers";

const MAX_TABLE_ROWS = 512;

export function StepsScreen(): JSX.Element {
  const pointing: Pointing = { hovered: useSignal<Place | null>(null), locked: useSignal<Place | null>(null) };
  const { found: steps, error } = useAnswer(
    () => {
      const current = site.value;
      if (!current || !source.isLive) return null;
      const query = Math.min(selectedToken.value ?? current.numQueries - 1, current.numQueries - 1);
      return headPath("steps", { query, ...(selectedKey.value !== null && selectedKey.value < current.numKeys ? { key: selectedKey.value } : {}) });
    },
    (message): Steps => readSteps(message, streamWords(site.value!.keyStream)),
  );
  useStepKeys(steps.value, pointing);
  if (!source.isLive) return <NotInExport />;
  if (!site.value) return <p class="t3">{t("open.none")}</p>;
  return (
    <>
      <StepsToolbar steps={steps.value} />
      {error.value && <ErrorNote {...error.value} />}
      {!error.value && !steps.value && <p class="t3">{t("steps.loading")}</p>}
      {!error.value && steps.value && <StepsView steps={steps.value} pointing={pointing} />}
    </>
  );
}

function StepsToolbar({ steps }: { steps: Steps | null }): JSX.Element {
  const words = streamWords(site.value?.queryStream ?? "text");
  return (
    <Toolbar title={<>{t("screen.steps")} <span class="mono">{headName(selectedSite.value, selectedHead.value)}</span></>} hint={t("steps.subtitle")}>
      {steps && (
        <span class="row sm t2">
          <span class="nw">
            {t("query")} <b class="mono b">{visibleToken(words[steps.query] ?? "")}</b> <span class="t3">{t("steps.position", { number: steps.query })}</span>
          </span>
          <span class={`tag ${steps.origin === "model" ? "ok" : ""}`} title={say(steps.note)}>
            {t(steps.origin === "model" ? "steps.ofModel" : "steps.ofTrace")}
          </span>
        </span>
      )}
      <TableButton />
    </Toolbar>
  );
}

function StepsView({ steps, pointing }: { steps: Steps; pointing: Pointing }): JSX.Element {
  const current = currentStep(steps);
  const key = chosenKey(steps);
  return (
    <>
      <Strip steps={steps} />
      <Explanation steps={steps} pointing={pointing} />
      {showsTable.value ? (
        <Panel title={stepTitle(steps.steps[current]!)}><StepTable steps={steps} step={steps.steps[current]!} /></Panel>
      ) : (
        <section class="panel flow">
          {steps.steps.map((step, number) => (
            <section key={step.index} class="step" id={`step-${number}`} aria-current={number === current ? "step" : undefined} onMouseDown={() => (selectedStep.value = number)}>
              <span class="n">{number + 1}</span>
              <div>
                <h2>{stepTitle(step)}</h2>
                <p class="formula">{say(step.formula)}</p>
                {step.part && <p class="xs t3 mono">{step.part}</p>}
              </div>
              <div class="out"><StepNumbers steps={steps} step={step} pointing={pointing} shownKey={key} onSelectKey={selectKey} /></div>
            </section>
          ))}
        </section>
      )}
      <Missing steps={steps} />
    </>
  );
}

function selectKey(position: number): void {
  selectedKey.value = position;
}

function currentStep(steps: Steps): number {
  return Math.min(selectedStep.value, steps.steps.length - 1);
}

/** The row of the shown keys that is chosen: the one of the address, or that with the largest weight. */
function chosenKey(steps: Steps): number {
  const chosen = steps.shown.findIndex((index) => steps.positions[index] === selectedKey.value);
  if (chosen >= 0) return chosen;
  const last = steps.all.length ? lastWeights(steps, { ...steps.all[steps.all.length - 1]!, index: steps.all.length }) : null;
  let best = 0;
  steps.shown.forEach((index, row) => (best = last && last[index]! > last[steps.shown[best]!]! ? row : best));
  return best;
}

function Strip({ steps }: { steps: Steps }): JSX.Element {
  const strip = useRef<HTMLElement>(null);
  const current = currentStep(steps);
  useEffect(() => {
    const button = strip.current?.querySelector<HTMLElement>("[aria-current]");
    if (button && strip.current) strip.current.scrollLeft = button.offsetLeft - strip.current.clientWidth / 2 + button.clientWidth / 2;
  }, [current]);
  return (
    <nav class="steps-strip" aria-label={t("steps.strip")} ref={strip}>
      {steps.steps.map((step, number) => (
        <Fragment key={step.index}>
          {number > 0 && <span class="to" aria-hidden="true" />}
          <button type="button" aria-current={number === current ? "step" : undefined} onClick={() => goTo(number)}>{shortTitle(step)}</button>
        </Fragment>
      ))}
    </nav>
  );
}

function goTo(number: number): void {
  selectedStep.value = number;
  document.getElementById(`step-${number}`)?.scrollIntoView({ block: "nearest" });
}

/** The number under the pointer, or the one that a click kept, with the rule and the numbers in it. */
function Explanation({ steps, pointing }: { steps: Steps; pointing: Pointing }): JSX.Element {
  const place = pointing.hovered.value ?? pointing.locked.value;
  const found = place && explain(steps, place);
  return (
    <div class="explain" data-testid="explanation">
      {found ? (
        <>
          <span class="mono">{found.symbol}</span>
          <span>=</span>
          <output>{exact(found.value)}</output>
          {found.rule && <span class="rule mono">= {found.rule}</span>}
        </>
      ) : (
        <>
          <span class="t3">{t("steps.hint")}</span>
          <span class="grow" />
          <span class="t3 sm hide-s"><kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd> {t("steps.keysHint")}</span>
        </>
      )}
    </div>
  );
}

/** Left and right walk through the steps, up and down through the keys, unless a control of the page has the focus. */
function useStepKeys(steps: Steps | null, { locked }: Pointing): void {
  useEffect(() => {
    if (!steps) return;
    const onKey = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input,textarea,select,dialog")) return;
      if (event.key === "Escape" && locked.value) {
        event.stopPropagation();
        locked.value = null;
      }
      const across = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const along = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if ((across === undefined && along === undefined) || target.closest("[role=slider],[role=listbox]")) return;
      event.preventDefault();
      event.stopPropagation();
      if (across !== undefined) goTo(Math.min(Math.max(currentStep(steps) + across, 0), steps.steps.length - 1));
      else {
        const next = Math.min(Math.max(chosenKey(steps) + along!, 0), steps.shown.length - 1);
        selectedKey.value = steps.positions[steps.shown[next]!]!;
      }
    };
    document.addEventListener("keydown", onKey, true);
    return () => document.removeEventListener("keydown", onKey, true);
  }, [steps]);
}

interface NumberRow {
  number: number;
  name: string;
  value: number;
  rule: string;
}

/** The numbers of a step as a table, each with its rule. */
function StepTable({ steps, step }: { steps: Steps; step: Step }): JSX.Element {
  const rows: NumberRow[] = [];
  const add = (array: string, row: number, index: number) => {
    const found = explain(steps, { step: step.index, array, row, index });
    if (found && rows.length < MAX_TABLE_ROWS) rows.push({ number: rows.length, name: found.symbol, value: found.value, rule: found.rule });
  };
  if (isByKey(step)) step.arrays[step.name === "mask" ? "allowed" : "out"]!.data.forEach((_, index) => add(step.name === "mask" ? "allowed" : "out", 0, index));
  else {
    const row = chosenKey(steps);
    const names = Object.keys(step.arrays).filter((name) => ["out", "q", "k", "v", "own", "others", "bias"].includes(name) && (name !== "bias" || step.arrays["own"]));
    for (const name of names) {
      const at = name === "k" || name === "v" ? row : 0;
      vector(step, name, at).forEach((_, index) => add(name, at, index));
    }
  }
  return (
    <DataTable
      caption={stepTitle(step)}
      rows={rows}
      columns={[
        { key: "number", title: t("steps.number"), numeric: true, value: (row: NumberRow) => row.number },
        { key: "name", title: isByKey(step) ? t("key") : step.name === "norm" ? "n" : "", value: (row: NumberRow) => row.name },
        { key: "value", title: t("value"), numeric: true, value: (row: NumberRow) => row.value, cell: (row: NumberRow) => exact(row.value) },
        { key: "rule", title: t("steps.formula"), value: (row: NumberRow) => row.rule, cell: (row: NumberRow) => <span class="mono">{say(row.rule)}</span> },
      ]}
    />
  );
}

/** The steps that are not known, each with the reason. */
function Missing({ steps }: { steps: Steps }): JSX.Element | null {
  const entries = Object.entries(steps.missing);
  if (!entries.length && !steps.note) return null;
  return (
    <Panel {...(entries.length ? { title: t("open.skipped") } : {})} class="missing-steps">
      {steps.note && <p class="t2">{say(steps.note)}</p>}
      <dl class="missing sm">
        {groupByReason(entries.map(([name, reason]) => [t(`step.${name}` as TextKey), reason])).map(([reason, names]) => (
          <div key={reason}>
            <dt>{names}</dt>
            <dd>{say(reason)}</dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}

function NotInExport(): JSX.Element {
  const text = doc.value?.streams["text"]?.[0]?.text ?? "";
  const words = text ? ` --text ${JSON.stringify(text)}` : "";
  return (
    <>
      <div class="toolbar"><h1>{t("screen.steps")}</h1></div>
      <div class="note stack" data-testid="not-in-export">
        <p class="b">{t("steps.noExport")}</p>
        <p class="t2">{t("steps.noExportRemedy")}</p>
        <code class="command">headwise view MODEL{words}</code>
      </div>
    </>
  );
}
