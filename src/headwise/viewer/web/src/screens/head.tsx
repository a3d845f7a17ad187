// Head: the weights of one head as a matrix, lines or arcs, with exact numbers on demand.

import { useSignal, useSignalEffect, type ReadonlySignal, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { ChannelProducts, WrittenTokens } from "../components/channel_products";
import { bind, choices, ErrorNote, Panel, Ramp, Segmented, Select, Slider, TableButton, Toolbar } from "../components/basics";
import { MAX_CELLS, useHeadData, type HeadData, type Pointed } from "../components/head_data";
import { MarginalTables, Minimap, OffsetProfile, RowPanel } from "../components/head_panels";
import { isSameView, Matrix } from "../components/matrix";
import { HeadExamples } from "../components/head_examples";
import { HeadClass } from "../components/inspector";
import { PatchPanel } from "../components/patch_panel";
import { QueryKeyPoints } from "../components/query_key_points";
import { StrongestPairs, TokenLines } from "../components/token_lines";
import { streamWords, tokenName } from "../components/tokens";
import { WhyPanel } from "../components/why_panel";
import { format, t, type TextKey } from "../i18n";
import type { Site } from "../source";
import { headForm, headName, leastShare, LENSES, lens, lockedCell, matrixView, rowMarginal, scale, SCALES, selectedHead, selectedSite, showsTable, site } from "../state";

const MAX_LINE_TOKENS = 64;

export function HeadScreen(): JSX.Element {
  const pointed = usePointedCell();
  const data = useHeadData(pointed);
  const item = site.value;
  if (!item) return <p class="t3">{t("open.none")}</p>;
  const tokens = Math.max(item.numQueries, item.numKeys);
  const isImage = streamWords(item.keyStream).length === 0;
  const isTooLong = (headForm.value === "lines" || headForm.value === "arcs") && tokens > MAX_LINE_TOKENS;
  const form = isTooLong ? "matrix" : headForm.value;
  const isLines = (form === "lines" || form === "arcs") && !showsTable.value;
  return (
    <>
      <HeadToolbar item={item} />
      <HeadClass />
      {data.error.value && <ErrorNote {...data.error.value} />}
      <div class="head-lay">
        <div class="stack">
          <Panel footer={isLines ? t("head.linesHint", { scale: t(`scale.${scale.value}` as TextKey) }) : form === "matrix" ? <CellFooter item={item} pointed={pointed} data={data} /> : undefined}>
            {form === "channels" ? (
              <ChannelProducts item={item} />
            ) : showsTable.value && form !== "points" ? (
              <StrongestPairs item={item} tile={data.tile.value} />
            ) : form === "points" ? (
              <QueryKeyPoints item={item} />
            ) : form !== "matrix" ? (
              <TokenLines item={item} tile={data.tile.value} arcs={form === "arcs" && item.queryStream === item.keyStream} />
            ) : (
              <>
                {isTooLong && <p class="note">{t("head.tooLong", { count: MAX_LINE_TOKENS })}</p>}
                <Matrix item={item} tile={data.tile.value} marginals={data.marginals.value} pointed={pointed} />
              </>
            )}
          </Panel>
          <HeadExamples />
          {showsTable.value && data.marginals.value && <MarginalTables item={item} marginals={data.marginals.value} />}
        </div>
        <div class="stack">
          {(tokens > MAX_CELLS || matrixView.value) && <Minimap item={item} />}
          {isImage && <PatchPanel item={item} row={data.row} />}
          <RowPanel item={item} row={data.row} marginals={data.marginals} />
          <WhyPanel item={item} />
          <OffsetProfile item={item} data={data} />
          <WrittenTokens item={item} />
        </div>
      </div>
    </>
  );
}

/** The cell under the pointer, or the one that a click keeps, which the URL holds. */
function usePointedCell(): Signal<Pointed | null> {
  const pointed = useSignal<Pointed | null>(null);
  useSignalEffect(() => {
    const kept = lockedCell.value;
    const shown = pointed.peek();
    if (kept && !isSameView(kept, shown)) pointed.value = { ...kept, locked: true };
    else if (!kept && shown?.locked) pointed.value = null;
  });
  useSignalEffect(() => {
    const shown = pointed.value;
    const kept = shown?.locked ? { q0: shown.q0, q1: shown.q1, k0: shown.k0, k1: shown.k1 } : null;
    if (!isSameView(kept, lockedCell.peek())) lockedCell.value = kept;
  });
  return pointed;
}

function HeadToolbar({ item }: { item: Site }): JSX.Element {
  const form = headForm.value;
  return (
    <Toolbar title={t("head.title", { name: headName(selectedSite.value, selectedHead.value) })}>
      <Segmented label={t("head.form")} {...bind(headForm)} options={choices("head.", ["matrix", "lines", "arcs", "points", "channels"])} />
      <TableButton />
      <span class="line-end" />
      {item.hasValues && form !== "points" && form !== "channels" && <Select label={t("head.lens")} {...bind(lens)} options={choices("lens.", LENSES)} />}
      {(form === "lines" || form === "arcs") && !showsTable.value && (
        <Slider label={t("head.least", { share: Math.round(leastShare.value * 100) })} min={0} max={0.9} step={0.01} value={leastShare.value} onInput={(value) => (leastShare.value = value)} />
      )}
      {form !== "points" && <Select label={t("scale.label")} {...bind(scale)} options={choices("scale.", SCALES)} />}
      {form === "matrix" && <Select label={t("head.rows")} {...bind(rowMarginal)} options={[["entropy", t("head.rowsEntropy")], ["maximum", t("head.rowsMaximum")]]} />}
    </Toolbar>
  );
}

/** The ramp with its range, and the exact number of the pointed cell. */
function CellFooter({ item, pointed: cell, data }: { item: Site; pointed: ReadonlySignal<Pointed | null>; data: HeadData }): JSX.Element {
  const pointed = cell.value;
  const tile = data.tile.value;
  return (
    <div class="cell-footer">
      <Ramp text={t("map.ramp", { scale: t(`scale.${scale.value}` as TextKey) }).replace("1", tile ? format(tile.scale) : "1")} />
      <span class="t2" aria-live="polite" data-testid="exact">
        {!pointed ? t("head.hint") : pointed.q1 - pointed.q0 > 1 || pointed.k1 - pointed.k0 > 1 ? <PooledCell item={item} pointed={pointed} data={data} /> : <SingleCell item={item} pointed={pointed} data={data} />}
      </span>
    </div>
  );
}

function pairName(item: Site, query: number, key: number): string {
  return t("head.cell", { query: tokenName(item.queryStream, query), key: tokenName(item.keyStream, key) });
}

function SingleCell({ item, pointed, data }: { item: Site; pointed: Pointed; data: HeadData }): JSX.Element {
  const row = data.row.value?.query === pointed.q0 ? data.row.value : null;
  const isHidden = row?.masked[pointed.k0] === 1;
  return (
    <>
      <span class="mono">{pairName(item, pointed.q0, pointed.k0)}</span> <b class="b">{isHidden ? t("head.forbidden") : row ? row.weights[pointed.k0]!.toPrecision(6) : "…"}</b>
    </>
  );
}

/** A cell that covers several pairs: the largest of their exact weights, and where it is. */
function PooledCell({ item, pointed, data }: { item: Site; pointed: Pointed; data: HeadData }): JSX.Element {
  const peak = data.peak.value;
  return (
    <>
      <span class="t3">{t("head.span", { q0: pointed.q0, q1: pointed.q1 - 1, k0: pointed.k0, k1: pointed.k1 - 1 })}</span>{" "}
      {peak && <span class="mono">{pairName(item, peak.query, peak.key)}</span>} <b class="b">{peak ? peak.weight.toPrecision(6) : "…"}</b>
    </>
  );
}
