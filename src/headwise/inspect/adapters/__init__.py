"""Adapters that find attention modules and make their heads observable, one file per kind of module.

In order of precedence (`attention_sites.ADAPTERS`):

- `headwise_attention`: `hw.Attention` layers.
- `transformers_interface`: modules that use transformers' attention interface.
- `torch_mha`: `nn.MultiheadAttention`.
- `example_run`: modules that computed attention while the model ran on an example.
- `output_projection`: modules with an output projection that is found by name or declared.

`module_tracer` traces attention inside the forward of any module; `module_attributes` reads head counts and attention
patterns from module attributes and configs.
"""
