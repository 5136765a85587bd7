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

from skyward.api.offers import rented_providers
from skyward.cli._base import FAILED, Answer, Providers, Rows, answers, provider_options
from skyward.display.words import plural
from skyward.environment.image_mirror import mirror_environment
from skyward.environment.package_sources import client_uv
from skyward.errors import AuthenticationError, HostKeyError, SkywardError, UnreachableError
from skyward.ledger.cache_removal import Cleaned, clean_here, clean_host, used_hosts
from skyward.ledger.ledger import Ledger
from skyward.machine.ssh_config import SSHTarget
from skyward.providers.base import Finding, Provider
from skyward.providers.registry import BUILT_IN, make_provider, provider_names, taken_names
from skyward.providers.ssh import SSH
from skyward.request.distribution_names import DISTRIBUTION
from skyward.request.request import parse_request

_LITTLE_ROOM_BYTES = 2 << 30
_logger = logging.getLogger("skyward")
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@click.command()
@click.option("--ssh", "hosts", metavar="HOST", multiple=True, help="Also connect to this host; may be repeated.")
@click.option("--user", help="User name for the hosts.")
@click.option("--key", "key_path", metavar="FILE", help="Private key for the hosts.")
@click.option("--known-hosts", metavar="FILE", help="File of host keys.")
@provider_options("Also check this provider")
@answers
def doctor(
    *, hosts: Sequence[str], user: str | None, key_path: str | None, known_hosts: str | None, providers: Providers
) -> Answer:
    """Check this computer, with a fix for each problem.

    It looks at versions, folders, the ledger and keys; on request, at hosts and providers too.
    """
    findings = [finding for look in (_versions, _programs, _folders, _ledger, _keys, _installed) for finding in look()]
    findings += [finding for name in providers.names for finding in _check(name, partial(providers.make, name))]
    login = {"user": user, "key_path": key_path, "known_hosts": known_hosts}
    reached = {host: _host(host, partial(SSH, hosts=[host], **login)) for host in hosts}
    findings += reached.values()
    sound = [host for host, finding in reached.items() if finding.state == "ok"]
    if sound and len(sound) == len(hosts):  # with keys of other names
        findings = [finding for finding in findings if (finding.what, finding.state) != ("ssh keys", "warn")]
    if len(sound) > 1:
        findings += _check("ssh", partial(SSH, hosts=sound, **login))
    failed = any(finding.state == "fail" for finding in findings)
    document = {"findings": [asdict(finding) for finding in findings]}
    return Answer(document=document, text=map(_text, findings), exit_code=FAILED * failed)


def _text(finding: Finding) -> str:
    line = f"{finding.state:<5}{finding.what}: {finding.found}"
    return f"{line}\n     -> {finding.fix}" if finding.fix else line


def _finding(what: str, found: str, fix: str = "", *, fails: bool = False) -> Finding:
    """Return a finding, which is ok if there is nothing to fix."""
    return Finding(what=what, state="fail" if fails else "warn" if fix else "ok", found=found, fix=fix)


def _versions() -> Iterator[Finding]:
    yield _finding("python", platform.python_version())
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield _finding("skyward", "not installed as a package", "install it with pip")
        return
    yield _finding("skyward", distribution.version)
    for text in distribution.requires or ():
        yield from _requirement(text)


def _requirement(text: str) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    required = Requirement(text)
    if required.marker is not None and not required.marker.evaluate({"extra": "dask"}):
        return
    fix = f"pip install '{required.name}{required.specifier}'"
    try:
        version = importlib.metadata.version(required.name)
    except importlib.metadata.PackageNotFoundError:
        optional = required.marker is not None and not required.marker.evaluate({"extra": ""})
        fix = f"pip install '{DISTRIBUTION}[dask]', for Dask; pools work without it" if optional else fix
        yield _finding(required.name, "not installed", fix, fails=not optional)
        return
    if required.specifier.contains(version, prereleases=True):
        yield _finding(required.name, version)
    else:
        yield _finding(required.name, f"{version}, where {required.specifier} is needed", fix, fails=True)


def _programs() -> Iterator[Finding]:
    uv, ssh = client_uv(), shutil.which("ssh")
    fix = "pip install uv: the environments of nodes are built with it"
    yield _finding("uv", str(uv or "not found"), "" if uv else fix)
    fix = "install OpenSSH's client, if a ProxyCommand of your SSH configuration needs it"
    yield _finding("ssh", ssh or "not found", "" if ssh else fix)


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
            yield _finding(what, f"{path} cannot be written to: {error.strerror}", fix, fails=True)
            continue
        fix = "make room: `skyward clean` removes cached environments" if room_bytes < _LITTLE_ROOM_BYTES else ""
        yield _finding(what, f"{path}, {size(room_bytes)} free", fix)


def _ledger() -> Iterator[Finding]:
    try:
        ledger = Ledger.of_user()
        entries = ledger.open_entries()
    except SkywardError as error:
        yield _finding("ledger", str(error), "see the message: no pool opens without the ledger", fails=True)
        return
    dead = [entry for entry in entries if entry.owner_lives() is False]
    text = f"{ledger.path}, {plural(len(entries), 'machine')} open, {len(dead)} with a dead owner"
    yield _finding("ledger", text, "`skyward sweep` ends those" if dead else "")


