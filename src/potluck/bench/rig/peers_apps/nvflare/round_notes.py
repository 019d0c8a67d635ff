"""Notes when each round's aggregation ended and what it gave; runs in the server's job process."""

import json
import time

from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.np.constants import NPConstants


class RoundNotes(FLComponent):
    def __init__(self, record: str):
        super().__init__()
        self.record = record
        self.num_ended = 0

    def handle_event(self, event_type, fl_ctx):
        at = time.monotonic()
        if event_type == AppEventType.ROUND_STARTED and self.num_ended == 0:
            self.note({"round": 0, "at": at})
        elif event_type == AppEventType.AFTER_AGGREGATION:
            self.num_ended += 1
            result = fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT)
            vector = result.params[NPConstants.NUMPY_KEY]
            self.note({"round": self.num_ended, "at": at, "first": float(vector.flat[0])})

    def note(self, facts):
        with open(self.record, "a") as record:
            record.write(json.dumps(facts) + "\n")
