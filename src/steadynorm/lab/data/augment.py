"""Prepare images for the model: random crop, flip, RandAugment and Mixup for training, centre crop for evaluation.

Transforms take an RGB Pillow image and return one of `size` x `size`. All randomness comes from the generator passed
in. `generator_for` makes it from a seed and a position, so that any sample can be reproduced without the ones before.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steadynorm.lab.data.randaugment import MAX_MAGNITUDE, RandAugment

_STREAMS = {"order": 0, "augment": 1, "mixup": 2}


def generator_for(stream: str, seed: int, *position: int) -> np.random.Generator:
    """Return the generator of a stream ("order", "augment", "mixup") at a position: one or two numbers below 2^64.

    Philox is counter-based, so generators of different positions never overlap.

    >>> generator_for("mixup", 7, 12).random() == generator_for("mixup", 7, 12).random()
    True
    """
    first, second = (*position, 0, 0)[:2]
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, first, second, _STREAMS[stream]]))


@dataclass(frozen=True)
class Augment:
    """Augment a training image: random resized crop (bilinear, antialiased), flip with chance 1/2, RandAugment.

    The defaults are Simple ViT's on ImageNet.

    Attributes:
        size: Side of the result in pixels.
        crop_scale: Range of the crop's share of the image's area.
        flip: Whether to flip half of the images.
        randaugment_layers: Operations of RandAugment per image; 0 for none.
        magnitude: Strength of RandAugment, 0 to 10.
        crop_ratio: Range of the crop's width / height.

    >>> photo = Image.new("RGB", (500, 375))
    >>> Augment(224)(photo, generator_for("augment", seed=0)).size
    (224, 224)
    """

    size: int = 224
    crop_scale: tuple[float, float] = (0.05, 1.0)
    flip: bool = True
    randaugment_layers: int = 2
    magnitude: float = MAX_MAGNITUDE
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _check_size("Augment", self.size)
        for name, (low, high), most in (("crop_scale", self.crop_scale, 1), ("crop_ratio", self.crop_ratio, math.inf)):
            if not 0 < low <= high <= most:
                raise ValueError(
                    f"Augment: {name}=({low}, {high}) is not a range; pass (low, high) with 0 < low <= high <= {most}"
                )
        RandAugment(self.randaugment_layers, self.magnitude)  # checks both

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> Image.Image:
        box = crop_box(image.width, image.height, generator, self.crop_scale, self.crop_ratio)
        image = image.crop(box).resize((self.size, self.size), Image.Resampling.BILINEAR)
        if self.flip and generator.integers(2):
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return RandAugment(self.randaugment_layers, self.magnitude)(image, generator)


@dataclass(frozen=True)
class Evaluate:
    """Prepare an image for evaluation: resize the short side to `resize` (default: size 256/224) and crop the centre.

    >>> Evaluate(224)(Image.new("RGB", (500, 375))).size
    (224, 224)
    >>> Evaluate(32, resize=32)  # CIFAR: the whole image
    Evaluate(size=32, resize=32)
    """

    size: int = 224
    resize: int | None = None

    def __post_init__(self) -> None:
        _check_size("Evaluate", self.size)
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"Evaluate: resize={self.resize} is below size={self.size}; the crop must fit inside")

    def __call__(self, image: Image.Image, generator: np.random.Generator | None = None) -> Image.Image:
        factor = (self.resize or round(self.size * 256 / 224)) / min(image.size)
        width, height = round(image.width * factor), round(image.height * factor)
        left, upper = (width - self.size) // 2, (height - self.size) // 2
        x, y = image.width / width, image.height / height
        # One step: only the centre of the resized image is computed.
        box = (left * x, upper * y, (left + self.size) * x, (upper + self.size) * y)
        return image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)


def crop_box(
    width: int,
    height: int,
    generator: np.random.Generator,
    scale: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """Return a random crop (left, upper, right, lower).

    The area is uniform in `scale`, width/height log-uniform in `ratio`, the place uniform. If ten attempts do not fit,
    the crop is the largest centred one with a ratio inside `ratio`.

    >>> crop_box(1000, 10, generator_for("augment", seed=0))  # hopeless: the centre, 4:3
    (493, 0, 506, 10)
    """
    logs = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = width * height * generator.uniform(*scale)
        shape = math.exp(generator.uniform(*logs))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            left, upper = int(generator.integers(width - w + 1)), int(generator.integers(height - h + 1))
            return left, upper, left + w, upper + h
    w, h = min(width, max(round(height * ratio[1]), 1)), min(height, max(round(width / ratio[0]), 1))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def normalize(images: Tensor) -> Tensor:
    """Map uint8 to [-1, 1] by (x/255 - 0.5)/0.5, on the device of the batch.

    >>> normalize(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"normalize: images are {images.dtype}, expected uint8; are they already normalized?")
    return images.float().mul_(2 / 255).sub_(1)


def mixup(
    images: Tensor, labels: Tensor, generator: np.random.Generator, *, classes: int, p: float = 0.2, lead: bool = False
) -> tuple[Tensor, Tensor]:
    """Mix each image with the one before it in the batch, the first with the last, and their labels likewise.

        x_i <- lambda x_i + (1 - lambda) x_{i-1},   lambda = max(l, 1 - l),   one l ~ Beta(p, p) per batch

    Args:
        images: (batch, ...), floating point; apply `normalize` first.
        labels: (batch,) class numbers.
        generator: `generator_for("mixup", seed, step)`, the same on every rank.
        classes: Number of classes.
        p: Parameter of the Beta distribution; 0 mixes nothing.
        lead: The batch begins with the image before it (`ImageLoader(lead=True)`), which is mixed in but not returned,
            so that ranks mix as if the batch were in one piece.

    Returns:
        Mixed images and label probabilities.

    >>> x, y = mixup(torch.eye(3), torch.tensor([0, 1, 2]), generator_for("mixup", 0, 5), classes=3)
    >>> torch.equal(x, y), y.sum(1).tolist()
    (True, [1.0, 1.0, 1.0])
    """
    if not images.is_floating_point():
        raise TypeError(f"mixup: images are {images.dtype}; pass them through normalize first")
    if not 0 <= p < math.inf:
        raise ValueError(f"mixup: p={p} is not a parameter of a Beta distribution; pass a number of at least 0")
    labels = torch.nn.functional.one_hot(labels, classes).to(images.dtype)
    weight = float(generator.beta(p, p)) if p else 1.0
    weight = max(weight, 1 - weight)
    return _mix(images, weight, lead), _mix(labels, weight, lead)


def _mix(x: Tensor, weight: float, lead: bool) -> Tensor:
    own, before = (x[1:], x[:-1]) if lead else (x, x.roll(1, 0))
    return torch.lerp(before, own, weight)


def _check_size(where: str, size: int) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{where}: size={size!r} is not a side in pixels; pass an int of at least 1")
