"""Measurements whose numbers stand in docs/results: `python -m scripts.benchmark NAME` writes its JSON there."""

import argparse
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from benchmarks import RESULTS
from benchmarks.cases import SUITES, select
from training.command_line import one_line_errors


def _measure(options: argparse.Namespace, device: str, *arguments, ending: str = "") -> None:
    """Write <device>/<name><ending>.json with the rows of a benchmark, and draw them where it can."""
    from benchmarks.results import write

    module = import_module(f"benchmarks.{options.name}")
    path = options.out / device / f"{options.name}{ending}.json"
    write(path, module.rows.__doc__, options.commit, module.rows(*arguments))
    if hasattr(module, "draw"):
        print(module.draw(json.loads(path.read_text()), path.with_suffix(".png")))


def _on_cpu(options: argparse.Namespace) -> None:
    _measure(options, "cpu")


def _on_gpu(options: argparse.Namespace) -> None:
    from benchmarks.results import gpu_folder

    _measure(options, gpu_folder())


def _kernels(options: argparse.Namespace) -> None:
    from benchmarks import haste, kernels
    from benchmarks.peers import FLASHRNN
    from benchmarks.timing import FULL, QUICK

    wheel, sources, peers = options.flashrnn_wheel, options.haste_sources, options.peers
    if peers is None:
        given = {**dict.fromkeys(FLASHRNN, wheel), haste.NAME: sources}
        peers = [name for name in kernels.PEERS if given.get(name, True)]
    effort = QUICK if options.quick else FULL
    kernels.run(options.suite, options.case, peers, wheel, sources, effort, options.out, options.commit)


def _sweep(options: argparse.Namespace) -> None:
    from benchmarks import sweep

    sweep.run(options.case, options.out, options.commit)


def _layers(options: argparse.Namespace) -> None:
    from benchmarks import layers_page
    from benchmarks.results import device_folder, rows_before

    known = rows_before(options.out / device_folder() / "layers.json", options.commit)
    _measure(options, device_folder(), options.case, known)
    print(*layers_page.write(options.out / device_folder() / "layers.json"), sep="\n")


def _first_call(options: argparse.Namespace) -> None:
    from benchmarks.results import gpu_folder

    _measure(options, gpu_folder(), select("main", options.case), options.rounds)


def _counters(options: argparse.Namespace) -> None:
    from benchmarks.results import gpu_folder

    _measure(options, gpu_folder(), select(options.suite, options.case))


def _generation(options: argparse.Namespace) -> None:
    from benchmarks import generation_page
    from benchmarks.results import device_folder, rows_before

    path = options.out / device_folder() / "generation.json"
    _measure(options, device_folder(), options.models, options.contexts, rows_before(path, options.commit))
    print(*generation_page.write(path), sep="\n")


def _language_model(options: argparse.Namespace) -> None:
    from benchmarks import language_model
    from benchmarks.results import gpu_folder

    asked = options.models or language_model.MODELS, options.batch_sizes, options.accumulate
    devices, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    if rank == 0:
        _measure(options, gpu_folder(), *asked, ending=f"_x{devices}" if devices > 1 else "")
    else:
        list(language_model.rows(*asked))


def _figures(options: argparse.Namespace) -> None:
    from benchmarks import figures, generation_page, layers_page, sweep_page
    from benchmarks.table import print_table

    pages = {"layers.json": layers_page, "generation.json": generation_page}
    for file in options.files:
        if file.name in pages:
            print(*pages[file.name].write(file), sep="\n")
            continue
        content = figures.read(file)
        if content["suite"] == "sweep":
            print(*sweep_page.write(file), sep="\n")
            continue
        print_table(content["rows"])
        print(figures.draw(content, file.with_suffix(".png")))


def _kernels_arguments(command: argparse.ArgumentParser) -> None:
    command.description += """ Rows go into the file as they are measured. A run measures what the file lacks, and anew
        what is ours and comes from another commit; delete the file, or rows of it, to measure more again."""
    command.add_argument("--suite", choices=SUITES, default="main", help="(default: main)")
    command.add_argument("--case", nargs="*", default=[], metavar="PATTERN", help="shell patterns of the cases' names, "
                         "as in lstm-12x64-B16-T1024-bfloat16 (default: all of the suite)")  # fmt: skip
    command.add_argument("--peers", nargs="*", metavar="PEER", help="(default: all that can be measured)")
    command.add_argument("--flashrnn-wheel", type=Path, metavar="PATH", help="pip download flashrnn==1.0.8 --no-deps")
    command.add_argument("--haste-sources", type=Path, metavar="FOLDER",
                         help="PyPI's haste_pytorch-0.5.0rc0.tar.gz, unpacked")  # fmt: skip
    command.add_argument("--quick", action="store_true", help="fewer repetitions")


def _sweep_arguments(command: argparse.ArgumentParser) -> None:
    command.description += """ Rows go into the file as they are measured, and a run measures what the file lacks,
        or has from another commit. Page and figure show the cliffs: sizes that take longer than larger ones."""
    command.add_argument("--case", nargs="*", default=[], metavar="PATTERN", help="shell patterns of the cases' names, "
                         "as in lstm-1x768-B16-T512-bfloat16 (default: all)")  # fmt: skip


