import pytest
import torch

from potluck.models.device import Hardware, choose_device, choose_precision, describe, precisions
from potluck.types.errors import ResourceError
from potluck.types.profile import DeviceProfile


class Machine(Hardware):
    """A machine as it could be."""

    def __init__(self, *, cuda_free: tuple[int, ...] = (), mps: bool = False, bf16: bool = True, free: int = 7) -> None:
        self._cuda_free, self._mps, self._bf16, self._memory = cuda_free, mps, bf16, (free, 1 << 40)

    def num_cuda(self) -> int:
        return len(self._cuda_free)

    def has_mps(self) -> bool:
        return self._mps

    def cuda_name(self, index: int) -> str:
        return f"card {index}"

    def cuda_memory(self, index: int) -> tuple[int, int]:
        return self._cuda_free[index], 1 << 34

    def mps_memory(self) -> tuple[int, int]:
        return 5, 6

    def memory(self) -> tuple[int, int]:
        return self._memory

    def cpu_name(self) -> str:
        return "a processor"

    def num_cores(self) -> int:
        return 12

    def cuda_has_bf16(self, index: int) -> bool:
        return self._bf16

    def cpu_has_bf16(self) -> bool:
        return self._bf16

    def mps_has_bf16(self) -> bool:
        return self._bf16


plain, laptop, server = Machine(), Machine(mps=True), Machine(cuda_free=(10, 30, 30))


@pytest.mark.parametrize(
    ("asked", "machine", "expected"),
    [
        ("auto", plain, "cpu"),
        ("auto", laptop, "mps"),
        ("auto", server, "cuda:1"),  # most free memory, the first of equals
        ("cpu", server, "cpu"),
        ("cuda", server, "cuda:0"),
        ("CUDA:2", server, "cuda:2"),
        ("mps", laptop, "mps"),
    ],
)
def test_the_device_that_was_asked_for(asked: str, machine: Machine, expected: str) -> None:
    assert str(choose_device(asked, hardware=machine)) == expected


@pytest.mark.parametrize(
    ("asked", "machine", "says"),
    [
        ("cuda:3", server, "has 3 CUDA devices; use cuda:0 to cuda:2"),
        ("cuda", plain, "has no CUDA device"),
        ("mps", server, "no Apple GPU"),
        ("cuda:x", server, "is not a device"),
        ("cuda:-1", server, "is not a device"),
        ("cuda:", server, "is not a device"),
        ("auto:1", server, "is not a device"),
        ("tpu", server, "use auto, cpu, cuda:N or mps"),
    ],
)
def test_a_device_that_is_not_here_is_one_sentence(asked: str, machine: Machine, says: str) -> None:
    with pytest.raises(ResourceError, match=says):
        choose_device(asked, hardware=machine)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "mps"])
def test_precision_is_the_recipes_where_the_device_does_it_well(device: str) -> None:
    able, unable = Machine(cuda_free=(1,), mps=True), Machine(cuda_free=(1,), mps=True, bf16=False)
    assert choose_precision("bf16-mixed", device, hardware=able).autocast == torch.bfloat16
    fallback = choose_precision("bf16-mixed", device, hardware=unable)
    assert (fallback.name, fallback.autocast) == ("fp32", None)
    assert f"{device} has no bfloat16" in fallback.reason
    assert choose_precision("fp32", device, hardware=able).autocast is None
    assert precisions(device, hardware=able) == ("fp32", "bf16-mixed")
    assert precisions(device, hardware=unable) == ("fp32",)


def test_profiles_tell_the_memory_that_the_device_computes_in() -> None:
    gpu = describe("cuda:1", hardware=server)
    assert (gpu.device, gpu.device_name, gpu.free_memory_bytes, gpu.total_memory_bytes) == (
        "cuda:1",
        "card 1",
        30,
        1 << 34,
    )
    mac = describe("mps", hardware=laptop)
    assert (mac.device_name, mac.free_memory_bytes, mac.total_memory_bytes) == ("Apple GPU (a processor)", 5, 6)
    cpu = describe("cpu", 3, hardware=plain)
    assert (cpu.num_threads, cpu.free_memory_bytes, cpu.total_memory_bytes) == (3, 7, 1 << 40)
    assert describe("cpu", hardware=plain).num_threads == 12


def test_this_machine_can_be_described_and_told() -> None:
    profile = describe(choose_device("cpu"))
    assert profile.num_threads >= 1
    assert 0 < profile.free_memory_bytes <= profile.total_memory_bytes
    assert "fp32" in profile.precisions
    assert profile.device_name
    assert DeviceProfile.from_json(profile.to_json()) == profile
