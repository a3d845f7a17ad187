"""Distillation: packed texts have the loss of each text alone, and a student approaches its
teacher.
"""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.models import Transformer, model_spec as bp
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.objectives import MaskedTokenLoss, choose_objective
from headwise.surgery.distillation import (
    DistillationBatch,
    DistillationTexts,
    Retraining,
    RetrainingPoint,
    UptrainingOptions,
    uptrain,
)
from headwise.training.data import IGNORE_INDEX
from headwise.util.errors import SpecError, TrainingDiverged
from support.importance_examples import (
    BERT,
    GPT2,
    LLAMA,
    T5,
    WORDS,
    build_model,
    classifier,
    make_examples,
    model_without_head,
    random_ids,
    translator,
    with_uneven_attention,
)
from support.refusals import refused_cases

LONGER = {"steps": 30, "batch": 8, "every": 15, "rate": 5e-3}
BRIEF = {"steps": 12, "batch": 4, "every": 4, "rate": 1e-2}


def listener() -> Transformer:
    """A model that reads frames, two at a time, behind a vector of its own."""
    embedding = bp.EmbeddingSpec(
        patches=bp.PatchSpec(rows=6, columns=1, patch_height=2, patch_width=3, channels=1), first=1
    )
    block = bp.BlockSpec(hw.design(model=12, heads=3), feed=bp.FeedForwardSpec(20))
    stack = bp.StackSpec.from_blocks(
        "encoder", 12, [block], embedding=embedding, norm=bp.NormSpec()
    )
    return with_uneven_attention(
        hw.build(
            bp.ModelSpec(
                "small", "encoder", (stack,), (bp.OutputHeadSpec("labels", 5, at="mean"),)
            ),
            seed=0,
        )
    )


def labelled(net: Transformer, count: int = 5) -> list[Example]:
    return [
        Example({**example.inputs, "labels": [n % 5]}, {})
        for n, example in enumerate(make_examples(net, count))
    ]


def audio_examples(count: int = 5) -> list[Example]:
    """Frames of several lengths, one of them with half a patch."""
    draw = torch.Generator().manual_seed(3)
    frames = [
        torch.randn(1, (12, 5, 8, 4, 6)[n % 5], 3, generator=draw, dtype=torch.float64)
        for n in range(count)
    ]
    return [Example({"x": one, "labels": [n % 5]}, {}) for n, one in enumerate(frames)]


def placed(net: Transformer, count: int = 5) -> list[Example]:
    """Texts that say where their tokens stand."""
    examples = make_examples(net, count)
    return [
        Example(
            {**one.inputs, "sequence": SequenceInfo.contiguous(2, one.inputs["x"].shape[1], "cpu")},
            {},
        )
        for one in examples
    ]


def texts_of(net: Transformer, examples: list[Example], objective: Any = None) -> DistillationTexts:
    return DistillationTexts(net, examples, UptrainingOptions(batch=1, objective=objective))


MODELS: dict[str, Any] = {
    "gpt2": lambda: (build_model(GPT2), make_examples(build_model(GPT2)), None),
    "llama": lambda: (build_model(LLAMA), placed(build_model(LLAMA)), None),
    "bert": lambda: (
        build_model(BERT),
        make_examples(build_model(BERT)),
        MaskedTokenLoss(mask_id=3, mask_fraction=0.4),
    ),
    "t5": lambda: (build_model(T5), make_examples(build_model(T5)), None),
    "translator": lambda: (translator(), make_examples(translator()), None),
    "label of the first": lambda: (classifier("first"), labelled(classifier("first")), None),
    "label of the mean": lambda: (classifier("mean"), labelled(classifier("mean")), None),
    "frames": lambda: (listener(), audio_examples(), None),
}


