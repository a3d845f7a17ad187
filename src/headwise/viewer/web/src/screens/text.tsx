// Text: tokens as chips and as lines. Of one head or the mean of several, the upper half of a chip shows where the pointed
// token attends to, the lower half which tokens attend to it; of two heads, each half shows where one of them attends to.

import { useComputed, useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { generateText } from "../actions";
import { cssRamp, rampPosition, themeVersion } from "../canvas/colors";
import { bind, Button, choices, ErrorNote, Panel, Segmented, Select, TableButton, WholeNumber } from "../components/basics";
import { DataTable } from "../components/data_table";
import { StrongestPairs } from "../components/token_lines";
import { MAX_CELLS, strongestQuery, type TileState } from "../components/head_data";
import { isSpecial, streamWords, visibleToken } from "../components/tokens";
import { fetchAggregateTile, fetchAggregateWeights, fetchCombinedTile, fetchWeights, type HeadPair, largest, leaveOut, MOST_LINES, NO_WEIGHTS, otherHeads, shownGroups, VoiceLines, type Weights } from "../components/voice_lines";
import { format, t, type TextKey } from "../i18n";
import type { PageError, Site } from "../source";
import { addedTokens, aggregate, AGGREGATES, combination, COMBINATIONS, doc, excludedTokens, generation, headName, job, scale, secondHead, selectedSite, selectedToken, showsTable, site, sites, source, textMode, toPageError } from "../state";

const LISTED = 6; // keys and queries in the lists
const COLUMN_WAIT_MS = 200;

interface Shown {
  tiles: TileState[];
  weights: Weights[];
}

export function TextScreen(): JSX.Element {
  const hovered = useSignal<{ stream: string; index: number } | null>(null);
  const tiles = useSignal<TileState[]>([]);
  const weights = useSignal<Weights[]>([]);
  const error = useSignal<PageError | null>(null);
  const item = site.value;
  /** What is pointed at: the hovered token, the kept one, or the query of the strongest pair. */
  const pointed = useComputed(() => {
    const current = site.value;
    if (!current) return null;
    if (hovered.value) return hovered.value;
    if (selectedToken.value !== null) return { stream: current.queryStream, index: selectedToken.value };
    const query = tiles.value[0] ? strongestQuery(tiles.value[0]) : null;
    return query === null ? null : { stream: current.queryStream, index: query };
  });
  useSignalEffect(() => {
    void doc.value?.revision;
    const abort = new AbortController();
    error.value = null;
    const isAll = textMode.value === "all";
    if (isAll && !source.isLive) error.value = { fact: t("text.allLive"), remedy: "" };
    else if (site.value) {
      const found = isAll ? Promise.all([fetchAggregateTile()]) : Promise.all(shownGroups().map((heads) => fetchCombinedTile(heads, abort.signal)));
      found.then(
        (answers) => !abort.signal.aborted && (tiles.value = answers),
        (reason) => !abort.signal.aborted && isAll && (error.value = toPageError(reason)),
      );
    }
    return () => abort.abort();
  });
  useSignalEffect(() => {
    const place = site.value && pointed.value && readPlace(site.value, pointed.value);
    const abort = new AbortController();
    const queries = place && place.query !== null ? [place.query, ...addedTo(place.query)] : [];
    const isAll = textMode.value === "all";
    const excluded = excludedTokens.value;
    if (!place || (isAll && !source.isLive)) weights.value = shownGroups().map(() => NO_WEIGHTS);
    else {
      const groups = shownGroups();
      const show = async (key: number | null) => {
        const answers = await (isAll ? Promise.all([fetchAggregateWeights(queries, key)]) : Promise.all(groups.map((heads) => fetchWeights(heads, queries, key, abort.signal))));
        if (!abort.signal.aborted) weights.value = answers.map((answer) => leaveOut(answer, excluded));
      };
      // a row of a long text is read at once; a column needs every row, so it waits until the pointer rests
      const isLong = !isAll && (site.value?.numQueries ?? 0) > MAX_CELLS && place.key !== null;
      const first = show(isLong ? null : place.key);
      const rest = async () => {
        await first;
        if (isLong) await new Promise((done) => setTimeout(done, COLUMN_WAIT_MS));
        if (isLong && !abort.signal.aborted) await show(place.key);
      };
      rest().catch(() => null); // the pointer has moved on
    }
    return () => abort.abort();
  });
  /** Point at a token; at the same one again, nothing is read anew. */
  const point = (value: typeof hovered.value) => {
    const now = hovered.peek();
    if (value?.index !== now?.index || value?.stream !== now?.stream) hovered.value = value;
  };
  if (!item) return <p class="t3">{t("open.none")}</p>;
  return (
    <>
      <Toolbar />
      <div class="stack">
        <Generation />
        {error.value && <ErrorNote {...error.value} />}
        <Excluded />
        <TextBody item={item} shown={{ tiles: tiles.value, weights: weights.value }} pointed={pointed.value} onHover={point} />
      </div>
    </>
  );
}

/** The other tokens whose weights are added to those of a token, while it is the kept one. */
function addedTo(query: number): number[] {
  const count = site.value?.numQueries ?? 0;
  return query === selectedToken.value ? addedTokens.value.filter((token) => token !== query && token < count) : [];
}

/** The tokens that are left out, and the way back. */
function Excluded(): JSX.Element | null {
  if (!excludedTokens.value.length) return null;
  return (
    <p class="note" data-testid="excluded">
      <span class="grow">{t("text.excluded", { count: excludedTokens.value.length })}</span>
      <Button onClick={() => (excludedTokens.value = [])}>{t("text.include")}</Button>
    </p>
  );
}

/** Leave a key out, or bring it back. */
function toggleExcluded(index: number): void {
  excludedTokens.value = excludedTokens.value.includes(index) ? excludedTokens.value.filter((token) => token !== index) : [...excludedTokens.value, index];
}

/** Keep all tokens from one to another. */
function keepSpan(from: number, to: number): void {
  const [first, last] = [Math.min(from, to), Math.max(from, to)];
  selectedToken.value = first;
  addedTokens.value = Array.from({ length: last - first }, (_, step) => first + 1 + step);
}

/** A click keeps a token, or releases it; with shift it adds the token to the kept one, or takes it away. */
function keepToken(index: number, isShift: boolean): void {
  if (isShift && selectedToken.value !== null && index !== selectedToken.value) {
    addedTokens.value = addedTokens.value.includes(index) ? addedTokens.value.filter((token) => token !== index) : [...addedTokens.value, index];
    return;
  }
  addedTokens.value = [];
  selectedToken.value = selectedToken.value === index ? null : index;
}

/** The pointed token as a query and as a key of a layer, where it is one. */
function readPlace(item: Site, pointed: { stream: string; index: number }): { query: number | null; key: number | null } {
  const query = pointed.stream === item.queryStream && pointed.index < item.numQueries ? pointed.index : null;
  const key = pointed.stream === item.keyStream && pointed.index < item.numKeys ? pointed.index : null;
  return { query, key };
}

function groupName(heads: HeadPair[]): string {
  if (textMode.value === "all") return t(`text.all.${aggregate.value}` as TextKey);
  if (heads.length > 1 && combination.value === "max") return t("text.max", { count: heads.length });
  return heads.length === 1 ? headName(...heads[0]!) : t("text.mean", { count: heads.length });
}

function Toolbar(): JSX.Element {
  const groups = shownGroups();
  const item = sites.value[selectedSite.value]!;
  const alike = sites.value.flatMap((other, number) =>
    other.queryStream === item.queryStream && other.keyStream === item.keyStream ? Array.from({ length: other.heads }, (_, head): HeadPair => [number, head]) : [],
  );
  const others = alike.filter(([number, head]) => number !== groups[0]![0]![0] || head !== groups[0]![0]![1]);
  return (
    <div class="toolbar">
      <h1>{t("screen.text")}</h1>
      <Segmented label={t("text.heads")} value={textMode.value} options={choices("text.mode.", ["one", "set", "two", "all"])} onChange={(value) => (textMode.value = value)} />
      {(textMode.value === "set" ? groups[0]! : groups.map((heads) => heads[0]!)).map(([number, head], place) => (
        <span key={`${number}.${head}`} class={`tag mono ${textMode.value === "two" ? `hue-tag-${place === 0 ? "a" : "b"}` : ""}`}>
          {headName(number, head)}
        </span>
      ))}
      {textMode.value === "set" && <Select label={t("text.combine")} {...bind(combination)} options={choices("text.combine.", COMBINATIONS)} />}
      {textMode.value === "all" && <Select label={t("text.all")} {...bind(aggregate)} options={choices("text.all.", AGGREGATES.filter((name) => item.queryStream === item.keyStream || name !== "rollout.layer"))} />}
      {textMode.value === "two" && groups[1] && (
        <Select label={t("text.second")} value={groups[1][0]!.join(".")} options={others.map((pair) => [pair.join("."), headName(...pair)] as const)} onChange={(value) => (secondHead.value = value)} />
      )}
      <span class="grow" />
      <span class="sm t3 hide-s">{selectedToken.value !== null ? t("text.locked", { number: selectedToken.value }) : textMode.value === "set" && !otherHeads().length ? t("text.setHint") : t(textMode.value === "two" ? "text.twoHint" : textMode.value === "all" && aggregate.value === "rollout.layer" ? "text.rolloutHint" : "text.hint")}</span>
      <TableButton />
    </div>
  );
}

function TextBody(props: { item: Site; shown: Shown; pointed: { stream: string; index: number } | null; onHover: (value: { stream: string; index: number } | null) => void }): JSX.Element {
  const { item, shown, pointed } = props;
  const streams = [...new Set([item.keyStream, item.queryStream])];
  const place = pointed && readPlace(item, pointed);
  const groups = shownGroups();
  const first = shown.weights[0] ?? NO_WEIGHTS;
  const isTwo = groups.length > 1;
  const isShort = Math.max(item.numQueries, item.numKeys) <= MOST_LINES;
  const [keyWords, queryWords] = [streamWords(item.keyStream), streamWords(item.queryStream)];
  if (showsTable.value) return <WeightTables item={item} shown={shown} place={place} />;
  return (
    <>
      <div class={streams.length > 1 ? "two" : ""}>
        {streams.map((stream) => (
          <Panel key={stream} title={streams.length > 1 ? t(stream === "source" ? "source" : "text") : ""}>
            <Chips
              stream={stream}
              canKeep={stream === item.queryStream}
              upper={stream === item.keyStream ? first.to : null}
              lower={isTwo ? (stream === item.keyStream ? (shown.weights[1]?.to ?? null) : null) : stream === item.queryStream ? first.from : null}
              isTwo={isTwo}
              pointed={pointed?.stream === stream ? pointed.index : null}
              onHover={(index) => props.onHover(index === null ? null : { stream, index })}
            />
          </Panel>
        ))}
      </div>
      <div class="text-lay">
        {isShort && (
          <Panel title={t("text.lines")} side={groups.map((heads, number) => <span key={number} class={`tag mono ${isTwo ? `hue-tag-${number === 0 ? "a" : "b"}` : ""}`}>{groupName(heads)}</span>)}>
            <VoiceLines item={item} groups={shown.weights} query={place?.query ?? null} onHover={(index) => props.onHover(index === null ? null : { stream: item.queryStream, index })} />
          </Panel>
        )}
        <div class="stack">
          {shown.weights.map(({ to, from }, number) => (
            <Panel key={number} title={groups[number] ? groupName(groups[number]!) : ""} class={isTwo ? `hue-panel-${number === 0 ? "a" : "b"}` : ""}>
              <div class={item.queryStream === item.keyStream ? "two" : ""}>
                {place?.query !== null && <TopList title={place ? t(addedTo(place.query!).length ? "text.toSum" : "text.toOf", { token: [place.query!, ...addedTo(place.query!)].map((query) => visibleToken(queryWords[query] ?? "")).join(" + ") }) : t("text.attends")} words={keyWords} values={to} />}
                {place && place.key !== null && <TopList title={t("text.fromOf", { token: visibleToken(keyWords[place.key] ?? "") })} words={queryWords} values={from} />}
              </div>
            </Panel>
          ))}
          {!isTwo && <PairPanels item={item} tiles={shown.tiles} />}
        </div>
        {isTwo && <div class="two pair-row"><PairPanels item={item} tiles={shown.tiles} /></div>}
      </div>
    </>
  );
}

/** The weights behind the chips and the lines: of the pointed query on every key, of every query on the pointed key, and pairs. */
function WeightTables({ item, shown, place }: { item: Site; shown: Shown; place: ReturnType<typeof readPlace> | null }): JSX.Element {
  const table = (caption: string, stream: string, values: Float32Array | null) =>
    values && (
      <Panel title={caption}>
        <DataTable
          caption={caption}
          rows={Array.from(values, (weight, index) => ({ index, weight }))}
          sort="weight"
          columns={[
            { key: "token", title: t("lab.token"), value: ({ index }) => `${index} ${visibleToken(streamWords(stream)[index] ?? "")}` },
            { key: "weight", title: t("weight"), numeric: true, value: ({ weight }) => weight, cell: ({ weight }) => weight.toPrecision(4) },
          ]}
        />
      </Panel>
    );
  const name = (stream: string, index: number | null) => visibleToken(streamWords(stream)[index ?? -1] ?? "");
  return (
    <div class="two">
      {shown.weights.map(({ to, from }) => [
        table(t("text.toOf", { token: name(item.queryStream, place?.query ?? null) }), item.keyStream, place?.query === null ? null : to),
        table(t("text.fromOf", { token: name(item.keyStream, place?.key ?? null) }), item.queryStream, place?.key === null ? null : from),
      ])}
      <PairPanels item={item} tiles={shown.tiles} />
    </div>
  );
}

/** The strongest pairs of each group of heads. */
function PairPanels({ item, tiles }: { item: Site; tiles: TileState[] }): JSX.Element {
  const groups = shownGroups();
  return (
    <>
      {tiles.map((tile, number) => (
        <Panel key={number} title={`${t("head.strongest")}${groups[number] ? ` · ${groupName(groups[number]!)}` : ""}`}>
          <div class="pairs"><StrongestPairs item={item} tile={tile} /></div>
        </Panel>
      ))}
    </>
  );
}

/** Continue the text, and step through the new tokens: each step reads the newest token and predicts the next. */
function Generation(): JSX.Element | null {
  const count = useSignal(16);
  const isDecoder = doc.value?.sites.length && Object.keys(doc.value.streams).length === 1 && doc.value.model["kind"] !== "encoder";
  if (!source.isLive || !isDecoder || !doc.value?.capabilities.text.possible) return null;
  const made = generation.value && generation.value.first + generation.value.count === streamWords("text").length ? generation.value : null;
  const step = made && selectedToken.value !== null ? selectedToken.value - made.first + 2 : null;
  const go = (next: number) => made && (selectedToken.value = made.first - 2 + Math.min(Math.max(next, 1), made.count));
  const words = streamWords("text");
  return (
    <div class="row wrap" data-testid="generation">
      <label class="picker">
        <span>{t("text.newTokens")}</span>
        <WholeNumber min={1} max={64} state={count} />
      </label>
      <Button aria-disabled={job.value !== null} onClick={() => job.value === null && void generateText(count.value)}>{t("text.generate")}</Button>
      {made && (
        <>
          <Button aria-label={t("text.stepBack")} aria-disabled={step !== null && step <= 1} onClick={() => go((step ?? 2) - 1)}>◂</Button>
          <Button aria-label={t("text.stepForward")} aria-disabled={step !== null && step >= made.count} onClick={() => go((step ?? 0) + 1)}>▸</Button>
          <span class="sm">
            {step !== null && step >= 1 && step <= made.count
              ? t("text.step", { step, count: made.count, read: visibleToken(words[made.first + step - 2] ?? ""), next: visibleToken(words[made.first + step - 1] ?? "") })
              : t("text.stepNone", { count: made.count })}
          </span>
        </>
      )}
    </div>
  );
}

/** The tokens of a stream. Only queries can be kept: the kept token of the page is the query of all its screens. */
function Chips(props: { stream: string; canKeep: boolean; upper: Float32Array | null; lower: Float32Array | null; isTwo: boolean; pointed: number | null; onHover: (index: number | null) => void }): JSX.Element {
  const words = streamWords(props.stream);
  const box = useRef<HTMLDivElement>(null);
  useShades(box, props, words);
  const made = generation.value?.revision !== undefined ? generation.value.first : Infinity;
  const kept = props.canKeep && selectedToken.value !== null ? [selectedToken.value, ...addedTokens.value] : [];
  const leftOut = props.stream === site.value?.keyStream ? excludedTokens.value : [];
  // the same elements while the pointer moves, because a long text has thousands
  const chips = useMemo(
    () =>
      words.map((word, index) => (
        <button
          key={index}
          type="button"
          data-index={index}
          class={`chip ${isSpecial(word) ? "special" : ""} ${leftOut.includes(index) ? "left-out" : ""} ${index >= made ? "generated" : ""}`}
          aria-pressed={props.canKeep ? kept.includes(index) : undefined}
        >
          {visibleToken(word)}
        </button>
      )),
    [words, made, kept.join(","), leftOut.join(","), props.canKeep],
  );
  return (
    <div class="chips" ref={box} title={t("text.grammar")} onMouseLeave={() => props.onHover(null)} {...useChipHandlers(props)}>{chips}</div>
  );
}

/** Hover previews, a click keeps, with shift adds, with alt leaves out; a drag keeps a span. */
function useChipHandlers({ stream, canKeep, onHover }: { stream: string; canKeep: boolean; onHover: (index: number) => void }) {
  const dragged = useRef<{ from: number; hasMoved: boolean } | null>(null);
  const onChip = (handle: (index: number, event: MouseEvent) => void) => (event: Event) => {
    const index = (event.target as HTMLElement).closest<HTMLElement>(".chip")?.dataset["index"];
    if (index !== undefined) handle(Number(index), event as MouseEvent);
  };
  return {
    onFocusIn: onChip(onHover),
    onMouseDown: onChip((from) => (dragged.current = { from, hasMoved: false })),
    onMouseOver: onChip((index, event) => {
      onHover(index);
      if (!dragged.current || event.buttons !== 1 || !canKeep || index === dragged.current.from) return;
      dragged.current.hasMoved = true;
      keepSpan(dragged.current.from, index);
    }),
    onClick: onChip((index, event) => {
      const isDrag = dragged.current?.hasMoved === true;
      dragged.current = null;
      if (event.altKey && stream === site.value?.keyStream) toggleExcluded(index);
      else if (canKeep && !isDrag) keepToken(index, event.shiftKey);
    }),
  };
}

const SHADES = 32; // steps of the colours of chips, so that weights that look the same write nothing

/** Colour the chips by their weights, and mark the pointed one; chips that stay the same are not touched. */
function useShades(box: { current: HTMLDivElement | null }, props: { upper: Float32Array | null; lower: Float32Array | null; isTwo: boolean; pointed: number | null }, words: string[]): void {
  const version = themeVersion.value;
  const { upper, lower, isTwo, pointed } = props;
  const drawn = useRef<{ key: string; words: string[]; steps: [Uint8Array, Uint8Array] } | null>(null);
  useEffect(() => {
    const chips = box.current?.children ?? [];
    const key = `${version} ${isTwo}`;
    const last = drawn.current?.key === key && drawn.current.words === words ? drawn.current.steps : null;
    const ramp = scale.value;
    const read = (weights: Float32Array | null) => {
      const found = new Uint8Array(words.length);
      if (weights) for (let index = 0; index < found.length; index++) found[index] = Math.round(rampPosition(weights[index]!, ramp) * SHADES);
      return found;
    };
    const steps: [Uint8Array, Uint8Array] = [read(upper), read(lower)];
    const shade = (step: number, hue: string) => {
      if (!step) return "transparent";
      const strength = (step / SHADES) * (isTwo ? 0.6 : 0.75);
      return isTwo ? `color-mix(in srgb, var(${hue}) ${Math.round(strength * 100)}%, transparent)` : cssRamp(strength);
    };
    ["--to", "--from"].forEach((name, half) => {
      for (let index = 0; index < chips.length; index++) {
        const step = steps[half]![index]!;
        if (step !== last?.[half]?.[index]) (chips[index] as HTMLElement).style.setProperty(name, shade(step, half === 0 ? "--hue-a" : "--hue-b"));
      }
    });
    drawn.current = { key, words, steps };
  }, [upper, lower, isTwo, words, version, scale.value]);
  useEffect(() => {
    const chip = pointed === null ? null : box.current?.children[pointed];
    chip?.classList.add("pointed");
    return () => chip?.classList.remove("pointed");
  }, [pointed, words]);
}

function TopList({ title, words, values }: { title: string; words: string[]; values: Float32Array | null }): JSX.Element {
  const top = values ? largest(values, LISTED).filter(({ weight }) => weight > 0) : [];
  return (
    <div>
      <h3>{title}</h3>
      <table class="finder fixed-rows">
        <tbody>
          {Array.from({ length: LISTED }, (_, index) => top[index]).map((entry, index) => (
            <tr key={index}>
              <td class="mono">{entry ? `${entry.index} ${visibleToken(words[entry.index] ?? "")}` : " "}</td>
              <td class="num">{entry ? format(entry.weight) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
