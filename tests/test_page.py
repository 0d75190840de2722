"""The page as a reader meets it: in Chromium, offline, with names that try to be markup."""

import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadynorm.report import page
from steadynorm.report.page import HeatMap, Page, Plot, Series, Table, Text, rendering

EVIL = "<script>alert(1)</script>"
X = np.arange(50)


class View:
    """An open page. `problems` must stay empty: console messages, errors, dialogs, requests for anything but the file."""

    def __init__(self, tab):
        self.tab, self.problems = tab, []
        tab.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        tab.on("request", lambda request: self._request(request.url))
        tab.on("dialog", lambda dialog: (self.problems.append("dialog"), dialog.dismiss()))

    def _request(self, url):
        if not url.startswith(("file:", "blob:", "data:")):
            self.problems.append(f"request: {url}")

    def draw_all(self):
        """Draw every plot that is not hidden, as printing does; return their number."""
        self.tab.evaluate("page.drawAll()")
        undrawn = self.tab.locator('figure:not([hidden]) .plot:not([data-drawn="1"])').count()
        empty = "[...document.querySelectorAll('figure:not([hidden]) .plot')].filter(p => !p.querySelector('.main-svg')).length"
        assert (undrawn, self.tab.evaluate(empty)) == (0, 0)
        return self.tab.locator("figure:not([hidden]) .plot").count()

    def hash(self, text):
        """Go to a state, as someone who edits the address does."""
        self.tab.evaluate(
            """text => new Promise(done => {
                const before = location.hash;
                addEventListener("hashchange", () => done(), { once: true });  // after the page's own listener
                location.hash = text;
                if (location.hash === before) done();
            })""",
            text,
        )

    def drawn(self, script):
        """Return what a script says of every plot's figure."""
        return self.tab.evaluate(f"[...document.querySelectorAll('.plot')].filter(p => p.data).map(p => {script})")

    def until(self, script):
        """Wait until a script says true; playwright's own way needs eval, which the page's policy refuses."""
        deadline = time.monotonic() + 120
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline, script
            self.tab.wait_for_timeout(20)

    def overflow(self):
        return self.tab.evaluate("document.documentElement.scrollWidth - innerWidth")

    def save(self, name):
        with self.tab.expect_download() as download:
            self.tab.locator(f'[data-save="{name}"]').click()
        assert download.value.suggested_filename == name
        return Path(download.value.path()).read_text(encoding="utf-8")


@contextmanager
def opened(browser, path, state="", **context):
    around = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | context))
    around.set_default_timeout(180_000)  # a busy machine is no failure
    view = View(around.new_page())
    view.tab.goto(f"{Path(path).as_uri()}{state}")
    view.tab.wait_for_selector('.plot[data-drawn="1"]')
    yield view
    around.close()
    assert view.problems == []


