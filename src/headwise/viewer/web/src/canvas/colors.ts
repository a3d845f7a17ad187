// Colours of the heat maps: 256 steps through the stops of tokens.css, for the theme that is shown.

import { signal } from "@preact/signals";
import type { Scale } from "../state";

export type RampName = "seq" | "div";
/** Grows when the theme changes, so that canvases are drawn anew. */
export const themeVersion = signal(0);

const cache = new Map<RampName, Uint32Array>();

export function cssValue(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function parseColor(text: string): [number, number, number] {
  const parts = text.match(/[\da-f]{2}/gi) ?? ["00", "00", "00"];
  return [parseInt(parts[0]!, 16), parseInt(parts[1]!, 16), parseInt(parts[2]!, 16)];
}

function pack([red, green, blue]: [number, number, number]): number {
  return (255 << 24) | (blue << 16) | (green << 8) | red; // little-endian RGBA, as ImageData stores it
}

/** 256 packed colours of a ramp. */
export function rampColors(name: RampName): Uint32Array {
  const known = cache.get(name);
  if (known) return known;
  const stops = Array.from({ length: 9 }, (_, index) => parseColor(cssValue(`--${name}-${index}`)));
  const colors = new Uint32Array(256);
  for (let step = 0; step < 256; step++) {
    const position = (step / 255) * 8;
    const low = Math.min(7, Math.floor(position));
    const mix = (part: number) => Math.round(stops[low]![part]! + (stops[low + 1]![part]! - stops[low]![part]!) * (position - low));
    colors[step] = pack([mix(0), mix(1), mix(2)]);
  }
  cache.set(name, colors);
  return colors;
}

export function packedColor(name: string): number {
  return pack(parseColor(cssValue(name)));
}

export function watchTheme(): void {
  const renew = () => {
    cache.clear();
    themeVersion.value++;
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  new MutationObserver(renew).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
}

/** Where a weight from 0 to 1 lies on the ramp, from 0 to 1. */
export function rampPosition(value: number, scale: Scale): number {
  const clipped = Math.min(Math.max(value, 0), 1);
  if (scale === "lin") return clipped;
  return scale === "sqrt" ? Math.sqrt(clipped) : Math.max(0, 1 + Math.log10(Math.max(clipped, 1e-4)) / 4);
}

/** Ramp steps 0 to 255 of the 8-bit weights 0 to 255. */
export function stepTable(scale: Scale): Uint8Array {
  return Uint8Array.from({ length: 256 }, (_, value) => Math.round(rampPosition(value / 255, scale) * 255));
}

/** Ramp steps 0 to 255 of 8-bit differences, where 128 is none; no difference is the middle of the ramp. */
export function signedStepTable(scale: Scale): Uint8Array {
  return Uint8Array.from({ length: 256 }, (_, value) => {
    const change = (value - 128) / 127;
    return Math.round(((Math.sign(change) * rampPosition(Math.abs(change), scale) + 1) / 2) * 255);
  });
}

export function cssRamp(value: number, name: RampName = "seq"): string {
  const color = rampColors(name)[Math.round(Math.min(Math.max(value, 0), 1) * 255)]!;
  return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
}
