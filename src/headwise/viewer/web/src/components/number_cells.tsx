// Numbers as cells: a vector as a bar of colours or of numbers, and one number for each key under its token.

import { effect, type Signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { cssRamp, rampColors, rampPosition, themeVersion } from "../canvas/colors";
import { t } from "../i18n";
import { exact, keyName, type Numbers, type Place, type Step, type Steps } from "../screens/step_data";

export const MAX_NUMBER_CELLS = 16; // channels that are shown as numbers

/** The number under the pointer, and the one that a click keeps. */
export interface Pointing {
  hovered: Signal<Place | null>;
  locked: Signal<Place | null>;
}

function isSame(a: Place | null, b: Place): boolean {
  return a !== null && a.step === b.step && a.array === b.array && a.row === b.row && a.index === b.index;
}

/** The index in a group of cells that is pointed at, if the group is the one of `place`. */
function pointedIndex({ hovered, locked }: Pointing, place: Omit<Place, "index">): number | null {
  const shown = hovered.value ?? locked.value;
  return shown && isSame(shown, { ...place, index: shown.index }) ? shown.index : null;
}

/** Handlers that let a group of cells be pointed at, with the pointer and with the keyboard. */
function handlers(pointing: Pointing, place: Omit<Place, "index">, indices: number[], indexAt: (event: MouseEvent) => number | null) {
  const point = (event: MouseEvent, target: Signal<Place | null>) => {
    const index = indexAt(event);
    if (index !== null) target.value = target === pointing.locked && isSame(target.value, { ...place, index }) ? null : { ...place, index };
  };
  return {
    onMouseMove: (event: MouseEvent) => point(event, pointing.hovered),
    onMouseLeave: () => (pointing.hovered.value = null),
    onClick: (event: MouseEvent) => point(event, pointing.locked),
    onKeyDown: (event: KeyboardEvent) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      const at = indices.indexOf(pointedIndex(pointing, place) ?? -1);
      const next = Math.min(Math.max(at + by, 0), indices.length - 1);
      pointing.hovered.value = null;
      pointing.locked.value = { ...place, index: indices[next]! };
    },
  };
}

function cellAt(event: MouseEvent): number | null {
  const cell = (event.target as HTMLElement).closest<HTMLElement>("[data-index]");
  return cell ? Number(cell.dataset["index"]) : null;
}

/** A vector: numbers if it is short, else a bar with one colour for each channel. */
export function VectorBar(props: { values: Numbers; limit: number; role: string; label: string; step: number; array: string; row?: number; pointing: Pointing; factor?: number }): JSX.Element {
  const { values, limit, pointing, factor = 1 } = props;
  const place = { step: props.step, array: props.array, row: props.row ?? 0 };
  const index = pointedIndex(pointing, place);
  const isShort = values.length <= MAX_NUMBER_CELLS;
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(
    () =>
      effect(() => {
        void themeVersion.value;
        if (canvas.current) drawBar(canvas.current, values, limit / factor);
      }),
    [values, limit, factor, isShort],
  );
  const barIndex = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    return Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * values.length), 0), values.length - 1);
  };
  const slider = {
    tabIndex: 0,
    role: "slider" as const,
    "aria-label": props.label,
    "aria-valuemin": 0,
    "aria-valuemax": values.length - 1,
    "aria-valuenow": index ?? 0,
    "aria-valuetext": `${t("steps.channel", { number: index ?? 0 })}: ${exact((values[index ?? 0] ?? 0) * factor)}`,
    ...handlers(pointing, place, Array.from(values, (_, channel) => channel), isShort ? cellAt : barIndex),
  };
  return (
    <div class={`vec ${props.role}`}>
      <span class="l" title={props.label}>{props.label}</span>
      {isShort ? (
        <div class="cells" {...slider}>
          {Array.from(values, (value, channel) => (
            <i key={channel} data-index={channel} data-testid={`${props.step}.${props.array}.${place.row}.${channel}`} class={index === channel ? "on" : ""}>
              {fixed(value * factor)}
            </i>
          ))}
        </div>
      ) : (
        <div class="bar-box" {...slider}>
          <canvas ref={canvas} class="barcode" width={1} height={1} />
          {index !== null && <span class="mark" style={{ left: `${((index + 0.5) / values.length) * 100}%` }} />}
        </div>
      )}
    </div>
  );
}

/** A signed number of a fixed width. */
function fixed(value: number): string {
  const size = Math.abs(value);
  return `${value < 0 ? "−" : "+"}${size >= 100 ? size.toFixed(0) : size >= 10 ? size.toFixed(1) : size.toFixed(3)}`;
}

