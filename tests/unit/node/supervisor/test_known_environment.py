from __future__ import annotations

import pytest

from skyward.node.supervisor.start_order import known_environment, visible_environment

KEPT = {
    "PATH": "/opt/bin:/usr/bin",
    "HOME": "/home/ann",
    "TZ": "Europe/Berlin",
    "TMPDIR": "/scratch",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "CUDA_VISIBLE_DEVICES": "1",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NCCL_SOCKET_IFNAME": "ib0",
    "https_proxy": "http://proxy:3128",
    "NO_PROXY": "localhost",
    "SSL_CERT_FILE": "/etc/ssl/own.pem",
    "REQUESTS_CA_BUNDLE": "/etc/ssl/own.pem",
    "AWS_CA_BUNDLE": "/etc/ssl/own.pem",
    "GIT_SSL_CAINFO": "/etc/ssl/own.pem",
    "HF_HOME": "/data/models",
    "TORCH_HOME": "/data/torch",
    "TRITON_CACHE_DIR": "/data/triton",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338",
    "SKYWARD_INSTANCE": "i-1",
}


@pytest.mark.parametrize("name", KEPT)
def test_variables_of_the_machine_are_kept(name: str) -> None:
    assert known_environment(KEPT)[name] == KEPT[name]


@pytest.mark.parametrize(
    "name",
    [
        *("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONOPTIMIZE", "PYTHONIOENCODING"),
        *("DASK_CONFIG", "DASK_DISTRIBUTED__WORKER__PRELOAD", "LD_PRELOAD", "LD_AUDIT", "TMOUT", "BASH_ENV", "ENV"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "UV_SYSTEM_PYTHON", "SSH_AUTH_SOCK", "OMP_NUM_THREADS"),
        *(
            "AWS_SECRET_ACCESS_KEY",
            "HF_TOKEN",
            "HF_HUB_OFFLINE",
            "MALLOC_PERTURB_",
            "KMP_AFFINITY",
            "GIT_DIR",
            "PROMPT_COMMAND",
        ),
    ],
)
def test_a_persons_settings_are_not(name: str) -> None:
    assert name not in known_environment({**KEPT, name: "1"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"LANG": "C.UTF-8"}),
        ({"LC_ALL": "C"}, {"LANG": "C.UTF-8"}),
        ({"LANG": "POSIX", "LC_CTYPE": "en_US.ISO-8859-1"}, {"LANG": "C.UTF-8"}),
        ({"LANG": "de_DE.UTF-8"}, {"LANG": "de_DE.UTF-8"}),
        ({"LC_ALL": "ja_JP.utf8"}, {"LANG": "C.UTF-8", "LC_ALL": "ja_JP.utf8"}),
    ],
)
def test_text_is_utf_8_whatever_the_hosts_language(given: dict[str, str], expected: dict[str, str]) -> None:
    known = known_environment(given)
    assert {name: value for name, value in known.items() if name.startswith(("LANG", "LC_"))} == expected


def test_another_python_on_the_clients_machine_gets_all_variables_but_those_of_the_clients_python() -> None:
    given = {"PYTHONHOME": "/opt/python", "PYTHONPATH": "/lib", "DASK_CONFIG": "/dask", "TOKEN": "1"}
    assert visible_environment(given) == {"DASK_CONFIG": "/dask", "TOKEN": "1"}
