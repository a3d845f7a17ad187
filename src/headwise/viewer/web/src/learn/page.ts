// The script of the pages of `headwise learn --html`: sliders, sections that were read, and buttons
// that copy. It is inlined in each page; without it the pages show all texts, and the start of
// every slider.

import { drawBars, drawMatrix, drawPlot, formatNumber, roundTicks } from "./pictures";
import { SLIDERS, type Output, type Outputs } from "./sliders";

const MOST_POINTS = 121; // of a curve

// --- Sliders -------------------------------------------------------------------------------------

/** One input of a slider: a range of numbers, a range over choices, or a text. */
class SliderInput {
  readonly name: string;
  readonly choices: number[];
  readonly label: string;
  readonly isText: boolean;

  constructor(private readonly field: HTMLInputElement) {
    this.name = field.dataset["name"]!;
    this.label = field.dataset["label"]!;
    this.choices = field.dataset["choices"] ? JSON.parse(field.dataset["choices"]) : [];
    this.isText = field.tagName === "TEXTAREA";
  }

  get value(): number | string {
    if (this.isText) return this.field.value;
    const number = Number(this.field.value);
    return this.choices.length ? this.choices[number]! : number;
  }

  /**
   * Values of this input for a curve, and the ticks of the axis. The axis is logarithmic for
   * choices over more than a factor of 32, or if the height is logarithmic too.
   */
  axis(isLogHeight: boolean): { xs: number[]; ticks: number[]; isLogAxis: boolean } {
    if (this.choices.length) {
      const low = Math.min(...this.choices);
      const high = Math.max(...this.choices);
      const isLogAxis = low > 0 && (isLogHeight || high / low > 32);
      const ticks = isLogAxis ? this.choices : roundTicks(low, high);
      return { xs: this.choices, ticks, isLogAxis };
    }
    const low = Number(this.field.min);
    const high = Number(this.field.max);
    const step = Number(this.field.step);
    const steps = Math.round((high - low) / step);
    const stride = Math.ceil(steps / MOST_POINTS);
    const xs = new Set([high, this.value as number]);
    for (let n = 0; n <= steps; n += stride) xs.add(tidy(low + n * step));
    const sorted = [...xs].sort((left, right) => left - right);
    return { xs: sorted, ticks: roundTicks(low, high), isLogAxis: false };
  }

  show(): void {
    if (this.isText) return;
    const text = formatNumber(this.value as number);
    this.field.parentElement!.querySelector("output")!.textContent = text;
    this.field.setAttribute("aria-valuetext", text);
  }

