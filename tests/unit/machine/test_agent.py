from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest
from paramiko import Message

from skyward.machine.ssh_user_keys import Agent

LISTED, SIGN, SIGNED = 12, 13, 14


class Handler(socketserver.StreamRequestHandler):
    """Agent with two keys, which signs with the first one only once it is told to."""

    go_on: threading.Event

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while length := int.from_bytes(self.rfile.read(4), "big"):
                answer = self._answer(Message(self.rfile.read(length))).asbytes()
                self.request.sendall(len(answer).to_bytes(4, "big") + answer)

    def _answer(self, request: Message) -> Message:
        answer = Message()
        if request.get_byte() != bytes([SIGN]):
            answer.add_byte(bytes([LISTED]))
            answer.add_int(2)
            for key in (b"first", b"second"):
                answer.add_string(key)
                answer.add_string(b"comment")
            return answer
        key = request.get_binary()
        if key == b"first":
            self.go_on.wait()
        answer.add_byte(bytes([SIGNED]))
        answer.add_string(b"signed with " + key)
        return answer


@pytest.fixture
def go_on() -> threading.Event:
    return threading.Event()


@pytest.fixture
def path(tmp_path: Path, go_on: threading.Event) -> Generator[str]:
    handler = type("SlowAgent", (Handler,), {"go_on": go_on})
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "agent"), handler) as server:
        serving = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        serving.start()
        yield str(tmp_path / "agent")
        go_on.set()
        server.shutdown()
        serving.join()


def test_late_signature_does_not_count_for_the_next_key(path: str, go_on: threading.Event) -> None:
    with closing(Agent(path, sign_s=0.1)) as agent:
        with pytest.raises(TimeoutError):
            agent.sign(b"first", b"data", "ssh-ed25519")
        go_on.set()

        assert agent.sign(b"second", b"data", "ssh-ed25519") == b"signed with second"
