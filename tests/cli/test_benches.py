from collections.abc import Callable, Sequence
from typing import Any

import pytest

from potluck.cli import benches
from potluck.cli.benches import parse_options, run_bench
from potluck.types.errors import PotluckError

whole = "a whole number of 1 or more"


def bench_sample(
    *, params: int = 1, down: str = "fp32", num_threads: int | None = None, lr: float = 0.1, floor: bool = True,
    names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    del params, down, num_threads, lr, floor, names


def parse(*arguments: str) -> dict[str, Any]:
    return parse_options("sample", bench_sample, arguments)


def test_options_go_to_the_keyword_parameters_by_their_types() -> None:
    given = ("--params", "4_000", "--down=bf16", "--num-threads", "2", "--lr", "1e-3", "--floor", "false")
    assert parse(*given) == {"params": 4000, "down": "bf16", "num_threads": 2, "lr": 0.001, "floor": False}
    assert parse() == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--parms", "3"), "bench sample has no option --parms; did you mean --params?"),
        (("params", "3"), "bench sample has no option params; did you mean --params?"),
        (
            ("--names", "a"),
            "bench sample has no option --names; it has --params, --down, --num-threads, --lr, --floor",
        ),
        (
            ("--params", "many"),
            f"--params is 'many' and not {whole}; give {whole}",
        ),
        (("--params=2.5",), f"--params is '2.5' and not {whole}; give {whole}"),
        (("--params", "-3"), f"--params is '-3' and not {whole}; give {whole}"),
        (
            ("--params", "9" * 30),
            f"--params is '{'9' * 30}' and not {whole}; give {whole}",
        ),
        (("--lr", "nan"), "--lr is 'nan' and not a number above 0; give a number above 0"),
        (("--floor", "0"), "--floor is '0' and not true or false; give true or false"),
        (("--down",), "--down has no value; give one after it"),
    ],
)
def test_mistakes_name_the_option_and_the_remedy(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(PotluckError) as raised:
        parse(*arguments)
    assert str(raised.value) == sentence


def test_a_long_bench_says_how_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench_long(*, steps: int = 2, told: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        for step in range(steps):
            told(f"step {step}")
        return {"steps": steps}

    def bench_short() -> dict[str, Any]:
        return {}

    heard: list[str] = []
    monkeypatch.setattr(benches, "bench_function", {"long": bench_long, "short": bench_short}.__getitem__)
    assert run_bench("long", ["--steps", "3"], told=heard.append)["figures"] == {"steps": 3}
    assert heard == ["step 0", "step 1", "step 2"]
    assert run_bench("short", told=heard.append)["figures"] == {} and len(heard) == 3
