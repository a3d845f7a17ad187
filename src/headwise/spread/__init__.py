"""Many machines: how the ranks of a world divide a training among themselves, and what each holds of a model."""

from .holding import Holding, alone, hold
from .launch import Launch, joined
from .mesh import WAYS, Spread
from .path import Path
from .world import World

__all__ = ["WAYS", "Holding", "Launch", "Path", "Spread", "World", "alone", "hold", "joined"]
