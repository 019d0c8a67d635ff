import torch

from potluck.bench.worker import Workload, _plain_steps, _replica_steps, bench_worker
from potluck.optim.inner import InnerConfig

tiny = Workload(n_layer=1, n_embd=32, vocab_size=64, seq_len=16, batch_size=2)


def test_figures_carry_their_units_and_agree_with_each_other() -> None:
    figures = bench_worker(num_pairs=3, steps_per_block=2, device="cpu", workloads={"": tiny, "again_": tiny})
    assert set(figures) == {
        "num_threads", *(
            prefix + name for prefix in ("", "again_") for name in (
                "replica_tokens_per_s", "plain_tokens_per_s", "ratio", "ratio_lowest", "ratio_highest", "num_pairs",
            )
        ),
    }  # fmt: skip
    assert figures["ratio_lowest"] <= figures["ratio"] <= figures["ratio_highest"]
    assert figures["plain_tokens_per_s"] > 0


def test_both_do_the_same_steps() -> None:
    inner = InnerConfig(batch_size=2)
    batches = [torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    make = (tiny, inner, torch.device("cpu"), "fp32", batches)
    replica, plain = _replica_steps(*make), _plain_steps(*make)
    assert [replica().loss for _ in range(3)] == [plain() for _ in range(3)]
