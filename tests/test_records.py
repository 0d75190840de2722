"""Records: what is written is read back, and what a kill, another program or another version leaves is told apart."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import steadynorm as sn
from steadynorm import records
from steadynorm.monitor import Records
from steadynorm.records import Recorder, RecordError, read, reader
from steadynorm.records.sinks import to_folder
from steadynorm.report import content as report

CONFIG = {"lr": 0.1, "model": {"width": 64, "betas": (0.9, 0.95)}, "folder": Path("runs"), "clip": math.inf}
HEADER = {"schema": "steadynorm-run", "version": 1, "name": "run", "created": "2025-01-01T00:00:00+00:00", "config": {}}


def write(path, steps, **recorder):
    with Recorder(path, **({"name": "run", "config": CONFIG} | recorder)) as out:
        for step in steps:
            out.write({"step": step, "loss": 1 / (1 + step), "layers": {"qkv": {"norm": step / 2, "forecast": None}}})
    return path


def raw(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def test_records_survive_a_round_trip_by_file_and_by_folder(tmp_path):
    write(tmp_path / "records.jsonl", range(5), name='a "name" <b>')
    for run in (read(tmp_path), read(tmp_path / "records.jsonl"), read(str(tmp_path))):
        assert run.name == 'a "name" <b>'
        assert run.config == {"lr": 0.1, "model": {"width": 64, "betas": [0.9, 0.95]}, "folder": "runs", "clip": None}
        assert run.steps.dtype == np.int64
        assert run.steps.tolist() == [0, 1, 2, 3, 4]
        assert run.columns["loss"].tolist() == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
        assert run.layers["qkv"]["norm"].tolist() == [0, 0.5, 1, 1.5, 2]
        assert np.isnan(run.layers["qkv"]["forecast"]).all()
        assert (run.dropped, run.total) == (0, 5)
        assert run.created.startswith("20")


def test_non_finite_values_are_null_on_disk_and_nan_in_memory(tmp_path):
    path = tmp_path / "r.jsonl"
    with Recorder(path, name="run", config={}) as out:
        out.write({"step": 0, "a": math.nan, "b": np.float32("inf"), "c": 10**400, "d": np.int64(3), "e": np.True_})
        out.write({"step": np.int64(1), "a": 1})
    strict = json.loads(path.read_text(encoding="utf-8").splitlines()[1], parse_constant=pytest.fail)
    assert strict.pop("crc") >= 0
    assert strict == {"step": 0, "a": None, "b": None, "c": None, "d": 3, "e": 1}
    run = read(path)
    assert np.isnan(run.columns["a"][0])
    assert np.isnan(run.columns["d"][1])  # missing
    assert np.isnan(run.columns["c"]).all()


def test_keys_may_come_and_go(tmp_path):
    path = raw(tmp_path / "r", HEADER, {"step": 0, "loss": 1}, {"loss": 2, "step": 4, "val_loss": 3, "layers": None})
    run = read(path)
    assert run.columns["loss"].tolist() == [1, 2]
    assert np.isnan(run.columns["val_loss"][0])
    assert run.columns["val_loss"][1] == 3
    assert run.layers == {}


numbers = st.none() | st.integers(-(2**53), 2**53) | st.floats()
names = st.text(min_size=1).filter(lambda key: key not in ("step", "layers", "crc"))
lines = st.lists(
    st.tuples(st.dictionaries(names, numbers, max_size=3), st.dictionaries(names, st.dictionaries(names, numbers))),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(lines, st.text())
def test_any_names_and_numbers_come_back(tmp_path_factory, lines, name):
    path = tmp_path_factory.mktemp("any") / "r.jsonl"
    with Recorder(path, name=name, config={name: name}) as out:
        for step, (values, layers) in enumerate(lines):
            out.write({"step": 2 * step, **values, "layers": layers})
    run = read(path)
    assert (run.name, run.config) == (name, {name: name})
    assert run.steps.tolist() == [2 * step for step in range(len(lines))]

    def same(column, value):
        return np.isnan(column) if value is None or not math.isfinite(value) else column == value

    for row, (values, layers) in enumerate(lines):
        assert all(same(run.columns[key][row], value) for key, value in values.items())
        assert all(same(run.layers[a][b][row], value) for a, each in layers.items() for b, value in each.items())


# What a kill leaves


@pytest.mark.parametrize("cut", [1, 2, 10, 30, 60])
def test_a_torn_last_line_is_dropped_and_counted(tmp_path, cut):
    path = write(tmp_path / "r", range(4))
    path.write_bytes(path.read_bytes()[:-cut])
    run = read(path)
    kept = 4 if cut == 1 else 3  # without its newline the last line is still whole
    assert run.steps.tolist() == list(range(kept))
    assert run.dropped == 4 - kept


def test_torn_layers_that_end_in_a_brace_are_torn(tmp_path):
    path = raw(tmp_path / "r", HEADER, {"step": 0}, b'{"step": 1, "layers": {"a": {"norm": 1}')
    assert read(path).dropped == 1
    assert read(path, max_points=2).steps.tolist() == [0]


def test_zeros_left_by_a_power_cut_are_dropped(tmp_path):
    path = raw(tmp_path / "r", HEADER, {"step": 0}, b"\0" * 100_000)
    assert (read(path).steps.tolist(), read(path).dropped) == ([0], 1)


def test_a_file_with_only_a_header_is_a_run_without_steps(tmp_path):
    run = read(raw(tmp_path / "r", HEADER), max_points=10)
    assert (len(run.steps), run.columns, run.dropped) == (0, {}, 0)


WRITER = """
import sys
from steadynorm.records import Recorder
path, first = sys.argv[1:]
with Recorder(path, name="run", config={}, resume_at=int(first)) as out:
    for step in range(int(first), 10**9):
        out.write({"step": step, "loss": step / 3, "layers": {f"layer {i}": {"norm": i / 7} for i in range(50)}})
