"""Tasks: the model, its data, the loss of a batch and the evaluation."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadynorm.lab.data import datasets, images, shards, token_loader
from steadynorm.lab.data.augment import Augment, Evaluate, generator_for, mixup, normalize
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.encoders import BYTE_VOCAB
from steadynorm.lab.data.tokenize import sotu_shards
from steadynorm.lab.models import GPT, SimpleViT
from steadynorm.lab.train.config import Config, Gpt, Vit

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """Model and data of one process of a run."""

    def model(self, generator: torch.Generator) -> nn.Module:
        """Return a newly initialized model."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Iterate over this process's share of every batch, starting at the position."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        ...

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """Return sums over this process's share: `count`, and quantities to be divided by it."""
        ...

    def position(self) -> dict[str, int]:
        """Return the position in the data."""
        ...

    def go_to(self, position: dict[str, int]) -> None:
        """Resume at a position in the data."""
        ...

    def tokens(self) -> int:
        """Return the tokens or images per step, over all processes."""
        ...


def make(config: Config, rank: int = 0, world: int = 1) -> Task:
    """Return the task of a configuration."""
    return (GptTask if isinstance(config.task, Gpt) else VitTask)(config, rank, world)


class GptTask:
    """Next-token prediction on shards."""

    def __init__(self, config: Config, rank: int, world: int):
        assert isinstance(config.task, Gpt)
        self.config, self.task = config, config.task
        if self.task.length > self.task.model.context:
            raise ValueError(f"length={self.task.length} exceeds the model's context={self.task.model.context}")
        if self.task.data is None:
            if self.task.model.vocab != BYTE_VOCAB:
                raise ValueError(
                    f"this recipe has a vocabulary of {self.task.model.vocab} tokens and needs its data: pass --task.data "
                    f"SHARDS (see steadynorm data --help); the embedded text is bytes, {BYTE_VOCAB} tokens"
                )
            (train, self.validation), checksums = sotu_shards(), {}
        else:
            train, self.validation = (shards.shard_paths(self.task.data, split) for split in ("train", "val"))
            checksums = shards.shard_checksums(self.task.data)
        self.unverified = {path: checksums[path] for path in self.validation if path in checksums}
        self.rank, self.world = rank, world
        self.loader = token_loader.TokenLoader(
            train, batch=config.batch, length=self.task.length, rank=rank, world=world, vocab=self.task.model.vocab,
            shuffle=config.seed if self.task.shuffle else None, checksums=checksums,
        )  # fmt: skip

    def model(self, generator: torch.Generator) -> nn.Module:
        model = GPT(self.task.model)
        model.init_weights(generator)
        return model

    def batches(self) -> Iterator[Batch]:
        return iter(self.loader)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        total, count = torch.zeros((), dtype=torch.float64, device=device), 0
        micro = self.config.micro_batch or self.config.batch // self.world
        for inputs, targets in token_loader.validation_batches(
            self.validation, batch=micro * self.world, length=self.task.length, max_tokens=self.task.eval_tokens,
            rank=self.rank, world=self.world, vocab=self.task.model.vocab, checksums=self.unverified,
        ):  # fmt: skip
            total += model(inputs.to(device), targets.to(device)).double() * targets.numel()
            count += targets.numel()
        self.unverified = {}
        return {"count": torch.tensor(float(count), dtype=torch.float64, device=device), "val_loss": total}

    def position(self) -> dict[str, int]:
        return self.loader.state_dict()

    def go_to(self, position: dict[str, int]) -> None:
        self.loader.load_state_dict(position)

    def tokens(self) -> int:
        return self.config.batch * self.task.length


class VitTask:
    """Image classification."""

    def __init__(self, config: Config, rank: int, world: int):
        assert isinstance(config.task, Vit)
        self.config, self.task, self.rank, self.world = config, config.task, rank, world
        self.train, self.validation, self.transform = _image_data(self.task)
        size = self.task.model.image
        augment = Augment(
            size, self.task.crop_scale, randaugment_layers=self.task.randaugment, magnitude=self.task.magnitude
        )
        self.mixes = self.task.mixup > 0
        self.loader = images.ImageLoader(
            self.train, batch=config.batch, augment=augment, seed=config.seed, rank=rank, world=world,
            workers=self.task.workers, lead=self.mixes and world > 1, pin=torch.cuda.is_available(),
        )  # fmt: skip

    def model(self, generator: torch.Generator) -> nn.Module:
        model = SimpleViT(self.task.model)
        model.init_weights(generator)
        return model

    def batches(self) -> Iterator[Batch]:
        for pictures, labels in self.loader:
            step = self.loader.position // self.config.batch
            mixed: Tensor = normalize(pictures)
            soft = functional.one_hot(labels, self.task.model.classes).float()
            if self.mixes:
                mixed, soft = mixup(
                    mixed, labels, generator_for("mixup", self.config.seed, step), classes=self.task.model.classes,
                    p=self.task.mixup, lead=self.world > 1,
                )  # fmt: skip
            yield mixed, soft

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pictures, soft = batch
        return functional.cross_entropy(model(pictures).float(), soft)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        sums = {
            key: torch.zeros((), dtype=torch.float64, device=device) for key in ("count", "val_loss", "val_accuracy")
        }
        micro = self.config.micro_batch or self.config.batch // self.world
        batches = images.validation_batches(
            self.validation, micro * self.world, self.transform, rank=self.rank, world=self.world,
            workers=self.task.workers, samples=self.task.eval_images,
        )  # fmt: skip
        for pictures, labels in batches:
            if not len(labels):  # FSDP2's all-gather needs every process, so this one evaluates a black image
                pictures = pictures.new_zeros(1, *pictures.shape[1:])
            logits, labels = model(normalize(pictures).to(device)).float()[: len(labels)], labels.to(device)
            sums["count"] += len(labels)
            sums["val_loss"] += functional.cross_entropy(logits, labels, reduction="sum").double()
            sums["val_accuracy"] += (logits.argmax(1) == labels).sum()
        return sums

    def position(self) -> dict[str, int]:
        return self.loader.state_dict()

    def go_to(self, position: dict[str, int]) -> None:
        self.loader.load_state_dict(position)

    def tokens(self) -> int:
        return self.config.batch


def _image_data(task: Vit) -> tuple[Any, Any, Evaluate]:
    """Return training images, validation images and the transform of the latter."""
    classes, size = task.model.classes, task.model.image
    if task.dataset == "cifar10":
        root = task.data or datasets.get("cifar10")
        train, validation = images.Cifar10(root), images.Cifar10(root, train=False)
        transform = Evaluate(size, resize=size)
        data_classes = 10
    else:
        if task.data is None:
            raise DataError("ImageNet's images are needed: --task.data FOLDER with train/ and val/ of class folders")
        train, validation = images.ImageFolder(task.data / "train"), images.ImageFolder(task.data / "val")
        transform, data_classes = Evaluate(size), len(train.classes)
        if train.classes != validation.classes:
            raise DataError(f"{task.data}: train/ and val/ have different class folders; they must have the same names")
    if data_classes != classes:
        raise DataError(
            f"the data has {data_classes} classes, the model {classes}; set --task.model.classes {data_classes}"
        )
    return train, validation, transform
