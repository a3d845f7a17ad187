"""Generation: what a model says behind a prompt, chosen, followed or drawn, and told as it comes."""

from .decoding_config import Decoding
from .decoding_state import Course, answering, check_says, longest, side_by_side, steps
from .generate import Asked, Said, generate, stream, streams_of
from .prompts import Given, beginning, read, row_of, taken
from .sampling import pick
from .text_output import Telling, Words, words_of

__all__ = ["Asked", "Course", "Decoding", "Given", "Said", "Telling", "Words", "answering", "check_says", "generate"]
__all__ += [
    "beginning",
    "longest",
    "pick",
    "read",
    "row_of",
    "side_by_side",
    "steps",
    "stream",
    "streams_of",
    "taken",
    "words_of",
]
