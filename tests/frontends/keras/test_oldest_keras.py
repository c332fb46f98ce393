"""The oldest Keras that is promised, beside the newest, which every other test here runs with.

A few tests of this folder run again, in a process that has the older Keras first on its path: what
depends on Keras' inner parts, and what Keras itself has changed since.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import stratagem as sg
from stratagem.frontends.keras import scope

OLDEST = "3.12.4"
HERE = Path(__file__).parent
ROOT = Path(sg.__file__).parent.parent
AGAIN = {
    "test_refusals.py": [
        "test_every_replica_has_the_keras_of_the_chief",
        "test_a_compiled_step",
    ],
    "test_same_answer.py": [
        "test_optimizers[2-adam]",
        "test_batches_that_do_not_divide[17-16-2]",
        "test_cnn_with_synchronised_batchnorm[2]",
        "test_a_mask_that_reaches_the_loss[mean-True]",
    ],
    "test_models.py": ["test_activity_regularizer"],
    "test_served_calls.py": [
        "test_saved_in_mid_training_and_resumed_anywhere",
        "test_a_training_step_of_ones_own[asynchronous]",
        "test_sixteen_bits_on_the_wire[bfloat16-synchronous]",
    ],
}
#: pytest, if this is the Keras that was asked for; a mistake in the path would test nothing
RUN = f"""
import sys, keras, pytest
assert keras.__version__ == {OLDEST!r}, keras.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the older Keras alone, kept with what pytest keeps from run to run."""
    cache = getattr(request.config, "cache", None)
    parent = cache.mkdir("keras") if cache is not None else tmp_path_factory.mktemp("keras")
    folder = Path(parent) / OLDEST
    if not folder.exists():
        fresh = tmp_path_factory.mktemp("fresh") / OLDEST
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--retries",
                "1",
                "--target",
                str(fresh),
                f"keras=={OLDEST}",
            ],
            capture_output=True,
            text=True,
            timeout=100,
        )
        if done.returncode:
            sentence = f"Keras {OLDEST} cannot be installed here: {done.stderr.strip()[-300:]}"
            if os.environ.get("CI") == "true":
                pytest.fail(sentence)
            pytest.skip(sentence)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(fresh, folder)
    return folder


def test_the_oldest_is_what_is_promised_and_the_newest_is_newer() -> None:
    oldest = tuple(map(int, OLDEST.split(".")))
    assert oldest[:2] == scope._OLDEST
    assert tuple(map(int, keras.__version__.split(".")[:2])) > oldest[:2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_with_the_oldest_keras(older: Path) -> None:
    names = [f"{HERE / file}::{test}" for file, tests in AGAIN.items() for test in tests]
    done = subprocess.run(
        [sys.executable, "-c", RUN, "-p", "no:cacheprovider", "-p", "no:xdist", *names],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{older}{os.pathsep}{ROOT}", "KERAS_BACKEND": "torch"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    passed = re.search(r"(\d+) passed in", done.stdout)  # and nothing was left out
    assert passed is not None and int(passed[1]) >= len(names), done.stdout
