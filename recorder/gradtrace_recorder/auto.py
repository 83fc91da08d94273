"""`import gradtrace_recorder.auto` starts recording where TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from it."""

import torch  # noqa: F401  # torch calls the same at the end of its import, unless it is told not to

from gradtrace_recorder.bootstrap import start_from_env

start_from_env()