def _keys() -> Iterator[Finding]:
    from paramiko import Agent

    agent = Agent()
    try:
        held = len(agent.get_keys())
    finally:
        agent.close()
    if held:
        text = f"{held} keys"
    else:
        text = "holds no key" if os.environ.get("SSH_AUTH_SOCK") else "none runs (SSH_AUTH_SOCK is not set)"
    yield _finding("ssh agent", text)
    folder = Path.home() / ".ssh"
    files = [name for name in _KEYS if (folder / name).is_file()]
    if files or held:
        yield _finding("ssh keys", ", ".join(files) or "in the agent only")
    else:
        fix = "for machines over SSH: `ssh-keygen -t ed25519`, then `ssh-copy-id HOST`; or give SSH(key_path=...)"
        yield _finding("ssh keys", f"none of the usual names in {folder}", fix)


def _installed() -> Iterator[Finding]:
    rented = rented_providers()
    for name in provider_names():
        if name in BUILT_IN and name not in rented:
            continue
        try:
            provider = make_provider(name, {})
        except SkywardError as error:
            yield _finding(f"provider {name}", str(error), "only if you rent machines there")
        else:
            lack = "" if provider.has_credentials() else ", no credentials found"
            yield _finding(f"provider {name}", f"installed{lack}; `skyward doctor --provider {name}` checks it")
    for name, package in taken_names().items():
        text = f"{package} registers it too, and is ignored: the name is that of one of Skyward's own providers"
        yield _finding(f"provider {name}", text, "ask its authors for another name")


def _check(name: str, make: Callable[[], Provider]) -> Sequence[Finding]:
    async def check() -> Sequence[Finding]:
        provider = make()
        try:
            if provider.supports("check"):
                return await provider.check()
            return [_finding(provider.name, "installed; it has no checks of its own")]
        finally:
            await provider.close()

    try:
        return asyncio.run(check())
    except SkywardError as error:
        return [_finding(name, str(error), "correct the settings", fails=True)]
    except Exception as error:
        _logger.debug("the check of %s failed", name, exc_info=True)
        text = f"its check failed: {type(error).__name__}: {error}"
        return [_finding(name, text, "report it to the authors of that provider", fails=True)]


def _host(name: str, make: Callable[[], SSH]) -> Finding:
    async def survey() -> str:
        provider = make()
        try:
            (offer,) = await provider.offers(parse_request())
            return str(offer.spec)
        finally:
            await provider.close()

    try:
        return _finding(f"host {name}", asyncio.run(survey()))
    except (SkywardError, OSError) as error:
        return _finding(f"host {name}", str(error), _host_fix(error, name), fails=True)


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
        cleaned += [cache for cache in kept if cache.where not in hosts]
    else:
        cleaned = [clean_here(ledger.open_entries(), look_only=dry_run)]
    freed_bytes = sum(cache.freed_bytes for cache in cleaned)
    text = [f"{cache.where}  {cache.path}  {_outcome(cache)}" for cache in cleaned]
    text.append(f"{size(freed_bytes)} {'would be freed' if dry_run else 'freed'}")
    document = {"cleaned": [asdict(cache) for cache in cleaned], "freed_bytes": freed_bytes, "dry_run": dry_run}
    return Answer(document=document, text=text, exit_code=FAILED * any(cache.kept_because for cache in cleaned))


def _outcome(cache: Cleaned) -> str:
    return f"KEPT: {cache.kept_because}" if cache.kept_because else size(cache.freed_bytes)


def size(count: float) -> str:
    """Return a number of bytes as text, with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < _UNIT:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= _UNIT
    return f"{count:.1f} TiB"


async def _clean_hosts(targets: Sequence[SSHTarget], *, look_only: bool) -> Sequence[Cleaned]:
    async def clean(target: SSHTarget) -> Cleaned:
        try:
            return await clean_host(target, look_only=look_only)
        except (SkywardError, OSError) as error:
            return Cleaned(where=str(target), path="", kept_because=str(error))

    return await asyncio.gather(*map(clean, targets))


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="Take this one and its requirements; may be repeated.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave this distribution out; may be repeated.")
@answers
def env(*, only: Sequence[str], exclude: Sequence[str]) -> Answer:
    """List the distributions of this environment, and where nodes get each from: Image.mirror()."""
    mirror = mirror_environment(only=only or None, exclude=exclude, report=lambda text: click.echo(text, err=True))
    rows = [
        (package.name, package.version, package.source or f"left out: {package.left_out}")
        for package in mirror.packages
    ]
    text: list[str | Rows] = [Rows(("name", "version", "source"), rows)]
    text.append(f"{len(mirror.requirements)} of {len(rows)} distributions; nothing was requested or bought")
    text += [f"The indexes were not asked: {mirror.unchecked}"] if mirror.unchecked else []
    facts = ("name", "version", "source", "left_out", "requirement", "note")
    documents = [
        {fact: getattr(package, fact) for fact in facts} | {"wheel": package.wheel and str(package.wheel)}
        for package in mirror.packages
    ]
    return Answer(document={"distributions": documents, "unchecked": mirror.unchecked}, text=text)
