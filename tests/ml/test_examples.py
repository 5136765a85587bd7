"""The scripts that train run on nodes of this machine, and what they print is true, and what the gallery shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gallery

PYTHON = (sys.executable, "-W", "error::ResourceWarning")
WORKERS_LINE = re.compile(r"\d\d:\d\d:\d\d \d+/\d+ ")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")

pytestmark = [pytest.mark.example, pytest.mark.timeout(240)]


def run(name: str, folder: Path, *, inside: str = "training") -> tuple[list[str], list[str]]:
    """What the script prints, and what its workers print."""
    example = f"{inside}/{name}.py"
    completed = subprocess.run(
        [*PYTHON, gallery.EXAMPLES / example, *gallery.shown()[example].arguments],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},  # torch leaves things there
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stdout + completed.stderr
    shown = (completed.stdout + completed.stderr).splitlines()
    workers = [line.partition("│ ")[2] for line in shown if WORKERS_LINE.match(line)]
    gallery.compare(example, completed.stdout, exactly=False)
    return completed.stdout.splitlines(), workers


def numbers(line: str) -> list[float]:
    return [float(text) for text in NUMBER.findall(line)]


def losses(lines: list[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines if "loss" in line]


def test_torch_ddp_agrees_on_one_good_model(tmp_path: Path) -> None:
    printed, workers = run("torch_ddp", tmp_path)

    ranks, accuracies, weights = zip(*map(numbers, printed), strict=True)
    assert ranks == (0, 1, 2, 3)
    assert min(accuracies) > 0.95
    assert len(set(weights)) == 1
    assert len(losses(workers)) == 5


def test_torch_fsdp_has_each_parameter_on_one_worker(tmp_path: Path) -> None:
    [total, *lines], workers = run("torch_fsdp", tmp_path)

    ranks, parts = zip(*map(numbers, lines), strict=True)
    assert ranks == (0, 1)
    assert [sum(parts)] == numbers(total)
    assert min(parts) > 0.4 * sum(parts)
    assert losses(workers)[-1] < 0.1 * losses(workers)[0]


def test_jax_finds_what_least_squares_finds(tmp_path: Path) -> None:
    [*lines, best], _ = run("jax_data_parallel", tmp_path)

    assert [numbers(line)[0] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert numbers(line)[1:] == pytest.approx(numbers(best), abs=2e-3)


def test_tensorflow_finds_what_least_squares_finds(tmp_path: Path) -> None:
    [*lines, best], _ = run("tensorflow_mirrored", tmp_path)

    assert [numbers(line)[:2] for line in lines] == [[0, 2], [1, 2]]
    for line in lines:
        assert numbers(line)[2:] == pytest.approx(numbers(best), abs=2e-3)


@pytest.mark.parametrize("name", ["keras_jax", "keras_torch"])
def test_keras_learns_and_its_workers_agree(name: str, tmp_path: Path) -> None:
    printed, _ = run(name, tmp_path)

    ranks, before, after, weights = zip(*map(numbers, printed), strict=True)
    assert ranks == (0, 1)
    assert max(after) < 0.5 * min(before)
    assert len(set(weights)) == 1


def test_transformers_learns_on_two_workers(tmp_path: Path) -> None:
    printed, _ = run("transformers_finetune", tmp_path)

    # 3 epochs of 384 reviews, 16 at a time on each of two workers
    assert [numbers(line)[:3] for line in printed] == [[0, 2, 36], [1, 2, 36]]
    assert len({numbers(line)[3] for line in printed}) == 1
    assert numbers(printed[0])[3] > 0.95


def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    [interrupted, undisturbed, resumed], workers = run("checkpoint_resume", tmp_path)

    assert interrupted.startswith("interrupted: node 1 is lost: ")
    assert [line for line in workers if "begins" in line] == [f"begins with epoch {epoch}" for epoch in (0, 0, 3)]
    assert numbers(resumed) == numbers(undisturbed)
    assert len(numbers(resumed)) == 4


def test_sharded_inference_says_what_one_process_says(tmp_path: Path) -> None:
    printed, workers = run("sharded_inference", tmp_path)

    assert printed == ["40000 rows classified, 100.00% as here"]
    assert workers.count("10000 of 40000 rows") == 4


def test_optuna_learns_from_its_trials(tmp_path: Path) -> None:
    [*rounds, best], _ = run("optuna_search", tmp_path)

    errors = [numbers(line)[1] for line in rounds]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]
    assert best.startswith("20 trials")


def test_a_grid_search_over_a_torch_model(tmp_path: Path) -> None:
    [best, unseen], _ = run("skorch_grid", tmp_path)

    assert "'module__width': 64" in best
    assert numbers(best)[-1] > 0.9
    assert numbers(unseen)[-1] > 0.85


def test_a_pretrained_model_needs_fewer_examples(tmp_path: Path) -> None:
    printed, _ = run("image_classification", tmp_path)

    counts, tuned, scratch = zip(*map(numbers, printed), strict=True)
    assert counts == (12, 24, 48, 96)
    assert sum(tuned) > sum(scratch)
    assert tuned[-1] > 85
    gallery.compare_picture("training/image_classification.py", tmp_path / "image_classification.png")


def test_the_processor_is_measured_where_there_is_no_gpu(tmp_path: Path) -> None:
    [measured, remark], _ = run("gpu_against_cpu", tmp_path)

    assert numbers(measured)[-1] < 0.1
    assert "no GPU" in remark


def test_xgboost_learns_on_the_workers_of_a_fleet(tmp_path: Path) -> None:
    [errors, correlation], _ = run("xgboost_training", tmp_path, inside="dask")

    _, first, _, last = numbers(errors)
    assert last < 0.3 * first
    assert numbers(correlation)[-1] > 0.95


def test_every_example_has_a_test_and_a_line_in_the_docs() -> None:
    names = {path.stem for path in (gallery.EXAMPLES / "training").glob("*.py")}
    page = (gallery.EXAMPLES.parent / "docs/training.md").read_text(encoding="utf-8")

    assert {name for name in names if f'"{name}"' not in Path(__file__).read_text(encoding="utf-8")} == set()
    assert {name for name in names if f"`{name}.py`" not in page} == set()
