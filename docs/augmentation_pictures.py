"""Draw what augmentation does to an image: each operation, the whole pipeline, Mixup.

Run from the repository's root: .venv/bin/python docs/augmentation_pictures.py [FOLDER OF CIFAR-10]
The photo is Grace Hopper's portrait (James S. Davis, US Navy, public domain), which comes with matplotlib.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.cbook
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from steadynorm.lab.data.augment import Augment, Evaluate, generator_for, mixup, normalize
from steadynorm.lab.data.datasets import get
from steadynorm.lab.data.images import Cifar10, read_rgb
from steadynorm.lab.data.randaugment import OPERATIONS, brightness, contrast

SHEETS = {
    "geometry": ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout"),
    "values": ("AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd"),
    "enhance": ("Color", "Contrast", "Brightness", "Sharpness"),
}
NO_MAGNITUDE = ("AutoContrast", "Equalize", "Invert")
DRAWS = ((2, 0), (5, 1), (8, 0), (10, 0), (10, 1))  # magnitude, seed; the two seeds give either sign
GAP, TEXT = 4, 16  # pixels
OUT = Path(__file__).parent / "img"


def sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]], side: int, resample: Image.Resampling) -> Image.Image:
    """A titled row of pictures below the other."""
    columns = max(len(row) for _, row in rows)
    page = Image.new("RGB", (columns * (side + GAP) - GAP, len(rows) * (side + TEXT + GAP)), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=12)
    for i, (title, row) in enumerate(rows):
        top = i * (side + TEXT + GAP)
        pen.text((1, top), title, fill="black", font=font)
        for j, picture in enumerate(row):
            page.paste(picture.resize((side, side), resample), (j * (side + GAP), top + TEXT))
    return page


def strip(photo: Image.Image, name: str) -> tuple[str, list[Image.Image]]:
    """The photo, then an operation at rising magnitude; or three versions of it, each before and after."""
    if name in NO_MAGNITUDE:
        versions = [photo, contrast(photo, 0.4), brightness(photo, 0.35)]
        pairs = [(each, OPERATIONS[name](each, 1.0, np.random.default_rng(0))) for each in versions]
        return f"{name}: the photo, a faded and a dark one, each before and after", [
            each for pair in pairs for each in pair
        ]
    draws = DRAWS if name in SHEETS["geometry"] else tuple((m, 0) for m in (0, 2, 5, 8, 10))
    made = [OPERATIONS[name](photo, m / 10, np.random.default_rng(seed)) for m, seed in draws]
    title, row = f"{name}: original; magnitude {', '.join(str(m) for m, _ in draws)}", [photo, *made]
    if name == "Sharpness":  # nothing to be seen in a picture made smaller
        return f"{title} (a part, not made smaller)", [each.crop((70, 40, 170, 140)) for each in row]
    return title, row


def mixed(data: Cifar10, step: int, count: int = 10) -> list[tuple[str, list[Image.Image]]]:
    """Ten images and what Mixup makes of them."""
    images = torch.from_numpy(data.images[:count]).permute(0, 3, 1, 2)
    labels = torch.from_numpy(data.labels[:count])
    x, y = mixup(normalize(images), labels, generator_for("mixup", 0, step), classes=10, p=2.0)
    pixels = ((x + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    share, before = y[1, labels[1]].item(), y[1, labels[0]].item()
    second = f"mixed: {share:.2f} of itself, {before:.2f} of the one before it (drawn with p = 2 to be seen)"
    names = ", ".join(data.classes[i] for i in labels)
    return [(names, [data[i][0] for i in range(count)]), (second, [Image.fromarray(each) for each in pixels])]


def main() -> None:
    photo = read_rgb(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    data = Cifar10(get("cifar10", sys.argv[1] if len(sys.argv) > 1 else None), train=False)
    OUT.mkdir(exist_ok=True)
    whole = Evaluate(224, resize=224)(photo)
    pages = {
        name: sheet([strip(whole, each) for each in names], 100, Image.Resampling.LANCZOS)
        for name, names in SHEETS.items()
    }
    full = [[Augment(224)(photo, generator_for("augment", 0, 6 * i + j)) for j in range(6)] for i in range(3)]
    pages["pipeline"] = sheet([("", row) for row in full], 100, Image.Resampling.LANCZOS)
    small, desk = Augment(32, crop_scale=(0.25, 1.0)), range(11)
    rows = [("CIFAR-10", [data[i][0] for i in desk])] + [
        (f"Augment(32), epoch {e}", [small(data[i][0], generator_for("augment", 0, i, e)) for i in desk])
        for e in (0, 1)
    ]
    pages["cifar"] = sheet(rows, 64, Image.Resampling.NEAREST)
    pages["mixup"] = sheet(mixed(data, step=1), 64, Image.Resampling.NEAREST)
    for name, page in pages.items():
        page.save(OUT / f"augment_{name}.webp", quality=70, method=6)


if __name__ == "__main__":
    main()
