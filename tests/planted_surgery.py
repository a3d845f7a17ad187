"""Bugs in how heads are chosen and cut, and in how keys and values are shared."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
REMOVING, PRUNING, BUDGETS = "test_removing.py", "test_pruning.py", "test_budgets.py"
bug(
    "surgery-what-stays-of-an-attention-forgets-the-scale-of-its-layer",
    "surgery/attention_replacement.py",
    ".to(next(net.parameters())) * layer.scale",
    ".to(next(net.parameters()))",
    f"{REMOVING}::test_cut_is_silenced_wherever_norms_stand[none-pre]",
)
bug(
    "surgery-what-stays-of-an-attention-forgets-the-norm-behind-it",
    "surgery/attention_replacement.py",
    "added if behind is None else",
    "added if True else",
    f"{REMOVING}::test_cut_is_silenced_wherever_norms_stand[none-sandwich]",
)
bug(
    "surgery-a-still-attention-loses-the-norm-of-the-sum",
    "model_spec/model.py",
    'if name not in self.still or self.placement == "post"]',
    "if name not in self.still]",
    f"{REMOVING}::test_cut_is_silenced_wherever_norms_stand[none-post]",
)
bug(
    "surgery-a-cut-model-shares-memory-with-the-whole-one",
    "surgery/attention_replacement.py",
    "yield name, tensor.detach().clone().contiguous()",
    "yield name, tensor.detach().contiguous()",
    f"{REMOVING}::test_cut_is_silenced_in_models_of_families[gpt2]",
)
bug(
    "surgery-the-bias-of-a-merge-is-not-what-rests",
    "surgery/attention_replacement.py",
    '        return Changed(None, {"constant": said if constant is None else said + constant.to(said)})',
    '        return Changed(None, {"constant": said if constant is None else constant.to(said)})',
    f"{PRUNING}::test_a_layer_that_goes_leaves_its_mean",
)
bug(
    "surgery-biases-of-heads-that-stay-are-folded-too",
    "surgery/pruning.py",
    "for head in range(len(spec.speaks)) if head not in kept}",
    "for head in range(len(spec.speaks))}",
    f"{PRUNING}::test_folding_biases_is_saying_them",
)
bug(
    "surgery-the-loudest-heads-go",
    "surgery/head_selection.py",
    "    return sorted(own, key=worth, reverse=True)[:count]",
    "    return sorted(own, key=worth)[:count]",
    f"{PRUNING}::test_heads_that_nobody_hears_go_first",
)
bug(
    "surgery-one-group-is-a-unit",
    "surgery/pruning_plan.py",
    '(kind == "auto" and 1 < len(groups) < len(outs))',
    '(kind == "auto" and len(groups) < len(outs))',
    f"{PRUNING}::test_units_are_what_reads_one_key_head",
)
bug(
    "surgery-no-unit-is-safe-in-a-share-of-the-model",
    "surgery/head_selection.py",
    "_most(own, found.unit, min(least, len(own)))",
    "_most(own, found.unit, 0)",
    f"{PRUNING}::test_a_share_of_the_model_leaves_some_layers_more",
)
bug(
    "surgery-a-budget-that-is-just-met-is-not",
    "surgery/head_selection.py",
    "now <= (limit * self.whole if limit < 1 else limit)",
    "now < (limit * self.whole if limit < 1 else limit)",
    f"{BUDGETS}::test_numbers_go_down_to_what_was_asked",
)
bug(
    "surgery-what-is-taken-up-is-weighed-where-it-stands",
    "surgery/head_selection.py",
    "self._worths, self._at = self._weighed(at), at",
    "self._worths, self._at = self._weighed(len(self.gone)), at",
    f"{BUDGETS}::test_what_was_done_is_taken_up",
)
bug(
    "surgery-a-loss-that-grew-too-much-is-kept",
    "surgery/head_selection.py",
    "                self.gone, self.met = before, True",
    "                self.met = True",
    f"{BUDGETS}::test_loss_grows_no_further_than_allowed",
)
bug(
    "surgery-a-mark-knows-no-numbers",
    "surgery/pruning_plan.py",
    "        mark.update(tensor.detach()",
    "        hashlib.sha256(tensor.detach()",
    "house/test_house.py::test_doctests[headwise.surgery.pruning_plan]",
)
bug(
    "surgery-cross-attention-alone-is-all",
    "surgery/conversion.py",
    'if where in ("all", "cross" if site.endswith("cross") else "self")',
    "if where",
    "test_sharing.py::test_aligning_says_the_same_before_heads_are_pooled",
)
bug(
    "surgery-those-worth-least-always-speak",
    "surgery/conversion.py",
    "key=lambda head: -worth[head])",
    "key=lambda head: worth[head])",
    "test_sharing.py::test_routing_lets_those_worth_most_always_speak",
)
