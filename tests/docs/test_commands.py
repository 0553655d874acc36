"""The commands of the README and the documentation work in new processes, with tiny models.

For commands that need several GPUs or data from the Hugging Face hub, only the config is composed.
"""

import json
import os
import re
import shutil

import pytest
import torch

from scripts.train import train
from tests import fresh
from tests.docs import pages
from tests.scripts.test_lm_eval import HARNESS
from tests.tiny_runs import SHORT, TINY, config, write_texts
from tests.training.test_xlstm_checkpoint import slstm_layer

TEXT = ["data.source=texts/*.jsonl", "data.val_fraction=0.3", "data.tokenizer=bpe:300", "data.context_length=8"]
SMALL = {
    "parity": TINY["parity"],
    "state_tracking": TINY["parity"],
    "text_tiny": [*TINY["text_tiny"], *TEXT],
    "slimpajama_160m": [
        *("trainer=cpu", "compile=false", "global_batch_size=16", "data.batch_size=16", "data.num_workers=0"),
        *("model.vocab_size=300", "model.d_model=24", "model.num_blocks=1"),
        *("data.val_split=null", "data.prepare_processes=0", *TEXT),
    ],
}
STEPS = [*SHORT, "trainer.max_steps=2", "schedule.warmup_steps=1", "val_every=2"]
GOES_ON = ["trainer.max_steps=4", "trainer.enable_progress_bar=false"]
CONFIG_ALONE = ["--cfg", "job"]
FIRST_PAGES = ("README.md", "docs/index.md")
WITHIN_SENTENCES = [
    ["scripts.train", "optim=sgd", "optim.lr=0.1"],
    ["scripts.train", "model=average"],
    ["scripts.train", "data=successors"],
]


def steps_of_readers():
    """Return groups of commands that depend on each other, each command once.

    Trainings with the same keys are also tested only once; test_pages.py tests their values. Commands that are not on
    the first pages are slow tests.
    """
    found, known = [], set()
    for page in pages.PAGES:
        for command in pages.commands(page):
            (module, *arguments), _ = command
            keys = [argument.partition("=")[0] for argument in arguments] if module == "scripts.train" else arguments
            if (module, *keys) in known:
                continue
            known.add((module, *keys))
            if any(argument.startswith(("runs=", "ckpt=last")) for argument in command[0]):  # uses earlier results
                found[-1][0].append(command)
            else:
                found.append(([command], page))
    found += [([(command, False)], "") for command in WITHIN_SENTENCES]
    return [
        pytest.param(step, id=" ".join(step[0][0]), marks=[] if page in FIRST_PAGES else pytest.mark.slow)
        for step, page in found
    ]


def reduced(arguments, needs_many):
    """Return a command with overrides that make it small."""
    module, *rest = arguments
    rest = [re.sub(r"outputs/(NAME|parity|text_tiny)/(TIME|[\d_-]+)", of_fixture, argument) for argument in rest]
    if needs_many:
        return [module, *(argument for argument in rest if "$" not in argument), *CONFIG_ALONE]
    match module:
        case "scripts.train":
            experiment = next((part.partition("=")[2] for part in rest if part.startswith("experiment=")), "parity")
            goes_on = any(part.startswith("ckpt_path=") for part in rest)
            of_its_own = experiment == "parity" and goes_on
            other_data = not {"data=successors", "data=instructions"}.isdisjoint(rest)
            small = [o for o in SMALL[experiment] if not (other_data and o.startswith("data."))]
            rest = two_jobs(rest)
            rest = [re.sub(r"(n_trials=)\d+", r"\g<1>2", argument) for argument in rest]
            return [module, *rest, *([] if of_its_own else [*small, *STEPS]), *(GOES_ON if goes_on else [])]
        case "scripts.evaluate":
            return [module, *(re.sub(r"(eval_length|eval_context)=\d+", r"\1=128", argument) for argument in rest)]
        case "scripts.prepare_data":
            return [module, *rest, *(TEXT if rest else CONFIG_ALONE)]
        case "scripts.generate":
            return [module, *rest, "max_new_tokens=3"]
        case "scripts.benchmark":
            return [module, *rest, "contexts=[8]", "out=outputs"]
    return [module, *rest]


def two_jobs(arguments):
    """Return a sweep with two values of the first key, and one value of every other key."""
    values = re.compile(r"([\w./]+=)([^,\[]+),([^,]+).*")
    swept = [argument for argument in arguments if values.match(argument)]
    return [values.sub(r"\1\2,\3" if argument in swept[:1] else r"\1\3", argument) for argument in arguments]


def of_fixture(path):
    return f"outputs/{path[1].replace('NAME', 'parity')}/first"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return the root of a clone with the files of all pages, and with runs that can be resumed."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("flashrnn", "models", "data", "training", "benchmarks", "reproduction", "scripts"):
        folder.joinpath(name).symlink_to(pages.ROOT / name)
    shutil.copytree(pages.ROOT / "configs", folder / "configs")
    for page in pages.PAGES:
        pages.write_files(page, folder)
    write_texts(
        folder / "texts" / "all.jsonl", (f"the {n}th of forty texts says {n} and {n**3}. " * 9 for n in range(40))
    )
    folder.joinpath("other.txt").write_text("another text says seven and nine. " * 99)
    answers = (json.dumps({"prompt": f"What is {n}? ", "response": f"It is {n}."}) for n in range(2000))
    folder.joinpath("answers.jsonl").write_text("\n".join(answers))
    folder.joinpath("prompts.jsonl").write_text('{"prompt": "the 7th of"}\n{"prompt": ""}\n')
    layer = {f"xlstm_block_stack.blocks.1.xlstm.{name}": weight for name, weight in slstm_layer("cuda").items()}
    torch.save(layer, folder / "xlstm.pt")
    (folder / "lm_eval").mkdir()
    folder.joinpath("lm_eval", "__main__.py").write_text(HARNESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for experiment in ("parity", "text_tiny", "slimpajama_160m"):
            overrides = [f"experiment={experiment}", *SMALL[experiment], *STEPS]
            run = config(*overrides, f"run_dir=outputs/{experiment}/first")
            run.overrides = overrides
            train(run)
    return folder


@pytest.mark.parametrize("commands", steps_of_readers())
def test_command_works_in_a_new_process(commands, clone, tmp_path):
    folder = shutil.copytree(clone, tmp_path / "clone", symlinks=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    for arguments, needs_many in commands:
        ended = fresh.run(reduced(arguments, needs_many), folder, environment)
        assert ended.returncode == 0, ended.stdout + ended.stderr
