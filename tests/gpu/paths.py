"""Code paths for GPUs and the test status of each: ``python -m tests.gpu.paths`` writes the table.

It needs only the standard library and ``lab_common``. The outcome of a run on a GPU is in
``data/reference/gpu_tests.json``, which ``python -m benchmarks.gpu`` writes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab_common import checkout
from lab_common.files import write_atomically

TABLE, OUTCOMES = Path("benchmarks/gpu/PATHS.md"), Path("data/reference/gpu_tests.json")
HERE = Path(__file__).parent
# The fixture of tests that are skipped without a GPU.
REAL = "real_gpu"


@dataclass(frozen=True)
class GpuPath:
    """One code path.

    Attributes:
        name: What the code does on a GPU.
        where: A file of the repository and a name in it, such as ``lab_utils/parallel.py: CpuDataParallel``; in a
            notebook the id of a cell.
        test: The function in this folder that runs it: ``file: function``, without ``test_gpu_``, ``.py`` and
            ``test_``.
    """

    name: str
    where: str
    test: str


MEASURE, TIMELINE = "lab_utils/timing/measure.py", "lab_utils/timing/timeline.py"
BATCHES, LOOP = "lab_utils/data/batches.py", "lab_utils/training/loop.py"
CHECKPOINTS, FACTS = "lab_utils/training/checkpoints.py", "lab_utils/machine/facts.py"
LAB0, LAB1, LAB4 = (f"notebooks/{name}.ipynb" for name in ("00_start_here", "01_mixed_precision", "04_data_parallel"))
SCRIPTS = "notebooks/scripts"

PATHS = (
    GpuPath("waiting for the device", f"{MEASURE}: synchronize", "timing: synchronize_waits_for_the_device"),
    GpuPath("no waiting for a CPU", f"{MEASURE}: synchronize", "timing: for_a_cpu_synchronize_does_nothing"),
    GpuPath("order of counters, clock and step", f"{MEASURE}: _sample", "timing: the_calls_around_a_step_are_in_order"),
    GpuPath("seconds of queued work", f"{MEASURE}: _sample", "timing: a_steps_seconds_are_those_of_its_work"),
    GpuPath("work queued before", f"{MEASURE}: _sample", "timing: work_that_was_queued_before_does_not_count"),
    GpuPath("CUDA events against the clock", f"{MEASURE}: measure", "timing: events_and_the_clock_agree"),
    GpuPath("peak memory of a step", f"{MEASURE}: interleave", "timing: each_set_up_has_its_own_peak_memory"),
    GpuPath(
        "out of memory: the next set-up goes on",
        f"{MEASURE}: interleave",
        "timing: a_set_up_without_memory_has_no_seconds_and_the_next_goes_on",
    ),
    GpuPath(
        "out of memory in words of cuDNN and cuBLAS",
        f"{MEASURE}: is_out_of_memory",
        "timing: a_lack_of_memory_is_known_by_the_librarys_words",
    ),
    GpuPath(
        "another error is no lack of memory",
        f"{MEASURE}: is_out_of_memory",
        "timing: another_error_of_the_device_is_raised",
    ),
    GpuPath(
        "a convolution that runs out of memory",
        f"{MEASURE}: is_out_of_memory",
        "timing: a_convolution_without_room_is_a_lack_of_memory",
    ),
    GpuPath("out of memory among ranks", f"{MEASURE}: _sample", "timing: among_ranks_a_lack_of_memory_is_an_error"),
    GpuPath(
        "the slowest rank, by a group of NCCL and Gloo",
        f"{MEASURE}: _keep_slowest",
        "timing: among_ranks_the_slowest_one_is_kept",
    ),
    GpuPath("phases of a step", f"{TIMELINE}: end", "timing: a_phase_of_a_timeline_is_as_long_as_its_work"),
    GpuPath("a timeline that is off", f"{TIMELINE}: end", "timing: a_timeline_that_is_off_waits_for_nothing"),
    GpuPath(
        "bytes saved for backward",
        "lab_utils/timing/memory.py: count_saved_bytes",
        "timing: saved_bytes_are_counted_on_the_device",
    ),
    GpuPath(
        "batches on the device, augmented", f"{BATCHES}: __iter__", "data: batches_are_on_the_device_and_those_of_a_cpu"
    ),
    GpuPath(
        "copies from page-locked memory",
        f"{BATCHES}: _upload",
        "data: images_and_labels_come_from_pinned_memory_without_waiting",
    ),
    GpuPath("no waiting for a batch", f"{BATCHES}: __iter__", "data: nothing_waits_for_a_batch"),
    GpuPath(
        "page-locked buffers used again",
        f"{BATCHES}: _upload",
        "data: pinned_memory_is_not_used_again_before_it_was_read",
    ),
    GpuPath("an epoch's seconds, from events", f"{LOOP}: _Clock", "loop: an_epochs_seconds_are_the_devices_own"),
    GpuPath("number of events", f"{LOOP}: _mark", "loop: an_epoch_has_two_events_a_step"),
    GpuPath("no waiting between two reads", f"{LOOP}: _run_epoch", "loop: a_training_loop_waits_once_in_twenty_steps"),
    GpuPath(
        "a loss that is no number",
        f"{LOOP}: _check_loss",
        "loop: a_loss_that_is_no_number_is_found_within_twenty_steps",
    ),
    GpuPath("training, against a CPU", f"{LOOP}: train_epoch", "loop: an_epoch_trains_as_on_a_cpu"),
    GpuPath(
        "evaluation, against a CPU", f"{LOOP}: evaluate", "loop: evaluation_counts_as_on_a_cpu_and_leaves_the_mode"
    ),
    GpuPath("top-k on the device", f"{LOOP}: count_topk", "loop: topk_is_counted_on_the_device_without_waiting"),
    GpuPath(
        "resuming from a checkpoint",
        "lab_utils/training/checkpoints.py: load",
        "loop: a_run_goes_on_from_a_checkpoint_on_the_device",
    ),
    GpuPath("saving takes no GPU memory", f"{CHECKPOINTS}: save", "loop: saving_a_checkpoint_puts_nothing_on_the_gpu"),
    GpuPath("loading to the device", f"{CHECKPOINTS}: load", "loop: a_checkpoint_is_loaded_to_the_device"),
    GpuPath(
        "the emulation beside a GPU",
        "lab_utils/parallel.py: CpuDataParallel",
        "parallel: the_emulation_takes_no_gpu_where_there_is_one",
    ),
    GpuPath(
        "phases of a network",
        "course/replicas.py: note_phases",
        "parallel: the_phases_of_a_network_on_the_device_are_noted",
    ),
    GpuPath("lab 4: a step of one device", f"{LAB4}: what-if", "parallel: lab_4s_step_of_one_device_is_timed_there"),
    GpuPath("DataParallel of one GPU", f"{LAB4}: one-line", "parallel: data_parallel_with_one_gpu_is_one_call"),
    GpuPath(
        "DataParallel against the emulation",
        "lab_utils/parallel.py: CpuDataParallel",
        "parallel: data_parallel_and_the_emulation_leave_the_same_gradients",
    ),
    GpuPath("facts of the GPU", f"{FACTS}: describe", "machine: the_facts_of_a_gpu_are_torchs"),
    GpuPath(
        "device and scale",
        "lab_utils/machine/settings.py: scale",
        "machine: the_labs_take_the_first_gpu_and_the_full_scale",
    ),
    GpuPath("bf16 by capability", f"{FACTS}: has_fast_bf16", "machine: bf16_is_fast_from_ampere_on"),
    GpuPath("the machine card", "lab_utils/machine/__init__.py: card", "machine: the_card_shows_memory_and_scale"),
    GpuPath("a label of two GPUs", f"{FACTS}: label", "machine: two_gpus_have_one_label"),
    GpuPath("driver and clocks", "course/reference.py: read_gpus", "machine: nvidia_smi_tells_driver_and_clocks"),
    GpuPath(
        "two ranks on one GPU: NCCL's words",
        "nodelaunch/node/errors.py: failed_as_consequence",
        "launch: two_ranks_on_one_gpu_are_a_cause_and_told_in_words",
    ),
    GpuPath(
        "a lost rank: NCCL's words",
        "nodelaunch/node/errors.py: failed_as_consequence",
        "launch: nccls_word_of_a_rank_that_is_gone_is_a_consequence",
    ),
    GpuPath(
        "the preflight: GPUs for the processes",
        "nodelaunch/preflight/gpus.py: judge_gpus",
        "launch: a_gpu_is_enough_for_one_process_and_not_for_more",
    ),
    GpuPath(
        "how busy the GPU is",
        "nodelaunch/node/sampler.py: follow_gpus",
        "launch: the_sampler_reads_how_busy_the_gpu_is",
    ),
    GpuPath(
        "a rank that waits for its GPU",
        "nodelaunch/node/watch.py: _read_clock",
        "launch: a_rank_that_waits_for_its_gpu_does_not_look_busy",
    ),
    GpuPath(
        "the device, without starting CUDA",
        "nodelaunch/node/agreement.py: find_device",
        "launch: the_device_of_a_rank_is_found_and_cuda_not_started",
    ),
    GpuPath("NCCL, one rank", f"{SCRIPTS}/compare_parallel.py: main", "launch: nccl_connects_one_rank"),
    GpuPath(
        "DDP over NCCL",
        f"{SCRIPTS}/train_ddp.py: main",
        "launch: ddp_over_nccl_leaves_the_gradients_of_the_bare_network",
    ),
    GpuPath("lab 5's training script", f"{SCRIPTS}/observed.py: Notes", "torchrun: lab_5s_script_trains_over_nccl"),
    GpuPath(
        "lab 5's steps and buckets",
        f"{SCRIPTS}/measure_step.py: Buckets",
        "torchrun: lab_5s_steps_and_buckets_are_measured_over_nccl",
    ),
    GpuPath(
        "lab 4's set-ups",
        f"{SCRIPTS}/compare_parallel.py: measure_case",
        "torchrun: lab_4s_set_ups_are_measured_on_one_gpu",
    ),
    GpuPath(
        "lab 4's training script", f"{SCRIPTS}/train_parallel.py: train", "torchrun: lab_4s_script_trains_on_one_gpu"
    ),
    GpuPath(
        "two ranks on one GPU",
        "nodelaunch/messages.py: look_up",
        "torchrun: two_ranks_on_one_gpu_work_or_are_refused_in_words",
    ),
    GpuPath(
        "more processes than GPUs",
        "nodelaunch/preflight/gpus.py: must_hide",
        "torchrun: more_processes_than_gpus_use_the_cpu",
    ),
    GpuPath("lab 0: products and copies", f"{LAB0}: devices", "labs: lab_0_measures_products_and_copies_on_the_device"),
    GpuPath(
        "lab 0: two timers", f"{LAB0}: exercise-time", "labs: lab_0s_naive_timer_is_fooled_and_the_solution_is_not"
    ),
    GpuPath("lab 0: the loop", f"{LAB0}: loop", "labs: lab_0s_loop_waits_around_each_step"),
    GpuPath("lab 0: parts of a step", f"{LAB0}: warmup", "labs: lab_0s_parts_of_a_step_run_on_the_device"),
    GpuPath("lab 0: the profile", f"{LAB0}: profile", "labs: lab_0s_profile_names_the_layers_of_a_gpu"),
    GpuPath("lab 1: which precisions", f"{LAB1}: setups", "labs: lab_1_chooses_precisions_by_the_gpu"),
    GpuPath(
        "lab 1: autocast and its dtypes",
        f"{LAB1}: amp-step",
        "labs: an_amp_step_casts_on_the_gpu_and_keeps_gradients_in_fp32",
    ),
    GpuPath(
        "lab 1: a skipped step",
        f"{LAB1}: amp-step",
        "labs: the_scaler_skips_a_step_whose_gradients_are_infinite",
    ),
    GpuPath(
        "lab 1: clipping unscaled gradients",
        f"{LAB1}: clipped-step",
        "labs: the_norm_that_is_clipped_is_that_of_unscaled_gradients",
    ),
    GpuPath("lab 1: the TF32 switches", f"{LAB1}: steps", "labs: a_step_is_run_after_its_precision_is_set"),
    GpuPath(
        "lab 1: steps, channels last too",
        f"{LAB1}: steps",
        "labs: lab_1s_steps_stand_on_the_device_in_their_layout",
    ),
    GpuPath("lab 1: small products", f"{LAB1}: count-calls", "labs: lab_1s_small_products_are_cast_where_they_should"),
    GpuPath("lab 1: accuracy", f"{LAB1}: accuracy", "labs: lab_1_trains_and_evaluates_in_a_precision"),
    GpuPath(
        "lab 1: a set-up that does not fit",
        f"{LAB1}: record-graph",
        "labs: a_set_up_that_does_not_fit_is_told_and_left_out",
    ),
    GpuPath(
        "lab 1: recording a CUDA graph",
        f"{LAB1}: record-graph",
        "labs: a_graph_is_recorded_after_a_warm_up_and_replayed",
    ),
    GpuPath(
        "lab 1: a captured step",
        f"{LAB1}: record-graph",
        "labs: a_captured_step_waits_for_nothing",
    ),
    GpuPath(
        "lab 1: training by a CUDA graph", f"{LAB1}: record-graph", "labs: a_replayed_graph_trains_as_the_step_does"
    ),
    GpuPath("lab 1: errors of TF32", f"{LAB1}: steps", "labs: tf32_rounds_and_ieee_does_not"),
    GpuPath("lab 1: losses of all precisions", f"{LAB1}: steps", "labs: all_precisions_train_alike"),
    GpuPath("lab 1: torch.compile", f"{LAB1}: steps", "labs: a_compiled_block_computes_the_same"),
    GpuPath("lab 1: autocast's rules for CUDA", f"{LAB1}: amp-step", "labs: torch_casts_a_step_on_a_fake_gpu"),
)


def find_tests() -> dict[str, bool]:
    """Finds the tests of this folder: by ``file: function``, as above, True if they are skipped without a GPU."""
    found = {}
    for path in sorted(HERE.glob("test_gpu_*.py")):
        for one in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"):
                name = f"{path.stem.removeprefix('test_gpu_')}: {one.name.removeprefix('test_')}"
                found[name] = REAL in [argument.arg for argument in one.args.args]
    return found


def read_outcomes(path: Path) -> dict[str, Any]:
    """Reads the outcome of a run on a GPU; {} if none was recorded."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tell(test: str, real: bool, outcomes: Mapping[str, str]) -> str:
    """Describes where a path was run; for a test with parameters the worst outcome counts."""
    file, _, function = test.partition(": ")
    name = f"test_gpu_{file}.py::test_{function}"
    # With or without a folder before it, as pytest's root was.
    found = {text for key, text in outcomes.items() if f"/{key}".partition("[")[0].endswith(f"/{name}")}
    for outcome, words in (("failed", "FAILED on a GPU"), ("passed", "passed on a GPU")):
        if outcome in found:
            return words if real else f"{words}; rehearsed on a CPU"
    return "never" if real else "never on a GPU; rehearsed on a CPU"


