"""All private interfaces of numba that this package uses: compiler passes that take half the time of numba's own.

numba optimizes each function and generates its machine code before it compiles the callers. These passes link a
function into its callers without optimization and optimize a kernel once, together with everything that it calls.
Without these interfaces, kernels/header.py uses numba's own passes, with the same results.
"""

from numba import _dynfunc
from numba.core import typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass


class _Library(JITCodeLibrary):
    """The LLVM module of a function, for which no machine code is generated."""

    def _optimize_functions(self, ll_module) -> None:
        """Set the data layout only."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _FunctionLowering(typed_passes.NativeLowering):
    _name = "function_lowering"

    def run_pass(self, state) -> bool:
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        made, library = state.cr, state.library
        names = made.fndesc.lookup_module(), made.fndesc.qualname, ""
        function = _dynfunc.make_function(*names, 0, made.env, (library,))  # never called from Python
        state.targetctx.insert_user_function(function, made.fndesc, [library])
        state.cr = made._replace(cfunc=function)
        return True


class Kernel(CompilerBase):
    """The compiler of kernels. Of numba's about thirty passes, it runs those that the code in kernels/ needs."""

    lowering = typed_passes.NativeLowering

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager(type(self).__name__)
        for one in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.ReconstructSSA,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            typed_passes.AnnotateTypes,
            self.lowering,
            typed_passes.NoPythonBackend,
        ):
            passes.add_pass(one, one.__name__)
        passes.finalize()
        return [passes]


class Function(Kernel):
    """The compiler of functions that kernels call."""

    lowering = _FunctionLowering
