"""Parts that are not headwise's own: files, entry points of packages, and the record in a saved
model.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.attention.interfaces.part import (
    REGISTRY,
    find_class,
    find_external_parts,
    import_part_file,
    imported_part_files,
)
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ModelSpec,
    OutputHeadSpec,
    StackSpec,
)
from support.own_parts import TEMPERATURE, forget_parts, write_part


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the parts of each test."""
    with forget_parts():
        yield


def make_model(part: type) -> hw.Transformer:
    spec = hw.design(
        model=10, heads=2, dim=3, pattern="causal", modifiers=(part(start=0.5), hw.parts.Alibi())
    )
    stack = StackSpec.from_blocks("decoder", 10, [BlockSpec(spec)], embedding=EmbeddingSpec(7))
    net = hw.build(
        ModelSpec("own", "decoder", (stack,), (OutputHeadSpec("tokens", 7, table="decoder"),)),
        seed=0,
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_()
    return net.eval()


# --- Files ----------------------------------------------------------------------------------------


def test_a_file_registers_its_part_and_computes(tmp_path: Path):
    path = write_part(tmp_path)
    import_part_file(path)
    import_part_file(path)  # runs once, so the name is not registered twice
    assert imported_part_files() == (str(path),)
    spec = hw.from_toml(
        'model = 8\nheads = {q = 2, dim = 4}\n[[modifiers]]\npart = "Temperature"\nstart = 0.5'
    )
    warm, plain = hw.Attention(spec).double(), hw.Attention(hw.design(model=8, heads=2)).double()
    plain.load_state_dict(
        {name: t for name, t in warm.state_dict().items() if name != "temperature.log"}
    )
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        plain.weights["project"]["q"].mul_(torch.tensor(-0.5, dtype=torch.float64).exp())
    torch.testing.assert_close(warm(x), plain(x))


def test_a_file_can_import_its_neighbours(tmp_path: Path):
    (tmp_path / "start_of_heat.py").write_text("START = 0.25\n")
    path = tmp_path / "warm_heads.py"
    path.write_text(
        "from start_of_heat import START\n" + TEMPERATURE.replace("float = 0.0", "float = START")
    )
    import_part_file(path)
    assert find_class("Temperature")().start == 0.25
    del sys.modules["start_of_heat"]


BAD_FILES = {
    "missing": (
        "nowhere.py",
        None,
        "cannot import 'nowhere.py': it is no Python file; give the .py file",
    ),
    "not python": ("part.toml", "a = 1", "it is no Python file"),
    "raises": (
        "broken.py",
        "\nx = 1 / 0\n",
        "broken.py, line 2: ZeroDivisionError: division by zero; correct the file",
    ),
    "ends": (
        "quits.py",
        "raise SystemExit(3)",
        "quits.py, line 1: SystemExit: 3; correct the file",
    ),
    "syntax": ("garbled.py", "def (", "cannot import garbled.py: SyntaxError"),
    "no part": ("empty.py", "x = 1\n", "empty.py registers no part; decorate its class with @part"),
    "other module": ("statistics.py", TEMPERATURE, "there is another module statistics"),
    "own name": (
        "softmax_again.py",
        TEMPERATURE.replace("Temperature", "Softmax"),
        "cannot register Softmax",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_and_leave_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    name, text, message = BAD_FILES[case]
    if text is not None:
        Path(name).write_text(text)
    before = set(hw.parts.REGISTRY)
    with pytest.raises(hw.SpecError) as refused:
        import_part_file(name)
    assert message in str(refused.value)
    assert set(REGISTRY) == before
    assert imported_part_files() == ()
    if text is not None and case != "other module":
        assert Path(name).stem not in sys.modules


def test_a_corrected_file_can_be_imported(tmp_path: Path):
    path = write_part(tmp_path)
    path.write_text(TEMPERATURE + "\nraise RuntimeError('later')\n")
    with pytest.raises(hw.SpecError, match="later"):
        import_part_file(path)
    assert "Temperature" not in REGISTRY
    path.write_text(TEMPERATURE)
    import_part_file(path)
    assert find_class("Temperature").__module__ == "temperature"


# --- Entry points ---------------------------------------------------------------------------------


def install(folder: Path, package: str, entry: str) -> None:
    """Install a package with one entry point into a folder."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[headwise.attention.parts]\n{entry}\n")


def test_an_installed_package_declares_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_part(tmp_path, "heat_package")
    (tmp_path / "unrelated_package.py").write_text(
        "raise AssertionError('only the named part is imported')"
    )
    install(tmp_path, "heat", "Temperature = heat_package:Temperature")
    install(tmp_path, "unrelated", "Humidity = unrelated_package:Humidity")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "Temperature" not in REGISTRY
    spec = hw.from_toml('model = 8\nheads = {q = 2, dim = 4}\nmodifiers = [{part = "Temperature"}]')
    assert type(spec.modifiers[0]).__module__ == "heat_package"
    with pytest.raises(hw.SpecError, match="did you mean 'Humidity'"):
        find_class("Humidiy")


BAD_ENTRIES = {
    "fails": (
        "Humidity = no_such_package:Humidity",
        "the package wet declares the part Humidity as no_such_package",
    ),
    "no such part": (
        "Humidity = heat_package:Temperature",
        "which registers no part of this name; update or uninstall",
    ),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_bad_entry_points_name_the_package(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry, message = BAD_ENTRIES[case]
    write_part(tmp_path, "heat_package")
    install(tmp_path, "wet", entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(hw.SpecError, match=message):
        find_class("Humidity")


def test_two_packages_with_one_part_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("dry", "wet"):
        install(tmp_path, package, f"Humidity = {package}_package:Humidity")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        hw.SpecError, match="several packages declare the part Humidity: dry_package:Humidity, wet_"
    ):
        find_class("Humidity")


# --- Saved models ---------------------------------------------------------------------------------


def test_a_folder_records_its_own_parts_and_loads_with_them(tmp_path: Path):
    path = write_part(tmp_path / "code")
    import_part_file(path)
    net, x = make_model(find_class("Temperature")), torch.arange(6)[None]
    hw.save(net, tmp_path / "model")
    table = tomllib.loads((tmp_path / "model" / "headwise.toml").read_text())
    assert table["parts"] == [
        {"name": "Temperature", "module": "temperature", "file": "temperature.py"}
    ]
    assert str(tmp_path) not in (tmp_path / "model" / "headwise.toml").read_text()
    torch.testing.assert_close(hw.load(tmp_path / "model")(x), net(x), rtol=0, atol=0)


def test_loading_without_the_part_names_it_and_runs_no_code(tmp_path: Path):
    folder = tmp_path / "model"
    with forget_parts():
        import_part_file(write_part(tmp_path / "code"))
        hw.save(make_model(find_class("Temperature")), folder)
    for place in (folder, tmp_path):  # code beside the weights is never run
        (place / "temperature.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{TEMPERATURE}"
        )
    for read in (hw.load, hw.families.read_model_spec):
        with pytest.raises(hw.SpecError) as refused:
            read(folder)
        assert str(refused.value) == (
            f"{folder / 'headwise.toml'} needs the part Temperature of the module temperature, "
            "which is not loaded; "
            "add --import temperature.py, or import that module in Python first"
        )
    assert not (tmp_path / "ran").exists()
    assert "temperature" not in sys.modules


def test_a_name_that_is_no_file_name_is_not_repeated_as_a_remedy(tmp_path: Path):
    folder = tmp_path / "model"
    with forget_parts():
        import_part_file(write_part(tmp_path))
        hw.save(make_model(find_class("Temperature")), folder)
    manifest = folder / "headwise.toml"
    text = manifest.read_text()
    manifest.write_text(text.replace('"temperature.py"', '"x.py; rm -r y.py"'))
    with pytest.raises(hw.SpecError, match=r"add --import FILE\.py"):
        hw.load(folder)
    manifest.write_text(
        text.replace('file = "temperature.py"', "file = 3").replace('"temperature.py"', "3")
    )
    with pytest.raises(
        hw.SpecError, match="is no table of name, module and file; save the model again"
    ):
        hw.load(folder)
    manifest.write_text(text.replace('name = "Temperature"', 'name = "Softmax"'))
    with pytest.raises(hw.SpecError, match="but Softmax is now a part of headwise"):
        hw.load(folder)


def test_parts_inside_parts_are_found_and_headwises_own_are_not(tmp_path: Path):
    import_part_file(write_part(tmp_path))
    own = find_class("Temperature")
    assert (
        find_external_parts(
            (hw.parts.Rotary(scaling=hw.parts.PositionInterpolation(factor=2.0)), {"a": [own()]})
        )[0].name
        == "Temperature"
    )
    assert find_external_parts(hw.design(preset="mla")) == []
    net = hw.build(
        hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1})
    )
    hw.save(net, tmp_path / "plain")
    assert "parts" not in tomllib.loads((tmp_path / "plain" / "headwise.toml").read_text())