def make_table(outcomes: Mapping[str, Any]) -> str:
    """Makes the text of the table.

    Args:
        outcomes: The content of ``gpu_tests.json``: ``machine``, ``torch``, ``when`` and ``tests``, the outcome of each
            test by pytest's id; {} if there are none.
    """
    tests, results = find_tests(), outcomes.get("tests", {})
    rows = [(path, tell(path.test, tests[path.test], results)) for path in PATHS]
    passed = sum(words.startswith("passed") for _, words in rows)
    rehearsed = sum(words.endswith("on a CPU") for _, words in rows)
    run = "None of them has run on a GPU yet."
    if results:
        label, torch, when = outcomes["machine"]["label"], outcomes["torch"], outcomes["when"][:10]
        run = f"{passed} of them passed on {label}, torch {torch}, on {when}."
        again = {name for one in outcomes.get("again", ()) for name in one["tests"]}
        run += f" {len(again)} tests were run again alone, at a later commit." if again else ""
    lines = [
        "# The paths of a GPU",
        "",
        "`python -m tests.gpu.paths` writes this file; nothing in it is written by hand.",
        "",
        f"There are {len(rows)} paths. {run} {rehearsed} paths are rehearsed in each run of the tests, mostly",
        "on a pretended GPU: that proves which calls are made, in which order and on which device, and nothing else.",
        "What takes two GPUs is not here: `tests/test_lab4.py` tests it where there are two.",
        "",
        "| path | stands in | test in `tests/gpu` | run |",
        "|---|---|---|---|",
    ]
    for path, words in rows:
        file, _, name = path.where.partition(": ")
        test, _, function = path.test.partition(": ")
        lines.append(f"| {path.name} | `{file}`, `{name}` | `test_gpu_{test}.py`, `test_{function}` | {words} |")
    return "\n".join([*lines, ""])


def write_table(root: Path | None = None) -> Path:
    """Rewrites the table and returns its file; ``root`` is the checkout."""
    root = root or checkout()
    path = root / TABLE
    with write_atomically(path) as file:
        file.write(make_table(read_outcomes(root / OUTCOMES)).encode())
    return path


if __name__ == "__main__":
    print(write_table())
