"""Generation: what a model says behind a prompt, chosen, followed or drawn, and told as it comes."""

from .how import Decoding
from .picking import pick

__all__ = ["Decoding", "pick"]
