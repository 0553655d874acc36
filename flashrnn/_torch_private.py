"""The only module of this package that uses private interfaces of PyTorch.

For each of them there is a substitute for PyTorch versions without it, with the same results but slower.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL, c_uint, c_void_p
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable)


def _perhaps_transformed() -> bool:
    """Substitute: assume a transformation, except in compiled code, where the compiler has resolved it."""
    return not torch.compiler.is_compiling()


OpOverload = type(torch.ops.aten.add.Tensor)
"""The class of PyTorch's operators."""

transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _perhaps_transformed)
"""Return whether a transformation of torch.func is active. Those do not see gradients registered with operators."""

_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)


def autograd_alone() -> bool:
    """Return whether only autograd observes a call: no compiler, transformation, dispatch mode, tracer or forward mode.

    Without the private interfaces the answer is no, and calls run as operators.
    """
    return not (
        torch.compiler.is_compiling()
        or transforms_active()
        or _dispatch_modes()
        or _is_tracing()
        or getattr(forward_ad, "_current_level", 0) >= 0
    )


def traced_by_jit() -> bool:
    """Return whether torch.jit.trace records the call."""
    return not torch.compiler.is_compiling() and _is_tracing()


def apply_of(function: type[torch.autograd.Function]) -> Callable:
    """Return a faster `function.apply` for calls that are `autograd_alone`.

    It skips the preparations for torch.func, which take about 1.5 times as long as an allocation.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def backward_is_observed() -> bool:
    """Return whether a transformation observes the running backward pass, or autograd records it."""
    return transforms_active() or torch.is_grad_enabled()


graph_is_retained: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Return whether the graph of the running backward pass outlives it, so that its tensors must not be overwritten."""


_precision_setting = getattr(torch._C, "_get_fp32_precision_getter", None)


def precision_of_products() -> str:
    """Return torch.backends.cuda.matmul.fp32_precision, which takes six times as long to read."""
    if _precision_setting is None:
        return torch.backends.cuda.matmul.fp32_precision
    return _precision_setting("cuda", "matmul")


def _stream_handle(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)
"""Return the handle of PyTorch's current stream on a GPU."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Return the index of PyTorch's current GPU, which has been used before."""

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
except ImportError:
    get_eval_frame_callback = None


def dynamo_at_work() -> bool:
    """Return whether TorchDynamo is compiling the calling functions, without importing TorchDynamo."""
    if get_eval_frame_callback is None:
        return "torch._dynamo" in sys.modules  # it may be compiling
    return get_eval_frame_callback() not in (None, False)


def constant_when_compiled(function: F) -> F:
    """Mark a function so that TorchDynamo takes its result as a constant instead of compiling the function.

    This is torch.compiler.assume_constant_result without importing TorchDynamo, which takes seconds. A PyTorch version
    that does not know the mark compiles the function, in which torch.compiler.is_dynamo_compiling() is then true.
    """
    function._dynamo_marked_constant = True
    return function


