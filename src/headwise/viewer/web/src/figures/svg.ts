// SVG as text: elements whose attributes and texts are escaped, and the picture of it as PNG. Colours and fonts are
// attributes and not styles, so that a figure looks the same in a browser, in Inkscape and in a paper.

import { cssValue } from "../canvas/colors";
import { t } from "../i18n";
import { doc } from "../state";
import { currentAddress } from "../url_state";

export const FONT = "Helvetica Neue, Helvetica, Arial, Noto Sans CJK SC, PingFang SC, Microsoft YaHei, sans-serif";
export const MONO = "DejaVu Sans Mono, Menlo, Consolas, Noto Sans Mono CJK SC, monospace";
export const PNG_ZOOMS = ["1", "2", "4"] as const; // pixels of the PNG for each unit of the figure
const MAX_PNG_SIDE = 8192;

export interface Figure {
  svg: string;
  title: string;
  width: number;
  height: number;
}

type Attributes = Record<string, string | number>;

/** Text without the characters that XML forbids or that change the direction of others; these are shown as ⟨code⟩. */
export function printable(text: string): string {
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu, (sign) => `⟨${sign.codePointAt(0)!.toString(16)}⟩`);
}

const ENTITIES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

export function escapeXml(text: string): string {
  return printable(text).replace(/[&<>"']/g, (sign) => ENTITIES[sign]!);
}

/** An element; its children are elements, made by this function or by `textElement`. */
export function element(name: string, attributes: Attributes, ...children: string[]): string {
  const fields = Object.entries(attributes).map(([key, value]) => ` ${key}="${typeof value === "number" ? round(value) : escapeXml(value)}"`);
  return children.length ? `<${name}${fields.join("")}>${children.join("")}</${name}>` : `<${name}${fields.join("")}/>`;
}

/** A line of text. */
export function textElement(text: string, attributes: Attributes): string {
  return element("text", { "font-family": FONT, "font-size": 11, fill: cssValue("--text"), ...attributes }, escapeXml(text));
}

function round(value: number): string {
  return String(Math.round(value * 100) / 100);
}

const CAPTION = { line: 14, size: 9, margin: 20 };

/** The figure around its parts: the ground in the colour of the page, a caption, and title and origin for machines. */
export function makeFigure(title: string, width: number, inner: number, parts: string[]): Figure {
  const lines = captionLines();
  const height = inner + lines.length * CAPTION.line + 6;
  const most = Math.floor((width - 2 * CAPTION.margin) / (0.61 * CAPTION.size));
  const caption = lines.map((line, index) => textElement(shorten(line, most), { x: CAPTION.margin, y: inner + (index + 0.5) * CAPTION.line, "font-size": CAPTION.size, fill: cssValue("--text-3") }));
  const ground = element("rect", { width, height, fill: cssValue("--surface") });
  const size = { width: Math.ceil(width), height: Math.ceil(height) };
  const root = { xmlns: "http://www.w3.org/2000/svg", ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img" };
  return { svg: element("svg", root, element("title", {}, escapeXml(title)), element("desc", {}, escapeXml(provenance())), ground, ...parts, ...caption), title, ...size };
}

/** About how wide a text is, in units of its font size; East Asian characters are as wide as high. */
export function textWidth(text: string, size: number): number {
  let width = 0;
  for (const sign of text) width += /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]/.test(sign) ? 1 : 0.61;
  return width * size;
}

export function shorten(text: string, most: number): string {
  const signs = [...text];
  return signs.length <= most ? text : `${signs.slice(0, most - 1).join("")}…`;
}

export function svgBlob(figure: Figure): Blob {
  return new Blob([figure.svg], { type: "image/svg+xml" });
}

/** The figure as PNG, with some pixels for each unit as far as a canvas allows it. */
export async function makePng(figure: Figure, wanted: number): Promise<Blob> {
  const address = URL.createObjectURL(svgBlob(figure));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const zoom = Math.min(wanted, MAX_PNG_SIDE / Math.max(figure.width, figure.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(figure.width * zoom);
    canvas.height = Math.round(figure.height * zoom);
    canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("PNG"))), "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

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
