"""Take sLSTM layers over from a checkpoint of the xlstm package (https://github.com/NX-AI/xlstm).

    python -m scripts.import_xlstm ckpt=CHECKPOINT out=FILE

CHECKPOINT is a state_dict written by torch.save, or a dictionary that holds one under "state_dict". FILE holds, for
every sLSTM layer, under its name in the checkpoint, the arguments of an RNNMixer and its state_dict.
"""

from pathlib import Path

from omegaconf import DictConfig

from training.command_line import hydra_command, literal


@hydra_command("import_xlstm", lambda words: literal(words, paths=["ckpt", "out"]))
def main(config: DictConfig) -> None:
    """Convert, and print the layers."""
    from training.xlstm_checkpoint import convert

    for name, arguments in convert(Path(config.ckpt), Path(config.out)).items():
        print(f"{name}: {', '.join(f'{key}={value!r}' for key, value in arguments.items())}")
    print(config.out)


if __name__ == "__main__":
    main()
