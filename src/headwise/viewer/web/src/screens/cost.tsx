// Cost: parameters, FLOPs and KV cache of the open model, whole and by attention layer.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { Panel } from "../components/basics";
import { DataTable } from "../components/data_table";
import { say, t } from "../i18n";
import { doc, runJob, source } from "../state";

interface CostRow {
  name: string;
  params: number;
  prefill: number | null;
  decode: number | null;
  kv_bytes_per_token: number | null;
  kv_bytes: number | null;
  bound: string;
}

interface CostResult {
  rows: CostRow[];
  notes: string[];
  workload: { context: number; batch: number };
}

const UNITS = ["", " k", " M", " G", " T", " P", " E"];

/** A count with a unit of a thousand, such as 14.7 G. */
export function formatCount(value: number | null): string {
  if (value === null) return "–";
  const power = value < 1000 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), UNITS.length - 1);
  const scaled = value / 1000 ** power;
  return `${power === 0 ? String(value) : scaled.toFixed(scaled < 10 ? 2 : 1)}${UNITS[power]}`;
}

export function CostScreen(): JSX.Element {
  const context = useSignal(2048);
  const batch = useSignal(1);
  const result = useSignal<CostResult | null>(null);
  const compute = async (event: Event) => {
    event.preventDefault();
    const found = await runJob("cost", { context: context.value, batch: batch.value });
    if (found) result.value = found;
  };
  const column = (key: keyof CostRow, title: string) => ({
    key,
    title,
    numeric: true,
    value: (row: CostRow) => (row[key] as number | null) ?? NaN,
    cell: (row: CostRow) => formatCount(row[key] as number | null),
  });
  return (
    <>
      <form class="toolbar" onSubmit={(event) => void compute(event)}>
        <h1>{t("screen.cost")}</h1>
        <span class="grow" />
        <label class="picker">
          <span>{t("cost.context")}</span>
          <input type="number" min="1" max={2 ** 20} value={context.value} onInput={(event) => (context.value = Number(event.currentTarget.value))} />
        </label>
        <label class="picker">
          <span>{t("cost.batch")}</span>
          <input type="number" min="1" max={2 ** 12} value={batch.value} onInput={(event) => (batch.value = Number(event.currentTarget.value))} />
        </label>
        <button class="btn primary" type="submit" aria-disabled={!source.isLive || !doc.value?.capabilities.measure.possible}>
          {t("cost.run")}
        </button>
      </form>
      <Panel>
        {result.value ? (
          <DataTable
            caption={t("screen.cost")}
            rows={result.value.rows}
            columns={[
              { key: "name", title: t("layer"), value: (row: CostRow) => row.name },
              column("params", t("cost.params")),
              column("prefill", t("cost.prefill")),
              column("decode", t("cost.decode")),
              column("kv_bytes_per_token", t("cost.kvToken")),
              column("kv_bytes", t("cost.kv")),
              { key: "bound", title: t("cost.bound"), value: (row: CostRow) => say(row.bound) },
            ]}
          />
        ) : (
          <p class="t3">{doc.value?.capabilities.measure.possible ? t("cost.hint") : t("state.needsModel")}</p>
        )}
      </Panel>
      {result.value?.notes.map((note) => (
        <p key={note} class="t3 sm">
          {say(note)}
        </p>
      ))}
    </>
  );
}
