"""``skyward jobs``, ``result``, ``cancel`` and ``run``: jobs of kept pools, from any terminal of their user."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Final

import click

from skyward.api.jobs import Job, JobState, fetch_results, is_known, job, jobs, spawn_calls
from skyward.api.script import read_script, script_invocation
from skyward.cli._base import FAILED, Answer, Rows, answers, moment
from skyward.display.words import duration
from skyward.errors import ConfigurationError, PoolStateError, SerializationError
from skyward.ledger.fleet_record import FleetFolder, no_such_fleet
from skyward.ledger.job_folders import job_name_of

_SIGNALLED: Final = 128
"""Exit code of a program that a signal has ended, less that signal's number."""
_OVER: Final = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


def known_job(name: str, pool: str | None) -> Job:
    """Return the job of this id.

    Raises :class:`click.BadParameter` if there is none, or there are several.
    """
    try:
        return job(name, pool=pool)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="JOB") from None


@click.command(name="jobs")
@click.argument("pool", required=False)
@click.option("--fetch", is_flag=True, help="First copy the results that are there to this machine, where they stay.")
@answers
def list_jobs(*, pool: str | None, fetch: bool) -> Answer:
    """List the jobs of a kept pool, or of all: state, how many calls are over, and since when."""
    if pool and not is_known(pool):
        raise click.BadParameter(str(no_such_fleet(pool)), param_hint="POOL")
    if fetch:
        for name in [pool] if pool else {each.pool for each in jobs()}:
            fetch_results(name)
    now, rows, documents = time.time(), list[tuple[str, ...]](), list[dict[str, Any]]()
    for each in jobs(pool):
        state, progress = each.status()
        facts = {"job": each.id, "pool": each.pool, "state": state.value, "function": each.label}
        counts = {"calls": progress.total, "done": progress.done, "failed": progress.failed}
        documents.append({**facts, **counts, "spawned": moment(each.spawned_at)})
        calls = f"{progress.ended}/{progress.total}"
        rows.append((each.id, each.pool, state.value, calls, f"{duration(now - each.spawned_at)} ago", each.label))
    none = (
        f"The pool {pool!r} has no jobs." if pool else "No pool has jobs; pool.spawn(call) and `skyward run` make them."
    )
    text: list[str | Rows] = [Rows(("job", "pool", "state", "over", "spawned", "function"), rows)] if rows else [none]
    return Answer(document={"jobs": documents}, text=text)


@click.command()
@click.argument("name", metavar="JOB")
@click.option("--pool", metavar="NAME", help="The job's pool, if several have a job of that name.")
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this file, pickled, or text and bytes as they are.",
)
@click.option("--wait", is_flag=True, help="Wait until the job is over.")
@answers
def result(*, name: str, pool: str | None, to: Path | None, wait: bool) -> Answer:
    """Fetch the result of a job, and print it; what it raised is an error here.

    Run it in the job's project, so that classes of the result can be imported.
    """
    found = known_job(name, pool)
    try:
        with _modules_from_here():
            value = found.result(None if wait else 0)
    except TimeoutError:
        text = f"job {name} is {found.state.value}, not over; --wait waits for it"
        return Answer(document={"job": name, "error": text}, text=[text], exit_code=FAILED)
    except (PoolStateError, SerializationError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return Answer(document={"job": name, "error": said}, text=[f"job {name} failed: {said}"], exit_code=FAILED)
    if to is not None:
        try:
            to.write_bytes(_content(value))
        except OSError as error:
            raise click.BadParameter(f"cannot write {to}: {error.strerror}", param_hint="--to") from None
        return Answer(document={"job": name, "file": str(to)}, text=[f"{to}: the result of job {name}"])
    return Answer(
        document={"job": name, "result": _as_json(value)}, text=[value if isinstance(value, str) else repr(value)]
    )


@contextmanager
def _modules_from_here() -> Generator[None]:
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _content(value: object) -> bytes:
    match value:
        case bytes():
            return value
        case str():
            return value.encode()
        case _:
            return pickle.dumps(value)


def _as_json(value: object) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


@click.command()
@click.argument("names", metavar="JOB...", nargs=-1, required=True)
@click.option("--pool", metavar="NAME", help="The jobs' pool, if several have a job of that name.")
@answers
def cancel(*, names: Sequence[str], pool: str | None) -> Answer:
    """Cancel jobs: calls that wait do not begin, running ones are ended."""
    text: list[str] = []
    cancelled: list[str] = []
    for found in [known_job(name, pool) for name in names]:
        before = found.state
        found.cancel()
        if before not in _OVER:
            cancelled.append(found.id)
        text.append(f"{found.id}: {f'was {before.value} already' if before in _OVER else 'cancelled'}")
    return Answer(document={"cancelled": cancelled}, text=text)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--on", "pool", metavar="NAME", required=True, help="The kept pool on which it runs.")
@click.option("--name", help="The job's name; without it, the script's and some letters.")
@click.option("--retries", type=click.IntRange(min=0), default=0, help="Runs after the first, if its node is lost.")
@click.option("-d", "--detach", is_flag=True, help="Return at once instead of following its output.")
@answers
def run(*, script: Path, arguments: Sequence[str], pool: str, name: str | None, retries: int, detach: bool) -> Answer:
    """Run a script on a kept pool, detached, and follow its output; the exit code is the script's.

    The files of its project go along. Ctrl-C, or a closed terminal, ends the following, not the script. Options that
    this command has, too, follow after `--`.
    """
    as_json: bool = click.get_current_context().params["as_json"]
    record = FleetFolder(pool).read()
    if record is None:
        raise click.BadParameter(str(no_such_fleet(pool)), param_hint="--on")
    shipped = read_script(script, arguments)
    name = name or job_name_of(script.stem)
    call = script_invocation(shipped, name, retries=retries)
    place = record.request.results_location
    spawned = spawn_calls([call], fleet=pool, pool_id=record.pool_id, name=name, results=place)
    click.echo(
        f"Job {name} is on {pool}, with the files of {shipped.project}, and runs once a worker is free; "
        f"`skyward logs {pool} {name} -f` follows it, also later.",
        err=True,
    )
    if detach:
        return Answer(document={"job": name, "pool": pool})
    try:
        for line in spawned.logs(follow=True):
            if not as_json:
                click.echo(line.line, err=line.stream == "stderr")
        code: int = spawned.result()
    except CalledProcessError as ended:
        code = ended.returncode if ended.returncode > 0 else _SIGNALLED - ended.returncode
    except KeyboardInterrupt:
        click.echo(f"Job {name} goes on; `skyward cancel {name}` ends it.", err=True)
        return Answer(document={"job": name, "pool": pool}, exit_code=FAILED)
    return Answer(document={"job": name, "pool": pool, "exit_code": code}, exit_code=code)
