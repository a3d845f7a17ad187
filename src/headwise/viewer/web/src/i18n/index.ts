// Texts in the language of the page.

import { language } from "../state";
import { en, type TextKey } from "./en";
import { zh } from "./zh";

export type { TextKey } from "./en";
export { classWord, measureMeaning, measureName } from "./measures";

/** The text of a key with {names} replaced by values. */
export function t(key: TextKey, values: Record<string, string | number> = {}): string {
  const text = (language.value === "zh" ? zh : en)[key];
  return text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

/** A number with three significant digits, without an exponent where it is readable. */
export function format(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100_000)) return value.toExponential(1);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 || size === 0 ? value.toFixed(2) : value.toFixed(4);
}
