"""The exercise: ten models with other hyper-parameters, the best three, and the three together."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

import stratagem as sg

MODELS, KEPT = 10, 3
SEEDS = (0, 1, 2, 3, 4)


def settings(seed: int, count: int) -> list[dict[str, Any]]:
    """What a random search draws: rate, width, depth, dropout."""
    dice = random.Random(seed)
    return [
        {
            "rate": round(10 ** dice.uniform(-3.5, -2.0), 6),
            "units": dice.choice([32, 64, 128]),
            "depth": dice.randint(1, 3),
            "dropout": dice.choice([0.0, 0.2]),
        }
        for _ in range(count)
    ]


def net(inputs: int, given: dict[str, Any]) -> nn.Module:
    """An MLP with these settings."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(given["depth"]):
        layers += [nn.Linear(inputs, given["units"]), nn.ReLU(), nn.Dropout(given["dropout"])]
        inputs = given["units"]
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def trained(split: common.Split, given: dict[str, Any], seed: int, epochs: int) -> sg.Model:
    torch.manual_seed(seed)
    model = sg.Model(net(split.x[0].numel(), given))
    rate = given["rate"]
    model.compile(lambda p: torch.optim.Adam(p, lr=rate), "cross_entropy", metrics=["accuracy"])
    model.fit(split.x, split.y, epochs=epochs, batch_size=64, verbose=0)
    return model


def exercise(split: common.Split, seed: int, count: int, epochs: int) -> dict[str, Any]:
    """One seed: train all, rank on validation, join, and look at the test set once."""
    drawn = settings(seed, count)
    models = [trained(split, each, 100 * seed + n, epochs) for n, each in enumerate(drawn)]
    check, test = (split.x_check, split.y_check), (split.x_test, split.y_test)
    on_check = [m["accuracy"] for m in sg.Ensemble(models).evaluate(*check).members]
    order = sorted(range(count), key=lambda n: (-on_check[n], n))
    kept = [models[n] for n in order[:KEPT]]
    three = sg.Ensemble(kept).evaluate(*test)
    print(f"seed {seed} done", file=sys.stderr)
    return {
        "seed": seed,
        "settings": [drawn[n] for n in order],
        "validation": [on_check[n] for n in order],
        "ensemble on validation": sg.Ensemble(kept).evaluate(*check).ensemble["accuracy"],
        "members": [member["accuracy"] for member in three.members],
        "mean": three.ensemble["accuracy"],
        "vote": sg.Ensemble(kept, vote=True).evaluate(*test).ensemble["accuracy"],
        "all": sg.Ensemble(models).evaluate(*test).ensemble["accuracy"],
        "loss of the best": three.members[0]["loss"],
        "loss of the mean": three.ensemble["loss"],
    }


def study(small: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    if small:
        return [exercise(common.digits(), 0, 4, 3)]
    split = common.fashion(6000)
    return [exercise(split, seed, MODELS, 8) for seed in SEEDS]


def gains(found: Sequence[dict[str, Any]], which: str) -> list[float]:
    """How much better than the model that validation puts first, seed by seed."""
    return [run[which] - run["members"][0] for run in found]


def report(found: Sequence[dict[str, Any]]) -> str:
    heads = ["seed", "first", "second", "third", "the three", "by vote", "all", "to the first"]
    rows = [
        [run["seed"], *(f"{each:.4f}" for each in run["members"])]
        + [f"{run[which]:.4f}" for which in ("mean", "vote", "all")]
        + [f"{gain:+.4f}"]
        for run, gain in zip(found, gains(found, "mean"), strict=True)
    ]
    lines = [common.table(heads, rows), ""]
    for which, name in (("mean", "the three"), ("vote", "by vote"), ("all", "all")):
        each = gains(found, which)
        lines.append(
            f"{name} to the first: median {statistics.median(each):+.4f} "
            f"({min(each):+.4f} to {max(each):+.4f}); better in "
            f"{sum(gain > 0 for gain in each)} of {len(each)}"
        )
    above = sum(run["mean"] > max(run["members"]) for run in found)
    lines.append(f"the three better than each of them on the test set: {above} of {len(found)}")
    return "\n".join(lines)


def draw(found: Sequence[dict[str, Any]], out: Path) -> None:
    pyplot = common.pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for place, run in enumerate(found):
        last = place == 0
        axes.plot(
            [place] * KEPT, run["members"], "o", color="0.6", label="the best three" * last or None
        )
        axes.plot(place, run["members"][0], "o", color="0.3", label="first" * last or None)
        for which, mark, color in (("mean", "_", "tab:blue"), ("all", "_", "tab:orange")):
            name = {"mean": "the three together", "all": "all ten together"}[which]
            axes.plot(
                place, run[which], mark, ms=18, mew=2.5, color=color, label=name * last or None
            )
    axes.set_xticks(range(len(found)), [f"seed {run['seed']}" for run in found])
    axes.set_ylabel("accuracy on 2000 test pictures")
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=110)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
