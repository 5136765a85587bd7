"""Clients of AWS and their server, for tests that make new ones all the time."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

__all__ = ["remember_classes"]


@cache
def remember_classes() -> None:
    """Have botocore and moto look up once in this process what depends on their version only.

    Classes of clients: EC2's has 750 methods, and takes botocore 60 ms. The methods of moto's services: they take moto
    3 ms at every call. Descriptions of services: EC2's is 0.2 s of JSON, for every loader.
    """
    import moto.core.responses
    from botocore.client import ClientCreator
    from botocore.loaders import JSONFileLoader

    responses: Any = moto.core.responses
    responses.method_names_from_class = cache(responses.method_names_from_class)
    creator: Any = ClientCreator
    build = creator._create_client_class
    made: dict[str, type] = {}

    def build_once(self: Any, service: str, model: Any) -> type:
        if service not in made:
            made[service] = build(self, service, model)
        return made[service]

    creator._create_client_class = build_once

    files: Any = JSONFileLoader
    load = files.load_file
    contents: dict[str, Any] = {}

    def load_once(self: Any, path: str) -> Any:
        if contents.get(path) is None:
            contents[path] = load(self, path)
        # Copies: moto adds errors to EC2's description, which the client under test would know then.
        content: Any = contents[path]
        return content and {name: copy(part) for name, part in content.items()}

    files.load_file = load_once
