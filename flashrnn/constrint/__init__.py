"""ConstrINT: a solver for small integer constraint problems, such as the choice of a tiling for a kernel.

from flashrnn.constrint import ConstraintProblem, ceil_div

p = ConstraintProblem("tiling")
head_dim = p.variable("head_dim", 256, "head size")
warps = p.variable("warps", range(1, 17), "warps per CTA")
tile = p.variable("tile", [8, 16, 32, 64], "units of a warp", prefer="largest")
p.add("cover", warps * tile >= head_dim)
p.add("shared memory", warps * tile * head_dim * 2 + 1024 <= 227 * 1024, unit="bytes")
print(p.minimize((warps * tile, warps)))  # the smallest padding, then the fewest warps
"""

from .conditions import AllOf, AnyOf, Condition, all_of, any_of
from .conflict import Infeasible
from .expressions import Comparison, Constant, Expression, Power, Product, Quotient, Remainder, Sum, Variable
from .functions import Extremum, Lookup, ceil_div, lookup, maximum, minimum
from .problem import ConstraintProblem, Solution
from .source import compile_value

__all__ = [
    "AllOf",
    "AnyOf",
    "Comparison",
    "Condition",
    "Constant",
    "ConstraintProblem",
    "Expression",
    "Extremum",
    "Infeasible",
    "Lookup",
    "Power",
    "Product",
    "Quotient",
    "Remainder",
    "Solution",
    "Sum",
    "Variable",
    "all_of",
    "any_of",
    "ceil_div",
    "compile_value",
    "lookup",
    "maximum",
    "minimum",
]
