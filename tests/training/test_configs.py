"""All configs compose and build their objects; wrong keys and values are errors with one line."""

import inspect
import itertools
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel

from benchmarks.language_model import data_parallel_options
from models.mixers import RNNMixer
from tests.tiny_runs import config
from training.command_line import one_line_errors
from training.config_checks import check, check_buildable, check_trainer
from training.configuration import CONFIGS, accumulate, check_overrides
from training.sweep import check_sweep

OF_FLA = ("deltaproduct", "gated_deltanet")


def options(group):
    return sorted(file.stem for file in Path(CONFIGS, group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=x", "seed=x: expected a number, such as 0"),
        ("compile=no", "compile=no: expected true or false, such as false"),
        ("optim.lr=[1,2]", r"optim\.lr=\[1, 2\]: expected a number"),
    ],
)
def test_error_of_a_wrong_type_names_the_key(override, message):
    with pytest.raises(ValueError, match=message):
        check_overrides(["model=gru", override], groups=("model",))


def test_valid_values_are_accepted():
    allowed = ["seed=1", "optim.lr=1", "compile=true", "data.eval_lengths=[1,9]", "trainer.devices=auto"]
    allowed += ["data.eval_lengths=9", "threads=2", "optim.lr=null", "+mine.key=word", "~optim.lr", "data.seed=${seed}"]
    check_overrides(["model=gru", *allowed], groups=("model",))


@pytest.mark.parametrize(
    ("experiment", "model"),
    [
        *((experiment, "lstm") for experiment in options("experiment")),
        *(("parity", model) for model in options("model") if model not in ("base", "rnn", "lstm")),
        *(("slimpajama_160m", model) for model in ("transformer", "hybrid")),
    ],
)
def test_experiments_compose_with_all_kinds_of_models(experiment, model):
    if model in OF_FLA and not find_spec("fla"):
        pytest.skip("flash-linear-attention is not installed")
    fit = {"nn_lstm": ["model.num_heads=1"], "hybrid": ["model.num_blocks=3"], "xlstm": ["model.num_blocks=8"]}
    composed = config(f"experiment={experiment}", f"model={model}", "run_dir=.", *fit.get(model, []))
    OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    composed.model.vocab_size = composed.model.vocab_size or 10
    with torch.device("meta"):
        built = instantiate(composed.model)
    assert len(built.blocks) == composed.model.num_blocks


def together(*groups):
    """Return selections with each option of these groups at least once, as few as the largest group has options."""
    every = [[f"{group}={option}" for option in options(group)] for group in groups]
    return zip(*(itertools.islice(itertools.cycle(one), max(map(len, every))) for one in every), strict=True)


@pytest.mark.parametrize(
    ("experiment", "selection"),
    [
        *(("parity", selection) for selection in together("logger", "callbacks", "debug", "hparams_search")),
        *(("slimpajama_160m", selection) for selection in together("trainer", "schedule")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_compose(experiment, selection):
    OmegaConf.to_container(config(f"experiment={experiment}", *selection, "run_dir=."), resolve=True)


def test_slimpajama_equals_the_run_of_the_paper():
    composed = config("experiment=slimpajama_160m", "run_dir=.")
    with torch.device("meta"):
        model = instantiate(composed.model)
    assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == 164
    assert model.vocab_size == 50_257
    assert composed.data.context_length == 1024
    schedule = {key: composed.schedule[key] for key in ("final_lr_ratio", "warmup_steps", "total_steps")}
    assert schedule == {"final_lr_ratio": 0.1, "warmup_steps": 750, "total_steps": 30_000}
    assert composed.optim.lr == 1e-3
    assert composed.trainer.precision == "bf16-mixed"
    assert composed.trainer.accumulate_grad_batches * composed.data.batch_size * composed.trainer.devices == 512


@pytest.mark.parametrize(
    ("experiment", "millions", "mixers"),
    [
        ("hybrid_160m", 163, {"RNNMixer": 8, "AttentionMixer": 4}),
        ("xlstm_160m", 161, {"MLSTMMixer": 21, "RNNMixer": 3}),
    ],
)
def test_hybrids_have_the_size_of_the_papers_models(experiment, millions, mixers):
    with torch.device("meta"):
        model = instantiate(config(f"experiment={experiment}", "run_dir=.").model)
    assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == millions
    assert Counter(type(block.mixer).__name__ for block in model.blocks) == mixers


@pytest.mark.parametrize(
    ("trainer", "devices", "batch", "accumulated"),
    [("h100_8", 8, 32, 2), ("fsdp_8", 8, 32, 2), ("a100_8", 8, 64, 1), ("single", 1, 64, 8)],
)
def test_trainers_have_the_same_global_batch_size(trainer, devices, batch, accumulated):
    composed = config("experiment=slimpajama_160m", f"trainer={trainer}", "run_dir=.")
    of_trainer = composed.trainer.devices, composed.data.batch_size, composed.trainer.accumulate_grad_batches
    assert of_trainer == (devices, batch, accumulated)
    assert composed.trainer.precision == "bf16-mixed"


def test_benchmark_uses_the_ddp_options_of_training():
    options = data_parallel_options()
    assert options["gradient_as_bucket_view"]
    assert options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys()


def test_validation_interval_counts_optimizer_steps():
    composed = config("experiment=slimpajama_160m", "run_dir=.")
    assert composed.trainer.accumulate_grad_batches == 2
    assert composed.trainer.val_check_interval == 2 * composed.val_every


@pytest.mark.parametrize("experiment", options("experiment"))
def test_experiments_contain_their_command(experiment):
    text = Path(CONFIGS, "experiment", f"{experiment}.yaml").read_text()
    command = "python -m scripts.train" + ("" if experiment == "parity" else f" experiment={experiment}")
    assert command in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((None, 64, "auto", 1), 1), ((512, 64, 8, 1), 1), ((512, 32, 8, 1), 2), ((512, 32, 1, 2), 8)],
)
def test_accumulate(arguments, expected):
    assert accumulate(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((512, 60, 8, 1), r"global_batch_size=512 .*data\.batch_size=60 x trainer\.devices=8"),
        ((32, 32, 8, 1), "= 256"),
        ((0, 1, 1, 1), "global_batch_size=0 "),
        ((512, 32, "auto", 1), "trainer.devices=auto"),
        ((512, 32, -1, 1), "trainer.devices=-1"),
    ],
)
def test_impossible_accumulation_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        accumulate(*arguments)


