"""Who may join, what each role may do, and how workers go: with one host that trains all the while."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.inside import CommandLine
from e2e.processes import events, free_port_pair, potluck, start, wait_for, write_corpus, write_recipe
from transport.security.conftest import ConnectProxy

from potluck import protocol
from potluck.protocol import pb
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.security.identity import Identity
from potluck.types.errors import NotAdmitted

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that goes on with the worker anna in it: `run` is its folder, `anna` that worker's."""
    folder = tmp_path_factory.mktemp("members")
    write_corpus(folder / "texts", num_files=4)
    write_recipe(
        folder / "tiny.toml", 'shared = "texts"', budget="rounds = 100000", validation="every_rounds = 0",
        fleet="min_workers = 1\nheartbeat_s = 0.5\nreconnect_s = 1.0",
    )  # fmt: skip
    host = start(
        "host", "tiny.toml", "--address", f"127.0.0.1:{free_port_pair()}", "--dir", "run",
        cwd=folder, log=folder / "log",
    )  # fmt: skip
    anna = None
    try:
        wait_for(folder / "run", "listening")
        anna = join(folder, "anna", join_line(folder))
        wait_for(folder / "run", "round", count=1)
        yield folder
        assert host.poll() is None, (folder / "log").read_text()[-3000:]
        assert anna.poll() is None, (folder / "anna.log").read_text()[-3000:]
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        for process in filter(None, (host, anna)):
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def join_line(folder: Path) -> str:
    return str(wait_for(folder / "run", "listening")[0]["join_line"])


def join(folder: Path, name: str, line: str, *arguments: str) -> subprocess.Popen[bytes]:
    return start(
        "join", line, "--state", folder / name, "--name", name, "--threads", "1", *arguments, cwd=folder,
        log=folder / f"{name}.log",
    )  # fmt: skip