# --- lessons --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_packed_batch_is_that_of_its_texts_alone(name):
    net, examples, values = MODELS[name]()
    objective, _ = choose_objective(net, values, examples[0])
    alone = []
    for number, example in enumerate(examples):
        question = objective.prepare_input(net, example, number)
        alone.append(float(objective.value(net(**question.inputs.kwargs).detach(), None, question)))
    lesson = texts_of(net, examples, values).make_batch(range(len(examples)))
    together = lesson.losses(lesson.compute_outputs(net)).detach()
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-9)
    assert abs(float(together.mean()) - np.mean(alone)) < 1e-6
    assert len(set(np.round(alone, 6))) == len(examples)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_packed_batch_are_those_of_its_texts(name):
    net, all_examples, values = MODELS[name]()
    texts = texts_of(net, all_examples, values)
    examples = [
        texts.make_batch(range(len(all_examples))),
        *(texts.make_batch([n]) for n in range(len(all_examples))),
    ]
    grads = []
    for example in examples:
        loss = example.losses(example.compute_outputs(net)).mean()
        grads.append(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))
    for whole, *each in zip(*grads, strict=True):
        if whole is not None:
            torch.testing.assert_close(whole, sum(each) / len(each), rtol=1e-8, atol=1e-10)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_divergence_and_distance_are_as_defined_and_blind_to_padding():
    draw = torch.Generator().manual_seed(0)
    result, taught = torch.randn(2, 2, 3, 5, generator=draw, dtype=torch.float64)
    example = DistillationBatch({}, torch.tensor([[True, True, True], [True, False, False]]))
    counts, temperature = (3, 1), 1.7
    kl, cosine = np.zeros(2), np.zeros(2)
    for n, count in enumerate(counts):
        for place in range(count):
            s, t = result[n, place].numpy(), taught[n, place].numpy()
            p, q = softmax(t / temperature), softmax(s / temperature)
            kl[n] += temperature**2 * (p * (np.log(p) - np.log(q))).sum() / count
            cosine[n] += (1 - s @ t / np.linalg.norm(s) / np.linalg.norm(t)) / count
    np.testing.assert_allclose(example.kl_divergences(result, taught, temperature), kl, rtol=1e-12)
    np.testing.assert_allclose(example.state_distances(result, taught), cosine, rtol=1e-12)


def test_batches_follow_from_the_seed_and_skip_held_out_texts():
    net = build_model(GPT2)
    examples_by_number = [Example({"x": torch.full((1, 4), n)}, {}) for n in range(WORDS)]

    def order(seed: int, steps: int = 6) -> list[list[int]]:
        options = UptrainingOptions(batch=5, held_out=0.2, seed=seed)
        examples = DistillationTexts(net, examples_by_number, options)
        assert len(examples.held_out_ids) == 3
        assert not set(examples.held_out_ids) & set(examples.train_ids)
        return [examples.get_batch(step).inputs["x"][:, 0].tolist() for step in range(1, steps + 1)]

    first = order(1)
    assert first == order(1) != order(2)
    assert sorted(first[0] + first[1]) == sorted(
        first[2] + first[3]
    )  # ten are taught, each once in two steps
    assert first[:2] != first[2:4]
    assert len(set(first[0] + first[1])) == 10


def test_each_epoch_masks_other_tokens_but_held_out_masks_stay():
    net, examples, values = MODELS["bert"]()
    texts = texts_of(net, examples, values)
    masked = [
        (texts.make_batch([0, 1], epoch_seed=turn).labels != IGNORE_INDEX).tolist()
        for turn in (0, 0, 1, 2)
    ]
    assert masked[0] == masked[1]
    assert len({str(one) for one in masked}) == 3


def test_texts_without_labels_are_skipped_and_reported():
    net = build_model(GPT2)
    texts = texts_of(net, [Example({"x": random_ids(n, 1 + n)}, {}) for n in range(4)])
    assert sorted(texts.train_ids + texts.held_out_ids) == [1, 2, 3]
    assert "left out 1 text without targets" in texts.notes[-1]


# --- learning -------------------------------------------------------------------------------------


def other(net: Transformer, noise: float = 0.05) -> Transformer:
    """The same with a little of everything changed."""
    from headwise.surgery.attention_replacement import replace_attentions

    built, draw = replace_attentions(net, {}), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return built


