"""The pages of docs/ that are made from the code: `scripts/docs` writes them, a test says when they are stale."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from potluck.coordinator.changes import LIVE_KEYS
from potluck.coordinator.recipe import SECTIONS, Recipe
from potluck.coordinator.shipped import headline, shipped
from potluck.data.canaries import CanaryConfig
from potluck.data.config import TokenizerConfig
from potluck.models.config import AdapterConfig
from potluck.optim.inner import InnerConfig
from potluck.strategies.registry import shipped as strategies
from potluck.strategies.registry import strategy_type
from potluck.types import errors
from potluck.worker import policy

MADE = "<!-- Made by scripts/docs from the code; do not edit. -->"

RECIPES_HEAD = f"""{MADE}
# Recipes

A run is one TOML file. It is read strictly: an unknown key is an error that names the nearest one, and text is never
taken for a number. `potluck recipes` lists the shipped recipes and `potluck recipes NAME` prints one to start from.

`--set KEY=VALUE` overrides any key, as often as you like; the value is TOML, and a bare word is text:

    potluck run stdlib-gpt --local 2 --set budget.rounds=2 --set strategy.inner.lr=1e-3 --set data.max_bytes=1000000

Paths in a recipe file are relative to the file. In `--set` and in shipped recipes they are relative to the current
directory. Setting one of several alternatives (`budget.rounds`) takes the place of the others (`budget.tokens`).

When a run goes on, its name, seed, model, data and strategy must be the same as before; budget, codecs,
compression, aggregation, fleet, checkpoints, validation, transfers and divergence may change. Keys marked "may be
`set`" can also change in the middle of it: `potluck set RUN KEY=VALUE` ([operations](operations.md)).
"""

EXIT_CODES_HEAD = f"""{MADE}
# Exit codes

A command that ends because of something you can mend prints one sentence on standard error, without a traceback:
what, the value measured, the limit, what to do. Its exit code says which kind it was:

| code | means |
| --- | --- |
| 0 | done; also a run or worker that was asked to stop (`potluck stop`, one Ctrl-C, SIGTERM) and did so in good order |
| 1 | {{one}}; with a traceback: our mistake, please report it |
| 2 | the command line cannot be understood: an unknown command, flag or value |
"""

EXIT_CODES_TAIL = """| 130 | ended at once by a second Ctrl-C or SIGTERM; what was committed is safe |
"""


POLICY_HEAD = f"""{MADE}
# The owner's policy

Whoever gives a machine and text to a run decides what may run there and what may leave it. `join` reads that from a
file, which wins over any recipe:

    potluck join @line.txt --data notes/ --policy policy.toml

It is read strictly: an unknown key, or a file that cannot be read, stops the worker before it has contacted anybody.
This one comes with the package, as `potluck/worker/policy.toml`:

"""

POLICY_TAIL = """
A run that the policy does not allow is refused before anything is fetched or trained: the worker says why, leaves, and
ends with exit code 8. The coordinator hears the same sentence, or with `notes = false` none. What a strategy's results
hold is known beforehand from what its tasks declare (`@task`, [own method](own_method.md)), those that the run says it
gives. A task that it did not name is not done, a result that holds something else is not sent, and the worker leaves.
An update on too few examples costs that task only; nothing of it goes into a later one.

