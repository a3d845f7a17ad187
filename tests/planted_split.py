"""Bugs in how ranks divide heads, and tokens of rows."""

from __future__ import annotations

from planting import bug

TENSOR = "test_tensor.py::"
CONTEXT = "test_context.py::"
DIVIDED = "test_divided.py::"
HEADS = TENSOR + "test_heads_that_are_divided"
TOKENS = CONTEXT + "test_tokens_that_are_divided"
bug(
    "an-output-bias-from-every-rank",
    "module.py",
    "        if not self.peers.first:  # what a merge says of silence is added once\n",
    "        if False:\n",
    TENSOR + "test_a_divided_model_is_the_model[longformer-decoder]",
)
bug(
    "a-feed-bias-from-every-rank",
    "models/feed_forward.py",
    'bias = self.maybe("down_bias") if self.peers.first else None  # it is added once',
    'bias = self.maybe("down_bias")',
    TENSOR + "test_a_divided_model_is_the_model[mha-decoder]",
)
bug(
    "an-expert-bias-from-every-rank",
    "models/feed_forward.py",
    'if name != "down" or self.peers.first else None',
    "if True else None",
    f"{HEADS}[experts]",
)
bug(
    "a-gradient-from-the-heads-in-hand-alone",
    "distributed/collectives.py",
    '''    """x as it is; backwards the sum over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.total(grads[0]), None
''',
    '''    """x as it is; backwards the sum over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
''',
    TENSOR + "test_a_divided_model_is_the_model[mha-decoder]",
)
bug(
    "copies-keep-what-each-found",
    "distributed/head_partition.py",
    "if int(count.max()) > 1}",
    "if int(count.min()) > 9}",
    TENSOR + "test_a_divided_model_is_the_model[mqa-decoder]",
)
bug(
    "heads-that-need-each-other-are-told-apart",
    "distributed/head_partition.py",
    "        needs = spec.sources(out)\n",
    "        needs = frozenset([out])\n",
    TENSOR + "test_a_divided_model_is_the_model[talking-decoder]",
    f"{HEADS}[groups_of_a_mixing]",
)
bug(
    "a-term-counts-for-every-rank",
    "distributed/parallel_attention.py",
    "        return each + (value - each).detach()\n",
    "        return value\n",
    f"{HEADS}[terms]",
)
bug(
    "a-balance-of-the-tokens-in-hand",
    "parts/mixture_of_heads.py",
    'ledger.whole(torch.cat(sums), "tokens")',
    "torch.cat(sums)",
    f"{TOKENS}[terms]",
    DIVIDED + "test_terms_are_those_of_one_rank[context=2]",
)
bug(
    "all-heads-drop-the-same",
    "distributed/parallel_attention.py",
    "seed = int(torch.randint(2**62, ())) + rank\n",
    "seed = int(torch.randint(2**62, ()))\n",
    f"{HEADS}[dropout]",
)
bug(
    "heads-draw-from-the-stream-of-all",
    "distributed/parallel_attention.py",
    "        with torch.random.fork_rng(cards):\n",
    "        if True:\n",
    f"{HEADS}[dropout]",
)
bug(
    "minus-zero-is-lost-on-the-way-to-a-file",
    "distributed/tensor_parallel.py",
    "        flat[: part.numel()] = part.flatten()\n",
    "        flat[: part.numel()] = part.flatten() + 0\n",
    f"{HEADS}[one_file_whatever_the_split]",
)
bug(
    "a-source-is-read-by-halves",
    "module.py",
    "        return Remembered(*self.peers.gather(entry, at), self.spec)\n",
    "        return Remembered(entry, at, self.spec)\n",
    CONTEXT + "test_rows_that_are_divided_are_rows[mha-encoder-decoder]",
)
bug(
    "zigzag-that-never-turns",
    "distributed/parallel_attention.py",
    "halves[:, :, 1].flip(0)",
    "halves[:, :, 1]",
    CONTEXT + "test_rows_that_are_divided_are_rows[gqa-decoder]",
)
bug(
    "padding-of-a-row-is-read",
    "distributed/context_parallel.py",
    "_places(told.segment, wire, order, -1)",
    "_places(told.segment, wire, order, 0)",
    f"{TOKENS}[lengths]",
    CONTEXT + "test_rows_that_are_divided_are_rows[mha-encoder]",
)
bug(
    "every-rank-answers-for-a-row",
    "distributed/context_parallel.py",
    "    elif wire.rank:\n",
    "    elif wire.rank > 9:\n",
    CONTEXT + "test_rows_that_are_divided_are_rows[mha-encoder]",
)
bug(
    "a-pooled-row-is-what-is-in-hand",
    "models/embeddings_heads.py",
    'held, at = self.peers.gather({"states": h}, at)',
    'held = {"states": h}',
    f"{TOKENS}[rows_as_a_whole]",
)
bug(
    "ranks-without-global-tokens-stay-away",
    "nn/longformer_attention.py",
    "max(self._count(at, chosen_BT), int(self.overall.peers.spans > 1))",
    "self._count(at, chosen_BT)",
    f"{TOKENS}[a_block_of_several_layers]",
)
bug(
    "gathered-keys-teach-nobody-else",
    "distributed/collectives.py",
    "        return ctx.wire.dealt(grads[0]), None\n",
    "        return grads[0][ctx.wire.rank].clone(), None\n",
    CONTEXT + "test_rows_that_are_divided_are_rows[mha-decoder]",
)
bug(
    "a-mask-of-the-keys-in-hand",
    "inputs.py",
    "own.shape[1] * spans",
    "own.shape[1]",
    f"{TOKENS}[a_mask_over_all_keys]",
)
bug(
    "copies-count-twice-in-the-norm",
    "distributed/tensor_parallel.py",
    "        return (part.square() / self._held.to(part.device)).sum()\n",
    "        return part.square().sum()\n",
    DIVIDED + "test_two_ranks_take_the_steps_of_one[tensor=2-shared keys]",
)
bug(
    "a-held-out-row-is-measured-in-pieces",
    "training/evaluation.py",
    "autocast(self.choice, self.device), whole_rows(path):",
    "autocast(self.choice, self.device):",
    DIVIDED + "test_a_run_goes_on_another_way",
)
bug(
    "rows-are-divided-among-those-who-divide-tokens",
    "distributed/sharded_model.py",
    'self.world.share(batch, "data", "shards")',
    "self.world.share(batch)",
    DIVIDED + "test_two_ranks_take_the_steps_of_one[context=2-echo]",
)
bug(
    "a-sum-is-not-counted-where-the-mean-enters",
    "distributed/communication_volume.py",
    '(3 if block.form == "merged" else 2)',
    "(2)",
    DIVIDED + "test_a_step_sends_what_is_counted[tensor=2-odd]",
)
bug(
    "ranks-of-one-worker-draw-apart",
    "training/training_run.py",
    "states.get(_of_worker(name, self.world.worker))",
    "states.get(_of_worker(name, self.world.rank))",
    DIVIDED + "test_ranks_of_one_worker_go_on_in_one_stream",
)
