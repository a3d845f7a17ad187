"""Attention patterns and masks: which keys each query may attend to.

- `patterns`: the patterns (causal, window, BigBird, ...), and `parse_pattern` to read them from
  text;
- `pattern_base`: their base classes, `&` and `|`, and drawing a mask as text;
- `key_intervals`: counts allowed pairs without computing a mask;
- `sequence_info`: positions and segments of tokens, and the attention mask of a call.

Only `sequence_info` imports torch.
"""
