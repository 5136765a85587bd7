"""Contract suite of every transport."""

from __future__ import annotations

import asyncio
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.base.waiting import wait_until
from skyward.errors import UnreachableError
from skyward.machine.access import Completed, Transport

__all__ = ["TransportContract"]

_DEADLINE_S = 30.0


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def _run(transport: Transport, code: str, *arguments: str, **options: Any) -> Completed:
    return await transport.run([*_python(code), *arguments], timeout_s=_DEADLINE_S, **options)


class TransportContract:
    """Contract suite of transports: subclass it, and define the fixtures.

    Fixtures:
        transport: a :class:`~skyward.providers.Transport` to a machine that shares this one's files, closed
            after the test.
        tmp_path: pytest's, a folder that both sides see.
    """

    async def test_output_and_exit_code_come_back(self, transport: Transport) -> None:
        """Receive both streams separately."""
        done = await _run(transport, "import sys; print('out'); print('err', file=sys.stderr); raise SystemExit(3)")
        assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")

    async def test_arguments_are_not_a_shells(self, transport: Transport) -> None:
        """Pass every character unchanged."""
        arguments = ["torch>=2", "x[y]", 'a"$HOME', "two\nlines", "", "é;&", "*"]
        done = await _run(transport, "import sys; print(ascii(sys.argv[1:]))", *arguments)
        assert done.stdout.strip() == ascii(arguments)

    async def test_environment_is_added(self, transport: Transport) -> None:
        """Add variables to the present environment."""
        code = "import os; print(os.environ['COLOUR'], 'PATH' in os.environ)"
        done = await _run(transport, code, env={"COLOUR": 'a"$b\nc'})
        assert done.stdout == 'a"$b\nc True\n'

    async def test_input_arrives_and_ends(self, transport: Transport) -> None:
        """Send more than a pipe holds."""
        done = await _run(transport, "import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * 300_000)
        assert done.stdout == "300000\n"

    async def test_much_output_arrives_whole(self, transport: Transport) -> None:
        """Receive more than a pipe holds, on both streams."""
        code = "import sys; sys.stdout.write('o' * 500_000); sys.stderr.write('e' * 500_000)"
        done = await _run(transport, code)
        assert (len(done.stdout), len(done.stderr)) == (500_000, 500_000)

    async def test_output_that_is_no_text_is_replaced(self, transport: Transport) -> None:
        """Replace malformed text without an error."""
        done = await _run(transport, r"import os; os.write(1, b'\xff')")
        assert done.stdout == "\N{REPLACEMENT CHARACTER}"

    async def test_command_that_does_not_exist_is_127(self, transport: Transport) -> None:
        """Return the exit code that a shell would."""
        done = await transport.run(["/no/such/program"], timeout_s=_DEADLINE_S)
        assert (done.exit_code, "/no/such/program" in done.stderr) == (127, True)

    async def test_signal_is_negative(self, transport: Transport) -> None:
        """Return the exit code that Python's subprocess would."""
        done = await _run(transport, "import os; os.kill(os.getpid(), 9)")
        assert done == Completed(exit_code=-9, stdout="", stderr="")

    async def test_command_past_its_deadline_ends_with_its_children(self, transport: Transport, tmp_path: Path) -> None:
        """End the whole process group."""
        pids = tmp_path / "pids"
        code = (
            "import os, subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
            "time.sleep(60)"
        )
        with pytest.raises(UnreachableError, match="within 2 s"):
            await transport.run(_python(code), timeout_s=2)
        await _all_gone([int(pid) for pid in pids.read_text().split()])

    async def test_daemon_does_not_hold_the_command_back(self, transport: Transport, tmp_path: Path) -> None:
        """Return although a daemon holds the inherited streams."""
        pid_file = tmp_path / "pid"
        code = (
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
            f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('up')"
        )
        done = await _run(transport, code)
        daemon = psutil.Process(int(pid_file.read_text()))
        assert done.stdout == "up\n"
        assert daemon.is_running()
        daemon.kill()
        await _all_gone([daemon.pid])

    async def test_cancelled_command_ends(self, transport: Transport, tmp_path: Path) -> None:
        """End a command without a waiting caller."""
        pid_file = tmp_path / "pid"
        code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
        running = asyncio.create_task(_run(transport, code))

        async def started() -> int | None:
            return int(pid_file.read_text() or 0) or None if pid_file.exists() else None

        pid = await wait_until(started, deadline_s=_DEADLINE_S, interval_s=0.01, what="the command to start")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await _all_gone([pid])

    async def test_commands_run_side_by_side(self, transport: Transport) -> None:
        """Return each command's own output."""
        commands = (_run(transport, f"print({n})") for n in range(4))
        assert [done.stdout for done in await asyncio.gather(*commands)] == ["0\n", "1\n", "2\n", "3\n"]

    async def test_put_writes_whole_private_files_in_new_folders(self, transport: Transport, tmp_path: Path) -> None:
        """Write with mode 0600, in folders of mode 0700."""
        target = tmp_path / "new" / "deeper" / "file"
        await transport.put(b"secret", str(target))
        assert target.read_bytes() == b"secret"
        assert _mode(target) == "0o600"
        assert _mode(target.parent) == "0o700"
        assert [path.name for path in target.parent.iterdir()] == ["file"]

    @pytest.mark.parametrize(
        "name", ["x" * 250, "x" * 255, "\u00fc" * 127, "-rf", " a ", "a\nb", "\udcff", "*", "$(date)", "a'\"\\"]
    )
    @pytest.mark.parametrize("mode", [0o600, 0o555])
    async def test_put_writes_a_file_of_any_name(
        self, transport: Transport, tmp_path: Path, name: str, mode: int
    ) -> None:
        """Write names of the longest length and of any bytes, in folders of such names, also over read-only files."""
        target = tmp_path / name / name
        for data in (b"first", b"second"):
            await transport.put(data, str(target), mode=mode)
        assert target.read_bytes() == b"second"
        assert _mode(target) == oct(mode)
        assert len(list(target.parent.iterdir())) == 1

    async def test_put_replaces_with_the_mode_asked_for(self, transport: Transport, tmp_path: Path) -> None:
        """Replace a file, which is idempotent."""
        target = tmp_path / "file"
        await transport.put(b"longer than the next", str(target))
        await transport.put(memoryview(b"short"), str(target), mode=0o755)
        assert target.read_bytes() == b"short"
        assert _mode(target) == "0o755"

    async def test_put_joins_parts(self, transport: Transport, tmp_path: Path) -> None:
        """Write parts without joining them in memory first."""
        target = tmp_path / "file"
        await transport.put([memoryview(b"one "), memoryview(b""), memoryview(b"two")], str(target))
        assert target.read_bytes() == b"one two"

    async def test_forward_answers_where_the_node_does(self, transport: Transport) -> None:
        """Return the same address for the same port."""
        greeting = asyncio.Event()

        async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()
            greeting.set()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            place = await transport.forward("127.0.0.1", port)
            assert await transport.forward("127.0.0.1", port) == place
            reader, writer = await asyncio.open_connection(*place)
            assert await reader.read() == b"hello"
            writer.close()
            await writer.wait_closed()
            await greeting.wait()

    async def test_closing_twice_is_fine(self, transport: Transport) -> None:
        """Close twice without an error."""
        await transport.close()
        await transport.close()

    def test_everything_works_off_the_main_thread(self, transport: Transport) -> None:
        """Run in a thread, like a pool's loop."""
        outputs: list[str] = []

        def run_there() -> None:
            outputs.append(asyncio.run(_run(transport, "print('hi')")).stdout)

        thread = threading.Thread(target=run_there)
        thread.start()
        thread.join(_DEADLINE_S)
        assert outputs == ["hi\n"]


def _mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


async def _all_gone(pids: list[int]) -> None:
    async def probe() -> bool | None:
        return None if any(_lives(pid) for pid in pids) else True

    await wait_until(probe, deadline_s=_DEADLINE_S, interval_s=0.01, what=f"processes {pids} to end")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
