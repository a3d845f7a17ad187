// The logic of the page without a browser: addresses, messages, pictures, and trees.

import "./stub";
import assert from "node:assert/strict";
import { test } from "node:test";
import { isRunOf, lacksMeasures, redoAblation, setAblated, showMeasure, toggleAblated, togglePin, undoAblation } from "../../../src/headwise/viewer/web/src/actions";
import { rampPosition, signedStepTable, stepTable } from "../../../src/headwise/viewer/web/src/canvas/colors";
import { poolValues } from "../../../src/headwise/viewer/web/src/canvas/heatmap";
import { groupByReason } from "../../../src/headwise/viewer/web/src/components/basics";
import { makeTree } from "../../../src/headwise/viewer/web/src/components/dendrogram";
import { cellSpan, isPooled, shownView, strongestQuery, type TileState } from "../../../src/headwise/viewer/web/src/components/head_data";
import { bandContent, isShownLayer } from "../../../src/headwise/viewer/web/src/components/head_grid";
import { roundTicks } from "../../../src/headwise/viewer/web/src/components/head_scatter";
import { moveView, zoomView } from "../../../src/headwise/viewer/web/src/components/matrix";
import { findCommands, listCommands } from "../../../src/headwise/viewer/web/src/components/overlays";
import { patchGrid } from "../../../src/headwise/viewer/web/src/components/patch_panel";
import { chooseTarget } from "../../../src/headwise/viewer/web/src/components/text_box";
import { arcPath, tilePairs } from "../../../src/headwise/viewer/web/src/components/token_lines";
import { isSpecial, visibleToken } from "../../../src/headwise/viewer/web/src/components/tokens";
import { largest, leaveOut } from "../../../src/headwise/viewer/web/src/components/voice_lines";
import { textCount } from "../../../src/headwise/viewer/web/src/i18n";
import { chosenTokens, labRequest, mostChanged, toggleToken } from "../../../src/headwise/viewer/web/src/lab_state";
import { neighbours } from "../../../src/headwise/viewer/web/src/screens/similarity";
import { decodeMessage, type Site, type ViewDocument } from "../../../src/headwise/viewer/web/src/source";
import * as state from "../../../src/headwise/viewer/web/src/state";
import { between, oneOf, readRanges, toNumber, writeRanges } from "../../../src/headwise/viewer/web/src/url_state";

const can = { possible: true, reason: "" };
const words = ["a", "b,c", '"', "d"];

function makeSite(layer: number, heads: number, kvHeads = heads): Site {
  return {
    name: `decoder.${layer}.attention`, stack: "decoder", layer, kind: "attention", heads, kvHeads,
    kvHeadOfQuery: Array.from({ length: heads }, (_, head) => Math.floor((head * kvHeads) / heads)),
    prunedHeads: [], queryStream: "text", keyStream: "text", numQueries: 100, numKeys: 100, batch: 1, calls: 1,
    capture: "queries and keys", hasValues: true, hasOutputs: false, abilities: { observe: can, ablate: can, prune: can, convert: can },
  };
}

function open(): void {
  const row = { ids: [1, 2, 3, 4], words, text: "", offsets: [] };
  state.doc.value = {
    version: 1, kind: "model", revision: 1, model: { name: "m" }, streams: { text: [row] }, sites: [makeSite(0, 2), makeSite(1, 4, 2)],
    measures: [], ablated: [], texts: [], capabilities: { text: can, measure: can, ablate: can, write: can }, fileStem: "headwise-m",
  } as unknown as ViewDocument;
}

function makeTile(weights: number[], rows: number, columns: number, scale = 1): TileState {
  return { view: { q0: 0, q1: rows * 2, k0: 0, k1: columns * 2 }, weights: Uint8Array.from(weights), masked: undefined, rows, columns, scale, isDraft: false };
}

