"""Path patching with hooks of torch on plain transformers, without headwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .transformers_models import DIM, HEADS, ZOO

CLEAN = torch.tensor([[5, 9, 2, 6, 5, 3, 11]])
CORRUPT = torch.tensor([[7, 1, 8, 2, 8, 1, 13]])
LAYERS = 3

# paths of the module whose input are all head outputs, of the MLP's input and of its output
SHAPES: dict[str, tuple[str, str, str]] = {
    "gpt2": ("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp", "transformer.h.{}.mlp"),
    "llama": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp", "model.layers.{}.mlp"),
    "bert": (
        "encoder.layer.{}.attention.output.dense",
        "encoder.layer.{}.intermediate",
        "encoder.layer.{}.output.dense",
    ),
}
DEPTH = {"gpt2": "n_layer", "llama": "num_hidden_layers", "bert": "num_hidden_layers"}


def build(name: str) -> Any:
    entry = ZOO[name]
    entry = entry._replace(keys={**entry.keys, DEPTH[name]: LAYERS})
    return entry.build("sdpa").double()  # eager has its softmax in float32


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - 2 * logits[0, 2, 5]


def output_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(input_ids=ids)
    return output.logits if "logits" in output else output.last_hidden_state


class Plain:
    """Path patching by hooks of torch; keys and values by an attention function written here."""

    def __init__(self, name: str) -> None:
        transformers = pytest.importorskip("transformers")
        self.model = build(name)
        self.head, self.mlp_in, self.mlp_out = (
            [self.model.get_submodule(path.format(layer)) for layer in range(LAYERS)]
            for path in SHAPES[name]
        )
        self.attention = [
            module
            for module in self.model.modules()
            if hasattr(module, "is_causal") and type(module).__name__.endswith("Attention")
        ][:LAYERS]
        interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        masks.register("by_hand", masks["eager"])
        interface.register("by_hand", self.attend)
        self.model.config._attn_implementation = "by_hand"
        self.vectors: dict[tuple[int, str, int], Tensor] = {}
        self.read: dict[tuple[int, str, int], Tensor] = {}
        self.parts: dict[tuple[int, str], Tensor] = {}

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer = self.attention.index(module)
        times = query.shape[1] // key.shape[1]
        parts = {
            "q": query.clone(),
            "k": key.repeat_interleave(times, 1),
            "v": value.repeat_interleave(times, 1),
        }
        for (of_layer, part, head), vector in self.vectors.items():
            if of_layer == layer:
                parts[part][:, head] = vector
        for part, tensor in parts.items():
            for head in range(query.shape[1]):
                self.read[layer, part, head] = tensor[:, head]
            self.parts[layer, part] = tensor
        scores = parts["q"] @ parts["k"].transpose(2, 3)
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(-1) @ parts["v"]).transpose(1, 2).contiguous(), None

    @contextmanager
    def input_hook(self, module: nn.Module, function: Any) -> Iterator[None]:
        handle = module.register_forward_pre_hook(lambda _, args: (function(args[0]), *args[1:]))
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def output_hook(self, module: nn.Module, function: Any) -> Iterator[None]:
        handle = module.register_forward_hook(lambda _, args, output: function(output))
        try:
            yield
        finally:
            handle.remove()

    def run(
        self,
        ids: Tensor,
        heads: dict[int, Tensor] | None = None,
        mlps: dict[int, Tensor] | None = None,
        mlp_inputs: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, dict[int, Tensor]]]:
        seen: dict[str, dict[int, Tensor]] = {"heads": {}, "mlps": {}, "mlp_inputs": {}}

        def replace(kind: str, given: dict[int, Tensor] | None, layer: int) -> Any:
            def function(tensor: Tensor) -> Tensor:
                tensor = (given or {}).get(layer, tensor)
                seen[kind][layer] = tensor
                return tensor

            return function

        with ExitStack() as stack:
            for layer in range(LAYERS):
                for kind, given, module, hook in (
                    ("heads", heads, self.head[layer], self.input_hook),
                    ("mlp_inputs", mlp_inputs, self.mlp_in[layer], self.input_hook),
                    ("mlps", mlps, self.mlp_out[layer], self.output_hook),
                ):
                    stack.enter_context(hook(module, replace(kind, given, layer)))
            return output_of(self.model, ids), seen

    def path(
        self, senders: list[Any], receivers: list[Any], frozen_mlps: bool, share: float = 1.0
    ) -> Tensor:
        """The metric with a path patched: (layer, head) or an MLP's layer to (layer, part, head),
        an MLP's layer, or "logits". Senders go a share of the way to the corrupt text.
        """
        (_, clean) = self.run(CLEAN)
        (_, corrupt) = self.run(CORRUPT)
        for kind, layers in corrupt.items():
            for layer, tensor in layers.items():
                layers[layer] = clean[kind][layer] + share * (tensor - clean[kind][layer])
        heads = {layer: clean["heads"][layer].clone() for layer in range(LAYERS)}
        mlps = dict(clean["mlps"]) if frozen_mlps else {}
        for sender in senders:
            if isinstance(sender, int):
                mlps[sender] = corrupt["mlps"][sender]
                continue
            layer, head = sender
            width = slice(head * DIM, (head + 1) * DIM)
            heads[layer][..., width] = corrupt["heads"][layer][..., width]
        (logits, seen) = self.run(CLEAN, heads, mlps)
        if receivers == ["logits"]:
            return metric(logits)
        self.vectors = {one: self.read[one].clone() for one in receivers if isinstance(one, tuple)}
        mlp_inputs = {one: seen["mlp_inputs"][one] for one in receivers if isinstance(one, int)}
        (logits, _) = self.run(CLEAN, mlp_inputs=mlp_inputs)
        self.vectors = {}
        return metric(logits)

    def circuit(self, is_kept: Any) -> Tensor:
        """The metric if along every edge that is not kept, nodes read the corrupt outputs.

        Node by node: what a node reads is what it reads in a run in which all earlier nodes are
        frozen at their new or at their corrupt outputs. The embeddings are always kept.
        """
        (_, corrupt) = self.run(CORRUPT)
        new: dict[Any, Tensor] = {}

        def frozen_run(receiver: Any) -> Tensor:
            heads = {layer: corrupt["heads"][layer].clone() for layer in range(LAYERS)}
            mlps = dict(corrupt["mlps"])
            for node, output in new.items():
                if not is_kept(node, receiver):
                    continue
                if isinstance(node, int):
                    mlps[node] = output
                else:
                    heads[node[0]][..., node[1] * DIM : (node[1] + 1) * DIM] = output
            self.vectors = {}
            (logits, seen) = self.run(CLEAN, heads, mlps)
            return seen["mlp_inputs"][receiver] if isinstance(receiver, int) else logits

        for layer in range(LAYERS):
            for head in range(HEADS):
                read: dict[tuple[int, str, int], Tensor] = {}
                for part in "qkv":
                    receiver = (layer, part, head)
                    frozen_run(receiver)
                    read[receiver] = self.read[receiver].clone()
                self.vectors = read
                (_, seen) = self.run(CLEAN)
                new[layer, head] = seen["heads"][layer][..., head * DIM : (head + 1) * DIM]
            mlp_input = frozen_run(layer)
            (_, seen) = self.run(CLEAN, mlp_inputs={layer: mlp_input})
            new[layer] = seen["mlps"][layer]
        return metric(frozen_run("logits"))


def name_of(node: Any) -> str:
    if isinstance(node, int):
        return f"M{node}"
    if node == "logits":
        return node
    return f"L{node[0]}H{node[1]}" if len(node) == 2 else f"L{node[0]}H{node[2]}.{node[1]}"
