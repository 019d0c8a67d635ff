"""`status`, `stop`, `invite`, `remove`, `limit` and `set`: ask a running coordinator, as the operator whose identity
lies in the run's folder. To do it from another machine, join there with an operator's line and give that `--state`
folder as the run."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

from potluck.cli.runs import find_run
from potluck.coordinator.changes import set_in_folder
from potluck.coordinator.options import RESULT_FILE
from potluck.coordinator.status import operations_in_folder, progress_in_folder
from potluck.protocol import pb
from potluck.storage.ledger import MARK
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.security.identity import Identity
from potluck.types.errors import ConnectionLost, CoordinatorUnreachable

patience_s = 5.0


async def ask_status(run_name: str | None) -> dict[str, Any]:
    """The snapshot of a run that goes on."""
    reply = pb.StatusReply.FromString(await _call(run_name, "Status", pb.StatusRequest().SerializeToString()))
    snapshot: dict[str, Any] = json.loads(reply.status_json)
    return {"running": True, **snapshot}


async def last_status(run_name: str | None) -> dict[str, Any]:
    """As `ask_status`; of a run that does not go on, what its folder says of it, with `running` false."""
    try:
        return await ask_status(run_name)
    except CoordinatorUnreachable:
        folder, _ = operator_of(run_name)
        if not (folder / MARK).exists():
            raise
        known = _result(folder) or {}
        return {
            "running": False,
            "run_dir": str(folder),
            **known,
            **await asyncio.to_thread(progress_in_folder, folder),
        }


async def settings(run_name: str | None) -> list[str]:
    """What was done to a run so far, a line each."""
    folder, _ = operator_of(run_name)
    if (folder / MARK).exists():
        return await asyncio.to_thread(operations_in_folder, folder)
    return [f"round {o['round']}: {o['text']}" for o in (await ask_status(run_name))["operations"]]


async def admin(run_name: str | None, action: str, **fields: Any) -> str:
    """Do it; the coordinator's sentence, or the join line of an invitation."""
    request = pb.AdminRequest(action=action, **fields)
    return str(pb.AdminReply.FromString(await _call(run_name, "Admin", request.SerializeToString())).message)


async def change(run_name: str | None, setting: str) -> str:
    """Set `key=value`, in the run that goes on or for when it does; the sentence that says so."""
    try:
        return await admin(run_name, "set", setting=setting)
    except CoordinatorUnreachable:
        folder, identity = operator_of(run_name)
        if not (folder / MARK).exists():
            raise  # an operator's own folder: the run lies elsewhere
        said = await asyncio.to_thread(set_in_folder, folder, setting, at=time.time(), by=identity.worker_id)
        return f"{said}; {over}" if (over := _how_it_ended(folder)) else said


async def _call(run_name: str | None, method: str, request: bytes) -> bytes:
    folder, identity = operator_of(run_name)
    connection = GrpcConnection(identity.address, identity)
    try:
        return await connection.call(method, request, timeout_s=patience_s)
    except ConnectionLost as error:
        raise CoordinatorUnreachable(
            _how_it_ended(folder)
            or f"the coordinator of {folder} does not answer at {identity.address}, so the run is not going on; "
            "`potluck host` or `potluck run --resume` continues it"
        ) from error
    finally:
        await connection.close()


def _how_it_ended(folder: Path) -> str:
    """From what a run leaves in its folder at its end; "" if it has not come to one."""
    if (result := _result(folder)) is None:
        return ""
    what = f"{result['rounds']} rounds and {result['tokens']:,} tokens"
    if result["stopped"]:
        return (
            f"the run in {folder} was stopped after {what} ({result['stopped']}); "
            "`potluck host` or `potluck run --resume` continues it"
        )
    loss = "" if result["final_val_loss"] is None else f", validation loss {result['final_val_loss']:.4f}"
    return f"the run in {folder} is finished: {what}{loss}; its model is in {result['model_dir']}"


def _result(folder: Path) -> dict[str, Any] | None:
    """A `RunResult` as JSON, from the end of the process that ended last."""
    try:
        found: Any = json.loads((folder / RESULT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def operator_of(run_name: str | None) -> tuple[Path, Identity]:
    """Where we are an operator and as whom: in a run's folder, or in the state folder that joined with a line."""
    if run_name and Identity.exists(Path(run_name) / "identity"):
        return Path(run_name), Identity.load(Path(run_name) / "identity")
    folder = find_run(run_name)
    return folder, Identity.load(folder / "operator")
