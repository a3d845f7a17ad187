// Lines to copy: a command, code, or a recipe.

import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { t } from "../i18n";
import { announcement } from "../state";

export function CopyCode({ text, testId }: { text: string; testId: string }): JSX.Element {
  return (
    <div class="command">
      <code data-testid={testId} tabIndex={0}>
        {text}
      </code>
      <CopyButton text={text} />
    </div>
  );
}

export function CopyButton({ text, label }: { text: string; label?: string }): JSX.Element {
  const isCopied = useSignal(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      announcement.value = t("copy.refused");
      return;
    }
    isCopied.value = true;
    setTimeout(() => (isCopied.value = false), 2000);
  };
  return (
    <button class="btn" type="button" onClick={() => void copy()}>
      {isCopied.value ? t("prune.copied") : (label ?? t("prune.copy"))}
    </button>
  );
}
