// The steps of one head for one query as the server sends them, and how each of their numbers is computed.

import { visibleToken } from "../components/tokens";
import { isTextKey, t, type TextKey } from "../i18n";
import type { Message } from "../source";

export type Numbers = Float32Array | Int32Array | Uint8Array;

export interface Step {
  index: number;
  name: string;
  formula: string;
  part: string;
  facts: Record<string, number>;
  arrays: Record<string, { data: Numbers; shape: number[] }>;
}

export interface Steps {
  origin: "model" | "trace";
  note: string;
  head: number;
  query: number;
  steps: Step[]; // those that are shown
  all: Step[];
  positions: Int32Array; // of all keys
  shown: Int32Array; // indices of the keys whose vectors are known
  missing: Record<string, string>;
  words: string[]; // of the keys, by position
}

/** A number under the pointer: its step, the array, the row (a shown key, or 0), and the channel or key. */
export interface Place {
  step: number;
  array: string;
  row: number;
  index: number;
}

export interface Explained {
  symbol: string;
  value: number;
  rule: string; // the formula with the numbers put in
}

/** Read a binary answer of `/api/steps`. */
export function readSteps(message: Message, words: string[]): Steps {
  const { fields, arrays } = message;
  const all: Step[] = fields["steps"].map((entry: Omit<Step, "index" | "arrays">, index: number) => ({
    ...entry,
    index,
    arrays: Object.fromEntries(
      Object.entries(arrays)
        .filter(([name]) => name.startsWith(`${index}.`))
        .map(([name, array]) => [name.slice(name.indexOf(".") + 1), array]),
    ),
  }));
  const hasProjection = all.some((step) => step.name === "project");
  return {
    origin: fields["origin"],
    note: fields["note"],
    head: fields["head"],
    query: fields["query"],
    steps: all.filter((step) => step.name !== "vectors" || !hasProjection),
    all,
    positions: arrays["positions"]!.data as Int32Array,
    shown: arrays["shown"]!.data as Int32Array,
    missing: fields["missing"],
    words,
  };
}

/** What a step is called: a part of the field's common ones by what it does. */
export function stepKind(step: Step): string {
  if (step.name === "transform" && step.arrays["planes"]) return "rotate";
  if (step.name === "score_step" && step.arrays["added"]) return "bias";
  if (step.name === "score_step" && ("limit" in step.facts || "cap" in step.facts)) return "cap";
  if (step.name === "normalise" && !step.formula.includes("exp(")) return "weights";
  return step.name;
}

export function stepTitle(step: Step): string {
  return t(`step.${stepKind(step)}` as TextKey);
}

export function shortTitle(step: Step): string {
  const key = `stepShort.${stepKind(step)}`;
  return isTextKey(key) ? t(key) : stepTitle(step).toLowerCase();
}

/** Whether the numbers of a step are one for each key. */
export function isByKey(step: Step): boolean {
  return ["product", "scale", "score_step", "mask", "normalise", "weight_step"].includes(step.name);
}

export function keyName(steps: Steps, index: number): string {
  const position = steps.positions[index] ?? index;
  return visibleToken(steps.words[position] ?? String(position));
}

export function data(step: Step | undefined, name: string): Numbers | null {
  return step?.arrays[name]?.data ?? null;
}

/** One vector of an array: a row of a matrix, or the array itself. */
export function vector(step: Step, name: string, row = 0): Numbers {
  const array = step.arrays[name]!;
  const width = array.shape[array.shape.length - 1]!;
  return array.data.subarray(row * width, (row + 1) * width);
}

/** A number with enough digits to follow a computation by hand. */
export function exact(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(3) : value.toPrecision(5);
  return text.replace("-", "−");
}

function term(a: number, b: number): string {
  return `${exact(a)} × ${exact(b)}`;
}

function find(steps: Steps, name: string): Step | undefined {
  return steps.all.find((step) => step.name === name);
}

/** How a number is computed, with the numbers put in. */
export function explain(steps: Steps, place: Place): Explained | null {
  const step = steps.all[place.step];
  const array = step?.arrays[place.array];
  if (!step || !array) return null;
  const stored = isByKey(step) ? array.data[place.index] : vector(step, place.array, place.row)[place.index];
  if (stored === undefined) return null;
  const isWeighted = step.name === "gather" && place.array === "v"; // shown as weight times value
  const value = isWeighted ? stored * (lastWeights(steps, step)?.[steps.shown[place.row]!] ?? NaN) : stored;
  const symbol = isByKey(step) ? `${place.array === "allowed" ? "mask" : SYMBOLS[step.name]} ${keyName(steps, place.index)}` : symbolOf(steps, step, place);
  return { symbol, value, rule: isByKey(step) ? keyRule(steps, step, place.index, value) : channelRule(steps, step, place, value) };
}

