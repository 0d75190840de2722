"""Runs on a page: what is compared, how it is summarised, and that large input stays small."""

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from test_page import EVIL, opened

from steadynorm import records
from steadynorm.records import Recorder, RecordError, Run
from steadynorm.report import content as report
from steadynorm.report import page

LAYERS = ("blocks.0.qkv", "blocks.0.mlp", EVIL)


def in_memory(name="run", steps=100, columns=None, layers=None, config=None, path=None):
    at = np.arange(steps)
    columns = {"loss": 1 / (1 + at)} if columns is None else columns
    return Run(name, config or {}, "2025-01-02T03:04:05+00:00", path, at, columns, layers or {}, total=steps)


def recorded(folder, name, steps=60, **config):
    """Write a run with everything the report knows, some of it rare."""
    rng = np.random.default_rng(0)
    with Recorder(folder / "records.jsonl", name=name, config={"seed": 1, "model": {"width": 64}} | config) as out:
        for step in range(steps):
            plain = {key: abs(math.sin(step)) + 1 for key in records.QUANTITIES if not key.startswith(("val", "lr"))}
            rare = {"val_loss": 3 - step / 100, "val_accuracy": 0.5} if step % 20 == 19 else {}
            layer = {"norm": 1.1, "forecast": 1.0, "excess": -0.1 + rng.normal(0, 0.01), "spectral": 2.0}
            layers = {"layers": dict.fromkeys(LAYERS, layer)} if step % 5 == 0 else {}
            own = {"lr/hidden": 0.01, "lr/head": 0.2, "my/own": step, EVIL: step, "broken": math.nan}
            out.write({"step": step, **plain, **rare, **layers, **own})
    return folder


@pytest.fixture
def made(monkeypatch):
    """Return what `report` passes to `page.write`, which is not called."""
    pages = []
    monkeypatch.setattr(page, "write", lambda made, path: pages.append((made, path)) or path)

    def make(*args, **kwargs):
        report.report(*args, **kwargs)
        return pages[-1][0]

    make.pages = pages
    return make


def titles(made, kind):
    return [block.title for block in made.blocks if isinstance(block, kind)]


def table(made, title):
    return next(block for block in made.blocks if isinstance(block, page.Table) and block.title == title)


# What is on the page


def test_every_column_has_its_plot_and_nothing_else(made, tmp_path):
    shown = made([recorded(tmp_path / "a", "a"), recorded(tmp_path / "b", "b")], tmp_path)
    sections = titles(shown, page.Text)
    assert sections == [
        "What the figures say",
        "Summary",
        "Loss",
        "Norms",
        "Alignment",
        "Updates",
        "Schedules",
        "Layer norms",
        "Layer alignment",
        "Configuration",
        "More",
    ]
    plots = titles(shown, page.Plot)
    assert plots[:9] == [
        "Training loss",
        "Validation loss",
        "Validation accuracy",
        "Weight norm",
        "Gradient norm",
        "Spectral norm",
        "Sign norm",
        "Bias norm",
        "Embedding norm",
    ]
    assert {"Alignment", "Excess alignment", "Effective learning rate", "Weight decay"} < set(plots)
    assert {"Learning rate · head", "Learning rate · hidden"} < set(plots)
    assert plots[plots.index("Target norm squared") + 1 :] == [
        "Time",
        "Tokens",
        "my/own",
        EVIL,
    ]  # "broken" has no value
    assert len(plots) == len(set(plots))
    heat = [block for block in shown.blocks if isinstance(block, page.HeatMap)]
    assert [(each.toggle, each.middle) for each in heat] == [("a", 1.0), ("b", 1.0), ("a", 0.0), ("b", 0.0)]
    assert list(heat[0].y) == list(LAYERS)
    np.testing.assert_allclose(heat[0].z, 1.1)
    assert heat[0].x.tolist() == list(range(0, 60, 5))  # where layers were recorded
    assert heat[2].low < -0.1 < 0 < heat[2].high == -heat[2].low


def test_the_forecast_is_dashed_beside_the_measured_norm(made, tmp_path):
    shown = made(recorded(tmp_path, "a"), tmp_path)
    plot = next(block for block in shown.blocks if block.title == "Weight norm")
    assert [(each.name, each.style, each.toggle) for each in plot.series] == [
        ("measured", "line", "a"),
        ("forecast", "dash", "a"),
        ("forecast, updates measured", "dash", "a"),
    ]


def test_rare_values_are_drawn_without_gaps(made, tmp_path):
    shown = made(recorded(tmp_path, "a"), tmp_path)
    (series,) = next(block for block in shown.blocks if block.title == "Validation loss").series
    assert series.x.tolist() == [19, 39, 59]


