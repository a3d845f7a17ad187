"""Measure heads over many texts as tasks of Ray: shards of the texts are measured apart and merged in their order.

The sums of every text are kept apart until all are merged, so no sum depends on how the texts were divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from ..errors import SpecError
from ..head_analysis.annotated_examples import Example
from ..head_analysis.head_measurement import MeasureOptions, MetricSums, TextSums, sum_examples
from ..head_analysis.literature_metrics import get_metric
from ..interfaces.external_parts import imported_part_files
from .process_engine import MAX_ATTEMPTS, prepare_worker
from .ray_engine import RayEngine

SHARD_SIZE = 8  # texts of a task, which runs again as a whole if its process dies
SumsByExample = dict[tuple[str, str, str], list[TextSums]]


class RayHeads:
    """Engine of `measure_heads` on the Ray cluster at `address` ("host:port"); without one, on a cluster started here.

    Workers have one processor and one thread, so that measures are those of one process with one thread, bit for bit.
    The machines need the same version of headwise, and the files of `--import` at the same paths.
    """

    def __init__(self, address: str = "") -> None:
        self._engine = RayEngine(address)

    def __call__(
        self, model: nn.Module, examples: Iterable[Example], options: MeasureOptions, progress: Callable[[int], object]
    ) -> MetricSums:
        """Sums of every metric of the examples, in their order."""
        texts, options = list(examples), options._replace(engine=None)
        shards = [texts[first : first + SHARD_SIZE] for first in range(0, len(texts), SHARD_SIZE)]
        merged = MetricSums([get_metric(metric) for metric in options.metrics])
        with self._engine as engine:
            ray = engine.ray
            run_remotely = ray.remote(num_cpus=1, max_retries=MAX_ATTEMPTS - 1)(sum_shard_elsewhere)
            model_ref = ray.put(model)
            tasks = [run_remotely.remote(model_ref, shard, options, imported_part_files()) for shard in shards]
            for task, shard in zip(tasks, shards, strict=True):
                try:
                    merged.append(ray.get(task), len(shard))
                except engine.lost_task_errors as error:
                    fact = "Ray ended a worker that measured texts, or lost its result"
                    raise SpecError(f"{fact} ({str(error).splitlines()[0]}); use --engine local") from None
                progress(merged.num_examples)
        return merged


def sum_shard_elsewhere(
    model: nn.Module, examples: Sequence[Example], options: MeasureOptions, part_files: Sequence[str]
) -> SumsByExample:
    """Sums of the texts of one shard, in a worker of Ray."""
    prepare_worker(part_files)
    return sum_examples(model, examples, options).sums_by_example
