"""Where packages come from: the image's places, pip's configuration, and what pip and uv are told of them."""

from __future__ import annotations

from skyward.provision.preparing.sources import PackageSources, listed_settings, package_sources, written_settings
from skyward.request.image import Image


def test_pips_configuration_is_handed_on_with_the_environment_winning() -> None:
    listing = (
        ":env:.find-links='/env/wheels'\n"
        "global.cert='/x.pem'\n"
        "global.extra-index-url='https://a/simple https://b/simple'\n"
        "global.find-links='/global/wheels'\n"
        "global.index-url='https://main/simple'\n"
    )

    sources = package_sources(Image(), listed_settings(listing))

    assert sources == PackageSources(
        index_url="https://main/simple",
        extra_index_urls=("https://a/simple", "https://b/simple"),
        find_links=("/env/wheels",),
        cert="/x.pem",
    )
    assert sources.for_pip() == {
        "PIP_INDEX_URL": "https://main/simple",
        "PIP_EXTRA_INDEX_URL": "https://a/simple https://b/simple",
        "PIP_FIND_LINKS": "/env/wheels",
        "PIP_CERT": "/x.pem",
    }
    assert sources.for_uv() == {
        "UV_DEFAULT_INDEX": "https://main/simple",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/env/wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/x.pem",
    }


def test_the_images_sources_come_first() -> None:
    image = Image(pip_index_url="https://mine/", pip_extra_index_url="https://more/", find_links=["/mine"])

    settings = {"index-url": "https://main/", "find-links": "/global"}
    sources = package_sources(image, settings)

    assert sources == PackageSources(
        index_url="https://mine/", extra_index_urls=("https://more/",), find_links=("/mine", "/global")
    )
    assert package_sources(image, settings, ["/sent"]).find_links == ("/sent", "/global")


def test_pips_files_are_read_as_pip_does_the_last_one_winning() -> None:
    files = [
        "[global]\nindex-url = https://system/\nfind_links =\n    /a\n    /b\ntimeout = 60\n",
        "no section here",
        "[global]\nextra-index-url = https://e/%(x)s\n[install]\nno-index = true\ntrusted-host = h\n",
        "[:env:]\nINDEX_URL=https://environment/\n",
    ]

    settings = written_settings(files)

    assert package_sources(Image(), settings) == PackageSources(
        index_url="https://environment/",
        extra_index_urls=("https://e/%(x)s",),
        find_links=("/a", "/b"),
        trusted_hosts=("h",),
        no_index=True,
    )


def test_what_uv_was_told_by_others_stays() -> None:
    sources = PackageSources(index_url="https://a/", extra_index_urls=("https://b/",), find_links=("/w",))

    assert sources.for_uv(told=["UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY"]) == {"UV_FIND_LINKS": "/w"}
