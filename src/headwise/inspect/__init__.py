"""Attention layers of any model: find them, watch them, change what their heads output.

`site` describes one layer and what may be done to it, `attention_sites` finds them, `adapters` know each kind of
module; `hooks` and `site_hooks` run code while a model runs; `ablation` zeroes, scales and patches heads;
`dataset_means` averages head outputs over data; `trace_capture` records a run; `model_inputs` prepares texts for
any model.
"""