def copy_each(into: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy each tensor into another one of the same size, on a GPU with one kernel.

    This stores, for example, the states of a step in the buffers that a CUDA graph reads.
    """
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(into, tensors)
        return
    for own, tensor in zip(into, tensors, strict=True):
        own.copy_(tensor)


def free_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for streams.

    CUDA graphs that were captured with such a workspace, and not one in their own memory pool, must not be replayed.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


@cache
def _onednn_has_bfloat16() -> bool:
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except AttributeError:
        return False


def onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether nn.LSTM runs by oneDNN on the CPU in float32 or bfloat16."""
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and mkldnn.enabled and (dtype == torch.float32 or _onednn_has_bfloat16())


class CudnnRnn(NamedTuple):
    """One of PyTorch's recurrent networks without dropout, run by cuDNN."""

    mode: int  # cudnnRNNMode_t
    hidden_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool

    @staticmethod
    @cache
    def is_available() -> bool:
        """Return whether this PyTorch has cuDNN and the private interfaces."""
        private = hasattr(torch, "_cudnn_rnn") and hasattr(torch.ops.aten, "_cudnn_rnn_backward")
        return torch.backends.cudnn.is_available() and private

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], flat: Tensor, h: Tensor, c: Tensor | None, training: bool
    ) -> tuple[Tensor, ...]:
        """Return the output, the last h and c and, with `training`, the reserve space for `backward`.

        Args:
            x: the input.
            weights: weights of each layer and direction, in PyTorch's shapes. Their values do not matter.
            flat: the weights that cuDNN reads: the matrices of all layers and directions, then all biases, two for
                each layer and direction.
            h: the initial h, in the layout of nn.LSTM.
            c: the initial c of an LSTM.
            training: a backward pass follows.
        """
        per_direction = len(weights) // (self.num_layers * (1 + self.bidirectional))
        out, h, c, reserve, _ = torch._cudnn_rnn(x, weights, per_direction, flat, h, c, *self._network(training))
        return out, h, c, reserve

    def backward(
        self,
        of_forward: tuple[Tensor, ...],
        weights: Sequence[Tensor],
        flat: Tensor,
        gradients: tuple[Tensor | None, ...],
        wanted: list[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
        """Return the gradients of x, h, c and `weights`.

        Args:
            of_forward: x, h, c, output and reserve space of `forward`; the reserve space is overwritten.
            weights: as in `forward`.
            flat: as in `forward`.
            gradients: the gradients of the output and of the last h and c, or None.
            wanted: which of x, h, c and the weights need a gradient.
        """
        x, h, c, out, reserve = of_forward
        per_direction = len(weights) // (self.num_layers * (1 + self.bidirectional))
        given = x, weights, per_direction, flat, h, c, out, *gradients
        return torch.ops.aten._cudnn_rnn_backward(*given, *self._network(training=True), reserve, wanted)

    def _network(self, training: bool) -> tuple:
        sizes = self.mode, self.hidden_size, 0, self.num_layers
        return *sizes, self.batch_first, 0.0, training, self.bidirectional, (), None


def openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """Return GOMP_parallel(function, data, threads, flags) of the OpenMP library that PyTorch uses; None without one.

    https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html; LLVM's and Intel's have it too.
    """
    try:
        parallel = CDLL(torch._C.__file__).GOMP_parallel  # found in the dependencies of this library
    except (AttributeError, OSError):
        return None
    parallel.argtypes, parallel.restype = [c_void_p, c_void_p, c_uint, c_uint], None
    return parallel


def set_openmp_threads(count: int) -> None:
    """Set the number of threads of PyTorch's operators in the calling thread.

    A PyTorch version without OpenMP starts no threads, so there is nothing to set then.
    """
    with suppress(AttributeError, OSError):
        CDLL(torch._C.__file__).omp_set_num_threads(count)  # found in the libraries that this one loads


def scan(step: Callable, initial: list[Any], given: list[Any]) -> tuple[Any, Any]:
    """Run `step(state, values) -> state, outputs` over the first axis of `given`; return the last state and outputs.

    In an exported program this is one operator. Without the private interface, every step is exported.
    """
    try:
        from torch._higher_order_ops import scan as run  # which imports TorchDynamo
    except ImportError:
        return unrolled(step, initial, given)
    return run(step, initial, given)


def unrolled(step: Callable, state: list[Any], given: list[Any]) -> tuple[Any, Any]:
    """Return the results of `scan`, computed step by step."""
    every = []
    for values in zip(*given, strict=True):
        state, outputs = step(state, list(values))
        every.append(outputs)
    return state, [torch.stack(outputs) for outputs in zip(*every, strict=True)]


@cache
def decompositions() -> Mapping[Any, Callable]:
    """Return the decompositions of PyTorch's composite operators into simpler ones."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return torch.export.default_decompositions()  # which imports TorchDynamo
    return decomposition_table


try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode:
        """Substitute: cells cannot be traced, and backend `vanilla` runs their steps directly."""

        def __enter__(self) -> None:
            raise NotImplementedError("torch.utils._python_dispatch.TorchDispatchMode is missing in this version")

        def __exit__(self, *_) -> None:
            pass


class DispatchMode(TorchDispatchMode):
    """A context in which `__torch_dispatch__` sees every operator, without importing TorchDynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it
