"""Generate text or token ids from prompts: complete outputs (`generate`) or as they arrive
(`stream`); and classify by one pass (`classify`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import RandomStream
from ...util.errors import SequenceTooLong, SpecError, pluralise
from ..transformer import Transformer
from .decoding_config import DEFAULT_DECODING, MIN_TEMPERATURE, DecodingConfig, check_decoding
from .decoding_state import (
    DecodingState,
    TokenChooser,
    TokenHistory,
    check_prompt_length,
    check_token_count,
    choose_tokens,
    eval_mode,
    max_positions,
    pad_left,
    require_language_model,
    run_beam_search,
    run_decode_steps,
)
from .text_output import Completion, IncrementalDetokenizer, load_tokenizers

STEPS_FINISHED = object()  # marks the end of the iterator of decode steps


class GenerationOutput(NamedTuple):
    """One generated output: its ids, its text if the prompt was text, and its score if beams were
    searched.
    """

    ids: list[int]
    text: str | None = None
    score: float | None = None


def generate(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    seed: int | None = None,
) -> Any:
    """Return the model's continuation of a prompt: new ids for ids, text for text, a list for a
    list of prompts.

    A decoder continues the prompt; an encoder-decoder reads it as its source. Ids are used as they
    are; text is encoded and surrounded by the ids that `model.usage` asks for (`before`, `behind`).
    An output stops before an end id, which is not part of it. Below temperature 1e-5 every token is
    the most likely one, else tokens are sampled: row n of a batch uses random stream n of the seed.
    With `config=DecodingConfig(beams=..., best=...)` and `best` above 1 each output is a list, best
    first.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "gpt2",
    ...     "n_embd": 8,
    ...     "n_head": 2,
    ...     "n_layer": 1,
    ...     "vocab_size": 11,
    ...     "n_positions": 8,
    ... }
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> first, second = generate(net, [[3, 1, 4], [1]], max_new_tokens=5)
    >>> len(first), generate(net, [1], max_new_tokens=5) == second
    (5, True)
    >>> generate(net, [3, 1, 4], max_new_tokens=9)
    Traceback (most recent call last):
    ValueError: 3 tokens and 9 new are 3 more than the 8 positions of gpt2 can take; ask for at most
    6 new...
    """
    generator = TextGenerator.from_options(model, max_new_tokens, temperature, config)
    prompts = parse_prompts(model, ids_or_text)
    outputs = generator.answers(
        prompts, make_random_streams(seed, len(prompts.rows)) if generator.temperature else ()
    )
    results = list[Any]()
    for best in outputs:
        values = [output.text if prompts.kind == "text" else output.ids for output in best]
        results.append(values if config.best > 1 else values[0])
    return results[0] if prompts.form == "alone" else results


def stream(
    model: Transformer,
    ids_or_text: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    config: DecodingConfig = DEFAULT_DECODING,
    seed: int | None = None,
) -> Iterator[Any]:
    """Iterate over the output of `generate` for one prompt as it arrives: ids, or pieces of text
    that are final.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "gpt2",
    ...     "n_embd": 8,
    ...     "n_head": 2,
    ...     "n_layer": 1,
    ...     "vocab_size": 11,
    ...     "n_positions": 8,
    ... }
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> list(stream(net, [3, 1, 4], max_new_tokens=5)) == generate(net, [3, 1, 4], max_new_tokens=5)
    True
    """
    generator = TextGenerator.from_options(model, max_new_tokens, temperature, config)
    prompts = parse_prompts(model, ids_or_text)
    if prompts.form == "together":
        raise ValueError(
            f"cannot stream {len(prompts.rows)} prompts at once; give one, or call generate"
        )
    if config.beams > 1:
        raise SpecError(
            f"cannot stream beams={config.beams}: the best is only known at the end; call generate"
        )
    return generator.pieces(prompts, make_random_streams(seed, 1) if generator.temperature else ())


def make_random_streams(seed: int | None, count: int) -> list[RandomStream]:
    """Return one random stream per row; without a seed, the seed comes from torch's global
    generator.

    >>> [row.number for row in make_random_streams(7, 2)]
    [0, 1]
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise SpecError(
            f"cannot seed {pluralise(count, 'row')} with seed={seed!r}; give an integer"
        )
    return [RandomStream(seed, n) for n in range(count)]


