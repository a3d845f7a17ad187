"""How to reach the heads of each kind of attention module, one file each.

`headwise_attention`: our layers; `transformers_interface`: models that use transformers' attention interface;
`torch_mha`: nn.MultiheadAttention; `output_projection`: the projection behind the heads, found or declared;
`example_run` and `module_tracer` find attention by running the module; `module_attributes` reads head counts from
attributes and configs.
"""
