import pytest

from potluck.cli.units import (
    format_bytes,
    format_count,
    format_rounds,
    format_seconds,
    parse_bytes,
    parse_hours,
    parse_memory,
)
from potluck.types.errors import PotluckError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GB", 2_000_000_000), ("512 MiB", 512 * 1024**2), ("1.5G", 1_500_000_000), ("100", 100), ("3kb", 3000),
     ("1 TiB", 1024**4), ("0", 0)],
)  # fmt: skip
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "two", "2 XB", "-1GB", "1e3", "2iB", "1,5G"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(PotluckError, match="is not a size; write"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "hours"), [("22-7", (22, 7)), (" 8 - 18 ", (8, 18)), ("0-6", (0, 6)), ("20-24", (20, 0))]
)
def test_hours_are_read(text: str, hours: tuple[int, int]) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["", "22", "25-3", "3-25", "7-7", "0-24", "22:30-7", "-1-3"])
def test_other_hours_are_refused(text: str) -> None:
    with pytest.raises(PotluckError, match="is not a span of hours; write"):
        parse_hours(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (9_994_000, "9.99 MB"),
     (9_996_000, "10.0 MB"), (12_345_678, "12.3 MB"), (99_960_000, "100 MB"), (2e9, "2.00 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_bytes_have_three_digits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (950, "950"), (12_300, "12.3 k"), (2_048_000, "2.05 M"),
                                             (3e9, "3.00 B")])  # fmt: skip
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rounds() -> None:
    assert [format_rounds(n) for n in (0, 1, 13)] == ["0 rounds", "1 round", "13 rounds"]


def test_no_memory_is_no_limit_that_can_be_meant() -> None:
    assert parse_memory("2GB") == 2_000_000_000
    assert parse_memory("1MB") == 1_000_000  # docs/sub_gemm.md: is enough
    for text in ("0", "999kB"):
        with pytest.raises(PotluckError, match=f"{text} is too little memory to work in; give at least 1MB,"):
            parse_memory(text)
