// The products of one query with its keys, channel by channel: each row is a key, each column a channel, and the sum of a
// row times the scale is the score.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { cellUnder } from "../canvas/heatmap";
import { format, say, t } from "../i18n";
import type { Site } from "../source";
import { doc, headPath, isCheap, scale, selectedToken, showsTable, source, useAnswer } from "../state";
import { Button, ErrorNote, Heatmap, Panel, PlainTable } from "./basics";
import { DataTable } from "./data_table";
import { streamWords, visibleToken } from "./tokens";

interface Products {
  values: Float32Array;
  positions: Int32Array;
  channels: number;
  scale: number;
  query: number;
}

const MIDDLE = 128; // of a signed picture: no product
const LISTED = 12; // channels of the table for each end

/** The query whose products are shown: the kept token, or the last one. */
function shownQuery(item: Site): number {
  return Math.min(selectedToken.value ?? item.numQueries - 1, item.numQueries - 1);
}

export function ChannelProducts({ item }: { item: Site }): JSX.Element {
  const cell = useSignal<[number, number] | null>(null);
  const { found, error } = useAnswer(
    () => headPath("products", { query: shownQuery(item) }),
    ({ arrays, fields }): Products => {
      const { data, shape } = arrays["products"]!;
      cell.value = null;
      return { values: data as Float32Array, positions: arrays["positions"]!.data as Int32Array, channels: shape[1] ?? 1, scale: fields["scale"], query: fields["query"] };
    },
  );
  const shown = found.value;
  if (error.value) return <ErrorNote {...(source.isLive ? error.value : { fact: t("channels.live"), remedy: "" })} />;
  if (!shown) return <p class="t3">{t("state.loading")}</p>;
  return showsTable.value ? <ChannelTable shown={shown} item={item} /> : <ChannelPicture shown={shown} item={item} cell={cell.value} onCell={(value) => (cell.value = value)} />;
}

function scoreOf({ values, channels, scale: factor }: Products, row: number): number {
  let sum = 0;
  for (let channel = 0; channel < channels; channel++) sum += values[row * channels + channel]!;
  return sum * factor;
}

function ChannelPicture(props: { shown: Products; item: Site; cell: [number, number] | null; onCell: (cell: [number, number] | null) => void }): JSX.Element {
  const { shown, item, cell } = props;
  const rows = shown.positions.length;
  const most = useMemo(() => shown.values.reduce((size, value) => Math.max(size, Math.abs(value)), 1e-12), [shown]);
  const image = useMemo(
    () => ({ data: Uint8Array.from(shown.values, (value) => MIDDLE + Math.round((value / most) * 127)), rows, columns: shown.channels, isSigned: true }),
    [shown, most],
  );
  const words = streamWords(item.keyStream);
  const queryWord = visibleToken(streamWords(item.queryStream)[shown.query] ?? String(shown.query));
  const keyWord = (row: number) => visibleToken(words[shown.positions[row]!] ?? String(shown.positions[row]));
  const isLabelled = rows <= 64;
  const scores = Array.from({ length: rows }, (_, row) => scoreOf(shown, row));
  const product = cell && shown.values[cell[0] * shown.channels + cell[1]]!;
  return (
    <div class="channels">
      <p class="sm t2">{t("channels.hint", { token: queryWord, query: shown.query, channels: shown.channels })}</p>
      <div class="channel-grid">
        {isLabelled && (
          <div class="channel-words mono" aria-hidden="true">
            {Array.from(shown.positions, (position, row) => (
              <span key={position}>{keyWord(row)}</span>
            ))}
          </div>
        )}
        <div class="channel-canvas" onPointerMove={(event) => props.onCell(cellUnder(event, rows, shown.channels))} onPointerLeave={() => props.onCell(null)}>
          <Heatmap image={image} scale={scale.value} label={t("channels.label", { keys: rows, channels: shown.channels, token: queryWord })} />
        </div>
        {isLabelled && (
          <div class="channel-words num" aria-hidden="true" title={t("channels.score")}>
            {scores.map((score, row) => (
              <span key={row}>{format(score)}</span>
            ))}
          </div>
        )}
      </div>
      <p class="row wrap between sm">
        <span class="t3">{t("channels.range", { most: format(most) })}</span>
        <span class="t2" aria-live="polite" data-testid="channel">
          {cell && product !== null ? t("channels.cell", { channel: cell[1], token: keyWord(cell[0]), product: product.toPrecision(5), score: scores[cell[0]]!.toPrecision(5) }) : t("channels.point")}
        </span>
      </p>
    </div>
  );
}

