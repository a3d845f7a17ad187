"""The job of the Cost screen: parameters, FLOPs and KV cache of the open model, whole and by attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .model_worker import JobProgress
from .open_model import OpenModel

if TYPE_CHECKING:
    from torch import nn

    from ..model_spec import ModelSpec

MAX_CONTEXT, MAX_BATCH = 2**20, 2**12


def compute_cost(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Cost of the whole model and of each attention layer for `context` tokens and `batch` rows, before it runs."""
    from ..costs.cost_report import cost
    from ..costs.workload import Workload

    workload = Workload(
        context=_read_count(arguments, "context", 2048, MAX_CONTEXT),
        batch=_read_count(arguments, "batch", 1, MAX_BATCH),
    )
    net = model.get_model()
    progress(0, 2, "the whole model")
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    try:
        rows.append(_select(cost(read_spec(net), workload).data["rows"][0]))
    except ValueError as error:
        notes.append(f"the whole model: {error}")
    progress(1, 2, "attention layers")
    for name, site in model.sites.items():
        if site.spec is None:
            notes.append(f"{name}: {site.spec_reason}")
            continue
        try:
            rows.append(_select(cost({name: site.spec}, workload).data["rows"][0]))
        except ValueError as error:
            notes.append(f"{name}: {error}")
    return {"rows": rows, "workload": {"context": workload.context, "batch": workload.batch}, "notes": notes}


def read_spec(net: nn.Module) -> ModelSpec:
    """The spec of a headwise model, or that of a transformers model by its config; raises ValueError without one."""
    from ..families import read_model_spec
    from ..models import Transformer

    if isinstance(net, Transformer):
        return net.spec
    config = getattr(net, "config", None)
    if config is None:
        raise ValueError(f"{type(net).__name__} has no config; its cost is only known by attention layer")
    return read_model_spec(config.to_dict())


def _read_count(arguments: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = arguments.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r} is out of range; give 1 to {most}")
    return value


def _select(row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a row of the cost report that the page shows."""
    names = ("name", "params", "kv_bytes_per_token", "kv_bytes", "intensity", "bound")
    flops = row["flops"]
    return {name: row[name] for name in names} | {"prefill": flops.get("prefill"), "decode": flops.get("decode")}
