"""Examples for measuring heads of vision models: images, with the place of each token in the grid
of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...hub.transformers_loading import PROCESSOR_FILE, read_pixel_statistics
from ...models import Transformer
from ...training.data.images import IMAGE_SUFFIXES, ArrayImages, ImageFiles, ImageStore
from ...training.data.text_files import existing_path, list_files, open_npy
from ...util.errors import SpecError
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import CallHook, run_observed
from ..inspect.model_inputs import list_arguments
from .annotated_examples import Example, TokenAnnotations

MAX_OTHER_TOKENS = 16  # class, distillation and register tokens before the patches


class PatchLayout(NamedTuple):
    """Rows and columns of patches of a model, and the images that it takes: height, width and
    channels.
    """

    rows: int
    columns: int
    size: tuple[int, int]
    channels: int

    @staticmethod
    def from_model(model: nn.Module, shape: Sequence[int] = ()) -> PatchLayout:
        """Read from the spec of a headwise model, or from the config of a transformers model; for
        other models from their patch convolution and the `shape` of an image.
        """
        if isinstance(model, Transformer):
            embedding = model.spec.stacks[0].embedding
            patches = embedding.patches if embedding is not None else None
            if patches is None:
                raise SpecError(f"{model.spec.name} takes no images; give texts with --data FILE")
            size = patches.rows * patches.patch_height, patches.columns * patches.patch_width
            return PatchLayout(patches.rows, patches.columns, size, patches.channels)
        config = getattr(model, "config", None)
        sizes: list[tuple[int, int]] = []  # height and width of an image and of a patch
        for name in ("image_size", "patch_size"):
            value = getattr(config, name, None)
            value = (value, value) if isinstance(value, int) else value
            if isinstance(value, (list, tuple)) and len(value) == 2:
                sizes.append((int(value[0]), int(value[1])))
        if getattr(model, "main_input_name", "") != "pixel_values" or len(sizes) < 2:
            if config is None and shape and (layout := _find_patches(model, shape)):
                return layout
            raise SpecError(
                f"{type(model).__name__} takes no images, or neither its config (image_size and "
                "patch_size) nor its first convolution tells their patches; give a vision "
                "transformer, or texts with --data FILE"
            )
        image, patch = sizes
        channels = getattr(config, "num_channels", 3)
        return PatchLayout(image[0] // patch[0], image[1] // patch[1], image, channels)

    def annotate(self, num_others: int) -> TokenAnnotations:
        """Annotate the tokens of an image: `num_others` other tokens, then its patches."""
        places = list(product(range(self.rows), range(self.columns)))
        count = num_others + len(places)
        is_other = torch.arange(count) < num_others
        no = torch.zeros(count, dtype=torch.bool)
        others = ["[CLS]" if n == 0 else f"[{n}]" for n in range(num_others)]
        words = (*others, *(f"{row},{column}" for row, column in places))
        grid = torch.tensor([(-1, -1)] * num_others + places)
        word_index = torch.where(is_other, -1, torch.arange(count) - num_others)
        return TokenAnnotations(
            torch.arange(count), words, is_other, no, no, word_index, no.long(), patch_grid=grid
        )


def _find_patches(model: nn.Module, shape: Sequence[int]) -> PatchLayout | None:
    """The patches that the first convolution of a model cuts from images of this shape, as in timm
    and open_clip; None if it cuts none.
    """
    first = next((one for one in model.modules() if isinstance(one, nn.Conv2d)), None)
    channels, height, width = shape
    if first is None or first.stride != first.kernel_size or first.in_channels != channels:
        return None
    rows, columns = (
        size // patch for size, patch in zip((height, width), first.stride, strict=True)
    )
    return PatchLayout(rows, columns, (height, width), channels)


def _image_argument(model: nn.Module) -> str:
    """The name of the argument that takes images."""
    if isinstance(model, Transformer):
        return "x"
    arguments = (*list_arguments(model), "pixel_values")  # forward may take *args or **kwargs alone
    return str(getattr(model, "main_input_name", arguments[0]))


def _normalise(model: nn.Module, pixels: np.ndarray) -> np.ndarray:
    """Normalise pixels [n, height, width, channels] in 0..1 as the model expects.

    Follows the usage of a headwise model, or preprocessor_config.json of a transformers folder.
    """
    channels = pixels.shape[-1]
    if isinstance(model, Transformer):
        statistics = {"mean": model.usage.mean, "std": model.usage.std}
        source = model.spec.name
    else:
        folder = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or ""))
        statistics = read_pixel_statistics(folder, channels)
        source = str(folder / PROCESSOR_FILE)
    mean = statistics.get("mean")
    if not mean:
        raise SpecError(
            f"{source} does not say how pixels are normalised; add image_mean and image_std, or "
            "give an .npy of floats, which are used as they are"
        )
    if len(mean) not in (1, channels):
        fact = f"the model normalises {len(mean)} channels, but the images have {channels}"
        raise SpecError(f"{fact}; convert the images")
    return (pixels - np.asarray(mean)) / np.asarray(statistics["std"])


# examples of images, the sites with patches as tokens, and notes on the others
ImageExamples = tuple[list[Example], tuple[str, ...], tuple[str, ...]]


def examples_from_images(
    model: nn.Module, path: str | Path, limit: int | None = None
) -> ImageExamples:
    """Read images for a vision model, from a folder or an .npy [n, height, width, channels].

    Image files are resized to the size of the model. Integer pixels are scaled to 0..1 and
    normalised as the model's processor does; floats of an .npy are used as they are.
    """
    pixels = read_images(model, path, limit)
    if len(pixels) < 2:
        raise SpecError(
            f"{path} has {len(pixels)} images, too few for a confidence interval; give at least two"
        )
    return examples_from_pixels(model, pixels)


def as_pixels(images: Any) -> Tensor | None:
    """Images [n, channels, height, width] from a tensor of them, or a list with a tensor of each;
    None for others.
    """
    if isinstance(images, (list, tuple)) and all(isinstance(one, Tensor) for one in images):
        images = torch.stack(list(images)) if len({one.shape for one in images}) == 1 else None
    if isinstance(images, Tensor) and images.dim() == 4 and images.is_floating_point():
        return images
    return None


def plain_image_examples(model: nn.Module, pixels: Tensor) -> list[Example]:
    """An example of each image, without the places of its patches.

    A headwise model would crop an image of another size; other models check their inputs
    themselves.
    """
    if isinstance(model, Transformer):
        _check_image_size(PatchLayout.from_model(model), pixels.shape[1:])
    name = _image_argument(model)
    return [Example({name: image[None]}, {}) for image in pixels]


def examples_from_pixels(model: nn.Module, pixels: Tensor) -> ImageExamples:
    """Examples of images [n, channels, height, width] as a vision model takes them."""
    layout = PatchLayout.from_model(model, pixels.shape[1:])
    _check_image_size(layout, pixels.shape[1:])
    name = _image_argument(model)
    inputs = [{name: image[None]} for image in pixels]
    observable = require_ability(model, "observe")
    counters = {module.site.name: CallHook(lambda call: call.counts) for module in observable}
    run_observed(model, inputs[0], observable, counters)
    # Number of tokens at each site, or 0 where queries and keys differ
    counts: dict[str, int] = {}
    for name, counter in counters.items():
        queries, keys = counter.result or (0, 0)
        counts[name] = queries if queries == keys else 0
    num_patches = layout.rows * layout.columns
    fitting = range(num_patches, num_patches + MAX_OTHER_TOKENS + 1)
    sites = tuple(site for site, count in counts.items() if count in fitting)
    if len({counts[site] for site in sites}) != 1:
        counted = ", ".join(map(str, sorted(set(counts.values()))))
        raise SpecError(
            f"no attention of {type(model).__name__} is over its {layout.rows} x {layout.columns} "
            f"patches (tokens: {counted}), as in models with windows; use hw.trace for their "
            "weights"
        )
    tokens = layout.annotate(counts[sites[0]] - num_patches)
    skipped = ", ".join(site for site in counts if site not in sites)
    note = f"not measured, because their tokens are not the patches of the image: {skipped}"
    examples = [Example(one, {"text": tokens, "image": tokens}) for one in inputs]
    return examples, sites, (note,) if skipped else ()


def _check_image_size(layout: PatchLayout, shape: Sequence[int]) -> None:
    """Raise unless images of this shape have the channels, height and width of the model's."""
    expected = (layout.channels, *layout.size)
    if tuple(shape) != expected:
        shapes = [" x ".join(map(str, one)) for one in (shape, expected)]
        raise SpecError(
            f"the images are {shapes[0]}, but the model takes {shapes[1]}; resize or convert them"
        )


