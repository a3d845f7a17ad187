// The drawer of exports: figures, the numbers behind them, the trace, the page, and the link to what is shown.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { say, t } from "../i18n";
import type { PageError } from "../source";
import { announcement, headForm, headName, isDark, lens, overlay, screen, selectedHead, selectedSite, site, source, toPageError } from "../state";
import { currentAddress } from "../url_state";
import { bind, Button, CopyCode, ErrorNote, Icon, Panel, saveBlob, Segmented, Select } from "./basics";
import { shownView, viewQuery } from "./head_data";
import { Dialog } from "./overlays";

type Subject = "head" | "all";
const LEAST_WEIGHTS = ["0", "0.001", "0.01", "0.1"] as const;

export function ExportDrawer(): JSX.Element {
  const subject = useSignal<Subject>(screen.value === "map" ? "all" : "head");
  const least = useSignal<(typeof LEAST_WEIGHTS)[number]>("0");
  const error = useSignal<PageError | null>(null);
  const busy = useSignal("");
  const name = headName(selectedSite.value, selectedHead.value);
  const save = async (kind: string, label: string) => {
    if (busy.value) return;
    busy.value = kind;
    error.value = null;
    announcement.value = t("export.working", { name: label });
    try {
      const file = await source.fetchFile(`export?kind=${kind}&${fileQuery(subject.value, least.value)}`);
      saveBlob(file.name, file.blob);
      announcement.value = t("export.saved", { name: file.name });
    } catch (problem) {
      error.value = toPageError(problem);
    } finally {
      busy.value = "";
    }
  };
  const buttons = (kinds: readonly (readonly [string, string])[]) => (
    <div class="row wrap">
      {kinds.map(([kind, label]) => (
        <Button key={kind} aria-busy={busy.value === kind} aria-disabled={busy.value !== ""} onClick={() => void save(kind, label)}>{label}</Button>
      ))}
    </div>
  );
  return (
    <Dialog label={t("bar.export")} kind="drawer">
      <header class="row">
        <h2 class="grow">{t("bar.export")}</h2>
        <Button kind="quiet icon" aria-label={t("keys.close")} onClick={() => (overlay.value = "")}><Icon path="M4 4l8 8M12 4l-8 8" /></Button>
      </header>
      {error.value && <ErrorNote {...error.value} />}
      {source.isLive ? (
        <>
          <div class="stack">
            <Segmented label={t("export.what")} {...bind(subject)} options={[["head", t("export.head", { name })], ["all", t("export.all")]]} />
          </div>
          <Panel title={t("export.figure")}>
            {buttons([
              ["svg", "SVG"],
              ["png", "PNG"],
            ])}
            <p class="t3 sm">{t(subject.value === "all" ? "export.classFigure" : "export.headFigure")}</p>
          </Panel>
          <Panel title={t("export.numbers")}>
            {buttons([
              ["csv", "CSV"],
              ["json", "JSON"],
              ["npz", "NPZ"],
            ])}
            <Select label={t("export.least")} {...bind(least)} options={LEAST_WEIGHTS.map((value) => [value, value === "0" ? t("export.nothing") : value] as const)} />
            <p class="t3 sm">{t("export.numbersHint")}</p>
          </Panel>
          <Panel title={t("export.rest")}>
            {buttons([
              ["measures", t("export.measures")],
              ["trace", t("export.trace")],
              ["html", t("export.html")],
            ])}
            <p class="t3 sm">{t("export.traceHint")}</p>
          </Panel>
        </>
      ) : (
        <Panel>
          <p>{t("export.isFile")}</p>
          <p class="t2">{say("error.notInFileRemedy")}</p>
        </Panel>
      )}
      <Panel title={t("export.link")}>
        <CopyCode text={currentAddress()} testId="link" />
        {source.isLive && <p class="t3 sm">{t("export.linkHint")}</p>}
      </Panel>
    </Dialog>
  );
}

/** What a file has: the selected head as the Head screen shows it, or all heads. */
function fileQuery(subject: Subject, least: string): string {
  const common = `min_weight=${least}&theme=${isDark() ? "dark" : "light"}`;
  if (subject === "all") return common;
  const form = headForm.value === "lines" || headForm.value === "arcs" ? "lines" : "matrix";
  return `site=${selectedSite.value}&head=${selectedHead.value}&lens=${lens.value}&form=${form}&${viewQuery(shownView(site.value!))}&${common}`;
}
