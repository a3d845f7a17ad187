// The page: loads what is open, shows the screen that the URL names, and listens to the keyboard.

import { Button } from "./components/basics";
import { batch, signal } from "@preact/signals";
import { render, type ComponentType, type JSX } from "preact";
import { groupTokens, isGrouped, reopenAddress, toggleAblated, togglePin } from "./actions";
import { addedTokens, announcement, doc, excludedTokens, job, loadDocument, loadError, lockedCell, moveHead, overlay, screen, SCREENS, type ScreenId, selectedToken, showsTable, sinksFirst, source, startClassNames, startHash } from "./state";
import { watchTheme } from "./canvas/colors";
import { ErrorNote } from "./components/basics";
import { brushedHeads, classFilter } from "./components/head_grid";
import { CommandBox, KeySheet } from "./components/overlays";
import { Shell } from "./components/shell";
import { t, type TextKey } from "./i18n";
import { MapScreen } from "./screens/map";
import { NO_SERVER } from "./source";

/** Screens that are loaded when one of their group is opened first. */
const views = () => import("./screens/views");
const changes = () => import("./screens/changes");
const LAZY: Partial<Record<ScreenId, () => Promise<ComponentType>>> = {
  open: async () => (await changes()).OpenScreen,
  head: async () => (await views()).HeadScreen,
  text: async () => (await views()).TextScreen,
  classify: async () => (await views()).ClassifyScreen,
  lab: async () => (await changes()).LabScreen,
  prune: async () => (await changes()).PruneScreen,
  diff: async () => (await changes()).DiffScreen,
  cost: async () => (await changes()).CostScreen,
  steps: async () => (await views()).StepsScreen,
  similarity: async () => (await views()).SimilarityScreen,
};
const loaded = signal<Partial<Record<ScreenId, ComponentType>>>({ map: MapScreen });

/** Screens that work with the tokens of the model. */
const NEED_TOKENS: ScreenId[] = ["lab", "steps", "diff"];

function CurrentScreen(): JSX.Element {
  const id = screen.value;
  if (isGrouped.value && NEED_TOKENS.includes(id)) {
    return (
      <div class="note">
        <h1>{t(`screen.${id}` as TextKey)}</h1>
        <p class="grow">{t("tokens.needed")}</p>
        <Button kind="primary" onClick={() => void groupTokens({ words: false, special: false, first: false })}>{t("tokens.showAll")}</Button>
      </div>
    );
  }
  const Screen = loaded.value[id];
  if (Screen) return <Screen />;
  const part = LAZY[id]?.();
  if (part) showLater(part, (component) => (loaded.value = { ...loaded.value, [id]: component }));
  return <p class="t3">{t("state.loading")}</p>;
}

const drawer = signal<ComponentType | null>(null);

/** The drawer of exports, which is loaded when it is opened first. */
function Export(): JSX.Element | null {
  const Drawer = drawer.value;
  if (Drawer) return <Drawer />;
  showLater(import("./components/export_drawer"), ({ ExportDrawer }) => (drawer.value = ExportDrawer));
  return null;
}

/** Show a part of the page when it has come; without its server the page says so. */
function showLater<Part>(part: Promise<Part>, show: (part: Part) => void): void {
  part.then(show, () => (loadError.value = NO_SERVER));
}

function App(): JSX.Element {
  return (
    <>
      <Shell>
        {loadError.value ? (
          <ErrorNote {...loadError.value} onRetry={() => void loadDocument()} />
        ) : doc.value ? (
          <CurrentScreen />
        ) : (
          <p class="t3">{t("state.loading")}</p>
        )}
      </Shell>
      {overlay.value === "commands" && <CommandBox />}
      {overlay.value === "keys" && <KeySheet />}
      {overlay.value === "export" && <Export />}
      <div class="vh" role="status" aria-live="polite">{announcement.value}</div>
    </>
  );
}

/** Release what clicks and drags have kept: tokens, a cell, a class, heads of the scatter plot. */
function releaseChoices(): void {
  batch(() => {
    selectedToken.value = null;
    addedTokens.value = excludedTokens.value = [];
    lockedCell.value = null;
    classFilter.value = "";
    brushedHeads.value = null;
  });
}

const KEYS: Record<string, () => void> = {
  ArrowLeft: () => moveHead(0, -1),
  ArrowRight: () => moveHead(0, 1),
  ArrowUp: () => moveHead(-1, 0),
  ArrowDown: () => moveHead(1, 0),
  Enter: () => (screen.value = "head"),
  k: () => toggleAblated(),
  p: () => togglePin(),
  e: () => (overlay.value = doc.value?.sites.length ? "export" : ""),
  t: () => (showsTable.value = !showsTable.value),
  s: () => (sinksFirst.value = !sinksFirst.value),
  "/": () => (overlay.value = "commands"),
  "?": () => (overlay.value = "keys"),
  "[": () => history.back(),
  "]": () => history.forward(),
  Escape: () => {
    if (overlay.value) overlay.value = "";
    else releaseChoices();
  },
};

function onKey(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || (isTyping && event.key !== "Escape")) return;
  if (overlay.value && event.key !== "Escape") return;
  const chosen = SCREENS["1234567890-".indexOf(event.key)];
  const isControl = event.key === "Enter" && target.closest("button,a,summary,[role=option]") !== null;
  const action = chosen ? () => (screen.value = chosen) : isControl ? undefined : KEYS[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

startHash();
watchTheme();
addEventListener("keydown", onKey);
render(<App />, document.getElementById("app")!);
void reopenAddress().then(startClassNames);
/** Another window may have opened another text meanwhile. */
addEventListener("focus", async () => {
  const found = source.isLive && doc.value && !job.value ? await source.document().catch(() => null) : null;
  if (found && found.revision !== source.revision && !job.value) await reopenAddress();
});
