"""Generation: what a model says behind a prompt, chosen, followed or drawn, and told as it comes."""

from .course import Course, answering, check_says, steps
from .how import Decoding
from .picking import pick
from .prompts import Given, taken
from .saying import Asked, Said, generate, stream, streams_of
from .words import Telling, Words, words_of

__all__ = ["Asked", "Course", "Decoding", "Given", "Said", "Telling", "Words", "answering", "check_says", "generate"]
__all__ += ["pick", "steps", "stream", "streams_of", "taken", "words_of"]