def _layers_arguments(command: argparse.ArgumentParser) -> None:
    command.description += """ The page and the figure beside the file are what a user reads: their shape, our factor.
        A run that was broken off goes on where it ended, at the same commit."""
    command.add_argument("--case", nargs="*", default=[], metavar="PATTERN", help="shell patterns of the cases' names, "
                         "as in ppo-lstm-B256-T16-H128-float32 (default: all)")  # fmt: skip


def _first_call_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--case", nargs="*", default=["lstm-12x64-B16-*"], metavar="PATTERN",
                         help="of suite main (default: lstm-12x64-B16-*)")  # fmt: skip
    command.add_argument("--rounds", type=int, default=3, help="(default: 3)")


def _counters_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--suite", choices=SUITES, default="heads", help="(default: heads)")
    command.add_argument("--case", nargs="*", default=[], metavar="PATTERN", help="(default: all of the suite)")


def _generation_arguments(command: argparse.ArgumentParser) -> None:
    command.description += " A run that was broken off goes on where it was."
    command.add_argument("--models", nargs="+", metavar="NAME", help="in quotes (default: all)")
    command.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS",
                         help="of one sequence (default: several batches and contexts)")  # fmt: skip


def _language_model_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--models", nargs="+", metavar="OVERRIDES",
                         help="of experiment=slimpajama_160m, in quotes (default: the paper's)")  # fmt: skip
    command.add_argument("--batch-sizes", nargs="+", type=int, default=[32, 64], help="(default: 32 64)")
    command.add_argument("--accumulate", nargs="+", type=int, default=[1],
                         help="batches of a step, as trainer.accumulate_grad_batches (default: 1)")  # fmt: skip


def _figures_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="+", type=Path, metavar="FILE")


class Command(NamedTuple):
    """A benchmark as the command line has it, which loads nothing to show that."""

    title: str
    run: Callable[[argparse.Namespace], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda command: None


COMMANDS = {
    "reference_cpu": Command(
        "The reference on one CPU core against autograd through the time loop",
        _on_cpu,
    ),
    "cpu_fused": Command(
        "Backend cpu_fused on CPU cores beside the reference and nn.LSTM, and what its first calls cost",
        _on_cpu,
    ),
    "data": Command(
        "Tokenising a corpus beside the bare tokenizer, and reading its blocks as training does",
        _on_cpu,
    ),
    "kernels": Command(
        "Speed and memory of the recurrent kernels on a GPU, beside their peers in the same run",
        _kernels,
        _kernels_arguments,
    ),
    "sweep": Command(
        "Time over many head sizes and batch sizes, beside the solver's estimate",
        _sweep,
        _sweep_arguments,
    ),
    "layers": Command(
        "Layers beside nn.LSTM and nn.GRU, input product included, over the shapes of real users, on a GPU or a CPU",
        _layers,
        _layers_arguments,
    ),
    "first_call": Command(
        "Seconds until the first result in a process of its own, with nothing compiled yet or all of it",
        _first_call,
        _first_call_arguments,
    ),
    "calls": Command(
        "Time that the host takes for an eager call, beside nn.LSTM",
        _on_gpu,
    ),
    "nn_lstm": Command(
        "nn.LSTM in all the ways that it can be timed: dtype, order of axes, gradients, product with the inputs",
        _on_gpu,
    ),
    "options": Command(
        "Time and memory of all states, of a cell of one's own and of TF32, over the same without",
        _on_gpu,
    ),
    "normalised": Command(
        "Time of cells that see the other units of their head, over an LSTM's and a CUDA graph of the compiled loop's",
        _on_gpu,
    ),
    "counters": Command(
        "Bytes that the kernels moved, by the GPU's counters, which ncu (NVIDIA Nsight Compute) reads",
        _counters,
        _counters_arguments,
    ),
    "numerical_error": Command(
        "How far h is from the float64 reference over 8192 time steps, per cell, dtype and backend",
        _on_gpu,
    ),
    "generation": Command(
        "Speed and memory of generating text, over batch and context, beside a compiled Llama of transformers",
        _generation,
        _generation_arguments,
    ),
    "language_model": Command(
        "Time and memory of a training step of the language models",
        _language_model,
        _language_model_arguments,
    ),
    "step": Command(
        "Time of one token through a language model whose states are kept",
        _on_gpu,
    ),
    "figures": Command(
        "Draw FILE.png beside each FILE.json of kernels and print its table, or write the page of another benchmark",
        _figures,
        _figures_arguments,
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder of the results, which has one for each device (default: docs/results)",
    )
    output.add_argument("--commit", help="what is measured (default: this checkout's, from git)")
    for name, (title, _, add_arguments) in COMMANDS.items():
        parents = [output] if name != "figures" else []
        add_arguments(names.add_parser(name, parents=parents, help=title, description=f"{title}."))
    return parser


def main() -> None:
    options = _parser().parse_args()
    with one_line_errors():
        if options.name != "figures":
            from benchmarks.results import checkout

            options.commit = options.commit or checkout()  # an error now, not after the measurements
        COMMANDS[options.name].run(options)


if __name__ == "__main__":
    main()