test("fields of an address take any text", () => {
  assert.deepEqual(["3", "-1", "x", ""].map(toNumber), [3, 0, 0, 0]);
  assert.equal(oneOf(["a", "b"])("c"), "a");
  assert.deepEqual(["0.5", "7", "x"].map(between(0, 1)), [0.5, 1, 0]);
  assert.deepEqual(writeRanges([5, 3, 4, 9]), ["3-5", "9"]);
  assert.deepEqual(readRanges(["3-5", "9", "7-2", "x"]), [3, 4, 5, 9, 0]);
});

test("a message of arrays is read from its header", () => {
  const header = new TextEncoder().encode(JSON.stringify({ scale: 2, arrays: [{ name: "w", dtype: "f32", shape: [1, 2], offset: 0 }] }).padEnd(84));
  const bytes = new Uint8Array(4 + 84 + 8);
  new DataView(bytes.buffer).setUint32(0, 84, true);
  bytes.set(header, 4);
  bytes.set(new Uint8Array(Float32Array.of(0.25, 0.75).buffer), 88);
  const { fields, arrays } = decodeMessage(bytes.buffer);
  assert.equal(fields["scale"], 2);
  assert.deepEqual([...arrays["w"]!.data], [0.25, 0.75]);
});

test("cells of a pooled picture cover all pairs once", () => {
  const tile = { ...makeTile([], 3, 2), view: { q0: 10, q1: 20, k0: 5, k1: 10 } };
  const spans = [0, 1, 2].map((row) => cellSpan(tile, row, 1));
  assert.deepEqual(spans.map(({ q0, q1 }) => [q0, q1]), [[10, 13], [13, 16], [16, 20]]);
  assert.deepEqual([spans[0]!.k0, spans[0]!.k1], [7, 10]);
  assert.ok(isPooled(tile));
  assert.deepEqual([...poolValues(Float32Array.of(1, 3, 2, 5), 0, 4, 2)], [3, 5]);
  assert.deepEqual(tilePairs(makeTile([0, 255, 51, 0], 2, 2), 0.1).map(({ query, key, weight }) => [query, key, Math.round(weight * 10)]), [[0, 2, 10], [2, 0, 2]]);
});

test("zoom stays inside the matrix and keeps the middle", () => {
  open();
  const item = state.sites.value[0]!;
  zoomView(item, 4);
  assert.deepEqual(shownView(item), { q0: 38, q1: 63, k0: 38, k1: 63 });
  moveView(item, { queries: 20, keys: 20 }, { query: 99, key: 0 });
  assert.deepEqual(shownView(item), { q0: 80, q1: 100, k0: 0, k1: 20 });
  zoomView(item, 1 / 100);
  assert.equal(state.matrixView.value, null);
});

test("colours: scales are monotone, equal at both ends, and signed ones symmetric", () => {
  for (const scale of state.SCALES) {
    const steps = [...stepTable(scale)];
    assert.deepEqual([steps[0], steps[255]], [0, 255]);
    assert.deepEqual(steps, [...steps].sort((a, b) => a - b));
    const signed = signedStepTable(scale);
    assert.ok(Math.abs(signed[128]! - 127.5) <= 0.5);
    for (const change of [1, 40, 127]) assert.ok(Math.abs(signed[128 + change]! + signed[128 - change]! - 255) <= 1);
  }
  assert.equal(rampPosition(0.25, "sqrt"), 0.5);
  assert.equal(rampPosition(0.01, "log"), 0.5);
});

test("weights of a query: the largest, without some keys, and the strongest pair", () => {
  const weights = Float32Array.of(0.5, 0.25, 0.125, 0.125);
  assert.deepEqual(largest(weights, 2).map(({ index }) => index), [0, 1]);
  assert.deepEqual([...leaveOut({ to: weights, from: null }, [0]).to!], [0, 0.5, 0.25, 0.25]);
  assert.equal(strongestQuery(makeTile([255, 0, 0, 9, 255, 3, 0, 20, 255], 3, 3)), 4);
});

