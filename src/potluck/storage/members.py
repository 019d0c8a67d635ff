"""The member book: who belongs, with which certificates, and which invitations are open.

A token is 128 random bits and is kept as its hash only. All methods but `holder` read or write the database: call them
in an executor. `holder` answers from memory, so that revocation can be checked on every call.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import threading
from dataclasses import dataclass
from typing import Any

from potluck.storage.database import Database
from potluck.types.errors import NotAdmitted, Refused
from potluck.types.ids import WorkerId

ROLES = ("worker", "operator")
MAX_USES = 100_000
MAX_HOURS = 24.0 * 366
MAX_NAME_CHARACTERS = 40
_KEEP_EXPIRED_S = 366 * 86400.0  # an expired certificate's key still tells who comes back
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS members (
    id TEXT PRIMARY KEY, role TEXT NOT NULL, state TEXT NOT NULL, token TEXT NOT NULL, added REAL NOT NULL,
    last_seen REAL NOT NULL);
CREATE TABLE IF NOT EXISTS certificates (
    serial TEXT PRIMARY KEY, member TEXT NOT NULL, key TEXT NOT NULL, expires REAL NOT NULL, revoked INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS certificates_by_key ON certificates (key);
CREATE INDEX IF NOT EXISTS certificates_by_member ON certificates (member);
CREATE TABLE IF NOT EXISTS tokens (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, uses_left INTEGER NOT NULL, expires REAL NOT NULL,
    made REAL NOT NULL, withdrawn INTEGER NOT NULL);
"""


@dataclass(frozen=True, kw_only=True)
class CertificateRow:
    """A certificate about to be issued: its serial, the name of its key, its end in seconds since 1970."""

    serial: int
    key: str
    expires: float


@dataclass(frozen=True, kw_only=True)
class MemberRow:
    id: WorkerId
    role: str
    state: str  # "active" or "removed"
    added: float
    last_seen: float  # 0: never


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """An open invitation. `name` is "" for one that anybody may use."""

    role: str
    name: str
    uses_left: int
    expires: float
    made: float


