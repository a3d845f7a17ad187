// The Python lines and the command that make the shown figure again from the saved trace.

import { shownView, wholeView } from "./components/head_data";
import type { Site } from "./source";
import { cellMode, doc, lens, selectedHead, sites, theme } from "./state";

export interface Reproduction {
  python: string;
  shell: string;
  /** Whether the lines need the model itself and not only its trace. */
  needsModel: boolean;
}

/** A text as a literal of Python; JSON escapes what Python escapes. */
function quotePython(text: string): string {
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function quoteShell(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, `'"'"'`)}'`;
}

function traceName(): string {
  return `${doc.value!.fileStem}.trace`;
}

function themeName(): string {
  const isDark = theme.value ? theme.value === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return isDark ? "dark" : "light";
}

export function reproduceHead(item: Site): Reproduction {
  const { q0, q1, k0, k1 } = shownView(item);
  const whole = wholeView(item);
  const isPart = q1 - q0 < whole.q1 || k1 - k0 < whole.k1;
  const site = quotePython(item.name);
  const queries = isPart ? `, slice(${q0}, ${q1})` : "";
  const keys = isPart ? `[:, ${k0}:${k1}]` : "";
  const isWeight = lens.value === "weight";
  const needsModel = lens.value === "effect";
  const part = isPart ? `slice(${q0}, ${q1})` : "slice(None)";
  const words = (stream: string, first: number, end: number) => {
    if (!doc.value!.streams[stream]) return `[str(n) for n in range(${first}, ${end})]`;
    return `trace.streams[${quotePython(stream)}][0].words[${first}:${end}]`;
  };
  const python = [
    "import headwise as hw",
    "from headwise.observe.head_analysis.attention_figures import HeadPicture, head_figure",
    "from headwise.report.plots import save_figure",
    "",
    needsModel ? `page = hw.view("MODEL", ${quotePython(doc.value!.streams["text"]?.[0]?.text ?? "")})  # the folder of the model` : `trace = hw.load_trace(${quotePython(traceName())})`,
    ...(needsModel ? ["trace = page.opened.trace"] : []),
    isWeight
      ? `weights = trace.head_weights(${site}, ${selectedHead.value}${queries})${keys}`
      : `weights = ${needsModel ? "page" : "hw.view(trace)"}.opened.weights(${site}, ${selectedHead.value}, ${part}, lens="${lens.value}")${keys}`,
    `queries = ${words(item.queryStream, q0, q1)}`,
    `keys = ${words(item.keyStream, k0, k1)}`,
    `picture = HeadPicture("", "", weights${isWeight ? "" : " / weights.max()"}, queries, keys)`,
    `title = ${quotePython(`${String(doc.value!.model["name"] ?? "model")}: ${item.name} ${selectedHead.value}`)}`,
    `save_figure(head_figure(picture, title), "figure.svg", "${themeName()}")`,
  ];
  const shell = `headwise heads ${traceName()} --draw ${quoteShell(`${item.name}:${selectedHead.value}`)} --out figures`;
  return { python: python.join("\n"), shell, needsModel };
}

export function reproduceMap(): Reproduction {
  const page = `${doc.value!.fileStem}.html`;
  const isMeasure = cellMode.value !== "thumbnail" && sites.value.length > 0;
  const python = isMeasure
    ? ["import headwise as hw", "", 'page = hw.view("MODEL")  # the folder of the model', `page.save(${quotePython(page)})`, "table = page.opened.table"]
    : ["import headwise as hw", "", `trace = hw.load_trace(${quotePython(traceName())})`, `hw.view(trace).save(${quotePython(page)})`, "pictures = {", "    layer.name: [trace.thumbnail(layer.name, head) for head in range(layer.heads)] for layer in trace.layers", "}"];
  return { python: python.join("\n"), shell: `headwise view ${isMeasure ? "MODEL" : traceName()} --export ${page}`, needsModel: isMeasure };
}
