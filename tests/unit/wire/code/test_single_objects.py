from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_objects_of_a_script_that_pickle_by_name_or_not_at_all_arrive_and_come_back_as_themselves() -> None:
    program = Path(__file__).with_name("single_objects.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    seen = json.loads(done.stdout)
    assert seen["wrong"] == {}
    assert seen["cases"] > 50
