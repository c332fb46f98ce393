"""Pipelines and sharded replicas in the plan: schedules, memory of a device, reasons against."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.cluster.environment import cores
from stratagem.errors import UsageError
from stratagem.launch.validate import fitting
from stratagem.plan import advice, report
from stratagem.plan.choose import choose
from stratagem.plan.configuration import MESH, MIRRORED, PIPELINE, SHARDED, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import Footprint, LayerTable, Profile, StageTime
from stratagem.plan.stage_profile import with_stages
from stratagem.rules.layer_split import LayerCost
from stratagem.rules.schedules import SCHEDULES
from stratagem.rules.timeline import timeline
from stratagem.training.dry_run import DryRun
from tests.plan.support import IDEAL, profile

MB = 1_000_000
HOLDS = Footprint(8 * MB, 8 * MB, 16 * MB, 64 * MB)


def layers(dearer: float = 1.0, crossing: int = 0) -> tuple[LayerTable, ...]:
    """Eight equal layers; a microbatch of half the size takes half the time, `dearer` times."""

    def cost(pieces: int, times: float) -> LayerCost:
        seconds = 3e-3 / pieces * times
        return LayerCost(seconds, 4 * MB, 16 * MB // pieces, crossing // pieces, seconds / 3)

    tried = ((1, 1.0), (2, dearer), (4, dearer**2))
    return tuple(LayerTable(n, tuple(cost(n, times) for _ in range(8))) for n, times in tried)


def model(**changes: Any) -> Profile:
    return profile(**{"layers": layers(), "footprint": HOLDS, **changes})


def pipeline(devices: int, each: int, schedule: str = "1f1b") -> Configuration:
    return Configuration(PIPELINE, per_host=devices, microbatches=each * devices, schedule=schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager", "interleaved"])
@pytest.mark.parametrize(("devices", "each"), [(2, 1), (2, 2), (4, 2), (2, 4)])
def test_equal_stages_take_what_the_bubble_says(devices: int, each: int, schedule: str) -> None:
    """With as many examples as S replicas: S times the compute of one device, over S stages."""
    cfg = pipeline(devices, each, schedule)
    cal = replace(IDEAL, microbatch=0.0)
    found = predict(model(optimizer=0.0), Hardware(cores=8, local=1e15), cfg, cal)
    many, parts = cfg.microbatches, cfg.parts
    limit = (parts * many + devices - 1) / (parts * many)
    assert found.step == pytest.approx(0.03 * limit)
    assert found.bubble == pytest.approx(1 - 1 / limit)
    assert sum(found.parts.values()) == pytest.approx(found.step)


def test_weight_gradients_are_made_once_a_batch_outside_of_the_bubble() -> None:
    cfg, machine = pipeline(2, 2), Hardware(cores=8, local=1e15)
    cal = replace(IDEAL, microbatch=0.0)
    later = tuple(
        LayerTable(t.pieces, tuple(replace(c, late=c.seconds / 3) for c in t.costs))
        for t in layers()
    )
    plain = predict(model(optimizer=0.0), machine, cfg, cal)
    found = predict(model(optimizer=0.0, layers=later), machine, cfg, cal)
    busy = plain.step * 4 / 5  # of a stage, with four microbatches
    assert found.parts["compute"] == pytest.approx(busy)
    assert found.step == pytest.approx(plain.step * 2 / 3 + busy / 3)
    assert found.bubble == pytest.approx(1 - busy / found.step) and found.bubble < plain.bubble


def test_small_microbatches_cost_what_they_were_seen_to_cost() -> None:
    cal = replace(IDEAL, microbatch=0.0)
    two, four = (
        predict(model(layers=layers(dearer=2.0), optimizer=0.0), Hardware(cores=8), cfg, cal)
        for cfg in (pipeline(2, 1), pipeline(2, 2))
    )
    assert two.step == pytest.approx(0.03 * 3 / 2) and four.step == pytest.approx(0.06 * 5 / 4)


def test_what_the_stages_own_code_took_counts() -> None:
    """Layers only decide the stages' shares. Unmeasured numbers of processes are interpolated."""
    seen = tuple(StageTime(n, 2, n * 4e-3, n * 8e-3, n * 1e-3) for n in (2, 8))
    later = tuple(
        LayerTable(t.pieces, tuple(replace(c, late=c.seconds / 3) for c in t.costs))
        for t in layers()
    )
    tried = model(optimizer=0.0, layers=later, stage_times=seen, operation=5e-3)
    machine, cal = Hardware(cores=8, local=1e15), replace(IDEAL, microbatch=7.0)
    two, four = (predict(tried, machine, pipeline(n, 2), cal) for n in (2, 4))
    assert two.step == pytest.approx(5 * (24e-3 / 2 + 2 * 5e-3) + 1e-3)
    each = 2 + 6 * (1 / 2 - 1 / 4) / (1 - 1 / 4)  # by the load of a thread
    assert four.step == pytest.approx(11 * (each * 12e-3 / 4 + 2 * 5e-3) + each * 1e-3 / 4)
    alone = tuple(StageTime(n, 2, 2e-3, 4e-3, 0.5e-3, alone=True) for n in (2, 8))
    calm = predict(replace(tried, stage_times=seen + alone), machine, pipeline(2, 2), cal)
    takes = {("F", 1): 6e-3, ("B", 1): 7e-3, ("F", 2): 9e-3, ("B", 2): 13e-3}  # half of it, and 5
    line = timeline(SCHEDULES["1f1b"], 2, 4, 1, lambda op, k: takes[op.kind, k])
    assert 5 * 13e-3 < line.seconds < 5 * 22e-3
    assert calm.step == pytest.approx(line.seconds + 1e-3)
    again = Profile.from_json(json.loads(json.dumps(tried.to_json())))
    assert again.stage_times == seen and again.operation == 5e-3


