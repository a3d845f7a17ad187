"""Generation: what a model says behind a prompt, chosen, followed or drawn, and told as it comes."""

from .decoding_config import DecodingConfig
from .decoding_state import DecodingState, eval_mode, require_language_model, max_positions, pad_left, run_decode_steps
from .generate import TextGenerator, GenerationOutput, generate, stream, make_random_streams
from .prompts import PromptBatch, get_decoder_start_ids, encode_text, encode_prompt, parse_prompts
from .sampling import sample_tokens
from .text_output import IncrementalDetokenizer, ModelTokenizer, load_tokenizers

__all__ = ["TextGenerator", "DecodingState", "DecodingConfig", "PromptBatch", "GenerationOutput", "IncrementalDetokenizer", "ModelTokenizer", "eval_mode", "require_language_model", "generate"]
__all__ += [
    "get_decoder_start_ids",
    "max_positions",
    "sample_tokens",
    "encode_text",
    "encode_prompt",
    "pad_left",
    "run_decode_steps",
    "stream",
    "make_random_streams",
    "parse_prompts",
    "load_tokenizers",
]
