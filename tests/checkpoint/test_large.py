"""A checkpoint of 3 GB: how much memory loading takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "load_speed" / "run.py"


@pytest.mark.slow
def test_three_gigabytes_take_little_more_memory():
    ran = subprocess.run([sys.executable, SCRIPT], check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    assert found["bytes"] > 2.9e9
    assert found["complete"]
    assert found["peak_over_bytes"] < 1.3
