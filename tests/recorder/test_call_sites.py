"""What torch warns of in the engine is the job's to filter, as it is without us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The first call of the engine starts the session, the second finds it there.
JOB = """
import warnings, torch
warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="torch")
for _ in range(2):
    x = torch.ones(2, requires_grad=True)
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            (x - 1).sqrt().mul(0.0).sum().backward()
    except RuntimeError as error:
        print(error)
"""


def test_warning_of_the_engine_is_filtered_by_the_module_that_calls_it(tmp_path: Path) -> None:
    def said(run: str) -> tuple[int, str, str]:
        environment = os.environ | {"GRADTRACE_DIR": run, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", JOB],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.returncode, done.stdout, done.stderr

    unrecorded = said("")
    assert unrecorded[0] == 0 and unrecorded[1].count("SqrtBackward0") == 2
    assert said(str(tmp_path / "run")) == unrecorded
    assert list((tmp_path / "run" / "backward_passes").rglob("*.parquet"))
