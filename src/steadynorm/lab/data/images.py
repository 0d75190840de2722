"""Load batches from image data sets (class folders, CIFAR-10).

Batches depend only on the seed and the position: sample order on (seed, epoch), augmentation on (seed, epoch, sample).
The global batches are therefore the same for any number of ranks and worker processes, and a run resumes from its
position, an int, without going through what came before.
"""

import atexit
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader

from steadynorm.lab.data.augment import Augment, Evaluate, generator_for
from steadynorm.lab.data.datasets import CIFAR10_CLASSES
from steadynorm.lab.data.download import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")  # in lower case
_CIFAR_RECORD = 1 + 3 * 32 * 32  # label, then red, green, blue by rows
_CIFAR_RECORDS = 10_000  # per file

Key = tuple[int, int]  # epoch, sample


class ImageFolder:
    """Images in one folder per class, as in ImageNet: root/n01440764/n01440764_10026.JPEG.

    The sorted folder names are classes 0, 1, ... Images are found by suffix and read on demand. Names are stored as
    bytes in one array, so that a million of them do not grow in every worker process.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"{self.root}: no such folder; pass the folder that holds one folder per class")
        self.classes = tuple(sorted(entry.name for entry in _visible(self.root) if entry.is_dir()))
        if not self.classes:
            raise DataError(
                f"{self.root}: no class folders in it; images belong in {self.root / '<class>' / '<name>.jpg'} "
                "(ImageNet's validation archive is flat and must be sorted into folders first)"
            )
        names = [self._images_of(name) for name in self.classes]
        self.labels = np.repeat(np.arange(len(names)), [len(images) for images in names])  # (samples,)
        self._names = np.array([name for images in names for name in images])

    def _images_of(self, name: str) -> list[bytes]:
        folder = self.root / name
        images = sorted(os.fsencode(e.name) for e in _visible(folder) if e.name.lower().endswith(SUFFIXES))
        if not images:
            raise DataError(f"{folder}: no image ({', '.join(SUFFIXES)}) in this class folder; fill it or remove it")
        return images

    def path(self, index: int) -> Path:
        """Return the path of a sample's file."""
        return self.root / self.classes[self.labels[index]] / os.fsdecode(bytes(self._names[index]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_rgb(self.path(index)), int(self.labels[index])


class InMemory:
    """Images of one size in an array, uint8 (samples, height, width, 3), with their labels.

    >>> data = InMemory(np.zeros((2, 8, 8, 3), np.uint8), [1, 0], classes=("cat", "dog"))
    >>> image, label = data[0]
    >>> len(data), image.size, data.classes[label]
    (2, (8, 8), 'dog')
    """

    def __init__(self, images: np.ndarray, labels: Sequence[int] | np.ndarray, classes: Sequence[str]) -> None:
        self.images, self.labels, self.classes = images, np.asarray(labels, dtype=np.int64), tuple(classes)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or len(images) != len(self.labels):
            raise DataError(
                f"InMemory: images are {images.dtype} {images.shape} with {len(self.labels)} labels; "
                "expected uint8 (samples, height, width, 3) and one label per image"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])


class Cifar10(InMemory):
    """CIFAR-10 from its canonical binary files: 50,000 training or 10,000 test images of 32 x 32, in memory.

    `root` holds data_batch_1.bin to data_batch_5.bin and test_batch.bin (`steadynorm data get cifar10`).
    """

    def __init__(self, root: str | os.PathLike[str], *, train: bool = True) -> None:
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
        records = np.concatenate([_cifar_records(Path(root) / name) for name in names])
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        super().__init__(np.ascontiguousarray(pixels), records[:, 0], CIFAR10_CLASSES)


def _cifar_records(path: Path) -> np.ndarray:
    remedy = "`steadynorm data get cifar10` gets it"
    if not path.is_file():
        raise DataError(f"{path}: no such file; {remedy}")
    if (size := path.stat().st_size) != (expected := _CIFAR_RECORD * _CIFAR_RECORDS):
        raise DataError(
            f"{path}: {size} bytes, expected {expected} ({_CIFAR_RECORDS} records of {_CIFAR_RECORD}); "
            f"it is cut off or another file, {remedy} again"
        )
    records = np.fromfile(path, dtype=np.uint8).reshape(_CIFAR_RECORDS, _CIFAR_RECORD)
    if (wrong := np.flatnonzero(records[:, 0] >= len(CIFAR10_CLASSES))).size:
        raise DataError(
            f"{path}: record {wrong[0]} has label {records[wrong[0], 0]}, expected 0 to 9; "
            f"it is damaged or another file, {remedy} again"
        )
    return records


def read_rgb(path: str | os.PathLike[str]) -> Image.Image:
    """Read an image file as RGB, or raise DataError with its name.

    Grey, palette and CMYK images are converted, transparent ones laid on white, 16-bit grey ones cut to 8 bits.
    """
    try:
        with Path(path).open("rb") as file, Image.open(file) as image:
            image.load()
            return _to_rgb(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            f"{os.fspath(path)}: not readable as an image ({reason}); restore it from its source, or remove it"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode}, whose range is unknown: save it with 8 bits per channel")
    return image.convert("RGB")


@dataclass(eq=False)
class ImageLoader:
    """Iterate forever over training batches: uint8 images (local, 3, size, size) and int64 labels (local,).

    Epochs follow each other without a gap: a batch may hold the end of one and the beginning of the next, and no
    sample is skipped. Iteration begins at the position, which advances with every batch returned, not with batches
    prepared ahead; a new iterator continues where the last one stopped.

    With `lead`, a rank's part begins with the sample before it (the last of the batch before the first), for
    `mixup(lead=True)`; local is then batch / world + 1.

    >>> data = InMemory(np.zeros((6, 8, 8, 3), np.uint8), range(6), classes="abcdef")
    >>> loader = ImageLoader(data, batch=4, augment=Augment(8), seed=1)
    >>> images, labels = next(iter(loader))
    >>> images.shape, labels.tolist(), loader.state_dict()
    (torch.Size([4, 3, 8, 8]), [3, 5, 2, 0], {'position': 4, 'seed': 1, 'samples': 6})
    """

    dataset: ImageFolder | InMemory
    _: KW_ONLY
    batch: int  # samples over all ranks; each rank gets batch / world consecutive ones
    augment: Augment
    seed: int  # of order and augmentation
    rank: int = 0
    world: int = 1
    workers: int = 0  # processes that read and augment ahead; 0 to do it in this process
    lead: bool = False
    position: int = field(default=0, init=False)  # samples returned so far, over all ranks

    def __post_init__(self) -> None:
        _check_split(len(self.dataset), self.batch, self.rank, self.world)
        if self.batch % self.world:
            raise ValueError(f"ImageLoader: batch={self.batch} cannot be split evenly over world={self.world} ranks")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"ImageLoader: seed={self.seed} is outside [0, 2^64)")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = _Samples(self.dataset, self.augment, self.seed)
        for images, labels in _batches(samples, self._keys(), self.workers):
            self.position += self.batch
            yield images, labels

    def _keys(self) -> Iterator[list[Key]]:
        samples, local = len(self.dataset), self.batch // self.world
        part = [i % self.batch for i in range(self.rank * local - self.lead, (self.rank + 1) * local)]
        for start in count(self.position, self.batch):
            places = (divmod(start + i, samples) for i in part)
            yield [(epoch, int(_permutation(self.seed, epoch, samples)[place])) for epoch, place in places]

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch, seed and size as plain ints."""
        return {"position": self.position, "seed": self.seed, "samples": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a saved position; existing iterators keep theirs."""
        for name, own in (("seed", self.seed), ("samples", len(self.dataset))):
            if state[name] != own:
                raise ValueError(
                    f"ImageLoader: the saved position has {name}={state[name]}, this run {own}; make them equal"
                )
        self.position = state["position"]


