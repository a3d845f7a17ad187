// Cost: parameters, FLOPs and KV cache of the open model, whole and by attention layer.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { Notes, NumberField, Panel, Select, Toolbar } from "../components/basics";
import { DataTable } from "../components/data_table";
import { isTextKey, say, t } from "../i18n";
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

interface Workload {
  context: number;
  batch: number;
  source: number | null; // null for a model that reads no source
  dtype: string;
  device: string;
}

interface CostResult {
  rows: CostRow[];
  notes: string[];
  workload: Workload;
}

/** The resource that limits a row, or a sign that there is none. */
function boundText(bound: string): string {
  const key = `cost.bound.${bound}`;
  return isTextKey(key) ? t(key) : say(bound);
}

const DTYPES = ["fp32", "bf16", "fp16"];
const MAX_TOKENS = 2 ** 20;
const WAIT_MS = 400; // after the last change of a number

const UNITS = ["", " k", " M", " G", " T", " P", " E"];

/** A count with a unit of a thousand, such as 14.7 G. */
export function formatCount(value: number | null): string {
  if (value === null) return "–";
  const power = value < 1000 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), UNITS.length - 1);
  const scaled = value / 1000 ** power;
  return `${power === 0 ? String(value) : scaled.toFixed(scaled < 10 ? 2 : 1)}${UNITS[power]}`;
}

export function CostScreen(): JSX.Element {
  // The server chooses what is not asked for: lengths that the model supports, and its own precision.
  const asked = useSignal<Partial<Workload>>({});
  const result = useSignal<CostResult | null>(null);
  const isPossible = source.isLive && doc.value?.capabilities.measure.possible === true;
  useSignalEffect(() => {
    const wanted = asked.value;
    if (!doc.value?.capabilities.measure.possible || !source.isLive) return;
    const compute = async () => {
      const found: CostResult | null = await runJob("cost", () => (wanted === asked.value ? wanted : null));
      if (found) result.value = found;
    };
    const timer = setTimeout(() => void compute(), result.peek() ? WAIT_MS : 0);
    return () => clearTimeout(timer);
  });
  const workload = result.value?.workload;
  const lengthInput = (key: "context" | "source" | "batch", most: number) => (
    <NumberField label={t(`cost.${key}`)} min={1} max={most} value={asked.value[key] ?? workload?.[key] ?? ""} onInput={(value) => (asked.value = { ...asked.value, [key]: value || undefined })} />
  );
  const column = (key: keyof CostRow, title: string) => ({
    key,
    title,
    numeric: true,
    value: (row: CostRow) => (row[key] as number | null) ?? NaN,
    cell: (row: CostRow) => formatCount(row[key] as number | null),
  });
  return (
    <>
      <Toolbar title={t("screen.cost")}>
        {lengthInput("context", MAX_TOKENS)}
        {workload?.source && lengthInput("source", MAX_TOKENS)}
        {lengthInput("batch", 2 ** 12)}
        <Select label={t("cost.dtype")} value={asked.value.dtype ?? workload?.dtype ?? ""} options={DTYPES.map((name) => [name, name] as const)} onChange={(dtype) => (asked.value = { ...asked.value, dtype })} />
      </Toolbar>
      <Panel>
        {workload && (
          <p class="t3 sm workload" data-testid="workload">
            {t("cost.workload", { ...workload, source: workload.source ? t("cost.withSource", { count: workload.source }) : "" })}
          </p>
        )}
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
              { key: "bound", title: t("cost.bound"), value: (row: CostRow) => boundText(row.bound) },
            ]}
          />
        ) : (
          <p class="t3">{isPossible ? `${t("cost.hint")} ${t("state.computing")}…` : t("state.needsModel")}</p>
        )}
      </Panel>
      <Notes notes={result.value?.notes ?? []} />
    </>
  );
}
