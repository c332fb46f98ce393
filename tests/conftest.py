"""Every test leaves the machine as it found it: no process and no shared memory behind."""

from __future__ import annotations

import atexit
import gc
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported

import stratagem as sg
from tests import left_behind
from tests.clock import SLOWER, TAKEN, TRIES, Hang, Late, processor_time, share_taken
from tests.support import strategy

left_behind.mark_our_processes()
torch.set_num_threads(1)  # replicas on few cores fight each other otherwise
# whatever started the tests in the background may have chosen to ignore them, and children inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# the same examples every time, and a busy machine is no failure; `pytest
# --hypothesis-profile=search` looks for others
settings.register_profile(
    "same",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search", settings.get_profile("same"), max_examples=500, derandomize=False
)
settings.load_profile("same")

#: what a test fails with that waited in vain; the last: by its own time limit
_HANGS = (Hang, TimeoutError, queue.Empty, subprocess.TimeoutExpired, pytest.fail.Exception)

_tries = pytest.StashKey[int]()
_limit = pytest.StashKey[Any]()
_twice = pytest.StashKey[list[str]]()

#: files whose tests take long begin first, in this order: no process is left alone with them
_LONG = (
    "test_types",
    "test_served",
    "servers",
    "test_faults",
    "membership",
    "multi_worker",
    "keras",
    "test_same_answer",
    "test_collectives",
    "test_examples",
)


#: variants of what a sister shows in `make test`, and long studies: patterns of their ids
_EXHAUSTIVE = re.compile(
    "|".join(
        (
            r"test_tf_distribute.py::test_parameter_servers_fit_evaluate_and_predict",
            r"test_device_group.py::test_the_devices_of_a_worker_share_(its_batches|the_batches_of_a_loop)\[1\]",
            r"test_device_group.py::test_what_callbacks_change_reaches_every_device\[1\]",
            r"test_golden.py::.*\[2 workers of 2 devices, a server\]",
            r"studies/test_(sparse|exercise).py",
            r"test_run.py::test_a_server_that_ends_first_is_not_to_blame\[ps runs the script\]",
            r"test_run.py::test_the_first_is_not_whoever_ends_first\[sys.exit\(7\)-7-\]",
            r"test_lateness.py::test_the_late_one_is_named\[(hierarchical|ring)\]",
            r"test_scripts.py::test_a_(script_from_standard_input|plain_script_and_a_module_beside_it)",
            r"test_callbacks.py::test_deleted_models_leave_no_copies",
            r"test_same_answer.py::test_(every_operation|own_loop_with_every_operation).*\[\(2, ",
            r"test_same_answer.py::test_optimizers\[2-",
            r"test_same_answer.py::test_a_mask_that_reaches_the_loss\[.*-True\]",
            r"test_collectives.py::.*\[\((5, '(?!shared)|\d, 'last device'|2, 'three)",
            r"learns_the_digits\[(.*-1 ps|(spares|bounded|buffered)-central)\]",
            r"test_served.py::test_digits\[(.*-1 ps|(spares|bounded|buffered)-central)\]",
            r"test_step_logs.py::test_single_steps\[(Named|Guided)-",
            r"test_data_order.py::test_epochs_cut_short_shuffle_as_on_one_device\[[12]-",
            r"test_model.py::test_every_kind_of_data\[2-",
            r"test_ported.py::test_a_script_gives_what_one_device_gives_or_is_refused\[2 replicas-",
            r"test_multi_worker.py::test_a_worker_(raises|is_killed)\[[01]-ring",
            r"strategies/test_elastic.py::test_kills_change_nothing\[accumulate",
            r"test_membership.py::test_(a_killed_hub|a_fail|last|leaving|who_left|a_big|a_forked).*\[pairs",
            r"test_rows_apart.py::test_values_of_single_rows\[.*-6\]",
        )
    )
)


