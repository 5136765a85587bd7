"""SSH through Session Manager: the official plugin's part is played by a program that joins its ends to a port."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyward.errors import ConfigurationError
from skyward.machine.ssh import SSHAccess, SshTransport
from skyward.providers.aws.api import Credentials
from skyward.providers.aws.provider import AWS
from skyward.providers.aws.ssm import PLUGIN, session_command
from skyward.providers.base import LaunchOrder
from skyward.request.request import parse_request
from skyward.testing.aws import LocalEC2
from skyward.testing.hosts import SshHost, require_sshd

TOKEN = "the-sessions-token"
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, socket, sys, threading
told = pathlib.Path(sys.argv[0]).parent / "told.json"
told.write_text(json.dumps([sys.argv[1:], json.loads(os.environ[sys.argv[1]])]))
host, port = json.loads(os.environ[sys.argv[1]])["StreamUrl"].removeprefix("wss://").split(":")
sock = socket.create_connection((host, int(port)))
def up():
    while data := os.read(0, 65536):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := sock.recv(65536):
    os.write(1, data)
"""


class Systems(BaseHTTPRequestHandler):
    """Systems Manager, as far as it starts sessions."""

    place = ""
    asked: ClassVar[dict[str, Any]] = {}
    refusal = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked = {"target": self.headers["X-Amz-Target"], **body}
        session = {"SessionId": "me-1", "TokenValue": TOKEN, "StreamUrl": f"wss://{self.place}"}
        answer = {"__type": self.refusal, "message": "refused"} if self.refusal else session
        self.send_response(400 if self.refusal else 200)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def systems() -> Iterator[str]:
    server = HTTPServer(("127.71.0.3", 0), Systems)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Systems.refusal = ""
    try:
        yield f"http://127.71.0.3:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / PLUGIN).write_text(STAND_IN)
    (folder / PLUGIN).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    return folder


def test_commands_run_on_a_machine_that_has_no_open_port(systems: str, plugin: Path, tmp_path: Path) -> None:
    require_sshd()
    with SshHost(tmp_path / "machine", address="127.71.0.4") as host:
        Systems.place = f"{host.address}:{host.port}"
        credentials = Credentials(region="us-east-1", endpoint_url=systems)
        target = replace(host.target(), host="10.9.9.9", proxy=session_command(credentials, "i-0123", 22))

        async def scenario() -> str:
            transport = SshTransport(target)
            try:
                return (await transport.run(["echo", "hello"], timeout_s=60)).stdout
            finally:
                await transport.close()

        assert asyncio.run(scenario()) == "hello\n"

    arguments, session = json.loads((plugin / "told.json").read_text())
    request = {"Target": "i-0123", "DocumentName": "AWS-StartSSHSession", "Parameters": {"portNumber": ["22"]}}
    assert Systems.asked == {"target": "AmazonSSM.StartSession", **request}
    assert arguments[1:4] == ["us-east-1", "StartSession", ""]
    assert (json.loads(arguments[4]), arguments[5]) == (request, systems)
    assert session["TokenValue"] == TOKEN
    assert TOKEN not in json.dumps(arguments)


def test_a_machine_that_has_not_registered_says_what_it_lacks(systems: str, plugin: Path) -> None:
    Systems.refusal = "TargetNotConnected"
    command = session_command(Credentials(region="us-east-1", endpoint_url=systems), "i-0123", 22)

    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert ended.returncode == 1
    assert "AmazonSSMManagedInstanceCore" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_the_plugin_nothing_is_asked_for(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    provider = AWS(endpoint_url=ec2.endpoint_url, use_ssm=True, instance_profile="role")

    with pytest.raises(ConfigurationError, match=r"needs AWS's session-manager-plugin.*dpkg -i.*brew install"):
        asyncio.run(provider.offers(parse_request()))
    assert not ec2.actions


def test_no_port_is_opened_and_machines_are_reached_by_the_session(ec2: LocalEC2, plugin: Path) -> None:
    ec2.client("iam").create_instance_profile(InstanceProfileName="role")

    async def scenario() -> None:
        provider = AWS(endpoint_url=ec2.endpoint_url, use_ssm=True, instance_profile="role")
        try:
            offers = await provider.offers(parse_request(accelerator="T4"))
            order = LaunchOrder(pool_id="p", keys=("k",), timeout_s=60)
            (instance,) = await provider.launch(offers, order)
            (seen,) = await provider.describe([instance.id])
            assert isinstance(seen.access, SSHAccess)
            told = json.loads(seen.access.target.proxy[-1])
            assert (told["instance"], told["port"], told["region"]) == (instance.id, 22, "us-east-1")
            groups = ec2.client("ec2").describe_security_groups(GroupNames=["skyward-p"])["SecurityGroups"]
            assert [rule["IpProtocol"] for rule in groups[0]["IpPermissions"]] == ["-1"]
            await provider.terminate([instance.id])
        finally:
            await provider.close()

    asyncio.run(scenario())
    assert not ec2.left()
