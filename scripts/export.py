"""Export a trained language model to a folder that transformers loads, with its tokenizer and a model card.

    python -m scripts.export ckpt=PATH out=FOLDER

scripts.evaluate and scripts.generate accept the folder like that of a run. In Python, load it with `import
models.hugging_face` and AutoModelForCausalLM.from_pretrained(FOLDER).
"""

from omegaconf import DictConfig

from training.arguments import literal
from training.command_line import hydra_command


@hydra_command("export", lambda words: literal(words, paths=["ckpt", "out"]))
def main(config: DictConfig) -> None:
    """Export the model, and print the folder."""
    from training.export import export

    print(f"exported to {export(config.ckpt, config.out)}")


if __name__ == "__main__":
    main()
