"""Sites of transformers' own models: found, seen as they see themselves, and silenced exactly."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import headwise as hw
from foreign import ZOO, run, without_columns
from headwise.hub.finding import found
from headwise.hub.routes import interface
from headwise.hub.watching import Seen, watching


class Keep:
    """A watcher that keeps what an attention worked with."""

    wants_core = True

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def core(self, seen: Seen) -> None:
        self.seen.append(seen)

    def heads(self, z: Tensor) -> None:
        return None


@contextmanager
def looked(model):
    those = found(model)
    keeps = {one.site.name: Keep() for one in those}
    stands = [stand for route in {one.route for one in those} for stand in route.stands()]
    with watching({one.module: (keeps[one.site.name],) for one in those}, stands):
        yield keeps


@pytest.mark.parametrize("name", ZOO)
def test_rows_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch):
    zoo = ZOO[name]
    for attention in ("eager", "sdpa"):
        try:
            model = zoo.build(attention)
        except ValueError as error:  # some have no fused form
            assert "scaled_dot_product" in str(error)
            continue
        own: dict[int, Tensor] = {}
        watched = interface._watched

        def noting(function, kind, module, *said, own=own, watched=watched, **more):
            def also(*a, **k):
                got = function(*a, **k)
                own[id(module)] = got[1]
                return got

            return watched(also, kind, module, *said, **more)

        monkeypatch.setattr(interface, "_watched", noting)
        with looked(model) as keeps:
            run(model, zoo.inputs())
        monkeypatch.setattr(interface, "_watched", watched)
        modules = {one.site.name: one.module for one in found(model)}
        if attention == "eager":
            for site, keep in keeps.items():
                w_BHTS = own[id(modules[site])]
                for head in range(w_BHTS.shape[1]):
                    assert torch.allclose(keep.seen[0].rows(head), w_BHTS[:, head], atol=1e-5), (site, head)
        for keep in keeps.values():
            assert len(keep.seen) == 1


@pytest.mark.parametrize("name", ZOO)
def test_silenced_is_without_the_columns(name: str):
    zoo = ZOO[name]
    model = zoo.build()
    those = hw.sites(model)
    assert all(site.q == 4 for site in those)
    whole = run(model, zoo.inputs())
    for site in those[:: max(1, len(those) // 3)]:
        with hw.silence(model, [(site.name, 1), (site.name, 3)]):
            quiet = run(model, zoo.inputs())
        other = copy.deepcopy(model)
        for head in (1, 3):
            without_columns(other, site.path, zoo.out, head, 8)
        expected = run(other, zoo.inputs())
        scale = (whole - expected).abs().max()
        assert scale > 1e-4, site.name
        assert (quiet - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), site.name
    assert torch.equal(run(model, zoo.inputs()), whole)
