"""Tasks: the model, its data, the loss of a batch and the evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from steadynorm.lab.data import datasets, images, shards
from steadynorm.lab.data.augment import Augment, Evaluate, generator_for, mixup, normalize
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.encoders import BYTE_VOCAB
from steadynorm.lab.data.token_loader import TokenLoader
from steadynorm.lab.data.tokenize import sotu_shards
from steadynorm.lab.models import GPT, SimpleViT
from steadynorm.lab.train.config import Config, Gpt, Vit
from steadynorm.lab.train.token_rows import row_norms, visit_chances

Batch = tuple[Tensor, Tensor]


class Task(ABC):
    """Model and data of one process of a run.

    Attributes:
        loader: Training data; its `state_dict` is the position.
        tokens: Tokens or images per step, over all processes.
        bare: The model as it was built, which DDP, FSDP and torch.compile may have wrapped since.
    """

    loader: Any
    tokens: int
    bare: Any

    def __init__(self, config: Config, rank: int, world: int):
        self.config, self.rank, self.world = config, rank, world

    def model(self, generator: torch.Generator) -> nn.Module:
        """Return a newly initialized model."""
        task = self.config.task
        model = GPT(task.model) if isinstance(task, Gpt) else SimpleViT(task.model)
        model.init_weights(generator)
        self.bare = model
        return model

    def batches(self) -> Iterator[Batch]:
        """Iterate over this process's share of every batch, starting at the position."""
        return iter(self.loader)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """Return sums over this process's share: `count`, and quantities to be divided by it."""

    def _validation_batch(self) -> int:
        return (self.config.micro_batch or self.config.batch // self.world) * self.world


def make(config: Config, rank: int = 0, world: int = 1) -> Task:
    """Return the task of a configuration."""
    return (GptTask if isinstance(config.task, Gpt) else VitTask)(config, rank, world)


class GptTask(Task):
    """Next-token prediction on shards."""

    def __init__(self, config: Config, rank: int, world: int):
        assert isinstance(config.task, Gpt)
        super().__init__(config, rank, world)
        task = self.task = config.task
        if task.length > task.model.context:
            raise ValueError(f"length={task.length} exceeds the model's context={task.model.context}")
        if task.data is None and task.tokenizer == "bytes" and task.model.vocab != BYTE_VOCAB:
            raise ValueError(
                f"this recipe has a vocabulary of {task.model.vocab} tokens and needs its data: pass --task.data "
                f"SHARDS (see steadynorm data --help); the embedded text is bytes, {BYTE_VOCAB} tokens"
            )
        folder = sotu_shards(task.tokenizer) if task.data is None else task.data
        train, validation = (shards.shard_paths(folder, split) for split in ("train", "val"))
        self.chances = None if task.model.tied else visit_chances(train, task.model.vocab, config.batch * task.length)
        self.tokens = config.batch * task.length
        common: dict[str, Any] = {
            "length": task.length, "rank": rank, "world": world, "vocab": task.model.vocab,
            "checksums": shards.shard_checksums(folder),
        }  # fmt: skip
        self.loader = TokenLoader(train, batch=config.batch, shuffle=config.seed if task.shuffle else None, **common)
        self.validation = TokenLoader(validation, batch=self._validation_batch(), repeat=False, **common)
        self.validation.first(task.eval_tokens)  # if that is too few, raise now and not at the first evaluation

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        total, count = torch.zeros((), dtype=torch.float64, device=device), 0
        for inputs, targets in self.validation.first(self.task.eval_tokens):
            total += model(inputs.to(device), targets.to(device)).double() * targets.numel()
            count += targets.numel()
        sums = {"count": torch.tensor(float(count), dtype=torch.float64, device=device), "val_loss": total}
        if self.chances is not None:
            weight = self.bare.embedding.weight
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            sums |= {key: value * sums["count"] for key, value in row_norms(weight, self.chances).items()}
        return sums


class VitTask(Task):
    """Image classification."""

    def __init__(self, config: Config, rank: int, world: int):
        assert isinstance(config.task, Vit)
        super().__init__(config, rank, world)
        task = self.task = config.task
        train, self.validation, self.transform = _image_data(task)
        augment = Augment(
            task.model.image, task.crop_scale, randaugment_layers=task.randaugment, magnitude=task.magnitude
        )
        self.tokens = config.batch
        self.loader = images.ImageLoader(
            train, batch=config.batch, augment=augment, seed=config.seed, rank=rank, world=world,
            workers=task.workers, lead=task.mixup > 0 and world > 1,
        )  # fmt: skip

    def batches(self) -> Iterator[Batch]:
        classes, p, lead = self.task.model.classes, self.task.mixup, self.loader.lead
        for pictures, labels in self.loader:
            generator = generator_for("mixup", self.config.seed, self.loader.position // self.config.batch)
            yield mixup(normalize(pictures), labels, generator, classes=classes, p=p, lead=lead)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pictures, soft = batch
        return functional.cross_entropy(model(pictures).float(), soft)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        count, loss, correct = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        batches = images.validation_batches(
            self.validation, self._validation_batch(), self.transform, rank=self.rank, world=self.world,
            workers=self.task.workers, samples=self.task.eval_images,
        )  # fmt: skip
        for pictures, labels in batches:
            if not len(labels):  # FSDP2's all-gather needs every process, so this one evaluates a black image
                pictures = pictures.new_zeros(1, *pictures.shape[1:])
            logits, labels = model(normalize(pictures).to(device)).float()[: len(labels)], labels.to(device)
            count += len(labels)
            loss += functional.cross_entropy(logits, labels, reduction="sum").double()
            correct += (logits.argmax(1) == labels).sum()
        return {"count": count, "val_loss": loss, "val_accuracy": correct}


def _image_data(task: Vit) -> tuple[Any, Any, Evaluate]:
    """Return training images, validation images and the transform of the latter."""
    size = task.model.image
    if task.dataset == "cifar10":
        root = task.data or datasets.get("cifar10")
        train, validation = images.Cifar10(root), images.Cifar10(root, train=False)
        transform = Evaluate(size, resize=size)
    else:
        if task.data is None:
            raise DataError("ImageNet's images are needed: --task.data FOLDER with train/ and val/ of class folders")
        train, validation = images.ImageFolder(task.data / "train"), images.ImageFolder(task.data / "val")
        transform = Evaluate(size)
        if train.classes != validation.classes:
            raise DataError(f"{task.data}: train/ and val/ have different class folders; they must have the same names")
    if (classes := len(train.classes)) != task.model.classes:
        raise DataError(
            f"the data has {classes} classes, the model {task.model.classes}; set --task.model.classes {classes}"
        )
    return train, validation, transform
