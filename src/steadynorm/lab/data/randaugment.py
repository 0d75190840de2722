"""RandAugment's 16 operations on RGB Pillow images, as big_vision's TensorFlow pipeline does them.

The pipeline's corner cases, found by running it, are kept:

- Solarize compares with int(m/10 256) as uint8, so 256 wraps to 0: at magnitude 10 every pixel is inverted.
- Contrast blends with area/256 (196 at 224 x 224), where the mean grey was meant. We use 196 at every size.
- Posterize shifts by at most 7: with 0 bits the highest bit remains.
- Rotate, shear and translate take the nearest pixel. Rotation is about the centre, shear about the upper left corner.
- Blends, AutoContrast and the blur inside Sharpness round down. The blur leaves the outermost pixels sharp.

Pixel sizes (translate 100, cutout 40) refer to a side of 224 and scale with the image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from PIL import Image, ImageChops, ImageFilter

FILL = (128, 128, 128)
REFERENCE_SIDE = 224  # pixel sizes refer to this side
MAX_MAGNITUDE = 10.0
_CONTRAST_GREY = REFERENCE_SIDE**2 // 256
_GREY = tuple(w * 255.5 / 255 for w in (0.2989, 0.587, 0.114))  # floor(255.5 (w . rgb / 255)), as tf.image rounds
_HALF = 0.5 + 2**-9  # Pillow's coordinates are fixed-point: without the surplus halves could round either way
_RAMP = np.arange(256, dtype=np.uint8)

# image, m/10, randomness -> image
Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]


@dataclass(frozen=True)
class RandAugment:
    """Apply `layers` operations, drawn from the 16 with equal chance, each at `magnitude` (0 to 10).

    >>> grey = Image.new("RGB", (8, 8), (10, 20, 30))
    >>> RandAugment(layers=2, magnitude=10)(grey, np.random.default_rng(3)).size
    (8, 8)
    """

    layers: int = 2
    magnitude: float = MAX_MAGNITUDE

    def __post_init__(self) -> None:
        if not isinstance(self.layers, int) or self.layers < 0:
            raise ValueError(
                f"RandAugment: layers={self.layers!r} is not a number of operations; pass an int of at least 0"
            )
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"RandAugment: magnitude={self.magnitude} is outside [0, {MAX_MAGNITUDE:g}]")

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> Image.Image:
        for chosen in generator.integers(len(_TABLE), size=self.layers):
            image = _TABLE[chosen](image, self.magnitude / MAX_MAGNITUDE, generator)
        return image


def autocontrast(image: Image.Image) -> Image.Image:
    """Stretch each channel to 0..255; leave a constant channel as it is."""
    tables = []
    for low, high in cast(tuple[tuple[int, int], ...], image.getextrema()):
        if high > low:
            scale = np.float32(255) / np.float32(high - low)
            values = _RAMP.astype(np.float32) * scale - np.float32(low) * scale
            tables.append(np.clip(values, 0, 255).astype(np.uint8))
        else:
            tables.append(_RAMP)
    return _look_up(image, np.concatenate(tables))


def equalize(image: Image.Image) -> Image.Image:
    """Flatten each channel's histogram: v -> (pixels below v + step/2) / step, step = (pixels - brightest bin)/255."""
    tables = []
    for counts in np.array(image.histogram()).reshape(3, 256):
        step = int(counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        below = np.concatenate(([0], np.cumsum(counts)[:-1]))
        tables.append(np.minimum((below + step // 2) // step, 255) if step else _RAMP)
    return _look_up(image, np.concatenate(tables))


def posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keep the highest `bits` bits of each value, at least one."""
    shift = min(8 - bits, 7)
    return _look_up(image, _RAMP >> shift << shift)


def solarize(image: Image.Image, threshold: int) -> Image.Image:
    """Invert values v >= threshold mod 256; a threshold of 256 inverts everything."""
    return _look_up(image, np.where(threshold % 256 > _RAMP, _RAMP, 255 - _RAMP))


def solarize_add(image: Image.Image, addition: int) -> Image.Image:
    """Return min(v + addition, 255) where v < 128."""
    return _look_up(image, np.where(_RAMP < 128, np.minimum(_RAMP.astype(int) + addition, 255), _RAMP))


def color(image: Image.Image, factor: float) -> Image.Image:
    """Blend from grey (0) over the image (1) to stronger colours (above 1)."""
    grey = image.convert("L", matrix=(*_GREY, -0.5))  # Pillow adds 0.5 and rounds down
    return Image.blend(Image.merge("RGB", (grey, grey, grey)), image, factor)


def contrast(image: Image.Image, factor: float) -> Image.Image:
    """Return 196 + factor (v - 196)."""
    return _look_up(image, _blended(_CONTRAST_GREY, factor))


def brightness(image: Image.Image, factor: float) -> Image.Image:
    """Return factor * v."""
    return _look_up(image, _blended(0, factor))


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """Blend from blurred (0) over the image (1) to sharpened (above 1); the centre of the 3 x 3 blur counts 5 of 13."""
    blurred = image.filter(ImageFilter.Kernel((3, 3), (1, 1, 1, 1, 5, 1, 1, 1, 1), 13, offset=0.5 / 13 - 0.5))
    return Image.blend(blurred, image, factor)  # the offset makes the blur floor(sum/13), whatever floats do


def rotate(image: Image.Image, degrees: float) -> Image.Image:
    """Rotate counter-clockwise about the centre."""
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    x, y = (image.width - 1) / 2, (image.height - 1) / 2
    return _affine(image, (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))


def shear(image: Image.Image, x: float = 0, y: float = 0) -> Image.Image:
    """Return out[v, u] = in[v + y u, u + x v]."""
    return _affine(image, (1, x, 0), (y, 1, 0))


def translate(image: Image.Image, x: float = 0, y: float = 0) -> Image.Image:
    """Shift by pixels to the left and upwards: out[v, u] = in[v + y, u + x]."""
    return _affine(image, (1, 0, x), (0, 1, y))


def cutout(image: Image.Image, level: float, generator: np.random.Generator) -> Image.Image:
    """Paint a grey square on rows and columns [centre - half, centre + half), clipped to the image."""
    half = int(_scaled(level * 40, min(image.size)))
    image, x, y = image.copy(), int(generator.integers(image.width)), int(generator.integers(image.height))
    image.paste(FILL, (max(x - half, 0), max(y - half, 0), min(x + half, image.width), min(y + half, image.height)))
    return image


def _enhance(level: float) -> float:
    return level * 1.8 + 0.1


def _signed(value: float, generator: np.random.Generator) -> float:
    return value if generator.integers(2) else -value


def _scaled(pixels: float, side: int) -> float:
    return pixels * side / REFERENCE_SIDE


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, level, rng: autocontrast(image),
    "Equalize": lambda image, level, rng: equalize(image),
    "Invert": lambda image, level, rng: ImageChops.invert(image),
    "Rotate": lambda image, level, rng: rotate(image, _signed(level * 30, rng)),
    "Posterize": lambda image, level, rng: posterize(image, int(level * 4)),
    "Solarize": lambda image, level, rng: solarize(image, int(level * 256)),
    "SolarizeAdd": lambda image, level, rng: solarize_add(image, int(level * 110)),
    "Color": lambda image, level, rng: color(image, _enhance(level)),
    "Contrast": lambda image, level, rng: contrast(image, _enhance(level)),
    "Brightness": lambda image, level, rng: brightness(image, _enhance(level)),
    "Sharpness": lambda image, level, rng: sharpness(image, _enhance(level)),
    "ShearX": lambda image, level, rng: shear(image, x=_signed(level * 0.3, rng)),
    "ShearY": lambda image, level, rng: shear(image, y=_signed(level * 0.3, rng)),
    "TranslateX": lambda image, level, rng: translate(image, x=_signed(_scaled(level * 100, image.width), rng)),
    "TranslateY": lambda image, level, rng: translate(image, y=_signed(_scaled(level * 100, image.height), rng)),
    "Cutout": cutout,
}
_TABLE = tuple(OPERATIONS.values())


def _look_up(image: Image.Image, table: np.ndarray) -> Image.Image:
    """Return table[v] for every value; the table has 256 entries in all or per channel."""
    values = table.tolist()
    return image.point(values * (768 // len(values)))


@lru_cache(maxsize=64)
def _blended(grey: int, factor: float) -> np.ndarray:
    """Return grey + factor (v - grey), in float32 and rounded down."""
    values = grey + np.float32(factor) * (_RAMP.astype(np.float32) - grey)
    return np.clip(values, 0, 255).astype(np.uint8)


def _affine(image: Image.Image, x: tuple[float, float, float], y: tuple[float, float, float]) -> Image.Image:
    """Return out[v, u] = in[round(y . (u, v, 1)), round(x . (u, v, 1))], and FILL outside the image."""
    # Pillow takes floor(p (u + 1/2) + q (v + 1/2) + r)
    (a, b, c), (d, e, f) = ((p, q, r + _HALF - (p + q) / 2) for p, q, r in (x, y))
    return image.transform(
        image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.NEAREST, fillcolor=FILL
    )
