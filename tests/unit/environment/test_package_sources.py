"""Where packages come from: the image's places, pip's configuration, and what pip and uv are told of them."""

from __future__ import annotations

from pathlib import Path

from skyward.environment.image import Image
from skyward.environment.package_sources import (
    package_sources,
    pip_settings,
    variables_for_pip,
    variables_for_uv,
    written_settings,
)


def test_pips_configuration_is_handed_on_with_the_environment_winning(tmp_path: Path) -> None:
    own = tmp_path / "own.conf"
    own.write_text(
        "[global]\ncert = /x.pem\nextra-index-url =\n    https://a/simple\n    https://b/simple\n"
        "find-links = /global/wheels\n"
    )
    config = tmp_path / "pip"
    config.mkdir()
    (config / "pip.conf").write_text("[global]\nindex-url = https://main/simple\nfind-links = /overridden\n")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path), "PIP_CONFIG_FILE": str(own)}

    sources = package_sources(Image(), pip_settings({**env, "PIP_FIND_LINKS": "/env/wheels"}))

    assert variables_for_pip(sources) == {
        "PIP_INDEX_URL": "https://main/simple",
        "PIP_EXTRA_INDEX_URL": "https://a/simple https://b/simple",
        "PIP_FIND_LINKS": "/env/wheels",
        "PIP_CERT": "/x.pem",
    }
    assert variables_for_uv(sources) == {
        "UV_DEFAULT_INDEX": "https://main/simple",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/env/wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/x.pem",
    }


def test_a_null_device_as_pips_file_means_no_files(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nindex-url = https://a/\n")

    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}

    assert "index-url" not in pip_settings(env)


def test_a_file_that_is_named_replaces_the_users_own_as_it_does_for_pip(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nextra-index-url = https://users/\n")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "none")}
    own = tmp_path / "own.conf"

    assert pip_settings({**env, "PIP_CONFIG_FILE": str(own)})["extra-index-url"] == "https://users/"
    own.write_text("[global]\ntimeout = 9\n")
    assert "extra-index-url" not in pip_settings({**env, "PIP_CONFIG_FILE": str(own)})


def test_empty_values_override_nothing_and_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    own = tmp_path / "own.conf"
    own.write_bytes("# für uns\n[global]\nindex-url = https://a/\n[install]\nindex-url =\n".encode("latin-1"))

    settings = pip_settings({"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(own), "PIP_INDEX_URL": ""})

    assert settings["index-url"] == "https://a/"


def test_pips_proxy_is_uvs_too() -> None:
    sources = package_sources(Image(), {"proxy": "http://proxy:3128"})

    assert variables_for_uv(sources)["ALL_PROXY"] == variables_for_pip(sources)["PIP_PROXY"] == "http://proxy:3128"


def test_the_images_sources_come_first() -> None:
    image = Image(pip_index_url="https://mine/", pip_extra_index_url="https://more/", find_links=["/mine"])

    settings = {"index-url": "https://main/", "find-links": "/global"}
    sources = package_sources(image, settings)

    assert sources == {
        "index-url": "https://mine/",
        "extra-index-url": "https://more/",
        "find-links": "file:///mine /global",
    }
    assert package_sources(image, settings, ["/sent to it"])["find-links"] == "file:///sent%20to%20it /global"


def test_pips_files_are_read_as_pip_does_the_last_one_winning() -> None:
    files = [
        "[global]\nindex-url = https://system/\nfind_links =\n    /a\n    /b\ntimeout = 60\n",
        "no section here",
        "[global]\nextra-index-url = https://e/%(x)s\n[install]\nno-index = true\ntrusted-host = h\n",
        "[:env:]\nINDEX_URL=https://environment/\n",
    ]

    settings = written_settings(files)

    assert package_sources(Image(), settings) == {
        "index-url": "https://environment/",
        "extra-index-url": "https://e/%(x)s",
        "find-links": "/a /b",
        "trusted-host": "h",
        "no-index": "1",
    }


def test_what_uv_was_told_by_others_stays() -> None:
    sources = {"index-url": "https://a/", "extra-index-url": "https://b/", "find-links": "/w"}

    assert variables_for_uv(sources, already_set=["UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY"]) == {
        "UV_FIND_LINKS": "/w"
    }