#: whole programs, and deaths that take their time: of `make test-slow`
_SLOW = re.compile(
    "|".join(
        (
            r"test_row_check.py::test_whichever_row_decides.*(fit|evaluate)",
            r"test_compiled.py::test_fit_of_a_compiled_module.*replicas",
            r"test_captured.py::test_a_captured_step.*(class|statistics|losses|validation|scaled)",
            r"test_quiet_loop.py::test_every_bit.*\[(mlp-more[13]|dropping)",
            r"test_captured.py::test_(what_callbacks.*(weights|rate)|between_two|servers)",
            r"test_captured.py::test_any_setting_is_followed(?!\[(l2|array|compute_loss)\])",
            r"test_captured.py::test_the_step_stays.*(half|own_activation|more4|more5)",
            r"keras/test_mesh.py::test_(three|skips|every_process|other_calls|dropout|refusals)",
            r"keras/test_mesh.py::test_rows_are_shuffled|strategies/test_mesh.py::test_.*shuffled",
            r"test_divided_loop.py::test_statistics_and_dropout_of_one_device.3.",
            r"test_ray_cluster.py::test_a_(place_that_is_lost|worker_that_fails_is_named)",
            r"test_tpu.py::test_nccl_is_refused",
            r"test_compressed_pushes.py::test_fit_and_loops_are_what_the_formula_says(?!\[2-dgc-0\])",
            r"test_compressed_pushes.py::test_a_fit_goes_on_bit_for_bit\[power\]",
            r"test_compressed.py::test_a_worker_that_dies_takes_what_it_kept",
            r"keras/test_compressed.py::test_a_keras_model_trains_with_the_same_records",
            r"test_elastic_corners.py::test_the_chief_alone_takes_one_back_in_a_loop",
            r"test_elastic_corners.py::test_sigterm_while_replicas_come_together",
            r"replicas/test_faults.py::test_failures_leave_nothing_open",
            r"keras/test_elastic.py::test_kills_change_nothing",
            r"servers/test_faults.py::test_a_stopped_worker_holds_nobody_up_who_has_a_spare",
            r"servers/test_faults.py::test_a_worker_that_stands_too_long_is_given_up",
            r"servers/test_faults.py::test_a_stopped_server_is_named_then_given_up",
            r"test_sharded_workers.py::test_a_worker_that_stops_is_named",
            r"test_clients.py::test_ctrl_c_on_a_worker_and_on_the_chief",
            r"test_membership.py::test_a_member_that_stays_stopped_becomes_trouble",
            r"test_generations.py::test_one_that_was_stopped_comes_back_as_a_new_one",
            r"test_model.py::test_fits_leave_no_memory_behind",
            r"test_figures.py::test_who_is_slow_is_named_and_who_is_dead_is_shown",
            r"replicas/test_faults.py::test_ctrl_c",
            r"test_file_pair.py::test_an_ended_saving_leaves_the_old_or_the_new_checkpoint",
            r"test_generations.py::test_without_the_chief_the_job_ends",
            r"keras/test_backups.py::test_others_go_on_where_it_was",
            r"test_tracebacks.py::test_an_exception_on_a_worker_is_told_in_few_lines",
            r"test_served_calls.py::test_a_worker_that_is_killed_is_replaced",
            r"test_faults.py::test_the_death_of_the_helper_that_starts_the_others",
            r"test_elastic_hosts.py::test_cut_off_and_back_then_killed_and_started_again",
            r"test_elastic_run.py::test_a_worker_is_started_again_and_joins_then_the_chief",
            r"test_elastic_run.py::test_the_chief_is_killed_and_the_others_go_on",
            r"keras/test_elastic.py::test_workers_leave_and_join",
            r"test_trials.py::test_kept_models_are_those_of_training_alone",
            r"test_elastic_corners.py::test_the_chief_alone_takes_one_back_that_knows_nothing",
            r"test_checkpoint_folder.py::test_an_ended_saving_leaves_the_old_or_the_new_checkpoint",
            r"test_elastic_loops.py::test_(workers_leave_and_join|checkpoints_besides|kills_at_any)",
            r"strategies/test_elastic.py::test_(workers_leave_and_join|kills_at_any_moment|too_few_workers)",
            r"test_elastic_corners.py::test_(checkpoints_after_a_death|sigterm_while_there_are_too_few)",
            r"keras/test_elastic.py::test_(the_last_moment_and_other_calls|deaths_within_steps)",
            r"test_ray_cluster.py::test_the_weights_of_one_device",
            r"test_resume.py::test_no_bit_differs_after_going_on_from_any_batch\[fully_sharded",
            r"strategies/test_(meetings|compressed).py::test_workers_of_a_cluster_do_what_the_formula_says",
            r"test_pipeline_faults.py::test_a_stage_that_is_late_is_named",
            r"test_tensor_parallel.py::test_a_process_that_stopped_is_named",
            r"test_clock.py::test_who_needed_another_try_is_listed_and_fails_the_second_time",
            r"servers/test_faults.py::test_in_step_the_answer_is_that_of_one_device",
            r"servers/test_chaos.py",
            r"test_reliability.py::test_kills_at_random_moments",
            r"test_multi_worker.py::test_a_(wrong_secret_is_refused|waiting_worker_can_be_ended)",
            r"keras/test_meetings.py::test_(a_backup_has|the_mean_is_an_outer_step)",
            r"keras/test_stages.py::test_skips_ties_regularisers_and_several_outputs",
            r"keras/test_models.py::test_(series|quantized_prediction|mean_iou)",
            r"keras/test_models.py::test_own_steps_(that_mix|without_metrics)",
            r"test_plan.py::test_validate_runs_keras_too",
            r"test_elastic_loops.py::test_kills_change_nothing\[outside of steps",
            r"test_elastic_slices.py::test_deaths_within_updates\[clipped-after",
            r"keras/test_callbacks.py::test_deleted_models_leave_no_process",
            r"test_membership.py::test_a_stopped_member_is_named_and_named_again_when_it_wakes\[pairs",
            r"test_membership.py::test_a_chief_restarted_while_others_wait_is_found_again",
            r"test_quantize.py::test_(models_of_servers|under_a_scope_the_whole_way)",
            r"test_check.py::test_(another_task_at|a_training_that_meets|one_that_starts_late)",
            r"frontends/test_served.py::test_callbacks_that_change_nothing_undo_nothing",
            r"test_left_behind.py::test_a_segment_is_left_when_its_process_outlives_its_parent",
            r"test_run.py::test_a_second_ctrl_c_does_not_wait",
            r"test_sweep.py::test_one_slot_and_three_give_the_same",
            r"test_lateness.py::test_another_number_of_backward_passes",
            r"test_notebook.py::test_it_can_be_called_whichever_way_it_was_found",
            r"test_figures.py::test_the_table_in_a_terminal",
            r"servers/test_faults.py::test_workers_are_killed_at_any_moment\[free",
            r"servers/test_recovery.py::test_one_server_and_then_the_first_are_started_again",
            r"servers/test_backups.py::test_servers_are_killed_at_any_moment",
            r"keras/test_stages.py::test_dropout_draws_by_microbatch_and_layer",
            r"keras/test_elastic.py::test_what_would_come_again_ends_the_job",
            r"keras/test_step_logs.py::test_the_history_is_that_of_one_device.(Ren|Gui|Der|.*spares)",
            r"test_staged_step.py::test_operations_are_measured_in_the_stages_own_code",
            r"test_plan.py::test_a_script_that_the_system_kills",
            r"test_generations.py::test_with_a_hub_outside_the_next_is_the_chief",
            r"test_step_figures.py::test_a_replica_of_this_process_is_named",
            r"test_membership.py::test_a_stopped_member_is_named_and_named_again",
            r"test_membership.py::test_a_worker_restarted_while_others_wait_is_let_in_again",
            r"test_tcp_traces.py::test_a_forked_child_keeps_no_connection_open",
            r"test_output.py::test_a_reader_who_stalls_does_not_hold_up_the_end",
            r"test_check.py::test_(ctrl_c_ends_a_check_at_once|another_secret_is_certain)",
            r"test_speedups.py::test_of_the_headlines",
            r"test_elastic_slices.py::test_kills_at_any_moment",
            r"test_sweep.py::test_two_parents_do_not_share_a_folder",
            r"test_freed_memory.py::test_replicas_keep_what_they_freed_until_they_are_closed",
            r"keras/test_models.py::test_(metric_inside_a_layer|spectral_normalization|gradient_penalty)",
            r"keras/test_callbacks.py::test_(two_models_that_share_a_layer|optimizer_replaced_between_fits)",
            r"test_served_calls.py::test_(exponential_averages|sixteen_bits_on_the_wire|what_is_dropped)",
            r"test_clients.py::test_(a_strategy_that_its_function_forgets|one_that_comes_when_all_is_over)",
            r"keras/test_saving.py::test_a_subclassed_model",
            r"strategies/test_meetings.py::test_the_kernel_counts_as_many_bytes_as_the_formula",
            r"test_elastic_corners.py::test_a_follower_dies_after_the_last_step",
            r"keras/test_data.py::test_training.(?!tensors|loader.$)",
            r"test_fingerprint.py::test_what_may_differ_and_dice_are_left_alone",
            r"test_step_figures.py::test_a_stage_is_compared_with_its_like",
            r"test_membership.py::test_a_second_claim_to_a_rank_is_refused",
            r"test_compressed.py::test_the_kernel_counts_as_many_bytes_as_the_formula",
            r"keras/test_models.py::test_(gan|subclassed_and_unbuilt)",
            r"keras/test_callbacks.py::test_models_own_methods_in_mid_fit.on_epoch_end",
            r"test_pipeline_faults.py::test_a_stage_that_stopped_is_named",
            r"keras/test_step_logs.py::test_single_steps",
            r"test_quantize.py::test_(nothing_to_quantise|what_8_bits_cannot_span.mask)",
            r"test_check.py::test_one_way_only_is_told",
        )
    )
)

