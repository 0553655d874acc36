"""Measure the results that docs/results lacks for this machine's GPU, or has from another commit.

    python -m scripts.results [minutes=MINUTES] [list=true]

configs/results.yaml lists the keys. At the end, the command prints what is still missing.
"""

from omegaconf import DictConfig

from training.command_line import hydra_command


@hydra_command("results")
def main(config: DictConfig) -> None:
    """Measure for the given number of minutes, and print what is missing."""
    from benchmarks import RESULTS
    from benchmarks.results import checkout, gpu_folder
    from reproduction.record import RECORD, measure, missing

    folder, commit = RESULTS / gpu_folder(), checkout()
    if not config.list:
        for entry in measure(missing(folder, commit), 60 * config.minutes):
            print(f"measured: {entry.file}", flush=True)
    left = missing(folder, commit)
    print(f"{len(RECORD) - len(left)} of {len(RECORD)} results in {folder} are of commit {commit[:12]}")
    for entry in left:
        print(f"missing: {entry.file:<18} python -m scripts.{entry.command}")


if __name__ == "__main__":
    main()
