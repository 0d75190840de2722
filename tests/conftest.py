"""Settings and fixtures for all tests.

One thread suffices: tensors are small, and two test runs on two cores would wait for each other.
"""

import gc
import os
import shutil
from collections import Counter

import counts
import pytest
import torch

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"

# By the processor time that each takes, the longest first.
LONG = (
    "test_distributed", "test_contract", "test_residual_sharded", "test_monitor_forecast", "test_hold",
    "test_torch_harness", "test_paper_training", "test_package", "test_accelerator", "test_train", "test_page",
    "test_report", "test_optim_properties", "test_contract_checkpoints", "test_steady_state", "test_launches",
    "test_decay_steady", "test_train_parallel", "test_residual", "test_recipes", "test_theory_kernels", "test_kills",
    "test_idle", "test_docs", "test_cautious", "test_monitor", "test_monitor_norms", "test_optim_twins",
    "test_stateful_properties", "test_no_sync", "test_muon", "test_paper_results", "test_contract_numbers",
    "test_polar", "test_theory_forecast", "test_capture",
)  # fmt: skip

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        assert os.environ.get("STEADYNORM_REQUIRE_CHROMIUM") != "1", "Chromium is required and not installed"
        pytest.skip("Chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    flags = [*FLAGS.split(), "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=flags)
        yield running
        running.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under pytest-xdist, start the long files first, so that no process is left with one at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Let garbage collection pass over what importing and collecting made; in two files, walking it took a fifth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under pytest-xdist, hand the counts of this process to the one that prints the summary."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["counts"] = counts.dump()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take the counts of a pytest-xdist process that has ended; one that crashed has none."""
    if (output := getattr(node, "workeroutput", None)) is not None:
        counts.add(output["counts"])


def pytest_terminal_summary(terminalreporter) -> None:
    """Print how much was tried, and which tests were left out and why."""
    for line in counts.lines():
        terminalreporter.write_line(line)
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    reasons = Counter(str(where[2]).removeprefix("Skipped: ") for where in skipped if isinstance(where, tuple))
    if reasons:
        terminalreporter.write_line(not_tried(reasons))


def not_tried(reasons: Counter[str]) -> str:
    """Return one line about all skipped tests."""
    each = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
    return f"not tried here: {sum(reasons.values())} tests: {each}"
