"""``skyward doctor``, ``clean`` and ``env``: this installation's problems, cached environments, and distributions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
import platformdirs

from skyward.cli._base import (
    FAILED,
    PROVIDER,
    Answer,
    Say,
    answers,
    chosen_provider,
    place_options,
    rented_providers,
    settings_of,
)
from skyward.display.words import plural
from skyward.errors import AuthenticationError, HostKeyError, SkywardError, UnreachableError
from skyward.providers.base import Finding, Provider
from skyward.providers.registry import BUILT_IN, make_provider, provider_names, taken_names
from skyward.providers.ssh import SSH
from skyward.provision.buying.cleaning import Cleaned, clean_here, clean_host, used_hosts
from skyward.provision.buying.ledger import Ledger
from skyward.provision.mirroring.image_mirror import mirror_environment
from skyward.provision.preparing.distribution import DISTRIBUTION
from skyward.provision.preparing.sources import client_uv
from skyward.request.request import parse_request
from skyward.transport.ssh_config import SSHTarget

__all__ = ["clean", "doctor", "env"]

_LITTLE_ROOM_BYTES = 2 << 30
_logger = logging.getLogger("skyward")
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@click.command()
@click.option("--ssh", "hosts", metavar="HOST", multiple=True, help="Also connect to this host; may be repeated.")
@click.option("--user", help="User name for the hosts.")
@click.option("--key", "key_path", metavar="FILE", help="Private key for the hosts.")
@click.option("--known-hosts", metavar="FILE", help="File of host keys.")
@click.option(
    "--provider", "providers", type=PROVIDER, multiple=True, help="Also check this provider; may be repeated."
)
@place_options
@answers
def doctor(
    *,
    hosts: Sequence[str],
    user: str | None,
    key_path: str | None,
    known_hosts: str | None,
    providers: Sequence[str],
    region: str | None,
    options: Sequence[str],
) -> Answer:
    """Check this computer, with a fix for each problem.

    It looks at versions, folders, the ledger and keys; on request, at hosts and providers too.
    """
    findings = [finding for look in _LOOKS for finding in look()]
    settings = settings_of(region, options)
    findings += [finding for name in providers for finding in _provider(name, partial(chosen_provider, name, settings))]
    login = {"user": user, "key_path": key_path, "known_hosts": known_hosts}
    reached = {host: _host(host, **login) for host in hosts}
    findings += reached.values()
    sound = [host for host, finding in reached.items() if finding.state == "ok"]
    if sound and len(sound) == len(hosts):  # with keys of other names
        findings = [each for each in findings if (each.what, each.state) != ("ssh keys", "warn")]
    if len(sound) > 1:
        findings += _provider("ssh", partial(SSH, hosts=sound, **login))

    def show(say: Say) -> None:
        for each in findings:
            say.line(f"{each.state:<5}{each.what}: {each.found}")
            if each.fix:
                say.line(f"     -> {each.fix}")

    failed = any(each.state == "fail" for each in findings)
    return Answer(document={"findings": [asdict(each) for each in findings]}, show=show, exit_code=FAILED * failed)


def _versions() -> Iterator[Finding]:
    yield Finding(what="python", state="ok", found=platform.python_version())
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield Finding(what="skyward", state="warn", found="not installed as a package", fix="install it with pip")
        return
    yield Finding(what="skyward", state="ok", found=distribution.version)
    for text in distribution.requires or ():
        yield from _requirement(text)


def _requirement(text: str) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": "dask"}):
        return
    fix = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield Finding(what=wanted.name, state="fail", found="not installed", fix=fix)
        else:
            fix = f"pip install '{DISTRIBUTION}[dask]', for Dask; pools work without it"
            yield Finding(what=wanted.name, state="warn", found="not installed", fix=fix)
        return
    if wanted.specifier.contains(version, prereleases=True):
        yield Finding(what=wanted.name, state="ok", found=version)
    else:
        found = f"{version}, where {wanted.specifier} is needed"
        yield Finding(what=wanted.name, state="fail", found=found, fix=fix)


def _programs() -> Iterator[Finding]:
    uv = client_uv()
    fix = "pip install uv: the environments of nodes are built with it"
    yield Finding(what="uv", state="ok" if uv else "warn", found=str(uv or "not found"), fix="" if uv else fix)
    ssh = shutil.which("ssh")
    fix = "install OpenSSH's client, if a ProxyCommand of your SSH configuration needs it"
    yield Finding(what="ssh", state="ok" if ssh else "warn", found=ssh or "not found", fix="" if ssh else fix)


def _folders() -> Iterator[Finding]:
    for what, path, variable in (
        ("state folder", platformdirs.user_state_path("skyward"), "XDG_STATE_HOME"),
        ("cache folder", platformdirs.user_cache_path("skyward"), "XDG_CACHE_HOME"),
    ):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                room_bytes = shutil.disk_usage(path).free
        except OSError as error:
            fix = f"make it writable for this user, or set {variable} to another folder"
            yield Finding(what=what, state="fail", found=f"{path} cannot be written to: {error.strerror}", fix=fix)
            continue
        little = room_bytes < _LITTLE_ROOM_BYTES
        fix = "make room: `skyward clean` removes cached environments" if little else ""
        yield Finding(what=what, state="warn" if little else "ok", found=f"{path}, {size(room_bytes)} free", fix=fix)


def _ledger() -> Iterator[Finding]:
    try:
        ledger = Ledger.of_user()
        entries = ledger.open_entries()
    except SkywardError as error:
        yield Finding(
            what="ledger", state="fail", found=str(error), fix="see the message: no pool opens without the ledger"
        )
        return
    dead = [entry for entry in entries if entry.owner is not None and entry.owner.lives() is False]
    found = f"{ledger.path}, {plural(len(entries), 'machine')} open, {len(dead)} with a dead owner"
    fix = "`skyward sweep` ends those" if dead else ""
    yield Finding(what="ledger", state="warn" if dead else "ok", found=found, fix=fix)


def _keys() -> Iterator[Finding]:
    from paramiko import Agent

    agent = Agent()
    try:
        held = len(agent.get_keys())
    finally:
        agent.close()
    if held:
        found = f"{held} keys"
    else:
        found = "holds no key" if os.environ.get("SSH_AUTH_SOCK") else "none runs (SSH_AUTH_SOCK is not set)"
    folder = Path.home() / ".ssh"
    files = [name for name in _KEYS if (folder / name).is_file()]
    yield Finding(what="ssh agent", state="ok", found=found)
    if files or held:
        yield Finding(what="ssh keys", state="ok", found=", ".join(files) or "in the agent only")
    else:
        fix = "for machines over SSH: `ssh-keygen -t ed25519`, then `ssh-copy-id HOST`; or give SSH(key_path=...)"
        yield Finding(what="ssh keys", state="warn", found=f"none of the usual names in {folder}", fix=fix)


def _installed() -> Iterator[Finding]:
    rented = rented_providers()
    for name in provider_names():
        if name in BUILT_IN and name not in rented:
            continue
        try:
            make_provider(name, {})
        except SkywardError as error:
            yield Finding(
                what=f"provider {name}", state="warn", found=str(error), fix="only if you rent machines there"
            )
            continue
        found = f"installed; `skyward doctor --provider {name}` checks it"
        yield Finding(what=f"provider {name}", state="ok", found=found)
    for name, package in taken_names().items():
        found = f"{package} registers it too, and is ignored: the name is that of one of Skyward's own providers"
        yield Finding(what=f"provider {name}", state="warn", found=found, fix="ask its authors for another name")


def _provider(name: str, make: Callable[[], Provider]) -> Sequence[Finding]:
    try:
        return asyncio.run(_check(make()))
    except SkywardError as error:
        return [Finding(what=name, state="fail", found=str(error), fix="correct the settings")]
    except Exception as error:
        _logger.debug("the check of %s failed", name, exc_info=True)
        found = f"its check failed: {type(error).__name__}: {error}"
        return [Finding(what=name, state="fail", found=found, fix="report it to the authors of that provider")]


async def _check(provider: Provider) -> Sequence[Finding]:
    try:
        if provider.supports("check"):
            return await provider.check()
        return [Finding(what=provider.name, state="ok", found="installed; it has no checks of its own")]
    finally:
        await provider.close()


def _host(name: str, *, user: str | None, key_path: str | None, known_hosts: str | None) -> Finding:
    what = f"host {name}"
    try:
        found = asyncio.run(_survey(SSH(hosts=[name], user=user, key_path=key_path, known_hosts=known_hosts)))
    except (SkywardError, OSError) as error:
        return Finding(what=what, state="fail", found=str(error), fix=_host_fix(error, name))
    return Finding(what=what, state="ok", found=found)


async def _survey(provider: SSH) -> str:
    try:
        (offer,) = await provider.offers(parse_request())
        return str(offer.spec)
    finally:
        await provider.close()


def _host_fix(error: Exception, name: str) -> str:
    host, _, port = name.rpartition(":")
    login = f"-p {port} {host}" if host and port.isdecimal() else name
    match error:
        case HostKeyError():
            return f"compare the host key with one from its administrator, then accept it: run `ssh {login}` once"
        case AuthenticationError():
            return f"install your key there: `ssh-copy-id {login}`; or name another key or user with --key and --user"
        case UnreachableError():
            return "check the name, the port, the firewall, and that sshd runs there"
        case _:
            return "correct the host, the key or the file named"


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (_versions, _programs, _folders, _ledger, _keys, _installed)

_UNIT = 1024


@click.command()
@click.option(
    "--ssh", "hosts", metavar="HOST", multiple=True, help="Clean this host instead of this machine; may be repeated."
)
@click.option(
    "--hosts", "all_hosts", is_flag=True, help="Clean every host of the last month's pools instead of this machine."
)
@click.option("--dry-run", is_flag=True, help="Only report how much would be freed.")
@answers
def clean(*, hosts: Sequence[str], all_hosts: bool, dry_run: bool) -> Answer:
    """Remove cached environments. The next pool builds those that it needs again."""
    ledger = Ledger.of_user()
    targets = [SSH(hosts=[host]).target(0) for host in hosts]
    used, kept = used_hosts(ledger.entries()) if all_hosts else ((), ())
    if hosts or all_hosts:
        cleaned = [*asyncio.run(_clean_hosts([*targets, *used], look_only=dry_run))]
        cleaned += [each for each in kept if each.where not in hosts]
    else:
        cleaned = [clean_here(ledger.open_entries(), look_only=dry_run)]
    freed_bytes = sum(each.freed_bytes for each in cleaned)

    def show(say: Say) -> None:
        for each in cleaned:
            outcome = f"KEPT: {each.kept_because}" if each.kept_because else size(each.freed_bytes)
            say.line(f"{each.where}  {each.path}  {outcome}")
        say.line(f"{size(freed_bytes)} {'would be freed' if dry_run else 'freed'}")

    document = {"cleaned": [asdict(each) for each in cleaned], "freed_bytes": freed_bytes, "dry_run": dry_run}
    return Answer(document=document, show=show, exit_code=FAILED if any(each.kept_because for each in cleaned) else 0)


def size(count: float) -> str:
    """Return a number of bytes as text, with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < _UNIT:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= _UNIT
    return f"{count:.1f} TiB"


