// What the model does with the chosen heads ablated: loss and change, by position, next tokens, and random heads.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { cssRamp, themeVersion } from "../canvas/colors";
import { Button, type Column, CopyCode, Meter, Panel, Ramp, TableButton } from "../components/basics";
import { DataTable } from "../components/data_table";
import { streamWords, visibleToken } from "../components/tokens";
import { format, say, t } from "../i18n";
import { computeEffect, continued, continueText, effect, mostChanged, requestKey, type Check, type Effect, type NextToken } from "../lab_state";
import { doc, headName, job, selectedHead, selectedSite, showsTable, source } from "../state";

export function EffectPanel({ isStale }: { isStale: boolean }): JSX.Element {
  const off = doc.value?.ablated ?? [];
  const title = off.length ? t(off.length === 1 ? "off.one" : "off.many", { count: off.length }) : t("lab.preview", { name: headName(selectedSite.value, selectedHead.value) });
  return (
    <Panel title={`${title}: ${t("lab.before")} → ${t("lab.after")}`} class={isStale ? "stale" : ""} side={effect.value && <TableButton />}>
      {isStale && (
        <p class="stalebar">
          {t("lab.stale")}
          <Button onClick={() => void computeEffect()}>{t("lab.recompute")}</Button>
        </p>
      )}
      {effect.value ? <EffectView found={effect.value} /> : <p class="t3">{t(source.isLive ? (job.value ? "state.computing" : "lab.ready") : "state.needsModel")}</p>}
    </Panel>
  );
}

function EffectView({ found }: { found: Effect }): JSX.Element {
  const words = streamWords(doc.value?.streams["text"] ? "text" : Object.keys(doc.value?.streams ?? {})[0]!);
  const chosen = useSignal<number | null>(null);
  useEffect(() => void (chosen.value = null), [found]);
  const position = Math.min(chosen.value ?? mostChanged(found), found.klByPosition.length - 1);
  const next = found.nextAt[position - found.nextFrom];
  return (
    <div class="stack">
      <dl class="kv" data-testid="effect">
        {found.loss.before !== null && (
          <>
            <dt>{t("lab.loss")}</dt>
            <dd>{format(found.loss.before ?? NaN)} → <b class="b">{format(found.loss.after ?? NaN)}</b></dd>
          </>
        )}
        <dt>{t(found.outputs)}</dt>
        <dd><b class="b">{format(found.kl ?? NaN)}</b></dd>
      </dl>
      <CheckView check={found.check} />
      {found.nextAt.length > 0 && <ContinuedView />}
      {found.random.length > 0 && <RandomView found={found} />}
      <h3>{t("lab.byPosition")}</h3>
      {showsTable.value ? <PositionTable found={found} words={words} /> : <PositionChips found={found} words={words} position={position} onChoose={(index) => (chosen.value = index)} />}
      {next && (
        <>
          <h3>{t("lab.nextAfter", { token: visibleToken(words[position] ?? ""), position })}</h3>
          <NextTable rows={next} />
        </>
      )}
      {found.nextAt.length > 0 && !next && <p class="t3 sm">{t("lab.nextFrom", { position: found.nextFrom })}</p>}
      {found.command && (
        <div>
          <h3>{t("lab.command")}</h3>
          <CopyCode text={found.command} testId="lab-command" />
        </div>
      )}
    </div>
  );
}

/** Whether a copy without the weights of these heads gives the same outputs. */
function CheckView({ check }: { check: Check }): JSX.Element {
  if (!check.possible) return <p class="t3 sm" data-testid="check">{t("check.not", { reason: say(check.reason) })}</p>;
  const values = { apart: check.apart === 0 ? "0" : check.apart.toExponential(1), allowed: check.allowed.toExponential(1) };
  return (
    <p class={`sm${check.same ? "" : " warn-text"}`} data-testid="check">
      <span class={`tag ${check.same ? "ok" : "bad"}`}>{t("check.title")}</span> {t(check.same ? "check.same" : "check.differs", values)}{" "}
      {check.areLogits && <span class="t3">{t("check.logits", { largest: format(check.largest) })}</span>}
    </p>
  );
}

/** What the model writes after the text, with all heads and without the chosen ones; tokens that differ are marked. */
function ContinuedView(): JSX.Element {
  const known = continued.value?.request === requestKey.value ? continued.value : null;
  if (!known) {
    return (
      <Button aria-disabled={job.value !== null} onClick={() => job.value === null && void continueText()}>{t("lab.continue")}</Button>
    );
  }
  if (!known.possible) return <p class="t3 sm">{say(known.reason)}</p>;
  const { before, after } = known;
  const longer = before.length > after.length ? before : after;
  const differs = longer.findIndex((_, index) => before[index] !== after[index]);
  const row = (title: string, tokens: string[], others: string[]) => (
    <div class="row top continued">
      <span class="t3 sm">{title}</span>
      <p class="mono">
        {tokens.map((token, index) => (
          <span key={index} class={token === others[index] ? "" : "other-token"}>{visibleToken(token)}</span>
        ))}
      </p>
    </div>
  );
  return (
    <div data-testid="continued">
      <h3>{t("lab.continued")}</h3>
      {row(t("lab.before"), before, after)}
      {row(t("lab.after"), after, before)}
      <p class="t3 sm">{differs < 0 ? t("lab.noDifference", { count: before.length }) : t("lab.firstDifference", { number: differs + 1 })}</p>
    </div>
  );
}

