"""lm-evaluation-harness, with the models of this repository among those that transformers loads.

    python -m scripts.lm_eval run --model hf --model_args pretrained=FOLDER --tasks lambada_openai --batch_size 8

FOLDER is one of scripts.export; all arguments are the harness's own (--help), which has no way to name such a module.
"""

import sys


def main() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}; the harness comes with: pip install lm_eval")
    import models.hugging_face  # noqa: F401, registers the classes

    cli_evaluate()


if __name__ == "__main__":
    main()
