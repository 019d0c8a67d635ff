"""Flower's own FedAvg; notes when each round's aggregation ended and what it gave."""

import json
import time

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class NotedFedAvg(FedAvg):
    def __init__(self, record, **settings):
        super().__init__(**settings)
        self.record = record

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 1:
            note(self.record, 0, arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        note(self.record, server_round, arrays)
        return arrays, metrics


def note(path, round_number, arrays):
    at = time.monotonic()
    first = next(iter(arrays.values())).numpy()  # the smallest array comes first
    with open(path, "a") as record:
        record.write(json.dumps({"round": round_number, "at": at, "first": float(first.flat[0])}) + "\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    shapes = [[int(size) for size in shape.split("x")] for shape in config["shapes"].split(",")]
    num_clients = config["num-clients"]
    strategy = NotedFedAvg(
        config["record"], fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape, dtype=np.float32) * np.float32(0.02) for shape in shapes]
    strategy.start(grid, ArrayRecord(arrays), num_rounds=config["num-rounds"])
