// Small parts that all screens are made of.

import { effect, type Signal, useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { themeVersion } from "../canvas/colors";
import { drawHeatmap, type HeatmapImage } from "../canvas/heatmap";
import { say, t, type TextKey } from "../i18n";
import { announcement, type Scale, showsTable } from "../state";

export function Icon({ path, size = 16 }: { path: string; size?: number }): JSX.Element {
  return (
    <svg class="ic" viewBox={`0 0 ${size} ${size}`} aria-hidden="true"><path d={path} /></svg>
  );
}

/** An element and its width, which is known before the first picture, so that nothing moves. */
export function useWidth<Box extends HTMLElement>(): [{ current: Box | null }, Signal<number>] {
  const box = useRef<Box>(null);
  const width = useSignal(0);
  useLayoutEffect(() => {
    const measure = () => (width.value = box.current?.clientWidth ?? 0);
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);
  return [box, width];
}

/** A button of the page; `kind` is "primary", "quiet", "icon", or nothing. */
export function Button({ kind = "", ...rest }: { kind?: string } & Omit<JSX.IntrinsicElements["button"], "class" | "type">): JSX.Element {
  return <button class={`btn ${kind}`} type="button" {...rest} />;
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
        <button key={value} type="button" aria-pressed={props.value === value} onClick={() => props.onChange(value)}>{text}</button>
      ))}
    </span>
  );
}

export function Select<T extends string>(props: ChoiceProps<T> & { hidesLabel?: boolean }): JSX.Element {
  return (
    <label class="picker">
      <span class={props.hidesLabel ? "vh" : ""}>{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value as T)}>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>{text}</option>
        ))}
      </select>
    </label>
  );
}

interface NumberProps {
  label: string;
  value: number | "";
  min: number;
  max?: number;
  onInput: (value: number) => void;
}

export function Slider({ label, onInput, ...rest }: NumberProps & { step?: number }): JSX.Element {
  return (
    <label class="picker range">
      <span>{label}</span>
      <input type="range" onInput={(event) => onInput(event.currentTarget.valueAsNumber)} {...rest} />
    </label>
  );
}

/** A field for a number, which is NaN while the field is empty. */
export function NumberField({ label, onInput, ...rest }: NumberProps): JSX.Element {
  return (
    <label class="picker">
      <span>{label}</span>
      <input type="number" onInput={(event) => onInput(event.currentTarget.valueAsNumber)} {...rest} />
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

/** The names of each reason. */
export function groupByReason(entries: [name: string, reason: string][]): [reason: string, names: string][] {
  const found = new Map<string, string[]>();
  for (const [name, reason] of entries) found.set(reason, [...(found.get(reason) ?? []), name]);
  return [...found].map(([reason, names]) => [reason, names.join(", ")]);
}

/** A field for a whole number. What is typed counts at once, because a redraw of the page writes the number of `state` into the field. */
export function WholeNumber({ min, max, state }: { min: number; max: number; state: { value: number } }): JSX.Element {
  const take = (typed: number) => Number.isInteger(typed) && (state.value = Math.min(Math.max(typed, min), max));
  return <input type="number" min={min} max={max} value={state.value} onInput={(event) => take(event.currentTarget.valueAsNumber)} />;
}

export function TableButton(): JSX.Element {
  return (
    <Button kind="quiet" aria-pressed={showsTable.value} onClick={() => (showsTable.value = !showsTable.value)}>{showsTable.value ? t("table.hide") : t("table.show")} <kbd class="hide-s">T</kbd></Button>
  );
}

export function ErrorNote({ fact, remedy, children, onRetry }: { fact: string; remedy: string; children?: ComponentChildren; onRetry?: () => void }): JSX.Element | null {
  if (fact === "error.otherWindow") return null; // the frame says it
  if (fact === "error.outdated") return null; // the page asks again about its new text
  return (
    <div class="note bad" role="alert">
      <p class="b">{say(fact)}</p>
      {remedy && <p>{say(remedy)}</p>}
      {children}
      {onRetry && <Button onClick={onRetry}>{t("state.retry")}</Button>}
    </div>
  );
}

/** A small table that is not sorted. Columns of numbers have titles that begin with #. */
export function PlainTable({ titles, rows, kind = "finder" }: { titles: string[]; rows: ComponentChildren[][]; kind?: string }): JSX.Element {
  const align = titles.map((title) => (title.startsWith("#") ? "num" : ""));
  return (
    <table class={kind}>
      <thead>
        <tr>
          {titles.map((title, column) => (
            <th key={column} scope="col" class={align[column]}>{title.replace(/^#/, "")}</th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.map((cells, row) => (
          <tr key={row}>
            {cells.map((cell, column) => (
              <td key={column} class={align[column]}>{cell}</td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** The title of a screen, what it is about, and its controls. */
export function Toolbar({ title, hint, children }: { title: ComponentChildren; hint?: ComponentChildren; children?: ComponentChildren }): JSX.Element {
  return (
    <div class="toolbar">
      <h1>{title}</h1>
      {hint && <span class="sm t3 hide-s">{hint}</span>}
      <span class="grow" />
      {children}
    </div>
  );
}

/** A form of the page, which is sent by Enter or by its button. */
export function Form({ onSend, ...rest }: { onSend: () => void; class?: string; children: ComponentChildren }): JSX.Element {
  const onSubmit = (event: Event) => {
    event.preventDefault();
    onSend();
  };
  return <form onSubmit={onSubmit} {...rest} />;
}

/** Notes of the server below what they are about. */
export function Notes({ notes }: { notes: readonly string[] }): JSX.Element {
  return <>{notes.map((note) => <p key={note} class="t3 sm">{say(note)}</p>)}</>;
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
      <code data-testid={testId} tabIndex={0}>{text}</code>
      <CopyButton text={text} />
    </div>
  );
}

function CopyButton({ text }: { text: string }): JSX.Element {
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
  return <Button onClick={() => void copy()}>{isCopied.value ? t("prune.copied") : t("prune.copy")}</Button>;
}

export function saveBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // some browsers read the file after the click
}
