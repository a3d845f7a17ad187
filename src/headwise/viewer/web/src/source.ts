// Where the page gets its data: the local server, or the data embedded in an exported file.

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
  ablated: AblatedHead[];
  capabilities: Record<"text" | "measure" | "ablate" | "write", Ability>;
}

export type NumberArray = Uint8Array | Float32Array | Int32Array;

/** A binary answer: the fields of its header, and its arrays. Mirrors `tile_encoding`. */
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
  document(): Promise<ViewDocument>;
  fetchArrays(path: string, signal?: AbortSignal): Promise<Message>;
  fetchJson(path: string): Promise<any>;
  /** Run a job to its end and return its result; rejects if it fails or is cancelled. */
  runJob(body: Record<string, unknown>, onEvent: (event: JobEvent) => void, signal?: AbortSignal): Promise<any>;
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

/** The token arrives in the URL fragment, which is never sent, and is kept for this tab. */
export function takeToken(): string {
  const match = location.hash.match(/token=([\w-]+)/);
  if (match?.[1]) {
    sessionStorage.setItem("headwise-token", match[1]);
    history.replaceState(null, "", location.pathname + location.hash.replace(/[#&]?token=[\w-]+&?/, "#").replace(/^#$/, ""));
  }
  return sessionStorage.getItem("headwise-token") ?? "";
}

export class LiveSource implements DataSource {
  readonly isLive = true;
  constructor(private readonly token: string) {}

  private async request(path: string, options: RequestInit = {}): Promise<Response> {
    let response: Response;
    try {
      response = await fetch(`/api/${path}`, {
        ...options,
        headers: { ...options.headers, "X-Session-Token": this.token },
      });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new RequestError(0, { fact: "The server does not answer.", remedy: "Start `headwise view` again." });
    }
    if (!response.ok) {
      const known: Record<number, PageError> = {
        401: { fact: "This address is not of this session.", remedy: "Open the address that the terminal printed." },
      };
      const body = await response.json().catch(() => null);
      throw new RequestError(
        response.status,
        body?.error ?? known[response.status] ?? { fact: `The server answered ${response.status}.`, remedy: "" },
      );
    }
    return response;
  }

  async document(): Promise<ViewDocument> {
    return (await this.request("document")).json();
  }

  async fetchArrays(path: string, signal?: AbortSignal): Promise<Message> {
    return decodeMessage(await (await this.request(path, { signal: signal ?? null })).arrayBuffer());
  }

  async fetchJson(path: string): Promise<any> {
    return (await this.request(path)).json();
  }

  async runJob(body: Record<string, unknown>, onEvent: (event: JobEvent) => void, signal?: AbortSignal): Promise<any> {
    const { job } = await (
      await this.request("jobs", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
      })
    ).json();
    signal?.addEventListener("abort", () => void this.request(`jobs/${job}`, { method: "DELETE" }).catch(() => null));
    const response = await this.request(`jobs/${job}/events`);
    let last: JobEvent = { state: "queued" };
    for await (const event of readEvents(response)) {
      last = event;
      onEvent(event);
    }
    if (last.state === "failed") throw new RequestError(500, last.error ?? { fact: "The job failed.", remedy: "" });
    if (last.state !== "done") throw new RequestError(499, { fact: last.note || "The job was cancelled.", remedy: "" });
    return (await this.request(`jobs/${job}/result`)).json();
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

/** The data of an exported file: answers by path, binary ones as base64. */
export class ExportSource implements DataSource {
  readonly isLive = false;
  constructor(private readonly data: { document: ViewDocument; answers: Record<string, string> }) {}

  async document(): Promise<ViewDocument> {
    return this.data.document;
  }

  async fetchArrays(path: string): Promise<Message> {
    const answer = this.data.answers[path];
    if (answer === undefined) throw this.missing();
    return decodeMessage(Uint8Array.from(atob(answer), (sign) => sign.charCodeAt(0)).buffer);
  }

  async fetchJson(path: string): Promise<any> {
    const answer = this.data.answers[path];
    if (answer === undefined) throw this.missing();
    return JSON.parse(answer);
  }

  async runJob(): Promise<any> {
    throw this.missing();
  }

  private missing(): RequestError {
    return new RequestError(404, {
      fact: "This file does not hold these numbers.",
      remedy: "Open the model with `headwise view` to compute them.",
    });
  }
}

export function makeSource(): DataSource {
  const embedded = document.getElementById("headwise-data");
  return embedded ? new ExportSource(JSON.parse(embedded.textContent ?? "{}")) : new LiveSource(takeToken());
}
