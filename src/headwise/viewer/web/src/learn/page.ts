// The script of the pages of `headwise learn --html`: sliders, sections that were read, and buttons that copy. It is inlined
// in each page; without it the pages show the start of every slider and all texts.

import { drawBars, drawMatrix, drawPlot, formatNumber, roundTicks, shortNumber, type Series } from "./pictures";
import { SLIDERS, type Output, type Outputs } from "./sliders";

const MOST_POINTS = 121; // of a curve

// --- Sliders --------------------------------------------------------------------------------------------------------------

/** One input of a slider: a range of numbers, a range over choices, or a text. */
class SliderInput {
  readonly name: string;
  readonly choices: number[];
  readonly label: string;

  constructor(private readonly field: HTMLInputElement) {
    this.name = field.dataset["name"]!;
    this.label = field.dataset["label"]!;
    this.choices = field.dataset["choices"] ? JSON.parse(field.dataset["choices"]) : [];
  }

  get value(): number | string {
    if (this.field.type === "text") return this.field.value;
    const number = Number(this.field.value);
    return this.choices.length ? this.choices[number]! : number;
  }

  /** Places on an axis of this input, and the value at each. */
  points(): { xs: number[]; values: number[]; current: number } {
    const place = Number(this.field.value);
    if (this.choices.length) return { xs: this.choices.map((_, n) => n), values: this.choices, current: place };
    const [low, high, step] = [this.field.min, this.field.max, this.field.step].map(Number) as [number, number, number];
    const steps = Math.round((high - low) / step);
    const stride = Math.ceil(steps / MOST_POINTS);
    const xs = new Set(Array.from({ length: Math.floor(steps / stride) + 1 }, (_, n) => tidy(low + n * stride * step)));
    const sorted = [...xs.add(high).add(place)].sort((left, right) => left - right);
    return { xs: sorted, values: sorted, current: place };
  }

  ticks(width: number): { at: number; text: string }[] {
    if (!this.choices.length) {
      const ticks = roundTicks(Number(this.field.min), Number(this.field.max));
      return ticks.map((at) => ({ at, text: shortNumber(at) }));
    }
    const each = Math.ceil(this.choices.length / Math.max(Math.floor(width / 60), 2));
    return this.choices.map((value, at) => ({ at, text: shortNumber(value) })).filter(({ at }) => at % each === 0);
  }

  show(): void {
    if (this.field.type === "text") return;
    const text = formatNumber(this.value as number);
    this.field.parentElement!.querySelector("output")!.textContent = text;
    this.field.setAttribute("aria-valuetext", text);
  }

  listen(update: () => void): void {
    this.field.addEventListener("input", update);
  }
}

function tidy(value: number): number {
  return Number(value.toPrecision(12));
}

class Slider {
  private readonly inputs: SliderInput[];
  private readonly names: Record<string, string>;

  constructor(private readonly figure: HTMLElement) {
    this.inputs = [...figure.querySelectorAll("input")].map((field) => new SliderInput(field));
    this.names = JSON.parse(figure.dataset["names"]!);
    figure.querySelector<HTMLElement>(".inputs")!.hidden = false;
    figure.querySelector<HTMLElement>(".start-note")!.hidden = true;
    for (const place of figure.querySelectorAll<HTMLElement>("[data-picture]")) {
      place.parentElement!.hidden = false;
      const hasLegend = place.dataset["picture"]!.includes(",");
      (place.previousElementSibling as HTMLElement).hidden = hasLegend;
    }
    for (const input of this.inputs) input.listen(() => this.update());
    new ResizeObserver(() => this.update()).observe(figure);
  }

  private compute(changes: Record<string, number> = {}): Outputs {
    const values = Object.fromEntries(this.inputs.map((input) => [input.name, input.value]));
    return SLIDERS[this.figure.dataset["slider"]!]!({ ...values, ...changes });
  }

  private update(): void {
    for (const input of this.inputs) input.show();
    const error = this.figure.querySelector<HTMLElement>(".error");
    let outputs: Outputs;
    try {
      outputs = this.compute();
    } catch (problem) {
      if (!error) throw problem; // only a text can be wrong
      error.hidden = false;
      return;
    }
    if (error) error.hidden = true;
    for (const cell of this.figure.querySelectorAll<HTMLElement>("[data-output]")) {
      cell.textContent = formatOutput(outputs[cell.dataset["output"]!]!);
    }
    for (const place of this.figure.querySelectorAll<HTMLElement>("[data-picture]")) {
      place.replaceChildren(...this.draw(place.dataset["picture"]!, outputs, Math.floor(place.clientWidth)));
    }
  }

