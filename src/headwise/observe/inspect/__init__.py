"""Attention layers of any model: find them, observe them, and ablate or patch their heads.

In reading order:

- `site`: `Site`, one attention layer of a model and what can be done to it; `Sites`, a printable
  list; the inputs and weights of one attention call.
- `attention_sites`: `sites(model)` finds the attention layers; `adapters` has one adapter per kind
  of module.
- `abilities`: why a layer cannot be observed, ablated, pruned or converted.
- `hooks`: the recorder of runs: hooks inside attention layers and records of the calls of any
  module, on patches of classes and overrides of the forward of single modules, which leave nothing
  behind. Traces, ablation, measures and steps all use it.
- `ablation`: scale, zero or replace the outputs of heads.
- `dataset_means`: means of head outputs and of attention weights over data, for mean ablation.
- `trace_capture`: record a run as a trace (`headwise.observe.traces`).
- `model_inputs`: turn texts, tensors or dictionaries into the inputs of any model, and run it on
  them.
  `model_tokenizer` finds the tokenizer of a model, and encodes texts as the model does.
"""
