// Open: what was found in the model, how it was recorded, and what cannot be done, with the reasons.

import type { JSX } from "preact";
import { Panel } from "../components/basics";
import { DataTable } from "../components/data_table";
import { t } from "../i18n";
import { doc, overlay, selectHead, sites, source } from "../state";

export function OpenScreen(): JSX.Element {
  const skipped = Object.entries(doc.value?.skipped ?? {});
  const warnings = doc.value?.warnings ?? [];
  const details = Object.entries(doc.value?.model ?? {}).filter(([name]) => name !== "name");
  const reasons = new Set(
    sites.value.flatMap((site) =>
      Object.entries(site.abilities)
        .filter(([, ability]) => !ability.possible && ability.reason)
        .map(([action, ability]) => t("open.cannot", { action, reason: ability.reason })),
    ),
  );
  return (
    <>
      <div class="toolbar">
        <h1>{t("open.title")}</h1>
        <span class="grow" />
        {source.isLive && (
          <button class="btn primary" type="button" onClick={() => (overlay.value = "text")}>
            {t("bar.change")}
          </button>
        )}
      </div>
      <div class="stack">
        <Panel title={String(doc.value?.model["name"] ?? "headwise")}>
          <dl class="kv facts">
            {details.map(([name, value]) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd>{String(value)}</dd>
              </div>
            ))}
          </dl>
        </Panel>
        <Panel title={t("open.layers")}>
          {sites.value.length ? (
            <DataTable
              caption={t("open.layers")}
              rows={sites.value.map((site, number) => ({ ...site, number }))}
              onSelect={(row) => selectHead(row.number, 0)}
              columns={[
                { key: "site", title: t("open.site"), value: (row) => row.name },
                { key: "heads", title: t("open.heads"), numeric: true, value: (row) => row.heads },
                { key: "kv", title: t("open.kv"), numeric: true, value: (row) => row.kvHeads },
                { key: "queries", title: t("open.queries"), value: (row) => `${row.queryStream} (${row.numQueries})` },
                { key: "keys", title: t("open.keys"), value: (row) => `${row.keyStream} (${row.numKeys})` },
                { key: "capture", title: t("open.capture"), value: (row) => row.capture },
              ]}
            />
          ) : (
            <p>{t("open.none")}</p>
          )}
        </Panel>
        {warnings.length + reasons.size > 0 && (
          <Panel title={t("open.warnings")}>
            <ul class="stack">
              {[...warnings, ...reasons].map((text) => (
                <li key={text}>{text}</li>
              ))}
            </ul>
          </Panel>
        )}
        {skipped.length > 0 && (
          <Panel title={t("open.skipped")}>
            <dl class="kv facts">
              {skipped.map(([name, reason]) => (
                <div key={name}>
                  <dt class="mono">{name}</dt>
                  <dd>{reason}</dd>
                </div>
              ))}
            </dl>
          </Panel>
        )}
      </div>
    </>
  );
}
