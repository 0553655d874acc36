"""The Hugging Face hub: datasets, and a quick check that a repository exists."""

import datasets
import huggingface_hub
from huggingface_hub import errors

INSTEAD = {
    "dataset": "set data.source to local files, such as 'folder/**/*.jsonl.zst'",
    "tokenizer": "set data.tokenizer to a local folder, or to bpe:50257 to train one",
}


def offline() -> bool:
    return huggingface_hub.constants.HF_HUB_OFFLINE


def check(kind: str, name: str, revision: str | None = None) -> str | None:
    """Return the commit of `revision` (None: the newest) of a "dataset" or "tokenizer"; None when working offline.

    This is called before the real requests, which would retry for half a minute without a network.
    """
    if offline():
        return None
    api = huggingface_hub.HfApi()
    ask = {"dataset": api.dataset_info, "tokenizer": api.model_info}[kind]
    try:
        return ask(name, revision=revision, timeout=5).sha
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"the {kind} {name!r} asks for a login: accept its terms there, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"the {kind} {name!r} has no revision {revision!r} on {api.endpoint}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise FileNotFoundError(f"{kind} {name!r} is neither a local path nor public on {api.endpoint}") from error
    except Exception as error:  # which HTTP library raises it depends on the version of huggingface_hub
        raise ConnectionError(
            f"{kind} {name!r}: cannot reach {api.endpoint} ({error}). "
            f"If it was downloaded before, set HF_HUB_OFFLINE=1; else {INSTEAD[kind]}"
        ) from error


def open_dataset(name: str, subset: str | None, split: str, revision: str | None) -> datasets.IterableDataset:
    """Return the streamed rows of a dataset; with HF_HUB_OFFLINE, those that `datasets.load_dataset` has downloaded."""
    check("dataset", name, revision)
    try:
        found = datasets.load_dataset(name, subset, split=split, revision=revision, streaming=not offline())
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        why = "not downloaded before, and HF_HUB_OFFLINE is set" if offline() else error
        raise FileNotFoundError(f"dataset {name!r} cannot be loaded: {why}; {INSTEAD['dataset']}") from error
    return found.to_iterable_dataset() if offline() else found
