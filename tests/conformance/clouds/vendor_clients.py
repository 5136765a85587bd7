"""Vendors' own clients behind one small protocol; runs in an environment with one of them, and nothing of Skyward's.

usage: python vendor_clients.py CLIENT URL CREDENTIAL...

Reads one JSON list per line, a verb and its arguments, and answers each with one JSON value: ``["list"]`` with the
machines by id, each with its name and address, and with its public port if it is a container; ``["delete", ID]`` with
null; ``["create", NAME]`` with an id.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Machines = dict[str, dict[str, Any]]


class VendorClient(ABC):
    """A vendor's client, as its documentation uses it."""

    @abstractmethod
    def list(self) -> Machines:
        """Return every machine of the account."""

    @abstractmethod
    def delete(self, machine: str) -> None:
        """Delete a machine."""

    @abstractmethod
    def create(self, name: str) -> str:
        """Create the smallest machine and return its id."""


class Pydo(VendorClient):
    """DigitalOcean's own client, which is generated from the API's description."""

    def __init__(self, url: str, token: str) -> None:
        from pydo import Client

        self._droplets = Client(token=token, endpoint=url).droplets
        self._http = {"enforce_https": False}

    def list(self) -> Machines:
        """List both kinds: droplets with GPUs are hidden unless they are asked for."""
        found = [
            *self._droplets.list(per_page=200, **self._http)["droplets"],
            *self._droplets.list(per_page=200, type="gpus", **self._http)["droplets"],
        ]
        return {str(each["id"]): {"name": each["name"], "address": _public(each)} for each in found}

    def delete(self, machine: str) -> None:
        """Delete a droplet."""
        self._droplets.destroy(droplet_id=int(machine), **self._http)

    def create(self, name: str) -> str:
        """Create a droplet."""
        order = {"name": name, "region": "nyc1", "size": "s-1vcpu-1gb", "image": "ubuntu-24-04-x64"}
        return str(self._droplets.create(body=order, **self._http)["droplet"]["id"])


def _public(droplet: dict[str, Any]) -> str | None:
    return next((each["ip_address"] for each in droplet["networks"]["v4"] if each["type"] == "public"), None)


class Libcloud(VendorClient):
    """Apache Libcloud, which was written by hand and knows no droplets with GPUs."""

    def __init__(self, url: str, token: str) -> None:
        from libcloud.compute.providers import get_driver
        from libcloud.compute.types import Provider

        place = urlsplit(url)
        self._driver = get_driver(Provider.DIGITAL_OCEAN)(token)
        connection = self._driver.connection  # the driver takes no host of one's own
        connection.host, connection.port, connection.secure = place.hostname, place.port, False
        connection.connect()

    def list(self) -> Machines:
        """List the nodes."""
        found = self._driver.list_nodes()
        return {each.id: {"name": each.name, "address": next(iter(each.public_ips), None)} for each in found}

    def delete(self, machine: str) -> None:
        """Destroy a node."""
        (node,) = [each for each in self._driver.list_nodes() if each.id == machine]
        assert self._driver.destroy_node(node)

    def create(self, name: str) -> str:
        """Create a node of a size and at a place from its lists."""
        from libcloud.compute.base import NodeImage

        size = min(self._driver.list_sizes(), key=lambda each: each.price)
        (place,) = [each for each in self._driver.list_locations() if each.id == "nyc1"]
        image = NodeImage(id="ubuntu-24-04-x64", name="Ubuntu", driver=self._driver)
        return self._driver.create_node(name, size, image, place).id


