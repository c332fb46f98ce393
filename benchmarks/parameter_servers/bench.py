"""Parameter servers: updates a second by workers and servers; TensorFlow's beside them.

    python benchmarks/parameter_servers/bench.py [--workers 1,2,4,8] [--servers 1,2,4]
    python benchmarks/parameter_servers/bench.py --peer --tensorflow PYTHON

The first form: a cluster on this machine in every combination of model, rule, way of the tensors,
workers and servers. The second: asynchronous training against tf.distribute's
ParameterServerStrategy with a ClusterCoordinator and a loop of one's own, 1 server, arms taking
turns. Every arm is a fresh process tree with one thread a worker (`--threads default`: as many as
each library chooses); it warms up, and then the updates that a fixed time sees are counted, and the
processor time of all processes that one takes (a gradient's, for ours). Printed are medians over
the rounds, and of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

BATCH = 64  # a worker
WIDTHS = {"mlp": 1024, "small": 64}
ROWS, BAG = 200_000, 20  # of the embedding; numbers in an example
EXAMPLES = 8_192
PEER_BATCHES = 64  # different ones, made beforehand
TIMEOUT = 300
ONE_THREAD = "BENCH_ONE_THREAD"  # in the environment of an arm that has no other choice


class Arm(NamedTuple):
    """`kind` is async or sync for ours, tf or tf10 (ten steps a call) for the peer."""

    kind: str
    model: str
    way: str
    workers: int
    servers: int


def processor_time() -> float:
    """Seconds that this process and all that come from it have computed; says more than the clock
    where other work is on the machine. 0 where there is no /proc."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        parents[int(name)] = int(fields[1])
        spent[int(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(process: int) -> bool:
        while process not in (os.getpid(), 0):
            process = parents.get(process, 0)
        return process != 0

    return sum(seconds for process, seconds in spent.items() if ours(process))


# --- ours ---------------------------------------------------------------------------------------


def build(name: str) -> tuple[Any, Any, Any]:
    """Module, examples, classes."""
    import torch
    from torch import nn

    class OneThread(nn.Module):
        """Workers get the machine's cores divided among them; here each has one thread."""

        def forward(self, x: Any) -> Any:
            if ONE_THREAD in os.environ and torch.get_num_threads() != 1:
                torch.set_num_threads(1)
            return x

    torch.manual_seed(0)
    y = torch.randint(0, 10, (EXAMPLES,))
    if name == "sparse":
        bag = nn.EmbeddingBag(ROWS, 32, mode="mean", sparse=True)
        x = torch.randint(0, ROWS, (EXAMPLES, BAG))
        return nn.Sequential(OneThread(), bag, nn.Linear(32, 10)), x, y
    width = WIDTHS[name]
    net = nn.Sequential(
        OneThread(),
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    return net, torch.randn(EXAMPLES, 784), y


def ours(arm: Arm, warm: float, seconds: float) -> dict[str, float]:
    """Train until a thread that looks into the books has seen enough."""
    import torch

    import stratagem as sg

    if ONE_THREAD in os.environ:
        torch.set_num_threads(1)
    updates = sg.Synchronous() if arm.kind == "sync" else sg.Asynchronous()
    cluster = sg.LocalCluster(workers=arm.workers, ps=arm.servers)
    strategy = sg.ParameterServerStrategy(cluster, updates=updates)
    module, x, y = build(arm.model)
    with strategy.scope():
        model = sg.Model(module)
        model.compile("sgd" if arm.model == "sparse" else "adam", loss="cross_entropy")
    seen: list[tuple[float, Any, float]] = []

    class Until(sg.callbacks.Callback):
        """Ends the training at the end of an epoch."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = len(seen) > 1

    def watch() -> None:
        while strategy.stats().updates < 10:
            time.sleep(0.1)
        for wait in (warm, seconds):
            time.sleep(wait)
            seen.append((time.perf_counter(), strategy.stats(), processor_time()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    batch = BATCH * (arm.workers if arm.kind == "sync" else 1)
    model.fit(x, y, batch_size=batch, epochs=10**9, callbacks=[Until()], verbose=0)
    watcher.join()
    (begun, before, spent), (ended, after, in_all) = seen
    took = ended - begun
    pushes = after.received - before.received
    ages = sum(tau * (n - before.staleness.get(tau, 0)) for tau, n in after.staleness.items())
    waited = sum(after.waiting.values()) - sum(before.waiting.values())
    return {
        "updates/s": (after.updates - before.updates) / took,
        "gradients/s": pushes / took,
        "cpu ms": (in_all - spent) / max(1, pushes) * 1e3,
        "staleness": ages / max(1, pushes),
        "waiting": waited / took / arm.workers,
    }


# --- the peer -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(cluster: str, job: str, task: int) -> None:
    """A worker or ps of TensorFlow's, until it is killed."""
    import tensorflow as tf

    threads = 1 if ONE_THREAD in os.environ else 0  # 0: as many as it likes
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads)
    server = tf.distribute.Server(
        json.loads(cluster), job_name=job, task_index=task, protocol="grpc", config=config
    )
    server.join()


def theirs(arm: Arm, warm: float, seconds: float) -> dict[str, float]:
    """Its processes, and the coordinator here."""
    spec = {
        job: [f"127.0.0.1:{free_port()}" for _ in range(count)]
        for job, count in (("worker", arm.workers), ("ps", arm.servers), ("chief", 1))
    }
    with ExitStack() as ends:
        for job in ("worker", "ps"):
            for task in range(len(spec[job])):
                command = [sys.executable, __file__, "--serve", json.dumps(spec), job, str(task)]
                child = subprocess.Popen(command)
                ends.callback(child.wait)
                ends.callback(child.kill)
        place = {"cluster": spec, "task": {"type": "chief", "index": 0}}
        os.environ["TF_CONFIG"] = json.dumps(place)
        return coordinate(arm, warm, seconds)


def coordinate(arm: Arm, warm: float, seconds: float) -> dict[str, float]:
    import keras
    import numpy as np
    import tensorflow as tf

    if ONE_THREAD in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    width = WIDTHS[arm.model]
    with strategy.scope():
        net = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        adam = keras.optimizers.Adam()
        adam.build(net.trainable_variables)

    def data() -> Any:
        """Batches that lie ready: nothing is drawn, cut or put together while time counts."""
        dice = np.random.default_rng(0)
        x = dice.normal(size=(PEER_BATCHES, BATCH, 784)).astype("float32")
        y = dice.integers(0, 10, (PEER_BATCHES, BATCH)).astype("int32")
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(8)

    batches = iter(coordinator.create_per_worker_dataset(data))

    def update(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            scores = net(x, training=True)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores)
            loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, net.trainable_variables)
        adam.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    several = 10 if arm.kind == "tf10" else 1

    @tf.function
    def step(iterator: Any) -> None:
        for _ in tf.range(several):
            strategy.run(update, args=next(iterator))

    def go_on(least: float) -> tuple[int, float]:
        """Schedule until time is over; how many updates in how many seconds."""
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < least:
            for _ in range(25 * arm.workers):  # as many as the books of ours need, or more
                coordinator.schedule(step, args=(batches,))
                count += several
            coordinator.join()
        return count, time.perf_counter() - begun

    for _ in range(arm.workers):
        coordinator.schedule(step, args=(batches,))
    coordinator.join()
    go_on(warm)
    spent = processor_time()
    made, took = go_on(seconds)
    return {"updates/s": made / took, "cpu ms": (processor_time() - spent) / made * 1e3}


# --- in the parent ------------------------------------------------------------------------------


def measure(arm: Arm, args: Any) -> dict[str, float]:
    peer = arm.kind.startswith("tf")
    environ = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "STRATAGEM_SHARED_MEMORY": "0" if arm.way == "sockets" else "1",
        "KERAS_BACKEND": "tensorflow" if peer else "torch",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if args.threads == "one":
        environ |= {"OMP_NUM_THREADS": "1", ONE_THREAD: "1"}
    times = [str(args.warm), str(args.seconds)]
    done = subprocess.run(
        [args.tensorflow if peer else sys.executable, __file__, "--child", *map(str, arm), *times],
        capture_output=True,
        env=environ,
        timeout=TIMEOUT,
        text=True,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds(arms: dict[str, Arm], args: Any) -> list[dict[str, dict[str, float]]]:
    found = []
    for number in range(args.rounds):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        figures = {}
        for name in order:
            figures[name] = measure(arms[name], args)
            print(
                f"round {number + 1}, {name}: {figures[name]['updates/s']:.1f} updates/s",
                file=sys.stderr,
            )
        found.append({name: figures[name] for name in arms})
    return found


def median(found: Any, name: str, figure: str = "updates/s", to: str | None = None) -> float:
    """Of an arm's figure, or of its ratio to another's in the same round."""
    return statistics.median(r[name][figure] / (r[to][figure] if to else 1.0) for r in found)


def scaling(args: Any) -> list[dict[str, Any]]:
    """Every combination; one line for each, its first number of workers and servers as the unit."""
    rows = []
    workers = [int(n) for n in args.workers.split(",")]
    servers = [int(n) for n in args.servers.split(",")]
    for model in args.models.split(","):
        for kind in args.rules.split(","):
            for way in args.ways.split(","):
                print(
                    f"\n{model}, {kind}, {way}\n{'servers':>8}{'workers':>8}{'updates/s':>11}"
                    f"{'gradients/s':>13}{'to the first':>14}{'cpu ms':>8}"
                    f"{'staleness':>11}{'waiting':>9}"
                )
                arms = {f"{k} {w}": Arm(kind, model, way, w, k) for k in servers for w in workers}
                found = rounds(arms, args)
                first = next(iter(arms))
                for name, arm in arms.items():
                    ratio = median(found, name, "gradients/s", first)
                    row = {
                        **arm._asdict(),
                        "to the first": ratio,
                        **{key: median(found, name, key) for key in found[0][name]},
                        "rounds": [r[name] for r in found],
                    }
                    print(
                        f"{arm.servers:8}{arm.workers:8}{row['updates/s']:11.1f}"
                        f"{row['gradients/s']:13.1f}{ratio:14.2f}{row['cpu ms']:8.2f}"
                        f"{row['staleness']:11.2f}{row['waiting']:9.2f}",
                        flush=True,
                    )
                    rows.append(row)
    return rows


def against_the_peer(args: Any) -> list[dict[str, Any]]:
    rows = []
    print(
        f"\nasynchronous, 1 server\n{'model':8}{'workers':>8}{'ours':>9}{'sockets':>9}{'tf':>9}"
        f"{'tf, 10 a call':>15}{'ours/tf':>9}{'sockets/tf':>12}{'ours/tf10':>11}"
    )
    for model in [name for name in args.models.split(",") if name in WIDTHS]:
        for workers in map(int, args.workers.split(",")):
            arms = {
                "ours": Arm("async", model, "memory", workers, 1),
                "tf": Arm("tf", model, "sockets", workers, 1),
                "sockets": Arm("async", model, "sockets", workers, 1),
                "tf10": Arm("tf10", model, "sockets", workers, 1),
            }
            found = rounds(arms, args)
            ratios = {
                f"{a}/{b}": median(found, a, to=b)
                for a in ("ours", "sockets")
                for b in ("tf", "tf10")
            }
            print(
                f"{model:8}{workers:8}{median(found, 'ours'):9.1f}"
                f"{median(found, 'sockets'):9.1f}{median(found, 'tf'):9.1f}"
                f"{median(found, 'tf10'):15.1f}{ratios['ours/tf']:9.2f}"
                f"{ratios['sockets/tf']:12.2f}{ratios['ours/tf10']:11.2f}",
                flush=True,
            )
            spent = {name: median(found, name, "cpu ms") for name in arms}
            print(
                f"{'':8}{'cpu ms':>8}{spent['ours']:9.2f}{spent['sockets']:9.2f}"
                f"{spent['tf']:9.2f}{spent['tf10']:15.2f}"
                + "".join(
                    f"{median(found, b, 'cpu ms', a):{width}.2f}"
                    for a, b, width in (
                        ("ours", "tf", 9),
                        ("sockets", "tf", 12),
                        ("ours", "tf10", 11),
                    )
                ),
                flush=True,
            )
            rows.append({"model": model, "workers": workers, **ratios, "rounds": found})
    return rows


def has_tensorflow(python: str) -> bool:
    try:
        subprocess.run([python, "-c", "import tensorflow"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="store_true", help="against TensorFlow")
    parser.add_argument(
        "--tensorflow",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter that has tensorflow 2.21 and keras 3",
    )
    parser.add_argument("--models", default="mlp,small,sparse")
    parser.add_argument("--rules", default="async,sync")
    parser.add_argument("--ways", default="memory,sockets")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--servers", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--threads",
        choices=["one", "default"],
        default="one",
        help="a worker's; default: what each library chooses",
    )
    parser.add_argument("--json")
    parser.add_argument("--child", nargs=7)
    parser.add_argument("--serve", nargs=3)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], args.serve[1], int(args.serve[2]))
        return
    if args.child:
        kind, model, way, workers, servers, warm, seconds = args.child
        run = theirs if kind.startswith("tf") else ours
        arm = Arm(kind, model, way, int(workers), int(servers))
        print(json.dumps(run(arm, float(warm), float(seconds))))
        return
    import torch

    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, torch {torch.__version__}; batch {BATCH} a "
        f"worker, threads: {args.threads}; {args.seconds:g} s, median of {args.rounds} rounds; "
        f"load {os.getloadavg()[0]:.1f} before"
    )
    if not args.peer:
        rows = scaling(args)
    elif has_tensorflow(args.tensorflow):
        rows = against_the_peer(args)
    else:
        print(f"no TensorFlow in {args.tensorflow}: the peer is left out")
        rows = []
    print(f"load {os.getloadavg()[0]:.1f} afterwards")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
