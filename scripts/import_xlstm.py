"""Convert the sLSTM layers of a checkpoint of the xlstm package (https://github.com/NX-AI/xlstm).

    python -m scripts.import_xlstm ckpt=CHECKPOINT out=FILE

CHECKPOINT is a state_dict written by torch.save, or a dictionary with a state_dict under this key. FILE contains the
arguments of an RNNMixer and its state_dict for every sLSTM layer, by the name of the layer in the checkpoint.
"""

from pathlib import Path

from omegaconf import DictConfig

from training.arguments import literal
from training.command_line import hydra_command


@hydra_command("import_xlstm", lambda words: literal(words, paths=["ckpt", "out"]))
def main(config: DictConfig) -> None:
    """Convert the layers, and print their arguments."""
    from training.xlstm_checkpoint import convert

    for name, arguments in convert(Path(config.ckpt), Path(config.out)).items():
        print(f"{name}: {', '.join(f'{key}={value!r}' for key, value in arguments.items())}")
    print(config.out)


if __name__ == "__main__":
    main()
