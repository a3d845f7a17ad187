// Builds the page into ../static: app.js (split into chunks), app.css, index.html, report.js for exported files, learn.js for
// the pages of `headwise learn`, and the licences of the packages in the bundle. Prints sizes and fails above the budgets.

import { build } from "esbuild";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "static");
const BUDGETS = { script: 120_000, firstScreen: 70_000, style: 15_000, learn: 10_000 }; // bytes, gzipped

const common = { bundle: true, minify: true, target: "es2022", jsx: "automatic", jsxImportSource: "preact", legalComments: "none" };

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const app = await build({
  ...common,
  entryPoints: { app: join(here, "src/main.tsx") },
  outdir: out,
  format: "esm",
  splitting: true,
  chunkNames: "chunk-[hash]",
  metafile: true,
});
await build({ ...common, entryPoints: { report: join(here, "src/main.tsx") }, outdir: out, format: "iife", splitting: false });
await build({ ...common, entryPoints: { learn: join(here, "src/learn/page.ts") }, outdir: out, format: "iife" });
await build({ ...common, entryPoints: { app: join(here, "src/styles/app.css") }, outdir: out });
writeFileSync(join(out, "index.html"), readFileSync(join(here, "src/index.html")));
writeFileSync(join(out, "licences.txt"), licences());

const gzipped = (name) => gzipSync(readFileSync(join(out, name))).length;
const scripts = readdirSync(out).filter((name) => name.endsWith(".js") && !["report.js", "learn.js"].includes(name));
const first = firstScreenFiles(app.metafile);
const sizes = {
  script: sum(scripts.map(gzipped)),
  firstScreen: sum(first.map(gzipped)),
  style: gzipped("app.css"),
  learn: gzipped("learn.js"),
};
for (const [name, size] of Object.entries(sizes)) {
  console.log(`${name.padEnd(12)} ${(size / 1000).toFixed(1).padStart(6)} kB gzip of ${BUDGETS[name] / 1000}`);
}
const over = Object.keys(sizes).filter((name) => sizes[name] > BUDGETS[name]);
if (over.length) {
  console.error(`over budget: ${over.join(", ")}`);
  process.exit(1);
}

/** Files that the first screen loads: the entry and what it imports without waiting. */
function firstScreenFiles(metafile) {
  const found = new Set();
  const visit = (path) => {
    if (found.has(path)) return;
    found.add(path);
    for (const item of metafile.outputs[path].imports) if (item.kind === "import-statement") visit(item.path);
  };
  visit(Object.keys(metafile.outputs).find((path) => metafile.outputs[path].entryPoint?.endsWith("main.tsx")));
  return [...found].map((path) => path.split("/").pop());
}

/** Names and licence texts of the packages that are part of the bundle. */
function licences() {
  const { dependencies } = JSON.parse(readFileSync(join(here, "package.json")));
  const lock = JSON.parse(readFileSync(join(here, "package-lock.json")));
  const names = Object.entries(lock.packages)
    .filter(([path, info]) => path && !info.dev)
    .map(([path]) => path.replace("node_modules/", ""));
  return [...new Set([...Object.keys(dependencies), ...names])]
    .sort()
    .map((name) => {
      const folder = join(here, "node_modules", name);
      const { version, license } = JSON.parse(readFileSync(join(folder, "package.json")));
      const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
      return `${name} ${version} (${license})\n\n${file ? readFileSync(join(folder, file), "utf8") : ""}`;
    })
    .join("\n---\n\n");
}

function sum(numbers) {
  return numbers.reduce((total, value) => total + value, 0);
}
