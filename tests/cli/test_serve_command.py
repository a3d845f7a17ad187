"""`headwise serve`: what is refused before a model is loaded, and what it hands to the server."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.cli import main
from headwise.viewer import bundled_sample

MODEL = str(bundled_sample.MODEL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "there is no folder or file 'nowhere'"),
        ([MODEL, "--port", "99999"], "--port 99999 is not a port"),
        ([MODEL, "--host", "0.0.0.0"], "add --allow-remote"),
        ([MODEL, "--host", "0.0.0.0", "--allow-remote"], "needs a key"),
        ([MODEL, "--name", " "], "--name is empty"),
        ([MODEL, "--budget", "much"], "much"),
    ],
)
def test_bad_options_are_refused_before_loading(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HEADWISE_API_KEY", raising=False)
    monkeypatch.setattr("headwise.cli.run.load_model", lambda _: pytest.fail("the model was loaded"))
    assert main(["serve", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_served_under_its_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    served: list[Any] = []

    def serve(model: Any, options: Any, on_start: Any) -> None:
        served.append((model, options))
        on_start("http://127.0.0.1:80/v1")

    monkeypatch.setattr("headwise.api_server.server.serve", serve)
    monkeypatch.setenv("HEADWISE_API_KEY", "from the environment")
    assert main(["serve", MODEL, "--port", "80", "--rows", "3", "--budget", "16 MiB"]) == 0
    assert capsys.readouterr().out == "model: http://127.0.0.1:80/v1  (Ctrl+C stops it)\n"
    ((model, options),) = served
    assert (options.port, options.api_key) == (80, "from the environment")
    assert (model.name, model.template) == ("model", None)
    assert model.engine.memory.batching.rows == 3