async def _clean_hosts(targets: Sequence[SSHTarget], *, look_only: bool) -> Sequence[Cleaned]:
    return await asyncio.gather(*(_clean_host(target, look_only=look_only) for target in targets))


async def _clean_host(target: SSHTarget, *, look_only: bool) -> Cleaned:
    try:
        return await clean_host(target, look_only=look_only)
    except (SkywardError, OSError) as error:
        return Cleaned(where=str(target), path="", kept_because=str(error))


_COLUMNS = ("name", "version", "source")


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="Take this one and its requirements; may be repeated.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave this distribution out; may be repeated.")
@answers
def env(*, only: Sequence[str], exclude: Sequence[str]) -> Answer:
    """List the distributions of this environment, and where nodes get each from: Image.mirror()."""
    mirror = mirror_environment(only=only or None, exclude=exclude, report=lambda text: click.echo(text, err=True))

    def show(say: Say) -> None:
        rows = [(each.name, each.version, each.source or f"left out: {each.left_out}") for each in mirror.packages]
        say.table(*_COLUMNS, rows=rows)
        say.line(f"{len(mirror.requirements)} of {len(rows)} distributions; nothing was requested or bought")
        if mirror.unchecked:
            say.line(f"The indexes were not asked: {mirror.unchecked}")

    rows = [
        {
            "name": each.name,
            "version": each.version,
            "source": each.source,
            "left_out": each.left_out,
            "requirement": each.requirement,
            "wheel": None if each.wheel is None else str(each.wheel),
        }
        for each in mirror.packages
    ]
    return Answer(document={"distributions": rows, "unchecked": mirror.unchecked}, show=show)
