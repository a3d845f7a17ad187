// The texts that show the class of the selected head best, with the weight on each token.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { cssRamp, rampPosition, themeVersion } from "../canvas/colors";
import { classWord, format, t } from "../i18n";
import { doc, headPath, isCheap, measures, scale, useAnswer } from "../state";
import { Panel } from "./basics";
import { isSpecial, visibleToken } from "./tokens";

interface HeadText {
  queries: string[];
  keys: string[];
  weights: Float32Array;
  places: Int32Array; // of the query with the largest weight on each key
}

export function HeadExamples(): JSX.Element | null {
  const { found } = useAnswer(
    () => (measures.value?.severalTexts && isCheap.value && doc.value?.capabilities.measure.possible ? headPath("examples") : null),
    ({ arrays, fields }) => ({
      name: fields["name"] as string,
      texts: fields["texts"].map(([queries, keys]: [string[], string[]], place: number): HeadText => ({ queries, keys, weights: arrays[`${place}.weights`]!.data as Float32Array, places: arrays[`${place}.queries`]!.data as Int32Array })) as HeadText[],
    }),
  );
  if (!found.value?.texts.length) return null;
  return (
    <Panel title={t("examples.title")}>
      <div class="stack" data-testid="examples">
        <p class="t3 sm">{t("examples.hint", { count: Math.min(doc.value!.texts.length, 12), name: classWord(found.value.name) })}</p>
        {found.value.texts.map((text, place) => (
          <Chips key={place} text={text} />
        ))}
      </div>
    </Panel>
  );
}

function Chips({ text }: { text: HeadText }): JSX.Element {
  const box = useRef<HTMLParagraphElement>(null);
  const [version, ramp] = [themeVersion.value, scale.value];
  useEffect(() => {
    text.weights.forEach((weight, key) => (box.current?.children[key] as HTMLElement).style.setProperty("background", cssRamp(rampPosition(weight, ramp) * 0.75)));
  }, [text, version, ramp]);
  return (
    <p class="example-text mono" ref={box}>
      {text.keys.map((word, key) => (
        <span key={key} class={isSpecial(word) ? "t3" : ""} title={t("examples.pair", { query: visibleToken(text.queries[text.places[key]!] ?? ""), key: visibleToken(word), weight: format(text.weights[key]!) })}>
          {visibleToken(word)}
        </span>
      ))}
    </p>
  );
}
