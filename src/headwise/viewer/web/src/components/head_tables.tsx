// The numbers behind the bars of the Head screen, as sortable tables.

import type { JSX } from "preact";
import { format, t } from "../i18n";
import type { Site } from "../source";
import { Panel, type Column } from "./basics";
import { DataTable } from "./data_table";
import type { Marginals } from "./head_data";
import { streamWords, visibleToken } from "./tokens";

/** The mean weight at every distance that the head has. */
export function OffsetTable({ marginals }: { marginals: Marginals }): JSX.Element {
  const rows = Array.from(marginals.byOffset, (mean, place) => ({ offset: place + marginals.firstOffset, mean })).filter(({ mean }) => mean > 0);
  return (
    <DataTable
      caption={t("head.offsets")}
      rows={rows}
      columns={[
        { key: "offset", title: t("head.offsetAxis"), numeric: true, value: (row) => row.offset },
        { key: "mean", title: t("weight"), numeric: true, value: (row) => row.mean, cell: (row) => format(row.mean) },
      ]}
    />
  );
}

interface Row {
  position: number;
  values: [number, number];
}

/** Entropy and largest weight of every query, and what every key receives. */
export function MarginalTables({ item, marginals }: { item: Site; marginals: Marginals }): JSX.Element {
  const { entropy, maximum, received } = marginals;
  const word = (stream: string, position: number) => `${position} ${visibleToken(streamWords(stream)[position] ?? "")}`;
  const column = (place: 0 | 1, title: string): Column<Row> => ({ key: String(place), title, numeric: true, value: (row) => row.values[place], cell: (row) => format(row.values[place]) });
  const queries = Array.from(entropy, (value, position): Row => ({ position, values: [value, maximum[position]!] }));
  const keys = Array.from(received, (value, position): Row => ({ position, values: [value, NaN] }));
  return (
    <div class="two">
      <Panel title={t("head.byQuery")}>
        <DataTable
          caption={t("head.byQuery")}
          rows={queries}
          columns={[{ key: "query", title: t("query"), value: (row) => word(item.queryStream, row.position) }, column(0, t("head.entropyNats")), column(1, t("head.maximum"))]}
        />
      </Panel>
      <Panel title={t("head.byKey")}>
        <DataTable caption={t("head.byKey")} rows={keys} columns={[{ key: "key", title: t("key"), value: (row) => word(item.keyStream, row.position) }, column(0, t("head.mass"))]} />
      </Panel>
    </div>
  );
}
