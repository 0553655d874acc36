"""Evaluate a checkpoint; its model and its data are built from the config saved in it.

    python -m scripts.evaluate ckpt=PATH [KEY=VALUE ...]

PATH is a checkpoint file, the folder of a run or of scripts.export, or last: the newest checkpoint in outputs/. Every
other KEY=VALUE changes the run's own config, for example data.eval_lengths=[40,64,128,256,512] or
trainer.accelerator=cpu. State tracking: accuracy per range of lengths, as a table, JSON and a plot. Text: validation
perplexity. Results go to a new folder evaluate_<time> in the folder of the run.
"""

import sys

from training.command_line import one_line_errors
from training.evaluation import main

if __name__ == "__main__":
    arguments = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if len(arguments) < len(sys.argv[1:]):
        sys.exit("error: a key is given twice")
    if {"-h", "--help"} & arguments.keys():
        print(__doc__)
        sys.exit()
    if bare := next((argument for argument in sys.argv[1:] if "=" not in argument), None):
        sys.exit(f"error: {bare!r} is not KEY=VALUE: a run or a checkpoint is given as ckpt={bare}")
    if "ckpt" not in arguments:
        sys.exit(f"error: ckpt=PATH is missing\n\n{__doc__}")
    with one_line_errors():
        main(arguments.pop("ckpt"), [f"{key}={value}" for key, value in arguments.items()])
