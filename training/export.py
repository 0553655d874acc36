"""Export of a trained language model to a folder that transformers can load."""

import json
import shutil
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from data import tokenization
from data.encoding import Encoder
from models.hugging_face import FlashRNNConfig, FlashRNNForCausalLM
from training import checkpoint, model_card


def training_tokenizer(file: Path, data: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, from the folder of its run.

    For a checkpoint outside of a run's folder, it is made from the section `data` of the checkpoint's config, which may
    mean training it on the corpus.
    """
    if folder := checkpoint.tokenizer_folder(file):
        return tokenization.load(str(folder))
    if "tokenizer" not in data:
        raise ValueError(
            f"the model of {file} was trained on {data['_target_']}, which has no tokenizer: only language models can "
            "generate text or be exported, such as that of experiment=text_tiny"
        )
    if tokenization.trained_size(data["tokenizer"]) is None:
        return tokenization.load(data["tokenizer"])
    datamodule = instantiate(data)
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule.tokenizer


def restore(file: Path, content: dict[str, Any]) -> tuple[FlashRNNForCausalLM, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a checkpoint of scripts.train with this content."""
    tokenizer = training_tokenizer(file, content["config"]["data"])
    config = FlashRNNConfig.from_hydra(content["config"]["model"]).import_cells()
    model = FlashRNNForCausalLM(config).eval()
    checkpoint.load_weights(model, file, content)
    tokens = Encoder(tokenizer).vocab_size
    if tokens > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokens} tokens, but the model {model.config.vocab_size}: has the corpus changed since "
            "training?"
        )
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # init_kwargs are what is saved
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=padding)
    return model, tokenizer


def load(ckpt: str) -> tuple[FlashRNNForCausalLM, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a run folder, a checkpoint or an exported folder."""
    file = checkpoint.find(ckpt)
    if file.name == checkpoint.EXPORTED:
        config = FlashRNNConfig.from_pretrained(file.parent).import_cells()
        return FlashRNNForCausalLM.from_pretrained(file.parent, config=config), tokenization.load(str(file.parent))
    return restore(file, checkpoint.load(file))


def evaluation(file: Path, step: int) -> dict[str, Any] | None:
    """Return the evaluation at this step by the run itself, or otherwise the last one by scripts.evaluate."""
    run = checkpoint.run_folder(file)
    if run is None:
        return None
    found = sorted(run.glob("**/eval.json"), key=lambda path: (path.parent == run, path.stat().st_mtime))
    of_step = [content for content in (json.loads(path.read_text()) for path in found) if content.get("step") == step]
    return of_step[-1] if of_step else None


def export(ckpt: str, out: str) -> Path:
    """Export a run or checkpoint to the folder `out`, which is written completely or not at all; return the folder."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"out={out} exists already: give a new folder, or an empty one")
    file = checkpoint.find(ckpt)
    if file.name == checkpoint.EXPORTED:
        raise ValueError(f"ckpt={ckpt} is already an exported model")
    content = checkpoint.load(file)
    model, tokenizer = restore(file, content)
    training = {key: content[key] for key in ("global_step", "config")}
    training["evaluation"] = evaluation(file, content["global_step"])
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / checkpoint.TRAINING).write_text(json.dumps(training, indent=2) + "\n")
        model_card.write(folder, training, model.num_parameters(), model.config.foreign_cells)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"out={out} could not be written ({error}): is the disk full?") from error
    return folder
