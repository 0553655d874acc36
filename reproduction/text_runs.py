"""Collected runs of language models: which are valid, their names, and the text they were evaluated on."""

from reproduction.result import Options

_NAMED = ("experiment=", "model=", "model.num_heads=", "seed=")  # overrides with their own columns, or in the name


def names(runs: list[dict]) -> list[str]:
    """Return model, heads and seed of each run, and the overrides that it does not share with all other runs."""
    shared = shared_overrides(runs)
    return [_name(run, shared) for run in runs]


def shared_overrides(runs: list[dict]) -> list[str]:
    """Return the overrides that all runs share."""
    first = runs[0]["overrides"] if runs else []
    return [override for override in first if all(override in run["overrides"] for run in runs)]


def _name(run: dict, shared: list[str]) -> str:
    parts = [run["model"], f"{run['num_heads']} head{'s' if run['num_heads'] != 1 else ''}"]
    parts += [f"seed {run['seed']}"] if run["seed"] else []
    own = [override for override in run["overrides"] if override not in shared and not override.startswith(_NAMED)]
    return ", ".join(parts + own)


def finished(runs: list[dict]) -> list[dict]:
    """Return the runs with a perplexity and a logged speed."""
    return [run for run in runs if "perplexity" in run and run["step_time"]]


def by_text(runs: list[dict]) -> dict[float, list[dict]]:
    """Return finished runs by their validation text, which is identified by the unigram perplexity of its tokens."""
    texts: dict[float, list[dict]] = {}
    for run in finished(runs):
        if run.get("unigram_perplexity"):
            texts.setdefault(round(run["unigram_perplexity"], 1), []).append(run)
    return texts


def check_finished(options: Options, rows: list[dict]) -> None:
    """Raise ValueError if no run below options.runs is a finished language model."""
    if options.runs and not finished(rows):
        raise ValueError(f"no run below {options.runs} has a perplexity, and step times in its metrics.csv")
