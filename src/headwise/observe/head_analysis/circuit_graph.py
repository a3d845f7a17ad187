"""The nodes of a model's computation: heads, MLPs, embeddings and logits; and runs in which the
outputs or the inputs of some of them are replaced.

A node reads the residual stream and adds to it. A head reads it three times, as queries, keys and
values. In a run, nodes are frozen by replacing their outputs, so that a change reaches the inputs
of others along direct paths alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...util.errors import check_known
from ..head_names import print_head
from ..inspect.ablation import group_by_site
from ..inspect.attention_sites import check_head_part, head_part_problem, require_ability
from ..inspect.hooks import (
    AttentionHook,
    ForwardOverride,
    Function,
    hook_sites,
    override_forwards,
)
from ..inspect.model_inputs import ModelInputs, list_arguments, prepare_inputs, run_prepared
from ..inspect.site import VECTOR_FIELDS, HeadVectors
from .importance_methods import BLOCK_PATH
from .objectives import get_output_tensor

HEAD, MLP, EMBEDDING, LOGITS = "head", "mlp", "embedding", "logits"
INPUTS_OF_HEAD = tuple(VECTOR_FIELDS)  # q, k, v


class Node(NamedTuple):
    """A head, an MLP, the embeddings or the logits.

    `place` is the site of a head, or the path of the block of an MLP; `part` is q, k or v if the
    node is what a head reads.
    """

    kind: str
    place: str = ""
    head: int = 0
    part: str = ""


# --- MLPs -----------------------------------------------------------------------------------------

# Paths in a block of the modules that read the input of the MLP and return its output.
MLP_MODULES = (
    (r"feed|mlp|feed_forward|ffn|block_sparse_moe|moe|layer\.\d+\.DenseReluDense", r"\1"),
    (r"intermediate", "output.dense"),
    (r"fc1", "fc2"),
)


class MLPModule(NamedTuple):
    """The MLP of one block: the module that reads its input, and that which returns its output."""

    path: str
    reader: nn.Module
    writer: nn.Module


def find_mlps(model: nn.Module, blocks: Sequence[str]) -> dict[str, MLPModule]:
    """Return the MLP of each block of these paths; blocks without a known one are left out.

    So are MLPs that add the residual stream themselves, as in BLOOM and MPT: their output is more
    than what the MLP writes.
    """
    mlps: dict[str, MLPModule] = {}
    for path in blocks:
        block = model.get_submodule(path)
        modules = dict(block.named_modules())
        for reader, writer in MLP_MODULES:
            names = [name for name in modules if re.fullmatch(reader, name)]
            ends = [names[0] if writer == r"\1" else writer] if names else []
            has_residual = bool(names) and "residual" in list_arguments(modules[names[0]])
            if ends and ends[0] in modules and not has_residual:
                mlps[path] = MLPModule(path, modules[names[0]], modules[ends[0]])
                break
    return mlps


def require_gradient(tensor: Tensor) -> Tensor:
    """Return a tensor that is part of a graph: itself, or a leaf with its values."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


# --- One run --------------------------------------------------------------------------------------


class RunHandler(ABC):
    """Interface of what happens at the nodes of a model while it runs.

    A place is a site, whose heads write [B, T, H, V], the path of a block, whose MLP writes, or ""
    for the embeddings. `vector_sites` are the sites whose vectors are passed on.
    """

    vector_sites: Collection[str]

    @abstractmethod
    def write(self, place: str, output: Tensor) -> Tensor:
        """Return the output of a place, or what replaces it."""

    @abstractmethod
    def read_mlp(self, place: str, value: Tensor) -> Tensor:
        """Return the input of the MLP of a block, or what replaces it."""

    @abstractmethod
    def change_vectors(self, site: str, vectors: HeadVectors) -> None:
        """Read or replace queries, keys and values of a site."""


