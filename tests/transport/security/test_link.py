"""The join line: what it reads, what it prints, and one clear sentence for everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.transport.security.link import JoinLink, format_address, parse_address, read_link
from potluck.types.errors import PotluckError

TOKEN, PIN = "zyxwvutsrqponmlkjihgfedcba", "abcdefghijklmnopqrstuvwxyz234567"
LINE = f"potluck://train.example.org:7001/{TOKEN}.{PIN}"


def test_a_line_reads_and_prints_the_same():
    link = JoinLink.parse(LINE)
    assert link == JoinLink(host="train.example.org", port=7001, token=TOKEN, pin=PIN)
    assert link.format() == LINE
    assert TOKEN not in repr(link)


@pytest.mark.parametrize(
    ("host", "printed"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8::1", "[2001:db8::1]"),
        ("fe80::1%eth0", "[fe80::1%eth0]"),
        ("lab-7", "lab-7"),
        ("a_b.local", "a_b.local"),
    ],
)
def test_hosts_of_every_kind(host, printed):
    link = JoinLink(host=host, port=65535, token=TOKEN, pin=PIN)
    assert link.format() == f"potluck://{printed}:65535/{TOKEN}.{PIN}"
    assert JoinLink.parse(link.format()) == link
    assert parse_address(format_address(host, 1)) == (host, 1)


@pytest.mark.parametrize(
    "pasted",
    [
        f"  {LINE}\n",
        f"potluck join {LINE} --data my.txt",
        f'"{LINE}"',
        LINE.upper(),
        LINE.replace(f"/{TOKEN}", f"/#{TOKEN}"),
    ],
)
def test_what_copying_does_to_a_line_is_forgiven(pasted):
    link = JoinLink.parse(pasted)
    assert (link.host.lower(), link.port, link.token, link.pin) == ("train.example.org", 7001, TOKEN, PIN)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "looks like potluck://HOST:PORT/TOKEN.PIN and none was given"),
        ("https://train.example.org:7001/x", "none was given"),
        (f"{LINE} {LINE}", "2 was given"),
        (LINE[:-1], "ends in 58 characters and should end in 59"),
        (LINE[:-40], "ends in 19 characters"),
        (f"potluck://train.example.org:7001{TOKEN}.{PIN}", "no token after the address"),
        ("potluck://train.example.org:7001", "no token after the address"),
        ("potluck://train.example.org:7001/", "ends in 0 characters"),
        (LINE.replace(":7001", ""), "no port from 1 to 65535"),
        (LINE.replace("7001", "0"), "no port from 1 to 65535"),
        (LINE.replace("7001", "65536"), "no port from 1 to 65535"),
        (LINE.replace("7001", "9" * 4000), "no port from 1 to 65535"),
        (LINE.replace("7001", "٣"), "no port from 1 to 65535"),
        (LINE.replace("train.example.org", ""), "no usable host"),
        (LINE.replace("train.example.org", "2001:db8::1"), "no usable host"),
        (LINE.replace("train.example.org", "[train]"), "no usable host"),
        (LINE.replace("train.example.org", "a b"), "no token"),
        (LINE.replace("train.example.org", "-x"), "no usable host"),
        (LINE.replace("zyx", "zy1"), "characters it never has"),
    ],
)
def test_a_malformed_line_gets_one_sentence_that_keeps_the_token_secret(text, sentence):
    with pytest.raises(PotluckError) as caught:
        JoinLink.parse(text)
    assert sentence in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=200))
def test_nothing_but_our_error_comes_out(text):
    for candidate in (text, f"potluck://{text}", f"potluck://h:1/{text}"):
        with pytest.raises(PotluckError):
            JoinLink.parse(candidate)


def test_a_line_from_a_file(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text(f"{LINE}\n")
    assert read_link(str(path)) == read_link(f"@{path}") == read_link(LINE) == JoinLink.parse(LINE)


def test_files_that_hold_no_line(tmp_path):
    with pytest.raises(PotluckError, match=r"neither a join line .* nor a file"):
        read_link(str(tmp_path / "missing"))
    with pytest.raises(PotluckError, match=r"cannot be read"):
        read_link(f"@{tmp_path / 'missing'}")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PotluckError, match=r"is not text"):
        read_link(str(binary))
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(PotluckError, match=r"empty holds no join line \(potluck://HOST:PORT/TOKEN.PIN\); copy"):
        read_link(f"@{empty}")
    large = tmp_path / "large"
    large.write_text("x" * 5000)
    with pytest.raises(PotluckError, match=r"more than 4096 bytes"):
        read_link(str(large))
