// Where the page gets its data: the local server, or the data embedded in an exported file.

import { signal } from "@preact/signals";

export interface TokenRow {
  ids: number[];
  words: string[];
  text: string;
  offsets: [number, number][];
}

export interface Ability {
  possible: boolean;
  reason: string;
}

export interface Site {
  name: string;
  stack: string;
  layer: number;
  kind: string;
  heads: number;
  kvHeads: number;
  kvHeadOfQuery: number[];
  /** The heads that were pruned, in the numbers that they had. */
  prunedHeads: number[];
  queryStream: string;
  keyStream: string;
  numQueries: number;
  numKeys: number;
  batch: number;
  calls: number;
  capture: string;
  hasValues: boolean;
  hasOutputs: boolean;
  abilities: Record<"observe" | "ablate" | "prune" | "convert", Ability>;
}

export interface Grouping {
  words: boolean;
  special: boolean;
  first: boolean;
}

export interface AblatedHead {
  site: number;
  head: number;
  mode: string;
  scale: number;
}

/** What is open. Mirrors `OpenModel.describe`. */
export interface ViewDocument {
  version: number;
  kind: "model" | "trace";
  revision: number;
  readOnly: boolean;
  model: Record<string, string | number | boolean>;
  streams: Record<string, TokenRow[]>;
  sites: Site[];
  skipped: Record<string, string>;
  warnings: string[];
  measures: { name: string; low: number; high: number }[];
  maxTokens: number;
  /** The beginning of the names of all files that are saved. */
  fileStem: string;
  texts: string[];
  /** The name of the model or trace to compare with; "" for none. */
  other: string;
  /** Names of models and traces that the page may open, the open one ("" is the first), and whether its first text is open. */
  openable: string[];
  opened: string;
  isFirstText: boolean;
  /** Which tokens are merged or left out in everything that is shown. */
  grouping: Grouping;
  /** The heads that are off on this page; the server does not keep them. */
  ablated: AblatedHead[];
  /** Height, width and channels of the image of each stream of a vision model. */
  images: Record<string, [number, number, number]>;
  /** The classes that a person gave to heads: site, head, name. */
  classes: [number, number, string][];
  /** Sizes of the loaded model (null before it is loaded) and of the recorded run, also for a text of `maxTokens`. */
  memory: { parameters: number | null; weightBytes: number | null; recordBytes: number; longestBytes: number };
  capabilities: Record<"text" | "measure" | "ablate" | "write", Ability>;
}

export type NumberArray = Uint8Array | Float32Array | Int32Array;

/** A binary answer: the fields of its header, and its arrays. Mirrors `encode_arrays`. */
export interface Message {
  fields: Record<string, any>;
  arrays: Record<string, { data: NumberArray; shape: number[] }>;
}

export interface JobEvent {
  state: "queued" | "running" | "done" | "failed" | "cancelled";
  done?: number;
  total?: number;
  note?: string;
  error?: PageError;
}

export interface PageError {
  fact: string;
  remedy: string;
}

export interface SavedFile {
  name: string;
  blob: Blob;
}

/** What the page says when its server does not answer. */
export const NO_SERVER: PageError = { fact: "error.noServer", remedy: "error.noServerRemedy" };

/** An answer that the server refused, with its fact and remedy. */
export class RequestError extends Error {
  constructor(
    readonly status: number,
    readonly detail: PageError,
  ) {
    super(detail.fact);
  }
}

export interface DataSource {
  readonly isLive: boolean;
  /** The revision that this window shows; the server answers about no other. Null is the one that is open. */
  revision: number | null;
  document(): Promise<ViewDocument>;
  fetchArrays(path: string, signal?: AbortSignal): Promise<Message>;
  fetchFile(path: string): Promise<SavedFile>;
  /** Run a job to its end and return its result; rejects if it fails or is cancelled. */
  runJob(body: Record<string, unknown>, onEvent: (event: JobEvent) => void, signal?: AbortSignal): Promise<any>;
}

/** Whether another window of the server has opened another text than the one shown here. */
export const otherWindow = signal(false);

function noteOtherWindow(error: PageError | undefined): void {
  if (error?.fact === "error.otherWindow") otherWindow.value = true;
}

const TYPES = { u8: Uint8Array, f32: Float32Array, i32: Int32Array } as const;

export function decodeMessage(buffer: ArrayBuffer): Message {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const begin = 4 + length;
  const arrays: Message["arrays"] = {};
  for (const { name, dtype, shape, offset } of header.arrays) {
    const count = (shape as number[]).reduce((product, size) => product * size, 1);
    const type = TYPES[dtype as keyof typeof TYPES];
    arrays[name] = { data: new type(buffer, begin + offset, count), shape };
  }
  return { fields: header, arrays };
}

