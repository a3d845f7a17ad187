// Text: tokens as chips. The upper half of a chip shows where the pointed token attends to, the lower half which tokens
// attend to it; of one head, or of two heads over each other.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { cssRamp, rampPosition, themeVersion } from "../canvas/colors";
import { Panel } from "../components/basics";
import { isSpecial, streamWords, visibleToken } from "../components/tokens";
import { format, t } from "../i18n";
import { headName, pinned, scale, selectedHead, selectedSite, selectedToken, site, sites, source } from "../state";

interface Shares {
  to: Float32Array | null; // weights of the pointed query
  from: Float32Array | null; // weights on the pointed key
}

async function fetchShares(siteNumber: number, head: number, query: number | null, key: number | null, signal: AbortSignal): Promise<Shares> {
  const get = async (path: string) => (await source.fetchArrays(path, signal)).arrays["weights"]!.data as Float32Array;
  const where = `site=${siteNumber}&head=${head}`;
  const [to, from] = await Promise.all([
    query === null ? null : get(`row?${where}&query=${query}&lens=weight`),
    key === null ? null : get(`column?${where}&key=${key}`),
  ]);
  return { to, from };
}

export function TextScreen(): JSX.Element {
  const hovered = useSignal<{ stream: string; index: number } | null>(null);
  const shares = useSignal<Shares>({ to: null, from: null });
  const second = useSignal<Shares>({ to: null, from: null });
  const item = site.value;
  const pins = pinned.value.map((pin) => pin.split(".").map(Number) as [number, number]);
  const other = pins.find(([siteNumber, head]) => (siteNumber !== selectedSite.value || head !== selectedHead.value) && sites.value[siteNumber]?.queryStream === item?.queryStream && sites.value[siteNumber]?.keyStream === item?.keyStream);

  useSignalEffect(() => {
    const current = site.value;
    const pointed = hovered.value ?? (selectedToken.value === null ? null : { stream: current?.queryStream ?? "text", index: selectedToken.value });
    if (!current || !pointed) {
      shares.value = { to: null, from: null };
      return;
    }
    const query = pointed.stream === current.queryStream && pointed.index < current.numQueries ? pointed.index : null;
    const key = pointed.stream === current.keyStream && pointed.index < current.numKeys ? pointed.index : null;
    const abort = new AbortController();
    const load = async () => {
      shares.value = await fetchShares(selectedSite.value, selectedHead.value, query, key, abort.signal);
      second.value = other ? await fetchShares(other[0], other[1], query, key, abort.signal) : { to: null, from: null };
    };
    load().catch(() => null);
    return () => abort.abort();
  });

  if (!item) return <p class="t3">{t("open.none")}</p>;
  const streams = [...new Set([item.queryStream, item.keyStream])];
  const names = [headName(selectedSite.value, selectedHead.value), ...(other ? [headName(...other)] : [])];
  return (
    <>
      <div class="toolbar">
        <h1>{t("text.title")}</h1>
        {names.map((name, index) => (
          <span key={name} class={`tag mono hue-${index}`}>
            {name}
          </span>
        ))}
        <span class="grow" />
        <span class="sm t3 hide-s">{selectedToken.value === null ? t("text.hint") : t("text.locked", { number: selectedToken.value })}</span>
      </div>
      <div class="stack">
        {streams.map((stream) => (
          <Panel key={stream} {...(streams.length > 1 ? { title: stream === "source" ? t("source") : t("text") } : {})}>
            <Chips
              stream={stream}
              shares={{ to: stream === item.keyStream ? shares.value.to : null, from: stream === item.queryStream ? shares.value.from : null }}
              second={{ to: stream === item.keyStream ? second.value.to : null, from: stream === item.queryStream ? second.value.from : null }}
              onHover={(index) => (hovered.value = index === null ? null : { stream, index })}
            />
          </Panel>
        ))}
        <div class="two">
          <TopList title={t("text.attends")} stream={item.keyStream} values={shares.value.to} />
          <TopList title={t("text.attended")} stream={item.queryStream} values={shares.value.from} />
        </div>
        {!other && <p class="t3 sm">{t("text.pinHint")}</p>}
      </div>
    </>
  );
}

function Chips(props: { stream: string; shares: Shares; second: Shares; onHover: (index: number | null) => void }): JSX.Element {
  const words = streamWords(props.stream);
  const box = useRef<HTMLDivElement>(null);
  const version = themeVersion.value;
  const { shares, second } = props;
  useEffect(() => {
    const chips = box.current?.children ?? [];
    for (let index = 0; index < chips.length; index++) {
      const chip = chips[index] as HTMLElement;
      const shade = (values: Float32Array | null) => (values?.[index] ? cssRamp(rampPosition(values[index]!, scale.value) * 0.75) : "transparent");
      chip.style.setProperty("--to", shade(shares.to));
      chip.style.setProperty("--from", shade(shares.from));
      const strength = second.to?.[index] ? Math.round(rampPosition(second.to[index]!, scale.value) * 4) : 0;
      chip.style.setProperty("--second", `${strength}px`);
    }
  }, [shares, second, version, scale.value]);
  return (
    <div class="chips" ref={box} onMouseLeave={() => props.onHover(null)}>
      {words.map((word, index) => (
        <button
          key={index}
          type="button"
          class={`chip ${isSpecial(word) ? "special" : ""}`}
          aria-pressed={selectedToken.value === index}
          onMouseEnter={() => props.onHover(index)}
          onFocus={() => props.onHover(index)}
          onClick={() => (selectedToken.value = selectedToken.value === index ? null : index)}
        >
          {visibleToken(word)}
        </button>
      ))}
    </div>
  );
}

function TopList({ title, stream, values }: { title: string; stream: string; values: Float32Array | null }): JSX.Element {
  const words = streamWords(stream);
  const top = values
    ? Array.from(values, (weight, index) => ({ weight, index }))
        .filter(({ weight }) => weight > 0)
        .sort((a, b) => b.weight - a.weight)
        .slice(0, 5)
    : [];
  return (
    <Panel title={title}>
      <table class="finder fixed-rows">
        <tbody>
          {Array.from({ length: 5 }, (_, index) => top[index]).map((entry, index) => (
            <tr key={index}>
              <td class="mono">{entry ? `${entry.index} ${visibleToken(words[entry.index] ?? "")}` : " "}</td>
              <td class="num">{entry ? format(entry.weight) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Panel>
  );
}
