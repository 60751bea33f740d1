"""Edits of a model: blocks that it keeps, and runs in every later trace and call. Copies of the model have them, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..envoy.envoy import Envoy, EnvoyClasses
from ..late_binding import late
from ..runtime.editing import Edit, EditingTracer
from ..runtime.uncompiled import leave_to_python, uncompiled
from ..tracing import Backend

if TYPE_CHECKING:
    from .base import NNsight


class Editable(Envoy):
    """The part of :class:`~.base.NNsight` that keeps edits."""

    _edits: list[Edit]
    _compiled_edits: Any
    #: The tensors and floats that compiled edits take from outside, by name: a mutable mapping. ``steered.params["alpha"] = 6.0``, or an
    #: in-place edit of a tensor, takes effect at the next call without a compilation. It exists after :meth:`.NNsight.compile`.
    params: Any

    @uncompiled
    def edit(self, *, inplace: bool = False, backend: Backend | None = None) -> EditingTracer:
        """Keep a block, and run it in every later trace and call of the model.

        Args:
            inplace: Edit this object. By default, the block goes to a copy, which ``as`` binds. The copy shares modules,
                weights and compiled graphs with this object.
            backend: Gets the block, and keeps it by running the tracer. By default the block is kept right away.

        Example:
            >>> model = NNsight(torch.nn.Linear(2, 2))
            >>> with model.edit() as edited:
            ...     model.output[:] = 0
        """
        leave_to_python("model.edit()")
        edited = self if inplace else self._edited_copy()
        return EditingTracer(edited._edits, edited, backend)

    def _edited_copy(self) -> Any:
        """Return a copy with edits of its own, which shares modules, weights and compiled graphs with this object."""
        edited = object.__new__(type(self))
        edited.__dict__.update(self.__dict__, _children=dict(self._children), _aliases=set(self._aliases))
        edited.__dict__.update(_edits=[edit.of(edited) for edit in self._edits], _compiled_edits=None)
        edited.__dict__.pop("params", None)
        if self in self._tree.roots:  # false for a component
            edited._tree.roots.add(edited)
        return edited

    def apply(self, program: Any) -> Any:
        """Return a copy of this model that runs a :class:`nnsight.Program` in each of its traces and calls, as :meth:`edit` does.

        Any other argument is passed to ``torch.nn.Module.apply``; the result is then this model.

        Raises:
            InvalidProgramError: If this model lacks a part that the program names.
        """
        if not hasattr(program, "apply_to"):
            self._module.apply(program)
            return self
        return program.apply_to(self)

    @uncompiled
    def bake(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return a copy of the module with the edits as hooks: a plain ``torch.nn.Module``, which shares the weights with this model.

        Modules with hooks get a subclass of their class, so that torch does not use compiled code of other modules for them.

        The tensors and floats that the edits take from outside become buffers of the copy, or parameters if they require gradients:
        ``edit_alpha`` for ``alpha``. The copy works with ``torch.compile(fullgraph=True)``, ``torch.export.export`` and ``generate`` of
        transformers. The result of ``torch.export`` does not need nnsight.

        Args:
            *args: An example of the input, as for :meth:`trace`. Its values do not matter. Most models of transformers that read only
                text need none.
            **kwargs: Likewise, by name.

        Raises:
            ValueError: If the model has no edits, or there is no example.
            NotExpressibleError: If an edit needs values, or Python that a program cannot express.
            InvalidProgramError: If an edit does something that a module cannot do, such as computing gradients or printing.

        Example:
            >>> with model.edit() as steered:
            ...     model.transformer.h[5].output[:, -1] += alpha * direction
            >>> torch.export.export(steered.bake(), (ids,))
        """
        baked: torch.nn.Module = late("baked_edits")(self, args, kwargs)
        return baked

    def clear_edits(self) -> None:
        """Remove all edits of this object, in place."""
        self._edits.clear()

    def export_edits(
        self,
        name: str | os.PathLike[str] | None = None,
        export_dir: str | os.PathLike[str] | None = None,
        variant: str = "__default__",
    ) -> Path:
        """Write the edits of this model to a file, from which another process can import them.

        An edit is written as the text of its block, with the current values of its variables and of the globals that it
        uses: tensors, plain data, parts of this model (as their paths), and functions, classes and Python modules (as their
        import names). The file is a safetensors file; nothing is pickled.

        Args:
            name: Name of the model that the edits are for; by default that of the repository it was loaded from, else of
                its class. A path, or a name that ends in ``.safetensors``, is the file itself.
            export_dir: Folder of exports; by default ``nnsight/edits`` in the user's cache folder.
            variant: Name of this set of edits among those of ``name``.

        Returns:
            The file: ``export_dir/name/variant.safetensors``.

        Raises:
            ValueError: If the model has no edits, or the arguments contradict each other.
            TypeError: If an edit uses a value that cannot be written; the message names the variable.
        """
        from .edit_files import edit_file, write_edits

        model: Any = self
        path = edit_file(model, name, export_dir, variant)
        write_edits(model, path)
        return path

    def import_edits(
        self,
        name: str | os.PathLike[str] | None = None,
        export_dir: str | os.PathLike[str] | None = None,
        variant: str = "__default__",
    ) -> None:
        """Append exported edits to the edits of this model, in place; arguments are those of :meth:`export_edits`.

        An edit is Python code, which runs in every later trace. Python modules that it uses are imported right away. Import
        edits only from people whose Python scripts you would run.

        Raises:
            FileNotFoundError: If there is no such export.
            ValueError: If the file is damaged, or an edit names a part that this model does not have. The edits of this
                model then stay as they are.
            ImportError: If an edit uses a function, class or module that cannot be imported here. Likewise.
        """
        from .edit_files import edit_file, read_edits

        model: Any = self
        self._edits.extend(read_edits(model, edit_file(model, name, export_dir, variant)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle the module with the options of this object; a copy gets new envoys and compiles anew."""
        kind = next(base for base in type(self).__mro__ if "_moved" not in vars(base))
        own = {"_module", "_own_tree", "_children", "_envoys", "_version", "_path", "_aliases", "_shown_envoys", "_tree_of_root"}
        own |= {"_compiled", "_compiled_edits", "params", "_pipeline"}
        state = {
            name: value for name, value in self.__dict__.items() if name not in own and not isinstance(value, Envoy)
        }
        from .edit_files import PortableEdits

        model: Any = self
        state["_edits"] = PortableEdits(model)
        options = None if self._compiled is None else self._compiled.options
        return _rebuild, (kind, self._module, self._envoys, options, state)


def _rebuild(
    kind: type[NNsight],
    module: torch.nn.Module,
    envoys: EnvoyClasses,
    compile_options: dict[str, Any] | None,
    state: dict[str, Any],
) -> NNsight:
    """Return a wrapper from the result of :meth:`Editable.__reduce_ex__`."""
    kind = late("root_class")(kind)
    made = kind.__new__(kind)
    made.__dict__.update(state, _compiled=None, _compiled_edits=None)
    made._mount(module, envoys, compile_options)
    made.__dict__["_edits"] = state["_edits"](made)
    return made
