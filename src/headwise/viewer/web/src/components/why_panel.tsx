// Why a query looks at a key: what earlier heads, MLPs and embeddings add to the score of the kept cell.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { format, say, t, type TextKey } from "../i18n";
import { isGrouped } from "../actions";
import type { Site } from "../source";
import { doc, headName, headPath, lockedCell, selectHead, sites, source, useAnswer } from "../state";
import { Button, Panel, PlainTable } from "./basics";
import { tokenName } from "./tokens";

interface Why {
  total: number;
  writers: Record<Side, string[]>;
  values: Record<Side, ArrayLike<number>>;
}

type Side = "query" | "key";
const SIDES: Side[] = ["query", "key"];
const HEAD = /^L(\d+)H(\d+)(?:\.([qkv]))?$/;
const MLP = /^M(\d+)$/;

/** The one pair of the kept cell; null without one, or if the cell covers several. */
function keptPair(): { query: number; key: number } | null {
  const cell = lockedCell.value;
  return cell && cell.q1 - cell.q0 === 1 && cell.k1 - cell.k0 === 1 ? { query: cell.q0, key: cell.k0 } : null;
}

export function WhyPanel({ item }: { item: Site }): JSX.Element | null {
  const canRun = source.isLive && doc.value?.capabilities.measure.possible === true && !isGrouped.value;
  const asked = useSignal(""); // the cell that the button was pressed for
  const pair = keptPair();
  const isWanted = () => asked.value === JSON.stringify([keptPair(), headPath("why")]);
  const { found, error } = useAnswer(
    () => (canRun && isWanted() ? headPath("why", { ...keptPair()! }) : null),
    ({ arrays, fields }): Why => ({ total: fields["total"], writers: fields["writers"], values: { query: arrays["query"]!.data, key: arrays["key"]!.data } }),
  );
  if (!canRun || !pair) return null;
  return (
    <Panel title={t("whyKey.title")}>
      {!isWanted() ? (
        <Button title={t("whyKey.hint")} onClick={() => (asked.value = JSON.stringify([pair, headPath("why")]))}>{t("whyKey.show")}</Button>
      ) : error.value ? (
        <p class="t3 sm">{say(error.value.fact)} {say(error.value.remedy)}</p>
      ) : found.value ? (
        <WhyTables why={found.value} names={{ query: tokenName(item.queryStream, pair.query), key: tokenName(item.keyStream, pair.key) }} />
      ) : (
        <p class="t3">{t("state.computing")}</p>
      )}
    </Panel>
  );
}

function WhyTables({ why, names }: { why: Why; names: Record<Side, string> }): JSX.Element {
  return (
    <div class="stack" data-testid="why">
      <p class="sm t2">{t("whyKey.total", { total: format(why.total) })}</p>
      {SIDES.map((side) => (
        <PlainTable
          key={side}
          titles={[t(`whyKey.${side}` as TextKey, { token: names[side] }), `#${t("whyKey.part")}`]}
          rows={why.writers[side].map((writer, index) => [<NodeName name={writer} />, signed(why.values[side][index]!)])}
        />
      ))}
      <p class="t3 xs">{t("whyKey.explain")}</p>
    </div>
  );
}

export function signed(value: number): string {
  return `${value < 0 ? "−" : "+"}${format(Math.abs(value))}`;
}

/** A part of the model by its short name: a head, perhaps one of its inputs, or the MLP of a layer. */
export function readNode(name: string): { site: number; head: number; input: string; mlp: number } {
  const [, layer, head, input = ""] = HEAD.exec(name) ?? [];
  const [, mlp] = MLP.exec(name) ?? [];
  return { site: layer === undefined ? -1 : sites.value.findIndex((one) => one.layer === Number(layer)), head: Number(head), input, mlp: mlp === undefined ? -1 : Number(mlp) };
}

/** The name of a part of the model; that of a head selects it. */
export function NodeName({ name }: { name: string }): JSX.Element {
  const { site, head, input, mlp } = readNode(name);
  if (mlp >= 0) return <span>{t("whyKey.mlp", { layer: mlp })}</span>;
  if (site < 0) return <span>{t(`whyKey.${name.replace(" ", "")}` as TextKey)}</span>;
  return <button class="link mono" type="button" onClick={() => selectHead(site, head)}>{headName(site, head)}{input && ` · ${input}`}</button>;
}
