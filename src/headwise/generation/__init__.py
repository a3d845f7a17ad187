"""Generation: what a model says behind a prompt, chosen, followed or drawn, and told as it comes."""

from .decoding_config import DecodingConfig
from .decoding_state import DecodingState, eval_mode, max_positions, pad_left, require_language_model, run_decode_steps
from .generate import GenerationOutput, TextGenerator, generate, make_random_streams, stream
from .prompts import PromptBatch, encode_prompt, encode_text, get_decoder_start_ids, parse_prompts
from .sampling import sample_tokens
from .text_output import IncrementalDetokenizer, ModelTokenizer, load_tokenizers

__all__ = [
    "DecodingConfig",
    "DecodingState",
    "GenerationOutput",
    "IncrementalDetokenizer",
    "ModelTokenizer",
    "PromptBatch",
    "TextGenerator",
    "eval_mode",
    "generate",
    "require_language_model",
]
__all__ += [
    "encode_prompt",
    "encode_text",
    "get_decoder_start_ids",
    "load_tokenizers",
    "make_random_streams",
    "max_positions",
    "pad_left",
    "parse_prompts",
    "run_decode_steps",
    "sample_tokens",
    "stream",
]
