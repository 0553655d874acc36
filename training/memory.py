"""A prediction of the memory that a training needs on each GPU, from its config and without a GPU."""

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.nn import Module

from models.loss import CHUNK
from training._compat import FakeTensorMode
from training.config_checks import import_targets

OPTIMIZER = 8  # bytes per parameter: AdamW's two moments in float32
# Bytes per logit of a chunk, uncompiled: the logit in half precision, and three float32 tensors of its gradient.
LOSS = 14
GIB = 2**30


def predict(config: DictConfig) -> dict[str, float]:
    """Return the memory in GiB per GPU at the peak of a training step, by kind, for AdamW without torch.compile.

    Activations are the tensors that autograd saves when each block runs on fake tensors with the kernels of this
    machine. Fragmentation, CUDA's own memory (half a GiB) and NCCL's buffers are not included.
    """
    if "context_length" not in config.data:
        raise ValueError(
            "there is no data.context_length: memory can only be predicted for text, such as data=slimpajama"
        )
    batch, time = config.data.batch_size, config.data.context_length
    half = str(config.trainer.precision) == "bf16-mixed"
    if config.model.vocab_size is None:
        raise ValueError(
            "the vocabulary size is unknown, because the data are not read here: set model.vocab_size=NUMBER"
        )
    import_targets([config.model])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        model = instantiate(config.model)
        kept = [_saved_of(block, batch, time, model.embedding.embedding_dim, half) for block in model.blocks]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    of_block = max(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks)
    outer = model.embedding.weight.numel() * 4 + model.head.weight.numel() * (2 if half else 4)
    devices = _sharing(config.trainer)
    stream = batch * time * model.embedding.embedding_dim * 4  # the input of a block
    activations, copies = (sum(part) for part in zip(*kept, strict=True))
    if config.activation_checkpointing:
        activations, copies = stream * len(kept) + max(kept)[0], max(kept)[1]
    if _is_sharded(config.trainer):  # gathered weights: two blocks, the gradients of one, and the outer layers
        copies = of_block * (2 if half else 4) * 2 + of_block * 6 + outer
    logits = min(CHUNK, batch * time * model.num_classes)
    loss = logits * LOSS + 4 * model.head.weight.numel() + stream
    found = {
        "weights": 4 * parameters / devices,
        "gradients": 4 * parameters / devices,
        "optimizer": OPTIMIZER * parameters / devices,
        "copies of weights": copies,
        "activations": activations,
        "loss": loss,
    }
    found = {name: size / GIB for name, size in found.items()}
    return found | {"sum": sum(found.values())}


def _is_sharded(trainer: DictConfig) -> bool:
    strategy = trainer.strategy
    return isinstance(strategy, DictConfig) and strategy.get("_target_", "").endswith("ModelParallelStrategy")


def _sharing(trainer: DictConfig) -> int:
    """Return the number of GPUs over which the weights are sharded."""
    return trainer.devices * trainer.num_nodes if _is_sharded(trainer) else 1


def _saved_of(block: Module, batch: int, time: int, width: int, half: bool) -> tuple[int, int]:
    """Return the bytes that a block saves for its backward pass: activations, and autocast's copies of weights."""
    of_one, of_two = (_saved(block, B, time, width, half) for B in (1, 2))
    per_sequence = of_two - of_one
    return batch * per_sequence, of_one - per_sequence


def _saved(block: Module, batch: int, time: int, width: int, half: bool) -> int:
    own = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage  # keeps it alive, so that its address is not reused
        return tensor

    x = torch.zeros(batch, time, width, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        block(x, None, None)
    return sum(storage.nbytes() for storage in saved.values())