@pytest.mark.parametrize("rows", [1, 2])
def test_more_stages_than_processors_share_them(rows: int) -> None:
    """Four stages, or two rows of two, on two cores: a core waits only at the beginning and end.

    So a batch takes a little more than all its operations on two cores.
    """
    plain, cal = model(optimizer=0.0), replace(IDEAL, microbatch=0.0)
    kind = {"strategy": MESH, "rows": 2} if rows == 2 else {"strategy": PIPELINE}
    cfg = Configuration(per_host=4, microbatches=8 // rows, schedule="1f1b", **kind)
    four, two = (predict(plain, Hardware(cores=n, local=1e15), cfg, cal) for n in (4, 2))
    stages = 4 // rows
    assert four.step == pytest.approx(0.03 * (8 // rows + stages - 1) / (8 // rows))
    assert 2 * 0.03 <= two.step < 2 * 0.03 * 1.15
    seen = tuple(StageTime(n, 2, 5e-3, 10e-3, 1e-3) for n in (2, 4))  # each on a core of its own
    tried = predict(replace(plain, stage_times=seen), Hardware(cores=2, local=1e15), cfg, cal)
    assert 8 * 15e-3 / 2 <= tried.step < 8 * 15e-3 / 2 * 1.15
    fewer = predict(replace(plain, stage_times=seen[:1]), Hardware(cores=2, local=1e15), cfg, cal)
    assert fewer.step == pytest.approx(tried.step)


@pytest.mark.timeout(120)
def test_operations_are_measured_in_the_stages_own_code() -> None:
    """In two real processes, as microbatches; the model is left as it was."""
    net, x = small(), torch.randn(4, 8)
    trial = DryRun(
        net,
        x,
        lambda batch: net(batch).sum(),
        lambda: None,
        inputs=lambda batch: batch,
        arguments=lambda names, given: [given],
    )
    table = LayerTable(1, (LayerCost(1e-3), LayerCost(1e-3)))
    given = model(batch=4, layers=(table, replace(table, pieces=2)))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    more = 2 * cores()
    crowded = with_stages(given, trial, x, [more])
    assert [(t.processes, t.alone) for t in crowded.stage_times[::2]] == [
        (more, False),
        (more, True),
    ]
    found = with_stages(given, trial, x, [2])
    assert [(t.processes, t.pieces) for t in found.stage_times] == [(2, 1), (2, 2)] * 2
    assert all(t.forward > 0 and t.backward > 0 for t in found.stage_times) and found.operation > 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_optimizer_has_the_threads_that_a_replica_has() -> None:
    """Measured with two threads and with one; replicas that fill two cores have one thread."""
    given = model(threads=2, single_optimizer=6e-3, optimizer=4e-3, single_thread=0.05)
    two, alone = Configuration(MIRRORED, per_host=2), Configuration()
    found = predict(given, Hardware(cores=2, local=1e15), two, IDEAL)
    assert found.parts["optimizer"] == pytest.approx(3e-3)
    apart = replace(given, one_set=False)  # each replica updates all, but for sharded ones
    found = predict(apart, Hardware(cores=2, local=1e15), two, IDEAL)
    assert found.parts["optimizer"] == pytest.approx(6e-3)
    sharded = predict(apart, Hardware(cores=2, local=1e15), replace(two, strategy=SHARDED), IDEAL)
    assert sharded.parts["optimizer"] == pytest.approx(3e-3)
    stages = predict(given, Hardware(cores=2, local=1e15), pipeline(2, 2), IDEAL)
    assert stages.parts["optimizer"] == pytest.approx(3e-3)
    assert predict(given, Hardware(cores=2), alone, IDEAL).parts["optimizer"] == 4e-3
    assert given.optimizer_with(2) == 4e-3 and given.optimizer_with(1) == pytest.approx(6e-3)
    again = Profile.from_json(json.loads(json.dumps(given.to_json())))
    assert again.single_optimizer == 6e-3


def test_a_stage_holds_its_layers_and_the_microbatches_that_it_keeps() -> None:
    """1F1B keeps two microbatches on the first of two stages, GPipe all."""
    held = {
        name: predict(model(), Hardware(cores=2), pipeline(2, 2, name)).memory
        for name in ("1f1b", "gpipe")
    }
    assert held["1f1b"] == pytest.approx(16 * MB + 2 * 16 * MB)
    assert held["gpipe"] == pytest.approx(16 * MB + 4 * 16 * MB)


def test_what_replicas_hold() -> None:
    def memory(cfg: Configuration, **changes: Any) -> float | None:
        return predict(model(**changes), Hardware(cores=2), cfg).memory

    assert memory(Configuration()) == 96 * MB
    # parameters, the sum and states are shared by two; each has its gradients
    assert memory(Configuration(MIRRORED, per_host=2)) == (16 + 8 + 64) * MB
    assert memory(Configuration(SHARDED, per_host=2)) == (16 + 64 + 8) * MB
    assert memory(Configuration(SHARDED, per_host=2), one_set=False) == (16 + 64 + 8) * MB
    assert memory(Configuration(MIRRORED, per_host=2), one_set=False) == 96 * MB
    # gathered layer by layer, of which each has an eighth, and its gradient
    assert memory(Configuration(SHARDED, per_host=2), device="cuda") == (16 + 64 + 2) * MB
    assert memory(Configuration(MIRRORED, per_host=2), device="cuda") == 96 * MB
    assert memory(Configuration(), footprint=None) is None


def test_rows_of_pipelines_add_their_gradients_up() -> None:
    """Each row is a pipeline with its share of the examples; rows all-reduce gradients."""
    machine, cal = Hardware(cores=8, per_host=4, local=1e9), replace(IDEAL, microbatch=0.0)
    mesh = Configuration(MESH, per_host=4, microbatches=4, schedule="1f1b", rows=2)
    one, two = (predict(model(), machine, cfg, cal) for cfg in (pipeline(2, 2), mesh))
    assert two.parts["memory"] == pytest.approx(model().dense_bytes / 2 * 2.5 / 1e9)
    assert two.step == pytest.approx(one.step + two.parts["memory"])
    assert two.rate == pytest.approx(4 * model().batch / two.step)
    assert (two.memory, two.bubble) == (one.memory, pytest.approx(one.bubble))


def test_a_model_that_does_not_fit_is_told_what_does() -> None:
    plan = choose(model(), Hardware(cores=2, per_host=2, memory=60e6), most=2)
    best = plan.recommendation
    assert not plan.one.fits and best.fits and best.configuration.strategy == PIPELINE
    said = advice.sentence(plan)
    assert said.startswith("One device does not hold it: 96 MB, and there are 60 MB. Take Pipeline")
    assert "stages" in said and " on each" in said
    assert "for allocators and temporaries" not in said  # 32 MB of 60
    tight = choose(model(), Hardware(cores=2, per_host=2, memory=50e6), most=2)
    assert "That leaves 18 MB of 50 MB on each device for allocators" in advice.sentence(tight)
    shown = report.text(plan, width=140)
    assert "does not fit into 60 MB" in shown and "bubble" in shown


def test_where_nothing_fits_the_nearest_is_named() -> None:
    plan = choose(model(), Hardware(cores=2, per_host=2, memory=1e6), most=2)
    said = advice.sentence(plan)
    assert "Nothing that was tried fits either" in said and "take more devices" in said
    assert not plan.recommendation.fits and report.text(plan)


def test_where_it_fits_memory_changes_nothing() -> None:
    wide = choose(model(), Hardware(cores=2, per_host=2, memory=1e12), most=2)
    unknown = choose(model(), Hardware(cores=2, per_host=2), most=2)
    assert wide.recommendation.configuration == unknown.recommendation.configuration
    assert "temporaries" not in advice.sentence(wide) + advice.sentence(unknown)


def test_replicas_of_a_machine_share_its_memory() -> None:
    machine = Hardware(cores=2, per_host=2, host_memory=100e6)
    assert predict(model(), machine, Configuration()).fits
    assert not predict(model(), machine, Configuration(MIRRORED, per_host=2)).fits


@pytest.mark.parametrize("limit", [60e6, None])
def test_the_code_of_every_row_is_python_that_the_strategy_takes(limit: float | None) -> None:
    plan = choose(model(), Hardware(cores=4, per_host=4, memory=limit), most=4)
    ast.parse(advice.code(plan))
    assert {PIPELINE, SHARDED, MESH} < {each.configuration.strategy for each in plan.predictions}
    for each in plan.predictions:
        line = advice.constructor(each.configuration, "cpu", 4)
        name = ast.parse(line).body[0].value.func.attr  # type: ignore[attr-defined]
        assert name == each.configuration.strategy
        if name in (PIPELINE, SHARDED, MESH):
            eval(line, {"sg": sg}).close()


def test_every_schedule_is_validated() -> None:
    plan = choose(model(), Hardware(cores=2, per_host=2), most=2)
    found = {(cfg.strategy, cfg.schedule) for cfg in fitting(plan)}
    assert {(SHARDED, ""), *((PIPELINE, name) for name in SCHEDULES)} <= found


def test_a_plan_is_read_back_with_its_layers() -> None:
    plan = choose(model(unsharded="not this one"), Hardware(per_host=2, memory=1e9), most=2)
    measured, machine = report.from_json(report.dumps(plan))
    assert measured == plan.profile and machine == plan.hardware
    assert not any(cfg.strategy == SHARDED for cfg in plan.tried)
    assert "not this one" in report.text(plan)
    assert "(TensorParallelStrategy and columns= are not predicted)" in report.text(plan)


def test_what_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="one of 2, 4, 8"):
        predict(model(), Hardware(), pipeline(2, 3))
    with pytest.raises(UsageError, match="microbatches and a schedule"):
        Configuration(PIPELINE, per_host=2)


def small() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


@pytest.mark.timeout(60)
def test_layers_and_bytes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.plan.measure._SECONDS", 0.05)
    monkeypatch.setattr("stratagem.plan.measure.counts", lambda wanted: [])
    net = small()
    count = sum(p.numel() for p in net.parameters())
    model = sg.Model(net)
    model.compile("adam", "cross_entropy")
    made = sg.plan(model, (torch.randn(8, 8), torch.randint(0, 2, (8,))), hosts=1)
    held = made.plan.profile.footprint
    assert held is not None and held.parameters == held.gradients == 4 * count
    assert held.states == 2 * 4 * count + 4 * 6  # two moments, and a step for each parameter
    # inputs of the three layers, what relu and tanh made (the same tensors), log softmax
    assert 4 * 8 * (8 + 16 + 16 + 2) <= held.activations <= 4 * 8 * (8 + 16 + 16 + 4) + 200
    tables = made.plan.profile.layers
    assert [table.pieces for table in tables] == [1, 2, 4] and not made.plan.profile.unpiped
    assert all(0 < c.forward < c.seconds for table in tables for c in table.costs)
    assert tables[0].costs[0].activation == 2 * tables[1].costs[0].activation
    tried = choose(made.plan.profile, Hardware(per_host=2)).tried
    assert {PIPELINE, SHARDED} <= {cfg.strategy for cfg in tried}


@pytest.mark.timeout(60)
def test_a_model_that_cannot_be_split_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.plan.measure._SECONDS", 0.05)
    monkeypatch.setattr("stratagem.plan.measure.counts", lambda wanted: [])
    model = sg.Model(nn.Sequential(small(), nn.BatchNorm1d(2)))
    model.compile("adam", "cross_entropy")
    made = sg.plan(model, (torch.randn(8, 8), torch.randint(0, 2, (8,))), hosts=1)
    assert "BatchNorm" in made.plan.profile.unpiped and not made.plan.profile.layers
    assert not any(cfg.strategy == PIPELINE for cfg in made.plan.tried)
    assert "use GroupNorm" in " ".join(report.text(made.plan, width=200).split())