def example():
    wave = np.sin(X / 9)
    runs = ("run one", EVIL)
    both = [Series("measured", X, 2 + wave + i, toggle=run) for i, run in enumerate(runs)]
    both += [Series("forecast", X, 2.1 + wave + i, style="dash", toggle=run) for i, run in enumerate(runs)]
    gaps = np.where(X % 7 == 3, np.nan, wave)
    heat = [
        HeatMap(
            f"Layers {run}", "step", "ratio", X, [EVIL, "b & c", "%{x}"], 1 + np.outer([0.1, 0.2, 0], wave), toggle=run
        )
        for run in runs
    ]
    return Page(
        f"Title {EVIL}",
        f"Subtitle {EVIL}",
        [
            Text(f"Section {EVIL}", [f"Paragraph {EVIL}"]),
            Table(EVIL, ["run", "number", EVIL], [["run one", 2.9, EVIL], [EVIL, 10.0, None]], caption=EVIL),
            Plot("Norm", f"step {EVIL}", f"unit {EVIL}", both, caption=f"Caption {EVIL}"),
            Plot("Signed", "step", "", [Series("a", X, gaps, error=0.1 + 0 * X), Series(EVIL, X, -wave)], zero=True),
            Plot(
                "Points", "alpha", "", [Series("seen", [0.1, 0.2, 1], [1, 2, 3], [0.1, 0.2, 0.1], "points")], log_x=True
            ),
            Text("Far below"),
            Table("Folded", ["setting", "value"], [["lr", "0.1"]], folded=True),
            *heat,
        ],
        {"data.json": json.dumps({"name": EVIL, "π": [1, 2]}), "data.csv": "a,b\n1,ü\n"},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return page.write(example(), tmp_path_factory.mktemp("page") / "below" / "page.html")


@pytest.fixture(scope="module")
def shared(browser, path):
    with opened(browser, path) as view:
        yield view


@pytest.fixture
def view(shared):
    shared.hash("reset=1")
    return shared


# In Chromium


def test_everything_is_drawn_and_nothing_asked_of_the_network(view):
    assert view.draw_all() == 5
    assert view.drawn("p.querySelectorAll('.scatterlayer .trace').length") == [4, 3, 1, 0, 0]  # 3: a band is a trace
    assert view.drawn("p.querySelectorAll('.heatmaplayer image').length") == [0, 0, 0, 1, 1]
    assert view.tab.locator(".errorbars path").count() >= 3
    assert view.problems == []


def test_plots_are_drawn_when_they_come_into_view_or_are_printed(browser, path):
    with opened(browser, path, viewport={"width": 600, "height": 300}) as small:
        assert small.tab.locator('.heat .plot[data-drawn="1"]').count() == 0
        small.tab.locator(".heat").last.scroll_into_view_if_needed()
        small.tab.wait_for_selector('.heat .plot[data-drawn="1"]')
        small.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert small.tab.locator('.plot[data-drawn="1"]').count() == 5


def test_names_are_text_everywhere(view):
    view.draw_all()
    tab = view.tab
    assert tab.locator("h1").inner_text() == f"Title {EVIL}"
    assert tab.locator("h2").first.inner_text() == f"Section {EVIL}"
    assert tab.locator(".chip").nth(1).inner_text() == EVIL
    assert tab.locator("td").nth(2).inner_text() == EVIL
    assert f"Caption {EVIL}" in tab.locator("figure").first.inner_text()
    assert EVIL in tab.locator("figure").first.locator(".plot").text_content()  # the axis title, in SVG
    assert tab.evaluate("document.querySelectorAll('svg script, main script').length") == 0
    ticks = view.drawn("[...p.querySelectorAll('.ytick text')].map(t => t.textContent.trim())")[3]
    assert ticks == [EVIL, "b & c", "%{x}"]


def test_hovering_shows_the_values_of_all_runs(view):
    view.draw_all()
    view.tab.evaluate("scrollTo(0, 0)")
    view.tab.locator("figure").first.scroll_into_view_if_needed()
    box = view.tab.locator("figure .plot").first.bounding_box()
    view.tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    view.tab.wait_for_selector(".hoverlayer .legend text")
    text = view.tab.locator(".hoverlayer").first.text_content()
    assert f"{EVIL} · forecast : " in text
    assert "run one · measured : " in text
    values = [float(value) for value in re.findall(r" : (\d\.\d+)", text)]
    assert len(values) == 4
    assert values[3] - values[0] == pytest.approx(1.1, abs=1e-3)
    view.tab.mouse.move(5, 5)


def test_a_chip_hides_its_run_in_all_plots_and_rows(view):
    view.draw_all()
    chip = view.tab.locator(".chip").first
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert view.draw_all() == 4  # its heat map is gone
    assert view.drawn("p.querySelectorAll('.scatterlayer .trace').length")[:3] == [2, 3, 1]
    assert "off" in view.tab.locator("tr[data-run]").first.get_attribute("class")
    assert "hide=run+one" in view.tab.url
    chip.click()
    assert view.draw_all() == 5
    assert view.drawn("p.querySelectorAll('.scatterlayer .trace').length")[:3] == [4, 3, 1]
    chip.dblclick()  # this run alone
    pressed = [each.get_attribute("aria-pressed") for each in view.tab.locator(".chip").all()]
    assert pressed == ["true", "false"]


def test_the_log_scale_toggles_per_plot_and_for_all(view):
    view.draw_all()
    types = "p.layout.yaxis.type"
    assert view.drawn(types)[:3] == ["linear"] * 3
    assert view.tab.locator("figure .log").count() == 2  # what has negative values offers none
    view.tab.locator("figure .log").first.click()
    view.draw_all()
    assert view.drawn(types)[:3] == ["log", "linear", "linear"]
    view.tab.locator("#log").click()
    view.draw_all()
    assert view.drawn(types)[:3] == ["log", "linear", "log"]
    assert view.tab.locator("#log").get_attribute("aria-pressed") == "true"
    view.tab.locator("figure .log").first.click()
    view.draw_all()
    assert view.drawn(types)[:3] == ["linear", "linear", "log"]
    assert view.drawn("p.layout.xaxis.type")[2] == "log"


def test_a_zoom_is_shared_by_plots_of_one_axis(view):
    view.draw_all()
    view.hash("zoom.step=10,20")
    view.draw_all()
    assert view.drawn("p.layout.xaxis.autorange") == [True, False, True, False, False]
    low, high = view.drawn("p.layout.yaxis.range")[1]
    seen = [*np.sin(X / 9)[10:21], *-np.sin(X / 9)[10:21]]
    assert low < min(seen) < max(seen) < high < 1.3
    view.tab.locator("figure .plot").nth(1).scroll_into_view_if_needed()
    box = view.tab.locator("figure .plot").nth(1).bounding_box()
    for at, act in ((0.5, view.tab.mouse.down), (0.8, view.tab.mouse.up)):
        view.tab.mouse.move(box["x"] + box["width"] * at, box["y"] + 60, steps=4)
        act()
    view.until("!location.hash.includes('10%2C20') && location.hash.includes('zoom.step')")
    view.tab.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 60)
    view.until("!location.hash.includes('zoom')")
    view.draw_all()
    assert all(view.drawn("p.layout.xaxis.autorange"))