"""


def test_a_kill_while_writing_leaves_a_readable_file_that_resumes(tmp_path):
    path, first = tmp_path / "records.jsonl", 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first)])
        size = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 600
        while not path.exists() or path.stat().st_size < size + 300_000:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        run = read(path)
        assert run.steps.tolist() == list(range(len(run.steps)))
        assert run.columns["loss"][-1] == run.steps[-1] / 3
        assert len(run.steps) > first + 50
        first = len(run.steps) - 20  # a checkpoint a little before the kill


# Resuming


def test_resuming_drops_what_is_written_again(tmp_path):
    path = write(tmp_path / "r", range(10))
    header = path.read_bytes().splitlines()[0]
    path.write_bytes(path.read_bytes() + b'{"step": 10, "lo')
    write(path, range(6, 8), resume_at=6)
    run = read(path)
    assert run.steps.tolist() == list(range(8))
    assert run.dropped == 0
    assert path.read_bytes().splitlines()[0] == header
    write(path, [8], resume_at=100)  # nothing to drop
    assert read(path).steps.tolist() == list(range(9))
    assert os.listdir(tmp_path) == ["r"]  # noqa: PTH208


def test_resuming_completes_a_last_line_without_newline(tmp_path):
    path = write(tmp_path / "r", range(3))
    path.write_bytes(path.read_bytes()[:-1])
    write(path, [3], resume_at=3)
    assert read(path).steps.tolist() == [0, 1, 2, 3]


def test_resuming_without_records_starts_from_scratch(tmp_path):
    assert read(write(tmp_path / "new" / "r", [5], resume_at=5)).steps.tolist() == [5]
    (tmp_path / "empty").touch()
    assert read(write(tmp_path / "empty", [5], resume_at=5)).steps.tolist() == [5]


def test_an_interrupted_resume_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = write(tmp_path / "r", range(10))
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk is full"):
        write(path, [5], resume_at=5)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["r"]


def test_resuming_with_another_configuration_names_the_keys(tmp_path):
    path = write(tmp_path / "r", range(3))
    other = {"lr": 0.1, "model": {"width": 128, "betas": [0.9, 0.95]}, "folder": "runs", "clip": None, "seed": 1}
    with pytest.raises(RecordError, match=r"model\.width \(64 -> 128\), seed \('none' -> 1\); resume with the same"):
        write(path, [3], resume_at=3, config=other)
    assert read(path).steps.tolist() == [0, 1, 2]


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = write(tmp_path / "r", range(3))
    with pytest.raises(RecordError, match="resume_at"):
        write(path, range(3))
    assert read(path).steps.tolist() == [0, 1, 2]


def test_a_failed_write_leaves_no_torn_line_in_the_middle(tmp_path, monkeypatch):
    path, plain = tmp_path / "r", os.write
    with Recorder(path, name="run", config={}) as out:
        out.write({"step": 0})
        calls = []

        def nearly_full(file, data):
            calls.append(data)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            return plain(file, data[:5])

        monkeypatch.setattr(os, "write", nearly_full)
        with pytest.raises(OSError, match="disk is full"):
            out.write({"step": 1, "loss": 2})
        monkeypatch.undo()
        out.write({"step": 1, "loss": 3})
    assert read(path).columns["loss"].tolist()[1:] == [3]


# Bad input


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"loss": 1}, "step=None"),
        ({"step": 3, "loss": 1}, "step=3 after step 3"),
        ({"step": 4.0}, r"step=4\.0"),
        ({"step": True}, "step=True"),
        ({"step": 4, "loss": "low"}, "step 4: loss is a str"),
        ({"step": 4, "crc": 1}, "crc is the checksum of a line; give it another name"),
        ({"step": 4, "layers": {"a": {"norm": [1]}}}, r"layers\['a'\]\['norm'\] is a list"),
    ],
)
def test_a_bad_record_is_refused_and_nothing_written(tmp_path, record, message):
    path = tmp_path / "r"
    with Recorder(path, name="run", config={}) as out:
        out.write({"step": 3})
        size = path.stat().st_size
        with pytest.raises(RecordError, match=message):
            out.write(record)
        assert path.stat().st_size == size


def test_the_error_for_a_tensor_in_a_record_names_the_item(tmp_path):
    import torch

    with (
        Recorder(tmp_path / "r", name="run", config={}) as out,
        pytest.raises(RecordError, match=r"loss is a Tensor.*\.item\(\)"),
    ):
        out.write({"step": 0, "loss": torch.tensor(1.0)})


def test_a_closed_recorder_and_an_odd_configuration_are_refused(tmp_path):
    out = Recorder(tmp_path / "r", name="run", config={})
    out.close()
    out.close()
    with pytest.raises(RecordError, match="closed"):
        out.write({"step": 0})
    with pytest.raises(RecordError, match=r"config\.a\[1\]\.b is a set"):
        Recorder(tmp_path / "s", name="run", config={"a": [1, {"b": set()}]})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b""], "is empty"),
        ([b"\n\n"], "is empty"),
        ([b'{"schema": "steady'], "not a run record"),
        ([{"loss": 1}], "not a run record"),
        ([[1, 2]], "not a run record"),
        ([{"schema": "other", "version": 1}], "not a run record"),
        ([b"\x89PNG\r\n\x1a\n" + bytes(range(256))], "not a run record"),
        ([b"step,loss\n1,2\n"], "not a run record"),
        ([b"[" * 100_000], "not a run record"),
        ([HEADER | {"version": 2}], "version 2 is newer than 1.*update"),
        ([HEADER | {"version": "1"}], "line 1 is damaged"),
        ([HEADER | {"config": None}], "line 1 is damaged"),
        ([HEADER, {"step": 0}, b'{"step": 1, "lo\n', {"step": 2}], "line 3 is damaged.*head -n 2"),
        ([HEADER, {"step": 0}, b'{"step": 1, "lo}\n', {"step": 2}], "line 3 is damaged"),
        ([HEADER, {"step": 0}, [], {"step": 2}], "line 3 is damaged"),
        ([HEADER, {"step": -1}, {"step": 2}], "line 2 is damaged"),
        ([HEADER, {"loss": 0}, {"step": 2}], "line 2 is damaged"),
        ([HEADER, {"step": 1}, {"step": 1}], "line 3: step 1 after step 1"),
        ([HEADER, {"step": 1}, {"loss": 2, "step": 0}], "line 3: step 0 after step 1"),
        ([HEADER, {"step": 1, "loss": "low"}], "line 2: loss is 'low'"),
        ([HEADER, {"step": 1, "loss": True}], "line 2: loss is True"),
        ([HEADER, {"step": 1, "layers": [1]}], "line 2: layers: "),
        ([HEADER, {"step": 1, "layers": {"a": 1}}], "line 2: a: 1 is not a mapping"),
    ],
)
def test_the_error_for_a_bad_file_says_where_and_what_and_names_the_remedy(tmp_path, lines, message):
    path = raw(tmp_path / "r.jsonl", *lines)
    with pytest.raises(RecordError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert ";" in str(error.value)


def test_missing_and_unreadable_files_are_errors(tmp_path):
    with pytest.raises(RecordError, match="nowhere: no such record file"):
        read(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"records\.jsonl: no such record file"):
        read(tmp_path)
    write(tmp_path / "experiment" / "records" / "arm" / "records.jsonl", [0])
    with pytest.raises(RecordError, match=r"not a run but an experiment; pass its runs: .*experiment/records/\*"):
        read(tmp_path / "experiment")
    with pytest.raises(RecordError, match="cannot be read"):
        read(write(tmp_path / "r", [0]) / "below")


# Thinning


def long_file(path, steps):
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(HEADER) + "\n")
        for step in range(steps):
            rare = f', "val_loss": {step}' if step % 1000 == 137 else ""
            file.write(f'{{"step": {step}, "loss": {step / 10}, "grad_norm": 0.5, "lr": 0.001{rare}}}\n')
    return path


def check_thinned(path, steps):
    run = read(path, max_points=2000)
    assert run.total == steps
    assert len(run.steps) == 2000
    assert (run.steps[0], run.steps[-1]) == (0, steps - 1)
    assert (run.columns["loss"] == run.steps / 10).all()
    assert np.diff(run.steps).max() < 3 * steps / 1000
    assert np.isfinite(run.columns["val_loss"]).sum() >= min(999, steps // 1000)  # the rare lines survive


def test_a_long_run_is_thinned_and_keeps_rare_lines(tmp_path):
    check_thinned(long_file(tmp_path / "r", 100_000), 100_000)


@pytest.mark.slow
def test_a_million_steps_are_thinned(tmp_path):
    check_thinned(long_file(tmp_path / "r", 1_000_000), 1_000_000)


def test_a_file_with_a_torn_end_and_blank_lines_can_be_thinned(tmp_path):
    body = [{"step": step, "loss": step} for step in range(50)]
    path = raw(tmp_path / "r", HEADER, *body[:20], b"\n", *body[20:], b'{"step": 50, "loss": 5')
    run = read(path, max_points=10)
    assert (run.steps[0], run.steps[-1], len(run.steps), run.dropped) == (0, 49, 10, 1)
    assert (run.columns["loss"] == run.steps).all()


def test_thinning_in_memory_equals_thinning_while_reading(tmp_path):
    path = long_file(tmp_path / "r", 5000)
    a, b = read(path, max_points=100), records.thin(read(path), 100)
    assert a.steps.tolist() == b.steps.tolist()
    np.testing.assert_array_equal(a.columns["val_loss"], b.columns["val_loss"])
    assert records.thin(b, 100) is b


def test_many_kinds_of_lines_keep_within_the_bound():
    kinds = np.random.default_rng(0).integers(0, 500, 10_000)
    assert len(reader._choose(kinds, 50)) <= 50
    with pytest.raises(ValueError, match="at least 2"):
        reader._choose(kinds, 1)


def test_well_known_keys_are_described():
    assert all(each.label and each.description.endswith(".") for each in records.QUANTITIES.values())


def test_a_recorder_reopens_only_the_file_that_it_left(tmp_path):
    """It does not copy what is there; a file that another has replaced, cut or extended is copied with resume_at."""
    path = tmp_path / "records.jsonl"
    recorder = records.Recorder(path, name="x", config={})
    assert not recorder.reopen()  # it is open
    recorder.write({"step": 1})
    recorder.close()
    inode = path.stat().st_ino
    assert recorder.reopen()
    recorder.write({"step": 2})
    recorder.close()
    assert path.stat().st_ino == inode
    assert records.read(path).steps.tolist() == [1, 2]
    with path.open("ab") as file:
        file.write(b'{"step": 3')  # torn by a kill
    assert not recorder.reopen()
    with records.Recorder(path, name="x", config={}, resume_at=3) as other:
        other.write({"step": 3})
    assert not recorder.reopen()
    path.unlink()
    assert not recorder.reopen()


def resumed(*steps, **values):
    found = Records({"step": step, "lr": 0.1 * step} | values for step in steps)
    found.resumed = True
    return found


def test_a_folder_is_appended_to_and_copied_only_when_steps_come_again(tmp_path):
    """A copy at every call took time quadratic in a run's length."""
    sink, path, inodes = to_folder(tmp_path), tmp_path / "records.jsonl", []
    for steps in ((1, 2), (3, 4), (5,), (4,), (5, 6)):
        sink(resumed(*steps))
        inodes.append(path.stat().st_ino)
    assert len(set(inodes[:3])) == 1 and inodes[3] == inodes[4]
    assert records.read(tmp_path).steps.tolist() == [1, 2, 3, 4, 5, 6]
    to_folder(tmp_path)(resumed(3))  # another one cuts the file: the first sees that
    sink(resumed(7))
    assert records.read(tmp_path).steps.tolist() == [1, 2, 3, 7]


