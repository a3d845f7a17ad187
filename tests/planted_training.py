"""Bugs in training, in what it writes, and in what it goes on from."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FILES = "test_files.py"
TRAINING = "test_training.py"
RUNS = "test_runs.py"
WATCHING = "test_watching.py"
CLI = "test_train_cli.py"
CRASHES = f"{RUNS}::test_a_run_that_crashes_again_and_again_ends_with_the_same_bits"
bug(
    "files-written-over",
    "files.py",
    "temporary = path.with_name(",
    "temporary = path and path.with_name(path.name) or path.with_name(",
    f"{FILES}::test_the_old_file_outlives_every_failure",
)
bug(
    "files-renamed-before-they-reach-the-disk",
    "files.py",
    "            _pour(handle, piece)\n        os.fsync(handle)\n    finally:",
    "            _pour(handle, piece)\n    finally:",
    f"{FILES}::test_a_file_reaches_the_disk_before_its_name_and_the_name_before_the_end",
)
bug(
    "files-one-write-is-enough",
    "files.py",
    "    while rest:\n        rest = rest[os.write(handle, rest) :]",
    "    os.write(handle, rest)",
    f"{FILES}::test_a_system_that_takes_little_at_a_time_gets_all",
)
bug(
    "files-leftovers-of-a-failure-stay",
    "files.py",
    "                temporary.unlink()\n",
    "                pass\n",
    f"{FILES}::test_the_old_file_outlives_every_failure",
    f"{FILES}::test_an_interrupt_leaves_no_temporary_file",
)
bug(
    "files-lock-outlives-a-full-disk",
    "files.py",
    "            os.close(handle)  # and with it the lock\n",
    "",
    f"{RUNS}::test_whatever_call_fails_the_checkpoint_before_is_whole_and_the_run_goes_on[write]",
)
bug(
    "files-a-torn-line-is-an-error",
    "files.py",
    '    *whole, _ = path.read_bytes().split(b"\\n") if path.exists() else [b""]',
    "    whole = path.read_bytes().splitlines() if path.exists() else []",
    f"{FILES}::test_lines_are_read_back_but_for_a_torn_one",
    CRASHES,
)
bug(
    "training-accumulates-a-mean-of-means",
    "training/train_step.py",
    "loss = self.loss(own.batch) / total",
    "loss = self.loss(own.batch) / asked(own.batch) / len(shares)",
    f"{TRAINING}::test_a_batch_in_parts_has_the_gradient_of_the_whole",
)
bug(
    "training-vectors-decay",
    "training/optimiser.py",
    'dimensions = len(weight.shape) - ("expert" in weight.layout.axes)',
    "dimensions = len(weight.layout.axes)",
    f"{TRAINING}::test_vectors_do_not_decay_however_many_axes_name_them",
)
bug(
    "training-state-of-the-optimiser-in-another-order",
    "training/optimiser.py",
    '        return {f"{kind} {self._names[n]}": value for n, state in states.items() '
    "for kind, value in state.items()}",
    "        named = zip(self._names, states.values(), strict=False)\n"
    '        return {f"{kind} {name}": value for name, state in named for kind, value in state.items()}',
    f"{TRAINING}::test_adamw_goes_on_from_its_tensors_however_often_and_in_whatever_order",
    CRASHES,
)
bug(
    "training-all-groups-decay",
    "training/optimiser.py",
    'recipe.weight_decay if "decayed" in name else 0.0',
    "recipe.weight_decay",
    f"{TRAINING}::test_adamw_is_its_formula",
)
bug(
    "training-smoothing-forgotten",
    "training/train_step.py",
    "return cross_entropy(logits, labels.to(self.device), self.recipe.smoothing)",
    "return cross_entropy(logits, labels.to(self.device))",
    f"{TRAINING}::test_smoothing_of_a_recipe_reaches_the_loss",
)
bug(
    "training-loss-in-short-numbers",
    "training/loss.py",
    "logits.shape[-1]).to(exact)",
    "logits.shape[-1])",
    f"{TRAINING}::test_the_loss_of_short_numbers_is_taken_in_float32",
)
bug(
    "training-terms-of-one-layer-only",
    "training/train_step.py",
    "Probe(ledger=Ledger(self._terms, name))",
    'Probe(ledger=Ledger(self._terms, "one"))',
    f"{TRAINING}::test_terms_join_the_loss_by_their_factor",
)
bug(
    "training-cosine-ends-a-step-late",
    "training/lr_schedules.py",
    "return _bend((course.step - course.warmup) / (course.steps - course.warmup), 1.0, course.floor)",
    "return _bend((course.step - 1 - course.warmup) / (course.steps - course.warmup), 1.0, course.floor)",
    f"{TRAINING}::test_cosine_is_its_formula",
    f"{TRAINING}::test_cosine_is_the_one_of_transformers",
)
bug(
    "training-one-cycle-starts-at-nothing",
    "training/lr_schedules.py",
    "_bend(at / top, 1 / RISE, 1.0)",
    "_bend(at / top, 0.0, 1.0)",
    f"{TRAINING}::test_one_cycle_is_torchs",
)
bug(
    "training-generators-start-anew",
    "training/training_run.py",
    "        torch.set_rng_state(cpu)\n",
    "",
    CRASHES,
)
bug(
    "training-kept-without-the-best",
    "training/checkpoint.py",
    "*([] if best is None else [self.path(best)])",
    "",
    f"{RUNS}::test_the_last_checkpoints_stay_and_the_best",
)
bug(
    "training-checksum-of-names-alone",
    "training/checkpoint.py",
    "        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)\n",
    "",
    f"{RUNS}::test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken[flipped]",
)
bug(
    "training-a-damaged-checkpoint-ends-all",
    "training/checkpoint.py",
    "            except Damaged as error:\n                damages.append(str(error))",
    "            except Damaged:\n                raise",
    f"{RUNS}::test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken",
)
bug(
    "training-resumes-whatever-it-finds",
    "training/run_setup.py",
    'if difference := first_difference(held.state["config"], self.config):',
    'if difference := first_difference(held.state["config"]["task"], self.config["task"]):',
    f"{RUNS}::test_another_setup_is_refused_by_its_first_difference",
)
bug(
    "training-clips-before-it-looks",
    "training/training_run.py",
    "        if not bool(loss.isfinite() & norm.isfinite()):",
    "        self.holding.clip(self.recipe.clip, norm)\n        if not bool(loss.isfinite() & norm.isfinite()):",
    f"{RUNS}::test_a_gradient_that_is_not_finite_is_found_where_it_began",
)
bug(
    "training-steps-into-nothing",
    "training/training_run.py",
    "        if not bool(loss.isfinite() & norm.isfinite()):",
    "        if not bool(norm.isfinite()) and step < 2:",
    f"{RUNS}::test_a_loss_that_is_not_finite_ends_a_run_and_says_where_it_began",
)
bug(
    "training-a-trial-draws-from-the-run",
    "training/autotune.py",
    "            with torch.random.fork_rng(devices):\n",
    "            with torch.random.fork_rng([], enabled=False):\n",
    f"{WATCHING}::test_a_trial_changes_neither_weights_nor_what_is_drawn_later",
)
bug(
    "training-journal-says-steps-twice",
    "training/loggers.py",
    'if record.get("step", 0) <= step',
    'if record.get("step", 0) <= step + 1',
    f"{WATCHING}::test_the_journal_goes_on_behind_the_checkpoint",
    CRASHES,
)
bug(
    "training-patience-forgets",
    "training/training_run.py",
    "            self.progress.waited += 1\n",
    "            self.progress.waited = 1\n",
    f"{RUNS}::test_a_run_that_gets_no_better_ends",
)
bug(
    "training-options-lose-against-set",
    "cli/train.py",
    "from_dict({**changes, **options}, base)",
    "from_dict({**options, **changes}, base)",
    f"{CLI}::test_options_win_over_what_is_set",
)
bug(
    "training-a-preset-reads-the-future",
    "training/run_setup.py",
    "made.pattern & spec.pattern",
    "made.pattern",
    f"{CLI}::test_a_preset_takes_the_place_of_every_attention[longformer]",
)
bug(
    "attention-stays-plain-behind-a-step",
    "training/train_step.py",
    "            layer.only = only\n",
    "            pass\n",
    f"{TRAINING}::test_plain_attention_gives_the_same_gradients_and_leaves_layers_as_they_were",
)
bug(
    "attention-slower-way-taken",
    "training/train_step.py",
    "if taken < seconds[best] * (1 - WORTH):",
    "if taken > seconds[best] * (1 - WORTH):",
    f"{TRAINING}::test_the_faster_precision_is_taken_and_the_exact_one_when_in_doubt",
)
bug(
    "training-leftovers-in-parts-of-nothing",
    "training/loss.py",
    "size = -(-rows // count)",
    "size = rows // count",
    f"{TRAINING}::test_what_an_epoch_leaves_over_is_taken_in_parts_too",
)
