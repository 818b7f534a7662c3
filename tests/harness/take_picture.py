"""Takes the README's picture again: ``make picture``. JupyterLab in Chromium shows a lab as it is stored.

Two views of one notebook lie side by side: on the left a proof and a guess, on the right the figure that answers it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.browser import Browser
from harness.lab_server import ROOT, TOKEN, wait_for_server
from nodelaunch.node.probe import find_free_port

PICTURE = ROOT / "notebooks" / "figures" / "learner.png"
LAB, LEFT, RIGHT = "05_ddp_two_nodes.ipynb", "proof", "scaling-figure"
SIZE = (1640, 820)
OPEN = """(async () => {
  await jupyterapp.restored;
  const pause = () => new Promise(done => setTimeout(done, 1500));
  if (!jupyterapp.shell.leftCollapsed) await jupyterapp.commands.execute('application:toggle-left-area');
  const left = await jupyterapp.commands.execute('docmanager:open', {path: '%(lab)s', factory: 'Notebook'});
  await left.context.ready;
  await jupyterapp.commands.execute('docmanager:clone');
  await pause();
  const right = [...jupyterapp.shell.widgets('main')].find(panel => panel !== left && panel.content?.widgets);
  left.toolbar.hide();
  right.toolbar.hide();
  for (const round of [1, 2, 3]) {  // a view that was never shown lays its cells out while it scrolls
    for (const [panel, id] of [[left, '%(left)s'], [right, '%(right)s']]) {
      const index = panel.content.widgets.findIndex(cell => cell.model.id === id);
      await panel.content.scrollToItem(index, 'start');
      await pause();
      panel.content.widgets[index].outputArea.node.scrollIntoView();
    }
    await pause();
  }
})()"""


def main() -> None:
    port = find_free_port()
    settings = ["--LabApp.expose_app_in_browser=True", f"--IdentityProvider.token={TOKEN}", "--no-browser"]
    settings += [f"--ServerApp.port={port}", f"--ServerApp.root_dir={ROOT / 'notebooks'}", "--allow-root"]
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        home = Path(folder)
        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "HOME")
        environment = os.environ | dict.fromkeys(names, folder)
        with (home / "log").open("wb") as log:
            command = [sys.executable, "-m", "jupyterlab", *settings]
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_server(f"{url}/api/status?token={TOKEN}", server, home / "log")
            with Browser(home / "profile", size=SIZE) as browser:
                page = browser.open(f"{url}/lab/workspaces/picture?token={TOKEN}")
                page.wait_for("window.jupyterapp !== undefined", timeout=120)
                page.evaluate(OPEN % {"lab": LAB, "left": LEFT, "right": RIGHT}, timeout=120)
                time.sleep(3)
                page.screenshot(PICTURE)
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
