"""Many machines: how the ranks of a world divide a training among themselves, and what each holds of a model.

What is imported here needs no torch: a command reads how it was launched before anything heavy.
"""

from .launch import Launch, joined
from .parallelism import WAYS, Spread

__all__ = ["WAYS", "Launch", "Spread", "joined"]
