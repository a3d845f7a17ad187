"""Bugs at the edges of kernels: orders of derivatives, threads, caches of 8 bits and what outlives its use."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
EDGES = "test_kernel_edges.py::test_"
FUSED = "test_fused.py::test_"
bug(
    "orders-blocks-are-differentiated-twice-in-silence",
    "backends/chunked_attention.py",
    "        check_once(PLAIN)\n",
    "",
    FUSED + "a_second_derivative_is_refused[talking]",
)
bug(
    "orders-shut-heads-are-differentiated-twice-in-silence",
    "backends/routed_heads.py",
    "        check_once(PLAIN)\n",
    "",
    FUSED + "a_second_derivative_is_refused[moh]",
)
bug(
    "orders-torch-func-is-not-seen",
    "kernels/autograd_guards.py",
    "forward_ad._current_level >= 0 or peek_interpreter_stack() is not None",
    "forward_ad._current_level >= 0",
    FUSED + "what_is_transformed_is_plain[300-dcmha]",
)
bug(
    "orders-products-have-no-slope-forward",
    "products.py",
    "        and not transformed()\n",
    "",
    EDGES + "products_under_torch_func_are_torchs",
)
bug(
    "orders-decoding-forgets-that-it-is-asked-again",
    "kernels/paged_decode.py",
    "t.view_as(t) if again and need else t.detach()",
    "t.detach()",
    EDGES + "gradients_of_gradients_of_decoding_are_exact",
)
bug(
    "orders-hidden-keys-have-a-gradient",
    "kernels/paged_decode.py",
    "allowed & (bias != -torch.inf)",
    "allowed",
    EDGES + "a_row_whose_keys_are_all_hidden_has_no_gradient",
)
bug(
    "orders-slots-behind-a-span-are-multiplied-with",
    "kernels/paged_decode.py",
    "(t.masked_fill(~allowed[..., None], 0.0) for t in told)",
    "told",
    EDGES + "what_nobody_reads_has_no_gradient_whatever_it_is",
)
bug(
    "orders-values-are-read-as-keys-are",
    "kernels/paged_decode.py",
    "k.dtype not in KEPT or k.dtype != v.dtype or",
    "k.dtype not in KEPT or",
    EDGES + "numbers_that_would_be_read_as_others_are_refused",
)
bug(
    "orders-every-ceiling-is-taken-for-the-first",
    "backends/ragged_decode.py",
    '        reasons.remove(f"{type(cap).__name__} is not additive")\n',
    '        reasons = [reason for reason in core if reason != f"{type(cap).__name__} is not additive"]\n',
    EDGES + "a_second_ceiling_counts",
)
bug(
    "orders-who-looks-at-keys-sees-8-bits",
    "backends/ragged_decode.py",
    "job.dtype != torch.float64 and not seen",
    "job.dtype != torch.float64",
    EDGES + "who_looks_at_keys_of_8_bits_sees_numbers",
)
bug(
    "orders-weights-of-8-bits-without-their-scale",
    "backends/paged_decode.py",
    "(held * scale[..., None]).to(inputs.q.dtype)",
    "held.to(inputs.q.dtype)",
    EDGES + "weights_are_computed_again_from_8_bits",
)
bug(
    "orders-a-plan-is-looked-up-twice",
    "backends/block_sparse.py",
    "    return found\n",
    "    return _PLANS[key]\n",
    EDGES + "a_plan_is_handed_out_though_another_thread_forgets_all",
)
bug(
    "orders-a-narrow-token-meets-a-wide-matrix",
    "products.py",
    "w.is_cpu and w.shape[1] == width",
    "w.is_cpu",
    EDGES + "a_matrix_of_another_width_is_refused",
)
bug(
    "orders-a-cache-and-its-reach-hold-each-other",
    "cache/contiguous.py",
    "self._every = Reach(spec.pattern, slots)\n",
    "self._every = Reach(spec.pattern, slots)\n        self._every.held = self._rule\n",
    EDGES + "a_cache_goes_with_its_last_use[causal]",
)
bug(
    "kernels-of-all-kinds-are-kept-under-one-name",
    "kernels/jit.py",
    "    entry.__qualname__ = name\n",
    "",
    "test_kernel_edges.py::test_no_two_kernels_are_kept_under_one_name",
)
bug(
    "kernels-of-two-files-are-kept-under-one-name",
    "kernels/jit.py",
    'f"{function.__module__}.{name}.{kind}"',
    'f"{name}.{kind}"',
    "test_kernel_edges.py::test_no_two_kernels_are_kept_under_one_name",
)
bug(
    "kernels-are-not-found-by-the-next-process",
    "kernels/row_normalisers.py",
    "@extending.register_jitable\ndef softmax(",
    "@njit\ndef softmax(",
    "test_kernel_edges.py::test_the_next_process_reads_a_kernel_from_disk",
)
