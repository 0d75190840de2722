"""Names of runs, layers and metrics are foreign input: in a report or a saved table they are only text."""

import base64
import csv
import io
import json
import re
from pathlib import Path

import pytest
from test_page import opened

from steadynorm.records import Recorder
from steadynorm.report import content as report
from steadynorm.report import page
from steadynorm.report.page import rendering

PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "</title><img src=x onerror=alert(3)>",
    '"><svg onload=alert(4)>',
    "' onmouseover='alert(5)' x='",
    "<img src=https://example.invalid/a.png>",
    "<link rel=stylesheet href=//example.invalid/a.css>",
    "<iframe src=https://example.invalid/></iframe>",
    '<a href="javascript:alert(6)">%{x}</a>',
    "<!--<script>alert(7)//",
    "]]><script>alert(8)</script>",
    "${alert(9)} {{alert(9)}}",
    "\u2028alert(10)\u2029",
    '=HYPERLINK("https://example.invalid")',
    "../../etc/passwd",
    "a\x00b\x1b[31m\u202e",
    "__proto__",
    "constructor",
)


RUNS = 6


def hostile_run(folder: Path, number: int) -> Path:
    """Write a run with names that try to be markup, code or formulas, wherever a name can stand."""
    name = " ".join(PAYLOADS[number::RUNS])
    nested = {text: {text: text} for text in PAYLOADS}
    with Recorder(
        folder / f"run{number}" / "records.jsonl", name=name, config={"n": number, name: name, "all": nested}
    ) as out:
        for step in range(1, 30):
            values = dict.fromkeys(PAYLOADS, step / 3)
            layers = {text: {"norm": 1 + step / 9, "forecast": 1.0} for text in PAYLOADS}
            out.write({"step": step, "loss": 1 / step, **values, "layers": layers})
    return folder / f"run{number}"


def test_hostile_names_do_nothing_in_a_browser(browser, tmp_path: Path):
    """`opened` fails for a dialog, an error, a line on the console, or a request for anything but the file."""
    runs = [hostile_run(tmp_path, number) for number in range(RUNS)]
    out = report.report(runs, tmp_path / "report.html", title="".join(PAYLOADS))
    bad = "".join(PAYLOADS[:6]).replace(" ", "%20").replace("<", "%3C")
    state = f"#theme={bad}&hide={bad}&zoom.step=1,2&wide={bad}"
    tall = {"width": 1280, "height": 5000}  # plots are drawn when they are seen
    with opened(browser, out, state=state, viewport=tall, offline=True) as view:
        view.draw_all()
        for chip in range(3):
            view.tab.locator(".chip").nth(chip).click()
        box = view.tab.locator(".plot").first.bounding_box()
        view.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        view.tab.wait_for_timeout(300)
        assert (
            view.tab.locator(
                "iframe, svg[onload], [onerror], [onmouseover], a[href^=javascript], link[rel=stylesheet]"
            ).count()
            == 0
        )
        assert view.tab.locator(".chip").count() == RUNS
        assert view.tab.locator("img").count() == 0


def test_hostile_names_are_escaped_in_the_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendering, "_plotly", lambda: "")
    runs = [hostile_run(tmp_path, number) for number in range(RUNS)]
    text = report.report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    scripts = len(re.findall(r"<script", text, re.IGNORECASE))
    assert scripts == len(re.findall(r"</script>", text, re.IGNORECASE)) == 7  # ours, the data, three files to save
    for payload in PAYLOADS:
        assert "<" not in payload or payload not in text
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert not set("<>&") & set(data)
    assert json.loads(data)["toggles"][0] == " ".join(PAYLOADS[::RUNS]).strip()


def test_the_page_allows_no_script_but_its_own_and_no_connection(tmp_path: Path):
    text = page.write(page.Page("t", "", []), tmp_path / "p.html").read_text(encoding="utf-8")
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)">', text)
    rules = {words[0]: words[1:] for words in (rule.split() for rule in policy.split(";"))}
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert all(re.fullmatch(r"'sha256-[\w+/=]+'", each) for each in rules["script-src"])
    assert all(len(base64.b64decode(each[8:-1])) == 32 for each in rules["script-src"])


def test_a_saved_table_holds_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(report.page, "write", lambda page, path: made.append(page))
    names = ['=HYPERLINK("https://example.invalid")', "+1+1", "-2", "@SUM(1)", "\t=1"]
    for number, name in enumerate(names):
        with Recorder(tmp_path / str(number) / "records.jsonl", name=f"{name}{number}", config={}) as out:
            out.write({"step": 1, "loss": -0.5, name: 1.0, "layers": {name: {"norm": -1.0, "forecast": 1.0}}})
    report.report([tmp_path / str(number) for number in range(len(names))], tmp_path / "p.html")
    for file in ("runs.csv", "layers.csv"):
        for row in csv.reader(io.StringIO(made[0].downloads[file])):
            for cell in row:
                assert not cell.startswith(("=", "+", "@", "\t"))
                assert not cell.startswith("-") or float(cell) < 0  # a number may be below zero
