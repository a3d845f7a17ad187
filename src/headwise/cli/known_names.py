"""Names that options accept, repeated here so that a wrong one is refused without importing torch.

`tests/cli/test_bad_arguments.py` compares each tuple with the names of the library.
"""

IMPORTANCE_METHODS = (
    "leave-one-out",
    "shapley",
    "michel",
    "michel-code",
    "michel-bertology",
    "michel-bert",
    "taylor",
    "taylor-size",
)
IMPORTANCE_METHODS += ("lrp", "lrp-jacobian")
RANKING_METHODS = (*IMPORTANCE_METHODS, "random", "best")
REMOVAL_ORDERS = (*RANKING_METHODS, "gates")
OBJECTIVES = (
    "next-token",
    "masked-token",
    "label",
    "translation",
    "drift",
    "token-drift",
    "drift-l2",
)
OBJECTIVES += ("token-drift-l2",)
CRITERIA = ("ours", "untested", "clark", "voita")
MEASURES = (
    "entropy",
    "breadth",
    "confidence",
    "distance",
    "sink",
    "first",
    "separator",
    "punctuation",
    "previous",
)
MEASURES += (
    "self",
    "next",
    "offset",
    "peak",
    "positional_share",
    "support50",
    "support90",
    "support95",
    "duplicate",
)
MEASURES += ("induction", "rare")
LITERATURE_MEASURES = (
    "clark self",
    "clark next",
    "clark previous",
    "clark first",
    "clark separator",
)
LITERATURE_MEASURES += (
    "clark separator to itself",
    "clark others to separator",
    "clark punctuation",
    "clark entropy",
)
LITERATURE_MEASURES += (
    "clark entropy of first",
    "voita confidence",
    "voita position",
    "voita peak",
    "voita rare",
)
TASKS = (
    "copy",
    "dates",
    "graph",
    "group",
    "lookup2",
    "markov",
    "recall",
)  # without those that read files
FILE_TASKS = ("frames", "images", "parallel", "text")
KEEP_SCOPES = ("layer", "stack", "model")
UNIT_KINDS = ("auto", "head", "group")
FOLD_MODES = ("none", "mean", "bias")
BUDGET_KINDS = ("parameters", "cache", "time", "loss")
ALIGN_SIDES = ("none", "values", "keys", "both")
GROUPINGS = ("consecutive", "similar")
SIMILARITY_KINDS = ("distance", "cosine")
ATTENTION_KINDS = ("all", "self", "cross")
TRACE_PRECISIONS = ("own", "half")
TRACE_EXTRA_TENSORS = ("v", "z")
EXPORT_SUFFIXES = (".csv", ".json", ".npz")
AGGREGATIONS = ("mean", "max", "min", "sum")
OUTPUT_FOLDERS = {  # folders that commands write, with the patterns of file names that mark them
    "report of heads": ("heads.json", "head-*-light.svg"),
    "report of pruning curves": ("curves.json",),
    "pruned or converted model": ("heads.json",),
    "model or training run": ("headwise.toml", "checkpoint", "metrics.jsonl", "sample"),
}
COMPILE_MODES = ("off", "auto", "on")
ACTIVATION_PROFILES = (
    "dense",
    "chunked",
    "bf16_matmul",
    "sdpa",
    "flash-cuda",
    "paper-2022",
    "zhihu-624740065",
)
NETWORKS = (
    "gru",
    "conv",
    "conv-dilated",
    "gru-fixed",
    "gru-additive",
    "gru-dot",
)  # without self-attention
LOGGERS = ("tensorboard",)
