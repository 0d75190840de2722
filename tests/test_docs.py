"""The documentation as readers meet it: code that runs, links that lead somewhere, pages that fetch nothing."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from alike import text_difference
from torch import nn

import steadynorm as sn
from steadynorm.cli import main
from steadynorm.lab.train.config import Optim
from steadynorm.lab.train.recipes import GPT_124M, GPT_DESK

ROOT = Path(__file__).parents[1]
WIDTHS = {"desktop": 1280, "phone": 390}
FIRST = ["index.html", "theory/index.html", "transformers/index.html", "api/optimizers/index.html"]  # the rest is slow


# --- code

BLOCK = re.compile(r"(?P<note><!-- not run: .+? -->\n+)?```python\n(?P<code>.*?)```", re.S)
VALUE = re.compile(r"(?P<expression>[\w.]+\(.*\)(?:\[.*?\])?)\s+# (?P<value>-?\d+(?:\.\d+)?)(?::.*)?")
SOURCES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md"))]


class Language(nn.Module):
    """The smallest stand-in for what the pages call `model`."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.up(self.embed(tokens)))

    def get_output_embeddings(self):
        return self.lm_head


def blocks(path: Path) -> list[str]:
    """Return the Python blocks of a page that are to run. test_examples.py runs what it includes from examples/."""
    return [match["code"] for match in BLOCK.finditer(path.read_text(encoding="utf-8")) if match["note"] is None]


