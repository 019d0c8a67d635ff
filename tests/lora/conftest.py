"""Property tests here give the same examples each time, and a busy machine does not fail them."""

from hypothesis import settings

settings.register_profile("lora", deadline=None, derandomize=True, database=None)
settings.load_profile("lora")
