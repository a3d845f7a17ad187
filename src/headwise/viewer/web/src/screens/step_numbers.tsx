// The numbers of one step: vectors as bars, keys as cells, and the planes of a rotation as dials.

import type { JSX } from "preact";
import { Ramp } from "../components/basics";
import { KeyCells, keysToShow, roundedLimit, VectorBar, type Pointing } from "../components/number_cells";
import { t } from "../i18n";
import { exact, isByKey, keyName, lastWeights, stepKind, stepTitle, turns, vector, type Numbers, type Step, type Steps } from "./step_data";

const MAX_DIALS = 8;
const GATHERED = 3; // keys whose values are shown in the weighted sum

interface Props {
  steps: Steps;
  step: Step;
  pointing: Pointing;
  shownKey: number; // row of the shown keys
  onSelectKey: (position: number) => void;
}

export function StepNumbers(props: Props): JSX.Element {
  const { step } = props;
  if (isByKey(step)) return <KeyNumbers {...props} />;
  if (step.name === "gather") return <GatherNumbers {...props} />;
  if (["project", "transform", "vectors"].includes(step.name)) return <VectorNumbers {...props} />;
  return <StreamNumbers {...props} />;
}

/** Vectors in the width of the model: x, the norm, what the head adds, and the new residual stream. */
function StreamNumbers({ step, pointing }: Props): JSX.Element {
  const names: [string, string][] =
    step.arrays["own"] !== undefined
      ? [
          ["in", t("stepShort.residual")],
          ["own", t("steps.own")],
          ["others", t("steps.others")],
          ["bias", t("stepShort.bias")],
          ["out", step.name === "sum" ? "y" : t("stepShort.residual_out")],
        ]
      : step.arrays["added"]
        ? [
            ["in", t("stepShort.residual")],
            ["added", "n"],
            ["out", t("stepShort.residual_out")],
          ]
        : [["out", { residual: "x", contribution: "c", output_step: "z" }[step.name] ?? "n"]];
  const shown = names.filter(([name]) => step.arrays[name] && (name !== "bias" || step.arrays["bias"]!.data.some((value) => value !== 0)));
  const vectors = shown.map(([name]) => vector(step, name));
  const limit = roundedLimit(vectors);
  const role = step.name === "contribution" || step.name === "output_step" ? "o" : "";
  return (
    <>
      {shown.map(([name, label], number) => (
        <VectorBar key={name} values={vectors[number]!} limit={limit} role={name === "own" ? "o" : role} label={label} step={step.index} array={name} pointing={pointing} />
      ))}
      <Scale vectors={vectors} limit={limit} />
    </>
  );
}

function Scale({ vectors, limit }: { vectors: Numbers[]; limit: number }): JSX.Element {
  const last = vectors[vectors.length - 1]!;
  return (
    <p class="xs t3">
      {t("steps.channels", { count: last.length })}, {t("steps.range", { limit })}; {t("steps.length", { value: exact(Math.hypot(...last)) })}
    </p>
  );
}

/** Query, key and value vectors; of a rotation also its planes. */
function VectorNumbers({ steps, step, pointing, shownKey }: Props): JSX.Element {
  const name = keyName(steps, steps.shown[shownKey] ?? 0);
  const sides = ["q", "k", "v"].filter((side) => step.arrays[side]);
  const vectors = sides.map((side) => vector(step, side, side === "q" ? 0 : shownKey));
  const limit = roundedLimit(vectors);
  return (
    <>
      {step.arrays["planes"] && <Dials step={step} row={shownKey} />}
      {sides.map((side, number) => (
        <VectorBar
          key={side}
          values={vectors[number]!}
          limit={limit}
          role={side}
          label={side === "q" ? "q" : `${side} ${name}`}
          step={step.index}
          array={side}
          row={side === "q" ? 0 : shownKey}
          pointing={pointing}
        />
      ))}
    </>
  );
}