def test_the_theme_follows_the_system_until_chosen(view):
    background, ink = "getComputedStyle(document.body).backgroundColor", "p.layout.font.color"
    light = view.tab.evaluate(background)
    view.tab.emulate_media(color_scheme="dark")
    view.tab.wait_for_selector("#theme[aria-pressed=true]")
    view.draw_all()
    dark, dark_ink = view.tab.evaluate(background), view.drawn(ink)[0]
    assert dark != light
    view.tab.locator("#theme").click()
    view.draw_all()
    assert "theme=light" in view.tab.url
    assert view.tab.evaluate(background) == light
    assert view.drawn(ink)[0] != dark_ink
    view.hash("")
    assert view.tab.evaluate(background) == dark
    view.tab.emulate_media(color_scheme="light")
    view.tab.wait_for_selector("#theme[aria-pressed=false]")


def test_the_address_restores_the_state(browser, view):
    view.tab.locator(".chip").nth(1).click()
    view.tab.locator("#theme").click()
    view.tab.locator("figure .log").first.click()
    view.tab.locator("figure .wide").first.click()
    view.hash(view.tab.evaluate("location.hash") + "&zoom.step=5,25")
    kept = """[[...document.querySelectorAll('button[aria-pressed]')].map(b => b.getAttribute('aria-pressed')),
              document.documentElement.dataset.theme, [...page.state.zoom], document.querySelectorAll('.spread').length]"""
    before = view.tab.evaluate(kept)
    assert before[1:] == ["dark", [["step", [5, 25]]], 1]
    view.tab.reload()
    view.tab.wait_for_selector('.plot[data-drawn="1"]')
    assert view.tab.evaluate(kept) == before
    view.draw_all()
    assert view.drawn("p.layout.yaxis.type")[0] == "log"
    view.hash("theme=odd&hide=nobody&log.nothing=1&zoom.step=a,b&wide=none&%%%")  # a mangled address
    assert view.tab.evaluate("document.querySelectorAll('.chip[aria-pressed=true]').length") == 2


def test_the_downloads_are_what_was_passed(view):
    assert {name: view.save(name) for name in example().downloads} == example().downloads


def test_a_table_sorts_by_number(view):
    first = "document.querySelector('tbody td').textContent"
    heading = view.tab.locator("th button").nth(1)
    heading.click()
    assert view.tab.evaluate(first) == "run one"  # 2.9 before 10
    heading.click()
    assert view.tab.evaluate(first) == EVIL
    assert view.tab.locator("th").nth(1).get_attribute("aria-sort") == "descending"