const SYMBOLS: Record<string, string> = { product: "q·k", scale: "s", score_step: "s", normalise: "a", weight_step: "a" };

function symbolOf(steps: Steps, step: Step, { array, row, index }: Place): string {
  const names: Record<string, string> = { residual: "x", norm: "n", norm_after: "n", gather: array === "v" ? "a v" : "z", output_step: "z", contribution: "c", sum: "y", residual_out: "x" };
  const name = array === "out" || step.name === "gather" ? names[step.name] : { own: "c", others: t("steps.others"), bias: "b", in: "x", added: "n" }[array];
  const key = array === "k" || array === "v" ? ` ${keyName(steps, steps.shown[row]!)}` : "";
  return `${name ?? array}${key} [${index}]`;
}

function keyRule(steps: Steps, step: Step, index: number, value: number): string {
  const before = step.arrays["in"] ? step.arrays["in"].data[index]! : previousScore(steps, step)?.[index];
  switch (step.name) {
    case "product":
      return productRule(steps, index);
    case "scale":
      return term(before ?? NaN, step.facts["scale"] ?? 1);
    case "score_step": {
      if (step.arrays["added"]) return `${exact(before ?? NaN)} + ${exact(step.arrays["added"].data[index]!)}`;
      const limit = step.facts["limit"] ?? step.facts["cap"];
      return limit === undefined ? `${exact(before ?? NaN)} → ${exact(value)}` : `${exact(limit)} × tanh(${exact(before ?? NaN)} / ${exact(limit)})`;
    }
    case "mask":
      return value ? "s" : "−∞";
    case "normalise":
      return softmaxRule(steps, step, index);
    default:
      return `${exact(before ?? NaN)} → ${exact(value)}`;
  }
}

/** The scores or products of the step before this one. */
function previousScore(steps: Steps, step: Step): Numbers | null {
  for (let index = step.index - 1; index >= 0; index--) {
    const earlier = steps.all[index]!;
    if (["product", "scale", "score_step"].includes(earlier.name)) return earlier.arrays["out"]!.data;
  }
  return null;
}

function productRule(steps: Steps, index: number): string {
  const row = steps.shown.indexOf(index);
  const vectors = find(steps, "vectors");
  if (row < 0 || !vectors?.arrays["q"] || !vectors.arrays["k"]) return "Σ q × k";
  const [q, k] = [vector(vectors, "q"), vector(vectors, "k", row)];
  const products = Array.from(q, (a, channel) => ({ text: term(a, k[channel]!), size: a * k[channel]! }));
  return sumOfLargest(products, 4);
}

/** The largest products of a sum written out, and the sum of the rest. */
function sumOfLargest(products: { text: string; size: number }[], count: number): string {
  const sorted = [...products].sort((a, b) => Math.abs(b.size) - Math.abs(a.size));
  const shown = sorted.slice(0, count).map((product) => product.text);
  const rest = sorted.slice(count);
  if (rest.length) shown.push(`(${t("steps.rest", { count: rest.length, value: exact(rest.reduce((sum, product) => sum + product.size, 0)) })})`);
  return shown.join(" + ");
}

/** exp(s) over the sum of all keys, with the largest score taken off, so that the numbers stay small. */
function softmaxRule(steps: Steps, step: Step, index: number): string {
  const scores = previousScore(steps, step);
  const allowed = find(steps, "mask")?.arrays["allowed"]?.data;
  if (!scores || !allowed || stepKind(step) !== "normalise") return step.formula;
  if (!allowed[index]) return t("map.masked");
  const sink = step.facts["sink"];
  let top = sink ?? -Infinity;
  scores.forEach((score, key) => (top = allowed[key] ? Math.max(top, score) : top));
  let total = 0;
  scores.forEach((score, key) => (total += allowed[key] ? Math.exp(score - top) : 0));
  const below = sink === undefined ? exact(total) : `(${exact(total)} + exp(${exact(sink)} − ${exact(top)}))`;
  return `exp(${exact(scores[index]!)} − ${exact(top)}) / ${below}`;
}

function channelRule(steps: Steps, step: Step, place: Place, value: number): string {
  const { array, row, index } = place;
  switch (step.name) {
    case "norm":
    case "norm_after":
      return normRule(step, index);
    case "project":
      return array === "q" && step.arrays["channels"] ? termsRule(step, index, value) : step.formula.split(", ").find((rule) => rule.startsWith(array)) ?? step.formula;
    case "transform":
      return transformRule(step, array, row, index, value);
    case "gather":
      return gatherRule(steps, step, array, row, index);
    case "contribution":
      return termsRule(step, index, value);
    case "output_step":
      return `${exact(vector(step, "in")[index]!)} → ${exact(value)}`;
    case "sum":
    case "residual_out":
      return array === "out" ? sumRule(step, index) : "";
    default:
      return "";
  }
}