  private draw(picture: string, outputs: Outputs, width: number): HTMLElement[] {
    if (width === 0) return []; // inside a closed answer
    const [kind, listed, over] = picture.split(" ") as [string, string, string?];
    const names = listed.split(",");
    const labels = (outputs["labels"] ?? JSON.parse(this.figure.dataset["labels"]!)) as string[];
    const title = (name: string) => this.names[name]!;
    if (kind === "matrix") return drawMatrix(title(names[0]!), outputs[names[0]!] as number[][], labels, width);
    if (kind === "bars") {
      const series: Series[] = names.map((name) => ({ name: title(name), ys: outputs[name] as number[] }));
      return drawBars(series, labels, width);
    }
    const input = this.inputs.find((one) => one.name === over)!;
    const { xs, values, current } = input.points();
    const swept = values.map((value) => this.compute({ [input.name]: value }));
    const series = names.map((name) => ({ name: title(name), ys: swept.map((one) => one[name] as number) }));
    const shown = { series, xs, current, ticks: input.ticks(width), axis: input.label };
    return drawPlot({ ...shown, isLog: kind === "log" }, width);
  }
}

function formatOutput(output: Output): string {
  if (typeof output === "number") return formatNumber(output);
  return (output as number[]).map(formatNumber).join("  ");
}

// --- Sections that were read ----------------------------------------------------------------------------------------------

const STORE = "headwise-learn";

/** Sections that were read, as "004/1"; none where the browser denies storage, as it may for a file. */
function loadRead(): Set<string> {
  try {
    const stored: unknown = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return new Set(Array.isArray(stored) ? stored.map(String) : []);
  } catch {
    return new Set();
  }
}

function saveRead(read: Set<string>): boolean {
  try {
    localStorage.setItem(STORE, JSON.stringify([...read].sort()));
    return true;
  } catch {
    return false;
  }
}

function showRead(read: Set<string>): void {
  for (const box of document.querySelectorAll<HTMLInputElement>("input[data-read]")) box.checked = read.has(box.dataset["read"]!);
  for (const item of document.querySelectorAll<HTMLElement>("[data-section]")) {
    item.querySelector<HTMLElement>(".is-read")!.hidden = !read.has(item.dataset["section"]!);
  }
  for (const line of document.querySelectorAll<HTMLElement>("[data-progress]")) {
    const count = [...read].filter((name) => name.startsWith(`${line.dataset["progress"]}/`)).length;
    line.textContent = line.dataset["text"]!.replace("{n}", String(count));
    line.hidden = count === 0;
  }
}

function trackReading(): void {
  if (!saveRead(loadRead())) return; // nothing would be kept, so nothing is offered
  for (const line of document.querySelectorAll<HTMLElement>(".done")) line.hidden = false;
  document.addEventListener("change", (event) => {
    const box = event.target as HTMLInputElement;
    const name = box.dataset["read"];
    if (!name) return;
    const read = loadRead();
    if (box.checked) read.add(name);
    else read.delete(name);
    saveRead(read);
    showRead(read);
  });
  addEventListener("storage", () => showRead(loadRead())); // another page was read
  addEventListener("pageshow", () => showRead(loadRead())); // also after going back
}

// --- Buttons that copy ----------------------------------------------------------------------------------------------------

async function copyText(source: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(source.textContent ?? "");
    return true;
  } catch {
    getSelection()!.selectAllChildren(source); // a page that is a file may not write to the clipboard
    return document.execCommand("copy");
  }
}

function addCopyButtons(): void {
  const { copy, copied } = document.body.dataset;
  for (const code of document.querySelectorAll<HTMLElement>("pre > code, .command > code")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = copy!;
    button.addEventListener("click", async () => {
      if (!(await copyText(code))) return;
      button.textContent = copied!;
      setTimeout(() => (button.textContent = copy!), 1500);
    });
    const block = code.parentElement!;
    if (block.tagName === "PRE") block.before(button);
    else block.append(" ", button);
  }
}

/** What is wider than its box can be scrolled by keyboard; browsers differ in whether they allow that by themselves. */
function focusScrolled(): void {
  for (const box of document.querySelectorAll<HTMLElement>(".scroll, .formula, pre")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

for (const figure of document.querySelectorAll<HTMLElement>("[data-slider]")) new Slider(figure);
trackReading();
focusScrolled();
addEventListener("resize", focusScrolled);
document.addEventListener("toggle", focusScrolled, true); // a source or an answer was opened
addCopyButtons();
