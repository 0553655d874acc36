from dataclasses import replace

import pytest

from flashrnn.gpu import NAMED, named_gpu

ARCHITECTURES = {
    "A100": "sm_80", "RTX 3090": "sm_86", "RTX 4090": "sm_89", "H100": "sm_90a", "H200": "sm_90a", "B200": "sm_100a",
}  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), ARCHITECTURES.items())
def test_architectures(name, arch):
    assert named_gpu(name).name == name
    assert named_gpu(name).arch == arch


def test_all_named_gpus_are_tested():
    assert NAMED.keys() == ARCHITECTURES.keys()


def test_gpus_with_clusters():
    assert [name for name in NAMED if named_gpu(name).clusters] == ["H100", "H200", "B200"]
    assert named_gpu("H100").cluster_sizes == tuple(range(1, 17))
    assert named_gpu("RTX 4090").cluster_sizes == (1,)
    desktop = replace(named_gpu("B200"), name="RTX 5090", capability=(12, 0))
    assert (desktop.clusters, desktop.arch) == (False, "sm_120a")


@pytest.mark.parametrize(
    ("blocks", "size", "clusters"),
    [(1, 16, 7), (1, 8, 15), (1, 4, 30), (2, 16, 14), (2, 12, 16), (2, 9, 23), (2, 6, 39), (3, 12, 28), (4, 3, 163)],
)
def test_clusters_that_ran_at_once(blocks, size, clusters):
    assert named_gpu("H200").clusters_at_once(size, blocks) == clusters


def test_unknown_name_lists_the_known_names():
    with pytest.raises(ValueError, match=r"'V100'.* A100, "):
        named_gpu("V100")
