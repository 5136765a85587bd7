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


CHANGES = """
import pickle, subprocess, sys, typing
from skyward.shipping.pickling import pack

class Setting:
    def __init__(self, value): self.value = value
    def __reduce__(self): return "SETTING"

class Slotted(Setting):
    __slots__ = ("mark",)
    def __reduce__(self): return "SLOTTED"

SETTING, SLOTTED, Kind, MARK = Setting(1), Slotted(1), typing.NewType("Kind", int), object()

def seen():
    return SETTING.value, SLOTTED.value, Kind.__supertype__.__name__

def is_mark(value):
    return value is MARK

sent = []
def send():
    sent.append((pack(seen, what="it").data, pack(is_mark, what="it").data, pack(MARK, what="it").data))

send()
SETTING.value = SLOTTED.value = 2  # changed in place
send()
SETTING, SLOTTED, Kind, MARK = Setting(3), Slotted(3), typing.NewType("Kind", str), object()  # a cell that runs again
send()
there = '''
import pickle, sys
from skyward.shipping.pickling import unpack_call
for function, is_mark, mark in pickle.load(sys.stdin.buffer):
    print(*unpack_call(function)(), unpack_call(is_mark)(unpack_call(mark)))
'''
subprocess.run([sys.executable, "-c", there], input=pickle.dumps(sent), check=True)
"""


def test_objects_that_pickle_by_name_arrive_as_they_are_now(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHANGES)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == ["1 1 int True", "2 2 int True", "3 3 str True"]
