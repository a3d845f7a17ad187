// Where a figure comes from: model, text and settings, as a caption and as the description of the SVG.

import { t } from "../i18n";
import { doc } from "../state";
import { currentAddress } from "../url_state";

const MOST_TEXT = 90; // characters of the text in the caption

/** The lines under a figure: the model with its class and version, and the beginning of the text. */
export function captionLines(): string[] {
  const model = doc.value?.model ?? {};
  const details = ["class", "revision", "torch"].filter((name) => model[name] !== undefined).map((name) => (name === "class" ? String(model[name]) : `${name} ${model[name]}`));
  const text = readText();
  const signs = [...text];
  return [[String(model["name"] ?? ""), ...details].filter(Boolean).join(" · "), ...(text ? [`${t("text.title")}: ${signs.length > MOST_TEXT ? `${signs.slice(0, MOST_TEXT - 1).join("")}…` : text}`] : [])];
}

function readText(): string {
  const streams = Object.values(doc.value?.streams ?? {});
  return streams.map((rows) => rows[0]?.text || rows[0]?.words.join("") || "").filter(Boolean).join(" → ");
}

/** Everything that is needed to make the figure again: the model, the texts, and the settings as the address holds them. */
export function provenance(): string {
  return JSON.stringify({ headwise: "view", model: doc.value?.model ?? {}, text: readText(), settings: currentAddress().replace(/^[^#]*/, "") });
}
