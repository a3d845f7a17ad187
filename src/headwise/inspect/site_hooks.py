"""Standing at sites of a model through its forwards: where each begins, which depth a call is of, and what never ran.

A forward is a call of the model, or of a part of it, that is not inside another one. What was asked for and did not
happen is told: a module that is not in its place any more, one that runs more often than it has sites, one that never
ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..generation.decoding_config import DecodingConfig
from ..generation.generate import generate
from ..models import Transformer
from .hooks import AttentionCall, AttentionHook, MethodPatch, SharedPatch, SiteModule, install_hooks
from .model_inputs import ModelInputs


class SiteHooks:
    """Who stands at which sites of a model, and what has run there."""

    def __init__(self, model: nn.Module, those: Sequence[SiteModule], who: Mapping[str, AttentionHook]) -> None:
        self.model, self.routes = model, list(dict.fromkeys(one.adapter for one in those))
        self.hook_of_module = {one.module: SiteHook(self, one, those, who) for one in reversed(those)}
        paths = model.named_modules(remove_duplicate=False)
        self.module_of_path = {path: module for path, module in paths if module in self.hook_of_module}
        self.modules_below: dict[nn.Module, set[nn.Module]] = {}  # what is called, and who stands inside it
        for path, module in self.module_of_path.items():
            for above in _ancestors(model, path):
                self.modules_below.setdefault(above, set()).add(module)
        for post in self.hook_of_module.values():
            self.modules_below.setdefault(post.site, set())
        self.num_forwards, self.num_calls = Counter[nn.Module](), Counter[nn.Module]()

    def begin_forward(self) -> Counter[nn.Module]:
        """A forward begins: an empty count of the calls in it, if what is to be watched is still there."""
        if gone := [
            path for path, module in self.module_of_path.items() if _get_module(self.model, path) is not module
        ]:
            raise ValueError(
                f"{gone[0] or 'the model'} was replaced while somebody stood at it; change a model before, or after"
            )
        if torch.is_grad_enabled() and any(map(_recomputes, self.model.modules())):
            raise ValueError(
                "with checkpointing, layers run again on the way back, when nobody may stand there; switch it off"
            )
        return Counter()

    def end_forward(self, root: nn.Module, calls: Counter[nn.Module]) -> None:
        """A forward has ended: a module that serves several sites must have served all of them, or none."""
        for module in self.modules_below[root]:
            self.num_forwards[module] += 1
            post, count = self.hook_of_module[module], calls[self.hook_of_module[module].site]
            if post.calls_per_forward > 1 and count not in (0, post.calls_per_forward):
                raise ValueError(
                    f"{post.name} is a module of {post.calls_per_forward} depths, which ran {count} times in "
                    f"a forward; run the "
                    "whole model"
                )

    def check_all_ran(self) -> None:
        """All is over: whoever had forwards around him, and was never called, did nothing of what was asked."""
        for module, post in self.hook_of_module.items():
            if self.num_forwards[module] and not self.num_calls[module]:
                raise ValueError(
                    f"{post.name} never ran, though its model did (forwards: {self.num_forwards[module]}), "
                    f"and nothing was "
                    "done there; name sites that this input reaches"
                )


class SiteHook:
    """A watcher of one module, which hands each call to whoever stands at the site that it is of."""

    def __init__(
        self, posts: SiteHooks, one: SiteModule, those: Sequence[SiteModule], who: Mapping[str, AttentionHook]
    ) -> None:
        self.posts, self.module = posts, one.module
        self.site = posts.model.get_submodule(one.site.path)
        self.calls_per_forward, self.name = one.calls_per_forward, one.site.name
        self.hook_of_call = {other.call_index: who[other.site.name] for other in those if other.module is one.module}
        self.needs_call = any(watcher.needs_call for watcher in self.hook_of_call.values())

    def on_call(self, seen: AttentionCall) -> None:
        """Let him see it who stands at this depth."""
        watcher = self.hook_of_call.get(self._call_index())
        if watcher is not None and watcher.needs_call:
            watcher.on_call(seen)

    def on_head_outputs(self, z: Tensor) -> Tensor | None:
        """Let him change it."""
        watcher = self.hook_of_call.get(self._call_index())
        self.posts.num_calls[self.module] += 1
        return None if watcher is None else watcher.on_head_outputs(z)

    def _call_index(self) -> int:
        """Which call of its site this is, in the forward that runs: within one it may pass here several times."""
        forward = _RUNNING_FORWARDS.get().get(self.posts)
        turn = 0 if forward is None else forward[self.site] - 1
        if self.calls_per_forward > 1 and (forward is None or turn < 0):
            raise ValueError(f"{self.name} is not called by a forward of its model; call the model itself")
        if turn >= self.calls_per_forward:
            raise ValueError(
                f"{self.name} runs more than {self.calls_per_forward} times in one forward, and nothing says "
                f"of which depth that "
                "is; give the part of the model that runs it once"
            )
        return max(turn, 0)


RunningForwards = Mapping[SiteHooks, Counter[nn.Module] | None]
_RUNNING_FORWARDS: ContextVar[RunningForwards] = ContextVar("forwards", default=MappingProxyType({}))
_FORWARD_PATCHES: dict[type, MethodPatch] = {}


@contextmanager
def hook_sites(
    model: nn.Module, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]
) -> Iterator[SiteHooks]:
    """While this lasts, these watch at the sites of these names, each at its depth; `settle` tells who never did."""
    posts = SiteHooks(model, [one for one in sites if one.site.name in hooks], hooks)
    stands: list[SharedPatch] = [_forward_patch(kind) for kind in dict.fromkeys(map(type, posts.modules_below))]
    for route in posts.routes:
        stands += route.patches()
    with install_hooks({module: (post,) for module, post in posts.hook_of_module.items()}, stands):
        token = _RUNNING_FORWARDS.set({**_RUNNING_FORWARDS.get(), posts: None})
        try:
            yield posts
        finally:
            _RUNNING_FORWARDS.reset(token)


def _forward_patch(kind: type) -> MethodPatch:
    return _FORWARD_PATCHES.setdefault(kind, MethodPatch(kind, "__call__", partial(_wrap_forward, kind)))


def _ancestors(model: nn.Module, path: str) -> list[nn.Module]:
    """Everything that a path goes through, the model and its end included."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]