def copy_states(*nets: Transformer) -> list[dict[str, torch.Tensor]]:
    return [{name: one.clone() for name, one in net.state_dict().items()} for net in nets]


def same(net: Transformer, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, before[name]) for name, one in net.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "bert", "translator", "frames"])
def test_a_student_approaches_its_unchanged_teacher(name):
    teacher, _, values = MODELS[name]()
    examples = audio_examples(80) if name == "frames" else make_examples(teacher, 80)
    student = other(teacher, 0.2)
    before = copy_states(teacher, student)
    found = uptrain(
        student, teacher, examples, UptrainingOptions(**LONGER, alpha=1.0, objective=values)
    )
    assert same(teacher, before[0])
    assert same(student, before[1])
    assert [point.step for point in found.curve] == [0, 15, 30]
    assert found.curve[0].loss is None
    assert found.curve[-1].held_out < 0.8 * found.curve[0].held_out
    assert found.stop_reason == ""
    assert all(parameter.requires_grad for parameter in found.net.parameters())


def test_a_student_equal_to_its_teacher_is_unchanged():
    net = build_model(GPT2)
    found = uptrain(net, net, make_examples(net, 20), UptrainingOptions(**BRIEF))
    assert found.curve[0].held_out < found.curve[-1].held_out or found.step > 0
    alike = uptrain(
        net, net, make_examples(net, 20), UptrainingOptions(**{**BRIEF, "rate": 0.5}, alpha=1.0)
    )
    assert abs(alike.curve[0].held_out) < 1e-12
    assert alike.step == 0
    assert same(alike.net, net.state_dict())
    last = uptrain(
        net,
        net,
        make_examples(net, 20),
        UptrainingOptions(**{**BRIEF, "rate": 0.5}, alpha=1.0, keep="last"),
    )
    assert last.step == 12
    assert not same(last.net, net.state_dict())


def test_a_model_without_a_head_learns_states():
    teacher = model_without_head()
    found = uptrain(
        other(teacher, 0.2),
        teacher,
        make_examples(teacher, 80),
        UptrainingOptions(**LONGER),
    )
    assert found.curve[-1].held_out < 0.8 * found.curve[0].held_out
    assert "drift" in found.notes[0]