@dataclass(frozen=True)
class TextGenerator:
    """A model and its decoding options."""

    net: Transformer
    count: int
    temperature: float
    how: DecodingConfig

    @staticmethod
    def from_options(
        net: Transformer,
        max_new_tokens: int,
        temperature: float,
        config: DecodingConfig,
    ) -> TextGenerator:
        """Check the options and return the generator."""
        if not isinstance(net, Transformer):
            raise ValueError(
                f"model is of type {type(net).__name__}; give what hw.build or hw.load returned"
            )
        check_decoding(config, temperature, require_language_model(net.spec))
        check_token_count(max_new_tokens)
        temperature = 0.0 if temperature < MIN_TEMPERATURE else temperature
        return TextGenerator(net, max_new_tokens, temperature, config)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that an output stops before."""
        return self.how.ends(self.net.usage.eos)

    def answers(
        self, prompts: PromptBatch, streams: Sequence[RandomStream] = ()
    ) -> list[list[GenerationOutput]]:
        """Return the outputs for each prompt, best first."""
        completions = [self.answer(prompts.kind, row) for row in prompts.rows]
        with eval_mode(self.net):
            state = self._start_decoding(prompts)
            if self.how.beams > 1:
                return self._beam_search(state, prompts)
            for _ in run_decode_steps(
                state, self._make_chooser(state, streams), completions, self.count
            ):
                pass
        return [[_make_output(completion, prompts.kind)] for completion in completions]

    def pieces(self, prompts: PromptBatch, streams: Sequence[RandomStream] = ()) -> Iterator[Any]:
        """Iterate over the output for the first prompt as it arrives."""
        completion = self.answer(prompts.kind, prompts.rows[0])
        with eval_mode(self.net):
            state = self._start_decoding(prompts)
        return self._iter_pieces(
            completion,
            prompts.kind,
            run_decode_steps(state, self._make_chooser(state, streams), [completion], self.count),
        )

    def _iter_pieces(
        self, completion: Completion, kind: str, steps: Iterator[None]
    ) -> Iterator[Any]:
        while True:
            # only during the step: between steps the caller may use the model
            with eval_mode(self.net):
                last = next(steps, STEPS_FINISHED)
            if kind == "ids":
                yield from completion.take_new_ids()
            elif piece := completion.take_new_text():
                yield piece
            if last is STEPS_FINISHED:
                return

    def _start_decoding(self, prompts: PromptBatch) -> DecodingState:
        """Prefill the prompts, or the decoder's start ids with the encoded prompts as source."""
        net = self.net
        device = next(net.parameters()).device
        ids, sequence = pad_left(prompts.rows, device)
        source = None
        if net.spec.kind == "encoder-decoder":
            start_ids = get_decoder_start_ids(net)
            source = net.encode(ids, sequence=sequence)
            ids, sequence = torch.tensor([start_ids] * len(ids), device=device), None
        return DecodingState(
            net,
            ids,
            max_new_tokens=self.count,
            sequence=sequence,
            encoder_output=source,
            compile=self.how.compile,
        )

    def _make_chooser(self, state: DecodingState, streams: Sequence[RandomStream]) -> TokenChooser:
        """Return a function that chooses the next tokens; each row samples from the stream of its
        prompt.
        """

        def choose(logits: Tensor, past: TokenHistory) -> Tensor:
            row_streams = [streams[row] for row in state.rows] if streams else ()
            return choose_tokens(
                logits, past, temperature=self.temperature, config=self.how, streams=row_streams
            )

        return choose

    def answer(self, kind: str, prompt: list[int]) -> Completion:
        """Return an empty completion. For a prompt of ids, text is decoded only if there are stop
        texts.
        """
        if kind == "ids" and not self.how.words:
            return Completion(self.ends)
        context_ids = prompt if self.net.spec.kind == "decoder" else ()
        detokenizer = IncrementalDetokenizer(load_tokenizers(self.net)[1], context_ids)
        return Completion(self.ends, self.how.words, detokenizer)

    def _beam_search(
        self, state: DecodingState, prompts: PromptBatch
    ) -> list[list[GenerationOutput]]:
        ends = self.ends
        stops = self.how.words
        tokenizer = load_tokenizers(self.net)[1] if stops else None

        def is_finished(ids: Sequence[int]) -> bool:
            return ids[-1] in ends or (
                tokenizer is not None and any(stop in tokenizer.text(ids) for stop in stops)
            )

        hypotheses = run_beam_search(state, self.how, ends, is_finished)
        outputs = list[list[GenerationOutput]]()
        for best, row in zip(hypotheses, prompts.rows, strict=True):
            outputs.append([])
            for hypothesis in best:
                completion = self.answer(prompts.kind, row)
                for token in hypothesis.ids:
                    completion.take(token)
                completion.close()
                output = _make_output(completion, prompts.kind)
                outputs[-1].append(output._replace(score=hypothesis.value))
        return outputs


