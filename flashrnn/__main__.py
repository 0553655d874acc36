"""The command `python -m flashrnn`: test backends, plan for GPUs, and compile or tune kernels."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

import torch

from flashrnn import Cell, UnsupportedProblem, dispatch, doctor, get_cell, limits, warmup
from flashrnn.cache import cache_folder
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.gpu import NAMED, Gpu, nvidia_gpu
from flashrnn.plan import explain, plans
from flashrnn.precompile import Compiled
from flashrnn.problem import Backend, Problem, dtype_name, tf32_allowed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m flashrnn", description="Test backends, plan for GPUs, compile kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_doctor, add_limits, add_tilings, add_explain, add_tune, add_warmup):
        add(commands)
    given = parser.parse_args(arguments)
    return given.run(given)


def add_doctor(commands) -> None:
    command = commands.add_parser(
        "doctor",
        help="print GPU, driver, versions and cache folder, and test each backend",
        description="Print hardware, software and the calls that each backend supports on this machine, and test each "
        "backend. Exit with status 1 if a test fails.",
    )
    command.set_defaults(run=print_doctor)


def add_limits(commands) -> None:
    command = commands.add_parser(
        "limits",
        help="print the largest heads that fit on the chip, by GPU, cell and dtype",
        description="Print the largest heads of backend cuda_fused, computed by its solver. No GPU is needed.",
    )
    command.add_argument("--json", action="store_true", help="print JSON, a list of objects")
    command.set_defaults(run=print_limits)


def add_tilings(commands) -> None:
    command = commands.add_parser(
        "tilings",
        help="print the best tilings of backend cuda_fused for given sizes, with estimated times",
        description="Print the best tilings by the solver's estimate, forward and backward. No GPU is needed.",
    )
    add_sizes(command)
    add_count(command)
    command.add_argument("--gpu", choices=NAMED, help="(default: this machine's)")
    command.set_defaults(run=print_tilings)


def add_explain(commands) -> None:
    command = commands.add_parser(
        "explain",
        help="print the backend of a call of given sizes, and the reason",
        description="Print the backend of a call, why no faster one is used, and its tilings. No GPU is needed.",
    )
    add_sizes(command)
    command.add_argument("--gpu", choices=NAMED, help="(default: this machine's, or its CPU)")
    command.add_argument("--inference", action="store_true", help="without a backward pass")
    command.add_argument("--reset", action="store_true", help="with a reset mask or packed sequences")
    command.set_defaults(run=print_explanation)


def add_tune(commands) -> None:
    command = commands.add_parser(
        "tune",
        help="time the best tilings of backend cuda_fused for given sizes on this GPU, and store the fastest",
        description="Time the tilings with the best estimates on this GPU, forward and backward, and store the fastest "
        "in the cache folder for later processes. It takes up to a minute.",
    )
    add_sizes(command)
    add_count(command)
    command.set_defaults(run=print_tuning)


def add_warmup(commands) -> None:
    command = commands.add_parser(
        "warmup",
        help="compile all kernels that calls of given sizes need, for this machine or a GPU by name",
        description="Compile all kernels that calls of given sizes need, and store them in the cache folder for later "
        "processes. No GPU is needed if --gpu names one.",
    )
    add_sizes(command, several=True)
    command.add_argument("--inference", action="store_true", help="without the kernels of the backward")
    command.add_argument("--reset", action="store_true", help="for calls with a reset mask or packed sequences")
    command.add_argument("--bidirectional", action="store_true", help="for bidirectional layers")
    command.add_argument("--backend", default="auto", help="a backend's name (default: auto)")
    command.add_argument("--gpu", choices=NAMED, help="(default: this machine's GPU, or its CPU)")
    command.set_defaults(run=print_warmup)


def add_sizes(command: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the arguments for the sizes of a call, with one or `several` batch sizes."""
    command.add_argument("--cell", type=a_cell, default="lstm", help="its name, or module.name (default: lstm)")
    command.add_argument("--heads", type=a_number, required=True, help="number of heads")
    command.add_argument("--head-dim", type=a_number, required=True, help="size of a head")
    more = {"nargs": "+"} if several else {}
    command.add_argument("--batch", type=a_number, required=True, help="sequences", **more)
    command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def add_count(command: argparse.ArgumentParser) -> None:
    command.add_argument("--count", type=a_number, default=8, help="tilings of each direction (default: 8)")


def a_cell(name: str) -> Cell:
    try:
        return get_cell(name)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def a_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def print_explanation(given: argparse.Namespace) -> int:
    sizes = given.cell, given.heads, given.head_dim, given.batch, getattr(torch, given.dtype)
    print(explain(*sizes, gpu_of(given.gpu), not given.inference, given.reset))
    return 0


