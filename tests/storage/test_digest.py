import hashlib
from pathlib import Path

import pytest
from blake3 import blake3

from potluck.storage.digest import Hasher, check_digest, digest_bytes, digest_file, file_name, from_file_name
from potluck.types.errors import Refused
from potluck.types.ids import Digest

empty = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_three_ways_give_one_digest(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    expected = "blake3:" + blake3(data).hexdigest()
    (tmp_path / "file").write_bytes(data)
    hasher = Hasher()
    hasher.update(data[:1000])
    hasher.update(memoryview(data)[1000:])
    assert digest_bytes(data) == digest_file(tmp_path / "file") == hasher.digest() == expected
    assert digest_bytes(b"") == Hasher().digest() == empty
    listed = Digest("sha256:" + hashlib.sha256(data).hexdigest())
    assert digest_file(tmp_path / "file", like=listed) == listed


def test_a_digest_is_a_file_name_and_back() -> None:
    name = file_name(digest_bytes(b""))
    assert name == empty.replace(":", "-")
    assert from_file_name(name) == empty
    assert [from_file_name(n) for n in ("partial", "sha256-ab", name + ".tmp", name.upper())] == [None] * 4


@pytest.mark.parametrize(
    "text",
    ["", "blake3:", empty[:-1], empty + "0", empty.upper(), empty + "\n", "md5:" + "0" * 32, "sha256:../" + "0" * 61],
)
def test_what_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not a digest"):
        check_digest(text)


def test_a_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(Refused) as refused:
        check_digest("x" * 100_000)
    assert len(str(refused.value)) < 200
