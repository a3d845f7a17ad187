"""What others have measured of heads and how they name them: Clark et al. (1906.04341), Voita et al. (1905.09418).

Their sums are over all of a row, sinks included, and Clark's are means over texts and not over rows: a text of n tokens
counts once, however many rows may read what is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log

import torch
from torch import Tensor

from ..errors import nearest
from .block import Block
from .statistics import STATISTICS, Statistic, Sums, largest, mean_of, nats, offsets, peak, rare
from .syntax import follows
from .table import Head, Named

ENDS = (".", ",")  # the punctuation that Clark et al. looked at
SMOOTH = 1e-4
BROAD, OFFSET, TOKEN = 3.8, 0.5, 0.6  # 1906.04341: nats, and weights
POSITION, SURE, BETTER = 0.9, 0.8, 0.1  # 1905.09418: rows, largest weight, and share of arcs above the best offset
NEAR = {-1: "previous", 0: "self", 1: "next"}
RARE = 0.5  # of rows; 1905.09418 names a head of 0.66 and no bound


def _of_text(rows_HT: Tensor, chosen: Tensor, whole: int) -> Sums:
    """The part of these rows in the mean over a text, of which so many rows are counted; each text counts once."""
    heads = rows_HT.shape[0]
    sums = torch.where(chosen, rows_HT, 0).sum(-1, dtype=torch.float64) / max(1, whole)
    return sums, (chosen.sum(dtype=torch.float64) / max(1, whole)).expand(heads)


def _rows(block: Block) -> Tensor:
    return torch.ones(block.w_HTS.shape[1], dtype=torch.bool, device=block.w_HTS.device)


def _weight(keys: Callable[[Block], Tensor], block: Block) -> Sums:
    return _of_text(block.on(keys(block)), _rows(block), block.asks.count)


def _at(offset: int, block: Block) -> Sums:
    return _of_text(block.beside((offset,))[0][..., 0], _rows(block), block.asks.count)


def _first(block: Block) -> Tensor:
    first = torch.zeros_like(block.told.special)
    first[:1] = block.told.special[:1]
    return first


def _separators(block: Block) -> Tensor:
    return block.told.separator


def _ends(block: Block) -> Tensor:
    return torch.tensor([word.strip() in ENDS for word in block.told.words], device=block.w_HTS.device)


def _separated(own: str, block: Block) -> Sums:
    """The weight on separators of rows that are such, or of all others."""
    those = block.asks.separator if own == "separator" else ~block.asks.separator
    return _of_text(block.on(block.told.separator), those[block.places], int(those.sum()))


def _smoothed(block: Block) -> Tensor:
    each = SMOOTH / block.told.count
    elsewhere = (block.told.count - block.w_HTS.shape[-1]) * each * log(each)
    return nats((1 - SMOOTH) * block.w_HTS + each) - elsewhere


def _entropy(block: Block) -> Sums:
    return _of_text(_smoothed(block), _rows(block), block.asks.count)


def _entropy_of_first(block: Block) -> Sums:
    return _of_text(_smoothed(block), (block.places == 0) & block.asks.special[block.places], 1)


CLARK: tuple[Statistic, ...] = (
    Statistic("clark self", "weight on itself", partial(_at, 0), itself=True),
    Statistic("clark next", "weight on the token behind", partial(_at, 1), itself=True),
    Statistic("clark previous", "weight on the token before", partial(_at, -1), itself=True),
    Statistic("clark first", "weight on [CLS]", partial(_weight, _first)),
    Statistic("clark separator", "weight on [SEP]", partial(_weight, _separators)),
    Statistic("clark separator to itself", "weight of [SEP] on [SEP]", partial(_separated, "separator")),
    Statistic("clark others to separator", "weight of all others on [SEP]", partial(_separated, "others")),
    Statistic("clark punctuation", "weight on . and ,", partial(_weight, _ends)),
    Statistic("clark entropy", "nats of a smoothed row", _entropy),
    Statistic("clark entropy of first", "nats of the smoothed row of [CLS]", _entropy_of_first),
)


def _without_ends(block: Block) -> Block:
    """The same without the tokens that end a text, as keys and as rows; what is left is not made whole."""
    kept = block.here(~block.told.separator)
    allowed = block.allowed & kept & ~block.asks.separator[block.places][:, None]
    return replace(block, w_HTS=block.w_HTS * kept, allowed=allowed)


def _confidence(block: Block) -> Sums:
    block = _without_ends(block)
    return mean_of(block.top, block.alive)


def _positions(block: Block) -> Sums:
    return offsets(_without_ends(block))


def _rare(block: Block) -> Sums:
    return rare(_without_ends(block))


VOITA: tuple[Statistic, ...] = (
    Statistic("voita confidence", "largest weight of a row, but for the end of the text", _confidence),
    Statistic("voita position", "rows whose largest weight is at one distance", _positions, fold=largest, itself=True),
    Statistic("voita peak", "the distance that most largest weights are at", _positions, fold=peak, itself=True),
    Statistic("voita rare", "rows whose largest weight is on the rarest token", _rare),
)
PUBLISHED: Mapping[str, Statistic] = {one.name: one for one in (*CLARK, *VOITA)}
EVERY: Mapping[str, Statistic] = {**STATISTICS, **PUBLISHED}


def named(name: str) -> Statistic:
    """The statistic of this name, ours or published.

    >>> named("clark next").says
    'weight on the token behind'
    """
    if name not in EVERY:
        raise ValueError(f"no statistic is called {name!r}; {nearest(name, EVERY)}")
    return EVERY[name]


def chosen(criteria: str) -> tuple[str, ...]:
    """The statistics that these criteria ask for.

    >>> chosen("voita")
    ('voita confidence', 'voita position', 'voita peak', 'voita rare')
    """
    return tuple(name for name in PUBLISHED if name.startswith(f"{criteria} "))


def distance_name(offset: float) -> str:
    """What a head is called that reads at one distance.

    >>> distance_name(-1.0), distance_name(3.0)
    ('previous', 'offset +3')
    """
    return NEAR.get(int(offset), f"offset {int(offset):+d}")


def _above(head: Head, name: str, measure: str, bound: float) -> list[Named]:
    """The class of this name if a measure is above its bound."""
    one = head.measures.get(measure)
    if one is None or not one.value > bound:
        return []
    return [Named(name, min(1.0, one.value), f"{named(measure).says} {one.value:.2f}, above {bound:g}")]


def clark(head: Head) -> list[Named]:
    """What section 3 of 1906.04341 calls a head."""
    found = _above(head, "next", "clark next", OFFSET) + _above(head, "previous", "clark previous", OFFSET)
    for name in ("first", "separator", "punctuation"):
        found += _above(head, name, f"clark {name}", TOKEN)
    for broad in _above(head, "broad", "clark entropy", BROAD):
        one = head.measures["clark entropy"]
        found.append(broad._replace(score=min(1.0, one.value / one.chance)))
    return found


def voita(head: Head) -> list[Named]:
    """What section 5 of 1905.09418 calls a head; relations as measured by `Syntax`."""
    found = _above(head, "rare-token", "voita rare", RARE)
    position, sure = head.measures.get("voita position"), head.measures.get("voita confidence")
    if position and sure and position.value >= POSITION and sure.value > SURE:
        why = f"{position.value:.2f} of rows read most at one distance, largest weight {sure.value:.2f}"
        found.append(Named(distance_name(head.measures["voita peak"].value), position.value, why))
    for name, one in head.measures.items():
        if follows(name) and round(one.value - one.chance, 9) >= BETTER:
            why = f"finds {one.value:.2f} of arcs, {one.value - one.chance:.2f} more than the best offset"
            found.append(Named(name, one.value, why))
    return found