  /** Tie the message of an error to a text, or remove it. */
  markError(error: HTMLElement | null): void {
    if (!this.isText) return;
    this.field.setAttribute("aria-invalid", String(error !== null));
    if (error) this.field.setAttribute("aria-describedby", error.id);
    else this.field.removeAttribute("aria-describedby");
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
  private readonly errors: Record<string, string>;
  private readonly pictures: HTMLElement[];

  constructor(private readonly figure: HTMLElement) {
    const fields = figure.querySelectorAll<HTMLInputElement>(".inputs [data-name]");
    this.inputs = [...fields].map((field) => new SliderInput(field));
    this.names = JSON.parse(figure.dataset["names"]!);
    this.errors = JSON.parse(figure.dataset["errors"]!);
    this.pictures = [...figure.querySelectorAll<HTMLElement>("[data-picture]")];
    figure.querySelector<HTMLElement>(".inputs")!.hidden = false;
    figure.querySelector<HTMLElement>(".start-note")!.hidden = true;
    for (const details of figure.querySelectorAll("details")) details.open = false;
    for (const container of this.pictures) {
      container.parentElement!.hidden = false;
      const hasLegend = container.dataset["picture"]!.includes(",");
      (container.previousElementSibling as HTMLElement).hidden = hasLegend;
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
    let outputs: Outputs | null = null;
    let message = "";
    try {
      outputs = this.compute();
    } catch (problem) {
      const text = this.errors[(problem as Error).message];
      if (text === undefined) throw problem; // only a text can be wrong
      message = text;
    }
    this.showError(message);
    for (const cell of this.figure.querySelectorAll<HTMLElement>("[data-output]")) {
      cell.textContent = outputs ? formatOutput(outputs[cell.dataset["output"]!]!) : "–";
    }
    for (const container of this.pictures) {
      const width = Math.floor(container.clientWidth);
      const picture = container.dataset["picture"]!;
      container.replaceChildren(...(outputs ? this.draw(picture, outputs, width) : []));
      const table = container.parentElement!.querySelector("table");
      if (table) fillTable(table, outputs ? this.tabulate(picture, outputs) : []);
    }
  }

  private showError(message: string): void {
    const error = this.figure.querySelector<HTMLElement>(".error");
    if (!error) return;
    if (error.textContent !== message) error.textContent = message;
    error.hidden = message === "";
    for (const input of this.inputs) input.markError(message ? error : null);
  }

  private labels(outputs: Outputs): string[] {
    return (outputs["labels"] ?? JSON.parse(this.figure.dataset["labels"]!)) as string[];
  }

  private draw(picture: string, outputs: Outputs, width: number): HTMLElement[] {
    if (width === 0) return []; // inside a closed answer
    const [kind, listed, over] = picture.split(" ") as [string, string, string?];
    const names = listed.split(",");
    const labels = this.labels(outputs);
    const title = (name: string) => this.names[name]!;
    if (kind === "matrix") {
      return drawMatrix(title(listed), outputs[listed] as number[][], labels, width);
    }
    if (kind === "bars") {
      const lists = names.map((name) => ({ name: title(name), ys: outputs[name] as number[] }));
      return drawBars(lists, labels, width);
    }
    const input = this.inputs.find(({ name }) => name === over)!;
    const axis = input.axis(kind === "log");
    const swept = axis.xs.map((x) => this.compute({ [input.name]: x }));
    const series = names.map((name) => ({
      name: title(name),
      ys: swept.map((values) => values[name] as number),
    }));
    const logAxis = document.body.dataset["logAxis"]!;
    const axisLabel = axis.isLogAxis ? logAxis.replace("{axis}", input.label) : input.label;
    const current = input.value as number;
    return drawPlot({ ...axis, series, current, axis: axisLabel, isLog: kind === "log" }, width);
  }

  /** Cells of the table of bars or of a matrix, as `tabulate` of sliders.py writes them. */
  private tabulate(picture: string, outputs: Outputs): string[][] {
    const [kind, listed] = picture.split(" ") as [string, string];
    const names = listed.split(",");
    const rows = kind === "bars" ? names.map((name) => outputs[name]) : outputs[listed];
    const lists = rows as number[][];
    const labels = this.labels(outputs);
    const heads = lists[0]!.map((_, n) => labels[n] ?? String(n + 1));
    const titles = kind === "bars" ? names.map((name) => this.names[name]!) : heads;
    return [["", ...heads], ...lists.map((row, n) => [titles[n]!, ...row.map(formatNumber)])];
  }
}

function fillTable(table: HTMLTableElement, rows: string[][]): void {
  table.replaceChildren();
  rows.forEach((cells, i) => {
    const row = table.insertRow();
    cells.forEach((text, j) => {
      const cell = document.createElement(i === 0 || j === 0 ? "th" : "td");
      cell.textContent = text;
      row.append(cell);
    });
  });
}

function formatOutput(output: Output): string {
  if (typeof output === "number") return formatNumber(output);
  return (output as number[]).map(formatNumber).join("  ");
}

// --- Sections that were read ---------------------------------------------------------------------

const STORE = "headwise-learn-sections";

/** Sections that were read, by their first entry; none where the browser denies storage. */
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
  for (const box of document.querySelectorAll<HTMLInputElement>("input[data-read]")) {
    box.checked = read.has(box.dataset["read"]!);
  }
  for (const item of document.querySelectorAll<HTMLElement>("[data-section]")) {
    item.querySelector<HTMLElement>(".is-read")!.hidden = !read.has(item.dataset["section"]!);
  }
  for (const line of document.querySelectorAll<HTMLElement>("[data-progress]")) {
    const sections: string[] = JSON.parse(line.dataset["sections"]!);
    const count = sections.filter((section) => read.has(section)).length;
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

// --- Buttons that copy ---------------------------------------------------------------------------

async function copyText(source: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(source.textContent ?? "");
    return true;
  } catch {
    // a page that is a file may not write to the clipboard
    getSelection()!.selectAllChildren(source);
    return document.execCommand("copy");
  }
}

function addCopyButtons(): void {
  const { copy, copied } = document.body.dataset;
  const status = document.createElement("p");
  status.className = "status";
  status.setAttribute("role", "status");
  document.body.append(status);
  for (const code of document.querySelectorAll<HTMLElement>("pre > code, .command > code")) {
    const name = code.textContent!.trim().split("\n", 1)[0]!;
    const button = document.createElement("button");
    const setName = (word: string) => {
      button.textContent = word;
      button.setAttribute("aria-label", `${word}: ${name}`);
    };
    button.type = "button";
    button.className = "copy";
    setName(copy!);
    button.addEventListener("click", async () => {
      if (!(await copyText(code))) return;
      setName(copied!);
      status.textContent = `${copied}: ${name}`;
      setTimeout(() => {
        setName(copy!);
        status.textContent = "";
      }, 1500);
    });
    const block = code.parentElement!;
    if (block.tagName === "PRE") block.before(button);
    else block.append(" ", button);
  }
}

/** Let the link to the other language lead to the place that is shown. */
function keepPlace(): void {
  for (const link of document.querySelectorAll<HTMLAnchorElement>("a[hreflang]")) {
    link.addEventListener("click", () => (link.hash = location.hash));
  }
}

/** Let boxes that scroll be reached by keyboard, and say that they do. */
function markScrolled(): void {
  for (const box of document.querySelectorAll<HTMLElement>(".scroll, .formula, pre")) {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
      box.dataset["hint"] = document.body.dataset["sideways"];
    } else {
      box.removeAttribute("tabindex");
      delete box.dataset["hint"];
    }
  }
}

for (const figure of document.querySelectorAll<HTMLElement>("[data-slider]")) new Slider(figure);
trackReading();
markScrolled();
addEventListener("resize", markScrolled);
document.addEventListener("toggle", markScrolled, true); // a source or an answer was opened
addCopyButtons();
keepPlace();