def test_the_summary_is_worded_as_expected(made):
    at = np.arange(1001)
    columns = {
        "loss": np.where(at >= 950, 2.0, 9.0),
        "val_loss": np.where(at == 600, 1.5, np.where(at % 100 == 0, 4.0 - at / 500, np.nan)),
        "weight_norm": np.where(at > 900, 3.0, 2.0),
        "forecast_norm": np.full(1001, 2.5),
        "grad_norm": np.where(at > 900, 0.5, 2.0),
        "seconds": at * 0.25,
    }
    shown = made([in_memory("full", 1001, columns), in_memory("bare", 1001)], "unused")
    summary = table(shown, "")
    row = dict(zip(summary.header, summary.rows[0], strict=True))
    assert row == {
        "run": "full",
        "last step": 1000,
        "training loss": 2.0,
        "best validation loss": 1.5,
        "final validation loss": 2.0,
        "weight norm, end": 3.0,
        "weight norm, end / middle": 1.5,
        "measured / forecast": 1.2,
        "gradient norm, end": 0.5,
        "gradient end / middle": 0.25,
        "steps / s": 4.0,
    }
    assert summary.rows[1][3:] == [None] * 8


def constant(**values):
    return {key: np.full(100, value) for key, value in values.items()}


OLD_LAYERS = {
    "h.fc": constant(norm=3.0, forecast=3.0, spectral=1.0),
    "h.out": constant(norm=4.0, forecast=4.0, spectral=1.0),
    "head": constant(norm=12.0, forecast=5.0),
    "norm": constant(norm=2.0, forecast=2.0),
}
BY_ROLE = {
    f"{key}/{role}": np.full(100, value)
    for role, measured, forecast in (("vectors", 2.0, 2.0), ("output", 12.0, 4.0), ("hidden", 5.0, 5.0))
    for key, value in (("weight_norm", measured), ("forecast_norm", forecast))
}


def test_the_weight_norm_is_led_by_the_hidden_matrices_and_compared_with_the_forecast_by_role(made):
    """The output layer is pushed outward: with it, a run that is as forecast showed measured / forecast 1.5."""
    shown = made(in_memory(columns=constant(weight_norm=13.2, forecast_norm=6.7) | BY_ROLE), "unused")
    norms = [title for title in titles(shown, page.Plot) if title.startswith("Weight norm")]
    assert norms == [f"Weight norm · {each}" for each in ("hidden matrices", "output layer", "vectors")] + [
        "Weight norm"
    ]
    first = next(block for block in shown.blocks if isinstance(block, page.Plot))
    assert [(each.name, each.style, float(each.y[-1])) for each in first.series] == [
        ("measured", "line", 5.0),
        ("forecast", "dash", 5.0),
    ]
    row = dict(zip(table(shown, "").header, table(shown, "").rows[0], strict=True))
    assert {key: value for key, value in row.items() if "forecast" in key} == {
        "measured / forecast, hidden": 1.0,
        "measured / forecast, output": 3.0,
        "measured / forecast, vectors": 1.0,
    }
    assert row["hidden norm, end"] == 5.0


def test_records_without_roles_are_split_by_their_layers(made):
    old = in_memory("old", columns=constant(weight_norm=13.2, forecast_norm=6.7), layers=OLD_LAYERS)
    new = in_memory("new", columns=constant(weight_norm=13.2, forecast_norm=6.7) | BY_ROLE)
    shown = made([old, new], "unused")
    summary = table(shown, "")
    before, after = (dict(zip(summary.header, row, strict=True)) for row in summary.rows)
    assert before["measured / forecast, hidden"] == after["measured / forecast, hidden"] == 1.0
    assert before["measured / forecast, other"] == pytest.approx(math.hypot(12, 2) / math.hypot(5, 2))
    assert (before["measured / forecast, output"], after["measured / forecast, other"]) == (None, None)
    assert len(next(block for block in shown.blocks if isinstance(block, page.Plot)).series) == 4


def test_heat_maps_of_runs_have_their_rows_in_one_order(made):
    """Records of earlier versions are in the order of the optimizer's groups."""
    names = ["embed", "h.2.fc", "h.10.fc", "head"]
    runs = [
        in_memory(f"run {k}", layers={name: constant(norm=1.0, forecast=1.0) for name in order})
        for k, order in enumerate((names[::-1], [names[1], names[0], names[3], names[2]]))
    ]
    heat = [block for block in made(runs, "unused").blocks if isinstance(block, page.HeatMap)]
    assert [list(each.y) for each in heat] == [names, names]
    one = made(in_memory(layers={name: constant(norm=1.0, forecast=1.0) for name in names[::-1]}), "unused")
    assert list(next(block for block in one.blocks if isinstance(block, page.HeatMap)).y) == names[::-1]


