"""Many machines: how the ranks of a world divide a training among themselves, and what each holds of a model."""

from .launch import Launch, joined
from .mesh import WAYS, Spread

__all__ = ["WAYS", "Launch", "Spread", "joined"]
