from ctypes import CFUNCTYPE, c_long, c_void_p

import pytest
import torch

from flashrnn.cpu import build, registers

PRODUCT = CFUNCTYPE(None, c_void_p, c_void_p, c_long, c_long, c_void_p, c_long, c_long, c_long)


PROCESSORS = ((64, 32), (32, 16), (16, 32), (16, 16))  # bytes of a register, registers
CASES = [
    *((processor, torch.float32) for processor in PROCESSORS),
    *((processor, torch.float64) for processor in (PROCESSORS[0], PROCESSORS[-1])),
    *(pytest.param(processor, torch.float64, marks=pytest.mark.slow) for processor in PROCESSORS[1:-1]),
]


@pytest.fixture
def processor(request, monkeypatch):
    """Pretend to have a processor with such vector registers; its code also runs on others, only slower."""
    monkeypatch.setattr(registers, "registers", lambda: registers.Registers(*request.param))
    for made in (build.matrix_product, build.row_product_of):
        made.cache_clear()
    yield
    for made in (build.matrix_product, build.row_product_of):
        made.cache_clear()


@pytest.mark.parametrize(("processor", "dtype"), CASES, indirect=["processor"])
def test_products_by_columns(processor, dtype):
    part = build.matrix_product(96, dtype)
    w, bound = torch.randn(21, 96, dtype=dtype), {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for rows in (1, 4, 15):
        a, out = torch.randn(rows, 21, dtype=dtype), torch.randn(rows, 96, dtype=dtype)
        expected = out + a @ w
        PRODUCT(part.address)(out.data_ptr(), a.data_ptr(), 21, 1, w.data_ptr(), 96, rows, 21)
        torch.testing.assert_close(out, expected, rtol=bound, atol=10 * bound)


@pytest.mark.parametrize(("processor", "dtype"), CASES, indirect=["processor"])
def test_products_by_rows(processor, dtype):
    part = build.row_product_of(dtype)
    bound = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for depth, columns in ((1, 7), (5, 5), (16, 3), (35, 20)):
        w = torch.randn(columns, depth, dtype=dtype)
        for rows in (1, 4, 7):
            a, out = torch.randn(rows, depth, dtype=dtype), torch.randn(rows, columns, dtype=dtype)
            expected = out + a @ w.t()
            PRODUCT(part.address)(out.data_ptr(), a.data_ptr(), depth, columns, w.data_ptr(), columns, rows, depth)
            torch.testing.assert_close(out, expected, rtol=bound, atol=10 * bound)
