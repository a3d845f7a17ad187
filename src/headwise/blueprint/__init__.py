"""Whole models, described: what counting, building, saving and reading foreign files all share."""

from .ends import Embedding, Head, Patches, Positions, Transform
from .model import KINDS, Beyond, Model
from .pieces import Dense, Experts, Norm, Weight
from .stack import Block, Nearly, Run, Stack
from .table import Table
from .text import from_dict, from_json, from_toml, to_dict, to_json, to_toml
from .usage import Usage

__all__ = ["KINDS", "Beyond", "Block", "Dense", "Embedding", "Experts", "Head", "Model", "Nearly", "Norm", "Patches"]
__all__ += ["Positions", "Run", "Stack", "Table", "Transform", "Usage", "Weight"]
__all__ += ["from_dict", "from_json", "from_toml", "to_dict", "to_json", "to_toml"]
