"""The `potluck` command. Each command imports what it needs when it runs, so that help answers at once.

A `PotluckError` ends a command with its one sentence on standard error and its exit code (docs/exit_codes.md);
anything else is our mistake and shows a traceback. With --json one JSON object comes last on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from potluck.types.errors import PotluckError, RunStopped

app = typer.Typer(
    name="potluck",
    help="Train and fine-tune language models across machines that belong to different people.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last on standard output.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe. Repeatable.")
]
Dir = Annotated[Path | None, typer.Option("--dir", help="Folder of the run. [default: runs/NAME]")]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A .toml file, a name from `potluck recipes`, or a run's folder.")
]
RunName = Annotated[str | None, typer.Argument(metavar="RUN", help="A run's folder or name. [default: the last used]")]
OfRun = Annotated[str | None, typer.Option("--run", help="A run's folder or name. [default: the last used]")]


def main() -> None:
    # gRPC's core prints each failed handshake and closed connection; read when it is first imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a replaced stream has no encoding of its own
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        app()
    except PotluckError as error:
        print(f"potluck: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def say(text: str) -> None:
    print(text, file=sys.stderr)


def put_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


@app.command()
def demo(
    as_json: Json = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder of the run. [default: runs/demo]")] = None,
    overrides: Set = None,
) -> None:
    """Train a small model on this machine with four workers and show what happens."""
    from potluck.cli.demo import run_demo

    result = asyncio.run(run_demo(folder, overrides or []))
    if as_json:
        put_json(result)


@app.command()
def run(
    recipe: RecipeName,
    local: Annotated[int, typer.Option("--local", min=1, help="Workers on this machine.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last committed round.")] = False,
    as_json: Json = False,
    overrides: Set = None,
    folder: Dir = None,
) -> None:
    """Run a recipe with N workers on this machine."""
    from potluck.cli.running import run_recipe
    from potluck.cli.runs import new_run
    from potluck.coordinator.recipe import load_recipe, run_folder

    loaded = load_recipe(recipe, overrides or [])
    run_dir = folder or run_folder(recipe) or Path("runs") / loaded.name
    if not resume:
        new_run(run_dir)
    result = run_recipe(loaded, run_dir, num_local=local)
    if as_json:
        put_json(result.to_json())


@app.command()
def host(
    recipe: RecipeName,
    address: Annotated[
        str, typer.Option("--address", metavar="NAME:PORT", help="Where workers reach this machine. [default: its own]")
    ] = "",
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65534, help="Port to listen on, if not that of --address; it and the next."),
    ] = 0,
    as_json: Json = False,
    overrides: Set = None,
    folder: Dir = None,
) -> None:
    """Start a run that other machines join; prints the line to paste there. Started again, it continues the run."""
    from potluck.cli.running import run_recipe
    from potluck.coordinator.recipe import load_recipe, run_folder

    loaded = load_recipe(recipe, overrides or [])
    run_dir = folder or run_folder(recipe) or Path("runs") / loaded.name
    result = run_recipe(loaded, run_dir, address=address, port=port)
    if as_json:
        put_json(result.to_json())


@app.command()
def join(
    line: Annotated[
        str,
        typer.Argument(metavar="LINE", help="The join line, a file with it, or its new HOST:PORT."),
    ],
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Text of this machine to train on. Repeatable.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda:N or mps.")] = "auto",
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder for its identity and state. [default: ~/.potluck/worker]")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name to be known by. [default: this machine's]")] = "",
    allow_strategy: Annotated[
        list[Path] | None, typer.Option("--allow-strategy", help="A strategy file that may run here. Repeatable.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", metavar="SIZE", help="Memory to use at most: 2GB.")
    ] = None,
    hours: Annotated[
        str | None, typer.Option("--hours", metavar="FROM-TO", help="Work in these hours only: 22-7.")
    ] = None,
    only_when: Annotated[
        str | None, typer.Option("--only-when", metavar="idle,plugged-in", help="Work only while this machine is so.")
    ] = None,
    max_upload: Annotated[
        str | None, typer.Option("--max-upload", metavar="RATE", help="Send no faster: 5mbit.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 for all cores.")] = 0,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="What may run here and what may leave; it wins.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and what would leave; do nothing of it.")
    ] = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Give this machine to a run, on your terms."""
    # Before torch is loaded: threads that wait by spinning would slow down whatever else runs on this machine, and are
    # several times slower themselves where they must share a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from potluck.cli.joining import parse_conditions, run_worker
    from potluck.cli.units import parse_hours, parse_memory, parse_rate
    from potluck.storage.files import cache_folder
    from potluck.worker.options import JoinOptions

    folder = state or Path.home() / ".potluck" / "worker"
    options = JoinOptions(
        link=line,
        state_dir=folder,
        name=name,
        data=tuple(data or []),
        device=device,
        num_threads=threads,
        allow_strategies=tuple(allow_strategy or []),
        policy=policy,
        max_memory_bytes=parse_memory(max_memory) if max_memory is not None else 0,
        share_dir=None if with_parent else cache_folder() / "objects",  # local workers stand for machines of their own
        base_share_dir=folder.parent / "base" if with_parent else None,  # but hold a model that is never changed once
        hours=parse_hours(hours) if hours is not None else None,
        only_when=parse_conditions(only_when) if only_when is not None else (),
        max_upload_bytes_per_s=parse_rate(max_upload) if max_upload is not None else 0.0,
    )
    if dry_run:
        from potluck.cli.looking import print_prospect

        print_prospect(options)
        return
    run_worker(options, with_parent=with_parent)


