// Lab: switch heads off or scale them, and compare what the model does before and after.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { ablateReason, setAblated, toggleAblated, undoAblation } from "../actions";
import { Meter, Panel, Select } from "../components/basics";
import { DataTable } from "../components/data_table";
import { streamWords, visibleToken } from "../components/tokens";
import { format, t, type TextKey } from "../i18n";
import { doc, headCount, headName, isAblated, runJob, selectHead, selectedHead, selectedSite, site, sites, source } from "../state";
import type { AblatedHead } from "../source";

interface Effect {
  heads: AblatedHead[];
  loss: { before: number | null; after: number | null };
  kl: number | null;
  klByPosition: (number | null)[];
  next: { token: string; before: number; after: number }[];
  outputs: string;
  notes: string[];
}

const MODES = ["zero", "mean"] as const;

export function LabScreen(): JSX.Element {
  const effect = useSignal<Effect | null>(null);
  const mode = useSignal<(typeof MODES)[number]>("zero");
  const ablated = doc.value?.ablated ?? [];
  const reason = ablateReason();
  const isStale = effect.value !== null && JSON.stringify(effect.value.heads) !== JSON.stringify(ablated);
  const compute = async () => {
    const heads = ablated.map((item) => [item.site, item.head, item.mode, item.scale]);
    const result = await runJob("ablate", { heads });
    if (result) effect.value = { ...result, heads: ablated };
  };
  const changeMode = (value: (typeof MODES)[number]) => {
    mode.value = value;
    setAblated(ablated.map((item) => ({ ...item, mode: value })));
  };
  return (
    <>
      <div class="toolbar">
        <h1>{t("lab.title")}</h1>
        <span class="sm t3">{t("lab.off", { count: ablated.length, total: headCount.value })}</span>
        <span class="grow" />
        <Select label={t("lab.mode")} value={mode.value} options={MODES.map((name) => [name, t(`lab.${name}` as TextKey)] as const)} onChange={changeMode} />
        <button class="btn" type="button" onClick={undoAblation}>
          {t("lab.undo")}
        </button>
        <button class="btn" type="button" onClick={() => setAblated([])}>
          {t("lab.clear")}
        </button>
        <button class="btn primary" type="button" aria-disabled={!ablated.length || !source.isLive} onClick={() => ablated.length && void compute()}>
          {t("lab.run")}
        </button>
      </div>
      {reason && <p class="note">{reason}</p>}
      <div class="lab-lay">
        <Panel title={t("open.layers")}>
          <p class="t3 sm">{t("lab.hint")}</p>
          <div class="switches" role="group" aria-label={t("lab.hint")}>
            {sites.value.map((item, number) => (
              <div class="switch-row" key={item.name}>
                <span class="xs t3" title={item.name}>
                  {headName(number, 0).split(" ")[0]}
                </span>
                {Array.from({ length: item.heads }, (_, head) => (
                  <button
                    key={head}
                    type="button"
                    role="switch"
                    class={`switch ${selectedSite.value === number && selectedHead.value === head ? "current" : ""}`}
                    aria-checked={!isAblated(number, head)}
                    aria-label={headName(number, head)}
                    onClick={() => {
                      selectHead(number, head);
                      toggleAblated(number, head, mode.value);
                    }}
                  >
                    {head}
                  </button>
                ))}
              </div>
            ))}
          </div>
        </Panel>
        <Panel title={`${t("lab.before")} → ${t("lab.after")}`} class={isStale ? "stale" : ""}>
          {isStale && (
            <p class="stalebar">
              {t("lab.stale")}
              <button class="btn" type="button" onClick={() => void compute()}>
                {t("lab.recompute")}
              </button>
            </p>
          )}
          {effect.value ? <EffectView effect={effect.value} /> : <p class="t3">{ablated.length ? t("lab.run") : t("lab.none")}</p>}
        </Panel>
      </div>
    </>
  );
}

function EffectView({ effect }: { effect: Effect }): JSX.Element {
  const words = streamWords(site.value?.queryStream ?? "text");
  const most = Math.max(...effect.klByPosition.map((value) => value ?? 0), 1e-9);
  const number = (value: number | null) => (value === null ? "–" : format(value));
  return (
    <div class="stack">
      <dl class="kv" data-testid="effect">
        <dt>{t("lab.loss")}</dt>
        <dd>
          {number(effect.loss.before)} → <b class="b">{number(effect.loss.after)}</b>
        </dd>
        <dt>{effect.outputs}</dt>
        <dd>
          <b class="b">{number(effect.kl)}</b>
        </dd>
      </dl>
      {effect.next.length > 0 && (
        <DataTable
          caption={t("lab.next")}
          rows={effect.next}
          columns={[
            { key: "token", title: t("lab.token"), value: (row) => visibleToken(row.token) },
            { key: "before", title: t("lab.before"), numeric: true, value: (row) => row.before, cell: (row) => format(row.before) },
            { key: "bar", title: "", value: (row) => row.after, cell: (row) => <span class="bar-cell"><Meter value={row.after} chance={row.before} /></span> },
            { key: "after", title: t("lab.after"), numeric: true, value: (row) => row.after, cell: (row) => format(row.after) },
          ]}
        />
      )}
      <h3>{t("lab.byPosition")}</h3>
      <table class="finder">
        <tbody>
          {effect.klByPosition.slice(0, 64).map((value, index) => (
            <tr key={index}>
              <td class="mono">{visibleToken(words[index] ?? String(index))}</td>
              <td class="bar-cell">
                <Meter value={(value ?? 0) / most} />
              </td>
              <td class="num">{number(value)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {effect.notes.map((note) => (
        <p key={note} class="t3 sm">
          {note}
        </p>
      ))}
    </div>
  );
}
