// A sortable table: the text twin of every chart.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { t } from "../i18n";
import { Button, type Column } from "./basics";
import { language } from "../state";

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
  const isDescending = descending.value;
  // sorted when the rows change, not when another row is selected
  const rows = useMemo(
    () => (column ? [...props.rows].sort((a, b) => compare(column.value(a), column.value(b)) * (isDescending ? -1 : 1)) : props.rows),
    [props.rows, column, isDescending],
  );
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
            <DataRow key={index} row={row} columns={props.columns} isSelected={props.isSelected?.(row)} onSelect={props.onSelect} />
          ))}
        </tbody>
      </table>
      {props.limit === undefined && rows.length > limit && (
        <p class="row table-more">
          <span class="t3">{t("table.part", { shown: limit, count: rows.length })}</span>
          <Button onClick={() => (showsAll.value = true)}>{t("table.all")}</Button>
        </p>
      )}
    </div>
  );
}

/** One row, which is rendered anew when its content changes. Its first cell selects it for the keyboard. */
function DataRow<Row>(props: { row: Row; columns: Column<Row>[]; isSelected: boolean | undefined; onSelect: ((row: Row) => void) | undefined }): JSX.Element {
  const { row, columns, isSelected, onSelect } = props;
  return useMemo(() => {
    const content = (item: Column<Row>) => (item.cell ? item.cell(row) : item.value(row));
    return (
      <tr aria-selected={isSelected} onClick={() => onSelect?.(row)}>
        {columns.map((item, number) => (
          <td key={item.key} class={item.numeric ? "num" : ""}>
            {number === 0 && onSelect ? (
              <button class="pick" type="button">{content(item)}</button>
            ) : (
              content(item)
            )}
          </td>
        ))}
      </tr>
    );
  }, [row, columns, isSelected, language.value]);
}

/** Order texts by letters and numbers by size; what is not a number comes last. */
function compare(a: string | number, b: string | number): number {
  if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b), undefined, { numeric: true });
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) ? (Number.isNaN(b) ? 0 : -1) : 1;
  return a - b;
}