@pytest.mark.parametrize("path", [path for path in SOURCES if blocks(path)], ids=lambda path: path.stem)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(path, tmp_path, monkeypatch):
    """Run all blocks one after the other with a small `model`; `expression  # number` is compared."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Language()
    tokens = torch.randint(8, (4, 3))
    names = {
        "sn": sn, "torch": torch, "model": model,
        "compute_loss": lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
    }  # fmt: skip
    for code in blocks(path):
        exec(compile(code, str(path), "exec"), names)
        for line in code.splitlines():
            if (match := VALUE.fullmatch(line)) is not None:
                digits = len(match["value"].partition(".")[2])
                shown = pytest.approx(float(match["value"]), abs=0.51 * 10**-digits)
                assert eval(match["expression"], names) == shown, line


def test_the_table_of_the_predict_page_is_what_the_command_prints(capsys):
    page = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^steadynorm (predict --optimizer .+)$", page, re.M)
    assert main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = (ROOT / "docs" / "out" / "predict_adamw.txt").read_text(encoding="utf-8").rstrip().splitlines()
    assert not text_difference("\n".join(printed[: len(shown)]), "\n".join(shown)) and shown[-1].startswith("└")
    assert '--8<-- "docs/out/predict_adamw.txt"' in page


def test_the_readme_and_the_site_cite_the_paper_alike():
    """The entry and the link are in both and name the paper that CITATION.cff names."""
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    [identifier] = re.findall(r'"arXiv:([\d.]+)"', cited)
    entries = []
    for path in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        text = path.read_text(encoding="utf-8")
        entries.append(re.findall(r"```bibtex\n(.*?)```", text, re.S))
        assert f"https://arxiv.org/abs/{identifier}" in text
    assert entries[0] == entries[1] and len(entries[0]) == 1
    assert f"eprint        = {{{identifier}}}" in entries[0][0]
    for part in ("title: Correction of Decoupled Weight Decay", "family-names: Chou", "given-names: Jason Chuan-Chih"):
        assert part in cited and part.split(": ")[1] in entries[0][0]
    for path in ("mkdocs.yml", "pyproject.toml"):
        assert f"https://arxiv.org/abs/{identifier}" in (ROOT / path).read_text(encoding="utf-8")


def test_the_measured_times_in_the_readme_are_those_of_the_pages():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    figures = {
        "is 1.78 times as fast": ("benchmarks.md", "| MuonC, 4 steps | 2517.4 | 1.78x |"),
        "take 0.58 of": ("many-gpus.md", "| 2 | FSDP2 | 453 | 0.58 |"),
    }
    for quoted, (page, source) in figures.items():
        assert quoted in readme and source in (ROOT / "docs" / page).read_text(encoding="utf-8"), quoted


def test_the_correct_page_shows_several_seeds_and_what_you_gain():
    page = (ROOT / "docs" / "correct.md").read_text(encoding="utf-8")
    printed = (ROOT / "docs" / "out" / "correct_adamw.txt").read_text(encoding="utf-8")
    assert "one seed" not in page and "<!-- gain -->" in page
    assert "3 seeds" in printed and printed.count("±") == 2


# --- the site


class PageRefs(HTMLParser):
    """Collect the links, loaded files and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := attributes.get(key))}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag == "link" and attributes.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(attributes["href"])
        elif tag in ("script", "img", "iframe") and attributes.get("src"):
            self.loads.append(attributes["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, PageRefs]:
    return {
        path: PageRefs(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"
    }


def test_no_link_is_dead_and_every_picture_is_there(site, pages):
    dead = []
    for path, found in pages.items():
        for target in found.links + found.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            to = to / "index.html" if to.is_dir() else to
            if not to.exists() or (parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].anchors):
                dead.append(f"{path.relative_to(site)} -> {target}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(pages):
    assert {target for found in pages.values() for target in found.loads if urlsplit(target).netloc} == set()


def test_formulas_are_rendered_and_none_is_left_as_source(pages):
    """Formulas are MathML, made when the site is built, and need no script."""
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in pages}
    assert texts["theory"].count("<math") > 60
    assert not [
        name for name, text in texts.items() if "arithmatex" in text or re.search(r"\\[(\[]\s*\\?\w+[^<]*\\[)\]]", text)
    ]


def test_every_public_name_is_in_the_reference_as_itself(pages):
    """`convert` and `forecast` are also the names of modules, which a page must not show in their place."""
    anchors = set().union(*(found.anchors for found in pages.values()))
    modules = ("schedule", "theory", "Converted")  # described by their parts
    public = {name: getattr(sn, name) for name in sn.__all__ if name not in modules}
    where = {name: (f"steadynorm.{name}", f"{each.__module__}.{each.__qualname__}") for name, each in public.items()}
    assert [name for name, paths in where.items() if not anchors & set(paths)] == []
    package = pytest.importorskip("griffe").load("steadynorm", search_paths=[ROOT / "src"])
    lines = [
        line for path in (ROOT / "docs" / "api").glob("*.md") for line in path.read_text(encoding="utf-8").splitlines()
    ]
    shown = [line.removeprefix("::: steadynorm.") for line in lines if line.startswith("::: ")]
    assert [name for name in shown if package[name].is_module] == []


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def look(browser, address: str, page: str, width: int, shot: Path | None = None) -> list[str]:
    """Return what is wrong with a page of this width: foreign requests, errors, overflow, missing pictures, flat
    formulas.
    """
    around = browser.new_context(viewport={"width": width, "height": 900})
    around.set_default_timeout(180_000)  # a busy machine is no failure
    tab, problems = around.new_page(), []
    tab.on("console", lambda message: problems.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: problems.append(f"error: {error}"))
    tab.on(
        "request", lambda request: request.url.startswith((address, "data:", "blob:")) or problems.append(request.url)
    )
    tab.goto(address + page, wait_until="networkidle")
    if (over := tab.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
        problems.append(f"{over} pixels too wide")
    problems += tab.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => `no picture: ${i.src}`)")
    problems += tab.evaluate(
        "[...document.querySelectorAll('math')].filter(m => m.getBoundingClientRect().height < 5).map(m => `flat: ${m.textContent}`)"
    )
    if shot is not None:
        tab.screenshot(path=shot, full_page=True)
    around.close()
    return problems


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("page", FIRST)
def test_the_first_page_is_complete_offline_at_every_width(browser, address, page, width):
    assert look(browser, address, page, width) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_page_is_complete_offline_at_every_width(browser, address, site, pages, width):
    names = [path.relative_to(site).as_posix() for path in pages]
    wrong = {name: look(browser, address, name, width) for name in names}
    assert {name: problems for name, problems in wrong.items() if problems} == {}


def test_the_recommended_settings_are_those_of_the_recipes():
    """docs/transformers.md lists lr, output lr, alpha, C² and the decay it means, row by row."""
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    rows = {name.strip(): cells.split("|") for name, cells in re.findall(r"^\| ([^|]*) \|(.*)\|$", text, re.MULTILINE)}
    scionc = sn.ScionC([torch.nn.Parameter(torch.zeros(2, 2))], lmo="spectral").defaults
    default = Optim(
        "scionc", scionc["lr"], 20 * scionc["lr"], None, None, scionc["steady_norm_sq"], alpha=scionc["alpha"]
    )
    expected = {"default": default, "the paper's NanoGPT": GPT_124M.optim, "our desk GPT ([training](training.md))": GPT_DESK.optim}  # fmt: skip
    for name, optim in expected.items():
        lr, output_lr, alpha, target, decay = (
            cell.strip().replace("2⁻¹² · 50", "0.01220703125") for cell in rows[name]
        )
        assert float(lr) == optim.lr
        assert optim.output_lr == pytest.approx(
            float(output_lr.removesuffix(" lr")) * (optim.lr if "lr" in output_lr else 1)
        )
        assert float(alpha) == optim.alpha
        assert float(target) == pytest.approx(optim.steady_norm_sq, rel=1e-3)
        assert float(decay) == pytest.approx(
            sn.theory.weight_decay_for(optim.steady_norm_sq, optim.lr, optim.alpha), rel=0.01
        )
