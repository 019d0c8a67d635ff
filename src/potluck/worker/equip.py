"""Getting ready for a run: its folder, its data, its model, and the runner that ties them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from potluck.clock import Clock, Executor
from potluck.data.config import ReadOptions
from potluck.storage.digest import check_digest
from potluck.strategies.registry import install_tasks
from potluck.strategies.run import RunSpec
from potluck.worker.base import fetch_base
from potluck.worker.canaries import CanaryWatch
from potluck.worker.gate import Gate
from potluck.worker.hollow import HollowTrainer
from potluck.worker.link import Link
from potluck.worker.pieces import Pieces
from potluck.worker.private_training import PrivateTraining
from potluck.worker.replica import TorchReplica
from potluck.worker.runner import Runner
from potluck.worker.share import MachineShare
from potluck.worker.sources import prepare_sources
from potluck.worker.state import RunFolder
from potluck.worker.trainer import Trainer


async def equip(
    spec: RunSpec,
    link: Link,
    *,
    folder: Path,
    device: str,
    clock: Clock,
    compute: Executor,
    files: Executor,
    note: Callable[[str], None],
    told: Callable[[str], None] = lambda _: None,
    data: Sequence[Path] = (),
    max_memory_bytes: int = 0,
    piece_memory_bytes: int = 1 << 30,
    share_dir: Path | None = None,
    base_share_dir: Path | None = None,
    num_threads: int | None = None,
    gate: Gate | None = None,
    make: Callable[..., Runner] = Runner,
) -> Runner:
    """Everything a worker needs before its first task. DataError, ModelError or ResourceError if it cannot be had.

    ConnectionLost where the link breaks before that: what was fetched is found again the next time. In a run with
    privacy what there is to note is for the owner alone: it may tell of records.
    """
    note = note if spec.privacy is None else told
    run_folder = await files.run(RunFolder, folder / "runs" / spec.run_id)
    if spec.adapter is not None:
        await files.run(run_folder.keep_description, spec.model_dump_json())
    tokenizer = None
    if spec.tokenizer_object:
        digest = check_digest(spec.tokenizer_object)
        await link.fetch_once(digest, run_folder.objects, files)
        tokenizer = await files.run(run_folder.objects.path(digest).read_bytes)
    share, base_share = (
        MachineShare(shared / spec.run_id, clock, files) if shared else None
        for shared in (share_dir, base_share_dir or share_dir)
    )

    def build(base: Sequence[Path]) -> Trainer | HollowTrainer:
        install_tasks(spec.strategy)
        if not spec.devices_hold_model:
            return HollowTrainer()
        replica = TorchReplica(
            spec, device=device, num_threads=num_threads, max_memory_bytes=max_memory_bytes, base=base, private=private
        )
        return Trainer(
            replica, run_folder, note, now=clock.now, snapshot_every_steps=spec.snapshot_every_steps,
            batch_size=spec.inner.batch_size, canaries=canaries,
        )  # fmt: skip

    sources = await files.run(
        lambda: prepare_sources(
            spec, run_folder.objects, data=data, cache_dir=run_folder.root / "data", tokenizer=tokenizer, told=told
        )
    )
    gate = gate or Gate()
    gate.admit_data(sources.own)
    canaries: CanaryWatch | None = None
    if sources.own is not None and (wanted := gate.policy.canaries) is not None:
        own, options = sources.own, ReadOptions.model_validate(spec.data_options)
        canaries = await files.run(lambda: CanaryWatch.open(own, wanted, options, run_folder.root, told))
        sources.canaries = canaries.canaries
    num_records = sources.own.num_sequences if sources.own is not None else 0
    private = await files.run(
        lambda: PrivateTraining.open(spec, folder, num_records=num_records, has_begun=run_folder.has_states)
    )
    if private is not None:
        told(f"{private.sentence()}; the run may take {private.num_steps_left:,} more")
    if sources.own is not None and sources.own.report.is_flawed:
        for where in sources.own.report.skipped:
            told(f"skipped {where.file}:{where.line}: {where.reason}")  # the place is for the owner only
        note(sources.own.report.sentence())
    base: list[Path] = []
    if spec.base is not None:
        told(f"fetching what is not here yet of the model below the adapters, {spec.base.num_bytes:,} bytes")
        base = await fetch_base(spec.base, link, run_folder.objects, base_share, files, note)
    trainer = await compute.run(build, base)
    pieces = (
        Pieces(compute=compute, clock=clock, note=note, limit_bytes=piece_memory_bytes) if gate.lets_pieces else None
    )
    runner = make(
        spec=spec, folder=run_folder, trainer=trainer, sources=sources, link=link, clock=clock, compute=compute,
        files=files, note=note, share=share, pieces=pieces, gate=gate,
    )  # fmt: skip
    await runner.restore()
    return runner
