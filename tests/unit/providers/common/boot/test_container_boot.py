import http.server
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from skyward.providers._common.logins import make_key_pair
from skyward.providers._common.machine_boot import MAY_END_COMMAND, ContainerBoot, EndProbe, HttpCall
from skyward.testing import hosts
from skyward.testing.hosts import find_openssh, require_sshd

KEY = "pod-key-0123456789"
TOOLS = "base64 cat chmod grep gzip head mkdir mv rm sed sleep tail timeout tr wc"
SENDERS = [name for name in ("curl", "python3", "wget", "openssl") if shutil.which(name)]
SHELLS = [name for name in ("dash", "bash", "busybox") if shutil.which(name)]
PATIENCE_S = 60.0


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        threading.Event().wait(0.02)
    return found


def arguments_of_all() -> str:
    """The arguments of every process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


@dataclass
class Api:
    """A vendor: answers by method, in order; the last one again and again."""

    answers: dict[str, list[int]] = field(default_factory=lambda: {"GET": [200], "DELETE": [204], "POST": [204]})
    calls: list[tuple[str, str, str, str]] = field(default_factory=list)
    arguments: str = ""
    server: Any = None

    def asked(self, method: str) -> list[tuple[str, str, str, str]]:
        return [each for each in self.calls if each[0] == method]

    def listen(self) -> None:
        self.server.server_activate()
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        if hasattr(self, "thread"):
            self.server.shutdown()
            self.thread.join()
        self.server.server_close()


def make_api(certificate: Path | None = None) -> Api:
    api = Api()

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            api.arguments += arguments_of_all()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            left = api.answers.get(f"{self.command} {self.path}") or api.answers[self.command]
            status = left.pop(0) if len(left) > 1 else left[0]
            api.calls.append((self.command, self.path, self.headers.get("Authorization", ""), body))
            text = b"" if status == 204 else b'{"detail": "this key may not"}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_DELETE = do_PATCH = do_POST = do_PUT = answer  # noqa: N815 - the server's names

        def log_message(self, *args: Any) -> None:
            pass

    api.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    api.server.server_bind()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    return api


@dataclass
class Container:
    """A folder in the container's place, with the few programs that its image has, and a clock that stands still."""

    place: Path
    api: Api
    url: str
    shell: str = "dash"
    facts: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    running: Any = None
    check: HttpCall | None = None
    probe: EndProbe | None = None

    def __post_init__(self) -> None:
        self.tools, self.folder, self.mark = self.place / "bin", self.place / "state", f"M{uuid.uuid4().hex}"
        self.tools.mkdir()
        for name in TOOLS.split():
            self.give(name)
        self.give("sh", shutil.which(self.shell))
        self.program("date", f"echo pass >>{self.place}/passes; cat {self.place}/now")
        self.now(1000)
        self.server("exec sleep 1000")
        self.own, self.user = make_key_pair(), make_key_pair()

    def give(self, name: str, path: str | None = None) -> None:
        (self.tools / name).symlink_to(path or shutil.which(name) or name)

    def program(self, name: str, text: str) -> None:
        (self.tools / name).write_text(f"#!{shutil.which(self.shell)}\n{text}\n")
        (self.tools / name).chmod(0o755)

    def server(self, text: str) -> None:
        """Put something in the place of sshd."""
        self.program(str(self.place / "sshd"), text)

    def now(self, seconds: int) -> None:
        (self.place / "now.new").write_text(str(seconds))
        (self.place / "now.new").rename(self.place / "now")

    @property
    def boot(self) -> ContainerBoot:
        auth, url = ("Authorization: Bearer ${POD_KEY}",), self.url + "/pods/${POD_ID}"
        last = HttpCall(method="POST", url=url + "/action", headers=auth, body='{"action": "$terminate"}')
        facts = {"folder": str(self.folder), "sshd_paths": f"{self.place}/sshd", "policy": f"{self.place}/policy"}
        facts |= {"shadow": f"{self.place}/shadow", "empty_folder": f"{self.place}/empty"}
        facts |= {"supervisor": f"[M]{self.mark[1:]}"}
        facts |= {"every_s": "0.1", "again_s": "0.1", "accepted_s": "1000", "most_absences": "3", "answer_s": "1"}
        return ContainerBoot(
            host_key=self.own,
            user_key=self.user.public,
            port=int(self.facts.get("port", 22)),
            made_at=1000,
            ends_at=1880,
            end=[HttpCall(method="DELETE", url=url, headers=auth), last],
            check=self.check or HttpCall(method="GET", url=url, headers=auth),
            probe=self.probe,
            facts=facts | self.facts,
        )

    def start(self) -> None:
        env = {"PATH": str(self.tools), "HOME": str(self.place), "POD_ID": "p1", "POD_KEY": KEY, **self.env}
        with open(self.place / "log", "ab") as log:
            self.running = subprocess.Popen(
                [self.tools / "sh", *shlex.split(self.boot.command)[1:]],
                env=env | self.boot.variable,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        if self.running is not None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()

    @property
    def log(self) -> str:
        return (self.place / "log").read_text()

    def passes(self, count: int = 2) -> None:
        """Wait for more passes of the loop."""
        path = self.place / "passes"
        seen = len(path.read_text().split()) if path.exists() else 0
        wait_for(lambda: path.exists() and len(path.read_text().split()) >= seen + count)

    def run(self, name: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["sh", self.folder / name], capture_output=True, text=True, timeout=60, check=False)

    def may_end(self) -> str:
        path = self.folder / "may-end"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    with ExitStack() as stack:

        def make(*senders: str, listening: bool = True, tls: Path | None = None, **settings: Any) -> Container:
            api = make_api(tls)
            stack.callback(api.close)
            place = tmp_path / uuid.uuid4().hex
            place.mkdir()
            host = f"http{'s' if tls else ''}://localhost:{api.server.server_port}/v2"
            made = Container(place=place, api=api, url=host, **settings)
            for sender in senders or ("curl",):
                made.give(sender, os.path.realpath(sys.executable) if sender == "python3" else None)
            stack.callback(made.stop)
            if listening:
                api.listen()
            return made

        yield make


@pytest.fixture
def supervisor() -> Iterator[Callable[[Container], "subprocess.Popen[bytes]"]]:
    with ExitStack() as stack:

        def start(container: Container) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", container.mark])
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def make_certificate(path: Path) -> Path:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1).not_valid_before(datetime.now(UTC))
    made = made.not_valid_after(datetime.now(UTC) + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_runs_it(container, shell):
    made = container(shell=shell, facts={"ends_at": "1"})  # busybox has a clock of its own
    made.start()

    wait_for(lambda: made.api.asked("DELETE"))

    wait_for(lambda: made.may_end() == "yes")


def test_the_deadline_is_absolute_however_often_the_main_process_restarts(container):
    made = container()
    made.start()
    made.passes()
    made.stop()
    made.now(1999)
    made.start()
    made.passes()
    assert made.api.asked("DELETE") == []

    made.now(2000)  # 120 s after `ends_at`

    wait_for(lambda: made.api.asked("DELETE"))


def test_a_clock_that_is_behind_postpones_nothing(container):
    """An hour behind at the first start: the deadline is 1000 s after it, restarts or not."""
    made = container(facts={"made_at": "4600", "ends_at": "5600"})
    made.start()
    made.passes()
    made.stop()
    made.now(1990)
    made.start()
    made.passes()
    assert made.api.asked("DELETE") == []
    made.now(2001)
    wait_for(lambda: made.api.asked("DELETE"))


def test_a_clock_that_fails_ends_nothing(container):
    made = container()
    made.program("date", f"echo pass >>{made.place}/passes; exit 1")
    made.start()
    made.passes(4)

    assert made.api.asked("DELETE") == []


def test_a_container_whose_supervisor_was_there_and_is_gone_ends(container, supervisor):
    made = container()
    made.start()
    made.passes(6)
    assert made.api.asked("DELETE") == [], "none was there yet"

    process = supervisor(made)
    wait_for((made.folder / "supervised").exists)
    made.passes(6)
    assert made.api.asked("DELETE") == []
    process.kill()
    process.wait()

    wait_for(lambda: made.api.asked("DELETE"))


def test_a_container_that_nobody_uses_ends_unless_its_client_is_connected(container, tmp_path):
    """The client died before it started the supervisor, or before its container's disk was emptied by a restart."""
    connections = tmp_path / "tcp"
    connections.write_text("   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 0100007F:1F90 0100007F:D2A4 01 0\n")
    made = container(facts={"port": "8080", "connections": str(connections), "most_unattended": "5"})
    made.start()
    made.passes(12)
    assert made.api.asked("DELETE") == []
    connections.write_text("   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 0100007F:1F91 0100007F:D2A4 01 0\n")
    wait_for(lambda: made.api.asked("DELETE"))
    assert "nobody has used it" in made.log


@pytest.mark.parametrize("sender", [each for each in SENDERS if each in ("curl", "python3")])
def test_a_full_disk_keeps_nothing_from_ending(container, sender):
    """On a disk without room, and after a restart there; a quota and a file system that went read-only are alike."""
    made = container(sender)
    made.start()
    wait_for(lambda: made.may_end() == "yes")
    made.stop()
    # A folder of a name makes every file of that name impossible: root may write to read-only folders.
    for name in ("new", "host_key.new", "authorized_keys.new", "may-end.new", "may-end.sh.new", "sshd_config.new"):
        (made.folder / name).unlink(missing_ok=True)
        (made.folder / name).mkdir()
        (made.folder / name / "x").touch()
    made.start()
    made.passes()
    assert made.api.asked("DELETE") == []
    assert made.run("end").returncode == 0
    wait_for(lambda: "accepts the end" in made.log)


def test_a_disk_that_takes_nothing_at_the_first_start_ends_the_container(container):
    made = container()
    made.folder.mkdir()
    (made.folder / "end.new").mkdir()
    made.start()
    wait_for(lambda: "accepts the end" in made.log)


def test_a_restart_after_which_no_supervisor_comes_ends_the_container(container, supervisor):
    made = container()
    made.start()
    process = supervisor(made)
    wait_for((made.folder / "supervised").exists)
    made.stop()
    process.kill()
    process.wait()

    made.start()

    wait_for(lambda: made.api.asked("DELETE"))


def test_the_end_is_requested_in_every_way_until_it_is_accepted_and_then_not_again(container):
    made = container(listening=False)
    made.api.answers |= {"DELETE": [429, 500, 403, 404, 204], "POST": [429, 409, 500]}
    made.start()
    wait_for((made.folder / "end").exists)

    assert made.run("end").returncode == 0
    wait_for(lambda: "no answer" in made.log)
    made.api.listen()

    wait_for(lambda: "accepts the end" in made.log)
    assert len(made.api.asked("DELETE")) == 5
    assert [each[0] for each in made.api.calls if each[0] != "GET"][-9:] == ["DELETE", "POST"] * 4 + ["DELETE"]
    made.stop()
    assert len(made.api.asked("DELETE")) == 5
    made.start()  # the provider accepted it, and has restarted it instead
    wait_for(lambda: len(made.api.asked("DELETE")) == 6)


def test_a_refusal_may_have_a_status_of_success(container):
    made = container(facts={"answer_s": "0"})
    call = HttpCall(method="PUT", url=made.url, headers=("Authorization: Bearer ${POD_KEY}",), refusal='"detail":"this')
    made.check, made.api.answers["PUT"] = call, [200]
    made.start()
    wait_for(lambda: made.may_end().startswith("no: refused by PUT"))


@pytest.mark.parametrize("sender", SENDERS)
def test_one_program_that_sends_requests_suffices_and_no_argument_holds_the_key(container, tmp_path, sender):
    certificate = make_certificate(tmp_path / "certificate") if sender == "openssl" else None
    made = container(sender, tls=certificate)
    made.api.answers["DELETE"] = [500]
    made.env["SSL_CERT_FILE"] = str(certificate)
    made.start()
    wait_for(lambda: made.may_end() == "yes")

    made.run("end")

    wait_for(lambda: made.api.asked("POST"))
    bearer = f"Bearer {KEY}"
    assert made.api.asked("GET")[0] == ("GET", "/v2/pods/p1", bearer, "")
    assert made.api.asked("DELETE")[0] == ("DELETE", "/v2/pods/p1", bearer, "")
    assert made.api.asked("POST")[0] == ("POST", "/v2/pods/p1/action", bearer, '{"action": "$terminate"}')
    assert sender in made.api.arguments
    assert KEY not in made.api.arguments
    assert KEY not in made.log


def test_the_outcome_of_the_check_is_kept_and_shown(container):
    made = container(listening=False)
    made.api.answers["GET"] = [503, 503, 503, 401, 200]
    made.start()
    wait_for(lambda: made.may_end().startswith("not known: no answer from http://localhost"))
    assert made.run("may-end.sh").returncode == 1

    made.api.listen()
    wait_for(lambda: made.may_end() == "yes")

    assert made.run("may-end.sh").returncode == 0
    assert MAY_END_COMMAND[1].endswith("/may-end.sh")


def test_a_refused_check_gives_its_reason(container):
    made = container()
    made.api.answers["GET"] = [403]
    made.start()
    wait_for(made.may_end)

    shown = made.run("may-end.sh")

    assert shown.returncode == 1
    assert shown.stdout.startswith("no: status 403 for GET http://localhost")
    assert "this key may not" in shown.stdout
    assert KEY not in shown.stdout


PROBED = {
    "a key that may do all": ([200], [404], [404], [200], "yes"),
    "a key that may delete, and change nothing": ([403], [403], [404], [200], "yes"),
    "the same, where what does not exist counts as deleted": ([403], [403], [204], [200], "yes"),
    "a key that may read only, judged before existence": ([403], [403], [403], [200], "unsure: status 403 for PATCH"),
    "a key of unknown rights, judged after existence": ([403], [404], [404], [200], "unsure: status 403 for PATCH"),
    "a key that is refused altogether": ([403], [403], [403], [403], "no: status 403 for PATCH"),
    "a key that is not known": ([401], [401], [401], [401], "no: status 401 for PATCH"),
    "an answer comes late": ([403], [503, 503, 403], [404], [200], "yes"),
    "throttled": ([403], [403], [429, 429, 404], [200], "yes"),
}


@pytest.mark.parametrize("name", PROBED)
def test_a_key_that_is_refused_the_check_may_still_be_allowed_the_end(container, name):
    own, absent_check, absent_end, read, outcome = PROBED[name]
    made = container()
    auth, url = ("Authorization: Bearer ${POD_KEY}",), made.url + "/pods/${POD_ID}"
    made.check = HttpCall(method="PATCH", url=url, headers=auth, body="{}")
    made.probe = EndProbe(
        absent_check=HttpCall(method="PATCH", url=url + "-none", headers=auth, body="{}"),
        absent_end=HttpCall(method="DELETE", url=url + "-none", headers=auth),
        read=HttpCall(method="GET", url=url, headers=auth),
    )
    made.api.answers |= {"PATCH /v2/pods/p1": own, "PATCH": absent_check, "DELETE": absent_end, "GET": read}
    made.start()
    wait_for(lambda: made.may_end() and not made.may_end().startswith("not known"))

    assert made.may_end().startswith(outcome)
    assert made.run("may-end.sh").returncode == (outcome != "yes")
    assert all(path != "/v2/pods/p1" for _, path, *_ in made.api.asked("DELETE"))


def test_a_call_with_a_variable_that_is_missing_waits_for_it(container):
    made = container()
    made.env |= {"POD_KEY": ""}
    made.start()
    wait_for(lambda: made.may_end() == "not known: the container has no POD_KEY")
    assert made.api.calls == []


def test_the_secret_of_the_user_is_read_from_its_file(container):
    made = container()
    call = HttpCall(method="DELETE", url=made.url + "/x", headers=("Authorization: Bearer ${SKYWARD_SECRET}",))
    wanted = ContainerBoot(
        host_key=made.own, user_key="", port=1, made_at=0, ends_at=0, end=[call], check=call, facts=made.boot.facts
    )
    made.folder.mkdir()
    (made.folder / "secret").write_text("of-the-user")
    env = {"PATH": str(made.tools)} | wanted.variable
    made.running = subprocess.Popen(wanted.arguments, env=env, start_new_session=True, stdout=subprocess.DEVNULL)

    wait_for(lambda: made.api.asked("DELETE"))
    assert made.api.asked("DELETE")[0][2] == "Bearer of-the-user"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_sshd_is_ours_alone_whatever_becomes_of_the_vendors_keys(container):
    require_sshd()
    program = find_openssh("sshd")
    assert program is not None
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    options = "\n".join(["ListenAddress 127.0.0.1", *hosts._split_programs(program)])
    made = container(facts={"sshd_options": options, "port": str(free_port())})
    made.env |= {"LD_PRELOAD": "/nowhere.so", "LD_LIBRARY_PATH": "/nowhere"}
    library = hosts._server_env(program).get("LD_LIBRARY_PATH", "")
    made.server(
        f'echo "${{LD_PRELOAD-unset}} ${{LD_LIBRARY_PATH-unset}}" >>{made.place}/variables\n'
        f'LD_LIBRARY_PATH={shlex.quote(library)} exec {program} "$@"'
    )
    (made.place / "shadow").write_text("root:!locked::0:99999:7:::\nbin:!:1::::::\n")
    vendors = made.place / ".ssh/authorized_keys"
    vendors.parent.mkdir()
    key, known = made.place / "key", made.place / "known"
    key.touch(mode=0o600)
    key.write_text(made.user.private)
    port = made.facts["port"]
    known.write_text(f"[127.0.0.1]:{port} {made.own.public}\n")
    client = f"ssh -F none -p {port} -i {key} -o IdentitiesOnly=yes -o UserKnownHostsFile={known} -o BatchMode=yes"

    def logs_in() -> bool:
        done = subprocess.run(
            [*client.split(), "127.0.0.1", "echo", "in"], capture_output=True, timeout=60, check=False
        )
        return done.stdout == b"in\n"

    made.start()
    wait_for(logs_in)
    vendors.write_text("")
    assert logs_in()
    assert (made.place / "variables").read_text().split("\n")[0] == "unset unset"
    assert (made.place / "shadow").read_text() == "root:*::0:99999:7:::\nbin:!:1::::::\n"

    made.stop()
    made.start()  # behind the same host key, once the port is free
    wait_for(logs_in)
    server = next(line for line in arguments_of_all().splitlines() if str(made.folder / "sshd_config") in line)
    assert "-D" in server


def test_sshd_that_dies_is_started_again(container):
    made = container()
    made.server(f"echo up >>{made.place}/starts")
    made.start()

    wait_for(lambda: (made.place / "starts").exists() and len((made.place / "starts").read_text().split()) > 2)


@pytest.mark.parametrize(
    ("manager", "order"),
    [
        ("apt-get", "install -qy --no-install-recommends openssh-server curl"),
        ("apk", "add --no-cache openssh-server curl"),
        ("dnf", "install -y openssh-server curl"),
        ("microdnf", "install -y openssh-server curl"),
        ("yum", "install -y openssh-server curl"),
    ],
)
def test_missing_programs_are_installed_whatever_the_image(container, manager, order):
    made = container("true")
    sshd = made.place / "sshd"
    sshd.unlink()
    curl = f"ln -s {shutil.which('curl')} {made.tools}/curl"
    made.give("ln")
    made.give("touch")
    made.program(manager, f'echo "$*" >>{made.place}/asked\ntouch {sshd}; chmod 755 {sshd}; {curl}')
    made.start()

    wait_for(lambda: made.may_end() == "yes")

    assert order in (made.place / "asked").read_text()
    assert manager != "apt-get" or "exit 101" in (made.place / "policy").read_text()


def test_an_installation_that_fails_once_is_repeated(container):
    made = container()
    made.facts["sshd_paths"] = f"{made.tools}/sshd"
    text = f'[ -e {made.place}/tried ] && echo "exec sleep 1000" >{made.tools}/sshd && chmod +x {made.tools}/sshd'
    made.program("dnf", f"{text} && exit; echo once >{made.place}/tried; exit 1")
    made.start()
    wait_for((made.tools / "sshd").exists)
    made.passes()
    assert made.api.asked("DELETE") == []


def test_an_image_in_which_nobody_could_ever_log_in_ends_at_once(container):
    made = container("curl")
    (made.place / "sshd").unlink()
    made.start()

    wait_for(lambda: made.api.asked("DELETE"))

    assert "the image has no package manager, and lacks openssh-server" in made.log


def test_the_command_is_the_same_text_however_a_vendor_splits_it(container):
    boot = container().boot
    (name,) = boot.variable

    assert name == "SKYWARD_BOOT"
    assert boot.command.split() == shlex.split(boot.command) == list(boot.arguments)
    assert boot.host_key.private not in boot.command
    assert len(boot.variable[name]) < 16000


@pytest.mark.parametrize("text", ["$(touch x) `touch x` \\ \" ' $x ${x} $$", "a\nb", '{"a": "$b"}', ""])
def test_a_call_expands_named_variables_and_nothing_else(text):
    call = HttpCall(method="POST", url="u/${POD_ID}", headers=(f"X: {text}",), body=f"${{POD_ID}}{text}")
    show = 'call; printf "%s\\n--\\n%s" "$url" "$body"'

    done = subprocess.run(
        ["sh", "-uc", call.function("call") + show], env={"POD_ID": "p 1"}, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"u/p 1\n--\np 1{text}"


def test_shellcheck_finds_nothing(container):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    arguments = [shellcheck, "--shell=sh", "--severity=style", "-"]

    done = subprocess.run(arguments, input=container().boot.script, capture_output=True, text=True, check=False)

    assert done.stdout == ""


def test_the_private_host_key_is_in_no_repr(container):
    made = container()

    assert made.own.private not in repr(made.boot)
    assert json.dumps(made.boot.variable).count("SKYWARD_BOOT") == 1