function normRule(step: Step, index: number): string {
  const { mean, std, rms } = step.facts;
  const x = exact(vector(step, "in")[index]!);
  const normed = rms === undefined ? `(${x} − ${exact(mean ?? 0)}) / ${exact(std ?? 1)}` : `${x} / ${exact(rms)}`;
  const weight = step.arrays["weight"] ? ` × ${exact(vector(step, "weight")[index]!)}` : "";
  const bias = step.arrays["bias"] ? ` + ${exact(vector(step, "bias")[index]!)}` : "";
  return normed + weight + bias;
}

function termsRule(step: Step, index: number, value: number): string {
  const channels = vector(step, "channels", index);
  const factors = vector(step, "factors", index);
  const input = step.arrays["input"]!.data;
  const products = Array.from(channels, (channel, number) => ({ text: term(input[channel]!, factors[number]!), size: input[channel]! * factors[number]! }));
  const rest = value - products.reduce((sum, product) => sum + product.size, 0);
  const count = input.length - channels.length;
  const shown = products.map((product) => product.text).join(" + ");
  return count > 0 ? `${shown} + (${t("steps.rest", { count, value: exact(rest) })})` : shown;
}

function transformRule(step: Step, array: string, row: number, index: number, value: number): string {
  const before = vector(step, `${array}_in`, row);
  const turned = turns(step, array, row).find(({ planes }) => planes.includes(index));
  if (!turned) return `${exact(before[index]!)} → ${exact(value)}`;
  const [first, second] = turned.planes;
  const [a, b, angle] = [exact(before[first]!), exact(before[second]!), exact(turned.angle)];
  const factor = Math.abs(turned.factor - 1) > 1e-4 ? `${exact(turned.factor)} × ` : "";
  const rule = index === first ? `cos(${angle}) × ${a} − sin(${angle}) × ${b}` : `sin(${angle}) × ${a} + cos(${angle}) × ${b}`;
  return factor ? `${factor}(${rule})` : rule;
}

export interface Turn {
  planes: [number, number];
  angle: number;
  factor: number;
}

/** The angle by which each plane of channels is turned, and the factor of its length. */
export function turns(step: Step, array: string, row: number): Turn[] {
  const planes = data(step, "planes");
  if (!planes || !step.arrays[`${array}_in`]) return [];
  const [before, after] = [vector(step, `${array}_in`, row), vector(step, array, row)];
  return Array.from({ length: planes.length / 2 }, (_, number) => {
    const [a, b] = [planes[2 * number]!, planes[2 * number + 1]!];
    const turn = Math.atan2(after[b]!, after[a]!) - Math.atan2(before[b]!, before[a]!);
    const length = Math.hypot(before[a]!, before[b]!);
    const angle = Math.atan2(Math.sin(turn), Math.cos(turn)); // within half a turn
    return { planes: [a, b], angle, factor: length ? Math.hypot(after[a]!, after[b]!) / length : 1 };
  });
}

function gatherRule(steps: Steps, step: Step, array: string, row: number, index: number): string {
  const weights = lastWeights(steps, step);
  if (!weights) return step.formula;
  if (array === "v") return term(weights[steps.shown[row]!]!, vector(step, "v", row)[index]!);
  const products = Array.from(steps.shown, (key, shown) => ({ text: term(weights[key]!, vector(step, "v", shown)[index]!), size: weights[key]! * vector(step, "v", shown)[index]! }));
  const rest = vector(step, "rest")[index]!;
  const others = steps.shown.length < weights.length && Math.abs(rest) > 1e-7 ? ` + (${t("steps.restKeys", { value: exact(rest) })})` : "";
  return sumOfLargest(products, 4) + others;
}

export function lastWeights(steps: Steps, step: Step): Numbers | null {
  for (let index = step.index - 1; index >= 0; index--) {
    const earlier = steps.all[index]!;
    if (earlier.name === "normalise" || earlier.name === "weight_step") return earlier.arrays["out"]!.data;
  }
  return null;
}

function sumRule(step: Step, index: number): string {
  const at = (name: string) => exact(vector(step, name)[index]!);
  if (step.arrays["added"]) return `${at("in")} + ${at("added")}`;
  const heads = `${at("own")} + ${at("others")} + ${at("bias")}`;
  if (step.name === "sum") return heads;
  const scale = step.facts["scale"] ?? 1;
  return scale === 1 ? `${at("in")} + ${heads}` : `${at("in")} + ${exact(scale)} × (${heads})`;
}
