"""Text from the network cannot steer a terminal."""

from potluck.types.profile import DeviceProfile
from potluck.types.untrusted import printable


def test_what_is_not_printable_becomes_blank() -> None:
    assert printable("a\x1b[2Jb\nc\u202ed", 100) == "a [2Jb c d"
    assert printable("Grüße 東京", 5) == "Grüße"


def test_a_profile_holds_printable_text_only() -> None:
    profile = DeviceProfile.from_json({"device": "cpu\x1b]0;gone\x07", "device_name": "x" * 300})
    assert profile.device == "cpu ]0;gone "
    assert len(profile.device_name) == 200
