// Small parts that all screens are made of.

import { effect, useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { themeVersion } from "../canvas/colors";
import { drawHeatmap, type HeatmapImage } from "../canvas/heatmap";
import { say, t, type TextKey } from "../i18n";
import { announcement, type Scale, showsTable } from "../state";

export function Icon({ path, size = 16 }: { path: string; size?: number }): JSX.Element {
  return (
    <svg class="ic" viewBox={`0 0 ${size} ${size}`} aria-hidden="true">
      <path d={path} />
    </svg>
  );
}

interface ChoiceProps<T extends string> {
  label: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}

/** The value of a choice that a signal holds, and its change. */
export function bind<T>(state: { value: T }): { value: T; onChange: (value: T) => void } {
  return { value: state.value, onChange: (value) => (state.value = value) };
}

/** Options whose texts have the key `prefix` and the name. */
export function choices<const T extends string>(prefix: string, names: readonly T[]): (readonly [T, string])[] {
  return names.map((name) => [name, t(`${prefix}${name.replace(" ", "")}` as TextKey)] as const);
}

export function Segmented<T extends string>(props: ChoiceProps<T>): JSX.Element {
  return (
    <span class="seg" role="group" aria-label={props.label}>
      {props.options.map(([value, text]) => (
        <button key={value} type="button" aria-pressed={props.value === value} onClick={() => props.onChange(value)}>
          {text}
        </button>
      ))}
    </span>
  );
}

export function Select<T extends string>(props: ChoiceProps<T>): JSX.Element {
  return (
    <label class="picker">
      <span>{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value as T)}>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Panel(props: { title?: string; side?: ComponentChildren; footer?: ComponentChildren; children: ComponentChildren; class?: string }): JSX.Element {
  return (
    <section class={`panel ${props.class ?? ""}`}>
      {props.title && (
        <header>
          <h2>{props.title}</h2>
          <span class="grow" />
          {props.side}
        </header>
      )}
      <div class="body">{props.children}</div>
      {props.footer && <footer>{props.footer}</footer>}
    </section>
  );
}

/** A canvas that shows an image and is drawn anew when the image, the scale or the theme changes. */
export function Heatmap(props: { image: HeatmapImage | null; scale: Scale; label: string; class?: string }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(
    () =>
      effect(() => {
        void themeVersion.value;
        if (canvas.current && props.image) drawHeatmap(canvas.current, props.image, props.scale);
      }),
    [props.image, props.scale],
  );
  return <canvas ref={canvas} class={props.class} role="img" aria-label={props.label} width={1} height={1} />;
}

export function Ramp({ text }: { text: string }): JSX.Element {
  return (
    <span class="ramp">
      <i aria-hidden="true">
        {Array.from({ length: 9 }, (_, index) => (
          <b key={index} class={`seq-${index}`} />
        ))}
      </i>
      {text}
    </span>
  );
}

/** A bar from 0 to 1 with its chance level; widths are set on the element, because the page allows no inline styles. */
export function Meter({ value, chance }: { value: number; chance?: number }): JSX.Element {
  const bar = useRef<HTMLElement>(null);
  const mark = useRef<HTMLElement>(null);
  useEffect(() => {
    if (bar.current) bar.current.style.width = `${Math.min(Math.max(value, 0), 1) * 100}%`;
    if (mark.current && chance !== undefined) mark.current.style.left = `${Math.min(Math.max(chance, 0), 1) * 100}%`;
  }, [value, chance]);
  return (
    <div class="meter" aria-hidden="true">
      <i ref={bar} />
      {chance !== undefined && Number.isFinite(chance) && <u ref={mark} />}
    </div>
  );
}

export function TableButton(): JSX.Element {
  return (
    <button class="btn quiet" type="button" aria-pressed={showsTable.value} onClick={() => (showsTable.value = !showsTable.value)}>
      {showsTable.value ? t("table.hide") : t("table.show")} <kbd class="hide-s">T</kbd>
    </button>
  );
}

export function ErrorNote({ fact, remedy, onRetry }: { fact: string; remedy: string; onRetry?: () => void }): JSX.Element {
  return (
    <div class="note bad" role="alert">
      <p class="b">{say(fact)}</p>
      {remedy && <p>{say(remedy)}</p>}
      {onRetry && (
        <button class="btn" type="button" onClick={onRetry}>
          {t("state.retry")}
        </button>
      )}
    </div>
  );
}

export interface Column<Row> {
  key: string;
  title: string;
  numeric?: boolean;
  value: (row: Row) => string | number;
  cell?: (row: Row) => ComponentChildren;
}

export function CopyCode({ text, testId }: { text: string; testId: string }): JSX.Element {
  return (
    <div class="command">
      <code data-testid={testId} tabIndex={0}>
        {text}
      </code>
      <CopyButton text={text} />
    </div>
  );
}

export function CopyButton({ text, label }: { text: string; label?: string }): JSX.Element {
  const isCopied = useSignal(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      announcement.value = t("copy.refused");
      return;
    }
    isCopied.value = true;
    setTimeout(() => (isCopied.value = false), 2000);
  };
  return (
    <button class="btn" type="button" onClick={() => void copy()}>
      {isCopied.value ? t("prune.copied") : (label ?? t("prune.copy"))}
    </button>
  );
}

export function saveBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // some browsers read the file after the click
}