def test_a_phone_has_no_sideways_scroll(browser, path):
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    with opened(browser, path, **phone) as view:
        view.draw_all()
        assert view.overflow() == 0
        assert (
            view.tab.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth))") <= 375
        )


PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def crowded_phone(browser, tmp_path_factory):
    """Open, on a phone, a page of eight runs with long names, two of them alike, and a table too wide for any phone."""
    x = np.arange(50)
    runs = [f"a run with quite a long name {k}" for k in range(8)]
    series = [page.Series("loss", x, x * max(k, 1), toggle=run) for k, run in enumerate(runs)]
    table = page.Table("", ["run", *(f"setting number {k}" for k in range(12))], [[run, *range(12)] for run in runs])
    blocks = [page.Text("Summary"), table, page.Plot("Loss", "step", "", series)]
    path = page.write(page.Page("Crowded", "", blocks), tmp_path_factory.mktemp("crowded") / "crowded.html")
    with opened(browser, path, **PHONE) as view:
        yield view


@pytest.fixture
def crowded(crowded_phone):
    crowded_phone.hash("reset=1")
    return crowded_phone


def test_every_chip_can_be_reached_on_a_phone(crowded):
    """The strip once had a third of the width, beside the buttons."""
    assert crowded.tab.evaluate("document.querySelector('.chips').clientWidth") > 350
    for chip in crowded.tab.locator(".chip").all():
        chip.tap()
        assert chip.get_attribute("aria-pressed") == "false"
    assert crowded.overflow() == 0


def test_wide_tables_scroll_on_a_phone_and_keep_their_first_column(crowded):
    box = "document.querySelector('.scroll')"
    assert crowded.tab.evaluate(f"{box}.scrollWidth - {box}.clientWidth") > 100
    crowded.tab.evaluate(f"{box}.scrollLeft = 10000")
    name, last = (
        crowded.tab.locator(f"tbody tr:first-child td:{which}-child").bounding_box() for which in ("first", "last")
    )
    assert name is not None and last is not None
    assert name["x"] >= 0 and name["width"] < 200 < last["x"] and last["x"] + last["width"] <= 390
    assert crowded.overflow() == 0


def test_a_line_under_another_is_drawn_wider(crowded):
    crowded.draw_all()
    first, second, *rest = crowded.drawn("p.data.map(t => t.line.width)")[0]
    assert first > second + 2 and set(rest) == {second}


def test_only_our_scripts_may_run(view):
    inject = "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); }"
    view.tab.evaluate(inject)
    assert view.tab.evaluate("window.ran") is None
    assert view.tab.evaluate("fetch('https://example.invalid/').then(() => 'sent', () => 'refused')") == "refused"
    told, view.problems[:] = view.problems[:], []
    assert len(told) >= 2
    assert all("Content Security Policy" in each for each in told)  # and no request


# Without a browser


@pytest.fixture
def light(monkeypatch):
    """Write pages without plotly.js, which are quick to make and to search."""
    monkeypatch.setattr(rendering, "_plotly", lambda: "")


def parts(text):
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return json.loads(data[1]), data[1]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(["</script>", "<!--", "]]>", "\u2028", "&lt;", '"onload="', "\ud800"]))
def test_any_name_is_data_and_never_markup(name):
    series = [Series(name, X, X, toggle=name), Series("plain", X, X)]
    heat = HeatMap(name, name, name, [1], [name], [[1]], caption=name, toggle=name)
    table = Table(name, [name], [[name]], caption=name)
    made = Page(name, name, [Text(name, [name]), Plot(name, name, name, series, name), heat, table], {name: name})
    plain = rendering._plotly
    rendering._plotly = lambda: ""
    try:
        text = page.render(made)
    finally:
        rendering._plotly = plain
    data, raw = parts(text)
    assert not set(raw) & set("<>&\u2028\u2029")
    assert data["plots"][0]["title"] == name
    assert text.lower().count("<script") == 5
    assert text.lower().count("</script") == 5
    text.encode("utf-8", "replace")


