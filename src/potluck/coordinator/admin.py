"""What an operator may ask of a running coordinator: stop, invite, remove, limit, set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from potluck.clock import Clock, Executor
from potluck.coordinator.changes import Changes
from potluck.coordinator.core import Coordinator
from potluck.coordinator.transfer import changed, sentence
from potluck.protocol import parse, pb
from potluck.storage.members import Members
from potluck.transport.connection import Peer
from potluck.transport.security.link import JoinLink
from potluck.types.errors import RecipeError, Refused
from potluck.types.ids import WorkerId

MAX_SETTING_LENGTH = 1000
stopped_by_operator = "stopped by its operator"


class Admin:
    """Answers the call Admin. `link` is the run's own join line: invitations name the same address."""

    def __init__(
        self, run: Coordinator, members: Members, clock: Clock, executor: Executor, *, link: JoinLink,
        drop: Callable[[WorkerId], object], changes: Changes | None = None,
    ) -> None:  # fmt: skip
        self._run, self._members, self._changes, self._clock, self._executor = run, members, changes, clock, executor
        self._link, self._drop = link, drop

    async def handle(self, peer: Peer, data: bytes) -> bytes:
        request = parse(pb.AdminRequest, data)
        match request.action:
            case "stop":
                self._run.stop(stopped_by_operator)
                message = "stopping; the run continues with `potluck host` or `potluck run --resume`"
            case "invite":
                message = await self._invite(request)
            case "remove":
                message = await self._remove(request.name)
            case "limit":
                message = self._limit(request.limits)
            case "set":
                message = await self._set(request.setting, by=peer.id)
            case _:
                raise Refused(f"the coordinator does not know the action {request.action[:40]!r}")
        return pb.AdminReply(message=message).SerializeToString()

    async def _invite(self, request: pb.AdminRequest) -> str:
        role = request.role or "worker"
        token = await self._executor.run(
            lambda: self._members.invite(
                now=self._clock.time(),
                name=request.name or None,
                uses=request.uses or 1,
                hours=request.hours or 24.0,
                role=role,
            )
        )
        link = JoinLink(host=self._link.host, port=self._link.port, token=token, pin=self._link.pin)
        return link.format()

    def _limit(self, request: pb.RateLimits) -> str:
        """The limits of transfers from now on; a request that changes none tells them."""
        limits = changed(self._run.pacer.limits, request)
        if limits != self._run.pacer.limits:
            self._run.pacer.limit(limits)
            self._run.tell("limits", sentence(limits), **asdict(limits))
        return sentence(limits)

    async def _set(self, setting: str, *, by: WorkerId) -> str:
        if len(setting) > MAX_SETTING_LENGTH:
            raise Refused(f"a change of {len(setting)} characters is too long; {MAX_SETTING_LENGTH} are allowed")
        if self._changes is None:
            raise Refused("this run was not started from a recipe, so there is nothing to set")
        try:
            return await self._changes.set(self._run, setting, by=by)
        except RecipeError as error:
            raise Refused(str(error)) from error

    async def _remove(self, name: str) -> str:
        removal = await self._executor.run(self._members.remove, name)
        self._drop(WorkerId(name))
        member = self._run.roster.members.get(WorkerId(name))
        if member is not None:
            self._run.roster.leave(member)
        self._run.tell("left", f"{name} was removed", worker=name, reason="removed by the operator")
        line = "; the shared join line no longer works, use `potluck invite`" if removal.line_withdrawn else ""
        return f"{name} is removed and its certificates are revoked{line}"
