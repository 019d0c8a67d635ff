"""Draft device."""
from __future__ import annotations
from potluck.types.profile import DeviceProfile
def choose_device(asked: str) -> str:
    return "cpu"
def describe(device: str, num_threads: int | None = None) -> DeviceProfile:
    return DeviceProfile(device=str(device))
