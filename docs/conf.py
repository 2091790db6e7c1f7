"""How Sphinx makes the site out of this folder: `make docs`."""

import logging
import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # docstrings.py, and the package
for name in (
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
):  # TRL brings them; they talk
    logging.getLogger(name).setLevel(logging.ERROR)

project = "hf_zero"
html_title = "hf_zero"
extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "sphinx.ext.napoleon"]
exclude_patterns = []
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
# Headings can be linked to as on GitHub: page.md#heading.
myst_heading_anchors = 4
add_module_names = False
autodoc_typehints = "none"  # the docstrings say them
autodoc_member_order = "bysource"
napoleon_use_param = False
napoleon_use_rtype = False