test("tokens are shown with their invisible characters", () => {
  assert.equal(visibleToken("Ġa\u202eb\n"), "␣a⟨202e⟩b⏎");
  assert.equal(visibleToken(""), "∅");
  assert.equal(visibleToken("<0xE7><0x9B>"), "⟨e7⟩⟨9b⟩");
  assert.equal(isSpecial("<0xE7>"), false);
  assert.deepEqual(["[CLS]", "<s>", "<|end|>", "a<b"].map(isSpecial), [true, true, true, false]);
});

test("a tree has no crossing branches and the heights of its merges", () => {
  const { order, branches } = makeTree(4, Float32Array.of(0, 2, 0.1, 1, 3, 0.2, 0, 1, 0.9));
  assert.deepEqual(order, [0, 2, 1, 3]);
  assert.deepEqual(branches.map(({ height }) => Math.fround(height)), [0.1, 0.2, 0.9].map(Math.fround));
  assert.deepEqual([branches[2]!.from.x, branches[2]!.to.x], [1, 3]);
});

test("axes and patches", () => {
  assert.deepEqual(roundTicks(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(patchGrid(197, 1, 1), { rows: 14, columns: 14, extra: 1 });
  assert.deepEqual(patchGrid(8, 1, 2), { rows: 2, columns: 4, extra: 0 });
  assert.equal(patchGrid(7, 1, 1), null);
});

test("heads are switched off, undone and redone, pinned and named", () => {
  open();
  toggleAblated(1, 3, "mean");
  toggleAblated(0, 0);
  undoAblation();
  assert.deepEqual(state.doc.value!.ablated, [{ site: 1, head: 3, mode: "mean", scale: 0 }]);
  redoAblation();
  toggleAblated(1, 3);
  assert.deepEqual(state.doc.value!.ablated.map(({ site, head }) => [site, head]), [[0, 0]]);
  togglePin(1, 2);
  assert.deepEqual(state.pinned.value, ["1.2"]);
  state.setOwnClass(1, 1, "induction");
  assert.equal(state.classesOf(3)[0]!.name, "induction");
  state.moveHead(5, 9);
  assert.deepEqual([state.selectedSite.value, state.selectedHead.value], [1, 3]);
});

test("the map sorts by a measure, brackets shared keys and folds layers", () => {
  open();
  showMeasure("importance", new Map([[0, 1], [1, 2], [2, 5], [3, 4], [4, 3], [5, 6]]));
  assert.equal(bandContent([1], 4).brackets.length, 2);
  state.sortHeads.value = "importance";
  assert.deepEqual(bandContent([0, 1], 4).cells.map(({ head }) => head), [1, 0, 5, 2, 3, 4]);
  state.layerRange.value = [1, 1];
  assert.deepEqual([0, 1].map(isShownLayer), [false, true]);
  state.layerRange.value = [];
});

test("what the Lab asks for follows the switches and the chosen tokens", () => {
  open();
  toggleAblated(1, 0, "noise");
  toggleToken("text", 2);
  assert.deepEqual(labRequest(), { heads: [[1, 0, "noise", 0]], tokens: { text: [2] }, resampleText: "", random: 5 });
  toggleToken("text", 2);
  assert.deepEqual(chosenTokens.value, { text: [] });
});

test("while no head is off, the Lab asks what the selected one would change", () => {
  open();
  state.selectHead(1, 2);
  assert.deepEqual(labRequest()["heads"], [[1, 2, "zero", 0]]);
  setAblated([{ site: 0, head: 1, mode: "mean", scale: 0 }]);
  assert.deepEqual(labRequest()["heads"], [[0, 1, "mean", 0]]);
});

test("the Lab starts where the outputs change most, of the positions with next tokens", () => {
  const klByPosition = [9, 0.1, 3, null, 2];
  assert.equal(mostChanged({ klByPosition, nextFrom: 0, nextAt: [] }), 0);
  assert.equal(mostChanged({ klByPosition, nextFrom: 1, nextAt: [[], [], [], []] }), 2);
});

test("the address tells the run that is open from another, and from the first", () => {
  open();
  const row = { ids: [], words: [], text: "hi", offsets: [] };
  const found = { ...state.doc.value!, isFirstText: true, streams: { text: [row] } };
  assert.ok(isRunOf(found, { text: "", source: "" }) && isRunOf(found, { text: "hi", source: "" }));
  assert.ok(!isRunOf({ ...found, isFirstText: false }, { text: "", source: "" }) && !isRunOf(found, { text: "ho", source: "" }));
  const translated = { ...found, streams: { source: [{ ...row, text: "salut" }], text: [row] } };
  assert.deepEqual(["salut", "bye"].map((source) => isRunOf(translated, { text: "", source })), [true, false]);
});

test("another source gets a target of its own, unless one is typed", () => {
  const shown = { source: "a", text: "x" };
  assert.equal(chooseTarget(shown, { source: "b", text: "x" }), "");
  assert.equal(chooseTarget(shown, { source: "b", text: "y" }), "y");
  assert.equal(chooseTarget(shown, shown), "x");
});

test("the palette finds actions, screens, and heads by each of their names", () => {
  open();
  state.selectHead(1, 2);
  const texts = (query: string) => findCommands(query, listCommands()).map(({ text }) => text);
  assert.equal(texts("ablate")[0], "Ablate: L1 H2");
  assert.ok(texts("prune this head").includes("Prune: L1 H2") && texts("loss").includes("Measure the loss"));
  for (const query of ["L1 H3", "l1h3", "1.3", "decoder.1.attention:3"]) assert.deepEqual(texts(query), ["L1 H3"], query);
  assert.deepEqual(texts("L0"), ["L0 H0", "L0 H1"]);
  findCommands("1.3", listCommands())[0]!.run();
  assert.equal(state.selectedHead.value, 3);
});

test("measures of the open text stand beside those over several texts", () => {
  const own = { names: ["sink"], values: Float32Array.of(0.5, NaN, NaN, 0.1) };
  state.measures.value = { names: ["entropy", "sink"], values: Float32Array.of(1, 0, 2, 3, 0.25, 0.2, 0.3, 0.05), classes: new Map(), texts: "22 general texts", notes: [], severalTexts: true, own };
  assert.deepEqual([state.measureOf(0, "sink"), state.measureOf(0, "sink", 0, own), state.measureOf(0, "entropy", 0, own)], [0.25, 0.5, NaN]);
  assert.deepEqual(["22 general texts", "1 text", "9 texts", "MNIST"].map(textCount), ["22 general texts", "1 text", "9 texts", "MNIST"]);
  assert.equal(state.hasClasses.value, false);
  state.doc.value = { ...state.doc.value!, isFirstText: false, texts: ["a", "b"] };
  assert.equal(lacksMeasures(), false);
  state.measures.value = { ...state.measures.value, severalTexts: false }; // an earlier visit ended before the second job
  assert.equal(lacksMeasures(), true);
});

test("the nearest heads come first, without the head itself", () => {
  const group = { heads: [0, 1, 2], distances: Float32Array.of(0, 3, 1, 3, 0, 2, 1, 2, 0) };
  assert.deepEqual([0, 2].map((head) => neighbours(group, head).map(({ head: other }) => other)), [[2, 1], [0, 1]]);
});

test("each screen keeps its own choice of tables", () => {
  state.screen.value = "map";
  state.showsTable.value = true;
  state.screen.value = "head";
  assert.equal(state.showsTable.value, false);
  state.screen.value = "map";
  assert.equal(state.showsTable.value, true);
  state.showsTable.value = false;
});

test("arcs end at their tokens, and the longest alone reaches the top", () => {
  const heights = [1, 5, 10].map((key) => Number(arcPath({ query: 0, key, weight: 1 }, 20, 10).split(" ")[2]));
  assert.deepEqual(heights, [...heights].sort((a, b) => b - a));
  assert.match(arcPath({ query: 0, key: 10, weight: 1 }, 20, 10), /^M10 .* 210 240$/);
});

test("one reason is given once, with all that it holds for", () => {
  assert.deepEqual(groupByReason([["a", "x"], ["b", "y"], ["c", "x"]]), [["x", "a, c"], ["y", "b"]]);
});
