"""Generation by the likeliest token at every step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SpecError
from ..tokens import Tokens
from .caches import Memory
from .ends import last
from .transformer import Transformer


def greedy(
    net: Transformer,
    prompt: Tensor,
    *,
    count: int,
    tokens: Tokens | None = None,
    end: int | None = None,
    memory: Memory | None = None,
) -> list[list[int]]:
    """Up to `count` new ids behind each row of a prompt [B, P], each the likeliest; a row stops before `end`.

    Rows of several lengths are padded, which `tokens` says: Tokens.of(prompt, lengths=..., pad="left"). `memory` is
    what `net.encode(source)` returned. Past tokens are remembered, and computed once.

    >>> import headwise as hw
    >>> described = hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11})
    >>> net = hw.build(described, seed=0)
    >>> first, second = greedy(net, torch.tensor([[3, 1], [4, 1]]), count=5)
    >>> len(first), first == greedy(net, torch.tensor([[3, 1]]), count=5)[0]
    (5, True)
    """
    _check(net, prompt, count, tokens)
    training = [module for module in net.modules() if module.training]
    try:
        with torch.no_grad():
            new = _new_ids(net.eval(), prompt, count, tokens, (end, memory))
    finally:
        for module in training:
            module.training = True
    rows = new.tolist()
    return rows if end is None else [row[: row.index(end)] if end in row else row for row in rows]


def _new_ids(
    net: Transformer, prompt: Tensor, count: int, tokens: Tokens | None, stop: tuple[int | None, Memory | None]
) -> Tensor:
    """[B, up to count]; behind the end of a row anything."""
    end, memory = stop
    cache = net.cache(batch=len(prompt), capacity=prompt.shape[1] + count)
    at = tokens or Tokens.run(0, prompt.shape[1], prompt.device)
    h = last(net.hidden(prompt, tokens=at, source=memory, cache=cache), at)[:, None]
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    new = [_likeliest(net, h)]
    while len(new) < count:
        if end is not None:
            ended |= new[-1][:, 0] == end
            if bool(ended.all()):
                break
        new.append(_likeliest(net, net.hidden(new[-1], source=memory, cache=cache)))
    return torch.cat(new, 1)


def _likeliest(net: Transformer, h: Tensor) -> Tensor:
    return net.read(h).argmax(-1)


def _check(net: Transformer, prompt: Tensor, count: int, tokens: Tokens | None) -> None:
    described = net.described
    known = described.stacks[-1].embedding.tokens if described.stacks[-1].embedding else 0
    head = described.heads[0] if described.heads else None
    if not known or head is None or head.at != "each" or head.outputs != known:
        wanted = f"Head('tokens', {known})" if known else "one over tokens that it also reads"
        raise SpecError(f"{described.name} does not say which token comes next; its first head must be {wanted}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count={count!r} new tokens cannot be; give a whole number of at least 1")
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or not prompt.numel():
        told = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"prompt is {told}; give ids [rows, tokens] with at least one token in each row")
    if tokens is not None and not bool(tokens.live.any(1).all()):
        raise ValueError("a row of the prompt is all padding; begin each with one token at least")
