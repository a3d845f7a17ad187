// The values of the sliders of `headwise learn --html`, as pure functions: the same as in
// learn/slider_values.py, which writes the start values into the page. Tests compare
// both over grids of inputs.

export type Inputs = Record<string, number>;
export type Output = number | number[] | number[][] | string[];
export type Outputs = Record<string, Output>;
export type Compute = (inputs: any) => Outputs;

export const MOST_TOKENS = 16;
export const MOST_PAIRS = 12;
const LETTER_CHANNELS = 64;
const WORD = /[^\s!-&(-,./:-@\[-`{-~\u2010-\u2027\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]+|\S/gu;
const KEYS = [51, 56, 58];
const VALUES = [40, 43, 48];
const QUANTILES = [1.4, 0.7, 0.2, -0.2, -0.7, -1.4];
// bf16 FLOPs per byte of memory: data sheet, as in costs/hardware.toml
const H200_RIDGE = 989 / 4.8;

export function sum(numbers: number[]): number {
  return numbers.reduce((total, value) => total + value, 0);
}

function dot(left: number[], right: number[]): number {
  return sum(left.map((value, n) => value * right[n]!));
}

function normalise(numbers: number[]): number[] {
  const total = sum(numbers);
  return numbers.map((value) => value / total);
}

export function softmax(scores: number[]): number[] {
  const largest = Math.max(...scores);
  return normalise(scores.map((score) => Math.exp(score - largest)));
}

function range(count: number): number[] {
  return Array.from({ length: count }, (_, n) => n);
}

function gaussian(query: number, keys: number[], width: number): number[] {
  return softmax(keys.map((key) => -((query - key) ** 2) / (2 * width ** 2)));
}

function matrix(
  rows: number,
  columns: number,
  value: (row: number, column: number) => number,
): number[][] {
  return range(rows).map((row) => range(columns).map((column) => value(row, column)));
}

function multiply(left: number[][], right: number[][]): number[][] {
  const column = (j: number) => right.map((row) => row[j]!);
  return matrix(left.length, right[0]!.length, (i, j) => dot(left[i]!, column(j)));
}

/** ||X - 1 x^T|| / ||X|| with the mean row x. */
function residual(x: number[][]): number {
  const mean = x[0]!.map((_, column) => sum(x.map((row) => row[column]!)) / x.length);
  const norm = (rows: number[][]) => Math.sqrt(sum(rows.flat().map((value) => value * value)));
  return norm(x.map((row) => row.map((value, column) => value - mean[column]!))) / norm(x);
}

function entmax(scores: number[], alpha: number): number[] {
  if (alpha === 1) return softmax(scores);
  const largest = Math.max(...scores);
  const x = scores.map((score) => (alpha - 1) * (score - largest));
  const weights = (tau: number) => x.map((value) => Math.max(value - tau, 0) ** (1 / (alpha - 1)));
  let low = -1; // where the weights sum to 1 or more
  let high = 0;
  for (let step = 0; step < 100; step++) {
    const middle = (low + high) / 2;
    if (sum(weights(middle)) >= 1) low = middle;
    else high = middle;
  }
  return normalise(weights((low + high) / 2));
}

function alibiSlope(heads: number, head: number): number {
  const power = 2 ** Math.floor(Math.log2(heads));
  if (head <= power) return 2 ** ((-8 * head) / power);
  const odd = 2 * (head - power) - 1;
  return 2 ** ((-8 * odd) / (2 * power));
}

/** Pairs of neighbouring characters of a word, hashed by 32-bit FNV-1a into channels. */
function countLetterPairs(token: string): number[] {
  const counts: number[] = new Array(LETTER_CHANNELS).fill(0);
  const characters = [...`^${token.replace(/[A-Z]/g, (letter) => letter.toLowerCase())}$`];
  for (let n = 0; n + 1 < characters.length; n++) {
    let digest = 2166136261;
    for (const character of characters.slice(n, n + 2)) {
      digest = Math.imul(digest ^ character.codePointAt(0)!, 16777619) >>> 0;
    }
    counts[digest % LETTER_CHANNELS]! += 1;
  }
  return counts;
}

const NUMBER = String.raw`[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?`;
const PAIR = new RegExp(String.raw`^\s*(${NUMBER})\s*=\s*(${NUMBER})\s*$`, "i");

/** Pairs of a text "key=value, ..."; the message of an error is its name in sliders.toml. */
export function parsePairs(text: string): { labels: string[]; keys: number[]; values: number[] } {
  const listed = text.normalize("NFKC").split(/[,;、\n]/).filter((row) => row.trim() !== "");
  const pairs = listed.map((row) => PAIR.exec(row)?.slice(1) ?? []);
  const isPair = (pair: string[]) => pair.length === 2 && pair.map(Number).every(Number.isFinite);
  if (pairs.length === 0 || !pairs.every(isPair)) throw new Error("format");
  if (pairs.length > MOST_PAIRS) throw new Error("count");
  const labels = pairs.map((pair) => pair[0]!);
  const keys = labels.map(Number);
  if (keys.some((key) => key < 0 || key > 100)) throw new Error("range");
  if (new Set(keys).size < keys.length) throw new Error("equal");
  return { labels, keys, values: pairs.map((pair) => Number(pair[1])) };
}

function attentionFlops(tokens: number, model: number): number {
  return 8 * tokens * model ** 2 + 4 * tokens ** 2 * model;
}

/** Pairs of query and key in a causal window over n tokens. */
function windowPairs(tokens: number, window: number): number {
  const width = Math.min(window, tokens);
  return width * tokens - (width * (width - 1)) / 2;
}

function wantedWeight(heads: number, tokens: number, gap: number): number {
  const wanted = 8 / heads; // of eight keys, by one head; the scores of the others are 0
  return 1 / (wanted + (tokens - wanted) * Math.exp(-gap));
}

export const SLIDERS: Record<string, Compute> = {
  // --- Document 004 ---
  kernel_width: ({ query, width }) => {
    const weights = gaussian(query, KEYS, width);
    return { weights, estimate: dot(weights, VALUES) };
  },
  distance_rule: ({ query }) => {
    const distances = KEYS.map((key) => Math.abs(query - key));
    const isStored = distances.includes(0);
    const source = normalise(distances);
    const inverse = isStored
      ? distances.map((distance) => (distance === 0 ? 1 : 0))
      : normalise(distances.map((distance) => 1 / distance));
    const source_estimate = dot(source, VALUES);
    return { source, inverse, source_estimate, inverse_estimate: dot(inverse, VALUES) };
  },
  own_lookup: ({ pairs, query, width }) => {
    const { labels, keys, values } = parsePairs(pairs);
    const weights = gaussian(query, keys, width);
    return { labels, weights, estimate: dot(weights, values) };
  },

  // --- Document 000 ---
  dilution: ({ gap, tokens }) => {
    const weight = 1 / (1 + (tokens - 1) * Math.exp(-gap));
    return { weight, others: 1 - weight, half: 1 + Math.exp(gap) };
  },
  heads_share: ({ gap, tokens, heads }) => ({
    heads_weight: wantedWeight(heads, tokens, gap),
    one_weight: wantedWeight(1, tokens, gap),
  }),
  path_length: ({ tokens, kernel }) => {
    let dilated = 1;
    while (kernel ** dilated < tokens) dilated++;
    const convolution = Math.max(Math.ceil((tokens - 1) / (kernel - 1)), 1);
    return { recurrent: tokens, convolution, dilated, attention: 1 };
  },
  layer_flops: ({ tokens, model }) => ({
    attention: attentionFlops(tokens, model),
    gru: 12 * tokens * model ** 2,
    convolution: 6 * tokens * model ** 2,
  }),
  gradient_decay: ({ factor, distance }) => ({
    recurrent: factor ** distance,
    attention: factor,
    half_life: Math.log(0.5) / Math.log(factor),
  }),
  learned_table: ({ tokens, model, heads }) => {
    const projections = 2 * model ** 2;
    return { table: heads * tokens ** 2, projections, equal: Math.sqrt(projections / heads) };
  },
  long_key: ({ length, angle }) => {
    const cosine = Math.cos((angle * Math.PI) / 180);
    return { dot: softmax([1, length * cosine]), cosine: softmax([1, cosine]) };
  },
  own_sentence: ({ sentence, temperature }) => {
    const labels = (sentence.match(WORD) ?? []).slice(0, MOST_TOKENS);
    if (labels.length === 0) throw new Error("sentence");
    const vectors = labels.map((token: string) => {
      const counts = countLetterPairs(token);
      return counts.map((count) => count / Math.sqrt(dot(counts, counts)));
    });
    const scores = (q: number[]) => vectors.map((k: number[]) => dot(q, k) / temperature);
    const weights = vectors.map((q: number[]) => softmax(scores(q)));
    return { labels, weights };
  },
  kv_cache: ({ layers, kv, tokens }) => {
    const per_token = layers * 2 * kv * 128 * 2;
    return { per_token, gib: (per_token * tokens) / 2 ** 30 };
  },

  // --- Document 001 ---
  dot_variance: ({ width, mean, deviation }) => {
    const variance = width * (deviation ** 4 + 2 * deviation ** 2 * mean ** 2);
    const total = width * mean ** 2;
    const scaled_mean = total / Math.sqrt(width);
    return { mean: total, variance, scaled_mean, scaled_variance: variance / width };
  },
  saturation: ({ width, exponent }) => {
    const weights = softmax(QUANTILES.map((unit) => unit * width ** (0.5 - exponent)));
    const derivative = (i: number, j: number) => weights[i]! * ((i === j ? 1 : 0) - weights[j]!);
    const jacobian = matrix(6, 6, derivative).flat();
    const gradient = Math.sqrt(dot(jacobian, jacobian));
    return { weights, largest: Math.max(...weights), gradient };
  },
  layer_parameters: ({ model, heads, width, bias }) => {
    const inner = heads * width;
    const parts = [0, 1, 2].map(() => (model + bias) * inner).concat((inner + bias) * model);
    return { parts, total: sum(parts), formula: 3 * inner * model + model ** 2 };
  },
  noisy_heads: ({ heads, bad }) => {
    const share = Math.min(bad, heads) / heads;
    return { error: Math.sqrt(2 * share), share };
  },

  // --- Document 002 ---
  decode_intensity: ({ batch, group, context }) => {
    const parameters = 2 * 4096 ** 2 * (1 + 1 / group);
    const cached = (4 * batch * context * 4096) / group; // bytes of keys and values
    const core = 4 * batch * context * 4096;
    const projections = 2 * batch * parameters;
    return {
      weights: batch,
      core: core / cached,
      layer: (projections + core) / (2 * parameters + cached),
      ridge: H200_RIDGE,
    };
  },
  overlapping: ({ heads, width, overlap }) => {
    const used = width + 2 * overlap;
    const model = heads * width;
    const concatenated = heads * used;
    return { used, concatenated, output: concatenated * model, plain_output: model ** 2 };
  },
  routed_heads: ({ always, active, model }) => {
    const routed = 16 - always;
    const chosen = Math.min(active, routed);
    const fractions = range(16).map((head) => (head < always ? 1 : chosen / routed));
    const kinds = always > 0 ? 2 : 0;
    const router = (routed + (always > 1 ? always : 0) + kinds) * model;
    return { fractions, chosen, open: (always + chosen) / 16, router };
  },
  shared_width: ({ heads, share }) => {
    const width = Math.round(512 * share);
    return {
      plain_parameters: 2 * 512 ** 2,
      shared_parameters: 2 * 512 * width + heads * width + heads * 512,
      plain_products: 512,
      shared_products: heads * width,
    };
  },
  spectrum: ({ decay, energy }) => {
    const squares = range(64).map((n) => (n + 1) ** (-2 * decay));
    const total = sum(squares);
    let running = 0;
    const shares = squares.map((square) => (running += square) / total);
    const dims = shares.findIndex((share) => share >= energy) + 1;
    return { shares, dims, part: dims / 64 };
  },
  grouped_queries: ({ kv }) => ({
    uses: matrix(kv, 16, (row, head) => (Math.floor((head * kv) / 16) === row ? 1 : 0)),
    cached: 2 * kv * 64,
    share: kv / 16,
    parameters: 2 * 1024 ** 2 + 2 * 1024 * kv * 64,
  }),
  depth_init: ({ layers, exponent }) => {
    const bounds = range(layers).map((n) => (n + 1) ** -exponent);
    return { bounds, last: bounds[layers - 1]! };
  },
  entmax_alpha: ({ alpha, spread }) => {
    const weights = entmax([2, 1, 0.5, 0, -1].map((score) => score * spread), alpha);
    const zeros = weights.filter((weight) => weight === 0).length;
    return { weights, zeros, largest: Math.max(...weights) };
  },
  rank_collapse: ({ layers, window, skip }) => {
    const layer = matrix(12, 12, (i, j) => {
      const weight = j <= i && i - j < window ? 1 / Math.min(i + 1, window) : 0;
      return (1 - skip) * weight + (i === j ? skip : 0);
    });
    let influence = matrix(12, 12, (i, j) => (i === j ? 1 : 0));
    for (let n = 0; n < layers; n++) influence = multiply(influence, layer);
    return { influence, residual: residual(influence) };
  },
  pruned_heads: ({ removed }) => {
    const left = 12 - removed;
    const parameters = 4 * 768 * left * 64;
    const flops = 2 * 512 * parameters + 4 * 512 ** 2 * left * 64;
    return { left, parameters, share: left / 12, flops, cached: 2 * left * 64 };
  },

  // --- Document 003 ---
  temperature: ({ temperature }) => {
    const weights = softmax([3, 2, 1, 0, -1].map((score) => score / temperature));
    const entropy = -sum(weights.map((weight) => (weight > 0 ? weight * Math.log(weight) : 0)));
    return { weights, entropy, effective: Math.exp(entropy) };
  },
  causal_window: ({ tokens, window }) => {
    const allowed = matrix(tokens, tokens, (i, j) => (j <= i && i - j < window ? 1 : 0));
    const pairs = sum(allowed.flat());
    return { allowed, pairs, share: pairs / tokens ** 2 };
  },
  global_tokens: ({ tokens, reach, globals }) => {
    const isAllowed = (i: number, j: number) =>
      Math.abs(i - j) <= reach || Math.min(i, j) < globals;
    const allowed = matrix(tokens, tokens, (i, j) => (isAllowed(i, j) ? 1 : 0));
    const pairs = sum(allowed.flat());
    return { allowed, pairs, share: pairs / tokens ** 2 };
  },
  window_cost: ({ tokens, window }) => {
    const full = windowPairs(tokens, tokens);
    const local = windowPairs(tokens, window);
    return { full, local, ratio: full / local };
  },
  linear_cost: ({ tokens, width }) => {
    const exact = 4 * tokens ** 2 * width;
    const linear = 4 * tokens * width ** 2;
    return { softmax: exact, linear, ratio: exact / linear };
  },
  random_features: ({ features, angle }) => {
    const squared = 2 + 2 * Math.cos((angle * Math.PI) / 180);
    return { error: Math.sqrt(Math.expm1(squared) / features), kernel: Math.exp(squared / 2 - 1) };
  },
  sinusoid: ({ position, pair }) => {
    const rate = 10_000 ** (-pair / 32);
    const angle = position * rate;
    return { sine: Math.sin(angle), cosine: Math.cos(angle), wavelength: (2 * Math.PI) / rate };
  },
  sinusoid_offset: ({ offset, model }) => {
    const rates = range(model / 2).map((pair) => 10_000 ** ((-2 * pair) / model));
    const encode = (position: number) =>
      rates.flatMap((rate) => [Math.sin(position * rate), Math.cos(position * rate)]);
    const compare = (left: number, right: number) =>
      dot(encode(left), encode(right)) / (model / 2);
    return { similarity: compare(0, offset), elsewhere: compare(100, 100 + offset) };
  },
  rotary_offset: ({ query, key, base }) => {
    const cosines = range(32).map((pair) => Math.cos((query - key) * base ** (-pair / 32)));
    return { score: sum(cosines) / 32, distance: query - key };
  },
  rotary_pair: ({ pair, base, length }) => {
    const rate = base ** (-pair / 64);
    return { wavelength: (2 * Math.PI) / rate, turns: (length * rate) / (2 * Math.PI) };
  },
  alibi: ({ heads, head, distance }) => {
    const slope = alibiSlope(heads, Math.min(head, heads));
    return { slope, bias: -slope * distance, factor: Math.exp(-slope * distance) };
  },
  log_sum_exp: ({ largest }) => {
    const digits = largest / Math.LN10;
    return {
      lse: largest + Math.log(1 + Math.exp(-1) + Math.exp(-2)),
      digits,
      float16: digits > Math.log10(65504) ? 1 : 0,
      float32: digits > Math.log10(3.4028234663852886e38) ? 1 : 0,
    };
  },
};