def watched(every=1):
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = sn.ScionC([p], lmo="spectral")
    monitor = sn.Monitor(optimizer, every=every)

    def run(steps):
        for _ in range(steps):
            p.grad = torch.ones(4, 4)
            optimizer.step()
        return monitor.measure()

    return monitor, run


@pytest.mark.parametrize("every", [1, 40])
def test_a_finished_run_is_not_overwritten_by_another(tmp_path, every):
    """README's loop, run again into the same folder, once made 51 records of 101 under the first run's header."""
    to_folder(tmp_path, config={"lr": 1})(watched()[1](30))
    before = (tmp_path / "records.jsonl").read_bytes()
    _, run = watched(every)
    for config in ({"lr": 1}, {"lr": 2}):
        with pytest.raises(RecordError, match=re.escape(str(tmp_path)) + r": holds a run of 30 steps.*load_state_dict"):
            to_folder(tmp_path, config=config)(run(40))
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_resumed_run_continues_in_its_folder_if_the_configuration_is_the_same(tmp_path):
    monitor, run = watched()
    for _ in range(2):  # a sink made for each call is the same run
        to_folder(tmp_path, config={"lr": 1})(run(10))
    state = monitor.state_dict()
    to_folder(tmp_path, config={"lr": 1})(run(10))
    again, run = watched()
    again.load_state_dict(state)
    continued = run(10)
    with pytest.raises(RecordError, match=r"lr \(1 -> 2\)"):
        to_folder(tmp_path, config={"lr": 2})(continued)
    to_folder(tmp_path, config={"lr": 1})(continued)
    assert records.read(tmp_path).steps.tolist() == list(range(1, 31))