@pytest.mark.parametrize("trainer", [["trainer=cpu", "trainer.devices=2"], ["trainer=h100_8", "trainer.num_nodes=2"]])
def test_sweep_with_several_devices_is_an_error(trainer, monkeypatch):
    """Each process would run the whole sweep."""
    section = config(*trainer, "run_dir=.").trainer
    with pytest.raises(ValueError, match=r"sweep .*trainer\.devices=1"):
        check_sweep(section)
    monkeypatch.setattr("lightning.fabric.plugins.environments.TorchElasticEnvironment.detect", lambda: True)
    check_sweep(section)  # torchrun has started all processes


@pytest.mark.parametrize("devices", [1, "auto", [0]])
def test_sweep_on_one_device(devices):
    check_sweep(config("trainer=cpu", f"trainer.devices={devices}", "run_dir=.").trainer)


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (("model=nn_lstm", "trainer.precision=bf16-mixed"), True),
        (("model=nn_lstm", "trainer.precision=16-mixed"), False),
        (("model=lstm", "trainer.precision=bf16-mixed"), False),
    ],
)
def test_nn_lstm_in_bfloat16_on_a_gpu_causes_a_warning(overrides, warned, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_buildable(config("experiment=text_tiny", "model.num_heads=1", *overrides, "run_dir=."))
    assert ("torch.nn.LSTM in float16" in capsys.readouterr().err) == warned


class MixerThatReadsValues(RNNMixer):
    def __init__(self, d_model: int, scale: "NotImported" = 1.0, **options) -> None:  # noqa: F821
        super().__init__(d_model, **options)
        self.total = self.norm_weight.sum().item() * scale


def test_mixer_that_cannot_be_built_on_the_meta_device_is_accepted():
    composed = config(f"model.mixer._target_={__name__}.MixerThatReadsValues", "+model.mixer.scale=null", "run_dir=.")
    check_buildable(composed)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"mixer": {"_target_": "my_parts.Mixer"}}},
        {"model": {"mixer": {"function": "my_parts.CELL"}}},
        {"model": {"mixer": {"parts": [{"_target_": "my_parts.Part"}]}}},
        {"optim": {"_target_": "my_parts.adamw"}},
    ],
    ids=["mixer", "cell", "list", "optimizer"],
)
def test_modules_imported_by_the_check_keep_their_constants(changed, tmp_path, monkeypatch):
    tmp_path.joinpath("my_parts.py").write_text(
        "import torch\n"
        "from flashrnn.cells import GRU as CELL\n"
        "from models.mixers import RNNMixer as Mixer\n"
        "from training.optim import adamw\n"
        "Part, SCALE = dict, torch.tensor(0.5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    composed = config("model=gru", f"model.mixer._target_={__name__}.MixerOfParts", "run_dir=.")
    check_buildable(OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(composed)), changed))
    assert sys.modules.pop("my_parts").SCALE == 0.5


class MixerOfParts(RNNMixer):
    def __init__(self, d_model: int, parts: tuple = (), **options) -> None:
        super().__init__(d_model, **options)


def test_trainer_options_of_lightning_are_accepted():
    section = config("trainer=h100_8", "trainer.strategy=auto", "trainer.devices=[0,1]", "run_dir=.").trainer
    assert section.strategy == "auto"
    check_trainer(section)


@pytest.mark.parametrize(
    "override", ["seed=-1", "seed=0.5", "trainer.log_every_n_steps=0", "trainer.gradient_clip_val=x"]
)
def test_error_of_a_wrong_number_names_the_key(override):
    with pytest.raises(ValueError, match=f"^{override} must be a"):
        check(config(override, "run_dir=."))


@pytest.mark.parametrize("data", ["text", "mix", "instructions"])
def test_missing_data_source_is_an_error(data):
    with pytest.raises(ValueError, match=r"data\.sources?=VALUE"):
        check(config("experiment=text_tiny", f"data={data}", "run_dir=."))


def test_one_line_errors(monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    composed = config("model.mixer.function=lsmt", "model.vocab_size=2", "run_dir=.")
    with pytest.raises(SystemExit, match=r"^error: .*'lsmt'.*lstm.*\n.HYDRA_FULL_ERROR=1"), one_line_errors():
        instantiate(composed.model)
    with pytest.raises(SystemExit, match=r"^error: No module named 's3fs'"), one_line_errors():
        raise ModuleNotFoundError("No module named 's3fs'")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="'lsmt'"), one_line_errors():
        instantiate(composed.model)
