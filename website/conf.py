"""Sphinx's configuration; ``python -m website`` writes what it reads into a folder and calls it there."""

project = "Distributed Training Labs"
html_title = project
author = "the authors of the Distributed Training Labs"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# The notebooks' stored outputs are shown; none is run here.
nb_execution_mode = "off"
nb_merge_streams = True
# Blocks without a language are commands and tables.
highlight_language = "none"
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "class"
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["labs.css"]
html_js_files = ["labs.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
