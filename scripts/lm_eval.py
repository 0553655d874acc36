"""Run lm-evaluation-harness with exported models of this repository.

    python -m scripts.lm_eval run --model hf --model_args pretrained=FOLDER --tasks lambada_openai --batch_size 8

FOLDER was written by scripts.export. All arguments are those of the harness (--help), which has no option to import the
module that registers these models with transformers.
"""

import sys


def main() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}; to install the harness: pip install lm_eval")
    import models.hugging_face  # noqa: F401, registers the classes

    cli_evaluate()


if __name__ == "__main__":
    main()
