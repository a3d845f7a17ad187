// The drawer of exports: the shown figure, the numbers behind it, the trace, the page, and the lines that repeat them.

import { useSignal, useSignalEffect, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo } from "preact/hooks";
import { themeVersion } from "../canvas/colors";
import { drawHead } from "../figures/head_figure";
import { drawMap } from "../figures/map_figure";
import { makePng, PNG_ZOOMS, svgBlob, type Figure } from "../figures/svg";
import { say, t } from "../i18n";
import { reproduceHead, reproduceMap } from "../reproduction";
import type { FileInfo, PageError, SavedFile } from "../source";
import { announcement, doc, headName, overlay, screen, selectedHead, selectedSite, site, source, toPageError } from "../state";
import { ErrorNote, Icon, Segmented, Select } from "./basics";
import { fetchShownTile } from "./head_data";
import { Dialog } from "./overlays";
import { currentAddress } from "../url_state";

type Subject = "head" | "all";
const LEAST_WEIGHTS = ["0", "0.001", "0.01", "0.1"] as const;
type LeastWeight = (typeof LEAST_WEIGHTS)[number];
const UNITS = ["B", "kB", "MB", "GB"];

interface Drawn {
  figure: Figure;
  svg: Blob;
  png: Blob;
}

export function ExportDrawer(): JSX.Element {
  const subject = useSignal<Subject>(screen.value === "map" ? "all" : "head");
  const error = useSignal<PageError | null>(null);
  const name = headName(selectedSite.value, selectedHead.value);
  const hasFigure = screen.value === "map" || screen.value === "head";
  return (
    <Dialog label={t("bar.export")} kind="drawer">
      <header class="row">
        <h2 class="grow">{t("bar.export")}</h2>
        <button class="btn quiet icon" type="button" aria-label={t("keys.close")} onClick={() => (overlay.value = "")}>
          <Icon path="M4 4l8 8M12 4l-8 8" />
        </button>
      </header>
      <div class="stack">
        <Segmented
          label={t("export.what")}
          value={subject.value}
          options={[
            ["head", t("export.head", { name })],
            ["all", t("export.all")],
          ]}
          onChange={(value) => (subject.value = value)}
        />
        {!hasFigure && <p class="t3 sm">{t("export.noFigure")}</p>}
        {error.value && <ErrorNote {...error.value} />}
      </div>
      <FigurePart subject={subject} error={error} stem={`${doc.value!.fileStem}${subject.value === "head" ? `-${name.replace(" ", "")}` : ""}`} />
      <NumbersPart subject={subject} error={error} />
      <ReproductionPart subject={subject.value} />
    </Dialog>
  );
}

/** The figure of what is chosen, as it will be saved. */
function FigurePart({ subject, error, stem }: { subject: Signal<Subject>; error: Signal<PageError | null>; stem: string }): JSX.Element {
  const drawn = useSignal<Drawn | null>(null);
  const zoom = useSignal<(typeof PNG_ZOOMS)[number]>("2");
  useSignalEffect(() => {
    void themeVersion.value;
    let isOld = false;
    drawn.value = null;
    makeDrawing(subject.value, Number(zoom.value))
      .then((value) => !isOld && (drawn.value = value))
      .catch((reason) => !isOld && (error.value = toPageError(reason)));
    return () => void (isOld = true);
  });
  const address = useMemo(() => drawn.value && URL.createObjectURL(drawn.value.svg), [drawn.value]);
  useEffect(() => () => void (address && URL.revokeObjectURL(address)), [address]);
  const { figure, svg, png } = drawn.value ?? {};
  return (
    <section class="stack" aria-label={t("export.figure")}>
      <h3>{t("export.figure")}</h3>
      <div class="figure-preview">{figure && address ? <img src={address} alt={figure.title} width={figure.width} height={figure.height} /> : <p class="t3">{t("state.computing")}</p>}</div>
      <div class="row wrap">
        <FileButton label="SVG" size={svg?.size} save={svg && (async () => ({ name: `${stem}.svg`, blob: svg }))} error={error} />
        <FileButton label="PNG" size={png?.size} save={png && (async () => ({ name: `${stem}.png`, blob: png }))} error={error} />
        {figure && <Select label={t("export.width")} value={zoom.value} options={PNG_ZOOMS.map((name) => [name, t("export.pixels", { width: figure.width * Number(name) })] as const)} onChange={(value) => (zoom.value = value)} />}
      </div>
    </section>
  );
}

async function makeDrawing(subject: Subject, zoom: number): Promise<Drawn> {
  const item = site.value!;
  const figure = subject === "all" ? drawMap() : drawHead(item, await fetchShownTile(item));
  return { figure, svg: svgBlob(figure), png: await makePng(figure, zoom) };
}