function drawBar(canvas: HTMLCanvasElement, values: Numbers, limit: number): void {
  canvas.width = values.length;
  const context = canvas.getContext("2d")!;
  const pixels = context.createImageData(values.length, 1);
  const target = new Uint32Array(pixels.data.buffer);
  const colors = rampColors("div");
  values.forEach((value, channel) => {
    target[channel] = colors[Math.round(((Math.max(-1, Math.min(1, value / limit)) + 1) / 2) * 255)]!;
  });
  context.putImageData(pixels, 0, 0);
}

/** The largest size of some vectors, rounded up to two digits. */
export function roundedLimit(vectors: Numbers[]): number {
  let most = 0;
  for (const values of vectors) for (const value of values) most = Math.max(most, Math.abs(value));
  const unit = 10 ** (Math.floor(Math.log10(most || 1)) - 1);
  return Number((Math.ceil((most || 1) / unit) * unit).toPrecision(2));
}

/** One number for each shown key, under the key's token; weights are coloured, masked keys hatched. */
export function KeyCells(props: { steps: Steps; step: Step; array: string; allowed: Numbers | null; isWeight: boolean; selected: number | null; onSelect: (position: number) => void; pointing: Pointing; label: string }): JSX.Element {
  const { steps, step, array, pointing } = props;
  void themeVersion.value;
  const place = { step: step.index, array, row: 0 };
  const indices = keysToShow(steps, props.allowed);
  const values = step.arrays[array]!.data;
  const on = pointedIndex(pointing, place);
  const { onClick, ...rest } = handlers(pointing, place, indices, cellAt);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const chosen = box.current?.querySelector<HTMLElement>(".chosen");
    if (box.current && chosen) box.current.scrollLeft = chosen.offsetLeft - box.current.clientWidth / 2;
  }, [props.selected]);
  return (
    <div class="scroll keyscroll" tabIndex={-1} ref={box}>
      <div
        class="keycells"
        tabIndex={0}
        role="listbox"
        aria-label={props.label}
        {...rest}
        onClick={(event) => {
          onClick(event);
          const index = cellAt(event);
          if (index !== null) props.onSelect(steps.positions[index]!);
        }}
      >
        {indices.map((index) => {
          const isMasked = props.allowed !== null && !props.allowed[index];
          const position = steps.positions[index]!;
          const shade = props.isWeight && !isMasked ? rampPosition(values[index]!, "sqrt") : null;
          return (
            <span
              key={index}
              class={`kc ${on === index ? "on" : ""} ${props.selected === position ? "chosen" : ""}`}
              role="option"
              aria-selected={props.selected === position}
              data-index={index}
              data-testid={`${step.index}.${array}.${index}`}
            >
              <span class="tk">{keyName(steps, index)}</span>
              {isMasked ? (
                <i class="m" aria-hidden="true" />
              ) : (
                <i aria-hidden="true" style={shade === null ? {} : { background: cssRamp(shade), color: inkOn(cssRamp(shade)) }}>
                  {array === "allowed" ? "✓" : keyNumber(values[index]!, props.isWeight)}
                </i>
              )}
              <span class="vh">{` ${position}: ${isMasked ? t("map.masked") : exact(values[index]!)}`}</span>
            </span>
          );
        })}
      </div>
    </div>
  );
}

/** Black or white, whichever is easier to read on a colour. */
function inkOn(color: string): string {
  const [red = 0, green = 0, blue = 0] = (color.match(/\d+/g) ?? []).map((part) => {
    const share = Number(part) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#101114" : "#ffffff";
}

function keyNumber(value: number, isWeight: boolean): string {
  if (isWeight) return value >= 0.9995 ? "1.00" : value >= 0.0005 ? value.toFixed(3).slice(1) : value === 0 ? "0" : "<.001";
  return exactShort(value);
}

function exactShort(value: number): string {
  const size = Math.abs(value);
  return `${value < 0 ? "−" : ""}${size >= 1000 ? size.toExponential(0) : size >= 100 ? size.toFixed(0) : size >= 10 ? size.toFixed(1) : size.toFixed(2)}`;
}

/** The keys whose vectors are known, and beside them the masked keys if all keys are few. */
export function keysToShow(steps: Steps, allowed: Numbers | null): number[] {
  if (steps.positions.length <= 32) return Array.from(steps.positions, (_, index) => index);
  return Array.from(steps.shown).filter((index) => allowed === null || allowed[index] !== 0);
}
