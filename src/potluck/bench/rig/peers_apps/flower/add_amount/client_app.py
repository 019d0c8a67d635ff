"""Adds a constant to every array."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"].to_numpy_ndarrays()
    added = [array + np.float32(0.5) for array in arrays]
    content = RecordDict({"arrays": ArrayRecord(added), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