def test_a_diverged_run_has_no_final_loss(made):
    loss = np.where(np.arange(100) < 50, 1.0, np.nan)
    row = table(made(in_memory(columns={"loss": loss}), "unused"), "").rows[0]
    assert row == ["run", 99]


def test_the_configuration_shows_differences_and_folds_the_rest(made):
    configs = [{"lr": 0.1, "model": {"width": 64}, "note": "x"}, {"lr": 0.2, "model": {"width": 64}, "decay": None}]
    shown = made([in_memory(str(i), config=each) for i, each in enumerate(configs)], "unused")
    assert table(shown, "What differs").rows == [["lr", "0.1", "0.2"], ["note", "x", None], ["decay", None, "null"]]
    folded = table(shown, "1 setting the same in all runs")
    assert folded.folded
    assert folded.rows == [["model.width", "64"]]
    many = [in_memory(str(i), config={"lr": i, "seed": 1}) for i in range(9)]
    assert table(made(many, "unused"), "What differs").rows[3] == ["3", "3"]  # one row a run


def test_equal_run_names_are_made_unique():
    def names(*runs):
        return [run.name for run in report.unique_names(runs)]

    def at(path):
        return in_memory("x", path=Path(path))

    assert names(at("/a/one/records.jsonl"), at("/a/two/records.jsonl")) == ["x (one)", "x (two)"]
    assert names(at("/a/r.jsonl"), at("/b/r.jsonl"), in_memory("y")) == ["x (r)", "x (r) #2", "y"]
    assert names(in_memory("x"), in_memory("x"), in_memory("x #2")) == ["x", "x #2", "x #2 #2"]
    assert names(in_memory(" ")) == ["run"]


def test_the_downloads_hold_what_is_drawn(made, tmp_path):
    shown = made([recorded(tmp_path / "a", 'a, "quoted"'), recorded(tmp_path / "b", "b")], tmp_path)
    held = json.loads(shown.downloads["runs.json"], parse_constant=pytest.fail)
    assert [run["name"] for run in held["runs"]] == ['a, "quoted"', "b"]
    assert held["runs"][0]["config"]["model"] == {"width": 64}
    rows = list(csv.DictReader(io.StringIO(shown.downloads["runs.csv"])))
    assert len(rows) == 120
    assert (rows[0]["run"], rows[19]["step"], rows[19]["val_loss"], rows[18]["val_loss"]) == (
        'a, "quoted"',
        "19",
        "2.81",
        "",
    )
    assert [row["my/own"] for row in rows[:3]] == ["0.0", "1.0", "2.0"]
    layers = list(csv.DictReader(io.StringIO(shown.downloads["layers.csv"])))
    assert len(layers) == 2 * 3 * 12
    assert layers[-1] | {"excess": ""} == {
        "run": "b",
        "layer": EVIL,
        "step": "55",
        "norm": "1.1",
        "forecast": "1.0",
        "excess": "",
        "spectral": "2.0",
    }
    assert "layers.csv" not in made(in_memory(), tmp_path).downloads


def test_the_title_and_the_place_of_a_report_can_be_chosen(made, tmp_path):
    assert made([in_memory("a"), in_memory("b")], tmp_path / "p.html").title == "a · b"
    assert made([in_memory(str(i)) for i in range(5)], tmp_path).title == "5 runs"
    assert made(in_memory("a"), tmp_path, title="Mine").title == "Mine"
    assert [path for _, path in made.pages] == [tmp_path / "p.html", tmp_path, tmp_path]
    assert made.pages[0][0].subtitle == "2 runs · up to step 99 · recorded 2025-01-02"


def test_a_page_replaces_pages_and_nothing_else(tmp_path):
    records_file = recorded(tmp_path / "run", "a", steps=3) / records.FILE
    before = records_file.read_bytes()
    with pytest.raises(ValueError, match=r"records\.jsonl: not a page, and would be overwritten"):
        report.report(tmp_path / "run", records_file)
    assert records_file.read_bytes() == before
    (tmp_path / "new.html").touch()
    for _ in range(2):
        assert report.report(tmp_path / "run", tmp_path / "new.html") == tmp_path / "new.html"
    assert report.report(tmp_path / "run", tmp_path) == tmp_path / "report.html"


# Bad and large input


