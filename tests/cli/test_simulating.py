"""`potluck simulate`: figures that add up, the same each time, and mistakes in one sentence."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.simulator.fleet_files import load_fleet, shipped_fleets
from potluck.types.errors import PotluckError, RecipeError

small = ["stdlib-gpt", "--fleet", "home", "--set", "budget.tokens=200_000", "--json"]


def simulate(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def without_real_time(report: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in report.items() if key != "real_s"}


def test_the_figures_add_up_and_are_the_same_each_time(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    report = simulate(*small, "--seed", "4", "--picture", str(picture))
    assert without_real_time(simulate(*small, "--seed", "4")) == without_real_time(report)
    devices = report["devices"]
    assert isinstance(devices, dict) and len(devices) == 4
    assert sum(d["tokens"] for d in devices.values()) == report["tokens"] >= 200_000
    assert sum(d["up_bytes"] for d in devices.values()) == report["up_bytes"] > 0
    for each in devices.values():
        total = each["compute_share"] * report["seconds"] + each["send_s"] + each["receive_s"] + each["wait_s"]
        assert total == pytest.approx(report["seconds"], rel=0.02)
    drawn = ElementTree.parse(picture).getroot()
    names = [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert set(devices) <= set(names)


def test_another_seed_draws_other_machines() -> None:
    assert simulate(*small, "--seed", "4")["devices"] != simulate(*small, "--seed", "5")["devices"]


def test_faults_make_a_run_longer() -> None:
    calm, wild = simulate(*small, "--seed", "1"), simulate(*small, "--seed", "1", "--faults", "60")
    assert float(str(wild["seconds"])) > float(str(calm["seconds"]))


def test_fuzz_says_what_it_played() -> None:
    found = simulate("--fuzz", "3", "--seed", "11", "--json")
    assert found["seeds"] == 3 and found["violations"] == []


@pytest.mark.parametrize("name", list(shipped_fleets()))
def test_shipped_fleets_load(name: str) -> None:
    fleet = load_fleet(name)
    assert fleet.num_devices == {"home": 4, "campus": 42, "hospitals": 5, "volunteers": 4000}[name]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[devices]]\nname = "a"\ngflops = [3, 1]\n', "devices[0].gflops: 3 to 1 is no range"),
        ('[[devices]]\nname = "a"\ngflop = 3\n', "devices[0].gflop is not a key; did you mean gflops?"),
        ('[[devices]]\nname = "a"\n', "devices[0].gflops is missing"),
        ("devices = []\n", "devices"),
        ("[[devices]\n", "is not TOML"),
        (
            '[[devices]]\nname = "a"\ngflops = 1\ncount = 200000\n',
            "devices[0].count is 200000 and must be at most 100000",
        ),
        ('[[devices]]\nname = "a"\ngflops = 1\n[[devices]]\nname = "a"\ngflops = 2\n', "two classes are named a"),
        ('[[devices]]\nname = "a"\ngflops = 1\nup_mbit_s = nan\n', "devices[0].up_mbit_s"),
    ],
)
def test_a_fleet_file_that_is_wrong_is_told_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_fleet(str(path))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(RecipeError, match="did you mean volunteers"):
        load_fleet("volunters")
    with pytest.raises(PotluckError, match="say which RECIPE to simulate"):
        CliRunner().invoke(app, ["simulate"], catch_exceptions=False)
