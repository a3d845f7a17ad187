"""Attention layers of any model: find them, observe them, and ablate or patch their heads.

In reading order:

- `site`: `Site`, one attention layer of a model and what can be done to it; `Sites`, a printable
  list.
- `attention_sites`: `sites(model)` finds the attention layers; `adapters` has one adapter per kind
  of module.
- `method_patches`: replace methods of classes, and the forward of single modules, for a while.
- `observed_call`: the inputs and weights of one attention call of any model.
- `hooks`: the recorder of runs: hooks inside attention layers and records of the calls of any
  module, which leave nothing behind. Traces, ablation, measures and steps all use it.
- `ablation`: scale, zero or replace the outputs of heads.
- `dataset_means`: means of head outputs and of attention weights over data, for mean ablation.
- `trace_capture`: record a run as a trace (`headwise.observe.traces`).
- `model_inputs`: turn texts, tensors or dictionaries into the inputs of any model, and run it on
  them.
  `model_tokenizer` finds its tokenizer.
"""
