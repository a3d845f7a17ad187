// Head classes: hue, letter and shape, never hue alone.

import type { JSX } from "preact";
import { t } from "../i18n";

export type Letter = "p" | "s" | "r" | "b" | "k" | "d" | "i" | "t" | "a" | "u";

/** The outline of each badge in a box of 16 x 16, for SVG and for canvases. */
export const BADGE_PATHS: Record<Letter, string> = {
  p: "M.5 8a7.5 7.5 0 1015 0 7.5 7.5 0 10-15 0z",
  s: "M.75.75h14.5v14.5H.75z",
  r: "M8 0l8 8-8 8-8-8z",
  b: "M5.5 2.5h5a5.5 5.5 0 010 11h-5a5.5 5.5 0 010-11z",
  k: "M-.5 1.5h17L8 16z",
  d: "M.75.75h11v3.5h3.5v11h-11v-3.5h-3.5z",
  i: "M-.5 14.5h17L8 0z",
  t: "M8 .3l7.6 5.5-2.9 9H3.3L.4 5.8z",
  a: "M4 .9h8l4 7.1-4 7.1H4L0 8z",
  u: "M1.5 8a6.5 6.5 0 1013 0 6.5 6.5 0 10-13 0z",
};
/** The letter that a badge shows; a point for no class, as in the tables of the command line. */
export const badgeSign = (letter: Letter): string => (letter === "u" ? "·" : letter.toUpperCase());

/** Where the letter of a badge stands, so that it lies inside triangles too. */
export function badgeBaseline(letter: Letter): number {
  return letter === "k" ? 9.4 : letter === "i" ? 13 : 11.4;
}
export const LETTERS = Object.keys(BADGE_PATHS) as Letter[];

/** The letter of a class by the library's name of it, such as "previous" or "obj -> governor". */
export function classLetter(name: string | undefined): Letter {
  if (!name || name === "unclear") return "u";
  if (/sink/.test(name)) return "k";
  if (/previous|next|self|offset|position|first|^neighbour$|^row$|^column$/.test(name)) return "p";
  if (/rare/.test(name)) return "r";
  if (/broad|global/.test(name)) return "b";
  if (/duplicate/.test(name)) return "d";
  if (/induction/.test(name)) return "i";
  if (/punctuation|separator|delimiter/.test(name)) return "t";
  if (/alignment/.test(name)) return "a";
  return "s";
}

export function className(letter: Letter): string {
  return t(`class.${letter}`);
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