def _make_output(completion: Completion, kind: str) -> GenerationOutput:
    return GenerationOutput(completion.ids, completion.text if kind == "text" else None)


class Prediction(NamedTuple):
    """A class or token name and its probability."""

    name: str
    share: float


def classify(
    net: Transformer, inputs: Sequence[str] | Tensor, sequence: SequenceInfo | None = None
) -> list[list[Prediction]]:
    """Return the classes of each input, most likely first, from the model's first output head.

    Inputs are texts, or a tensor that the model reads: ids, or pixels or frames prepared by
    `scale_inputs`.

    >>> import headwise as hw
    >>> from headwise import model_spec as bp
    >>> stack = bp.StackSpec.from_blocks("encoder", 3, [], embedding=bp.EmbeddingSpec(5))
    >>> net = hw.build(
    ...     bp.ModelSpec("small", "encoder", (stack,), (bp.OutputHeadSpec("classes", 2, "mean"),)),
    ...     seed=0,
    ... )
    >>> net.usage = hw.ProcessorSpec(labels=("cat", "dog"))
    >>> [likeliest, other] = classify(net, torch.tensor([[3, 1, 4]]))[0]
    >>> sorted([likeliest.name, other.name]), round(likeliest.share + other.share, 6)
    (['cat', 'dog'], 1.0)
    """
    names = require_class_names(net)
    device = next(net.parameters()).device
    if not isinstance(inputs, Tensor):
        inputs, sequence = pad_left([encode_text(net, text) for text in inputs], device)
    if sequence is not None:
        sequence = sequence.to(device)
    with eval_mode(net):
        shares = net(inputs.to(device), sequence=sequence).float().softmax(-1)
    ranked = list[list[Prediction]]()
    for row in shares.tolist():
        predictions = [Prediction(*pair) for pair in zip(names, row, strict=True)]
        ranked.append(sorted(predictions, key=lambda one: -one.share))
    return ranked


def require_class_names(net: Transformer) -> tuple[str, ...]:
    """Return the class names; raise if the model has none or its first output
    head is not pooled.
    """
    spec = net.spec
    names = net.usage.labels
    if not spec.heads or spec.heads[0].at == "each":
        raise SpecError(
            f"the first output head of {spec.name} is not pooled over the row; give a classifier"
        )
    if not spec.heads[0].outputs:
        fact = (
            f"{spec.name} has no classes: it gives one vector for each text, without words or "
            "labels for it"
        )
        raise SpecError(
            f"{fact}; see its heads with `headwise view` or `headwise heads`, or give a "
            "fine-tuned model"
        )
    if len(names) != spec.heads[0].outputs:
        fact = f"{spec.name} has {spec.heads[0].outputs} classes but {len(names)} names"
        raise SpecError(f'{fact}; set net.usage = hw.ProcessorSpec(labels=("cat", "dog"))')
    return names


def scale_inputs(net: Transformer, values: Any) -> Tensor:
    """Normalise pixels [n, height, width, channels] in 0..1, or frames [n, time, features], as in
    training.

    >>> import headwise as hw
    >>> from headwise import model_spec as bp
    >>> patches = bp.EmbeddingSpec(patches=bp.PatchSpec(1, 1, 2, 2, channels=1))
    >>> net = hw.build(
    ...     bp.ModelSpec(
    ...         "tiny", "vision", (bp.StackSpec.from_blocks("encoder", 3, [], embedding=patches),)
    ...     )
    ... )
    >>> net.usage = hw.ProcessorSpec(mean=(0.5,), std=(0.25,))
    >>> scale_inputs(net, np.array([[[[0.5], [1.0]], [[0.75], [0.0]]]])).tolist()
    [[[[0.0, 2.0], [1.0, -2.0]]]]
    """
    mean, deviation = (np.asarray(statistic) for statistic in (net.usage.mean, net.usage.std))
    num_channels = values.shape[-1]
    if len(mean) != num_channels:
        fact = f"{net.spec.name} normalises {len(mean)} channels, but the input has {num_channels}"
        raise SpecError(
            f"{fact}; give such an input, or set net.usage = hw.ProcessorSpec(mean=..., std=...)"
        )
    scaled = torch.from_numpy(((values - mean) / deviation).astype(np.float32))
    return scaled.movedim(-1, 1).contiguous() if scaled.dim() == 4 else scaled