WorkerFolder = Annotated[Path | None, typer.Option("--state", help="The worker's folder. [default: ~/.potluck/worker]")]


@app.command()
def pause(state: WorkerFolder = None) -> None:
    """Let this machine's worker stop after its present step, until `potluck resume`."""
    from potluck.worker.terms import pause as pause_worker

    folder = state or Path.home() / ".potluck" / "worker"
    pause_worker(folder)
    again = f"potluck resume --state {state}" if state else "potluck resume"
    say(f"the worker of {folder} is paused; `{again}` lets it go on")


@app.command()
def resume(state: WorkerFolder = None) -> None:
    """Let this machine's worker go on after `potluck pause`."""
    from potluck.worker.terms import resume as resume_worker

    folder = state or Path.home() / ".potluck" / "worker"
    resume_worker(folder)
    say(f"the worker of {folder} may go on; if none runs, `potluck join` starts it")


@app.command()
def profile(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda:N or mps.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 for all cores.")] = 0,
    state: Annotated[
        Path | None, typer.Option("--state", help="A worker's folder, which keeps it. [default: ~/.potluck/worker]")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what was measured before.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine as a worker does when it joins."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `join`
    from potluck.cli.profiling import profile_machine, profile_text

    folder = state or Path.home() / ".potluck" / "worker"
    found = profile_machine(device=device, num_threads=threads, state_dir=folder, refresh=refresh)
    if as_json:
        put_json(found.to_json())
    else:
        print(profile_text(found), end="")


@app.command()
def receipts(
    run_name: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Of one run only: its name or id.")
    ] = None,
    state: WorkerFolder = None,
    as_json: Json = False,
) -> None:
    """On a worker: everything that left this machine."""
    from potluck.cli.receipts import receipts_json, receipts_text

    folder = state or Path.home() / ".potluck" / "worker"
    if as_json:
        put_json(receipts_json(folder, run_name))
    else:
        print(receipts_text(folder, run_name), end="")


@app.command()
def digest(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A strategy file, or a model directory.")],
) -> None:
    """Print the digest by which a policy allows a strategy file or a base model."""
    from potluck.cli.digests import digest_lines
    from potluck.cli.quiet import quiet_libraries

    quiet_libraries()
    print("\n".join(digest_lines(path)))


@app.command()
def invite(
    name: Annotated[str, typer.Argument(help="Who is invited: the member's name.")],
    run_name: OfRun = None,
    role: Annotated[str, typer.Option("--role", help="worker or operator.")] = "worker",
    valid_hours: Annotated[float, typer.Option("--valid-hours", min=0.01, help="Hours until it expires.")] = 24.0,
) -> None:
    """Print a join line for one member."""
    from potluck.cli.operator import admin

    print(asyncio.run(admin(run_name, "invite", name=name, uses=1, hours=valid_hours, role=role)))


@app.command()
def remove(name: Annotated[str, typer.Argument(help="The member's name.")], run_name: OfRun = None) -> None:
    """Revoke a member: its certificate is refused from now on."""
    from potluck.cli.operator import admin

    say(asyncio.run(admin(run_name, "remove", name=name)))


@app.command()
def status(run_name: RunName = None, as_json: Json = False) -> None:
    """Who is here, what they do, what the run waits for, how it goes."""
    from potluck.cli.operator import ask_status, last_status
    from potluck.cli.view import status_text

    if as_json:
        put_json(asyncio.run(last_status(run_name)))
    else:
        print(status_text(asyncio.run(ask_status(run_name))), end="")


@app.command()
def stop(run_name: RunName = None) -> None:
    """Checkpoint and end the run; restarting `host` or `run --resume` continues it."""
    from potluck.cli.operator import admin

    say(asyncio.run(admin(run_name, "stop")))


@app.command()
def limit(
    run_name: RunName = None,
    up: Annotated[float | None, typer.Option("--up", min=0, help="From the workers, all together.")] = None,
    down: Annotated[float | None, typer.Option("--down", min=0, help="To the workers, all together.")] = None,
    up_per_worker: Annotated[float | None, typer.Option("--up-per-worker", min=0, help="From each worker.")] = None,
    down_per_worker: Annotated[float | None, typer.Option("--down-per-worker", min=0, help="To each worker.")] = None,
) -> None:
    """Limit the transfers of a running run, in Mbit/s; 0 for no limit. Without options it prints the limits."""
    from potluck.cli.operator import admin
    from potluck.protocol import pb

    limits = pb.RateLimits(up=up, down=down, up_per_worker=up_per_worker, down_per_worker=down_per_worker)
    say(asyncio.run(admin(run_name, "limit", limits=limits)))


@app.command(name="set")
def set_key(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN] KEY=VALUE...", help="The run's folder or name, and what to change."),
    ] = None,
) -> None:
    """Change the recipe of a run that goes on or is stopped, written down for restarts. Without a key: what was set."""
    from potluck.cli.operator import change, settings

    given = arguments or []
    run_name = given.pop(0) if given and "=" not in given[0] else None
    for setting in given:
        say(asyncio.run(change(run_name, setting)))
    if not given:
        print("\n".join(asyncio.run(settings(run_name))) or "nothing was set")


