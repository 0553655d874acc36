"""All private interfaces of numba that this package uses: passes that compile a kernel in half of the time.

numba optimizes every function, and makes machine code of it, before the functions that call it. Here a function is
linked into its callers as it is, and a kernel is optimized once, with all that it calls. Without these interfaces
kernels/header.py takes numba's own passes, which give the same results.
"""

from numba import _dynfunc
from numba.core import typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass


class _Library(JITCodeLibrary):
    """The code of a function, without machine code of its own."""

    def _optimize_functions(self, ll_module) -> None:
        """Optimize nothing, but name the layout of data."""
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
        function = _dynfunc.make_function(*names, 0, made.env, (library,))  # which Python never calls
        state.targetctx.insert_user_function(function, made.fndesc, [library])
        state.cr = made._replace(cfunc=function)
        return True


class Kernel(CompilerBase):
    """The passes that the language of kernels/ needs, of about thirty."""

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
    """The passes for a function that kernels call."""

    lowering = _FunctionLowering
