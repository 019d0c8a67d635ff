"""`join --dry-run`: what a run would do with this machine and what would leave it, in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from potluck.cli.joining import told
from potluck.cli.units import format_bytes
from potluck.data.config import ReadOptions
from potluck.strategies.run import RunSpec
from potluck.types.errors import OwnerRefused
from potluck.types.untrusted import printable
from potluck.worker.join import look
from potluck.worker.options import JoinOptions
from potluck.worker.prospect import Outgoing, Prospect


def print_prospect(options: JoinOptions) -> None:
    """OwnerRefused with every reason why the worker would not take part."""
    found = asyncio.run(look(options, told=told))
    print(prospect_text(found), end="")
    if found.objections:
        raise OwnerRefused(f"this worker would not take part: {'; '.join(found.objections)}")


def prospect_text(found: Prospect) -> str:
    rows = [*_run_rows(found), ("", ""), *_leaving_rows(found)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {printable(value, 1000)}".rstrip() for name, value in rows]
    end = "" if found.objections else "\nNothing was joined, fetched or trained. This worker would take part.\n"
    return "\n".join(lines) + "\n" + end


def _run_rows(found: Prospect) -> Iterator[tuple[str, str]]:
    spec = found.spec
    inner = spec.inner
    yield "run", f"{spec.name} ({spec.run_id})"
    yield "strategy", f"{spec.strategy} {spec.strategy_digest}".strip()
    yield "trains", _trained(found)
    if spec.base is not None:
        objects = f"{len(spec.base.objects)} objects, {format_bytes(spec.base.num_bytes)}"
        yield "base model", f"{spec.base.digest} in {spec.base.precision} ({objects})"
    yield "precision", found.precision
    yield "steps", f"{inner.optimizer}, lr {inner.lr:g}, {inner.sequences_per_step} sequences of {spec.seq_len} tokens"
    yield "data", _data(spec)
    if (privacy := spec.privacy) is not None:
        yield (
            "privacy",
            f"of each record: epsilon {privacy.max_epsilon:g} at most of the whole run, delta {privacy.delta:g}",
        )
    memory = (
        f"{format_bytes(found.memory_bytes)} at the peak of a round"
        if found.memory_bytes
        else "what --max-memory gives"
    )
    yield "memory", memory
    yield "sign of life", f"every {spec.heartbeat_s:g} s: what it does, how many steps and tokens a second"


def _trained(found: Prospect) -> str:
    model = str(found.spec.model_config_json.get("model_type", "a model"))
    if not found.spec.devices_hold_model:
        return f"{model}, on the coordinator: devices compute products for it"
    if (adapter := found.spec.adapter) is not None:
        return f"{found.num_params:,} parameters of adapters of rank {adapter.rank} on {model}"
    return f"all {found.num_params:,} parameters of {model}"


def _data(spec: RunSpec) -> str:
    if spec.data_access == "shared":
        return "dealt by the coordinator"
    whose = "your own text" if spec.data_access == "private" else "your copies of listed files"
    try:
        options = ReadOptions.model_validate(spec.data_options)
    except ValueError:
        return f"{whose}, read in a way that this version does not know"
    names = dict(options.fields) if options.rows_per_record else {"text": options.text_field}
    named = "".join(f", {key} in field {name!r}" for key, name in names.items() if key != name)
    return f"{whose}, read as {options.format}{named}; held out: {options.validation:.0%}"


def _leaving_rows(found: Prospect) -> Iterator[tuple[str, str]]:
    yield "would leave", "with results:"
    for each in found.outgoing:
        yield "", _outgoing(each)
    yield "", f"of this machine: {', '.join(found.profile) or 'nothing'}"
    yield "", f"sentences on skipped records and failed tasks: {'yes' if found.tells_notes else 'no'}"


def _outgoing(each: Outgoing) -> str:
    size = f", at most {format_bytes(each.num_bytes)}" if each.num_bytes else ""
    codec = f" in {each.codec}, unless a round chooses another codec" if each.codec else ""
    return f"{each.name} ({each.kind}{size}{codec}) of {', '.join(each.tasks)}"