def test_one_step_is_torchs_own_adamw():
    teacher = build_model(GPT2)
    student, examples = other(teacher), make_examples(teacher, 9)
    how = UptrainingOptions(
        steps=1,
        batch=4,
        rate=1e-2,
        schedule="constant",
        warmup=0,
        clip=0.3,
        alpha=0.3,
        temperature=1.5,
        keep="last",
        weight_decay=0.01,
        seed=2,
    )
    found = uptrain(student, teacher, examples, how).net
    mine = other(teacher).train()
    example = DistillationTexts(student, examples, how).get_batch(1)
    result, taught = mine(**example.inputs), teacher(**example.inputs)
    p, q = (torch.softmax(one / 1.5, -1) for one in (taught.detach(), result))
    live, losses = example.positions, []
    for n in range(4):
        distance = 1.5**2 * (p[n] * (p[n].log() - q[n].log())).sum(-1)[live[n]].mean()
        selected = example.labels[n] != IGNORE_INDEX
        own = -result[n].log_softmax(-1)[selected, example.labels[n][selected]].mean()
        losses.append(0.3 * distance + 0.7 * own)
    torch.stack(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.3)
    weights = mine.spec.params()
    decayed = [
        p
        for name, p in mine.named_parameters()
        if p.dim() > 1 and not weights[name].name.endswith("bias")
    ]
    rest = [p for p in mine.parameters() if not any(p is one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-8).step()
    for name, tensor in mine.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def test_a_model_of_few_bits_learns_in_many():
    teacher = build_model(GPT2).bfloat16()
    student = other(teacher, 0.1)
    how = UptrainingOptions(**{**BRIEF, "rate": 1e-4}, alpha=1.0, keep="last")
    found = uptrain(student, teacher, make_examples(teacher, 12), how)
    assert next(found.net.parameters()).dtype == torch.bfloat16
    assert found.curve[-1].held_out != found.curve[0].held_out
    assert not same(found.net, student.state_dict())


def test_a_seed_repeats_training_and_leaves_the_rng_of_torch():
    teacher = build_model(GPT2)
    student = other(teacher)
    student.train()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    nets = [
        uptrain(
            student, teacher, make_examples(teacher, 20), UptrainingOptions(**BRIEF, seed=seed)
        ).net
        for seed in (4, 4, 5)
    ]
    assert torch.equal(torch.rand(3), expected)
    assert same(nets[0], nets[1].state_dict())
    assert not same(nets[0], nets[2].state_dict())
    assert nets[0].training


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["signal", "raised"])
def test_an_interrupt_returns_the_best_model_so_far(how):
    teacher = build_model(GPT2)
    student, recorded = other(teacher), list[RetrainingPoint]()

    def stop(point: RetrainingPoint) -> None:
        recorded.append(point)
        if point.step == 6:
            signal.raise_signal(signal.SIGINT)
            if how == "raised":
                raise KeyboardInterrupt

    uptraining_options = UptrainingOptions(**BRIEF, alpha=1.0, keep="last")
    found = uptrain(student, teacher, make_examples(teacher, 20), uptraining_options, stop)
    assert found.stop_reason == "interrupted at step 6 of 12"
    assert found.step == {"signal": 6, "raised": 4}[how]
    assert found.curve[-1].step == found.step
    examples = DistillationTexts(student, make_examples(teacher, 20), uptraining_options)
    pupil = Retraining(found.net, teacher, examples, [])
    assert pupil.held_out_loss(found.net) == pytest.approx(found.curve[-1].held_out, abs=1e-12)


# --- bad input ------------------------------------------------------------------------------------


def check_refused(what: str, *args: Any, **how: Any) -> None:
    with pytest.raises(SpecError, match=what) as excinfo:
        uptrain(*args, UptrainingOptions(**{**BRIEF, **how}))
    assert "\n" not in str(excinfo.value)


def test_unsupported_students_are_refused_before_training():
    net, none = build_model(GPT2), model_without_head()
    check_refused("no texts", net, net, [])
    check_refused(
        "cannot fill a batch of 4: 3 texts, 1 of them held out. Use batch=2",
        net,
        net,
        make_examples(net, 3),
    )
    check_refused("no loss on these texts", none, None, make_examples(none, 9))
    check_refused(
        "expected a headwise model, got Linear", torch.nn.Linear(2, 2), net, make_examples(net, 9)
    )
    check_refused(
        "13 outputs per position, the model 11",
        build_model({**GPT2, "vocab_size": 11}),
        net,
        [Example({"x": random_ids(n, words=11)}, {}) for n in range(9)],
    )
    wrong = classifier("mean")
    check_refused(
        "text 8 has the label 7",
        wrong,
        None,
        [*labelled(wrong, 8), Example({"x": random_ids(1), "labels": [7]}, {})],
    )
    twice = [*labelled(wrong, 8), Example({"x": random_ids(1), "labels": [1, 2]}, {})]
    check_refused("text 8 has 1 output positions and 2 labels", wrong, None, twice)
    check_refused(
        "it has the input 'head'",
        net,
        None,
        [Example({"x": random_ids(n), "head": "tokens"}, {}) for n in range(9)],
    )


@pytest.mark.parametrize(("options", "why"), refused_cases(__file__, "distillation", globals()))
def test_invalid_arguments_are_refused(options, why):
    with pytest.raises(SpecError, match=why):
        UptrainingOptions(**options)


def test_a_loss_that_is_no_number_ends_it():
    net = build_model(GPT2)
    broken = other(net)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="at step 1; use a rate below"):
        uptrain(broken, net, make_examples(net, 9), UptrainingOptions(**BRIEF))