class Verda(VendorClient):
    """Verda's own client."""

    def __init__(self, url: str, client_id: str, client_secret: str) -> None:
        from verda import VerdaClient

        self._client = VerdaClient(client_id, client_secret, base_url=url)

    def list(self) -> Machines:
        """List the instances."""
        return {each.id: {"name": each.hostname, "address": each.ip} for each in self._client.instances.get()}

    def delete(self, machine: str) -> None:
        """Delete an instance with its volume."""
        (found,) = [each for each in self._client.instances.get() if each.id == machine]
        volumes = [found.os_volume_id] if found.os_volume_id else None
        self._client.instances.action(machine, "delete", volume_ids=volumes, delete_permanently=True)

    def create(self, name: str) -> str:
        """Create an instance with a key of its own."""
        key = self._client.ssh_keys.create(f"{name}-key", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKFvfG0 stranger")
        made = self._client.instances.create(
            instance_type="CPU.4V.16G",
            image="ubuntu-24.04",
            hostname=name,
            description="a stranger",
            ssh_key_ids=[key.id],
            location="FIN-02",
            os_volume={"name": f"{name}-os", "size": 50},
        )
        return made.id


class Vast(VendorClient):
    """VastAI's own client."""

    def __init__(self, url: str, key: str) -> None:
        from vastai import VastAI

        self._client = VastAI(api_key=key, server_url=url)

    def list(self) -> Machines:
        """List the instances, page by page."""
        return {
            str(each["id"]): {"name": each["label"], "address": each["public_ipaddr"], "port": _published(each)}
            for each in self._client.show_instances()
        }

    def delete(self, machine: str) -> None:
        """Destroy an instance."""
        self._client.destroy_instance(id=int(machine))

    def create(self, name: str) -> str:
        """Rent the cheapest GPU and run a command there."""
        (ask, *_) = self._client.search_offers(query="num_gpus=1 verified=true", order="dph_total", limit=5)
        made = self._client.create_instance(
            id=ask["id"],
            image="ubuntu:24.04",
            disk=10,
            label=name,
            env="-p 10022:10022",
            args=["sleep", "infinity"],
        )
        return str(made["new_contract"])


class Generated(VendorClient):
    """Client of RunPod's pods that ``openapi-python-client`` generates from the vendor's description."""

    def __init__(self, url: str, key: str, description: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        generate = [Path(sys.executable).with_name("openapi-python-client"), "generate", "--meta", "none"]
        argv = [*generate, "--path", description, "--output-path", f"{self._folder.name}/pods_client"]
        subprocess.run(argv, check=True, capture_output=True)
        sys.path.insert(0, self._folder.name)
        package = importlib.import_module("pods_client")
        self._client = package.AuthenticatedClient(base_url=url, token=key, raise_on_unexpected_status=True)
        self._request = importlib.import_module("pods_client.models").CreatePodRequest

    def list(self) -> Machines:
        """List the pods. An answer without a required member, or with an unknown word, is an error."""
        pods = self._call("list_pods").pods
        return {each.id: {"name": each.name, **_direct(each)} for each in pods}

    def delete(self, machine: str) -> None:
        """Delete a pod."""
        self._call("delete_pod", machine)

    def create(self, name: str) -> str:
        """Create a pod without GPUs."""
        order = {
            "name": name,
            "image": "ubuntu:24.04",
            "cpu": {"id": "cpu3c", "vcpuCount": 2},
            "args": "sleep infinity",
        }
        return str(self._call("create_pod", body=self._request.from_dict(order)).id)

    def _call(self, operation: str, *path: str, **given: Any) -> Any:
        found = importlib.import_module(f"pods_client.api.pods.{operation}")
        answer = found.sync_detailed(*path, client=self._client, **given)
        if answer.status_code >= 300:
            raise RuntimeError(f"{operation}: {answer.status_code} {answer.content!r}")
        return answer.parsed


def _published(row: dict[str, Any]) -> int | None:
    ports = [int(each["HostPort"]) for listed in (row["ports"] or {}).values() for each in listed]
    return ports[0] if ports else None


def _direct(pod: Any) -> dict[str, Any]:
    direct = pod.ssh.direct
    return {"address": direct.host, "port": direct.port} if direct else {"address": None, "port": None}


CLIENTS = {
    "pydo": Pydo,
    "apache-libcloud": Libcloud,
    "verda": Verda,
    "vastai": Vast,
    "openapi-python-client": Generated,
}


def main() -> None:
    """Answer the calls on standard input."""
    kind, *arguments = sys.argv[1:]
    client = CLIENTS[kind](*arguments)
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        print(json.dumps(getattr(client, verb)(*rest)), flush=True)


if __name__ == "__main__":
    main()
