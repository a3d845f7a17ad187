"""Decoding: continue prompts with a model, one token at a time or several candidates at once.

`decoding_config` describes how tokens are chosen; `decoding_state` holds the rows that are being
continued and their caches, and picks the next token; `text_output` turns ids into text as they
arrive; `generate` is the public entry point, which also turns text or ids into model inputs and
answers with one forward pass: classes. `engine` answers many requests together, in cache pages of
`kv_memory`.
"""

from .decoding_config import DecodingConfig
from .decoding_state import (
    DecodingState,
    eval_mode,
    greedy_decode,
    max_positions,
    pad_left,
    require_language_model,
    run_decode_steps,
    sample_tokens,
)
from .engine import Engine, EngineReport, RequestStream
from .generate import (
    GenerationOutput,
    PromptBatch,
    TextGenerator,
    encode_prompt,
    encode_text,
    generate,
    get_decoder_start_ids,
    make_random_streams,
    parse_prompts,
    stream,
)
from .kv_memory import BatchingConfig
from .text_output import IncrementalDetokenizer, ModelTokenizer, load_tokenizers

__all__ = [
    "BatchingConfig",
    "DecodingConfig",
    "DecodingState",
    "Engine",
    "EngineReport",
    "GenerationOutput",
    "IncrementalDetokenizer",
    "ModelTokenizer",
    "PromptBatch",
    "RequestStream",
    "TextGenerator",
    "eval_mode",
    "generate",
    "require_language_model",
]
__all__ += [
    "encode_prompt",
    "encode_text",
    "get_decoder_start_ids",
    "greedy_decode",
    "load_tokenizers",
    "make_random_streams",
    "max_positions",
    "pad_left",
    "parse_prompts",
    "run_decode_steps",
    "sample_tokens",
    "stream",
]
