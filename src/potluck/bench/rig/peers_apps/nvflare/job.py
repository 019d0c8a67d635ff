"""Writes the initial vector and a job of NVFlare's NumPy FedAvg.

job.py FOLDER NUM_PARAMS NUM_CLIENTS NUM_ROUNDS RECORD
"""

import json
import sys
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe

folder, num_params, num_clients, num_rounds, record = sys.argv[1:]
start = Path(folder).resolve() / "start.npy"
np.save(start, np.random.default_rng(0).standard_normal(int(num_params), dtype=np.float32) * np.float32(0.02))
recipe = NumpyFedAvgRecipe(
    name="add-amount", initial_ckpt=str(start), min_clients=int(num_clients), num_rounds=int(num_rounds),
    train_script="client.py",
)  # fmt: skip
recipe.add_server_file("round_notes.py")
recipe.export(folder)
path = next(Path(folder).glob("add-amount/*/config/config_fed_server.json"))
config = json.loads(path.read_text())
config["components"].append({"id": "round_notes", "path": "round_notes.RoundNotes", "args": {"record": record}})
path.write_text(json.dumps(config))
