// One query in one or two colours: lines from its token to the keys, and a square for each weight beside the keys.

import type { JSX } from "preact";
import { rampPosition } from "../canvas/colors";
import { t } from "../i18n";
import type { Site } from "../source";
import { scale, selectedToken } from "../state";
import { streamWords, visibleToken } from "./tokens";
import type { Weights } from "./voice_data";

export const MOST_LINES = 64; // tokens; longer texts are shown as chips only
const STEP = 22;
const [LEFT, RIGHT, WIDTH, SQUARE] = [130, 300, 460, 12];

export function VoiceLines(props: { item: Site; groups: Weights[]; query: number | null; onHover: (index: number | null) => void }): JSX.Element {
  const { item, groups, query } = props;
  const words = { query: streamWords(item.queryStream).slice(0, item.numQueries), key: streamWords(item.keyStream).slice(0, item.numKeys) };
  const y = (index: number) => index * STEP + STEP / 2 + 2;
  const strength = (weight: number) => rampPosition(weight, scale.value);
  const hue = (number: number) => (groups.length > 1 ? `hue-${number === 0 ? "a" : "b"}` : "hue-own");
  return (
    <svg class="lines voice-lines" viewBox={`0 0 ${WIDTH} ${Math.max(words.query.length, words.key.length) * STEP + 6}`} role="img" aria-label={t("text.lines")}>
      {query !== null &&
        groups.flatMap(({ to }, number) =>
          Array.from(to ?? [], (weight, key) => {
            if (weight < 0.01) return null;
            const shift = (number - (groups.length - 1) / 2) * 4;
            const [from, end] = [y(query) + shift, y(key) + shift];
            return <path key={`${number} ${key}`} class={hue(number)} d={`M${LEFT} ${from}C${LEFT + 80} ${from} ${RIGHT - 80} ${end} ${RIGHT} ${end}`} stroke-opacity={strength(weight)} stroke-width={1 + 3 * weight} />;
          }),
        )}
      {words.query.map((word, index) => (
        <text
          key={`q${index}`}
          class={`token-text ${query === index ? "chosen" : ""}`}
          x={LEFT - 8}
          y={y(index) + 4}
          text-anchor="end"
          onMouseEnter={() => props.onHover(index)}
          onMouseLeave={() => props.onHover(null)}
          onClick={() => (selectedToken.value = selectedToken.value === index ? null : index)}
        >
          {visibleToken(word)}
        </text>
      ))}
      {words.key.map((word, index) => (
        <g key={`k${index}`}>
          {groups.map(({ to }, number) => (
            <rect key={number} class={hue(number)} x={RIGHT + 4 + number * (SQUARE + 2)} y={y(index) - SQUARE / 2} width={SQUARE} height={SQUARE} fill-opacity={strength(to?.[index] ?? 0)} />
          ))}
          <text class="token-text key" x={RIGHT + 12 + groups.length * (SQUARE + 2)} y={y(index) + 4}>
            {visibleToken(word)}
          </text>
        </g>
      ))}
    </svg>
  );
}
