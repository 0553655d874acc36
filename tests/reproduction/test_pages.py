"""Pages of stored results are up to date, and contain what their files say."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import RESULTS, generation_page, layers_page, sweep_page
from reproduction import ENTRIES, kernel_speed, record
from reproduction.result import paper, write
from scripts import reproduce
from tests.reproduction.finished_runs import rows

H100, H200 = RESULTS / "h100", RESULTS / "h200"


def test_attention_kernels_are_counted():
    content = json.loads((H100 / "kernels_main.json").read_text())
    attention = [row for row in content["rows"] if row["implementation"] == "attention"][:3]
    content["rows"] = [
        row | {"kernel": name} for row, name in zip(attention, ("cudnn", "flash_2", "cudnn"), strict=True)
    ]
    assert kernel_speed.attention_kernels([content]) == {"cudnn": 2, "flash_2": 1}


@pytest.mark.parametrize(
    ("name", "sources", "number"),
    [
        ("kernel_speed", ["kernels_heads", "kernels_main"], "lstm, 12 × 64, 16, 1024"),
        ("roofline", ["kernels_heads", "kernels_batch"], "TFLOP/s"),
        ("complexity", ["kernels_length", "kernels_batch", "kernels_heads"], "exponent"),
    ],
)
def test_pages_of_stored_results(tmp_path, name, sources, number):
    files = [H200 / f"{source}.json" for source in sources]
    page, figure = write(name, reproduce.load(name), files, tmp_path)
    assert page == tmp_path / "h200" / f"{name}.md"
    assert any(number in cell for row in rows(page) for cell in row)
    assert "NVIDIA H200" in page.read_text()
    assert figure.exists()


def test_times_of_two_gpus_are_an_error(tmp_path):
    files = [H200 / "kernels_heads.json", H100 / "kernels_main.json"]
    with pytest.raises(ValueError, match="NVIDIA H100 80GB HBM3 and NVIDIA H200"):
        write("kernel_speed", reproduce.load("kernel_speed"), files, tmp_path)


def test_full_runs_take_precedence_and_ratios_of_two_runs_are_marked():
    """If several files contain a job, the full run counts. Ratios between two runs have a mark."""

    def row(name, ms, run, D=64):
        case = {"function": "lstm", "N": 768 // D, "D": D, "B": 16, "T": 1024, "dtype": "bfloat16", "mode": "forward"}
        return case | {"implementation": name, "ms": {"p50": ms}, "run": run}

    quick, careful = {"command": "kernels --quick"}, {"command": "kernels", "quick": False}
    swept = [
        row("ours", 2.0, 1),
        row("flashrnn_1.0.8", 20.0, 0),
        row("ours", 2.0, 1, 32),
        row("flashrnn_1.0.8", 9.0, 0, 32),
    ]
    main = [row("ours", 1.0, 0), row("flashrnn_1.0.8", 11.0, 0)]
    contents = [
        {"suite": "heads", "runs": [quick, quick], "rows": swept},
        {"suite": "main", "runs": [careful], "rows": main},
    ]
    _, of_main, of_two_runs = kernel_speed.KERNEL_SPEED.table(contents)
    assert of_main[2:5] == ["1.00", "11.00", "11.0"]
    assert of_two_runs[2:5] == ["2.00", "9.00", "4.5 †"]
    assert "†" in kernel_speed.KERNEL_SPEED.what


def test_file_of_another_result_is_an_error(tmp_path):
    file = H100 / "numerical_error.json"
    with pytest.raises(ValueError, match=r"numerical_error.*roofline.*kernels_heads"):
        write("roofline", reproduce.load("roofline"), [file], tmp_path)


@pytest.mark.parametrize("name", list(ENTRIES))
def test_paper_values_are_numbers_or_not_known(name):
    values = paper(name)
    assert values is None or values


WRITERS = {"sweep": sweep_page, "layers": layers_page, "generation": generation_page}
OF_BENCHMARKS = {page for page in RESULTS.glob("*/*.md") if page.stem in WRITERS}


@pytest.mark.parametrize("page", sorted(OF_BENCHMARKS), ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_pages_of_benchmarks_are_up_to_date(page, tmp_path, monkeypatch):
    """`python -m scripts.benchmark figures files=[FILE]` updates them. tests/benchmarks draws their figures."""
    monkeypatch.setattr(WRITERS[page.stem], "draw", lambda *_: None)
    made, _ = WRITERS[page.stem].write(Path(shutil.copy(page.with_suffix(".json"), tmp_path)))
    assert made.read_text() == page.read_text()


@pytest.mark.parametrize(
    "page", sorted(set(RESULTS.glob("*/*.md")) - OF_BENCHMARKS), ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_pages_are_up_to_date(page, tmp_path):
    """`python -m scripts.reproduce NAME files=[...]` updates them."""
    text = page.read_text()
    name = max((name for name in ENTRIES if page.stem.startswith(name)), key=len)
    files = [page.parent / file for file in re.findall(r"\[([\w.]+\.json)\]", text.split("\n\nData: ")[1])]
    write(name, replace(reproduce.load(name), draw=lambda contents, file: None), files, tmp_path)
    made = re.sub(r"\]\([^)]*/", "](", (tmp_path / page.parent.name / page.name).read_text())  # another folder
    assert made == text


FILES = sorted(RESULTS.glob("*/*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_results_have_one_clean_commit(file):
    (commit,) = record.commits(json.loads(file.read_text()))
    assert not commit.endswith("-dirty")


def test_index_lists_all_files():
    index = (RESULTS / "README.md").read_text()
    assert not [file for file in FILES if f"({file.parent.name}/{file.name})" not in index]
