// Texts in the language of the page.

import { language } from "../state";
import { changeTexts } from "./texts_changes";
import { frameTexts } from "./texts_frame";
import { viewTexts } from "./texts_views";

export { classWord, measureMeaning, measureName } from "./measures";

const texts = { ...frameTexts, ...viewTexts, ...changeTexts };
const LANGUAGES = ["en", "zh"] as const; // in the order of the texts of a key
export type TextKey = keyof typeof texts;

/** Whether there is a text of this key, which may be made of a name that the server sent. */
export function isTextKey(key: string): key is TextKey {
  return key in texts;
}

const isTouch = matchMedia("(hover: none)").matches;
const TOUCH_WORDS: Record<string, string> = { "Point at": "Tap", "point at": "tap", 指向: "点按" };

/** The text of a key with {names} replaced by values; without a pointer, one taps. */
export function t(key: TextKey, values: Record<string, string | number> = {}): string {
  const found: string = texts[key][LANGUAGES.indexOf(language.value)]!;
  const text = isTouch ? found.replace(/[Pp]oint at|指向/g, (word) => TOUCH_WORDS[word]!) : found;
  return text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

/** A sentence of the server as it is; sentences of the page itself are given by their key. */
export function say(sentence: string): string {
  return sentence.startsWith("error.") ? t(sentence as TextKey) : sentence;
}

/** How many texts were measured, from the words of the server such as "1 text" or "22 general texts". */
export function textCount(texts: string): string {
  const [, count, general] = /^(\d+) (general )?texts?$/.exec(texts) ?? [];
  return count === undefined ? texts : count === "1" ? t("texts.one") : t(general ? "texts.general" : "texts.many", { count });
}

/** A number with three significant digits, without an exponent where it is readable. */
export function format(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100_000)) return value.toExponential(1);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 || size === 0 ? value.toFixed(2) : value.toFixed(4);
}

/** An interval; units that all agree have none, which is not certainty. */
export function formatInterval(low: number, high: number): string {
  if (!Number.isFinite(low)) return "–";
  return low === high ? t("noSpread") : `${format(low)}–${format(high)}`;
}