@dataclass
class NodeRun(RunHandler):
    """Replacements and records of one run, by node.

    `outputs` replaces the outputs of places, `inputs` what single nodes read. Outputs are recorded
    by place, the inputs of MLPs by block, and the vectors of heads at `vector_sites`. With
    `tracks_gradients`, what is recorded is part of the graph of the logits.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    inputs: Mapping[Node, Tensor] = field(default_factory=dict[Node, Tensor])
    vector_sites: Collection[str] = ()
    tracks_gradients: bool = False
    recorded: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    vectors: dict[str, HeadVectors] = field(default_factory=dict[str, HeadVectors])
    mlp_inputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def write(self, place: str, output: Tensor) -> Tensor:
        output = self.outputs.get(place, output)
        self.recorded[place] = require_gradient(output) if self.tracks_gradients else output
        return self.recorded[place]

    def read_mlp(self, place: str, value: Tensor) -> Tensor:
        value = self.inputs.get(Node(MLP, place), value)
        if self.tracks_gradients:
            # a view of its own: other modules may read the same tensor
            value = require_gradient(value).view_as(value)
        self.mlp_inputs[place] = value
        return value

    def change_vectors(self, site: str, vectors: HeadVectors) -> None:
        for node, value in self.inputs.items():
            if node.kind == HEAD and node.place == site:
                vectors.replace(node.part, node.head, value)
        if self.tracks_gradients:
            vectors.change_all(require_gradient)
        self.vectors[site] = vectors

    def read(self, node: Node) -> Tensor:
        """Return what a node read in this run."""
        if node.kind == MLP:
            return self.mlp_inputs[node.place]
        return self.vectors[node.place].get(node.part, node.head)


@dataclass(frozen=True, eq=False)
class _SiteHook(AttentionHook):
    """Pass the heads of one site to the handler of a run."""

    handler: RunHandler
    site: str

    @property
    def needs_vectors(self) -> bool:
        return self.site in self.handler.vector_sites

    def on_vectors(self, vectors: HeadVectors, /) -> None:
        self.handler.change_vectors(self.site, vectors)

    def on_head_outputs(self, outputs: Tensor, /) -> Tensor:
        return self.handler.write(self.site, outputs)


Change = Callable[[Tensor], Tensor]


def change_output(change: Change, module: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
    """Run a module with a change of its output, or of the first of its outputs."""
    output = run(*args, **kwargs)
    if isinstance(output, Tensor):
        return change(output)
    return (change(output[0]), *output[1:])


def change_input(change: Change, module: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
    """Run a module with a change of its first argument, which may be given by name."""
    if args:
        return run(change(args[0]), *args[1:], **kwargs)
    name = next(iter(kwargs))
    return run(**{**kwargs, name: change(kwargs[name])})


class CircuitModel:
    """A model as nodes: its heads, its MLPs, the embeddings that enter the first block, the logits.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> nodes = CircuitModel(hw.build(hw.families.read_model_spec(config), seed=0).eval())
    >>> [nodes.name(node) for node in nodes.senders]
    ['embedding', 'L0H0', 'L0H1', 'M0']
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.site_modules = require_ability(model, "ablate")
        self.site_names = [one.site.name for one in self.site_modules]
        paths = [BLOCK_PATH.match(one.site.path) for one in self.site_modules]
        self.block_of_site = {
            name: path[0] for name, path in zip(self.site_names, paths, strict=True) if path
        }
        blocks = list(dict.fromkeys(self.block_of_site.values()))
        # one place stands for one output: blocks that run several times have nodes for heads alone
        self.is_repeated = any(one.calls_per_forward > 1 for one in self.site_modules)
        self.mlps = {} if self.is_repeated else find_mlps(model, blocks)
        # blocks without attention have MLPs too
        parents = list(dict.fromkeys(path.rpartition(".")[0] for path in blocks))
        self.other_blocks: list[str] = []
        for parent in () if self.is_repeated else parents:
            children = model.get_submodule(parent).named_children()
            paths = [f"{parent}.{name}".strip(".") for name, _ in children if name.isdigit()]
            self.other_blocks += [path for path in paths if path not in blocks]
        self.mlps |= find_mlps(model, self.other_blocks)
        self.parents = parents
        self.blocks = blocks

    @cached_property
    def first_block(self) -> nn.Module:
        """The block that the embeddings enter; raise if the model has not one row of blocks."""
        self._check_not_repeated("no block is the first for embeddings and edges")
        if len(self.parents) != 1:
            raise ValueError(
                f"{type(self.model).__name__} has {len(self.parents)} stacks of layers instead of "
                "one residual stream; measure heads with one step, or paths between heads"
            )
        return self.layers[0]

    def _check_not_repeated(self, consequence: str) -> None:
        if self.is_repeated:
            raise ValueError(
                f"{type(self.model).__name__} runs the same blocks several times in one forward "
                f"call, so {consequence}; measure heads with one step, or paths between heads "
                "or to the logits with free MLPs"
            )

    @property
    def last_block(self) -> nn.Module:
        """The last block of the one row of blocks."""
        return self.layers[-1]

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks of the one row of blocks."""
        children = self.model.get_submodule(self.parents[0]).named_children()
        return [child for name, child in children if name.isdigit()]

    @cached_property
    def senders(self) -> list[Node]:
        """All nodes that add to the residual stream, in the order of the layers."""
        nodes = [Node(EMBEDDING)]
        places = [*self.block_of_site.items()]
        paths = {*self.blocks, *self.mlps}
        names = [path for path, _ in self.model.named_modules() if path in paths]
        for block in names:
            for one in self.site_modules:
                if (one.site.name, block) in places:
                    nodes += [Node(HEAD, one.site.name, head) for head in range(one.site.heads)]
            if block in self.mlps:
                nodes.append(Node(MLP, block))
        return nodes

    @cached_property
    def vector_sites(self) -> frozenset[str]:
        """The sites where queries, keys and values of heads can be replaced."""
        able = [one for one in self.site_modules if not head_part_problem(one, INPUTS_OF_HEAD[0])]
        return frozenset(one.site.name for one in able)

    @property
    def heads(self) -> list[Node]:
        """All heads, in the order of the layers."""
        return [node for node in self.senders if node.kind == HEAD]

    @property
    def receivers(self) -> list[Node]:
        """All inputs of nodes: q, k and v of each head, the MLPs, and the logits."""
        nodes: list[Node] = []
        for node in self.senders:
            if node.kind == HEAD:
                nodes += [node._replace(part=part) for part in INPUTS_OF_HEAD]
            elif node.kind == MLP:
                nodes.append(node)
        return [*nodes, Node(LOGITS)]

    def name(self, node: Node) -> str:
        """Return the short name of a node, such as L0H3, L0H3.q, M0, embedding or logits."""
        if node.kind == HEAD:
            name = print_head(node.place, node.head, self.site_names)
            return f"{name}.{node.part}" if node.part else name
        if node.kind == MLP:
            return f"M{node.place.rpartition('.')[2]}"
        return node.kind

    def names(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        """Return the short names of nodes."""
        return tuple(map(self.name, nodes))

    def find(self, name: str) -> list[Node]:
        """Return the nodes of a name; L0:1,2 are two heads."""
        if name in (EMBEDDING, LOGITS):
            return [Node(name)]
        if re.fullmatch(r"M\d+", name):
            return [self._find_mlp(name)]
        heads, dot, part = name.rpartition(".")
        if not dot or part not in INPUTS_OF_HEAD:
            heads, part = name, ""
        nodes: list[Node] = []
        for site, numbers in group_by_site(self.model, self.site_modules, [heads]).items():
            nodes += [Node(HEAD, site, number, part) for number in numbers]
        return nodes

    def _find_mlp(self, name: str) -> Node:
        self._check_not_repeated("no MLP has one input and one output")
        mlps = [Node(MLP, path) for path in self.mlps]
        named = [node for node in mlps if self.name(node) == name]
        if not named:
            raise ValueError(
                f"{type(self.model).__name__} has no MLP {name}; it has "
                f"{', '.join(self.names(mlps)) or 'none that headwise finds'}"
            )
        if len(named) > 1:
            raise ValueError(
                f"{name} is the MLP of {' and of '.join(node.place for node in named)} in "
                f"{type(self.model).__name__}, so the name is ambiguous; measure paths between "
                "heads"
            )
        return named[0]

    def find_all(self, names: Iterable[str] | str) -> list[Node]:
        """Return the nodes of several names."""
        listed = [names] if isinstance(names, str) else names
        nodes: list[Node] = []
        for name in listed:
            nodes += self.find(name)
        return nodes

    def check_receivers(self, receivers: Iterable[Node]) -> None:
        """Raise unless what these nodes read can be replaced."""
        modules = {one.site.name: one for one in self.site_modules}
        for node in receivers:
            if node.kind == HEAD:
                check_head_part(modules[node.place], node.part)

    def find_other_weights(self) -> dict[str, str]:
        """Return the blocks that have matrices outside their attentions and the MLP that is known
        of them, with the name of the first.
        """
        # the modules of the attentions and the MLP of each block; some blocks have none of them
        parts_of_block: dict[str, list[nn.Module]] = {path: [] for path in self.other_blocks}
        parts_of_block |= {path: list(mlp[1:]) for path, mlp in self.mlps.items()}
        for one in self.site_modules:
            block = self.block_of_site.get(one.site.name, "")
            attention = one.site.path.removeprefix(f"{block}.").partition(".")[0]
            module = self.model.get_submodule(f"{block}.{attention}".strip("."))
            parts_of_block.setdefault(block, []).append(module)
        ids_of_block: dict[str, set[int]] = {}  # of parameters
        for block, modules in parts_of_block.items():
            of_modules = (map(id, module.parameters()) for module in modules)
            ids_of_block[block] = set(chain.from_iterable(of_modules))
        name_of_block: dict[str, str] = {}
        for block, ids in ids_of_block.items():
            for name, parameter in self.model.get_submodule(block).named_parameters():
                if parameter.dim() > 1 and id(parameter) not in ids:
                    name_of_block.setdefault(block, name)
        return name_of_block

    def check_all_mlps(self) -> None:
        """Raise if a block has matrices outside its attentions and the MLP that is known of it."""
        self._check_not_repeated("MLPs have no one output to freeze")
        for block, name in self.find_other_weights().items():
            number = "one MLP" if block in self.mlps else "no MLP"
            raise ValueError(
                f"headwise finds {number} in {block or 'the model'} of "
                f"{type(self.model).__name__}, which also has weights such as {name}, so MLPs "
                "cannot be frozen; patch paths with free MLPs"
            )

    def run(self, inputs: ModelInputs, handler: RunHandler) -> Tensor:
        """Run the model on one text and return its logits; the handler gets all nodes."""
        hooks = {name: _SiteHook(handler, name) for name in self.site_names}
        overrides: list[ForwardOverride] = []
        for place, mlp in self.mlps.items():
            write = partial(change_output, partial(handler.write, place))
            read = partial(change_input, partial(handler.read_mlp, place))
            overrides += [ForwardOverride(mlp.writer, write), ForwardOverride(mlp.reader, read)]
        if len(self.parents) == 1 and not self.is_repeated:
            write = partial(change_input, partial(handler.write, ""))
            overrides.append(ForwardOverride(self.first_block, write))
        with override_forwards(overrides), hook_sites(self.model, self.site_modules, hooks):
            return get_output_tensor(run_prepared(self.model, inputs))


# --- Pairs of texts -------------------------------------------------------------------------------


LogitFunction = Callable[[Tensor], Tensor]  # from logits [1, T, V] to one number


class MetricPair(NamedTuple):
    """The inputs of a clean and of a corrupt text with equally many tokens, and their metric."""

    clean: ModelInputs
    corrupt: ModelInputs
    metric: LogitFunction

    def measure(self, logits: Tensor) -> Tensor:
        """Return the metric of the logits [1, T, V] as a tensor with one number."""
        value = self.metric(logits)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the metric returns {shape}; return a tensor with one number")
        if not bool(value.isfinite().all()):
            raise ValueError("the metric is not finite on this text; check the weights")
        return value.squeeze()


def prepare_pair(model: nn.Module, clean: Any, corrupt: Any, metric: LogitFunction) -> MetricPair:
    """Return the inputs of two texts; raise unless they have equally many tokens."""
    pair = MetricPair(prepare_inputs(model, clean, 0), prepare_inputs(model, corrupt, 0), metric)
    for inputs in pair[:2]:
        if inputs.batch_size != 1:
            raise ValueError(
                f"a pair is two single texts, got {inputs.batch_size} rows; give several pairs"
            )
    for stream in pair.clean.token_rows:
        rows = [inputs.token_rows[stream][0] for inputs in pair[:2]]
        counts = [len(row.ids) for row in rows]
        if counts[0] != counts[1]:
            words = [" ".join(map(repr, row.words[:12])) for row in rows]
            raise ValueError(
                f"the clean text has {counts[0]} tokens and the corrupt text {counts[1]} (clean: "
                f"{words[0]}; corrupt: {words[1]}); change words of one so that both have equally "
                "many tokens"
            )
    return pair


def check_mlps(mlps: str) -> None:
    """Raise unless `mlps` says what MLPs do while heads are frozen."""
    check_known("mlps", mlps, ("free", "frozen"))
