"""One thread: the tensors here are small, and two busy test runs on two cores would wait for each other."""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser():
    program = "/usr/bin/chromium" if Path("/usr/bin/chromium").exists() else shutil.which("chromium")
    if program is None:
        assert os.environ.get("STEADYNORM_REQUIRE_CHROMIUM") != "1", "Chromium is required and not installed"
        pytest.skip("Chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    flags = [*FLAGS.split(), "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=flags)
        yield running
        running.close()


def pytest_terminal_summary(terminalreporter) -> None:
    """How many examples the properties were tried on, if they were; which tests were left out, and why."""
    trying = sys.modules.get("trying")  # tests/properties/trying.py
    if trying is not None and trying.TRIED:
        total, properties = sum(trying.TRIED.values()), len(trying.TRIED)
        line = f"properties: {total:,} examples of {properties} properties (profile {trying.PROFILE})"
        terminalreporter.write_line(line)
    skipped = [each.longrepr for each in terminalreporter.stats.get("skipped", [])]
    reasons = Counter(str(each[2]).removeprefix("Skipped: ") for each in skipped if isinstance(each, tuple))
    if reasons:
        terminalreporter.write_line(not_tried(reasons))


def not_tried(reasons: Counter[str]) -> str:
    """One line for all skipped tests."""
    each = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
    return f"not tried here: {sum(reasons.values())} tests: {each}"
