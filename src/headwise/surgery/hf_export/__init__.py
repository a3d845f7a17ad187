"""A pruned or converted model as a folder that transformers loads.

`model_folder` decides between a plain config and a loader script, `shard_rewrite` writes weights shard by shard,
`resized_modules` loads layers of unequal size, `load_check` loads the folder in a fresh process and compares.
"""