def test_shared_x_is_stored_once_and_values_have_six_digits(light):
    y = [math.pi, math.nan, math.inf, 1e-9, 123456789.0]
    series = [Series("a", range(5), y), Series("b", range(5), y), Series("c", [0, 1, math.nan, 3, 4], y)]
    data, _ = parts(page.render(Page("t", "", [Plot("p", "x", "y", series), Plot("p", "x", "y", [])])))
    assert data["x"] == [[0, 1, 2, 3, 4], [0, 1, 3, 4]]
    assert data["plots"][0]["series"][0]["y"] == [3.14159, None, None, 1e-9, 123457000.0]
    assert data["plots"][0]["series"][2]["y"] == [3.14159, None, 1e-9, 123457000.0]
    assert [each["id"] for each in data["plots"]] == ["p", "p-2"]


def keys(*series):
    text = page.render(Page("t", "", [Plot("p", "x", "y", series)]))
    found = re.findall(r'<span><svg[^>]*>.*?(?:stroke|fill)="(.*?)".*?</svg>(.*?)</span>', text)
    return [(name, colour) for colour, name in found]


def test_keys_are_neutral_for_what_runs_share_and_coloured_for_the_rest(light):
    a, b = Series("measured", X, X, toggle="a"), Series("measured", X, X, toggle="b")
    forecast = Series("forecast", X, X, style="dash", toggle="b")
    assert keys(a, b, forecast) == [("measured", "currentColor"), ("forecast", "var(--c1)")]
    assert keys(a, b) == []  # one thing: the chips say it all
    assert keys(Series("a", X, X, toggle="a"), Series("b", X, X, toggle="b")) == []
    assert keys(a, Series("own", X, X), Series("dots", X, X, style="points")) == [
        ("measured", "var(--c0)"),
        ("own", "var(--c1)"),
        ("dots", "var(--c2)"),
    ]


def test_the_page_is_written_whole_or_not_at_all(light, tmp_path, monkeypatch):
    mask = os.umask(0o022)
    out = page.write(Page("old", "", []), tmp_path / "p.html")
    os.umask(mask)
    before = out.read_bytes()
    assert out.stat().st_mode & 0o777 == 0o644  # others may read it
    with pytest.raises(ValueError, match="style='wavy'"):
        page.write(Page("new", "", [Plot("p", "x", "y", [Series("s", [1], [1], style="wavy")])]), out)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="disk is full"):
        page.write(Page("new", "", []), out)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Plot("p", "x", "y", [Series("s", [1, 2], [1])]), r"plot 'p', series 's': x \(2,\), y \(1,\) differ"),
        (Plot("p", "x", "y", [Series("s", [1], [1], error=[1, 2])]), r"error \(2,\) differ"),
        (Plot("p", "x", "y", [Series("s", ["a"], [1])]), "pass numbers"),  # pyright: ignore
        (HeatMap("h", "x", "y", [1, 2], ["a"], [[1]]), r"heat map 'h': z has shape \(1, 1\)"),
        (Table("t", ["a", "b"], [["c"]]), "table 't': a row has 1 cells under 2"),
    ],
)
def test_blocks_that_do_not_fit_are_named(light, block, message):
    with pytest.raises(ValueError, match=message):
        page.render(Page("t", "", [block]))


def test_missing_plotly_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"checkout of steadynorm: pip install -e '\.\[report\]'"):
        page.render(Page("t", "", []))


def test_a_script_end_inside_code_is_broken_up():
    assert rendering._script("a = '</SCRIPT>' // <!-- \r\n") == "a = '<\\/SCRIPT>' // <\\!-- \n"


def test_the_contrast_is_sufficient_in_both_themes():
    css = files("steadynorm.report.page").joinpath("page.css").read_text("utf-8")

    def luminance(colour):
        part = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in part)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    for block in re.findall(r":root[^{]*\{(.*?)\}", css, re.DOTALL):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for ground in ("page", "card", "press"):
            assert contrast(colours["text"], colours[ground]) > 7
            assert contrast(colours["muted"], colours[ground]) > 4.5
        assert min(contrast(colours[f"c{i}"], colours["card"]) for i in range(8)) > 2.99
