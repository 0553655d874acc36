"""Import of sLSTM layers from xlstm checkpoints, compared with a plain implementation of the package's layout.

tests/compat compares with the package itself.
"""

import pytest
import torch
from torch.nn import functional as F

from models.mixers import RNNMixer
from tests.tiny_runs import run
from training.xlstm_checkpoint import import_layers, read

B, T, N, D, WIDTH = 3, 9, 2, 4, 4
d = N * D
KERNEL = "slstm_cell._recurrent_kernel_"


def slstm_layer(backend, width=WIDTH):
    """Return random weights of a layer with the package's names and shapes."""
    generator = torch.Generator().manual_seed(0)
    kernel = {"vanilla": (N, 4 * D, D), "cuda": (N, D, 4 * D)}[backend]
    shapes = {f"{gate}gate.weight": (N, D, D) for gate in "fizo"}
    shapes |= {KERNEL: kernel, "slstm_cell._bias_": (4 * d,), "group_norm.weight": (d,)}
    if width:
        shapes |= {"conv1d.conv.weight": (d, 1, width), "conv1d.conv.bias": (d,)}
    return {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}


def headwise(weight, x):
    return torch.einsum("noi,btni->btno", weight, x.unflatten(-1, (N, D)))


def expected(weights, x, backend):
    """Return the result of the package's layer, [B, T, d]; fgate drives the input gate, igate the forget gate."""
    convolved = x
    if "conv1d.conv.weight" in weights:
        padded = F.pad(x.transpose(1, 2), (WIDTH - 1, 0))
        convolved = F.conv1d(padded, weights["conv1d.conv.weight"], weights["conv1d.conv.bias"], groups=d)
        convolved = F.silu(convolved.transpose(1, 2))
    inputs = {"i": ("f", convolved), "f": ("i", convolved), "z": ("z", x), "o": ("o", x)}
    Wx = torch.stack([headwise(weights[f"{module}gate.weight"], value) for module, value in inputs.values()])
    kernel, bias = weights[KERNEL], weights["slstm_cell._bias_"]
    h = c = n = m = torch.zeros(B, N, D)
    outputs = []
    for t in range(T):
        if backend == "vanilla":  # [heads, gates and units, previous]
            recurrent = torch.einsum("nkp,bnp->bnk", kernel, h).unflatten(-1, (4, D)).transpose(1, 2)
            gates = recurrent + bias.view(4, N, D)
        else:  # [heads, previous, gates and units]
            recurrent = torch.einsum("npk,bnp->bnk", kernel, h).unflatten(-1, (4, D)).transpose(1, 2)
            gates = recurrent + bias.view(N, 4, D).transpose(0, 1)
        i, f, z, o = (gates + Wx[:, :, t].transpose(0, 1)).unbind(1)
        old = m + F.logsigmoid(f)
        m = i if t == 0 else torch.maximum(i, old)
        i, f = torch.exp(i - m), torch.exp(old - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / n
        outputs.append(h)
    y = torch.stack(outputs, dim=1).reshape(B * T, d)
    return F.group_norm(y, N, 1 + weights["group_norm.weight"]).view(B, T, d)


@pytest.mark.parametrize("backend", ["vanilla", "cuda"])
@pytest.mark.parametrize("width", [0, WIDTH])
def test_imported_layer_equals_the_package(backend, width):
    weights = slstm_layer(backend, width)
    (mixer,) = import_layers(weights).values()
    x = torch.randn(B, T, d, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mixer(x)[0], expected(weights, x, backend), rtol=1e-5, atol=1e-5)


def test_command_writes_all_layers_under_their_names(tmp_path):
    layer = slstm_layer("cuda")
    names = [f"xlstm_block_stack.blocks.{block}.xlstm" for block in (1, 3)]
    weights = {f"{name}.{key}": value for name in names for key, value in layer.items()}
    torch.save({"state_dict": weights | {"lm_head.weight": torch.zeros(5, d)}}, tmp_path / "xlstm.pt")
    ended = run("scripts.import_xlstm", f"ckpt={tmp_path}/xlstm.pt", f"out={tmp_path}/out.pt", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert names[1] in ended.stdout
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(written) == names
    mixer = RNNMixer(**written[names[0]]["arguments"])
    mixer.load_state_dict(written[names[0]]["state_dict"])
    x = torch.randn(B, T, d)
    torch.testing.assert_close(mixer(x)[0], import_layers(layer)[""](x)[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({KERNEL: None}, "sLSTM.* 8 "),
        ({"igate.weight": None}, r"igate\.weight"),
        ({KERNEL: torch.zeros(N, D, 4, D)}, r"\[2, 4, 4, 4\]"),
    ],
    ids=["no layer", "no gate", "another layout"],
)
def test_other_layers_are_an_error(changed, message):
    weights = {name: value for name, value in (slstm_layer("cuda") | changed).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        import_layers(weights)


def test_file_without_a_state_dict_is_an_error(tmp_path):
    torch.save({"epoch": 3, "weights": {}}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"epoch, weights.*state_dict"):
        read(tmp_path / "run.pt")


@pytest.mark.parametrize("content", [b"", b"garbage", b"hello world", b"PK\x03\x04 cut off"])
def test_damaged_file_is_an_error(tmp_path, content):
    (tmp_path / "xlstm.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"xlstm\.pt .*torch\.save"):
        read(tmp_path / "xlstm.pt")
