// Heads as switches, layer by layer: in the Lab, and in the plan of a pruning.

import { useComputed } from "@preact/signals";
import type { JSX } from "preact";
import type { Site } from "../source";
import { headName, selectedHead, selectedSite, sites } from "../state";

/** What switches show and do. The functions must stay the same, so that a click renders only the layers that it changes. */
interface Switching {
  isOff: (site: number, head: number) => boolean;
  onToggle: (site: number, head: number) => void;
  canSwitch: (item: Site) => boolean;
}

export function SwitchGrid({ label, ...switching }: Switching & { label: string }): JSX.Element {
  return (
    <div class="switches" role="group" aria-label={label}>
      {sites.value.map((item, number) => (
        <SwitchRow key={item.name} item={item} number={number} {...switching} />
      ))}
    </div>
  );
}

function SwitchRow({ item, number, isOff, onToggle, canSwitch }: Switching & { item: Site; number: number }): JSX.Element {
  const chosen = useComputed(() => (selectedSite.value === number ? selectedHead.value : -1)).value;
  const states = useComputed(() => Array.from({ length: item.heads }, (_, head) => (isOff(number, head) ? "-" : "+")).join("")).value;
  return (
    <div class="switch-row">
      <span class="xs t3" title={item.name}>{headName(number, 0).split(" ")[0]}</span>
      {Array.from(states, (state, head) => (
        <button key={head} type="button" role="switch" class={`switch ${chosen === head ? "current" : ""}`} aria-checked={state === "+"} aria-label={headName(number, head)} aria-disabled={!canSwitch(item)} onClick={() => canSwitch(item) && onToggle(number, head)}>{head}</button>
      ))}
    </div>
  );
}
