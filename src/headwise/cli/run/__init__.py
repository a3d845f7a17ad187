"""`headwise run`: run a trained model on a text, an image, or every line of stdin.

`main` loads the model. `answers` generates text or classifies, and reads lines and images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arguments import TokenizerOptions, attach_named_tokenizer, load_on_device
from ..options import (
    Count,
    ModelFolder,
    NotNegative,
    Positive,
    Share,
    UsageError,
    options,
)

if TYPE_CHECKING:
    from ...models import Transformer


@options
class RunOptions(TokenizerOptions):
    """Run a trained model: continue or translate a text, or classify a text or an image. Without
    TEXT, answers every line of stdin with one line, in order.

    MODEL  a folder, a Hub id (org/name, org/name@revision), or FILE.py:FACTORY
    TEXT  a text, or an image file: .png, .jpg, .pgm or .npy (default: lines of stdin)
    --max-new-tokens COUNT  generate at most this many tokens (default: 64)
    --temperature T  sampling temperature; 0 takes the likeliest token (default: 0)
    --top-k K  sample from the K likeliest tokens; for classes, print the K likeliest
    --top-p SHARE  nucleus sampling: sample from the likeliest tokens with this total probability
    --beams COUNT  beam search with this many beams (default: 1)
    --stop TEXT  stop before this text; repeatable
    --seed INT  random seed; line n samples from stream n of it (default: a random seed)
    --batch COUNT  lines per batch
    --json  print one JSON document instead of text

    details of decoding:
    --min-p SHARE  sample from tokens at least this share as likely as the likeliest
    --repetition PENALTY  penalty for tokens that were generated before; 1 is none (default: 1)
    --length-penalty POWER  divide the score of a beam by its length to this power (default: 1)
    --best COUNT  print this many of the beams, with their scores (default: 1)

    examples:
    headwise run runs/dates '<zh>20 November 2026'
    headwise run runs/dates --beams 4 < sentences.txt
    """

    command = "run"
    model: ModelFolder
    text: str | None = None
    max_new_tokens: Count | None = None
    temperature: NotNegative | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    beams: Count | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    batch: Count = 32
    json: bool = False
    min_p: Share | None = None
    repetition: Positive | None = None
    length_penalty: float | None = None
    best: Count | None = None

    def check(self) -> None:
        """Refuse impossible options before the model is loaded."""
        if (self.best or 1) > (self.beams or 1):
            fact = f"--best {self.best} is more than --beams {self.beams or 1}"
            raise UsageError(f"{fact}; give --beams {self.best}")


# Options that set fields of hw.DecodingConfig.
DECODING_FIELDS = (*("top_k", "top_p", "beams", "min_p", "repetition", "length_penalty", "best"),)
# Options that apply to every kind of model, by their fields.
COMMON_OPTIONS = ("model", "text", "batch", "device", "dtype", "tokenizer", "json", "top_k")


def main(argv: list[str]) -> int:
    """Run the model on TEXT or on every input line; return 2 if a line failed."""
    args = RunOptions.parse(argv)
    model = load_model(args)
    kind = task_kind(model)
    if kind != "texts":
        for name, flag in args.options_set.items():
            if name not in COMMON_OPTIONS:
                raise UsageError(
                    f"{flag} is for text generation, but {model.spec.name} classifies; leave it out"
                )
    from . import answers

    return answers.answer(model, args, kind)


def task_kind(model: Transformer) -> str:
    """Return the kind of task: "texts" (generation) or "classes" (classification)."""
    from ...util.errors import SpecError

    spec = model.spec
    if not spec.heads:
        raise SpecError(
            f"{spec.name} has no output head; train it on a task, or give another model"
        )
    if spec.heads[0].at != "each":
        return "classes"
    if spec.kind == "encoder":
        raise SpecError(
            f"{spec.name} has an output for each token of a text, and neither generates nor "
            "classifies; call hw.load(folder)(ids) in Python"
        )
    return "texts"


def load_model(args: RunOptions) -> Transformer:
    """Load the model onto its device, with the tokenizer of --tokenizer."""
    from ...hub import load

    model = load_on_device(load, args.model, args)
    attach_named_tokenizer(model, args)
    return model