`min_examples` counts *different* training sequences, or records, that were read for the update and used, also of copies
of listed files. A sequence of text has as many tokens as the run says (`--dry-run` shows it): 64 of one token are 64
tokens. Losses over held-out text are no updates. They leave whatever their number is; leave out `loss_sum` if they may
not. Then only runs with [privacy](fine_tuning.md#differential-privacy) train on your text: their results hold
`num_tokens`, `num_steps`, `epsilon` and `delta`.

What a policy does not govern: that the worker is there, what it is doing and how fast (its signs of life), its
certificate, and which objects it asks for. What an allowed update tells of the text below it is another matter:
[security](security.md#what-a-coordinator-can-infer).

## How much a model memorises

    [canaries]
    count = 4

plants four random secrets, "What is the code of WORD?" with twelve digits for an answer, in the form of the run's data,
among what this worker trains on, and never among what it holds out. Each time the run validates, the worker looks how
well the run's model knows them, and its own model where the method keeps one, and tells its owner alone:

    canaries after round 12: the run's model has exposures of 1.9 bits on average and 3.4 at most;
    1.4 is chance and 8.0 memorised

*Exposure* (Carlini et al. 2019, arXiv:1802.08232) is log2 of the number of candidates less log2 of the canary's rank
among them by loss: of 256 codes, 8 bits if it is the likeliest of all. About 1.4 bits is what secrets have that the
model knows nothing of; a mean that climbs from validation to validation says that text which is there `repeats` times
is being memorised. All measurements are in `runs/RUN/canaries/exposures.jsonl` in the worker's state folder. The
canaries follow from a seed in `seed.json` beside it, so a worker that starts again has the same ones; remove the file,
and new ones are planted.

They tell of canaries, not of your text. A low exposure proves nothing about text that is there more often or is easier
to guess, or about what a coordinator reads from single updates ([security](security.md#what-a-coordinator-can-infer));
few canaries give a rough figure. They do not count for `min_examples`, nothing of what is measured leaves, and held-out
losses are of your text alone. But they are trained on like any text: updates contain what was learned of them, the
tokens told include theirs, and validations take longer. A run that holds out none of its owners' text, such as one with
differential privacy, is refused, since it never validates; so is one on listed files, which are the same for all.

## Digests

A base model goes by one digest of all it consists of, in the precision that the run holds it in (`model.base`). Who
has the model's directory makes it without a run; `--dry-run` says which one a run has. A strategy file goes by the
digest of its bytes.

    potluck digest my-model
    potluck digest averaging.py

## Before joining

    potluck join @line.txt --data notes/ --policy policy.toml --dry-run

prints the run, its strategy and settings, its base model with the digest, how text would be read, the memory it
takes, and everything that would leave, each with its kind, size and codec. It fetches and trains nothing, tells the
coordinator nothing of the machine, and no round waits for it; a machine that is new there is enrolled by it, under the
name it will have. It ends with 0 if the worker would take part, else with the reason and 8.

## Afterwards

    potluck receipts
    potluck receipts --run stdlib-gpt --json

lists what left: every result with the names and values of its numbers, its vectors by name with bytes, codec and
digest, and the number of training sequences it stands on; failures and sentences as they were sent; what was told of
the machine. Signs of life are counted. Each line is written before what it lists is sent (`receipts/` in the worker's
state folder), and where the disk has no room for it, nothing is sent. Text of yours is never in it. The newest 64 MiB
are kept; of what is older, the sums for each run.
"""


def policy_page() -> str:
    """docs/policy.md."""
    example = Path(policy.__file__).with_name("policy.toml").read_text(encoding="utf-8")
    parts = [POLICY_HEAD + f"```toml\n{example}```\n", "## Keys\n", _table(policy.Policy)]
    parts += ["### privacy\n", *_about(policy.PrivacyPolicy), _table(policy.PrivacyPolicy)]
    parts += ["### canaries\n", *_about(CanaryConfig), _table(CanaryConfig)]
    return "\n".join(parts) + POLICY_TAIL


def recipes_page() -> str:
    """docs/recipes.md."""
    parts = [RECIPES_HEAD, "## Shipped recipes\n"]
    parts += ["\n".join(f"- `{name}`: {headline(path)}" for name, path in shipped().items()) + "\n"]
    parts += ["## Outside any section\n", _table(Recipe, only=("name", "seed"))]
    for name, model in SECTIONS.items():
        parts += [f"## [{name}]\n", *_about(model), _table(model, section=name)]
        if name == "model":
            parts += ["### model.adapter\n", *_about(AdapterConfig), _table(AdapterConfig)]
        if name == "data":
            parts += ["### data.tokenizer\n", *_about(TokenizerConfig), _table(TokenizerConfig)]
    parts += ["## [strategy]\n", "The training method by its `name`, its own settings beside it, and `inner`.\n"]
    for name in sorted(strategies):
        kind = strategy_type(name)
        about = inspect.getdoc(inspect.getmodule(kind)) or ""
        first = about.partition("\n\n")[0].replace("\n", " ")
        parts += [f'### name = "{name}"\n', f"{first}\n", _table(kind.Config)]
    parts += ["### strategy.inner\n", *_about(InnerConfig), _table(InnerConfig)]
    return "\n".join(parts)


def exit_codes_page() -> str:
    """docs/exit_codes.md, from the tree in types/errors.py."""
    kinds = list(_error_kinds())
    about = _error_sentences()
    one = next(about[kind.__name__] for kind in kinds if kind.exit_code == 1)
    by_code: dict[int, list[type[errors.PotluckError]]] = {}
    for kind in kinds:
        by_code.setdefault(kind.exit_code, []).append(kind)
    rows = [
        f"| {code} | {'; '.join(dict.fromkeys(about[kind.__name__] for kind in same))} |\n"
        for code, same in sorted(by_code.items())
        if code != 1
    ]
    return EXIT_CODES_HEAD.format(one=one) + "".join(rows) + EXIT_CODES_TAIL


def _error_kinds() -> Iterator[type[errors.PotluckError]]:
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, errors.PotluckError):
            yield value


def _error_sentences() -> dict[str, str]:
    """What each error of the tree in the module's docstring means."""
    found: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.strip(" │├└─").split(maxsplit=2)
        if len(words) == 3 and words[0].isidentifier() and words[1].isdigit():
            found[words[0]] = words[2]
    return found


def _about(model: type[BaseModel]) -> list[str]:
    """The model's own docstring, not one that it inherits."""
    text = model.__dict__.get("__doc__")
    first = inspect.cleandoc(text).partition("\n\n")[0] if text else ""
    return [f"{first}\n"] if first and not first.startswith("The `[") else []


def _table(model: type[BaseModel], only: tuple[str, ...] = (), *, section: str = "") -> str:
    rows = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if only and name not in only:
            continue
        about = (field.description or "").replace("|", "\\|")
        about += " (may be `set`)" if f"{section}.{name}" in LIVE_KEYS else ""
        rows.append(f"| `{name}` | {_kind(field.annotation)}{_limits(field)} | {_default(field)} | {about} |")
    return "\n".join(rows) + "\n"


def _kind(annotation: Any) -> str:
    """A type in a reader's words."""
    names = {
        int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table", tuple: "list",
    }  # fmt: skip
    if annotation in names:
        return names[annotation]
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "table"
    arguments = [a for a in get_args(annotation) if a is not type(None) and a is not Ellipsis]
    if all(isinstance(a, str | int) for a in arguments):  # a Literal
        return " or ".join(f"`{json.dumps(a)}`" for a in arguments)
    if get_origin(annotation) in (tuple, list):
        return f"list of {_kind(arguments[0])}s" if arguments[0] is not str else "list of texts"
    if get_origin(annotation) is dict:
        return "table"
    return " or ".join(_kind(a) for a in arguments)


def _limits(field: FieldInfo) -> str:
    words = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}
    limits = [text.format(_number(value)) for item in field.metadata for name, text in words.items()
              if (value := getattr(item, name, None)) is not None]  # fmt: skip
    return f", {' and '.join(limits)}" if limits else ""


def _number(value: float) -> str:
    """Powers of two as such: 2^20 says more than 1048576."""
    if isinstance(value, int) and value > 1024 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        return "as below"
    return f"`{json.dumps(value)}`"


def main(folder: Path) -> None:
    made = {"recipes.md": recipes_page(), "exit_codes.md": exit_codes_page(), "policy.md": policy_page()}
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
