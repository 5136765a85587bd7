"""What of an included folder stays here: repositories, environments, caches, and what git ignores, as git says it."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.request.includes import describe_includes, included_files, select_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return home


def write(folder: Path, *files: str, **texts: str) -> Path:
    for name in (*files, *texts):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(name, ""))
    return folder


def git(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout


def sent(folder: Path) -> list[str]:
    files = included_files([str(folder)])
    return [file.name.partition("/")[2] for file in files if not file.path.is_dir()]


@pytest.mark.parametrize(
    "left_out",
    [
        ".git/config",
        ".hg/store",
        ".svn/entries",
        ".jj/repo",
        "venv/pyvenv.cfg",
        "my env/pyvenv.cfg",
        "deep/er/.venv/pyvenv.cfg",
        "conda/conda-meta/history",
        "__pycache__/a.cpython-311.pyc",
        "old.pyc",
        "node_modules/left-pad/index.js",
        "deep/.ipynb_checkpoints/a.ipynb",
        ".mypy_cache/x",
        ".pytest_cache/x",
        ".ruff_cache/x",
        ".tox/x",
    ],
)
def test_what_no_call_needs_stays_here(left_out: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "a.py", "deep/b.py", left_out)

    assert sent(folder) == ["a.py", "deep/b.py"]


def test_a_folder_that_says_it_is_a_cache_stays_here(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "a.py", "target/huge.bin", "other/CACHEDIR.TAG")
    (folder / "target/CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# made by cargo\n")

    assert sent(folder) == ["a.py", "other/CACHEDIR.TAG"]


def test_the_file_that_links_a_working_tree_to_its_repository_stays_here(tmp_path: Path) -> None:
    assert sent(write(tmp_path / "project", "a.py", ".git")) == ["a.py"]


RULES = {
    ".gitignore": "*.log\n/build/\n!important.log\ndata/*\n!data/keep.csv\n# comment\n\\#odd\ntrailing.txt  \n[\n",
    "sub/.gitignore": "!again.log\nlocal\nnested/**/deep\n",
    "sub/inner/.gitignore": "*\n!.gitignore\n!only.py\n",
}
FILES = [
    *("a.py", "a.log", "important.log", "build/x", "sub/build/y", "data/keep.csv", "data/drop.csv", "#odd"),
    *("trailing.txt", "sub/again.log", "sub/b.log", "sub/local/z", "sub/nested/1/2/deep/q", "sub/nested/deep/q"),
    *("sub/inner/only.py", "sub/inner/other.py", "secret.env", "tmp.swp"),
]


@pytest.mark.parametrize("has_repository", [True, False])
def test_rules_of_git_hold_in_repositories_and_outside_of_them(
    has_repository: bool, tmp_path: Path, home: Path
) -> None:
    folder = write(tmp_path / "project", *FILES, **RULES)
    write(home, **{".config/git/ignore": "*.swp\n"})
    expected = {
        "a.py",
        "important.log",
        "sub/build/y",
        "data/keep.csv",
        "sub/again.log",
        "sub/inner/only.py",
        "secret.env",
    }
    if has_repository:
        git(folder, "init", "-q")
        (folder / ".git/info/exclude").write_text("secret.env\n")
        expected.remove("secret.env")

    assert {*sent(folder)} == {*expected, *RULES}


def test_the_users_own_file_of_rules_holds_wherever_it_lies(tmp_path: Path, home: Path) -> None:
    (home / ".gitconfig").write_text(f"[core]\n\texcludesFile = {home}/my rules\n")
    (home / "my rules").write_text("*.swp\n")

    assert sent(write(tmp_path / "project", "a.py", "b.swp")) == ["a.py"]


@pytest.mark.parametrize("rules", ["assets/\n", "/assets\n", "*\n", "assets\n!other\n", "/*\n!/src\n"])
def test_a_folder_that_is_named_is_sent_though_its_repository_ignores_it(rules: str, tmp_path: Path) -> None:
    repository = write(tmp_path / "repository", "assets/a.csv", "assets/b/c.csv", **{".gitignore": rules})
    git(repository, "init", "-q")

    assert sent(repository / "assets") == ["a.csv", "b/c.csv"]


def test_rules_above_a_named_folder_hold_for_what_is_in_it(tmp_path: Path) -> None:
    repository = write(tmp_path / "repository", "src/a.py", "src/.env", "src/x/.env", **{".gitignore": ".env\nsrc/\n"})
    git(repository, "init", "-q")

    assert sent(repository / "src") == ["a.py"]


def test_rules_beside_the_program_hold_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write(tmp_path / "project", "src/a.py", "src/.env", **{".gitignore": ".env\n"})
    monkeypatch.chdir(project)

    assert sent(Path("src")) == ["a.py"]


def test_a_file_that_is_named_is_sent_whatever_ignores_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "a.py", ".env", **{".gitignore": ".env\n"})
    names = {file.name for file in included_files([str(folder), str(folder / ".env")])}

    assert ".env" in names
    assert "project/.env" not in names


def test_what_a_repository_has_is_sent_though_its_rules_ignore_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "data/sample.csv", "data/large.csv", **{".gitignore": "data/\n"})
    git(folder, "init", "-q")
    git(folder, "add", "-f", "data/sample.csv")

    assert sent(folder) == [".gitignore", "data/sample.csv"]


def test_a_further_working_tree_has_the_rules_of_its_repository(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "a.py")
    git(folder, "init", "-q")
    git(folder, "add", "a.py")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    git(folder, "worktree", "add", "-q", "../tree")
    (folder / ".git/info/exclude").write_text("secret\n")

    assert sent(write(tmp_path / "tree", "secret")) == ["a.py"]


def test_a_folder_of_which_nothing_would_be_sent_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "a.csv", ".git/config")
    (folder / "sub").mkdir()
    write(tmp_path / "home", **{".config/git/ignore": "*.csv\n"})

    with pytest.raises(ConfigurationError, match=r"includes\[0\] .* would send nothing: .*a\.csv\). Name the files"):
        select_files([str(folder)])


def test_what_stays_here_is_said_once_with_its_size(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "project", "a.py", "x.log", "y.log", ".venv/pyvenv.cfg", "b/node_modules/c", "node_modules/d"
    )
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".venv/big").write_bytes(b"x" * 2_500_000)

    (line,) = describe_includes([str(folder)])

    assert line.startswith("includes leave out .venv (2.5 MB), 2 x node_modules (0 bytes), 2 x .gitignore (0 bytes): ")
    assert list(describe_includes([str(folder / "a.py")])) == []


def test_a_large_include_is_warned_of_with_its_largest_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "a.py", "data/big.bin")
    os.truncate(folder / "data/big.bin", 150 << 20)

    (line,) = describe_includes([str(folder)])

    assert line.startswith(
        f"includes are 157 MB, which every node gets from here; the largest file is {folder}/data/big"
    )


@pytest.mark.parametrize("seed", range(25))
def test_random_rules_choose_the_files_that_git_chooses(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    names = ["a", "b", "c.py", "d.log", "e x", "build"]
    folder = tmp_path / "project"
    paths = {"/".join(chance.choices(names, k=chance.randint(1, 4))) for _ in range(40)}
    files = [path for path in sorted(paths) if not any(other.startswith(f"{path}/") for other in paths)]
    write(folder, *files)
    for place in sorted({"", *(os.path.dirname(path) for path in chance.sample(files, min(4, len(files))))}):
        rules = [
            chance.choice(["", "", "!"])
            + chance.choice(["", "/", "**/"])
            + "/".join(chance.choices([*names, "*", "*.py", "?", "[ab]", "**"], k=chance.choice([1, 1, 2])))
            + chance.choice(["", "", "/", "/*"])
            for _ in range(chance.randint(1, 5))
        ]
        write(folder, **{os.path.join(place, ".gitignore"): "\n".join(rules)})
    git(folder, "init", "-q")

    chosen = git(folder, "-c", "core.quotePath=false", "ls-files", "--others", "--exclude-standard").splitlines()
    try:
        mine = sent(folder)
    except ConfigurationError:
        mine = []

    assert sorted(mine) == sorted(chosen)
