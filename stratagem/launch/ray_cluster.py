"""Runs a function of a notebook on the nodes of a Ray cluster.

Ray places a process for each worker and watches it; the processes find each other by TF_CONFIG, as
in a submitted job, and tensors never pass through Ray.

python -m stratagem.launch.ray_cluster FOLDER is such a process: it calls the function pickled in
FOLDER/call, and writes the result to FOLDER/result, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.errors import ReplicaFailed, UsageError
from stratagem.launch.engines.ray_driver import RayDriver
from stratagem.launch.job_folder import JobRequest
from stratagem.launch.supervise import culprit, verdict


def as_json(value: Any) -> str:
    """A function's result as JSON; raises for a result that Ray should not carry."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"the function returned a {type(value).__name__}, and only numbers, text, lists and "
            "dicts of them come back from other machines: save the model to a folder that all "
            "machines share, and return its name."
        ) from None


def main(argv: list[str]) -> None:
    """Call the function."""
    import cloudpickle

    folder = Path(argv[0])
    function, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
    (folder / "result").write_text(as_json(function(*args, **kwargs)))


_LARGEST = 1 << 20  # bytes of a function with what it holds


class RayCluster:
    """Workers that Ray places.

    cluster = sg.RayCluster(workers=4, gpus_per_worker=1)
    losses = cluster.run(train, 0.1)    # train(0.1) on each worker; a result from each

    `train` makes its strategy itself (`sg.MultiWorkerMirroredStrategy()`) and loads its data there.

    Args:
        workers: how many processes, spread over the nodes.
        gpus_per_worker: GPUs that Ray keeps for each.
        address: of the cluster; by default the one that this process is connected to, or Ray's own
            choice (RAY_ADDRESS, or a node on this machine).
    """

    def __init__(
        self, workers: int = 1, *, gpus_per_worker: int = 0, address: str | None = None
    ) -> None:
        if workers < 1 or gpus_per_worker < 0:
            raise UsageError(f"RayCluster(workers={workers}): there is one worker at least.")
        self.workers, self.gpus_per_worker, self.address = workers, gpus_per_worker, address

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call the function on every worker; return the results in the order of workers."""
        import cloudpickle

        call = cloudpickle.dumps((function, args, kwargs))
        if len(call) > _LARGEST:
            raise UsageError(
                f"the function holds {len(call) / 1e6:.1f} MB, and Ray is not to carry data: have "
                "it load its data on each worker, from a place that all machines share."
            )
        request = JobRequest(
            "notebook",
            ("-m", "stratagem.launch.ray_cluster"),
            ".",
            "python",
            workers=self.workers,
            gpus=self.gpus_per_worker,
            settings={"env": []},
        )
        driver = RayDriver(self._connected(), request, call, _show)
        try:
            driver.run()
            first = culprit([end for end in driver.ends if end.code])
            if first is not None:
                raise ReplicaFailed(verdict(first), str(first.task))
            return [json.loads(text) for text in driver.results()]
        finally:
            driver.close()

    def _connected(self) -> Any:
        try:
            import ray
        except ImportError:
            raise UsageError("RayCluster needs Ray: pip install 'ray[default]'") from None
        if not ray.is_initialized():
            try:
                ray.init(address=self.address or "auto", log_to_driver=False)
            except ConnectionError as problem:
                raise UsageError(
                    f"there is no Ray cluster at {self.address or 'this machine'} "
                    f"({str(problem).splitlines()[0]}): `ray start --head` starts one, "
                    "RayCluster(address=...) says where it is."
                ) from None
        return ray


def _show(what: str, text: str, when: str | None = None) -> None:
    """Print the lines of tasks; other events are for submitted jobs."""
    role, _, index = what.partition("-")
    if index:
        print(f"[{role} {index}] {text}", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
