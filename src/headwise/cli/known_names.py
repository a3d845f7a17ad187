"""Names that options of `cost` accept, repeated here so that --help does not import torch."""

ACTIVATION_PROFILES = (
    "dense",
    "chunked",
    "bf16_matmul",
    "sdpa",
    "flash-cuda",
)
