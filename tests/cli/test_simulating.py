"""`potluck simulate`: figures that add up, the same each time, and mistakes in one sentence."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.cli.simulating_tiles import parse_sizes
from potluck.simulator.fleet_files import load_fleet, shipped_fleets
from potluck.types.errors import PotluckError, RecipeError, RunStopped

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


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_fuzz_says_what_it_played() -> None:
    """A process that was killed in a fuzzed world closes nothing."""
    found = simulate("--fuzz", "3", "--seed", "11", "--json")
    assert found["seeds"] == 3 and found["violations"] == []


@pytest.mark.parametrize("name", list(shipped_fleets()))
def test_shipped_fleets_load(name: str) -> None:
    fleet = load_fleet(name)
    sizes = {"home": 4, "campus": 42, "five_sites": 8, "hospitals": 5, "volunteers": 4000, "edge": 256}
    assert fleet.num_devices == sizes[name]


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
        ('[[devices]]\nname = "a"\ngflops = 0\n', "devices[0].gflops: 0 is not in 0.01 to 1e+08"),
        ('[[devices]]\nname = "a"\ngflops = [1, 1e12]\n', "devices[0].gflops: 1e+12 is not in 0.01 to 1e+08"),
        ('[[devices]]\nname = "a"\ngflops = true\n', "devices[0].gflops: true and false are no quantities"),
        ('[[devices]]\nname = "a"\ngflops = 1\ncount = true\n', "devices[0].count: true and false are no quantities"),
        ('[[devices]]\nname = "a"\ngflops = 1\nup_mbit_s = 0\n', "devices[0].up_mbit_s: 0 is not in 0.01"),
        ('[[devices]]\nname = "a"\ngflops = 1\nduty = 0\n', "devices[0].duty: 0 is not in 0.01 to 1"),
        ('[[devices]]\nname = "a"\ngflops = 1\nduty = 2\n', "devices[0].duty: 2 is not in 0.01 to 1"),
    ],
)
def test_a_fleet_file_that_is_wrong_is_told_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_fleet(str(path))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


tiles_recipe = """
name = "tiny"
[model.config]
model_type = "llama"
num_hidden_layers = 2
hidden_size = 256
intermediate_size = 512
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 128
vocab_size = 512
[data]
shared = "python-stdlib"
seq_len = 128
[budget]
rounds = 1
[strategy]
name = "sub_gemm"
wire = "bf16"
least_side = 16
inner = { batch_size = 4, accumulation = 2 }
"""
tiles_fleet = """
[coordinator]
compare_mbit_s = [10]
[[devices]]
name = "board"
count = 6
gflops = [5, 7]
memory_gb = 0.016
up_mbit_s = [4, 8]
down_mbit_s = [8, 80]
"""


def test_a_step_in_tiles_beside_its_baselines(tmp_path: Path) -> None:
    recipe, fleet, picture = tmp_path / "tiny.toml", tmp_path / "boards.toml", tmp_path / "charts.svg"
    recipe.write_text(tiles_recipe)
    fleet.write_text(tiles_fleet)
    given = [str(recipe), "--fleet", str(fleet), "--seed", "3", "--devices", "4"]
    report: Any = simulate(*given, "--picture", str(picture), "--json")
    linear = 2 * (2 * 256**2 + 2 * 256 * 128 + 3 * 256 * 512) + 256 * 512  # parameters of linear layers
    assert report["tokens"] == 2 * 4 * 128 and report["micro_batches"] == 2
    assert report["flops"] == 6 * linear * report["tokens"]
    assert report["a100_s"] == round(report["flops"] / (0.4 * 312e12), 3)
    cases = {(each["devices"], each["coordinator_out_gbit_s"]): each for each in report["sub_gemm"]}
    assert list(cases) == [(4, None), (4, 0.01)] and parse_sizes("8, 6,8") == [6, 8]
    for (_, link), each in cases.items():
        total = sum(p["num_weights"] * (p["first_s"] + p["later_s"]) for p in each["products"])
        assert 0 <= each["kept_share"] <= 1 and {p["num_uses"] for p in each["products"]} == {2}
        assert total == pytest.approx(each["seconds"], rel=1e-2)
        assert each["used_out_gbit_s"] <= (link or 1e9) * 1.001
        assert sum(each["binding"].values()) == pytest.approx(1, abs=0.01)
    assert cases[4, None]["seconds"] < cases[4, 0.01]["seconds"]
    fits = {(each["devices"], each["name"]): each["fits"] for each in report["baselines"]}
    assert fits == {(4, "pipeline"): True, (4, "tensor mesh"): True}
    assert [(each["devices"], each["lost"]) for each in report["recovery"]] == [(4, 1), (4, 3)]
    texts = [e.text for e in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert "sub_gemm, 0.01 Gbit/s" in texts and "tiny on boards: time of a step" in texts


def test_a_step_in_tiles_is_told_to_people(tmp_path: Path) -> None:
    recipe, fleet = tmp_path / "tiny.toml", tmp_path / "boards.toml"
    recipe.write_text(tiles_recipe)
    fleet.write_text(tiles_fleet.replace("0.016", "0.003").replace("compare_mbit_s = [10]", ""))
    done = CliRunner().invoke(app, ["simulate", str(recipe), "--fleet", str(fleet)], catch_exceptions=False)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny on boards: one step of 1.02 k tokens in 2 micro-batches, 8.05e-06 PFLOP;")
    assert any(re.match(r"6 +sub_gemm +unlimited +\d+ s", line) for line in lines)
    assert any(re.match(r"6 +pipeline +not used +\(\d+ s\)", line) for line in lines)
    assert "  pipeline with 6 devices needs" in done.stdout and "In brackets: does not run here" in done.stdout
    begins, planned = done.stderr.splitlines()
    assert begins == "planning a step of tiny on boards with 6 devices"
    assert re.fullmatch(r"after \d+ s: planned for 6 devices", planned)
    fleet.write_text(fleet.read_text().replace("[coordinator]", "[coordinator]\nup_mbit_s = 0.1"))
    done = CliRunner().invoke(app, ["simulate", str(recipe), "--fleet", str(fleet)], catch_exceptions=False)
    assert "coordinator out " in done.stdout and "egress" not in done.stdout


def test_the_help_names_every_shipped_fleet() -> None:
    shown = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "200"}).stdout
    assert [name for name in shipped_fleets() if name not in shown] == []


def test_tiles_with_mistakes_are_told_in_one_sentence(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(tiles_recipe)
    for arguments, sentence in (
        (("--devices", "8;6"), "--devices is '8;6' and must be numbers from 1 to 100,000"),
        (("--faults", "1"), "faults are not played for sub_gemm, whose recovery is computed; leave out --faults"),
        (("--fleet", "five_sites"), "leave out faults_per_hour of flaky in the fleet five_sites"),
        (("--set", "strategy.attention=true"), "set strategy.attention and strategy.checkpointing to false"),
    ):
        with pytest.raises(PotluckError, match=re.escape(sentence)):
            CliRunner().invoke(app, ["simulate", str(recipe), *arguments], catch_exceptions=False)
    with pytest.raises(PotluckError, match="the strategy is diloco; set `count` in the fleet file"):
        CliRunner().invoke(app, ["simulate", "stdlib-gpt", "--devices", "8"], catch_exceptions=False)


def test_a_run_of_many_rounds_comes_to_its_end() -> None:
    report = simulate("stdlib-gpt", "--fleet", "home", "--set", "budget.rounds=110", "--json")
    assert report["rounds"] == 110 and report["stopped"] == ""


def refused(*arguments: str) -> str:
    with pytest.raises(PotluckError) as found:
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    return str(found.value)


@pytest.mark.parametrize(
    "arguments", [("--fuzz", str(10**22)), ("--fuzz", "1", "--seed", str(1 << 64)), ("--fuzz", "0")]
)
def test_numbers_that_cannot_be_played_are_refused(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert done.exit_code == 2 and "Invalid value" in done.output


def test_a_place_that_no_picture_can_have_is_named_before_the_play(tmp_path: Path) -> None:
    assert refused("nothing", "--picture", str(tmp_path)).startswith(f"{tmp_path} is a folder")
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "picture.svg")
    assert refused("nothing", "--picture", place).startswith(f"{place} cannot be written")


def test_a_simulated_run_that_ends_early_ends_like_a_real_one(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[[devices]]\nname = "a"\ngflops = 1\nmemory_gb = 0.001\n')
    with pytest.raises(RunStopped) as stopped:
        simulate("stdlib-gpt", "--fleet", str(tmp_path / "fleet.toml"))
    assert "none of the 1 devices has the memory" in str(stopped.value) and stopped.value.exit_code == 11


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a folder, not a fleet file"):
        load_fleet(str(tmp_path))
    with pytest.raises(RecipeError, match="did you mean volunteers"):
        load_fleet("volunters")
    with pytest.raises(PotluckError, match="say which RECIPE to simulate"):
        CliRunner().invoke(app, ["simulate"], catch_exceptions=False)
