"""Compare each operation with a slow, obvious twin, the distributions of crop, flip and choice with theirs, and
Mixup with its formula.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from steadynorm.lab.data import randaugment as ra
from steadynorm.lab.data.augment import Augment, Evaluate, crop_box, generator_for, mixup, normalize
from steadynorm.lab.data.randaugment import OPERATIONS, RandAugment

FACTORS = (0.1, 0.64, 1.0, 1.36, 1.9)


def noise(low: int = 0, high: int = 256, width: int = 24, height: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(low, high, (height, width, 3), dtype=np.uint8)


def gradient(side: int = 224) -> np.ndarray:
    """Return a smooth image in which every pixel's value says where it is."""
    y, x = np.mgrid[:side, :side]
    return np.stack([x * 255 // (side - 1), y * 255 // (side - 1), 255 - x * 255 // (side - 1)], 2).astype(np.uint8)


def run(name: str, array: np.ndarray, *args: object) -> np.ndarray:
    return np.asarray(getattr(ra, name)(Image.fromarray(array), *args))


def drawn(name: str, array: np.ndarray, magnitude: float, seed: int = 0) -> np.ndarray:
    return np.asarray(OPERATIONS[name](Image.fromarray(array), magnitude / 10, np.random.default_rng(seed)))


def blend(degenerate: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    """Return d + f (x - d) in float32, clipped to [0, 255] and rounded down."""
    d, x = degenerate.astype(np.float32), image.astype(np.float32)
    return np.clip(d + np.float32(factor) * (x - d), 0, 255).astype(np.uint8)


# --- values


def test_autocontrast_stretches_each_channel():
    image = noise(60, 180)
    image[..., 2] = 77  # a constant channel stays
    expected = image.copy()
    for c in range(2):
        low, high = (np.float32(v) for v in (image[..., c].min(), image[..., c].max()))
        scale = np.float32(255) / (high - low)
        expected[..., c] = np.clip(image[..., c].astype(np.float32) * scale - low * scale, 0, 255).astype(np.uint8)
    assert np.array_equal(run("autocontrast", image), expected)
    assert expected[..., 0].min() == 0
    assert expected[..., 0].max() >= 254


@pytest.mark.parametrize("image", [noise(), noise(100, 130, 64, 64), np.full((9, 9, 3), 50, np.uint8)])
def test_equalize_counts_the_pixels_below(image):
    expected = image.copy()
    for c in range(3):
        values = image[..., c].ravel().tolist()
        step = (len(values) - values.count(max(values))) // 255
        if step:
            table = [0] + [min((sum(u < v for u in values) + step // 2) // step, 255) for v in range(1, 256)]
            expected[..., c] = np.array(table)[image[..., c]]
    assert np.array_equal(run("equalize", image), expected)


def test_invert_twice_is_nothing():
    image = noise()
    assert np.array_equal(drawn("Invert", image, 10), 255 - image)
    assert np.array_equal(drawn("Invert", drawn("Invert", image, 10), 10), image)


@pytest.mark.parametrize(("magnitude", "step"), [(0, 128), (2.4, 128), (2.5, 128), (5, 64), (7.5, 32), (10, 16)])
def test_posterize_keeps_the_high_bits_and_never_none(magnitude, step):
    image = noise()
    assert np.array_equal(drawn("Posterize", image, magnitude), image // step * step)


@pytest.mark.parametrize("magnitude", [0, 3, 5, 9.9, 10])
def test_solarize_inverts_from_the_threshold_on_and_256_wraps(magnitude):
    image, threshold = noise(), int(magnitude / 10 * 256) % 256
    assert np.array_equal(drawn("Solarize", image, magnitude), np.where(image < threshold, image, 255 - image))
    if magnitude == 10:
        assert np.array_equal(drawn("Solarize", image, magnitude), 255 - image)


@pytest.mark.parametrize("magnitude", [0, 5, 10])
def test_solarize_add_lifts_the_dark_half(magnitude):
    image, addition = noise(), int(magnitude / 10 * 110)
    assert np.array_equal(drawn("SolarizeAdd", image, magnitude), np.where(image < 128, image + addition, image))


# --- blends


@pytest.mark.parametrize("factor", FACTORS)
def test_color_blends_with_grey(factor):
    image = noise()
    grey = np.floor(image.astype(np.float64) @ (0.2989, 0.587, 0.114) * 255.5 / 255)[..., None].repeat(3, 2)
    assert np.array_equal(run("color", image, factor), blend(grey, image, factor))


@pytest.mark.parametrize("factor", FACTORS)
def test_contrast_blends_with_196_and_brightness_with_black(factor):
    image = noise()
    assert np.array_equal(run("contrast", image, factor), blend(np.full_like(image, 196), image, factor))
    assert np.array_equal(run("brightness", image, factor), blend(np.zeros_like(image), image, factor))


@pytest.mark.parametrize("factor", FACTORS)
def test_sharpness_blends_with_a_blur_that_leaves_the_border(factor):
    image = noise()
    blurred = image.copy()
    for y in range(1, image.shape[0] - 1):
        for x in range(1, image.shape[1] - 1):
            around = image[y - 1 : y + 2, x - 1 : x + 2].astype(int).sum((0, 1))
            blurred[y, x] = (around + 4 * image[y, x].astype(int)) // 13
    assert np.array_equal(run("sharpness", image, factor), blend(blurred, image, factor))


@pytest.mark.parametrize("name", ["Color", "Contrast", "Brightness", "Sharpness"])
def test_enhancing_at_magnitude_5_changes_nothing_and_at_10_has_factor_1_9(name):
    image = noise()
    assert np.array_equal(drawn(name, image, 5), image)
    assert np.array_equal(drawn(name, image, 10), run(name.lower(), image, 1.9))


# --- geometry


def moved(image: np.ndarray, source) -> np.ndarray:
    """Return out[y, x] = in[source(x, y)] by nearest pixel, with 128 outside."""
    height, width, _ = image.shape
    out = np.full_like(image, 128)
    for y in range(height):
        for x in range(width):
            u, v = (math.floor(value + 0.5 + 1e-9) for value in source(x, y))
            if 0 <= u < width and 0 <= v < height:
                out[y, x] = image[v, u]
    return out


@pytest.mark.parametrize("degrees", [30.0, -30.0, 12.0])
def test_rotate_turns_counter_clockwise_about_the_centre(degrees):
    image = noise()
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    cx, cy = (image.shape[1] - 1) / 2, (image.shape[0] - 1) / 2

    def source(x, y):
        return cx + cos * (x - cx) - sin * (y - cy), cy + sin * (x - cx) + cos * (y - cy)

    differs = (run("rotate", image, degrees) != moved(image, source)).any(2)
    assert differs.mean() < 0.01  # places within 0.004 of half-way between two pixels
    square = gradient(9)
    assert np.array_equal(run("rotate", square, 90.0), np.rot90(square))


@pytest.mark.parametrize("level", [0.3, -0.3, 0.15, -0.21])
def test_shear_is_about_the_upper_left_corner(level):
    image = noise()
    assert np.array_equal(run("shear", image, level, 0), moved(image, lambda x, y: (x + level * y, y)))
    assert np.array_equal(run("shear", image, 0, level), moved(image, lambda x, y: (x, y + level * x)))


@pytest.mark.parametrize("pixels", [5, -7, 2.4, -14.29])
def test_translate_moves_whole_pixels_and_fills_with_128(pixels):
    image = noise(0, 100)
    assert np.array_equal(run("translate", image, pixels, 0), moved(image, lambda x, y: (x + pixels, y)))
    assert np.array_equal(run("translate", image, 0, pixels), moved(image, lambda x, y: (x, y + pixels)))
    gone = round(abs(pixels))
    assert (run("translate", image, pixels, 0) == 128).mean() == pytest.approx(gone / image.shape[1])


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_signs_are_random_and_even(name):
    image = noise()
    kinds = Counter(drawn(name, image, 10, seed).tobytes() for seed in range(200))
    assert len(kinds) == 2
    assert min(kinds.values()) > 70  # 4 standard deviations


def test_pixel_sizes_scale_with_the_side():
    for side, pixels in ((224, 100), (448, 200), (56, 25)):
        assert (drawn("TranslateX", np.zeros((side, side, 3), np.uint8), 10) == 128).mean() == pytest.approx(
            pixels / side
        )
    for side, half in ((224, 40), (112, 20), (32, 5)):
        areas = [(drawn("Cutout", np.zeros((side, side, 3), np.uint8), 10, s)[..., 0] == 128).sum() for s in range(50)]
        assert max(areas) == (2 * half) ** 2


def test_cutout_is_a_square_about_a_uniform_centre_cut_at_the_border():
    side, half = 224, 40
    length = np.mean([min(c + half, side) - max(c - half, 0) for c in range(side)])
    black = np.zeros((side, side, 3), np.uint8)
    areas = np.array([(drawn("Cutout", black, 10, seed)[..., 0] == 128).sum() for seed in range(400)])
    assert abs(areas.mean() - length**2) < 4 * areas.std() / 20
    once = np.argwhere(drawn("Cutout", black, 10, 1)[..., 0])
    (top, left), (bottom, right) = once.min(0), once.max(0)
    assert len(once) == (bottom - top + 1) * (right - left + 1)


# --- RandAugment


def test_there_are_16_operations_and_every_one_returns_another_image():
    assert len(OPERATIONS) == 16
    before = noise(30, 160, 224, 224)
    image = Image.fromarray(before)
    for name, operation in OPERATIONS.items():
        out = operation(image, 1.0, np.random.default_rng(0))
        assert out.size == image.size
        assert not np.array_equal(np.asarray(out), before), name
        assert np.array_equal(np.asarray(image), before), name


def test_randaugment_applies_as_many_operations_as_layers_with_equal_chance(monkeypatch):
    seen: Counter[int] = Counter()

    def spy(i):
        def count(image, level, generator):
            assert level == 0.7
            seen[i] += 1
            return image

        return count

    monkeypatch.setattr(ra, "_TABLE", tuple(spy(i) for i in range(16)))
    image = Image.new("RGB", (4, 4))
    for i in range(2000):
        RandAugment(2, 7)(image, generator_for("augment", 0, i))
    assert sum(seen.values()) == 4000
    expected = 4000 / 16
    assert sum((seen[i] - expected) ** 2 / expected for i in range(16)) < 37.7  # chi^2, 15 degrees, 0.1 %


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandAugment(-1),
        lambda: RandAugment(2, 11),
        lambda: Augment(magnitude=-1),
        lambda: Augment(0),
        lambda: Augment(32, crop_scale=(0.5, 1.5)),
        lambda: Augment(32, crop_scale=(0.0, 1.0)),
        lambda: Augment(32, crop_ratio=(2.0, 1.0)),
        lambda: Evaluate(224, resize=200),
    ],
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"is|outside"):
        make()


# --- crop, flip, evaluation


def test_the_area_and_place_of_a_crop_are_uniform_and_its_ratio_log_uniform():
    generator, side = np.random.default_rng(0), 2000
    boxes = np.array([crop_box(side, side, generator, scale=(0.05, 0.5)) for _ in range(4000)], dtype=float)
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area = (w * h / side**2 - 0.05) / 0.45
    shape = np.log(w / h) / math.log(4 / 3) / 2 + 0.5
    left, top = boxes[:, 0] / (side - w), boxes[:, 1] / (side - h)
    for uniform in (area, shape, left, top):
        gap = np.abs(np.sort(uniform) - (np.arange(4000) + 0.5) / 4000).max()
        assert gap < 1.95 / math.sqrt(4000)  # Kolmogorov-Smirnov, 0.1 %


@pytest.mark.parametrize(
    ("size", "expected"),
    [((400, 40), (173, 0, 226, 40)), ((40, 400), (0, 173, 40, 226)), ((100, 100), (0, 0, 100, 100))],
)
def test_a_crop_that_never_fits_falls_back_to_the_centre(size, expected):
    class Never:
        def uniform(self, low, high):
            return 10.0

    assert crop_box(*size, Never()) == expected


def test_crops_of_odd_images_stay_inside_and_are_never_empty():
    generator = np.random.default_rng(0)
    for width, height in ((1, 1), (2, 500), (32, 32), (500, 3)):
        for _ in range(200):
            left, top, right, bottom = crop_box(width, height, generator)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height


def test_images_are_flipped_half_of_the_time():
    image = Image.fromarray(gradient(16))
    augment = Augment(16, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), randaugment_layers=0)
    outs = [np.asarray(augment(image, generator_for("augment", 0, i))) for i in range(1000)]
    flipped = sum(np.array_equal(out, gradient(16)[:, ::-1]) for out in outs)
    assert flipped + sum(np.array_equal(out, gradient(16)) for out in outs) == 1000
    assert abs(flipped - 500) < 65
    still = Augment(16, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), randaugment_layers=0, flip=False)
    assert all(
        np.array_equal(np.asarray(still(image, generator_for("augment", 0, i))), gradient(16)) for i in range(20)
    )


def test_a_crop_resizes_with_antialias():
    """Stripes finer than the output average to grey; without antialias they would stay black and white."""
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    out = np.asarray(
        Augment(32, crop_scale=(0.9, 1.0), randaugment_layers=0)(Image.fromarray(stripes), generator_for("augment", 0))
    )
    assert abs(out.astype(int) - 127).max() < 20


@pytest.mark.parametrize("size", [(500, 375), (300, 400), (256, 256), (90, 130)])
def test_evaluation_resizes_and_then_crops_the_centre(size):
    image = Image.fromarray(noise(width=size[0], height=size[1]))
    factor = 256 / min(size)
    resized = image.resize((round(size[0] * factor), round(size[1] * factor)), Image.Resampling.BILINEAR)
    left, top = (resized.width - 224) // 2, (resized.height - 224) // 2
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
    assert abs(np.asarray(Evaluate(224)(image)) - expected).max() <= 1


def test_evaluation_can_take_the_whole_image():
    assert np.array_equal(
        np.asarray(Evaluate(32, resize=32)(Image.fromarray(noise(width=32, height=32)))), noise(width=32, height=32)
    )


def test_normalize_is_the_formula_and_keeps_its_input():
    x = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(normalize(x), (x.float() / 255 - 0.5) / 0.5, rtol=0, atol=2e-7)
    assert x.tolist() == list(range(256))
    with pytest.raises(TypeError, match="already normalized"):
        normalize(normalize(x))


# --- Mixup


def batch(count: int = 6, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 2, 2, generator=generator), torch.randint(classes, (count,), generator=generator)


def test_mixup_is_the_formula():
    x, labels = batch()
    weight = generator_for("mixup", 3, 7).beta(0.2, 0.2)
    weight = max(weight, 1 - weight)
    onehot = torch.eye(4)[labels]
    mixed, soft = mixup(x, labels, generator_for("mixup", 3, 7), classes=4)
    for i in range(len(x)):
        torch.testing.assert_close(mixed[i], weight * x[i] + (1 - weight) * x[i - 1])
        torch.testing.assert_close(soft[i], weight * onehot[i] + (1 - weight) * onehot[i - 1])
    torch.testing.assert_close(soft.sum(1), torch.ones(6))


def test_the_mixup_weight_is_the_larger_part_of_a_beta_draw():
    eye, labels = torch.eye(2, dtype=torch.float64), torch.arange(2)
    draws = (mixup(eye, labels, generator_for("mixup", 0, step), classes=2)[1] for step in range(2000))
    weights = np.array([soft[0, 0].item() for soft in draws])
    assert weights.min() >= 0.5
    # E max(l, 1-l)^2 + E min^2 = 2 E l^2 = (1 + p) / (1 + 2 p)
    square = weights**2 + (1 - weights) ** 2
    assert abs(square.mean() - 2 * 1.2 / (2 * 1.4)) < 4 * square.std() / math.sqrt(2000)


def test_mixup_of_two_ranks_with_a_lead_is_mixup_of_the_whole():
    x, labels = batch()
    whole = mixup(x, labels, generator_for("mixup", 0, 1), classes=4)
    parts = []
    for rank in range(2):
        own = [i % 6 for i in range(3 * rank - 1, 3 * rank + 3)]
        parts.append(mixup(x[own], labels[own], generator_for("mixup", 0, 1), classes=4, lead=True))
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


def test_mixup_can_be_off_and_misuse_is_refused():
    x, labels = batch()
    same, onehot = mixup(x, labels, generator_for("mixup", 0, 0), classes=4, p=0.0)
    assert torch.equal(same, x)
    assert torch.equal(onehot.argmax(1), labels)
    with pytest.raises(TypeError, match="normalize first"):
        mixup(x.to(torch.uint8), labels, generator_for("mixup", 0, 0), classes=4)
    with pytest.raises(ValueError, match="p=-1"):
        mixup(x, labels, generator_for("mixup", 0, 0), classes=4, p=-1)


def test_generators_of_streams_seeds_and_positions_differ():
    keys = [(s, seed, a, b) for s in ("order", "augment", "mixup") for seed in (0, 1) for a in (0, 1) for b in (0, 1)]
    assert len({generator_for(s, *rest).random() for s, *rest in keys}) == len(keys)
