from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from skyward.errors import ConfigurationError
from skyward.machine.ssh_commands import LOGIN_COMMAND, Output, exit_code, script

TOKEN = "0123456789abcdef"
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]
STRANGE = ["torch>=2", "x[y]", 'a"$HOME', "two\nlines", "\n", "", "é;&", "*", "it's", "\\n\\", "!x", "\x01\x7f", "%s"]


def command(shell: str) -> list[str]:
    """What sshd would run, with another shell in the place of /bin/sh."""
    name = "busybox sh" if shell == "busybox" else shell
    return ["/bin/sh", "-c", LOGIN_COMMAND.replace("/bin/sh", name)]


def run(shell: str, argv: list[str], given: bytes = b"", env: dict[str, str] | None = None) -> tuple[int, bytes, bytes]:
    line = script(argv, env or {}, token=TOKEN, input_bytes=len(given))
    out, err = Output(TOKEN.encode()), Output(TOKEN.encode())
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command(shell), stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(line + given)
            process.stdin.flush()
            process.wait(30)
            process.stdin.write(f"\n{TOKEN}\n".encode())
        for output, file in ((out, stdout), (err, stderr)):
            file.seek(0)
            output.add(file.read())
    assert out.status is not None
    assert out.status == err.status
    return out.status, out.content, err.content


@pytest.mark.parametrize("shell", SHELLS)
def test_every_character_arrives(shell: str) -> None:
    code = "import os, sys; print(ascii([sys.argv[1:], os.environ['STRANGE']]))"
    joined = "".join(STRANGE)

    status, out, err = run(shell, [sys.executable, "-c", code, *STRANGE], env={"STRANGE": joined})

    assert (status, out.decode().strip(), err) == (0, ascii([STRANGE, joined]), b"")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", ["TMOUT", "BASH_ENV", "ENV", "CDPATH", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP"])
def test_what_a_login_sets_for_interactive_work_does_not_count(
    shell: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")  # https://github.com/tmux/tmux/issues/4459: TMOUT ends each read of the script's own
    assert run(shell, ["sh", "-c", f"echo ${{{name}-unset}}"]) == (0, b"unset\n", b"")
    assert run(shell, ["sh", "-c", f"echo ${{{name}-unset}}"], env={name: "2"}) == (0, b"2\n", b"")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("given", [b"", b"\0one\n", b"x" * 300_000], ids=len)
def test_input_arrives_and_ends(shell: str, given: bytes) -> None:
    assert run(shell, ["cat"], given) == (0, given, b"")


@pytest.mark.parametrize("shell", SHELLS)
def test_input_that_is_not_read_does_no_harm(shell: str) -> None:
    assert run(shell, ["true"], b"x\n" * 50_000) == (0, b"", b"")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("argv", "code"),
    [(["sh", "-c", "exit 3"], 3), (["/no/such"], 127), (["/etc/passwd"], 126), (["sh", "-c", "kill -9 $$"], -9)],
)
def test_status_is_the_commands(shell: str, argv: list[str], code: int) -> None:
    status, out, err = run(shell, argv)

    assert (exit_code(status), out) == (code, b"")
    assert (argv[0] in err.decode()) == (code in {126, 127})


@pytest.mark.parametrize("shell", SHELLS)
def test_command_is_killed_with_its_children_when_the_input_ends(shell: str) -> None:
    line = script(["sh", "-c", "echo up; sleep 60 & sleep 60"], {}, token=TOKEN, input_bytes=0)
    process = subprocess.Popen(
        command(shell), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    assert process.stdout.readline() == f"{TOKEN}up\n".encode()

    out, _ = process.communicate(timeout=10)  # closes the input; returns when nobody holds the output any more

    assert process.returncode == -9
    assert out == b""


def test_login_shells_see_one_plain_word() -> None:
    assert re.fullmatch(r"exec /bin/sh -c '[^'\\!\n]*'", LOGIN_COMMAND)  # the same in sh, bash, fish and csh


@pytest.mark.parametrize("name", ["", "A-B", "1A", "A=B", "A\n"])
def test_variable_that_a_shell_cannot_set_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no name of an environment variable"):
        script(["true"], {name: "x"}, token=TOKEN, input_bytes=0)


def test_null_bytes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="null bytes"):
        script(["echo", "a\0b"], {}, token=TOKEN, input_bytes=0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_output_is_found_however_it_is_cut(size: int) -> None:
    said = f"noise from a profile\n{TOKEN}what it printed, {TOKEN[:-1]}{TOKEN}42\nmore from a daemon{TOKEN}9\n".encode()
    output = Output(TOKEN.encode())

    for start in range(0, len(said), size):
        output.add(said[start : start + size])

    assert (output.status, output.content) == (42, f"what it printed, {TOKEN[:-1]}".encode())


def test_a_login_that_prints_the_script_has_no_end() -> None:
    output = Output(TOKEN.encode())
    output.add(script(["true"], {}, token=TOKEN, input_bytes=0))

    assert output.status is None


def test_output_without_an_end_is_kept_as_far_as_it_came() -> None:
    output = Output(TOKEN.encode())
    output.add(b"This account is not available.\n")

    assert (output.status, output.content) == (None, b"This account is not available.\n")
