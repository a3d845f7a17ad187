"""Bugs in what ranks divide, sum, keep and say."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
MANY, ENDS = "test_many.py", "test_many_ends.py"
STEPS = f"{MANY}::test_two_ranks_take_the_steps_of_one"
RUNS = f"{MANY}::test_a_run_of_two_that_is_interrupted_goes_on_to_the_same_bits"
WORLDS = f"{MANY}::test_a_run_goes_on_in_a_world_of_another_size"
TOLD = f"{MANY}::test_what_ranks_cannot_do_is_told_to_all_of_them_in_the_same_line"
bug(
    "many-a-mean-of-the-means-of-ranks",
    "training/train_step.py",
    "loss = self.loss(own.batch) / total",
    "loss = self.loss(own.batch) / max(1, asked(own.batch)) / self.world.workers",
    f"{MANY}::test_the_first_gradient_is_that_of_the_mean_over_all_that_is_asked",
)
bug(
    "many-every-rank-takes-every-row",
    "distributed/ranks.py",
    "return share(batch, index, count)",
    "return share(batch, 0, 1)",
    STEPS,
)
bug(
    "many-rows-left-over-are-nobodys",
    "distributed/parallelism.py",
    "    rows = each + (index < over)\n",
    "    rows = each\n",
    f"{STEPS}[data=2-echo]",
)
bug(
    "many-gradients-are-averaged",
    "distributed/fsdp.py",
    "module.set_gradient_divide_factor(1.0)",
    "module.set_gradient_divide_factor(2.0)",
    f"{STEPS}[shards=2-echo]",
)
bug(
    "many-common-tables-are-not-summed",
    "distributed/fsdp.py",
    "summed = Buckets([p for name, p in kept.items() if name in learned], working(world))",
    "summed = Buckets([p for name, p in kept.items() if name not in learned], working(world))",
    f"{STEPS}[shards=2-odd]",
)
bug(
    "many-a-norm-of-ones-own-slices",
    "distributed/sharded_model.py",
    "        dist.all_reduce(total)\n",
    "",
    f"{STEPS}[shards=2-echo]",
)
bug(
    "many-what-all-hold-counts-for-each",
    "distributed/sharded_model.py",
    "        return self.world.size // parts\n",
    "        return 1\n",
    f"{STEPS}[shards=2-odd]",
)
bug(
    "many-gradients-leave-before-the-last-part",
    "training/train_step.py",
    "if n == len(shares):",
    "if n == 1:",
    f"{STEPS}[data=2-parts]",
)
bug(
    "many-what-nobody-used-gets-a-gradient",
    "distributed/collectives.py",
    "if param.grad is not None or bool(there[index]):",
    "if True:",
    f"{STEPS}[data=2-odd]",
)
bug(
    "many-slices-end-early",
    "distributed/fsdp.py",
    "self.each = -(-length // ranks)",
    "self.each = length // ranks",
    f"{STEPS}[shards=2-odd]",
)
bug(
    "many-all-ranks-drop-the-same",
    "training/run_setup.py",
    "torch.manual_seed(stream(self.recipe.seed, world.worker))",
    "torch.manual_seed(stream(self.recipe.seed, 0))",
    f"{MANY}::test_ranks_drop_other_numbers",
)
bug(
    "many-one-rank-goes-on-drawing",
    "training/training_run.py",
    "cpu, cuda = (states.get(_of_worker(name, self.world.worker)) for",
    "cpu, cuda = (states.get(_of_worker(name, 0)) for",
    RUNS,
)
bug(
    "many-moments-stay-behind",
    "training/training_run.py",
    "self.optimiser.load({key: self.holding.part(named(key), value) for key, value in moments})",
    "self.optimiser.load(dict(moments)) if not self.holding.lying else None",
    f"{MANY}::test_slices_go_on_where_they_stood",
)
bug(
    "many-a-world-of-another-size-is-another-run",
    "training/run_setup.py",
    'if name != "spread"}',
    "}",
    WORLDS,
)
bug(
    "many-held-out-rows-of-one-rank",
    "training/evaluation.py",
    "return averages(self.world.every(sums(own)))",
    "return averages([sums(own)])",
    WORLDS,
)
bug(
    "many-nobody-compares-data",
    "training/run_setup.py",
    "            check_alike(world, {**setup.config,",
    '            check_alike(world, {**setup.config, "first batch": "",',
    f"{TOLD}[data]",
)
bug(
    "many-nobody-compares-given-weights",
    "training/run_setup.py",
    '"weights": setup.given and checksum(setup.given)',
    '"weights": bool(setup.given)',
    f"{TOLD}[weights]",
)
bug(
    "many-the-leader-alone-is-asked-what-went-bad",
    "distributed/ranks.py",
    "        for rank, said in enumerate(self.every(value)):\n            if said is not None:",
    "        for rank, said in enumerate(self.every(value)):\n            if said is not None and rank == 0:",
    f"{TOLD}[diverged]",
)
bug(
    "many-all-speak",
    "distributed/launch.py",
    "return self.store.add(SAID, 1) == 1",
    "return self.store.add(SAID, 1) >= 1",
    f"{ENDS}::test_what_is_refused_is_said_once",
)
bug(
    "many-ranks-are-waited-for-without-end",
    "distributed/launch.py",
    'next(rendezvous("env://", launch.rank, launch.size, timeout=JOINING))',
    'next(rendezvous("env://", launch.rank, launch.size, timeout=timedelta(seconds=25)))',
    f"{ENDS}::test_ranks_that_do_not_come_are_not_waited_for_without_end",
)
bug(
    "many-a-layer-is-put-together-once",
    "distributed/communication_volume.py",
    "*((layer, 2) for layer in layers.values())",
    "*((layer, 1) for layer in layers.values())",
    f"{MANY}::test_what_is_sent_is_what_is_counted",
)
bug(
    "many-a-spread-forgets-its-order",
    "distributed/parallelism.py",
    "for way in reversed(WAYS):",
    "for way in WAYS:",
    f"{MANY}::test_every_rank_stands_somewhere_else_and_neighbours_differ_in_the_last_way",
)
bug(
    "many-slices-are-compiled",
    "training/run_setup.py",
    "possible = choice if self.world.spread.shards == 1 else",
    "possible = choice if self.world.spread else",
    f"{MANY}::test_slices_go_on_without_what_was_compiled",
)
bug(
    "many-nobody-compares-code",
    "training/run_setup.py",
    "check_alike(world, {**code(),",
    "check_alike(world, {",
    f"{TOLD}[code]",
)
