"""Export of pruned and converted models as folders that Hugging Face transformers can load.

`model_folder` writes the folder: a plain checkpoint if config.json can describe the model,
otherwise one with a loader script, otherwise a headwise folder. It loads the folder with
transformers and compares outputs. `shard_rewrite` rewrites the weights shard by shard,
`resized_modules` finds the module attributes and shapes that the loader script has to change.
`module_folder` writes models that were changed as modules, without a spec.
"""
