"""Bugs of kernels towards those who call them: checkpoints, devices, slopes of slopes, tables that are wrong."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
CALLERS = "test_kernel_callers.py::test_"
ENTMAX = "anchors/test_entmax.py::test_"
bug(
    "callers-values-alone-have-no-gradient",
    "kernels/paged_decode.py",
    "for t, grad in told if t.requires_grad)",
    "for t, grad in told)",
    CALLERS + "only_some_of_what_is_decoded_want_gradients[(2,)]",
)
bug(
    "callers-a-checkpoint-is-asked-twice-for-lines",
    "kernels/flash_attention.py",
    "told = saved[5:]",
    "told = list(ctx.saved_tensors)[5:]",
    CALLERS + "a_checkpoint_changes_no_gradient[plain-moh]",
)
bug(
    "callers-a-checkpoint-is-asked-twice-for-blocks",
    "backends/chunked_attention.py",
    "given, learned = saved[:count], saved[count:]",
    "given, learned = saved[:count], ctx.saved_tensors[count:]",
    CALLERS + "a_checkpoint_changes_no_gradient[plain-talking]",
)
bug(
    "callers-shapes-ask-how-they-are-cast",
    "backends/chunked_attention.py",
    " or inputs.q.is_meta",
    "",
    CALLERS + "shapes_alone_run_through_blocks[entmax]",
)
bug(
    "callers-heads-stand-where-new-tensors-are-made",
    "parts/dynamic_composition.py",
    "torch.arange(heads, device=a_BHTS.device)",
    "torch.arange(heads)",
    CALLERS + "where_new_tensors_are_made_does_not_matter[dcmha]",
)
bug(
    "callers-powers-of-zero-have-a-slope",
    "parts/entmax.py",
    "torch.where(read, torch.where(read, w_BHTS, 1.0) ** power, 0.0)",
    "torch.where(read, w_BHTS**power, 0.0)",
    CALLERS + "torch_func_has_slopes_of_slopes_of_entmax[fixed-40]",
    ENTMAX + "a_second_derivative_is_exact_or_refused[normalise]",
)
bug(
    "callers-logarithms-of-zero-have-a-slope",
    "parts/entmax.py",
    "-r_BHTS * r_BHTS.log()",
    "-torch.xlogy(w_BHTS, w_BHTS)",
    ENTMAX + "a_second_derivative_is_exact_or_refused[normalise]",
)
bug(
    "callers-rows-are-anybodys",
    "kernels/row_normalisers.py",
    '"headwise::softmax", mutates_args=(), device_types="cpu"',
    '"headwise::softmax", mutates_args=()',
    CALLERS + "no_kernel_is_handed_memory_of_another_device[softmax]",
)
bug(
    "callers-pages-that-are-not-there",
    "kernels/paged_decode.py",
    " or page >= pages",
    "",
    CALLERS + "spans_beside_the_pages_are_refused[[5, 0, 4]]",
)
bug(
    "callers-slots-that-are-not-there",
    "kernels/paged_decode.py",
    " or end > slots",
    "",
    CALLERS + "spans_beside_the_pages_are_refused[[1, 0, 5]]",
)
bug(
    "callers-nothing-lies-astray",
    "kernels/paged_decode.py",
    "begin < end and",
    "begin <= end and",
    CALLERS + "spans_of_nothing_may_name_anything",
)
bug(
    "callers-tables-are-read-as-if-they-were-whole",
    "kernels/paged_decode.py",
    "held = spans_BN3.contiguous()",
    "held = spans_BN3",
    CALLERS + "spans_that_lie_apart_are_looked_at_alone",
)
bug(
    "callers-biases-of-less-than-the-call",
    "kernels/paged_decode.py",
    "n not in (1, most)",
    "n > most",
    CALLERS + "what_stands_beside_is_as_large_as_the_call[columns]",
)
bug(
    "callers-scales-of-any-kind",
    "kernels/paged_decode.py",
    " or t.dtype != torch.float32)",
    ")",
    CALLERS + "scales_are_one_for_each_key[half]",
)
bug(
    "callers-keys-beyond-the-numbers",
    "kernels/flash_attention.py",
    "torch.float32: 2**24",
    "torch.float32: 2**25",
    CALLERS + "more_keys_than_numbers_tell_apart_are_refused",
)
bug(
    "callers-values-of-another-kind",
    "kernels/flash_attention.py",
    "k.dtype != q.dtype or v.dtype != q.dtype",
    "k.dtype != q.dtype",
    CALLERS + "numbers_of_two_kinds_are_refused",
)
bug(
    "callers-hooks-are-called-for-each-block",
    "backends/chunked_attention.py",
    " or any(t._backward_hooks for t in learned)",
    "",
    CALLERS + "hooks_of_parameters_are_called_once",
)
bug(
    "callers-hooks-are-called-once-more-for-slopes",
    "kernels/paged_decode.py",
    "t.view_as(t) if again and need",
    "t if again and need",
    CALLERS + "hooks_of_what_is_decoded_are_called_once",
)