/** The token arrives at the start of the URL fragment, which is never sent, and is kept for this tab. */
export function takeToken(): string {
  const match = location.hash.match(/^#token=([\w-]+)/);
  if (match?.[1]) {
    sessionStorage.setItem("headwise-token", match[1]);
    history.replaceState(null, "", location.pathname + location.search + location.hash.replace(/^#token=[\w-]+&?/, "#").replace(/^#$/, ""));
  }
  return sessionStorage.getItem("headwise-token") ?? "";
}

export class LiveSource implements DataSource {
  readonly isLive = true;
  revision: number | null = null;
  private readonly window = Math.random().toString(36).slice(2);
  constructor(private readonly token: string) {}

  private async request(path: string, options: RequestInit = {}): Promise<Response> {
    let response: Response;
    try {
      response = await fetch(`/api/${path}`, {
        ...options,
        headers: { ...options.headers, "X-Session-Token": this.token, "X-Window": this.window, ...(this.revision !== null && path !== "document" && { "X-Revision": String(this.revision) }) },
      });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new RequestError(0, NO_SERVER);
    }
    if (!response.ok) {
      const body = await response.json().catch(() => null);
      noteOtherWindow(body?.error);
      throw new RequestError(
        response.status,
        body?.error ?? (response.status === 401 ? { fact: "error.session", remedy: "error.sessionRemedy" } : { fact: `HTTP ${response.status}`, remedy: "" }),
      );
    }
    return response;
  }

  async document(): Promise<ViewDocument> {
    const found = await (await this.request("document")).json();
    this.revision ??= found.revision;
    return found;
  }

  async fetchArrays(path: string, signal?: AbortSignal): Promise<Message> {
    return decodeMessage(await (await this.request(path, { signal: signal ?? null })).arrayBuffer());
  }

  async fetchFile(path: string): Promise<SavedFile> {
    const answer = await this.request(path);
    return { name: answer.headers.get("Content-Disposition")!.match(/filename="([\w.-]+)"/)![1]!, blob: await answer.blob() };
  }

  private post(path: string, body: unknown): Promise<Response> {
    return this.request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }

  async runJob(body: Record<string, unknown>, onEvent: (event: JobEvent) => void, signal?: AbortSignal): Promise<any> {
    const { job } = await (await this.post("jobs", body)).json();
    signal?.addEventListener("abort", () => void this.request(`jobs/${job}`, { method: "DELETE" }).catch(() => null));
    const response = await this.request(`jobs/${job}/events`);
    let last: JobEvent = { state: "queued" };
    for await (const event of readEvents(response)) {
      last = event;
      onEvent(event);
    }
    noteOtherWindow(last.error);
    if (last.state === "failed") throw new RequestError(500, last.error ?? { fact: "error.jobFailed", remedy: "" });
    if (last.state !== "done") throw new RequestError(499, { fact: last.note || "error.jobCancelled", remedy: "" });
    const answer = await this.request(`jobs/${job}/result`);
    if (!answer.headers.get("Content-Type")?.startsWith("application/json")) return decodeMessage(await answer.arrayBuffer());
    const result = await answer.json();
    this.revision = result?.revision ?? this.revision;
    return result;
  }
}

async function* readEvents(response: Response): AsyncGenerator<JobEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

interface ExportData {
  version: number;
  answers: Record<string, unknown>;
  weights: Record<string, { shape: [number, number]; base64: string }>;
}

/** The JSON of an exported file, which holds it compressed. */
async function unpackJson(packed: string): Promise<ExportData> {
  const bytes = new Blob([fromBase64(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(bytes).json();
}

function fromBase64(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)).buffer;
}

/** The data of an exported file: answers by address, and the exact weights of each head if the file is small enough. */
export class ExportSource implements DataSource {
  readonly isLive = false;
  revision: number | null = null;
  constructor(private readonly data: Promise<ExportData>) {}

  async document(): Promise<ViewDocument> {
    return (await this.data).answers["/api/document"] as ViewDocument;
  }

  async fetchArrays(path: string): Promise<Message> {
    const [name = "", query = ""] = path.split("?");
    const fields = new URLSearchParams(query);
    if (name === "thumbnails" || name === "measures") return this.stored(`/api/${name}`);
    if (name === "image") return this.stored(`/api/image?stream=${fields.get("stream")}`);
    const where = `site=${fields.get("site")}&head=${fields.get("head")}`;
    if ((fields.get("lens") ?? "weight") !== "weight") throw this.missing();
    if (name === "marginals") return this.stored(`/api/marginals?${where}`);
    if (name === "tile") return this.cutTile(await this.stored(`/api/tile?${where}`), fields);
    const { weights, masked, queries, keys } = await this.exact(where, `${fields.get("site")}/${fields.get("head")}`);
    if (name === "row") {
      const query = Number(fields.get("query"));
      const row = { weights: weights.slice(query * keys, (query + 1) * keys), masked: masked.slice(query * keys, (query + 1) * keys) };
      return { fields: {}, arrays: { weights: { data: row.weights, shape: [keys] }, masked: { data: row.masked, shape: [keys] } } };
    }
    if (name === "column") {
      const column = Float32Array.from({ length: queries }, (_, query) => weights[query * keys + Number(fields.get("key"))]!);
      return { fields: {}, arrays: { weights: { data: column, shape: [queries] } } };
    }
    if (name === "peak") return findPeak(weights, keys, fields);
    throw this.missing();
  }

  private async stored(address: string): Promise<Message> {
    const answer = (await this.data).answers[address] as { base64: string } | undefined;
    if (!answer) throw this.missing();
    return decodeMessage(fromBase64(answer.base64));
  }

  /** The part of a stored tile that a request names, if the tile has one cell for each pair. */
  private cutTile(tile: Message, fields: URLSearchParams): Message {
    const [rows = 0, columns = 0] = tile.arrays["weights"]!.shape;
    const span = (name: string, last: number) => Number(fields.get(name) ?? last);
    const { q0, q1, k0, k1 } = { q0: span("q0", 0), q1: span("q1", rows), k0: span("k0", 0), k1: span("k1", columns) };
    const isWhole = q0 === 0 && k0 === 0 && q1 === tile.fields["q1"] && k1 === tile.fields["k1"];
    if (isWhole) return tile;
    if (rows !== tile.fields["q1"] || columns !== tile.fields["k1"]) throw this.missing();
    const cut = (data: NumberArray) => {
      const part = new Uint8Array((q1 - q0) * (k1 - k0));
      for (let row = q0; row < q1; row++) part.set(data.subarray(row * columns + k0, row * columns + k1) as Uint8Array, (row - q0) * (k1 - k0));
      return { data: part, shape: [q1 - q0, k1 - k0] };
    };
    const { weights, masked } = tile.arrays;
    return { fields: { ...tile.fields, q0, q1, k0, k1 }, arrays: { weights: cut(weights!.data), masked: cut(masked!.data) } };
  }

  private async exact(where: string, name: string) {
    const stored = (await this.data).weights[name];
    if (!stored) throw this.missing();
    const [queries, keys] = stored.shape;
    const weights = new Float32Array(fromBase64(stored.base64));
    const tile = await this.stored(`/api/tile?${where}`);
    const [rows = 0, columns = 0] = tile.arrays["masked"]!.shape;
    const isExact = rows === queries && columns === keys;
    const masked = isExact ? (tile.arrays["masked"]!.data as Uint8Array) : Uint8Array.from(weights, (weight) => (weight === 0 ? 1 : 0));
    return { weights, masked, queries, keys };
  }

  async fetchFile(): Promise<SavedFile> {
    throw this.missing();
  }

  async runJob(): Promise<any> {
    throw this.missing();
  }

  private missing(): RequestError {
    return new RequestError(404, {
      fact: "error.notInFile",
      remedy: "error.notInFileRemedy",
    });
  }
}

/** The largest weight of a part of a head. */
function findPeak(weights: Float32Array, keys: number, fields: URLSearchParams): Message {
  const [q0 = 0, q1 = 0, k0 = 0, k1 = 0] = ["q0", "q1", "k0", "k1"].map((name) => Number(fields.get(name)));
  let best = q0 * keys + k0;
  for (let query = q0; query < q1; query++) for (let cell = query * keys + k0; cell < query * keys + k1; cell++) if (weights[cell]! > weights[best]!) best = cell;
  const place = Int32Array.of(Math.floor(best / keys), best % keys);
  return { fields: {}, arrays: { weight: { data: Float32Array.of(weights[best]!), shape: [1] }, place: { data: place, shape: [2] } } };
}

export function makeSource(): DataSource {
  const embedded = document.getElementById("headwise-data");
  return embedded ? new ExportSource(unpackJson(embedded.textContent ?? "")) : new LiveSource(takeToken());
}
