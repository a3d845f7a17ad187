// What a head writes at a token: the tokens whose logits it raises and lowers most.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { format, say, t } from "../i18n";
import type { PageError, Site } from "../source";
import { doc, selectedHead, selectedSite, selectedToken, showsWritten, source, toPageError } from "../state";
import { Panel } from "./basics";
import { streamWords, visibleToken } from "./tokens";

interface Written {
  words: string[];
  effects: Float32Array;
  note: string;
  query: number;
}

export function WrittenTokens({ item }: { item: Site }): JSX.Element | null {
  const found = useSignal<Written | null>(null);
  const error = useSignal<PageError | null>(null);
  const canRun = source.isLive && doc.value?.capabilities.measure.possible === true;
  useSignalEffect(() => {
    void doc.value?.revision;
    const query = Math.min(selectedToken.value ?? item.numQueries - 1, item.numQueries - 1);
    found.value = null;
    if (!showsWritten.value || !canRun) return;
    const abort = new AbortController();
    source
      .fetchArrays(`written?site=${selectedSite.value}&head=${selectedHead.value}&query=${query}`, abort.signal)
      .then(({ arrays, fields }) => {
        error.value = fields["reason"] ? { fact: fields["reason"], remedy: "" } : null;
        if (error.value) return;
        found.value = { words: fields["words"], effects: arrays["effects"]!.data as Float32Array, note: fields["note"], query };
      })
      .catch((reason) => !abort.signal.aborted && (error.value = toPageError(reason)));
    return () => abort.abort();
  });
  if (!streamWords(item.queryStream).length) return null;
  const button = (
    <button class="btn quiet" type="button" aria-pressed={showsWritten.value} aria-disabled={!canRun} onClick={() => canRun && (showsWritten.value = !showsWritten.value)}>
      {t(showsWritten.value ? "written.hide" : "written.show")}
    </button>
  );
  return (
    <Panel title={t("written.title")} side={button}>
      {!showsWritten.value ? (
        <p class="t3 sm">{canRun ? t("written.hint") : t("state.needsModel")}</p>
      ) : error.value ? (
        <p class="t3 sm">
          {say(error.value.fact)} {say(error.value.remedy)}
        </p>
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
      <table class="finder">
        <thead>
          <tr>
            <th scope="col">{t("written.raises")}</th>
            <th scope="col" class="num">{t("written.logit")}</th>
            <th scope="col">{t("written.lowers")}</th>
            <th scope="col" class="num">{t("written.logit")}</th>
          </tr>
        </thead>
        <tbody>
          {Array.from({ length: count }, (_, index) => (
            <tr key={index}>
              <td>{name(index)}</td>
              <td class="num">{size(index)}</td>
              <td>{name(count + index)}</td>
              <td class="num">{size(count + index)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="t3 xs">
        {t("written.explain")} {say(found.note)}
      </p>
    </div>
  );
}
