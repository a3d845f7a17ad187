// Open: what was found in the model, how it was recorded, and what cannot be done, with the reasons.

import type { JSX } from "preact";
import { openOther, runText } from "../actions";
import { Button, groupByReason, Panel } from "../components/basics";
import { DataTable } from "../components/data_table";
import { say, t, type TextKey } from "../i18n";
import { doc, selectHead, sites, source, stacks } from "../state";
import { formatSize } from "./prune_result";

export function OpenScreen(): JSX.Element {
  const skipped = groupByReason(Object.entries(doc.value?.skipped ?? {}));
  const warnings = doc.value?.warnings ?? [];
  const details = Object.entries(doc.value?.model ?? {}).filter(([name]) => name !== "name");
  const reasons = new Set(
    sites.value.flatMap((site) =>
      Object.entries(site.abilities)
        .filter(([, ability]) => !ability.possible && ability.reason)
        .map(([action, ability]) => t("open.cannot", { action: t(`action.${action}` as TextKey), reason: say(ability.reason) })),
    ),
  );
  return (
    <>
      <div class="toolbar"><h1>{t("open.title")}</h1></div>
      <div class="stack">
        <Panel title={String(doc.value?.model["name"] ?? "headwise")}>
          <Facts rows={[...details.map(([name, value]) => [say(name), String(value)] as const), ...sizeRows()]} />
        </Panel>
        <OtherModels />
        <Examples />
        <Panel title={t("open.layers")}>
          {sites.value.length ? (
            <DataTable
              caption={t("open.layers")}
              rows={sites.value.map((site, number) => ({ ...site, number }))}
              onSelect={(row) => selectHead(row.number, 0)}
              columns={[
                { key: "site", title: t("layer"), value: (row) => row.name },
                { key: "heads", title: t("open.heads"), numeric: true, value: (row) => row.heads },
                { key: "kv", title: t("open.kv"), numeric: true, value: (row) => row.kvHeads },
                { key: "queries", title: t("open.queries"), value: (row) => `${say(row.queryStream)} (${row.numQueries})` },
                { key: "keys", title: t("open.keys"), value: (row) => `${say(row.keyStream)} (${row.numKeys})` },
                { key: "capture", title: t("open.capture"), value: (row) => say(row.capture) },
              ]}
            />
          ) : (
            <p>{t("open.none")}</p>
          )}
        </Panel>
        {warnings.length + reasons.size > 0 && (
          <Panel title={t("open.warnings")}>
            <ul class="stack">
              {[...warnings.map(say), ...reasons].map((text) => (
                <li key={text}>{text}</li>
              ))}
            </ul>
          </Panel>
        )}
        {skipped.length > 0 && (
          <Panel title={t("open.skipped")}>
            <Facts rows={skipped.map(([reason, names]) => [names, say(reason)] as const)} />
          </Panel>
        )}
      </div>
    </>
  );
}

type Fact = readonly [name: string, value: string];

function Facts({ rows }: { rows: Fact[] }): JSX.Element {
  return (
    <dl class="kv facts">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Sizes of the model and of the recorded run. */
function sizeRows(): Fact[] {
  const memory = doc.value?.memory;
  if (!memory) return [];
  const kinds = [...new Set(stacks.value)].map((stack) => `${sites.value.filter((site) => `${site.stack} ${site.kind}` === stack).length} ${say(stack)}`);
  return [
    [t("open.kinds"), kinds.join(", ")],
    ...(memory.parameters === null ? [] : [[t("open.parameters"), memory.parameters.toLocaleString("en")] as const]),
    ...(memory.weightBytes === null ? [] : [[t("open.weightBytes"), formatSize(memory.weightBytes, "bytes")] as const]),
    [t("open.recordBytes"), `${formatSize(memory.recordBytes, "bytes")}. ${t("open.lots", { count: doc.value!.maxTokens.toLocaleString("en"), size: formatSize(memory.longestBytes, "bytes") })}`],
  ];
}

/** Models and traces beside the open one, which the page can open. */
function OtherModels(): JSX.Element | null {
  const { openable = [], opened = "" } = doc.value ?? {};
  if (!source.isLive || !openable.length) return null;
  return (
    <Panel title={t("open.others")}>
      <div class="row wrap">
        {opened && <Button onClick={() => openOther("")}>{t("open.first")}</Button>}
        {openable.map((name) => (
          <Button key={name} aria-disabled={name === opened} onClick={() => name !== opened && openOther(name)}>{name}</Button>
        ))}
      </div>
    </Panel>
  );
}

const SHOWN_EXAMPLES = 6;

/** Texts that the model was opened with, to read next. */
function Examples(): JSX.Element | null {
  const texts = (doc.value?.texts ?? []).slice(0, SHOWN_EXAMPLES);
  if (!source.isLive || !texts.length || !doc.value?.capabilities.text.possible) return null;
  const read = (text: string) => {
    const [first = "", second = ""] = text.split("\t");
    void (second ? runText(second, first) : runText(first));
  };
  return (
    <Panel title={t("open.examples")}>
      <div class="row wrap">
        {texts.map((text) => (
          <Button key={text} kind="example" onClick={() => read(text)}><span>{text.replace("\t", " → ")}</span></Button>
        ))}
      </div>
    </Panel>
  );
}
