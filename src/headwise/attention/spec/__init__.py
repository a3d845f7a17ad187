"""Specs: frozen descriptions of attention layers, independent of how they are executed.

- `heads`: the number and widths of heads, and which key-value head each query head uses;
- `attention_spec`: `AttentionSpec`, one part per slot (project, similarity, pattern, normaliser,
  merge), the heads,
  and a list of modifiers;
- `serialization`: specs as TOML or JSON; `attention_spec` reads them back.

No module of this package imports torch itself.
"""
