"""Adds a constant to the vector, through NVFlare's Client API."""

import numpy as np
import nvflare.client as flare
from nvflare.app_common.np.constants import NPConstants

flare.init()
while flare.is_running():
    model = flare.receive()
    if model is None:
        break
    added = model.params[NPConstants.NUMPY_KEY] + np.float32(0.5)
    flare.send(flare.FLModel(params={NPConstants.NUMPY_KEY: added}, params_type=flare.ParamsType.FULL))