interface ChannelRow {
  row: number;
  channel: number;
  product: number;
}

/** The channels that raise and lower the score of each key most. */
function ChannelTable({ shown, item }: { shown: Products; item: Site }): JSX.Element {
  const words = streamWords(item.keyStream);
  const rows: ChannelRow[] = Array.from(shown.positions).flatMap((_, row) => {
    const channels = Array.from({ length: shown.channels }, (_, channel) => ({ row, channel, product: shown.values[row * shown.channels + channel]! }));
    return channels.sort((a, b) => Math.abs(b.product) - Math.abs(a.product)).slice(0, LISTED);
  });
  return (
    <DataTable
      caption={t("channels.table")}
      rows={rows}
      columns={[
        { key: "key", title: t("key"), value: ({ row }) => `${shown.positions[row]} ${visibleToken(words[shown.positions[row]!] ?? "")}` },
        { key: "score", title: t("channels.score"), numeric: true, value: ({ row }) => scoreOf(shown, row), cell: ({ row }) => format(scoreOf(shown, row)) },
        { key: "channel", title: t("channels.channel"), numeric: true, value: ({ channel }) => channel },
        { key: "product", title: t("channels.product"), numeric: true, value: ({ product }) => product, cell: ({ product }) => format(product) },
      ]}
    />
  );
}

interface Written {
  words: string[];
  effects: Float32Array;
  note: string;
  query: number;
}

export function WrittenTokens({ item }: { item: Site }): JSX.Element | null {
  const canRun = source.isLive && doc.value?.capabilities.measure.possible === true;
  const isAsked = useSignal(false); // of a large model
  const { found, error } = useAnswer(
    () => ((isCheap.value || isAsked.value) && canRun ? headPath("written", { query: shownQuery(item) }) : null),
    ({ arrays, fields }): Written => ({ words: fields["words"], effects: arrays["effects"]!.data as Float32Array, note: fields["note"], query: shownQuery(item) }),
  );
  if (!streamWords(item.queryStream).length) return null;
  if (!canRun) return null;
  return (
    <Panel title={t("written.title")}>
      {!isCheap.value && !isAsked.value ? (
        <Button title={t("written.hint")} onClick={() => (isAsked.value = true)}>{t("written.show")}</Button>
      ) : error.value ? (
        <p class="t3 sm">{say(error.value.fact)} {say(error.value.remedy)}</p>
      ) : found.value ? (
        <WrittenTable found={found.value} item={item} />
      ) : (
        <p class="t3">{t("state.computing")}</p>
      )}
    </Panel>
  );
}

function WrittenTable({ found, item }: { found: Written; item: Site }): JSX.Element {
  const count = found.words.length / 2;
  const name = (index: number) => <span class="mono">{visibleToken(found.words[index]!)}</span>;
  const size = (index: number) => `${found.effects[index]! < 0 ? "−" : "+"}${format(Math.abs(found.effects[index]!))}`;
  return (
    <div class="stack" data-testid="written">
      <p class="sm t2">{t("written.at", { token: visibleToken(streamWords(item.queryStream)[found.query] ?? ""), query: found.query })}</p>
      <PlainTable
        titles={[t("written.raises"), `#${t("written.logit")}`, t("written.lowers"), `#${t("written.logit")}`]}
        rows={Array.from({ length: count }, (_, index) => [name(index), size(index), name(count + index), size(count + index)])}
      />
      <p class="t3 xs">{t("written.explain")} {say(found.note)}</p>
    </div>
  );
}
