"""Data sets and their errors; the stream is the same for any number of workers and ranks, and resumes exactly."""

import io
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from steadynorm.lab.data.augment import Augment, Evaluate
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.images import (
    Cifar10,
    ImageFolder,
    ImageLoader,
    InMemory,
    _permutation,
    read_rgb,
    validation_batches,
)

FORK_ON_ONE_CORE = "ignore:This DataLoader will create"


def jpeg(path, image: Image.Image | None = None, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.new("RGB", (40, 30), (200, 100, 50))).save(path, **options)


def numbered(count: int = 10, side: int = 12) -> InMemory:
    """Return a data set in which sample i has label i and its own pixels."""
    images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return InMemory(images, range(count), classes=[str(i) for i in range(count)])


def take(loader: ImageLoader, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(loader, count))


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, second, strict=True)
    )


# --- class folders


def test_a_folder_sorts_classes_and_files(tmp_path):
    for name in ("zebra/b.JPEG", "zebra/a.jpg", "ant/x.png", "ant/.hidden.jpg", ".git/y.jpg"):
        jpeg(tmp_path / name)
    (tmp_path / "zebra" / "notes.txt").write_text("no image", encoding="utf-8")
    (tmp_path / "readme.txt").write_text("no folder", encoding="utf-8")
    data = ImageFolder(tmp_path)
    assert data.classes == ("ant", "zebra")
    assert data.labels.tolist() == [0, 1, 1]
    assert [data.path(i).name for i in range(3)] == ["x.png", "a.jpg", "b.JPEG"]
    image, label = data[2]
    assert (image.size, image.mode, label) == ((40, 30), "RGB", 1)


def test_a_folder_keeps_names_that_are_not_ascii(tmp_path):
    jpeg(tmp_path / "größe" / "bild ü.jpg")
    assert ImageFolder(tmp_path).path(0) == tmp_path / "größe" / "bild ü.jpg"
    assert ImageFolder(tmp_path)[0][1] == 0


def test_errors_about_a_folder_name_it(tmp_path):
    with pytest.raises(DataError, match="missing: no such folder"):
        ImageFolder(tmp_path / "missing")
    with pytest.raises(DataError, match=r"no class folders.*<class>"):
        ImageFolder(tmp_path)
    jpeg(tmp_path / "full" / "a.jpg")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match=r"hollow: no image .*fill it or remove it"):
        ImageFolder(tmp_path)


# --- files


def test_a_truncated_jpeg_is_an_error_that_names_it(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8))
    jpeg(tmp_path / "c" / "cut.jpg", noise)
    whole = (tmp_path / "c" / "cut.jpg").read_bytes()
    (tmp_path / "c" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jpg: not readable .*truncated.*restore it"):
        ImageFolder(tmp_path)[0]


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\xff\xd8\xff\xe0\x00\x10JFIF"])
def test_a_file_that_is_not_an_image_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "odd.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"odd\.jpg: not readable"):
        read_rgb(tmp_path / "odd.jpg")


@pytest.mark.parametrize(
    ("image", "form", "expected"),
    [
        (Image.new("L", (4, 4), 90), "JPEG", (90, 90, 90)),
        (Image.new("1", (4, 4), 1), "PNG", (255, 255, 255)),
        (Image.new("RGB", (4, 4), (10, 200, 30)).quantize(4), "PNG", (10, 200, 30)),
        (Image.new("RGBA", (4, 4), (10, 20, 30, 0)), "PNG", (255, 255, 255)),  # transparent: the white below it
        (Image.new("RGBA", (4, 4), (10, 20, 30, 255)), "PNG", (10, 20, 30)),
        (Image.new("LA", (4, 4), (80, 255)), "PNG", (80, 80, 80)),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (Image.fromarray(np.full((4, 4), 0x4321, np.uint16)), "PNG", (0x43, 0x43, 0x43)),
    ],
    ids=["grey", "bits", "palette", "clear", "opaque", "grey-alpha", "cmyk", "16-bit"],
)
def test_images_of_other_modes_become_rgb(tmp_path, image, form, expected):
    image.save(tmp_path / "x", form)
    found = read_rgb(tmp_path / "x")
    assert found.mode == "RGB"
    assert np.abs(np.asarray(found).astype(int) - expected).max() <= 2


def test_a_palette_with_transparency_by_entry_needs_no_warning(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 250, 10, 10])
    image.save(tmp_path / "p.png", transparency=bytes([0, 255]))
    assert read_rgb(tmp_path / "p.png").getpixel((0, 0)) == (250, 10, 10)