/** Each plane of a rotation with the query and the key in it, before and after. */
function Dials({ step, row }: { step: Step; row: number }): JSX.Element {
  const sides = (["q", "k"] as const).filter((side) => step.arrays[side]);
  const turned = turns(step, sides[0] ?? "q", sides[0] === "k" ? row : 0);
  return (
    <>
      <div class="dials">
        {turned.slice(0, MAX_DIALS).map(({ planes: [a, b], angle }) => {
          const arms = sides.flatMap((side) => {
            const at = side === "q" ? 0 : row;
            return [`${side}_in`, side].map((name) => ({ side, isBefore: name !== side, x: vector(step, name, at)[a]!, y: vector(step, name, at)[b]! }));
          });
          const longest = Math.max(...arms.map(({ x, y }) => Math.hypot(x, y)), 1e-9);
          return (
            <div key={a}>
              <svg viewBox="0 0 96 96" role="img" aria-label={`${a}, ${b}: ${t("steps.turn", { angle: Number(angle.toPrecision(5)) })}`}>
                <circle cx="48" cy="48" r="40" />
                <path class="axes" d="M8 48h80M48 8v80" />
                {arms.map(({ side, isBefore, x, y }) => (
                  <line key={`${side}${isBefore}`} class={`${side} ${isBefore ? "before" : ""}`} x1="48" y1="48" x2={48 + (40 * x) / longest} y2={48 - (40 * y) / longest} />
                ))}
              </svg>
              <span>{a}, {b}</span>
              <span>{t("steps.turn", { angle: Number(angle.toPrecision(5)) })}</span>
            </div>
          );
        })}
      </div>
      <p class="xs t3">{t("steps.dials")} {turned.length > MAX_DIALS && t("steps.morePlanes", { count: turned.length - MAX_DIALS })}</p>
    </>
  );
}

function allowedKeys(steps: Steps): Numbers | null {
  return steps.all.find((step) => step.name === "mask")?.arrays["allowed"]?.data ?? null;
}

/** One number for each key. */
function KeyNumbers({ steps, step, pointing, shownKey, onSelectKey }: Props): JSX.Element {
  const isWeight = step.name === "normalise" || step.name === "weight_step";
  const array = step.name === "mask" ? "allowed" : "out";
  const allowed = step.name === "mask" || isWeight ? allowedKeys(steps) : null;
  const count = keysToShow(steps, allowedKeys(steps)).length;
  const all = steps.positions.length;
  const masked = allowed ? Array.from(allowed).filter((value) => !value).length : 0;
  return (
    <>
      {(step.name !== "mask" || masked > 0) && (
        <KeyCells
          steps={steps}
          step={step}
          array={array}
          allowed={allowed}
          isWeight={isWeight}
          selected={steps.positions[steps.shown[shownKey] ?? 0] ?? null}
          onSelect={onSelectKey}
          pointing={pointing}
          label={stepTitle(step)}
        />
      )}
      {step.name === "mask" && (
        <p class="legend xs t3">
          {masked > 0 ? (
            <span>
              <i class="sw mask" />
              {t("steps.masked", { count: masked, all })}
            </span>
          ) : (
            t("steps.allAllowed", { all })
          )}
        </p>
      )}
      {isWeight && <WeightLegend step={step} />}
      {count < all && step.name !== "mask" && <p class="xs t3">{t("steps.shownKeys", { shown: count, all })}</p>}
    </>
  );
}

function WeightLegend({ step }: { step: Step }): JSX.Element {
  const sum = Array.from(step.arrays["out"]!.data).reduce((total, value) => total + value, 0);
  const sink = step.facts["sink"];
  return (
    <p class="xs t3">
      <Ramp text={t("steps.sum", { sum: sum.toFixed(3) })} />
      {sink !== undefined && stepKind(step) === "normalise" && ` · ${t("steps.sink", { score: exact(sink), share: (1 - sum).toFixed(3) })}`}
    </p>
  );
}

/** The values of the keys with the largest weights, times their weights, and the sum over all keys. */
function GatherNumbers({ steps, step, pointing }: Props): JSX.Element {
  const weights = lastWeights(steps, step);
  const order = Array.from(steps.shown, (key, row) => ({ key, row, weight: weights?.[key] ?? 0 })).sort((a, b) => b.weight - a.weight);
  const most = order.slice(0, GATHERED);
  const out = vector(step, "out");
  const scaled = most.map(({ row, weight }) => Float32Array.from(vector(step, "v", row), (value) => value * weight));
  const limit = roundedLimit([...scaled, out]);
  const more = steps.positions.length - most.length;
  return (
    <>
      {most.map(({ key, row, weight }) => (
        <VectorBar
          key={key}
          values={vector(step, "v", row)}
          factor={weight}
          limit={limit}
          role="v"
          label={`${weight.toFixed(3).replace(/^0/, "")} ${keyName(steps, key)}`}
          step={step.index}
          array="v"
          row={row}
          pointing={pointing}
        />
      ))}
      {more > 0 && <p class="xs t3">{t("steps.moreKeys", { count: more })}</p>}
      <VectorBar values={out} limit={limit} role="o" label="z" step={step.index} array="out" pointing={pointing} />
    </>
  );
}
