"""Adapters that find attention modules and make their heads observable, one file per kind of
module.

In order of precedence (`attention_sites.ADAPTERS`):

- `known_interfaces`: `hw.Attention` layers, and modules that use transformers' attention interface.
- `example_run`: `nn.MultiheadAttention`, and modules that computed attention while the model ran on
  an example.
- `output_projection`: modules with an output projection that is found by name or declared
  (`declarations`).

`output_path` decides whether heads are edited behind the attention function or at the output
projection.

`module_tracer` traces attention inside the forward of any module, also over an axis that joins
batch and heads.
"""