def _get_module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _wrap_forward(kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: nn.Module, *said: Any, **more: Any) -> Any:
        if type(self) is not kind:  # one of a class made of this one, which is stood at itself
            return original(self, *said, **more)
        now = _RUNNING_FORWARDS.get()
        begun = {
            posts: posts.begin_forward()
            for posts, forward in now.items()
            if forward is None and self in posts.modules_below
        }
        now = {**now, **begun}
        for forward in now.values():
            if forward is not None:
                forward[self] += 1
        if not begun:
            return original(self, *said, **more)
        token = _RUNNING_FORWARDS.set(now)
        try:
            given = original(self, *said, **more)
        finally:
            _RUNNING_FORWARDS.reset(token)
        for posts, calls in begun.items():
            posts.end_forward(self, calls)
        return given

    return __call__


def _recomputes(module: nn.Module) -> bool:
    """Whether a module forgets on its way forth, and computes anew on its way back: ours, or transformers'."""
    theirs = module.training and bool(getattr(module, "gradient_checkpointing", False))
    return theirs or getattr(module, "checkpointing", "none") == "block"


# --- A model run once, watched -------------------------------------------------------------------------


class ModelRun(NamedTuple):
    """A model, and what it is to read, and how many tokens it is to say then."""

    model: nn.Module
    inputs: ModelInputs
    max_new_tokens: int = 0

    def run_with_hooks(self, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]) -> Any:
        """Run it while each of these sites is watched."""
        with hook_sites(self.model, sites, hooks), torch.inference_mode():
            return self.run()

    def run(self) -> Any:
        """What it says, whoever watches."""
        model, given = self.model, self.inputs
        try:
            if not self.max_new_tokens:
                return model(*given.args, **given.kwargs)
            if isinstance(model, Transformer):
                # rows that ended would leave the batch, so that among several none ends before the others
                how = DecodingConfig(end=() if given.batch_size > 1 else None)
                return generate(model, given.prompt_ids, max_new_tokens=self.max_new_tokens, config=how)
            speak: Any = getattr(model, "generate", None)
            if speak is None:
                raise ValueError(f"{type(model).__name__} says no tokens; leave max_new_tokens out")
            return speak(**given.kwargs, max_new_tokens=self.max_new_tokens, do_sample=False)
        except IndexError as error:
            raise ValueError(
                f"{type(model).__name__} cannot read this: {error}; are there ids it does not know, or "
                "more tokens than it takes?"
            ) from None