/** Weights, measures, trace and page, with their sizes. */
function NumbersPart({ subject, error }: { subject: Signal<Subject>; error: Signal<PageError | null> }): JSX.Element {
  const least = useSignal<LeastWeight>("0");
  const files = useSignal<Record<string, FileInfo> | null>(null);
  const query = `${subject.value === "head" ? `site=${selectedSite.value}&head=${selectedHead.value}&` : ""}min_weight=${least.value}`;
  useEffect(() => {
    let isOld = false;
    files.value = null;
    source
      .describeFiles(query)
      .then((found) => !isOld && (files.value = found))
      .catch((reason) => !isOld && (error.value = toPageError(reason)));
    return () => void (isOld = true);
  }, [query]);
  const button = (kind: string, label: string) => {
    const info = files.value?.[kind];
    const isPossible = info && !info.reason;
    return <FileButton label={label} size={isPossible ? info.bytes : undefined} isEstimate={source.isLive} reason={info?.reason ?? ""} save={isPossible ? () => source.fetchFile(kind, query) : undefined} error={error} />;
  };
  const reasons = source.isLive ? [...new Set(Object.values(files.value ?? {}).map(({ reason }) => reason))].filter(Boolean) : [];
  return (
    <>
      <section class="stack" aria-label={t("export.numbers")}>
        <h3>{t("export.numbers")}</h3>
        <div class="row wrap">
          {button("csv", "CSV")}
          {button("json", "JSON")}
          {button("npz", "NPZ")}
        </div>
        <Select label={t("export.least")} value={least.value} options={LEAST_WEIGHTS.map((value) => [value, value === "0" ? t("export.nothing") : value] as const)} onChange={(value) => (least.value = value)} />
        <p class="t3 sm">{t("export.numbersHint")}</p>
        {!source.isLive && subject.value === "all" && <p class="t2 sm">{t("export.oneHead")}</p>}
      </section>
      <section class="stack" aria-label={t("export.rest")}>
        <h3>{t("export.rest")}</h3>
        <div class="row wrap">
          {button("measures", t("export.measures"))}
          {button("trace", t("export.trace"))}
          {button("html", t("export.html"))}
        </div>
        <p class="t3 sm">{source.isLive ? t("export.traceHint") : `${t("export.isFile")} ${t("export.fileCannot")}`}</p>
        {reasons.map((reason) => (
          <p key={reason} class="t2 sm">
            {say(reason)}
          </p>
        ))}
      </section>
    </>
  );
}

interface FileButtonProps {
  label: string;
  size: number | undefined;
  isEstimate?: boolean;
  reason?: string;
  save: (() => Promise<SavedFile>) | undefined;
  error: Signal<PageError | null>;
}

/** Saves a file; the button says how large it is. */
function FileButton({ label, size, isEstimate, reason, save, error }: FileButtonProps): JSX.Element {
  const isBusy = useSignal(false);
  const run = async () => {
    if (!save || isBusy.value) return;
    isBusy.value = true;
    error.value = null;
    announcement.value = t("export.working", { name: label });
    try {
      const { name, blob } = await save();
      saveBlob(name, blob);
      announcement.value = t("export.saved", { name });
    } catch (problem) {
      error.value = toPageError(problem);
    } finally {
      isBusy.value = false;
    }
  };
  return (
    <button class="btn" type="button" aria-disabled={!save} aria-busy={isBusy.value} title={say(reason ?? "")} onClick={() => void run()}>
      {label} {size !== undefined && <span class="t3">{isEstimate ? t("export.about", { size: formatBytes(size) }) : formatBytes(size)}</span>}
    </button>
  );
}

function saveBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // some browsers read the file after the click
}

export function formatBytes(bytes: number): string {
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 0), UNITS.length - 1);
  const value = bytes / 1000 ** power;
  return `${power === 0 || value >= 100 ? Math.round(value) : value.toPrecision(2)} ${UNITS[power]}`;
}

/** Python lines and a command that make the figure again. */
function ReproductionPart({ subject }: { subject: Subject }): JSX.Element {
  const { python, shell, needsModel } = subject === "all" ? reproduceMap() : reproduceHead(site.value!);
  return (
    <section class="stack" aria-label={t("export.again")}>
      <h3>{t("export.again")}</h3>
      <p class="t3 sm">{needsModel ? t("export.needsModel") : t("export.againHint")}</p>
      <CodeBlock label={t("export.python")} text={python} />
      <CodeBlock label={t("export.shell")} text={shell} />
      {subject === "head" && <p class="t3 sm">{t("export.sqrtOnly")}</p>}
      <CodeBlock label={t("export.link")} text={currentAddress()} />
      {source.isLive && <p class="t3 sm">{t("export.linkHint")}</p>}
    </section>
  );
}

function CodeBlock({ label, text }: { label: string; text: string }): JSX.Element {
  const isCopied = useSignal(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      isCopied.value = true;
    } catch {
      isCopied.value = false; // a page without this right; a click on the text selects all of it
    }
  };
  return (
    <div class="code-block">
      <div class="row between">
        <span class="xs t3">{label}</span>
        <button class="btn quiet" type="button" aria-label={`${t("prune.copy")}: ${label}`} onClick={() => void copy()}>
          {isCopied.value ? t("prune.copied") : t("prune.copy")}
        </button>
      </div>
      <pre tabIndex={0} role="region" aria-label={label}>
        <code>{text}</code>
      </pre>
    </div>
  );
}
