"""Takes bars of progress that have ended out of a notebook, for whoever opens it again.

A bar with ``leave=False`` closes its widget, and the notebook goes on naming that. On the next evening JupyterLab would
show *Error displaying widget: model not found* in its place.
"""

from __future__ import annotations

import sys
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"


def clear_ended_bars() -> None:
    """Changes tqdm's bars of this kernel; outside of a notebook there is nothing to do."""
    if "ipykernel" not in sys.modules:
        return
    from IPython.display import display
    from tqdm import notebook

    class Box(notebook.TqdmHBox):
        """A bar whose output names no widget any more when it is closed: JupyterLab hides such an output."""

        shown: Any = None

        def close(self) -> None:
            super().close()
            if self.shown:
                (handle, data), self.shown = self.shown, None
                # The text stays: outputs that are stored are compared by it.
                handle.update(data | {VIEW: data[VIEW] | {"model_id": ""}}, raw=True)

    def show(box: Box) -> None:
        box.shown = display(box, display_id=True), box._repr_mimebundle_()

    notebook.TqdmHBox, notebook.display = Box, show
