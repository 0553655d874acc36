"""Generate text with a trained language model, for one prompt (printed while it is generated) or a file of prompts.

    python -m scripts.generate ckpt=PATH prompt="..." [KEY=VALUE ...]
    python -m scripts.generate ckpt=PATH prompts=prompts.jsonl out=answers.jsonl [KEY=VALUE ...]

PATH is a run folder, a checkpoint file, or a folder of scripts.export. A line of the prompts is {"prompt": "..."}; a
line of the answers has in addition the text that follows, its tokens, and why it ended: end_of_text, stop_string or
length. After an interruption, the second command continues where it was.
"""

from omegaconf import DictConfig

from training.arguments import literal
from training.command_line import hydra_command


def _arguments(words: list[str]) -> list[str]:
    return literal(words, texts=["prompt"], lists=["stop"], paths=["ckpt", "prompts", "out"])


@hydra_command("generate", _arguments)
def main(config: DictConfig) -> None:
    """Generate text, and print it or write it to a file."""
    from training.text_generation import generate

    generate(**config)


if __name__ == "__main__":
    main()