/** How the change compares with that of random sets of as many heads. */
function RandomView({ found }: { found: Effect }): JSX.Element {
  const changes = found.random.map(({ change }) => change).sort((a, b) => a - b);
  const losses = found.random.flatMap(({ loss }) => (loss === null ? [] : [loss])).sort((a, b) => a - b);
  const larger = changes.filter((change) => change >= (found.kl ?? 0)).length;
  return (
    <div data-testid="random">
      <h3>{t("lab.randomTitle", { count: changes.length })}</h3>
      <p>
        {t(found.outputs)}: {format(changes[0]!)} … {format(changes.at(-1)!)}
        {losses.length > 0 && ` · ${t("lab.loss")}: ${format(losses[0]!)} … ${format(losses.at(-1)!)}`}
      </p>
      <p class="t3 sm">{t("lab.randomRank", { larger, count: changes.length })}</p>
    </div>
  );
}

function PositionChips(props: { found: Effect; words: string[]; position: number; onChoose: (index: number) => void }): JSX.Element {
  const { found, words, position } = props;
  const box = useRef<HTMLDivElement>(null);
  const version = themeVersion.value;
  const most = Math.max(...found.klByPosition.map((value) => value ?? 0), 1e-12);
  useEffect(() => {
    const chips = box.current?.children ?? [];
    found.klByPosition.forEach((value, index) => {
      const color = cssRamp(((value ?? 0) / most) * 0.75);
      for (const name of ["--to", "--from"]) (chips[index] as HTMLElement | undefined)?.style.setProperty(name, color);
    });
  }, [found, version]);
  return (
    <div>
      <div class="chips" ref={box} role="group" aria-label={t("lab.byPosition")}>
        {found.klByPosition.map((_, index) => (
          <button key={index} type="button" class="chip" aria-pressed={position === index} onMouseEnter={() => props.onChoose(index)} onFocus={() => props.onChoose(index)} onClick={() => props.onChoose(index)}>
            {visibleToken(words[index] ?? String(index))}
          </button>
        ))}
      </div>
      <p class="row wrap between sm">
        <span class="t2" data-testid="position">
          {position} {visibleToken(words[position] ?? "")}: {t(found.outputs)} {format(found.klByPosition[position] ?? NaN)}
          {found.lossByPosition.before.length > position && ` · ${t("lab.loss")} ${format(found.lossByPosition.before[position] ?? NaN)} → ${format(found.lossByPosition.after[position] ?? NaN)}`}
        </span>
        <Ramp text={`0 … ${format(most)}`} />
      </p>
    </div>
  );
}

function PositionTable({ found, words }: { found: Effect; words: string[] }): JSX.Element {
  const rows = found.klByPosition.map((change, index) => ({ index, change, before: found.lossByPosition.before[index], after: found.lossByPosition.after[index] }));
  type Row = (typeof rows)[number];
  const column = (key: "before" | "after" | "change", title: string): Column<Row> => ({ key, title, numeric: true, value: (row) => row[key] ?? NaN, cell: (row) => format(row[key] ?? NaN) });
  return (
    <DataTable
      caption={t("lab.byPosition")}
      rows={rows}
      columns={[
        { key: "token", title: t("lab.token"), value: (row) => `${row.index} ${visibleToken(words[row.index] ?? "")}` },
        column("change", t(found.outputs)),
        ...(found.lossByPosition.before.length ? [column("before", `${t("lab.loss")}, ${t("lab.before")}`), column("after", t("lab.after"))] : []),
      ]}
    />
  );
}

function NextTable({ rows }: { rows: NextToken[] }): JSX.Element {
  return (
    <DataTable
      caption={t("lab.next")}
      rows={rows}
      columns={[
        { key: "token", title: t("lab.token"), value: (row) => visibleToken(row.token) },
        { key: "before", title: t("lab.before"), numeric: true, value: (row) => row.before, cell: (row) => format(row.before) },
        { key: "after", title: t("lab.after"), numeric: true, value: (row) => row.after, cell: (row) => format(row.after) },
        { key: "bar", title: t("lab.bar"), value: (row) => row.after, cell: (row) => <span class="bar-cell"><Meter value={row.after} chance={row.before} /></span> },
      ]}
    />
  );
}
