"""CTranslate2, one step of a batch at a time: it decodes whole answers, and is held back behind every token."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .others import import_quietly

STOP_MESSAGE = "stop"


def convert_to_ctranslate2(library: Any, folder: Path, tokens: int) -> Path:
    """A folder of transformers as CTranslate2 reads it; it asks for a tokenizer, whose words are then the ids."""
    from tokenizers import Tokenizer, models

    theirs = import_quietly("transformers")
    words = Tokenizer(models.WordLevel({str(one): one for one in range(tokens)}, unk_token="0"))
    fast = theirs.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2")
    fast.save_pretrained(folder)
    made = folder.with_name(f"{folder.name}-ctranslate2")
    if not made.exists():
        library.converters.TransformersConverter(str(folder)).convert(str(made), quantization="float32")
    return made


class CTranslate2Stepper:
    """An answer of CTranslate2 that goes on by one token whenever it is called; the logits [rows, tokens] of it.

    The first call reads the prompts. A thread of its own decodes, and waits within the function that it is told of
    each token through.
    """

    def __init__(self, library: Any, folder: Path, prompts: Sequence[Sequence[int]], most: int, threads: int) -> None:
        self._asked: queue.Queue[str] = queue.Queue()
        self._told: queue.Queue[Any] = queue.Queue()
        model = library.Generator(str(folder), device="cpu", compute_type="float32", intra_threads=threads)
        words = [[str(one) for one in row] for row in prompts]
        self._worker = threading.Thread(target=_decode_worker, args=(model, words, most, self._asked, self._told), daemon=True)
        weakref.finalize(self, _stop_worker, self._worker, self._asked)

    def __call__(self) -> Tensor:
        if self._worker.ident is None:
            self._worker.start()
        else:
            self._asked.put("go on")
        told = self._told.get()
        if isinstance(told, Exception):
            raise told
        return told


def _stop_worker(worker: threading.Thread, asked: queue.Queue[str]) -> None:
    """Let it come to an end: a process that ends within a callback would be aborted."""
    if worker.is_alive():
        asked.put(STOP_MESSAGE)
        worker.join(timeout=60)


def _decode_worker(model: Any, words: list[list[str]], most: int, asked: queue.Queue[str], told: queue.Queue[Any]) -> None:
    ends: list[str] = []

    def heard(step: Any) -> bool:
        if step.batch_id == 0:  # the first row is told the logits of all
            told.put(torch.from_numpy(np.array(step.logits)))
        if step.batch_id == len(words) - 1 and asked.get() == STOP_MESSAGE:
            ends.append(STOP_MESSAGE)  # of each row: those before it would go on to the last token else
        return bool(ends)

    how = {"include_prompt_in_result": False, "return_logits_vocab": True, "callback": heard}
    try:
        model.generate_batch(words, max_length=most, **how)
        told.put(RuntimeError(f"it said an end, or was asked for more than {most} tokens"))
    except Exception as error:
        told.put(error)