@app.command()
def generate(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A model directory with its tokenizer.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")] = "def ",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", min=0.01, max=1.0, help="Share of probability drawn from.")] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="The same seed writes the same text.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda:N or mps.")] = "auto",
) -> None:
    """Let a trained model write."""
    from potluck.cli.quiet import quiet_libraries
    from potluck.models.generate import generate as write

    quiet_libraries()
    pieces = [prompt]

    def show(piece: str) -> None:
        print("".join(pieces) + piece, end="", flush=True)
        pieces.clear()

    write(
        model_dir, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
        device=device, on_text=show,
    )  # fmt: skip
    print("".join(pieces))


@app.command()
def export(
    run_name: RunName = None,
    merged: Annotated[
        Path | None, typer.Option("--merged", metavar="DIR", help="New folder for the whole model, adapters merged.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option("--adapters", metavar="DIR", help="With --state: new folder for the adapters alone.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FOLDER", help="A worker's folder: write what is its own.")
    ] = None,
) -> None:
    """Write the whole model of a run that trained adapters; on a worker, the adapters that stay there."""
    from potluck.cli.exporting import export_model

    export_model(run_name, merged=merged, adapters=adapters, state=state, say=say)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(metavar="NAME", help="The one to print.")] = None) -> None:
    """List the shipped recipes, or print one to start from."""
    from potluck.coordinator.shipped import find_shipped, headline, shipped

    if name:
        print(find_shipped(name).read_text(encoding="utf-8"), end="")
        return
    known = shipped()
    width = max(map(len, known))
    for stem, path in known.items():
        print(f"{stem:{width}}  {headline(path)}")


