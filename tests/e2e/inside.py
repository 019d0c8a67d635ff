"""The command line in this very process: for what ends before any worker would start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from potluck.cli.app import main


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    def sentence(self) -> str:
        """The one sentence that it ended with; there is no other and no traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        said = [line for line in self.stderr.splitlines() if line.startswith("potluck: ")]
        assert len(said) == 1, self.stderr
        assert self.stderr.splitlines()[-1] == said[0]
        return said[0].removeprefix("potluck: ")


class CommandLine:
    """`potluck ARGUMENTS` as a call. Built by the fixture `inside` of a test file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("COLUMNS", "200")

    def __call__(self, *arguments: str | Path) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["potluck", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return Ended(code=code if isinstance(code, int) else 0, stdout=out, stderr=err)