def test_an_unknown_range_is_refused(tmp_path):
    Image.new("F", (4, 4), 0.5).save(tmp_path / "f.tiff")
    with pytest.raises(DataError, match=r"f\.tiff.*mode F"):
        read_rgb(tmp_path / "f.tiff")


# --- CIFAR-10


def records() -> np.ndarray:
    made = np.zeros((10_000, 3073), np.uint8)
    made[:, 0] = np.arange(10_000) % 10
    made[7, 1 : 1 + 1024] = 11  # red
    made[7, 1 + 1024 + 34] = 99  # green, row 1, column 2
    return made


def test_a_cifar_file_holds_the_label_and_then_the_channels_row_by_row(tmp_path):
    records().tofile(tmp_path / "test_batch.bin")
    data = Cifar10(tmp_path, train=False)
    image, label = data[7]
    assert (len(data), label, data.classes[label]) == (10_000, 7, "horse")
    assert image.getpixel((2, 1)) == (11, 99, 0)
    assert image.getpixel((1, 2)) == (11, 0, 0)


def test_errors_about_cifar_name_the_file_and_the_remedy(tmp_path):
    with pytest.raises(DataError, match=r"data_batch_1\.bin: no such file; `steadynorm data get cifar10`"):
        Cifar10(tmp_path)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"test_batch\.bin: 3073 bytes, expected 30730000"):
        Cifar10(tmp_path, train=False)
    made = records()
    made[123, 0] = 10
    made.tofile(path)
    with pytest.raises(DataError, match=r"record 123 has label 10, expected 0 to 9"):
        Cifar10(tmp_path, train=False)


def test_in_memory_arrays_are_checked():
    with pytest.raises(DataError, match="expected uint8"):
        InMemory(np.zeros((2, 3, 8, 8), np.uint8), [0, 1], "ab")
    with pytest.raises(DataError, match="3 labels"):
        InMemory(np.zeros((2, 8, 8, 3), np.uint8), [0, 1, 1], "ab")


# --- the stream


def loader(data=None, **settings) -> ImageLoader:
    return ImageLoader(data or numbered(), **{"batch": 4, "augment": Augment(8), "seed": 5, **settings})


