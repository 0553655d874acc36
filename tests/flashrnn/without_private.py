"""A program that uses the package without each of PyTorch's private interfaces, and prints the errors as JSON.

`python -m tests.flashrnn.without_private` imports PyTorch once and forks a process for every interface.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch._decomp
import torch._dynamo  # imported once for all child processes
from torch._C._dynamo import eval_frame


@contextmanager
def lacking(owner: Any, name: str) -> Iterator[None]:
    """A context without an interface, for the import of the package; PyTorch itself may need it later."""
    value = getattr(owner, name, None)
    if value is not None:
        delattr(owner, name)
    yield
    if value is not None:
        setattr(owner, name, value)


def check_calls() -> None:
    """Results and all kinds of gradients equal those of a plain loop."""
    from flashrnn import flashrnn, get_cell
    from tests.problems import plain_loop, random_inputs

    inputs = random_inputs(get_cell("lstm"), 2, 3, 2, 4)
    expected = plain_loop(*inputs, function=get_cell("lstm"))[0]
    (d_R,) = torch.autograd.grad(expected.square().sum(), inputs.R)

    def loss(R: torch.Tensor, backend: str = "vanilla") -> torch.Tensor:
        return flashrnn(inputs.Wx, R, *inputs[2:], backend=backend)[0].square().sum()

    for backend in ("vanilla", "auto"):
        value = loss(inputs.R, backend)
        for retain in (True, False):
            torch.testing.assert_close(torch.autograd.grad(value, inputs.R, retain_graph=retain)[0], d_R)
    torch.testing.assert_close(torch.func.grad(loss)(inputs.R.detach()), d_R)
    with torch.no_grad():
        torch.testing.assert_close(flashrnn(*inputs)[0], expected)


def check_compiled() -> None:
    """Compiled calls equal eager calls, forward and backward."""
    check_calls()
    from flashrnn import flashrnn, get_cell
    from tests.problems import random_inputs

    inputs = random_inputs(get_cell("lstm"), 2, 3, 2, 5)
    compiled = torch.compile(flashrnn, fullgraph=True, backend="aot_eager")
    losses = [run(*inputs, backend="vanilla")[0].square().sum() for run in (flashrnn, compiled)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, inputs.R) for loss in losses))


def check_forward_mode() -> None:
    """Calls are correct, and forward-mode derivatives are an error."""
    import flashrnn._torch_private as private

    private.forward_ad = SimpleNamespace()
    check_calls()
    from flashrnn import flashrnn, get_cell
    from tests.problems import random_inputs

    Wx, R, b, _ = random_inputs(get_cell("lstm"), 2, 3, 2, 4)
    with torch.autograd.forward_ad.dual_level():
        try:
            flashrnn(torch.autograd.forward_ad.make_dual(Wx, Wx), R, b)
        except NotImplementedError:
            return
    raise AssertionError("a forward-mode derivative was given")


def check_stream() -> None:
    """The current stream is that of PyTorch's public function."""
    check_calls()
    import flashrnn._torch_private as private

    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=100 + device)
    assert private.current_stream(1) == 101


def check_device() -> None:
    """The current GPU is that of PyTorch's public function."""
    check_calls()
    import flashrnn._torch_private as private

    assert private.current_device is torch.cuda.current_device


def check_precision() -> None:
    """TF32 is allowed as PyTorch's public setting says."""
    from flashrnn.problem import tf32_allowed

    torch.backends.cuda.matmul = SimpleNamespace(fp32_precision="tf32")
    assert tf32_allowed(torch.float32, torch.device("cuda"))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not tf32_allowed(torch.float32, torch.device("cuda"))


def check_copies() -> None:
    """Tensors of several sizes are copied."""
    from flashrnn.decoding import copy_each

    del torch._foreach_copy_
    into, tensors = [torch.zeros(2), torch.zeros(3, 1)], [torch.rand(2), torch.rand(3, 1)]
    copy_each(into, tensors)
    torch.testing.assert_close(into, tensors)


def check_mark() -> None:
    """Without the mark, compiled calls do not pad heads, because the solver cannot run in the compiler."""
    from flashrnn import dispatch, get_cell

    del dispatch.padding._dynamo_marked_constant
    key, gpu = get_cell("lstm").key, torch.device("cuda")

    def plus_padding(x: torch.Tensor) -> torch.Tensor:
        return x + dispatch.padding("auto", key, 1, 63, torch.bfloat16, gpu, True)

    assert torch.compile(plus_padding, fullgraph=True, backend="eager")(torch.ones(())) == 1


def check_cudnn() -> None:
    """No layer runs by cuDNN, even if PyTorch has it."""
    from flashrnn._torch_private import CudnnRnn

    torch.backends.cudnn.is_available = lambda: True
    assert CudnnRnn.is_available()
    CudnnRnn.is_available.cache_clear()
    del torch._cudnn_rnn
    assert not CudnnRnn.is_available()
    check_calls()


def check_openmp() -> None:
    """Kernels for the CPU run on a thread pool."""
    from flashrnn.cpu import threads

    assert threads._openmp is None
    check_calls()


def check_untraceable() -> None:
    """Cells have no graphs, and backend `vanilla` runs their steps directly."""
    from flashrnn import get_cell
    from flashrnn.cells.trace import untraceable

    assert "TorchDispatchMode is missing" in untraceable(get_cell("lstm"))
    check_calls()


def check_decompositions() -> None:
    """Composite operators are traced by the decompositions of PyTorch's exporter."""
    with lacking(torch._decomp, "decomposition_table"):
        from flashrnn import get_cell
        from flashrnn.cells.trace import untraceable

        assert untraceable(get_cell("slstm")) is None
    check_calls()


CASES = {
    "_are_functorch_transforms_active": (lacking(torch._C, "_are_functorch_transforms_active"), check_compiled),
    "_len_torch_dispatch_stack": (lacking(torch._C, "_len_torch_dispatch_stack"), check_calls),
    "_is_tracing": (lacking(torch._C, "_is_tracing"), check_calls),
    "_current_level": (nullcontext(), check_forward_mode),
    "_get_current_graph_task_keep_graph": (
        lacking(torch._C._autograd, "_get_current_graph_task_keep_graph"),
        check_calls,
    ),
    "_cuda_getCurrentRawStream": (lacking(torch._C, "_cuda_getCurrentRawStream"), check_stream),
    "_cuda_getDevice": (lacking(torch._C, "_cuda_getDevice"), check_device),
    "_get_fp32_precision_getter": (lacking(torch._C, "_get_fp32_precision_getter"), check_precision),
    "get_eval_frame_callback": (lacking(eval_frame, "get_eval_frame_callback"), check_compiled),
    "_foreach_copy_": (nullcontext(), check_copies),
    "_dynamo_marked_constant": (nullcontext(), check_mark),
    "_cudnn_rnn": (nullcontext(), check_cudnn),
    "GOMP_parallel": (lacking(torch._C, "__file__"), check_openmp),
    "decomposition_table": (nullcontext(), check_decompositions),
    "TorchDispatchMode": (lacking(torch.utils._python_dispatch, "TorchDispatchMode"), check_untraceable),
}


def outcome(missing: AbstractContextManager, check: Callable[[], None]) -> str:
    """Run a check in a child process; return the error, or an empty string."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            with missing:
                import flashrnn  # noqa: F401
            check()
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or (f"ended with status {status}" if status else "")


if __name__ == "__main__":
    json.dump({name: outcome(*case) for name, case in CASES.items()}, sys.stdout)