@pytest.mark.parametrize(("layers", "every", "most"), [(100, 1, 700), (100, 7, 500), (20, 1, 180), (None, 10, 2000)])
def test_layers_are_kept_ever_more_rarely_and_everything_else_always(tmp_path, layers, every, most):
    sink = to_folder(tmp_path, layers=layers)
    for start in range(every, 20_001, 50 * every):
        steps = range(start, min(start + 50 * every, 20_001), every)
        sink([{"step": step, "loss": 1.0, "layers": {"fc": {"norm": 1.0}}} for step in steps])
    run = records.read(tmp_path)
    assert len(run.steps) == 20_000 // every and np.isfinite(run.columns["loss"]).all()
    kept = run.steps[np.isfinite(run.layers["fc"]["norm"])]
    assert most / 2 < len(kept) <= most
    if layers is not None:
        assert (np.diff(kept) <= np.maximum(kept[1:] / layers, 1) + every).all() and kept[-1] > 20_000 * (
            1 - 2 / layers
        )


def test_a_resumed_recorder_keeps_the_layers_of_the_same_steps(tmp_path):
    """The file decides which steps keep them, wherever the run was killed."""

    def write(path, steps, **more):
        with records.Recorder(path, name="x", config={}, layers=10, created="now", **more) as recorder:
            for step in steps:
                recorder.write({"step": step, 'a, "layers": {': 1.0, "layers": {"fc": {"norm": step}}})

    write(tmp_path / "whole", range(1, 201))
    whole = (tmp_path / "whole").read_bytes()
    assert whole.count(b'"norm"') < 60
    for killed, saved in ((25, 20), (27, 27), (150, 101)):
        path = tmp_path / str(killed)
        write(path, range(1, killed + 1))
        write(path, range(saved + 1, 201), resume_at=saved + 1)
        assert path.read_bytes() == whole
    with pytest.raises(RecordError, match="layers=0 must be a whole number"):
        records.Recorder(tmp_path / "none", name="x", config={}, layers=0)


