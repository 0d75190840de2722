"""At the end: how many faults were injected."""

import injecting


def pytest_terminal_summary(terminalreporter):
    if injecting.COUNT:
        terminalreporter.write_line(f"faults injected: {injecting.COUNT}")
