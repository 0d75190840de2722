"""Says at the end how many examples the properties were tried on."""

import trying


def pytest_terminal_summary(terminalreporter) -> None:
    if trying.TRIED:
        total, properties = sum(trying.TRIED.values()), len(trying.TRIED)
        terminalreporter.write_line(
            f"properties: {total:,} examples of {properties} properties (profile {trying.PROFILE})"
        )
