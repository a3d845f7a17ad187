"""Whether what is said of how a model is used fits the model."""

from __future__ import annotations

from tokenizers import Tokenizer

from ..blueprint import ModelSpec, StackSpec, ProcessorSpec
from ..blueprint.usage import TOKENIZER_FIELDS
from ..errors import SpecError


def check_usage(described: ModelSpec, usage: ProcessorSpec, where: str = "") -> None:
    """Refuse what speaks of another model; `where` stands before the names of files.

    >>> from headwise import families
    >>> small = families.read({"model_type": "gpt2", "vocab_size": 11})
    >>> check_usage(small, ProcessorSpec(end=(11,)))
    Traceback (most recent call last):
    headwise.errors.SpecError: end=(11,) holds no id of gpt2, which has 11 of them; give ids in 0..10
    """
    for name in TOKENIZER_FIELDS:
        if (held := getattr(usage, name)) is not None:
            _check_tokenizer(described, held, f"{where}{name}.json" if where else name)
    first, last = _tokens(described.stacks[0]), _tokens(described.stacks[-1])
    sizes = {"before": first, "behind": first, "begin": last, "end": last}
    told = {name: getattr(usage, name) for name in sizes} | {"mask": () if usage.mask is None else (usage.mask,)}
    for name, ids in told.items():
        known = sizes.get(name, first)
        if any(one >= known for one in ids):
            fact = f"{name}={ids} holds no id of {described.name}, which has {known} of them"
            raise SpecError(f"{where}{fact}; give ids in 0..{known - 1}" if known else f"{where}{fact}; leave it out")
    if usage.labels and described.heads and len(usage.labels) != described.heads[0].outputs:
        fact = f"there are {len(usage.labels)} labels for {described.heads[0].outputs} outputs of {described.name}"
        raise SpecError(f"{where}{fact}; give one for each")


def _tokens(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0


def _check_tokenizer(described: ModelSpec, document: str, where: str) -> None:
    try:
        size = 1 + max(Tokenizer.from_str(document).get_vocab().values(), default=-1)
    except Exception as error:  # the library has no other name for what it raises
        raise SpecError(f"{where} is no document of a tokenizer: {error}; give Tokenizer.to_str()") from None
    tables = [tokens for stack in described.stacks if (tokens := _tokens(stack))]
    if size > max(tables, default=0):  # more rows than tokens are usual: tables are often made as wide as is fast
        known = " and ".join(map(str, tables)) or "no tokens"
        raise SpecError(f"{where} knows {size} tokens, the model {known}; give the tokenizer it was trained with")