def validation_batches(
    dataset: ImageFolder | InMemory,
    batch: int,
    evaluate: Evaluate,
    *,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    samples: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate once, in order, over the samples, `batch` at a time over all ranks; the last batch may be smaller.

    All ranks get the same number of batches, some of which may be empty. `samples` limits the total.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"validation_batches: samples={samples} must be at least 1; leave it out for all")
    samples = len(dataset) if samples is None else min(samples, len(dataset))
    _check_split(samples, batch, rank, world)
    keys = []
    for start in range(0, samples, batch):
        size = min(batch, samples - start)
        keys.append([(0, start + i) for i in range(size * rank // world, size * (rank + 1) // world)])
    yield from _batches(_Samples(dataset, evaluate, None), iter(keys), workers)


@dataclass(frozen=True)
class _Samples:
    """Data set of a DataLoader whose items are whole batches, indexed by lists of keys."""

    dataset: ImageFolder | InMemory
    transform: Augment | Evaluate
    seed: int | None

    def __getitem__(self, keys: list[Key]) -> tuple[Tensor, Tensor]:
        side = self.transform.size
        images, labels = np.empty((len(keys), side, side, 3), np.uint8), np.empty(len(keys), np.int64)
        for i, (epoch, sample) in enumerate(keys):
            image, labels[i] = self.dataset[sample]
            generator: Any = None if self.seed is None else generator_for("augment", self.seed, sample, epoch)
            images[i] = np.asarray(self.transform(image, generator))
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


def _batches(samples: _Samples, keys: Iterator[list[Key]], workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(
        samples,  # type: ignore[arg-type]
        sampler=keys,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),  # for faster copies to a GPU
        worker_init_fn=_leave_signals,
        generator=torch.Generator(),  # an iterator would otherwise draw from torch's global generator
    )
    iterator = iter(loader)
    end = partial(_end_workers, iterator)
    atexit.register(end)  # multiprocessing would only send SIGTERM, and wait
    try:
        yield from iterator
    finally:  # after an error, garbage collection would wait five seconds per worker
        end()
        atexit.unregister(end)


def _end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has any: ask them to, then kill them."""
    getattr(iterator, "_shutdown_workers", lambda: None)()
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def _leave_signals(worker: int) -> None:
    """Leave Ctrl-C and SIGTERM to the main process, which saves a checkpoint with its workers' help and then ends them.

    Ctrl-C reaches a whole process group, and Slurm and systemd send SIGTERM to every process of a job.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    # Philox's raw stream is the same in all versions of numpy; Generator.permutation is not.
    raw: Any = generator_for("order", seed, epoch).bit_generator
    return np.argsort(raw.random_raw(samples), kind="stable")


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _check_split(samples: int, batch: int, rank: int, world: int) -> None:
    if not samples:
        raise DataError("the data set has no samples")
    if batch < 1 or world < 1 or not 0 <= rank < world:
        raise ValueError(f"batch={batch}, rank={rank}, world={world}: pass batch >= 1 and 0 <= rank < world")
