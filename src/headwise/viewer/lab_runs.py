"""Runs of the open model on the open text with some heads ablated, for the jobs of the Lab.

A recipe repeats a run: which heads are ablated and how, as JSON, as Python lines, and as a command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .model_actions import read_text
from .open_model import AblatedHead, OpenModel
from .surgery_actions import UNKNOWN_MODEL, list_heads

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..inspect.ablation import HeadPatch, HeadRef
    from ..inspect.hooks import SiteModule
    from ..inspect.model_inputs import ModelInputs
    from ..traces import Trace


MAX_SEED = 2**31


class AblationOptions(NamedTuple):
    """At which tokens of each stream heads are ablated (no entry: all), the text of "resample", and
    the random seed.

    Without a text, "resample" takes each head's output for the tokens of the open text in another
    order.
    """

    tokens: Mapping[str, tuple[int, ...]] = {}
    resample_text: str = ""
    seed: int = 0


DEFAULT_OPTIONS = AblationOptions()


class Outputs(NamedTuple):
    """The output of one run: logits [T, vocabulary], or vectors [T, width] of a model without a
    token head.
    """

    values: Tensor
    are_logits: bool


def read_options(model: OpenModel, arguments: Mapping[str, Any]) -> AblationOptions:
    """Read `tokens` {stream: [positions]}, `resampleText` and `seed` of a job."""
    streams, seed = model.get_recorded().streams, arguments.get("seed", 0)
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed={seed!r} is no seed; give an integer in 0..{MAX_SEED - 1}")
    entries = arguments.get("tokens") or {}
    if not isinstance(entries, Mapping):
        raise ValueError("tokens must map the name of a stream to a list of positions")
    tokens: dict[str, tuple[int, ...]] = {}
    for name, positions in entries.items():
        if name not in streams or not isinstance(positions, list):
            raise ValueError(
                f"tokens of {name!r} cannot be chosen; the streams are {', '.join(streams)}"
            )
        count = len(streams[name][0].ids)
        if wrong := [
            place for place in positions if type(place) is not int or not 0 <= place < count
        ]:
            raise ValueError(
                f"the {name} has {count} tokens, none at {wrong[0]!r}; give 0 to {count - 1}"
            )
        if positions:
            tokens[name] = tuple(sorted(set(positions)))
    return AblationOptions(tokens, read_text(arguments, "resampleText"), seed)


def id_arguments(net: nn.Module) -> dict[str, str]:
    """The argument of the model that takes the token ids of each stream."""
    from ..inspect.model_inputs import is_encoder_decoder
    from ..models import Transformer

    if isinstance(net, Transformer):
        return {"text": "x", "source": "source"}
    return (
        {"text": "decoder_input_ids", "source": "input_ids"}
        if is_encoder_decoder(net)
        else {"text": "input_ids"}
    )


def id_inputs(net: nn.Module, trace: Trace) -> dict[str, Tensor]:
    """The recorded token ids of a trace as arguments of a model."""
    import torch

    from ..inspect.model_inputs import get_device

    names, device = id_arguments(net), get_device(net)
    streams = trace.streams.items()
    ids = {
        names[name]: torch.tensor([list(rows[0].ids)], device=device)
        for name, rows in streams
        if rows and name in names
    }
    if not ids:
        raise ValueError("the open text has no token ids; capture a text on the page first")
    return ids


def find_token_decoder(net: nn.Module) -> Callable[[int], str]:
    """Turns ids into texts; a model without a tokenizer shows the ids."""
    from ..head_analysis.annotated_examples import ExampleReader
    from ..inspect.model_inputs import make_token_decoder
    from ..inspect.model_tokenizer import find_tokenizer
    from ..models import Transformer

    try:
        if isinstance(net, Transformer):
            return ExampleReader(net).token_decoders()["text"]
        tokenizer = find_tokenizer(net)
    except (ValueError, KeyError, OSError):
        return str
    return str if tokenizer is None else make_token_decoder(tokenizer)


def open_inputs(model: OpenModel) -> ModelInputs:
    """The inputs of the open text, from its recorded token ids."""
    from ..inspect.model_inputs import prepare_inputs

    net = model.get_model()
    return prepare_inputs(net, id_inputs(net, model.get_recorded()), 0)


class LabRuns:
    """The open model on the open text: its outputs with all heads, and with some ablated.

    A headwise model restarts at the first layer with an ablated head.
    """

    def __init__(self, model: OpenModel) -> None:
        from ..head_analysis.importance_methods import make_forward
        from ..inspect.attention_sites import find_attention

        self.net, self.inputs, self.trace = (
            model.get_model(),
            open_inputs(model),
            model.get_recorded(),
        )
        self.modules: list[SiteModule] = [
            one for one in find_attention(self.net) if one.site.ablate.possible
        ]
        self.forward = make_forward(self.net, self.modules, self.inputs)

    @property
    def heads(self) -> list[tuple[str, int]]:
        """The heads that can be ablated on this text, layer by layer."""
        counts = self.forward.head_counts
        return [
            (layer.name, head)
            for layer in self.trace.layers
            for head in range(counts.get(layer.name, 0))
        ]

    def all_heads(self) -> Outputs:
        """The outputs of the model as it is."""
        return self._read(self.forward.baseline_outputs)

    def without(
        self, heads: Sequence[AblatedHead], options: AblationOptions = DEFAULT_OPTIONS
    ) -> Outputs:
        """The outputs with these heads ablated."""
        return self.patched(self.make_patches(heads, options), options)

    def patched(self, patches: Mapping[HeadRef, HeadPatch], options: AblationOptions) -> Outputs:
        """The outputs with the outputs of these heads replaced, at the tokens of the options."""
        from ..inspect.ablation import OutputEditor

        if not patches:
            return self.all_heads()
        by_site: dict[str, dict[int, HeadPatch]] = {}
        for (site, head), patch in patches.items():
            by_site.setdefault(str(site), {})[int(head)] = patch
        editors = {
            site: OutputEditor(
                site, edited, options.tokens.get(self.trace.get_layer(site).query_stream)
            )
            for site, edited in by_site.items()
        }
        return self._read(self.forward.run_with_hooks(editors))

    def make_patches(
        self, heads: Sequence[AblatedHead], options: AblationOptions = DEFAULT_OPTIONS
    ) -> dict[HeadRef, HeadPatch]:
        """The replacement of every ablated head; means and the moments of noise are those over the
        open text.
        """
        from ..inspect.ablation import ConstantOutput, ScaledOutput
        from ..inspect.dataset_means import head_means, head_noise, head_outputs

        patches: dict[HeadRef, HeadPatch] = {
            (head.site, head.head): ScaledOutput(head.scale)
            for head in heads
            if head.mode == "zero"
        }
        batch = self.inputs.kwargs
        if refs := [(head.site, head.head) for head in heads if head.mode == "mean"]:
            patches |= {
                ref: ConstantOutput(value)
                for ref, value in head_means(self.net, [batch], refs).items()
            }
        if refs := [(head.site, head.head) for head in heads if head.mode == "noise"]:
            patches |= head_noise(self.net, [batch], refs, seed=options.seed)
        if refs := [(head.site, head.head) for head in heads if head.mode == "resample"]:
            other = self.resample_inputs(options)
            patches |= {
                ref: ConstantOutput(value)
                for ref, value in head_outputs(self.net, other, refs).items()
            }
        return patches

    def resample_inputs(self, options: AblationOptions) -> dict[str, torch.Tensor]:
        """Token ids of the same lengths as the open text: of another text, or its own tokens in
        another order.
        """
        import torch

        names = id_arguments(self.net)
        ids = {
            names[name]: rows[0].ids for name, rows in self.trace.streams.items() if name in names
        }
        if not options.resample_text:
            generator = torch.Generator().manual_seed(options.seed)
            return {
                name: torch.tensor([row])[:, torch.randperm(len(row), generator=generator)]
                for name, row in ids.items()
            }
        if len(ids) > 1:
            raise ValueError(
                "resample of an encoder-decoder model has no other text; leave it empty"
            )
        from ..inspect.model_inputs import prepare_inputs

        ((name, row),) = ids.items()
        other = prepare_inputs(self.net, [options.resample_text], 0).token_rows["text"][0].ids
        if len(other) < len(row):
            fact = f"the text of resample has {len(other)} tokens, the open text {len(row)}"
            raise ValueError(f"{fact}; give a longer one, or none")
        return {name: torch.tensor([list(other[: len(row)])])}

    def _read(self, result: Any) -> Outputs:
        """The outputs for the first text."""
        import torch

        from ..head_analysis.objectives import detect_head_objective, get_output_tensor

        logits = getattr(result, "logits", None)
        values = logits if isinstance(logits, torch.Tensor) else get_output_tensor(result)
        predicts = detect_head_objective(self.net) in ("next-token", "translation", "masked-token")
        has_tokens = values.dim() == 3
        return Outputs(
            (values[0] if has_tokens else values[:1]).double().cpu(), predicts and has_tokens
        )


def position_changes(before: Outputs, after: Outputs) -> Tensor:
    """The change of every position: KL(before || after) in nats for logits, 1 -
    cosine for vectors.
    """
    import torch.nn.functional as F

    if before.are_logits:
        old, new = before.values.log_softmax(-1), after.values.log_softmax(-1)
        return (old.exp() * (old - new)).sum(-1).clamp(min=0)
    return 1 - F.cosine_similarity(before.values, after.values, dim=-1)


# --- Recipes --------------------------------------------------------------------------------------

VERSION = 1


def describe_recipe(
    model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions
) -> dict[str, Any]:
    """The recipe with the Python lines that repeat it, and the command that removes the heads, ""
    if none does.
    """
    return {
        "version": VERSION,
        "model": model.name,
        "heads": [head._asdict() for head in heads],
        "tokens": {stream: list(positions) for stream, positions in options.tokens.items()},
        "resampleText": options.resample_text,
        "seed": options.seed,
        "python": format_python(model, heads, options),
        "command": format_prune_command(model, heads, options),
    }


def format_prune_command(
    model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions
) -> str:
    """`headwise prune` of these heads; "" unless all of them are ablated by zero, whole, and at all
    tokens.
    """
    if not heads or options.tokens or any(head.mode != "zero" or head.scale for head in heads):
        return ""
    named = list_heads([(head.site, head.head) for head in heads])
    target = model.target or UNKNOWN_MODEL
    return shlex.join(
        ["headwise", "prune", target, "--heads", *named, "--data", "texts.txt", "--out", "pruned"]
    )


def format_python(model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions) -> str:
    """Lines of Python that run the model on the open text, before and after the ablation."""
    if not heads:
        return ""
    net, patches = model.get_model(), _format_patches(heads, options)
    names, streams = id_arguments(net), model.get_recorded().streams
    ids = {names[stream]: list(rows[0].ids) for stream, rows in streams.items() if stream in names}
    lines = ["import torch", "import headwise as hw"]
    if any(head.mode == "zero" for head in heads):
        lines.append("from headwise.inspect.ablation import ScaledOutput")
    lines += _format_loading(model, net)
    lines.append(
        f"ids = {{{', '.join(f'{json.dumps(name)}: torch.tensor([{row}])' for name, row in ids.items())}}}"
    )
    if any(head.mode == "resample" for head in heads):
        lines += _format_resample_ids(options)
    groups = _group_by_tokens(model, heads, options)
    contexts: list[str] = []
    for number, (tokens, group) in enumerate(groups):
        lines += [
            "",
            f"patches_{number} = {{}}",
            *(f"patches_{number} |= {part}" for part in patches(group)),
        ]
        chosen = f", tokens={list(tokens)}" if tokens else ""
        contexts.append(f"hw.patch(net, patches_{number}{chosen})")
    lines += [
        "",
        "with torch.inference_mode():",
        "    before = net(**ids)",
        f"    with {', '.join(contexts)}:",
    ]
    return "\n".join([*lines, "        after = net(**ids)", ""])


def _format_loading(model: OpenModel, net: nn.Module) -> list[str]:
    """The lines that open the model."""
    from ..models import Transformer

    target = json.dumps(model.target or UNKNOWN_MODEL)
    if isinstance(net, Transformer):
        return [f"net = hw.load({target})"]
    return ["from headwise.viewer.model_targets import load_target", f"net = load_target({target})"]


def _format_resample_ids(options: AblationOptions) -> list[str]:
    """The lines that make the ids of "resample"."""
    if options.resample_text:
        return [
            "from headwise.inspect.model_inputs import prepare_inputs",
            (
                f"row = prepare_inputs(net, [{json.dumps(options.resample_text)}], "
                "0).token_rows['text'][0].ids"
            ),
            "other = {name: torch.tensor([list(row[: ids[name].shape[1]])]) for name in ids}",
        ]
    return [
        f"generator = torch.Generator().manual_seed({options.seed})",
        (
            "other = {n: x[:, torch.randperm(x.shape[1], generator=generator)] for n, x in "
            "ids.items()}"
        ),
    ]


def _format_patches(
    heads: Sequence[AblatedHead], options: AblationOptions
) -> Callable[[Sequence[AblatedHead]], list[str]]:
    """A function that gives the expressions of the patches of some heads."""

    def parts(group: Sequence[AblatedHead]) -> list[str]:
        lines: list[str] = []
        if scaled := [head for head in group if head.mode == "zero"]:
            items = ", ".join(
                f"({head.site!r}, {head.head}): ScaledOutput({head.scale})" for head in scaled
            )
            lines.append(f"{{{items}}}")
        calls = {
            "mean": "hw.head_means(net, [ids], {})",
            "noise": f"hw.head_noise(net, [ids], {{}}, seed={options.seed})",
            "resample": "hw.head_outputs(net, other, {})",
        }
        for mode, call in calls.items():
            if refs := [(head.site, head.head) for head in group if head.mode == mode]:
                lines.append(call.format(refs))
        return lines

    return parts


def _group_by_tokens(
    model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions
) -> list[tuple[tuple[int, ...], list[AblatedHead]]]:
    """The heads by the tokens at which they are ablated; () is all tokens."""
    trace = model.get_recorded()
    groups: dict[tuple[int, ...], list[AblatedHead]] = {}
    for head in heads:
        tokens = options.tokens.get(trace.get_layer(head.site).query_stream, ())
        groups.setdefault(tokens, []).append(head)
    return list(groups.items())