def test_epochs_follow_each_other_without_a_gap():
    labels = torch.cat([labels for _, labels in take(loader(), 10)]).tolist()  # 40 samples: four epochs of ten
    epochs = [labels[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_a_batch_may_be_larger_than_the_data():
    _, labels = next(iter(loader(batch=24)))
    assert sorted(Counter(labels.tolist()).values()) == [2] * 6 + [3] * 4


def test_batches_are_uint8_with_channels_first():
    images, labels = next(iter(loader()))
    assert (images.shape, images.dtype, images.is_contiguous()) == ((4, 3, 8, 8), torch.uint8, True)
    assert (labels.shape, labels.dtype) == ((4,), torch.int64)
    data, plain = numbered(side=8), Evaluate(8, resize=8)
    image, label = next(validation_batches(data, 1, plain))
    assert np.array_equal(image[0].permute(1, 2, 0).numpy(), data.images[label.item()])


def test_only_the_seed_and_the_epoch_change_the_augmentation():
    first = take(loader(), 5)
    assert same(first, take(loader(), 5))
    assert not same(first, take(loader(seed=6), 5))
    by_label = [dict(zip(labels.tolist(), images, strict=True)) for images, labels in take(loader(batch=10), 2)]
    assert sum(torch.equal(by_label[0][i], by_label[1][i]) for i in range(10)) <= 2  # a grey one by chance
    rebatched = take(loader(batch=2), 10)
    assert torch.equal(torch.cat([x for x, _ in first]), torch.cat([x for x, _ in rebatched]))


@pytest.mark.filterwarnings(FORK_ON_ONE_CORE)
def test_workers_make_the_same_batches_as_the_main_process():
    expected = take(loader(), 6)
    stream = iter(loader(workers=2))
    found = [next(stream) for _ in range(6)]
    assert same(found, expected)
    children = multiprocessing.active_children()
    assert len(children) == 2
    assert all(os.getpgid(child.pid) == child.pid for child in children)  # Ctrl-C does not reach them
    stream.close()
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings(FORK_ON_ONE_CORE)
def test_sigterm_to_every_process_of_a_job_leaves_the_workers_working():
    """The main process saves a checkpoint on it, and may evaluate before."""
    stream = iter(loader(workers=2))
    found = [next(stream) for _ in range(4)]
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGTERM)
    found += [next(stream) for _ in range(8)]
    assert same(found, take(loader(), 12))
    stream.close()
    assert not multiprocessing.active_children()


def test_an_error_nobody_catches_ends_a_program_with_workers():
    """They ignore the SIGTERM by which multiprocessing would end them."""
    script = (
        "import numpy as np; from steadynorm.lab.data.augment import Augment\n"
        "from steadynorm.lab.data.images import ImageLoader, InMemory\n"
        "data = InMemory(np.zeros((6, 8, 8, 3), np.uint8), range(6), classes='abcdef')\n"
        "stream = iter(ImageLoader(data, batch=4, augment=Augment(8), seed=1, workers=1)); next(stream)\n"
        "raise TypeError('uncaught')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("TypeError: uncaught\n")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batch_of_one(world):
    expected = take(loader(batch=8), 4)
    parts = [take(loader(batch=8, rank=rank, world=world), 4) for rank in range(world)]
    joined = [tuple(torch.cat(each) for each in zip(*step, strict=True)) for step in zip(*parts, strict=True)]
    assert same(joined, expected)


def test_the_lead_is_the_sample_before_the_part():
    whole = take(loader(batch=8), 3)
    for rank in range(2):
        own = [i % 8 for i in range(4 * rank - 1, 4 * rank + 4)]
        led = take(loader(batch=8, rank=rank, world=2, lead=True), 3)
        assert same(led, [(images[own], labels[own]) for images, labels in whole])


@pytest.mark.filterwarnings(FORK_ON_ONE_CORE)
@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_is_exact_and_prepared_batches_do_not_count(workers):
    unbroken = take(loader(), 9)
    broken = loader(workers=workers)
    first = take(broken, 4)
    state = pickle.loads(pickle.dumps(broken.state_dict()))
    assert state == {"position": 16, "seed": 5, "samples": 10}
    resumed = loader()
    resumed.load_state_dict(state)
    assert same(first + take(resumed, 5), unbroken)
    assert same(take(broken, 2), unbroken[4:6])  # a new iterator goes on, too


def test_resuming_far_into_the_data_replays_nothing():
    class Counting:
        reads = 0

        def __len__(self):
            return 10

        def __getitem__(self, index):
            Counting.reads += 1
            return Image.new("RGB", (8, 8)), index

    far = loader(Counting())
    far.load_state_dict({"position": 10**9, "seed": 5, "samples": 10})
    next(iter(far))
    assert Counting.reads == 4


def test_a_stream_leaves_global_random_numbers_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    take(loader(), 3)
    list(validation_batches(numbered(), 4, Evaluate(8)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_the_state_of_another_run_is_refused():
    for state, name in (({"seed": 1, "samples": 10}, "seed=1"), ({"seed": 5, "samples": 11}, "samples=11")):
        with pytest.raises(ValueError, match=name):
            loader().load_state_dict({"position": 0, **state})


@pytest.mark.parametrize(
    "settings", [{"batch": 0}, {"batch": 5, "world": 2}, {"rank": 2, "world": 2}, {"rank": -1}, {"seed": -1}]
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValueError, match="="):
        loader(**settings)


@pytest.mark.filterwarnings(FORK_ON_ONE_CORE)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_stops_the_stream_with_its_name(tmp_path, workers):
    jpeg(tmp_path / "c" / "good.jpg")
    (tmp_path / "c" / "bad.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(DataError, match=r"bad\.jpg: not readable"):
        take(loader(ImageFolder(tmp_path), workers=workers), 3)
    assert not multiprocessing.active_children()


def test_what_workers_receive_is_small_when_pickled(tmp_path):
    for i in range(20):
        jpeg(tmp_path / "c" / f"{i:05d}.jpg")
    data = ImageFolder(tmp_path)
    copy = pickle.loads(pickle.dumps(data))
    assert [copy.path(i) for i in range(20)] == [data.path(i) for i in range(20)]
    assert same(take(loader(copy), 2), take(loader(data), 2))
    assert data._names.nbytes == 20 * len("00000.jpg")


# --- validation


@pytest.mark.parametrize(("batch", "world"), [(4, 1), (4, 2), (3, 2), (8, 4), (16, 4), (9, 4)])
def test_validation_sees_every_sample_once_in_equally_many_batches_on_every_rank(batch, world):
    parts = [list(validation_batches(numbered(), batch, Evaluate(8), rank=r, world=world)) for r in range(world)]
    assert {len(part) for part in parts} == {-(-10 // batch)}
    joined = torch.cat([labels for step in zip(*parts, strict=True) for _, labels in step])
    assert joined.tolist() == list(range(10))
    assert all(images.shape[1:] == (3, 8, 8) for part in parts for images, _ in part)


@pytest.mark.filterwarnings(FORK_ON_ONE_CORE)
def test_validation_with_and_without_a_worker_agree():
    alone = list(validation_batches(numbered(), 4, Evaluate(8)))
    assert same(alone, list(validation_batches(numbered(), 4, Evaluate(8), workers=1)))
    assert [len(labels) for _, labels in alone] == [4, 4, 2]


def test_an_empty_data_set_is_an_error():
    empty = InMemory(np.zeros((0, 8, 8, 3), np.uint8), [], "a")
    with pytest.raises(DataError, match="no samples"):
        next(validation_batches(empty, 4, Evaluate(8)))


def test_the_full_size_pipeline_reads_jpegs(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8))
    for name in ("a/1.JPEG", "b/2.JPEG"):
        jpeg(tmp_path / name, noise, quality=80)
    images, labels = next(iter(loader(ImageFolder(tmp_path), augment=Augment(224), batch=2)))
    assert images.shape == (2, 3, 224, 224)
    assert sorted(labels.tolist()) == [0, 1]
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG", quality=80)
    whole, _ = next(validation_batches(ImageFolder(tmp_path), 2, Evaluate(224)))
    expected = np.asarray(Evaluate(224)(Image.open(buffer)))
    assert np.array_equal(whole[0].permute(1, 2, 0).numpy(), expected)


def test_the_order_is_that_of_philoxs_raw_stream():
    """numpy may change Generator.permutation, but not these numbers: otherwise a resumed run would see other images."""
    assert _permutation(3, 1, 8).tolist() == [7, 0, 4, 5, 1, 2, 6, 3]
    assert sorted(_permutation(0, 5, 1000).tolist()) == list(range(1000))


def test_validation_of_the_first_samples_does_not_depend_on_the_batch():
    for batch in (2, 4, 7):
        seen = torch.cat([labels for _, labels in validation_batches(numbered(), batch, Evaluate(8), samples=7)])
        assert seen.tolist() == list(range(7))
    with pytest.raises(ValueError, match="samples=0 must be at least 1"):
        next(validation_batches(numbered(), 4, Evaluate(8), samples=0))