# --- Prompts --------------------------------------------------------------------------------------

PROMPT_HELP = "give text, ids such as [3, 1, 4], or a list of either"


class PromptBatch(NamedTuple):
    """The ids of each prompt; `kind` is "text" or "ids"; `form` is "alone" for one prompt,
    "together" for a list.
    """

    rows: list[list[int]]
    kind: str
    form: str


def parse_prompts(net: Transformer, prompts: Any) -> PromptBatch:
    """Return the prompts as ids.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     )
    ... )
    >>> parse_prompts(net, [[3, 1, 4], [1]])
    PromptBatch(rows=[[3, 1, 4], [1]], kind='ids', form='together')
    """
    require_language_model(net.spec)
    if isinstance(prompts, str):
        return PromptBatch([encode_text(net, prompts)], "text", "alone")
    items = _to_lists(prompts)
    if not items:
        raise ValueError(f"the prompt is empty; {PROMPT_HELP}, with at least one token")
    if all(isinstance(item, str) for item in items):
        return PromptBatch([encode_text(net, item) for item in items], "text", "together")
    form = "alone" if not any(isinstance(item, list) for item in items) else "together"
    rows = [_check_id_row(row, net) for row in ([items] if form == "alone" else items)]
    return PromptBatch(rows, "ids", form)


def encode_text(net: Transformer, text: str, parse_special: bool | None = None) -> list[int]:
    """Return the ids of a text, surrounded by `usage.prefix_ids` and `usage.suffix_ids`.

    `parse_special` overrides that of the model's `ProcessorSpec`.
    """
    tokenizer, _ = load_tokenizers(net)
    usage = net.usage
    ids = tokenizer.ids(text, parse_special)
    return _check_prompt([*usage.prefix_ids, *ids, *usage.suffix_ids], net)


def encode_prompt(net: Transformer, text: str, max_new_tokens: int) -> list[int]:
    """Return the ids of a text; raise if `max_new_tokens` more do not fit into the model's
    positions.
    """
    row = encode_text(net, text)
    if net.spec.kind != "encoder-decoder":
        check_prompt_length(net.spec, len(row), max_new_tokens)
    return row


def get_decoder_start_ids(net: Transformer) -> tuple[int, ...]:
    """Return the ids that start the output of an encoder-decoder."""
    if not net.usage.bos:
        fact = f"{net.spec.name} has no decoder start ids"
        raise SpecError(f"{fact}; set net.usage = hw.ProcessorSpec(bos=(1,), eos=(2,))")
    return net.usage.bos


def _check_id_row(row: Any, net: Transformer) -> list[int]:
    if not isinstance(row, list):
        raise ValueError(f"{row!r} is not a list of ids; {PROMPT_HELP}")
    wrong = [item for item in row if not isinstance(item, int) or isinstance(item, bool)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in a prompt is not an id; {PROMPT_HELP}")
    return _check_prompt(row, net)


def _check_prompt(row: list[int], net: Transformer) -> list[int]:
    """Raise if the first stack cannot read the prompt."""
    first = net.spec.stacks[0]
    vocab_size = first.embedding.tokens if first.embedding else 0
    if not row:
        raise ValueError("the prompt is empty; give at least one token")
    wrong = [token_id for token_id in row if not 0 <= token_id < vocab_size]
    if wrong:
        raise ValueError(
            f"the prompt holds the id {wrong[0]}, but {first.name} knows {vocab_size}; give "
            f"0..{vocab_size - 1}"
        )
    limit = max_positions(first)
    if limit is not None and len(row) > limit:
        fact = (
            f"a prompt of {pluralise(len(row), 'token')} is {len(row) - limit} longer than the "
            f"{limit} positions"
        )
        raise SequenceTooLong(f"{fact} of {net.spec.name}; shorten it")
    return row


def _to_lists(prompts: Any) -> list[Any]:
    """Convert tensors and sequences to lists, at most two levels deep."""
    if isinstance(prompts, Tensor):
        if (
            prompts.is_floating_point()
            or prompts.is_complex()
            or prompts.dtype == torch.bool
            or prompts.dim() not in (1, 2)
        ):
            raise ValueError(
                f"the prompt is {prompts.dtype} {list(prompts.shape)}; give integer ids, [tokens] "
                "or [rows, tokens]"
            )
        return prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise ValueError(f"the prompt is of type {type(prompts).__name__}; {PROMPT_HELP}")
    return [
        _to_lists(item) if isinstance(item, (Tensor, list, tuple, range)) else item
        for item in prompts
    ]
