"""Statistics of keys and values collected while a model runs, against those of
all tokens at once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.surgery.head_alignment import CrossProducts
from headwise.surgery.head_grouping import collect_kv_statistics

LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 17,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
T5 = {
    "model_type": "t5",
    "d_model": 10,
    "d_kv": 4,
    "num_heads": 3,
    "num_layers": 1,
    "d_ff": 8,
    "vocab_size": 17,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
}


def net(config) -> hw.models.Transformer:
    return hw.build(hw.families.read_model_spec(config), seed=0).double().eval()


def judged(x: np.ndarray, weight: torch.Tensor, heads: int) -> CrossProducts:
    """Sums over rows x [tokens, width], one pair of heads after another."""
    rows = (x @ weight.detach().numpy().T).reshape(len(x), heads, -1)
    return CrossProducts(torch.tensor(np.einsum("nia,njb->ijab", rows, rows)), len(x))


def inputs_of(module, call) -> np.ndarray:
    recorded = []
    handle = module.register_forward_pre_hook(lambda _, value: recorded.append(value[0].detach()))
    call()
    handle.remove()
    return torch.cat([x.flatten(0, 1) for x in recorded]).numpy()


def check_same(found: CrossProducts, cross_products: CrossProducts):
    assert found.num_tokens == cross_products.num_tokens
    torch.testing.assert_close(found.sums, cross_products.sums, rtol=1e-10, atol=1e-12)


def test_keys_are_collected_before_rope_and_without_padding():
    model = net(LLAMA)
    batches = [torch.randint(0, 17, (2, 5)), torch.randint(0, 17, (3, 4))]
    site, layer = "decoder.1.attention", model.stacks["decoder"].blocks[1].attentions["attention"]
    x = inputs_of(layer, lambda: [model(batch) for batch in batches])
    found = collect_kv_statistics(model, batches)
    assert list(found) == ["decoder.0.attention", site]
    for side in "kv":
        check_same(found[site][side], judged(x, layer.state_dict()[f"project.{side}"], 3))
    padded = torch.cat([batches[1], torch.zeros(3, 2, dtype=torch.int64)], 1)
    sequence = {"x": padded, "sequence": hw.SequenceInfo.from_batch(padded, lengths=[4, 4, 4])}
    again = collect_kv_statistics(model, [batches[0], sequence], [site])
    assert list(again) == [site]
    check_same(again[site]["k"], found[site]["k"])


def test_cross_attention_statistics_are_those_of_the_source():
    model = net(T5)
    source, x = torch.randint(0, 17, (2, 7)), torch.randint(0, 17, (2, 3))
    states = model.encode(source).states.detach().flatten(0, 1).numpy()
    layer = model.stacks["decoder"].blocks[0].attentions["cross"]
    found = collect_kv_statistics(model, [{"x": x, "source": source}])
    assert set(found) == {"encoder.0.attention", "decoder.0.attention", "decoder.0.cross"}
    for side in "kv":
        check_same(
            found["decoder.0.cross"][side], judged(states, layer.state_dict()[f"project.{side}"], 3)
        )
    assert found["decoder.0.attention"]["k"].num_tokens == 6


def test_no_hook_remains():
    model, batch = net(LLAMA), torch.randint(0, 17, (1, 4))
    before = hw.Attention.project_source, hw.Attention.extend_kv
    first = collect_kv_statistics(model, [batch])
    second = collect_kv_statistics(model, [batch])
    assert (hw.Attention.project_source, hw.Attention.extend_kv) == before
    check_same(first["decoder.0.attention"]["k"], second["decoder.0.attention"]["k"])


def test_unsupported_models_are_refused():
    model, batch = net(LLAMA), torch.randint(0, 17, (1, 4))
    with pytest.raises(hw.SpecError, match=r"no headwise attention 'decoder\.2\.attention'"):
        collect_kv_statistics(model, [batch], ["decoder.2.attention"])
    with pytest.raises(ValueError, match="at least one batch"):
        collect_kv_statistics(model, [])
    with pytest.raises(ValueError, match=r"pass a single one as \[batch\]"):
        collect_kv_statistics(model, batch)
    with pytest.raises(ValueError, match=r"Call \.eval\(\)"):
        collect_kv_statistics(model.train(), [batch])
