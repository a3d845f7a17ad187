"""Sentences with parses in CoNLL-U, and a model that splits their words."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors

import headwise as hw
from support.tiny_configs import model_config

WORDS = ["[UNK]", "[CLS]", "[SEP]", "the", "dog", "don", "'", "t", "bark", "##s", ".", "a", "b"]


ROWS = """# text = The dogs don't bark.
1 The _ _ _ _ 2 det _ _
2 dogs _ _ _ _ 5 nsubj:pass _ _
3-4 don't _ _ _ _ _ _ _ _
3 do _ _ _ _ 5 aux _ _
4 n't _ _ _ _ 5 advmod _ _
4.1 silent _ _ _ _ _ _ _ _
5 bark _ _ _ _ 0 root _ _
6 . _ _ _ _ 5 punct _ _

# sent_id = two
1 a _ _ _ _ 0 root _ _
2 du _ _ _ _ 1 case _ _
"""


def conllu_lines(text: str = ROWS) -> list[str]:
    """The lines of a text, with tabs between the columns of CoNLL-U."""
    return [line if line.startswith("#") else line.replace(" ", "\t") for line in text.splitlines()]


def build_encoder() -> hw.Transformer:
    """An encoder whose tokenizer splits words and adds special tokens."""
    inner = models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = Tokenizer(inner)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $0 [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    config = model_config(
        "bert",
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=len(WORDS),
        max_position_embeddings=12,
    )
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    net.usage = hw.ProcessorSpec(tokenizer=tokenizer.to_str(), prefix_ids=(1,), suffix_ids=(2,))
    return net
