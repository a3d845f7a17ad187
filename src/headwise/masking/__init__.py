"""Which keys a query may attend to: patterns, positions and segments.

`pattern_base` and `patterns` are the rules (causal, window, BigBird, ...) as text, as masks and as counts;
`key_intervals` counts allowed pairs without forming a mask; `sequence_info` holds positions and segments of tokens
and the attention mask of a call. Only `sequence_info` needs torch.
"""