@app.command()
def manifest(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The files, as each worker has them.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write it.")] = Path("manifest.json"),
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Folder with a tokenizer.json, to count the tokens of text.")
    ] = None,
    token_type: Annotated[
        str, typer.Option("--token-type", help="What raw .bin files hold: uint16, uint32 or int32.")
    ] = "uint16",
) -> None:
    """List the files of a folder for `data.listed`: names, digests, sizes and tokens."""
    from potluck.cli.manifests import write_manifest

    say(write_manifest(folder, out, tokenizer=tokenizer, token_type=token_type))


@app.command()
def simulate(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A .toml file, or a name from `potluck recipes`.")
    ] = None,
    fleet: Annotated[
        str,
        typer.Option(
            "--fleet",
            metavar="FLEET",
            help="A fleet file, or home, campus, five_sites, hospitals, volunteers or edge. [default: home]",
        ),
    ] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**62, help="The same seed gives the same run.")] = 0,
    faults: Annotated[
        float,
        typer.Option("--faults", min=0, max=100, help="Faults of each machine in an hour: it dies, hangs, slows."),
    ] = 0.0,
    devices: Annotated[
        str, typer.Option("--devices", metavar="N,N", help="For sub_gemm: sizes of the fleet to compare.")
    ] = "",
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Where to write the timeline or charts, as SVG.")
    ] = None,
    fuzz: Annotated[
        int | None,
        typer.Option("--fuzz", min=1, max=10_000_000, metavar="N", help="Instead: N small runs under faults."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=256, help="Processes for --fuzz.")] = 1,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="With --fuzz: on after a violation.")] = False,
    as_json: Json = False,
    overrides: Set = None,
) -> None:
    """Play a run on a virtual fleet, with faults if asked."""
    if fuzz and (recipe or fleet or faults or picture or overrides):
        raise PotluckError("--fuzz draws its runs from seeds; leave out RECIPE, --fleet, --faults, --picture and --set")
    from potluck.cli.quiet import quiet_libraries
    from potluck.cli.simulating import report_text, run_fuzz, simulate_recipe

    quiet_libraries()
    if fuzz:
        found = run_fuzz(fuzz, first_seed=seed, num_jobs=jobs, keep_going=keep_going)
        if as_json:
            put_json(found)
        return
    if recipe is None:
        raise PotluckError(
            "say which RECIPE to simulate, such as `potluck simulate stdlib-gpt`, or how many with --fuzz"
        )
    report = simulate_recipe(
        recipe,
        fleet or "home",
        seed=seed,
        faults_per_hour=faults,
        sizes=devices,
        picture=picture,
        overrides=overrides or [],
    )
    if as_json:
        put_json(report)
    else:
        print(report_text(report), end="")
    if report.get("stopped"):
        raise RunStopped(f"the simulated run ended early: {report['stopped']}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one; without it they are listed.")] = None,
    as_json: Json = False,
) -> None:
    """Measure Potluck itself, beside its peers. A bench may have options of its own: `bench round --workers 4`."""
    from potluck.cli.benches import list_benches, run_bench

    if name is None:
        known = list_benches()
        width = max(map(len, known))
        print("\n".join(f"{bench:{width}}  {about}" for bench, about in known.items()))
        return
    report = run_bench(name, context.args, told=say)
    if as_json:
        put_json(report)
    else:
        for figure, value in report["figures"].items():
            print(f"{figure} = {value}")


@app.command()
def test(file: Annotated[Path, typer.Argument(metavar="FILE", help="Your strategy, such as my_method.py.")]) -> None:
    """Run the contract tests on a strategy of your own."""
    from potluck.cli.contract import test_file

    test_file(file)
