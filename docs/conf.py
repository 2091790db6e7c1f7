"""How Sphinx makes the site out of this folder: `make docs`."""

project = "hf_zero"
html_title = "hf_zero"
extensions = ["myst_parser"]
exclude_patterns = []
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
# Headings can be linked to as on GitHub: page.md#heading.
myst_heading_anchors = 4
