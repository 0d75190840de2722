"""Faults, counted: processes killed at chosen instants, damaged bytes, full disks, folders that refuse."""

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counts import FAULTS

KILLS = {True: 0, False: 0}  # kills at a line in this test: those that hit, and those after the work was done
PACKAGE = f"{os.sep}steadynorm{os.sep}"
FULL = ("the disk is full", "larger than the disk or ulimit -f allows")
Action = Callable[[], object]
often = pytest.mark.parametrize("times", [12, pytest.param(150, marks=pytest.mark.slow)])


def injected(number: int = 1) -> None:
    """Count faults; the terminal summary prints how many there were."""
    FAULTS["injected"] += number


def child(action: Action) -> int:
    """Run an action in a child process and return its id. It exits with 0, or with 1 after printing the error."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """Return the exit code of a process, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(action: Action) -> tuple[bool, str]:
    """Run an action in a child process; return whether it succeeded, and its result or its error as text."""
    read, write = os.pipe()

    def reply() -> None:
        try:
            said = f"+{action()}"
        except BaseException as error:
            said = f"-{type(error).__name__}: {error}"
        os.write(write, said.encode())

    pid = child(reply)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        said = pipe.read()
    assert ended(pid) == 0
    return said[0] == "+", said[1:]


def answer(action: Action) -> str:
    """Return only the text of the outcome."""
    return outcome(action)[1]


class Lines:
    """Call `at(n)` before the n-th line of this package's code is executed."""

    def __init__(self, at: Callable[[int], object]):
        self.seen, self._at = 0, at

    def _trace(self, frame: Any, event: str, _: object) -> Any:
        if PACKAGE not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.seen += 1
            self._at(self.seen)
        return self._trace

    def run(self, action: Action) -> int:
        """Run an action and return how many lines it took."""
        sys.settrace(self._trace)
        try:
            action()
        finally:
            sys.settrace(None)
        return self.seen


def lines_of(action: Action) -> int:
    """Return how many of the package's lines an action executes."""
    return int(answer(lambda: Lines(lambda _: None).run(action)))


def killed(pid: int) -> bool:
    """Return whether a process was killed, and count the kill; False if it had finished before."""
    code = ended(pid)
    assert code in (0, -signal.SIGKILL)
    hit = code == -signal.SIGKILL
    injected(int(hit))
    return hit


def killed_at_line(number: int, action: Action) -> bool:
    """Run an action in a process that is killed (SIGKILL) before this line; return False if it ended before."""

    def kill(line: int) -> None:
        if line == number:
            os.kill(os.getpid(), signal.SIGKILL)

    hit = killed(child(lambda: Lines(kill).run(action)))
    KILLS[hit] += 1
    return hit


def killed_after(seconds: float, action: Action) -> bool:
    """Run an action in a process that is killed after this many seconds, whatever it is doing; return False if it
    had ended.

    On a busy machine many come too late: repeat until enough have hit, with shorter times after each that did not.
    """
    pid = child(action)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return killed(pid)


def instants(times: int, last: int, seed: int) -> list[int]:
    """Return random lines, always including the last few: that is where files get their names and leftovers are removed."""
    generator = random.Random(seed)
    return sorted({generator.randrange(1, last + 1) for _ in range(times)} | {max(last - k, 1) for k in range(3)})


def damages(content: bytes, seed: int, flips: int, cuts: int = 3) -> Iterator[tuple[str, bytes]]:
    """Yield the content cut at every kind of place, and with single bits flipped at random."""
    generator = random.Random(seed)
    size = len(content)
    places = {0, 1, min(8, size - 1), min(100, size - 1), size // 2, size - 1}
    places |= {generator.randrange(size) for _ in range(cuts)}
    for place in sorted(places):
        injected()
        yield f"cut at {place} of {size}", content[:place]
    for _ in range(flips):
        place, bit = generator.randrange(size), generator.randrange(8)
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        injected()
        yield f"bit {bit} of byte {place} of {size} flipped", bytes(changed)


def with_small_files(size: int, action: Action) -> tuple[bool, str]:
    """Run an action where no file may grow beyond this many bytes: a full disk that needs no root."""

    def limited() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return action()

    injected()
    return outcome(limited)


def fill(folder: Path, room: int) -> Path:
    """Write a file that leaves this many bytes of a disk; removing it makes room again."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler = folder / "filler"
    filler.write_bytes(b"x" * max(free - room, 0))
    injected()
    return filler


def without_rights(folder: Path, action: Action) -> str:
    """Return what an action says in a working folder that may be read but not written, even by root."""

    def powerless() -> object:
        os.chdir(folder)
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return action()

    injected()
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    try:
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        return answer(powerless)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder except locks."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", ".claim")
    }