def read_images(model: nn.Module, path: str | Path, limit: int | None = None) -> Tensor:
    """The first images of a file, a folder or an .npy as a vision model takes them, [n, channels,
    height, width].
    """
    layout = PatchLayout.from_model(model)
    path = existing_path(str(path))
    is_scaled = False
    if path.suffix == ".npy":
        array = open_npy(path)
        if array.ndim not in (3, 4) or array.dtype.kind not in "uif":
            raise SpecError(
                f"{path} is {array.dtype} {list(array.shape)}; give [n, height, width, channels] "
                "of numbers"
            )
        store: ImageStore = ArrayImages(array, str(path))
        is_scaled = array.dtype.kind == "f"
    else:
        files = [path] if path.suffix in IMAGE_SUFFIXES else []
        files = list_files(path, IMAGE_SUFFIXES) if path.is_dir() else files
        if not files:
            suffixes = ", ".join(IMAGE_SUFFIXES)
            raise SpecError(
                f"{path} has no images ({suffixes}); give an image, a folder of images, or an .npy"
            )
        store = ImageFiles(files, layout.size)
    count = store.count if limit is None else min(limit, store.count)
    pixels = store.take(np.arange(count))
    if pixels.shape[-1] == 1 and layout.channels == 3:
        pixels = pixels.repeat(3, -1)  # grey images
    _check_image_size(layout, (pixels.shape[-1], *pixels.shape[1:-1]))
    scaled = pixels if is_scaled else _normalise(model, pixels)
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2), dtype=np.float32))