@dataclass(frozen=True, kw_only=True)
class Admitted:
    id: WorkerId
    role: str
    replaced: bool = False  # earlier certificates of this member were revoked


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What removing a member ended: its certificates and, if it came by one, a join line that others may hold too."""

    serials: tuple[int, ...]
    line_withdrawn: bool


class Members:
    """All members of one coordinator. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._lock = threading.RLock()  # one change at a time, and memory follows the database in the same order
        self._next_number: dict[str, int] = {}
        with self._db.transaction():
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._db.execute(statement)
        rows = self._db.query(
            "SELECT c.serial, m.id, m.role FROM certificates c JOIN members m ON m.id = c.member "
            "WHERE c.revoked = 0 AND m.state = 'active'"
        )
        self._holders = {int(str(serial), 16): (WorkerId(str(id)), str(role)) for serial, id, role in rows}

    def holder(self, serial: int) -> tuple[WorkerId, str] | None:
        """Whose certificate this is, with the role; None if unknown or revoked. Does not block."""
        return self._holders.get(serial)

    # Invitations

    def invite(
        self, *, now: float, name: str | None = None, uses: int = 1, hours: float = 24.0, role: str = "worker"
    ) -> str:
        """A new token. With a `name` it admits that member only, and replaces its key if it has one. Refused."""
        if role not in ROLES:
            raise Refused(f"the role {role[:40]!r} is unknown; use worker or operator")
        if not 1 <= uses <= MAX_USES or not 0 < hours <= MAX_HOURS:
            raise Refused(
                f"an invitation for {uses} uses and {hours:g} hours cannot be made; "
                f"use 1 to {MAX_USES} uses and up to {MAX_HOURS:g} hours"
            )
        if name is not None and not _NAME.fullmatch(name):
            raise Refused(
                f"{name[:60]!r} cannot name a member; use up to {MAX_NAME_CHARACTERS} small letters, digits, "
                "dots, dashes and underscores, a letter or digit at both ends"
            )
        if name is not None and uses != 1:
            raise Refused(
                f"an invitation for {name} alone has one use and {uses} were asked for; leave one of them out"
            )
        token = base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()
        with self._lock, self._db.transaction():
            known = self._member(name) if name is not None else None
            if known is not None and known.state == "active" and known.role != role:
                raise Refused(f"{name} is a member with the role {known.role}, not {role}; choose another name")
            self._db.execute("DELETE FROM tokens WHERE expires < ?", (now - _KEEP_EXPIRED_S,))
            self._db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, 0)",
                (_hash(token), role, name or "", uses, now + hours * 3600.0, now),
            )
        return token

    def withdraw(self, token: str) -> bool:
        """End an invitation before its time; whether there was one. Members it admitted stay."""
        with self._lock, self._db.transaction():
            found = self._db.query("SELECT 1 FROM tokens WHERE hash = ? AND withdrawn = 0", (_hash(token),))
            self._db.execute("UPDATE tokens SET withdrawn = 1 WHERE hash = ?", (_hash(token),))
        return bool(found)

    def invitations(self, *, now: float) -> tuple[TokenRow, ...]:
        """The open ones, oldest first."""
        rows = self._db.query(
            "SELECT role, name, uses_left, expires, made FROM tokens "
            "WHERE withdrawn = 0 AND uses_left > 0 AND expires > ? ORDER BY made",
            (now,),
        )
        return tuple(
            TokenRow(role=str(r), name=str(n), uses_left=int(u), expires=float(e), made=float(m))
            for r, n, u, e, m in rows
        )

    # Members

    def admit(self, token: str, *, wanted: str, certificate: CertificateRow, now: float) -> Admitted:
        """Spend one use of `token` on a member with this certificate, in one transaction. NotAdmitted.

        A key that belongs to a member already is that member again, and costs no use.
        """
        with self._lock:
            with self._db.transaction():
                hash, role, name, uses_left = self._valid_token(token, now)
                again = self._member_by_key(certificate.key)
                if again is not None and again.role == role and name in ("", again.id):
                    admitted, revoked = Admitted(id=again.id, role=role), ()
                else:
                    if uses_left < 1:
                        raise NotAdmitted("this join line was used up; ask for a new one (`potluck invite`)")
                    self._db.execute("UPDATE tokens SET uses_left = uses_left - 1 WHERE hash = ?", (hash,))
                    id = WorkerId(name) if name else self._new_id(wanted, role)
                    revoked = self._revoke(id)
                    self._write_member(id, role, hash, now)
                    admitted = Admitted(id=id, role=role, replaced=bool(revoked))
                self._write_certificate(admitted.id, certificate, now)
            self._remember(admitted.id, role, certificate.serial, revoked)
        return admitted

    def enlist(self, id: WorkerId, *, role: str, certificate: CertificateRow, now: float) -> None:
        """Make a member without a token (the coordinator's own operator); its earlier certificates end."""
        with self._lock:
            with self._db.transaction():
                revoked = self._revoke(id)
                self._write_member(id, role, "", now)
                self._write_certificate(id, certificate, now)
            self._remember(id, role, certificate.serial, revoked)

    def renew(self, id: WorkerId, *, certificate: CertificateRow, now: float) -> str:
        """Note a member's next certificate and give its role. The present one stays good until it expires."""
        with self._lock:
            with self._db.transaction():
                member = self._member(id)
                if member is None or member.state != "active":
                    raise NotAdmitted(f"{id} is no member any more; ask for a new join line")
                self._write_certificate(id, certificate, now)
            self._remember(id, member.role, certificate.serial, ())
        return member.role

    def remove(self, name: str) -> Removal:
        """Revoke all certificates of a member, and the tokens it came by or could come back by. Refused if unknown."""
        with self._lock:
            with self._db.transaction():
                member = self._member(name)
                if member is None or member.state != "active":
                    raise Refused(f"there is no member {name[:60]!r}; the members are {self._names()}")
                revoked = self._revoke(member.id)
                shared = self._db.query(
                    "SELECT 1 FROM tokens t JOIN members m ON m.token = t.hash "
                    "WHERE m.id = ? AND t.withdrawn = 0 AND t.uses_left > 0",
                    (member.id,),
                )
                self._db.execute(
                    "UPDATE tokens SET withdrawn = 1 WHERE name = ? OR hash = (SELECT token FROM members WHERE id = ?)",
                    (member.id, member.id),
                )
                self._db.execute("UPDATE members SET state = 'removed' WHERE id = ?", (member.id,))
            for serial in revoked:
                self._holders.pop(serial, None)
        return Removal(serials=revoked, line_withdrawn=bool(shared))

    def seen(self, id: WorkerId, *, now: float) -> None:
        self._db.execute("UPDATE members SET last_seen = ? WHERE id = ?", (now, id))

    def members(self) -> tuple[MemberRow, ...]:
        """All of them, removed ones too, by id."""
        rows = self._db.query("SELECT id, role, state, added, last_seen FROM members ORDER BY id")
        return tuple(map(_member_row, rows))

    # Within a transaction

    def _valid_token(self, token: str, now: float) -> tuple[str, str, str, int]:
        """`(hash, role, name, uses_left)`. Every hash is compared in constant time, whichever matches."""
        given = _hash(token)
        found: Any = None
        for row in self._db.query("SELECT hash, role, name, uses_left, expires, withdrawn FROM tokens"):
            if hmac.compare_digest(str(row[0]), given):
                found = row
        if found is None:
            raise NotAdmitted(
                "this join line is not one of this coordinator; copy the whole line, or ask for a new one"
            )
        hash, role, name, uses_left, expires, withdrawn = found
        if withdrawn:
            raise NotAdmitted("this join line was withdrawn; ask for a new one (`potluck invite`)")
        if now >= expires:
            hours = (now - expires) / 3600.0
            raise NotAdmitted(f"this join line expired {hours:.1f} hours ago; ask for a new one (`potluck invite`)")
        return str(hash), str(role), str(name), int(uses_left)

    def _member(self, id: str) -> MemberRow | None:
        rows = self._db.query("SELECT id, role, state, added, last_seen FROM members WHERE id = ?", (id,))
        return _member_row(rows[0]) if rows else None

    def _member_by_key(self, key: str) -> MemberRow | None:
        rows = self._db.query(
            "SELECT m.id, m.role, m.state, m.added, m.last_seen FROM certificates c JOIN members m ON m.id = c.member "
            "WHERE c.key = ? AND c.revoked = 0 AND m.state = 'active'",
            (key,),
        )
        return _member_row(rows[0]) if rows else None

    def _new_id(self, wanted: str, role: str) -> WorkerId:
        """A readable id that was never used before: `anna`, then `anna-2`, `anna-3`."""
        base = clean_name(wanted) or role
        number = self._next_number.get(base, 1)
        while True:
            id = base if number == 1 else f"{base}-{number}"
            number += 1
            open_invite = self._db.query(
                "SELECT 1 FROM tokens WHERE name = ? AND withdrawn = 0 AND uses_left > 0", (id,)
            )
            if self._member(id) is None and not open_invite:
                self._next_number[base] = number
                return WorkerId(id)

    def _write_member(self, id: WorkerId, role: str, token: str, now: float) -> None:
        self._db.execute(
            "INSERT INTO members VALUES (?, ?, 'active', ?, ?, 0) "
            "ON CONFLICT (id) DO UPDATE SET role = excluded.role, state = 'active', token = excluded.token",
            (id, role, token, now),
        )

    def _write_certificate(self, id: WorkerId, certificate: CertificateRow, now: float) -> None:
        self._db.execute("DELETE FROM certificates WHERE member = ? AND expires < ?", (id, now - _KEEP_EXPIRED_S))
        self._db.execute(
            "INSERT INTO certificates VALUES (?, ?, ?, ?, 0)",
            (f"{certificate.serial:x}", id, certificate.key, certificate.expires),
        )

    def _revoke(self, id: WorkerId) -> tuple[int, ...]:
        rows = self._db.query("SELECT serial FROM certificates WHERE member = ? AND revoked = 0", (id,))
        self._db.execute("UPDATE certificates SET revoked = 1 WHERE member = ?", (id,))
        return tuple(int(str(serial), 16) for (serial,) in rows)

    def _names(self) -> str:
        rows = self._db.query("SELECT id FROM members WHERE state = 'active' ORDER BY id LIMIT 21")
        names = [str(id) for (id,) in rows]
        return ", ".join(names[:20]) + (" and more" if len(names) > 20 else "") if names else "none yet"

    def _remember(self, id: WorkerId, role: str, serial: int, revoked: tuple[int, ...]) -> None:
        for old in revoked:
            self._holders.pop(old, None)
        self._holders[serial] = (id, role)


def clean_name(wanted: str) -> str:
    """What a machine calls itself, made fit for an id; "" if nothing is left."""
    text = re.sub(r"[^a-z0-9._-]+", "-", wanted[:200].lower())
    return text.strip("-._")[: MAX_NAME_CHARACTERS - 8].strip("-._")


def _hash(token: str) -> str:
    return hashlib.sha256(token.strip().lower().encode()).hexdigest()


def _member_row(row: Any) -> MemberRow:
    id, role, state, added, last_seen = row
    return MemberRow(
        id=WorkerId(str(id)), role=str(role), state=str(state), added=float(added), last_seen=float(last_seen)
    )
