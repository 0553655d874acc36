"""Export a trained language model to a folder that transformers loads, with its tokenizer and a model card.

    python -m scripts.export ckpt=PATH out=FOLDER

scripts.evaluate and scripts.generate take the folder as they take a run; in Python, after `import models.hugging_face`,
AutoModelForCausalLM.from_pretrained(FOLDER).
"""

from training import arguments
from training.command_line import one_line_errors
from training.export import export

if __name__ == "__main__":
    with one_line_errors():
        print(f"exported to {export(**arguments.read('export', __doc__))}")
