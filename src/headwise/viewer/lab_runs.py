"""Runs of the open model on the open text with some heads ablated, for the jobs of the Lab."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from .model_worker import HEADS, SEED, TOKENS, Pair, text
from .open_model import AblatedHead, OpenModel
from .surgery_actions import UNKNOWN_MODEL, list_heads

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..models import Transformer
    from ..observe.inspect.ablation import HeadPatch, HeadRef
    from ..observe.inspect.hooks import AttentionHook, SiteModule
    from ..observe.inspect.model_inputs import ModelInputs
    from ..observe.traces import Trace

MAX_COPIED_PARAMS = 300_000_000
# headwise copies of transformers models
_copies: WeakKeyDictionary[nn.Module, Transformer] = WeakKeyDictionary()
LASTING_MODES = ("zero", "mean", "noise")  # replacements that need no other tokens


class Ablation(NamedTuple):
    """Ablated heads, the tokens of each stream where they are ablated (no entry: all), the text of
    "resample", and the random seed.

    Without a text, "resample" takes each head's output for the tokens of the open text in another
    order.
    """

    heads: Sequence[AblatedHead] = ()
    tokens: Mapping[str, tuple[int, ...]] = {}
    resample_text: str = ""
    seed: int = 0

    @property
    def fits_other_texts(self) -> bool:
        """True if the same ablation is defined for texts of any length."""
        return not self.tokens and all(head.mode in LASTING_MODES for head in self.heads)

    @property
    def removes_heads(self) -> bool:
        """True if the ablation equals removing the weights of these heads."""
        return not self.tokens and all(
            head.mode == "zero" and not head.scale for head in self.heads
        )


ABLATION_FIELDS = {
    "heads": HEADS,
    "tokens": TOKENS,
    "resample_text": text(key="resampleText"),
    "seed": SEED,
}


class Outputs(NamedTuple):
    """Output of one run: logits [T, vocabulary], or vectors [T, width] of a model without a token
    head.
    """

    values: Tensor
    are_logits: bool


def id_arguments(net: nn.Module) -> dict[str, str]:
    """Map each stream to the model argument that takes its token ids."""
    from ..models import Transformer
    from ..observe.inspect.model_inputs import is_encoder_decoder

    if isinstance(net, Transformer):
        return {"text": "x", "source": "source"}
    if is_encoder_decoder(net):
        return {"text": "decoder_input_ids", "source": "input_ids"}
    return {"text": "input_ids"}


def id_rows(net: nn.Module, trace: Trace) -> dict[str, list[int]]:
    """Return the recorded token ids of a trace by model argument."""
    names = id_arguments(net)
    streams = trace.streams.items()
    return {names[name]: list(rows[0].ids) for name, rows in streams if rows and name in names}


def id_inputs(net: nn.Module, trace: Trace) -> dict[str, Tensor]:
    """Return the recorded token ids of a trace as model arguments, [1, T]."""
    import torch

    from ..observe.inspect.model_inputs import get_device

    ids = id_rows(net, trace)
    if not ids:
        raise ValueError("the open text has no token ids; capture a text on the page first")
    return {name: torch.tensor([row], device=get_device(net)) for name, row in ids.items()}


def get_native_copy(model: nn.Module) -> Transformer:
    """Return the model as a headwise model; a transformers model is copied once."""
    from ..models import Transformer
    from ..observe.head_analysis.head_circuits import as_native_model

    if isinstance(model, Transformer):
        return model
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_COPIED_PARAMS:
        fact = f"{type(model).__name__} has {count / 1e6:,.0f} M parameters, and only models up to"
        remedy = "open it as a headwise model: hw.view(hw.load(FOLDER), TEXT)"
        raise ValueError(
            f"{fact} {MAX_COPIED_PARAMS / 1e6:,.0f} M are copied for their steps; {remedy}"
        )
    if model not in _copies:
        _copies[model] = as_native_model(model).eval()
    return _copies[model]


def find_token_decoder(net: nn.Module) -> Callable[[int], str]:
    """Return a function from ids to texts; without a tokenizer it shows the ids."""
    from ..models import Transformer
    from ..observe.head_analysis.annotated_examples import ExampleReader
    from ..observe.inspect.model_inputs import make_token_decoder
    from ..observe.inspect.model_tokenizer import find_tokenizer

    try:
        if isinstance(net, Transformer):
            return ExampleReader(net).token_decoders()["text"]
        tokenizer = find_tokenizer(net)
    except (ValueError, KeyError, OSError):
        return str
    return str if tokenizer is None else make_token_decoder(tokenizer)


def open_inputs(model: OpenModel) -> ModelInputs:
    """Return the inputs of the open text, from its recorded token ids."""
    from ..observe.inspect.model_inputs import prepare_inputs

    net = model.get_model()
    return prepare_inputs(net, id_inputs(net, model.get_recorded()), 0)


class LabRuns:
    """Runs of the open model on the open text, with all heads and with some ablated.

    A headwise model restarts at the first layer with an ablated head.
    """

    def __init__(self, model: OpenModel) -> None:
        from ..observe.head_analysis.importance_methods import make_forward
        from ..observe.inspect.attention_sites import find_attention

        self.net = model.get_model()
        self.inputs = open_inputs(model)
        self.trace = model.get_recorded()
        site_modules = find_attention(self.net)
        self.modules: list[SiteModule] = [one for one in site_modules if one.site.ablate.possible]
        self.forward = make_forward(self.net, self.modules, self.inputs)

    @property
    def heads(self) -> list[Pair]:
        """List the heads that can be ablated on this text, layer by layer."""
        heads: list[Pair] = []
        for layer in self.trace.layers:
            count = self.forward.head_counts.get(layer.name, 0)
            heads += [(layer.name, head) for head in range(count)]
        return heads

    def all_heads(self) -> Outputs:
        """The outputs of the model as it is."""
        return self._read(self.forward.baseline_outputs)

    def without(self, ablation: Ablation) -> Outputs:
        """The outputs with these heads ablated."""
        return self.patched(self.make_patches(ablation), ablation.tokens)

    def patched(
        self, patches: Mapping[HeadRef, HeadPatch], tokens: Mapping[str, tuple[int, ...]]
    ) -> Outputs:
        """The outputs with the outputs of these heads replaced, at these tokens of each stream."""
        if not patches:
            return self.all_heads()
        return self._read(self.forward.run_with_hooks(self.make_hooks(patches, tokens)))

    def make_hooks(
        self,
        patches: Mapping[HeadRef, HeadPatch],
        tokens: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, AttentionHook]:
        """The hooks that replace the outputs of these heads, by site."""
        from ..observe.inspect.ablation import OutputEditor

        by_site: dict[str, dict[int, HeadPatch]] = {}
        for (site, head), patch in patches.items():
            by_site.setdefault(str(site), {})[int(head)] = patch
        hooks: dict[str, AttentionHook] = {}
        for site, edited in by_site.items():
            stream = self.trace.get_layer(site).query_stream
            hooks[site] = OutputEditor(site, edited, (tokens or {}).get(stream))
        return hooks

    def make_patches(self, ablation: Ablation) -> dict[HeadRef, HeadPatch]:
        """The replacement of every ablated head; means and the moments of noise are those over the
        open text.
        """
        from ..observe.inspect.ablation import ConstantOutput, ScaledOutput
        from ..observe.inspect.dataset_means import head_means, head_noise, head_outputs

        patches: dict[HeadRef, HeadPatch] = {}
        refs: dict[str, list[HeadRef]] = {"mean": [], "noise": [], "resample": []}
        for head in ablation.heads:
            if head.mode == "zero":
                patches[head.site, head.head] = ScaledOutput(head.scale)
            else:
                refs[head.mode].append((head.site, head.head))
        batch = self.inputs.kwargs
        vectors: dict[HeadRef, Tensor] = {}
        if refs["mean"]:
            vectors |= head_means(self.net, [batch], refs["mean"])
        if refs["resample"]:
            vectors |= head_outputs(self.net, self.resample_inputs(ablation), refs["resample"])
        if refs["noise"]:
            patches |= head_noise(self.net, [batch], refs["noise"], seed=ablation.seed)
        return patches | {ref: ConstantOutput(value) for ref, value in vectors.items()}

    def resample_inputs(self, ablation: Ablation) -> dict[str, torch.Tensor]:
        """Token ids of the same lengths as the open text: of another text, or its own tokens in
        another order.
        """
        import torch

        from ..observe.inspect.model_inputs import prepare_inputs

        ids = id_rows(self.net, self.trace)
        if not ablation.resample_text:
            generator = torch.Generator().manual_seed(ablation.seed)
            return {
                name: torch.tensor([row])[:, torch.randperm(len(row), generator=generator)]
                for name, row in ids.items()
            }
        if len(ids) > 1:
            raise ValueError(
                "resample of an encoder-decoder model has no other text; leave it empty"
            )
        ((name, row),) = ids.items()
        other = prepare_inputs(self.net, [ablation.resample_text], 0).token_rows["text"][0].ids
        if len(other) < len(row):
            fact = f"the text of resample has {len(other)} tokens, the open text {len(row)}"
            raise ValueError(f"{fact}; give a longer one, or none")
        return {name: torch.tensor([list(other[: len(row)])])}

    def _read(self, result: Any) -> Outputs:
        """The outputs for the first text."""
        import torch

        from ..observe.head_analysis.objectives import detect_head_objective, get_output_tensor

        logits = getattr(result, "logits", None)
        values = logits if isinstance(logits, torch.Tensor) else get_output_tensor(result)
        predicts = detect_head_objective(self.net) in ("next-token", "translation", "masked-token")
        has_tokens = values.dim() == 3
        first = values[0] if has_tokens else values[:1]
        return Outputs(first.double().cpu(), predicts and has_tokens)


def position_changes(before: Outputs, after: Outputs) -> Tensor:
    """Return the change at every position: KL(before || after) in nats for logits, 1 - cosine for
    vectors.
    """
    import torch.nn.functional as F

    if not before.are_logits:
        return 1 - F.cosine_similarity(before.values, after.values, dim=-1)
    old = before.values.log_softmax(-1)
    new = after.values.log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1).clamp(min=0)


def format_prune_command(model: OpenModel, ablation: Ablation) -> str:
    """Return the `headwise prune` command for these heads; "" unless all are ablated to zero,
    fully, and at all tokens.
    """
    if not ablation.heads or not ablation.removes_heads:
        return ""
    named = list_heads([(head.site, head.head) for head in ablation.heads])
    target = model.target or UNKNOWN_MODEL
    options = ["--heads", *named, "--data", "texts.txt", "--out", "pruned"]
    return shlex.join(["headwise", "prune", target, *options])