def gpu_of(name: str | None) -> Gpu | None:
    """Return the GPU of that name, or this machine's GPU; None if it has none."""
    return NAMED[name] if name else nvidia_gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def print_tilings(given: argparse.Namespace) -> int:
    gpu = gpu_of(given.gpu)
    if gpu is None:
        print(f"error: there is no NVIDIA GPU here; --gpu names one of {', '.join(NAMED)}", file=sys.stderr)
        return 1
    sizes = given.cell, given.heads, given.head_dim, given.batch, getattr(torch, given.dtype), gpu
    try:
        for direction in ("forward", "backward"):
            for plan in islice(plans(direction, *sizes), given.count):
                print(f"{direction:8}  {plan.cycles:7.0f} cycles per step  {plan}")
    except UnsupportedProblem as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    return 0


def print_tuning(given: argparse.Namespace) -> int:
    from flashrnn.cuda.resident import tuning

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    sizes = given.cell, given.heads, given.head_dim, getattr(torch, given.dtype)
    tf32 = tf32_allowed(sizes[-1], device)
    problem = Problem(*sizes, device, training=True, reset=False, tf32=tf32)
    if reason := CudaFused().unsupported_reason(problem):
        print(f"error: backend cuda_fused does not support this: {reason}", file=sys.stderr)
        return 1
    for trial in tuning.tune(problem.cell, given.heads, given.head_dim, given.batch, problem.dtype, given.count):
        print(f"{trial.direction:8}  {trial.us:7.3f} µs per step  {trial.tiling}", flush=True)
    return 0


def print_warmup(given: argparse.Namespace) -> int:
    def show(compiled: Compiled) -> None:
        print(f"{compiled.done}/{compiled.total}  {compiled.seconds:5.1f} s  {compiled.kernel}", flush=True)

    sizes = {"heads": given.heads, "head_dim": given.head_dim, "batch": given.batch}
    options = {"reset": given.reset, "bidirectional": given.bidirectional, "backend": given.backend, "gpu": given.gpu}
    options["training"] = not given.inference
    try:
        backend = warmup(given.cell, **sizes, dtype=getattr(torch, given.dtype), **options, progress=show)
    except (UnsupportedProblem, ValueError, RuntimeError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    print(f"the kernels of backend {backend} are in {cache_folder()}")
    return 0


def print_limits(given: argparse.Namespace) -> int:
    rows = []
    for gpu in limits.known_gpus():
        print(f"solving for {gpu.name} ...", file=sys.stderr, flush=True)
        rows += limits.limits(gpu)
    as_data, as_text = [asdict(row) for row in rows], columns(limits.table(rows))
    print(json.dumps(as_data, indent=1) if given.json else f"{as_text}\n\n{limits.NOTE}")
    return 0


def print_doctor(_: argparse.Namespace) -> int:
    print(columns([[f"{name}:", value] for name, value in doctor.environment().items()]))
    for device in doctor.devices():
        print_answers(device)
    print("\nself-test: LSTM, 2 heads of 32, forward and backward against the float64 reference", flush=True)
    works = [print_self_test(backend, device) for device in doctor.devices() for backend in dispatch.BACKENDS]
    return 0 if all(works) else 1


def print_self_test(backend: Backend, device: torch.device) -> bool:
    """Test a backend and print the outcome; return whether it passed."""
    print(f"testing {backend.name} on {device} ...", file=sys.stderr, flush=True)
    outcome = doctor.self_test(backend, device)
    if outcome is None:
        return True
    times = f"first call {1e3 * outcome.first:.1f} ms, next {1e3 * outcome.next:.1f} ms"
    said = f"FAILED, {outcome.failure}" if outcome.failure else f"ok, error {outcome.error:.0e}, {times}"
    print(f"  {backend.name} on {device}: {said}", flush=True)
    return outcome.failure is None


def print_answers(device: torch.device) -> None:
    """Print a table of what each backend supports on the device, and the reasons for what it does not support."""
    rows, reasons = [[f"LSTM, training, on {device}", *dispatch.backends()]], {}
    for problem in doctor.typical_problems(device):
        answers = [doctor.answer(backend, problem) for backend in dispatch.BACKENDS]
        marks = ["yes" if reason is None else f"[{reasons.setdefault(reason, len(reasons) + 1)}]" for reason in answers]
        marks[answers.index(None)] = "auto"
        heads = "1 head" if problem.heads == 1 else f"{problem.heads} heads"
        rows.append([f"  {heads} of {problem.head_dim}, {dtype_name(problem.dtype)}", *marks])
    print(f"\n{columns(rows)}")
    for reason, number in reasons.items():
        print(f"  [{number}] " + reason.replace("\n", "\n      "))


def columns(rows: Iterable[list[str]]) -> str:
    """Return the rows as lines with aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
