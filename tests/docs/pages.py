"""What the documentation says, as values: its command lines, its inline commands and its links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

root = Path(__file__).resolve().parents[2]
pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
more_pages = [root / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]

_fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_indented = re.compile(r"(?:^|\n)\n((?:    .*\n)+)")
_assignment = re.compile(r"[A-Za-z_]\w*=\S*")
_link = re.compile(r"\]\(([^)\s]+)\)")
_output = re.compile(r"<!-- (\w+) output -->.*?<!-- /\1 output -->", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line of a code block: the program and its arguments, without what the shell would take."""

    page: str
    line: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def text_of(page: Path) -> str:
    """A page without pasted output, which is not for typing."""
    return _output.sub("", page.read_text(encoding="utf-8"))


def commands() -> list[Command]:
    """Every command line of Potluck in the code blocks of README and docs."""
    return [command for page in pages for line in block_lines(text_of(page)) if (command := read(page.name, line))]


def block_lines(text: str) -> Iterator[str]:
    for match in _fence.finditer(text):
        yield from match[2].splitlines()
    for match in _indented.finditer(_fence.sub("\n\n", text)):
        yield from match[1].splitlines()


def read(page: str, line: str) -> Command | None:
    """The command in a line of a code block, None where it is something else."""
    line = line.strip()
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None  # prose or output with a quote in it
    while words and _assignment.fullmatch(words[0]):
        words = words[1:]
    if words[:3] == ["srun", "bash", "-c"]:
        words = shlex.split(words[3])
    if words and words[0] in ("exec", "time"):
        words = words[1:]
    if not words or not (words[0] == "potluck" or words[0].removeprefix("./").startswith("scripts/")):
        return None
    return Command(page, line, tuple(words))


def inline_commands() -> list[Command]:
    """Commands named in running text, often without their arguments."""
    found: list[Command] = []
    for page in [*pages, *more_pages]:
        text = _fence.sub("", text_of(page))
        for span in re.findall(r"`([^`\n]+)`", text):
            if span.startswith("potluck ") and "://" not in span:
                found.append(Command(page.name, span, tuple(span.split())))
    return found


def links() -> list[tuple[Path, str]]:
    """Every relative link with the page it is on."""
    return [
        (page, target)
        for page in [*pages, *more_pages]
        for target in _link.findall(_fence.sub("", text_of(page)))
        if "://" not in target and not target.startswith("mailto:")
    ]


def anchors(page: Path) -> set[str]:
    """The names that links within a page can go to, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _fence.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_block(page: str, language: str) -> str:
    """The first code block of that language on a page."""
    text = (root / page).read_text(encoding="utf-8")
    return next(match[2] for match in _fence.finditer(text) if match[1] == language)
