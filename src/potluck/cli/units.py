"""Quantities as people write and read them."""

from __future__ import annotations

import re

from potluck.types.errors import PotluckError

_FACTORS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def parse_bytes(text: str) -> int:
    """`2GB`, `512 MiB` or `1.5G` in bytes. PotluckError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise PotluckError(f"{text!r} is not a size; write a number with a unit, such as 2GB or 512MiB")
    factor = _FACTORS[match[2].upper()]
    if match[3]:
        factor = 1024 ** " KMGT".index(match[2].upper())
    return int(float(match[1]) * factor)


least_memory_bytes = 1_000_000


def parse_memory(text: str) -> int:
    """As `parse_bytes`, for memory to work in. PotluckError."""
    num_bytes = parse_bytes(text)
    if num_bytes < least_memory_bytes:
        raise PotluckError(f"{text} is too little memory to work in; give at least 1MB, or leave it out for no limit")
    return num_bytes


def parse_hours(text: str) -> tuple[int, int]:
    """`22-7`: from 22:00 to 7:00, local time. PotluckError."""
    match = re.fullmatch(r"\s*(\d{1,2})\s*-\s*(\d{1,2})\s*", text)
    if match is None or int(match[1]) > 23 or int(match[2]) > 24 or int(match[1]) == int(match[2]) % 24:
        raise PotluckError(
            f"{text!r} is not a span of hours; write FROM-TO in hours of the day, such as "
            "22-7, or leave it out for the whole day"
        )
    return int(match[1]), int(match[2]) % 24


least_rate_bytes_per_s = 12_500
"""0.1 Mbit/s: below it a piece of a transfer takes longer than a coordinator waits for one."""


def parse_rate(text: str) -> float:
    """`5mbit`, `500 kbit` or `1 Gbit/s` in bytes per second. PotluckError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s|ps)?\s*", text, re.IGNORECASE)
    if match is None:
        raise PotluckError(f"{text!r} is not a rate; write a number and kbit, mbit or gbit a second, such as 5mbit")
    rate = float(match[1]) * _FACTORS[match[2].upper()] / 8
    if rate < least_rate_bytes_per_s:
        raise PotluckError(f"{text} is too slow for a model to travel; give at least 0.1mbit")
    return rate


def format_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit: `1.23 MB`."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    unit = units[0]
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def format_count(count: float) -> str:
    """`950`, `12.3 k`, `2.05 M`."""
    text = format_bytes(count).removesuffix("B").strip()
    return text.replace("G", "B")  # a billion


def format_rounds(count: int) -> str:
    """`1 round`, `13 rounds`."""
    return "1 round" if count == 1 else f"{count} rounds"


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
