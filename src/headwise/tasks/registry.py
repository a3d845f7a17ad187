"""Every task by its name."""

from __future__ import annotations

from .base import Task
from .frames import Frames
from .images import Images
from .jsonl import Jsonl
from .parallel import Parallel
from .text import Text
from .tokens import TokenFile

TASKS: dict[str, type[Task]] = {
    "frames": Frames,
    "images": Images,
    "jsonl": Jsonl,
    "parallel": Parallel,
    "text": Text,
    "tokens": TokenFile,
}
