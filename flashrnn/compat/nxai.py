"""The interface of FlashRNN 1.0.8 on PyPI (https://github.com/NX-AI/flashrnn), computed by this package.

Import `FlashRNNConfig` and `flashrnn` from `flashrnn.compat.nxai` instead of its package.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashrnn import Cell, get_cell
from flashrnn import flashrnn as recurrence

_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
_LOOPS = ("vanilla", "vanilla_fwbw")  # the time loops in PyTorch, which only use the dtypes of the tensors
_NOT_OFFERED = {
    "gradient_recurrent_cut": False,
    "gradient_recurrent_clipval": None,
    "forward_clipval": None,
    "constants": {},
}


@dataclass
class FlashRNNConfig:
    """Sizes, layouts and dtypes of a call, with the field names and defaults of FlashRNN 1.0.8.

    Layouts are strings of one letter for each axis: B batch, T time, G gates, H heads, D head size, P head size of the
    previous state, S states.

    Args:
        backend: the name of a backend of this package or of FlashRNN 1.0.8, or "auto". The default is "auto"; that of
            1.0.8 is "cuda_fused".
        function: the name of a registered cell, or a `flashrnn.Cell`.
        gradient_recurrent_cut: must be False; other values are not supported.
        gradient_recurrent_clipval: must be None; gradients are not clipped between steps.
        forward_clipval: must be None; states are not clipped.
        constants: must be None or empty; they are macros of CUDA sources.
        simple_agg: set from the cell: whether every gate has an input and a recurrent part.
        hidden_dim: number of units of all heads together. One of the three sizes is set from the other two. The
            computation depends only on the shapes of the tensors.
        num_heads: number of heads; 1 if neither it nor head_dim is given.
        head_dim: units of a head.
        num_states: set from the cell.
        num_gates_r: set from the cell: the gates with a recurrent part.
        num_gates_w: set from the cell: the gates with an input part.
        num_gates_i: set from the cell: the gates with either part.
        num_gates_t: set from the cell: all gates.
        batch_size: ignored; kernels support any batch size.
        input_shape: layout of Wx, any order of BTGHD.
        output_shape: layout of the states, given (with one time step) and returned, any order of SBTHD.
        recurrent_shape: layout of R, any order of GHDP.
        bias_shape: layout of b, any order of GHD.
        dtype: dtype of the computation. None takes that of Wx, or of autocast where it is on. The backends "vanilla"
            and "vanilla_fwbw" always do so.
        dtype_acc: ignored; sums are float32, or float64 if `dtype` is.
        dtype_b: ignored; biases have the dtype of sums.
        dtype_r: ignored; R has `dtype` in products.
        dtype_w: dtype of the returned states if dtype_s is None; `dtype` if both are None.
        dtype_g: ignored, see dtype_r.
        dtype_s: dtype of the returned states. Between steps, h has `dtype` and the other states have the dtype of sums.
        dtype_a: ignored, see dtype_acc.
        enable_automatic_mixed_precision: ignored; inputs are always converted to `dtype`.
        trainable_r: ignored, as in FlashRNN 1.0.8; set `requires_grad`.
        trainable_b: ignored, as in FlashRNN 1.0.8.
        initial_val: value of all initial states, or one value per state, if no states are given.

    Raises:
        NotImplementedError: a field asks for what would change results and is not offered here.
        ValueError: a layout or a dtype is not one of those above; a cell is unknown.
    """

    backend: str = "auto"
    function: str | Cell = "lstm"
    gradient_recurrent_cut: bool = False
    gradient_recurrent_clipval: float | None = None
    forward_clipval: float | None = None
    constants: dict[str, float] | None = None
    simple_agg: bool = True
    hidden_dim: int = -1
    num_heads: int = -1
    head_dim: int = -1
    num_states: int = 4
    num_gates_r: int = 4
    num_gates_w: int = 4
    num_gates_i: int = 4
    num_gates_t: int = 4
    batch_size: int = 8
    input_shape: str = "BTGHD"
    output_shape: str = "SBTHD"
    recurrent_shape: str = "GHDP"
    bias_shape: str = "GHD"
    dtype: str | None = "bfloat16"
    dtype_acc: str | None = "float32"
    dtype_b: str | None = None
    dtype_r: str | None = None
    dtype_w: str | None = None
    dtype_g: str | None = None
    dtype_s: str | None = None
    dtype_a: str | None = None
    enable_automatic_mixed_precision: bool = True
    trainable_r: list[bool] | bool = True
    trainable_b: list[bool] | bool = True
    initial_val: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        self._refuse_what_would_change_results()
        for field, axes in (("input", "BTGHD"), ("output", "SBTHD"), ("recurrent", "GHDP"), ("bias", "GHD")):
            layout = getattr(self, f"{field}_shape")
            if sorted(layout) != sorted(axes):
                raise ValueError(f"{field}_shape must name each axis of {axes} once, got {layout!r}")
        self._set_sizes()
        self._count_gates_and_states()
        self.dtype_w = self.dtype_w or self.dtype
        self.dtype_s = self.dtype_s or self.dtype_w
        for name in (self.dtype, self.dtype_s):
            if name is not None and name not in _DTYPES:
                raise ValueError(f"a dtype must be one of {', '.join(_DTYPES)}, got {name!r}")

    def _refuse_what_would_change_results(self) -> None:
        for name, unset in _NOT_OFFERED.items():
            value = getattr(self, name)
            if value not in (None, unset):
                raise NotImplementedError(
                    f"{name}={value!r} would change results and is not offered here; leave it out"
                )

    def _set_sizes(self) -> None:
        if self.num_heads <= 0:
            self.num_heads = self.hidden_dim // self.head_dim if self.head_dim > 0 else 1
        if self.head_dim <= 0:
            self.head_dim = self.hidden_dim // self.num_heads
        if self.hidden_dim <= 0:
            self.hidden_dim = self.num_heads * self.head_dim

    def _count_gates_and_states(self) -> None:
        cell = get_cell(self.function)
        self.num_states = len(cell.states)
        self.num_gates_r, self.num_gates_w = len(cell.recurrent_gates), len(cell.input_gates)
        self.num_gates_i = len({*cell.recurrent_gates, *cell.input_gates})
        self.num_gates_t = len(cell.gates)
        self.simple_agg = cell.recurrent_gates == cell.input_gates == cell.gates

    @property
    def input_dim(self) -> int:
        """Features of Wx: gates times units."""
        return self.num_gates_w * self.hidden_dim


def flashrnn(
    Wx: Tensor,
    R: Tensor,
    b: Tensor | None,
    states: Tensor | None = None,
    function: str | Cell = "lstm",
    config: FlashRNNConfig | None = None,
    backend: str = "auto",
    dtype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrent cell over time, with the arguments and results of the function of FlashRNN 1.0.8.

    It returns every state of every step in one tensor, which takes more time and memory than `flashrnn.flashrnn`.

    Args:
        Wx: [B, T, Gi, N, D] input part of the gates, or in the layout `config.input_shape`.
        R: [Gr, N, D, D] recurrent matrices; the last axis is the previous state; or `config.recurrent_shape`.
        b: [G, N, D] biases, or `config.bias_shape`; zeros if None.
        states: [S, B, 1, N, D] initial states, or `config.output_shape`; `config.initial_val` if None.
        function: a registered cell's name, or a `flashrnn.Cell`.
        config: layouts and dtypes; function, backend and dtype are then those of the configuration.
        backend: a backend's name here or there, or "auto".
        dtype: dtype of the computation. None takes that of Wx, or of autocast where it is on. The backends "vanilla"
            and "vanilla_fwbw" always do so.

    Returns:
        all states [S, B, T, N, D] and last states [S, B, 1, N, D], or in the layout `config.output_shape`; both in the
        dtype of Wx, or that of the configuration.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match; the message names the expected ones.
        UnsupportedProblem: the named backend does not support the call; the message gives the reason.
        NotImplementedError: as for `FlashRNNConfig`.
    """
    if config is None:
        config = FlashRNNConfig(backend, function, dtype=dtype, dtype_s=str(Wx.dtype).removeprefix("torch."))
    loop = config.backend in _LOOPS
    computed = None if loop or config.dtype is None else _DTYPES[config.dtype]
    returned = Wx.dtype if loop or config.dtype_s is None else _DTYPES[config.dtype_s]
    Wx = _permuted("Wx", Wx, config.input_shape, "BTGHD")
    R = _permuted("R", R, config.recurrent_shape, "GHDP")
    b = None if b is None else _permuted("b", b, config.bias_shape, "GHD")
    initial = _initial_states(config, states, Wx)
    options = {"function": config.function, "backend": "vanilla" if loop else config.backend, "dtype": computed}
    _, last, every = recurrence(Wx, R, b, initial, **options, return_states=True)
    results = torch.stack([state.to(returned) for state in every]), last.to(returned).unsqueeze(2)
    all_states, last_states = (_permuted("states", x, "SBTHD", config.output_shape) for x in results)
    return all_states, last_states


def _permuted(name: str, x: Tensor, layout: str, wanted: str) -> Tensor:
    """Return x, whose axes are `layout`, with its axes in the order `wanted`."""
    if x.dim() != len(layout):
        raise ValueError(f"{name} must have the axes {layout}, got {list(x.shape)}")
    return x.permute([layout.index(axis) for axis in wanted])


def _initial_states(config: FlashRNNConfig, states: Tensor | None, Wx: Tensor) -> Tensor | None:
    """Return the states [S, B, N, D] before the first step of Wx [B, T, Gi, N, D], or None for zeros."""
    if states is not None:
        states = _permuted("states", states, config.output_shape, "SBTHD")
        if states.shape[2] != 1:
            raise ValueError(f"states must be of one time step, got {states.shape[2]}")
        return states.squeeze(2)
    if config.initial_val == 0:
        return None
    B, _, _, N, D = Wx.shape
    values = torch.as_tensor(config.initial_val, dtype=Wx.dtype, device=Wx.device).expand(config.num_states)
    return values[:, None, None, None].expand(-1, B, N, D)
