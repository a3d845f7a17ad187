// Head classes: hue, letter and shape, never hue alone.

import type { JSX } from "preact";
import { t, type TextKey } from "../i18n";

type Letter = "p" | "s" | "r" | "b" | "k" | "d" | "i" | "t" | "a" | "u";

const SHAPES: Record<Letter, JSX.Element> = {
  p: <circle cx="8" cy="8" r="7.5" />,
  s: <rect x=".75" y=".75" width="14.5" height="14.5" />,
  r: <path d="M8 0l8 8-8 8-8-8z" />,
  b: <rect x="0" y="2.5" width="16" height="11" rx="5.5" />,
  k: <path d="M-.5 1.5h17L8 16z" />,
  d: <path d="M.75.75h11v3.5h3.5v11h-11v-3.5h-3.5z" />,
  i: <path d="M-.5 14.5h17L8 0z" />,
  t: <path d="M8 .3l7.6 5.5-2.9 9H3.3L.4 5.8z" />,
  a: <path d="M4 .9h8l4 7.1-4 7.1H4L0 8z" />,
  u: <circle cx="8" cy="8" r="6.5" stroke-dasharray="2.5 2" />,
};
const NAMES: Record<Letter, TextKey> = {
  p: "class.positional",
  s: "class.syntactic",
  r: "class.rare",
  b: "class.broad",
  k: "class.sink",
  d: "class.duplicate",
  i: "class.induction",
  t: "class.punctuation",
  a: "class.alignment",
  u: "class.unclear",
};
export const LETTERS = Object.keys(SHAPES) as Letter[];

/** The letter of a class by the library's name of it, such as "previous" or "obj -> governor". */
export function classLetter(name: string | undefined): Letter {
  if (!name || name === "unclear") return "u";
  if (/sink/.test(name)) return "k";
  if (/previous|next|self|offset|position|first/.test(name)) return "p";
  if (/rare/.test(name)) return "r";
  if (/broad|global/.test(name)) return "b";
  if (/duplicate/.test(name)) return "d";
  if (/induction/.test(name)) return "i";
  if (/punctuation|separator|delimiter/.test(name)) return "t";
  if (/alignment/.test(name)) return "a";
  return "s";
}

export function className(letter: Letter): string {
  return t(NAMES[letter]);
}

export function Badge({ name, size = 16 }: { name: string | undefined; size?: number }): JSX.Element {
  const letter = classLetter(name);
  return (
    <svg class={`badge badge-${letter}`} width={size} height={size} viewBox="-1 -1 18 18" role="img" aria-label={name || className(letter)}>
      <g>{SHAPES[letter]}</g>
      <text x="8" y={letter === "k" ? 9.4 : letter === "i" ? 13 : 11.4} aria-hidden="true">
        {letter.toUpperCase()}
      </text>
    </svg>
  );
}
