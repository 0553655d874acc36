"""Networks exported to ONNX give the same results in onnxruntime, also for other batch sizes and lengths."""

import onnxruntime
import pytest
import torch

from flashrnn import FlashRNN
from tests.problems import LEAKY_ELMAN


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"num_layers": 2, "bidirectional": True}, (9, 2)),
        ({"function": "gru", "batch_first": True}, (9, 2)),
        ({"function": LEAKY_ELMAN}, (9, 2)),
        ({"function": "slstm", "num_heads": 2}, (9, 3)),  # with several heads or a projection, the batch size is fixed
        ({"proj_size": 3}, (9, 3)),
    ],
    ids=["lstm", "gru", "own cell", "heads", "projection"],
)
def test_onnxruntime_agrees(options, other, tmp_path):
    torch.manual_seed(0)
    rnn = FlashRNN(4, 6, **options).eval()
    dims = {0: torch.export.Dim("first")} | ({1: torch.export.Dim("second")} if other[1] != 3 else {})
    file, given = tmp_path / "rnn.onnx", (torch.randn(5, 3, 4),)
    torch.onnx.export(rnn, given, file, dynamo=True, dynamic_shapes=(dims,), verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for sizes in ((5, 3), other):
        x = torch.randn(*sizes, 4)
        out, last = rnn(x)
        expected = [out, *(last if isinstance(last, tuple) else (last,))]
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close([torch.from_numpy(y) for y in found], [y.detach() for y in expected])