@pytest.mark.slow
def test_records_and_page_of_a_long_run_of_many_layers_stay_small(tmp_path):
    """A monitor of 144 layers once wrote 619 MB in 20,000 steps."""
    rng = np.random.default_rng(0)
    quantities = ("norm", "forecast", "grad", "alignment", "expected", "excess", "spectral")
    names = [f"transformer.h.{k // 12}.part{k % 12}.weight" for k in range(144)]
    layers = [
        {name: dict(zip(quantities, row, strict=True)) for name, row in zip(names, rows, strict=True)}
        for rows in rng.normal(1, 0.1, size=(50, 144, 7)).tolist()
    ]
    sink = to_folder(tmp_path)
    for start in range(1, 20_001, 50):
        columns = rng.normal(size=(50, 40)).tolist()
        sink(
            [
                {"step": start + k, **{f"column{j}": x for j, x in enumerate(columns[k])}, "layers": layers[k]}
                for k in range(50)
            ]
        )
    assert (tmp_path / "records.jsonl").stat().st_size < 60e6
    assert report.report(tmp_path, tmp_path / "page.html").stat().st_size < 6e6


def test_every_key_of_a_record_is_described_once_and_the_page_says_the_same():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    optimizer = sn.ScionC(sn.param_groups(model, output="2"))
    monitor = sn.Monitor(optimizer, model)
    model(torch.arange(4)).square().sum().backward()
    optimizer.step()
    [record] = monitor.measure()
    keys = {key.partition("/")[0] for key in record} - {"step", "layers"}
    assert keys == records.QUANTITIES.keys() - {"loss", "val_loss", "val_accuracy", "seconds", "tokens"}
    for layer in record["layers"].values():
        assert layer.keys() == records.LAYER_QUANTITIES.keys()
    page = Path(__file__).parents[1].joinpath("docs/monitor.md").read_text(encoding="utf-8")
    for key in keys:
        description = records.QUANTITIES[key].description.replace("|", r"\|")
        assert f"| `{key}` | {description} |" in page
    assert ", ".join(f"`{key}`" for key in [*records.LAYER_QUANTITIES][:-1]) in page


def test_a_folder_of_runs_is_answered_with_the_runs_in_it(tmp_path: Path):
    for name in ("b", "a run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / records.FILE).touch()
    with pytest.raises(RecordError, match=r"not a run but a folder of 2 runs; pass the runs in it: '.*/a run' .*/b$"):
        records.read(tmp_path)
