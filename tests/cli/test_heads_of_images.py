"""`headwise heads --images` on folders of vision models, against the weights that transformers
returns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import headwise as hw
from headwise import cli
from support import command_help
from support.command_help import run_json, run_ok
from support.refusals import refused_cases
from support.transformers_models import ZOO, transformers

pytestmark = pytest.mark.usefixtures("unrendered_figures")

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": [12, 20], "patch_size": 4,
}  # fmt: skip
MEAN, DEVIATION = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models, a folder of images of several sizes, and arrays."""
    root = tmp_path_factory.mktemp("vision")
    torch.manual_seed(0)
    vit = transformers.ViTModel(transformers.ViTConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    names = ("vit", "bare", "native", "swin", "text", "images", "nothing")
    paths = {name: root / name for name in names}
    vit.save_pretrained(paths["vit"])
    vit.save_pretrained(paths["bare"])
    processor = {"do_normalize": True, "image_mean": MEAN, "image_std": DEVIATION}
    (paths["vit"] / "preprocessor_config.json").write_text(json.dumps(processor))
    hw.save(hw.load(paths["bare"]), paths["native"])
    stages = {
        "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 8, "window_size": 2, "image_size": 16,
        "patch_size": 2,
    }  # fmt: skip
    transformers.SwinModel(transformers.SwinConfig(**stages)).save_pretrained(paths["swin"])
    ZOO["gpt2"].build().save_pretrained(paths["text"])
    paths["nothing"].mkdir()
    paths["images"].mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 20, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(paths["images"] / f"{number}.png")
    arrays = {
        "bytes": pixels,
        "floats": normalise(pixels),
        "small": pixels[:, :8],
        "grey": pixels[:, :, :, 0],
    }
    for name, array in arrays.items():
        paths[name] = root / f"{name}.npy"
        np.save(paths[name], array)
    return paths


def normalise(pixels: np.ndarray) -> np.ndarray:
    """Pixels as the processor normalises them."""
    return ((pixels / 255 - np.array(MEAN)) / np.array(DEVIATION)).astype(np.float32)


def run_command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return command_help.run_command(capsys, "heads", *argv)


def measure_by_hand(folders: dict[str, Path], layer: int, head: int) -> dict[str, float]:
    """Means over all rows of patches, from the weights of transformers' own eager attention."""
    model = transformers.ViTModel.from_pretrained(folders["vit"], attn_implementation="eager")
    pixels = torch.from_numpy(np.load(folders["floats"])).permute(0, 3, 1, 2)
    with torch.no_grad():
        weights = (
            model.eval()(pixels, output_attentions=True).attentions[layer][:, head].double().numpy()
        )
    sums: dict[str, list[float]] = {
        "patch_distance": [], "same_row": [], "neighbours": [], "same_patch": [],
    }  # fmt: skip
    for image in weights:
        for t in range(15):
            row = image[1 + t, 1:] / image[1 + t, 1:].sum()  # the class token is a sink
            apart = [(s // 5 - t // 5, s % 5 - t % 5) for s in range(15)]
            sums["patch_distance"].append(
                sum(w * np.hypot(*one) for w, one in zip(row, apart, strict=True))
            )
            sums["same_row"].append(
                sum(w for w, one in zip(row, apart, strict=True) if one[0] == 0 and one[1])
            )
            sums["neighbours"].append(
                sum(w for w, one in zip(row, apart, strict=True) if max(map(abs, one)) == 1)
            )
            sums["same_patch"].append(row[t])
    means = {name: float(np.mean(values)) for name, values in sums.items()}
    return means | {"sink": float(weights[:, :, 0].mean())}


@pytest.mark.parametrize("source", ["images", "bytes", "floats"])
def test_measures_equal_those_of_the_models_own_weights(source, folders, capsys):
    data = run_json(capsys, "heads", folders["vit"], f"--images {folders[source]}")
    assert data["data"] == "5 images"
    assert len(data["heads"]) == 8
    check_measures(data, folders)
    note = " ".join(data["notes"])
    assert "not measured on images: previous, next" in note
    assert all(
        name not in data["heads"][0]["measures"]
        for name in ("previous", "induction", "distance", "rare")
    )


def check_measures(data: dict[str, Any], folders: dict[str, Path]) -> None:
    """Compare two heads with measures by hand."""
    for number in (1, 6):
        measures = data["heads"][number]["measures"]
        for name, value in measure_by_hand(folders, number // 4, number % 4).items():
            assert measures[name]["value"] == pytest.approx(value, abs=1e-4), name


def test_python_takes_images_as_tensors(folders: dict[str, Path]):
    vit = transformers.ViTModel.from_pretrained(folders["vit"]).eval()
    pixels = torch.from_numpy(np.load(folders["floats"])).permute(0, 3, 1, 2)
    table = hw.heads(vit, pixels)
    check_measures(table.data, folders)
    assert hw.heads(vit, list(pixels)).data == table.data
    assert len(hw.importance(vit, pixels).heads) == 8
    for model in (vit, hw.load(folders["bare"])):
        assert str(hw.prune(model, 0.5, pixels)).startswith("vit: 4 of 8 heads kept")
    with pytest.raises(
        hw.SpecError, match="the images are 3 x 12 x 12, but the model takes 3 x 12 x 20; resize"
    ):
        hw.heads(vit, pixels[..., :12])
    larger = torch.cat([pixels, pixels[:, :, :1]], 2)  # the model itself would crop it
    for analyse in (
        lambda: hw.importance(hw.load(folders["bare"]), larger),
        lambda: hw.prune(vit, 0.5, larger),
    ):
        with pytest.raises(
            hw.SpecError,
            match="the images are 3 x 13 x 20, but the model takes 3 x 12 x 20; resize",
        ):
            analyse()
    for images in (pixels[:1], [pixels[0]]):
        with pytest.raises(hw.SpecError, match="1 image is too few; give at least 2"):
            hw.heads(vit, images)
    with pytest.raises(hw.SpecError, match="0 images are too few; give at least 2"):
        hw.importance(vit, pixels[:0])


def test_a_headwise_folder_takes_floats(folders, capsys):
    argv = (folders["native"], "--images", folders["floats"], "--json")
    out = run_ok(capsys, "heads", *argv)
    check_measures(json.loads(out), folders)


def test_table_figures_and_limit(folders, tmp_path, capsys):
    argv = (folders["vit"], "--images", folders["images"], "--limit", 3)
    out = run_ok(capsys, "heads", *argv, f"--out {tmp_path / 'out'} --draw L1H2 --redundancy")
    assert "3 images" in out
    assert "encoder.1.attention" in out
    assert any(
        "L1H2" in path.name or "1.attention" in path.name for path in (tmp_path / "out").rglob("*")
    )
    out = run_ok(capsys, "heads", *argv, "--sort patch_distance")
    rows = [line.split() for line in out.splitlines() if line.startswith(("L0H", "L1H"))]
    values = [float(row[1]) for row in rows]
    assert len(values) == 8
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("model", "source", "options", "reason"), refused_cases(__file__, "images", globals(), 3)
)
def test_input_that_cannot_be_measured_is_refused(
    model, source, options, reason, folders, tmp_path, capsys
):
    paths = {
        "one": tmp_path / "one.npy",
        "images16": tmp_path / "images16.npy",
        "missing": tmp_path / "missing",
    }
    np.save(paths["one"], np.load(folders["bytes"])[:1])
    np.save(paths["images16"], np.zeros((3, 16, 16, 3), np.float32))
    (code, out, err) = run_command(
        capsys, folders[model], f"--images { {**folders, **paths}[source] }", *options
    )
    assert code != 0
    assert not out
    assert reason in " ".join(err.split())
    assert "Traceback" not in err


def test_grey_images_have_three_equal_channels(folders, capsys):
    results = []
    for number in (1, 3):
        grey = np.load(folders["grey"])
        path = folders["grey"].with_name(f"grey{number}.npy")
        np.save(path, grey if number == 1 else np.stack([grey] * 3, -1))
        out = run_ok(capsys, "heads", folders["vit"], f"--images {path} --json")
        results.append(json.loads(out)["heads"])
    assert results[0] == results[1]


# --- the processor of a folder, for headwise run --------------------------------------------------


def make_classifier(folder: Path, **processor: Any) -> Any:
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, num_labels=3)
    ).eval()
    with torch.no_grad():
        net.classifier.weight.mul_(40)
    net.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return net


def test_a_vision_folder_of_transformers_classifies_images(folders, tmp_path, capsys):
    net = make_classifier(tmp_path, image_mean=MEAN, image_std=DEVIATION)
    usage = hw.load(tmp_path).usage
    assert (usage.size, usage.mean, usage.std) == ((12, 20), tuple(MEAN), tuple(DEVIATION))
    pixels = torch.from_numpy(normalise(np.load(folders["bytes"]))).permute(0, 3, 1, 2)
    with torch.no_grad():
        shares = net(pixels).logits.softmax(-1)
    assert cli.main(["run", str(tmp_path), str(folders["images"] / "2.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    classes = {one["name"]: one["share"] for one in found["answers"][0]["classes"]}
    assert classes == pytest.approx(
        {f"LABEL_{n}": float(share) for n, share in enumerate(shares[2])}, rel=1e-4
    )


def test_processors_without_statistics(tmp_path: Path, capsys):
    make_classifier(tmp_path, do_normalize=False)
    usage = hw.load(tmp_path).usage
    assert (usage.mean, usage.std) == ((0.0,) * 3, (1.0,) * 3)
    for processor in (
        {"image_mean": MEAN},
        {"image_mean": MEAN, "image_std": DEVIATION, "do_rescale": False},
    ):
        make_classifier(tmp_path, **processor)
        assert hw.load(tmp_path).usage.mean == ()
        assert cli.main(["run", str(tmp_path), "one.png"]) == 2
        assert (
            "add image_mean and image_std in a preprocessor_config.json to its folder"
            in capsys.readouterr().err
        )
    make_classifier(tmp_path, image_mean=0.5, image_std=0.25)
    assert hw.load(tmp_path).usage.std == (0.25,) * 3
    make_classifier(tmp_path, image_mean=[0.5, 0.5], image_std=DEVIATION)
    with pytest.raises(hw.SpecError, match="is not one number for each of 3 channels; correct it"):
        hw.load(tmp_path)
