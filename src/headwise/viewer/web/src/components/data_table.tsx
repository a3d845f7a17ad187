// A sortable table: the text twin of every chart.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { t } from "../i18n";
import type { Column } from "./basics";

const MOST_ROWS = 500; // rows that are drawn at once; sorting always takes all of them

export function DataTable<Row>(props: {
  caption: string;
  columns: Column<Row>[];
  rows: Row[];
  sort?: string;
  limit?: number;
  onSelect?: (row: Row) => void;
  isSelected?: (row: Row) => boolean;
}): JSX.Element {
  const showsAll = useSignal(false);
  const limit = showsAll.value ? props.rows.length : (props.limit ?? MOST_ROWS);
  const sortKey = useSignal(props.sort ?? "");
  const descending = useSignal(true);
  const column = props.columns.find((item) => item.key === sortKey.value);
  const rows = [...props.rows];
  if (column) {
    rows.sort((a, b) => compare(column.value(a), column.value(b)) * (descending.value ? -1 : 1));
  }
  const choose = (key: string) => {
    if (sortKey.value === key) descending.value = !descending.value;
    else {
      sortKey.value = key;
      descending.value = true;
    }
  };
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={props.caption}>
      <table class="data">
        <caption class="vh">{props.caption}</caption>
        <thead>
          <tr>
            {props.columns.map((item) =>
              item.title === "" ? (
                <td key={item.key} /> // bars of the numbers beside them
              ) : (
                <th
                  key={item.key}
                  class={item.numeric ? "num" : ""}
                  scope="col"
                  aria-sort={item.key === sortKey.value ? (descending.value ? "descending" : "ascending") : "none"}
                >
                  <button type="button" onClick={() => choose(item.key)}>
                    {item.title}
                    <span aria-hidden="true">{item.key === sortKey.value ? (descending.value ? " ↓" : " ↑") : ""}</span>
                  </button>
                </th>
              ),
            )}
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, limit).map((row, index) => (
            <tr key={index} aria-selected={props.isSelected?.(row)} onClick={() => props.onSelect?.(row)}>
              {props.columns.map((item) => (
                <td key={item.key} class={item.numeric ? "num" : ""}>
                  {item.cell ? item.cell(row) : item.value(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {props.limit === undefined && rows.length > limit && (
        <p class="row table-more">
          <span class="t3">{t("table.part", { shown: limit, count: rows.length })}</span>
          <button class="btn" type="button" onClick={() => (showsAll.value = true)}>
            {t("table.all")}
          </button>
        </p>
      )}
    </div>
  );
}

/** Order texts by letters and numbers by size; what is not a number comes last. */
function compare(a: string | number, b: string | number): number {
  if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b), undefined, { numeric: true });
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) ? (Number.isNaN(b) ? 0 : -1) : 1;
  return a - b;
}
