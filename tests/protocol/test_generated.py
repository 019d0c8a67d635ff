import subprocess
import sys
from pathlib import Path

import pytest

from potluck import protocol
from potluck.protocol import check_version, pb
from potluck.types.errors import VersionMismatch

root = Path(__file__).resolve().parents[2]


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, root / "scripts" / "generate.py", tmp_path], check=True, cwd=root)
    folder = Path(protocol.__file__).parent
    for name in ("potluck_pb2.py", "potluck_pb2.pyi"):
        assert (tmp_path / name).read_text() == (folder / name).read_text(), f"{name} is stale; run scripts/generate"


def test_another_minor_version_is_served_and_another_major_refused() -> None:
    check_version(pb.Version(major=protocol.MAJOR, minor=protocol.MINOR + 1), who="a worker")
    with pytest.raises(VersionMismatch, match=r"a worker speaks protocol 2\.0 and this side 1\.0"):
        check_version(pb.Version(major=2), who="a worker")


def test_unknown_fields_of_a_later_minor_version_are_let_pass() -> None:
    later = pb.Report(sequence=3).SerializeToString() + b"\xfa\x07\x03abc"  # field 127, not known here
    assert pb.Report.FromString(later).sequence == 3