def test_no_runs_and_bad_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no runs given; pass"):
        report.report([], tmp_path / "p.html")
    with pytest.raises(RecordError, match="no such record file"):
        report.report([tmp_path / "nowhere"], tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


def test_a_run_without_steps_and_a_torn_run_are_reported(made, tmp_path):
    Recorder(tmp_path / "none" / "records.jsonl", name="none", config={}).close()
    torn = recorded(tmp_path / "torn", "torn") / "records.jsonl"
    torn.write_bytes(torn.read_bytes()[:-9])
    shown = made([tmp_path / "none", torn], tmp_path)
    summary = table(shown, "")
    assert [row[:2] for row in summary.rows] == [["none", None], ["torn", 58]]
    assert "left out: torn." in summary.caption
    assert made(tmp_path / "none", tmp_path).subtitle.startswith("1 run · no steps yet")


def test_a_layer_without_forecast_or_with_a_zero_forecast_is_shown(made):
    layers = {
        "plain": {"norm": np.ones(100)},
        "zero": {"norm": np.ones(100), "forecast": np.arange(100.0)},
        "null": {"norm": np.ones(100), "forecast": np.full(100, np.nan)},
    }
    (heat,) = [each for each in made(in_memory(layers=layers), "unused").blocks if isinstance(each, page.HeatMap)]
    assert list(heat.y) == ["zero"]
    assert np.isnan(heat.z[0, 0])


def test_a_large_input_is_thinned(made):
    million = made(in_memory(steps=1_000_000), "unused")
    (series,) = next(block for block in million.blocks if isinstance(block, page.Plot)).series
    assert (len(series.x), series.x[0], series.x[-1]) == (2000, 0, 999_999)
    assert "from 2,000 of 1,000,000 records" in table(million, "").caption
    columns = {f"own {i}": np.ones(1000) for i in range(50)}
    layers = {f"layer {i}": {"norm": np.ones(1000), "forecast": np.ones(1000)} for i in range(40)}
    many = made([in_memory(f"run {i}", 1000, columns, layers) for i in range(60)], "unused")
    drawn = sum(len(each.y) for block in many.blocks if isinstance(block, page.Plot) for each in block.series)
    cells = sum(block.z.size for block in many.blocks if isinstance(block, page.HeatMap))
    assert 100_000 < drawn <= 500_000
    assert "from 60,000 of 60,000 records, drawn from 9,960 " in table(many, "").caption
    assert 10_000 < cells <= 200_000


# In Chromium


def test_the_report_works_in_chromium(browser, tmp_path):
    out = report.report([recorded(tmp_path / "a", "a", lr=1), recorded(tmp_path / "b", EVIL, lr=2)], tmp_path)
    assert out == tmp_path / "report.html"
    with opened(browser, out) as view:
        assert view.draw_all() == 29
        assert view.tab.locator(".chip").nth(1).inner_text() == EVIL
        assert view.tab.locator("tbody td").nth(0).inner_text() == "a"
        traces = sum(view.drawn("p.querySelectorAll('.scatterlayer .trace').length"))
        view.tab.locator(".chip").nth(1).click()
        assert view.draw_all() == 27
        assert sum(view.drawn("p.querySelectorAll('.scatterlayer .trace').length")) == traces / 2
        view.tab.locator("#log").click()
        view.draw_all()
        assert view.drawn("p.layout.yaxis.type").count("log") > 10
        assert len(json.loads(view.save("runs.json"))["runs"]) == 2
        assert view.save("layers.csv").startswith("run,layer,step,norm,")
        view.tab.set_viewport_size({"width": 375, "height": 700})
        assert view.overflow() == 0
        narrow = "[...document.querySelectorAll('figure:not([hidden]) .main-svg')].every(svg => svg.clientWidth <= 375)"
        view.until(narrow)


@pytest.mark.slow
def test_a_page_of_two_hundred_runs_opens(browser, tmp_path):
    at = np.arange(2000)
    keys = ("loss", "weight_norm", "forecast_norm", "grad_norm", "alignment", "lr", "alpha", "weight_decay")
    layers = {f"layer {i}": {"norm": 1 + at / 2000, "forecast": 1 + at / 2001} for i in range(6)}
    runs = [
        in_memory(f"run {i}", 2000, {key: np.exp(-at / (300 + i)) + n for n, key in enumerate(keys)}, layers, {"lr": i})
        for i in range(200)
    ]
    out = report.report(runs, tmp_path / "many.html")
    assert out.stat().st_size < 20e6
    with opened(browser, out) as view:
        view.tab.locator("figure").first.scroll_into_view_if_needed()
        view.until("document.querySelector('.plot').querySelectorAll('.scatterlayer .trace').length === 200")
        view.tab.locator(".filter").fill("run 19")
        assert view.tab.locator(".chip:visible").count() == 11
        view.tab.locator("[data-every='']").click()
        view.until("document.querySelector('.plot').querySelectorAll('.scatterlayer .trace').length === 189")
        assert view.overflow() == 0
