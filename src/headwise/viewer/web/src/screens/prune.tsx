// Prune & convert: the sizes now, a plan which heads go or which form they get, and the new model with its verification report.

import { computed, effect, signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { givenTexts, openTexts, setAblated, textLines } from "../actions";
import { bind, Button, choices, Form, Notes, NumberField, Panel, Segmented, Select, Slider, Toolbar } from "../components/basics";
import { SwitchGrid } from "../components/switch_grid";
import { say, t, type TextKey } from "../i18n";
import type { Site } from "../source";
import { doc, headCount, job, runJob, sites, source } from "../state";
import { between, oneOf, toText, urlSignal } from "../url_state";
import { ResultView, SizeList, SizeTable, type Size, type Sizes, type SurgeryResult } from "./prune_result";

interface Form {
  form: string;
  possible: boolean;
  reason: string;
  counts?: number[];
}

interface Surgery {
  heads: number;
  kvHeads: number;
  costs: Size[];
  dtype: string;
  forms: Form[];
  methods: string[];
}

interface Plan extends Sizes {
  summary: string;
  removed?: [number, number][];
  notes: string[];
}

type Request = Record<string, unknown>;

const PER = ["layer", "stack", "model"] as const;
const FOLDS = ["none", "mean", "bias"] as const;
const ALIGN = ["none", "both", "keys", "values"] as const;
const GROUPINGS = ["consecutive", "similar"] as const;
const WHERE = ["all", "self", "cross"] as const;

// The state of the screen outlives a visit to the Lab.
const task = urlSignal("task", "prune", oneOf(["prune", "convert"]), "work");
const surgery = signal<Surgery | null>(null);
const folders = signal({ prune: "pruned", convert: "converted" });
const chosenBy = urlSignal("by", "lab", oneOf(["lab", "clusters", "share"]), "work");
const share = urlSignal("share", 50, between(5, 95), "work");
const method = urlSignal("method", "best", toText, "work");
const per = urlSignal("per", "layer", oneOf(PER), "work");
const fold = urlSignal("fold", "none", oneOf(FOLDS), "work");
const form = signal("kv");
const count = signal(1);
const align = urlSignal("align", "none", oneOf(ALIGN), "work");
const grouping = urlSignal("grouping", "consecutive", oneOf(GROUPINGS), "work");
const where = urlSignal("where", "all", oneOf(WHERE), "work");
const width = signal(16);
const always = signal(1);
const active = signal(1);
const plan = signal<{ request: string; plan: Plan } | null>(null);
const result = signal<SurgeryResult | null>(null);

/** The arguments of the jobs that plan and prune, without the folder. */
function pruneRequest(): Request {
  const common = { fold: fold.value, texts: textLines.value };
  if (chosenBy.value === "lab") return { heads: doc.value?.ablated.map((item) => [item.site, item.head]) ?? [], ...common };
  if (chosenBy.value === "clusters") return { clusters: true, by: method.value, ...common };
  return { keep: share.value / 100, by: method.value, per: per.value, ...common };
}

function convertRequest(): Request {
  const common = { form: form.value, where: where.value, texts: textLines.value };
  if (form.value === "kv") return { kv: count.value, align: align.value, grouping: grouping.value, ...common };
  if (form.value === "collaborative") return { width: width.value, ...common };
  return form.value === "routed" ? { always: always.value, active: active.value, ...common } : common;
}

const REQUESTS = { prune: pruneRequest, convert: convertRequest };
const PLAN_JOBS = { prune: "plan-pruning", convert: "plan-conversion" } as const;

/** Read the sizes and forms once the model is free; a failure is shown and not repeated. */
function useSurgery(): void {
  useEffect(() => {
    let isAsked = false;
    return effect(() => {
      if (isAsked || surgery.value || job.value || !doc.value?.capabilities.measure.possible || !source.isLive) return;
      isAsked = true;
      void runJob("surgery").then((found: Surgery | null) => {
        if (!found) return;
        surgery.value = found;
        const counts = found.forms.find((item) => item.form === "kv")?.counts;
        count.value = counts?.at(-1) ?? 1;
        form.value = found.forms.find((item) => item.possible)?.form ?? "kv";
      });
    });
  }, []);
}

export function PruneScreen(): JSX.Element {
  useSurgery();
  const isPossible = source.isLive && doc.value?.capabilities.measure.possible;
  return (
    <>
      <Toolbar title={t("prune.title")}>
        <Segmented label={t("prune.task")} {...bind(task)} options={choices("prune.", ["prune", "convert"])} />
      </Toolbar>
      {!isPossible && <p class="note">{t("state.needsModel")}</p>}
      <div class="surgery">
        <Panel title={t("prune.now")}>
          {surgery.value ? (
            <SizeList heads={surgery.value.heads} kvHeads={surgery.value.kvHeads} sizes={surgery.value.costs} dtype={surgery.value.dtype} />
          ) : (
            <SizeList heads={headCount.value} kvHeads={sites.value.reduce((sum, item) => sum + item.kvHeads, 0)} sizes={[]} />
          )}
        </Panel>
        <Panel title={t("prune.plan")}>
          <div class="stack">
            {task.value === "prune" ? <PruningPlan /> : <ConversionPlan />}
            <div class="planned">
              {task.value === "prune" && <PlannedHeads />}
              <PlannedSizes />
            </div>
            <Texts />
            <PlanActions />
          </div>
        </Panel>
        <Panel title={t("prune.result")} class="result">
          {result.value ? <ResultView result={result.value} /> : <p class="t3">{t("prune.resultHint")}</p>}
        </Panel>
      </div>
    </>
  );
}

// --- The plan --------------------------------------------------------------------------------------------

function PruningPlan(): JSX.Element {
  const isLab = chosenBy.value === "lab";
  const isSoft = fold.value === "none" && doc.value?.ablated.some((item) => item.mode !== "zero" || item.scale !== 0);
  const fixed = sites.value.filter((item) => !item.abilities.prune.possible);
  return (
    <>
      <Segmented label={t("prune.choose")} {...bind(chosenBy)} options={[["lab", t("prune.fromLab")], ["clusters", t("prune.fromClusters")], ["share", t("prune.fromShare")]]} />
      {isLab && <p class="t3 sm">{t(doc.value?.ablated.length ? "prune.labHint" : "prune.labNone")}</p>}
      {isLab && isSoft && <p class="sm warn-text">{t("prune.labModes")}</p>}
      {chosenBy.value === "clusters" && <p class="t3 sm">{t("prune.clustersHint")}</p>}
      <div class="row wrap">
        {chosenBy.value === "share" && (
          <>
            <Slider label={t("prune.share", { share: share.value })} min={5} max={95} step={5} value={share.value} onInput={(value) => (share.value = value)} />
            <Select label={t("prune.per")} {...bind(per)} options={choices("prune.per.", PER)} />
          </>
        )}
        {!isLab && <Select label={t("prune.method")} {...bind(method)} options={(surgery.value?.methods ?? ["best"]).map((name) => [name, methodName(name)] as const)} />}
        <Select label={t("prune.fold")} {...bind(fold)} options={choices("prune.fold.", FOLDS)} />
      </div>
      {fixed.map((item) => (
        <p key={item.name} class="t3 sm">{t("prune.notPrunable", { site: item.name, reason: say(item.abilities.prune.reason) })}</p>
      ))}
    </>
  );
}

const isFresh = () => plan.value?.request === JSON.stringify(pruneRequest());
/** The heads that go, by the Lab or by the plan. */
const goingHeads = computed<[number, number][]>(() => {
  if (chosenBy.value === "lab") return (doc.value?.ablated ?? []).map((item) => [item.site, item.head]);
  return isFresh() ? (plan.value?.plan.removed ?? []) : [];
});
const goes = (site: number, head: number) => goingHeads.value.some(([other, number]) => other === site && number === head);

/** Let a head go or stay; the choice is then one by hand. */
function toggleGoing(site: number, head: number): void {
  const kept = goingHeads.value.filter(([other, number]) => other !== site || number !== head);
  const heads: [number, number][] = kept.length < goingHeads.value.length ? kept : [...goingHeads.value, [site, head]];
  const modes = new Map(doc.value?.ablated.map((item) => [`${item.site}.${item.head}`, item]));
  setAblated(heads.map(([item, number]) => modes.get(`${item}.${number}`) ?? { site: item, head: number, mode: "zero", scale: 0 }));
  chosenBy.value = "lab";
}

const canPrune = (item: Site) => item.abilities.prune.possible;

function PlannedHeads(): JSX.Element {
  const isKnown = chosenBy.value === "lab" || isFresh();
  return (
    <div>
      <h3>
        {t("prune.map")}
        {isKnown && <span class="t3"> · {t("prune.kept", { kept: headCount.value - goingHeads.value.length, total: headCount.value })}</span>}
      </h3>
      <SwitchGrid label={t("prune.map")} isOff={goes} onToggle={toggleGoing} canSwitch={canPrune} />
      <p class="legend">
        <span><i class="sw" /> {t("prune.stays")}</span>
        <span><i class="sw goes" /> {t("prune.goes")}</span>
        {!isKnown && <span>{t("prune.mapHint")}</span>}
      </p>
    </div>
  );
}

function methodName(name: string): string {
  return name === "best" || name === "random" ? t(`prune.${name}`) : name;
}

function ConversionPlan(): JSX.Element {
  const forms = surgery.value?.forms ?? [];
  const counts = forms.find((item) => item.form === "kv")?.counts ?? [];
  const refused = forms.filter((item) => !item.possible);
  return (
    <>
      <div class="row wrap">
        <Select label={t("prune.form")} {...bind(form)} options={choices("prune.form.", forms.filter((item) => item.possible).map((item) => item.form))} />
        {sites.value.some((item) => item.kind === "cross") && <Select label={t("prune.where")} {...bind(where)} options={choices("prune.where.", WHERE)} />}
      </div>
      <div class="row wrap">
        {form.value === "kv" && (
          <>
            <span class="t3">{t("prune.count")}</span>
            <Segmented label={t("prune.count")} value={String(count.value)} options={counts.map((item) => [String(item), String(item)] as const)} onChange={(value) => (count.value = Number(value))} />
            <Select label={t("prune.grouping")} {...bind(grouping)} options={choices("prune.grouping.", GROUPINGS)} />
            <Select label={t("prune.align")} {...bind(align)} options={choices("prune.align.", ALIGN)} />
          </>
        )}
        {form.value === "collaborative" && <NumberField label={t("prune.width")} value={width.value} min={1} onInput={(value) => (width.value = value || 0)} />}
        {form.value === "routed" && (
          <>
            <NumberField label={t("prune.always")} value={always.value} min={0} onInput={(value) => (always.value = value || 0)} />
            <NumberField label={t("prune.active")} value={active.value} min={1} onInput={(value) => (active.value = value || 0)} />
          </>
        )}
      </div>
      {refused.length > 0 && (
        <div>
          <h3>{t("prune.notForms")}</h3>
          {refused.map((item) => (
            <p key={item.form} class="t3 sm">{t(`prune.form.${item.form}` as TextKey)}: {say(item.reason)}</p>
          ))}
        </div>
      )}
    </>
  );
}

function Texts(): JSX.Element {
  const label = t("prune.texts", { count: textLines.value.length });
  return (
    <details open={textLines.value.length < 2}>
      <summary>{label}</summary>
      <p class="t3 sm">{t("prune.textsHint")}</p>
      <textarea rows={6} aria-label={label} value={openTexts.value} onInput={(event) => (givenTexts.value = event.currentTarget.value)} />
    </details>
  );
}

/** Plan, name of the folder, and the button that writes the new model. */
function PlanActions(): JSX.Element {
  const kind = task.value;
  const write = doc.value?.capabilities.write;
  const hasPlan = kind === "convert" ? surgery.value !== null : chosenBy.value !== "lab" || (doc.value?.ablated.length ?? 0) > 0;
  const isReady = source.isLive && !!doc.value?.capabilities.measure.possible && hasPlan && !job.value;
  const canWrite = isReady && !!write?.possible;
  const compute = async () => {
    const request = REQUESTS[kind]();
    const found: Plan | null = await runJob(PLAN_JOBS[kind], request);
    if (found) plan.value = { request: JSON.stringify(request), plan: found };
  };
  const run = async () => {
    const name = folders.value[kind];
    const found: SurgeryResult | null = await runJob(kind, { ...REQUESTS[kind](), name });
    if (!found) return;
    result.value = found;
    folders.value = { ...folders.value, [kind]: nextFolder(name) };
  };
  return (
    <>
      <Form class="row wrap" onSend={() => canWrite && void run()}>
        <Button aria-disabled={!isReady} onClick={() => isReady && void compute()}>{t("prune.compute")}</Button>
        <span class="grow" />
        <label class="picker">
          <span>{t("prune.name")}</span>
          <input type="text" maxLength={64} spellcheck={false} value={folders.value[kind]} onInput={(event) => (folders.value = { ...folders.value, [kind]: event.currentTarget.value })} />
        </label>
        <button class="btn primary" type="submit" aria-disabled={!canWrite}>{t(kind === "prune" ? "prune.run" : "prune.runConvert")}</button>
      </Form>
      {write && !write.possible && doc.value?.kind === "model" && <p class="t3 sm">{say(write.reason)}</p>}
    </>
  );
}

/** A folder that is not the one just written: pruned, pruned-2, pruned-3. */
export function nextFolder(name: string): string {
  const [, stem = name, number = "1"] = name.match(/^(.*?)-(\d+)$/) ?? [];
  return `${stem}-${Number(number) + 1}`;
}

function PlannedSizes(): JSX.Element | null {
  const kind = task.value;
  const shown = plan.value;
  if (!shown || ("removed" in shown.plan ? "prune" : "convert") !== kind) return null;
  const isStale = shown.request !== JSON.stringify(REQUESTS[kind]());
  return (
    <div class={`planned-sizes ${isStale ? "stale" : ""}`} data-testid="planned">
      {isStale && <p class="stalebar">{t("prune.stale")}</p>}
      <p class="t2">{say(shown.plan.summary)}</p>
      <SizeTable sizes={shown.plan} after={t("prune.planned")} />
      <Notes notes={shown.plan.notes} />
    </div>
  );
}