def about(folder: Path, kind: str, worker: str, *, count: int = 1, timeout_s: float = 90.0) -> list[dict[str, Any]]:
    """Events of a kind about that worker, once there are `count`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = [e for e in events(folder / "run") if e["kind"] == kind and e.get("worker") == worker]
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {count} events {kind} of {worker}: {events(folder / 'run')[-10:]}")


def round_with(folder: Path, worker: str, *, timeout_s: float = 90.0) -> None:
    """Wait for a round from now on that the worker took part in."""
    seen = len(events(folder / "run"))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(worker in e["workers"] for e in events(folder / "run")[seen:] if e["kind"] == "round"):
            return
        time.sleep(0.1)
    raise AssertionError(f"no round with {worker}")


@pytest.fixture
def inside(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, capsys, monkeypatch)


# Coming and going


def test_an_invited_member_works_until_it_is_removed(here: Path, inside: CommandLine) -> None:
    invited = inside("invite", "bert", "--run", here / "run")
    assert invited.code == 0 and invited.stdout.startswith("potluck://127.0.0.1:")
    line = invited.stdout.strip()
    assert line != join_line(here)
    bert = join(here, "someone", line)  # the invitation gives the name, whatever the machine calls itself
    try:
        about(here, "joined", "bert")
        round_with(here, "bert")
        again = inside("join", line, "--state", "thief")
        assert again.code == 8
        assert "this join line was used up; ask for a new one" in again.sentence()
        removed = inside("remove", "bert", "--run", here / "run")
        assert removed.code == 0
        assert "bert is removed and its certificates are revoked" in removed.stderr
        assert bert.wait(30) == 8
    finally:
        end(bert)
    log = (here / "someone.log").read_text()
    assert "Traceback" not in log
    assert log.splitlines()[-1].startswith("potluck: "), log
    assert about(here, "left", "bert")[0]["reason"] == "removed by the operator"
    back = inside("join", line, "--state", here / "someone")
    assert back.code == 8, back.stderr
    assert "revoked" in back.sentence() or "withdrawn" in back.sentence()
    unknown = inside("remove", "bert", "--run", here / "run")
    assert unknown.code == 8
    assert "there is no member 'bert'; the members are " in unknown.sentence() and "anna" in unknown.sentence()
    round_with(here, "anna")


def said(folder: Path, name: str, text: str) -> None:
    """Wait until the worker has said so."""
    deadline = time.monotonic() + 60
    while text not in (folder / f"{name}.log").read_text():
        assert time.monotonic() < deadline, (folder / f"{name}.log").read_text()[-2000:]
        time.sleep(0.05)


def test_sigterm_leaves_in_good_order(here: Path) -> None:
    carl = join(here, "carl", join_line(here))
    try:
        about(here, "joined", "carl")
        round_with(here, "carl")
        carl.send_signal(signal.SIGTERM)
        assert carl.wait(40) == 0, (here / "carl.log").read_text()
    finally:
        end(carl)
    assert "SIGTERM: leaving in good order" in (here / "carl.log").read_text()
    assert about(here, "left", "carl")[0]["reason"] == "left"
    round_with(here, "anna")


def test_sigterm_outside_the_owners_hours(here: Path) -> None:
    hour = time.localtime().tm_hour
    emil = join(here, "emil", join_line(here), "--hours", f"{(hour + 2) % 24}-{(hour + 3) % 24}")
    try:
        said(here, "emil", "outside the hours")
        emil.send_signal(signal.SIGTERM)
        assert emil.wait(40) == 0
    finally:
        end(emil)
    assert (here / "emil.log").read_text().splitlines()[-1] == "left"


def test_pause_and_resume_from_another_terminal(here: Path, inside: CommandLine) -> None:
    frida = join(here, "frida", join_line(here), "--only-when", "plugged-in", "--max-upload", "100mbit")
    try:
        about(here, "joined", "frida")
        round_with(here, "frida")
        paused = inside("pause", "--state", here / "frida")
        assert paused.code == 0 and "is paused" in paused.stderr
        said(here, "frida", "it is paused until `potluck resume`; stopping after the step under way")
        assert inside("resume", "--state", here / "frida").code == 0
        said(here, "frida", "going on")
        round_with(here, "frida")
        frida.send_signal(signal.SIGINT)
        assert frida.wait(40) == 0, (here / "frida.log").read_text()
    finally:
        end(frida)
    assert "Ctrl-C: leaving in good order" in (here / "frida.log").read_text()
    assert about(here, "left", "frida")[0]["reason"] == "left"
    nobody = inside("pause", "--state", here / "nobody")
    assert nobody.code == 1 and "no worker has joined with the state folder" in nobody.sentence()


def test_a_second_ctrl_c_ends_a_worker_at_once(here: Path) -> None:
    gina = join(here, "gina", join_line(here))
    try:
        about(here, "joined", "gina")
        round_with(here, "gina")
        gina.send_signal(signal.SIGINT)
        while "once more ends it at once" not in (here / "gina.log").read_text():
            time.sleep(0.002)
        gina.send_signal(signal.SIGINT)
        assert gina.wait(40) == 130, (here / "gina.log").read_text()
    finally:
        end(gina)
    assert (here / "gina.log").read_text().splitlines()[-1] == "potluck: ended at once by Ctrl-C"


def test_a_proxy_leads_the_whole_way(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = ConnectProxy()
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    dora = join(here, "dora", join_line(here).replace("127.0.0.1", "far.example"))
    try:
        about(here, "joined", "dora")
        round_with(here, "dora")
        dora.send_signal(signal.SIGTERM)
        assert dora.wait(40) == 0, (here / "dora.log").read_text()
    finally:
        end(dora)
        proxy.close()
    enrol, serve = json.loads((here / "run" / "ports.json").read_text())
    asked = {head.split()[1] for head in proxy.heads}
    assert asked == {f"far.example:{enrol}", f"far.example:{serve}"}


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', budget="rounds = 1000")
    running = start("run", "tiny.toml", "--local", "2", "--dir", "run", cwd=tmp_path, log=tmp_path / "log")
    try:
        wait_for(tmp_path / "run", "round", count=1)
        running.send_signal(signal.SIGINT)
        while "Ctrl-C once more ends it at once" not in (tmp_path / "log").read_text():
            time.sleep(0.002)
        running.send_signal(signal.SIGINT)
        assert running.wait(40) == 130, (tmp_path / "log").read_text()
    finally:
        end(running)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "potluck: ended at once by Ctrl-C"


# Who is not let in


def altered(line: str, *, token: str = "", pin: str = "") -> str:
    head, _, secret = line.rpartition("/")
    old_token, _, old_pin = secret.partition(".")
    return f"{head}/{token or old_token}.{pin or old_pin}"


def test_lines_that_are_not_accepted(here: Path, inside: CommandLine) -> None:
    line = join_line(here)
    wrong = inside("join", altered(line, token="a" * 26), "--state", "a")
    assert wrong.code == 8, wrong.stderr
    assert "this join line is not one of this coordinator" in wrong.sentence()
    pin = line.rpartition(".")[2]
    other = inside("join", altered(line, pin=pin[::-1]), "--state", "b")
    assert other.code == 8
    assert f"the join line names {pin[::-1]}" in other.sentence() and "nothing was sent" in other.sentence()
    late = inside("invite", "late", "--run", here / "run").stdout.strip()
    with sqlite3.connect(here / "run" / "members.db") as database:
        database.execute("UPDATE tokens SET expires = expires - 48 * 3600 WHERE name = 'late'")
    database.close()
    expired = inside("join", late, "--state", "c")
    assert expired.code == 8
    assert re.search(r"this join line expired 24\.0 hours ago; ask for a new one", expired.sentence())


def test_another_major_version_is_refused(here: Path, inside: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAJOR", 2)
    ended = inside("join", join_line(here), "--state", "newer")
    assert ended.code == 9, ended.stderr
    assert "speaks protocol 2.0 and this side 1.0; install the same major version" in ended.sentence()


async def welcome(identity: Identity) -> None:
    connection = GrpcConnection(identity.address, identity)
    try:
        await connection.call("Welcome", pb.WelcomeRequest(version=protocol.version()).SerializeToString())
    finally:
        await connection.close()


def test_roles(here: Path, inside: CommandLine, tmp_path: Path) -> None:
    line = inside("invite", "olga", "--role", "operator", "--run", here / "run").stdout.strip()
    ended = inside("join", line, "--state", "olga")
    assert ended.code == 0, ended.stderr
    assert "this machine may operate the run; ask it with: potluck status olga" in ended.stderr
    with pytest.raises(NotAdmitted, match="olga has the role operator and may not use Welcome"):
        asyncio.run(welcome(Identity.load(tmp_path / "olga" / "identity")))
    shutil.copytree(here / "anna" / "identity", tmp_path / "annas" / "operator")
    (tmp_path / "annas" / "ledger.db").touch()
    status = inside("status", "olga", "--json")
    assert status.code == 0, status.stderr
    assert [w["id"] for w in json.loads(status.stdout)["workers"] if w["connected"]] == ["anna"]
    for call in ("status", "stop"):
        refused = inside(call, "annas")
        assert refused.code == 8
        assert "anna has the role worker and may not use " in refused.sentence()
    round_with(here, "anna")


def test_a_model_too_big_for_a_workers_limit(here: Path, inside: CommandLine) -> None:
    ended = inside("join", join_line(here), "--state", "small", "--name", "small", "--max-memory", "1200KB")
    assert ended.code == 5, ended.stderr
    assert re.search(r"needs \d+\.\d MiB and 1\.1 MiB are free within --max-memory", ended.sentence())


@pytest.mark.parametrize("answers", [False, True])
def test_nobody_there(inside: CommandLine, answers: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(20)
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        if answers:
            thread.start()
        else:
            server.close()
        ended = inside("join", f"potluck://127.0.0.1:{port}/{'a' * 26}.{'b' * 32}", "--state", "w")
        if answers:
            thread.join()
    assert ended.code == 7, ended.stderr
    assert f"127.0.0.1:{port}" in ended.sentence()


def test_garbage_at_both_ports_stops_nothing(here: Path, inside: CommandLine) -> None:
    chance = random.Random(5)
    ports = json.loads((here / "run" / "ports.json").read_text())
    beginnings = [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
    streams = []
    for number in range(60):
        stream = socket.create_connection(("127.0.0.1", ports[number % 2]))
        streams.append(stream)
        try:
            stream.sendall(beginnings[number % 4] + chance.randbytes(chance.randrange(1, 20000)))
        except OSError:
            continue  # it hung up on us
    round_with(here, "anna")
    status = inside("status", here / "run", "--json")
    assert status.code == 0 and json.loads(status.stdout)["workers"][0]["connected"]
    for stream in streams:
        stream.close()
    round_with(here, "anna")
    assert (here / "log").stat().st_size < 1 << 20
    fresh = potluck("status", here / "run", cwd=here)
    assert fresh.returncode == 0 and "anna" in fresh.stdout
