"""The join line: everything a machine needs to join, in one piece that survives copying.

    potluck://HOST:PORT/TOKEN.PIN

HOST:PORT is the coordinator's enrol port, TOKEN the invitation (26 characters), PIN the hash of the authority's public
key (32 characters). The line has no character that a shell would read as its own, an IPv6 host's brackets apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from potluck.transport.security.keys import PIN_CHARACTERS
from potluck.types.errors import PotluckError

SCHEME = "potluck://"
TOKEN_CHARACTERS = 26
MAX_LINE_BYTES = 4096
_FORM = "potluck://HOST:PORT/TOKEN.PIN"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
_SECRET = re.compile(r"[a-z2-7]*")


@dataclass(frozen=True, kw_only=True)
class JoinLink:
    host: str
    port: int
    token: str = field(repr=False)
    pin: str

    @property
    def address(self) -> str:
        return format_address(self.host, self.port)

    def format(self) -> str:
        return f"{SCHEME}{self.address}/{self.token}.{self.pin}"

    @staticmethod
    def parse(text: str) -> JoinLink:
        """Read a join line; words around it (`potluck join …`) are let pass. PotluckError, never showing the token."""
        words = [w.strip("'\"`<>,;") for w in text[:MAX_LINE_BYTES].split()]
        lines = [w for w in words if w.lower().startswith(SCHEME)]
        if len(lines) != 1:
            found = "none" if not lines else str(len(lines))
            raise PotluckError(f"a join line looks like {_FORM} and {found} was given; copy it from `potluck host`")
        address, slash, secrets = lines[0][len(SCHEME) :].partition("/")
        if not slash:  # the address is not shown: a line that lost its slash has the token in it
            raise PotluckError(f"the join line has no token after the address; it looks like {_FORM}: copy it again")
        host, port = parse_address(address)
        token, _, pin = secrets.lstrip("#").lower().partition(".")
        if (len(token), len(pin)) != (TOKEN_CHARACTERS, PIN_CHARACTERS):
            raise PotluckError(
                f"the join line for {address} ends in {len(secrets)} characters and should end in "
                f"{TOKEN_CHARACTERS + 1 + PIN_CHARACTERS}; copy the whole line again"
            )
        if not _SECRET.fullmatch(token) or not _SECRET.fullmatch(pin):
            raise PotluckError(f"the join line for {address} holds characters it never has; copy the whole line again")
        return JoinLink(host=host, port=port, token=token, pin=pin)


def parse_address(text: str) -> tuple[str, int]:
    """`NAME:PORT` or `[IPv6]:PORT` as `(host, port)`. PotluckError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise PotluckError(f"the address {text[:100]!r} has no port from 1 to 65535 at its end; write HOST:PORT")
    if not _HOST.fullmatch(host) or (":" in host) != bracketed:
        raise PotluckError(f"the address {text[:100]!r} has no usable host; write HOST:PORT, or [IPv6]:PORT")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_link(text_or_path: str) -> JoinLink:
    """A join line given as itself, as `@FILE`, or as the name of a file that holds it. PotluckError."""
    if SCHEME in text_or_path.lower():
        return JoinLink.parse(text_or_path)
    path = Path(text_or_path.removeprefix("@"))
    if not text_or_path.startswith("@") and not path.is_file():
        raise PotluckError(
            f"{text_or_path[:100]!r} is neither a join line ({_FORM}) nor a file that holds one; "
            "copy the line from `potluck host`"
        )
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LINE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise PotluckError(
            f"the file {path} with the join line cannot be read ({error.strerror or error}); check its path"
        ) from error
    except UnicodeDecodeError as error:
        raise PotluckError(f"the file {path} is not text; it should hold one join line ({_FORM})") from error
    if len(data) > MAX_LINE_BYTES:
        raise PotluckError(f"the file {path} has more than {MAX_LINE_BYTES} bytes; it should hold one join line")
    if SCHEME not in text.lower():
        raise PotluckError(f"the file {path} holds no join line ({_FORM}); copy the one from `potluck host` into it")
    return JoinLink.parse(text)
