import json
from dataclasses import dataclass, field

from potluck.strategies.state import State
from potluck.types.params import Fragment, Params


@dataclass(frozen=True, kw_only=True)
class Rich(State):
    momentum: Params
    by_worker: dict[str, Params] = field(default_factory=dict[str, Params])
    names: tuple[str, ...] = ()


def test_a_state_survives_json() -> None:
    a, b = Params((Fragment("a", 3),)), Params((Fragment("b-0", 2), Fragment("b-1", 1)))
    state = Rich(params=a, momentum=b, round=3, tokens=7, by_worker={"w": a}, names=("x", "y"), loss=0.1)
    assert state.handles() == (a, b, a)
    assert Rich.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_every_handle_has_a_name_and_can_be_moved() -> None:
    a, b, c, d = (Params((Fragment(name, 3),)) for name in "abcd")
    state = Rich(params=a, momentum=b, by_worker={"w": c, "v": a}, names=("x",), round=2)
    assert state.named_handles() == {"params": a, "momentum": b, "by_worker-0": c, "by_worker-1": a}
    moved = state.moved({a: d, c: b})
    assert moved == Rich(params=d, momentum=b, by_worker={"w": b, "v": d}, names=("x",), round=2)


def test_a_state_written_before_a_field_was_added_takes_its_default() -> None:
    a = Params((Fragment("a", 3),))
    value = Rich(params=a, momentum=a).to_json()
    del value["names"]
    value["gone"] = 1
    assert Rich.from_json(value) == Rich(params=a, momentum=a)
