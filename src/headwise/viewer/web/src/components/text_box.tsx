// The text that the model reads, always visible: Enter reads it, and the heads follow.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { JSX } from "preact";
import { runText, shownTexts } from "../actions";
import { say, t } from "../i18n";
import { Form } from "./basics";
import { doc, jobError, source } from "../state";

/** Whether an encoder-decoder model writes the target itself: for another source, unless a target was typed. */
export function chooseTarget(shown: { source: string; text: string }, typed: { source: string; text: string }): string {
  return typed.source !== shown.source && typed.text === shown.text ? "" : typed.text;
}

export function TextBox(): JSX.Element {
  const typed = useSignal(shownTexts());
  useSignalEffect(() => {
    typed.value = shownTexts(); // another text was opened
  });
  const capability = doc.value?.capabilities.text;
  const canRun = source.isLive && capability?.possible === true;
  const hasSource = "source" in (doc.value?.streams ?? {});
  const shown = shownTexts();
  const isChanged = typed.value.text !== shown.text || typed.value.source !== shown.source;
  const words = (stream: string) => {
    const row = doc.value?.streams[stream]?.[0];
    return row?.text || row?.words.join(" ");
  };
  const submit = () => {
    const text = chooseTarget(shown, typed.value);
    if (canRun && (text + typed.value.source).trim()) void runText(text, hasSource ? typed.value.source : "");
  };
  const box = (name: "source" | "text", label: string) => (
    <textarea
      rows={1}
      aria-label={label}
      title={canRun ? t("box.hint") : say(capability?.reason || "")}
      placeholder={name === "text" && hasSource ? t("box.target") : words(name) || label}
      readOnly={!canRun}
      value={name === "text" ? chooseTarget(shown, typed.value) : typed.value.source}
      onInput={(event) => (typed.value = { ...typed.value, [name]: event.currentTarget.value })}
      onKeyDown={(event) => {
        if (event.key === "Escape") {
          typed.value = shown;
          jobError.value = null;
        }
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        event.currentTarget.blur(); // the box becomes one line now, not when the next tap is on its way
        submit();
      }}
    />
  );
  return (
    <Form class="text-box" onSend={() => submit()}>
      {hasSource && box("source", t("box.source"))}
      {hasSource && <span aria-hidden="true">→</span>}
      {box("text", t(hasSource ? "box.target" : "box.text"))}
      {canRun && <button class={`btn ${isChanged ? "primary" : ""}`} type="submit">{t("box.run")}</button>}
    </Form>
  );
}
