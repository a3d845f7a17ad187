// Head classes: hue, letter and shape, never hue alone.

import type { JSX } from "preact";
import { classWord } from "../i18n";

/** The letters of classes in the order of the library, and the outline of each badge in a box of 16 x 16, for SVG and for canvases. */
export const BADGE_PATHS = {
  k: "M-.5 1.5h17L8 16z",
  p: "M.5 8a7.5 7.5 0 1015 0 7.5 7.5 0 10-15 0z",
  s: "M.75.75h14.5v14.5H.75z",
  r: "M8 0l8 8-8 8-8-8z",
  i: "M-.5 14.5h17L8 0z",
  d: "M.75.75h11v3.5h3.5v11h-11v-3.5h-3.5z",
  e: "M8 15.7L.4 10.2l2.9-9h9.4l2.9 9z",
  t: "M8 .3l7.6 5.5-2.9 9H3.3L.4 5.8z",
  a: "M4 .9h8l4 7.1-4 7.1H4L0 8z",
  b: "M5.5 2.5h5a5.5 5.5 0 010 11h-5a5.5 5.5 0 010-11z",
  n: "M5 .5h6L15.5 5v6L11 15.5H5L.5 11V5z",
  h: "M0 3h16v10H0z",
  v: "M3 0h10v16H3z",
  u: "M1.5 8a6.5 6.5 0 1013 0 6.5 6.5 0 10-13 0z",
};
export type Letter = keyof typeof BADGE_PATHS;
/** The letter that a badge shows; a point for no class, as in the tables of the command line. */
export const badgeSign = (letter: Letter): string => (letter === "u" ? "·" : letter.toUpperCase());

/** Where the letter of a badge stands, so that it lies inside triangles too. */
export function badgeBaseline(letter: Letter): number {
  return letter === "k" ? 9.4 : letter === "i" ? 13 : 11.4;
}
export const LETTERS = Object.keys(BADGE_PATHS) as Letter[];

const CLASS_NAMES: Record<Letter, string> = {
  k: "sink", p: "positional", s: "syntactic", r: "rare-token", i: "induction", d: "duplicate", e: "separator", t: "punctuation", a: "alignment", b: "broad",
  n: "neighbour", h: "row", v: "column", u: "unclear",
};
const GROUPS: Record<string, Letter> = { offset: "p", previous: "p", self: "p", next: "p", first: "k" };

/** The letter of a class by the library's name of it, such as "previous" or "syntactic det to its governor". */
export function classLetter(name = "unclear"): Letter {
  const first = name.split(" ")[0]!;
  return GROUPS[first] ?? LETTERS.find((letter) => CLASS_NAMES[letter] === first) ?? "s";
}

export function className(letter: Letter): string {
  return classWord(CLASS_NAMES[letter]);
}

export function Badge({ name, size = 16 }: { name: string | undefined; size?: number }): JSX.Element {
  return <LetterBadge letter={classLetter(name)} size={size} label={name} />;
}

export function LetterBadge({ letter, size = 16, label }: { letter: Letter; size?: number; label?: string | undefined }): JSX.Element {
  return (
    <svg class={`badge badge-${letter}`} width={size} height={size} viewBox="-1 -1 18 18" role="img" aria-label={label || className(letter)}>
      <path d={BADGE_PATHS[letter]} />
      <text x="8" y={badgeBaseline(letter)} aria-hidden="true">{badgeSign(letter)}</text>
    </svg>
  );
}