#: where a test starts processes, mostly, or has many variants: of these every third is run
_THINNED = (
    "frontends/",
    "servers/",
    "strategies/",
    "training/",
    "launch/",
    "ported/",
    "test_collectives",
    "state/test_store",
    "simulation/test_",
)


def _is_left_out(item: pytest.Item, variants: Counter[str]) -> bool:
    """Whether it is left to `make test-exhaustive`."""
    if _EXHAUSTIVE.search(item.nodeid):
        return True
    test, _, variant = item.nodeid.partition("[")
    if not variant or not any(part in test for part in _THINNED):
        return False
    variants[test] += 1
    return variants[test] % 3 != 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    variants: Counter[str] = Counter()
    for item in items:
        if _is_left_out(item, variants):
            item.add_marker(pytest.mark.exhaustive)
        if _SLOW.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if SLOWER != 1:
            limit = item.get_closest_marker("timeout")
            given = item.config.getoption("timeout", None) or item.config.getini("timeout") or 0
            seconds = float(limit.args[0] if limit else given)
            item.add_marker(pytest.mark.timeout(seconds * SLOWER), append=False)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    return next((i for i, name in enumerate(_LONG) if name in str(item.path)), len(_LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector need never look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if "triton" in sys.modules:  # it prints what it has bound and finds still there at the end
            atexit.register(gc.unfreeze)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.late = call.excinfo is not None and call.excinfo.errisinstance(Late)
    report.hang = call.excinfo is not None and call.excinfo.errisinstance(_HANGS)
    report.tries = item.stash.get(_tries, 1)
    return report


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """A test that came late runs again from its start; the last try counts.

    Late every time, it fails; but where a run of such tests, alone, is to follow
    (STRATAGEM_SECOND_TRIES), it is left to that, as is a test that failed and did not hang. There
    it fails, for being late only if the machine could run.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    since = processor_time()
    for item.stash[_tries] in range(1, TRIES + 1):
        if item.stash[_tries] > 1:
            _begin_anew(item)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        bad = [report for report in reports if report.failed]
        if not bad or not all(report.late for report in bad):
            break
    taken = share_taken(since)
    for report in reports:
        report.could_not_run = taken > TAKEN
        if report.failed and _is_left(report):
            report.outcome, report.tries = "passed", TRIES + 1
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _is_left(report: Any) -> bool:
    """Whether a failure is left to the run alone, or was the machine's there."""
    if os.environ.get("STRATAGEM_ALONE"):
        return bool(report.late and report.could_not_run)
    again = os.environ.get("STRATAGEM_SECOND_TRIES")
    return bool(again and (report.late or (report.when == "call" and not report.hang)))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_limit] = settings


def _begin_anew(item: Any) -> None:
    """What a test may take is for each try, and a fixture that came late is tried again, too."""
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        for each in fixtures:
            if each.cached_result is not None and each.cached_result[2] is not None:
                each.finish(SimpleNamespace(node=item))
    if _limit in item.stash:
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[_limit])


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Who needed another try is counted and listed: often the same one is a fault."""
    again = report.when == "call" and report.passed and getattr(report, "tries", 1) > 1
    return ("late", "L", "PASSED LATE") if again else None


def _again(config: pytest.Config) -> list[Any]:
    """The tests that need another try, or another run; in the process that reports."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.getreports("late") if reporter is not None else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that needs another try in two runs, one after the other, has a fault.

    Unless the machine could not run in the second.

    STRATAGEM_SECOND_TRIES names the file in which a run finds those of the run before, a line each,
    and leaves its own.
    """
    name = os.environ.get("STRATAGEM_SECOND_TRIES")
    if not name or hasattr(session.config, "workerinput"):  # xdist's processes report nothing
        return
    file, again = Path(name), _again(session.config)
    before = file.read_text().splitlines() if file.exists() else []
    file.write_text("".join(sorted(f"{each.nodeid}\n" for each in again)))
    in_time = {each.nodeid for each in again if not each.could_not_run}
    session.config.stash[_twice] = sorted(in_time & {*before})
    if session.config.stash[_twice]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    again, twice = _again(terminalreporter.config), terminalreporter.config.stash.get(_twice, [])
    if again:
        terminalreporter.section("not passed at once")
    for report in again:
        late = "late at every try" if report.late else "FAILED, to be tried once more alone"
        how = f"passed at try {report.tries}" if report.tries <= TRIES else late
        terminalreporter.line(f"{how}: {report.nodeid}")
        if report.tries > TRIES and not report.late:
            terminalreporter.line(report.longreprtext)
    for nodeid in twice:
        terminalreporter.line(f"FAILED for being late in the run before, too: {nodeid}")


@pytest.fixture(scope="session", autouse=True)
def nothing_in_shared_memory() -> Iterator[None]:
    before = left_behind.in_shared_memory()
    yield
    until = time.monotonic() + 20  # what the tests of another process hold for a while goes, too
    while (left := left_behind.in_shared_memory() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, f"left in shared memory: {left}"


@pytest.fixture(scope="module")
def two() -> Iterator[sg.MirroredStrategy]:
    """Replicas for all tests of a file that need nothing else."""
    with closing(strategy(2)) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[sg.MirroredStrategy]:
    with closing(strategy(3)) as made:
        yield made


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.MirroredStrategy]:
    """One device, and then two replicas."""
    with closing(strategy(request.param)) as made:
        yield made
