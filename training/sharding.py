"""Sharding of a model over several devices with FSDP2."""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from models.backbone import SequenceModel

# The state of a block is such a view, but nothing writes to it.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def shard(model: SequenceModel, mesh: DeviceMesh, precision: str) -> None:
    """Shard weights, gradients and optimizer states over a mesh. The weights of a block are gathered while it runs.

    Args:
        model: a model on the CPU, or on the meta device, to be filled by `materialize`.
        mesh: a one-dimensional mesh.
        precision: Lightning's precision. With bf16-mixed, blocks and head are gathered in bfloat16, in which autocast
            computes anyway, and their gradients are summed over the devices in float32. Embeddings, norms and the
            residual stream stay in float32, as on one device.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(model.embedding, mesh=mesh)
    fully_shard(model.norm, mesh=mesh)
    for block in model.blocks:
        fully_shard([part for part in block.children() if isinstance(part, nn.LayerNorm)], mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "loss")


def materialize(model: SequenceModel, device: torch.device, weights: Callable[[], Mapping[str, Tensor]]) -> None:
    """Allocate and fill the weights of a sharded model on the meta device.

    Args:
        model: a sharded model.
        device: the device of this process.
        weights: returns all weights on the CPU; only the first process calls it, and sends the shards to the others.
    """
    model.to_empty(device=device)
    first = torch.distributed.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(weights()) if first else {}, options=options)
