"""Where the configs are, and the resolvers that they use."""

from pathlib import Path

from omegaconf import OmegaConf

CONFIGS = str(Path(__file__).parents[1] / "configs")


def accumulate(global_batch_size: int | None, batch_size: int, devices: int, num_nodes: int) -> int:
    """Batches to accumulate so that one optimizer step sees `global_batch_size` sequences."""
    if global_batch_size is None:
        return 1
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"trainer.devices={devices}: with global_batch_size set it must be the number of devices")
    together = batch_size * devices * num_nodes
    if global_batch_size < 1 or global_batch_size % together:
        raise ValueError(
            f"global_batch_size={global_batch_size} is no positive multiple of data.batch_size={batch_size} x "
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} = {together}"
        )
    return global_batch_size // together


OmegaConf.register_new_resolver("accumulate", accumulate)
OmegaConf.register_new_resolver("product", lambda a, b: a * b)
